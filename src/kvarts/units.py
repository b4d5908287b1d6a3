"""Sizes, rates and durations with units, as users write them."""

from __future__ import annotations

import re

from kvarts.errors import ConfigError
from kvarts.limits import MOST_BYTES, MOST_SECONDS, brief

__all__ = ["meant_size", "parse_bytes", "parse_duration_s", "parse_rate"]

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)(b?)\s*", re.IGNORECASE)
_NUMBER = r"([0-9]+(?:\.[0-9]+)?)"
_DURATION = re.compile(rf"\s*(?:([0-9]+)d)?\s*(?:{_NUMBER}h)?\s*(?:{_NUMBER}m)?\s*(?:{_NUMBER}s?)?\s*")
_SECONDS = (86400, 3600, 60, 1)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_bytes(text: str) -> int:
    """Return the bytes of `64GiB` (binary), `50GB` or `50G` (decimal), `4096`, in capitals or not.

    Raise ConfigError for anything else, also for `64Gb`, which may stand for bits.
    """
    match = _SIZE.fullmatch(text)
    if match is None or (match[3] and not match[2]):
        raise ConfigError(f"{brief(text)} is not a size in bytes", hint="Write 64GiB, 500MB or a number of bytes.")
    if match[2].isupper() and match[4] == "b":
        raise ConfigError(f"{brief(text)} may stand for bits", hint=f"Write {match[1]}{match[2]}{match[3]}B for bytes.")
    unit: int = (1024 if match[3] else 1000) ** _POWERS[match[2].lower()]
    size = float(match[1]) * unit
    if size > MOST_BYTES:
        raise ConfigError(f"{brief(text)} is more than {MOST_BYTES:,} bytes")
    return round(size)


def meant_size(size: str | int, least_bytes: int) -> str:
    """Return what to write for a `size` that is below `least_bytes`: a bare number most often lacks its unit."""
    number = str(size).strip().rstrip("bB").strip()
    if number.isdecimal() and len(number) <= 6 and int(number):
        return f"Did you mean {number}GiB?"
    return f"Give {least_bytes:,} bytes or more, such as 64GiB."


def parse_rate(text: str) -> int:
    """Return bytes a second of `50GB/s`, or of a size as `parse_bytes` takes it. Raise ConfigError otherwise."""
    size = text.strip()
    per_second = size[-2:].lower() == "/s"
    try:
        return parse_bytes(size[:-2] if per_second else size)
    except ConfigError as error:
        hint = error.hint if "bits" in error.what else "Write 50GB/s, 25GiB/s or a number of bytes."
        raise ConfigError(f"{brief(text)} is not a bandwidth", hint=hint) from None


def parse_duration_s(text: str) -> float:
    """Return the seconds of `4h`, `1h30m`, `90s`, `2d`, or of a number. Raise ConfigError for anything else."""
    match = _DURATION.fullmatch(text)
    if match is None or not any(match.groups()):
        raise ConfigError(f"{brief(text)} is not a duration", hint="Write 4h, 1h30m, 90s or a number of seconds.")
    seconds = sum(float(part) * unit for part, unit in zip(match.groups(), _SECONDS, strict=True) if part)
    if seconds > MOST_SECONDS:
        raise ConfigError(f"{brief(text)} is more than {MOST_SECONDS:g} seconds")
    return seconds

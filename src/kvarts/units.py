"""Sizes, rates and durations with units, as users write them."""

from __future__ import annotations

import re

from kvarts.errors import ConfigError
from kvarts.limits import MOST_BYTES, MOST_SECONDS, brief

__all__ = ["parse_bytes", "parse_duration_s", "parse_rate"]

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kKMGT]?)(i?)(B?)\s*")
_NUMBER = r"([0-9]+(?:\.[0-9]+)?)"
_DURATION = re.compile(rf"\s*(?:([0-9]+)d)?\s*(?:{_NUMBER}h)?\s*(?:{_NUMBER}m)?\s*(?:{_NUMBER}s?)?\s*")
_SECONDS = (86400, 3600, 60, 1)
_POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_bytes(text: str) -> int:
    """Return the bytes of `64GiB` (binary), `50GB` or `50G` (decimal), `4096`. Raise ConfigError for anything else."""
    match = _SIZE.fullmatch(text)
    if match is None or (match[3] and not match[2]):
        raise ConfigError(f"{brief(text)} is no size in bytes", hint="Write 64GiB, 500MB or a number of bytes.")
    unit: int = (1024 if match[3] else 1000) ** _POWERS[match[2]]
    size = float(match[1]) * unit
    if size > MOST_BYTES:
        raise ConfigError(f"{brief(text)} is more than {MOST_BYTES:,} bytes")
    return round(size)


def parse_rate(text: str) -> int:
    """Return bytes a second of `50GB/s`, or of a size as `parse_bytes` takes it. Raise ConfigError otherwise."""
    try:
        return parse_bytes(text.strip().removesuffix("/s"))
    except ConfigError:
        raise ConfigError(
            f"{brief(text)} is no bandwidth", hint="Write 50GB/s, 25GiB/s or a number of bytes."
        ) from None


def parse_duration_s(text: str) -> float:
    """Return the seconds of `4h`, `1h30m`, `90s`, `2d`, or of a number. Raise ConfigError for anything else."""
    match = _DURATION.fullmatch(text)
    if match is None or not any(match.groups()):
        raise ConfigError(f"{brief(text)} is no duration", hint="Write 4h, 1h30m, 90s or a number of seconds.")
    seconds = sum(float(part) * unit for part, unit in zip(match.groups(), _SECONDS, strict=True) if part)
    if seconds > MOST_SECONDS:
        raise ConfigError(f"{brief(text)} is more than {MOST_SECONDS:g} seconds")
    return seconds

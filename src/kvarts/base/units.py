"""Sizes, rates and durations with units: parsing user input, and uniform formatting."""

from __future__ import annotations

import re

from kvarts.base.errors import ConfigError
from kvarts.base.limits import MOST_BYTES, MOST_SECONDS, brief, whole_number

__all__ = ["as_duration", "as_memory", "as_number", "as_percent", "meant_size", "parse_bytes", "parse_delay_ms"]
__all__ += ["parse_duration_s", "parse_rate", "to_ns"]

# Patterns are compiled on first use: a command that is given no size or duration does without.
_SIZE = r"(?i)\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)(b?)\s*"
_NUMBER = r"([0-9]+(?:\.[0-9]+)?)"
_DURATION = rf"\s*(?:([0-9]+)d)?\s*(?:{_NUMBER}h)?\s*(?:{_NUMBER}m)?\s*(?:{_NUMBER}s?)?\s*"
_DELAY = rf"(?i)\s*{_NUMBER}\s*(us|ms|s)?\s*"
_SECONDS = (86400, 3600, 60, 1)
MOST_DIGITS = 9
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_bytes(text: str) -> int:
    """Return the bytes of `64GiB` (binary), `50GB` or `50G` (decimal), or `4096`, in any case.

    Raise ConfigError for anything else, including `64Gb`, which might mean bits.
    """
    match = re.fullmatch(_SIZE, text)
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
    """Return a hint for a `size` below `least_bytes`: a bare number usually lacks its unit."""
    number = str(size).strip().rstrip("bB").strip()
    if len(number) <= 6 and whole_number(number):
        return f"Did you mean {number}GiB?"
    return f"Give {least_bytes:,} bytes or more, such as 64GiB."


def parse_rate(text: str) -> int:
    """Return the bytes per second of `50GB/s`, or of a size as in `parse_bytes`. Raise ConfigError otherwise."""
    size = text.strip()
    per_second = size[-2:].lower() == "/s"
    try:
        return parse_bytes(size[:-2] if per_second else size)
    except ConfigError as error:
        hint = error.hint if "bits" in error.what else "Write 50GB/s, 25GiB/s or a number of bytes."
        raise ConfigError(f"{brief(text)} is not a bandwidth", hint=hint) from None


def parse_duration_s(text: str) -> float:
    """Return the seconds of `4h`, `1h30m`, `90s`, `2d`, or of a number. Raise ConfigError for anything else."""
    match = re.fullmatch(_DURATION, text)
    if match is None or not any(match.groups()):
        raise ConfigError(f"{brief(text)} is not a duration", hint="Write 4h, 1h30m, 90s or a number of seconds.")
    seconds = sum(float(part) * unit for part, unit in zip(match.groups(), _SECONDS, strict=True) if part)
    if seconds > MOST_SECONDS:
        raise ConfigError(f"{brief(text)} is more than {MOST_SECONDS:g} seconds")
    return seconds


def parse_delay_ms(text: str) -> float:
    """Return the milliseconds of `50ms`, `200us`, `1.5s`, or of a number. Raise ConfigError for anything else."""
    match = re.fullmatch(_DELAY, text)
    if match is None:
        raise ConfigError(f"{brief(text)} is not a delay", hint="Write 50ms, 200us, 1.5s or a number of milliseconds.")
    return float(match[1]) * {"us": 1e-3, "s": 1e3}.get((match[2] or "ms").lower(), 1.0)


# Formatting -----------------------------------------------------------------------------------------------


def as_duration(ms: float | None) -> str:
    """Return a time in readable units: `75.0 ms`, `9.77 s`, `49 min 25 s`; `-` for None."""
    if ms is None:
        return "-"
    if ms < 999.95:
        return f"{ms:,.1f} ms" if ms >= 0.1 or not ms else f"{ms:,.4f} ms"
    seconds = ms / 1e3
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 2 * 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole / 86400:,.1f} days"


def as_hits(ratio: float | None) -> str:
    """Return a hit ratio as `as_percent` does; `unknown` for None."""
    return "unknown" if ratio is None else as_percent(ratio)


def as_percent(ratio: float | None, *, bound: float | None = None) -> str:
    """Return a ratio in per cent: `85.9 %`; `-` for None.

    If it is below `bound`, it has enough digits to show that: `94.98 %` for a bound of 95 %.
    """
    if ratio is None:
        return "-"
    digits = 1
    while bound is not None and ratio < bound and round(ratio * 100, digits) >= bound * 100 and digits < MOST_DIGITS:
        digits += 1
    return f"{ratio * 100:,.{digits}f} %"


def as_number(value: float | None) -> str:
    """Return a rate or a mean with its significant digits; `-` for None."""
    if value is None:
        return "-"
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def as_memory(num_bytes: float) -> str:
    """Return an amount of memory: `55.5 GiB`, or in MiB or KiB if smaller."""
    if num_bytes >= 1 << 30:
        return f"{num_bytes / (1 << 30):,.1f} GiB"
    return f"{num_bytes / (1 << 20):,.1f} MiB" if num_bytes >= 1 << 17 else f"{num_bytes / (1 << 10):,.1f} KiB"


def to_ns(value: float, unit_ns: int) -> int:
    """Return `value` units of `unit_ns` each, to the nanosecond: the product of two floats has only 53 bits."""
    whole = int(value)
    return whole * unit_ns + round((value - whole) * unit_ns)

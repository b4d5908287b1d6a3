"""Numeric limits, defined once. Values are checked against them on construction, in all rooms.

Within these limits, every sum and product in kvarts fits 64 bits, and everything allocated in advance fits memory.
"""

from __future__ import annotations

from typing import Any, Final

from kvarts.base.errors import ConfigError

__all__ = [
    "DRAFT_METHODS",
    "LATEST_NS",
    "MOST_BYTES",
    "MOST_BYTES_PER_TOKEN",
    "MOST_COUNT",
    "MOST_DIGITS",
    "MOST_DRAFTED",
    "MOST_LAYERS",
    "MOST_MS",
    "MOST_PAGES",
    "MOST_PAGE_TOKENS",
    "MOST_REPLICAS",
    "MOST_REQUESTS",
    "MOST_SECONDS",
    "MOST_SEED",
    "MOST_SHOWN",
    "MOST_UINT32",
    "MOST_UINT64",
    "MOST_WORKERS",
    "TooLateError",
    "brief",
    "check_number",
    "check_whole",
    "whole_number",
]

MOST_COUNT: Final = (1 << 31) - 1
"""Tokens of a request or a step, concurrent requests, and all other counts."""
MOST_PAGE_TOKENS = 1 << 20
"""Tokens per page."""
MOST_PAGES = 1 << 40
MOST_BYTES = 1 << 60
"""Bytes of a memory, or bytes per second: an exbibyte."""
MOST_BYTES_PER_TOKEN = 1 << 40
MOST_DRAFTED = 64
DRAFT_METHODS = ("mtp", "eagle", "eagle3", "ngram")
"""What drafts in a start of vLLM: layers with KV, or n-grams."""
MOST_LAYERS = 10_000
MOST_REPLICAS = 4_096
MOST_REQUESTS = 10_000_000
"""Requests generated from a description of traffic."""
MOST_MS = 1e12
"""A time in a setting: 31 years."""
MOST_SECONDS = 1e9
"""The same in seconds."""
MOST_SEED = (1 << 63) - 1
MOST_UINT32 = (1 << 32) - 1
MOST_UINT64 = (1 << 64) - 1
MOST_WORKERS = 1_024
"""Processes that share the work of a command."""
"""Limit of fields in messages. A client may request this many tokens to mean as many as there is room for."""
LATEST_NS: Final = 1 << 61
"""Virtual time: 73 years after its start."""

MOST_SHOWN = 40
MOST_DIGITS = 18
"""Of a number in a text. Python refuses to convert thousands, and no limit here has more."""


class TooLateError(ConfigError):
    """A replay that lasts longer than virtual time can count."""

    def __init__(self) -> None:
        super().__init__(
            f"the replay lasts longer than {LATEST_NS / 1e9 / 86400 / 365:.0f} years",
            hint="Are times in another unit than they should be, or a cost or a bandwidth far from real?",
        )


def whole_number(text: str) -> int | None:
    """Return the number that `text` consists of, in up to 18 decimal digits of ASCII; None for any other text."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS else None


def brief(value: Any) -> str:
    """Return a value for an error message, shortened to a few characters."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length() * 30103 // 100000 + 1} digits"
    text = str(value) if isinstance(value, int | float) else repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def check_whole(value: Any, field: str, *, least: int = 1, most: int = MOST_COUNT) -> None:
    """Raise ConfigError for `field` unless `value` is a whole number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"must be a whole number, got {brief(value)}", field=field)
    if value < least:
        raise ConfigError(f"must be at least {least}, got {brief(value)}", field=field)
    if value > most:
        raise ConfigError(f"must be at most {most:,}, got {brief(value)}", field=field)


def check_number(value: Any, field: str, *, least: float = 0.0, most: float, above: bool = False) -> None:
    """Raise ConfigError for `field` unless `value` is a number from `least`, or `above` it, to `most`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"must be a number, got {brief(value)}", field=field)
    if not (value > least if above else value >= least):
        raise ConfigError(f"must be {'above' if above else 'at least'} {least:g}, got {brief(value)}", field=field)
    if value > most:
        raise ConfigError(f"must be at most {most:g}, got {brief(value)}", field=field)

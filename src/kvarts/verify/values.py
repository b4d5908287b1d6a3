"""JSON values with two things that plain decoding hides: repeated keys of an object, and numbers of any length."""

from __future__ import annotations

import json
from typing import Any

import msgspec

__all__ = ["JSON_ERRORS", "Twice", "any_value", "check", "why_not"]

JSON_ERRORS = (msgspec.DecodeError, RecursionError, ValueError)
LONGEST_NUMBER = 400
"""Digits kept of a whole number. A number that long is above every limit."""

_raw = msgspec.json.Decoder(msgspec.Raw)


class Twice(dict[str, Any]):
    """An object with repeated keys, listed in `names`; it holds the last value of each."""

    names: list[str]


def any_value(text: bytes) -> Any:
    """Return the value of a JSON text. Raise one of JSON_ERRORS."""
    check(text)
    return _decoder.decode(text.decode())


def check(text: bytes) -> None:
    """Raise one of JSON_ERRORS if `text` is not JSON; build no value."""
    _raw.decode(text)


def why_not(error: Exception) -> str:
    """Return the text of one of JSON_ERRORS, for a message."""
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) == len(pairs):
        return value
    seen: set[str] = set()
    twice = Twice(value)
    twice.names = sorted({name for name, _ in pairs if name in seen or seen.add(name)})  # type: ignore[func-returns-value]
    return twice


def _whole(digits: str) -> int:
    return int(digits[:LONGEST_NUMBER])


_decoder = json.JSONDecoder(object_pairs_hook=_object, parse_int=_whole)

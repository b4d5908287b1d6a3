"""Decoding and conversion by type, for processes in which several threads do this; and lenient JSON."""

from __future__ import annotations

import json
import re
from threading import Lock
from typing import Any, TypeVar

import msgspec

__all__ = ["UNDECODED", "convert", "decode_json", "decoder_of"]

T = TypeVar("T")
UNDECODED = (msgspec.DecodeError, UnicodeError, RecursionError)
"""Errors of a decoder for what it is not: other bytes, no text, or nested too deeply, even where it is skipped."""
_DECODERS: dict[Any, msgspec.json.Decoder[Any]] = {}
_MAKING = Lock()
_SURROGATE = re.compile("[\\ud800-\\udfff]")


def decoder_of(kind: type[T]) -> msgspec.json.Decoder[T]:
    """Return the decoder of `kind`, which one thread makes, once.

    msgspec collects the fields of a struct when the struct is first used. If a second thread uses the struct meanwhile,
    the process ends with a segmentation fault (msgspec 0.22).
    """
    decoder = _DECODERS.get(kind)
    if decoder is None:
        with _MAKING:
            decoder = _DECODERS.get(kind)
            if decoder is None:
                decoder = _DECODERS[kind] = msgspec.json.Decoder(kind)
    return decoder


def convert(value: Any, kind: type[T]) -> T:
    """Convert JSON values to `kind`. Raise msgspec.ValidationError for a value of another type."""
    decoder_of(kind)  # so that no other thread prepares the type meanwhile
    return msgspec.convert(value, kind)


def decode_json(data: bytes) -> Any:
    """Decode JSON as Python and JavaScript write it.

    This includes NaN and Infinity, and halves of surrogate pairs, where a text was cut: these become U+FFFD, since
    text cannot contain them. Raise ValueError for anything else that is not JSON, RecursionError if it is too deep.
    """
    value = json.loads(data)
    text = json.dumps(value, ensure_ascii=False)
    return json.loads(_SURROGATE.sub("\ufffd", text)) if _SURROGATE.search(text) else value

"""Decoding and conversion by type, for processes in which several threads do this."""

from __future__ import annotations

from threading import Lock
from typing import Any, TypeVar

import msgspec

__all__ = ["convert", "decoder_of"]

T = TypeVar("T")
_DECODERS: dict[Any, msgspec.json.Decoder[Any]] = {}
_MAKING = Lock()


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

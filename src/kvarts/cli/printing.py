"""Printing of results on standard output."""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from kvarts.errors import OutputError

__all__ = ["print_bytes", "print_json"]


def print_bytes(text: bytes) -> None:
    """Write to standard output. Raise OutputError if that fails."""
    try:
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", path="standard output") from error


def print_json(value: Any) -> None:
    """Print one JSON value on standard output, indented, with a newline."""
    print_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")

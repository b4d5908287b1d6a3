"""Output of commands on standard output."""

from __future__ import annotations

import sys
from typing import Any

import msgspec

__all__ = ["print_json"]


def print_json(value: Any) -> None:
    """Print one JSON value to standard output, indented, with a line end."""
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
    sys.stdout.buffer.flush()

"""Printing of results on standard output."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click
import msgspec

from kvarts.errors import OutputError

if TYPE_CHECKING:
    from kvarts.sim.config import ReplayConfig

__all__ = ["print_bytes", "print_json", "tell_whole_pages"]


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


def tell_whole_pages(config: ReplayConfig, of: str = "the model") -> None:
    """Say why pages are whole, though layers keep less and KV groups are the default."""
    if config.whole_pages:
        click.echo(f"kvarts: pages are whole, though layers of {of} keep less: {config.whole_pages}", err=True)

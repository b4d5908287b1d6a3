"""kvarts' log messages on standard error, while a command runs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from kvarts.sim.config import ReplayConfig

__all__ = ["narrate", "tell_whole_pages"]


class _Narrator(logging.Handler):
    """A log handler that prints kvarts' messages on standard error, in the form of a command's own lines."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        click.echo(f"kvarts: {record.getMessage()}", err=True)


def narrate() -> None:
    """Send kvarts' log to standard error from now on: messages about long work, and warnings about a model."""
    logger = logging.getLogger("kvarts")
    if not any(isinstance(handler, _Narrator) for handler in logger.handlers):
        logger.addHandler(_Narrator())
        logger.setLevel(logging.INFO)
        logger.propagate = False


def tell_whole_pages(config: ReplayConfig, of: str = "the model") -> None:
    """Say why pages are whole, though layers keep less and KV groups are the default."""
    if config.whole_pages:
        click.echo(f"kvarts: pages are whole, though layers of {of} keep less: {config.whole_pages}", err=True)

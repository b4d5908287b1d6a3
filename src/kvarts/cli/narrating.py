"""kvarts' log messages on standard error, while a command runs."""

from __future__ import annotations

import logging

import click

__all__ = ["narrate"]


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

"""What kvarts logs while it works, on standard error."""

from __future__ import annotations

import logging

import click

__all__ = ["narrate"]


class _Narrator(logging.Handler):
    """Writes what kvarts logs to standard error, as commands narrate."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        click.echo(f"kvarts: {record.getMessage()}", err=True)


def narrate() -> None:
    """Let what kvarts logs go to standard error from now on: what takes long, and what a model has to say."""
    logger = logging.getLogger("kvarts")
    if not any(isinstance(handler, _Narrator) for handler in logger.handlers):
        logger.addHandler(_Narrator())
        logger.setLevel(logging.INFO)
        logger.propagate = False

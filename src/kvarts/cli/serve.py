"""`kvarts serve`: doors of an engine."""

from __future__ import annotations

import click

from kvarts.cli.serve_sessions import sessions_command

__all__ = ["serve_command"]


@click.group("serve")
def serve_command() -> None:
    """Serve a model, or a mock of one, until SIGTERM or SIGINT."""


serve_command.add_command(sessions_command)

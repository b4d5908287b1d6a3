"""`kvarts serve`: servers of models and of sessions."""

from __future__ import annotations

import click

from kvarts.cli import (
    serve_model,
    serve_sessions,
)
from kvarts.cli.options import Group

__all__ = ["serve_command"]


class Doors(Group):
    """A group whose first command is the default, if options are given in place of a name."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert the default command's name before options."""
        if args and args[0].startswith("-") and args[0] not in ctx.help_option_names and self.commands:
            args = [next(iter(self.commands)), *args]
        return super().parse_args(ctx, args)


@click.group("serve", cls=Doors)
def serve_command() -> None:
    """Serve a model, or a mock of one, until SIGTERM or SIGINT.

    `kvarts serve --model DIR` is `kvarts serve model --model DIR`. A mock over HTTP is `kvarts mock`.
    """


serve_command.add_command(serve_model.model_command)
serve_command.add_command(serve_sessions.sessions_command)

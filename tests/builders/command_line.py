"""What a command line says, without running it."""

from __future__ import annotations

from kvarts.base.settings import Given, given_by_flags
from kvarts.cli.replay import ReplayCommand, replay_command
from kvarts.cli.replaying import all_sections

__all__ = ["parsed"]


def parsed(*arguments: str) -> Given:
    """What `kvarts replay` is given with these arguments."""
    context = replay_command.make_context("replay", list(arguments))
    given = given_by_flags(context.params, all_sections())
    assert isinstance(context.command, ReplayCommand)
    for part in context.command.parts:
        given = part.given(context.params).over(given)
    return given

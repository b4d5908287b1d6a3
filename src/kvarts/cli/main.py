"""`kvarts`: the group of commands, and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import gc
import sys

import click

from kvarts import __version__
from kvarts.cli.replay import replay_command
from kvarts.errors import KvartsError

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="kvarts")
def cli() -> None:
    r"""KV-cache engine for LLM serving: planning, testing and proving KV memory.

    \b
    Exit codes: 0 ok, 2 bad usage, 3 missing file, 4 unreadable input,
    5 violated, 6 inconclusive, 7 I/O error.
    """


cli.add_command(replay_command)


def main() -> None:
    """Entry point of the `kvarts` script."""
    gc.disable()  # a command makes many objects that live to its end, and no cycles worth looking for
    try:
        cli()
    except KvartsError as error:
        click.echo(f"kvarts: {error}", err=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has gone; nothing is left to say
        sys.exit(7)

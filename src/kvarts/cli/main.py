"""`kvarts`: the group of commands, and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from importlib import import_module

import click

from kvarts import __version__
from kvarts.errors import KvartsError

__all__ = ["main", "run"]


HELP = """KV-cache engine for LLM serving: planning, testing and proving KV memory.

\b
Exit codes: 0 ok, 2 bad usage, 3 missing file, 4 unreadable input,
5 violated, 6 inconclusive, 7 a result could not be written.
"""


COMMANDS = {
    "calibrate": "calibrate",
    "chat": "chat",
    "compare": "calibrate",
    "generate": "llm_generate",
    "model": "model",
    "profile": "llm_profile",
    "replay": "replay",
    "report": "report",
    "serve": "serve",
    "soak": "soak",
    "story": "explain",
    "verify": "verify",
}
"""Each command, and the module of `kvarts.cli` that has it."""


class Commands(click.Group):
    """Commands that are loaded when they are called: `replay` does not wait for what only `calibrate` needs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load and return a command; None for a name that is none."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"kvarts.cli.{COMMANDS[cmd_name]}"), f"{cmd_name}_command")
        return command


@click.group(cls=Commands, help=HELP, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvarts")
def cli() -> None:
    """The group of commands."""


def main() -> int:
    """Run the command line in `sys.argv`; return the exit code."""
    try:
        code = cli(standalone_mode=False)
    except KvartsError as error:
        click.echo(f"kvarts: {error}", err=True)
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        click.echo("kvarts: interrupted", err=True)
        return 130
    except BrokenPipeError:
        return 7  # the reader of standard output has gone; nothing is left to say
    except AssertionError as error:
        if not getattr(error, "findings", None):
            raise
        click.echo(f"kvarts: the audit found that pages do not add up:\n{error}", err=True)
        return 5
    return code if isinstance(code, int) else 0


def run() -> None:
    """Run the `kvarts` script."""
    gc.disable()  # a command makes many objects that live to its end, and no cycles worth looking for
    code = main()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    sys.stderr.flush()
    # Everything is written. To take apart all objects of a replay one by one would take longer than its report did.
    os._exit(code)

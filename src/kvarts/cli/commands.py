"""The group of all commands, each imported when it is called."""

from __future__ import annotations

from importlib import import_module
from io import StringIO

import click

from kvarts.cli.completed import complete_in_shells
from kvarts.cli.options import Group
from kvarts.cli.process import say, signal_that_came, version_line

__all__ = ["COMMANDS", "call_command", "cli"]

HELP = """KV-cache engine for LLM serving: planning, testing and proving KV memory.

\b
Exit codes: 0 ok, 2 bad usage, 3 missing file, 4 unreadable input,
5 violated, 6 inconclusive, 7 a result could not be written,
130 interrupted, 143 terminated.

\b
Begin with:
  kvarts replay                 twelve bundled sessions on one H100
  kvarts trace list             more bundled traces, for any command
  kvarts plan my.jsonl          how much memory a trace of your own needs
"""


COMMANDS = {
    "calibrate": "calibrate",
    "compare": "calibrate",
    "completion": "completion",
    "engine": "engine",
    "generate": "llm_prompts",
    "mock": "mock",
    "model": "model",
    "plan": "plan",
    "profile": "llm_prompts",
    "replay": "replay",
    "report": "report",
    "serve": "serve",
    "soak": "soak",
    "story": "explain",
    "sweep": "plan",
    "trace": "trace",
    "verify": "verify",
    "watch": "watch",
    "why": "why",
}
"""The commands, each with the module of `kvarts.cli` that defines it."""


def _tell(ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked and not ctx.resilient_parsing:
        click.echo(version_line())
        ctx.exit()


version_option = click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, help="Show the version and exit.", callback=_tell
)


class Commands(Group):
    """A group that imports a command's module when it is called: `replay` does not load the imports of `calibrate`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command; None if `cmd_name` is not a command."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"kvarts.cli.{COMMANDS[cmd_name]}"), f"{cmd_name}_command")
        return command


@click.group(cls=Commands, help=HELP, context_settings={"help_option_names": ["-h", "--help"]})
@version_option
def cli() -> None:
    """Run a command of the group."""


def call_command() -> object:
    """Run the command line in `sys.argv` with click; return the exit code of the command."""
    complete_in_shells()
    try:
        return cli(standalone_mode=False)
    except click.Abort as error:
        raise KeyboardInterrupt from error
    except click.ClickException as error:
        if signal_that_came():
            raise
        with StringIO() as shown:
            error.show(shown)
            say(shown.getvalue().removesuffix("\n"))
        return error.exit_code

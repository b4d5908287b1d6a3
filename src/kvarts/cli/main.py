"""`kvarts`: the group of commands, and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import signal
from importlib import import_module

import click

from kvarts.cli.options import Group
from kvarts.cli.process import (
    ReaderGoneError,
    Terminated,
    end,
    guard_streams,
    handle_signals,
    signal_that_came,
)
from kvarts.cli.version import version_option
from kvarts.errors import KvartsError, OutputError

__all__ = ["main", "run", "run_main"]


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
    "chat": "chat",
    "compare": "calibrate",
    "generate": "llm_generate",
    "mock": "mock",
    "model": "model",
    "plan": "plan",
    "profile": "llm_profile",
    "replay": "replay",
    "report": "report",
    "serve": "serve",
    "soak": "soak",
    "story": "explain",
    "sweep": "plan_sweep",
    "trace": "trace",
    "verify": "verify",
    "watch": "watch",
}
"""Each command, and the module of `kvarts.cli` that has it."""


class Commands(Group):
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
@version_option
def cli() -> None:
    """The group of commands."""


def main() -> int:
    """Run the command line in `sys.argv`; return the exit code."""
    try:
        code = cli(standalone_mode=False)
    except (click.Abort, KeyboardInterrupt):
        return _failed("interrupted", 128 + signal.SIGINT)
    except Terminated as error:
        return _failed("terminated", 128 + error.number)
    except Exception as error:
        if number := signal_that_came():
            return _failed("interrupted" if number == signal.SIGINT else "terminated", 128 + number)
        return _code_of(error)
    return code if isinstance(code, int) else 0


def _code_of(error: Exception) -> int:
    """Say what is wrong with a command that ended with `error`; return its exit code. Raise what no user can mend."""
    match error:
        case ReaderGoneError():
            return error.exit_code  # nothing is left to say
        case KvartsError():
            return _failed(str(error), error.exit_code)
        case click.ClickException():
            error.show()
            return error.exit_code
        case BrokenPipeError():
            return 7  # where `main` is called with other streams than those of `guard_streams`
        case OSError():
            return _failed(str(OutputError(f"{error.strerror or error}", path=error.filename)), 7)
        case MemoryError():
            return _failed("what was asked for does not fit into memory. Ask for less, or give more memory", 2)
        case AssertionError() if getattr(error, "findings", None):
            return _failed(f"the audit found that pages do not add up:\n{error}", 5)
    raise error


def _failed(what: str, code: int) -> int:
    click.echo(f"kvarts: {what}", err=True)
    return code


def run_main() -> None:
    """Run the command line as a process, and end it."""
    guard_streams()
    try:
        handle_signals()
        end(main())
    except KeyboardInterrupt:  # before `main`, or after it: nothing is under way
        end(_failed("interrupted", 128 + signal.SIGINT))
    except Terminated as error:
        end(_failed("terminated", 128 + error.number))


def run() -> None:
    """Run the `kvarts` script: by the name that scripts of an earlier installation call."""
    run_main()

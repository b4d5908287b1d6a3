"""`kvarts`: the group of commands. The only place that turns an error into a message and an exit code."""

from __future__ import annotations

import signal
from importlib import import_module
from importlib.util import find_spec

import click

from kvarts import __version__
from kvarts.cli.options import Group
from kvarts.cli.process import (
    ReaderGoneError,
    Terminated,
    end,
    guard_streams,
    handle_signals,
    signal_that_came,
)
from kvarts.errors import KvartsError, OutputError

__all__ = ["how_built", "main", "run", "run_main", "version_option"]

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
}
"""The commands, each with the module of `kvarts.cli` that defines it."""


def how_built() -> str:
    """Return `compiled` if the engine is a compiled library, else `interpreted`."""
    engine = find_spec("kvarts.engine")
    assert engine is not None and engine.origin is not None
    return "interpreted" if engine.origin.endswith(".py") else "compiled"


def _tell(ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked and not ctx.resilient_parsing:
        click.echo(f"kvarts, version {__version__} ({how_built()})")
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
    """Print the message of the `error` of a command; return its exit code. Raise errors that are bugs of kvarts."""
    match error:
        case ReaderGoneError():
            return error.exit_code  # nothing is left to print
        case KvartsError():
            return _failed(str(error).replace("\n", "\\n"), error.exit_code)
        case click.ClickException():
            error.show()
            return error.exit_code
        case BrokenPipeError():
            return 7  # where a caller of `main` uses other streams than those of `guard_streams`
        case OSError():
            return _failed(str(OutputError(f"{error.strerror or error}", path=error.filename)), 7)
        case MemoryError():
            return _failed(
                "out of memory. Give the process more memory, or use a smaller trace, fewer pages or fewer outputs", 2
            )
        case AssertionError() if getattr(error, "findings", None):
            return _failed(f"the audit found that pages do not add up:\n{error}", 5)
    raise error


def _failed(what: str, code: int) -> int:
    # Names in files may have escapes of terminals, or NUL; the audit's findings are lines.
    told = "".join(each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in what)
    click.echo(f"kvarts: {told}", err=True)
    return code


def run_main() -> None:
    """Run the command line as a process, and exit."""
    guard_streams()
    try:
        handle_signals()
        end(main())
    except KeyboardInterrupt:  # before or after `main`: no command is running
        end(_failed("interrupted", 128 + signal.SIGINT))
    except Terminated as error:
        end(_failed("terminated", 128 + error.number))


def run() -> None:
    """Run the `kvarts` script. Scripts of an earlier installation call this name."""
    run_main()

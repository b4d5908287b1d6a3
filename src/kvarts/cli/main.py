"""`kvarts`: one command line, from its words to an exit code.

The only place that turns errors into messages and codes.
"""

from __future__ import annotations

import signal

from kvarts.base.errors import KvartsError, OutputError
from kvarts.cli.commands import call_command
from kvarts.cli.process import (
    ReaderGoneError,
    Terminated,
    end,
    guard_streams,
    handle_signals,
    say,
    signal_that_came,
)

__all__ = ["main", "run", "run_main"]


def main() -> int:
    """Run the command line in `sys.argv`; return the exit code."""
    try:
        code = call_command()
    except KeyboardInterrupt:
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
            return 0  # it has read what it wanted
        case OutputError() if isinstance(error.__cause__, BrokenPipeError) and error.path == "-":
            return 0
        case KvartsError():
            return _failed(str(error).replace("\n", "\\n"), error.exit_code)
        case BrokenPipeError():
            return 0  # where a caller of `main` uses other streams than those of `guard_streams`
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
    say(f"kvarts: {what}")  # lines if it is the audit's findings
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

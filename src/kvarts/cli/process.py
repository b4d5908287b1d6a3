"""What the process of a command has with the world: standard streams and signals, for all commands alike.

Standard output is data: what cannot be written there is an OutputError, and a reader that has gone a ReaderGoneError,
which ends the command without a word. Standard error is narration: what cannot be written there is lost, and changes
nothing. Characters that a terminal does not have become question marks.

SIGTERM and SIGHUP end a command as SIGINT does: what is half written is removed.
"""

from __future__ import annotations

import errno
import gc
import io
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from kvarts.errors import OutputError

__all__ = [
    "ReaderGoneError",
    "Terminated",
    "end",
    "give_back_memory",
    "guard_streams",
    "handle_signals",
    "hold_signals_back",
    "signal_that_came",
]

STANDARD_STREAMS = (0, 1, 2)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Of mallopt."""
LARGE_BYTES = 128 * 1024
KEPT_BYTES = 4 * 1024 * 1024
"""Free memory at the end of the heap, which is not returned."""


_came: list[int] = []


class Terminated(BaseException):  # as KeyboardInterrupt, no Exception: nothing handles it on the way
    """A signal that ends the process: `number`."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class ReaderGoneError(OutputError):
    """Nothing reads standard output any more."""


class _Data(io.FileIO):
    """Standard output."""

    def __init__(self, *, is_closed: bool) -> None:
        super().__init__(1, "wb", closefd=False)
        self._is_closed = is_closed

    def write(self, data: Any) -> int:
        """Write some of `data`. Raise OutputError."""
        if self._is_closed:
            raise OutputError("is closed", path="standard output")
        try:
            return os.write(1, data)
        except BrokenPipeError as error:
            raise ReaderGoneError("has no reader any more", path="standard output") from error
        except OSError as error:
            raise OutputError(f"cannot be written: {error.strerror}", path="standard output") from error


class _Narration(io.FileIO):
    """Standard error."""

    def __init__(self) -> None:
        super().__init__(2, "wb", closefd=False)

    def write(self, data: Any) -> int:
        """Write some of `data`, or drop it."""
        try:
            return os.write(2, data)
        except OSError:
            return len(data)


def give_back_memory() -> None:
    """Have a command that goes on collect garbage, which the script of kvarts does not, for commands that end.

    Without torch, glibc also returns each freed block of LARGE_BYTES or more to the system, whatever was freed before.
    It would otherwise come to keep blocks of up to 32 MiB, with small ones between them that stay: a server that has
    read many large requests would have several times the memory that it uses. torch frees such blocks in every step,
    and needs them in the next. Other allocators are left alone.
    """
    gc.freeze()
    gc.enable()
    if "torch" in sys.modules:
        return
    import ctypes

    with suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(M_ARENA_MAX, 1)  # a heap of each thread would keep what the others need


def guard_streams() -> None:
    """Put streams that keep the promises above in the place of `sys.stdout` and `sys.stderr`.

    A stream that is closed gets /dev/null: the next file that is opened must not become standard output.
    """
    closed = []
    for number in STANDARD_STREAMS:
        try:
            os.fstat(number)
        except OSError as error:
            if error.errno != errno.EBADF:
                continue
            closed.append(number)
            opened = os.open(os.devnull, os.O_RDWR)
            assert opened == number, "the lowest number that is free"
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    encodings = [getattr(stream, "encoding", None) or "utf-8" for stream in (sys.stdout, sys.stderr)]
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Data(is_closed=1 in closed)), encodings[0], errors="replace", line_buffering=os.isatty(1)
    )
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(_Narration()), encodings[1], errors="backslashreplace", line_buffering=True
    )


def handle_signals() -> None:
    """Let SIGTERM and SIGHUP raise Terminated, once, and SIGINT KeyboardInterrupt. For the main thread."""
    _came.clear()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _terminate)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = _unraisable


def signal_that_came() -> int:
    """Return the first signal that should have ended the command, 0 if none came.

    What it raised may have become another error on the way: an extension module that is interrupted while it is loaded
    raises ImportError.
    """
    return _came[0] if _came else 0


@contextmanager
def hold_signals_back() -> Iterator[None]:
    """Let signals that would end the command end it after the block. For the main thread.

    PyTorch aborts the process if an exception comes while its extension modules are loaded.
    """
    came: list[int] = []
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    handlers = {number: handler for number in numbers if callable(handler := signal.getsignal(number))}
    for number in handlers:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def _note(number: int) -> None:
    _came.append(number)
    # What was made in the moment before is collected as it is: a file not closed, a coroutine not awaited.
    warnings.simplefilter("ignore")


def _interrupt(number: int, _: object) -> None:
    _note(number)
    raise KeyboardInterrupt


def _terminate(number: int, _: object) -> None:
    _note(number)
    signal.signal(number, signal.SIG_IGN)  # cleaning up is under way
    raise Terminated(number)


def _unraisable(unraisable: Any) -> None:
    """Raise a signal again that arrived where nothing can be raised, such as in a destructor.

    After a signal, what goes wrong in destructors is of objects that it left half made, and not told.
    """
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _raise_soon(signal.SIGINT)
    elif issubclass(unraisable.exc_type, Terminated):
        signal.signal(unraisable.exc_value.number, _terminate)
        _raise_soon(unraisable.exc_value.number)
    elif not _came:
        sys.__unraisablehook__(unraisable)


def _raise_soon(number: int) -> None:
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(number))
    signal.setitimer(signal.ITIMER_REAL, 0.001)


def end(code: int) -> None:
    """End the process at once, with `code`; 7 if what was printed does not get out."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # everything is done
    try:
        sys.stdout.flush()
    except ReaderGoneError as error:
        code = code or error.exit_code
    except OutputError as error:
        if not code:
            print(f"kvarts: {error}", file=sys.stderr)
            code = error.exit_code
    sys.stderr.flush()
    # Everything is written. To take apart all objects of a replay one by one would take longer than its report did.
    os._exit(code)

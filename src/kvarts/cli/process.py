"""The process of a command: standard streams and signals, handled identically for all commands.

Standard output is data: a failed write is an OutputError; if the reader has closed it, a ReaderGoneError, which ends
the command silently, with 0; commands that judge end with their verdict. Standard error is narration: a failed write is
dropped, without effect. Characters that a terminal cannot show become question marks.

SIGTERM and SIGHUP end a command as SIGINT does: half-written files are removed.

While a command runs, kvarts' log messages go to standard error, and so does progress: no command is silent for longer
than two seconds.
"""

from __future__ import annotations

import errno
import gc
import io
import os
import signal
import sys
import warnings
from _thread import LockType, allocate_lock, start_new_thread
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvarts import __version__
from kvarts.base.documents import Document
from kvarts.base.errors import ConfigError, OutputError
from kvarts.base.terminal import plain, shortened

if TYPE_CHECKING:
    from pathlib import Path

    from kvarts.sim.config import ReplayConfig

__all__ = [
    "PlainText",
    "Progress",
    "ReaderGoneError",
    "ServesRuntime",
    "Terminated",
    "collect_garbage",
    "draw",
    "end",
    "guard_streams",
    "handle_signals",
    "hold_signals_back",
    "is_compiled",
    "narrate",
    "need_grpc",
    "print_bytes",
    "print_json",
    "print_text",
    "reading_progress",
    "say",
    "signal_that_came",
    "tell_whole_pages",
    "version_line",
]

STANDARD_STREAMS = (0, 1, 2)
_came: list[int] = []
NARRATOR = "kvarts"
SILENT_S = 1.0
"""After ANSWER_AFTER_S."""
EVERY_S = 10.0
BAR_EVERY_S = 0.2
ANSWER_AFTER_S = 1.0
"""Before that, nothing is written."""


class Terminated(BaseException):  # not an Exception, like KeyboardInterrupt: no handler on the way catches it
    """A signal that ends the process: `number`."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class ReaderGoneError(OutputError):
    """The reader of standard output has closed it."""


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


def collect_garbage() -> None:
    """Enable the garbage collector in commands that run for long; the kvarts script disables it."""
    gc.freeze()
    gc.enable()


class PlainText(io.TextIOWrapper):
    """The one printer of texts, of any source: no escape sequence passes. Data go to its buffer."""

    def write(self, text: str, /) -> int:
        """Write `text` with control characters spelled."""
        super().write(plain(text))
        return len(text)


def guard_streams() -> None:
    """Replace `sys.stdout` and `sys.stderr` with streams that behave as described above.

    A closed stream is opened on /dev/null: otherwise the next file to be opened would become standard output.
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
    sys.stdout = PlainText(
        io.BufferedWriter(_Data(is_closed=1 in closed)), encodings[0], errors="replace", line_buffering=os.isatty(1)
    )
    sys.stderr = PlainText(
        io.BufferedWriter(_Narration()), encodings[1], errors="backslashreplace", line_buffering=True
    )


def handle_signals() -> None:
    """Make SIGTERM and SIGHUP raise Terminated, once, and SIGINT KeyboardInterrupt. For the main thread."""
    _came.clear()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _terminate)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = _unraisable


def signal_that_came() -> int:
    """Return the first signal that should have ended the command, 0 if there was none.

    Its exception may have become another error on the way: an extension module that is interrupted while it is imported
    raises ImportError.
    """
    return _came[0] if _came else 0


@contextmanager
def hold_signals_back() -> Iterator[None]:
    """Delay signals that would end the command to the end of the block. For the main thread.

    PyTorch aborts the process if an exception is raised while its extension modules are imported.
    """
    came: list[int] = []
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    handlers = {number: handler for number in numbers if callable(handler := signal.getsignal(number))}
    try:
        for number in handlers:
            signal.signal(number, lambda number, _: came.append(number))
    except ValueError:  # another thread, which no signal interrupts
        handlers = {}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def _note(number: int) -> None:
    _came.append(number)
    # Objects are now collected in any state: an open file, a coroutine that is not awaited. Warnings would be noise.
    warnings.simplefilter("ignore")


def _interrupt(number: int, _: object) -> None:
    _note(number)
    raise KeyboardInterrupt


def _terminate(number: int, _: object) -> None:
    _note(number)
    signal.signal(number, signal.SIG_IGN)  # cleanup is under way
    raise Terminated(number)


def _unraisable(unraisable: Any) -> None:
    """Raise a signal again that arrived where no exception can propagate, such as in a destructor.

    After a signal, errors in destructors are not reported: they concern objects that it left half constructed.
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
    """Exit at once with `code`; 7 if printed output cannot be written."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # everything is done
    try:
        sys.stdout.flush()
    except ReaderGoneError:
        pass  # it has read what it wanted
    except OutputError as error:
        if not code:
            print(f"kvarts: {error}", file=sys.stderr)
            code = error.exit_code
    sys.stderr.flush()
    # Everything is written. Destroying all objects of a replay one by one would take longer than its report did.
    os._exit(code)


def is_compiled() -> bool:
    """Return whether the engine is a compiled library."""
    from importlib.util import find_spec

    engine = find_spec("kvarts.core.engine")
    assert engine is not None and engine.origin is not None
    return not engine.origin.endswith(".py")


def say(text: str) -> None:
    """Write a line, or several, to standard error.

    Control characters, such as in names of files, are escaped, and what is very long is shortened.
    """
    if sys.stderr is None:
        return
    sys.stderr.write(f"{plain(shortened(text))}\n")
    sys.stderr.flush()


def draw(text: str) -> None:
    """Write `text` to the terminal of standard error as it is: with escape sequences of ours, and none of others."""
    sys.stderr.flush()
    sys.stderr.buffer.write(text.encode(errors="backslashreplace"))
    sys.stderr.buffer.flush()


def print_text(text: str) -> None:
    """Write text for people to standard output, without escape sequences of its own. Raise OutputError if that fails.

    A terminal gets the tables of a Document in its own width, with emphasis.
    """
    if isinstance(text, Document) and sys.stdout.isatty():
        from rich.console import Console  # a pipe does not wait for it

        with io.StringIO() as shown:
            text.show(Console(file=shown, force_terminal=True, width=os.get_terminal_size(1).columns or None))
            print_bytes(shown.getvalue().encode(errors="replace"))
    else:
        print_bytes(plain(text).encode(errors="replace"))


def print_bytes(data: bytes) -> None:
    """Write data to standard output. Raise OutputError if that fails."""
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", path="standard output") from error


def print_json(value: Any) -> None:
    """Print one JSON value on standard output, indented, with a newline."""
    import msgspec

    print_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def tell_whole_pages(config: ReplayConfig, of: str = "the model") -> None:
    """Say why pages are whole, though layers keep less and KV groups are the default."""
    if config.whole_pages:
        say(f"kvarts: pages are whole, though layers of {of} keep less: {config.whole_pages}")


def narrate() -> None:
    """Send kvarts' log to standard error from now on: messages about long work, and warnings about a model."""
    import logging

    class Narrator(logging.Handler):
        """A log handler that prints kvarts' messages on standard error, in the form of a command's own lines."""

        def emit(self, record: logging.LogRecord) -> None:
            """Write a line."""
            say(f"kvarts: {record.getMessage()}")

    logger = logging.getLogger("kvarts")
    if not any(handler.get_name() == NARRATOR for handler in logger.handlers):
        narrator = Narrator()
        narrator.set_name(NARRATOR)
        logger.addHandler(narrator)
        logger.setLevel(logging.INFO)
        logger.propagate = False


class Progress:
    """A bar if standard error is a terminal, else a line after two seconds and then every ten seconds.

    `what`: the work, such as "reading trace.jsonl". `update(n)`: `n` more units are done. `total`: number of units;
    None if not known. Without a `unit`, lines have the seconds so far. `large`: the `total` from which a line is
    written at once. A thread writes, so that progress does not depend on the time of a unit.
    """

    def __init__(self, what: str, total: int | None = None, unit: str = "", *, large: int | None = None) -> None:
        self._what = what
        self._total = total
        self._unit = unit
        self._num_done = 0
        self._answer = self._said = ""
        self._is_saying = allocate_lock()
        self._begun_s = monotonic()
        self._is_running = allocate_lock()  # those of `threading` cost a short command as much as its replay
        self._is_running.acquire()
        self._is_drawing = allocate_lock()
        self._is_drawing.acquire()
        is_terminal = sys.stderr.isatty()
        if not is_terminal and large is not None and total is not None and total >= large:
            say(f"kvarts: {what}, {total:,} {unit}")
        begins = allocate_lock()
        begins.acquire()
        start_new_thread(self._narrate, (begins, self._draw if is_terminal else self._tell))
        begins.acquire()  # until the thread has begun

    def update(self, num_done: int = 1) -> None:
        """Count more units as done."""
        self._num_done += num_done
        if self._total is not None:
            self._total = max(self._total, self._num_done)

    def reach(self, num_done: int, total: int) -> None:
        """Set the number of units that are done, and their total."""
        self._num_done, self._total = num_done, total

    def firm_up(self, answer: str, num_left: int) -> None:
        """Print an answer that further units may change, if the work takes long. About `num_left` units are left.

        An empty answer changes nothing.
        """
        self._total = self._num_done + num_left
        self._answer = answer or self._answer
        if monotonic() - self._begun_s > ANSWER_AFTER_S:
            self._say_answer()

    def _say_answer(self) -> None:
        with self._is_saying, suppress(OSError, ValueError):
            if self._answer not in ("", self._said):
                self._said = self._answer
                say(f"kvarts: so far: {self._said}")

    def close(self) -> None:
        """Stop, and remove the bar."""
        self._is_running.release()
        self._is_drawing.acquire()

    def _narrate(self, begins: LockType, work: Callable[[], None]) -> None:
        begins.release()
        try:
            if not (ANSWER_AFTER_S and self._has_ended(ANSWER_AFTER_S)):
                self._say_answer()
                work()
        finally:
            self._is_drawing.release()

    def _has_ended(self, within_s: float) -> bool:
        """Return whether the work ends within some seconds."""
        return self._is_running.acquire(timeout=within_s)

    def _tell(self) -> None:
        wait_s = SILENT_S
        while not (wait_s and self._has_ended(wait_s)):
            wait_s = EVERY_S
            of_all = "" if self._total is None else f" of {self._total:,}"
            done = f"{self._num_done:,}{of_all} {self._unit}" if self._unit else f"{monotonic() - self._begun_s:.0f} s"
            with suppress(OSError, ValueError):  # narration that cannot be written is dropped
                say(f"kvarts: {self._what}: {done}")

    def _draw(self) -> None:
        from tqdm import tqdm

        # Without a unit, the bar is the description and the elapsed time.
        form = None if self._unit else "{desc}: {elapsed}"
        with tqdm(total=self._total, desc=self._what, unit=f" {self._unit}", unit_scale=True, file=sys.stderr,
                  leave=False, miniters=0, bar_format=form) as bar:  # fmt: skip
            is_over = False
            while not is_over:
                bar.total = self._total
                bar.update(self._num_done - bar.n)
                bar.refresh()
                is_over = self._has_ended(BAR_EVERY_S)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def reading_progress(path: Path | str) -> Progress:
    """Return the progress of reading a file or directory, in bytes if their number is known."""
    from pathlib import Path

    paths = [Path(path)]
    num_bytes: int | None = None
    with suppress(OSError):
        if paths[0].is_dir():
            paths = [each for each in paths[0].rglob("*") if each.is_file()]
        num_bytes = sum(each.stat().st_size for each in paths) or None
    return Progress(f"reading {path}", None if any(each.suffix == ".gz" for each in paths) else num_bytes, "bytes")


def version_line() -> str:
    """Return the version, and which build this is: compiled if the engine is a compiled library, else interpreted."""
    return f"kvarts, version {__version__} ({'compiled' if is_compiled() else 'interpreted'})"


ServesRuntime = Callable[[Any], AbstractAsyncContextManager[object]]
"""A context manager that serves a runtime of sessions at one more address while it is entered."""


def need_grpc() -> None:
    """Raise ConfigError if grpcio is not installed."""
    try:
        import google.protobuf  # noqa: F401
        import grpc  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"sessions need gRPC ({error})", hint="pip install 'kvarts[grpc]'.") from None

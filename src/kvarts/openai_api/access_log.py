"""The access log: a line of JSON for each request, once its answer has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from time import monotonic, time
from typing import IO

import msgspec

from kvarts.errors import OutputError
from kvarts.files import append_whole, is_replaceable, open_stream, shown, writing

__all__ = ["FLUSH_S", "AccessLog", "LoggedRequest"]

FLUSH_S = 0.2
MOST_WAITING = 1 << 16
MAX_CHARS = 256


class LoggedRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line. `status`: 0 without an answer. `ms`: from the head of the request to the end of the answer.

    `is_whole`: false for an answer that was cut off. Queries, bodies and keys are not logged.
    """

    time: float
    method: str
    path: str
    status: int
    ms: float
    id: str
    owner: str = ""
    client: str = ""
    is_whole: bool = True


class AccessLog:
    """Appends to the file at `path`, at most FLUSH_S late. For one event loop.

    After an error of the file, `say` receives the reason, nothing more is logged, and `close` raises the error. Raises
    OutputError if the file cannot be opened.
    """

    def __init__(self, path: Path, say: Callable[[str], object]) -> None:
        self._path = path
        self._say = say
        self._encoder = msgspec.json.Encoder()
        self._waiting = bytearray()
        self._flushing: asyncio.TimerHandle | None = None
        self._error: OutputError | None = None
        with writing(path):
            self._file: IO[bytes] | None = path.open("ab", buffering=0) if is_replaceable(path) else open_stream(path)

    def add(self, method: str, path: str, status: int, started_s: float, request_id: str, *, owner: str,
            client: str, is_whole: bool) -> None:  # fmt: skip
        """Log a request. `started_s`: on the monotonic clock."""
        if self._file is None:
            return
        ms = round(1e3 * (monotonic() - started_s), 3)
        line = LoggedRequest(
            round(time(), 3), method[:MAX_CHARS], path[:MAX_CHARS], status, ms, request_id, owner, client, is_whole
        )
        self._waiting += self._encoder.encode(line)
        self._waiting += b"\n"
        if len(self._waiting) >= MOST_WAITING:
            self.flush()
        elif self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        """Write what waits."""
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        file, text = self._file, bytes(self._waiting)
        self._waiting.clear()
        if file is None or not text:
            return
        try:
            with writing(self._path):
                append_whole(file, text)
        except OutputError as error:
            self._error = error
            self._say(f"the access log {shown(self._path)} ends: {error.what}")
            self._close(file)

    def close(self) -> None:
        """Write what waits, and close the file. Raise OutputError if lines are missing."""
        self.flush()
        if self._file is not None:
            self._close(self._file)
        if self._error is not None:
            raise self._error

    def _close(self, file: IO[bytes]) -> None:
        self._file = None
        try:
            file.close()
        except OSError:
            return  # it was reported, or there is nothing left to write

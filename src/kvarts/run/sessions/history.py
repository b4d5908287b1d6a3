"""The histories of sessions on disk, and the thread that writes them.

An operation is on disk before its future has a result. All operations that wait while a transaction is being written
are combined in the next one, so many sessions share one disk sync.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.base.errors import ConfigError, KvartsError, OutputError
from kvarts.base.files import make_private
from kvarts.core.content import UNIT_BYTES
from kvarts.run.sessions.history_file import HistoryFile, HistoryTables
from kvarts.run.sessions.table import Session, SessionTable
from kvarts.run.sessions.values import (
    EndReason,
    SessionNotReadyError,
    SessionValueError,
    StoredSession,
    Tombstone,
    Usage,
)

__all__ = ["FILE_NAME", "Appending", "Histories"]

FILE_NAME = "history.sqlite3"

T = TypeVar("T")


class Histories:
    """Sessions, their tokens and their tombstones, in a file of `directory`. May be called from any thread.

    Promises: operations are executed in the order of the calls. When a future has a result, its operation is on disk,
    and a process killed at any time neither loses nor repeats any part of it. A future with an error has changed
    nothing. An operation cancelled before its execution is not executed.

    Errors of futures: UnknownSessionError; SessionNotReadyError for an unexpected length; SessionValueError for invalid
    values; InputError if the file is damaged; OutputError, for every operation of the transaction, if it cannot be
    written.

    Raises ConfigError if another process has the directory, InputError for a foreign, damaged or incompatible file,
    OutputError if the file cannot be created.
    """

    def __init__(self, directory: Path) -> None:
        try:
            make_private(directory, lambda name: name.startswith(FILE_NAME) or name == "kv")
        except OSError as error:
            raise OutputError(f"cannot hold sessions: {error.strerror}", path=directory) from error
        self._file = HistoryFile(directory / FILE_NAME)
        self._tables = HistoryTables(self._file)
        self._waiting: SimpleQueue[_Operation | None] = SimpleQueue()
        self._lock = Lock()
        """Ensures that nothing is queued after the None that ends the thread."""
        self._is_closed = False
        self._thread = Thread(target=self._serve, name="kvarts-histories", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Complete all queued operations, and release the directory."""
        with self._lock:
            is_first = not self._is_closed
            self._is_closed = True
            if is_first:
                self._waiting.put(None)
        self._thread.join()
        if is_first:
            self._file.close()

    def __enter__(self) -> Histories:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Operations -------------------------------------------------------------------------------------------

    def create(self, session: StoredSession) -> Future[None]:
        """Add a session without tokens, ignoring its `length`."""
        return self._submit(lambda tables: tables.create(session))

    def append(
        self, session_id: str, expected_length: int, tokens: Sequence[int] | npt.NDArray[np.integer[Any]]
    ) -> Future[int]:
        """Append tokens to a history of `expected_length` tokens, and return its new length.

        Any other length is refused, so that a retry after a lost response does not append twice.
        """
        try:
            data = packed(tokens)
        except SessionValueError as error:
            return _failed(error)
        return self._submit(lambda tables: tables.append(session_id, expected_length, data))

    def truncate(self, session_id: str, length: int) -> Future[int]:
        """Remove the tokens from `length` on, and return it."""
        return self._submit(lambda tables: tables.truncate(session_id, length))

    def fork(self, parent_id: str, child: StoredSession) -> Future[int]:
        """Add `child` with the first `child.length` tokens of `parent_id`; return their number.

        The tokens are copied, so the child does not depend on its parent.
        """
        return self._submit(lambda tables: tables.fork(parent_id, msgspec.structs.replace(child, parent=parent_id)))

    def note(self, session_id: str, usage: Usage) -> Future[None]:
        """Replace the counters of a session."""
        return self._submit(lambda tables: tables.note(session_id, usage))

    def end(self, session_id: str, reason: EndReason, ended_s: float) -> Future[int]:
        """Remove a session with its tokens, leave a tombstone, and return the previous length of its history."""
        return self._submit(lambda tables: tables.end(session_id, reason, ended_s))

    def forget(self, before_s: float) -> Future[int]:
        """Remove tombstones of sessions that ended before `before_s` (Unix time), and return their number."""
        return self._submit(lambda tables: tables.forget(before_s))

    # Queries ----------------------------------------------------------------------------------------------

    def load(self) -> list[StoredSession]:
        """Return all sessions, the oldest first. Raise InputError if tokens of one are missing."""
        return self._submit(HistoryTables.sessions).result()

    def tombstones(self) -> list[Tombstone]:
        """Return the tombstones of ended sessions, in order of their end."""
        return self._submit(HistoryTables.tombstones).result()

    def tokens(self, session_id: str, start: int = 0, end: int | None = None) -> Future[npt.NDArray[np.uint32]]:
        """Return tokens `start` to `end` (exclusive; None: the last)."""
        return self._submit(lambda tables: tables.tokens(session_id, start, end))

    # The thread -------------------------------------------------------------------------------------------

    def _submit(self, run: Callable[[HistoryTables], T]) -> Future[T]:
        operation = _Operation(run)
        with self._lock:
            if self._is_closed:
                return _failed(ConfigError("the histories are closed"))
            self._waiting.put(operation)
        return operation.future

    def _serve(self) -> None:
        is_open = True
        while is_open:
            group = [self._waiting.get()]
            try:
                while True:
                    group.append(self._waiting.get_nowait())
            except Empty:
                pass
            is_open = group[-1] is not None
            self._write([operation for operation in group if operation is not None])

    def _write(self, group: Sequence[_Operation]) -> None:
        """Execute operations in one transaction, and set their results once it is on disk."""
        group = [operation for operation in group if operation.future.set_running_or_notify_cancel()]
        if not group:
            return
        try:
            self._file.begin()
            outcomes = [_attempt(self._tables, operation.run) for operation in group]
            self._file.commit()
        except BaseException as error:  # passed to every waiting caller
            try:
                self._file.rollback()
            except KvartsError as second:
                error.add_note(f"and it could not be undone: {second}")
            for operation in group:
                operation.future.set_exception(error)
            return
        for operation, (result, refusal) in zip(group, outcomes, strict=True):
            if refusal is None:
                operation.future.set_result(result)
            else:
                operation.future.set_exception(refusal)


class _Operation:
    """An operation inside a transaction, and the future of its result."""

    def __init__(self, run: Callable[[HistoryTables], Any]) -> None:
        self.run = run
        self.future: Future[Any] = Future()


def _attempt(tables: HistoryTables, run: Callable[[HistoryTables], T]) -> tuple[T | None, KvartsError | None]:
    """Return the result of an operation, or its refusal.

    Raise errors that concern the whole transaction: an unwritable disk, a bug, or damage found after a change.
    """
    before = tables.num_changes
    try:
        return run(tables), None
    except OutputError:
        raise
    except KvartsError as error:
        if tables.num_changes != before:
            raise
        return None, error


def packed(tokens: Sequence[int] | npt.NDArray[np.integer[Any]]) -> bytes:
    """Return token ids as little-endian uint32. Raise SessionValueError for an invalid id."""
    try:
        given = np.asarray(tokens if len(tokens) else np.zeros(0, np.uint32))
    except (OverflowError, ValueError, TypeError) as error:
        raise SessionValueError(f"no list of token ids: {error}", field="tokens") from error
    is_integer = given.dtype.kind in "iu" and given.ndim == 1
    if not is_integer or (len(given) and not 0 <= int(given.min()) <= int(given.max()) < 2**32):
        raise SessionValueError("token ids are integers from 0 to 4294967295", field="tokens")
    return given.astype("<u4").tobytes()


def _failed(error: KvartsError) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


class Appending:
    """Appends to the sessions of `table`, and undoes failed appends. `histories`: the copies on disk, if any."""

    def __init__(self, table: SessionTable, histories: Histories | None) -> None:
        self._table = table
        self._histories = histories

    def max_positions(self, session: Session) -> int | None:
        """Return the maximum length of a history; None: unlimited."""
        settings = session.settings
        if settings.positions == "cache" or settings.past_max_positions:
            return None
        return self._table.host.max_positions

    def check(self, session: Session, num_tokens: int, expected_length: int | None) -> int:
        """Return the length of the history, after checking that `num_tokens` tokens can be appended.

        Raise UnknownSessionError if the session ended while this waited for its turn, SessionNotReadyError for a
        history of unexpected length or one that would get too long, and SessionsExhaustedError if histories are full.
        """
        self._table.get(session.owner, session.session_id)
        length = session.history_length
        if expected_length is not None and expected_length != length:
            raise SessionNotReadyError(
                f"the history has {length} tokens, and {expected_length} were expected",
                field="expected_length",
                hint="The tokens may be there already: compare with what was sent.",
            )
        most, longer = self.max_positions(session), length + num_tokens
        if num_tokens and most is not None and longer > most:
            raise SessionNotReadyError(
                f"the history would have {longer} tokens, and the model was trained for {most} positions",
                field="token_ids",
                hint="Create the session with positions='cache', or with past_max_positions.",
            )
        self._table.capacity.check_tokens(session.owner, num_tokens)
        return length

    @contextmanager
    def done(self, session: Session, packed: bytes, expected_length: int | None) -> Iterator[None]:
        """Append tokens, 8 bytes each, for the work in the block; if the block raises, remove them again."""
        before = self.check(session, len(packed) // UNIT_BYTES, expected_length)
        if packed:
            session.content.append(packed)
            self._table.capacity.recount(session)
        try:
            yield
        except BaseException:
            if packed:
                self._table.shorten(session, before)
                if self._histories is not None:  # queued ahead of any later append
                    self._histories.truncate(session.session_id, before)
                    session.is_written = False  # the outcome on disk is unknown here
            raise

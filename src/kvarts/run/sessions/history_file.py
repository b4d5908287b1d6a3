"""The SQLite file of session histories: exclusive access, transactions, and the operations inside them.

A history is stored in segments of SEGMENT_TOKENS tokens (the last may be shorter), packed as little-endian uint32, each
with a checksum, because SQLite stores none. An append rewrites at most one segment, which is smaller than a page of the
file, and adds others, so its cost is proportional to the tokens appended. A history that grew token by token has no
more rows than any other.

A fork copies the tokens of its parent, once, at 4 bytes per token. Sharing them would save that, but every rollback and
end of a session would have to check which others still need its rows.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from zlib import crc32

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.base.decoders import UNDECODED
from kvarts.base.errors import ConfigError, InputError, KvartsError, OutputError, problem_of
from kvarts.base.files import open_private
from kvarts.run.sessions.values import (
    EndReason,
    SessionNotReadyError,
    SessionSettings,
    SessionValueError,
    StoredSession,
    Tombstone,
    UnknownSessionError,
    Usage,
)

__all__ = ["SEGMENT_TOKENS", "HistoryFile", "HistoryTables"]

APPLICATION_ID = 0x6B767368
"""In the file's header; the ASCII text `kvsh`."""
SCHEMA_VERSION = 1

SCHEMA = (
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
    """CREATE TABLE sessions (
        serial INTEGER PRIMARY KEY AUTOINCREMENT,
        session_id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        settings BLOB NOT NULL,
        created_s REAL NOT NULL,
        parent TEXT,
        length INTEGER NOT NULL,
        usage BLOB NOT NULL
    )""",
    """CREATE TABLE segments (
        serial INTEGER NOT NULL,
        start INTEGER NOT NULL,
        checksum INTEGER NOT NULL,
        tokens BLOB NOT NULL,
        PRIMARY KEY (serial, start)
    ) WITHOUT ROWID""",
    """CREATE TABLE tombstones (
        session_id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        reason TEXT NOT NULL,
        ended_s REAL NOT NULL,
        length INTEGER NOT NULL,
        inv1_violations INTEGER NOT NULL,
        inv2_violations INTEGER NOT NULL
    ) WITHOUT ROWID""",
    "CREATE INDEX tombstones_by_end ON tombstones (ended_s)",
)

MOVE_AWAY = "Move the file away, or give another directory."
SEGMENT_TOKENS = 128
TOKEN_BYTES = 4

Tokens = npt.NDArray[np.uint32]


class HistoryFile:
    """The only connection to a file. Used by one thread at a time; at most one such object exists per machine and file.

    It is locked through SQLite by an operating system lock, which ends with the process, even if that is killed. Raises
    ConfigError if another process has the file, InputError for a foreign or damaged file, OutputError if it cannot be
    created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # SQLite creates its log and index next to the file, with the same mode.
            for file in (path, *(each for each in _beside(path) if each.exists())):
                os.close(open_private(file, os.O_RDWR | os.O_CREAT))
        except OSError as error:
            raise OutputError(f"cannot be opened: {error.strerror}", path=path) from error
        try:
            self.connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise OutputError(f"cannot be opened: {error}", path=path) from error
        try:
            with self.named_errors():
                self._open()
        except BaseException:
            self.connection.close()
            raise

    def _open(self) -> None:
        run = self.connection.execute
        run("PRAGMA locking_mode = EXCLUSIVE")
        run("BEGIN EXCLUSIVE")  # takes the lock without writing, since the file may not be ours
        application_id, version, num_tables = (
            run(query).fetchone()[0]
            for query in ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_master")
        )
        run("COMMIT")
        is_new = not (application_id or version or num_tables)
        if not is_new:
            if application_id != APPLICATION_ID:
                raise InputError("is a database of another program", path=self.path, hint=MOVE_AWAY)
            if version != SCHEMA_VERSION:
                raise InputError(
                    f"has session histories in version {version} of their form, and this kvarts reads {SCHEMA_VERSION}",
                    path=self.path,
                    hint="Use the kvarts that wrote it, or another directory.",
                )
            found = run("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                raise self.damaged(found)
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = FULL")
        run("PRAGMA fullfsync = ON")  # otherwise macOS leaves data in the drive's cache
        run("PRAGMA secure_delete = FAST")
        if is_new:
            run("BEGIN")
            for statement in SCHEMA:
                run(statement)
            run("COMMIT")

    def begin(self) -> None:
        """Begin a transaction."""
        with self.named_errors():
            self.connection.execute("BEGIN")

    def commit(self) -> None:
        """Commit the transaction; its changes are then on disk. Raise OutputError if they are not."""
        with self.named_errors():
            self.connection.execute("COMMIT")

    def rollback(self) -> None:
        """Undo the transaction, if one is open."""
        if self.connection.in_transaction:
            with self.named_errors():
                self.connection.execute("ROLLBACK")

    def close(self) -> None:
        """Close the file and release its lock."""
        self.connection.close()

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        """Convert SQLite errors to ours."""
        try:
            yield
        except KvartsError:
            raise
        except sqlite3.OperationalError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise ConfigError(
                    "is in use by another process",
                    path=self.path,
                    hint="Stop that process, or give another directory.",
                ) from error
            raise OutputError(f"cannot be read or written: {error}", path=self.path) from error
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_NOTADB:
                raise InputError("is no database of session histories", path=self.path, hint=MOVE_AWAY) from error
            raise self.damaged(str(error)) from error

    def damaged(self, what: str) -> InputError:
        """Return the error for a damaged file."""
        return InputError(f"is damaged: {what}", path=self.path, hint=MOVE_AWAY)


def _beside(path: Path) -> list[Path]:
    return [path.with_name(f"{path.name}{suffix}") for suffix in ("-wal", "-shm", "-journal")]


class HistoryTables:
    """The operations on one HistoryFile, between its `begin` and `commit`. Used by one thread at a time.

    An operation that raises a KvartsError has changed nothing, unless the file could not be read or written.
    """

    def __init__(self, file: HistoryFile) -> None:
        self._file = file
        self._run = file.connection.execute

    @property
    def num_changes(self) -> int:
        """Return the number of rows changed since the file was opened."""
        return self._file.connection.total_changes

    # Operations -------------------------------------------------------------------------------------------

    def create(self, session: StoredSession) -> None:
        """Add a session without tokens. Raise SessionValueError if its id exists."""
        with self._file.named_errors():
            self._add(session, 0)

    def append(self, session_id: str, expected_length: int, data: bytes) -> int:
        """Append packed tokens, and return the new length.

        Raise SessionNotReadyError if the length of the history is not `expected_length`.
        """
        with self._file.named_errors():
            serial, length = self._find(session_id)
            if length != expected_length:
                raise SessionNotReadyError(f"its history has {length} tokens, not {expected_length}", field=session_id)
            if not data:
                return length
            start = length - length % SEGMENT_TOKENS
            if start < length:
                data = self._segment(session_id, serial, start, length) + data
            self._write(serial, start, data)
            return self._set_length(serial, start + len(data) // TOKEN_BYTES)

    def truncate(self, session_id: str, length: int) -> int:
        """Remove the tokens from `length` on, and return it. Raise SessionNotReadyError if there are fewer tokens."""
        with self._file.named_errors():
            serial, present = self._find(session_id)
            if not 0 <= length <= present:
                raise SessionNotReadyError(f"its history has {present} tokens, not {length}", field=session_id)
            if length == present:
                return length
            start = length - length % SEGMENT_TOKENS
            kept = self._segment(session_id, serial, start, present)[: (length - start) * TOKEN_BYTES]
            self._run("DELETE FROM segments WHERE serial = ? AND start >= ?", (serial, start))
            self._write(serial, start, kept)
            return self._set_length(serial, length)

    def fork(self, parent_id: str, child: StoredSession) -> int:
        """Add `child` with the first `child.length` tokens of its parent, and return their number.

        Raise SessionNotReadyError if the parent has fewer, SessionValueError if the child's id exists.
        """
        with self._file.named_errors():
            parent, present = self._find(parent_id)
            length = child.length
            if not 0 <= length <= present:
                raise SessionNotReadyError(f"its history has {present} tokens, not {length}", field=parent_id)
            start = length - length % SEGMENT_TOKENS
            part = b""
            if start < length:
                part = self._segment(parent_id, parent, start, present)[: (length - start) * TOKEN_BYTES]
            self._add(child, length)
            serial, _ = self._find(child.session_id)
            self._run(
                "INSERT INTO segments SELECT ?, start, checksum, tokens FROM segments WHERE serial = ? AND start < ?",
                (serial, parent, start),
            )
            self._write(serial, start, part)
            return length

    def note(self, session_id: str, usage: Usage) -> None:
        """Replace the counters of a session."""
        with self._file.named_errors():
            serial, _ = self._find(session_id)
            self._run("UPDATE sessions SET usage = ? WHERE serial = ?", (msgspec.json.encode(usage), serial))

    def end(self, session_id: str, reason: EndReason, ended_s: float) -> int:
        """Replace a session by its tombstone, and return the length of its history."""
        with self._file.named_errors():
            session = self._session(session_id)
            usage = session.usage
            serial, length = self._find(session_id)
            self._run("DELETE FROM segments WHERE serial = ?", (serial,))
            self._run("DELETE FROM sessions WHERE serial = ?", (serial,))
            row = (session_id, session.owner, reason, ended_s, length, usage.inv1_violations, usage.inv2_violations)
            self._run("INSERT OR REPLACE INTO tombstones VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            return length

    def forget(self, before_s: float) -> int:
        """Remove tombstones of sessions that ended before `before_s`, and return their number."""
        with self._file.named_errors():
            return self._run("DELETE FROM tombstones WHERE ended_s < ?", (before_s,)).rowcount

    # Queries ----------------------------------------------------------------------------------------------

    def sessions(self) -> list[StoredSession]:
        """Return all sessions, the oldest first. Raise InputError if tokens of one are missing."""
        with self._file.named_errors():
            stored = dict(self._run("SELECT serial, SUM(length(tokens)) FROM segments GROUP BY serial"))
            found = []
            for row in self._run(f"SELECT serial, {COLUMNS} FROM sessions ORDER BY serial").fetchall():
                session = self._decoded(row[1:])
                present = stored.pop(row[0], 0) // TOKEN_BYTES
                if present != session.length:
                    raise self._file.damaged(f"session {session.session_id} has {present} of {session.length} tokens")
                found.append(session)
            if stored:
                raise self._file.damaged("it has tokens of no session")
            return found

    def tombstones(self) -> list[Tombstone]:
        """Return the tombstones of ended sessions, in order of their end."""
        with self._file.named_errors():
            rows = self._run("SELECT * FROM tombstones ORDER BY ended_s, session_id")
            return [
                msgspec.convert(dict(zip(Tombstone.__struct_fields__, row, strict=True)), Tombstone) for row in rows
            ]

    def tokens(self, session_id: str, start: int, end: int | None) -> Tokens:
        """Return tokens `start` to `end` (exclusive; None: the last). Raise SessionNotReadyError if there are fewer."""
        with self._file.named_errors():
            serial, length = self._find(session_id)
            end = length if end is None else end
            if not 0 <= start <= end <= length:
                raise SessionNotReadyError(f"its history has {length} tokens: no {start} to {end}", field=session_id)
            first = start - start % SEGMENT_TOKENS
            rows = self._run(
                "SELECT start, checksum, tokens FROM segments WHERE serial = ? AND start >= ? AND start < ? "
                "ORDER BY start",
                (serial, first, end),
            )
            parts = []
            at = first
            for row_start, checksum, data in rows:
                if row_start != at:
                    raise self._file.damaged(f"session {session_id} lacks tokens from {at} on")
                parts.append(self._checked(session_id, at, min(length - at, SEGMENT_TOKENS), checksum, data))
                at += SEGMENT_TOKENS
            if at < end:
                raise self._file.damaged(f"session {session_id} lacks tokens from {at} on")
            return np.frombuffer(b"".join(parts), dtype="<u4")[start - first : end - first].astype(np.uint32)

    # Rows -------------------------------------------------------------------------------------------------

    def _find(self, session_id: str) -> tuple[int, int]:
        """Return the serial number and the length of a session."""
        row = self._run("SELECT serial, length FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
        if row is None:
            raise UnknownSessionError("there is no session of this id", field=session_id)
        return int(row[0]), int(row[1])

    def _session(self, session_id: str) -> StoredSession:
        row = self._run(f"SELECT {COLUMNS} FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
        if row is None:
            raise UnknownSessionError("there is no session of this id", field=session_id)
        return self._decoded(row)

    def _decoded(self, row: tuple[str, str, bytes, float, str | None, int, bytes]) -> StoredSession:
        session_id, owner, settings, created_s, parent, length, usage = row
        try:
            return StoredSession(
                session_id=session_id,
                owner=owner,
                settings=msgspec.json.decode(settings, type=SessionSettings),
                created_s=created_s,
                parent=parent,
                length=length,
                usage=msgspec.json.decode(usage, type=Usage),
            )
        except (*UNDECODED, ConfigError) as error:
            raise self._file.damaged(f"what session {session_id} is cannot be read ({problem_of(error)})") from error

    def _add(self, session: StoredSession, length: int) -> None:
        row = (
            session.session_id,
            session.owner,
            msgspec.json.encode(session.settings),
            session.created_s,
            session.parent,
            length,
            msgspec.json.encode(session.usage),
        )
        try:
            self._run(f"INSERT INTO sessions ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        except sqlite3.IntegrityError as error:
            raise SessionValueError("there is a session of this id already", field=session.session_id) from error

    def _segment(self, session_id: str, serial: int, start: int, length: int) -> bytes:
        """Return the tokens of one segment of a history of `length` tokens."""
        row = self._run(
            "SELECT checksum, tokens FROM segments WHERE serial = ? AND start = ?", (serial, start)
        ).fetchone()
        if row is None:
            raise self._file.damaged(f"session {session_id} lacks tokens from {start} on")
        return self._checked(session_id, start, min(length - start, SEGMENT_TOKENS), *row)

    def _checked(self, session_id: str, start: int, num_tokens: int, checksum: int, data: bytes) -> bytes:
        if len(data) != num_tokens * TOKEN_BYTES or crc32(data) != checksum:
            raise self._file.damaged(f"tokens of session {session_id} from {start} on have changed")
        return data

    def _write(self, serial: int, start: int, data: bytes) -> None:
        """Write tokens, starting at the beginning of a segment."""
        size = SEGMENT_TOKENS * TOKEN_BYTES
        parts = ((start + at // TOKEN_BYTES, data[at : at + size]) for at in range(0, len(data), size))
        self._file.connection.executemany(
            "INSERT OR REPLACE INTO segments VALUES (?, ?, ?, ?)",
            [(serial, at, crc32(part), part) for at, part in parts],
        )

    def _set_length(self, serial: int, length: int) -> int:
        self._run("UPDATE sessions SET length = ? WHERE serial = ?", (length, serial))
        return length


COLUMNS = "session_id, owner, settings, created_s, parent, length, usage"

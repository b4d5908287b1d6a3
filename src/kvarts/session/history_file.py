"""The SQLite file of session histories: exclusive access, transactions, and translation of errors."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvarts.directories import open_private
from kvarts.errors import ConfigError, InputError, KvartsError, OutputError

__all__ = ["HistoryFile"]

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
    "CREATE TABLE ended (inv1_violations INTEGER NOT NULL, inv2_violations INTEGER NOT NULL)",
    "INSERT INTO ended VALUES (0, 0)",
)

MOVE_AWAY = "Move the file away, or give another directory."


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

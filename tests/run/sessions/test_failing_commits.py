"""A disk that fails at any one statement: what a client got is what is on disk and in memory, and nothing else is."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvarts.base.errors import OutputError
from kvarts.run.sessions.history_file import HistoryFile
from kvarts.run.sessions.opening import open_sessions
from kvarts.run.sessions.sessions import Sessions
from kvarts.run.sessions.values import Done, SessionNotReadyError, SessionSettings, Token

from builders.sessions import OWNER, greedy, mock_says, say

NUM_COMMITS = 24
"""More than the script below makes."""
SETTINGS = (None, SessionSettings(sink=2, window=40), SessionSettings(window=8))


class Failing:
    """Fails the commit at `place`, before or after it is done: then its outcome is unknown to the caller."""

    def __init__(self, patch: pytest.MonkeyPatch, place: int, *, is_done: bool) -> None:
        self.num_commits = -1_000
        """From the start of the script on, which sets it to 0."""
        commit = HistoryFile.commit

        def faulted(file: HistoryFile) -> None:
            number, self.num_commits = self.num_commits, self.num_commits + 1
            if number != place or is_done:
                commit(file)
            if number == place >= 0:
                raise OutputError("cannot be read or written: disk I/O error", path=file.path)

        patch.setattr(HistoryFile, "commit", faulted)

    def start(self) -> None:
        self.num_commits = 0


class FailingStatement:
    """Fails the statement at `place` that writes, in one of WAYS."""

    def __init__(self, patch: pytest.MonkeyPatch, place: int, way: str) -> None:
        self.num_statements = -1_000
        """From the start of the script on, which sets it to 0."""
        failing = self

        class Connection(sqlite3.Connection):
            def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
                return failing._count(self, statement, lambda: sqlite3.Connection.execute(self, statement, *values))

            def executemany(self, statement: str, *values: Any) -> sqlite3.Cursor:
                return failing._count(self, statement, lambda: sqlite3.Connection.executemany(self, statement, *values))

        self._place, self._way = place, way
        connect = sqlite3.connect
        patch.setattr(sqlite3, "connect", lambda *given, **named: connect(*given, **named, factory=Connection))

    def start(self) -> None:
        self.num_statements = 0

    def _count(
        self, connection: sqlite3.Connection, statement: str, run: Callable[[], sqlite3.Cursor]
    ) -> sqlite3.Cursor:
        if statement.startswith(("SELECT", "PRAGMA", "ROLLBACK")):
            return run()
        number, self.num_statements = self.num_statements, self.num_statements + 1
        if number != self._place:
            return run()
        if self._way == "done":
            run()
        if self._way == "undone by SQLite":  # as of a full disk, or an error in reading
            with suppress(sqlite3.Error):
                sqlite3.Connection.execute(connection, "ROLLBACK")
        raise sqlite3.OperationalError("database or disk is full")


WAYS = ("undone", "done", "undone by SQLite")


class Client:
    """A session, and all tokens of it that were acknowledged."""

    def __init__(self, sessions: Sessions, session_id: str, history: list[int]) -> None:
        self.sessions = sessions
        self.session_id = session_id
        self.history = history

    async def append(self, tokens: list[int]) -> None:
        try:
            self.history = self.history[: await self.sessions.append(OWNER, self.session_id, tokens) - len(tokens)]
        except OutputError:
            return
        self.history += tokens

    async def generate(self, num_tokens: int) -> None:
        if not self.history:
            return
        expected = mock_says(self.history, num_tokens)
        arrived: list[int] = []
        updates = self.sessions.generate(OWNER, self.session_id, greedy(num_tokens))
        try:
            while not isinstance(update := await anext(updates), Done):
                arrived += [update.token_id] if isinstance(update, Token) else []
            assert len(arrived) == num_tokens
        except OutputError:
            pass
        assert arrived == expected[: len(arrived)]
        self.history = self.history + arrived

    async def roll_back(self, length: int) -> None:
        try:
            await self.sessions.rollback(OWNER, self.session_id, min(length, len(self.history)))
        except SessionNotReadyError:
            return  # tokens that it needs have left a window
        except OutputError:  # it may have happened, or not
            length = (await self.sessions.info(OWNER, self.session_id)).history_length
        self.history = self.history[:length]

    async def fork(self) -> Client | None:
        try:
            return Client(self.sessions, await self.sessions.fork(OWNER, self.session_id), list(self.history))
        except OutputError:
            return None


def opened(directory: Path) -> Sessions:
    return open_sessions(mock=True, speedup=1000.0, kv_memory="64MiB", state_dir=directory, say=lambda _: None)


@pytest.mark.slow
@pytest.mark.parametrize("is_done", [False, True], ids=["undone", "done"])
@pytest.mark.parametrize("settings", SETTINGS, ids=["whole", "sink", "window"])
def test_memory_and_disk_agree_after_any_commit_that_fails(
    tmp_path: Path, settings: SessionSettings | None, *, is_done: bool
) -> None:
    fewest = NUM_COMMITS
    for place in range(NUM_COMMITS):
        directory = tmp_path / str(place)
        with pytest.MonkeyPatch.context() as patch:
            failing = Failing(patch, place, is_done=is_done)
            histories = asyncio.run(script(directory, settings, failing.start))
            fewest = min(fewest, failing.num_commits)
        asyncio.run(goes_on(directory, histories))
    assert fewest > 6


@pytest.mark.parametrize("settings", SETTINGS, ids=["whole", "sink", "window"])
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow if "SQLite" in way else pytest.mark.long) for way in WAYS]
)
def test_memory_and_disk_agree_after_any_statement_that_fails(
    tmp_path: Path, settings: SessionSettings | None, way: str
) -> None:
    place = 0
    while True:
        directory = tmp_path / str(place)
        with pytest.MonkeyPatch.context() as patch:
            failing = FailingStatement(patch, place, way)
            histories = asyncio.run(script(directory, settings, failing.start))
        asyncio.run(goes_on(directory, histories))
        if failing.num_statements <= place:
            break
        place += 1
    assert place > 20


async def script(
    directory: Path, settings: SessionSettings | None, start: Callable[[], object]
) -> dict[str, list[int]]:
    """Everything that a client does; the history of each session that it knows of."""
    sessions = opened(directory)
    start()
    try:
        made = await sessions.create(OWNER, settings)
    except OutputError:
        made = await sessions.create(OWNER, settings)
    client = Client(sessions, made, [])
    await client.append([*range(20)])
    await client.generate(30)
    await client.append([7, 7, 7])
    fork = await client.fork()
    await client.generate(5)
    await client.roll_back(len(client.history) - 2)
    await client.generate(4)
    clients = [client] if fork is None else [client, fork]
    for each in clients:
        info = await sessions.info(OWNER, each.session_id)
        assert (info.history_length, info.inv1_violations) == (len(each.history), 0)
    await sessions.shut_down()
    return {each.session_id: each.history for each in clients}


async def goes_on(directory: Path, histories: dict[str, list[int]]) -> None:
    """The server starts again: each session goes on from what its client knows."""
    sessions = opened(directory)
    for session_id, history in histories.items():
        if history:
            said: Any = await say(sessions, session_id, [], 3)
            assert said == mock_says(history, 3)
    await sessions.shut_down()

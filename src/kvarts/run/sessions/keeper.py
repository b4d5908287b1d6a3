"""Persistence of sessions: histories are written before they are acknowledged, KV of bounded sessions after turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvarts.base.errors import ConfigError, OutputError
from kvarts.run.sessions.checkpoints import CheckpointHeader, Checkpoints, Refused, token_digest
from kvarts.run.sessions.history import Histories
from kvarts.run.sessions.table import Session, SessionTable
from kvarts.run.sessions.values import SessionsExhaustedError, StoredSession, Usage

__all__ = ["Keeper"]


class Keeper:
    """The sessions of `table` in `directory`. `say` receives one line per item that could not be kept or read.

    It is opened before the first session is created, and restores the stored ones. A session is restored with the KV of
    its checkpoint if that is valid, else its KV is computed again from its tokens. A session without room, or with
    settings that the model does not support, stays on disk.
    """

    def __init__(self, table: SessionTable, directory: Path, say: Callable[[str], object]) -> None:
        self.histories = Histories(directory)
        self._checkpoints = Checkpoints(directory / "kv")
        self._table = table
        self._host = table.host
        self._say = say
        self._saving: dict[str, asyncio.Task[None]] = {}
        self._to_save_again: set[str] = set()
        """Sessions whose KV is being written and has changed since."""
        self._forgot_s = 0.0

    # At startup -------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Restore all sessions, between steps."""
        stored = self.histories.load()
        for path in self._checkpoints.sweep([session.session_id for session in stored]):
            self._say(f"{path} belongs to no session, and was removed")
        self.forget_old()
        for tombstone in self.histories.tombstones():
            self._table.tombstones.add(tombstone)
        now_s, now_ns = time.time(), self._table.now_ns()
        for known in stored:
            tokens = self.histories.tokens(known.session_id).result()
            try:
                session = self._table.create(
                    known.owner,
                    known.settings,
                    session_id=known.session_id,
                    tokens=tokens.astype(np.uint64).tobytes(),
                    may_evict=False,
                )
            except (SessionsExhaustedError, ConfigError) as error:
                self._say(f"session {known.session_id} stays on disk, and is not served: {error}")
                continue
            usage = known.usage
            session.touched_ns = now_ns - max(0, round((now_s - usage.last_used_s) * 1e9))
            session.created_s = known.created_s
            session.num_turns = usage.num_turns
            session.num_computed_tokens = usage.num_computed_tokens
            session.inv1_violations, session.inv2_violations = usage.inv1_violations, usage.inv2_violations
            session.restored = "tokens"
            if session.pages is not None and len(tokens):
                self._restore_kv(session, tokens)

    def _restore_kv(self, session: Session, tokens: npt.NDArray[np.uint32]) -> None:
        assert session.pages is not None
        found = self._checkpoints.load(session.session_id, self._fingerprint(session), tokens)
        if found is None:
            return
        if isinstance(found, Refused):
            self._say(f"{found.reason}; the session is computed again")
            return
        header, arrays = found.header, dict(found.arrays)
        positions = arrays.pop("positions")
        page_ids = session.pages.restore(header.tables)
        self._host.kv.write_pages(page_ids, arrays)
        self._host.slots.restore(page_ids, positions)
        session.num_computed = session.furthest = header.num_tokens
        session.restored = "kv"
        violations = session.inv1_violations
        self._table.look(session)
        if session.inv1_violations > violations:
            # The pages do not contain the KV described by the header.
            session.inv1_violations = violations
            session.pages.release()
            session.num_computed = session.furthest = 0
            session.restored = "tokens"
            self._say(
                f"the checkpoint of session {session.session_id} does not hold what it says; it is computed again"
            )

    # In operation -----------------------------------------------------------------------------------------

    def stored(self, session: Session) -> StoredSession:
        """Return the stored form of a session, without its tokens."""
        return StoredSession(
            session_id=session.session_id,
            owner=session.owner,
            settings=session.settings,
            created_s=session.created_s,
            usage=usage_of(session),
            length=session.history_length,
        )

    async def append(self, session: Session, length: int, packed: bytes) -> None:
        """Write tokens, 8 bytes each, after the first `length` of a history."""
        try:
            tokens = np.frombuffer(packed, np.uint64)
            await asyncio.wrap_future(self.histories.append(session.session_id, length, tokens))
        except BaseException:
            session.is_written = False
            raise

    async def catch_up(self, session: Session) -> None:
        """Make the histories of an idle session here and on disk equal, after a failed write. Raise if that fails.

        The shorter one holds what was acknowledged.
        """
        if session.is_written:
            return
        session_id, length = session.session_id, session.history_length
        stored: npt.NDArray[np.uint32] = await asyncio.wrap_future(self.histories.tokens(session_id))
        num_stored = len(stored)
        if num_stored > length:
            await asyncio.wrap_future(self.histories.truncate(session_id, length))
        elif num_stored < length:
            await asyncio.wrap_future(self._host.loop.post(lambda _: self._table.take_back(session, num_stored)))
        session.is_written = True

    def save_kv(self, session: Session) -> None:
        """Start writing the KV of an idle session in the background. Called in the event loop.

        Any number of calls during a write cause one further write.
        """
        session_id = session.session_id
        if session_id in self._saving:
            self._to_save_again.add(session_id)
        else:
            self._saving[session_id] = asyncio.get_running_loop().create_task(self._save(session))

    async def _save(self, session: Session) -> None:
        session_id = session.session_id
        try:
            is_due = True
            while is_due:
                self._to_save_again.discard(session_id)
                taken = await asyncio.wrap_future(self._host.loop.post(lambda _: self._take(session)))
                if taken is not None:
                    outcome = await asyncio.to_thread(self._checkpoints.save, *taken)
                    if isinstance(outcome, Refused):
                        self._say(f"{outcome.reason}; after a restart the session is computed again")
                is_due = session_id in self._to_save_again
        finally:
            del self._saving[session_id]
            if not self._table.has(session):
                self.forget_kv(session_id)  # the session ended in the meantime

    def _take(self, session: Session) -> tuple[CheckpointHeader, dict[str, npt.NDArray[Any]]] | None:
        """Return a copy of the KV of an idle session, between steps; None without KV, or if it is busy again."""
        pages = session.pages
        if pages is None or session.request is not None or not session.num_computed or not self._table.has(session):
            return None
        if pages.keeps.is_scored:  # which pages are kept depends on scores, which are computed again with the tokens
            return None
        tokens = np.frombuffer(session.content.tokens(0, session.num_computed).tobytes(), np.uint64)
        header = CheckpointHeader(
            session_id=session.session_id,
            fingerprint=self._fingerprint(session),
            num_tokens=session.num_computed,
            token_digest=token_digest(tokens),
            tables=pages.layout(),
        )
        arrays = dict(self._host.kv.read_pages(pages.page_ids))
        arrays["positions"] = self._host.slots.positions(pages.page_ids)
        return header, arrays

    def forget_kv(self, session_id: str) -> None:
        """Remove the file of a session that has ended; if it is being written, after that."""
        if session_id not in self._saving:
            with suppress(OutputError):  # the next start tries again
                self._checkpoints.remove(session_id)

    def forget_old(self) -> None:
        """Remove tombstones past their time to live; at most once per such period."""
        now_s, ttl_s = time.time(), self._table.config.tombstone_ttl_s
        if now_s - self._forgot_s >= ttl_s:
            self._forgot_s = now_s
            self.histories.forget(now_s - ttl_s)

    async def close(self) -> None:
        """Wait for all pending writes."""
        while self._saving:
            await asyncio.wait(list(self._saving.values()))
        await asyncio.to_thread(self.histories.close)

    def _fingerprint(self, session: Session) -> dict[str, str]:
        settings, memory = session.settings, self._host.memory
        groups = {} if memory is None else {"kv_groups": repr(memory.to_builtins()["kv_groups"])}
        return {
            "model": self._host.fingerprint(),
            "page_size": str(self._host.config.page_size),
            "sink": str(settings.sink),
            "window": str(settings.window),
            "positions": settings.positions,
            **groups,
        }


def usage_of(session: Session) -> Usage:
    """Return the counters of a session for storage."""
    return Usage(
        last_used_s=time.time(),
        num_turns=session.num_turns,
        num_computed_tokens=session.num_computed_tokens,
        inv1_violations=session.inv1_violations,
        inv2_violations=session.inv2_violations,
    )

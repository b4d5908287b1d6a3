"""The session runtime on one engine: a SessionRuntime for one event loop, beside the thread of the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np

from kvarts.content import UNIT_BYTES
from kvarts.llm.host import ModelHost
from kvarts.llm.listener import EngineDeadError, Gone
from kvarts.llm.llm_engine import LLMEngine
from kvarts.llm.outbox import Outbox
from kvarts.owners.shares import owner_of
from kvarts.request import Request
from kvarts.sampling import SamplingParams
from kvarts.session.appending import Appending
from kvarts.session.errors import SessionBusyError, SessionNotReadyError, SessionValueError
from kvarts.session.exclusive import Exclusive
from kvarts.session.generation import AppendTurn, GenerationTurn
from kvarts.session.keeper import Keeper, usage_of
from kvarts.session.session import Session
from kvarts.session.stored import EndReason
from kvarts.session.streams import UpdateStream
from kvarts.session.table import SessionTable
from kvarts.session.turns import Turns
from kvarts.session.under_way import UnderWay, settled
from kvarts.session.values import Done, SessionCounts, SessionInfo, SessionSettings, Update

__all__ = ["Sessions"]

T = TypeVar("T")

INFOS_AT_ONCE = 64
"""Sessions of a list that are looked at between two steps: a millisecond, or less."""


class _Held:
    """Tokens of an append, 8 bytes each, until they are in the history."""

    __slots__ = ("packed",)

    def __init__(self, packed: bytes) -> None:
        self.packed = packed

    @property
    def num_tokens(self) -> int:
        """The number of tokens that wait."""
        return len(self.packed) // UNIT_BYTES

    def drop(self) -> None:
        """Forget them: the history has them."""
        self.packed = b""


class Sessions:
    """A SessionRuntime over `table`. Everything but waiting happens in the thread of the engine, between steps.

    With a `keeper`, what is answered is on disk.
    """

    def __init__(self, table: SessionTable, keeper: Keeper | None = None) -> None:
        self._table = table
        self._keeper = keeper
        self._ending: dict[str, Future[int]] = {}
        """By session that was closed: what is done when that is on disk."""
        self._is_closing = False
        if keeper is not None:
            table.on_removed = self._removed
        self._host = table.host
        self._turns = Turns(table)
        self._appending = Appending(table, None if keeper is None else keeper.histories)
        self._exclusive = Exclusive()
        self._under_way: dict[str, UnderWay] = {}
        self._waiting: dict[str, set[_Held]] = {}
        """By owner: tokens of appends that are not in histories yet."""
        self._outbox: Outbox | None = None
        self._reaper: asyncio.Task[None] | None = None

    @property
    def host(self) -> ModelHost:
        """The model, and the loop that owns its engine."""
        return self._host

    @property
    def defaults(self) -> SessionSettings:
        """The settings of a session for which none are given."""
        return self._table.config.defaults

    async def create(self, owner: str, settings: SessionSettings | None = None) -> str:
        """Return the id of a new session."""
        self._check_open()
        chosen = self.defaults if settings is None else settings
        return await self._make(
            lambda: self._table.create(owner, chosen),
            lambda keeper, session: keeper.histories.create(keeper.stored(session)),
        )

    async def append(
        self,
        owner: str,
        session_id: str,
        tokens: Sequence[int],
        *,
        expected_length: int | None = None,
        queue: bool = False,
    ) -> int:
        """Append tokens; return the length of the history when their KV is in pages."""
        self._check_open()
        # Each wait below may be long, and many calls may wait: none keeps more of the tokens than it needs.
        held = _Held(self._packed(tokens))
        del tokens
        with self._pending(owner, held):
            session = await self._get(owner, session_id)
            await self._take(session, queue=queue)
            # What was appended is there, whether its client waits for the KV or not.
            appending = asyncio.get_running_loop().create_task(self._append(owner, session, held, expected_length))
            appending.add_done_callback(lambda task: task.cancelled() or task.exception())
            return await asyncio.shield(appending)

    async def generate(
        self,
        owner: str,
        session_id: str,
        params: SamplingParams,
        *,
        queue: bool = False,
        tokens: Sequence[int] = (),
        expected_length: int | None = None,
        priority: int = 0,
        begun: Callable[[Request], object] = lambda _: None,
    ) -> AsyncGenerator[Update, None]:
        """Yield Truncated, if tokens were dropped, then every token, then Done.

        `tokens` are appended before, in the same step, as with `append`. `priority`: the larger, the earlier; what has
        pages of its own is never preempted, and waits for no page. `begun` is told of the request in the thread of the
        engine.
        """
        self._check_open()
        packed = self._packed(tokens)
        session = await self._get(owner, session_id)
        await self._take(session, queue=queue)
        await self._write_ahead(session, packed, expected_length)
        stream = UpdateStream(self._streams(), lambda: self._end(session))
        turn = GenerationTurn(
            self._turns,
            session,
            params,
            stream,
            self._host.loop,
            now_ns=self._host.clock.now_ns,
            max_positions=self._appending.max_positions(session),
            priority=priority,
            write=None if self._keeper is None else partial(self._keeper.histories.append, session_id),
            begun=begun,
        )

        def begin(engine: LLMEngine) -> int | None:
            with self._appending.done(session, packed, expected_length):
                return turn.begin(engine)

        over = self._begin(session_id, turn.cancel)
        try:
            self._host.loop.start(begin, turn)
            while True:
                update = await stream.next()
                yield update
                if isinstance(update, Done):
                    return
        finally:
            if not over.done():  # it is not read any more
                self._host.loop.post(turn.cancel)
                await settled(over)

    async def cancel(self, owner: str, session_id: str) -> bool:
        """End the operation under way at a token boundary; return whether there was one."""
        await self._get(owner, session_id)
        operation = self._under_way.get(session_id)
        if operation is None:
            return False
        self._host.loop.post(operation.cancel)
        await asyncio.shield(operation.over)
        return True

    async def info(self, owner: str, session_id: str) -> SessionInfo:
        """Return a session as it is now."""
        return await self._call(lambda: self._table.info(self._table.get(owner, session_id)))

    async def named(self, owner: str, name: str) -> str | None:
        """Return the id of the session of `owner` with this id or label; None if there is none."""
        session = await self._call(lambda: self._table.named(owner, name))
        return None if session is None else session.session_id

    def counts(self) -> SessionCounts:
        """Return what all sessions are and hold now."""
        return self._table.counts()

    async def num_common(self, owner: str, session_id: str, tokens: Sequence[int]) -> tuple[int, int]:
        """Return how many of `tokens`, from the first, the history of a session begins with, and how long that is."""
        asked = np.array(tokens, np.uint64)

        def compare() -> tuple[int, int]:
            session = self._table.get(owner, session_id)
            most = min(len(asked), session.history_length)
            differs = np.flatnonzero(session.content.tokens(0, most) != asked[:most])
            return int(differs[0]) if len(differs) else most, session.history_length

        return await self._call(compare)

    async def close(self, owner: str, session_id: str) -> int:
        """End a session, and what is under way on it; return the length of its history."""
        session = await self._get(owner, session_id)
        operation = self._under_way.get(session_id)
        if operation is not None:
            self._host.loop.post(operation.cancel)
        async with self._exclusive.hold(session_id, queue=True, ahead=True):

            def close() -> int:
                self._table.remove(self._table.get(owner, session_id), "closed")
                return session.history_length

            length = await self._call(close)
            if self._keeper is not None:
                await asyncio.wrap_future(self._ending.pop(session_id))
            return length

    async def fork(self, owner: str, session_id: str, *, label: str = "", queue: bool = False) -> str:
        """Return the id of a new session with the same history and settings."""
        session = await self._get(owner, session_id)
        async with self._exclusive.hold(session_id, queue=queue):
            await self._catch_up(session)
            fork_id = await self._make(
                lambda: self._table.fork(self._table.get(owner, session_id), label),
                lambda keeper, fork: keeper.histories.fork(session_id, keeper.stored(fork)),
            )
            if self._keeper is not None:
                self._keeper.save_kv(self._table.get(owner, fork_id))
            return fork_id

    async def rollback(self, owner: str, session_id: str, length: int, *, queue: bool = False) -> int:
        """Shorten the history to `length`, and return it."""
        session = await self._get(owner, session_id)
        async with self._exclusive.hold(session_id, queue=queue):

            def check() -> None:
                self._table.get(owner, session_id)
                if not 0 <= length <= session.history_length:
                    raise SessionValueError(
                        f"the history has {session.history_length} tokens, not {length}", field="length"
                    )
                if not self._table.can_shorten(session, length):
                    raise SessionNotReadyError(
                        f"tokens that token {length} would see were dropped: the session keeps the first "
                        f"{session.settings.sink} and the last {session.settings.window} of "
                        f"{session.history_length}",
                        field="length",
                        hint="Roll back less far, or fork before.",
                    )

            await self._call(check)
            await self._catch_up(session)
            if self._keeper is not None:
                await asyncio.wrap_future(self._keeper.histories.truncate(session_id, length))
            await self._call(lambda: self._table.shorten(session, length))
            self._write_rest(session)
            return length

    async def list(self, owner: str) -> list[SessionInfo]:
        """Return the sessions of `owner`, the oldest first."""
        sessions = await self._call(lambda: self._table.of_owner(owner))
        infos: list[SessionInfo] = []
        for first in range(0, len(sessions), INFOS_AT_ONCE):
            infos += await self._call(partial(self._infos, owner, sessions[first : first + INFOS_AT_ONCE]))
        return infos

    async def reap(self) -> int:
        """Let sessions expire that were idle for too long; return how many."""

        def reap() -> int:
            expired = self._table.expired()
            for session in expired:
                self._table.remove(session, "expired")
            return len(expired)

        if self._keeper is not None:
            self._keeper.forget_old()
        return await self._call(reap)

    async def shut_down(self) -> None:
        """End what is under way, at token boundaries."""
        if self._reaper is not None:
            self._reaper.cancel()
            with suppress(asyncio.CancelledError):
                await self._reaper
            self._reaper = None
        self._is_closing = True
        while self._exclusive.num_busy:  # what waited for its turn begins, and ends as well
            under_way = list(self._under_way.values())
            for operation in under_way:
                self._host.loop.post(operation.cancel)
            if under_way:
                await asyncio.wait([operation.over for operation in under_way])
            await asyncio.sleep(0.001)
        if self._keeper is not None:
            await self._keeper.close()

    # Inside -----------------------------------------------------------------------------------------------

    async def _append(self, owner: str, session: Session, held: _Held, expected_length: int | None) -> int:
        await self._write_ahead(session, held.packed, expected_length)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def finish(error: BaseException | None) -> None:
            def deliver() -> None:
                self._end(session)
                if done.done():
                    return  # its client has gone; what was appended is there all the same
                if error is None:
                    done.set_result(None)
                else:
                    done.set_exception(error)

            try:
                loop.call_soon_threadsafe(deliver)
            except RuntimeError as closed:
                raise Gone from closed

        turn = AppendTurn(self._turns, session, self._host.loop, finish)
        length = 0

        def begin(engine: LLMEngine) -> int | None:
            nonlocal length
            with self._appending.done(session, held.packed, expected_length):
                held.drop()
                length = session.history_length
                return turn.begin(engine)

        self._begin(session.session_id, turn.cancel)
        self._host.loop.start(begin, turn)
        await done
        return length

    @contextmanager
    def _pending(self, owner: str, held: _Held) -> Iterator[None]:
        """Count tokens that wait to be appended. Raise SessionsExhaustedError if histories have no room for them."""
        name = owner_of(owner)
        waiting = self._waiting.setdefault(name, set())
        self._table.capacity.check_tokens(owner, held.num_tokens + sum(other.num_tokens for other in waiting))
        waiting.add(held)
        try:
            yield
        finally:
            waiting.discard(held)
            if not waiting:
                self._waiting.pop(name, None)

    async def _write_ahead(self, session: Session, packed: bytes, expected_length: int | None) -> None:
        """Have tokens on disk before they are appended, of a session that this has; if it fails, pass that on."""
        if self._keeper is None or not packed:
            return
        num_tokens = len(packed) // UNIT_BYTES
        try:
            before = await self._call(lambda: self._appending.check(session, num_tokens, expected_length))
            await self._keeper.append(session, before, packed)
        except BaseException:
            self._exclusive.pass_on(session.session_id)
            raise

    async def _take(self, session: Session, *, queue: bool) -> None:
        """Wait for the turn of an operation that goes on with the history."""
        await self._exclusive.take(session.session_id, queue=queue)
        try:
            await self._catch_up(session)
        except BaseException:
            self._exclusive.pass_on(session.session_id)
            raise

    async def _catch_up(self, session: Session) -> None:
        """See to it that the history on disk is what it is here."""
        if self._keeper is not None:
            await self._keeper.catch_up(session)

    def _begin(self, session_id: str, cancel: Callable[[LLMEngine], None]) -> asyncio.Future[None]:
        """Note an operation that has its turn; return what is done when it has ended."""
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._under_way[session_id] = UnderWay(cancel, over)
        return over

    def _end(self, session: Session) -> None:
        """Note the end of an operation, and pass the turn on."""
        self._write_rest(session)
        self._under_way.pop(session.session_id).over.set_result(None)
        self._exclusive.pass_on(session.session_id)

    async def _make(self, make: Callable[[], Session], write: Callable[[Keeper, Session], Future[Any]]) -> str:
        """Return the id of the session that `make` returns, when `write` has it on disk.

        One that cannot be there, or that is not waited for any more, goes at once.
        """
        made: list[Session] = []
        try:
            await self._call(lambda: made.append(make()))
            if self._keeper is not None:
                await asyncio.wrap_future(write(self._keeper, made[0]))
        except BaseException:
            self._host.loop.post(lambda _: self._forget(made))
            raise
        return made[0].session_id

    def _write_rest(self, session: Session) -> None:
        """Write what an operation has left, beside what happens next."""
        if self._keeper is not None:
            self._keeper.histories.note(session.session_id, usage_of(session))
            self._keeper.save_kv(session)

    def _removed(self, session: Session, reason: EndReason) -> None:
        """Write that a session is gone. In the thread of the engine."""
        assert self._keeper is not None
        ending = self._keeper.histories.end(session.session_id, reason, time.time())
        if reason == "closed":
            self._ending[session.session_id] = ending
        self._keeper.forget_kv(session.session_id)

    def _check_open(self) -> None:
        if self._is_closing:
            raise SessionBusyError("the server is shutting down", hint="Try again when it is back.")
        self._start_reaper()

    def _infos(self, owner: str, sessions: Sequence[Session]) -> Sequence[SessionInfo]:
        """Return those that are still there."""
        return [
            self._table.info(session) for session in sessions if self._table.find(owner, session.session_id) is session
        ]

    def _forget(self, sessions: Sequence[Session]) -> None:
        for session in sessions:
            if self._table.has(session):  # else it was evicted for another meanwhile
                self._table.remove(session, "closed")
            self._ending.pop(session.session_id, None)

    def _packed(self, tokens: Sequence[int]) -> bytes:
        vocab_size = self._host.vocab_size
        given = np.asarray(tokens) if len(tokens) else np.zeros(0, np.uint64)
        if given.dtype.kind in "iu":
            wrong = np.flatnonzero((given < 0) | (given >= vocab_size)).tolist()
        else:  # above what 8 bytes hold, or no numbers at all
            wrong = [place for place, token in enumerate(tokens) if not 0 <= token < vocab_size]
        if wrong:
            raise SessionValueError(
                f"token {tokens[wrong[0]]} at place {wrong[0]} is not in the vocabulary of {vocab_size}",
                field="token_ids",
            )
        return given.astype(np.uint64, copy=False).tobytes()

    async def _get(self, owner: str, session_id: str) -> Session:
        session = self._table.find(owner, session_id)  # nothing changes, so it need not wait for the end of a step
        return await self._call(lambda: self._table.get(owner, session_id)) if session is None else session

    async def _call(self, task: Callable[[], T]) -> T:
        """Run `task` in the thread of the engine, between steps."""
        return await asyncio.wrap_future(self._host.loop.post(lambda _: task()))

    def _streams(self) -> Outbox:
        if self._outbox is None:
            self._outbox = Outbox()
            self._outbox.open(asyncio.get_running_loop())
        return self._outbox

    def _start_reaper(self) -> None:
        if self._reaper is None:
            self._reaper = asyncio.get_running_loop().create_task(self._reap_for_ever())

    async def _reap_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._table.config.reap_every_s)
            with suppress(EngineDeadError):  # others tell
                await self.reap()

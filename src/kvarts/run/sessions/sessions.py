"""The session runtime on one engine: a SessionRuntime for one event loop, next to the engine's thread.

Concurrent operations on one session are refused, or wait in order.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from kvarts.base.errors import KvartsError
from kvarts.base.tenants import owner_of
from kvarts.core.content import UNIT_BYTES
from kvarts.core.request import Request
from kvarts.core.sampling import SamplingParams
from kvarts.run.engine_loop import ModelHost
from kvarts.run.llm_engine import EngineDeadError, Gone, LLMEngine, Outbox
from kvarts.run.sessions.generation import AppendTurn, GenerationTurn, SessionTurns, UpdateStream
from kvarts.run.sessions.history import Appending
from kvarts.run.sessions.keeper import Keeper, usage_of
from kvarts.run.sessions.table import Session, SessionTable
from kvarts.run.sessions.values import (
    Done,
    EndReason,
    SessionBusyError,
    SessionCounts,
    SessionInfo,
    SessionNotReadyError,
    SessionSettings,
    SessionValueError,
    Update,
)

__all__ = ["Exclusive", "Sessions", "TurnUnderWay", "settled"]


class Exclusive:
    """Owner of the locks of sessions. For one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """For each busy session, the operations that wait for it."""

    @property
    def num_busy(self) -> int:
        """The number of sessions with an operation in progress."""
        return len(self._waiting)

    async def take(self, session_id: str, *, queue: bool, ahead: bool = False) -> None:
        """Lock the session until `pass_on`. Raise SessionBusyError if it is busy, unless `queue` is set.

        `ahead`: wait in front of all others.
        """
        waiting = self._waiting.get(session_id)
        if waiting is None:
            self._waiting[session_id] = deque()
            return
        if not queue:
            raise SessionBusyError(
                f"session {session_id} is busy", field="session_id", hint="Wait for its operation, or ask to queue."
            )
        turn = asyncio.get_running_loop().create_future()
        if ahead:
            waiting.appendleft(turn)
        else:
            waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.pass_on(session_id)  # the lock was granted before the cancellation
            elif turn in waiting:  # else `pass_on` has removed it already
                waiting.remove(turn)
            raise

    def pass_on(self, session_id: str) -> None:
        """Hand the lock to the next waiting operation, or release it."""
        waiting = self._waiting[session_id]
        while waiting:
            turn = waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        del self._waiting[session_id]

    @asynccontextmanager
    async def hold(self, session_id: str, *, queue: bool, ahead: bool = False) -> AsyncIterator[None]:
        """Lock the session as `take` does, and pass it on at the end."""
        await self.take(session_id, queue=queue, ahead=ahead)
        try:
            yield
        finally:
            self.pass_on(session_id)


class TurnUnderWay(NamedTuple):
    """An append or a generation. `cancel` ends it, in the engine's thread; `over` completes when it has ended."""

    cancel: Callable[[LLMEngine], None]
    over: asyncio.Future[None]


async def settled(over: asyncio.Future[None]) -> None:
    """Wait for `over`, even if this task is cancelled meanwhile; the cancellation is raised afterwards."""
    cancelled = None
    while not over.done():
        try:
            await asyncio.shield(over)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


T = TypeVar("T")

INFOS_AT_ONCE = 64
"""Sessions of a list that are read between two steps; this takes at most about a millisecond."""


class _Held:
    """Tokens of an append, 8 bytes each, until they are in the history."""

    __slots__ = ("packed",)

    def __init__(self, packed: bytes) -> None:
        self.packed = packed

    @property
    def num_tokens(self) -> int:
        """The number of waiting tokens."""
        return len(self.packed) // UNIT_BYTES

    def drop(self) -> None:
        """Drop the tokens, which are in the history now."""
        self.packed = b""


class Sessions:
    """A SessionRuntime over `table`. Everything except waiting happens in the engine's thread, between steps.

    With a `keeper`, results are on disk before they are returned.
    """

    def __init__(self, table: SessionTable, keeper: Keeper | None = None) -> None:
        self._table = table
        self._keeper = keeper
        self._ending: dict[str, Future[int]] = {}
        """For each closed session, a future that completes when its end is on disk."""
        self._is_closing = False
        if keeper is not None:
            table.on_removed = self._removed
        self._host = table.host
        self._turns = SessionTurns(table)
        self._appending = Appending(table, None if keeper is None else keeper.histories)
        self._exclusive = Exclusive()
        self._under_way: dict[str, TurnUnderWay] = {}
        self._waiting: dict[str, set[_Held]] = {}
        """By owner: tokens of appends that are not in histories yet."""
        self._outbox: Outbox | None = None
        self._reaper: asyncio.Task[None] | None = None
        self._repairs: set[asyncio.Task[None]] = set()

    @property
    def host(self) -> ModelHost:
        """The model, and the loop that owns its engine."""
        return self._host

    @property
    def defaults(self) -> SessionSettings:
        """The settings of sessions created without any."""
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
        """Append tokens; return the length of the history once their KV is in pages."""
        self._check_open()
        # Each wait below may be long, and many calls may wait, so none holds more copies of the tokens than needed.
        held = _Held(self._packed(tokens))
        del tokens
        with self._pending(owner, held):
            session = await self._get(owner, session_id)
            await self._take(session, queue=queue)
            # Appended tokens stay in the history even if the client stops waiting for their KV.
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

        `tokens` are appended first, in the same step, as with `append`. `priority`: larger values run earlier. Sessions
        with their own pages are never preempted, and never wait for pages. `begun` is called with the request, in the
        engine's thread.
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
            self._host,
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
            if not over.done():  # the reader has stopped early
                self._host.loop.post(turn.cancel)
                await settled(over)

    async def cancel(self, owner: str, session_id: str) -> bool:
        """End the current operation at a token boundary; return whether there was one."""
        await self._get(owner, session_id)
        operation = self._under_way.get(session_id)
        if operation is None:
            return False
        self._host.loop.post(operation.cancel)
        await asyncio.shield(operation.over)
        return True

    async def info(self, owner: str, session_id: str) -> SessionInfo:
        """Return the current state of a session."""
        return await self._call(lambda: self._table.info(self._table.get(owner, session_id)))

    async def named(self, owner: str, name: str) -> str | None:
        """Return the id of the session of `owner` with this id or label; None if not found."""
        session = await self._call(lambda: self._table.named(owner, name))
        return None if session is None else session.session_id

    def counts(self) -> SessionCounts:
        """Return the totals over all sessions."""
        return self._table.counts()

    async def num_common(self, owner: str, session_id: str, tokens: Sequence[int]) -> tuple[int, int]:
        """Return the length of the common prefix of `tokens` and a session's history, and that history's length."""
        asked = np.array(tokens, np.uint64)

        def compare() -> tuple[int, int]:
            session = self._table.get(owner, session_id)
            most = min(len(asked), session.history_length)
            differs = np.flatnonzero(session.content.tokens(0, most) != asked[:most])
            return int(differs[0]) if len(differs) else most, session.history_length

        return await self._call(compare)

    async def close(self, owner: str, session_id: str) -> int:
        """End a session and its current operation; return the length of its history."""
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
                        f"tokens that token {length} would see were dropped: the session keeps "
                        f"{session.settings.kept_words} of {session.history_length}",
                        field="length",
                        hint="Roll back less far, or fork before.",
                    )

            await self._call(check)
            await self._catch_up(session)
            if self._keeper is not None:
                try:
                    await asyncio.wrap_future(self._keeper.histories.truncate(session_id, length))
                except BaseException:
                    session.is_written = False  # the outcome on disk is unknown here
                    with suppress(KvartsError):
                        await self._catch_up(session)
                    raise
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
        """Remove sessions that were idle for too long; return their number."""

        def reap() -> int:
            expired = self._table.expired()
            for session in expired:
                self._table.remove(session, "expired")
            return len(expired)

        if self._keeper is not None:
            self._keeper.forget_old()
        return await self._call(reap)

    async def shut_down(self) -> None:
        """End all operations at token boundaries, and complete pending writes."""
        if self._reaper is not None:
            self._reaper.cancel()
            with suppress(asyncio.CancelledError):
                await self._reaper
            self._reaper = None
        self._is_closing = True
        while self._exclusive.num_busy:  # operations that wait for their turn begin now, and are ended as well
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
                    return  # the client has left; the tokens stay in the history
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

        over = self._begin(session.session_id, turn.cancel)
        self._host.loop.start(begin, turn)
        try:
            await done
        except Exception:
            await asyncio.shield(over)  # it can be tried again at once
            raise
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
        """Write tokens to disk before they are appended. The caller holds the session; a failure passes it on."""
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
        """Wait for the session, for an operation that continues its history."""
        await self._exclusive.take(session.session_id, queue=queue)
        try:
            await self._catch_up(session)
        except BaseException:
            self._exclusive.pass_on(session.session_id)
            raise

    async def _catch_up(self, session: Session) -> None:
        """Make sure that the history on disk equals this one."""
        if self._keeper is not None:
            await self._keeper.catch_up(session)

    def _begin(self, session_id: str, cancel: Callable[[LLMEngine], None]) -> asyncio.Future[None]:
        """Register an operation that has the session; return a future that completes when it has ended."""
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._under_way[session_id] = TurnUnderWay(cancel, over)
        return over

    def _end(self, session: Session) -> None:
        """Record the end of an operation, and pass the session on."""
        self._write_rest(session)
        if self._keeper is None or session.is_written:
            self._pass_on(session)
        else:
            self._repairs.add(task := asyncio.get_running_loop().create_task(self._repair(session)))
            task.add_done_callback(self._repairs.discard)

    def _pass_on(self, session: Session) -> None:
        self._under_way.pop(session.session_id).over.set_result(None)
        self._exclusive.pass_on(session.session_id)

    async def _repair(self, session: Session) -> None:
        """After a failed write, make the history on disk equal to this one, if the disk lets it; then pass it on."""
        try:
            with suppress(KvartsError):  # the next operation tries again, and raises it
                await self._catch_up(session)
        finally:
            self._pass_on(session)

    async def _make(self, make: Callable[[], Session], write: Callable[[Keeper, Session], Future[Any]]) -> str:
        """Return the id of the session returned by `make`, once `write` has stored it.

        If it cannot be stored, or the caller has stopped waiting, it is removed again.
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
        """Store the counters and KV after an operation, in the background."""
        if self._keeper is not None:
            self._keeper.histories.note(session.session_id, usage_of(session))
            self._keeper.save_kv(session)

    def _removed(self, session: Session, reason: EndReason) -> None:
        """Store the end of a session. In the engine's thread."""
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
        """Return the state of the sessions that still exist."""
        return [
            self._table.info(session) for session in sessions if self._table.find(owner, session.session_id) is session
        ]

    def _forget(self, sessions: Sequence[Session]) -> None:
        for session in sessions:
            if self._table.has(session):  # otherwise it has been evicted in the meantime
                self._table.remove(session, "closed")
            self._ending.pop(session.session_id, None)

    def _packed(self, tokens: Sequence[int]) -> bytes:
        vocab_size = self._host.vocab_size
        given = np.asarray(tokens) if len(tokens) else np.zeros(0, np.uint64)
        if given.dtype.kind in "iu":
            wrong = np.flatnonzero((given < 0) | (given >= vocab_size)).tolist()
        else:  # values above 64 bits, or not numbers
            wrong = [place for place, token in enumerate(tokens) if not 0 <= token < vocab_size]
        if wrong:
            raise SessionValueError(
                f"token {tokens[wrong[0]]} at place {wrong[0]} is not in the vocabulary of {vocab_size}",
                field="token_ids",
            )
        return given.astype(np.uint64, copy=False).tobytes()

    async def _get(self, owner: str, session_id: str) -> Session:
        session = self._table.find(owner, session_id)  # a read only, so it need not wait for the end of a step
        return await self._call(lambda: self._table.get(owner, session_id)) if session is None else session

    async def _call(self, task: Callable[[], T]) -> T:
        """Run `task` in the engine's thread, between steps."""
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
            with suppress(EngineDeadError):  # other calls report it
                await self.reap()

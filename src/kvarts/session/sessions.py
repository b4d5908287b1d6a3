"""The session runtime on one engine: a SessionRuntime for one event loop, beside the thread of the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np

from kvarts.content import UNIT_BYTES, pack_units
from kvarts.llm.llm_engine import LLMEngine
from kvarts.sampling import SamplingParams
from kvarts.session.errors import SessionBusyError, SessionNotReadyError, SessionValueError
from kvarts.session.exclusive import Exclusive
from kvarts.session.generation import AppendTurn, GenerationTurn
from kvarts.session.keeper import Keeper, usage_of
from kvarts.session.session import Session
from kvarts.session.stored import EndReason
from kvarts.session.streams import Outbox, UpdateStream
from kvarts.session.table import SessionTable
from kvarts.session.turns import Turns
from kvarts.session.values import Done, SessionInfo, SessionSettings, Update

__all__ = ["Sessions"]

T = TypeVar("T")


class Sessions:
    """A SessionRuntime over `table`. Everything but waiting happens in the thread of the engine, between steps."""

    def __init__(self, table: SessionTable, keeper: Keeper | None = None) -> None:
        self._table = table
        self._keeper = keeper
        self._removing: dict[str, Future[int]] = {}
        self._is_closing = False
        self._num_appends = 0
        if keeper is not None:
            table.on_removed = self._removed
        self._host = table.host
        self._turns = Turns(table)
        self._exclusive = Exclusive()
        self._generating: dict[str, GenerationTurn] = {}
        self._outbox: Outbox | None = None
        self._reaper: asyncio.Task[None] | None = None

    @property
    def defaults(self) -> SessionSettings:
        """The settings of a session for which none are given."""
        return self._table.config.defaults

    async def create(self, owner: str, settings: SessionSettings | None = None) -> str:
        """Return the id of a new session."""
        chosen = self.defaults if settings is None else settings
        self._check_open()
        session = await self._call(lambda: self._table.create(owner, chosen))
        if self._keeper is not None:
            await self._keep(session, self._keeper.histories.create(self._keeper.stored(session)))
        self._start_reaper()
        return session.session_id

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
        packed = self._packed(tokens)
        session = await self._get(owner, session_id)
        async with self._exclusive.hold(session_id, queue=queue):
            # What was appended is there, whether its client waits for the KV or not.
            return await asyncio.shield(self._append(owner, session, packed, expected_length))

    async def generate(
        self, owner: str, session_id: str, params: SamplingParams, *, queue: bool = False
    ) -> AsyncGenerator[Update, None]:
        """Yield Truncated, if tokens were dropped, then every token, then Done."""
        self._check_open()
        session = await self._get(owner, session_id)
        async with self._exclusive.hold(session_id, queue=queue):
            stream = UpdateStream(self._streams())
            turn = GenerationTurn(
                self._turns,
                session,
                params,
                stream,
                self._host.loop,
                now_ns=self._host.clock.now_ns,
                max_positions=self._max_positions(session),
                write=None if self._keeper is None else partial(self._keeper.histories.append, session_id),
            )

            def begin(engine: LLMEngine) -> int | None:
                self._table.get(owner, session_id)  # it may have gone while this waited for its turn
                return turn.begin(engine)

            self._generating[session_id] = turn
            self._host.loop.start(begin, turn)
            is_over = False
            try:
                while not is_over:
                    update = await stream.next()
                    is_over = isinstance(update, Done)
                    if is_over:
                        self._turn_ended(session)
                    yield update
            finally:
                if not is_over:
                    if not turn.is_over:
                        await asyncio.shield(self._cancel(turn, stream))
                    self._turn_ended(session)
                del self._generating[session_id]

    async def cancel(self, owner: str, session_id: str) -> bool:
        """End the generation under way at a token boundary; return whether there was one."""
        await self._get(owner, session_id)
        turn = self._generating.get(session_id)
        if turn is None or turn.is_over:
            return False
        await asyncio.wrap_future(self._host.loop.post(turn.cancel))
        return True

    async def info(self, owner: str, session_id: str) -> SessionInfo:
        """Return a session as it is now."""
        return await self._call(lambda: self._table.info(self._table.get(owner, session_id)))

    async def close(self, owner: str, session_id: str) -> int:
        """End a session, and what is under way on it; return the length of its history."""
        session = await self._get(owner, session_id)
        turn = self._generating.get(session_id)
        if turn is not None:
            await asyncio.wrap_future(self._host.loop.post(turn.cancel))
        async with self._exclusive.hold(session_id, queue=True, ahead=True):

            def close() -> int:
                self._table.remove(self._table.get(owner, session_id), "closed")
                return session.history_length

            length = await self._call(close)
            removing = self._removing.pop(session_id, None)
            if removing is not None:
                await asyncio.wrap_future(removing)
            return length

    async def fork(self, owner: str, session_id: str, *, label: str = "", queue: bool = False) -> str:
        """Return the id of a new session with the same history and settings."""
        await self._get(owner, session_id)
        async with self._exclusive.hold(session_id, queue=queue):
            forked = await self._call(lambda: self._table.fork(self._table.get(owner, session_id), label))
            if self._keeper is not None:
                await self._keep(forked, self._keeper.histories.fork(session_id, self._keeper.stored(forked)))
                self._keeper.save_kv(forked)
            return forked.session_id

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
            if self._keeper is not None:
                await asyncio.wrap_future(self._keeper.histories.truncate(session_id, length))
            await self._call(lambda: self._table.shorten(session, length))
            self._turn_ended(session)
            return length

    async def list(self, owner: str) -> list[SessionInfo]:
        """Return the sessions of `owner`, the oldest first."""
        return await self._call(lambda: [self._table.info(session) for session in self._table.of_owner(owner)])

    async def reap(self) -> int:
        """Let sessions expire that were idle for too long; return how many."""

        def reap() -> int:
            expired = self._table.expired()
            for session in expired:
                self._table.remove(session, "expired")
            return len(expired)

        return await self._call(reap)

    async def shut_down(self) -> None:
        """End what is under way, at token boundaries."""
        if self._reaper is not None:
            self._reaper.cancel()
            with suppress(asyncio.CancelledError):
                await self._reaper
            self._reaper = None
        self._is_closing = True
        turns = list(self._generating.values())
        for turn in turns:
            await asyncio.wrap_future(self._host.loop.post(turn.cancel))
        while self._num_appends or any(not turn.is_over for turn in turns):
            await asyncio.sleep(0.005)
        if self._keeper is not None:
            await self._keeper.close()

    # Inside -----------------------------------------------------------------------------------------------

    async def _append(self, owner: str, session: Session, packed: bytes, expected_length: int | None) -> int:
        self._num_appends += 1
        try:
            return await self._append_now(owner, session, packed, expected_length)
        finally:
            self._num_appends -= 1

    async def _append_now(self, owner: str, session: Session, packed: bytes, expected_length: int | None) -> int:
        before = await self._call(lambda: self._check_append(owner, session, packed, expected_length))
        if self._keeper is not None and packed:
            tokens = np.frombuffer(packed, np.uint64)
            await asyncio.wrap_future(self._keeper.histories.append(session.session_id, before, tokens))
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()

        def finish(error: BaseException | None) -> None:
            def deliver() -> None:
                if error is None:
                    done.set_result(None)
                else:
                    done.set_exception(error)

            loop.call_soon_threadsafe(deliver)

        turn = AppendTurn(self._turns, session, self._host.loop, finish)

        def begin(engine: LLMEngine) -> int | None:
            self._table.get(owner, session.session_id)
            session.content.append(packed)
            try:
                return turn.begin(engine)
            except BaseException:
                self._table.shorten(session, before)
                raise

        self._host.loop.start(begin, turn)
        await done
        self._turn_ended(session)
        return before + len(packed) // UNIT_BYTES

    def _check_append(self, owner: str, session: Session, packed: bytes, expected_length: int | None) -> int:
        """Return the length of the history. Raise SessionNotReadyError if tokens cannot be appended to it."""
        self._table.get(owner, session.session_id)
        before = session.history_length
        if expected_length is not None and expected_length != before:
            raise SessionNotReadyError(
                f"the history has {before} tokens, and {expected_length} were expected",
                field="expected_length",
                hint="The tokens may be there already: compare with what was sent.",
            )
        most = self._max_positions(session)
        length = before + len(packed) // UNIT_BYTES
        if most is not None and length > most:
            raise SessionNotReadyError(
                f"the history would have {length} tokens, and the model was trained for {most} positions",
                field="token_ids",
                hint="Create the session with positions='cache', or with past_max_positions.",
            )
        return before

    def _turn_ended(self, session: Session) -> None:
        """Write what a turn has left, beside what happens next."""
        if self._keeper is not None:
            self._keeper.histories.note(session.session_id, usage_of(session))
            self._keeper.save_kv(session)

    async def _keep(self, session: Session, written: Future[Any]) -> None:
        """Wait until a new session is on disk; if it cannot be there, it is not here either."""
        try:
            await asyncio.wrap_future(written)
        except BaseException:
            await self._call(lambda: self._table.remove(session, "closed"))
            raise

    def _removed(self, session: Session, reason: EndReason) -> None:
        """Write that a session is gone. In the thread of the engine."""
        assert self._keeper is not None
        ended = self._keeper.histories.end(session.session_id, reason, time.time())
        if reason == "closed":
            self._removing[session.session_id] = ended
        self._keeper.forget_kv(session.session_id)

    def _check_open(self) -> None:
        if self._is_closing:
            raise SessionBusyError("the server is shutting down", hint="Try again when it is back.")

    async def _cancel(self, turn: GenerationTurn, stream: UpdateStream) -> None:
        """End a generation that is not read any more, and wait for its end."""
        self._host.loop.post(turn.cancel)
        with suppress(Exception):  # of a generation that is not wanted any more
            while not isinstance(await stream.next(), Done):
                pass

    def _packed(self, tokens: Sequence[int]) -> bytes:
        vocab_size = self._host.vocab_size
        for place, token in enumerate(tokens):
            if not 0 <= token < vocab_size:
                raise SessionValueError(
                    f"token {token} at place {place} is not in the vocabulary of {vocab_size}", field="token_ids"
                )
        return pack_units(tokens)

    def _max_positions(self, session: Session) -> int | None:
        """Return how long a history may become."""
        settings = session.settings
        if settings.positions == "cache" or settings.past_max_positions:
            return None
        return self._host.max_positions

    async def _get(self, owner: str, session_id: str) -> Session:
        return await self._call(lambda: self._table.get(owner, session_id))

    async def _call(self, task: Callable[[], T]) -> T:
        """Run `task` in the thread of the engine, between steps."""
        return await asyncio.wrap_future(self._host.loop.post(lambda _: task()))

    def _streams(self) -> Outbox:
        if self._outbox is None:
            self._outbox = Outbox(asyncio.get_running_loop())
        return self._outbox

    def _start_reaper(self) -> None:
        if self._reaper is None:
            self._reaper = asyncio.get_running_loop().create_task(self._reap_for_ever())

    async def _reap_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._table.config.reap_every_s)
            await self.reap()

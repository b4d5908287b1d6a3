"""The session runtime on one engine: a SessionRuntime for one event loop, beside the thread of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from kvarts.content import UNIT_BYTES, pack_units
from kvarts.llm.llm_engine import LLMEngine
from kvarts.sampling import SamplingParams
from kvarts.session.errors import SessionNotReadyError, SessionValueError
from kvarts.session.exclusive import Exclusive
from kvarts.session.generation import AppendTurn, GenerationTurn
from kvarts.session.session import Session
from kvarts.session.streams import Outbox, UpdateStream
from kvarts.session.table import SessionTable
from kvarts.session.turns import Turns
from kvarts.session.values import Done, SessionInfo, SessionSettings, Update

__all__ = ["Sessions"]

T = TypeVar("T")


class Sessions:
    """A SessionRuntime over `table`. Everything but waiting happens in the thread of the engine, between steps."""

    def __init__(self, table: SessionTable) -> None:
        self._table = table
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
        session = await self._call(lambda: self._table.create(owner, chosen))
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
        packed = self._packed(tokens)
        session = await self._get(owner, session_id)
        async with self._exclusive.hold(session_id, queue=queue):
            # What was appended is there, whether its client waits for the KV or not.
            return await asyncio.shield(self._append(owner, session, packed, expected_length))

    async def generate(
        self, owner: str, session_id: str, params: SamplingParams, *, queue: bool = False
    ) -> AsyncGenerator[Update, None]:
        """Yield Truncated, if tokens were dropped, then every token, then Done."""
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
            )

            def begin(engine: LLMEngine) -> int | None:
                self._table.get(owner, session_id)  # it may have gone while this waited for its turn
                return turn.begin(engine)

            self._generating[session_id] = turn
            self._host.loop.start(begin, turn)
            is_over = False
            try:
                while not is_over:
                    try:
                        update = await stream.next()
                    except Exception:
                        is_over = True
                        raise
                    is_over = isinstance(update, Done)
                    yield update
            finally:
                if not is_over:
                    await asyncio.shield(self._cancel(turn, stream))
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

            return await self._call(close)

    async def fork(self, owner: str, session_id: str, *, label: str = "", queue: bool = False) -> str:
        """Return the id of a new session with the same history and settings."""
        await self._get(owner, session_id)
        async with self._exclusive.hold(session_id, queue=queue):
            forked = await self._call(lambda: self._table.fork(self._table.get(owner, session_id), label))
            return forked.session_id

    async def rollback(self, owner: str, session_id: str, length: int, *, queue: bool = False) -> int:
        """Shorten the history to `length`, and return it."""
        await self._get(owner, session_id)
        async with self._exclusive.hold(session_id, queue=queue):

            def shorten() -> int:
                session = self._table.get(owner, session_id)
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
                self._table.shorten(session, length)
                return length

            return await self._call(shorten)

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
        for turn in list(self._generating.values()):
            await asyncio.wrap_future(self._host.loop.post(turn.cancel))

    # Inside -----------------------------------------------------------------------------------------------

    async def _append(self, owner: str, session: Session, packed: bytes, expected_length: int | None) -> int:
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
        length = 0

        def begin(engine: LLMEngine) -> int | None:
            nonlocal length
            self._table.get(owner, session.session_id)
            if expected_length is not None and expected_length != session.history_length:
                raise SessionNotReadyError(
                    f"the history has {session.history_length} tokens, and {expected_length} were expected",
                    field="expected_length",
                    hint="The tokens may be there already: compare with what was sent.",
                )
            before = session.history_length
            most = self._max_positions(session)
            length = before + len(packed) // UNIT_BYTES
            if most is not None and length > most:
                raise SessionNotReadyError(
                    f"the history would have {length} tokens, and the model was trained for {most} positions",
                    field="token_ids",
                    hint="Create the session with positions='cache', or with past_max_positions.",
                )
            session.content.append(packed)
            try:
                return turn.begin(engine)
            except BaseException:
                self._table.shorten(session, before)
                raise

        self._host.loop.start(begin, turn)
        await done
        return length

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

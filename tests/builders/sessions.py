"""Sessions on mocks and on real models, and what one of them says turn by turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from random import Random
from threading import Event
from typing import Any

from kvarts.base.clock import Clock, VirtualClock
from kvarts.core.config import EngineConfig
from kvarts.core.event_log import EventReader
from kvarts.core.sampling import SamplingParams
from kvarts.run.engine_loop import ModelHost
from kvarts.run.sessions.opening import MOCK_VOCAB_SIZE, mock_host
from kvarts.run.sessions.sessions import Sessions
from kvarts.run.sessions.table import SessionTable
from kvarts.run.sessions.values import Done, SessionInfo, SessionsConfig, SessionSettings, Token

__all__ = [
    "OWNER",
    "GateClock",
    "appending",
    "check_at_rest",
    "greedy",
    "mock_says",
    "mock_sessions",
    "run_to_rest",
    "say",
    "sessions_on",
    "talk_at_random",
]

OWNER = "somebody"


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True)


def mock_sessions(
    config: SessionsConfig | None = None,
    *,
    num_pages: int = 300,
    page_size: int = 4,
    budget: int = 64,
    seqs: int = 8,
    clock: Clock | None = None,
    max_positions: int | None = None,
    audit: bool = True,
    readers: Sequence[EventReader] = (),
) -> tuple[Sessions, ModelHost]:
    engine = EngineConfig(num_pages=num_pages, page_size=page_size, max_num_batched_tokens=budget, max_num_seqs=seqs)
    clock = VirtualClock() if clock is None else clock
    host = mock_host(engine, clock=clock, audit=audit, max_positions=max_positions, readers=readers)
    return sessions_on(host, config), host


def sessions_on(host: ModelHost, config: SessionsConfig | None = None) -> Sessions:
    if config is None:
        config = SessionsConfig(defaults=SessionSettings(sink=3, window=10), chunk_tokens=16)
    return Sessions(SessionTable(host, config))


async def say(sessions: Sessions, session_id: str, tokens: Sequence[int], num_tokens: int) -> list[int]:
    """Append, if there is something, and return what is generated then."""
    if tokens:
        await sessions.append(OWNER, session_id, tokens)
    said = []
    async for update in sessions.generate(OWNER, session_id, greedy(num_tokens)):
        if isinstance(update, Token):
            said.append(update.token_id)
        elif isinstance(update, Done):
            assert update.num_tokens == len(said)
    return said


class GateClock(VirtualClock):
    """Virtual time that stops while the gate is shut: a step that has begun ends when it is open again."""

    def __init__(self) -> None:
        super().__init__()
        self._is_open = Event()
        self._is_open.set()
        self._is_waiting = Event()

    def shut(self) -> None:
        self._is_waiting.clear()
        self._is_open.clear()

    def open(self) -> None:
        self._is_open.set()

    async def step_begun(self) -> None:
        """Return when a step waits at the gate."""
        while not self._is_waiting.is_set():
            await asyncio.sleep(0.001)

    def wait_until_ns(self, at_ns: int) -> None:
        if not self._is_open.is_set():
            self._is_waiting.set()
            assert self._is_open.wait(20), "nobody opened the gate"
        super().wait_until_ns(at_ns)


async def appending(sessions: Sessions, clock: GateClock, tokens: Sequence[int]) -> tuple[str, asyncio.Future[int]]:
    """A session and an append to it, in a step that the gate holds."""
    session = await sessions.create(OWNER)
    clock.shut()
    append = asyncio.ensure_future(sessions.append(OWNER, session, tokens))
    await clock.step_begun()
    return session, append


async def talk_at_random(
    sessions: Sessions,
    settings: SessionSettings,
    ids: Callable[[int], list[int]],
    random: Random,
    expected: Callable[[list[int], int], list[int]],
    check: Callable[[SessionInfo], object],
    *,
    num_turns: int,
    most_new: int,
    most_to_roll_back: int,
) -> None:
    """Append, generate, cancel, fork and roll back a session in any order: it says what is `expected` of its history.

    `ids` returns new tokens; a turn appends at most `most_new`. `check` is called with the session after each turn. A
    history of more than `most_to_roll_back` tokens is never rolled back.
    """
    session = await sessions.create(OWNER, settings)
    history: list[int] = []
    for _ in range(num_turns):
        new = ids(random.randrange(1, most_new + 1))
        history += new
        first = random.randrange(len(new) + 1)
        for part in (new[:first], new[first:]):
            await sessions.append(OWNER, session, part)
        action = random.choice(["generate", "cancel", "fork", "rollback"])
        if action == "cancel":
            stream = sessions.generate(OWNER, session, greedy(30))
            said: list[int] = []
            while len(said) < 3:
                update = await anext(stream)
                if isinstance(update, Token):
                    said.append(update.token_id)
            await stream.aclose()
            info = await sessions.info(OWNER, session)
            generated = expected(history, info.history_length - len(history))
            assert generated[: len(said)] == said
            history += generated
        elif action == "fork":
            fork = await sessions.fork(OWNER, session)
            other = ids(5)
            both = await asyncio.gather(say(sessions, session, [], 3), say(sessions, fork, other, 3))
            assert both[0] == expected(history, 3)
            assert both[1] == expected([*history, *other], 3)
            history += both[0]
            await sessions.close(OWNER, fork)
        elif action == "rollback" and len(history) <= most_to_roll_back:
            del history[random.randrange(1, len(history) + 1) :]
            await sessions.rollback(OWNER, session, len(history))
        said = await say(sessions, session, [], 4)
        assert said == expected(history, 4)
        history += said
        info = await sessions.info(OWNER, session)
        assert info.history_length == len(history)
        check(info)
    await sessions.close(OWNER, session)
    await sessions.shut_down()


def mock_says(
    history: Sequence[int], num_tokens: int, *, seed: int = 0, vocab_size: int = MOCK_VOCAB_SIZE
) -> list[int]:
    """What a mock says after `history`, one token at a time."""
    token, said = history[-1], []
    for position in range(len(history) - 1, len(history) - 1 + num_tokens):
        words = (token + 0x9E3779B97F4A7C15) * 0xFF51AFD7ED558CCD ^ (position + seed) * 0xC4CEB9FE1A85EC53
        words &= 2**64 - 1
        words ^= words >> 33
        words = words * 0xFF51AFD7ED558CCD & 2**64 - 1
        words ^= words >> 33
        words = words * 0xC4CEB9FE1A85EC53 & 2**64 - 1
        words ^= words >> 33
        token = words % vocab_size
        said.append(token)
    return said


def check_at_rest(host: ModelHost) -> None:
    """Nothing is in use, and no page is kept for sessions."""
    host.core.scheduler.check()
    assert host.core.scheduler.session_pages.reserve.num_pages == 0
    assert host.core.scheduler.cache.num_used == 0
    assert not host.core.scheduler.has_work


def run_to_rest(talk: Coroutine[Any, Any, None], host: ModelHost) -> None:
    """Run `talk` to its end, after which nothing is kept."""
    asyncio.run(talk)
    check_at_rest(host)

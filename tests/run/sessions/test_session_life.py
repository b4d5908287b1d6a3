"""Sessions come, wait for each other, run out of room, expire and go; and nobody learns of another's."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import pytest

from kvarts.base.clock import VirtualClock
from kvarts.core.content import Content
from kvarts.core.events import Blocked
from kvarts.core.request import Request
from kvarts.core.sampling import Logprobs, SamplingParams
from kvarts.run.llm_engine import LLMEngine
from kvarts.run.sessions.opening import MOCK_TOKEN_BYTES
from kvarts.run.sessions.sessions import Sessions
from kvarts.run.sessions.values import (
    Done,
    SessionBusyError,
    SessionGoneError,
    SessionNotReadyError,
    SessionsConfig,
    SessionSettings,
    SessionsExhaustedError,
    SessionValueError,
    StopReason,
    Token,
    Truncated,
    UnknownSessionError,
)
from kvarts.run.text import DetokenizingExecutor

from builders.sessions import (
    OWNER,
    GateClock,
    appending,
    check_at_rest,
    greedy,
    mock_says,
    mock_sessions,
    run_to_rest,
    say,
)

PROMPT = list(range(1, 40))
SMALL = SessionSettings(sink=3, window=10)


async def close_all(sessions: Sessions) -> None:
    for info in await sessions.list(OWNER):
        await sessions.close(OWNER, info.session_id)
    await sessions.shut_down()


async def done_of(sessions: Sessions, session: str, params: SamplingParams) -> Done:
    *_, last = [update async for update in sessions.generate(OWNER, session, params)]
    assert isinstance(last, Done)
    return last


def test_one_operation_at_a_time() -> None:
    """A second one is refused, and nothing has changed; queued ones have their turns in order."""
    clock = GateClock()
    sessions, host = mock_sessions(clock=clock)

    async def talk() -> None:
        session, first = await appending(sessions, clock, PROMPT)
        for refused in (
            sessions.append(OWNER, session, [1]),
            anext(sessions.generate(OWNER, session, greedy(1))),
            sessions.fork(OWNER, session),
            sessions.rollback(OWNER, session, 0),
        ):
            with pytest.raises(SessionBusyError, match="busy"):
                await refused
        queued = [asyncio.ensure_future(sessions.append(OWNER, session, [n] * n, queue=True)) for n in (1, 2, 3, 4)]
        await asyncio.sleep(0.01)
        queued[1].cancel()  # its tokens are never appended
        await asyncio.sleep(0.01)
        clock.open()
        lengths = await asyncio.gather(first, *queued, return_exceptions=True)
        assert [lengths[0], lengths[1], lengths[3], lengths[4]] == [39, 40, 43, 47]
        assert isinstance(lengths[2], asyncio.CancelledError)
        history = [*PROMPT, 1, 3, 3, 3, 4, 4, 4, 4]
        assert await say(sessions, session, [], 3) == mock_says(history, 3)
        await close_all(sessions)

    run_to_rest(talk(), host)


def test_others_know_nothing() -> None:
    """Not that a session is there, not that it is busy, and not what became of it."""
    clock = GateClock()
    sessions, host = mock_sessions(clock=clock)
    other = "somebody else"

    async def ask_all(session: str) -> None:
        said = set()
        for call in (
            sessions.append(other, session, [1]),
            anext(sessions.generate(other, session, greedy(1))),
            sessions.cancel(other, session),
            sessions.info(other, session),
            sessions.close(other, session),
            sessions.fork(other, session),
            sessions.rollback(other, session, 0),
        ):
            with pytest.raises(UnknownSessionError) as raised:
                await call
            assert type(raised.value) is UnknownSessionError
            said.add(str(raised.value).replace(session, "ID"))
        assert len(said) == 1, "one answer, whatever was asked"
        with pytest.raises(UnknownSessionError) as raised:
            await sessions.info(other, "0" * 32)
        assert said == {str(raised.value).replace("0" * 32, "ID")}

    async def talk() -> None:
        session = await sessions.create(OWNER)
        await ask_all(session)
        clock.shut()
        append = asyncio.ensure_future(sessions.append(OWNER, session, PROMPT))
        await clock.step_begun()
        asking = asyncio.ensure_future(ask_all(session))
        await asyncio.sleep(0.005)
        clock.open()
        await append
        await asking
        assert await sessions.list(other) == []
        await sessions.close(OWNER, session)
        await ask_all(session)
        with pytest.raises(SessionGoneError, match=r"closed .* ago, with a history of 39 tokens"):
            await sessions.info(OWNER, session)
        await sessions.shut_down()

    run_to_rest(talk(), host)


def test_where_it_does_not_fit_it_is_refused_with_the_numbers() -> None:
    # A session has 1 + 3 + 1 pages of 4 tokens, and 4 more are there for the chunks of all.
    sessions, host = mock_sessions(SessionsConfig(defaults=SMALL, chunk_tokens=16), num_pages=15)

    async def talk() -> None:
        first = [await sessions.create(OWNER) for _ in range(2)]
        with pytest.raises(
            SessionsExhaustedError, match=rf"5 pages \({5 * 4 * MOCK_TOKEN_BYTES:,} bytes\), and 1 of 15"
        ):
            await sessions.create(OWNER)
        with pytest.raises(SessionsExhaustedError, match="and 1 of 15"):
            await sessions.fork(OWNER, first[0])
        await sessions.close(OWNER, first[0])
        await sessions.create(OWNER)
        await close_all(sessions)

    run_to_rest(talk(), host)


def test_requests_leave_room_for_sessions_that_have_memory_of_their_own() -> None:
    """What sessions may have is not what a request takes, as long as the pool has both."""
    config = SessionsConfig(defaults=SMALL, chunk_tokens=16, memory_bytes=14 * 4 * MOCK_TOKEN_BYTES)
    clock = GateClock()
    sessions, host = mock_sessions(config, num_pages=300, clock=clock)

    async def talk() -> None:
        clock.shut()
        long = asyncio.ensure_future(asyncio.to_thread(host.loop.generate, [(PROMPT, greedy(400))]))
        await clock.step_begun()
        making = asyncio.ensure_future(sessions.create(OWNER))
        await asyncio.sleep(0.01)
        clock.open()
        await making
        await long
        await close_all(sessions)

    run_to_rest(talk(), host)


def test_the_session_goes_that_was_idle_for_longest() -> None:
    config = SessionsConfig(defaults=SMALL, chunk_tokens=16, at_capacity="evict")
    sessions, host = mock_sessions(config, num_pages=20)  # for three

    async def talk() -> None:
        first, second, third = [await sessions.create(OWNER) for _ in range(3)]
        for session in (second, first, third):
            await sessions.append(OWNER, session, PROMPT)
        await sessions.rollback(OWNER, second, len(PROMPT))  # used, if only for that
        fourth = await sessions.create(OWNER)
        with pytest.raises(SessionGoneError, match=r"evicted .* ago, with a history of 39 tokens"):
            await sessions.append(OWNER, first, [1])
        with pytest.raises(SessionsExhaustedError):  # more than there is: nobody goes for that
            await sessions.create(OWNER, SessionSettings(sink=3, window=1000))
        assert [info.session_id for info in await sessions.list(OWNER)] == [second, third, fourth]
        forked = await sessions.fork(OWNER, third)
        assert {info.session_id for info in await sessions.list(OWNER)} == {third, fourth, forked}
        unbounded = await sessions.create(OWNER, SessionSettings(window=None))
        await sessions.append(OWNER, unbounded, [1])
        await sessions.create(OWNER)  # no page is free when the unbounded one goes
        assert unbounded in {info.session_id for info in await sessions.list(OWNER)}
        await close_all(sessions)

    run_to_rest(talk(), host)


def test_a_long_list_lets_steps_in_between() -> None:
    sessions, host = mock_sessions(SessionsConfig(defaults=SMALL), num_pages=2000)

    async def talk() -> None:
        made = [await sessions.create(OWNER) for _ in range(300)]
        post = host.loop.post
        num_tasks = 0

        def count(task: Any) -> Any:
            nonlocal num_tasks
            num_tasks += 1
            return post(task)

        host.loop.post = count  # type: ignore[method-assign]
        listing = asyncio.ensure_future(sessions.list(OWNER))
        closing = asyncio.ensure_future(sessions.close(OWNER, made[299]))
        assert [info.session_id for info in await listing][:299] == made[:299]
        await closing
        assert num_tasks > 4
        host.loop.post = post  # type: ignore[method-assign]
        await close_all(sessions)

    run_to_rest(talk(), host)


def test_so_many_and_no_more() -> None:
    sessions, host = mock_sessions(SessionsConfig(defaults=SMALL, max_sessions=2))

    async def talk() -> None:
        made = [await sessions.create(OWNER, SessionSettings(window=None)) for _ in range(2)]
        with pytest.raises(SessionsExhaustedError, match="there are 2 sessions"):
            await sessions.create("another")
        with pytest.raises(SessionsExhaustedError):
            await sessions.fork(OWNER, made[0])
        await close_all(sessions)

    run_to_rest(talk(), host)


def test_sessions_expire() -> None:
    """One that nobody uses for its time goes, and one that is busy does not."""
    clock = VirtualClock()
    sessions, host = mock_sessions(SessionsConfig(reap_every_s=0.005, tombstone_ttl_s=0.5), clock=clock)

    def pass_time(seconds: float) -> None:
        clock.wait_until_ns(clock.now_ns() + round(seconds * 1e9))

    async def talk() -> None:
        short, long, never = [await sessions.create(OWNER, SessionSettings(ttl_s=ttl)) for ttl in (10.0, 30.0, None)]
        pass_time(9)
        assert await sessions.reap() == 0
        await sessions.append(OWNER, short, [1, 2])
        pass_time(9)
        assert await sessions.reap() == 0
        info = await sessions.info(OWNER, short)
        assert 9 <= info.idle_s < 10
        pass_time(2)
        await asyncio.sleep(0.05)  # the reaper comes by itself
        assert [info.session_id for info in await sessions.list(OWNER)] == [long, never]
        with pytest.raises(SessionGoneError, match="expired"):
            await sessions.info(OWNER, short)
        pass_time(30)
        assert await sessions.reap() + 1 >= 1
        assert [info.session_id for info in await sessions.list(OWNER)] == [never]
        await asyncio.sleep(0.6)  # what became of it is forgotten, by the time of day
        with pytest.raises(UnknownSessionError) as raised:
            await sessions.info(OWNER, short)
        assert type(raised.value) is UnknownSessionError
        await close_all(sessions)

    run_to_rest(talk(), host)


def test_what_is_refused_leaves_the_history_as_it_is() -> None:
    sessions, host = mock_sessions()

    async def talk() -> None:
        session = await sessions.create(OWNER)
        with pytest.raises(SessionNotReadyError, match="nothing was appended"):
            await anext(sessions.generate(OWNER, session, greedy(1)))
        assert await sessions.append(OWNER, session, []) == 0
        assert await sessions.append(OWNER, session, PROMPT, expected_length=0) == 39
        assert await sessions.append(OWNER, session, [], expected_length=39) == 39
        for expected in (0, 38, 40):
            with pytest.raises(SessionNotReadyError, match=f"39 tokens, and {expected} were expected"):
                await sessions.append(OWNER, session, [7], expected_length=expected)
        for wrong in ([1, 151_936], [-1], [1, 2**70]):
            with pytest.raises(SessionValueError, match="vocabulary"):
                await sessions.append(OWNER, session, wrong)
        for length in (-1, 40):
            with pytest.raises(SessionValueError, match="39 tokens"):
                await sessions.rollback(OWNER, session, length)
        info = await sessions.info(OWNER, session)
        assert (info.history_length, info.num_turns, info.state) == (39, 0, "idle")
        assert await say(sessions, session, [], 5) == mock_says(PROMPT, 5)
        assert (await sessions.info(OWNER, session)).num_turns == 1
        await close_all(sessions)

    run_to_rest(talk(), host)


def test_a_history_may_become_as_long_as_positions_go() -> None:
    sessions, host = mock_sessions(max_positions=50)

    async def talk() -> None:
        session = await sessions.create(OWNER, SMALL)
        with pytest.raises(SessionNotReadyError, match="51 tokens, and the model was trained for 50"):
            await sessions.append(OWNER, session, [1] * 51)
        await sessions.append(OWNER, session, PROMPT)
        assert (await done_of(sessions, session, greedy(4))).stop_reason is StopReason.MAX_TOKENS
        with pytest.raises(SessionNotReadyError, match="trained for 50"):
            await sessions.append(OWNER, session, [1] * 8)
        done = await done_of(sessions, session, greedy(100))
        assert (done.stop_reason, done.num_tokens) == (StopReason.TRUNCATED, 7)
        done = await done_of(sessions, session, greedy(100))
        assert (done.stop_reason, done.num_tokens) == (StopReason.TRUNCATED, 0)
        info = await sessions.info(OWNER, session)
        assert (info.history_length, info.num_turns, info.state) == (50, 2, "idle")
        beyond = await sessions.create(OWNER, SessionSettings(sink=3, window=10, past_max_positions=True))
        assert await say(sessions, beyond, PROMPT, 100) == mock_says(PROMPT, 100)
        assert await sessions.append(OWNER, beyond, PROMPT) == 178
        await close_all(sessions)

    run_to_rest(talk(), host)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_tokens_of_the_session_end_a_generation(ignore_eos: bool) -> None:
    """Whatever is said of the model's own."""
    sessions, host = mock_sessions()
    expected = mock_says(PROMPT, 6)

    async def talk() -> None:
        session = await sessions.create(OWNER, SessionSettings(eos_token_ids=(expected[3], 5)))
        await sessions.append(OWNER, session, PROMPT)
        updates = [
            update
            async for update in sessions.generate(OWNER, session, SamplingParams(max_tokens=6, ignore_eos=ignore_eos))
        ]
        assert [update.token_id for update in updates if isinstance(update, Token)] == expected[:4]
        done = updates[-1]
        assert isinstance(done, Done)
        assert (done.stop_reason, done.num_tokens) == (StopReason.EOS, 4)
        assert (await sessions.info(OWNER, session)).history_length == len(PROMPT) + 4
        await close_all(sessions)

    run_to_rest(talk(), host)


@pytest.mark.parametrize(("ignore_eos", "ends"), [(False, {7, 9}), (True, {9})])
def test_the_ends_that_an_engine_passes_on(ignore_eos: bool, ends: set[int]) -> None:
    """Those of the model only where they are not to be ignored; those of the caller always."""
    _, host = mock_sessions()
    passed: list[set[int]] = []

    class Sampling:
        def add(self, index: int, params: SamplingParams, prompt: object, stop_ids: Collection[int] = ()) -> None:
            passed.append(set(stop_ids))

        def drop(self, index: int) -> None:
            pass

        def logprobs(self, index: int) -> Logprobs:
            return Logprobs()

        def prompt_logprobs(self, index: int) -> None:
            return None

        def error(self, index: int) -> None:
            return None

    detokenizing = DetokenizingExecutor(host.core.executor, max_num_seqs=8, clock=host.clock)
    engine = LLMEngine(host.core, Sampling(), detokenizing, host.clock, page_size=4, eos_ids=[7])

    def make(index: int, now_ns: int) -> Request:
        content = Content.from_tokens([1], page_size=4, owner=index)
        return Request(index, content, num_prompt_tokens=1, max_tokens=2, arrival_ns=now_ns)

    index = engine.start(make, SamplingParams(max_tokens=2, ignore_eos=ignore_eos), stop_ids=[9])
    assert passed == [ends]
    engine.cancel(index)
    check_at_rest(host)


def test_what_is_dropped_is_said_before_the_first_token() -> None:
    sessions, host = mock_sessions(SessionsConfig(defaults=SMALL, chunk_tokens=16))

    async def talk() -> None:
        session = await sessions.create(OWNER)
        await sessions.append(OWNER, session, PROMPT[:13])
        updates = [update async for update in sessions.generate(OWNER, session, greedy(2))]
        assert [type(update) for update in updates] == [Token, Token, Done]
        updates = [update async for update in sessions.generate(OWNER, session, greedy(2))]
        assert [type(update) for update in updates] == [Truncated, Token, Token, Done]
        assert updates[0] == Truncated(2)
        await close_all(sessions)

    run_to_rest(talk(), host)


def test_back_to_what_is_retained() -> None:
    """And to the sink alone, or to nothing, at any time."""
    sessions, host = mock_sessions(SessionsConfig(defaults=SMALL, chunk_tokens=16))

    async def talk() -> None:
        session = await sessions.create(OWNER)
        history = list(range(100, 200))
        await sessions.append(OWNER, session, history)
        for length in (99, 131, 50, 3, 0):
            if length == 50:
                with pytest.raises(SessionNotReadyError, match="first 3 and the last 10"):
                    await sessions.rollback(OWNER, session, length)
                continue
            assert await sessions.rollback(OWNER, session, length) == length
            del history[length:]
            new = [length + 1, length + 2]
            assert await say(sessions, session, new, 2) == mock_says([*history, *new], 2)
            history += new + mock_says([*history, *new], 2)
            info = await sessions.info(OWNER, session)
            assert (info.inv1_violations, info.inv2_violations) == (0, 0)
            assert info.num_retained == min(13, len(history))
            await sessions.append(OWNER, session, history[-1:] * 30)
            history += history[-1:] * 30
        await close_all(sessions)

    run_to_rest(talk(), host)


def test_a_turn_does_not_wait_behind_a_request_that_waits_for_pages() -> None:
    """A session never waits for memory, whatever is first in the queue."""
    sessions, host = mock_sessions(num_pages=200, page_size=4)

    async def talk() -> None:
        session = await sessions.create(OWNER)
        num_free = host.core.scheduler.cache.num_free
        first = host.loop.submit(list(range(4 * (num_free - 40))), greedy(120))
        second = host.loop.submit(list(range(5000, 5000 + 4 * 60)), greedy(8))
        while host.core.scheduler.blocked is not Blocked.PAGES:
            host.loop.step()
        assert len(await say(sessions, session, [1, 2, 3], 4)) == 4
        assert host.core.scheduler.waiting.num_waiting == 1
        for index in (first, second):
            host.loop.cancel(index)
        await close_all(sessions)

    run_to_rest(talk(), host)

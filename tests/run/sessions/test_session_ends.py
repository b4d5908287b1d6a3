"""Whatever ends an operation, the session is left at a token boundary, and the engine goes on for others."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from kvarts.base.clock import VirtualClock
from kvarts.base.errors import ConfigError
from kvarts.core.request import Request
from kvarts.core.sched.plan import StepPlan, StepResult
from kvarts.run.llm_engine import EngineDeadError, RequestFailedError
from kvarts.run.sessions.opening import open_sessions
from kvarts.run.sessions.sessions import Sessions
from kvarts.run.sessions.table import Session
from kvarts.run.sessions.values import (
    Done,
    SessionBusyError,
    SessionGoneError,
    SessionsConfig,
    SessionSettings,
    SessionsExhaustedError,
    StopReason,
    Token,
    Update,
)

from builders.sessions import OWNER, GateClock, appending, greedy, mock_says, mock_sessions, run_to_rest, say

PROMPT = list(range(1, 40))


async def rest(stream: AsyncGenerator[Update, None]) -> list[Update]:
    return [update async for update in stream]


def test_a_cancelled_question_leaves_the_engine_as_it_is() -> None:
    """The caller of `info` goes while a step is under way."""
    clock = GateClock()
    sessions, host = mock_sessions(clock=clock)

    async def talk() -> None:
        session, append = await appending(sessions, clock, PROMPT)
        asking = asyncio.ensure_future(sessions.info(OWNER, session))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        clock.open()
        assert await append == len(PROMPT)
        assert await say(sessions, session, [], 3) == mock_says(PROMPT, 3)
        await sessions.close(OWNER, session)
        await sessions.shut_down()

    run_to_rest(talk(), host)


def test_a_session_whose_maker_has_gone_takes_no_room() -> None:
    clock = GateClock()
    sessions, host = mock_sessions(SessionsConfig(max_sessions=2), clock=clock)

    async def talk() -> None:
        session, append = await appending(sessions, clock, PROMPT)
        making = asyncio.ensure_future(sessions.create(OWNER))
        await asyncio.sleep(0)
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making
        clock.open()
        await append
        assert [info.session_id for info in await sessions.list(OWNER)] == [session]
        await sessions.create(OWNER)
        for info in await sessions.list(OWNER):
            await sessions.close(OWNER, info.session_id)
        await sessions.shut_down()

    run_to_rest(talk(), host)


@pytest.mark.parametrize("ends_by", ["close", "generate", "rollback", "fork", "shut_down"])
def test_what_was_appended_stays_when_its_client_goes(ends_by: str) -> None:
    """The tokens are there, their KV is computed, and the session is busy until then."""
    clock = GateClock()
    sessions, host = mock_sessions(SessionsConfig(chunk_tokens=8), clock=clock)

    async def talk() -> None:
        session, append = await appending(sessions, clock, PROMPT)
        append.cancel()
        if ends_by == "close":
            closing = asyncio.ensure_future(sessions.close(OWNER, session))
            await asyncio.sleep(0.01)
            clock.open()
            assert await closing == len(PROMPT)
        elif ends_by == "shut_down":
            clock.open()
        else:
            going_on: asyncio.Future[object]
            if ends_by == "generate":
                going_on = asyncio.ensure_future(rest(sessions.generate(OWNER, session, greedy(3), queue=True)))
            elif ends_by == "rollback":
                going_on = asyncio.ensure_future(sessions.rollback(OWNER, session, len(PROMPT) - 1, queue=True))
            else:
                going_on = asyncio.ensure_future(sessions.fork(OWNER, session, queue=True))
            await asyncio.sleep(0.01)
            clock.open()
            await going_on
            info = await sessions.info(OWNER, session)
            assert info.history_length == len(PROMPT) + {"generate": 3, "rollback": -1, "fork": 0}[ends_by]
            assert (info.inv1_violations, info.inv2_violations, info.state) == (0, 0, "idle")
        with pytest.raises(asyncio.CancelledError):
            await append
        await sessions.shut_down()
        for info in await sessions.list(OWNER):
            await sessions.close(OWNER, info.session_id)

    run_to_rest(talk(), host)


def test_cancel_ends_an_append_at_a_token_boundary() -> None:
    """The tokens stay; what was not computed of them is computed by the next operation."""
    clock = GateClock()
    sessions, host = mock_sessions(SessionsConfig(chunk_tokens=8), clock=clock)

    async def talk() -> None:
        session, append = await appending(sessions, clock, PROMPT)
        cancelling = asyncio.ensure_future(sessions.cancel(OWNER, session))
        await asyncio.sleep(0.01)
        clock.open()
        assert await cancelling
        with pytest.raises(asyncio.CancelledError):
            await append
        info = await sessions.info(OWNER, session)
        assert (info.history_length, info.state) == (len(PROMPT), "idle")
        assert info.num_computed_tokens < len(PROMPT)
        assert not await sessions.cancel(OWNER, session)
        assert await say(sessions, session, [], 4) == mock_says(PROMPT, 4)
        await sessions.close(OWNER, session)
        await sessions.shut_down()

    run_to_rest(talk(), host)


def test_the_end_of_a_session_waits_for_no_reader() -> None:
    """A generation with updates that nobody reads is ended by `close`, by `cancel` and by `shut_down`."""
    sessions, host = mock_sessions()

    async def talk() -> None:
        for end in ("close", "cancel", "shut_down"):
            session = await sessions.create(OWNER)
            await sessions.append(OWNER, session, PROMPT)
            stream = sessions.generate(OWNER, session, greedy(100_000))
            await anext(stream)
            if end == "close":
                await asyncio.wait_for(sessions.close(OWNER, session), 10)
            elif end == "cancel":
                assert await asyncio.wait_for(sessions.cancel(OWNER, session), 10)
                assert await sessions.append(OWNER, session, [1]) > len(PROMPT)  # it is idle at once
            else:
                await asyncio.wait_for(sessions.shut_down(), 10)
                host.core.scheduler.check()
                assert not host.core.scheduler.has_work
            updates = await rest(stream)
            assert isinstance(updates[-1], Done)
            assert updates[-1].stop_reason is StopReason.CANCELLED
            assert updates[-1].num_tokens >= sum(isinstance(update, Token) for update in updates)
            if end != "close":
                info = await sessions.info(OWNER, session)
                assert (info.state, info.inv1_violations, info.inv2_violations) == ("idle", 0, 0)
                await sessions.close(OWNER, session)

    run_to_rest(talk(), host)


def test_a_reader_that_is_cancelled_twice_leaves_an_idle_session() -> None:
    clock = GateClock()
    sessions, host = mock_sessions(clock=clock)

    async def talk() -> None:
        session = await sessions.create(OWNER)
        await sessions.append(OWNER, session, PROMPT)
        reading = asyncio.ensure_future(rest(sessions.generate(OWNER, session, greedy(100_000))))
        await asyncio.sleep(0.02)
        clock.shut()
        await clock.step_begun()
        for _ in range(3):
            reading.cancel()
            await asyncio.sleep(0.002)
        clock.open()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert await asyncio.wait_for(sessions.close(OWNER, session), 10) > len(PROMPT)
        await sessions.shut_down()

    run_to_rest(talk(), host)


def test_a_session_that_generates_is_never_evicted() -> None:
    """Also not while the KV of its last token is computed."""
    clock = GateClock()
    sessions, host = mock_sessions(SessionsConfig(max_sessions=1, at_capacity="evict"), clock=clock)

    async def talk() -> None:
        session = await sessions.create(OWNER)
        await sessions.append(OWNER, session, PROMPT)
        clock.shut()
        saying = asyncio.ensure_future(say(sessions, session, [], 1))
        await clock.step_begun()
        making = asyncio.ensure_future(sessions.create(OWNER))
        await asyncio.sleep(0.01)
        clock.open()
        with pytest.raises(SessionsExhaustedError):
            await making
        assert await saying == mock_says(PROMPT, 1)
        other = await sessions.create(OWNER)
        with pytest.raises(SessionGoneError, match="evicted"):
            await sessions.info(OWNER, session)
        await sessions.close(OWNER, other)
        await sessions.shut_down()

    run_to_rest(talk(), host)


def test_an_error_of_the_engine_reaches_everybody() -> None:
    sessions, host = mock_sessions(SessionsConfig(chunk_tokens=8, reap_every_s=0.005))

    async def talk() -> None:
        made = [await sessions.create(OWNER) for _ in range(4)]
        for session in made:
            await sessions.append(OWNER, session, PROMPT)
        streams = [sessions.generate(OWNER, session, greedy(100_000)) for session in made[:2]]
        for stream in streams:
            await anext(stream)
        unread = sessions.generate(OWNER, made[2], greedy(100_000))
        await anext(unread)

        def fail(plan: StepPlan) -> StepResult:
            raise RuntimeError("the device is gone")

        host.core.executor.execute = fail  # type: ignore[method-assign]
        calls = [
            *(rest(stream) for stream in streams),
            sessions.append(OWNER, made[3], [1, 2, 3]),
            rest(sessions.generate(OWNER, made[0], greedy(5), queue=True)),
        ]
        outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
        assert all(isinstance(outcome, RuntimeError | EngineDeadError) for outcome in outcomes), outcomes
        assert any(type(outcome) is RuntimeError for outcome in outcomes)
        for call in (
            sessions.info(OWNER, made[0]),
            sessions.close(OWNER, made[0]),
            sessions.create(OWNER),
        ):
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(call, 10)
        await asyncio.sleep(0.02)  # the reaper finds out as well
        await asyncio.wait_for(sessions.shut_down(), 10)
        with pytest.raises(RuntimeError):
            await rest(unread)

    asyncio.run(talk())
    gc.collect()


def test_an_event_loop_that_ends_takes_no_engine_along() -> None:
    """The append goes on; others on the same engine do not notice."""
    clock = GateClock()
    sessions, host = mock_sessions(SessionsConfig(chunk_tokens=8), clock=clock)

    async def talk() -> None:
        session = await sessions.create(OWNER)
        clock.shut()
        asyncio.get_running_loop().call_later(0.02, asyncio.current_task().cancel)  # type: ignore[union-attr]
        await sessions.append(OWNER, session, PROMPT)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(talk())
    clock.open()
    (completion,) = host.loop.generate([(PROMPT, greedy(3))])
    assert list(completion.tokens) == mock_says(PROMPT, 3)
    host.core.scheduler.check()


def test_a_waiter_that_goes_as_its_turn_comes_passes_it_on() -> None:
    """Cancelled in the same moment as the operation before it ends."""
    sessions, host = mock_sessions()

    async def talk() -> None:
        session = await sessions.create(OWNER)
        await sessions.append(OWNER, session, PROMPT)
        for delay in range(12):
            first = sessions.generate(OWNER, session, greedy(100_000))
            await anext(first)
            waiting = [
                asyncio.ensure_future(sessions.append(OWNER, session, [index], queue=True)) for index in range(3)
            ]
            await asyncio.sleep(0.005)
            ending = asyncio.ensure_future(first.aclose())
            for _ in range(delay):
                await asyncio.sleep(0)
            waiting[0].cancel()
            outcomes = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10)
            await ending
            assert isinstance(outcomes[0], asyncio.CancelledError | int)
            assert isinstance(outcomes[1], int) and isinstance(outcomes[2], int)
            await sessions.append(OWNER, session, [], queue=True)
        await sessions.close(OWNER, session)
        await sessions.shut_down()

    run_to_rest(talk(), host)


def test_a_generation_that_never_began_is_no_step_back() -> None:
    """It is cancelled while it waits for a request of somebody else: no position has fallen."""
    clock = GateClock()
    sessions, host = mock_sessions(clock=clock, seqs=1)

    async def talk() -> None:
        session = await sessions.create(OWNER, SessionSettings(window=None))
        await sessions.append(OWNER, session, PROMPT)
        clock.shut()
        other = asyncio.ensure_future(asyncio.to_thread(host.loop.generate, [([1, 2, 3], greedy(50))]))
        await clock.step_begun()
        reading = asyncio.ensure_future(rest(sessions.generate(OWNER, session, greedy(5))))
        await asyncio.sleep(0.005)
        cancelling = asyncio.ensure_future(sessions.cancel(OWNER, session))
        await asyncio.sleep(0.005)
        clock.open()
        assert await cancelling
        assert (await reading)[-1].num_tokens == 0  # type: ignore[union-attr]
        await other
        info = await sessions.info(OWNER, session)
        assert (info.inv2_violations, info.num_dropped) == (0, len(PROMPT) - info.num_retained)
        assert await say(sessions, session, [], 5) == mock_says(PROMPT, 5)
        assert (await sessions.info(OWNER, session)).inv2_violations == 0
        await sessions.close(OWNER, session)
        await sessions.shut_down()

    run_to_rest(talk(), host)


def test_an_append_that_is_refused_is_not_on_disk(tmp_path: Path) -> None:
    """Not by the engine, either, which has no room for so long a history; and the session goes on."""

    def opened() -> Sessions:
        return open_sessions(mock=True, kv_memory="100MiB", clock=VirtualClock(), state_dir=tmp_path)

    async def before() -> str:
        sessions = opened()
        session = await sessions.create(OWNER, SessionSettings(window=None))
        await sessions.append(OWNER, session, PROMPT)
        with pytest.raises(ConfigError, match="pages"):
            await sessions.append(OWNER, session, [5] * 2000)
        assert await sessions.append(OWNER, session, [7, 8], expected_length=39) == 41
        await sessions.shut_down()
        return session

    async def after(session: str) -> None:
        sessions = opened()
        assert (await sessions.info(OWNER, session)).history_length == 41
        assert await say(sessions, session, [], 3) == mock_says([*PROMPT, 7, 8], 3)
        await sessions.shut_down()

    asyncio.run(after(asyncio.run(before())))


def test_an_error_at_an_end_is_told_to_whoever_waits_for_it() -> None:
    """Not in a step, but when what a request leaves is noted: our bug, and still nobody waits for ever."""
    sessions, _ = mock_sessions()

    async def talk() -> None:
        session = await sessions.create(OWNER)
        await sessions.append(OWNER, session, PROMPT)

        def fail(session: Session, request: Request) -> None:
            raise AssertionError("a page is lost")

        sessions._turns.end = fail  # type: ignore[method-assign]
        for call in (sessions.append(OWNER, session, [1]), say(sessions, session, [], 1)):
            with pytest.raises((AssertionError, EngineDeadError, RequestFailedError, SessionBusyError)):
                await asyncio.wait_for(call, 10)
        await asyncio.wait_for(sessions.shut_down(), 10)

    asyncio.run(talk())

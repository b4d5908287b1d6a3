"""Shares of owners in sessions, reserved pages and histories: nothing of one owner goes for more than another's due."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.core.config import EngineConfig
from kvarts.run.sessions.opening import mock_host
from kvarts.run.sessions.sessions import Sessions
from kvarts.run.sessions.table import SessionTable
from kvarts.run.sessions.values import (
    MAX_ENDS,
    MAX_LABEL_CHARS,
    SessionsConfig,
    SessionSettings,
    SessionsExhaustedError,
    UnknownSessionError,
)

ANN, BOB, EVE = "ann", "bob", "eve"
EQUAL = {ANN: 1.0, BOB: 1.0, EVE: 1.0}
UNBOUNDED = SessionSettings(window=None)
SMALL = SessionSettings(sink=0, window=16)


def sessions_of(shares: Mapping[str, float], *, num_pages: int = 1000, **settings: object) -> Sessions:
    config = EngineConfig(num_pages=num_pages, page_size=16, max_num_batched_tokens=256, max_num_seqs=16)
    host = mock_host(config, speedup=1000.0)
    return Sessions(SessionTable(host, SessionsConfig(chunk_tokens=16, **settings), shares=shares))  # type: ignore[arg-type]


async def is_there(sessions: Sessions, owner: str, session_id: str) -> bool:
    try:
        await sessions.info(owner, session_id)
    except UnknownSessionError:
        return False
    return True


@pytest.mark.parametrize("at_capacity", ["refuse", "evict"])
def test_one_owner_that_makes_sessions_for_ever_ends_no_session_of_another(at_capacity: str) -> None:
    async def run() -> None:
        sessions = sessions_of(EQUAL, max_sessions=12, at_capacity=at_capacity)
        mine = [await sessions.create(ANN, UNBOUNDED) for _ in range(4)]
        theirs = [await sessions.create(BOB, UNBOUNDED)]
        for _ in range(100):
            with suppress(SessionsExhaustedError) if at_capacity == "refuse" else nullcontext():
                await sessions.create(EVE, UNBOUNDED)
        assert all([await is_there(sessions, ANN, each) for each in mine])
        # Of the four that are Bob's due two were kept, whatever Eve did.
        theirs.append(await sessions.create(BOB, UNBOUNDED))
        if at_capacity == "evict":  # and what Eve had beyond her own due comes back
            theirs += [await sessions.create(BOB, UNBOUNDED) for _ in range(2)]
            assert len(await sessions.list(EVE)) == 4
        assert all([await is_there(sessions, BOB, each) for each in theirs])
        await sessions.shut_down()

    asyncio.run(run())


@pytest.mark.parametrize("at_capacity", ["refuse", "evict"])
def test_pages_that_windows_reserve_are_shared_alike(at_capacity: str) -> None:
    async def run() -> None:
        sessions = sessions_of(EQUAL, num_pages=50, at_capacity=at_capacity)
        mine = [await sessions.create(ANN, SMALL) for _ in range(4)]
        for _ in range(100):
            with suppress(SessionsExhaustedError) if at_capacity == "refuse" else nullcontext():
                await sessions.create(EVE, SMALL)
        theirs = [await sessions.create(BOB, SMALL) for _ in range(3)]
        assert all([await is_there(sessions, ANN, each) for each in mine])
        assert all([await is_there(sessions, BOB, each) for each in theirs])
        await sessions.shut_down()

    asyncio.run(run())


def test_histories_of_one_owner_leave_room_for_those_of_another() -> None:
    async def run() -> None:
        sessions = sessions_of(EQUAL, max_history_tokens=1200)
        theirs = await sessions.create(EVE, UNBOUNDED)
        for _ in range(8):
            await sessions.append(EVE, theirs, [1] * 100)
        with pytest.raises(SessionsExhaustedError, match=r"max_history_tokens: 100 more tokens do not fit"):
            await sessions.append(EVE, theirs, [1] * 100)
        with pytest.raises(SessionsExhaustedError):
            await sessions.fork(EVE, theirs)
        mine = await sessions.create(ANN, UNBOUNDED)
        assert await sessions.append(ANN, mine, [1] * 200) == 200
        assert await sessions.rollback(EVE, theirs, 100) == 100
        assert await sessions.append(EVE, theirs, [1] * 100) == 200
        await sessions.close(EVE, theirs)
        tokens = sessions._table.capacity.tokens
        assert (tokens.used(EVE), tokens.used(ANN), tokens.num_used) == (0, 200, 200)
        await sessions.shut_down()

    asyncio.run(run())


def test_appends_that_wait_count_before_they_are_appended() -> None:
    async def run() -> None:
        sessions = sessions_of({}, max_history_tokens=1000)
        session_id = await sessions.create(ANN, UNBOUNDED)
        tasks = [asyncio.create_task(sessions.append(ANN, session_id, [1] * 100, queue=True)) for _ in range(30)]
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert sorted(each for each in outcomes if isinstance(each, int)) == [100 * n for n in range(1, 11)]
        assert sum(isinstance(each, SessionsExhaustedError) for each in outcomes) == 20
        await sessions.shut_down()

    asyncio.run(run())


@given(
    wanted=st.lists(st.tuples(st.sampled_from([ANN, BOB, EVE]), st.booleans()), max_size=60),
    shares=st.sampled_from([{}, EQUAL, {ANN: 3.0, BOB: 1.0, EVE: 1.0}]),
    at_capacity=st.sampled_from(["refuse", "evict"]),
)
def test_accounts_are_those_of_the_sessions_that_are_there(
    wanted: list[tuple[str, bool]], shares: dict[str, float], at_capacity: str
) -> None:
    async def run() -> None:
        sessions = sessions_of(shares, num_pages=24, max_sessions=9, at_capacity=at_capacity)
        capacity = sessions._table.capacity
        made: list[tuple[str, str]] = []
        for owner, is_bounded in wanted:
            before = {each: capacity.sessions.used(each) for each in EQUAL}
            try:
                made.append((owner, await sessions.create(owner, SMALL if is_bounded else UNBOUNDED)))
            except SessionsExhaustedError:
                continue
            for other in EQUAL:
                if shares and other != owner and capacity.sessions.used(other) < before[other]:
                    due = capacity.sessions.guaranteed(other), capacity.pages.guaranteed(other)
                    assert before[other] > due[0] or capacity.pages.used(other) >= due[1] - 2
        there = sessions._table._sessions.values()
        for owner in EQUAL:
            assert capacity.sessions.used(owner) == sum(each.owner == owner for each in there)
            assert capacity.pages.used(owner) == sum(
                sessions._table._num_reserved(each.pages) for each in there if each.owner == owner
            )
        assert len(there) <= 9
        for owner, session_id in made:
            if await is_there(sessions, owner, session_id):
                await sessions.close(owner, session_id)
        assert (capacity.sessions.num_used, capacity.pages.num_used, capacity.tokens.num_used) == (0, 0, 0)
        await sessions.shut_down()

    asyncio.run(run())


def test_events_name_owners_by_random_names_that_last_as_long_as_the_process() -> None:
    async def run() -> None:
        salts = []
        for _ in range(2):
            sessions = sessions_of({})
            made = [await sessions.create(owner, UNBOUNDED) for owner in (ANN, ANN, BOB, "")]
            contents = [sessions._table._sessions[each].content.salt for each in made]
            assert contents[0] == contents[1] and contents[0] != contents[2] and contents[3] is None
            salts += [contents[0], contents[2]]
            await sessions.shut_down()
        assert len(set(salts)) == 4 and not any(name in str(salt) for salt in salts for name in EQUAL)

    asyncio.run(run())


def test_labels_and_ends_of_generations_have_limits() -> None:
    from kvarts.base.errors import ConfigError

    SessionSettings(label="x" * MAX_LABEL_CHARS, eos_token_ids=tuple(range(MAX_ENDS)))
    with pytest.raises(ConfigError, match="label: has 10000000 characters, and 256 at most"):
        SessionSettings(label="x" * 10_000_000)
    with pytest.raises(ConfigError, match="eos_token_ids: has 1025 ids, and 1024 at most"):
        SessionSettings(eos_token_ids=tuple(range(MAX_ENDS + 1)))

"""L12 with KV groups: a bounded session says what a forward pass over its whole history says.

Each layer keeps of it what both the session and the layer allow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("torch", reason="real models need kvarts[torch]")
pytest.importorskip("transformers", reason="real models need kvarts[torch]")

import msgspec
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kvarts
from kvarts.base.errors import ConfigError
from kvarts.core.config import EngineConfig
from kvarts.core.kv.groups import SinkWindow
from kvarts.core.kv.layers import KvLayer
from kvarts.proof.evidence import verify_file
from kvarts.run.sessions.keeper import Keeper
from kvarts.run.sessions.opening import open_sessions
from kvarts.run.sessions.sessions import Sessions
from kvarts.run.sessions.table import SessionTable
from kvarts.run.sessions.values import SessionInfo, SessionsConfig, SessionSettings
from kvarts.run.torch.llm import LLM

from builders.real_models import undisturbed
from builders.real_sessions import Models, assert_says_as_whole_passes, ids
from builders.sessions import OWNER, greedy, say, sessions_on
from oracles.late_rotation import late_greedy
from oracles.masked_forward import masked_greedy
from oracles.naive_kv_groups import kept_for

FAMILIES = ["gemma2", "gemma3_text", "gpt_oss", "mistral", "qwen2", "gemma4_text"]
"""With windows of 8 tokens: in every other layer, in most, with learned sinks, in all, in the last ones, and with KV
heads of two shapes."""


@pytest.fixture(scope="module")
def windowed() -> Models:
    from builders.windowed_models import config_of, models_of

    made: dict[str, tuple[Any, Any]] = {}

    def pair(family: str) -> tuple[Any, Any]:
        if family not in made:
            made[family] = models_of(config_of(family))
        return made[family]

    return pair


def open_on(
    model: Any, *, page_size: int, chunk: int = 16, budget: int = 64, attention: str = "auto", groups: str = "all"
) -> tuple[LLM, Sessions]:
    """Blocks that no session holds, of those that are reserved too, are overwritten before every step."""
    config = EngineConfig(
        num_pages=2400 // page_size, page_size=page_size, max_num_batched_tokens=budget, max_num_seqs=8
    )
    llm = LLM(model, None, config, audit=True, attention=attention, kv_groups=groups, layers="model")
    executor: Any = llm._executor
    scheduler: Any = llm._core.scheduler
    execute: Callable[..., Any] = executor.execute

    def overwritten(plan: Any) -> Any:
        unused = [*scheduler.cache.pool.empty_ids, *scheduler.session_pages.reserve._free_ids]
        copied = {source for source, _ in plan.page_copies}
        with torch.inference_mode():
            for tensor in executor.pools.tensors:
                tensor[[block for block in unused if block not in copied]] = 100.0
        return execute(plan)

    executor.execute = overwritten
    return llm, sessions_on(llm.host(), SessionsConfig(chunk_tokens=chunk))


@cache
def most_pages(layer: KvLayer, whole: SinkWindow, page_size: int) -> int:
    most = 0
    for position in range(64):
        kept = {*kept_for(layer, whole, position), position}
        most = max(most, len({token // page_size for token in kept}))
    return most


def check_bytes(llm: LLM, info: SessionInfo, page_size: int) -> None:
    """What is allocated and what is retained, to the byte, by a look at every token of every layer."""
    memory = llm.host().memory
    assert memory is not None
    whole = SinkWindow(info.settings.sink, info.settings.window or 0)
    live = allocated = bound = 0
    for group in memory.groups:
        last = info.history_length - 1  # it may be computed again
        live += len(kept_for(group.layer, whole, info.history_length)) * group.part_bytes // page_size
        pages = {position // page_size for position in (*kept_for(group.layer, whole, last), last)}
        allocated += len(pages) * group.part_bytes
        bound += most_pages(group.layer, whole, page_size) * group.part_bytes
    assert (info.kv_live_bytes, info.kv_allocated_bytes, info.kv_bound_bytes) == (live, allocated, bound)
    assert (info.inv1_violations, info.inv2_violations) == (0, 0)


@pytest.mark.laws
@settings(max_examples=2)
@given(
    family=st.sampled_from(FAMILIES),
    seed=st.integers(0, 1000),
    page_size=st.sampled_from([2, 4, 16]),
    sink=st.integers(0, 4),
    window=st.integers(1, 20),
    chunk=st.sampled_from([1, 7, 16, 64]),
    attention=st.sampled_from(["sdpa", "numba"]),
)
@example(family="gemma2", seed=1, page_size=4, sink=3, window=20, chunk=7, attention="numba")
@example(family="gemma4_text", seed=3, page_size=4, sink=2, window=5, chunk=7, attention="sdpa")
def test_a_session_says_what_a_pass_over_its_whole_history_says(
    windowed: Models, family: str, seed: int, page_size: int, sink: int, window: int, chunk: int, attention: str
) -> None:
    """Appends, turns, forks, rollbacks and cancels in any order, in a memory that forgets what nothing holds."""
    model, reference = windowed(family)
    llm, sessions = open_on(model, page_size=page_size, chunk=chunk, attention=attention)
    check = partial(check_bytes, llm, page_size=page_size)
    assert_says_as_whole_passes(llm, sessions, reference, check, seed=seed, sink=sink, window=window)


def test_what_goes_too_early_or_is_mixed_up_is_noticed(windowed: Models) -> None:
    """Pages that go a token too early change what is said; that pages change places is counted as well."""
    model, reference = windowed("gemma2")
    _, sessions = open_on(model, page_size=1)
    history = ids(Random(4), 60)
    expected = masked_greedy(reference, history, 8, sink=0, window=20)

    def too_early(table: Any) -> None:
        settle = table.settle
        table.settle = lambda position: settle(position + 1)

    def mixed_up(table: Any) -> None:
        table._page_ids[1], table._page_ids[2] = table._page_ids[2], table._page_ids[1]

    async def talk() -> None:
        for damage, is_first in ((too_early, True), (mixed_up, False)):
            session = await sessions.create(OWNER, SessionSettings(sink=0, window=20))
            pages = sessions._table.get(OWNER, session).pages
            assert pages is not None
            if is_first:
                damage(pages.tables[0])
            await sessions.append(OWNER, session, history)
            if not is_first:
                damage(pages.tables[0])
            assert await say(sessions, session, [], 8) != expected
            assert ((await sessions.info(OWNER, session)).inv1_violations > 0) is not is_first
            await sessions.close(OWNER, session)
        await sessions.shut_down()

    asyncio.run(talk())


@pytest.mark.parametrize("window", [5, 20])
def test_positions_in_the_cache_are_those_of_what_is_retained(windowed: Models, window: int) -> None:
    """Keys that were stored before rotation, in a model without windows of its own, in blocks."""
    model, reference = windowed("qwen3")
    llm, sessions = open_on(model, page_size=4)

    async def talk() -> None:
        session = await sessions.create(OWNER, SessionSettings(sink=3, window=window, positions="cache"))
        random, history = Random(3), []
        for count in (5, 11, 22):
            new = ids(random, count)
            said = await say(sessions, session, new, 3)
            history += new
            assert said == late_greedy(reference, history, 3, sink=3, window=window)
            history += said
        await sessions.shut_down()

    asyncio.run(talk())
    llm.check()


@pytest.mark.parametrize("window", [5, 20])
def test_keys_that_rotate_late_are_read_through_several_tables(windowed: Models, window: int) -> None:
    """With windows of the model's own: the same tokens in blocks as in whole pages."""
    model, _ = windowed("gemma2")

    async def talk(sessions: Sessions) -> list[int]:
        session = await sessions.create(OWNER, SessionSettings(sink=3, window=window, positions="cache"))
        random, said = Random(3), []
        for count in (5, 11, 12, 25):
            said += await say(sessions, session, ids(random, count), 3)
        info = await sessions.info(OWNER, session)
        assert (info.inv1_violations, info.inv2_violations) == (0, 0)
        await sessions.shut_down()
        return said

    assert asyncio.run(talk(open_on(model, page_size=4)[1])) == asyncio.run(
        talk(open_on(model, page_size=4, groups="off")[1])
    )


def test_sessions_side_by_side_say_what_each_says_alone(windowed: Models) -> None:
    """Bounded ones of several windows, one that is pinned, and prompts of others."""
    model, reference = windowed("gemma3_text")
    llm, sessions = open_on(model, page_size=4, budget=48)
    random = Random(9)

    async def turn(session: str, seed: int, window: int) -> None:
        own, history = Random(seed), []
        for _ in range(2):
            new = ids(own, own.randrange(1, 26))
            said = await say(sessions, session, new, 3)
            history += new
            assert said == masked_greedy(reference, history, 3, sink=2, window=window)
            history += said

    async def drain(stream: Any) -> None:
        async for _ in stream:
            pass

    async def talk() -> None:
        windows = [3, 7, 12, 20, 1000]
        made = [
            await sessions.create(
                OWNER,
                SessionSettings(sink=2, window=window)
                if window < 1000
                else SessionSettings(window=None, retention="pin"),
            )
            for window in windows
        ]
        texts = asyncio.ensure_future(drain(llm.stream(ids(random, 30), greedy(20))))
        await asyncio.gather(
            *(turn(session, seed, window) for seed, (session, window) in enumerate(zip(made, windows, strict=True)))
        )
        await texts
        pinned = await sessions.info(OWNER, made[-1])
        num_pages = pinned.num_retained // 4
        memory = llm.host().memory
        assert memory is not None and num_pages > 3
        # Of full layers all pages; of a window those of the 7 tokens before the next.
        assert pinned.kv_allocated_bytes == sum(
            group.part_bytes * (num_pages if group.layer.span is None else 2) for group in memory.groups
        )
        reserve = llm._core.scheduler.session_pages.reserve
        assert llm.kv_live_bytes() == pinned.kv_allocated_bytes + reserve.num_pages * memory.block_bytes
        for session in made:
            await sessions.close(OWNER, session)
        await sessions.shut_down()

    asyncio.run(talk())
    llm.check()
    assert llm.kv_live_bytes() == 0


def restored(llm: LLM, directory: Path, told: list[str]) -> Sessions:
    """Sessions of `llm` with the checkpoints in `directory`; `told` receives what was found broken."""
    table = SessionTable(llm.host(), SessionsConfig(chunk_tokens=16))
    keeper = Keeper(table, directory, told.append)
    llm.host().loop.call(lambda _: keeper.restore())
    return Sessions(table, keeper)


def test_a_session_goes_on_from_its_checkpoint(windowed: Models, tmp_path: Path) -> None:
    """By group; and where the groups are others, it is computed again."""
    model, reference = windowed("gemma2")
    said: list[str] = []

    def reopen(groups: str) -> Sessions:
        llm = LLM(model, None, EngineConfig(num_pages=200, page_size=4), kv_groups=groups)
        return restored(llm, tmp_path, said)

    history = ids(Random(6), 60)

    async def before() -> str:
        sessions = reopen("all")
        session = await sessions.create(OWNER, SessionSettings(sink=3, window=20))
        history.extend(await say(sessions, session, list(history), 5))
        await sessions.shut_down()
        return session

    async def after(session: str, groups: str, restored: str, num_computed: int) -> None:
        sessions = reopen(groups)
        info = await sessions.info(OWNER, session)
        assert (info.restored, info.history_length) == (restored, len(history))
        more = await say(sessions, session, [], 4)
        assert more == masked_greedy(reference, history, 4, sink=3, window=20)
        history.extend(more)
        after = await sessions.info(OWNER, session)
        assert after.num_computed_tokens - info.num_computed_tokens == num_computed
        assert (after.inv1_violations, after.inv2_violations) == (0, 0)
        await sessions.shut_down()

    session = asyncio.run(before())
    asyncio.run(after(session, "tails", "kv", 5))  # what is kept of requests has nothing to do with it
    asyncio.run(after(session, "off", "tokens", len(history) + 4))
    assert len(said) == 1 and "is of another kv_groups" in said[0]


def test_a_model_without_room_for_a_session_is_refused(windowed: Models) -> None:
    from kvarts.run.sessions.opening import sessions_on as opened

    model, _ = windowed("gemma2")
    llm = LLM(model, None, EngineConfig(num_pages=12, page_size=4), kv_groups="all")
    with pytest.raises(ConfigError, match=r"one session needs \d+ blocks, and the model has 24 for sessions"):
        opened(llm.host(), SessionsConfig(defaults=SessionSettings(sink=4, window=64)))


@pytest.mark.parametrize("kept", [{"sink": 3, "window": 20}, {"retention": "pin"}, {"retention": "host"}])
def test_sessions_beside_host_memory_say_the_same(windowed: Models, kept: dict[str, Any]) -> None:
    """L6, in a memory for little more than one session: parts go to host memory and come back."""
    model, reference = windowed("gemma2")
    host_memory = getattr(kvarts, "OffloadConfig")(host_pages=300)  # noqa: B009  # the room may be missing
    config = EngineConfig(num_pages=40, page_size=4, max_num_batched_tokens=64, max_num_seqs=4)
    llm = LLM(model, None, config, kv_groups="all", offload=host_memory, audit=True)
    settings_ = SessionSettings(**{"window": None, **kept})
    sessions = sessions_on(llm.host(), SessionsConfig(defaults=settings_, chunk_tokens=16))
    sees = {"sink": kept.get("sink", 0), "window": kept.get("window", 10_000)}

    async def talk() -> None:
        random = Random(1)
        histories: dict[str, list[int]] = {await sessions.create(OWNER, settings_): [] for _ in range(2)}
        for turn in range(6):
            session = list(histories)[turn % 2]
            said = ids(random, random.randrange(4, 20))
            histories[session] += said
            answer = await say(sessions, session, said, 4)
            assert answer == masked_greedy(reference, histories[session], 4, **sees)
            histories[session] += answer
        for session in histories:
            info = await sessions.info(OWNER, session)
            assert (info.inv1_violations, info.inv2_violations) == (0, 0)
        await sessions.shut_down()

    asyncio.run(talk())
    assert "window" in kept or llm.transfers[0].counts["num_stores"] > 0


def test_a_mock_without_a_model_counts_whole_pages() -> None:
    with pytest.raises(ConfigError, match="kv_groups: a mock counts whole pages"):
        open_sessions(mock=True, kv_groups="all")


def test_a_session_of_a_model_with_states_says_what_an_undisturbed_run_says() -> None:
    """L6: it goes on from snapshots. It has no window."""
    from builders.stateful_models import stateful_pairs

    model, reference = stateful_pairs()("qwen3_5_text")
    config = EngineConfig(num_pages=300, page_size=4, max_num_batched_tokens=64, max_num_seqs=4)
    llm = LLM(model, None, config, kv_groups="all", audit=True)
    kept = SessionSettings(window=None, retention="pin")
    sessions = sessions_on(llm.host(), SessionsConfig(defaults=kept, chunk_tokens=16))

    async def talk() -> None:
        random = Random(2)
        session = await sessions.create(OWNER, kept)
        history: list[int] = []
        for length in (21, 9, 14):
            said = ids(random, length)
            history += said
            answer = await say(sessions, session, said, 5)
            assert answer == undisturbed(reference, history, 5)
            history += answer
        info = await sessions.info(OWNER, session)
        assert info.num_computed_tokens < 2 * len(history), "it went on from what it had"
        await sessions.shut_down()

    asyncio.run(talk())


@pytest.mark.laws
@pytest.mark.parametrize("family", ["qwen3_5_text", "jamba"])
@pytest.mark.parametrize(("sink", "window"), [(3, 9), (0, 200)])
def test_a_bounded_session_of_a_model_with_states_says_what_a_whole_pass_says(
    family: str, sink: int, window: int
) -> None:
    """Attention sees a sink and a window, the states go on: appends, turns, forks, rollbacks and cancels."""
    from builders.stateful_models import stateful_pairs

    model, reference = stateful_pairs()(family)
    llm, sessions = open_on(model, page_size=4, chunk=7)

    def check(info: SessionInfo) -> None:
        assert (info.inv1_violations, info.inv2_violations) == (0, 0)
        assert info.kv_bound_bytes is not None and info.kv_allocated_bytes <= info.kv_bound_bytes

    assert_says_as_whole_passes(llm, sessions, reference, check, seed=5, sink=sink, window=window)


def test_a_state_outlives_the_process_and_a_wrong_one_is_noticed(tmp_path: Path) -> None:
    """The checkpoint has the state: a restart computes only what is new. A state that changes its blocks is counted."""
    from builders.stateful_models import stateful_pairs

    model, reference = stateful_pairs()("qwen3_5_text")
    kept = SessionSettings(sink=3, window=9)
    told: list[str] = []

    def opened() -> Sessions:
        llm, _ = open_on(model, page_size=4)
        return restored(llm, tmp_path, told)

    history = ids(Random(3), 40)

    async def first() -> str:
        sessions = opened()
        session = await sessions.create(OWNER, kept)
        history.extend(await say(sessions, session, history, 6))
        await sessions.shut_down()
        return session

    async def second(session: str) -> None:
        sessions = opened()
        before = await sessions.info(OWNER, session)
        assert (before.restored, told) == ("kv", [])
        more = await say(sessions, session, [], 6)
        assert more == masked_greedy(reference, history, 6, sink=3, window=9)
        after = await sessions.info(OWNER, session)
        assert after.num_computed_tokens - before.num_computed_tokens == 6
        assert (after.inv1_violations, after.inv2_violations) == (0, 0)
        pages = sessions._table.get(OWNER, session).pages
        assert pages is not None
        pages._state.page_ids = list(pages.page_ids[: len(pages.state)])
        assert (await sessions.info(OWNER, session)).inv1_violations > 0
        pages._state.page_ids = []

    asyncio.run(second(asyncio.run(first())))


def test_a_timeline_counts_blocks_that_sessions_keep(tmp_path: Path) -> None:
    """Reserved ones are no parts, and those of a pin are; at rest nothing else is in use."""
    from kvarts.proof.record.live import LiveTimeline
    from kvarts.run.torch.tiny import write_tiny

    write_tiny("gemma3", tmp_path / "model")
    path = tmp_path / "timeline.jsonl"
    recorded: list[LiveTimeline] = []

    def record(config: EngineConfig, tiers: Any, *, num_blocks: int, memory: Any) -> LiveTimeline:
        recorded.append(
            LiveTimeline(path, total_blocks=num_blocks, block_size_tokens=config.page_size, tiers=tiers, memory=memory)
        )
        return recorded[0]

    sessions = open_sessions(
        model=tmp_path / "model", kv_memory="2MiB", page_size=4, kv_groups="all", session_memory="1MiB", record=record
    )

    async def talk() -> None:
        bounded = await sessions.create(OWNER, SessionSettings(sink=2, window=12))
        pinned = await sessions.create(OWNER, SessionSettings(window=None, retention="pin"))
        for turn in range(2):
            for session in (bounded, pinned):
                await say(sessions, session, ids(Random(turn), 20), 6)
        await sessions.shut_down()

    asyncio.run(talk())
    recorded[0].close()
    verdict = verify_file(path)
    assert verdict.verdict == "ok", verdict.to_text()
    rows = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    rests = [row for row in rows if row.get("active_seqs") == 0 and row.get("reserved_blocks")]
    assert rests and all(row["used_blocks"] == row["reserved_blocks"] for row in rests)
    assert any(sum(row["group_used_parts"]) for row in rests)

"""L11: what arrived at a mock, replayed, makes the same page decisions in the same steps, event for event."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarts.base.clock import PacedClock, VirtualClock
from kvarts.core.events import StepDone
from kvarts.core.sampling import SamplingParams
from kvarts.core.tiers.config import OffloadConfig
from kvarts.cost.polynomial import LinearCost
from kvarts.doors.openai.opening import Door, MockSettings, OwnReaders
from kvarts.doors.openai.running import open_mock
from kvarts.doors.openai.served import Limits
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.traffic.formats import load_trace
from kvarts.sim.traffic.logs import RecordedRow, recorded_trace

from builders.grouped import group_settings
from builders.parity import Heard, Sent, run_live, shifted


def served_live(config: ReplayConfig, sent: list[Sent], *, speedup: float) -> tuple[list[RecordedRow], list[Any]]:
    """Send requests to a mock on the wall clock; return what it recorded, and what happened in it."""
    heard = Heard()
    door = Door(is_recording=True, limits=Limits(max_queued=100_000))
    opened = open_mock(config, door, MockSettings(speedup=speedup, readers=OwnReaders(heard)))
    run_live(opened, [(None, request) for request in sent])
    assert opened.recorder is not None
    return opened.recorder.rows(), heard.events


def replayed(config: ReplayConfig, rows: list[RecordedRow]) -> list[Any]:
    heard = Heard()
    replay(recorded_trace(rows), config, observers_of=lambda _: [heard])
    return heard.events


def assert_same(config: ReplayConfig, rows: list[RecordedRow], live: list[Any], *, ends_later: bool = False) -> None:
    """Assert that a replay of `rows` does the same. `ends_later`: copies may end in it after the last request."""
    by_ns = min(row.arrival_ns for row in rows)
    again = replayed(msgspec.structs.replace(config, step_by_step=True), rows)
    expected = shifted(live, by_ns)
    for number, (mine, other) in enumerate(zip(expected, again, strict=False)):
        assert mine == other, f"event {number}"
    assert len(expected) == len(again) or ends_later
    rest = {kind for kind, _ in again[len(expected) :]}
    assert rest <= {"StepStarted", "PagesStored", "PagesRemoved", "TransferEnded", "AtRest"}


STORAGE: dict[str, Any] = {
    "hicache_storage_backend": "file",
    "hicache_storage_backend_extra_config": '{"prefetch_threshold": 1}',
    "hicache_storage_prefetch_policy": "wait_complete",
    "offload": OffloadConfig(disk_read="1GB/s", disk_latency_us=300),
}
tokens = st.integers(0, 3)
prompts = st.one_of(
    st.lists(tokens, min_size=1, max_size=30),
    st.tuples(st.integers(0, 2), st.lists(tokens, max_size=6)).map(lambda pair: [pair[0]] * 17 + pair[1]),
)
requests = st.builds(
    Sent,
    delay_ms=st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.5]),
    prompt=prompts,
    num_tokens=st.integers(1, 24),
    priority=st.integers(0, 1),
    salt=st.sampled_from([None, None, "a"]),
    num_stops=st.sampled_from([0, 60, 450]),
)


@pytest.mark.laws
@settings(deadline=None, max_examples=settings().max_examples // 2)
@given(
    sent=st.lists(requests, min_size=1, max_size=12),
    pages=st.integers(6, 24),
    page_size=st.sampled_from([1, 2, 4]),
    budget=st.sampled_from([4, 16, 64]),
    seqs=st.integers(1, 4),
    has_host=st.booleans(),
    ahead=st.booleans(),
    kept=st.one_of(st.just({}), group_settings()),
)
def test_a_recorded_run_replays_to_the_same_events(
    sent: list[Sent],
    pages: int,
    page_size: int,
    budget: int,
    seqs: int,
    has_host: bool,
    ahead: bool,
    kept: dict[str, Any],
) -> None:
    config = small(pages, page_size, budget, seqs, has_host=has_host)
    config = msgspec.structs.replace(config, async_scheduling=ahead, **kept)
    rows, live = served_live(config, sent, speedup=1.0)
    assert len(rows) == len(sent)
    assert_same(config, rows, live, ends_later=ahead and has_host)


def small(pages: int, page_size: int, budget: int, seqs: int, *, has_host: bool = False) -> ReplayConfig:
    offload = None
    if has_host:
        from kvarts.core.tiers.config import OffloadConfig

        offload = OffloadConfig(host_pages=pages, policy="eager")
    return ReplayConfig(
        num_pages=pages,
        page_size=page_size,
        max_num_batched_tokens=max(budget, seqs),
        max_num_seqs=seqs,
        cost=LinearCost(step_ms=0.05, chunk_token_ms=0.01, decode_ms=0.01),
        offload=offload,
        audit=True,
    )


def test_a_run_with_preemptions_replays_to_the_same_steps_also_from_a_file(tmp_path: Path) -> None:
    config = small(24, 4, 32, 6)
    sent = [Sent(0.2 * index, [index % 3] * 16 + [index], 20) for index in range(30)]
    rows, live = served_live(config, sent, speedup=1.0)
    steps = [dict(fields) for kind, fields in live if kind == StepDone.__name__]
    assert sum(len(step["preemptions"]) for step in steps) > 0
    assert_same(config, rows, live)
    path = tmp_path / "recorded.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    report = replay(load_trace(path), config)
    assert report.summary["num_completed"] == len(sent)
    assert report.summary["num_preemptions"] == sum(len(step["preemptions"]) for step in steps)


@pytest.mark.long
def test_ten_thousand_requests_replay_to_the_same_events() -> None:
    config = msgspec.structs.replace(small(600, 16, 512, 64), audit=False)
    sent = [
        Sent(1.2 * index, [index % 7] * 64 + [index % 97] * 20 + [index], 10 + index % 30) for index in range(10_000)
    ]
    rows, live = served_live(config, sent, speedup=1.0)
    assert_same(config, rows, live)


@pytest.mark.laws
@settings(deadline=None, max_examples=settings().max_examples // 2)
@given(
    sent=st.lists(requests, min_size=1, max_size=12),
    method=st.sampled_from(["eagle3", "ngram"]),
    num_drafts=st.integers(1, 3),
    pages=st.integers(25, 40),
    is_ahead=st.booleans(),
)
def test_a_recorded_run_with_drafts_replays_to_the_same_events(
    sent: list[Sent], method: str, num_drafts: int, pages: int, *, is_ahead: bool
) -> None:
    """As vLLM 0.33 starts. Requests have 256 tokens at most, and the memory holds two of these."""
    config = ReplayConfig.of_options(
        model="qwen3-8b",
        device="h100-80gb",
        engine="vllm==0.33",
        speculative_tokens=num_drafts,
        acceptance=",".join(["0.8", "0.6", "0.4"][:num_drafts]),
        speculative_method=method,
        async_scheduling=is_ahead and method != "ngram",
        max_model_len=256,
        max_seqs=4,
        max_batched_tokens=64,
        pages=pages,
        frontend_ms=0.0,
        audit=False,
    )
    config = msgspec.structs.replace(config, cost=LinearCost(step_ms=0.05, chunk_token_ms=0.001, decode_ms=0.01))
    sent = [msgspec.structs.replace(each, prompt=each.prompt * 5) for each in sent]
    rows, live = served_live(config, sent, speedup=1.0)
    assert len(rows) == len(sent)
    assert_same(config, rows, live)


@pytest.mark.laws
@settings(deadline=None, max_examples=settings().max_examples // 2)
@given(
    sent=st.lists(requests, min_size=1, max_size=12),
    pages=st.integers(24, 80),
    page_size=st.sampled_from([1, 2, 4]),
    changes=st.sampled_from(
        [
            {},
            {"disable_overlap_schedule": True},
            {"schedule_policy": "lpm", "schedule_conservativeness": 0.1},
            {"enable_priority_scheduling": True, "priority_scheduling_preemption_threshold": 0},
            {"radix_eviction_policy": "lfu"},
            {"scheduler_recv_interval": 4},
            {"hicache_ratio": 0.5},
            {"hicache_ratio": 0.3, "disable_overlap_schedule": True, "hicache_write_policy": "write_back"},
            {"hicache_ratio": 1.0, **STORAGE},
            {"max_mamba_cache_size": 20, "mamba_chunk_size": 4, "mamba_track_interval": 4},
        ]
    ),
)
def test_a_recorded_run_of_sglang_replays_to_the_same_events(
    sent: list[Sent], pages: int, page_size: int, changes: dict[str, Any]
) -> None:
    config = ReplayConfig(
        engine="sglang",
        num_pages=-(-pages // page_size) + 40,
        page_size=page_size,
        max_num_batched_tokens=16,
        max_num_seqs=3,
        cost=LinearCost(step_ms=0.05, chunk_token_ms=0.01, decode_ms=0.01),
        **changes,
    )
    rows, live = served_live(config, sent, speedup=1.0)
    assert len(rows) == len(sent)
    assert_same(config, rows, live, ends_later="hicache_ratio" in changes)


NS_PER_S = 1_000_000_000
LOADS = ReplayConfig(
    num_pages=10,
    page_size=4,
    max_num_batched_tokens=64,
    max_num_seqs=2,
    cost=LinearCost(step_ms=1, chunk_token_ms=1000),
    offload=OffloadConfig(host_pages=30, policy="eager", h2d="5KB/s", kv_bytes_per_token=1000),
    audit=True,
)
ASKS = ReplayConfig(
    engine="sglang",
    num_pages=30,
    page_size=4,
    max_num_batched_tokens=64,
    max_num_seqs=2,
    cost=LinearCost(step_ms=1),
    hicache_ratio=1.0,
    **{**STORAGE, "offload": OffloadConfig(disk_latency_us=4e6)},
)


@pytest.mark.parametrize("config", [LOADS, ASKS], ids=["load", "query of storage"])
@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_pause_is_interrupted_by_what_comes(config: ReplayConfig, *, is_cancelled: bool) -> None:
    """Nothing can be computed for 4 s; after one of them, a request comes, and perhaps the one that waits is cancelled.

    Time is that of a script: nothing sleeps.
    """
    heard = Heard()
    host = open_mock(config, Door(), MockSettings(readers=OwnReaders(heard))).served.host
    loop, clock, wall = host.loop, host.clock, VirtualClock()
    assert isinstance(clock, PacedClock)
    clock._wall, clock.is_asked = wall, None
    if config is LOADS:
        for token, count in ((1, 21), (2, 37)):
            loop.submit([token] * count, SamplingParams(max_tokens=1))
            while not loop.step():
                pass
            wall.wait_until_ns(wall.now_ns() + 100 * NS_PER_S)  # the store ends

    def ask(timeout_s: float) -> bool:
        asked.append(timeout_s)
        wall.wait_until_ns(wall.now_ns() + NS_PER_S)
        return True

    asked: list[float] = []
    clock.is_asked = ask
    begun_ns = wall.now_ns()
    waiting = loop.submit([1] * 21, SamplingParams(max_tokens=1))
    assert loop.step() == []
    assert asked == [pytest.approx(4.0, abs=0.01)]
    assert clock.now_ns() == pytest.approx(begun_ns + NS_PER_S, abs=1e6)
    assert loop.step() == [], "nothing has changed: it goes on"
    assert asked[1] == pytest.approx(3.0, abs=0.01)
    clock.is_asked = None
    if is_cancelled:
        assert loop.cancel(waiting) is not None
    other = loop.submit([3], SamplingParams(max_tokens=1))
    ended: dict[int, int] = {}
    while len(ended) < 2 - is_cancelled:
        ended |= {completion.index: clock.now_ns() for completion in loop.step()}
    came_ns = begun_ns + 2 * NS_PER_S
    if config is LOADS:
        assert ended[other] == pytest.approx(came_ns + NS_PER_S, rel=0.01), "it computes one token while others load"
    if not is_cancelled:
        assert ended[waiting] >= begun_ns + 4 * NS_PER_S
    host.core.scheduler.check()

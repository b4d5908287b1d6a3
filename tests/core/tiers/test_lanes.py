"""A slow lane: stores wait for it, loads are weighed against computing, and a transfer has a deadline."""

from __future__ import annotations

from array import array
from functools import partial
from importlib.resources import files
from random import Random
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.cli.outputs import render_table
from kvarts.core.config import EngineConfig
from kvarts.core.content import Content
from kvarts.core.events import ChunkComputed, Event, LoadAwaited, LoadStarted, LoadWeighed, StoreStarted, TransferEnded
from kvarts.core.kv.cache import BlockTable
from kvarts.core.kv.eviction import LruOrder
from kvarts.core.kv.page_cache import PageCache
from kvarts.core.kv.pool import IdPool
from kvarts.core.kv.transfer import TransferReport
from kvarts.core.kv.tree import PrefixTree
from kvarts.core.sched.plan import StepPlan, StepResult
from kvarts.core.tiers.channel import Channel, MeasuredChannel, MeasuredPrefill
from kvarts.core.tiers.config import OffloadConfig
from kvarts.core.tiers.opening import open_offloader, prepare_tiers
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.replica import Replica
from kvarts.sim.report.advice import advice
from kvarts.sim.traffic.formats import load_trace
from kvarts.sim.traffic.trace import Trace, TraceRequest

from builders.engines import make_replica, request_of, run
from builders.kept import Kept
from builders.serving import assert_undisturbed, serve
from builders.tiered_toy import TieredToy, busy
from builders.tiers import offloader_of

NS_PER_S = 1_000_000_000
A_PAGE_A_SECOND = 1_000

SMALL_STEPS = EngineConfig(page_size=1, max_num_batched_tokens=8, max_num_seqs=8)


class SlowPrefill:
    """A token a second."""

    def prefill_ns(self, start: int, end: int) -> int:
        return (end - start) * NS_PER_S


def make_engine(num_pages: int = 32, budget: int = 64, **offload: object) -> tuple[Replica, list[Event]]:
    """An engine with pages of one token and a thousand bytes, steps of a millisecond, and prompts said to be slow."""
    kept = Kept()
    settings = {"host_pages": 64, "latency_us": 0.0, "kv_bytes_per_token": 1000, **offload}
    below = OffloadConfig(**settings)  # type: ignore[arg-type]
    config = EngineConfig(num_pages=num_pages, page_size=1, max_num_batched_tokens=budget, max_num_seqs=4)
    engine = make_replica(config, offload=below, readers=[kept], audit=True, prefill=SlowPrefill().prefill_ns)
    return engine, kept.events


def forget_on_device(engine: Replica, index: int) -> None:
    """Fill the device with something else, which is evicted from host memory at once."""
    run(engine, request_of(index, range(1000 * index, 1000 * index + 31)))


# Stores ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["eager", "lazy"])
def test_no_more_is_begun_than_the_lane_carries_within_the_bound(policy: str) -> None:
    engine, events = make_engine(
        policy=policy, target_free=32, d2h=A_PAGE_A_SECOND, store_within_ms=3000, host_pages=64
    )
    run(engine, request_of(0, range(16)))
    run(engine, *(request_of(index, range(100 * index, 100 * index + 5)) for index in range(1, 5)))
    started = [event for event in events if isinstance(event, StoreStarted)]
    sizes = [sum(end - start for _, start, end in event.runs) for event in started]
    assert max(sizes) == 3
    if policy == "eager":
        assert sum(sizes) == 36, "what is not begun stays wanted"


def test_a_page_that_takes_longer_than_the_bound_is_stored_if_nothing_is_under_way() -> None:
    engine, events = make_engine(d2h=A_PAGE_A_SECOND, store_within_ms=10)
    run(engine, request_of(0, range(5)))
    started = [event.runs for event in events if isinstance(event, StoreStarted)]
    assert [[(start, end) for _, start, end in runs] for runs in started] == [[(i, i + 1)] for i in range(5)]


def test_the_prefix_of_what_is_copied_can_be_evicted_meanwhile() -> None:
    """A store of one page keeps one page: another prompt gets all the others."""
    engine, _ = make_engine(num_pages=16, d2h=A_PAGE_A_SECOND, store_within_ms=1)
    first, second = request_of(0, range(15)), request_of(1, range(100, 115))
    run(engine, first, second)
    assert 0 < first.last_token_ns < second.last_token_ns < NS_PER_S


# Loads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("h2d", "num_loads"), [(2 * A_PAGE_A_SECOND, 1), (A_PAGE_A_SECOND // 8, 0)])
def test_what_is_sooner_computed_is_not_loaded(h2d: int, num_loads: int) -> None:
    engine, events = make_engine(h2d=h2d)
    run(engine, request_of(0, range(8)))
    forget_on_device(engine, 1)
    run(engine, request_of(2, range(10)))
    weighed = [event for event in events if isinstance(event, LoadWeighed)]
    assert sum(isinstance(event, LoadStarted) and event.request == 2 for event in events) == num_loads
    assert len(weighed) == 1 - num_loads
    for event in weighed:
        assert (event.num_pages, event.load_ns, event.worth_ns) == (0, 56 * NS_PER_S, 7 * NS_PER_S)


def test_the_last_pages_are_loaded_while_the_first_are_computed() -> None:
    engine, events = make_engine(h2d=A_PAGE_A_SECOND)
    run(engine, request_of(0, range(12)))
    forget_on_device(engine, 1)
    prompt = request_of(2, range(13))
    since_ns = engine.now_ns
    run(engine, prompt)
    (load,) = [event for event in events if isinstance(event, LoadStarted)]
    assert (load.num_hit_pages, load.num_front_pages, load.by_tier) == (1, 6, (("host", 5),))
    assert 5 * NS_PER_S < prompt.first_token_ns - since_ns < 5.1 * NS_PER_S
    assert (prompt.cached_tokens, prompt.cached_tokens_below, prompt.recomputed_tokens) == (6, (5,), 0)


@pytest.mark.parametrize("after_ms", [1, 3000])
def test_a_request_that_is_cancelled_meanwhile_releases_its_pages_when_the_load_has_ended(after_ms: int) -> None:
    engine, events = make_engine(budget=4, h2d=A_PAGE_A_SECOND)
    run(engine, request_of(0, range(12)))
    forget_on_device(engine, 1)
    prompt = request_of(2, range(13))
    engine.submit(prompt, engine.now_ns)
    engine.run_until(engine.now_ns + after_ms * NS_PER_S // 1000, [])
    engine.cancel(prompt)
    num_in_front = sum(isinstance(event, ChunkComputed) and event.request == 2 for event in events)
    assert num_in_front == (2 if after_ms > 1 else 1)
    engine.run_until(1 << 60, [])
    engine.flush()
    assert sum(isinstance(event, ChunkComputed) and event.request == 2 for event in events) == num_in_front
    assert not engine.has_work
    assert engine.scheduler.cache.num_used == 0


def test_what_a_split_load_does_not_bring_is_computed() -> None:
    engine, _ = make_engine(h2d=A_PAGE_A_SECOND, fail_every=3)
    run(engine, request_of(0, range(12)))
    forget_on_device(engine, 1)
    prompt = request_of(2, range(13))
    since_ns = engine.now_ns
    run(engine, prompt)
    assert offloader_of(engine).counts.num_failed == 1
    assert 5 * NS_PER_S < prompt.first_token_ns - since_ns < 5.1 * NS_PER_S
    assert (prompt.cached_tokens, prompt.recomputed_tokens) == (1, 0), "one was on the device"


def test_only_the_tier_that_pays_is_loaded_from() -> None:
    """Host memory has the beginning, files have the rest, and files are too slow."""
    engine, events = make_engine(host_pages=40, disk_pages=400, disk_read=A_PAGE_A_SECOND // 2)
    run(engine, request_of(0, range(20)))
    forget_on_device(engine, 1)
    run(engine, request_of(2, range(8)))  # they are the most recent in host memory, and last in files
    forget_on_device(engine, 3)
    run(engine, request_of(4, range(20)))
    loads = [event.by_tier for event in events if isinstance(event, LoadStarted) and event.request == 4]
    weighed = [event for event in events if isinstance(event, LoadWeighed) and event.request == 4]
    assert loads and loads[0][0][0] == "host" and len(loads[0]) == 1
    assert weighed[0].num_pages == loads[0][0][1] < sum(count for _, count in weighed[0].by_tier)


def test_of_two_requests_that_want_the_same_pages_one_loads_and_the_other_waits() -> None:
    engine, events = make_engine(h2d=A_PAGE_A_SECOND * 2)
    run(engine, request_of(0, range(8)))
    forget_on_device(engine, 1)
    first, second = request_of(2, range(9)), request_of(3, [*range(8), 50])
    run(engine, first, second)
    assert offloader_of(engine).counts.num_loads == 1
    (awaited,) = [event for event in events if isinstance(event, LoadAwaited)]
    assert (awaited.request, awaited.num_hit_pages) == (3, 1)
    assert (first.hit_tokens, second.hit_tokens) == (8, 8)


@pytest.mark.parametrize("cancels_leader", [True, False])
def test_a_request_that_waits_for_the_load_of_another_can_be_cancelled_and_outlives_it(cancels_leader: bool) -> None:
    engine, _ = make_engine(h2d=A_PAGE_A_SECOND * 2)
    run(engine, request_of(0, range(8)))
    forget_on_device(engine, 1)
    leader, follower = request_of(2, range(9)), request_of(3, [*range(8), 50])
    engine.submit(leader, engine.now_ns)
    engine.submit(follower, engine.now_ns)
    engine.run_until(engine.now_ns + NS_PER_S, [])
    assert engine.scheduler.num_waiting == 2
    gone, left = (leader, follower) if cancels_leader else (follower, leader)
    engine.cancel(gone)
    run(engine)
    assert gone.last_token_ns < 0 < left.last_token_ns
    assert left.hit_tokens == 8
    assert engine.scheduler.cache.num_used == 0


# Deadlines ------------------------------------------------------------------------------------------------


def test_a_store_that_is_never_reported_lets_go_of_its_pages_at_its_deadline() -> None:
    told: list[Event] = []
    cache = PageCache(IdPool(8), PrefixTree(LruOrder()))
    offloader = open_offloader(
        OffloadConfig(host_pages=8, deadline_s=2.0),
        cache,
        SMALL_STEPS,
        with_page_ids=True,
        emit=told.append,
    )
    content = Content.from_tokens(range(4), page_size=1, owner=0)
    table = cache.open(cache.match(content, 4))
    cache.grow(table, 4)
    cache.close(table, 4, 4)
    offloader.confirm(content, 4, BlockTable(content, [], 0, None))
    offloader.plan_stores(NS_PER_S)
    offloader.take_planned()
    offloader.expire(3 * NS_PER_S - 1)
    assert cache.num_used == 4
    offloader.expire(3 * NS_PER_S)
    assert cache.num_used == 0
    assert (offloader.counts.num_late, offloader.counts.num_failed) == (1, 1)
    assert told[-1] == TransferEnded(0, -1, 0, 3 * NS_PER_S)
    assert offloader.layout.tiers[0].find(content, 0, 4) == 0
    offloader.report([TransferReport(0)], 4 * NS_PER_S)
    assert offloader.counts.num_stray_reports == 1
    offloader.check()


class Forgetful(TieredToy):
    """Carries out every transfer, and reports none of some."""

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        reports = tuple(report for report in result.transfer_reports if report.transfer_id % 3)
        return result.replaced(transfer_reports=reports)


@pytest.mark.parametrize("policy", ["eager", "lazy"])
def test_requests_outlive_transfers_that_are_never_reported(policy: str) -> None:
    arrivals, config, offload = busy(policy)
    offload = msgspec.structs.replace(offload, deadline_s=20e-9)  # a step begins every nanosecond
    executor = Forgetful(config, offload, Random(1))
    tiers = partial(prepare_tiers, offload, namespace="toy")
    engine, requests, cancelled = serve(arrivals, config, executor, tiers=tiers)
    assert_undisturbed(arrivals, requests, cancelled)
    counts = offloader_of(engine).counts
    assert counts.num_late > 0
    assert not engine.has_work
    assert engine.scheduler.cache.num_used == 0


# What a real executor takes -------------------------------------------------------------------------------


def test_prefill_is_unknown_until_it_was_measured_and_then_goes_by_the_token() -> None:
    measured = MeasuredPrefill()
    assert measured.prefill_ns(0, 10) is None
    measured.measure(3, 3, 10**9)
    assert measured.prefill_ns(0, 10) is None, "a step of decodes says nothing of prompts"
    measured.measure(100, 1, 1000)
    assert measured.prefill_ns(5, 15) == 100


@given(st.lists(st.tuples(st.integers(1, 10**9), st.integers(1, 10**12)), max_size=50), st.integers(1, 10**12))
def test_a_measured_channel_is_between_the_slowest_and_the_fastest_of_its_transfers(
    transfers: list[tuple[int, int]], bytes_per_s: int
) -> None:
    channel = MeasuredChannel("h2d", latency_us=0.0, bytes_per_s=bytes_per_s)
    known = Channel("h2d", latency_us=0.0, bytes_per_s=bytes_per_s)
    assert channel.within_ns(7, 10**6) == known.within_ns(7, 10**6), "before anything was measured, what it is said"
    for num_bytes, duration_ns in transfers:
        channel.submit(0, num_bytes)
        assert channel.wait_ns(0) > 0 or num_bytes * NS_PER_S < 10**18
        channel.ended(num_bytes, duration_ns)
        assert channel.wait_ns(0) == 0
    if transfers:
        speeds = [num_bytes / duration_ns for num_bytes, duration_ns in transfers]
        expected_ns = 10**9 / max(speeds), 10**9 / max(min(speeds), 1e-9)
        assert expected_ns[0] * 0.99 - 1 <= channel.within_ns(0, 10**9) <= expected_ns[1] * 1.01 + 1


def test_a_channel_that_was_slow_once_is_tried_again() -> None:
    channel = MeasuredChannel("h2d", latency_us=0.0, bytes_per_s=10**9)
    channel.submit(0, 1000)
    channel.ended(1000, NS_PER_S)
    slow_ns = channel.within_ns(0, 1000)
    for _ in range(30):
        channel.passed_over()
    assert channel.within_ns(0, 1000) < slow_ns / 10
    for _ in range(300):
        channel.passed_over()
    assert channel.within_ns(0, 1000) == 1000, "never faster than it is said to be"


# Reports --------------------------------------------------------------------------------------------------


def row(index: int, units: list[int]) -> TraceRequest:
    return TraceRequest(index, index * NS_PER_S, array("Q", units).tobytes(), len(units) * 16, 1)


def summary_of(**offload: Any) -> dict[str, Any]:
    """Prompts that come again and again: computing one takes a second, and the lane is a little faster."""
    rows = [row(index, [100 * (index % 3) + number for number in range(20)]) for index in range(60)]
    config = ReplayConfig(
        num_pages=24,
        page_size=16,
        cost=lambda batch: 50.0 * sum(chunk.num_tokens for chunk in batch.chunks) / 16 + 1.0,
        offload=OffloadConfig(host_pages=200, **offload),
        audit=True,
    )
    return replay(Trace(rows, unit_tokens=16), config).summary


def test_a_run_that_waits_for_loads_is_limited_by_the_lane() -> None:
    summary = summary_of(h2d=40 * 16 * 131_072)
    limited_by = summary["limited_by"]
    assert (limited_by["cause"], limited_by["lane"]) == ("transfers", "h2d")
    assert limited_by["share_of_waiting"]["transfers"] > 0.5
    assert sum(limited_by["share_of_waiting"].values()) == pytest.approx(1.0)
    assert "transfers: waiting requests found loads under way, most of them on h2d" in render_table(summary)
    assert "try a faster --set offload.h2d" in cast(str, advice(summary))


def test_without_a_tier_the_report_names_no_lane() -> None:
    rows = [row(0, [1, 2])]
    limited_by = replay(Trace(rows, unit_tokens=16), ReplayConfig(num_pages=24, page_size=16)).summary["limited_by"]
    assert "lane" not in limited_by
    assert "transfers" not in limited_by["share_of_waiting"]


# The whole ------------------------------------------------------------------------------------------------


def ttft_of(**offload: Any) -> dict[str, float]:
    trace = load_trace(cast(Any, files("kvarts") / "data" / "mooncake-conversation-1000.jsonl"))
    below = OffloadConfig(**offload) if offload else None
    ttft: dict[str, float] = replay(trace, ReplayConfig(num_pages=2048, page_size=512, offload=below)).summary[
        "ttft_ms"
    ]
    return ttft


def check_never_hurts(policy: str, rate: str, *many: dict[str, int]) -> None:
    alone = ttft_of()
    for settings in many:
        rates = dict.fromkeys(("h2d", "d2h", "disk_read", "disk_write"), rate)
        ttft = ttft_of(**{"policy": policy, **settings, **rates})
        assert ttft["mean"] <= 1.05 * alone["mean"]
        assert ttft["p99"] <= 1.05 * alone["p99"]


@pytest.mark.parametrize("policy", ["eager", "lazy"])
def test_a_slow_tier_does_not_hurt(policy: str) -> None:
    check_never_hurts(policy, "200MB/s", {"host_pages": 8000})


@pytest.mark.long
@pytest.mark.parametrize("policy", ["eager", "lazy"])
@pytest.mark.parametrize("rate", ["10MB/s", "300MB/s", "3GB/s", "100GB/s"])
def test_a_tier_never_hurts(rate: str, policy: str) -> None:
    with_files, failing = {"host_pages": 1000, "disk_pages": 8000}, {"host_pages": 8000, "fail_every": 2}
    check_never_hurts(policy, rate, {"host_pages": 1}, with_files, failing)

"""What an engine with a tier below does, one rule a test, on small cases."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from random import Random

import pytest

from kvarts.base.errors import ConfigError
from kvarts.core.config import EngineConfig
from kvarts.core.content import Content
from kvarts.core.events import Admitted, ChunkComputed, Event, LoadStarted, PagesRemoved, PagesStored, StoreStarted
from kvarts.core.kv.cache import BlockTable
from kvarts.core.kv.eviction import LruOrder
from kvarts.core.kv.page_cache import PageCache
from kvarts.core.kv.pool import CountPool, IdPool
from kvarts.core.kv.transfer import TransferReport
from kvarts.core.kv.tree import Node, PrefixTree
from kvarts.core.tiers.channel import Channel
from kvarts.core.tiers.config import OffloadConfig
from kvarts.core.tiers.offloader import Offloader
from kvarts.core.tiers.opening import open_offloader
from kvarts.core.tiers.page_layout import PageLayout
from kvarts.core.tiers.safe_first import SafeFirst
from kvarts.core.tiers.transfers import NEVER_NS
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.replica import Replica
from kvarts.sim.traffic.trace import Trace, TraceRequest

from builders.engines import make_replica, request_of, run
from builders.kept import Kept
from builders.tiers import offloader_of

NS_PER_MS = 1_000_000
SLOW = 1_000  # bytes a second: a page takes a second

SMALL_STEPS = EngineConfig(page_size=1, max_num_batched_tokens=8, max_num_seqs=8)


def content_of(tokens: Sequence[int], owner: int = 0) -> Content:
    return Content.from_tokens(tokens, page_size=1, owner=owner)


def make_engine(
    num_pages: int = 32, budget: int = 64, num_seqs: int = 4, **offload: object
) -> tuple[Replica, list[Event]]:
    """An engine with pages of one token, steps of one millisecond, and pages of a thousand bytes."""
    kept = Kept()
    below = OffloadConfig(**{"host_pages": 64, "latency_us": 0.0, "kv_bytes_per_token": 1000, **offload})  # type: ignore[arg-type]
    config = EngineConfig(num_pages=num_pages, page_size=1, max_num_batched_tokens=budget, max_num_seqs=num_seqs)
    engine = make_replica(config, offload=below, readers=[kept], audit=True)
    return engine, kept.events


def stores_of(events: Sequence[Event]) -> list[list[tuple[int, int, int]]]:
    return [
        [(content.owner, start, end) for content, start, end in event.runs]
        for event in events
        if isinstance(event, StoreStarted)
    ]


# Eager ----------------------------------------------------------------------------------------------------


def test_eager_stores_a_complete_page_in_the_next_step_and_chunk_by_chunk() -> None:
    engine, events = make_engine(budget=4)
    run(engine, request_of(0, range(10)))
    assert stores_of(events) == [[(0, 0, 4)], [(0, 4, 8)], [(0, 8, 10)]]
    # In every step, what the one before has computed goes out once the step has taken its pages.
    told = [type(event) for event in events if isinstance(event, ChunkComputed | StoreStarted)]
    assert told == [ChunkComputed, ChunkComputed, StoreStarted, ChunkComputed, StoreStarted, StoreStarted]


def test_eager_stores_nothing_twice() -> None:
    engine, events = make_engine()
    run(engine, request_of(0, range(10)))
    run(engine, request_of(1, range(10)))
    run(engine, request_of(2, range(12)))
    assert stores_of(events) == [[(0, 0, 10)], [(2, 10, 12)]]


def test_generated_pages_of_unknown_tokens_are_not_stored() -> None:
    engine, events = make_engine()
    run(engine, request_of(0, range(4), max_tokens=8))
    assert stores_of(events) == [[(0, 0, 4)]]


# Lazy -----------------------------------------------------------------------------------------------------


def test_lazy_stores_what_is_next_to_be_evicted_and_no_more_than_its_target() -> None:
    engine, events = make_engine(num_pages=16, policy="lazy", target_free=6)
    run(engine, request_of(0, range(8)))
    assert stores_of(events) == [], "eight pages are empty"
    run(engine, request_of(1, range(100, 104)))
    # Four pages are empty, and two more have to be safe: the deepest of the oldest prompt.
    assert stores_of(events) == [[(0, 6, 8)]]
    run(engine, request_of(2, range(200, 202)))
    assert stores_of(events) == [[(0, 6, 8)], [(0, 4, 6)]]


def lazy_offloader(
    num_pages: int, target_free: int, order: SafeFirst | None = None
) -> tuple[Offloader[PageLayout], PageCache]:
    order = order or SafeFirst()
    cache = PageCache(CountPool(num_pages), PrefixTree(order, watcher=order))
    config = OffloadConfig(host_pages=64, policy="lazy", target_free=target_free, kv_bytes_per_token=1000)
    return open_offloader(config, cache, SMALL_STEPS, order=order), cache


@pytest.mark.parametrize("is_watched", [False, True])
@pytest.mark.parametrize("num_copies", [1, 2])
def test_what_a_store_reads_stays_in_use_when_its_request_ends(*, is_watched: bool, num_copies: int) -> None:
    events: list[Event] = []
    emit = events.append if is_watched else None
    cache = PageCache(CountPool(12), PrefixTree(LruOrder(), emit))
    config = OffloadConfig(host_pages=64, policy="eager", kv_bytes_per_token=1000, d2h=SLOW)
    offloader = open_offloader(config, cache, SMALL_STEPS, emit=emit)
    prompts = [content_of(range(4), owner) for owner in range(num_copies)]
    tables = [cache.open(cache.match(prompt, 4)) for prompt in prompts]
    for table, prompt in zip(tables, prompts, strict=True):
        cache.grow(table, 4)
        cache.publish_pages(table, 4)
        if not table.content.owner:
            offloader.confirm(prompt, 4, table)
            offloader.plan_stores(0)
    cache.grow(tables[0], 6)
    for table in reversed(tables):
        cache.close(table, 4, table.num_pages)
        offloader.check()
    # The store takes one page a second, with its copies, and the others are free.
    assert (cache.num_used, cache.num_cached) == (num_copies, num_copies * 3)
    taken = cache.take(cache.num_free)
    assert taken is None and cache.num_used == 12
    offloader.advance_to(1 << 60)
    assert cache.num_used == 12 - num_copies
    assert offloader.tiers[0].num_cached_blocks == 1


def leave(cache: PageCache, tokens: Sequence[int], owner: int) -> Content:
    """A prompt that was computed, and whose request is gone."""
    content = content_of(tokens, owner)
    table = cache.open(cache.match(content, len(tokens)))
    cache.grow(table, len(tokens))
    cache.close(table, len(tokens), len(tokens))
    return content


def test_after_a_lazy_store_the_next_pages_taken_lose_nothing() -> None:
    offloader, cache = lazy_offloader(num_pages=12, target_free=5)
    old = leave(cache, range(6), 0)
    young = leave(cache, range(100, 106), 1)
    offloader.plan_stores(0)
    assert cache.num_used == 5, "the transfer holds the pages that it copies, and not the one before them"
    offloader.advance_to(1 << 60)
    assert cache.num_used == 0
    assert offloader.layout.tiers[0].find(old, 1, 6) == 5
    offloader.plan_stores(0)
    assert offloader.next_ns == NEVER_NS, "the target is met"
    cache.take(5)
    assert cache.match(old, 6).num_pages == 1
    assert cache.match(young, 6).num_pages == 6
    assert offloader.layout.tiers[0].find(old, 1, 6) == 5


def test_pages_with_a_copy_below_go_before_pages_without() -> None:
    offloader, cache = lazy_offloader(num_pages=8, target_free=4)
    old = leave(cache, range(4), 0)
    young = leave(cache, range(100, 104), 1)
    offloader.plan_stores(0)
    offloader.advance_to(1 << 60)
    # The old prompt is hit: it is the youngest now, and still has its copy.
    table = cache.open(cache.match(old, 4))
    cache.close(table, 4, 4)
    cache.take(4)
    assert cache.match(old, 4).num_pages == 0
    assert cache.match(young, 4).num_pages == 4


def test_the_lazy_scan_does_not_stall_behind_what_it_cannot_store() -> None:
    offloader, cache = lazy_offloader(num_pages=8, target_free=8)
    private = Content.from_tokens([1], page_size=1, owner=0)
    table = cache.open(cache.match(private, 0))
    cache.grow(table, 4)
    cache.close(table, 4, 4)  # one page of a known token, three of unknown ones
    other = leave(cache, range(100, 104), 1)
    offloader.plan_stores(0)
    offloader.advance_to(1 << 60)
    assert offloader.layout.tiers[0].find(private, 0, 4) == 1
    assert offloader.layout.tiers[0].find(other, 0, 4) == 4


def test_a_store_that_failed_is_not_tried_for_ever() -> None:
    offloader, cache = lazy_offloader(num_pages=4, target_free=4)
    leave(cache, range(4), 0)
    offloader.plan_stores(0)
    offloader.report([TransferReport(0, 0, 0)], 0)
    offloader.plan_stores(0)
    assert offloader.counts.num_failed == 1
    assert not offloader.has_work
    assert cache.num_used == 0


def test_the_lazy_scan_looks_at_no_more_runs_than_its_target() -> None:
    looked_at: list[Node] = []

    class Watched(LruOrder):
        def __iter__(self) -> Iterator[Node]:
            for node in super().__iter__():
                looked_at.append(node)
                yield node

    order = SafeFirst(Watched)
    offloader, cache = lazy_offloader(num_pages=1000, target_free=10, order=order)
    for index in range(500):
        leave(cache, [2 * index, 2 * index + 1], index)
    offloader.plan_stores(0)
    assert 0 < len(looked_at) <= 10
    offloader.advance_to(1 << 60)
    assert offloader.counts.num_stores == 1
    assert order.num_safe == 10


# Loads ----------------------------------------------------------------------------------------------------


def evict_all(engine: Replica, index: int) -> None:
    num_pages = engine.config.num_pages
    run(engine, request_of(index, range(1000 * index, 1000 * index + num_pages)))


def test_device_then_host_then_new() -> None:
    engine, events = make_engine(num_pages=12)
    run(engine, request_of(0, range(8)))
    evict_all(engine, 1)
    run(engine, request_of(2, range(3)))  # two of three come back to the device, one is computed anew
    last = request_of(3, range(10))
    run(engine, last)
    load = [event for event in events if isinstance(event, LoadStarted)][-1]
    admitted = [event for event in events if isinstance(event, Admitted)][-1]
    assert (load.num_hit_pages, load.by_tier) == (3, (("host", 5),))
    assert (admitted.num_hit_pages, admitted.by_tier) == (8, (("host", 5),))
    assert last.cached_tokens == 8
    assert last.cached_tokens_below == (5,)
    chunk = [event for event in events if isinstance(event, ChunkComputed)][-1]
    assert (chunk.start, chunk.end) == (8, 10)


@pytest.mark.parametrize(("full_prompt_hits", "loaded"), [(False, 7), (True, 8)])
def test_the_last_token_is_always_computed(full_prompt_hits: bool, loaded: int) -> None:
    engine, events = make_engine(num_pages=12, full_prompt_hits=full_prompt_hits)
    run(engine, request_of(0, range(8)))
    evict_all(engine, 1)
    run(engine, request_of(2, range(8)))
    load = [event for event in events if isinstance(event, LoadStarted)][-1]
    chunk = [event for event in events if isinstance(event, ChunkComputed)][-1]
    assert load.by_tier == (("host", loaded),)
    assert (chunk.start, chunk.end) == (7, 8)


def test_others_run_while_one_waits_for_its_load() -> None:
    engine, _ = make_engine(num_pages=32, h2d=SLOW)
    run(engine, request_of(0, range(20)))
    evict_all(engine, 1)
    slow, quick = request_of(2, range(21)), request_of(3, [7, 7])
    run(engine, slow, quick)
    assert quick.last_token_ns < slow.first_token_ns
    assert slow.first_token_ns - quick.last_token_ns > 19 * 1000 * NS_PER_MS


def test_a_failed_load_is_a_miss() -> None:
    engine, _ = make_engine(num_pages=12, fail_every=3)
    run(engine, request_of(0, range(8)))
    evict_all(engine, 1)
    request = request_of(2, range(10))
    run(engine, request)
    offloader = offloader_of(engine)
    assert offloader.counts.num_failed == 1
    assert request.num_output_tokens == 1
    assert request.cached_tokens == 0
    assert offloader.layout.tiers[0].find(request.content, 0, 10) == 10, "it was computed and stored anew"


def test_a_request_cancelled_while_it_loads_is_cleaned_up_when_the_load_ends() -> None:
    engine, _ = make_engine(num_pages=12, h2d=SLOW)
    run(engine, request_of(0, range(8)))
    evict_all(engine, 1)
    request = request_of(2, range(10))
    engine.submit(request, engine.now_ns)
    engine.start(engine.now_ns)
    assert engine.is_pausing
    engine.finish()
    engine.cancel(request)
    cache = engine.scheduler.cache
    engine.scheduler.check()
    assert cache.num_used == 10, "a transfer writes to its pages"
    engine.run_until(1 << 60, [])
    assert cache.num_used == 0
    assert not engine.has_work
    assert cache.match(request.content, 10).num_pages == 8, "what arrived is not thrown away"


def test_a_load_writes_to_the_middle_part_only() -> None:
    cache = PageCache(IdPool(16), PrefixTree(LruOrder()))
    offloader = open_offloader(OffloadConfig(host_pages=16), cache, SMALL_STEPS, with_page_ids=True)
    content = leave(cache, range(8), 0)
    offloader.confirm(content, 8, BlockTable(content, [], 0, None))
    offloader.plan_stores(0)
    offloader.report([TransferReport(0)], 0)
    offloader.take_planned()
    cache.pool.give(5, cache.tree.evict(5))  # the device keeps the first three
    table = cache.open(cache.match(content, 8))
    cache.grow(table, 10)
    assert table.page_ids is not None
    offer = offloader.lookup(7, content, 3, 8)
    assert offer is not None
    assert offer.num_pages == 5
    offloader.start_load(7, content, 3, 4, table)  # fewer than were offered
    (transfer,) = offloader.take_planned()
    assert transfer.moves[0].target_ids == tuple(table.page_ids[3:7])
    assert len(transfer.moves[0].source_ids) == 4


# Transfers ------------------------------------------------------------------------------------------------


def test_a_transfer_is_complete_when_all_workers_have_reported() -> None:
    cache = PageCache(IdPool(8), PrefixTree(LruOrder()))
    offloader = open_offloader(OffloadConfig(host_pages=8, workers=2), cache, SMALL_STEPS, with_page_ids=True)
    content = leave(cache, range(4), 0)
    offloader.confirm(content, 4, BlockTable(content, [], 0, None))
    offloader.plan_stores(0)
    (transfer,) = offloader.take_planned()
    assert transfer.num_pages == 4
    offloader.report([TransferReport(0, 1)], 0)
    offloader.report([TransferReport(0, 1)], 0)
    assert offloader.layout.tiers[0].find(content, 0, 4) == 0
    assert cache.num_used == 4
    offloader.report([TransferReport(0, 0), TransferReport(77, 0)], 0)
    assert offloader.layout.tiers[0].find(content, 0, 4) == 4
    assert cache.num_used == 0
    offloader.report([TransferReport(0, 0)], 0)
    assert offloader.counts.num_stray_reports == 3


def test_what_is_stored_is_told_with_its_tier() -> None:
    engine, events = make_engine(disk_pages=64)
    run(engine, request_of(0, range(4)))
    stored = [(event.medium, event.start_page, event.end_page) for event in events if isinstance(event, PagesStored)]
    assert stored == [("device", 0, 4), ("host", 0, 4), ("disk", 0, 4)]


def test_a_prompt_goes_through_a_host_tier_that_is_smaller_in_pieces() -> None:
    engine, _ = make_engine(host_pages=4, disk_pages=64)
    content = content_of(range(20))
    run(engine, request_of(0, range(20)))
    host, disk = offloader_of(engine).layout.tiers
    assert disk.find(content, 0, 20) == 20
    assert host.num_used_blocks == 0
    run(engine, request_of(1, range(100, 132)))
    prompt = request_of(2, range(21))
    run(engine, prompt)
    assert prompt.cached_tokens_below == (0, 20)


def test_lazily_too_and_goes_on_while_nothing_runs() -> None:
    engine, _ = make_engine(policy="lazy", host_pages=4, disk_pages=64, target_free=32)
    content = content_of(range(20))
    run(engine, request_of(0, range(20)))
    run(engine, request_of(1, range(100, 101)))
    host, disk = offloader_of(engine).layout.tiers
    assert disk.find(content, 0, 20) == 20
    assert host.num_used_blocks == 0


# Pages that stores give back ------------------------------------------------------------------------------


def test_a_store_gives_its_idle_pages_back_and_its_channel_is_free() -> None:
    offloader, cache = lazy_offloader(num_pages=8, target_free=8)
    content = leave(cache, range(8), 0)
    offloader.plan_stores(0)
    assert (cache.num_free, cache.lender.num_lent()) == (0, 8)
    cache.lender.return_lent(1)
    assert (cache.num_free, cache.lender.num_lent()) == (8, 0)
    assert (offloader.counts.num_given_up, offloader.counts.num_failed) == (1, 1)
    assert offloader.channels[0].wait_ns(0) == 0
    assert offloader.next_ns == NEVER_NS
    assert cache.match(content, 8).num_pages == 8, "they are cached, as before"
    offloader.plan_stores(0)
    assert cache.lender.num_lent() == 8, "it is not given up for ever"
    offloader.advance_to(1 << 60)
    assert offloader.layout.tiers[0].find(content, 0, 8) == 8


def test_a_store_that_was_given_up_may_be_reported_later() -> None:
    cache = PageCache(IdPool(8), PrefixTree(LruOrder()))
    config = OffloadConfig(host_pages=64, kv_bytes_per_token=1000, workers=2)
    offloader = open_offloader(config, cache, SMALL_STEPS, with_page_ids=True)
    content = content_of(range(4))
    table = cache.open(cache.match(content, 4))
    cache.grow(table, 4)
    cache.publish(table, 4)
    offloader.confirm(content, 4, table)
    offloader.plan_stores(0)
    assert cache.lender.num_lent() == 0, "a request holds them as well"
    cache.close(table, 4, 4)
    assert cache.lender.num_lent() == 4
    cache.lender.return_lent(4)
    offloader.report([TransferReport(0, 0), TransferReport(0, 1)], 5)
    assert offloader.counts.num_stray_reports == 0
    assert offloader.layout.tiers[0].find(content, 0, 4) == 0
    offloader.report([TransferReport(0, 1)], 5)
    assert offloader.counts.num_stray_reports == 1


def test_requests_are_not_preempted_for_copies() -> None:
    """One page of the device is copied in a second; a step takes a millisecond."""
    engine, _ = make_engine(num_pages=10, d2h=SLOW)
    first = request_of(0, range(8))
    run(engine, first)
    second = request_of(1, range(100, 108))
    engine.submit(second, engine.now_ns)
    began_ns = engine.now_ns
    engine.run_until(1 << 60, [])
    assert second.first_token_ns - began_ns < 10 * NS_PER_MS


def test_a_channel_takes_one_transfer_after_the_other() -> None:
    channel = Channel("d2h", latency_us=1.0, bytes_per_s=3_000_000_000)
    assert channel.submit(100, 10) == 100 + 1000 + 4
    assert channel.submit(0, 3) == 1104 + 1000 + 1
    assert channel.submit(10_000, 0) == 11_000
    assert (channel.num_bytes, channel.num_transfers) == (13, 3)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("host_pages", -1, "at least 0"),
        ("h2d", "fast", "is not a bandwidth"),
        ("d2h", 0, "at least one byte"),
        ("policy", "never", "'eager', 'lazy' or 'exclusive'"),
        ("target_free", -1, "at least 0"),
        ("latency_us", -1.0, "at least 0"),
        ("workers", 0, "at least 1"),
        ("host_memory", "4GiB", "beside"),
        ("host_memory", "4 things", "is not a size"),
    ],
)
def test_a_bad_setting_is_named(field: str, value: object, says: str) -> None:
    given = {"host_pages": 4, field: value}
    if says == "is not a size":
        del given["host_pages"]
    with pytest.raises(ConfigError, match=says) as caught:
        OffloadConfig(**given)  # type: ignore[arg-type]
    assert caught.value.field in (field, "host_pages")


def test_files_need_host_memory() -> None:
    with pytest.raises(ConfigError, match="host memory"):
        OffloadConfig(disk_pages=4)


class LargestFirst(LruOrder):
    """Looks at runs: how pages are divided into them decides what is evicted."""

    def next_run(self) -> Node:
        free = [node for node in self if not node.holds and not node.children]
        return max(free, key=lambda node: node.end - node.start) if free else super().next_run()


def test_an_order_that_looks_at_runs_evicts_the_same_whether_or_not_anyone_reads_the_events() -> None:
    """Its stores hold what they read, though it is derived from an order that sees only pages."""
    rng = Random(1)
    prompts: list[list[int]] = []
    rows: list[TraceRequest] = []
    time_ms, unused = 0, 1000
    for row in range(60):
        units = list(rng.choice(prompts)[: rng.randrange(2, 30)]) if prompts and rng.random() < 0.6 else []
        num_new = rng.randrange(1, 20)
        units += range(unused, unused + num_new)
        unused += num_new
        time_ms += rng.choice([1, 20, 90])
        prompts.append(units)
        packed = array("Q", units).tobytes()
        rows.append(TraceRequest(row, time_ms * 1_000_000, packed, 16 * len(units), rng.randrange(1, 60)))
    num_pages = max(map(len, prompts)) + 30
    config = ReplayConfig(
        page_size=16,
        num_pages=num_pages,
        max_num_seqs=4,
        eviction=LargestFirst,
        offload=OffloadConfig(host_pages=2 * num_pages, policy="eager", kv_bytes_per_token=163_840, d2h=100_000_000),
    )
    trace = Trace(rows, unit_tokens=16)

    kept = Kept()
    alone = replay(trace, config)
    watched = replay(trace, config, observers_of=lambda _: [kept])
    assert any(isinstance(event, PagesRemoved) for event in kept.events)
    assert alone.requests_jsonl() == watched.requests_jsonl()

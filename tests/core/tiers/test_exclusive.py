"""`--offload exclusive`: device and host memory hold different pages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvarts.core.content import Content
from kvarts.core.kv.groups import GroupMemory, PartGroup
from kvarts.core.kv.run_cache import RunCache
from kvarts.core.kv.runs import table_of_transfer
from kvarts.core.tiers.config import OffloadConfig
from kvarts.core.tiers.page_layout import next_evictions
from kvarts.core.tiers.part_tier import PartTier
from kvarts.core.tiers.tier import MemoryTier
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.traffic.workload import FixedLength, Workload

from builders.grouped import FULL, STATES, WINDOW

PAGES = 400
SESSIONS = Workload(
    num_sessions=16,
    turns_per_session=8,
    new_tokens=FixedLength(300),
    output_tokens=FixedLength(20),
    prefix_tokens=320,
    sessions_per_s=4.0,
    think_time_s=4.0,
)

FEW = msgspec.structs.replace(SESSIONS, num_sessions=8, turns_per_session=5)


def summary_of(policy: Any, host_pages: int, *, disk_pages: int | None = None, **changes: Any) -> dict[str, Any]:
    """Return the report of a replay of `SESSIONS`."""
    sizes: dict[str, Any] = {"host_pages": host_pages, "disk_pages": disk_pages}
    offload = OffloadConfig(policy=policy, kv_bytes_per_token=1000, target_free=60, **sizes)
    config = ReplayConfig(num_pages=PAGES, page_size=16, max_num_batched_tokens=512, offload=offload, **changes)
    summary: dict[str, Any] = replay(SESSIONS.trace(), config).summary
    return summary


def hits(policy: str, host_pages: int, **changes: Any) -> float:
    """Return the share of prompt tokens found on the device and below it."""
    return float(sum(summary_of(policy, host_pages, **changes)["prefix_hit_ratio_by_tier"].values()))


@pytest.mark.parametrize("host_pages", [PAGES // 2, PAGES, 2 * PAGES])
def test_it_finds_more_than_copies_of_the_device_do(host_pages: int) -> None:
    eager, lazy, exclusive = (hits(policy, host_pages) for policy in ("eager", "lazy", "exclusive"))
    assert eager < lazy < exclusive


def test_with_room_for_everything_it_finds_no_less_than_copies_of_all() -> None:
    """What a load evicts is stored while it runs, however small the target: `lazy` loses it."""
    assert hits("lazy", 100_000) + 0.1 < hits("exclusive", 100_000)
    assert hits("exclusive", 100_000) > hits("eager", 100_000) - 0.001


@pytest.mark.parametrize("with_slots", [False, True])
def test_pages_that_leave_below_others_are_a_hole(with_slots: bool) -> None:
    tier = MemoryTier("host", 4, with_slots=with_slots)
    content = Content.from_tokens([1, 2, 3, 4], page_size=1, owner=0)
    store = tier.prepare_store(content, 0, 4)
    assert store is not None
    tier.complete_store(store)
    tier.move_out(content, 1, 3)
    assert tier.held(content, 0, 4) == [(0, 1), (3, 4)]
    assert tier.num_empty_blocks == 2
    tier.check(lambda _, num_pages: True)
    again = tier.prepare_store(content, 0, 4)
    assert again is not None and [(each.start, each.end) for each in again.segments] == [(1, 3)]


def test_pinned_pages_stay() -> None:
    tier = MemoryTier("host", 4)
    content = Content.from_tokens([1, 2, 3], page_size=1, owner=0)
    store = tier.prepare_store(content, 0, 3)
    assert store is not None
    tier.complete_store(store)
    assert tier.lookup(7, content, 0, 2) == 2
    tier.move_out(content, 0, 3)
    assert tier.held(content, 0, 3) == [(0, 2)]


def test_what_was_spilled_is_spilled_again_once_it_was_used() -> None:
    """Otherwise pages for which files have no room would replace each other there for ever."""
    host, files = MemoryTier("host", 4), MemoryTier("disk", 4)
    content = Content.from_tokens([1, 2, 3], page_size=1, owner=0)
    store = host.prepare_store(content, 0, 3)
    assert store is not None
    host.complete_store(store)
    assert next_evictions(host, files, 3) == [(content, 0, 3)]
    host.note_spilled(content, 1, 3)
    assert next_evictions(host, files, 3) == [(content, 0, 1)]
    assert host.lookup(7, content, 0, 3) == 3
    host.complete_load(host.prepare_load(7))
    assert next_evictions(host, files, 3) == [(content, 0, 3)]


def test_files_get_what_host_memory_evicts_and_no_more() -> None:
    """With files, each of three memories has other pages: more is found, and less is written, than by `lazy`."""
    lazy, exclusive = (summary_of(policy, PAGES // 2, disk_pages=PAGES) for policy in ("lazy", "exclusive"))
    found = [sum(summary["prefix_hit_ratio_by_tier"].values()) for summary in (lazy, exclusive)]
    written = [summary["transfers"]["bytes"]["disk_write"] for summary in (lazy, exclusive)]
    assert found[0] + 0.01 < found[1]
    assert written[1] < written[0]


@pytest.mark.parametrize("part_bytes", [1, 50_000])
def test_files_get_the_parts_that_host_memory_evicts(part_bytes: int) -> None:
    """Whatever a part has in bytes: memory is counted in parts on the device, and in bytes below it."""
    groups = {"kv_groups": "all", "groups": (PartGroup(FULL, part_bytes), PartGroup(WINDOW.layer, part_bytes))}
    lazy, exclusive = (
        summary_of(policy, PAGES // 2, disk_pages=PAGES, **groups)["prefix_hit_ratio_by_tier"]
        for policy in ("lazy", "exclusive")
    )
    assert exclusive["disk"] > 0.05
    assert sum(exclusive.values()) > sum(lazy.values()) - 0.01


def test_files_keep_the_parts_that_the_device_has_again() -> None:
    """A small host memory would evict them again faster than the channel to files carries them."""
    groups = (PartGroup(FULL, 1000), WINDOW)
    found = []
    for policy in ("lazy", "exclusive"):
        below: Any = {"host_pages": PAGES // 4, "disk_pages": 2 * PAGES, "disk_write": "1MB/s"}
        offload = OffloadConfig(policy=policy, kv_bytes_per_token=1000, **below)
        config = ReplayConfig(
            num_pages=PAGES, page_size=16, max_num_batched_tokens=512, offload=offload, groups=groups, kv_groups="all"
        )
        found.append(sum(replay(SESSIONS.trace(), config).summary["prefix_hit_ratio_by_tier"].values()))
    assert found[1] > found[0] - 0.005


def test_files_stay_empty_while_host_memory_has_room() -> None:
    summary = summary_of("exclusive", 100_000, disk_pages=PAGES)
    assert summary["transfers"]["bytes"]["d2h"] and not summary["transfers"]["bytes"]["disk_write"]


def test_spills_are_the_next_evictions() -> None:
    """Deepest pages first, no more than the target, and none that files have or are getting."""
    host, disk = MemoryTier("host", 8), MemoryTier("disk", 8)
    long = Content.from_tokens([1, 2, 3, 4], page_size=1, owner=0)
    other = Content.from_tokens([1, 5], page_size=1, owner=1)
    for content in (long, other):
        store = host.prepare_store(content, 0, content.num_known_pages)
        assert store is not None
        host.complete_store(store)
    # Host memory would evict 4, 3, 2, then 5, then 1, which was used last.
    spilled = disk.prepare_store(long, 2, 3)
    assert next_evictions(host, disk, 2) == [(long, 3, 4)]
    assert next_evictions(host, disk, 4) == [(long, 3, 4), (long, 1, 2), (other, 1, 2)]
    assert spilled is not None
    disk.complete_store(spilled, is_stored=False)
    assert next_evictions(host, disk, 3) == [(long, 1, 4)]
    assert next_evictions(host, disk, 0) == []


@pytest.mark.parametrize("groups", [(PartGroup(FULL, 1),), (PartGroup(FULL, 1), WINDOW), STATES], ids=len)
def test_with_kv_groups_it_finds_more_as_well(groups: tuple[PartGroup, ...]) -> None:
    """Only groups that keep all tokens move: a window's parts and states serve from host memory as often as asked."""
    lazy, exclusive = (hits(policy, PAGES, groups=groups, kv_groups="all") for policy in ("lazy", "exclusive"))
    assert lazy + 0.01 < exclusive


def test_of_kv_groups_those_that_keep_all_tokens_are_evicted_first_but_for_pinned_parts() -> None:
    """Those that the device has again, the last to come before the others, until it will lose them."""
    memory = GroupMemory((PartGroup(FULL, 1), WINDOW), "all")
    cache = RunCache(memory, page_size=1, total_bytes=60, num_below=1)
    tier = PartTier("host", 24, memory, cache.tree)
    content = Content.from_tokens(range(8), page_size=1, owner=0)
    table = cache.begin(content, cache.match(content, 0))
    cache.extend(table, 8, is_end=True)
    cache.close(table, 8)
    spans, _ = cache.tree.walk(content, 8)
    pin = table_of_transfer(2)
    for group, start in ((0, 0), (1, 2)):
        tier.place(spans[-1], group, start, 8, pin)
    tier.settle(pin, is_stored=True)

    def order() -> list[tuple[int, int, int]]:
        return [(run.group, run.start, run.end) for run in tier.listed()]

    assert order() == [(1, 2, 8), (0, 0, 8)]
    load = tier.pin([tier.stored(spans[-1], 0, 0, 3), []])
    for group, start, end in ((0, 0, 5), (1, 0, 6), (0, 6, 8)):
        tier.evict_first(content, group, start, end)
    assert order() == [(0, 6, 8), (0, 3, 5), (1, 2, 8), (0, 5, 6)]
    tier.check([load])
    tier.unpin(load)
    tier.evict_last(spans[-1], 0, 3, 5)
    assert order() == [(0, 6, 8), (1, 2, 8), (0, 5, 6), (0, 0, 5)]
    tier.check([])


@pytest.mark.parametrize("model", ["deepseek-v3", "gemma-3-27b"])
@pytest.mark.parametrize("policy", ["eager", "lazy", "exclusive"])
def test_tiers_are_read_with_multi_token_prediction(policy: str, model: str) -> None:
    """A tier that is only written would find nothing, and a draft that reached into a match would shorten it."""
    found = []
    for drafts in ({}, {"speculative_tokens": 3, "acceptance": "0.8,0.6,0.4"}):
        sizes = {"pages": PAGES // 2, "host_pages": PAGES, **drafts}
        config = ReplayConfig.of_options(model=model, device="b200", tensor_parallel=8, offload=policy, **sizes)
        by_tier = replay(FEW.trace(), config).summary["num_cached_tokens_by_tier"]
        assert by_tier["host"] > 0
        found.append(sum(by_tier.values()))
    assert found[1] > 0.9 * found[0]


def test_a_model_with_kv_groups_has_it(
    run_command: Callable[..., int], capsys: pytest.CaptureFixture[Any], tmp_path: Path
) -> None:
    trace, options = tmp_path / "trace.jsonl", ("--model", "gpt-oss-20b", "--device", "h100-80gb")
    trace.write_text('{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [7, 8]}\n')
    assert run_command("replay", trace, *options, "--host-pages", 9, "--offload", "exclusive", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["config"]["offload"]["policy"] == "exclusive"
    assert len(report["kv_groups"]) == 2

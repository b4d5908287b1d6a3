"""What an engine with KV groups finds in the host memory of others, against a model part by part."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.core.content import Content
from kvarts.core.kv.groups import GroupMemory, PartGroup
from kvarts.core.kv.run_cache import RunCache
from kvarts.core.tiers.links import FixedRate, PeerLinks
from kvarts.core.tiers.part_tier import PartTier
from kvarts.core.tiers.peer_parts import PeerParts, PeerPartsView

from builders.tiered_machine import part_groups, prompts
from builders.tiers import store_parts
from oracles.naive_group_tier import NaiveBelow, NaiveTier, NaiveTieredGroups

pytestmark = pytest.mark.laws

NUM_ENGINES = 3


@given(
    first=part_groups(("full", "full", "window", "latent", "chunk")),
    others=st.lists(part_groups(("full", "window", "window", "chunk", "state")), max_size=2),
    page_size=st.integers(1, 2),
    parts=st.lists(
        st.tuples(
            st.integers(0, NUM_ENGINES - 1), prompts(), st.integers(0, 2), st.integers(0, 12), st.integers(1, 14)
        ),
        max_size=16,
    ),
    cut=st.frozensets(st.integers(1, NUM_ENGINES - 1), max_size=1),
    wanted=prompts(),
)
def test_the_engine_is_read_with_whose_parts_a_match_is_the_longest(
    first: PartGroup,
    others: list[PartGroup],
    page_size: int,
    parts: list[tuple[int, list[int], int, int, int]],
    cut: frozenset[int],
    wanted: list[int],
) -> None:
    """Any parts of any sequences are in the host memory of the engines; the first one looks, and loads what it finds.

    Of each engine, what is found is pinned there, and nothing else, until the load ends.
    """
    memory = GroupMemory((first, *others))
    sizes = [group.part_bytes for group in memory.groups]
    caches = [RunCache(memory, page_size=page_size, total_bytes=100, num_below=1) for _ in range(NUM_ENGINES)]
    hosts = [PartTier("host", 1000, memory, cache.tree) for cache in caches]
    links = PeerLinks(FixedRate(1e9, 0))
    links.cut.update(cut)
    peers = PeerParts(1, links, latency_ms=0.0, bytes_per_s=1.0)
    for number, host in enumerate(hosts):
        peers.connect(number, host)
    view = peers.open_view(0, memory, page_size, None)
    naive = [
        NaiveTieredGroups(
            [(group.layer, group.part_bytes) for group in memory.groups], page_size, 100, keeps_all=True,
            below=[NaiveTier(10**6, sizes), NaiveTier(10**6, sizes)],
        )
        for _ in range(NUM_ENGINES)
    ]  # fmt: skip
    """For each engine, the first one with that below it."""
    for owner, (engine, tokens, number, first_page, length) in enumerate(parts):
        group = number % len(memory.groups)
        content = Content.from_tokens(tokens, page_size=page_size, owner=owner)
        end = min(first_page + length, len(tokens) // page_size)
        if first_page >= end:
            continue
        start = end - 1 if memory.groups[group].is_state else first_page
        store_parts(hosts[engine], caches[engine].tree, content, group, start, end)
        for page in range(start, end):
            key = group, naive[0].name(tokens, None, page)
            if engine == 0:
                for each in naive:
                    each.below[0].here[key] = NaiveBelow(key)
            else:
                naive[engine].below[1].here[key] = NaiveBelow(key)

    limit = len(wanted) // page_size
    content = Content.from_tokens(wanted, page_size=page_size, owner=100)
    match = view.match(caches[0].tree, content, limit, 1)
    alone = naive[0].hit_below(wanted, None, limit, 1)
    lengths = {number: naive[number].hit_below(wanted, None, limit, 2) for number in (1, 2) if number not in cut}
    most = max([alone, *lengths.values()])
    assert match.num_pages == most
    asked = next((number for number, length in lengths.items() if length == most > alone), -1)
    reads = peers.reads_of(0)
    assert reads.asked == asked

    assert match.pieces is not None
    pins = hosts[0].pin(match.pieces), view.pin(match.pieces)
    oracle = naive[max(asked, 0)]
    needs = oracle.needs(wanted, None, most)
    for pin, is_here in zip(pins, (True, False), strict=True):
        held = [
            (group, page)
            for group, runs in enumerate(pin.held)
            for run in runs
            for page in range(run.start, run.end)
        ]  # fmt: skip
        assert held == [
            (key[0], oracle.page_of(key)) for key in needs if (key in oracle.below[0].here) is is_here
        ]  # fmt: skip
    assert view.num_used_blocks == sum(
        memory.groups[key[0]].part_bytes // memory.block_bytes for key in needs if key not in oracle.below[0].here
    )
    check(hosts, view, *pins)

    if any(pins[1].held):
        view.begin_load(pins[1])
        assert reads.unsent == [asked]
        view.drop(pins[1], [1 << 62] * len(memory.groups))
        assert reads.loaded_from == {asked: view.num_used_blocks}
    hosts[0].end_load(pins[0], content, most)
    view.end_load(pins[1], content, most)
    assert not any(host.used_bytes for host in hosts) and not view.used_bytes
    check(hosts, view)


def check(hosts: list[PartTier], view: PeerPartsView, *pins: object) -> None:
    """L1 and L2 of every engine; `pins`: those of the first engine, in its own host memory and elsewhere."""
    for number, host in enumerate(hosts):
        host.check([pins[0]] if pins and number == 0 else [])  # type: ignore[list-item]
    view.check([pins[1]] if pins else [])  # type: ignore[list-item]

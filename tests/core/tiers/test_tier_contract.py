"""What every tier below the device promises. A new tier is one more line in TIERS."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvarts.core.content import Content
from kvarts.core.kv.groups import GroupMemory, PartGroup
from kvarts.core.kv.layers import KvLayer
from kvarts.core.kv.run_cache import RunCache
from kvarts.core.tiers.filetier import FileTier
from kvarts.core.tiers.part_files import PartFiles
from kvarts.core.tiers.tier import MemoryTier

TIERS: dict[str, Callable[[int], MemoryTier]] = {
    "memory, counted": lambda num_pages: MemoryTier("host", num_pages),
    "memory, with slots": lambda num_pages: MemoryTier("host", num_pages, with_slots=True),
    "files": lambda num_pages: FileTier("disk", num_pages),
    "files, others known": lambda num_pages: FileTier("disk", num_pages, known_keys=[b"%32d" % i for i in range(99)]),
}


@pytest.fixture(params=list(TIERS.values()), ids=list(TIERS))
def make(request: pytest.FixtureRequest) -> Callable[[int], MemoryTier]:
    factory: Callable[[int], MemoryTier] = request.param
    return factory


def content_of(tokens: range | list[int], owner: int = 0) -> Content:
    return Content.from_tokens(tokens, page_size=1, owner=owner)


def stored(tier: MemoryTier, content: Content, end: int, start: int = 0) -> None:
    store = tier.prepare_store(content, start, end)
    assert store is not None
    tier.complete_store(store)


def test_nothing_is_findable_before_its_store_is_complete(make: Callable[[int], MemoryTier]) -> None:
    tier, content = make(8), content_of(range(6))
    store = tier.prepare_store(content, 0, 4)
    assert store is not None
    assert store.num_pages == 4
    assert tier.find(content, 0, 6) == 0
    assert tier.num_used_blocks == 4
    tier.complete_store(store)
    assert tier.find(content, 0, 6) == 4
    assert tier.num_used_blocks == 0


def test_what_is_stored_or_coming_is_not_stored_again(make: Callable[[int], MemoryTier]) -> None:
    tier, content = make(8), content_of(range(6))
    first = tier.prepare_store(content, 0, 3)
    assert first is not None
    second = tier.prepare_store(content, 0, 5)
    assert second is not None
    assert [(segment.start, segment.end) for segment in second.segments] == [(3, 5)]
    assert tier.prepare_store(content, 1, 5) is None
    tier.complete_store(first)
    tier.complete_store(second)
    assert tier.prepare_store(content, 0, 5) is None


def test_a_failed_store_leaves_nothing(make: Callable[[int], MemoryTier]) -> None:
    tier, content = make(4), content_of(range(6))
    store = tier.prepare_store(content, 0, 4)
    assert store is not None
    tier.complete_store(store, is_stored=False)
    assert tier.find(content, 0, 6) == 0
    assert tier.num_used_blocks == tier.num_cached_blocks == 0 or tier.num_used_blocks == 0
    stored(tier, content, 4)
    assert tier.find(content, 0, 6) == 4


def test_a_lookup_is_contiguous_after_the_device_hit_and_keeps_within_its_limit(
    make: Callable[[int], MemoryTier],
) -> None:
    tier, content = make(8), content_of(range(8))
    stored(tier, content, 6)
    assert tier.lookup(1, content, 2, 8) == 4
    assert tier.lookup(1, content, 2, 5) == 3
    assert tier.lookup(1, content, 6, 8) == 0
    assert tier.lookup(1, content_of([0, 1, 9, 3], 1), 1, 4) == 1
    assert tier.lookup(1, content_of([9, 1, 2, 3], 2), 1, 4) == 0


def test_a_repeated_lookup_piles_up_no_pins(make: Callable[[int], MemoryTier]) -> None:
    tier, content = make(8), content_of(range(6))
    stored(tier, content, 6)
    for _ in range(5):
        tier.lookup(1, content, 0, 6)
    assert tier.num_used_blocks == 6
    tier.forget(1)
    tier.forget(1)
    assert tier.num_used_blocks == 0


def test_a_lookup_disturbs_nobody_elses_order(make: Callable[[int], MemoryTier]) -> None:
    tier = make(4)
    old, young = content_of([1, 2], 1), content_of([3, 4], 2)
    stored(tier, old, 2)
    stored(tier, young, 2)
    tier.lookup(1, old, 0, 2)
    tier.forget(1)
    stored(tier, content_of([5, 6], 3), 2)
    assert tier.find(old, 0, 2) == 0, "it was looked at, and not used"
    assert tier.find(young, 0, 2) == 2


def test_a_hit_makes_its_pages_most_recent(make: Callable[[int], MemoryTier]) -> None:
    tier = make(4)
    old, young = content_of([1, 2], 1), content_of([3, 4], 2)
    stored(tier, old, 2)
    stored(tier, young, 2)
    tier.lookup(1, old, 0, 2)
    tier.complete_load(tier.prepare_load(1))
    stored(tier, content_of([5, 6], 3), 2)
    assert tier.find(old, 0, 2) == 2
    assert tier.find(young, 0, 2) == 0


def test_what_remains_of_an_evicted_prompt_is_a_usable_prefix(make: Callable[[int], MemoryTier]) -> None:
    tier, content = make(64), content_of(range(64))
    stored(tier, content, 64)
    stored(tier, content_of(range(100, 128), 1), 28)
    assert tier.find(content, 0, 64) == 36
    assert tier.num_evicted_blocks == 28


def test_what_is_pinned_stays(make: Callable[[int], MemoryTier]) -> None:
    tier, content = make(4), content_of(range(4))
    stored(tier, content, 4)
    tier.lookup(1, content, 0, 3)
    other = content_of(range(10, 14), 1)
    store = tier.prepare_store(other, 0, 4)
    assert store is not None
    assert store.num_pages == 1, "three pages are pinned"
    tier.complete_store(store)
    assert tier.find(content, 0, 4) == 3


def test_a_tier_too_small_for_a_request_degrades_to_a_miss(make: Callable[[int], MemoryTier]) -> None:
    tier, content = make(2), content_of(range(8))
    stored(tier, content, 8)
    assert tier.find(content, 0, 8) == 2
    assert tier.find(content, 4, 8) == 0
    tier.lookup(1, content, 0, 8)
    assert tier.prepare_store(content_of([9], 1), 0, 1) is None


def test_fewer_pages_may_be_taken_than_were_offered(make: Callable[[int], MemoryTier]) -> None:
    tier, content = make(8), content_of(range(8))
    stored(tier, content, 8)
    assert tier.lookup(1, content, 2, 8) == 6
    load = tier.prepare_load(1, 3)
    assert (load.start, load.end) == (2, 5)
    assert tier.num_used_blocks == 5, "and what is before it"
    tier.complete_load(load)
    assert tier.num_used_blocks == 0


def test_broken_pages_leave_the_index(make: Callable[[int], MemoryTier]) -> None:
    tier, content = make(8), content_of(range(8))
    stored(tier, content, 8)
    tier.lookup(1, content, 2, 7)
    tier.complete_load(tier.prepare_load(1), 2)
    assert tier.find(content, 0, 8) == 4
    assert tier.num_used_blocks == 0


def test_a_reset_with_transfers_under_way_registers_nothing(make: Callable[[int], MemoryTier]) -> None:
    tier, content, coming = make(8), content_of(range(4)), content_of(range(10, 14), 1)
    stored(tier, content, 4)
    tier.lookup(1, content, 0, 4)
    load = tier.prepare_load(1)
    store = tier.prepare_store(coming, 0, 4)
    assert store is not None
    tier.reset()
    assert tier.find(content, 0, 4) == 0
    assert tier.num_used_blocks == 8, "what is in flight stays pinned"
    tier.complete_store(store)
    tier.complete_load(load)
    assert tier.find(coming, 0, 4) == 0
    assert tier.num_used_blocks == tier.num_cached_blocks == 0
    stored(tier, content, 4)
    assert tier.find(content, 0, 4) == 4


def test_what_follows_a_page_that_is_nowhere_is_forgotten(make: Callable[[int], MemoryTier]) -> None:
    """L3: the device had pages 0 and 1, and evicts them."""
    tier, content = make(8), content_of(range(4))
    stored(tier, content, 4, start=2)
    assert tier.find(content, 2, 4) == 2
    tier.lose(content, 0, 2)
    assert tier.find(content, 2, 4) == 0
    assert tier.num_used_blocks == 0


def test_tenants_share_nothing(make: Callable[[int], MemoryTier]) -> None:
    """L9."""
    tier = make(8)
    mine = Content.from_tokens([1, 2], page_size=1, owner=1, salt="me")
    stored(tier, mine, 2)
    assert tier.find(Content.from_tokens([1, 2], page_size=1, owner=2, salt="you"), 0, 2) == 0
    assert tier.find(Content.from_tokens([1, 2], page_size=1, owner=3), 0, 2) == 0


def test_only_its_request_finds_pages_of_unknown_tokens(make: Callable[[int], MemoryTier]) -> None:
    """Memory may keep them until the request ends; a file would outlive it."""
    tier, content = make(8), content_of(range(3))
    store = tier.prepare_store(content, 0, 6)
    assert store is not None
    tier.complete_store(store)
    num_kept = 3 if isinstance(tier, FileTier) else 6
    assert [(segment.start, segment.end) for segment in store.segments] == [(0, num_kept)]
    assert tier.find(content, 0, 6) == num_kept
    assert tier.find(Content.from_tokens(range(3), page_size=1, owner=2), 0, 6) == 3
    tier.drop(content, 3)
    assert tier.find(content, 0, 6) == 3


def test_files_of_transfers_under_way_stay_until_they_are_reported() -> None:
    """A reset forgets all pages at once, and their files may go no sooner than the transfers end."""
    tier, content = FileTier("disk", 8), content_of(range(8))
    stored(tier, content, 4)
    assert tier.lookup(1, content, 0, 4) == 4
    load, store = tier.prepare_load(1), tier.prepare_store(content, 4, 8)
    assert store is not None
    tier.reset()
    assert tier.take_dropped() == ()
    tier.complete_load(load)
    assert sorted(tier.take_dropped()) == sorted(tier.key(content, page) for page in range(4))
    tier.complete_store(store)
    assert sorted(tier.take_dropped()) == sorted(tier.key(content, page) for page in range(4, 8))
    assert (tier.num_used_blocks, tier.num_cached_blocks) == (0, 0)


def test_a_file_that_is_written_again_outlives_the_store_that_was_given_up() -> None:
    """A reset forgets a page on its way, which another store then brings; the end of the first deletes nothing."""
    tier, content = FileTier("disk", 8), content_of(range(4))
    first = tier.prepare_store(content, 0, 4)
    assert first is not None
    tier.reset()
    second = tier.prepare_store(content, 0, 4)
    assert second is not None
    tier.complete_store(second)
    tier.complete_store(first, is_stored=False)
    assert tier.take_dropped() == ()
    assert tier.find(content, 0, 4) == 4
    tier.drop(content, 0)
    assert sorted(tier.take_dropped()) == sorted(tier.key(content, page) for page in range(4))


def test_files_of_pages_that_arrived_stay_if_later_ones_were_dropped_on_their_way() -> None:
    tier, content = FileTier("disk", 8), content_of(range(4))
    store = tier.prepare_store(content, 0, 4)
    assert store is not None
    tier.drop(content, 2)
    tier.complete_store(store)
    assert tier.find(content, 0, 4) == 2
    assert sorted(tier.take_dropped()) == sorted(tier.key(content, page) for page in range(2, 4))


def test_files_of_other_things_are_dropped() -> None:
    """Tiers of pages have no use for parts, nor those of parts for pages; each takes what is named as it names it."""
    names = [b"%32d" % index for index in range(3)] + [b"%32d\0\0" % index for index in range(3)] + [b"?"]
    pages = FileTier("disk", 8, known_keys=names)
    assert (sorted(pages.take_dropped()), pages.num_cached_blocks) == (sorted(names[3:]), 3)
    memory = GroupMemory((PartGroup(KvLayer(kind="full", num_heads=1, head_numbers=2), 1),))
    cache = RunCache(memory, page_size=1, total_bytes=8, num_below=1)
    parts = PartFiles("disk", 8, memory, cache.tree, place=0, known_keys=names)
    assert sorted(parts.take_dropped()) == sorted([*names[:3], b"?"])
    assert parts.num_cached_blocks == 3
    for tier in (pages, parts):
        tier.reset()
    assert (sorted(pages.take_dropped()), sorted(parts.take_dropped())) == (names[:3], names[3:6])

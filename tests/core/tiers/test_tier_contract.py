"""The contract of tiers, L9 included, on every tier of pages below the device, and the further promises of files."""

from __future__ import annotations

from kvarts.core.kv.groups import GroupMemory, PartGroup
from kvarts.core.kv.layers import KvLayer
from kvarts.core.kv.run_cache import RunCache
from kvarts.core.tiers.filetier import FileTier
from kvarts.core.tiers.part_files import PartFiles
from kvarts.core.tiers.tier import MemoryTier
from kvarts.testing import TierContract, content_of, stored


class TestMemoryCounted(TierContract):
    def make(self, num_pages: int) -> MemoryTier:
        return MemoryTier("host", num_pages)


class TestMemoryWithSlots(TierContract):
    def make(self, num_pages: int) -> MemoryTier:
        return MemoryTier("host", num_pages, with_slots=True)


class TestFiles(TierContract):
    outlives_requests = True

    def make(self, num_pages: int) -> MemoryTier:
        return FileTier("disk", num_pages)


class TestFilesThatAreKnown(TestFiles):
    def make(self, num_pages: int) -> MemoryTier:
        return FileTier("disk", num_pages, known_keys=[b"%32d" % index for index in range(99)])


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

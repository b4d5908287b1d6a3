"""What a request that waits is certain to need: no less than it needs later, when some of what it found is gone."""

from __future__ import annotations

from kvarts.core.content import Content
from kvarts.core.kv.group_pages import GroupPages
from kvarts.core.kv.groups import GroupMemory, PartGroup
from kvarts.core.kv.layers import KvLayer
from kvarts.core.kv.pool import CountPool

from builders.grouped import FULL

WINDOW = KvLayer(kind="window", num_heads=1, head_numbers=2, span=2)
CHUNK = KvLayer(kind="chunk", num_heads=1, head_numbers=2, span=8)
TOKENS = list(range(12))


def open_cache(layer: KvLayer, num_blocks: int, most_new: int) -> GroupPages:
    memory = GroupMemory((PartGroup(FULL, part_bytes=1), PartGroup(layer, part_bytes=1)))
    return GroupPages(memory, CountPool(num_blocks), page_size=2, most_new_tokens=most_new)


def test_the_copy_that_is_found_may_be_one_that_others_hold() -> None:
    cache = open_cache(WINDOW, 15, 8)
    contents = [Content.from_tokens(TOKENS, page_size=2, owner=owner) for owner in range(3)]
    tables = [cache.open(cache.match(content, 0)) for content in contents[:2]]
    for table in tables:
        cache.extend(table, 4, is_end=True)
    cache.close(tables[0], 2, 2)
    match = cache.match(contents[2], 5)
    wanted, least = cache.needs.to_admit(match, 12, 8), cache.needs.least_to_admit(match, 12, 8)
    cache.evict(4)
    match = cache.match(contents[2], 5)
    assert match.num_pages == 2
    assert least == cache.needs.to_admit(match, 12, 8) < wanted


def test_a_request_that_finds_less_may_need_less() -> None:
    """At the end of a chunk there is nothing to hold of it; pages before have the chunk's parts to hold."""
    cache = open_cache(CHUNK, 14, 2)
    content, other = (Content.from_tokens([*TOKENS, 1, 2, 3, 4], page_size=2, owner=owner) for owner in range(2))
    table = cache.open(cache.match(content, 0))
    for num_tokens in range(2, 16, 2):
        cache.extend(table, num_tokens, is_end=num_tokens == 14)
        cache.free_skipped(table, num_tokens)
    cache.count()
    cache.close(table, 7, 7)
    found = cache.match(other, 7), cache.match(other, 4)
    assert [match.num_pages for match in found] == [7, 4]
    needs = [cache.needs.to_admit(match, 16, 2) for match in found]
    assert cache.needs.least_to_admit(found[0], 16, 2) <= needs[1] < needs[0]


def test_states_at_the_ends_of_chunks_need_one_part_for_all_the_pages_of_a_chunk() -> None:
    """Also after a load, and while it is under way: 14 pages of the full group, and a state."""
    state = KvLayer(kind="state", num_heads=1, head_numbers=2, span=1)
    memory = GroupMemory((PartGroup(FULL, part_bytes=1), PartGroup(state, part_bytes=1)), aligns=True)
    cache = GroupPages(memory, CountPool(40), page_size=2, most_new_tokens=8)
    tokens = list(range(40))
    content, other = (Content.from_tokens(tokens, page_size=2, owner=owner) for owner in range(2))
    table = cache.open(cache.match(content, 0))
    cache.extend(table, 12, is_end=True)
    assert cache.incoming.to_go_on(table, 40, 0) == cache.incoming.to_go_on(table, 40, 8) == 14 + 1
    cache.close(table, 6, 6)
    match = cache.match(other, 19)
    assert match.num_pages == 6
    # What is found and not held: six pages, and their state, which vLLM counts though the load brings another one.
    assert cache.incoming.to_admit(match, match, 40, 0) >= 14 + 1 + 6
    assert cache.group_needs.passed_states(12, cache.held_by_others(match)) == 1
    assert cache.group_needs.passed_states(0, cache.held_by_others(match)) == 0

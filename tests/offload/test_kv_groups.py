"""Several KV groups below the device: a hit is what all groups agree on, found one page and one length at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.content import Content
from kvarts.errors import ConfigError
from kvarts.offload.groups import GroupedTier, KVGroup

PAGE_SIZE = 2


def content_of(tokens: list[int], owner: int = 0) -> Content:
    return Content.from_tokens(tokens, page_size=PAGE_SIZE, owner=owner)


def stored_by_hand(tier: GroupedTier, group: str, content: Content, page: int) -> bool:
    return tier.parts[group].find(content, page, page + 1) == 1


def agreed_by_hand(tier: GroupedTier, content: Content, start: int, limit: int) -> int:
    """Every length, from the longest on; for every group, every token that the next one looks back to."""
    for end in range(limit, start, -1):
        position = end * PAGE_SIZE
        needed = {
            group.name: {
                token // PAGE_SIZE
                for token in range(position)
                if group.window is None or token > position - group.window
            }
            for group in tier.groups
        }
        if all(
            page < start or stored_by_hand(tier, name, content, page)
            for name, pages in needed.items()
            for page in pages
        ):
            return end - start
    return 0


@given(
    st.lists(st.integers(1, 9) | st.none(), min_size=1, max_size=3),
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 7), st.integers(1, 8), st.booleans(), st.integers(0, 6)),
        max_size=10,
    ),
    st.integers(2, 12),
    st.integers(0, 4),
)
def test_a_hit_is_what_all_groups_agree_on(
    windows: list[int | None], stores: list[tuple[int, int, int, bool, int]], num_pages: int, start: int
) -> None:
    groups = [KVGroup(f"group{index}", window) for index, window in enumerate(windows)]
    tier = GroupedTier("host", groups, num_pages, page_size=PAGE_SIZE)
    contents = [content_of([1] * 8 + [branch] * 8, owner=branch) for branch in range(3)]
    for branch, first, length, is_stored, null in stores:
        held_from = {group.name: null for group in groups if group.window is not None}
        store = tier.prepare_store(contents[branch], first, min(8, first + length), held_from=held_from)
        if store is not None:
            for name, part in store.ticket.stores.items():  # type: ignore[attr-defined]
                assert all(segment.start >= held_from.get(name, 0) for segment in part.segments), "a null page"
            assert tier.complete_store(store, is_stored=is_stored)
    for content in contents:
        expected = agreed_by_hand(tier, content, start, 8)
        assert tier.find(content, start, 8) == expected
        assert tier.lookup(1, content, start, 8).num_pages == expected
        if not expected:
            continue
        load = tier.prepare_load(1)
        for name, part in load.ticket.loads.items():  # type: ignore[attr-defined]
            group = next(group for group in groups if group.name == name)
            assert part.segments[0].start == max(start, group.first_needed(start + expected, PAGE_SIZE))
            assert part.segments[-1].end == start + expected
        assert tier.complete_load(load)
        assert not tier.complete_load(load)
        assert tier.num_used == 0


def test_each_group_keeps_copies_of_its_own() -> None:
    tier = GroupedTier("host", [KVGroup("full"), KVGroup("window", 4)], 8, page_size=PAGE_SIZE, with_slots=True)
    content = content_of(list(range(12)))
    store = tier.prepare_store(content, 0, 6, held_from={"window": 3})
    assert store is not None
    assert [(segment.start, segment.end) for segment in store.segments] == [(0, 6), (3, 6)]
    assert tier.find(content, 0, 6) == 0, "nothing is findable before its store is complete"
    tier.complete_store(store)
    assert tier.find(content, 0, 6) == 6
    assert tier.find(content, 0, 3) == 0, "the window of a shorter hit is not there"
    assert tier.lookup(7, content, 0, 6).num_pages == 6
    load = tier.prepare_load(7)
    assert [(segment.start, segment.end) for segment in load.segments] == [(0, 6), (4, 6)]
    tier.complete_load(load, 4)
    assert tier.find(content, 0, 6) == 0
    assert tier.parts["full"].find(content, 0, 6) == 4


def test_groups_need_names() -> None:
    with pytest.raises(ConfigError, match="name of its own"):
        GroupedTier("host", [KVGroup("a"), KVGroup("a", 3)], 4, page_size=2)
    with pytest.raises(ConfigError, match="window"):
        KVGroup("a", 0)

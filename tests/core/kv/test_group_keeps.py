"""What bounded sequences retain in KV groups, against a look at every token of every layer."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvarts.core.kv.groups import GroupKeeps, GroupMemory, PartGroup, SinkWindow, most_blocks, retained_by_group
from kvarts.core.kv.layers import KvLayer

from oracles.naive_kv_groups import kept_for, seen_by_both

pytestmark = pytest.mark.laws

layers = st.one_of(
    st.builds(KvLayer, kind=st.sampled_from(["full", "latent"]), num_heads=st.just(1), head_numbers=st.just(2)),
    st.builds(
        KvLayer,
        kind=st.sampled_from(["window", "window", "chunk"]),
        num_heads=st.just(1),
        head_numbers=st.just(2),
        span=st.integers(1, 24),
    ),
    st.builds(
        KvLayer,
        kind=st.just("window"),
        num_heads=st.just(1),
        head_numbers=st.just(2),
        span=st.integers(1, 24),
        sink=st.integers(1, 9),
    ),
)
windows = st.builds(SinkWindow, st.integers(0, 7), st.integers(1, 14))


def a_window(span: int) -> KvLayer:
    return KvLayer(kind="window", num_heads=1, head_numbers=2, span=span)


@given(layers, windows, st.integers(1, 5))
@example(a_window(13), SinkWindow(5, 11), 2)
@example(a_window(3), SinkWindow(7, 2), 2)
def test_what_is_kept_is_what_a_later_token_sees(layer: KvLayer, whole: SinkWindow, page_size: int) -> None:
    keeps = GroupKeeps(whole, layer)
    most = 0
    for position in range(80):
        kept = kept_for(layer, whole, position)
        assert keeps.num_retained(position) == len(kept)
        assert seen_by_both(layer, whole, position) <= kept | {position}
        # While the token is computed: it and what it sees.
        pages = {token // page_size for token in (*kept, position)}
        most = max(most, len(pages))
        assert (position + page_size) // page_size - keeps.num_dropped(position, page_size) >= len(pages)
    assert keeps.most_pages(page_size) == most


@given(st.lists(st.tuples(layers, st.integers(1, 4)), min_size=1, max_size=3), windows, st.integers(1, 5))
def test_the_bound_is_the_sum_over_groups(groups: list[tuple[KvLayer, int]], whole: SinkWindow, page_size: int) -> None:
    """In bytes: of every layer the most pages that it holds, whatever the length, each of all its tokens."""
    memory = GroupMemory(tuple(PartGroup(layer, number * 12, number) for layer, number in groups))
    num_bytes = 0
    for layer, number in groups:
        most = 0
        for position in range(80):
            kept = {*kept_for(layer, whole, position), position}
            most = max(most, len({token // page_size for token in kept}))
        for _ in range(number):
            num_bytes += most * 12
    assert most_blocks(memory, whole, page_size) * memory.block_bytes == num_bytes


def test_keys_that_rotate_late_keep_the_sink_near() -> None:
    """Positions are places among what is retained: a layer that reaches beyond the window sees the sink for ever."""
    late = GroupKeeps(SinkWindow(4, 16, rotates_late=True), a_window(20))
    assert late.sink_seen(10_000) == 4 and late.most_pages(4) == 1 + 4 + 1
    near = GroupKeeps(SinkWindow(4, 16, rotates_late=True), a_window(17))
    assert near.sink_seen(10_000) == 0 and near.most_pages(4) == 4 + 1
    assert GroupKeeps(SinkWindow(4, 16), a_window(20)).sink_seen(23) == 0


def test_a_window_of_gemma_keeps_less_than_the_session() -> None:
    whole = SinkWindow(4, 4096)
    assert GroupKeeps(whole, a_window(1024)).most_pages(16) == 64 + 1
    assert GroupKeeps(whole, KvLayer(kind="full", num_heads=1, head_numbers=2)).most_pages(16) == 1 + 256 + 1


def test_states_are_beside_what_is_retained() -> None:
    """A state is of all tokens: a sequence has one, whatever its window."""
    full = PartGroup(KvLayer(kind="full", num_heads=1, head_numbers=2), 2)
    state = PartGroup(KvLayer(kind="state", state_bytes=6), 6)
    memory, whole = GroupMemory((full, state)), SinkWindow(4, 64)
    assert [keeps.layer for keeps, _ in retained_by_group(memory, whole)] == [full.layer]
    assert most_blocks(memory, whole, 16) == whole.most_pages(16) + 3

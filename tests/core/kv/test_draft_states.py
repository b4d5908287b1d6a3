"""Requests that draft, with states by page: the memory of each step, beside a restatement of vLLM's table of states."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.core.content import Content
from kvarts.core.kv.draft_states import DraftSpace
from kvarts.core.kv.group_pages import Decoding, GroupPages
from kvarts.core.kv.groups import STATE_SPAN, GroupMemory, PartGroup
from kvarts.core.kv.layers import KvLayer
from kvarts.core.kv.pool import CountPool, IdPool

FULL = PartGroup(KvLayer(kind="full", num_heads=1, head_numbers=1), part_bytes=1)
STATES = PartGroup(KvLayer(kind="state", span=STATE_SPAN), part_bytes=1)


class NaiveStates:
    """A request's table of states in one group, as vLLM has it: the last entries are its state and those of a draft."""

    def __init__(self, page_size: int, num_drafts: int) -> None:
        self.page_size = page_size
        self.num_drafts = num_drafts
        self.table: list[object | None] = []
        self.has_begun = False

    def take(self, end: int) -> int:
        """Take the blocks of a step that computes the tokens before `end`; return how many are new."""
        wanted, before = -(-end // self.page_size) + self.num_drafts, len(self.table)
        own = wanted - self.num_drafts - 1
        if wanted > before:
            self.table += [None] * (own - before)
            for place in range(before - self.num_drafts, before) if self.has_begun else ():
                if place < own:  # a state of a draft, which is one still
                    self.table.append(self.table[place])
                    self.table[place] = None
        new = max(0, wanted - len(self.table))
        self.table += [object() for _ in range(new)]
        self.has_begun = True
        return new

    def free(self, num_computed: int) -> None:
        """Release the states before that of the last computed token."""
        for place in range(max(0, num_computed - 1) // self.page_size):
            self.table[place] = None

    @property
    def num_held(self) -> int:
        return sum(block is not None for block in self.table)


@given(st.data())
def test_a_request_that_drafts_holds_the_states_that_vllm_s_table_holds(data: st.DataObject) -> None:
    page_size = data.draw(st.sampled_from([4, 8]))
    num_drafts = data.draw(st.integers(1, page_size - 1))
    space = DraftSpace(num_drafts, data.draw(st.sampled_from([0, num_drafts])), most_tokens=200)
    num_groups = data.draw(st.integers(1, 2))
    memory = GroupMemory((*[STATES] * num_groups, FULL), aligns=True)
    cache = GroupPages(
        memory, CountPool(1000), page_size=page_size, most_new_tokens=64, decoding=Decoding(drafts=space)
    )
    num_prompt = data.draw(st.integers(1, 60))
    content = Content.from_tokens(list(range(200)), page_size=page_size, owner=0)
    states, num_pages, start = NaiveStates(page_size, num_drafts), 0, 0
    match = cache.match(content, 0)
    table = None
    while start < 150:
        if start < num_prompt:  # a chunk ends at a page, or with the prompt
            end = min(num_prompt, (start // page_size + data.draw(st.integers(1, 4))) * page_size)
            num_computed = end
        else:
            end = start + 1 + num_drafts
            num_computed = start + 1 + data.draw(st.integers(0, num_drafts))
        if table is not None:
            states.free(start)
            cache.free_skipped(table, start)
            cache.count()
        new_pages = max(0, -(-min(200, end + space.num_slots) // page_size) - num_pages)
        wanted = num_groups * states.take(end) + new_pages
        if table is None:
            in_all = num_groups * (1 + num_drafts) + -(-num_prompt // page_size)
            assert cache.group_needs.to_admit(0, num_prompt, end, cache.held_by_others(match)) == max(in_all, wanted)
            table = cache.open(match)
        else:
            assert max(0, cache.needs.to_run(table, start, end)) == wanted
        cache.take_for(table, end)
        num_pages += new_pages
        if num_computed // page_size > table.num_named:
            cache.publish(table, num_computed)
        assert cache.num_held(table) == num_groups * states.num_held + num_pages
        cache.check([(table, num_pages)])
        start = num_computed
    assert table is not None
    cache.close(table, start // page_size, num_pages)
    assert cache.num_used == 0 and cache.num_free == 1000


def test_an_admission_counts_the_states_of_a_draft_in_addition() -> None:
    memory = GroupMemory((STATES, FULL), aligns=True)
    caches = [
        GroupPages(memory, CountPool(100), page_size=4, most_new_tokens=64, decoding=Decoding(drafts=drafts))
        for drafts in (None, DraftSpace(3, 0, 200), DraftSpace(3, 3, 200))
    ]
    match = caches[0].match(Content.from_tokens(list(range(8)), page_size=4, owner=0), 0)
    held = caches[0].held_by_others(match)
    assert [cache.group_needs.to_admit(0, 8, 8, held) for cache in caches] == [3, 6, 7]
    assert [cache.needs.alone(8, 4) - caches[0].needs.alone(8, 4) for cache in caches] == [0, 3, 4]


def test_states_of_drafts_are_counted_and_have_no_ids() -> None:
    memory = GroupMemory((STATES, FULL), aligns=True)
    space = Decoding(drafts=DraftSpace(3, 0, 200))
    with pytest.raises(AssertionError, match="only counted"):
        GroupPages(memory, IdPool(100), page_size=4, most_new_tokens=64, decoding=space)

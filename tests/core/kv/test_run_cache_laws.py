"""A cache with KV groups by the run of pages against the one page by page, whatever is done in whatever order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvarts.core.content import Content
from kvarts.core.events import CopiesRemoved, Event, PagesRemoved, PagesStored, PartsGivenBack
from kvarts.core.kv.account import FEW_IDS, RunEvents
from kvarts.core.kv.eviction import EvictionOrder
from kvarts.core.kv.group_needs import GroupNeeds
from kvarts.core.kv.group_pages import ReferencedByOthers
from kvarts.core.kv.groups import STATE_SPAN, GroupMemory, PartGroup, Retention
from kvarts.core.kv.layers import KvLayer
from kvarts.core.kv.pool import IdPool, PageError, PageIds
from kvarts.core.kv.run_cache import RunCache
from kvarts.core.kv.runs import RunTable

from builders.grouped import FULL, STATES, WINDOW, part_groups
from builders.guide_policies import LeastHits
from builders.orders import FewestHits, LatestFirst, MostHits
from builders.parts import MemoryOfOne, listed_pages
from oracles.grouped_cache import GroupedCache
from oracles.parts import GroupedTable

pytestmark = pytest.mark.laws


@dataclass
class Both:
    content: Content
    by_page: GroupedTable
    by_run: RunTable
    admission: int = -1
    """Its place among the decodes, if it is one."""
    num_hit: int = -1
    """For a sequence that is computed elsewhere and has not arrived: its pages that were found."""


class RunMachine(RuleBasedStateMachine):
    @initialize(
        groups=part_groups(by_page=True),
        aligns=st.booleans(),
        page_size=st.integers(1, 4),
        total_bytes=st.sampled_from([8, 20, 40, 60]),
        keeps=st.sampled_from(["all", "tails"]),
        shares=st.sampled_from(["no", "runs", "both"]),
    )
    def build(
        self,
        groups: tuple[PartGroup, ...],
        page_size: int,
        total_bytes: int,
        keeps: Retention,
        shares: str,
        aligns: bool,
    ) -> None:
        self.pages = GroupedCache(groups, page_size=page_size, total_bytes=total_bytes, keeps=keeps, aligns=aligns)
        memory = GroupMemory(groups, keeps, aligns=aligns)
        self.runs = RunCache(memory, page_size=page_size, total_bytes=total_bytes)
        self.memories = [MemoryOfOne(self.runs)] if shares != "no" else []
        if shares == "both":
            self.memories.append(MemoryOfOne(self.pages))
        self.holders: list[Both] = []
        self.num_owners = self.num_admitted = 0

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        num_unknown=st.integers(0, 12),
        num_new=st.integers(1, 20),
        is_end=st.booleans(),
    )
    def open(self, tokens: list[int], num_unknown: int, num_new: int, is_end: bool) -> None:
        self.num_owners += 1
        page_size = self.pages.page_size
        content = Content.from_tokens(tokens, page_size=page_size, owner=self.num_owners)
        self.begin(content, len(tokens) + num_unknown, num_new, is_end)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), num_new=st.integers(1, 20), is_end=st.booleans())
    def preempt(self, data: st.DataObject, num_new: int, is_end: bool) -> None:
        """What it has generated it finds again itself."""
        both = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        num_tokens = both.by_page.num_tokens
        self.end(both)
        if both.num_hit >= 0:
            return
        self.begin(both.content, num_tokens, num_new, is_end)

    def begin(self, content: Content, num_tokens: int, num_new: int, is_end: bool) -> None:
        pages, runs = self.pages, self.runs
        limit = (num_tokens - 1) // pages.page_size
        by_page, by_run = pages.match(content, limit), runs.match(content, limit)
        assert by_page.num_pages == by_run.num_pages
        found = pages.found_parts(by_page)
        for index, group in enumerate(pages.groups):
            held = {page for page, part in found[index].items() if part.refs}
            if group.is_state:
                assert runs.tree.num_idle(by_run, index) == len(found[index]) - len(held)
                continue
            num_sink = -(-group.layer.sink // pages.page_size)
            for first in range(
                group.layer.first_seen(by_page.num_pages * pages.page_size) // pages.page_size, limit + 1
            ):
                num_shared = sum(page >= first or page < num_sink for page in held)
                assert runs.tree.num_shared(by_run, index, first) == num_shared
        start = by_page.num_pages * pages.page_size
        num_new = min(num_new, num_tokens - start)
        held_by_page = pages.open(content, by_page, num_new, is_end=is_end)
        if held_by_page is None:
            return
        held_by_run = runs.begin(content, by_run)
        self.grow(held_by_run, start + num_new, is_end)
        self.holders.append(Both(content, held_by_page, held_by_run))

    def grow(self, table: RunTable, num_tokens: int, is_end: bool) -> None:
        """As GroupedCache does it: snapshots where the tokens end, and not on the way."""
        self.runs._grow(table, num_tokens, is_end)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def open_to_receive(self, tokens: list[int]) -> None:
        """Another engine computes a prompt."""
        self.num_owners += 1
        pages, runs = self.pages, self.runs
        content = Content.from_tokens(tokens, page_size=pages.page_size, owner=self.num_owners)
        limit = (len(tokens) - 1) // pages.page_size
        by_page, by_run = pages.match(content, limit), runs.match(content, limit)
        memory = GroupMemory(pages.groups)
        needs = GroupNeeds(memory, page_size=pages.page_size, most_new=1)
        start = by_run.num_pages * pages.page_size
        num_bytes = needs.to_receive(start, len(tokens), ReferencedByOthers(runs.tree, by_run)) * memory.block_bytes
        assert num_bytes == pages.to_receive(by_page, len(tokens))
        if num_bytes > pages.room_bytes:
            return
        num_used = runs.used_bytes
        held_by_page = pages.open_to_receive(content, by_page, len(tokens))
        held_by_run = runs.begin_to_receive(content, by_run, len(tokens))
        assert runs.used_bytes - num_used == num_bytes
        self.holders.append(Both(content, held_by_page, held_by_run, num_hit=by_run.num_pages))

    @precondition(lambda self: any(both.num_hit >= 0 for both in self.holders))
    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        both = data.draw(st.sampled_from([both for both in self.holders if both.num_hit >= 0]))
        both.num_hit = -1
        self.pages.receive(both.by_page)
        self.runs.receive(both.by_run)

    @precondition(lambda self: self.computing())
    @rule(data=st.data(), num_new=st.integers(1, 8), is_end=st.booleans())
    def advance(self, data: st.DataObject, num_new: int, is_end: bool) -> None:
        both = data.draw(st.sampled_from(self.computing()))
        num_tokens = both.by_page.num_tokens
        if self.pages.aligns and num_tokens % self.pages.page_size:
            num_new = min(num_new, -num_tokens % self.pages.page_size)
        assert self.runs.missing_bytes(both.by_run, num_new) == self.pages.missing_bytes(both.by_page, num_new)
        self.runs.free_skipped(both.by_run, num_tokens)
        if self.pages.advance(both.by_page, num_new, is_end=is_end):
            self.grow(both.by_run, num_tokens + num_new, is_end)

    def computing(self) -> list[Both]:
        return [both for both in self.holders if both.admission < 0 and both.num_hit < 0]

    def decoding(self) -> list[Both]:
        decoding = [both for both in self.holders if both.admission >= 0]
        return sorted(decoding, key=lambda both: both.admission)

    @precondition(lambda self: self.computing())
    @rule(data=st.data())
    def start_decoding(self, data: st.DataObject) -> None:
        """Also in the middle of what is known: others may find what it fills then."""
        both = data.draw(st.sampled_from(self.computing()))
        num_tokens = both.by_page.num_tokens
        self.pages.settle(both.by_page, num_tokens)
        self.runs.free_skipped(both.by_run, num_tokens)
        self.num_admitted += 1
        both.admission = self.num_admitted
        self.runs.decodes.start(both.by_run, both.admission)

    @precondition(lambda self: self.decoding() and not self.memories)
    @rule(most_steps=st.integers(1, 24), num_wanted=st.integers(0, 30))
    def leap(self, most_steps: int, num_wanted: int) -> None:
        """As many steps at once as that one by one, to the part that goes last."""
        pages, page_size = self.pages, self.pages.page_size
        decoding = self.decoding()
        page_bytes = self.runs.page_bytes
        if page_bytes * sum(both.by_page.num_tokens % page_size == 0 for both in decoding) > pages.room_bytes:
            return
        ends = [both.by_page.num_tokens + 1 for both in decoding]
        contents = [both.content for both in decoding]
        if num_wanted and any(
            end % page_size == 0 and end // page_size <= content.num_known_pages
            for end, content in zip(ends, contents, strict=True)
        ):
            return  # what waits may find it, so this step is scheduled
        before = list(pages.num_evicted)
        done = self.runs.decodes.leap(most_steps, num_wanted)
        bounded = [index for index, group in enumerate(pages.groups) if group.is_bounded]
        num_steps = len(done.taken)
        assert 0 < num_steps <= most_steps
        for step in range(num_steps):
            due = [both for both in decoding if both.by_page.num_tokens % page_size == 0]
            assert done.taken[step] == len(due)
            for both in due:
                pages.take_page(both.by_page, both.by_page.num_tokens // page_size)
            if step and num_wanted:
                assert pages.room_bytes < num_wanted, "it would have been admitted before this step"
            for both in decoding:
                if (both.by_page.num_tokens + 1) % page_size == 0:
                    pages.fill_page(both.by_page, both.by_page.num_tokens + 1)
                    both.by_page.num_tokens -= 1
            num_used, num_cached = list(pages.num_used), list(pages.num_cached)
            for both in decoding:
                pages.settle(both.by_page, both.by_page.num_tokens + 1)
            for place, index in enumerate(bounded):
                num_listed = pages.num_cached[index] - num_cached[index]
                if step + 1 < num_steps:
                    assert done.listed[place][step] == num_listed
                    num_emptied = num_used[index] - pages.num_used[index] - num_listed
                    assert (done.emptied[place][step] if done.emptied else 0) == num_emptied
        evicted = [0] * len(pages.groups)
        for index, count in zip(done.evicted[::2], done.evicted[1::2], strict=True):
            evicted[index] += count
        assert evicted == [now - then for now, then in zip(pages.num_evicted, before, strict=True)]
        self.runs.decodes.end_step()

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.end(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    def end(self, both: Both) -> None:
        if both.num_hit >= 0:
            both.by_page.num_tokens = both.num_hit * self.pages.page_size
        num_pages = both.by_page.num_tokens // self.pages.page_size
        self.pages.close(both.by_page)
        self.runs.close(both.by_run, num_pages, -(-both.by_page.num_tokens // self.pages.page_size))
        with pytest.raises(PageError, match="closed"):
            self.runs.close(both.by_run, num_pages)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "runs"):
            return
        pages, runs = self.pages, self.runs
        for memory in self.memories:
            memory.take_back()
        runs.check([both.by_run for both in self.holders])
        if self.memories:
            pages.check([both.by_page for both in self.holders])
            assert runs.empty_bytes == 0, "what is empty goes back"
            assert runs.room_bytes == pages.room_bytes and runs.cached_bytes == pages.cached_bytes
        else:
            assert runs.empty_bytes == pages.empty_bytes
        if runs.cached_bytes and len(self.memories) == 2:
            ages = [stamp for part, stamp in pages._released.items()]
            assert ages == sorted(ages) and pages.next_stamp == ages[0]
            ages = [entry.stamp for entry in runs.entries() if entry.next_bytes(runs)]
            assert ages == sorted(ages) and runs.next_stamp == ages[0]
            assert 0 < pages.next_bytes <= runs.next_bytes <= runs.cached_bytes
        for name in ("num_used", "num_cached", "num_evicted"):
            assert getattr(runs, name) == getattr(pages, name), name
        assert listed_pages(runs) == [(part.group, part.page_name.page) for part in pages.listed()]
        listed = [part.group for part in pages.listed()]
        assert runs.listed_counts() == [listed.count(index) for index in range(len(runs.groups))]

    def teardown(self) -> None:
        if not hasattr(self, "runs"):
            return
        for both in self.holders:
            self.end(both)
        self.runs.check([])
        assert self.runs.used_bytes == 0
        self.runs.evict(self.runs.free_bytes)
        assert not any(root.children for root in self.runs.tree.roots.values()), (
            "a span outlives everything that needs it"
        )


class NamedMachine(RunMachine):
    """Blocks with ids and events, as a real model and a journal have them: every full page is findable at once."""

    @initialize(
        groups=part_groups(by_page=True),
        aligns=st.booleans(),
        page_size=st.integers(1, 4),
        num_blocks=st.integers(4, 60),
        keeps=st.sampled_from(["all", "tails"]),
    )
    def build(
        self, groups: tuple[PartGroup, ...], page_size: int, num_blocks: int, keeps: Retention, aligns: bool
    ) -> None:
        self.set_up(groups, page_size, num_blocks, keeps, aligns)

    def set_up(
        self,
        groups: tuple[PartGroup, ...],
        page_size: int,
        num_blocks: int,
        keeps: Retention,
        aligns: bool,
        *,
        with_ids: bool = True,
        make_order: Callable[[], EvictionOrder | None] = lambda: None,
    ) -> None:
        memory = GroupMemory(groups, keeps, aligns=aligns)
        total_bytes = num_blocks * memory.block_bytes
        self.of_pages: list[Event] = []
        self.of_runs: list[Event] = []
        self.pages = GroupedCache(
            groups,
            page_size=page_size,
            total_bytes=total_bytes,
            keeps=keeps,
            blocks=IdPool(num_blocks) if with_ids else None,
            emit=self.of_pages.append,
            aligns=aligns,
            order=make_order(),
        )
        self.runs = RunCache(
            memory,
            page_size=page_size,
            total_bytes=total_bytes,
            blocks=IdPool(num_blocks) if with_ids else None,
            events=RunEvents(self.of_runs.append),
            eviction_order=make_order(),
        )
        self.memories = [] if with_ids else [MemoryOfOne(self.runs)]
        self.holders: list[Both] = []
        self.num_owners = self.num_admitted = 0

    def start_decoding(self, data: st.DataObject) -> None:
        """No rule: what is named does not follow decodes."""

    def leap(self, most_steps: int, num_wanted: int) -> None:
        """No rule, either."""

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), num_pages=st.integers(1, 3))
    def draft(self, data: st.DataObject, num_pages: int) -> None:
        """Pages for tokens that may be wrong are taken and given back."""
        if not self.computing():
            return
        both = data.draw(st.sampled_from(self.computing()))
        first = -(-both.by_page.num_tokens // self.pages.page_size)
        if num_pages * self.runs.page_bytes > self.pages.room_bytes:
            return
        for page in range(first, first + num_pages):
            self.pages.take_page(both.by_page, page)
            self.runs.take_next(both.by_run, 1)
        self.pages.drop_pages(both.by_page, first)
        self.runs.drop_pages(both.by_run, first)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def reach(self, tokens: list[int]) -> None:
        content = Content.from_tokens(tokens, page_size=self.pages.page_size, owner=0)
        limit = len(tokens) // self.pages.page_size
        assert self.runs.tree.reach(content, limit) == self.pages.reach(content, limit)

    @invariant()
    def tells_the_same(self) -> None:
        """Of the same parts in the same order, each kind by itself: runs may be one event where pages were two."""
        if not hasattr(self, "of_runs"):
            return
        for kinds in ((PagesRemoved, CopiesRemoved), (PartsGivenBack,)):
            told = [[part for event in events if isinstance(event, kinds) for part in parts_of(event)]
                    for events in (self.of_pages, self.of_runs)]  # fmt: skip
            assert told[1] == told[0]
        stored = [
            sorted(part for event in events if isinstance(event, PagesStored) for part in parts_of(event))
            for events in (self.of_pages, self.of_runs)
        ]
        assert stored[1] == stored[0]
        for event in self.of_runs:
            if isinstance(event, PagesStored) and event.start_page:
                assert event.parent is not None
                assert event.parent.key(event.start_page - 1) == event.content.key(event.start_page - 1)
        self.of_pages.clear()
        self.of_runs.clear()


class OrderedMachine(NamedMachine):
    """Under eviction orders other than least recently used, which list runs here and single parts there."""

    @initialize(
        groups=part_groups(by_page=True),
        aligns=st.booleans(),
        page_size=st.integers(1, 4),
        num_blocks=st.integers(4, 60),
        keeps=st.sampled_from(["all", "tails"]),
        make_order=st.sampled_from([FewestHits, LeastHits, LatestFirst, MostHits]),
        shares=st.booleans(),
    )
    def build(
        self,
        groups: tuple[PartGroup, ...],
        page_size: int,
        num_blocks: int,
        keeps: Retention,
        make_order: Callable[[], EvictionOrder],
        shares: bool,
        aligns: bool,
    ) -> None:
        self.set_up(groups, page_size, num_blocks, keeps, aligns, with_ids=not shares, make_order=make_order)

    @invariant()
    def says_what_goes_next(self) -> None:
        if not hasattr(self, "runs") or not self.memories or not self.runs.cached_bytes:
            return
        assert 0 < self.pages.next_bytes <= self.runs.next_bytes <= self.runs.cached_bytes


def parts_of(event: PagesStored | PagesRemoved | CopiesRemoved | PartsGivenBack) -> list[tuple[object, ...]]:
    """The parts that an event is about, in its order: pages by the keys of all up to them."""
    pages = range(event.start_page, event.end_page)
    last_first = reversed(pages) if not isinstance(event, PagesStored) else pages
    more = (getattr(event, "copy", -1), getattr(event, "is_dropped", False))
    return [(event.group, *more, *(event.content.key(before) for before in range(page + 1))) for page in last_first]


TestRuns = RunMachine.TestCase
TestRuns.settings = settings(stateful_step_count=30)
TestNamedRuns = NamedMachine.TestCase
TestNamedRuns.settings = settings(stateful_step_count=30)
TestOrderedRuns = OrderedMachine.TestCase
TestOrderedRuns.settings = settings(stateful_step_count=30)


def test_what_is_evicted_from_a_tail_is_split_off_when_it_is_looked_at() -> None:
    memory = GroupMemory((PartGroup(FULL, 1), WINDOW))
    cache = RunCache(memory, page_size=4, total_bytes=3 * 12)
    first, second = (Content.from_tokens(range(start, start + 40), page_size=4, owner=start) for start in (0, 100))
    table = cache.begin(first, cache.match(first, 9))
    cache.extend(table, 40, is_end=True)
    cache.close(table, 10)
    assert cache.num_cached == [10, 10]
    table = cache.begin(second, cache.match(second, 0))
    cache.extend(table, 12)
    assert cache.num_evicted == [3, 0], (
        "the memory had room for two pages in both groups, and the third took three parts"
    )
    assert cache.match(first, 9).num_pages == 7
    cache.close(table, 3)


def test_a_tail_of_which_everything_was_evicted_is_forgotten_when_it_is_split_off() -> None:
    cache = RunCache(GroupMemory((PartGroup(FULL, 1), WINDOW)), page_size=4, total_bytes=30)
    first, second = (Content.from_tokens(range(start, start + 40), page_size=4, owner=start) for start in (0, 100))
    # Ten pages, then six of another: all parts of the full group go, and the last of the window.
    for content, num_pages in ((first, 10), (second, 6)):
        table = cache.begin(content, cache.match(content, 0))
        cache.extend(table, 4 * num_pages, is_end=True)
        cache.close(table, num_pages)
    assert cache.num_evicted == [10, 4]
    # Of the first only its first page is left once there is room for another that begins with two of its pages.
    third = Content.from_tokens([*range(8), *range(200, 204)], page_size=4, owner=200)
    table = cache.begin(third, cache.match(third, 2))
    cache.extend(table, 12)
    assert cache.num_evicted == [10, 9]
    (span,) = (child for root in cache.tree.roots.values() for child in root.children.values() if child.end == 2)
    assert [child.content for child in span.children.values()] == [third]
    cache.close(table, 3)


def test_what_a_window_passed_page_by_page_is_one_run_for_those_that_come_after() -> None:
    """Two sequences hold a prompt, and the window of one passes it: that leaves it in pieces for the other."""
    wide = PartGroup(KvLayer(kind="window", num_heads=1, head_numbers=2, span=20), 1)
    cache = RunCache(GroupMemory((PartGroup(FULL, 1), wide)), page_size=2, total_bytes=200)
    tokens = list(range(16))

    def begun() -> RunTable:
        content = Content.from_tokens([*tokens, 99], page_size=2, owner=1)
        return cache.begin(content, cache.match(content, 8))

    first = begun()
    cache.extend(first, 17)
    second = begun()
    for num_tokens in range(18, 30):
        cache.extend(first, num_tokens)
        cache.free_skipped(first, num_tokens)
    assert [(run.start, run.end) for run in second.held[1]] == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 8)]
    third = begun()
    assert [(run.start, run.end) for run in third.held[1]] == [(0, 5), (5, 8)]
    assert second.held[1] == third.held[1] and [run.holders for run in second.held[1]] == [
        [second, third],
        [first, second, third],
    ]
    cache.check([first, second, third])


@pytest.mark.parametrize("num_cached", [0, 1])
def test_a_chunk_does_not_evict_the_snapshot_that_it_makes(num_cached: int) -> None:
    """A chunk takes all its pages, then keeps its state on the way, if the memory has room for that as well."""
    cache = RunCache(GroupMemory((PartGroup(FULL, 1), PartGroup(STATES[1].layer, 1))), page_size=4, total_bytes=4)
    if num_cached:
        before = Content.from_tokens(range(50, 54), page_size=4, owner=0)
        table = cache.begin(before, cache.match(before, 0))
        cache.extend(table, 4)
        cache.close(table, 1)
    content = Content.from_tokens(range(9), page_size=4, owner=1)
    table = cache.begin(content, cache.match(content, 2))
    cache.extend(table, 9, is_end=True)  # three pages and the state leave no room for a snapshot after two pages
    assert (cache.num_used, cache.num_cached, cache.num_evicted) == ([3, 1], [0, 0], [num_cached, 0])
    assert cache.released_bytes == 2 * num_cached, "the page and the state of the sequence before"
    cache.check([table])


def test_decodes_that_pass_the_same_pages_leave_them_in_one_piece_until_the_last_has_passed() -> None:
    """Two decodes hold a prompt, and their windows pass it: it is split where the later one is, and nowhere else."""
    wide = PartGroup(KvLayer(kind="window", num_heads=1, head_numbers=2, span=20), 1)
    cache = RunCache(GroupMemory((PartGroup(FULL, 1), wide)), page_size=2, total_bytes=400)
    content = Content.from_tokens([*range(16), 99], page_size=2, owner=1)
    decodes, tables = cache.decodes, []
    for admission, num_tokens in enumerate((24, 18)):
        table = cache.begin(content, cache.match(content, 8))
        cache.extend(table, num_tokens)
        tables.append(table)
        for each in tables:
            cache.free_skipped(each, each.num_tokens)
        decodes.start(table, admission)
    first, second = tables
    num_taken = [table.num_taken for table in tables]
    for _ in range(8):
        due = [table for table in tables if not (table.base + decodes.step) % 2]
        cache.take_pages(len(due))
        for table in due:
            num_taken[tables.index(table)] += 1
        decodes.end_step()
    (span,) = cache.match(content, 8).spans
    held = [(run.start, run.end, len(run.holders)) for run in span.parts[1] if run.holders and run.start < 8]
    assert held == [(3, 8, 2)]
    # The later one ends, so what only the earlier one has passed is released.
    cache.close(second, second.num_named, num_taken[1])
    assert [(run.start, run.end) for run in first.held[1] if run.start < 8] == [(6, 8)]
    cache.close(first, first.num_named, num_taken[0])
    cache.check([])


def test_states_after_two_chunks_are_given_back_and_gone_one_after_the_other() -> None:
    """The chunks end after pages 0 and 2; both are released when the plan of the step after them is made."""
    by_page = PartGroup(KvLayer(kind="state", state_bytes=1, span=STATE_SPAN), 1)
    told: list[Event] = []
    memory = GroupMemory((PartGroup(FULL, 1), by_page), "tails", aligns=True)
    cache = RunCache(memory, page_size=1, total_bytes=20, events=RunEvents(told.append))
    content = Content.from_tokens(range(6), page_size=1, owner=0)
    table = cache.begin(content, cache.match(content, 0))
    for num_tokens in (1, 3, 4):
        cache.extend(table, num_tokens)
    told.clear()
    cache.free_skipped(table, 4)
    cache.check([table])
    pages = [(type(event), event.start_page) for event in told if isinstance(event, (PartsGivenBack, PagesRemoved))]
    assert pages == [(PartsGivenBack, 2), (PagesRemoved, 2), (PartsGivenBack, 0), (PagesRemoved, 0)]


@pytest.mark.parametrize("num_blocks", [16, 16 * FEW_IDS])
def test_ids_of_a_large_pool_are_examined_once_as_many_have_moved(num_blocks: int) -> None:
    """L1: in a small pool every check finds a block with two owners; of a large one, checks cost what has moved."""
    memory = GroupMemory((PartGroup(FULL, 4), PartGroup(WINDOW.layer, 1)))
    cache = RunCache(memory, page_size=1, total_bytes=num_blocks, blocks=IdPool(num_blocks))

    def filled(owner: int) -> None:
        content = Content.from_tokens([owner], page_size=1, owner=owner)
        table = cache.begin(content, cache.match(content, 0))
        cache.extend(table, 1)
        cache.close(table, 1)

    filled(0)
    (run,) = [run for span in cache.tree.every() for run in span.parts[0]]
    _, second, *others = run.ids
    run.ids = PageIds([second, second, *others])
    num_checks, found = 0, ""
    while not found:
        num_checks += 1
        filled(num_checks)
        try:
            cache.check([])
        except AssertionError as error:
            found = str(error)
    assert "two owners" in found
    assert num_checks == 1 if num_blocks <= FEW_IDS else 8 < num_checks <= 16
    run.ids.pop(1)
    with pytest.raises(AssertionError, match="4 blocks, and 3 ids"):
        cache.check([])

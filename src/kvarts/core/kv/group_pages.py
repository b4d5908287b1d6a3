"""The cache of a model with KV groups, behind the seam in `core/kv/cache.py`: requests hold parts of pages, in runs.

Memory is counted in blocks, the largest size that divides the parts of all groups (GroupMemory); so every count is an
integer, and counts of pages in the interface are counts of blocks.

In a replay parts are counted. If a real model or a mock computes, or a reader receives page events, a part consists of
blocks with ids: keys and values of a page of tokens, in as many layers as divide the layers of every group, so that any
part can consist of any blocks. The RunCache below counts in the same unit: one of its bytes is a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple, cast

from kvarts.core.content import NOTHING, Content
from kvarts.core.event_log import Emit
from kvarts.core.events import PartsMoved
from kvarts.core.kv.account import MOST_UNCHECKED, RunEvents, Unchecked
from kvarts.core.kv.block_sizes import SizedParts, needs_of
from kvarts.core.kv.cache import (
    BlockTable,
    Cache,
    FollowedDecodes,
    Incoming,
    Leap,
    Mark,
    Match,
    Needs,
    States,
)
from kvarts.core.kv.draft_states import DraftedNeeds, DraftedParts, DraftSpace
from kvarts.core.kv.eviction import EvictionOrder, PinnedPages
from kvarts.core.kv.group_needs import GroupNeeds, Held
from kvarts.core.kv.groups import GroupMemory
from kvarts.core.kv.pool import IdPool, PageError, PageId, Pool
from kvarts.core.kv.run_cache import RunCache
from kvarts.core.kv.runs import PartRun, RunMatch, RunTable, Span
from kvarts.core.kv.span_tree import SpanTree

__all__ = [
    "Decoding",
    "GroupPages",
    "GroupTable",
    "GroupsBelow",
    "Held",
    "IncomingParts",
    "PinnedParts",
    "ReferencedByOthers",
]


class GroupTable(BlockTable):
    """Parts of one running request, or of a pin. `parts`: in every group. `page_ids`: blocks that are not parts.

    `num_promised`: blocks that are reserved for it while it waits for a load, for the computation of the rest. `tail`:
    the parts that a load fills while `parts`, of the pages before them, are computed; `num_reserved`: the blocks that
    it has until then, promised ones included.
    """

    __slots__ = ("num_promised", "num_reserved", "parts", "tail")

    def __init__(self, parts: RunTable, num_pages: int = 0, block_ids: list[PageId] | None = None) -> None:
        super().__init__(parts.content, [], num_pages, block_ids)
        self.parts = parts
        self.tail: RunTable | None = None
        self.num_promised = self.num_reserved = 0

    @property
    def num_named(self) -> int:
        """How many pages, from the first on, were made findable."""
        return self.parts.num_named

    @property
    def loading(self) -> RunTable:
        """The parts that a load fills."""
        return self.parts if self.tail is None else self.tail


class PinnedParts(PinnedPages):
    """Parts that a transfer holds."""

    __slots__ = ("parts",)

    def __init__(self, parts: RunTable) -> None:
        super().__init__([], 0)
        self.parts = parts


class ReferencedByOthers:
    """The parts of a match that running requests hold: a `Held`."""

    __slots__ = ("_found", "_tree")

    def __init__(self, tree: SpanTree, found: RunMatch) -> None:
        self._tree = tree
        self._found = found

    def num_shared(self, group: int, first_page: int) -> int:
        """Return how many of a group's parts in the sink and in pages from `first_page` on they hold."""
        return self._tree.num_shared(self._found, group, first_page)

    def num_idle(self, group: int) -> int:
        """Return how many snapshots of a group they do not hold."""
        return self._tree.num_idle(self._found, group)

    def num_with_held_copy(self, group: int) -> int:
        """Return how many parts of a group they do not hold, but a copy of them."""
        return self._tree.num_with_held_copy(self._found, group)


class GroupsBelow(NamedTuple):
    """The tiers below a cache with groups.

    `watches_list`: the first examines the parts that are evicted next, so the cache follows no decodes.
    """

    num_tiers: int = 0
    watches_list: bool = False


class Decoding(NamedTuple):
    """How decodes take, name and release their pages.

    `plans_ahead`: they release and publish a step later; with events or a tier below, the cache follows none.
    `leaps_emitted`: the cache leaps over decodes with events as well, unless tiers below or states by page need names
    of pages at once. `drafts`: the space of drafts in virtual time, with which pages of decodes are named at their
    turns.
    """

    plans_ahead: bool = False
    leaps_emitted: bool = False
    drafts: DraftSpace | None = None


NONE_BELOW: Final = GroupsBelow()
STEP_BY_STEP: Final = Decoding()


class GroupPages(Cache):
    """The parts of `memory` in the blocks of `pool`, held in runs by a RunCache.

    `most_new_tokens`: the most tokens of a request that a step may compute, which bounds the parts that a window holds
    during a step.

    `emit` receives events of parts. With it, or with ids of blocks, every page of a decode is findable as soon as it is
    full. Otherwise the cache follows decodes itself: it knows the steps in which they take and release pages, and can
    leap over them. `eviction_order`: chooses the next run to evict, and is notified of each release, so the cache
    follows no decodes either; without it, the least recently released run is evicted next. `at_branches`: as of
    RunCache.
    """

    __slots__ = (
        "_num_given",
        "_part_tables",
        "_unchecked",
        "block_bytes",
        "group_needs",
        "memory",
        "page_size",
        "parts",
    )

    def __init__(
        self,
        memory: GroupMemory,
        pool: Pool,
        *,
        page_size: int,
        most_new_tokens: int,
        emit: Emit | None = None,
        below: GroupsBelow = NONE_BELOW,
        eviction_order: EvictionOrder | None = None,
        at_branches: bool = False,
        decoding: Decoding = STEP_BY_STEP,
    ) -> None:
        ids = cast(IdPool, pool) if pool.has_ids else None
        plans_ahead, drafts, num_below = decoding.plans_ahead, decoding.drafts, below.num_tiers
        most_kept = 2 * most_new_tokens if plans_ahead else most_new_tokens
        has_sizes = memory.hit_pages > 1
        make_parts: Callable[..., RunCache] = SizedParts if has_sizes else RunCache
        make_needs: Callable[..., GroupNeeds] = needs_of
        if drafts is not None and memory.aligns:
            make_parts, make_needs = DraftedParts, partial(DraftedNeeds, space=drafts)
        self.group_needs = make_needs(memory, page_size=page_size, most_new=most_new_tokens, most_kept=most_kept)
        super().__init__(pool, page_blocks=self.group_needs.page_blocks)
        self.mean_page_blocks = self.group_needs.mean_page_blocks
        self.memory = memory
        self.block_bytes = memory.block_bytes
        self.page_size = page_size
        self.frees_skipped = True
        self.releases = any(group.is_bounded or group.is_state for group in memory.groups)
        self._part_tables = memory.part_tables
        self._unchecked = Unchecked()
        self.parts = make_parts(
            memory.in_blocks(),
            page_size=page_size,
            total_bytes=pool.total,
            blocks=ids,
            events=None if emit is None else RunEvents(emit),
            num_below=num_below,
            eviction_order=eviction_order,
            at_branches=at_branches,
            lag=int(plans_ahead),
        )
        if drafts is not None:  # else each page is named in the step that fills it, before its window passes it
            self.parts.empty_open()
            if isinstance(self.parts, DraftedParts):
                self.parts.set_space(drafts)
        self.orders_releases = any(self.parts.empties_open)
        self.match = self.parts.match
        self.needs = PartNeeds(self)
        self.incoming = IncomingParts(self)
        self.states = StatesByPage(
            self.parts,
            aligns=memory.aligns,
            defers=memory.has_states_by_page,
            renames=memory.renames_states,
            saves_inside=memory.saves_inside,
            adds_room=isinstance(self.parts, DraftedParts),
            drops_last=memory.drops_last,
        )
        self._num_given = 0
        """Total of blocks returned by `give` since the beginning."""
        self.keeps_time = self.parts.note_request is not None
        is_watched = below.watches_list or eviction_order is not None
        is_named = emit is not None and (not decoding.leaps_emitted or num_below > 0 or memory.has_states_by_page)
        is_named = is_named or (plans_ahead and (emit is not None or num_below > 0))
        is_periodic = bool(memory.retention_interval)  # parts of decodes are retained
        self.names_decodes = drafts is not None or ids is not None or is_named or is_watched or is_periodic or has_sizes
        self.publishes_all = self.names_decodes or emit is not None
        if not self.names_decodes:
            self.decodes = DecodesInGroups(self)
            self.take_pages = self._take_pages
            self.most_certain_steps = 1  # the releases of decodes may make room for another request

    @property
    def num_cached(self) -> int:
        """Blocks of parts that can be found and are not in use."""
        return self.parts.cached_bytes

    @property
    def num_used(self) -> int:
        """Blocks of parts that requests hold."""
        parts = self.parts
        return parts.total_bytes - parts.empty_bytes - parts.cached_bytes

    def unmoved(self, num_steps: int) -> PartsMoved:
        """Return what a leap states of the parts of its groups, if none moves in its steps."""
        return PartsMoved([[0] * num_steps for _ in self.parts.decodes.bounded], [], [])

    def set_time(self, now_ns: int) -> None:
        """Set the time of what is opened and closed from now on."""
        self.parts.now_ns = now_ns

    def counts(self) -> tuple[int, ...]:
        """Return the parts used and cached in each group, as one pair per group."""
        num_used, num_cached = self.parts.num_used, self.parts.num_cached
        counts: list[int] = []
        for index in range(len(num_used)):  # this runs in each step
            counts.append(num_used[index])
            counts.append(num_cached[index])
        return tuple(counts)

    def look(self, mark: Mark) -> None:
        """Set `mark` to the current counts if more blocks are in use than at the mark so far."""
        parts = self.parts
        num_used = parts.total_bytes - parts.empty_bytes - parts.cached_bytes  # `num_used`: this runs each step
        if num_used > mark.used:
            mark.used, mark.cached, mark.released = num_used, parts.cached_bytes, self.num_released
            mark.parts = self.counts()

    def num_evicted_parts(self) -> tuple[int, ...]:
        """Return the number of evicted parts of each group."""
        return tuple(self.parts.num_evicted)

    def held_by_others(self, match: Match) -> Held:
        """Return the parts of `match` that others hold."""
        return ReferencedByOthers(self.parts.tree, cast(RunMatch, match))

    def reach(self, content: Content, limit: int) -> tuple[int, ...]:
        """Return, per group, the longest prefix of at most `limit` full pages that it alone could resume from."""
        return self.parts.tree.reach(content, limit)

    def begin_blocks(self, page: int) -> int:
        """Return the blocks that a decode takes for the first token of `page`."""
        return self.group_needs.of_page(page)

    # Sequences ------------------------------------------------------------------------------------------

    def open(self, match: Match) -> GroupTable:
        """Hold `match`, for a sequence that begins with it; the cache must not have changed since it was made."""
        table = GroupTable(self.parts.begin(match.content, cast(RunMatch, match)), match.num_pages)
        if self.names_decodes:
            self.count()
        return table

    def num_held(self, table: BlockTable) -> int:
        """Return the blocks of all parts that `table` has, including those that others hold as well."""
        of_parts = cast(GroupTable, table)
        num_blocks = self.parts.held_bytes(of_parts.parts)
        if of_parts.tail is not None:
            num_blocks += self.parts.held_bytes(of_parts.tail)
        return num_blocks

    def extend(self, table: BlockTable, num_tokens: int, *, is_end: bool) -> None:
        """Take the blocks of tokens up to `num_tokens`, and make the pages that they fill findable."""
        self.parts.extend(cast(GroupTable, table).parts, num_tokens, is_end=is_end)
        self.count()

    def free_skipped(self, table: BlockTable, num_tokens: int, num_in_flight: int = 0) -> None:
        """Release parts that no token from `num_tokens`, the next to compute, on attends to. `count` must follow.

        `num_in_flight`: as of Cache.
        """
        self.parts.free_skipped(cast(GroupTable, table).parts, num_tokens, num_in_flight)

    # Decodes that are counted and not identified: Decodes describes them.

    def take_for(self, table: BlockTable, num_tokens: int) -> None:
        """Take the blocks of tokens up to `num_tokens`, as far as `table` does not have them."""
        self.parts.take_for(cast(GroupTable, table).parts, num_tokens)
        self.count()

    def take_page(self, table: BlockTable, page: int) -> None:
        """Take the parts of `page`, the next page of a decode; without ids, they are only counted."""
        if self.names_decodes:
            self.parts.take_next(cast(GroupTable, table).parts, 1)
        else:
            self.parts.take_pages(1)
        self.count()

    def take_due(self, tables: Sequence[BlockTable]) -> None:
        """Take the next page of each of `tables`."""
        for table in tables:
            self.parts.take_next(cast(GroupTable, table).parts, 1)
        self.count()

    def publish(self, table: BlockTable, num_tokens: int) -> None:
        """Make the full pages of the first `num_tokens` tokens findable."""
        self.parts.fill_page(cast(GroupTable, table).parts, num_tokens)
        self.num_published = self.parts.num_published

    def shrink(self, table: BlockTable, num_pages: int) -> None:
        """Release the parts of all but the first `num_pages` pages; the others contain no computed token."""
        self.parts.drop_pages(cast(GroupTable, table).parts, num_pages)
        self.count()

    def _take_pages(self, num_due: int) -> None:
        """Take the parts of `num_due` pages that decodes begin; they must be free."""
        parts = self.parts
        if parts.events is None:
            parts.take_pages(num_due)
        else:
            for _ in range(num_due):  # their evictions are separate events
                parts.take_pages(1)
        self.count()

    def stop_decoding(self, table: BlockTable, num_pages: int) -> None:
        """Stop following a decode, if the cache does."""
        parts = cast(GroupTable, table).parts
        parts.has_decoded = True
        if parts.is_decoding:
            self.parts.decodes.leave(parts, keeps_parts=True)
            parts.num_taken = num_pages

    def count(self) -> None:
        """Update the counts from those of the parts."""
        parts = self.parts
        if parts.shared is None:
            self.num_free = parts.empty_bytes + parts.cached_bytes - self.num_promised
        else:
            parts.give_back()
            self.num_free = parts.room_bytes
        self.num_released = parts.released_bytes + self._num_given
        self.num_evicted = parts.evicted_bytes
        self.num_published = parts.num_published

    def has_empty(self, count: int) -> bool:
        """Return whether `count` blocks can be taken without eviction."""
        return count <= self.parts.empty_bytes

    def take(self, count: int) -> list[PageId]:
        """Take `count` blocks, at most `num_free`; return their ids. Raise PageError for more than are free."""
        if not 0 <= count <= self.num_free:
            raise PageError(f"{count} blocks asked for, {self.num_free} free")
        block_ids = self.parts.take_blocks(count)
        self.count()
        return block_ids

    def give(self, count: int, page_ids: list[PageId] | None) -> None:
        """Return `count` blocks that were taken by `take`."""
        assert page_ids is not None and len(page_ids) == count
        self.parts.give_blocks(page_ids)
        self._num_given += count
        self.count()

    def reserved(self, num_pages: int, page_ids: list[PageId] | None) -> GroupTable:
        """Return a block table of blocks that were taken by `take`."""
        return GroupTable(RunTable(NOTHING, Span(NOTHING, b"", 0, 0, None, 0), 0, 1, 0), num_pages, page_ids)

    def keep(self, table: BlockTable) -> int:
        """Record that `table` stays when no request runs; return how many of its blocks no other `keep` covers."""
        return self.parts.keep(cast(GroupTable, table).parts, 1)

    def unkeep(self, table: BlockTable) -> int:
        """Undo a `keep`; return how many blocks are not kept any more."""
        return self.parts.keep(cast(GroupTable, table).parts, -1)

    # Blocks for a plan ---------------------------------------------------------------------------------------

    def tables(self, table: BlockTable, num_tokens: int) -> tuple[tuple[PageId, ...], ...]:
        """Return the page tables of a request, group by group, by GroupMemory.part_tables.

        Each has an entry for every page of its first `num_tokens` tokens. It is 0 if the group has no part of the page:
        no token that is computed from here on attends to such a page.
        """
        of_parts = cast(GroupTable, table).parts
        num_pages = -(-num_tokens // self.page_size)
        tables: list[tuple[PageId, ...]] = []
        for index, num_tables in enumerate(self._part_tables):
            if not num_tables:
                continue
            step = self.parts.part_blocks[index]
            open_ids, first_open = of_parts.open_ids[index], of_parts.first_open[index]
            parts = [(run.start, run.end, run.ids) for run in of_parts.held[index]]
            if open_ids:
                parts.append((first_open, of_parts.num_taken, open_ids))
            of_group = [[PageId(0)] * num_pages for _ in range(num_tables)]
            for start, end, ids in parts:
                if num_tables < step:
                    of_group[0][start:end] = ids.every(step)
                    continue
                blocks = list(ids)
                for place, row in enumerate(of_group):
                    row[start:end] = blocks[place::step]
            tables += [tuple(row[:num_pages]) for row in of_group]
        return tuple(tables)

    def blocks_of_page(self, table: BlockTable, page: int) -> tuple[PageId, ...]:
        """Return the blocks of `page`, one of the last that a request took, one for each page table."""
        of_parts = cast(GroupTable, table).parts
        blocks: list[PageId] = []
        for index, num_tables in enumerate(self._part_tables):
            if not num_tables:
                continue
            step, start, ids = self.parts.part_blocks[index], of_parts.first_open[index], of_parts.open_ids[index]
            if page < start:  # with pages of one token, it is full already
                run = next(run for run in reversed(of_parts.held[index]) if run.start <= page < run.end)
                start, ids = run.start, run.ids
            at = (page - start) * step
            blocks += ids.part(at, at + num_tables)
        return tuple(blocks)

    def state_blocks(self, table: BlockTable, start: int) -> tuple[tuple[PageId, ...], tuple[PageId, ...]]:
        """Return the blocks of a request's state before its next token `start`, and the blocks where the state is kept.

        The former are those of the snapshot from which the request begins, if `start` is the first token it computes;
        they are empty before the first token of the sequence. Both are empty without a group of states.
        """
        of_parts = cast(GroupTable, table).parts
        for held, state_ids in zip(of_parts.held, of_parts.state_ids, strict=True):
            if state_ids:
                own = tuple(state_ids)
                snapshot = next((run for run in held if run.end * self.page_size == start), None)
                begin = () if not start else own if snapshot is None else tuple(snapshot.ids)
                return begin, own
        return (), ()

    def take_snapshots(self, table: BlockTable) -> list[tuple[int, PartRun]]:
        """Return the snapshots that the last `extend` of a request asked for, each with the tokens before it."""
        of_parts = cast(GroupTable, table).parts
        snapshots, of_parts.snapshots = of_parts.snapshots, []
        return snapshots

    def evict(self, count: int) -> None:
        """Evict parts until `count` more blocks are empty."""
        self.parts.evict(self.parts.empty_bytes + count)
        self.count()

    def close(self, table: BlockTable, num_full_pages: int, num_pages: int) -> None:
        """Release everything that a request holds: parts of its full pages that can be found become cached."""
        self.parts.close(cast(GroupTable, table).parts, num_full_pages, num_pages)
        table.is_open = False
        self.count()

    def runs(self) -> Iterator[tuple[int, Content, int, int, int]]:
        """Return findable parts and their copies."""
        return self.parts.runs()

    def is_check_due(self, *, at_rest: bool) -> bool:
        """Return whether a sixteenth of all parts has moved since every part was last examined, or nothing runs."""
        num_moved = self.num_used + 2 * self.num_released + self.num_evicted
        return self._unchecked.is_due(num_moved, 0 if at_rest else (self.num_used + self.num_cached) // MOST_UNCHECKED)

    def check(self, tables: Iterable[tuple[BlockTable, int]], holds: Iterable[PinnedPages] = ()) -> None:
        """Assert laws L1 and L2 for every part, and that every block has one owner."""
        every = [cast(GroupTable, table) for table, _ in tables]
        taken_ids = [table.page_ids for table in every if table.page_ids is not None]
        of_parts = [table.parts for table in every if table.page_ids is None]
        of_parts += [table.tail for table in every if table.tail is not None]
        of_parts += [cast(PinnedParts, held).parts for held in holds]
        self.parts.check(of_parts, taken_ids)
        if not self.parts.is_shared:
            assert self.num_used + self.num_promised + self.num_free == self.pool.total, "L1: blocks are lost"
            assert self.num_free >= 0, "L1: blocks that were promised are gone"
        if self.pool.has_ids:
            assert self.pool.num_taken == self.num_used + self.num_cached, "L1: blocks are taken and not counted"


class PartNeeds(Needs):
    """Needs in blocks of parts, by the GroupNeeds of `cache`."""

    __slots__ = ("_cache", "_page_size", "_parts", "_rules")

    def __init__(self, cache: GroupPages) -> None:
        super().__init__("the memory has")
        self._cache = cache
        self._rules = cache.group_needs
        self._parts = cache.parts
        self._page_size = cache.page_size

    def to_admit(self, match: Match, num_known: int, budget: int, num_kept: int = 0) -> int:
        """Return the blocks that must be free for a request that begins with `match`, by GroupNeeds.to_admit."""
        # Blocks that the request may take whatever it needs; none are certain if other models take part.
        num_certain = -1 if self._parts.shared is not None else self._cache.num_free - num_kept
        num_wanted = self._rules.at_most_whole(num_known)
        if num_wanted <= num_certain:  # as `to_admit` does: this runs for every request
            return num_kept + num_wanted
        start, end, prefill_end = self._first_step(match, num_known, budget)
        held = self._cache.held_by_others(match)
        return num_kept + self._rules.to_admit(start, num_known, end, held, num_certain, prefill_end=prefill_end)

    def least_to_admit(self, match: Match, num_known: int, budget: int) -> int:
        """Return a lower bound of `to_admit` that stays valid if parts of `match` are evicted."""
        start, end, prefill_end = self._first_step(match, num_known, budget)
        held = self._cache.held_by_others(match)
        return self._rules.least_to_admit(start, num_known, end, held, prefill_end=prefill_end)

    def _first_step(self, match: Match, num_known: int, budget: int) -> tuple[int, int, int]:
        """Return the tokens before the first step of a request with `match`, after it, and after its prefill."""
        start = match.num_pages * self._page_size
        return start, min(num_known, start + budget), max(match.content.num_prompt_tokens, num_known - 1)

    def watch(self) -> None:
        """Observe nothing."""

    def may_shrink(self, num_pages: int) -> bool:
        """Return True: what becomes findable of a window may follow any page."""
        return True

    def to_run(self, table: BlockTable, start: int, end: int) -> int:
        """Return the blocks that tokens [start, end) need and `table` does not have."""
        parts = cast(GroupTable, table).parts
        return self._parts.missing_bytes(parts, end - parts.num_tokens)

    def to_finish(self, table: BlockTable, num_tokens: int) -> int:
        """Return the most blocks that `table` takes at one time, beyond its own, until it has `num_tokens`."""
        return max(0, self._rules.to_compute(num_tokens) - self._cache.num_held(table))

    def to_compute(self, num_known: int, page_size: int) -> int:
        """Return the most blocks that `num_known` tokens need at one time, wherever their chunks begin and end."""
        return self._rules.to_compute(num_known)

    def alone(self, num_tokens: int, page_size: int, enough: int = 0) -> int:
        """Return the most blocks of a request that may begin from snapshots, if they are more than `enough`, else 0."""
        if self._rules.at_most_whole(num_tokens) <= enough:
            return 0
        num_blocks = self._rules.at_most(num_tokens)
        return num_blocks if num_blocks > enough else 0

    def most_tokens(self, limit: int, page_size: int) -> int:
        """Return the longest sequence, of up to `limit` tokens, that can run in this memory; 0 if none can."""
        return self._rules.most_tokens(limit, self._cache.pool.total)

    def words(self, num_blocks: int, page_size: int, asked: str) -> str:
        """Return the clause that a request with the tokens `asked` needs `num_blocks`."""
        size, most_new = self._cache.block_bytes, self._rules.most_new
        return f"needs {num_blocks} blocks of {size:,} bytes for {asked}, with {most_new} tokens a step"

    def to_hold(self, match: Match) -> int:
        """Return how many blocks a sequence that begins with `match` holds."""
        return self._parts.held_after(cast(RunMatch, match))

    def lent_of(self, match: Match) -> int:
        """Return how many blocks of `match` stores hold and no request does."""
        return self._parts.held_after(cast(RunMatch, match), only_lent=True)

    def freed_by(self, tables: Iterable[tuple[BlockTable | None, int]]) -> Iterator[int]:
        """Yield the number of blocks that go out of use as each of `tables` is closed in turn."""
        yield from self._parts.freed_by(cast(GroupTable, table).parts for table, _ in tables)


class DecodesInGroups(FollowedDecodes):
    """Decodes of `cache` that are counted and not identified: Decodes describes them."""

    __slots__ = ("_cache", "_parts")

    def __init__(self, cache: GroupPages) -> None:
        self._cache = cache
        self._parts = cache.parts

    def start(self, table: BlockTable, num_tokens: int, admission: int, *, is_settled: bool = True) -> None:
        """Let a sequence compute one token per step from the next on."""
        parts = cast(GroupTable, table).parts
        parts.num_tokens = num_tokens  # a decode that was stalled may have computed one since it published
        self._parts.decodes.start(parts, admission, is_settled=is_settled)

    def publish_due(self, first: int, end: int) -> None:
        """Make the pages findable that decodes fill in this step, by Decodes.fill_pages."""
        self._parts.decodes.fill_pages(first, end)
        self._cache.num_published = self._parts.num_published

    def end_step(self) -> None:
        """Let decodes release the parts that none of their later tokens attends to. `count` must follow."""
        self._parts.decodes.end_step()

    @property
    def counts_turns(self) -> bool:
        """Whether the turns of decodes can be counted: nothing else takes memory, and no reader sees the order."""
        return self._parts.events is None and self._parts.shared is None

    def begin_releases(self, table: BlockTable, num_tokens: int, num_in_flight: int, admission: int) -> None:
        """Release what a sequence that is about to start no longer needs. `count` must follow."""
        parts = self._parts
        empty_bytes = parts.empty_bytes
        parts.free_skipped(cast(GroupTable, table).parts, num_tokens, num_in_flight)
        parts.decodes.note_turn(admission, parts.empty_bytes - empty_bytes)

    def needs_turns(self, num_due: int) -> bool:
        """Return whether it matters to the next step in which order `num_due` decodes take pages."""
        return self._parts.decodes.needs_turns(num_due)

    def make_room_in_turns(self, tables: Sequence[BlockTable]) -> None:
        """Let so many blocks be empty that `tables` can take a page each, as if each took it at its turn."""
        self._parts.decodes.make_room_in_turns([cast(GroupTable, table).parts for table in tables])
        self._cache.count()

    def defer_skipped(self, tables: Sequence[BlockTable]) -> None:
        """End the step, but postpone the releases of `tables` until `free_skipped` is called for each."""
        self._parts.decodes.defer_skipped([cast(GroupTable, table).parts for table in tables])

    def fills_known_page(self) -> bool:
        """Return whether a decode fills a page in this step that other requests may find."""
        decodes = self._parts.decodes
        return bool(decodes.filling[decodes.step % self._cache.page_size])

    def leap(self, most_steps: int, num_wanted: int, first_step: int, starts_ns: Sequence[int]) -> Leap:
        """Do up to `most_steps` steps of decodes while a request waits for `num_wanted` blocks, by Decodes.leap."""
        done = self._parts.decodes.leap(most_steps, num_wanted, first_step, starts_ns)
        self._cache.count()
        return Leap(done.taken, PartsMoved(done.listed, done.emptied, done.evicted))


class IncomingParts(Incoming):
    """Parts of `cache` that a load fills, or another engine."""

    __slots__ = ("_cache", "_page_size", "_parts", "_rules")

    def __init__(self, cache: GroupPages) -> None:
        self._cache = cache
        self._parts = cache.parts
        self._rules = cache.group_needs
        self._page_size = cache.page_size

    def open_to_load(self, match: Match, num_known: int, on_device: Match) -> GroupTable:
        """Hold the device's parts of `match`, of device and tiers together, and take those that a load fills."""
        found = cast(RunMatch, match)
        table = GroupTable(self._parts.begin_load(found.content, found), found.num_pages)
        table.parts.branch = cast(RunMatch, on_device).branch * self._page_size
        self._cache.count()
        return table

    def publish_loaded(self, table: BlockTable, num_pages: int) -> None:
        """Make the parts of the first `num_pages` pages findable; the state after them is of this step, as in vLLM."""
        parts = cast(GroupTable, table).parts
        self._parts.arrive(parts, [num_pages] * len(self._cache.memory.groups))
        self._parts.note_arrived(parts, num_pages)
        self._cache.count()

    def to_reserve(self, found: Match, num_known: int) -> int:
        """Return the blocks by GroupNeeds.to_admit, of device and tier together."""
        start = found.num_pages * self._page_size
        end = min(num_known, start + self._rules.most_new)
        return self._rules.to_admit(start, num_known, end, self._cache.held_by_others(found))

    def to_front(self, match: Match, num_front: int) -> int:
        """Return the most blocks of windows that are held while `num_front` pages after `match` are computed."""
        pieces = self._parts.tree.pieces(cast(RunMatch, match))
        return self._rules.front([sum(end - start for _, start, end in of_group) for of_group in pieces], num_front)

    def held_reserved(self, match: Match, found: Match, num_known: int, num_front: int) -> int:
        """Return the blocks that `open_reserved` holds and promises."""
        num_wanted = self._wanted(match, found, num_known, num_front)
        held = taken = 0
        for index, pieces in enumerate(self._parts.tree.pieces(cast(RunMatch, found))):
            for run, start, end in pieces:
                num_blocks = (end - start) * self._parts.part_blocks[index]
                held += num_blocks
                if not run.holders or run.list_index != index:
                    taken += num_blocks
        return held + max(0, num_wanted - taken)

    def _wanted(self, match: Match, found: Match, num_known: int, num_front: int) -> int:
        num_wanted = self.to_reserve(found, num_known)
        return num_wanted + self.to_front(match, num_front) if num_front else num_wanted

    def open_reserved(self, match: Match, found: Match, num_known: int, num_front: int) -> GroupTable:
        """Hold the device's parts of `found`, take parts for the rest, and promise the others that are wanted."""
        of_load = cast(RunMatch, found)
        if num_front:
            num_reserved = self.held_reserved(match, found, num_known, num_front)
            table = self.open_with_front(match, of_load, match.num_pages + num_front, num_reserved)
        else:
            table = self.open_offered(match.content, of_load, self.to_reserve(found, num_known))
        if self._cache.memory.retention_interval is not None:
            table.loading.branch = cast(RunMatch, match).branch * self._page_size
        return table

    def open_offered(self, content: Content, found: RunMatch, num_wanted: int) -> GroupTable:
        """Hold the device's parts of `found`, take parts for the rest, and promise the others of `num_wanted` blocks.

        That many blocks must be free.
        """
        num_free = self._cache.num_free
        table = GroupTable(self._parts.begin_load(content, found), found.num_pages)
        self._cache.count()
        self._promise(table, max(0, num_wanted - (num_free - self._cache.num_free)))
        return table

    def open_with_front(self, match: Match, found: RunMatch, front_end: int, num_reserved: int) -> GroupTable:
        """Hold `match`, after which pages are computed up to `front_end`, and take parts for the rest of `found`.

        It has `num_reserved` blocks until `arrive`: those that it does not hold are promised to it.
        """
        table = GroupTable(self._parts.begin(match.content, cast(RunMatch, match)), found.num_pages)
        table.tail = self._parts.begin_load(match.content, found, front_end)
        table.num_reserved = num_reserved
        self._promise(table, max(0, num_reserved - self._cache.num_held(table)))
        return table

    def begin_front(self, table: BlockTable, num_tokens: int, num_in_flight: int) -> None:
        """Release the windows of a front that no token from `num_tokens` on attends to, for its next tokens."""
        of_parts = cast(GroupTable, table)
        self._promise(of_parts, 0)
        self._parts.free_skipped(of_parts.parts, num_tokens, num_in_flight)

    def extend_front(self, table: BlockTable, num_tokens: int) -> None:
        """Take blocks that are promised to the request for the tokens of its front up to `num_tokens`."""
        of_parts = cast(GroupTable, table)
        self._parts.extend(of_parts.parts, num_tokens)
        self._promise(of_parts, max(0, of_parts.num_reserved - self._cache.num_held(of_parts)))

    def arrive(self, table: BlockTable, num_pages: int, end: int) -> bool:
        """Go on after the loaded pages, if all have arrived."""
        self.join_front(table)
        return num_pages == end

    def join_front(self, table: BlockTable) -> None:
        """Go on after the loaded pages: those before are computed, or given up."""
        of_parts = cast(GroupTable, table)
        if of_parts.tail is not None:
            self._parts.join_front(of_parts.parts, of_parts.tail)
            of_parts.parts, of_parts.tail = of_parts.tail, None
            self._cache.count()

    def end_promise(self, table: BlockTable) -> None:
        """Make the blocks promised to a block table free for all."""
        self._promise(cast(GroupTable, table), 0)

    def _promise(self, table: GroupTable, num_blocks: int) -> None:
        cache = self._cache
        cache.num_promised += num_blocks - table.num_promised
        table.num_promised = num_blocks
        self._parts.promised_bytes = cache.num_promised
        cache.count()

    def begin_run(self, table: BlockTable) -> None:
        """Release the windows with which the front was computed."""
        self._cache.free_skipped(table, table.num_pages * self._page_size)
        self._cache.count()

    def drop(self, table: BlockTable) -> None:
        """Release all parts, and what is promised."""
        of_parts = cast(GroupTable, table)
        self.join_front(table)
        self._promise(of_parts, 0)
        self._cache.close(table, table.num_pages, table.num_pages)

    def held(self, found: Match, end: int) -> int:
        """Return the blocks of all parts that are found or loaded."""
        return self._parts.held_after(cast(RunMatch, found))

    def to_load(self, match: Match, found: Match, end: int) -> int:
        """Return the blocks of parts to load, and of resident ones without a holder."""
        missing, idle, _ = self._counts_of(found, 0)
        num_blocks = self._rules.to_load(missing, idle)
        if self._cache.memory.aligns:
            start = match.num_pages * self._page_size
            num_blocks += self._rules.passed_states(start, self._cache.held_by_others(match))
        return num_blocks

    def to_admit(self, match: Match, found: Match, num_known: int, budget: int, num_kept: int = 0) -> int:
        """Return the blocks by GroupNeeds.to_admit_loaded."""
        start, loaded = match.num_pages * self._page_size, found.num_pages * self._page_size
        end = min(num_known, loaded + budget)
        counts = self._counts_of(found, match.num_pages)
        held, prefill_end = self._cache.held_by_others(match), max(match.content.num_prompt_tokens, num_known - 1)
        return self._rules.to_admit_loaded(
            start, loaded, num_known, end, counts, held, prefill_end=prefill_end, num_kept=num_kept
        )

    def to_go_on(self, table: BlockTable, num_known: int, budget: int, num_planned: int = 0) -> int:
        """Return the blocks by GroupNeeds.to_go_on."""
        parts = cast(GroupTable, table).parts
        start, state_blocks = parts.num_tokens, self._parts.missing_state_bytes(parts)
        end, prefill_end = min(num_known, start + budget), parts.prefill_end
        return self._rules.to_go_on(
            parts.num_taken, num_known, start - num_planned, end, state_blocks, prefill_end=prefill_end
        )

    def _counts_of(self, found: Match, num_hit: int) -> tuple[list[int], list[int], list[int]]:
        """Return, by group, the numbers of parts of `found`: to load, without a holder, and resident after a hit."""
        missing: list[int] = []
        idle: list[int] = []
        beyond: list[int] = []
        for index, pieces in enumerate(self._parts.tree.pieces(cast(RunMatch, found))):
            num_missing = num_idle = num_beyond = 0
            for run, start, end in pieces:
                if run.list_index != index:
                    num_missing += end - start
                    continue
                if not run.holders:
                    num_idle += end - start
                if end > num_hit:
                    num_beyond += end - max(start, num_hit)
            missing.append(num_missing)
            idle.append(num_idle)
            beyond.append(num_beyond)
        return missing, idle, beyond

    def num_sent(self, start: int, num_tokens: int, page_size: int) -> int:
        """Return the blocks of the parts with which the last of `num_tokens` tokens is computed again."""
        return self._rules.sent(start, num_tokens)

    def to_receive(self, match: Match, num_tokens: int) -> int:
        """Return the blocks that must be free to `open_to_receive` a prompt of `num_tokens` tokens after `match`."""
        start = match.num_pages * self._page_size
        return self._rules.to_receive(start, num_tokens, self._cache.held_by_others(match))

    def open_to_receive(self, match: Match, num_tokens: int) -> GroupTable:
        """Hold `match`, and take the further parts with which the last of `num_tokens` tokens is computed again."""
        parts = self._parts.begin_to_receive(match.content, cast(RunMatch, match), num_tokens)
        self._cache.count()
        return GroupTable(parts, parts.num_taken)

    def receive(self, table: BlockTable, num_tokens: int) -> None:
        """Make the full pages of the first `num_tokens` tokens findable."""
        self._parts.receive(cast(GroupTable, table).parts)
        self._cache.count()


class StatesByPage(States):
    """States in `parts`: one for each page at whose end a state was kept."""

    __slots__ = ("_parts",)

    def __init__(
        self,
        parts: RunCache,
        *,
        aligns: bool,
        defers: bool,
        renames: bool,
        saves_inside: bool,
        adds_room: bool,
        drops_last: bool,
    ) -> None:
        super().__init__(
            aligns=aligns,
            defers=defers,
            renames=renames,
            saves_inside=saves_inside,
            adds_room=adds_room,
            drops_last=drops_last,
        )
        self._parts = parts

    def begin_step(self) -> None:
        """Begin a step: no state is computed in it yet."""
        self._parts.computed.clear()

    def note(self, content: Content, page: int) -> None:
        """Treat the state after the first `page` pages of `content` as one that the current step computes."""
        self._parts.computed.append((content, page - 1, page))

    def is_of_step(self, match: Match) -> bool:
        """Return whether the current step computes the state after `match`, or a copy of it."""
        return self._parts.is_of_step(cast(RunMatch, match))

    def begin(self, table: BlockTable, prefill_end: int) -> None:
        """Begin a sequence that decodes after `prefill_end` tokens."""
        cast(GroupTable, table).parts.prefill_end = prefill_end

    def branch_of(self, match: Match) -> int:
        """Return the tokens up to which groups that keep all tokens have its content, if that is more than `match`."""
        return cast(RunMatch, match).branch * self._parts.page_size

    def branch(self, table: BlockTable) -> int:
        """Return the same for a sequence, as of when it began."""
        return cast(GroupTable, table).parts.branch

    def num_found(self, content: Content, limit: int) -> int:
        """Return how many of the first `limit` pages of `content` the groups that keep all tokens have."""
        reach = self._parts.tree.reach(content, limit)
        keeping = zip(self._parts.groups, reach, strict=True)
        return min(num_pages for group, num_pages in keeping if not (group.is_state or group.is_bounded))

"""A cache with KV groups as schedulers, routers and reports see a cache: parts of pages, held by the run.

In a replay parts are counted. Where a real model or a mock computes, or something reads page events, a part is made of
blocks that have ids: keys and values of as many tokens as a page, in as many layers as divide the layers of every
group, so that any part can be made of any blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import cast

from kvarts.content import Content
from kvarts.event_log import Tell
from kvarts.events import PartsMoved
from kvarts.kv.cache import Holding, Leap
from kvarts.kv.eviction import EvictionOrder
from kvarts.kv.group_memory import GroupMemory
from kvarts.kv.match import Match
from kvarts.kv.node import NOTHING, HeldPages
from kvarts.kv.part_pages import Held, PartPages
from kvarts.kv.pool import CountPool, IdPool, PageError, PageId
from kvarts.kv.run_cache import RunCache
from kvarts.kv.run_events import RunEvents
from kvarts.kv.run_leaps import leap
from kvarts.kv.run_loads import begin_load
from kvarts.kv.spans import PartRun, RunHolding, RunMatch, Span

__all__ = ["GroupPages", "HeldParts", "PartHolding", "PartMatch"]


class PartMatch(Match):
    """What a cache with KV groups has of `content`. `found`: the pages that every group can go on from."""

    __slots__ = ("found",)

    def __init__(self, content: Content, found: RunMatch) -> None:
        super().__init__(content, [], found.num_pages, 0)
        self.found = found


class PartHolding(Holding):
    """What one running request, or a pin, holds. `parts`: in every group. `page_ids`: blocks that are no parts.

    `num_promised`: blocks that are kept for it while it waits for a load, which it may take to compute the rest.
    """

    __slots__ = ("num_promised", "parts")

    def __init__(self, parts: RunHolding, num_pages: int = 0, block_ids: list[PageId] | None = None) -> None:
        super().__init__(parts.content, [], num_pages, block_ids)
        self.parts = parts
        self.num_promised = 0


class HeldParts(HeldPages):
    """Parts that a transfer holds."""

    __slots__ = ("parts",)

    def __init__(self, parts: RunHolding) -> None:
        super().__init__([], 0)
        self.parts = parts


class HeldByOthers:
    """What running requests hold of what was found: `Held`."""

    __slots__ = ("_cache", "_found")

    def __init__(self, cache: RunCache, found: RunMatch) -> None:
        self._cache = cache
        self._found = found

    def num_shared(self, group: int, first_page: int) -> int:
        """Return how many parts of a group they hold that a token needs with pages from `first_page` on."""
        return self._cache.num_shared(self._found, group, first_page)

    def num_idle(self, group: int) -> int:
        """Return how many snapshots of a group they do not hold."""
        return self._cache.num_idle(self._found, group)


class GroupPages(PartPages):
    """PartPages of `num_blocks` blocks, held by the run, see RunCache.

    `with_ids`: blocks have ids. `tell` receives events of parts. With either, every page of a decode is findable as
    soon as it is full. Otherwise the cache follows decodes itself: it knows the steps in which they take pages and
    release some, and can leap over them. `has_below`: a tier below has parts as well; `watches_list`: it looks at what
    is about to be evicted, so the cache follows no decodes. `eviction_order`: says which run goes next, and hears of
    each release, so the cache follows no decodes either; left out, the least recently released goes next.
    """

    __slots__ = ("_num_given", "num_promised", "parts")

    def __init__(
        self,
        memory: GroupMemory,
        *,
        num_blocks: int,
        page_size: int,
        most_new_tokens: int,
        with_ids: bool = False,
        tell: Tell | None = None,
        has_below: bool = False,
        watches_list: bool = False,
        eviction_order: EvictionOrder | None = None,
    ) -> None:
        ids = IdPool(num_blocks) if with_ids else None
        pool = CountPool(num_blocks) if ids is None else ids
        super().__init__(pool, memory, page_size=page_size, most_new_tokens=most_new_tokens)
        self.parts = RunCache(
            memory,
            page_size=page_size,
            total_bytes=num_blocks * self.block_bytes,
            blocks=ids,
            events=None if tell is None else RunEvents(tell),
            has_below=has_below,
            eviction_order=eviction_order,
        )
        self.num_promised = 0
        """Blocks that are free, and are kept for requests that will take them."""
        self._num_given = 0
        """Blocks that `give` gave back since the beginning."""
        self.keeps_time = self.parts.note_request is not None
        is_watched = watches_list or eviction_order is not None
        self.names_decodes = self.publishes_all = with_ids or tell is not None or is_watched
        if not self.names_decodes:
            self.follows_decodes = True
            self.take_pages = self._take_pages
            self.most_certain_steps = 1  # what decodes release may let a request in

    @property
    def num_cached(self) -> int:
        """Blocks of parts that can be found and are not in use."""
        return self.parts.cached_bytes // self.block_bytes

    @property
    def num_used(self) -> int:
        """Blocks of parts that requests hold."""
        parts = self.parts
        return (parts.total_bytes - parts.empty_bytes - parts.cached_bytes) // self.block_bytes

    def set_time(self, now_ns: int) -> None:
        """Set the time of what is opened and closed from now on."""
        self.parts.now_ns = now_ns

    @property
    def is_shared(self) -> bool:
        """Whether other models have parts of the same memory."""
        return self.parts.is_shared

    def counts(self) -> tuple[int, ...]:
        """Return the parts used and the parts cached in each group, one pair a group."""
        parts = self.parts
        counts = [0] * (2 * len(parts.num_used))
        counts[::2], counts[1::2] = parts.num_used, parts.num_cached
        return tuple(counts)

    def num_evicted_parts(self) -> tuple[int, ...]:
        """Return the parts evicted of each group, one number a group."""
        return tuple(self.parts.num_evicted)

    def _match(self, content: Content, limit: int) -> PartMatch:
        return PartMatch(content, self.parts.match(content, limit))

    def held_by_others(self, match: Match) -> Held:
        """Return what others hold of what was found."""
        return HeldByOthers(self.parts, cast(PartMatch, match).found)

    def reach(self, content: Content, limit: int) -> tuple[int, ...]:
        """Return, per group, the longest prefix of at most `limit` full pages that it alone could resume from."""
        return self.parts.reach(content, limit)

    def num_pages_of(self, match: Match) -> int:
        """Return how many blocks a sequence holds that begins with what was found."""
        return self.parts.held_after(cast(PartMatch, match).found) // self.block_bytes

    def open(self, match: Match) -> PartHolding:
        """Hold what was found, for a sequence that begins with it; the cache must not have changed since."""
        of_parts = cast(PartMatch, match)
        holding = PartHolding(self.parts.begin(of_parts.content, of_parts.found), match.num_pages)
        if self.names_decodes:
            self.count()
        return holding

    def num_held(self, holding: Holding) -> int:
        """Return the blocks of all parts that `holding` has, those that others hold as well included."""
        return self.parts.held_bytes(cast(PartHolding, holding).parts) // self.block_bytes

    def num_to_run(self, holding: Holding, start: int, end: int) -> int:
        """Return the blocks that tokens [start, end) need and `holding` does not have."""
        return self.parts.missing_bytes(cast(PartHolding, holding).parts, end - start) // self.block_bytes

    def extend(self, holding: Holding, num_tokens: int, *, is_end: bool) -> None:
        """Take what tokens up to `num_tokens` need, and make the pages that they fill findable."""
        self.parts.extend(cast(PartHolding, holding).parts, num_tokens, is_end=is_end)
        self.count()

    def settle(self, holding: Holding, num_tokens: int) -> None:
        """Release what no token from `num_tokens` on attends to. `count` must follow."""
        self.parts.settle(cast(PartHolding, holding).parts, num_tokens)

    # Decodes that are counted and not named: see RunCache.start_decoding.

    def take_page(self, holding: Holding, page: int) -> None:
        """Take the parts of `page`, the next of a decode; without ids it is counted and not named."""
        if self.names_decodes:
            self.parts.take_page(cast(PartHolding, holding).parts)
        else:
            self.parts.take_pages(1)
        self.count()

    def take_due(self, holdings: Sequence[Holding], page_of: Sequence[int]) -> None:
        """Take the next pages of decodes."""
        for holding in holdings:
            self.parts.take_page(cast(PartHolding, holding).parts)
        self.count()

    def publish(self, holding: Holding, num_tokens: int) -> None:
        """Make the full pages of the first `num_tokens` tokens findable."""
        self.parts.fill_page(cast(PartHolding, holding).parts, num_tokens)
        self.num_published = self.parts.num_published

    def shrink(self, holding: Holding, num_pages: int) -> None:
        """Give back the parts of all but the first `num_pages` pages, in which no computed token is."""
        self.parts.drop_pages(cast(PartHolding, holding).parts, num_pages)
        self.count()

    def _take_pages(self, num_due: int) -> None:
        """Take the parts of `num_due` pages that decodes begin, which are free."""
        self.parts.take_pages(num_due)
        self.count()

    def start_decoding(self, holding: Holding, admission: int) -> None:
        """Let a settled sequence compute a token in every step from the next on."""
        self.parts.start_decoding(cast(PartHolding, holding).parts, admission)

    def stop_decoding(self, holding: Holding, num_pages: int) -> None:
        """Stop following a decode, if the cache does."""
        parts = cast(PartHolding, holding).parts
        if parts.is_decoding:
            self.parts.decodes.leave(parts)
            parts.num_taken = num_pages

    def publish_due(self) -> None:
        """Make pages findable that decodes fill in this step, and that others may find."""
        self.parts.fill_pages()
        self.num_published = self.parts.num_published

    def fills_known_page(self) -> bool:
        """Return whether there are such pages in this step."""
        decodes = self.parts.decodes
        return bool(decodes.filling[decodes.step % self.page_size])

    def end_step(self) -> None:
        """Let decodes give back what none of their later tokens sees. `count` must follow."""
        self.parts.end_step()

    def leap(self, most_steps: int, num_wanted: int) -> Leap:
        """Do up to `most_steps` steps of decodes while a request waits for `num_wanted` blocks, see RunLeap."""
        done = leap(self.parts, most_steps, num_wanted * self.block_bytes)
        self.count()
        return Leap(done.taken, PartsMoved(done.listed, done.emptied, done.evicted))

    def count(self) -> None:
        """Take note of what was taken and given back."""
        parts, block_bytes = self.parts, self.block_bytes
        if parts.shared is None:
            self.num_free = (parts.empty_bytes + parts.cached_bytes) // block_bytes - self.num_promised
        else:
            parts.give_back()
            self.num_free = parts.room_bytes // block_bytes
        self.num_released = parts.released_bytes // block_bytes + self._num_given
        self.num_evicted = parts.evicted_bytes // block_bytes
        self.num_published = parts.num_published

    def has_empty(self, count: int) -> bool:
        """Return whether `count` blocks can be taken and nothing is evicted for them."""
        return count * self.block_bytes <= self.parts.empty_bytes

    def take(self, count: int) -> list[PageId]:
        """Take `count` blocks, at most `num_free`; return their ids. Raise PageError for more than are free."""
        if not 0 <= count <= self.num_free:
            raise PageError(f"{count} blocks asked for, {self.num_free} free")
        block_ids = self.parts.take_blocks(count)
        self.count()
        return block_ids

    def give(self, count: int, page_ids: list[PageId] | None) -> None:
        """Give back `count` blocks that `take` took."""
        assert page_ids is not None and len(page_ids) == count
        self.parts.give_blocks(page_ids)
        self._num_given += count
        self.count()

    def reserved(self, num_pages: int, page_ids: list[PageId] | None) -> PartHolding:
        """Return blocks that `take` took as something that holds them."""
        return PartHolding(RunHolding(NOTHING, Span(NOTHING, b"", 0, 0, None, 0), 0, 1, 0), num_pages, page_ids)

    def keep(self, holding: Holding) -> int:
        """Note that `holding` stays when no request runs; return how many of its blocks nothing else keeps."""
        return self.parts.keep(cast(PartHolding, holding).parts) // self.block_bytes

    def unkeep(self, holding: Holding) -> int:
        """Undo a `keep`; return how many blocks nothing keeps any more."""
        return self.parts.unkeep(cast(PartHolding, holding).parts) // self.block_bytes

    # Loads -------------------------------------------------------------------------------------------------

    def held_of(self, found: RunMatch) -> Held:
        """Return what others hold of what device and tier have together."""
        return HeldByOthers(self.parts, found)

    def num_held_while_loading(self, found: RunMatch, num_wanted: int) -> int:
        """Return the blocks that `open_offered` holds and promises."""
        held = taken = 0
        for index, pieces in enumerate(self.parts.tree.pieces(found)):
            for run, start, end in pieces:
                num_blocks = (end - start) * self.parts.part_blocks[index]
                held += num_blocks
                if not run.holders or run.list_index != index:
                    taken += num_blocks
        return held + max(0, num_wanted - taken)

    def open_offered(self, content: Content, found: RunMatch, num_wanted: int) -> PartHolding:
        """Hold what the device has of `found`, and take parts for the rest; of `num_wanted` blocks, promise the others.

        So many are free.
        """
        num_free = self.num_free
        holding = PartHolding(begin_load(self.parts, content, found), found.num_pages)
        self.count()
        self._promise(holding, max(0, num_wanted - (num_free - self.num_free)))
        return holding

    def end_promise(self, holding: Holding) -> None:
        """Let anyone take what was promised to a holding: its request is about to."""
        self._promise(cast(PartHolding, holding), 0)

    def _promise(self, holding: PartHolding, num_blocks: int) -> None:
        self.num_promised += num_blocks - holding.num_promised
        holding.num_promised = num_blocks
        self.parts.promised_bytes = self.num_promised * self.block_bytes
        self.count()

    # What a plan names -------------------------------------------------------------------------------------

    def tables(self, holding: Holding, num_tokens: int) -> tuple[tuple[PageId, ...], ...]:
        """Return the page tables of a request, group by group, one for every block of a part; states have none.

        Each has an entry for every page of its first `num_tokens` tokens, which is 0 where the group has no part of it:
        no token that is computed from here on attends to such a page.
        """
        of_parts = cast(PartHolding, holding).parts
        num_pages = -(-num_tokens // self.page_size)
        tables: list[tuple[PageId, ...]] = []
        for index, group in enumerate(self.parts.groups):
            if group.is_state:
                continue
            step = self.parts.part_blocks[index]
            open_ids, first_open = of_parts.open_ids[index], of_parts.first_open[index]
            for place in range(step):
                table = [PageId(0)] * num_pages
                for run in of_parts.held[index]:
                    table[run.start : run.end] = run.ids[place::step]
                if open_ids:
                    table[first_open : of_parts.num_taken] = open_ids[place::step]
                tables.append(tuple(table[:num_pages]))
        return tuple(tables)

    def blocks_of_page(self, holding: Holding, page: int) -> tuple[PageId, ...]:
        """Return the blocks of `page`, one of the last that a request took, one for every page table."""
        of_parts = cast(PartHolding, holding).parts
        blocks: list[PageId] = []
        for index, group in enumerate(self.parts.groups):
            if group.is_state:
                continue
            step, start, ids = self.parts.part_blocks[index], of_parts.first_open[index], of_parts.open_ids[index]
            if page < start:  # it is full already, with pages of one token
                run = next(run for run in reversed(of_parts.held[index]) if run.start <= page < run.end)
                start, ids = run.start, run.ids
            at = (page - start) * step
            blocks += ids[at : at + step]
        return tuple(blocks)

    def states(self, holding: Holding, start: int) -> tuple[tuple[PageId, ...], tuple[PageId, ...]]:
        """Return the blocks of the state of a request before its token `start`, the next, and those where it is kept.

        The first are those of the snapshot that the request began from, if `start` is its first token; there are none
        before the first token of all. Both are empty without a group of states.
        """
        of_parts = cast(PartHolding, holding).parts
        for held, state_ids in zip(of_parts.held, of_parts.state_ids, strict=True):
            if state_ids:
                own = tuple(state_ids)
                snapshot = next((run for run in held if run.end * self.page_size == start), None)
                begin = () if not start else own if snapshot is None else tuple(snapshot.ids)
                return begin, own
        return (), ()

    def take_snapshots(self, holding: Holding) -> list[tuple[int, PartRun]]:
        """Return the snapshots that the last `extend` of a request asks for, each with the tokens after which."""
        of_parts = cast(PartHolding, holding).parts
        snapshots, of_parts.snapshots = of_parts.snapshots, []
        return snapshots

    def shed(self, count: int) -> None:
        """Evict parts until `count` more blocks are empty."""
        self.parts.evict(self.parts.empty_bytes + count * self.block_bytes)
        self.count()

    def freed_by(self, holdings: Iterable[tuple[Holding | None, int]]) -> Iterator[int]:
        """Return how many blocks go out of use as each of `holdings` is closed, one by one."""
        for num_bytes in self.parts.freed_by(cast(PartHolding, holding).parts for holding, _ in holdings):
            yield num_bytes // self.block_bytes

    def close(self, holding: Holding, num_full_pages: int, num_pages: int) -> None:
        """Release everything that a request holds: parts of its full pages that can be found become cached."""
        self.parts.close(cast(PartHolding, holding).parts, num_full_pages, num_pages)
        holding.is_open = False
        self.count()

    def runs(self) -> Iterator[tuple[int, Content, int, int, int]]:
        """Return findable parts and their copies."""
        return self.parts.runs()

    def check(self, holdings: Iterable[tuple[Holding, int]], holds: Iterable[HeldPages] = ()) -> None:
        """Assert laws L1 and L2 for every part, and that every block has one owner."""
        every = [cast(PartHolding, holding) for holding, _ in holdings]
        taken_ids = [block_id for holding in every for block_id in holding.page_ids or ()]
        of_parts = [holding.parts for holding in every if holding.page_ids is None]
        of_parts += [cast(HeldParts, held).parts for held in holds]
        self.parts.check(of_parts, taken_ids)
        if not self.parts.is_shared:
            assert self.num_used + self.num_promised + self.num_free == self.pool.total, "L1: blocks are lost"
            assert self.num_free >= 0, "L1: blocks that were promised are gone"
        if self.has_page_ids:
            assert self.pool.num_taken == self.num_used + self.num_cached, "L1: blocks are taken and not counted"

"""The cache of a model in which every layer keeps every token: one KV group, in which a block is a whole page.

It is the shortcut for that one group behind the seam in `core/kv/cache.py`: a pool and a prefix tree, kept consistent,
and no parts of pages to account for.

A page is *used* while a request references it or a transfer holds it, *cached* while it holds a prefix and is not in
use, *empty* otherwise. `free` is cached plus empty, and empty pages are always used before a cached one is evicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvarts.base.limits import MOST_COUNT
from kvarts.core.content import NOTHING, Content
from kvarts.core.hints import Hints
from kvarts.core.kv.cache import BlockTable, Cache, Incoming, LatePages, Mark, Match, Needs
from kvarts.core.kv.eviction import PinnedPages, noter_of, ranges_read_by, walk
from kvarts.core.kv.pool import PageError, PageId, Pool
from kvarts.core.kv.tree import Node, Path, PrefixTree

__all__ = ["OneGroupCache", "PageCache"]


class PageCache(Cache):
    """Owner of the pages that it took from `pool`: the requests that have them, and their contents.

    Pages that are evicted from `tree` are taken again or returned to the pool.
    """

    __slots__ = (
        "_has_ids",
        "_make_room",
        "_note_request",
        "_now_ns",
        "_num_own",
        "_reads_ranges",
        "on_evicted",
        "tree",
    )

    def __init__(self, pool: Pool, tree: PrefixTree) -> None:
        super().__init__(pool, page_blocks=1)
        self.tree = tree
        self.match = tree.match
        self.take_pages = self.take
        self.on_evicted: Callable[[], object] | None = None
        """Called when pages were evicted, before anything else is done."""
        self._has_ids = pool.has_ids
        self._now_ns = 0
        # Counts of a pool from which no others take follow from `num_free` (L1); reading them costs a look-up each.
        self._num_own = pool.num_empty
        """The pages of such a pool."""
        self._make_room = pool.make_room
        """Evicts until a number of pages is empty, where others take from the pool; else None."""
        self._note_request = noter_of(tree.order)
        self.keeps_time = self._note_request is not None
        self.needs = PageNeeds(self)
        self.incoming = IncomingPages(self)
        self.late = LatePagesOfTree(tree)
        self._reads_ranges = self.keeps_time and ranges_read_by(tree.order)

    @property
    def num_cached(self) -> int:
        """Pages that hold a prefix and are not in use."""
        return self.tree.num_cached

    @property
    def num_used(self) -> int:
        """Pages that a request references or a transfer holds."""
        if self._make_room is None:
            return self._num_own - self.num_free
        return self.pool.num_taken - self.tree.num_cached

    def look(self, mark: Mark) -> None:
        """Set `mark` to the current counts if more pages are in use than at the mark so far."""
        # `num_used`, inlined: this runs in every step.
        is_alone = self._make_room is None
        num_used = self._num_own - self.num_free if is_alone else self.pool.num_taken - self.tree.num_cached
        if num_used > mark.used:
            mark.used, mark.cached, mark.released = num_used, self.tree.num_cached, self.num_released

    def counts(self) -> tuple[int, ...]:
        """Return nothing: no groups are told apart."""
        return ()

    def num_evicted_parts(self) -> tuple[int, ...]:
        """Return nothing."""
        return ()

    def reach(self, content: Content, limit: int) -> tuple[int, ...]:
        """Return nothing."""
        return ()

    # Memory ---------------------------------------------------------------------------------------------------

    def set_time(self, now_ns: int) -> None:
        """Set the time of what is opened and closed from now on."""
        self._now_ns = now_ns

    def has_empty(self, count: int) -> bool:
        """Return whether `count` pages can be taken without eviction."""
        return self.pool.has_empty(count)

    def take(self, count: int) -> list[PageId] | None:
        """Take `count` pages, at most `num_free`: empty ones, then cached ones in the order of eviction.

        Return their ids, or None where pages are only counted. Raise PageError for more than are free.
        """
        num_free = self.num_free - count
        if count < 0 or num_free < 0:
            raise PageError(f"{count} pages asked for, {self.num_free} free")
        self.num_free = num_free
        pool = self.pool
        if self._make_room is not None:
            self._make_room(count)
            return pool.take(count)
        num_empty = num_free + count - self.tree.num_cached
        if count <= num_empty:
            return pool.take(count)
        taken_ids = None
        if num_empty:
            taken_ids = pool.take(num_empty)
            count -= num_empty
        evicted_ids = self.tree.evict(count)
        self.num_evicted += count
        if self.on_evicted is not None:
            self.on_evicted()
        if not self._has_ids:
            return None
        return taken_ids + evicted_ids if taken_ids else evicted_ids

    def evict(self, count: int) -> None:
        """Evict `count` cached pages, which are then empty."""
        page_ids = self.tree.evict(count)
        self.num_evicted += count
        self.pool.give(count, page_ids if self._has_ids else None)
        if self.on_evicted is not None:
            self.on_evicted()

    def give(self, count: int, page_ids: list[PageId] | None) -> None:
        """Return `count` pages that were taken and are not findable."""
        self.pool.give(count, page_ids)
        self.num_free += count
        self.num_released += count

    def open(self, match: Match) -> BlockTable:
        """Pin `match`; the tree must not have changed since it was made."""
        tree = self.tree
        num_cached = tree.num_cached
        if self._note_request is not None:
            self._note_request(None, self._now_ns)
        path = tree.pin(match)
        self.num_free -= num_cached - tree.num_cached
        page_ids: list[PageId] | None = None
        if self._has_ids:
            page_ids = []
            for node in path:
                assert node.page_ids is not None
                page_ids += node.page_ids
        return BlockTable(match.content, path, match.num_pages, page_ids)

    def reserved(self, num_pages: int, page_ids: list[PageId] | None) -> BlockTable:
        """Return a block table of pages that were taken by `take`."""
        return BlockTable(NOTHING, [], num_pages, page_ids)

    def keep(self, table: BlockTable) -> int:
        """Record that `table` stays when no request runs; return how many of its pages no other `keep` covers."""
        return self.tree.keep(table.path)

    def unkeep(self, table: BlockTable) -> int:
        """Undo a `keep`; return how many pages are not kept any more."""
        return self.tree.unkeep(table.path)

    def hold(self, path: Path, start: int, end: int) -> PinnedPages:
        """Keep pages [start, end) of `path` in use for a transfer, each in its place of the eviction order.

        `unhold` must follow.
        """
        tree = self.tree
        runs = tree.isolate(path, start, end)
        runs.reverse()
        pages = PinnedPages(runs, start)
        num_cached = tree.num_cached
        tree.hold_pages(pages)
        self.num_free -= num_cached - tree.num_cached
        return pages

    def page_ids(self, pages: PinnedPages) -> list[PageId]:
        """Return the ids of the held pages, in order of position."""
        page_ids: list[PageId] = []
        for node in reversed(pages.nodes()):
            assert node.page_ids is not None
            page_ids += node.page_ids
        return page_ids

    def num_idle(self, pages: PinnedPages) -> int:
        """Return how many pages nothing but transfers holds of what `hold` returned, copies included."""
        num_pages = 0
        for node in pages.nodes():
            for copy in node.duplicates or (node,):
                if not copy.refs:
                    num_pages += copy.end - copy.start
        return num_pages

    def unhold(self, pages: PinnedPages) -> None:
        """End a `hold`."""
        tree = self.tree
        num_cached = tree.num_cached
        orphans = tree.unhold(pages)
        num_released = tree.num_cached - num_cached
        for node in orphans:
            num_pages = node.end - node.start
            self.pool.give(num_pages, node.page_ids)
            num_released += num_pages
        self.num_free += num_released
        self.num_released += num_released

    def grow(self, table: BlockTable, num_pages: int) -> None:
        """Take pages until `table` has `num_pages`, if it has fewer. Raise PageError as the class describes."""
        num_missing = num_pages - table.num_pages
        if num_missing > 0:
            if not table.is_open:
                raise PageError("the block table is closed")
            taken_ids = self.take(num_missing)
            if taken_ids is not None:
                assert table.page_ids is not None
                table.page_ids += taken_ids
            table.num_pages = num_pages

    def shrink(self, table: BlockTable, num_pages: int) -> None:
        """Release the last pages until `table` has `num_pages`, if it has more.

        Raise PageError as the class describes, and for a page that can be found.
        """
        count = table.num_pages - num_pages
        if count <= 0:
            return
        if not table.is_open:
            raise PageError("the block table is closed")
        if table.path and table.path[-1].end > num_pages:
            raise PageError(f"{num_pages} pages to be left, and {table.path[-1].end} can be found")
        page_ids = table.page_ids
        given_ids = None
        if page_ids is not None:
            given_ids = page_ids[num_pages:]
            del page_ids[num_pages:]
        table.num_pages = num_pages
        self.give(count, given_ids)

    def take_for(self, table: BlockTable, num_tokens: int) -> None:
        """Take the pages of the first `num_tokens` tokens, as far as `table` does not have them."""
        self.grow(table, -(-num_tokens // table.content.page_size))

    def take_page(self, table: BlockTable, page: int) -> None:
        """Take the next page of `table`; where pages are only counted, it is recorded at `close`."""
        taken_ids = self.take(1)
        if taken_ids is not None:
            assert table.page_ids is not None
            table.page_ids.append(taken_ids[0])
            table.num_pages += 1

    def take_due(self, tables: Sequence[BlockTable]) -> None:
        """Take the next page of each of `tables` at once."""
        taken_ids = self.take(len(tables))
        assert taken_ids is not None
        for table, page_id in zip(tables, taken_ids, strict=True):
            assert table.page_ids is not None
            table.page_ids.append(page_id)
            table.num_pages += 1

    def stop_decoding(self, table: BlockTable, num_pages: int) -> None:
        """Record the pages of a decode, which its block table does not have where they are only counted."""
        if not self._has_ids:
            table.num_pages = num_pages

    def publish_pages(self, table: BlockTable, num_full_pages: int) -> None:
        """Make the first `num_full_pages` pages findable. Pages already findable stay as they are.

        Raise PageError for a block table that is closed.
        """
        if not table.is_open:
            raise PageError("the block table is closed")
        self.num_published += 1
        self.tree.extend(table.path, table.content, num_full_pages, table.page_ids)

    def publish(self, table: BlockTable, num_tokens: int) -> None:
        """Make the full pages of the first `num_tokens` tokens findable, as far as their tokens are known.

        No other request can find a page of unknown tokens; its own can, once it has released the page.
        """
        content = table.content
        num_full = num_tokens // content.page_size
        if num_full > content.num_known_pages:
            num_full = content.num_known_pages
        if not table.is_open:
            raise PageError("the block table is closed")
        self.num_published += 1
        self.tree.extend(table.path, content, num_full, table.page_ids)

    def extend(self, table: BlockTable, num_tokens: int, *, is_end: bool) -> None:
        """Take pages for the first `num_tokens` tokens and publish the full ones of known tokens."""
        if not table.is_open:
            raise PageError("the block table is closed")
        content = table.content
        page_size = content.page_size
        # `grow` and `publish`, inlined: this runs for every chunk.
        num_pages = -(-num_tokens // page_size)
        num_missing = num_pages - table.num_pages
        if num_missing > 0:
            taken_ids = self.take(num_missing)
            if taken_ids is not None:
                assert table.page_ids is not None
                table.page_ids += taken_ids
            table.num_pages = num_pages
        num_full = num_tokens // page_size
        if num_full > content.num_known_pages:
            num_full = content.num_known_pages
        self.num_published += 1
        self.tree.extend(table.path, content, num_full, table.page_ids)

    def free_skipped(self, table: BlockTable, num_tokens: int, num_in_flight: int = 0) -> None:
        """Release nothing: later tokens attend to every page."""

    def count(self) -> None:
        """Do nothing: the counts are always those of now."""

    def close(self, table: BlockTable, num_full_pages: int, num_pages: int) -> None:
        """Release everything: full pages become cached, deepest first, the rest empty.

        `num_pages` is the number that the request holds. With a pool that only counts, decoding requests take their
        pages in bulk, so the holding itself may have recorded fewer. Raise PageError as the class describes.
        """
        path = table.path
        page_ids = table.page_ids
        num_known = table.num_pages if page_ids is None else len(page_ids)
        # With ids, the ids are the pages; without, more pages may have been taken for it in bulk, but never fewer.
        if num_full_pages > num_pages or num_pages < num_known or (page_ids is not None and num_pages != num_known):
            raise PageError(f"{num_pages} pages, {num_full_pages} of them full, and the block table has {num_known}")
        tree = self.tree
        num_cached = tree.num_cached
        if num_pages - num_known > self.num_used:
            raise PageError(f"{num_pages} pages, and {self.num_used} are in use")
        if not table.is_open:
            raise PageError("the block table is closed")
        self.num_published += 1
        tree.extend(path, table.content, num_full_pages, page_ids)
        num_findable = path[-1].end if path else 0
        if self._note_request is None:
            tree.release(path)
        else:
            hints = table.content.hints
            if self._reads_ranges and hints is not None and hints.retain:
                self._release_parts(path, hints.parts(table.content.page_size, num_findable))
            else:
                self._note_request(hints, self._now_ns)
                tree.release(path)
            self._note_request(None, self._now_ns)
        num_private = num_pages - num_findable
        if num_private:
            self.pool.give(num_private, None if page_ids is None else page_ids[num_findable:])
        num_released = tree.num_cached - num_cached + num_private
        self.num_free += num_released
        self.num_released += num_released
        table.path = []
        table.is_open = False

    def _release_parts(self, path: Path, parts: list[tuple[int, Hints]]) -> None:
        """Release `path` part by part; `parts`: the first page and the hints of each."""
        note, now_ns = self._note_request, self._now_ns
        assert note is not None
        self.tree.release_parts(path, [first for first, _ in parts], lambda part: note(parts[part][1], now_ns))

    def runs(self) -> Iterator[tuple[int, Content, int, int, int]]:
        """Yield findable pages and their copies: group 0, content, first page, page after the last, references."""
        return ((0, node.content, node.start, node.end, node.refs) for node in self.tree.nodes())

    # Laws -------------------------------------------------------------------------------------------------

    def is_check_due(self, *, at_rest: bool) -> bool:
        """Return True: a check looks at the runs of the tree, not at its pages."""
        return True

    def check(self, tables: Iterable[tuple[BlockTable, int]], holds: Iterable[PinnedPages] = ()) -> None:
        """Assert laws L1, L2 and L3, given all block tables with their numbers of pages, and the pages of transfers."""
        held: Counter[int] = Counter()
        transferred: Counter[int] = Counter()
        orphans: dict[int, Node] = {}
        for pages in holds:
            for node in pages.nodes():
                for copy in node.duplicates or (node,):
                    transferred[id(copy)] += 1
                    if copy.is_orphan:
                        orphans[id(copy)] = copy
        num_private = 0
        for table, num_pages in tables:
            position = None
            for node in walk(table.path):
                held[id(node)] += 1
                assert position is None or node.end == position, f"L2: the path has a gap before page {position}"
                position = node.start
            assert position in (None, 0), f"L2: the path begins at page {position}"
            num_private += num_pages - (table.path[-1].end if table.path else 0)
        num_referenced = num_cached = 0
        resident_ids: list[PageId] = []
        for node in orphans.values():
            assert node.holds == transferred[id(node)], f"L2: {node} is held by {transferred[id(node)]} transfers"
            num_referenced += node.end - node.start
            resident_ids += node.page_ids or ()
        listed = Counter(id(node) for node in self.tree.order)
        for node in self.tree.nodes():
            size = node.end - node.start
            assert size > 0, f"L1: {node} has no pages"
            assert node.refs == held[id(node)], f"L2: {node} is held by {held[id(node)]}"
            assert node.holds == transferred[id(node)], f"L2: {node} is held by {transferred[id(node)]} transfers"
            assert listed[id(node)] == (node.refs == 0), f"L2: {node} is listed for eviction {listed[id(node)]} times"
            if node.refs or node.holds:
                num_referenced += size
            else:
                num_cached += size
            if node.page_ids is not None:
                assert len(node.page_ids) == size, f"L1: {node} has {len(node.page_ids)} page ids"
                resident_ids += node.page_ids
            for child in (node.children or {}).values():
                parent = child.parent
                assert parent is not None and parent.children is node.children, f"L3: {child} has another parent"
                assert child.start == node.end, f"L3: {child} does not follow {node}"
        assert num_cached == self.num_cached, f"L1: {num_cached} pages cached, counted as {self.num_cached}"
        self.pool.check(self.num_free, self.num_cached)
        assert self.num_used == num_referenced + num_private, (
            f"L1: {self.num_used} pages used, {num_referenced} referenced and {num_private} private"
        )
        if self._has_ids:
            for table, num_pages in tables:
                assert table.page_ids is not None and len(table.page_ids) == num_pages
                resident_ids += table.page_ids[table.path[-1].end if table.path else 0 :]
            resident_ids += self.pool.empty_ids
            assert sorted(resident_ids) == list(range(self.pool.total)), "L1: a page is lost or has two owners"


class PageNeeds(Needs):
    """Needs in pages of every token: `cache` releases none while their request runs."""

    __slots__ = ("_cache", "_tree")

    def __init__(self, cache: PageCache) -> None:
        super().__init__("the pool has")
        self._cache = cache
        self._tree = cache.tree

    def to_admit(self, match: Match, num_known: int, budget: int, num_kept: int = 0) -> int:
        """Return the pages of `num_known` tokens, without those of `match` that are in use, and `num_kept`."""
        return -(-num_known // match.content.page_size) - match.num_shared + num_kept

    def least_to_admit(self, match: Match, num_known: int, budget: int) -> int:
        """Return `to_admit`."""
        return -(-num_known // match.content.page_size) - match.num_shared

    def watch(self) -> None:
        """Let `may_shrink` know only what becomes findable from now on."""
        self._tree.found_from = MOST_COUNT

    def may_shrink(self, num_pages: int) -> bool:
        """Return whether pages became findable that can follow `num_pages` pages, or a page before these.

        A run that begins behind them follows pages that are not all among them.
        """
        return self._tree.found_from <= num_pages

    def to_run(self, table: BlockTable, start: int, end: int) -> int:
        """Return the pages that the first `end` tokens of `table` lack."""
        return -(-end // table.content.page_size) - table.num_pages

    def to_finish(self, table: BlockTable, num_tokens: int) -> int:
        """Return the pages that `num_tokens` tokens lack."""
        return -(-num_tokens // table.content.page_size) - table.num_pages

    def to_compute(self, num_known: int, page_size: int) -> int:
        """Return the pages of `num_known` tokens."""
        return -(-num_known // page_size)

    def alone(self, num_tokens: int, page_size: int, enough: int = 0) -> int:
        """Return the pages of `num_tokens` tokens if they are more than `enough`, else 0."""
        num_pages = -(-num_tokens // page_size)
        return num_pages if num_pages > enough else 0

    def most_tokens(self, limit: int, page_size: int) -> int:
        """Return the tokens of all pages, at most `limit`."""
        return min(limit, self._cache.pool.total * page_size)

    def words(self, num_blocks: int, page_size: int, asked: str) -> str:
        """Return the clause that a request with the tokens `asked` needs `num_blocks` pages."""
        return f"needs {num_blocks} pages of {page_size} tokens for {asked}"

    def to_hold(self, match: Match) -> int:
        """Return the pages of `match`."""
        return match.num_pages

    def lent_of(self, match: Match) -> int:
        """Return how many pages of `match` transfers hold and no request does."""
        end = match.num_pages
        return sum(min(node.end, end) - node.start for node in match.nodes if node.holds and not node.refs)

    def freed_by(self, tables: Iterable[tuple[BlockTable | None, int]]) -> Iterator[int]:
        """Yield the number of pages that go out of use as each of `tables`, with its pages, is closed in turn.

        Pages that transfers hold stay in use.
        """
        held: Counter[int] = Counter()
        for table, num_pages in tables:
            assert table is not None
            num_freed = num_pages - (table.path[-1].end if table.path else 0)
            for node in walk(table.path):
                held[id(node)] += 1
                if held[id(node)] == node.refs and not node.holds:
                    num_freed += node.end - node.start
            yield num_freed


class IncomingPages(Incoming):
    """Whole pages of `cache` that loads or other engines fill: they need no more than pages that are computed."""

    __slots__ = ("_cache",)

    def __init__(self, cache: PageCache) -> None:
        self._cache = cache

    def open_to_load(self, match: Match, num_known: int, on_device: Match) -> BlockTable:
        """Hold `match` and take the rest of the pages of `num_known` tokens."""
        table = self._cache.open(match)
        self._cache.grow(table, -(-num_known // match.content.page_size))
        return table

    def publish_loaded(self, table: BlockTable, num_pages: int) -> None:
        """Make the first `num_pages` pages findable."""
        self._cache.publish_pages(table, num_pages)

    def to_reserve(self, found: Match, num_known: int) -> int:
        """Return 0: a request has all pages of its known tokens, loaded or not."""
        return 0

    def to_front(self, match: Match, num_front: int) -> int:
        """Return 0: they are pages of its known tokens."""
        return 0

    def held_reserved(self, match: Match, found: Match, num_known: int, num_front: int) -> int:
        """Return the pages of `num_known` tokens."""
        return -(-num_known // match.content.page_size)

    def open_reserved(self, match: Match, found: Match, num_known: int, num_front: int) -> BlockTable:
        """Hold `match` and take the rest of the pages of `num_known` tokens."""
        return self.open_to_load(match, num_known, match)

    def begin_front(self, table: BlockTable, num_tokens: int, num_in_flight: int) -> None:
        """Release nothing: later tokens attend to every page."""

    def extend_front(self, table: BlockTable, num_tokens: int) -> None:
        """Make the full pages of the first `num_tokens` tokens findable."""
        self._cache.extend(table, num_tokens, is_end=False)

    def arrive(self, table: BlockTable, num_pages: int, end: int) -> bool:
        """Make the first `num_pages` pages findable. The request goes on after them, however many they are."""
        self._cache.publish_pages(table, num_pages)
        return True

    def end_promise(self, table: BlockTable) -> None:
        """Do nothing: the request has its pages."""

    def begin_run(self, table: BlockTable) -> None:
        """Release nothing."""

    def drop(self, table: BlockTable) -> None:
        """Release all pages; those that can be found stay cached."""
        self._cache.close(table, table.num_named, table.num_pages)

    def held(self, found: Match, end: int) -> int:
        """Return the pages that were found or are loaded."""
        return end

    def to_load(self, match: Match, found: Match, end: int) -> int:
        """Return the pages up to `end` that are not in use."""
        return end - found.num_shared

    def to_admit(self, match: Match, found: Match, num_known: int, budget: int, num_kept: int = 0) -> int:
        """Return the pages of `num_known` tokens that are not in use, and those to leave free."""
        return self._cache.needs.to_admit(match, num_known, budget, num_kept)

    def to_go_on(self, table: BlockTable, num_known: int, budget: int, num_planned: int = 0) -> int:
        """Return the pages that `num_known` tokens lack."""
        return max(0, self._cache.needs.to_finish(table, num_known))

    def num_sent(self, start: int, num_tokens: int, page_size: int) -> int:
        """Return the pages of `num_tokens` tokens from token `start` on."""
        return -(-num_tokens // page_size) - start // page_size

    def to_receive(self, match: Match, num_tokens: int) -> int:
        """Return the pages that must be free to receive a prompt after `match`."""
        return self._cache.needs.to_admit(match, num_tokens, num_tokens)

    def open_to_receive(self, match: Match, num_tokens: int) -> BlockTable:
        """Hold `match` and take the rest of the pages of `num_tokens` tokens."""
        return self.open_to_load(match, num_tokens, match)

    def receive(self, table: BlockTable, num_tokens: int) -> None:
        """Make the full pages of the first `num_tokens` tokens findable."""
        self._cache.publish(table, num_tokens)


class LatePagesOfTree(LatePages):
    """Full pages of decodes that `tree` gets when pages are looked for."""

    __slots__ = ("_tree",)

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree

    def call_before_reads(self, publish: Callable[[], object]) -> None:
        """Call `publish` before pages are looked for."""
        self._tree.on_read = publish

    def is_distinct(self, table: BlockTable) -> bool:
        """Return whether no other block table has the last findable page of `table`, or a copy."""
        if not table.path:
            return False
        last = table.path[-1]
        return last.refs == 1 and last.duplicates is None

    def repeats(self, table: BlockTable) -> bool:
        """Return whether the next page of `table` that becomes findable will be a copy of a resident one."""
        return self._tree.has_after(table.path, table.content)


class OneGroupCache(PageCache):
    """Whole pages, counted as the parts of the only KV group of a model, which keeps every token.

    `page_bytes`: the bytes of a page; `most_new_tokens`: the most tokens of a request that a step may compute.
    """

    __slots__ = ()

    def __init__(self, pool: Pool, tree: PrefixTree, *, page_bytes: int, most_new_tokens: int) -> None:
        super().__init__(pool, tree)
        self.needs = OneGroupNeeds(self, page_bytes, most_new_tokens)

    def look(self, mark: Mark) -> None:
        """Set `mark` to the current counts if more pages are in use than at the mark so far."""
        num_used = self.num_used
        if num_used > mark.used:
            num_cached = self.tree.num_cached
            mark.used, mark.cached, mark.released = num_used, num_cached, self.num_released
            mark.parts = num_used, num_cached

    def counts(self) -> tuple[int, ...]:
        """Return the pages used and cached."""
        return self.num_used, self.tree.num_cached

    def num_evicted_parts(self) -> tuple[int, ...]:
        """Return the number of evicted pages."""
        return (self.num_evicted,)

    def reach(self, content: Content, limit: int) -> tuple[int, ...]:
        """Return the number of the first `limit` full pages that are resident."""
        return (self.tree.match(content, limit).num_pages,)


class OneGroupNeeds(PageNeeds):
    """Needs in whole pages, in the words of KV groups."""

    __slots__ = ("_most_new_tokens", "_page_bytes")

    def __init__(self, cache: OneGroupCache, page_bytes: int, most_new_tokens: int) -> None:
        super().__init__(cache)
        self.room_words = "the memory has"
        self._page_bytes = page_bytes
        self._most_new_tokens = most_new_tokens

    def words(self, num_blocks: int, page_size: int, asked: str) -> str:
        """Return the clause that a request with the tokens `asked` needs `num_blocks`."""
        most_new = self._most_new_tokens
        return f"needs {num_blocks} blocks of {self._page_bytes:,} bytes for {asked}, with {most_new} tokens a step"

"""The paged prefix cache of one device: the pool and the tree, kept in step.

A page is *used* while a request references it or a transfer holds it, *cached* while it holds a prefix and is not in
use, *empty* otherwise. `free` is cached plus empty, and empty pages are always used before a cached one is evicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import msgspec

from kvarts.content import Content
from kvarts.event_log import Tell
from kvarts.kv.pool import CountPool, IdPool, PageId
from kvarts.kv.tree import Match, Node, Path, PrefixTree

__all__ = ["Holding", "PageCache"]


class Holding(msgspec.Struct, eq=False):
    """The pages of one running request. Written by PageCache.

    `path`: its full, findable pages. `num_pages`: all its pages, the partial last one included. `page_ids`: their
    ids in order of position, or None where pages are only counted.
    """

    path: Path
    num_pages: int
    page_ids: list[PageId] | None


class PageCache:
    """Owner of every page of one pool: who has it, and what it holds.

    `safe_first`: pages that a tier below holds as well are evicted before those it does not.
    """

    __slots__ = ("has_page_ids", "match", "num_evicted", "num_free", "num_released", "on_gone", "pool", "tree")

    def __init__(
        self,
        num_pages: int,
        *,
        with_page_ids: bool,
        tell: Tell | None = None,
        safe_first: bool = False,
    ) -> None:
        self.pool: CountPool | IdPool = IdPool(num_pages) if with_page_ids else CountPool(num_pages)
        self.tree = PrefixTree(tell)
        if safe_first:
            from kvarts.kv.safe import SafeFirstTree  # only those who have a tier below pay for it

            self.tree = SafeFirstTree(tell)
        self.has_page_ids = with_page_ids
        self.num_free = num_pages
        """Pages that can be taken now: empty or cached."""
        self.num_evicted = 0
        self.num_released = 0
        """Pages that have gone out of use since the beginning; those that came into use are these and `num_used`."""
        self.match = self.tree.match
        self.on_gone: Callable[[], object] | None = None
        """Is called when the tree's list `gone` has grown, before anything else is done."""

    @property
    def num_cached(self) -> int:
        """Pages that hold a prefix and are not in use."""
        return self.tree.num_cached

    @property
    def num_used(self) -> int:
        """Pages that somebody references or a transfer holds."""
        return self.pool.total - self.num_free

    @property
    def num_most(self) -> int:
        """Pages that one request can be sure to get, in time."""
        return self.pool.total

    def num_free_to_admit(self, num_pages: int) -> int:
        """Pages that can be taken now by a request that is admitted with `num_pages` of them."""
        return self.num_free

    def has_empty(self, count: int) -> bool:
        """Whether `count` pages can be taken and nothing is evicted for them."""
        return count <= self.pool.num_empty

    def take(self, count: int) -> list[PageId] | None:
        """Takes `count` pages, at most `num_free`: empty ones, then the cached ones released longest ago.

        Their ids, or None where pages are only counted.
        """
        self.num_free -= count
        num_empty = self.pool.num_empty
        if count <= num_empty:
            return self.pool.take(count)
        taken_ids = None
        if num_empty:
            taken_ids = self.pool.take(num_empty)
            count -= num_empty
        evicted_ids = self.tree.evict(count)
        self.num_evicted += count
        if self.tree.gone and self.on_gone is not None:
            self.on_gone()
        if not self.has_page_ids:
            return None
        return taken_ids + evicted_ids if taken_ids else evicted_ids

    def open(self, match: Match) -> Holding:
        """Pins what was found; the tree must not have changed since."""
        tree = self.tree
        num_cached = tree.num_cached
        path = tree.pin(match)
        self.num_free -= num_cached - tree.num_cached
        page_ids: list[PageId] | None = None
        if self.has_page_ids:
            page_ids = []
            for node in path:
                assert node.page_ids is not None
                page_ids += node.page_ids
        return Holding(path, match.num_pages, page_ids)

    def hold(self, match: Match) -> Path:
        """Puts what was found to use for a transfer, each page in its place of the eviction order, until `unhold`."""
        return self.hold_path(self.tree.cut(match))

    def hold_open(self, holding: Holding, num_pages: int) -> Path | None:
        """As `hold`, for the first `num_pages` pages of somebody who holds just these; None if that is not so."""
        path = holding.path
        if not path or path[-1].end != num_pages:
            return None
        return self.hold_path(list(path))

    def hold_path(self, path: Path) -> Path:
        """As `hold`, for a path of the tree."""
        num_cached = self.tree.num_cached
        self.tree.hold_path(path)
        self.num_free -= num_cached - self.tree.num_cached
        return path

    def page_ids(self, path: Path) -> list[PageId]:
        """The ids of the pages that `path` holds, in order of position."""
        page_ids: list[PageId] = []
        for node in reversed(list(self.tree.walk(path))):
            assert node.page_ids is not None
            page_ids += node.page_ids
        return page_ids

    def unhold(self, path: Path) -> None:
        """Ends what `hold` began."""
        tree = self.tree
        num_cached = tree.num_cached
        tree.unhold(path)
        num_released = tree.num_cached - num_cached
        self.num_free += num_released
        self.num_released += num_released

    def grow(self, holding: Holding, num_pages: int) -> None:
        """Takes pages until `holding` has `num_pages`, if it has fewer."""
        num_missing = num_pages - holding.num_pages
        if num_missing > 0:
            taken_ids = self.take(num_missing)
            if taken_ids is not None:
                assert holding.page_ids is not None
                holding.page_ids += taken_ids
            holding.num_pages = num_pages

    def publish(self, holding: Holding, content: Content, num_full_pages: int) -> None:
        """Makes the first `num_full_pages` pages findable. Pages already findable stay as they are."""
        self.tree.extend(holding.path, content, num_full_pages, holding.page_ids)

    def close(self, holding: Holding, content: Content, num_full_pages: int, num_pages: int) -> None:
        """Releases everything: full pages become cached, deepest first, the rest empty.

        `num_pages` is what the request holds. A pool that only counts lets a decoding request take its pages in bulk
        with others', so the holding itself may know of fewer.
        """
        self.publish(holding, content, num_full_pages)
        path = holding.path
        num_findable = path[-1].end if path else 0
        page_ids = holding.page_ids
        tree = self.tree
        num_cached = tree.num_cached
        tree.release(path)
        num_private = num_pages - num_findable
        if num_private:
            self.pool.give(num_private, None if page_ids is None else page_ids[num_findable:])
        num_released = tree.num_cached - num_cached + num_private
        self.num_free += num_released
        self.num_released += num_released
        holding.path = []

    def runs(self) -> Iterator[tuple[Content, int, int, int]]:
        """Findable pages and their copies: content, first page, page after the last, how often referenced."""
        return ((node.content, node.start, node.end, node.refs) for node in self.tree.nodes())

    # Laws -------------------------------------------------------------------------------------------------

    def check(self, holdings: Iterable[tuple[Holding, int]], holds: Iterable[Path] = ()) -> None:
        """Asserts laws L1, L2 and L3 given everybody who holds pages, and how many each; and what transfers hold."""
        held: Counter[int] = Counter()
        transferred = Counter(
            id(copy) for path in holds for node in self.tree.walk(path) for copy in node.twins or (node,)
        )
        num_private = 0
        for holding, num_pages in holdings:
            position = None
            for node in self.tree.walk(holding.path):
                held[id(node)] += 1
                assert position is None or node.end == position, f"L2: the path has a gap before page {position}"
                position = node.start
            assert position in (None, 0), f"L2: the path begins at page {position}"
            num_private += num_pages - (holding.path[-1].end if holding.path else 0)
        num_referenced = num_cached = 0
        resident_ids: list[PageId] = []
        listed = {id(node) for node in self.tree.lru_nodes()}
        parents: dict[int, Node] = {}
        for node in self.tree.nodes():
            size = node.end - node.start
            assert size > 0, f"L1: {node} has no pages"
            assert node.refs == held[id(node)], f"L2: {node} is held by {held[id(node)]}"
            assert node.holds == transferred[id(node)], f"L2: {node} is held by {transferred[id(node)]} transfers"
            assert (node.refs == 0) == (id(node) in listed), f"L2: {node} is in the wrong list"
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
                parents[id(child)] = node
        assert num_cached == self.num_cached, f"L1: {num_cached} pages cached, counted as {self.num_cached}"
        self._check_free()
        assert self.num_used == num_referenced + num_private, (
            f"L1: {self.num_used} pages used, {num_referenced} referenced and {num_private} private"
        )
        self._check_order(parents)
        if isinstance(self.pool, IdPool):
            for holding, num_pages in holdings:
                assert holding.page_ids is not None and len(holding.page_ids) == num_pages
                resident_ids += holding.page_ids[holding.path[-1].end if holding.path else 0 :]
            resident_ids += self.pool.empty_ids
            assert sorted(resident_ids) == list(range(self.pool.total)), "L1: a page is lost or has two owners"

    def _check_free(self) -> None:
        assert self.num_free == self.pool.num_empty + self.num_cached, "L1: free"

    def _check_order(self, parents: dict[int, Node]) -> None:
        """L3 is kept by order: whatever follows a cached page leaves before its last copy does."""
        place = {id(node): index for index, node in enumerate(self.tree.lru_nodes())}
        for node in self.tree.nodes():
            parent = parents.get(id((node.twins or [node])[0]))
            if parent is None:
                continue
            copies = parent.twins or [parent]
            last_to_go = max(place.get(id(copy), len(place)) for copy in copies)
            assert place.get(id(node), len(place)) <= last_to_go, f"L3: {node} would outlive {parent}"

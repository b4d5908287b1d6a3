"""A radix cache for a model some of whose layers have sliding windows, as SGLang's: the KV of these has its own pool.

A run of pages has KV in the layers with full attention. Its *window KV*, in the other layers, is there for all of its
pages or for none. A prefix is found if it ends with window KV of a whole window, or has it from the first token on.
Requests free window KV that their next tokens do not attend to, so what they insert has it at its end only; the last
window of what is inserted is a run of its own, and in use with the window KV before it up to a window.

Each pool evicts for itself. If pages are lacking, whole runs that none follows are removed, as in any radix cache; if
window KV is lacking, the least recent one is, with the run if none follows it. An insertion gives runs without window
KV that of the request. An example, of runs a, b and c that follow each other, with a window as long as each of them:

    pages    window KV
    a b c    c             b and c were inserted by one request, a by another, whose window KV was evicted
    a b c                  c's was evicted, as another run follows c: nothing can be found up to there
    a b c    b             a request that found nothing computed a and b
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvarts.core.content import Content
from kvarts.core.event_log import Emit
from kvarts.core.kv.cache import BlockTable, Match
from kvarts.core.kv.components import (
    Component,
    ComponentCache,
    ComponentMatch,
    ComponentOrder,
    ComponentTree,
    is_idle,
)
from kvarts.core.kv.eviction import Node, Path, PinnedPages, walk
from kvarts.core.kv.pool import PageId, Pool

__all__ = ["WindowRadixCache", "WindowRadixTree"]


class WindowOrder(ComponentOrder):
    """As RadixOrder; a run that is split keeps its window KV, in its place."""

    __slots__ = ()

    def parted(self, head: Node, tail: Node) -> None:
        """Give both parts the window KV of the run."""
        kv: Component = tail.notes
        first = head.notes = Component()
        first.is_here, first.num_locks, first.touch = kv.is_here, kv.num_locks, kv.touch
        if is_idle(head):
            self._add(head)

    def touch_windows(self, node: Node | None, num_pages: int) -> None:
        """Make the window KV of `node`, and of the runs before it up to `num_pages` pages, the most recent."""
        self.turn()
        while node is not None and node.notes is not None and num_pages > 0:
            self.touch_component(node)
            num_pages -= node.end - node.start
            node = node.parent


class WindowRadixTree(ComponentTree):
    """A RadixTree for windows of `window` tokens, with a pool of `num_pages` pages for their KV."""

    def __init__(self, window: int, page_size: int, num_pages: int, emit: Emit | None = None) -> None:
        self.windows = WindowOrder()
        super().__init__(self.windows, num_pages, emit)
        self.window_pages = -(-window // page_size)

    def match(self, content: Content, limit: int) -> ComponentMatch:
        """Return the longest prefix of `content`, at most `limit` pages, with window KV. Change nothing."""
        found = super().match(content, limit)
        walked, reach = found.nodes, found.num_pages
        best = end = num_shared = num_live = shared = 0
        is_whole = True
        for index, node in enumerate(walked):
            num_pages = min(node.end, reach) - node.start
            if node.refs:
                shared += num_pages
            if node.notes.is_here:
                num_live += num_pages
                if is_whole or num_live >= self.window_pages:
                    best, end, num_shared = index + 1, node.start + num_pages, shared
            else:
                num_live, is_whole = 0, False
        return ComponentMatch(content, walked[:best], end, num_shared, walked, reach)

    def touch_end(self, path: Path) -> None:
        """Make the last window of `path`, and one page more, recent."""
        self.windows.touch_windows(path[-1] if path else None, self.window_pages + 1)

    def num_idle(self, match: Match) -> int:
        """Return the pages with window KV that `match` would keep in use, and nothing does."""
        return sum([node.end - node.start for node in self._window(match.nodes) if is_idle(node)])

    def _window(self, path: Path) -> Iterator[Node]:
        """Yield the last runs of `path`, up to a window, the last one first."""
        num_pages = self.window_pages
        for node in walk(path):
            if num_pages <= 0:
                return
            yield node
            num_pages -= node.end - node.start

    def lock(self, path: Path) -> int:
        """Keep the window KV of the last window of `path` in use, whole runs; return the first page of these."""
        start = path[-1].end if path else 0
        for node in self._window(path):
            self.keep_in_use(node)
            start = node.start
        return start

    def unlock(self, node: Node | None, start: int) -> None:
        """Undo a `lock` of the runs up to `node` that began with page `start`."""
        while node is not None and node.end > start:
            self.let_go(node)
            node = node.parent

    def insert_from(self, path: Path, content: Content, end: int, num_slid: int) -> int:
        """Make the pages from the end of `path` to `end` findable, as `insert`; return how many were resident.

        The holder of `path` has no window KV of its pages before `num_slid`. What it has twice becomes empty.
        """
        touches = self.windows
        touches.touch_held(path)
        start = path[-1].end if path else 0
        last = path[-1] if path else self._root(content.salt)
        num_resident = 0
        while start < end:
            resident = self._resident(last, content, start, end)
            if resident is None:
                node = self._add(last, content, start, end)
                self._fill(node, num_slid)
            else:
                node = resident
                num_resident += self._join(node, path)
                if node.notes.is_here:
                    self.num_unit_empty += max(0, node.end - max(start, num_slid))
                elif num_slid < node.end:
                    if num_slid > start:
                        self.part(node, num_slid)
                    self.windows.give(node)
            path.append(node)
            start = node.end
            last = node
        self.touch_end(path)
        return num_resident

    def _fill(self, node: Node, num_slid: int) -> None:
        """Give a new run the window KV from page `num_slid` on; its last window is a run of its own."""
        if num_slid >= node.end:
            return
        if num_slid > node.start:
            self.part(node, num_slid)
        if node.end - node.start > self.window_pages:
            self.windows.give(self.part(node, node.end - self.window_pages))
        self.windows.give(node)

    def check_windows(self, held: Iterable[tuple[BlockTable, int, HeldWindow]]) -> None:
        """Assert laws L1 and L2 of window KV, given the block tables with their pages and windows."""
        locks: dict[int, int] = {}
        num_private = 0
        for table, num_pages, window in held:
            num_private += num_pages - max(table.num_named, window.num_slid)
            node: Node | None = window.node
            while node is not None and node.end > window.start:
                locks[id(node)] = locks.get(id(node), 0) + 1
                node = node.parent
        self.check_components(locks, num_private)


class HeldWindow:
    """What a request has of window KV. `num_slid`: the pages, from the first on, whose own window KV it has freed.

    `node`, `start`: it keeps the window KV of the runs up to `node` from page `start` on. `branch`: the pages, if any,
    that it inserts before the rest of its prompt, as they were found, but without window KV. `num_inserted`: the tokens
    that it had computed when it inserted last.
    """

    __slots__ = ("branch", "end", "node", "num_inserted", "num_slid", "start")

    def __init__(self, branch: int) -> None:
        self.branch = branch
        self.num_slid = self.start = self.num_inserted = 0
        self.node: Node | None = None
        self.end = -1
        """The tokens before the one that its last decode computed, as far as their results were taken; -1: none yet."""


class WindowRadixCache(ComponentCache):
    """A RadixCache with a second pool, of window KV."""

    __slots__ = ("_held", "_window", "windowed")

    def __init__(self, pool: Pool, tree: WindowRadixTree, window: int) -> None:
        super().__init__(pool, tree)
        self.windowed = tree
        self._window = window
        self._held: dict[BlockTable, HeldWindow] = {}

    @property
    def num_window_free(self) -> int:
        """Pages with window KV that are empty, or that nothing keeps in use."""
        return self.windowed.num_unit_empty + self.windowed.windows.num_idle

    @property
    def num_empty(self) -> int:
        """Pages that can be taken without eviction, of either pool."""
        return min(super().num_empty, self.windowed.num_unit_empty)

    def has_empty(self, count: int) -> bool:
        """Return whether `count` pages can be taken without eviction."""
        return super().has_empty(count) and count <= self.windowed.num_unit_empty

    def make_room(self, count: int) -> None:
        """Evict whole runs until `count` pages are empty, then window KV until it has as many, as far as possible."""
        super().make_room(count)
        self.evict_idle(count)

    def take(self, count: int) -> list[PageId] | None:
        """Take `count` pages of both pools."""
        if count > self.num_empty:
            self.make_room(count)
        super().take(count)
        self.windowed.num_unit_empty -= count
        assert self.windowed.num_unit_empty >= 0, "more window KV is taken than is free"
        return None

    def open(self, match: Match) -> BlockTable:
        """Pin `match`, and the window KV at its end."""
        assert isinstance(match, ComponentMatch)
        table = super().open(match)
        held = self._held[table] = HeldWindow(match.reach)
        self._lock(table, held)
        return table

    def _lock(self, table: BlockTable, held: HeldWindow) -> None:
        held.node = table.path[-1] if table.path else None
        held.start = self.windowed.lock(table.path)

    def held_window(self, table: BlockTable) -> HeldWindow:
        """Return what the request of `table` has of window KV."""
        return self._held[table]

    def insert_computed(self, table: BlockTable, num_tokens: int, *, is_over: bool) -> None:
        """Make the full pages of the first `num_tokens` tokens of `table` findable, or those up to its branch first.

        A request that is not over frees window KV before: it keeps that of its last window only.
        """
        held, tree, page_size = self._held[table], self.windowed, table.content.page_size
        num_full_pages, num_slid_tokens = num_tokens // page_size, num_tokens
        held.num_inserted = num_tokens
        at_branch = table.num_named < held.branch <= num_full_pages
        if at_branch:
            num_full_pages, num_slid_tokens = held.branch, held.branch * page_size
        if not is_over:
            self.slide(table, held, num_slid_tokens - 1, 1)
        self.num_published += 1
        num_cached = tree.num_cached
        num_twice = tree.insert_from(table.path, table.content, num_full_pages, held.num_slid)
        tree.unlock(held.node, held.start)
        self._lock(table, held)
        self._give_back(num_twice, num_cached)
        if at_branch:
            held.branch = 0
            if not is_over:
                self.slide(table, held, num_tokens - 1, 1)

    def slide(self, table: BlockTable, held: HeldWindow, end: int, interval: int) -> None:
        """Free the window KV of `table` that tokens after `end` do not attend to, if it is of `interval` tokens."""
        page_size = table.content.page_size
        if end - self._window < held.num_slid * page_size + interval:
            return
        start = max(held.num_slid, table.num_named)
        held.num_slid = max(start, end // page_size - self.windowed.window_pages)
        self.windowed.num_unit_empty += held.num_slid - start

    def close(self, table: BlockTable, num_full_pages: int, num_pages: int) -> None:
        """Release everything, with its window KV."""
        held = self._held.pop(table)
        self.windowed.num_unit_empty += num_pages - max(table.num_named, held.num_slid)
        self.windowed.unlock(held.node, held.start)
        super().close(table, num_full_pages, num_pages)

    def check(self, tables: Iterable[tuple[BlockTable, int]], holds: Iterable[PinnedPages] = ()) -> None:
        """Assert laws L1, L2 and L3, of window KV as well."""
        tables = list(tables)
        super().check(tables, holds)
        self.windowed.check_windows((table, num_pages, self._held[table]) for table, num_pages in tables)

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
from heapq import heapify, heappop, heappush
from typing import Final

from kvarts.core.content import Content
from kvarts.core.event_log import Emit
from kvarts.core.kv.cache import BlockTable, Match
from kvarts.core.kv.eviction import Node, Path, PinnedPages, walk
from kvarts.core.kv.pool import PageId, Pool
from kvarts.core.kv.radix import MOST_STALE, RadixCache, RadixOrder, RadixTree

__all__ = ["WindowMatch", "WindowRadixCache", "WindowRadixTree"]

START_BITS: Final = 40
"""The bits of a run's first page in its key, below those of the touch of its window KV."""


class WindowKv:
    """The window KV of a run: the `notes` of a node. `num_locks`: how many requests keep it in use.

    `touch`: when it was touched last. Runs that were touched together follow each other, the last one is most recent.
    """

    __slots__ = ("is_here", "num_locks", "touch")

    def __init__(self) -> None:
        self.is_here = False
        self.num_locks = self.touch = 0


class WindowMatch(Match):
    """A match of `nodes`, with window KV. `walked`: the runs of `reach` pages, the longest prefix without windows."""

    __slots__ = ("reach", "walked")

    def __init__(
        self, content: Content, nodes: Path, num_pages: int, num_shared: int, walked: Path, reach: int
    ) -> None:
        super().__init__(content, nodes, num_pages, num_shared)
        self.walked = walked
        self.reach = reach


class WindowOrder(RadixOrder):
    """As RadixOrder; a run that is split keeps its window KV, in its place."""

    __slots__ = ("_by_key", "_clock_of_windows", "_keys", "num_cached")

    def __init__(self) -> None:
        super().__init__()
        self.has_notes = True
        self.num_cached = 0
        """The pages with window KV that is not in use."""
        self._clock_of_windows = 0
        self._by_key: dict[int, Node] = {}
        """The runs with window KV that is not in use."""
        self._keys: list[int] = []
        """A heap of their keys, and of some that are outdated."""

    def parted(self, head: Node, tail: Node) -> None:
        """Give both parts the window KV of the run."""
        kv: WindowKv = tail.notes
        first = head.notes = WindowKv()
        first.is_here, first.num_locks, first.touch = kv.is_here, kv.num_locks, kv.touch
        if kv.is_here and not kv.num_locks:
            self._by_key[_key_of(head)] = head
            self._add(tail)

    def _add(self, node: Node) -> None:
        keys, by_key = self._keys, self._by_key
        key = _key_of(node)
        by_key[key] = node
        if len(keys) > 2 * len(by_key) + MOST_STALE:
            keys[:] = by_key
            heapify(keys)
        else:
            heappush(keys, key)

    def list_window(self, node: Node) -> None:
        """Let the window KV of `node` be evicted: it is not in use."""
        self.num_cached += node.end - node.start
        self._add(node)

    def unlist_window(self, node: Node) -> None:
        """Undo `list_window`."""
        self.num_cached -= node.end - node.start
        del self._by_key[_key_of(node)]

    def give_window(self, node: Node) -> None:
        """Let `node` have window KV, the most recent of all."""
        kv: WindowKv = node.notes
        self._clock_of_windows += 1
        kv.is_here, kv.touch = True, self._clock_of_windows
        if not kv.num_locks:
            self.list_window(node)

    def touch_windows(self, node: Node | None, num_pages: int) -> None:
        """Make the window KV of `node`, and of the runs before it up to `num_pages` pages, the most recent."""
        self._clock_of_windows += 1
        while node is not None and node.notes is not None and num_pages > 0:
            kv: WindowKv = node.notes
            if kv.is_here:
                if kv.num_locks:
                    kv.touch = self._clock_of_windows
                else:
                    del self._by_key[_key_of(node)]
                    kv.touch = self._clock_of_windows
                    self._add(node)
            num_pages -= node.end - node.start
            node = node.parent

    def next_window(self) -> Node:
        """Return the run with the least recent window KV that is not in use."""
        keys = self._keys
        while True:
            node = self._by_key.get(keys[0])
            if node is not None:
                return node
            heappop(keys)

    def is_listed(self, node: Node) -> bool:
        """Return whether the window KV of `node` may be evicted."""
        return self._by_key.get(_key_of(node)) is node


def _key_of(node: Node) -> int:
    touch: int = node.notes.touch
    return (touch << START_BITS) + node.start


class WindowRadixTree(RadixTree):
    """A RadixTree for windows of `window` tokens, with a pool of `num_pages` pages for their KV."""

    def __init__(self, window: int, page_size: int, num_pages: int, emit: Emit | None = None) -> None:
        self.windows = WindowOrder()
        super().__init__(emit, self.windows)
        self.window_pages = -(-window // page_size)
        self.num_window_pages = self.num_window_empty = num_pages

    def match(self, content: Content, limit: int) -> WindowMatch:
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
        return WindowMatch(content, walked[:best], end, num_shared, walked, reach)

    def visit(self, match: Match) -> None:
        """Part the last run that was looked at where the prefix ends, and make the runs of `match` recent."""
        assert isinstance(match, WindowMatch)
        nodes, walked = match.nodes, match.walked
        if walked and walked[-1].end > match.reach:
            head = self.part(walked[-1], match.reach)
            if len(nodes) == len(walked):
                nodes[-1] = head
            walked[-1] = head
        self.windows.touch_windows(nodes[-1] if nodes else None, self.window_pages + 1)
        for node in nodes:
            self.windows.touch(node)

    def is_longest(self, match: Match, limit: int) -> bool:
        """Return False: window KV may have been evicted, or computed, since."""
        return False

    def num_idle(self, match: Match) -> int:
        """Return the pages with window KV that `match` would keep in use, and nothing does."""
        return sum([node.end - node.start for node in self._window(match.nodes) if _is_idle(node)])

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
            if _is_idle(node):
                self.windows.unlist_window(node)
            node.notes.num_locks += 1
            start = node.start
        return start

    def unlock(self, node: Node | None, start: int) -> None:
        """Undo a `lock` of the runs up to `node` that began with page `start`."""
        while node is not None and node.end > start:
            kv: WindowKv = node.notes
            kv.num_locks -= 1
            if _is_idle(node):
                self.windows.list_window(node)
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
                node.notes = WindowKv()
                self._fill(node, num_slid)
            else:
                node = resident
                num_resident += self._join(node, path)
                if node.notes.is_here:
                    self.num_window_empty += max(0, node.end - max(start, num_slid))
                elif num_slid < node.end:
                    if num_slid > start:
                        self.part(node, num_slid)
                    self.windows.give_window(node)
            path.append(node)
            start = node.end
            last = node
        self.windows.touch_windows(path[-1] if path else None, self.window_pages + 1)
        return num_resident

    def _fill(self, node: Node, num_slid: int) -> None:
        """Give a new run the window KV from page `num_slid` on; its last window is a run of its own."""
        if num_slid >= node.end:
            return
        if num_slid > node.start:
            self.part(node, num_slid)
        if node.end - node.start > self.window_pages:
            self.windows.give_window(self.part(node, node.end - self.window_pages))
        self.windows.give_window(node)

    def _evict_run(self, node: Node) -> None:
        if node.notes.is_here:
            self._drop_window(node)
        super()._evict_run(node)

    def evict_window(self) -> None:
        """Evict the least recent window KV, with its run if none follows it and nothing holds it."""
        node = self.windows.next_window()
        if node.refs or node.children:
            self._drop_window(node)
        else:
            self._evict_run(node)

    def _drop_window(self, node: Node) -> None:
        self.windows.unlist_window(node)
        self.num_window_empty += node.end - node.start
        node.notes.is_here = False

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
        num_cached = num_used = 0
        for node in self.nodes():
            kv: WindowKv = node.notes
            assert kv.num_locks == locks.get(id(node), 0), f"L2: window KV of {node} is held {kv.num_locks} times"
            assert self.windows.is_listed(node) == _is_idle(node), f"L2: window KV of {node} is to be evicted, or not"
            num_cached += (node.end - node.start) * _is_idle(node)
            num_used += (node.end - node.start) * (kv.is_here and kv.num_locks > 0)
        assert num_cached == self.windows.num_cached, f"L1: {num_cached} pages of window KV cached"
        num_pages = num_cached + num_used + num_private + self.num_window_empty
        assert num_pages == self.num_window_pages, f"L1: {num_pages} pages of window KV"


def _is_idle(node: Node) -> bool:
    """Return whether `node` has window KV that nothing keeps in use."""
    kv: WindowKv = node.notes
    return kv.is_here and not kv.num_locks


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


class WindowRadixCache(RadixCache):
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
        return self.windowed.num_window_empty + self.windowed.windows.num_cached

    @property
    def num_empty(self) -> int:
        """Pages that can be taken without eviction, of either pool."""
        return min(super().num_empty, self.windowed.num_window_empty)

    def has_empty(self, count: int) -> bool:
        """Return whether `count` pages can be taken without eviction."""
        return super().has_empty(count) and count <= self.windowed.num_window_empty

    def make_room(self, count: int) -> None:
        """Evict whole runs until `count` pages are empty, then window KV until it has as many, as far as possible."""
        super().make_room(count)
        tree = self.windowed
        num_cached = tree.num_cached
        while tree.num_window_empty < count and tree.windows.num_cached:
            tree.evict_window()
        num_evicted = num_cached - tree.num_cached
        if num_evicted:
            self.num_evicted += num_evicted
            self.pool.give(num_evicted, None)

    def take(self, count: int) -> list[PageId] | None:
        """Take `count` pages of both pools."""
        if count > self.num_empty:
            self.make_room(count)
        super().take(count)
        self.windowed.num_window_empty -= count
        assert self.windowed.num_window_empty >= 0, "more window KV is taken than is free"
        return None

    def open(self, match: Match) -> BlockTable:
        """Pin `match`, and the window KV at its end."""
        assert isinstance(match, WindowMatch)
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
        if num_twice:
            self.pool.give(num_twice, None)
            num_released = num_twice + tree.num_cached - num_cached
            self.num_free += num_released
            self.num_released += num_released
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
        self.windowed.num_window_empty += held.num_slid - start

    def close(self, table: BlockTable, num_full_pages: int, num_pages: int) -> None:
        """Release everything, with its window KV."""
        held = self._held.pop(table)
        self.windowed.num_window_empty += num_pages - max(table.num_named, held.num_slid)
        self.windowed.unlock(held.node, held.start)
        super().close(table, num_full_pages, num_pages)

    def check(self, tables: Iterable[tuple[BlockTable, int]], holds: Iterable[PinnedPages] = ()) -> None:
        """Assert laws L1, L2 and L3, of window KV as well."""
        tables = list(tables)
        super().check(tables, holds)
        self.windowed.check_windows((table, num_pages, self._held[table]) for table, num_pages in tables)

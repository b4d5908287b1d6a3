"""A radix cache above host memory, as SGLang's HiCache: a run has its KV on the device, in host memory, or in both.

With `write_through`, a run is copied to host memory when it is inserted, with `write_through_selective` when that
happens a second time, and with `write_back` when the device evicts it. It counts as copied at once, and is in use until
the copy has ended. A run that the device evicts stays in the tree if it has a copy; a prefix can be found through runs
of host memory alone, which are *loaded* to the device for a request. Such runs, without followers, are what host memory
evicts, the least recent first; copies of what is on the device stay, except with `write_back`.

An example, of runs a, b and c that follow each other, with `write_through`:

    device        host memory
    a b c         a b           c found no room
    a b           a b           c was evicted, and is lost
    a             a b           b was evicted: host memory may evict it
    a b           a b           b was loaded, or computed and inserted again
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Final

from kvarts.core.config import WritePolicy
from kvarts.core.content import NOTHING, Content
from kvarts.core.event_log import Emit
from kvarts.core.events import PagesRemoved, PagesStored
from kvarts.core.kv.cache import BlockTable, Match
from kvarts.core.kv.eviction import Node, Path, PinnedPages, walk
from kvarts.core.kv.pool import Pool
from kvarts.core.kv.radix import RadixCache, RadixOrder, RadixTree

__all__ = ["HostCopy", "HostRadixCache", "HostRadixTree"]

THRESHOLDS: Final[dict[WritePolicy, int]] = {"write_through": 1, "write_through_selective": 2, "write_back": 0}
"""The insertions after which a run is copied; 0: it is when the device evicts it."""
LEAST_LOADED: Final = 10
"""The fewest tokens that are loaded: fewer are computed again."""


class HostCopy:
    """A copy of `node` to host memory, or a load of the runs up to it; all up to there are in use until it has ended.

    `parts`: the runs that are copied: parts of one, if that was split since.
    """

    __slots__ = ("node", "num_pages", "parts")

    def __init__(self, node: Node, parts: list[Node]) -> None:
        self.node = node
        self.parts = parts
        self.num_pages = sum([part.end - part.start for part in parts])


class Residence:
    """Where a run is: the `notes` of a node. `num_here`: the runs after it that are on the device.

    `num_held`: how many transfers between host memory and storage keep its copy in use.
    """

    __slots__ = ("copy", "is_below", "is_here", "num_held", "num_here", "num_inserted")

    def __init__(self) -> None:
        self.num_inserted = 0
        """The requests that inserted it."""
        self.is_here = True
        """Whether it is on the device."""
        self.is_below = False
        """Whether it is in host memory."""
        self.num_here = self.num_held = 0
        self.copy: HostCopy | None = None
        """What reads or writes its pages in host memory."""


class _Leaves:
    """Runs of host memory alone that no run follows, by when they were touched."""

    __slots__ = ("_by_place", "_heap")

    def __init__(self) -> None:
        self._by_place: dict[int, Node] = {}
        self._heap: list[int] = []

    def add(self, node: Node) -> None:
        self._by_place[node.place] = node
        heappush(self._heap, node.place)

    def discard(self, node: Node) -> bool:
        """Remove `node`; return whether it was here."""
        return node.place is not None and self._by_place.pop(node.place, None) is not None

    def pop(self) -> Node | None:
        """Remove and return the least recent one; None without any."""
        while self._heap:
            node = self._by_place.pop(heappop(self._heap), None)
            if node is not None:
                return node
        return None

    def __contains__(self, node: Node) -> bool:
        return node.place in self._by_place


class TieredOrder(RadixOrder):
    """As RadixOrder: runs on the device that none follows there. `below`: those of host memory that none follows."""

    __slots__ = ("below",)

    def __init__(self) -> None:
        super().__init__()
        self.has_notes = True
        self.below = _Leaves()

    def num_followers(self, node: Node) -> int:
        """Return how many runs follow `node` on the device."""
        residence: Residence = node.notes
        return residence.num_here

    def is_leaf(self, node: Node) -> bool:
        """Return whether the device may evict `node`."""
        return node.place in self._leaves

    def touch(self, node: Node) -> None:
        """Make `node` the most recent of all."""
        is_below = self.below.discard(node)
        super().touch(node)
        if is_below:
            self.below.add(node)

    def removed(self, node: Node) -> None:
        """Unlist `node`, which leaves the device."""
        super().removed(node)
        if node.parent is not None and node.parent.notes is not None:
            node.parent.notes.num_here -= 1

    def parted(self, head: Node, tail: Node) -> None:
        """Let both parts be where the run is."""
        before: Residence = tail.notes
        residence = head.notes = Residence()
        residence.num_inserted, residence.is_here = before.num_inserted, before.is_here
        residence.is_below, residence.copy = before.is_below, before.copy
        residence.num_held = before.num_held
        residence.num_here = int(before.is_here)
        if before.copy is not None:
            parts = before.copy.parts
            parts.insert(parts.index(tail), head)

    def split(self, head: Node, tail: Node) -> None:
        """List `head` if it is on the device. `RadixTree` touches both."""
        if tail.notes.is_here:
            super().split(head, tail)


class HostRadixTree(RadixTree):
    """A RadixTree above `num_below` pages of host memory, `medium`, that are written by a `policy`."""

    def __init__(self, num_below: int, policy: WritePolicy, medium: str, emit: Emit | None = None) -> None:
        self.tiers = TieredOrder()
        super().__init__(emit, self.tiers)
        self.medium = medium
        self.total_below = self.num_free_below = num_below
        self.num_evicted_below = self.num_refused = 0
        """Pages that host memory evicted; and those that were to be copied and found no room."""
        self.num_fetching = 0
        """Pages of host memory that are read into, and that the tree does not have."""
        self.queued: list[HostCopy] = []
        """Copies to host memory that have not begun."""
        self.num_written = 0
        """Pages that were copied while the device waited, since this was set to 0."""
        self._threshold = THRESHOLDS[policy]
        self._doubles: dict[Node, None] = {}
        """Runs that came to be in both places, in that order; some have left one of them since. For `write_back`."""

    # Copies -----------------------------------------------------------------------------------------------

    def _inserted(self, node: Node, is_counted: bool, priority: int) -> None:
        """Count an insertion, and copy the run, and those before it that have no copy, if it is time."""
        residence: Residence | None = node.notes
        if residence is None:
            residence = node.notes = Residence()
            assert node.parent is not None
            if node.parent.notes is not None:
                node.parent.notes.num_here += 1
        if not (is_counted and self._threshold):
            return
        residence.num_inserted += 1
        if residence.is_below or residence.num_inserted < self._threshold:
            return
        chain = [node]
        above = node.parent
        while above is not None and above.notes is not None and not above.notes.is_below:
            chain.append(above)
            above = above.parent
        for each in reversed(chain):
            if not self._take_below(each.end - each.start):
                return
            copy = HostCopy(each, [each])
            each.notes.is_below, each.notes.copy = True, copy
            self.lock(each)
            self.queued.append(copy)

    def end_copy(self, copy: HostCopy) -> None:
        """Note that a copy to host memory has ended: its runs are not in use by it any more."""
        for part in copy.parts:
            part.notes.copy = None
            self._emit_stored(part, self.medium)
        self.release([copy.node])

    def end_load(self, load: HostCopy) -> None:
        """Note that a load has ended."""
        if not self._threshold:
            for part in reversed(load.parts):
                part.notes.copy = None
                self._note_double(part)
        self.release([load.node])

    def lock(self, node: Node) -> None:
        """Keep the run, and all before it, in use; also a run that is to be loaded."""
        for each in walk([node]):
            if not each.refs:
                if each.notes.is_here:
                    self.num_cached -= each.end - each.start
                    self.tiers.pinned((each,), ())
                else:
                    self.tiers.below.discard(each)
            each.refs += 1

    def unlock(self, node: Node) -> None:
        """Undo `lock`, of a run that was not loaded."""
        for each in walk([node]):
            each.refs -= 1
            if each.refs:
                continue
            if each.notes.is_here:
                self.num_cached += each.end - each.start
                self.tiers.released((each,))
            self._note_leaf(each)

    def arrive(self, runs: Path) -> HostCopy:
        """Let `runs`, which are locked and the device has taken pages for, be on the device; return their load."""
        load = HostCopy(runs[-1], list(runs))
        for node in runs:
            self._be_here(node)
            if not self._threshold:
                node.notes.copy = load
        return load

    def _be_here(self, node: Node) -> None:
        node.notes.is_here = True
        assert node.parent is not None
        if node.parent.notes is not None:
            node.parent.notes.num_here += 1
        self._emit_stored(node, "device")

    def _emit_stored(self, node: Node, medium: str) -> None:
        if self.emit is not None:
            before = node.parent.content if node.start and node.parent is not None else None
            self.emit(PagesStored(node.content, node.start, node.end, before, medium))

    def _note_double(self, node: Node) -> None:
        """Note whether a run is in both places."""
        residence: Residence = node.notes
        if residence.is_here and residence.is_below and residence.copy is None:
            self._doubles.setdefault(node)
        else:
            self._doubles.pop(node, None)

    # Host memory ------------------------------------------------------------------------------------------

    def _take_below(self, num_pages: int) -> bool:
        """Take pages of host memory; return False if no room can be made. What was evicted for it is lost then."""
        num_short = num_pages - self.num_free_below
        if num_short > 0 and self._evict_below(num_short) < num_short:
            self.num_refused += num_pages
            return False
        self.num_free_below -= num_pages
        return True

    def evict_below(self) -> None:
        """Evict all that can be evicted from host memory."""
        self._evict_below(self.total_below)

    def _evict_below(self, count: int) -> int:
        """Evict runs of host memory until `count` pages are evicted; return how many are."""
        num_free = self.num_free_below
        if not self._threshold:
            self._evict_doubles(num_free + count)
        while self.num_free_below - num_free < count:
            node = self.tiers.below.pop()
            if node is None:
                break
            self._drop(node)
            parent = node.parent
            if parent is not None and parent.notes is not None:
                self._note_leaf(parent)
        self.num_evicted_below += self.num_free_below - num_free
        return self.num_free_below - num_free

    def _evict_doubles(self, num_wanted: int) -> None:
        """Evict copies of what is on the device until `num_wanted` pages are free, those of the next leaves last."""
        for spares in (True, False):
            for node in list(self._doubles):
                if self.num_free_below >= num_wanted:
                    return
                residence: Residence = node.notes
                if not (residence.is_here and residence.is_below):
                    del self._doubles[node]
                elif residence.copy is None and not (spares and self.tiers.is_leaf(node)):
                    residence.is_below = False
                    self.num_free_below += node.end - node.start
                    del self._doubles[node]
                    self._emit_removed_below(node)

    # Storage below it -------------------------------------------------------------------------------------

    def hold(self, node: Node) -> None:
        """Keep the copy of a run in host memory."""
        node.notes.num_held += 1
        self.tiers.below.discard(node)

    def let_go(self, node: Node, start: int) -> None:
        """Undo `hold`, of a run that began with page `start` then."""
        while True:
            node.notes.num_held -= 1
            self._note_leaf(node)
            if node.start <= start:
                return
            assert node.parent is not None
            node = node.parent

    def take_to_fetch(self, num_pages: int, least: int) -> int:
        """Take room for up to `num_pages` pages; return for how many, 0 if there is room for fewer than `least`.

        If they do not fit, as many pages are evicted as are asked for, whatever is free.
        """
        if num_pages > self.num_free_below:
            self._evict_below(num_pages)
            num_pages = min(num_pages, self.num_free_below)
            if num_pages < least:
                return 0
        self.num_free_below -= num_pages
        self.num_fetching += num_pages
        return num_pages

    def give_back(self, num_pages: int) -> None:
        """Free pages that were taken to be read into."""
        self.num_fetching -= num_pages
        self.num_free_below += num_pages

    def fetched(self, above: Node | None, content: Content, start: int, end: int) -> int:
        """Make pages [start, end) of `content`, which were read, findable after `above`; None: from the first one.

        Return how many of them host memory had already: these are free.
        """
        tiers, num_twice, num_pages = self.tiers, 0, end - start
        last = above
        if above is not None:
            tiers.touch(above)
        elif num_pages:
            last = self._root(content.salt)
        while start < end:
            assert last is not None
            key = content.key(start)
            if last.children is None:
                last.children = {}
            node = last.children.get(key)
            if node is None:
                node = last.children[key] = Node(content, key, start, end, 0, last)
                residence = node.notes = Residence()
                residence.is_here, residence.is_below = False, True
                tiers.touch(node)
                tiers.below.discard(last)
                self._note_leaf(node)
                self._emit_stored(node, self.medium)
            else:
                tiers.touch(node)
                common = content.common_pages(node.content, start, min(end, node.end))
                if common < node.end:
                    node = self.part(node, common)
                if node.notes.is_below:
                    num_twice += node.end - start
                else:
                    node.notes.is_below = True
                    self._emit_stored(node, self.medium)
            start, last = node.end, node
        self.give_back(num_twice)
        self.num_fetching -= num_pages - num_twice
        return num_twice

    def _drop(self, node: Node) -> None:
        """Remove a run of host memory alone, and all that follow it, from the tree."""
        for child in list((node.children or {}).values()):
            self.tiers.below.discard(child)
            self._drop(child)
        assert node.parent is not None and node.parent.children is not None
        assert not (node.notes.is_here or node.refs), f"{node} is in use"
        node.notes.is_below = False
        self.num_free_below += node.end - node.start
        del node.parent.children[node.key]
        self._emit_removed_below(node)

    def _note_leaf(self, node: Node) -> None:
        """List `node` for eviction from host memory, if it may be evicted."""
        if not (node.notes.is_here or node.refs or node.children or node.notes.num_held):
            self.tiers.below.add(node)

    def _emit_removed_below(self, node: Node) -> None:
        if self.emit is not None:
            self.emit(PagesRemoved(node.content, node.start, node.end, self.medium))

    # As RadixTree -----------------------------------------------------------------------------------------

    def part(self, node: Node, page: int) -> Node:
        """Split a run before `page`; return the first part."""
        head = super().part(node, page)
        if not self._threshold:
            self._note_double(head)
        return head

    def _join(self, node: Node, path: Path) -> int:
        """Let one more holder reference a run; if it is in host memory alone, the holder's pages are its own."""
        if node.notes.is_here:
            return super()._join(node, path)
        self.tiers.below.discard(node)
        node.refs += 1
        self._be_here(node)
        if not self._threshold:
            self._note_double(node)
        return 0

    def _evict_run(self, node: Node) -> None:
        """Evict a run from the device; with `write_back`, copy it first. Without a copy, all that follow it go too."""
        residence: Residence = node.notes
        num_pages = node.end - node.start
        if not (residence.is_below or self._threshold) and self._take_below(num_pages):
            residence.is_below = True
            self.num_written += num_pages
            self._note_double(node)
            self._emit_stored(node, self.medium)
        if not residence.is_below:
            for child in list((node.children or {}).values()):
                self.tiers.below.discard(child)
                self._drop(child)
            super()._evict_run(node)
            residence.is_here = False
            return
        self.num_cached -= num_pages
        self.tiers.removed(node)
        residence.is_here = False
        if self.emit is not None:
            self.emit(PagesRemoved(node.content, node.start, node.end))
        self._note_leaf(node)

    def nodes(self) -> Iterator[Node]:
        """Iterate over all runs on the device, parents before children."""
        return iter([node for node in super().nodes() if node.notes.is_here])

    def check_below(self) -> None:
        """Assert that the pages of host memory are those of its runs, and that those it may evict are listed."""
        num_pages = 0
        for node in super().nodes():
            residence: Residence = node.notes
            followers = list((node.children or {}).values())
            assert residence.is_here or residence.is_below, f"L1: {node} is nowhere"
            num_pages += (node.end - node.start) * residence.is_below
            num_here = sum(follower.notes.is_here for follower in followers)
            assert residence.num_here == num_here, f"L3: {residence.num_here} runs after {node}, not {num_here}"
            is_leaf = not (residence.is_here or node.refs or followers or residence.num_held)
            assert is_leaf == (node in self.tiers.below), f"L2: {node} is to be evicted from host memory, or not"
        num_pages += self.num_fetching
        assert num_pages + self.num_free_below == self.total_below, f"L1: {num_pages} pages in host memory"


class HostRadixCache(RadixCache):
    """A RadixCache with host memory below it. `loading`: loads that have not begun; `copying`: what was begun."""

    __slots__ = ("copying", "loading", "tiered")

    def __init__(self, pool: Pool, tree: HostRadixTree) -> None:
        super().__init__(pool, tree)
        self.tiered = tree
        self.loading: list[HostCopy] = []
        self.copying: dict[HostCopy, bool] = {}
        """Copies and loads that were begun, and whether each is a load."""

    def evict(self, count: int) -> None:
        """Evict cached pages, as RadixCache; after all of them, also what host memory can evict."""
        super().evict(count)
        if not self.tiered.num_cached:
            self.tiered.evict_below()

    def num_on_device(self, match: Match) -> int:
        """Return how many pages of `match` are on the device: those before its runs of host memory alone."""
        below = [node.start for node in match.nodes if not node.notes.is_here]
        return min(below, default=match.num_pages)

    def load(self, runs: Path) -> bool:
        """Load `runs`, of host memory alone, if they are worth it and there is room; return whether it is done.

        They are on the device at once, and in use until the load ends.
        """
        tree, last = self.tiered, runs[-1]
        num_pages = last.end - runs[0].start
        if num_pages * last.content.page_size < LEAST_LOADED:
            return False
        num_cached = tree.num_cached
        tree.lock(last)
        self.num_free -= num_cached - tree.num_cached
        self.make_room(num_pages)
        if not self.pool.has_empty(num_pages):
            num_cached = tree.num_cached
            tree.unlock(last)
            self._release(tree.num_cached - num_cached)
            return False
        self.pool.take(num_pages)
        self.num_free -= num_pages
        self.loading.append(tree.arrive(runs))
        return True

    def begin_copies(self) -> list[HostCopy]:
        """Return the copies to host memory that begin now."""
        copies, self.tiered.queued = self.tiered.queued, []
        self.copying.update(dict.fromkeys(copies, False))
        return copies

    def begin_loads(self) -> list[HostCopy]:
        """Return the loads that begin now."""
        loads, self.loading = self.loading, []
        self.copying.update(dict.fromkeys(loads, True))
        return loads

    def end(self, copies: Sequence[HostCopy]) -> None:
        """Note that copies, or loads, have ended."""
        num_cached = self.tiered.num_cached
        for copy in copies:
            if self.copying.pop(copy):
                self.tiered.end_load(copy)
            else:
                self.tiered.end_copy(copy)
        self._release(self.tiered.num_cached - num_cached)

    def _release(self, num_pages: int) -> None:
        self.num_free += num_pages
        self.num_released += num_pages

    def held(self) -> list[tuple[BlockTable, int]]:
        """Return what copies keep in use, as block tables with their numbers of pages."""
        copies = [*self.tiered.queued, *self.loading, *self.copying]
        return [(BlockTable(NOTHING, [copy.node], copy.node.end, None), copy.node.end) for copy in copies]

    def check(self, tables: Iterable[tuple[BlockTable, int]], holds: Iterable[PinnedPages] = ()) -> None:
        """Assert laws L1, L2 and L3, in host memory as well."""
        super().check(tables, holds)
        self.tiered.check_below()

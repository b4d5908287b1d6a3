"""A radix cache of whole runs, as SGLang's: what requests have computed becomes findable at the ends of their prefills.

It is a PageCache with another way to publish and to evict. A run that was inserted at once is evicted at once: whole,
if nothing follows it, the least recent first. Looking for a prefix makes its runs recent, and parts a run where the
match ends. A request that computed pages that are resident by then gives its own back and goes on with those. Pages of
an answer become findable when their request ends, and are parted from those of its prompt, to be evicted before them.

Pages of a batch are taken at once: `PageCache.extend` only notes what is asked for, and `take_asked` makes room.

SGLang's `--radix-eviction-policy` is an order: `RADIX_ORDERS`. All of them name a run that no run follows; they differ
in its *rank*, which is compared before its last touch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Final

from kvarts.core.config import BatchRules
from kvarts.core.content import Content
from kvarts.core.event_log import Emit
from kvarts.core.events import PagesStored
from kvarts.core.kv.cache import BlockTable, Match
from kvarts.core.kv.eviction import Node, Path, walk
from kvarts.core.kv.page_cache import PageCache, PageNeeds
from kvarts.core.kv.pool import PageError, PageId, Pool
from kvarts.core.kv.tree import PrefixTree

__all__ = ["RADIX_ORDERS", "RadixCache", "RadixOrder", "RadixTree", "make_radix_order"]

MOST_STALE: Final = 64
"""The number of outdated entries of the heap of leaves that is tolerated in addition to one per leaf."""
RANK_SHIFT: Final = 48
"""The bits of a touch in a key of the heap, below those of the rank."""
TOUCH: Final = (1 << RANK_SHIFT) - 1


def first_to_last(path: Path) -> Path:
    """Return the runs that `path` holds; others may have split some of its own."""
    end = 0
    for node in path:
        if node.start > end:
            return list(walk(path))[::-1]
        end = node.end
    return path


class RadixOrder:
    """Lists runs that nothing references, by when they were touched; names those that no run follows.

    The `place` of a run is the number of its last touch, whether it is listed or not.
    """

    __slots__ = ("_clock", "_heap", "_leaves", "_listed", "has_notes")

    def __init__(self) -> None:
        self.has_notes = False
        """Whether `inserted` and `parted` have an effect."""
        self._clock = 0
        self._listed: dict[Node, None] = {}
        self._leaves: dict[int, Node] = {}
        """The listed runs that no run follows, by their last touch."""
        self._heap: list[int] = []
        """Their keys, and some that are outdated."""

    def key(self, node: Node) -> int:
        """Return where `node` is in the order: its last touch in the lowest bits, its rank above them."""
        place: int = node.place
        return place

    def inserted(self, node: Node, is_counted: bool, priority: int) -> None:
        """Note that a request inserted the pages of `node`; not `is_counted`: it had done so before."""

    def parted(self, head: Node, tail: Node) -> None:
        """Note that a run was split."""

    def num_followers(self, node: Node) -> int:
        """Return how many runs follow `node` and are evicted before it."""
        return len(node.children) if node.children else 0

    def touch(self, node: Node) -> None:
        """Make `node` the most recent of all."""
        place = node.place
        node.place = self._clock = self._clock + 1
        if not node.refs and place in self._leaves:
            self._leaves.pop(place)
            self._add_leaf(node)

    def touch_held(self, path: Path) -> None:
        """Make the runs that `path` holds, which are not listed, the most recent of all, the last one most."""
        clock = self._clock
        for node in first_to_last(path):
            clock += 1
            node.place = clock
        self._clock = clock

    def _add_leaf(self, node: Node) -> None:
        leaves, heap = self._leaves, self._heap
        leaves[node.place] = node
        if len(heap) > 2 * len(leaves) + MOST_STALE:
            heap[:] = [self.key(leaf) for leaf in leaves.values()]
            heapify(heap)
        else:
            heappush(heap, self.key(node))

    def __iter__(self) -> Iterator[Node]:
        """Iterate over all listed runs, in the order in which they would be evicted."""
        num_followers = {node: self.num_followers(node) for node in self._listed}
        leaves = {self.key(node): node for node, count in num_followers.items() if not count}
        heap = list(leaves)
        heapify(heap)
        while heap:
            node = leaves[heappop(heap)]
            yield node
            parent = node.parent
            if parent is not None and parent in num_followers:
                num_followers[parent] -= 1
                if not num_followers[parent]:
                    key = self.key(parent)
                    leaves[key] = parent
                    heappush(heap, key)

    def released(self, nodes: Sequence[Node]) -> None:
        """List `nodes`, each in its place."""
        for node in nodes:
            self._listed[node] = None
            if not self.num_followers(node):
                self._add_leaf(node)

    def pinned(self, nodes: Sequence[Node], path: Sequence[Node]) -> None:
        """Unlist `nodes`."""
        for node in nodes:
            del self._listed[node]
            self._leaves.pop(node.place, None)

    def removed(self, node: Node) -> None:
        """Unlist `node`; the run before it may be the next leaf."""
        del self._listed[node]
        self._leaves.pop(node.place, None)
        parent = node.parent
        if parent is not None and not parent.refs and self.num_followers(parent) == 1:
            self._add_leaf(parent)

    def put_back(self, nodes: Sequence[Node]) -> None:
        """List `nodes`, each in its place."""
        self.released(nodes)

    def split(self, head: Node, tail: Node) -> None:
        """List `head`. `RadixTree` touches both."""
        self._listed[head] = None

    def held(self, node: Node) -> None:
        """Refuse: no transfer holds runs of such a tree."""
        raise AssertionError("a transfer holds a run of a radix cache")

    def unheld(self, node: Node) -> None:
        """Refuse: no transfer holds runs of such a tree."""
        raise AssertionError("a transfer held a run of a radix cache")

    def next_run(self) -> Node:
        """Return the least recent run that no run follows."""
        heap, leaves = self._heap, self._leaves
        while True:
            node = leaves.get(heap[0])
            if node is not None:
                return node
            heappop(heap)


class Notes:
    """What an order knows of a run: requests that inserted it, their largest priority, and pages of the longest path
    through it that there ever was."""

    __slots__ = ("num_inserted", "priority", "reach")

    def __init__(self, num_inserted: int, priority: int, reach: int) -> None:
        self.num_inserted = num_inserted
        self.priority = priority
        self.reach = reach


class RankedOrder(RadixOrder):
    """Runs of the lowest rank first, then the least recent ones. Owner of the `notes` of runs."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__()
        self.has_notes = True

    def rank(self, node: Node) -> int:
        """Return the rank of `node`, which changes only while a request holds it, or when it is split: here 0."""
        return 0

    def key(self, node: Node) -> int:
        """Return the rank above the last touch."""
        place: int = node.place
        return (self.rank(node) << RANK_SHIFT) + place

    def inserted(self, node: Node, is_counted: bool, priority: int) -> None:
        """Note an insertion."""
        notes = node.notes
        if notes is None:
            node.notes = Notes(int(is_counted), priority, node.end)
            above = node.parent
            while above is not None and above.notes is not None and above.notes.reach < node.end:
                above.notes.reach = node.end
                above = above.parent
            return
        notes.num_inserted += is_counted
        if priority > notes.priority:
            notes.priority = priority

    def next_run(self) -> Node:
        """Return the run of the lowest rank that no run follows, the least recent of these."""
        heap, leaves = self._heap, self._leaves
        while True:
            node = leaves.get(heap[0] & TOUCH)
            if node is not None and self.key(node) == heap[0]:  # else it had another rank when it was listed before
                return node
            heappop(heap)

    def parted(self, head: Node, tail: Node) -> None:
        """Give both parts the notes of the run."""
        notes: Notes = tail.notes
        head.notes = Notes(notes.num_inserted, notes.priority, notes.reach)


class LfuOrder(RankedOrder):
    """Runs that the fewest requests have inserted first: SGLang's `lfu`. A hit counts when its request is inserted."""

    __slots__ = ()

    def rank(self, node: Node) -> int:
        """Return the number of requests that inserted it."""
        notes: Notes = node.notes
        return notes.num_inserted


class SlruOrder(RankedOrder):
    """Runs that fewer requests than `protected_threshold` have inserted first: SGLang's `slru`."""

    __slots__ = ("_threshold",)

    def __init__(self, protected_threshold: int = 2) -> None:
        super().__init__()
        self._threshold = protected_threshold

    def rank(self, node: Node) -> int:
        """Return 1 for a protected run, else 0."""
        notes: Notes = node.notes
        return int(notes.num_inserted >= self._threshold)


class PriorityOrder(RankedOrder):
    """Runs of requests of the lowest priority first: SGLang's `priority`. Prompts count one more than their answers."""

    __slots__ = ()

    def rank(self, node: Node) -> int:
        """Return the largest priority."""
        notes: Notes = node.notes
        return notes.priority


class TlruOrder(RankedOrder):
    """Ends of conversations that need not be cached for a TTFT first: SGLang's `tlru`, T-LRU.

    The next prompt of a conversation is expected to add `next_prompt_estimate` tokens, and may compute `threshold`
    tokens in time: a run is not needed if all but so many tokens of the longest prompt stay without it.
    """

    __slots__ = ("_page_size", "_spare")

    def __init__(self, threshold: int = 0, next_prompt_estimate: int = 0, page_size: int = 1) -> None:
        super().__init__()
        self._spare = threshold - next_prompt_estimate
        self._page_size = page_size

    def rank(self, node: Node) -> int:
        """Return -1 for a run that is not needed, else 0."""
        notes: Notes = node.notes
        needed = max(notes.reach * self._page_size - self._spare, 0)
        return -1 if node.start * self._page_size >= needed else 0


RADIX_ORDERS: Final[dict[str, Callable[..., RadixOrder]]] = {
    "lru": RadixOrder,
    "lfu": LfuOrder,
    "slru": SlruOrder,
    "priority": PriorityOrder,
    "tlru": TlruOrder,
}
"""Orders of eviction by SGLang's names."""


def make_radix_order(rules: BatchRules, page_size: int) -> RadixOrder:
    """Return the order that the rules name, with its numbers."""
    numbers = rules.eviction_config
    if rules.eviction == "tlru":
        numbers = {**numbers, "page_size": page_size}
    return RADIX_ORDERS[rules.eviction](**numbers)


class RadixTree(PrefixTree):
    """A prefix tree of runs that are inserted and evicted whole."""

    def __init__(self, emit: Emit | None = None, order: RadixOrder | None = None) -> None:
        self.touches = RadixOrder() if order is None else order
        super().__init__(self.touches, emit)

    def visit(self, match: Match) -> None:
        """Part the last run of `match` where it ends, and make its runs recent, the last one most."""
        if match.nodes and match.nodes[-1].end > match.num_pages:
            match.nodes[-1] = self.part(match.nodes[-1], match.num_pages)
        for node in match.nodes:
            self.touches.touch(node)

    def is_longest(self, match: Match, limit: int) -> bool:
        """Return whether `match`, which was visited, still is the longest resident prefix of at most `limit` pages.

        If so, bring its `num_shared` up to date.
        """
        nodes = match.nodes
        if not nodes or match.num_pages > limit:
            return False
        end = num_shared = 0
        for node in nodes:
            if node.start != end:
                return False  # it was split
            end = node.end
            if node.refs:
                num_shared += end - node.start
        last = nodes[-1]
        parent, followers = last.parent, last.children
        assert parent is not None and parent.children is not None
        if parent.children.get(last.key) is not last:
            return False  # it was evicted
        if followers and end < limit and match.content.key(end) in followers:
            return False
        match.num_shared = num_shared
        return True

    def part(self, node: Node, page: int) -> Node:
        """Split a run before `page`; return the first part. Both are recent, the second one most."""
        touches = self.touches
        head = self._split(node, page)
        if touches.has_notes:
            touches.parted(head, node)
        head.place = None  # that is the place of the second part
        touches.touch(head)
        touches.touch(node)
        return head

    def insert(self, path: Path, content: Content, end: int, *, num_inserted: int = 0, priority: int = 0) -> int:
        """Make the pages from the end of `path` to `end` findable, and let its holder reference the resident ones.

        `num_inserted`: pages that the holder inserted before. Return how many were resident: the holder has these
        twice. All runs up to `end` are recent.
        """
        touches, has_notes = self.touches, self.touches.has_notes
        touches.touch_held(path)
        if has_notes:
            for node in first_to_last(path):
                self._inserted(node, node.end > num_inserted, priority)
        start = path[-1].end if path else 0
        last = path[-1] if path else self._root(content.salt)
        num_resident = 0
        while start < end:
            resident = self._resident(last, content, start, end)
            if resident is None:
                node = self._add(last, content, start, end)
            else:
                node = resident
                num_resident += self._join(node, path)
            if has_notes:
                self._inserted(node, node.end > num_inserted, priority)
            path.append(node)
            start = node.end
            last = node
        return num_resident

    def _resident(self, last: Node, content: Content, start: int, end: int) -> Node | None:
        """Return the run after `last` that is resident with pages from `start` on, parted where it differs or at `end`.

        It is the most recent one. None if there is no such run.
        """
        node = last.children.get(content.key(start)) if last.children else None
        if node is None:
            return None
        self.touches.touch(node)
        common = content.common_pages(node.content, start, min(end, node.end))
        return self.part(node, common) if common < node.end else node

    def _add(self, last: Node, content: Content, start: int, end: int) -> Node:
        """Make pages [start, end) findable, as a run after `last`; return it, the most recent one."""
        key = content.key(start)
        node = Node(content, key, start, end, 1, last)
        if last.children is None:
            last.children = {}
        last.children[key] = node
        self.touches.touch(node)
        if self.emit is not None:
            self.emit(PagesStored(content, start, end, last.content if start else None))
        return node

    def _inserted(self, node: Node, is_counted: bool, priority: int) -> None:
        """Let the order note that a request inserted the pages of `node`."""
        self.touches.inserted(node, is_counted, priority)

    def _join(self, node: Node, path: Path) -> int:
        """Let one more holder reference a run; return how many of its pages that holder has twice from now on."""
        num_pages = node.end - node.start
        if not node.refs:
            self.num_cached -= num_pages
            self.touches.pinned((node,), path)
        node.refs += 1
        return num_pages

    def part_at(self, path: Path, page: int, priority: int = 0) -> None:
        """Make the runs of `path` up to `page` recent, and part the one that goes on beyond it."""
        touches = self.touches
        for node in first_to_last(path):
            if node.start >= page:
                return
            head = node
            if node.end > page:
                head = self.part(node, page)
            else:
                touches.touch(node)
            if touches.has_notes:
                self._inserted(head, False, priority)

    def depth_first(self, matches: Sequence[Match]) -> list[int]:
        """Return the order of `matches` in which those of the runs that most of them seek come first, deepest first.

        Equal runs have the order in which they came into the tree. SGLang's `dfs-weight`.
        """
        counts: dict[Node, int] = {}
        places: dict[Node | None, list[int]] = {}
        for index, match in enumerate(matches):
            node = match.nodes[-1] if match.nodes else None
            places.setdefault(node, []).append(index)
            while node is not None and node.parent is not None:  # others may have split runs since
                counts[node] = counts.get(node, 0) + 1
                node = node.parent
        order: list[int] = []
        stack: list[tuple[Node | None, bool]] = [(None, False)]
        while stack:
            node, is_done = stack.pop()
            if is_done:
                order += places.get(node, ())
                continue
            stack.append((node, True))
            above = list(self._roots.values()) if node is None else [node]
            sought = [child for each in above for child in (each.children or {}).values() if child in counts]
            sought.sort(key=lambda child: -counts[child])
            stack += [(child, False) for child in reversed(sought)]
        return order

    def evict(self, count: int) -> list[PageId]:
        """Evict whole runs until `count` pages or more are evicted. `num_cached` tells how many."""
        assert count <= self.num_cached, f"{count} pages to evict, {self.num_cached} cached"
        least = self.num_cached - count
        while self.num_cached > least:
            self._evict_run(self.touches.next_run())
        return []

    def _evict_run(self, node: Node) -> None:
        self.num_cached -= node.end - node.start
        self._remove(node)


class RadixCache(PageCache):
    """Pages without ids in a RadixTree, taken for whole batches."""

    __slots__ = ("_asked", "_inserted", "radix")

    def __init__(self, pool: Pool, tree: RadixTree) -> None:
        assert not pool.has_ids
        super().__init__(pool, tree)
        self.radix = tree
        self.needs = RadixNeeds(self)
        self._asked: list[tuple[BlockTable, int]] = []
        """The block tables of the batch being planned, and the pages that each shall have."""
        self._inserted: set[BlockTable] = set()
        """Those that were inserted, if the order has notes of that."""

    @property
    def num_empty(self) -> int:
        """Pages that can be taken without eviction."""
        return self.num_free - self.radix.num_cached

    def num_on_device(self, match: Match) -> int:
        """Return how many pages of `match` are on the device."""
        return match.num_pages

    def make_room(self, count: int) -> None:
        """Evict whole runs until `count` pages are empty, or no more can be evicted."""
        num_cached = self.radix.num_cached
        num_short = count - (self.num_free - num_cached)
        if num_short > 0 and num_cached:
            self.radix.evict(min(num_short, num_cached))
            num_evicted = num_cached - self.radix.num_cached
            self.num_evicted += num_evicted
            self.pool.give(num_evicted, None)

    def take(self, count: int) -> list[PageId] | None:
        """Take `count` pages, at most `num_free`. Raise PageError for more than are free."""
        if not 0 <= count <= self.num_free:
            raise PageError(f"{count} pages asked for, {self.num_free} free")
        if count > self.num_free - self.radix.num_cached:
            self.make_room(count)
        self.num_free -= count
        self.pool.take(count)
        return None

    def evict(self, count: int) -> None:
        """Evict cached pages until `count` more, or some more than that, are empty."""
        self.make_room(count + self.num_free - self.radix.num_cached)

    def extend(self, table: BlockTable, num_tokens: int, *, is_end: bool) -> None:
        """Note that `table` shall have the pages of the first `num_tokens` tokens: `take_asked` follows."""
        self._asked.append((table, -(-num_tokens // table.content.page_size)))

    def take_asked(self, num_tokens: int, page_size: int) -> None:
        """Make room for `num_tokens` tokens, of the batch and perhaps some more, and take the pages of the batch."""
        self.make_room(-(-num_tokens // page_size))
        for table, num_pages in self._asked:
            self.grow(table, num_pages)
        self._asked = []

    def publish(self, table: BlockTable, num_tokens: int) -> None:
        """Do nothing: pages become findable by `insert`, and at the end of their request."""

    def insert(self, table: BlockTable, num_full_pages: int, priority: int = 0) -> None:
        """Make the first pages of `table` findable, and release those that others had made findable before."""
        tree, content = self.radix, table.content
        if not table.is_open:
            raise PageError("the block table is closed")
        self.num_published += 1
        num_cached = tree.num_cached
        num_inserted = 0
        if tree.touches.has_notes:
            num_inserted = table.num_named if table in self._inserted else 0
            self._inserted.add(table)
        num_twice = tree.insert(table.path, content, num_full_pages, num_inserted=num_inserted, priority=priority)
        num_prompt = content.num_prompt_tokens // content.page_size
        if 0 < num_prompt < num_full_pages:
            tree.part_at(table.path, num_prompt, priority + 1)
        self._give_back(num_twice, num_cached)

    def _give_back(self, num_twice: int, num_cached: int) -> None:
        """Release pages that an insertion found resident; before it, `num_cached` were cached."""
        if num_twice:
            self.pool.give(num_twice, None)
            num_released = num_twice + self.radix.num_cached - num_cached
            self.num_free += num_released
            self.num_released += num_released

    def close(self, table: BlockTable, num_full_pages: int, num_pages: int) -> None:
        """Release everything; pages that are not findable become empty."""
        self._inserted.discard(table)
        super().close(table, table.num_named, num_pages)


class RadixNeeds(PageNeeds):
    """Needs of requests that are admitted only if a page is left beyond what they may take."""

    __slots__ = ()

    def alone(self, num_tokens: int, page_size: int, enough: int = 0) -> int:
        """Return the pages of `num_tokens` tokens, with one that stays free, if they are more than `enough`, else 0.

        A request computes all its tokens but the last, and is promised that one as well.
        """
        num_pages = -(-(num_tokens + 2) // page_size) + 1
        return num_pages if num_pages > enough else 0

"""A radix cache for a model with states (Mamba, linear attention), as SGLang's: these have a pool of slots.

A run of pages may have the state after its last page. A prefix is found if it ends with one; a request copies that to a
slot of its own, and keeps it in use. A request that inserts pages leaves the state at their end. A run that is split
keeps its state at the end, so the first part has none.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvarts.core.content import Content
from kvarts.core.event_log import Emit
from kvarts.core.kv.cache import BlockTable, Match
from kvarts.core.kv.components import Component, ComponentCache, ComponentMatch, ComponentOrder, ComponentTree
from kvarts.core.kv.eviction import Node, Path, PinnedPages
from kvarts.core.kv.pool import Pool

__all__ = ["HeldState", "StateRadixCache", "StateRadixTree"]


class StateOrder(ComponentOrder):
    """As RadixOrder; and the order in which states are evicted."""

    __slots__ = ()

    def size(self, node: Node) -> int:
        """Return 1: a state has a slot."""
        return 1

    def parted(self, head: Node, tail: Node) -> None:
        """Let the first part of a run have no state."""
        head.notes = Component()


class StateRadixTree(ComponentTree):
    """A RadixTree with a pool of slots for states."""

    def __init__(self, num_slots: int, emit: Emit | None = None) -> None:
        super().__init__(StateOrder(), num_slots, emit)

    def match(self, content: Content, limit: int) -> ComponentMatch:
        """Return the longest prefix of `content`, at most `limit` pages, with a state at its end. Change nothing."""
        found = super().match(content, limit)
        walked, reach = found.nodes, found.num_pages
        best = end = num_shared = shared = 0
        for index, node in enumerate(walked):
            if node.end > reach:
                break
            if node.refs:
                shared += node.end - node.start
            if node.notes.is_here:
                best, end, num_shared = index + 1, node.end, shared
        return ComponentMatch(content, walked[:best], end, num_shared, walked, reach)

    def touch_end(self, path: Path) -> None:
        """Make the state at the end of `path` the most recent."""
        if path:
            self.components.turn()
            self.components.touch_component(path[-1])

    def leave_state(self, node: Node) -> bool:
        """Let a slot with the state after `node` be that run's, unless it has one: return False then."""
        has_one: bool = node.notes.is_here
        if has_one:
            self.touch_end([node])
        else:
            self.components.give(node)
        self.components.touch(node)
        return not has_one


class HeldState:
    """What a request has of slots: `num_slots` of its own; and it keeps the state of `node` in use.

    `branch`: the pages of the longest prefix that was found without states, at its start. `num_inserted`: the tokens
    that it had computed when its tokens were to be inserted last; `is_answering`: with the last of its prompt.
    """

    __slots__ = ("branch", "is_answering", "node", "num_inserted", "num_slots")

    def __init__(self, match: ComponentMatch, num_slots: int) -> None:
        self.branch = match.reach
        self.num_inserted = match.num_pages * match.content.page_size
        self.is_answering = False
        self.num_slots = num_slots
        self.node: Node | None = match.nodes[-1] if match.nodes else None


class StateRadixCache(ComponentCache):
    """A RadixCache with a second pool, of slots for states. A running request has `num_each` slots."""

    __slots__ = ("_held", "_num_claimed", "num_each", "stateful")

    def __init__(self, pool: Pool, tree: StateRadixTree, num_each: int) -> None:
        super().__init__(pool, tree)
        self.stateful = tree
        self.num_each = num_each
        self._held: dict[BlockTable, HeldState] = {}
        self._num_claimed = 0

    def held_state(self, table: BlockTable) -> HeldState:
        """Return what the request of `table` has of slots."""
        return self._held[table]

    def claim(self, match: Match) -> None:
        """Take a slot for the state that the head of the queue has found, which is not evicted for it."""
        assert not self._num_claimed
        if match.nodes:
            self.stateful.keep_in_use(match.nodes[-1])
            self._take_slots(1)
            self.stateful.let_go(match.nodes[-1])
            self._num_claimed = 1

    def disclaim(self) -> None:
        """Give back the slot of a head that was not admitted."""
        self.stateful.num_unit_empty += self._num_claimed
        self._num_claimed = 0

    def _take_slots(self, count: int) -> None:
        self.evict_idle(count)
        self.stateful.num_unit_empty -= count
        assert self.stateful.num_unit_empty >= 0, "more slots are taken than are free"

    def open(self, match: Match) -> BlockTable:
        """Pin `match`, keep its state in use, and have the slot that was claimed for it."""
        assert isinstance(match, ComponentMatch)
        table = super().open(match)
        held = self._held[table] = HeldState(match, self._num_claimed)
        self._num_claimed = 0
        if held.node is not None:
            self.stateful.keep_in_use(held.node)
        return table

    def take_rest(self, tables: Iterable[BlockTable]) -> None:
        """Take the slots that the requests of `tables`, which start, have not taken yet."""
        every = [self._held[table] for table in tables]
        self._take_slots(sum([self.num_each - held.num_slots for held in every]))
        for held in every:
            held.num_slots = self.num_each

    def insert_state(self, table: BlockTable, num_full_pages: int, *, is_over: bool) -> None:
        """Make the first pages of `table` findable, with the state at their end.

        A request that is over leaves the slot of that state; one that goes on takes another one for it before.
        """
        tree, held = self.stateful, self._held[table]
        if not is_over:
            self._take_slots(1)
            held.num_slots += 1
        self.num_published += 1
        num_cached = tree.num_cached
        num_twice = tree.insert(table.path, table.content, num_full_pages)
        node = table.path[-1]
        held.num_slots -= 1
        if not tree.leave_state(node):
            tree.num_unit_empty += 1
        if held.node is not None:
            tree.let_go(held.node)
        tree.keep_in_use(node)
        held.node = node
        self._give_back(num_twice, num_cached)

    def close(self, table: BlockTable, num_full_pages: int, num_pages: int) -> None:
        """Release everything, with its slots."""
        held = self._held.pop(table)
        self.stateful.num_unit_empty += held.num_slots
        if held.node is not None:
            self.stateful.let_go(held.node)
        super().close(table, num_full_pages, num_pages)

    def check(self, tables: Iterable[tuple[BlockTable, int]], holds: Iterable[PinnedPages] = ()) -> None:
        """Assert laws L1, L2 and L3, of states as well."""
        tables = list(tables)
        super().check(tables, holds)
        locks: dict[int, int] = {}
        num_private = self._num_claimed
        for table, _ in tables:
            held = self._held[table]
            num_private += held.num_slots
            if held.node is not None:
                locks[id(held.node)] = locks.get(id(held.node), 0) + 1
        self.stateful.check_components(locks, num_private)

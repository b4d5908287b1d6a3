"""A radix cache with a second pool: of what runs of pages may have besides their KV, a *component*, as SGLang calls it.

It is the KV of layers with sliding windows (kvarts.core.kv.windows), or the state after the run
(kvarts.core.kv.states). The longest prefix is not always found: it has to end with what the component needs there.

Each pool evicts for itself. If pages are lacking, whole runs that none follows are removed, as in any radix cache; if
the component is lacking, the least recent is evicted, with its run if none follows that and no request has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from typing import Final

from kvarts.core.content import Content
from kvarts.core.event_log import Emit
from kvarts.core.kv.cache import Match
from kvarts.core.kv.eviction import Node, Path
from kvarts.core.kv.pool import Pool
from kvarts.core.kv.radix import MOST_STALE, RadixCache, RadixOrder, RadixTree

__all__ = ["Component", "ComponentCache", "ComponentMatch", "ComponentOrder", "ComponentTree", "is_idle"]

END_BITS: Final = 40
"""The bits of a run's last page in its key, below those of the touch of its component."""


class Component:
    """What a run has of the component: the `notes` of a node. `num_locks`: how many requests keep it in use.

    `touch`: when it was touched last. Runs that were touched together follow each other, the last one is most recent.
    """

    __slots__ = ("is_here", "num_locks", "touch")

    def __init__(self) -> None:
        self.is_here = False
        self.num_locks = self.touch = 0


def is_idle(node: Node) -> bool:
    """Return whether `node` has the component, and nothing keeps it in use."""
    component: Component = node.notes
    return component.is_here and not component.num_locks


class ComponentMatch(Match):
    """A match of `nodes`, with the component. `walked`: the runs of `reach` pages, the longest prefix without it."""

    __slots__ = ("reach", "walked")

    def __init__(
        self, content: Content, nodes: Path, num_pages: int, num_shared: int, walked: Path, reach: int
    ) -> None:
        super().__init__(content, nodes, num_pages, num_shared)
        self.walked = walked
        self.reach = reach


class ComponentOrder(RadixOrder):
    """As RadixOrder; and the order in which components are evicted."""

    __slots__ = ("_by_key", "_clock_of_component", "_keys", "num_idle")

    def __init__(self) -> None:
        super().__init__()
        self.has_notes = True
        self.num_idle = 0
        """What runs have of the component that is not in use, in units of its pool."""
        self._clock_of_component = 0
        self._by_key: dict[int, Node] = {}
        """The runs with a component that is not in use."""
        self._keys: list[int] = []
        """A heap of their keys, and of some that are outdated."""

    def size(self, node: Node) -> int:
        """Return how much of the pool the component of `node` has: its pages."""
        return node.end - node.start

    def list_idle(self, node: Node) -> None:
        """Let the component of `node` be evicted: it is not in use."""
        self.num_idle += self.size(node)
        self._add(node)

    def unlist(self, node: Node) -> None:
        """Undo `list_idle`."""
        self.num_idle -= self.size(node)
        del self._by_key[_key_of(node)]

    def _add(self, node: Node) -> None:
        keys, by_key = self._keys, self._by_key
        key = _key_of(node)
        by_key[key] = node
        if len(keys) > 2 * len(by_key) + MOST_STALE:
            keys[:] = by_key
            heapify(keys)
        else:
            heappush(keys, key)

    def give(self, node: Node) -> None:
        """Let `node` have the component, the most recent of all."""
        component: Component = node.notes
        self.turn()
        component.is_here, component.touch = True, self._clock_of_component
        if not component.num_locks:
            self.list_idle(node)

    def turn(self) -> None:
        """Begin a new time: components that are touched after this are more recent than those before."""
        self._clock_of_component += 1

    def touch_component(self, node: Node) -> None:
        """Make the component of `node`, if it has one, the most recent since the last `turn`."""
        component: Component = node.notes
        if not component.is_here:
            return
        if component.num_locks:
            component.touch = self._clock_of_component
        else:
            del self._by_key[_key_of(node)]
            component.touch = self._clock_of_component
            self._add(node)

    def next_idle(self) -> Node:
        """Return the run with the least recent component that is not in use."""
        keys = self._keys
        while True:
            node = self._by_key.get(keys[0])
            if node is not None:
                return node
            heappop(keys)

    def is_listed(self, node: Node) -> bool:
        """Return whether the component of `node` may be evicted."""
        return self._by_key.get(_key_of(node)) is node


def _key_of(node: Node) -> int:
    touch: int = node.notes.touch
    return (touch << END_BITS) + node.end


class ComponentTree(RadixTree):
    """A RadixTree with a pool of `num_units` for the component of its runs."""

    def __init__(self, components: ComponentOrder, num_units: int, emit: Emit | None) -> None:
        self.components = components
        super().__init__(emit, components)
        self.num_units = self.num_unit_empty = num_units

    def visit(self, match: Match) -> None:
        """Part the last run that was looked at where the prefix ends, and make the runs of `match` recent."""
        assert isinstance(match, ComponentMatch)
        nodes, walked = match.nodes, match.walked
        if walked and walked[-1].end > match.reach:
            head = self.part(walked[-1], match.reach)
            if len(nodes) == len(walked):
                nodes[-1] = head
            walked[-1] = head
        self.touch_end(nodes)
        for node in nodes:
            self.components.touch(node)

    def touch_end(self, path: Path) -> None:
        """Make recent what a request that found `path` needs of the component."""

    def is_longest(self, match: Match, limit: int) -> bool:
        """Return False: components may have been evicted, or computed, since."""
        return False

    def keep_in_use(self, node: Node) -> None:
        """Let one more request keep the component of `node` in use."""
        if is_idle(node):
            self.components.unlist(node)
        node.notes.num_locks += 1

    def let_go(self, node: Node) -> None:
        """Undo `keep_in_use`."""
        component: Component = node.notes
        component.num_locks -= 1
        if is_idle(node):
            self.components.list_idle(node)

    def _add(self, last: Node, content: Content, start: int, end: int) -> Node:
        node = super()._add(last, content, start, end)
        node.notes = Component()
        return node

    def _evict_run(self, node: Node) -> None:
        if node.notes.is_here:
            self._drop(node)
        super()._evict_run(node)

    def evict_idle(self) -> None:
        """Evict the least recent component, with its run if none follows it and nothing holds it."""
        node = self.components.next_idle()
        if node.refs or node.children:
            self._drop(node)
        else:
            self._evict_run(node)

    def _drop(self, node: Node) -> None:
        self.components.unlist(node)
        self.num_unit_empty += self.components.size(node)
        node.notes.is_here = False

    def check_components(self, locks: Mapping[int, int], num_private: int) -> None:
        """Assert laws L1 and L2 of the component: requests have `num_private`, and `locks` of nodes, by id."""
        order = self.components
        num_idle = num_used = 0
        for node in self.nodes():
            component: Component = node.notes
            num_locks = locks.get(id(node), 0)
            assert component.num_locks == num_locks, f"L2: the component of {node} is held {component.num_locks} times"
            assert order.is_listed(node) == is_idle(node), f"L2: the component of {node} is to be evicted, or not"
            num_idle += order.size(node) * is_idle(node)
            num_used += order.size(node) * (component.is_here and num_locks > 0)
        assert num_idle == order.num_idle, f"L1: {num_idle} of the component are cached"
        num_units = num_idle + num_used + num_private + self.num_unit_empty
        assert num_units == self.num_units, f"L1: {num_units} of the component"


class ComponentCache(RadixCache):
    """A RadixCache with a second pool, of the component."""

    __slots__ = ("joint",)

    def __init__(self, pool: Pool, tree: ComponentTree) -> None:
        super().__init__(pool, tree)
        self.joint = tree

    def evict_idle(self, count: int) -> None:
        """Evict components that are not in use until the pool has `count` empty, as far as possible."""
        tree = self.joint
        num_cached = tree.num_cached
        while tree.num_unit_empty < count and tree.components.num_idle:
            tree.evict_idle()
        num_evicted = num_cached - tree.num_cached
        if num_evicted:
            self.num_evicted += num_evicted
            self.pool.give(num_evicted, None)

"""SGLang's HiCache: host memory below the tree of the restatement. A node is on the device, on the host, or on both.

A copy takes a number of steps. What is on the host counts from when its copy is queued; what is loaded is on the device
from when its load is planned. Copies of nodes that only the host has are evicted there; the others keep their room,
except with write_back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from oracles.naive_sglang import NaiveRadixTree, SglangLoad, _Node

__all__ = ["NaiveHostTree"]

LEAST_LOADED = 10
"""The fewest tokens that are loaded; fewer are computed again."""
THRESHOLDS = {"write_through": 1, "write_through_selective": 2, "write_back": 0}
"""The insertions after which a node is copied; 0: it is when the device evicts it."""


class _HostNode(_Node):
    children: Any
    parent: Any

    def __init__(self, parent: _HostNode | None, tokens: tuple[int, ...], time: float) -> None:
        super().__init__(parent, tokens, time)
        self.is_on_device, self.is_on_host = True, False
        self.copy: _Copy | None = None
        """Its copy that is queued or under way."""
        self.load: _Copy | None = None

    def copy_to(self, upper: _Node) -> None:
        super().copy_to(upper)
        assert isinstance(upper, _HostNode)
        upper.is_on_device, upper.is_on_host = self.is_on_device, self.is_on_host
        upper.copy, upper.load = self.copy, self.load


class _Copy:
    """A copy to the host, or a load of the nodes up to one."""

    def __init__(self, node: _HostNode) -> None:
        self.node, self.end = node, -1


class NaiveHostTree(NaiveRadixTree):
    def __init__(self, load: SglangLoad) -> None:
        super().__init__(load.size, load.page_size)
        self.load_of = load
        self.root = _HostNode(None, (), 0)
        self.num_host_free = (int(load.size * load.host_ratio) // load.page_size + 1) * load.page_size
        self.threshold = THRESHOLDS[load.write_policy]
        self.step = -1
        self.queued: list[_Copy] = []
        self.writes: list[list[_Copy]] = []
        self.to_load: list[_Copy] = []
        self.loads: list[list[_Copy]] = []
        self.doubles: dict[_HostNode, None] = {}
        """Nodes that have been on both since a time; some are not any more."""

    def all_nodes(self) -> Iterator[_HostNode]:
        yield from super().nodes()  # type: ignore[misc]

    def nodes(self) -> Iterator[_Node]:
        return (node for node in self.all_nodes() if node.is_on_device)

    def on_device(self, node: _Node) -> _HostNode:
        assert isinstance(node, _HostNode)
        return node if node.is_on_device else self.on_device(node.parent)

    # Copies -----------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Take note of the copies and loads that have ended, the first ones first."""
        self.step += 1
        self.start_writes()
        while self.writes and self.writes[0][0].end <= self.step:
            for copy in self.writes.pop(0):
                for node in self.all_nodes():
                    if node.copy is copy:
                        node.copy = None
                self.lock(copy.node, -1)
        while self.loads and self.loads[0][0].end <= self.step:
            for load in self.loads.pop(0):
                self.lock(load.node, -1)
                node = load.node
                while node.parent is not None:
                    if node.load is load:
                        node.load = None
                        self.note_double(node)
                    node = node.parent

    def start_writes(self) -> None:
        for copy in self.queued:
            copy.end = self.step + self.load_of.d2h_steps
        if self.queued:
            self.writes.append(self.queued)
        self.queued = []

    def start_loads(self) -> None:
        for load in self.to_load:
            load.end = self.step + self.load_of.h2d_steps
        if self.to_load:
            self.loads.append(self.to_load)
        self.to_load = []

    def note_double(self, node: _HostNode) -> None:
        if node.is_on_device and node.is_on_host and node.copy is None and node.load is None:
            self.doubles.setdefault(node)
        else:
            self.doubles.pop(node, None)

    def count(self, node: _HostNode, end: int, num_inserted: int) -> None:
        """Count an insertion, and copy the node, with those before it that have no copy, if it is time."""
        if end <= num_inserted or not self.threshold:
            return
        node.num_inserted += 1
        if node.is_on_host or node.num_inserted < self.threshold:
            return
        chain = []
        while node.parent is not None and not node.is_on_host:
            chain.append(node)
            node = node.parent
        for each in reversed(chain):
            if not self.take_host(len(each.tokens)):
                return
            each.is_on_host = True
            each.copy = _Copy(each)
            self.lock(each, 1)
            self.queued.append(each.copy)

    def take_host(self, num_tokens: int) -> bool:
        """Take room on the host, if it can be made."""
        lacking = num_tokens - self.num_host_free
        if lacking > 0 and self.evict_host(lacking) < lacking:
            return False
        self.num_host_free -= num_tokens
        return True

    def evict_host(self, num_tokens: int) -> int:
        num_free = self.num_host_free
        if not self.threshold:
            for spares in (True, False):
                for node in list(self.doubles):
                    if self.num_host_free - num_free >= num_tokens:
                        break
                    if not (node.is_on_device and node.is_on_host):
                        del self.doubles[node]
                    elif not (spares and self.is_leaf(node)) and node.load is None:
                        node.is_on_host = False
                        self.num_host_free += len(node.tokens)
                        del self.doubles[node]
        while self.num_host_free - num_free < num_tokens:
            leaves = [node for node in self.all_nodes() if not (node.is_on_device or node.num_locks or node.children)]
            if not leaves:
                break
            self.drop(min(leaves, key=lambda node: node.time))
        return self.num_host_free - num_free

    def drop(self, node: _HostNode) -> None:
        """Drop a node, and all that follows it, from both."""
        for child in list(node.children.values()):
            assert isinstance(child, _HostNode) and not child.is_on_device
            self.drop(child)
        if node.is_on_device:
            self.num_free += len(node.tokens)
        if node.is_on_host:
            self.num_host_free += len(node.tokens)
        node.is_on_device = node.is_on_host = False
        del node.parent.children[node.tokens[: self.page_size]]

    # As NaiveRadixTree ------------------------------------------------------------------------------------

    def _split(self, node: _Node, length: int) -> _Node:
        upper = super()._split(node, length)
        assert isinstance(upper, _HostNode)
        if not self.threshold:
            self.note_double(upper)
        return upper

    def insert(self, tokens: Sequence[int], own_from: int, num_inserted: int = 0, priority: int = 0) -> _Node:
        """Add whole pages; those of nodes that only the host has are the request's from now on."""
        tokens, at = self.whole(tokens), 0
        node: Any = self.root
        while at < len(tokens):
            child, length = self._child(node, tokens, at)
            if child is None:
                new = _HostNode(node, tuple(tokens[at:]), self.now())
                node.children[new.tokens[: self.page_size]] = new
                self.count(new, len(tokens), num_inserted)
                return new
            child.time = self.now()
            node = self._split(child, length) if length < len(child.tokens) else child
            if node.is_on_device:
                self.num_free += max(0, at + length - max(at, own_from))
            else:
                assert own_from <= at
                node.is_on_device = True
                self.note_double(node)
            at += length
            self.count(node, at, num_inserted)
        last: _HostNode = node
        return last

    def is_leaf(self, node: _HostNode) -> bool:
        """Return whether the device may evict `node`."""
        return not node.num_locks and not any(child.is_on_device for child in node.children.values())

    def make_room(self, num_tokens: int) -> None:
        """Evict from the device; what is on the host as well stays there. With write_back, it is copied first."""
        while self.num_free < num_tokens:
            leaves = [node for node in self.all_nodes() if node.is_on_device and self.is_leaf(node)]
            if not leaves:
                return
            oldest = min(leaves, key=lambda node: node.time)
            assert oldest.copy is None
            if not oldest.is_on_host and not self.threshold and self.take_host(len(oldest.tokens)):
                oldest.is_on_host = True
                self.note_double(oldest)
            if oldest.is_on_host:
                oldest.is_on_device = False
                self.num_free += len(oldest.tokens)
            else:
                self.drop(oldest)

    def load_back(self, node: _Node) -> bool:
        """Load what only the host has of the path to `node`, if that is worth it and there is room."""
        assert isinstance(node, _HostNode)
        nodes: list[_HostNode] = []
        above = node
        while not above.is_on_device:
            nodes.append(above)
            above = above.parent
        num_tokens = sum(len(each.tokens) for each in nodes)
        if num_tokens < LEAST_LOADED:
            return False
        self.lock(node, 1)
        self.make_room(num_tokens)
        if self.num_free < num_tokens:
            self.lock(node, -1)
            return False
        self.num_free -= num_tokens
        load = _Copy(node)
        self.to_load.append(load)
        for each in nodes:
            each.is_on_device = True
            each.load = None if self.threshold else load
        return True

"""An eviction order as a researcher would write one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

from kvarts.kv.eviction import BaseOrder
from kvarts.kv.node import Node

__all__ = ["FewestHits"]


class FewestHits(BaseOrder):
    """What was hit least often goes first, and of that what was released first."""

    def __init__(self) -> None:
        self._runs: set[Node] = set()
        self._clock = count()

    def __iter__(self) -> Iterator[Node]:
        return iter(sorted(self._runs, key=lambda node: (node.place, -node.start)))

    def released(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            node.place = (node.place or (0,))[0], next(self._clock)
        self._runs.update(nodes)

    def pinned(self, nodes: Sequence[Node], path: Sequence[Node]) -> None:
        self._runs.difference_update(nodes)
        for node in path:
            hits, *when = node.place or (0,)
            node.place = (hits + 1, *when)

    def removed(self, node: Node) -> None:
        self._runs.remove(node)

    def split(self, head: Node, tail: Node) -> None:
        self._runs.add(head)  # with the place of `tail`

"""Eviction orders as a researcher would write them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import pytest

from kvarts.core.kv.eviction import BaseOrder, Run

__all__ = ["FewestHits", "LatestFirst", "MostHits", "plant_deaf"]


class FewestHits(BaseOrder):
    """What was hit least often goes first, and of that what was released first."""

    def __init__(self) -> None:
        self._runs: set[Run] = set()
        self._clock = count()

    def __iter__(self) -> Iterator[Run]:
        return iter(sorted(self._runs, key=lambda node: (node.place, -node.start)))

    def released(self, nodes: Sequence[Run]) -> None:
        for node in nodes:
            node.place = (node.place or (0,))[0], next(self._clock)
        self._runs.update(nodes)

    def pinned(self, nodes: Sequence[Run], path: Sequence[Run]) -> None:
        self._runs.difference_update(nodes)
        for node in path:
            hits, *when = node.place or (0,)
            node.place = (hits + 1, *when)

    def removed(self, node: Run) -> None:
        self._runs.remove(node)

    def split(self, head: Run, tail: Run) -> None:
        self._runs.add(head)  # with the place of `tail`


class LatestFirst(FewestHits):
    """What was released last goes first; of a path, what is deepest."""

    def __iter__(self) -> Iterator[Run]:
        return iter(sorted(self._runs, key=self._rank))

    def _rank(self, node: Run) -> tuple[int, int]:
        return -node.place[1], -node.start

    def released(self, nodes: Sequence[Run]) -> None:
        when = next(self._clock)
        for node in nodes:
            node.place = 0, when
        self._runs.update(nodes)

    def pinned(self, nodes: Sequence[Run], path: Sequence[Run]) -> None:
        self._runs.difference_update(nodes)


class MostHits(FewestHits):
    """What was hit most often goes first, though others follow it."""

    def __iter__(self) -> Iterator[Run]:
        return iter(sorted(self._runs, key=lambda node: (-node.place[0], node.place[1], -node.start)))


class Deaf:
    """An order as a cache has it that evicts another run than the one that `inner` names: the last one."""

    def __init__(self, inner: Any, *, asks: bool) -> None:
        self._inner = inner
        self._asks = asks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._inner)

    def next_run(self) -> Any:
        if self._asks:
            self._inner.next_run()
        return list(self._inner)[-1]


def plant_deaf(cache: Any, *, asks: bool) -> None:
    """Let `cache`, of whole pages or of KV groups, not do what its order says; whether it `asks` nevertheless."""
    owner, name = (cache.parts, "eviction_order") if hasattr(cache, "parts") else (cache.tree, "order")
    try:
        setattr(owner, name, Deaf(getattr(owner, name), asks=asks))
    except (AttributeError, TypeError):
        pytest.skip("the order of a compiled cache cannot be replaced")

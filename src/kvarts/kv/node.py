"""A run of pages with one history: the node of the prefix tree, and the unit of eviction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from kvarts.content import Content, PageKey
from kvarts.kv.pool import PageId

__all__ = ["NOTHING", "HeldPages", "Node", "Path", "walk"]

NOTHING = Content(b"", num_tokens=0, page_size=1, owner=-1)
"""The content of a node that holds no pages."""


class Node:
    """Pages [start, end) of `content`, counted from the first token.

    Written by PrefixTree, except for `place`, `older`, `newer` and `notes`.

    `key` names its first page among its siblings. `refs`: how many paths hold the run; at 0 it is listed for eviction.
    `holds`: how many transfers do; with both at 0 the run is cached. `pins`: how many of the paths keep it for later.
    `is_orphan`: it has left the tree, and a transfer still holds it. `children` is by their keys, and one dict for all
    twins. `page_ids` is None where pages are only counted. A root has neither content nor key.

    `place` belongs to the eviction order: its state of the run, whether the run is referenced or not. It is None for a
    new run, and only such a run grows; the parts of a split run share it. `older` and `newer` are links for an order
    that keeps runs in lists; they are set while it lists the run. `notes` belongs to the tree's watcher: one object for
    all twins.
    """

    __slots__ = (
        "children",
        "content",
        "end",
        "holds",
        "is_orphan",
        "key",
        "newer",
        "notes",
        "older",
        "page_ids",
        "parent",
        "pins",
        "place",
        "refs",
        "start",
        "twins",
    )

    older: Node
    newer: Node

    def __init__(
        self,
        content: Content,
        key: PageKey,
        start: int,
        end: int,
        refs: int,
        parent: Node | None,
        children: dict[PageKey, Node] | None = None,
    ) -> None:
        self.content = content
        self.key = key
        self.start = start
        self.end = end
        self.refs = refs
        self.parent = parent
        self.children = children
        self.twins: list[Node] | None = None
        self.page_ids: list[PageId] | None = None
        self.holds = 0
        self.pins = 0
        self.place: Any = None
        self.notes: Any = None
        self.is_orphan = False

    @property
    def group(self) -> int:
        """Its KV group: whole pages are one."""
        return 0

    def __repr__(self) -> str:
        return f"Node(pages {self.start}..{self.end}, refs {self.refs}, twins {len(self.twins or ())})"


Path = list[Node]
"""Consecutive runs from the first page on."""


class HeldPages:
    """Consecutive runs from page `start` on that a transfer holds."""

    __slots__ = ("runs", "start")

    def __init__(self, runs: Path, start: int) -> None:
        self.runs: Final = runs
        self.start: Final = start


def walk(path: Path, start: int = 0) -> Iterator[Node]:
    """Yield the runs that `path` holds, deepest first; `start`: its first page."""
    for index in range(len(path) - 1, -1, -1):
        node = path[index]
        floor = path[index - 1].end if index else start
        yield node
        while node.start > floor:
            assert node.parent is not None
            node = node.parent
            yield node

"""A run of pages with one history: what the prefix tree is made of, and what is evicted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from kvarts.content import Content, PageKey
from kvarts.kv.pool import PageId

__all__ = ["NOTHING", "HeldPages", "Node", "Path", "walk"]

NOTHING = Content(b"", num_tokens=0, page_size=1, owner=-1)
"""The content of a node that holds no pages."""


class Node:
    """Pages [start, end) of `content`, counted from the first token. Written by PrefixTree, but for the last four.

    `key` names its first page among its siblings. `refs`: how many paths hold the run; at 0 it is listed for eviction.
    `holds`: how many transfers do; at 0 of both the run is cached. `pins`: how many of the paths keep it for later.
    `is_orphan`: it has left the tree, and a transfer still holds it. `children` is by their keys, and one dict for all
    twins. `page_ids` is None where pages are only counted. A root has neither content nor key.

    `place` belongs to the eviction order: what it keeps about the run, referenced or not. A new run has None, and only
    then does it grow; the parts of a run that is split have the same. `older` and `newer` are links for an order that
    keeps runs in lists; they are set while it lists the run. `notes` belongs to the tree's watcher: one object for all
    twins.
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
"""Runs that follow each other from the first page on."""


class HeldPages:
    """Runs that follow each other from page `start` on, and that a transfer holds."""

    __slots__ = ("runs", "start")

    def __init__(self, runs: Path, start: int) -> None:
        self.runs: Final = runs
        self.start: Final = start


def walk(path: Path, start: int = 0) -> Iterator[Node]:
    """Return the runs that `path` holds, deepest first; `start`: its first page."""
    for index in range(len(path) - 1, -1, -1):
        node = path[index]
        floor = path[index - 1].end if index else start
        yield node
        while node.start > floor:
            assert node.parent is not None
            node = node.parent
            yield node

"""What the prefix tree tells of all its runs, to an eviction order that depends on what follows a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvarts.kv.node import Node

__all__ = ["TreeWatcher"]


class TreeWatcher(Protocol):
    """Is told of all runs, referenced or not.

    Promises: nothing about a node is changed but its `notes`, and runs are split by `extended` alone. `notes` belongs
    to the watcher and is the same object for all copies of a run; a root has none before its first child is born.
    """

    def born(self, node: Node) -> None:
        """`node` is the first copy of its pages."""

    def may_grow(self, node: Node) -> bool:
        """Return whether `node`, a leaf with one holder, may take on the pages that follow it."""

    def extended(self, node: Node, start: int) -> None:
        """A holder made pages findable, up to the end of `node`, of which those from `start` on are new.

        Is told when the tree is done, and may cause splits.
        """

    def divided(self, heads: Sequence[Node], tails: Sequence[Node]) -> None:
        """All copies of a run were split. Heads and tails have the same notes, and the heads need their own."""

    def cut(self, node: Node, num_pages: int) -> None:
        """The last `num_pages` of `node`, which is the only copy, were evicted."""

    def first_copy_gone(self, node: Node) -> None:
        """`node`, the first of several copies, was evicted; the next is now the first of `twins`."""

    def died(self, node: Node) -> None:
        """`node`, the last copy of its pages, was evicted."""

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
        """Take note of `node`, the first copy of its pages."""

    def may_grow(self, node: Node) -> bool:
        """Return whether `node`, a leaf with one holder, may take on the pages that follow it."""

    def extended(self, node: Node, start: int) -> None:
        """Take note that a holder made pages findable, up to the end of `node`; those from `start` on are new.

        Is called when the tree is done, and may cause splits.
        """

    def divided(self, heads: Sequence[Node], tails: Sequence[Node]) -> None:
        """Give `heads` notes of their own: all copies of a run were split, and heads and tails have the same notes."""

    def cut(self, node: Node, num_pages: int) -> None:
        """Take note that the last `num_pages` of `node`, which is the only copy, were evicted."""

    def first_copy_gone(self, node: Node) -> None:
        """Take note that `node`, the first of several copies, was evicted; the next is now first of `twins`."""

    def died(self, node: Node) -> None:
        """Take note that `node`, the last copy of its pages, was evicted."""

"""The prefix tree's notifications about all its runs, for an eviction order that depends on the followers of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvarts.kv.node import Node

__all__ = ["TreeWatcher"]


class TreeWatcher(Protocol):
    """Is notified of all runs, referenced or not.

    Promises: it changes no field of a node except `notes`, and only `extended` splits runs. `notes` belongs to the
    watcher and is the same object for all copies of a run; a root has none before its first child is born.
    """

    def born(self, node: Node) -> None:
        """Record `node`, the first copy of its pages."""

    def may_grow(self, node: Node) -> bool:
        """Return whether `node`, a leaf with one holder, may be extended by the pages that follow it."""

    def extended(self, node: Node, start: int) -> None:
        """Record that a holder made pages findable, up to the end of `node`; those from `start` on are new.

        Called when the tree has finished its work; may cause splits.
        """

    def divided(self, heads: Sequence[Node], tails: Sequence[Node]) -> None:
        """Give `heads` separate notes: all copies of a run were split, and heads and tails have the same notes."""

    def cut(self, node: Node, num_pages: int) -> None:
        """Record that the last `num_pages` of `node`, which is the only copy, were evicted."""

    def first_copy_gone(self, node: Node) -> None:
        """Record that `node`, the first of several copies, was evicted; the next is now first of `twins`."""

    def died(self, node: Node) -> None:
        """Record that `node`, the last copy of its pages, was evicted."""

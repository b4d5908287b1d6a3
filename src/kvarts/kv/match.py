"""What a prefix tree has of a content."""

from __future__ import annotations

from kvarts.kv.node import Path

__all__ = ["Match"]


class Match:
    """The longest resident prefix of a content. Valid until the tree changes.

    `num_pages`: its length. `num_shared`: how many of these pages are in use. `nodes`: the runs; the last
    one may reach beyond `num_pages`.
    """

    __slots__ = ("nodes", "num_pages", "num_shared")

    def __init__(self, nodes: Path, num_pages: int, num_shared: int) -> None:
        self.nodes = nodes
        self.num_pages = num_pages
        self.num_shared = num_shared

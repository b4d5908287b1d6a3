"""The longest prefix of a content that a prefix tree has."""

from __future__ import annotations

from kvarts.content import Content
from kvarts.kv.node import Path

__all__ = ["Match"]


class Match:
    """The longest resident prefix of `content`. Valid until the tree changes.

    `num_pages`: its length. `num_shared`: how many of these pages are in use. `nodes`: the runs; the last one may reach
    beyond `num_pages`.
    """

    __slots__ = ("content", "nodes", "num_pages", "num_shared")

    def __init__(self, content: Content, nodes: Path, num_pages: int, num_shared: int) -> None:
        self.content = content
        self.nodes = nodes
        self.num_pages = num_pages
        self.num_shared = num_shared

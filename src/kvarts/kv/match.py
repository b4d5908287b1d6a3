"""What a prefix tree has of a content."""

from __future__ import annotations

import msgspec

from kvarts.kv.node import Path

__all__ = ["Match"]


class Match(msgspec.Struct, eq=False):
    """The longest resident prefix of a content. Valid until the tree changes.

    `num_pages`: its length. `num_shared`: how many of these pages are in use. `nodes`: the runs; the last
    one may reach beyond `num_pages`.
    """

    nodes: Path
    num_pages: int
    num_shared: int

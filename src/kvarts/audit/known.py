"""What the auditor knows of one request."""

from __future__ import annotations

from kvarts.audit.signals import Block
from kvarts.content import Content

__all__ = ["KnownRequest"]


class KnownRequest:
    """One request. `blocks` are the pages it holds, the first `num_full` of them full.

    `offer`: from which page on so many pages of each tier are to be loaded, if not all that is below; `awaited`: the
    transfer for another request that it waits for, or -1. `load`: the pages it waits for, from which on, until it is
    admitted; None if there are none. `is_cancelled`: it is gone when its load has ended. `drafted`: tokens of the draft
    that it has pages for in this step.
    """

    __slots__ = (
        "admission",
        "awaited",
        "blocks",
        "computed",
        "content",
        "drafted",
        "is_cancelled",
        "known",
        "load",
        "num_full",
        "offer",
    )

    def __init__(self, content: Content, known: int) -> None:
        self.content = content
        self.known = known
        self.computed = 0
        self.num_full = 0
        self.admission = -1
        self.blocks: list[Block] = []
        self.load: range | None = None
        self.offer: tuple[int, tuple[tuple[str, int], ...]] | None = None
        self.awaited = -1
        self.is_cancelled = False
        self.drafted = 0

"""Pages that are in use beside those of requests, as the audit accounts for them: reserved, or pinned between turns."""

from __future__ import annotations

from kvarts.audit.digests import PageDigests
from kvarts.audit.finding import Findings
from kvarts.audit.resident import ResidentPages
from kvarts.audit.signals import Block
from kvarts.events import PagesPinned

__all__ = ["PagesBeside"]


class PagesBeside:
    """Owner of the holds of what is reserved and of what is pinned. `found` receives what does not add up."""

    def __init__(self, pages: ResidentPages, digests: PageDigests, found: Findings) -> None:
        self._pages = pages
        self._digests = digests
        self._found = found
        self._reserved: list[Block] = []
        self._pinned: dict[int, list[Block]] = {}

    @property
    def num_pages(self) -> int:
        """The number of pages that are reserved or pinned."""
        return len(self._reserved) + len({block for blocks in self._pinned.values() for block in blocks})

    def pin(self, event: PagesPinned) -> None:
        """Hold pages that are resident, the copies that are found first."""
        blocks: list[Block] = []
        for page in range(event.num_pages):
            copies = self._pages.copies.get(self._digests.of(event.content, page))
            if not copies:
                self._found.add("was pinned and is not resident", event.content.owner, page)
                break
            blocks.append(copies[0])
        if not self._pages.ledger.use(blocks):
            self._found.add("was pinned where there is no room for it", event.content.owner, 0)
        self._pinned[event.pin] = blocks

    def unpin(self, pin: int) -> None:
        """Drop the holds of a pin."""
        self._pages.ledger.deref(self._pinned.pop(pin))

    def reserve(self, num_pages: int) -> None:
        """Take pages that no request of the ledger has, or give them back."""
        while len(self._reserved) < num_pages:
            block = self._pages.take()
            if block is None:
                self._found.add("pages were reserved where none is free")
                return
            self._reserved.append(block)
        self._pages.ledger.destroy(self._reserved[num_pages:])
        del self._reserved[num_pages:]

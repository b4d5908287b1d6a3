"""What is in use beside the parts of requests, as the audit accounts for it: pinned parts, and reserved blocks."""

from __future__ import annotations

from itertools import chain

from kvarts.audit.digests import PageDigests
from kvarts.audit.finding import Findings
from kvarts.audit.part_ledger import AuditedPart, PartLedger
from kvarts.events import PagesPinned

__all__ = ["PartsBeside"]


class PartsBeside:
    """Owner of the holds of pins in `ledger`. `found` receives what does not add up."""

    def __init__(self, ledger: PartLedger, digests: PageDigests, found: Findings, page_size: int) -> None:
        self._ledger = ledger
        self._digests = digests
        self._found = found
        self._page_size = page_size
        self._pinned: dict[int, list[list[AuditedPart]]] = {}
        """By pin: its parts, group by group, in order of position."""

    @property
    def num_blocks(self) -> int:
        """The number of blocks that are reserved, or of parts that are pinned."""
        parts = {part for groups in self._pinned.values() for part in chain(*groups)}
        return self._ledger.num_reserved + sum(self._ledger.groups[part.group].part_blocks for part in parts)

    def pin(self, event: PagesPinned) -> None:
        """Hold the parts from which every group can go on after the pinned pages, the copies that are found first."""
        pinned: list[list[AuditedPart]] = []
        for index, group in enumerate(self._ledger.groups):
            parts = []
            for page in chain(*group.needed(event.num_pages * self._page_size, self._page_size)):
                copies = self._ledger.copies.get((index, self._digests.of(event.content, page)))
                if not copies:
                    what = f"was pinned, and {self._ledger.name(index)} has no part of it"
                    self._found.add(what, event.content.owner, page)
                    continue
                self._ledger.hold(copies[0])
                parts.append(copies[0])
            pinned.append(parts)
        self._pinned[event.pin] = pinned

    def unpin(self, pin: int) -> None:
        """Drop the holds of a pin, the last page first. Another may go on from what it held."""
        for parts in self._pinned.pop(pin):
            for part in reversed(parts):
                part.is_kept = True
                self._ledger.release(part)

    def reserve(self, num_blocks: int) -> None:
        """Take blocks that no request of the ledger has, or give them back, so that there are `num_blocks`."""
        if not self._ledger.reserve(num_blocks):
            self._found.add("blocks were reserved where none is free")

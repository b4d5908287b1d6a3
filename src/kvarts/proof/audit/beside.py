"""Memory in use other than that of requests: pins, and blocks in reserve."""

from __future__ import annotations

from collections import Counter
from itertools import chain

from kvarts.core.events import PagesPinned, PagesReserved
from kvarts.proof.audit.facts import Facts
from kvarts.proof.audit.ledger import LedgerPart
from kvarts.proof.audit.request_parts import KnownRequest

__all__ = ["Beside"]


class Beside:
    """Owner of the references of pins. Law L2: at rest they are all that is held."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._pinned: dict[int, list[list[LedgerPart]]] = {}
        """Parts of each pin, group by group, in order of position."""
        self._num_pins: Counter[LedgerPart] = Counter()
        """Pins of each part that has any."""
        self._num_pinned = 0
        """Blocks of these parts."""

    def reserve(self, event: PagesReserved) -> None:
        """Take blocks into reserve, or out of it."""
        if not self._facts.ledger.reserve(event.num_pages):
            self._facts.find(f"{self._facts.unit} were reserved where none is free")

    def num_blocks(self) -> int:
        """Return the number of blocks that are reserved or belong to pinned parts."""
        return self._facts.ledger.num_reserved + self._num_pinned

    def pin(self, event: PagesPinned) -> None:
        """Hold the parts from which every group can resume after the pinned pages: the copies that a lookup finds."""
        holder = KnownRequest(event.content, 0, len(self._facts.ledger.groups))
        self._facts.held.hit(holder, event.num_pages, how="pinned")
        self._pinned[event.pin] = [list(parts.values()) for parts in holder.parts]
        for part in chain(*self._pinned[event.pin]):
            self._num_pins[part] += 1
            if self._num_pins[part] == 1:
                self._num_pinned += self._facts.ledger.groups[part.group].part_blocks

    def unpin(self, pin: int) -> None:
        """Drop the references of a pin, the last page first. Another sequence may resume from its parts."""
        for parts in self._pinned.pop(pin):
            for part in reversed(parts):
                part.stays = True
                self._facts.ledger.release(part)
                self._num_pins[part] -= 1
                if not self._num_pins[part]:
                    del self._num_pins[part]
                    self._num_pinned -= self._facts.ledger.groups[part.group].part_blocks

"""What the auditor knows of the tiers below the device, and which page has to go where the engine may choose.

Both are kept from what the engine says. That its tiers have what it says they have, their own laws show.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from kvarts.audit.ledger import Ledger, Part

__all__ = ["EvictionsTold", "TierBooks"]


class TierBooks:
    """Which pages can be found in each tier below. Pages go by their digests.

    `full_prompt_hits`: see OffloadConfig.
    """

    def __init__(self, *, full_prompt_hits: bool) -> None:
        self.full_prompt_hits = full_prompt_hits
        self._stored: dict[str, set[bytes]] = {"host": set(), "disk": set()}

    def add(self, medium: str, digest: bytes) -> bool:
        """Note that a page can be found in a tier from now on. Return False if it could before."""
        stored = self._stored[medium]
        is_new = digest not in stored
        stored.add(digest)
        return is_new

    def remove(self, medium: str, digest: bytes) -> bool:
        """Note that a page can no longer be found in a tier. Return False if it could not before."""
        stored = self._stored[medium]
        is_there = digest in stored
        stored.discard(digest)
        return is_there

    def has(self, digest: bytes) -> bool:
        """Return whether any tier has the page."""
        return any(digest in stored for stored in self._stored.values())

    def found(self, digests: Sequence[bytes]) -> tuple[tuple[str, int], ...]:
        """Return how many of `digests` each tier has, one after the other, the fastest first."""
        position = 0
        by_tier = []
        for medium, stored in self._stored.items():
            start = position
            while position < len(digests) and digests[position] in stored:
                position += 1
            if position > start:
                by_tier.append((medium, position - start))
        return tuple(by_tier)


class EvictionsTold:
    """Chooses what the engine says it evicted, and names what is wrong with it.

    An engine that evicts first what a tier below has keeps two lists, and their order depends on when it looked at
    them; and an EvictionOrder may be any. What must hold whatever the order: no page goes while it is in use or before
    what follows it, and, given the `books` of the tiers below, none is lost while another would not be. `find` gets
    what is wrong, the group and the page.
    """

    def __init__(self, books: TierBooks | None, find: Callable[[str, int, bytes], object]) -> None:
        self.told: deque[tuple[int, bytes, int]] = deque()
        """Groups and pages, and which copy of each, counted from the one that was made first."""
        self.ledger: Ledger
        self._books = books
        self._find = find

    def choose(self, candidates: Iterator[Part]) -> Part:
        """Return the candidate that the engine says it evicted next, or the first where it says nothing that can be."""
        ledger = self.ledger
        if not self.told:
            return next(candidates)  # comparing the events will show it
        group, digest, copy = self.told.popleft()
        copies = ledger.copies.get((group, digest), [])
        if copy >= len(copies) or not ledger.is_evictable(copies[copy]):
            self._find("was evicted while it was in use", group, digest)
            return next(candidates)
        part = copies[copy]
        if not ledger.is_alone(part) and any(map(ledger.is_alone, ledger.evictable())):
            self._find("was evicted before what follows it", group, digest)
        books = self._books
        if books is not None and not self._is_safe(books, group, digest):
            for other in candidates:
                if other.name is not None and not ledger.after(group, other.name) and books.has(other.name):
                    self._find("was lost, and there was a page to evict that a tier below has", group, digest)
                    break
        return part

    def _is_safe(self, books: TierBooks, group: int, digest: bytes) -> bool:
        pages = [digest]
        while pages:
            page = pages.pop()
            if not books.has(page):
                return False
            pages += self.ledger.after(group, page)
        return True

"""The auditor's knowledge of the tiers below, and its check of evictions that the engine may choose freely.

Both derive from the engine's events. The tiers' own invariants verify that their contents match these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from kvarts.audit.ledger import Ledger, LedgerPart

__all__ = ["EvictionsTold", "TierBooks"]


class TierBooks:
    """Pages that can be found in each tier below, by digest.

    `full_prompt_hits`: as in OffloadConfig.
    """

    def __init__(self, *, full_prompt_hits: bool) -> None:
        self.full_prompt_hits = full_prompt_hits
        self._stored: dict[str, set[bytes]] = {"host": set(), "disk": set()}

    def add(self, medium: str, digest: bytes) -> bool:
        """Record a page that a tier has stored. Return False if it was there already."""
        stored = self._stored[medium]
        is_new = digest not in stored
        stored.add(digest)
        return is_new

    def remove(self, medium: str, digest: bytes) -> bool:
        """Record a page that a tier has removed. Return False if it was not there."""
        stored = self._stored[medium]
        is_there = digest in stored
        stored.discard(digest)
        return is_there

    def has(self, digest: bytes) -> bool:
        """Return whether any tier has the page."""
        return any(digest in stored for stored in self._stored.values())

    def found(self, digests: Sequence[bytes]) -> tuple[tuple[str, int], ...]:
        """Return the number of consecutive `digests` found in each tier, the fastest tier first."""
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
    """Follows the engine's choice of evictions, and reports those that break a rule.

    An engine that evicts first the pages that a tier below holds keeps two lists, whose order depends on when it looked
    at them; and an EvictionOrder may be arbitrary. Rules for any order: no page is evicted while in use or before the
    pages that follow it, and, given the `books` of the tiers below, none is lost while another page could be evicted
    without loss. `find` receives the text, group and page of a violation.
    """

    def __init__(self, books: TierBooks | None, find: Callable[[str, int, bytes], object]) -> None:
        self.told: deque[tuple[int, bytes, int]] = deque()
        """Group, page and copy of each eviction; copies count from 0 in order of creation."""
        self.ledger: Ledger
        self._books = books
        self._find = find

    def choose(self, candidates: Iterator[LedgerPart]) -> LedgerPart:
        """Return the engine's next eviction, or the first candidate if the engine names none that is evictable."""
        ledger = self.ledger
        if not self.told:
            return next(candidates)  # the comparison of events reports it
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

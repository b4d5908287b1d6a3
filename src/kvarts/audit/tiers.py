"""What the auditor knows of the tiers below the device, and which page has to go where the engine may choose.

Both are kept from what the engine says. That its tiers have what it says they have, their own laws show.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from kvarts.audit.ledger import PageLedger
from kvarts.audit.signals import FullBlock

__all__ = ["EvictionsTold", "Followers", "KeptPages", "TierBooks"]


class TierBooks:
    """Which pages can be found in each tier below. Pages go by their digests.

    `full_prompt_hits`: see OffloadConfig.
    """

    def __init__(self, *, full_prompt_hits: bool) -> None:
        self.full_prompt_hits = full_prompt_hits
        self._stored: dict[str, set[bytes]] = {"host": set(), "disk": set()}
        self.num_added = 0
        self._added: dict[bytes, int] = {}

    def add(self, medium: str, digest: bytes) -> bool:
        """Note that a page can be found in a tier from now on. Return False if it could before."""
        if not self.has(digest):
            self.num_added += 1
            self._added[digest] = self.num_added
        stored = self._stored[medium]
        is_new = digest not in stored
        stored.add(digest)
        return is_new

    def had(self, digest: bytes, num_added: int) -> bool:
        """Return whether some tier has had the page since `num_added` was so large."""
        return self.has(digest) and self._added[digest] <= num_added

    def remove(self, medium: str, digest: bytes) -> bool:
        """Note that a page can no longer be found in a tier. Return False if it could not before."""
        stored = self._stored[medium]
        is_there = digest in stored
        stored.discard(digest)
        if not self.has(digest):
            self._added.pop(digest, None)
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


class Followers:
    """Which resident pages come right after each resident page, in the order in which they came. Pages by digests."""

    def __init__(self) -> None:
        self._after: dict[bytes, dict[bytes, None]] = {}
        self._before: dict[bytes, bytes | None] = {}

    def __contains__(self, digest: bytes) -> bool:
        """Return whether any page comes after this one."""
        return digest in self._after

    def of(self, digest: bytes) -> list[bytes]:
        """Return what comes right after a page."""
        return list(self._after.get(digest, ()))

    def born(self, digest: bytes, before: bytes | None) -> None:
        """Note that the page is resident, after `before`."""
        self._before[digest] = before
        if before is not None:
            self._after.setdefault(before, {})[digest] = None

    def died(self, digest: bytes) -> None:
        """Note that the last copy of the page has gone."""
        before = self._before.pop(digest)
        if before is not None:
            after = self._after[before]
            after.pop(digest, None)
            if not after:
                del self._after[before]


class _Keep(msgspec.Struct, eq=False):
    """One page that a transfer keeps. `lost`: what it kept cannot be found any more."""

    digest: bytes
    lost: _Lost | None = None


class _Lost(msgspec.Struct, eq=False):
    num_blocks: int
    num_keeps: int


class KeptPages:
    """The pages that stores keep on the device, until their transfers end."""

    def __init__(self, ledger: PageLedger, copies: Mapping[bytes, list[FullBlock]]) -> None:
        self._ledger = ledger
        self._copies = copies
        self._by_transfer: dict[int, list[_Keep]] = {}
        self._by_digest: dict[bytes, list[_Keep]] = {}

    def keep(self, transfer: int, digest: bytes) -> bool:
        """Keep all copies of a page for a transfer. Return False if there is none."""
        copies = self._copies.get(digest)
        if not copies:
            return False
        self._ledger.keep(copies)
        keep = _Keep(digest)
        self._by_digest.setdefault(digest, []).append(keep)
        self._by_transfer.setdefault(transfer, []).append(keep)
        return True

    def add_copy(self, digest: bytes, block: FullBlock) -> None:
        """Keep one copy more of a page, as often as the page is kept."""
        if digest in self._by_digest:
            self._ledger.keep([block] * len(self._by_digest[digest]))

    def lose(self, digest: bytes, blocks: list[FullBlock]) -> None:
        """Note that a page that is kept, of which these are the copies, cannot be found any more.

        Raise LedgerError if it is not kept, or is held as well.
        """
        self._ledger.lose(blocks)
        keeps = self._by_digest.pop(digest)
        lost = _Lost(len(blocks), len(keeps))
        for keep in keeps:
            keep.lost = lost

    def end(self, transfer: int) -> None:
        """Keep nothing for a transfer any longer."""
        for keep in self._by_transfer.pop(transfer, ()):
            lost = keep.lost
            if lost is not None:
                lost.num_keeps -= 1
                if not lost.num_keeps:
                    self._ledger.free_lost(lost.num_blocks)
                continue
            self._ledger.unkeep(self._copies[keep.digest])
            keeps = self._by_digest[keep.digest]
            keeps.remove(keep)
            if not keeps:
                del self._by_digest[keep.digest]


class EvictionsTold:
    """Chooses what the engine says it evicted, and names what is wrong with it.

    An engine that evicts first what a tier below has keeps two lists, and their order depends on when it looked at
    them; and an EvictionOrder may be any. What must hold whatever the order: no page goes while it is in use, and,
    given the `books` of the tiers below, none is lost while another would not be.
    """

    def __init__(
        self,
        books: TierBooks | None,
        copies: Mapping[bytes, list[FullBlock]],
        digest_of: Mapping[FullBlock, bytes],
        followers: Followers,
        find: Callable[[str, bytes], object],
        is_evictable: Callable[[FullBlock], bool],
    ) -> None:
        self.told: deque[tuple[bytes, int]] = deque()
        """Pages, and which copy of each, counted from the one that was made first."""
        self._as_told: dict[bytes, tuple[bool, int]] = {}
        self._books = books
        self._copies = copies
        self._digest_of = digest_of
        self._followers = followers
        self._find = find
        self._is_evictable = is_evictable

    def begin(self) -> None:
        """Forget what was told: the events of other steps come."""
        self.told.clear()
        self._as_told.clear()

    def hear(self, digests: Sequence[bytes]) -> None:
        """Take note of what tiers have while pages are told to have gone, those first that went first.

        The ledger may ask for them later, when a tier has dropped them already, or has what it did not have then.
        """
        if self._books is not None:
            for digest in digests:
                self._as_told[digest] = self._is_safe(self._books, digest), self._books.num_added

    def choose(self, candidates: Iterator[FullBlock]) -> FullBlock:
        """Return the candidate that the engine says it evicted next, or the first where it says nothing that can be."""
        if not self.told:
            return next(candidates)  # comparing the events will show it
        digest, copy = self.told.popleft()
        copies = self._copies.get(digest, [])
        if copy >= len(copies) or not self._is_evictable(copies[copy]):
            self._find("was evicted while it was in use", digest)
            return next(candidates)
        books = self._books
        if books is not None and not self._is_safe(books, digest):
            was_safe, num_added = self._as_told.get(digest, (False, books.num_added))
            for other in map(self._digest_of.__getitem__, () if was_safe else candidates):
                if other not in self._followers and books.had(other, num_added):
                    self._find("was lost, and there was a page to evict that a tier below has", digest)
                    break
        return copies[copy]

    def _is_safe(self, books: TierBooks, digest: bytes) -> bool:
        pages = [digest]
        while pages:
            page = pages.pop()
            if not books.has(page):
                return False
            pages += [follower for follower in self._followers.of(page) if follower not in self._as_told]
        return True

"""The pages on the device as the audit's ledger has them: their copies, what follows them, and which goes next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from uuid import UUID

from kvarts.audit.comparison import find_different_event
from kvarts.audit.digests import PageDigests
from kvarts.audit.finding import Findings
from kvarts.audit.known import KnownRequest
from kvarts.audit.ledger import PageLedger
from kvarts.audit.signals import BlocksRemoved, BlocksStored, FullBlock, LedgerError, LedgerEvent, PartialBlock
from kvarts.audit.tiers import EvictionsTold, Followers, KeptPages, TierBooks
from kvarts.events import CopiesRemoved, Event, PagesRemoved, PagesStored

__all__ = ["LOST", "ResidentPages"]

LOST = "removed while a transfer kept it"


class ResidentPages:
    """Owner of a ledger of `num_pages` pages, and of the page that each of its blocks is a copy of.

    `is_told`: what is evicted is taken from what the engine says, in `evictions`, and checked; otherwise it is the page
    used longest ago. `books`: what tiers below have, where the engine evicts that first. `found` receives what does
    not add up.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        digests: PageDigests,
        found: Findings,
        *,
        books: TierBooks | None,
        is_told: bool,
    ) -> None:
        self.copies: dict[bytes, list[FullBlock]] = {}
        """The resident copies of each page, the one that is found first."""
        self._digest_of: dict[FullBlock, bytes] = {}
        self._followers = Followers()
        self._digests = digests
        self._found = found
        self.ledger = PageLedger(num_pages, page_size, sink=self._on_ledger_event, choose=self._choose)
        self.kept = KeptPages(self.ledger, self.copies)
        self.evictions: EvictionsTold | None = None
        if is_told:
            self.evictions = EvictionsTold(
                books, self.copies, self._digest_of, self._followers, self._find_digest, self.ledger.is_evictable
            )
        self._num_taken = 0
        self._expected: list[tuple[int, str, bytes]] = []
        """What the engine must tell: the step, what happened, and to which page."""
        self._told: list[tuple[int, str, bytes]] = []

    def take(self) -> PartialBlock | None:
        """Take an empty page; None if there is no room for it."""
        block = PartialBlock(UUID(int=self._num_taken))
        self._num_taken += 1
        return block if self.ledger.use([block]) else None

    def hear(self, events: Sequence[Event]) -> None:
        """Take from `events` what the engine says it evicted, where that is not known otherwise."""
        if self.evictions is None:
            return
        self.evictions.begin()
        for event in events:
            if isinstance(event, CopiesRemoved):
                self.evictions.told.extend((digest, event.copy) for digest in self._digests_of(event))
            elif isinstance(event, PagesRemoved) and event.medium == "device" and not event.is_held:
                self.evictions.told.extend((digest, 0) for digest in self._digests_of(event))

    def hear_stored(self, event: PagesStored) -> None:
        """Take note that the engine says that pages can be found from now on."""
        content, start = event.content, event.start_page
        before = self._digests.of(content, start - 1) if start else None
        parent = self._digests.of(event.parent, start - 1) if event.parent is not None and start else None
        if before != parent:
            other = "no page" if parent is None else "page {1} of request {0}".format(*self._digests.place(parent))
            self._found.add(f"was stored after {other}, which does not precede it", content.owner, start)
        for page in range(start, event.end_page):
            self._told.append((self._found.step, "stored", self._digests.of(content, page)))

    def hear_gone(self, what: str, event: PagesRemoved | CopiesRemoved) -> None:
        """Take note that the engine says `what` of pages that went."""
        digests = list(self._digests_of(event))
        self._told += [(self._found.step, what, digest) for digest in digests]
        if self.evictions is not None and isinstance(event, PagesRemoved) and not event.is_held:
            self.evictions.hear(digests)

    def compare_events(self) -> None:
        """Compare what the engine has said since the last call with what the ledger did."""
        expected, told = self._expected, self._told
        if expected != told:
            self._found.all.append(find_different_event(expected, told, self._digests))
        for _, what, digest in expected:
            if what in ("removed", LOST) and digest not in self.copies:
                self._digests.where.pop(digest, None)
        self._expected, self._told = [], []

    def fill(self, known: KnownRequest, num_full: int) -> None:
        """Count the first `num_full` pages of a request as full. A page that is resident already gets one copy more."""
        for page in range(known.num_full, min(num_full, len(known.blocks))):
            digest = self._digests.of(known.content, page)
            partial = known.blocks[page]
            assert isinstance(partial, PartialBlock)
            is_copy = digest in self.copies
            block = FullBlock(digest + partial.uuid.bytes if is_copy else digest)
            self._digest_of[block] = digest
            parent = known.blocks[page - 1] if page else None
            known.blocks[page] = block
            self.ledger.promote(
                partial.uuid, block, parent_hash=parent.block_hash if isinstance(parent, FullBlock) else None
            )
            self.kept.add_copy(digest, block)
            if not is_copy:
                self._followers.born(digest, self._digests.of(known.content, page - 1) if page else None)
            self.copies.setdefault(digest, []).append(block)
            self._digests.where[digest] = known.content.owner, page
        known.num_full = max(known.num_full, num_full)

    def _on_ledger_event(self, event: LedgerEvent) -> None:
        if isinstance(event, BlocksStored):
            for block_hash in event.block_hashes:
                block = FullBlock(block_hash)
                digest = self._digest_of[block]
                if digest not in self.copies:
                    self._expected.append((self._found.step, "stored", digest))
        elif isinstance(event, BlocksRemoved):
            for block_hash in event.block_hashes:
                block = FullBlock(block_hash)
                digest = self._digest_of.pop(block)
                copies = self.copies[digest]
                copies.remove(block)
                if not copies:
                    del self.copies[digest]
                    self._followers.died(digest)
                self._expected.append((self._found.step, "copy removed" if copies else "removed", digest))

    def _choose(self, candidates: Iterator[FullBlock]) -> FullBlock:
        """Return the block to evict: the least recently used with nothing after it, or what the engine says.

        Where something that is kept comes after every block that can go, that is lost with the first.
        """
        if self.evictions is not None:
            block = self.evictions.choose(candidates)
        else:
            first = block = next(candidates)
            while not self._is_alone(block):
                another = next(candidates, None)
                if another is None:
                    block = first
                    break
                block = another
        digest = self._digest_of[block]
        if not self._is_alone(block):
            if any(map(self._is_alone, self.ledger.evictable())):
                self._find_digest("was evicted before what follows it", digest)
            self._lose_after(digest)
        return block

    def _is_alone(self, block: FullBlock) -> bool:
        """Return whether nothing is lost with this copy of a page."""
        digest = self._digest_of[block]
        return digest not in self._followers or len(self.copies[digest]) > 1

    def _lose_after(self, digest: bytes) -> None:
        """Lose what comes after a page, the last first; transfers must keep it."""
        for follower in reversed(self._followers.of(digest)):
            self._lose_after(follower)
            blocks = self.copies[follower]
            try:
                self.kept.lose(follower, blocks)
            except LedgerError:
                continue  # it is found as evicted before what follows it
            for block in blocks:
                del self._digest_of[block]
            del self.copies[follower]
            self._followers.died(follower)
            self._expected.append((self._found.step, LOST, follower))

    def _find_digest(self, what: str, digest: bytes) -> None:
        self._found.add(what, *self._digests.place(digest))

    def _digests_of(self, event: PagesRemoved | CopiesRemoved) -> list[bytes]:
        return self._digests.backwards(event.content, event.start_page, event.end_page)

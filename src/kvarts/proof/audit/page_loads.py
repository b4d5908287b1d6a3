"""Whole pages that stores read and loads bring, as an audit derives them from events."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from kvarts.core.events import (
    LoadAwaited,
    LoadStarted,
    LoadUsed,
    LoadWeighed,
    PagesRemoved,
    PagesStored,
    StoreStarted,
    TransferEnded,
)
from kvarts.proof.audit.facts import Facts
from kvarts.proof.audit.ledger import Keep
from kvarts.proof.audit.request_parts import KnownRequest
from kvarts.proof.audit.tiers import TierBooks

__all__ = ["PageLoads"]


class PageLoads:
    """Owner of the transfers of whole pages. `stored`: the pages in tiers below.

    `loads_have_turns`: as of Auditor. Laws: what is loaded is below, what is found below is loaded or dearer than
    computing (L13), and a transfer holds its pages until it ends (L2).
    """

    def __init__(self, facts: Facts, stored: TierBooks, tiers: Sequence[str], *, loads_have_turns: bool) -> None:
        self._facts = facts
        self._stored = stored
        self._first_tier = tiers[0] if tiers else ""
        self._loads_have_turns = loads_have_turns
        self._kept: dict[int, list[Keep]] = {}
        """Pages that each transfer reads."""
        self._displaced: tuple[int, set[bytes]] = -1, set()
        """The newest load, and the pages that it evicted: the next transfer may store these before it fills them."""
        self._leaders: dict[int, int] = {}
        """Requests of the loads in progress, by transfer."""
        self.loaded: list[int] = []
        """Requests with a load that has ended since the last step began."""
        self.used: dict[int, int] = {}
        """Transfers under way that the last step used, and their pages: they must end before the next one begins."""

    def begin_step(self) -> None:
        """Publish, at the beginning of a step, what has been loaded since the last one began."""
        for transfer in self.used:
            self._facts.find(f"uses transfer {transfer}, which ends after it")
        self.used.clear()
        loaded, self.loaded = self.loaded, []
        for request in loaded:
            known = self._facts.requests[request]
            assert known.load is not None
            if self._loads_have_turns and not known.is_cancelled:
                known.has_arrived = True  # it has its turn in this step or later
                continue
            has_front = known.computed < known.load.start * self._facts.page_size
            if has_front and not known.is_cancelled:
                self.loaded.append(request)  # what is before the loaded pages is still to be computed
                continue
            if not has_front and not self._loads_have_turns:
                self._facts.held.name(known, known.load.stop)
            self.end_lead(request)
            if known.is_cancelled:
                self._facts.close(request, self._facts.requests.pop(request))

    def end_lead(self, request: int) -> None:
        """Note that no load for a request is in progress any more."""
        self._leaders = {transfer: other for transfer, other in self._leaders.items() if other != request}

    def drop_ended(self) -> None:
        """Release nothing: pages of a load that failed are computed by its request."""

    def num_left(self, num_used: int) -> int:
        """Return how many of `num_used` blocks, in use at rest, are not those of transfers; 0 if that is unknown."""
        return 0 if self._kept else num_used

    def hear(self, event: PagesStored | PagesRemoved) -> None:
        """Record pages that a tier below has stored or removed."""
        content, medium = event.content, event.medium
        for page in range(event.start_page, event.end_page):
            digest = self._facts.digest(content, page)
            if isinstance(event, PagesStored):
                if not self._stored.add(medium, digest):
                    self._facts.find(f"was stored in {medium} a second time", content.owner, page)
            elif not self._stored.remove(medium, digest):
                self._facts.find(f"was removed from {medium}, and was not there", content.owner, page)

    def found_below(self, known: KnownRequest, start: int) -> tuple[tuple[str, int], ...]:
        """Return the pages from `start` on that each tier has for a request, the fastest tier first."""
        last_token = 0 if self._stored.full_prompt_hits else 1
        limit = (known.known - last_token) // self._facts.page_size
        return self._stored.found(self._facts.digests.upto(known.content, limit)[start:limit])

    def load(self, event: LoadStarted) -> None:
        """Take the pages of a load, which brings what is found below."""
        known = self._facts.requests[event.request]
        self._facts.hit(known, event.request, event.num_hit_pages, None)
        happened = self._facts.ledger.happened
        num_happened = len(happened)
        self._facts.held.take_pages(known, event.num_held_pages * self._facts.page_size)
        evicted = {each.name for each in islice(happened, num_happened, None) if each.what == "evicted"}
        self._displaced = event.transfer, evicted
        below = self.found_below(known, event.num_hit_pages)
        if known.offer is not None and known.offer[0] == event.num_hit_pages:
            below = known.offer[1]
        known.offer = None
        below = _after(below, event.num_front_pages)
        self.check_awaited(known, event.request)
        self._leaders[event.transfer] = event.request
        if below != event.by_tier:
            self._facts.find(
                f"{event.by_tier} pages are loaded, and {below} are below", event.request, event.num_hit_pages
            )
        known.front, start = event.num_hit_pages, event.num_hit_pages + event.num_front_pages
        known.computed = event.num_hit_pages * self._facts.page_size
        known.load = range(start, start + sum(count for _, count in event.by_tier))

    def weigh(self, event: LoadWeighed) -> None:
        """Record that only a part of the match below is loaded. `offer` holds its first page and its pages per tier."""
        known = self._facts.requests[event.request]
        below = self.found_below(known, event.num_hit_pages)
        if below != event.by_tier:
            self._facts.find(
                f"{event.by_tier} pages were weighed, and {below} are below", event.request, event.num_hit_pages
            )
        if event.num_pages == 0 and event.load_ns <= event.worth_ns:
            what = f"is computed, though loading takes {event.load_ns} ns and is worth {event.worth_ns}"
            self._facts.find(what, event.request, event.num_hit_pages)
        taken = []
        num_left = event.num_pages
        for medium, num_pages in below:
            if num_left:
                taken.append((medium, min(num_left, num_pages)))
                num_left -= taken[-1][1]
        known.offer = event.num_hit_pages, tuple(taken)

    def wait(self, event: LoadAwaited) -> None:
        """Check that the load brings the page that the request needs next."""
        known, page = self._facts.requests[event.request], event.num_hit_pages
        leader = self._facts.requests.get(self._leaders.get(event.transfer, -1))
        known.awaited = event.transfer
        if leader is None or leader.load is None or page not in range(leader.front, leader.load.stop):
            self._facts.find(f"awaits transfer {event.transfer}, which does not bring it", event.request, page)
        elif self._facts.digest(leader.content, page) != self._facts.digest(known.content, page):
            self._facts.find(f"awaits transfer {event.transfer}, which brings another page", event.request, page)

    def check_awaited(self, known: KnownRequest, request: int) -> None:
        """Check that the load that a request awaited has ended."""
        if known.awaited in self._leaders:
            self._facts.find(f"goes on before transfer {known.awaited} has ended, which it awaits", request)
        known.awaited = -1

    def use(self, event: LoadUsed) -> None:
        """Publish the pages of a load under way: the step in progress must end after it."""
        known = self._facts.requests[event.request]
        if known.load is None or self._leaders.get(event.transfer) != event.request:
            self._facts.find(f"uses transfer {event.transfer}, which is not its load", event.request)
            return
        if known.computed < known.load.start * self._facts.page_size:
            self._facts.find("runs before it has computed what precedes its loaded pages", event.request)
        self.end_lead(event.request)
        if not known.has_arrived:
            self.used[event.transfer] = len(known.load)
        known.has_arrived = False
        if known.load.stop:
            self._facts.held.name(known, known.load.stop)
        else:  # nothing arrived, and nothing was found before: it waits again
            self._facts.close(event.request, known)
            known.load = None

    def keep(self, event: StoreStarted) -> None:
        """Keep the pages that a store reads."""
        if event.medium != self._first_tier:
            return  # read from the tier above, which holds its own pages
        load, displaced = self._displaced
        for content, start, end in event.runs:
            for page in range(start, end):
                digest = self._facts.digest(content, page)
                kept = self._facts.ledger.keep(0, digest)
                if kept is not None:
                    self._kept.setdefault(event.transfer, []).append(kept)
                elif event.transfer != load + 1 or digest not in displaced:
                    self._facts.find("is to be stored and is not resident", content.owner, page)

    def end(self, event: TransferEnded) -> None:
        """End a transfer: its pages are kept no longer, or wait for the next step."""
        for kept in self._kept.pop(event.transfer, ()):
            self._facts.ledger.end_keep(kept)
        if event.transfer in self.used:
            if event.num_good_pages < (num_pages := self.used.pop(event.transfer)):
                self._facts.find(f"used {num_pages} loaded pages, and {event.num_good_pages} arrived", event.request)
        elif event.request >= 0:
            known = self._facts.requests[event.request]
            assert known.load is not None
            known.load = range(known.load.start, known.load.start + event.num_good_pages)
            self.loaded.append(event.request)


def _after(by_tier: tuple[tuple[str, int], ...], num_front: int) -> tuple[tuple[str, int], ...]:
    """Return the pages of each tier without the first `num_front` of all."""
    left = []
    for medium, num_pages in by_tier:
        num_left = max(0, num_pages - num_front)
        num_front = max(0, num_front - num_pages)
        if num_left:
            left.append((medium, num_left))
    return tuple(left)

"""Requests of a model with KV groups that wait for parts of pages from a tier below the device."""

from __future__ import annotations

from typing import Protocol

from kvarts.content import Content
from kvarts.event_log import Tell
from kvarts.kv.cache import Holding
from kvarts.kv.group_pages import GroupPages
from kvarts.kv.match import Match
from kvarts.kv.spans import RunMatch
from kvarts.kv.transfer import Awaited, Loaded
from kvarts.limits import MOST_COUNT
from kvarts.request import Request
from kvarts.sched.loads import Loads, LoadUnderWay, LowerTiers
from kvarts.sched.policy import WaitingQueue

__all__ = ["GroupLoads", "GroupTiers"]


class GroupTiers(LowerTiers, Protocol):
    """The tiers below a device with KV groups. A load covers all that was offered, or nothing."""

    def offered(self, request: int) -> RunMatch:
        """Return the longest prefix that every group could resume from with the parts offered to `request`."""

    def recognise(self, content: Content) -> None:
        """Make the parts of `content` that an earlier process stored findable. No match may be in use."""

    def narrow(self, request: int, depth: int) -> None:
        """Offer to `request` no more than the device and the first `depth` tiers have."""


class GroupLoads(Loads):
    """Loads of a cache with KV groups.

    A request that waits for a load holds its match and the loaded parts. The further blocks that it may need while the
    rest of its known tokens is computed are promised to it. If a load does not arrive completely, the request is
    matched again, and hits the parts that did arrive.
    """

    def __init__(
        self, tiers: GroupTiers, cache: GroupPages, waiting: WaitingQueue, page_size: int, tell: Tell | None
    ) -> None:
        super().__init__(tiers, cache, waiting, page_size, tell)
        self._group_tiers = tiers
        self._parts = cache
        self._needs = cache.needs

    def note_arrived(self, request: Request) -> None:
        """Make the parts of its content that an earlier process stored findable."""
        self._group_tiers.recognise(request.content)

    def _wanted(self, request: Request, num_known: int) -> int:
        match = self._group_tiers.offered(request.index)
        held = self._parts.held_of(match)
        start = match.num_pages * self._page_size
        return self._needs.to_admit(start, num_known, min(num_known, start + self._needs.most_new), held)

    def num_to_load(self, request: Request, match: Match, num_known: int) -> int:
        """Return the blocks that must be free to load what the tiers have after `match`; MOST_COUNT if nothing."""
        tiers, page_size = self._group_tiers, self._page_size
        limit = (num_known if tiers.full_prompt_hits else num_known - 1) // page_size
        offer = tiers.lookup(request.index, request.content, match.num_pages, limit)
        if offer is None:
            return MOST_COUNT
        num_wanted = self._wanted(request, num_known)
        for depth in range(len(offer.by_tier) - 1, 0, -1):
            if any(offer.by_tier[:depth]):
                tiers.narrow(request.index, depth)
                num_wanted = min(num_wanted, self._wanted(request, num_known))
        tiers.forget(request.index)
        return num_wanted

    def _fits(self, request: Request, num_known: int) -> bool:
        """Return whether the most blocks that `request` may hold at a time are free."""
        return self._wanted(request, num_known) <= self._parts.num_free

    def _num_held(self, request: Request, num_known: int) -> int:
        """Return the blocks that `request` holds from the start of its load, plus those that are promised to it."""
        found = self._group_tiers.offered(request.index)
        return self._parts.num_held_while_loading(found, self._wanted(request, num_known))

    def _open(self, request: Request, match: Match, num_known: int) -> Holding:
        """Hold the device's match, allocate parts for the load, and promise the rest."""
        num_wanted = self._wanted(request, num_known)
        return self._parts.open_offered(request.content, self._group_tiers.offered(request.index), num_wanted)

    def _can_go_on(self, load: LoadUnderWay, loaded: Loaded) -> bool:
        """Return whether everything arrived."""
        return loaded.num_pages == load.end

    def _leader(self, request: Request, start: int, limit: int) -> tuple[LoadUnderWay | None, Awaited | None]:
        """Return a load that `request` needs completely: a load brings windows for its end only."""
        leader, awaited = super()._leader(request, start, limit)
        if leader is None or awaited is None or start + awaited.num_pages < leader.end:
            return None, None
        return leader, awaited

    def resume(self, request: Request, loaded: Loaded) -> int:
        """Count the loaded tokens of `request`, which starts to run; return the tokens that need no computing."""
        assert request.holding is not None
        self._parts.end_promise(request.holding)
        return super().resume(request, loaded)

    def _release(self, request: Request) -> None:
        """Release everything that `request` holds; it never ran."""
        holding = request.holding
        assert holding is not None
        self._parts.end_promise(holding)
        self._parts.close(holding, holding.num_pages, holding.num_pages)
        request.holding = None

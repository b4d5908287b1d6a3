"""Requests of a model with KV groups that wait for parts of pages from a tier below the device."""

from __future__ import annotations

from typing import cast

from msgspec.structs import replace

from kvarts.event_log import Tell
from kvarts.kv.cache import Holding, Match
from kvarts.kv.group_pages import GroupPages
from kvarts.kv.transfer import Awaited, Loaded, Offer, Weighed
from kvarts.limits import MOST_COUNT
from kvarts.request import Request
from kvarts.sched.loads import GroupOffers, Loads, LoadUnderWay, LowerTiers
from kvarts.sched.page_source import PageSource
from kvarts.sched.policy import WaitingQueue

__all__ = ["GroupLoads"]


class GroupLoads(Loads):
    """Loads of a cache with KV groups.

    A request that waits for a load holds its match and the loaded parts. The further blocks that it may need while the
    rest of its known tokens is computed are promised to it. If a load does not arrive completely, the request is
    matched again, and hits the parts that did arrive.

    While a request computes its front, it holds that as a sequence of its own next to the parts that are loaded. The
    number of blocks that it holds or has a promise of is the same from the beginning of its load to the end.
    """

    def __init__(
        self,
        tiers: LowerTiers,
        cache: GroupPages,
        pages: PageSource,
        waiting: WaitingQueue,
        page_size: int,
        tell: Tell | None,
    ) -> None:
        super().__init__(tiers, cache, waiting, page_size, tell)
        self._offers = cast("GroupOffers", tiers.layout)
        self._parts = cache
        self._pages = pages
        self._needs = cache.group_needs

    def note_arrived(self, request: Request) -> None:
        """Make the parts of its content that an earlier process stored findable."""
        self._offers.recognise(request.content)

    def _wanted(self, request: Request, num_known: int) -> int:
        match = self._offers.offered(request.index)
        held = self._parts.held_of(match)
        start = match.num_pages * self._page_size
        return self._needs.to_admit(start, num_known, min(num_known, start + self._needs.most_new), held)

    def num_to_load(self, request: Request, match: Match, num_known: int, budget: int) -> int:
        """Return the blocks that must be free to load what the tiers have after `match`; MOST_COUNT if nothing."""
        tiers, page_size = self.tiers, self._page_size
        limit = (num_known if tiers.full_prompt_hits else num_known - 1) // page_size
        offer = tiers.lookup(request.index, request.content, match.num_pages, limit)
        if offer is None:
            return MOST_COUNT
        num_wanted = self._wanted(request, num_known)
        for depth in range(len(offer.by_tier) - 1, 0, -1):
            if any(offer.by_tier[:depth]):
                self._offers.offer_up_to(request.index, depth)
                num_wanted = min(num_wanted, self._wanted(request, num_known))
        tiers.forget(request.index)
        return num_wanted

    def _fits(self, request: Request, match: Match, num_known: int, end: int, num_kept: int, budget: int) -> bool:
        """Return whether the most blocks that `request` may hold at a time are free."""
        num_wanted = self._wanted(request, num_known)
        return num_wanted <= self._pages.num_free_to_admit(num_wanted)

    def _weigh(
        self, request: Request, offer: Offer, match: Match, num_known: int, num_behind: int, awaited: Awaited | None
    ) -> Weighed:
        """Return the part to load, without a front if memory lacks room for both."""
        weighed = super()._weigh(request, offer, match, num_known, num_behind, awaited)
        if weighed.num_front:
            num_blocks = self._wanted(request, num_known) + self._parts.num_front(match, weighed.num_front)
            if num_blocks > self._pages.num_free_to_admit(num_blocks):
                without = replace(offer, most_front=(0,) * len(offer.by_tier))
                return super()._weigh(request, without, match, num_known, num_behind, awaited)
        return weighed

    def _num_held(self, request: Request, match: Match, num_known: int, num_front: int, end: int) -> int:
        """Return the blocks that `request` holds from the start of its load, plus those that are promised to it."""
        num_wanted = self._wanted(request, num_known)
        if num_front:
            num_wanted += self._parts.num_front(match, num_front)
        return self._parts.num_held_while_loading(self._offers.offered(request.index), num_wanted)

    def _open(self, request: Request, match: Match, num_known: int, num_front: int, end: int) -> Holding:
        """Hold the device's match, allocate parts for the load, and promise the rest."""
        found = self._offers.offered(request.index)
        if num_front:
            num_reserved = self._num_held(request, match, num_known, num_front, end)
            return self._parts.open_with_front(match, found, match.num_pages + num_front, num_reserved)
        return self._parts.open_offered(request.content, found, self._wanted(request, num_known))

    def begin_front(self, holding: Holding, start: int, num_in_flight: int) -> None:
        """Release the windows of a front that no token from `start` on attends to, for its next tokens."""
        self._parts.begin_front(holding, start, num_in_flight)

    def extend_front(self, holding: Holding, end: int) -> None:
        """Take blocks that are promised to the request for the tokens of its front up to `end`."""
        self._parts.extend_front(holding, end)

    def _can_go_on(self, load: LoadUnderWay, loaded: Loaded) -> bool:
        """Return whether everything arrived."""
        assert load.request.holding is not None
        self._parts.join_front(load.request.holding)
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

    def begin_run(self, request: Request) -> None:
        """Release the windows with which the front was computed."""
        assert request.holding is not None
        self._parts.settle(request.holding, request.holding.num_pages * self._page_size)
        self._parts.count()

    def _release(self, request: Request) -> None:
        """Release everything that `request` holds; it never ran."""
        holding = request.holding
        assert holding is not None
        self._parts.join_front(holding)
        self._parts.end_promise(holding)
        self._parts.close(holding, holding.num_pages, holding.num_pages)
        request.holding = None

"""Loads as by a KV connector of vLLM: requests wait without a place, or not at all.

With vLLM's `load_kv_async`, a request whose load is under way has the pages that the load fills, and those found on the
device, and no place among the running requests. While it waits, requests behind it are admitted. After its load, it has
its turn before the waiting requests: its pages become findable, and it runs as soon as there are a place, tokens and
memory for it. A load begins only if its pages are free in addition to those that prefills and other loads will need
until they have computed their known tokens; else requests could wait for each other's memory.

Synchronous loads end within the step that begins them: their requests run in it, and it lasts longer.
"""

from __future__ import annotations

from msgspec.structs import replace

from kvarts.event_log import Tell
from kvarts.events import LoadGivenUp, LoadUsed
from kvarts.kv.cache import Cache, Holding, Match
from kvarts.kv.transfer import Awaited, Loaded, Offer, Weighed
from kvarts.limits import MOST_COUNT
from kvarts.request import Request, RequestState
from kvarts.sched.loads import AlignedTokens, GroupOffers, Loads, LoadUnderWay, LowerTiers
from kvarts.sched.policy import WaitingQueue
from kvarts.sched.running import Running

__all__ = ["AsyncLoads", "SyncLoads"]


class _ConnectorLoads(Loads):
    """Loads into the pages that they fill: the pages of further tokens are taken when these are computed.

    `offers`: what tiers offer in parts, of a cache with KV groups.
    """

    settles_ends = True
    begins_anywhere = True

    def __init__(
        self,
        tiers: LowerTiers,
        cache: Cache,
        waiting: WaitingQueue,
        page_size: int,
        tell: Tell | None,
        offers: GroupOffers | None = None,
    ) -> None:
        super().__init__(tiers, cache, waiting, page_size, tell)
        self._offers = offers

    def note_arrived(self, request: Request) -> None:
        """Make the parts of its content that an earlier process stored findable."""
        if self._offers is not None:
            self._offers.recognise(request.content)

    def _found(self, request: Request, match: Match) -> Match:
        """Return what the device and the load of `request` have together; for whole pages, what the device has."""
        return match if self._offers is None else self._offers.offered(request.index)

    def num_to_load(self, request: Request, match: Match, num_known: int, budget: int) -> int:
        """Return the blocks that must be free to load parts after `match`; MOST_COUNT for whole pages, or if nothing.

        Where groups keep less than all tokens, loading takes fewer blocks than computing.
        """
        offers = self._offers
        if offers is None:
            return MOST_COUNT
        tiers, page_size = self.tiers, self._page_size
        offer = tiers.lookup(request.index, request.content, match.num_pages, (num_known - 1) // page_size)
        if offer is None:
            return MOST_COUNT
        num_wanted = self._wanted(request, match, num_known, match.num_pages + offer.num_pages, budget)
        for depth in range(len(offer.by_tier) - 1, 0, -1):
            if any(offer.by_tier[:depth]):
                offers.offer_up_to(request.index, depth)
                end = match.num_pages + sum(offer.by_tier[:depth])
                num_wanted = min(num_wanted, self._wanted(request, match, num_known, end, budget))
        tiers.forget(request.index)
        return num_wanted

    def _wanted(self, request: Request, match: Match, num_known: int, end: int, budget: int) -> int:
        """Return the blocks that must be free to begin the load of the pages up to `end`."""
        return self._cache.incoming.to_admit(match, self._found(request, match), num_known, budget)

    def _fits(self, request: Request, match: Match, num_known: int, end: int, num_kept: int, budget: int) -> bool:
        """Return whether the blocks of the load, and those that its request will need, are free."""
        num_wanted = self._wanted(request, match, num_known, end, budget) + num_kept
        self.num_short = max(0, num_wanted - self._cache.num_free)
        return not self.num_short

    def _leader(self, request: Request, start: int, limit: int) -> tuple[LoadUnderWay | None, Awaited | None]:
        """Return a load that brings pages of `request`; of parts, one that it needs completely."""
        leader, awaited = super()._leader(request, start, limit)
        if self._offers is None or leader is None or awaited is None:
            return leader, awaited
        is_whole = start + awaited.num_pages >= leader.end  # a load brings windows for its end only
        return (leader, awaited) if is_whole else (None, None)

    def _weigh(
        self, request: Request, offer: Offer, match: Match, num_known: int, num_behind: int, awaited: Awaited | None
    ) -> Weighed:
        """Return the part to load, without a front: a connector loads what follows the pages that were found."""
        without = replace(offer, most_front=(0,) * len(offer.by_tier))
        return super()._weigh(request, without, match, num_known, num_behind, awaited)

    def _num_held(self, request: Request, match: Match, num_known: int, num_front: int, end: int) -> int:
        """Return the number of pages that were found or are loaded, in blocks."""
        return self._cache.incoming.held(self._found(request, match), end)

    def _open(self, request: Request, match: Match, num_known: int, num_front: int, end: int) -> Holding:
        """Hold `match`, and take the pages up to `end`."""
        return self._cache.incoming.open_to_load(self._found(request, match), end * self._page_size, match)

    def _publish(self, request: Request, num_pages: int) -> None:
        """Make the loaded pages of `request` findable; the state after them counts as one of this step, as in vLLM."""
        assert request.holding is not None
        self._cache.incoming.publish_loaded(request.holding, num_pages)
        if self._cache.states.defers:
            self._cache.states.note(request.content, num_pages)

    def _release(self, request: Request) -> None:
        """Release everything that `request` holds; it never ran."""
        if self._offers is None:
            super()._release(request)
            return
        holding = request.holding
        assert holding is not None
        self._cache.close(holding, holding.num_pages, holding.num_pages)
        request.holding = None


class AsyncLoads(_ConnectorLoads):
    """Requests that wait for their loads without a place. `loaded` is in the order in which the loads began."""

    takes_places = False
    _running: Running

    def connect(self, running: Running, aligned_tokens: AlignedTokens | None) -> None:
        """Take note of the running requests: those with a prefill need memory to end it."""
        self._running = running
        self._transfers: dict[int, int] = {}
        """Transfers that have ended, by the index of the request in `loaded`."""
        self._turned: set[int] = set()
        """The requests among these that had a turn, and lacked memory."""

    def _wanted(self, request: Request, match: Match, num_known: int, end: int, budget: int) -> int:
        """Return the same: those that its request will need, or those of the load and those promised to others."""
        found = self._found(request, match)
        num_blocks = self._cache.incoming.to_load(match, found, end) + self._num_promised()
        return max(num_blocks, self._cache.incoming.to_admit(match, found, num_known, 0))

    @property
    def is_stuck(self) -> bool:
        """Whether nothing runs and nothing is loaded, so that only requests whose loads have ended can go on."""
        return bool(self.loaded) and not self._loading and not self._running.num_running

    def _num_promised(self) -> int:
        """Return the pages that prefills and loads lack until their known tokens are computed."""
        requests = [load.request for load in self._loading.values()]
        requests = [request for request in requests if request.state is RequestState.LOADING]
        requests += [request for request, _ in self.loaded]
        requests += [request for request in self._running.chunked if request.own is None]
        return sum([self.num_to_run(request, 0) for request in requests])

    def num_to_run(self, request: Request, budget: int) -> int:
        """Return the pages that `request` lacks to compute its known tokens."""
        assert request.holding is not None
        return self._cache.incoming.to_go_on(request.holding, request.num_known, budget)

    def take_ended(self) -> None:
        """Let the requests whose loads have ended have their turns in the steps from now on."""
        for loaded in self.tiers.take_loaded():
            load = self._loading.pop(loaded.request)
            request = load.request
            if request.state is RequestState.ABANDONED:
                self._num_abandoned -= 1
                self._close(request)
                if self._offers is not None:
                    self._offers.turn(request.index, is_used=False)
                self._let_follow(request.index)
                continue
            request.become(RequestState.LOADED)
            self._transfers[request.index] = load.transfer
            place = len(self.loaded)
            while place and self._transfers[self.loaded[place - 1][0].index] > load.transfer:
                place -= 1
            self.loaded.insert(place, (request, loaded))

    def begin_turn(self, request: Request, loaded: Loaded) -> bool:
        """Make the loaded pages of `request` findable; without any page, release its memory: it is matched again."""
        if request.index in self._turned:
            return True
        assert request.holding is not None
        if self._tell is not None:
            self._tell(LoadUsed(self._transfers[request.index], request.index))
        if loaded.num_pages:
            self._turned.add(request.index)
            self._publish(request, loaded.num_pages)
            if self._offers is not None:
                self._offers.turn(request.index, is_used=True)
        else:
            self._wait_again(request)
            self.retried = request
        self._let_follow(request.index)
        return bool(loaded.num_pages)

    def give_up_last(self) -> bool:
        """Release the memory of the last request in `loaded`, which waits again; return False if it is the only one."""
        if len(self.loaded) < 2:
            return False
        request, loaded = self.loaded[-1]
        if self.begin_turn(request, loaded):
            if self._tell is not None:
                self._tell(LoadGivenUp(request.index))
            self._wait_again(request)
        return True

    def _wait_again(self, request: Request) -> None:
        """Release the memory of `request`, whose load has ended, and let it wait to be matched again, before others."""
        self.loaded = [entry for entry in self.loaded if entry[0] is not request]
        self._forget(request)
        self._release(request)
        request.become(RequestState.WAITING)
        request.goes_first = True
        self._waiting.push(request)

    def resume(self, request: Request, loaded: Loaded) -> int:
        """Count the loaded tokens of `request`, which starts to run; return the tokens that need no computing."""
        self._forget(request)
        return super().resume(request, loaded)

    def cancel(self, request: Request) -> None:
        """Drop a request that is here. Pages that a transfer fills are freed when it ends."""
        super().cancel(request)
        if request.index in self._transfers:
            self._forget(request)
            if self._offers is not None:
                self._offers.turn(request.index, is_used=False)
            self._let_follow(request.index)

    def _forget(self, request: Request) -> None:
        del self._transfers[request.index]
        self._turned.discard(request.index)


class SyncLoads(_ConnectorLoads):
    """Loads that end within the step that begins them; its last layer is computed after them."""

    is_sync = True

    def connect(self, running: Running, aligned_tokens: AlignedTokens | None) -> None:
        """Take note of the rule for chunks that end at pages: what is loaded and what is computed are of one step."""
        self._aligned_tokens = aligned_tokens

    def _wanted(self, request: Request, match: Match, num_known: int, end: int, budget: int) -> int:
        """Return the same, where chunks end at pages for the chunk that follows the load."""
        return super()._wanted(request, match, num_known, end, self._chunk(request, match, num_known, end, budget))

    def _chunk(self, request: Request, match: Match, num_known: int, end: int, budget: int) -> int:
        """Return how many of `budget` tokens `request` computes after the pages up to `end`."""
        if self._aligned_tokens is None:
            return budget
        start = end * self._page_size
        return self._aligned_tokens(request, start, min(budget, num_known - start), self._cache.states.branch_of(match))

    def _fits(self, request: Request, match: Match, num_known: int, end: int, num_kept: int, budget: int) -> bool:
        """Return whether there are blocks, and tokens for the chunk that follows the load."""
        self.is_short_of_tokens = not self._chunk(request, match, num_known, end, budget)
        return not self.is_short_of_tokens and super()._fits(request, match, num_known, end, num_kept, budget)

    def _can_go_on(self, load: LoadUnderWay, loaded: Loaded) -> bool:
        """Make the loaded pages findable."""
        self._publish(load.request, loaded.num_pages)
        return True

    def note_begun(self, load: LoadUnderWay) -> None:
        """Let `start_early` use the load at once."""
        load.loaded = Loaded(load.request.index, load.end, load.by_tier, is_under_way=True)
        self._ended.append(load)
        self.early.append(load)

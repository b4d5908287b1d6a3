"""How requests wait for pages from a tier below: with all their pages and a place, without a place, or not at all.

`Reserve`: a request has what all its known tokens need, and a place. With KV groups it holds its match and the loaded
parts, and the further blocks that it may need while the rest of its known tokens is computed are promised to it. If a
load of parts does not arrive completely, the request is matched again, and hits the parts that did arrive. While it
computes a front, it holds that as a sequence of its own next to the parts that are loaded: the number of blocks that it
holds or has a promise of is the same from the beginning of its load to the end.

The others are as by a KV connector of vLLM: loads go into the pages that they fill, and the pages of further tokens are
taken when these are computed. `Asynchronous` is vLLM's `load_kv_async`: a request whose load is under way has the pages
that the load fills, and those found on the device, and no place among the running requests. While it waits, requests
behind it are admitted. After its load, it has its turn before the waiting requests: its pages become findable, and it
runs as soon as there are a place, tokens and memory for it. A load begins only if its pages are free in addition to
those that prefills and other loads will need until they have computed their known tokens; else requests could wait for
each other's memory. `Synchronous` loads end within the step that begins them: their requests run in it, and it lasts
longer.
"""

from __future__ import annotations

from kvarts.core.event_log import Emit
from kvarts.core.events import LoadGivenUp, LoadUsed
from kvarts.core.kv.cache import BlockTable, Cache, Match
from kvarts.core.kv.transfer import Awaited, Loaded, Offer, Weighed
from kvarts.core.request import Request, RequestState
from kvarts.core.sched.loads import LoadUnderWay, Waits
from kvarts.core.sched.page_source import PageSource

__all__ = ["Asynchronous", "Reserve", "Synchronous"]


class Reserve(Waits):
    """A request reserves what it needs until its known tokens are computed. `pages`: where it may come from."""

    __slots__ = ("_incoming", "_pages")

    def __init__(self, cache: Cache, pages: PageSource) -> None:
        super().__init__(holds_seat=True)
        self._incoming = cache.incoming
        self._pages = pages

    def wanted(self, request: Request, match: Match, num_known: int, end: int, budget: int, num_kept: int = 0) -> int:
        """Return the most blocks that `request` may hold at a time; 0 if these are no more than computing needs."""
        return num_kept + self._incoming.to_reserve(self.loads.found(request, match), num_known)

    def fits(self, request: Request, match: Match, num_known: int, end: int, num_kept: int, budget: int) -> bool:
        """Return whether these are free."""
        num_wanted = self.wanted(request, match, num_known, end, budget)
        return not num_wanted or num_wanted <= self._pages.num_free_to_admit(num_wanted)

    def weigh(
        self, request: Request, offer: Offer, match: Match, num_known: int, num_behind: int, awaited: Awaited | None
    ) -> Weighed:
        """Return the part to load, without a front if memory lacks room for both."""
        weighed = self.loads.weigh(offer, match, num_known, num_behind, awaited)
        if weighed.num_front:
            num_front = self._incoming.to_front(match, weighed.num_front)
            num_blocks = self.wanted(request, match, num_known, 0, 0) + num_front
            if num_blocks and num_blocks > self._pages.num_free_to_admit(num_blocks):
                return self.loads.weigh_without_front(offer, match, num_known, num_behind, awaited)
        return weighed

    def held(self, request: Request, match: Match, num_known: int, num_front: int, end: int) -> int:
        """Return the blocks that `request` holds from the start of its load, plus those that are promised to it."""
        found = self.loads.found(request, match)
        return self._incoming.held_reserved(match, found, num_known, num_front)

    def open(self, request: Request, match: Match, num_known: int, num_front: int, end: int) -> BlockTable:
        """Hold `match`, take what the load fills, and reserve the rest."""
        return self._incoming.open_reserved(match, self.loads.found(request, match), num_known, num_front)

    def arrive(self, load: LoadUnderWay, loaded: Loaded) -> bool:
        """Make the loaded pages findable; return whether the request can compute from there on."""
        assert load.request.table is not None
        return self._incoming.arrive(load.request.table, loaded.num_pages, load.end)

    def resumed(self, request: Request) -> None:
        """Free the blocks that are promised to `request`, which is about to take them."""
        assert request.table is not None
        self._incoming.end_promise(request.table)

    def begin_run(self, request: Request) -> None:
        """Release the windows with which the front was computed."""
        assert request.table is not None
        self._incoming.begin_run(request.table)

    def begun(self, load: LoadUnderWay) -> None:
        """Wait for the end of the load."""

    def cancelled(self, request: Request) -> None:
        """Need not know."""


class _Connector(Waits):
    """Loads into the pages that they fill: the pages of further tokens are taken when these are computed."""

    __slots__ = ("_cache", "_emit", "_incoming", "_page_size")

    def __init__(
        self, cache: Cache, page_size: int, emit: Emit | None, *, holds_seat: bool, is_sync: bool = False
    ) -> None:
        super().__init__(holds_seat=holds_seat, settles_ends=True, is_sync=is_sync, begins_anywhere=True)
        self._cache = cache
        self._incoming = cache.incoming
        self._page_size = page_size
        self._emit = emit

    def fits(self, request: Request, match: Match, num_known: int, end: int, num_kept: int, budget: int) -> bool:
        """Return whether the blocks of the load, and those that its request will need, are free."""
        num_wanted = self.wanted(request, match, num_known, end, budget, num_kept)
        self.loads.num_short = max(0, num_wanted - self._cache.num_free)
        return not self.loads.num_short

    def weigh(
        self, request: Request, offer: Offer, match: Match, num_known: int, num_behind: int, awaited: Awaited | None
    ) -> Weighed:
        """Return the part to load, without a front: a connector loads what follows the pages that were found."""
        return self.loads.weigh_without_front(offer, match, num_known, num_behind, awaited)

    def held(self, request: Request, match: Match, num_known: int, num_front: int, end: int) -> int:
        """Return the number of blocks that were found or are loaded."""
        return self._incoming.held(self.loads.found(request, match), end)

    def open(self, request: Request, match: Match, num_known: int, num_front: int, end: int) -> BlockTable:
        """Hold `match`, and take the pages up to `end`."""
        return self._incoming.open_to_load(self.loads.found(request, match), end * self._page_size, match)

    def _publish(self, request: Request, num_pages: int) -> None:
        """Make the loaded pages of `request` findable."""
        assert request.table is not None
        self._incoming.publish_loaded(request.table, num_pages)

    def begin_run(self, request: Request) -> None:
        """Release nothing: there was no front."""


class Asynchronous(_Connector):
    """Requests wait without a place. `Loads.loaded` is in the order in which the loads began."""

    __slots__ = ("_transfers", "_turned")

    def __init__(self, cache: Cache, page_size: int, emit: Emit | None) -> None:
        super().__init__(cache, page_size, emit, holds_seat=False)
        self._transfers: dict[int, int] = {}
        """Transfers that have ended, by the index of the request in `loaded`."""
        self._turned: set[int] = set()
        """The requests among these that had a turn, and lacked memory."""

    def wanted(self, request: Request, match: Match, num_known: int, end: int, budget: int, num_kept: int = 0) -> int:
        """Return the blocks that `request` will need, or those of its load and those promised to others."""
        found = self.loads.found(request, match)
        num_blocks = self._incoming.to_load(match, found, end) + self._num_promised()
        return max(num_blocks + num_kept, self._incoming.to_admit(match, found, num_known, 0, num_kept))

    def _num_promised(self) -> int:
        """Return the pages that prefills and loads lack until their known tokens are computed."""
        requests = [load.request for load in self.loads.loading.values()]
        requests = [request for request in requests if request.state is RequestState.LOADING]
        requests += [request for request, _ in self.loads.loaded]
        requests += [request for request in self.running.chunked if request.own is None]
        return sum([self.to_run(request, 0) for request in requests])

    def arrive(self, load: LoadUnderWay, loaded: Loaded) -> bool:
        """Return False: what has arrived is findable from the turn of its request on."""
        return False

    def take_ended(self) -> None:
        """Let the requests whose loads have ended have their turns in the steps from now on."""
        loads = self.loads
        for loaded in loads.tiers.take_loaded():
            load = loads.loading.pop(loaded.request)
            request = load.request
            if request.state is RequestState.ABANDONED:
                loads.num_abandoned -= 1
                loads.close(request)
                self._note_turn(request, is_used=False)
                loads.let_follow(request.index)
                continue
            request.become(RequestState.LOADED)
            self._transfers[request.index] = load.transfer
            place = len(loads.loaded)
            while place and self._transfers[loads.loaded[place - 1][0].index] > load.transfer:
                place -= 1
            loads.loaded.insert(place, (request, loaded))

    def _note_turn(self, request: Request, *, is_used: bool) -> None:
        if self.loads.offers is not None:
            self.loads.offers.turn(request.index, is_used=is_used)

    @property
    def is_stuck(self) -> bool:
        """Whether nothing runs and nothing is loaded, so that only requests whose loads have ended can go on."""
        return bool(self.loads.loaded) and not self.loads.loading and not self.running.num_running

    def begin_turn(self, request: Request, loaded: Loaded) -> bool:
        """Make the loaded pages of `request` findable; without any page, release its memory: it is matched again."""
        if request.index in self._turned:
            return True
        if self._emit is not None:
            self._emit(LoadUsed(self._transfers[request.index], request.index))
        if loaded.num_pages:
            self._turned.add(request.index)
            self._publish(request, loaded.num_pages)
            self._note_turn(request, is_used=True)
        else:
            self._wait_again(request)
            self.loads.retried = request
        self.loads.let_follow(request.index)
        return bool(loaded.num_pages)

    def give_up_last(self) -> bool:
        """Release the memory of the last request in `loaded`, which waits again; return False if it is the only one."""
        loads = self.loads
        if len(loads.loaded) < 2:
            return False
        request, loaded = loads.loaded[-1]
        if self.begin_turn(request, loaded):
            if self._emit is not None:
                self._emit(LoadGivenUp(request.index))
            self._wait_again(request)
        return True

    def _wait_again(self, request: Request) -> None:
        """Release the memory of `request`, whose load has ended, and let it wait to be matched again, before others."""
        self.loads.loaded = [entry for entry in self.loads.loaded if entry[0] is not request]
        self.resumed(request)
        self.loads.wait_again(request)

    def to_run(self, request: Request, budget: int) -> int:
        """Return the pages that `request` lacks to compute its known tokens."""
        assert request.table is not None
        return self._incoming.to_go_on(request.table, request.num_known, budget, self.num_planned(request))

    def resumed(self, request: Request) -> None:
        """Forget the load of `request`."""
        del self._transfers[request.index]
        self._turned.discard(request.index)

    def cancelled(self, request: Request) -> None:
        """Forget the load of `request`, if that has ended."""
        if request.index in self._transfers:
            self.resumed(request)
            self._note_turn(request, is_used=False)
            self.loads.let_follow(request.index)

    def begun(self, load: LoadUnderWay) -> None:
        """Wait for the end of the load."""


class Synchronous(_Connector):
    """Loads end within the step that begins them; its last layer is computed after them."""

    __slots__ = ()

    def __init__(self, cache: Cache, page_size: int, emit: Emit | None) -> None:
        super().__init__(cache, page_size, emit, holds_seat=True, is_sync=True)

    def wanted(self, request: Request, match: Match, num_known: int, end: int, budget: int, num_kept: int = 0) -> int:
        """Return the blocks that the load and the chunk that follows it need."""
        num_new = self._chunk(request, match, num_known, end, budget)
        return self._incoming.to_admit(match, self.loads.found(request, match), num_known, num_new, num_kept)

    def _chunk(self, request: Request, match: Match, num_known: int, end: int, budget: int) -> int:
        """Return how many of `budget` tokens `request` computes after the pages up to `end`."""
        if self.aligned_tokens is None:
            return budget
        start = end * self._page_size
        branch = self._cache.states.branch_of(match)
        return self.aligned_tokens(request, start, min(budget, num_known - start), branch)

    def fits(self, request: Request, match: Match, num_known: int, end: int, num_kept: int, budget: int) -> bool:
        """Return whether there are blocks, and tokens for the chunk that follows the load."""
        loads = self.loads
        loads.is_short_of_tokens = not self._chunk(request, match, num_known, end, budget)
        return not loads.is_short_of_tokens and super().fits(request, match, num_known, end, num_kept, budget)

    def begun(self, load: LoadUnderWay) -> None:
        """Let `Loads.start_early` use the load at once."""
        load.loaded = Loaded(load.request.index, load.end, load.by_tier, is_under_way=True)
        self.loads.ended.append(load)
        self.loads.early.append(load)

    def arrive(self, load: LoadUnderWay, loaded: Loaded) -> bool:
        """Make the loaded pages findable."""
        self._publish(load.request, loaded.num_pages)
        return True

    def resumed(self, request: Request) -> None:
        """Need not know."""

    def cancelled(self, request: Request) -> None:
        """Need not know."""

"""Loads as by a KV connector of vLLM: requests have no place while they wait, or do not wait.

With vLLM's `load_kv_async`, a request whose load is under way has the pages that the load fills, and those found on the
device, and no place among the running requests. While it waits, requests behind it are admitted. After its load, it has
its turn before the waiting requests: its pages become findable, and it runs as soon as there are a place, tokens and
memory for it. A load begins only if its pages are free beside those that prefills and other loads will need until they
have computed their known tokens; else requests could wait for each other's memory.

Synchronous loads end within the step that begins them: their requests run in it, and it lasts longer.
"""

from __future__ import annotations

from msgspec.structs import replace

from kvarts.events import LoadUsed
from kvarts.kv.cache import Holding, Match
from kvarts.kv.transfer import Awaited, Loaded, Offer, Weighed
from kvarts.request import Request, RequestState
from kvarts.sched.loads import Loads
from kvarts.sched.running import Running

__all__ = ["AsyncLoads", "SyncLoads"]


class _ConnectorLoads(Loads):
    """Loads into the pages that they fill: the pages of further tokens are taken when these are computed."""

    def _weigh(
        self, request: Request, offer: Offer, match: Match, num_known: int, num_behind: int, awaited: Awaited | None
    ) -> Weighed:
        """Return the part to load, without a front: a connector loads what follows the pages that were found."""
        without = replace(offer, most_front=(0,) * len(offer.by_tier))
        return super()._weigh(request, without, match, num_known, num_behind, awaited)

    def _num_held(self, request: Request, match: Match, num_known: int, num_front: int, end: int) -> int:
        """Return `end`, the number of pages that were found or are loaded."""
        return end

    def _open(self, request: Request, match: Match, num_known: int, num_front: int, end: int) -> Holding:
        """Hold `match`, and take the pages up to `end`."""
        return self._cache.open_to_load(match, end * self._page_size)


class AsyncLoads(_ConnectorLoads):
    """Requests that wait for their loads without a place. `loaded` is in the order in which the loads began."""

    takes_places = False
    _running: Running

    def connect(self, running: Running) -> None:
        """Take note of the running requests: those with a prefill need memory to end it."""
        self._running = running
        self._transfers: dict[int, int] = {}
        """Transfers that have ended, by the index of the request in `loaded`."""
        self._turned: set[int] = set()
        """The requests among these that had a turn, and lacked memory."""

    def _fits(self, request: Request, match: Match, num_known: int, end: int, num_kept: int) -> bool:
        """Return whether the pages of the load are free, beside those that prefills and other loads will need."""
        num_wanted = self._cache.num_to_admit(match, end * self._page_size, 0, num_kept) + self._num_promised()
        self.num_short = max(0, num_wanted - self._cache.num_free)
        return not self.num_short

    def _num_promised(self) -> int:
        """Return the pages that prefills and loads lack until their known tokens are computed."""
        requests = [load.request for load in self._loading.values()]
        requests = [request for request in requests if request.state is RequestState.LOADING]
        requests += [request for request, _ in self.loaded]
        requests += [request for request in self._running.chunked if request.own is None]
        return sum(map(self.num_to_run, requests))

    def num_to_run(self, request: Request) -> int:
        """Return the pages that `request` lacks to compute its known tokens."""
        assert request.holding is not None
        return max(0, self._cache.num_to_finish(request.holding, request.num_known))

    def take_ended(self) -> None:
        """Let the requests whose loads have ended have their turns in the steps from now on."""
        for loaded in self.tiers.take_loaded():
            load = self._loading.pop(loaded.request)
            request = load.request
            if request.state is RequestState.ABANDONED:
                self._num_abandoned -= 1
                self._close(request)
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
            self._cache.publish_loaded(request.holding, loaded.num_pages)
        else:
            self.loaded = [entry for entry in self.loaded if entry[0] is not request]
            del self._transfers[request.index]
            self._release(request)
            request.become(RequestState.WAITING)
            request.goes_first = True
            self.retried = request
            self._waiting.push(request)
        self._let_follow(request.index)
        return bool(loaded.num_pages)

    def resume(self, request: Request, loaded: Loaded) -> int:
        """Count the loaded tokens of `request`, which starts to run; return the tokens that need no computing."""
        self._forget(request)
        return super().resume(request, loaded)

    def cancel(self, request: Request) -> None:
        """Drop a request that is here. Pages that a transfer fills are freed when it ends."""
        super().cancel(request)
        if request.index in self._transfers:
            self._forget(request)
            self._let_follow(request.index)

    def _forget(self, request: Request) -> None:
        del self._transfers[request.index]
        self._turned.discard(request.index)


class SyncLoads(_ConnectorLoads):
    """Loads that end within the step that begins them; its last layer is computed after them."""

    is_sync = True

    def try_start(
        self, request: Request, match: Match, num_known: int, num_behind: int, now_ns: int, num_kept: int = 0
    ) -> bool:
        """Begin a load, to be used at once by `start_early`; return False if the pages are to be computed."""
        if not super().try_start(request, match, num_known, num_behind, now_ns, num_kept):
            return False
        load = self._loading.get(request.index)
        if load is not None:
            load.loaded = Loaded(request.index, load.end, load.by_tier, is_under_way=True)
            self._ended.append(load)
            self.early.append(load)
        return True

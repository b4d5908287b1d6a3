"""The router that asks a policy: it keeps the view up to date, and holds requests that have to wait in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import msgspec

from kvarts.event_log import EventLog
from kvarts.events import PagesRemoved, PagesStored
from kvarts.request import Request
from kvarts.routers.exact import EventIndex
from kvarts.routers.feed import CacheFeed
from kvarts.routers.view import Asked, Directory, Found, Needs, Policy, View
from kvarts.settings import SettingError

if TYPE_CHECKING:
    from kvarts.routers.config import Routing

__all__ = ["PolicyRouter"]


class PolicyRouter:
    """Answers the seam `kvarts.sim.router.Router`: places requests by `policy`, and is told what becomes of them.

    Owner of the requests that wait in it, and of the cache events that have not reached it yet.
    """

    def __init__(
        self,
        policy: Policy,
        routing: Routing,
        *,
        staleness_ns: int,
        num_workers: int,
        page_size: int,
        max_num_batched_tokens: int,
        tiers: Sequence[str] = ("device",),
        directory: Directory | None = None,
    ) -> None:
        needs: Needs = getattr(policy, "needs", Needs())
        self._policy = policy
        self._queue_tokens = (
            None if routing.queue_threshold is None else routing.queue_threshold * max_num_batched_tokens
        )
        self._order = routing.queue
        self._needs = needs
        self._event_lag_ns = routing.event_lag_ns
        self.staleness_ns = staleness_ns
        self.is_told = True
        self.holds_requests = self._queue_tokens is not None
        self.reads_metrics = needs.metrics
        self.reads_events = needs.pages != "no"
        self.reads_prefills = needs.prefills or self.holds_requests
        self.index: EventIndex | None = None
        if needs.pages != "no" and directory is None:
            directory = self.index = EventIndex(tiers)
        self.view = View(
            needs,
            num_workers=num_workers,
            page_size=page_size,
            max_num_batched_tokens=max_num_batched_tokens,
            directory=directory,
            seed=routing.seed,
        )
        self._cached_tokens = getattr(policy, "cached_tokens", None)
        self._feeds: dict[int, CacheFeed] = {}
        self._events: list[tuple[int, int, int, PagesStored | PagesRemoved]] = []
        """Cache events under way, a heap: when each reaches the router, its number, and its worker."""
        self._num_events = 0
        self._waiting: list[tuple[float, int, Request, Asked, Found | None]] = []
        """Requests held here, a heap in the order of the queue: place, number, request, and what it found then."""
        self._num_held = 0
        self._news: list[tuple[Callable[[int], object], int]] = []
        """Of a router with a queue: what it was told since requests last left it, each of which may let some go."""

    # Placing ----------------------------------------------------------------------------------------------

    def place(self, request: Request, session: str | None, now_ns: int) -> int | None:
        """Return the worker that `request` goes to; None if it waits here until `take_placed` returns it."""
        asked = self._asked(request, session, now_ns)
        if self._queue_tokens is not None and (self._waiting or self._all_busy()):
            self._hold(request, asked)
            return None
        return self._place(asked)

    def placed(self, request: Request, session: str | None, worker: int, now_ns: int) -> None:
        """Note that something else sent `request` to `worker`."""
        asked = self._asked(request, session, now_ns)
        self.view.placed(asked, worker, self._hits(asked, worker))

    def take_placed(self, now_ns: int) -> list[tuple[Request, int]]:
        """Return the requests that waited here and go to a worker now, in that order."""
        found: list[tuple[Request, int]] = []
        news, self._news = self._news, []
        for note, request_or_worker in news:
            note(request_or_worker)
            while self._waiting and not self._all_busy():
                _, _, request, asked, on_arrival = heappop(self._waiting)
                self.view.found = on_arrival  # a router looks for the prefix once
                found.append((request, self._place(msgspec.structs.replace(asked, now_ns=now_ns))))
        return found

    def withdraw(self, request: Request) -> None:
        """Forget `request`, which waits here: its client gave it up."""
        self._waiting = [each for each in self._waiting if each[2] is not request]
        heapify(self._waiting)

    @property
    def num_held(self) -> int:
        """Requests that wait here."""
        return len(self._waiting)

    # Being told -------------------------------------------------------------------------------------------

    def prefilled(self, request: int) -> None:
        """Note that the prompt of a request is computed."""
        self._note(self.view.prefilled, request)

    def ended(self, request: int) -> None:
        """Note that a request ended, or was refused by its worker."""
        self._note(self.view.ended, request)

    def report(
        self, worker: int, running: int, waiting: int, used_pages: int, waiting_pages: int, usage: float
    ) -> None:
        """Take in the metrics of a worker."""
        self.view.metrics.report(worker, running, waiting, used_pages, waiting_pages, usage)

    def reader_of(self, worker: int) -> CacheFeed | None:
        """Return what reads the cache events of a worker; None if the policy does not need them."""
        if self.index is None:
            return None

        def tell(event: PagesStored | PagesRemoved, time_ns: int) -> None:
            self._tell(worker, event, time_ns)

        feed = self._feeds[worker] = CacheFeed(tell, at_end=self._needs.pages == "end")
        return feed

    def follow(self, worker: int, log: EventLog) -> None:
        """Take note that the reader of `worker` reads `log`, and may look at events that wait in it."""
        if worker in self._feeds:
            self._feeds[worker].follow(log)

    def catch_up(self, now_ns: int, workers: Iterable[int]) -> None:
        """Let take effect what happened in `workers` since, as far as it reaches the router by `now_ns`."""
        feeds = self._feeds
        if feeds:
            for worker in sorted(set(workers)):
                feeds[worker].read()
        events, index = self._events, self.index
        while events and events[0][0] <= now_ns:
            _, _, worker, event = heappop(events)
            assert index is not None
            content = event.content
            end = min(event.end_page, content.num_known_pages)  # others have no name that another prompt could have
            change = index.store if isinstance(event, PagesStored) else index.remove
            change(worker, content, event.start_page, end, event.medium)

    def _tell(self, worker: int, event: PagesStored | PagesRemoved, time_ns: int) -> None:
        if event.start_page < event.content.num_known_pages:
            self._num_events += 1
            heappush(self._events, (time_ns + self._event_lag_ns, self._num_events, worker, event))

    def join(self) -> int:
        """Add a worker; return its number."""
        worker = self.view.join()
        self._note(lambda _: None, worker)
        return worker

    def enter(self, worker: int) -> None:
        """Send requests to `worker` again, which has left."""
        self.view.enter(worker)
        self._note(lambda _: None, worker)

    def leave(self, worker: int) -> None:
        """Send nothing to `worker` any more."""
        self.view.leave(worker)

    # Inside -----------------------------------------------------------------------------------------------

    def _note(self, note: Callable[[int], object], request: int) -> None:
        if self.holds_requests:
            self._news.append((note, request))
        else:
            note(request)

    def _asked(self, request: Request, session: str | None, now_ns: int) -> Asked:
        content, num_tokens = request.content, request.num_prompt_tokens
        return Asked(request.index, content, num_tokens, session, request.priority, now_ns)

    def _place(self, asked: Asked) -> int:
        view = self.view
        worker = self._policy.choose(asked, view)
        if not isinstance(worker, int) or worker not in view.workers:
            what = f"{type(self._policy).__name__} chose {worker!r}, and the workers are {view.workers}"
            raise SettingError(what, "router", hint="Return one of view.workers.")
        view.placed(asked, worker, self._hits(asked, worker))
        return worker

    def _hits(self, asked: Asked, worker: int) -> int:
        return 0 if self._cached_tokens is None else int(self._cached_tokens(asked, worker, self.view))

    def _all_busy(self) -> bool:
        tokens, most = self.view.prefill_tokens, self._queue_tokens
        assert most is not None
        return all(tokens[worker] > most for worker in self.view.workers)

    def _hold(self, request: Request, asked: Asked) -> None:
        self._num_held += 1
        view = self.view
        cached = max(self._hits(asked, worker) for worker in view.workers)
        place: float = self._num_held
        if self._order == "lcfs":
            place = -place
        elif self._order == "wspt":
            place = -(1 + asked.priority) / max(1, asked.num_tokens - cached)
        heappush(self._waiting, (place, self._num_held, request, asked, view.found))

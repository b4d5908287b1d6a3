"""The router that applies a policy: it keeps the view up to date, and holds requests that must wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush

import msgspec

from kvarts.base.settings import SettingError
from kvarts.core.event_log import EventLog
from kvarts.core.events import PagesRemoved, PagesStored
from kvarts.core.request import Request
from kvarts.sim.routers.directory import CacheFeed, EventIndex, PartIndex
from kvarts.sim.routers.view import Asked, Found, Needs, RouterPolicy, View, WorkerFacts

__all__ = ["PolicyRouter"]


class PolicyRouter:
    """Implements `kvarts.sim.router.Router`: places requests by `policy`, and is notified of their progress.

    `order`: that of waiting requests, a QueueOrder. `queue_tokens`: requests wait while every worker has more prompt
    tokens than that; None never holds one. `event_lag_ns`: time until cache events reach the router. `seed`: of random
    choices. Owner of the requests waiting in it, and of the cache events in transit to it.
    """

    def __init__(
        self,
        policy: RouterPolicy,
        workers: WorkerFacts,
        *,
        order: str,
        queue_tokens: float | None,
        event_lag_ns: int,
        staleness_ns: int,
        seed: int,
    ) -> None:
        needs: Needs = getattr(policy, "needs", Needs())
        self._policy = policy
        self._queue_tokens = queue_tokens
        self._order = order
        self._needs = needs
        self._event_lag_ns = event_lag_ns
        self.staleness_ns = staleness_ns
        self.is_told = True
        self.holds_requests = self._queue_tokens is not None
        self.reads_metrics = needs.metrics
        self.reads_events = needs.pages != "no"
        self.reads_prefills = needs.prefills or self.holds_requests
        self.index: EventIndex | PartIndex | None = None
        directory, memory, tiers = workers.directory, workers.memory, workers.tiers
        if needs.pages != "no" and directory is None:
            self.index = EventIndex(tiers) if memory is None else PartIndex(memory, workers.page_size, tiers)
            directory = self.index
        self.view = View(needs, workers, directory=directory, seed=seed)
        self._cached_tokens = getattr(policy, "cached_tokens", None)
        self._feeds: dict[int, CacheFeed] = {}
        self._events: list[tuple[int, int, int, PagesStored | PagesRemoved]] = []
        """Cache events in transit, a heap: arrival time at the router, number, and worker."""
        self._num_events = 0
        self._waiting: list[tuple[float, int, Request, Asked, Found | None]] = []
        """Waiting requests, a heap in the order of the queue: place, number, request, and its matches on arrival."""
        self._num_held = 0
        self._news: deque[tuple[Callable[[int], object], int]] = deque()
        """In a router with a queue: notifications since requests last left it, each of which may release some."""

    # Placing ----------------------------------------------------------------------------------------------

    def place(self, request: Request, session: str | None, now_ns: int) -> int | None:
        """Return the worker for `request`; None if it waits here until `take_placed` returns it."""
        asked = self._asked(request, session, now_ns)
        if self._queue_tokens is not None and (self._waiting or self._all_busy()):
            self._hold(request, asked)
            return None
        return self._place(asked)

    def placed(self, request: Request, session: str | None, worker: int, now_ns: int) -> None:
        """Record that `request` was sent to `worker` by another component."""
        asked = self._asked(request, session, now_ns)
        self._settle(asked.index)
        self.view.placed(asked, worker, self._hits(asked, worker))

    def take_placed(self, now_ns: int) -> list[tuple[Request, int]]:
        """Return the requests that waited here and are placed now, in order, each with its worker."""
        found: list[tuple[Request, int]] = []
        while self._news:
            note, request_or_worker = self._news.popleft()
            note(request_or_worker)
            while self._waiting and not self._all_busy():
                _, _, request, asked, on_arrival = heappop(self._waiting)
                self.view.found = on_arrival  # a router looks up the prefix once
                found.append((request, self._place(msgspec.structs.replace(asked, now_ns=now_ns))))
        return found

    def withdraw(self, request: Request) -> None:
        """Forget `request`, which waits here: its client cancelled it."""
        self._waiting = [each for each in self._waiting if each[2] is not request]
        heapify(self._waiting)

    @property
    def num_held(self) -> int:
        """Number of requests waiting here."""
        return len(self._waiting)

    # Notifications ----------------------------------------------------------------------------------------

    def prefilled(self, request: int) -> None:
        """Record that the prompt of a request is computed."""
        self._note(self.view.prefilled, request)

    def ended(self, request: int) -> None:
        """Record that a request ended, or was refused by its worker."""
        self._note(self.view.ended, request)

    def report(
        self, worker: int, running: int, waiting: int, used_pages: int, waiting_pages: int, usage: float
    ) -> None:
        """Record the metrics of a worker."""
        self.view.metrics.report(worker, running, waiting, used_pages, waiting_pages, usage)

    def reader_of(self, worker: int) -> CacheFeed | None:
        """Return the reader of a worker's cache events; None if the policy does not need them."""
        if self.index is None:
            return None

        def emit(event: PagesStored | PagesRemoved, time_ns: int) -> None:
            self._emit(worker, event, time_ns)

        feed = self._feeds[worker] = CacheFeed(emit, at_end=self._needs.pages == "end")
        return feed

    def follow(self, worker: int, log: EventLog) -> None:
        """Record that the reader of `worker` reads `log`, and may read events that wait in it."""
        if worker in self._feeds:
            self._feeds[worker].follow(log)

    def note_time(self, worker: int, now_ns: int) -> None:
        """Record that events of `worker` from now on that are in none of its steps happen at `now_ns` or later."""
        if worker in self._feeds:
            self._feeds[worker].note_time(now_ns)

    def catch_up(self, now_ns: int, workers: Iterable[int]) -> None:
        """Apply the cache events of `workers` that reach the router by `now_ns`."""
        feeds = self._feeds
        if feeds:
            for worker in sorted(feeds.keys() & workers):
                feeds[worker].read()
        events, index = self._events, self.index
        while events and events[0][0] <= now_ns:
            _, _, worker, event = heappop(events)
            assert index is not None
            content = event.content
            end = min(event.end_page, content.num_known_pages)  # no other prompt can match unknown tokens
            change = index.store if isinstance(event, PagesStored) else index.remove
            change(worker, content, event.start_page, end, event.medium, event.group)

    def _emit(self, worker: int, event: PagesStored | PagesRemoved, time_ns: int) -> None:
        if event.start_page < event.content.num_known_pages:
            self._num_events += 1
            heappush(self._events, (time_ns + self._event_lag_ns, self._num_events, worker, event))

    def join(self) -> int:
        """Add a worker; return its number."""
        worker = self.view.join()
        self._note(_nothing, worker)
        return worker

    def enter(self, worker: int) -> None:
        """Resume sending requests to `worker`, which had left."""
        self.view.enter(worker)
        self._note(_nothing, worker)

    def leave(self, worker: int) -> None:
        """Stop sending requests to `worker`."""
        self.view.leave(worker)

    def forget(self, worker: int) -> None:
        """Forget the pages of `worker`, which has left, and the events of it that are in transit."""
        if self._feeds.pop(worker, None) is None:
            return
        self._events = [each for each in self._events if each[2] != worker]
        heapify(self._events)
        if self.index is not None:
            self.index.forget(worker)

    # Inside -----------------------------------------------------------------------------------------------

    def _note(self, note: Callable[[int], object], request: int) -> None:
        if self.holds_requests:
            self._news.append((note, request))
        else:
            note(request)

    def _settle(self, request: int) -> None:
        """Apply what is known of a request before it is placed again: later, it would be taken for the new place."""
        for place, (note, of_request) in enumerate(self._news):
            if of_request == request and note is not _nothing:
                note(request)
                self._news[place] = _nothing, request

    def _asked(self, request: Request, session: str | None, now_ns: int) -> Asked:
        content, num_tokens = request.content, request.num_prompt_tokens
        return Asked(request.index, content, num_tokens, session, request.priority, now_ns)

    def _place(self, asked: Asked) -> int:
        view = self.view
        self._settle(asked.index)
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


def _nothing(_: int) -> None:
    """Change nothing: a notification that may release requests all the same."""

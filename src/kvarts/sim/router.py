"""The seam of routers: a router places requests on workers. It knows them only by the reports that it receives.

The room `routers` implements policies by name. Only the policy that needs no room is here: round robin.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from mypy_extensions import mypyc_attr

from kvarts.core.config import EngineConfig
from kvarts.core.content import Content
from kvarts.core.event_log import EventLog, EventReader
from kvarts.core.request import Request
from kvarts.core.sched.policy import NEVER_NS
from kvarts.core.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from kvarts.core.kv.transfer import PeersGain

__all__ = [
    "AskedCaches",
    "Informed",
    "RoundRobin",
    "Routed",
    "Router",
    "RouterMaker",
]

RouterMaker = Callable[[], Any]
"""Makes the policy of a router: a class, or a function without arguments."""


class Routed(Protocol):
    """An engine behind a router: a replica, or one model on one of several devices."""

    @property
    def config(self) -> EngineConfig:
        """Its configuration."""

    @property
    def scheduler(self) -> Scheduler:
        """Its scheduler, the source of its metrics."""

    def submit(self, request: Request, now_ns: int) -> str | None:
        """Queue `request` at `now_ns`, or return the reason why it can never run."""

    def refuse(self, request: Request, reason: str, now_ns: int) -> None:
        """Emit the event that `request` was refused at `now_ns` before it was queued, for `reason`."""

    def cancel(self, request: Request, now_ns: int) -> None:
        """Drop `request` at `now_ns`, between steps."""


class Router(Protocol):
    """Places requests on workers. Promises: it knows only the reports that it received, and its own placements.

    Workers are numbered in the order in which they joined. Before it asks for a placement, the driver delivers all
    reports up to the time of the request.
    """

    is_told: bool
    """Whether it receives ends, and placements that it did not make."""
    reads_prefills: bool
    """Whether it receives notice of computed prompts."""
    reads_metrics: bool
    """Whether it receives metrics."""
    reads_events: bool
    """Whether it reads the workers' events as they happen."""
    staleness_ns: int
    """The age at which metrics are read again; 0: they are read whenever a request arrives."""
    holds_requests: bool
    """Whether requests may wait in it."""

    def place(self, request: Request, session: str | None, now_ns: int) -> int | None:
        """Return the worker for `request`; None if it waits here until `take_placed` returns it."""

    def take_placed(self, now_ns: int) -> list[tuple[Request, int]]:
        """Return the requests that waited here and are now placed, each with its worker, in the order to send them."""

    @property
    def num_held(self) -> int:
        """The number of requests that wait here."""

    def withdraw(self, request: Request) -> None:
        """Remove `request`, which waits here: its client gave it up."""

    def placed(self, request: Request, session: str | None, worker: int, now_ns: int) -> None:
        """Record that another component sent `request` to `worker`."""

    def prefilled(self, request: int) -> None:
        """Record that the prompt of the request with this index is computed."""

    def ended(self, request: int) -> None:
        """Record that a request finished, or was refused by its worker."""

    def report(
        self, worker: int, running: int, waiting: int, used_pages: int, waiting_pages: int, usage: float
    ) -> None:
        """Record metrics: requests that run and wait, pages in use, pages of waiting tokens, share of memory in use.

        All pages are those of a request, with their parts in every KV group, as are the pages of hits: blocks in use
        count as the pages that their memory would hold, rounded up.
        """

    def reader_of(self, worker: int) -> EventReader | None:
        """Return the reader of a worker's events; None if the router reads none."""

    def follow(self, worker: int, log: EventLog) -> None:
        """Record that the reader of `worker` reads `log`, and may look at events that wait in it."""

    def note_time(self, worker: int, now_ns: int) -> None:
        """Record that events of `worker` from now on that are in none of its steps happen at `now_ns` or later.

        Only where others share its device: they may evict its pages.
        """

    def join(self) -> int:
        """Add a worker; return its number."""

    def enter(self, worker: int) -> None:
        """Send requests to `worker` again, which has left."""

    def leave(self, worker: int) -> None:
        """Send no more requests to `worker`. Requests in flight there may still end."""

    def forget(self, worker: int) -> None:
        """Forget what is known of `worker`, which has left and has no requests in flight, and stop reading its log."""

    def catch_up(self, now_ns: int, workers: Iterable[int]) -> None:
        """Apply the events of `workers` since the last call, as far as they reach the router by `now_ns`."""


@mypyc_attr(allow_interpreted_subclasses=True)
class RoundRobin:
    """Sends requests to the workers in turn. It needs no reports.

    `workers`: those that take requests, ascending; `next_turn`: the place of the next one among them.
    """

    is_told = False
    reads_prefills = False
    reads_metrics = False
    reads_events = False
    staleness_ns = 0
    holds_requests = False

    def __init__(self, num_workers: int) -> None:
        self.workers = list(range(num_workers))
        self.next_turn = 0
        self._num_joined = num_workers

    def place(self, request: Request, session: str | None, now_ns: int) -> int | None:
        """Return the worker after the one chosen last."""
        place = self.next_turn % len(self.workers)
        self.next_turn = place + 1
        return self.workers[place]

    def take_placed(self, now_ns: int) -> list[tuple[Request, int]]:
        """Return no requests: none wait here."""
        return []

    @property
    def num_held(self) -> int:
        """Zero: no request waits here."""
        return 0

    def withdraw(self, request: Request) -> None:
        """Do nothing: no request waits here."""

    def placed(self, request: Request, session: str | None, worker: int, now_ns: int) -> None:
        """Ignore the placement."""

    def prefilled(self, request: int) -> None:
        """Ignore the prefill."""

    def ended(self, request: int) -> None:
        """Ignore the end."""

    def report(
        self, worker: int, running: int, waiting: int, used_pages: int, waiting_pages: int, usage: float
    ) -> None:
        """Ignore the metrics."""

    def reader_of(self, worker: int) -> EventReader | None:
        """Return None: events are not read."""
        return None

    def follow(self, worker: int, log: EventLog) -> None:
        """Ignore the log."""

    def note_time(self, worker: int, now_ns: int) -> None:
        """Ignore the time."""

    def enter(self, worker: int) -> None:
        """Send requests to `worker` again."""
        insort(self.workers, worker)

    def catch_up(self, now_ns: int, workers: Iterable[int]) -> None:
        """Do nothing: nothing is buffered."""

    def join(self) -> int:
        """Add a worker; return its number."""
        self.workers.append(self._num_joined)
        self._num_joined += 1
        return self.workers[-1]

    def leave(self, worker: int) -> None:
        """Send no more requests to `worker`."""
        self.workers.remove(worker)

    def forget(self, worker: int) -> None:
        """Do nothing: nothing is known of a worker."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Informed:
    """Reports the state of `engines`, by their numbers, to `router`."""

    def __init__(self, router: Router, engines: Sequence[Routed]) -> None:
        self.router = router
        self.engines = engines
        self._polled_ns = -1
        for engine in engines:
            self.record(engine)

    def record(self, engine: Routed) -> None:
        """Let `engine`, new behind the router, record what is reported, from its first step on."""
        if self.router.reads_prefills:
            engine.scheduler.take_computed()

    def poll_ns(self, now_ns: int) -> int:
        """Return the time, at most `now_ns`, at which metrics must be read; NEVER_NS if the last ones are recent
        enough."""
        router = self.router
        if not router.reads_metrics:
            return NEVER_NS
        staleness_ns = router.staleness_ns
        if not staleness_ns:
            return now_ns
        tick_ns = now_ns - now_ns % staleness_ns
        return tick_ns if tick_ns > self._polled_ns else NEVER_NS

    def poll(self, now_ns: int, numbers: Iterable[int]) -> None:
        """Read the metrics of the engines with these numbers, which have reached `now_ns`.

        Memory in use is reported in pages of a request, not in blocks: policies add it to tokens that wait, and hits,
        which are counted in pages, and the layout of a model's KV in blocks has no effect on where its requests go.
        """
        self._polled_ns = now_ns
        report, pages_for = self.router.report, self.engines[0].config.pages_for
        for index in numbers:
            scheduler = self.engines[index].scheduler
            waiting, cache = scheduler.waiting, scheduler.cache
            num_used = cache.num_used
            report(
                index,
                scheduler.running.num_running,
                scheduler.num_waiting,
                -(-num_used // cache.mean_page_blocks),
                pages_for(waiting.num_waiting_tokens),
                num_used / cache.pool.total,
            )

    def emit(self, now_ns: int, runners: Iterable[int]) -> None:
        """Report to the router what happened by `now_ns` in the engines with the numbers `runners`."""
        router = self.router
        if router.reads_prefills:
            for index in sorted(set(runners)):
                for request in self.engines[index].scheduler.take_computed():
                    router.prefilled(request)
        router.catch_up(now_ns, runners)


class AskedCaches:
    """A router's index that reads the caches of its workers, where nothing reaches the router late.

    So it is with KV groups, if pages count once a step is planned, and with several models on a device: their events
    need not be made then. `tiers`: the names of the tiers below any of the workers, in the order in which the router
    knows them.
    """

    def __init__(self, engines: Sequence[Routed], tiers: Sequence[str]) -> None:
        self._engines = engines
        self._tiers = tuple(tiers)

    def matches(self, content: Content, limit: int) -> dict[int, tuple[int, ...]]:
        """Return the pages of the longest prefix that each engine could resume from, by tier."""
        matches: dict[int, tuple[int, ...]] = {}
        for index, engine in enumerate(self._engines):
            scheduler = engine.scheduler
            num_pages = scheduler.cache.match(content, limit).num_pages
            below = () if scheduler.tiers is None else scheduler.tiers.found(content, num_pages, limit)
            if num_pages or any(below):
                matches[index] = (num_pages, *below)
                if scheduler.tiers is not None and scheduler.tiers.tier_names[: len(below)] != self._tiers:
                    matches[index] = (num_pages, *self._in_order(scheduler.tiers.tier_names, below))
        return matches

    def _in_order(self, names: Sequence[str], below: Sequence[int]) -> list[int]:
        """Return the pages found in the tiers of a worker, which have these names, by all tiers: others have other
        lists of tiers."""
        found = dict(zip(names, below, strict=False))  # a store of all workers is no tier of one
        return [found.get(name, 0) for name in self._tiers]

    def saved_elsewhere(
        self, content: Content, starts: Sequence[int], limit: int, num_tokens: int, gain: PeersGain
    ) -> list[float]:
        """Return, per engine, how many pages it saves by reading missing ones of `limit` pages from another one.

        `starts`: the pages that each can resume from already. `num_tokens`: those of the prompt.
        """
        saved = []
        for engine, start in zip(self._engines, starts, strict=True):
            tiers = engine.scheduler.tiers
            offer = None if tiers is None else tiers.elsewhere(content, start, limit)
            saved.append(0.0 if offer is None else gain.saved_by(offer, start, num_tokens))
        return saved

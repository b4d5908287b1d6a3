"""The seam of routers: a router places requests on workers; it is told of them, and never looks at them.

The room `routers` answers it with policies by name. What needs no room is here: turns, and turns of groups in lock
step.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from mypy_extensions import mypyc_attr

from kvarts.config import EngineConfig
from kvarts.event_log import EventLog, EventReader
from kvarts.request import Request
from kvarts.sched.policy import NEVER_NS
from kvarts.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from kvarts.sim.asked import AskedCaches
    from kvarts.sim.config import ReplayConfig

__all__ = [
    "Informed",
    "RoundRobin",
    "Routed",
    "Router",
    "RouterMaker",
    "RoutingSettings",
    "WithinGroups",
    "make_router",
]

RouterMaker = Callable[[], Any]
"""Makes the policy of a router: a class, or a function without arguments."""


class Routed(Protocol):
    """An engine behind a router: a replica, or one model on one of several devices."""

    @property
    def config(self) -> EngineConfig:
        """What it is built from."""

    @property
    def scheduler(self) -> Scheduler:
        """Where its metrics come from."""

    def submit(self, request: Request, now_ns: int) -> str | None:
        """Queue `request` at `now_ns`; or return the reason why it can never run."""

    def cancel(self, request: Request, now_ns: int) -> None:
        """Drop `request` at `now_ns`, between steps."""


class Router(Protocol):
    """Places requests on workers. Promises: it knows of them what it is told, and what it did itself.

    Workers are numbered in the order in which they joined. The driver tells everything up to the time of a
    request before it asks for a place.
    """

    is_told: bool
    """Whether it wants to be told of placements that it did not make, and of ends."""
    reads_prefills: bool
    """Whether it wants to be told when prompts are computed."""
    reads_metrics: bool
    """Whether it wants metrics."""
    reads_events: bool
    """Whether it reads what the workers do, as it happens."""
    staleness_ns: int
    """How old metrics get before they are read again; 0: they are read whenever a request arrives."""
    holds_requests: bool
    """Whether requests may wait in it."""

    def place(self, request: Request, session: str | None, now_ns: int) -> int | None:
        """Return the worker that `request` goes to; None if it waits here until `take_placed` returns it."""

    def take_placed(self, now_ns: int) -> list[tuple[Request, int]]:
        """Return the requests that waited here and go to a worker now, in that order."""

    @property
    def num_held(self) -> int:
        """Requests that wait here."""

    def withdraw(self, request: Request) -> None:
        """Forget `request`, which waits here: its client gave it up."""

    def placed(self, request: Request, session: str | None, worker: int, now_ns: int) -> None:
        """Note that something else sent `request` to `worker`."""

    def prefilled(self, request: int) -> None:
        """Note that the prompt of the request with this index is computed."""

    def ended(self, request: int) -> None:
        """Note that a request finished, or was refused by its worker."""

    def report(
        self, worker: int, running: int, waiting: int, used_pages: int, waiting_pages: int, usage: float
    ) -> None:
        """Take in metrics: requests that run and wait, pages in use, pages of waiting tokens, share of pages in use."""

    def reader_of(self, worker: int) -> EventReader | None:
        """Return what reads the events of a worker; None if the router wants none."""

    def follow(self, worker: int, log: EventLog) -> None:
        """Take note that the reader of `worker` reads `log`, and may look at events that wait in it."""

    def join(self) -> int:
        """Add a worker; return its number."""

    def enter(self, worker: int) -> None:
        """Send requests to `worker` again, which has left."""

    def leave(self, worker: int) -> None:
        """Send nothing to `worker` any more. What is in flight there may still end."""

    def catch_up(self, now_ns: int, workers: Iterable[int]) -> None:
        """Let take effect what happened in `workers` since, as far as it reaches the router by `now_ns`."""


class RoutingSettings(Protocol):
    """Settings of how a router knows its workers."""

    def check(self, router: str | RouterMaker) -> None:
        """Raise ConfigError for a `router` that is no policy, and for settings that have no effect on it."""

    def open(
        self,
        router: str | RouterMaker,
        *,
        num_workers: int,
        page_size: int,
        max_num_batched_tokens: int,
        tiers: Sequence[str],
        directory: AskedCaches | None,
    ) -> Router:
        """Return a new router. `directory`: answers for the pages of workers, in `tiers`, instead of their events."""


@mypyc_attr(allow_interpreted_subclasses=True)
class RoundRobin:
    """Sends requests to the workers in turn. It wants to know nothing.

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
        """Return nothing."""
        return []

    @property
    def num_held(self) -> int:
        """No request."""
        return 0

    def withdraw(self, request: Request) -> None:
        """Do nothing: no request waits here."""

    def placed(self, request: Request, session: str | None, worker: int, now_ns: int) -> None:
        """Note nothing."""

    def prefilled(self, request: int) -> None:
        """Note nothing."""

    def ended(self, request: int) -> None:
        """Note nothing."""

    def report(
        self, worker: int, running: int, waiting: int, used_pages: int, waiting_pages: int, usage: float
    ) -> None:
        """Note nothing."""

    def reader_of(self, worker: int) -> EventReader | None:
        """Return nothing."""
        return None

    def follow(self, worker: int, log: EventLog) -> None:
        """Note nothing."""

    def enter(self, worker: int) -> None:
        """Send requests to `worker` again."""
        insort(self.workers, worker)

    def catch_up(self, now_ns: int, workers: Iterable[int]) -> None:
        """Do nothing."""

    def join(self) -> int:
        """Add a worker; return its number."""
        self.workers.append(self._num_joined)
        self._num_joined += 1
        return self.workers[-1]

    def leave(self, worker: int) -> None:
        """Send nothing to `worker` any more."""
        self.workers.remove(worker)


@mypyc_attr(allow_interpreted_subclasses=True)
class Informed:
    """Tells `router` of its workers: `engines`, by their numbers."""

    def __init__(self, router: Router, engines: Sequence[Routed]) -> None:
        self.router = router
        self.engines = engines
        self._polled_ns = -1

    def poll_ns(self, now_ns: int) -> int:
        """Return the time by `now_ns` as of which metrics are to be read; NEVER_NS if those that were read will do."""
        router = self.router
        if not router.reads_metrics:
            return NEVER_NS
        staleness_ns = router.staleness_ns
        if not staleness_ns:
            return now_ns
        tick_ns = now_ns - now_ns % staleness_ns
        return tick_ns if tick_ns > self._polled_ns else NEVER_NS

    def poll(self, now_ns: int) -> None:
        """Read the metrics of all engines, which have reached `now_ns`."""
        self._polled_ns = now_ns
        report, pages_for = self.router.report, self.engines[0].config.pages_for
        for index, engine in enumerate(self.engines):
            scheduler = engine.scheduler
            waiting, cache = scheduler.waiting, scheduler.cache
            num_used = cache.num_used
            report(
                index,
                scheduler.running.num_running,
                scheduler.num_waiting,
                num_used,
                pages_for(waiting.num_waiting_tokens),
                num_used / cache.pool.total,
            )

    def tell(self, now_ns: int, runners: Iterable[int]) -> None:
        """Tell the router what happened by `now_ns` in engines, those of `runners`, by their numbers."""
        router = self.router
        if router.reads_prefills:
            for index in sorted(set(runners)):
                for request in self.engines[index].scheduler.take_computed():
                    router.prefilled(request)
        router.catch_up(now_ns, runners)


class WithinGroups(RoundRobin):
    """Sends requests to groups of `ranks` engines in turn, and in a group to the rank that vLLM chooses.

    That is the one with the fewest requests, where one that waits counts as four that run.
    """

    reads_metrics = True

    def __init__(self, num_workers: int, ranks: int) -> None:
        super().__init__(num_workers)
        self._num_ranks = ranks
        self._loads = [0] * num_workers

    def place(self, request: Request, session: str | None, now_ns: int) -> int | None:
        """Return the rank of the next group that has the least to do."""
        first = self.next_turn * self._num_ranks % len(self.workers)
        self.next_turn += 1
        return min(range(first, first + self._num_ranks), key=self._loads.__getitem__)

    def report(
        self, worker: int, running: int, waiting: int, used_pages: int, waiting_pages: int, usage: float
    ) -> None:
        """Take note of what a rank has to do."""
        self._loads[worker] = 4 * waiting + running


def make_router(config: ReplayConfig, engines: Sequence[Routed], *, ranks: int = 1, tells_pages: bool = True) -> Router:
    """Return a new router of a replay of `config`, in which `engines` will be its workers.

    `ranks`: how many engines, one after the other, are in lock step. `tells_pages`: whether events tell of pages.
    """
    if config.router == "round-robin" and config.routing is None:
        return RoundRobin(config.replicas) if ranks == 1 else WithinGroups(config.replicas, ranks)
    directory = None
    if not tells_pages:
        from kvarts.sim.asked import AskedCaches  # few replays need it

        directory = AskedCaches(engines)
    below = () if config.offload is None or not tells_pages else config.offload.tiers(config.page_size)
    return config.routing_settings.open(
        config.router,
        num_workers=config.replicas,
        page_size=config.page_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        tiers=("device", *below),
        directory=directory,
    )

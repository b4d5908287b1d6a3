"""Which replica a request goes to. Ties go to the replica that comes first, never to chance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, get_args

from kvarts.config import EngineConfig
from kvarts.errors import ConfigError, did_you_mean
from kvarts.request import Request
from kvarts.rooms import code_named
from kvarts.sched.scheduler import Scheduler
from kvarts.settings import SettingError
from kvarts.sim.config import RouterName

if TYPE_CHECKING:
    from kvarts.sim.config import RouterMaker

__all__ = ["Checked", "LeastLoaded", "PrefixAware", "RoundRobin", "Routed", "Router", "RouterName", "WithinGroups"]
__all__ += ["find_router", "make_router"]


class Routed(Protocol):
    """An engine behind a router: a replica, or one model on one of several devices."""

    @property
    def config(self) -> EngineConfig:
        """What it is built from."""

    @property
    def scheduler(self) -> Scheduler:
        """What a router looks at."""

    def submit(self, request: Request, now_ns: int) -> str | None:
        """Queue `request` at `now_ns`; or return the reason why it can never run."""

    def cancel(self, request: Request, now_ns: int) -> None:
        """Drop `request` at `now_ns`, between steps."""


class Router(Protocol):
    """Chooses replicas. Promises: looks at the replicas and changes nothing in them."""

    looks_at_engines: bool
    """Whether the choice depends on what the replicas are doing."""

    def choose(self, request: Request, replicas: Sequence[Routed]) -> int:
        """Return the index of the replica that `request` goes to."""


class RoundRobin:
    """Sends the i-th arrival to replica i modulo their number."""

    looks_at_engines = False

    def __init__(self) -> None:
        self._num_routed = 0

    def choose(self, request: Request, replicas: Sequence[Routed]) -> int:
        """Return the replica after the one chosen last."""
        index = self._num_routed % len(replicas)
        self._num_routed += 1
        return index


class LeastLoaded:
    """Chooses the replica with the fewest requests running or waiting."""

    looks_at_engines = True

    def choose(self, request: Request, replicas: Sequence[Routed]) -> int:
        """Return the replica with the fewest requests."""
        return min(range(len(replicas)), key=lambda index: num_requests(replicas[index]))


class PrefixAware:
    """Chooses the replica where the request costs least: the prompt pages it would have to compute, plus the load.

    Load is the pages in use and the pages that all tokens of waiting requests would fill, in the same unit. So an idle
    replica without the prefix wins over a loaded one with it as soon as the load exceeds the pages that the hit saves.
    """

    looks_at_engines = True

    def choose(self, request: Request, replicas: Sequence[Routed]) -> int:
        """Return the replica with the lowest cost."""

        def cost(index: int) -> int:
            replica = replicas[index]
            config, scheduler = replica.config, replica.scheduler
            limit = (request.num_known - 1) // config.page_size
            hit_pages = scheduler.cache.match(request.content, limit).num_pages
            num_waiting_pages = config.pages_for(scheduler.waiting.num_waiting_tokens)
            to_compute = config.pages_for(request.num_prompt_tokens) - hit_pages
            return to_compute + scheduler.cache.num_used + num_waiting_pages

        return min(range(len(replicas)), key=cost)


class WithinGroups:
    """Sends requests to groups of `ranks` engines in turn, and in a group to the rank that vLLM chooses.

    That is the one with the fewest requests, where one that waits counts as four that run.
    """

    looks_at_engines = True

    def __init__(self, ranks: int) -> None:
        self._num_ranks = ranks
        self._num_routed = 0

    def choose(self, request: Request, replicas: Sequence[Routed]) -> int:
        """Return the rank of the next group that has the least to do."""
        first = self._num_routed * self._num_ranks % len(replicas)
        self._num_routed += 1

        def load(index: int) -> int:
            scheduler = replicas[index].scheduler
            return 4 * scheduler.waiting.num_waiting + scheduler.running.num_running

        return min(range(first, first + self._num_ranks), key=load)


def num_requests(replica: Routed) -> int:
    """Return how many requests run or wait."""
    return replica.scheduler.running.num_running + replica.scheduler.waiting.num_waiting


class Checked:
    """A router of a user's own: what it chooses is a replica."""

    def __init__(self, router: Router) -> None:
        for name in ("choose", "looks_at_engines"):
            if not hasattr(router, name):
                hint = "See kvarts.sim.router.Router for what a router has."
                raise SettingError(f"{type(router).__name__} has no {name}", "router", hint=hint)
        self._router = router
        self.looks_at_engines = router.looks_at_engines

    def choose(self, request: Request, replicas: Sequence[Routed]) -> int:
        """Return the index that the router chooses. Raise SettingError for what is none."""
        index = self._router.choose(request, replicas)
        if not (isinstance(index, int) and 0 <= index < len(replicas)):
            what = f"{type(self._router).__name__} chose {index!r}, and there are {len(replicas)} replicas"
            raise SettingError(what, "router", hint="Return an index from 0.")
        return index


def find_router(router: str | RouterMaker) -> RouterName | RouterMaker:
    """Return what `make_router` takes for a name, or for `module:Class`. Raise SettingError for anything else."""
    if callable(router):
        return router
    known: dict[str, RouterName] = {name: name for name in get_args(RouterName)}
    if router in known:
        return known[router]
    try:
        return code_named(router)
    except ConfigError as error:
        hint = did_you_mean(router, list(known)) or f"Known: {', '.join(known)}, or module:Class."
        raise SettingError(error.what, "router", hint=hint) from error


def make_router(router: RouterName | RouterMaker, ranks: int = 1) -> Router:
    """Return a new router: one by its name, or what a user's own makes.

    `ranks`: how many engines, one after the other, are in lock step.
    """
    if callable(router):
        try:
            made = router()
        except TypeError as error:
            hint = "Give a class, or a function without arguments that makes one."
            raise SettingError(f"{router!r} makes no router: {error}", "router", hint=hint) from error
        return Checked(made)
    if ranks > 1 and router == "round-robin":
        return WithinGroups(ranks)
    routers: dict[str, type[RoundRobin | LeastLoaded | PrefixAware]] = {
        "round-robin": RoundRobin,
        "least-loaded": LeastLoaded,
        "prefix": PrefixAware,
    }
    return routers[router]()

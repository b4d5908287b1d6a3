"""Replays of one trace with varying memory, replicas, rate, router and cost. Each is run once and cached."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from kvarts.base.processes import Inquiry, Processes
from kvarts.base.units import as_memory
from kvarts.plan.cache import HitPlan, least_pages_of
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replay import replay_one
from kvarts.sim.replaying import replay
from kvarts.sim.report.advice import advice
from kvarts.sim.traffic.trace import Trace
from kvarts.sim.trials import ReplayTrials

if TYPE_CHECKING:
    from kvarts.sim.router import RouterMaker

__all__ = ["Replays", "SizeOption", "guesses", "share_kept", "summary_of"]

Found = TypeVar("Found")

ROUTERS = ("round-robin", "least-loaded", "prefix")
"""Routers that are compared by default."""


def share_kept(summary: dict[str, Any]) -> float | None:
    """Return the share of all requests that kept the SLO; None without an SLO. A refused request does not keep it.

    `goodput.ratio` in the report counts completed requests only.
    """
    goodput = summary["goodput"]
    if goodput is None:
        return None
    share: float = (goodput["ratio"] or 0.0) * summary["num_completed"] / summary["num_requests"]
    return share


def summary_of(trace: Trace, config: ReplayConfig) -> dict[str, Any]:
    """Replay a trace and return the summary. Runs in other processes, too."""
    return replay(trace, config).summary


def guesses(chance: float, num_known: int) -> list[tuple[float, dict[str, Any]]]:
    """Return what a search sees of replays that keep an SLO, with a chance, and that do not.

    Of those that do not, a later one keeps it for more requests.
    """
    shares = (chance, 1.0), (1.0 - chance, LITTLE * num_known)
    return [(each, {"goodput": {"ratio": share}, "num_completed": 1, "num_requests": 1}) for each, share in shares]


LITTLE = 1e-6
SURE = 0.95
"""The chance that a replay keeps an SLO if one with no more memory, or shorter times, does."""


class SizeOption(msgspec.Struct, frozen=True, order=True):
    """One option: a number of replicas, and the pages of each."""

    replicas: int
    pages: int


class _Case(msgspec.Struct, frozen=True, order=True):
    step: SizeOption
    rate: float
    router: str
    cost_factor: float

    def is_easier_than(self, other: _Case) -> bool:
        """Return whether an SLO that the other case keeps should be kept here, whatever the routers."""
        return (
            self.step.replicas >= other.step.replicas
            and self.step.pages >= other.step.pages
            and self.rate <= other.rate
            and self.cost_factor <= other.cost_factor
        )


class Replays:
    """Replays of the trace of `plan` under `config`, with changes.

    `command` returns the command line of a replay, given its changes by setting key. `router`: the default with more
    than one replica. `processes`: those that replay, which share the trace; default: this one.
    """

    def __init__(
        self,
        plan: HitPlan,
        config: ReplayConfig,
        *,
        command: Callable[[dict[str, Any]], str],
        router: str | RouterMaker,
        on_replay: Callable[[], object] | None = None,
        processes: Processes | None = None,
    ) -> None:
        self.routers: dict[str, str | RouterMaker] = {name: name for name in ROUTERS}
        """Routers compared for several replicas, by name, including the given one."""
        self._given_router: str = "round-robin" if callable(config.router) else config.router
        self.least_pages = least_pages_of(plan, config)
        """The smallest memory of a replica that can hold each request alone."""
        self._plan = plan
        self._config = config.certain
        self.router = self._named_router(router)
        self._uncertain = config
        self._command = command
        self._on_replay = on_replay
        self._processes = Processes(shared=plan.trace) if processes is None else processes
        self._asked: Inquiry[_Case] = Inquiry(self._summaries)
        self._points: dict[_Case, dict[str, Any]] = {}

    def _named_router(self, router: str | RouterMaker) -> str:
        """Return the name of a router; add it to `routers` if it is the user's own."""
        name = router if isinstance(router, str) else getattr(router, "__name__", type(router).__name__)
        if name not in self.routers:
            self._config.routing_settings.check(router)
            self.routers[name] = router
        return name

    def points(self) -> list[dict[str, Any]]:
        """Return all replays run so far, ordered by memory, then by rate."""
        return [self._point(case) for case in sorted(self._asked.found)]

    def at(
        self,
        step: SizeOption,
        *,
        rate: float | None = None,
        router: str | None = None,
        cost_factor: float | None = None,
    ) -> dict[str, Any]:
        """Return the result of replaying a step. `cost_factor`: relative to that of the configuration."""
        return self._point(self._case(step, rate, router, cost_factor))

    def share(
        self,
        step: SizeOption,
        *,
        rate: float | None = None,
        router: str | None = None,
        cost_factor: float | None = None,
    ) -> float:
        """Return the share of requests that kept the SLO in the same replay."""
        share = share_kept(self._asked(self._case(step, rate, router, cost_factor)))
        assert share is not None
        return share

    def look(self, steps: Sequence[SizeOption]) -> None:
        """Replay several steps."""
        self._asked.all([self._case(step, None, None, None) for step in steps])

    def searched(self, search: Callable[[Replays], Found], slo_share: float) -> Found:
        """Return the result of `search`, which depends on nothing but shares of replays, and is for that share.

        Meanwhile, other processes replay what it may ask for next.
        """

        def guess(case: _Case, known: Mapping[_Case, dict[str, Any]]) -> list[tuple[float, dict[str, Any]]]:
            chances = set()
            for other, summary in known.items():
                is_kept = (share_kept(summary) or 0.0) >= slo_share
                if is_kept and case.is_easier_than(other):
                    chances.add(SURE)
                elif not is_kept and other.is_easier_than(case):
                    chances.add(1.0 - SURE)
            return guesses(chances.pop() if len(chances) == 1 else 0.5, len(known))

        def with_replays(asked: Inquiry[_Case]) -> Found:
            seen = copy(self)
            seen._asked = asked
            return search(seen)

        return self._processes.searched(
            with_replays, summary_of, self._config_for, guess, found=self._asked.found, on_ask=self._on_replay
        )

    def advice(self, step: SizeOption) -> str | None:
        """Return advice on the next thing to try, given the replay of a step. Further replays find the sizes in it."""
        self.at(step)
        case = self._case(step, None, None, None)
        trials = ReplayTrials(
            replay_one,
            self._plan.trace,
            self._config_for(case),
            on_replay=self._on_replay,
            is_asked=True,
            processes=self._processes,
        )
        return advice(self._asked(case), trials=lambda: trials)

    def named(self, step: SizeOption) -> str:
        """Return a step in words: `2 x 28,392 pages (55.5 GiB)`."""
        size = "" if self._config.placement is None else f" ({as_memory(step.pages * self._config.page_bytes)})"
        each = self.devices_per_replica
        devices = f", {step.replicas * each:,} devices" if each > 1 else ""
        return f"{step.replicas} x {step.pages:,} pages{size}{devices}"

    @property
    def devices_per_replica(self) -> int:
        """Number of devices over which one replica is divided. Pages and memory are per device."""
        cost = self._config.cost
        return int(getattr(cost, "tensor_parallel", 1)) * int(getattr(cost, "pipeline_parallel", 1))

    def has(self, step: SizeOption, *, router: str | None = None) -> bool:
        """Return whether the step was replayed with no other change."""
        return self._case(step, None, router, None) in self._asked

    def spread(self, step: SizeOption) -> dict[str, Any] | None:
        """Return one standard deviation of each latency statistic; None if the cost model does not give errors."""
        if self._uncertain is self._config:
            errors = getattr(self._config.cost, "held_out", {})
            point = self.at(step)
            found = {
                f"{metric}_ms": {
                    name: None if value is None else value * error.one_sigma
                    for name, value in point[f"{metric}_ms"].items()
                }
                for metric, error in errors.items()
                if f"{metric}_ms" in point
            }
            return found or None
        case = self._case(step, None, None, None)
        config = msgspec.structs.replace(self._config_for(case), cost=self._uncertain.cost)
        spread: dict[str, Any] = replay(self._plan.trace, config).summary["uncertainty"]
        return spread

    def _case(self, step: SizeOption, rate: float | None, router: str | None, cost_factor: float | None) -> _Case:
        config = self._config
        return _Case(
            step,
            config.speedup if rate is None else rate,
            self._given_router if step.replicas == 1 else router or self.router,
            config.cost_factor * (1.0 if cost_factor is None else cost_factor),
        )

    def _summaries(self, cases: Sequence[_Case]) -> list[dict[str, Any]]:
        for _ in cases:
            if self._on_replay is not None:
                self._on_replay()
        return self._processes.all(summary_of, [self._config_for(case) for case in cases])

    def _point(self, case: _Case) -> dict[str, Any]:
        if case not in self._points:
            self._points[case] = self._described(case, self._asked(case))
        return self._points[case]

    def _described(self, case: _Case, summary: dict[str, Any]) -> dict[str, Any]:
        step = case.step
        goodput = summary["goodput"]
        return {
            "replicas": step.replicas,
            "devices": step.replicas * self.devices_per_replica,
            "pages": step.pages,
            "router": case.router,
            "rate": case.rate,
            "cost_factor": case.cost_factor,
            "hit_ratio": summary["prefix_hit_ratio"],
            "predicted_hit_ratio": self._predicted(step),
            **{name: summary[name] for name in ("ttft_ms", "tpot_ms", "e2e_ms", "queue_ms")},
            "request_throughput_per_s": summary["request_throughput_per_s"],
            "goodput_per_s": None if goodput is None else goodput["requests_per_s"],
            "slo_ratio": share_kept(summary),
            "num_rejected": summary["num_rejected"],
            "num_preemptions": summary["num_preemptions"],
            "limited_by": summary["limited_by"]["cause"],
            "command": self._command(self._changes(case)),
        }

    def _predicted(self, step: SizeOption) -> float | None:
        """Return the hit ratio one request at a time; None where it does not apply: with several replicas."""
        return self._plan.hit_ratio(step.pages) if step.replicas == 1 else None

    def _config_for(self, case: _Case) -> ReplayConfig:
        return msgspec.structs.replace(
            self._config,
            num_pages=case.step.pages,
            replicas=case.step.replicas,
            router=self.routers[case.router],
            speedup=case.rate,
            cost_factor=case.cost_factor,
        )

    def _changes(self, case: _Case) -> dict[str, Any]:
        """Return the options that differ from those given, for the command line of a case."""
        config, step = self._config, case.step
        changes: dict[str, Any] = {"pages": step.pages}
        if step.replicas == 1:
            changes["router"] = None  # no effect with one replica
        if step.replicas != 1 or config.replicas != 1:
            changes["replicas"] = step.replicas
        if step.replicas != 1:
            changes["router"] = case.router
        if case.rate != config.speedup:
            changes["speedup"] = case.rate
        if case.cost_factor != config.cost_factor:
            changes["cost_factor"] = case.cost_factor
        return changes

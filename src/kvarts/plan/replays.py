"""Replays of one trace with varying memory, replicas, rate, router and cost. Each is run once and cached."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from kvarts.base.processes import Inquiry, Processes
from kvarts.base.units import as_memory
from kvarts.plan.cache import HitPlan, least_pages_of
from kvarts.plan.commands import of_host_memory
from kvarts.plan.purchases import devices_of, given_host_bytes, given_policy, host_memory_of, with_memory
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.traffic.editing import lengthened, with_share_of_agents
from kvarts.sim.traffic.trace import Trace

if TYPE_CHECKING:
    from kvarts.sim.router import RouterMaker

__all__ = ["NO_CHANGE", "PlanProgress", "Replays", "SizeOption", "changed_summary", "changed_trace", "guesses"]
__all__ += ["share_kept", "summary_of", "worth", "worth_of"]

Found = TypeVar("Found")
NO_CHANGE = -1.0
"""In place of a share of agents: that of the trace."""


def share_kept(summary: dict[str, Any]) -> float | None:
    """Return the share of all requests that kept the SLO; None without an SLO. A refused request does not keep it.

    `goodput.ratio` in the report counts completed requests only.
    """
    goodput = summary["goodput"]
    if goodput is None:
        return None
    share: float = (goodput["ratio"] or 0.0) * summary["num_completed"] / summary["num_requests"]
    return share


def worth(row: Mapping[str, Any]) -> tuple[float, float]:
    """Return what the best of several choices has most of: requests that keep the SLO, then time before a mean TTFT."""
    mean = row["ttft_ms"]["mean"]
    return row["slo_ratio"] or 0.0, -(float("inf") if mean is None else mean)


def worth_of(summary: dict[str, Any]) -> tuple[float, float]:
    """Return `worth` of a replay."""
    return worth({"slo_ratio": share_kept(summary), "ttft_ms": summary["ttft_ms"]})


def summary_of(trace: Trace, config: ReplayConfig) -> dict[str, Any]:
    """Replay a trace and return the summary. Runs in other processes, too."""
    return replay(trace, config).summary


def changed_summary(trace: Trace, task: tuple[Any, float, float]) -> dict[str, Any]:
    """Replay a trace with longer prompts, or another share of agents, and return the summary.

    `task`: the configuration, the factor on the lengths of prompts, and the share or NO_CHANGE.
    """
    config, length, agents = task
    return summary_of(changed_trace(trace, length, agents), config)


def changed_trace(trace: Trace, length: float = 1.0, agents: float = NO_CHANGE) -> Trace:
    """Return the trace with prompts `length` times as long, and with another share of agents."""
    trace = trace if agents == NO_CHANGE else with_share_of_agents(trace, agents)
    return trace if length == 1.0 else lengthened(trace, length)


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
    """One option: a number of replicas, the pages of each, and host memory per device, stored to under `policy`."""

    replicas: int
    pages: int
    host_bytes: int = 0
    policy: str = ""


class _Case(msgspec.Struct, frozen=True, order=True):
    step: SizeOption
    rate: float
    router: str
    cost_factor: float
    length: float = 1.0
    """Factor on the lengths of prompts."""
    agents: float = NO_CHANGE
    """Share of the requests that are of agents."""

    def is_easier_than(self, other: _Case) -> bool:
        """Return whether an SLO that the other case keeps should be kept here, whatever the routers."""
        return (
            self.step.replicas >= other.step.replicas
            and self.step.pages >= other.step.pages
            and self.step.host_bytes >= other.step.host_bytes
            and self.length <= other.length
            and self.agents == other.agents
            and self.rate <= other.rate
            and self.cost_factor <= other.cost_factor
        )


class PlanProgress(NamedTuple):
    """Receives how far a plan is.

    `on_replay` is called before each replay, and `on_answer` as the answer firms up, with its words and the number of
    replays still to come, at most or about.
    """

    on_replay: Callable[[], object] = lambda: None
    on_answer: Callable[[str, int], object] = lambda *_: None


UNSEEN = PlanProgress()


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
        on_replay: Callable[[], object] = lambda: None,
        processes: Processes | None = None,
    ) -> None:
        self._routers: dict[str, str | RouterMaker] = {}
        self._given_router: str = "round-robin" if callable(config.router) else config.router
        self.least_pages = least_pages_of(plan, config)
        """The smallest memory of a replica that can hold each request alone."""
        self._plan = plan
        self._config = config.certain
        self.router = self._named_router(router)
        self._uncertain = config
        self.given_host_bytes = given_host_bytes(config)
        """Host memory per device that every step has, because it was given."""
        self._command = command
        self._on_replay = on_replay
        self._processes = Processes(shared=plan.trace) if processes is None else processes
        self._asked: Inquiry[_Case] = Inquiry(self._summaries)
        self._points: dict[_Case, dict[str, Any]] = {}

    def _named_router(self, router: str | RouterMaker) -> str:
        """Return the name of a router, which may be the user's own."""
        name = router if isinstance(router, str) else getattr(router, "__name__", type(router).__name__)
        self._config.routing_settings.check(router)
        self._routers[name] = router
        return name

    def points(self) -> list[dict[str, Any]]:
        """Return all replays run so far, ordered by memory, then by rate."""
        return [self._point(case) for case in sorted(self._asked.found)]

    def known(self) -> dict[SizeOption, float]:
        """Return the share of requests that kept the SLO, by step, of the replays with no other change."""
        shares = {case: share_kept(summary) for case, summary in self._asked.found.items()}
        return {
            case.step: share for case, share in shares.items() if share is not None and case == self._case(case.step)
        }

    def at(
        self,
        step: SizeOption,
        *,
        rate: float | None = None,
        cost_factor: float | None = None,
        length: float = 1.0,
    ) -> dict[str, Any]:
        """Return the result of replaying a step. `cost_factor`: relative to that of the configuration."""
        return self._point(self._case(step, rate, cost_factor, length))

    def share(
        self,
        step: SizeOption,
        *,
        rate: float | None = None,
        cost_factor: float | None = None,
        length: float = 1.0,
        agents: float = NO_CHANGE,
    ) -> float:
        """Return the share of requests that kept the SLO in the same replay. `agents`: another share of agents."""
        share = share_kept(self._asked(self._case(step, rate, cost_factor, length, agents)))
        assert share is not None
        return share

    def goodput(self, step: SizeOption, *, cost_factor: float) -> float:
        """Return the requests per second that kept the SLO, in a replay with other costs."""
        return float(self._asked(self._case(step, cost_factor=cost_factor))["goodput"].get("requests_per_s") or 0.0)

    def look(self, steps: Sequence[SizeOption]) -> None:
        """Replay several steps."""
        self._asked.all([self._case(step) for step in steps])

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
            with_replays, changed_summary, self._task_of, guess, found=self._asked.found, on_ask=self._on_replay
        )

    def named(self, step: SizeOption) -> str:
        """Return a step in words: `2 GPUs`, or `1 GPU and 86 GiB of host memory (lazy stores)`."""
        num_devices = step.replicas * self.devices_per_replica
        noun = "replica" if self._config.placement is None else "GPU"
        text = f"{num_devices:,} {noun}{'s' * (num_devices != 1)}"
        if step.pages != self._config.num_pages:
            pages = f"{step.pages:,} pages"
            size = pages if not self._config.page_bytes else as_memory(step.pages * self._config.page_bytes)
            text += f" with {size} of KV memory"
        if self.given_host_bytes:
            return text + host_memory_of(num_devices * self.given_host_bytes, given_policy(self._config))
        return text + host_memory_of(num_devices * step.host_bytes, step.policy)

    @property
    def devices_per_replica(self) -> int:
        """Number of devices over which one replica is divided. Pages and memory are per device."""
        return devices_of(self._config)

    def has(self, step: SizeOption) -> bool:
        """Return whether the step was replayed with no other change."""
        return self._case(step) in self._asked

    def spread(self, step: SizeOption) -> dict[str, Any] | None:
        """Return one standard deviation of each latency statistic; None if the cost model does not give errors."""
        if self._uncertain is self._config:
            errors = self._config.held_out(self._plan.trace) or {}
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
        case = self._case(step)
        config = msgspec.structs.replace(self._config_for(case), cost=self._uncertain.cost)
        spread: dict[str, Any] = replay(self._plan.trace, config).summary["uncertainty"]
        return spread

    def _case(
        self,
        step: SizeOption,
        rate: float | None = None,
        cost_factor: float | None = None,
        length: float = 1.0,
        agents: float = NO_CHANGE,
    ) -> _Case:
        config = self._config
        return _Case(
            step,
            config.speedup if rate is None else rate,
            self._given_router if step.replicas == 1 else self.router,
            config.cost_factor * (1.0 if cost_factor is None else cost_factor),
            length,
            agents,
        )

    def _summaries(self, cases: Sequence[_Case]) -> list[dict[str, Any]]:
        for _ in cases:
            self._on_replay()
        return self._processes.all(changed_summary, [self._task_of(case) for case in cases])

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
            "host_bytes": step.host_bytes,
            "policy": step.policy or None,
            "length": case.length,
            "share_of_agents": None if case.agents == NO_CHANGE else case.agents,
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
            "peak_used_pct": summary["peak_used_pct"],
            "limited_by": summary["limited_by"]["cause"],
            "command": self._command(self._changes(case)) if case.length == 1.0 and case.agents == NO_CHANGE else "",
        }

    def _predicted(self, step: SizeOption) -> float | None:
        """Return the hit ratio one request at a time; None where it does not apply: with several replicas."""
        return self._plan.hit_ratio(step.pages) if step.replicas == 1 else None

    def _task_of(self, case: _Case) -> tuple[ReplayConfig, float, float]:
        return self._config_for(case), case.length, case.agents

    def _config_for(self, case: _Case) -> ReplayConfig:
        step, config = case.step, self._config
        if step.host_bytes:
            config = with_memory(config, step.host_bytes, step.policy)
        return msgspec.structs.replace(
            config,
            num_pages=case.step.pages,
            replicas=case.step.replicas,
            router=self._routers.get(case.router, self._config.router),
            speedup=case.rate,
            cost_factor=case.cost_factor,
        )

    def _changes(self, case: _Case) -> dict[str, Any]:
        """Return the options that differ from those given, for the command line of a case."""
        config, step = self._config, case.step
        changes: dict[str, Any] = {} if step.pages == config.num_pages else {"pages": step.pages}
        if step.host_bytes:
            changes |= of_host_memory(config, step.host_bytes, step.policy)
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

"""Comparison of routers on one trace: hits, latencies and balance behind each, for several ages of their view."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from kvarts.base.processes import Processes
from kvarts.base.settings import SettingError
from kvarts.plan.commands import CommandLines
from kvarts.plan.confidence import (
    Goal,
    find_lead,
    how_long,
    largest_rate,
    lead_factors,
    shares_of_agents,
    would_change,
)
from kvarts.plan.planning import Plan, prices_of
from kvarts.plan.purchases import Prices, devices_of, given_host_bytes, per_million_tokens
from kvarts.plan.replays import NO_CHANGE, UNSEEN, PlanProgress, changed_summary, share_kept, worth, worth_of
from kvarts.plan.serve_lines import serve_lines
from kvarts.plan.tables import answer_of_routers
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replay import trace_of
from kvarts.sim.replaying import replay
from kvarts.sim.routers.config import Routing
from kvarts.sim.routers.policies import policy_of
from kvarts.sim.routers.view import Needs
from kvarts.sim.traffic.editing import can_lengthen, share_of_agents
from kvarts.sim.traffic.trace import Trace

if TYPE_CHECKING:
    from kvarts.sim.replay import Traffic

__all__ = ["RoutersPlan", "plan_routers"]

MOST_ROWS = 100
EITHER = 0.5
"""Between the share of a comparison that a router wins, 1, and that of one that it loses, 0."""
NUM_SENSITIVITY = 30
"""Replays with other traffic, about."""


class RoutersPlan:
    """Replays of `trace` under `config` behind each of `routers`.

    `ages`: ages of a router's view, such as 50ms, applied to its metrics and to the cache events it receives. A router
    that uses neither is replayed once. `commands`: builds the command lines of replays. `workers`: processes that
    replay. Raise ConfigError for an unknown router, and for more than MOST_ROWS replays.
    """

    def __init__(
        self,
        trace: Trace,
        config: ReplayConfig,
        routers: Sequence[str],
        ages: Sequence[str] = (),
        goal: Goal = Goal(),  # noqa: B008  (frozen)
        *,
        commands: CommandLines | None = None,
        workers: int | None = 1,
        progress: PlanProgress = UNSEEN,
    ) -> None:
        if config.replicas < 2:
            raise SettingError("needs replicas to choose from", "routers", hint="Give {replicas} 2 or more.")
        if len(routers) * max(1, len(ages)) > MOST_ROWS:
            raise SettingError(f"are more than {MOST_ROWS} replays", "routers", hint="Compare fewer at a time.")
        self._trace = trace
        self._config = config.certain
        self._commands = commands or CommandLines()
        self._first_age = next(iter(ages), None)
        self._goal = goal
        self._cost_error = goal.error(config, trace)
        self._num_workers = workers
        self._progress = progress
        routing = Routing() if config.routing is None else config.routing
        assert isinstance(routing, Routing)
        self._cases: list[tuple[str, str | None, Routing, dict[str, Any]]] = []
        for router in routers:
            needs = getattr(policy_of(router), "needs", Needs())
            fields = ["staleness"] * needs.metrics + ["event_lag"] * (needs.pages != "no")
            for age in ages or (None,) if fields else (None,):
                changes = {} if age is None else dict.fromkeys(fields, age)
                keys: dict[str, Any] = {f"routing.{field}": age for field in changes}
                seen = msgspec.structs.replace(routing, **changes)
                seen.check(router)
                self._cases.append((router, age, seen, {"router": router, **keys}))

    def to_builtins(self) -> dict[str, Any]:
        """Return a row per router and age, and the best of them with the confidence in it, JSON-able.

        The best keeps the SLO for most requests; without an SLO, it has the shortest mean TTFT. It is compared with the
        best row of another router, which is replayed in the same worlds and with the same traffic. Both are of the
        first of the ages.
        """
        found: dict[int, dict[str, Any]] = {}
        compared: dict[str, Any] = {"confidence": None, "sensitivity": {}}
        is_complete = True
        with Processes(self._num_workers, self._trace) as processes:
            try:
                for place, row in processes.results(_replayed, {str(at): self._at(at) for at in range(self._num)}):
                    found[int(place)] = row
                    self._progress.on_replay()
                so_far = answer_of_routers(self._described(found, compared))
                self._progress.on_answer(so_far, 2 * len(lead_factors(1.0)))
                if (pair := self._pair(found)) is not None:
                    self._compare(*pair, processes, compared, lambda: self._described(found, compared))
            except KeyboardInterrupt:
                if not found:
                    raise
                is_complete = False
        return {**self._described(found, compared), "is_complete": is_complete}

    @property
    def _num(self) -> int:
        return len(self._cases)

    def _at(self, place: int) -> ReplayConfig:
        router, _, routing, _ = self._cases[place]
        return msgspec.structs.replace(self._config, router=router, routing=routing)

    def _described(self, found: Mapping[int, Mapping[str, Any]], compared: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is known, JSON-able."""
        config, order = self._config, self._order(found)
        num_devices = devices_of(config) * config.replicas
        price = self._goal.prices.of(num_devices, given_host_bytes(config))
        points = {
            place: {"router": router, "age": age, **found[place], "command": self._commands.replay(changes)}
            for place, (router, age, _, changes) in enumerate(self._cases)
            if place in found
        }
        pair = self._pair(found)
        return {
            "replicas": config.replicas,
            "num_devices": num_devices,
            "is_on_device": config.placement is not None,
            "slo": {name: getattr(config.slo, name) for name in config.slo.__struct_fields__},
            "price_per_hour": price,
            "price_per_million_tokens": per_million_tokens(self._trace, price, config),
            "prices": self._goal.prices_to_builtins(),
            **compared,
            "best": {
                **points[order[0]],
                "would_change": would_change(compared["sensitivity"]),
                "serve": serve_lines(config, {"host_bytes": 0, "policy": None}),
            },
            "second": None if pair is None else points[pair[1]],
            "points": [*points.values()],
        }

    def _order(self, found: Mapping[int, Mapping[str, Any]]) -> list[int]:
        """Return the places of rows with a view of the first age, the best first; of equal ones, the first."""
        first = [place for place in found if self._cases[place][1] in (None, self._first_age)]
        return sorted(first or found, key=lambda place: worth(found[place]), reverse=True)

    def _pair(self, found: Mapping[int, Mapping[str, Any]]) -> tuple[int, int] | None:
        """Return the places of the best row, and of the best of another router; None if there is none."""
        best, *others = self._order(found)
        other = (place for place in others if self._cases[place][0] != self._cases[best][0])
        second = next(other, None)
        return None if second is None else (best, second)

    def _compare(
        self,
        best: int,
        second: int,
        processes: Processes,
        compared: dict[str, Any],
        known: Callable[[], dict[str, Any]],
    ) -> None:
        """Replay the best and the second in all worlds, and with other traffic, and put the results in `compared`."""
        config, trace = self._config, self._trace

        def is_ahead(changes: Mapping[str, Any], length: float = 1.0, agents: float = NO_CHANGE) -> bool:
            pair = [msgspec.structs.replace(self._at(place), **changes) for place in (best, second)]
            ours, others = processes.all(changed_summary, [(each, length, agents) for each in pair])
            self._progress.on_replay()
            self._progress.on_replay()
            return worth_of(ours) >= worth_of(others)

        worlds = [is_ahead({"cost_factor": config.cost_factor * each}) for each in lead_factors(self._cost_error)]
        compared["confidence"], times = find_lead(worlds, config.cost, self._cost_error)
        compared["sensitivity"] = sensitivity = {"step_times": times}
        self._progress.on_answer(answer_of_routers(known()), NUM_SENSITIVITY * (not self._goal.is_quick))
        if self._goal.is_quick:
            return

        def share(*, rate: float = config.speedup, length: float = 1.0, agents: float = NO_CHANGE) -> float:
            return float(is_ahead({"speedup": rate}, length, agents))

        if config.concurrency is None:
            sensitivity["rate"] = largest_rate(share, EITHER, config.speedup)
        if can_lengthen(trace):
            sensitivity["prompt_length"] = how_long(share, EITHER)
        sensitivity["agents"] = shares_of_agents(share, EITHER, share_of_agents(trace))


def plan_routers(
    traffic: Traffic,
    config: ReplayConfig,
    routers: Sequence[str],
    ages: Sequence[str] = (),
    *,
    cost_error: float | None = None,
    prices: Prices | Path | str | None = None,
    quick: bool = False,
    commands: CommandLines | None = None,
    workers: int | None = 1,
    progress: PlanProgress = UNSEEN,
) -> Plan:
    """Compare `routers` on the replicas of `config`, as `kvarts plan routers` does.

    `ages`: as `RoutersPlan` has them; the other arguments are those of `kvarts.plan`. Raise ConfigError for an unknown
    router.
    """
    goal = Goal(cost_error=cost_error, prices=prices_of(prices, config.cost), is_quick=quick)
    trace = trace_of(traffic)
    plan = RoutersPlan(trace, config, routers, ages, goal, commands=commands, workers=workers, progress=progress)
    found = plan.to_builtins()
    return Plan.of_replays(trace, config, answer_of_routers(found), routers=found)


def _replayed(trace: Trace, config: ReplayConfig) -> dict[str, Any]:
    """Replay a trace behind a router and return its row. Runs in other processes, too."""
    report = replay(trace, config)
    summary, columns = report.summary, report.request_columns
    tokens = np.bincount(
        np.maximum(columns["replica"], 0),
        weights=columns["input_tokens"] + columns["output_tokens"],
        minlength=config.replicas,
    )
    return {
        "hit_ratio": summary["prefix_hit_ratio"],
        "ttft_ms": summary["ttft_ms"],
        "tpot_ms": summary["tpot_ms"],
        "num_preemptions": summary["num_preemptions"],
        "most_to_mean_tokens": float(tokens.max() / tokens.mean()) if tokens.any() else None,
        "slo_ratio": share_kept(summary),
    }

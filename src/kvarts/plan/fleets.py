"""Fleets with at most a number of devices: the Pareto front of devices and goodput, and what to run.

Every point is a replay of the whole trace; `fleet_search` decides which are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvarts.base.processes import Processes
from kvarts.base.settings import given_by_keywords
from kvarts.base.units import as_percent
from kvarts.plan.commands import command_line
from kvarts.plan.fleet_search import (
    APART,
    Fleet,
    FleetKind,
    FleetKinds,
    FleetOutcome,
    FleetSearch,
    devices_of,
    workers_of,
)
from kvarts.plan.planning import FLEET_VALUES, Plan
from kvarts.plan.replays import share_kept
from kvarts.sim.config import SECTIONS, TABLES
from kvarts.sim.fleet.config import SECTIONS as FLEET_SECTIONS
from kvarts.sim.replay import Traffic, trace_of
from kvarts.sim.replaying import replay
from kvarts.sim.report.words import duration
from kvarts.sim.traffic.settings import SECTION as TRAFFIC
from kvarts.sim.traffic.trace import Trace

__all__ = ["FleetsPlan", "plan_fleets"]

Point = dict[str, Any]
MS_PER_HOUR = 3.6e6
ROLES = {"prefill": "P", "decode": "D"}
WAYS = {"tensor_parallel": "TP", "pipeline_parallel": "PP"}


class FleetsPlan:
    """Search among `kinds` of fleets for the highest goodput on `trace`, by the SLO that `slo_share` of requests keep.

    `command` returns the command line of a replay, given its changes by setting key. `workers`: processes that replay;
    they do not change the result.
    """

    def __init__(
        self,
        trace: Trace,
        kinds: FleetKinds,
        *,
        command: Callable[[Mapping[str, Any]], str],
        slo_share: float = 0.99,
        workers: int | None = 1,
        on_replay: Callable[[], object] | None = None,
    ) -> None:
        self._kinds = kinds
        self._slo = kinds.first.slo
        self._trace = trace
        self._most_devices = kinds.most_devices
        self._command = command
        self._slo_share = slo_share
        self._num_workers = workers
        self._on_replay = on_replay
        self._points: dict[Fleet, Point] = {}
        self._is_closed_loop = kinds.first.concurrency is not None
        # In an open loop, all fleets get the same requests in the same time; goodput per second would also depend on
        # how long the last of them take.
        self._measure = "goodput_per_s" if self._is_closed_loop else "slo_ratio"

    def to_builtins(self) -> dict[str, Any]:
        """Run the search and return the results, JSON-able. Points are ordered by devices, then `compared_by`."""
        with Processes(self._num_workers, self._trace) as processes:
            search = FleetSearch(
                self._kinds.families,
                self._most_devices,
                partial(self._measured, processes),
                ends=not self._is_closed_loop,
            )
            search.run()
        front = [self._points[fleet] for fleet in search.front()]
        for point in front:
            point["on_front"] = True
        points = [self._points[fleet] for fleet in search.in_order()]
        within = [point for point in points if point["devices"] <= search.limit]
        return {
            "gpus": self._most_devices,
            "slo": {name: getattr(self._slo, name) for name in self._slo.__struct_fields__},
            "slo_share": self._slo_share,
            "compared_by": self._measure,
            "routers": self._kinds.routers,
            "stores": self._kinds.stores,
            "num_fleets": len(search.fleets),
            "num_replayed": len(points),
            "left_out": self._kinds.left_out,
            "links_are_free": self._kinds.links_are_free,
            "assumption": _assumption(search),
            "front": front,
            "options": self._options(front, within),
            "answer": self._answer(within),
            **({} if self._kinds.scaler is None else {"scaler": self._scaled(within)}),
            "points": points,
        }

    # Replays --------------------------------------------------------------------------------------------------

    def _measured(self, processes: Processes, fleets: Sequence[Fleet]) -> list[FleetOutcome]:
        configs = {
            str(place): self._kinds.config(self._kinds.kinds[fleet.family], fleet.counts)
            for place, fleet in enumerate(fleets)
        }
        for key, row in processes.results(_replayed, configs):
            fleet = fleets[int(key)]
            kind = self._kinds.kinds[fleet.family]
            changes = self._kinds.changes(kind, fleet.counts)
            self._points[fleet] = {
                **_described(kind, fleet, configs[key], changes),
                **row,
                "on_front": False,
                "command": self._command(changes),
            }
            if self._on_replay is not None:
                self._on_replay()
        found = [self._points[fleet] for fleet in fleets]
        return [FleetOutcome(point[self._measure], self._keeps(point), point["goodput_per_s"]) for point in found]

    def _keeps(self, point: Point) -> bool:
        share: float = point["slo_ratio"]
        return share >= self._slo_share

    def _scaled(self, points: Sequence[Point]) -> dict[str, Any]:
        """Return the replay of the best of `points` that the given scaler applies to, with it; and the hours of both.

        The replay begins with the numbers of workers of that fleet: `begins_as`, None if there is no such fleet.
        """
        fleet_of = {point["name"]: fleet for fleet, point in self._points.items()}
        able = [point for point in points if self._kinds.can_scale(self._kinds.kinds[fleet_of[point["name"]].family])]
        if not able:
            return {"policy": self._kinds.scaler, "begins_as": None}
        fixed = self._best(able)
        fleet = fleet_of[fixed["name"]]
        kind = self._kinds.kinds[fleet.family]
        config = self._kinds.config(kind, fleet.counts, is_scaled=True)
        changes = self._kinds.changes(kind, fleet.counts, is_scaled=True)
        row = _replayed(self._trace, config)
        del row["goodput_per_s_per_device"]
        if self._on_replay is not None:
            self._on_replay()
        return {
            "policy": self._kinds.scaler,
            "begins_as": fixed["name"],
            "keeps_slo": self._keeps(row),
            "hours_to_fixed": row["device_hours"] / fixed["device_hours"] if fixed["device_hours"] else None,
            "fixed": {name: fixed[name] for name in ("device_hours", "slo_ratio", "command")},
            **row,
            "command": self._command(changes),
        }

    # Answers --------------------------------------------------------------------------------------------------

    def _options(self, front: Sequence[Point], points: Sequence[Point]) -> list[dict[str, Any]]:
        """Return three recommendations, or as many as there are fleets: each with its command."""
        best = self._best(points)
        kept = as_percent(self._slo_share)
        if self._keeps(best):
            chosen = [("cheapest", f"the fewest devices that keep the SLO for {kept} of requests", best)]
        else:
            chosen = [("closest", f"no fleet keeps the SLO for {kept} of requests; this one comes closest", best)]
        efficient = max(front, key=lambda point: (point["goodput_per_s_per_device"], -point["devices"]))
        chosen.append(("per-device", "the most goodput per device", efficient))
        others = [point for point in points if point["is_apart"] is not best["is_apart"]]
        if others:
            what = "prefill and decode apart" if others[0]["is_apart"] else "mixed workers"
            of_others = self._best(others)
            chosen.append(
                (
                    "apart" if of_others["is_apart"] else "mixed",
                    f"the best with {what}, and at most as many devices",
                    of_others,
                )
            )
        chosen += [("smaller", "the next smaller fleet of the front", point) for point in reversed(front)]
        options: list[dict[str, Any]] = []
        for name, what, point in chosen:
            same = next((each for each in options if each["fleet"] == point["name"]), None)
            if same is not None:
                if name != "smaller":
                    same["notes"].append(f"also: {what}")
            elif len(options) < 3:
                options.append(self._option(name, what, point, front))
        return options

    def _option(self, name: str, what: str, point: Point, front: Sequence[Point]) -> dict[str, Any]:
        ttft, tpot = (duration(point[metric]["p99"]) for metric in ("ttft_ms", "tpot_ms"))
        devices, share = _counted(point["devices"], "device"), as_percent(point["slo_ratio"], bound=self._slo_share)
        limit = point["limited_by"].replace("kv_pages", "KV pages").replace("_", " ")
        changes = []
        fewer = [each for each in front if each["devices"] < point["devices"]]
        if fewer:
            less = as_percent(fewer[-1]["slo_ratio"], bound=self._slo_share)
            changes.append(
                f"with {_counted(fewer[-1]['devices'], 'device')}, {fewer[-1]['name']} keeps the SLO for {less}"
            )
        return {
            "name": name,
            "what": f"{what}: {point['name']}",
            "fleet": point["name"],
            **{field: point[field] for field in (*FLEET_VALUES, "limited_by", "command")},
            "keeps_slo": self._keeps(point),
            "ttft_ms_p99": point["ttft_ms"]["p99"],
            "tpot_ms_p99": point["tpot_ms"]["p99"],
            "notes": [
                f"{devices}, {point['device_hours']:.3f} device hours; SLO kept by {share}",
                f"TTFT p99 {ttft}, TPOT p99 {tpot}; limited by {limit}",
            ],
            "would_change": changes,
        }

    def _best(self, points: Sequence[Point]) -> Point:
        """Return the first of `points`, in their order, that keeps the SLO; without any, the highest share kept."""
        keeping = [point for point in points if self._keeps(point)]
        if keeping:
            return keeping[0]
        return min(points, key=lambda point: (-point["slo_ratio"], point["devices"]))

    def _answer(self, points: Sequence[Point]) -> str:
        """Return the result in one or two sentences: the devices, the fleet, and whether prefill apart is better."""
        best = self._best(points)
        share = as_percent(self._slo_share)
        if self._keeps(best):
            devices = _counted(best["devices"], "device")
            verb = "is the least" if best["devices"] == 1 else "are the fewest"
            answer = f"{devices} {verb} that keep{'s' * (best['devices'] == 1)} the SLO for {share} of requests"
            answer += f": {best['name']}"
        else:
            kept = as_percent(best["slo_ratio"], bound=self._slo_share)
            answer = f"No fleet of at most {_counted(self._most_devices, 'device')} keeps the SLO for {share} of "
            answer += f"requests: {best['name']} keeps it for {kept}"
        others = [point for point in points if point["is_apart"] is not best["is_apart"]]
        if not others:
            return answer
        other = self._best(others)
        what = "mixed workers" if best["is_apart"] else "prefill and decode apart"
        if self._keeps(other) and other["devices"] == best["devices"]:
            return f"{answer}. {what[0].upper()}{what[1:]} ({other['name']}) keep it with as many devices, too"
        kept = as_percent(other["slo_ratio"], bound=self._slo_share)
        is_better = "Yes, apart is better" if best["is_apart"] else "No, apart is not better"
        return f"{answer}. {is_better}: with at most as many devices, {what} keep it for {kept} ({other['name']})"


def plan_fleets(
    traffic: Traffic,
    gpus: int,
    *,
    routers: Sequence[str] = (),
    stores: Sequence[str] = (),
    slo_share: float = 0.99,
    workers: int | None = 1,
    on_replay: Callable[[], object] | None = None,
    **settings: Any,
) -> Plan:
    """Search for the fleets of at most `gpus` devices with the highest goodput, as `kvarts plan fleet --gpus` does.

    `settings`: options of `kvarts replay` by their names, with an SLO: `model="llama-3.1-8b"`, `device="h100-80gb"`,
    `slo_ttft_ms=3000`, `transfer_rate="50GB/s"`. For `workers`, more than one requires a script that can be imported.
    Points have commands if `traffic` is a path. Raise ConfigError that names the argument.
    """
    sections = [*SECTIONS, TRAFFIC, *TABLES, *FLEET_SECTIONS]
    given = given_by_keywords(settings, sections)
    path = Path(traffic) if isinstance(traffic, str | Path) else None

    def command(changes: Mapping[str, Any]) -> str:
        return "" if path is None else command_line(given, sections, path, None, changes)

    kinds = FleetKinds(given, sections, gpus, routers=routers, stores=stores)
    trace = trace_of(traffic)
    plan = FleetsPlan(trace, kinds, command=command, slo_share=slo_share, workers=workers, on_replay=on_replay)
    fleets = plan.to_builtins()
    config = kinds.first.to_builtins()
    return Plan({"trace": trace.name, "config": config, "fleets": fleets, "advice": fleets["answer"]})


def _assumption(search: FleetSearch) -> dict[str, Any]:
    """Return in how many pairs of replays more workers have less goodput, and the largest difference."""
    drops = [smaller.goodput - larger.goodput for smaller, larger in search.pairs()]
    broken = [drop for drop in drops if drop > 0]
    return {"num_pairs": len(drops), "num_broken": len(broken), "largest_drop": max(broken, default=0.0)}


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _replayed(trace: Trace, config: Any) -> dict[str, Any]:
    """Replay a fleet and return its row. Runs in other processes, too."""
    summary = replay(trace, config).summary
    goodput = summary["goodput"]
    num_devices = sum(worker.replicas * devices_of(worker) for worker in workers_of(config))
    per_s: float = goodput["requests_per_s"] or 0.0
    of_pools = [pool["gpu_hours"] for pool in summary.get("fleet", {}).get("pools", ())]
    return {
        "device_hours": sum(of_pools) if of_pools else num_devices * (summary["duration_ms"] or 0.0) / MS_PER_HOUR,
        "goodput_per_s": per_s,
        "goodput_per_s_per_device": per_s / num_devices,
        "slo_ratio": share_kept(summary),
        **{name: summary[name] for name in ("ttft_ms", "tpot_ms", "e2e_ms", "queue_ms")},
        "hit_ratio": summary["prefix_hit_ratio"],
        "request_throughput_per_s": summary["request_throughput_per_s"],
        "num_rejected": summary["num_rejected"],
        "num_preemptions": summary["num_preemptions"],
        "limited_by": summary["limited_by"]["cause"],
    }


def _described(kind: FleetKind, fleet: Fleet, config: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pools of a fleet, its devices and its name: `2P+2D, prefix`, or `4 mixed(TP2), least-loaded`."""
    roles = APART if kind.is_apart else ("mixed",)
    pools = [
        {
            "role": role,
            "replicas": count,
            "devices": count * devices_of(worker),
            **{ways: int(getattr(worker.cost, ways, 1)) for ways in WAYS},
            "pages": worker.num_pages,
        }
        for role, count, worker in zip(roles, fleet.counts, workers_of(config), strict=True)
    ]
    router = changes.get("router")
    words = ["+".join(map(_of_pool, pools))]
    words += [] if router is None else [str(router)]
    words += [f"store {kind.store}"] if kind.store is not None else []
    return {
        "name": ", ".join(words),
        "is_apart": kind.is_apart,
        "pools": pools,
        "router": router,
        "store": kind.store,
        "devices": sum(pool["devices"] for pool in pools),
    }


def _of_pool(pool: Mapping[str, Any]) -> str:
    ways = "".join(
        f"({name}{pool[key]})"
        for name, key in (("TP", "tensor_parallel"), ("PP", "pipeline_parallel"))
        if pool[key] > 1
    )
    role = ROLES.get(pool["role"], f" {pool['role']}")
    return f"{pool['replicas']}{role}{ways}"

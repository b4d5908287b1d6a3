"""Fleets with at most a number of devices: the Pareto front of devices and goodput, and what to run.

Every point is a replay of the whole trace; `fleet_search` decides which are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from kvarts.base.processes import Processes
from kvarts.base.settings import given_by_keywords
from kvarts.base.units import as_percent
from kvarts.plan.cache import CachePlan
from kvarts.plan.commands import command_line
from kvarts.plan.confidence import (
    SLO_SHARE,
    SLOWER_WORLDS,
    Goal,
    find_confidence,
    how_long,
    largest_rate,
    shares_of_agents,
    step_times,
    would_change,
)
from kvarts.plan.fleet_search import (
    APART,
    BATCH,
    Fleet,
    FleetKind,
    FleetKinds,
    FleetOutcome,
    FleetSearch,
    workers_of,
)
from kvarts.plan.planning import FLEET_VALUES, Plan, prices_of
from kvarts.plan.purchases import (
    Prices,
    Purchase,
    devices_of,
    given_host_bytes,
    host_memory_of,
    host_sizes,
    per_million_tokens,
    policies_of,
    with_host_memory,
)
from kvarts.plan.replays import NO_CHANGE, UNSEEN, PlanProgress, changed_summary, share_kept
from kvarts.plan.serve_lines import serve_lines
from kvarts.plan.tables import money_of
from kvarts.sim.config import SECTIONS, TABLES, ReplayConfig
from kvarts.sim.fleet.config import SECTIONS as FLEET_SECTIONS
from kvarts.sim.replay import Traffic, trace_of
from kvarts.sim.replaying import replay
from kvarts.sim.report.advice import as_size
from kvarts.sim.report.words import duration
from kvarts.sim.traffic.editing import can_lengthen, share_of_agents
from kvarts.sim.traffic.settings import SECTION as TRAFFIC
from kvarts.sim.traffic.trace import Trace

__all__ = ["FleetsPlan", "plan_fleets"]

Point = dict[str, Any]
MS_PER_HOUR = 3.6e6
ROLES = {"prefill": "P", "decode": "D"}
WAYS = {"tensor_parallel": "TP", "data_parallel": "DP", "pipeline_parallel": "PP"}
MOST_OPTIONS = 3
NUM_LEFT = 12
"""Replays with host memory that are still to come once the fewest devices are known, about."""
NUM_SENSITIVITY = 12
"""Replays with other traffic, about."""


class FleetsPlan:
    """Search among `kinds` of fleets for the highest goodput on `trace`, by the SLO that enough requests keep.

    `command` returns the command line of a replay, given its changes by setting key. `workers`: processes that replay;
    they do not change the result.
    """

    def __init__(
        self,
        trace: Trace,
        kinds: FleetKinds,
        goal: Goal,
        *,
        command: Callable[[Mapping[str, Any]], str],
        workers: int | None = 1,
        progress: PlanProgress = UNSEEN,
    ) -> None:
        self._kinds = kinds
        self._slo = kinds.first.slo
        self._trace = trace
        self._most_devices = kinds.most_devices
        self._command = command
        self._goal = goal
        self._slo_share = goal.slo_share
        self._num_workers = workers
        self._progress = progress
        self._cost_error = goal.error(kinds.first, trace)
        self._prices = goal.prices
        self._points: dict[Fleet, Point] = {}
        self._configs: dict[str, Any] = {}
        """What was replayed, by the names of points."""
        self._bought: dict[Purchase, Point] = {}
        """What was replayed with host memory."""
        self._confidence: dict[str, Any] | None = None
        self._sensitivity: dict[str, Any] = {}
        self.is_complete = True
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
            try:
                search.run()
                self._progress.on_answer(self._answer(self._within(search)), NUM_LEFT)
                self._add_host_memory(search, processes)
                self._progress.on_answer(self._answer(self._within(search)), len(SLOWER_WORLDS) // 2)
                self._find_confidence(search)
                self._progress.on_answer(self._answer(self._within(search)), NUM_SENSITIVITY)
                self._find_sensitivity(search, processes)
            except KeyboardInterrupt:
                search.known.update({fleet: self._outcome(point) for fleet, point in self._points.items()})
                if not search.known:
                    raise
                self.is_complete = False
        front = [self._points[fleet] for fleet in search.front()]
        for point in front:
            point["on_front"] = True
        points = [self._points[fleet] for fleet in search.in_order()]
        within = self._within(search)
        return {
            "gpus": self._most_devices,
            "slo": {name: getattr(self._slo, name) for name in self._slo.__struct_fields__},
            "slo_share": self._slo_share,
            "is_complete": self.is_complete,
            "prices": self._goal.prices_to_builtins(),
            "confidence": self._confidence,
            "sensitivity": self._sensitivity,
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
            "points": [*points, *(self._bought[bought] for bought in sorted(self._bought))],
        }

    def _within(self, search: FleetSearch) -> list[Point]:
        """Return the replays within the limit, in order; the cheapest with host memory first, if it keeps the SLO."""
        points = [self._points[fleet] for fleet in search.in_order() if search.devices(fleet) <= search.limit]
        limit = self._least_price(points)
        kept = [
            (point["price_per_hour"], bought)
            for bought, point in self._bought.items()
            if self._keeps(point) and point["price_per_hour"] < limit
        ]
        return [*(self._bought[bought] for _, bought in sorted(kept)[:1]), *points]

    def _least_price(self, points: Sequence[Point]) -> float:
        return min((point["price_per_hour"] for point in points if self._keeps(point)), default=float("inf"))

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
            described = _described(kind, fleet, configs[key], changes)
            self._configs[described["name"]] = configs[key]
            self._points[fleet] = {
                **described,
                **row,
                "host_bytes": 0,
                "policy": None,
                "price_per_hour": self._prices.of(
                    described["devices"], sum(map(given_host_bytes, workers_of(configs[key])[:1]))
                ),
                "on_front": False,
                "command": self._command(changes),
            }
            self._progress.on_replay()
        if kept := [point for point in self._points.values() if self._keeps(point)]:
            cheapest = min(kept, key=lambda point: (point["price_per_hour"], point["name"]))
            self._progress.on_answer(f"at most {_in_words(cheapest)}", NUM_LEFT + BATCH)
        return [self._outcome(self._points[fleet]) for fleet in fleets]

    def _outcome(self, point: Point) -> FleetOutcome:
        return FleetOutcome(point[self._measure], self._keeps(point), point["goodput_per_s"])

    def _add_host_memory(self, search: FleetSearch, processes: Processes) -> None:
        """Look for fleets with host memory that keep the SLO for less than the fewest devices without it."""
        if not self._trace.knows_prefixes or self._trace.requests is None or self._is_closed_loop:
            return
        keeping = [point for point in self._within(search) if self._keeps(point)]
        fewer = min((point["devices"] for point in keeping), default=self._most_devices + 1) - 1
        reused_pages = 0
        for fleets in self._host_lines(search, fewer):
            kind = self._kinds.kinds[fleets[0].family]
            worker = workers_of(self._kinds.config(kind, fleets[0].counts))[0]
            reused_pages = reused_pages or CachePlan(self._trace, worker.page_size).curve.most_pages
            sizes = host_sizes(worker, reused_pages)
            if not sizes:
                continue
            by_line = {Purchase(search.devices(fleet), fleet.family): fleet for fleet in fleets}

            def lacks(bought: Purchase, by_line: Mapping[Purchase, Fleet] = by_line) -> float:
                if bought not in self._bought:
                    line = Purchase(bought.num_devices, bought.shape)
                    self._bought[bought] = self._with_host_memory(by_line[line], bought, processes)
                return self._slo_share - float(self._bought[bought]["slo_ratio"])

            limit = self._least_price(self._within(search))
            with_host_memory([list(by_line)], sizes, policies_of(worker), self._prices, lacks, limit)

    def _host_lines(self, search: FleetSearch, most_devices: int) -> Iterator[list[Fleet]]:
        """Yield the fleets that host memory is added to, per shape, the fewest devices first.

        These are mixed workers of each shape behind the first router, and those of the pools apart that keep the SLO
        for the most requests without it: per number of devices, the best split of these.
        """
        shapes: set[FleetKind] = set()
        for family, (kind, each) in enumerate(zip(self._kinds.kinds, self._kinds.families, strict=True)):
            shape = msgspec.structs.replace(kind, router="")
            if kind.is_apart or kind.store is not None or shape in shapes or each.sizes[0] > most_devices:
                continue
            shapes.add(shape)
            yield [Fleet(family, (count,)) for count in range(1, most_devices // each.sizes[0] + 1)]
        apart = [
            fleet
            for fleet in search.in_order()
            if self._points[fleet]["is_apart"]
            and self._points[fleet]["store"] is None
            and search.devices(fleet) <= most_devices
        ]
        if apart:
            best = max(apart, key=lambda fleet: self._points[fleet]["slo_ratio"])
            splits: dict[int, Fleet] = {}
            for fleet in apart:  # of as many devices, the best is first
                if fleet.family == best.family:
                    splits.setdefault(search.devices(fleet), fleet)
            yield list(splits.values())

    def _with_host_memory(self, fleet: Fleet, bought: Purchase, processes: Processes) -> Point:
        """Return the replay of a fleet with the host memory of a purchase in each of its workers."""
        kind = self._kinds.kinds[fleet.family]
        changes = self._kinds.changes(kind, fleet.counts) | {
            "offload.host_memory": as_size(bought.host_bytes),
            "offload.policy": bought.policy,
        }
        config = self._kinds.config_of(changes)
        self._progress.on_replay()
        described = _described(kind, fleet, config, changes)
        name = described["name"] + host_memory_of(bought.num_devices * bought.host_bytes, bought.policy)
        self._configs[name] = config
        return {
            **described,
            **processes.all(_replayed, [config])[0],
            "name": name,
            "host_bytes": bought.host_bytes,
            "policy": bought.policy,
            "price_per_hour": bought.price(self._prices),
            "on_front": False,
            "command": self._command(changes),
        }

    def _find_confidence(self, search: FleetSearch) -> None:
        """Replay the best with longer steps, if it keeps the SLO."""
        best = self._best(self._within(search))
        if not self._keeps(best):
            return
        config = self._configs[best["name"]]

        def replayed(factor: float) -> tuple[bool, float]:
            self._progress.on_replay()
            slower = _changed(config, lambda each: {"cost_factor": each.cost_factor * factor})
            row = _replayed(self._trace, slower)
            return self._keeps(row), row["goodput_per_s"]

        self._confidence = find_confidence(replayed, workers_of(config)[0].cost, self._cost_error)

    def _find_sensitivity(self, search: FleetSearch, processes: Processes) -> None:
        """Replay the best with other traffic, if it keeps the SLO."""
        if self._confidence is None:
            return
        config = self._configs[self._best(self._within(search))["name"]]
        speedup = workers_of(config)[0].speedup
        found, trace = self._sensitivity, self._trace
        asked: dict[tuple[float, float, float], float] = {}

        def share(*, rate: float = speedup, length: float = 1.0, agents: float = NO_CHANGE) -> float:
            case = rate, length, agents
            if case not in asked:
                self._progress.on_replay()
                at_rate = _changed(config, lambda each: {"speedup": rate})
                asked[case] = share_kept(processes.all(changed_summary, [(at_rate, length, agents)])[0]) or 0.0
            return asked[case]

        found["step_times"] = step_times(self._confidence)
        if not self._is_closed_loop:
            found["rate"] = largest_rate(share, self._slo_share, speedup)
        if can_lengthen(trace):
            found["prompt_length"] = how_long(share, self._slo_share)
        found["agents"] = shares_of_agents(share, self._slo_share, share_of_agents(trace))

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
        self._progress.on_replay()
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
        if best["host_bytes"]:
            chosen = [("cheapest", f"the least that keeps the SLO for {kept} of requests", best)]
            chosen += [("devices", "the same without host memory", each) for each in self._alone(points)]
        elif self._keeps(best):
            chosen = [("cheapest", f"the fewest devices that keep the SLO for {kept} of requests", best)]
        else:
            chosen = [("closest", f"no fleet keeps the SLO for {kept} of requests; this one comes closest", best)]
        efficient = max(front, key=lambda point: (point["goodput_per_s_per_device"], -point["devices"]))
        chosen.append(("per-device", "the most goodput per device", efficient))
        if others := _the_other_way(points, best):
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
            elif len(options) < MOST_OPTIONS:
                options.append(self._option(name, what, point, front))
        if self._sensitivity:
            options[0]["would_change"] += would_change(self._sensitivity)
        return options

    def _option(self, name: str, what: str, point: Point, front: Sequence[Point]) -> dict[str, Any]:
        ttft, tpot = (duration(point[metric]["p99"]) for metric in ("ttft_ms", "tpot_ms"))
        devices, share = _counted(point["devices"], "device"), as_percent(point["slo_ratio"], bound=self._slo_share)
        limit = point["limited_by"].replace("kv_pages", "KV pages").replace("_", " ")
        limited = "" if limit == "nothing" else f"; limited by {limit}"
        config = self._configs[point["name"]]
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
                f"TTFT p99 {ttft}, TPOT p99 {tpot}{limited}",
            ],
            "would_change": changes,
            "host_bytes": point["host_bytes"],
            "policy": point["policy"],
            **self._priced(point),
            "serve": serve_lines(config, point),
        }

    def _priced(self, point: Point) -> dict[str, float | None]:
        """Return the prices of a fleet, per hour and per million tokens."""
        price = point["price_per_hour"]
        per_million = per_million_tokens(self._trace, price, self._kinds.first)
        return {"price_per_hour": price, "price_per_million_tokens": per_million}

    def _best(self, points: Sequence[Point]) -> Point:
        """Return the first of `points`, in their order, that keeps the SLO; without any, the highest share kept."""
        keeping = [point for point in points if self._keeps(point)]
        if keeping:
            return keeping[0]
        return min(points, key=lambda point: (-point["slo_ratio"], point["devices"]))

    def _alone(self, points: Sequence[Point]) -> list[Point]:
        """Return the fewest devices that keep the SLO without host memory, if the best has some; else nothing."""
        if not points[0]["host_bytes"]:
            return []
        return [point for point in points[1:] if self._keeps(point)][:1]

    def _answer(self, points: Sequence[Point]) -> str:
        """Return the result in one or two sentences: the devices, the fleet, and whether prefill apart is better."""
        best = self._best(points)
        share = as_percent(self._slo_share)
        if self._keeps(best):
            instead = "".join(f", or {_in_words(each)}," for each in self._alone(points))
            verb = "keeps" if best["devices"] == 1 and not best["host_bytes"] else "keep"
            answer = f"{_in_words(best)}{instead} {verb} the SLO for {share} of requests"
            if self._confidence is not None:
                answer += f", {self._confidence['text']}"
            if self._prices.currency:
                answer += f". {money_of(self._priced(best), self._prices.currency)}"
        else:
            kept = as_percent(best["slo_ratio"], bound=self._slo_share)
            answer = f"No fleet of at most {_counted(self._most_devices, 'GPU')} keeps the SLO for {share} of "
            answer += f"requests: {best['name']} keeps it for {kept}"
        others = _the_other_way(points, best)
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
    slo_share: float = SLO_SHARE,
    cost_error: float | None = None,
    prices: Prices | Path | str | None = None,
    workers: int | None = 1,
    progress: PlanProgress = UNSEEN,
    **settings: Any,
) -> Plan:
    """Search for the fleets of at most `gpus` devices with the highest goodput, as `kvarts plan fleet --gpus` does.

    `settings`: options of `kvarts replay` by their names, with an SLO: `model="llama-3.1-8b"`, `device="h100-80gb"`,
    `slo_ttft_ms=3000`, `transfer_rate="50GB/s"`. For `workers`, more than one requires a script that can be imported.
    Points have commands if `traffic` is a path. Raise ConfigError that names the argument.
    """
    sections = [*SECTIONS, TRAFFIC, *FLEET_SECTIONS, *TABLES]  # as the command line lists them
    given = given_by_keywords(settings, sections)
    path = Path(traffic) if isinstance(traffic, str | Path) else None

    def command(changes: Mapping[str, Any]) -> str:
        return "" if path is None else command_line(given, sections, path, None, changes)

    kinds = FleetKinds(given, sections, gpus, routers=routers, stores=stores)
    trace = trace_of(traffic)
    goal = Goal(slo_share, cost_error, prices_of(prices, kinds.first.cost))
    fleets = FleetsPlan(trace, kinds, goal, command=command, workers=workers, progress=progress).to_builtins()
    config = kinds.first.to_builtins()
    return Plan({"trace": trace.name, "config": config, "fleets": fleets, "advice": fleets["answer"]})


def _assumption(search: FleetSearch) -> dict[str, Any]:
    """Return in how many pairs of replays more workers have less goodput, and the largest difference."""
    drops = [smaller.goodput - larger.goodput for smaller, larger in search.pairs()]
    broken = [drop for drop in drops if drop > 0]
    return {"num_pairs": len(drops), "num_broken": len(broken), "largest_drop": max(broken, default=0.0)}


def _the_other_way(points: Sequence[Point], best: Point) -> list[Point]:
    """Return the mixed `points` if `best` is apart, else those apart, with at most as many devices as `best`."""
    most = best["devices"]
    return [point for point in points if point["is_apart"] is not best["is_apart"] and point["devices"] <= most]


def _in_words(point: Point) -> str:
    """Return a fleet in words: `2 GPUs (1 mixed(TP2))`, or `1 GPU and 29 GiB of host memory (lazy stores)`."""
    memory = host_memory_of(point["devices"] * point["host_bytes"], point["policy"] or "")
    shape = point["name"].removesuffix(memory)
    return f"{_counted(point['devices'], 'GPU')}{memory}" + (f" ({shape})" if point["devices"] > 1 else "")


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _changed(config: Any, changes: Callable[[ReplayConfig], Mapping[str, Any]]) -> Any:
    """Return a replay, or a fleet with all its workers, with the fields that `changes` returns."""
    if isinstance(config, ReplayConfig):
        return msgspec.structs.replace(config, **changes(config))
    pools = (msgspec.structs.replace(pool, each=_changed(pool.each, changes)) for pool in config.pools)
    return msgspec.structs.replace(config, pools=tuple(pools))


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
            "devices": count * devices_of(worker) * kind.data_parallel,
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
    sizes = " ".join(f"{name}{pool[key]}" for key, name in WAYS.items() if pool[key] > 1)
    ways = f"({sizes})" * bool(sizes)
    role = ROLES.get(pool["role"], f" {pool['role']}")
    return f"{pool['replicas']}{role}{ways}"

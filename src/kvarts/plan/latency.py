"""Recommendations of a plan, and latencies at chosen points, by replay: what keeps an SLO, and the highest such rate.

An SLO is kept if `slo_share` of the requests keep its bounds. The search finds the fewest replicas that keep it, then
whether fewer of them keep it with host memory, for less (`purchases`). The cheapest of all that was replayed is the
answer; further stages replay it with longer steps, at other rates and with longer prompts, and with less memory.

The searches assume that more memory, more replicas or a lower rate never hurt. Where that does not hold, they still
return two neighbours, one that meets the requirement and one that does not; both have been replayed. Up to FEW replicas
are found whatever more of them do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from kvarts.base.processes import Processes
from kvarts.base.settings import SettingError
from kvarts.base.units import as_hits, as_percent
from kvarts.core.parts.combines import check_combination
from kvarts.plan.cache import HitPlan
from kvarts.plan.confidence import (
    EIGHTHS,
    Goal,
    find_confidence,
    how_long,
    largest_rate,
    shares_of_agents,
    step_times,
    would_change,
)
from kvarts.plan.purchases import (
    FEW,
    Purchase,
    between,
    first_from,
    host_sizes,
    per_million_tokens,
    policies_of,
    with_host_memory,
)
from kvarts.plan.replays import UNSEEN, PlanProgress, Replays, SizeOption
from kvarts.sim.config import ReplayConfig
from kvarts.sim.report.words import plus_minus
from kvarts.sim.traffic.editing import can_lengthen, share_of_agents

if TYPE_CHECKING:
    from kvarts.sim.router import RouterMaker

__all__ = [
    "MOST_REPLICAS",
    "NUM_POINTS",
    "LatencyPlan",
    "SizeOption",
    "lowest_known",
    "other_option",
]

NUM_POINTS = 5
NEARLY_ALL = 0.99
MOST_REPLICAS = 64
MOST_WITH_HOST = 8
"""Most replicas that are tried with host memory if no number of them keeps the SLO without."""
Option = dict[str, Any]
Found = TypeVar("Found")


def lowest_known(
    keeps: Callable[[int], bool], found: int | None, is_known: Callable[[int], bool], places: range
) -> int | None:
    """Return the lowest of the `places` already replayed where `keeps` holds and the place before fails; else `found`.

    `keeps` need not be monotone, so a search may have found one of several such places.
    """
    lower = (place for place in places if (found is None or place < found) and is_known(place) and keeps(place))
    lowest = next(lower, None)
    if lowest is None:
        return found
    while lowest > places.start and keeps(lowest - 1):
        lowest -= 1
    return lowest


def other_option(
    replays: Replays, plan: HitPlan, name: str, num_pages: int, what: str, most: int, slo_share: float | None
) -> Option:
    """Return the option with `num_pages` over replicas of at most `most` each, or the closest that replicas allow."""
    step = size_option(replays, num_pages, most)
    replicas, pages = step.replicas, step.pages
    option = _option(replays, name, step, what, slo_share)
    if (needed := _needed(num_pages, most)) > replicas:
        option["notes"].append(f"it would take {needed:,} replicas; this is as many as are tried")
    if slo_share is not None:
        option["keeps_slo"] = replays.at(SizeOption(replicas, pages))["slo_ratio"] >= slo_share
    total = replicas * pages
    now, half, twice = (plan.hit_ratio(size) for size in (total, max(total // 2, plan.least_pages), 2 * total))
    optimum = plan.point(total)["optimum_hit_ratio"]
    found = as_percent(now)
    option["would_change"] = [
        f"one request at a time these pages find {found}, half of them {as_percent(half)}, twice {as_percent(twice)}",
        f"a policy that knew the future would find {as_percent(optimum)} with the same pages",
    ]
    return option


def _needed(num_pages: int, most: int) -> int:
    return max(1, -(-num_pages // most))


def size_option(replays: Replays, num_pages: int, most: int) -> SizeOption:
    """Return `num_pages` over replicas of at most `most` each, or the closest that replicas allow."""
    replicas = min(_needed(num_pages, most), MOST_REPLICAS)
    return SizeOption(replicas, most if replicas > 1 else max(num_pages, min(replays.least_pages, most)))


def _option(replays: Replays, name: str, step: SizeOption, what: str, slo_share: float | None) -> Option:
    point = replays.at(step)
    kept = point["slo_ratio"]
    spread = replays.spread(step)
    ttft, tpot = (
        plus_minus(point[metric]["p99"], None if spread is None else spread[metric]["p99"])
        for metric in ("ttft_ms", "tpot_ms")
    )
    notes = [
        f"{as_hits(point['hit_ratio'])} hits, TTFT p99 {ttft}, TPOT p99 {tpot}"
        + ("" if kept is None else f"; SLO kept by {as_percent(kept, bound=slo_share)}"),
    ]
    if point["limited_by"] != "nothing":
        notes.append(f"limited by {point['limited_by'].replace('kv_pages', 'KV pages').replace('_', ' ')}")
    return {
        "name": name,
        "what": f"{what}: {replays.named(step)}",
        "replicas": step.replicas,
        "devices": point["devices"],
        "pages": step.pages,
        "host_bytes": step.host_bytes,
        "policy": step.policy or None,
        "hit_ratio": point["hit_ratio"],
        "ttft_ms_p99": point["ttft_ms"]["p99"],
        "tpot_ms_p99": point["tpot_ms"]["p99"],
        "slo_ratio": kept,
        "keeps_slo": None,
        "command": point["command"],
        "limited_by": point["limited_by"],
        "notes": notes,
        "would_change": [],
        **({} if spread is None else {"uncertainty": spread}),
    }


class AnswerSearch:
    """The searches for what keeps the SLO. Each depends on shares of replays alone.

    `sizes`: of host memory per device that are tried.
    """

    def __init__(self, config: ReplayConfig, sizes: list[int], goal: Goal) -> None:
        self._config = config
        self._sizes = sizes
        self._prices = goal.prices
        self._slo_share = goal.slo_share

    def alone(self, replays: Replays) -> SizeOption | None:
        """Return the fewest replicas, with all their memory, that keep the SLO; one replica less does not."""

        def keeps(replicas: int) -> bool:
            return self._keeps(replays, self._whole(replicas))

        found = 1 if keeps(1) else first_from(keeps, 1, MOST_REPLICAS + 1)
        places = range(1, MOST_REPLICAS + 1)

        def is_tried(replicas: int) -> bool:
            return replicas <= FEW or replays.has(self._whole(replicas))

        fewest = lowest_known(keeps, found, is_tried, places)
        return None if fewest is None else self._whole(fewest)

    def with_host(self, replays: Replays, alone: SizeOption | None) -> list[SizeOption]:
        """Return fewer replicas with host memory that keep the SLO for less than `alone`, the cheapest last."""
        each = replays.devices_per_replica
        fewer = MOST_WITH_HOST if alone is None else alone.replicas - 1
        lines = [Purchase(replicas * each) for replicas in range(1, fewer + 1)]
        if not self._sizes or not lines:
            return []

        def option(bought: Purchase) -> SizeOption:
            return msgspec.structs.replace(
                self._whole(bought.num_devices // each), host_bytes=bought.host_bytes, policy=bought.policy
            )

        found = with_host_memory(
            [lines],
            self._sizes,
            policies_of(self._config),
            self._prices,
            lambda bought: self._slo_share - replays.share(option(bought)),
            self.price(replays, alone) if alone is not None else float("inf"),
        )
        return [option(bought) for bought in found]

    def price(self, replays: Replays, step: SizeOption) -> float:
        """Return the price of a step per hour."""
        host_bytes = replays.given_host_bytes or step.host_bytes
        return self._prices.of(step.replicas * replays.devices_per_replica, host_bytes)

    def confidence(self, replays: Replays, step: SizeOption, cost_error: float) -> dict[str, Any]:
        """Return the confidence in a step that keeps the SLO."""

        def replayed(factor: float) -> tuple[bool, float]:
            return self._keeps(replays, step, cost_factor=factor), replays.goodput(step, cost_factor=factor)

        return find_confidence(replayed, self._config.cost, cost_error)

    def below(self, replays: Replays, step: SizeOption, cost_error: float) -> bool | None:
        """Return whether the next cheaper step keeps the SLO if steps are shorter by `cost_error`; None without one."""
        cheaper = self.cheaper(step)
        return None if cheaper is None else self._keeps(replays, cheaper, cost_factor=1 - cost_error)

    def cheaper(self, step: SizeOption) -> SizeOption | None:
        """Return the step without host memory, else with one replica less; None for a single replica."""
        if step.host_bytes:
            return self._whole(step.replicas)
        return self._whole(step.replicas - 1) if step.replicas > 1 else None

    def largest_rate(self, replays: Replays, step: SizeOption) -> dict[str, Any]:
        """Return up to which rate, relative to the trace, a step keeps the SLO, as `largest_rate` does."""
        return largest_rate(partial(replays.share, step), self._slo_share, self._config.speedup)

    def spare(self, replays: Replays, step: SizeOption) -> SizeOption:
        """Return the step with the fewest eighths of its pages that keep the SLO, if it has no host memory."""
        least = min(replays.least_pages, step.pages)
        sizes = sorted({max(least, step.pages * eighth // EIGHTHS) for eighth in range(1, EIGHTHS + 1)})
        steps = [msgspec.structs.replace(step, pages=pages) for pages in sizes]
        return steps[between(lambda place: self._keeps(replays, steps[place]), -1, len(steps) - 1)]

    def longest(self, replays: Replays, step: SizeOption) -> dict[str, Any]:
        """Return how much longer prompts may be, as `how_long` does."""
        return how_long(partial(replays.share, step), self._slo_share)

    def agents(self, replays: Replays, step: SizeOption, share: float | None) -> dict[str, Any]:
        """Return between which shares of agents a step keeps the SLO, as `shares_of_agents` does."""
        return shares_of_agents(partial(replays.share, step), self._slo_share, share)

    def _whole(self, replicas: int) -> SizeOption:
        return SizeOption(replicas, self._config.num_pages)

    def _keeps(self, replays: Replays, step: SizeOption, **changes: Any) -> bool:
        return replays.share(step, **changes) >= self._slo_share


class LatencyPlan:
    """Replays of one trace under `config`. The pages of `config` are all the KV memory that a replica can have.

    `command` returns the command line that replays a step at a rate. `router`: used with more than one replica.
    `reused_pages`: the working set of the trace. `processes`: those that replay, which share the trace; default: this
    one. An interrupt (KeyboardInterrupt) ends the searches, and the result is what was found until then.
    """

    def __init__(
        self,
        plan: HitPlan,
        config: ReplayConfig,
        goal: Goal,
        *,
        command: Callable[[dict[str, Any]], str],
        router: str | RouterMaker = "prefix",
        reused_pages: int = 0,
        progress: PlanProgress = UNSEEN,
        processes: Processes | None = None,
    ) -> None:
        check_combination({**config.features, "plan": "command"})
        if config.hicache_ratio:
            raise SettingError(
                "does not go with a plan: it is as large as the device's memory, of which a plan tries several sizes",
                "hicache_ratio",
                hint="Give {hicache_size}, or leave it out: a plan tries sizes of host memory.",
            )
        self._plan = plan
        self._config = config
        self._goal = goal
        self._slo_share = goal.slo_share
        self._cost_error = goal.error(config, plan.trace)
        self._progress = progress
        self._num_left = 0
        self._alone: SizeOption | None = None
        """The fewest devices without host memory, once known."""
        self._is_bracketed = False
        """Whether the answer so far is only what replays have shown: that of a search that has not ended."""
        self._replays = Replays(
            plan, config, command=command, router=router, on_replay=self._before_replay, processes=processes
        )
        self._has_slo = any(getattr(config.slo, field) is not None for field in config.slo.__struct_fields__)
        self._search = AnswerSearch(config.certain, host_sizes(config, reused_pages), goal)
        self.is_complete = True

    def to_builtins(self) -> dict[str, Any]:
        """Run the replays that are needed and return the results, JSON-able."""
        config = self._config
        found: dict[str, Any] = {}
        options: list[Option] = []
        if self._has_slo:
            found = self._searched()
            options = self._answers(found)
        else:
            options = self._looked_at()
        return {
            "setting": f"pages of {config.page_size} tokens, at most {config.num_pages:,} a replica",
            "slo": {name: getattr(config.slo, name) for name in config.slo.__struct_fields__},
            "slo_share": self._slo_share if self._has_slo else None,
            "router": self._replays.router,
            "cost_factor": config.cost_factor,
            "prices": self._goal.prices_to_builtins(),
            "points": self._replays.points(),
            "confidence": found.get("confidence"),
            "sensitivity": found.get("sensitivity", {}),
            "options": options,
        }

    def _looked_at(self) -> list[Option]:
        """Replay steps at the knees and return the options of a plan without an SLO; those found, if interrupted."""
        others = {
            "knee": (self._plan.main_knee, "the knee of the curve of hits"),
            "best": (self._plan.curve.size_for(NEARLY_ALL), f"{as_percent(NEARLY_ALL)} of the hits that there can be"),
        }
        options: list[Option] = []
        try:
            self._replays.look(self._steps_to_look_at())
            for name, (num_pages, what) in others.items():
                options.append(
                    other_option(self._replays, self._plan, name, num_pages, what, self._config.num_pages, None)
                )
        except KeyboardInterrupt:
            self.is_complete = False
        return options

    # Searches ---------------------------------------------------------------------------------------------

    def _searched(self) -> dict[str, Any]:
        """Run the searches in their order until one is interrupted. `steps`: what keeps the SLO, the cheapest first."""
        found: dict[str, Any] = {"steps": [], "sensitivity": {}}
        stages: list[tuple[int, Callable[[dict[str, Any]], None]]] = [
            (6, self._find_alone),
            (10, self._find_with_host),
            (5, self._find_confidence),
        ]
        if not self._goal.is_quick:
            stages += [
                (8, self._find_rate), (3, self._find_spare), (2, self._find_length), (4, self._find_agents),
            ]  # fmt: skip
        left = self._num_left = sum(num for num, _ in stages)
        self._progress.on_answer("", left)
        try:
            for num, stage in stages:
                self._is_bracketed = stage in (self._find_alone, self._find_with_host)
                if found["steps"] or self._is_bracketed:
                    stage(found)
                left = self._num_left = left - num
                self._progress.on_answer(self._named(found), left)
        except KeyboardInterrupt:
            self.is_complete = False
            if self._is_bracketed and (best := self._cheapest_so_far()) not in (None, *found["steps"]):
                found["steps"].insert(0, best)
        return found

    def _before_replay(self) -> None:
        if self._is_bracketed:
            self._num_left = max(1, self._num_left - 1)
            self._progress.on_answer(self._bracket(), self._num_left)
        self._progress.on_replay()

    def _bracket(self) -> str:
        """Return the cheapest step so far that keeps the SLO, and the most devices so far that do not, in words.

        Once the fewest devices are known, return what is cheaper with host memory; empty if nothing is.
        """
        best, known = self._cheapest_so_far(), self._replays.known()
        if self._alone is not None:
            return "" if best in (None, self._alone) else f"at most {self._replays.named(best)}"
        missed = [step for step, share in known.items() if share < self._slo_share and not step.host_bytes]
        texts = [] if best is None else [f"at most {self._replays.named(best)}"]
        if missed:
            texts.append(f"{self._replays.named(max(missed))} would not be enough")
        return "; ".join(texts)

    def _cheapest_so_far(self) -> SizeOption | None:
        """Return the cheapest replayed step that keeps the SLO; None if none was found yet."""
        known = self._replays.known()
        kept = [
            step for step, share in known.items() if share >= self._slo_share and step.pages == self._config.num_pages
        ]
        return min(kept, key=lambda step: (self._search.price(self._replays, step), step), default=None)

    def _named(self, found: Mapping[str, Any]) -> str:
        if not found["steps"]:
            return "nothing that was tried so far keeps the SLO"
        sure = f", {found['confidence']['text']}" if "confidence" in found else ""
        return f"{self._replays.named(found['steps'][0])}{sure}"

    def _find_alone(self, found: dict[str, Any]) -> None:
        self._alone = self._run(self._search.alone)
        found["steps"] = [] if self._alone is None else [self._alone]

    def _find_with_host(self, found: dict[str, Any]) -> None:
        with_host = self._run(lambda replays: self._search.with_host(replays, self._alone))
        found["steps"] = [*reversed(with_host), *found["steps"]]

    def _find_confidence(self, found: dict[str, Any]) -> None:
        step, error = found["steps"][0], self._cost_error
        found["confidence"] = self._run(lambda replays: self._search.confidence(replays, step, error))
        is_enough = self._run(lambda replays: self._search.below(replays, step, error))
        times = step_times(found["confidence"])
        if (cheaper := self._search.cheaper(step)) is not None:
            times["shorter"] = {"factor": 1 - error, "step": self._replays.named(cheaper), "keeps_slo": is_enough}
        found["sensitivity"]["step_times"] = times

    def _find_rate(self, found: dict[str, Any]) -> None:
        if self._config.concurrency is not None:
            return
        step = found["steps"][0]
        rate = self._run(lambda replays: self._search.largest_rate(replays, step))
        command = "" if rate["up_to"] is None else self._replays.at(step, rate=rate["up_to"])["command"]
        found["sensitivity"]["rate"] = rate | {"command": command}

    def _find_spare(self, found: dict[str, Any]) -> None:
        """Find the least memory of the answer, and from all its replays the hits that it needs."""
        step = found["steps"][0]
        if not step.host_bytes:
            least = self._run(lambda replays: self._search.spare(replays, step))
            found["sensitivity"]["memory"] = {"share": least.pages / step.pages, "step": self._replays.named(least)}
        if not self._plan.trace.knows_prefixes:
            return
        base = self._replays.at(step)
        same = ("replicas", "rate", "cost_factor", "length", "share_of_agents")
        points = [each for each in self._replays.points() if all(each[name] == base[name] for name in same)]
        kept = [each["hit_ratio"] or 0.0 for each in points if each["slo_ratio"] >= self._slo_share]
        missed = [each["hit_ratio"] or 0.0 for each in points if each["slo_ratio"] < self._slo_share]
        found["sensitivity"]["hit_ratio"] = {
            "down_to": min(kept),
            "fails_at": max((each for each in missed if each < min(kept)), default=None),
        }

    def _find_length(self, found: dict[str, Any]) -> None:
        if not can_lengthen(self._plan.trace):
            return
        step = found["steps"][0]
        found["sensitivity"]["prompt_length"] = self._run(lambda replays: self._search.longest(replays, step))

    def _find_agents(self, found: dict[str, Any]) -> None:
        step, share = found["steps"][0], share_of_agents(self._plan.trace)
        found["sensitivity"]["agents"] = self._run(lambda replays: self._search.agents(replays, step, share))

    def _run(self, search: Callable[[Replays], Found]) -> Found:
        return self._replays.searched(search, self._slo_share)

    def _steps_to_look_at(self) -> list[SizeOption]:
        """Return the steps at the knees that fit one replica, its whole memory, and halves of that to fill up."""
        most = self._config.num_pages
        sizes = sorted({*(size for size in self._plan.knees if size < most), most})
        halved = most
        while len(sizes) < NUM_POINTS and (halved := halved // 2) >= min(self._replays.least_pages, most):
            sizes = sorted({*sizes, halved})
        return [SizeOption(1, size) for size in sizes[-NUM_POINTS:]]

    # Answers ----------------------------------------------------------------------------------------------

    def _answers(self, found: Mapping[str, Any]) -> list[Option]:
        """Return the cheapest of what keeps the SLO; if that has host memory, also the cheapest without.

        If nothing keeps it, return what keeps it for the most requests.
        """
        steps: list[SizeOption] = found["steps"] or self._closest()
        options = []
        for step in steps:
            if not found["steps"]:
                name, what = "closest", "nothing that was tried keeps the SLO; this comes closest"
            elif step is steps[0]:
                name, what = "cheapest", f"the least that keeps the SLO for {as_percent(self._slo_share)} of requests"
            elif not step.host_bytes:
                name, what = "devices", "the same without host memory"
            else:
                continue
            option = _option(self._replays, name, step, what, self._slo_share)
            option["keeps_slo"] = bool(found["steps"])
            option["named"] = self._replays.named(step)
            option["price_per_hour"] = self._search.price(self._replays, step)
            option["price_per_million_tokens"] = per_million_tokens(
                self._plan.trace, option["price_per_hour"], self._config
            )
            options.append(option)
        if found["steps"]:
            below = self._below(steps[0])
            if below is not None:
                only = f"the SLO is kept for {as_percent(below[1], bound=self._slo_share)} only"
                options[0]["would_change"].append(f"{below[0]}: {only}")
            options[0]["would_change"] += would_change(found["sensitivity"])
        return options

    def _closest(self) -> list[SizeOption]:
        """Return the replayed step that keeps the SLO for the most requests, in a list; empty without replays."""
        points = self._replays.points()
        if not points:
            return []
        best = min(points, key=lambda point: (-point["slo_ratio"], point["devices"], point["host_bytes"]))
        return [SizeOption(best["replicas"], best["pages"], best["host_bytes"], best["policy"] or "")]

    def _below(self, step: SizeOption) -> tuple[str, float] | None:
        """Return the next cheaper step, in words, and the share of requests for which it keeps the SLO."""
        cheaper = self._search.cheaper(step)
        if cheaper is None or not self._replays.has(cheaper):
            return None
        return self._replays.named(cheaper), self._replays.at(cheaper)["slo_ratio"]

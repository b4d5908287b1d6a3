"""Latencies at chosen points, by replays: which memory and how many replicas keep an SLO, and up to which rate.

Options are *steps* of a ladder, each with more memory than the one before: eighths of the KV memory of one replica,
then all the memory of 2, 3 and more replicas. An SLO is kept where `slo_share` of the requests keep its bounds.
What keeps it is looked for by bisection, so both the step that is recommended and the one below it have been replayed.
Bisection takes it that more never hurts; a ladder where that fails is answered with a step that keeps the SLO next to
one that does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from kvarts.plan.cache import CachePlan
from kvarts.report.advice import advice
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replay import replay

__all__ = ["LatencyPlan", "Step"]

EIGHTHS = 8
MOST_REPLICAS = 64
MOST_RATE = 64.0
RATE_TOLERANCE = 0.05
NUM_POINTS = 5
NEARLY_ALL = 0.99


class Step(msgspec.Struct, frozen=True, order=True):
    """One option: how many replicas, and the pages of each."""

    replicas: int
    pages: int


class LatencyPlan:
    """Replays of one trace under `config`, of which the pages are all the KV memory that a replica can have.

    `command`: answers the command line that replays a step at a rate. `slo_share`: which share of the requests must
    keep the SLO. `router`: for more than one replica.
    """

    def __init__(
        self,
        plan: CachePlan,
        config: ReplayConfig,
        *,
        command: Callable[[dict[str, Any]], str],
        slo_share: float = 0.99,
        router: str = "prefix",
        on_replay: Callable[[], object] | None = None,
    ) -> None:
        self._plan = plan
        self._config = config
        self._command = command
        self._slo_share = slo_share
        self._router = router
        self._on_replay = on_replay
        self._found: dict[tuple[Step, float], dict[str, Any]] = {}
        self._has_slo = any(getattr(config.slo, field) is not None for field in config.slo.__struct_fields__)
        least = min(plan.least_pages, config.num_pages)
        sizes = {max(least, config.num_pages * eighth // EIGHTHS) for eighth in range(1, EIGHTHS + 1)}
        self.ladder = [
            *(Step(1, pages) for pages in sorted(sizes)),
            *(Step(replicas, config.num_pages) for replicas in range(2, MOST_REPLICAS + 1)),
        ]

    def to_builtins(self) -> dict[str, Any]:
        """Replay what is needed, and return what was found, JSON-able."""
        config = self._config
        for step in self._steps_to_look_at():
            self._replayed(step)
        options: list[dict[str, Any] | None] = []
        cheapest = self._cheapest() if self._has_slo else None
        if cheapest is not None:
            options.append(self._cheapest_option(*cheapest))
        options.append(self._option_for("knee", self._plan.main_knee, "the knee of the curve of hits"))
        most = self._plan.curve.size_for(NEARLY_ALL)
        options.append(self._option_for("best", most, f"{NEARLY_ALL:.0%} of the hits that there can be"))
        largest = self._largest_rate() if self._has_slo and config.concurrency is None else None
        return {
            "setting": f"pages of {config.page_size} tokens, at most {config.num_pages:,} a replica",
            "slo": {name: getattr(config.slo, name) for name in config.slo.__struct_fields__},
            "slo_share": self._slo_share if self._has_slo else None,
            "points": [self._found[key] for key in sorted(self._found)],
            "largest_rate": largest,
            "options": [option for option in options if option is not None],
        }

    # Steps ------------------------------------------------------------------------------------------------

    def _steps_to_look_at(self) -> list[Step]:
        """Return the steps at the knees and around them, as far as one replica has the memory; the largest always."""
        most = self._config.num_pages
        sizes = sorted({*(size for size in self._plan.knees if size < most), most})
        halved = most
        while len(sizes) < NUM_POINTS and (halved := halved // 2) >= min(self._plan.least_pages, most):
            sizes = sorted({*sizes, halved})
        return [Step(1, size) for size in sizes[-NUM_POINTS:]]

    def _cheapest(self) -> tuple[Step, Step | None] | None:
        """Return the lowest step that keeps the SLO, and the one below, which does not; None where none is found."""
        first_of_two = next(place for place, step in enumerate(self.ladder) if step.replicas > 1)
        low, high = -1, first_of_two - 1
        while not self._keeps(self.ladder[high]):
            if high == len(self.ladder) - 1:
                return None
            low, high = high, min(len(self.ladder) - 1, first_of_two - 1 + 2 * (high - first_of_two + 2) - 1)
        while high - low > 1:
            middle = (low + high) // 2
            if self._keeps(self.ladder[middle]):
                high = middle
            else:
                low = middle
        return self.ladder[high], self.ladder[low] if low >= 0 else None

    def _largest_rate(self) -> dict[str, Any]:
        """Return the largest rate, relative to the trace, that the replicas of `config` keep the SLO at."""
        step = Step(self._config.replicas, self._config.num_pages)
        rate = self._config.speedup
        low = high = None
        while low is None or high is None:
            if self._keeps(step, rate):
                low = rate
                rate *= 2
            elif high is not None and self._share(step, rate) <= self._share(step, high):
                high = rate
                break  # it is not the rate that the SLO is missed for
            else:
                high = rate
                rate /= 2
            if not 1 / MOST_RATE <= rate <= MOST_RATE:
                break
        while low is not None and high is not None and high / low > 1 + RATE_TOLERANCE:
            middle = (low * high) ** 0.5
            if self._keeps(step, middle):
                low = middle
            else:
                high = middle
        result: dict[str, Any] = {
            "replicas": step.replicas,
            "pages": step.pages,
            "rate": low,
            "fails_at": high,
            "tolerance": RATE_TOLERANCE,
        }
        if low is not None:
            result["command"] = self._command_for(step, low)
        return result

    # Options ----------------------------------------------------------------------------------------------

    def _cheapest_option(self, step: Step, below: Step | None) -> dict[str, Any]:
        option = self._option("cheapest", step, f"the least that keeps the SLO for {self._slo_share:.0%} of requests")
        if below is None:
            option["notes"].append("no smaller step holds every request")
        else:
            share = self._replayed(below)["slo_ratio"]
            option["step_below"] = {"replicas": below.replicas, "pages": below.pages, "slo_ratio": share}
            option["notes"].append(
                f"one step less, {below.replicas} x {below.pages:,} pages, keeps it for {share:.1%} only"
            )
        return option

    def _option_for(self, name: str, num_pages: int, what: str) -> dict[str, Any] | None:
        """Return the option with `num_pages` in all, over as many replicas as that takes; None where it is too many."""
        most = self._config.num_pages
        replicas = -(-num_pages // most)
        if replicas > MOST_REPLICAS:
            return None
        pages = most if replicas > 1 else max(num_pages, min(self._plan.least_pages, most))
        return self._option(name, Step(replicas, pages), what)

    def _option(self, name: str, step: Step, what: str) -> dict[str, Any]:
        point = self._replayed(step)
        kept = point["slo_ratio"]
        notes = [
            f"{point['hit_ratio']:.1%} hits, TTFT p99 {_ms(point['ttft_ms']['p99'])}, "
            f"TPOT p99 {_ms(point['tpot_ms']['p99'])}" + ("" if kept is None else f"; SLO kept by {kept:.1%}"),
            f"limited by {point['limited_by'].replace('_', ' ')}",
        ]
        if point["advice"]:
            notes.append(point["advice"])
        return {
            "name": name,
            "what": f"{what}: {step.replicas} x {step.pages:,} pages",
            "replicas": step.replicas,
            "pages": step.pages,
            "keeps_slo": None if kept is None else kept >= self._slo_share,
            "command": point["command"],
            "notes": notes,
        }

    # Replays ----------------------------------------------------------------------------------------------

    def _keeps(self, step: Step, rate: float | None = None) -> bool:
        return self._share(step, rate) >= self._slo_share

    def _share(self, step: Step, rate: float | None = None) -> float:
        share: float = self._replayed(step, rate)["slo_ratio"]
        return share

    def _replayed(self, step: Step, rate: float | None = None) -> dict[str, Any]:
        """Return what a replay of a step says; each is replayed once."""
        rate = self._config.speedup if rate is None else rate
        if (step, rate) not in self._found:
            if self._on_replay is not None:
                self._on_replay()
            summary = replay(self._plan.trace, self._config_for(step, rate)).summary
            goodput = summary["goodput"]
            self._found[step, rate] = {
                "replicas": step.replicas,
                "pages": step.pages,
                "rate": rate,
                "hit_ratio": summary["prefix_hit_ratio"],
                "predicted_hit_ratio": self._plan.curve.hit_ratio(step.pages) if step.replicas == 1 else None,
                **{name: summary[name] for name in ("ttft_ms", "tpot_ms", "e2e_ms", "queue_ms")},
                "request_throughput_per_s": summary["request_throughput_per_s"],
                "goodput_per_s": None if goodput is None else goodput["requests_per_s"],
                "slo_ratio": None if goodput is None else goodput["ratio"],
                "num_rejected": summary["num_rejected"],
                "num_preemptions": summary["num_preemptions"],
                "limited_by": summary["limited_by"]["cause"],
                "advice": advice(summary),
                "command": self._command_for(step, rate),
            }
        return self._found[step, rate]

    def _config_for(self, step: Step, rate: float) -> ReplayConfig:
        return msgspec.structs.replace(
            self._config,
            num_pages=step.pages,
            replicas=step.replicas,
            router=self._router if step.replicas > 1 else self._config.router,
            speedup=rate,
        )

    def _command_for(self, step: Step, rate: float) -> str:
        changes: dict[str, Any] = {"pages": step.pages}
        if step.replicas > 1:
            changes |= {"replicas": step.replicas, "router": self._router}
        if rate != 1.0:
            changes["speedup"] = rate
        return self._command(changes)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f} ms"

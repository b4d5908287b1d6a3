"""Recommendations of a plan, and latencies at chosen points, by replay: what keeps an SLO, and the highest such rate.

Options form a ladder of *steps*, each with more memory than the one before: eighths of the KV memory of one replica,
then all the memory of 2, 3 and more replicas. An SLO is kept if `slo_share` of the requests keep its bounds. The
search is a bisection, so both the recommended step and the one below it have been replayed.

The searches assume that more memory, more replicas or a lower rate never hurt. Where that does not hold, they still
return two neighbours, one that meets the requirement and one that does not; both have been replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from kvarts.base.processes import Processes
from kvarts.base.units import as_hits, as_percent
from kvarts.core.parts.combines import check_combination
from kvarts.plan.cache import HitPlan
from kvarts.plan.replays import Replays, SizeOption
from kvarts.sim.config import ReplayConfig
from kvarts.sim.report.words import plus_minus

if TYPE_CHECKING:
    from kvarts.sim.router import RouterMaker

__all__ = [
    "COST_ERROR",
    "MOST_REPLICAS",
    "LatencyPlan",
    "SizeOption",
    "between",
    "cheapest_option",
    "cost_error_of",
    "first_from",
    "first_that",
    "ladder_of",
    "lowest_known",
    "other_option",
]

MOST_RATE = 64.0
RATE_TOLERANCE = 0.05
NUM_POINTS = 5
NEARLY_ALL = 0.99
COST_ERROR = 0.15
"""Relative error of costs that is assumed if the cost model gives none."""
NINE_IN_TEN = 1.28
"""One-sided normal quantile of 0.9, in standard deviations."""
SLOWER_WORLDS = (0.126, 0.385, 0.674, 1.036, 1.645)
"""The middles of the upper five tenths of a normal distribution, in standard deviations."""
EIGHTHS = 8
MOST_REPLICAS = 64
Option = dict[str, Any]


def ladder_of(least_pages: int, num_pages: int, sizes: Iterable[int] = ()) -> list[SizeOption]:
    """Return eighths of one replica's memory, none too small for the largest request, then whole replicas.

    `sizes`: further sizes of a single replica to include.
    """
    least = min(least_pages, num_pages)
    eighths = {max(least, num_pages * eighth // EIGHTHS) for eighth in range(1, EIGHTHS + 1)}
    among = {size for size in sizes if least <= size <= num_pages}
    return [
        *(SizeOption(1, pages) for pages in sorted(eighths | among)),
        *(SizeOption(replicas, num_pages) for replicas in range(2, MOST_REPLICAS + 1)),
    ]


def first_that(keeps: Callable[[int], bool], start: int, end: int) -> int | None:
    """Return the lowest place below `end` where `keeps` holds, or None if none is found. `start` is tried first."""
    return between(keeps, -1, start) if keeps(start) else first_from(keeps, start, end)


def first_from(keeps: Callable[[int], bool], fails: int, end: int) -> int | None:
    """Return the lowest place in (`fails`, `end`) where `keeps` holds, or None. It does not hold at `fails`."""
    reach = 1
    while fails < end - 1:
        place = min(end - 1, fails + reach)
        if keeps(place):
            return between(keeps, fails, place)
        fails, reach = place, reach * 2
    return None


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


def between(keeps: Callable[[int], bool], fails: int, kept: int) -> int:
    """Return the lowest place where `keeps` holds, by bisection. It fails at `fails` and holds at `kept`."""
    while kept - fails > 1:
        middle = (fails + kept) // 2
        if keeps(middle):
            kept = middle
        else:
            fails = middle
    return kept


def cheapest_option(
    replays: Replays, step: SizeOption, below: SizeOption | None, slo_share: float, found: Mapping[str, Any]
) -> Option:
    """Return the smallest step that keeps the SLO. `below`: the next smaller. `found`: results of other searches."""
    option = _option(
        replays, "cheapest", step, f"the least that keeps the SLO for {as_percent(slo_share)} of requests", slo_share
    )
    option["keeps_slo"] = True
    if below is None:
        option["would_change"].append("no smaller step holds every request")
    else:
        share = replays.at(below)["slo_ratio"]
        option["step_below"] = {
            "replicas": below.replicas,
            "pages": below.pages,
            "slo_ratio": share,
            "command": replays.at(below)["command"],
        }
        only = f"{as_percent(share, bound=slo_share)} only"
        option["would_change"].append(f"one step less, {replays.named(below)}, keeps the SLO for {only}")
    option["would_change"] += [
        *_by_rate(step, found.get("largest_rate")),
        *_by_cost(replays, found["sensitivity"]),
        *_by_router(found["replicas"]),
    ]
    return option


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
        f"limited by {point['limited_by'].replace('_', ' ')}",
    ]
    sentence = replays.advice(step)
    if sentence:
        notes.append(sentence)
    return {
        "name": name,
        "what": f"{what}: {replays.named(step)}",
        "replicas": step.replicas,
        "devices": point["devices"],
        "pages": step.pages,
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


def _by_rate(step: SizeOption, largest: Mapping[str, Any] | None) -> list[str]:
    """Return the highest rate that `step` sustains, if the largest rate was searched for with this step."""
    if (
        largest is None
        or largest["rate"] is None
        or (largest["replicas"], largest["pages"])
        != (
            step.replicas,
            step.pages,
        )
    ):
        return []
    until = "" if largest["fails_at"] is None else f", and not at {largest['fails_at']:.3g} times"
    return [f"it keeps the SLO up to {largest['rate']:.3g} times the rate of the trace{until}"]


def _by_cost(replays: Replays, sensitivity: Mapping[str, Any]) -> list[str]:
    worlds = sensitivity["worlds"]
    texts = [f"it keeps the SLO in {worlds['kept']} of {worlds['of']} worlds, by the errors of the cost model"]
    for answer, way in zip(sensitivity["answers"], ("shorter", "longer"), strict=True):
        cheapest = answer["cheapest"]
        if cheapest is None:
            then = "nothing keeps it"
        elif cheapest["is_same"]:
            then = "the answer is the same"
        else:
            then = f"it takes {replays.named(SizeOption(cheapest['replicas'], cheapest['pages']))}"
        texts.append(f"if steps are {as_percent(sensitivity['cost_error'])} {way} than the cost model says, {then}")
    return texts


def _by_router(replicas: Mapping[str, Any]) -> list[str]:
    rows = replicas["by_router"]
    if all(row["replicas"] == 1 for row in rows):
        return []
    texts = [f"{'too many' if row['replicas'] is None else row['replicas']} with {row['router']}" for row in rows]
    return ["replicas it takes: " + ", ".join(texts)]


def cost_error_of(cost: object) -> float:
    """Return the relative slowdown of steps that is not exceeded in 9 of 10 cases.

    It is computed from the held-out errors of the built-in constants. For a cost model without these, it is COST_ERROR.
    """
    error = getattr(cost, "held_out", {}).get("tpot")
    return COST_ERROR if error is None else round(min(0.9, NINE_IN_TEN * error.one_sigma), 2)


def world_factor(cost_error: float, deviations: float) -> float:
    """Return the factor on step times that is `deviations` standard deviations above the predicted time."""
    factor: float = (1.0 + cost_error) ** (deviations / NINE_IN_TEN)
    return round(factor, 4)


class SearchOutcome(msgspec.Struct, frozen=True):
    """The results of a search. `cheapest`: the place of that step in the ladder, if any keeps the SLO.

    `fewest`: the fewest replicas with all their memory that keep it, per router; None: too many. `rate`, `fails_at`:
    the highest rate of `rate_step`, and the lowest above it that does not keep the SLO. `answers`: for a cost factor,
    the place of the cheapest step. `kept`: the worlds in which the cheapest step keeps it.
    """

    cheapest: int | None
    fewest: dict[str, int | None]
    rate_step: SizeOption | None
    rate: float | None
    fails_at: float | None
    answers: dict[float, int | None]
    kept: int


class LatencySearch:
    """The searches of a plan among `replays`, for what keeps the SLO for `slo_share` of the requests.

    The search depends on nothing but shares of replays. `looked_at`: steps that are replayed first.
    """

    def __init__(
        self,
        replays: Replays,
        config: ReplayConfig,
        ladder: Sequence[SizeOption],
        looked_at: Sequence[SizeOption],
        *,
        slo_share: float,
        cost_error: float,
    ) -> None:
        self._replays = replays
        self._config = config
        self._ladder = ladder
        self._looked_at = looked_at
        self._slo_share = slo_share
        self._cost_error = cost_error

    def run(self) -> SearchOutcome:
        """Return what all searches find."""
        self._replays.look(self._looked_at)
        place = self._cheapest()
        fewest = self._fewest()
        rate_step = rate = fails_at = None
        if self._config.concurrency is None:
            # All the memory of the configured replicas, or of those of the cheapest option if these are more.
            replicas = 1 if place is None else self._ladder[place].replicas
            rate_step = SizeOption(max(replicas, self._config.replicas), self._config.num_pages)
            rate, fails_at = self._largest_rate(rate_step)
        answers: dict[float, int | None] = {}
        kept = 0
        if place is not None:
            answers = {factor: self._answer(place, factor) for factor in (1 - self._cost_error, 1 + self._cost_error)}
            kept = self._kept_worlds(place)
        return SearchOutcome(place, fewest, rate_step, rate, fails_at, answers, kept)

    def _cheapest(self) -> int | None:
        """Return the index of the lowest replayed step that keeps the SLO; the step below it, if any, does not."""

        def keeps(place: int) -> bool:
            return self._keeps(self._ladder[place])

        whole = next(place for place, step in enumerate(self._ladder) if step.replicas > 1) - 1
        found = first_that(keeps, whole, len(self._ladder))
        places = range(len(self._ladder))
        return lowest_known(keeps, found, lambda place: self._replays.has(self._ladder[place]), places)

    def _fewest(self) -> dict[str, int | None]:
        """Return, per router, the fewest replicas with all their memory that keep the SLO."""
        num_pages = self._config.num_pages
        of_routers: dict[str, int | None] = {}
        start = 1
        for name in sorted(self._replays.routers, key=lambda name: name != self._replays.router):

            def keeps(replicas: int, name: str = name) -> bool:
                return self._keeps(SizeOption(replicas, num_pages), router=name)

            def is_known(replicas: int, name: str = name) -> bool:
                return self._replays.has(SizeOption(replicas, num_pages), router=name)

            fewest: int | None
            if keeps(1):
                fewest = 1
            elif start > 1 and keeps(start):
                fewest = between(keeps, 1, start)  # routers do not differ much
            else:
                fewest = first_from(keeps, start, MOST_REPLICAS + 1)
            fewest = lowest_known(keeps, fewest, is_known, range(1, MOST_REPLICAS + 1))
            if fewest is not None:
                start = fewest
                if fewest > 1:
                    keeps(fewest - 1)
            of_routers[name] = fewest
        return of_routers

    def _largest_rate(self, step: SizeOption) -> tuple[float | None, float | None]:
        """Return the highest rate, relative to the trace, at which a step keeps the SLO, and one at which it does not.

        Either is None if none was found.
        """
        rate = self._config.speedup
        low = high = None
        while low is None or high is None:
            if self._keeps(step, rate=rate):
                low = rate
                rate *= 2
            elif high is not None and self._share(step, rate=rate) <= self._share(step, rate=high):
                high = rate
                break  # halving the rate did not help, so the rate is not the cause
            else:
                high = rate
                rate /= 2
            if not 1 / MOST_RATE <= rate <= MOST_RATE:
                break
        while low is not None and high is not None and high / low > 1 + RATE_TOLERANCE:
            middle = (low * high) ** 0.5
            if self._keeps(step, rate=middle):
                low = middle
            else:
                high = middle
        return low, high

    def _answer(self, place: int, factor: float) -> int | None:
        """Return the place of the cheapest step if steps take `factor` times as long as the cost model predicts."""

        def keeps(tried: int) -> bool:
            return self._keeps(self._ladder[tried], cost_factor=factor)

        if not keeps(place):
            return first_from(keeps, place, len(self._ladder))
        if factor > 1 or place == 0 or not keeps(place - 1):
            return place
        return first_that(keeps, place - 1, place)

    def _kept_worlds(self, place: int) -> int:
        """Return in how many of ten equally likely worlds the recommended step keeps the SLO.

        Worlds differ in the time of steps: its logarithm is normal, and exceeds 1 + `cost_error` in one of ten. In the
        five worlds with shorter steps than predicted, the SLO is kept, as it is with the predicted ones.
        """
        step = self._ladder[place]

        def breaks(world: int) -> bool:
            return not self._keeps(step, cost_factor=world_factor(self._cost_error, SLOWER_WORLDS[world]))

        num_slower = len(SLOWER_WORLDS)
        kept = first_that(breaks, 0, num_slower)
        return num_slower + (num_slower if kept is None else kept)

    def _keeps(self, step: SizeOption, **changes: Any) -> bool:
        return self._share(step, **changes) >= self._slo_share

    def _share(self, step: SizeOption, **changes: Any) -> float:
        return self._replays.share(step, **changes)


class LatencyPlan:
    """Replays of one trace under `config`. The pages of `config` are all the KV memory that a replica can have.

    `command` returns the command line that replays a step at a rate. `slo_share`: the share of requests that must keep
    the SLO. `router`: used with more than one replica. `cost_error`: relative error of costs; None: `cost_error_of`.
    `processes`: those that replay, which share the trace; default: this one.
    """

    def __init__(
        self,
        plan: HitPlan,
        config: ReplayConfig,
        *,
        command: Callable[[dict[str, Any]], str],
        slo_share: float = 0.99,
        router: str | RouterMaker = "prefix",
        cost_error: float | None = None,
        on_replay: Callable[[], object] | None = None,
        processes: Processes | None = None,
    ) -> None:
        check_combination({**config.features, "plan": "command"})
        self._plan = plan
        self._config = config
        self._slo_share = slo_share
        self._cost_error = cost_error_of(config.cost) if cost_error is None else cost_error
        self._replays = Replays(plan, config, command=command, router=router, on_replay=on_replay, processes=processes)
        self._has_slo = any(getattr(config.slo, field) is not None for field in config.slo.__struct_fields__)
        self._others = {
            "knee": (plan.main_knee, "the knee of the curve of hits"),
            "best": (plan.curve.size_for(NEARLY_ALL), f"{as_percent(NEARLY_ALL)} of the hits that there can be"),
        }
        looked_at = [step.pages for step in self._steps_to_look_at()]
        sizes = [*looked_at, *(pages for pages, _ in self._others.values())]
        self.ladder = ladder_of(self._replays.least_pages, config.num_pages, sizes)

    def to_builtins(self) -> dict[str, Any]:
        """Run the replays that are needed and return the results, JSON-able."""
        config = self._config
        found: dict[str, Any] = {}
        searched = None
        if self._has_slo:
            searched = self._replays.searched(self._search, self._slo_share)
        else:
            self._replays.look(self._first_steps())
        share = self._slo_share if self._has_slo else None
        options = [
            other_option(self._replays, self._plan, name, num_pages, what, config.num_pages, share)
            for name, (num_pages, what) in self._others.items()
        ]
        if searched is not None:
            place = searched.cheapest
            found["replicas"] = self._replicas(searched)
            if searched.rate_step is not None:
                found["largest_rate"] = self._largest_rate(searched, searched.rate_step)
            if place is not None:
                found["sensitivity"] = self._sensitivity(searched, place)
                below = None if place == 0 else self.ladder[place - 1]
                cheap = cheapest_option(self._replays, self.ladder[place], below, self._slo_share, found)
                options.insert(0, cheap)
                if not options[-1]["keeps_slo"]:
                    options[-1] = self._best_that_keeps(self.ladder[place], options[-1])
        return {
            "setting": f"pages of {config.page_size} tokens, at most {config.num_pages:,} a replica",
            "slo": {name: getattr(config.slo, name) for name in config.slo.__struct_fields__},
            "slo_share": self._slo_share if self._has_slo else None,
            "router": self._replays.router,
            "cost_factor": config.cost_factor,
            "points": self._replays.points(),
            "largest_rate": found.get("largest_rate"),
            "replicas": found.get("replicas"),
            "sensitivity": found.get("sensitivity"),
            "options": options,
        }

    def _best_that_keeps(self, cheapest: SizeOption, best: dict[str, Any]) -> dict[str, Any]:
        """Return the option with most hits. It is enlarged to the memory of `cheapest` if `best` has less."""
        num_pages, what = self._others["best"]
        total = cheapest.replicas * cheapest.pages
        if total <= num_pages:
            return best
        most = self._config.num_pages
        what = f"{what}, with the SLO kept"
        return other_option(self._replays, self._plan, "best", total, what, most, self._slo_share)

    # Searches ---------------------------------------------------------------------------------------------

    def _search(self, replays: Replays) -> SearchOutcome:
        return LatencySearch(
            replays,
            self._config,
            self.ladder,
            self._first_steps(),
            slo_share=self._slo_share,
            cost_error=self._cost_error,
        ).run()

    def _first_steps(self) -> list[SizeOption]:
        """Return the steps that are replayed in any case."""
        others = [size_option(self._replays, pages, self._config.num_pages) for pages, _ in self._others.values()]
        return [*self._steps_to_look_at(), *others]

    def _steps_to_look_at(self) -> list[SizeOption]:
        """Return the steps at the knees that fit one replica, its whole memory, and halves of that to fill up."""
        most = self._config.num_pages
        sizes = sorted({*(size for size in self._plan.knees if size < most), most})
        halved = most
        while len(sizes) < NUM_POINTS and (halved := halved // 2) >= min(self._replays.least_pages, most):
            sizes = sorted({*sizes, halved})
        return [SizeOption(1, size) for size in sizes[-NUM_POINTS:]]

    def _replicas(self, searched: SearchOutcome) -> dict[str, Any]:
        """Return, per router, the fewest replicas with all their memory that keep the SLO."""
        num_pages = self._config.num_pages
        routers = []
        for name, fewest in searched.fewest.items():
            row: dict[str, Any] = {"router": name, "replicas": fewest}
            if fewest is not None:
                found = self._replays.at(SizeOption(fewest, num_pages), router=name)
                row |= {"slo_ratio": found["slo_ratio"], "command": found["command"]}
                if fewest > 1:
                    fewer = self._replays.at(SizeOption(fewest - 1, num_pages), router=name)
                    row["one_less"] = {"replicas": fewest - 1, "slo_ratio": fewer["slo_ratio"]}
            routers.append(row)
        return {"pages": num_pages, "by_router": routers}

    def _largest_rate(self, searched: SearchOutcome, step: SizeOption) -> dict[str, Any]:
        """Return the highest rate, relative to the trace, at which replicas with all their memory keep the SLO."""
        result: dict[str, Any] = {
            "replicas": step.replicas,
            "pages": step.pages,
            "rate": searched.rate,
            "fails_at": searched.fails_at,
            "tolerance": RATE_TOLERANCE,
        }
        if searched.rate is not None:
            result["command"] = self._replays.at(step, rate=searched.rate)["command"]
        return result

    def _sensitivity(self, searched: SearchOutcome, place: int) -> dict[str, Any]:
        """Return the cheapest step if steps take `cost_error` less or more time than the cost model predicts."""
        answers = []
        for factor, found in searched.answers.items():
            recommended = self._replays.at(self.ladder[place], cost_factor=factor)
            answer: dict[str, Any] = {
                "cost_factor": recommended["cost_factor"],
                "slo_ratio": recommended["slo_ratio"],
                "command": recommended["command"],
                "cheapest": None,
            }
            if found is not None:
                step = self.ladder[found]
                answer["cheapest"] = {"replicas": step.replicas, "pages": step.pages, "is_same": found == place}
            answers.append(answer)
        worlds = {"kept": searched.kept, "of": 2 * len(SLOWER_WORLDS)}
        return {"cost_error": self._cost_error, "answers": answers, "worlds": worlds}

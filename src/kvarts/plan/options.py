"""Recommendations of a plan. Each has a command that replays it, its bottleneck, and what would change it.

The searches assume that more memory, more replicas or a lower rate never hurt. Where that does not hold, they still
return two neighbours, one that meets the requirement and one that does not; both have been replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvarts.plan.cache import CachePlan
from kvarts.plan.replays import Replays, SizeOption
from kvarts.report.words import plus_minus
from kvarts.units import as_percent

__all__ = [
    "MOST_REPLICAS",
    "between",
    "cheapest_option",
    "first_from",
    "first_that",
    "ladder_of",
    "lowest_known",
    "other_option",
]

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
    replays: Replays, plan: CachePlan, name: str, num_pages: int, what: str, most: int, slo_share: float | None
) -> Option:
    """Return the option with `num_pages` over replicas of at most `most` each, or the closest that replicas allow."""
    needed = max(1, -(-num_pages // most))
    replicas = min(needed, MOST_REPLICAS)
    pages = most if replicas > 1 else max(num_pages, min(replays.least_pages, most))
    option = _option(replays, name, SizeOption(replicas, pages), what, slo_share)
    if needed > replicas:
        option["notes"].append(f"it would take {needed:,} replicas; this is as many as are tried")
    if slo_share is not None:
        option["keeps_slo"] = replays.at(SizeOption(replicas, pages))["slo_ratio"] >= slo_share
    if replays.counts_groups:
        option["notes"].append("the curve of hits, which this size is from, counts whole pages")
        return option
    total = replicas * pages
    now, half, twice = (plan.curve.hit_ratio(size) for size in (total, max(total // 2, plan.least_pages), 2 * total))
    optimum = plan.point(total)["optimum_hit_ratio"]
    found = as_percent(now)
    option["would_change"] = [
        f"one request at a time these pages find {found}, half of them {as_percent(half)}, twice {as_percent(twice)}",
        f"a policy that knew the future would find {as_percent(optimum)} with the same pages",
    ]
    return option


def _option(replays: Replays, name: str, step: SizeOption, what: str, slo_share: float | None) -> Option:
    point = replays.at(step)
    kept = point["slo_ratio"]
    spread = replays.spread(step)
    ttft, tpot = (
        plus_minus(point[metric]["p99"], None if spread is None else spread[metric]["p99"])
        for metric in ("ttft_ms", "tpot_ms")
    )
    notes = [
        f"{as_percent(point['hit_ratio'])} hits, TTFT p99 {ttft}, TPOT p99 {tpot}"
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

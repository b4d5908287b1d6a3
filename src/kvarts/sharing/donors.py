"""Which running requests are preempted when another model needs pages: the fewest computed tokens that are enough."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from kvarts.request import Request
from kvarts.sched.scheduler import Scheduler

__all__ = ["Victims", "cheapest", "victims_of"]


class Victims(msgspec.Struct, frozen=True):
    """The memory that is freed by preempting the first `count` victims of a model, and the computed tokens lost."""

    count: int
    num_bytes: int
    lost_tokens: int


def victims_of(scheduler: Scheduler, *, below_priority: int, page_bytes: int, enough_bytes: int) -> list[Victims]:
    """Return an entry for each number of victims of `scheduler`, up to the number that frees `enough_bytes`.

    Victims come in the scheduler's own order and have a priority strictly `below_priority`. Pages that they share with
    others stay in use until those are preempted as well, and pages that a transfer holds until it has ended.
    """
    found: list[Victims] = []
    num_pages = lost = 0
    held: Counter[int] = Counter()
    for count, request in enumerate(_in_order(scheduler, below_priority), 1):
        holding = request.holding
        assert holding is not None
        num_private = scheduler.running.num_pages_of(request) - (holding.path[-1].end if holding.path else 0)
        num_pages += num_private
        for node in scheduler.cache.tree.walk(holding.path):
            held[id(node)] += 1
            if held[id(node)] == node.refs and not node.holds:
                num_pages += node.end - node.start
        lost += scheduler.running.num_computed(request)
        found.append(Victims(count, num_pages * page_bytes, lost))
        if found[-1].num_bytes >= enough_bytes:
            break
    return found


def _in_order(scheduler: Scheduler, below_priority: int) -> list[Request]:
    """Return running requests with a priority below, the lowest priority first, then the last admitted."""
    less = [request for request in scheduler.running if request.priority < below_priority]
    return sorted(less, key=lambda request: (request.priority, -request.admission))


def cheapest(choices: Sequence[Sequence[Victims]], limits: Sequence[int], num_bytes: int) -> list[int] | None:
    """Return how many victims each model gives up; together they free `num_bytes`, each counted up to its limit.

    Of all ways that are enough, return one that loses the fewest tokens, and of these the fewest victims; None if
    there is none. Time and memory grow with the number of undominated combinations: few, as each model gives up its
    victims in one order.
    """
    # (lost tokens, victims, bytes freed, counts by model): no entry is worse than another in all of the first three.
    ways: list[tuple[int, int, int, tuple[int, ...]]] = [(0, 0, 0, ())]
    for choice, limit in zip(choices, limits, strict=True):
        longer = []
        for lost, count, freed, counts in ways:
            longer.append((lost, count, freed, (*counts, 0)))
            longer += [
                (
                    lost + victims.lost_tokens,
                    count + victims.count,
                    min(num_bytes, freed + min(victims.num_bytes, limit)),
                    (*counts, victims.count),
                )
                for victims in choice
            ]
        longer.sort(key=lambda way: (way[0], way[1], -way[2]))
        ways = []
        most = -1
        for way in longer:
            if way[2] > most:
                ways.append(way)
                most = way[2]
    lost, count, freed, counts = ways[-1]
    return list(counts) if freed >= num_bytes else None

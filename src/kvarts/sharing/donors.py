"""Choice of the running requests that are preempted when another model needs pages.

Priority is weighed before cost: among all sufficient choices, one that loses the least important work, that is, the
fewest computed tokens of the highest priority, then of the next one, and so on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from kvarts.request import Request
from kvarts.sched.scheduler import Scheduler

Lost = tuple[tuple[int, int], ...]
"""Tokens and victims, the highest priority first."""

__all__ = ["Victims", "cheapest", "victims_of"]


class Victims(msgspec.Struct, frozen=True):
    """The memory that is freed by preempting the first `count` victims of a model, and the computed tokens lost.

    `lost`: these tokens, and the number of victims, by priority.
    """

    count: int
    num_bytes: int
    lost: dict[int, tuple[int, int]]

    @property
    def lost_tokens(self) -> int:
        """Computed tokens lost, whatever the priority."""
        return sum(num_tokens for num_tokens, _ in self.lost.values())


def victims_of(scheduler: Scheduler, *, below_priority: int, page_bytes: int, enough_bytes: int) -> list[Victims]:
    """Return an entry for each number of victims of `scheduler`, up to the number that frees `enough_bytes`.

    Victims are in the scheduler's own order and have a priority strictly `below_priority`. Pages that they share with
    others stay in use until those are preempted as well, and pages that a transfer holds until it has ended.
    """
    found: list[Victims] = []
    num_pages = 0
    lost: dict[int, tuple[int, int]] = {}
    requests = _in_order(scheduler, below_priority)
    for count, (request, num_freed) in enumerate(zip(requests, _freed_by(scheduler, requests), strict=True), 1):
        num_pages += num_freed
        num_tokens, num_victims = lost.get(request.priority, (0, 0))
        num_tokens += scheduler.running.num_computed(request)
        lost = {**lost, request.priority: (num_tokens, num_victims + 1)}
        found.append(Victims(count, num_pages * page_bytes, lost))
        if found[-1].num_bytes >= enough_bytes:
            break
    return found


def _freed_by(scheduler: Scheduler, requests: Sequence[Request]) -> Iterator[int]:
    """Return the pages that each of `requests` frees if the earlier ones have ended."""
    running = scheduler.running
    return scheduler.cache.freed_by((request.holding, running.num_pages_of(request)) for request in requests)


def _in_order(scheduler: Scheduler, below_priority: int) -> list[Request]:
    """Return running requests of lower priority, the lowest priority first, then the least senior."""
    less = [request for request in scheduler.running if request.priority < below_priority]
    return sorted(less, key=lambda request: (request.priority, -request.seniority))


def cheapest(choices: Sequence[Sequence[Victims]], limits: Sequence[int], num_bytes: int) -> list[int] | None:
    """Return the number of victims of each model that together free `num_bytes`, each model counted up to its limit.

    Among all sufficient choices, return one that loses the fewest tokens of the highest priority, then the fewest
    victims of that priority, then the same for the next priority, and so on; None if all are too small. Time and memory
    grow with the number of undominated combinations: few, as each model's victims have a fixed order.
    """
    priorities = sorted({priority for choice in choices if choice for priority in choice[-1].lost}, reverse=True)
    # (lost tokens and victims, bytes freed, counts by model): no entry is worse than another in both of the first two.
    ways: list[tuple[Lost, int, tuple[int, ...]]] = [(((0, 0),) * len(priorities), 0, ())]
    for choice, limit in zip(choices, limits, strict=True):
        longer = [(lost, freed, (*counts, 0)) for lost, freed, counts in ways]
        for victims in choice:
            more = [victims.lost.get(priority, (0, 0)) for priority in priorities]
            num_bytes_more = min(victims.num_bytes, limit)
            longer += [
                (
                    tuple([(of[0] + add[0], of[1] + add[1]) for of, add in zip(lost, more, strict=True)]),
                    min(num_bytes, freed + num_bytes_more),
                    (*counts, victims.count),
                )
                for lost, freed, counts in ways
            ]
        longer.sort(key=lambda way: (way[0], -way[1]))
        ways = []
        most = -1
        for way in longer:
            if way[1] > most:
                ways.append(way)
                most = way[1]
    _, freed, counts = ways[-1]
    return list(counts) if freed >= num_bytes else None

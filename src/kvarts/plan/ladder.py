"""The steps that a plan chooses from, each with more memory than the one before, and searches along them.

Searches take it that more memory, more replicas and a lower rate never hurt. Where that fails they still answer with
something that keeps what is asked for, next to something that does not: both have been tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvarts.plan.replays import Step

__all__ = ["MOST_REPLICAS", "between", "first_from", "first_that", "ladder_of", "lowest_known"]

EIGHTHS = 8
MOST_REPLICAS = 64


def ladder_of(least_pages: int, num_pages: int, sizes: Iterable[int] = ()) -> list[Step]:
    """Return eighths of the memory of one replica, from what every request fits into, then more replicas.

    `sizes`: of one replica, which are steps as well.
    """
    least = min(least_pages, num_pages)
    eighths = {max(least, num_pages * eighth // EIGHTHS) for eighth in range(1, EIGHTHS + 1)}
    among = {size for size in sizes if least <= size <= num_pages}
    return [
        *(Step(1, pages) for pages in sorted(eighths | among)),
        *(Step(replicas, num_pages) for replicas in range(2, MOST_REPLICAS + 1)),
    ]


def first_that(keeps: Callable[[int], bool], start: int, end: int) -> int | None:
    """Return the lowest place below `end` that keeps it; None where none found does. `start` is tried first."""
    return between(keeps, -1, start) if keeps(start) else first_from(keeps, start, end)


def first_from(keeps: Callable[[int], bool], fails: int, end: int) -> int | None:
    """Return the lowest place after `fails`, which does not keep it, and below `end`; None where none found does."""
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
    """Return the lowest of `places` that is known to keep it, the one before which does not; `found` for none lower.

    A search finds one place of several where more may be worse.
    """
    lower = (place for place in places if (found is None or place < found) and is_known(place) and keeps(place))
    lowest = next(lower, None)
    if lowest is None:
        return found
    while lowest > places.start and keeps(lowest - 1):
        lowest -= 1
    return lowest


def between(keeps: Callable[[int], bool], fails: int, kept: int) -> int:
    """Return the lowest place that keeps it, where `fails` does not and `kept` does."""
    while kept - fails > 1:
        middle = (fails + kept) // 2
        if keeps(middle):
            kept = middle
        else:
            fails = middle
    return kept

"""The ladder of options that a plan chooses from, each with more memory than the one before, and searches along it.

The searches assume that more memory, more replicas or a lower rate never hurt. Where that does not hold, they still
return two neighbours, one that meets the requirement and one that does not; both have been replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvarts.plan.replays import SizeOption

__all__ = ["MOST_REPLICAS", "between", "first_from", "first_that", "ladder_of", "lowest_known"]

EIGHTHS = 8
MOST_REPLICAS = 64


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

"""Search for fleets by a monotone law: more workers of a pool never lower the goodput, nor break an SLO that is kept.

Fleets of a *family* differ only in the numbers of their workers. A replayed fleet is therefore an upper bound for all
fleets of its family that have no more workers in any pool. A fleet is not replayed if its upper bound is no better than
a replayed fleet with as many devices or fewer; nor if a fleet with fewer devices keeps the SLO.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import msgspec

__all__ = ["Family", "Fleet", "FleetOutcome", "FleetSearch"]

BATCH = 4
"""Fleets that are replayed before bounds are applied again: a constant, so that processes do not change the search."""


class Family(msgspec.Struct, frozen=True):
    """Fleets of the same pools. `sizes`: devices of a worker, per pool.

    `skips`: numbers of workers that other families also have, such as one worker behind another router.
    """

    sizes: tuple[int, ...]
    skips: frozenset[tuple[int, ...]] = frozenset()


class Fleet(msgspec.Struct, frozen=True, order=True):
    """One fleet: the place of its family, and its workers per pool."""

    family: int
    counts: tuple[int, ...]


class FleetOutcome(msgspec.Struct, frozen=True):
    """The outcome of a replay. `keeps`: whether enough requests keep the SLO.

    `goodput`: a measure of the requests that do, which more workers do not lower. `also`: decides among equals.
    """

    goodput: float
    keeps: bool
    also: float = 0.0


class FleetSearch:
    """The best fleets of `families` with at most `most_devices`. `measure` replays several fleets at once.

    With `ends`, the search ends at the fewest devices that keep the SLO: more of them have nothing to gain.
    """

    def __init__(
        self,
        families: Sequence[Family],
        most_devices: int,
        measure: Callable[[Sequence[Fleet]], Sequence[FleetOutcome]],
        *,
        ends: bool = True,
    ) -> None:
        self.families = list(families)
        self.known: dict[Fleet, FleetOutcome] = {}
        """The replayed fleets."""
        self.limit = most_devices
        """The most devices of fleets that are still of interest."""
        self._measure = measure
        self._ends = ends
        self.fleets = sorted(self._all(most_devices), key=lambda fleet: (self.devices(fleet), fleet))
        """All fleets with at most `most_devices`, the smallest first."""
        self._by_devices: dict[int, list[Fleet]] = {}
        for fleet in self.fleets:
            self._by_devices.setdefault(self.devices(fleet), []).append(fleet)

    def devices(self, fleet: Fleet) -> int:
        """Return the number of devices of a fleet."""
        return sum(map(int.__mul__, fleet.counts, self.families[fleet.family].sizes))

    def run(self) -> None:
        """Replay the fleets that may be on the front, or the best of their number of pools within the limit."""
        self._climb([fleet for fleet in self.fleets if len(fleet.counts) == 1])
        self._lower_limit([fleet for fleet in self.fleets if len(fleet.counts) > 1])
        self._descend()

    def front(self) -> list[Fleet]:
        """Return the replayed fleets that have more goodput than all with as many devices or fewer, smallest first.

        Fleets with equal devices and goodput are represented by the first. Devices beyond the limit are left out.
        """
        found: list[Fleet] = []
        for fleet in self.in_order():
            if self.devices(fleet) <= self.limit and (
                not found or self.known[fleet].goodput > self.known[found[-1]].goodput
            ):
                found.append(fleet)
        return found

    def in_order(self) -> list[Fleet]:
        """Return the replayed fleets: the smallest first, among equals those with the most goodput."""

        def rank(fleet: Fleet) -> tuple[int, float, float, Fleet]:
            found = self.known[fleet]
            return self.devices(fleet), -found.goodput, -found.also, fleet

        return sorted(self.known, key=rank)

    def pairs(self) -> Iterator[tuple[FleetOutcome, FleetOutcome]]:
        """Yield the replays of a family of which one has no more workers in any pool than the other; that one first."""
        for fleet, found in self.known.items():
            for other, larger in self.known.items():
                if other != fleet and other.family == fleet.family and _covers(other, fleet):
                    yield found, larger

    # Steps ----------------------------------------------------------------------------------------------------

    def _climb(self, fleets: Sequence[Fleet]) -> None:
        """Replay `fleets`, the smallest first, until one keeps the SLO."""
        for start in range(0, len(fleets), BATCH):
            self._replay([fleet for fleet in fleets[start : start + BATCH] if self.devices(fleet) <= self.limit])

    def _lower_limit(self, fleets: Sequence[Fleet]) -> None:
        """Find the fewest devices with which one of `fleets` keeps the SLO, by bisection; the limit becomes these."""
        if not self._ends or not fleets:
            return
        high = self.limit
        is_kept = any(each.keeps for each in self.known.values())
        low = self.devices(fleets[0]) - 1
        most = high - 1 if is_kept else high
        if most <= low or not self._reaches(fleets, most):
            return
        high = self.limit
        while high - low > 1:
            middle = (low + high) // 2
            if self._reaches(fleets, middle):
                high = min(middle, self.limit)
            else:
                low = middle

    def _reaches(self, fleets: Sequence[Fleet], num_devices: int) -> bool:
        """Return whether one of `fleets` with at most `num_devices` keeps the SLO.

        Only fleets without room for another worker are replayed, those with the most even pools first.
        """
        full = [fleet for fleet in fleets if self.devices(fleet) <= num_devices and self._is_full(fleet, num_devices)]
        full.sort(key=lambda fleet: (self._unevenness(fleet), fleet))
        while True:
            if any(self.known[fleet].keeps for fleet in full if fleet in self.known):
                return True
            rest = [fleet for fleet in full if fleet not in self.known and self._may_keep(fleet)]
            if not rest:
                return False
            self._replay(rest[:BATCH])

    def _descend(self) -> None:
        """Replay the fleets whose bounds permit them to be on the front, the largest first.

        At the limit itself, fleets are only compared with those of as many pools: each kind has its best there.
        """
        for num_devices in range(self.limit, 0, -1):
            level = self._by_devices.get(num_devices, [])
            is_limit = num_devices == self.limit
            if is_limit:  # also smaller ones that have no room for another worker
                level = [
                    fleet
                    for fleet in self.fleets
                    if self.devices(fleet) <= num_devices and self._is_full(fleet, num_devices)
                ]
            while rest := [fleet for fleet in level if fleet not in self.known and self._is_open(fleet, is_limit)]:
                rest.sort(key=lambda fleet: (-self._bound(fleet), self._unevenness(fleet), fleet))
                self._replay(rest[:BATCH])

    def _replay(self, fleets: Sequence[Fleet]) -> None:
        new = [fleet for fleet in fleets if fleet not in self.known]
        if not new:
            return
        for fleet, found in zip(new, self._measure(new), strict=True):
            self.known[fleet] = found
            if self._ends and found.keeps:
                self.limit = min(self.limit, self.devices(fleet))

    # Bounds ---------------------------------------------------------------------------------------------------

    def _larger(self, fleet: Fleet) -> Iterator[FleetOutcome]:
        """Yield the replays of fleets of the family that have as many workers or more in each pool."""
        for other, found in self.known.items():
            if other.family == fleet.family and _covers(other, fleet):
                yield found

    def _bound(self, fleet: Fleet) -> float:
        return min((found.goodput for found in self._larger(fleet)), default=float("inf"))

    def _may_keep(self, fleet: Fleet) -> bool:
        return all(found.keeps for found in self._larger(fleet))

    def _is_open(self, fleet: Fleet, is_of_kind: bool) -> bool:
        """Return whether the bound of a fleet is above the replays with as many devices or fewer."""
        most = self.devices(fleet)
        bound = self._bound(fleet)
        return not any(
            found.goodput >= bound
            for other, found in self.known.items()
            if self.devices(other) <= most and (not is_of_kind or len(other.counts) == len(fleet.counts))
        )

    # Fleets ---------------------------------------------------------------------------------------------------

    def _all(self, most_devices: int) -> Iterator[Fleet]:
        for place, family in enumerate(self.families):
            ranges = [range(1, most_devices // size + 1) for size in family.sizes]
            for counts in product(*ranges):
                if sum(map(int.__mul__, counts, family.sizes)) <= most_devices and counts not in family.skips:
                    yield Fleet(place, counts)

    def _is_full(self, fleet: Fleet, num_devices: int) -> bool:
        return self.devices(fleet) + min(self.families[fleet.family].sizes) > num_devices

    def _unevenness(self, fleet: Fleet) -> int:
        """Return the difference between the devices of the largest and the smallest pool."""
        devices = list(map(int.__mul__, fleet.counts, self.families[fleet.family].sizes))
        return max(devices) - min(devices)


def _covers(larger: Fleet, fleet: Fleet) -> bool:
    """Return whether `larger` has as many workers as `fleet` or more in each pool."""
    return all(map(int.__ge__, larger.counts, fleet.counts))

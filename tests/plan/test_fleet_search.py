"""The search for fleets: with a goodput that more workers never lower, it finds what replaying every fleet finds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.plan.fleet_search import Family, Fleet, FleetOutcome, FleetSearch

FAMILIES = [Family((1,)), Family((2,)), Family((1, 1)), Family((1, 2)), Family((2, 1), frozenset([(1, 1)]))]


class Goodput:
    """Random goodput of fleets that more workers never lower; counts what was asked."""

    def __init__(self, numbers: Sequence[int], enough: int) -> None:
        self._numbers = numbers
        self._enough = enough
        self.asked: list[Fleet] = []

    def of(self, fleet: Fleet) -> int:
        smaller = product(*(range(1, count + 1) for count in fleet.counts))
        return max(self._numbers[hash((fleet.family, counts)) % len(self._numbers)] for counts in smaller)

    def measure(self, fleets: Sequence[Fleet]) -> list[FleetOutcome]:
        self.asked += fleets
        return [self.measured(fleet) for fleet in fleets]

    def measured(self, fleet: Fleet) -> FleetOutcome:
        return FleetOutcome(self.of(fleet), self.of(fleet) >= self._enough)


@pytest.mark.laws
@given(
    numbers=st.lists(st.integers(0, 30), min_size=1, max_size=40),
    enough=st.integers(1, 31),
    most=st.integers(1, 9),
    ends=st.booleans(),
)
def test_the_front_is_that_of_all_fleets(numbers: list[int], enough: int, most: int, ends: bool) -> None:
    goodput = Goodput(numbers, enough)
    search = FleetSearch(FAMILIES, most, goodput.measure, ends=ends)
    search.run()
    assert len(set(goodput.asked)) == len(goodput.asked)
    keeping = [search.devices(fleet) for fleet in search.fleets if goodput.of(fleet) >= enough]
    limit = min(keeping, default=most) if ends else most
    assert search.limit == limit
    best: list[tuple[int, int]] = []
    for devices in range(1, limit + 1):
        found = [goodput.of(fleet) for fleet in search.fleets if search.devices(fleet) <= devices]
        if found and (not best or max(found) > best[-1][1]):
            best.append((devices, max(found)))
    assert [(search.devices(fleet), goodput.of(fleet)) for fleet in search.front()] == best
    for num_pools in (1, 2):
        within = [fleet for fleet in search.fleets if search.devices(fleet) <= limit and len(fleet.counts) == num_pools]
        if within:
            known = [goodput.of(fleet) for fleet in within if fleet in search.known]
            assert max(known) == max(map(goodput.of, within)), "each kind has its best at the limit"


@given(numbers=st.lists(st.integers(0, 30), min_size=1, max_size=40), enough=st.integers(1, 31))
def test_no_fleet_of_the_front_beats_another(numbers: list[int], enough: int) -> None:
    goodput = Goodput(numbers, enough)
    search = FleetSearch(FAMILIES, 8, goodput.measure)
    search.run()
    for smaller, larger in pairwise(search.front()):
        assert search.devices(smaller) < search.devices(larger)
        assert goodput.of(smaller) < goodput.of(larger)


def test_most_fleets_are_not_replayed() -> None:
    """Goodput in proportion to the smaller of two pools, as where prompts and generating take as long."""
    families = [Family((1,)), *(Family((first, second)) for first in (1, 2, 4, 8) for second in (1, 2, 4, 8))]
    asked: list[Fleet] = []

    def measure(fleets: Sequence[Fleet]) -> list[FleetOutcome]:
        asked.extend(fleets)
        found = []
        for fleet in fleets:
            devices = [count * size for count, size in zip(fleet.counts, families[fleet.family].sizes, strict=True)]
            goodput = min(devices) if len(devices) > 1 else 0.4 * devices[0]
            found.append(FleetOutcome(min(goodput, 3), goodput >= 3))
        return found

    search = FleetSearch(families, 16, measure)
    search.run()
    assert len(asked) < len(search.fleets) / 5
    assert [(search.devices(fleet), search.known[fleet].goodput) for fleet in search.front()][-1] == (6, 3)


def test_numbers_that_another_family_has_are_skipped() -> None:
    goodput = Goodput([1], 2)
    search = FleetSearch(FAMILIES, 4, goodput.measure)
    assert Fleet(4, (1, 1)) not in search.fleets
    assert Fleet(4, (1, 2)) in search.fleets


def test_pairs_are_of_one_family_the_one_with_fewer_workers_first() -> None:
    """Here, more workers have less goodput, and the pairs show that."""
    search = FleetSearch(
        [Family((1,)), Family((1, 1))],
        4,
        lambda fleets: [FleetOutcome(1 / sum(fleet.counts), keeps=False) for fleet in fleets],
    )
    search.run()
    pairs = list(search.pairs())
    assert len(pairs) >= 6
    assert all(smaller.goodput > larger.goodput for smaller, larger in pairs)

"""Shares of the time: the examples, and the laws against shares that rise bit by bit."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.base.errors import ConfigError
from kvarts.sim.sharing.config import shares_of

from oracles.naive_shared import shares_of as naive_shares_of


@dataclass(eq=False)
class Model:
    weight: int
    floor: int
    ceiling: int | None


EXAMPLES: list[tuple[list[float], list[int], list[int | None], list[int]]] = [
    ([1], [0], [None], [1000]),
    ([1, 1], [0, 0], [None, None], [500, 500]),
    ([0.5, 1.5], [0, 0], [None, None], [250, 750]),
    ([19, 1], [0, 0], [None, None], [950, 50]),
    ([19, 1], [0, 0], [900, None], [900, 100]),
    ([1, 9], [400, 0], [None, None], [400, 600]),
    ([1, 1, 8], [300, 0, 0], [None, None, 500], [300, 200, 500]),
    ([1, 1], [0, 0], [500, 500], [500, 500]),
]


def shares(weights: list[Any], floors: list[int], ceilings: list[int | None]) -> list[Fraction]:
    names = [f"m{place}" for place in range(len(weights))]
    of_models = shares_of(*(dict(zip(names, values, strict=True)) for values in (weights, floors, ceilings)))
    assert list(of_models) == names
    return list(of_models.values())


@pytest.mark.parametrize(("weights", "floors", "ceilings", "expected"), EXAMPLES)
def test_examples(weights: list[float], floors: list[int], ceilings: list[int | None], expected: list[int]) -> None:
    assert shares(weights, floors, ceilings) == [Fraction(per_mille, 1000) for per_mille in expected]


@pytest.mark.parametrize(
    ("weights", "floors", "ceilings", "says"),
    [
        ([1, 1], [0, 0], [0, None], "m0.ceiling: must be from 1 to 1000 per mille, got 0"),
        ([1, 1], [0, 0], [None, 1001], "m1.ceiling: must be from 1 to 1000 per mille, got 1001"),
        ([1, 1], [-1, 0], [None, None], "m0.floor: must be from 0 to 1000 per mille, got -1"),
        ([1, 1], [0, 301], [None, 300], "m1.floor: must be from 0 to 300 per mille, got 301"),
        ([1, 1], [501, 500], [None, None], "m1.floor: brings all floors to 1001 per mille"),
        ([1, 1], [0, 0], [400, 500], "m1.ceiling: leaves 100 per mille of the time to no model"),
        ([1, 1], [0, 1000], [None, None], "m0.weight: is left no time by the floors of the others"),
    ],
)
def test_shares_that_cannot_be_are_refused(
    weights: list[float], floors: list[int], ceilings: list[int | None], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        shares(weights, floors, ceilings)
    assert str(caught.value).startswith(says)


of_one = st.tuples(st.integers(1, 19), st.integers(0, 300), st.none() | st.integers(300, 1000))


@pytest.mark.laws
@given(st.lists(of_one, min_size=1, max_size=6))
def test_shares_are_those_of_a_level_that_rises(models: list[tuple[int, int, int | None]]) -> None:
    """They add up to 1, are within their bounds, and in proportion to weights where no bound holds."""
    weights, floors, ceilings = (list(values) for values in zip(*models, strict=True))
    try:
        found = shares(weights, floors, ceilings)
    except ConfigError:
        assert sum(floors) >= 1000 or sum(ceiling or 1000 for ceiling in ceilings) < 1000
        return
    assert sum(found) == 1
    naive: list[Any] = [Model(*of_model) for of_model in models]
    assert found == list(naive_shares_of(naive).values())

"""Token budgets: the examples, and the laws against a filling that pours out shares bit by bit."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.errors import ConfigError
from kvarts.sharing.budget import TokenBudgets, _fill

EXAMPLES: list[tuple[int, list[dict[str, Any]], list[int]]] = [
    (1000, [{"weight": 1}, {"weight": 1}], [500, 500]),
    (1000, [{"weight": 1}, {"weight": 3}], [250, 750]),
    (1000, [{"weight": 1}, {"weight": 1, "active": False}], [1000, 0]),
    (1000, [{"weight": 1, "ceiling": 500}], [500]),
    (1000, [{"weight": 1, "ceiling": 500}, {"weight": 1, "active": False}], [500, 0]),
    (900, [{"weight": 1}, {"weight": 1}, {"weight": 1, "active": False}], [450, 450, 0]),
    (1000, [{"weight": 19}, {"weight": 1}], [900, 100]),
    (2, [{"weight": 1}, {"weight": 1}, {"weight": 1}], [1, 1, 0]),
    (1000, [{"weight": 1, "active": False}, {"weight": 3, "active": False}], [250, 750]),
    (1000, [{"weight": 1, "floor": 400}, {"weight": 9}], [400, 600]),
    (1000, [{"weight": 1, "ceiling": 100}, {"weight": 1}], [100, 900]),
    (0, [{"weight": 1}, {"weight": 1}], [0, 0]),
    (1, [{"weight": 1}, {"weight": 1}], [1, 0]),
    (1000, [], []),
]


def make(total: int, models: list[dict[str, Any]]) -> TokenBudgets:
    budgets = TokenBudgets(total)
    for index, given_ in enumerate(models):
        model = {**given_}
        active = model.pop("active", True)
        budgets.register(f"m{index}", model.pop("weight"), **model)
        budgets.set_active(f"m{index}", active)
    return budgets


@pytest.mark.parametrize(("total", "models", "expected"), EXAMPLES)
def test_examples(total: int, models: list[dict[str, Any]], expected: list[int]) -> None:
    assert list(make(total, models).budgets().values()) == expected


def test_nobody_with_work_gets_nothing_for_ever() -> None:
    budgets = make(500, [{"weight": 1, "ceiling": 1000}, {"weight": 1000, "ceiling": 1000}])
    given_ = [budgets.budget_for("m0"), *(budgets.next_round()["m0"] for _ in range(999))]
    assert sum(given_) == pytest.approx(1000 * 500 / 1001, abs=1)
    assert max(b - a for a, b in pairwise([i for i, tokens in enumerate(given_) if tokens])) <= 4


def test_what_was_lent_comes_back_within_a_round() -> None:
    budgets = make(1000, [{"weight": 1}, {"weight": 1}])
    budgets.report_usage("m1", 100)
    assert budgets.budgets() == {"m0": 500, "m1": 500}, "a round stays as it is"
    assert budgets.next_round() == {"m0": 900, "m1": 100}
    budgets.report_usage("m1", 100)  # all it had: it might want more
    assert budgets.next_round() == {"m0": 500, "m1": 500}
    budgets.set_active("m1", False)
    assert budgets.budgets() == {"m0": 1000, "m1": 0}
    budgets.set_active("m1", True)
    assert budgets.budgets() == {"m0": 500, "m1": 500}


def test_what_nobody_was_measured_to_use_is_given_all_the_same() -> None:
    budgets = make(1000, [{"weight": 1}, {"weight": 3}])
    for model in ("m0", "m1"):
        budgets.report_usage(model, 100)
    assert sum(budgets.next_round().values()) == 1000


def test_registering_again_changes_the_weight_and_nothing_else() -> None:
    budgets = make(1000, [{"weight": 1, "ceiling": 400}, {"weight": 1}])
    budgets.register("m0", 7, ceiling=1000, floor=300)
    assert budgets.budgets() == {"m0": 400, "m1": 600}
    budgets.deregister("m0")
    assert budgets.budgets() == {"m1": 1000}
    budgets.total = 77
    assert budgets.budgets() == {"m1": 77}


def test_what_cannot_be_is_named() -> None:
    budgets = make(1000, [{"weight": 1, "floor": 600}])
    for call, says in (
        (lambda: budgets.budget_for("x"), "x: is not registered. There are: m0"),
        (lambda: budgets.set_active("x", True), "x: is not registered"),
        (lambda: budgets.deregister("x"), "x: is not registered"),
        (lambda: budgets.report_usage("m0", -1), "m0.usage: must be at least 0"),
        (lambda: budgets.register("a", 0), "a.weight: must be a finite number above 0"),
        (lambda: budgets.register("a", 1, ceiling=0), "a.ceiling: must be from 1 to 1000"),
        (lambda: budgets.register("a", 1, floor=300, ceiling=200), "a.floor: must be from 0 to 200"),
        (lambda: budgets.register("a", 1, floor=500), "a.floor: would bring all floors to 1100"),
        (lambda: TokenBudgets(-1), "total: must be at least 0"),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        assert str(caught.value).startswith(says)


# Laws -----------------------------------------------------------------------------------------------------

numbers = st.integers(0, 60)


@st.composite
def bounded(draw: st.DrawFn) -> tuple[dict[str, Fraction], dict[str, int], dict[str, int], int]:
    names = [f"m{index}" for index in range(draw(st.integers(1, 6)))]
    weights = {name: Fraction(draw(st.integers(1, 20)), draw(st.integers(1, 5))) for name in names}
    lowest = {name: draw(numbers) for name in names}
    highest = {name: lowest[name] + draw(numbers) for name in names}
    total = draw(st.integers(sum(lowest.values()), sum(highest.values())))
    return weights, lowest, highest, total


@pytest.mark.laws
@given(bounded())
def test_shares_are_those_of_pouring(case: tuple[dict[str, Fraction], dict[str, int], dict[str, int], int]) -> None:
    """Pour at one level into all; whoever is above it by a floor takes nothing, whoever is full takes no more."""
    weights, lowest, highest, total = case
    shares = _fill(*case)
    assert sum(shares.values()) == total
    for name, share in shares.items():
        assert lowest[name] <= share <= highest[name]
    for one in weights:
        for other in weights:
            if shares[one] > lowest[one] and shares[other] < highest[other]:
                # Nobody who is above its floor has a higher level than somebody who could still rise.
                assert shares[one] / weights[one] <= shares[other] / weights[other]


@st.composite
def rounds(draw: st.DrawFn) -> tuple[int, list[dict[str, Any]], list[list[tuple[int, str, int]]]]:
    total = draw(st.integers(0, 40) | st.integers(0, 5000))
    count = draw(st.integers(1, 5))
    left = 1000
    models = []
    for _ in range(count):
        ceiling = draw(st.none() | st.integers(1, 1000))
        floor = min(draw(st.sampled_from([0, 0, 50, 300])), left, 900 if ceiling is None else ceiling)
        left -= floor
        models.append({"weight": draw(st.integers(1, 1000)), "floor": floor, "ceiling": ceiling})
    change = st.tuples(st.integers(0, count - 1), st.sampled_from(["idle", "busy", "usage"]), st.integers(0, 3000))
    return total, models, draw(st.lists(st.lists(change, max_size=4), max_size=12))


def cap(total: int, model: dict[str, Any], num_counting: int) -> int:
    per_mille = model["ceiling"] or (900 if num_counting > 1 else 1000)
    return min(total, max(1, total * per_mille // 1000))


@pytest.mark.laws
@given(rounds())
def test_every_round_adds_up(case: tuple[int, list[dict[str, Any]], list[list[tuple[int, str, int]]]]) -> None:
    """Sums are exact, floors and ceilings kept, the idle get nothing."""
    total, models, changes = case
    budgets = make(total, models)
    active = [True] * len(models)
    for some in changes:
        for index, what, number in some:
            if what == "usage":
                budgets.report_usage(f"m{index}", number)
            else:
                active[index] = what == "busy"
                budgets.set_active(f"m{index}", active[index])
        tokens = list(budgets.next_round().values())
        counting = [index for index in range(len(models)) if active[index]] or list(range(len(models)))
        caps = {index: cap(total, models[index], len(counting)) for index in counting}
        assert sum(tokens) == min(total, sum(caps.values()))
        for index, model in enumerate(models):
            if index not in caps:
                assert tokens[index] == 0
                continue
            assert total * model["floor"] // 1000 <= tokens[index] <= caps[index]


@pytest.mark.laws
@given(rounds(), st.integers(1, 40))
def test_over_many_rounds_everybody_gets_its_share(
    case: tuple[int, list[dict[str, Any]], list[list[tuple[int, str, int]]]], num_rounds: int
) -> None:
    """Nobody starves: what rounding takes in one round it gives in the next."""
    total, models, _ = case
    budgets = make(total, models)
    first = budgets.budgets()
    share = {name: tokens + budgets._owed[name] for name, tokens in first.items()}  # nothing was owed before
    received = dict(first)
    for _ in range(num_rounds - 1):
        for name, tokens in budgets.next_round().items():
            received[name] += tokens
    for name in first:
        assert abs(Fraction(received[name] - num_rounds * share[name])) <= len(models)


@pytest.mark.laws
@given(rounds(), st.integers(1, 3))
def test_idle_models_change_nothing(
    case: tuple[int, list[dict[str, Any]], list[list[tuple[int, str, int]]]], num_idle: int
) -> None:
    total, models, _ = case
    with_idle = [*models, *({"weight": 5, "active": False} for _ in range(num_idle))]
    alone, beside = make(total, models).budgets(), make(total, with_idle).budgets()
    assert {name: beside[name] for name in alone} == alone


@pytest.mark.laws
@given(rounds(), st.randoms(use_true_random=False))
def test_the_order_of_registration_decides_only_ties(
    case: tuple[int, list[dict[str, Any]], list[list[tuple[int, str, int]]]], random: Any
) -> None:
    total, models, _ = case
    order = list(range(len(models)))
    random.shuffle(order)
    here = list(make(total, models).budgets().values())
    there = list(make(total, [models[index] for index in order]).budgets().values())
    for place, index in enumerate(order):
        assert abs(here[index] - there[place]) <= 1

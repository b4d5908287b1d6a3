"""The order of turns: no step starts later than in its slice plus one step of each other model."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarts.core.sched.policy import NEVER_NS
from kvarts.sim.sharing import tenant
from kvarts.sim.sharing.tenant import TurnOrder

pytestmark = [
    pytest.mark.laws,
    pytest.mark.skipif(not tenant.__file__.endswith(".py"), reason="compiled code takes no stand-in for a Tenant"),
]


@dataclass(eq=False)
class Model:
    name: str
    share: Fraction
    is_stalled: bool = False
    step_ns: int = 1


class Device:
    def may_preempt_for(self, model: str, now_ns: int) -> bool:
        return False


def order_of(weights: list[int]) -> tuple[TurnOrder, list[Any]]:
    models: list[Any] = [Model(f"m{place}", Fraction(weight, sum(weights))) for place, weight in enumerate(weights)]
    device: Any = Device()
    return TurnOrder(device, models), models


def next_of(order: TurnOrder, now_ns: int) -> Any:
    return order.next(now_ns)


weights = st.lists(st.sampled_from([1, 2, 3, 5, 8, 40]), min_size=1, max_size=6)


@settings(max_examples=20 * settings().max_examples)
@given(weights, st.data())
def test_no_step_starts_later_than_in_its_slice_plus_a_step_of_each_other_model(
    of_models: list[int], data: Any
) -> None:
    """Whatever steps last, and whenever models get work, during a step of another or while the device is idle.

    A slice starts its next step where the last one ends, or where the model gets work, whichever is later. It begins
    again with each step, so the model has its share from any moment on.
    """
    order, models = order_of(of_models)
    now = 0
    slice_start = dict.fromkeys(models, Fraction(0))
    longest = dict.fromkeys(models, 0)
    late: list[tuple[Model, Fraction]] = []
    able: list[Model] = []
    last_began = 0
    typical = data.draw(st.lists(st.sampled_from([1, 10, 100]), min_size=len(models), max_size=len(models)))
    for changes in data.draw(st.lists(st.sets(st.integers(0, 5), max_size=2), min_size=1, max_size=40)):
        for place, model in enumerate(models):
            was_able = model in able
            if place in changes or (not able and not late):
                model.is_stalled = was_able
            if not was_able and not model.is_stalled:
                since = data.draw(st.integers(last_began, now)) if able else now
                slice_start[model] = max(slice_start[model], Fraction(since))
        able = [model for model in models if not model.is_stalled]
        turn = next_of(order, now)
        assert (turn is None) == (not able)
        if turn is None:
            now += 1000
            continue
        assert not turn.is_stalled
        late.append((turn, now - slice_start[turn]))
        slice_start[turn] = min(slice_start[turn], Fraction(now))
        order.pass_turn(turn, now)
        duration = typical[models.index(turn)] * data.draw(st.sampled_from([0, 1, 1, 2]))
        order.spend(turn, duration)
        slice_start[turn] += duration / turn.share
        longest[turn] = max(longest[turn], duration)
        last_began = now
        now += duration
    for model, late_ns in late:
        assert late_ns <= sum(longest.values()) - longest[model]


@given(weights, st.lists(st.lists(st.integers(1, 1000), min_size=1, max_size=60), min_size=6, max_size=6),
       st.integers(0, 40))  # fmt: skip
def test_many_turns_at_once_are_those_one_by_one(of_models: list[int], steps: list[list[int]], before: int) -> None:
    orders, done = [], []
    for at_once in (False, True):
        order, models = order_of(of_models)
        now = 0
        for turn in range(before):
            tenant = next_of(order, now)
            order.pass_turn(tenant, now)
            order.spend(tenant, 1 + turn * 7 % 11)
            now += 1 + turn * 7 % 11
        order.next(now)
        names: list[str] = []
        left = {model: list(of_model) for model, of_model in zip(models, steps, strict=False)}
        if at_once:
            durations = [left[model] for model in models]
            horizons = [len(of_model) + 1 for of_model in durations]
            places, starts, now = order.turns(models, durations, horizons, now, NEVER_NS)
            names = [models[place].name for place in places]
            if len(set(places)) == 1:
                place = places[0]
                last = durations[place][len(places) - 1]
                order.leap_alone(models[place], starts[place][0], now, last)
            else:
                for place in sorted(set(places), key=lambda place: -names[::-1].index(models[place].name)):
                    of_model = starts[place]
                    order.leap(models[place], of_model, durations[place][: len(of_model)])
        else:
            while left[tenant := next_of(order, now)]:
                order.pass_turn(tenant, now)
                order.spend(tenant, left[tenant][0])
                names.append(tenant.name)
                now += left[tenant].pop(0)
        orders.append(order)
        done.append((now, names, {model.name: due for model, due in order.due.items()}))
    assert done[0] == done[1]
    one, other = ([model.name for model in sorted(order.due, key=order._last_turn.__getitem__)] for order in orders)
    assert one == other
    assert orders[0]._since_ns == orders[1]._since_ns


@given(weights.filter(lambda of_models: len(of_models) > 1), st.lists(st.integers(1, 1000), min_size=60, max_size=60),
       st.integers(0, 40))  # fmt: skip
def test_how_long_one_model_has_all_turns(of_models: list[int], steps: list[int], before: int) -> None:
    order, _ = order_of(of_models)
    now = 0
    for turn in range(before):
        tenant = next_of(order, now)
        order.pass_turn(tenant, now)
        order.spend(tenant, 1 + turn * 7 % 11)
        now += 1 + turn * 7 % 11
    first = next_of(order, now)
    alone_until = order.alone_until_ns(first, now)
    assert alone_until > now
    for duration in steps:
        tenant = next_of(order, now)
        assert (tenant is first) == (now < alone_until)
        if tenant is not first:
            break
        order.pass_turn(tenant, now)
        order.spend(tenant, duration)
        now += duration


def test_what_nobody_is_behind_with_goes_round() -> None:
    """Where one model leaves its share, weights do not divide it: each of the others has one turn in a round."""
    order, models = order_of([8, 1, 1])
    models[0].is_stalled = True
    now, names = 0, []
    for _ in range(8):
        tenant = next_of(order, now)
        order.pass_turn(tenant, now)
        order.spend(tenant, 10)
        now += 10
        names.append(tenant.name)
    assert names == ["m1", "m2"] * 4
    models[0].is_stalled = False
    for _ in range(8):
        tenant = next_of(order, now)
        order.pass_turn(tenant, now)
        order.spend(tenant, 10)
        now += 10
        names.append(tenant.name)
    assert names[8:] == ["m0"] * 5 + ["m1", "m0", "m0"], "it is behind its slice, and then not"

"""Turns by virtual time: shares of time by weight, and what a model that comes back is owed."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.sharing.fairqueue import FairQueue

pytestmark = pytest.mark.laws


@dataclass(eq=False)
class Model:
    name: str
    weight: float
    is_stalled: bool = False
    step_ns: int = 1


class Device:
    def may_make_way(self, model: str, now_ns: int) -> bool:
        return False


def queue_of(models: list[Any]) -> FairQueue:
    device: Any = Device()
    return FairQueue(device, models)


def next_of(queue: FairQueue) -> Any:
    return queue.next(0)


weights = st.lists(st.sampled_from([0.1, 0.25, 1.0, 1.5, 2.0, 3.0, 8.0]), min_size=1, max_size=5)
durations = st.lists(st.integers(1, 1000), min_size=1, max_size=60)


@given(weights, durations, st.data())
def test_time_is_divided_by_weight_up_to_a_step_of_each(of_models: list[float], steps: list[int], data: Any) -> None:
    """Over any stretch in which two models could always step."""
    models = [Model(f"m{place}", weight) for place, weight in enumerate(of_models)]
    queue = queue_of(models)
    had: list[tuple[Model, int, tuple[bool, ...]]] = []
    for duration in steps:
        for model in models[2:]:
            model.is_stalled = data.draw(st.booleans())
        turn = next_of(queue)
        queue.pass_turn(turn)
        queue.spend(turn, 1, duration)
        had.append((turn, duration, tuple(model.is_stalled for model in models)))
    longest = max(steps)
    first, second = models[0], models[min(1, len(models) - 1)]
    for begin in range(len(had)):
        of_both = [sum(duration for turn, duration, _ in had[begin:] if turn is model) for model in (first, second)]
        apart = Fraction(of_both[0]) / Fraction(str(first.weight)) - Fraction(of_both[1]) / Fraction(str(second.weight))
        assert abs(apart) <= Fraction(longest) / Fraction(str(first.weight)) + Fraction(longest) / Fraction(
            str(second.weight)
        )


@given(weights, st.lists(durations, min_size=5, max_size=5), st.integers(0, 40))
def test_many_turns_at_once_are_those_one_by_one(of_models: list[float], steps: list[list[int]], before: int) -> None:
    queues, orders = [], []
    for at_once in (False, True):
        models: list[Any] = [Model(f"m{place}", weight) for place, weight in enumerate(of_models)]
        queue = queue_of(models)
        for turn in range(before):
            tenant = next_of(queue)
            queue.pass_turn(tenant)
            queue.spend(tenant, 1, 1 + turn * 7 % 11)
        queue.next(0)
        order: list[str] = []
        left = {model: list(durations) for model, durations in zip(models, steps, strict=False)}
        if at_once:
            done: dict[Any, list[int]] = {}
            for place in queue.places(models, [left[model] for model in models]):
                model = models[place]
                taken = done.setdefault(model, [])
                if len(taken) == len(left[model]):
                    break
                taken.append(left[model][len(taken)])
                order.append(model.name)
            done = {model: done[model] for model in sorted(done, key=lambda m: len(order) - order[::-1].index(m.name))}
            queue.leap(list(done), list(done.values()))
        else:
            while True:
                tenant = next_of(queue)
                if not left[tenant]:
                    break
                queue.pass_turn(tenant)
                queue.spend(tenant, 1, left[tenant].pop(0))
                order.append(tenant.name)
        orders.append(order)
        queues.append((list(queue.tags.values()), queue._now))
    assert orders[0] == orders[1]
    assert queues[0] == queues[1]


def test_who_was_idle_is_owed_nothing_and_waits_for_nothing() -> None:
    models: list[Any] = [Model("a", 1.0), Model("b", 1.0, is_stalled=True)]
    queue = queue_of(models)
    for _ in range(100):
        assert next_of(queue) is models[0]
        queue.pass_turn(models[0])
        queue.spend(models[0], 1, 10)
    models[1].is_stalled = False
    order = []
    for _ in range(6):
        turn = next_of(queue)
        queue.pass_turn(turn)
        queue.spend(turn, 1, 10)
        order.append(turn.name)
    assert order == ["b", "a", "b", "a", "b", "a"], "it began where the last turn had begun"

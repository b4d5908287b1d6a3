from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.base.errors import ConfigError
from kvarts.base.limits import LATEST_NS, TooLateError
from kvarts.core.executor import CostModel
from kvarts.core.sched.plan import Batch, Chunk
from kvarts.cost.polynomial import CallableCost, LinearCost, PolynomialCost, ScaledCost
from kvarts.cost.roofline import parse_cost

MODELS = [
    PolynomialCost(),
    LinearCost(step_ms=4.0, chunk_token_ms=0.02, decode_ms=0.1, context_token_ms=1e-5),
    CallableCost(lambda batch: 3.0 + 0.01 * batch.num_tokens + 1e-6 * batch.decode_known_tokens),
    ScaledCost(PolynomialCost(), 1.15),
]


@pytest.mark.parametrize("model", MODELS)
@given(num_decodes=st.integers(1, 300), mean=st.integers(1, 5000), num_steps=st.integers(1, 90))
def test_many_steps_cost_what_they_cost_one_by_one(
    model: CostModel, num_decodes: int, mean: int, num_steps: int
) -> None:
    known, pool = num_decodes * mean, 300_000
    one_by_one = [model.step_ns(Batch((), num_decodes, known + step * num_decodes, pool)) for step in range(num_steps)]
    assert model.decode_ns(num_decodes, known, pool, num_steps) == one_by_one
    assert model.decode_ns(num_decodes, known, pool, 1) == one_by_one[:1]


def test_the_polynomial_of_a_prompt_and_of_a_full_pool() -> None:
    model = PolynomialCost()
    t = 1000
    prefill = 4.209989e-7 * t * t + 1.518344e-2 * t + 16.50142
    batch = Batch((Chunk(0, 1000, 1000, 1000),), 0, 0, 10_000)
    assert model.step_ns(batch) == round(prefill * 1e6)
    crowded = Batch((), 4, 20_000, 10_000)
    assert model.step_ns(crowded) == round((-25.74 + 54.01 + 5.74) * 1e6), "use counts as at most the pool"


def test_a_recompute_costs_its_prompt_part_and_one_decode() -> None:
    model = PolynomialCost()
    resumed = Batch((Chunk(0, 130, 100, 130),), 0, 0, 10_000)
    alone = Batch((Chunk(0, 100, 100, 100),), 0, 0, 10_000)
    decode = Batch((), 1, 130, 10_000)
    assert model.step_ns(resumed) == model.step_ns(alone) + model.step_ns(decode)


def test_the_linear_model_adds_up_its_parts() -> None:
    model = LinearCost(step_ms=5.0, chunk_token_ms=0.5, decode_ms=0.25, context_token_ms=0.125)
    assert model.step_ns(Batch((Chunk(0, 8, 8, 8),), 4, 40, 99)) == 15_000_000


def test_a_factor_multiplies_each_step() -> None:
    cost = LinearCost(step_ms=5.0, chunk_token_ms=0.5, decode_ms=0.25)
    batch = Batch((Chunk(0, 8, 8, 8),), 4, 40, 99)
    assert ScaledCost(cost, 1.5).step_ns(batch) == 15_000_000
    assert ScaledCost(cost, 1.5).decode_ns(4, 40, 99, 2) == [9_000_000, 9_000_000]
    with pytest.raises(TooLateError):
        ScaledCost(cost, LATEST_NS).step_ns(batch)


def test_a_cost_can_be_named_on_the_command_line() -> None:
    assert parse_cost("polynomial") == PolynomialCost()
    assert parse_cost("linear:step_ms=5,decode_ms=0.5") == LinearCost(step_ms=5.0, decode_ms=0.5)


@pytest.mark.parametrize(
    "text", ["cubic", "linear:step_ms", "linear:speed=3", "linear:step_ms=-1", "linear:step_ms=nan"]
)
def test_a_cost_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_cost(text)


@pytest.mark.parametrize("answer", [-1.0, math.nan, math.inf, None, "fast"])
def test_a_callable_that_answers_no_duration_is_refused(answer: object) -> None:
    with pytest.raises(ConfigError, match="the cost callable answered"):
        CallableCost(lambda _: answer).step_ns(Batch((), 1, 1, 1))  # type: ignore[arg-type,return-value]

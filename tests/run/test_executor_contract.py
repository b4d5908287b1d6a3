"""What every executor promises: cost models, pages of a toy model, and recorders around both."""

from __future__ import annotations

import io
import json

import pytest

from kvarts.base.clock import VirtualClock
from kvarts.core.executor import CostModel, Executor, VirtualExecutor
from kvarts.core.sched.plan import Batch, StepPlan, StepResult
from kvarts.cost.polynomial import CallableCost, LinearCost, PolynomialCost
from kvarts.cost.roofline import RooflineCost
from kvarts.cost.simulated import SimExecutor
from kvarts.run.mock import MockExecutor
from kvarts.run.wrappers import RecordingExecutor

from builders.executor_contract import CONFIG, ExecutorContract, VirtualExecutorContract
from builders.guesser import Guesser
from builders.serving import Arrival, serve
from builders.toy_model import ToyExecutor

pytestmark = pytest.mark.laws


class OfCost(VirtualExecutorContract):
    cost: CostModel

    def make(self) -> VirtualExecutor:
        return SimExecutor(self.cost)


class TestPolynomial(OfCost):
    cost = PolynomialCost()


class TestLinear(OfCost):
    cost = LinearCost(step_ms=4.0, chunk_token_ms=0.02, decode_ms=0.1, context_token_ms=1e-5)


class TestRoofline(OfCost):
    cost = RooflineCost(llm="llama-3.1-8b", device="h100-80gb")


class TestCallable(OfCost):
    cost = CallableCost(lambda batch: 3.0 + 0.01 * batch.num_tokens + 1e-6 * batch.decode_known_tokens)


class TestToyModel(ExecutorContract):
    def make(self) -> Executor:
        return ToyExecutor(CONFIG.num_pages, CONFIG.page_size, CONFIG.max_num_seqs)


class TestMock(ExecutorContract):
    def make(self) -> Executor:
        return MockExecutor(CONFIG, LinearCost(step_ms=2.0), VirtualClock(), vocab_size=100)


class TestRecorderOfACostModel(ExecutorContract):
    def make(self) -> Executor:
        return RecordingExecutor(SimExecutor(PolynomialCost()), io.BytesIO())


class TestRecorderOfAToyModel(ExecutorContract):
    def make(self) -> Executor:
        return RecordingExecutor(
            ToyExecutor(CONFIG.num_pages, CONFIG.page_size, CONFIG.max_num_seqs, stop_token=99), io.BytesIO()
        )


class TestRecorderOfARecorder(ExecutorContract):
    def make(self) -> Executor:
        return RecordingExecutor(RecordingExecutor(SimExecutor(LinearCost(step_ms=2.0)), io.BytesIO()), io.BytesIO())


def test_a_recorded_step_has_a_decode_for_each_guess() -> None:
    """A drafted token reads as much as a decode there: that is what a calibration is told."""
    file = io.BytesIO()
    steps: list[Batch] = []
    arrivals = [Arrival(0, [1, 2, 3, index], 12, 0, None) for index in range(2)]

    class Seen(ToyExecutor):
        def execute(self, plan: StepPlan) -> StepResult:
            steps.append(plan.batch)
            return super().execute(plan)

    executor = RecordingExecutor(Seen(CONFIG.num_pages, CONFIG.page_size, CONFIG.max_num_seqs), file)
    serve(arrivals, CONFIG, executor, drafter=Guesser(1, wrong=0.3, most=3))
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    assert len(lines) == len(steps) and any(batch.num_drafted for batch in steps)
    for line, batch in zip(lines, steps, strict=True):
        assert line["num_decodes"] == batch.num_decodes + batch.num_drafted
        known = line["decode_known_tokens"] - batch.decode_known_tokens
        # Each guess comes after a prompt of four tokens and the first that was made.
        assert 6 * batch.num_drafted <= known <= 16 * batch.num_drafted

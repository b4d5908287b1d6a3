"""What every executor promises the engine. A subclass brings the executor."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import msgspec
import numpy as np
import pytest

from kvarts.base.records import Value
from kvarts.core.config import EngineConfig
from kvarts.core.executor import Executor, VirtualExecutor
from kvarts.core.sched.plan import Batch, StepPlan, StepResult
from kvarts.cost.simulated import SimExecutor
from kvarts.run.mock import MockExecutor

from builders.fields import fields_of
from builders.serving import Arrival, serve

__all__ = ["CONFIG", "ExecutorContract", "VirtualExecutorContract"]

CONFIG = EngineConfig(num_pages=18, page_size=2, max_num_batched_tokens=8, max_num_seqs=4)


class Listening:
    """An executor around another; keeps plans, as they were before and after, and results."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.before: list[StepPlan] = []
        self.after: list[StepPlan] = []
        self.results: list[StepResult] = []

    @property
    def needs_page_ids(self) -> bool:
        return self._executor.needs_page_ids

    def execute(self, plan: StepPlan) -> StepResult:
        self.before.append(deepcopy(plan))
        result = self._executor.execute(plan)
        self.after.append(deepcopy(plan))
        self.results.append(deepcopy(result))
        return result


def sampling_rows(plan: StepPlan) -> list[int]:
    """The rows that sample a token in this step."""
    rows = [chunk.row for chunk in plan.batch.chunks if chunk.is_last]
    return rows + ([] if plan.decodes is None else plan.decodes.rows.tolist())


def plain(value: Any) -> Any:
    """`value` with arrays as lists, to be compared."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, Value | msgspec.Struct):
        return [plain(getattr(value, name)) for name in fields_of(value)]
    return value


class ExecutorContract:
    """Run these by a subclass that makes the executor, each time a new one."""

    run: Listening

    def make(self) -> Executor:
        """Return an executor for engines of CONFIG."""
        raise NotImplementedError

    @pytest.fixture
    def heard(self) -> Listening:
        """A run of six requests with a shared prefix, where hits, chunks, evictions and preemptions all happen."""
        cls = type(self)
        if "run" not in vars(cls):
            cls.run = self.run_once()
        return cls.run

    def run_once(self) -> Listening:
        """Run them."""
        shared = [1, 2, 3, 4, 5, 6, 0, 1, 2]
        arrivals = [Arrival(2 * index, [*shared, index % 3], 20, 0, 30 if index == 4 else None) for index in range(6)]
        listening = Listening(self.make())
        _, requests, cancelled = serve(arrivals, CONFIG, listening)
        assert any(request.num_preemptions for request in requests)
        assert all(request.num_output_tokens == 20 for request in requests if request.index not in cancelled), "L8"
        return listening

    def test_it_says_once_and_for_all_whether_it_needs_page_ids(self, heard: Listening) -> None:
        one, other = self.make(), self.make()
        assert one.needs_page_ids is other.needs_page_ids is heard.needs_page_ids
        assert one.needs_page_ids in (True, False)

    def test_plans_name_pages_and_rows_if_it_needs_them(self, heard: Listening) -> None:
        for plan in heard.before:
            assert all(bool(chunk.tables) is heard.needs_page_ids for chunk in plan.batch.chunks)
            if plan.batch.num_decodes:
                assert (plan.decodes is not None) is heard.needs_page_ids

    def test_every_step_takes_a_time_and_samples_what_is_due(self, heard: Listening) -> None:
        for plan, result in zip(heard.before, heard.results, strict=True):
            assert type(result.duration_ns) is int and result.duration_ns >= 0
            assert (result.tokens is not None) is heard.needs_page_ids
            if result.tokens is not None:
                assert len(result.tokens) == CONFIG.max_num_seqs
                assert set(result.stopped_rows) <= set(sampling_rows(plan))

    def test_a_plan_that_computes_nothing_takes_no_time(self) -> None:
        """Its step preempts a request, or starts transfers."""
        executor = self.make()
        if isinstance(executor, SimExecutor | MockExecutor):
            assert executor.execute(StepPlan(0, Batch((), 0, 0, CONFIG.pool_tokens))).duration_ns == 0

    def test_a_plan_is_left_as_it_is(self, heard: Listening) -> None:
        assert plain(heard.before) == plain(heard.after)

    def test_it_reads_nothing_but_the_plans(self, heard: Listening) -> None:
        """A new executor, given the same plans and no engine, samples the same."""
        executor = self.make()
        num_sampled = 0
        for plan, expected in zip(heard.before, heard.results, strict=True):
            result = executor.execute(deepcopy(plan))
            if expected.tokens is None:
                assert result == expected
                continue
            rows = sampling_rows(plan)
            num_sampled += len(rows)
            assert result.tokens is not None
            assert result.tokens[rows].tolist() == expected.tokens[rows].tolist()
            assert result.stopped_rows == expected.stopped_rows
        assert num_sampled > 50 or not executor.needs_page_ids


class VirtualExecutorContract(ExecutorContract):
    """What an executor of virtual time promises besides."""

    def make(self) -> VirtualExecutor:
        """Return an executor for engines of CONFIG."""
        raise NotImplementedError

    @pytest.mark.parametrize("num_steps", [1, 2, 29, 30, 31, 200])
    def test_many_steps_take_as_long_as_one_by_one(self, num_steps: int) -> None:
        """L5 stands on it."""
        executor = self.make()
        one_by_one = []
        for step in range(num_steps):
            batch = Batch((), 3, 50 + 3 * step, CONFIG.pool_tokens)
            one_by_one.append(executor.execute(StepPlan(step, batch)).duration_ns)
        assert executor.decode_ns(3, 50, CONFIG.pool_tokens, num_steps) == one_by_one

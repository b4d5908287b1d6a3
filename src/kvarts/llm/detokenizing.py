"""Detokenizes the tokens that an executor samples, in the step that samples them."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from kvarts.clock import Clock
from kvarts.executor.base import Executor
from kvarts.llm.text import Generation
from kvarts.sched.plan import StepPlan, StepResult

__all__ = ["DetokenizingExecutor"]


class DetokenizingExecutor:
    """An Executor around another that passes each sampled token to its Generation.

    A request ends in the step in which its text reaches a stop text, as with an end token; accepted drafted tokens
    after that point are discarded. The step's duration includes detokenization. Owner of the active generations.
    """

    def __init__(self, executor: Executor, *, max_num_seqs: int, clock: Clock) -> None:
        self.needs_page_ids = executor.needs_page_ids
        self._executor = executor
        self._clock = clock
        self._generations: dict[int, Generation] = {}
        self._request_of_row = np.full(max_num_seqs, -1, np.int64)

    def add(self, generation: Generation) -> None:
        """Register a request for detokenization."""
        self._generations[generation.request.index] = generation

    def get(self, request_index: int) -> Generation | None:
        """Return an active request; None if the index is not active."""
        return self._generations.get(request_index)

    def drop(self, request_index: int) -> Generation | None:
        """Remove a request, and return its tokens and text; None if it was not added."""
        return self._generations.pop(request_index, None)

    def execute(self, plan: StepPlan) -> StepResult:
        """Have the wrapped executor carry out a step, and add its tokens to the generations."""
        start_ns = self._clock.now_ns()
        result = self._executor.execute(plan)
        rows = [] if plan.decodes is None else plan.decodes.rows.tolist()
        for chunk in plan.batch.chunks:
            self._request_of_row[chunk.row] = chunk.request_index
            if chunk.is_last:
                rows.append(chunk.row)
        if not rows:
            return result
        assert result.tokens is not None
        requests = self._request_of_row[rows].tolist()
        tokens = result.tokens[rows].tolist()
        if result.accepted:
            result = self._with_accepted(plan, result, dict(zip(rows, requests, strict=True)))
            stopped = result.stopped_rows
        else:
            ends = set(result.stopped_rows)
            stopped = tuple(
                row
                for row, request, token in zip(rows, requests, tokens, strict=True)
                if self._generations[request].take(token, is_end=row in ends)
            )
        return replace(result, duration_ns=self._clock.now_ns() - start_ns, stopped_rows=stopped)

    def _with_accepted(self, plan: StepPlan, result: StepResult, request_of_row: dict[int, int]) -> StepResult:
        """Add the tokens of a step with accepted drafts, and discard those after the end of a text.

        The request then ends with the drafted token that completed its text.
        """
        assert plan.drafts is not None and result.tokens is not None
        tokens, ends = result.tokens.copy(), set(result.stopped_rows)
        drafted = {row: plan.drafts.tokens[plan.drafts.rows == row][:count].tolist() for row, count in result.accepted}
        stopped: list[int] = []
        for row, request in request_of_row.items():
            generation, mine = self._generations[request], drafted.get(row, [])
            num_taken = next((place for place, token in enumerate(mine, 1) if generation.take(token)), 0)
            if num_taken:
                tokens[row] = mine[num_taken - 1]
                drafted[row] = mine[: num_taken - 1]
                stopped.append(row)
            elif generation.take(int(tokens[row]), is_end=row in ends):
                stopped.append(row)
        accepted = tuple((row, len(mine)) for row, mine in drafted.items() if mine)
        return replace(result, tokens=tokens, stopped_rows=tuple(stopped), accepted=accepted)

"""The executor of a mock: it computes nothing, takes as long as a cost model says, and makes tokens out of nothing.

A token depends on the seed, the token before it and its position: on nothing else, so not on the batch.
With the history of a sequence it can be told what comes next.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from kvarts.clock import Clock
from kvarts.config import EngineConfig
from kvarts.executor.cost import CostModel
from kvarts.executor.flat_batch import RowTables
from kvarts.executor.page_slots import PageSlots
from kvarts.executor.rotation import NoRotation
from kvarts.sampling import SamplingParams
from kvarts.sched.plan import StepPlan, StepResult

__all__ = ["MockExecutor", "next_tokens"]

Tokens = npt.NDArray[np.uint64]

_ODD = tuple(np.uint64(word) for word in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 0x9E3779B97F4A7C15))


def next_tokens(tokens: Tokens, positions: Tokens, *, seed: int, vocab_size: int) -> Tokens:
    """Return the token after each of `tokens` at `positions`, in [0, vocab_size).

    The mixing function is the finalizer of MurmurHash3 (public domain).
    """
    with np.errstate(over="ignore"):
        words = (tokens + _ODD[2]) * _ODD[0] ^ (positions + np.uint64(seed)) * _ODD[1]
        words ^= words >> np.uint64(33)
        words *= _ODD[0]
        words ^= words >> np.uint64(33)
        words *= _ODD[1]
        words ^= words >> np.uint64(33)
    return words % np.uint64(vocab_size)


class MockExecutor:
    """An Executor with steps that take as long as `cost` says, divided by `speedup`, on `clock`.

    Steps end at absolute times, so that waiting does not add up. Lag behind its own clock is counted in `late_ns`.
    Owner of the tokens that end each request.
    """

    needs_page_ids = True

    def __init__(
        self,
        config: EngineConfig,
        cost: CostModel,
        clock: Clock,
        *,
        vocab_size: int,
        seed: int = 0,
        speedup: float = 1.0,
    ) -> None:
        self.slots = PageSlots(config.num_pages, config.page_size)
        self.rotation = NoRotation()
        self.late_ns = 0
        """How much later than they should the steps have ended so far, the most of all."""
        self._rows = RowTables(config.max_num_seqs, config.page_size)
        self._max_num_seqs = config.max_num_seqs
        self._cost = cost
        self._clock = clock
        self._vocab_size = vocab_size
        self._seed = seed
        self._speedup = speedup
        self._stop_ids: dict[int, frozenset[int]] = {}

    # What sampling keeps of each request -------------------------------------------------------------------

    def add(
        self, request_index: int, params: SamplingParams, prompt: Sequence[int], stop_ids: Collection[int] = ()
    ) -> None:
        """Make tokens for a request from now on; those in `stop_ids` end it."""
        ends = frozenset(stop_ids) | frozenset(params.stop_token_ids)
        if ends:
            self._stop_ids[request_index] = ends

    def drop(self, request_index: int) -> tuple[float, ...]:
        """Forget a request. Its tokens have no log-probabilities."""
        self._stop_ids.pop(request_index, None)
        return ()

    # Steps ------------------------------------------------------------------------------------------------

    def execute(self, plan: StepPlan) -> StepResult:
        """Wait until the step has ended, and return its tokens."""
        start_ns = self._clock.now_ns()
        for source, target in plan.page_copies:
            self.slots.copy_page(source, target)
        batch = self._rows.flatten(plan)
        sampled = np.zeros(self._max_num_seqs, np.uint64)
        stopped: tuple[int, ...] = ()
        if batch is not None:
            self.slots.write(batch.slots, batch.positions)
            if batch.sampled_rows:
                at = batch.sampled_at
                chosen = next_tokens(
                    batch.tokens[at].astype(np.uint64),
                    batch.positions[at].astype(np.uint64),
                    seed=self._seed,
                    vocab_size=self._vocab_size,
                )
                sampled[batch.sampled_rows] = chosen
                if self._stop_ids:
                    stopped = tuple(
                        row
                        for row, request, token in zip(batch.sampled_rows, batch.requests, chosen.tolist(), strict=True)
                        if token in self._stop_ids.get(request, ())
                    )
        end_ns = start_ns + round(self._cost.step_ns(plan.batch.as_seen()) / self._speedup)
        self._clock.wait_until_ns(end_ns)
        now_ns = self._clock.now_ns()
        self.late_ns = max(self.late_ns, now_ns - end_ns)
        return StepResult(now_ns - start_ns, sampled, stopped)

"""The executor of a mock: it computes nothing, takes as long as a cost model says, and makes tokens out of nothing.

A token depends on the seed, the token before it and its position: on nothing else, so not on the batch.
With the history of a sequence it can be told what comes next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import log

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.clock import Clock
from kvarts.config import EngineConfig
from kvarts.errors import ConfigError
from kvarts.executor.cost import CostModel
from kvarts.executor.flat_batch import FlatBatch
from kvarts.executor.page_slots import PageSlots
from kvarts.executor.page_tables import PageTables
from kvarts.executor.rotation import NoRotation
from kvarts.kv.group_memory import GroupMemory
from kvarts.sampling import Logprobs, SamplingParams
from kvarts.sched.plan import StepPlan, StepResult

__all__ = ["MockExecutor", "next_tokens"]

Tokens = npt.NDArray[np.uint64]

_ODD = tuple(np.uint64(word) for word in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 0x9E3779B97F4A7C15))


def next_tokens(tokens: Tokens, positions: Tokens, *, seed: int | Tokens, vocab_size: int) -> Tokens:
    """Return the token after each of `tokens` at `positions`, in [0, vocab_size). `seed`: one, or one for each.

    The mixing function is the finalizer of MurmurHash3 (public domain).
    """
    with np.errstate(over="ignore"):
        words = (tokens + _ODD[2]) * _ODD[0] ^ (positions + np.asarray(seed, np.uint64)) * _ODD[1]
        words ^= words >> np.uint64(33)
        words *= _ODD[0]
        words ^= words >> np.uint64(33)
        words *= _ODD[1]
        words ^= words >> np.uint64(33)
    return words % np.uint64(vocab_size)


class _Mocked(msgspec.Struct):
    """A request that needs more than the next token: `num_tokens` were made, and `stop_ids` end it."""

    stop_ids: frozenset[int]
    min_tokens: int
    num_tokens: int = 0


class _Forced(msgspec.Struct):
    """The tokens that a request begins with, and how many of them were made."""

    tokens: Sequence[int]
    num_made: int = 0


class MockExecutor:
    """An Executor with steps that take as long as `cost` says, divided by `speedup`, on `clock`.

    Steps end at absolute times, so that waiting does not add up. Lag behind its own clock is counted in `late_ns`.
    Owner of the tokens that end each request. `vary`: makes tokens of the vocabulary out of those before them and those
    drawn. A request with a seed has tokens of its own. `groups`: of a model with KV groups, and the blocks of its
    memory; states are counted and not written. Raises ConfigError for a speedup that is not a finite number above 0.
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
        vary: Callable[[Tokens, Tokens], Tokens] | None = None,
        groups: GroupMemory | None = None,
        num_blocks: int = 0,
    ) -> None:
        if not 0.0 < speedup < float("inf"):
            raise ConfigError(f"must be a finite number above 0, got {speedup}", field="speedup")
        self.slots = PageSlots(config.num_pages if groups is None else num_blocks, config.page_size)
        self.rotation = NoRotation()
        self.late_ns = 0
        """How much later than they should the steps have ended so far, the most of all."""
        num_each = 1 if groups is None else groups.page_bytes // groups.block_bytes
        self._rows = PageTables(config.max_num_seqs, config.page_size, (), num_blocks=num_each)
        self._max_num_seqs = config.max_num_seqs
        self._cost = cost
        self._clock = clock
        self._vocab_size = vocab_size
        self._seed = seed
        self._speedup = speedup
        self._vary = vary
        self._watched: dict[int, _Mocked] = {}
        self._seeds: dict[int, int] = {}
        self._forced: dict[int, _Forced] = {}
        self._logprob = -log(vocab_size)
        self._counted: dict[int, tuple[int, Logprobs]] = {}
        """Of requests with log-probabilities: how many at each place, and those of the tokens made."""
        self._prompts: dict[int, int] = {}
        """Of those with the log-probabilities of their prompts: how long these are."""

    # What sampling keeps of each request -------------------------------------------------------------------

    def add(
        self, request_index: int, params: SamplingParams, prompt: Sequence[int], stop_ids: Collection[int] = ()
    ) -> None:
        """Make tokens for a request from now on; those in `stop_ids` end it."""
        ends = frozenset(stop_ids) | frozenset(params.stop_token_ids)
        if ends:
            self._watched[request_index] = _Mocked(ends, params.min_tokens)
        if params.forced_tokens:
            self._forced[request_index] = _Forced(params.forced_tokens)
        if params.seed is not None:
            self._seeds[request_index] = (self._seed * 1_000_003 + params.seed) % 2**64
        if params.logprobs:
            self._counted[request_index] = params.top_logprobs, Logprobs([], [])
        if params.prompt_logprobs is not None:
            self._prompts[request_index] = len(prompt)

    def drop(self, request_index: int) -> None:
        """Forget a request."""
        self._watched.pop(request_index, None)
        self._seeds.pop(request_index, None)
        self._forced.pop(request_index, None)
        self._counted.pop(request_index, None)
        self._prompts.pop(request_index, None)

    def logprobs(self, request_index: int) -> Logprobs:
        """Return the log-probabilities of the tokens so far; none is likelier than another."""
        counted = self._counted.get(request_index)
        return Logprobs() if counted is None else counted[1]

    def prompt_logprobs(self, request_index: int) -> Logprobs | None:
        """Return those of a prompt, where asked for: all are as likely, but for the first, which has none."""
        count = self._prompts.get(request_index)
        if count is None:
            return None
        return Logprobs([None, *[self._logprob] * (count - 1)], [()] * count, [0, *[1] * (count - 1)])

    def error(self, request_index: int) -> None:
        """Return None: nothing goes wrong."""

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
            self.slots.write(batch.block_slots, batch.positions)
            if batch.sampled_rows:
                at = batch.sampled_at
                before = batch.tokens[at].astype(np.uint64)
                chosen = next_tokens(
                    before,
                    batch.positions[at].astype(np.uint64),
                    seed=self._seeds_of(batch.requests),
                    vocab_size=self._vocab_size,
                )
                if self._vary is not None:
                    chosen = self._vary(before, chosen)
                if self._forced:
                    self._force(batch.requests, chosen)
                sampled[batch.sampled_rows] = chosen
                if self._watched or self._counted:
                    stopped = self._stopped(batch, chosen.tolist())
        end_ns = start_ns + round(self._cost.step_ns(plan.batch.as_seen()) / self._speedup)
        self._clock.wait_until_ns(end_ns)
        now_ns = self._clock.now_ns()
        self.late_ns = max(self.late_ns, now_ns - end_ns)
        return StepResult(now_ns - start_ns, sampled, stopped)

    def _seeds_of(self, requests: Sequence[int]) -> int | Tokens:
        if not self._seeds:
            return self._seed
        return np.array([self._seeds.get(request, self._seed) for request in requests], np.uint64)

    def _force(self, requests: Sequence[int], chosen: Tokens) -> None:
        """Put the next forced token of each request that has one in the place of the token chosen for it."""
        for place, request in enumerate(requests):
            forced = self._forced.get(request)
            if forced is not None:
                chosen[place] = forced.tokens[forced.num_made]
                forced.num_made += 1
                if forced.num_made == len(forced.tokens):
                    del self._forced[request]

    def _stopped(self, batch: FlatBatch, tokens: list[int]) -> tuple[int, ...]:
        """Count the tokens of requests that are watched, and return the rows that end."""
        rows = []
        for row, request, token in zip(batch.sampled_rows, batch.requests, tokens, strict=True):
            counted = self._counted.get(request)
            if counted is not None:
                num_top, told = counted
                told.values.append(self._logprob)
                others = ((token + place) % self._vocab_size if place else token for place in range(num_top))
                told.top.append(tuple((other, self._logprob) for other in others))
            watched = self._watched.get(request)
            if watched is not None:
                watched.num_tokens += 1
                if token in watched.stop_ids and watched.num_tokens > watched.min_tokens:
                    rows.append(row)
        return tuple(rows)

"""The executor of a mock: it computes nothing, takes the time that a cost model gives, and generates tokens by hashing.

A token depends only on the seed, the previous token and its position, never on the rest of the batch. The next token of
a sequence can therefore be predicted from its history.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from hashlib import sha256
from math import log

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.base.clock import Clock
from kvarts.base.errors import ConfigError
from kvarts.core.config import EngineConfig
from kvarts.core.executor import CostModel, no_rotation
from kvarts.core.kv.groups import GroupMemory
from kvarts.core.sampling import Logprobs, SamplingParams, TopLogprobs
from kvarts.core.sched.plan import StepPlan, StepResult
from kvarts.run.flat_batch import FlatBatch, PageTables, StateTables
from kvarts.run.page_bytes import PageSlots

__all__ = ["MockExecutor", "Vocabulary", "even_logprobs", "natural_length", "next_token", "next_tokens", "seed_of"]

Tokens = npt.NDArray[np.uint64]

_WORDS = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 0x9E3779B97F4A7C15)
_MASK = 2**64 - 1
_ODD = tuple(map(np.uint64, _WORDS))


def next_tokens(tokens: Tokens, positions: Tokens, *, seed: int | Tokens, vocab_size: int) -> Tokens:
    """Return the token after each of `tokens` at `positions`, in [0, vocab_size). `seed`: one for all, or one per
    token.

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


def next_token(token: int, position: int, *, seed: int, vocab_size: int) -> int:
    """Return what `next_tokens` returns for one token, without arrays."""
    first, second, third = _WORDS
    word = ((token + third) * first ^ (position + seed) * second) & _MASK
    word ^= word >> 33
    word = word * first & _MASK
    word ^= word >> 33
    word = word * second & _MASK
    word ^= word >> 33
    return word % vocab_size


def seed_of(seed: int, request_seed: int | None) -> int:
    """Return the seed of the tokens of a request, of a mock with `seed`."""
    return seed if request_seed is None else (seed * 1_000_003 + request_seed) % 2**64


def even_logprobs(token: int, num_top: int, vocab_size: int) -> TopLogprobs:
    """Return the `num_top` likeliest tokens in place of `token`, where all of a vocabulary are equally likely."""
    logprob = -log(vocab_size)
    return tuple(((token + place) % vocab_size if place else token, logprob) for place in range(num_top))


def natural_length(mean_tokens: int, tokens: Sequence[int], seed: int | None) -> int:
    """Return the length of an answer without a requested length: around `mean_tokens`, drawn from prompt and seed."""
    tail = b"".join(token.to_bytes(8, "little") for token in tokens[-64:])
    drawn = int.from_bytes(sha256(tail + str((len(tokens), seed)).encode()).digest()[:8], "little")
    return max(1, mean_tokens // 2 + drawn % (mean_tokens + 1))


class Vocabulary(msgspec.Struct, frozen=True):
    """The tokens that a mock writes. It draws numbers below `num_drawn`, which `vary` replaces by ids of tokens, given
    the tokens before them; prompts have ids below `size`.
    """

    num_drawn: int
    vary: Callable[[Tokens, Tokens], Tokens]
    size: int


class _Mocked(msgspec.Struct):
    """A request with stop ids: `num_tokens` were generated, and a token in `stop_ids` ends it after `min_tokens`."""

    stop_ids: frozenset[int]
    min_tokens: int
    num_tokens: int = 0


class _Forced(msgspec.Struct):
    """The forced tokens of a request, and the number of those generated."""

    tokens: Sequence[int]
    num_made: int = 0


class MockExecutor:
    """An Executor with steps of the duration that `cost` gives, divided by `speedup`, on `clock`.

    Steps end at absolute times, so that delays of waiting do not add up. `late_ns` records the lag behind the clock.
    Owns the tokens that end each request. `vary`: replaces the drawn tokens, given the tokens before them and those
    drawn. The tokens of a request with a seed depend on that seed. `groups`: the memory of a model with KV groups, with
    `num_blocks` blocks; states are counted but not written. Raises ConfigError if `speedup` is not a finite number
    above 0.
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
        self.rotate_late = no_rotation
        self.late_ns = 0
        """The longest delay so far between a step's intended end and its real end."""
        num_each = 1 if groups is None else sum(groups.part_tables)
        self._rows = PageTables(config.max_num_seqs, config.page_size, (), num_blocks=num_each)
        num_state_blocks = 0 if groups is None else groups.num_state_blocks
        self._states = StateTables(config.max_num_seqs, num_state_blocks) if num_state_blocks else None
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
        """Per request with log-probabilities: the number of alternatives per token, and the values so far."""
        self._prompts: dict[int, int] = {}
        """Length of the prompt, per request that asked for the log-probabilities of its prompt."""

    # Sampling state of each request ------------------------------------------------------------------------

    def add(
        self, request_index: int, params: SamplingParams, prompt: Sequence[int], stop_ids: Collection[int] = ()
    ) -> None:
        """Register a request, to sample its tokens; a token in `stop_ids` ends it."""
        ends = frozenset(stop_ids) | frozenset(params.stop_token_ids)
        if ends:
            self._watched[request_index] = _Mocked(ends, params.min_tokens)
        if params.forced_tokens:
            self._forced[request_index] = _Forced(params.forced_tokens)
        if params.seed is not None:
            self._seeds[request_index] = seed_of(self._seed, params.seed)
        if params.logprobs:
            self._counted[request_index] = params.top_logprobs, Logprobs([], [])
        if params.prompt_logprobs is not None:
            self._prompts[request_index] = len(prompt)

    def drop(self, request_index: int) -> None:
        """Remove a request."""
        self._watched.pop(request_index, None)
        self._seeds.pop(request_index, None)
        self._forced.pop(request_index, None)
        self._counted.pop(request_index, None)
        self._prompts.pop(request_index, None)

    def logprobs(self, request_index: int) -> Logprobs:
        """Return the log-probabilities of the tokens so far; all tokens are equally likely."""
        counted = self._counted.get(request_index)
        return Logprobs() if counted is None else counted[1]

    def prompt_logprobs(self, request_index: int) -> Logprobs | None:
        """Return the log-probabilities of a prompt if the request asked for them: equal for all tokens, None for the
        first.
        """
        count = self._prompts.get(request_index)
        if count is None:
            return None
        return Logprobs([None, *[self._logprob] * (count - 1)], [()] * count, [0, *[1] * (count - 1)])

    def error(self, request_index: int) -> None:
        """Return None: a mock's sampling does not fail."""

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
            if self._states is not None:
                self.slots.write_states(self._states.batch(plan), batch.positions)
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
        # As in a replay, a step that only preempts takes no time.
        step_ns = self._cost.step_ns(plan.batch.as_seen()) if plan.batch.num_decodes or plan.batch.chunks else 0
        end_ns = start_ns + round(step_ns / self._speedup)
        self._clock.wait_until_ns(end_ns)
        now_ns = self._clock.now_ns()
        self.late_ns = max(self.late_ns, now_ns - end_ns)
        return StepResult(now_ns - start_ns, sampled, stopped)

    def _seeds_of(self, requests: Sequence[int]) -> int | Tokens:
        if not self._seeds:
            return self._seed
        return np.array([self._seeds.get(request, self._seed) for request in requests], np.uint64)

    def _force(self, requests: Sequence[int], chosen: Tokens) -> None:
        """Replace the chosen token of each request that has forced tokens left by the next of these."""
        for place, request in enumerate(requests):
            forced = self._forced.get(request)
            if forced is not None:
                chosen[place] = forced.tokens[forced.num_made]
                forced.num_made += 1
                if forced.num_made == len(forced.tokens):
                    del self._forced[request]

    def _stopped(self, batch: FlatBatch, tokens: list[int]) -> tuple[int, ...]:
        """Count the tokens of watched requests, and return the rows that end."""
        rows = []
        for row, request, token in zip(batch.sampled_rows, batch.requests, tokens, strict=True):
            counted = self._counted.get(request)
            if counted is not None:
                num_top, told = counted
                told.values.append(self._logprob)
                told.top.append(even_logprobs(token, num_top, self._vocab_size))
            watched = self._watched.get(request)
            if watched is not None:
                watched.num_tokens += 1
                if token in watched.stop_ids and watched.num_tokens > watched.min_tokens:
                    rows.append(row)
        return tuple(rows)

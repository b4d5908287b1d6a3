"""Answers whose tokens are drawn when their request arrives, the same as MockExecutor draws step by step.

The engines of replays know the tokens of each answer from the beginning. `ForeseenEngine` runs one of them on a clock.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from math import log

import numpy as np

from kvarts.base.clock import PacedClock
from kvarts.core.request import Request, RequestState
from kvarts.core.sampling import Logprobs, SamplingParams
from kvarts.doors.openai.words import NUM_WORDS, vary_words
from kvarts.run.mock import even_logprobs, next_token, seed_of
from kvarts.run.text import Generation
from kvarts.sim.replica import Replica

__all__ = ["Foreseen", "ForeseenEngine"]


class _Answer:
    """The tokens of one request. `generation` receives them as they become due."""

    def __init__(self, params: SamplingParams, ends: frozenset[int], num_prompt: int) -> None:
        self.params = params
        self.ends = ends
        self.generation: Generation | None = None
        self.tokens: list[int] = []
        self.is_stopped = False
        """Whether its last token ends it by its id."""
        self.logprobs = Logprobs([], [])
        self.num_prompt = num_prompt


class Foreseen:
    """A SamplingState, and Generations, whose tokens are known from the beginning. Owner of the answers under way.

    `knows_tokens`: requests may hit the pages of generated tokens. `plans_ahead`: the engine plans a step before the
    tokens of the last one are known, and so cannot foresee an early end.
    """

    def __init__(self, *, seed: int, knows_tokens: bool = True, plans_ahead: bool = False) -> None:
        self._seed = seed
        self._knows_tokens = knows_tokens
        self._plans_ahead = plans_ahead
        self._answers: dict[int, _Answer] = {}

    # Sampling ---------------------------------------------------------------------------------------------

    def add(
        self, request_index: int, params: SamplingParams, prompt: Sequence[int], stop_ids: Collection[int] = ()
    ) -> None:
        """Register a request; a token in `stop_ids` ends it."""
        ends = frozenset(stop_ids) | frozenset(params.stop_token_ids)
        self._answers[request_index] = _Answer(params, ends, len(prompt))

    def drop(self, request_index: int) -> None:
        """Remove a request, if it was added."""
        self._answers.pop(request_index, None)

    def logprobs(self, request_index: int) -> Logprobs:
        """Return the log-probabilities of all of its tokens, if it asked for them."""
        answer = self._answers.get(request_index)
        return Logprobs() if answer is None else answer.logprobs

    def prompt_logprobs(self, request_index: int) -> Logprobs | None:
        """Return those of its prompt, if it asked for them: equal for all tokens, None for the first."""
        answer = self._answers.get(request_index)
        if answer is None or answer.params.prompt_logprobs is None:
            return None
        count = answer.num_prompt
        values = [None, *[-log(NUM_WORDS)] * (count - 1)]
        return Logprobs(values, [()] * count, [0, *[1] * (count - 1)])

    def error(self, request_index: int) -> None:
        """Return None: a mock's sampling does not fail."""

    def of_generations(self) -> _Generations:
        """Return the generations of the same requests."""
        return _Generations(self._answers)

    # Tokens -----------------------------------------------------------------------------------------------

    def draw(self, request: Request) -> None:
        """Draw the tokens of `request`, up to its end, which becomes its `max_tokens`."""
        answer = self._answers[request.index]
        params, generation = answer.params, answer.generation
        assert generation is not None
        tokens = answer.tokens
        shadow = generation.anew() if params.stop else None
        forced = params.forced_tokens or ()
        seed, position = seed_of(self._seed, params.seed), request.num_prompt_tokens - 1
        token = int(request.content.tokens(position, position + 1).tolist()[0])
        for number in range(request.max_tokens):
            if number < len(forced):
                token = forced[number]
            else:
                drawn = next_token(token, position + number, seed=seed, vocab_size=NUM_WORDS)
                token = drawn if token < NUM_WORDS else _varied(token, drawn)
            tokens.append(token)
            answer.is_stopped = token in answer.ends and number >= params.min_tokens
            if answer.is_stopped or (shadow is not None and shadow.take(token)):
                break
        request.stops = self._plans_ahead and len(tokens) < request.max_tokens
        request.max_tokens = len(tokens)
        if params.logprobs:
            tops = [even_logprobs(token, params.top_logprobs, NUM_WORDS) for token in tokens]
            answer.logprobs = Logprobs([-log(NUM_WORDS)] * len(tokens), tops)
        if self._knows_tokens:
            request.content.append(array("Q", tokens).tobytes())

    def give(self, request_index: int, num_tokens: int) -> None:
        """Let a request have its first `num_tokens` tokens."""
        answer = self._answers.get(request_index)
        if answer is None or answer.generation is None:
            return
        generation, tokens = answer.generation, answer.tokens
        for number in range(len(generation.tokens), num_tokens):
            is_last = number == len(tokens) - 1
            generation.take(tokens[number], is_end=is_last and answer.is_stopped)

    def fail(self, request_index: int, error: Exception) -> None:
        """End a request with an error: no worker is up that could answer it."""
        answer = self._answers.get(request_index)
        if answer is not None and answer.generation is not None:
            answer.generation.fail(error, is_outage=True)


def _varied(before: int, drawn: int) -> int:
    return int(vary_words(np.array([before], np.uint64), np.array([drawn], np.uint64))[0])


class _Generations:
    """The generations under way."""

    def __init__(self, answers: dict[int, _Answer]) -> None:
        self._answers = answers

    def add(self, generation: Generation) -> None:
        """Register a request that was added to the sampling state."""
        self._answers[generation.request.index].generation = generation

    def get(self, request_index: int) -> Generation | None:
        """Return an active request; None if the index is not active."""
        answer = self._answers.get(request_index)
        return None if answer is None else answer.generation

    def drop(self, request_index: int) -> Generation | None:
        """Remove the generation of a request, and return it; None if it was not added."""
        answer = self._answers.get(request_index)
        if answer is None:
            return None
        generation, answer.generation = answer.generation, None
        return generation


class ForeseenEngine:
    """A CoreEngine: a Replica in virtual time, whose steps end when their time has passed on `clock`."""

    def __init__(self, replica: Replica, clock: PacedClock, foreseen: Foreseen) -> None:
        self._replica = replica
        self._clock = clock
        self._foreseen = foreseen
        self._requests: dict[int, Request] = {}

    def submit(self, request: Request, now_ns: int) -> str | None:
        """Draw the tokens of `request`, and queue it, or return why it can never run."""
        self._foreseen.draw(request)
        self.pass_to(now_ns)
        reason = self._replica.submit(request, now_ns)
        if reason is None:
            self._requests[request.index] = request
        return reason

    def cancel(self, request: Request) -> None:
        """Drop `request` between steps."""
        self._replica.wake(self._clock.now_ns())
        self._replica.cancel(request)
        del self._requests[request.index]
        self._rest()

    def step(self, now_ns: int) -> list[Request]:
        """Run one step that starts at `now_ns`, give requests their tokens, and return those that have finished.

        A task that is queued in a pause interrupts it; the next call goes on with it.
        """
        replica = self._replica
        finished = [] if replica.is_pausing else self._start(now_ns)
        if not replica.is_pausing:
            self._clock.wait_until_ns(replica.now_ns)
            finished += replica.finish()
        elif self._clock.wait_unless_asked(replica.now_ns):
            finished += replica.finish()
        for request in finished:
            del self._requests[request.index]
            self._foreseen.give(request.index, request.max_tokens)
        running = replica.scheduler.running
        for request in self._requests.values():
            num_tokens = request.num_output_tokens
            if request.state is RequestState.DECODING:
                num_tokens = running.num_computed(request) + 1 - request.num_prompt_tokens
            self._foreseen.give(request.index, num_tokens)
        self._rest()
        return finished

    def _start(self, now_ns: int) -> list[Request]:
        """Start a step or a pause; return the requests that finish at once.

        A plan without a batch takes no time: the next one follows it before any task.
        """
        replica = self._replica
        finished: list[Request] = []
        replica.start(now_ns)
        while replica.is_pausing and replica.now_ns <= now_ns and replica.has_work:
            finished += replica.finish()
            replica.start(now_ns)
        return finished

    def _rest(self) -> None:
        """Without requests, take the results of the last step, by a step without a batch that takes no real time.

        Copies to host memory, and what storage does, go on: a pause until they end is left open.
        """
        replica = self._replica
        is_left = replica.is_pausing
        while replica.has_work and not (self._requests or is_left):
            now_ns = replica.now_ns
            end_ns = replica.start(now_ns)
            is_left = replica.is_pausing and end_ns > now_ns
            if not is_left:
                replica.finish()
                self._clock.pass_to(end_ns)

    def pass_to(self, now_ns: int) -> None:
        """Without requests, note what copies and storage have done before `now_ns`, when something happens."""
        replica = self._replica
        while replica.is_pausing and replica.now_ns <= now_ns:
            replica.finish()
            if replica.has_work and replica.now_ns < now_ns:
                replica.start(replica.now_ns)

    @property
    def has_work(self) -> bool:
        """Whether there are requests."""
        return bool(self._requests)

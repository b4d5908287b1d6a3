"""Requests with tokens, sampling and text on top of the core engine. For one thread; see EngineLoop for several."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from kvarts.clock import Clock
from kvarts.content import Content
from kvarts.errors import ConfigError
from kvarts.llm.text import Completion, Generation
from kvarts.request import Request
from kvarts.sampling import Likeliest, SamplingParams

__all__ = ["CoreEngine", "Generations", "LLMEngine", "SamplingState"]


class CoreEngine(Protocol):
    """Plans and carries out steps."""

    def submit(self, request: Request, now_ns: int) -> str | None:
        """Queue `request`, or return why it can never run."""

    def cancel(self, request: Request) -> None:
        """Drop `request` between steps; its pages are free at once."""

    def step(self, now_ns: int) -> list[Request]:
        """Do one step that starts at `now_ns`. Return the requests that finished, in admission order."""

    @property
    def has_work(self) -> bool:
        """Whether there are requests, or transfers under way."""


class SamplingState(Protocol):
    """What sampling keeps of each request under way."""

    def add(
        self, request_index: int, params: SamplingParams, prompt: Sequence[int], stop_ids: Collection[int] = ()
    ) -> None:
        """Sample for a request from now on; tokens in `stop_ids` end it."""

    def drop(self, request_index: int) -> tuple[float, ...]:
        """Forget a request, and return the log-probabilities of its tokens."""

    def likeliest(self, request_index: int) -> Likeliest:
        """Return the log-probabilities of the tokens of a request so far, and of the likeliest in their places."""


class Generations(Protocol):
    """The generations under way."""

    def add(self, generation: Generation) -> None:
        """Make text for a request from now on."""

    def get(self, request_index: int) -> Generation | None:
        """Return a request under way; None if there is none of that index."""

    def drop(self, request_index: int) -> Generation:
        """Forget a request, and return its tokens and text."""


LONG = "\x00long"
"""Added to the salt of sequences that are rotated as long ones: their KV is another."""


class LLMEngine:
    """A core engine of requests with sampling parameters and text. `eos_ids`: tokens with which the model ends.

    `switch_length`: a model computes other KV for sequences of more tokens than that, None for a model that does not.
    """

    def __init__(
        self,
        core: CoreEngine,
        sampling: SamplingState,
        generations: Generations,
        clock: Clock,
        *,
        page_size: int,
        tokenizer: Any = None,
        eos_ids: Collection[int] = (),
        switch_length: int | None = None,
    ) -> None:
        self._core = core
        self._switch_length = switch_length
        self._sampling = sampling
        self._generations = generations
        self._clock = clock
        self._page_size = page_size
        self._tokenizer = tokenizer
        self._eos_ids = frozenset(eos_ids)
        self._num_submitted = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self._core.has_work

    def submit(self, tokens: Sequence[int], params: SamplingParams, *, priority: int = 0) -> int:
        """Queue a prompt, and return its index. Raise ConfigError for one that can never run."""

        def make(index: int, now_ns: int) -> Request:
            return Request(
                index,
                Content.from_tokens(tokens, page_size=self._page_size, owner=index),
                num_prompt_tokens=len(tokens),
                max_tokens=params.max_tokens,
                arrival_ns=now_ns,
                priority=priority,
            )

        return self.start(make, params, tokenizer=self._tokenizer)

    def start(
        self,
        make: Callable[[int, int], Request],
        params: SamplingParams,
        *,
        stop_ids: Collection[int] = (),
        tokenizer: Any = None,
    ) -> int:
        """Queue the request that `make` returns, given its index and the time, and return the index.

        `stop_ids`: tokens that end it, beside those of `params` and the model's own. Without a `tokenizer`, no text is
        made. Raise ConfigError for a request that can never run.
        """
        # An index is used up even if the prompt is rejected: events name requests by it.
        index = self._num_submitted
        self._num_submitted += 1
        request = make(index, self._clock.now_ns())
        self._set_apart(request)
        reason = self._core.submit(request, request.arrival_ns)
        if reason is not None:
            raise ConfigError(reason, field="prompt", hint="Give the engine more kv_memory, or lower max_tokens.")
        # Only what is changed by tokens before it needs them, and a long history is many.
        prompt = () if params.is_argmax else request.content.tokens(0, request.num_prompt_tokens)
        own_ids = frozenset() if params.ignore_eos else self._eos_ids
        self._sampling.add(index, params, prompt, own_ids.union(stop_ids))
        self._generations.add(Generation(request, params, tokenizer))
        return index

    def _set_apart(self, request: Request) -> None:
        """Keep the KV of a long sequence apart from that of short ones.

        Raise ConfigError for a sequence that would become a long one while it is generated: all of its KV would have to
        be computed anew.
        """
        limit, content = self._switch_length, request.content
        # The last token is sampled, and not computed.
        if limit is None or max(request.num_prompt_tokens, request.num_prompt_tokens + request.max_tokens - 1) <= limit:
            return
        if request.num_prompt_tokens <= limit:
            raise ConfigError(
                f"{request.num_prompt_tokens} prompt tokens and {request.max_tokens} to generate pass {limit:,} "
                "tokens, where the model changes its rotation",
                field="prompt",
                hint=f"Give a prompt of more than {limit:,} tokens, or lower max_tokens.",
            )
        if content.owner != request.index:
            raise ConfigError(
                f"a session of this model ends at {limit:,} tokens, where it changes its rotation", field="prompt"
            )
        content.salt = (content.salt or "") + LONG

    def cancel(self, index: int) -> Completion | None:
        """End a request between steps, and return what it has; None if it has ended. Its pages are free at once."""
        generation = self._generations.get(index)
        if generation is None:
            return None
        self._core.cancel(generation.request)
        return self._end(index, "cancelled")

    def step(self) -> list[Completion]:
        """Do one step. Return the requests that ended with it."""
        return [self._end(request.index, "length") for request in self._core.step(self._clock.now_ns())]

    def likeliest(self, index: int) -> Likeliest:
        """Return the log-probabilities of a request under way that asked for them, token by token."""
        return self._sampling.likeliest(index)

    def generation(self, index: int) -> Generation | None:
        """Return a request under way; None if there is none of that index."""
        return self._generations.get(index)

    def _end(self, index: int, reason: str) -> Completion:
        generation = self._generations.drop(index)
        generation.finish(reason)
        # Drafted tokens may have been chosen after the one that brought a stop text.
        num_tokens = len(generation.tokens)
        likeliest = self._sampling.likeliest(index)[:num_tokens] if generation.params.logprobs else None
        return generation.completion(self._sampling.drop(index)[:num_tokens], likeliest)

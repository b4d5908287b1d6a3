"""Counters of a server, updated by events, and read when metrics are requested."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvarts.events import Event, LeapDone, StepDone
from kvarts.llm.text import Completion
from kvarts.openai_api.buckets import BucketCounts
from kvarts.request import Request

if TYPE_CHECKING:
    from kvarts.event_log import EventReader
    from kvarts.openai_api.answer import Choice
    from kvarts.openai_api.residency import Residency

__all__ = ["Meter"]

REQUEST_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
             960.0, 1920.0, 7680.0)  # fmt: skip
FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
                 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
           80.0)  # fmt: skip
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
NUM_CHOICES = (1, 2, 5, 10, 20)
FINE_S = tuple(round(0.0001 * 1.15**power, 7) for power in range(110))
"""Bounds from 0.1 ms to 6 minutes, for percentiles: each is 15 % above the one before."""


def bounds_1_2_5(most: int) -> tuple[int, ...]:
    """Return 1, 2, 5, 10, 20, 50 and so on, up to `most`."""
    bounds = (mantissa * 10**power for power in range(len(str(most))) for mantissa in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= most)


class Meter:
    """An EventReader of one engine's steps, and the ChoiceMeter of its answers. For the engine's thread.

    `speedup`: ratio of model time to real time; durations are reported in real time. `residency`: the meter of a share
    of the blocks, another EventReader of the same engine.
    """

    wants_details = False

    def __init__(self, *, max_model_len: int, speedup: float = 1.0, residency: Residency | None = None) -> None:
        self.residency = residency
        self._per_ns = 1e-9 / speedup
        tokens = bounds_1_2_5(max_model_len)
        self.first_token_s = BucketCounts(FINE_S, FIRST_TOKEN_S)
        self.next_token_s = BucketCounts(FINE_S, TOKEN_S)
        self.token_s_by_request = BucketCounts(TOKEN_S)
        self.request_s = BucketCounts(REQUEST_S)
        self.queue_s = BucketCounts(REQUEST_S)
        self.inference_s = BucketCounts(REQUEST_S)
        self.prefill_s = BucketCounts(REQUEST_S)
        self.decode_s = BucketCounts(REQUEST_S)
        self.prompt_tokens_by_request = BucketCounts(tokens)
        self.generated_by_request = BucketCounts(tokens)
        self.max_tokens_by_request = BucketCounts(tokens)
        self.computed_by_request = BucketCounts(tokens)
        self.step_tokens = BucketCounts(STEP_TOKENS)
        self.num_choices = BucketCounts(NUM_CHOICES)
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_hit_tokens_below = 0
        self.num_recomputed_tokens = 0
        self.num_preemptions = 0
        self.num_steps = 0
        self.ended_by_reason = dict.fromkeys(("stop", "length", "abort", "error", "repetition"), 0)
        self.num_refused = 0
        """Requests refused because the queue was full."""
        self.num_rejected = 0
        """Requests that could never get their pages."""
        self.num_aborted = 0
        """Requests that were ended because their client disconnected."""

    @property
    def readers(self) -> Sequence[EventReader]:
        """The readers of the engine's events."""
        return [self] if self.residency is None else [self, self.residency]

    def take(self, other: Meter) -> None:
        """Add what `other` has counted, and leave it with nothing. Its `max_model_len` is no larger."""
        for name, value in vars(other).items():
            if isinstance(value, BucketCounts):
                getattr(self, name).take(value)
            elif name.startswith("num_"):
                setattr(self, name, getattr(self, name) + value)
                setattr(other, name, 0)
        for reason, count in other.ended_by_reason.items():
            self.ended_by_reason[reason] += count
            other.ended_by_reason[reason] = 0
        if self.residency is not None and other.residency is not None:
            self.residency.take(other.residency)

    # Steps ------------------------------------------------------------------------------------------------

    def observe(self, events: Sequence[Event]) -> None:
        """Count steps."""
        for event in events:
            if isinstance(event, StepDone):
                self.num_steps += 1
                self.num_preemptions += len(event.preemptions)
                self.step_tokens.add(event.num_tokens)
            elif isinstance(event, LeapDone):
                self.num_steps += len(event.durations_ns)
                self.step_tokens.add(event.num_running, len(event.durations_ns))

    # Choices ----------------------------------------------------------------------------------------------

    def first_token(self, waited_s: float) -> None:
        """Count a first token."""
        self.num_generated_tokens += 1
        self.first_token_s.add(waited_s)

    def next_tokens(self, num_tokens: int, waited_s: float) -> None:
        """Count tokens after the first; they arrived `waited_s` after the previous ones."""
        self.num_generated_tokens += num_tokens
        if num_tokens == 1:
            self.next_token_s.add(waited_s)
        else:
            self.next_token_s.add(waited_s / num_tokens, num_tokens)

    def prefilled(self, request: Request) -> None:
        """Count a prompt that has been computed, with its hits."""
        self.num_prompt_tokens += request.num_prompt_tokens
        self.num_queried_tokens += request.num_prompt_tokens
        self.num_hit_tokens += request.cached_tokens
        self.num_hit_tokens_below += sum(request.cached_tokens_below)

    def ended(self, choice: Choice, completion: Completion, now_s: float) -> None:
        """Count a choice that has ended."""
        reason = "abort" if completion.finish_reason == "cancelled" else completion.finish_reason
        self.ended_by_reason[reason] += 1
        request = choice.request
        if request is None or reason == "abort":
            return
        num_tokens = len(completion.tokens)
        self.request_s.add(now_s - choice.started_s)
        if request.first_admitted_ns >= 0 and request.first_token_ns >= 0:
            self.queue_s.add((request.first_admitted_ns - request.arrival_ns) * self._per_ns)
            self.prefill_s.add((request.first_token_ns - request.first_admitted_ns) * self._per_ns)
            self.inference_s.add((request.last_token_ns - request.first_admitted_ns) * self._per_ns)
            decode_s = (request.last_token_ns - request.first_token_ns) * self._per_ns
            self.decode_s.add(decode_s)
            if num_tokens > 1:
                self.token_s_by_request.add(decode_s / (num_tokens - 1))
        self.num_recomputed_tokens += request.recomputed_tokens
        self.prompt_tokens_by_request.add(request.num_prompt_tokens)
        self.generated_by_request.add(num_tokens)
        self.max_tokens_by_request.add(request.max_tokens)
        self.computed_by_request.add(request.num_prompt_tokens - request.cached_tokens)

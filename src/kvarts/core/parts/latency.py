"""A bound on inter-token latency: the most tokens of prompts beside the decodes of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvarts.core.request import Request
from kvarts.core.sched.plan import Batch, Chunk, chunk_of
from kvarts.core.sched.step import FOR_BUDGET, PASS, Acts, Ask, Step, Verdict
from kvarts.core.sched.wheel import DecodeWheel

__all__ = ["ItlBound"]


class ItlBound:
    """The most tokens of a prompt that a step may compute beside the decodes of `wheel`.

    Promises: a step with decodes takes at most `most_ns` by `step_ns`, the cost model's, or computes a single chunk of
    at most a page. So prompts go on where decodes alone take longer than the bound.
    """

    __slots__ = ("_most_ns", "_page_size", "_pool_tokens", "_step_ns", "_wheel", "num_beside", "tokens_beside")

    def __init__(
        self, most_ns: int, step_ns: Callable[[Batch], int], wheel: DecodeWheel, *, page_size: int, pool_tokens: int
    ) -> None:
        self._most_ns = most_ns
        self._step_ns = step_ns
        self._wheel = wheel
        self._page_size = page_size
        self._pool_tokens = pool_tokens
        self.num_beside = self.tokens_beside = 0
        """Decodes that are off the wheel in this step, and the tokens that they know."""

    def acts(self) -> Acts:
        """Return where it acts."""
        return Acts(gates={"latency": self.has_room})

    def has_room(self, ask: Ask, step: Step) -> Verdict:
        """Let the head pass if a chunk of it may follow those of the step."""
        most_tokens = self.most_tokens(ask.request, ask.hit_tokens, 1, step.chunks)
        return PASS if most_tokens > 0 else FOR_BUDGET

    def most_tokens(self, request: Request, start: int, num_tokens: int, chunks: Sequence[Chunk]) -> int:
        """Return how many of the tokens [start, start + num_tokens) of `request` may follow `chunks` in the step."""
        num_decodes = self._wheel.num_decoding + self.num_beside
        if not num_decodes:
            return num_tokens
        known_tokens = self._wheel.known_tokens + self.tokens_beside
        num_known = request.num_prompt_tokens + request.num_output_tokens
        least = 0 if chunks else min(num_tokens, self._page_size)
        most = num_tokens
        while least < most:
            middle = (least + most + 1) // 2
            chunk = chunk_of(request, start, middle, num_known)
            batch = Batch((*chunks, chunk), num_decodes, known_tokens, self._pool_tokens)
            if self._step_ns(batch) <= self._most_ns:
                least = middle
            else:
                most = middle - 1
        return least

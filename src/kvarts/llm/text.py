"""One request as its user sees it: tokens become text, and text may end it."""

from __future__ import annotations

from typing import Any

import msgspec

from kvarts.request import Request
from kvarts.sampling import Likeliest, SamplingParams

__all__ = ["Completion", "Generation"]

UNFINISHED = "\ufffd"
"""What a tokenizer makes of the first bytes of a character."""


class Completion(msgspec.Struct, frozen=True):
    """The outcome of a prompt. `tokens`: generated, the one that ended it included. `finish_reason`: `stop`, `length`
    or `cancelled`. `logprobs`: of each token, where asked for. `cached_tokens`: prompt tokens found in the cache.
    """

    index: int
    text: str
    tokens: tuple[int, ...]
    num_prompt_tokens: int
    finish_reason: str
    logprobs: tuple[float, ...] | None = None
    cached_tokens: int = 0
    likeliest: Likeliest = []
    """With log-probabilities: those of each token, and of the likeliest tokens in its place."""


class Generation:
    """A request under way: its tokens and its text so far."""

    def __init__(self, request: Request, params: SamplingParams, tokenizer: Any) -> None:
        self.request = request
        self.params = params
        self.finish_reason: str | None = None
        self.tokens: list[int] = []
        self.text = ""
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._piece = getattr(tokenizer, "piece", None)
        """Returns the text of a token, of a tokenizer in which that depends on nothing else."""
        if self._backend is not None:
            from tokenizers.decoders import DecodeStream

            self._stream = DecodeStream(skip_special_tokens=True)

    def take(self, token: int, *, is_end: bool = False) -> bool:
        """Add the next token, which is an end by its id or not. Return whether the request ends with it.

        The text of a token that is an end is no part of the answer.
        """
        self.tokens.append(token)
        if is_end:
            self.finish_reason = "stop"
        elif self._tokenizer is not None:
            self._extend_text(token)
        return self.finish_reason is not None

    def finish(self, reason: str) -> None:
        """End the request, if it has not ended already."""
        if self.finish_reason is None:
            self.finish_reason = reason

    def completion(self, logprobs: tuple[float, ...] = (), likeliest: Likeliest | None = None) -> Completion:
        """Return the outcome of a request that has ended."""
        assert self.finish_reason is not None
        return Completion(
            self.request.index,
            self.text,
            tuple(self.tokens),
            self.request.num_prompt_tokens,
            self.finish_reason,
            logprobs if self.params.logprobs else None,
            self.request.cached_tokens,
            likeliest or [],
        )

    @property
    def final_text(self) -> str:
        """The part of `text` that no stop text can take back any more."""
        if self.finish_reason is not None:
            return self.text
        held = 0
        for stop in self.params.stop:
            for length in range(min(len(stop) - 1, len(self.text)), held, -1):
                if self.text.endswith(stop[:length]):
                    held = length
                    break
        return self.text[: len(self.text) - held]

    def _extend_text(self, token: int) -> None:
        """Bring `text` up to date; a character of which bytes are missing waits for them."""
        if self._piece is not None:
            text = self.text + self._piece(token)
        elif self._backend is not None:
            text = self.text + (self._stream.step(self._backend, token) or "")
        else:
            text = self._tokenizer.decode(self.tokens, skip_special_tokens=True)
            if text.endswith(UNFINISHED):
                return
        if not self.params.stop or len(self.tokens) <= self.params.min_tokens:
            self.text = text
            return
        # The text before has been searched already.
        begin = max(0, len(self.text) - max(map(len, self.params.stop), default=0))
        places = [place for stop in self.params.stop if (place := text.find(stop, begin)) >= 0]
        if places:
            text = text[: min(places)]
            self.finish_reason = "stop"
        self.text = text

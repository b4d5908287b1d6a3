"""One request as a user sees it: tokens become text, and text may end it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from tokenizers.decoders import DecodeStream

from kvarts.executor.torch.sampling import Sampler, SamplingParams
from kvarts.request import Request

__all__ = ["Completion", "Generation"]

UNFINISHED = "\ufffd"
"""What a tokenizer makes of the first bytes of a character."""


class Completion(msgspec.Struct, frozen=True):
    """What became of a prompt. `tokens`: generated, the one that ended it included. `finish_reason`: `stop`, `length`
    or `cancelled`. `logprobs`: of each token, where asked for. `cached_tokens`: prompt tokens found in the cache.
    """

    index: int
    text: str
    tokens: tuple[int, ...]
    num_prompt_tokens: int
    finish_reason: str
    logprobs: tuple[float, ...] | None = None
    cached_tokens: int = 0


class Generation:
    """A request under way, and its text so far. `stop_ids`: tokens that end it."""

    def __init__(
        self,
        request: Request,
        prompt: Sequence[int],
        params: SamplingParams,
        tokenizer: Any,
        stop_ids: frozenset[int],
        device: torch.device,
    ) -> None:
        self.request = request
        self.params = params
        self.finish_reason: str | None = None
        self.tokens: list[int] = []
        self.text = ""
        self._known = list(prompt)
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop_ids = stop_ids
        self._sampler = None if params.is_plain else Sampler(params, request.index, device)
        self._logprobs: list[float] = []

    def choose(self, logits: torch.Tensor) -> int:
        """A token after what is known, from `logits` [vocabulary]."""
        assert self._sampler is not None, "the largest is chosen for all at once"
        token, logprob = self._sampler.choose(logits, torch.tensor(self._known, device=logits.device))
        self._logprobs.append(logprob)
        return token

    def take(self, token: int) -> bool:
        """The next token is `token`; whether it is the last, as far as what was said decides."""
        self.tokens.append(token)
        self._known.append(token)
        if token in self._stop_ids:
            self.finish_reason = "stop"
        elif self._tokenizer is not None:
            self._tell(token)
        return self.finish_reason is not None

    def finish(self, reason: str) -> None:
        """It ended, if it has not already."""
        if self.finish_reason is None:
            self.finish_reason = reason

    def completion(self) -> Completion:
        """What became of it; it is finished."""
        assert self.finish_reason is not None
        return Completion(
            self.request.index,
            self.text,
            tuple(self.tokens),
            self.request.num_prompt_tokens,
            self.finish_reason,
            tuple(self._logprobs) if self.params.logprobs else None,
            self.request.cached_tokens,
        )

    @property
    def told(self) -> str:
        """The part of `text` that no stop can take back any more."""
        if self.finish_reason is not None:
            return self.text
        held = 0
        for stop in self.params.stop:
            for length in range(min(len(stop) - 1, len(self.text)), held, -1):
                if self.text.endswith(stop[:length]):
                    held = length
                    break
        return self.text[: len(self.text) - held]

    def _tell(self, token: int) -> None:
        """Brings `text` up to date; a character whose bytes are not all there waits for them."""
        if self._backend is not None:
            text = self.text + (self._stream.step(self._backend, token) or "")
        else:
            text = self._tokenizer.decode(self.tokens, skip_special_tokens=True)
            if text.endswith(UNFINISHED):
                return
        # What was there before has been looked through.
        begin = max(0, len(self.text) - max(map(len, self.params.stop), default=0))
        places = [place for stop in self.params.stop if (place := text.find(stop, begin)) >= 0]
        if places:
            text = text[: min(places)]
            self.finish_reason = "stop"
        self.text = text

"""How the next token is chosen, for each request by itself."""

from __future__ import annotations

import msgspec
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvarts.errors import ConfigError

__all__ = ["Sampler", "SamplingParams"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one request asks for. `temperature` 0 is greedy; then the rest but the penalty says nothing.

    `top_k` 0, `top_p` 1 and `min_p` 0 are off. `seed`: the same text, alone and in any batch; without one, a request
    draws from its index. `stop`: texts that end it and are not part of the answer. `ignore_eos`: the model's own end
    is a token like any other. `logprobs`: tell the log-probability of each token. Raises ConfigError for a value out of
    range.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False

    def __post_init__(self) -> None:
        bounds = {
            "max_tokens": self.max_tokens >= 1,
            "temperature": 0.0 <= self.temperature < float("inf"),
            "top_k": self.top_k >= 0,
            "top_p": 0.0 < self.top_p <= 1.0,
            "min_p": 0.0 <= self.min_p <= 1.0,
            "repetition_penalty": 0.0 < self.repetition_penalty < float("inf"),
        }
        for field, is_good in bounds.items():
            if not is_good:
                raise ConfigError(f"is out of range: {getattr(self, field)}", field=f"sampling.{field}")
        if any(not text for text in self.stop):
            raise ConfigError("must not be empty", field="sampling.stop")

    @property
    def is_plain(self) -> bool:
        """Whether the largest logit decides, and nobody asks how large it was."""
        return self.temperature == 0.0 and self.repetition_penalty == 1.0 and not self.logprobs


class Sampler:
    """Chooses the tokens of one request. `index`: seeds it where the request does not."""

    def __init__(self, params: SamplingParams, index: int, device: torch.device) -> None:
        self._processors = LogitsProcessorList()
        if params.repetition_penalty != 1.0:
            self._processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
        self._generator: torch.Generator | None = None
        if params.temperature > 0.0:
            self._generator = torch.Generator(device=device)
            self._generator.manual_seed(index if params.seed is None else params.seed)
            if params.temperature != 1.0:
                self._processors.append(TemperatureLogitsWarper(params.temperature))
            if params.top_k:
                self._processors.append(TopKLogitsWarper(params.top_k))
            if params.top_p < 1.0:
                self._processors.append(TopPLogitsWarper(params.top_p))
            if params.min_p > 0.0:
                self._processors.append(MinPLogitsWarper(params.min_p))
        self.needs_tokens = params.repetition_penalty != 1.0

    def choose(self, logits: torch.Tensor, known: torch.Tensor) -> tuple[int, float]:
        """A token and its log-probability before anything was done to it. `logits` [vocabulary], `known` [tokens]."""
        logits = logits.float()
        scores = self._processors(known[None], logits[None].clone())[0]
        if self._generator is None:
            token = int(scores.argmax())
        else:
            token = int(torch.multinomial(torch.softmax(scores, dim=-1), 1, generator=self._generator))
        return token, float(torch.log_softmax(logits, dim=-1)[token])

"""Sampling parameters of a request. Does not depend on PyTorch."""

from __future__ import annotations

from typing import Any

import msgspec

from kvarts.base.errors import ConfigError
from kvarts.base.limits import MOST_UINT32, MOST_UINT64, brief, check_whole

__all__ = ["MOST_CHOICES", "Logprobs", "SamplingParams", "StructuredOutputs", "TopLogprobs"]

MOST_CHOICES = 10_000
"""Texts of a choice: 100,000 took 1.7 s to compile, which other requests wait for."""
TopLogprobs = tuple[tuple[int, float], ...]
"""The most likely tokens at one position, with their log-probabilities, in descending order."""


class Logprobs(msgspec.Struct):
    """Log-probabilities of consecutive tokens, as the model computes them: before temperature, penalties and grammars.

    `values`: of each token; None for the first token of a prompt. `top`: the most likely tokens at each position, as
    many as requested. `ranks`, only for prompts: the number of tokens that were at least as likely.
    """

    values: list[float | None] = []
    top: list[TopLogprobs] = []
    ranks: list[int] = []

    def until(self, num_tokens: int) -> Logprobs:
        """Return the log-probabilities of the first `num_tokens` tokens."""
        return Logprobs(self.values[:num_tokens], self.top[:num_tokens], self.ranks[:num_tokens])


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A constraint on the generated text, given by exactly one of the fields. The names are those of vLLM.

    `json`: a value that matches a JSON schema, given as an object or text. `regex`: a text that a regular expression
    matches completely. `choice`: one of several texts. `grammar`: a text of a grammar in Lark or GBNF. `json_object`:
    any object. Raises ConfigError for none or several, and for values of other types.

    >>> from kvarts import SamplingParams, StructuredOutputs
    >>> SamplingParams(max_tokens=8, structured_outputs=StructuredOutputs(choice=["yes", "no"])).max_tokens
    8
    """

    json: Any = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        given = [name for name in self.__struct_fields__ if getattr(self, name) not in (None, False)]
        if self.json is False:
            given.append("json")  # a schema that allows nothing
        if len(given) != 1:
            raise ConfigError(
                f"needs one of {', '.join(self.__struct_fields__)}, got {', '.join(given) or 'none'}",
                field="sampling.structured_outputs",
            )
        (name,) = given
        value = getattr(self, name)
        is_good = {
            "json": isinstance(value, str | dict | bool),
            "choice": isinstance(value, list | tuple) and value and all(isinstance(one, str) for one in value),
            "json_object": value is True,
        }.get(name, isinstance(value, str))
        if not is_good:
            raise ConfigError(f"has a wrong value: {brief(value)}", field=f"sampling.structured_outputs.{name}")
        if name == "choice":
            if len(value) > MOST_CHOICES:
                what = f"has {len(value):,} texts, and at most {MOST_CHOICES:,} are compiled"
                raise ConfigError(what, field="sampling.structured_outputs.choice", hint="Give a regex or a grammar.")
            msgspec.structs.force_setattr(self, "choice", tuple(value))

    def as_text(self) -> tuple[str, str]:
        """Return the kind and the text of the grammar: a JSON schema, a list of choices, or the text as given."""
        if self.regex is not None:
            return "regex", self.regex
        if self.choice is not None:
            return "choice", msgspec.json.encode(self.choice).decode()
        if self.grammar is not None:
            return "grammar", self.grammar
        if self.json_object:
            return "json", '{"type":"object"}'
        return "json", self.json if isinstance(self.json, str) else msgspec.json.encode(self.json).decode()


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many tokens one request generates, how each is chosen, and what ends it. The names are those of vLLM.

    `temperature` 0 is greedy: then only the repetition penalty can change the chosen token. `top_k` 0, `top_p` 1 and
    `min_p` 0 are off. `seed`: the same seed gives the same text, alone and in any batch; default: derived from the
    request's index. `stop`: one or several texts that end the request; they are not part of the answer, except with
    `include_stop_str_in_output`. `stop_token_ids`: tokens that end it. `min_tokens`: with fewer, only `max_tokens` ends
    the request. `ignore_eos`: the model's end token does not end the request. `presence_penalty` and
    `frequency_penalty`: applied to generated tokens, once and per occurrence. `logprobs`: return the log-probability of
    each token; `top_logprobs`: also those of this many most likely tokens at its position. `prompt_logprobs`: return
    both for the tokens of the prompt, with this many most likely ones per position; the whole prompt is then computed,
    even if it is cached, and `max_tokens` may be 0. `skip_special_tokens`: special tokens have no text, so a stop text
    that is one is never found. `structured_outputs`: a grammar that constrains the text within `max_tokens`; its end
    takes precedence over `min_tokens` and `ignore_eos`. `forced_tokens`: the first tokens, whatever a model would
    choose; only mocks support them.
    Raises ConfigError for a value out of range.

    >>> from kvarts import SamplingParams
    >>> SamplingParams(max_tokens=8, temperature=0.7, seed=1).max_tokens
    8
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None
    forced_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.prompt_logprobs is not None:
            check_whole(self.prompt_logprobs, "sampling.prompt_logprobs", least=0, most=MOST_UINT32)
        least = 1 if self.prompt_logprobs is None else 0
        check_whole(self.max_tokens, "sampling.max_tokens", least=least, most=MOST_UINT32)
        check_whole(self.min_tokens, "sampling.min_tokens", least=0, most=self.max_tokens)
        check_whole(self.top_k, "sampling.top_k", least=0, most=MOST_UINT32)
        check_whole(self.top_logprobs, "sampling.top_logprobs", least=0, most=MOST_UINT32)
        if self.seed is not None:
            check_whole(self.seed, "sampling.seed", least=0, most=MOST_UINT64)
        for field in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"must be a number, got {brief(value)}", field=f"sampling.{field}")
        bounds = {
            "temperature": 0.0 <= self.temperature < float("inf"),
            "top_p": 0.0 < self.top_p <= 1.0,
            "min_p": 0.0 <= self.min_p <= 1.0,
            "repetition_penalty": 0.0 < self.repetition_penalty < float("inf"),
            "presence_penalty": -2.0 <= self.presence_penalty <= 2.0,
            "frequency_penalty": -2.0 <= self.frequency_penalty <= 2.0,
        }
        for field, is_good in bounds.items():
            if not is_good:
                raise ConfigError(f"is out of range: {brief(getattr(self, field))}", field=f"sampling.{field}")
        self._take_all("stop", str, "texts")
        self._take_all("stop_token_ids", int, "token ids")
        self._take_all("forced_tokens", int, "token ids")
        if any(not text for text in self.stop):
            raise ConfigError("must not be empty", field="sampling.stop")
        for token in self.stop_token_ids:
            check_whole(token, "sampling.stop_token_ids", least=0, most=MOST_UINT64)

    def _take_all(self, field: str, kind: type, what: str) -> None:
        """Convert a field to a tuple, from a single text or from several values."""
        given: Any = getattr(self, field)
        values = (given,) if isinstance(given, str) else given
        if not isinstance(values, list | tuple) or not all(isinstance(value, kind) for value in values):
            raise ConfigError(f"must be {what}, got {brief(given)}", field=f"sampling.{field}")
        msgspec.structs.force_setattr(self, field, tuple(values))

    @property
    def is_argmax(self) -> bool:
        """Whether each token is simply the one with the largest logit, and log-probabilities are not requested."""
        return (
            self.temperature == 0.0
            and self.repetition_penalty == 1.0
            and self.structured_outputs is None
            and not (self.logprobs or self.min_tokens or self.presence_penalty or self.frequency_penalty)
        )

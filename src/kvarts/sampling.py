"""What a request asks of its generated tokens: a value, which needs no PyTorch."""

from __future__ import annotations

from typing import Any

import msgspec

from kvarts.errors import ConfigError
from kvarts.limits import MOST_UINT32, MOST_UINT64, brief, check_whole

__all__ = ["Logprobs", "SamplingParams", "StructuredOutputs", "TopLogprobs"]

TopLogprobs = tuple[tuple[int, float], ...]
"""The likeliest tokens at one place, with their log-probabilities, in falling order."""


class Logprobs(msgspec.Struct):
    """Log-probabilities of consecutive tokens, as the model computes them: before temperature, penalties and grammars.

    `values`: of each token; None for the first token of a prompt. `top`: the likeliest tokens at each place, as many as
    were asked for. `ranks`, of prompts only: how many tokens were at least as likely.
    """

    values: list[float | None] = []
    top: list[TopLogprobs] = []
    ranks: list[int] = []

    def until(self, num_tokens: int) -> Logprobs:
        """Return those of the first `num_tokens` tokens."""
        return Logprobs(self.values[:num_tokens], self.top[:num_tokens], self.ranks[:num_tokens])


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the generated text is to be, by exactly one of its fields. The names are those of vLLM.

    `json`: a value that a JSON schema allows, given as the schema or its text. `regex`: a text that matches all of a
    regular expression. `choice`: one of several texts. `grammar`: a text of a grammar in Lark's or GBNF's form.
    `json_object`: any object. Raises ConfigError for none or several, and for values of other types.
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
            msgspec.structs.force_setattr(self, "choice", tuple(value))

    def as_text(self) -> tuple[str, str]:
        """Return the kind and the text of the grammar: a JSON schema, a list of choices, or as it was given."""
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

    `temperature` 0 is greedy: then only the repetition penalty changes which token is chosen. `top_k` 0, `top_p` 1 and
    `min_p` 0 are off. `seed`: the same seed gives the same text, alone and in any batch; without one, a request is
    seeded by its index. `stop`: a text, or texts, that end the request and are not part of the answer, but for
    `include_stop_str_in_output`. `stop_token_ids`: tokens that end it. `min_tokens`: nothing but `max_tokens` ends the
    request before it has so many. `ignore_eos`: the model's own end is a token like any other. `presence_penalty` and
    `frequency_penalty`: of tokens that were generated, once and for each time. `logprobs`: return the log-probability
    of each token; `top_logprobs`: and of so many of the likeliest tokens in its place. `prompt_logprobs`: return them
    of the tokens of the prompt, and of so many of the likeliest in their places; all of the prompt is computed then,
    whatever is cached. `max_tokens` may be 0 with it. `skip_special_tokens`: special tokens have no text; a stop text
    that is one is never found then. `structured_outputs`: a grammar that the text keeps to, as long as `max_tokens`
    allows; its end comes before `min_tokens` and in spite of `ignore_eos`. `forced_tokens`: the first tokens, whatever
    a model would choose; mocks alone take them.
    Raises ConfigError for a value out of range.
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
        """Make a tuple of a field: of one text, or of several values."""
        given: Any = getattr(self, field)
        values = (given,) if isinstance(given, str) else given
        if not isinstance(values, list | tuple) or not all(isinstance(value, kind) for value in values):
            raise ConfigError(f"must be {what}, got {brief(given)}", field=f"sampling.{field}")
        msgspec.structs.force_setattr(self, field, tuple(values))

    @property
    def is_argmax(self) -> bool:
        """Whether each token is simply the one with the largest logit, and log-probabilities are not asked for."""
        return (
            self.temperature == 0.0
            and self.repetition_penalty == 1.0
            and self.structured_outputs is None
            and not (self.logprobs or self.min_tokens or self.presence_penalty or self.frequency_penalty)
        )

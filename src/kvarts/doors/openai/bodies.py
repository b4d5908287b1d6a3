"""Request bodies: the supported fields, and their conversion to sampling parameters.

Unknown fields are ignored, and null equals a missing field, because clients send both.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec
from msgspec.structs import astuple

from kvarts.base.decoders import UNDECODED, convert, decoder_of
from kvarts.base.errors import ConfigError, parts_of, problem_of
from kvarts.base.limits import brief
from kvarts.core.hints import Hints
from kvarts.core.keys import APART
from kvarts.core.sampling import SamplingParams, StructuredOutputs
from kvarts.doors.openai.budget import Budget
from kvarts.doors.openai.errors import ApiError
from kvarts.doors.openai.kv_hints import CacheControl, KvHints, NvExt, hints_of, hints_of_parts

if TYPE_CHECKING:
    from kvarts.doors.openai.media import Media

__all__ = [
    "MAX_NAME_CHARS",
    "BodyT",
    "ChatBody",
    "CompletionBody",
    "GenerationBody",
    "StreamOptions",
    "TranslatedBody",
    "decoded",
    "messages_of",
    "model_in",
    "parsed",
]

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 1024
MAX_NAME_CHARS = 256
MAX_SALT_CHARS = 1024
MAX_PRIORITY = 2**31 - 1

NOT_DONE = (
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "best_of",
    "use_beam_search",
    "truncate_prompt_tokens",
    "suffix",
    "functions",
    "function_call",
    "audio",
    "web_search_options",
    "documents",
    "logprob_token_ids",
    "prompt_embeds",
    "repetition_detection",
    "return_prompt_text",
    "watermarking",
    "chat_template",
    "return_tokens_as_token_ids",
    # SGLang's
    "regex",
    "ebnf",
    "stop_regex",
    "lora_path",
    "input_ids",
    "return_hidden_states",
)

BodyT = TypeVar("BodyT")


class StreamOptions(msgspec.Struct):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """Fields that completions and chat completions share."""

    END_OF_RARE: ClassVar[int]
    """The place after the last field that few requests have."""
    HAS_END: ClassVar[bool]
    """Whether an answer without a number of tokens goes on to its own end."""

    model: str | None = None
    stream: bool | None = None
    max_tokens: int | None = None
    n: int | None = None
    ignore_eos: bool | None = None
    user: str | None = None
    # Fields of sampling, which most requests lack: see `samples_plainly`.
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    skip_special_tokens: bool | None = None
    # Fields that few requests have, up to those at the beginning of a subclass: see `is_plain`.
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    session_id: str | None = None
    thinking_token_budget: int | None = None
    kvarts_answer: Any = None
    kvarts_hints: Hints | None = None
    kv_hints: KvHints | None = None
    nvext: NvExt | None = None
    cache_control: CacheControl | None = None
    # What would change the answer, and is not done: refused, not left alone.
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    truncate_prompt_tokens: int | None = None
    logprob_token_ids: Any = None
    repetition_detection: Any = None
    return_prompt_text: Any = None
    watermarking: Any = None
    return_tokens_as_token_ids: bool | None = None
    regex: Any = None
    ebnf: Any = None
    stop_regex: Any = None
    lora_path: Any = None
    input_ids: Any = None
    return_hidden_states: Any = None

    @property
    def is_plain(self) -> bool:
        """Whether all of the fields that few requests have are absent; a single comparison, since there are 41."""
        return astuple(self)[FIRST_RARE : self.END_OF_RARE] == NO_RARE[: self.END_OF_RARE - FIRST_RARE]

    @property
    def samples_plainly(self) -> bool:
        """Whether all fields of sampling are absent, from `min_tokens` to `skip_special_tokens`."""
        return astuple(self)[FIRST_OF_SAMPLING:FIRST_RARE] == NO_SAMPLING

    def check(self) -> None:
        """Raise ApiError for unsupported requests, which a client would otherwise believe to be fulfilled."""
        best_of = self.best_of if self.best_of not in (None, self.num_choices) else None
        for name in NOT_DONE:
            value = best_of if name == "best_of" else getattr(self, name, None)
            if value not in (None, False, "", [], {}):
                raise ApiError(400, f"{name} is not supported: omit it", param=name)
        if self.prompt_logprobs is not None:
            if not 0 <= self.prompt_logprobs <= MAX_LOGPROBS:
                raise ApiError(400, f"must be from 0 to {MAX_LOGPROBS}", param="prompt_logprobs")
            if self.stream:
                raise ApiError(400, "is not available in a stream; omit stream", param="prompt_logprobs")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "is of streams: ask for stream as well", param="stream_options")
        if abs(self.priority or 0) > MAX_PRIORITY:
            raise ApiError(400, f"must be from {-MAX_PRIORITY} to {MAX_PRIORITY}", param="priority")
        if self.cache_salt == "":
            raise ApiError(400, "must not be empty: omit it", param="cache_salt")
        if APART in (self.cache_salt or ""):
            raise ApiError(400, "has no NUL", param="cache_salt")
        if len(self.cache_salt or "") > MAX_SALT_CHARS:
            raise ApiError(400, f"has at most {MAX_SALT_CHARS} characters", param="cache_salt")

    def structured(self, schema: dict[str, Any] | None) -> StructuredOutputs | None:
        """Return the constraints of the text; None without any. `schema`: from `response_format`. Raise ApiError."""
        asked: dict[str, Any] = dict(self.structured_outputs or {})
        legacy = {
            "json": self.guided_json,
            "regex": self.guided_regex,
            "choice": self.guided_choice,
            "grammar": self.guided_grammar,
        }
        several = [asked] if self.structured_outputs is not None else []
        several += [{name: value} for name, value in legacy.items() if value is not None]
        several += [{"json": schema}] if schema is not None else []
        if len(several) > 1:
            raise ApiError(400, "one of structured_outputs, guided_* and response_format", param="structured_outputs")
        if not several:
            return None
        try:
            return convert(several[0], StructuredOutputs)
        except (msgspec.ValidationError, ConfigError) as error:
            raise ApiError(400, problem_of(error), param="structured_outputs") from error

    def hints(self, *, may_prioritize: bool) -> Hints | None:
        """Return the hints on how long its KV is worth keeping; None for none. Raise ApiError."""
        return hints_of(self.kvarts_hints, self.kv_hints, self.nvext, self.cache_control, may_prioritize=may_prioritize)

    @property
    def is_costly(self) -> bool:
        """Whether reading it may take much longer than its bytes suggest, as with a JSON schema."""
        return self.structured_outputs is not None

    @property
    def asks_more(self) -> bool:
        """Whether it asks for what words alone cannot be, besides constraints."""
        return False

    @property
    def asked_logprobs(self) -> int | None:
        """The number of likeliest tokens to return; None for no log-probabilities. Raise ApiError for a bad one."""
        return None

    @property
    def asked_max_tokens(self) -> int | None:
        """The number of tokens at which an answer ends at the latest."""
        return self.max_tokens

    @property
    def num_choices(self) -> int:
        """The number of answers per prompt. Raise ApiError if it is out of range."""
        n = 1 if self.n is None else self.n
        if not 1 <= n <= MAX_CHOICES:
            raise ApiError(400, f"n must be from 1 to {MAX_CHOICES}, got {n}", param="n")
        return n

    def hints_of_parts(self) -> Hints | None:
        """Return the hint that its parts have; None for none. Raise ApiError."""
        return None

    def drop_prompt(self) -> None:
        """Forget the prompt, which may be large."""

    @property
    def asked_prompt_logprobs(self) -> int | None:
        """The number of likeliest tokens per position of the prompt; None: no log-probabilities of the prompt."""
        return self.prompt_logprobs

    def params(self, max_tokens: int, *, top_logprobs: int | None) -> SamplingParams:
        """Return the sampling parameters. `top_logprobs`: None for no log-probabilities. Raise ApiError."""
        if top_logprobs is None and self.asked_prompt_logprobs is None and self.samples_plainly:
            return _default_params(max_tokens, bool(self.ignore_eos))
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > MAX_STOPS:
            raise ApiError(400, f"at most {MAX_STOPS} stop texts, got {len(stop)}", param="stop")
        if any(len(text) > MAX_STOP_CHARS for text in stop):
            raise ApiError(400, f"a stop text has at most {MAX_STOP_CHARS} characters", param="stop")
        if len(self.stop_token_ids or ()) > MAX_STOP_TOKENS:
            raise ApiError(400, f"at most {MAX_STOP_TOKENS} stop tokens", param="stop_token_ids")
        if top_logprobs is not None and not 0 <= top_logprobs <= MAX_LOGPROBS:
            raise ApiError(400, f"must be from 0 to {MAX_LOGPROBS}, got {top_logprobs}", param="logprobs")
        top_k = 0 if self.top_k in (None, -1) else self.top_k
        make = SamplingParams if stop or self.stop_token_ids else _params
        try:
            return make(
                max_tokens=max_tokens,
                min_tokens=min(self.min_tokens or 0, max_tokens),
                temperature=1.0 if self.temperature is None else self.temperature,
                top_k=top_k,
                top_p=1.0 if self.top_p is None else self.top_p,
                min_p=self.min_p or 0.0,
                repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
                presence_penalty=self.presence_penalty or 0.0,
                frequency_penalty=self.frequency_penalty or 0.0,
                seed=None if self.seed is None else self.seed % 2**63,
                stop=tuple(stop),
                stop_token_ids=tuple(self.stop_token_ids or ()),
                include_stop_str_in_output=bool(self.include_stop_str_in_output),
                ignore_eos=bool(self.ignore_eos),
                logprobs=top_logprobs is not None,
                top_logprobs=top_logprobs or 0,
                prompt_logprobs=self.asked_prompt_logprobs,
                skip_special_tokens=self.skip_special_tokens is not False,
            )
        except ConfigError as error:
            field = (error.field or "").removeprefix("sampling.")
            raise ApiError(400, f"{field} {error.what}", param=field) from error


FIRST_OF_SAMPLING = GenerationBody.__struct_fields__.index("min_tokens")
FIRST_RARE = GenerationBody.__struct_fields__.index("stream_options")
NO_SAMPLING, NO_RARE = (None,) * (FIRST_RARE - FIRST_OF_SAMPLING), (None,) * 100


@lru_cache(256)
def _default_params(max_tokens: int, ignore_eos: bool) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, temperature=1.0)


@lru_cache(256)
def _params(**fields: Any) -> SamplingParams:
    """Return sampling parameters, which most requests share; those with texts or tokens that end them are not kept."""
    return SamplingParams(**fields)


class CompletionBody(GenerationBody, kw_only=True):
    """POST /v1/completions. `prompt`: text, token ids, or a list of either."""

    HAS_END = False

    # Refused as those above; the last fields that few requests have.
    suffix: str | None = None
    prompt_embeds: Any = None
    prompt: str | list[Any] | None = None
    logprobs: int | bool | None = None
    echo: bool | None = None
    response_format: dict[str, Any] | None = None

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts. Raise ApiError for invalid ones."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise ApiError(400, "a prompt is needed: text, token ids, or a list of either", param="prompt")
        if all(type(part) is int for part in prompt):
            return [prompt]
        for part in prompt:
            is_ids = isinstance(part, list) and all(type(token) is int for token in part)
            if not isinstance(part, str) and not is_ids:
                raise ApiError(400, "must be text, token ids, or a list of either", param="prompt")
        return prompt

    def drop_prompt(self) -> None:
        """Forget the prompt."""
        self.prompt = None

    @property
    def asked_prompt_logprobs(self) -> int | None:
        """The number of likeliest tokens per position of the prompt; `echo` includes the prompt's log-probabilities."""
        if self.echo and self.prompt_logprobs is None:
            return 0 if self.max_tokens == 0 and self.asked_logprobs is None else self.asked_logprobs
        return self.prompt_logprobs

    @property
    def is_costly(self) -> bool:
        """Whether it has a JSON schema."""
        return super().is_costly or self.response_format is not None

    @property
    def asked_logprobs(self) -> int | None:
        """The number of likeliest tokens to return; None for no log-probabilities."""
        if self.logprobs is None or self.logprobs is False:
            return None
        return 0 if self.logprobs is True else self.logprobs


class ChatBody(GenerationBody, kw_only=True):
    """POST /v1/chat/completions."""

    HAS_END = True

    # Refused as those above; the last fields that few requests have.
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    web_search_options: Any = None
    documents: Any = None
    chat_template: Any = None
    echo: bool | None = None
    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Any = None
    thinking_budget_tokens: int | None = None
    """Of Anthropic's API: only a mock keeps it."""

    def check(self) -> None:
        """Raise ApiError for unsupported requests; `echo` is for completions only."""
        super().check()
        if self.echo:
            raise ApiError(400, "echo is of completions: omit it", param="echo")

    def hints_of_parts(self) -> Hints | None:
        """Return the hint that messages and tools have; None for none. Raise ApiError."""
        return hints_of_parts(messages=self.messages, tools=self.tools)

    def drop_prompt(self) -> None:
        """Forget the messages and the tools."""
        self.messages = self.tools = None

    def template_options(self) -> dict[str, Any]:
        """Return the template variables other than the messages."""
        options: dict[str, Any] = {
            "chat_template_kwargs": self.chat_template_kwargs,
            "continue_final_message": self.continue_final_message,
            "tools": self.tools,
            "needs_tools": bool(self.tools) and self.tool_choice != "none",
        }
        if self.add_generation_prompt is not None:
            options["add_generation_prompt"] = self.add_generation_prompt
        return options

    @property
    def asked_max_tokens(self) -> int | None:
        """The number of tokens at which an answer ends at the latest, by the newer of the two names if it is there."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def is_costly(self) -> bool:
        """Whether it contains a JSON schema, for the answer or for the arguments of a tool."""
        return super().is_costly or bool(self.tools) or self.response_format is not None

    @property
    def asks_more(self) -> bool:
        """Whether it chooses a tool, or bounds the reasoning."""
        return self.tool_choice not in (None, "auto", "none") or self.thinking_budget_tokens is not None

    @property
    def asked_logprobs(self) -> int | None:
        """The number of likeliest tokens to return; None for no log-probabilities. Raise ApiError if only a number is
        given.
        """
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "is of log-probabilities: ask for logprobs as well", param="top_logprobs")
        if not 0 <= (self.top_logprobs or 0) <= MAX_LOGPROBS:
            raise ApiError(400, f"must be from 0 to {MAX_LOGPROBS}, got {self.top_logprobs}", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


CompletionBody.END_OF_RARE = CompletionBody.__struct_fields__.index("prompt")
ChatBody.END_OF_RARE = ChatBody.__struct_fields__.index("messages")


class TranslatedBody(msgspec.Struct, kw_only=True):
    """Fields that other APIs share with chats."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    kvarts_answer: Any = None
    kvarts_hints: Hints | None = None
    kv_hints: KvHints | None = None
    nvext: NvExt | None = None
    cache_control: CacheControl | None = None

    def as_chat(self, **fields: Any) -> ChatBody:
        """Return a chat with the shared fields, and with `fields`."""
        return ChatBody(**{name: getattr(self, name) for name in TranslatedBody.__struct_fields__}, **fields)


class _NamedBody(msgspec.Struct):
    model: str | None = None


def model_in(payload: bytes) -> str | None:
    """Return the model that a body names; None if it does not name one, or is invalid."""
    try:
        return decoder_of(_NamedBody).decode(payload).model
    except UNDECODED:
        return None


def decoded(payload: bytes, kind: type[BodyT], budget: Budget) -> BodyT:
    """Parse a body. Raise ApiError as `parsed` does, or if it has too many values."""
    budget.draw_json(payload)
    return parsed(payload, kind)


def parsed(payload: bytes, kind: type[BodyT]) -> BodyT:
    """Parse JSON. Raise ApiError if it is not JSON, or a field has the wrong type.

    A field that `kind` lacks is skipped, and its text is not checked.
    """
    try:
        return decoder_of(kind).decode(payload or b"{}")
    except msgspec.ValidationError as error:
        what, field = parts_of(error)
        raise ApiError(400, f"{field}: {what}" if field else what, param=field) from error
    except UNDECODED as error:
        raise ApiError(400, f"the body is no JSON: {problem_of(error)}") from error


def messages_of(
    messages: Sequence[Any] | None, media: Media | None = None, *, param: str = "messages"
) -> list[dict[str, Any]]:
    """Return messages with their content as text: parts are joined. Raise ApiError for invalid messages.

    `media`: reads images and audio; None: they are refused.
    """
    if not messages:
        raise ApiError(400, "at least one message is needed", param=param)
    read = []
    for index, message in enumerate(messages):
        where = f"{param}[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError(400, "a message has a role and a content", param=where)
        content = message.get("content")
        read.append(message if isinstance(content, str) else {**message, "content": _text_of(content, where, media)})
    return read


def _text_of(content: Any, where: str, media: Media | None) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, "content is text or a list of parts", param=f"{where}.content")
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(part, dict) and isinstance(part.get("refusal"), str):
            texts.append(part["refusal"])
        else:
            at = f"{where}.content[{index}]"
            if isinstance(part, dict) and part.get("type") in ("text", "input_text", "output_text"):
                raise ApiError(400, f"must be text, got {brief(part.get('text'))}", param=f"{at}.text")
            told = media.text_of(part, at) if media is not None and isinstance(part, dict) else None
            if told is None:
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise ApiError(400, f"parts of type {brief(kind)} are not read: give text", param=at)
            texts.append(told)
    return "".join(texts)

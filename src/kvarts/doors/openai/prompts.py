"""Prompts of a served model: tokens of a text, and the text of a conversation.

`Thinking` is the reasoning of scripted answers: how much a request allows, and its place in the next turn's prompt.

A mock cuts the reasoning of a scripted answer to the budget of the request, as vLLM ends the reasoning of a model with
the tokens that close it, or leaves the reasoning out. The chat template decides how much of it the next turn's prompt
contains, and so how much the cache finds. The template of a mock follows Qwen3: reasoning stays in the messages after
the last one of the user, while an agent uses tools, and earlier reasoning is dropped.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Any, TypeAlias

import msgspec

from kvarts.base.decoders import UNDECODED
from kvarts.base.errors import problem_of
from kvarts.base.limits import MOST_COUNT
from kvarts.doors.openai.errors import ApiError
from kvarts.doors.openai.generic_tools import WARNING, in_words
from kvarts.doors.openai.tool_calls import FORMATS, call_text, format_named
from kvarts.doors.openai.words import MAX_CHARS_PER_WORD, WordTokenizer
from kvarts.run.text import TextOffsets, TokenBytes

__all__ = [
    "CLOSE",
    "OPEN",
    "HubText",
    "Message",
    "TextModel",
    "Thinking",
    "WordText",
    "budget_of_messages",
    "reasoning_in",
    "spoken",
]

Message = Mapping[str, Any]
OPEN, CLOSE = "<think>\n", "\n</think>\n\n"
"""The text before and after reasoning, as Qwen models write it."""
OFF = ("enable_thinking", "thinking")
"""Variables of chat templates that turn reasoning off if they are false."""
LEAST_BUDGET = 1024
"""The least budget of Anthropic's API."""


class Thinking(msgspec.Struct, frozen=True):
    """The reasoning that a request allows. `budget`: the most tokens of it; None: all. `is_off`: none."""

    budget: int | None = None
    is_off: bool = False

    @classmethod
    def of(cls, budgets: Sequence[int | None], effort: Any, variables: Mapping[str, Any] | None) -> Thinking:
        """Return the reasoning that a chat allows: by the least of `budgets`, an effort, and variables of its template.

        Of the efforts, only none has an effect: the others ask a model for more or less, and a script is fixed.
        Raise ApiError for a budget out of range.
        """
        given = [budget for budget in budgets if budget is not None]
        if any(budget < -1 for budget in given):
            raise ApiError(400, "must be at least 0, or -1 for no limit", param="thinking_token_budget")
        budget = min((min(each, MOST_COUNT) for each in given if each >= 0), default=None)
        is_off = effort == "none" or any((variables or {}).get(name) is False for name in OFF)
        return cls(budget, is_off or budget == 0)


def budget_of_messages(thinking: Mapping[str, Any] | None, max_tokens: int | None) -> tuple[int | None, bool]:
    """Return the budget in `thinking` of Anthropic's API, and whether it turns reasoning off. Raise ApiError."""
    kind = None if thinking is None else thinking.get("type")
    if thinking is None or kind == "adaptive":
        return None, False
    if kind == "disabled":
        return None, True
    budget = thinking.get("budget_tokens")
    if kind != "enabled":
        raise ApiError(400, "must be enabled, disabled or adaptive", param="thinking.type")
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < LEAST_BUDGET:
        raise ApiError(400, f"must be at least {LEAST_BUDGET}", param="thinking.budget_tokens")
    if max_tokens is not None and budget >= max_tokens:
        raise ApiError(400, "must be less than max_tokens", param="thinking.budget_tokens")
    return budget, False


def reasoning_in(message: Mapping[str, Any]) -> str:
    """Return the reasoning that a message of a conversation brings along; empty for none."""
    for name in ("reasoning_content", "reasoning"):
        if isinstance(told := message.get(name), str) and told:
            return told
    return ""


def spoken(messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None) -> list[str]:
    """Return for each message of a conversation the reasoning to write before its content.

    `variables` of the template: with `preserve_thinking` true or `clear_thinking` false, reasoning of all turns stays.
    """
    given = variables or {}
    keeps_all = given.get("preserve_thinking") is True or given.get("clear_thinking") is False
    last_user = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=-1)
    return [
        f"{OPEN}{reasoning}{CLOSE}"
        if message["role"] == "assistant" and (keeps_all or index > last_user) and (reasoning := reasoning_in(message))
        else ""
        for index, message in enumerate(messages)
    ]


class WordText:
    """The text of a mock: each word is a token, and conversations are written as ChatML."""

    call_format = FORMATS["hermes"]
    max_chars_per_token = MAX_CHARS_PER_WORD
    end_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self._words = WordTokenizer()
        self.generation_tokenizer: Any = self._words
        self.decode = self._words.decode
        self.bytes_of = self._words.bytes_of

    def offsets(self, *, start: int, skip_special_tokens: bool) -> TextOffsets:
        """Return an object that finds the positions of tokens in their text."""
        return TextOffsets(self.bytes_of, start=start)

    def encode(self, text: str, *, add_special_tokens: bool = True, most: int) -> Sequence[int]:
        """Return the tokens of `text`, at most `most` + 1; a mock does not add special tokens."""
        if len(text) <= most:  # a token has at least one character
            return array("Q", self._words.encode(text))
        return array("Q", islice(self._words.tokens(text), most + 1))

    def conversation(self, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
        """Return the prompt of a conversation, as ChatML."""
        parts = []
        tools = options.get("tools")
        if tools:
            parts.append(f"<|im_start|>tools\n{_json(tools)}<|im_end|>\n")
        for message, reasoning in zip(messages, spoken(messages, options.get("chat_template_kwargs")), strict=True):
            text = f"{reasoning}{message['content']}{_calls(message)}"
            parts.append(f"<|im_start|>{message['role']}\n{text}<|im_end|>\n")
        if options.get("continue_final_message"):
            return "".join(parts).removesuffix("<|im_end|>\n")
        if options.get("add_generation_prompt", True):
            parts.append("<|im_start|>assistant\n")
        return "".join(parts)


class HubText:
    """The text of a transformers model, by its tokenizer."""

    def __init__(self, tokenizer: Any, end_ids: Iterable[int] = (), *, tool_call_parser: str = "auto") -> None:
        template = getattr(tokenizer, "chat_template", None)
        self.call_format = format_named(tool_call_parser, template if isinstance(template, str) else str(template))
        self.end_ids = frozenset(end_ids)
        self.generation_tokenizer: Any = tokenizer
        self._tokenizer = tokenizer
        self._bytes = TokenBytes(tokenizer)
        self.bytes_of = self._bytes.of

    @cached_property
    def max_chars_per_token(self) -> int:
        """The most characters that one token represents: those of the longest entry of the vocabulary."""
        return 1 if self._tokenizer is None else max(map(len, self._tokenizer.get_vocab()), default=1)

    def encode(self, text: str, *, add_special_tokens: bool = True, most: int) -> list[int]:
        """Return the tokens of `text`, all of them. Raise ApiError without a tokenizer."""
        return list(self._need()(text, add_special_tokens=add_special_tokens)["input_ids"])

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of `tokens`; nothing without a tokenizer."""
        return "" if self._tokenizer is None else str(self._tokenizer.decode(list(tokens)))

    def offsets(self, *, start: int, skip_special_tokens: bool) -> TextOffsets:
        """Return an object that finds the positions of tokens in their text."""
        return TextOffsets(
            self.bytes_of,
            start=start,
            skipped=self._bytes.special_ids if skip_special_tokens else (),
            drops_first_space=self._bytes.drops_first_space,
        )

    def conversation(self, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
        """Return the prompt of a conversation by the model's template.

        Without one, each message becomes its text and a newline. Where the template leaves tools out, they are
        described in words, and `warn` of the options receives that.
        """
        told = [_with_arguments(message) for message in messages]
        text = self._rendered(told, options, options.get("tools") or None)
        if options.get("needs_tools") and text == self._rendered(told, options, None):
            text = self._rendered(in_words(told, options["tools"], self.call_format), options, None)
            if "warn" in options:
                options["warn"](WARNING.format(form=self.call_format.name))
        return text

    def _rendered(self, messages: Sequence[Message], options: Mapping[str, Any], tools: Any) -> str:
        if not self._need().chat_template:
            return "".join(f"{message['content']}\n" for message in messages)
        try:
            return str(
                self._need().apply_chat_template(
                    [dict(message) for message in messages],
                    tokenize=False,
                    tools=tools,
                    add_generation_prompt=options.get("add_generation_prompt", True)
                    and not options.get("continue_final_message"),
                    continue_final_message=bool(options.get("continue_final_message")),
                    **(options.get("chat_template_kwargs") or {}),
                )
            )
        except ApiError:
            raise
        except Exception as error:  # templates may raise any exception
            raise ApiError(400, f"the chat template does not take these messages: {error}", param="messages") from error

    def _need(self) -> Any:
        if self._tokenizer is None:
            raise ApiError(400, "the model came without a tokenizer: give token ids", param="prompt")
        return self._tokenizer


TextModel: TypeAlias = WordText | HubText
"""Text to tokens and back, for one model. Promises that its results depend only on its arguments."""


def _with_arguments(message: Message) -> Message:
    """Return a message with its calls' arguments as objects, so that templates can format them."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    made = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if isinstance(function, dict) and isinstance(arguments, str):
            try:
                read = msgspec.json.decode(arguments or "{}")
            except UNDECODED as error:
                raise ApiError(400, f"arguments of a call are JSON: {problem_of(error)}", param="messages") from error
            made.append({**call, "function": {**function, "arguments": read}})
        else:
            made.append(call)
    return {**message, "tool_calls": made}


def _calls(message: Message) -> str:
    """Return the calls of a message as a mock writes them, so that they are hit in the cache."""
    texts: list[str] = []
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise ApiError(400, "a call has a function with a name and arguments", param="messages")
        arguments = function.get("arguments", "{}")
        before, after = call_text(str(function.get("name")), is_first=not (texts or message["content"]))
        texts += [before, arguments if isinstance(arguments, str) else _json(arguments), after]
    return "".join(texts)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()

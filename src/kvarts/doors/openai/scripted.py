"""Scripted answers of a mock.

The engine generates the tokens of a scripted answer one by one, like words: the answer takes the time of its tokens, is
cut by `max_tokens`, and its KV is a cache hit of the next turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kvarts.base.errors import ConfigError
from kvarts.base.limits import check_whole
from kvarts.doors.openai.failures import MAX_STALL_S, NO_FAILURE, Failure, parse_failure
from kvarts.doors.openai.prompts import CLOSE, OPEN, Thinking
from kvarts.doors.openai.shapes import TextSegment
from kvarts.doors.openai.tool_calls import call_text

if TYPE_CHECKING:
    from kvarts.doors.openai.prompts import TextModel

__all__ = ["ScriptedAnswer", "ScriptedCall", "ScriptedUsage"]

encode = msgspec.json.encode


class ScriptedCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool call. `arguments`: an object, or text, which need not be valid JSON."""

    name: str
    arguments: dict[str, Any] | str = msgspec.field(default_factory=dict)

    @property
    def written(self) -> str:
        """The arguments as text."""
        return self.arguments if isinstance(self.arguments, str) else encode(self.arguments).decode()


class ScriptedUsage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Token counts that replace the real ones in `usage`. Raises ConfigError for a count below 0."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if (count := getattr(self, name)) is not None:
                check_whole(count, f"usage.{name}", least=0)


class ScriptedAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An answer. `text`: a text, or a value to encode as JSON. `finish_reason`: used unless `max_tokens` cuts it.

    `latency_s`: delay before the first byte. `fail`: a failure, in the syntax of failure scripts.
    Raises ConfigError for a value out of range.
    """

    text: str | dict[str, Any] | list[Any] = ""
    calls: tuple[ScriptedCall, ...] = ()
    reasoning: str = ""
    refusal: str = ""
    usage: ScriptedUsage = ScriptedUsage()
    finish_reason: str = ""
    latency_s: float = 0.0
    fail: str = ""

    def __post_init__(self) -> None:
        if self.refusal and (self.text or self.calls):
            raise ConfigError("is instead of a text and calls", field="refusal")
        if not 0.0 <= self.latency_s <= MAX_STALL_S:
            raise ConfigError(f"must be from 0 to {MAX_STALL_S:g}, got {self.latency_s}", field="latency_s")
        if self.fail and parse_failure(self.fail).stall_s and self.latency_s:
            raise ConfigError("is a second delay beside that of fail", field="latency_s", hint="Give one of them.")

    @property
    def failure(self) -> Failure:
        """The failure to apply, with `latency_s` as a stall."""
        failure = parse_failure(self.fail) if self.fail else NO_FAILURE
        return msgspec.structs.replace(failure, stall_s=self.latency_s) if self.latency_s else failure

    def segments(self) -> tuple[TextSegment, ...]:
        """Return the text to generate, in the format of Qwen models, as segments."""
        parts: list[TextSegment] = []
        if self.reasoning:
            parts += [
                TextSegment("unseen", OPEN),
                TextSegment("reasoning", self.reasoning),
                TextSegment("unseen", CLOSE),
            ]
        text = self.text if isinstance(self.text, str) else encode(self.text).decode()
        if text or self.refusal:
            parts.append(TextSegment("refusal" if self.refusal else "content", self.refusal or text))
        for index, call in enumerate(self.calls):
            before, after = call_text(call.name, is_first=not (index or text))
            parts += [
                TextSegment("unseen", before),
                TextSegment("arguments", call.written, call.name),
                TextSegment("unseen", after),
            ]
        return tuple(parts)

    def limited(self, thinking: Thinking, text: TextModel) -> ScriptedAnswer:
        """Return the answer with the reasoning that `thinking` allows."""
        if not self.reasoning or (thinking.budget is None and not thinking.is_off):
            return self
        kept = ""
        if not thinking.is_off:
            assert thinking.budget is not None
            tokens = text.encode(self.reasoning, add_special_tokens=False, most=thinking.budget)
            if len(tokens) <= thinking.budget:
                return self
            kept = text.decode(tokens[: thinking.budget])
        return msgspec.structs.replace(self, reasoning=kept)

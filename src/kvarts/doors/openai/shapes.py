"""Parsers of generated text into messages: content, reasoning, and tool calls, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import msgspec

from kvarts.base.limits import brief
from kvarts.doors.openai.errors import ApiError
from kvarts.doors.openai.http import new_id

__all__ = [
    "ANY_OBJECT",
    "CallPart",
    "Kind",
    "Message",
    "Part",
    "Plain",
    "Reader",
    "Segments",
    "Shape",
    "TextSegment",
    "read_whole",
    "schema_of_format",
]

ANY_OBJECT: dict[str, Any] = {"type": "object"}
"""The schema of the format json_object."""

Kind = Literal["content", "reasoning", "refusal", "arguments", "unseen"]


class CallPart(msgspec.Struct):
    """A piece of the tool call number `index`. Only the first piece of a call has `call_id` and `name`."""

    index: int
    arguments: str = ""
    call_id: str = ""
    name: str = ""

    @classmethod
    def first(cls, index: int, name: str, arguments: str = "") -> CallPart:
        """Return the first part of a call of the tool `name`."""
        return cls(index, arguments, f"chatcmpl-tool-{new_id()}", name)


class Part(msgspec.Struct):
    """The addition of a piece of text to a message."""

    content: str = ""
    reasoning: str = ""
    refusal: str = ""
    calls: list[CallPart] = []

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.refusal or self.calls)


class Reader(Protocol):
    """Incremental parser of the text of one choice."""

    def add(self, text: str) -> Part:
        """Parse the next piece of text."""

    def end(self) -> tuple[Part, str | None]:
        """Return the rest of the message, and the finish reason if it replaces the engine's."""


Shape = Callable[[int], Reader]
"""The message format of an answer: returns the Reader of a choice, by its number."""


class Plain:
    """A Shape and its Reader: all text is content."""

    def __call__(self, number: int) -> Reader:
        """Return itself, because it is stateless."""
        return self

    def add(self, text: str) -> Part:
        """Return the text."""
        return Part(text)

    def end(self) -> tuple[Part, str | None]:
        """Return an empty part."""
        return Part(), None


class TextSegment(msgspec.Struct, frozen=True):
    """Text of one kind; arguments belong to a call of the tool `name`."""

    kind: Kind
    text: str
    name: str = ""


class Segments:
    """A Shape of scripted answers. `choices`: the segments of each choice, in order."""

    def __init__(self, choices: Sequence[Sequence[TextSegment]]) -> None:
        self._choices = choices

    def __call__(self, number: int) -> Reader:
        """Return a reader that splits the text by the lengths of the segments."""
        return _SegmentReader(self._choices[number])


class _SegmentReader:
    def __init__(self, segments: Sequence[TextSegment]) -> None:
        self._segments = segments
        self._index = self._num_read = 0
        self._num_calls = 0

    def add(self, text: str) -> Part:
        part, place = Part(), 0
        while self._index < len(self._segments):
            segment = self._segments[self._index]
            if place == len(text) and segment.text:
                break
            if segment.kind == "arguments" and not self._num_read:
                part.calls.append(CallPart.first(self._num_calls, segment.name))
            taken = text[place : place + len(segment.text) - self._num_read]
            place += len(taken)
            self._num_read += len(taken)
            if segment.kind == "arguments":
                if not part.calls:
                    part.calls.append(CallPart(self._num_calls))
                part.calls[-1].arguments += taken
            elif segment.kind != "unseen":
                setattr(part, segment.kind, getattr(part, segment.kind) + taken)
            if self._num_read == len(segment.text):
                self._num_calls += segment.kind == "arguments"
                self._index, self._num_read = self._index + 1, 0
        return part

    def end(self) -> tuple[Part, str | None]:
        is_whole = self._index == len(self._segments)
        return Part(), "tool_calls" if is_whole and self._num_calls else None


class Message(msgspec.Struct):
    """A complete message. `calls`: id, name and arguments of each. `reason`: replaces the engine's finish reason."""

    content: str = ""
    reasoning: str = ""
    refusal: str = ""
    calls: list[CallPart] = []
    reason: str | None = None

    def add(self, part: Part) -> None:
        """Add a part."""
        self.content += part.content
        self.reasoning += part.reasoning
        self.refusal += part.refusal
        for call in part.calls:
            if call.call_id:
                self.calls.append(msgspec.structs.replace(call))
            else:
                self.calls[call.index].arguments += call.arguments


def read_whole(shape: Shape, number: int, text: str) -> Message:
    """Parse the complete text of a choice."""
    reader, message = shape(number), Message()
    message.add(reader.add(text))
    rest, message.reason = reader.end()
    message.add(rest)
    return message


def schema_of_format(response_format: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the JSON schema of a `response_format`; None for text. Raise ApiError for another format."""
    kind = "text" if response_format is None else response_format.get("type")
    if kind == "text":
        return None
    if kind not in ("json_object", "json_schema"):
        raise ApiError(
            400, f"there is no format {brief(kind)}: text, json_object or json_schema", param="response_format"
        )
    if kind == "json_object":
        return ANY_OBJECT
    assert response_format is not None
    told = response_format.get("json_schema")
    schema = told.get("schema") if isinstance(told, dict) else None
    if not isinstance(schema, dict):
        raise ApiError(400, "needs json_schema with a name and a schema", param="response_format")
    return schema

"""What an answer is made into where it is no plain text: calls of tools, and JSON."""

from __future__ import annotations

from typing import Any, Protocol
from uuid import uuid4

import msgspec

from kvarts.limits import brief
from kvarts.openai_api.budget import Budget
from kvarts.openai_api.errors import ApiError
from kvarts.openai_api.schemas import value_of

__all__ = ["JsonText", "Shape", "ToolCall", "ToolCallsInText", "shape_of_format"]

encode = msgspec.json.encode
OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Shape(Protocol):
    """Makes a message out of a text."""

    def num_plain(self, text: str) -> int:
        """Return how many characters of `text`, which goes on, are content as they are."""

    def message(self, text: str) -> tuple[dict[str, Any], str | None]:
        """Return the content and the calls of a text that is whole, and why it ended, where that is changed."""


class JsonText(msgspec.Struct, frozen=True):
    """The simplest JSON that `schema` allows, which a mock writes in place of words."""

    schema: dict[str, Any]

    def num_plain(self, text: str) -> int:
        """Return 0: before its end it is no JSON."""
        return 0

    def message(self, text: str) -> tuple[dict[str, Any], str | None]:
        """Return the JSON as content."""
        value = value_of(self.schema, text.strip(), param="response_format", budget=Budget(sequences=0))
        return {"content": encode(value).decode(), "tool_calls": []}, None

    def draw(self, budget: Budget, num_choices: int) -> None:
        """Draw what `num_choices` messages cost. Raise ApiError for what cannot be made."""
        _draw(self.schema, budget, num_choices, param="response_format")


class ToolCall(msgspec.Struct, frozen=True):
    """A call that a mock makes: of the tool `name`, with every required parameter of `schema`."""

    name: str
    schema: dict[str, Any]

    def num_plain(self, text: str) -> int:
        """Return 0: all of it is arguments."""
        return 0

    def message(self, text: str) -> tuple[dict[str, Any], str | None]:
        """Return a call with `text` where a text is asked for."""
        value = value_of(self._arguments, text.strip(), param="tools", budget=Budget(sequences=0))
        arguments = encode(value).decode()
        return {"content": None, "tool_calls": [_call(self.name, arguments)]}, "tool_calls"

    def draw(self, budget: Budget, num_choices: int) -> None:
        """Draw what `num_choices` messages cost. Raise ApiError for what cannot be made."""
        _draw(self._arguments, budget, num_choices, param="tools")

    @property
    def _arguments(self) -> dict[str, Any]:
        return {"type": "object", **self.schema}


def _draw(schema: dict[str, Any], budget: Budget, num_choices: int, *, param: str) -> None:
    of_one = Budget(sequences=0)
    before = of_one.num_made, of_one.num_made_bytes
    value_of(schema, "", param=param, budget=of_one)
    used = (before[0] - of_one.num_made) * num_choices, (before[1] - of_one.num_made_bytes) * num_choices
    budget.draw_made(*used, param)


class _Written(msgspec.Struct):
    name: str
    arguments: dict[str, Any] = {}


class ToolCallsInText:
    """Calls as models of the Hermes and Qwen families write them: JSON between tags. What is no such call is text."""

    def num_plain(self, text: str) -> int:
        """Return what comes before the first tag, or before what may become one."""
        place = text.find(OPEN)
        if place >= 0:
            return place
        for length in range(min(len(OPEN) - 1, len(text)), 0, -1):
            if text.endswith(OPEN[:length]):
                return len(text) - length
        return len(text)

    def message(self, text: str) -> tuple[dict[str, Any], str | None]:
        """Return the text before the calls, and the calls; or the whole text, if one of them cannot be read."""
        before, *written = text.split(OPEN)
        calls = []
        for part in written:
            try:
                call = msgspec.json.decode(part.partition(CLOSE)[0].strip(), type=_Written)
            except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
                return {"content": text, "tool_calls": []}, None
            calls.append(_call(call.name, encode(call.arguments).decode()))
        if not calls:
            return {"content": text, "tool_calls": []}, None
        return {"content": before or None, "tool_calls": calls}, "tool_calls"


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-tool-{uuid4().hex}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def shape_of_format(
    response_format: dict[str, Any] | None, *, can_be_made: bool, budget: Budget, num_choices: int
) -> JsonText | None:
    """Return what a `response_format` asks for; None for text. Raise ApiError for what cannot be had.

    `can_be_made`: the model writes what it is told to.
    """
    kind = "text" if response_format is None else response_format.get("type")
    if kind == "text":
        return None
    if kind not in ("json_object", "json_schema"):
        raise ApiError(
            400, f"there is no format {brief(kind)}: text, json_object or json_schema", param="response_format"
        )
    if not can_be_made:
        raise ApiError(
            400, f"{kind!r} cannot be enforced: ask for it in the prompt, and for 'text' here", param="response_format"
        )
    assert response_format is not None
    if kind == "json_object":
        return JsonText({"type": "object", "properties": {"text": {"type": "string"}}})
    told = response_format.get("json_schema")
    schema = told.get("schema") if isinstance(told, dict) else None
    if not isinstance(schema, dict):
        raise ApiError(400, "needs json_schema with a name and a schema", param="response_format")
    shape = JsonText(schema)
    shape.draw(budget, num_choices)  # what cannot be made is refused now
    return shape

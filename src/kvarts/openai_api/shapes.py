"""What an answer is made into where it is no plain text: calls of tools, and JSON."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from kvarts.limits import brief
from kvarts.openai_api.budget import Budget
from kvarts.openai_api.errors import ApiError
from kvarts.openai_api.schemas import value_of
from kvarts.openai_api.tool_calls import call_message

__all__ = ["JsonText", "Shape", "ToolCall", "schema_of_format", "shape_of_format"]

encode = msgspec.json.encode
ANY_OBJECT: dict[str, Any] = {"type": "object"}
"""The schema of the format json_object."""


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
        return {"content": None, "tool_calls": [call_message(self.name, encode(value).decode())]}, "tool_calls"

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


def shape_of_format(schema: dict[str, Any] | None, budget: Budget, num_choices: int) -> JsonText | None:
    """Return what a mock makes of a `response_format` with this schema; None for text.

    Raise ApiError for what it cannot make.
    """
    if schema is None:
        return None
    if schema is ANY_OBJECT:
        return JsonText({"type": "object", "properties": {"text": {"type": "string"}}})
    shape = JsonText(schema)
    shape.draw(budget, num_choices)  # what cannot be made is refused now
    return shape


def schema_of_format(response_format: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the JSON schema that a `response_format` asks for; None for text. Raise ApiError for another."""
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

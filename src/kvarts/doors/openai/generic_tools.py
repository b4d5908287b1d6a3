"""Tools for models whose chat template leaves them out: described in words, with calls and results as text.

A description of the tools and of a call goes into the system message, calls of earlier answers into their texts, and
results into messages of the user, which every template has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvarts.doors.openai.errors import ApiError
from kvarts.doors.openai.tool_calls import CallFormat

__all__ = ["WARNING", "Message", "in_words"]

Message = Mapping[str, Any]
WARNING = (
    "the chat template of the model has no tools: they are described in the system message, and calls are read in the "
    "form {form}"
)


def in_words(messages: Sequence[Message], tools: Sequence[Message], form: CallFormat) -> list[Message]:
    """Return messages of system, user and assistant with texts alone, for the same conversation and `tools`.

    The arguments of calls are objects. `form`: in which calls are written. Raise ApiError for a call without a name.
    """
    found: list[Message] = []
    for message in messages:
        role, text = message["role"], message.get("content") or ""
        if role == "tool":
            found.append({"role": "user", "content": f"Result: {text}\n\nNow answer the question."})
            continue
        written = [form.written(*_named(call)) for call in message.get("tool_calls") or ()]
        found.append({"role": role, "content": "\n".join([*([text] if text else []), *written])})
    description = _description(tools, form)
    if found and found[0]["role"] == "system":
        return [{"role": "system", "content": f"{found[0]['content']}\n\n{description}"}, *found[1:]]
    return [{"role": "system", "content": description}, *found]


def _description(tools: Sequence[Message], form: CallFormat) -> str:
    functions: list[Any] = [tool.get("function") for tool in tools]
    if not all(isinstance(function, dict) and isinstance(function.get("name"), str) for function in functions):
        raise ApiError(400, "a tool is a function with a name", param="tools")
    return "\n".join(
        (
            "You are a helpful assistant that can call tools. The tools are:",
            *map(_json, functions),
            "",
            "To call a tool, answer with its name and its arguments, such as:",
            form.written(functions[0]["name"], "{...}"),
            "The result of a call is in the next message. With it, or without a tool, answer in words.",
        )
    )


def _named(call: Any) -> tuple[str, str]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, "a call has a function with a name and arguments", param="messages")
    return function["name"], _json(function.get("arguments") or {})


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()

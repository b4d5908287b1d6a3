"""Calls of tools in the text of a model, as each family writes them, and the JSON of calls that are enforced."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4

import msgspec

from kvarts.errors import ConfigError
from kvarts.openai_api.errors import ApiError

__all__ = [
    "FORMATS",
    "CallFormat",
    "NamedCall",
    "RequiredCalls",
    "ToolCallsInText",
    "call_message",
    "calls_schema",
    "format_of",
]

encode = msgspec.json.encode
Call = tuple[str, dict[str, Any]]
"""The name of a tool, and its arguments."""


class CallFormat(msgspec.Struct, frozen=True):
    """How a family writes calls. `marks`: texts with which calls begin, anywhere in an answer.

    `starts`: texts with which an answer begins that is nothing but calls. `read` returns the calls of a text from its
    mark on, and raises ValueError for others. `has_special_tokens`: marks are special tokens.
    """

    name: str
    marks: tuple[str, ...]
    read: Callable[[str], list[Call]]
    starts: tuple[str, ...] = ()
    has_special_tokens: bool = False


class _Written(msgspec.Struct):
    name: str
    arguments: dict[str, Any] | None = None
    parameters: dict[str, Any] | None = None

    @property
    def call(self) -> Call:
        """The call, of whichever of the two names."""
        return self.name, (self.parameters if self.arguments is None else self.arguments) or {}


def _one(text: str) -> Call:
    return msgspec.json.decode(text.strip(), type=_Written).call


def _between_tags(text: str) -> list[Call]:
    """Return calls of Hermes and Qwen: JSON between tags; of Qwen3-Coder: a function and its parameters as tags."""
    calls = []
    for part in text.split("<tool_call>")[1:]:
        body = part.partition("</tool_call>")[0].strip()
        tagged = re.fullmatch(r"<function=([^>\s]+)>(.*?)(?:</function>)?", body, re.DOTALL)
        if tagged is None:
            calls.append(_one(body))
            continue
        pairs = re.findall(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", tagged[2], re.DOTALL)
        calls.append((tagged[1], {name: _json_or_text(value) for name, value in pairs}))
    return calls


def _json_or_text(value: str) -> Any:
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return value


def _objects(text: str) -> list[Call]:
    """Return calls of Llama 3: JSON objects, perhaps after a tag, with semicolons between."""
    text = text.removeprefix("<|python_tag|>").strip()
    text = re.sub(r"\A```(?:json)?\s*|\s*```\Z", "", text)
    calls, place = [], 0
    while place < len(text):
        value, place = _object_at(text, place)
        calls.append(msgspec.convert(value, _Written).call)
        while place < len(text) and text[place] in "; \n\r\t":
            place += 1
    return calls


def _object_at(text: str, place: int) -> tuple[Any, int]:
    import json

    return json.JSONDecoder().raw_decode(text, place)


def _after_mark(text: str) -> list[Call]:
    """Return calls of Mistral: a list of JSON, or, as of 2025, names with `[ARGS]` and JSON."""
    calls = []
    for part in map(str.strip, text.split("[TOOL_CALLS]")[1:]):
        named = re.match(r"([\w.-]+)(?:\[CALL_ID\][\w-]+)?\[ARGS\]", part)
        if named is not None:
            arguments, _ = _object_at(part, named.end())
            calls.append((named[1], msgspec.convert(arguments, dict[str, Any])))
        else:
            written, _ = _object_at(part, 0)
            calls += [one.call for one in msgspec.convert(written, list[_Written])]
    return calls


def _of_gemma(text: str) -> list[Call]:
    """Return calls of FunctionGemma's tags, of Python in a block, or of JSON as Gemma's documentation asks for."""
    if "<start_function_call>" in text:
        return [_tagged(part) for part in text.split("<start_function_call>")[1:]]
    block = re.search(r"```tool_code\s*\n(.*?)(?:```|\Z)", text, re.DOTALL)
    if block is not None:
        return [call for line in block[1].strip().splitlines() for call in _python(line)]
    return _python(text) if text.lstrip().startswith("[") else _objects(text)


def _tagged(text: str) -> Call:
    found = re.match(r"call:([\w.-]+)\{(.*)\}<end_function_call>", text, re.DOTALL)
    if found is None:
        raise ValueError("is no call")
    texts: list[str] = []

    def keep(escaped: re.Match[str]) -> str:
        texts.append(escaped[1])
        return encode(escaped[1]).decode()

    spelled = re.sub(r"<escape>(.*?)<escape>", keep, found[2], flags=re.DOTALL)
    quoted = re.sub(r'("(?:[^"\\]|\\.)*")|([A-Za-z_][\w-]*)\s*:', _quoted_name, spelled)
    return found[1], msgspec.json.decode("{" + quoted + "}", type=dict[str, Any])


def _quoted_name(found: re.Match[str]) -> str:
    return found[1] or f'"{found[2]}":'


def _python(text: str) -> list[Call]:
    """Return the calls of an expression of Python with literal arguments: a call, or a list of them."""
    try:
        body = ast.parse(text.strip(), mode="eval").body
        parts = body.elts if isinstance(body, ast.List) else [body]
        calls = []
        for part in parts:
            if isinstance(part, ast.Call) and ast.unparse(part.func) == "print" and len(part.args) == 1:
                part = part.args[0]  # noqa: PLW2901  # the result of a call is printed
            if not isinstance(part, ast.Call) or part.args:
                raise ValueError("is no call with named arguments")
            calls.append((ast.unparse(part.func), {str(one.arg): ast.literal_eval(one.value) for one in part.keywords}))
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError("is no Python") from error
    return calls


FORMATS = {
    one.name: one
    for one in (
        CallFormat("hermes", ("<tool_call>",), _between_tags),
        CallFormat("llama3_json", ("<|python_tag|>",), _objects, ("{",), has_special_tokens=True),
        CallFormat("mistral", ("[TOOL_CALLS]",), _after_mark, has_special_tokens=True),
        CallFormat("gemma", ("<start_function_call>", "```tool_code"), _of_gemma, ("{", "[", "```json"), True),
    )
}
"""By the name of vLLM's parser, where there is one. Qwen writes as Hermes does."""


def format_of(template: str) -> CallFormat:
    """Return the format that a chat template tells of; that of Hermes if of none."""
    signs = {
        "hermes": ("<tool_call>",),
        "mistral": ("[TOOL_CALLS]",),
        "gemma": ("<start_function_call>", "<start_of_turn>"),
        "llama3_json": ("<|python_tag|>", "<|start_header_id|>"),
    }
    return FORMATS[next((name for name, texts in signs.items() if any(text in template for text in texts)), "hermes")]


class ToolCallsInText:
    """A Shape: calls as a model of a family writes them. What is no such call, or of no tool in `names`, is text."""

    def __init__(self, form: CallFormat = FORMATS["hermes"], names: Sequence[str] | None = None) -> None:
        self._form = form
        self._names = None if names is None else frozenset(names)

    def num_plain(self, text: str) -> int:
        """Return what comes before the first mark, or before what may become one."""
        stripped = text.lstrip()
        if any(stripped[: len(start)] == start[: len(stripped)] for start in self._form.starts):
            return 0
        places = [place for mark in self._form.marks if (place := text.find(mark)) >= 0]
        if places:
            return min(places)
        held = 0
        for mark in self._form.marks:
            for length in range(min(len(mark) - 1, len(text)), held, -1):
                if text.endswith(mark[:length]):
                    held = length
                    break
        return len(text) - held

    def message(self, text: str) -> tuple[dict[str, Any], str | None]:
        """Return the text before the calls, and the calls; or the whole text, if one of them cannot be read."""
        places = [place for mark in self._form.marks if (place := text.find(mark)) >= 0]
        first = min(places, default=0)
        if not places and not text.lstrip().startswith(self._form.starts or ("\0",)):
            return {"content": text, "tool_calls": []}, None
        try:
            calls = self._form.read(text[first:].rstrip())
        except (msgspec.DecodeError, ValueError, RecursionError):  # a text that looks like a call and is none
            return {"content": text, "tool_calls": []}, None
        if not calls or (self._names is not None and any(name not in self._names for name, _ in calls)):
            return {"content": text, "tool_calls": []}, None
        told = [call_message(name, encode(arguments).decode()) for name, arguments in calls]
        return {"content": text[:first] or None, "tool_calls": told}, "tool_calls"


class NamedCall(msgspec.Struct, frozen=True):
    """A Shape: the text is the arguments of one tool."""

    name: str

    def num_plain(self, text: str) -> int:
        """Return 0: all of it is arguments."""
        return 0

    def message(self, text: str) -> tuple[dict[str, Any], str | None]:
        """Return the call; one that was cut short has the arguments as far as they go, and ends as it did."""
        return {"content": None, "tool_calls": [call_message(self.name, text)]}, _reason(text)


class RequiredCalls:
    """A Shape: the text is a list of calls in JSON."""

    def num_plain(self, text: str) -> int:
        """Return 0: all of it is calls."""
        return 0

    def message(self, text: str) -> tuple[dict[str, Any], str | None]:
        """Return the calls; or the text, if it was cut short."""
        try:
            calls = [one.call for one in msgspec.json.decode(text, type=list[_Written])]
        except (msgspec.DecodeError, UnicodeEncodeError):
            return {"content": text, "tool_calls": []}, None
        told = [call_message(name, encode(arguments).decode()) for name, arguments in calls]
        return {"content": None, "tool_calls": told}, "tool_calls"


def _reason(text: str) -> str | None:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None
    return "tool_calls"


def calls_schema(functions: Sequence[Mapping[str, Any]], *, in_parallel: bool) -> dict[str, Any]:
    """Return the JSON schema of a list of calls of these tools. `in_parallel`: of more than one call.

    Definitions of parameters move to the root, which references are to. Raise ApiError where two differ.
    """
    definitions: dict[str, dict[str, Any]] = {"$defs": {}, "definitions": {}}
    items = []
    for function in functions:
        schema = dict(function.get("parameters") or {"type": "object"})
        for keyword, known in definitions.items():
            for name, definition in (schema.pop(keyword, None) or {}).items():
                if known.setdefault(name, definition) != definition:
                    raise ApiError(400, f"two tools define {name!r} differently", param="tools")
        items.append(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, "parameters": schema},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    whole: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": items}}
    if not in_parallel:
        whole["maxItems"] = 1
    return whole | {keyword: known for keyword, known in definitions.items() if known}


def call_message(name: str, arguments: str) -> dict[str, Any]:
    """Return a call as a message has it."""
    return {
        "id": f"chatcmpl-tool-{uuid4().hex}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def format_named(name: str, template: str) -> CallFormat:
    """Return the format of that name, `auto` for the one that a template tells of. Raise ConfigError for another."""
    if name == "auto":
        return format_of(template)
    if name not in FORMATS:
        raise ConfigError(
            f"{name!r} is not known", field="tool_call_parser", hint=f"Known: auto, {', '.join(FORMATS)}."
        )
    return FORMATS[name]

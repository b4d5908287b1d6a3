"""Tool calls in the text of a model, in the format of each family, and the JSON of enforced calls."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvarts.base.decoders import UNDECODED, convert, decoder_of
from kvarts.base.errors import ConfigError
from kvarts.doors.openai.errors import ApiError
from kvarts.doors.openai.shapes import CallPart, Part, Reader

__all__ = [
    "FORMATS",
    "CallFormat",
    "NamedCall",
    "RequiredCalls",
    "ToolCallsInText",
    "call_text",
    "calls_schema",
    "format_of",
]

encode = msgspec.json.encode
Call = tuple[str, dict[str, Any]]
"""The name of a tool, and its arguments."""


class _Pieces(msgspec.Struct, frozen=True):
    """How a format is parsed incrementally. `call`: the text before the arguments of a call, which is what follows the
    arguments of the call before; its group `json` or `bare` is the name. `closing`: the text after the last arguments.
    """

    call: re.Pattern[str]
    closing: re.Pattern[str]


_MORE = r'(?:\s*,\s*"[^"\\]*"\s*:\s*(?:"(?:[^"\\]|\\.)*"|[-\w.]+))*'
"""Further fields of a call, after its arguments."""
_HEAD = r'\{\s*"name"\s*:\s*(?P<json>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'


def _pieces(opening: str, closing: str, *, other: str = r"(?!)") -> _Pieces:
    """Return the pieces of a format with JSON objects. `opening`, `closing`: between and after them.

    `other`: an alternative to the opening and the head of an object.
    """
    return _Pieces(re.compile(f"(?:{_MORE}{opening}{_HEAD}|{other})"), re.compile(_MORE + closing))


class CallFormat(msgspec.Struct, frozen=True):
    """A family's format of calls. `marks`: texts that start calls anywhere in an answer.

    `starts`: texts that start an answer consisting only of calls. `read` returns the calls of a text from its mark on,
    and raises ValueError for other texts. `pieces`: for calls that are JSON objects. `has_special_tokens`: marks are
    special tokens. `pattern`: a call, with NAME and ARGUMENTS.
    """

    name: str
    marks: tuple[str, ...]
    read: Callable[[str], list[Call]]
    pieces: _Pieces
    pattern: str
    starts: tuple[str, ...] = ()
    has_special_tokens: bool = False

    def written(self, name: str, arguments: str) -> str:
        """Return the text of a call. `arguments`: as JSON."""
        return self.pattern.replace("NAME", _json(name)).replace("ARGUMENTS", arguments)


class _Written(msgspec.Struct):
    name: str
    arguments: dict[str, Any] | None = None
    parameters: dict[str, Any] | None = None

    @property
    def call(self) -> Call:
        """The call, whichever of the two fields holds its arguments."""
        return self.name, (self.parameters if self.arguments is None else self.arguments) or {}


def _one(text: str) -> Call:
    return decoder_of(_Written).decode(text.strip()).call


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
    except UNDECODED:
        return value


def _objects(text: str) -> list[Call]:
    """Return calls of Llama 3: JSON objects, optionally after a tag, separated by semicolons."""
    text = text.removeprefix("<|python_tag|>").strip()
    text = re.sub(r"\A```(?:json)?\s*|\s*```\Z", "", text)
    calls, place = [], 0
    while place < len(text):
        value, place = _object_at(text, place)
        calls.append(convert(value, _Written).call)
        while place < len(text) and text[place] in "; \n\r\t":
            place += 1
    return calls


def _object_at(text: str, place: int) -> tuple[Any, int]:
    import json

    return json.JSONDecoder().raw_decode(text, place)


def _after_mark(text: str) -> list[Call]:
    """Return calls of Mistral: a JSON list, or since 2025 names with `[ARGS]` and JSON."""
    calls = []
    for part in map(str.strip, text.split("[TOOL_CALLS]")[1:]):
        named = re.match(r"([\w.-]+)(?:\[CALL_ID\][\w-]+)?\[ARGS\]", part)
        if named is not None:
            arguments, _ = _object_at(part, named.end())
            calls.append((named[1], convert(arguments, dict[str, Any])))
        else:
            written, _ = _object_at(part, 0)
            calls += [one.call for one in convert(written, list[_Written])]
    return calls


def _of_gemma(text: str) -> list[Call]:
    """Return calls of Gemma: Python in a block, or the JSON of Gemma's documentation."""
    block = re.search(r"```tool_code\s*\n(.*?)(?:```|\Z)", text, re.DOTALL)
    if block is not None:
        return [call for line in block[1].strip().splitlines() for call in _python(line)]
    return _python(text) if text.lstrip().startswith("[") else _objects(text)


def _tagged(text: str) -> Call:
    """Return the call of FunctionGemma in a text that ends before its end tag. Raise ValueError for other texts."""
    found = re.fullmatch(r"\s*<start_function_call>call:([\w.-]+)\{(.*)\}", text, re.DOTALL)
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
    """Return the calls of a Python expression with literal arguments: a call, or a list of calls."""
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


_OBJECTS = _pieces(r"[}\s;]*(?:<\|python_tag\|>)?\s*(?:```(?:json)?\s*)?", r"[}\s;]*(?:```)?\s*")
FORMATS = {
    one.name: one
    for one in (
        CallFormat(
            "hermes",
            ("<tool_call>",),
            _between_tags,
            _pieces(r"[}\s]*(?:</tool_call>)?\s*<tool_call>\s*", r"[}\s]*(?:</tool_call>)?\s*"),
            '<tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call>',
        ),
        CallFormat(
            "llama3_json",
            ("<|python_tag|>",),
            _objects,
            _OBJECTS,
            '{"name": NAME, "parameters": ARGUMENTS}',
            ("{",),
            has_special_tokens=True,
        ),
        CallFormat(
            "mistral",
            ("[TOOL_CALLS]",),
            _after_mark,
            _pieces(
                r"[}\]\s,]*(?:\[TOOL_CALLS\]\s*)?\[?\s*",
                r"[}\]\s]*",
                other=r"[}\]\s]*\[TOOL_CALLS\]\s*(?P<bare>[\w.-]+)(?:\[CALL_ID\][\w-]+)?\[ARGS\]\s*(?=\{)",
            ),
            '[TOOL_CALLS][{"name": NAME, "arguments": ARGUMENTS}]',
            has_special_tokens=True,
        ),
        CallFormat(
            "gemma",
            ("<start_function_call>", "```tool_code"),
            _of_gemma,
            _OBJECTS,
            '{"name": NAME, "parameters": ARGUMENTS}',
            ("{", "[", "```json"),
            has_special_tokens=True,
        ),
    )
}
"""By the name of vLLM's parser, if there is one. Qwen uses the format of Hermes."""


def format_of(template: str) -> CallFormat:
    """Return the format that a chat template mentions; by default that of Hermes."""
    signs = {
        "hermes": ("<tool_call>",),
        "mistral": ("[TOOL_CALLS]",),
        "gemma": ("<start_function_call>", "<start_of_turn>"),
        "llama3_json": ("<|python_tag|>", "<|start_header_id|>"),
    }
    return FORMATS[next((name for name, texts in signs.items() if any(text in template for text in texts)), "hermes")]


class ToolCallsInText:
    """A Shape: calls in the format of the model's family. Other text, and calls of tools not in `names`, stay text.

    Calls that are JSON objects are parsed incrementally: the name, then the arguments as they are written. Those of
    FunctionGemma are returned as each ends, and Python at the end of the text.
    """

    def __init__(self, form: CallFormat = FORMATS["hermes"], names: Sequence[str] | None = None) -> None:
        self._form = form
        self._names = None if names is None else frozenset(names)

    def __call__(self, number: int) -> Reader:
        """Return the reader of a choice."""
        return _InText(self._form, self._names)


class RequiredCalls:
    """A Shape: the text is a JSON list of calls."""

    def __call__(self, number: int) -> Reader:
        """Return the reader of a choice."""
        return _JsonCalls(_LIST, _listed, None, is_enforced=True)


class NamedCall(msgspec.Struct, frozen=True):
    """A Shape: the text is the arguments of one tool's call."""

    name: str

    def __call__(self, number: int) -> Reader:
        """Return the reader of a choice."""
        return _Arguments(self.name)


class _Arguments:
    """A Reader: the text is the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._end = _ObjectEnd()
        self._has_begun = False

    def add(self, text: str) -> Part:
        self._end.find(text)
        call = CallPart(0, text) if self._has_begun else CallPart.first(0, self._name, text)
        self._has_begun = True
        return Part(calls=[call])

    def end(self) -> tuple[Part, str | None]:
        return Part() if self._has_begun else self.add(""), "tool_calls" if self._end.is_found else None


class _ObjectEnd:
    """Incremental search for the end of a JSON object."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = self._is_escaped = False
        self.is_found = False

    def find(self, text: str) -> int:
        """Return the number of characters of `text`, the next piece, that belong to the object."""
        place = 0
        while place < len(text) and not self.is_found:
            if self._is_escaped:
                self._is_escaped = False
                place += 1
                continue
            found = (_IN_STRING if self._is_in_string else _OUT_OF_STRING).search(text, place)
            if found is None:
                return len(text)
            mark, place = found[0], found.end()
            if mark == "\\":
                self._is_escaped = True
            elif mark == '"':
                self._is_in_string = not self._is_in_string
            else:
                self._depth += 1 if mark in "{[" else -1
                self.is_found = self._depth <= 0
        return place


_IN_STRING = re.compile(r'["\\]')
_OUT_OF_STRING = re.compile(r'["{}\[\]]')
MAX_HEAD_CHARS = 1024
"""A call with a longer text before its arguments is parsed at the end, with the rest of the text."""
_LIST = _pieces(r"[\[\]},\s]*", r"[\]},\s]*")
_TAGGED, _TAG_END = "<start_function_call>", "<end_function_call>"


class _JsonCalls:
    """A Reader of calls that are JSON objects; arguments are parsed incrementally.

    `read` parses the rest of the text
    if its calls have another form, and raises ValueError if there are none. `is_enforced`: the text
    is nothing but calls, so that what follows the last whole call is a call that was cut off.
    """

    def __init__(
        self,
        pieces: _Pieces,
        read: Callable[[str], list[Call]],
        names: frozenset[str] | None,
        *,
        is_enforced: bool = False,
    ) -> None:
        self._pieces = pieces
        self._read = read
        self._names = names
        self._is_enforced = is_enforced
        self._texts: list[str] = []
        """Text that is not parsed yet."""
        self._num_held = 0
        self._arguments: _ObjectEnd | None = None
        """Those of the current call."""
        self._num_calls = 0

    def add(self, text: str) -> Part:
        calls: list[CallPart] = []
        while text:
            if self._arguments is not None:
                count = self._arguments.find(text)
                self._extend(calls, text[:count])
                text = text[count:]
                if not self._arguments.is_found:
                    break
                self._arguments = None
                continue
            self._texts.append(text)
            if self._num_held > MAX_HEAD_CHARS:
                break
            self._num_held += len(text)
            held = "".join(self._texts)
            head = self._pieces.call.match(held)
            name = None if head is None else head.groupdict().get("bare") or _string(head["json"])
            if head is None or name is None or (self._names is not None and name not in self._names):
                break
            self._texts.clear()
            self._num_held = 0
            calls.append(CallPart.first(self._num_calls, name))
            self._num_calls += 1
            self._arguments = _ObjectEnd()
            text = held[head.end() :]
        return Part(calls=calls)

    def _extend(self, calls: list[CallPart], arguments: str) -> None:
        if not calls or calls[-1].index != self._num_calls - 1:
            calls.append(CallPart(self._num_calls - 1))
        calls[-1].arguments += arguments

    def end(self) -> tuple[Part, str | None]:
        if self._arguments is not None:
            return Part(), None
        held = "".join(self._texts)
        if self._num_calls and (closing := self._pieces.closing.match(held)) is not None:
            held = held[closing.end() :]
        try:
            written = self._read(held.rstrip()) if held else []
        except (msgspec.DecodeError, UnicodeEncodeError, ValueError, RecursionError):  # it only looks like a call
            written = []
        if written and (self._names is None or all(name in self._names for name, _ in written)):
            calls = [
                CallPart.first(self._num_calls + index, name, encode(arguments).decode())
                for index, (name, arguments) in enumerate(written)
            ]
            return Part(calls=calls), "tool_calls"
        if not self._num_calls:
            return Part(held), None
        return (Part(), None) if held and self._is_enforced else (Part(held), "tool_calls")


class _TaggedCalls:
    """A Reader of FunctionGemma's calls, each of which is returned once it has ended."""

    def __init__(self, names: frozenset[str] | None) -> None:
        self._names = names
        self._texts: list[str] = []
        self._tail = ""
        """The last characters, which may begin the end of a call."""
        self._num_calls = 0
        self._is_text = False
        """Whether the rest is text, because a call in it could not be parsed."""

    def add(self, text: str) -> Part:
        self._texts.append(text)
        seen = self._tail + text
        self._tail = seen[1 - len(_TAG_END) :]
        if self._is_text or _TAG_END not in seen:
            return Part()
        held, calls = "".join(self._texts), list[CallPart]()
        while not self._is_text and (end := held.find(_TAG_END)) >= 0:
            try:
                name, arguments = _tagged(held[:end])
            except (msgspec.DecodeError, UnicodeEncodeError, ValueError, RecursionError):
                name, arguments = "", {}
            self._is_text = not name or (self._names is not None and name not in self._names)
            if not self._is_text:
                calls.append(CallPart.first(self._num_calls, name, encode(arguments).decode()))
                self._num_calls += 1
                held = held[end + len(_TAG_END) :]
        self._texts = [held]
        return Part(calls=calls)

    def end(self) -> tuple[Part, str | None]:
        held = "".join(self._texts)
        return (Part(held if held.strip() else ""), "tool_calls") if self._num_calls else (Part(held), None)


def _string(written: str) -> str | None:
    try:
        return msgspec.json.decode(written, type=str)
    except UNDECODED:
        return None


def _listed(text: str) -> list[Call]:
    return [one.call for one in decoder_of(list[_Written]).decode(text)]


class _InText:
    """A Reader of text that may contain calls."""

    def __init__(self, form: CallFormat, names: frozenset[str] | None) -> None:
        self._form = form
        self._held = ""
        """The last characters, if they may begin a call."""
        self._has_text = False
        self._names = names
        self._calls: Reader = _JsonCalls(form.pieces, form.read, names)
        self._is_in_calls = False

    def add(self, text: str) -> Part:
        if self._is_in_calls:
            return self._calls.add(text)
        text = self._held + text
        first = self._first_mark(text)
        if first is not None:
            self._held, self._is_in_calls = "", True
            if text.startswith(_TAGGED, first):
                self._calls = _TaggedCalls(self._names)
            part = self._calls.add(text[first:])
            part.content = text[:first]
            return part
        count = len(text) - self._num_doubtful(text)
        self._held = text[count:]
        self._has_text |= not text[:count].isspace() and count > 0
        return Part(text[:count])

    def _first_mark(self, text: str) -> int | None:
        """Return the place of the first call, or None."""
        if not self._has_text and text.lstrip().startswith(self._form.starts or _NOWHERE):
            return 0
        return min((place for mark in self._form.marks if (place := text.find(mark)) >= 0), default=None)

    def _num_doubtful(self, text: str) -> int:
        """Return the number of characters at the end of a text without a mark that may begin one."""
        stripped = text.lstrip()
        if not self._has_text and any(start.startswith(stripped) for start in self._form.starts):
            return len(text)
        ends = (mark[:length] for mark in self._form.marks for length in range(1, len(mark)))
        return max((len(end) for end in ends if text.endswith(end)), default=0)

    def end(self) -> tuple[Part, str | None]:
        return self._calls.end() if self._is_in_calls else (Part(self._held), None)


_NOWHERE = ("\0",)


def calls_schema(functions: Sequence[Mapping[str, Any]], *, in_parallel: bool) -> dict[str, Any]:
    """Return the JSON schema of a list of calls of these tools. `in_parallel`: allow more than one call.

    Definitions of parameters move to the root, where references point. Raise ApiError if two definitions differ.
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


def call_text(name: str, *, is_first: bool) -> tuple[str, str]:
    """Return the text before and after the arguments of a call in the Hermes format. `is_first`: of the message."""
    return ("" if is_first else "\n") + f'<tool_call>\n{{"name": {_json(name)}, "arguments": ', "}\n</tool_call>"


def _json(value: Any) -> str:
    return encode(value).decode()


def format_named(name: str, template: str) -> CallFormat:
    """Return the format `name`; for `auto`, the one that the template mentions. Raise ConfigError if it is unknown."""
    if name == "auto":
        return format_of(template)
    if name not in FORMATS:
        raise ConfigError(
            f"{name!r} is not known", field="tool_call_parser", hint=f"Known: auto, {', '.join(FORMATS)}."
        )
    return FORMATS[name]

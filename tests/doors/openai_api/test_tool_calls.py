"""Calls of tools as each family writes them: read whole, in any pieces, and left alone where they are none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.base.errors import ConfigError
from kvarts.doors.openai.errors import ApiError
from kvarts.doors.openai.generic_tools import in_words
from kvarts.doors.openai.shapes import Message, Part, Shape, read_whole
from kvarts.doors.openai.tool_calls import (
    FORMATS,
    NamedCall,
    RequiredCalls,
    ToolCallsInText,
    calls_schema,
    format_named,
    format_of,
)

CITY = ("weather", {"city": "Lund"})
BOTH = ("weather", {"city": "Lund", "days": 3})
WRITTEN: list[tuple[str, str, list[tuple[str, dict[str, Any]]]]] = [
    ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Lund"}}\n</tool_call>', [CITY]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Lund"}}</tool_call>\n' * 2, [CITY, CITY]),
    (
        "hermes",
        "<tool_call>\n<function=weather>\n<parameter=city>\nLund\n</parameter>\n<parameter=days>3</parameter>\n</function>",
        [BOTH],
    ),
    ("llama3_json", '{"name": "weather", "parameters": {"city": "Lund"}}', [CITY]),
    ("llama3_json", '<|python_tag|>{"name": "weather", "parameters": {"city": "Lund"}}', [CITY]),
    ("llama3_json", '{"name": "weather", "parameters": {"city": "Lund"}}; {"name": "time"}', [CITY, ("time", {})]),
    ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Lund"}}]', [CITY]),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Lund"}', [CITY]),
    ("mistral", '[TOOL_CALLS]weather[CALL_ID]a1B[ARGS]{"city": "Lund"}[TOOL_CALLS]time[ARGS]{}', [CITY, ("time", {})]),
    ("gemma", "<start_function_call>call:weather{city:<escape>Lund<escape>,days:3}<end_function_call>", [BOTH]),
    ("gemma", '```tool_code\nweather(city="Lund", days=3)\n```', [BOTH]),
    ("gemma", '```tool_code\nprint(weather(city="Lund"))\n```', [CITY]),
    ("gemma", '[weather(city="Lund"), time()]', [CITY, ("time", {})]),
    ("gemma", '{"name": "weather", "parameters": {"city": "Lund"}}', [CITY]),
    ("gemma", '```json\n{"name": "weather", "parameters": {"city": "Lund"}}\n```', [CITY]),
]


def calls_in(message: Message) -> list[tuple[str, dict[str, Any]]]:
    return [(one.name, json.loads(one.arguments)) for one in message.calls]


def read(shape: Shape, text: str) -> Message:
    return read_whole(shape, 0, text)


@pytest.mark.parametrize(("name", "text", "calls"), WRITTEN)
def test_calls_are_read(name: str, text: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    shape = ToolCallsInText(FORMATS[name], ["weather", "time"])
    message = read(shape, text)
    assert (calls_in(message), message.content, message.reason) == (calls, "", "tool_calls")
    if not text.startswith(FORMATS[name].starts or ("\0",)):
        message = read(shape, f"Let me look.\n{text}")
        assert (calls_in(message), message.content) == (calls, "Let me look.\n")
    assert read(ToolCallsInText(FORMATS[name], ["other"]), text) == Message(text)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "text",
    ["", "no call", "{", '{"a": 1}', "[1, 2]", "<tool_call>{not json}</tool_call>", "[TOOL_CALLS]", "[TOOL_CALLS]{}",
     "```tool_code\n1 +\n```", "```tool_code\nf(1)\n```", "<start_function_call>call:f{a:}<end_function_call>",
     "<|python_tag|>print(1)", "[" * 500, '{"name": "weather", "parameters": 3}', "\ud800<tool_call>"],
)  # fmt: skip
def test_what_is_no_call_is_text(name: str, text: str) -> None:
    assert read(ToolCallsInText(FORMATS[name], ["weather"]), text) == Message(text)


def without_ids(message: Message) -> Any:
    calls = [(call.index, call.name, call.arguments) for call in message.calls]
    return message.content, message.reasoning, message.refusal, calls, message.reason


@given(
    st.sampled_from(WRITTEN),
    st.sampled_from(["", "so: ", "a < b [x] {"]),
    st.sampled_from(["", "<tool_call>{", "\nDone.", "}"]),
    st.lists(st.integers(1, 12), min_size=1),
    st.integers(0, 200),
)
def test_a_text_is_read_alike_in_any_pieces(written: Any, before: str, after: str, sizes: list[int], cut: int) -> None:
    name, text, _ = written
    text = (before + text + after)[:cut]
    for shape in (ToolCallsInText(FORMATS[name], ["weather", "time"]), NamedCall("weather"), RequiredCalls()):
        reader, message, place, number = shape(0), Message(), 0, 0
        while place < len(text):
            end = place + sizes[number % len(sizes)]
            message.add(reader.add(text[place:end]))
            place, number = end, number + 1
        rest, message.reason = reader.end()
        message.add(rest)
        assert without_ids(message) == without_ids(read(shape, text))


def test_arguments_come_as_they_are_written_and_are_cut_where_the_text_is() -> None:
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "a}\\"]b", "days": [1, {}]}}\n</tool_call>'
    reader = ToolCallsInText(names=["weather"])(0)
    told = [part.calls[0] for part in map(reader.add, text) if part.calls]
    assert [call.name for call in told] == ["weather", *[""] * (len(told) - 1)]
    assert "".join(call.arguments for call in told) == '{"city": "a}\\"]b", "days": [1, {}]}'
    assert all(len(call.arguments) == 1 for call in told)
    assert reader.end()[1] == "tool_calls"
    cut = read(ToolCallsInText(), text[: text.index("days")])
    assert (cut.calls[0].arguments, cut.reason) == ('{"city": "a}\\"]b", "', None)


JSON_FORMS = {
    "hermes": ("<tool_call>{}</tool_call>", "\n", "{}"),
    "llama3_json": ("{}", "; ", "<|python_tag|>{}"),
    "mistral": ("{}", ", ", "[TOOL_CALLS] [{}]"),
    "gemma": ("{}", "\n", "```json\n{}\n```"),
}


@given(
    name=st.sampled_from(sorted(JSON_FORMS)),
    values=st.lists(st.recursive(st.integers() | st.text(), st.lists), min_size=1, max_size=3),
    more=st.sampled_from(["", ', "id": "a1B}{"', ' , "index": 0, "x": null']),
)
def test_each_family_streams_any_arguments_as_they_are_written(name: str, values: list[Any], more: str) -> None:
    one, between, around = JSON_FORMS[name]
    arguments = [json.dumps({"value": value}) for value in values]
    written = between.join(one.replace("{}", f'{{"name": "f", "arguments": {each}{more}}}') for each in arguments)
    reader, message, pieces = ToolCallsInText(FORMATS[name], ["f"])(0), Message(), []
    for character in around.replace("{}", written):
        part = reader.add(character)
        message.add(part)
        pieces += [call.arguments for call in part.calls if call.arguments]
    rest, reason = reader.end()
    assert ([call.arguments for call in message.calls], message.content, rest.content) == (arguments, "", "")
    assert reason == "tool_calls" and set(map(len, pieces)) == {1}


def test_arguments_that_are_nested_too_deeply_stay_text() -> None:
    """As those that are no JSON do; Qwen's form has a text for each."""
    deep = "[" * 5000
    for name in sorted(FORMATS):
        text = FORMATS[name].written("f", deep)
        assert read(ToolCallsInText(FORMATS[name], ["f"]), text) == Message(text)
    text = f"<tool_call>\n<function=f>\n<parameter=x>\n{deep}\n</parameter>\n</function>\n</tool_call>"
    (made,) = read(ToolCallsInText(FORMATS["hermes"], ["f"]), text).calls
    assert json.loads(made.arguments) == {"x": deep}


def test_other_forms_come_call_by_call() -> None:
    for name, text in (
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]x1[ARGS]{"b": {}}'),
        ("gemma", "".join(f"<start_function_call>call:{each}<end_function_call>" for each in ("f{a:1}", "g{b:{}}"))),
    ):
        reader = ToolCallsInText(FORMATS[name], ["f", "g"])(0)
        half = text.index("g[" if name == "mistral" else "call:g")
        first = [call for part in map(reader.add, text[:half]) for call in part.calls]
        second = [call for part in map(reader.add, text[half:]) for call in part.calls]
        names = [[call.name for call in calls if call.name] for calls in (first, second)]
        assert names == [["f"], ["g"]]
        assert "".join(call.arguments for call in first).replace(" ", "") == '{"a":1}'
        assert reader.end() == (Part(), "tool_calls")


@given(
    st.recursive(st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)),
    st.booleans(),
    st.booleans(),
)
def test_any_arguments_are_told_as_they_are(value: Any, is_ascii: bool, is_required: bool) -> None:
    arguments = json.dumps({"value": value}, ensure_ascii=is_ascii)
    one = f'{{"name": "f", "parameters": {arguments}}}'
    message = read(RequiredCalls(), f"[{one}, {one}]") if is_required else read(
        ToolCallsInText(), f"<tool_call>{one}</tool_call><tool_call>{one}</tool_call>")  # fmt: skip
    assert [call.arguments for call in message.calls] == [arguments] * 2 and message.reason == "tool_calls"
    assert message.content == ""


@given(st.text(max_size=60), st.sampled_from(sorted(FORMATS)))
def test_any_text_is_read_as_something(text: str, name: str) -> None:
    message = read(ToolCallsInText(FORMATS[name]), text)
    assert message.calls or message.content == text


def test_templates_tell_which_family_it_is() -> None:
    told = {"<tool_call>": "hermes", "x[TOOL_CALLS]": "mistral", "<start_of_turn>user": "gemma",
            "<|start_header_id|>": "llama3_json", "": "hermes"}  # fmt: skip
    assert {text: format_of(text).name for text in told} == told
    assert format_named("mistral", "<tool_call>").name == "mistral"
    with pytest.raises(ConfigError, match="Known: auto, hermes"):
        format_named("other", "")


def test_schemas_of_calls() -> None:
    one = {"name": "a", "parameters": {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}},
                                       "$defs": {"X": {"type": "integer"}}}}  # fmt: skip
    schema = calls_schema([one, {"name": "b"}], in_parallel=False)
    assert schema["$defs"] == {"X": {"type": "integer"}} and schema["maxItems"] == 1
    other = {"name": "b", "parameters": {"$defs": {"X": {"type": "string"}}}}
    with pytest.raises(ApiError, match="two tools define 'X' differently"):
        calls_schema([one, other], in_parallel=True)


def test_enforced_calls() -> None:
    message = read(NamedCall("weather"), '{"city": "Lund"}')
    assert (calls_in(message), message.reason) == ([CITY], "tool_calls")
    message = read(NamedCall("weather"), '{"city": "Lu')
    assert (message.calls[0].arguments, message.reason) == ('{"city": "Lu', None)
    message = read(RequiredCalls(), '[{"name": "weather", "parameters": {"city": "Lund"}}]')
    assert (calls_in(message), message.reason) == ([CITY], "tool_calls")
    assert read(RequiredCalls(), '[{"name') == Message('[{"name')


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_reads_the_calls_that_it_writes(name: str) -> None:
    form = FORMATS[name]
    text = form.written("weather", '{"city": "Lund, \\"S\\"", "days": 3}')
    message = read_whole(ToolCallsInText(form, ["weather"]), 0, text)
    assert calls_in(message) == [("weather", {"city": 'Lund, "S"', "days": 3})]


def test_a_conversation_with_tools_in_words() -> None:
    tools = [{"type": "function", "function": {"name": "weather", "description": "of a city"}}]
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": {"city": "Lund"}}}
    user: dict[str, Any] = {"role": "user", "content": "Rain?"}
    asked: list[dict[str, Any]] = [user, {"role": "assistant", "content": "", "tool_calls": [call]},
             {"role": "tool", "tool_call_id": "a", "content": "dry"}]  # fmt: skip
    system, question, answer, result = in_words(asked, tools, FORMATS["hermes"])
    assert system["role"] == "system" and '{"name":"weather","description":"of a city"}' in system["content"]
    assert '<tool_call>\n{"name": "weather", "arguments": {...}}\n</tool_call>' in system["content"]
    assert question == user
    assert answer == {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "weather", "arguments": {"city":"Lund"}}\n</tool_call>',
    }
    assert result == {"role": "user", "content": "Result: dry\n\nNow answer the question."}
    brief = {"role": "system", "content": "Be brief."}
    first, *rest = in_words([brief, *asked], tools, FORMATS["hermes"])
    assert first["content"] == f"Be brief.\n\n{system['content']}" and rest == [question, answer, result]
    with pytest.raises(ApiError, match="a call has a function"):
        in_words([{**asked[1], "tool_calls": [{"function": 3}]}], tools, FORMATS["hermes"])

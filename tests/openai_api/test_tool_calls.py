"""Calls of tools as each family writes them: read whole, in any pieces, and left alone where they are none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.errors import ConfigError
from kvarts.openai_api.errors import ApiError
from kvarts.openai_api.tool_calls import (
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


def calls_in(message: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    made = [call["function"] for call in message["tool_calls"]]
    return [(one["name"], json.loads(one["arguments"])) for one in made]


@pytest.mark.parametrize(("name", "text", "calls"), WRITTEN)
def test_calls_are_read(name: str, text: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    shape = ToolCallsInText(FORMATS[name], ["weather", "time"])
    message, reason = shape.message(text)
    assert (calls_in(message), message["content"], reason) == (calls, None, "tool_calls")
    if not text.startswith(FORMATS[name].starts or ("\0",)):
        message, _ = shape.message(f"Let me look.\n{text}")
        assert (calls_in(message), message["content"]) == (calls, "Let me look.\n")
    message, reason = ToolCallsInText(FORMATS[name], ["other"]).message(text)
    assert (message, reason) == ({"content": text, "tool_calls": []}, None)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "text",
    ["", "no call", "{", '{"a": 1}', "[1, 2]", "<tool_call>{not json}</tool_call>", "[TOOL_CALLS]", "[TOOL_CALLS]{}",
     "```tool_code\n1 +\n```", "```tool_code\nf(1)\n```", "<start_function_call>call:f{a:}<end_function_call>",
     "<|python_tag|>print(1)", "[" * 500, '{"name": "weather", "parameters": 3}', "\ud800<tool_call>"],
)  # fmt: skip
def test_what_is_no_call_is_text(name: str, text: str) -> None:
    assert ToolCallsInText(FORMATS[name], ["weather"]).message(text) == ({"content": text, "tool_calls": []}, None)


@given(st.sampled_from(WRITTEN), st.sampled_from(["", "so: ", "a < b [x] {"]), st.data())
def test_no_part_of_a_call_is_content(written: Any, before: str, data: st.DataObject) -> None:
    """What was sent as content is a beginning of the content in the end, wherever the text was cut."""
    name, text, _ = written
    shape = ToolCallsInText(FORMATS[name], ["weather", "time"])
    whole = before + text
    content = shape.message(whole)[0]["content"] or ""
    cut = data.draw(st.integers(0, len(whole)))
    assert content.startswith(whole[: shape.num_plain(whole[:cut])])


@given(st.text(max_size=60), st.sampled_from(sorted(FORMATS)))
def test_any_text_is_read_as_something(text: str, name: str) -> None:
    message, _ = ToolCallsInText(FORMATS[name]).message(text)
    assert message["tool_calls"] or message["content"] == text


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
    message, reason = NamedCall("weather").message('{"city": "Lund"}')
    assert (calls_in(message), reason) == ([CITY], "tool_calls")
    message, reason = NamedCall("weather").message('{"city": "Lu')
    assert (message["tool_calls"][0]["function"]["arguments"], reason) == ('{"city": "Lu', None)
    message, reason = RequiredCalls().message('[{"name": "weather", "parameters": {"city": "Lund"}}]')
    assert (calls_in(message), reason) == ([CITY], "tool_calls")
    assert RequiredCalls().message('[{"name') == ({"content": '[{"name', "tool_calls": []}, None)

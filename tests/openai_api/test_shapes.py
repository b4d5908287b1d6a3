"""Answers that are no plain text: JSON of a schema, calls of tools; what would change an answer and is not done."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.openai_api.budget import Budget
from kvarts.openai_api.errors import ApiError
from kvarts.openai_api.forms import ChatForm
from kvarts.openai_api.prompts import WordText
from kvarts.openai_api.running import RunningServer
from kvarts.openai_api.schemas import value_of
from kvarts.openai_api.tool_calls import ToolCallsInText

from builders.http_client import call, events_of

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "Tell me."}]

leaves = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda least: {"type": "integer", "minimum": least, "exclusiveMaximum": least + 3}, st.integers(-9, 9)),
    st.builds(lambda least, size: {"type": "string", "minLength": least, "maxLength": least + size},
              st.integers(0, 9), st.integers(0, 9)),
    st.builds(lambda values: {"enum": values}, st.lists(st.one_of(st.integers(), st.text(max_size=3)), min_size=1)),
    st.builds(lambda value: {"const": value}, st.integers()),
)  # fmt: skip
schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(lambda item, least: {"type": "array", "items": item, "minItems": least}, inner, st.integers(0, 3)),
        st.builds(lambda parts: {"anyOf": parts}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(
            lambda named, cut: {"type": "object", "properties": named, "required": list(named)[cut:]},
            st.dictionaries(st.text(max_size=3), inner, max_size=3),
            st.integers(0, 2),
        ),
    ),
    max_leaves=8,
)


def allows(schema: Any, value: Any) -> bool:
    """Whether a schema allows a value, as far as `schemas` goes."""
    if "anyOf" in schema:
        return any(allows(part, value) for part in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    if "const" in schema:
        return bool(value == schema["const"])
    kind = schema["type"]
    if kind == "object":
        named = schema["properties"]
        return set(schema["required"]) <= set(value) and all(allows(named[name], value[name]) for name in value)
    if kind == "array":
        return len(value) >= schema["minItems"] and all(allows(schema["items"], item) for item in value)
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value < schema["exclusiveMaximum"]
    if kind == "string":
        return isinstance(value, str) and schema["minLength"] <= len(value) <= schema["maxLength"]
    return value is (None if kind == "null" else False)


@given(schemas, st.text(max_size=20))
def test_what_is_made_of_a_schema_is_allowed_by_it(schema: Any, text: str) -> None:
    value = value_of(schema, text, param="x", budget=Budget(sequences=0))
    assert allows(schema, value)
    assert json.loads(json.dumps(value)) == value


@given(st.recursive(st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)), lambda inner: st.one_of(
    st.lists(inner, max_size=3),
    st.dictionaries(st.sampled_from(["type", "enum", "$ref", "anyOf", "properties", "required", "items", "minimum",
                                     "minItems", "format", "allOf", "minLength"]), inner, max_size=4)), max_leaves=10),
)  # fmt: skip
def test_any_json_is_a_schema_or_is_refused(schema: Any) -> None:
    try:
        value_of(schema, "text", param="response_format", budget=Budget(sequences=0))
    except ApiError as error:
        assert (error.status, error.param) == (400, "response_format")  # noqa: PT017  # it need not be raised


@pytest.mark.parametrize(
    "schema", [{"format": []}, {"type": "object", "minProperties": "2"}, {"type": "integer", "minimum": 1e400}]
)
def test_keywords_of_a_wrong_type_are_refused(schema: Any) -> None:
    with pytest.raises(ApiError, match="no JSON schema"):
        value_of(schema, "text", param="response_format", budget=Budget(sequences=0))


def test_a_schema_may_refer_to_its_own_parts() -> None:
    schema = {
        "$defs": {"Step": {"type": "object", "properties": {"n": {"type": "integer", "minimum": 2}}}},
        "type": "object",
        "properties": {"steps": {"type": "array", "items": {"$ref": "#/$defs/Step"}}, "ends": {"type": ["null"]}},
    }
    assert value_of(schema, "x", param="x", budget=Budget(sequences=0)) == {"steps": [{"n": 2}], "ends": None}
    endless = {"$defs": {"A": {"type": "array", "items": {"$ref": "#/$defs/A"}}}, "$ref": "#/$defs/A"}
    with pytest.raises(ApiError, match="never ends"):
        value_of(endless, "x", param="x", budget=Budget(sequences=0))


@pytest.mark.parametrize("stream", [False, True])
def test_a_mock_answers_in_the_form_that_is_asked_for(server: RunningServer, *, stream: bool) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 3}}}
    forms: list[dict[str, Any]] = [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "trip", "schema": schema}},
    ]
    for form in forms:
        body = {"messages": MESSAGES, "max_tokens": 5, "response_format": form, "stream": stream}
        reply = call(server.url, CHAT, body)
        if stream:
            deltas = [event["choices"][0]["delta"] for event in events_of(reply.payload)]
            content = "".join(delta.get("content") or "" for delta in deltas)
        else:
            content = reply.json["choices"][0]["message"]["content"]
        value = json.loads(content)
        assert isinstance(value, dict) and (form["type"] == "json_object" or value["days"] == 3)
    text = call(server.url, CHAT, {"messages": MESSAGES, "max_tokens": 5, "response_format": {"type": "text"}})
    assert len(text.json["choices"][0]["message"]["content"].split()) == 5


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"response_format": {"type": "xml"}}, "response_format"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"pattern": "a"}}}},
         "response_format"),
        (COMPLETIONS, {"response_format": {"type": "json_object"}}, "response_format"),
        (COMPLETIONS, {"suffix": "the end"}, "suffix"),
        (COMPLETIONS, {"best_of": 3}, "best_of"),
        (COMPLETIONS, {"use_beam_search": True}, "use_beam_search"),
        (CHAT, {"logit_bias": {"5": -100}}, "logit_bias"),
        (CHAT, {"guided_json": {"type": "object"}}, "guided_json"),
        (CHAT, {"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        (CHAT, {"functions": [{"name": "f"}]}, "functions"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "sometimes"}, "tool_choice"),
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format"),
        (RESPONSES, {"tool_choice": "required"}, "tool_choice"),
        (RESPONSES, {"background": True}, "background"),
    ],
)  # fmt: skip
def test_what_would_change_an_answer_and_is_not_done_is_refused(
    server: RunningServer, path: str, fields: dict[str, Any], param: str
) -> None:
    starts: dict[str, dict[str, Any]] = {
        CHAT: {"messages": MESSAGES},
        COMPLETIONS: {"prompt": "x"},
        RESPONSES: {"input": "x"},
    }
    start = starts[path]
    reply = call(server.url, path, {**start, **fields})
    assert reply.status == 400 and reply.error["param"] == param


@pytest.mark.parametrize("fields", [{"logit_bias": {}}, {"best_of": 1}, {"logit_bias": None}, {"suffix": ""}])
def test_the_same_without_any_effect_is_left_alone(server: RunningServer, fields: dict[str, Any]) -> None:
    assert call(server.url, COMPLETIONS, {"prompt": "x", **fields}).status == 200


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Lund"}}\n</tool_call>'


@given(
    st.text(alphabet="ab<t>o/", max_size=8),
    st.integers(0, 2),
    st.lists(st.integers(1, 12), min_size=1),
)
def test_calls_that_a_model_writes_are_found_however_the_text_comes(before: str, count: int, sizes: list[int]) -> None:
    text = before + CALL * count
    shape = ToolCallsInText()
    message, reason = shape.message(text)
    if count:
        assert (message["content"] or "") == before and reason == "tool_calls"
        assert [made["function"]["arguments"] for made in message["tool_calls"]] == ['{"city":"Lund"}'] * count
    else:
        assert message == {"content": text, "tool_calls": []} and reason is None
    form = ChatForm("m", WordText(), shape=shape)
    deltas, place = [], 0
    for number in range(1000):
        part = text[place : place + sizes[number % len(sizes)]]
        place += len(part)
        reason = "stop" if place >= len(text) else None
        if chunk := form.piece(0, part, reason, (), None):
            deltas.append(json.loads(chunk.removeprefix(b"data: "))["choices"][0])
        if reason:
            break
    assert "".join(delta["delta"].get("content") or "" for delta in deltas) == (before if count else text)
    assert deltas[-1]["finish_reason"] == ("tool_calls" if count else "stop")
    assert len(deltas[-1]["delta"].get("tool_calls", [])) == count


def test_a_call_that_cannot_be_read_is_text() -> None:
    text = "so: <tool_call>{not json}</tool_call>"
    assert ToolCallsInText().message(text) == ({"content": text, "tool_calls": []}, None)

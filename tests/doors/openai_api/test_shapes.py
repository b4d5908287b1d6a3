"""Answers that are no plain text: JSON of a schema, calls of tools; what would change an answer and is not done."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.doors.openai.answers import value_of
from kvarts.doors.openai.budget import Budget
from kvarts.doors.openai.errors import ApiError
from kvarts.doors.openai.running import RunningServer

from builders.http_client import Reply, call, events_of

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
    "schema",
    [
        {"type": "array", "minItems": -1},
        {"type": "array", "maxItems": -(2**62)},
        {"type": "string", "minLength": -(2**62)},
        {"type": "string", "maxLength": -1},
        {"type": "array", "minItems": 2**62},
        {"type": "string", "minLength": 2**62},
    ],
)
def test_sizes_that_no_value_has_are_refused(schema: Any) -> None:
    with pytest.raises(ApiError, match=r"numbers? from 0"):
        value_of(schema, "text", param="response_format", budget=Budget(sequences=0))


@pytest.mark.parametrize(
    "draws", [lambda budget: budget.draw_made(-1, -1, "x"), lambda budget: budget.draw_values(-1, "x")]
)
def test_no_draw_increases_a_budget(draws: Callable[[Budget], None]) -> None:
    budget = Budget(values=5, sequences=5)
    before = budget.num_values, budget.num_made, budget.num_made_bytes
    draws(budget)
    assert (budget.num_values, budget.num_made, budget.num_made_bytes) == before


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


def joined(reply: Reply, *, stream: bool) -> tuple[str, list[dict[str, Any]], str, list[str]]:
    """Return the content of an answer, its calls, why it ended, and the pieces of the content or of arguments."""
    if not stream:
        (choice,) = reply.json["choices"]
        calls = [call["function"] for call in choice["message"]["tool_calls"]]
        return choice["message"]["content"] or "", calls, choice["finish_reason"], []
    content, made, pieces, reason = "", [], [], ""
    for event in events_of(reply.payload):
        (choice,) = event["choices"]
        delta, reason = choice["delta"], choice["finish_reason"]
        content += delta.get("content") or ""
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                made.append({"name": part["function"]["name"], "arguments": ""})
            made[part["index"]]["arguments"] += part["function"]["arguments"]
            pieces.append(part["function"]["arguments"])
        if delta.get("content"):
            pieces.append(delta["content"])
    return content, made, reason, pieces


@pytest.mark.parametrize("stream", [False, True])
def test_a_mock_answers_in_the_form_that_is_asked_for(server: RunningServer, *, stream: bool) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 3}}}
    forms: list[dict[str, Any]] = [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "trip", "schema": schema}},
    ]
    for form in forms:
        body: dict[str, Any] = {"messages": MESSAGES, "response_format": form, "stream": stream}
        content, _, reason, pieces = joined(call(server.url, CHAT, body), stream=stream)
        value = json.loads(content)
        assert isinstance(value, dict) and (form["type"] == "json_object" or value["days"] == 3)
        assert reason == "stop" and (not stream or max(map(len, pieces)) <= 8 < 3 * len(pieces))
        cut, _, reason, _ = joined(call(server.url, CHAT, {**body, "max_tokens": 2}), stream=stream)
        assert reason == "length" and content.startswith(cut) and 0 < len(cut) < len(content)
    text = call(server.url, CHAT, {"messages": MESSAGES, "max_tokens": 5, "response_format": {"type": "text"}})
    assert len(text.json["choices"][0]["message"]["content"].split()) == 5


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("weather", city={"type": "string"}), tool("time"), tool("final_answer", text={"type": "string"})]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_come_as_they_are_written_and_are_cut_where_the_tokens_end(
    server: RunningServer, *, stream: bool
) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    body: dict[str, Any] = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "stream": stream}
    content, (made,), reason, pieces = joined(call(server.url, CHAT, body), stream=stream)
    assert (content, made["name"], reason) == ("", "weather", "tool_calls")
    assert set(json.loads(made["arguments"])) == {"city"}
    assert not stream or max(map(len, pieces)) <= 8 < 3 * len(pieces)
    lengths = set()
    for most in range(1, 200):
        content, calls, reason, _ = joined(call(server.url, CHAT, {**body, "max_tokens": most}), stream=stream)
        if reason != "length":
            assert reason == "tool_calls" and calls == [made]
            break
        assert content == "" and all(made["arguments"].startswith(each["arguments"]) for each in calls)
        lengths |= {len(each["arguments"]) for each in calls}
    assert len(lengths) > 3


def steps_of(server: RunningServer, text: str, **fields: Any) -> list[str]:
    """Return the tools that an agent calls until a text comes or the final answer, ten at most."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
    names: list[str] = []
    while len(names) < 10:
        reply = call(server.url, CHAT, {"messages": messages, "tools": TOOLS, **fields})
        message = reply.json["choices"][0]["message"]
        if not message["tool_calls"]:
            assert message["content"]
            break
        names += [each["function"]["name"] for each in message["tool_calls"]]
        messages += [message, *({"role": "tool", "tool_call_id": each["id"], "content": "fine"}
                                for each in message["tool_calls"])]  # fmt: skip
        if names[-1] == "final_answer":
            break
    return names


@pytest.mark.slow
def test_agents_come_to_an_end_and_call_various_tools(server: RunningServer) -> None:
    texts = [f"question {number}" for number in range(20)]
    auto = [tuple(steps_of(server, text)) for text in texts]
    assert all(len(names) <= len(TOOLS) for names in auto)
    assert {names[0] if names else "" for names in auto} == {"", "weather", "time", "final_answer"}
    required = [steps_of(server, text, tool_choice="required") for text in texts]
    assert all(names[-1] == "final_answer" and len(names) <= len(TOOLS) for names in required)
    assert {names[0] for names in required} == {"weather", "time", "final_answer"}
    few = texts[:6]
    assert auto[: len(few)] == [tuple(steps_of(server, text)) for text in few]
    assert auto[: len(few)] != [tuple(steps_of(server, text, seed=1)) for text in few]
    assert not any(steps_of(server, text, tool_choice="none") for text in few)


def test_what_a_mock_wrote_is_found_by_its_next_turn(start: Any) -> None:
    server = start(page_size=1)
    asked = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"}
    first = call(server.url, CHAT, asked).json
    message = first["choices"][0]["message"]
    messages = [*MESSAGES, message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "x"}]
    second = call(server.url, CHAT, {**asked, "messages": messages}).json
    # The last token of an answer is not computed.
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["total_tokens"] - 1


def test_auto_leaves_a_tool_alone_of_which_no_arguments_can_be_made(server: RunningServer) -> None:
    tools = [tool("odd", text={"type": "string", "pattern": "a+"})]
    for number in range(6):
        body = {"messages": [{"role": "user", "content": f"x {number}"}], "tools": tools, "max_tokens": 3}
        assert call(server.url, CHAT, body).json["choices"][0]["message"]["tool_calls"] == []


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"response_format": {"type": "xml"}}, "response_format"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"pattern": "a"}}}},
         "response_format"),
        (COMPLETIONS, {"prompt": ["x", "y"], "response_format": {"type": "json_object"}}, "response_format"),
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
        (RESPONSES, {"text": {"format": {"type": "xml"}}}, "text.format"),
        (RESPONSES, {"tool_choice": "required"}, "tool_choice"),
        (RESPONSES, {"tool_choice": {"type": "web_search"}}, "tool_choice"),
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

"""Answers as told: rules and requests say what a mock writes, and how it ends."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.base.errors import ConfigError, InputError, MissingFileError
from kvarts.doors.openai.answers import Question, Rule, load_rules, rules_of
from kvarts.doors.openai.prompts import WordText
from kvarts.doors.openai.running import RunningServer
from kvarts.doors.openai.scripted import ScriptedAnswer
from kvarts.doors.openai.shapes import Segments, read_whole

from builders.http_client import call, events_of
from builders.plugin import PLUGIN

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
pytest_plugins = ["pytester"]
CALLS: list[dict[str, Any]] = [
    {"name": "weather", "arguments": {"city": "Malmö 🌧"}},
    {"name": "time", "arguments": "{broken"},
]
RULES: list[dict[str, Any]] = [
    {"model": "other-*", "text": "not for this one"},
    {"message": "*weather*", "tools": ["weather"], "turn": 1, "text": "Let me look.", "calls": CALLS},
    {"message": "*weather*", "turn": 2, "text": "It rains in Malmö."},
    {"message": "think", "reasoning": "So <tool_call> 17.", "text": {"answer": 17},
     "usage": {"prompt_tokens": 100, "completion_tokens": 50, "cached_tokens": 64, "reasoning_tokens": 40}},
    {"message": "bad", "refusal": "I may not.", "finish_reason": "content_filter"},
    {"message": "busy", "times": 2, "fail": "429 retry_after=0.01"},
    {"message": "busy", "text": "Now."},
    {"message": "nothing"},
    {"message": "slow", "text": "At last.", "latency_s": 0.2},
    {"message": "cut", "text": "one two three four", "fail": "cut after 3 chunks"},
]  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("weather", "time")]


@pytest.fixture(scope="module")
def told() -> Iterator[RunningServer]:
    with RunningServer(answers=RULES, allows_failures=False) as server:
        yield server
        server.settle()
        server.assert_conserved()


def ask(server: RunningServer, text: str, **fields: Any) -> Any:
    headers = fields.pop("headers", None)
    messages = fields.pop("messages", [{"role": "user", "content": text}])
    reply = call(server.url, CHAT, {"messages": messages, **fields}, headers=headers)
    assert reply.status == 200, reply.payload
    return reply.json


def test_the_first_rule_that_is_for_a_request_decides(told: RunningServer) -> None:
    (choice,) = ask(told, "How is the weather?", tools=TOOLS)["choices"]
    message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == ("Let me look.", "tool_calls")
    made = [(one["function"]["name"], one["function"]["arguments"]) for one in message["tool_calls"]]
    assert made == [("weather", '{"city":"Malmö 🌧"}'), ("time", "{broken")]
    results = [{"role": "tool", "tool_call_id": one["id"], "content": "rain"} for one in message["tool_calls"]]
    messages = [{"role": "user", "content": "How is the weather?"}, message, *results]
    (choice,) = ask(told, "", messages=messages, tools=TOOLS)["choices"]
    assert choice["message"]["content"] == "It rains in Malmö." and choice["finish_reason"] == "stop"
    (choice,) = ask(told, "How is the weather?", max_tokens=3)["choices"]  # no tools: words
    assert len(choice["message"]["content"].split()) == 3


def test_reasoning_refusals_and_usage(told: RunningServer) -> None:
    reply = ask(told, "think")
    message = reply["choices"][0]["message"]
    assert message["content"] == '{"answer":17}' and message["tool_calls"] == []
    assert message["reasoning"] == message["reasoning_content"] == "So <tool_call> 17."
    assert reply["usage"] == {
        "prompt_tokens": 100,
        "total_tokens": 150,
        "completion_tokens": 50,
        "prompt_tokens_details": {"cached_tokens": 64},
        "completion_tokens_details": {"reasoning_tokens": 40},
    }
    (choice,) = ask(told, "bad")["choices"]
    assert (choice["message"]["content"], choice["message"]["refusal"]) == (None, "I may not.")
    assert choice["finish_reason"] == "content_filter"
    (choice,) = ask(told, "bad", max_tokens=1)["choices"]
    assert choice["finish_reason"] == "length" and "I may not.".startswith(choice["message"]["refusal"])
    (choice,) = ask(told, "nothing")["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")


def test_reasoning_tokens_are_counted(told: RunningServer) -> None:
    thought = "The file has it, 17 times."
    answer = {"kvarts_answer": {"reasoning": thought, "text": "It rains."}}

    def num_tokens(text: str) -> int:
        found: int = call(told.url, "/tokenize", {"prompt": text}).json["count"]
        return found

    before, most = num_tokens("<think>\n"), num_tokens(thought)
    for max_tokens in (1, before, before + 1, before + most - 1, before + most, before + most + 1, 1000):
        expected = {"reasoning_tokens": max(0, min(max_tokens - before, most))}
        asked = {**answer, "max_tokens": max_tokens}
        assert ask(told, "think", **asked)["usage"]["completion_tokens_details"] == expected
        response = call(told.url, "/v1/responses", {"input": "think", **answer, "max_output_tokens": max_tokens}).json
        assert response["usage"]["output_tokens_details"] == expected
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": [{"role": "user", "content": "think"}], **answer, "n": 2, "stream": True}
    *pieces, last = events_of(call(told.url, CHAT, {**body, "stream_options": options}).payload)
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2 * most}
    for piece in pieces:
        usage = piece.get("usage")
        if usage is not None:
            expected = {"reasoning_tokens": max(0, min(usage["completion_tokens"] - before, most))}
            assert usage["completion_tokens_details"] == expected
    assert any(piece.get("usage") for piece in pieces)
    assert "completion_tokens_details" not in ask(told, "nothing")["usage"]


def test_a_call_that_is_asked_for_precedes_a_response_format(told: RunningServer) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "weather", "parameters": schema}
    format_of_text = {"type": "json_schema", "json_schema": {"name": "trip", "schema": {"type": "array"}}}
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        fields = {"tools": [{"type": "function", "function": function}], "tool_choice": choice}
        (answer,) = ask(told, "Where to?", response_format=format_of_text, **fields)["choices"]
        (made,) = answer["message"]["tool_calls"]
        assert answer["message"]["content"] is None and list(json.loads(made["function"]["arguments"])) == ["city"]
    body = {
        "input": "Where to?",
        "tools": [{"type": "function", **function}],
        "tool_choice": {"type": "function", "name": "weather"},
        "text": {"format": {"type": "json_schema", "name": "trip", "schema": schema}},
    }
    reply = call(told.url, "/v1/responses", body)
    assert reply.status == 200, reply.payload
    assert [item["type"] for item in reply.json["output"]] == ["function_call"]


def test_failures_and_latencies_of_rules(told: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "busy"}]}
    replies = [call(told.url, CHAT, body) for _ in range(3)]
    assert [reply.status for reply in replies] == [429, 429, 200]
    assert replies[0].headers["retry-after"] == "0.01" and replies[2].json["choices"][0]["message"]["content"] == "Now."
    began_s = time.monotonic()
    reply = call(told.url, CHAT, {"messages": [{"role": "user", "content": "slow"}]})
    assert reply.json["choices"][0]["message"]["content"] == "At last." and time.monotonic() - began_s >= 0.2
    with pytest.raises((OSError, HTTPException)):  # the connection is closed
        call(told.url, CHAT, {"messages": [{"role": "user", "content": "cut"}], "stream": True})


def test_an_answer_for_one_request(told: RunningServer) -> None:
    answer = {"text": "for you", "finish_reason": "stop"}
    header = {"x-kvarts-answer": json.dumps(answer)}
    asked: list[dict[str, Any]] = [{"kvarts_answer": answer}, {"headers": header}, {"kvarts_answer": answer, "n": 2}]
    for fields in asked:
        choices = ask(told, "How is the weather?", tools=TOOLS, **fields)["choices"]
        assert [choice["message"]["content"] for choice in choices] == ["for you"] * fields.get("n", 1)
    reply = call(told.url, COMPLETIONS, {"prompt": ["a", "b"], "kvarts_answer": answer, "max_tokens": 9})
    assert [choice["text"] for choice in reply.json["choices"]] == ["for you"] * 2
    reply = call(told.url, COMPLETIONS, {"prompt": "nothing"}).json
    assert reply["choices"][0]["text"] == "" and reply["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("answer", "status", "what"),
    [
        ({"tex": "x"}, 400, "unknown field `tex`"),
        ({"calls": [{"arguments": {}}]}, 400, "calls[0]"),
        ({"text": 3}, 400, "text"),
        ({"text": "x", "refusal": "y"}, 400, "refusal"),
        ({"latency_s": 1e9}, 400, "latency_s"),
        ({"fail": "sometimes"}, 400, "fail: 'sometimes' is no failure. A failure: a status"),
        ({"fail": "first 2: 429"}, 400, "A failure: a status"),
        ({"fail": "stall 2s", "latency_s": 1}, 400, "latency_s: is a second delay"),
        ({"usage": {"prompt_tokens": -1}}, 400, "usage.prompt_tokens: must be at least 0"),
        ({"usage": {"cached_tokens": 10**12}}, 400, "usage.cached_tokens: must be at most"),
        ({"fail": "drop"}, 403, "--set allow_failures=true"),
        ({"latency_s": 1}, 403, "--set allow_failures=true"),
        ("text", 400, "object"),
        ({"text": "the " * 200_000}, 200, ""),
    ],
)
def test_what_is_no_answer_is_refused(told: RunningServer, answer: Any, status: int, what: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "kvarts_answer": answer, "max_tokens": 4}
    reply = call(told.url, CHAT, body)
    assert reply.status == status, reply.payload
    if status != 200:
        assert what in reply.error["message"] and reply.error["param"] == "kvarts_answer"
    header = call(told.url, CHAT, {"messages": body["messages"]}, headers={"x-kvarts-answer": "{"})
    assert header.status == 400 and header.error["param"] == "x-kvarts-answer"


def test_a_failure_for_one_request_where_they_are_allowed(server: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "kvarts_answer": {"fail": "503", "text": "x"}}
    assert call(server.url, CHAT, body).status == 503


texts = st.text(max_size=12)
answers = st.builds(
    ScriptedAnswer,
    text=texts | st.dictionaries(texts, st.integers()),
    calls=st.lists(
        st.fixed_dictionaries({"name": texts, "arguments": texts | st.dictionaries(texts, texts)}), max_size=3
    ),
    reasoning=texts,
).map(lambda told: rules_of([{"text": told.text, "calls": told.calls, "reasoning": told.reasoning}])[0])


@given(answers, st.lists(st.integers(1, 9), min_size=1))
def test_what_is_written_is_read_back_as_what_was_told(told: Rule, sizes: list[int]) -> None:
    shape = Segments([told.segments()])
    text = "".join(segment.text for segment in told.segments())
    message = read_whole(shape, 0, text)
    assert (message.content, message.reasoning) == (
        told.text if isinstance(told.text, str) else json.dumps(told.text, ensure_ascii=False, separators=(",", ":")),
        told.reasoning,
    )
    assert [(one.name, one.arguments) for one in message.calls] == [(one.name, one.written) for one in told.calls]
    assert message.reason == ("tool_calls" if told.calls else None)
    reader, place, number = shape(0), 0, 0
    pieces = type(message)()
    while place < len(text):
        end = place + sizes[number % len(sizes)]
        pieces.add(reader.add(text[place:end]))
        place, number = end, number + 1
    rest, reason = reader.end()
    pieces.add(rest)
    assert (pieces.content, pieces.reasoning, reason) == (message.content, message.reasoning, message.reason)
    assert [(one.name, one.arguments) for one in pieces.calls] == [(one.name, one.arguments) for one in message.calls]


@given(st.text("ab*", max_size=8), st.text("ab\n", max_size=8))
def test_patterns(pattern: str, text: str) -> None:
    rule, question = Rule(message=pattern), Question(model="m", message=text)
    expected = re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), text, re.DOTALL)
    assert rule.is_for(question) == (expected is not None)


def test_a_pattern_takes_time_in_proportion_to_the_text() -> None:
    rule = Rule(message="*a" * 400 + "b")
    assert not rule.is_for(Question(model="m", message="a" * 5_000_000))


def test_rules_of_files(tmp_path: Path) -> None:
    toml, table = tmp_path / "answers.toml", tmp_path / "answers.json"
    toml.write_text('[[answers]]\nmessage = "*x*"\nturn = 1\ncalls = [{ name = "f", arguments = { a = 1 } }]\n')
    table.write_text(json.dumps([{"message": "*x*", "turn": 1, "calls": [{"name": "f", "arguments": {"a": 1}}]}]))
    assert load_rules(toml) == load_rules(table) == rules_of(str(toml))
    for name, text, error, what in (
        ("a.toml", "[[answers]]\nturn = 0\n", ConfigError, r"a.toml: answers\[0\].turn: counts from 1"),
        ("b.toml", '[[answers]]\ntext = "x"\n[[answers]]\ncalls = [{}]\n', ConfigError, r"answers\[1\].calls\[0\]"),
        ("c.toml", "[[answer]]\n", ConfigError, "answer: is not known"),
        ("d.toml", "[[", InputError, "d.toml"),
        ("e.json", "[{", InputError, "e.json: is not JSON"),
        ("f.json", "{}", ConfigError, "is not a list"),
        ("g.json", json.dumps([{}] * 1001), ConfigError, "1,001 rules"),
        ("h.json", json.dumps([{"message": "x" * 1001}]), ConfigError, "at most 1000 characters"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(error, match=what):
            load_rules(tmp_path / name)
    with pytest.raises(MissingFileError):
        load_rules(tmp_path / "none.toml")


@pytest.mark.parametrize("text", ["think", "How is the weather?", "bad"])
def test_a_stream_of_a_told_answer_says_the_same(told: RunningServer, text: str) -> None:
    whole = ask(told, text, tools=TOOLS)
    body = {"messages": [{"role": "user", "content": text}], "tools": TOOLS, "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    events = events_of(call(told.url, CHAT, body).payload)
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    message = whole["choices"][0]["message"]
    for field in ("content", "reasoning", "reasoning_content", "refusal"):
        assert "".join(delta.get(field) or "" for delta in deltas) == (message.get(field) or "")
        assert sum(bool(delta.get(field)) for delta in deltas) > 1 or not message.get(field)
    assert events[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_the_marker(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import json, urllib.request
        import pytest

        @pytest.mark.kvarts(answers=[{"message": "*hello*", "text": "Hello yourself."}])
        def test_it(kvarts_server):
            body = {"messages": [{"role": "user", "content": "so hello"}]}
            request = urllib.request.Request(kvarts_server.base_url + "/chat/completions", json.dumps(body).encode(),
                                             {"content-type": "application/json"})
            answer = json.load(urllib.request.urlopen(request))
            assert answer["choices"][0]["message"]["content"] == "Hello yourself."
        """
    )
    result = pytester.runpytest_inprocess(*PLUGIN, "-p", "no:cacheprovider", "-n", "0", "--strict-markers")
    result.assert_outcomes(passed=1)


def test_tokens_of_a_told_answer_are_its_text() -> None:
    text = "Malmö 🌧 — naïve «quoted» 日本"
    tokens = WordText().encode(text, most=100)
    assert "".join(WordText().bytes_of(token).decode() for token in tokens) == text

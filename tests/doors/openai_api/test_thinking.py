"""Reasoning: its budget, its tokens in the usage, and what the next turn finds of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvarts.doors.openai.running import RunningServer
from kvarts.doors.openai.words import WordTokenizer

from builders.http_client import call, events_of

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
REASONING = "First I consider the wind, then the sea, and at last the land beside it. " * 10
LENGTH = len(list(WordTokenizer().tokens(REASONING)))
TEXT = "Take the road along the river."
CALL = {"name": "weather", "arguments": {"city": "Lund"}}
FUNCTION: dict[str, Any] = {"name": "weather", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]
RULES = [
    {"message": "*agent*", "turn": 1, "reasoning": REASONING, "calls": [CALL]},
    {"message": "*agent*", "reasoning": REASONING, "text": TEXT},
    {"message": "*", "reasoning": REASONING, "text": TEXT},
]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer(answers=RULES, speedup=50.0) as running:
        yield running


def chat(server: RunningServer, messages: Any = "Which way?", **fields: Any) -> Any:
    told = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    reply = call(server.url, CHAT, {"messages": told, "max_tokens": 4000, **fields})
    assert reply.status == 200, reply.payload
    return reply.json


def tokens(text: str) -> list[int]:
    return list(WordTokenizer().tokens(text))


def test_all_of_it_without_a_budget(server: RunningServer) -> None:
    answer = chat(server)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (REASONING, TEXT)
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": LENGTH}


@pytest.mark.parametrize("budget", [1, 7, 100, LENGTH - 1, LENGTH, LENGTH + 1, 2**63, 10**30, -1])
def test_a_budget_cuts_reasoning_and_nothing_else(server: RunningServer, budget: int) -> None:
    answer = chat(server, thinking_token_budget=budget)
    message, usage = answer["choices"][0]["message"], answer["usage"]
    kept = LENGTH if budget < 0 else min(budget, LENGTH)
    assert message["content"] == TEXT and answer["choices"][0]["finish_reason"] == "stop"
    assert REASONING.startswith(message["reasoning"]) and len(tokens(message["reasoning"])) == kept
    assert usage["completion_tokens_details"]["reasoning_tokens"] == kept
    whole = chat(server)["usage"]["completion_tokens"]
    assert usage["completion_tokens"] == whole - (LENGTH - kept)


def test_a_stream_says_the_same(server: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "Which way?"}], "max_tokens": 4000, "thinking_token_budget": 33,
            "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
    *events, last = events_of(call(server.url, CHAT, body).payload)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert len(tokens("".join(delta.get("reasoning", "") for delta in deltas))) == 33
    assert "".join(delta.get("content") or "" for delta in deltas) == TEXT
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": 33}


def test_max_tokens_count_reasoning_too(server: RunningServer) -> None:
    answer = chat(server, max_tokens=20)
    assert answer["choices"][0]["finish_reason"] == "length" and not answer["choices"][0]["message"]["content"]
    usage = answer["usage"]
    assert usage["completion_tokens"] == 20
    opening = len(tokens("<think>\n"))
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 20 - opening}


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_token_budget": 0},
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"thinking": False}},
    ],
)
def test_reasoning_can_be_left_out(server: RunningServer, fields: dict[str, Any]) -> None:
    answer = chat(server, **fields)
    message = answer["choices"][0]["message"]
    assert not message.get("reasoning") and message["content"] == TEXT
    assert answer["usage"]["completion_tokens"] == len(tokens(TEXT))


@pytest.mark.parametrize("effort", ["low", "high", None])
def test_other_efforts_leave_a_script_as_it_is(server: RunningServer, effort: Any) -> None:
    assert chat(server, reasoning_effort=effort)["choices"][0]["message"]["reasoning"] == REASONING


def test_a_budget_is_a_number_of_tokens(server: RunningServer) -> None:
    for budget, what in ((-2, "at least 0"), ("many", "Expected `int | null`")):
        body = {"messages": [{"role": "user", "content": "a"}], "thinking_token_budget": budget}
        error = call(server.url, CHAT, body).error
        assert error["code"] == 400 and error["param"] == "thinking_token_budget" and what in error["message"]


def test_completions_have_it_in_their_text(server: RunningServer) -> None:
    body = {"prompt": "Which way?", "max_tokens": 4000, "thinking_token_budget": 5}
    text = call(server.url, COMPLETIONS, body).json["choices"][0]["text"]
    assert len(tokens(text.partition("<think>\n")[2].partition("\n</think>")[0])) == 5 and text.endswith(TEXT)


def messages(server: RunningServer, thinking: Any, **fields: Any) -> Any:
    body = {"model": "mock", "max_tokens": 4000, "messages": [{"role": "user", "content": "Which way?"}]}
    return call(server.url, MESSAGES, {**body, "thinking": thinking, **fields})


def test_thinking_of_messages(server: RunningServer) -> None:
    said = messages(server, {"type": "disabled"}).json["content"]
    assert [block["type"] for block in said] == ["text"]
    for free in (None, {"type": "adaptive"}):
        assert messages(server, free).json["content"][0]["thinking"] == REASONING
    long = {"reasoning": "word " * 3000, "text": TEXT}
    said = messages(server, {"type": "enabled", "budget_tokens": 1024}, kvarts_answer=long).json["content"]
    assert len(tokens(said[0]["thinking"])) == 1024 and said[1]["text"] == TEXT
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"type": "enabled", "budget_tokens": 1000}, "budget_tokens"),
        ({"type": "enabled", "budget_tokens": 4000}, "budget_tokens"),
        ({"type": "enabled"}, "budget_tokens"),
        ({"type": "some"}, "thinking.type"),
    ]
    for thinking, field in wrong:
        refused = messages(server, thinking)
        assert refused.status == 400 and field in refused.json["error"]["message"]


def test_reasoning_of_responses_can_be_left_out(server: RunningServer) -> None:
    body = {"input": "Which way?", "max_output_tokens": 4000}
    told = call(server.url, RESPONSES, body).json
    assert told["usage"]["output_tokens_details"] == {"reasoning_tokens": LENGTH}
    told = call(server.url, RESPONSES, {**body, "reasoning": {"effort": "none"}}).json
    assert [item["type"] for item in told["output"]] == ["message"]


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_the_next_turn_of_a_user_drops_reasoning(server: RunningServer) -> None:
    user = {"role": "user", "content": "Tell me of the way, of the road and of the river, number one. " * 4}
    first = chat(server, [user])
    said = first["choices"][0]["message"]
    more = {"role": "user", "content": "And then?"}
    prompt = first["usage"]["prompt_tokens"]
    last = chat(server, [user, said, more])
    assert prompt - 16 <= cached(last) <= prompt
    assert last["usage"]["prompt_tokens"] < prompt + len(tokens(TEXT)) + 40, "reasoning is not in the prompt"
    kept = chat(server, [user, said, more], chat_template_kwargs={"preserve_thinking": True})
    assert cached(kept) >= prompt + first["usage"]["completion_tokens"] - 17
    assert cached(chat(server, [user, said, more], chat_template_kwargs={"clear_thinking": False})) >= cached(kept)


def test_the_results_of_tools_keep_it(server: RunningServer) -> None:
    user = {"role": "user", "content": "Be an agent of mine, and look for the way, the road and the river. " * 4}
    first = chat(server, [user], tools=TOOLS)
    said = first["choices"][0]["message"]
    assert said["tool_calls"] and said["reasoning"] == REASONING
    result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "rain"}
    last = chat(server, [user, said, result], tools=TOOLS)
    assert cached(last) >= first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"] - 17
    without = {name: value for name, value in said.items() if not name.startswith("reasoning")}
    assert cached(chat(server, [user, without, result], tools=TOOLS)) <= first["usage"]["prompt_tokens"]


def test_responses_keep_it_as_chats_do(server: RunningServer) -> None:
    text = "Be an agent of mine by responses, and look for the way, the road, the river. " * 4
    tools = [{"type": "function", **FUNCTION}]
    first = call(server.url, RESPONSES, {"input": text, "tools": tools, "max_output_tokens": 4000}).json
    (made,) = [item for item in first["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": made["call_id"], "output": "rain"}
    before = {"type": "message", "role": "user", "content": text}
    for body in (
        {"input": [result], "previous_response_id": first["id"]},
        {"input": [before, *first["output"], result]},
    ):
        last = call(server.url, RESPONSES, {**body, "tools": tools, "max_output_tokens": 4000}).json
        found = last["usage"]["input_tokens_details"]["cached_tokens"]
        assert found >= first["usage"]["input_tokens"] + first["usage"]["output_tokens"] - 17

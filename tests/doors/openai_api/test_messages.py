"""Anthropic's API: conversations, streamed and not, tools, what is refused, and keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvarts.doors.openai.running import RunningServer

from builders.http_client import call

MESSAGES, CHAT = "/v1/messages", "/v1/chat/completions"
TOOLS = [{"name": "weather", "description": "The weather.", "input_schema": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}]  # fmt: skip
RULES: list[dict[str, Any]] = [
    {"turn": 1, "tools": ["weather"], "reasoning": "Hm, rain?", "text": "Let me look.",
     "calls": [{"name": "weather", "arguments": {"city": "Lund"}}, {"name": "weather", "arguments": {"city": "Kiel"}}]},
    {"turn": 2, "tools": ["weather"], "text": "It rains."},
    {"message": "no", "refusal": "I may not."},
    {"message": "busy", "fail": "429 retry_after=0.01", "times": 1},
    {"message": "busy", "text": "Now."},
]  # fmt: skip


@pytest.fixture(scope="module")
def told() -> Iterator[RunningServer]:
    with RunningServer(answers=RULES, page_size=4) as server:
        yield server
        server.settle()
        server.assert_conserved()


def ask(server: RunningServer, content: Any, **fields: Any) -> Any:
    messages = fields.pop("messages", [{"role": "user", "content": content}])
    reply = call(server.url, MESSAGES, {"messages": messages, "max_tokens": 4000, **fields})
    assert reply.status == 200, reply.payload
    return reply.json


def streamed(server: RunningServer, content: Any, **fields: Any) -> dict[str, Any]:
    """Return the message that a client makes of a stream, which it checks on the way."""
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4000, "stream": True, **fields}
    payload = call(server.url, MESSAGES, body).payload
    events = []
    for part in payload.decode().strip().split("\n\n"):
        kind, _, data = part.partition("\ndata: ")
        events.append(json.loads(data))
        assert kind == f"event: {events[-1]['type']}"
    start, *middle, delta, stop = events
    assert (start["type"], delta["type"], stop["type"]) == ("message_start", "message_delta", "message_stop")
    message, texts = start["message"], list[list[str]]()
    for event in middle:
        assert event["index"] == len(texts) - (event["type"] != "content_block_start")
        if event["type"] == "content_block_start":
            message["content"].append(event["content_block"])
            texts.append([])
        elif event["type"] == "content_block_delta":
            kind = event["delta"]["type"]
            text = event["delta"][{"text_delta": "text", "input_json_delta": "partial_json"}.get(kind, kind[:-6])]
            if kind == "signature_delta":
                message["content"][-1]["signature"] = text
            else:
                texts[-1].append(text)
    for block, parts in zip(message["content"], texts, strict=True):
        assert len(parts) > 1
        if block["type"] == "tool_use":
            block["input"] = json.loads("".join(parts))
        else:
            block[block["type"]] = "".join(parts)
    return {**message, **delta["delta"], "usage": delta["usage"]}


def without_ids(message: Any) -> Any:
    blocks = [{name: value for name, value in block.items() if name not in ("id", "signature")}
              for block in message["content"]]  # fmt: skip
    return blocks, message["stop_reason"], message["stop_sequence"], message["usage"]["output_tokens"]


@pytest.mark.parametrize("fields", [{"tools": TOOLS}, {}, {"stop_sequences": ["the"]}, {"max_tokens": 5}])
@pytest.mark.parametrize("content", ["How is it?", "no"])
def test_a_stream_says_what_the_whole_message_says(told: RunningServer, content: str, fields: Any) -> None:
    assert without_ids(streamed(told, content, **fields)) == without_ids(ask(told, content, **fields))


def test_an_agent_comes_to_its_end(told: RunningServer) -> None:
    first = ask(told, "How is it?", tools=TOOLS, system="Be brief.")
    thinking, said, *calls = first["content"]
    assert (thinking["thinking"], said["text"], first["stop_reason"]) == ("Hm, rain?", "Let me look.", "tool_use")
    assert [block["input"] for block in calls] == [{"city": "Lund"}, {"city": "Kiel"}]
    results = [{"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "rain"}]}
               for block in calls]  # fmt: skip
    messages = [{"role": "user", "content": "How is it?"}, {"role": "assistant", "content": first["content"]},
                {"role": "user", "content": results}]  # fmt: skip
    last = ask(told, "", messages=messages, tools=TOOLS, system="Be brief.")
    assert last["content"] == [{"type": "text", "text": "It rains."}] and last["stop_reason"] == "end_turn"
    # The reasoning stays while the agent uses tools, so that the whole answer is found, but for its last page.
    whole = first["usage"]["input_tokens"] + first["usage"]["output_tokens"]
    assert last["usage"]["cache_read_input_tokens"] >= whole - 17
    counted = call(told.url, f"{MESSAGES}/count_tokens", {"messages": messages, "tools": TOOLS, "system": "Be brief."})
    used = last["usage"]
    assert counted.json["input_tokens"] == used["input_tokens"] + used["cache_read_input_tokens"]


def test_why_a_message_ends(told: RunningServer) -> None:
    assert ask(told, "x", max_tokens=5)["stop_reason"] == "max_tokens"
    assert ask(told, "x")["stop_reason"] == "end_turn"  # long before 4,000 tokens
    word = ask(told, "x")["content"][0]["text"].split()[3]
    stopped = ask(told, "x", stop_sequences=["zzz", word])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", word)
    refused = ask(told, "no")
    assert (refused["stop_reason"], refused["content"][0]["text"]) == ("refusal", "I may not.")
    cut = ask(told, "How is it?", tools=TOOLS, max_tokens=32)
    assert cut["stop_reason"] == "max_tokens"


def test_tools_that_are_chosen_and_schemas(server: RunningServer) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}):
        (block,) = ask(server, "x", tools=TOOLS, tool_choice=choice)["content"]
        assert block["type"] == "tool_use" and set(block["input"]) == {"city"}
    schema = {"type": "object", "properties": {"days": {"type": "integer", "minimum": 3}}, "required": ["days"]}
    told = ask(server, "x", output_config={"format": {"type": "json_schema", "schema": schema}})
    assert json.loads(told["content"][0]["text"]) == {"days": 3}


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].source"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content"),
        ({"tools": [{"input_schema": {}}]}, "tools"),
        ({"tool_choice": {"type": "some"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"stop_sequences": ["x"] * 100}, "stop_sequences"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config"),
        ({"kvarts_answer": {"nothing": 1}}, "kvarts_answer"),
    ],
)
def test_what_is_wrong_is_told_in_the_envelope_of_the_api(server: RunningServer, fields: Any, what: str) -> None:
    reply = call(server.url, MESSAGES, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, **fields})
    told = json.loads(reply.payload)
    assert (reply.status, told["type"], told["error"]["type"]) == (400, "error", "invalid_request_error")
    assert told["error"]["message"].startswith(what)


def test_keys_are_read_from_the_header_of_either_api() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    with RunningServer(api_key="secret") as server:
        asked: list[tuple[dict[str, str], int]] = [
            ({}, 401),
            ({"x-api-key": "secret"}, 200),
            ({"x-api-key": "wrong"}, 401),
            ({"authorization": "Bearer secret"}, 200),
            ({"authorization": "Basic secret"}, 401),
        ]
        for headers, status in asked:
            reply = call(server.url, MESSAGES, body, headers=headers)
            assert reply.status == status
            assert status == 200 or json.loads(reply.payload)["error"]["type"] == "authentication_error"


def test_the_sdk_of_anthropic(told: RunningServer) -> None:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=told.url, api_key="none", max_retries=1) as client:
        asked = {"model": "mock", "max_tokens": 4000, "messages": [{"role": "user", "content": "How is it?"}]}
        with client.messages.stream(**asked, tools=TOOLS) as stream:
            message = stream.get_final_message()
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert message.content[2].input == {"city": "Lund"} and message.stop_reason == "tool_use"
        asked["messages"] = [{"role": "user", "content": "busy"}]
        assert client.messages.create(**asked).content[0].text == "Now."
        assert client.messages.count_tokens(model="mock", messages=asked["messages"]).input_tokens > 0
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            client.messages.create(**{**asked, "max_tokens": 0})

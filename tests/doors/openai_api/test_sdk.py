"""OpenAI's own client, as anyone would use it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvarts.doors.openai.running import RunningServer

openai = pytest.importorskip("openai")


@pytest.fixture
def client(server: RunningServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0) as opened:
        yield opened


def test_a_chat_streamed_and_not(client: Any) -> None:
    messages = [{"role": "user", "content": "hello the world"}]
    whole = client.chat.completions.create(model="mock", messages=messages, max_tokens=7)
    assert whole.usage.completion_tokens == 7 and whole.choices[0].finish_reason == "length"
    stream = client.chat.completions.create(
        model="mock", messages=messages, max_tokens=7, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 7


def test_completions_models_and_extras(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["mock"]
    told = client.completions.create(
        model="mock", prompt="hello", max_tokens=3, extra_body={"ignore_eos": True, "cache_salt": "a"}
    )
    assert len(told.choices[0].text.split()) == 3


def test_responses_go_on(client: Any) -> None:
    first = client.responses.create(model="mock", input="hello", max_output_tokens=20)
    second = client.responses.create(model="mock", input="and", previous_response_id=first.id, max_output_tokens=5)
    assert second.usage.input_tokens_details.cached_tokens > 0
    with client.responses.stream(model="mock", input="hello", max_output_tokens=20) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(deltas) == first.output_text


WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
           "additionalProperties": False}  # fmt: skip
RULES: list[dict[str, Any]] = [
    {"turn": 1, "tools": ["weather"], "reasoning": "Hm.", "text": "Let me look.",
     "calls": [{"name": "weather", "arguments": {"city": "Lund"}}, {"name": "weather", "arguments": {"city": "Kiel"}}]},
    {"turn": 2, "tools": ["weather"], "text": "It rains."},
    {"message": "no", "refusal": "I may not."},
]  # fmt: skip


@pytest.fixture
def scripted(start: Any) -> Iterator[Any]:
    with openai.OpenAI(base_url=start(answers=RULES).base_url, api_key="none", max_retries=0) as opened:
        yield opened


def test_an_agent_on_chats(scripted: Any) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
    asked = {"model": "mock", "tools": tools, "messages": [{"role": "user", "content": "How is it?"}]}
    with scripted.chat.completions.stream(**asked) as stream:
        (choice,) = stream.get_final_completion().choices
    assert [call.function.arguments for call in choice.message.tool_calls] == ['{"city":"Lund"}', '{"city":"Kiel"}']
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me look."
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in choice.message.tool_calls]
    last = scripted.chat.completions.create(**{**asked, "messages": [*asked["messages"], choice.message, *results]})
    assert last.choices[0].message.content == "It rains."


def test_an_agent_on_responses(scripted: Any) -> None:
    tools = [{"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}, {"type": "web_search"}]
    asked = {"model": "mock", "tools": tools, "input": "How is it?"}
    with scripted.responses.stream(**asked) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    whole = scripted.responses.create(**asked)
    for told in (streamed, whole):
        reasoning, said, *calls = told.output
        assert reasoning.content[0].text == "Hm." and said.content[0].text == told.output_text == "Let me look."
        assert [(call.name, call.arguments) for call in calls] == [
            ("weather", '{"city":"Lund"}'), ("weather", '{"city":"Kiel"}')]  # fmt: skip
        assert told.status == "completed" and len({item.id for item in told.output}) == 4
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == '{"city":"Lund"}{"city":"Kiel"}' and len(deltas) > 6
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls]
    last = scripted.responses.create(**{**asked, "input": results}, previous_response_id=whole.id)
    assert last.output_text == "It rains." and last.usage.input_tokens_details.cached_tokens > 0
    again = [{"role": "user", "content": "How is it?"}, *(item.model_dump() for item in whole.output), *results]
    assert scripted.responses.create(**{**asked, "input": again}).output_text == "It rains."
    (refused,) = scripted.responses.create(model="mock", input="no").output
    assert refused.content[0].refusal == "I may not."


def test_responses_of_a_schema_and_of_tools_that_are_required(client: Any) -> None:
    pydantic = pytest.importorskip("pydantic")
    trip = pydantic.create_model("Trip", city=(str, ...), days=(int, ...))
    told = client.responses.parse(model="mock", input="Where to?", text_format=trip)
    assert isinstance(told.output_parsed, trip)
    tools = [{"type": "function", "name": name, "parameters": WEATHER} for name in ("weather", "time")]
    for choice in ("required", {"type": "function", "name": "time"}):
        (call,) = client.responses.create(model="mock", input="x", tools=tools, tool_choice=choice).output
        assert call.type == "function_call" and (choice == "required" or call.name == "time")
    cut = client.responses.create(model="mock", input="x", tools=tools, tool_choice="required", max_output_tokens=12)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_errors_are_those_of_the_sdk(client: Any) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="mock", prompt="x", max_tokens=0)


def test_the_sdk_comes_again_by_itself(start: Any) -> None:
    server = start(fail="first 2: 429 retry_after=0.01")
    with openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=3) as client:
        assert client.completions.create(model="mock", prompt="x", max_tokens=1).usage.completion_tokens == 1
    assert [seen.status for seen in server.requests] == [429, 429, 200]
    assert server.complaints() == []

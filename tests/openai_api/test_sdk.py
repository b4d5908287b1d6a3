"""OpenAI's own client, as anyone would use it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvarts.openai_api.running import RunningServer

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

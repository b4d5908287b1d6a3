"""A stream says what the same answer in one piece says: text, log-probabilities, reasons and usage."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvarts.doors.openai.answer import TokenLogprob
from kvarts.doors.openai.forms import ChatForm, Form, Whole
from kvarts.doors.openai.prompts import WordText
from kvarts.doors.openai.running import RunningServer
from kvarts.doors.openai.shapes import Plain, Segments, Shape, TextSegment
from kvarts.doors.openai.tool_calls import NamedCall, RequiredCalls, ToolCallsInText

from builders.http_client import call, events_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}}
]
SHAPES: list[dict[str, Any]] = [
    {},
    {"response_format": {"type": "json_object"}},
    {"tools": TOOLS, "tool_choice": "required"},
]


def in_one_piece(events: list[Any]) -> tuple[dict[int, dict[str, Any]], Any, list[Any]]:
    """What a client makes of a stream: its choices, the last usage, and every usage."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event["choices"]:
            made = choices.setdefault(
                choice["index"],
                {"text": "", "calls": [], "logprobs": [], "offsets": [], "reason": None, "stop": None, "ids": []},
            )
            delta = choice.get("delta", choice)
            made["text"] += delta.get("content") or delta.get("text") or ""
            for part in delta.get("tool_calls") or ():
                if "id" in part:
                    assert part["index"] == len(made["calls"])
                    made["calls"].append(part["function"])
                else:
                    made["calls"][part["index"]]["arguments"] += part["function"]["arguments"]
            take_logprobs(made, choice["logprobs"])
            assert made["reason"] is None, "a piece after the end"
            made["reason"], made["stop"] = choice["finish_reason"], choice.get("stop_reason")
            made["ids"] += choice.get("token_ids") or ()
            if "prompt_token_ids" in choice:
                assert "prompt_ids" not in made, "these are told once"
                made["prompt_ids"] = choice["prompt_token_ids"]
    return choices, events[-1].get("usage"), [event["usage"] for event in events if event.get("usage")]


def take_logprobs(made: dict[str, Any], told: Any) -> None:
    if told is None:
        return
    if "content" in told:
        made["logprobs"] += told["content"]
    else:
        made["logprobs"] += zip(told["tokens"], told["token_logprobs"], map(str, told["top_logprobs"]), strict=True)
        made["offsets"] += told["text_offset"]


def of_whole(told: Any) -> dict[int, dict[str, Any]]:
    choices = {}
    for choice in told["choices"]:
        message = choice.get("message", choice)
        made: dict[str, Any] = {
            "text": message.get("content") or message.get("text") or "",
            "calls": [call["function"] for call in message.get("tool_calls") or ()],
            "logprobs": [],
            "offsets": [],
            "reason": choice["finish_reason"],
            "stop": choice["stop_reason"],
            "ids": choice.get("token_ids", []),
        }
        if "prompt_token_ids" in choice:
            made["prompt_ids"] = choice["prompt_token_ids"]
        take_logprobs(made, choice["logprobs"])
        choices[choice["index"]] = made
    return choices


@st.composite
def asked(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    path = draw(st.sampled_from([CHAT, COMPLETIONS]))
    body: dict[str, Any] = {
        "max_tokens": draw(st.integers(1, 12)),
        "n": draw(st.integers(1, 3)),
        "seed": draw(st.integers(0, 9)),
    }
    stops = st.sampled_from([" ", " t", " the", "e ", "o", "ing to", " zzz", "and of"])
    body["stop"] = draw(st.lists(stops, max_size=2))
    flags = ("include_stop_str_in_output", "return_token_ids")
    body |= {flag: draw(st.booleans()) for flag in flags}
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": "tell me of the sea"}]
        body |= draw(st.sampled_from(SHAPES))
        if draw(st.booleans()):
            body |= {"logprobs": True, "top_logprobs": draw(st.integers(0, 2))}
    else:
        body["prompt"] = draw(st.sampled_from(["tell me", ["tell me", "of the sea"]]))
        body["echo"] = draw(st.booleans())
        if draw(st.booleans()):
            body["logprobs"] = draw(st.integers(0, 2))
    return path, body


@pytest.mark.laws
@given(asked(), st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_stream_says_what_the_whole_answer_says(server: RunningServer, of: tuple[str, Any], always: bool) -> None:
    path, body = of
    whole = call(server.url, path, body)
    assert whole.status == 200, whole.payload
    options = {"include_usage": True, "continuous_usage_stats": always}
    streamed = call(server.url, path, {**body, "stream": True, "stream_options": options})
    choices, usage, usages = in_one_piece(events_of(streamed.payload))
    assert choices == of_whole(whole.json)
    assert usage["completion_tokens"] == whole.json["usage"]["completion_tokens"]
    assert usage["prompt_tokens"] == whole.json["usage"]["prompt_tokens"]
    for choice in choices.values():
        wants = body.get("logprobs") is not None
        assert bool(choice["logprobs"]) == wants
    if always and len(choices) == 1:
        assert [one["completion_tokens"] for one in usages] == sorted(one["completion_tokens"] for one in usages)


TOLD = Segments(
    [[TextSegment("reasoning", "{sea"), TextSegment("content", "<tool_call>"), TextSegment("arguments", "  ", "f")]]
)
SHAPED: list[Shape | None] = [None, Plain(), TOLD, NamedCall("weather"), RequiredCalls(), ToolCallsInText()]


@pytest.mark.parametrize("shape", SHAPED)
@given(
    st.lists(st.sampled_from(["<tool", "_call>", "{", "sea", "</tool_call>", "<", " "]), min_size=1, max_size=8),
    st.data(),
)
def test_what_is_held_back_keeps_its_log_probabilities(
    shape: Shape | None, words: list[str], data: st.DataObject
) -> None:
    form: Form = ChatForm("m", WordText(), shape=shape)
    entries: list[TokenLogprob] = [(index, -float(index + 1), ()) for index in range(len(words))]
    payload, start = form.first(0, None), 0
    while start < len(words):
        end = data.draw(st.integers(start + 1, len(words)))
        is_last = end == len(words)
        payload += form.piece(0, "".join(words[start:end]), "stop" if is_last else None, entries[start:end], None)
        start = end
    choices, _, _ = in_one_piece(events_of(payload + b"data: [DONE]\n\n"))
    whole = Whole()
    whole.texts, whole.logprobs, whole.finish_reason = words, entries, "stop"
    assert choices == of_whole(msgspec.json.decode(form.whole([whole], {}, {})))

"""Completions and chat completions of a mock, byte by byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.doors.openai.running import RunningServer
from kvarts.doors.openai.words import NUM_WORDS, WORDS, WordTokenizer

from builders.http_client import call, events_of

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
Start = Callable[..., RunningServer]


def chat(server: RunningServer, text: Any = "hello", **more: Any) -> Any:
    reply = call(server.url, CHAT, {"messages": [{"role": "user", "content": text}], **more})
    assert reply.status == 200, reply.payload
    return reply.json


def complete(server: RunningServer, prompt: Any = "hello", **more: Any) -> Any:
    reply = call(server.url, COMPLETIONS, {"prompt": prompt, **more})
    assert reply.status == 200, reply.payload
    return reply.json


def streamed(server: RunningServer, path: str, body: dict[str, Any]) -> list[Any]:
    reply = call(server.url, path, {**body, "stream": True})
    assert reply.status == 200 and reply.headers["content-type"].startswith("text/event-stream")
    return events_of(reply.payload)


def test_a_completion_has_the_tokens_that_were_asked_for_and_says_so(server: RunningServer) -> None:
    told = complete(server, "hello the world", max_tokens=12)
    (choice,) = told["choices"]
    assert (told["object"], choice["index"], choice["finish_reason"]) == ("text_completion", 0, "length")
    assert len(choice["text"].split()) == 12 and set(choice["text"].split()) <= set(WORDS)
    num_prompt = len(WordTokenizer().encode("hello the world"))
    assert told["usage"] == {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + 12,
        "completion_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_stream_says_the_same_as_an_answer_in_one_piece(server: RunningServer) -> None:
    whole = chat(server, "one and the same", max_tokens=9)["choices"][0]["message"]["content"]
    body = {"messages": [{"role": "user", "content": "one and the same"}], "max_tokens": 9}
    events = streamed(server, CHAT, body)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    pieces = [event["choices"][0] for event in events[1:]]
    assert "".join(piece["delta"]["content"] for piece in pieces) == whole
    assert [piece["finish_reason"] for piece in pieces] == [None] * 8 + ["length"]
    assert len({event["id"] for event in events}) == 1 and all("usage" not in event for event in events)
    text = complete(server, "one", max_tokens=5)["choices"][0]["text"]
    events = streamed(server, COMPLETIONS, {"prompt": "one", "max_tokens": 5})
    assert "".join(event["choices"][0]["text"] for event in events) == text


def test_usage_comes_at_the_end_or_with_every_piece(server: RunningServer) -> None:
    body: dict[str, Any] = {"prompt": "count me", "max_tokens": 4, "stream_options": {"include_usage": True}}
    events = streamed(server, COMPLETIONS, body)
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 4
    assert all("usage" not in event for event in events[:-1])
    body["stream_options"]["continuous_usage_stats"] = True
    events = streamed(server, COMPLETIONS, body)
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 4, 4]


def test_a_prompt_is_cached_and_salts_and_adapters_keep_it_apart(start: Any) -> None:
    server = start(page_size=4)
    prompt = list(range(40))

    def cached(**more: Any) -> int:
        usage = complete(server, prompt, max_tokens=1, **more)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(), cached(), cached(cache_salt="a"), cached(cache_salt="a"), cached()] == [0, 36, 0, 36, 36]
    assert call(server.url, "/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": "x"}).status == 200
    assert [cached(model="sql"), cached(model="sql"), cached(model="mock")] == [0, 36, 36]
    assert server.cache_hits() == 36 * 5
    assert call(server.url, "/reset_prefix_cache", b"").json == {"success": True}
    assert [cached(), cached()] == [0, 36]


def test_an_answer_is_hit_by_the_next_turn(start: Any) -> None:
    server = start(page_size=4)
    messages = [{"role": "user", "content": "tell me of the sea"}]
    first = chat(server, "tell me of the sea", max_tokens=40)
    messages += [first["choices"][0]["message"], {"role": "user", "content": "and of the land"}]
    reply = call(server.url, CHAT, {"messages": messages, "max_tokens": 1}).json
    in_first = first["usage"]["total_tokens"] - 1  # the last token was sampled, and never computed
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == in_first // 4 * 4


def test_choices_and_lists_of_prompts_are_numbered_in_their_order(server: RunningServer) -> None:
    told = complete(server, ["the first", "the second"], n=2, max_tokens=3, seed=5)
    texts = [choice["text"] for choice in told["choices"]]
    assert [choice["index"] for choice in told["choices"]] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert told["usage"]["completion_tokens"] == 12
    assert texts[2] == complete(server, "the second", max_tokens=3, seed=5)["choices"][0]["text"]
    ids = [WordTokenizer().encode("the first"), WordTokenizer().encode("the second")]
    by_ids = complete(server, ids, n=2, max_tokens=3, seed=5)
    assert [choice["text"] for choice in by_ids["choices"]] == texts
    assert complete(server, ids[0], max_tokens=3, seed=5)["choices"][0]["text"] == texts[0]
    body = {"prompt": ["the first", "the second"], "n": 2, "max_tokens": 3, "seed": 5}
    streams = ["", "", "", ""]
    for event in streamed(server, COMPLETIONS, body):
        streams[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert streams == texts


def test_a_stop_text_ends_an_answer_and_is_not_in_it(server: RunningServer) -> None:
    text = complete(server, "stop here", max_tokens=20)["choices"][0]["text"]
    words = text.split()
    stop = f" {words[6]}"
    told = complete(server, "stop here", max_tokens=20, stop=stop)["choices"][0]
    assert (told["text"], told["finish_reason"]) == (text[: text.find(stop)], "stop")
    assert complete(server, "stop here", max_tokens=20, stop=[stop], min_tokens=20)["choices"][0]["text"] == text
    pieces = streamed(server, COMPLETIONS, {"prompt": "stop here", "max_tokens": 20, "stop": [stop]})
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == told["text"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("streams", [False, True])
def test_what_stopped_an_answer_is_told_as_the_text_or_the_token(
    server: RunningServer, path: str, streams: bool
) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "why"}]} if path == CHAT else {"prompt": "why"}
    asked["max_tokens"] = 20

    def last(**more: Any) -> Any:
        if streams:
            *before, end = (event["choices"][0] for event in streamed(server, path, {**asked, **more}))
            assert all("stop_reason" not in choice for choice in before)
            return end
        return call(server.url, path, {**asked, **more}).json["choices"][0]

    whole = call(server.url, path, asked).json["choices"][0]
    text = whole["text"] if path == COMPLETIONS else whole["message"]["content"]
    word, token = text.split()[6], WordTokenizer().encode(text)[4]
    told = [last(), last(stop=["no such word", word]), last(stop_token_ids=[token]), last(stop=word, min_tokens=20)]
    reasons = [(choice["finish_reason"], choice["stop_reason"]) for choice in told]
    assert reasons == [("length", None), ("stop", word), ("stop", token), ("length", None)]


def test_a_stop_token_ends_an_answer_unless_it_is_too_short(server: RunningServer) -> None:
    text = complete(server, "token", max_tokens=10)["choices"][0]["text"]
    token = WordTokenizer().encode(text)[4]
    told = complete(server, "token", max_tokens=10, stop_token_ids=[token])
    assert told["choices"][0]["finish_reason"] == "stop" and told["usage"]["completion_tokens"] <= 5
    told = complete(server, "token", max_tokens=10, stop_token_ids=[token], min_tokens=10)
    assert told["usage"]["completion_tokens"] == 10


def test_without_a_number_a_chat_ends_by_itself_and_a_completion_has_sixteen_tokens(start: Any) -> None:
    server = start(output_tokens=20)
    told = chat(server)
    assert told["choices"][0]["finish_reason"] == "stop" and 10 <= told["usage"]["completion_tokens"] <= 30
    assert chat(server)["usage"] == {**told["usage"], "prompt_tokens_details": {"cached_tokens": 0}}
    assert chat(server, min_tokens=50)["usage"]["completion_tokens"] >= 50
    assert complete(server)["usage"]["completion_tokens"] == 16
    assert chat(server, ignore_eos=True, max_tokens=33)["usage"]["completion_tokens"] == 33


def test_an_answer_ends_where_it_would_and_max_tokens_is_the_most(start: Start) -> None:
    server, usual = start(output_tokens=20), start()

    def ended(of: RunningServer, path: str, **more: Any) -> tuple[int, str]:
        body = {"messages": [{"role": "user", "content": "go"}]} if path == CHAT else {"prompt": "go"}
        told = call(of.url, path, {**body, **more}).json
        return told["usage"]["completion_tokens"], told["choices"][0]["finish_reason"]

    for path in (CHAT, COMPLETIONS):
        natural, reason = ended(server, path, max_tokens=3000)
        assert 10 <= natural <= 30 and reason == "stop"
        assert ended(server, path, max_tokens=natural) == (natural, "stop")
        assert ended(server, path, max_tokens=natural - 1) == (natural - 1, "length")
        assert ended(server, path, max_tokens=60, min_tokens=40) == (40, "stop")
        assert ended(server, path, max_tokens=60, ignore_eos=True) == (60, "length")
        natural, reason = ended(usual, path, max_tokens=32_000)
        assert 64 <= natural <= 192 and reason == "stop"
        assert ended(usual, path, max_tokens=300, ignore_eos=True) == (300, "length")
    told = call(server.url, "/v1/responses", {"input": "go", "max_output_tokens": 3000}).json
    assert told["status"] == "completed" and 10 <= told["usage"]["output_tokens"] <= 30


def test_log_probabilities_are_those_of_the_rule_that_draws(server: RunningServer) -> None:
    (choice,) = complete(server, "likely", max_tokens=3, logprobs=1)["choices"]
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"]
    assert told["token_logprobs"] == pytest.approx([-6.115892] * 3) and NUM_WORDS == 453
    assert told["text_offset"] == [0, len(told["tokens"][0]), len(told["tokens"][0] + told["tokens"][1])]
    (choice,) = chat(server, max_tokens=2, logprobs=True, top_logprobs=0)["choices"]
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == choice["message"]["content"]


def test_content_comes_in_parts_and_unknown_fields_are_left_alone(server: RunningServer) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    more = {"no_stop_trim": True, "skip_special_tokens": False, "return_hidden_states": False, "logprobs": None}
    assert chat(server, parts, max_tokens=4, **more)["choices"] == chat(server, "hello", max_tokens=4)["choices"]


def test_a_prompt_is_echoed(server: RunningServer) -> None:
    text = complete(server, "echo", max_tokens=2)["choices"][0]["text"]
    assert complete(server, "echo", max_tokens=2, echo=True)["choices"][0]["text"] == "echo" + text
    events = streamed(server, COMPLETIONS, {"prompt": "echo", "max_tokens": 2, "echo": True})
    assert "".join(event["choices"][0]["text"] for event in events) == "echo" + text


@given(st.text(max_size=60))
def test_any_text_is_read_back_unchanged(text: str) -> None:
    words = WordTokenizer()
    tokens = words.encode(text)
    assert words.decode(tokens) == text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    assert all(0 <= token < 2**32 for token in tokens)
    if not any(0xD800 <= ord(character) < 0xE000 for character in text):  # no half of a character has a text
        assert "".join(map(words.piece, tokens)) == text


@given(st.lists(st.integers(0, NUM_WORDS - 1), min_size=1, max_size=50))
def test_what_a_mock_writes_is_read_back_as_the_same_tokens(drawn: list[int]) -> None:
    words = WordTokenizer()
    assert words.encode("".join(map(words.piece, drawn))) == drawn
    first = [drawn[0] + NUM_WORDS, *drawn[1:]]
    assert words.encode("".join(map(words.piece, first))) == first


def test_the_top_of_log_probabilities_is_as_long_as_asked_for_and_has_the_token(start: Start) -> None:
    server = start()
    for stream in (False, True):
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "logprobs": True, "stream": stream}
        reply = call(server.url, "/v1/chat/completions", {**body, "top_logprobs": 3})
        told = (
            [
                place
                for event in events_of(reply.payload)
                for place in (event["choices"][0]["logprobs"] or {}).get("content", ())
            ]
            if stream
            else reply.json["choices"][0]["logprobs"]["content"]
        )
        assert len(told) == 5
        for place in told:
            texts = [other["token"] for other in place["top_logprobs"]]
            assert len(set(texts)) == 3 and texts[0] == place["token"]


def test_the_ids_of_tokens_are_told_where_asked_for(start: Start) -> None:
    server = start()
    body = {"prompt": [7, 8, 9], "max_tokens": 4, "return_token_ids": True, "n": 2}
    for choice in call(server.url, "/v1/completions", body).json["choices"]:
        assert choice["prompt_token_ids"] == [7, 8, 9] and len(choice["token_ids"]) == 4
        told = call(server.url, "/detokenize", {"tokens": choice["token_ids"]}).json["prompt"]
        assert told == choice["text"]
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "return_token_ids": True}
    reply = call(server.url, "/v1/chat/completions", chat).json
    assert len(reply["prompt_token_ids"]) == reply["usage"]["prompt_tokens"]
    assert len(reply["choices"][0]["token_ids"]) == 4
    first, *others = streamed(server, CHAT, chat)
    assert first["prompt_token_ids"] == reply["prompt_token_ids"]
    assert not any("prompt_token_ids" in event for event in others)


def test_a_stop_text_is_in_the_answer_where_that_is_asked_for(server: RunningServer) -> None:
    text = complete(server, "stop here", max_tokens=20)["choices"][0]["text"]
    stop = f" {text.split()[6]}"
    body = {"prompt": "stop here", "max_tokens": 20, "stop": stop, "include_stop_str_in_output": True}
    told = call(server.url, COMPLETIONS, body).json["choices"][0]
    assert told["text"] == text[: text.find(stop) + len(stop)] and told["stop_reason"] == stop
    assert "".join(event["choices"][0]["text"] for event in streamed(server, COMPLETIONS, body)) == told["text"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"top_logprobs": 3}),
        (CHAT, {"stream_options": {"include_usage": True}}),
        (CHAT, {"tool_choice": "required"}),
        (CHAT, {"tools": [{"type": "function"}]}),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "video"}]}]}),
        (CHAT, {"max_tokens": 0}),
        (CHAT, {"temperature": -1}),
        (CHAT, {"audio": {"voice": "alloy", "format": "wav"}, "modalities": ["text", "audio"]}),
        (CHAT, {"web_search_options": {"search_context_size": "low"}}),
        (COMPLETIONS, {"prompt": [[]]}),
        (COMPLETIONS, {"logprobs": 99}),
        (COMPLETIONS, {"stop": ["a"] * 99}),
        (COMPLETIONS, {"n": 0}),
    ],
    ids=str,
)
def test_the_message_of_a_refusal_names_the_field(server: RunningServer, path: str, fields: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {"prompt": "a"}
    error = call(server.url, path, {**body, **fields}).error  # which compares message and param
    assert error["code"] == 400 and error["param"].partition("[")[0] in fields


@pytest.mark.parametrize("prompt", ["the " * 5000, [1] * 3000])
def test_a_request_that_is_too_long_is_refused_in_words_that_clients_look_for(start: Start, prompt: Any) -> None:
    server = start(max_model_len=4000)
    reply = call(server.url, "/v1/completions", {"prompt": prompt, "max_tokens": 2000})
    assert reply.status == 400 and "maximum context length is 4000 tokens" in reply.json["error"]["message"]

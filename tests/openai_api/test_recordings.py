"""Recorded answers: of our own mock as the real server, played back without it."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.errors import ConfigError, InputError, MissingFileError, OutputError
from kvarts.openai_api.recordings import CHAT_PATH, COMPLETION_PATH, Sent, open_recordings
from kvarts.openai_api.running import RunningServer

from builders.full_disk import full_disk
from builders.http_client import Reply, call, events_of

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
CALL = {"name": "weather", "arguments": {"city": "Lund"}}
RULES: list[dict[str, Any]] = [
    {"message": "weather", "turn": 1, "reasoning": "Where?", "text": "Let me look.", "calls": [CALL],
     "usage": {"prompt_tokens": 70, "completion_tokens": 30, "cached_tokens": 16, "reasoning_tokens": 4}},
    {"message": "weather", "turn": 2, "text": "Rain: umbrella, hat."},
    {"message": "bad", "refusal": "I may not.", "finish_reason": "content_filter"},
    {"message": "busy", "fail": "429 retry_after=7"},
    {"message": "*", "text": "One, two, three."},
]  # fmt: skip
WEATHER: dict[str, Any] = {"name": "weather", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": WEATHER}]


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def bodies() -> list[tuple[str, dict[str, Any]]]:
    tool = {"name": "weather", "input_schema": {"type": "object"}}
    return [
        (CHAT_PATH, {"messages": user("weather"), "tools": TOOLS, "reasoning_effort": "high"}),
        (CHAT_PATH, {"messages": user("bad"), "n": 2}),
        (CHAT_PATH, {"messages": user("counting"), "stop": [", three"], "max_tokens": 9}),
        (CHAT_PATH, {"messages": user("counting"), "max_tokens": 2}),
        (COMPLETION_PATH, {"prompt": "counting", "max_tokens": 40}),
        (RESPONSES, {"input": "weather", "tools": [{"type": "function", **WEATHER}], "store": False}),
        (MESSAGES, {"messages": user("weather"), "tools": [tool], "max_tokens": 99}),
    ]


def told(reply: Reply) -> Any:
    """An answer without ids and times."""
    assert reply.status == 200, reply.payload
    return _without_ids(reply.json)


def _without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        left_out = ("id", "call_id", "created", "created_at", "signature")
        return {name: _without_ids(each) for name, each in value.items() if name not in left_out}
    return [_without_ids(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETION_PATH, RESPONSES, MESSAGES])
def test_no_value_of_an_unknown_field_fails_the_server(tmp_path: Path, path: str) -> None:
    values = [b'"\xe0 "', b"[" * 500 + b"]" * 500, b"9" * 5000, b'"\\ud800"', b"1e999", b"-0.0", b"1e-400"]
    with (
        RunningServer(answers=RULES) as real,
        RunningServer(recordings=tmp_path / "answers.jsonl", record_from=real.url) as mock,
    ):
        for value in values:
            fields = b'"messages": [{"role": "user", "content": "a"}], "input": "a", "prompt": "a", "max_tokens": 4'
            reply = call(mock.url, path, b'{%b, "unknown": %b}' % (fields, value))
            assert reply.status in (200, 400), reply.payload
            assert reply.status == 200 or reply.json["error"]["message"]
            if value == values[0] and path in (CHAT_PATH, COMPLETION_PATH):
                assert reply.status == 400 and "no JSON" in reply.json["error"]["message"]


def test_answers_are_asked_for_once_and_played_back_without_the_server(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with RunningServer(answers=RULES) as real:
        directly = [told(call(real.url, where, body)) for where, body in bodies()]
        num_before = len(real.requests)
        with RunningServer(recordings=path, record_from=real.url) as mock:
            recorded = [told(call(mock.url, where, body)) for where, body in bodies()]
            assert [told(call(mock.url, where, body)) for where, body in bodies()] == recorded
            mock.assert_conserved()
        asked = real.requests[num_before:]
    assert len(asked) == len(bodies()) == len(path.read_text().splitlines())
    assert [seen.path for seen in asked].count(COMPLETION_PATH) == 1 and asked[0].body["reasoning_effort"] == "high"
    for answer, was in zip(recorded, directly, strict=True):
        assert answer.pop("usage") is not None and was.pop("usage") is not None
        assert answer == was
    with RunningServer(recordings=path) as mock:  # the real server is gone
        played = [told(call(mock.url, where, body)) for where, body in bodies()]
        assert [answer["usage"].get("completion_tokens", 30) for answer in played][:1] == [30]
        for answer, was in zip(played, recorded, strict=True):
            del answer["usage"]
            assert answer == was
        mock.assert_conserved()


def test_streams_are_recorded_and_played_as_wholes_are(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    body = {"messages": user("weather"), "tools": TOOLS}
    with RunningServer(answers=RULES) as real, RunningServer(recordings=path, record_from=f"{real.url}/v1") as mock:
        pieces = events_of(call(mock.url, CHAT_PATH, {**body, "stream": True}).payload)
        assert len(real.requests) == 1 and not real.requests[0].body.get("stream")
    with RunningServer(recordings=path) as mock:
        again = events_of(call(mock.url, CHAT_PATH, {**body, "stream": True}).payload)
        whole = call(mock.url, CHAT_PATH, body).json["choices"][0]["message"]
    for events in (pieces, again):
        deltas = [event["choices"][0]["delta"] for event in events]
        assert "".join(delta.get("content") or "" for delta in deltas) == whole["content"] == "Let me look."
        arguments = [one["function"].get("arguments", "") for delta in deltas for one in delta.get("tool_calls", ())]
        assert "".join(arguments) == whole["tool_calls"][0]["function"]["arguments"] == '{"city":"Lund"}'


def test_an_agent_whose_calls_have_other_ids_is_played_back(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"

    def loop(server: RunningServer) -> str:
        messages = user("weather")
        while True:
            reply = call(server.url, CHAT_PATH, {"messages": messages, "tools": TOOLS})
            assert reply.status == 200, reply.payload
            said = reply.json["choices"][0]["message"]
            if not said["tool_calls"]:
                return str(said["content"])
            messages += [said, *({"role": "tool", "tool_call_id": one["id"], "content": "rain"}
                                 for one in said["tool_calls"])]  # fmt: skip

    with RunningServer(answers=RULES) as real, RunningServer(recordings=path, record_from=real.url) as mock:
        assert loop(mock) == loop(mock) == "Rain: umbrella, hat." and len(real.requests) == 2
    with RunningServer(recordings=path) as mock:
        assert loop(mock) == "Rain: umbrella, hat."
        body: dict[str, Any] = {"input": "weather", "tools": [{"type": "function", **WEATHER}]}
        first = told(call(mock.url, RESPONSES, body | {"store": True}))  # the same chat, in another form
        assert [item["type"] for item in first["output"]] == ["reasoning", "message", "function_call"]


def test_what_cannot_be_played_or_recorded_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with RunningServer(answers=RULES) as real, RunningServer(recordings=path, record_from=real.url) as mock:
        reply = call(mock.url, CHAT_PATH, {"messages": user("busy")})
        assert (reply.status, reply.headers["retry-after"]) == (429, "7") and "429" in reply.error["message"]
        assert not path.exists()
        told(call(mock.url, CHAT_PATH, {"messages": user("known")}))
        refused: list[tuple[str, dict[str, Any], str]] = [
            (CHAT_PATH, {"messages": user("known"), "logprobs": True}, "logprobs"),
            (COMPLETION_PATH, {"prompt": ["a", "b"]}, "prompt"),
        ]
        for where, body, param in refused:
            reply = call(mock.url, where, body)
            assert (reply.status, reply.error["param"]) == (400, param)
    with RunningServer(recordings=path, answers=[{"message": "ruled", "text": "by a rule"}]) as mock:
        reply = call(mock.url, CHAT_PATH, {"messages": user("unknown")})
        assert reply.status == 404 and "--record-from" in reply.error["message"]
        assert call(mock.url, CHAT_PATH, {"messages": user("known"), "temperature": 0}).status == 404
        assert call(mock.url, CHAT_PATH, {"messages": user("known"), "user": "another", "stream": True}).status == 200
        assert told(call(mock.url, CHAT_PATH, {"messages": user("ruled")}))["choices"][0]["message"]["content"]
    with RunningServer(recordings=path, record_from="http://127.0.0.1:1") as mock:
        reply = call(mock.url, CHAT_PATH, {"messages": user("unknown")})
        assert reply.status == 502 and "127.0.0.1:1" in reply.error["message"]
        assert call(mock.url, CHAT_PATH, {"messages": user("known")}).status == 200


@pytest.mark.parametrize(
    ("answer", "status", "word"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", 502, "recorded"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\n{\"choices\": []}", 502, "choices"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 900\r\n\r\n{}", 502, "closed"),
        (b"not HTTP at all\r\n\r\n", 502, "not HTTP"),
        (b"", 502, "closed"),
        (b"HTTP/1.1 302 Found\r\nlocation: http://elsewhere\r\ncontent-length: 0\r\n\r\n", 502, "302"),
        (b"HTTP/1.1 401 No\r\nconnection: close\r\n\r\n{\"error\": {\"message\": \"bad key\"}}", 401, "bad key"),
    ],
)  # fmt: skip
def test_answers_that_are_none(tmp_path: Path, answer: bytes, status: int, word: str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            seen.append(self.headers["authorization"])
            self.wfile.write(answer)
            self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    seen: list[str | None] = []
    with HTTPServer(("127.0.0.1", 0), Handler) as real, pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVARTS_RECORD_KEY", "secret")
        threading.Thread(target=real.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{real.server_port}/v1/"
        with RunningServer(recordings=tmp_path / "answers.jsonl", record_from=url) as mock:
            reply = call(mock.url, CHAT_PATH, {"messages": user("x")}, headers={"authorization": "Bearer own"})
        real.shutdown()
    assert reply.status == status and word in reply.error["message"] and seen == ["Bearer secret"]
    assert not (tmp_path / "answers.jsonl").exists()


def test_files_and_addresses_that_are_wrong(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with pytest.raises(MissingFileError, match="--record-from"):
        open_recordings(path, None)
    with pytest.raises(ConfigError, match="--recordings"):
        open_recordings(None, "http://host")
    for url in ("host:80", "ftp://host", "http://user:word@host", "http://host:99999", "http://host/v1?x=1"):
        with pytest.raises(ConfigError, match="URL"):
            open_recordings(path, url)
    with pytest.raises(OutputError):
        open_recordings(tmp_path / "none" / "answers.jsonl", "http://host")
    record = {"digest": "0", "asked": "a", "choices": [{"text": "b"}]}
    latency = json.dumps({**record, "choices": [{"latency_s": -1}]})
    for line, field in (("{", None), ('{"digest": 1}', "digest"), (latency, "latency_s")):
        path.write_text(f"{json.dumps(record)}\n{line}\n")
        with pytest.raises(InputError, match=r"answers\.jsonl:2:") as told:
            open_recordings(path, None)
        assert field is None or told.value.field == field
    path.write_text(json.dumps(record))
    assert open_recordings(path, None) is not None
    with pytest.raises(InputError, match="end"):  # a line cannot be added
        open_recordings(path, "http://host")


FIELDS = st.dictionaries(
    st.sampled_from(["temperature", "seed", "user", "stream", "model", "max_tokens", "stream_options"]),
    st.none() | st.integers(0, 3),
)


@given(one=FIELDS, other=FIELDS)
def test_digests_differ_where_answers_may(one: dict[str, Any], other: dict[str, Any]) -> None:
    def of_answer(fields: dict[str, Any]) -> dict[str, Any]:
        skipped = ("user", "stream", "stream_options")
        return {name: value for name, value in fields.items() if value is not None and name not in skipped}

    digests = {Sent(CHAT_PATH, {"messages": user("a"), **fields}, 1).digest for fields in (one, other)}
    assert (len(digests) == 1) == (of_answer(one) == of_answer(other))


def test_what_is_recorded_and_what_waits_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvarts.openai_api import recordings

    path = tmp_path / "answers.jsonl"
    with RunningServer(answers=[*RULES[:-1], {"text": "long " * 200}]) as real:
        with RunningServer(recordings=path, record_from=real.url) as mock:
            monkeypatch.setattr(recordings, "MOST_BYTES", 2000)
            statuses = [
                call(mock.url, CHAT_PATH, {"messages": user(f"question {number}")}).status for number in range(3)
            ]
            assert statuses == [200, 503, 503] and path.stat().st_size <= 2000
            monkeypatch.setattr(recordings, "MOST_WAITING", 0)
            reply = call(mock.url, CHAT_PATH, {"messages": user("another")})
            assert reply.status == 429 and reply.headers["retry-after"] == "1"
            assert call(mock.url, CHAT_PATH, {"messages": user("question 0")}).status == 200
            monkeypatch.setattr(recordings, "MOST_WAITING", 9)
            monkeypatch.setattr(recordings, "MOST_ANSWER_BYTES", 100)
            assert call(mock.url, CHAT_PATH, {"messages": user("another")}).status == 502
        monkeypatch.setattr(recordings, "MOST_BYTES", 100)
        with pytest.raises(InputError, match="bytes"):
            open_recordings(path, None)


def test_a_full_disk_tears_no_line(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with RunningServer(answers=RULES) as real, RunningServer(recordings=path, record_from=real.url) as mock:
        assert call(mock.url, CHAT_PATH, {"messages": user("first")}).status == 200
        before = path.read_bytes()
        with full_disk(len(before) + 20):
            assert call(mock.url, CHAT_PATH, {"messages": user("second")}).status == 500
        assert path.read_bytes() == before
        assert call(mock.url, CHAT_PATH, {"messages": user("second")}).status == 200
    assert len(path.read_bytes().splitlines()) == 2


@pytest.mark.parametrize("messages", [True, [None], [7], {}, "x", [{"content": "b"}]])
def test_messages_of_a_completion_are_ignored(messages: Any) -> None:
    sent = Sent(COMPLETION_PATH, {"prompt": "a", "messages": messages}, 1)
    assert sent.last_text == "a" and sent.digest

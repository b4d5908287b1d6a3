"""Clients that mean no good, or know no better: the envelope, no traceback, no page lost, and others are served."""

from __future__ import annotations

import json
import logging
import re
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvarts.doors.openai.connection import MAX_HEAD_BYTES
from kvarts.doors.openai.running import RunningServer

from builders.http_client import call, raw

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = "/v1/messages"
Start = Callable[..., RunningServer]


@pytest.fixture(autouse=True)
def no_traceback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing is logged as an error: what a client does is no surprise."""
    yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def request(body: dict[str, Any], *headers: str, path: str = COMPLETIONS) -> bytes:
    payload = json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json"]
    head += [f"content-length: {len(payload)}", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + payload


def hello(**fields: Any) -> dict[str, Any]:
    return {"prompt": "hello", "max_tokens": 3, **fields}


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.002)


def connect(url: str) -> socket.socket:
    host, _, port = urlsplit(url).netloc.partition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", answer)]


# What the body asks for ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"stream_options": {}}, "stream_options"),
        (CHAT, {"stream": False, "stream_options": {"include_usage": False}}, "stream_options"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"max_tokens": -1}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": -1, "min_tokens": 3}, "max_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (COMPLETIONS, {"priority": 2**31}, "priority"),
        (COMPLETIONS, {"priority": -(10**30)}, "priority"),
        (COMPLETIONS, {"cache_salt": "a\0b"}, "cache_salt"),
        (COMPLETIONS, {"cache_salt": ""}, "cache_salt"),
        (RESPONSES, {"include": ["message.output_text.logprobs"]}, "top_logprobs"),
        (RESPONSES, {"top_logprobs": 1}, "top_logprobs"),
        (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
        (RESPONSES, {"max_output_tokens": 10**7}, "max_output_tokens"),
        (RESPONSES, {"text": {"format": [1]}}, "text.format"),
        (RESPONSES, {"tools": [{"type": "function", "name": "f", "parameters": 5}]}, "tools[0].function.parameters"),
        (MESSAGES, {"output_config": {"format": [1]}}, "output_config.format"),
        (MESSAGES, {"tool_choice": {"type": ["auto"]}}, "tool_choice"),
        (MESSAGES, {"tool_choice": {"type": {"auto": 1}}}, "tool_choice"),
        (MESSAGES, {"cache_control": {"type": "ephemeral", "ttl": "5m\n"}}, "cache_control.ttl"),
        (CHAT, {"cache_control": {"type": "ephemeral", "ttl": "5m\n"}}, "cache_control.ttl"),
        (
            CHAT,
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
            "tools[0].function.parameters",
        ),
        (COMPLETIONS, {"thinking_token_budget": -(2**62)}, "thinking_token_budget"),
        (COMPLETIONS, {"top_k": -2}, "top_k"),
        (COMPLETIONS, {"max_tokens": 2, "min_tokens": 2**62}, "min_tokens"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(
    server: RunningServer, path: str, fields: dict[str, Any], param: str
) -> None:
    body = {"prompt": "x", "input": "x", "messages": [{"role": "user", "content": "x"}], **fields}
    refused = call(server.url, path, {"max_tokens": 3, **body} if path == MESSAGES else body)
    assert refused.status == 400
    if path == MESSAGES:
        assert refused.json["error"]["message"].startswith(f"{param}: ")
    else:
        assert refused.error["param"] == param


@pytest.mark.parametrize("path", [CHAT, f"{CHAT}/render", "/tokenize"])
def test_a_template_of_a_request_is_refused(start: Start, path: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ messages }}"}
    reply = call(start().url, path, body)
    assert (reply.status, reply.error["param"]) == (400, "chat_template")


def test_a_template_among_variables_is_refused(start: Start) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"chat_template": "{{ messages }}"}}
    reply = call(start().url, CHAT, body)
    assert (reply.status, reply.error["param"]) == (400, "chat_template_kwargs")


@pytest.mark.parametrize(
    ("payload", "param", "says"),
    [
        (b'{"max_queued": %b}' % (b"9" * 5000), "max_queued", "out of range"),
        (b'{"retry_after_s": 1e400}', "retry_after_s", "out of range"),
        (b'{"retry_after_s": "1"}', "retry_after_s", "Expected `float`"),
        (b'{"%b": 1}' % (b"9" * 5000), "9" * 40, "cannot be set"),
        (b'{"seed": %b}' % (b"[" * 9000), None, "nested too deeply"),
        (b'{"fail": "\\ud800"}', None, "half of a character"),
    ],
)
def test_what_cannot_be_set_is_named(server: RunningServer, payload: bytes, param: str | None, says: str) -> None:
    refused = call(server.url, "/admin/config", payload)
    assert refused.status == 400 and says in refused.error["message"] and len(refused.payload) < 500
    assert (refused.error["param"] or "").startswith(param or "")


def test_half_of_a_characters_two_escapes_is_told(server: RunningServer) -> None:
    """msgspec says "Input data was truncated" of it, wherever it stands."""
    refused = call(server.url, COMPLETIONS, b'{"max_tokens": 3, "prompt": "\\ud800"}')
    assert refused.status == 400 and "half of a character's two escapes" in refused.error["message"]


@pytest.mark.parametrize(
    "asked",
    [
        {"max_queued": -1},
        {"max_queued": 10**30},
        {"retry_after_s": -1},
        {"retry_after_s": 1e300},
        {"seed": "x", "fail": ""},
    ],
)
def test_limits_that_cannot_be_are_refused_while_it_runs(server: RunningServer, asked: dict[str, Any]) -> None:
    before = call(server.url, "/admin/config").json
    assert call(server.url, "/admin/config", asked).status == 400
    assert call(server.url, "/admin/config").json == before


@pytest.mark.parametrize("name", ["", "a\0b"])
def test_an_adapter_has_a_name(server: RunningServer, name: str) -> None:
    assert call(server.url, "/v1/load_lora_adapter", {"lora_name": name}).error["param"] == "lora_name"


def test_no_salt_is_an_adapter_and_no_adapter_with_a_salt_another(start: Start) -> None:
    server = start(page_size=4)
    for name in ("a", "a/b"):
        assert call(server.url, "/v1/load_lora_adapter", {"lora_name": name}).status == 200

    def cached(**fields: Any) -> int:
        reply = call(server.url, COMPLETIONS, hello(prompt=list(range(40)), **fields))
        return int(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"])

    tenants = [
        {"cache_salt": "a"},
        {"model": "a"},
        {"model": "a", "cache_salt": "b"},
        {"model": "a/b"},
        {"cache_salt": "a/b"},
    ]
    assert [cached(**tenant) for tenant in tenants] == [0] * 5
    assert [cached(**tenant) for tenant in tenants] == [36] * 5


# Responses ----------------------------------------------------------------------------------------------------


def test_responses_are_their_owners(start: Start) -> None:
    server = start(api_key=("one", "two"))
    server.excuse("missing retry")
    keys = [{"authorization": f"Bearer {key}"} for key in ("one", "two")]
    first = call(server.url, RESPONSES, {"input": "of the sea", "max_output_tokens": 3}, headers=keys[0]).json
    follow = {"input": "and?", "max_output_tokens": 3, "previous_response_id": first["id"]}
    assert call(server.url, RESPONSES, follow, headers=keys[1]).status == 404
    assert call(server.url, f"{RESPONSES}/{first['id']}", headers=keys[1]).status == 404
    assert call(server.url, f"{RESPONSES}/{first['id']}", method="DELETE", headers=keys[1]).status == 404
    assert call(server.url, RESPONSES, follow, headers=keys[0]).status == 200


def test_what_responses_keep_is_bounded_in_bytes(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvarts.doors.openai.responses.MAX_STORED_BYTES", 100_000)
    server = start()
    made = [call(server.url, RESPONSES, {"input": "x" * 30_000, "max_output_tokens": 1}).json["id"] for _ in range(5)]
    found = [call(server.url, f"{RESPONSES}/{one}").status for one in made]
    assert found[0] == 404 and found[-1] == 200 and found == sorted(found, reverse=True)
    assert call(server.url, RESPONSES, {"input": "x" * 90_000, "max_output_tokens": 1, "store": False}).status == 200
    assert call(server.url, f"{RESPONSES}/{made[-1]}").status == 200


def test_a_chain_of_responses_goes_on_from_any_of_them(start: Start) -> None:
    server = start()
    ids: list[str | None] = [None]
    lengths = [0]
    for turn in range(12):
        body = {
            "input": f"turn {turn}",
            "max_output_tokens": 4,
            "previous_response_id": ids[-1],
            "stream": turn % 2 == 1,
        }
        reply = call(server.url, RESPONSES, body)
        told = (
            reply.json
            if not body["stream"]
            else json.loads(reply.payload.decode().strip().rpartition("data: ")[2])["response"]
        )
        assert told["previous_response_id"] == ids[-1]
        lengths.append(told["usage"]["input_tokens"])
        assert lengths[-1] > lengths[-2]
        ids.append(told["id"])
    branch = {"input": "turn 5", "max_output_tokens": 4, "previous_response_id": ids[5]}
    assert call(server.url, RESPONSES, branch).json["usage"]["input_tokens"] == lengths[6]
    assert call(server.url, f"{RESPONSES}/{ids[3]}", method="DELETE").status == 200
    assert call(server.url, RESPONSES, {**branch, "previous_response_id": ids[3]}).status == 404
    assert call(server.url, RESPONSES, {**branch, "previous_response_id": ids[4]}).status == 200  # it has its own past


# Bytes on the wire -----------------------------------------------------------------------------------------------


def test_requests_that_come_at_once_are_answered_in_their_order(start: Start) -> None:
    server = start()
    several = b"".join(request(hello(max_tokens=number, stream=number == 2)) for number in (1, 2, 3))
    answer = raw(server.url, several + request(hello(), "connection: close"), shut=False)
    assert statuses(answer) == [200] * 4
    assert re.findall(rb'"completion_tokens":(\d+)', answer) == [b"1", b"3", b"3"]


def test_a_client_that_goes_with_requests_in_its_pipeline_frees_all_pages_at_once(start: Start) -> None:
    server = start(cost="linear:step_ms=5")
    server.excuse("unread stream")
    with connect(server.url) as client:
        client.sendall(request(hello(max_tokens=30_000, stream=True)) + request(hello()) * 3)
        wait_for(lambda: len(server.timeline()) > 3)
    wait_for(lambda: server.opened.served.num_live == 0)
    server.assert_conserved()
    assert len(server.requests) == 1


def test_nonsense_after_a_request_does_not_end_up_in_its_answer(start: Start) -> None:
    server = start(cost="linear:step_ms=5")
    server.excuse("unread stream")
    with connect(server.url) as client:
        client.sendall(request(hello(max_tokens=2000, stream=True)))
        got = client.recv(100_000)
        client.sendall(b"NONSENSE\r\n\r\n")
        try:
            while part := client.recv(100_000):
                got += part
        except ConnectionResetError:
            pass
    assert statuses(got) == [200] and b"[DONE]" not in got
    wait_for(lambda: server.opened.served.num_live == 0)


def test_a_head_without_an_end_is_refused(start: Start) -> None:
    server = start()
    with connect(server.url) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nx-a: ")
        got = b""
        try:
            for _ in range(100):
                client.sendall(b"a" * MAX_HEAD_BYTES)
        except OSError:
            pass
        else:
            raise AssertionError("it was read")
    answer = raw(server.url, b"GET /health HTTP/1.1\r\nx-a: " + b"a" * (MAX_HEAD_BYTES + 1), shut=False)
    assert statuses(answer) == [431] and json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == 431
    assert got == b"" and call(server.url, "/health").status == 200


def test_a_head_that_does_not_come_is_not_waited_for(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvarts.doors.openai.connection.HEAD_TIMEOUT_S", 0.2)
    server = start()
    for begun in (b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nhost: x\r\n"):
        assert statuses(raw(server.url, begun, shut=False)) == [408]
    answer = raw(server.url, request(hello(max_tokens=400), "connection: close"), shut=False)
    assert statuses(answer) == [200]  # an answer may take as long as it likes


def test_a_connection_that_is_kept_and_not_used_is_closed_without_an_error(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvarts.doors.openai.connection.HEAD_TIMEOUT_S", 0.3)
    server = start()
    with connect(server.url) as client:
        client.settimeout(5.0)
        answer = b""
        for _ in range(3):  # longer than the limit in all, but used
            client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            time.sleep(0.15)
            answer += client.recv(65536)
        assert statuses(answer) == [200] * 3
        assert client.recv(65536) == b""
    with connect(server.url) as client:  # refused by its head; its body never comes
        client.settimeout(5.0)
        client.sendall(b"POST /v1/nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\nabc")
        assert statuses(client.recv(65536)) == [404]
        assert client.recv(65536) == b""
    with connect(server.url) as client:  # the next head begins, and does not end
        client.settimeout(5.0)
        client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /heal")
        answer = b""
        while part := client.recv(65536):
            answer += part
        assert statuses(answer) == [200, 408]


@pytest.mark.parametrize(
    "headers",
    [
        ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQ"),
        ("upgrade:websocket", "connection: upgrade"),
    ],
)
def test_who_offers_another_protocol_is_answered_in_this_one(start: Start, headers: tuple[str, ...]) -> None:
    server = start()
    assert statuses(raw(server.url, request(hello(), *headers, "connection: close"), shut=False)) == [200]
    (seen,) = server.requests
    assert seen.body["prompt"] == "hello"


@pytest.mark.parametrize("size", [1, 7])
def test_a_body_may_come_in_chunks(start: Start, size: int) -> None:
    server = start()
    payload = json.dumps(hello()).encode()
    chunks = [payload[at : at + size] for at in range(0, len(payload), size)]
    coded = b"".join(b"%x;a=b\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\nx-trailer: y\r\n\r\n"
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )
    assert statuses(raw(server.url, head + coded, shut=False)) == [200]


def test_a_client_that_has_said_all_it_has_to_say_still_gets_its_answer_or_is_taken_to_have_gone(start: Start) -> None:
    server = start(cost="linear:step_ms=5")
    server.excuse("unread stream")
    answer = raw(server.url, request(hello(max_tokens=4000, stream=True)), shut=True)
    assert statuses(answer) in ([200], [])
    wait_for(lambda: server.opened.served.num_live == 0)
    server.assert_conserved()


@pytest.mark.slow
def test_answers_that_hold_too_much_are_ended_the_largest_first(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvarts.doors.openai import answer, served

    monkeypatch.setattr(served, "MOST_ANSWER_BYTES", 200_000)
    monkeypatch.setattr(answer, "LOOK_BYTES", 20_000)
    server = start(pages=4096, audit=False)
    server.excuse("unread stream")
    # Not streamed: kept until whole. Text is little; log-probabilities are not.
    assert call(server.url, COMPLETIONS, hello(max_tokens=3000, ignore_eos=True)).status == 200
    reply = call(server.url, COMPLETIONS, hello(max_tokens=3000, ignore_eos=True, logprobs=1))
    assert reply.status == 503 and "stream, and read" in reply.json["error"]["message"]
    # Streamed, and read: nothing is held.
    reply = call(server.url, COMPLETIONS, hello(max_tokens=3000, ignore_eos=True, logprobs=1, stream=True))
    assert reply.payload.endswith(b"data: [DONE]\n\n") and b"error" not in reply.payload
    # Streamed, and not read: ended once it holds too much, while another is answered.
    served_model = server.opened.served
    with connect(server.url) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(request(hello(max_tokens=1500, ignore_eos=True, logprobs=1, stream=True, n=32)))
        wait_for(lambda: served_model.num_live > 0, 30)
        # A choice that is over leaves soon, perhaps between two looks.
        wait_for(lambda: any(choice.is_over for choice in list(served_model._live)) or not served_model.num_live, 30)
        assert call(server.url, COMPLETIONS, hello()).status == 200
    wait_for(lambda: served_model.num_live == 0, 30)

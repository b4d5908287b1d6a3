"""Attacks over HTTP on a server in a process of its own, watched from outside.

While each goes on, the server's memory stays within 200 MB of what it had before, and another client waits at most half
a second, by the 99th percentile. Attackers are told why they are refused.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from builders.http_client import Reply, call, raw
from builders.server_process import MIB, Process, assert_short_waits, kvarts_process

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MOST_BYTES = 200 * MIB
MOST_P99_S = 0.5
LEAST_S = float(os.environ.get("KVARTS_ATTACK_S", "0.1"))
"""An attack that is over sooner is begun again: so few calls of the other client say nothing.

.ci/run attacks for longer, with nothing else on the machine."""

KEYS = "victim-key owner=victim\nattacker-key owner=attacker\nthird-key owner=third\n"
VICTIM = {"authorization": "Bearer victim-key"}
ATTACKER = {"authorization": "Bearer attacker-key"}
ADMIN = {"authorization": "Bearer admin-key"}


class Server:
    def __init__(self, process: Process, url: str) -> None:
        self.process = process
        self.url = url

    def call(self, path: str, body: Any = None, headers: Any = ATTACKER, **more: Any) -> Reply:
        return call(self.url, path, body, headers=headers, **more)

    def connect(self) -> socket.socket:
        host, _, port = urlsplit(self.url).netloc.partition(":")
        return socket.create_connection((host, int(port)), timeout=30)

    def under(self, attack: Callable[[], object], *, at_least: int = 1) -> None:
        """Attack, and hold the server to its bounds meanwhile."""
        hello = {"prompt": "hello", "max_tokens": 3}
        assert self.call(COMPLETIONS, hello, VICTIM).status == 200

        def ask() -> None:
            assert self.call(COMPLETIONS, hello, VICTIM).status == 200

        before = self.process.resident_bytes
        self.process.forget_peak()
        waits = assert_short_waits(self.process, ask, attack, most_s=MOST_P99_S, least_s=LEAST_S, at_least=at_least)
        grown = self.process.peak_bytes - before
        print(f"{grown / MIB:.0f} MB, p99 {waits.p99_s:.3f} s of {len(waits.seconds)}")
        assert grown <= MOST_BYTES, f"{grown / MIB:.0f} MB more than before"
        assert self.call(COMPLETIONS, hello, VICTIM).status == 200


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A mock with three owners and an administrator."""
    directory = tmp_path_factory.mktemp("keys")
    keys, admin = directory / "keys", directory / "admin"
    keys.write_text(KEYS)
    admin.write_text("admin-key\n")
    with started("--api-key-file", keys, "--set", f"admin_key_file={admin}") as running:
        yield running


def started(*more: str | Path) -> Any:
    """A mock that is quick, and has room for what an attacker brings."""
    return _started("mock", "--port", "0", "--cost", "linear:step_ms=1", "--pages", "16384", *map(str, more))


class _started:  # noqa: N801
    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self._stack = ExitStack()

    def __enter__(self) -> Server:
        process = self._stack.enter_context(kvarts_process(*self._arguments))
        return Server(process, process.wait_for(r"on (http://\S+)/v1")[1])

    def __exit__(self, *_: object) -> None:
        self._stack.close()


# What a body asks to be built ------------------------------------------------------------------------------


def doubling(depth: int) -> dict[str, Any]:
    """A schema whose value has 2**depth leaves."""
    parts = {f"d{k}": {"type": "array", "minItems": 2, "items": {"$ref": f"#/$defs/d{k + 1}"}} for k in range(depth)}
    return {"$ref": "#/$defs/d0", "$defs": {**parts, f"d{depth}": {"type": "string"}}}


def merging(depth: int) -> dict[str, Any]:
    """A schema that is merged from 2**depth parts."""
    parts = {f"d{k}": {"allOf": [{"$ref": f"#/$defs/d{k + 1}"}] * 2} for k in range(depth)}
    return {"$ref": "#/$defs/d0", "$defs": {**parts, f"d{depth}": {"type": "object"}}}


def array(count: int, items: Any) -> dict[str, Any]:
    return {"type": "array", "minItems": count, "items": items}


def hello() -> list[dict[str, str]]:
    return [{"role": "user", "content": "hello"}]


BOMBS = {
    "nested arrays": array(40, array(1000, {"type": "string", "minLength": 100_000})),
    "doubling": doubling(22),
    "merging": merging(20),
    "a long const": array(1000, {"const": "x" * 1_000_000}),
    "a long enum": array(900, {"enum": [["y" * 99] * 2000]}),
    "required": {"allOf": [{"required": [f"{k}-{n}" for n in range(20_000)]} for k in range(4)]},
    "properties": {"type": "object", "properties": {f"p{k}": array(1000, {}) for k in range(1000)}},
    "a long reference": array(1000, {"$ref": "#/" + "/".join("a" * 100_000)}),
    "texts": array(1000, array(15, {"type": "string"})),
}


@pytest.mark.parametrize(
    ("where", "name"),
    [
        *(("response_format", name) for name in BOMBS),
        *(pytest.param("tools", name, marks=pytest.mark.long if name != "merging" else []) for name in BOMBS),
    ],
)
def test_a_schema_is_refused_before_its_value_is_made(server: Server, name: str, where: str) -> None:
    schema = BOMBS[name]
    body: dict[str, Any] = {"messages": hello(), "max_tokens": 4, "n": 8 if name == "texts" else 1}
    if where == "tools":
        parameters = {"type": "object", "properties": {"value": schema}, "$defs": schema.get("$defs", {})}
        body |= {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]}
        body["tool_choice"] = "required"
    else:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

    def attack() -> None:
        refused = server.call(CHAT, body)
        assert refused.status == 400 and refused.error["param"] in (where, "prompt"), refused.payload[:300]

    server.under(attack)


def test_a_schema_within_its_budget_is_answered_with_a_long_text_in_every_place(server: Server) -> None:
    schema = {"type": "object", "properties": {f"p{k}": {"type": "string"} for k in range(500)}}
    body = {
        "messages": hello(), "max_tokens": 5000, "n": 4,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }  # fmt: skip
    reply = server.call(CHAT, body)
    assert reply.status == 200, reply.payload
    for choice in reply.json["choices"]:
        assert len(json.loads(choice["message"]["content"])) == 500


LONG_ANSWER = {"text": "a b " * 250_000}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        pytest.param(COMPLETIONS, {"prompt": ["a"] * 8000, "n": 128}, "n", marks=pytest.mark.long),
        (COMPLETIONS, {"prompt": ["a"] * 8000}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": list(range(900_000))}, "stop_token_ids"),
        pytest.param(COMPLETIONS, {"prompt": [1] * 1_200_000}, None, marks=pytest.mark.long),
        (COMPLETIONS, {"prompt": [[]] * 1_200_000}, None),
        (COMPLETIONS, {"prompt": "a" * 5_000_000}, "prompt"),
        pytest.param(COMPLETIONS, {"prompt": "a b " * 1_000_000}, "prompt", marks=pytest.mark.long),
        (COMPLETIONS, {"prompt": "a", "stop": ["b" * 1_000_000]}, "stop"),
        (COMPLETIONS, {"prompt": "a", "cache_salt": "b" * 1_000_000}, "cache_salt"),
        (COMPLETIONS, {"prompt": ["x" * 4000] * 1000, "max_tokens": 1}, "prompt"),
        pytest.param(CHAT, {"messages": [{"role": "user", "content": ""}] * 190_000}, None, marks=pytest.mark.long),
        (CHAT, {"messages": hello(), "tools": [{"type": "function"}] * 10_000}, None),
        pytest.param(
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 120_000}]},
            None,
            marks=pytest.mark.long,
        ),
        (RESPONSES, {"input": [{"role": "user", "content": ""}] * 190_000}, None),
        (COMPLETIONS, {"prompt": "a", "n": 99, "max_tokens": 10**7, "kvarts_answer": LONG_ANSWER}, "max_tokens"),
        ("/tokenize", {"prompt": "a b " * 900_000}, "prompt"),
        pytest.param("/detokenize", {"tokens": [5] * 1_100_000}, None, marks=pytest.mark.long),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value),
)
def test_what_a_body_asks_for_is_counted_before_it_is_built(
    server: Server, path: str, body: Any, param: str | None
) -> None:
    payload = json.dumps(body).encode()

    def attack() -> None:
        refused = server.call(path, payload)
        assert refused.status == 400, refused.payload[:300]
        assert param is None or refused.error["param"] == param

    server.under(attack)


LONG = "x - at `$.y`" * 10_000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": "a", "encoding_format": LONG}, "encoding_format"),
        (COMPLETIONS, {"prompt": "a", "kvarts_answer": {LONG: 1}}, "kvarts_answer"),
        (COMPLETIONS, {"prompt": "a", "model": LONG}, "model"),
        (COMPLETIONS, {"prompt": "a", "response_format": {"type": LONG}}, "response_format"),
        (CHAT, {"messages": [{"role": LONG, "content": "a"}]}, None),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": LONG}]}]}, None),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "tool_choice": LONG}, "tool_choice"),
        (RESPONSES, {"input": [{"type": LONG}]}, None),
        ("/v1/messages", {"model": LONG, "max_tokens": 1, "messages": []}, None),
        ("/tokenize", {"prompt": "a", "kv_hints": LONG}, None),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value),
)
def test_an_error_repeats_little_of_a_request(server: Server, path: str, body: Any, param: str | None) -> None:
    refused = server.call(path, body)
    assert len(refused.payload) < 3000, refused.payload[:300]
    if refused.status != 200 and param is not None:
        assert refused.error["param"] == param


@pytest.mark.parametrize(
    ("path", "size", "status"),
    [
        ("/tokenize", 30_000_000, 413),
        ("/tokenize", 4_000_000, 400),
        ("/abort_requests", 100_000, 401),
        (COMPLETIONS, 30_000_000, 413),
        (COMPLETIONS, 8_000_000, 400),
    ],
)
def test_bodies_have_sizes_by_their_routes(server: Server, path: str, size: int, status: int) -> None:
    payload = b'{"prompt": "' + b"a" * size + b'"}'
    headers = {} if status == 401 else ATTACKER

    def attack() -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it need not be read to its end
            assert server.call(path, payload, headers).status == status

    server.under(attack)


def test_a_text_of_long_characters_costs_what_its_bytes_say(server: Server) -> None:
    payload = ('{"prompt": "' + "\U0001f600" + "a" * 7_900_000 + '"}').encode()
    server.under(lambda: server.call(COMPLETIONS, payload), at_least=4)


# What is under way -----------------------------------------------------------------------------------------


def head(path: str, length: int, headers: Any = ATTACKER) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {length}"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode()


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


@pytest.mark.parametrize("headers", [ATTACKER, {}], ids=["with a key", "without a key"])
def test_bodies_that_do_not_come_to_their_end_have_room_for_so_many_bytes(server: Server, headers: Any) -> None:
    part = b'{"prompt": "' + b"a" * 7_000_000

    def attack() -> None:
        with ExitStack() as stack:
            clients = [stack.enter_context(server.connect()) for _ in range(30)]
            threads = [threading.Thread(target=send, args=(client,)) for client in clients]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            time.sleep(0.2)

    def send(client: socket.socket) -> None:
        client.settimeout(2.0)
        with suppress(OSError):
            client.sendall(head(COMPLETIONS, 8_000_000, headers) + part)

    server.under(attack)


def test_who_has_no_key_is_refused_before_its_body_is_read(server: Server) -> None:
    with server.connect() as client:
        client.sendall(head(COMPLETIONS, 8_000_000, {}))
        assert status_of(client.recv(10_000)) == 401


@pytest.mark.parametrize("request_head", [b"GET / HTTP/1.1\r\n\r\n", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"])
def test_heads_that_come_all_at_once_are_answered_up_to_a_cap(server: Server, request_head: bytes) -> None:
    def attack() -> None:
        answer = b""
        with server.connect() as client, suppress(ConnectionError):
            client.settimeout(10)
            with suppress(ConnectionError):
                client.sendall(request_head * 30_000)
            while part := client.recv(1 << 20):
                answer += part
        # The connection is reset where the client still writes; what was sent before may be lost with it.
        assert answer.count(b"HTTP/1.1 ") <= 100

    server.under(attack)


def test_the_last_answer_to_too_many_heads_says_so(server: Server) -> None:
    answer = raw(server.url, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 200, shut=False)
    statuses = [int(line.split(b" ")[1]) for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    assert statuses == [200] * (len(statuses) - 1) + [429] and len(statuses) <= 70


def sent(server: Server, head: bytes, body: bytes) -> bytes:
    """The first line of what is answered to bytes, as far as they are read."""
    with server.connect() as client:
        with suppress(OSError):
            client.sendall(head + body)
        answer = b""
        with suppress(OSError):
            answer = client.recv(65536)
    return answer.partition(b"\r\n")[0]


CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer attacker-key\r\n"
    b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param(b"2\r\n{}\r\n0\r\n" + b"x-t: yyyyyyyyyyyyyy\r\n" * 1_000_000, 431, id="trailers"),
        pytest.param(b"2\r\n{}\r\n0\r\nx-t: " + b"y" * 20_000_000, 431, id="one long trailer"),
        pytest.param(b"2;" + b"x" * 20_000_000, 431, id="an extension"),
        pytest.param(b"1\r\n \r\n" * 1_000_000, 400, id="parts of a byte"),
    ],
)
def test_what_stands_between_the_parts_of_a_body_is_bounded(server: Server, body: bytes, status: int) -> None:
    def attack() -> None:
        first = sent(server, CHUNKED, body)
        assert not first or first.startswith(f"HTTP/1.1 {status}".encode()), first

    server.under(attack, at_least=3)


def test_a_body_in_many_parts_of_some_length_is_read(server: Server) -> None:
    text = json.dumps({"prompt": "the of " * 70_000, "max_tokens": 1}).encode()
    parts = b"".join(b"50\r\n" + text[k : k + 80].ljust(80) + b"\r\n" for k in range(0, len(text), 80))
    assert len(text) // 80 > 4096
    assert sent(server, CHUNKED, parts + b"0\r\n\r\n").startswith((b"HTTP/1.1 200", b"HTTP/1.1 400"))
    short = b"".join(b"1\r\n%c\r\n" % byte for byte in b'{"prompt": "the of", "max_tokens": 1}')
    assert sent(server, CHUNKED, short + b"0\r\nx-t: 1\r\n\r\n").startswith(b"HTTP/1.1 200")


def flood(server: Server, path: str, body: Any, num_clients: int) -> None:
    """Clients that ask the same again and again, for some seconds."""
    until = time.monotonic() + 3.0
    statuses: set[int] = set()

    def ask() -> None:
        while time.monotonic() < until:
            statuses.add(server.call(path, body).status)

    clients = [threading.Thread(target=ask) for _ in range(num_clients)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert 200 in statuses and statuses <= {200, 429}


def test_metrics_are_made_off_the_event_loop(server: Server) -> None:
    server.under(lambda: flood(server, "/metrics", None, 30))


@pytest.mark.parametrize("stream", [False, True])
def test_values_of_schemas_are_made_off_the_event_loop(server: Server, stream: bool) -> None:
    leaves = array(1000, {"type": "array", "minItems": 2, "items": {"type": "integer"}})
    schema = {"type": "object", "properties": {"a": leaves}, "required": ["a"]}
    told = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": hello(), "max_tokens": 2, "response_format": told, "stream": stream}
    server.under(lambda: flood(server, CHAT, body, 20))


def test_one_owner_that_takes_every_place_leaves_those_of_others(server: Server) -> None:
    body = json.dumps({"prompt": "hello", "max_tokens": 100_000, "n": 64, "ignore_eos": True, "stream": True}).encode()

    def attack() -> None:
        with ExitStack() as stack:
            for _ in range(30):
                client = stack.enter_context(server.connect())
                client.sendall(head(COMPLETIONS, len(body)) + body)
            time.sleep(1.0)

    server.under(attack)


def test_prompts_of_one_owner_stand_in_a_line_of_their_own(server: Server) -> None:
    bodies = [json.dumps({"prompt": [7 + k] * 8000, "max_tokens": 50}).encode() for k in range(60)]

    def attack() -> None:
        with ExitStack() as stack:
            for body in bodies:
                client = stack.enter_context(server.connect())
                client.sendall(head(COMPLETIONS, len(body)) + body)
            time.sleep(1.0)

    server.under(attack)


def test_responses_that_are_kept_count_as_memory(server: Server) -> None:
    body = json.dumps({"input": "hello", "metadata": {"a": [[]] * 300_000}, "max_output_tokens": 1}).encode()
    deep = json.dumps({"input": "hello", "tools": [{}] * 120_000, "max_output_tokens": 1}).encode()

    def attack() -> None:
        for payload in (body, deep):
            assert server.call(RESPONSES, payload).status == 200

    server.under(attack, at_least=10)


# Who may what ----------------------------------------------------------------------------------------------


def test_a_priority_is_for_who_may_have_one(server: Server) -> None:
    refused = server.call(COMPLETIONS, {"prompt": "a", "priority": -(2**31) + 1})
    assert (refused.status, refused.error["param"]) == (403, "priority")
    assert server.call(COMPLETIONS, {"prompt": "a", "priority": 0, "max_tokens": 1}).status == 200


def test_owners_do_not_find_what_others_have_computed(server: Server) -> None:
    body = {"prompt": list(range(441)), "max_tokens": 1}

    def cached(headers: Any) -> int:
        usage = server.call(COMPLETIONS, body, headers).json["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(VICTIM), cached(VICTIM), cached(ATTACKER), cached(ATTACKER)] == [0, 432, 0, 432]


def test_sharing_the_prefix_cache_is_an_option(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEYS)
    with started("--api-key-file", keys, "--set", "share_prefix_cache=true") as server:
        body = {"prompt": list(range(441)), "max_tokens": 1}
        server.call(COMPLETIONS, body, VICTIM)
        usage = server.call(COMPLETIONS, body, ATTACKER).json["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 432


@pytest.mark.parametrize("fail", ["die", "stall 99999999s", "503"])
def test_failures_are_off_unless_they_are_allowed(server: Server, fail: str) -> None:
    refused = server.call(COMPLETIONS, {"prompt": "a"}, {**ATTACKER, "x-kvarts-fail": fail})
    assert refused.status == 403 and "--set allow_failures=true" in refused.error["message"]
    assert server.call(COMPLETIONS, {"prompt": "a"}, {**ATTACKER, "x-return-error": "503"}).status == 403
    for asked in ({"health": {"mock": "dead"}}, {"fail": "all: die"}):
        assert server.call("/admin/config", asked, ATTACKER).status == 403
        assert server.call("/admin/config", asked, ADMIN).status == 403
    assert server.call("/health", headers={}).status == 200


def test_a_stall_has_an_end() -> None:
    with started("--set", "allow_failures=true") as server:
        refused = server.call(COMPLETIONS, {"prompt": "a"}, {"x-kvarts-fail": "stall 99999999s"})
        assert refused.status == 400 and "300 s" in refused.error["message"]
        assert server.call(COMPLETIONS, {"prompt": "a"}, {"x-kvarts-fail": "stall 1ms"}).status == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://evil.example", "content-type": "text/plain"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"host": "rebound.evil.example", "origin": "http://rebound.evil.example"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": ""}, 415),
        ({"content-type": "application/json; charset=utf-8"}, 200),
        ({"origin": "http://friend.example"}, 200),
        ({"host": "friend.example"}, 200),
        ({"host": "localhost:80"}, 200),
        ({"host": "[::1]:80"}, 200),
    ],
    ids=str,
)
def test_pages_of_other_origins_change_nothing(page_server: Server, headers: dict[str, str], status: int) -> None:
    asked = {"content-type": "application/json", **headers}
    assert page_server.call("/admin/config", {"max_queued": 1024}, asked).status == status
    if status == 403:
        assert page_server.call(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, asked).status == status


@pytest.fixture(scope="module")
def page_server() -> Iterator[Server]:
    with started("--set", "allow_origin=http://friend.example", "--set", "allow_host=friend.example") as running:
        yield running


def test_pages_of_an_origin_that_is_allowed_may_ask_and_read(page_server: Server) -> None:
    asked = "authorization,content-type,x-stainless-lang,x-stainless-retry-count"  # of OpenAI's SDK in a browser
    asks = {"access-control-request-method": "POST", "access-control-request-headers": asked}
    for origin, is_allowed in (("http://friend.example", True), ("http://evil.example", False)):
        headers = {"origin": origin, "host": "friend.example"}
        reply = page_server.call(COMPLETIONS, None, {**headers, **asks}, method="OPTIONS")
        assert reply.status == (200 if is_allowed else 405)
        assert reply.headers.get("access-control-allow-origin") == (origin if is_allowed else None)
        assert reply.headers.get("access-control-allow-headers") == (asked if is_allowed else None)
        reply = page_server.call(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, headers)
        assert reply.status == (200 if is_allowed else 403)
        assert reply.headers.get("access-control-allow-origin") == (origin if is_allowed else None)
        exposed = "x-request-id, retry-after" if is_allowed else None
        assert reply.headers.get("access-control-expose-headers") == exposed
    asks["access-control-request-headers"] = "x-good; x-bad=1"
    reply = page_server.call(
        COMPLETIONS, None, {"origin": "http://friend.example", "host": "friend.example", **asks}, method="OPTIONS"
    )
    assert reply.status == 200 and "bad" not in reply.headers["access-control-allow-headers"]


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (("--api-key", ""), {}),
        (("--api-key", " "), {}),
        (("--set", "admin_key="), {}),
        (("--api-key-file", "{empty}"), {}),
        (("--set", "admin_key_file={empty}"), {}),
        ((), {"VLLM_API_KEY": ""}),
        (("--api-key", "same", "--set", "admin_key=same"), {}),
    ],
)
def test_a_key_that_is_none_does_not_open_the_server(
    arguments: tuple[str, ...], environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path / "empty"
    empty.write_text("# nothing yet\n")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    given = [argument.replace("{empty}", str(empty)) for argument in arguments]
    with kvarts_process("mock", "--port", "0", *given) as process:
        assert process.popen.wait(60) in (2, 4)
        process._reader.join(5)
        assert "Traceback" not in "".join(process.lines)


def test_kept_sessions_need_owners_with_names(tmp_path: Path) -> None:
    keys, state = tmp_path / "keys", tmp_path / "state"
    keys.write_text("one owner=a\ntwo\n")
    with kvarts_process("mock", "--port", "0", "--api-key-file", str(keys), "--state-dir", str(state)) as process:
        assert process.popen.wait(60) == 2
        process._reader.join(5)
        assert "owner=NAME" in "".join(process.lines) and not state.exists()


def test_a_key_on_a_command_line_is_said_to_be_readable() -> None:
    with started("--api-key", "secret") as server:
        assert any("--api-key-file" in line for line in server.process.lines)
        assert not any("secret" in line for line in server.process.lines)


# Two tenants, and a third that attacks ---------------------------------------------------------------------


OWNERS = ("victim", "third", "attacker")


def questions(owner: str) -> list[dict[str, Any]]:
    """What a tenant asks: some of it again and again, so that it is found in the cache."""
    return [
        {"prompt": [len(owner) + k % 3] * 40 + [k], "max_tokens": 24, "temperature": 1.0, "seed": k, "ignore_eos": True}
        for k in range(12)
    ]


def answer_to(server: Server, owner: str, body: dict[str, Any]) -> str:
    reply = server.call(COMPLETIONS, body, {"authorization": f"Bearer {owner}-key"})
    assert reply.status == 200, reply.payload
    return str(reply.json["choices"][0]["text"])


@pytest.mark.long
@pytest.mark.parametrize("shares", [(1, 1, 1), (2, 1, 1)])
def test_tenants_under_attack_get_the_same_answers_and_their_shares(tmp_path: Path, shares: tuple[int, ...]) -> None:
    keys = tmp_path / "keys"
    lines = [f"{owner}-key owner={owner} share={share}" for owner, share in zip(OWNERS, shares, strict=True)]
    keys.write_text("\n".join(lines))
    small = ("--max-seqs", "24", "--set", "max_queued=200", "--cost", "linear:step_ms=4")
    tenants = OWNERS[:2]
    with started("--api-key-file", keys, *small) as server:
        alone = {owner: [answer_to(server, owner, body) for body in questions(owner)] for owner in tenants}
    with started("--api-key-file", keys, *small, "--audit") as server:
        stop = threading.Event()
        tokens = dict.fromkeys(OWNERS, 0)
        counting = threading.Lock()
        wrong: list[str] = []

        def ask(owner: str, number: int) -> None:
            while not stop.is_set():
                text = answer_to(server, owner, questions(owner)[number])
                if text != alone[owner][number]:
                    wrong.append(text)
                with counting:
                    tokens[owner] += 24

        def attack() -> None:
            flood = {"prompt": "flood", "max_tokens": 60, "n": 3, "ignore_eos": True}
            # All that the attacker may, and what is refused only after some work.
            useless = [{"prompt": "the " * 100_000, "n": 128}, {"prompt": ["a"] * 5000}, {"prompt": [[1]] * 200}]
            while not stop.is_set():
                with suppress(OSError):
                    server.call(COMPLETIONS, useless[threading.get_native_id() % 3])
                    reply = server.call(COMPLETIONS, flood)
                    if reply.status == 429:
                        time.sleep(0.02)
                    with counting:
                        tokens["attacker"] += 180 * (reply.status == 200)

        flooding = [threading.Thread(target=attack) for _ in range(30)]
        # More than its share runs at once: what an owner does not ask for goes to others.
        asks = [(owner, k % 12) for owner, share in zip(tenants, shares, strict=False) for k in range(18 * share)]
        asking = [threading.Thread(target=ask, args=each) for each in asks]
        for thread in (*flooding, *asking):
            thread.start()
        time.sleep(1.0)
        before = dict(tokens)
        time.sleep(4.0)
        got = {owner: tokens[owner] - before[owner] for owner in OWNERS}
        stop.set()
        for thread in (*flooding, *asking):
            thread.join(30)
        assert wrong == []
        together = sum(got.values())
        # What is under way at both ends of the time counts as a whole answer or not at all.
        for owner, share in zip(tenants, shares, strict=False):
            assert got[owner] >= 0.9 * together * share / sum(shares) - 6 * 24, got


@pytest.mark.long
def test_two_thousand_connections_that_are_idle_half_sent_or_streaming(server: Server) -> None:
    """All are open at once. What they held is released when they close."""
    descriptors = Path(f"/proc/{server.process.popen.pid}/fd")
    body = json.dumps({"prompt": "hello", "max_tokens": 400, "stream": True, "ignore_eos": True}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer attacker-key\r\n".encode()
    whole = head + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body

    def wait_for(is_met: Callable[[int], bool]) -> None:
        until = time.monotonic() + 60
        while not is_met(count := len(list(descriptors.iterdir()))):
            assert time.monotonic() < until, count
            time.sleep(0.1)

    before = len(list(descriptors.iterdir()))

    def attack() -> None:
        with ExitStack() as stack:
            for number in range(2000):
                connection = stack.enter_context(server.connect())
                connection.sendall((b"", head, whole if number % 10 == 2 else b"")[number % 3])
            wait_for(lambda count: count >= before + 1900)

    server.under(attack)
    wait_for(lambda count: count <= before + 10)

"""Requests leave nothing to the garbage collector: reference counts free what a request held when it ends."""

from __future__ import annotations

import gc
import http.client
import json
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakSet

import pytest

from kvarts.base.tenants import Owner
from kvarts.doors.openai.connection import Connection
from kvarts.doors.openai.running import RunningServer

from builders.http_client import call

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
KEYS = {"one": Owner(name="one"), "two": Owner(name="two")}
NUM = 20
Start = Callable[..., RunningServer]


def left_by(server: RunningServer, ask: Callable[[], object]) -> Counter[str]:
    """Objects of kvarts, by class, that NUM runs of `ask` leave to the collector."""
    ask()
    server.settle()
    gc.collect()
    before = gc.get_objects()
    """Kept until the end, so that servers of earlier tests whose threads end meanwhile are not found."""
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(NUM):
            ask()
        server.settle()
        time.sleep(0.05)  # for what the event loop does after an answer
        gc.collect()
        kinds = Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.garbage)
        return Counter({kind: count for kind, count in kinds.items() if kind.startswith("kvarts")})
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        before.clear()
        gc.enable()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "hello", "max_tokens": 3}),
        (COMPLETIONS, {"prompt": "hello", "max_tokens": 3, "stream": True}),
        (COMPLETIONS, {"prompt": "hello", "max_tokens": 3, "n": 3, "echo": True, "logprobs": 2}),
        (COMPLETIONS, {"prompt": 7}),
        (CHAT, {**HELLO, "stream": True, "stop": ["no such text"]}),
        (CHAT, {**HELLO, "response_format": {"type": "json_object"}}),
        (RESPONSES, {"input": "hello", "max_output_tokens": 3, "store": False}),
        ("/v1/messages", HELLO),
        ("/v1/embeddings", {"input": "hello"}),
        ("/tokenize", {"prompt": "hello"}),
        ("/nothing", {}),
    ],
)
@pytest.mark.parametrize("owners", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_request_leaves_nothing_to_the_collector(start: Start, path: str, body: dict[str, Any], owners: int) -> None:
    server = start(api_key=KEYS if owners > 1 else None)
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc)
    headers = {"content-type": "application/json", "authorization": "Bearer one"}

    def ask() -> None:
        connection.request("POST", path, json.dumps(body), headers)
        connection.getresponse().read()

    with closing(connection):
        assert left_by(server, ask) == Counter()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_leaves_nothing_to_the_collector(start: Start, stream: bool) -> None:
    server = start()
    payload = json.dumps({"prompt": "hello", "max_tokens": 3000, "ignore_eos": True, "stream": stream})

    def leave() -> None:
        connection = http.client.HTTPConnection(urlsplit(server.url).netloc)
        connection.request("POST", COMPLETIONS, payload, {"content-type": "application/json"})
        while not server.opened.served.num_live:
            time.sleep(0.001)
        connection.close()
        server.settle()

    assert left_by(server, leave) == Counter()


def test_an_answer_that_is_cut_leaves_nothing_to_the_collector(start: Start) -> None:
    server = start(allows_failures=True)
    body, cut = {"prompt": "hello", "max_tokens": 9, "stream": True}, {"x-kvarts-fail": "cut after 2 chunks"}

    def ask() -> None:
        with suppress(http.client.HTTPException, ConnectionError):
            call(server.url, COMPLETIONS, body, headers=cut)

    assert left_by(server, ask) == Counter()


def test_connections_that_are_reset_are_forgotten_at_once(start: Start) -> None:
    server = start()
    payload = b'{"prompt": "hello", "max_tokens": 1}'
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload
    host, _, port = urlsplit(server.url).netloc.partition(":")

    def alive() -> list[Connection]:
        gc.collect()
        # The type of an object, since isinstance follows weak proxies, also those whose object is gone.
        return [each for each in gc.get_objects() if issubclass(type(each), Connection)]

    of_others = WeakSet(alive())
    """Connections to other servers of this process, which may end at any time."""

    def num_left() -> int:
        return sum(each not in of_others for each in alive())

    for _ in range(NUM):
        with socket.create_connection((host, int(port))) as client:
            client.sendall(request)
            assert client.recv(4096)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    deadline = time.monotonic() + 10
    while num_left() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert num_left() == 0

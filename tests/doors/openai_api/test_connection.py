"""One HTTP connection: requests may arrive in any pieces, and those that ask for another protocol are answered."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import closing, suppress
from urllib.parse import urlsplit

import pytest

from kvarts.doors.openai.running import RunningServer

Start = Callable[..., RunningServer]
BODY = json.dumps({"prompt": "hello", "max_tokens": 2}).encode()
PATH = "/v1/completions"


def head(*lines: str, version: str = "1.1", length: int = len(BODY)) -> bytes:
    fixed = (f"POST {PATH} HTTP/{version}", "host: x", "content-type: application/json", f"content-length: {length}")
    return "\r\n".join((*fixed, *lines, "", "")).encode()


def exchange(server: RunningServer, *pieces: bytes, is_done: Callable[[bytes], bool]) -> bytes:
    """Send each piece after the server has read the previous one; return the answer up to `is_done`, or the end."""
    host, _, port = urlsplit(server.url).netloc.partition(":")
    came = b""
    with closing(socket.create_connection((host, int(port)), timeout=10)) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number, piece in enumerate(pieces):
            if number:
                time.sleep(0.002)
            client.sendall(piece)
        while not is_done(came):
            part = b""
            with suppress(ConnectionResetError):
                part = client.recv(1 << 16)
            if not part:
                break
            came += part
    return came


def answers(num: int) -> Callable[[bytes], bool]:
    return lambda came: came.count(b'"usage"') >= num


def never(_: bytes) -> bool:
    return False


@pytest.mark.parametrize("at", ["upg", "rade: h2c", "\r\n\r\n{", "pt"])
def test_a_request_for_another_protocol_is_answered_wherever_it_is_split(start: Start, at: str) -> None:
    whole = head("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQ") + BODY
    cut = whole.lower().index(at.encode()) + 1
    server = start()
    came = exchange(server, whole[:cut], whole[cut:] + head() + BODY, is_done=answers(2))
    assert came.count(b"HTTP/1.1 200 OK") == 2
    assert [seen.body["prompt"] for seen in server.requests] == ["hello", "hello"]
    assert "upgrade" not in server.requests[0].headers


def test_a_head_that_asks_for_another_protocol_is_no_way_around_framing(start: Start) -> None:
    smuggled = head() + BODY
    lines = ("Connection: upgrade", "Upgrade: websocket", "Transfer-Encoding: chunked")
    server = start()
    came = exchange(server, head(*lines) + b"0\r\n\r\n" + smuggled, is_done=never)
    assert b"HTTP/1.1 400" in came and b"200 OK" not in came
    assert server.requests == []


@pytest.mark.parametrize("lines", ["", "Connection: upgrade\r\nUpgrade: h2c\r\n", "content-length: 4\r\n"])
def test_a_request_for_a_tunnel_gets_one_answer_and_the_end_of_its_connection(start: Start, lines: str) -> None:
    server = start()
    tunnel = f"CONNECT /x HTTP/1.1\r\nhost: x\r\n{lines}\r\n".encode()
    came = exchange(server, head() + BODY + tunnel + head() + BODY, is_done=never)
    assert came.count(b"HTTP/1.1 ") == 2 and came.count(b"HTTP/1.1 404 ") == 1
    assert len(server.requests) == 1


def test_every_byte_may_come_alone(start: Start) -> None:
    whole = head() + BODY
    came = exchange(start(), *(whole[k : k + 1] for k in range(len(whole))), is_done=answers(1))
    assert came.startswith(b"HTTP/1.1 200 OK\r\n")


def test_an_old_client_gets_a_stream_without_chunks_and_the_end_of_its_connection(start: Start) -> None:
    body = json.dumps({"prompt": "hello", "max_tokens": 2, "stream": True}).encode()
    came = exchange(start(), head(version="1.0", length=len(body)) + body, is_done=never)
    top, _, events = came.partition(b"\r\n\r\n")
    assert b"connection: close" in top and b"transfer-encoding" not in top
    assert events.startswith(b"data: {") and events.endswith(b"data: [DONE]\n\n")


def test_a_client_that_waits_to_continue_is_asked_for_the_body(start: Start) -> None:
    came = exchange(start(), head("Expect: 100-continue"), is_done=lambda came: b"\r\n\r\n" in came)
    assert came == b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.mark.parametrize("failure", ["499", "599"])
def test_a_status_without_a_name_is_sent(start: Start, failure: str) -> None:
    came = exchange(start(fail=failure), head("Connection: close") + BODY, is_done=never)
    assert came.startswith(f"HTTP/1.1 {failure} \r\n".encode())

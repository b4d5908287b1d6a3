"""Requests of other people's clients, byte for byte as they were sent: docs/clients.md says by which versions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvarts.doors.openai.running import RunningServer

from builders.http_client import raw

RECORDED = sorted(Path(__file__).with_name("recorded").glob("*.http"))


def dechunked(payload: bytes) -> bytes:
    parts = []
    while payload:
        size, _, payload = payload.partition(b"\r\n")
        parts.append(payload[: int(size, 16)])
        payload = payload[int(size, 16) + 2 :]
    return b"".join(parts)


@pytest.fixture(scope="module")
def dummy() -> Iterator[RunningServer]:
    with RunningServer(served_model_name="dummy", output_tokens=8) as running:
        yield running


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_request_is_answered_as_its_client_expects(path: Path, dummy: RunningServer) -> None:
    request = path.read_bytes()
    head, _, body = request.partition(b"\r\n\r\n")
    method = head.split(b" ", 1)[0]
    closing = head.replace(b"Connection: keep-alive\r\n", b"") + b"\r\nconnection: close\r\n\r\n" + body
    told, _, payload = raw(dummy.url, closing, shut=False).partition(b"\r\n\r\n")
    assert told.startswith(b"HTTP/1.1 200 "), told + payload
    asked = json.loads(body) if body else {}
    if asked.get("stream"):
        text = dechunked(payload)
        assert text.endswith(b"data: [DONE]\n\n")
        events = [json.loads(line[6:]) for line in text.decode().split("\n\n")[:-2]]
        options = asked.get("stream_options") or {}
        assert (events[-1].get("usage") is not None) == bool(options.get("include_usage"))
        if options.get("continuous_usage_stats"):
            assert all(event["usage"] for event in events[1:])
    elif "tokenize" in path.stem:
        assert json.loads(payload)["prompt" if "detokenize" in path.stem else "count"]
    elif method == b"POST":
        assert json.loads(payload)["usage"]["total_tokens" if "responses" not in path.stem else "output_tokens"]
    else:
        assert bool(payload) == (method == b"GET" and "health" not in path.stem)


def test_every_client_of_the_page_is_recorded() -> None:
    clients = {path.stem.split("-GET-")[0].split("-POST-")[0].split("-HEAD-")[0] for path in RECORDED}
    assert {"aiperf-chat", "aiperf-completions", "guidellm", "openai-2", "openai-3", "vllm-bench"} <= clients

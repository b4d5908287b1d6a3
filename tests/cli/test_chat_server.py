"""`kvarts chat` with a server of OpenAI's API, and with a mock."""

from __future__ import annotations

import io
import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., tuple[int, str, str]]


def typed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_a_chat_with_a_mock_needs_nothing_and_writes_words(kvarts: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, "hello\n\nand again\n")
    code, out, err = kvarts("chat", "--mock", "--max-tokens", "40", "--ignore-eos")
    assert code == 0
    first, second = out.splitlines()
    assert len(first.split()) == len(second.split()) == 40 and first.islower()
    told = [re.fullmatch(r"kvarts: TTFT \d+ ms, 40 tokens, [\d.]+ tokens/s, (\d+) of (\d+) prompt tokens found, "
                         r"ended by length", line) for line in err.splitlines()]  # fmt: skip
    assert all(told) and [int(one[1]) > 30 for one in told if one] == [False, True]  # the first turn is hit


def test_a_chat_with_a_server_sends_the_conversation(
    kvarts: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from kvarts.openai_api.running import RunningServer

    answers = [{"turn": 1, "reasoning": "Hm.", "text": "One ä."}, {"turn": 2, "text": "Two."}, {"fail": "503"}]
    token = tmp_path / "token"
    token.write_text("secret\n")
    with RunningServer(model="some-name", api_key="secret", answers=answers) as server:
        server.excuse("missing retry")
        typed(monkeypatch, "a\nb\nc\n")
        options = ("chat", "--address", server.base_url, "--token-file", token, "--temperature", "0.5", "--seed", "3")
        code, out, err = kvarts(*options)
        assert (code, out.splitlines()) == (2, ["One ä.", "Two.", ""]) and "Hm." in err and "answers 503" in err
        body = server.requests[1].body
        assert [message["content"] for message in body["messages"]] == ["a", "One ä.", "b"]
        assert (body["model"], body["temperature"], body["seed"]) == ("some-name", 0.5, 3)
        assert "max_tokens" not in body
        typed(monkeypatch, "a\n")
        code, _, err = kvarts("chat", "--address", server.url)
        assert (code, err.count("\n")) == (2, 1) and "answers 401" in err
        assert "answers 404" in kvarts("chat", "--address", server.url, "--token-file", token, "--model", "x")[2]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--address", "http://127.0.0.1:1"), "127.0.0.1:1: cannot be reached"),
        (("--address", "http://"), "address: is not a URL"),
        (("--mock", "--sink", "3"), "sink: is of sessions"),
        (("--address", "http://127.0.0.1:1", "--window", "8"), "window: is of sessions"),
    ],
)
def test_mistakes_are_one_line(arguments: Any, says: str, kvarts: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, "a\n")
    code, out, err = kvarts("chat", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1) and says in err


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (b"", "an empty answer"),
        (b"data: {\n\n", "the answer broke off"),
        (b'data: {"error": {"message": "full"}}\n\n', "full"),
        (b": a comment\n\ndata: {\"choices\": []}\n\ndata: [DONE]\n\n", "an empty answer"),
    ],
)  # fmt: skip
def test_odd_answers(payload: bytes, says: str, kvarts: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(json.dumps({"data": [{"id": "m"}]}).encode())

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self._send(payload)

        def _send(self, body: bytes) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        typed(monkeypatch, "a\n")
        _, _, err = kvarts("chat", "--address", f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert says in err and "Traceback" not in err

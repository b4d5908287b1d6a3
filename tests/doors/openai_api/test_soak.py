"""Many clients at once, some of which go, send nonsense, or do not read: no page is lost, and every error is told."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

import pytest

from builders.http_client import OpenStream, call, raw

COMPLETIONS = "/v1/completions"


def misbehave(url: str, seed: int, until_s: float, seen: Counter[str], wrong: list[str]) -> None:
    """One client that does something else every time."""
    rng = random.Random(seed)
    while time.monotonic() < until_s:
        prompt = [rng.randrange(5)] * rng.randrange(1, 60)
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": rng.randrange(1, 60), "n": rng.choice([1, 1, 2])}
        kind = rng.choice(["whole", "whole", "stream", "leave", "nonsense", "half", "bad"])
        seen[kind] += 1
        try:
            if kind == "whole":
                status = call(url, COMPLETIONS, body).status
                if status not in (200, 400, 429):
                    wrong.append(f"{status}")
                seen[f"status {status}"] += 1
            elif kind == "stream":
                with OpenStream(url, COMPLETIONS, {**body, "stream": True}) as stream:
                    if b"[DONE]" not in (told := stream.read()) and b'"error"' not in told:
                        wrong.append(f"{told[-200:]!r}")
            elif kind == "leave":
                with OpenStream(url, COMPLETIONS, {**body, "stream": rng.random() < 0.5}):
                    time.sleep(rng.random() * 0.02)
            elif kind == "nonsense":
                raw(url, rng.randbytes(rng.randrange(1, 200)) + b"\r\n\r\n")
            elif kind == "half":
                host, _, port = urlsplit(url).netloc.partition(":")
                with socket.create_connection((host, int(port)), timeout=5) as half:
                    half.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 90\r\n\r\n{")
            else:
                reply = call(url, COMPLETIONS, rng.choice([b"{", b"\xff", b"[1]", b'{"prompt": [-1]}', b'{"n": 1e9}']))
                if reply.status != 400 or reply.error["code"] != 400:
                    wrong.append(f"{reply.status}")
        except (ConnectionError, TimeoutError) as error:
            if kind not in ("nonsense", "half", "leave"):
                wrong.append(repr(error))


def soak(server: Any, seconds: float, clients: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    wrong: list[str] = []
    until_s = time.monotonic() + seconds
    threads = [
        threading.Thread(target=misbehave, args=(server.url, seed, until_s, seen, wrong)) for seed in range(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    deadline = time.monotonic() + 10
    while server.opened.served.num_live and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.opened.served.num_live == 0
    server.assert_conserved()
    return seen


def test_no_page_is_lost_whatever_clients_do(start: Any) -> None:
    server = start(pages=64, page_size=4, max_seqs=4, max_queued=4, cost="linear:step_ms=0.2")
    seen = soak(server, 1.5, 6)
    assert len(seen) >= 6


@pytest.mark.long
def test_no_page_is_lost_in_a_minute_at_the_knee(start: Any) -> None:
    server = start(pages=400, page_size=4, max_seqs=16, max_queued=8, cost="linear:step_ms=0.5")
    seen = soak(server, 60.0, 24)
    assert seen["status 200"] > 100 and seen["status 429"] > 0


@pytest.mark.long
def test_two_thousand_connections_at_once_are_answered_or_refused(start: Any) -> None:
    server = start(pages=2000, max_seqs=64, max_queued=500, cost="linear:step_ms=0.2")
    statuses: Counter[int] = Counter()
    lock = threading.Lock()

    def one() -> None:
        status = call(server.url, COMPLETIONS, {"prompt": "hello", "max_tokens": 20}).status
        with lock:
            statuses[status] += 1

    threads = [threading.Thread(target=one) for _ in range(2000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(statuses) <= {200, 429} and sum(statuses.values()) == 2000

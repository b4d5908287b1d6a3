"""Many clients of a few sessions, that edit their past, leave in the midst and come too often: no page is lost."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest

from kvarts.cost.polynomial import LinearCost
from kvarts.doors.openai.running import RunningServer
from kvarts.run.sessions.values import SessionsConfig, SessionSettings

from builders.http_client import OpenStream, call

COMPLETIONS = "/v1/completions"
Start = Callable[..., RunningServer]


@pytest.mark.parametrize("window", [12, None])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_no_page_is_lost_whatever_clients_of_sessions_do(start: Start, window: int | None, seed: int) -> None:
    config = SessionsConfig(
        defaults=SessionSettings(sink=2, window=window),
        max_sessions=5,
        at_capacity="evict",
        max_pages=40,
        chunk_tokens=16,
    )
    server = start(
        pages=96, page_size=4, max_seqs=6, max_batched_tokens=32, max_queued=30, cost=LinearCost(step_ms=0.2),
        sessions=config, max_model_len=200,
    )  # fmt: skip
    seen: Counter[int] = Counter()
    wrong: list[str] = []

    def client(number: int) -> None:
        draw = random.Random(seed * 100 + number)
        for _ in range(12):
            prompt = [draw.randrange(3) for _ in range(draw.randrange(1, 120))]
            body = {"prompt": prompt, "max_tokens": draw.randrange(1, 40), "session_id": f"s{draw.randrange(7)}"}
            if draw.random() < 0.2:
                body["cache_salt"] = "t"
            if draw.random() < 0.2:
                del body["session_id"]
            if draw.random() < 0.3:
                with OpenStream(server.url, COMPLETIONS, {**body, "stream": True}):
                    time.sleep(draw.random() * 0.02)
                continue
            if draw.random() < 0.03:
                call(server.url, "/abort_requests", {})
            reply = call(server.url, COMPLETIONS, {**body, "stream": draw.random() < 0.5})
            seen[reply.status] += 1
            if reply.status not in (200, 400, 429) or (
                reply.status == 400 and "can never" not in reply.error["message"]
            ):
                wrong.append(f"{reply.status} {reply.payload[:300]!r}")

    clients = [threading.Thread(target=client, args=(number,)) for number in range(10)]
    for each in clients:
        each.start()
    for each in clients:
        each.join(60)
    assert wrong == [] and seen[200] > 20
    server.settle(5.0)
    served = server.opened.served
    assert served.num_live == 0 and served.sessions is not None
    counts = served.sessions.counts()
    assert counts is not None and counts.num_sessions <= 5 and counts.num_reserved_pages <= 40
    if window is not None:
        server.assert_conserved()

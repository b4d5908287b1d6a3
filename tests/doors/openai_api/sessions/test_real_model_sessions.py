"""Sessions of a real model over HTTP: without a window its answers are those without a session."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from kvarts.core.config import EngineConfig
from kvarts.doors.openai.opening import Door, open_model
from kvarts.doors.openai.server import Address, OpenAIServer
from kvarts.doors.openai.sessions.door import open_own
from kvarts.run.sessions.values import SessionsConfig, SessionSettings
from kvarts.run.torch.tiny import write_tiny

from builders.http_client import call, events_of

CONFIG = EngineConfig(num_pages=256, page_size=4, max_num_batched_tokens=64, max_num_seqs=8)


def _logprobs_of(payload: bytes, *, is_stream: bool) -> list[float]:
    """Return the log-probability of each token, and of the likeliest two in its place."""
    bodies = events_of(payload) if is_stream else [json.loads(payload)]
    told = [choice["logprobs"] for body in bodies for choice in body["choices"] if choice["logprobs"]]
    return [
        value
        for part in told
        for own, likeliest in zip(part["token_logprobs"], part["top_logprobs"], strict=True)
        for value in (own, *likeliest.values())
    ]


def test_a_real_model_goes_on_with_its_sessions(tmp_path: Path) -> None:
    write_tiny("qwen3", tmp_path / "tiny")

    async def run(window: int | None) -> list[Any]:
        opened = open_model(str(tmp_path / "tiny"), Door(names=("tiny",)), config=CONFIG, audit=window is None)
        config = SessionsConfig(defaults=SessionSettings(sink=2, window=window), at_capacity="evict")
        opened.served.sessions = open_own(opened.served, config)
        server = OpenAIServer(opened.app, opened.models, Address(port=0))
        await server.start()

        async def complete(**body: Any) -> Any:
            asked = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, **body}
            return await asyncio.to_thread(call, server.url, "/v1/completions", asked)

        try:
            prompt = list(range(40, 70))
            told = [(await complete(prompt=prompt[:length], session_id="a")).json for length in (20, 25, 30)]
            (plain,) = [(await complete(prompt=prompt)).json]
            assert told[2]["choices"] == plain["choices"] or window is not None
            streamed = events_of((await complete(prompt=prompt, session_id="b", stream=True)).payload)
            assert "".join(event["choices"][0]["text"] for event in streamed) == told[2]["choices"][0]["text"]
            for stream in (False, True):
                names = [{"session_id": "c"}, {}] if window is None else [{"session_id": "c"}]
                asked = [await complete(prompt=prompt, logprobs=2, stream=stream, **name) for name in names]
                of_tokens = [_logprobs_of(reply.payload, is_stream=stream) for reply in asked]
                assert all(of_each == pytest.approx(of_tokens[0]) for of_each in of_tokens)
                # Tokens of one text are one entry among the likeliest.
                assert 6 + 6 < len(of_tokens[0]) <= 6 * 3 and max(of_tokens[0]) < 0
            counts = opened.served.sessions.counts()
            assert counts is not None and counts.num_sessions == 3
            assert (counts.num_reserved_pages > 0) == (window is not None)
        finally:
            await server.stop(1.0)
        opened.served.host.loop.call(lambda _: opened.served.host.core.scheduler.check())
        return [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in told]

    # What was said is cut off again: of a page that is not full, an unbounded session has nothing.
    assert asyncio.run(run(None)) == [0, 20, 24]
    assert asyncio.run(run(32)) == [0, 20, 25]

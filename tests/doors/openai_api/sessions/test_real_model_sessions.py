"""Sessions of a real model over HTTP: without a window its answers are those without a session."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import AbstractContextManager
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("torch")

from kvarts.core.config import EngineConfig
from kvarts.doors.openai.opening import Door, open_model
from kvarts.doors.openai.server import Address, OpenAIServer
from kvarts.doors.openai.sessions.door import open_own
from kvarts.run.sessions.values import SessionsConfig, SessionSettings
from kvarts.run.torch.tiny import write_tiny

from builders.http_client import OpenStream, call, events_of
from builders.real_model import real_model
from builders.server_process import Process, python_process

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


@pytest.mark.long
@pytest.mark.parametrize(
    ("weights", "window", "retention"),
    [("tiny", "all", "cache"), ("tiny", "40", ""), ("real", "all", "cache"), ("real", "all", "pin")],
)
def test_a_model_that_speculates_is_killed_and_says_the_same(
    weights: str, window: str, retention: str, tmp_path: Path
) -> None:
    """An answer that was cut by a kill is a prefix of the answer without a kill and without speculation."""
    model = real_model() if weights == "real" else tmp_path / "tiny"
    if weights == "tiny":
        write_tiny("qwen3", model)
    random = Random(5)
    prompts = [[random.randrange(40, 44) for _ in range(24)] for _ in range(3)]
    plain = ("--set", f"session_window={window}")
    more: tuple[object, ...] = (*plain, "--state-dir", tmp_path / "state", "--speculative-config", "ngram")
    if retention:
        more = (*more, "--set", f"session_retention={retention}")

    def serve(*words: object) -> AbstractContextManager[Process]:
        memory = "64MiB" if weights == "real" else "4MiB"
        fixed = ("--port", 0, "--kv-memory", memory, "--set", "page_size=4", "--set", "layers=model")
        return python_process("kvarts", "serve", "model", "--model", str(model), *map(str, (*fixed, *words)))

    def body(number: int) -> dict[str, Any]:
        asked = {"max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}
        return {"prompt": prompts[number], **asked}

    def said(events: list[Any]) -> str:
        return "".join(event["choices"][0]["text"] for event in events if event["choices"])

    def url_of(process: Process) -> str:
        return process.wait_for(r"(http://127\.0\.0\.1:\d+)/v1")[1]

    with serve(*plain) as process:
        url = url_of(process)
        asked = [{**body(number), "session_id": f"s{number}"} for number in range(3)]
        expected = [said(events_of(call(url, "/v1/completions", each).payload)) for each in asked]
    num_accepted = 0.0
    for kill in range(3):
        with serve(*more) as process:
            url = url_of(process)
            number = kill % 3
            assert said(events_of(call(url, "/v1/completions", {**asked[number]}).payload)) == expected[number]
            counts = call(url, "/metrics").payload.decode()
            [line] = [
                line for line in counts.splitlines() if line.startswith("vllm:spec_decode_num_accepted_tokens_total")
            ]
            num_accepted += float(line.rpartition(" ")[2])
            number = random.randrange(3)
            with OpenStream(url, "/v1/completions", asked[number]) as stream:
                got = stream.begin()
                while got.count(b"data: ") < random.randrange(1, 40):
                    got += stream.begin()
                process.popen.send_signal(signal.SIGKILL)
            lines = got.split(b"\r\n\r\n", 1)[1].split(b"\n")
            told = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {") and line.endswith(b"}")]
            assert told
            assert expected[number].startswith(said(told))
    assert num_accepted > 0 or window != "all"

"""KV events of several models behind one address: each has a stream of its own, as engines of one model each have."""

from __future__ import annotations

import asyncio
import random
import re
import signal
import threading
from collections.abc import Callable

import pytest

pytest.importorskip("zmq")

from kvarts.base.errors import ConfigError
from kvarts.core.sampling import SamplingParams
from kvarts.doors.kv_events.batches import KvEventsConfig
from kvarts.doors.openai.opening import Door, MockSettings
from kvarts.doors.openai.running import open_mock
from kvarts.doors.openai.served import Ask, Limits
from kvarts.run.llm_engine import LLMEngine
from openai_api.sharing.test_several_parity import shared

from builders import preforked
from builders.http_client import call
from builders.kv_event_client import open_client
from builders.kv_events import Consumed
from builders.parity import HeardBy
from builders.ports import free_ports
from oracles.naive_kv_events import NaiveConsumer

Run = Callable[..., int]


@pytest.mark.parametrize("has_host", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_consumer_of_each_model_holds_what_that_model_holds(has_host: bool) -> None:
    draw = random.Random(5)
    consumed = {name: Consumed() for name in ("chat", "code")}
    config = shared(60, 16, 6, has_host=has_host, step_ms=0.01)
    opened = open_mock(config, Door(limits=Limits(max_queued=10_000)), MockSettings(readers=HeardBy(consumed)))
    for served in opened.models:
        consumed[served.names[0]].engine = served.host.core

    async def one(number: int) -> None:
        await asyncio.sleep(draw.random() * 0.3)
        served = opened.models.of(draw.choice(["chat", "code"]))
        tokens = [draw.randrange(3) for _ in range(draw.randrange(1, 16))]
        ask = Ask(tokens=tokens, params=SamplingParams(max_tokens=draw.randrange(1, 8), temperature=1.0))
        answer, choices = served.start([ask])
        while not choices[0].is_over or answer.pieces:
            await answer.take()
        served.finish(choices)
        if number % 40 == 0:
            await served.forget_cached()

    async def all_of_them() -> None:
        opened.models.open()
        await asyncio.gather(*(one(number) for number in range(200)))

    asyncio.run(all_of_them())

    def compare(_: LLMEngine) -> None:
        for each in consumed.values():
            each.engine.log.flush()
            each.compare()

    opened.served.host.loop.call(compare)
    assert all(each.num_compared > 20 for each in consumed.values())


MODELS = ("--model", "chat=llama-3.1-8b", "--model", "code=qwen3-8b", "--device", "h100-80gb")


@pytest.mark.parametrize("topic", ["", "kv@pod@{model}"])
def test_each_model_is_told_at_the_next_port(topic: str) -> None:
    port, replay = free_ports(2), free_ports(2)
    command = ["mock", *MODELS, "--port", "0", "--page-size", "4", "--speedup", "1000"]
    command += ["--kv-events", f"tcp://127.0.0.1:{port}", "--set", f"kv_events_topic={topic}"]
    command += ["--set", f"kv_events_replay=tcp://127.0.0.1:{replay}"]
    with preforked.start(*command) as server:
        assert server.stderr is not None
        try:
            line = server.stderr.readline()
            url = re.search(r"http://[\d.:]+", line)
            assert url is not None, line
            threading.Thread(target=server.stderr.read, daemon=True).start()
            sources = call(url[0], "/kv_event_sources?form=list").json
            assert call(url[0], "/kv_event_sources").json == {"0": sources[0], "1": sources[1]}
            assert [source["model_name"] for source in sources] == ["chat", "code"]
            assert [source["endpoint"] for source in sources] == [f"tcp://127.0.0.1:{port + k}" for k in range(2)]
            assert [source["topic"] for source in sources] == [
                topic.replace("{model}", name) for name in ("chat", "code")
            ]
            prompts = {"chat": list(range(100, 120)), "code": list(range(200, 240))}
            for name, prompt in prompts.items():
                body = {"model": name, "prompt": prompt, "max_tokens": 4}
                assert call(url[0], "/v1/completions", body).status == 200
            for source in sources:
                held, full = NaiveConsumer(), NaiveConsumer()
                with open_client(source["endpoint"], source["replay_endpoint"]) as client:
                    for told_topic, seq, payload in client.replay(0):
                        assert told_topic.decode() == source["topic"]
                        held.take(seq, payload)  # from 0, without a gap
                    for _, _, payload in client.replay(-2):
                        full.apply(payload)
                prompt = prompts[source["model_name"]]
                told = {tokens for _, tokens in held.content()["GPU"].values()}
                assert {tuple(prompt[start : start + 4]) for start in range(0, len(prompt), 4)} <= told
                assert not any(tokens[0] in range(100, 240) and tokens[0] not in prompt for tokens in told)
                assert full.content() == held.content()
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(20) == 0


def test_ports_that_two_models_would_have_are_refused(run_command: Run, capsys: pytest.CaptureFixture[str]) -> None:
    port = free_ports(2)
    events = ("--kv-events", f"tcp://127.0.0.1:{port}", "--set", f"kv_events_replay=tcp://127.0.0.1:{port + 1}")
    assert run_command("mock", *MODELS, *events, "--port", "0") == 2
    said = capsys.readouterr().err
    assert "would be of two engines: each has the next port" in said and "further apart" in said


@pytest.mark.parametrize(
    ("endpoint", "told"),
    [
        ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"),
        ("ipc:///tmp/kv", "ipc:///tmp/kv_code"),
        ("tcp://*:0", "tcp://*:0"),
    ],
)
def test_endpoints_of_models(endpoint: str, told: str) -> None:
    config = KvEventsConfig(endpoint=endpoint, replay_endpoint=endpoint, insecure=True)
    assert config.for_model("chat", 0) == config
    of_second = config.for_model("code", 1)
    assert (of_second.endpoint, of_second.replay_endpoint) == (told, told)


def test_there_is_a_port_for_each_model() -> None:
    with pytest.raises(ConfigError):
        KvEventsConfig(endpoint="tcp://127.0.0.1:65535").for_model("code", 1)

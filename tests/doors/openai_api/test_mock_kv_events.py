"""`kvarts mock --kv-events`: what a consumer holds after requests over HTTP, and where it finds the sockets."""

from __future__ import annotations

import json
import re
import signal
import threading
import urllib.request
from typing import Any

import msgspec
import pytest

pytest.importorskip("zmq")

from kvarts.sim.config import ReplayConfig

from builders import preforked
from builders.kv_event_client import open_client
from oracles.naive_kv_events import NaiveConsumer

VLLM_FIELDS = {
    "enable_kv_cache_events",
    "publisher",
    "endpoint",
    "replay_endpoint",
    "buffer_steps",
    "hwm",
    "max_queue_size",
    "topic",
}
"""Of vLLM's KVEventsConfig."""


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def test_events_of_a_mock_with_kv_groups_name_the_group() -> None:
    command = ["mock", "--port", "0", "--speedup", "1000", "--page-size", "16"]
    command += ["--model", "gemma-3-27b", "--device", "h100-80gb", "--set", "kv_groups=all"]
    command += ["--kv-events", "tcp://127.0.0.1:0", "--set", "kv_events_replay=tcp://127.0.0.1:0"]
    with preforked.start(*command) as server:
        assert server.stderr is not None
        try:
            found = re.search(r"http://[\d.:]+", server.stderr.readline())
            assert found is not None
            threading.Thread(target=server.stderr.read, daemon=True).start()
            (source,) = ask(f"{found[0]}/kv_event_sources").values()
            body = {"model": "gemma-3-27b", "prompt": list(range(100, 140)), "max_tokens": 2}
            assert ask(f"{found[0]}/v1/completions", body)["usage"]["prompt_tokens"] == 40
            stored = []
            with open_client(source["endpoint"], source["replay_endpoint"]) as client:
                for _, _, payload in client.replay(0):
                    stored += [event for event in msgspec.msgpack.decode(payload)[1] if event["type"] == "BlockStored"]
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(20) == 0
    told = {(event["group_idx"], event["kv_cache_spec_kind"]): len(event["block_hashes"]) for event in stored}
    assert [group for group, _ in sorted(told)] == [0, 1]
    assert set(told.values()) == {2}, "40 tokens fill two pages, each with a part in both groups"
    windows = {event["kv_cache_spec_sliding_window"] for event in stored if event["group_idx"] == 1}
    assert windows == {1024}


def test_events_of_a_mock_name_the_block_size_of_the_group() -> None:
    """Gemma 4: prompts of 70 tokens fill 4 blocks of 16 in groups with windows, and 2 of 32 in the full group."""
    command = ["mock", "--port", "0", "--speedup", "1000", "--model", "gemma-4-31b", "--device", "h200"]
    command += [
        "--tensor-parallel",
        "2",
        "--kv-events",
        "tcp://127.0.0.1:0",
        "--set",
        "kv_events_replay=tcp://127.0.0.1:0",
    ]
    with preforked.start(*command) as server:
        assert server.stderr is not None
        try:
            found = re.search(r"http://[\d.:]+", server.stderr.readline())
            assert found is not None
            threading.Thread(target=server.stderr.read, daemon=True).start()
            (source,) = ask(f"{found[0]}/kv_event_sources").values()
            body = {"model": "gemma-4-31b", "prompt": list(range(100, 170)), "max_tokens": 2}
            usages = [ask(f"{found[0]}/v1/completions", body)["usage"] for _ in range(2)]
            assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, 64]
            stored = []
            with open_client(source["endpoint"], source["replay_endpoint"]) as client:
                for _, _, payload in client.replay(0):
                    stored += [event for event in msgspec.msgpack.decode(payload)[1] if event["type"] == "BlockStored"]
            with urllib.request.urlopen(f"{found[0]}/metrics", timeout=20) as answer:
                (blocks,) = set(re.findall(r'num_gpu_blocks="(\d+)"', answer.read().decode()))
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(20) == 0
    config = ReplayConfig.for_device("gemma-4-31b", "h200", tensor_parallel=2, engine="vllm")
    assert config.start is not None and int(blocks) == config.start.num_blocks
    sizes = {(event["group_idx"], event["block_size"], len(event["block_hashes"])) for event in stored}
    assert sizes == {*((group, 16, 4) for group in range(5)), (5, 32, 2)}
    names = {event["block_size"]: event["block_hashes"] for event in stored}
    assert names[32] == names[16][1::2], "a block has the name of the last page in it"
    assert all(event["token_ids"] == list(range(100, 164)) for event in stored)


def test_a_consumer_holds_what_the_mock_has_computed() -> None:
    command = ["mock", "--port", "0", "--speedup", "1000", "--page-size", "4"]
    command += ["--kv-events", "tcp://127.0.0.1:0", "--set", "kv_events_replay=tcp://127.0.0.1:0"]
    with preforked.start(*command) as server:
        assert server.stderr is not None
        try:
            line = server.stderr.readline()
            found = re.search(r"http://[\d.:]+", line)
            assert found is not None, line
            threading.Thread(target=server.stderr.read, daemon=True).start()
            base = found[0]
            by_rank = ask(f"{base}/kv_event_sources")
            source = by_rank["0"]
            assert list(by_rank) == ["0"] and ask(f"{base}/kv_event_sources?form=list") == [source]
            assert set(source) >= VLLM_FIELDS
            assert source["data_parallel_rank"] == 0 and source["topic"] == ""
            prompt = list(range(100, 120))
            model = ask(f"{base}/v1/models")["data"][0]["id"]
            answer = ask(f"{base}/v1/completions", {"model": model, "prompt": prompt, "max_tokens": 4})
            assert answer["usage"]["prompt_tokens"] == 20
            consumer = NaiveConsumer()
            with open_client(source["endpoint"], source["replay_endpoint"]) as client:
                for _, seq, payload in client.replay(0):
                    consumer.take(seq, payload)
                held = {tokens for _, tokens in consumer.content()["GPU"].values()}
                assert {tuple(prompt[start : start + 4]) for start in range(0, 20, 4)} <= held
                ask(f"{base}/reset_prefix_cache", {})
                consumer = NaiveConsumer()
                for _, seq, payload in client.replay(0):
                    consumer.take(seq, payload)
                assert not any(consumer.content().values())
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(20) == 0

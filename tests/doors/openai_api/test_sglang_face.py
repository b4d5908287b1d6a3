"""A mock of SGLang: its routes, metrics and priorities have SGLang's names. Decisions: test_parity."""

from __future__ import annotations

import json
import time
from http.client import HTTPConnection
from time import sleep
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvarts.core.events import Admitted, Cancelled, Event
from kvarts.doors.openai.running import RunningServer

from builders.http_client import call

SETTINGS: dict[str, Any] = {"engine": "sglang", "pages": 2000, "cost": "linear:step_ms=1"}
METRICS = {
    "sglang:num_running_reqs": "gauge",
    "sglang:num_queue_reqs": "gauge",
    "sglang:token_usage": "gauge",
    "sglang:full_token_usage": "gauge",
    "sglang:num_used_tokens": "gauge",
    "sglang:kv_available_tokens": "gauge",
    "sglang:kv_evictable_tokens": "gauge",
    "sglang:kv_used_tokens": "gauge",
    "sglang:max_total_num_tokens": "gauge",
    "sglang:page_size": "gauge",
    "sglang:num_pages": "gauge",
    "sglang:context_len": "gauge",
    "sglang:num_retracted_requests": "counter",
    "sglang:evicted_tokens": "counter",
    "sglang:queue_time_seconds": "histogram",
    "sglang:prompt_tokens": "counter",
    "sglang:generation_tokens": "counter",
    "sglang:num_requests": "counter",
    "sglang:num_aborted_requests": "counter",
    "sglang:cached_tokens": "counter",
    "sglang:time_to_first_token_seconds": "histogram",
    "sglang:inter_token_latency_seconds": "histogram",
    "sglang:request_time_per_output_token_seconds": "histogram",
    "sglang:e2e_request_latency_seconds": "histogram",
    "sglang:prompt_tokens_histogram": "histogram",
    "sglang:uncached_prompt_tokens_histogram": "histogram",
    "sglang:generation_tokens_histogram": "histogram",
}


def complete(server: RunningServer, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"model": server.model, "prompt": prompt, "max_tokens": 5, **fields}
    reply = call(server.url, "/v1/completions", body)
    assert reply.status == 200, reply.payload
    answer: dict[str, Any] = reply.json
    return answer


def test_a_mock_of_sglang_finds_whole_prompts_and_answers_and_counts_them_by_sglangs_names() -> None:
    with RunningServer(**SETTINGS) as server:
        first = complete(server, "one two three four", seed=1)
        text = first["choices"][0]["text"]
        prompt = "one two three four" + text
        again = complete(server, prompt)
        server.settle()
        found = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert found == first["usage"]["total_tokens"] - 1  # all but the last token of the answer, which has no KV
        reply = call(server.url, "/metrics").payload.decode()
        families = {family.name: family for family in text_string_to_metric_families(reply)}
        assert {name: families[name].type for name in METRICS} == METRICS
        assert not any(name.startswith("vllm:") for name in families)
        values = {
            sample.name: sample.value
            for name in METRICS
            for sample in families[name].samples
            if "le" not in sample.labels
        }
        assert values["sglang:cached_tokens_total"] == found
        assert values["sglang:num_requests_total"] == 2
        assert values["sglang:generation_tokens_total"] == 10
        assert values["sglang:kv_used_tokens"] == 0
        assert values["sglang:kv_available_tokens"] + values["sglang:kv_evictable_tokens"] == 2000
        buckets = [sample.labels["le"] for sample in families["sglang:time_to_first_token_seconds"].samples
                   if "le" in sample.labels]  # fmt: skip
        assert (buckets[:2], buckets[-2:]) == (["0.1", "0.2"], ["400.0", "+Inf"])


@pytest.mark.parametrize("backend", ["none", "file"])
def test_a_mock_of_sglang_with_host_memory_loads_what_it_evicted_and_counts_it(backend: str) -> None:
    host: dict[str, Any] = {"hicache_ratio": 2.0, "hicache_storage_backend": backend, "pages": 120}
    with RunningServer(**{**SETTINGS, **host}) as server:
        prompt = " ".join(["one"] * 60)
        complete(server, prompt, seed=1)
        for word in ("two", "three"):  # they evict it from the device
            complete(server, " ".join([word] * 60), seed=2)
        again = complete(server, prompt)
        server.settle()
        found = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert found > 10
        reply = call(server.url, "/metrics").payload.decode()
        values = {
            (sample.name, sample.labels.get("cache_source") or sample.labels.get("pool")): sample.value
            for family in text_string_to_metric_families(reply)
            for sample in family.samples
        }
        loaded = values["sglang:cached_tokens_total", "host"]
        assert values["sglang:cached_tokens_total", "device"] + loaded == found and loaded >= 10
        assert values["sglang:load_back_tokens_total", "kv"] == loaded
        assert values["sglang:hicache_host_total_tokens", None] == 241
        assert 0 < values["sglang:hicache_host_used_tokens", None] <= 241
        assert values["sglang:hicache_backup_tokens_total", "kv"] > 180
        assert (("sglang:backuped_tokens_total", None) in values) == (backend != "none")
        assert call(server.url, "/get_server_info").json["hicache_ratio"] == 2.0
        assert call(server.url, "/flush_cache?timeout=5", method="POST").status == 200
        found = complete(server, prompt)["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert found == 0 or backend != "none"  # what is being written to storage stays


def test_its_routes_are_those_of_sglang() -> None:
    changes: dict[str, Any] = {
        "schedule_policy": "lpm",
        "max_batched_tokens": 512,
        "max_seqs": 7,
        "radix_eviction_policy": "slru",
    }
    with RunningServer(**SETTINGS, **changes, served_model_name="m") as server:
        for path in ("/server_info", "/get_server_info"):
            told = call(server.url, path).json
            assert told["max_total_num_tokens"] == 2000 and told["status"] == "ready"
            names = ("chunked_prefill_size", "max_running_requests", "page_size", "schedule_policy")
            assert [told[name] for name in names] == [512, 7, 1, "lpm"]
            assert told["internal_states"][0]["radix_eviction_policy"] == "slru"
        for path in ("/model_info", "/get_model_info"):
            told = call(server.url, path).json
            assert (told["model_path"], told["is_generation"]) == ("m", True)
        assert call(server.url, "/health_generate").status == 200
        (load,) = call(server.url, "/v1/loads").json["loads"]
        assert (load["num_running_reqs"], load["max_running_requests"]) == (0, 7)
        for path in ("/reset_prefix_cache", "/load", "/version"):
            assert call(server.url, path).status in (404, 405)


class Cancels:
    """Counts requests that were cancelled in the engine."""

    wants_details = True

    def __init__(self) -> None:
        self.num = 0

    def observe(self, events: Any) -> None:
        self.num += sum(isinstance(event, Cancelled) for event in events)


def test_it_counts_each_request_that_a_client_gave_up() -> None:
    """The engine may find that a stream is closed before it hears from the server."""
    cancels = Cancels()
    with RunningServer(**SETTINGS, readers=[cancels]) as server:
        body = json.dumps({"model": server.model, "prompt": "one two", "max_tokens": 1500, "stream": True}).encode()
        for _ in range(300):  # on a slow machine, many end before they are given up
            connection = HTTPConnection(server.url.removeprefix("http://"))
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            reply = connection.getresponse()
            assert reply.read(10)
            reply.close()
            connection.close()
            if cancels.num > 10:
                break
        server.settle()
        assert cancels.num > 10

        def num_counted() -> float:
            metrics = call(server.url, "/metrics").payload.decode()
            families = {family.name: family for family in text_string_to_metric_families(metrics)}
            return families["sglang:num_aborted_requests"].samples[0].value

        deadline = time.monotonic() + 5.0
        while num_counted() != cancels.num and time.monotonic() < deadline:
            time.sleep(0.05)  # the engine drops a request before the server counts it
        assert num_counted() == cancels.num


def test_flush_cache_empties_an_idle_cache_and_waits_for_a_busy_one() -> None:
    with RunningServer(**SETTINGS) as server:
        complete(server, "one two three four five six")
        server.settle()
        assert complete(server, "one two three four five six")["usage"]["prompt_tokens_details"]["cached_tokens"] > 4
        reply = call(server.url, "/flush_cache?timeout=5", {})
        assert (reply.status, reply.payload[:14]) == (200, b"Cache flushed.")
        server.settle()
        answer = complete(server, "one two three four five six")
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert call(server.url, "/flush_cache?timeout=soon", {}).status == 400


def test_its_kv_events_are_those_of_sglang() -> None:
    """Where they are published, /server_info says; a flush clears all blocks."""
    pytest.importorskip("zmq")
    from builders.kv_event_client import open_client

    with RunningServer(**SETTINGS, kv_events=True) as server:
        (source,) = call(server.url, "/server_info").json["kv_event_sources"]
        assert {"dp_rank": 0, "topic": "", "block_size": 1}.items() <= source.items()
        complete(server, "one two three four")
        server.settle()
        assert call(server.url, "/flush_cache", {}).status == 200
        (of_engine,) = server.kv_event_sources
        assert of_engine["endpoint"] == source["endpoint"]
        with open_client(source["endpoint"], source["replay_endpoint"]) as client:
            batches = [msgspec.msgpack.decode(payload) for _, _, payload in client.replay(0)]
        events = [event for _, events, _ in batches for event in events]
        assert batches[0][1] == [{"type": "AllBlocksCleared"}]
        assert [event["type"] for event in events[1:]] == ["BlockStored", "BlockStored", "AllBlocksCleared"]
        prompt, answer = events[1], events[2]
        assert answer["parent_block_hash"] == prompt["block_hashes"][-1] and len(answer["token_ids"]) == 4


class Order:
    """The order in which requests are admitted."""

    wants_details = True

    def __init__(self) -> None:
        self.admitted: list[int] = []

    def observe(self, events: Any) -> None:
        event: Event
        for event in events:
            if isinstance(event, Admitted):
                self.admitted.append(event.request)


@pytest.mark.parametrize(("changes", "priority"), [({}, 5), ({"schedule_low_priority_values_first": True}, -5)])
def test_a_request_without_a_priority_is_the_least_important(changes: dict[str, Any], priority: int) -> None:
    from concurrent.futures import ThreadPoolExecutor

    order = Order()
    settings = {**SETTINGS, "cost": "linear:step_ms=20", "max_seqs": 1, "enable_priority_scheduling": True}
    settings["disable_priority_preemption"] = True
    with RunningServer(**settings, **changes, readers=[order]) as server, ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(complete, server, "first", priority=0, max_tokens=50)]
        sleep(0.05)
        asked.append(pool.submit(complete, server, "without"))
        sleep(0.03)
        asked.append(pool.submit(complete, server, "important", priority=priority))
        for each in asked:
            each.result()
        assert order.admitted == [0, 2, 1]

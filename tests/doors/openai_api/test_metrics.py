"""Metrics: vLLM's names, labels, types and buckets, moved by what happens."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import kvarts
from kvarts.doors.openai.running import RunningServer
from kvarts.sim.config import ReplayConfig

from builders.http_client import call

COMPLETIONS = "/v1/completions"

VLLM = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:num_requests_waiting_by_reason": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:external_prefix_cache_queries": "counter",
    "vllm:external_prefix_cache_hits": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:prompt_tokens_by_source": "counter",
    "vllm:prompt_tokens_cached": "counter",
    "vllm:prompt_tokens_recomputed": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:request_success": "counter",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_max_num_generation_tokens": "histogram",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_prefill_kv_computed_tokens": "histogram",
    "vllm:cache_config_info": "gauge",
}


def families(server: RunningServer) -> dict[str, Any]:
    text = call(server.url, "/metrics").payload.decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(server: RunningServer) -> dict[str, float]:
    found = {}
    for family in families(server).values():
        for sample in family.samples:
            more = {key: value for key, value in sample.labels.items() if key not in ("model_name", "engine")}
            found[sample.name + "".join(f" {key}={value}" for key, value in sorted(more.items()))] = sample.value
    return found


def test_the_names_types_and_labels_are_those_of_vllm(server: RunningServer) -> None:
    found = families(server)
    assert {name: found[name].type for name in VLLM} == VLLM
    for name, family in found.items():
        if name.startswith("vllm:") and name not in ("vllm:cache_config_info",):
            assert all({"model_name", "engine"} <= set(sample.labels) for sample in family.samples), name
    bounds = [
        sample.labels["le"]
        for sample in found["vllm:time_to_first_token_seconds"].samples
        if sample.name.endswith("_bucket")
    ]
    assert bounds[:3] == ["0.001", "0.005", "0.01"] and bounds[-2:] == ["2560.0", "+Inf"] and len(bounds) == 23


def test_counters_move_by_what_happens(start: Any) -> None:
    server = start(page_size=4, pages=64, max_seqs=8)
    prompt = list(range(30))
    for _ in range(2):
        assert call(server.url, COMPLETIONS, {"prompt": prompt, "max_tokens": 6}).status == 200
    found = values(server)
    expected = {
        "vllm:prompt_tokens_total": 60,
        "vllm:generation_tokens_total": 12,
        "vllm:prefix_cache_queries_total": 60,
        "vllm:prefix_cache_hits_total": 28,
        "vllm:prompt_tokens_cached_total": 28,
        "vllm:prompt_tokens_by_source_total source=local_compute": 32,
        "vllm:prompt_tokens_by_source_total source=local_cache_hit": 28,
        "vllm:request_success_total finished_reason=length": 2,
        "vllm:time_to_first_token_seconds_count": 2,
        "vllm:inter_token_latency_seconds_count": 10,
        "vllm:e2e_request_latency_seconds_count": 2,
        "vllm:request_prompt_tokens_sum": 60,
        "vllm:request_generation_tokens_sum": 12,
        "vllm:request_prefill_kv_computed_tokens_sum": 32,
        "vllm:iteration_tokens_total_sum": 32 + 2 * 5,
        "vllm:iteration_tokens_total_count": 12,
        "vllm:num_requests_running": 0,
        "vllm:kv_cache_usage_perc": 0,
        "kvarts:steps_total": 12,
        "kvarts:pages state=used": 0,
    }
    assert {name: found[name] for name in expected} == expected
    assert found["kvarts:pages state=cached"] + found["kvarts:pages state=empty"] == 64
    # Steps of a millisecond: a token takes as long as its step.
    assert 0.005 <= found["vllm:request_decode_time_seconds_sum"] / 2 < 0.0051


def test_preemptions_and_tiers_are_counted(start: Any) -> None:
    cost = "linear:step_ms=1,chunk_token_ms=2"  # a load is begun only where it is sooner than computing
    server = start(page_size=4, pages=12, max_seqs=4, cost=cost, offload=host_memory(64))
    bodies = [{"prompt": [[number] * 12 for number in range(4)], "max_tokens": 16} for _ in range(2)]
    for body in bodies:
        assert call(server.url, COMPLETIONS, body).status == 200
    found = values(server)
    assert found["vllm:num_preemptions_total"] > 0
    assert found["kvarts:tier_pages tier_state=host cached"] > 0
    assert sum(value for name, value in found.items() if name.startswith("kvarts:tier_bytes_total")) > 0
    assert found["vllm:external_prefix_cache_hits_total"] > 0


def host_memory(pages: int) -> Any:
    from kvarts.core.tiers.config import OffloadConfig

    return OffloadConfig(host_pages=pages, policy="eager")


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;q=0.5",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;q=0.5",
        "*/*",
    ],
)
def test_names_are_those_of_vllm_whatever_a_scraper_prefers(server: RunningServer, accept: str) -> None:
    reply = call(server.url, "/metrics", headers={"accept": accept})
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    text = reply.payload.decode()
    assert "\nvllm:num_requests_running{" in text and "vllm_num" not in text
    assert "\nprocess_resident_memory_bytes " in text


def test_drafts_of_a_mock_that_starts_as_vllm_are_counted() -> None:
    drafts = {"speculative_tokens": 2, "acceptance": "1.0,1.0", "speculative_method": "eagle3"}
    engine = {"model": "qwen3-8b", "device": "h100-80gb", "engine": "vllm==0.33", "pages": 300, "max_model_len": 4000}
    with kvarts.mock(ReplayConfig.of_options(**engine, **drafts)) as server:
        asked = {"prompt": list(range(40)), "max_tokens": 31, "ignore_eos": True}
        assert call(server.url, COMPLETIONS, asked).json["usage"]["completion_tokens"] == 31
        found = values(server)
        assert found["vllm:spec_decode_num_drafts_total"] == 10, "30 tokens in steps of three, after that of the prompt"
        assert found["vllm:spec_decode_num_draft_tokens_total"] == 20
        assert found["vllm:spec_decode_num_accepted_tokens_total"] == 20
        server.settle()
        server.assert_conserved()

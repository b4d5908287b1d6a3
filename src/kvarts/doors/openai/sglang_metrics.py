"""Metrics of a mock of SGLang, with the names, labels and buckets of SGLang 0.5.23, but `is_streaming`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvarts.core.tiers.hicache import HostCopies
from kvarts.doors.openai.metrics import MeterMetrics
from kvarts.doors.openai.served import Served
from kvarts.sim.config import ReplayConfig

__all__ = ["SglangMetrics"]


class SglangMetrics(Collector):
    """The metrics of one Served: those of its scheduler, and those of its tokenizer manager.

    `load`: returns what `/v1/loads` says of it.
    """

    def __init__(self, served: Served, config: ReplayConfig, load: Callable[[], dict[str, Any]]) -> None:
        self._parts = (_OfScheduler(served, config, load), _OfTokenizer(served))

    def collect(self) -> Iterator[Metric]:
        """Return all metrics of the model."""
        for part in self._parts:
            yield from part.collect()


class _OfScheduler(MeterMetrics):
    labels = ("model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank")

    def __init__(self, served: Served, config: ReplayConfig, load: Callable[[], dict[str, Any]]) -> None:
        super().__init__(served.meter, served.names[0], str(served.rank), served.created_s)
        self._values = (served.names[0], "unified", "0", "0", "0")
        self._served = served
        self._config = config
        self._load = load

    def collect(self) -> Iterator[Metric]:
        """Return its metrics."""
        core, config, meter = self._served.host.core, self._config, self._meter
        load, cache = self._load(), core.scheduler.cache
        page_size = config.page_size
        gauges = (
            ("num_running_reqs", "The number of running requests.", load["num_running_reqs"]),
            ("num_queue_reqs", "The number of requests in the waiting queue.", load["num_waiting_reqs"]),
            ("token_usage", "The token usage.", load["token_usage"]),
            ("full_token_usage", "The token usage for full attention layers.", load["token_usage"]),
            ("num_used_tokens", "The number of used tokens.", load["num_used_tokens"]),
            (
                "kv_available_tokens",
                "Number of free token slots in the KV cache pool.",
                (cache.num_free - cache.num_cached) * page_size,
            ),
            (
                "kv_evictable_tokens",
                "Number of evictable (radix-cached) token slots in the KV cache pool.",
                cache.num_cached * page_size,
            ),
            (
                "kv_used_tokens",
                "Number of actively used token slots in the KV cache pool.",
                load["num_used_tokens"],
            ),
            ("max_total_num_tokens", "Maximum total number of tokens in the KV cache pool.", config.pool_tokens),
            ("page_size", "KV cache page size in tokens.", page_size),
            ("num_pages", "Number of KV cache pages.", config.num_pages),
            ("context_len", "Maximum context length.", self._served.limits.max_model_len),
        )
        for name, text, value in gauges:
            yield self._gauge(f"sglang:{name}", text, value)
        yield self._counter(
            "sglang:num_retracted_requests", "Total number of retracted requests.", meter.num_preemptions
        )
        num_evicted = cache.num_evicted * page_size
        text = "The number of device KV token slots freed by eviction."
        yield self._counter("sglang:evicted_tokens", text, num_evicted)
        yield self._histogram("sglang:queue_time_seconds", "Histogram of queueing time in seconds.", meter.queue_s)
        host = core.scheduler.host
        if host is not None:
            yield from self._of_host(host)

    def _of_host(self, host: HostCopies) -> Iterator[Metric]:
        """Return the metrics of host memory, and of storage below it."""
        page_size, num_below, num_used = self._config.page_size, host.num_total, host.num_used
        yield self._gauge(
            "sglang:hicache_host_used_tokens",
            "Number of tokens currently used in the host KV cache.",
            num_used * page_size,
        )
        yield self._gauge(
            "sglang:hicache_host_total_tokens",
            "Total capacity of the host KV cache in tokens.",
            num_below * page_size,
        )
        moved = (
            ("load_back", "loaded back from host memory to the device", host.to_device.num_bytes),
            ("hicache_backup", "copied from the device to host memory", host.to_host.num_bytes),
        )
        for name, what, num_bytes in moved:
            num_tokens = num_bytes // host.page_bytes * page_size
            yield self._counters(f"sglang:{name}_tokens", f"Number of tokens {what}.", "pool", [("kv", num_tokens)])
            yield self._counter(f"sglang:{name}_bytes", f"Bytes {what}.", num_bytes)
        if host.storage is None:
            return
        num_read, num_written = host.storage.reading.num_bytes, host.storage.writing.num_bytes
        for name, text, num_bytes in (
            ("prefetched", "Prompt tokens read from storage into host memory.", num_read),
            ("backuped", "Number of backuped tokens.", num_written),
        ):
            yield self._counter(f"sglang:{name}_tokens", text, num_bytes // host.page_bytes * page_size)


class _OfTokenizer(MeterMetrics):
    labels = ("model_name", "engine_type")

    def __init__(self, served: Served) -> None:
        super().__init__(served.meter, served.names[0], str(served.rank), served.created_s)
        self._values = (served.names[0], "unified")

    def collect(self) -> Iterator[Metric]:
        """Return its metrics."""
        meter = self._meter
        counters = (
            ("prompt_tokens", "Number of prefill tokens processed.", meter.num_prompt_tokens),
            ("generation_tokens", "Number of generation tokens processed.", meter.num_generated_tokens),
            ("num_requests", "Number of requests processed.", sum(meter.ended_by_reason.values())),
            ("num_aborted_requests", "Number of requests aborted.", meter.num_aborted),
        )
        for name, text, value in counters:
            yield self._counter(f"sglang:{name}", text, value)
        below, stored = meter.num_hit_tokens_below, meter.num_hit_tokens_stored
        sources = ("device", meter.num_hit_tokens - below), ("host", below - stored), ("storage", stored)
        yield self._counters(
            "sglang:cached_tokens",
            "Number of cached prompt tokens by source (device/host/storage).",
            "cache_source",
            [source for source in sources if source[1] or source[0] == "device"],
        )
        histograms = (
            ("time_to_first_token_seconds", "Histogram of time to first token in seconds.", meter.first_token_s),
            ("inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", meter.next_token_s),
            (
                "request_time_per_output_token_seconds",
                "Per-request TPOT in seconds: (finished_time - first_token_time) / (completion_tokens - 1).",
                meter.token_s_by_request,
            ),
            ("e2e_request_latency_seconds", "Histogram of End-to-end request latency in seconds", meter.request_s),
            ("prompt_tokens_histogram", "Histogram of prompt token length.", meter.prompt_tokens_by_request),
            (
                "uncached_prompt_tokens_histogram",
                "Histogram of uncached (compute) prompt token length.",
                meter.computed_by_request,
            ),
            ("generation_tokens_histogram", "Histogram of generation token length.", meter.generated_by_request),
        )
        for name, text, counts in histograms:
            yield self._histogram(f"sglang:{name}", text, counts)

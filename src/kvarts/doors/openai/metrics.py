"""Metrics with the names, labels, types and buckets of vLLM 0.32, and kvarts' own; made on request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from time import time
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from kvarts.doors.openai.meter import BucketCounts, GoneEngines, Meter, num_queried_below
from kvarts.doors.openai.served import Served

__all__ = ["MeterMetrics", "ServerMetrics"]

LABELS = ("model_name", "engine")


class ServerMetrics(Collector):
    """The metrics of all models: a Collector of the counts of each, and of removed engines.

    `make`: makes those of a model, by default with vLLM's names.
    """

    def __init__(
        self,
        models: Iterable[Served],
        gone: Iterable[GoneEngines] = (),
        *,
        make: Callable[[Served], Collector] | None = None,
    ) -> None:
        make = ModelMetrics if make is None else make
        self._of_models: list[Collector] = [make(served) for served in models]
        self._gone = tuple(gone)
        self._of_models += [GoneMetrics(each) for each in self._gone]
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def exposition(self) -> tuple[bytes, str]:
        """Return metrics in the format for scrapers, and its content type.

        The format is always text, whatever the scraper prefers: under OpenMetrics, Prometheus 2 stores names without
        colons, and the queries of dashboards for vLLM do not find them.
        """
        with ExitStack() as stack:
            for each in self._gone:
                stack.enter_context(each.lock)
            return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4

    def collect(self) -> Iterator[Metric]:
        """Return all metrics, each with the samples of every model."""
        families: dict[str, Metric] = {}
        for of_model in self._of_models:
            for family in of_model.collect():
                first = families.setdefault(family.name, family)
                if first is not family:
                    first.samples += family.samples
        yield from families.values()


class MeterMetrics(Collector):
    """The metrics that a meter has counted."""

    labels: tuple[str, ...] = LABELS

    def __init__(self, meter: Meter, name: str, engine: str, created_s: float) -> None:
        self._meter = meter
        self._engine = engine
        self._values: tuple[str, ...] = (name, engine)
        self._created_s = created_s

    def collect(self) -> Iterator[Metric]:
        """Return all metrics."""
        raise NotImplementedError

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=self.labels)
        family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=self.labels)
        family.add_metric(self._values, value, created=self._created_s)
        return family

    def _counters(self, name: str, text: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
        family = CounterMetricFamily(name, text, labels=(*self.labels, label))
        for key, value in values:
            family.add_metric((*self._values, key), value, created=self._created_s)
        return family

    def _gauges(self, name: str, text: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=(*self.labels, label))
        for key, value in values:
            family.add_metric((*self._values, key), value)
        return family

    def _histogram(self, name: str, text: str, counts: BucketCounts) -> Metric:
        family = HistogramMetricFamily(name, text, labels=self.labels)
        bounds = [*(str(float(bound)) for bound in counts.published), "+Inf"]
        family.add_metric(self._values, list(zip(bounds, counts.cumulative(), strict=True)), counts.total)
        return family

    def _of_cache(self, num_below: int) -> Iterator[Metric]:
        """Return the counters of hits and preemptions. `num_below`: tokens that tiers below were asked for."""
        meter = self._meter
        yield self._counter(
            "vllm:prefix_cache_queries", "Prefix cache queries, in number of queried tokens.", meter.num_queried_tokens
        )
        yield self._counter(
            "vllm:prefix_cache_hits",
            "Prefix cache hits, in number of cached tokens.",
            meter.num_hit_tokens - meter.num_hit_tokens_below,
        )
        yield self._counter(
            "vllm:external_prefix_cache_queries",
            "Queried tokens of tiers below the device.",
            num_below,
        )
        yield self._counter(
            "vllm:external_prefix_cache_hits", "Cached tokens from tiers below the device.", meter.num_hit_tokens_below
        )
        yield self._counter(
            "vllm:num_preemptions", "Cumulative number of preemption from the engine.", meter.num_preemptions
        )

    def _of_tokens(self) -> Iterator[Metric]:
        meter = self._meter
        yield self._counter("vllm:prompt_tokens", "Number of prefill tokens processed.", meter.num_prompt_tokens)
        hits, below = meter.num_hit_tokens, meter.num_hit_tokens_below
        yield self._counters(
            "vllm:prompt_tokens_by_source",
            "Number of prompt tokens by source.",
            "source",
            (
                ("local_compute", meter.num_prompt_tokens - hits),
                ("local_cache_hit", hits - below),
                ("external_kv_transfer", below),
            ),
        )
        yield self._counter("vllm:prompt_tokens_cached", "Number of cached prompt tokens.", hits)
        yield self._counter(
            "vllm:prompt_tokens_recomputed",
            "Number of tokens computed again after a preemption.",
            meter.num_recomputed_tokens,
        )
        yield self._counter(
            "vllm:generation_tokens", "Number of generation tokens processed.", meter.num_generated_tokens
        )
        yield from self._of_drafts()
        yield self._histogram(
            "vllm:iteration_tokens_total", "Histogram of number of tokens per engine_step.", meter.step_tokens
        )

    def _of_drafts(self) -> Iterator[Metric]:
        yield from ()

    def _of_requests(self) -> Iterator[Metric]:
        meter = self._meter
        yield self._counters(
            "vllm:request_success",
            "Count of successfully processed requests.",
            "finished_reason",
            meter.ended_by_reason.items(),
        )
        histograms = (
            ("request_prompt_tokens", "Number of prefill tokens processed.", meter.prompt_tokens_by_request),
            ("request_generation_tokens", "Number of generation tokens processed.", meter.generated_by_request),
            (
                "request_max_num_generation_tokens",
                "Histogram of maximum number of requested generation tokens.",
                meter.max_tokens_by_request,
            ),
            ("time_to_first_token_seconds", "Histogram of time to first token in seconds.", meter.first_token_s),
            ("inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", meter.next_token_s),
            (
                "request_time_per_output_token_seconds",
                "Histogram of time_per_output_token_seconds per request.",
                meter.token_s_by_request,
            ),
            ("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", meter.request_s),
            (
                "request_queue_time_seconds",
                "Histogram of time spent in WAITING phase for request.",
                meter.queue_s,
            ),
            (
                "request_inference_time_seconds",
                "Histogram of time spent in RUNNING phase for request.",
                meter.inference_s,
            ),
            (
                "request_prefill_time_seconds",
                "Histogram of time spent in PREFILL phase for request.",
                meter.prefill_s,
            ),
            ("request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", meter.decode_s),
            (
                "request_prefill_kv_computed_tokens",
                "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
                meter.computed_by_request,
            ),
        )
        for name, text, counts in histograms:
            yield self._histogram(f"vllm:{name}", text, counts)

    def _of_residency(self) -> Iterator[Metric]:
        residency = self._meter.residency
        if residency is None:
            return
        sampled = "Sampled (kv_cache_metrics_sample)."
        histograms = (
            ("lifetime", "KV cache block lifetime from allocation to eviction.", residency.lifetime_s),
            ("idle_before_evict", "idle time before KV cache block eviction.", residency.idle_s),
            ("reuse_gap", "time gaps between consecutive KV cache block accesses, the last ones.",
             residency.reuse_gap_s),
        )  # fmt: skip
        for name, text, counts in histograms:
            yield self._histogram(f"vllm:kv_block_{name}_seconds", f"Histogram of {text} {sampled}", counts)

    def _own_counts(self, num_evicted: int) -> Iterator[Metric]:
        """Return the counters that are kvarts' own. `num_evicted`: cached pages that were overwritten."""
        meter = self._meter
        yield self._counter("kvarts:pages_evicted", "Cached pages that were overwritten.", num_evicted)
        yield self._counter("kvarts:steps", "Steps of the engine.", meter.num_steps)
        yield self._counter("kvarts:requests_refused", "Requests for which the queue had no room.", meter.num_refused)
        yield self._counter(
            "kvarts:requests_rejected", "Requests that could never have their pages.", meter.num_rejected
        )
        yield self._counter("kvarts:requests_aborted", "Requests that their clients gave up.", meter.num_aborted)


class ModelMetrics(MeterMetrics):
    """The metrics of one Served."""

    def __init__(self, served: Served) -> None:
        super().__init__(served.meter, served.names[0], str(served.rank), served.created_s)
        self._served = served

    def collect(self) -> Iterator[Metric]:
        """Return all metrics of the model."""
        yield from self._of_scheduler()
        yield from self._of_tokens()
        yield from self._of_requests()
        yield from self._of_residency()
        yield from self._own()

    def _of_scheduler(self) -> Iterator[Metric]:
        served = self._served
        core, config = served.host.core, served.host.config
        scheduler = core.scheduler
        yield self._gauge(
            "vllm:num_requests_running", "Number of requests in model execution batches.", scheduler.running.num_running
        )
        num_waiting = scheduler.num_waiting
        yield self._gauge("vllm:num_requests_waiting", "Number of requests waiting to be processed.", num_waiting)
        num_loading = num_waiting - scheduler.waiting.num_waiting - len(scheduler.waiting_with_pages)
        yield self._gauges(
            "vllm:num_requests_waiting_by_reason",
            "Number of waiting requests: for capacity, or deferred, as by a load from a tier below.",
            "reason",
            (("capacity", num_waiting - num_loading), ("deferred", num_loading)),
        )
        yield self._gauge(
            "vllm:kv_cache_usage_perc",
            "KV-cache usage. 1 means 100 percent usage.",
            scheduler.cache.num_used / scheduler.cache.pool.total,
        )
        yield from self._of_cache(num_queried_below(served.meter, core))
        info = {
            "block_size": str(config.page_size),
            "cache_dtype": "auto",
            "enable_prefix_caching": "True",
            "engine": self._engine,
            "gpu_memory_utilization": "0.9",
            "num_gpu_blocks": str(served.host.num_gpu_blocks),
            "prefix_caching_hash_algo": "sha256_cbor",
            "sliding_window": "None",
        }
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labels=list(info)
        )
        family.add_metric(list(info.values()), 1)
        yield family
        if served.adapters:
            labels = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
            lora = GaugeMetricFamily("vllm:lora_requests_info", "Running stats on lora requests.", labels=labels)
            lora.add_metric((str(len(served.adapters)), "", ",".join(served.live_adapters())), time())
            yield lora

    def _of_drafts(self) -> Iterator[Metric]:
        totals_of_drafts = self._served.host.core.scheduler.draft_totals
        if totals_of_drafts is None:
            return
        totals = totals_of_drafts()
        name = "vllm:spec_decode_num"
        yield self._counter(f"{name}_drafts", "Number of spec decoding drafts.", totals.num_drafts)
        yield self._counter(f"{name}_draft_tokens", "Number of draft tokens.", totals.num_drafted_tokens)
        yield self._counter(f"{name}_accepted_tokens", "Number of accepted tokens.", totals.num_accepted_tokens)

    def _own(self) -> Iterator[Metric]:
        served = self._served
        core = served.host.core
        cache = core.scheduler.cache
        num_used, num_cached, num_free = cache.num_used, cache.num_cached, cache.num_free
        pages = [("used", num_used), ("cached", num_cached), ("empty", num_free - num_cached)]
        if served.sharing is not None:
            pages.append(("elsewhere", cache.pool.total - num_used - num_free))
        yield self._gauges("kvarts:pages", "Pages of KV memory, by state.", "state", pages)
        yield from self._own_counts(cache.num_evicted)
        yield self._gauge("kvarts:requests_live", "HTTP requests in the engine, running or waiting.", served.num_live)
        clock: Any = served.host.clock
        if hasattr(clock, "most_late_ns"):
            yield self._gauge("kvarts:mock_late_seconds", "How late the last step ended.", clock.late_ns / 1e9)
            yield self._gauge(
                "kvarts:mock_most_late_seconds",
                "How late a step ended, the most of all.",
                clock.most_late_ns / 1e9,
            )
            yield self._histogram(
                "kvarts:mock_write_late_seconds",
                "How long after the end of its step, as it should have been, each answer was written to.",
                served.late_s,
            )
        yield from self._of_sessions()
        if served.sharing is not None:
            yield self._gauges(
                "kvarts:loan_bytes",
                "Memory that the model uses and another one is guaranteed.",
                "lender",
                served.sharing.loans(),
            )
            yield self._counter(
                "kvarts:requests_reclaimed",
                "Requests that were preempted for other models.",
                served.sharing.num_reclaimed,
            )
            yield self._gauges(
                "kvarts:model_health",
                "1 for the state that the model is in.",
                "state",
                ((state, served.health == state) for state in ("healthy", "degraded", "dead")),
            )
        if core.tiers is None:
            return
        totals = core.tiers.totals()
        used_and_cached = core.tiers.num_pages()
        names = list(totals.num_evicted_pages)
        states = [
            (f"{name} {state}", used_and_cached[2 * place + offset])
            for place, name in enumerate(names)
            for offset, state in enumerate(("used", "cached"))
        ]
        yield self._gauges("kvarts:tier_pages", "Pages of the tiers below the device.", "tier_state", states)
        yield self._counters(
            "kvarts:tier_bytes", "Bytes moved, by channel.", "channel", sorted(totals.num_bytes.items())
        )
        yield self._counters(
            "kvarts:tier_pages_evicted", "Pages evicted below.", "tier", sorted(totals.num_evicted_pages.items())
        )
        yield self._counters("kvarts:transfers", "Transfers, by what became of them.", "kind", _counted(totals.counts))

    def _of_sessions(self) -> Iterator[Metric]:
        counts = None if self._served.sessions is None else self._served.sessions.counts()
        if counts is None:
            return
        yield self._gauge("kvarts:sessions", "Sessions that there are.", counts.num_sessions)
        yield self._gauge(
            "kvarts:session_reserved_pages",
            "Pages, or blocks with KV groups, that are reserved for sessions with a window, full or not.",
            counts.num_reserved_pages,
        )
        yield self._gauge("kvarts:session_tokens", "Tokens of their histories.", counts.num_history_tokens)
        yield self._counters(
            "kvarts:sessions_ended", "Sessions that have ended.", "reason", sorted(counts.ended_by_reason.items())
        )


class GoneMetrics(MeterMetrics):
    """The counters of removed engines, summed under the engine label "gone"."""

    def __init__(self, gone: GoneEngines) -> None:
        super().__init__(gone.meter, gone.name, "gone", gone.created_s)
        self._gone = gone

    def collect(self) -> Iterator[Metric]:
        """Return the counters; removed engines have no gauges."""
        yield from self._of_cache(self._gone.num_queried_below)
        yield from self._of_tokens()
        yield from self._of_requests()
        yield from self._of_residency()
        yield from self._own_counts(self._gone.num_evicted)


def _counted(counts: dict[str, Any]) -> list[tuple[str, float]]:
    return sorted((name.removeprefix("num_"), value) for name, value in counts.items())

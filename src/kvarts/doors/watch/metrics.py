"""An engine's metrics of requests and KV memory, by vLLM's names."""

from __future__ import annotations

import re
import threading
import urllib.request
from collections.abc import Iterator
from urllib.parse import urlsplit

import msgspec

from kvarts.base.errors import ConfigError

__all__ = ["EngineSample", "Scraper", "parse_metrics"]

TIMEOUT_S = 5.0

MAX_BYTES = 16 << 20
"""Bytes of an answer that are read; the rest is ignored."""
MAX_LINE_CHARS = 16 << 10

_NAME = re.compile(r"[A-Za-z_:][\w:]*")
_URL = re.compile(r"https?://[^\s/]+")
_READ = frozenset(
    {
        "vllm:cache_config_info",
        "vllm:generation_tokens_total",
        "vllm:gpu_cache_usage_perc",
        "vllm:inter_token_latency_seconds_count",
        "vllm:inter_token_latency_seconds_sum",
        "vllm:kv_cache_usage_perc",
        "vllm:kv_offload_load_bytes_total",
        "vllm:kv_offload_store_bytes_total",
        "vllm:kvarts_pages_total",
        "vllm:kvarts_resident_pages",
        "vllm:kvarts_waiting_pages",
        "vllm:num_preemptions_total",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:prefix_cache_hits_total",
        "vllm:prefix_cache_queries_total",
        "vllm:time_per_output_token_seconds_count",
        "vllm:time_per_output_token_seconds_sum",
        "vllm:time_to_first_token_seconds_count",
        "vllm:time_to_first_token_seconds_sum",
    }
)
_OF_TIERS = {
    "vllm:kvarts_pages_total": "what",
    "vllm:kvarts_resident_pages": "tier",
    "vllm:kvarts_waiting_pages": "lane",
}
"""Metrics of kvarts' tiers inside vLLM, and the label that tells their values apart."""
_BLOCKS = re.compile(r'(?:^|,)\s*num_gpu_blocks="(\d{1,18})"')


class EngineSample(msgspec.Struct, frozen=True, kw_only=True):
    """One reading of the metrics, summed over the engines of an endpoint; None for a missing metric."""

    usage: float | None = None
    """Share of the KV blocks in use; the mean over several engines."""
    num_running: int | None = None
    num_waiting: int | None = None
    num_preempted: int | None = None
    """Preemptions since the start of the engine."""
    num_blocks: int | None = None
    num_queried_tokens: int | None = None
    num_hit_tokens: int | None = None
    num_generated_tokens: int | None = None
    first_token_s: tuple[float, int] | None = None
    """Sum and number of the times to first token."""
    next_token_s: tuple[float, int] | None = None
    """Sum and number of the inter-token latencies."""

    tier_pages: dict[str, int] = {}
    """Pages of kvarts' tiers inside vLLM, by what happened to them since the start of the engine."""
    tier_resident: dict[str, int] = {}
    """Pages in each tier."""
    tier_waiting: dict[str, int] = {}
    """Pages that wait to be read from files, or written."""
    num_loaded_bytes: int | None = None
    num_stored_bytes: int | None = None

    @property
    def hit_share(self) -> float | None:
        """Share of prompt tokens that were hits; None if unknown."""
        if not self.num_queried_tokens or self.num_hit_tokens is None:
            return None
        return self.num_hit_tokens / self.num_queried_tokens


def parse_metrics(text: str) -> EngineSample:
    """Return the sample in a text in Prometheus format; invalid lines are skipped."""
    sums: dict[str, list[float]] = {}
    tiers: dict[str, dict[str, int]] = {name: {} for name in _OF_TIERS}
    num_blocks: list[float] = []
    for name, labels, value in _lines(text):
        if name not in _READ:
            continue
        sums.setdefault(name, []).append(value)
        if name in tiers:
            label = re.search(rf'(?:^|,)\s*{_OF_TIERS[name]}="(\w{{1,40}})"', labels)
            if label is not None:
                tiers[name][label[1]] = tiers[name].get(label[1], 0) + int(value)
        if name == "vllm:cache_config_info":
            blocks = _BLOCKS.search(labels)
            if blocks is not None:
                num_blocks.append(int(blocks[1]))

    def total(name: str) -> int | None:
        found = sums.get(name)
        return None if not found else int(sum(found))

    def sum_and_count(*names: str) -> tuple[float, int] | None:
        for name in names:
            seconds, count = sums.get(f"{name}_seconds_sum"), total(f"{name}_seconds_count")
            if seconds is not None and count is not None:
                return sum(seconds), count
        return None

    usages = sums.get("vllm:kv_cache_usage_perc") or sums.get("vllm:gpu_cache_usage_perc")
    return EngineSample(
        usage=sum(usages) / len(usages) if usages else None,
        num_running=total("vllm:num_requests_running"),
        num_waiting=total("vllm:num_requests_waiting"),
        num_preempted=total("vllm:num_preemptions_total"),
        num_blocks=int(sum(num_blocks)) if num_blocks else None,
        num_queried_tokens=total("vllm:prefix_cache_queries_total"),
        num_hit_tokens=total("vllm:prefix_cache_hits_total"),
        num_generated_tokens=total("vllm:generation_tokens_total"),
        first_token_s=sum_and_count("vllm:time_to_first_token"),
        tier_pages=tiers["vllm:kvarts_pages_total"],
        tier_resident=tiers["vllm:kvarts_resident_pages"],
        tier_waiting=tiers["vllm:kvarts_waiting_pages"],
        num_loaded_bytes=total("vllm:kv_offload_load_bytes_total"),
        num_stored_bytes=total("vllm:kv_offload_store_bytes_total"),
        next_token_s=sum_and_count("vllm:inter_token_latency", "vllm:time_per_output_token"),
    )


def _lines(text: str) -> Iterator[tuple[str, str, float]]:
    """Yield the name, the labels and the value of each line, in time linear in the text."""
    for line in text.splitlines():
        match = _NAME.match(line)
        if match is None or len(line) > MAX_LINE_CHARS:
            continue
        labels, rest = "", line[match.end() :]
        if rest.startswith("{"):
            labels, brace, rest = rest[1:].rpartition("}")
            if not brace:
                continue
        values = rest.split()
        if not 1 <= len(values) <= 2 or not rest[0].isspace():
            continue
        try:
            value = float(values[0])
        except ValueError:
            continue
        if abs(value) < 1e18:  # neither infinite nor NaN
            yield match[0], labels, value


def _is_url(text: str) -> bool:
    """Return whether `text` is an HTTP URL with a valid port."""
    try:
        return _URL.match(text) is not None and urlsplit(text).port != 0
    except ValueError:
        return False


class Scraper:
    """Reads `url` periodically, in a thread, and keeps the last sample. Raises ConfigError."""

    def __init__(self, url: str, every_s: float = 1.0) -> None:
        if not _is_url(url):
            raise ConfigError(f"is not a URL of HTTP: {url!r}", field="metrics", hint="Give http://HOST:PORT/metrics.")
        self._url = url
        self._every_s = every_s
        self.last: EngineSample | None = None
        self.num_seen = 0
        self.num_failed = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop reading."""
        self._stop.set()
        self._thread.join(TIMEOUT_S + 1)

    def _run(self) -> None:
        while True:
            try:
                with urllib.request.urlopen(self._url, timeout=TIMEOUT_S) as answer:
                    self.last = parse_metrics(answer.read(MAX_BYTES).decode(errors="replace"))
                self.num_seen += 1
            except (OSError, ValueError):
                self.num_failed += 1
            if self._stop.wait(self._every_s):
                return

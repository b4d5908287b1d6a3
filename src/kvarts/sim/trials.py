"""Measures by further replays: the uncertainty of latencies, where a fit gave that of the cost model, and the benefit
of more memory: the least host memory that keeps the hits that eviction loses.

Sizes are tried on a grid, a tenth apart, by bisection: both the returned size and the next smaller one, which loses
more, have been replayed. A hit ratio counts as kept if it has all but a hundredth of the gain of unbounded host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any, TypeVar

import msgspec

from kvarts.base.errors import ConfigError
from kvarts.base.processes import Inquiry, Processes
from kvarts.core.tiers.config import OffloadConfig
from kvarts.sim.config import ReplayConfig
from kvarts.sim.report.advice import HostMemory
from kvarts.sim.report.report import Report
from kvarts.sim.traffic.trace import Trace

__all__ = ["MOST_REQUESTS", "MOST_STEPS", "WORTHWHILE", "ReplayTrials", "round_sizes", "spread_of"]

GIB, MIB = 1 << 30, 1 << 20
RATIO = 1.1
SMALLEST = 1 / 64
"""The smallest host memory to try, as a share of all distinct pages."""
KEPT = 0.99
"""The share of the gain of unbounded host memory that counts as all of it."""
WORTHWHILE = 0.005
"""The hits that host memory must gain, as a share of prompt tokens, before it is advised."""
MOST_REQUESTS, MOST_STEPS = 2_000, 500_000
"""Limits of a replay that is repeated without being asked for: some tenths of a second."""
METRICS = ("ttft_ms", "tpot_ms", "e2e_ms")
STATISTICS = ("mean", "p50", "p90", "p95", "p99")

Distributions = dict[str, dict[str, float | None]]
Found = TypeVar("Found")
_Sizes = tuple[int, ...]
"""Bytes of host memory and of disk."""
_Task = tuple[Callable[[Trace, ReplayConfig], Report], ReplayConfig]


def round_sizes(least_bytes: float, most_bytes: float, ratio: float = RATIO) -> list[int]:
    """Return round sizes such as 94 GiB, a tenth apart, from about `least_bytes` to at least `most_bytes`.

    `ratio`: of a size to the next smaller one.
    """
    sizes = {_rounded_up(most_bytes)}
    size = most_bytes / ratio
    while size > max(least_bytes, MIB / ratio):  # all below is rounded up to the same
        sizes.add(_rounded_up(size))
        size /= ratio
    return sorted(sizes)


def _rounded_up(num_bytes: float) -> int:
    for unit in (GIB, GIB // 10, MIB):
        if num_bytes >= 10 * unit:
            return -int(-num_bytes // unit) * unit
    return max(MIB, -int(-num_bytes // MIB) * MIB)


class ReplayTrials:
    """Measures the effect of more memory on a replay of `trace` under `config`; each answer costs some replays.

    `replay` replays the trace once. `is_asked`: repeat long replays as well. `on_replay` is called before each.
    `processes`: those that replay, which share the trace; default: this one.
    """

    def __init__(
        self,
        replay: Callable[[Trace, ReplayConfig], Report],
        trace: Trace,
        config: ReplayConfig,
        *,
        is_asked: bool = False,
        on_replay: Callable[[], object] | None = None,
        processes: Processes | None = None,
    ) -> None:
        self._replay = replay
        self._processes = Processes(shared=trace) if processes is None else processes
        self._is_asked = is_asked
        self._on_replay = on_replay
        self._config = config.certain
        self._found: dict[_Sizes, dict[str, Any]] = {}

    def least_pages(self, num_prompt_tokens: int, max_tokens: int) -> int:
        """Return the smallest pool, in pages, that fits a request with its output."""
        config = self._config
        if config.kv_groups == "off":
            return max(1, -(-(num_prompt_tokens + max_tokens - 1) // config.page_size))
        memory = config.memory
        from kvarts.core.kv.block_sizes import needs_of  # imported only for a trace with KV groups

        needs = needs_of(memory, page_size=config.page_size, most_new=config.max_num_batched_tokens)
        return -(-needs.of_request(num_prompt_tokens, max_tokens) * memory.block_bytes // memory.page_bytes)

    @property
    def can_have_host_memory(self) -> bool:
        """Whether host memory can be added."""
        try:
            self.with_memory(GIB * 1024)
        except ConfigError:
            return False
        return True

    def is_too_long(self, summary: dict[str, Any]) -> bool:
        """Whether the replay is too long to be repeated without being asked for."""
        is_long = summary["num_requests"] > MOST_REQUESTS or summary["num_steps"] > MOST_STEPS
        return is_long and not self._is_asked

    def host_memory(self, summary: dict[str, Any], most_bytes: int = 0) -> HostMemory | None:
        """Return the least host memory that keeps the hits of a replay with that `summary`; None if none helps.

        It is the first tier, alone: others of the configuration are left out.
        `most_bytes`: the largest size to try, if that is more than all distinct pages, which have no states.
        """
        if summary["distinct_pages"] is None or not self.can_have_host_memory:
            return None
        distinct_bytes = summary["distinct_pages"] * self._page_bytes
        most_bytes = max(distinct_bytes, most_bytes)
        sizes = [size for size in round_sizes(distinct_bytes * SMALLEST, most_bytes) if size >= self._page_bytes]
        if not sizes:
            return None
        return self._searched(lambda asked: _least(asked, sizes, summary["prefix_hit_ratio"] or 0.0))

    def replayed(self, host_bytes: int, disk_bytes: int = 0) -> dict[str, Any]:
        """Return the summary of a replay with these sizes below the device; each combination is replayed once."""
        return self.all_replayed([(host_bytes, disk_bytes)])[0]

    def all_replayed(self, sizes: Sequence[_Sizes]) -> list[dict[str, Any]]:
        """Return the summaries of replays with sizes of host memory and of disk."""
        return self._searched(lambda asked: asked.all(sizes))

    def _searched(self, search: Callable[[Inquiry[_Sizes]], Found]) -> Found:
        return self._processes.searched(
            search, _summary, self._task_of, _guess, found=self._found, on_ask=self._on_replay
        )

    def _task_of(self, sizes: _Sizes) -> _Task:
        return self._replay, self.with_memory(*sizes)

    @property
    def token_bytes(self) -> int:
        """Bytes of KV per token on each device: those of the model, else those of the tiers if no model is named."""
        config = self._config
        if config.placement is not None:
            return config.placement.kv_bytes_per_token
        return int(getattr(config.offload or self._offload(), "kv_bytes_per_token", 0))

    @property
    def _page_bytes(self) -> int:
        return self._config.page_bytes or self.token_bytes * self._config.page_size

    def with_memory(self, *sizes: int) -> ReplayConfig:
        """Return the configuration with `sizes` in bytes of its first tiers alone. Raise ConfigError if it cannot."""
        offload = self._config.offload or self._offload()
        return msgspec.structs.replace(self._config, offload=offload.with_sizes(*sizes))

    def _offload(self) -> OffloadConfig:
        placement = self._config.placement
        return OffloadConfig() if placement is None else OffloadConfig(kv_bytes_per_token=placement.kv_bytes_per_token)


def _summary(trace: Trace, task: _Task) -> dict[str, Any]:
    replay, config = task
    return replay(trace, config).summary


def _guess(_: _Sizes, __: object) -> list[tuple[float, dict[str, Any]]]:
    """Return the summaries of replays that keep the hits, and that do not."""
    return [(0.5, {"prefix_hit_ratio": 1.0}), (0.5, {"prefix_hit_ratio": 0.0})]


def _least(asked: Inquiry[_Sizes], sizes: Sequence[int], base: float) -> HostMemory | None:
    """Return the first of the `sizes` that keeps the hits of the last; None if these are not much above `base`."""

    def hit_ratio(size: int) -> float:
        return asked((size, 0))["prefix_hit_ratio"] or 0.0

    most = hit_ratio(sizes[-1])
    if most - base < WORTHWHILE:
        return None
    enough = base + KEPT * (most - base)
    low, high = -1, len(sizes) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if hit_ratio(sizes[middle]) >= enough:
            high = middle
        else:
            low = middle
    return HostMemory(num_bytes=sizes[high], hit_ratio=hit_ratio(sizes[high]), most_hit_ratio=most)


def spread_of(pairs: Sequence[tuple[Distributions, Distributions]]) -> Distributions:
    """Return one standard deviation of each statistic of latency, in milliseconds.

    `pairs`: the distributions, by metric, of two replays with cost models to either side. A statistic is None if a
    replay lacks it.
    """
    squares: dict[tuple[str, str], float | None] = {(a, b): 0.0 for a in METRICS for b in STATISTICS}
    for high, low in pairs:
        for (metric, statistic), sum_so_far in squares.items():
            one, other = high[metric][statistic], low[metric][statistic]
            if sum_so_far is None or one is None or other is None:
                squares[metric, statistic] = None
            else:
                squares[metric, statistic] = sum_so_far + ((one - other) / 2) ** 2
    spread: Distributions = {metric: {} for metric in METRICS}
    for (metric, statistic), total in squares.items():
        spread[metric][statistic] = None if total is None else sqrt(total)
    return spread

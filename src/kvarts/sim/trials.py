"""The benefit of more memory, found by replays: the least host memory that keeps the hits that eviction loses.

Sizes are tried on a grid, a tenth apart, by bisection: both the returned size and the next smaller one, which loses
more, have been replayed. A hit ratio counts as kept if it has all but a hundredth of the gain of unbounded host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from kvarts.errors import ConfigError
from kvarts.report.advice import HostMemory
from kvarts.report.report import Report
from kvarts.rooms import from_room
from kvarts.sim.config import ReplayConfig
from kvarts.traffic.trace import Trace

__all__ = ["MOST_REQUESTS", "MOST_STEPS", "ReplayTrials", "round_sizes"]

GIB, MIB = 1 << 30, 1 << 20
RATIO = 1.1
SMALLEST = 1 / 64
"""The smallest host memory to try, as a share of the working set."""
KEPT = 0.99
"""The share of the gain of unbounded host memory that counts as all of it."""
WORTHWHILE = 0.005
"""The hits that host memory must gain, as a share of prompt tokens, before it is advised."""
MOST_REQUESTS, MOST_STEPS = 2_000, 500_000
"""Limits of a replay that is repeated without being asked for: some tenths of a second."""


def round_sizes(least_bytes: float, most_bytes: float) -> list[int]:
    """Return round sizes such as 94 GiB, a tenth apart, from about `least_bytes` to at least `most_bytes`."""
    sizes = {_rounded_up(most_bytes)}
    size = most_bytes / RATIO
    while size > least_bytes:
        sizes.add(_rounded_up(size))
        size /= RATIO
    return sorted(sizes)


def _rounded_up(num_bytes: float) -> int:
    for unit in (GIB, GIB // 10, MIB):
        if num_bytes >= 10 * unit:
            return -int(-num_bytes // unit) * unit
    return max(MIB, -int(-num_bytes // MIB) * MIB)


class ReplayTrials:
    """Measures the effect of more memory on a replay of `trace` under `config`; each answer costs some replays.

    `replay` replays the trace once. `is_asked`: repeat long replays as well. `on_replay` is called before each.
    """

    def __init__(
        self,
        replay: Callable[[Trace, ReplayConfig], Report],
        trace: Trace,
        config: ReplayConfig,
        *,
        is_asked: bool = False,
        on_replay: Callable[[], object] | None = None,
    ) -> None:
        self._replay = replay
        self._trace = trace
        self._is_asked = is_asked
        self._on_replay = on_replay
        self._config = config.certain
        self._found: dict[tuple[int, int], dict[str, Any]] = {}

    def least_pages(self, num_prompt_tokens: int, max_tokens: int) -> int:
        """Return the smallest pool, in pages, that fits a request with its output."""
        config = self._config
        if config.kv_groups == "off":
            return max(1, -(-(num_prompt_tokens + max_tokens - 1) // config.page_size))
        memory = config.memory
        from kvarts.kv.group_needs import GroupNeeds  # imported only for a trace with KV groups

        needs = GroupNeeds(memory, page_size=config.page_size, most_new=config.max_num_batched_tokens)
        return -(-needs.of_request(num_prompt_tokens, max_tokens) * memory.block_bytes // memory.page_bytes)

    @property
    def can_have_host_memory(self) -> bool:
        """Whether host memory can be added."""
        try:
            self.with_memory(host_memory=GIB * 1024)
        except ConfigError:
            return False
        return True

    def is_too_long(self, summary: dict[str, Any]) -> bool:
        """Whether the replay is too long to be repeated without being asked for."""
        is_long = summary["num_requests"] > MOST_REQUESTS or summary["num_steps"] > MOST_STEPS
        return is_long and not self._is_asked

    def host_memory(self, summary: dict[str, Any]) -> HostMemory | None:
        """Return the least host memory that keeps the hits of a replay with that `summary`; None if none helps."""
        if summary["working_set_pages"] is None or not self.can_have_host_memory:
            return None
        working_set = summary["working_set_pages"] * self._page_bytes
        sizes = [size for size in round_sizes(working_set * SMALLEST, working_set) if size >= self._page_bytes]
        if not sizes:
            return None
        base, most = summary["prefix_hit_ratio"] or 0.0, self._hit_ratio(sizes[-1])
        if most - base < WORTHWHILE:
            return None
        enough = base + KEPT * (most - base)
        low, high = -1, len(sizes) - 1
        while high - low > 1:
            middle = (low + high) // 2
            if self._hit_ratio(sizes[middle]) >= enough:
                high = middle
            else:
                low = middle
        return HostMemory(num_bytes=sizes[high], hit_ratio=self._hit_ratio(sizes[high]), most_hit_ratio=most)

    def replayed(self, host_bytes: int, disk_bytes: int = 0) -> dict[str, Any]:
        """Return the summary of a replay with these sizes below the device; each combination is replayed once."""
        sizes = host_bytes, disk_bytes
        if sizes not in self._found:
            if self._on_replay is not None:
                self._on_replay()
            config = self.with_memory(host_memory=host_bytes or None, disk_memory=disk_bytes or None)
            self._found[sizes] = self._replay(self._trace, config).summary
        return self._found[sizes]

    @property
    def token_bytes(self) -> int:
        """Bytes of KV per token on each device: those of the model, else those of the tiers if no model is named."""
        config = self._config
        if config.placement is not None:
            return config.placement.kv_bytes_per_token
        return int(getattr(config.offload or self._offload(), "kv_bytes_per_token", 0))

    @property
    def _page_bytes(self) -> int:
        config = self._config
        return self.token_bytes * config.page_size if config.kv_groups == "off" else config.memory.page_bytes

    def _hit_ratio(self, host_bytes: int) -> float:
        return self.replayed(host_bytes)["prefix_hit_ratio"] or 0.0

    def with_memory(self, **sizes: int | None) -> ReplayConfig:
        """Return the configuration with tiers of these sizes. Raise ConfigError if it cannot have tiers."""
        offload: Any = self._config.offload or self._offload()
        pages = dict.fromkeys((name.replace("memory", "pages") for name in sizes), None)
        offload = msgspec.structs.replace(offload, **pages, **sizes)
        return msgspec.structs.replace(self._config, offload=offload)

    def _offload(self) -> Any:
        offload = from_room("offload.config", "OffloadConfig", field="host_memory")
        placement = self._config.placement
        return offload() if placement is None else offload(kv_bytes_per_token=placement.kv_bytes_per_token)

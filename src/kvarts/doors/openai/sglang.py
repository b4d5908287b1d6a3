"""The face of a mock of SGLang: its routes, its priorities and the bounds of its metrics, as of SGLang 0.5.23."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from functools import partial
from time import time
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import parse_qs

import msgspec

import kvarts
from kvarts.base.limits import brief
from kvarts.doors.openai.access import Access
from kvarts.doors.openai.errors import ApiError
from kvarts.doors.openai.generation import Exchange
from kvarts.doors.openai.meter import Bounds
from kvarts.doors.openai.routes import Routes, Row
from kvarts.doors.openai.served import Served
from kvarts.sim.config import ReplayConfig

if TYPE_CHECKING:
    from kvarts.doors.openai.metrics import ServerMetrics

__all__ = ["OF_SGLANG", "SglangRoutes", "sglang_priority"]

VERSION: Final = "0.5.23"
FIRST_TOKEN_S = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 200.0, 400.0)
REQUEST_S = (*FIRST_TOKEN_S, 600.0, 1200.0, 1800.0, 2400.0)
TOKEN_S = (0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8,
           1.0, 2.0, 4.0, 6.0, 8.0)  # fmt: skip
QUEUE_S = (0.0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 15.0, 20.0,
           *map(float, range(30, 101, 10)), *map(float, range(200, 1001, 100)),
           1200.0, 1400.0, 1600.0, 1800.0, 2000.0, 2500.0, 3000.0)  # fmt: skip
TOKENS = (100, 300, 500, 700, 1000, 1500, *range(2000, 10_001, 1000), *range(12_500, 30_001, 2500), 35_000, 40_000,
          60_000, 80_000, 100_000, 200_000, 300_000, 400_000, 600_000, 800_000, 1_000_000, 1_100_000)  # fmt: skip
OF_SGLANG: Final = Bounds(FIRST_TOKEN_S, TOKEN_S, REQUEST_S, QUEUE_S, TOKENS)
"""The bounds of SGLang's histograms."""
FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)
MOST_WAIT_S: Final = 600.0
LOWEST: Final = -(1 << 63)


def sglang_priority(config: ReplayConfig, priority: int | None) -> int:
    """Return the priority in the engine of a request: as it was given, and the least important without one."""
    if priority is not None or not config.enable_priority_scheduling:
        return priority or 0
    return -LOWEST - 1 if config.schedule_low_priority_values_first else LOWEST


def config_of(served: Served) -> ReplayConfig:
    """Return the configuration of a mocked engine."""
    return cast("ReplayConfig", served.host.config)


class SglangRoutes(Routes):
    """The routes of a server of SGLang."""

    def of_engine(self) -> list[Row]:
        """Return the routes that SGLang has."""
        return [
            ("GET", "/health_generate", self.health, Access.OPEN, {}),
            *(("GET", path, self.server_info, Access.KEY, {}) for path in ("/server_info", "/get_server_info")),
            *(("GET", path, self.model_info, Access.KEY, {}) for path in ("/model_info", "/get_model_info")),
            ("GET", "/v1/loads", self.loads, Access.KEY, {}),
            *(
                (method, "/flush_cache", self.flush_cache, Access.ADMIN, {"query": [("timeout", "seconds to wait")]})
                for method in ("GET", "POST")
            ),
        ]

    def open_metrics(self) -> ServerMetrics:
        """Return the metrics of the engines, by the names of SGLang."""
        from kvarts.doors.openai.metrics import ServerMetrics
        from kvarts.doors.openai.sglang_metrics import SglangMetrics

        return ServerMetrics(
            self.engines, make=lambda served: SglangMetrics(served, config_of(served), partial(load_of, served))
        )

    async def server_info(self, exchange: Exchange) -> None:
        """Return the settings of the server, by the names of its arguments, and the size of its memory."""
        served = self.engines[0]
        told = _settings_of(served)
        num_tokens = config_of(served).pool_tokens
        state = {**told, "effective_max_running_requests_per_dp": served.host.config.max_num_seqs}
        state["memory_usage"] = {"token_capacity": num_tokens}
        told |= {
            "status": "ready",
            "max_total_num_tokens": num_tokens,
            "max_req_input_len": served.limits.max_model_len - 1,
            "kv_event_sources": [source_of(each, served.host.config.page_size) for each in self.event_sources],
            "internal_states": [state],
            "version": VERSION,
            "frontend": "kvarts",
            "kvarts": {"version": kvarts.__version__, **served.facts},
        }
        await self.tell(exchange, told)

    async def model_info(self, exchange: Exchange) -> None:
        """Return the name and kind of the model."""
        served = self.engines[0]
        settings = _settings_of(served)
        told = {name: settings[name] for name in ("model_path", "served_model_name", "tokenizer_path", "load_format")}
        told |= {
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "reasoning_parser": None,
            "tool_call_parser": None,
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": None,
            "architectures": None,
        }
        await self.tell(exchange, told)

    async def loads(self, exchange: Exchange) -> None:
        """Return the requests and the tokens in use of each engine, as far as SGLang's fields have them here."""
        now_s = time()
        told = {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": VERSION,
            "accelerator": None,
            "num_accelerators": 1,
            "loads": [{"timestamp": now_s, "dp_rank": rank, **load_of(each)} for rank, each in enumerate(self.engines)],
        }
        await self.tell(exchange, told)

    async def flush_cache(self, exchange: Exchange) -> None:
        """Evict every cached page; answer 400, and evict nothing, if requests run or wait after `timeout` seconds."""
        text = parse_qs(exchange.request.query).get("timeout", ["0"])[0]
        try:
            left_s = msgspec.convert(text, float, strict=False)
        except msgspec.ValidationError:
            left_s = -1.0
        if not 0.0 <= left_s <= MOST_WAIT_S:
            raise ApiError(
                400, f"timeout must be from 0 to {MOST_WAIT_S:g} seconds, got {brief(text)}", param="timeout"
            )
        while not (is_done := all([await _flush(each) for each in self.engines])) and left_s > 0.0:
            await asyncio.sleep(0.01)
            left_s -= 0.01
        status, told = (200, FLUSHED) if is_done else (400, "Flush cache failed.\n")
        await exchange.response.whole(told.encode(), status=status, content_type=b"text/plain; charset=utf-8")


async def _flush(served: Served) -> bool:
    """Evict every cached page, unless a page is in use; return whether it did."""
    core, clock = served.host.core, served.host.clock

    def flush(_: object) -> bool:
        if core.scheduler.host is not None:  # copies may have ended since the last request
            core.scheduler.host.end_copies(clock.now_ns())
        return core.reset_cache(preempts=False)

    return await served.between_steps(flush)


def _settings_of(served: Served) -> dict[str, Any]:
    """Return the settings of the engine, by the names of SGLang's arguments."""
    config = config_of(served)
    rules = config.batches
    assert rules is not None
    name = served.names[0]
    return {
        "model_path": name,
        "tokenizer_path": name,
        "served_model_name": name,
        "load_format": "dummy",
        "context_length": served.limits.max_model_len,
        "page_size": config.page_size,
        "max_running_requests": config.max_num_seqs,
        "chunked_prefill_size": config.max_num_batched_tokens,
        "max_prefill_tokens": rules.max_prefill_tokens,
        "schedule_policy": rules.policy,
        "schedule_conservativeness": rules.conservativeness,
        "scheduler_recv_interval": config.scheduler_recv_interval,
        "swa_full_tokens_ratio": config.swa_full_tokens_ratio,
        "disable_hybrid_swa_memory": config.disable_hybrid_swa_memory,
        "disable_overlap_schedule": not rules.overlaps,
        "disable_radix_cache": False,
        "radix_eviction_policy": rules.eviction,
        "radix_eviction_policy_config": rules.eviction_config or None,
        "enable_priority_scheduling": rules.has_priorities,
        "disable_priority_preemption": not rules.preempts,
        "schedule_low_priority_values_first": rules.low_first,
        "priority_scheduling_preemption_threshold": rules.threshold,
        "retraction_policy": config.retraction_policy,
        "enable_hierarchical_cache": config.host is not None,
        "hicache_ratio": config.hicache_ratio,
        "hicache_size": config.hicache_size,
        "hicache_write_policy": config.hicache_write_policy,
        "hicache_storage_backend": config.hicache_storage_backend if config.has_storage else None,
        "hicache_storage_prefetch_policy": config.hicache_storage_prefetch_policy,
        "dp_size": 1,
        "disaggregation_mode": "null",
        "enable_metrics": True,
    }


def source_of(source: dict[str, Any], page_size: int) -> dict[str, Any]:
    """Return where KV events are published, by the names of SGLang."""
    told = {
        "dp_rank": source["data_parallel_rank"],
        "endpoint": source["endpoint"],
        "topic": source["topic"],
        "block_size": page_size,
    }
    replay = source["replay_endpoint"]
    return told if replay is None else {**told, "replay_endpoint": replay}


def load_of(served: Served) -> dict[str, Any]:
    """Return the load of an engine, by the names of SGLang."""
    core, config = served.host.core, config_of(served)
    scheduler = core.scheduler
    num_used = scheduler.cache.num_used * config.page_size
    return {
        "num_running_reqs": scheduler.running.num_running,
        "num_waiting_reqs": scheduler.num_waiting,
        "num_used_tokens": num_used,
        "num_total_tokens": num_used + scheduler.waiting.num_waiting_tokens,
        "max_total_num_tokens": config.pool_tokens,
        "max_running_requests": config.max_num_seqs,
        "token_usage": num_used / config.pool_tokens,
    }

"""Assembly of an engine behind a front end: the engine of a mock, its link, and its core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvarts.core.event_log import EventReader
from kvarts.doors.openai.failures import fail_transfers
from kvarts.doors.openai.opening import DEFAULT_TOKENS, mock_limits, mock_of
from kvarts.doors.openai.recordings import ArrivalRecorder
from kvarts.doors.openai.served import Door, Limits
from kvarts.doors.vllm_front.calls import Calls
from kvarts.doors.vllm_front.core import Behind, FrontCore, HeldEngine, StepTimes, core_script
from kvarts.doors.vllm_front.link import Link
from kvarts.doors.vllm_front.model import FrontModel
from kvarts.doors.vllm_front.protocol import Protocol
from kvarts.run.llm_engine import CoreEngine
from kvarts.sim.config import ReplayConfig

__all__ = ["DEFAULT_TOKENS", "FrontSettings", "open_core"]


class FrontSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an engine behind a front end, besides those of the engine.

    `handshake`: where the front end waits for engines. `fail`: a script of failures, without those of HTTP, which
    belongs to the front end. `start_s`: how long to wait for the front end. `is_recording`: record arrivals.
    """

    handshake: str
    behind: Behind
    speedup: float = 1.0
    seed: int = 0
    fail: str = ""
    start_s: float = 120.0
    parallel_config_hash: str | None = None
    is_recording: bool = False

    def __post_init__(self) -> None:
        core_script(self.fail)


def open_core(
    config: ReplayConfig,
    model: FrontModel,
    protocol: Protocol,
    settings: FrontSettings,
    *,
    rank: int = 0,
    readers: Sequence[EventReader] = (),
    goes_on: Callable[[], object] = lambda: None,
) -> FrontCore:
    """Return a core whose front end knows it. `goes_on`: called while it waits for that, and may raise an error.

    Raise ConfigError if there is no front end in time.
    """
    link = Link(settings.handshake, rank)
    try:
        return _connected(config, model, protocol, settings, link, readers, goes_on)
    except BaseException:
        link.close()
        raise


def _connected(
    config: ReplayConfig,
    model: FrontModel,
    protocol: Protocol,
    settings: FrontSettings,
    link: Link,
    readers: Sequence[EventReader],
    goes_on: Callable[[], object],
) -> FrontCore:
    limits = mock_limits(Door(limits=Limits(max_model_len=settings.behind.max_model_len)), config)
    behind = msgspec.structs.replace(settings.behind, max_model_len=limits.max_model_len)
    held: list[HeldEngine] = []

    def hold(core: CoreEngine) -> CoreEngine:
        held.append(HeldEngine(core))
        return held[0]

    times = StepTimes()
    host = mock_of(
        config,
        (*readers, times),
        seed=settings.seed,
        speedup=settings.speedup,
        max_positions=limits.max_model_len,
        vocabulary=model.vocabulary,
        around=hold,
    )
    script = core_script(settings.fail, seed=settings.seed)
    fail_transfers(host.core.tiers, script.transfer_fails if script.has_transfers else None)()
    addresses = link.greet(timeout_s=settings.start_s, goes_on=goes_on)
    facts: dict[str, Any] = {
        "max_model_len": limits.max_model_len,
        "num_gpu_blocks": host.num_gpu_blocks,
        "block_size": config.page_size,
        "dp_stats_address": addresses.frontend_stats_publish_address,
        "dtype": f"torch.{model.dtype}",
        "vllm_version": protocol.version,
        "world_size": 1,
        "data_parallel_size": behind.num_ranks,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "data_parallel_rank": link.rank,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "instance_id": f"kvarts-{link.rank}",
        "supports_lora": True,
        "max_loras": 1,
        "enable_sleep_mode": True,
        "kv_cache_size_tokens": config.pool_tokens,
        **behind.facts,
    }
    link.connect(addresses, protocol.ready(facts))
    core = FrontCore(
        host,
        link,
        protocol,
        model,
        behind,
        held=held[0],
        times=times,
        script=script,
        answering=lambda core: Calls(core).call,
    )
    core.recorder = ArrivalRecorder() if settings.is_recording else None
    named = settings.parallel_config_hash
    link.say_ready({} if named is None else {"parallel_config_hash": named}, goes_on=goes_on)
    return core

"""Opens a session runtime on a transformers model or on a mock."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from kvarts.base.clock import Clock, VirtualClock, WallClock
from kvarts.base.errors import ConfigError
from kvarts.base.units import parse_bytes
from kvarts.core.build import Planning, Watching, build_engine
from kvarts.core.config import EngineConfig, EngineOptions
from kvarts.core.event_log import EventReader
from kvarts.core.executor import CostModel
from kvarts.core.parts.combines import check_combination
from kvarts.core.tiers.config import OffloadConfig
from kvarts.cost.roofline import RooflineCost
from kvarts.proof.audit.opening import audit_of
from kvarts.run.engine_loop import EngineLoop, ModelHost
from kvarts.run.llm_engine import LLMEngine
from kvarts.run.mock import MockExecutor
from kvarts.run.page_bytes import NoPageBytes
from kvarts.run.sessions.keeper import Keeper
from kvarts.run.sessions.sessions import Sessions
from kvarts.run.sessions.soak.run import SoakClock
from kvarts.run.sessions.table import SessionTable, check_settings, memory_of
from kvarts.run.sessions.values import SessionsConfig, SessionSettings
from kvarts.run.text import DetokenizingExecutor

__all__ = ["mock_host", "open_sessions", "open_virtual_target", "sessions_on"]

Record = Callable[..., EventReader | None]
"""Returns a reader of steps, or None, for an engine with this configuration and this many pages in each tier; for a
model with KV groups also the keywords `num_blocks` and `memory`, a description."""

MakeMock = Callable[..., ModelHost]

DEFAULT_OPTIONS = EngineOptions(max_num_seqs=256)
MOCK_VOCAB_SIZE = 151_936
MOCK_TOKEN_BYTES = 114_688
"""The vocabulary and KV size of Qwen3-0.6B in bfloat16: 28 layers x 8 KV heads x 128 x 2 x 2 bytes."""


def mock_host(
    config: EngineConfig,
    *,
    clock: Clock | None = None,
    cost: CostModel | None = None,
    speedup: float = 1.0,
    seed: int = 0,
    token_bytes: int = MOCK_TOKEN_BYTES,
    vocab_size: int = MOCK_VOCAB_SIZE,
    max_positions: int | None = None,
    readers: Sequence[EventReader] = (),
    audit: bool = False,
) -> ModelHost:
    """Return a mock model that takes the time given by `cost`, by default that of llama-3.1-8b on an H100."""
    clock = WallClock() if clock is None else clock
    cost = RooflineCost(llm="llama-3.1-8b", device="h100-80gb") if cost is None else cost
    executor = MockExecutor(
        config,
        cost,
        clock,
        vocab_size=vocab_size,
        seed=seed,
        speedup=speedup,
    )
    detokenizing = DetokenizingExecutor(executor, max_num_seqs=config.max_num_seqs, clock=clock)
    core = build_engine(
        config,
        detokenizing,
        planning=Planning(step_ns=cost.step_ns),
        watching=Watching(readers, audit=audit_of(audit)),
    )
    engine = LLMEngine(core, executor, detokenizing, clock, page_size=config.page_size)
    return ModelHost(
        loop=EngineLoop(engine),
        core=core,
        config=config,
        clock=clock,
        slots=executor.slots,
        rotate_late=executor.rotate_late,
        kv=NoPageBytes(),
        token_bytes=token_bytes,
        vocab_size=vocab_size,
        max_positions=max_positions,
        fingerprint=lambda: f"mock {seed} {vocab_size} {token_bytes}",
    )


def open_sessions(
    *,
    model: str | Path | None = None,
    mock: bool | MakeMock = False,
    host_memory: str | int | None = None,
    shares: Mapping[str, float] | None = None,
    state_dir: str | Path | None = None,
    say: Callable[[str], object] = lambda _: None,
    record: Record | None = None,
    clock: Clock | None = None,
    speedup: float = 1.0,
    **given: Any,
) -> Sessions:
    """Return sessions on the model in the directory `model`, or on a mock: `mock_host`, or what `mock` returns for it.

    `given`: settings of SessionsConfig, as `max_sessions`, and of the engine as `options`, or as fields of these, as
    `kv_memory="2GiB"`; the default `kv_memory` of a mock is 4 GiB. `session_memory`: bytes of KV for bounded sessions,
    as a number or as 2GiB. `host_memory`: memory below the pages, for unbounded sessions that are kept there. `shares`:
    of owners, see Capacity. `state_dir`: directory in which sessions outlive the process; `say` receives one line per
    item that could not be kept or read. `record` returns a reader of the engine's events. `speedup`: of a mock.

    Raise ConfigError for settings that exclude each other or leave no room for a session.
    """
    if bool(mock) == (model is not None):
        raise ConfigError("is needed, or a mock, and not both", field="model")
    memory = given.pop("session_memory", given.pop("memory_bytes", None))
    given["memory_bytes"] = parse_bytes(memory) if isinstance(memory, str) else memory
    of_sessions = {name: given.pop(name) for name in SessionsConfig.__struct_fields__ if name in given}
    config = SessionsConfig(**{name: value for name, value in of_sessions.items() if value is not None})
    options = msgspec.structs.replace(given.pop("options", DEFAULT_OPTIONS), **given)
    if mock and options.kv_groups not in (None, "off"):
        raise ConfigError("a mock counts whole pages", field="kv_groups", hint="Leave it off.")
    if mock and options.kv_dtype != "auto":
        raise ConfigError("a mock has no KV", field="kv_dtype", hint="Leave it to auto.")
    if mock and host_memory is not None:
        raise ConfigError("a mock has no host memory", field="host_memory", hint="Leave it out.")
    if mock:
        kv_memory = "4GiB" if options.kv_memory == "auto" else options.kv_memory
        mock_bytes = parse_bytes(kv_memory) if isinstance(kv_memory, str) else kv_memory
        engine = options.engine_config(max(1, mock_bytes // (MOCK_TOKEN_BYTES * options.page_size)))
        host = (mock if callable(mock) else mock_host)(engine, clock=clock, speedup=speedup)
        tiers: Mapping[str, int] = {}
    else:
        from kvarts.run.torch.llm import LLM  # which needs PyTorch

        llm = LLM(
            model,
            options=msgspec.structs.replace(options, attention=_attention(options.attention, options.device)),
            offload=None if host_memory is None else _eager(host_memory),
            clock=clock,
        )
        host, tiers = llm.host(), llm.tiers
    blocks: dict[str, Any] = {}
    if host.memory is not None:
        num_blocks = host.memory.num_blocks(host.config.num_pages)
        blocks = {"num_blocks": num_blocks, "memory": host.memory.to_builtins()}
    reader = None if record is None else record(host.config, tiers, **blocks)
    if reader is not None:
        host.core.log.add_reader(reader)
    return sessions_on(host, config, shares=shares, state_dir=state_dir, say=say)


def sessions_on(
    host: ModelHost,
    config: SessionsConfig,
    *,
    shares: Mapping[str, float] | None = None,
    state_dir: str | Path | None = None,
    say: Callable[[str], object] = lambda _: None,
) -> Sessions:
    """Return sessions on a model that may also serve other requests. Raise as `open_sessions` does."""
    # Room for chunks reduces that for sessions, so with little memory it is limited.
    memory = memory_of(host)
    total = memory.total if config.max_pages is None else min(config.max_pages, memory.total)
    most_tokens = max(host.config.page_size, memory.most_tokens(total // 4))
    config = msgspec.structs.replace(config, chunk_tokens=min(config.chunk_tokens, most_tokens))
    check_settings(config, host)
    table = SessionTable(host, config, shares=shares)
    if state_dir is None:
        return Sessions(table)
    keeper = Keeper(table, Path(state_dir), say)
    host.loop.call(lambda _: keeper.restore())
    return Sessions(table, keeper)


@asynccontextmanager
async def open_virtual_target(*, sink: int, window: int) -> AsyncIterator[tuple[Any, SoakClock]]:
    """Yield the sessions of one owner on a mock, and its virtual clock, for a soak without real waiting."""
    clock = VirtualClock()
    sessions = open_sessions(mock=True, defaults=SessionSettings(sink=sink, window=window), clock=clock)

    async def sleep_s(duration_s: float) -> None:
        clock.wait_until_ns(clock.now_ns() + round(duration_s * 1e9))

    calls = ("create", "append", "generate", "info", "close")
    try:
        of_owner = SimpleNamespace(**{name: partial(getattr(sessions, name), "soak") for name in calls})
        yield of_owner, SoakClock(lambda: clock.now_ns() / 1e9, sleep_s, is_virtual=True)
    finally:
        await sessions.shut_down()


def _eager(host_memory: str | int) -> OffloadConfig:
    """Return settings for host memory with eager stores: every page is copied as soon as it is complete."""
    num_bytes = parse_bytes(host_memory) if isinstance(host_memory, str) else host_memory
    return OffloadConfig(host_memory=num_bytes, policy="eager")


def _attention(attention: str, device: str) -> str:
    """Return the attention backend. On a GPU, only one supports a sink and a window."""
    if attention in ("flash", "triton"):
        check_combination({"fused": "attention", "windows": "window"})
    if attention == "auto" and device != "cpu":
        import torch

        if device.startswith("cuda") or torch.cuda.is_available():
            return "sdpa"
    return attention

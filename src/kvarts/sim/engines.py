"""Default settings of serving engines around their steps, by name, for `--engine`.

A setting that is given explicitly wins. Sources are the documentation of the engines: vLLM 0.14 and later
("Optimization and Tuning", `vllm serve --help`, `AsyncScheduler`), SGLang 0.5 ("Server Arguments"), TensorRT-LLM 1.0
(`trtllm-serve`, "Overlap Scheduler"). No engine documents the time of its front end; it was fitted to measured times to
first token (docs/accuracy.md).
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

from kvarts.settings import Given, SettingError, settings_of

__all__ = ["ENGINES", "EngineName", "EngineSet", "engine_of", "with_engine"]

EngineName = Literal["none", "vllm", "sglang", "tensorrt-llm", "trtllm"]


class EngineSet(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults of one engine, by the settings of a replay.

    `separate_passes`: a step computes its prompts first, and its decodes in a separate pass.
    """

    max_batched_tokens: int
    max_seqs: int
    memory_fraction: float
    async_scheduling: bool
    frontend_ms: float
    separate_passes: bool = False


TENSORRT_LLM = EngineSet(
    max_batched_tokens=8192, max_seqs=2048, memory_fraction=0.9, async_scheduling=True, frontend_ms=25.0
)
ENGINES: dict[EngineName, EngineSet] = {
    "vllm": EngineSet(
        max_batched_tokens=8192, max_seqs=1024, memory_fraction=0.9, async_scheduling=True, frontend_ms=6.0
    ),
    "sglang": EngineSet(
        max_batched_tokens=8192,
        max_seqs=2048,
        memory_fraction=0.88,
        async_scheduling=True,
        frontend_ms=25.0,
        separate_passes=True,
    ),
    "tensorrt-llm": TENSORRT_LLM,
    "trtllm": TENSORRT_LLM,
}


def engine_of(name: str) -> EngineSet | None:
    """Return the defaults of an engine; None for `none`. Raise SettingError for an unknown one."""
    if name not in get_args(EngineName):
        raise SettingError(f"must be one of {', '.join(get_args(EngineName))}, got {name!r}", "engine")
    return ENGINES.get(name)  # type: ignore[call-overload, no-any-return]


def with_engine(given: Given, *structs: type) -> Given:
    """Return `given` over the defaults of the engine that it names, for the settings of `structs`."""
    engine = engine_of(given["engine"])
    if engine is None:
        return given
    facts: dict[str, Any] = msgspec.to_builtins(engine)
    if "model" not in given and "device" not in given:
        del facts["memory_fraction"]  # only a device has it
    return given.over(given.implied("engine", [each for struct in structs for each in settings_of(struct)], facts))

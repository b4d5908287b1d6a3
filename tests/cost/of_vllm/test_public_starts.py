"""Public start-up logs of vLLM: with their memory equal to the token, with the device within the interval.

`starts.toml` has the logs with their addresses. Logs state memory in 0.01 GiB, so that several numbers of blocks can be
meant: a log is met if one of them gives both of its figures.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvarts.base.units import parse_bytes
from kvarts.cost.hardware.device import Device, load_device
from kvarts.cost.hardware.geometry import Geometry
from kvarts.cost.hardware.model_config import load_geometry
from kvarts.cost.vllm.planning import Plan
from kvarts.cost.vllm.start import Start, StartSettings, available_bytes, start

TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("starts.toml").read_text())
LOGS: list[dict[str, Any]] = TABLE["starts"]
ROUNDED = 5 << 30
"""Half of the last digit of a log, in bytes times 1,000."""
DIFFERING = (
    "gemma-3-27b-it-FP8-dynamic_tp2",  # two ranks with the memory of one: the rank with less decides
    "vllm-bf16-auto-mtp",  # drafts in a build of its own, 0.1.dev1+g4d2a68d64
)
"""Logs whose figures are not those of the rules."""
SETTINGS = (
    "tensor_parallel",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "memory_fraction",
    "kv_dtype",
    "num_drafts",
    "has_async_scheduling",
    "has_prefix_caching",
)


def ident(log: dict[str, Any]) -> str:
    return f"{log['model']}-{log['device']}-{log['tokens']}"


def started(log: dict[str, Any]) -> tuple[Geometry, Device, StartSettings, Start]:
    """Return the model, the device, the settings and the start of a log, by the rules of 0.32."""
    own = TABLE["devices"].get(log["device"])
    if own is None:
        device = load_device(log["device"])
    else:
        usable = (own["usable_gib"][0], own["usable_gib"][1])
        device = Device(
            log["device"], "", own["memory_gib"] << 30, 1.0, {"bfloat16": 1.0}, 0.0, "pcie", own["capability"], usable
        )
    geometry = load_geometry(log["model"], log.get("weights")).on(device)
    settings = StartSettings(version="0.32", **{key: log[key] for key in SETTINGS if key in log})
    return geometry, device, settings, start(geometry, device, settings)


def meets(log: dict[str, Any], plan: Plan) -> bool:
    """Return whether a plan has the figures of a log."""
    tokens = plan.kv_cache_tokens
    if log.get("is_divided"):
        assert plan.num_blocks is not None
        tokens = plan.num_blocks // len(plan.groups) * min(group.block_size for group in plan.groups)
    return tokens == log["tokens"] and log.get("concurrency") in (None, round(plan.max_concurrency or 0, 2))


def is_exact(log: dict[str, Any]) -> bool:
    *_, decided = started(log)
    stated = parse_bytes(log["available"])
    slack = ROUNDED // 1000 if log["available"].endswith("GiB") else 0
    least, most = decided.plan(stated - slack), decided.plan(stated + slack)
    assert least.num_blocks is not None and least.block_bytes is not None and most.num_blocks is not None
    counts = range(least.num_blocks, most.num_blocks + 1)
    return any(meets(log, decided.plan(count * least.block_bytes)) for count in counts)


def is_inside(log: dict[str, Any]) -> bool:
    geometry, device, settings, decided = started(log)
    available = available_bytes(geometry, device, settings, decided)
    return available.least <= parse_bytes(log["available"]) <= available.most


def is_measured(log: dict[str, Any]) -> bool:
    """Return whether vLLM measured the memory, rather than being given it, and the log states the share."""
    return "memory_fraction" in log


@pytest.mark.parametrize("log", LOGS, ids=ident)
def test_blocks_and_tokens_of_the_log(log: dict[str, Any]) -> None:
    assert is_exact(log) != any(name in log["source"] for name in DIFFERING)


@pytest.mark.parametrize("log", [log for log in LOGS if is_measured(log)], ids=ident)
def test_the_interval_has_the_memory_of_the_log(log: dict[str, Any]) -> None:
    assert is_inside(log)


def test_there_are_enough_logs() -> None:
    assert len(LOGS) >= 30 and sum(map(is_measured, LOGS)) >= 20
    assert len({log["source"].partition("#")[0] for log in LOGS}) >= 30
    assert len({log["model"] for log in LOGS}) >= 8

"""Starts with options of `vllm serve`: the results of vLLM's own configuration, model classes and planning.

`splits.json`: for a model, a version, a device, tensor and decode context parallelism and arguments of EngineArgs, the
block, tokens per step, sequences and length, bytes for KV, and the plan: blocks, tokens, whether CUDA
graphs are refused, the fitted length, and groups by block and number of layers; or how the refusal begins.

`families.json` has the same for configs of families that no preset has, with the fields that are read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvarts.cost.hardware.device import load_device
from kvarts.cost.hardware.model_config import load_geometry
from kvarts.cost.vllm.start import Start, StartSettings, start

SPLITS: dict[str, Any] = json.loads(Path(__file__).with_name("splits.json").read_text())
FAMILIES: dict[str, Any] = json.loads(Path(__file__).with_name("families.json").read_text())
RENAMED = {
    "kv_cache_dtype": "kv_dtype",
    "enable_prefix_caching": "has_prefix_caching",
    "async_scheduling": "has_async_scheduling",
    "num_gpu_blocks_override": "num_blocks_override",
    "mamba_ssm_cache_dtype": "ssm_dtype",
}
NEGATED = {"enforce_eager": "has_full_graphs", "disable_hybrid_kv_cache_manager": "has_hybrid_manager"}


def started(key: str, path: Path | None = None) -> Start:
    """Return the start of a row. `path`: the config, if the model has no name that is known."""
    model, version, device, ways, shared, arguments = key.split(" ", 5)
    given: dict[str, Any] = {"kv_cache_dtype": "auto", **json.loads(arguments)}
    settings: dict[str, Any] = {NEGATED[name]: not given.pop(name) for name in NEGATED if name in given}
    if "performance_mode" in given:
        settings["is_throughput"] = given.pop("performance_mode") == "throughput"
    if model.rpartition("/")[2].startswith("GLM-5") and device == "b200" and given["kv_cache_dtype"] == "auto":
        del given["kv_cache_dtype"]  # vLLM takes fp8 there, as kvarts does without a format
    settings |= {RENAMED.get(name, name): value for name, value in given.items()}
    settings |= {"tensor_parallel": int(ways[2:]), "context_parallel": int(shared[3:]), "version": version}
    on = load_device(device)
    return start(load_geometry(path or model).on(on), on, StartSettings(**settings))


@pytest.mark.parametrize("key", SPLITS)
def test_start_is_vllms(key: str) -> None:
    expected, own = SPLITS[key], started(key)
    if isinstance(expected, str):
        assert own.refusal is not None and own.refusal.startswith(expected)
        return
    check(own, expected)


@pytest.mark.parametrize("key", FAMILIES["starts"])
def test_start_of_a_family_is_vllms(tmp_path: Path, key: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FAMILIES["configs"][key.split(" ", maxsplit=1)[0]]))
    check(started(key, path), FAMILIES["starts"][key])


def check(own: Start, expected: list[Any]) -> None:
    """Assert that a start is that of vLLM."""
    block_size, tokens, seqs, length, available, *of_plan = expected
    assert (own.max_num_batched_tokens, own.max_num_seqs, own.max_model_len) == (tokens, seqs, length)
    plan = own.plan(available)
    if len(of_plan) == 1:
        assert plan.num_blocks is None and plan.refusal is not None and plan.refusal.startswith(of_plan[0])
        return
    groups = [[group.block_size, len(group.layers)] for group in plan.groups]
    found = [plan.num_blocks, plan.kv_cache_tokens, plan.refusal is not None, plan.max_model_len, groups]
    assert own.block_size == block_size and found == of_plan


def test_many_models_and_options_are_compared() -> None:
    assert len(SPLITS) >= 60
    assert len({key.split(" ")[0] for key in SPLITS}) >= 30
    for name in (*RENAMED, *NEGATED, "performance_mode", "block_size", "max_model_len"):
        assert sum(f'"{name}"' in key for key in SPLITS) >= 1, name

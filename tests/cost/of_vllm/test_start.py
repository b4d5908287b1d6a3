"""vLLM's start for published models: what its own configuration, model classes and planning give on several devices.

`plans.json`: for a model, a device, a version, a tensor parallelism, a format of KV and drafted tokens (`mtp3`), the
block, tokens a step, sequences and length that vLLM's EngineArgs give, and plans by bytes for KV: blocks, tokens,
whether CUDA graphs are refused, and groups by block and number of layers; or how the refusal begins, and the length
that it names. Or how vLLM refuses the model on the device.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvarts.base.errors import ConfigError
from kvarts.cost.hardware.device import load_device
from kvarts.cost.hardware.model_config import load_geometry
from kvarts.cost.vllm.planning import Version
from kvarts.cost.vllm.start import Start, StartSettings, batch_defaults, parse_engine, start

PLANS: dict[str, Any] = json.loads(Path(__file__).with_name("plans.json").read_text())
VERSIONS: dict[str, Version] = {"0.32": "0.32", "0.33": "0.33"}


def started(name: str, device: str = "h100", **settings: Any) -> Start:
    on = load_device(device)
    return start(load_geometry(name).on(on), on, StartSettings(**settings))


@pytest.mark.parametrize("key", PLANS)
def test_start_is_vllms(key: str) -> None:
    model, device, version, ways, kv_dtype, *drafts = key.split(" ")
    own = started(
        model,
        device,
        version=VERSIONS[version],
        tensor_parallel=int(ways[2:]),
        kv_dtype=kv_of(key, kv_dtype),
        num_drafts=int(drafts[0][3:]) if drafts else 0,
    )
    if isinstance(PLANS[key], str):
        assert own.refusal is not None and own.refusal.startswith(PLANS[key])
        return
    block_size, tokens, seqs, length, plans = PLANS[key]
    assert (own.block_size, own.max_num_batched_tokens, own.max_num_seqs) == (block_size, tokens, seqs)
    assert own.max_model_len == length
    for available, *expected in plans:
        plan = own.plan(available)
        if plan.num_blocks is None:
            assert plan.refusal is not None
            assert [plan.refusal[:30], plan.longest] == expected
            continue
        groups = [[group.block_size, len(group.layers)] for group in plan.groups]
        assert [plan.num_blocks, plan.kv_cache_tokens, plan.refusal is not None, groups] == expected


def kv_of(key: str, kv_dtype: str) -> str | None:
    """Return the format of KV; GLM-5 keeps another than its own on compute capability 10 unless one is given."""
    return None if kv_dtype == "auto" and key.startswith("zai-org/GLM") and "b200" in key else kv_dtype


def test_many_models_and_devices_are_compared() -> None:
    assert len({key.split(" ")[0] for key in PLANS}) >= 100
    assert len({key.split(" ")[1] for key in PLANS}) >= 3
    assert len(PLANS) >= 380


@pytest.mark.parametrize(
    ("device", "version", "expected"),
    [
        ("b200", "0.33", (16_384, 1024)),
        ("h200", "0.33", (8192, 1024)),
        ("rtx-pro-6000", "0.32", (8192, 1024)),
        ("a100-80gb", "0.33", (2048, 256)),
        ("l4", "0.33", (2048, 256)),
    ],
)
def test_defaults_by_device(device: str, version: Version, expected: tuple[int, int]) -> None:
    assert batch_defaults(load_device(device), version) == expected


def test_a_version_that_is_not_known_is_refused() -> None:
    assert parse_engine("vllm") == parse_engine("vllm==0.33.0") == "0.33"
    assert parse_engine("vllm==0.32") == "0.32"
    for text in ("vllm==0.31", "sglang", "vllm==", "0.33"):
        with pytest.raises(ConfigError, match="is not understood"):
            parse_engine(text)


def test_states_take_blocks_and_too_many_sequences_are_refused() -> None:
    """Qwen3.5-27B in 16 bits on one H100: vLLM itself refuses its defaults, and runs with as many as it has blocks."""
    refused = started("Qwen/Qwen3.5-27B").plan(20 << 30)
    assert refused.refusal is not None and "max_num_seqs (1024) exceeds" in refused.refusal
    assert refused.num_blocks is not None
    assert (
        started("Qwen/Qwen3.5-27B", max_num_seqs=refused.num_blocks, max_model_len=32_768).plan(20 << 30).refusal
        is None
    )


def test_the_longest_sequence_fits_and_one_more_token_does_not() -> None:
    fitted = started("qwen3-32b", max_model_len=-1).plan(2 << 30)
    assert fitted.refusal is None and fitted.max_model_len is not None
    assert started("qwen3-32b", max_model_len=fitted.max_model_len).plan(2 << 30).refusal is None
    longer = started("qwen3-32b", max_model_len=fitted.max_model_len + 1).plan(2 << 30)
    assert longer.longest == fitted.max_model_len


def test_stages_share_the_layers_and_the_fewest_blocks_count() -> None:
    """61 layers in four stages: the rest goes to the middle ones, as vLLM's get_pp_indices divides them."""
    decided = started("deepseek-ai/DeepSeek-V3", pipeline_parallel=4)
    assert [len(rank) for rank in decided.specs] == [15, 15, 16, 15]
    plan = decided.plan(10 << 30)
    assert plan.num_blocks == (10 << 30) // (16 * 16 * 576 * 2)


def test_lines_are_those_of_a_log() -> None:
    decided = started("Qwen/Qwen3.5-27B", max_num_seqs=64)
    available = 40 << 30
    assert decided.lines(decided.plan(available), available) == [
        "Setting attention block size to 832 tokens to ensure that attention page size is >= mamba page size.",
        "Padding mamba page size by 6.26% to ensure that mamba page size and attention page size are exactly equal.",
        "Available KV cache memory: 40.00 GiB",
        "GPU KV cache size: 634,791 tokens, Maximum concurrency for 262,144 tokens per request: 2.42x",
    ]
    gemma = started("gemma-3-27b")
    lines = gemma.lines(gemma.plan(available))
    assert "Add 2 padding layers" not in lines[0] and "Add 8 padding layers, may waste at most 15.38%" in lines[0]


def test_lengths_and_splits_that_vllm_does_not_build_are_refused() -> None:
    plan = started("qwen3-32b", max_model_len=40_961).plan(40 << 30)
    assert plan.refusal is not None and plan.longest == 40_960
    assert plan.refusal.startswith("User-specified max_model_len (40961) is greater than the derived max_model_len")
    split = started("nemotron-3-nano-30b-a3b", tensor_parallel=16).plan(40 << 30)
    assert split.refusal is not None and split.refusal.startswith("If tensor parallel world size does not divide")

"""Public issues with stated figures: the output, refusals and hits of vLLM. The numbers are those of the issues.

Issues of vLLM 0.19 to 0.28 are planned by the rules of 0.32, which are the same for these figures unless a test says
otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvarts.core.content import pack_units
from kvarts.cost.hardware.device import load_device
from kvarts.cost.hardware.model_config import load_geometry
from kvarts.cost.vllm.planning import Plan
from kvarts.cost.vllm.start import Start, StartSettings, available_bytes, start
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.traffic.trace import Trace, TraceRequest

GIB = 1 << 30
QWEN_4B = {
    "model_type": "qwen3_5_text",
    "hidden_size": 2560,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
    "vocab_size": 248_320,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262_144,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
"""Sizes of Qwen3.5-4B."""


def planned(model: str, device: str, available: float, **settings: Any) -> tuple[Start, Plan]:
    """Return the start of a model by the rules of 0.32, and its plan with `available` GiB."""
    on = load_device(device)
    decided = start(load_geometry(model).on(on), on, StartSettings(**{"version": "0.32", **settings}))
    return decided, decided.plan(int(available * GIB))


def found(config: ReplayConfig, prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return the tokens that each of some prompts finds, one after the other."""
    rows = [
        TraceRequest(row, row * 60 * 10**9, pack_units(prompt), len(prompt), 1) for row, prompt in enumerate(prompts)
    ]
    cached: list[int] = replay(Trace(rows), config).request_columns["cached_tokens"].tolist()
    return cached


def shared(prefix: int, suffix: int, number: int, first: int = 0) -> list[int]:
    """Return a prompt: `prefix` tokens of a shared prefix, and `suffix` unique tokens."""
    return [first + 1] * prefix + [1_000_000 + number] * suffix


@pytest.fixture
def qwen_4b(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN_4B))
    return str(path)


# Hits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "cached"), [(480, 0), (527, 0), (552, 528), (979, 528)])
def test_vllm_40696_prompts_below_one_block_are_never_found(qwen_4b: str, tokens: int, cached: int) -> None:
    """Qwen3.5-4B: blocks of 528 tokens; 552 tokens find 95 %, 979 find 54 %."""
    config = ReplayConfig.for_device(qwen_4b, "a100-80gb", engine="vllm==0.32")
    assert config.page_size == 528
    prompt = [7] * tokens
    assert found(config, [prompt, prompt]) == [0, cached]


def test_vllm_51198_a_prompt_of_561_tokens_and_a_suffix_find_nothing() -> None:
    """Qwen3.6-35B-A3B: 1,131 tokens are looked up, 0 found, since a block has 1,056."""
    config = ReplayConfig.for_device(
        "qwen3.6-35b-a3b", "h200", engine="vllm==0.32", max_batched_tokens=4096, max_seqs=256
    )
    prompts = [[7] * 561, [7] * 561 + [8] * 9]
    assert sum(map(len, prompts)) == 1131 and config.page_size == 1056
    assert found(config, prompts) == [0, 0]


def test_vllm_51250_a_prompt_of_1200_tokens_finds_one_block() -> None:
    """Qwen3.6-35B-A3B, blocks of 1,056 tokens: the same 1,200 tokens find 1,056."""
    config = ReplayConfig.for_device("qwen3.6-35b-a3b", "h200", engine="vllm==0.32", max_seqs=256)
    assert found(config, [[7] * 1200, [7] * 1200]) == [0, 1056]


@pytest.mark.parametrize(("prefix", "suffix", "num_found", "cached"), [(1600, 600, 52, 1584), (1500, 700, 0, 0)])
def test_vllm_45238_a_state_in_the_own_part_of_a_prompt_is_found_by_nobody(
    qwen_4b: str, prefix: int, suffix: int, num_found: int, cached: int
) -> None:
    """64 prompts of 2,200 tokens, 12 beginnings: 52 find 1,584 tokens if the state there is of shared tokens, else 0.

    Since then, vLLM marks where a prompt parts from others that full attention knows (a junction), so that the second
    prompt of a beginning finds nothing, and the third one 1,056 tokens.
    """
    config = ReplayConfig.for_device(
        qwen_4b, "a100-80gb", engine="vllm==0.32", max_batched_tokens=2048, prefix_cache_retention_interval="none"
    )
    prompts = [shared(prefix, suffix, number, number % 12) for number in range(64)]
    cached_tokens = found(config, prompts)
    if num_found:
        assert [tokens for tokens in cached_tokens if tokens] == [cached] * num_found
    else:
        assert cached_tokens[:24] == [0] * 24 and set(cached_tokens[24:]) == {1056}


@pytest.mark.parametrize(("tokens", "cached"), [(2015, 0), (8015, 7168), (32_015, 28_672), (47_074, 46_592)])
def test_glm53_flash_exl3_16_hits_are_whole_blocks_of_3584(tokens: int, cached: int) -> None:
    """GLM-5.3-Flash on two devices; here another model with states, in blocks of that size."""
    config = ReplayConfig.for_device("qwen3.5-27b", "h200", engine="vllm==0.32", max_seqs=64, page_size=3584)
    assert config.page_size == 3584
    prompt = [7] * tokens
    assert found(config, [prompt, prompt]) == [0, cached]


@pytest.mark.parametrize("engine", ["vllm==0.32", "vllm==0.33"])
@pytest.mark.parametrize(("tokens", "cached"), [(4100, 0), (4110, 4096)])
def test_vllm_57610_a_turn_that_parts_before_the_last_boundary_finds_nothing(
    engine: str, tokens: int, cached: int
) -> None:
    """Gemma with windows of 1,024: a chat template ends a prompt with 5 tokens that a longer turn does not have.

    Interval 0 retains the blocks that a hit at the last boundary needs, and one block less is no hit at all.
    """
    config = ReplayConfig.for_device("gemma-3-27b", "h200", engine=engine)
    first = [7] * (tokens - 5) + [1, 2, 3, 4, 5]
    longer = [7] * (tokens - 5) + [8] * 20 + [1, 2, 3, 4, 5]
    assert found(config, [first, longer]) == [0, cached]
    dense = ReplayConfig.for_device("gemma-3-27b", "h200", engine=engine, prefix_cache_retention_interval="none")
    assert found(dense, [first, longer]) == [0, (tokens - 5) // 16 * 16]


@pytest.mark.parametrize(("num_seats", "tokens", "is_found"), [(1, 64_000, True), (3, 11_300, True), (4, 9500, False)])
def test_vllm_48435_sessions_in_turn_find_nothing_from_a_quarter_of_the_memory_on(
    num_seats: int, tokens: int, is_found: bool
) -> None:
    """153,374 tokens of KV, windows of 1,024: with 34,000 tokens in all, turns find their prefixes; with 38,000, none.

    That was with all blocks retained, as up to vLLM 0.28, where blocks that windows have passed displace others. With
    interval 0, the second turn leaves what later ones find. The issue has Gemma 4 31B; here Gemma 3 27B, which also has
    a window in five of six layers, with blocks for as many tokens.
    """
    _, plan = planned("gemma-3-27b", "h200", 1, max_model_len=65_536, max_num_batched_tokens=2048, max_num_seqs=8,
                      num_blocks_override=14_094)  # fmt: skip
    assert plan.kv_cache_tokens == 153_381
    prompts = [shared(tokens - 50, 50, 100 * turn + seat, seat) for turn in range(3) for seat in range(num_seats)]
    settings: dict[str, Any] = {"max_model_len": 65_536, "max_batched_tokens": 2048, "max_seqs": 8, "pages": 14_094}
    expected = (tokens - 50) // 16 * 16
    for interval in ("none", "0"):
        config = ReplayConfig.for_device(
            "gemma-3-27b", "h200", engine="vllm==0.32", prefix_cache_retention_interval=interval, **settings
        )
        warm = found(config, prompts)[num_seats:]
        if interval == "none":
            assert warm == [expected * is_found] * (2 * num_seats)
        else:
            assert warm == [0] * num_seats + [expected] * num_seats


# Plans and refusals ---------------------------------------------------------------------------------------


def test_vllm_49064_more_sequences_than_blocks_of_states() -> None:
    """Qwen3.8-27B, which has the layers of Qwen3.6-27B, on two devices with 3.86 GiB each, without a prefix cache.

    vLLM 0.23 named 123,872 as the longest length: it did not yet leave out the null block, one block of 784 tokens.
    """
    settings: dict[str, Any] = {"tensor_parallel": 2, "max_num_seqs": 256, "max_num_batched_tokens": 2048}
    settings["has_prefix_caching"] = False
    decided, plan = planned("qwen3.6-27b", "h100", 3.86, max_model_len=132_000, **settings)
    assert plan.longest == 123_872 - decided.block_size and decided.block_size == 784
    _, plan = planned("qwen3.6-27b", "h100", 3.86, max_model_len=122_633, **settings)
    assert (plan.num_blocks, plan.kv_cache_tokens) == (161, 123_399)
    assert plan.refusal is not None
    assert plan.refusal.startswith("max_num_seqs (256) exceeds available Mamba cache blocks (161).")


def test_kaito_2319_qwen_on_an_h100_nvl() -> None:
    """Qwen3.6-27B with the default of 1,024 sequences: 614 blocks, which are between the bounds of the memory."""
    on, settings = load_device("h100-nvl"), StartSettings(version="0.32", memory_fraction=0.9)
    geometry = load_geometry("qwen3.6-27b").on(on)
    decided = start(geometry, on, settings)
    memory = available_bytes(geometry, on, settings, decided)
    least, most = decided.plan(memory.least), decided.plan(memory.most)
    assert least.num_blocks is not None and most.num_blocks is not None
    assert least.num_blocks <= 614 <= most.num_blocks
    assert most.block_bytes is not None
    words = decided.plan(614 * most.block_bytes).refusal
    assert words is not None and words.startswith("max_num_seqs (1024) exceeds available Mamba cache blocks (614).")


def test_vllm_49878_windows_hold_the_tokens_of_two_steps() -> None:
    """Gemma 4 31B, steps of 32,768 tokens, 49 GiB: 70.79 GiB are needed with asynchronous scheduling, else 45.79."""
    _, plan = planned("gemma-4-31b", "rtx-pro-6000", 49, max_num_batched_tokens=32_768)
    assert plan.refusal is not None and "(70.79 GiB KV cache is needed" in plan.refusal
    assert plan.longest == 58_368
    assert [group.blocks_per_request for group in plan.groups] in ([], [4161] * 5 + [8192])
    _, before = planned("gemma-4-31b", "rtx-pro-6000", 49, max_num_batched_tokens=32_768, has_async_scheduling=False)
    assert before.refusal is None and before.block_bytes is not None
    blocks = sum(group.blocks_per_request for group in before.groups)
    assert round(blocks * before.block_bytes / GIB, 2) == 45.79


def test_vllm_54703_groups_of_deepseek_v4_share_one_size_of_block() -> None:
    """DeepSeek-V4-Flash: five groups in packed pages; of 272,000 tokens most blocks are those of 4 tokens."""
    settings: dict[str, Any] = {"max_model_len": 272_000, "max_num_seqs": 4, "tensor_parallel": 4}
    _, plan = planned("deepseek-ai/DeepSeek-V4-Flash", "h100", 20, kv_dtype="fp8", **settings)
    assert {(len(group.layers), group.page_bytes, group.block_size) for group in plan.groups} == {
        (62, 1_002_240, 256),
        (22, 823_680, 64),
        (21, 786_240, 64),
        (42, 870_912, 4),
        (20, 656_640, 8),
    }
    assert max(plan.groups, key=lambda group: group.blocks_per_request).block_size == 4


def test_vllm_48401_a_block_may_be_longer_than_the_longest_request() -> None:
    """Nemotron-3-Super with KV in fp8: blocks of 8,320 tokens, and 4,096 are the most of a request."""
    model = "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4"
    decided, _ = planned(model, "rtx-pro-6000", 20, kv_dtype="fp8", max_model_len=4096)
    assert decided.block_size == 8320 > decided.max_model_len


def test_vllm_53749_the_block_is_2096_tokens() -> None:
    """Nemotron-3.5-Lightning, which has the layers of Nemotron-3-Nano, on an H200."""
    decided, _ = planned("nemotron-3-nano-30b-a3b", "h200", 60, max_model_len=32_768, max_num_batched_tokens=16_384)
    assert decided.block_size == 2096


@pytest.mark.parametrize(("kv_dtype", "block"), [("fp8", 2144), (None, 1072)])
def test_vllm_54360_and_38182_drafts_make_states_and_blocks_longer(kv_dtype: str | None, block: int) -> None:
    """Qwen3.6-35B-A3B with three drafted tokens: 2,144 tokens with KV in fp8 (54360), 1,072 in 16 bits (38182)."""
    decided, _ = planned("qwen3.6-35b-a3b", "rtx-pro-6000", 20, kv_dtype=kv_dtype, num_drafts=3, max_model_len=65_536)
    assert decided.block_size == block


def test_vllm_55196_fp8_doubles_the_tokens_of_attention_and_not_those_of_short_hybrids() -> None:
    """2.00 times the tokens with attention alone; 1.00 times with states and contexts of one block."""
    ratios = []
    for model, length in (("qwen2.5-7b", 32_768), ("granite-4.0-h-tiny", 256)):
        tokens = [
            planned(model, "a10", 4, kv_dtype=kv_dtype, max_model_len=length, max_num_seqs=64)[1].kv_cache_tokens or 0
            for kv_dtype in (None, "fp8")
        ]
        ratios.append(round(tokens[1] / tokens[0], 2))
    assert ratios == [2.0, 1.0]


def test_vllm_40691_tokens_are_those_of_the_concurrency() -> None:
    """Qwen3.5-27B, 32,768 tokens a request, caching off: 33.04 requests, where the log stated 290,864 tokens.

    vLLM 0.19 divided the blocks among the groups; since then, the tokens are concurrency x length.
    """
    settings: dict[str, Any] = {"max_model_len": 32_768, "max_num_seqs": 16, "max_num_batched_tokens": 16_384}
    decided, plan = planned("qwen3.5-27b", "h200", 40, has_prefix_caching=False, num_blocks_override=1487, **settings)
    assert plan.num_blocks is not None and plan.max_concurrency is not None
    assert plan.num_blocks // len(plan.groups) * decided.block_size == 290_864
    assert round(plan.max_concurrency, 2) == 33.04 and plan.kv_cache_tokens == int(plan.max_concurrency * 32_768)


MTP = {"speculative_tokens": 2, "acceptance": "0.8,0.6", "speculative_method": "mtp"}


@pytest.mark.parametrize(
    ("engine", "drafts", "block", "repeats"),
    [("vllm==0.32", {}, 1568, 3136), ("vllm==0.32", MTP, 1600, 1600), ("vllm==0.33", MTP, 1600, 3200)],
)
def test_vllm_53504_the_first_repeat_is_found_but_for_the_block_that_drafts_drop(
    engine: str, drafts: dict[str, Any], block: int, repeats: int
) -> None:
    """Qwen3.8-27B-FP8 on two RTX 5090, KV in fp8, a prompt of 4,481 tokens four times: 3,136 tokens without drafts.

    With two drafted tokens 1,600 of them, and 3,200 without the drop, which hashes of the tokens after a block replace
    in 0.33.
    """
    settings: dict[str, Any] = {"tensor_parallel": 2, "kv_dtype": "fp8", "max_seqs": 8, "max_batched_tokens": 8192}
    config = ReplayConfig.for_device(
        "qwen3.5-27b", "rtx-5090", engine=engine, weight_dtype="fp8", max_model_len=16_384, **settings, **drafts
    )
    assert config.page_size == block
    assert found(config, [range(4481)] * 4) == [0, repeats, repeats, repeats]


@pytest.mark.parametrize(
    ("engine", "drafts", "repeat"), [("vllm==0.32", MTP, 0), ("vllm==0.32", {}, 3200), ("vllm==0.33", MTP, 3200)]
)
def test_vllm_57616_a_prompt_of_less_than_two_blocks_is_not_found_with_drafts(
    engine: str, drafts: dict[str, Any], repeat: int
) -> None:
    """4,137 tokens in blocks of 3,200: the places from which a repeat could go on, less a block, are at 0."""
    config = ReplayConfig.for_device(
        "qwen3.5-27b", "h200", engine=engine, page_size=3200, max_seqs=8, max_model_len=16_384, **drafts
    )
    assert config.page_size == 3200
    assert found(config, [range(4137)] * 2) == [0, repeat]

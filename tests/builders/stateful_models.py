"""Small real models with layers that keep a state. Needs PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvarts.run.torch.room import KVRoom

from builders.real_models import PAGE_SIZE, VOCABULARY

LINEAR, FULL = "linear_attention", "full_attention"
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {"layer_types": [LINEAR, LINEAR, LINEAR, FULL], **DELTA, **EXPERTS},
    "qwen3_5_text": {"layer_types": [LINEAR, FULL, LINEAR, FULL], **DELTA},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "shared_intermediate_size": 48,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        **MAMBA,
    },
    "falcon_h1": {"num_hidden_layers": 2, "mamba_d_ssm": 64, **MAMBA},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "num_hidden_layers": 4,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mamba", "moe"],
        "num_hidden_layers": 4,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "time_step_min": 1e-12,  # a bound that holds in prompts only, in transformers 5.24
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "conv"]},
    "kimi_linear": {
        "layer_types": [LINEAR, LINEAR, LINEAR, FULL],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
}
"""A delta rule, with experts and without; Mamba-2 beside attention and in the same layer; Mamba, of which the code goes
on from a state by one token at a time; convolutions alone."""


def stateful_pairs() -> Callable[[str], tuple[Any, Any]]:
    """Return what makes a model of a family that attends through pages, and the same with transformers' cache."""
    made: dict[str, tuple[Any, Any]] = {}

    def pair(family: str) -> tuple[Any, Any]:
        if family not in made:
            changes = FAMILIES[family]
            config = AutoConfig.for_model(
                family,
                **{
                    "hidden_size": 32,
                    "intermediate_size": 48,
                    "num_hidden_layers": len(changes.get("layer_types", ())) or 2,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 2,
                    "vocab_size": VOCABULARY,
                    "max_position_embeddings": 512,
                    "initializer_range": 0.3,
                    "eos_token_id": 256,
                    "pad_token_id": 256,
                    "bos_token_id": None,
                    "tie_word_embeddings": False,
                    **changes,
                },
            )
            with torch.random.fork_rng():
                torch.manual_seed(3)
                model = AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation="eager").eval()
            made[family] = deepcopy(model), model
        return made[family]

    return pair


def state_pages(model: Any) -> int:
    """Pages that are as large as the state of a sequence."""
    cut = KVRoom(model, PAGE_SIZE, "all").cut
    assert cut is not None
    return -(-cut.num_state_blocks * cut.memory.block_bytes // cut.memory.page_bytes)

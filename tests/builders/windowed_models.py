"""Small models of families with windows, each with pages and with transformers' own attention and cache. Needs PyTorch.

Also a memory that forgets: whatever nothing holds is overwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvarts.run.torch.attention import ATTENTION, register
from kvarts.run.torch.llm import LLM

from builders.real_models import VOCABULARY

__all__ = ["FAMILIES", "FULL", "SLIDING", "WINDOW", "config_of", "forgetting", "models_of", "types_of"]

WINDOW = 8
FULL, SLIDING = "full_attention", "sliding_attention"
MOSTLY = [SLIDING, SLIDING, SLIDING, FULL, SLIDING, SLIDING]
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"num_hidden_layers": 3},
    "gemma2": {"layer_types": [SLIDING, FULL, SLIDING, FULL]},
    "gemma3_text": {"layer_types": MOSTLY},
    "gpt_oss": {"layer_types": [SLIDING, FULL, SLIDING, FULL], "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {"use_sliding_window": True, "layer_types": [FULL, SLIDING, SLIDING]},
    "gemma3n_text": {
        "layer_types": [SLIDING, FULL] * 3,
        "num_kv_shared_layers": 2,
        "intermediate_size": [48] * 6,
        "activation_sparsity_pattern": [0.0] * 6,
        "altup_num_inputs": 2,
        "laurel_rank": 4,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "gemma4_text": {
        "layer_types": [SLIDING, SLIDING, FULL] * 2,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "mimo_v2_flash": {
        "layer_types": [FULL, SLIDING, SLIDING, SLIDING],
        "mlp_layer_types": ["dense", "dense", "sparse", "dense"],
        "swa_num_key_value_heads": 4,
        "v_head_dim": 6,
        "num_local_experts": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
    },
    "qwen3": {"num_hidden_layers": 2},
}
"""Windows everywhere, in every other layer, in most, with sinks that are learned, in the last ones, with KV that layers
share, with KV heads of two shapes, twice; and none at all."""


def config_of(family: str, window: int = WINDOW, **more: Any) -> Any:
    """The config of a small model."""
    changes = FAMILIES[family]
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": len(changes.get("layer_types", ())) or 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "eos_token_id": 256,
        "pad_token_id": 256,
        "bos_token_id": None,
        **({} if family == "qwen3" else {"sliding_window": window}),
    }
    return AutoConfig.for_model(family, **{**sizes, **changes, **more})


def models_of(config: Any, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A model that attends through pages; and the same with transformers' cache."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation="eager", dtype=dtype).eval()
        # So that what is said depends on what was read: small embeddings, wide matrices.
        embeddings = {id(one.weight) for one in model.modules() if isinstance(one, torch.nn.Embedding)}
        with torch.no_grad():
            for name, weight in model.named_parameters():
                noise = torch.randn(weight.shape)
                if id(weight) in embeddings:
                    weight.copy_(noise * 0.05)
                elif weight.dim() >= 2:
                    weight.copy_(noise * 1.5 * weight.shape[-1] ** -0.5)
                else:
                    weight.add_(noise * (1.0 if name.endswith("sinks") else 0.1))
    register()
    paged = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, dtype=dtype).eval()
    paged.load_state_dict(model.state_dict())
    return paged, model


def types_of(config: Any) -> list[str]:
    """What each layer sees, by transformers' names."""
    types = getattr(config, "layer_types", None)
    if types is None:
        types = [SLIDING if config.model_type == "mistral" else FULL] * config.num_hidden_layers
    return list(types)


def forgetting(engine: LLM) -> LLM:
    """Let the memory of an engine forget: before every step, blocks that nothing holds and nothing can find are
    overwritten, as others would sooner or later."""
    executor: Any = engine._executor
    cache: Any = engine._core.scheduler.cache
    execute: Callable[..., Any] = executor.execute

    def overwritten(plan: Any) -> Any:
        empty = list(cache.pool.empty_ids)
        with torch.inference_mode():
            for tensor in executor.pools.tensors:
                tensor[empty] = 100.0
        return execute(plan)

    executor.execute = overwritten
    return engine

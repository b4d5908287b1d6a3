"""Counts of presets against the modules and caches that transformers builds from the same config.json."""

from __future__ import annotations

import json
from importlib.resources import files
from inspect import signature
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvarts.cost.hardware.model_config import load_geometry, preset_names

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

# One of each family that is not in `tests/run/llm`; the others take as long again.
FEW = {"gemma-3-1b", "gemma-3n-e4b", "llama-4-maverick", "glm-4.7", "nemotron-3-nano-30b-a3b", "granite-4.0-h-tiny"}
FEW |= {"qwen3.5-35b-a3b", "qwen3-next-80b-a3b", "gemma-4-26b-a4b", "deepseek-v3.2"}
NAMES = [name if name in FEW else pytest.param(name, marks=pytest.mark.long) for name in preset_names()]


def config_of(name: str, **changes: Any) -> Any:
    presets = msgspec.json.decode(files("kvarts.cost.hardware").joinpath("presets/models.json").read_bytes())
    values = {key: value for key, value in presets[name].items() if key not in ("source", "quantization_config")}
    family = values.pop("model_type")
    family = "deepseek_v3" if family == "kimi_k2" else family  # the same modules, under a name of its own
    return transformers.AutoConfig.for_model(family, **{**values, **changes})


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_those_of_the_modules(name: str) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config_of(name))
    assert load_geometry(name).num_parameters == sum(weight.numel() for weight in model.parameters())


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "pad_token_id": 0,
    "dtype": "bfloat16",
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_d_head": 8, "shared_intermediate_size": 64}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
INDEXER = {
    "index_head_dim": 8,
    "index_n_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "mistral": {"sliding_window": 8},
    "gemma2": ALTERNATING,
    "gemma3_text": ALTERNATING,
    "gpt_oss": {**ALTERNATING, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma3n_text": {**ALTERNATING, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 64},
    "gemma4_text": {
        **ALTERNATING,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
        "num_kv_shared_layers": 2,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
    "deepseek_v32": {**LATENT, **INDEXER},
    "glm_moe_dsa": {**LATENT, **INDEXER, "indexer_types": ["full", "full", "shared", "full"]},
    "qwen3_next": {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": DELTA,
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        **MAMBA,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M*E-",
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 16,
        "n_groups": 2,
    },
}


KINDS = ["linear_attention", "full_attention"] * 2
COUNTED: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "cohere": {},
    "dots1": {**INDEXER, "layer_types": ["full_attention"] * 4},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "exaone_moe": {
        **EXPERTS,
        **ALTERNATING,
        "sliding_window_pattern": "LG",
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 2},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "glm": {},
    "glm4": {},
    "granite_swa": ALTERNATING,
    "granitemoe": {"num_local_experts": 4},
    "granitemoe_swa": {**ALTERNATING, "num_local_experts": 4, "shared_intermediate_size": 16},
    "granitemoeshared": {"num_local_experts": 4, "shared_intermediate_size": 16},
    "hunyuan_v1_dense": {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "jamba": {
        "num_experts": 4,
        "mamba_d_state": 16,
        "mamba_dt_rank": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 8},
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "olmo2": {},
    "olmo_hybrid": {**DELTA, "linear_num_value_heads": 2, "layer_types": KINDS},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("family", COUNTED)
def test_parameters_of_small_models_are_those_of_the_modules(tmp_path: Path, family: str) -> None:
    small = {key: value for key, value in SMALL.items() if key != "head_dim" or family != "apertus"}
    values = {**small, **COUNTED[family]}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": family, **values}))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **values))
    assert load_geometry(path).num_parameters == sum(weight.numel() for weight in model.parameters())


SLOW = {"qwen3_next", "qwen3_5_text", "qwen3", "mistral", "gemma2"}


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.long) if name in SLOW else name for name in FAMILIES]
)
def test_bytes_are_those_of_the_caches(tmp_path: Path, family: str) -> None:
    """A cache of transformers has, between steps, what the next token sees, and one input of a convolution more.

    It keeps states in 32 bits, and an indexer's keys in the 16 bits of the model; engines keep these in fp8.
    """
    values = {**SMALL, **FAMILIES[family]}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": family, **values}))
    geometry = load_geometry(path)
    if family == "nemotron_h":
        del values["num_hidden_layers"]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **values)).eval()
    assert geometry.num_parameters == sum(weight.numel() for weight in model.parameters())
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    cache = None
    num_tokens = 0
    for num_new in (5, 1, 2, 1, 9, 1):
        tokens = torch.randint(1, 64, (1, num_new))
        with torch.no_grad():
            cache = getattr(model(input_ids=tokens, use_cache=True, **{name: cache}), name)
        num_tokens += num_new
        tensors = [(layer, states) for layer in cache.layers for states in states_of(layer)]
        kept = sum(states.nbytes for _, states in tensors)
        expected = 0
        for layer in geometry.layers:
            expected += max(0, layer.num_tokens(num_tokens + 1) - 1) * layer.num_heads * layer.head_numbers * 2
            if layer.fixed_bytes and geometry.sparse is not None:
                expected += max(0, layer.num_tokens(num_tokens + 1) - 1) * geometry.sparse.key_dim * 2
        if geometry.state is not None:
            state_layers = [layer for layer in geometry.layers if layer.kind == "state"]
            kept_inputs = geometry.state.conv_numbers // 3 * 4  # one input more than a state has
            expected += len(state_layers) * (kept_inputs * 2 + geometry.state.recurrent_numbers * 4)
        assert kept == expected


def states_of(layer: Any) -> list[Any]:
    """Return the tensors of a layer of a cache."""
    tensors = [getattr(layer, name, None) for name in ("keys", "values", "indexer_keys")]
    tensors += [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
    return [tensor for tensor in tensors if tensor is not None]

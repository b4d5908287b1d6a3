"""What layers keep is read from a config.json, and what cannot be is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvarts.base.errors import ConfigError, InputError, KvartsError
from kvarts.cost.hardware.geometry import Geometry
from kvarts.cost.hardware.model_config import load_geometry

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 16, "shared_intermediate_size": 64, "num_local_experts": 0}


def read(directory: Path, **values: Any) -> Geometry:
    path = directory / "config.json"
    path.write_text(json.dumps({**SMALL, **values}))
    return load_geometry(path)


def kinds(geometry: Geometry) -> list[tuple[str, int | None]]:
    return [(layer.kind, layer.span) for layer in geometry.layers]


F, S, N = ("full", None), ("state", None), ("none", None)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"model_type": "gemma3_text", "sliding_window": 8, "sliding_window_pattern": 2}, [("window", 8), F] * 2),
        (
            {"model_type": "gemma3_text", "sliding_window": 8, "_sliding_window_pattern": 3},
            [("window", 8)] * 2 + [F] + [("window", 8)],
        ),
        (
            {"model_type": "llama4_text", "attention_chunk_size": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
            [("chunk", 8)] * 3 + [F],
        ),
        (
            {"model_type": "llama4_text", "attention_chunk_size": 8, "no_rope_layers": [0, 1, 1, 0]},
            [F, ("chunk", 8), ("chunk", 8), F],
        ),
        ({"model_type": "llama4_text", "no_rope_layer_interval": 2}, [("chunk", 8192), F] * 2),
        ({"model_type": "qwen3_next", **EXPERTS}, [S, S, S, F]),
        ({"model_type": "qwen3_next", "full_attention_interval": 2, **EXPERTS}, [S, F, S, F]),
        ({"model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"] * 2}, [S, F, S, F]),
        ({"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"] * 2, **MAMBA}, [S, F, S, F]),
        (
            {
                "model_type": "nemotron_h",
                "hybrid_override_pattern": "M*-E",
                "n_routed_experts": 2,
                "num_experts_per_tok": 1,
            },
            [S, F, N, N],
        ),
        (
            {"model_type": "nemotron_h", "num_hidden_layers": None, "layers_block_type": ["mamba", "attention", "mlp"]},
            [S, F, N],
        ),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 16, "qk_rope_head_dim": 4}, [("latent", None)] * 4),
        ({"model_type": "kimi_k2", "kv_lora_rank": 16, "qk_rope_head_dim": 4}, [("latent", None)] * 4),
        (
            {
                "model_type": "gemma3n_text",
                "sliding_window": 8,
                "num_kv_shared_layers": 2,
                "intermediate_size": [128] * 4,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            [("window", 8), F, ("shared", 8), ("shared", None)],
        ),
    ],
)
def test_what_layers_keep(tmp_path: Path, values: dict[str, Any], expected: list[tuple[str, int | None]]) -> None:
    assert kinds(read(tmp_path, **values)) == expected


def test_a_state_has_the_numbers_of_its_dimensions(tmp_path: Path) -> None:
    granite = read(tmp_path, model_type="granitemoehybrid", layer_types=["mamba", "attention"] * 2, **MAMBA)
    width, conv = 2 * 64, 2 * 64 + 2 * 1 * 16
    assert granite.state is not None
    assert granite.state.conv_numbers == 3 * conv
    assert granite.state.recurrent_numbers == width * 16
    assert granite.state_bytes == 2 * 2 * (3 * conv + width * 16), "its state is in 16 bits, as vLLM keeps it"
    half = read(
        tmp_path,
        model_type="nemotron_h",
        hybrid_override_pattern="M*M-",
        torch_dtype="bfloat16",
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=1,
        mamba_ssm_cache_dtype="float32",
    )
    assert half.state_bytes == 2 * (2 * 3 * conv + 4 * width * 16), "the state has a format of its own"


def test_numbers_that_are_none_are_ignored_where_they_are_not_read(tmp_path: Path) -> None:
    """As in the config of Nemotron-H: "time_step_limit": [0.0, Infinity]."""
    assert "Infinity" in json.dumps(float("inf"))
    assert read(tmp_path, model_type="llama", time_step_limit=[0.0, float("inf")]).num_layers == 4
    with pytest.raises(InputError, match="hidden_size"):
        read(tmp_path, model_type="llama", hidden_size=float("inf"))
    (tmp_path / "config.json").write_text('{"model_type": "llama", Infinity}')
    with pytest.raises(InputError, match="is not readable JSON"):
        load_geometry(tmp_path)


@pytest.mark.parametrize(
    ("values", "error", "says"),
    [
        ({"model_type": "llama", "layer_types": ["linear_attention"] * 4}, ConfigError, "'linear_attention' is not"),
        ({"model_type": "qwen3_next", "layer_types": ["sliding_attention"] * 4, **EXPERTS}, ConfigError, "layer_types"),
        ({"model_type": "granitemoehybrid", **MAMBA}, ConfigError, "layer_types: has no layer that keeps tokens"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M*x-"}, ConfigError, "hybrid_override_pattern: 'x'"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M*"}, InputError, "names 2 layers of 4"),
        ({"model_type": ["llama"]}, ConfigError, "model_type: ['llama'] is not understood"),
        ({"model_type": "llama", "layer_types": []}, InputError, "layer_types: names 0 layers of 4"),
        ({"model_type": "llama", "num_hidden_layers": None}, InputError, "num_hidden_layers"),
        ({"model_type": "llama", "num_key_value_heads": 3}, InputError, "num_key_value_heads: is 3, and "),
        ({"model_type": "llama", "hidden_size": 65, "head_dim": None}, InputError, "hidden_size: is 65, which"),
        ({"model_type": "qwen3_moe", **EXPERTS, "num_experts_per_tok": 99}, InputError, "num_experts_per_tok: is 99"),
        ({"model_type": "llama4_text", "no_rope_layers": [0, 1]}, InputError, "names 2 layers of 4"),
        ({"model_type": "gemma3n_text", "num_kv_shared_layers": 4}, ConfigError, "num_kv_shared_layers: is 4"),
        ({"model_type": "gemma3n_text", "num_kv_shared_layers": 5}, ConfigError, "num_kv_shared_layers: is 5"),
        (
            {"model_type": "gemma3n_text", "num_kv_shared_layers": 0, "intermediate_size": [128, 64, 64, 64]},
            ConfigError,
            "intermediate_size",
        ),
        (
            {"model_type": "gemma3n_text", "num_kv_shared_layers": 0, "intermediate_size": []},
            ConfigError,
            "intermediate_size",
        ),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 8, "sliding_window": 8}, ConfigError, "sliding_window: is not"),
        ({"model_type": "qwen3_next", "mamba_ssm_dtype": "int3", **EXPERTS}, ConfigError, "'int3' is not known"),
        ({"model_type": "llama4_text", "attention_chunk_size": 0}, InputError, "attention_chunk_size"),
    ],
)
def test_what_cannot_be_is_named(tmp_path: Path, values: dict[str, Any], error: type[KvartsError], says: str) -> None:
    with pytest.raises(error) as caught:
        read(tmp_path, **values)
    assert says in str(caught.value)


def test_experts_are_in_the_layers_that_the_config_says(tmp_path: Path) -> None:
    def layers(**values: Any) -> int:
        geometry = read(tmp_path, **values)
        return 0 if geometry.experts is None else geometry.experts.num_layers

    assert layers(model_type="qwen3_moe", **EXPERTS) == 4
    assert layers(model_type="qwen3_moe", decoder_sparse_step=2, **EXPERTS) == 2
    assert layers(model_type="qwen3_moe", mlp_only_layers=[0, 3], **EXPERTS) == 2
    assert layers(model_type="llama4_text", num_local_experts=2, num_experts_per_tok=1) == 4
    assert layers(model_type="llama4_text", num_local_experts=2, num_experts_per_tok=1, moe_layers=[1]) == 1
    assert layers(model_type="granitemoehybrid", layer_types=["mamba", "attention"] * 2, **MAMBA) == 0

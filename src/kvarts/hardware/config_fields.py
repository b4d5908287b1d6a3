"""The fields read from a Hugging Face config.json, and the supported families of decoders."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from kvarts.limits import MOST_COUNT, MOST_LAYERS

__all__ = ["FAMILIES", "ConfigFields"]

Count = Annotated[int, msgspec.Meta(ge=1, le=MOST_COUNT)]
Some = Annotated[int, msgspec.Meta(ge=0, le=MOST_COUNT)]
Layers = Annotated[int, msgspec.Meta(ge=1, le=MOST_LAYERS)]


class ConfigFields(msgspec.Struct):
    """The fields read from a config.json. All others are ignored."""

    model_type: str
    hidden_size: Count
    num_attention_heads: Count
    vocab_size: Count
    num_hidden_layers: Layers | None = None
    intermediate_size: Count | list[Count] | None = None
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    attention_head_dim: Count | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool = False
    use_qk_norm: bool = False
    torch_dtype: str | None = None
    dtype: str | None = None
    quantization_config: dict[str, Any] | None = None
    # KV of layers.
    sliding_window: Count | None = None
    use_sliding_window: bool | None = None
    sliding_window_pattern: Count | None = None
    other_sliding_window_pattern: Count | None = msgspec.field(name="_sliding_window_pattern", default=None)
    layer_types: list[str] | None = None
    layers_block_type: list[str] | None = None
    hybrid_override_pattern: str | None = None
    full_attention_interval: Count = 4
    attention_chunk_size: Count | None = None
    no_rope_layers: list[Some] | None = None
    no_rope_layer_interval: Count = 4
    num_kv_shared_layers: Some = 0
    kv_lora_rank: Count | None = None
    q_lora_rank: Count | None = None
    qk_nope_head_dim: Some = 0
    qk_rope_head_dim: Some = 0
    v_head_dim: Some = 0
    index_head_dim: Count = 128
    index_n_heads: Count | None = None
    index_topk: Count = 2048
    indexer_types: list[str] | None = None
    index_topk_pattern: str | list[str] | None = None
    index_topk_freq: Count = 1
    index_skip_topk_offset: Some = 2
    # Experts.
    num_local_experts: Some | None = None
    num_experts: Some | None = None
    n_routed_experts: Some | None = None
    n_shared_experts: Some | None = 0
    num_experts_per_tok: Count | None = None
    moe_intermediate_size: Count | None = None
    first_k_dense_replace: Some = 0
    decoder_sparse_step: Count = 1
    mlp_only_layers: list[Some] = []
    interleave_moe_layer_step: Count = 1
    moe_layers: list[Some] | None = None
    intermediate_size_mlp: Count | None = None
    shared_intermediate_size: Some = 0
    shared_expert_intermediate_size: Some = 0
    moe_shared_expert_intermediate_size: Some = 0
    moe_latent_size: Count | None = None
    # States: Mamba-2 with the names of Granite and of Nemotron-H, and linear attention.
    mamba_n_heads: Count = 128
    mamba_n_groups: Count = 1
    mamba_d_state: Count = 256
    mamba_d_conv: Count = 4
    mamba_expand: Count = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    mamba_num_heads: Count = 128
    mamba_head_dim: Count = 64
    n_groups: Count = 8
    ssm_state_size: Count = 128
    conv_kernel: Count = 4
    use_conv_bias: bool = True
    use_bias: bool = False
    mamba_ssm_cache_dtype: str | None = None
    mamba_ssm_dtype: str | None = None
    linear_num_key_heads: Count = 16
    linear_num_value_heads: Count = 32
    linear_key_head_dim: Count = 128
    linear_value_head_dim: Count = 128
    linear_conv_kernel_dim: Count = 4
    # Gemma 3n and Gemma 4.
    altup_num_inputs: Count = 4
    laurel_rank: Count = 64
    hidden_size_per_layer_input: Some = 256
    global_head_dim: Count = 512
    num_global_key_value_heads: Count | None = None
    per_layer_config: dict[str, dict[str, Any]] | None = None
    attention_k_eq_v: bool = False
    use_double_wide_mlp: bool = False
    enable_moe_block: bool = False
    top_k_experts: Count | None = None
    vocab_size_per_layer_input: Count = 262_144


# Decoder families whose weights and attention are fully described by the fields above plus these differences.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "mixtral": {},
    "minimax_m2": {},
    "qwen2": {"has_qkv_bias": True},
    "qwen3": {"has_qk_norm": True},
    "qwen3_moe": {"has_qk_norm": True},
    "qwen3_next": {"has_qk_norm": True, "gates_attention": True},
    "qwen3_5_text": {"has_qk_norm": True, "gates_attention": True},
    "qwen3_5_moe_text": {"has_qk_norm": True, "gates_attention": True},
    "gemma2": {"num_norms": 4},
    "gemma3_text": {"num_norms": 4, "has_qk_norm": True},
    "gemma3n_text": {"num_norms": 4, "has_qk_norm": True},
    "gemma4_text": {"has_qk_norm": True},
    "gpt_oss": {"has_sinks": True},
    "llama4_text": {},
    "deepseek_v3": {},
    "deepseek_v2": {},
    "deepseek_v32": {},
    "glm_moe_dsa": {},
    "kimi_k2": {},
    "glm4_moe": {"has_output_bias": False},
    "nemotron_h": {"num_norms": 1, "mlp_matrices": 2, "has_qkv_bias": False, "has_output_bias": False},
    "granitemoehybrid": {},
}

"""The KV kept by a model's layers, from its config.json: windows, chunks, latents, states, and shared layers.

The fields of a config.json, in Hugging Face's format, are read by name, for the supported families of decoders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from kvarts.base.errors import ConfigError, InputError
from kvarts.base.limits import MOST_COUNT, MOST_LAYERS, brief
from kvarts.core.kv.layers import KvLayer
from kvarts.cost.hardware.geometry import Extra, Sparse, State

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "FAMILIES",
    "ConfigFields",
    "like",
    "max_length_of",
    "num_layers_of",
    "read_caches",
    "read_draft",
    "read_extra",
    "read_layers",
    "read_sparse",
    "read_state",
    "take_global_heads",
]

# Every n-th layer attends to all tokens, the others to a window; used if the config has no pattern.
_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "gemma3n_text": 5, "gemma4_text": 6, "gpt_oss": 2}
_PATTERNS |= {"cohere2": 4, "olmo3": 4, "exaone4": 4, "ministral": MOST_LAYERS + 1}
_INTERVALS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_BLOCKS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
# Families whose latent attention has an indexer, which chooses the tokens to attend to; and its number of heads.
_INDEXED = {"deepseek_v32": 64, "glm_moe_dsa": 32}
_OTHER_NAMES = {"attention": "full_attention", "mamba": "linear_attention", "conv": "linear_attention"}
_OTHER_NAMES |= {"deepseek_sparse_attention": "indexed_attention", "minimax_m3_sparse": "indexed_attention"}
_INDEXER_SCALE_BYTES = 4
"""An indexer's key is kept in fp8, with a scale in 32 bits per 128 numbers, whatever the format of KV is."""
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
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    use_qk_norm: bool = False
    torch_dtype: str | None = None
    dtype: str | None = None
    quantization_config: dict[str, Any] | None = None
    expert_dtype: str | None = None
    max_position_embeddings: Count | None = None
    original_max_position_embeddings: Count | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    # KV of layers.
    sliding_window: Some | None = None
    use_sliding_window: bool | None = None
    max_window_layers: Some | None = None
    sliding_window_pattern: Count | str | None = None
    other_sliding_window_pattern: Count | None = msgspec.field(name="_sliding_window_pattern", default=None)
    layer_types: list[str] | None = None
    layers_block_type: list[str] | None = None
    hybrid_override_pattern: str | None = None
    full_attention_interval: Count = 4
    attention_chunk_size: Count | None = None
    no_rope_layers: list[Some] | None = None
    no_rope_layer_interval: Count = 4
    num_kv_shared_layers: Some = 0
    kv_lora_rank: Some | None = None
    q_lora_rank: Some | None = None
    qk_nope_head_dim: Some = 0
    qk_rope_head_dim: Some = 0
    v_head_dim: Some = 0
    index_head_dim: Count = 128
    index_n_heads: Count | None = None
    index_topk: Count = 2048
    index_topk_blocks: Count | None = None
    indexer_types: list[str] | None = None
    index_topk_pattern: str | list[str] | None = None
    index_topk_freq: Count = 1
    index_skip_topk_offset: Some = 2
    sparse_attention_config: dict[str, Any] | None = None
    compress_ratios: list[Some] | None = None
    compress_rates: dict[str, Count] | None = None
    o_groups: Count = 8
    o_lora_rank: Count = 1024
    hc_mult: Count = 4
    hybrid_layer_pattern: list[Some] | None = None
    swa_num_key_value_heads: Count | None = None
    swa_num_attention_heads: Count | None = None
    swa_head_dim: Count | None = None
    swa_v_head_dim: Count | None = None
    num_sliding_attention_heads: Count | None = None
    attention_other_setting: dict[str, Any] | None = None
    linear_attn_config: dict[str, Any] | None = None
    linear_head_dim: Count = 128
    linear_num_heads: Count = 32
    block_configs: list[dict[str, Any]] | None = None
    # Experts.
    num_local_experts: Some | None = None
    num_experts: Some | None = None
    n_routed_experts: Some | None = None
    n_shared_experts: Some | None = 0
    num_experts_per_tok: Some | None = None
    moe_intermediate_size: Some | None = None
    first_k_dense_replace: Some = 0
    decoder_sparse_step: Count = 1
    mlp_only_layers: list[Some] = []
    interleave_moe_layer_step: Count = 1
    moe_layers: list[Some] | None = None
    moe_layers_enum: str | list[Some] | None = None
    moe_layer_start_index: Some = 0
    moe_layer_end_index: int | None = None
    moe_layer_interval: Count = 1
    moe_num_shared_experts: Some | None = None
    num_shared_experts: Some | None = None
    num_shared_expert: Some | None = 1
    use_cla: bool = False
    moe_layer_freq: Count | list[Some] | None = None
    mlp_layer_types: list[str] | None = None
    dense_intermediate_size: Some | None = None
    share_expert_dim: Some = 0
    routed_expert_hidden_size: Count | None = None
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
    mamba_d_head: Count | str | None = None
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
    mamba_chunk_size: Some | None = None
    chunk_size: Some | None = None
    linear_num_key_heads: Count = 16
    linear_num_value_heads: Count = 32
    linear_key_head_dim: Count = 128
    linear_value_head_dim: Count = 128
    linear_conv_kernel_dim: Count = 4
    # States: Mamba with the names of Jamba and Falcon-H1, and the short convolutions of LFM2.
    mamba_dt_rank: Count | str = "auto"
    mamba_d_ssm: Count | None = None
    mamba_rms_norm: bool = True
    attn_layer_period: Count = 8
    attn_layer_offset: Some = 4
    expert_layer_period: Count = 2
    expert_layer_offset: Some = 1
    full_attn_idxs: list[Some] | None = None
    conv_L_cache: Count = 3  # noqa: N815
    conv_bias: bool = False
    block_ff_dim: Count | None = None
    block_ffn_dim_multiplier: float = 1.0
    block_multiple_of: Count = 256
    block_auto_adjust_ff_dim: bool = True
    num_dense_layers: Some = 0
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
    top_k_experts: Some | None = None
    vocab_size_per_layer_input: Count = 262_144


# Decoder families whose weights and attention are fully described by the fields above plus these differences.
# `like`: another family with the same modules.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "ministral": {},
    "ministral3": {},
    "mixtral": {},
    "minimax_m2": {},
    "minimax_m3": {"like": "minimax_m3_vl_text"},
    "minimax_m3_vl_text": {"has_qk_norm": True},
    "qwen2": {"has_qkv_bias": True},
    "qwen2_moe": {"has_qkv_bias": True},
    "qwen2_5_vl_text": {"like": "qwen2", "has_qkv_bias": True},
    "qwen2_vl_text": {"like": "qwen2", "has_qkv_bias": True},
    "mimo": {"like": "qwen2", "has_qkv_bias": True},
    "mimo_v2_flash": {},
    "qwen3": {"has_qk_norm": True},
    "qwen3_vl_text": {"like": "qwen3", "has_qk_norm": True},
    "qwen3_moe": {"has_qk_norm": True},
    "qwen3_vl_moe_text": {"like": "qwen3_moe", "has_qk_norm": True},
    "qwen3_next": {"has_qk_norm": True, "gates_attention": True},
    "qwen3_5_text": {"has_qk_norm": True, "gates_attention": True},
    "qwen3_5_moe_text": {"has_qk_norm": True, "gates_attention": True},
    "gemma": {},
    "gemma2": {"num_norms": 4},
    "gemma3_text": {"num_norms": 4, "has_qk_norm": True},
    "gemma3n_text": {"num_norms": 4, "has_qk_norm": True},
    "gemma4_text": {"has_qk_norm": True},
    "gpt_oss": {"has_sinks": True},
    "llama4_text": {},
    "phi3": {},
    "smollm3": {},
    "seed_oss": {"has_output_bias": False},
    "olmo3": {},
    "exaone4": {"has_qk_norm": True},
    "cohere2": {"num_norms": 1},
    "granite": {},
    "granitemoehybrid": {},
    "step3p5": {"has_qk_norm": True},
    "step3p7": {"like": "step3p5", "has_qk_norm": True},
    "step3p7_text": {"like": "step3p5", "has_qk_norm": True},
    "nemotron_h": {"num_norms": 1, "mlp_matrices": 2, "has_qkv_bias": False, "has_output_bias": False},
    "nemotron-nas": {},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "deepseek_v32": {},
    "deepseek_v4": {},
    "deepseek_ref": {"like": "deepseek_v4"},
    "glm_moe_dsa": {},
    "glm4_moe": {"has_output_bias": False},
    "glm4_moe_lite": {},
    "kimi_k2": {"like": "deepseek_v3"},
    "kimi_linear": {},
    "falcon_h1": {"num_norms": 1},  # attention and a state in each layer, which count as two layers
    "jamba": {},
    "lfm2": {"has_qk_norm": True},
    "lfm2_moe": {"has_qk_norm": True},
    "olmo_hybrid": {},
    "olmo2": {},
    "olmoe": {},
    "flex_olmo": {},
    "exaone_moe": {"has_qk_norm": True},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "glm": {"has_output_bias": False},
    "glm4": {"num_norms": 4, "has_output_bias": False},
    "dots1": {"has_qk_norm": True},
    "hunyuan_v1_dense": {"has_qk_norm": True},
    "hunyuan_v1_moe": {"has_qk_norm": True},
    "granitemoe": {},
    "granitemoeshared": {},
    "granite_swa": {"has_sinks": True},
    "granitemoe_swa": {"has_sinks": True},
    "arcee": {"mlp_matrices": 2},
    "apertus": {"mlp_matrices": 2, "has_qk_norm": True},
    "cohere": {"num_norms": 1},
}


def like(family: str) -> str:
    """Return the family that `family` has the modules of."""
    other: str = FAMILIES[family].get("like", family)
    return other


def num_layers_of(config: ConfigFields, path: Path | None) -> int:
    """Return the number of layers. Raise InputError if it is missing."""
    if config.num_hidden_layers is not None:
        return config.num_hidden_layers
    if config.model_type == "nemotron_h" and (types := _types(config)):
        return len(types)
    raise InputError("Object missing required field `num_hidden_layers`", path=path, field=None)


def block_types(config: ConfigFields, num_layers: int, path: Path | None) -> list[str]:
    """Return the kind of each layer, named as in transformers. Raise InputError and ConfigError for bad values.

    Further elements name the layers that draft.
    """
    types = _types(config)
    if types is None:
        types = _default_types(config, num_layers, path)
    is_pattern = config.model_type == "nemotron_h" and config.layer_types is None and config.layers_block_type is None
    field = "hybrid_override_pattern" if is_pattern else "layer_types"
    if len(types) != num_layers and not (config.model_type in _DRAFTED and len(types) > num_layers):
        raise InputError(f"names {len(types)} layers of {num_layers}", path=path, field=field)
    types = types[:num_layers]
    if config.model_type == "falcon_h1":
        return ["full_attention", "linear_attention"] * num_layers
    known = {"full_attention", "sliding_attention"}
    if config.model_type == "llama4_text":
        known = {"full_attention", "chunked_attention"}
    elif config.model_type in _STATES:
        known = {"full_attention", "linear_attention"}
    elif config.model_type in _INDEXED or config.model_type == "minimax_m3_vl_text":
        known |= {"indexed_attention"}
    elif config.model_type == "deepseek_v4":
        known = set(_RATES)
    if config.model_type == "nemotron_h":
        known |= {"mlp", "moe"}
    if strange := sorted(set(types) - known):
        raise ConfigError(f"{strange[0]!r} is not understood", path=path, field=field)
    return types


_DRAFTED = ("step3p5",)
"""Families whose configs name the kinds of drafting layers behind those of the others."""
_RATES = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
"""Tokens per compressed entry of DeepSeek V4's kinds of layers; all of them attend to a window as well."""


def _types(config: ConfigFields) -> list[str] | None:
    types = config.layers_block_type if config.layer_types is None else config.layer_types
    if types is None and config.hybrid_override_pattern is not None and config.model_type == "nemotron_h":
        types = [_BLOCKS.get(block, block) for block in config.hybrid_override_pattern]
    if types is None or config.model_type not in {*_STATES, *_INDEXED, "minimax_m3_vl_text"}:
        return types
    return [_OTHER_NAMES.get(kind, kind) for kind in types]


def _default_types(config: ConfigFields, num_layers: int, path: Path | None) -> list[str]:
    family = config.model_type
    if family == "granitemoehybrid":
        return ["linear_attention"] * num_layers
    if family == "jamba":
        every, first = config.attn_layer_period, config.attn_layer_offset
        return ["full_attention" if layer % every == first else "linear_attention" for layer in range(num_layers)]
    if family == "lfm2" and config.full_attn_idxs is not None:
        full = config.full_attn_idxs
        return ["full_attention" if layer in full else "linear_attention" for layer in range(num_layers)]
    if family == "llama4_text":
        interval = config.no_rope_layer_interval
        rotates = config.no_rope_layers or [(layer + 1) % interval != 0 for layer in range(num_layers)]
        return ["chunked_attention" if turns else "full_attention" for turns in rotates]
    if family == "kimi_linear":
        own = config.linear_attn_config or {}
        full = own.get("full_attn_layers", range(5, num_layers + 1, 4))  # counted from 1
        return ["full_attention" if layer + 1 in full else "linear_attention" for layer in range(num_layers)]
    if family == "mimo_v2_flash":
        windows = config.hybrid_layer_pattern or [layer > 0 and (layer + 1) % 6 > 0 for layer in range(num_layers)]
        return ["sliding_attention" if window else "full_attention" for window in windows]
    if family == "deepseek_v4":
        return _compressed_types(config, num_layers, path)
    if (config.use_sliding_window or family == "dots1") and config.max_window_layers is not None:
        first = config.max_window_layers
        return ["full_attention" if layer < first else "sliding_attention" for layer in range(num_layers)]
    if family in _INTERVALS:
        every, other = config.full_attention_interval, "linear_attention"
    else:
        pattern = config.sliding_window_pattern or config.other_sliding_window_pattern or _PATTERNS.get(family)
        if isinstance(pattern, str):  # a letter for each layer in turn, G for one that attends to all tokens
            pattern = pattern.find("G") + 1
        every, other = pattern or num_layers + 1, "sliding_attention"
    return ["full_attention" if (layer + 1) % every == 0 else other for layer in range(num_layers)]


def _compressed_types(config: ConfigFields, num_layers: int, path: Path | None) -> list[str]:
    """Return the kinds of DeepSeek V4's layers: those of `compress_ratios`, which also lists the drafting layers."""
    if config.compress_ratios is None:
        heavy, sparse = "heavily_compressed_attention", "compressed_sparse_attention"
        return [heavy if layer < 2 or layer % 2 == 0 else sparse for layer in range(num_layers)]
    names = {ratio: name for name, ratio in _RATES.items()}
    ratios = config.compress_ratios[:num_layers]
    if len(ratios) < num_layers:
        raise InputError(f"names {len(ratios)} layers of {num_layers}", path=path, field="compress_ratios")
    if strange := sorted(set(ratios) - set(names)):
        raise ConfigError(f"{strange[0]} is not understood", path=path, field="compress_ratios")
    return [names[ratio] for ratio in ratios]


def max_length_of(config: ConfigFields) -> int | None:
    """Return the longest sequence that a config states; None if it states none.

    As vLLM 0.33 derives it (config/model.py, _get_and_verify_max_len): a scaling factor counts only in forms whose
    `max_position_embeddings` is the length before scaling; LongRoPE stays at the length before it.
    """
    length = config.max_position_embeddings
    ropes = [rope for rope in (config.rope_parameters, config.rope_scaling) if rope]
    ropes += [own for rope in ropes for own in rope.values() if isinstance(own, dict)]
    if length is None or config.model_type.startswith("gemma3"):
        return length
    for rope in ropes:
        kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor")
        if kind == "longrope":
            return config.original_max_position_embeddings or rope.get("original_max_position_embeddings") or length
        if kind in ("linear", "dynamic", "ntk") and isinstance(factor, int | float):
            return int(length * factor)
    return length


def read_layers(
    config: ConfigFields, num_layers: int, head_dim: int, state_bytes: int, path: Path | None
) -> tuple[KvLayer, ...]:
    """Return the KV layer of each layer. Raise ConfigError if no layer keeps tokens."""
    if config.use_cla:
        raise ConfigError(
            "is true: layers that share KV with the one before are not understood", path=path, field="use_cla"
        )
    if config.block_configs is not None:
        return _searched_layers(config, num_layers, head_dim, path)
    kinds = _layers_by_kind(config, head_dim, state_bytes, path)
    types = block_types(config, num_layers, path)
    layers = [kinds[kind] for kind in types]
    for index, key_bytes in enumerate(_index_keys(config, types, path)):
        if key_bytes:
            layers[index] = msgspec.structs.replace(layers[index], fixed_bytes=key_bytes)
    num_own = max(0, num_layers - config.num_kv_shared_layers)
    own_types = set(types[:num_own])
    for index in range(num_own, num_layers):
        if types[index] not in own_types:
            raise ConfigError(
                f"is {config.num_kv_shared_layers}: layer {index} has no layer of its kind before them",
                path=path,
                field="num_kv_shared_layers",
            )
        layers[index] = msgspec.structs.replace(layers[index], kind="shared")
    if not any(layer.keeps_tokens for layer in layers):
        raise ConfigError("has no layer that keeps tokens", path=path, field="layer_types")
    return tuple(layers)


def _layers_by_kind(config: ConfigFields, head_dim: int, state_bytes: int, path: Path | None) -> dict[str, KvLayer]:
    heads = config.num_key_value_heads or config.num_attention_heads
    values = config.v_head_dim if config.model_type == "mimo_v2_flash" else head_dim
    full = KvLayer(kind="full", num_heads=heads, head_numbers=head_dim + values)
    if config.kv_lora_rank is not None:
        rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
        # FlashMLA's rows: the latent in fp8 with a scale in 32 bits per 128 numbers, rotary numbers in 16 bits.
        packed = rank + rank // 128 * 4 + 2 * rope if config.model_type in _INDEXED else None
        full = KvLayer(kind="latent", num_heads=1, head_numbers=rank + rope, num_vectors=1, packed_bytes=packed)
    narrow = full
    other = config.attention_other_setting or {}
    if config.model_type == "mimo_v2_flash":
        narrow = KvLayer(
            kind="full",
            num_heads=config.swa_num_key_value_heads or 2 * heads,
            head_numbers=(config.swa_head_dim or head_dim) + (config.swa_v_head_dim or values),
        )
    elif config.model_type == "step3p5" and other:
        narrow = KvLayer(
            kind="full",
            num_heads=_number(other, "num_attention_groups", heads, "attention_other_setting", path),
            head_numbers=2 * _number(other, "head_dim", head_dim, "attention_other_setting", path),
        )
    elif config.model_type == "deepseek_v4":
        # 448 numbers in fp8 with 8 bytes of scales, and 64 rotary numbers in 16 bits, of a head of 512.
        packed = head_dim + (config.qk_rope_head_dim or head_dim // 8) + 8
        narrow = KvLayer(
            kind="full", num_heads=1, head_numbers=head_dim, num_vectors=1, packed_bytes=packed, own_dtype="fp8"
        )
    window = None if config.use_sliding_window is False else config.sliding_window or None
    bounded = _bounded(narrow, "window", window, path)
    return {
        "full_attention": _global_layer(config) if config.model_type == "gemma4_text" else full,
        "indexed_attention": full,
        "sliding_attention": bounded,
        "compressed_sparse_attention": bounded,
        "heavily_compressed_attention": bounded,
        "chunked_attention": _bounded(full, "chunk", config.attention_chunk_size, path),
        "linear_attention": KvLayer(kind="state", state_bytes=state_bytes),
        "mlp": KvLayer(kind="none"),
        "moe": KvLayer(kind="none"),
    }


def _number(values: dict[str, Any], key: str, default: int | None, field: str, path: Path | None) -> int:
    """Return a count in a nested object. Raise InputError for other values, or none without a default."""
    value = values.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_COUNT:
        raise InputError(f"has {brief(value)}, which is not a number of at least 1", path=path, field=f"{field}.{key}")
    return value


def read_draft(config: ConfigFields, layers: tuple[KvLayer, ...], head_dim: int, path: Path | None) -> KvLayer:
    """Return the KV of a drafting layer: that of layers which attend to all tokens, except in some families."""
    if config.model_type in ("mimo_v2_flash", "deepseek_v4", "step3p5"):
        if config.layer_types is None or len(config.layer_types) == len(layers):
            return _layers_by_kind(config, head_dim, 0, path)["sliding_attention"]
        return _layers_by_kind(config, head_dim, 0, path)[config.layer_types[len(layers)]]
    widest = [layer for layer in layers if layer.keeps_tokens and layer.span is None and layer.fixed_bytes]
    widest += [layer for layer in layers if layer.keeps_tokens and layer.span is None]
    widest += [layer for layer in layers if layer.keeps_tokens]
    return widest[0]


def read_caches(config: ConfigFields, num_layers: int, head_dim: int, path: Path | None) -> tuple[KvLayer, ...]:
    """Return the further caches of DeepSeek V4's layers, layer by layer.

    An entry per `rate` tokens; for a rate of 4 also an indexer's key per entry; and, for each of these, keys and scores
    in 32 bits of the tokens that are not compressed yet, in windows of one rate, or two where entries overlap.
    """
    if config.model_type != "deepseek_v4":
        return ()
    row = _layers_by_kind(config, head_dim, 0, path)["sliding_attention"]
    rates = {**_RATES, **(config.compress_rates or {})}
    caches: list[KvLayer] = []
    for kind in block_types(config, num_layers, path):
        if not (rate := rates[kind]):
            continue
        caches.append(msgspec.structs.replace(row, kind="full", span=None, every=rate))
        overlaps = 2 if kind == "compressed_sparse_attention" else 1
        partial = [head_dim]
        if overlaps == 2:
            index = config.index_head_dim
            key = KvLayer(kind="full", num_heads=1, head_numbers=index, num_vectors=1, own_dtype="fp8")
            caches.append(msgspec.structs.replace(key, packed_bytes=index + _INDEXER_SCALE_BYTES, every=rate))
            partial.append(index)
        caches += [
            KvLayer(
                kind="window", num_heads=1, head_numbers=2 * overlaps * width, span=overlaps * rate, own_dtype="float32"
            )
            for width in partial
        ]
    return tuple(caches)


def _index_keys(config: ConfigFields, types: list[str], path: Path | None) -> list[int]:
    """Return the bytes of the key of each layer's indexer; 0 without one."""
    num_layers = len(types)
    if config.model_type in _INDEXED:
        width = config.index_head_dim
        return [(width + -(-width // 128) * _INDEXER_SCALE_BYTES) * has for has in _indexers(config, num_layers, path)]
    if config.model_type != "minimax_m3_vl_text":
        return [0] * num_layers
    own = config.sparse_attention_config or {}
    has_index = own.get("sparse_attention_freq")
    if has_index is None:
        has_index = [kind == "indexed_attention" for kind in types]
    if not isinstance(has_index, list) or len(has_index) != num_layers:
        field = "sparse_attention_config.sparse_attention_freq"
        raise InputError(f"is not a list of {num_layers} layers", path=path, field=field)
    width = _number(own, "sparse_index_dim", config.index_head_dim, "sparse_attention_config", path)
    return [2 * width * bool(has) for has in has_index]  # kept in 16 bits


def _searched_layers(config: ConfigFields, num_layers: int, head_dim: int, path: Path | None) -> tuple[KvLayer, ...]:
    """Return the layers of a model whose blocks were chosen one by one (`block_configs`, Nemotron-NAS)."""
    blocks = config.block_configs or []
    if len(blocks) != num_layers:
        raise InputError(f"names {len(blocks)} layers of {num_layers}", path=path, field="block_configs")
    layers = []
    for block in blocks:
        own = block.get("attention")
        if not isinstance(own, dict) or own.get("replace_with_linear"):
            raise ConfigError("has a layer that is not understood", path=path, field="block_configs")
        if own.get("no_op"):
            layers.append(KvLayer(kind="none"))
            continue
        shared = _number(own, "n_heads_in_group", None, "block_configs.attention", path)
        layers.append(KvLayer(kind="full", num_heads=config.num_attention_heads // shared, head_numbers=2 * head_dim))
    if not any(layer.keeps_tokens for layer in layers):
        raise ConfigError("has no layer that keeps tokens", path=path, field="block_configs")
    return tuple(layers)


def _indexers(config: ConfigFields, num_layers: int, path: Path | None) -> list[bool]:
    """Return for each layer whether it has an indexer; the others reuse the choice of the layer before them.

    Raise InputError and ConfigError for invalid values.
    """
    modes, field = config.indexer_types, "indexer_types"
    if modes is None and config.index_topk_pattern is not None:
        field = "index_topk_pattern"
        modes = [{"F": "full", "S": "shared"}.get(mode, mode) for mode in config.index_topk_pattern]
    if config.kv_lora_rank is None or config.q_lora_rank is None:
        missing = "kv_lora_rank" if config.kv_lora_rank is None else "q_lora_rank"
        raise InputError("is missing, and the config has an indexer", path=path, field=missing)
    if config.model_type == "deepseek_v32":
        return [True] * num_layers
    if modes is None:
        offset = config.index_skip_topk_offset
        return [max(layer - offset + 1, 0) % config.index_topk_freq == 0 for layer in range(num_layers)]
    if len(modes) != num_layers:
        raise InputError(f"names {len(modes)} layers of {num_layers}", path=path, field=field)
    if strange := sorted(set(modes) - {"full", "shared"}):
        raise ConfigError(f"{strange[0]!r} is not understood", path=path, field=field)
    return [mode == "full" for mode in modes]


def take_global_heads(config: ConfigFields, num_layers: int, path: Path | None) -> None:
    """Read the heads of Gemma 4's full layers from `per_layer_config`, the form written by transformers 5.24.

    Raise ConfigError for layers that differ in anything else.
    """
    if not config.per_layer_config:
        return
    own = {number.lstrip("0") or "0": one for number, one in config.per_layer_config.items()}
    types = block_types(config, num_layers, path)
    full = {str(number) for number, kind in enumerate(types) if kind == "full_attention"}
    said = list(own.values())
    first = said[0] if said else {}
    is_known = config.model_type == "gemma4_text" and set(own) == full and all(one == first for one in said)
    known = {"head_dim", "num_key_value_heads"} if config.attention_k_eq_v else {"head_dim"}
    if not is_known or not set(first) <= known:
        raise ConfigError("describes layers in a way that is not understood", path=path, field="per_layer_config")
    if "head_dim" in first:
        config.global_head_dim = _count(first["head_dim"], path)
    if "num_key_value_heads" in first:
        config.num_global_key_value_heads = _count(first["num_key_value_heads"], path)


def _count(value: Any, path: Path | None) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_COUNT:
        raise InputError(f"has {brief(value)}, which is not a number of heads", path=path, field="per_layer_config")
    return value


def _global_layer(config: ConfigFields) -> KvLayer:
    """Return the KV layer of Gemma 4's full attention, whose heads differ from those of windowed layers."""
    heads = config.num_key_value_heads or config.num_attention_heads
    if config.attention_k_eq_v:
        heads = config.num_global_key_value_heads or heads
    return KvLayer(kind="full", num_heads=heads, head_numbers=2 * config.global_head_dim)


def _bounded(full: KvLayer, kind: Literal["window", "chunk"], span: int | None, path: Path | None) -> KvLayer:
    if span is None:
        return full
    if full.kind == "latent":
        raise ConfigError(
            "is not understood together with kv_lora_rank",
            path=path,
            field="sliding_window" if kind == "window" else "attention_chunk_size",
        )
    return msgspec.structs.replace(full, kind=kind, span=span)


# States ---------------------------------------------------------------------------------------------------


def read_state(config: ConfigFields, dtype: str) -> State | None:
    """Return the state of the layers that keep one; None for a family without states.

    Formats are vLLM 0.32's defaults: the model's 16 bits, except where the config or the family has another.
    """
    of_family = _STATES.get(config.model_type)
    if of_family is None:
        return None
    return msgspec.structs.replace(of_family(config, dtype), stated_dtype=config.mamba_ssm_dtype)


def _mamba(
    config: ConfigFields, dtype: str, heads: int, width: int, groups: int, size: int, kernel: int, has_bias: bool
) -> State:
    """Return the state of Mamba-2: `heads` heads with `width` channels in total, and `size` numbers per channel."""
    hidden, conv = config.hidden_size, width + 2 * groups * size
    projected = width + conv + heads
    biases = projected + hidden if config.mamba_proj_bias or config.use_bias else 0
    return State(
        conv_numbers=(kernel - 1) * conv,
        recurrent_numbers=width * size,
        matrix=hidden * projected + width * hidden,
        small=conv * (kernel + has_bias) + 3 * heads + width + biases,
        recurrent_dtype=dtype,
        conv_rows=kernel - 1,
        num_groups=groups,
        group_numbers=2 * size,
        chunk_size=config.mamba_chunk_size or config.chunk_size or (128 if config.model_type == "nemotron_h" else 256),
    )


def _granite(config: ConfigFields, dtype: str) -> State:
    return _mamba(
        config,
        dtype,
        config.mamba_n_heads,
        config.mamba_expand * config.hidden_size,
        config.mamba_n_groups,
        config.mamba_d_state,
        config.mamba_d_conv,
        config.mamba_conv_bias,
    )


def _nemotron(config: ConfigFields, _: str) -> State:
    return _mamba(
        config,
        config.mamba_ssm_cache_dtype or "float32",
        config.mamba_num_heads,
        config.mamba_num_heads * config.mamba_head_dim,
        config.n_groups,
        config.ssm_state_size,
        config.conv_kernel,
        config.use_conv_bias,
    )


def _kimi_delta(config: ConfigFields, _: str) -> State:
    """Return the state of Kimi Delta Attention: queries, keys and values are convolved, the state is in 32 bits."""
    own = config.linear_attn_config or {}
    field = "linear_attn_config"
    width = _number(own, "head_dim", config.linear_head_dim, field, None)
    heads = _number(own, "num_heads", config.linear_num_heads, field, None)
    kernel = _number(own, "short_conv_kernel_size", config.linear_conv_kernel_dim, field, None)
    hidden, all_heads = config.hidden_size, heads * width
    gate = hidden * all_heads if own.get("use_full_rank_gate") else width * (hidden + all_heads)
    return State(
        conv_numbers=(kernel - 1) * 3 * all_heads,
        recurrent_numbers=all_heads * width,
        matrix=4 * hidden * all_heads + width * (hidden + all_heads) + gate + hidden * heads,
        small=3 * all_heads * kernel + heads + all_heads + width,
        recurrent_dtype="float32",
        kind="kda",
        conv_rows=kernel - 1,
    )


def _delta_rule(config: ConfigFields, dtype: str) -> State:
    """Return the state of linear attention with a gated delta rule, as in Qwen3-Next."""
    hidden, heads = config.hidden_size, config.linear_num_value_heads
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = heads * config.linear_value_head_dim
    conv = 2 * keys + values
    kernel = config.linear_conv_kernel_dim
    return State(
        conv_numbers=(kernel - 1) * conv,
        recurrent_numbers=heads * config.linear_key_head_dim * config.linear_value_head_dim,
        matrix=hidden * (2 * keys + 2 * values + 2 * heads) + values * hidden,
        small=conv * kernel + 2 * heads + config.linear_value_head_dim,
        recurrent_dtype=config.mamba_ssm_dtype or config.mamba_ssm_cache_dtype or dtype,
        kind="gdn",
        conv_rows=kernel - 1,
    )


def _falcon_h1(config: ConfigFields, dtype: str) -> State:
    width = config.mamba_d_ssm or config.mamba_expand * config.hidden_size
    state = _mamba(
        config,
        dtype,
        config.mamba_n_heads,
        width,
        config.mamba_n_groups,
        config.mamba_d_state,
        config.mamba_d_conv,
        config.mamba_conv_bias,
    )
    return msgspec.structs.replace(state, small=state.small - width * (not config.mamba_rms_norm))


def _jamba(config: ConfigFields, dtype: str) -> State:
    """Return the state of Mamba, with the norms of Jamba: of time steps, inputs and outputs."""
    hidden, size, kernel = config.hidden_size, config.mamba_d_state, config.mamba_d_conv
    width, rank = config.mamba_expand * hidden, config.mamba_dt_rank
    rank = -(-hidden // 16) if isinstance(rank, str) else rank
    biases = 2 * width + hidden if config.mamba_proj_bias else 0
    return State(
        conv_numbers=(kernel - 1) * width,
        recurrent_numbers=width * size,
        matrix=3 * hidden * width + width * (2 * rank + 2 * size),
        small=width * (kernel + config.mamba_conv_bias + size + 2) + rank + 2 * size + biases,
        recurrent_dtype=dtype,
        kind="mamba1",
        conv_rows=kernel - 1,
    )


def _short_conv(config: ConfigFields, dtype: str) -> State:
    """Return the state of LFM2's convolutions: their last inputs."""
    hidden, kernel = config.hidden_size, config.conv_L_cache
    return State(
        conv_numbers=(kernel - 1) * hidden,
        recurrent_numbers=0,
        matrix=4 * hidden * hidden,
        small=hidden * kernel + 5 * hidden * config.conv_bias,
        recurrent_dtype=dtype,
        kind="short_conv",
        conv_rows=kernel - 1,
    )


def _olmo_hybrid(config: ConfigFields, dtype: str) -> State:
    """Return the state of Olmo Hybrid's gated delta nets, whose convolutions and projections are separate."""
    return msgspec.structs.replace(_delta_rule(config, dtype), kind="olmo_gdn")


_STATES: dict[str, Callable[[ConfigFields, str], State]] = {
    "falcon_h1": _falcon_h1,
    "jamba": _jamba,
    "lfm2": _short_conv,
    "lfm2_moe": _short_conv,
    "olmo_hybrid": _olmo_hybrid,
    "kimi_linear": _kimi_delta,
    "granitemoehybrid": _granite,
    "nemotron_h": _nemotron,
    "qwen3_next": _delta_rule,
    "qwen3_5_text": _delta_rule,
    "qwen3_5_moe_text": _delta_rule,
}


_WHOLE_NORMS = ("olmo2", "olmo3", "olmo_hybrid", "olmoe", "flex_olmo")


def read_extra(config: ConfigFields, layers: Sequence[KvLayer], head_dim: int) -> Extra:
    """Return weights other than those of attention, feed-forward layers and states, and corrections to these."""
    family = config.model_type
    if family in _INDEXED:
        return _indexing(config, len(layers))
    if family == "gemma3n_text":
        return _gemma_3n(config, len(layers))
    if family == "gemma4_text":
        return _gemma_4(config, layers, head_dim)
    if family in ("mimo_v2_flash", "step3p5", "nemotron-nas"):
        return _by_layer(config, layers, head_dim)
    if family == "deepseek_v4":
        return _deepseek_4(config, len(layers), head_dim)
    if family == "minimax_m3_vl_text":
        own = config.sparse_attention_config or {}
        heads = own.get("sparse_num_index_heads", config.index_n_heads or 4)
        width = own.get("sparse_index_dim", config.index_head_dim)
        num_indexed = sum(layer.fixed_bytes > 0 for layer in layers)
        return Extra(matrix=num_indexed * config.hidden_size * width * (heads + 1), small=num_indexed * 2 * width)
    if family == "ernie4_5_moe":  # biases of the choice of experts
        return Extra(small=(len(layers) - config.moe_layer_start_index) * (config.num_experts or 0))
    if family == "apertus":  # two numbers of an activation that is learned
        return Extra(small=2 * len(layers))
    if (family == "minimax_m2" and config.use_qk_norm) or family in _WHOLE_NORMS:
        # Norms of all queries and all keys of a layer together.
        num_heads = config.num_attention_heads + (config.num_key_value_heads or config.num_attention_heads)
        return Extra(small=sum(layer.attends for layer in layers) * num_heads * head_dim)
    return Extra()


def _by_layer(config: ConfigFields, layers: Sequence[KvLayer], head_dim: int) -> Extra:
    """Return the difference from layers with equal heads, for attention whose heads differ between layers."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    other = config.attention_other_setting or {}
    narrow_heads = config.swa_num_attention_heads or config.num_sliding_attention_heads or heads
    narrow_heads = other.get("num_attention_heads", narrow_heads)
    numbers = 0
    for layer in layers:
        if not layer.attends:
            continue
        count = heads if layer.span is None else narrow_heads
        width, key = layer.head_numbers // 2, head_dim
        if config.model_type == "mimo_v2_flash":
            key = (config.swa_head_dim or head_dim) if layer.span is not None else head_dim
            width = layer.head_numbers - key
        elif config.model_type == "step3p5":
            key = width
            numbers += count * config.hidden_size  # a gate per head
        numbers += config.hidden_size * (count * (key + width) + layer.num_heads * layer.head_numbers)
        numbers -= 2 * config.hidden_size * head_dim * (heads + kv_heads)
    return Extra(matrix=numbers)


def _deepseek_4(config: ConfigFields, num_layers: int, head_dim: int) -> Extra:
    """Return the difference of DeepSeek V4's layers from plain ones: ranks, compressors, indexers, mixed streams."""
    hidden, heads, streams = config.hidden_size, config.num_attention_heads, config.hc_mult
    rank = config.q_lora_rank or hidden
    attention = rank * (hidden + heads * head_dim) + hidden * head_dim
    attention += config.o_lora_rank * (heads * head_dim + config.o_groups * hidden)
    numbers = num_layers * (attention - 2 * hidden * head_dim * (heads + 1))
    for kind in block_types(config, num_layers, None):
        if rate := _RATES[kind]:
            overlaps = 2 if rate == 4 else 1
            numbers += overlaps * (2 * hidden + rate) * head_dim
        if rate == 4:
            index = config.index_head_dim
            numbers += 2 * (2 * hidden + rate) * index
            numbers += rank * (config.index_n_heads or 64) * index + hidden * (config.index_n_heads or 64)
    mixes = (2 + streams) * streams
    small = num_layers * (2 * mixes * streams * hidden + rank + head_dim + heads) + streams * streams * hidden
    return Extra(matrix=numbers, small=small)


def read_sparse(config: ConfigFields, num_layers: int) -> Sparse | None:
    """Return the indexers of sparse attention; None for models that attend to all tokens or to a window."""
    if config.model_type == "minimax_m3_vl_text":
        return _sparse_blocks(config, num_layers)
    if config.model_type not in _INDEXED:
        return None
    return Sparse(
        top_tokens=config.index_topk,
        num_heads=config.index_n_heads or _INDEXED[config.model_type],
        key_dim=config.index_head_dim,
        num_indexers=sum(_indexers(config, num_layers, None)),
        kv_dtype="fp8" if config.model_type == "glm_moe_dsa" else None,
    )


def _sparse_blocks(config: ConfigFields, num_layers: int) -> Sparse | None:
    """Return the indexers of MiniMax M3, which choose blocks of tokens. None if the file does not say how many."""
    own = config.sparse_attention_config or {}
    blocks, size = own.get("sparse_topk_blocks", config.index_topk_blocks), own.get("sparse_block_size", 128)
    num_indexers = sum(map(bool, own.get("sparse_attention_freq") or ()))
    num_indexers = num_indexers or sum(kind == "indexed_attention" for kind in block_types(config, num_layers, None))
    if not isinstance(blocks, int) or not isinstance(size, int) or not num_indexers:
        return None
    return Sparse(
        top_tokens=blocks * size,
        num_heads=own.get("sparse_num_index_heads", config.index_n_heads or 4),
        key_dim=own.get("sparse_index_dim", config.index_head_dim),
        num_indexers=num_indexers,
        num_dense=num_layers - num_indexers,
        is_divided=True,
    )


def _indexing(config: ConfigFields, num_layers: int) -> Extra:
    """Add indexers: queries from the query latent, a key with its norm, and a weight per head."""
    sparse = read_sparse(config, num_layers)
    assert sparse is not None
    matrix = (config.q_lora_rank or 0) * sparse.num_heads * sparse.key_dim
    matrix += config.hidden_size * (sparse.key_dim + sparse.num_heads)
    return Extra(matrix=sparse.num_indexers * matrix, small=sparse.num_indexers * 2 * sparse.key_dim)


def _second_inputs(config: ConfigFields, num_layers: int) -> Extra:
    """Return the per-layer embeddings and their projections."""
    hidden, narrow = config.hidden_size, config.hidden_size_per_layer_input
    if not narrow:
        return Extra()
    return Extra(
        matrix=num_layers * 3 * hidden * narrow,
        small=num_layers * hidden + narrow,
        embeddings=config.vocab_size_per_layer_input * num_layers * narrow,
    )


def _gemma_3n(config: ConfigFields, num_layers: int) -> Extra:
    """Add, per layer, a low-rank path (LAuReL) and mixing of inputs (AltUp)."""
    hidden, inputs = config.hidden_size, config.altup_num_inputs
    second = _second_inputs(config, num_layers)
    mixing = num_layers * hidden * (2 * config.laurel_rank + inputs) + 2 * (inputs - 1) * hidden * hidden
    return Extra(
        matrix=second.matrix + mixing,
        small=second.small + num_layers * (3 * hidden + inputs**2 + inputs**3),
        embeddings=second.embeddings,
    )


def _gemma_4(config: ConfigFields, layers: Sequence[KvLayer], head_dim: int) -> Extra:
    """Add the difference of full-attention layers from the others, and routers with a scale."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    own, borrowed = _global_layer(config), [layer for layer in layers if layer.kind == "shared" and layer.span is None]
    num_full = sum(layer.kind == "full" for layer in layers)
    kept = 1 if config.attention_k_eq_v else 2
    plain = 2 * (config.num_key_value_heads or heads) * head_dim
    wider = 2 * heads * (config.global_head_dim - head_dim)
    second = _second_inputs(config, len(layers))
    matrix = num_full * hidden * (wider + kept * own.num_heads * config.global_head_dim - plain)
    matrix += len(borrowed) * hidden * wider
    small = (2 * num_full + len(borrowed)) * (config.global_head_dim - head_dim)
    if config.enable_moe_block:
        small += len(layers) * (hidden + (config.num_experts or 0))
    return Extra(second.matrix + matrix, second.small + small, second.embeddings)

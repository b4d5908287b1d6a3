"""Reads the geometry of a model: a preset by name, or a config.json in Hugging Face's format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kvarts.errors import ConfigError, InputError, MissingFileError, did_you_mean, parts_of
from kvarts.files import read_bytes, reading
from kvarts.hardware.config_layers import (
    FAMILIES,
    ConfigFields,
    block_types,
    num_layers_of,
    read_extra,
    read_layers,
    read_sparse,
    read_state,
    take_global_heads,
)
from kvarts.hardware.geometry import Experts, Geometry, Latent, dtype_bits

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["load_geometry", "preset_names"]

_TIED_BY_DEFAULT = {"gemma2", "gemma3_text", "gemma3n_text", "gemma4_text"}


def preset_names() -> list[str]:
    """Return the names of the model presets."""
    return list(_presets())


def load_geometry(model: str | Path) -> Geometry:
    """Return the geometry of a preset, of a config.json, or of a directory that contains one.

    Raise MissingFileError if neither exists, InputError for a file that is not a config, and ConfigError for an
    unsupported model type.
    """
    presets = _presets()
    name = str(model)
    if name.lower() in presets:
        preset = presets[name.lower()]
        return _geometry(name.lower(), preset["source"], preset, None)
    from pathlib import Path

    path = Path(model)
    with reading(path):
        if path.is_dir():
            path /= "config.json"
        is_there = path.exists()
    if not is_there:
        close = did_you_mean(name, list(presets))
        raise MissingFileError(
            "is neither a model known by name nor a config.json",
            path=name,
            hint=f"{close or 'Give a config.json, or a name:'} `kvarts model list` lists all names.",
        )
    data = read_bytes(path)
    try:
        try:
            values = msgspec.json.decode(data)
        except msgspec.DecodeError:
            values = _with_infinities(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"is not readable JSON: {error}", path=path) from error
    except RecursionError:
        raise InputError("is not readable JSON: it is nested too deeply", path=path) from None
    if not isinstance(values, dict):
        raise InputError("holds no object", path=path)
    return _geometry(path.parent.name or path.stem, str(path), values, path)


def _with_infinities(data: bytes) -> Any:
    """Decode JSON that contains non-standard numbers such as Infinity, as in configs of Mamba-2.

    Raise msgspec.DecodeError if it is not JSON otherwise.
    """
    import json  # most configs do not need it

    try:
        return json.loads(data)
    except ValueError as error:
        raise msgspec.DecodeError(str(error)) from error


def _presets() -> dict[str, dict[str, Any]]:
    from pkgutil import get_data  # `importlib.resources` would take longer than a short replay

    text = get_data("kvarts.hardware", "presets/models.json")
    assert text is not None
    presets: dict[str, dict[str, Any]] = msgspec.json.decode(text)
    return presets


def _geometry(name: str, source: str, values: dict[str, Any], path: Path | None) -> Geometry:
    text = values.get("text_config")
    if isinstance(text, dict):  # a multimodal model: the config of its text model is nested
        outer: dict[str, Any] = {
            key: values[key] for key in ("torch_dtype", "dtype", "quantization_config") if key in values
        }
        values = {**outer, **text}
    family = values.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ConfigError(
            f"{family!r} is not understood",
            path=path,
            field="model_type",
            hint=f"Known are decoders of the types {', '.join(FAMILIES)}.",
        )
    try:
        config = msgspec.convert(values, ConfigFields)
    except msgspec.ValidationError as error:
        what, field = parts_of(error)
        raise InputError(what, path=path, field=field) from error
    num_layers = num_layers_of(config, path)
    take_global_heads(config, num_layers, path)
    experts = _experts(config, num_layers, path)
    latent = None
    if config.kv_lora_rank is not None:
        latent = Latent(
            config.kv_lora_rank, config.q_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        )
    dtype = config.dtype or config.torch_dtype or "bfloat16"
    dtype_bits(dtype, field="dtype")
    weight_dtype, expert_dtype = _stored_as(config, dtype, path)
    head_dim = _head_dim(config, path)
    state = read_state(config)
    if state is not None:
        dtype_bits(state.recurrent_dtype, field="mamba_ssm_cache_dtype")
    layers = read_layers(config, num_layers, head_dim, state.num_bytes(dtype) if state is not None else 0, path)
    has_bias = config.model_type == "gpt_oss" if config.attention_bias is None else config.attention_bias
    facts: dict[str, Any] = {"has_qkv_bias": has_bias and latent is None, "has_output_bias": has_bias}
    if config.model_type == "glm4_moe":
        facts["has_qk_norm"] = config.use_qk_norm
    if config.model_type == "gemma4_text":
        facts |= {"num_norms": 7 if experts is not None else 4, "num_mlp_layers": num_layers}
    if config.model_type == "nemotron_h":
        facts["num_mlp_layers"] = block_types(config, num_layers, path).count("mlp")
    geometry = Geometry(
        name=name,
        source=source,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        layers=layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        intermediate_size=_dense_width(config, experts, num_layers, path),
        ties_embeddings=(
            config.model_type in _TIED_BY_DEFAULT if config.tie_word_embeddings is None else config.tie_word_embeddings
        ),
        has_mlp_bias=config.mlp_bias,
        latent=latent,
        sparse=read_sparse(config, num_layers),
        experts=experts,
        state=state,
        extra=read_extra(config, layers, head_dim),
        dtype=dtype,
        weight_dtype=weight_dtype,
        expert_dtype=expert_dtype,
        **{**facts, **FAMILIES[config.model_type]},
    )
    for field in ("weight_dtype", "expert_dtype"):
        dtype_bits(getattr(geometry, field), field=field)
    return geometry


def _head_dim(config: ConfigFields, path: Path | None) -> int:
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    if num_kv_heads is not None and num_heads % num_kv_heads:
        raise InputError(
            f"is {num_kv_heads}, and {num_heads} heads cannot share that many evenly",
            path=path,
            field="num_key_value_heads",
        )
    head_dim = config.head_dim or config.attention_head_dim
    if head_dim is None:
        head_dim, rest = divmod(config.hidden_size, num_heads)
        if head_dim and rest and config.kv_lora_rank is None:
            raise InputError(
                f"is {config.hidden_size}, which {num_heads} heads do not divide, and there is no head_dim",
                path=path,
                field="hidden_size",
            )
    if not head_dim:
        raise InputError(
            f"is {config.hidden_size}, less than a number for each of {config.num_attention_heads} heads",
            path=path,
            field="hidden_size",
        )
    return head_dim


def _width(config: ConfigFields, path: Path | None) -> int | None:
    """Return `intermediate_size`, which may be a list with a value per layer. Raise ConfigError if they differ."""
    widths = config.intermediate_size
    if not isinstance(widths, list):
        return widths
    if len(set(widths)) != 1:
        raise ConfigError("differs between layers", path=path, field="intermediate_size")
    return widths[0]


def _dense_width(config: ConfigFields, experts: Experts | None, num_layers: int, path: Path | None) -> int:
    """Return the width of feed-forward layers that process every token."""
    width = _width(config, path)
    if config.model_type == "llama4_text" and config.intermediate_size_mlp is not None:
        width = config.intermediate_size_mlp
    if config.model_type == "granitemoehybrid" and experts is None:
        width = config.shared_intermediate_size
    if config.model_type == "gemma4_text" and config.use_double_wide_mlp and config.num_kv_shared_layers:
        raise ConfigError(
            "is not understood together with num_kv_shared_layers", path=path, field="use_double_wide_mlp"
        )
    if width is None and (experts is None or experts.num_layers < num_layers):
        raise InputError("is missing", path=path, field="intermediate_size")
    return width or 0


def _experts(config: ConfigFields, num_layers: int, path: Path | None) -> Experts | None:
    count = config.n_routed_experts or config.num_experts or config.num_local_experts
    num_expert_layers = _num_expert_layers(config, num_layers, path)
    if not count or not num_expert_layers:
        return None
    per_token = config.top_k_experts or config.num_experts_per_tok
    if per_token is None:
        raise InputError("is missing", path=path, field="num_experts_per_tok")
    if per_token > count:
        raise InputError(f"is {per_token}, and there are {count} experts", path=path, field="num_experts_per_tok")
    size = config.moe_intermediate_size or _width(config, path)
    if size is None:
        raise InputError("is missing", path=path, field="moe_intermediate_size")
    if config.moe_latent_size is not None:
        raise ConfigError("is not understood", path=path, field="moe_latent_size")
    shared = (config.n_shared_experts or 0) * size
    if config.model_type == "nemotron_h":
        shared = config.moe_shared_expert_intermediate_size
    elif config.model_type == "llama4_text":
        shared = size
    else:
        shared += config.shared_expert_intermediate_size + config.shared_intermediate_size
    return Experts(
        count=count,
        per_token=per_token,
        intermediate_size=size,
        shared_size=shared,
        num_layers=num_expert_layers,
        has_bias=config.model_type == "gpt_oss",
        has_shared_gate=config.shared_expert_intermediate_size > 0,
    )


def _num_expert_layers(config: ConfigFields, num_layers: int, path: Path | None) -> int:
    if config.model_type == "gemma4_text" and not config.enable_moe_block:
        return 0
    if config.model_type == "nemotron_h":
        return block_types(config, num_layers, path).count("moe")
    if config.model_type == "llama4_text":
        if config.moe_layers is not None:
            return len({layer for layer in config.moe_layers if layer < num_layers})
        return num_layers // config.interleave_moe_layer_step
    every, dense = config.decoder_sparse_step, config.mlp_only_layers
    return sum(
        layer >= config.first_k_dense_replace and (layer + 1) % every == 0 and layer not in dense
        for layer in range(num_layers)
    )


def _stored_as(config: ConfigFields, dtype: str, path: Path | None) -> tuple[str, str]:
    """Return the number formats of matrices and of experts' matrices."""
    if config.quantization_config is None:
        return dtype, dtype
    method = config.quantization_config.get("quant_method")
    if method == "mxfp4":
        return dtype, "mxfp4"
    if method == "fp8":
        return "fp8-block", "fp8-block"
    if method in ("awq", "gptq") and config.quantization_config.get("bits") == 4:
        return "int4-block", "int4-block"
    raise ConfigError(
        f"{method!r} is not understood",
        path=path,
        field="quantization_config.quant_method",
        hint="Known are fp8, mxfp4, and awq and gptq of 4 bits.",
    )

"""Reads the geometry of a model: a preset by name, or a config.json in Hugging Face's format."""

from __future__ import annotations

import re
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from kvarts.base.decoders import decode_json
from kvarts.base.errors import ConfigError, InputError, MissingFileError, did_you_mean, parts_of
from kvarts.base.files import read_bytes, reading
from kvarts.base.limits import MOST_BYTES, brief
from kvarts.core.kv.number_formats import dtype_bits
from kvarts.cost.hardware.checkpoint_formats import fp8_block_of, kv_format_of, read_formats, stored_formats
from kvarts.cost.hardware.config_layers import (
    FAMILIES,
    ConfigFields,
    Count,
    Layers,
    block_types,
    like,
    max_length_of,
    num_layers_of,
    read_caches,
    read_draft,
    read_extra,
    read_layers,
    read_sparse,
    read_state,
    take_global_heads,
)
from kvarts.cost.hardware.geometry import Experts, Geometry, Latent

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LAYOUT_HINT", "check_config", "hub_models", "load_geometry", "preset_names", "read_geometry"]

HUB = "https://huggingface.co/"
_NESTED = ("text_config", "language_config", "llm_config")
_OUTER = ("torch_dtype", "dtype", "quantization_config", "tie_word_embeddings")
LAYOUT_HINT = "For any other model, --set kv_layout=FILE states what its layers keep."


def preset_names() -> list[str]:
    """Return the names of the model presets."""
    return list(_presets())


def load_geometry(model: str | Path, weight_dtype: str | None = None) -> Geometry:
    """Return the geometry of a preset, of a config.json, or of a directory that contains one.

    A preset has its own name and the ids of the hub's repositories with its config. Next to a
    config.json, hf_quant_config.json is read, and of weights only their index. `weight_dtype`: format of all matrices
    in place of those of the checkpoint.

    Raise MissingFileError if neither exists, InputError for a file that is not a config, and ConfigError for an
    unsupported model type.
    """
    name = str(model)
    if _known(name) is not None:
        return _of_known(name, weight_dtype)
    from pathlib import Path

    path = Path(model)
    with reading(path):
        if path.is_dir():
            path /= "config.json"
        is_there = path.exists()
    if not is_there:
        close = did_you_mean(name, list(_presets())) or did_you_mean(name, list(hub_models()))
        raise MissingFileError(
            "is neither a model known by name nor a config.json",
            path=name,
            hint=f"{close or 'Give a config.json, or a name:'} `kvarts model list` lists all names.",
        )
    values = _read_json(path)
    if "compression_config" in values:  # the name that compressed-tensors had first
        values.setdefault("quantization_config", values["compression_config"])
    index = path.parent / "model.safetensors.index.json"
    with reading(index):
        total = _total_bytes(index) if path.name == "config.json" and index.exists() else None
    beside = path.with_name(path.name.removesuffix("config.json") + "hf_quant_config.json")
    with reading(beside):
        if values.get("quantization_config") is None and path.name.endswith("config.json") and beside.exists():
            values["quantization_config"] = _read_json(beside)
    return _geometry(path.parent.name or path.stem, str(path), values, path, weight_dtype, total)


@lru_cache(maxsize=64)
def _of_known(name: str, weight_dtype: str | None) -> Geometry:
    """Return the geometry of a model that is known by name. Cached: each trial of a fit needs it."""
    known = _known(name)
    assert known is not None
    return _geometry(known[0], known[1]["source"], known[1], None, weight_dtype)


def read_geometry(name: str, source: str, values: dict[str, Any], path: Path, total_bytes: int) -> Geometry:
    """Return the geometry that a config's values describe, with weights of `total_bytes`. Raise as load_geometry."""
    return _geometry(name, source, values, path, None, total_bytes)


def check_config(path: Path) -> None:
    """Raise InputError if the sizes in a config.json cannot be those of a model.

    Fields that all families share are checked, also in files of unknown families.
    """
    values = _read_json(path)
    for part, prefix in ((values, ""), (values.get("text_config"), "text_config.")):
        if not isinstance(part, dict):
            continue
        given = {field: part[field] for field in _Sizes.__struct_fields__ if part.get(field) is not None}
        try:
            msgspec.convert(given, _Sizes)
        except msgspec.ValidationError as error:
            what, field = parts_of(error)
            raise InputError(what, path=path, field=f"{prefix}{field}") from error


class _Sizes(msgspec.Struct):
    """Fields that every family of decoders has, with their bounds."""

    num_hidden_layers: Layers | None = None
    hidden_size: Count | None = None
    num_attention_heads: Count | None = None
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    vocab_size: Count | None = None
    intermediate_size: Count | list[Count] | None = None


def _read_json(path: Path) -> dict[str, Any]:
    data = read_bytes(path)
    try:
        try:
            values = msgspec.json.decode(data)
        except msgspec.DecodeError:  # numbers such as Infinity, as in configs of Mamba-2
            values = decode_json(data)
    except ValueError as error:
        raise InputError(f"is not readable JSON: {error}", path=path) from error
    except RecursionError:
        raise InputError("is not readable JSON: it is nested too deeply", path=path) from None
    if not isinstance(values, dict):
        raise InputError("holds no object", path=path)
    return values


def _total_bytes(index: Path) -> int | None:
    """Return the bytes of all weights that an index of safetensors files states."""
    metadata = _read_json(index).get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total is None:
        return None
    if isinstance(total, bool) or not isinstance(total, int | float) or not 1 <= total <= MOST_BYTES:
        raise InputError(f"is {brief(total)}, which is no number of bytes", path=index, field="metadata.total_size")
    return int(total)


def _is_file(name: str) -> bool:
    if "/" not in name:
        return False
    from pathlib import Path

    with reading(Path(name)):
        return Path(name).exists()


def hub_models() -> dict[str, dict[str, Any]]:
    """Return the configs of the hub's repositories that are known by their ids, in the case of the hub.

    A preset is the config of the repository that its source names, unless that one has its weights in another format,
    and of its `repositories`, each with the fields that differ.
    """
    from pkgutil import get_data

    text = get_data("kvarts.cost.hardware", "presets/hub.json")
    assert text is not None
    configs: dict[str, dict[str, Any]] = msgspec.json.decode(text)
    for name, preset in _presets().items():
        cited = re.search(rf"{re.escape(HUB)}([\w.-]+/[\w.-]+)", preset["source"])
        of_name = ({cited[1]: {}} if cited else {}) | preset.pop("repositories", {})
        for repository, changed in of_name.items():
            config = {**preset, **changed}
            if "quantization_config" not in changed:
                config["name"] = name
            known = configs.get(repository, config)
            if known.get("quantization_config") == config.get("quantization_config"):
                configs[repository] = config
    return configs


def _known(name: str) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the config of a model that is known by its name, or by the id of a repository of the hub."""
    presets = _presets()
    if name.lower() in presets:
        return name.lower(), presets[name.lower()]
    if "/" not in name or _is_file(name):
        return None
    for repository, config in hub_models().items():
        if repository.lower() == name.lower():
            return config.get("name", repository), {"source": f"{HUB}{repository}/blob/main/config.json", **config}
    return None


def _presets() -> dict[str, dict[str, Any]]:
    from pkgutil import get_data  # `importlib.resources` would take longer than a short replay

    text = get_data("kvarts.cost.hardware", "presets/models.json")
    assert text is not None
    presets: dict[str, dict[str, Any]] = msgspec.json.decode(text)
    return presets


def _defaults() -> dict[str, Any]:
    from pkgutil import get_data

    text = get_data("kvarts.cost.hardware", "presets/defaults.json")
    assert text is not None
    defaults: dict[str, Any] = msgspec.json.decode(text)
    return defaults


@cache
def _field_defaults() -> dict[str, Any]:
    return {field.name: field.default for field in msgspec.structs.fields(ConfigFields)}


def _values_of_text(values: dict[str, Any], path: Path | None) -> dict[str, Any]:
    """Return the values of the text model, with the defaults of its configuration class for missing fields.

    Raise ConfigError for an unknown family.
    """
    defaults = _defaults()
    text = next((values[key] for key in _NESTED if isinstance(values.get(key), dict)), None)
    if text is not None:  # a multimodal model: the config of its text model is nested
        given = {key: values[key] for key in _OUTER if values.get(key) is not None}
        given |= {key: value for key, value in text.items() if value is not None or key not in given}
        given.setdefault("model_type", defaults["text"].get(str(values.get("model_type"))))
    else:
        given = dict(values)
        given["model_type"] = defaults["text"].get(str(values.get("model_type")), values.get("model_type"))
    family = given["model_type"]
    if not isinstance(family, str) or family not in FAMILIES:
        raise ConfigError(
            f"{family!r} is not understood",
            path=path,
            field="model_type",
            hint=f"Known are decoders of the types {', '.join(FAMILIES)}. {LAYOUT_HINT}",
        )
    own = family if family in defaults["families"] else like(family)
    for one, other in defaults["names"].get(own, {}).items():
        for known, missing in ((one, other), (other, one)):
            if given.get(missing) is None and given.get(known) is not None:
                given[missing] = given[known]
    for key in (
        "moe_intermediate_size",
        "moe_topk",
        "num_experts_per_tok",
        "num_shared_expert",
    ):  # Hunyuan lists layers
        if isinstance(given.get(key), list) and len(set(map(str, given[key]))) == 1:
            given[key] = given[key][0]
    given |= {rank: None for rank in ("kv_lora_rank", "q_lora_rank") if given.get(rank) == 0}  # plain projections
    # A null differs from a missing field: it can mean that a model has no window.
    given = {
        key: value
        for key, value in given.items()
        if value is not None or _field_defaults().get(key) in (None, msgspec.NODEFAULT)
    }
    return {**defaults["families"].get(own, {}), **given, "model_type": like(family)}


def _geometry(
    name: str,
    source: str,
    values: dict[str, Any],
    path: Path | None,
    weight_dtype: str | None = None,
    total_bytes: int | None = None,
) -> Geometry:
    values = _values_of_text(values, path)
    try:
        config = msgspec.convert(values, ConfigFields)
    except msgspec.ValidationError as error:
        what, field = parts_of(error)
        raise InputError(what, path=path, field=field) from error
    notes: list[str] = []
    num_layers = num_layers_of(config, path)
    take_global_heads(config, num_layers, path)
    has_experts = _has_experts(config, num_layers, path)
    experts = _experts(config, has_experts, path)
    latent = None
    if config.kv_lora_rank is not None:
        latent = Latent(
            config.kv_lora_rank, config.q_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        )
    dtype = config.dtype or config.torch_dtype or "bfloat16"
    if dtype_bits(dtype, field="dtype") == 32:
        notes.append("its weights are stored in float32; they and its KV are counted in 16 bits, as engines load them")
        dtype, total_bytes = "bfloat16", total_bytes // 2 if total_bytes is not None else None
    head_dim = _head_dim(config, path)
    state = read_state(config, dtype)
    if state is not None:
        dtype_bits(state.recurrent_dtype, field="mamba_ssm_cache_dtype")
    layers = read_layers(config, num_layers, head_dim, state.num_bytes(dtype) if state is not None else 0, path)
    facts: dict[str, Any] = {
        "has_qkv_bias": config.attention_bias and latent is None,
        "has_output_bias": config.attention_bias,
    }
    is_dense = [not has for has in has_experts]
    if config.model_type == "glm4_moe":
        facts["has_qk_norm"] = config.use_qk_norm
    if config.model_type == "gemma4_text":
        is_dense = [True] * num_layers
        facts |= {"num_norms": 7 if experts is not None else 4, "num_mlp_layers": num_layers}
    if config.model_type == "falcon_h1":
        facts["num_mlp_layers"] = num_layers
    if config.model_type == "nemotron_h":
        is_dense = [kind == "mlp" for kind in block_types(config, num_layers, path)]
        facts["num_mlp_layers"] = sum(is_dense)
    family_facts = {key: value for key, value in FAMILIES[config.model_type].items() if key != "like"}
    geometry = Geometry(
        name=name,
        source=source,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        layers=layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        intermediate_size=_dense_width(config, has_experts, path),
        ties_embeddings=config.tie_word_embeddings,
        has_mlp_bias=config.mlp_bias,
        latent=latent,
        sparse=read_sparse(config, num_layers),
        experts=experts,
        state=state,
        extra=read_extra(config, layers, head_dim),
        dtype=dtype,
        weight_dtype=dtype,
        expert_dtype=dtype,
        caches=read_caches(config, num_layers, head_dim, path),
        draft=read_draft(config, layers, head_dim, path),
        fp8_block=fp8_block_of(config.quantization_config),
        family=config.model_type,
        max_model_len=max_length_of(config),
        most_model_len=max(max_length_of(config) or 0, config.max_position_embeddings or 0) or None,
        **{**facts, **family_facts},
    )
    quantization = config.quantization_config
    if quantization is not None:
        kv_dtype, note = kv_format_of(quantization)
        notes += [note] if note is not None else []
        geometry = msgspec.structs.replace(geometry, kv_dtype=kv_dtype)
    if weight_dtype is not None:
        geometry = geometry.stored_as(weight_dtype)
    elif quantization is not None or config.expert_dtype is not None:
        formats = read_formats(quantization or {}, dtype, path)
        if config.expert_dtype is not None:
            formats.experts = _EXPERT_FORMATS.get(config.expert_dtype, config.expert_dtype)
        containers = ("", "moe") if config.model_type == "gemma4_text" else None
        geometry = stored_formats(
            geometry,
            formats,
            has_experts=has_experts,
            is_dense=is_dense,
            **({} if containers is None else {"expert_containers": containers}),
        )
    if total_bytes is not None and weight_dtype is None:
        geometry = msgspec.structs.replace(geometry, total_bytes=total_bytes)
    return msgspec.structs.replace(geometry, notes=tuple(notes))


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


def _dense_width(config: ConfigFields, has_experts: list[bool], path: Path | None) -> int:
    """Return the width of feed-forward layers that process every token."""
    family = config.model_type
    width = _width(config, path)
    if family == "llama4_text" and config.intermediate_size_mlp is not None:
        width = config.intermediate_size_mlp
    if family == "minimax_m3_vl_text" and config.dense_intermediate_size is not None:
        width = config.dense_intermediate_size
    if family == "granitemoehybrid" and not any(has_experts):
        width = config.shared_intermediate_size or width
    if family == "nemotron-nas":
        width = _searched_width(config, path)
    if family == "gemma4_text" and config.use_double_wide_mlp and config.num_kv_shared_layers:
        # The layers that read the KV of others are twice as wide; their mean has the same number of weights.
        num_layers = len(has_experts)
        shared = min(config.num_kv_shared_layers, num_layers)
        width = None if width is None else -(-width * (num_layers + shared) // num_layers)
    if family == "lfm2":
        width = config.block_ff_dim or width
        if width is not None and config.block_auto_adjust_ff_dim:
            step = config.block_multiple_of
            width = step * -(-int(config.block_ffn_dim_multiplier * int(2 * width / 3)) // step)
    if width is None and not all(has_experts):
        raise InputError("is missing", path=path, field="intermediate_size")
    return width or 0


def _searched_width(config: ConfigFields, path: Path | None) -> int:
    """Return the mean width of feed-forward layers that were chosen one by one: two thirds of a multiple, by 256."""
    total, blocks = 0, config.block_configs or []
    for block in blocks:
        own = block.get("ffn")
        if not isinstance(own, dict) or own.get("replace_with_linear"):
            raise ConfigError("has a layer that is not understood", path=path, field="block_configs")
        factor = own.get("ffn_mult")
        if own.get("no_op"):
            continue
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= 1000:
            raise InputError(f"has {brief(factor)}, which is no factor", path=path, field="block_configs.ffn.ffn_mult")
        total += -(-int(2 * factor * config.hidden_size / 3) // 256) * 256
    return -(-total // max(1, len(blocks)))


def _experts(config: ConfigFields, has_experts: list[bool], path: Path | None) -> Experts | None:
    family = config.model_type
    count = config.n_routed_experts or config.num_experts or config.num_local_experts
    if not count or not any(has_experts):
        return None
    per_token = config.top_k_experts or config.num_experts_per_tok
    if per_token is None:
        raise InputError("is missing", path=path, field="num_experts_per_tok")
    if per_token > count:
        raise InputError(f"is {per_token}, and there are {count} experts", path=path, field="num_experts_per_tok")
    size = config.moe_intermediate_size or _width(config, path)
    if size is None:
        raise InputError("is missing", path=path, field="moe_intermediate_size")
    shared = (config.n_shared_experts or 0) * size
    if family == "nemotron_h":
        shared = config.moe_shared_expert_intermediate_size * (config.n_shared_experts or 1)
    elif family == "llama4_text":
        shared = size
    elif family == "step3p5":
        shared = config.share_expert_dim
    elif family == "minimax_m3_vl_text" and config.shared_intermediate_size:
        shared = config.shared_intermediate_size
    elif family in ("exaone_moe", "ernie4_5_moe", "hunyuan_v1_moe"):
        num_shared = config.moe_num_shared_experts if config.num_shared_experts is None else config.num_shared_experts
        shared = size * ((config.num_shared_expert if family == "hunyuan_v1_moe" else num_shared) or 0)
    else:
        shared += config.shared_expert_intermediate_size + config.shared_intermediate_size
    return Experts(
        count=count,
        per_token=per_token,
        intermediate_size=size,
        shared_size=shared,
        num_layers=sum(has_experts),
        has_bias=family == "gpt_oss",
        has_shared_gate=config.shared_expert_intermediate_size > 0,
        latent_size=config.moe_latent_size or config.routed_expert_hidden_size,
    )


def _has_experts(config: ConfigFields, num_layers: int, path: Path | None) -> list[bool]:
    """Return for each layer whether it has experts. Raise InputError for lists of another length."""
    family = config.model_type
    count = config.n_routed_experts or config.num_experts or config.num_local_experts
    layers = range(num_layers)
    if not count or (family == "gemma4_text" and not config.enable_moe_block) or (family == "jamba" and count == 1):
        return [False] * num_layers
    if family == "nemotron_h":
        return [kind == "moe" for kind in block_types(config, num_layers, path)]
    if family == "jamba":
        return [layer % config.expert_layer_period == config.expert_layer_offset for layer in layers]
    if family == "lfm2_moe":
        return [layer >= config.num_dense_layers for layer in layers]
    if family == "ernie4_5_moe":
        first, last, every = config.moe_layer_start_index, config.moe_layer_end_index, config.moe_layer_interval
        last = num_layers - 1 if last in (None, -1) else last
        return [first <= layer <= last and (layer + 1) % every == 0 for layer in layers]
    if family == "llama4_text":
        every = config.interleave_moe_layer_step
        chosen = config.moe_layers
        return [(layer + 1) % every == 0 if chosen is None else layer in chosen for layer in layers]
    if family == "step3p5" and config.moe_layers_enum is not None:
        listed = config.moe_layers_enum
        numbers = [part.strip() for part in listed.split(",")] if isinstance(listed, str) else list(map(str, listed))
        return [str(layer) in numbers for layer in layers]
    if isinstance(config.moe_layer_freq, list):
        if len(config.moe_layer_freq) != num_layers:
            said = len(config.moe_layer_freq)
            raise InputError(f"names {said} layers of {num_layers}", path=path, field="moe_layer_freq")
        return [bool(has) for has in config.moe_layer_freq]
    if config.mlp_layer_types is not None and len(config.mlp_layer_types) >= num_layers:
        return [kind != "dense" for kind in config.mlp_layer_types[:num_layers]]
    every, dense = config.decoder_sparse_step, config.mlp_only_layers
    return [
        layer >= config.first_k_dense_replace and (layer + 1) % every == 0 and layer not in dense for layer in layers
    ]


_EXPERT_FORMATS = {"fp4": "mxfp4", "fp8": "fp8-block"}
"""What DeepSeek V4 calls the formats of experts."""

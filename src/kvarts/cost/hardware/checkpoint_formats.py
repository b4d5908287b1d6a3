"""Number formats of a checkpoint, from its quantization config: weights of each module, and KV.

Read as vLLM 0.32 does: `quantization_config` of config.json, else the file hf_quant_config.json that ModelOpt writes
next to it. Methods: fp8, mxfp4, ModelOpt, compressed-tensors, AWQ, GPTQ, AutoRound and bitsandbytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import translate
from typing import TYPE_CHECKING, Any

from kvarts.base.errors import ConfigError, InputError

if TYPE_CHECKING:
    from pathlib import Path

    from kvarts.cost.hardware.geometry import Geometry

__all__ = ["WeightFormats", "fp8_block_of", "kv_format_of", "read_formats", "stored_formats"]

_ALGORITHMS = {
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
    "FP8_PB_WO": "fp8-block",
    "FP8_PB_REAL": "fp8-block",
    "MXFP8": "mxfp8",
    "MXFP4": "mxfp4",
    "W4A8_MXFP4_FP8": "mxfp4",
    "NVFP4": "nvfp4",
    "NVFP4_AWQ": "nvfp4",
    "NVFP4_SVDQUANT": "nvfp4",
    "W4A8_NVFP4_FP8": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
    "INT4_AWQ": "int4-block",
    "W4A16_AWQ": "int4-block",
    "W4A8_AWQ": "int4-block",
    "W8A8_SQ_PER_CHANNEL": "int8",
    "W8A16": "int8",
}
"""ModelOpt's names of formats."""
_KV_ALGORITHMS = {"fp8": "fp8", "nvfp4": "nvfp4"}
_GROUPED = ("awq", "gptq", "auto-round", "autoround", "intel/auto-round", "auto_awq", "auto_gptq")
_IGNORED = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules", "llm_int8_skip_modules")
_ELSEWHERE = re.compile(r"(^|\.)(mtp|visual|vision\w*|audio\w*|embed_vision)\b")
"""Modules outside of the text model: layers that draft, and towers of other media."""
HINT = (
    "Known are fp8, mxfp4, modelopt, compressed-tensors, awq, gptq, auto-round and bitsandbytes; weight_dtype tells it."
)


class WeightFormats:
    """The format of each module: `usual`, except for names and patterns with another. `plain`: without quantization."""

    def __init__(self, usual: str, plain: str, *, only_experts: bool = False) -> None:
        self.usual = usual
        self.plain = plain
        self.only_experts = only_experts
        self.experts: str | None = None
        self._names: dict[str, str] = {}
        self._patterns: dict[str, list[tuple[re.Pattern[str], str]]] = {}

    def say(self, patterns: Iterable[Any], name: str) -> None:
        """Note the format of modules: names, parts of names, wildcards, and `re:` with an expression."""
        for pattern in patterns:
            if not isinstance(pattern, str) or _ELSEWHERE.search(pattern):
                continue
            layer, rest = _layer_of(pattern)
            if pattern.startswith("re:"):
                try:
                    self._patterns.setdefault("", []).append((re.compile(pattern[3:]), name))
                except re.error:
                    continue
            elif "*" in pattern:
                whole = re.compile(f"(?:{translate(rest)})|(?:{translate(rest + '.*')})")
                self._patterns.setdefault(layer, []).append((whole, name))
            else:
                self._names.setdefault(rest, name)

    def of(self, layer: int, modules: Sequence[str], *, is_expert: bool = False) -> str:
        """Return the format of a module of a layer, whose possible names are `modules`."""
        for module in modules:
            found = self._named(str(layer), module)
            if found is not None:
                return found
        if is_expert and self.experts is not None:
            return self.experts
        return self.plain if self.only_experts and not is_expert else self.usual

    def of_head(self) -> str:
        """Return the format of the output head."""
        return self._named("", "lm_head") or self.plain

    def _named(self, layer: str, module: str) -> str | None:
        parts = module.split(".") if module else []
        prefix = f"layers.{layer}" if layer else ""
        for end in range(len(parts), -1, -1):
            whole = ".".join([prefix, *parts[:end]]) if prefix else ".".join(parts[:end])
            for name in (whole, whole.replace(f"layers.{layer}.", "layers.*.", 1)):
                if name in self._names:
                    return self._names[name]
        for part in (*parts, ".".join(parts), *(".".join(parts[start:]) for start in range(1, len(parts)))):
            if part in self._names:
                return self._names[part]
        short = ".".join([prefix, *parts]) if prefix else module
        for bucket in (layer, ""):
            for pattern, name in self._patterns.get(bucket, ()):
                if pattern.match(short) or (not bucket and pattern.match(f"model.{short}")):
                    return name
        return None


def _layer_of(pattern: str) -> tuple[str, str]:
    """Return the number of the layer that a name or a wildcard is of, or none, and the name from `layers.` on."""
    found = re.search(r"(?:^|\.)layers\.(\d+)(?=\D|$)", pattern)
    if found is None:
        start = pattern.find("layers.*.")
        return "", pattern if start < 0 else pattern[start:]
    return found[1], pattern[pattern.index("layers.", found.start()) :]


def read_formats(quantization: dict[str, Any], plain: str, path: Path | None) -> WeightFormats:
    """Return the formats of weights. `plain`: that of modules that are not quantized.

    Raise ConfigError for a method that is not understood.
    """
    inner = quantization.get("quantization")
    inner = {**quantization, **inner} if isinstance(inner, dict) else quantization
    method = inner.get("quant_method")
    algorithm = inner.get("quant_algo")
    ignored = [pattern for key in _IGNORED if isinstance(inner.get(key), list) for pattern in inner[key]]
    if method in ("fp8", "fbgemm_fp8", "deepseek_v4_fp8"):
        formats = WeightFormats("fp8-block" if inner.get("weight_block_size") else "fp8", plain)
        if isinstance(inner.get("quantized_layers"), dict):
            ignored = []  # these are not in ModelOpt's format, and so in fp8
    elif method == "mxfp4":
        formats = WeightFormats("mxfp4", plain, only_experts=True)
    elif method in _GROUPED:
        formats = WeightFormats(_grouped_format(inner, path), plain)
    elif method == "bitsandbytes":
        formats = WeightFormats("int8" if inner.get("load_in_8bit") else "int4-g64", plain)
    elif method == "compressed-tensors":
        formats = _of_groups(inner, plain, path)
    elif (isinstance(method, str) and method.startswith("modelopt")) or (method is None and algorithm is not None):
        formats = WeightFormats(plain if algorithm in (None, "MIXED_PRECISION") else _algorithm(algorithm, path), plain)
    elif method is None and not inner.get("config_groups"):
        formats = WeightFormats(plain, plain)
    else:
        raise ConfigError(
            f"{method!r} is not understood", path=path, field="quantization_config.quant_method", hint=HINT
        )
    layers = inner.get("quantized_layers")
    if isinstance(layers, dict):
        for name, own in layers.items():
            formats.say([name], _algorithm(own.get("quant_algo") if isinstance(own, dict) else own, path))
    formats.say(ignored, plain)
    return formats


def _algorithm(name: Any, path: Path | None) -> str:
    found = _ALGORITHMS.get(str(name).upper())
    if found is None:
        raise ConfigError(f"{name!r} is not understood", path=path, field="quantization_config.quant_algo", hint=HINT)
    return found


def _grouped_format(values: dict[str, Any], path: Path | None) -> str:
    bits, group = values.get("bits", values.get("w_bit", 4)), values.get("group_size", values.get("q_group_size", 128))
    if bits not in range(2, 9) or not isinstance(group, int) or isinstance(group, bool):
        raise ConfigError(
            f"{bits!r} bits in groups of {group!r} are not understood", path=path, field="quantization_config.bits"
        )
    if group <= 0:
        return f"int{bits}-g65536"  # a scale per column
    return "int4-block" if (bits, group) == (4, 128) else f"int{bits}-g{group}"


def _of_groups(values: dict[str, Any], plain: str, path: Path | None) -> WeightFormats:
    """Return the formats of compressed-tensors: each group has a scheme, and the modules that have it."""
    field = "quantization_config.config_groups"
    groups = values.get("config_groups")
    if not isinstance(groups, dict):
        raise InputError("is missing", path=path, field=field)
    formats = WeightFormats(plain, plain)
    for key, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            continue
        name = _scheme(weights)
        if name is None:
            raise ConfigError("has weights that are not understood", path=path, field=f"{field}.{key}", hint=HINT)
        targets = group.get("targets") or ["Linear"]
        if any(isinstance(target, str) and target[:1].isupper() for target in targets):
            formats.usual = name
        formats.say([target for target in targets if isinstance(target, str) and not target[:1].isupper()], name)
    return formats


def _scheme(weights: dict[str, Any]) -> str | None:
    bits, group, kind = weights.get("num_bits"), weights.get("group_size"), weights.get("type")
    if kind == "float" and bits == 8:
        return "fp8-block" if weights.get("strategy") == "block" else "mxfp8" if group == 32 else "fp8"
    if kind == "float" and bits == 4:
        return "nvfp4" if group == 16 else "mxfp4"
    if kind in ("int", None) and isinstance(bits, int) and 2 <= bits <= 8:
        if isinstance(group, int) and group > 0:
            return "int4-block" if (bits, group) == (4, 128) else f"int{bits}-g{group}"
        return "int8" if bits == 8 else f"int{bits}-g65536"
    return None


def fp8_block_of(quantization: dict[str, Any] | None) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale; None where weights are not in such blocks."""
    sizes = (quantization or {}).get("weight_block_size")
    if isinstance(sizes, list) and len(sizes) == 2 and all(isinstance(size, int) and size > 0 for size in sizes):
        return sizes[0], sizes[1]
    return None


def kv_format_of(quantization: dict[str, Any]) -> tuple[str | None, str | None]:
    """Return the format of KV that a checkpoint names, or None, and a note if vLLM would ignore it."""
    inner = quantization.get("quantization")
    inner = inner if isinstance(inner, dict) else {}
    method = quantization.get("quant_method", "")
    if method == "compressed-tensors":
        return ("fp8" if quantization.get("kv_cache_scheme") else None), None
    if method and not str(method).startswith("modelopt"):
        return None, None
    said = None
    for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
        said = said or inner.get(key) or quantization.get(key)
    if isinstance(said, dict):
        bits, kind = said.get("num_bits"), said.get("type")
        if kind == "float" and bits == 8 and said.get("dynamic") is False:
            return "fp8", None
        return ("nvfp4", None) if kind == "float" and bits == 4 else (None, f"KV format {said} is not known: 16 bits")
    if said is None:
        return None, None
    found = _KV_ALGORITHMS.get(str(said).lower())
    return found, None if found else f"KV format {said} is not known: 16 bits"


# Names of modules in published checkpoints, for each part of a layer.
_ATTENTION = ("self_attn", "attn", "mixer", "attention")
_LINEAR = ("linear_attn", "mixer", "mamba", "self_attn", "attn")
_MLP = ("mlp", "ffn", "block_sparse_moe", "mixer", "feed_forward")
_DENSE = ("down_proj", "gate_proj", "up_proj", "w1", "w2")
_EXPERTS = ("experts", "experts.0.down_proj", "experts.0.gate_proj", "experts.0.up_proj", "experts.0.w1")


def _names(containers: Sequence[str], *leaves: str) -> list[str]:
    return [f"{container}.{leaf}" for container in containers for leaf in leaves]


def stored_formats(
    geometry: Geometry,
    formats: WeightFormats,
    *,
    has_experts: Sequence[bool],
    is_dense: Sequence[bool],
    expert_containers: Sequence[str] = _MLP,
) -> Geometry:
    """Return the model with its matrices counted in the formats of their modules, layer by layer.

    Routers stay in the model's 16 bits. `expert_containers`: names of the module that holds experts.
    """
    import msgspec

    common: dict[str, int] = {}
    of_experts: dict[str, int] = {}
    containers = [f"{name}." if name else "" for name in expert_containers]
    experts, state = geometry.experts, geometry.state
    for index, layer in enumerate(geometry.layers):
        for names, numbers in _attention_modules(geometry) if layer.attends else ():
            _add(common, formats.of(index, names), numbers)
        if layer.kind == "state" and state is not None:
            leaves = ("in_proj", "in_proj_qkv", "in_proj_qkvz", "q_proj", "out_proj")
            _add(common, formats.of(index, _names(_LINEAR, *leaves)), state.matrix)
        if has_experts[index] and experts is not None:
            names = [f"{prefix}{leaf}" for prefix in containers for leaf in _EXPERTS]
            _add(of_experts, formats.of(index, names, is_expert=True), experts.count * geometry.expert_matrix)
            names = _names(_MLP, *(f"{kind}.{leaf}" for kind in ("shared_experts", "shared_expert") for leaf in _DENSE))
            shared = geometry.mlp_matrices * geometry.hidden_size * experts.shared_size
            _add(common, formats.of(index, names), shared)
            _add(common, formats.plain, geometry.hidden_size * experts.count)
            latent = 2 * geometry.hidden_size * (experts.latent_size or 0)
            _add(common, formats.of(index, _names(_MLP, "fc1_latent_proj", "fc2_latent_proj")), latent)
        if is_dense[index]:
            _add(common, formats.of(index, _names(_MLP, *_DENSE)), geometry.dense_matrix)
    _add(common, formats.of(len(geometry.layers) - 1, _names(_ATTENTION, "indexer.wq_b")), geometry.extra.matrix)
    left = geometry.common_matrix - sum(common.values())
    _add(common, formats.usual if not formats.only_experts else formats.plain, left)
    head = formats.of_head()
    stored = [("head", head, geometry.head_matrix)] if head != formats.plain and not geometry.ties_embeddings else []
    usual, expert_usual = _most(common, formats.plain), _most(of_experts, formats.usual)
    stored += [("common", name, count) for name, count in common.items() if name != usual]
    stored += [("experts", name, count) for name, count in of_experts.items() if name != expert_usual]
    return msgspec.structs.replace(geometry, weight_dtype=usual, expert_dtype=expert_usual, stored=tuple(stored))


def _add(counts: dict[str, int], name: str, numbers: int) -> None:
    if numbers:
        counts[name] = counts.get(name, 0) + numbers


def _most(counts: dict[str, int], default: str) -> str:
    return max(counts, key=lambda name: counts[name]) if counts else default


def _attention_modules(geometry: Geometry) -> list[tuple[list[str], int]]:
    hidden, latent = geometry.hidden_size, geometry.latent
    if latent is None:
        query = hidden * geometry.head_dim * geometry.num_heads
        kept = hidden * geometry.head_dim * geometry.num_kv_heads
        return [
            (_names(_ATTENTION, "q_proj", "qkv_proj"), query * (2 if geometry.gates_attention else 1)),
            (_names(_ATTENTION, "k_proj", "qkv_proj"), kept),
            (_names(_ATTENTION, "v_proj", "qkv_proj"), kept),
            (_names(_ATTENTION, "o_proj"), query),
        ]
    q_dim = geometry.num_heads * (latent.nope_dim + latent.rope_dim)
    rank = latent.q_rank
    return [
        (_names(_ATTENTION, "q_a_proj", "q_proj"), hidden * (rank or q_dim)),
        (_names(_ATTENTION, "q_b_proj"), (rank or 0) * q_dim),
        (_names(_ATTENTION, "kv_a_proj_with_mqa"), hidden * (latent.kv_rank + latent.rope_dim)),
        (_names(_ATTENTION, "kv_b_proj"), latent.kv_rank * geometry.num_heads * (latent.nope_dim + latent.v_dim)),
        (_names(_ATTENTION, "o_proj"), geometry.num_heads * latent.v_dim * hidden),
    ]

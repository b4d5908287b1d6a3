"""Model geometry: the fields of a Hugging Face config.json that decide how much memory and work a token takes.

Counts follow the modules of transformers: the text model of a checkpoint, without a vision tower and without layers
that predict further tokens.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvarts.errors import ConfigError, InputError, MissingFileError, parts_of
from kvarts.files import read_bytes, reading
from kvarts.hardware.dtypes import dtype_bits
from kvarts.limits import MOST_COUNT, MOST_LAYERS

__all__ = ["Experts", "Geometry", "Latent", "load_geometry", "preset_names"]

Count = Annotated[int, msgspec.Meta(ge=1, le=MOST_COUNT)]
Some = Annotated[int, msgspec.Meta(ge=0, le=MOST_COUNT)]


class Latent(msgspec.Struct, frozen=True):
    """Multi-head latent attention (DeepSeek-V2): a layer keeps `kv_rank + rope_dim` numbers a token for all heads."""

    kv_rank: int
    q_rank: int | None
    nope_dim: int
    rope_dim: int
    v_dim: int


class Experts(msgspec.Struct, frozen=True):
    """Mixture-of-experts layers: `count` experts of width `intermediate_size`, `per_token` of which process a token.

    `shared_size`: width of the shared experts, which process every token. `num_layers`: layers of this kind.
    """

    count: int
    per_token: int
    intermediate_size: int
    shared_size: int
    num_layers: int
    has_bias: bool = False


class Geometry(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One decoder model. Sizes are in numbers, not bytes, unless the name says so.

    `windows`: for each layer, how many of the last tokens it attends to; None for all. `num_norms`: norms of the width
    of the model in each layer. `weight_dtype`: format of all matrices but those of experts, which have `expert_dtype`;
    embeddings, norms and biases are kept in `dtype`.
    """

    name: str
    source: str
    hidden_size: int
    vocab_size: int
    windows: tuple[int | None, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    ties_embeddings: bool
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    has_sinks: bool = False
    num_norms: int = 2
    latent: Latent | None = None
    experts: Experts | None = None
    dtype: str = "bfloat16"
    weight_dtype: str = "bfloat16"
    expert_dtype: str = "bfloat16"

    @property
    def num_layers(self) -> int:
        """The number of decoder layers."""
        return len(self.windows)

    @cached_property
    def layers_by_window(self) -> dict[int | None, int]:
        """The number of layers with each window; None is the key of layers that attend to all tokens."""
        counts: dict[int | None, int] = {}
        for window in self.windows:
            counts[window] = counts.get(window, 0) + 1
        return counts

    # Parameters -------------------------------------------------------------------------------------------

    @cached_property
    def attention_matrix(self) -> int:
        """Numbers in the matrices of one attention layer."""
        hidden, latent = self.hidden_size, self.latent
        if latent is None:
            return hidden * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        q_dim = self.num_heads * (latent.nope_dim + latent.rope_dim)
        query = hidden * q_dim if latent.q_rank is None else latent.q_rank * (hidden + q_dim)
        keys = hidden * (latent.kv_rank + latent.rope_dim)
        values = latent.kv_rank * self.num_heads * (latent.nope_dim + latent.v_dim)
        return query + keys + values + self.num_heads * latent.v_dim * hidden

    @cached_property
    def dense_matrix(self) -> int:
        """Numbers in the matrices of one feed-forward layer that every token passes: gate, up and down."""
        return 3 * self.hidden_size * self.intermediate_size

    @cached_property
    def expert_matrix(self) -> int:
        """Numbers in the matrices of one expert."""
        return 0 if self.experts is None else 3 * self.hidden_size * self.experts.intermediate_size

    @cached_property
    def num_dense_layers(self) -> int:
        """Layers without experts."""
        return self.num_layers - (0 if self.experts is None else self.experts.num_layers)

    @cached_property
    def common_matrix(self) -> int:
        """Numbers in matrices that every token is multiplied with, without the output head and the experts."""
        numbers = self.num_layers * self.attention_matrix + self.num_dense_layers * self.dense_matrix
        if self.experts is not None:
            shared = 3 * self.hidden_size * self.experts.shared_size
            numbers += self.experts.num_layers * (shared + self.hidden_size * self.experts.count)
        return numbers

    @cached_property
    def head_matrix(self) -> int:
        """Numbers in the output head, which is the embedding if the two are tied."""
        return self.vocab_size * self.hidden_size

    @cached_property
    def num_small(self) -> int:
        """Numbers in norms, biases and sinks."""
        hidden, latent, experts = self.hidden_size, self.latent, self.experts
        layer = self.num_norms * hidden
        if latent is not None:
            layer += latent.kv_rank + (latent.q_rank or 0)
        if self.has_qkv_bias:
            layer += self.head_dim * (self.num_heads + 2 * self.num_kv_heads)
        layer += hidden * self.has_output_bias + 2 * self.head_dim * self.has_qk_norm + self.num_heads * self.has_sinks
        numbers = self.num_layers * layer + hidden
        if self.has_mlp_bias:
            numbers += self.num_dense_layers * (2 * self.intermediate_size + hidden)
        if experts is not None and experts.has_bias:
            numbers += experts.num_layers * experts.count * (2 * experts.intermediate_size + hidden + 1)
        return numbers

    @cached_property
    def num_parameters(self) -> int:
        """The number of weights of the text model."""
        embeddings = self.head_matrix * (1 if self.ties_embeddings else 2)
        experts = 0 if self.experts is None else self.experts.num_layers * self.experts.count * self.expert_matrix
        return embeddings + self.common_matrix + experts + self.num_small

    @cached_property
    def num_active_parameters(self) -> int:
        """The number of weights that one token is computed with: all but those of experts that do not process it."""
        if self.experts is None:
            return self.num_parameters
        unseen = self.experts.count - self.experts.per_token
        return self.num_parameters - self.experts.num_layers * unseen * self.expert_matrix

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of all weights, rounded up to whole bytes."""
        embeddings = self.head_matrix * (1 if self.ties_embeddings else 2)
        experts = 0 if self.experts is None else self.experts.num_layers * self.experts.count * self.expert_matrix
        bits = (embeddings + self.num_small) * dtype_bits(self.dtype, field="dtype")
        bits += self.common_matrix * dtype_bits(self.weight_dtype, field="weight_dtype")
        bits += experts * dtype_bits(self.expert_dtype, field="expert_dtype")
        return _whole_bytes(bits)

    @cached_property
    def expert_bytes(self) -> int:
        """Bytes of the weights of experts among them, rounded up to whole bytes."""
        experts = 0 if self.experts is None else self.experts.num_layers * self.experts.count * self.expert_matrix
        return _whole_bytes(experts * dtype_bits(self.expert_dtype, field="expert_dtype"))

    def stored_as(self, weight_dtype: str | None) -> Geometry:
        """Return the same model with all its matrices in `weight_dtype`; None leaves it as it is."""
        if weight_dtype is None:
            return self
        dtype_bits(weight_dtype, field="weight_dtype")
        return msgspec.structs.replace(self, weight_dtype=weight_dtype, expert_dtype=weight_dtype)

    # KV ---------------------------------------------------------------------------------------------------

    @cached_property
    def kv_numbers(self) -> int:
        """Numbers that one layer keeps for a token: keys and values of all KV heads, or the latent vector."""
        if self.latent is not None:
            return self.latent.kv_rank + self.latent.rope_dim
        return 2 * self.num_kv_heads * self.head_dim

    def kv_bytes_per_token(self, kv_dtype: str | None = None) -> int:
        """Return the bytes of KV a token takes if every layer keeps every token. `kv_dtype`: default as the model."""
        bits = dtype_bits(kv_dtype or self.dtype, field="kv_dtype")
        return _whole_bytes(self.num_layers * self.kv_numbers * bits)

    def kv_bytes(self, num_tokens: int, kv_dtype: str | None = None) -> int:
        """Return the bytes of KV that a sequence of `num_tokens` needs; a layer with a window keeps its window only."""
        bits = dtype_bits(kv_dtype or self.dtype, field="kv_dtype")
        kept = sum(
            count * (num_tokens if window is None else min(num_tokens, window))
            for window, count in self.layers_by_window.items()
        )
        return _whole_bytes(kept * self.kv_numbers * bits)


def _whole_bytes(bits: Fraction) -> int:
    return -(-bits.numerator // (8 * bits.denominator))


# Reading --------------------------------------------------------------------------------------------------


class _Config(msgspec.Struct):
    """The fields that are read from a config.json. All others are ignored."""

    model_type: str
    hidden_size: Count
    num_hidden_layers: Annotated[int, msgspec.Meta(ge=1, le=MOST_LAYERS)]
    num_attention_heads: Count
    vocab_size: Count
    intermediate_size: Count | None = None
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool = False
    sliding_window: Count | None = None
    use_sliding_window: bool | None = None
    sliding_window_pattern: Count | None = None
    layer_types: list[str] | None = None
    num_local_experts: Some | None = None
    num_experts: Some | None = None
    n_routed_experts: Some | None = None
    n_shared_experts: Some | None = 0
    num_experts_per_tok: Count | None = None
    moe_intermediate_size: Count | None = None
    first_k_dense_replace: Some = 0
    kv_lora_rank: Count | None = None
    q_lora_rank: Count | None = None
    qk_nope_head_dim: Some = 0
    qk_rope_head_dim: Some = 0
    v_head_dim: Some = 0
    torch_dtype: str | None = None
    dtype: str | None = None
    quantization_config: dict[str, Any] | None = None


# Decoders with weights and attention that differ in nothing but the fields read above, and in what follows.
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "mixtral": {},
    "qwen2": {"has_qkv_bias": True},
    "qwen3": {"has_qk_norm": True},
    "qwen3_moe": {"has_qk_norm": True},
    "gemma2": {"num_norms": 4},
    "gemma3_text": {"num_norms": 4, "has_qk_norm": True},
    "gpt_oss": {"has_sinks": True},
    "deepseek_v3": {},
    "deepseek_v2": {},
}
_TIED_BY_DEFAULT = {"gemma2", "gemma3_text"}
_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2}


def preset_names() -> list[str]:
    """Return the names of the model presets."""
    return list(_presets())


def load_geometry(model: str | Path) -> Geometry:
    """Return the geometry of a preset by its name, or of a config.json, or of the directory that holds one.

    Raise MissingFileError if there is neither, InputError for a file that is no config, and ConfigError for a model
    type that is not supported.
    """
    presets = _presets()
    name = str(model)
    if name.lower() in presets:
        preset = presets[name.lower()]
        return _geometry(name.lower(), preset["source"], preset, None)
    path = Path(model)
    with reading(path):
        if path.is_dir():
            path /= "config.json"
        is_there = path.exists()
    if not is_there:
        raise MissingFileError(
            "is neither a model known by name nor a config.json",
            path=name,
            hint=f"Known by name are {', '.join(presets)}.",
        )
    try:
        values = msgspec.json.decode(read_bytes(path))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"is no readable JSON: {error}", path=path) from error
    except RecursionError:
        raise InputError("is no readable JSON: it is nested too deeply", path=path) from None
    if not isinstance(values, dict):
        raise InputError("holds no object", path=path)
    return _geometry(path.parent.name or path.stem, str(path), values, path)


def _presets() -> dict[str, dict[str, Any]]:
    from importlib.resources import files  # most runs name no preset

    text = files("kvarts.hardware").joinpath("presets/models.json").read_bytes()
    presets: dict[str, dict[str, Any]] = msgspec.json.decode(text)
    return presets


def _geometry(name: str, source: str, values: dict[str, Any], path: Path | None) -> Geometry:
    text = values.get("text_config")
    if isinstance(text, dict):  # a multimodal model: its text model has a config of its own
        outer: dict[str, Any] = {
            key: values[key] for key in ("torch_dtype", "dtype", "quantization_config") if key in values
        }
        values = {**outer, **text}
    family = values.get("model_type")
    if family not in _FAMILIES:
        raise ConfigError(
            f"{family!r} is not understood",
            path=path,
            field="model_type",
            hint=f"Known are decoders of the types {', '.join(_FAMILIES)}.",
        )
    try:
        config = msgspec.convert(values, _Config)
    except msgspec.ValidationError as error:
        what, field = parts_of(error)
        raise InputError(what, path=path, field=field) from error
    experts = _experts(config, path)
    latent = None
    if config.kv_lora_rank is not None:
        latent = Latent(
            config.kv_lora_rank, config.q_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        )
    if config.intermediate_size is None and (experts is None or experts.num_layers < config.num_hidden_layers):
        raise InputError("is missing", path=path, field="intermediate_size")
    head_dim = config.head_dim
    if head_dim is None:
        head_dim = config.hidden_size // config.num_attention_heads
        if not head_dim:
            raise InputError(
                f"is {config.hidden_size}, less than a number for each of {config.num_attention_heads} heads",
                path=path,
                field="hidden_size",
            )
    dtype = config.dtype or config.torch_dtype or "bfloat16"
    weight_dtype, expert_dtype = _stored_as(config, dtype, path)
    has_bias = bool(config.attention_bias)
    facts: dict[str, Any] = {"has_qkv_bias": has_bias and latent is None, "has_output_bias": has_bias}
    geometry = Geometry(
        name=name,
        source=source,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        windows=_windows(config, path),
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        intermediate_size=config.intermediate_size or 0,
        ties_embeddings=(
            config.model_type in _TIED_BY_DEFAULT if config.tie_word_embeddings is None else config.tie_word_embeddings
        ),
        has_mlp_bias=config.mlp_bias,
        latent=latent,
        experts=experts,
        dtype=dtype,
        weight_dtype=weight_dtype,
        expert_dtype=expert_dtype,
        **{**facts, **_FAMILIES[config.model_type]},
    )
    for field in ("dtype", "weight_dtype", "expert_dtype"):
        dtype_bits(getattr(geometry, field), field=field)
    return geometry


def _windows(config: _Config, path: Path | None) -> tuple[int | None, ...]:
    count, window = config.num_hidden_layers, config.sliding_window
    if config.use_sliding_window is False:
        window = None
    if config.layer_types is not None:
        if len(config.layer_types) != count:
            raise InputError(f"names {len(config.layer_types)} layers of {count}", path=path, field="layer_types")
        known = {"full_attention", "sliding_attention"}
        if strange := sorted(set(config.layer_types) - known):
            raise ConfigError(f"{strange[0]!r} is not understood", path=path, field="layer_types")
        return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)
    if window is None:
        return (None,) * count
    pattern = config.sliding_window_pattern or _PATTERNS.get(config.model_type)
    if pattern is None:
        return (window,) * count
    # Every `pattern`-th layer attends to everything.
    return tuple(None if (layer + 1) % pattern == 0 else window for layer in range(count))


def _experts(config: _Config, path: Path | None) -> Experts | None:
    count = config.n_routed_experts or config.num_experts or config.num_local_experts
    if not count:
        return None
    if config.num_experts_per_tok is None:
        raise InputError("is missing", path=path, field="num_experts_per_tok")
    size = config.moe_intermediate_size or config.intermediate_size
    if size is None:
        raise InputError("is missing", path=path, field="moe_intermediate_size")
    return Experts(
        count=count,
        per_token=config.num_experts_per_tok,
        intermediate_size=size,
        shared_size=(config.n_shared_experts or 0) * size,
        num_layers=max(0, config.num_hidden_layers - config.first_k_dense_replace),
        has_bias=config.model_type == "gpt_oss",
    )


def _stored_as(config: _Config, dtype: str, path: Path | None) -> tuple[str, str]:
    """Return the formats of matrices, and of those of experts."""
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

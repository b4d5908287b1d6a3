"""The standard decoder, the shape of Llama and Qwen, in PyTorch alone: importing transformers takes two seconds.

Modules have the names of transformers' models, and each operation is theirs in their order, so results have the same
bits. GGUF files of this shape are read into it; tests compare it with transformers' models.

Here are also the parts of any decoder of this shape: embedding, layers, norm, head. A layer: norm; queries, keys and
values; optionally a norm per head; rotation; attention; output matrix; norm; gate and up matrices; activation; down
matrix. A model with these parts only looks like that shape: layer_check runs it to verify.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from msgspec.structs import replace
from torch.nn.functional import scaled_dot_product_attention, silu

from kvarts.run.torch.attention import is_attending, paged_attention
from kvarts.run.torch.pools import LayerShape

__all__ = [
    "ATTENTION",
    "MLP",
    "Decoder",
    "DecoderConfig",
    "DecoderParts",
    "LayerParts",
    "Norm",
    "UnlikeError",
    "apply_rotary_pos_emb",
    "find_parts",
]


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The config of a Decoder, with transformers' names.

    `rope_parameters`: `rope_type` is `default` or `linear`. `attention_bias`: on all of the four matrices of attention;
    `qkv_bias`: on the first three. `has_head_norms`: queries and keys are normed per head.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope_parameters: dict[str, Any]
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    attention_bias: bool = False
    qkv_bias: bool = False
    mlp_bias: bool = False
    has_head_norms: bool = False

    def get_text_config(self, **_: Any) -> DecoderConfig:
        """Return the config itself, as for any model of text alone."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the fields."""
        return {name: getattr(self, name) for name in self.__struct_fields__}


class Decoder(torch.nn.Module):  # type: ignore[misc]  # PyTorch's types are not checked, see pyproject.toml
    """A standard decoder with its output head, without weights until `load_state_dict(..., assign=True)`.

    Attends as `attending` says, or else over each row of the batch.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.generation_config = SimpleNamespace(eos_token_id=config.eos_token_id)
        self.model = _Layers(config)
        self.lm_head = _linear(config.hidden_size, config.vocab_size)

    def tie_weights(self) -> None:
        """Let the head share the embedding's weight if the config says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        *,
        logits_to_keep: int | torch.Tensor = 0,
        use_cache: bool = False,
        **_: Any,
    ) -> Any:
        """Return an object with `logits` [rows, tokens, vocabulary], as transformers' models do. There is no cache."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        hidden = self.model(input_ids, position_ids)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return SimpleNamespace(logits=self.lm_head(hidden[:, kept, :]))

    def shortened(self, num_layers: int) -> Decoder:
        """Return a decoder of the first layers, which shares its modules with this one."""
        short = Decoder(replace(self.config, num_hidden_layers=num_layers))
        short.lm_head, whole = self.lm_head, self.model
        short.model.embed_tokens, short.model.norm, short.model.rotary_emb = (
            whole.embed_tokens, whole.norm, whole.rotary_emb
        )  # fmt: skip
        short.model.layers = torch.nn.ModuleList(whole.layers[:num_layers])
        return short

    @property
    def dtype(self) -> torch.dtype:
        """The number format of the weights."""
        return self.model.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.model.norm.weight.device

    @property
    def layer_shapes(self) -> tuple[LayerShape, ...]:
        """The KV of each layer."""
        one = self.config
        return tuple(
            LayerShape(one.num_attention_heads, one.num_key_value_heads, one.head_dim, owner=number)
            for number in range(one.num_hidden_layers)
        )

    def get_decoder(self) -> Any:
        """Return the model without its head."""
        return self.model

    def get_input_embeddings(self) -> Any:
        """Return the embedding of tokens."""
        return self.model.embed_tokens

    def get_output_embeddings(self) -> Any:
        """Return the head."""
        return self.lm_head


class _Layers(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(1, 1)
        self.embed_tokens.weight = torch.nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.embed_tokens.num_embeddings, self.embed_tokens.embedding_dim = self.embed_tokens.weight.shape
        self.layers = torch.nn.ModuleList([_Layer(config) for _ in range(config.num_hidden_layers)])
        self.norm = _Norm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = _Rotary(config)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(input_ids)
        rotation = self.rotary_emb(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(hidden, rotation)
        return self.norm(hidden)


class _Layer(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _MLP(config)
        self.input_layernorm = _Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = _Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class _Attention(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        has_bias = config.attention_bias or config.qkv_bias
        self.q_proj = _linear(config.hidden_size, size, has_bias=has_bias)
        self.k_proj = _linear(config.hidden_size, kv_size, has_bias=has_bias)
        self.v_proj = _linear(config.hidden_size, kv_size, has_bias=has_bias)
        self.o_proj = _linear(size, config.hidden_size, has_bias=config.attention_bias)
        if config.has_head_norms:
            self.q_norm = _Norm(config.head_dim, config.rms_norm_eps)
            self.k_norm = _Norm(config.head_dim, config.rms_norm_eps)
        self._has_head_norms = config.has_head_norms

    def forward(self, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        queries, keys, values = (one(hidden).view(shape) for one in (self.q_proj, self.k_proj, self.v_proj))
        if self._has_head_norms:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys, values = (states.transpose(1, 2) for states in (queries, keys, values))
        queries, keys = apply_rotary_pos_emb(queries, keys, *rotation)
        scaling = self.head_dim**-0.5
        if is_attending():
            read, _ = paged_attention(self, queries, keys, values, scaling=scaling)
        else:
            each = queries.shape[1] // keys.shape[1]
            keys, values = (states.repeat_interleave(each, dim=1) for states in (keys, values))
            read = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scaling).transpose(1, 2)
        return self.o_proj(read.reshape(*hidden.shape[:-1], -1))


class _MLP(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        sizes = config.hidden_size, config.intermediate_size
        self.gate_proj = _linear(*sizes, has_bias=config.mlp_bias)
        self.up_proj = _linear(*sizes, has_bias=config.mlp_bias)
        self.down_proj = _linear(*reversed(sizes), has_bias=config.mlp_bias)
        self.act_fn = torch.nn.SiLU()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(silu(self.gate_proj(hidden)) * self.up_proj(hidden))


def _linear(inputs: int, outputs: int, *, has_bias: bool = False) -> torch.nn.Linear:
    """Return a linear layer with weights of no value: PyTorch would draw random ones."""
    made = torch.nn.Linear(1, 1, bias=has_bias)
    made.in_features, made.out_features = inputs, outputs
    made.weight = torch.nn.Parameter(torch.empty(outputs, inputs))
    if has_bias:
        made.bias = torch.nn.Parameter(torch.empty(outputs))
    return made


class _Norm(torch.nn.Module):  # type: ignore[misc]
    """A root-mean-square norm, computed in float32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(size))
        self.variance_epsilon = epsilon

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden.dtype)


class _Rotary(torch.nn.Module):  # type: ignore[misc]
    """Cosines and sines of positions. `inv_freq` may be replaced, and stays in float32."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        rope, size = config.rope_parameters, config.head_dim
        inv_freq = 1.0 / (rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size))
        self.register_buffer("inv_freq", inv_freq / rope.get("factor", 1.0), persistent=False)

    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)


def apply_rotary_pos_emb(
    queries: torch.Tensor, keys: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys [rows, heads, tokens, head_dim], rotated. `cosines` and `sines` [rows, tokens, head_dim].

    TorchRotation finds this function by the name that it has in transformers' models.
    """
    cosines, sines = cosines[:, None], sines[:, None]
    return queries * cosines + _turned(queries) * sines, keys * cosines + _turned(keys) * sines


def _turned(states: torch.Tensor) -> torch.Tensor:
    first, second = states.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
NORMS_OF_HEADS = ("q_norm", "k_norm")
LAYER = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
DECODER = ("embed_tokens", "layers", "norm", "rotary_emb")
EPSILONS = ("variance_epsilon", "eps")


class UnlikeError(Exception):
    """The model does not have the standard shape; the message names the difference."""


class Norm(msgspec.Struct, frozen=True):
    """A root-mean-square norm."""

    weight: torch.Tensor
    epsilon: float


class LayerParts(msgspec.Struct, frozen=True):
    """A layer. `matrices`: query, key, value, attention output; gate, up, down.

    `norm_query` and `norm_key`: the norms per head, or None.
    """

    module: Any
    attention: Any
    mlp: Any
    norm: Norm
    norm_again: Norm
    norm_query: Norm | None
    norm_key: Norm | None
    matrices: tuple[Any, ...]
    shape: LayerShape

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of each matrix."""
        return tuple((matrix.in_features, matrix.out_features) for matrix in self.matrices)


class DecoderParts(msgspec.Struct, frozen=True):
    """A decoder with its output head."""

    embedding: Any
    rotary: Any
    layers: tuple[LayerParts, ...]
    norm: Norm
    head: Any

    @property
    def matrices(self) -> list[Any]:
        """All matrices, the output head last."""
        return [matrix for layer in self.layers for matrix in layer.matrices] + [self.head]


def find_parts(model: Any, shapes: tuple[LayerShape, ...]) -> DecoderParts:
    """Return the parts of a model with layers of `shapes`. Raise UnlikeError if it has another structure."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    _expect_children(model, {name for name, child in model.named_children() if child in (decoder, head)}, "the model")
    if head is None or decoder is model:
        raise UnlikeError("it has no matrix for logits")
    _expect_children(decoder, set(DECODER), "the decoder")
    if len(decoder.layers) != len(shapes):
        raise UnlikeError(f"{len(decoder.layers)} layers attend {len(shapes)} times")
    for number, shape in enumerate(shapes):
        if shape.owner != number:
            raise UnlikeError("layers share keys and values")
    for module in (decoder.norm, *decoder.layers):
        _expect_untouched(module)
    layers = tuple(_layer(layer, shape) for layer, shape in zip(decoder.layers, shapes, strict=True))
    if len({(one.sizes, one.shape.num_kv_heads, one.shape.head_dim) for one in layers}) != 1:
        raise UnlikeError("its layers have several shapes")
    return DecoderParts(decoder.embed_tokens, decoder.rotary_emb, layers, _norm(decoder.norm), head)


def _layer(layer: Any, shape: LayerShape) -> LayerParts:
    _expect_children(layer, set(LAYER), "a layer")
    attention, mlp = layer.self_attn, layer.mlp
    norms = {name for name in NORMS_OF_HEADS if isinstance(getattr(attention, name, None), torch.nn.Module)}
    _expect_children(attention, {*ATTENTION, *norms}, "attention")
    _expect_children(mlp, {*MLP, "act_fn"}, "the MLP")
    matrices = tuple(getattr(attention, name) for name in ATTENTION) + tuple(getattr(mlp, name) for name in MLP)
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes = [(matrix.in_features, matrix.out_features) for matrix in matrices]
    size, inner = sizes[0][0], sizes[4][1]
    if sizes != [(size, heads), (size, kv_heads), (size, kv_heads), (heads, size), *[(size, inner)] * 2, (inner, size)]:
        raise UnlikeError("the matrices of a layer have other shapes")
    if shape.head_dim % 2:
        raise UnlikeError("heads have an odd number of dimensions")
    own = [_norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)]
    of_heads = [_norm(getattr(attention, name)) if name in norms else None for name in NORMS_OF_HEADS]
    for norm, count in ((own[0], size), (own[1], size), (of_heads[0], shape.head_dim), (of_heads[1], shape.head_dim)):
        if norm is not None and norm.weight.shape != (count,):
            raise UnlikeError("a norm is of other numbers")
    known = sum(len(list(module.parameters(recurse=False))) for module in layer.modules() if module in matrices)
    if len(list(layer.parameters())) != known + sum(norm is not None for norm in (*own, *of_heads)):
        raise UnlikeError("a layer has parameters that are not known")
    return LayerParts(layer, attention, mlp, own[0], own[1], of_heads[0], of_heads[1], matrices, shape)


def _norm(module: Any) -> Norm:
    epsilon = next((getattr(module, name) for name in EPSILONS if hasattr(module, name)), None)
    names = [name for name, _ in module.named_parameters()]
    if names != ["weight"] or not isinstance(epsilon, float) or list(module.buffers()) or list(module.children()):
        raise UnlikeError(f"{type(module).__name__} is no norm that is known")
    return Norm(module.weight, epsilon)


def _expect_children(module: Any, names: set[str], what: str) -> None:
    found = {name for name, _ in module.named_children()}
    if found != names:
        raise UnlikeError(f"{what} has other parts: {', '.join(sorted(found ^ names))}")


def _expect_untouched(module: Any) -> None:
    """Raise UnlikeError if a module has hooks or a replaced forward, which compiled layers would skip."""
    for part in module.modules():
        if "forward" in vars(part) or part._forward_hooks or part._forward_pre_hooks:
            raise UnlikeError(f"{type(part).__name__} was changed, or is watched")

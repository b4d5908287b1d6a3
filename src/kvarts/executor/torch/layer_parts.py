"""The parts of a standard decoder: the shape of Llama, Mistral and Qwen.

Embedding, layers, norm, head. A layer: norm; queries, keys and values; optionally a norm per head; rotation; attention;
output matrix; norm; gate and up matrices; activation; down matrix. A model with these parts only looks like that shape:
layer_check runs it to verify.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from kvarts.executor.torch.pools import LayerShape

__all__ = ["ATTENTION", "MLP", "DecoderParts", "LayerParts", "Norm", "UnlikeError", "find_parts"]

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

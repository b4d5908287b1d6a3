"""Number formats of KV in pages: that of the model, int8 with a scale per head and token, or fp8 without a scale."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from msgspec.structs import replace

from kvarts.errors import ConfigError

__all__ = ["KV_DTYPES", "LayerShape", "decode", "encode", "stored_as"]

KV_DTYPES = ("auto", "int8", "fp8")
SCALE_BYTES = 4
"""Bytes of a scale, which follows the numbers of its head."""
LARGEST = 127
FP8 = torch.float8_e4m3fn
"""4 bits of exponent and 3 of fraction, up to 448: `fp8` and `fp8_e4m3` of vLLM, with a scale of 1."""


class LayerShape(msgspec.Struct, frozen=True):
    """The KV of a layer per token: `num_kv_heads` keys and values, of `head_dim` elements each, read by `num_heads`
    heads.

    `owner`: the layer that stores the keys and values it reads; a layer that is not its own owner stores nothing.
    `window`: the number of last tokens that it attends to, None for all. `is_latent`: keys and values are the same
    elements, and are stored once.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    owner: int
    window: int | None = None
    is_latent: bool = False

    @property
    def num_tensors(self) -> int:
        """Number of tensors that hold its KV: of keys and of values, or of latents."""
        return 1 if self.is_latent else 2


def stored_as(
    layers: Sequence[LayerShape], dtype: torch.dtype, kv_dtype: str
) -> tuple[tuple[LayerShape, ...], torch.dtype]:
    """Return the shapes and the format in which the KV of a model with `dtype` is stored.

    In int8, a head has as many more elements as its scale has bytes. In fp8, a byte is an element. Raise ConfigError
    for an unknown `kv_dtype`.
    """
    if kv_dtype not in KV_DTYPES:
        raise ConfigError(f"must be {', '.join(KV_DTYPES[:-1])} or {KV_DTYPES[-1]}, got {kv_dtype!r}", field="kv_dtype")
    if kv_dtype == "auto":
        return tuple(layers), dtype
    if kv_dtype == "fp8":
        return tuple(layers), torch.int8
    return tuple(replace(layer, head_dim=_width(layer.head_dim)) for layer in layers), torch.int8


def encode(states: torch.Tensor, kv_dtype: str) -> torch.Tensor:
    """Return keys or values [..., head_dim] in bytes, [..., stored elements].

    int8: each head of a token is divided by its largest magnitude, so the error of an element is at most 1/254 of that;
    the scales follow the numbers. fp8: each element is rounded to the nearest of its format, an error of at most 1/16
    of it, or of 2^-10 for tiny ones; magnitudes above 448 become 448.
    """
    if kv_dtype == "fp8":
        largest = torch.finfo(FP8).max
        return states.clamp(-largest, largest).to(FP8).view(torch.int8)
    wide = states.float()
    scales = (wide.abs().amax(dim=-1, keepdim=True) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    missing = _width(states.shape[-1]) - SCALE_BYTES - states.shape[-1]
    numbers = torch.nn.functional.pad((wide / scales).round().to(torch.int8), (0, missing))
    return torch.cat((numbers, scales.view(torch.int8)), dim=-1)


def decode(stored: torch.Tensor, head_dim: int, dtype: torch.dtype, kv_dtype: str) -> torch.Tensor:
    """Return the [..., head_dim] that `encode` stored, in `dtype`."""
    if kv_dtype == "fp8":
        return stored.view(FP8).to(dtype)
    scales = stored[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (stored[..., :head_dim] * scales).to(dtype)


def _width(head_dim: int) -> int:
    """Return the stored elements of a head: whole scales, so that each is aligned."""
    return -(-head_dim // SCALE_BYTES) * SCALE_BYTES + SCALE_BYTES

"""The KV memory of a model: two tensors a layer, cut into pages."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch

__all__ = ["KVPools", "LayerShape"]


class LayerShape(msgspec.Struct, frozen=True):
    """What a layer keeps of a token: `num_kv_heads` keys and as many values, of `head_dim` numbers each."""

    num_kv_heads: int
    head_dim: int


class KVPools:
    """Tensors `keys[layer]` and `values[layer]` of shape [num_pages, page_size, num_kv_heads, head_dim].

    `keys_flat` and `values_flat` are the same memory as [num_pages * page_size, num_kv_heads, head_dim]: a token's slot
    is its page's id times the page size, and its place in the page.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        for layer in layers:
            shape = (num_pages, page_size, layer.num_kv_heads, layer.head_dim)
            self.keys.append(torch.zeros(shape, dtype=dtype, device=device))
            self.values.append(torch.zeros(shape, dtype=dtype, device=device))
        self.keys_flat = [keys.flatten(0, 1) for keys in self.keys]
        self.values_flat = [values.flatten(0, 1) for values in self.values]

    def as_arrays(self) -> list[npt.NDArray[np.uint8]]:
        """The same memory as bytes of shape [num_pages, ...], for who copies pages. Tensors are on the CPU."""
        return [tensor.flatten(1).view(torch.uint8).numpy() for tensor in (*self.keys, *self.values)]

    @property
    def num_bytes(self) -> int:
        """Of the tensors that are allocated."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    @property
    def page_bytes(self) -> int:
        """Of one page, over all layers."""
        return self.num_bytes // self.num_pages

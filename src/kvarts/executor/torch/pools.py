"""The KV memory of a model: two tensors a layer, cut into pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

__all__ = ["KVPools", "LayerShape", "page_bytes_of"]

ALIGNMENT_BYTES = 64
"""A line of a CPU's cache, as PyTorch aligns its own memory."""


class LayerShape(msgspec.Struct, frozen=True):
    """What a layer keeps of a token: `num_kv_heads` keys and as many values, of `head_dim` numbers each.

    `num_heads` read them. `owner`: the layer that keeps the keys and values it reads; a layer that is not its own owner
    keeps nothing. `window`: it attends to the last so many tokens, None for all.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    owner: int
    window: int | None = None


def page_bytes_of(layers: Sequence[LayerShape], *, page_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of a page over all layers that keep something.

    For each of them: page_size x 2 x kv_heads x head_dim x bytes of a number.
    """
    kept = (layer for place, layer in enumerate(layers) if layer.owner == place)
    numbers = sum(2 * layer.num_kv_heads * layer.head_dim for layer in kept)
    return page_size * numbers * int(dtype.itemsize)


class KVPools:
    """Tensors `keys[layer]` and `values[layer]` of shape [num_pages, page_size, num_kv_heads, head_dim].

    `keys_flat` and `values_flat` are the same memory as [num_pages * page_size, num_kv_heads, head_dim]: a token's slot
    is its page's id times the page size, and its place in the page. Layers that share KV have the same tensors, and of
    a model with KV groups, where pages are blocks, those layers that have the same of `places`, see BlockCut.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        places: Sequence[int] | None = None,
    ) -> None:
        self.layers = tuple(layers)
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self.device = torch.device(device)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        firsts: dict[int, int] = {}
        """By the number of a tensor: the first layer that has it."""
        for number, layer in enumerate(layers):
            first = firsts.setdefault(layer.owner if places is None else places[number], number)
            shape = (num_pages, page_size, layer.num_kv_heads, layer.head_dim)
            for tensors in (self.keys, self.values):
                own = first == number
                tensors.append(_zeros(shape, dtype, self.device) if own else tensors[first])
        self._firsts = sorted(firsts.values())
        kept = sum(2 * layers[first].num_kv_heads * layers[first].head_dim for first in self._firsts)
        self.page_bytes = page_size * kept * int(dtype.itemsize)
        """Of a page, or of a block, in all tensors."""
        self.keys_flat = [keys.flatten(0, 1) for keys in self.keys]
        self.values_flat = [values.flatten(0, 1) for values in self.values]

    def read_pages(self, page_ids: Sequence[int]) -> dict[str, npt.NDArray[Any]]:
        """Return what is in pages, by tensor, as bytes of shape [pages, bytes]."""
        chosen = torch.tensor(list(page_ids), dtype=torch.long, device=self.device)
        return {
            f"{number:04}": tensor[chosen].flatten(1).view(torch.uint8).cpu().numpy()
            for number, tensor in enumerate(self.tensors)
        }

    def write_pages(self, page_ids: Sequence[int], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Write what `read_pages` returned, of as many pages."""
        chosen = torch.tensor(list(page_ids), dtype=torch.long, device=self.device)
        for number, tensor in enumerate(self.tensors):
            saved = torch.from_numpy(arrays[f"{number:04}"].copy()).to(self.device)
            tensor[chosen] = saved.view(self.dtype).view(len(page_ids), *tensor.shape[1:])

    def copy_page(self, source: int, target: int) -> None:
        """Copy all that is in one page to another."""
        for tensor in self.tensors:
            tensor[target] = tensor[source]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Each that is allocated, once."""
        return [tensors[first] for tensors in (self.keys, self.values) for first in self._firsts]

    def as_arrays(self) -> list[npt.NDArray[np.uint8]]:
        """Return the same memory as bytes of shape [num_pages, ...], for copying pages. Tensors are on the CPU."""
        return [tensor.flatten(1).view(torch.uint8).numpy() for tensor in self.tensors]

    @property
    def num_bytes(self) -> int:
        """Of the tensors that are allocated."""
        return sum(tensor.nbytes for tensor in self.tensors)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros; on a CPU in memory that the system gives when it is first written.

    PyTorch writes each zero, which takes a second for 4 GiB, and all of the memory for a model that needs little.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    room = np.zeros(num_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -room.ctypes.data % ALIGNMENT_BYTES
    return torch.from_numpy(room[start : start + num_bytes]).view(dtype).view(shape)

"""The KV memory of a model: two tensors a layer, cut into pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
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
    is its page's id times the page size, and its place in the page. Layers that share KV have the same tensors.

    Of a model with KV groups, pages are blocks, and layers with the same of `places` have the same memory, see
    BlockCut. Where layers have several shapes, a block may be several pages of a layer that keeps less, or hold fewer
    tokens of one that keeps more, `page_sizes[layer]`: `of_layers` has what such layers see.

    `numbers`: of the layers that are read by these pages.
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
        page_sizes: Sequence[int] | None = None,
    ) -> None:
        self.layers = tuple(layers)
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self.device = torch.device(device)
        self.numbers = tuple(range(len(self.layers)))
        sizes = [page_size] * len(self.layers) if page_sizes is None else page_sizes
        shapes = [(size, one.num_kv_heads, one.head_dim) for size, one in zip(sizes, layers, strict=True)]
        tensor_of = [one.owner for one in layers] if places is None else list(places)
        largest: dict[int, int] = {}
        """By the number of a tensor: the first of the layers that have the most in it."""
        for number, tensor in enumerate(tensor_of):
            if tensor not in largest or math.prod(shapes[number]) > math.prod(shapes[largest[tensor]]):
                largest[tensor] = number
        self._firsts = sorted(largest.values())
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        for tensors in (self.keys, self.values):
            made = {number: _zeros((num_pages, *shapes[number]), dtype, self.device) for number in self._firsts}
            seen = {(tensor, shapes[number]): made[number] for tensor, number in largest.items()}
            for tensor, shape in zip(tensor_of, shapes, strict=True):
                if (tensor, shape) not in seen:
                    seen[tensor, shape] = made[largest[tensor]].view(-1, *shape)
                tensors.append(seen[tensor, shape])
        kept = sum(2 * math.prod(shapes[first]) for first in self._firsts)
        self.page_bytes = kept * int(dtype.itemsize)
        """Of a page, or of a block, in all tensors."""
        self.keys_flat = [keys.flatten(0, 1) for keys in self.keys]
        self.values_flat = [values.flatten(0, 1) for values in self.values]

    def of_layers(self, numbers: Sequence[int]) -> KVPools:
        """Return the same memory as some layers see it, which have pages of the same size in it."""
        seen = copy(self)
        seen.numbers = tuple(numbers)
        seen.num_pages, seen.page_size = self.keys[numbers[0]].shape[:2]
        return seen

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
        """Each that is allocated, once: `num_pages` pages or blocks."""
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

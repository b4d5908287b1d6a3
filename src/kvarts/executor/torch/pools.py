"""The KV memory of a model: two tensors per layer, divided into pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvarts.executor.torch.kv_format import LayerShape, decode, encode, stored_as

__all__ = ["GpuPages", "KVPools", "LayerShape", "page_bytes_of"]

ALIGNMENT_BYTES = 64
"""A CPU's cache line, the alignment that PyTorch uses as well."""


def page_bytes_of(layers: Sequence[LayerShape], *, page_size: int, dtype: torch.dtype, kv_dtype: str = "auto") -> int:
    """Return the bytes of a page over all layers that store KV.

    Per layer: page_size x 2 (1 for latents) x kv_heads x stored elements of a head x bytes per element.
    """
    layers, dtype = stored_as(layers, dtype, kv_dtype)
    kept = (layer for place, layer in enumerate(layers) if layer.owner == place)
    numbers = sum(layer.num_tensors * layer.num_kv_heads * layer.head_dim for layer in kept)
    return page_size * numbers * int(dtype.itemsize)


class KVPools:
    """Tensors `keys[layer]` and `values[layer]` of shape [num_pages, page_size, num_kv_heads, head_dim].

    `dtype`: the number format of the model. With another `kv_dtype`, heads are stored as kv_format.encode returns them.

    `keys_flat` and `values_flat` are the same memory as [num_pages * page_size, num_kv_heads, head_dim]: a token's slot
    is its page's id times the page size, plus its place in the page. Layers that share KV have the same tensors, and
    so do the keys and values of layers with latents.

    In a model with KV groups, pages are blocks, and layers with equal entries in `places` share memory (BlockCut). If
    layers have several shapes, a block may be several pages of a layer with smaller KV, or hold fewer tokens of one
    with larger KV, `page_sizes[layer]`: `of_layers` returns the view of such layers.

    `numbers`: the layers that are read through these pages.
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
        kv_dtype: str = "auto",
    ) -> None:
        self.layers = tuple(layers)
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self.device = torch.device(device)
        self.numbers = tuple(range(len(self.layers)))
        sizes = [page_size] * len(self.layers) if page_sizes is None else page_sizes
        self.kv_dtype = kv_dtype
        stored, stored_dtype = stored_as(layers, dtype, kv_dtype)
        shapes = [(size, one.num_kv_heads, one.head_dim) for size, one in zip(sizes, stored, strict=True)]
        tensor_of = [one.owner for one in layers] if places is None else list(places)
        largest: dict[int, int] = {}
        """By tensor number: the first of the layers with the largest pages in it."""
        for number, tensor in enumerate(tensor_of):
            if tensor not in largest or math.prod(shapes[number]) > math.prod(shapes[largest[tensor]]):
                largest[tensor] = number
        self._firsts = sorted(largest.values())
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        for tensors in (self.keys, self.values):
            made = {
                number: self.keys[number]
                if tensors is self.values and self.layers[number].is_latent
                else _zeros((num_pages, *shapes[number]), stored_dtype, self.device)
                for number in self._firsts
            }
            seen = {(tensor, shapes[number]): made[number] for tensor, number in largest.items()}
            for tensor, shape in zip(tensor_of, shapes, strict=True):
                if (tensor, shape) not in seen:
                    seen[tensor, shape] = made[largest[tensor]].view(-1, *shape)
                tensors.append(seen[tensor, shape])
        kept = sum(self.layers[first].num_tensors * math.prod(shapes[first]) for first in self._firsts)
        self.page_bytes = kept * int(stored_dtype.itemsize)
        """Bytes of a page, or of a block, over all tensors."""
        self.keys_flat = [keys.flatten(0, 1) for keys in self.keys]
        self.values_flat = [values.flatten(0, 1) for values in self.values]

    def of_layers(self, numbers: Sequence[int]) -> KVPools:
        """Return a view of the same memory for layers with pages of one size in it."""
        seen = copy(self)
        seen.numbers = tuple(numbers)
        seen.num_pages, seen.page_size = self.keys[numbers[0]].shape[:2]
        return seen

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write `keys` and `values` [tokens, kv_heads, head_dim] of a layer to the slots of their tokens."""
        if self.kv_dtype != "auto":
            keys = encode(keys, self.kv_dtype)
        self.keys_flat[layer].index_copy_(0, slots, keys)
        if self.layers[layer].is_latent:
            return
        if self.kv_dtype != "auto":
            values = encode(values, self.kv_dtype)
        self.values_flat[layer].index_copy_(0, slots, values)

    def decoded(self, layer: int, stored: torch.Tensor) -> torch.Tensor:
        """Return the numbers of stored heads [..., stored elements] of a layer, in `dtype`."""
        if self.kv_dtype == "auto":
            return stored
        return decode(stored, self.layers[layer].head_dim, self.dtype, self.kv_dtype)

    def read_pages(self, page_ids: Sequence[int]) -> dict[str, npt.NDArray[Any]]:
        """Return the contents of pages by tensor, as bytes of shape [pages, bytes]."""
        chosen = torch.tensor(list(page_ids), dtype=torch.long, device=self.device)
        return {
            f"{number:04}": tensor[chosen].flatten(1).view(torch.uint8).cpu().numpy()
            for number, tensor in enumerate(self.tensors)
        }

    def write_pages(self, page_ids: Sequence[int], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Write arrays that `read_pages` returned for the same number of pages."""
        chosen = torch.tensor(list(page_ids), dtype=torch.long, device=self.device)
        for number, tensor in enumerate(self.tensors):
            saved = torch.from_numpy(arrays[f"{number:04}"].copy()).to(self.device)
            tensor[chosen] = saved.view(tensor.dtype).view(len(page_ids), *tensor.shape[1:])

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page to another, in all tensors."""
        for tensor in self.tensors:
            tensor[target] = tensor[source]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Each allocated tensor once: `num_pages` pages or blocks."""
        of_values = [first for first in self._firsts if not self.layers[first].is_latent]
        return [*(self.keys[first] for first in self._firsts), *(self.values[first] for first in of_values)]

    def as_arrays(self) -> list[Any]:
        """Return the same memory as bytes of shape [num_pages, ...], for copying pages: arrays, or GpuPages."""
        every = [tensor.flatten(1).view(torch.uint8) for tensor in self.tensors]
        return [tensor.numpy() if self.device.type == "cpu" else GpuPages(tensor) for tensor in every]

    @property
    def num_bytes(self) -> int:
        """Bytes of the allocated tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


class GpuPages:
    """Bytes of pages on a GPU, [num_pages, bytes]: pages are read and written by their ids, as those of an array."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.shape = tuple(tensor.shape)
        self.dtype = np.dtype(np.uint8)
        self.itemsize = 1

    def __getitem__(self, page_ids: int | npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        pages: npt.NDArray[np.uint8] = self._tensor[self._chosen(page_ids)].cpu().numpy()
        return pages

    def __setitem__(self, page_ids: int | npt.NDArray[np.int64], pages: npt.NDArray[np.uint8]) -> None:
        self._tensor[self._chosen(page_ids)] = torch.from_numpy(np.array(pages)).to(self._tensor.device)

    def _chosen(self, page_ids: int | npt.NDArray[np.int64]) -> int | torch.Tensor:
        return page_ids if isinstance(page_ids, int) else torch.from_numpy(page_ids).to(self._tensor.device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros; on a CPU, in memory that the system allocates on first write.

    PyTorch writes each zero, which takes a second for 4 GiB and makes all the memory resident even if a model uses
    little.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    room = np.zeros(num_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -room.ctypes.data % ALIGNMENT_BYTES
    return torch.from_numpy(room[start : start + num_bytes]).view(dtype).view(shape)

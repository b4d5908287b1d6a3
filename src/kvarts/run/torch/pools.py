"""The KV memory of a model: two tensors per layer, divided into pages, and the number formats in them.

KV in pages has the format of the model, int8 with a scale per head and token, or fp8 without a scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace

from kvarts.base.errors import ConfigError

__all__ = ["KV_DTYPES", "GpuPages", "KVPools", "LayerShape", "decode", "encode", "page_bytes_of", "stored_as"]

ALIGNMENT_BYTES = 64
"""A CPU's cache line, the alignment that PyTorch uses as well."""
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

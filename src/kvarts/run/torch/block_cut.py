"""Divides the KV memory of a model with KV groups into blocks of one size.

A block holds the KV of one page in n layers, where n divides the number of layers of every group. The part of a page in
any group thus takes a whole number of blocks, any block can serve any group, and no bytes are lost between them.

If layers have KV heads of several shapes, a block has the same size in bytes for all: it holds one page of one layer
with large heads, for example, or of two layers with small ones. If a layer needs more than a block, its page is spread
over several, each with an equal number of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, lcm

import msgspec
import torch

from kvarts.base.errors import ConfigError
from kvarts.core.kv.groups import GroupMemory, PartGroup, Retention
from kvarts.core.kv.layers import KvLayer
from kvarts.run.flat_batch import LayerTable
from kvarts.run.torch.pools import LayerShape
from kvarts.run.torch.states import StateShape

__all__ = ["BlockCut", "cut_blocks"]


class BlockCut(msgspec.Struct, frozen=True):
    """The groups of a model, and for each layer where its keys and values are.

    `memory`: the groups; `places`: the layer's place in a block, which is a separate tensor; `tables`: its page table's
    index in `layer_tables`; `page_sizes`: the tokens per page of that table. Layers that share KV have the values of
    the layer that owns it.
    """

    memory: GroupMemory
    places: tuple[int, ...]
    tables: tuple[int, ...]
    layer_tables: tuple[LayerTable, ...]
    page_sizes: tuple[int, ...]

    @property
    def num_state_blocks(self) -> int:
        """Number of blocks for the state of a sequence; 0 for a model without states."""
        return self.memory.num_state_blocks


class _Group(msgspec.Struct):
    """Layers of one KV group. `window`: the tokens they attend to; `numbers`: the elements of a page's keys in one
    layer.
    """

    window: int | None
    shape: tuple[int, int]
    numbers: int
    layers: list[int]


def cut_blocks(
    layers: Sequence[LayerShape],
    *,
    page_size: int,
    dtype: torch.dtype,
    keeps: Retention = "all",
    states: Sequence[StateShape] = (),
) -> BlockCut:
    """Return the cut for a model's layers; `states` are those of its layers that have one.

    Raise ConfigError if no single block size fits all layers, or if states have several sizes.
    """
    groups = _groups(layers, page_size)
    largest = gcd(*(group.numbers * len(group.layers) for group in groups))
    divisor = _divisor(groups, page_size, largest)
    block = largest // divisor
    # Elements of a block's keys in one tensor: a multiple of the page of each layer that shares the tensor.
    unit = lcm(*(group.numbers for group in groups if block % group.numbers == 0))
    if any(group.numbers > block for group in groups):
        unit = block
    num_tensors = {layer.num_tensors for layer in layers}
    assert len(num_tensors) == 1, "either all layers keep latents, or none"
    parts = [_part_group(group, dtype, max(num_tensors)) for group in groups]
    if states:
        parts.append(_state_group(states, gcd(*(part.part_bytes for part in parts))))
    memory = GroupMemory(tuple(parts), keeps, divisor)
    tables: dict[LayerTable, int] = {}
    cuts: dict[int, tuple[int, int, int]] = {}
    num_blocks = 0
    for group in groups:
        per_layer = -(-group.numbers // block)
        each = max(1, unit // group.numbers)
        in_block = max(1, block // group.numbers)
        for number, layer in enumerate(group.layers):
            first = num_blocks + number // in_block * per_layer
            place, at = divmod(number % in_block, each)
            table = LayerTable(tuple(range(first, first + per_layer)), each, at)
            cuts[layer] = place, tables.setdefault(table, len(tables)), page_size // per_layer
        num_blocks += len(group.layers) // in_block * per_layer
    places, of_tables, page_sizes = zip(*(cuts[layer.owner] for layer in layers), strict=True)
    return BlockCut(memory, places, of_tables, tuple(tables), page_sizes)


def _groups(layers: Sequence[LayerShape], page_size: int) -> list[_Group]:
    """Return the layers that own KV, grouped by how far back it is read and by shape."""
    groups: dict[tuple[int | None, tuple[int, int]], _Group] = {}
    for place, layer in enumerate(layers):
        if layer.owner != place:
            continue
        windows = [other.window for other in layers if other.owner == place]
        furthest = None if None in windows else max(window for window in windows if window is not None)
        shape = layer.num_kv_heads, layer.head_dim
        group = groups.setdefault((furthest, shape), _Group(furthest, shape, page_size * shape[0] * shape[1], []))
        group.layers.append(place)
    return list(groups.values())


def _divisor(groups: Sequence[_Group], page_size: int, largest: int) -> int:
    """Return the number of pieces to divide the largest block into; `largest`: the elements of its keys."""
    for divisor in range(1, largest + 1):
        block = largest // divisor
        if block < min(group.numbers for group in groups) // page_size:
            break
        if largest % divisor == 0 and all(
            block % group.numbers == 0 or (group.numbers % block == 0 and page_size % (group.numbers // block) == 0)
            for group in groups
        ):
            return divisor
    found = ", ".join(f"{heads} of {numbers} numbers" for heads, numbers in sorted({group.shape for group in groups}))
    raise ConfigError(
        f"layers of this model have KV heads of several shapes ({found}), which no block of one size can hold in pages "
        f"of {page_size} tokens",
        field="kv_groups",
        hint="Take another page_size, or leave it off.",
    )


def _part_group(group: _Group, dtype: torch.dtype, num_tensors: int) -> PartGroup:
    num_heads, head_dim = group.shape
    layer = KvLayer(
        kind="full" if group.window is None else "window",
        num_heads=num_heads,
        head_numbers=num_tensors * head_dim,
        span=group.window,
    )
    return PartGroup(layer, len(group.layers) * num_tensors * group.numbers * int(dtype.itemsize), len(group.layers))


def _state_group(states: Sequence[StateShape], unit_bytes: int) -> PartGroup:
    """Return the group of layers with states: a sequence has the states of all of them in whole units.

    A unit is the largest size that divides the parts of pages, so states do not make blocks smaller.
    """
    sizes = sorted({state.num_bytes for state in states})
    if len(sizes) > 1:
        raise ConfigError(
            f"layers of this model keep states of several sizes ({', '.join(f'{size:,}' for size in sizes)} bytes)",
            field="kv_groups",
            hint="No setting runs it.",
        )
    layer = KvLayer(kind="state", state_bytes=sizes[0])
    return PartGroup(layer, -(-len(states) * sizes[0] // unit_bytes) * unit_bytes, len(states))

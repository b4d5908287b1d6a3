"""How the KV memory of a model is cut into blocks of one size where its layers keep alike in groups.

A block holds a page of tokens in as many layers as divide the layers of every group. So the part of a page in a group
takes a whole number of blocks, any block will do for any group, and no byte is between them.

Where layers have KV heads of several shapes, a block is as many bytes for each of them: it holds a page of one layer
with large heads, say, or of two with small ones. If a layer has more than a block, its page is in several of them, each
with as many of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, lcm

import msgspec
import torch

from kvarts.errors import ConfigError
from kvarts.executor.page_tables import LayerTable
from kvarts.executor.torch.pools import LayerShape
from kvarts.executor.torch.states import StateShape
from kvarts.hardware.kv_groups import KvLayer
from kvarts.kv.group_memory import GroupMemory, PartGroup, Retention

__all__ = ["BlockCut", "cut_blocks"]


class BlockCut(msgspec.Struct, frozen=True):
    """The groups of a model, and for each of its layers where its keys and values are.

    `memory`: the groups; `places`: the place of the layer in a block, which is a tensor of its own; `tables`: which of
    `layer_tables` it reads by; `page_sizes`: the tokens of a page of that. Layers that share KV have those of the layer
    that keeps it.
    """

    memory: GroupMemory
    places: tuple[int, ...]
    tables: tuple[int, ...]
    layer_tables: tuple[LayerTable, ...]
    page_sizes: tuple[int, ...]

    @property
    def num_state_blocks(self) -> int:
        """Blocks of the state of a sequence; 0 for a model without states."""
        memory = self.memory
        return sum(group.part_bytes for group in memory.groups if group.is_state) // memory.block_bytes


class _Group(msgspec.Struct):
    """Layers that keep alike. `window`: how far back they are read; `numbers`: of the keys of a page in one of them."""

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
    """Return the cut for layers of a model, of which some may keep `states`.

    Raise ConfigError for layers that no block of one size can hold, and for states of several sizes.
    """
    groups = _groups(layers, page_size)
    largest = gcd(*(group.numbers * len(group.layers) for group in groups))
    divisor = _divisor(groups, page_size, largest)
    block = largest // divisor
    # The keys of a block in one tensor; in pages of each of those layers that share it.
    unit = lcm(*(group.numbers for group in groups if block % group.numbers == 0))
    if any(group.numbers > block for group in groups):
        unit = block
    parts = [_part_group(group, dtype) for group in groups]
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
    """Return the layers that keep KV, by how far back they are read and by their shape."""
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
    """Return in how many pieces blocks have to be, of which the largest may have `largest` numbers of keys."""
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


def _part_group(group: _Group, dtype: torch.dtype) -> PartGroup:
    num_heads, head_dim = group.shape
    layer = KvLayer(
        kind="full" if group.window is None else "window",
        num_heads=num_heads,
        head_numbers=2 * head_dim,
        span=group.window,
    )
    return PartGroup(layer, len(group.layers) * 2 * group.numbers * int(dtype.itemsize), len(group.layers))


def _state_group(states: Sequence[StateShape], unit_bytes: int) -> PartGroup:
    """Return the group of layers with states: a sequence has the states of all of them in whole units.

    A unit is the largest size that divides the parts of pages, so that states make blocks no smaller.
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

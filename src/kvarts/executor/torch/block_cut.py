"""How the KV memory of a model is cut into blocks of one size where its layers keep alike in groups.

A block holds a page of tokens in as many layers as divide the layers of every group. So the part of a page in a group
takes a whole number of blocks, any block will do for any group, and no byte is between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import msgspec
import torch

from kvarts.errors import ConfigError
from kvarts.executor.torch.pools import LayerShape
from kvarts.hardware.kv_groups import KvLayer
from kvarts.kv.group_memory import GroupMemory, PartGroup, Retention

__all__ = ["BlockCut", "cut_blocks"]


class BlockCut(msgspec.Struct, frozen=True):
    """The groups of a model, and for each of its layers where its keys and values are.

    `memory`: the groups; `places`: the place of the layer in a block, which is a tensor of its own; `tables`: the page
    table that it has, of `num_tables`. Layers that share KV have those of the layer that keeps it.
    """

    memory: GroupMemory
    places: tuple[int, ...]
    tables: tuple[int, ...]

    @property
    def num_tables(self) -> int:
        """Page tables of a sequence: blocks that a page has in all groups together."""
        return self.memory.page_bytes // self.memory.block_bytes


def cut_blocks(
    layers: Sequence[LayerShape], *, page_size: int, dtype: torch.dtype, keeps: Retention = "all"
) -> BlockCut:
    """Return the cut for layers of a model. Raise ConfigError for layers that keep KV of several shapes."""
    owners = [place for place, layer in enumerate(layers) if layer.owner == place]
    shapes = sorted({(layers[place].num_kv_heads, layers[place].head_dim) for place in owners})
    if len(shapes) > 1:
        found = ", ".join(f"{heads} of {numbers} numbers" for heads, numbers in shapes)
        raise ConfigError(
            f"layers of this model have KV heads of several shapes ({found}), and blocks are of one size",
            field="kv_groups",
            hint="Leave it off.",
        )
    members: dict[int | None, list[int]] = {}
    """By how far back they are read: the layers that keep KV."""
    for place in owners:
        windows = [layer.window for layer in layers if layer.owner == place]
        furthest = None if None in windows else max(window for window in windows if window is not None)
        members.setdefault(furthest, []).append(place)
    each = gcd(*(len(group) for group in members.values()))
    num_kv_heads, head_dim = shapes[0]
    layer_bytes = page_size * 2 * num_kv_heads * head_dim * int(dtype.itemsize)
    groups = []
    where: dict[int, tuple[int, int]] = {}
    num_tables = 0
    for window, group in members.items():
        layer = KvLayer(
            kind="full" if window is None else "window",
            num_heads=num_kv_heads,
            head_numbers=2 * head_dim,
            span=window,
        )
        groups.append(PartGroup(layer, len(group) * layer_bytes, len(group)))
        for number, place in enumerate(group):
            where[place] = number % each, num_tables + number // each
        num_tables += len(group) // each
    return BlockCut(
        GroupMemory(tuple(groups), keeps),
        tuple(where[layer.owner][0] for layer in layers),
        tuple(where[layer.owner][1] for layer in layers),
    )

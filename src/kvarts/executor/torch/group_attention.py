"""Attention of a model with KV groups: each page table has a backend of its own, which prepares its layers' steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvarts.executor.torch.attention import PagedAttention
from kvarts.executor.torch.metadata import AttentionBackend, AttentionMetadata, AttentionParams
from kvarts.executor.torch.pools import KVPools

__all__ = ["GroupAttention"]


class GroupAttention(PagedAttention):
    """Attention over pages, where the layers have page tables `tables`, by number, and each table its own backend."""

    def __init__(self, pools: KVPools, backends: Sequence[AttentionBackend], tables: Sequence[int]) -> None:
        super().__init__(pools, backends[0])
        self._backends = tuple(backends)
        self._tables = tuple(tables)
        self._slots_of: list[torch.Tensor] = []

    def begin_all(self, metadata: Sequence[AttentionMetadata]) -> None:
        """Prepare for the step that `metadata` describes, table by table."""
        self._slots_of = [one.slots for one in metadata]
        for backend, one in zip(self._backends, metadata, strict=True):
            backend.begin(one)

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Do what PagedAttention does, through the page table of the layer."""
        table = self._tables[layer]
        if self._pools.layers[layer].owner == layer:
            self._pools.keys_flat[layer].index_copy_(0, self._slots_of[table], keys)
            self._pools.values_flat[layer].index_copy_(0, self._slots_of[table], values)
        return self._backends[table].forward(layer, queries, params)

"""One step as a model's attention reads it: where each token's KV goes, and which pages each token looks back on."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from kvarts.executor.torch.pools import KVPools

__all__ = ["ChunkView", "DecodeGroup", "StepView"]

Ints = npt.NDArray[np.int64]

GROUP_TOKENS = 4096
"""Tokens of context that a group of decodes reads together: some MiB a layer, which stay in cache."""


class ChunkView(msgspec.Struct):
    """Tokens [first, last) of the batch are positions from `start` on of one sequence, whose pages are `page_ids`."""

    first: int
    last: int
    start: int
    page_ids: torch.Tensor


class DecodeGroup(msgspec.Struct):
    """Tokens `places` of the batch, one a sequence, about equally far on.

    `page_ids`: [sequences, pages]; what is shorter than the longest is filled up with any page. `visible`:
    [sequences, 1, 1, pages * page_size].
    """

    places: torch.Tensor
    page_ids: torch.Tensor
    visible: torch.Tensor


class StepView:
    """What the attention of one step needs beside queries, keys and values. `pools`: where they are kept."""

    def __init__(
        self,
        pools: KVPools,
        *,
        slots: torch.Tensor,
        chunks: Sequence[ChunkView],
        decode_positions: Ints,
        decode_tables: Ints,
    ) -> None:
        """`slots`: for each token of the batch. Decodes are its first tokens: `decode_positions` has shape [decodes],
        `decode_tables` [decodes, pages]."""
        self.pools = pools
        self.slots = slots
        self.chunks = chunks
        self._positions = decode_positions
        self._tables = decode_tables
        self._groups: dict[int | None, list[DecodeGroup]] = {}

    def decode_groups(self, window: int | None) -> list[DecodeGroup]:
        """The decodes, for layers that look back on the last `window` tokens, or on all."""
        groups = self._groups.get(window)
        if groups is None:
            groups = self._groups[window] = self._make_groups(window)
        return groups

    def _make_groups(self, window: int | None) -> list[DecodeGroup]:
        positions, page_size = self._positions, self.pools.page_size
        if not len(positions):
            return []
        ends = positions + 1
        begins = np.zeros_like(ends) if window is None else np.maximum(0, ends - window)
        first_pages = begins // page_size
        num_pages = -(-ends // page_size) - first_pages
        order = np.argsort(num_pages, kind="stable")
        groups: list[DecodeGroup] = []
        while len(order):
            # The longest sequences first: as many as fit beside the longest of them.
            longest = int(num_pages[order[-1]])
            count = max(1, GROUP_TOKENS // (longest * page_size))
            chosen, order = order[-count:], order[:-count]
            columns = np.arange(longest)
            pages = np.minimum(first_pages[chosen, None] + columns, self._tables.shape[1] - 1)
            page_ids = np.where(columns < num_pages[chosen, None], self._tables[chosen[:, None], pages], 0)
            places = first_pages[chosen, None] * page_size + np.arange(longest * page_size)
            visible = (places >= begins[chosen, None]) & (places < ends[chosen, None])
            groups.append(
                DecodeGroup(
                    torch.from_numpy(chosen.astype(np.int64)),
                    torch.from_numpy(page_ids),
                    torch.from_numpy(visible)[:, None, None, :],
                )
            )
        return groups

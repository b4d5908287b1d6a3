"""Attention backend on PyTorch's FlexAttention: the pool is one long sequence with masked blocks. For CUDA.

Blocks of its mask are pages. Keys and values are read in place; a query attends to a pool page only if its sequence
has that page.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import gcd
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from kvarts.executor.torch.metadata import AttentionMetadata, AttentionParams, Ints
from kvarts.executor.torch.pools import KVPools

__all__ = ["FlexBackend", "flex_fits"]

QUERY_BLOCK = 128
LEAST_BLOCK, MOST_BLOCK = 16, 64
"""Range of the number of context tokens that a kernel processes at a time."""


def flex_fits(pools: KVPools) -> str | None:
    """Return why FlexAttention cannot read these pages; None if it can."""
    page_size = pools.page_size
    return f"a page size of {page_size} is no multiple of {LEAST_BLOCK}" if page_size % LEAST_BLOCK else None


class _Part(msgspec.Struct):
    """Tokens [first, last) of the batch, of `num_sequences` with the same number of tokens each, and their mask."""

    first: int
    last: int
    num_sequences: int
    mask: BlockMask


class FlexBackend:
    """An AttentionBackend that calls `flex_attention`; builds masks once per step for each window.

    `is_compiled`: False runs it without a compiler or GPU, slowly.
    """

    reads_sinks = False

    def __init__(self, pools: KVPools, *, is_compiled: bool = True) -> None:
        self._pools = pools
        self._flex = _compiled() if is_compiled else flex_attention
        self._parts: dict[int | None, list[_Part]] = {}
        self._options = {"BLOCK_N": gcd(pools.page_size, MOST_BLOCK)} if is_compiled else None

    def begin(self, metadata: AttentionMetadata) -> None:
        """Prepare for a step."""
        self._metadata = metadata
        self._parts.clear()

    def forward(self, layer: int, queries: torch.Tensor, params: AttentionParams) -> torch.Tensor:
        """Return the output of one layer's attention."""
        pools = self._pools
        keys = pools.keys_flat[layer].transpose(0, 1)[None]
        values = pools.values_flat[layer].transpose(0, 1)[None]
        parts = self._parts.get(params.window)
        if parts is None:
            parts = self._parts[params.window] = self._make_parts(params.window)
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        num_heads, head_dim = queries.shape[1:]
        for part in parts:
            # [sequences, heads, tokens of each, head_dim]
            own = queries[part.first : part.last].view(part.num_sequences, -1, num_heads, head_dim).transpose(1, 2)
            read = self._flex(
                own,
                keys,
                values,
                score_mod=None if params.softcap is None else _capped(params.softcap),
                block_mask=part.mask,
                scale=params.scaling,
                enable_gqa=True,
                kernel_options=self._options,
                return_aux=None if params.sinks is None else AuxRequest(lse=True),
            )
            if params.sinks is None:
                attended = read.transpose(1, 2)
            else:
                read, aux = read
                attended = params.less_sinks(read.transpose(1, 2), aux.lse.transpose(1, 2))
            out[part.first : part.last] = attended.reshape(-1, num_heads, head_dim)
        return out

    def _make_parts(self, window: int | None) -> list[_Part]:
        metadata = self._metadata
        parts = []
        count = len(metadata.decodes.positions)
        if count:
            mask = self._make_mask(metadata.decodes.tables, metadata.decodes.positions, 1, window)
            parts.append(_Part(0, count, count, mask))
        for chunk in metadata.chunks:
            mask = self._make_mask(chunk.page_ids[None], np.array([chunk.start]), chunk.num_tokens, window)
            parts.append(_Part(chunk.first, chunk.last, 1, mask))
        return parts

    def _make_mask(self, tables: Ints, starts: Ints, num_tokens: int, window: int | None) -> BlockMask:
        """Return the mask of sequences with pages `tables` [sequences, pages], from `starts` [sequences] on."""
        metadata, page_size = self._metadata, self._pools.page_size
        firsts = starts[:, None] + np.arange(0, num_tokens, QUERY_BLOCK)
        lasts = np.minimum(firsts + QUERY_BLOCK, starts[:, None] + num_tokens) - 1
        begins = np.zeros_like(firsts) if window is None else np.maximum(0, firsts - window + 1) // page_size
        num_pages = lasts // page_size + 1
        places = begins[..., None] + np.arange(int((num_pages - begins).max()))
        seen = places < num_pages[..., None]
        # A page that every query of a block attends to in full needs no mask.
        whole = (places + 1) * page_size <= firsts[..., None] + 1
        if window is not None:
            whole &= places * page_size > lasts[..., None] - window
        page_ids = tables[np.arange(len(tables))[:, None, None], np.minimum(places, tables.shape[1] - 1)]
        # The index of each page of the pool in its sequence. Pages that a window has passed may be reused by now.
        order = np.full((len(tables), self._pools.num_pages), -1, np.int64)
        columns_of = np.arange(tables.shape[1])
        rows, columns = np.nonzero(
            (columns_of >= begins.min(axis=1)[:, None]) & (columns_of < num_pages.max(axis=1)[:, None])
        )
        order[rows, tables[rows, columns]] = columns
        return BlockMask.from_kv_blocks(
            *self._blocks(page_ids, seen & ~whole),
            *self._blocks(page_ids, whole),
            BLOCK_SIZE=(QUERY_BLOCK, page_size),
            mask_mod=_visible(metadata.tensor(order), metadata.tensor(starts), page_size, window),
            seq_lengths=(num_tokens, self._pools.num_pages * page_size),
            compute_q_blocks=False,
        )

    def _blocks(self, page_ids: Ints, chosen: npt.NDArray[np.bool_]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the number of chosen `page_ids` [sequences, query blocks, pages], and all of them, chosen ones
        first.
        """
        front = np.argsort(~chosen, axis=-1, kind="stable")
        metadata = self._metadata
        # As wide as the pool: the kernels check that.
        indices = torch.zeros((*chosen.shape[:2], self._pools.num_pages), dtype=torch.int32, device=metadata.device)
        width = min(chosen.shape[2], self._pools.num_pages)
        indices[..., :width] = metadata.tensor(np.take_along_axis(page_ids, front, axis=-1)[..., :width])
        return metadata.tensor(chosen.sum(axis=-1, dtype=np.int32))[:, None], indices[:, None]


Modifier = Callable[..., torch.Tensor]


def _visible(order: torch.Tensor, starts: torch.Tensor, page_size: int, window: int | None) -> Modifier:
    def whole(sequence: Any, head: Any, query: Any, place: Any) -> torch.Tensor:
        page = order[sequence, place // page_size]
        return (page >= 0) & (page * page_size + place % page_size <= starts[sequence] + query)

    def windowed(sequence: Any, head: Any, query: Any, place: Any) -> torch.Tensor:
        where = order[sequence, place // page_size] * page_size + place % page_size
        return whole(sequence, head, query, place) & (where > starts[sequence] + query - window)

    return whole if window is None else windowed


def _capped(softcap: float) -> Modifier:
    def capped(score: Any, sequence: Any, head: Any, query: Any, place: Any) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


@cache
def _compiled() -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(flex_attention)
    return compiled

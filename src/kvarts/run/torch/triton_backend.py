"""Attention backend in Triton: one launch per layer for decodes and one for chunks, through page tables. For CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from kvarts.run.torch.attention import AttentionMetadata, AttentionParams, ChunkMetadata
from kvarts.run.torch.pools import KVPools

__all__ = ["TritonBackend", "triton_fits"]

Ints32 = npt.NDArray[np.int32]

CHUNK_ROWS, WIDE_CHUNK_ROWS = 128, 64
"""Queries times heads of a program that reads a chunk, and of one with wide heads."""
LEAST_ROWS = 16
"""Rows of the smallest matrix product."""
MOST_HEAD_DIM = 256
PROGRAMS_AT_ONCE = 512
"""Programs that keep a GPU busy: sequences are read in parts while there are fewer."""
MOST_SPLITS = 32
WIDE_BYTES = 512
"""Heads of so many bytes are read in smaller blocks, which fit in a processor's own memory."""


def triton_fits(pools: KVPools) -> str | None:
    """Return why Triton's kernel cannot read these pages; None if it can."""
    head_dim = max(pools.layers[number].head_dim for number in pools.numbers)
    if pools.device.type != "cuda":
        return f"it needs a GPU, and the pages are on {pools.device.type}"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton is not installed"
    if pools.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"{pools.dtype} is not of 16 or 32 bits"
    if head_dim > MOST_HEAD_DIM:
        return f"heads of {head_dim} are larger than {MOST_HEAD_DIM}"
    return None


class _Blocks(msgspec.Struct):
    """Blocks of queries, each of one sequence.

    `of_blocks`: the first token of each in the batch, the number of its queries, the first one's position, and its row
    in `tables` [sequences, pages]; four tensors [blocks]. `num_rows`: at least the queries of a block times the heads
    that share a KV head. `num_splits`: the programs that share the places of a block.
    """

    of_blocks: tuple[torch.Tensor, ...]
    tables: torch.Tensor
    num_rows: int
    num_splits: int
    tokens: tuple[int, int]
    """The first and last token of all blocks in the batch."""


class TritonBackend:
    """An AttentionBackend of one kernel; builds page tables once per step."""

    reads_sinks = False

    def __init__(self, pools: KVPools) -> None:
        from kvarts.run.torch.triton_kernel import attend

        self._kernel: Any = attend
        self._pools = pools
        head_dim = max(pools.layers[number].head_dim for number in pools.numbers)
        self._is_wide = head_dim * pools.dtype.itemsize >= WIDE_BYTES

    def begin(self, metadata: AttentionMetadata) -> None:
        """Prepare for a step."""
        self._metadata = metadata
        self._blocks: dict[int, list[_Blocks]] = {}
        """By the number of heads that share a KV head: decodes and chunks."""
        self._of_chunks = _tables(metadata) if metadata.chunks else None

    def forward(self, layer: int, queries: torch.Tensor, params: AttentionParams) -> torch.Tensor:
        """Return the output of one layer's attention."""
        shape = self._pools.layers[layer]
        group = queries.shape[1] // shape.num_kv_heads
        if group not in self._blocks:
            self._blocks[group] = self._make_blocks(group, shape.num_kv_heads)
        queries = queries.contiguous()
        out = torch.empty_like(queries)
        for blocks in self._blocks[group]:
            self._attend(blocks, layer, queries, params, out)
        return out

    def _attend(
        self, blocks: _Blocks, layer: int, queries: torch.Tensor, params: AttentionParams, out: torch.Tensor
    ) -> None:
        """Write the output of the tokens of `blocks` to `out`."""
        num_tokens, num_heads, head_dim = queries.shape
        keys, values = self._pools.keys_flat[layer], self._pools.values_flat[layer]
        num_kv_heads = keys.shape[1]
        splits = blocks.num_splits
        is_direct = splits == 1 and params.sinks is None
        parts = out if is_direct else torch.empty((splits, *out.shape), dtype=torch.float32, device=out.device)
        log_sums = torch.empty((splits, num_tokens, num_heads), dtype=torch.float32, device=out.device)
        firsts, counts, starts, rows = blocks.of_blocks
        is_wide = self._is_wide
        self._kernel[len(firsts), num_kv_heads, splits](
            parts,
            log_sums,
            queries,
            keys,
            values,
            blocks.tables,
            firsts,
            counts,
            starts,
            rows,
            params.scaling,
            params.softcap or 1.0,
            num_tokens,
            queries.stride(0),
            keys.stride(0),
            blocks.tables.stride(0),
            NUM_HEADS=num_heads,
            GROUP=num_heads // num_kv_heads,
            HEAD_DIM=head_dim,
            PAGE_SIZE=self._pools.page_size,
            WINDOW=params.window or 0,
            HAS_CAP=params.softcap is not None,
            NUM_SPLITS=splits,
            BLOCK_ROWS=blocks.num_rows,
            BLOCK_PLACES=32 if is_wide else 64,
            BLOCK_DIM=max(16, _power_of_two(head_dim)),
            num_warps=8 if blocks.num_rows >= CHUNK_ROWS else 4,
            num_stages=2 if is_wide else 3,
        )
        if is_direct:
            return
        first, last = blocks.tokens
        joined, log_sum = _joined(parts[:, first:last], log_sums[:, first:last])
        out[first:last] = joined if params.sinks is None else params.less_sinks(joined, log_sum)

    def _make_blocks(self, group: int, num_kv_heads: int) -> list[_Blocks]:
        """Return the blocks of decodes and of chunks for layers where `group` heads share a KV head."""
        metadata = self._metadata
        made = []
        if count := len(metadata.decodes.positions):
            starts = metadata.decode_positions
            rows = torch.arange(count, dtype=torch.int32, device=starts.device)
            most_splits = PROGRAMS_AT_ONCE // (count * num_kv_heads)
            made.append(
                _Blocks(
                    (rows, torch.ones_like(rows), starts, rows),
                    metadata.decode_tables,
                    num_rows=max(LEAST_ROWS, _power_of_two(group)),
                    num_splits=max(1, min(MOST_SPLITS, most_splits)),
                    tokens=(0, count),
                )
            )
        if self._of_chunks is not None:
            num_rows = max(WIDE_CHUNK_ROWS if self._is_wide else CHUNK_ROWS, _power_of_two(group))
            of_blocks = metadata.tensor(_cut(metadata.chunks, num_rows // group))
            tokens = metadata.chunks[0].first, metadata.chunks[-1].last
            made.append(_Blocks(tuple(of_blocks), self._of_chunks, num_rows, 1, tokens))
        return made


def _tables(metadata: AttentionMetadata) -> torch.Tensor:
    """Return the page tables of chunks, [chunks, pages]."""
    tables = np.zeros((len(metadata.chunks), max(len(chunk.page_ids) for chunk in metadata.chunks)), np.int32)
    for row, chunk in enumerate(metadata.chunks):
        tables[row, : len(chunk.page_ids)] = chunk.page_ids
    return metadata.tensor(tables)


def _cut(chunks: Sequence[ChunkMetadata], each: int) -> Ints32:
    """Cut chunks into blocks of `each` queries. Return [4, blocks], as in _Blocks."""
    columns = []
    for row, chunk in enumerate(chunks):
        offsets = np.arange(0, chunk.num_tokens, each)
        counts = np.minimum(each, chunk.num_tokens - offsets)
        columns.append([chunk.first + offsets, counts, chunk.start + offsets, np.full_like(offsets, row)])
    return np.concatenate(columns, axis=1).astype(np.int32)


def _joined(parts: torch.Tensor, log_sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output over all splits, and the logarithms of the sums of exponentials.

    `parts` [splits, tokens, heads, head_dim], `log_sums` [splits, tokens, heads].
    """
    total = torch.logsumexp(log_sums, dim=0)
    return (parts * torch.exp(log_sums - total)[..., None]).sum(dim=0), total


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()

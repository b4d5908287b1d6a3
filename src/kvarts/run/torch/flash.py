"""Attention backend on FlashAttention: one call per layer for the whole step, through block tables. For CUDA."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvarts.run.torch.attention import AttentionMetadata, AttentionParams
from kvarts.run.torch.pools import KVPools

__all__ = ["FlashBackend", "flash_fits"]

PAGE_STEP = 256
"""FlashAttention 2 requires page sizes that are multiples of this."""
MOST_HEAD_DIM = 256


def flash_fits(pools: KVPools) -> str | None:
    """Return why FlashAttention cannot read these pages; None if it can."""
    head_dim = max(pools.layers[number].head_dim for number in pools.numbers)
    try:
        import flash_attn  # noqa: F401
    except ImportError:
        return "flash_attn is not installed"
    if pools.dtype not in (torch.float16, torch.bfloat16):
        return f"{pools.dtype} is not of 16 bits"
    if pools.page_size % PAGE_STEP:
        return f"a page size of {pools.page_size} is no multiple of {PAGE_STEP}"
    if head_dim > MOST_HEAD_DIM:
        return f"heads of {head_dim} are larger than {MOST_HEAD_DIM}"
    return None


class FlashBackend:
    """An AttentionBackend that calls `flash_attn_varlen_func`; builds block tables once per step."""

    reads_sinks = False

    def __init__(self, pools: KVPools) -> None:
        from flash_attn import flash_attn_varlen_func

        self._kernel: Any = flash_attn_varlen_func
        self._pools = pools

    def begin(self, metadata: AttentionMetadata) -> None:
        """Prepare for a step."""
        num_decodes = len(metadata.decodes.positions)
        lengths = [1] * num_decodes + [chunk.num_tokens for chunk in metadata.chunks]
        ends = (metadata.decodes.positions + 1).tolist() + [chunk.end for chunk in metadata.chunks]
        num_pages = [-(-end // self._pools.page_size) for end in ends]
        tables = np.zeros((len(ends), max(num_pages)), np.int32)
        width = min(tables.shape[1], metadata.decodes.tables.shape[1])
        tables[:num_decodes, :width] = metadata.decodes.tables[:, :width]
        for row, chunk in enumerate(metadata.chunks, num_decodes):
            tables[row, : num_pages[row]] = chunk.page_ids[: num_pages[row]]
        self._tables = metadata.tensor(tables)
        self._query_ends = metadata.tensor(np.cumsum([0, *lengths], dtype=np.int32))
        self._key_ends = metadata.tensor(np.cumsum([0, *ends], dtype=np.int32))
        self._most_queries = max(lengths)
        self._most_keys = max(ends)

    def forward(self, layer: int, queries: torch.Tensor, params: AttentionParams) -> torch.Tensor:
        """Return the output of one layer's attention."""
        if params.sinks is None:
            return self._call(layer, queries, params)
        out, log_sums, _ = self._call(layer, queries, params, return_attn_probs=True)
        return params.less_sinks(out, log_sums.transpose(0, 1))

    def _call(self, layer: int, queries: torch.Tensor, params: AttentionParams, **kwargs: Any) -> Any:
        return self._kernel(
            queries.contiguous(),
            self._pools.keys[layer],
            self._pools.values[layer],
            cu_seqlens_q=self._query_ends,
            cu_seqlens_k=self._key_ends,
            max_seqlen_q=self._most_queries,
            max_seqlen_k=self._most_keys,
            softmax_scale=params.scaling,
            causal=True,
            # Counted to the left, without the query itself.
            window_size=(-1, -1) if params.window is None else (params.window - 1, 0),
            softcap=params.softcap or 0.0,
            block_table=self._tables,
            **kwargs,
        )

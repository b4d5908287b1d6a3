"""Reading pages with FlashAttention: one call a layer for the whole step, through block tables. For CUDA."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvarts.executor.torch.pools import KVPools
from kvarts.executor.torch.step import StepView, Way

__all__ = ["FlashReader", "flash_fits"]

PAGE_STEP = 256
"""FlashAttention 2 reads pages whose size is a multiple of this."""
MOST_HEAD_DIM = 256


def flash_fits(pools: KVPools) -> str | None:
    """Why FlashAttention cannot read such pages; None if it can."""
    head_dim = max(layer.head_dim for layer in pools.layers)
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


class FlashReader:
    """See Reader. Tables, as the kernel wants them, are made once a step."""

    def __init__(self, pools: KVPools) -> None:
        from flash_attn import flash_attn_varlen_func

        self._kernel: Any = flash_attn_varlen_func
        self._pools = pools

    def begin(self, step: StepView) -> None:
        """See Reader."""
        num_decodes = len(step.decode_positions)
        lengths = [1] * num_decodes + [chunk.num_tokens for chunk in step.chunks]
        ends = (step.decode_positions + 1).tolist() + [chunk.end for chunk in step.chunks]
        num_pages = [-(-end // self._pools.page_size) for end in ends]
        tables = np.zeros((len(ends), max(num_pages)), np.int32)
        width = min(tables.shape[1], step.decode_tables.shape[1])
        tables[:num_decodes, :width] = step.decode_tables[:, :width]
        for row, chunk in enumerate(step.chunks, num_decodes):
            tables[row, : num_pages[row]] = chunk.page_ids[: num_pages[row]]
        self._tables = step.tensor(tables)
        self._query_ends = step.tensor(np.cumsum([0, *lengths], dtype=np.int32))
        self._key_ends = step.tensor(np.cumsum([0, *ends], dtype=np.int32))
        self._most_queries = max(lengths)
        self._most_keys = max(ends)

    def read(self, layer: int, queries: torch.Tensor, way: Way) -> torch.Tensor:
        """See Reader."""
        if way.sinks is None:
            return self._call(layer, queries, way)
        out, log_sums, _ = self._call(layer, queries, way, return_attn_probs=True)
        return way.less_sinks(out, log_sums.transpose(0, 1))

    def _call(self, layer: int, queries: torch.Tensor, way: Way, **kwargs: Any) -> Any:
        return self._kernel(
            queries.contiguous(),
            self._pools.keys[layer],
            self._pools.values[layer],
            cu_seqlens_q=self._query_ends,
            cu_seqlens_k=self._key_ends,
            max_seqlen_q=self._most_queries,
            max_seqlen_k=self._most_keys,
            softmax_scale=way.scaling,
            causal=True,
            # To the left of a query itself.
            window_size=(-1, -1) if way.window is None else (way.window - 1, 0),
            softcap=way.softcap or 0.0,
            block_table=self._tables,
            **kwargs,
        )

"""What FlashAttention's package says its function computes, computed slowly on any device."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch


def flash_module() -> ModuleType:
    """A module `flash_attn` that has `flash_attn_varlen_func`."""
    module = ModuleType("flash_attn")
    module.__spec__ = ModuleSpec("flash_attn", None)  # transformers asks whether there is one
    module.flash_attn_varlen_func = _varlen  # type: ignore[attr-defined]
    return module


def _varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    block_table: torch.Tensor,
) -> Any:
    """`q` [tokens, heads, head_dim], `k` and `v` [pages, page_size, kv_heads, head_dim]."""
    for integers in (cu_seqlens_q, cu_seqlens_k, block_table):
        assert integers.dtype == torch.int32
    assert q.is_contiguous() and dropout_p == 0.0 and causal and alibi_slopes is None and not deterministic
    num_tokens, num_heads, head_dim = q.shape
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    share = num_heads // k.shape[2]
    out = torch.zeros_like(q)
    log_sums = torch.zeros(num_heads, num_tokens)
    lengths_q, lengths_k = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert max(lengths_q) == max_seqlen_q and max(lengths_k) == max_seqlen_k
    token = 0
    for row, (num_queries, num_keys) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        pages = block_table[row, : -(-num_keys // k.shape[1])].long()
        keys, values = (pool[pages].flatten(0, 1)[:num_keys].repeat_interleave(share, 1) for pool in (k, v))
        for query in range(num_queries):
            # The last query is as far on as the last key.
            place = query + num_keys - num_queries
            first = 0 if window_size[0] < 0 else max(0, place - window_size[0])
            scores = torch.einsum("hd,khd->hk", q[token], keys[first : place + 1]) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            log_sums[:, token] = torch.logsumexp(scores, -1)
            out[token] = torch.einsum("hk,khd->hd", scores.softmax(-1), values[first : place + 1])
            token += 1
    return (out, log_sums, None) if return_attn_probs else out

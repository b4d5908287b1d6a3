"""Paged attention for any decoder of transformers, through its AttentionInterface.

The function gets the packed queries, keys and values of a whole step, and a `StepView` by keyword. It writes keys and
values into the pools, and reads them back through the page tables: what a request computed before, what others left,
and what came from host memory look all the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from kvarts.executor.torch.step import ChunkView, DecodeGroup, StepView

__all__ = ["ATTENTION", "STEP", "paged_attention"]

ATTENTION = "kvarts_paged"
"""The name under which transformers finds it."""
STEP = "kvarts_step"
"""The keyword with which a model passes on its StepView."""


class _Way:
    """How one layer weighs what it looks back on."""

    __slots__ = ("scaling", "sinks", "softcap", "window")

    def __init__(self, scaling: float, window: int | None, softcap: float | None, sinks: torch.Tensor | None) -> None:
        self.scaling = scaling
        self.window = window
        self.softcap = softcap
        self.sinks = sinks


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`query` [1, heads, tokens, head_dim], `key` and `value` [1, kv_heads, tokens, head_dim]; the step masks.

    Returns [1, tokens, heads, head_dim].
    """
    step: StepView = kwargs[STEP]
    layer = int(module.layer_idx)
    keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    step.pools.keys_flat[layer].index_copy_(0, step.slots, keys)
    step.pools.values_flat[layer].index_copy_(0, step.slots, values)
    way = _Way(scaling or query.shape[-1] ** -0.5, sliding_window, softcap, s_aux)
    queries = query[0].transpose(0, 1)
    out = torch.empty_like(queries, memory_format=torch.contiguous_format)
    for group in step.decode_groups(sliding_window):
        out[group.places] = _decode(queries[group.places], group, step, layer, way)
    for chunk in step.chunks:
        out[chunk.first : chunk.last] = _chunk(queries[chunk.first : chunk.last], chunk, step, layer, way)
    return out[None], None


def _decode(queries: torch.Tensor, group: DecodeGroup, step: StepView, layer: int, way: _Way) -> torch.Tensor:
    """`queries` [sequences, heads, head_dim]; the heads that share a KV head are the rows of one small matrix."""
    num, num_heads, head_dim = queries.shape
    keys = step.pools.keys[layer][group.page_ids].flatten(1, 2).transpose(1, 2)
    values = step.pools.values[layer][group.page_ids].flatten(1, 2).transpose(1, 2)
    num_kv_heads = keys.shape[1]
    packed = queries.view(num, num_kv_heads, num_heads // num_kv_heads, head_dim)
    sinks = None if way.sinks is None else way.sinks.view(1, num_kv_heads, -1, 1)
    return _attend(packed, keys, values, group.visible, way, sinks).reshape(num, num_heads, head_dim)


def _chunk(queries: torch.Tensor, chunk: ChunkView, step: StepView, layer: int, way: _Way) -> torch.Tensor:
    """`queries` [tokens, heads, head_dim] of one sequence."""
    num, num_heads, head_dim = queries.shape
    page_size = step.pools.page_size
    end = chunk.start + num
    begin = 0 if way.window is None else max(0, chunk.start + 1 - way.window) // page_size * page_size
    page_ids = chunk.page_ids[begin // page_size : -(-end // page_size)]
    keys = step.pools.keys[layer][page_ids].flatten(0, 1)[: end - begin].transpose(0, 1)
    values = step.pools.values[layer][page_ids].flatten(0, 1)[: end - begin].transpose(0, 1)
    num_kv_heads = keys.shape[0]
    positions = torch.arange(chunk.start, end)[:, None]
    places = torch.arange(begin, end)[None, :]
    visible = places <= positions
    if way.window is not None:
        visible &= places > positions - way.window
    # [kv_heads, heads of each, tokens, head_dim]: as many batches as there are KV heads, each with its own keys.
    grouped = queries.transpose(0, 1).view(num_kv_heads, num_heads // num_kv_heads, num, head_dim)
    sinks = None if way.sinks is None else way.sinks.view(num_kv_heads, -1, 1, 1)
    attended = _attend(grouped, keys[:, None], values[:, None], visible, way, sinks)
    return attended.reshape(num_heads, num, head_dim).transpose(0, 1)


def _attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    way: _Way,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """`queries` [..., rows, head_dim], `keys` and `values` [..., places, head_dim], `visible` [..., rows, places].

    `sinks`, of a shape that goes with the scores: for each head, how much of its attention goes nowhere.
    """
    if way.softcap is None and sinks is None:
        shape = (*queries.shape[:2], *keys.shape[2:])
        return scaled_dot_product_attention(
            queries, keys.expand(shape), values.expand(shape), attn_mask=visible, scale=way.scaling
        )
    scores = (queries @ keys.transpose(-1, -2)) * way.scaling
    if way.softcap is not None:
        scores = torch.tanh(scores / way.softcap) * way.softcap
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is None:
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    else:
        # A sink is one more place to look at, where there is nothing to read.
        nowhere = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat((scores, nowhere), dim=-1), dim=-1, dtype=torch.float32)[..., :-1]
    return weights.to(queries.dtype) @ values


def _no_mask(*_: Any, **__: Any) -> None:
    """Transformers' own masks know one sequence a row; ours come from the step."""


AttentionInterface.register(ATTENTION, paged_attention)
AttentionMaskInterface.register(ATTENTION, _no_mask)

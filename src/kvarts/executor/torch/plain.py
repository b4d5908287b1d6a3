"""Attention by its definition, without pages: the reference that a model is compared with before it runs in pages."""

from __future__ import annotations

import torch

from kvarts.executor.torch.metadata import AttentionParams

__all__ = ["causal", "plain_attention"]


def causal(sequences: torch.Tensor, positions: torch.Tensor, window: int | None) -> torch.Tensor:
    """Return the tokens that each token attends to, as [tokens, tokens]: its sequence, up to its position.

    `sequences` [tokens]: the number of the sequence of each token; `positions` [tokens]: its position there.
    """
    distance = positions[:, None] - positions[None]
    seen = (sequences[:, None] == sequences[None]) & (distance >= 0)
    if window is not None:
        seen &= distance < window
    return seen


def plain_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams, seen: torch.Tensor
) -> torch.Tensor:
    """Return attention of `queries` [tokens, heads, head_dim] in float32; `seen` [tokens, tokens] includes the window.

    `keys` and `values` [tokens, kv_heads, head_dim].
    """
    each = queries.shape[1] // keys.shape[1]
    of_heads = [states.float().repeat_interleave(each, dim=1).transpose(0, 1) for states in (keys, values)]
    scores = queries.float().transpose(0, 1) @ of_heads[0].transpose(1, 2) * params.scaling
    if params.softcap is not None:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    scores = scores.masked_fill(~seen, float("-inf"))
    if params.sinks is not None:
        sinks = params.sinks.float().view(-1, 1, 1).expand(-1, len(seen), 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : len(seen)]
    return (weights @ of_heads[1]).transpose(0, 1)

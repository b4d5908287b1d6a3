"""Positions among retained tokens, by definition: every query and key is rotated for each pair that they make.

Shares no code with kvarts: transformers' own attention is replaced by loops over pairs.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

__all__ = ["late_greedy"]


def late_greedy(reference: Any, history: list[int], num_tokens: int, *, sink: int, window: int) -> list[int]:
    """Return the next `num_tokens` tokens. Of what p sees, the sink is at 0, 1, ..., the window follows, then p."""
    config = reference.config
    theta = config.rope_parameters["rope_theta"]

    def rotated(state: torch.Tensor, position: int) -> torch.Tensor:
        half = state.shape[-1] // 2
        angles = position / theta ** (torch.arange(half, dtype=torch.float32) / half)
        first, second = state[..., :half], state[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def attend(module: Any, query: Any, key: Any, value: Any, _: Any, scaling: float, **__: Any) -> Any:
        length, groups = query.shape[2], query.shape[1] // key.shape[1]
        out = torch.zeros_like(query)
        for p in range(length):
            seen = [q for q in range(p + 1) if q == p or q < sink or q >= p - window]
            for head in range(query.shape[1]):
                own = rotated(query[0, head, p], len(seen) - 1)
                keys = torch.stack([rotated(key[0, head // groups, q], place) for place, q in enumerate(seen)])
                weights = torch.softmax((keys @ own) * scaling, dim=-1)
                out[0, head, p] = weights @ value[0, head // groups, seen]
        return out.transpose(1, 2), None

    AttentionInterface.register("pair_by_pair", attend)
    before = config._attn_implementation
    config._attn_implementation = "pair_by_pair"
    try:
        tokens = list(history)
        for _ in range(num_tokens):
            with torch.no_grad():
                ids = torch.tensor([tokens])
                zeros = torch.zeros_like(ids)  # nothing is rotated before attention
                logits = reference(input_ids=ids, position_ids=zeros, use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    finally:
        config._attn_implementation = before
    return tokens[len(history) :]

"""Paged attention for any decoder of transformers, through its AttentionInterface.

The function gets the packed queries, keys and values of a whole step, and by keyword what the step is. It has them
written into the pools, and read back through the page tables: what a request computed before, what others left, and
what came from host memory look all the same.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from kvarts.executor.torch.step import Way

__all__ = ["ATTENTION", "STEP", "Step", "paged_attention"]

ATTENTION = "kvarts_paged"
"""The name under which transformers finds it."""
STEP = "kvarts_step"
"""The keyword with which a model passes on its Step."""


class Step(Protocol):
    """Whom a layer asks."""

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, way: Way
    ) -> torch.Tensor:
        """`queries` [tokens, heads, head_dim], `keys` and `values` [tokens, kv_heads, head_dim]; as `queries`."""


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
    step: Step = kwargs[STEP]
    way = Way(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    queries, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))
    return step.attend(int(module.layer_idx), queries, keys, values, way)[None], None


def _no_mask(*_: Any, **__: Any) -> None:
    """Transformers' own masks know one sequence a row; ours come from the step."""


AttentionInterface.register(ATTENTION, paged_attention)
AttentionMaskInterface.register(ATTENTION, _no_mask)

"""Paged attention for any decoder of transformers, through its AttentionInterface.

The function gets the packed queries, keys and values of a whole step, and by keyword the attention of the executor.
That writes keys and values into the pools, and has a backend attend through the page tables: pages that were computed
before, that other requests left, and that came back from a tier below all look the same.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from kvarts.executor.torch.metadata import AttentionBackend, AttentionMetadata, AttentionParams
from kvarts.executor.torch.pools import KVPools

__all__ = ["ATTENTION", "ATTENTION_KEYWORD", "Attention", "PagedAttention", "paged_attention"]

ATTENTION = "kvarts_paged"
"""The name under which transformers finds the function."""
ATTENTION_KEYWORD = "kvarts_attention"
"""The keyword with which a model passes an Attention on to its layers."""


class Attention(Protocol):
    """What a layer calls."""

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Return what `queries` [tokens, heads, head_dim] read, of the same shape.

        `keys` and `values` [tokens, kv_heads, head_dim] are those of the same tokens.
        """


class PagedAttention:
    """Attention over pages: keys and values go to their slots, then the backend reads."""

    def __init__(self, pools: KVPools, backend: AttentionBackend) -> None:
        self._pools = pools
        self._backend = backend
        self._slots = torch.empty(0, dtype=torch.long)

    @property
    def reads_sinks(self) -> bool:
        """Whether sequences may retain a sink and a window."""
        return self._backend.reads_sinks

    def begin(self, metadata: AttentionMetadata) -> None:
        """Prepare for the step that `metadata` describes."""
        self._slots = metadata.slots
        self._backend.begin(metadata)

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Write `keys` and `values`, unless another layer has written them, and return what `queries` read."""
        if self._pools.layers[layer].owner == layer:
            self._pools.keys_flat[layer].index_copy_(0, self._slots, keys)
            self._pools.values_flat[layer].index_copy_(0, self._slots, values)
        return self._backend.forward(layer, queries, params)


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
    """Return what a layer's queries read, as [1, tokens, heads, head_dim]; masks come from the metadata of the step.

    `query` [1, heads, tokens, head_dim], `key` and `value` [1, kv_heads, tokens, head_dim].
    """
    attention: Attention = kwargs[ATTENTION_KEYWORD]
    params = AttentionParams(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    queries, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))
    return attention.attend(int(module.layer_idx), queries, keys, values, params)[None], None


def _no_mask(*_: Any, **__: Any) -> None:
    """Make no mask: those of transformers know one sequence a row, and a step has many in one."""


AttentionInterface.register(ATTENTION, paged_attention)
AttentionMaskInterface.register(ATTENTION, _no_mask)

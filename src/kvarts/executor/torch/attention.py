"""Paged attention for any decoder of transformers, through its AttentionInterface.

transformers calls the function below wherever a model asks for attention, and the function hands the call to the
Attention of the thread, which `attending` sets for one forward pass: so nothing depends on which keywords a model
passes on to its layers. Calls are numbered in their order, and each has keys and values of its own: so nothing depends
on how a model names its layers, or on how often one of them attends.

PagedAttention writes keys and values into the pools, and has a backend attend through the page tables: pages that were
computed before, that other requests left, and that came back from a tier below all look the same.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec
import torch
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from kvarts.executor.torch.metadata import AttentionBackend, AttentionMetadata, AttentionParams
from kvarts.executor.torch.pools import KVPools

__all__ = ["ATTENTION", "Attention", "AttentionCall", "PagedAttention", "attending", "paged_attention"]

ATTENTION = "kvarts_paged"
"""The name under which transformers finds the function."""


class AttentionCall(msgspec.Struct):
    """What a model asks for, as transformers hands it over. `number`: of the call in its forward pass, from 0 on.

    `query` [1, heads, tokens, head_dim], `key` [1, kv_heads, tokens, head_dim], `value` [1, kv_heads, tokens, any].
    """

    number: int
    module: Any
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: Any
    keywords: dict[str, Any]

    def params(self, window: int | None) -> AttentionParams:
        """Return how the model wants to attend, by the keywords that are known, to the last `window` tokens or all."""
        of = self.keywords.get
        scaling = of("scaling")
        scaling = self.query.shape[-1] ** -0.5 if scaling is None else scaling
        return AttentionParams(scaling, window, of("softcap"), of("s_aux"))

    def packed(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values as [tokens, heads, head_dim] each.

        Where values have more or fewer numbers than keys, zeros are added: they change no score and no sum.
        """
        queries, keys, values = (states[0].transpose(0, 1) for states in (self.query, self.key, self.value))
        missing = values.shape[-1] - keys.shape[-1]
        if missing > 0:
            queries, keys = pad(queries, (0, missing)), pad(keys, (0, missing))
        elif missing < 0:
            values = pad(values, (0, -missing))
        return queries, keys, values


class Attention(Protocol):
    """What a model's layers call."""

    def called(self, call: AttentionCall) -> torch.Tensor:
        """Return what the queries read, as [tokens, heads, numbers of a value]."""

    def mask(self, **asked: Any) -> Any:
        """Return the mask that a model asks for, by the keywords of transformers' mask functions."""


class _Thread(threading.local):
    attention: Attention | None = None
    num_calls: int = 0


_thread = _Thread()


@contextmanager
def attending(attention: Attention) -> Iterator[None]:
    """Let models that run in this thread attend by `attention`, for one forward pass."""
    before = _thread.attention, _thread.num_calls
    _thread.attention, _thread.num_calls = attention, 0
    try:
        yield
    finally:
        _thread.attention, _thread.num_calls = before


class PagedAttention:
    """Attention over pages: keys and values go to their slots, then a backend reads.

    `tables`: by layer, the number of the page table that it reads by; unless given, there is one. `backends`: of each
    page table, its own.
    """

    def __init__(
        self, pools: KVPools, backends: Sequence[AttentionBackend], tables: Sequence[int] | None = None
    ) -> None:
        self._pools = pools
        self._backends = tuple(backends)
        self._tables = (0,) * len(pools.layers) if tables is None else tuple(tables)
        self._slots: list[torch.Tensor] = []

    @property
    def reads_sinks(self) -> bool:
        """Whether sequences may retain a sink and a window."""
        return all(backend.reads_sinks for backend in self._backends)

    def begin(self, every: Sequence[AttentionMetadata]) -> None:
        """Prepare for the step that `every` describes, page table by page table."""
        self._slots = [metadata.slots for metadata in every]
        for backend, metadata in zip(self._backends, every, strict=True):
            backend.begin(metadata)

    def called(self, call: AttentionCall) -> torch.Tensor:
        """Attend for a layer; how far back it sees is what was found when the model was examined."""
        params = call.params(self._pools.layers[call.number].window)
        return self.attend(call.number, *call.packed(), params)[..., : call.value.shape[-1]]

    def mask(self, **_: Any) -> None:
        """Make no mask: those of transformers know one sequence a row, and a step has many in one."""

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Write `keys` and `values`, unless another layer has written them, and return what `queries` read.

        `queries` [tokens, heads, head_dim], and of the same tokens `keys` and `values` [tokens, kv_heads, head_dim].
        """
        table = self._tables[layer]
        if self._pools.layers[layer].owner == layer:
            slots = self._slots[table]
            self._pools.keys_flat[layer].index_copy_(0, slots, keys)
            self._pools.values_flat[layer].index_copy_(0, slots, values)
        return self._backends[table].forward(layer, queries, params)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Return what a layer's queries read, as [1, tokens, heads, numbers of a value]."""
    attention = _thread.attention
    if attention is None:
        raise RuntimeError("a model that attends through pages runs in an LLM only; set another attention before this")
    number = _thread.num_calls
    _thread.num_calls += 1
    read = attention.called(AttentionCall(number, module, query, key, value, attention_mask, keywords))
    return read[None], None


def _mask(*_: Any, **asked: Any) -> Any:
    return None if _thread.attention is None else _thread.attention.mask(**asked)


AttentionInterface.register(ATTENTION, paged_attention)
AttentionMaskInterface.register(ATTENTION, _mask)

"""One step as a model's attention meets it: where each token's KV goes, and which pages each token looks back on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from kvarts.executor.torch.pools import KVPools

__all__ = ["ChunkView", "Reader", "StepView", "Way"]

Ints = npt.NDArray[np.int64]


class Way(msgspec.Struct, frozen=True):
    """How one layer weighs what it looks back on: the last `window` tokens, or all.

    `sinks` [heads]: for each head, how much of its attention goes nowhere.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def less_sinks(self, read: torch.Tensor, log_sums: torch.Tensor) -> torch.Tensor:
        """What is left of `read` [..., heads, head_dim], whose weights have the logarithms `log_sums` [..., heads].

        A sink is a place where there is nothing to read: it takes its share of what the others were given.
        """
        assert self.sinks is not None
        return read * torch.sigmoid(log_sums - self.sinks.float())[..., None].to(read.dtype)


class ChunkView(msgspec.Struct):
    """Tokens [first, last) of the batch are positions from `start` on of one sequence, whose pages are `page_ids`."""

    first: int
    last: int
    start: int
    page_ids: Ints

    @property
    def num_tokens(self) -> int:
        """Of the chunk."""
        return self.last - self.first

    @property
    def end(self) -> int:
        """The position after its last."""
        return self.start + self.num_tokens


class Reader(Protocol):
    """Attention over pages. What depends on the step, and not on the layer, is made once a step."""

    def begin(self, step: StepView) -> None:
        """What is read from now on is of that step."""

    def read(self, layer: int, queries: torch.Tensor, way: Way) -> torch.Tensor:
        """`queries` [tokens, heads, head_dim] of the whole batch; returns as many."""


class StepView:
    """What the attention of one step needs beside queries, keys and values.

    `slots` [tokens]: where in the pools each goes. Decodes are the first tokens of the batch, one a sequence:
    `decode_positions` has shape [decodes], `decode_tables` [decodes, pages]. `reader`: reads the pages.
    """

    def __init__(
        self,
        pools: KVPools,
        *,
        slots: Ints,
        chunks: Sequence[ChunkView],
        decode_positions: Ints,
        decode_tables: Ints,
        reader: Reader,
    ) -> None:
        self.device = pools.device
        self.chunks = chunks
        self.decode_positions = decode_positions
        self.decode_tables = decode_tables
        self._pools = pools
        self._slots = self.tensor(slots)
        self._reader = reader
        reader.begin(self)

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, way: Way
    ) -> torch.Tensor:
        """Writes `keys` and `values` [tokens, kv_heads, head_dim], unless another layer has; what `queries` read."""
        if self._pools.layers[layer].owner == layer:
            self._pools.keys_flat[layer].index_copy_(0, self._slots, keys)
            self._pools.values_flat[layer].index_copy_(0, self._slots, values)
        return self._reader.read(layer, queries, way)

    def decode_spans(self, window: int | None) -> tuple[Ints, Ints]:
        """For each decode, the places [begin, end) that it sees, with itself: the last `window`, or all."""
        ends = self.decode_positions + 1
        return np.zeros_like(ends) if window is None else np.maximum(0, ends - window), ends

    def tensor(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        """The same on the device of the batch."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

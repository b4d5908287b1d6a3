"""Input of attention for a step, other than queries, keys and values, and the protocol of attention backends."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from kvarts.executor.flat_batch import ChunkMetadata, DecodeMetadata, Ints

__all__ = [
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionParams",
    "ChunkMetadata",
    "DecodeMetadata",
    "Ints",
    "Rotary",
]


class AttentionParams(msgspec.Struct, frozen=True):
    """Parameters of one layer's attention: its scale, the last `window` tokens or all, and a soft cap on scores.

    `sinks` [heads]: the score of each head's attention sink, which takes some of the weight without having a value.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def less_sinks(self, attended: torch.Tensor, log_sums: torch.Tensor) -> torch.Tensor:
        """Return `attended` [..., heads, head_dim] without the share of the sinks.

        `log_sums` [..., heads] are the logarithms of the sums of exponentials of the scores without sinks.
        """
        assert self.sinks is not None
        return attended * torch.sigmoid(log_sums - self.sinks.float())[..., None].to(attended.dtype)


class Rotary(Protocol):
    """The rotation of a model's queries and keys by their positions."""

    def rotate(self, layer: int, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return `states` [tokens, heads, head_dim] as the layer rotates them at `positions` [tokens]."""


class AttentionMetadata:
    """Where each token of one step is written, and which pages it attends to.

    `slots` [tokens]: the slots in the pools for each token's keys and values. Decodes are the first tokens of the
    batch, one per sequence; chunks follow. `rotary`: for chunks with queries and keys that are not rotated yet.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        slots: Ints,
        chunks: Sequence[ChunkMetadata],
        decodes: DecodeMetadata,
        rotary: Rotary | None = None,
    ) -> None:
        self.device = device
        self.chunks = chunks
        self.decodes = decodes
        self.rotary = rotary
        self.slots = self.tensor(slots)

    @cached_property
    def decode_positions(self) -> torch.Tensor:
        """The positions of decodes, [tokens], in 32 bits."""
        return self.tensor(self.decodes.positions.astype(np.int32))

    @cached_property
    def decode_tables(self) -> torch.Tensor:
        """The page tables of decodes, [tokens, pages], in 32 bits."""
        return self.tensor(self.decodes.tables.astype(np.int32))

    @property
    def is_plain(self) -> bool:
        """Whether all sequences retain all tokens."""
        return self.decodes.is_plain and all(chunk.keeps is None for chunk in self.chunks)

    def tensor(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        """Return `values` as a tensor on the batch's device."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)


class AttentionBackend(Protocol):
    """Computes attention over pages. Everything that depends on the step but not on the layer is prepared once per
    step.
    """

    reads_sinks: bool
    """Whether it supports sequences that retain a sink and a window, with dropped pages between them."""

    def begin(self, metadata: AttentionMetadata) -> None:
        """Prepare for a step; every `forward` until the next `begin` belongs to it."""

    def forward(self, layer: int, queries: torch.Tensor, params: AttentionParams) -> torch.Tensor:
        """Return the attention output for `queries` [tokens, heads, head_dim] of the whole batch, of the same shape.

        Keys and values of these tokens are already in their pages.
        """

"""What attention needs to know about a step beside queries, keys and values, and the protocol of attention backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch

__all__ = ["AttentionBackend", "AttentionMetadata", "AttentionParams", "ChunkMetadata"]

Ints = npt.NDArray[np.int64]


class AttentionParams(msgspec.Struct, frozen=True):
    """How one layer attends: its scale, the last `window` tokens or all, and a soft cap on scores.

    `sinks` [heads]: the score of each head's attention sink, which takes a share of the weights and has no value.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def less_sinks(self, attended: torch.Tensor, log_sums: torch.Tensor) -> torch.Tensor:
        """Return `attended` [..., heads, head_dim] with the share of the sinks taken away.

        `log_sums` [..., heads] are the logarithms of the sums of exponentials of the scores without sinks.
        """
        assert self.sinks is not None
        return attended * torch.sigmoid(log_sums - self.sinks.float())[..., None].to(attended.dtype)


class ChunkMetadata(msgspec.Struct):
    """Tokens [first, last) of the batch: positions from `start` on of one sequence, with pages `page_ids`."""

    first: int
    last: int
    start: int
    page_ids: Ints

    @property
    def num_tokens(self) -> int:
        """Tokens of the chunk."""
        return self.last - self.first

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + self.num_tokens


class AttentionMetadata:
    """Where each token of one step is written, and which pages it attends to.

    `slots` [tokens]: where in the pools each token's keys and values go. Decodes are the first tokens of the batch, one
    a sequence: `decode_positions` has shape [decodes], `decode_tables` [decodes, pages]. Chunks follow.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        slots: Ints,
        chunks: Sequence[ChunkMetadata],
        decode_positions: Ints,
        decode_tables: Ints,
    ) -> None:
        self.device = device
        self.chunks = chunks
        self.decode_positions = decode_positions
        self.decode_tables = decode_tables
        self.slots = self.tensor(slots)

    def decode_spans(self, window: int | None) -> tuple[Ints, Ints]:
        """Return for each decode the positions [begin, end) that it attends to, its own included."""
        ends = self.decode_positions + 1
        return np.zeros_like(ends) if window is None else np.maximum(0, ends - window), ends

    def tensor(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        """Return `values` as a tensor on the device of the batch."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)


class AttentionBackend(Protocol):
    """Computes attention over pages. What depends on the step, and not on the layer, is prepared once a step."""

    def begin(self, metadata: AttentionMetadata) -> None:
        """Prepare for a step; every `forward` until the next `begin` belongs to it."""

    def forward(self, layer: int, queries: torch.Tensor, params: AttentionParams) -> torch.Tensor:
        """Return the attention output for `queries` [tokens, heads, head_dim] of the whole batch, of the same shape.

        Keys and values of these tokens are already in their pages.
        """

"""CUDA graphs of steps that only decode: one launch for a forward pass, in place of a thousand.

A graph replays kernels on the memory that they had when it was captured. So every input of a step has a place of its
own, in which the next step of the same size writes its values:

    step                       place                           captured kernels
    tokens      [7 3 9]   ->   tokens    [7 3 9 7]        ->   embed ... attend through tables ... logits
    positions   [4 8 2]   ->   positions [4 8 2 4]             (graph of 4 sequences)
    slots, tables         ->   slots, tables

There is a graph for some numbers of sequences only. The rows that a step lacks repeat its first one: they write the
same keys and values to the same slot once more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from kvarts.run.flat_batch import FlatBatch
from kvarts.run.torch.attention import AttentionMetadata, DecodeMetadata

__all__ = ["DecodeGraphs", "graph_sizes"]

logger = logging.getLogger(__name__)

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Returns the logits at the given places, the last argument, from tokens and positions."""
NUM_WARM_UPS = 2
"""Passes before a capture, in which libraries take their memory and kernels are compiled."""


def graph_sizes(most: int) -> list[int]:
    """Return the numbers of sequences that have a graph: the last is `most`."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, most + 32, 32)]
    return [*(size for size in sizes if size < most), most]


@cache
def _stream(device: torch.device) -> Any:
    """Return the stream of all captures on a device: libraries keep memory for each stream that ever ran on it."""
    return torch.cuda.Stream(device)


class _Held(AttentionMetadata):
    """Attention metadata of decodes whose tensors are places of a graph."""

    def __init__(self, decodes: DecodeMetadata, slots: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor):
        self.device = slots.device
        self.chunks = ()
        self.decodes = decodes
        self.rotary = None
        self.slots = slots
        self.decode_positions = positions
        self.decode_tables = tables


class _Graph(msgspec.Struct):
    """A captured step. `forward`: keeps what its kernels read."""

    graph: Any
    forward: Forward


class DecodeGraphs:
    """Graphs of a model's decodes, each captured when its number of sequences first occurs.

    `open_forward` returns the forward pass of a step with the given metadata, one entry per page table; its attention
    backends are its own. `num_pages`: the most pages of each page table; `most`: the most sequences. A model with a
    step that cannot be captured runs without graphs, which is logged once.
    """

    def __init__(
        self,
        open_forward: Callable[[Sequence[AttentionMetadata]], Forward],
        device: torch.device,
        *,
        most: int,
        num_pages: Sequence[int],
    ) -> None:
        self._open_forward = open_forward
        self._device = device
        self._sizes = graph_sizes(most)
        self._graphs: dict[int, _Graph] = {}
        self._pool: Any = None
        self._logits: torch.Tensor | None = None
        self.reason: str | None = None
        """Why there are no graphs any more; None while there are."""

        def place(*shape: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._tokens, self._positions = place(most), place(most)
        self._slots = [place(most) for _ in num_pages]
        self._starts = place(most, dtype=torch.int32)
        self._tables = [place(most, count, dtype=torch.int32) for count in num_pages]
        self._where = torch.arange(most, device=device)

    def logits(self, batch: FlatBatch) -> torch.Tensor | None:
        """Return the logits of each token of `batch`; None if it is not a step of decodes that each sample a token.

        They are overwritten by the next step.
        """
        count = len(batch.tokens)
        if self.reason is not None or count > self._sizes[-1] or batch.sampled_at != list(range(count)):
            return None
        if any(table.chunks or not table.decodes.is_plain for table in batch.tables):
            return None
        size = next(size for size in self._sizes if size >= count)
        self._fill(batch, size)
        if size not in self._graphs:
            captured = self._capture(size)
            if captured is None:
                return None
            self._graphs[size] = captured
        self._graphs[size].graph.replay()
        assert self._logits is not None
        return self._logits[:count]

    def _fill(self, batch: FlatBatch, size: int) -> None:
        """Write the inputs of a step of `size` rows."""
        self._write(self._tokens, batch.tokens, size)
        self._write(self._positions, batch.rotated_positions, size)
        self._write(self._starts, batch.tables[0].decodes.positions, size)
        for slots, tables, table in zip(self._slots, self._tables, batch.tables, strict=True):
            self._write(slots, table.slots, size)
            width = min(table.decodes.tables.shape[1], tables.shape[1])
            self._write(tables[:, :width], table.decodes.tables[:, :width], size)

    def _write(self, place: torch.Tensor, values: npt.NDArray[np.int64], size: int) -> None:
        missing = size - len(values)
        rows = np.concatenate((values, np.repeat(values[:1], missing, axis=0))) if missing else values
        place[:size].copy_(torch.from_numpy(np.ascontiguousarray(rows)))

    def _capture(self, size: int) -> _Graph | None:
        """Capture a step of `size` sequences, whose inputs are in their places."""
        zeros = np.zeros(size, np.int64)
        held = [
            _Held(DecodeMetadata.plain(zeros, zeros[:, None]), slots[:size], self._starts[:size], tables[:size])
            for slots, tables in zip(self._slots, self._tables, strict=True)
        ]
        inputs = self._tokens[:size], self._positions[:size], self._where[:size]
        try:
            forward = self._open_forward(held)
            stream = _stream(self._device)
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                for _ in range(NUM_WARM_UPS):
                    logits = forward(*inputs)
            torch.cuda.current_stream(self._device).wait_stream(stream)
            if self._logits is None:
                self._logits = torch.empty(
                    (self._sizes[-1], logits.shape[-1]), dtype=logits.dtype, device=logits.device
                )
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                self._logits[:size].copy_(forward(*inputs))
        except RuntimeError as error:
            self.reason = str(error).strip().partition("\n")[0]
            self._graphs.clear()
            logger.info("decodes run without CUDA graphs: %s", self.reason)
            return None
        self._pool = graph.pool()
        return _Graph(graph, forward)

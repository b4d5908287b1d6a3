"""States in the memory of a model's KV: each occupies the bytes of some blocks, which layers with states read and
write.

A block is one row of every KV tensor. The bytes of a state are those of its blocks in the first tensor, in order, then
those in the second, and so on; they hold the states of all layers one after the other. The rest of the last blocks is
unused.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from kvarts.executor.state_tables import StateBatch
from kvarts.executor.torch.pools import KVPools
from kvarts.executor.torch.states import StateCall, StateShape

__all__ = ["PagedStates", "StateMemory"]


WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""Word types for copying states, the longest first."""


class _Piece(msgspec.Struct, frozen=True):
    """Some bytes of every block, in one tensor, which are a part of the blocks [first, last) of a state.

    `memory` [blocks, words]: these bytes, as the longest words that divide them, since copying a byte is as slow as
    copying a word.
    """

    memory: torch.Tensor
    first: int
    last: int

    @classmethod
    def of(cls, rows: torch.Tensor, first: int, last: int, start: int, stop: int) -> _Piece:
        """Return bytes [start, stop) of `rows` [blocks, bytes]."""
        word = next(word for word in WORDS if not any(at % word.itemsize for at in (rows.shape[1], start, stop)))
        return cls(rows.view(word)[:, start // word.itemsize : stop // word.itemsize], first, last)

    @property
    def num_bytes(self) -> int:
        """Its bytes per state."""
        return (self.last - self.first) * int(self.memory.shape[1]) * int(self.memory.dtype.itemsize)

    def read(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the bytes of states in `blocks` [states, blocks], as [states, bytes]."""
        rows = blocks[:, self.first : self.last].reshape(-1)
        return self.memory.index_select(0, rows).view(torch.uint8).view(len(blocks), -1)

    def write(self, blocks: torch.Tensor, written: torch.Tensor) -> None:
        """Write the bytes of states, as `read` returns them."""
        rows = blocks[:, self.first : self.last].reshape(-1)
        each = written.reshape(len(rows), -1)
        if each.storage_offset() % self.memory.dtype.itemsize:
            each = each.clone()
        self.memory.index_copy_(0, rows, each.contiguous().view(self.memory.dtype))


class StateMemory:
    """The states of layers with `shapes` in `tensors`, where a row is a block; a state has `num_blocks` blocks."""

    def __init__(self, tensors: Sequence[torch.Tensor], shapes: Sequence[StateShape], num_blocks: int) -> None:
        self.shapes = tuple(shapes)
        self._rows = [tensor.flatten(1).view(torch.uint8) for tensor in tensors]
        self._num_blocks = num_blocks
        assert sum(shape.num_bytes for shape in shapes) <= num_blocks * sum(rows.shape[1] for rows in self._rows)
        self._pieces: list[list[list[_Piece]]] = []
        """Per layer, and per tensor of its state."""
        at = 0
        for shape in shapes:
            self._pieces.append([])
            for tensor in shape.tensors:
                self._pieces[-1].append(self._cut(at, at + tensor.num_bytes))
                at += tensor.num_bytes

    def _cut(self, begin: int, end: int) -> list[_Piece]:
        """Return the pieces that contain bytes [begin, end) of a state."""
        pieces = []
        base = 0
        for rows in self._rows:
            size = rows.shape[1]
            at, stop = max(0, begin - base), min(self._num_blocks * size, end - base)
            while at < stop:
                block, place = divmod(at, size)
                last = stop // size
                if place == 0 and last > block:
                    pieces.append(_Piece.of(rows, block, last, 0, size))
                    at = last * size
                else:
                    until = min(size, place + stop - at)
                    pieces.append(_Piece.of(rows, block, block + 1, place, until))
                    at += until - place
            base += self._num_blocks * size
        return pieces

    def read(self, number: int, blocks: torch.Tensor) -> list[torch.Tensor]:
        """Return copies of the states of layer `number` in `blocks` [states, blocks], tensor by tensor."""
        states = []
        for tensor, pieces in zip(self.shapes[number].tensors, self._pieces[number], strict=True):
            read = [piece.read(blocks) for piece in pieces]
            together = read[0] if len(read) == 1 else torch.cat(read, dim=1)
            states.append(together.view(tensor.dtype).view(len(blocks), *tensor.shape))
        return states

    def write(self, number: int, blocks: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        """Write the states of layer `number` to `blocks` [states, blocks], in the form that `read` returns."""
        for one, pieces in zip(states, self._pieces[number], strict=True):
            written = one.reshape(len(blocks), -1).contiguous().view(torch.uint8)
            at = 0
            for piece in pieces:
                piece.write(blocks, written[:, at : at + piece.num_bytes])
                at += piece.num_bytes


class PagedStates:
    """States of the sequences of a step: layers start from the blocks that the plan names, and write theirs there."""

    def __init__(self, pools: KVPools, shapes: Sequence[StateShape], num_blocks: int) -> None:
        self.memory = StateMemory(pools.tensors, shapes, num_blocks)
        self._device = pools.device
        self._decodes = torch.empty((0, num_blocks), dtype=torch.long)
        self._chunks: list[tuple[int, torch.Tensor | None, list[tuple[int, torch.Tensor]]]] = []

    def begin(self, batch: StateBatch) -> None:
        """Prepare for the step that `batch` describes."""
        self._decodes = torch.from_numpy(batch.blocks).to(self._device)
        self._chunks = []
        for chunk in batch.chunks:
            begins_from = chunk.begins_from
            before = None if begins_from is None else torch.from_numpy(begins_from).to(self._device)[None]
            leaves = [(at, torch.from_numpy(blocks).to(self._device)[None]) for at, blocks in chunk.leaves]
            self._chunks.append((chunk.first, before, leaves))

    def state_called(self, call: StateCall) -> torch.Tensor:
        """Run a layer: all decodes together, then one chunk after the other."""
        number, hidden, memory = call.number, call.hidden, self.memory
        shape = memory.shapes[number]
        made = []
        num_decodes = len(self._decodes)
        if num_decodes:
            read, states = call.run(shape, hidden[0, :num_decodes, None], memory.read(number, self._decodes))
            memory.write(number, self._decodes, states)
            made.append(read[:, 0])
        for first, before, leaves in self._chunks:
            at = first
            kept = None if before is None else memory.read(number, before)
            for last, blocks in leaves:
                if last > at:
                    read, kept = call.run(shape, hidden[:, at:last], kept)
                    made.append(read[0])
                    at = last
                assert kept is not None
                memory.write(number, blocks, kept)
        return torch.cat(made)[None]

"""The states of a step: the blocks that each sequence starts from, and those that its states are written to."""

from __future__ import annotations

import msgspec
import numpy as np

from kvarts.executor.flat_batch import Ints
from kvarts.sched.plan import Snapshot, StepPlan

__all__ = ["StateBatch", "StateChunk", "StateTables"]


class StateChunk(msgspec.Struct, frozen=True):
    """Tokens [first, last) of the batch, all of one sequence.

    `begins_from`: the blocks of the state before them, None at the start of the sequence. `leaves`: the points at which
    the state is written, in order: the batch index up to which it covers tokens, and its blocks. The last is the
    sequence's state at `last`; those before it are snapshots.
    """

    first: int
    last: int
    begins_from: Ints | None
    leaves: tuple[tuple[int, Ints], ...]


class StateBatch(msgspec.Struct, frozen=True):
    """The states of a step: decodes, with the `blocks` [decodes, blocks per state], then chunks.

    Chunks are in order: one may begin from a state that an earlier one leaves.
    """

    blocks: Ints
    chunks: tuple[StateChunk, ...]


class StateTables:
    """Owner of the blocks of the state of each row."""

    def __init__(self, max_num_seqs: int, num_blocks: int) -> None:
        self._blocks = np.zeros((max_num_seqs, num_blocks), np.int64)

    def batch(self, plan: StepPlan) -> StateBatch:
        """Record the plan's changes, and return the states of the step."""
        rows = np.zeros(0, np.int64) if plan.decodes is None else plan.decodes.rows
        decodes = self._blocks[rows]
        num_tokens = len(rows)
        snapshots: dict[int, list[Snapshot]] = {}
        for snapshot in plan.snapshots:
            snapshots.setdefault(snapshot.row, []).append(snapshot)
        chunks: list[StateChunk] = []
        for chunk in plan.batch.chunks:
            state = np.array(chunk.state, np.int64)
            self._blocks[chunk.row] = state
            last = num_tokens + chunk.num_tokens
            leaves = [
                (num_tokens + snapshot.num_tokens - chunk.start, np.array(snapshot.blocks, np.int64))
                for snapshot in snapshots.get(chunk.row, ())
            ]
            leaves.append((last, state))
            begins_from = np.array(chunk.begins_from, np.int64) if chunk.begins_from else None
            chunks.append(StateChunk(num_tokens, last, begins_from, tuple(leaves)))
            num_tokens = last
        return StateBatch(decodes, tuple(chunks))

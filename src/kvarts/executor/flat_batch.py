"""The tokens of a step in one row: where each is written, and what each sequence reads.

See `kvarts.executor.page_tables` for the place of a token in a page table, and its gap.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.kv.sink_window import SinkWindow

__all__ = ["ALL", "ChunkMetadata", "DecodeMetadata", "FlatBatch", "Ints", "TableBatch"]

Ints = npt.NDArray[np.int64]

ALL = 1 << 62
"""The window of a sequence that retains all tokens."""


class ChunkMetadata(msgspec.Struct):
    """Tokens [first, last) of the batch: positions from `start` on of one sequence, with pages `page_ids`.

    `keeps`: what the sequence retains, None for all. `gap`: tokens of pages that were dropped after those of the sink,
    which hold the first `num_before_gap` tokens. `num_prompt_tokens`: of the sequence.
    """

    first: int
    last: int
    start: int
    page_ids: Ints
    keeps: SinkWindow | None = None
    gap: int = 0
    num_prompt_tokens: int = 0
    num_before_gap: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the chunk."""
        return self.last - self.first

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + self.num_tokens


class DecodeMetadata(msgspec.Struct):
    """The first tokens of the batch, each with the pages of its sequence: decodes, then drafted tokens.

    A drafted token reads what is before it in these pages, tokens of this step included. All arrays but `tables`
    [tokens, pages] have shape [tokens]. `sinks` and `windows`: what each sequence retains. `gaps`: tokens of pages that
    were dropped. `prompts`: the tokens of each prompt.
    """

    positions: Ints
    tables: Ints
    sinks: Ints
    windows: Ints
    gaps: Ints
    prompts: Ints

    @classmethod
    def plain(cls, positions: Ints, tables: Ints) -> DecodeMetadata:
        """Return the decodes of sequences that retain all tokens."""
        zeros = np.zeros_like(positions)
        return cls(positions, tables, zeros, np.full_like(positions, ALL), zeros, zeros)

    @property
    def is_plain(self) -> bool:
        """Whether all sequences retain all tokens."""
        return bool((self.windows == ALL).all())

    def spans(self, window: int | None) -> tuple[Ints, Ints]:
        """Return for each decode the places [begin, end) that it attends to, its own included, and not its sink.

        `window`: the last tokens that the layer attends to, or None for all.
        """
        begins = np.maximum(0, self.positions - self.windows)
        if window is not None:
            begins = np.maximum(begins, self.positions + 1 - window)
        begins = np.maximum(begins, np.minimum(self.sinks, self.positions))
        return begins - self.gaps, self.positions + 1 - self.gaps

    def sink_spans(self, window: int | None) -> tuple[Ints, Ints]:
        """Return for each decode the places [begin, end) of its sink that it attends to; most often none."""
        ends = np.minimum(self.sinks, self.positions)
        begins = np.zeros_like(ends) if window is None else np.maximum(0, self.positions + 1 - window)
        return np.minimum(begins, ends), ends


class TableBatch(msgspec.Struct):
    """A step as the layers of one page table see it.

    `slots` [tokens]: where each token's keys and values go: its page's id times the page size, and its place in it.
    """

    slots: Ints
    decodes: DecodeMetadata
    chunks: list[ChunkMetadata]


class FlatBatch(msgspec.Struct):
    """The tokens of a step: decodes, drafted ones, then chunks. `tokens` and `positions` have shape [tokens].

    `tables`: the step for each page table that layers read. `block_slots` [blocks of a page, tokens]: where each token
    is in each block of its page. `sampled_rows`: rows that sample a token; `requests`: the index of each. `sampled_at`:
    the tokens after which one is sampled: of each of these rows the last, and before the drafted ones of a row the one
    that its decode computes. `drafts`: the drafted tokens of each of these rows; empty if there are none in the step.
    """

    tokens: Ints
    positions: Ints
    tables: list[TableBatch]
    block_slots: Ints
    sampled_rows: list[int]
    sampled_at: list[int]
    requests: list[int]
    drafts: list[list[int]] = []

    @property
    def rotated_positions(self) -> Ints:
        """The positions by which queries and keys are rotated before attention: 0 for those that are rotated in it."""
        chunks = self.tables[0].chunks
        if all(chunk.keeps is None or not chunk.keeps.rotates_late for chunk in chunks):
            return self.positions
        positions = self.positions.copy()
        for chunk in chunks:
            if chunk.keeps is not None and chunk.keeps.rotates_late:
                positions[chunk.first : chunk.last] = 0
        return positions

"""The tokens of a step, flattened: the slot each is written to, and the pages each sequence reads.

`kvarts.executor.page_tables` defines the place of a token in a page table, and its gap.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.kv.groups import SinkWindow

__all__ = ["ALL", "ChunkMetadata", "DecodeMetadata", "FlatBatch", "Ints", "Observed", "TableBatch"]

Ints = npt.NDArray[np.int64]

ALL = 1 << 62
"""The value of `windows` for a sequence that retains all tokens."""


class ChunkMetadata(msgspec.Struct):
    """Tokens [first, last) of the batch: positions from `start` on of one sequence, with pages `page_ids`.

    `keeps`: the tokens that the sequence retains, None for all. `gap`: the number of tokens in pages that were dropped
    after the sink's pages, which hold the first `num_before_gap` tokens. `num_prompt_tokens`: the length of the
    sequence's prompt.
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
        """Number of tokens in the chunk."""
        return self.last - self.first

    @property
    def end(self) -> int:
        """The position after the chunk's last token."""
        return self.start + self.num_tokens


class DecodeMetadata(msgspec.Struct):
    """The first tokens of the batch, each with the pages of its sequence: decodes, then drafted tokens.

    A drafted token attends to the tokens before it in these pages, including those of this step. All arrays but
    `tables` [tokens, pages] have shape [tokens]. `sinks` and `windows`: the sizes that each sequence retains. `gaps`:
    the number of tokens in dropped pages. `prompts`: the length of each prompt.
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
        """Return, per decode, the places [begin, end) that it attends to, including its own and excluding its sink.

        `window`: the last tokens that the layer attends to, or None for all.
        """
        begins = np.maximum(0, self.positions - self.windows)
        if window is not None:
            begins = np.maximum(begins, self.positions + 1 - window)
        # A sink of whole pages has no dropped tokens in it, so that it ends at the same place as position.
        begins = np.maximum(begins - self.gaps, np.minimum(self.sinks, self.positions))
        return begins, self.positions + 1 - self.gaps

    def sink_spans(self, window: int | None) -> tuple[Ints, Ints]:
        """Return, per decode, the places [begin, end) of its sink that it attends to; usually empty."""
        ends = np.minimum(self.sinks, self.positions)
        begins = np.zeros_like(ends) if window is None else np.maximum(0, self.positions + 1 - window)
        return np.minimum(begins, ends), ends


class TableBatch(msgspec.Struct):
    """A step as seen by the layers that read one page table.

    `slots` [tokens]: where each token's keys and values are written: page id times page size, plus the offset in the
    page.
    """

    slots: Ints
    decodes: DecodeMetadata
    chunks: list[ChunkMetadata]


class Observed(msgspec.Struct):
    """Tokens [start, end) of a sequence in this step. The attention of some is scored: [first, last) of the batch.

    `places`: of these tokens, in the sequence's page table. `page_ids`: the pages up to that of the last token.
    """

    row: int
    start: int
    end: int
    first: int
    last: int
    places: Ints
    page_ids: Ints


class FlatBatch(msgspec.Struct):
    """The tokens of a step: decodes, drafted tokens, then chunks. `tokens` and `positions` have shape [tokens].

    `tables`: the step for each page table that layers read. `block_slots` [blocks per page, tokens]: the slot of each
    token in each block of its page. `sampled_rows`: the rows that sample a token; `requests`: their request indexes.
    `sampled_at`: the tokens after which one is sampled: the last of each of these rows, and for a row with drafts also
    its decode's token and each earlier drafted one. `drafts`: the drafted tokens of each of these rows; empty if the
    step has none. `observed`: the sequences that keep pages by the attention that these receive.
    """

    tokens: Ints
    positions: Ints
    tables: list[TableBatch]
    block_slots: Ints
    sampled_rows: list[int]
    sampled_at: list[int]
    requests: list[int]
    drafts: list[list[int]] = []
    observed: list[Observed] = []

    @property
    def rotated_positions(self) -> Ints:
        """The positions by which queries and keys are rotated before attention; 0 for tokens rotated during
        attention.
        """
        chunks = self.tables[0].chunks
        if all(chunk.keeps is None or not chunk.keeps.rotates_late for chunk in chunks):
            return self.positions
        positions = self.positions.copy()
        for chunk in chunks:
            if chunk.keeps is not None and chunk.keeps.rotates_late:
                positions[chunk.first : chunk.last] = 0
        return positions

"""The tokens of a step in one row: where each is written, and what each sequence reads.

Page tables have one row for each running request. A sequence that has dropped pages has a table without them, so the
*place* of a token in its table is its position less the tokens of dropped pages, its *gap*.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.kv.sink_window import SinkWindow
from kvarts.sched.plan import Chunk, DecodeRows, DraftRows, StepPlan

__all__ = ["ChunkMetadata", "DecodeMetadata", "FlatBatch", "Ints", "RowTables", "TableBatch", "with_drafts"]

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
    """A step as the layers of one page table see it. `slots` [tokens]: where each token's keys and values go."""

    slots: Ints
    decodes: DecodeMetadata
    chunks: list[ChunkMetadata]


class FlatBatch(msgspec.Struct):
    """The tokens of a step: decodes, drafted ones, then chunks. `tokens`, `positions` and `slots` have shape [tokens].

    `slots`: where each token's keys and values go: its page's id times the page size, and its place in the page.
    `sampled_rows`: rows that sample a token; `requests`: the index of each. `sampled_at`: the tokens after which one is
    sampled: of each of these rows the last, and before the drafted ones of a row the one that its decode computes.
    `drafts`: the drafted tokens of each of these rows; empty if there are none in the step. `tables`: of a model with
    KV groups, the step for each page table, the first of which is the one said here; `block_slots`: where each token is
    in each block of its page, [blocks, tokens].
    """

    tokens: Ints
    positions: Ints
    slots: Ints
    decodes: DecodeMetadata
    chunks: list[ChunkMetadata]
    sampled_rows: list[int]
    sampled_at: list[int]
    requests: list[int]
    drafts: list[list[int]] = []
    tables: list[TableBatch] = []
    block_slots: Ints | None = None

    @property
    def rotated_positions(self) -> Ints:
        """The positions by which queries and keys are rotated before attention: 0 for those that are rotated in it."""
        if all(chunk.keeps is None or not chunk.keeps.rotates_late for chunk in self.chunks):
            return self.positions
        positions = self.positions.copy()
        for chunk in self.chunks:
            if chunk.keeps is not None and chunk.keeps.rotates_late:
                positions[chunk.first : chunk.last] = 0
        return positions


class RowTables:
    """Owner of the page table of each row, of what its sequence retains, and of the request that has it.

    Decodes of sequences that rotate keys late come as chunks of one token.
    """

    def __init__(self, max_num_seqs: int, page_size: int) -> None:
        self._page_size = page_size
        self._tables = np.zeros((max_num_seqs, 16), np.int64)
        self._requests = np.full(max_num_seqs, -1, np.int64)
        self._keeps: list[SinkWindow | None] = [None] * max_num_seqs
        self._sinks = np.zeros(max_num_seqs, np.int64)
        self._windows = np.full(max_num_seqs, ALL, np.int64)
        self._gaps = np.zeros(max_num_seqs, np.int64)
        self._prompts = np.zeros(max_num_seqs, np.int64)
        self._is_late = np.zeros(max_num_seqs, np.bool_)

    def flatten(self, plan: StepPlan) -> FlatBatch | None:
        """Note what changed, and return the tokens of the step; None if there are none."""
        tokens: list[npt.NDArray[Any]] = []
        positions: list[Ints] = []
        slots: list[Ints] = []
        sampled_rows: list[int] = []
        sampled_at: list[int] = []
        chunks: list[ChunkMetadata] = []
        nothing = np.zeros(0, np.int64)
        decodes = DecodeMetadata.plain(nothing, np.zeros((0, 1), np.int64))
        num_tokens = 0
        drafts: list[list[int]] = []
        if plan.decodes is not None:
            rows, late = self._take_changes(plan.decodes)
            where, own = plan.decodes.positions, plan.decodes.tokens
            if late is not None:
                where, own = where[~late], own[~late]
            sampled_rows += rows.tolist()
            if plan.drafts is None:
                sampled_at += range(len(rows))
            else:
                drafts, sampled_at = with_drafts(sampled_rows, plan.drafts)
                rows = np.concatenate((rows, plan.drafts.rows))
                where, own = np.concatenate((where, plan.drafts.positions)), np.concatenate((own, plan.drafts.tokens))
            decodes = self._decodes(rows, where)
            tokens.append(own)
            positions.append(decodes.positions)
            slots.append(self._slots(decodes.tables, decodes.positions - decodes.gaps))
            num_tokens = len(rows)
            if late is not None:
                for at in np.flatnonzero(late).tolist():
                    row, position = int(plan.decodes.rows[at]), int(plan.decodes.positions[at])
                    chunks.append(self._late_decode(row, position, num_tokens))
                    tokens.append(plan.decodes.tokens[at : at + 1])
                    positions.append(plan.decodes.positions[at : at + 1])
                    slots.append(self._slots(chunks[-1].page_ids[None], positions[-1] - chunks[-1].gap))
                    sampled_rows.append(row)
                    sampled_at.append(num_tokens)
                    num_tokens += 1
        for chunk in plan.batch.chunks:
            page_ids, gap = self._enter(chunk)
            where = np.arange(chunk.start, chunk.end)
            tokens.append(chunk.tokens)
            positions.append(where)
            places = where - gap
            slots.append(page_ids[places // self._page_size] * self._page_size + places % self._page_size)
            last = num_tokens + len(where)
            before = self._num_before_gap(chunk.keeps)
            chunks.append(
                ChunkMetadata(
                    num_tokens, last, chunk.start, page_ids, chunk.keeps, gap, chunk.num_prompt_tokens, before
                )
            )
            num_tokens += len(where)
            if chunk.is_last:
                sampled_rows.append(chunk.row)
                sampled_at.append(num_tokens - 1)
        if not num_tokens:
            return None
        return FlatBatch(
            np.concatenate(tokens).astype(np.int64),
            np.concatenate(positions),
            np.concatenate(slots),
            decodes,
            chunks,
            sampled_rows,
            sampled_at,
            self._requests[sampled_rows].tolist(),
            drafts + [[] for _ in sampled_rows[len(drafts) :]] if drafts else [],
        )

    def _take_changes(self, decodes: DecodeRows) -> tuple[Ints, npt.NDArray[np.bool_] | None]:
        """Bring tables up to date. Return the rows that decode, and which decodes are late ones, if any."""
        for row, index, page_id in decodes.new_pages:
            self._reserve(index + 1)
            self._tables[row, index] = page_id
        for row, page_ids, num_dropped in decodes.new_tables:
            self._reserve(len(page_ids))
            self._tables[row, : len(page_ids)] = page_ids
            self._gaps[row] = num_dropped * self._page_size
        late = self._is_late[decodes.rows]
        return (decodes.rows[~late], late) if late.any() else (decodes.rows, None)

    def _decodes(self, rows: Ints, positions: Ints) -> DecodeMetadata:
        gaps = self._gaps[rows]
        most = int((positions - gaps).max()) // self._page_size + 1 if len(rows) else 1
        tables, sinks, windows = self._tables[rows, :most], self._sinks[rows], self._windows[rows]
        return DecodeMetadata(positions, tables, sinks, windows, gaps, self._prompts[rows])

    def _late_decode(self, row: int, position: int, first: int) -> ChunkMetadata:
        gap = int(self._gaps[row])
        num_pages = (position - gap) // self._page_size + 1
        page_ids, keeps = self._tables[row, :num_pages], self._keeps[row]
        before = self._num_before_gap(keeps)
        return ChunkMetadata(first, first + 1, position, page_ids, keeps, gap, int(self._prompts[row]), before)

    def _num_before_gap(self, keeps: SinkWindow | None) -> int:
        """Return the tokens of the pages of a sink."""
        return 0 if keeps is None else keeps.num_sink_pages(self._page_size) * self._page_size

    def _enter(self, chunk: Chunk) -> tuple[Ints, int]:
        """Give a row the pages of a chunk; return these, and the gap."""
        assert chunk.page_ids is not None
        page_ids = np.array(chunk.page_ids, np.int64)
        row, keeps, gap = chunk.row, chunk.keeps, chunk.num_dropped * self._page_size
        self._reserve(len(page_ids))
        self._tables[row, : len(page_ids)] = page_ids
        self._requests[row] = chunk.request_index
        self._keeps[row] = keeps
        self._gaps[row] = gap
        self._prompts[row] = chunk.num_prompt_tokens
        self._sinks[row] = 0 if keeps is None else keeps.sink
        self._windows[row] = ALL if keeps is None else keeps.window
        self._is_late[row] = keeps is not None and keeps.rotates_late
        return page_ids, gap

    def _slots(self, tables: Ints, places: Ints) -> Ints:
        """Return the slot of one place of each table."""
        size = self._page_size
        return tables[np.arange(len(places)), places // size] * size + places % size

    def _reserve(self, num_pages: int) -> None:
        """Make page tables at least `num_pages` long."""
        if num_pages > self._tables.shape[1]:
            longer = np.zeros((len(self._tables), max(num_pages, 2 * self._tables.shape[1])), np.int64)
            longer[:, : self._tables.shape[1]] = self._tables
            self._tables = longer


def with_drafts(rows: list[int], drafts: DraftRows) -> tuple[list[list[int]], list[int]]:
    """Return the drafted tokens of each of the decodes `rows`, and the tokens of the batch after which one is sampled.

    These are in the order of `rows`, each followed by its drafted ones, which come after all decodes in the batch.
    """
    tokens_of: dict[int, list[int]] = {}
    places_of: dict[int, list[int]] = {}
    for place, (row, token) in enumerate(zip(drafts.rows.tolist(), drafts.tokens.tolist(), strict=True), len(rows)):
        tokens_of.setdefault(row, []).append(token)
        places_of.setdefault(row, []).append(place)
    sampled_at: list[int] = []
    for place, row in enumerate(rows):
        sampled_at += (place, *places_of.get(row, ()))
    return [tokens_of.get(row, []) for row in rows], sampled_at

"""The tokens of a step, flattened: the slot each is written to, and the pages each sequence reads, by page tables.

A page of tokens is one block; for a model with KV groups it can be several. A sequence has one table per block of a
page, with an entry for every page, so the *place* of a token in it is its position minus the tokens of dropped pages,
its *gap*. Entries of pages that a window has passed remain, and those before a cached prefix are 0: nothing reads
either.

The states of a step have the blocks that each sequence starts from, and those that its states are written to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.core.kv.groups import PageTable, SinkWindow
from kvarts.core.sched.plan import Chunk, DecodeRows, DraftRows, Snapshot, StepPlan

__all__ = [
    "ALL",
    "WHOLE_PAGES",
    "ChunkMetadata",
    "DecodeMetadata",
    "FlatBatch",
    "Ints",
    "LayerTable",
    "Observed",
    "PageTables",
    "StateBatch",
    "StateChunk",
    "StateTables",
    "TableBatch",
]

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


class LayerTable(msgspec.Struct, frozen=True):
    """A page table as some layers read it. `blocks`: the numbers of the blocks of a page that form it.

    If there are several, each holds an equal share of the page's tokens, in order, and the table has one entry per
    block. A block is memory for `num_each` pages of these layers; theirs is the one at `place`.
    """

    blocks: tuple[int, ...]
    num_each: int = 1
    place: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether its entries are ids of blocks."""
        return len(self.blocks) == 1 and self.num_each == 1

    def of(self, ids: Ints) -> Ints:
        """Return the table [..., entries], given the ids of all blocks, [blocks per page, ..., pages]."""
        chosen: Ints = ids[self.blocks[0]]
        if len(self.blocks) > 1:
            chosen = np.moveaxis(ids[list(self.blocks)], 0, -1).reshape(*ids.shape[1:-1], -1)
        return chosen if self.num_each == 1 else chosen * self.num_each + self.place


WHOLE_PAGES = (LayerTable((0,)),)
"""The only table of a model with one block per page."""


class PageTables:
    """Owner, per row, of the block ids of its pages, of the tokens that its sequence retains, and of its request.

    `tables`: the tables that the layers read; empty for an executor without layers, which has `num_blocks` blocks per
    page. Decodes of sequences with late rotation become chunks of one token.
    """

    def __init__(
        self, max_num_seqs: int, page_size: int, tables: Sequence[LayerTable] = WHOLE_PAGES, *, num_blocks: int = 1
    ) -> None:
        self._page_size = page_size
        self._layer_tables = tuple(tables)
        num_blocks = max([num_blocks, *(1 + block for table in tables for block in table.blocks)])
        self._blocks = np.arange(num_blocks)[:, None]
        self._ids = np.zeros((num_blocks, max_num_seqs, 16), np.int64)
        self._requests = np.full(max_num_seqs, -1, np.int64)
        self._prompts = np.zeros(max_num_seqs, np.int64)
        self._keeps: list[SinkWindow | None] = [None] * max_num_seqs
        """The tokens that each sequence retains, None for all."""
        self._sinks = np.zeros((num_blocks, max_num_seqs), np.int64)
        self._windows = np.full((num_blocks, max_num_seqs), ALL, np.int64)
        self._gaps = np.zeros((num_blocks, max_num_seqs), np.int64)
        self._before_gaps = np.zeros((num_blocks, max_num_seqs), np.int64)
        self._is_late = np.zeros(max_num_seqs, np.bool_)
        self._scored: dict[int, SinkWindow] = {}
        """The rows whose sequences keep pages by the attention that these receive."""

    def flatten(self, plan: StepPlan) -> FlatBatch | None:
        """Record the plan's changes, and return the tokens of the step; None if there are none."""
        step = _Step(len(self._layer_tables))
        if plan.decodes is not None and len(plan.decodes.rows):
            self._add_decodes(step, plan.decodes, plan.drafts)
        for chunk in plan.batch.chunks:
            self._enter(chunk)
            self._add_chunk(step, chunk.row, chunk.tokens, np.arange(chunk.start, chunk.end))
            if chunk.is_last:
                step.sampled_rows.append(chunk.row)
                step.sampled_at.append(step.num_tokens - 1)
        return step.batch(self._requests) if step.num_tokens else None

    def _add_decodes(self, step: _Step, decodes: DecodeRows, drafts: DraftRows | None) -> None:
        """Add the decodes of a step and their drafts, after updating the page tables."""
        if decodes.new_blocks:
            new_rows, pages, blocks = zip(*decodes.new_blocks, strict=True)
            self._reserve(max(pages) + 1)
            self._ids[:, new_rows, pages] = np.array(blocks, np.int64).T
        for row, tables in decodes.new_tables:
            self._take_bounded(row, tables)
        rows, where, tokens = decodes.rows, decodes.positions, decodes.tokens
        late = self._is_late[rows]
        has_late = bool(late.any())
        if has_late:
            rows, where, tokens = rows[~late], where[~late], tokens[~late]
        if len(rows):
            step.sampled_rows += rows.tolist()
            if drafts is None:
                step.sampled_at += range(len(rows))
            else:
                step.drafts, step.sampled_at = _with_drafts(step.sampled_rows, drafts)
                rows = np.concatenate((rows, drafts.rows))
                where = np.concatenate((where, drafts.positions))
                tokens = np.concatenate((tokens, drafts.tokens))
            gaps = self._gaps[:, rows]
            places = where - gaps
            block_slots = self._slots(self._ids[self._blocks, rows, places // self._page_size], places)
            if self._layer_tables:
                ids = self._ids[:, rows, : int(places.max()) // self._page_size + 1]
                prompts = self._prompts[rows]
            for layer_table, one, slots in zip(self._layer_tables, step.tables, step.slots, strict=True):
                table, block = layer_table.of(ids), layer_table.blocks[0]
                one.decodes = DecodeMetadata(
                    where, table, self._sinks[block][rows], self._windows[block][rows], gaps[block], prompts
                )
                if layer_table.is_plain:
                    slots.append(block_slots[block])
                else:
                    at, size = places[block], self._page_size // len(layer_table.blocks)
                    slots.append(table[np.arange(len(rows)), at // size] * size + at % size)
            for row in sorted(self._scored.keys() & {*rows.tolist()}) if self._scored else ():
                at = int(np.flatnonzero(rows == row)[0])
                self._observe(step, row, at + step.num_tokens, where[at : at + 1])
            step.add(tokens, where, block_slots)
        if has_late:
            for place in np.flatnonzero(late).tolist():
                row = int(decodes.rows[place])
                self._add_chunk(step, row, decodes.tokens[place : place + 1], decodes.positions[place : place + 1])
                step.sampled_rows.append(row)
                step.sampled_at.append(step.num_tokens - 1)

    def _enter(self, chunk: Chunk) -> None:
        """Set the page tables of a row from a chunk."""
        row = chunk.row
        self._requests[row] = chunk.request_index
        self._prompts[row] = chunk.num_prompt_tokens
        was_bounded = self._keeps[row] is not None
        self._scored.pop(row, None)
        if chunk.keeps is not None and chunk.keeps.is_scored:
            self._scored[row] = chunk.keeps
        self._keeps[row] = chunk.keeps
        if chunk.keeps is not None:
            self._is_late[row] = chunk.keeps.rotates_late
            self._take_bounded(row, chunk.tables)
            return
        if was_bounded:
            self._is_late[row] = False
            for noted, nothing in ((self._sinks, 0), (self._windows, ALL), (self._gaps, 0), (self._before_gaps, 0)):
                noted[:, row] = nothing
        num_pages = len(chunk.tables[0].page_ids)
        self._reserve(num_pages)
        for block, table in enumerate(chunk.tables):
            self._ids[block, row, :num_pages] = table.page_ids

    def _take_bounded(self, row: int, tables: Sequence[PageTable]) -> None:
        size = self._page_size
        for block, table in enumerate(tables):
            assert table.keeps is not None
            self._reserve(len(table.page_ids))
            self._ids[block, row, : len(table.page_ids)] = table.page_ids
            self._gaps[block, row] = table.num_dropped * size
            self._before_gaps[block, row] = table.num_sink_pages * size
            self._sinks[block, row] = table.keeps.sink
            self._windows[block, row] = table.keeps.window

    def _add_chunk(self, step: _Step, row: int, tokens: npt.NDArray[Any], where: Ints) -> None:
        """Add consecutive tokens of one row, at the positions `where`."""
        first, last, keeps = step.num_tokens, step.num_tokens + len(where), self._keeps[row]
        if keeps is None:
            ids = self._ids[:, row, : int(where[-1]) // self._page_size + 1]
            block_slots = self._slots(ids[:, where // self._page_size], where)
        else:
            gaps = self._gaps[:, row]
            places = where - gaps[:, None]
            ids = self._ids[:, row, : int(places[:, -1].max()) // self._page_size + 1]
            block_slots = self._slots(self._ids[self._blocks, row, places // self._page_size], places)
        for layer_table, one, slots in zip(self._layer_tables, step.tables, step.slots, strict=True):
            table, block = layer_table.of(ids), layer_table.blocks[0]
            if layer_table.is_plain:
                slots.append(block_slots[block])
            else:
                at, size = where if keeps is None else places[block], self._page_size // len(layer_table.blocks)
                slots.append(table[at // size] * size + at % size)
            chunk = ChunkMetadata(first, last, int(where[0]), table, num_prompt_tokens=int(self._prompts[row]))
            if keeps is not None:
                sink, window = int(self._sinks[block, row]), int(self._windows[block, row])
                chunk.keeps = SinkWindow(sink, window, keeps.rotates_late)
                chunk.gap, chunk.num_before_gap = int(gaps[block]), int(self._before_gaps[block, row])
            one.chunks.append(chunk)
        if row in self._scored:
            self._observe(step, row, first, where)
        step.add(tokens, where, block_slots)

    def _observe(self, step: _Step, row: int, first: int, where: Ints) -> None:
        """Note that the attention of tokens at `where`, from `first` of the batch on, is scored as the row asks."""
        start, end = int(where[0]), int(where[-1]) + 1
        seen = self._scored[row].observed(start, end)
        if seen:
            places = np.arange(seen.start, seen.stop) - self._gaps[0, row]
            page_ids = self._ids[0, row, : int(places[-1]) // self._page_size + 1].copy()
            begin = first + seen.start - start
            step.observed.append(Observed(row, start, end, begin, begin + len(seen), places, page_ids))

    def _slots(self, page_ids: Ints, places: Ints) -> Ints:
        """Return the slots of tokens at `places`, which are in the pages `page_ids` [blocks, tokens]."""
        slots: Ints = page_ids * self._page_size + places % self._page_size
        return slots

    def _reserve(self, num_pages: int) -> None:
        """Make page tables at least `num_pages` long."""
        longest = self._ids.shape[2]
        if num_pages > longest:
            longer = np.zeros((*self._ids.shape[:2], max(num_pages, 2 * longest)), np.int64)
            used = np.flatnonzero(self._requests >= 0)  # others have only zeros, which take no memory
            longer[:, used, :longest] = self._ids[:, used]
            self._ids = longer


class _Step:
    """The tokens of a step while they are collected. `tables` and `slots` have one entry per table that layers read."""

    def __init__(self, num_tables: int) -> None:
        self.tables: list[TableBatch] = []
        if num_tables:
            nothing = np.zeros(0, np.int64)
            decodes = DecodeMetadata.plain(nothing, np.zeros((0, 1), np.int64))
            self.tables = [TableBatch(nothing, decodes, []) for _ in range(num_tables)]
        self.slots: list[list[Ints]] = [[] for _ in range(num_tables)]
        self.tokens: list[npt.NDArray[Any]] = []
        self.positions: list[Ints] = []
        self.block_slots: list[Ints] = []
        self.sampled_rows: list[int] = []
        self.sampled_at: list[int] = []
        self.drafts: list[list[int]] = []
        self.observed: list[Observed] = []
        self.num_tokens = 0

    def add(self, tokens: npt.NDArray[Any], positions: Ints, block_slots: Ints) -> None:
        """Add tokens after their page tables."""
        self.tokens.append(tokens)
        self.positions.append(positions)
        self.block_slots.append(block_slots)
        self.num_tokens += len(positions)

    def batch(self, requests: Ints) -> FlatBatch:
        """Return the step. `requests`: the request index of each row."""
        for table, slots in zip(self.tables, self.slots, strict=True):
            table.slots = _joined(slots)
        return FlatBatch(
            _joined(self.tokens).astype(np.int64),
            _joined(self.positions),
            self.tables,
            _joined(self.block_slots),
            self.sampled_rows,
            self.sampled_at,
            requests[self.sampled_rows].tolist(),
            self.drafts + [[] for _ in self.sampled_rows[len(self.drafts) :]] if self.drafts else [],
            self.observed,
        )


def _joined(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)


def _with_drafts(rows: list[int], drafts: DraftRows) -> tuple[list[list[int]], list[int]]:
    """Return the drafted tokens of each of the decodes `rows`, and the batch indexes after which a token is sampled.

    The indexes are in the order of `rows`: each decode, followed by its drafted tokens, which are after all decodes in
    the batch.
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
    """The states of a step: decodes, with the `blocks` [decodes, blocks per state], drafted tokens, then chunks.

    `drafted` [drafted tokens]: the index of the decode after which each is computed; those of a decode are together, in
    order. Chunks are in order: one may begin from a state that an earlier one leaves.
    """

    blocks: Ints
    chunks: tuple[StateChunk, ...]
    drafted: Ints


class StateTables:
    """Owner of the blocks of the state of each row, and of whether its sequence has late rotation."""

    def __init__(self, max_num_seqs: int, num_blocks: int) -> None:
        self._blocks = np.zeros((max_num_seqs, num_blocks), np.int64)
        self._is_late = np.zeros(max_num_seqs, np.bool_)

    def batch(self, plan: StepPlan) -> StateBatch:
        """Record the plan's changes, and return the states of the step."""
        rows = np.zeros(0, np.int64) if plan.decodes is None else plan.decodes.rows
        late = self._is_late[rows]
        if late.any():  # these follow the others, as in PageTables
            rows = np.concatenate((rows[~late], rows[late]))
        decodes = self._blocks[rows]
        drafted = np.zeros(0, np.int64)
        if plan.drafts is not None:
            place_of = {row: place for place, row in enumerate(rows.tolist())}
            drafted = np.array([place_of[row] for row in plan.drafts.rows.tolist()], np.int64)
        num_tokens = len(rows) + len(drafted)
        snapshots: dict[int, list[Snapshot]] = {}
        for snapshot in plan.snapshots:
            snapshots.setdefault(snapshot.row, []).append(snapshot)
        chunks: list[StateChunk] = []
        for chunk in plan.batch.chunks:
            state = np.array(chunk.state, np.int64)
            self._blocks[chunk.row] = state
            self._is_late[chunk.row] = chunk.keeps is not None and chunk.keeps.rotates_late
            last = num_tokens + chunk.num_tokens
            leaves = [
                (num_tokens + snapshot.num_tokens - chunk.start, np.array(snapshot.blocks, np.int64))
                for snapshot in snapshots.get(chunk.row, ())
            ]
            leaves.append((last, state))
            begins_from = np.array(chunk.begins_from, np.int64) if chunk.begins_from else None
            chunks.append(StateChunk(num_tokens, last, begins_from, tuple(leaves)))
            num_tokens = last
        return StateBatch(decodes, tuple(chunks), drafted)

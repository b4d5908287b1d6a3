"""The tokens of a step of a model with KV groups: page tables of a sequence, made of the blocks of its pages.

A table has an entry for every page of its sequence, so that the place of a token in it is its position. Pages that a
window has given back keep their entries, and those before a prefix that was found have 0: nothing reads them. Of a
sequence with pages of its own each table leaves out what it has dropped, see RowTables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.executor.flat_batch import ALL, ChunkMetadata, DecodeMetadata, FlatBatch, Ints, TableBatch, with_drafts
from kvarts.kv.sink_window import OwnTable, SinkWindow
from kvarts.sched.plan import Chunk, DecodeRows, DraftRows, StepPlan

__all__ = ["GroupTables", "LayerTable"]


class LayerTable(msgspec.Struct, frozen=True):
    """A page table as some layers read it. `blocks`: by number, those of the blocks of a page that it is made of.

    With several, each has an equal share of the tokens of the page, in order, and the table has an entry for each. A
    block is memory for `num_each` pages of these layers, of which they have the one at `place`.
    """

    blocks: tuple[int, ...]
    num_each: int = 1
    place: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether its entries are ids of blocks."""
        return len(self.blocks) == 1 and self.num_each == 1

    def of(self, ids: Ints) -> Ints:
        """Return the table [..., entries], given the ids of all blocks of pages, [blocks of a page, ..., pages]."""
        chosen: Ints = ids[self.blocks[0]]
        if len(self.blocks) > 1:
            chosen = np.moveaxis(ids[list(self.blocks)], 0, -1).reshape(*ids.shape[1:-1], -1)
        return chosen if self.num_each == 1 else chosen * self.num_each + self.place


class GroupTables:
    """Owner of the ids of all blocks of the pages of each row, and of the request that has it.

    `tables`: as what the layers read them. What is kept of a sequence with pages of its own is noted for each block of
    a page; its decodes come as chunks of one token if it rotates keys late.
    """

    def __init__(self, max_num_seqs: int, page_size: int, tables: Sequence[LayerTable]) -> None:
        self._page_size = page_size
        self._layer_tables = tuple(tables)
        num_blocks = 1 + max(block for table in tables for block in table.blocks)
        self._ids = np.zeros((num_blocks, max_num_seqs, 16), np.int64)
        self._requests = np.full(max_num_seqs, -1, np.int64)
        self._prompts = np.zeros(max_num_seqs, np.int64)
        self._whole: list[SinkWindow | None] = [None] * max_num_seqs
        """What each sequence retains, None for all."""
        self._sinks = np.zeros((num_blocks, max_num_seqs), np.int64)
        self._windows = np.full((num_blocks, max_num_seqs), ALL, np.int64)
        self._gaps = np.zeros((num_blocks, max_num_seqs), np.int64)
        self._before_gaps = np.zeros((num_blocks, max_num_seqs), np.int64)
        self._is_late = np.zeros(max_num_seqs, np.bool_)

    def flatten(self, plan: StepPlan) -> FlatBatch | None:
        """Note what changed, and return the tokens of the step; None if there are none."""
        nothing = np.zeros(0, np.int64)
        step = _Step(
            [
                TableBatch(nothing, DecodeMetadata.plain(nothing, np.zeros((0, 1), np.int64)), [])
                for _ in self._layer_tables
            ]
        )
        if plan.decodes is not None and len(plan.decodes.rows):
            self._add_decodes(step, plan.decodes, plan.drafts)
        for chunk in plan.batch.chunks:
            self._enter(chunk)
            self._add_chunk(step, chunk.row, chunk.tokens, np.arange(chunk.start, chunk.end))
            if chunk.is_last:
                step.sampled_rows.append(chunk.row)
                step.sampled_at.append(step.num_tokens - 1)
        if not step.num_tokens:
            return None
        every, drafts = step.every, step.drafts
        for one, own in zip(every, step.slots, strict=True):
            one.slots = np.concatenate(own)
        return FlatBatch(
            np.concatenate(step.tokens).astype(np.int64),
            np.concatenate(step.positions),
            every[0].slots,
            every[0].decodes,
            every[0].chunks,
            step.sampled_rows,
            step.sampled_at,
            self._requests[step.sampled_rows].tolist(),
            drafts + [[] for _ in step.sampled_rows[len(drafts) :]] if drafts else [],
            tables=every,
            block_slots=np.concatenate(step.block_slots, axis=1),
        )

    def _add_decodes(self, step: _Step, decodes: DecodeRows, drafts: DraftRows | None) -> None:
        """Add the decodes of a step and what is drafted after them, and bring page tables up to date."""
        for row, page, blocks in decodes.new_blocks:
            self._reserve(page + 1)
            self._ids[:, row, page] = blocks
        for row, tables in decodes.new_own_tables:
            self._take_own(row, tables)
        rows, where, tokens = decodes.rows, decodes.positions, decodes.tokens
        late = self._is_late[rows]
        if late.any():
            rows, where, tokens = rows[~late], where[~late], tokens[~late]
        if len(rows):
            step.sampled_rows += rows.tolist()
            if drafts is None:
                step.sampled_at += range(len(rows))
            else:
                step.drafts, step.sampled_at = with_drafts(step.sampled_rows, drafts)
                rows = np.concatenate((rows, drafts.rows))
                where = np.concatenate((where, drafts.positions))
                tokens = np.concatenate((tokens, drafts.tokens))
            at = np.arange(len(rows))
            gaps = self._gaps[:, rows]
            ids = self._ids[:, rows, : int((where - gaps).max()) // self._page_size + 1]
            prompts = self._prompts[rows]
            step.block_slots.append(self._block_slots(ids, where - gaps))
            for layer_table, one, own in zip(self._layer_tables, step.every, step.slots, strict=True):
                table, block = layer_table.of(ids), layer_table.blocks[0]
                one.decodes = DecodeMetadata(
                    where, table, self._sinks[block][rows], self._windows[block][rows], gaps[block], prompts
                )
                if layer_table.is_plain:
                    own.append(step.block_slots[-1][block])
                else:
                    places, size = where - gaps[block], self._page_size // len(layer_table.blocks)
                    own.append(table[at, places // size] * size + places % size)
            step.tokens.append(tokens)
            step.positions.append(where)
            step.num_tokens = len(rows)
        for place in np.flatnonzero(late).tolist():
            row = int(decodes.rows[place])
            self._add_chunk(step, row, decodes.tokens[place : place + 1], decodes.positions[place : place + 1])
            step.sampled_rows.append(row)
            step.sampled_at.append(step.num_tokens - 1)

    def _enter(self, chunk: Chunk) -> None:
        """Give a row the page tables of a chunk."""
        row, whole = chunk.row, chunk.keeps
        self._requests[row] = chunk.request_index
        self._prompts[row] = chunk.num_prompt_tokens
        was_bounded = self._whole[row] is not None
        self._whole[row] = whole
        if whole is not None:
            self._is_late[row] = whole.rotates_late
            self._take_own(row, chunk.own_tables)
            return
        if was_bounded:
            self._is_late[row] = False
            for noted, nothing in ((self._sinks, 0), (self._windows, ALL), (self._gaps, 0), (self._before_gaps, 0)):
                noted[:, row] = nothing
        ids = np.array(chunk.tables, np.int64)
        self._reserve(ids.shape[1])
        self._ids[:, row, : ids.shape[1]] = ids

    def _take_own(self, row: int, tables: Sequence[OwnTable]) -> None:
        """Note the page tables of a sequence with pages of its own."""
        size = self._page_size
        for block, table in enumerate(tables):
            self._reserve(len(table.page_ids))
            self._ids[block, row, : len(table.page_ids)] = table.page_ids
            self._gaps[block, row] = table.num_dropped * size
            self._before_gaps[block, row] = table.num_sink_pages * size
            self._sinks[block, row] = table.keeps.sink
            self._windows[block, row] = table.keeps.window

    def _add_chunk(self, step: _Step, row: int, tokens: Any, where: Ints) -> None:
        """Add tokens of one row, at the positions `where`, one after the other."""
        gaps, whole = self._gaps[:, row], self._whole[row]
        first, start, last = step.num_tokens, int(where[0]), step.num_tokens + len(where)
        ids = self._ids[:, row, : (int(where[-1]) - int(gaps.min())) // self._page_size + 1]
        places = where - gaps[:, None]
        step.block_slots.append(self._block_slots(ids, places))
        for layer_table, one, own in zip(self._layer_tables, step.every, step.slots, strict=True):
            table, size, block = layer_table.of(ids), self._page_size // len(layer_table.blocks), layer_table.blocks[0]
            own.append(table[places[block] // size] * size + places[block] % size)
            chunk = ChunkMetadata(first, last, start, table, num_prompt_tokens=int(self._prompts[row]))
            if whole is not None:
                sink, window = int(self._sinks[block, row]), int(self._windows[block, row])
                chunk.keeps = SinkWindow(sink, window, whole.rotates_late)
                chunk.gap, chunk.num_before_gap = int(gaps[block]), int(self._before_gaps[block, row])
            one.chunks.append(chunk)
        step.tokens.append(tokens)
        step.positions.append(where)
        step.num_tokens = last

    def _block_slots(self, ids: Ints, places: Ints) -> Ints:
        """Return the slots of tokens at `places` [blocks, tokens] of page tables, in their blocks, of a page each.

        `ids`: [blocks, tokens, pages], or [blocks, pages] where all tokens are of one sequence.
        """
        size = self._page_size
        pages = places // size
        if ids.ndim == 2:
            chosen = np.take_along_axis(ids, pages, axis=1)
        else:
            chosen = np.take_along_axis(ids, pages[..., None], axis=2)[..., 0]
        slots: Ints = chosen * size + places % size
        return slots

    def _reserve(self, num_pages: int) -> None:
        """Make page tables at least `num_pages` long."""
        longest = self._ids.shape[2]
        if num_pages > longest:
            longer = np.zeros((*self._ids.shape[:2], max(num_pages, 2 * longest)), np.int64)
            longer[..., :longest] = self._ids
            self._ids = longer


class _Step:
    """The tokens of a step as they are put together. `every`, `slots`: for each page table."""

    def __init__(self, every: list[TableBatch]) -> None:
        self.every = every
        self.slots: list[list[Ints]] = [[] for _ in every]
        self.tokens: list[npt.NDArray[Any]] = []
        self.positions: list[Ints] = []
        self.block_slots: list[Ints] = []
        self.sampled_rows: list[int] = []
        self.sampled_at: list[int] = []
        self.drafts: list[list[int]] = []
        self.num_tokens = 0

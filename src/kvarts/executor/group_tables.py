"""The tokens of a step of a model with KV groups: page tables of a sequence, made of the blocks of its pages.

A table has an entry for every page of its sequence, so that the place of a token in it is its position. Pages that a
window has given back keep their entries, and those before a prefix that was found have 0: nothing reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.executor.flat_batch import ALL, ChunkMetadata, DecodeMetadata, FlatBatch, Ints, TableBatch, with_drafts
from kvarts.sched.plan import StepPlan

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

    `tables`: as what the layers read them.
    """

    def __init__(self, max_num_seqs: int, page_size: int, tables: Sequence[LayerTable]) -> None:
        self._page_size = page_size
        self._layer_tables = tuple(tables)
        num_blocks = 1 + max(block for table in tables for block in table.blocks)
        self._ids = np.zeros((num_blocks, max_num_seqs, 16), np.int64)
        self._requests = np.full(max_num_seqs, -1, np.int64)
        self._prompts = np.zeros(max_num_seqs, np.int64)

    def flatten(self, plan: StepPlan) -> FlatBatch | None:
        """Note what changed, and return the tokens of the step; None if there are none."""
        tokens: list[npt.NDArray[Any]] = []
        positions: list[Ints] = []
        block_slots: list[Ints] = []
        sampled_rows: list[int] = []
        sampled_at: list[int] = []
        drafts: list[list[int]] = []
        num_tokens = 0
        nothing = np.zeros(0, np.int64)
        every = [
            TableBatch(nothing, DecodeMetadata.plain(nothing, np.zeros((0, 1), np.int64)), [])
            for _ in self._layer_tables
        ]
        slots: list[list[Ints]] = [[] for _ in every]
        if plan.decodes is not None and len(plan.decodes.rows):
            rows, where = plan.decodes.rows, plan.decodes.positions
            for row, page, blocks in plan.decodes.new_blocks:
                self._reserve(page + 1)
                self._ids[:, row, page] = blocks
            own_tokens = plan.decodes.tokens
            sampled_rows += rows.tolist()
            if plan.drafts is None:
                sampled_at += range(len(rows))
            else:
                drafts, sampled_at = with_drafts(sampled_rows, plan.drafts)
                rows = np.concatenate((rows, plan.drafts.rows))
                where = np.concatenate((where, plan.drafts.positions))
                own_tokens = np.concatenate((own_tokens, plan.drafts.tokens))
            num_tokens = len(rows)
            ids = self._ids[:, rows, : int(where.max()) // self._page_size + 1]
            zeros, prompts = np.zeros_like(where), self._prompts[rows]
            windows, at = np.full_like(where, ALL), np.arange(num_tokens)
            block_slots.append(self._slots(ids[:, at, where // self._page_size], where))
            for layer_table, one, own in zip(self._layer_tables, every, slots, strict=True):
                table = layer_table.of(ids)
                one.decodes = DecodeMetadata(where, table, zeros, windows, zeros, prompts)
                if layer_table.is_plain:
                    own.append(block_slots[-1][layer_table.blocks[0]])
                else:
                    size = self._page_size // len(layer_table.blocks)
                    own.append(table[at, where // size] * size + where % size)
            tokens.append(own_tokens)
            positions.append(where)
        for chunk in plan.batch.chunks:
            ids = np.array(chunk.tables, np.int64)
            self._reserve(ids.shape[1])
            self._ids[:, chunk.row, : ids.shape[1]] = ids
            self._requests[chunk.row] = chunk.request_index
            self._prompts[chunk.row] = chunk.num_prompt_tokens
            where = np.arange(chunk.start, chunk.end)
            tokens.append(chunk.tokens)
            positions.append(where)
            block_slots.append(self._slots(ids[:, where // self._page_size], where))
            last = num_tokens + len(where)
            for layer_table, one, own in zip(self._layer_tables, every, slots, strict=True):
                table, size = layer_table.of(ids), self._page_size // len(layer_table.blocks)
                own.append(table[where // size] * size + where % size)
                one.chunks.append(
                    ChunkMetadata(num_tokens, last, chunk.start, table, num_prompt_tokens=chunk.num_prompt_tokens)
                )
            num_tokens = last
            if chunk.is_last:
                sampled_rows.append(chunk.row)
                sampled_at.append(num_tokens - 1)
        if not num_tokens:
            return None
        for one, own in zip(every, slots, strict=True):
            one.slots = np.concatenate(own)
        return FlatBatch(
            np.concatenate(tokens).astype(np.int64),
            np.concatenate(positions),
            every[0].slots,
            every[0].decodes,
            every[0].chunks,
            sampled_rows,
            sampled_at,
            self._requests[sampled_rows].tolist(),
            drafts + [[] for _ in sampled_rows[len(drafts) :]] if drafts else [],
            tables=every,
            block_slots=np.concatenate(block_slots, axis=1),
        )

    def _slots(self, blocks: Ints, positions: Ints) -> Ints:
        """Return the slots of tokens at `positions` [tokens] in their blocks, of a page each [blocks, tokens]."""
        slots: Ints = blocks * self._page_size + positions % self._page_size
        return slots

    def _reserve(self, num_pages: int) -> None:
        """Make page tables at least `num_pages` long."""
        longest = self._ids.shape[2]
        if num_pages > longest:
            longer = np.zeros((*self._ids.shape[:2], max(num_pages, 2 * longest)), np.int64)
            longer[..., :longest] = self._ids
            self._ids = longer

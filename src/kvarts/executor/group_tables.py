"""The tokens of a step of a model with KV groups: one page table of a sequence for each block of a page.

A table has an entry for every page of its sequence, so that the place of a token in it is its position. Pages that a
window has given back keep their entries, and those before a prefix that was found have 0: nothing reads them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvarts.executor.flat_batch import ALL, ChunkMetadata, DecodeMetadata, FlatBatch, Ints, TableBatch
from kvarts.sched.plan import StepPlan

__all__ = ["GroupTables"]


class GroupTables:
    """Owner of `num_tables` page tables for each row, and of the request that has it."""

    def __init__(self, max_num_seqs: int, page_size: int, num_tables: int) -> None:
        self._page_size = page_size
        self._tables = np.zeros((num_tables, max_num_seqs, 16), np.int64)
        self._requests = np.full(max_num_seqs, -1, np.int64)
        self._prompts = np.zeros(max_num_seqs, np.int64)

    def flatten(self, plan: StepPlan) -> FlatBatch | None:
        """Note what changed, and return the tokens of the step; None if there are none."""
        assert plan.drafts is None, "drafted tokens are of models without KV groups"
        tokens: list[npt.NDArray[Any]] = []
        positions: list[Ints] = []
        slots: list[Ints] = []
        sampled_rows: list[int] = []
        sampled_at: list[int] = []
        num_tokens = 0
        num_tables = len(self._tables)
        nothing = np.zeros(0, np.int64)
        decodes = [DecodeMetadata.plain(nothing, np.zeros((0, 1), np.int64))] * num_tables
        chunks: list[list[ChunkMetadata]] = [[] for _ in range(num_tables)]
        if plan.decodes is not None and len(plan.decodes.rows):
            rows, where = plan.decodes.rows, plan.decodes.positions
            for row, page, blocks in plan.decodes.new_blocks:
                self._reserve(page + 1)
                self._tables[:, row, page] = blocks
            num_tokens = len(rows)
            sampled_rows += rows.tolist()
            sampled_at += range(num_tokens)
            tables = self._tables[:, rows, : int(where.max()) // self._page_size + 1]
            zeros, prompts = np.zeros_like(where), self._prompts[rows]
            windows = np.full_like(where, ALL)
            decodes = [DecodeMetadata(where, table, zeros, windows, zeros, prompts) for table in tables]
            tokens.append(plan.decodes.tokens)
            positions.append(where)
            slots.append(self._slots(tables[:, np.arange(num_tokens), where // self._page_size], where))
        for chunk in plan.batch.chunks:
            page_ids = np.array(chunk.tables, np.int64)
            self._reserve(page_ids.shape[1])
            self._tables[:, chunk.row, : page_ids.shape[1]] = page_ids
            self._requests[chunk.row] = chunk.request_index
            self._prompts[chunk.row] = chunk.num_prompt_tokens
            where = np.arange(chunk.start, chunk.end)
            tokens.append(chunk.tokens)
            positions.append(where)
            slots.append(self._slots(page_ids[:, where // self._page_size], where))
            last = num_tokens + len(where)
            for of_table, table in zip(chunks, page_ids, strict=True):
                of_table.append(
                    ChunkMetadata(num_tokens, last, chunk.start, table, num_prompt_tokens=chunk.num_prompt_tokens)
                )
            num_tokens = last
            if chunk.is_last:
                sampled_rows.append(chunk.row)
                sampled_at.append(num_tokens - 1)
        if not num_tokens:
            return None
        every = [TableBatch(*of_table) for of_table in zip(np.concatenate(slots, axis=1), decodes, chunks, strict=True)]
        return FlatBatch(
            np.concatenate(tokens).astype(np.int64),
            np.concatenate(positions),
            every[0].slots,
            every[0].decodes,
            every[0].chunks,
            sampled_rows,
            sampled_at,
            self._requests[sampled_rows].tolist(),
            tables=every,
        )

    def _slots(self, blocks: Ints, positions: Ints) -> Ints:
        """Return the slots of tokens at `positions` [tokens], given their blocks in each table [tables, tokens]."""
        slots: Ints = blocks * self._page_size + positions % self._page_size
        return slots

    def _reserve(self, num_pages: int) -> None:
        """Make page tables at least `num_pages` long."""
        longest = self._tables.shape[2]
        if num_pages > longest:
            longer = np.zeros((*self._tables.shape[:2], max(num_pages, 2 * longest)), np.int64)
            longer[..., :longest] = self._tables
            self._tables = longer

"""The rows of a live batch of a model with KV groups: a sequence has several page tables, and may have a state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from msgspec.structs import replace

from kvarts.kv.block_pages import BlockPages
from kvarts.kv.group_pages import GroupPages
from kvarts.kv.parts import Part
from kvarts.kv.spans import PartRun
from kvarts.request import Request
from kvarts.sched.input_batch import InputBatch, NewPage
from kvarts.sched.plan import Chunk, DecodeRows, Snapshot

__all__ = ["GroupBatch"]


class GroupBatch(InputBatch):
    """An InputBatch with plans that name the blocks of every page table, and of states, which are of one group."""

    __slots__ = ("_cache", "_snapshots", "has_states")

    def __init__(self, cache: GroupPages | BlockPages, max_num_seqs: int) -> None:
        super().__init__(max_num_seqs, cache.page_size)
        self._cache = cache
        self.has_states = cache.memory.has_states
        assert sum(group.is_state for group in cache.memory.groups) <= 1, "a model that runs has one group of states"
        self._snapshots: list[tuple[int, int, Part | PartRun]] = []
        """Those of the step: the row, the tokens after which, and the part."""

    def chunk(self, request: Request, start: int, num_tokens: int, num_known: int) -> Chunk:
        """Return a chunk of `request` that names its row, tokens and page tables."""
        own, holding = request.own, request.holding
        assert own is not None or holding is not None
        begins_from, state = self._cache.states(holding, start) if self.has_states and holding is not None else ((), ())
        if self.has_states and holding is not None:
            for count, part in self._cache.take_snapshots(holding):
                self._snapshots.append((request.row, count, part))
        return Chunk(
            start,
            num_tokens,
            request.num_prompt_tokens,
            num_known,
            row=request.row,
            request_index=request.index,
            tokens=np.frombuffer(request.content.tokens(start, start + num_tokens).tobytes(), np.uint64),
            samples=not request.computes_only,
            keeps=None if own is None else own.keeps,
            tables=() if holding is None else self._cache.tables(holding, start + num_tokens),
            own_tables=() if own is None else own.own_tables,
            state=state,
            begins_from=begins_from,
        )

    def take_snapshots(self) -> tuple[Snapshot, ...]:
        """Return the snapshots to be made in the step.

        Of one that was evicted in the same step for another the blocks have another owner, and no chunk begins from it.
        """
        made = tuple(Snapshot(row, count, part.blocks) for row, count, part in self._snapshots if part.is_found)
        self._snapshots.clear()
        return made

    def decodes(
        self, step: int, with_new_page: Iterable[Request], with_new_table: Iterable[Request] = ()
    ) -> DecodeRows:
        """Return the decodes of `step`.

        `with_new_page`: the requests that got a page for it. `with_new_table`: those with pages of their own that
        changed.
        """
        decodes = super().decodes(step, ())
        page_size = self._cache.page_size
        new_blocks = tuple(
            self.new_page(request, (request.wheel_base + step) // page_size) for request in with_new_page
        )
        own_tables = tuple(
            (request.row, own.own_tables) for request in with_new_table if (own := request.own) is not None
        )
        return DecodeRows(
            decodes.rows,
            decodes.positions,
            decodes.tokens,
            (),
            new_blocks=new_blocks,
            new_own_tables=own_tables,
        )

    def new_page(self, request: Request, page: int) -> NewPage:
        """Return a page that `request` got, as a plan names it: its row, the page, and its block in each table."""
        assert request.holding is not None
        return request.row, page, self._cache.blocks_of_page(request.holding, page)

    def with_pages(self, decodes: DecodeRows, new_pages: Sequence[NewPage]) -> DecodeRows:
        """Return `decodes` with `new_pages` after its own."""
        return replace(decodes, new_blocks=(*decodes.new_blocks, *new_pages))

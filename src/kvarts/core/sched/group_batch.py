"""The rows of a live batch of a model with KV groups: a sequence has several page tables, and may have a state."""

from __future__ import annotations

from collections.abc import Iterable

from kvarts.core.kv.group_pages import GroupPages
from kvarts.core.kv.groups import PageTable
from kvarts.core.kv.pool import PageId
from kvarts.core.kv.runs import PartRun
from kvarts.core.request import Request
from kvarts.core.sched.input_batch import InputBatch, NewPage
from kvarts.core.sched.plan import Chunk, Snapshot

__all__ = ["GroupBatch"]


class GroupBatch(InputBatch):
    """An InputBatch whose plans name the blocks of every page table and of states, which form one group."""

    __slots__ = ("_cache", "_snapshots", "has_states")

    def __init__(self, cache: GroupPages, max_num_seqs: int) -> None:
        super().__init__(max_num_seqs, cache.page_size)
        self._cache = cache
        self.has_states = cache.memory.has_states
        assert sum(group.is_state for group in cache.memory.groups) <= 1, "a model that runs has one group of states"
        self._snapshots: list[tuple[int, int, PartRun]] = []
        """Snapshots of the step: the row, the number of tokens before the snapshot, and the part."""

    def chunk(self, request: Request, start: int, num_tokens: int, num_known: int) -> Chunk:
        """Return a chunk of `request` that names its row, tokens, page tables and state."""
        chunk = super().chunk(request, start, num_tokens, num_known)
        if not self.has_states:
            return chunk
        if request.own is not None:
            own_state = request.own.state
            return chunk.replaced(state=own_state, begins_from=own_state if start else ())
        table = request.table
        assert table is not None
        begins_from, state = self._cache.state_blocks(table, start)
        for count, part in self._cache.take_snapshots(table):
            self._snapshots.append((request.row, count, part))
        return chunk.replaced(state=state, begins_from=begins_from)

    def take_snapshots(self) -> tuple[Snapshot, ...]:
        """Return the snapshots to make in the step.

        A snapshot that was evicted in the same step for another is left out: its blocks have a new owner, and no chunk
        begins from it.
        """
        made = tuple(Snapshot(row, count, part.blocks) for row, count, part in self._snapshots if part.is_found)
        self._snapshots.clear()
        return made

    def _page_tables(self, request: Request, end: int) -> tuple[PageTable, ...]:
        assert request.table is not None
        return tuple(map(PageTable, self._cache.tables(request.table, end)))

    def _new_pages(self, requests: Iterable[Request], step: int) -> tuple[NewPage, ...]:
        size = self._cache.page_size
        return tuple([self.new_page(request, (request.wheel_base + step) // size) for request in requests])

    def _blocks_of(self, request: Request, page: int) -> tuple[PageId, ...]:
        assert request.table is not None
        return self._cache.blocks_of_page(request.table, page)

"""Requests that draft, in models that keep states by page: room for tokens after those of a step, and further states.

A request has a state for each token of a draft besides its own, in each group of states, from its first step until it
is released: a rejected token leaves the state before it. Only layers with keys and values have room for the tokens that
the drafter writes: it has no states. Rules of vLLM 0.32 and 0.33 (v1/core/single_type_kv_cache_manager.py,
`MambaManager.allocate_new_blocks`).
"""

from __future__ import annotations

from typing import NamedTuple

from kvarts.core.kv.group_needs import GroupNeeds
from kvarts.core.kv.groups import GroupMemory
from kvarts.core.kv.run_cache import RunCache
from kvarts.core.kv.runs import RunTable

__all__ = ["DraftSpace", "DraftedNeeds", "DraftedParts"]


class DraftSpace(NamedTuple):
    """Space for drafts of `num_drafts` tokens: `num_slots` tokens after those of a step, of `most_tokens` in all."""

    num_drafts: int
    num_slots: int
    most_tokens: int

    def room(self, num_tokens: int) -> int:
        """Return the tokens for which a request has room after a step that computes its first `num_tokens`."""
        return min(num_tokens + self.num_slots, self.most_tokens)


class DraftedParts(RunCache):
    """Owner of parts where requests draft: `RunTable.num_states` are the states of drafts, in groups of states."""

    __slots__ = ("_space",)

    def set_space(self, space: DraftSpace) -> None:
        """Let requests have the room of drafts; called once, before any request."""
        assert self._aligned and self.blocks is None, "only counted states at the ends of chunks"
        self._space = space

    def take_for(self, table: RunTable, num_tokens: int) -> None:
        """Take the parts of tokens up to `num_tokens` and of the room after them, as far as `table` lacks them."""
        super().take_for(table, self._space.room(num_tokens))
        num_pages = -(-num_tokens // self.page_size)
        count = self._num_new_states(table, num_tokens)
        for index in self._aligned:
            if count and num_pages - table.num_stated > count:
                table.first_open[index] = num_pages - count  # as of `take_next`
            self.take(index, count + self._num_missing(table, index))
            table.num_states[index] = self._space.num_drafts
        table.num_stated = max(table.num_stated, num_pages)

    def take_next(self, table: RunTable, num_pages: int, end: int = 0) -> None:
        """Take the parts of the next `num_pages` pages, without their states."""
        table.num_taken += num_pages
        for index in self._in_every_page:
            self.take(index, num_pages)

    def _num_new_states(self, table: RunTable, num_tokens: int) -> int:
        """Return how many states a step keeps in each group that ends with so many tokens of `table`."""
        num_pages = -(-num_tokens // self.page_size) - table.num_stated
        return max(0, min(num_pages, self._memory.num_states(num_pages, num_tokens, table.prefill_end)))

    def _num_missing(self, table: RunTable, index: int) -> int:
        return self._space.num_drafts - table.num_states[index]

    def missing_bytes(self, table: RunTable, num_new: int) -> int:
        """Return the bytes that the next `num_new` tokens, and the room after them, need and `table` lacks."""
        end = table.num_tokens + num_new
        num_pages = max(0, -(-self._space.room(end) // self.page_size) - table.num_taken)
        count = self._num_new_states(table, end)
        num_bytes = sum([self.part_bytes[index] * num_pages for index in self._in_every_page])
        for index in self._aligned:
            num_bytes += self.part_bytes[index] * (count + self._num_missing(table, index))
        return num_bytes

    def close(self, table: RunTable, num_full_pages: int, num_taken: int | None = None) -> None:
        """Release everything, group by group, the deepest part first."""
        for index in self._aligned if table.is_open else ():
            if count := self._num_beside(table, index):
                self.note_empty(index, count)
        super().close(table, num_full_pages, num_taken)

    def _num_beside(self, table: RunTable, index: int) -> int:
        """Return the states of drafts, without the pages of the room, which have no state yet."""
        return table.num_states[index] - (table.num_taken - table.num_stated)

    def _num_private(self, table: RunTable, index: int) -> int:
        """Return how many parts of a group `table` has outside of runs."""
        count = super()._num_private(table, index)
        return count + self._num_beside(table, index) if index in self._aligned else count


class DraftedNeeds(GroupNeeds):
    """Memory needs where requests draft. Tokens of arguments are without the room after them."""

    def __init__(
        self, memory: GroupMemory, *, space: DraftSpace, page_size: int, most_new: int, most_kept: int
    ) -> None:
        super().__init__(memory, page_size=page_size, most_new=most_new, most_kept=most_kept)
        self._space = space
        self._draft_blocks = self._less_in_chunk * space.num_drafts
        """The blocks of the states of a draft, in all groups of states."""

    def at_most_whole(self, num_tokens: int) -> int:
        """Return an upper bound of all the others for a request of `num_tokens` tokens; fast to compute."""
        return super().at_most_whole(num_tokens + self._space.num_slots) + self._draft_blocks

    def to_compute(self, num_tokens: int) -> int:
        """Return the most blocks that `num_tokens` tokens need at one time, wherever their chunks begin and end."""
        return super().to_compute(self._space.room(num_tokens)) + self._draft_blocks

    def _beside_found(self, start: int, num_known: int, end: int, prefill_end: int) -> tuple[int, int]:
        """Return the blocks needed in addition to a match: the most at one time, and those of the first step."""
        in_all, in_step = super()._beside_found(start, num_known, end, prefill_end)
        num_more = -(-self._space.room(end) // self._page_size) - -(-end // self._page_size)
        in_step += (self.page_blocks - self._less_in_chunk) * num_more
        return in_all + self._draft_blocks, in_step + self._draft_blocks

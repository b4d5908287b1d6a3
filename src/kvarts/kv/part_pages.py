"""The cache of a model with KV groups, behind the seam in `kv/cache.py`: a request holds parts of pages.

Memory is counted in blocks, the largest size that divides the parts of all groups (GroupMemory); so every count is an
integer, and counts of pages in the interface are counts of blocks.
"""

from __future__ import annotations

from kvarts.content import Content
from kvarts.kv.cache import Cache, Holding, Mark
from kvarts.kv.group_memory import GroupMemory
from kvarts.kv.group_needs import GroupNeeds, Held
from kvarts.kv.match import Match
from kvarts.kv.pool import Pool

__all__ = ["Held", "PartPages"]

MOST_UNCHECKED = 16
"""One part in this many may have moved before `check` examines all of them."""


class PartPages(Cache):
    """A Cache of `pool`, a pool of blocks, in which requests hold parts of pages of `memory`.

    `most_new_tokens`: the most tokens of a request that a step may compute, which bounds the parts that a window holds
    during a step.
    """

    __slots__ = ("_num_moved", "block_bytes", "memory", "needs", "page_size")

    def __init__(self, pool: Pool, memory: GroupMemory, *, page_size: int, most_new_tokens: int, lag: int = 0) -> None:
        most_kept = (1 + lag) * most_new_tokens
        self.needs = GroupNeeds(memory, page_size=page_size, most_new=most_new_tokens, most_kept=most_kept)
        super().__init__(pool, page_blocks=self.needs.page_blocks)
        self.memory = memory
        self.block_bytes = memory.block_bytes
        self.page_size = page_size
        self.settles = True
        self.match = self._match
        self._num_moved = 0
        """Blocks that had been taken, released and evicted when `check` last examined every part."""

    def _match(self, content: Content, limit: int) -> Match:
        raise NotImplementedError

    def held_by_others(self, match: Match) -> Held:
        """Return the parts of `match` that others hold."""
        raise NotImplementedError

    @property
    def is_shared(self) -> bool:
        """Whether other models have parts of the same memory."""
        raise NotImplementedError

    def num_held(self, holding: Holding) -> int:
        """Return the blocks of all parts that `holding` has, including those that others hold as well."""
        raise NotImplementedError

    def look(self, mark: Mark) -> None:
        """Set `mark` to the current counts if more blocks are in use than at the mark so far."""
        num_used = self.num_used
        if num_used > mark.used:
            mark.used, mark.cached, mark.released = num_used, self.num_cached, self.num_released
            mark.parts = self.counts()

    # Needs of requests ----------------------------------------------------------------------------------------

    def num_to_admit(self, match: Match, num_known: int, budget: int, num_kept: int = 0) -> int:
        """Return the blocks that must be free for a request that begins with `match`, by GroupNeeds.to_admit."""
        # Blocks that the request may take whatever it needs; none are certain if other models take part.
        num_certain = -1 if self.is_shared else self.num_free - num_kept
        start = match.num_pages * self.page_size
        end = min(num_known, start + budget)
        return num_kept + self.needs.to_admit(start, num_known, end, self.held_by_others(match), num_certain)

    def least_to_admit(self, match: Match, num_known: int, budget: int) -> int:
        """Return a lower bound of `num_to_admit` that stays valid if parts of `match` are evicted."""
        start = match.num_pages * self.page_size
        end = min(num_known, start + budget)
        return self.needs.least_to_admit(start, num_known, end, self.held_by_others(match))

    def num_to_finish(self, holding: Holding, num_tokens: int) -> int:
        """Return the most blocks that `holding` takes at one time, beyond its own, until it has `num_tokens`."""
        return max(0, self.needs.to_compute(num_tokens) - self.num_held(holding))

    def num_to_compute(self, num_known: int, page_size: int) -> int:
        """Return the most blocks that `num_known` tokens need at one time, wherever their chunks begin and end."""
        return self.needs.to_compute(num_known)

    def num_at_most(self, num_tokens: int, page_size: int) -> int:
        """Return the same for a request that runs alone, and may begin from snapshots."""
        return self.needs.at_most(num_tokens)

    def num_beyond(self, num_tokens: int, page_size: int, num_most: int) -> int:
        """Return the same if it is more than `num_most`, else 0."""
        if self.needs.at_most_whole(num_tokens) <= num_most:
            return 0
        num_blocks = self.needs.at_most(num_tokens)
        return num_blocks if num_blocks > num_most else 0

    def most_tokens(self, limit: int, page_size: int) -> int:
        """Return the longest sequence, of up to `limit` tokens, that can run in this memory; 0 if none can."""
        return self.needs.most_tokens(limit, self.pool.total)

    def need_words(self, num_blocks: int, page_size: int, asked: str) -> str:
        """Return the clause that a request with the tokens `asked` needs `num_blocks`."""
        most_new = self.needs.most_new
        return f"needs {num_blocks} blocks of {self.block_bytes:,} bytes for {asked}, with {most_new} tokens a step"

    @property
    def room_words(self) -> str:
        """The memory, as the subject of a sentence on the number of its blocks."""
        return "the memory has"

    # Laws -----------------------------------------------------------------------------------------------------

    def is_check_due(self, *, at_rest: bool) -> bool:
        """Return whether a sixteenth of all parts has moved since every part was last examined, or nothing runs."""
        num_moved = self.num_used + 2 * self.num_released + self.num_evicted
        if at_rest or num_moved - self._num_moved >= (self.num_used + self.num_cached) // MOST_UNCHECKED:
            self._num_moved = num_moved
            return True
        return False

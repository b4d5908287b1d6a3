"""vLLM's sparse retention: which parts of windows and states can be found by other sequences.

A part that is not retained serves its own sequence only, and becomes empty when it is released. Groups that keep all
tokens, and chunks, retain all parts. Rules of vLLM 0.32 and 0.33 (v1/core/single_type_kv_cache_manager.py,
`reachable_block_mask`; v1/core/kv_cache_coordinator.py, `replay_boundaries`). Positions are multiples of the pages of a
hit.

An example: pages of 16 tokens, a window of 64, so that a sequence resumes with 4 parts, and a prompt of 200 tokens. The
same prompt computes its last token again, so it resumes after 12 pages: with an interval of 0, the window retains pages
8 to 11; with one of 96 tokens, also 2 to 5.
"""

from __future__ import annotations

from kvarts.core.kv.groups import GroupMemory, PartGroup
from kvarts.core.kv.runs import NEVER, RunTable

__all__ = ["Retained"]


class Retained:
    """The parts that the groups of `memory` retain, which has an interval.

    `of_group`: for each group, the parts with which a sequence resumes; None for a group that retains all.
    """

    __slots__ = ("_drops_last", "_hit_pages", "_hit_tokens", "_page_size", "_pages_between", "of_group")

    def __init__(self, memory: GroupMemory, page_size: int) -> None:
        assert memory.retention_interval is not None
        self._page_size = page_size
        self._drops_last = memory.drops_last
        self._hit_pages = memory.hit_pages
        self._hit_tokens = self._hit_pages * page_size
        self._pages_between = memory.retention_interval // page_size
        num_parts = [_num_to_resume(group, page_size) for group in memory.groups]
        self.of_group = [
            None if group.layer.kind not in ("window", "state") or 0 < self._pages_between <= count else count
            for group, count in zip(memory.groups, num_parts, strict=True)
        ]

    @property
    def is_periodic(self) -> bool:
        """Whether parts are retained at regular intervals, wherever a prompt ends."""
        return self._pages_between > 0

    def last_page(self, table: RunTable) -> int:
        """Return the page from which on no group retains a page of `table`; NEVER if each retains some at intervals."""
        if self._pages_between:
            return NEVER
        prompt_end, branch = self._prompt_ends(table)[-1], table.branch // self._page_size
        return branch if branch > prompt_end else prompt_end

    def _prompt_ends(self, table: RunTable) -> tuple[int, ...]:
        """Return the pages, in order, at which hits of the prompt end: of the same one, or of a longer one as well."""
        num_tokens, size, pages = table.content.num_prompt_tokens, self._hit_tokens, self._hit_pages
        if not self._drops_last:
            return ((num_tokens - 1) // size * pages,)
        return max(0, (num_tokens - 1) // size - 1) * pages, max(0, num_tokens // size - 1) * pages

    def ranges(self, index: int, table: RunTable, start: int, end: int) -> list[tuple[int, int]]:
        """Return which of pages [start, end) of `table` a group retains, as ranges in order.

        They are those before the page at which the same prompt resumes, before that at which it leaves another one,
        and before each multiple of the interval.
        """
        count = self.of_group[index]
        assert count is not None
        prompt_ends, branch = self._prompt_ends(table), table.branch // self._page_size
        if not (self._pages_between or self._drops_last):
            # There are two ends: this runs for every chunk and group.
            prompt_end = prompt_ends[0]
            earlier, later = (branch, prompt_end) if branch < prompt_end else (prompt_end, branch)
            if start >= later:
                return []
            first, first_end = max(start, earlier - count), min(earlier, end)
            begin, last = max(start, later - count), min(later, end)
            if first >= first_end:
                return [(begin, last)] if begin < last else []
            if begin <= first_end:
                return [(first, max(last, first_end))]
            return [(first, first_end), (begin, last)] if begin < last else [(first, first_end)]
        if start >= self.last_page(table):
            return []
        ends = {*prompt_ends, branch}
        if self._pages_between:
            first = start // self._pages_between + 1
            ends.update(range(first * self._pages_between, end + count, self._pages_between))
        ranges: list[tuple[int, int]] = []
        for stop in sorted(ends):
            begin, last = max(start, stop - count), min(stop, end)
            if ranges and begin <= ranges[-1][1]:
                ranges[-1] = (ranges[-1][0], max(last, ranges[-1][1]))
            elif begin < last:
                ranges.append((begin, last))
        return ranges


def _num_to_resume(group: PartGroup, page_size: int) -> int:
    num_tokens = (group.layer.span or 1) - 1
    return -(-num_tokens // (page_size * group.block_pages)) * group.block_pages

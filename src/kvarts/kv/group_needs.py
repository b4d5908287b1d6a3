"""The most memory that a request with KV groups holds while its known tokens are computed, chunk by chunk."""

from __future__ import annotations

from typing import Protocol

from kvarts.kv.group_memory import GroupMemory

__all__ = ["GroupNeeds", "Held"]


class Held(Protocol):
    """The parts of a match that others hold, by the number of a group."""

    def num_shared(self, group: int, first_page: int) -> int:
        """Return how many of the parts of pages from `first_page` on and of the sink others hold."""

    def num_idle(self, group: int) -> int:
        """Return how many snapshots of a group of states are not held."""


class GroupNeeds:
    """Memory needs, in blocks of `memory`. `most_new`: the most tokens of a request that a step may compute."""

    def __init__(self, memory: GroupMemory, *, page_size: int, most_new: int) -> None:
        self._page_size = page_size
        self.most_new = most_new
        self._groups = [(group, group.part_bytes // memory.block_bytes) for group in memory.groups]
        self._spans = sorted({group.layer.span or 1 for group in memory.groups if group.layer.kind == "chunk"})
        self._begins_in_pages = len(self._spans) > 1 or any(span % page_size for span in self._spans)
        self._whole_blocks = sum(blocks for group, blocks in self._groups if group.layer.kind in ("full", "latent"))
        self._bounded = [(group.layer, blocks) for group, blocks in self._groups if group.is_bounded]
        self._state_blocks = sum(blocks for group, blocks in self._groups if group.is_state)
        self.page_blocks = sum(blocks for group, blocks in self._groups if not group.is_state)
        """The blocks that a decode takes for the first token of a page."""

    def while_computing(self, start: int, end: int) -> int:
        """Return the blocks of parts that tokens [start, end) need, without snapshots."""
        page_size = self._page_size
        blocks = self._state_blocks + self._whole_blocks * -(-end // page_size)
        for layer, part_blocks in self._bounded:
            blocks += part_blocks * layer.num_pages(end, page_size, end - start)
        return blocks

    def at_most_whole(self, num_tokens: int) -> int:
        """Return an upper bound of all the others for a request of `num_tokens` tokens; fast to compute."""
        return self.page_blocks * -(-num_tokens // self._page_size) + 2 * self._state_blocks

    def to_compute(self, start: int, end: int) -> int:
        """Return the most blocks that tokens [start, end) need at one time, wherever their chunks begin and end."""
        return max(self.while_computing(*chunk) for chunk in self._largest_chunks(start, end))

    def at_most(self, num_tokens: int) -> int:
        """Return the blocks that a request of `num_tokens` tokens needs alone, wherever its chunks begin and end.

        A request that begins from snapshots holds them in addition to its states during one step.
        """
        blocks = self.to_compute(0, num_tokens)
        if num_tokens > self._page_size:
            blocks += self._state_blocks
        return blocks

    def most_tokens(self, limit: int, num_blocks: int) -> int:
        """Return the longest request, of up to `limit` tokens, that can run in `num_blocks`; 0 if none can."""
        fewest, most = 0, limit
        while fewest < most:
            middle = (fewest + most + 1) // 2
            if self.at_most(middle) <= num_blocks:
                fewest = middle
            else:
                most = middle - 1
        return fewest

    def of_request(self, num_prompt_tokens: int, max_tokens: int) -> int:
        """Return the same for a request with this prompt and output, whose last token is never computed."""
        return self.at_most(max(1, num_prompt_tokens + max_tokens - 1))

    def to_admit(self, start: int, num_known: int, found: Held, enough: int = -1) -> int:
        """Return the most blocks that a request may have to take at one time for tokens [start, num_known).

        `found`: its match. Parts that others hold need not be taken, for as long as the request needs them; but if
        `enough` blocks suffice without that, these parts are counted as well, to save time.
        """
        most = self.at_most_whole(num_known)
        if most <= enough:
            return most
        most = 0
        for first, end in self._largest_chunks(start, num_known):
            blocks = self.while_computing(first, end)
            if blocks + self._state_blocks <= enough:
                most = max(most, blocks + self._state_blocks)
                continue
            for index, (group, part_blocks) in enumerate(self._groups if start else ()):
                if not group.is_state:
                    first_page = group.layer.first_seen(first) // self._page_size
                    blocks -= part_blocks * found.num_shared(index, first_page)
                elif first == start:
                    blocks += part_blocks * found.num_idle(index)
            most = max(most, blocks)
        return most

    def _largest_chunks(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return chunks of tokens from `start` to `end`; one of them needs the most blocks of all possible chunks.

        The need of a chunk grows when its end reaches one token into a page, and falls when a page leaves a window. A
        whole page later it is the same or more, except in layers of chunks, which start again at each chunk of the
        layer. So the largest is the last chunk that reaches into a page, or the last one before such a start, or the
        first. If layers start again inside a page, all are examined.
        """
        most_new, page_size = self.most_new, self._page_size
        if end - start <= most_new:
            return [(start, end)]
        # The last first token of a chunk of `most_new` tokens that ends with the first token of a page.
        last = end - most_new - (end - 1) % page_size
        firsts = {start, last}
        if self._begins_in_pages:
            firsts.update(range(last, start, -page_size))
        elif self._spans:
            before = last // self._spans[0] * self._spans[0] - 1
            firsts.add(before - (before + most_new - 1) % page_size)
        return [(first, first + most_new) for first in firsts if first >= start]

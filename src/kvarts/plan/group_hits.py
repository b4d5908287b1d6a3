"""Hits of a model with KV groups, in a memory of one size, with requests served one after the other.

The parts of all groups share one list, in the eviction order of the engine. A running request holds, in each group, the
parts that its next token needs. A request that does not fit is refused and finds nothing.
"""

from __future__ import annotations

from kvarts.content import Content
from kvarts.kv.eviction import LruOrder
from kvarts.kv.group_needs import GroupNeeds
from kvarts.kv.run_cache import RunCache
from kvarts.sim.config import ReplayConfig
from kvarts.traffic.trace import Trace

__all__ = ["GroupHits"]


class GroupHits:
    """Hits of `trace` on an engine of `config`, which counts KV groups. Each size is simulated once and cached."""

    def __init__(self, trace: Trace, config: ReplayConfig) -> None:
        self._trace = trace
        self._memory = config.memory
        self._page_size = config.page_size
        self._at_branches = config.snapshots == "branches"
        self._make_order = config.eviction
        self._most_new = config.max_num_batched_tokens
        self._needs = GroupNeeds(self._memory, page_size=config.page_size, most_new=config.max_num_batched_tokens)
        self._num_prompt_tokens = sum(request.num_prompt_tokens for request in trace)
        self._found: dict[int, int] = {}

    def hit_ratio(self, num_pages: int) -> float:
        """Return the share of prompt tokens that are hits in as much memory as `num_pages` whole pages occupy."""
        return self.hit_pages(num_pages) * self._page_size / self._num_prompt_tokens

    def hit_pages(self, num_pages: int) -> int:
        """Return the number of pages that all requests find together."""
        found = self._found.get(num_pages)
        if found is None:
            found = self._found[num_pages] = self._look(num_pages)
        return found

    def _look(self, num_pages: int) -> int:
        memory, page_size = self._memory, self._page_size
        num_blocks = memory.num_blocks(num_pages)
        total_bytes = num_blocks * memory.block_bytes
        cache = RunCache(
            memory,
            page_size=page_size,
            total_bytes=total_bytes,
            eviction_order=None if self._make_order is LruOrder else self._make_order(),
            at_branches=self._at_branches,
        )
        num_found = 0
        for index, request in enumerate(self._trace):
            num_prompt, num_output = request.num_prompt_tokens, request.num_output_tokens
            if self._needs.of_request(num_prompt, num_output) <= num_blocks:
                content = self._trace.content(request, page_size=page_size, owner=index)
                cache.now_ns = request.arrival_ns
                num_found += self._serve(cache, content, num_prompt, max(num_prompt, num_prompt + num_output - 1))
        return num_found

    def _serve(self, cache: RunCache, content: Content, num_prompt: int, num_tokens: int) -> int:
        """Compute the tokens of one request; return the number of pages that it found."""
        page_size, most_new = self._page_size, self._most_new
        match = cache.match(content, (num_prompt - 1) // page_size)
        holding = cache.begin(content, match)
        at = match.num_pages * page_size
        while at < num_tokens:
            # A chunk of the prompt, or generated tokens up to the end of a page.
            is_prompt = at < num_prompt
            end = min(num_prompt, at + most_new) if is_prompt else min(num_tokens, at + page_size - at % page_size)
            if end - at > most_new:
                end = at + most_new
            cache.extend(holding, end, is_end=is_prompt and end == num_prompt)
            cache.settle(holding, end)
            at = end
        cache.close(holding, at // page_size)
        return match.num_pages

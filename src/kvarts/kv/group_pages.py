"""A cache with KV groups as schedulers, routers and reports see a cache, where parts are only counted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

from kvarts.content import Content
from kvarts.events import PartsMoved
from kvarts.kv.cache import Holding, Leap
from kvarts.kv.group_memory import GroupMemory
from kvarts.kv.match import Match
from kvarts.kv.node import HeldPages
from kvarts.kv.part_pages import Held, PartPages
from kvarts.kv.pool import CountPool
from kvarts.kv.run_cache import RunCache
from kvarts.kv.run_leaps import leap
from kvarts.kv.spans import RunHolding, RunMatch

__all__ = ["GroupPages", "PartHolding", "PartMatch"]


class PartMatch(Match):
    """What a cache with KV groups has of `content`. `found`: the pages that every group can go on from."""

    __slots__ = ("found",)

    def __init__(self, content: Content, found: RunMatch) -> None:
        super().__init__(content, [], found.num_pages, 0)
        self.found = found


class PartHolding(Holding):
    """What one running request holds. `parts`: in every group."""

    __slots__ = ("parts",)

    def __init__(self, parts: RunHolding) -> None:
        super().__init__(parts.content, [], 0, None)
        self.parts = parts


class HeldByOthers:
    """What running requests hold of what was found: `Held`."""

    __slots__ = ("_cache", "_found")

    def __init__(self, cache: RunCache, found: RunMatch) -> None:
        self._cache = cache
        self._found = found

    def num_shared(self, group: int, first_page: int) -> int:
        """Return how many parts of a group they hold that a token needs with pages from `first_page` on."""
        return self._cache.num_shared(self._found, group, first_page)

    def num_idle(self, group: int) -> int:
        """Return how many snapshots of a group they do not hold."""
        return self._cache.num_idle(self._found, group)


class GroupPages(PartPages):
    """PartPages of `num_blocks` blocks, held by the run, see RunCache."""

    __slots__ = ("parts",)

    def __init__(self, memory: GroupMemory, *, num_blocks: int, page_size: int, most_new_tokens: int) -> None:
        super().__init__(CountPool(num_blocks), memory, page_size=page_size, most_new_tokens=most_new_tokens)
        self.parts = RunCache(memory, page_size=page_size, total_bytes=num_blocks * self.block_bytes)
        self.follows_decodes = True
        self.take_pages = self._take_pages
        self.most_certain_steps = 1  # what decodes release may let a request in

    @property
    def num_cached(self) -> int:
        """Blocks of parts that can be found and are not in use."""
        return self.parts.cached_bytes // self.block_bytes

    @property
    def num_used(self) -> int:
        """Blocks of parts that requests hold."""
        parts = self.parts
        return (parts.total_bytes - parts.empty_bytes - parts.cached_bytes) // self.block_bytes

    @property
    def is_shared(self) -> bool:
        """Whether other models have parts of the same memory."""
        return self.parts.is_shared

    def counts(self) -> tuple[int, ...]:
        """Return the parts used and the parts cached in each group, one pair a group."""
        parts = self.parts
        counts = [0] * (2 * len(parts.num_used))
        counts[::2], counts[1::2] = parts.num_used, parts.num_cached
        return tuple(counts)

    def num_evicted_parts(self) -> tuple[int, ...]:
        """Return the parts evicted of each group, one number a group."""
        return tuple(self.parts.num_evicted)

    def _match(self, content: Content, limit: int) -> PartMatch:
        return PartMatch(content, self.parts.match(content, limit))

    def held_by_others(self, match: Match) -> Held:
        """Return what others hold of what was found."""
        return HeldByOthers(self.parts, cast(PartMatch, match).found)

    def open(self, match: Match) -> PartHolding:
        """Hold what was found, for a sequence that begins with it; the cache must not have changed since."""
        of_parts = cast(PartMatch, match)
        return PartHolding(self.parts.begin(of_parts.content, of_parts.found))

    def num_held(self, holding: Holding) -> int:
        """Return the blocks of all parts that `holding` has, those that others hold as well included."""
        return self.parts.held_bytes(cast(PartHolding, holding).parts) // self.block_bytes

    def num_to_run(self, holding: Holding, start: int, end: int) -> int:
        """Return the blocks that tokens [start, end) need and `holding` does not have."""
        return self.parts.missing_bytes(cast(PartHolding, holding).parts, end - start) // self.block_bytes

    def extend(self, holding: Holding, num_tokens: int, *, is_end: bool) -> None:
        """Take what tokens up to `num_tokens` need, and make the pages that they fill findable."""
        self.parts.extend(cast(PartHolding, holding).parts, num_tokens, is_end=is_end)
        self.count()

    def settle(self, holding: Holding, num_tokens: int) -> None:
        """Release what no token from `num_tokens` on attends to. `count` must follow."""
        self.parts.settle(cast(PartHolding, holding).parts, num_tokens)

    # Decodes that are counted and not named: see RunCache.start_decoding.

    def take_page(self, holding: Holding, page: int) -> None:
        """Take the parts of the next page of a decode, which is counted and not named."""
        self.parts.take_pages(1)
        self.count()

    def _take_pages(self, num_due: int) -> None:
        """Take the parts of `num_due` pages that decodes begin, which are free."""
        self.parts.take_pages(num_due)
        self.count()

    def start_decoding(self, holding: Holding, admission: int) -> None:
        """Let a settled sequence compute a token in every step from the next on."""
        self.parts.start_decoding(cast(PartHolding, holding).parts, admission)

    def publish_due(self) -> None:
        """Make pages findable that decodes fill in this step, and that others may find."""
        self.parts.fill_pages()
        self.num_published = self.parts.num_published

    def fills_known_page(self) -> bool:
        """Return whether there are such pages in this step."""
        decodes = self.parts.decodes
        return bool(decodes.filling[decodes.step % self.page_size])

    def end_step(self) -> None:
        """Let decodes give back what none of their later tokens sees. `count` must follow."""
        self.parts.end_step()

    def leap(self, most_steps: int, num_wanted: int) -> Leap:
        """Do up to `most_steps` steps of decodes while a request waits for `num_wanted` blocks, see RunLeap."""
        done = leap(self.parts, most_steps, num_wanted * self.block_bytes)
        self.count()
        return Leap(done.taken, PartsMoved(done.listed, done.emptied, done.evicted))

    def count(self) -> None:
        """Take note of what was taken and given back."""
        parts, block_bytes = self.parts, self.block_bytes
        if parts.shared is None:
            self.num_free = (parts.empty_bytes + parts.cached_bytes) // block_bytes
        else:
            parts.give_back()
            self.num_free = parts.room_bytes // block_bytes
        self.num_released = parts.released_bytes // block_bytes
        self.num_evicted = parts.evicted_bytes // block_bytes
        self.num_published = parts.num_published

    def has_empty(self, count: int) -> bool:
        """Return whether `count` blocks can be taken and nothing is evicted for them."""
        return count * self.block_bytes <= self.parts.empty_bytes

    def shed(self, count: int) -> None:
        """Evict parts until `count` more blocks are empty."""
        self.parts.evict(self.parts.empty_bytes + count * self.block_bytes)
        self.count()

    def freed_by(self, holdings: Iterable[tuple[Holding | None, int]]) -> Iterator[int]:
        """Return how many blocks go out of use as each of `holdings` is closed, one by one."""
        for num_bytes in self.parts.freed_by(cast(PartHolding, holding).parts for holding, _ in holdings):
            yield num_bytes // self.block_bytes

    def close(self, holding: Holding, num_full_pages: int, num_pages: int) -> None:
        """Release everything that a request holds: parts of its full pages that can be found become cached."""
        self.parts.close(cast(PartHolding, holding).parts, num_full_pages, num_pages)
        holding.is_open = False
        self.count()

    def check(self, holdings: Iterable[tuple[Holding, int]], holds: Iterable[HeldPages] = ()) -> None:
        """Assert laws L1 and L2 for every part."""
        self.parts.check([cast(PartHolding, holding).parts for holding, _ in holdings])
        if not self.parts.is_shared:
            assert self.num_used + self.num_free == self.pool.total, "L1: blocks are lost"

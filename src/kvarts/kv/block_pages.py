"""A cache with KV groups of a model that runs: every part of a page is made of blocks, which have ids.

GroupPages has the same of parts that are only counted. A block has the keys and values of as many tokens as a page, in
as many layers as divide the layers of every group; so all blocks are alike, and any part can be made of any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

from kvarts.content import Content
from kvarts.event_log import Tell
from kvarts.kv.cache import Holding
from kvarts.kv.group_memory import GroupMemory
from kvarts.kv.grouped_cache import GroupedCache
from kvarts.kv.match import Match
from kvarts.kv.node import HeldPages
from kvarts.kv.part_pages import Held, PartPages
from kvarts.kv.parts import GroupedHolding, GroupMatch, Part
from kvarts.kv.pool import IdPool, PageError, PageId

__all__ = ["BlockHolding", "BlockMatch", "BlockPages"]


class BlockMatch(Match):
    """What is there of `content`. `found`: the pages that every group can go on from."""

    __slots__ = ("found",)

    def __init__(self, content: Content, found: GroupMatch) -> None:
        super().__init__(content, [], found.num_pages, 0)
        self.found = found


class BlockHolding(Holding):
    """What one running request, or a pin, holds. `parts`: in every group. `page_ids`: blocks that are no parts."""

    __slots__ = ("parts",)

    def __init__(self, parts: GroupedHolding, num_pages: int = 0, block_ids: list[PageId] | None = None) -> None:
        super().__init__(parts.content, [], num_pages, block_ids)
        self.parts = parts


class HeldByOthers:
    """What running requests hold of what was found: `Held`."""

    __slots__ = ("_found", "_sink_pages")

    def __init__(self, cache: GroupedCache, match: GroupMatch) -> None:
        self._found = cache.found_parts(match)
        self._sink_pages = [-(-group.layer.sink // cache.page_size) for group in cache.groups]

    def num_shared(self, group: int, first_page: int) -> int:
        """Return how many parts others hold, of pages from `first_page` on and of the sink."""
        sink_pages = self._sink_pages[group]
        return sum(
            part.refs > 0 and (page >= first_page or page < sink_pages) for page, part in self._found[group].items()
        )

    def num_idle(self, group: int) -> int:
        """Return how many snapshots of a group of states nothing holds."""
        return sum(not part.refs for part in self._found[group].values())


class BlockPages(PartPages):
    """PartPages of `num_blocks` blocks with ids, held page by page, see GroupedCache.

    Blocks can be taken by themselves as well, for what is no part of a page. `tell` receives events of parts.
    `num_promised`: blocks that are free, and are kept for requests that will take them.
    """

    __slots__ = ("_num_given", "_num_keeping", "num_promised", "parts")

    def __init__(
        self,
        memory: GroupMemory,
        *,
        num_blocks: int,
        page_size: int,
        most_new_tokens: int,
        tell: Tell | None = None,
        make_parts: type[GroupedCache] = GroupedCache,
    ) -> None:
        blocks = IdPool(num_blocks)
        super().__init__(blocks, memory, page_size=page_size, most_new_tokens=most_new_tokens)
        self.publishes_all = True
        self.num_promised = 0
        self.parts = make_parts(
            memory.groups,
            page_size=page_size,
            total_bytes=num_blocks * self.block_bytes,
            keeps=memory.keeps,
            blocks=blocks,
            tell=tell,
        )
        self._num_given = 0
        """Blocks that `give` gave back since the beginning."""
        self._num_keeping: Counter[Part] = Counter()
        """By part: how many keep it, see `keep`."""

    @property
    def num_cached(self) -> int:
        """Blocks of parts that can be found and are not in use."""
        return self.parts.cached_bytes // self.block_bytes

    @property
    def num_used(self) -> int:
        """Blocks of parts that requests hold, and blocks that were taken."""
        return self.parts.used_bytes // self.block_bytes

    @property
    def is_shared(self) -> bool:
        """Whether other models have parts of the same memory."""
        return self.parts.is_shared

    def counts(self) -> tuple[int, ...]:
        """Return the parts used and the parts cached in each group, one pair a group."""
        counts: list[int] = []
        for pair in zip(self.parts.num_used, self.parts.num_cached, strict=True):
            counts += pair
        return tuple(counts)

    def num_evicted_parts(self) -> tuple[int, ...]:
        """Return the parts evicted of each group, one number a group."""
        return tuple(self.parts.num_evicted)

    def count(self) -> None:
        """Take note of what was taken and given back."""
        parts, block_bytes = self.parts, self.block_bytes
        parts.give_back()
        self.num_free = parts.room_bytes // block_bytes - self.num_promised
        self.num_released = self._blocks_of(parts.num_released) + self._num_given
        self.num_evicted = self._blocks_of(parts.num_evicted)
        self.num_published = parts.num_published

    def _blocks_of(self, counts: list[int]) -> int:
        num_bytes = sum(count * group.part_bytes for count, group in zip(counts, self.parts.groups, strict=True))
        return num_bytes // self.block_bytes

    def _match(self, content: Content, limit: int) -> BlockMatch:
        return BlockMatch(content, self.parts.match(content, limit))

    def held_by_others(self, match: Match) -> Held:
        """Return what others hold of what was found."""
        return HeldByOthers(self.parts, cast(BlockMatch, match).found)

    def reach(self, content: Content, limit: int) -> tuple[int, ...]:
        """Return for each group from how many of at most `limit` full pages it could go on by itself."""
        return self.parts.reach(content, limit)

    def num_pages_of(self, match: Match) -> int:
        """Return how many blocks a sequence holds that begins with what was found."""
        found = self.parts.found_parts(cast(BlockMatch, match).found)
        return self._blocks_of([len(parts) for parts in found])

    def open(self, match: Match) -> BlockHolding:
        """Hold what was found, for a sequence that begins with it; the cache must not have changed since."""
        of_blocks = cast(BlockMatch, match)
        holding = BlockHolding(self.parts.begin(of_blocks.content, of_blocks.found), match.num_pages)
        self.count()
        return holding

    def num_held(self, holding: Holding) -> int:
        """Return the blocks of all parts that `holding` has, those that others hold as well included."""
        counts = Counter(part.group for part in cast(BlockHolding, holding).parts.held())
        return self._blocks_of([counts[group] for group in range(len(self.parts.groups))])

    def num_to_run(self, holding: Holding, start: int, end: int) -> int:
        """Return the blocks that tokens [start, end) need and `holding` does not have."""
        return self.parts.missing_bytes(cast(BlockHolding, holding).parts, end - start) // self.block_bytes

    def extend(self, holding: Holding, num_tokens: int, *, is_end: bool) -> None:
        """Take what tokens up to `num_tokens` need, and make the pages that they fill findable."""
        self.parts.extend(cast(BlockHolding, holding).parts, num_tokens, is_end=is_end)
        self.count()

    def take_page(self, holding: Holding, page: int) -> None:
        """Take the parts of `page`, the next of `holding`, of which no token is computed yet."""
        self.parts.take_page(cast(BlockHolding, holding).parts, page)
        self.count()

    def take_due(self, holdings: Sequence[Holding], page_of: Sequence[int]) -> None:
        """Take the next pages of decodes."""
        for holding, page in zip(holdings, page_of, strict=True):
            self.parts.take_page(cast(BlockHolding, holding).parts, page)
        self.count()

    def publish(self, holding: Holding, num_tokens: int) -> None:
        """Make the full pages of the first `num_tokens` tokens findable."""
        self.parts.fill_page(cast(BlockHolding, holding).parts, num_tokens)
        self.num_published = self.parts.num_published

    def shrink(self, holding: Holding, num_pages: int) -> None:
        """Give back the parts of all but the first `num_pages` pages, which `take_page` took: no token is in them."""
        self.parts.drop_pages(cast(BlockHolding, holding).parts, num_pages)
        self.count()

    def settle(self, holding: Holding, num_tokens: int) -> None:
        """Give back what no token from `num_tokens` on attends to. `count` must follow."""
        self.parts.settle(cast(BlockHolding, holding).parts, num_tokens)

    def take(self, count: int) -> list[PageId]:
        """Take `count` blocks, at most `num_free`; return their ids. Raise PageError for more than are free."""
        if not 0 <= count <= self.num_free:
            raise PageError(f"{count} blocks asked for, {self.num_free} free")
        block_ids = self.parts.take_blocks(count)
        self.count()
        return block_ids

    def give(self, count: int, page_ids: list[PageId] | None) -> None:
        """Give back `count` blocks that `take` took."""
        assert page_ids is not None and len(page_ids) == count
        self.parts.give_blocks(page_ids)
        self._num_given += count
        self.count()

    def reserved(self, num_pages: int, page_ids: list[PageId] | None) -> BlockHolding:
        """Return blocks that `take` took as something that holds them."""
        nothing = Content(bytearray(), num_tokens=0, page_size=self.page_size, owner=-1)
        return BlockHolding(GroupedHolding(nothing, 0, [], [], []), num_pages, page_ids)

    def keep(self, holding: Holding) -> int:
        """Note that `holding` stays when no request runs; return how many of its blocks nothing else keeps."""
        counts = [0] * len(self.parts.groups)
        for part in _parts_of(holding):
            self._num_keeping[part] += 1
            counts[part.group] += self._num_keeping[part] == 1
        return self._blocks_of(counts)

    def unkeep(self, holding: Holding) -> int:
        """Undo a `keep`; return how many blocks nothing keeps any more."""
        counts = [0] * len(self.parts.groups)
        for part in _parts_of(holding):
            self._num_keeping[part] -= 1
            if not self._num_keeping[part]:
                del self._num_keeping[part]
                counts[part.group] += 1
        return self._blocks_of(counts)

    def tables(self, holding: Holding, num_tokens: int) -> tuple[tuple[PageId, ...], ...]:
        """Return the page tables of a request, group by group, one for every block of a part; states have none.

        Each has an entry for every page of its first `num_tokens` tokens, which is 0 where the group has no part of it:
        no token that is computed from here on attends to such a page.
        """
        num_pages = -(-num_tokens // self.page_size)
        tables: list[tuple[PageId, ...]] = []
        for index, group in enumerate(self.parts.groups):
            if group.is_state:
                continue
            own: dict[int, Part] = cast(BlockHolding, holding).parts.parts[index]
            for place in range(group.part_bytes // self.block_bytes):
                table = [PageId(0)] * num_pages
                for page, part in own.items():
                    table[page] = part.blocks[place]
                tables.append(tuple(table))
        return tuple(tables)

    def blocks_of_page(self, holding: Holding, page: int) -> tuple[PageId, ...]:
        """Return the blocks of a page, one for every page table; the request has a part of it in every group."""
        blocks: list[PageId] = []
        for group, own in zip(self.parts.groups, cast(BlockHolding, holding).parts.parts, strict=True):
            if not group.is_state:
                blocks += own[page].blocks
        return tuple(blocks)

    def states(self, holding: Holding, start: int) -> tuple[tuple[PageId, ...], tuple[PageId, ...]]:
        """Return the blocks of the state of a request before its token `start`, the next, and those where it is kept.

        The first are those of the snapshot that the request began from, if `start` is its first token; there are none
        before the first token of all. Both are empty without a group of states.
        """
        parts = cast(BlockHolding, holding).parts
        for found, state in zip(parts.parts, parts.states, strict=True):
            if state is not None:
                snapshot = None if start % self.page_size else found.get(start // self.page_size - 1)
                begin = () if not start else state.blocks if snapshot is None else snapshot.blocks
                return begin, state.blocks
        return (), ()

    def take_snapshots(self, holding: Holding) -> list[tuple[int, Part]]:
        """Return the snapshots that the last `extend` of a request asks for, each with the tokens after which."""
        parts = cast(BlockHolding, holding).parts
        snapshots, parts.snapshots = parts.snapshots, []
        return snapshots

    def has_empty(self, count: int) -> bool:
        """Return whether `count` blocks can be taken and nothing is evicted for them."""
        return self.pool.has_empty(count)

    def shed(self, count: int) -> None:
        """Evict parts until `count` more blocks are empty."""
        self.parts.evict(self.parts.empty_bytes + count * self.block_bytes)
        self.count()

    def freed_by(self, holdings: Iterable[tuple[Holding | None, int]]) -> Iterator[int]:
        """Return how many blocks go out of use as each of `holdings` is closed, one by one."""
        held: Counter[Part] = Counter()
        for holding, _ in holdings:
            freed = [0] * len(self.parts.groups)
            for part in cast(BlockHolding, holding).parts.held():
                held[part] += 1
                freed[part.group] += held[part] == part.refs
            yield self._blocks_of(freed)

    def close(self, holding: Holding, num_full_pages: int, num_pages: int) -> None:
        """Release everything that a request holds: parts of its full pages that can be found become cached."""
        parts = cast(BlockHolding, holding).parts
        parts.num_tokens = num_full_pages * self.page_size
        self.parts.close(parts)
        holding.is_open = False
        self.count()

    def check(self, holdings: Iterable[tuple[Holding, int]], holds: Iterable[HeldPages] = ()) -> None:
        """Assert laws L1 and L2 for every part, and that every block has one owner."""
        every = [cast(BlockHolding, holding) for holding, _ in holdings]
        taken_ids = [block_id for holding in every for block_id in holding.page_ids or ()]
        self.parts.check([holding.parts for holding in every], taken_ids)
        if not self.parts.is_shared:
            assert self.num_used + self.num_promised + self.num_free == self.pool.total, "L1: blocks are lost"
            assert self.num_free >= 0, "L1: blocks that were promised are gone"
        assert self.pool.num_taken == self.num_used + self.num_cached, "L1: blocks are taken and not counted"


def _parts_of(holding: Holding) -> Iterator[Part]:
    """Yield what a holding has of pages, group by group."""
    for parts in cast(BlockHolding, holding).parts.parts:
        yield from parts.values()

"""A cache whose KV groups have blocks of several sizes, by the run of pages, against one block by block."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, lcm
from typing import cast

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvarts.base.errors import ConfigError
from kvarts.core.content import Content
from kvarts.core.events import Event, PagesRemoved, PagesStored
from kvarts.core.kv.group_pages import GroupPages, GroupTable
from kvarts.core.kv.groups import GroupMemory, PartGroup
from kvarts.core.kv.layers import KvLayer
from kvarts.core.kv.pool import CountPool, IdPool
from kvarts.core.kv.runs import RunMatch
from kvarts.doors.kv_events.batches import Batch, EventGroup, Wire
from kvarts.doors.kv_events.reader import KvEventReader
from kvarts.sim.routers.directory import PartIndex

from builders.grouped import FULL
from oracles.naive_block_sizes import NaiveBlocks, Sequence, Sized
from oracles.naive_kv_events import chain

pytestmark = pytest.mark.laws

BUDGET = 16


def memory_of(groups: list[Sized], interval: int | None = None) -> GroupMemory:
    """Return the memory of `groups`, in blocks of as many bytes as the sizes have a common multiple."""
    page_size, block_bytes = gcd(*(group.size for group in groups)), lcm(*(group.size for group in groups))
    parts = []
    for group in groups:
        pages = group.size // page_size
        window = KvLayer(kind="window", num_heads=1, head_numbers=2, span=group.window)
        layer = FULL if group.window is None else window
        parts.append(PartGroup(layer, part_bytes=block_bytes // pages, block_pages=pages))
    return GroupMemory(tuple(parts), retention_interval=interval)


@dataclass
class Both:
    content: Content
    table: GroupTable
    sequence: Sequence


@st.composite
def sized_groups(draw: st.DrawFn) -> list[Sized]:
    """Draw groups of at least two sizes."""
    sizes = draw(st.sampled_from([(1, 2), (2, 4), (2, 1), (4, 1), (4, 2, 1), (2, 3), (3, 1)]))
    groups = [Sized(sizes[0])]
    for size in sizes[1:]:
        groups += [Sized(size, draw(st.integers(2, 9)))] * draw(st.integers(1, 2))
    if draw(st.booleans()):
        groups.append(Sized(draw(st.sampled_from(sizes)), draw(st.sampled_from([None, 3, 8]))))
    return draw(st.permutations(groups))


class SizesMachine(RuleBasedStateMachine):
    @initialize(
        groups=sized_groups(),
        total=st.sampled_from([20, 40, 80]),
        interval=st.sampled_from([None, 0, 1, 3]),
        with_ids=st.booleans(),
        is_followed=st.booleans(),
    )
    def build(self, groups: list[Sized], total: int, interval: int | None, with_ids: bool, is_followed: bool) -> None:
        self.page_size = gcd(*(group.size for group in groups))
        unit = lcm(*(group.size for group in groups))
        interval = None if interval is None else interval * unit
        memory = memory_of(groups, interval)
        self.pieces = unit // memory.block_bytes
        self.naive = NaiveBlocks(groups, total, interval, BUDGET)
        self.cache = GroupPages(
            memory,
            (IdPool if with_ids else CountPool)(total * self.pieces),
            page_size=self.page_size,
            most_new_tokens=BUDGET,
            emit=self.follow if is_followed else None,
        )
        self.index = PartIndex(memory, self.page_size)
        self.reader = KvEventReader(self, block_pages=[group.block_pages for group in memory.groups])
        self.wire = Wire("map", hash_bytes=True, groups=[EventGroup("full")] * len(groups))
        self.consumed: dict[tuple[int, bytes], list[int]] = {}
        """What events of blocks say: by group and name, the tokens."""
        self.is_followed = is_followed
        self.running: list[Both] = []
        self.num_owners = 0

    def follow(self, event: Event) -> None:
        """Let an index of a router and a consumer of KV events follow the cache."""
        if isinstance(event, PagesStored | PagesRemoved):
            change = self.index.store if isinstance(event, PagesStored) else self.index.remove
            change(0, event.content, event.start_page, event.end_page, event.medium, event.group)
            self.reader.observe([event])

    def put(self, batch: Batch) -> None:
        """Receive KV events."""
        for event in msgspec.msgpack.decode(self.wire.encode(batch.told, batch.time_s))[1]:
            if event["type"] == "AllBlocksCleared":
                self.consumed.clear()
                continue
            names = [(event["group_idx"], name) for name in event["block_hashes"]]
            if event["type"] == "BlockRemoved":
                for name in names:
                    del self.consumed[name]
                continue
            size, tokens = event["block_size"], event["token_ids"]
            assert size == self.naive.groups[event["group_idx"]].size and len(tokens) == size * len(names)
            for place, name in enumerate(names):
                assert name not in self.consumed, "stored twice"
                self.consumed[name] = tokens[place * size : (place + 1) * size]

    def pace(self) -> None:
        """Do not wait."""

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=40), num_new=st.integers(1, BUDGET), data=st.data())
    def open(self, tokens: list[int], num_new: int, data: st.DataObject) -> None:
        naive, cache = self.naive, self.cache
        self.num_owners += 1
        content = Content.from_tokens(tokens, page_size=self.page_size, owner=self.num_owners)
        num_prompt = content.num_prompt_tokens = data.draw(st.integers(1, len(tokens)))
        match = cast(RunMatch, cache.match(content, (len(tokens) - 1) // self.page_size))
        hit, branch = naive.match(tokens, len(tokens) - 1)
        assert (match.num_pages * self.page_size, match.branch * self.page_size) == (hit, branch)
        end = min(len(tokens), hit + num_new)
        wanted = naive.to_admit(tokens, hit, len(tokens), end)
        assert cache.needs.to_admit(match, len(tokens), num_new) == wanted * self.pieces or wanted <= len(naive.free)
        assert cache.needs.least_to_admit(match, len(tokens), num_new) <= wanted * self.pieces
        if wanted > len(naive.free):
            return
        both = Both(content, cache.open(match), naive.open(tokens, num_prompt, hit, branch))
        self.running.append(both)
        self.compute(both, end)

    def compute(self, both: Both, end: int) -> None:
        self.cache.extend(both.table, end, is_end=False)
        self.naive.take(both.sequence, end)
        self.naive.name(both.sequence, end)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_new=st.integers(1, BUDGET))
    def resume(self, data: st.DataObject, num_new: int) -> None:
        both = data.draw(st.sampled_from(self.running))
        sequence = both.sequence
        start = sequence.num_tokens
        self.settle(both)
        end = min(len(sequence.tokens), start + num_new)
        if end == start:
            return
        missing = self.naive.missing(sequence, end)
        assert max(0, self.cache.needs.to_run(both.table, start, end)) == missing * self.pieces
        if missing <= len(self.naive.free):
            self.compute(both, end)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(1, 20))
    def decode(self, data: st.DataObject, num_tokens: int) -> None:
        """Compute tokens one by one, which become known when the next one is computed."""
        both = data.draw(st.sampled_from(self.running))
        sequence, cache, naive = both.sequence, self.cache, self.naive
        if sequence.num_tokens < len(sequence.tokens):
            return
        for _ in range(num_tokens):
            start = sequence.num_tokens
            self.settle(both)
            if start % self.page_size == 0:
                missing = naive.missing(sequence, start + 1)
                assert cache.begin_blocks(start // self.page_size) == missing * self.pieces
                if missing > len(naive.free):
                    return
                cache.take_page(both.table, start // self.page_size)
            token = data.draw(st.integers(0, 1))
            sequence.tokens.append(token)
            both.content.append(token.to_bytes(8, "little"))
            naive.take(sequence, start + 1)
            naive.name(sequence, start + 1)
            if (start + 1) % self.page_size == 0:
                cache.publish(both.table, start + 1)

    def settle(self, both: Both) -> None:
        self.cache.free_skipped(both.table, both.sequence.num_tokens)
        self.cache.count()
        self.naive.settle(both.sequence, both.sequence.num_tokens)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        both = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        num_tokens = both.sequence.num_tokens
        size = self.page_size
        self.cache.close(both.table, num_tokens // size, -(-num_tokens // size))
        self.naive.close(both.sequence)

    @invariant()
    def counts_are_equal(self) -> None:
        if not hasattr(self, "cache"):
            return
        cache, naive = self.cache, self.naive
        assert cache.num_free == len(naive.free) * self.pieces
        assert cache.num_cached == naive.num_cached * self.pieces
        cache.check([(both.table, 0) for both in self.running])

    @invariant()
    def events_are_of_blocks(self) -> None:
        """Events tell each name that a block has, with its tokens; a router finds every hit."""
        if not hasattr(self, "cache") or not self.is_followed:
            return
        named = [(index, tokens) for (index, tokens), blocks in self.naive.found.items() if blocks]
        assert self.consumed == {
            (index, chain(tokens, self.page_size)[-1]): [*tokens[-self.naive.groups[index].size :]]
            for index, tokens in named
        }
        for both in self.running:
            limit = both.content.num_known_pages
            num_pages = self.cache.match(both.content, limit).num_pages
            assert self.index.matches(both.content, limit) == ({0: (num_pages,)} if num_pages else {})


TestSizes = SizesMachine.TestCase


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([("full", None, 2, 2), ("window", 5, 2, 1)], "blocks of one size in bytes"),
        ([("full", None, 1, 2), ("chunk", 4, 2, 1)], "full attention and windows only"),
        ([("full", None, 1, 2), ("state", None, 2, 1)], "full attention and windows only"),
    ],
)
def test_blocks_of_several_sizes_are_of_one_memory(parts: list[tuple[str, int | None, int, int]], words: str) -> None:
    groups = [
        PartGroup(KvLayer(kind=kind, num_heads=1, head_numbers=2, span=span), part_bytes=size, block_pages=pages)  # type: ignore[arg-type]
        for kind, span, size, pages in parts
    ]
    with pytest.raises(ConfigError, match=words):
        GroupMemory(tuple(groups))

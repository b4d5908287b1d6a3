"""What sessions keep between turns in a cache with KV groups, against a model that looks at every token.

Pins hold what a next turn can go on from, and blocks that are reserved are nobody else's.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvarts.core.content import Content
from kvarts.core.kv.cache import PageReserve, Pins
from kvarts.core.kv.group_pages import GroupPages, GroupTable
from kvarts.core.kv.groups import GroupMemory, PartGroup, Retention
from kvarts.core.kv.layers import KvLayer
from kvarts.core.kv.pool import IdPool, PageError

from builders.grouped import FULL, part_groups
from oracles.naive_grouped import NaiveGroups, NaivePart, NaiveSequence

pytestmark = pytest.mark.laws


@dataclass
class Turn:
    content: Content
    table: GroupTable
    sequence: NaiveSequence


class PinMachine(RuleBasedStateMachine):
    """Turns that begin with what is there, pins of what they leave, and a reserve that grows and shrinks."""

    @initialize(
        groups=part_groups(),
        page_size=st.integers(1, 4),
        num_blocks=st.integers(1, 80),
        keeps=st.sampled_from(["all", "tails"]),
    )
    def build(self, groups: tuple[PartGroup, ...], page_size: int, num_blocks: int, keeps: Retention) -> None:
        memory = GroupMemory(groups, keeps)
        self.block_bytes = memory.block_bytes
        self.cache = GroupPages(memory, IdPool(num_blocks), page_size=page_size, most_new_tokens=8)
        self.pins, self.reserve = Pins(self.cache), PageReserve(self.cache)
        self.model = NaiveGroups(
            [(group.layer, group.part_bytes) for group in groups],
            page_size,
            num_blocks * self.block_bytes,
            keeps_all=keeps == "all",
        )
        self.turns: list[Turn] = []
        self.pinned: dict[int, NaiveSequence] = {}
        """By pin, the oldest first."""
        self.num_reserved = 0
        self.num_owners = 0

    def content(self, tokens: list[int]) -> Content:
        self.num_owners += 1
        return Content.from_tokens(tokens, page_size=self.cache.page_size, owner=self.num_owners)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=16), is_end=st.booleans())
    def begin(self, tokens: list[int], is_end: bool) -> None:
        """A turn computes all its tokens at once."""
        content = self.content(tokens)
        limit = (len(tokens) - 1) // self.cache.page_size
        match = self.cache.match(content, limit)
        length = self.model.hit(tokens, None, limit)
        assert match.num_pages == length
        found = self.model.found(tokens, None, length)
        idle = [part for parts in found.parts for part in parts.values()]
        assert self.cache.needs.to_hold(match) * self.block_bytes == sum(map(self.model.bytes_of, idle))
        num_new = len(tokens) - length * self.cache.page_size
        sequence = self.model.open(tokens, None, length, num_new, is_end=is_end)
        if sequence is not None:
            table = self.cache.open(match)
            self.cache.parts.extend(table.parts, len(tokens))
            if is_end:  # of one step, as the model has it
                self.cache.parts.extend(table.parts, len(tokens), is_end=True)
            self.cache.count()
            self.turns.append(Turn(content, table, sequence))

    @precondition(lambda self: self.turns)
    @rule(index=st.integers(0, 99), is_pinned=st.booleans(), cut=st.integers(0, 3))
    def end(self, index: int, is_pinned: bool, cut: int) -> None:
        """A turn ends, and some of what it leaves is pinned."""
        turn = self.turns.pop(index % len(self.turns))
        num_tokens = len(turn.sequence.tokens)
        self.cache.close(turn.table, num_tokens // self.cache.page_size, 0)
        self.model.close(turn.sequence)
        if is_pinned:
            most = max(0, num_tokens // self.cache.page_size - cut)
            length = self.model.hit(turn.sequence.tokens, None, most)
            pinned = self.model.found(turn.sequence.tokens, None, length)
            self.model.hold(pinned)
            self.pinned[self.pins.add(turn.content, most)] = pinned

    @precondition(lambda self: self.pinned)
    @rule(index=st.integers(0, 99))
    def unpin(self, index: int) -> None:
        pin = list(self.pinned)[index % len(self.pinned)]
        self.pins.remove(pin)
        self.model.close(self.pinned.pop(pin))

    @rule(num_blocks=st.integers(0, 40))
    def give_up(self, num_blocks: int) -> None:
        while self.pinned and num_blocks * self.block_bytes > self.model.free_bytes():
            self.model.close(self.pinned.pop(next(iter(self.pinned))))
        enough = num_blocks * self.block_bytes <= self.model.free_bytes()
        assert self.pins.give_up(num_blocks) == enough

    @rule(num_blocks=st.integers(1, 20))
    def extend(self, num_blocks: int) -> None:
        if num_blocks > self.cache.num_free:
            with pytest.raises(PageError, match="asked for"):
                self.reserve.extend(num_blocks)
            return
        self.reserve.extend(num_blocks)
        self.model.take_bytes(num_blocks * self.block_bytes)
        self.num_reserved += num_blocks

    @rule(num_blocks=st.integers(1, 20))
    def shrink(self, num_blocks: int) -> None:
        num_blocks = min(num_blocks, self.num_reserved)
        self.reserve.shrink(num_blocks)
        self.model.empty_bytes += num_blocks * self.block_bytes
        self.num_reserved -= num_blocks

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "cache"):
            return
        cache, model = self.cache, self.model
        reserved = self.reserve.table()
        held = [turn.table for turn in self.turns] + self.pins.tables()
        cache.check([(table, 0) for table in [*held, *([] if reserved is None else [reserved])]])
        assert cache.num_free * self.block_bytes == model.free_bytes()
        assert cache.num_cached * self.block_bytes == sum(map(model.bytes_of, model.released))
        kept: dict[int, NaivePart] = {
            id(part): part for pinned in self.pinned.values() for parts in pinned.parts for part in parts.values()
        }
        assert cache.num_reserved * self.block_bytes == (
            sum(map(model.bytes_of, kept.values())) + self.num_reserved * self.block_bytes
        )
        assert cache.num_evicted * self.block_bytes == sum(model.groups[index][1] for index, _ in model.evicted)

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        while self.turns:
            self.end(0, is_pinned=False, cut=0)
        while self.pinned:
            self.unpin(0)
        self.reserve.shrink(self.num_reserved)
        self.cache.check([])
        assert self.cache.num_used == self.cache.num_reserved == 0


TestPins = PinMachine.TestCase
TestPins.settings = settings(stateful_step_count=40)


def test_what_two_pins_hold_is_counted_once() -> None:
    window = PartGroup(KvLayer(kind="window", num_heads=1, head_numbers=2, span=5), 2)
    memory = GroupMemory((PartGroup(FULL, 1), window))
    cache = GroupPages(memory, IdPool(100), page_size=2, most_new_tokens=8)
    pins = Pins(cache)
    made = []
    for owner in (1, 2):
        content = Content.from_tokens(range(20), page_size=2, owner=owner)
        table = cache.open(cache.match(content, 9))
        cache.parts.extend(table.parts, 20)
        cache.close(table, 10, 10)
        made.append(pins.add(content, 10 - owner))
    # Full layers keep 9 and 8 pages. The token at 18 sees tokens from 14 on, pages 7 and 8; that at 16 pages 6 and 7.
    assert cache.num_reserved == cache.num_used == 9 + 2 * 3
    pins.remove(made[0])
    assert cache.num_reserved == cache.num_used == 8 + 2 * 2
    pins.remove(made[1])
    assert cache.num_reserved == cache.num_used == 0

"""The page ledger: what its signals do, what they refuse, and that a refusal changes nothing."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvarts.audit.ledger import PageLedger
from kvarts.audit.signals import (
    Block,
    BlockInUseError,
    BlocksRemoved,
    BlocksStored,
    Deref,
    Destroy,
    FullBlock,
    Keep,
    LedgerError,
    LedgerEvent,
    NotUniqueError,
    PartialBlock,
    Promote,
    Unkeep,
    UnknownBlockError,
    Use,
)
from kvarts.errors import ConfigError


def full(*hashes: int) -> list[FullBlock]:
    return [FullBlock(value, tokens_hash=value + 1000) for value in hashes]


def partial(number: int) -> PartialBlock:
    return PartialBlock(UUID(int=number))


def state(ledger: PageLedger) -> tuple[Any, ...]:
    return ledger.active, ledger.inactive, ledger.num_events


@pytest.fixture
def events() -> list[LedgerEvent]:
    return []


@pytest.fixture
def ledger(events: list[LedgerEvent]) -> PageLedger:
    return PageLedger(10, 4, sink=events.append)


def test_a_life_of_blocks(ledger: PageLedger) -> None:
    """Shared, destroyed, dropped, found again, evicted: the least recently used, the deepest first."""
    assert ledger.use(full(0, 1, 2, 3, 4))
    assert ledger.use(full(0, 1, 5, 6))
    assert [ledger.refs(block) for block in full(0, 1, 2, 3, 4, 5, 6)] == [2, 2, 1, 1, 1, 1, 1]
    ledger.destroy(full(4))
    ledger.deref(full(0, 1, 2, 3))
    assert ledger.inactive == full(3, 2)
    ledger.destroy(full(6))
    ledger.deref(full(0, 1, 5))
    assert ledger.inactive == full(3, 2, 5, 1, 0)
    assert (ledger.num_active, ledger.num_inactive) == (0, 5)
    assert ledger.use(full(0, 1, 2, 7, 8, 9))
    assert ledger.inactive == full(3, 5)
    assert ledger.probe_new_blocks(full(0, 1, 2, 3, 5, 11, 12)) == 2
    assert ledger.use(full(10, 11, 12))
    assert ledger.inactive == full(5)
    assert not ledger.use(full(20, 21))
    assert ledger.use(full(20))
    assert ledger.inactive == []
    assert not ledger.use(full(21))


def test_events_are_numbered_without_gaps_and_name_the_parent(ledger: PageLedger, events: list[LedgerEvent]) -> None:
    ledger.use([*full(1, 2), partial(1)])
    ledger.promote(UUID(int=1), FullBlock(3, tokens_hash=1003), parent_hash=2)
    ledger.use(full(1, 2, 9), parent_hash=None)
    ledger.deref([*full(1, 2, 3), *full(1, 2, 9)])
    ledger.use([partial(number) for number in range(10, 17)])
    assert events == [
        BlocksStored(0, None, (1, 2), (1001, 1002)),
        BlocksStored(1, 2, (3,), (1003,)),
        BlocksStored(2, 2, (9,), (1009,)),
        BlocksRemoved(3, (9,)),
    ]
    assert ledger.num_events == 4


def test_use_is_all_or_nothing(ledger: PageLedger, events: list[LedgerEvent]) -> None:
    ledger.use(full(*range(6)))
    ledger.deref(full(4, 5))
    before = state(ledger)
    assert not ledger.use([*full(4, 5), *full(*range(20, 25))])
    assert state(ledger) == before
    # What it finds itself is never evicted for what it needs.
    assert ledger.use([*full(4, 5), *full(*range(20, 24))])
    assert ledger.num_inactive == 0


def test_a_partial_block_that_nobody_holds_is_gone(ledger: PageLedger, events: list[LedgerEvent]) -> None:
    ledger.use([partial(1)])
    ledger.deref([partial(1)])
    assert (ledger.num_active, ledger.num_inactive, events) == (0, 0, [])


def test_promoting_to_what_is_resident_makes_one_of_two(ledger: PageLedger, events: list[LedgerEvent]) -> None:
    ledger.use([*full(1), partial(1)])
    ledger.promote(UUID(int=1), FullBlock(1))
    assert (ledger.refs(FullBlock(1)), ledger.num_active, len(events)) == (2, 1, 1)


def test_what_a_prompt_would_cost(ledger: PageLedger) -> None:
    ledger.use(full(1, 2, 4))
    ledger.deref(full(4))
    cost = ledger.prefill_cost([*full(1, 2, 3, 4), partial(1)], 18)
    assert (cost.new_blocks, cost.new_tokens) == (3, 10)  # block 4 is resident, after a miss
    ledger.use([partial(2)])
    everything = ledger.prefill_cost([*full(1, 2), partial(2)], 9)
    assert (everything.new_blocks, everything.new_tokens) == (0, 0)  # the tail has one token, not four


def test_misuse_is_refused_by_name(ledger: PageLedger) -> None:
    ledger.use([*full(1, 2), partial(1)])
    ledger.use([*full(1), partial(1)])
    before = state(ledger)
    with pytest.raises(BlockInUseError, match="block 1: is held 2 times"):
        ledger.destroy(full(2, 1))
    with pytest.raises(UnknownBlockError, match="block 7: is not there"):
        ledger.destroy(full(2, 7))
    with pytest.raises(UnknownBlockError, match="block 2: is held 1 times and cannot be dropped 2 times"):
        ledger.deref(full(1, 2, 2))
    with pytest.raises(UnknownBlockError, match="block 7: is held 0 times"):
        ledger.deref(full(1, 7))
    with pytest.raises(NotUniqueError, match="is held 2 times and cannot become a full block"):
        ledger.promote(UUID(int=1), FullBlock(3))
    with pytest.raises(UnknownBlockError, match=f"partial block {UUID(int=9)}: is not there"):
        ledger.promote(UUID(int=9), FullBlock(3))
    assert state(ledger) == before
    with pytest.raises(ConfigError, match="capacity: must be at least 1"):
        PageLedger(0, 4)


def test_a_sink_that_fails_is_a_warning_and_loses_no_step() -> None:
    def broken(event: LedgerEvent) -> None:
        if event.event_id == 1:
            raise OSError("nobody listens")

    ledger = PageLedger(4, 4, sink=broken)
    ledger.use(full(1))
    with pytest.warns(RuntimeWarning, match="event 1 did not reach its sink"):
        assert ledger.use(full(2))
    ledger.use(full(3))
    assert (ledger.num_events, ledger.num_failed_events, ledger.num_active) == (3, 1, 3)


def test_somebody_else_may_choose_what_is_evicted() -> None:
    ledger = PageLedger(3, 4, choose=lambda blocks: max(blocks, key=lambda block: block.block_hash))
    ledger.use(full(5, 7, 6))
    ledger.deref(full(5, 7, 6))
    ledger.keep(full(7))
    ledger.use(full(1, 2))
    assert ledger.inactive == full(7)
    assert not ledger.use(full(3))


def test_signals_are_values_too(ledger: PageLedger) -> None:
    assert ledger.process(Use([*full(1), partial(1)]))
    assert ledger.process(Promote(UUID(int=1), FullBlock(2), parent_hash=1))
    assert ledger.process(Deref(full(1, 2)))
    assert ledger.process(Destroy(full(2)))
    assert ledger.inactive == full(1)
    assert ledger.process(Keep(full(1)))
    assert ledger.num_used == 1
    assert ledger.process(Unkeep(full(1)))
    assert ledger.num_used == 0
    assert not ledger.process(Use(full(*range(20, 31))))


NAMES = st.one_of(st.integers(0, 7).map(FullBlock), st.integers(0, 3).map(partial))


@pytest.mark.laws
class TestAgainstLists(RuleBasedStateMachine):
    """The ledger against two lists: what is held, with repetitions, and what is not, in order."""

    CAPACITY = 6

    def __init__(self) -> None:
        super().__init__()
        self.events: list[LedgerEvent] = []
        self.ledger = PageLedger(self.CAPACITY, 4, sink=self.events.append)
        self.held: list[Block] = []
        self.kept: list[FullBlock] = []
        self.cached: list[Block] = []
        self.findable: set[Any] = set()

    def before(self) -> tuple[Any, ...]:
        return state(self.ledger)

    @rule(blocks=st.lists(NAMES, max_size=5))
    def use(self, blocks: list[Block]) -> None:
        before = self.before()
        if len({*self.held, *self.kept, *blocks}) > self.CAPACITY:
            assert not self.ledger.use(blocks)
            assert self.before() == before
            return
        assert self.ledger.use(blocks)
        self.held += blocks
        self.cached = [block for block in self.cached if block not in blocks]
        while len({*self.held}) + len(self.cached) > self.CAPACITY:
            self.cached.remove(next(block for block in self.cached if block not in self.kept))

    @rule(blocks=st.lists(NAMES, max_size=4))
    def deref(self, blocks: list[Block]) -> None:
        before = self.before()
        if any(blocks.count(block) > self.held.count(block) for block in blocks):
            with pytest.raises(UnknownBlockError):
                self.ledger.deref(blocks)
            assert self.before() == before
            return
        self.ledger.deref(blocks)
        for block in reversed(blocks):
            self.held.remove(block)
            if block not in self.held and isinstance(block, FullBlock):
                self.cached.append(block)

    @rule(blocks=st.lists(NAMES, max_size=3, unique=True))
    def destroy(self, blocks: list[Block]) -> None:
        before = self.before()
        if any(block in self.kept or (self.held.count(block) != 1 and block not in self.cached) for block in blocks):
            with pytest.raises(LedgerError):
                self.ledger.destroy(blocks)
            assert self.before() == before
            return
        self.ledger.destroy(blocks)
        self.held = [block for block in self.held if block not in blocks]
        self.cached = [block for block in self.cached if block not in blocks]

    @rule(number=st.integers(0, 3), block=st.integers(0, 7).map(FullBlock))
    def promote(self, number: int, block: FullBlock) -> None:
        before = self.before()
        if self.held.count(partial(number)) != 1:
            with pytest.raises((NotUniqueError, UnknownBlockError)):
                self.ledger.promote(UUID(int=number), block)
            assert self.before() == before
            return
        self.ledger.promote(UUID(int=number), block)
        self.held.remove(partial(number))
        self.held.append(block)
        self.cached = [other for other in self.cached if other != block]

    @rule(blocks=st.lists(st.integers(0, 7).map(FullBlock), max_size=3))
    def keep(self, blocks: list[FullBlock]) -> None:
        if any(block not in [*self.held, *self.cached] for block in blocks):
            with pytest.raises(UnknownBlockError, match="cannot be kept"):
                self.ledger.keep(blocks)
            return
        self.ledger.keep(blocks)
        self.kept += blocks

    @rule(blocks=st.lists(st.integers(0, 7).map(FullBlock), max_size=3))
    def unkeep(self, blocks: list[FullBlock]) -> None:
        if any(blocks.count(block) > self.kept.count(block) for block in blocks):
            with pytest.raises(UnknownBlockError, match="is kept"):
                self.ledger.unkeep(blocks)
            return
        self.ledger.unkeep(blocks)
        for block in blocks:
            self.kept.remove(block)

    @invariant()
    def agrees(self) -> None:
        assert self.ledger.num_used == len({*self.held, *self.kept})
        assert self.ledger.active == {block: self.held.count(block) for block in self.held}
        assert self.ledger.inactive == self.cached
        assert self.ledger.num_active + self.ledger.num_inactive <= self.CAPACITY

    @invariant()
    def events_tell_what_can_be_found(self) -> None:
        for event in self.events:
            assert event.event_id == self.num_seen
            self.num_seen += 1
            hashes = set(event.block_hashes)
            if isinstance(event, BlocksStored):
                assert not hashes & self.findable
                self.findable |= hashes
            else:
                assert hashes <= self.findable
                self.findable -= hashes
        self.events.clear()
        resident = [*self.held, *self.cached]
        assert self.findable == {block.block_hash for block in resident if isinstance(block, FullBlock)}

    num_seen = 0


TestLedger = TestAgainstLists.TestCase
del TestAgainstLists


@pytest.mark.parametrize("value", [float("nan"), 1.5, True, "4", 0, -1, 2**63, None])
def test_a_capacity_that_is_no_count_is_refused(value: Any) -> None:
    for values in ((value, 16), (4, value)):
        with pytest.raises(ConfigError):
            PageLedger(*values)


@pytest.mark.parametrize("answer", [None, 7, FullBlock(1), FullBlock(99), "x"])
def test_a_choice_that_cannot_be_evicted_is_refused_and_nothing_has_changed(answer: Any) -> None:
    events: list[LedgerEvent] = []
    ledger = PageLedger(4, 16, sink=events.append, choose=lambda _: answer)
    ledger.use(full(1, 2, 3, 4))
    ledger.deref(full(2, 3, 4))
    before = ledger.active, ledger.inactive, ledger.num_free, len(events)
    with pytest.raises(LedgerError):
        ledger.use(full(1, 5, 6))
    assert (ledger.active, ledger.inactive, ledger.num_free, len(events)) == before


def test_a_choice_that_raises_changes_nothing() -> None:
    def choose(candidates: Any) -> FullBlock:
        raise RuntimeError("no idea")

    ledger = PageLedger(2, 16, choose=choose)
    ledger.use(full(1, 2))
    ledger.deref(full(1, 2))
    with pytest.raises(RuntimeError, match="no idea"):
        ledger.use(full(3))
    assert ledger.inactive == [full(2)[0], full(1)[0]]


def test_what_is_no_signal_is_refused() -> None:
    with pytest.raises(LedgerError, match="is no signal"):
        PageLedger(2, 16).process("use")  # type: ignore[arg-type]

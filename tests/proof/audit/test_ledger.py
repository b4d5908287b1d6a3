"""The ledger against lists: parts that are held, read by transfers, and cached in the order of their release."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvarts.base.errors import ConfigError
from kvarts.proof.audit.ledger import LOST, Keep, Ledger, LedgerError, LedgerGroup, LedgerPart

FULL = LedgerGroup("full", 1)
GROUPS = (FULL, LedgerGroup("window", 2, 6))


def taken(ledger: Ledger, group: int = 0) -> LedgerPart:
    part = ledger.take(group)
    assert part is not None
    return part


def stored(ledger: Ledger, *names: str, group: int = 0) -> list[LedgerPart]:
    """Parts of pages, each after the one before, all of them held once."""
    parts = []
    for index, name in enumerate(names):
        parts.append(taken(ledger, group))
        ledger.publish(parts[-1], name.encode(), before=names[index - 1].encode() if index else None)
    return parts


def happened(ledger: Ledger) -> list[tuple[str, str, int | None]]:
    """What happened since the last call."""
    told = [(one.what, one.name.decode(), one.copy) for one in ledger.happened]
    ledger.happened.clear()
    return told


def release(ledger: Ledger, parts: list[LedgerPart]) -> None:
    for part in reversed(parts):
        ledger.release(part)


def test_a_life_of_parts() -> None:
    ledger = Ledger((FULL,), 4)
    pages = stored(ledger, "a", "b")
    open_page = taken(ledger)
    assert (ledger.num_used, ledger.num_cached, ledger.num_empty, ledger.num_free) == (3, 0, 1, 1)
    release(ledger, [*pages, open_page])
    assert (ledger.num_used, ledger.num_cached, ledger.num_empty) == (0, 2, 2), "what has no name is empty"
    first = ledger.find(0, b"a")
    assert first is pages[0]
    ledger.hold(first)
    others = [taken(ledger) for _ in range(3)]
    assert ledger.take(0) is None, "all of it is held"
    assert happened(ledger) == [("stored", "a", None), ("stored", "b", None), ("evicted", "b", None)]
    release(ledger, [first, *others])
    assert ledger.counts() == (0, 1)


def test_a_part_takes_the_blocks_of_its_group() -> None:
    ledger = Ledger((LedgerGroup("full", 2),), 5)
    parts = [ledger.take(0) for _ in range(3)]
    assert parts[1] is not None and parts[2] is None
    assert ledger.num_used == 4 and not ledger.reserve(2)
    assert ledger.reserve(1) and ledger.num_free == 0
    assert ledger.reserve(0) and ledger.num_free == 1


def test_what_windows_leave_behind_is_kept_or_dropped() -> None:
    for keeps_all, cached in ((True, 2), (False, 0)):
        ledger = Ledger(GROUPS, 8, keeps_all=keeps_all)
        release(ledger, stored(ledger, "a", group=1))
        assert ledger.num_cached == cached
        assert happened(ledger)[1:] == ([] if keeps_all else [("dropped", "a", None)])


def test_copies_are_stored_once_and_evicted_each() -> None:
    ledger = Ledger((FULL,), 3)
    copies = [taken(ledger) for _ in range(3)]
    assert [ledger.publish(copy, b"a") for copy in copies] == [True, False, False]
    release(ledger, copies)
    ledger.clear()
    evicted = [("evicted", "a", 2), ("evicted", "a", 1), ("evicted", "a", None)]
    assert happened(ledger) == [("stored", "a", None), *evicted]
    assert ledger.num_empty == 3 and not ledger.copies and not ledger.num_resident


def test_a_transfer_holds_every_copy_in_its_place() -> None:
    ledger = Ledger((FULL,), 3)
    (first,), other = stored(ledger, "a"), stored(ledger, "b")
    release(ledger, [*other, first])
    kept = ledger.keep(0, b"a")
    assert kept is not None and ledger.keep(0, b"c") is None
    assert (ledger.num_used, ledger.num_cached) == (1, 1)
    copy = taken(ledger)
    ledger.publish(copy, b"a")
    ledger.release(copy)
    assert ledger.num_used == 2, "the transfer holds the new copy, too"
    assert taken(ledger) and ledger.find(0, b"b") is None, "it is the only one that can be evicted"
    ledger.end_keep(kept)
    assert [part is first for part in ledger.evictable()] == [True, False]


def test_what_only_a_transfer_holds_is_lost_with_the_page_before_it() -> None:
    ledger = Ledger((FULL,), 3)
    release(ledger, stored(ledger, "a", "b", "c"))
    keeps = [ledger.keep(0, name) for name in (b"b", b"c")]
    assert taken(ledger)
    assert happened(ledger)[3:] == [(LOST, "c", None), (LOST, "b", None), ("evicted", "a", None)]
    assert ledger.num_used == 3 and ledger.num_cached == 0
    for kept in keeps:
        assert kept is not None
        ledger.end_keep(kept)
    assert ledger.num_used == 1 and ledger.num_empty == 2


def test_a_choice_decides_what_goes() -> None:
    ledger = Ledger((FULL,), 3, choose=lambda parts: max(parts, key=lambda part: part.name or b""))
    release(ledger, stored(ledger, "c", "a", "b"))
    taken(ledger)
    assert happened(ledger)[3:] == [("evicted", "c", None)]


@pytest.mark.parametrize("answer", ["held", "gone"])
def test_a_choice_that_cannot_go_is_refused(answer: str) -> None:
    ledger = Ledger((FULL,), 2, choose=lambda parts: choices[answer])
    held, cached = stored(ledger, "a", "b")
    choices = {"held": held, "gone": LedgerPart(0, stays=True)}
    ledger.release(cached)
    with pytest.raises(LedgerError, match="cannot be evicted"):
        ledger.take(0)
    assert ledger.num_used == 1 and ledger.num_cached == 1


def test_misuse_is_refused() -> None:
    ledger = Ledger((FULL,), 2)
    (part,) = stored(ledger, "a")
    with pytest.raises(LedgerError, match="has a name already"):
        ledger.publish(part, b"b")
    open_part = taken(ledger)
    with pytest.raises(LedgerError, match="cannot be found"):
        ledger.hold(open_part)
    ledger.release(open_part)
    with pytest.raises(LedgerError, match="is not held"):
        ledger.release(open_part)
    with pytest.raises(LedgerError, match="is not held"):
        ledger.publish(open_part, b"b")
    assert ledger.counts() == (1, 0)


@pytest.mark.parametrize("value", [float("nan"), 1.5, True, "4", 0, -1, 2**63, None])
def test_a_size_that_is_not_a_count_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError):
        Ledger((FULL,), value)


@pytest.mark.laws
class TestAgainstLists(RuleBasedStateMachine):
    """What is held and what is read, with repetitions, and what is cached, in order."""

    NUM_BLOCKS = 9

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(GROUPS, self.NUM_BLOCKS)
        self.held: list[LedgerPart] = []
        self.idle: list[LedgerPart] = []
        self.reads: list[tuple[Keep, list[LedgerPart]]] = []
        self.names: dict[LedgerPart, bytes] = {}
        self.findable: set[tuple[int, bytes]] = set()

    def is_read(self, part: LedgerPart) -> bool:
        return any(part in parts for _, parts in self.reads)

    def num_used(self) -> int:
        used = {*self.held, *(part for part in self.idle if self.is_read(part))}
        return sum(GROUPS[part.group].part_blocks for part in used)

    def num_cached(self) -> int:
        return sum(GROUPS[part.group].part_blocks for part in self.idle if not self.is_read(part))

    @rule(group=st.integers(0, 1))
    def take(self, group: int) -> None:
        num_blocks = GROUPS[group].part_blocks
        part = self.ledger.take(group)
        if self.num_used() + num_blocks > self.NUM_BLOCKS:
            assert part is None
            return
        while self.num_used() + self.num_cached() + num_blocks > self.NUM_BLOCKS:
            oldest = next(part for part in self.idle if not self.is_read(part))
            self.idle.remove(oldest)
            del self.names[oldest]
        assert part is not None
        self.held.append(part)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), name=st.sampled_from([b"a", b"b", b"c"]))
    def publish(self, data: st.DataObject, name: bytes) -> None:
        part = data.draw(st.sampled_from(self.held))
        if part in self.names:
            with pytest.raises(LedgerError):
                self.ledger.publish(part, name)
            return
        is_first = (part.group, name) not in {(other.group, its) for other, its in self.names.items()}
        assert self.ledger.publish(part, name) is is_first
        self.names[part] = name
        for _, parts in self.reads:
            if (parts[0].group, self.names[parts[0]]) == (part.group, name):
                parts.append(part)

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        part = data.draw(st.sampled_from(list(self.names)))
        self.ledger.hold(part)
        self.held.append(part)
        if part in self.idle:
            self.idle.remove(part)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        part = data.draw(st.sampled_from(self.held))
        self.ledger.release(part)
        self.held.remove(part)
        if part not in self.held and part in self.names:
            self.idle.append(part)

    @rule(group=st.integers(0, 1), name=st.sampled_from([b"a", b"b", b"c"]))
    def keep(self, group: int, name: bytes) -> None:
        kept = self.ledger.keep(group, name)
        parts = [part for part, its in self.names.items() if (part.group, its) == (group, name)]
        assert (kept is None) == (not parts)
        if kept is not None:
            self.reads.append((kept, parts))

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def end_keep(self, data: st.DataObject) -> None:
        read = data.draw(st.sampled_from(self.reads))
        self.ledger.end_keep(read[0])
        self.reads.remove(read)

    @rule()
    def clear(self) -> None:
        self.ledger.clear()
        for part in [part for part in self.idle if not self.is_read(part)]:
            self.idle.remove(part)
            del self.names[part]

    @invariant()
    def agrees(self) -> None:
        ledger = self.ledger
        assert (ledger.num_used, ledger.num_cached) == (self.num_used(), self.num_cached())
        assert ledger.num_used + ledger.num_cached + ledger.num_empty == self.NUM_BLOCKS
        assert list(ledger.evictable()) == [part for part in self.idle if not self.is_read(part)]
        assert {part: part.refs for part in self.held} == {part: self.held.count(part) for part in self.held}
        for group, name in ((group, name) for group in (0, 1) for name in (b"a", b"b", b"c")):
            copies = [part for part, its in self.names.items() if (part.group, its) == (group, name)]
            assert ledger.copies.get((group, name), []) == copies
            assert ledger.find(group, name) is (copies[0] if copies else None)

    @invariant()
    def what_happened_is_what_can_be_found(self) -> None:
        for one in self.ledger.happened:
            key = one.group, one.name
            if one.what == "stored":
                assert key not in self.findable
                self.findable.add(key)
            elif one.copy is None:
                self.findable.remove(key)
        self.ledger.happened.clear()
        assert self.findable == {(part.group, name) for part, name in self.names.items()}


TestLedger = TestAgainstLists.TestCase
del TestAgainstLists

"""Batches are put in order, whatever is lost on the way, and an engine that begins anew is noticed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvarts.doors.watch.sockets import Follower, Numbered
from kvarts.doors.watch.watched import Watched

from builders.streams import Published

pytestmark = pytest.mark.laws


class Seen:
    """What a follower tells, in order."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def begin(self, *, is_complete: bool) -> None:
        self.told.append("complete" if is_complete else "unknown")

    def apply(self, seq: int, payload: bytes) -> None:
        self.told.append(seq)

    def lose(self, first: int, last: int) -> None:
        self.told.append((first, last))


def batches(engine: Published, num: int) -> list[Numbered]:
    return [engine.toggle(block) for block in range(num)]


def test_without_a_replay_what_is_lost_is_told_and_the_rest_goes_on() -> None:
    engine, seen = Published(), Seen()
    follower = Follower(seen)
    follower.start()
    sent = batches(engine, 5)
    for seq in (0, 1, 4):
        follower.receive(*sent[seq])
    assert seen.told == ["unknown", "complete", 0, 1, (2, 3), "unknown", 4]
    assert (follower.counts.num_gaps, follower.counts.num_lost) == (1, 2)


def test_what_is_lost_is_asked_for_and_what_comes_twice_is_taken_once() -> None:
    engine, seen = Published(knows_state=False), Seen()
    follower = Follower(seen, engine.ask)
    follower.start()
    sent = batches(engine, 6)
    for seq in (0, 1, 4, 5):
        follower.receive(*sent[seq])
    assert seen.told == ["unknown", "complete", 0, 1, 2, 3, 4, 5]
    assert (follower.counts.num_gaps, follower.counts.num_lost, follower.counts.num_duplicates) == (1, 0, 2)


def test_of_a_gap_that_is_older_than_the_buffer_the_rest_is_lost() -> None:
    engine, seen = Published(knows_state=False, buffer=3), Seen()
    follower = Follower(seen, engine.ask)
    follower.start()
    sent = batches(engine, 2)
    follower.receive(*sent[0])
    late = batches(engine, 8)
    follower.receive(*late[-1])
    assert seen.told == ["unknown", "complete", 0, (1, 6), "unknown", 7, 8, 9]


def test_of_a_gap_that_is_older_than_the_buffer_full_state_is_taken_where_there_is_one() -> None:
    engine, seen = Published(buffer=3), Seen()
    follower = Follower(seen, engine.ask)
    follower.start()
    sent = batches(engine, 2)
    follower.receive(*sent[0])
    follower.receive(*batches(engine, 8)[-1])
    follower.receive(*engine.toggle(9))
    assert seen.told == ["unknown", "complete", 0, "complete", 9, (1, 8), 10]


@pytest.mark.parametrize(("buffer", "first"), [(100, ["complete", 0, 1, 2]), (2, ["unknown", 1, 2])])
def test_a_late_beginning_is_complete_where_the_buffer_goes_back_to_the_first(buffer: int, first: list[Any]) -> None:
    engine, seen = Published(knows_state=False, buffer=buffer), Seen()
    batches(engine, 3)
    follower = Follower(seen, engine.ask)
    follower.start()
    assert seen.told == first


def test_a_late_beginning_is_complete_with_full_state() -> None:
    engine, seen = Published(buffer=1), Seen()
    sent = batches(engine, 3)
    follower = Follower(seen, engine.ask)
    follower.start()
    follower.receive(*sent[2])  # it came while state was asked for
    follower.receive(*engine.toggle(9))
    assert seen.told == ["complete", 2, 3]
    assert follower.counts.num_duplicates == 1


@pytest.mark.parametrize("knows_state", [True, False])
def test_a_number_that_goes_down_is_another_engine(knows_state: bool) -> None:
    engine, seen = Published(knows_state=knows_state), Seen()
    follower = Follower(seen, engine.ask)
    follower.start()
    for batch in batches(engine, 3):
        follower.receive(*batch)
    anew = Published(name=1, knows_state=knows_state)
    engine.past, engine.blocks, engine.name, engine.next_seq = anew.past, anew.blocks, 1, 0
    first = batches(engine, 2)
    follower.receive(*first[0])
    follower.receive(*first[1])
    assert seen.told[:5] == ["unknown", "complete", 0, 1, 2]
    assert seen.told[5:] == ["complete", 0, 1]
    assert follower.counts.num_restarts == 1


def test_another_engine_that_is_further_along_is_told_by_what_it_answers() -> None:
    engine, seen = Published(knows_state=False), Seen()
    follower = Follower(seen, engine.ask)
    follower.start()
    for batch in batches(engine, 3):
        follower.receive(*batch)
    engine.past.clear()
    engine.name, engine.next_seq, engine.blocks = 1, 0, {}
    sent = batches(engine, 6)
    follower.receive(*sent[5])
    assert seen.told[5:] == ["complete", 0, 1, 2, 3, 4, 5]
    assert follower.counts.num_restarts == 1


def test_after_a_broken_connection_what_was_missed_is_asked_for() -> None:
    engine, seen = Published(knows_state=False), Seen()
    follower = Follower(seen, engine.ask)
    follower.start()
    follower.receive(*engine.toggle(0))
    batches(engine, 2)
    engine.is_reachable = False
    follower.reconnected()
    engine.is_reachable = True
    follower.reconnected()
    assert seen.told == ["unknown", "complete", 0, 1, 2]
    assert follower.counts.num_restarts == 0


class FollowMachine(RuleBasedStateMachine):
    """An engine, a network that loses batches and breaks, and restarts: in the end the follower holds what it has."""

    @initialize(knows_state=st.booleans(), buffer=st.sampled_from([1, 3, 1000]), num_before=st.integers(0, 5))
    def build(self, knows_state: bool, buffer: int, num_before: int) -> None:
        self.engine = Published(knows_state=knows_state, buffer=buffer)
        self.knows_state = knows_state
        for block in range(num_before):
            self.engine.toggle(block)
        self.watched = Watched()
        self.follower = Follower(self.watched, self.engine.ask)
        self.follower.start()
        self.is_lost = False

    @rule(block=st.integers(0, 5), arrives=st.booleans())
    def publish(self, block: int, arrives: bool) -> None:
        batch = self.engine.toggle(block)
        self.is_lost = not arrives
        if arrives:
            self.follower.receive(*batch)

    def teardown(self) -> None:
        """Where nothing more is lost, the follower knows everything, if the engine can tell it."""
        if hasattr(self, "engine") and self.knows_state:
            self.follower.receive(*self.engine.toggle(0))
            self.is_lost = False
            self.holds_what_the_engine_has()
            assert self.watched.claims.is_complete

    def anew(self) -> None:
        engine = self.engine
        engine.past.clear()
        engine.blocks, engine.next_seq, engine.name = {}, 0, engine.name + 1

    @rule(num=st.integers(0, 4))
    def restart(self, num: int) -> None:
        """An engine begins anew and publishes some batches before the connection is there again."""
        self.anew()
        for block in range(num):
            self.engine.toggle(block)
        self.follower.reconnected()
        self.is_lost = self.follower.last is None

    @rule(block=st.integers(0, 5))
    def restart_unnoticed(self, block: int) -> None:
        """An engine begins anew, and its first batch says so, if one of the engine before was heard."""
        self.anew()
        if self.follower._last_live is None:
            self.follower.reconnected()
        self.publish(block, arrives=True)

    @rule()
    def reconnect(self) -> None:
        self.follower.reconnected()

    @invariant()
    def holds_what_the_engine_has(self) -> None:
        if not hasattr(self, "engine") or self.is_lost:
            return
        claims = self.watched.claims
        held = set(claims.media.get(("GPU", 0), {}))
        if claims.is_complete:
            assert held == set(self.engine.blocks)
        wrong = {rule: num for rule, num in claims.num_violations.items() if num and rule != "sequence"}
        assert not wrong, claims.violations


TestFollow = FollowMachine.TestCase

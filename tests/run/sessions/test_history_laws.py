"""Histories on disk against a dictionary: every operation in every order, reopened at any moment."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvarts.base.errors import KvartsError
from kvarts.run.sessions.history import Histories
from kvarts.run.sessions.values import SessionNotReadyError, SessionSettings, UnknownSessionError, Usage

from builders.histories import stored
from oracles.naive_histories import NaiveHistories

NUMBERS = st.integers(0, 3)
SHARES = st.one_of(st.sampled_from([0.0, 0.5, 1.0, 1.1]), st.floats(0, 1))
"""Of the history that there is; more than there is, at times."""
TOKENS = st.one_of(
    st.lists(st.integers(0, 2**32 - 1), max_size=3),
    st.integers(0, 400).map(lambda size: [(size * at * 2654435761) % 2**32 for at in range(size)]),
)
USAGES = st.builds(
    Usage,
    last_used_s=st.floats(0, 2e9),
    num_turns=st.integers(0, 9),
    num_computed_tokens=st.integers(0, 10**9),
    inv1_violations=st.integers(0, 3),
    inv2_violations=st.integers(0, 3),
)


class HistoryMachine(RuleBasedStateMachine):
    """Operations go to both; those that wait are compared when all have been asked for."""

    def __init__(self) -> None:
        super().__init__()
        # Memory where there is some to write to: these laws are not about the disk.
        self.directory = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
        self.histories = Histories(self.directory)
        self.naive = NaiveHistories()
        self.waiting: list[tuple[Future[Any], Any]] = []
        self.clock = 0.0

    def teardown(self) -> None:
        try:
            self.settle()
            self.compare()
        finally:
            self.histories.close()
            shutil.rmtree(self.directory)

    def length_of(self, number: int, share: float = 1.0) -> int:
        return round(share * len(self.naive.tokens.get(f"{number:032x}", ())))

    @initialize(sizes=st.lists(st.sampled_from([0, 1, 127, 128, 129, 300]), min_size=1, max_size=4))
    def begin_with_some(self, sizes: list[int]) -> None:
        for number, size in enumerate(sizes):
            self.create(number, None, "alice")
            self.append(number, list(range(number, number + size)), 0)

    def expect(self, future: Future[Any], naively: Callable[[], Any]) -> None:
        try:
            expected = naively()
        except KvartsError as error:
            expected = type(error)
        self.waiting.append((future, expected))

    def settle(self) -> None:
        for future, expected in self.waiting:
            error = future.exception(timeout=10)
            assert (type(error) if error is not None else future.result()) == expected, error
        self.waiting.clear()

    @rule(number=NUMBERS, ttl=st.sampled_from([None, 5.0]), owner=st.sampled_from(["alice", "bob"]))
    def create(self, number: int, ttl: float | None, owner: str) -> None:
        session = stored(number, owner=owner, settings=SessionSettings(ttl_s=ttl, label="ü"))
        self.expect(self.histories.create(session), lambda: self.naive.create(session))

    @rule(number=NUMBERS, tokens=TOKENS, off_by=st.sampled_from([0, 0, 0, 0, 1, -1]))
    def append(self, number: int, tokens: list[int], off_by: int) -> None:
        session_id = f"{number:032x}"
        length = self.length_of(number) + off_by
        self.expect(
            self.histories.append(session_id, length, tokens), lambda: self.naive.append(session_id, length, tokens)
        )

    @rule(number=NUMBERS, share=SHARES)
    def truncate(self, number: int, share: float) -> None:
        session_id, length = f"{number:032x}", self.length_of(number, share)
        self.expect(self.histories.truncate(session_id, length), lambda: self.naive.truncate(session_id, length))

    @rule(number=NUMBERS, child=NUMBERS, share=SHARES)
    def fork(self, number: int, child: int, share: float) -> None:
        parent_id = f"{number:032x}"
        session = stored(child, length=self.length_of(number, share), parent=parent_id)
        self.expect(self.histories.fork(parent_id, session), lambda: self.naive.fork(parent_id, session))

    @rule(number=NUMBERS, usage=USAGES)
    def note(self, number: int, usage: Usage) -> None:
        session_id = f"{number:032x}"
        self.expect(self.histories.note(session_id, usage), lambda: self.naive.note(session_id, usage))

    @rule(number=NUMBERS, reason=st.sampled_from(["closed", "evicted", "expired"]))
    def end(self, number: int, reason: Any) -> None:
        session_id = f"{number:032x}"
        self.clock += 1
        at_s = self.clock
        self.expect(self.histories.end(session_id, reason, at_s), lambda: self.naive.end(session_id, reason, at_s))

    @rule(age=st.integers(0, 4))
    def forget(self, age: int) -> None:
        before_s = self.clock - age
        self.expect(self.histories.forget(before_s), lambda: self.naive.forget(before_s))

    @rule(number=NUMBERS, shares=st.tuples(SHARES, SHARES).map(sorted))
    def read_a_part(self, number: int, shares: list[float]) -> None:
        session_id = f"{number:032x}"
        start, end = (self.length_of(number, share) for share in shares)
        future = self.histories.tokens(session_id, start, end)
        if session_id in self.naive.tokens and end <= self.length_of(number):
            assert future.result().tolist() == self.naive.tokens[session_id][start:end]
        else:
            assert isinstance(future.exception(), SessionNotReadyError | UnknownSessionError)

    @precondition(lambda self: not self.waiting)
    @rule()
    def reopen(self) -> None:
        self.histories.close()
        self.histories = Histories(self.directory)

    @rule()
    def wait_for_all(self) -> None:
        self.settle()
        self.compare()

    @invariant()
    def few_are_waited_for(self) -> None:
        if len(self.waiting) > 8:
            self.settle()

    def compare(self) -> None:
        sessions = self.histories.load()
        assert {session.session_id: session.length for session in sessions} == {
            key: len(tokens) for key, tokens in self.naive.tokens.items()
        }
        for session in sessions:
            expected = self.naive.sessions[session.session_id]
            for name in ("owner", "settings", "created_s", "parent", "usage"):
                assert getattr(session, name) == getattr(expected, name)
            tokens = self.histories.tokens(session.session_id).result()
            assert tokens.tolist() == self.naive.tokens[session.session_id]
        in_order = sorted(self.naive.tombstones.values(), key=lambda tombstone: tombstone.ended_s)
        assert self.histories.tombstones() == in_order


TestHistories = HistoryMachine.TestCase
TestHistories.settings = settings(settings.default, stateful_step_count=30)
TestHistories = pytest.mark.laws(TestHistories)

"""The gate: nobody waits for ever, nobody has more than there is, and each owner gets its share of tokens."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarts.doors.openai.gate import Entry, Gate

SHARES = {"a": 1.0, "b": 2.0, "c": 1.0}


class Inside:
    """An engine of which each request ends when the test says so."""

    def __init__(self, num_seqs: int, num_tokens: int, num_prefill: int = 1 << 30) -> None:
        self.gate = Gate(num_seqs, num_tokens, num_prefill, SHARES)
        self.num_seqs, self.num_tokens = num_seqs, num_tokens
        self.entries: list[Entry] = []
        self.waiting: list[Entry] = []
        self.guaranteed: dict[int, bool] = {}
        self.entered = Counter[str]()

    def add(self, owner: str, num_tokens: int, num_prompt_tokens: int = 1) -> Entry:
        def begin(is_guaranteed: bool) -> None:
            self.waiting.remove(entry)
            self.entries.append(entry)
            self.guaranteed[id(entry)] = is_guaranteed
            self.entered[owner] += num_tokens

        entry = Entry(owner, num_tokens, num_prompt_tokens, begin)
        self.waiting.append(entry)
        self.gate.add(entry)
        return entry

    def end(self, entry: Entry) -> None:
        (self.entries if entry in self.entries else self.waiting).remove(entry)
        self.gate.leave(entry, entry.num_tokens)

    def check(self) -> None:
        assert len(self.entries) <= self.num_seqs
        assert sum(entry.num_charged for entry in self.entries) <= self.num_tokens
        assert self.gate.num_waiting == len(self.waiting)
        together = sum(SHARES.values())
        for owner, share in SHARES.items():
            seats = sum(entry.owner == owner for entry in self.entries)
            tokens = sum(entry.num_charged for entry in self.entries if entry.owner == owner)
            mine = [entry for entry in self.waiting if entry.owner == owner]
            # Half of what is guaranteed is there at once.
            if mine:
                assert (
                    seats >= int(int(self.num_seqs * share / together) * 0.5)
                    or tokens + mine[0].num_tokens > int(int(self.num_tokens * share / together) * 0.5)
                )  # fmt: skip
        assert self.entries or not self.waiting, "nothing runs, and something waits"


steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(sorted(SHARES)), st.integers(1, 60)),
        st.tuples(st.just("end"), st.integers(0, 30)),
    ),
    max_size=60,
)


@given(st.integers(1, 12), st.integers(8, 64), steps)
def test_what_can_run_runs_within_what_there_is(num_seqs: int, num_tokens: int, changes: list[tuple[str, int]]) -> None:
    inside = Inside(num_seqs, num_tokens)
    for what, number in changes:
        if what == "end":
            both = inside.entries + inside.waiting
            if both:
                inside.end(both[number % len(both)])
        else:
            inside.add(what, number)
        inside.check()
    while inside.entries:
        inside.end(inside.entries[0])
        inside.check()
    assert not inside.waiting, "every request has run"


@settings(max_examples=30)
@given(st.lists(st.integers(2, 9), min_size=3, max_size=3), st.integers(0, 2))
def test_owners_that_always_wait_get_tokens_by_their_shares(sizes: list[int], late: int) -> None:
    """Every request inside gets a token a step. One owner comes when the others have taken everything."""
    inside = Inside(8, 80)
    left: dict[int, int] = {}
    got = Counter[str]()
    for step in range(400):
        for number, (owner, size) in enumerate(zip(SHARES, sizes, strict=True)):
            while (number != late or step >= 50) and sum(entry.owner == owner for entry in inside.waiting) < 4:
                inside.add(owner, size)
        for entry in list(inside.entries):
            got[entry.owner] += step >= 100
            left[id(entry)] = left.get(id(entry), entry.num_tokens) - 1
            if not left[id(entry)]:
                del left[id(entry)]
                inside.end(entry)
        inside.check()
    for owner, share in SHARES.items():
        assert got[owner] / sum(got.values()) >= 0.95 * share / sum(SHARES.values()), got


def test_an_owner_that_comes_to_a_full_engine_finds_what_is_kept_and_then_its_whole_share() -> None:
    inside = Inside(8, 8000)
    attack = [inside.add("a", 10) for _ in range(100)]
    assert sum(entry.is_inside for entry in attack) == 8 - 2 - 1  # of b and c, half of 4 and of 2 are kept
    mine = [inside.add("b", 10) for _ in range(4)]
    assert [entry.is_inside for entry in mine] == [True, True, False, False]
    assert all(inside.guaranteed[id(entry)] for entry in mine[:2])
    assert [inside.guaranteed[id(entry)] for entry in attack[:3]] == [True, True, False]
    inside.end(attack[0])
    inside.end(attack[1])
    assert all(entry.is_inside for entry in mine), "before any other of the one that has more than its share"


def test_prompts_of_an_owner_enter_as_they_are_computed() -> None:
    inside = Inside(8, 8000, num_prefill=100)
    first, long, second = (inside.add("a", 10, 60), inside.add("a", 10, 500), inside.add("a", 10, 10))
    other = inside.add("b", 10, 70)
    assert [entry.is_inside for entry in (first, long, second, other)] == [True, False, False, True]
    inside.gate.prefilled(first)
    inside.gate.prefilled(first)
    assert long.is_inside and not second.is_inside
    inside.gate.prefilled(long)
    assert second.is_inside


def test_tokens_that_did_not_come_are_not_counted() -> None:
    inside = Inside(1, 1000)
    first = inside.add("a", 900)
    inside.add("a", 900)
    inside.add("c", 500)
    last = inside.add("c", 500)
    inside.entries.remove(first)
    inside.gate.leave(first, 2)
    inside.end(inside.entries[0])
    assert inside.entries[0].owner == "a" and not last.is_inside, "its first has cost it 2 tokens"


@pytest.mark.parametrize("is_inside", [True, False])
def test_a_request_leaves_once(is_inside: bool) -> None:
    inside = Inside(1, 100)
    first, second = inside.add("a", 10), inside.add("a", 10)
    entry = first if is_inside else second
    inside.gate.leave(entry, 10)
    inside.gate.leave(entry, 10)
    assert second.is_inside is is_inside

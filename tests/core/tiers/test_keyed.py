"""A tier asked by opaque keys, against a list in which every use of a prefix is noted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvarts.core.tiers.keyed import KeyedTier, KeyState

SEQUENCES = [[f"{branch}{page}".encode() for page in range(6)] for branch in "abc"]
SEQUENCES.append(SEQUENCES[0][:3] + [f"d{page}".encode() for page in range(3)])  # goes on from the first


class NaiveTier:
    """All keys in a list, the next to be evicted first."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self.keys: list[bytes] = []
        self.coming: set[bytes] = set()
        self.pins: dict[bytes, int] = {}

    def touch(self, keys: list[bytes]) -> None:
        here = [key for key in keys if key in self.keys]
        self.keys = [key for key in self.keys if key not in here] + here[::-1]

    def place(self, keys: list[bytes], protected: list[bytes]) -> tuple[list[bytes], list[bytes]]:
        missing = [key for key in keys if key not in self.keys]
        evicted: list[bytes] = []
        while len(missing) > self.num_places - len(self.keys):
            idle = [key for key in self.keys if not self.pins.get(key) and key not in self.coming]
            idle = [key for key in idle if key not in protected]
            if not idle:
                break
            evicted.append(idle[0])
            self.keys.remove(idle[0])
        placed = missing[: self.num_places - len(self.keys)]
        self.keys += placed[::-1]
        self.coming |= set(placed)
        return placed, evicted


class KeyedMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tier, self.naive = KeyedTier(7), NaiveTier(7)
        self.loads: list[list[bytes]] = []
        self.places: dict[bytes, int] = {}

    @rule(sequence=st.sampled_from(SEQUENCES), length=st.integers(1, 6), start=st.integers(0, 5), touches=st.booleans())
    def store(self, sequence: list[bytes], length: int, start: int, touches: bool) -> None:
        path = sequence[:length]
        places, evicted = self.tier.place(path[start:], path, path if touches else None)
        assert (list(places), evicted) == self.naive.place(path[start:], path)
        if touches:
            self.naive.touch(path)
        self.places |= places

    @rule(data=st.data(), is_stored=st.booleans())
    def settle(self, data: Any, is_stored: bool) -> None:
        keys = data.draw(st.sets(st.sampled_from(sorted(self.naive.coming)))) if self.naive.coming else set()
        self.tier.settle(keys, is_stored=is_stored)
        self.naive.coming -= keys
        if not is_stored:
            self.naive.keys = [key for key in self.naive.keys if key not in keys]

    @rule(sequence=st.sampled_from(SEQUENCES), length=st.integers(1, 6))
    def load(self, sequence: list[bytes], length: int) -> None:
        keys = [key for key in sequence[:length] if key in self.naive.keys and key not in self.naive.coming]
        assert self.tier.pin(keys) == [self.places[key] for key in keys]
        for key in keys:
            self.naive.pins[key] = self.naive.pins.get(key, 0) + 1
        self.loads.append(keys)

    @rule(data=st.data())
    def end_load(self, data: Any) -> None:
        if self.loads:
            keys = self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1)))
            self.tier.unpin(keys)
            for key in keys:
                self.naive.pins[key] -= 1

    @rule(sequence=st.sampled_from(SEQUENCES), length=st.integers(0, 6))
    def touch(self, sequence: list[bytes], length: int) -> None:
        self.tier.touch(sequence[:length])
        self.naive.touch(sequence[:length])

    @rule()
    def look(self) -> None:
        assert list(self.tier) == self.naive.keys

    @invariant()
    def same(self) -> None:
        self.tier.check()
        assert len(self.tier) == len(self.naive.keys)
        for sequence in SEQUENCES:
            for key in sequence:
                expected = KeyState.MISSING
                if key in self.naive.keys:
                    expected = KeyState.COMING if key in self.naive.coming else KeyState.STORED
                assert self.tier.state(key) is expected
        pinned = {key for key, count in self.naive.pins.items() if count} | self.naive.coming
        assert self.tier.num_used == len(pinned)


TestKeyedTier = KeyedMachine.TestCase
TestKeyedTier = pytest.mark.laws(TestKeyedTier)


def test_what_remains_of_a_sequence_is_a_prefix() -> None:
    tier = KeyedTier(8)
    for sequence in SEQUENCES[:3]:
        tier.touch(sequence)
        places, _ = tier.place(sequence)
        tier.settle(places)
    # The second lost all but two pages to the third, the first all.
    assert sorted(tier) == sorted([*SEQUENCES[1][:2], *SEQUENCES[2]])

"""Shares of owners against a model that counts everything again for each question."""

from __future__ import annotations

from fractions import Fraction
from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.base.errors import ConfigError
from kvarts.base.tenants import KEPT, PARTED, Shares

OWNERS = ("a", "b", "c", "stranger")

shares_of = st.dictionaries(st.sampled_from(OWNERS[:3]), st.integers(1, 9), max_size=3)
steps = st.lists(st.tuples(st.sampled_from(OWNERS), st.integers(-6, 12)), max_size=40)


class Naive:
    def __init__(self, total: int, shares: dict[str, int]) -> None:
        self.total = total
        self.held: list[str] = []
        together = sum(shares.values())
        several = shares if len(shares) > 1 else {}
        self.guaranteed = {owner: floor(Fraction(total * share, together)) for owner, share in several.items()}

    def room(self, owner: str) -> int:
        taken = 0
        for other in OWNERS:
            used = self.held.count(other)
            kept = floor(self.guaranteed.get(other, 0) * Fraction(KEPT))
            taken += used if other == owner else max(used, kept)
        return self.total - taken


@given(st.integers(0, 60), shares_of, steps)
def test_room_is_what_nobody_holds_and_nothing_is_kept_of(
    total: int, shares: dict[str, int], changes: list[tuple[str, int]]
) -> None:
    naive, real = Naive(total, shares), Shares(total, shares)
    for owner, change in changes:
        if change < 0:
            given = min(-change, naive.held.count(owner))
            real.give(owner, given)
            for _ in range(given):
                naive.held.remove(owner)
        else:
            fits = change <= naive.room(owner)
            assert real.take(owner, change) is fits
            naive.held += [owner] * (change * fits)
        assert real.num_used == len(naive.held) <= total
        for each in OWNERS:
            assert real.room(each) == naive.room(each) >= 0
            assert real.used(each) == naive.held.count(each)
            expected = naive.guaranteed.get(each, 0) if len(shares) > 1 else total
            assert real.guaranteed(each) == expected
            # What the others hold never takes from an owner what is kept for it.
            assert real.used(each) + real.room(each) >= floor(naive.guaranteed.get(each, 0) * KEPT)


@given(st.integers(1, 60), shares_of.filter(lambda shares: len(shares) > 1))
def test_an_owner_has_its_guarantee_once_others_give_back(total: int, shares: dict[str, int]) -> None:
    real = Shares(total, shares)
    first = next(iter(shares))
    assert real.take(first, real.room(first))
    for other in shares:
        if other != first:
            real.give(first, min(real.used(first), max(0, real.guaranteed(other) - real.room(other))))
            assert real.take(other, real.guaranteed(other))
    assert real.used(first) >= real.guaranteed(first)


def test_tenants_of_an_owner_hold_in_its_name() -> None:
    shares = Shares(10, {"a": 1, "b": 1})
    assert shares.take(f"a{PARTED}tenant", 5) and shares.used("a") == 5
    assert shares.room(f"a{PARTED}other") == 3
    shares.give("a", 5)
    assert shares.num_used == 0


def test_who_is_furthest_beyond_its_guarantee_gives_way_first() -> None:
    shares = Shares(12, {"a": 1, "b": 2})
    shares.take("a", 5)  # of 4
    shares.take("b", 4)  # of 8
    assert shares.most_over(["b", "a"]) == "a"
    assert shares.most_over(["b"]) == "b"
    assert shares.most_over([]) is None


def test_alone_an_owner_has_everything() -> None:
    shares = Shares(3, {"a": 1})
    assert shares.take("a", 3) and not shares.take("a") and shares.guaranteed("a") == 3


def test_a_total_is_not_negative() -> None:
    with pytest.raises(ConfigError, match="at least 0"):
        Shares(-1)

"""Clocks: time never goes back, and waiting ends when the time has come."""

from __future__ import annotations

import pytest

from kvarts.base.clock import Clock, VirtualClock, WallClock


@pytest.mark.parametrize("make", [VirtualClock, WallClock])
def test_the_contract_of_clocks(make: type[VirtualClock | WallClock]) -> None:
    clock: Clock = make()
    start_ns = clock.now_ns()
    assert start_ns >= 0
    clock.wait_until_ns(start_ns + 1_000_000)
    later_ns = clock.now_ns()
    assert later_ns >= start_ns + 1_000_000
    clock.wait_until_ns(start_ns)
    assert clock.now_ns() >= later_ns


def test_virtual_time_passes_by_waiting_only() -> None:
    clock = VirtualClock(5)
    assert (clock.now_ns(), clock.now_ns()) == (5, 5)
    clock.wait_until_ns(70)
    assert clock.now_ns() == 70

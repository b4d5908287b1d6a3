"""Clocks: what the time is, and waiting for a time. Times are integer nanoseconds from the clock's own beginning."""

from __future__ import annotations

from time import perf_counter_ns, sleep
from typing import Protocol

__all__ = ["Clock", "VirtualClock", "WallClock"]


class Clock(Protocol):
    """Time never goes back."""

    def now_ns(self) -> int:
        """Return the time."""

    def wait_until_ns(self, at_ns: int) -> None:
        """Return at `at_ns` or later; at once if that has passed."""


class WallClock:
    """Real time, from the moment in which the clock was made."""

    def __init__(self) -> None:
        self._began_ns = perf_counter_ns()

    def now_ns(self) -> int:
        """Return the time since the clock was made."""
        return perf_counter_ns() - self._began_ns

    def wait_until_ns(self, at_ns: int) -> None:
        """Sleep until `at_ns`."""
        while (left_ns := at_ns - self.now_ns()) > 0:
            sleep(left_ns / 1e9)


class VirtualClock:
    """Time that passes only when something waits for it."""

    def __init__(self, now_ns: int = 0) -> None:
        self._now_ns = now_ns

    def now_ns(self) -> int:
        """Return the time that was last waited for."""
        return self._now_ns

    def wait_until_ns(self, at_ns: int) -> None:
        """Let time pass until `at_ns`."""
        self._now_ns = max(self._now_ns, at_ns)

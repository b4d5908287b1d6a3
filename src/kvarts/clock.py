"""Clocks: what the time is, and waiting for a time. Times are integer nanoseconds from the clock's own beginning."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns, sleep
from typing import Protocol

__all__ = ["Clock", "PacedClock", "PutOffClock", "VirtualClock", "WallClock"]


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


class PacedClock:
    """Model time that keeps pace with real time, `speedup` times as fast, and stands still while an engine has work.

    A step begins where the one before it ended, or when work comes to an engine at rest, and ends exactly when it
    should, also if the process was late. So lag changes when things happen and never what happens: the same arrivals
    on a VirtualClock give the same steps. Owner of the lag, in real time.
    """

    def __init__(self, *, speedup: float = 1.0, wall: Clock | None = None) -> None:
        self.late_ns = 0
        """How late the last wait ended."""
        self.most_late_ns = 0
        """How late a wait ended, the most of all."""
        self.is_at_rest: Callable[[], bool] = lambda: True
        """Whether the engine has no work. To be set once there is an engine."""
        self.speedup = speedup
        self._wall = WallClock() if wall is None else wall
        self._now_ns = 0
        self._due_ns = 0

    def now_ns(self) -> int:
        """Return the model time: of the last step's end, or, at rest, the time that it is."""
        if self.is_at_rest():
            self._now_ns = max(self._now_ns, round(self._wall.now_ns() * self.speedup))
        return self._now_ns

    def wait_until_ns(self, at_ns: int) -> None:
        """Sleep until it is `at_ns` in model time, and let it be that, however late it is."""
        self._due_ns = end_ns = round(at_ns / self.speedup)
        self._wall.wait_until_ns(end_ns)
        self.late_ns = max(0, self._wall.now_ns() - end_ns)
        self.most_late_ns = max(self.most_late_ns, self.late_ns)
        self._now_ns = max(self._now_ns, at_ns)

    def since_due_ns(self) -> int:
        """Return how long ago the last wait should have ended, in real time."""
        return self._wall.now_ns() - self._due_ns


class PutOffClock:
    """Another clock, on which waits are put off until `wait`: what is done in between is done in their time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._due_ns: int | None = None

    def now_ns(self) -> int:
        """Return the time, or that which is waited for."""
        now_ns = self._clock.now_ns()
        return now_ns if self._due_ns is None else max(now_ns, self._due_ns)

    def wait_until_ns(self, at_ns: int) -> None:
        """Note that it is to be waited until `at_ns`."""
        self._due_ns = self.now_ns() if self._due_ns is None else self._due_ns
        self._due_ns = max(self._due_ns, at_ns)

    def wait(self) -> None:
        """Wait for what was put off."""
        due_ns, self._due_ns = self._due_ns, None
        if due_ns is not None:
            self._clock.wait_until_ns(due_ns)

"""Clocks: the current time, and waiting. Times are integer nanoseconds since a clock's own start."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns, sleep
from typing import Protocol

__all__ = ["Clock", "PacedClock", "PutOffClock", "VirtualClock", "WallClock"]


class Clock(Protocol):
    """A monotonic clock."""

    def now_ns(self) -> int:
        """Return the time."""

    def wait_until_ns(self, at_ns: int) -> None:
        """Return at `at_ns` or later; immediately if that has passed."""

    def wait_unless_asked(self, at_ns: int) -> bool:
        """Wait until `at_ns`, and return True; or return False as soon as a task is queued, if there is a queue."""
        self.wait_until_ns(at_ns)
        return True


class WallClock(Clock):
    """Real time since the creation of the clock."""

    def __init__(self) -> None:
        self._began_ns = perf_counter_ns()

    def now_ns(self) -> int:
        """Return the time since creation."""
        return perf_counter_ns() - self._began_ns

    def wait_until_ns(self, at_ns: int) -> None:
        """Sleep until `at_ns`."""
        while (left_ns := at_ns - self.now_ns()) > 0:
            sleep(left_ns / 1e9)


class VirtualClock(Clock):
    """Time that advances only through waits."""

    def __init__(self, now_ns: int = 0) -> None:
        self._now_ns = now_ns

    def now_ns(self) -> int:
        """Return the latest time that was waited for."""
        return self._now_ns

    def wait_until_ns(self, at_ns: int) -> None:
        """Advance to `at_ns`."""
        self._now_ns = max(self._now_ns, at_ns)


class PacedClock(Clock):
    """Model time that follows real time, `speedup` times as fast, and advances only by steps while an engine has work.

    A step begins where the previous one ended, or when work arrives at an idle engine, and ends exactly on schedule,
    even if the process is late. Lag therefore changes when things happen in real time, but never what happens: the same
    arrivals on a VirtualClock give the same steps. Owner of the lag, in real time.
    """

    def __init__(self, *, speedup: float = 1.0, wall: Clock | None = None) -> None:
        self.late_ns = 0
        """Lateness of the end of the last wait."""
        self.most_late_ns = 0
        """Largest lateness of any wait."""
        self.is_at_rest: Callable[[], bool] = lambda: True
        """Whether the engine is idle. To be set as soon as there is an engine."""
        self.is_asked: Callable[[float], bool] | None = None
        """Waits for a task of the engine, for at most the given seconds, and returns whether there is one. To be set as
        soon as there is a queue.
        """
        self.speedup = speedup
        self._wall = WallClock() if wall is None else wall
        self._now_ns = 0
        self._due_ns = 0

    def now_ns(self) -> int:
        """Return the model time: the end of the last step, or the current time if the engine is idle."""
        if self.is_at_rest():
            self._now_ns = max(self._now_ns, round(self._wall.now_ns() * self.speedup))
        return self._now_ns

    def wait_until_ns(self, at_ns: int) -> None:
        """Sleep until `at_ns` in model time; afterwards the model time is exactly `at_ns`, regardless of lateness."""
        self._wall.wait_until_ns(round(at_ns / self.speedup))
        self._reach(at_ns)

    def wait_unless_asked(self, at_ns: int) -> bool:
        """Wait until `at_ns`, and return True; or return False as soon as a task is queued, which happens then."""
        due_ns = round(at_ns / self.speedup)
        if self.is_asked is None:
            self._wall.wait_until_ns(due_ns)
        else:
            while (left_ns := due_ns - self._wall.now_ns()) > 0:
                if self.is_asked(left_ns / 1e9):
                    self._due_ns = self._wall.now_ns()
                    self.pass_to(min(at_ns - 1, round(self._due_ns * self.speedup)))
                    return False
        self._reach(at_ns)
        return True

    def _reach(self, at_ns: int) -> None:
        self._due_ns = due_ns = round(at_ns / self.speedup)
        self.late_ns = max(0, self._wall.now_ns() - due_ns)
        self.most_late_ns = max(self.most_late_ns, self.late_ns)
        self.pass_to(at_ns)

    def pass_to(self, at_ns: int) -> None:
        """Let the model time be at least `at_ns`, without a wait."""
        self._now_ns = max(self._now_ns, at_ns)

    def since_due_ns(self) -> int:
        """Return the real time elapsed since the last wait should have ended."""
        return self._wall.now_ns() - self._due_ns


class PutOffClock(Clock):
    """Wraps a clock and defers waits until `wait` is called, so that work in between uses up their time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._due_ns: int | None = None

    def now_ns(self) -> int:
        """Return the time, or the end of the deferred wait if later."""
        now_ns = self._clock.now_ns()
        return now_ns if self._due_ns is None else max(now_ns, self._due_ns)

    def wait_until_ns(self, at_ns: int) -> None:
        """Defer a wait until `at_ns`."""
        self._due_ns = self.now_ns() if self._due_ns is None else self._due_ns
        self._due_ns = max(self._due_ns, at_ns)

    def wait(self) -> None:
        """Perform the deferred wait."""
        due_ns, self._due_ns = self._due_ns, None
        if due_ns is not None:
            self._clock.wait_until_ns(due_ns)

"""Measured speeds of a real executor: of prefill, and of transfers.

This module does not read a clock. Measurements are taken from the results of steps, so that the same results lead to
the same choices.
"""

from __future__ import annotations

from kvarts.offload.channel import NS_PER_S, Channel

__all__ = ["MeasuredChannel", "MeasuredPrefill"]

KEPT = 0.9
"""The weight that earlier measurements keep after each new one."""


class MeasuredPrefill:
    """PrefillTimes in proportion to tokens, from the steps that computed prompts, with recent ones weighing most."""

    def __init__(self) -> None:
        self._num_tokens = 0.0
        self._duration_ns = 0.0

    def measure(self, num_tokens: int, num_decodes: int, duration_ns: int) -> None:
        """Record a step with `num_tokens` tokens of prompts, if these are more than its decodes."""
        if num_tokens > num_decodes:
            self._num_tokens = KEPT * self._num_tokens + num_tokens
            self._duration_ns = KEPT * self._duration_ns + max(0, duration_ns)

    def prefill_ns(self, start: int, end: int) -> int | None:
        """Return the time to compute tokens [start, end) of a sequence; None before the first measurement."""
        if not self._duration_ns:
            return None
        return round((end - start) * self._duration_ns / self._num_tokens)


class MeasuredChannel(Channel):
    """A channel with the speed of its last transfers, and at first with its configured speed.

    `submit` returns an estimate; `ended` must follow.
    """

    __slots__ = ("_measured_bytes", "_measured_ns", "_most_bytes_per_s", "_num_under_way")

    def __init__(self, name: str, *, latency_us: float, bytes_per_s: int) -> None:
        super().__init__(name, latency_us=latency_us, bytes_per_s=bytes_per_s)
        self._most_bytes_per_s = bytes_per_s
        self._measured_bytes = 0.0
        self._measured_ns = 0.0
        self._num_under_way = 0

    def wait_ns(self, now_ns: int) -> int:
        """Return how long a transfer submitted at `now_ns` should wait for running ones."""
        return self._num_under_way * NS_PER_S // self._bytes_per_s

    def submit(self, now_ns: int, num_bytes: int) -> int:
        """Return when a transfer of `num_bytes` submitted at `now_ns` should end."""
        self.num_bytes += num_bytes
        self.num_transfers += 1
        end_ns = now_ns + self.within_ns(now_ns, num_bytes)
        self._num_under_way += num_bytes
        return end_ns

    def ended(self, num_bytes: int, duration_ns: int | None) -> None:
        """Record that a transfer of `num_bytes` has ended; it took `duration_ns`, if known."""
        self._num_under_way -= num_bytes
        assert self._num_under_way >= 0, f"{self.name} carried more than it was given"
        if not duration_ns:
            return
        self._measured_bytes = KEPT * self._measured_bytes + num_bytes
        self._measured_ns = KEPT * self._measured_ns + duration_ns
        self._bytes_per_s = max(1, int(self._measured_bytes * NS_PER_S / self._measured_ns))

    def withdraw(self, now_ns: int, num_bytes: int) -> None:
        """Do nothing: what was begun is carried to its end."""

    def passed_over(self) -> None:
        """Note that a transfer was not submitted because it would take too long.

        The measured speed may be outdated, which only another transfer can show. So each such case raises the estimate
        towards the configured speed.
        """
        self._bytes_per_s = min(self._most_bytes_per_s, max(self._bytes_per_s + 1, int(self._bytes_per_s / KEPT)))

"""What a real executor's work takes, as measured: how fast it computes prompts, and how fast pages move.

Nothing here reads a clock. Measurements come from the results of steps, so that the same results make the same choices.
"""

from __future__ import annotations

from kvarts.offload.channel import NS_PER_S, Channel

__all__ = ["MeasuredChannel", "MeasuredPrefill"]

KEPT = 0.9
"""How much of what was measured so far still counts after another measurement."""


class MeasuredPrefill:
    """PrefillTimes from the steps that computed prompts, the last ones most, by the token."""

    def __init__(self) -> None:
        self._num_tokens = 0.0
        self._duration_ns = 0.0

    def measure(self, num_tokens: int, num_decodes: int, duration_ns: int) -> None:
        """Take note of a step with `num_tokens` tokens of prompts, if these are more than its decodes."""
        if num_tokens > num_decodes:
            self._num_tokens = KEPT * self._num_tokens + num_tokens
            self._duration_ns = KEPT * self._duration_ns + max(0, duration_ns)

    def prefill_ns(self, start: int, end: int) -> int | None:
        """Return how long tokens [start, end) of a sequence take; None before anything was measured."""
        if not self._duration_ns:
            return None
        return round((end - start) * self._duration_ns / self._num_tokens)


class MeasuredChannel(Channel):
    """A channel that is as fast as its last transfers were, and at first as fast as it is said to be.

    `submit` answers with an estimate; `ended` must follow.
    """

    __slots__ = ("_measured_bytes", "_measured_ns", "_most_bytes_per_s", "_num_under_way")

    def __init__(self, name: str, *, latency_us: float, bytes_per_s: int) -> None:
        super().__init__(name, latency_us=latency_us, bytes_per_s=bytes_per_s)
        self._most_bytes_per_s = bytes_per_s
        self._measured_bytes = 0.0
        self._measured_ns = 0.0
        self._num_under_way = 0

    def wait_ns(self, now_ns: int) -> int:
        """Return how long a transfer that is submitted at `now_ns` should wait for those under way."""
        return self._num_under_way * NS_PER_S // self._bytes_per_s

    def submit(self, now_ns: int, num_bytes: int) -> int:
        """Return when a transfer of `num_bytes` that is submitted at `now_ns` should end."""
        self.num_bytes += num_bytes
        self.num_transfers += 1
        end_ns = now_ns + self.within_ns(now_ns, num_bytes)
        self._num_under_way += num_bytes
        return end_ns

    def ended(self, num_bytes: int, duration_ns: int | None) -> None:
        """Take note that a transfer of `num_bytes` has ended; it took `duration_ns`, where that is known."""
        self._num_under_way -= num_bytes
        assert self._num_under_way >= 0, f"{self.name} carried more than it was given"
        if not duration_ns:
            return
        self._measured_bytes = KEPT * self._measured_bytes + num_bytes
        self._measured_ns = KEPT * self._measured_ns + duration_ns
        self._bytes_per_s = max(1, int(self._measured_bytes * NS_PER_S / self._measured_ns))

    def passed_over(self) -> None:
        """Take note that nothing was submitted because it would have taken too long.

        What was measured may be true no longer, and only another transfer can tell: the more often that happens, the
        less it counts.
        """
        self._bytes_per_s = min(self._most_bytes_per_s, max(self._bytes_per_s + 1, int(self._bytes_per_s / KEPT)))

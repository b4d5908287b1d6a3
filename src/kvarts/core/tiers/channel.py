"""Channels: each is one direction of one connection between tiers, of known or of measured speed.

No channel reads a clock. Measurements are taken from the results of steps, so that the same results lead to the same
choices.
"""

from __future__ import annotations

from typing import ClassVar, Final

from mypy_extensions import mypyc_attr

from kvarts.base.limits import LATEST_NS, TooLateError

__all__ = ["Channel", "MeasuredChannel", "MeasuredPrefill"]

NS_PER_S: Final = 1_000_000_000


@mypyc_attr(allow_interpreted_subclasses=True)
class Channel:
    """Carries transfers one after the other, in the order in which they were submitted, while the device computes.

    `name`: its name in reports.
    """

    __slots__ = ("_bytes_per_s", "_free_ns", "_latency_ns", "name", "num_bytes", "num_transfers")

    can_be_awaited: ClassVar[bool] = True
    """Whether a step may use a load before it ends: no other engine can delay it, so the step's end is known."""

    def __init__(self, name: str, *, latency_us: float, bytes_per_s: int) -> None:
        self.name = name
        self._latency_ns = round(latency_us * 1000)
        self._bytes_per_s = bytes_per_s
        self._free_ns = 0
        self.num_bytes = 0
        self.num_transfers = 0

    def wait_ns(self, now_ns: int) -> int:
        """Return how long a transfer submitted at `now_ns` waits for earlier ones."""
        return self._free_ns - now_ns if self._free_ns > now_ns else 0

    def within_ns(self, now_ns: int, num_bytes: int) -> int:
        """Return the time from `now_ns` until a transfer of `num_bytes` submitted then would end."""
        return self.wait_ns(now_ns) + self._latency_ns - (-num_bytes * NS_PER_S // self._bytes_per_s)

    def num_within(self, now_ns: int, bound_ns: int, unit_bytes: int) -> int:
        """Return how many units of `unit_bytes` a transfer submitted at `now_ns` could carry within `bound_ns`.

        At least one if the channel is idle, so that a slow channel carries one unit at a time.
        """
        num_units = self.num_by(now_ns, bound_ns, unit_bytes)
        return num_units if num_units or self.wait_ns(now_ns) else 1

    def num_by(self, now_ns: int, bound_ns: int, unit_bytes: int) -> int:
        """Return the same, without that exception."""
        left_ns = bound_ns - self.wait_ns(now_ns) - self._latency_ns
        return left_ns * self._bytes_per_s // (unit_bytes * NS_PER_S) if left_ns > 0 else 0

    def withdraw(self, now_ns: int, num_bytes: int) -> None:
        """Carry the last transfer submitted, of `num_bytes`, no further than it is at `now_ns`."""
        self._free_ns = max(now_ns, self._free_ns - self._latency_ns + (-num_bytes * NS_PER_S // self._bytes_per_s))

    def passed_over(self) -> None:
        """Note that a transfer was not submitted because of its long wait. Ignored by a channel of known speed."""

    def ended(self, num_bytes: int, duration_ns: int | None) -> None:
        """Note that a transfer of `num_bytes` has ended. A channel of known speed has predicted it exactly."""

    def submit(self, now_ns: int, num_bytes: int) -> int:
        """Return when a transfer of `num_bytes` submitted at `now_ns` ends.

        It starts when the previous transfer has ended, and takes the latency plus the bytes over the bandwidth, rounded
        up to whole nanoseconds. Raise TooLateError if the end is beyond LATEST_NS.
        """
        self.num_bytes += num_bytes
        self.num_transfers += 1
        start_ns = self._free_ns if self._free_ns > now_ns else now_ns
        self._free_ns = start_ns + self._latency_ns - (-num_bytes * NS_PER_S // self._bytes_per_s)
        if self._free_ns > LATEST_NS:
            raise TooLateError
        return self._free_ns


KEPT: Final = 0.9
"""The weight that earlier measurements keep after each new one."""


class MeasuredPrefill:
    """Times to compute prompts, in proportion to tokens, from steps that computed some; recent ones weigh most."""

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

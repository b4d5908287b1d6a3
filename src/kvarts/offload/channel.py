"""A channel: one direction of one connection between tiers, in virtual time."""

from __future__ import annotations

from typing import ClassVar

from kvarts.limits import LATEST_NS, TooLateError

__all__ = ["Channel"]

NS_PER_S = 1_000_000_000


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

    def busy_ns(self, now_ns: int) -> int:
        """Return how long it carries something from `now_ns` on, if nothing is submitted."""
        return self.wait_ns(now_ns)

    def within_ns(self, now_ns: int, num_bytes: int) -> int:
        """Return the time from `now_ns` until a transfer of `num_bytes` submitted then would end."""
        return self.wait_ns(now_ns) + self._latency_ns - (-num_bytes * NS_PER_S // self._bytes_per_s)

    def num_within(self, now_ns: int, bound_ns: int, unit_bytes: int) -> int:
        """Return how many units of `unit_bytes` a transfer submitted at `now_ns` could carry within `bound_ns`.

        At least one if the channel is idle, so that a slow channel carries one unit at a time.
        """
        wait_ns = self.wait_ns(now_ns)
        left_ns = bound_ns - wait_ns - self._latency_ns
        num_units = left_ns * self._bytes_per_s // (unit_bytes * NS_PER_S) if left_ns > 0 else 0
        return num_units if wait_ns or num_units else 1

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

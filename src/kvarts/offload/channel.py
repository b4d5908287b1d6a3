"""A channel: one direction of one connection between tiers, in virtual time."""

from __future__ import annotations

from kvarts.limits import LATEST_NS, TooLateError

__all__ = ["Channel"]

NS_PER_S = 1_000_000_000


class Channel:
    """Carries transfers one after the other, in the order in which they were submitted, while the device computes.

    `name`: what reports call it.
    """

    __slots__ = ("_bytes_per_s", "_free_ns", "_latency_ns", "name", "num_bytes", "num_transfers")

    def __init__(self, name: str, *, latency_us: float, bytes_per_s: int) -> None:
        self.name = name
        self._latency_ns = round(latency_us * 1000)
        self._bytes_per_s = bytes_per_s
        self._free_ns = 0
        self.num_bytes = 0
        self.num_transfers = 0

    def submit(self, now_ns: int, num_bytes: int) -> int:
        """Return when a transfer of `num_bytes` that is submitted at `now_ns` ends.

        It starts when the transfer before it has ended, and takes the latency plus the bytes over the bandwidth,
        rounded up to whole nanoseconds. Raise TooLateError for one that does not end in time.
        """
        self.num_bytes += num_bytes
        self.num_transfers += 1
        start_ns = self._free_ns if self._free_ns > now_ns else now_ns
        self._free_ns = start_ns + self._latency_ns - (-num_bytes * NS_PER_S // self._bytes_per_s)
        if self._free_ns > LATEST_NS:
            raise TooLateError
        return self._free_ns

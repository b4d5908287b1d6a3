"""Copies between the device and host memory below a radix cache, SGLang's HiCache, in virtual time.

Copies that were queued are begun together, as one transfer of their channel, and end together. A copy to the device
delays the step that begins it only as far as its last layer arrives late. With `write_back`, a step also waits for what
was copied to make room for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec

from kvarts.core.config import WritePolicy
from kvarts.core.kv.hicache import HostCopy, HostRadixCache
from kvarts.core.kv.transfer import TransferTotals
from kvarts.core.tiers.channel import Channel, TierSpec
from kvarts.core.tiers.transfers import NEVER_NS, OffloadCounts

__all__ = ["HostCopies", "HostMemory"]


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Host memory below a radix cache. `page_bytes`: of a page in all `num_layers` layers."""

    spec: TierSpec
    page_bytes: int
    num_layers: int
    policy: WritePolicy = "write_through"


class HostCopies:
    """Owner of the copies under way; `scheduler.host`. `to_host`, `to_device`: their channels."""

    def __init__(self, cache: HostRadixCache, host: HostMemory) -> None:
        self.tier_names: Final = (host.spec.name,)
        self.to_host: Channel = host.spec.write.open()
        self.to_device: Channel = host.spec.read.open()
        self._cache = cache
        self._host = host
        self._counts = OffloadCounts()
        self._copies: deque[tuple[int, list[HostCopy]]] = deque()
        """The copies to host memory under way, each batch with its end."""
        self._loads: deque[tuple[int, list[HostCopy]]] = deque()
        """The loads under way, each batch with its end."""
        self._arrives_ns = 0
        """When the loads that the planned step begins end; 0 without any."""
        self._waited_ns = {host.spec.read.name: 0, host.spec.write.name: 0}

    # Copies -----------------------------------------------------------------------------------------------

    def begin_copies(self, now_ns: int) -> None:
        """Begin the copies to host memory that were queued."""
        copies = self._cache.begin_copies()
        if copies:
            self._copies.append((self.to_host.submit(now_ns, self._num_bytes(copies)), copies))

    def begin_loads(self, now_ns: int) -> None:
        """Begin the loads of the step that is planned."""
        loads = self._cache.begin_loads()
        if loads:
            self._arrives_ns = self.to_device.submit(now_ns, self._num_bytes(loads))
            self._loads.append((self._arrives_ns, loads))

    def end_copies(self, now_ns: int) -> None:
        """Let what has ended by `now_ns` be in use no more: copies, then loads."""
        while self._copies and self._copies[0][0] <= now_ns:
            copies = self._copies.popleft()[1]
            self._counts.num_stores += len(copies)
            self._cache.end(copies)
        while self._loads and self._loads[0][0] <= now_ns:
            loads = self._loads.popleft()[1]
            self._counts.num_loads += len(loads)
            self._cache.end(loads)

    def _num_bytes(self, copies: Sequence[HostCopy]) -> int:
        return sum([copy.num_pages for copy in copies]) * self._host.page_bytes

    # As the tiers below a device -----------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a copy is under way, or about to begin."""
        return bool(self._copies or self._loads or self._cache.tiered.queued)

    @property
    def next_ns(self) -> int:
        """The end of the next copy to end; NEVER_NS without one."""
        return min([under_way[0][0] for under_way in (self._copies, self._loads) if under_way], default=NEVER_NS)

    def advance_to(self, now_ns: int) -> bool:
        """Return whether a copy has ended by `now_ns`: the next plan takes note of it."""
        return self.next_ns <= now_ns

    def step_ns(self, now_ns: int, duration_ns: int) -> int:
        """Return the duration of the planned step, which starts at `now_ns` and would take `duration_ns` alone."""
        tree, waits_ns = self._cache.tiered, 0
        if tree.num_written:
            waits_ns = self.to_host.submit(now_ns, tree.num_written * self._host.page_bytes) - now_ns
            self._counts.num_stores += 1
            self._waited_ns[self._host.spec.write.name] += waits_ns
            tree.num_written = 0
        if self._arrives_ns:
            last_ns = self._arrives_ns - now_ns + duration_ns // self._host.num_layers
            if last_ns > duration_ns:
                self._waited_ns[self._host.spec.read.name] += last_ns - duration_ns
                duration_ns = last_ns
            self._arrives_ns = 0
        return waits_ns + duration_ns

    def measure(self, num_tokens: int, num_decodes: int, duration_ns: int) -> None:
        """Do nothing: nothing is weighed against computing."""

    def num_pages(self) -> tuple[int, ...]:
        """Return the pages of host memory that copies read or write, and the others with KV."""
        tree = self._cache.tiered
        num_copying = sum([copy.num_pages for copy in self._cache.copying])
        return num_copying, tree.total_below - tree.num_free_below - num_copying

    def totals(self) -> TransferTotals:
        """Return the totals of copies so far."""
        tree = self._cache.tiered
        self._counts.num_pages_without_room = tree.num_refused
        return TransferTotals(
            self._counts.by_name(),
            {channel.name: channel.num_bytes for channel in (self.to_device, self.to_host)},
            {self._host.spec.name: tree.num_evicted_below},
            dict(self._waited_ns),
        )

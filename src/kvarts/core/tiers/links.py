"""Links between workers, and between these and a store they share: how long KV takes, in virtual time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from heapq import heapify, heappop, heappush
from math import ceil
from typing import Protocol, cast

from kvarts.core.tiers.channel import NS_PER_S
from kvarts.core.tiers.rates import NEVER_NS, End, Job, SharedRates

__all__ = ["FixedRate", "LinkTransfer", "Links", "PeerLinks", "Pull", "SharedLinks", "StoreLinks"]
__all__ += ["StoreTransfer", "slower_of"]


class LinkTransfer:
    """A transfer from worker `source` to worker `target`: the prompt of a handoff, or pages that are pulled."""

    __slots__ = ("source", "target")

    def __init__(self, source: int, target: int) -> None:
        self.source = source
        self.target = target


class Links(Protocol):
    """Transfers between workers. Promises: every transfer that was begun and not cancelled ends exactly once."""

    def begin(self, carried: LinkTransfer, num_bytes: int, now_ns: int) -> bool:
        """Begin a transfer; return whether it has already ended because it takes no time."""

    def cancel(self, carried: LinkTransfer, now_ns: int) -> None:
        """Abort a transfer that is under way; its KV never arrives."""

    def slow_down(self, worker: int, factor: int, now_ns: int) -> None:
        """Make everything that `worker` sends and receives take `factor` times its usual time from now on."""

    def under_way(self) -> Sequence[LinkTransfer]:
        """Return the transfers under way."""

    def next_ns(self) -> int:
        """Return when the next transfer ends if none begins before; NEVER_NS if none is under way."""

    def take_ended(self, now_ns: int) -> Sequence[LinkTransfer]:
        """Return the transfers that end now, in the order in which they began."""


class FixedRate:
    """Each transfer runs at `bytes_per_s`, independent of the others, plus `latency_ns`; None: latency only."""

    def __init__(self, bytes_per_s: float | None, latency_ns: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_ns = latency_ns
        self._ends: list[tuple[int, int, LinkTransfer]] = []
        self._num_begun = 0
        self._factors: dict[int, int] = {}

    def within_ns(self, source: int, target: int, num_bytes: int) -> int:
        """Return how long a transfer takes."""
        duration_ns = self._latency_ns
        if self._bytes_per_s is not None:
            duration_ns += ceil(num_bytes / self._bytes_per_s * 1e9)
        return duration_ns * max(self._factors.get(source, 1), self._factors.get(target, 1))

    def begin(self, carried: LinkTransfer, num_bytes: int, now_ns: int) -> bool:
        """Begin a transfer; return whether it takes no time."""
        duration_ns = self._latency_ns
        if self._bytes_per_s is not None:
            duration_ns += ceil(num_bytes / self._bytes_per_s * 1e9)
        if not duration_ns:
            return True
        if self._factors:
            duration_ns *= slower_of(self._factors, carried)
        heappush(self._ends, (now_ns + duration_ns, self._num_begun, carried))
        self._num_begun += 1
        return False

    def cancel(self, carried: LinkTransfer, now_ns: int) -> None:
        """Abort a transfer that is under way."""
        self._ends = [each for each in self._ends if each[2] is not carried]
        heapify(self._ends)

    def slow_down(self, worker: int, factor: int, now_ns: int) -> None:
        """Make the rest of each transfer of `worker`, its latency included, take `factor` times its usual time."""
        before = [slower_of(self._factors, handoff) for _, _, handoff in self._ends]
        self._factors[worker] = factor
        self._ends = [
            (now_ns - (now_ns - end_ns) * slower_of(self._factors, handoff) // factor_before, number, handoff)
            for (end_ns, number, handoff), factor_before in zip(self._ends, before, strict=True)
        ]
        heapify(self._ends)

    def under_way(self) -> list[LinkTransfer]:
        """Return the transfers under way."""
        return [handoff for _, _, handoff in self._ends]

    def next_ns(self) -> int:
        """Return when the next transfer ends."""
        return self._ends[0][0] if self._ends else NEVER_NS

    def take_ended(self, now_ns: int) -> list[LinkTransfer]:
        """Return the transfers that end now."""
        ended: list[LinkTransfer] = []
        while self._ends and self._ends[0][0] <= now_ns:
            ended.append(heappop(self._ends)[2])
        return ended


def slower_of(factors: dict[int, int], handoff: LinkTransfer) -> int:
    """Return the slowdown of a transfer: that of its slower end."""
    return max(factors.get(handoff.source, 1), factors.get(handoff.target, 1))


class SharedLinks:
    """Each link sends and receives at `bytes_per_s`, shared evenly by its transfers; `latency_ns` follows each.

    `link_of`: the link that a worker uses; by default each has its own.
    """

    def __init__(self, bytes_per_s: float, latency_ns: int, link_of: Mapping[int, int] | None = None) -> None:
        self._link_of = link_of
        self._bytes_per_ns = Fraction(bytes_per_s) / NS_PER_S
        self._latency = FixedRate(None, latency_ns)
        self._shared = SharedRates()
        self._factors: dict[int, int] = {}

    def within_ns(self, source: int, target: int, num_bytes: int) -> int:
        """Return how long one more transfer would take if no other began or ended."""
        alone = self._shared.rate_of_one_more(self._ends_of(source, target))
        factor = max(self._factors.get(source, 1), self._factors.get(target, 1))
        return ceil(num_bytes * factor / alone) + self._latency.within_ns(source, target, 0)

    def begin(self, carried: LinkTransfer, num_bytes: int, now_ns: int) -> bool:
        """Begin a transfer; return whether it takes no time."""
        if not num_bytes:
            return self._latency.begin(carried, 0, now_ns)
        self._shared.begin(self.job_of(carried, num_bytes), now_ns)
        return False

    def job_of(self, handoff: LinkTransfer, num_bytes: int) -> Job:
        """Return a job that shares the rates of both links."""
        ends = self._ends_of(handoff.source, handoff.target)
        return Job(handoff, num_bytes, ends, slower_of(self._factors, handoff))

    def _ends_of(self, source: int, target: int) -> tuple[tuple[End, Fraction], ...]:
        if self._link_of is not None:
            source, target = self._link_of[source], self._link_of[target]
        rate = self._bytes_per_ns
        return (("send", source), rate), (("receive", target), rate)

    def cancel(self, carried: LinkTransfer, now_ns: int) -> None:
        """Abort a transfer that is under way; the others get its share of the rate from now on."""
        self._shared.advance(now_ns)
        for job in self._shared.jobs:
            if job.owner is carried:
                self._shared.remove(job)
                return
        self._latency.cancel(carried, now_ns)

    def slow_down(self, worker: int, factor: int, now_ns: int) -> None:
        """Make the rest of each transfer of `worker` take `factor` times its usual time."""
        self._shared.advance(now_ns)
        self._factors[worker] = factor
        for job in self._shared.jobs:
            self._shared.slow_down(job, slower_of(self._factors, cast(LinkTransfer, job.owner)))
        self._latency.slow_down(worker, factor, now_ns)

    def under_way(self) -> list[LinkTransfer]:
        """Return the transfers under way."""
        return [*(cast(LinkTransfer, job.owner) for job in self._shared.jobs), *self._latency.under_way()]

    def next_ns(self) -> int:
        """Return when the next transfer ends, if none begins before."""
        return min(self._latency.next_ns(), self._shared.next_ns())

    def take_ended(self, now_ns: int) -> list[LinkTransfer]:
        """Return the transfers that end now."""
        if now_ns < self.next_ns():
            return []  # keep the sums independent of times at which nothing happens
        ended: list[LinkTransfer] = []
        for job in self._shared.take_ended(now_ns):
            handoff = cast(LinkTransfer, job.owner)
            if self._latency.begin(handoff, 0, now_ns):
                ended.append(handoff)
        return ended + self._latency.take_ended(now_ns)


class Pull(LinkTransfer):
    """Transfer `number` of the tiers of worker `target`, which reads pages from the host memory of `source`."""

    __slots__ = ("number",)

    def __init__(self, source: int, target: int, number: int) -> None:
        super().__init__(source, target)
        self.number = number


class PeerLinks:
    """The links of a fleet, as the tiers of a worker see them that read from other workers."""

    def __init__(self, links: FixedRate | SharedLinks) -> None:
        self._links = links
        self.pulls: dict[LinkTransfer, Pull] = {}
        """Transfers under way."""
        self.cut: set[int] = set()
        """Workers whose link is cut."""

    def reaches(self, source: int, worker: int) -> bool:
        """Return whether neither link is cut."""
        return not self.cut or self.cut.isdisjoint((source, worker))

    def begin_pull(self, source: int, worker: int, number: int, num_bytes: int, now_ns: int) -> None:
        """Begin a transfer."""
        pull = Pull(source, worker, number)
        self.pulls[pull] = pull
        is_over = self._links.begin(pull, num_bytes, now_ns)
        assert not is_over, "pages have bytes, and the links a rate"

    def within_ns(self, source: int, worker: int, num_bytes: int) -> int:
        """Return how long one more transfer would take if no other began or ended."""
        return self._links.within_ns(source, worker, num_bytes)

    def cancel(self, pull: Pull, now_ns: int) -> None:
        """Abort a transfer that is under way."""
        del self.pulls[pull]
        self._links.cancel(pull, now_ns)


class StoreTransfer:
    """A transfer of a worker to or from a store, by the number that the tiers below the worker have given it."""

    __slots__ = ("is_read", "num_bytes", "number", "worker")

    def __init__(self, worker: int, number: int, num_bytes: int, *, is_read: bool) -> None:
        self.worker = worker
        self.number = number
        self.num_bytes = num_bytes
        self.is_read = is_read


class StoreLinks:
    """The links between a store and the workers that share it.

    A transfer begins after `latency_ns`. Then it shares, with all that go in the same direction, the rate of the store,
    and with those of its worker the rate of that worker. `write_bytes_per_s`: that of a worker's writes, if it differs
    from that of its reads.
    """

    def __init__(
        self,
        store_bytes_per_s: float,
        worker_bytes_per_s: float,
        latency_ns: int,
        write_bytes_per_s: float | None = None,
    ) -> None:
        self._store_rate = Fraction(store_bytes_per_s) / NS_PER_S
        self._worker_rate = Fraction(worker_bytes_per_s) / NS_PER_S
        self._write_rate = self._worker_rate
        if write_bytes_per_s is not None:
            self._write_rate = Fraction(write_bytes_per_s) / NS_PER_S
        self._latency_ns = latency_ns
        self._shared = SharedRates()
        self._coming: list[tuple[int, int, StoreTransfer]] = []
        """Transfers that begin when their latency has passed, as a heap: time, and number in order of submission."""
        self._num_begun = 0
        self.now_ns = 0
        """The time of the fleet."""

    @property
    def busy_ns(self) -> tuple[int, int]:
        """How long anything was read from the store, and written to it."""
        busy_ns = self._shared.busy_ns
        return busy_ns.get(("read", -1), 0), busy_ns.get(("write", -1), 0)

    def begin(self, worker: int, number: int, num_bytes: int, now_ns: int, *, is_read: bool) -> None:
        """Begin a transfer of `worker`."""
        transfer = StoreTransfer(worker, number, num_bytes, is_read=is_read)
        heappush(self._coming, (now_ns + self._latency_ns, self._num_begun, transfer))
        self._num_begun += 1

    def within_ns(self, worker: int, num_bytes: int, *, is_read: bool) -> int:
        """Return how long one more transfer would take if no other began or ended."""
        rate = self._shared.rate_of_one_more(self._ends(worker, is_read=is_read))
        return self._latency_ns + ceil(num_bytes / rate)

    def left_ns(self, worker: int, number: int, now_ns: int) -> int:
        """Return how long transfer `number` of `worker` would still take if no other began or ended; 0 if it has."""
        for begin_ns, _, transfer in self._coming:
            if (transfer.worker, transfer.number) == (worker, number):
                rate = self._shared.rate_of_one_more(self._ends(worker, is_read=transfer.is_read))
                return begin_ns - now_ns + ceil(transfer.num_bytes / rate)
        for job in self._shared.jobs:
            transfer = cast(StoreTransfer, job.owner)
            if (transfer.worker, transfer.number) == (worker, number):
                return self._shared.left_ns(job, now_ns)
        return 0

    def cancel(self, worker: int, number: int) -> None:
        """Abort transfer `number` of `worker`, if it has not ended."""
        for each in self._coming:
            if (each[2].worker, each[2].number) == (worker, number):
                self._coming.remove(each)
                heapify(self._coming)
                return
        for job in self._shared.jobs:
            transfer = cast(StoreTransfer, job.owner)
            if (transfer.worker, transfer.number) == (worker, number):
                self._shared.advance(self.now_ns)
                self._shared.remove(job)
                return

    def drop(self, worker: int, now_ns: int) -> None:
        """Abort all transfers of `worker`."""
        self._coming = [each for each in self._coming if each[2].worker != worker]
        heapify(self._coming)
        self._shared.advance(now_ns)
        for job in list(self._shared.jobs):
            if cast(StoreTransfer, job.owner).worker == worker:
                self._shared.remove(job)

    def next_ns(self) -> int:
        """Return when the next transfer ends or begins to share, if none is submitted before."""
        return min(self._coming[0][0] if self._coming else NEVER_NS, self._shared.next_ns())

    def take_ended(self, now_ns: int) -> list[StoreTransfer]:
        """Return the transfers that end now, in the order in which they began to share."""
        if now_ns < self.next_ns():
            return []  # keep the sums independent of times at which nothing happens
        ended = [cast(StoreTransfer, job.owner) for job in self._shared.take_ended(now_ns)]
        while self._coming and self._coming[0][0] <= now_ns:
            transfer = heappop(self._coming)[2]
            ends = self._ends(transfer.worker, is_read=transfer.is_read)
            self._shared.begin(Job(transfer, transfer.num_bytes, ends), now_ns)
        return ended

    def _ends(self, worker: int, *, is_read: bool) -> tuple[tuple[End, Fraction], ...]:
        direction, rate = ("read", self._worker_rate) if is_read else ("write", self._write_rate)
        return ((direction, -1), self._store_rate), ((direction, worker), rate)

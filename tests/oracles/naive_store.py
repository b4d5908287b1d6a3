"""A store that engines share, one page at a time: a naive tier that knows who stored what, and links one by one."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from typing import Any

from oracles.naive import NaiveRequest
from oracles.naive_offload import NaiveOffloadEngine, NaiveTransfer
from oracles.naive_tier import NaivePlacement, NaiveTier, Name


@dataclass
class NaiveStore(NaiveTier):
    """What engines evict does not concern it, and what arrives broken is still there."""

    writers: dict[Name, int] = field(default_factory=dict)

    def store(self, writer: int, names: list[Name], start: int) -> NaivePlacement | None:
        placement = self.place(names, start)
        for entry in placement.new if placement is not None else ():
            self.writers[entry.name] = writer
        return placement

    def of_writer(self, writer: int) -> set[Name]:
        """What can be found and was stored by `writer`."""
        return {name for name in self.entries if self.is_stored(name) and self.writers[name] == writer}


@dataclass
class NaiveJob:
    begin_ns: int
    worker: int
    num_bytes: int
    is_read: bool


def naive_ends(jobs: list[NaiveJob], store_rate: int, worker_rate: int, latency_ns: int) -> list[Fraction]:
    """When each of `jobs` ends, in exact numbers, at rates in bytes per nanosecond."""
    left = [Fraction(job.num_bytes) for job in jobs]
    ends: list[Fraction | None] = [None] * len(jobs)
    now = Fraction(0)
    while None in ends:
        going = [place for place, job in enumerate(jobs) if ends[place] is None and job.begin_ns + latency_ns <= now]
        rates = {}
        for place in going:
            same = [jobs[other] for other in going if jobs[other].is_read is jobs[place].is_read]
            num_here = sum(job.worker == jobs[place].worker for job in same)
            rates[place] = min(Fraction(worker_rate, num_here), Fraction(store_rate, len(same)))
        times = [now + left[place] / rate for place, rate in rates.items()]
        times += [Fraction(job.begin_ns + latency_ns) for job in jobs if job.begin_ns + latency_ns > now]
        after = min(times)
        for place, rate in rates.items():
            left[place] -= (after - now) * rate
            if not left[place]:
                ends[place] = after
        now = after
    return [end for end in ends if end is not None]


NEVER = 1 << 62


@dataclass(eq=False)
class NaiveWrite:
    """What one engine stores at once of a sequence; others may wait for its end."""

    engine: NaiveStoreEngine
    number: int = -1  # of the transfer


@dataclass(eq=False)
class NaiveFlow:
    """A transfer between an engine and the store, which begins at `begin_ns`."""

    engine: int
    number: int
    is_read: bool
    begin_ns: int
    num_bytes: int
    left: Fraction


@dataclass
class NaiveStoreLinks:
    """Rates in bytes per nanosecond. Of all flows in a direction the store's is shared, and those of each engine."""

    store_rate: Fraction
    engine_rate: Fraction
    latency_ns: int
    coming: list[NaiveFlow] = field(default_factory=list)
    flows: list[NaiveFlow] = field(default_factory=list)
    now_ns: int = 0
    time_ns: int = 0  # of the fleet

    def rate(self, engine: int, is_read: bool, more: int = 0) -> Fraction:
        same = [flow for flow in self.flows if flow.is_read is is_read]
        num_here = sum(flow.engine == engine for flow in same)
        return min(self.store_rate / (len(same) + more), self.engine_rate / (num_here + more))

    def advance(self, now_ns: int) -> None:
        rates = [self.rate(flow.engine, flow.is_read) for flow in self.flows]
        for flow, rate in zip(self.flows, rates, strict=True):
            flow.left -= (now_ns - self.now_ns) * rate
        self.now_ns = now_ns

    def begin(self, engine: int, number: int, is_read: bool, num_bytes: int, now_ns: int) -> None:
        flow = NaiveFlow(engine, number, is_read, now_ns + self.latency_ns, num_bytes, Fraction(num_bytes))
        self.coming.append(flow)

    def next_ns(self) -> int:
        times = [flow.begin_ns for flow in self.coming]
        times += [self.now_ns + max(1, ceil(f.left / self.rate(f.engine, f.is_read))) for f in self.flows]
        return min(times, default=NEVER)

    def take_ended(self, now_ns: int) -> list[NaiveFlow]:
        if now_ns < self.next_ns():
            return []
        self.advance(now_ns)
        ended = [flow for flow in self.flows if flow.left <= 0]
        self.flows = [flow for flow in self.flows if flow not in ended]
        begins = sorted((flow for flow in self.coming if flow.begin_ns <= now_ns), key=lambda flow: flow.begin_ns)
        self.coming = [flow for flow in self.coming if flow not in begins]
        self.flows += begins
        return ended

    def cancel(self, engine: int, number: int) -> None:
        self.coming = [flow for flow in self.coming if (flow.engine, flow.number) != (engine, number)]
        if any((flow.engine, flow.number) == (engine, number) for flow in self.flows):
            self.advance(self.time_ns)
            self.flows = [flow for flow in self.flows if (flow.engine, flow.number) != (engine, number)]

    def within_ns(self, engine: int, is_read: bool, num_bytes: int) -> int:
        """How long one more would take if no other began or ended."""
        return self.latency_ns + ceil(num_bytes / self.rate(engine, is_read, 1))

    def left_ns(self, engine: int, number: int, now_ns: int) -> int:
        for flow in self.coming:
            if (flow.engine, flow.number) == (engine, number):
                return flow.begin_ns - now_ns + ceil(flow.num_bytes / self.rate(engine, flow.is_read, 1))
        for flow in self.flows:
            if (flow.engine, flow.number) == (engine, number):
                return max(0, self.now_ns + ceil(flow.left / self.rate(engine, flow.is_read)) - now_ns)
        return 0


class NaiveView:
    """The store as the last tier of one engine, which changes nothing there but what it stores and reads."""

    def __init__(self, store: NaiveStore, engine: NaiveStoreEngine) -> None:
        self.store, self.engine = store, engine
        self.removed: list[Name] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def place(self, names: list[Name], start: int, **how: Any) -> NaivePlacement | None:
        placement = self.store.place(names, start, **how)
        if placement is not None:
            write = NaiveWrite(self.engine)
            self.engine.unsent.append(write)
            for entry in placement.new:
                self.store.writers[entry.name] = self.engine.index_of_engine
                self.engine.fleet.writes[entry.name] = write
        return placement

    def settle(self, placement: NaivePlacement, *, is_stored: bool) -> None:
        fleet = self.engine.fleet
        write = fleet.writes[placement.new[0].name]
        self.store.settle(placement, is_stored=is_stored)
        for entry in placement.new:
            del fleet.writes[entry.name]
        if not is_stored:
            fleet.links.cancel(self.engine.index_of_engine, write.number)
        fleet.ended.append(write)

    def lose(self, name: Name) -> None:
        """Others may have it."""

    def drop(self, name: Name) -> None:
        """What arrives broken is still there."""


class NaiveStoreEngine(NaiveOffloadEngine):
    """An engine whose last tier is the store that it shares: below host memory, if it has any. It stores eagerly."""

    def __init__(self, *, index: int, fleet: NaiveStoreFleet, tiers: list[int], **settings: Any) -> None:
        super().__init__(tiers=[*tiers, fleet.store.num_pages], **settings)
        self.index_of_engine, self.fleet = index, fleet
        self.view = NaiveView(fleet.store, self)
        self.tiers[-1] = self.view  # type: ignore[call-overload]
        self.unsent: list[NaiveWrite] = []
        self.least_ns: dict[int, int] = {}
        """When a load can end at the earliest, by transfer."""
        self.num_writing = 0
        self.loaded: dict[int, int] = {}
        """Pages from the store, by the engine that had stored them."""
        self.lane_pages |= {"store_write": 0, "store_read": 0}

    def write_lane(self, place: int) -> str:
        return "store_write" if place == len(self.tiers) - 1 else super().write_lane(place)

    def lane_of(self, tier: NaiveTier) -> str:
        return "store_read" if tier is self.view else super().lane_of(tier)  # type: ignore[comparison-overlap]

    def is_open_end(self, lane: str) -> bool:
        return lane.startswith("store")

    def pull_ns(self, num_pages: int) -> int:
        return self.fleet.links.within_ns(self.index_of_engine, True, num_pages * self.fleet.page_bytes)

    def room(self, lane: str) -> int:
        if lane != "store_write":
            return super().room(lane)
        links, page_bytes = self.fleet.links, self.fleet.page_bytes
        wait_ns = links.within_ns(self.index_of_engine, False, self.num_writing) if self.num_writing else 0
        thousand_ns = links.within_ns(self.index_of_engine, False, 1000 * page_bytes) - links.latency_ns
        left_ns = self.store_within_ns - wait_ns - links.latency_ns
        num_pages = left_ns * 1000 // max(1, thousand_ns) if left_ns > 0 else 0
        return num_pages if wait_ns or num_pages else 1

    def lane(self, name: str, num_pages: int) -> int:
        if name != "store_write":
            return super().lane(name, num_pages)
        num_bytes = num_pages * self.fleet.page_bytes
        self.num_writing += num_bytes
        for write in self.unsent:
            write.number = self.num_transfers
        self.unsent = []
        self.fleet.links.begin(self.index_of_engine, self.num_transfers, False, num_bytes, self.now_ns)
        return NEVER

    def begin(self, transfer: NaiveTransfer) -> None:
        reads = [(start, end) for tier, _, start, end in transfer.loads if tier is self.view]  # type: ignore[comparison-overlap]
        if reads:
            assert transfer.request is not None
            ((start, end),) = reads
            self.least_ns[self.num_transfers] = max(
                (self.lane_free_ns[lane] for lane, _, _ in transfer.lanes), default=0
            )
            transfer.end_ns = transfer.early_ns = NEVER
            num_bytes = (end - start) * self.fleet.page_bytes
            self.fleet.links.begin(self.index_of_engine, self.num_transfers, True, num_bytes, self.now_ns)
            for name in self.names(transfer.request, end)[start:]:
                writer = self.fleet.store.writers[name]
                self.loaded[writer] = self.loaded.get(writer, 0) + 1
        super().begin(transfer)

    def end_transfer(self, transfer: NaiveTransfer, *, is_given_up: bool = False) -> None:
        is_write = transfer.kind == "spill" if len(self.tiers) > 1 else transfer.kind == "store"
        if is_write:
            num_pages = sum(len(placement.new) for _, placement in transfer.stores)
            self.num_writing -= num_pages * self.fleet.page_bytes
        super().end_transfer(transfer, is_given_up=is_given_up)

    def write_to_await(self, head: NaiveRequest, position: int) -> tuple[Any, int, int] | None:
        names = self.names(head, (head.known if self.full_prompt_hits else head.known - 1) // self.page_size)
        end = position
        if position >= len(names) or names[position] not in self.fleet.writes:
            return None
        write = self.fleet.writes[names[position]]
        while end < len(names) and self.fleet.writes.get(names[end]) is write:
            end += 1
        links = self.fleet.links
        left_ns = links.left_ns(write.engine.index_of_engine, write.number, self.now_ns)
        read_ns = links.within_ns(self.index_of_engine, True, (end - position) * self.fleet.page_bytes)
        return write, end, self.now_ns + left_ns + read_ns

    def pause_until(self) -> int:
        until_ns = super().pause_until()
        return NEVER if not self.transfers else until_ns


@dataclass
class NaiveStoreFleet:
    """Engines that share a store. `page_bytes`: of a page on the links."""

    store: NaiveStore
    links: NaiveStoreLinks
    page_bytes: int
    engines: list[NaiveStoreEngine] = field(default_factory=list)
    writes: dict[Name, NaiveWrite] = field(default_factory=dict)
    """What is being written now, by page."""
    ended: list[NaiveWrite] = field(default_factory=list)
    """Writes for whose end nobody waits any longer, once they were told."""

    def emit_ended(self) -> None:
        ended, self.ended = self.ended, []
        for write in ended:
            for place, engine in enumerate(self.engines):
                if any(leader is write for _, leader in engine.following):  # type: ignore[comparison-overlap]
                    engine.let_follow(write)  # type: ignore[arg-type]
                    if engine.is_pausing:
                        self.ends[place] = None

    def run(self, requests: list[NaiveRequest]) -> None:
        """Arrivals at their times, the i-th to engine i mod n."""
        pending = sorted(requests, key=lambda r: r.arrival_ns)
        self.ends: list[int | None] = [None] * len(self.engines)
        now = sent = 0
        while True:
            self.links.time_ns = now
            for has_paused in (False, True):
                for place, engine in enumerate(self.engines):
                    if self.ends[place] == now and engine.is_pausing is has_paused:
                        self.ends[place] = None
                        engine.end_transfers(now)
                        self.emit_ended()
            for flow in self.links.take_ended(now):
                engine = self.engines[flow.engine]
                (transfer,) = [each for each in engine.transfers if each.number == flow.number]
                transfer.end_ns = max(now, engine.least_ns.get(flow.number, 0))
                if self.ends[flow.engine] is None or engine.is_pausing:
                    self.ends[flow.engine] = None
                    engine.end_transfers(now)
                    self.emit_ended()
            while sent < len(pending) and pending[sent].arrival_ns <= now:
                request = pending[sent]
                request.replica = sent % len(self.engines)
                self.engines[request.replica].submit(request)
                if self.engines[request.replica].is_pausing:
                    self.ends[request.replica] = None
                sent += 1
            while any(end is None and engine.has_work() for end, engine in zip(self.ends, self.engines, strict=True)):
                for place, engine in enumerate(self.engines):
                    if self.ends[place] is None and engine.has_work():
                        engine.is_pausing = False
                        self.ends[place] = engine.step(now)
                        self.emit_ended()
            times = [end for end in self.ends if end is not None] + [self.links.next_ns()]
            if sent < len(pending):
                times.append(pending[sent].arrival_ns)
            if min(times) == NEVER:
                return
            now = min(times)

"""Workers that read pages from each other's host memory.

First, one request after the other: what each has, page by page.

Device and host memory never fill up; only a failure empties them. A page that a worker computes goes to its host memory
when it is complete, with all pages before it. A request reads from the worker that has most of what is missing here, of
equals the first one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from typing import Any

from oracles.naive import NaiveRequest
from oracles.naive_offload import NaiveOffloadEngine, NaiveTransfer
from oracles.naive_tier import NaiveTier

Pages = set[tuple[int, ...]]


@dataclass
class NaivePeers:
    """`page_ns`: the time of a page on a link, after `latency_ns` of each transfer; `token_ns`: that of computing."""

    num_workers: int
    page_size: int
    page_ns: Fraction
    latency_ns: int
    token_ns: int
    devices: list[Pages] = field(default_factory=list)
    hosts: list[Pages] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.devices = [set() for _ in range(self.num_workers)]
        self.hosts = [set() for _ in range(self.num_workers)]

    def lose(self, worker: int) -> None:
        self.devices[worker].clear()
        self.hosts[worker].clear()

    def name(self, tokens: list[int], count: int) -> tuple[int, ...]:
        return tuple(tokens[: count * self.page_size])

    def has(self, pages: Pages, tokens: list[int]) -> int:
        """How many pages of a prompt are there, from the beginning on; the last token is always computed."""
        count = 0
        while (count + 1) * self.page_size < len(tokens) and self.name(tokens, count + 1) in pages:
            count += 1
        return count

    def ask(self, worker: int, tokens: list[int], cut: set[int]) -> tuple[list[int], int | None]:
        """Return the time until the first token by the number of pages that are read, and from whom.

        The pages before these are computed while they are read.
        """
        here = self.has(self.devices[worker], tokens)
        source, most = None, 0
        for other in range(self.num_workers):
            if other == worker or other in cut or worker in cut:
                continue
            more = self.has(self.hosts[other], tokens) - here
            if more > most:
                source, most = other, more
        page_ns = self.page_size * self.token_ns
        rest_ns = (len(tokens) - (here + most) * self.page_size) * self.token_ns
        times = [most * page_ns + rest_ns]
        for num_read in range(1, most + 1):
            read_ns = self.latency_ns + ceil(num_read * self.page_ns)
            times.append(max(read_ns, (most - num_read) * page_ns) + rest_ns)
        return times, source

    def end(self, worker: int, tokens: list[int], num_read: int, most: int) -> None:
        """The prompt is computed; `num_read` pages were read, of `most` that could be."""
        here, full = self.has(self.devices[worker], tokens), len(tokens) // self.page_size
        is_last_computed = full > here + most or (most > 0 and not num_read)
        num_stored = full if is_last_computed else here + most - num_read if num_read < most else 0
        self.devices[worker] |= {self.name(tokens, count) for count in range(1, full + 1)}
        self.hosts[worker] |= {self.name(tokens, count) for count in range(1, num_stored + 1)}


class NaivePeerEngine(NaiveOffloadEngine):
    """An engine with tiers that reads from the host memory of others. `rate`: bytes a second of each transfer.

    It is `index` among `engines`, which must be set, and all know pages by the same names.
    """

    def __init__(self, *, index: int, rate: float, link_ns: int, link_page_bytes: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.index_of_engine = index
        self.rate, self.link_ns, self.link_page_bytes = rate, link_ns, link_page_bytes
        self.engines: list[NaivePeerEngine] = []
        self.pulled: dict[int, int] = {}
        self.free_from_ns = 0  # no step is under way from then on

    def num_sources(self) -> int:
        return len(self.tiers) + 1

    def place_of(self, tier: NaiveTier) -> int:
        return next((place for place, each in enumerate(self.tiers) if each is tier), len(self.tiers))

    def lane_of(self, tier: NaiveTier) -> str:
        return super().lane_of(tier) if any(each is tier for each in self.tiers) else "peers"

    def is_open_end(self, lane: str) -> bool:
        return lane == "peers"

    def pull_ns(self, num_pages: int) -> int:
        return self.link_ns + ceil(num_pages * self.link_page_bytes / self.rate * 1e9)

    def offers(self, head: NaiveRequest, position: int) -> list[tuple[NaiveTier, int, int]]:
        """Also what the engine has that has most of the rest, of equals the first one."""
        offers = super().offers(head, position)
        start = offers[-1][2] if offers else position
        names = self.names(head, (head.known if self.full_prompt_hits else head.known - 1) // self.page_size)
        found = [(other.tiers[0].find(names, start), other) for other in self.engines if other is not self]
        most = max((count for count, _ in found), default=0)
        if most:
            source = next(other for count, other in found if count == most)
            offers.append((source.tiers[0], start, start + most))
        return offers

    def end_load(self, transfer: NaiveTransfer, *, is_good: bool) -> None:
        super().end_load(transfer, is_good=is_good)
        tier, _, start, end = transfer.loads[-1]
        if is_good and self.lane_of(tier) == "peers":
            (source,) = [other.index_of_engine for other in self.engines if other.tiers[0] is tier]
            self.pulled[source] = self.pulled.get(source, 0) + end - start

    def end_transfers(self, now_ns: int) -> None:
        """What has ended everywhere else can be read from now on, unless a step is under way there."""
        for engine in self.engines:
            if engine.free_from_ns <= now_ns:
                NaiveOffloadEngine.end_transfers(engine, now_ns)

    def step(self, now_ns: int) -> int:
        end_ns = super().step(now_ns)
        self.free_from_ns = now_ns if self.is_pausing else end_ns
        return end_ns

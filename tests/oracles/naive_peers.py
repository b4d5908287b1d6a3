"""Workers that read pages from each other's host memory, one request after the other: what each has, page by page.

Device and host memory never fill up; only a failure empties them. A page that a worker computes goes to its host memory
when it is complete, with all pages before it. A request reads from the worker that has most of what is missing here, of
equals the first one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil

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

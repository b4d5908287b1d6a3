"""A router's knowledge of its workers: its own placements, reports, and metrics of some age. Never their state."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence
from random import Random
from typing import Literal, NamedTuple, Protocol

import msgspec

from kvarts.core.content import Content
from kvarts.core.kv.groups import GroupMemory
from kvarts.core.kv.transfer import PeersGain
from kvarts.sim.routers.directory import ActiveBlocks, IndexRule, PlacementIndex

__all__ = ["Asked", "Directory", "Found", "Metrics", "Needs", "RouterPolicy", "View", "WorkerFacts"]

Found = tuple[int, int, dict[int, tuple[int, ...]]]
"""A request, a limit of pages, and the pages found per worker, by tier."""

RATE_WINDOW_NS = 60_000_000_000
"""Window of a worker's rate: its placements in the last minute."""


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """Data that a policy needs in addition to its own placements.

    `pages`: the pages of each worker, by cache events, which are reported when the step that computes the pages is
    scheduled, or with `end` when it has ended. `placements`: a placement index with this eviction rule. `metrics`:
    metrics of the workers. `prefills`: notification when a prompt is computed. `blocks`: the distinct blocks in flight.
    """

    pages: Literal["no", "schedule", "end"] = "no"
    placements: IndexRule | None = None
    metrics: bool = False
    prefills: bool = False
    blocks: bool = False


class Asked(msgspec.Struct, frozen=True):
    """A request to be placed at `now_ns`. `session`: its session, if any."""

    index: int
    content: Content
    num_tokens: int
    session: str | None
    priority: int
    now_ns: int


class Metrics:
    """Reports of workers, one entry per worker: running and waiting requests, pages used and waited for, usage."""

    __slots__ = ("num_reports", "running", "usage", "used_pages", "waiting", "waiting_pages")

    def __init__(self) -> None:
        self.num_reports = 0
        self.running: list[int] = []
        self.waiting: list[int] = []
        self.used_pages: list[int] = []
        self.waiting_pages: list[int] = []
        self.usage: list[float] = []

    def add_worker(self) -> None:
        """Add an idle worker."""
        self.usage.append(0.0)
        for column in (self.running, self.waiting, self.used_pages, self.waiting_pages):
            column.append(0)

    def report(
        self, worker: int, running: int, waiting: int, used_pages: int, waiting_pages: int, usage: float
    ) -> None:
        """Record the metrics of one worker."""
        self.num_reports += 1
        self.running[worker] = running
        self.waiting[worker] = waiting
        self.used_pages[worker] = used_pages
        self.waiting_pages[worker] = waiting_pages
        self.usage[worker] = usage


class Directory(Protocol):
    """Looks up the pages of each worker, as far as reported."""

    def matches(self, content: Content, limit: int) -> dict[int, tuple[int, ...]]:
        """Return, per worker with a match, the pages of the longest prefix that it can resume from, by tier."""

    def saved_elsewhere(
        self, content: Content, starts: Sequence[int], limit: int, num_tokens: int, gain: PeersGain
    ) -> list[float]:
        """Return, per worker, how many pages it saves that reads what it lacks of `limit` pages from another one.

        `starts`: the pages that each can resume from already. `num_tokens`: those of the prompt.
        """


class NoDirectory:
    """A Directory without any reports."""

    def matches(self, content: Content, limit: int) -> dict[int, tuple[int, ...]]:
        """Return an empty dict."""
        return {}

    def saved_elsewhere(
        self, content: Content, starts: Sequence[int], limit: int, num_tokens: int, gain: PeersGain
    ) -> list[float]:
        """Return zero for each worker."""
        return [0.0] * len(starts)


class WorkerFacts(NamedTuple):
    """Facts of its workers that a router has from the beginning, besides their placements.

    `page_size`: tokens per page. `max_num_batched_tokens`: token budget of a step. `tiers`: those in events.
    `are_files`: whether each tier below the device is of files. `directory`: looks up exact prefixes, instead of
    events. `peers`: what workers save that read pages from each other, if they do. `memory`: their KV groups, if events
    describe parts of pages.
    """

    num_workers: int
    page_size: int
    max_num_batched_tokens: int = 8192
    tiers: Sequence[str] = ("device",)
    are_files: Sequence[bool] = (False, True)
    directory: Directory | None = None
    peers: PeersGain | None = None
    memory: GroupMemory | None = None


class View:
    """Owner of a router's knowledge. Workers are numbered from 0, and numbers are not reused.

    Ties not broken by number are broken by `random`, which is seeded with `seed`. `directory`: that of `workers`, or
    the one that reads their events.
    """

    def __init__(
        self, needs: Needs, workers: WorkerFacts, *, directory: Directory | None = None, seed: int = 0
    ) -> None:
        self._are_files = workers.are_files
        page_size = self.page_size = workers.page_size
        self.max_num_batched_tokens = workers.max_num_batched_tokens
        self.random = Random(seed)
        self.metrics = Metrics()
        self.workers: list[int] = []
        """The workers that take requests, ascending."""
        self.num_requests: list[int] = []
        """Requests in flight per worker."""
        self.prefill_tokens: list[int] = []
        """Prompt tokens per worker that were not cached at placement, of requests that are not prefilled yet."""
        self.num_blocks: list[int] = []
        """Full blocks of prompts in flight per worker, counted separately for each request."""
        self.directory = directory or NoDirectory()
        self._peers = workers.peers
        self.index = None if needs.placements is None else PlacementIndex(needs.placements, page_size)
        self.active = ActiveBlocks() if needs.blocks else None
        self._placed: dict[int, tuple[int, Content, int, int]] = {}
        """Requests in flight: worker, content, full blocks, and prompt tokens still to be computed."""
        self.found: Found | None = None
        """The last answer of the directory, with the request and the limit of the lookup."""
        self._recent: deque[tuple[int, int]] = deque()
        self._num_recent: list[int] = []
        for _ in range(workers.num_workers):
            self.join()

    # Workers ----------------------------------------------------------------------------------------------

    def join(self) -> int:
        """Add a worker; return its number."""
        worker = len(self.num_requests)
        for column in (self.num_requests, self.prefill_tokens, self.num_blocks, self._num_recent):
            column.append(0)
        self.metrics.add_worker()
        self.workers.append(worker)
        return worker

    def enter(self, worker: int) -> None:
        """Resume sending requests to `worker`, which had left."""
        insort(self.workers, worker)

    def leave(self, worker: int) -> None:
        """Stop sending requests to `worker`. Its requests in flight may still end."""
        self.workers.remove(worker)
        if self.index is not None:
            self.index.forget(worker)

    # Requests ---------------------------------------------------------------------------------------------

    def placed(self, asked: Asked, worker: int, cached_tokens: int) -> None:
        """Record that a request was sent to `worker`, where `cached_tokens` of it were assumed to be cached."""
        num_blocks = min(asked.num_tokens // self.page_size, asked.content.num_known_pages)
        to_compute = max(0, asked.num_tokens - cached_tokens)
        self._placed[asked.index] = worker, asked.content, num_blocks, to_compute
        self.num_requests[worker] += 1
        self.prefill_tokens[worker] += to_compute
        self.num_blocks[worker] += num_blocks
        self.found = None
        if self.active is not None:
            self.active.add(worker, asked.content, num_blocks)
        if self.index is not None:
            content, count = self.index.read(asked.content, asked.num_tokens)
            self.index.place(worker, content, count, asked.now_ns)
        self._forget_rates(asked.now_ns)
        self._recent.append((asked.now_ns, worker))
        self._num_recent[worker] += 1

    def prefilled(self, request: int) -> None:
        """Record that the prompt of a request is computed."""
        worker, content, num_blocks, to_compute = self._placed.get(request, (-1, None, 0, 0))
        if content is None or not to_compute:
            return
        self.prefill_tokens[worker] -= to_compute
        self._placed[request] = worker, content, num_blocks, 0

    def ended(self, request: int) -> None:
        """Record that a request has left its worker: it finished, or was refused."""
        if request not in self._placed:
            return
        self.prefilled(request)
        worker, content, num_blocks, _ = self._placed.pop(request)
        self.num_requests[worker] -= 1
        self.num_blocks[worker] -= num_blocks
        if self.active is not None:
            self.active.remove(worker, content, num_blocks)

    @property
    def num_in_flight(self) -> int:
        """Requests that were placed and have not ended."""
        return len(self._placed)

    # Questions --------------------------------------------------------------------------------------------

    def rates(self, now_ns: int) -> list[int]:
        """Return the number of requests sent to each worker in the last minute."""
        self._forget_rates(now_ns)
        return self._num_recent

    def pages(self, asked: Asked, limit: int) -> dict[int, tuple[int, ...]]:
        """Return, per worker with a match, the pages of the first `limit` that it can resume from, by tier."""
        found = self.found
        if found is not None and found[0] == asked.index and found[1] == limit:
            return found[2]
        pages = self.directory.matches(asked.content, limit)
        if len(self.workers) < len(self.num_requests):  # some have left
            pages = {worker: pages[worker] for worker in self.workers if worker in pages}
        self.found = asked.index, limit, pages
        return pages

    def saved_by_peers(self, asked: Asked, limit: int) -> list[float]:
        """Return, per worker, how many of the first `limit` pages it saves if it reads what it lacks from others.

        A page saves less than a whole one, as reading takes time. Empty if workers do not read from each other.
        """
        if self._peers is None:
            return []
        found = self.pages(asked, limit)
        starts = [0] * len(self.num_requests)
        for worker, pages in found.items():
            starts[worker] = sum(pages)
        return self.directory.saved_elsewhere(asked.content, starts, limit, asked.num_tokens, self._peers)

    def weights_below(self, of_memory: float, of_files: float) -> list[float]:
        """Return the weight of a page in each tier below the device."""
        return [of_files if is_files else of_memory for is_files in self._are_files]

    def placements(self, asked: Asked) -> tuple[dict[int, int], int]:
        """Return the blocks that each worker has by earlier placements, and the number of blocks of the prompt."""
        assert self.index is not None
        content, num_blocks = self.index.read(asked.content, asked.num_tokens)
        return self.index.matches(content, num_blocks, asked.now_ns), num_blocks

    def least(self, values: Sequence[float], among: Sequence[int] | None = None) -> int:
        """Return the worker with the least value; among equals, the one with the lowest number."""
        return min(self.workers if among is None else among, key=values.__getitem__)

    def any_least(self, values: Sequence[float], among: Sequence[int] | None = None) -> int:
        """Return a worker with the least value, at random among equals."""
        workers = self.workers if among is None else among
        least = min(map(values.__getitem__, workers))
        return self.any_of([worker for worker in workers if values[worker] == least])

    def any_of(self, workers: Sequence[int]) -> int:
        """Return one of `workers` at random."""
        if len(workers) == 1:
            return workers[0]
        return workers[self.random.randrange(len(workers))]

    def _forget_rates(self, now_ns: int) -> None:
        recent = self._recent
        while recent and recent[0][0] + RATE_WINDOW_NS <= now_ns:
            self._num_recent[recent.popleft()[1]] -= 1


class RouterPolicy(Protocol):
    """Chooses workers by a view. Promise: it changes nothing in the view but its random state.

    It may have `needs`, of type Needs; without, it sees only its own placements. It may have `cached_tokens(asked,
    worker, view)`, the number of tokens of a request that count as cached on the chosen worker; the default is 0.
    """

    def choose(self, asked: Asked, view: View) -> int:
        """Return one of `view.workers`."""

"""Routers, naively: each rule over everything that ever happened, page by page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev

from kvarts.core.kv.layers import KvLayer

from oracles.naive_grouped import needed_pages

__all__ = ["NaiveActive", "NaiveIndex", "NaivePartIndex", "NaivePlacements", "NaiveRouter", "Placed"]

Pages = tuple[int, ...]


class NaiveIndex:
    """Which pages can be found on which worker, in which tier: a set. A page is the string of all up to it."""

    def __init__(self, tiers: Sequence[str]) -> None:
        self.tiers = tiers
        self.pages: set[tuple[int, str, Pages]] = set()

    def has(self, worker: int, tier: str, pages: Pages) -> bool:
        return (worker, tier, pages) in self.pages

    def store(self, worker: int, pages: Pages, start: int, end: int, tier: str) -> None:
        self.pages |= {(worker, tier, pages[: page + 1]) for page in range(start, end)}

    def remove(self, worker: int, pages: Pages, start: int, end: int, tier: str) -> None:
        self.pages -= {(worker, tier, pages[: page + 1]) for page in range(start, end)}

    def is_lawful(self) -> bool:
        """L3: a page's parent is in the same tier or a faster one."""
        return all(
            len(pages) == 1
            or any(self.has(worker, each, pages[:-1]) for each in self.tiers[: self.tiers.index(tier) + 1])
            for worker, tier, pages in self.pages
        )

    def matches(self, pages: Pages, limit: int) -> dict[int, tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        for worker in sorted({worker for worker, _, _ in self.pages}):
            counts = [0] * len(self.tiers)
            for page in range(min(limit, len(pages))):
                tier = next((t for t in self.tiers if self.has(worker, t, pages[: page + 1])), None)
                if tier is None:
                    break
                counts[self.tiers.index(tier)] += 1
            if any(counts):
                found[worker] = tuple(counts)
        return found

    def elsewhere(self, pages: Pages, start: int, limit: int, tier: str) -> int:
        """How many consecutive pages from `start` on the worker that has most of them has in `tier`."""
        most = 0
        for worker in {worker for worker, _, _ in self.pages}:
            end = start
            while end < min(limit, len(pages)) and self.has(worker, tier, pages[: end + 1]):
                end += 1
            most = max(most, end - start)
        return most


class NaivePartIndex:
    """Which parts of pages can be found on which worker, in which tier: a set. A page is the string of all up to it."""

    def __init__(self, layers: Sequence[KvLayer], page_size: int, tiers: Sequence[str]) -> None:
        self.layers, self.page_size, self.tiers = layers, page_size, tiers
        self.parts: set[tuple[int, str, int, Pages]] = set()

    def has(self, worker: int, tiers: Sequence[str], group: int, pages: Pages) -> bool:
        return any((worker, tier, group, pages) in self.parts for tier in tiers)

    def store(self, worker: int, pages: Pages, start: int, end: int, tier: str, group: int) -> None:
        self.parts |= {(worker, tier, group, pages[: page + 1]) for page in range(start, end)}

    def remove(self, worker: int, pages: Pages, start: int, end: int, tier: str, group: int) -> None:
        self.parts -= {(worker, tier, group, pages[: page + 1]) for page in range(start, end)}

    def hit(self, pages: Pages, limit: int, where: Sequence[tuple[int, Sequence[str]]]) -> int:
        """The longest prefix that every group can go on from with what these tiers of workers have together.

        Some group has its last page.
        """
        for length in range(min(limit, len(pages)), 0, -1):
            have = [
                {page for page in range(length) if any(self.has(*each, group, pages[: page + 1]) for each in where)}
                for group in range(len(self.layers))
            ]
            if any(length - 1 in each for each in have) and all(
                needed_pages(layer, length * self.page_size, self.page_size) <= each
                for layer, each in zip(self.layers, have, strict=True)
            ):
                return length
        return 0

    def matches(self, pages: Pages, limit: int) -> dict[int, tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        for worker in sorted({part[0] for part in self.parts}):
            hits = [self.hit(pages, limit, [(worker, self.tiers[: n + 1])]) for n in range(len(self.tiers))]
            longest = [max(hits[: n + 1]) for n in range(len(hits))]
            if longest[-1]:
                found[worker] = tuple(end - start for start, end in zip([0, *longest], longest, strict=False))
        return found

    def elsewhere(self, worker: int, pages: Pages, start: int, limit: int, tier: str) -> int:
        """How many pages from `start` on a worker could go on from with the `tier` of the best of the others."""
        own = (worker, self.tiers)
        others = {part[0] for part in self.parts} - {worker}
        best = max((self.hit(pages, limit, [own, (other, [tier])]) for other in others), default=0)
        return max(0, best - start) if best > self.hit(pages, limit, [own]) else 0


class NaivePlacements:
    """Blocks that were placed on workers, each with the number and the time of its last placement."""

    def __init__(self, most_blocks: int | None, every: int, ttl: int | None) -> None:
        self.most_blocks, self.every, self.ttl = most_blocks, every, ttl
        self.blocks: dict[int, dict[Pages, tuple[int, int]]] = {}
        self.num_placed = 0
        self.next_eviction = every

    def matches(self, pages: Pages, now: int) -> dict[int, int]:
        if self.ttl is not None:
            for blocks in self.blocks.values():
                for block, (placed_at, _) in list(blocks.items()):
                    if placed_at + self.ttl <= now:
                        del blocks[block]
        found = {
            worker: next((n for n in range(len(pages)) if pages[: n + 1] not in blocks), len(pages))
            for worker, blocks in self.blocks.items()
        }
        return {worker: count for worker, count in found.items() if count}

    def place(self, worker: int, pages: Pages, now: int) -> None:
        self.num_placed += 1
        blocks = self.blocks.setdefault(worker, {})
        for n in range(len(pages)):
            blocks[pages[: n + 1]] = now, self.num_placed
        if self.most_blocks is None:
            return
        if self.every:
            if now < self.next_eviction:
                return
            self.next_eviction = now - now % self.every + self.every
        for each in self.blocks.values():
            while len(each) > self.most_blocks:
                del each[min(each, key=lambda block: (each[block], -len(block)))]


class NaiveActive:
    """Blocks of requests in flight, by worker."""

    def __init__(self) -> None:
        self.requests: list[tuple[int, Pages]] = []

    def distinct(self, worker: int, more: Pages = ()) -> int:
        prompts = [pages for each, pages in self.requests if each == worker] + [more]
        return len({pages[: n + 1] for pages in prompts for n in range(len(pages))})


@dataclass
class Placed:
    """A request in flight or ended. `cached`: tokens that were taken to be cached; `tokens`: of the prompt."""

    index: int
    worker: int
    tokens: Pages
    at_ns: int
    cached: int
    is_prefilled: bool = False
    is_ended: bool = False


@dataclass
class NaiveRouter:
    """Everything that a router was told. The methods return the workers that a rule allows for a request."""

    num_workers: int
    page_size: int
    placed: list[Placed] = field(default_factory=list)
    metrics: list[tuple[int, int, int, int, float]] = field(default_factory=list)
    """By worker: running, waiting, used pages, pages waited for, usage."""
    cache: NaiveIndex = field(default_factory=lambda: NaiveIndex(("device", "host")))

    @property
    def workers(self) -> range:
        return range(self.num_workers)

    def in_flight(self, worker: int) -> list[Placed]:
        return [each for each in self.placed if each.worker == worker and not each.is_ended]

    def pages(self, tokens: Pages) -> Pages:
        """The full pages of a prompt, each by a number that stands for its tokens."""
        size = self.page_size
        return tuple(hash(tokens[start : start + size]) for start in range(0, len(tokens) // size * size, size))

    def matched(self, worker: int, tokens: Pages, block: int) -> int:
        """Blocks of the longest match with any prompt ever sent to a worker."""
        longest = 0
        for each in self.placed:
            if each.worker == worker:
                same = next((n for n, (a, b) in enumerate(zip(tokens, each.tokens, strict=False)) if a != b), None)
                same = min(len(tokens), len(each.tokens)) if same is None else same
                longest = max(longest, same // block)
        return longest

    def least(self, values: Sequence[float]) -> set[int]:
        return {worker for worker in self.workers if values[worker] == min(values)}

    def most(self, values: Sequence[float]) -> set[int]:
        return {worker for worker in self.workers if values[worker] == max(values)}

    # The rules --------------------------------------------------------------------------------------------

    def least_loaded(self, tokens: Pages) -> set[int]:
        return {min(self.least([len(self.in_flight(worker)) for worker in self.workers]))}

    def prefix(self, tokens: Pages) -> set[int]:
        found = self.cache.matches(self.pages(tokens), (len(tokens) - 1) // self.page_size)
        costs = []
        for worker in self.workers:
            device, host = found.get(worker, (0, 0))
            costs.append(self.metrics[worker][2] + self.metrics[worker][3] - device - 0.75 * host)
        return {min(self.least(costs))}

    def dynamo_costs(
        self, tokens: Pages, credit: float = 1.0, scale: float = 1.0, weight: float = 0.0, decay: float = 0.0
    ) -> list[float]:
        size, isl = self.page_size, len(tokens)
        pages = self.pages(tokens)
        found = self.cache.matches(pages, len(pages))
        prefill = [
            sum(max(0, len(each.tokens) - each.cached) for each in self.in_flight(worker) if not each.is_prefilled)
            for worker in self.workers
        ]
        costs = []
        for worker in self.workers:
            device, host = found.get(worker, (0, 0))
            share = (prefill[worker] - min(prefill)) / size / -(-isl // size)
            hits = credit / (1 + decay * share) * device
            prompts = [self.pages(each.tokens) for each in self.in_flight(worker)] + [pages]
            blocks = len({prompt[: n + 1] for prompt in prompts for n in range(len(prompt))})
            blocks_to_prefill = (prefill[worker] + isl) / size - hits
            blocks_to_prefill -= 0.75 * host
            costs.append(scale * max(0, blocks_to_prefill) + blocks + weight * len(self.in_flight(worker)))
        return costs

    def llm_d(self, tokens: Pages, prefix: float = 3, queue: float = 2, kv: float = 2) -> list[float]:
        num_blocks = len(tokens) // self.page_size
        waiting = [of_worker[1] for of_worker in self.metrics]
        scores = []
        for worker in self.workers:
            spread = max(waiting) - min(waiting)
            of_queue = (max(waiting) - waiting[worker]) / spread if spread else 1
            share = self.matched(worker, tokens, self.page_size) / num_blocks if num_blocks else 0
            scores.append(prefix * share + queue * of_queue + kv * (1 - self.metrics[worker][4]))
        return scores

    def sglang_cache_aware(self, tokens: Pages) -> set[int]:
        loads = [len(self.in_flight(worker)) for worker in self.workers]
        if not (max(loads) - min(loads) > 64 and max(loads) > 1.5 * min(loads)):
            matched = [self.matched(worker, tokens, 1) for worker in self.workers]
            longest = max(matched)
            if longest / len(tokens) > 0.3:
                return {next(each.worker for each in self.placed if each.tokens[:longest] == tokens[:longest])}
        return {min(self.least(loads))}

    def production_stack_prefix(self, tokens: Pages) -> set[int]:
        return self.most([self.matched(worker, tokens, 128 // 4) for worker in self.workers])

    def production_stack_kv(self, tokens: Pages, threshold: int, chunk: int, now_ns: int) -> set[int]:
        pages = self.pages(tokens)
        found = self.cache.matches(pages, len(pages))
        chunks = [sum(found.get(worker, (0,))) * self.page_size // chunk for worker in self.workers]
        if not max(chunks) or max(chunks) * chunk < max(len(tokens) - threshold, 0):
            recent = [
                sum(each.worker == worker and each.at_ns + 60_000_000_000 > now_ns for each in self.placed)
                for worker in self.workers
            ]
            return {min(self.least(recent))}
        return self.most(chunks)

    def aibrix_prefix(self, tokens: Pages) -> set[int]:
        loads = [len(self.in_flight(worker)) for worker in self.workers]
        mean = fmean(loads)
        if not (max(loads) > 2 * (mean + 1) and max(loads) - min(loads) >= 8):
            num_blocks = len(tokens) // 16
            matched = {worker: self.matched(worker, tokens, 16) for worker in self.workers}
            order = sorted(
                (-(matched[worker] * 100 // num_blocks), loads[worker], worker)
                for worker in self.workers
                if matched[worker]
            )
            for percent, load, _ in order:
                if load <= mean + pstdev(loads):
                    return {worker for p, each, worker in order if (p, each) == (percent, load)}
        return self.least(loads)

"""How long blocks of KV stay in the device's memory: vLLM's residency metrics, from the events of the cache.

As in vLLM, a share of the blocks is sampled when they appear, and counted when they are evicted: their lifetime, the
time since their last use as a prefix, and the times between their last four such uses. A block appears here when it is
full and findable, in vLLM when it is allocated; it is used when a request is admitted that finds it. A block is known
by its tokens and those before it, since events describe pages by their contents.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import pairwise
from math import log
from random import Random

from kvarts.content import UNIT_BYTES, Content
from kvarts.errors import ConfigError
from kvarts.events import (
    Admitted,
    CacheCleared,
    Event,
    PagesRemoved,
    PagesStored,
    StepEnded,
    StepStarted,
    TransferEnded,
)
from kvarts.openai_api.buckets import BucketCounts

__all__ = ["DEFAULT_SHARE", "Residency"]

DEFAULT_SHARE = 0.01
NUM_USES = 4
RESIDENCY_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0,
               300.0, 600.0, 1200.0, 1800.0)  # fmt: skip


class _Block:
    """A sampled block. `uses_ns`: when it was last found."""

    __slots__ = ("born_ns", "used_ns", "uses_ns")

    def __init__(self, now_ns: int) -> None:
        self.born_ns = self.used_ns = now_ns
        self.uses_ns: deque[int] = deque(maxlen=NUM_USES)


class _OfGroup:
    """The sampled blocks of one KV group, by page and by the digest of the tokens up to the page's end."""

    __slots__ = ("blocks", "pages")

    def __init__(self) -> None:
        self.blocks: dict[int, dict[bytes, _Block]] = {}
        self.pages: list[int] = []
        """The pages of `blocks`, in order."""

    def add(self, content: Content, page: int, block: _Block) -> None:
        """Add a block."""
        if page not in self.blocks:
            self.blocks[page] = {}
            insort(self.pages, page)
        self.blocks[page][next(_digests(content, [page]))] = block

    def between(self, content: Content, start: int, end: int) -> Iterator[tuple[int, bytes, _Block]]:
        """Yield the sampled blocks among pages [start, end) of `content`."""
        pages = self.pages[bisect_left(self.pages, start) : bisect_left(self.pages, end)]
        for page, digest in zip(pages, _digests(content, pages), strict=True):
            block = self.blocks[page].get(digest)
            if block is not None:
                yield page, digest, block

    def remove(self, page: int, digest: bytes) -> None:
        """Remove a block."""
        of_page = self.blocks[page]
        del of_page[digest]
        if not of_page:
            del self.blocks[page]
            del self.pages[bisect_left(self.pages, page)]


class Residency:
    """An EventReader that counts a `share` of the blocks of one engine. For the engine's thread.

    `speedup`: ratio of model time to real time; durations are in real time. Blocks are drawn by `seed`. Work is per
    sampled block and per event, not per page. Raises ConfigError for a share that is not above 0 and at most 1.
    """

    wants_details = True

    def __init__(self, share: float = DEFAULT_SHARE, *, seed: int = 0, speedup: float = 1.0) -> None:
        if not 0.0 < share <= 1.0:
            raise ConfigError(f"must be above 0 and at most 1, got {share}", field="kv_cache_metrics_sample")
        self.lifetime_s = BucketCounts(RESIDENCY_S)
        self.idle_s = BucketCounts(RESIDENCY_S)
        self.reuse_gap_s = BucketCounts(RESIDENCY_S)
        self._per_ns = 1e-9 / speedup
        self.share = share
        self._random = Random(seed)
        self._num_to_skip = self._drawn() - 1
        self._groups: dict[int | None, _OfGroup] = {}
        self._now_ns = 0

    def take(self, other: Residency) -> None:
        """Add what `other` has counted of blocks that are evicted, and leave it with nothing."""
        self.lifetime_s.take(other.lifetime_s)
        self.idle_s.take(other.idle_s)
        self.reuse_gap_s.take(other.reuse_gap_s)

    def observe(self, events: Sequence[Event]) -> None:
        """Follow the blocks of the device."""
        for event in events:
            if isinstance(event, StepStarted):
                self._now_ns = event.start_ns
            elif isinstance(event, StepEnded):
                self._now_ns = event.end_ns
            elif isinstance(event, TransferEnded):
                self._now_ns = event.time_ns
            elif isinstance(event, Admitted):
                num_found = event.num_hit_pages - sum(num_pages for _, num_pages in event.by_tier or ())
                self._use(event.content, num_found)
            elif isinstance(event, PagesStored):
                if event.medium == "device":
                    self._store(event)
            elif isinstance(event, PagesRemoved):
                if event.medium == "device":
                    self._remove(event)
            elif isinstance(event, CacheCleared):
                self._groups.clear()  # as in vLLM, blocks that are dropped by /reset_prefix_cache do not count

    def _drawn(self) -> int:
        """Draw the number of blocks up to the next sampled one, as if each block were drawn separately."""
        if self.share == 1.0:
            return 1
        return 1 + int(log(1.0 - self._random.random()) / log(1.0 - self.share))

    def _store(self, event: PagesStored) -> None:
        page = event.start_page + self._num_to_skip
        while page < event.end_page:
            of_group = self._groups.setdefault(event.group, _OfGroup())
            of_group.add(event.content, page, _Block(self._now_ns))
            page += self._drawn()
        self._num_to_skip = page - event.end_page

    def _use(self, content: Content, num_pages: int) -> None:
        for of_group in self._groups.values():
            for _, _, block in of_group.between(content, 0, num_pages):
                block.used_ns = self._now_ns
                block.uses_ns.append(self._now_ns)

    def _remove(self, event: PagesRemoved) -> None:
        of_group = self._groups.get(event.group)
        if of_group is None:
            return
        now_ns, per_ns = self._now_ns, self._per_ns
        for page, digest, block in list(of_group.between(event.content, event.start_page, event.end_page)):
            of_group.remove(page, digest)
            self.lifetime_s.add((now_ns - block.born_ns) * per_ns)
            self.idle_s.add((now_ns - block.used_ns) * per_ns)
            uses = list(block.uses_ns)
            for earlier, later in pairwise(uses):
                self.reuse_gap_s.add((later - earlier) * per_ns)


def _digests(content: Content, pages: Sequence[int]) -> Iterator[bytes]:
    """Yield for each of the ascending `pages` a digest of the tenant and of all tokens up to the page's end."""
    hasher = blake2b((content.salt or "").encode(), digest_size=16)
    read = 0
    with memoryview(content.units) as units:
        for page in pages:
            end = min(page + 1, content.num_known_pages)
            stop = -(-end * content.page_size // content.unit_tokens) * UNIT_BYTES
            hasher.update(units[read:stop])
            read = stop
            at_page = hasher.copy()
            if page >= content.num_known_pages:  # tokens of one owner, not known
                at_page.update(b"%d %d" % (content.owner, page))
            yield at_page.digest()

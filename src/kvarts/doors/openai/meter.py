"""Counters of a server, updated by events, and read when metrics are requested.

The counts of removed engines are kept, so that the totals of a server never fall.

Residency is how long blocks of KV stay in the device's memory: vLLM's metrics, from the events of the cache.

As in vLLM, a share of the blocks is sampled when they appear, and counted when they are evicted: their lifetime, the
time since their last use as a prefix, and the times between their last four such uses. A block appears here when it is
full and findable, in vLLM when it is allocated; it is used when a request is admitted that finds it. A block is known
by its tokens and those before it, since events describe pages by their contents.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import accumulate, pairwise
from math import log
from random import Random
from threading import Lock
from time import time
from typing import TYPE_CHECKING, NamedTuple

from kvarts.base.errors import ConfigError
from kvarts.core.content import UNIT_BYTES, Content
from kvarts.core.events import (
    Admitted,
    CacheCleared,
    Event,
    LeapDone,
    PagesRemoved,
    PagesStored,
    StepDone,
    StepEnded,
    StepStarted,
    TransferEnded,
)
from kvarts.core.request import Request
from kvarts.run.text import Completion

if TYPE_CHECKING:
    from kvarts.core.engine import Engine
    from kvarts.core.event_log import EventReader
    from kvarts.doors.openai.answer import Choice

__all__ = [
    "DEFAULT_SHARE",
    "OF_VLLM",
    "Bounds",
    "BucketCounts",
    "GoneEngines",
    "Meter",
    "Residency",
    "num_queried_below",
]

REQUEST_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
             960.0, 1920.0, 7680.0)  # fmt: skip
FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
                 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
           80.0)  # fmt: skip
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
FINE_S = tuple(round(0.0001 * 1.15**power, 7) for power in range(110))
"""Bounds from 0.1 ms to 6 minutes, for percentiles: each is 15 % above the one before."""
DEFAULT_SHARE = 0.01
NUM_USES = 4
RESIDENCY_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0,
               300.0, 600.0, 1200.0, 1800.0)  # fmt: skip


class Bounds(NamedTuple):
    """The bounds of published histograms, in seconds and tokens: those of vLLM. `tokens`: None for 1, 2, 5, 10 ..."""

    first_token_s: Sequence[float] = FIRST_TOKEN_S
    token_s: Sequence[float] = TOKEN_S
    request_s: Sequence[float] = REQUEST_S
    queue_s: Sequence[float] = REQUEST_S
    tokens: Sequence[int] | None = None


OF_VLLM = Bounds()


class BucketCounts:
    """A histogram: the number of values up to each bound, and above the last.

    `published`: the bounds that are published, if they are fewer.
    """

    __slots__ = ("bounds", "counts", "published", "total")

    def __init__(self, bounds: Sequence[float], published: Sequence[float] | None = None) -> None:
        self.published = tuple(bounds if published is None else published)
        self.bounds = tuple(sorted({*bounds, *self.published}))
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Count `value`, `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def add_sorted(self, values: Sequence[float]) -> None:
        """Count ascending values, each once."""
        place = 0
        while place < len(values):
            bucket = bisect_left(self.bounds, values[place])
            end = len(values) if bucket == len(self.bounds) else bisect_right(values, self.bounds[bucket], place)
            self.counts[bucket] += end - place
            place = end
        self.total += sum(values)

    def take(self, other: BucketCounts) -> None:
        """Add what `other` has counted, and leave it with nothing. Its bounds are the first ones of these."""
        assert self.bounds[: len(other.bounds)] == other.bounds
        for bucket, count in enumerate(other.counts):
            self.counts[bucket] += count
        self.total += other.total
        other.counts = [0] * len(other.counts)
        other.total = 0.0

    def cumulative(self) -> list[int]:
        """Return the number of values up to each published bound, and of all."""
        sums = list(accumulate(self.counts))
        return [*(sums[bisect_left(self.bounds, bound)] for bound in self.published), sums[-1]]


def bounds_1_2_5(most: int) -> tuple[int, ...]:
    """Return 1, 2, 5, 10, 20, 50 and so on, up to `most`."""
    bounds = (mantissa * 10**power for power in range(len(str(most))) for mantissa in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= most)


class Meter:
    """An EventReader of one engine's steps, and the ChoiceMeter of its answers. For the engine's thread.

    `speedup`: ratio of model time to real time; durations are reported in real time. `residency`: the meter of a share
    of the blocks, another EventReader of the same engine. `bounds`: of the histograms.
    """

    wants_details = False

    def __init__(
        self,
        *,
        max_model_len: int,
        speedup: float = 1.0,
        residency: Residency | None = None,
        bounds: Bounds = OF_VLLM,
    ) -> None:
        self.residency = residency
        self._per_ns = 1e-9 / speedup
        tokens = bounds_1_2_5(max_model_len) if bounds.tokens is None else bounds.tokens
        self.first_token_s = BucketCounts(FINE_S, bounds.first_token_s)
        self.next_token_s = BucketCounts(FINE_S, bounds.token_s)
        self.token_s_by_request = BucketCounts(bounds.token_s)
        self.request_s = BucketCounts(bounds.request_s)
        self.queue_s = BucketCounts(bounds.queue_s)
        self.inference_s = BucketCounts(REQUEST_S)
        self.prefill_s = BucketCounts(REQUEST_S)
        self.decode_s = BucketCounts(REQUEST_S)
        self.prompt_tokens_by_request = BucketCounts(tokens)
        self.generated_by_request = BucketCounts(tokens)
        self.max_tokens_by_request = BucketCounts(tokens)
        self.computed_by_request = BucketCounts(tokens)
        self.step_tokens = BucketCounts(STEP_TOKENS)
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_hit_tokens_below = 0
        self.num_hit_tokens_stored = 0
        """Of these, tokens from below the fastest tier."""
        self.num_recomputed_tokens = 0
        self.num_preemptions = 0
        self.num_steps = 0
        self.ended_by_reason = dict.fromkeys(("stop", "length", "abort", "error", "repetition"), 0)
        self.num_refused = 0
        """Requests refused because the queue was full."""
        self.num_rejected = 0
        """Requests that could never get their pages."""

    @property
    def num_aborted(self) -> int:
        """Requests that were ended because their client disconnected."""
        return self.ended_by_reason["abort"]

    @property
    def readers(self) -> Sequence[EventReader]:
        """The readers of the engine's events."""
        return [self] if self.residency is None else [self, self.residency]

    def take(self, other: Meter) -> None:
        """Add what `other` has counted, and leave it with nothing. Its `max_model_len` is no larger."""
        for name, value in vars(other).items():
            if isinstance(value, BucketCounts):
                getattr(self, name).take(value)
            elif name.startswith("num_"):
                setattr(self, name, getattr(self, name) + value)
                setattr(other, name, 0)
        for reason, count in other.ended_by_reason.items():
            self.ended_by_reason[reason] += count
            other.ended_by_reason[reason] = 0
        if self.residency is not None and other.residency is not None:
            self.residency.take(other.residency)

    # Steps ------------------------------------------------------------------------------------------------

    def observe(self, events: Sequence[Event]) -> None:
        """Count steps."""
        for event in events:
            if isinstance(event, StepDone):
                self.num_steps += 1
                self.num_preemptions += len(event.preemptions)
                self.step_tokens.add(event.num_tokens)
            elif isinstance(event, LeapDone):
                self.num_steps += len(event.durations_ns)
                self.step_tokens.add(event.num_running, len(event.durations_ns))

    # Choices ----------------------------------------------------------------------------------------------

    def first_token(self, waited_s: float) -> None:
        """Count a first token."""
        self.num_generated_tokens += 1
        self.first_token_s.add(waited_s)

    def next_tokens(self, num_tokens: int, waited_s: float) -> None:
        """Count tokens after the first; they arrived `waited_s` after the previous ones."""
        self.num_generated_tokens += num_tokens
        if num_tokens == 1:
            self.next_token_s.add(waited_s)
        else:
            self.next_token_s.add(waited_s / num_tokens, num_tokens)

    def prefilled(self, request: Request) -> None:
        """Count a prompt that has been computed, with its hits."""
        self.num_prompt_tokens += request.num_prompt_tokens
        self.num_queried_tokens += request.num_prompt_tokens
        self.num_hit_tokens += request.cached_tokens
        self.num_hit_tokens_below += sum(request.cached_tokens_below)
        self.num_hit_tokens_stored += sum(request.cached_tokens_below[1:])

    def ended(self, choice: Choice, completion: Completion, now_s: float) -> None:
        """Count a choice that has ended."""
        reason = "abort" if completion.finish_reason == "cancelled" else completion.finish_reason
        self.ended_by_reason[reason] += 1
        request = choice.request
        if request is None or reason == "abort":
            return
        num_tokens = len(completion.tokens)
        self.request_s.add(now_s - choice.started_s)
        if request.first_admitted_ns >= 0 and request.first_token_ns >= 0:
            self.queue_s.add((request.first_admitted_ns - request.arrival_ns) * self._per_ns)
            self.prefill_s.add((request.first_token_ns - request.first_admitted_ns) * self._per_ns)
            self.inference_s.add((request.last_token_ns - request.first_admitted_ns) * self._per_ns)
            decode_s = (request.last_token_ns - request.first_token_ns) * self._per_ns
            self.decode_s.add(decode_s)
            if num_tokens > 1:
                self.token_s_by_request.add(decode_s / (num_tokens - 1))
        self.num_recomputed_tokens += request.recomputed_tokens
        self.prompt_tokens_by_request.add(request.num_prompt_tokens)
        self.generated_by_request.add(num_tokens)
        self.max_tokens_by_request.add(request.max_tokens)
        self.computed_by_request.add(request.num_prompt_tokens - request.cached_tokens)


class GoneEngines:
    """The summed counts of removed engines.

    `num_evicted`: cached pages that were overwritten. `num_queried_below`: tokens that tiers below were asked for.
    `lock`: to be held while counts are read, since `take` moves them.
    """

    def __init__(self, name: str, meter: Meter) -> None:
        self.name = name
        self.meter = meter
        self.created_s = int(time())
        self.lock = Lock()
        self.num_evicted = 0
        self.num_queried_below = 0

    def take(self, meter: Meter, core: Engine) -> None:
        """Add the counts of an engine, which are zero from then on."""
        with self.lock:
            self.num_evicted += core.scheduler.cache.num_evicted
            self.num_queried_below += num_queried_below(meter, core)
            self.meter.take(meter)


def num_queried_below(meter: Meter, core: Engine) -> int:
    """Return the prompt tokens that an engine did not find on its device; 0 without tiers below."""
    if core.tiers is None:
        return 0
    return meter.num_queried_tokens - meter.num_hit_tokens + meter.num_hit_tokens_below


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

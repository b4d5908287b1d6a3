"""Running requests: the decode wheel, the chunked requests, and the order of preemption."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from kvarts.core.kv.cache import BlockTable, Cache
from kvarts.core.request import NEXT_STATES, Request, RequestState
from kvarts.core.sched.wheel import DecodeWheel

if TYPE_CHECKING:
    from kvarts.core.sched.input_batch import InputBatch

__all__ = ["Running", "RunningByArrival", "RunningOrder"]

PREFILLING: Final = RequestState.PREFILLING
DECODING: Final = RequestState.DECODING
FINISHED: Final = RequestState.FINISHED
ADMISSION_BITS: Final = 40
"""Bits of a place in the order of admission, in the seniority of requests that arrive at the same time."""


class RunningOrder:
    """Running requests in the order of priority, then seniority: that of admission, but for those that were loaded."""

    __slots__ = ("_by_priority", "_num_loaded", "_with_session_pages", "num_running")

    def __init__(self) -> None:
        self._by_priority: dict[int, dict[int, Request]] = {}
        self._with_session_pages: dict[int, Request] = {}
        self._num_loaded = 0
        """Running requests that are senior to some that were admitted before them, as their load took time."""
        self.num_running = 0

    def add(self, request: Request) -> None:
        """Add `request`, which has a larger `admission` than all before; a larger `seniority`, unless it was loaded."""
        self.num_running += 1
        if request.own is not None:
            self._with_session_pages[request.admission] = request
            return
        same = self._by_priority.get(request.priority)
        if same is None:
            same = self._by_priority[request.priority] = {}
        if not same or next(reversed(same)) < request.seniority:
            same[request.seniority] = request
            self._num_loaded += request.seniority < request.admission
            return
        junior = []  # those that were admitted while it was loaded: few of all that run
        while same and next(reversed(same)) > request.seniority:
            junior.append(same.popitem())
        same[request.seniority] = request
        while junior:
            seniority, other = junior.pop()
            same[seniority] = other
        self._num_loaded += request.seniority < request.admission

    def remove(self, request: Request) -> None:
        """Remove a request that ended or was preempted."""
        self.num_running -= 1
        if request.own is not None:
            del self._with_session_pages[request.admission]
            return
        same = self._by_priority[request.priority]
        del same[request.seniority]
        if request.seniority < request.admission:
            self._num_loaded -= 1
        if not same:
            del self._by_priority[request.priority]

    def victim(self) -> Request:
        """Return the request to preempt when a page is missing: the least senior of the lowest priority.

        The request that needs a page is among the candidates. So a victim never has a higher priority, and of the same
        priority only less senior requests are preempted before it. A request that was loaded is senior to those that
        were admitted during its load: otherwise a tier would let them take its pages. Requests that bring their own
        pages are not candidates, as no other request could use these.
        """
        lowest = self._by_priority[min(self._by_priority)]
        return lowest[next(reversed(lowest))]

    @property
    def is_in_order(self) -> bool:
        """Whether none was admitted after a less important one, so that none is preempted for a later one."""
        if self._num_loaded:
            return False
        last = -1
        for priority in sorted(self._by_priority, reverse=True):
            same = self._by_priority[priority]
            if next(iter(same)) < last:
                return False
            last = next(reversed(same))
        return True

    def __iter__(self) -> Iterator[Request]:
        for priority in sorted(self._by_priority):
            yield from self._by_priority[priority].values()
        yield from self._with_session_pages.values()


class Running(RunningOrder):
    """Owner of running requests and of the pages they hold.

    `batch`: the rows of an executor that needs page ids, else None.
    """

    __slots__ = (
        "_cache",
        "_first_late",
        "_keeps_tokens",
        "_page_size",
        "batch",
        "chunked",
        "ended",
        "in_flight",
        "joined",
        "lag",
        "most_late",
        "names_at_turns",
        "num_admitted",
        "num_late",
        "num_left",
        "num_sharing",
        "stalled",
        "taken_off",
        "wheel",
    )

    def __init__(
        self, cache: Cache, wheel: DecodeWheel, batch: InputBatch | None, *, plans_ahead: bool = False
    ) -> None:
        assert not plans_ahead or batch is None, "rows and tokens are those of the last step"
        super().__init__()
        self._cache = cache
        self._page_size = wheel.page_size
        self.num_admitted = 0
        """The number of times a request has started to run."""
        self.wheel = wheel
        self.batch = batch
        self._keeps_tokens = batch is not None or cache.publishes_all
        self.chunked: list[Request] = []
        """Requests off the wheel that have known tokens to compute after the last step, in order of admission."""
        self.names_at_turns: Callable[[Request], int] | None = None
        """Returns how many pages of a request that leaves can be found, if pages become findable only at turns."""
        self.num_left = 0
        """The number of times a request has released its pages."""
        self.lag = int(plans_ahead)
        """1 where a page is findable a step after a decode has filled it: the id of its last token is not known when
        the next step is planned."""
        self.in_flight: dict[Request, int] = {}
        """The tokens of chunks that were computed in the step before the one being planned, or between plans in the
        last step, if there is a lag."""
        self.joined: list[Request] = []
        """Requests that started to decode after the last step, if there is a lag and their model releases parts."""
        self.taken_off: list[Request] = []
        """Decodes that were stalled in the step being planned and compute nothing in it so far, if there is a lag."""
        self.ended: list[Request] = []
        """Requests that have generated their last token, and keep their place and pages until the next step is
        planned."""
        self.stalled: list[Request] = []
        """Decodes off the wheel, admitted after a chunked request, that get no tokens until its prefill is complete."""
        self.num_sharing = 0
        """Decodes with generated pages that other requests may hit, because their tokens are known."""
        self.most_late = 0 if batch is None else batch.most_late
        """For how many steps pages that decodes fill may stay unpublished, as long as no other pages are looked for."""
        self.num_late = 0
        """The number of such steps. In them no request has started to decode, or stopped."""
        self._first_late = 0
        """The first of them."""
        if self.most_late:
            assert cache.late is not None, "rows of whole pages"
            cache.late.call_before_reads(self.publish_late)

    def publish_later(self) -> None:
        """Leave the pages that decodes fill in the step being planned unpublished until pages are looked for."""
        if not self.num_late:
            self._first_late = self.wheel.step
        self.num_late += 1
        if self.num_late >= self.most_late:
            self.publish_late()

    def publish_late(self) -> None:
        """Publish the pages of these steps. The result is that of publishing step by step.

        Each request publishes all its pages at once, unless another may publish equal ones: of equal pages, the one
        that was filled first is found.
        """
        if not self.num_late:
            return
        first, end = self._first_late, self._first_late + self.num_late
        wheel, cache, batch = self.wheel, self._cache, self.batch
        assert batch is not None
        filled = wheel.having_filled(first, end - first)
        self.num_late = 0
        # The token computed in a step is the one sampled in the step before.
        batch.append_all_sampled(filled, [request.wheel_base + wheel.step + 1 for request in filled], wheel.step)
        is_merged = True
        for request in filled:
            if request.own is None:
                assert request.table is not None
                if cache.late is None or not cache.late.is_distinct(request.table):
                    is_merged = False
                    break
        size = end - first if is_merged else self._page_size
        for start in range(first, end, size):
            stop = min(start + size, end)
            for request in filled if is_merged else wheel.having_filled(start, stop - start):
                if request.own is None:
                    assert request.table is not None
                    cache.publish(request.table, request.wheel_base + stop)

    def enter(self, request: Request, hit_tokens: int, now_ns: int) -> None:
        """Let `request` run from `now_ns` on, admitted last, with its first `hit_tokens` tokens in pages."""
        if self.num_late:
            self.publish_late()
        assert PREFILLING in NEXT_STATES[request.state]  # `become`, inlined: this runs for every request
        request.state = PREFILLING
        admission = request.admission = self.num_admitted
        self.num_admitted = admission + 1
        if request.seniority < 0:
            request.seniority = admission
        self.add(request)
        request.num_computed = request.hit_tokens = hit_tokens
        if not request.num_admissions:
            request.first_admitted_ns = now_ns
        if not (request.num_admissions or request.has_lost_front):
            request.cached_tokens = hit_tokens
        elif hit_tokens > request.furthest_computed:
            request.cached_tokens += hit_tokens - request.furthest_computed
        if request.front_tokens:
            request.cached_tokens -= request.front_tokens
            request.front_tokens = 0
        if hit_tokens > request.largest_hit_tokens:
            request.largest_hit_tokens = hit_tokens
        request.num_admissions += 1
        request.has_unread = False
        if self.batch is not None:
            self.batch.enter(request)

    def start_loading(self, request: Request) -> None:
        """Note that `request` waits for its load: it is senior to all that are admitted from now on."""
        request.seniority = self.num_admitted
        self.num_admitted += 1

    def start_decoding(self, request: Request) -> None:
        """Put `request`, whose known tokens are all computed, on the wheel."""
        if self.num_late:
            self.publish_late()
        assert DECODING in NEXT_STATES[request.state]
        request.state = DECODING
        self.wheel.join(request)
        if self.shares(request):
            self.num_sharing += 1
        if self.batch is not None:
            self.batch.start_decoding(request)

    def leave(self, request: Request) -> None:
        """Take `request` off the wheel, or stop its chunks, before it has generated all its tokens."""
        if self.num_late:
            self.publish_late()
        if request.state is DECODING:
            if self.stalled and request in self.stalled:
                self.stalled.remove(request)
            else:
                self.wheel.leave(request)
            if self.shares(request):
                self.num_sharing -= 1
        elif request.state is FINISHED:
            self.end_again(request)
        else:
            self.chunked.remove(request)

    def has_decodes_after(self, admission: int) -> bool:
        """Return whether a decode that takes pages was admitted after `admission`."""
        for same in self._by_priority.values():
            for request in reversed(same.values()):
                if request.admission > admission:
                    if request.state is DECODING:
                        return True
                elif not self._num_loaded and request.seniority == request.admission:
                    break  # those before it were admitted earlier
        return False

    def may_repeat(self) -> bool:
        """Return whether a running request may fill a page that others can find already, until it is evicted."""
        late = self._cache.late
        if late is None:
            return False  # where windows release parts, each request has its turn anyway
        for request in self if self.num_sharing else self.chunked:
            table = request.table
            if table is not None and late.repeats(table):
                return True
        return False

    def stall_after(self, admission: int, now_ns: int) -> list[Request]:
        """Let the decodes that were admitted after `admission` compute nothing in this step; return them.

        They continue with a chunk of one token. Those that bring their own pages wait for no memory, and are not
        affected.
        """
        batch = self.batch
        stalled: list[Request] = []
        for request in sorted(self, key=lambda request: request.admission):
            if request.admission <= admission or request.state is not DECODING or request.own is not None:
                continue
            self.leave(request)
            request.last_token_ns = now_ns
            if batch is not None:
                batch.append_sampled(request, request.num_known, self.wheel.step)
                batch.stop_decoding(request)
            assert request.table is not None
            self._cache.stop_decoding(request.table, -(-request.num_computed // self._page_size))
            request.become(PREFILLING)
            self.chunked.append(request)
            stalled.append(request)
            if self.lag:
                self.taken_off.append(request)
        self.chunked.sort(key=lambda request: request.admission)
        return stalled

    def settle(self, request: Request, start: int) -> None:
        """Let `request` release, at its turn, the pages that no token from `start`, its next one, on attends to."""
        cache, table = self._cache, request.table
        assert table is not None
        cache.free_skipped(table, start, self.num_in_flight(request))
        cache.count()

    def shares(self, request: Request) -> bool:
        """Return whether other requests may hit pages that `request` generates, or its tokens must be kept."""
        if self.names_at_turns is not None and self.batch is None:
            return False
        if self._keeps_tokens:
            return True
        return request.own is None and request.content.num_known_tokens > request.num_prompt_tokens

    def num_in_flight(self, request: Request) -> int:
        """Return how many tokens `request` computed in the last step, if the next plan is made before these are known.

        It is a decode, or in `in_flight`, or computed none.
        """
        if not self.lag:
            return 0
        is_decode = request.state is not PREFILLING or request in self.taken_off
        return self.in_flight.get(request, int(is_decode))

    def publish_read(self) -> None:
        """End the plan of a step: make findable the pages that requests have filled which compute nothing in it."""
        for request in self.taken_off:
            if request.has_unread and request.admission >= 0:
                request.has_unread = False
                if request.num_computed % self._page_size == 0:
                    assert request.table is not None
                    self._cache.publish(request.table, request.num_computed)
        self.taken_off = []

    def keep(self, request: Request) -> None:
        """Let `request`, which is off the wheel and has generated its last token, keep its place and pages for now.

        If it stops, the next step computes that token.
        """
        assert request.table is not None
        self._count_recomputed(request)
        self.ended.append(request)
        if request.stops and self.lag:
            self.wheel.join(request)
            self.num_sharing += self.shares(request)
        else:
            num_pages = -(-request.num_computed // self._page_size)
            if self.names_at_turns is not None:  # it may have room for more
                num_pages = max(num_pages, request.table.num_pages)
            self._cache.stop_decoding(request.table, num_pages)

    def end_again(self, request: Request) -> None:
        """Take `request`, which has ended, off the wheel, if it computes the token that ended it."""
        if self.wheel.has(request):
            self.wheel.leave(request)
            self.num_sharing -= self.shares(request)

    def num_unnamed(self, request: Request) -> int:
        """Return how many full pages of `request`, which is off the wheel, cannot be found yet, as `release` asks."""
        return self.lag if request.has_unread and request.num_computed % self._page_size == 0 else 0

    def release(self, request: Request, num_unused: int = 0, num_unnamed: int = 0) -> None:
        """Release all pages of `request`, which is off the wheel; its computed pages stay cached.

        `num_unused`: pages beyond its computed tokens. `num_unnamed`: full pages that cannot be found, because not all
        of their tokens are known yet.
        """
        page_size, batch = self._page_size, self.batch
        table = request.table
        num_computed = request.num_computed
        if request.own is not None:
            if batch is not None:
                batch.append_sampled(request, request.num_known, self.wheel.step)
                batch.leave(request)
            self.remove(request)
            request.admission = request.seniority = -1
            return
        assert table is not None
        if batch is not None:
            batch.append_sampled(request, request.num_known, self.wheel.step)
            batch.leave(request)
            num_pages = table.num_pages
        elif self.names_at_turns is not None:
            num_pages = table.num_pages
        else:
            # Pages of decodes are taken in bulk; a request that was loaded has its pages before it computes.
            num_pages = -(-num_computed // page_size) + num_unused
            if num_pages < table.num_pages:
                num_pages = table.num_pages
        num_full = num_computed // page_size - num_unnamed
        if self.names_at_turns is not None:
            num_full = self.names_at_turns(request)
        self._cache.close(table, num_full, num_pages)
        self.num_left += 1
        request.table = None
        self.remove(request)  # as `part` does
        request.admission = request.seniority = -1
        if request.furthest_computed and request.state is not FINISHED:
            self._count_recomputed(request)
        if num_computed > request.furthest_computed:
            request.furthest_computed = num_computed

    def part(self, request: Request) -> None:
        """Remove `request`, which is off the wheel, from the running requests; it keeps its pages."""
        self.remove(request)
        request.admission = request.seniority = -1
        if request.state is not FINISHED:  # else that was done when it ended
            self._count_recomputed(request)

    def _count_recomputed(self, request: Request) -> None:
        """Count the tokens that `request` has computed again since it was admitted last."""
        if request.furthest_computed:
            recomputed = min(request.num_computed, request.furthest_computed) - request.hit_tokens
            if recomputed > 0:
                request.recomputed_tokens += recomputed

    def num_computed(self, request: Request) -> int:
        """Return how many tokens of running `request` are computed before the next step."""
        if request.state is DECODING and request not in self.stalled:
            return self.wheel.num_computed(request)
        return request.num_computed

    def num_pages_of(self, request: Request) -> int:
        """Return how many pages running `request` holds."""
        table = request.table
        assert table is not None
        if table.page_ids is not None or request.state is PREFILLING:
            return table.num_pages
        return max(table.num_pages, -(-self.num_computed(request) // self._page_size))

    def tables(self) -> list[tuple[BlockTable, int]]:
        """Return the block table and number of pages of each running request, between steps. Assert that states fit."""
        held = []
        for request in self:
            expected = PREFILLING if request in self.chunked else DECODING
            if request in self.ended:
                expected = FINISHED
            assert request.state is expected, f"{request!r} runs, and should be {expected.name}"
            if request.own is not None:
                continue
            assert request.table is not None
            held.append((request.table, self.num_pages_of(request)))
        return held


class RunningByArrival(Running):
    """Running requests that are preempted by arrival, the latest first; among equal arrivals, the first admitted.

    This is the rule of vLLM's policy `priority`.
    """

    __slots__ = ()

    def add(self, request: Request) -> None:
        """Add `request`, which has a larger `admission` than all before."""
        request.seniority = (request.arrival_ns << ADMISSION_BITS) + (1 << ADMISSION_BITS) - 1 - request.admission
        super().add(request)

    @property
    def is_in_order(self) -> bool:
        """Whether requests in the order of preemption, the last one first, are in admission order."""
        last = -1
        for priority in sorted(self._by_priority, reverse=True):
            for request in self._by_priority[priority].values():
                if request.admission < last:
                    return False
                last = request.admission
        return True

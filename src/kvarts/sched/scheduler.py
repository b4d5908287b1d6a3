"""The scheduler of one engine: running requests first, then waiting ones, within a token budget.

There is no prefill mode and no decode mode: in every step, each running request computes some of the tokens that are
known and not yet computed. Requests with just one such token are on the decode wheel; at most one request has more,
the *chunked* one, because whoever did not get all its tokens took the last of the budget, and nobody is admitted
after it. So the order of a step is: the wheel, the chunked request, then admissions.

With a tier below the device, a waiting request may be *loading*: it has all the pages of its known tokens, and a seat,
and waits for a transfer to fill the first of them. It is no victim, since its pages could not be given away before the
transfer ends. Then it is *ready*, and admitted before those who wait.

The scheduler reads no clock and no random number: time comes in with `schedule` and `commit`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from kvarts.config import EngineConfig
from kvarts.content import Content
from kvarts.errors import ConfigError
from kvarts.events import Admitted, Blocked, ChunkComputed, Event, Finished, HeadBlocked, LoadStarted, Preemption
from kvarts.kv.cache import Holding, PageCache
from kvarts.kv.eviction import EvictionOrder, LruOrder
from kvarts.kv.pool import CountPool, IdPool, PageId
from kvarts.kv.tree import Match, PrefixTree
from kvarts.offload.config import OffloadConfig
from kvarts.request import Request
from kvarts.sched.input_batch import LiveRows
from kvarts.sched.plan import Batch, Chunk, StepPlan, StepResult
from kvarts.sched.policy import RunningSet, WaitingQueue
from kvarts.sched.wheel import DecodeWheel

if TYPE_CHECKING:
    from kvarts.offload.offloader import Loaded, Offer, Offloader
    from kvarts.offload.safe_first import SafeFirst
    from kvarts.sharing.part import DevicePart

__all__ = ["Scheduler"]


class Scheduler:
    """Owner of the queues, the wheel and the page cache, and of everything in a Request that changes.

    `with_page_ids`: plans name pages, rows and tokens, for an executor that writes KV. `events` receives what
    happens to pages and requests. `offload`: tiers below the device; `known_keys` and
    `namespace`: see FileTier. `part`: of a device that several models share, instead of a pool of its own.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        with_page_ids: bool = False,
        events: list[Event] | None = None,
        offload: OffloadConfig | None = None,
        known_keys: Iterable[bytes] = (),
        namespace: str = "",
        part: DevicePart | None = None,
    ) -> None:
        self.config = config
        has_tiers = offload is not None and bool(offload.tiers(config.page_size))
        self._part = part
        tell = None if events is None else events.append
        safe_first: SafeFirst | None = None
        if part is None:
            order: EvictionOrder = LruOrder()
            if has_tiers and offload is not None and offload.policy == "lazy":
                from kvarts.offload.safe_first import SafeFirst  # only those who have tiers pay for it

                order = safe_first = SafeFirst()
            pool = IdPool(config.num_pages) if with_page_ids else CountPool(config.num_pages)
            self.cache = PageCache(pool, PrefixTree(order, tell, watcher=safe_first))
        else:
            assert not (has_tiers or with_page_ids), "shared pages are only counted, and have no tier below"
            self.cache = part.cache
            part.cache.tree.tell = tell
        self.offloader: Offloader | None = None
        if has_tiers and offload is not None:
            from kvarts.offload.offloader import Offloader  # only those who have tiers pay for it

            self.offloader = Offloader(
                offload,
                self.cache,
                page_size=config.page_size,
                max_num_batched_tokens=config.max_num_batched_tokens,
                with_page_ids=with_page_ids,
                events=events,
                known_keys=known_keys,
                namespace=namespace,
                order=safe_first,
            )
        self.wheel = DecodeWheel(config.page_size)
        self.waiting = WaitingQueue()
        self.running = RunningSet()
        self.rows = LiveRows(config.max_num_seqs, config.page_size) if with_page_ids else None
        self.blocked = Blocked.NOT
        """Why the head waits; NOT also where nobody waits or the head was not looked at since something changed."""
        self.mark_used = self.mark_cached = self.mark_released = 0
        """Pages at the mark of the last scheduled step: the first moment in which the most were in use."""
        self.num_pages_wanted = 0
        """How many pages the blocked head has to get, where pages are what it waits for."""
        self.token_budget = config.max_num_batched_tokens
        """Tokens the next step may compute. Whoever shares its compute is told before each step."""
        self.is_draining = False
        """Whether nobody is admitted, for now."""
        self.make_way: Callable[[Request, int, bool], bool] | None = None
        """Of several models on one device, asks the others for pages: for a request, until so many can be taken, and
        whether to admit it. Answers whether they can be."""
        self.stalls_ns: list[int] = []
        """For every token made after a preemption: the time since the token before it."""
        self._chunked: Request | None = None
        self._loading: dict[int, Request] = {}
        """By index, who waits for a load, in the order of admission."""
        self._abandoned: dict[int, Request] = {}
        """By index, who was cancelled while its load was under way: its pages go when that ends."""
        self._ready: list[tuple[Request, Loaded]] = []
        self._computed: list[tuple[Content, int, Holding]] = []
        """Contents that get full pages in the scheduled step, how many they have then, and who holds them."""
        self._gave_way: list[Preemption] = []
        """Who was preempted for another model since the last step was planned."""
        self._completing: list[Request] = []
        """Who computes the last of its known tokens in the scheduled step, off the wheel."""
        self._page_size = config.page_size
        self._pool_tokens = config.pool_tokens
        self._events = events
        self._told_blocked: tuple[int, Blocked] | None = None
        self._num_admitted = 0
        self._last_end_ns = 0
        # Decoding requests whose generated pages others may hit, because their tokens are known.
        self._num_sharing = 0

    # Requests come and go ---------------------------------------------------------------------------------

    def add(self, request: Request) -> str | None:
        """Queues `request`; or answers why it can never run, and forgets it.

        Raises ConfigError for a request without prompt or output tokens.
        """
        config = self.config
        if request.num_prompt_tokens < 1 or request.num_output_tokens < 1:
            raise ConfigError(f"request {request.index} must have at least one prompt token and one output token")
        num_tokens = request.num_prompt_tokens + request.num_output_tokens - 1
        num_pages = -(-num_tokens // self._page_size)
        num_most = self.cache.pool.total if self._part is None else self._part.num_most
        if num_pages > num_most:
            room = (
                "the pool has"
                if num_most == config.num_pages
                else "beside what is guaranteed to other models there are"
            )
            return (
                f"needs {num_pages} pages of {config.page_size} tokens for {request.num_prompt_tokens} prompt and "
                f"{request.num_output_tokens} output tokens; {room} {num_most}"
            )
        if config.profile == "mocker":
            request.priority = 0
        waiting = self.waiting
        waiting.push(request)
        if waiting.num_waiting == 1 or waiting.head() is request:
            self.blocked = Blocked.NOT
        return None

    def cancel(self, request: Request) -> None:
        """Takes a waiting or running request out, between steps; its pages are free at once.

        Those of a request that waits for a load are, when that has ended.
        """
        if request.index in self._loading:
            self._abandoned[request.index] = self._loading.pop(request.index)
        elif any(request is other for other, _ in self._ready):
            self._ready = [entry for entry in self._ready if entry[0] is not request]
            self._close_loaded(request)
        elif request.admission < 0:
            self.waiting.remove(request)
        else:
            self._leave_batch(request)
            self._release(request)
        self.blocked = Blocked.NOT

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.running.num_running or self.waiting.num_waiting or self._loading or self._ready)

    @property
    def is_stalled(self) -> bool:
        """Whether a step would do nothing until others let go of pages, or it may admit again."""
        waits = self.waiting.num_waiting and not self.is_draining and self.blocked is not Blocked.PAGES
        return not (self.running.num_running or waits)

    @property
    def wants_tokens(self) -> bool:
        """Whether it could compute more than a token for each decode."""
        if self._chunked is not None or self._ready:
            return True
        can_admit = self.waiting.num_waiting and not self.is_draining
        return bool(can_admit) and self.blocked in (Blocked.NOT, Blocked.BUDGET)

    @property
    def num_waiting(self) -> int:
        """Requests that wait to be admitted, for a load or otherwise."""
        return self.waiting.num_waiting + (0 if self.offloader is None else self.num_loading)

    @property
    def num_loading(self) -> int:
        """Requests that wait for a load, or whose load has ended since the last step."""
        return len(self._loading) + len(self._ready)

    # One step ---------------------------------------------------------------------------------------------

    def schedule(self, now_ns: int) -> StepPlan:
        """Plans the step that starts at `now_ns` and takes its pages. `commit` must follow."""
        wheel, cache = self.wheel, self.cache
        preemptions: list[Preemption] = []
        gave_way, self._gave_way = self._gave_way, []
        self.mark_used = -1
        self.num_pages_wanted = 0
        offloader = self.offloader
        if offloader is not None:
            self._take_loaded(offloader)
            offloader.plan_stores(now_ns)
        num_due = wheel.pages_due()
        if num_due > cache.num_free:
            self._take_due_one_by_one(now_ns, preemptions)
        elif num_due:
            self._take_due(num_due)
        budget = self.token_budget - wheel.num_decoding
        chunks: list[Chunk] = []
        if self._chunked is not None and budget > 0:  # a part of a budget may be just enough for the decodes
            budget = self._continue_chunked(self._chunked, budget, now_ns, preemptions, chunks)
        if self._num_sharing:
            self._publish_filled(1)
        admitted: tuple[int, ...] = ()
        if preemptions:
            self.blocked = Blocked.NOT
        elif (self.waiting.num_waiting or self._ready) and not self.is_draining:
            admitted = self._admit(now_ns, budget, chunks)
        if cache.num_used > self.mark_used:
            self._mark()
        batch = Batch(tuple(chunks), wheel.num_decoding, wheel.known_tokens, self._pool_tokens)
        rows = self.rows
        if rows is None:
            return StepPlan(wheel.step, batch, admitted, (*gave_way, *preemptions))
        decodes = rows.decodes(wheel.step, wheel.needing_page()) if wheel.num_decoding else None
        transfers = () if offloader is None else offloader.take_planned()
        return StepPlan(wheel.step, batch, admitted, tuple(preemptions), decodes, rows.take_left(), transfers)

    def commit(self, end_ns: int, result: StepResult | None = None) -> list[Request]:
        """The scheduled step ended at `end_ns`; returns who finished, in admission order."""
        wheel, rows = self.wheel, self.rows
        if rows is not None:
            assert result is not None
            rows.keep(wheel.step, result)
        finished = self.commit_many(1, end_ns)
        if self.offloader is not None and result is not None and result.transfer_reports:
            self.offloader.report(result.transfer_reports, end_ns)
            self.blocked = Blocked.NOT
        if self._completing:
            self._commit_completing(end_ns, finished)
        if rows is not None and result is not None and result.stopped_rows:
            # Who stopped at what was its last token anyway is gone from its row already.
            stopped = [request for row in result.stopped_rows if (request := rows.requests[row]) is not None]
            for request in sorted(stopped, key=lambda request: request.admission):
                self._leave_batch(request)
                self._finish(request, end_ns)
                finished.append(request)
        if finished:
            self.blocked = Blocked.NOT
        return finished

    # Many steps -------------------------------------------------------------------------------------------

    def horizon(self) -> int:
        """How many steps from now are certain to be alike: every decode gets a token, and nothing else happens.

        0 if the next step has to be scheduled. Certain as long as nobody is added; somebody who does not become the
        head of the waiting queue may be.
        """
        wheel = self.wheel
        if self._chunked is not None or not wheel.num_decoding or self._ready:
            return 0
        if self.waiting.num_waiting and not self.is_draining:
            # Decodes only ever take more pages, so a head that was short of pages stays so; and of seats.
            if self.blocked is Blocked.NOT:
                return 0
            if self.blocked is Blocked.BUDGET and wheel.num_decoding < self.token_budget:
                return 0
        num_steps = wheel.steps_to_finish()
        page_size = self._page_size
        most_pages = (num_steps // page_size + 1) * wheel.num_decoding
        if self._num_sharing:
            if self.blocked is Blocked.PAGES:
                # A page that a decode fills may be one that the head needs, and then needs no more.
                num_steps = min(num_steps, wheel.steps_to_filled_page() - 1)
            elif self._events is not None or self.offloader is not None or not self.cache.has_empty(most_pages):
                # What is filled and what is evicted may be copies of one page: their order matters. And what is
                # filled may have to be stored.
                num_steps = min(num_steps, wheel.steps_to_filled_page())
        num_free = self.cache.num_free
        if self.offloader is not None:
            num_to_spare = self.offloader.pages_to_spare()
            if num_to_spare is None:
                return 0
            num_free = min(num_free, num_to_spare)
        if most_pages > num_free:
            num_steps = self._steps_within(num_free, num_steps)
        return num_steps

    def advance(self, num_steps: int, *, is_taken: bool = False) -> list[int]:
        """Does `num_steps` of the steps that `horizon` promised; `commit_many` must follow. The pages each took.

        `is_taken`: they were taken before, by somebody who knows in what order.
        """
        wheel = self.wheel
        due = wheel.pages_due_by_step(num_steps)
        num_due = sum(due)
        if num_due and not is_taken:
            assert not self.cache.has_page_ids, "page ids are handed out one step at a time"
            self.cache.take(num_due)
        if self._num_sharing:
            self._publish_filled(num_steps)
        return due

    def commit_many(self, num_steps: int, end_ns: int) -> list[Request]:
        """The last of the advanced steps ended at `end_ns`; returns who finished with it, in admission order."""
        self._last_end_ns = end_ns
        finished = self.wheel.turn(num_steps)
        if self._computed:
            assert self.offloader is not None
            for content, num_full, holding in self._computed:
                self.offloader.confirm(content, num_full, holding)
            self._computed.clear()
        if finished:
            for request in finished:
                if self._num_sharing and self._shares(request):
                    self._num_sharing -= 1
                self._finish(request, end_ns)
            self.blocked = Blocked.NOT
        return finished

    # Inside: pages of decodes -----------------------------------------------------------------------------

    def _take_due(self, num_due: int) -> None:
        page_ids = self.cache.take(num_due)
        if page_ids is not None:
            for request, page_id in zip(self.wheel.needing_page(), page_ids, strict=True):
                self._give_page(request, page_id)

    def _give_page(self, request: Request, page_id: PageId) -> None:
        holding = request.holding
        assert holding is not None and holding.page_ids is not None
        holding.page_ids.append(page_id)
        holding.num_pages += 1

    def _take_due_one_by_one(self, now_ns: int, preemptions: list[Preemption]) -> None:
        """Not every decode can have its page: in admission order, each takes one or preempts for it."""
        cache = self.cache
        served: set[int] = set()
        for request in self.wheel.needing_page():
            if request.admission < 0:
                continue  # preempted for one before it
            while not cache.num_free and not self._others_make_way(request, 1):
                if self._preempt_for(request, 1, now_ns, preemptions, served) is request:
                    break
            else:
                served.add(request.index)
                page_ids = cache.take(1)
                if page_ids is not None:
                    self._give_page(request, page_ids[0])

    def _preempt_for(
        self,
        asker: Request,
        num_pages: int,
        now_ns: int,
        preemptions: list[Preemption],
        served: set[int] | None,
    ) -> Request:
        """Preempts one request and returns it. `served`: the decodes that took a page for this step; None: all."""
        cache = self.cache
        num_used = cache.num_used
        if num_used > self.mark_used:
            self._mark()
        victim = self.running.victim()
        num_unused = 0
        if victim is self._chunked:
            self._chunked = None
        else:
            self._leave_wheel(victim)
            victim.last_token_ns = now_ns  # it made one in the step that ended now
            # A page taken for the step that it is now not part of.
            if victim.num_computed % self._page_size == 0 and (served is None or victim.index in served):
                num_unused = 1
        preemption = Preemption(
            victim.index, asker.index, num_pages, num_pages - cache.num_free, num_used, victim.num_computed
        )
        preemptions.append(preemption)
        self._send_back(victim, preemption, num_unused)
        return victim

    def _send_back(self, victim: Request, preemption: Preemption, num_unused: int = 0) -> None:
        """`victim`, off the wheel, waits again, before its equals."""
        if self._events is not None:
            self._events.append(preemption)
        self._release(victim, num_unused)
        victim.num_preemptions += 1
        victim.num_computed = 0
        self.waiting.push_front(victim)

    # Inside: other models on the device -------------------------------------------------------------------

    def _others_make_way(self, request: Request, num_pages: int, *, to_admit: bool = False) -> bool:
        """Whether `num_pages` can be taken for `request` now, since other models gave way."""
        if self.make_way is None:
            return False
        if not to_admit and self.running.victim().priority < request.priority:
            return False  # its own model has less important work, which goes first
        return self.make_way(request, num_pages, to_admit)

    def give_way(self, num_victims: int, model: str, asker: int, num_pages: int) -> list[Request]:
        """Preempts the next `num_victims` victims, between steps, for request `asker` of `model`; returns them.

        `num_pages`: how many pages of this pool would be enough for it.
        """
        victims = []
        for _ in range(num_victims):
            victim = self.running.victim()
            if victim is not self._chunked:
                victim.last_token_ns = self._last_end_ns
            self._leave_batch(victim)
            preemption = Preemption(
                victim.index, asker, num_pages, num_pages, self.cache.num_used, victim.num_computed, model
            )
            self._gave_way.append(preemption)
            self._send_back(victim, preemption)
            victims.append(victim)
        self.blocked = Blocked.NOT
        return victims

    # Inside: prompts --------------------------------------------------------------------------------------

    def _continue_chunked(
        self,
        request: Request,
        budget: int,
        now_ns: int,
        preemptions: list[Preemption],
        chunks: list[Chunk],
    ) -> int:
        """The next chunk of the chunked request; returns the budget left. Preempts for its pages."""
        cache = self.cache
        start = request.num_computed
        num_known = request.num_prompt_tokens + request.num_made
        num_tokens = num_known - start
        if num_tokens > budget:
            num_tokens = budget
        holding = request.holding
        assert holding is not None
        num_pages = -(-(start + num_tokens) // self._page_size) - holding.num_pages
        while num_pages > cache.num_free and not self._others_make_way(request, num_pages):
            if self._preempt_for(request, num_pages, now_ns, preemptions, None) is request:
                return budget
        self._compute_chunk(request, num_tokens, num_known, chunks)
        return budget - num_tokens

    def _admit(self, now_ns: int, budget: int, chunks: list[Chunk]) -> tuple[int, ...]:
        """Admits from the head of the waiting queue while seats, budget and pages last."""
        waiting, cache, config = self.waiting, self.cache, self.config
        running, offloader = self.running, self.offloader
        page_size, max_num_seqs = self._page_size, config.max_num_seqs
        admitted: list[int] = []
        self.blocked = Blocked.NOT
        while self._ready and budget > 0:
            request, loaded = self._ready.pop(0)
            budget -= self._resume(request, loaded, budget, now_ns, chunks)
            admitted.append(request.index)
        while waiting.num_waiting:
            request = waiting.head()
            if running.num_running + (0 if offloader is None else self.num_loading) >= max_num_seqs:
                self.blocked = Blocked.SEQS
                break
            if budget <= 0:
                self.blocked = Blocked.BUDGET
                break
            num_known = request.num_prompt_tokens + request.num_made
            # The last token is always computed: somebody has to produce the logits.
            match = cache.match(request.content, (num_known - 1) // page_size)
            num_wanted = -(-num_known // page_size) - match.num_shared
            num_free = cache.num_free if self._part is None else self._part.num_free_to_admit(num_wanted)
            if num_wanted > num_free and not self._others_make_way(request, num_wanted, to_admit=True):
                self.blocked = Blocked.PAGES
                self.num_pages_wanted = num_wanted
                break
            waiting.pop()
            if self._events is not None:
                self._told_blocked = None
            if offloader is not None:
                limit = (num_known if offloader.config.full_prompt_hits else num_known - 1) // page_size
                offer = offloader.lookup(request.index, request.content, match.num_pages, limit)
                if offer is not None:
                    self._start_load(request, match, offer, num_known)
                    continue
            hit_tokens = match.num_pages * page_size
            if self._events is not None:
                self._events.append(Admitted(request.index, request.content, match.num_pages))
            request.holding = cache.open(match)
            budget -= self._enter(request, hit_tokens, budget, now_ns, chunks)
            admitted.append(request.index)
        if self._events is not None and self.blocked is not Blocked.NOT:
            head = waiting.head().index
            if self._told_blocked != (head, self.blocked):
                self._told_blocked = head, self.blocked
                num_pages_short = max(0, self.num_pages_wanted - cache.num_free)
                self._events.append(HeadBlocked(head, self.blocked, num_pages_short))
        return tuple(admitted)

    def _enter(self, request: Request, hit_tokens: int, budget: int, now_ns: int, chunks: list[Chunk]) -> int:
        """`request`, with its first `hit_tokens` tokens in its pages, begins to run; tokens computed of `budget`."""
        request.admission = self._num_admitted
        self._num_admitted += 1
        self.running.add(request)
        request.num_computed = request.hit_tokens = hit_tokens
        if request.num_admissions == 0:
            request.first_admitted_ns = now_ns
            request.cached_tokens = hit_tokens
        elif hit_tokens > request.furthest_computed:
            request.cached_tokens += hit_tokens - request.furthest_computed
        if hit_tokens > request.largest_hit_tokens:
            request.largest_hit_tokens = hit_tokens
        request.num_admissions += 1
        if self.rows is not None:
            self.rows.enter(request)
        num_known = request.num_prompt_tokens + request.num_made
        num_tokens = num_known - hit_tokens
        if num_tokens > budget:
            num_tokens = budget
        self._compute_chunk(request, num_tokens, num_known, chunks)
        return num_tokens

    # Inside: loads ----------------------------------------------------------------------------------------

    def _start_load(self, request: Request, match: Match, offer: Offer, num_known: int) -> None:
        """`request` gets all the pages of its known tokens; a transfer fills those of `offer`, after those found."""
        offloader, cache = self.offloader, self.cache
        assert offloader is not None
        num_held = -(-num_known // self._page_size)
        if self._events is not None:
            # Before the evictions that make room for it.
            by_tier = zip((tier.name for tier in offloader.tiers), offer.by_tier, strict=True)
            self._events.append(
                LoadStarted(
                    offloader.num_transfers,
                    request.index,
                    request.content,
                    match.num_pages,
                    num_held,
                    tuple((name, num_pages) for name, num_pages in by_tier if num_pages),
                )
            )
        holding = request.holding = cache.open(match)
        cache.grow(holding, num_held)
        self._loading[request.index] = request
        offloader.start_load(request.index, request.content, match.num_pages, offer.num_pages, holding)

    def _take_loaded(self, offloader: Offloader) -> None:
        """Loads have ended: what arrived can be hit, and who waited for it can run."""
        for loaded in offloader.take_loaded():
            abandoned = self._abandoned.pop(loaded.request, None)
            request = abandoned or self._loading.pop(loaded.request)
            assert request.holding is not None
            self.cache.publish(request.holding, request.content, loaded.num_pages)
            if abandoned is None:
                self._ready.append((request, loaded))
            else:
                self._close_loaded(request)

    def _close_loaded(self, request: Request) -> None:
        """Gives back all pages of `request`, which was cancelled before it ran; what was found or loaded is cached."""
        holding = request.holding
        assert holding is not None
        num_full = holding.path[-1].end if holding.path else 0
        self.cache.close(holding, request.content, num_full, holding.num_pages)
        request.holding = None

    def _resume(self, request: Request, loaded: Loaded, budget: int, now_ns: int, chunks: list[Chunk]) -> int:
        """`request` begins to run, with what was loaded; tokens computed of `budget`."""
        page_size = self._page_size
        offloader = self.offloader
        assert offloader is not None
        # Where the whole prompt was found, its last token is computed again.
        hit_tokens = min(loaded.num_pages * page_size, request.num_prompt_tokens + request.num_made - 1)
        below = []
        start = (loaded.num_pages - sum(loaded.by_tier)) * page_size
        for num_pages in loaded.by_tier:
            end = start + num_pages * page_size
            below.append(max(0, min(end, hit_tokens) - max(start, request.furthest_computed)))
            start = end
        if any(below):
            so_far = request.cached_tokens_below or (0,) * len(below)
            request.cached_tokens_below = tuple(map(sum, zip(so_far, below, strict=True)))
        if self._events is not None:
            by_tier = tuple(zip((tier.name for tier in offloader.tiers), loaded.by_tier, strict=True))
            self._events.append(Admitted(request.index, request.content, loaded.num_pages, by_tier))
        return self._enter(request, hit_tokens, budget, now_ns, chunks)

    # Inside: chunks ---------------------------------------------------------------------------------------

    def _compute_chunk(self, request: Request, num_tokens: int, num_known: int, chunks: list[Chunk]) -> None:
        """Takes the pages of a chunk and counts it as computed; full pages can be hit from now on."""
        cache, page_size = self.cache, self._page_size
        holding, content = request.holding, request.content
        assert holding is not None
        start = request.num_computed
        end = request.num_computed = start + num_tokens
        if self._events is not None:
            self._events.append(ChunkComputed(request.index, start, end, num_known))
        cache.grow(holding, -(-end // page_size))
        # A page of unknown tokens is of use to nobody else, and to its own request once it has let go of it.
        num_full = min(end // page_size, content.num_known_pages)
        cache.publish(holding, content, num_full)
        if self.offloader is not None and num_full > start // page_size:
            self._computed.append((content, num_full, holding))
        if end == num_known:
            self._completing.append(request)
            if request is self._chunked:
                self._chunked = None
        else:
            self._chunked = request
        if self.rows is None:
            chunks.append(Chunk(start, num_tokens, request.num_prompt_tokens, num_known))
        else:
            assert holding.page_ids is not None
            chunks.append(
                Chunk(
                    start,
                    num_tokens,
                    request.num_prompt_tokens,
                    num_known,
                    row=request.row,
                    request_index=request.index,
                    tokens=np.frombuffer(content.tokens(start, end).tobytes(), np.uint64),
                    page_ids=tuple(holding.page_ids),
                )
            )

    def _commit_completing(self, end_ns: int, finished: list[Request]) -> None:
        """Each completed chunk gave its sequence one more token."""
        wheel, rows = self.wheel, self.rows
        for request in self._completing:
            request.num_made += 1
            if request.first_token_ns < 0:
                request.first_token_ns = end_ns
            else:
                self.stalls_ns.append(end_ns - request.last_token_ns)
            if request.num_made == request.num_output_tokens:
                finished.append(request)
                self._finish(request, end_ns)
            else:
                wheel.join(request)
                if self._shares(request):
                    self._num_sharing += 1
                if rows is not None:
                    rows.start_decoding(request)
        self._completing = []

    # Inside: ends -----------------------------------------------------------------------------------------

    def _shares(self, request: Request) -> bool:
        return self.rows is not None or request.content.num_known_tokens > request.num_prompt_tokens

    def _publish_filled(self, num_steps: int) -> None:
        """Pages that decodes fill in the next `num_steps` steps can be hit, where their tokens are known."""
        wheel, cache, rows = self.wheel, self.cache, self.rows
        page_size = self._page_size
        for request in wheel.completing_page(num_steps):
            num_computed = wheel.num_computed(request) + num_steps
            if rows is not None:
                # The token computed in this step is the one sampled in the step before.
                rows.bring_home(request, num_computed, wheel.step)
            num_full = min(num_computed // page_size, request.content.num_known_pages)
            holding = request.holding
            assert holding is not None
            cache.publish(holding, request.content, num_full)
            if self.offloader is not None and num_full > (num_computed - num_steps) // page_size:
                self._computed.append((request.content, num_full, holding))

    def _leave_wheel(self, request: Request) -> None:
        self.wheel.leave(request)
        if self._shares(request):
            self._num_sharing -= 1

    def _leave_batch(self, request: Request) -> None:
        """`request` ends before its time."""
        if request is self._chunked:
            self._chunked = None
        else:
            self._leave_wheel(request)

    def _finish(self, request: Request, end_ns: int) -> None:
        """`request`, off the wheel, made its last token."""
        request.last_token_ns = end_ns
        if self._events is not None:
            self._events.append(Finished(request.index, request.content))
        self._release(request)

    def _mark(self) -> None:
        """More pages are in use than before in this step."""
        cache = self.cache
        self.mark_used, self.mark_cached, self.mark_released = cache.num_used, cache.num_cached, cache.num_released

    def _release(self, request: Request, num_unused: int = 0) -> None:
        """Gives back all pages of `request`, which is off the wheel; what it computed stays cached.

        `num_unused`: pages beyond its computed tokens.
        """
        page_size, rows = self._page_size, self.rows
        holding = request.holding
        assert holding is not None
        num_computed = request.num_computed
        if rows is not None:
            rows.bring_home(request, request.num_known, self.wheel.step)
            rows.leave(request)
            num_pages = holding.num_pages
        else:
            # A decode takes pages in bulk with others'; a request that was loaded has them before it computes.
            num_pages = max(holding.num_pages, -(-num_computed // page_size) + num_unused)
        self.cache.close(holding, request.content, num_computed // page_size, num_pages)
        request.holding = None
        self.running.remove(request)
        request.admission = -1
        if request.furthest_computed:
            recomputed = min(num_computed, request.furthest_computed) - request.hit_tokens
            if recomputed > 0:
                request.recomputed_tokens += recomputed
        if num_computed > request.furthest_computed:
            request.furthest_computed = num_computed

    def _steps_within(self, num_free: int, num_steps: int) -> int:
        """How many of the next `num_steps` steps `num_free` pages are enough for."""
        for index, num_due in enumerate(self.wheel.pages_due_by_step(num_steps)):
            num_free -= num_due
            if num_free < 0:
                return index
        return num_steps

    # Laws -------------------------------------------------------------------------------------------------

    def num_pages_of(self, request: Request) -> int:
        """Pages that running `request` holds."""
        holding = request.holding
        assert holding is not None
        if holding.page_ids is not None or request.stop_step < 0:
            return holding.num_pages
        return self.config.pages_for(self.wheel.num_computed(request))

    def check(self) -> None:
        """Asserts laws L1, L2 and L3, between steps."""
        holdings = [(request.holding, self.num_pages_of(request)) for request in self.running]
        before = [*self._loading.values(), *self._abandoned.values(), *(request for request, _ in self._ready)]
        holdings += [(request.holding, request.holding.num_pages) for request in before if request.holding is not None]
        holds = []
        if self.offloader is not None:
            holds = self.offloader.holds()
            self.offloader.check()
        self.cache.check([(holding, num) for holding, num in holdings if holding is not None], holds)
        if not holdings and not holds:
            assert self.cache.num_used == 0, f"L2: {self.cache.num_used} pages in use and nobody runs"

"""The scheduler of one engine: running requests first, then waiting ones, within a token budget.

There is no prefill mode and no decode mode: in every step, each running request computes some of the tokens that are
known and not yet computed. Requests with just one such token are on the decode wheel. Those that did not get all their
tokens are *chunked*: the one that took the last of the budget, so that none was admitted after it, and decodes that a
preemption left without their token. So the order of a step is: the wheel, the chunked requests, requests that were
loaded, then admissions.

The scheduler reads no clock and no random number: `schedule` and `commit` receive the time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from kvarts.config import EngineConfig
from kvarts.errors import ConfigError
from kvarts.event_log import Tell
from kvarts.events import Admitted, Blocked, Cancelled, DecodesStalled, Finished, HeadBlocked, Preemption
from kvarts.kv.cache import Cache, Leap, Mark, Pins
from kvarts.limits import MOST_COUNT
from kvarts.request import NEXT_STATES, Request, RequestState
from kvarts.sched.horizon import Horizon
from kvarts.sched.page_source import OwnPagesInUse, PageSource
from kvarts.sched.plan import Batch, Chunk, DraftRows, StepPlan, StepResult
from kvarts.sched.policy import WaitingQueue
from kvarts.sched.preemption import Preemptor, holding_of
from kvarts.sched.prefill import AlignedChunks, ItlBound, Prefill
from kvarts.sched.running import Running
from kvarts.sched.wheel import DecodeWheel

if TYPE_CHECKING:
    from kvarts.kv.transfer import Loaded
    from kvarts.sched.drafts import Drafter, Drafts
    from kvarts.sched.handoffs import Handoffs
    from kvarts.sched.input_batch import InputBatch
    from kvarts.sched.loads import Loads

__all__ = ["Scheduler"]

S = RequestState
StepNs = Callable[[Batch], int]
# Enum members that every step or request reads have module-level names, because enum attributes are looked up each
# time.
NOT_BLOCKED: Final = Blocked.NOT
FOR_SEQS: Final = Blocked.SEQS
FOR_BUDGET: Final = Blocked.BUDGET
FOR_PAGES: Final = Blocked.PAGES
FOR_HANDOFFS: Final = Blocked.HANDOFFS
DECODING: Final = S.DECODING
QUEUED: Final = S.WAITING
LOADED: Final = S.LOADED
FINISHED: Final = S.FINISHED
NONE: Final[frozenset[Request]] = frozenset()
RUNNING, LOADING, WAITING = (S.PREFILLING, S.DECODING), (S.LOADING, S.LOADED), (S.WAITING, S.PREEMPTED)


class Scheduler:
    """Owner of the queues, and of all mutable state of a Request.

    `cache`: the pages, counted in blocks (Cache). `pages`: the source of pages and of the token budget. `waiting`: the
    queue; its policy chooses the next request. `loads`: requests that wait for a tier below the device, or None.
    `handoffs`: requests that two engines work on, or None. `batch`: rows for an executor that needs page ids; plans
    then name pages, rows and tokens. `drafter`: guesses tokens for such an executor; with `num_draft_slots`, drafts of
    up to so many tokens come before prompts, as in vLLM, else after them. `settle_places`: the places in a
    page at which a token no longer needs a page that the token before it needed. `step_ns`: the expected duration of a
    step, for `max_itl_ms` of the config. `plans_ahead`: the next step is planned while one runs, as by vLLM's
    asynchronous scheduling. So a request that ends keeps its place and its pages until the next step is planned, and a
    page that a decode fills can be found one step later. `finds_prefixes`: whether requests find cached pages. `tell`
    receives page and request events.
    """

    def __init__(
        self,
        config: EngineConfig,
        cache: Cache,
        pages: PageSource,
        waiting: WaitingQueue,
        *,
        loads: Loads | None = None,
        handoffs: Handoffs | None = None,
        batch: InputBatch | None = None,
        tell: Tell | None = None,
        pins: Pins | None = None,
        drafter: Drafter | None = None,
        num_draft_slots: int = 0,
        settle_places: tuple[int, ...] = (),
        step_ns: StepNs | None = None,
        plans_ahead: bool = False,
        finds_prefixes: bool = True,
    ) -> None:
        assert not plans_ahead or batch is None, "rows and tokens are those of the last step"
        self.config = config
        self.pins = pins
        """Pages that are kept in use without a request, or None."""
        self.cache = cache
        self.pages = pages
        self.tiers = None if loads is None else loads.tiers
        self.wheel = DecodeWheel(config.page_size)
        self.waiting = waiting
        self.waiting_with_pages: deque[Request] = deque()
        """Requests that bring their pages along: they wait for a place and for tokens, and never for memory."""
        self.running = Running(cache, self.wheel, batch, plans_ahead=plans_ahead)
        self._plans_ahead = plans_ahead
        self._finds_prefixes = finds_prefixes
        self.plans_idle = not (tell is None and loads is None and batch is None) or plans_ahead or cache.keeps_time
        """Whether a step without requests has effects or events."""
        self.has_released = False
        """Whether the last step, after it was planned, released requests that had ended before it."""
        self.loads = loads
        self._aligned: AlignedChunks | None = None
        if cache.states.aligns:
            most_tokens = min(config.max_num_batched_tokens, config.long_prefill_token_threshold or MOST_COUNT)
            self._aligned = AlignedChunks(config.page_size, most_tokens)
        if loads is not None:
            loads.connect(self.running, None if self._aligned is None else self._aligned.num_tokens)
        self.handoffs = handoffs
        if handoffs is not None:
            handoffs.connect(self.running, waiting, loads)
        self.own_pages = OwnPagesInUse(cache, tell)
        self.admitted: tuple[int, ...] = ()
        """The requests that were admitted to the step that was planned last, by index."""
        self.preempted: tuple[Preemption, ...] = ()
        """Those that were preempted for it, or before it for other models."""
        self.num_joined = 0
        """Its decodes that were not decodes in the step before."""
        self._with_new_table: Sequence[Request] = ()
        """Its decodes with pages of their own that changed."""
        self.mark = Mark()
        self.mark.parts = cache.counts()
        self.preemptor = Preemptor(self.running, self.waiting, cache, pages, self.mark, tell, self.tiers)
        self.blocked = NOT_BLOCKED
        """Why the head waits; NOT also if no request waits, or if the head was not examined since a change."""
        self.blocked_head: Request | None = None
        """The head that waits because of `blocked`."""
        self.num_pages_wanted = 0
        """The number of blocks that the blocked head needs, if it waits for pages."""
        self._least_wanted = 0
        """A lower bound of that number for as long as the head is blocked."""
        self._lacking: tuple[Request, int, int, int, int] | None = None
        """The head that last lacked memory, its values of these two numbers, its budget, and the pages it found."""
        self._num_published = -1
        """`num_published` of the cache at that time; -1 if the head must be matched again."""
        itl: ItlBound | None = None
        if config.max_itl_ms is not None:
            assert step_ns is not None, "a bound of latency needs the duration of steps"
            most_ns, pool_tokens = round(config.max_itl_ms * 1e6), config.pool_tokens
            itl = ItlBound(most_ns, step_ns, self.wheel, page_size=config.page_size, pool_tokens=pool_tokens)
        long_prefill = config.long_prefill_token_threshold
        self._prefill = Prefill(
            self.running,
            cache,
            self.own_pages,
            self.preemptor,
            loads=self.loads,
            batch=batch,
            tell=tell,
            itl=itl,
            aligned=self._aligned,
        )
        self._horizon = Horizon(self.running, self.waiting, cache, pages, self.loads, orders_matter=tell is not None)
        self._batch = batch
        self.drafts: Drafts | None = None
        """Drafted tokens, for an executor that reports which drafts are right; else None."""
        if drafter is not None:
            from kvarts.sched.drafts import Drafts

            assert batch is not None, "only an executor of tokens can tell which drafts are right"
            self.drafts = Drafts(
                drafter, self.wheel, cache, batch, loads=self.loads, tell=tell, num_slots=num_draft_slots
            )
        self._drafts_first = self.drafts if num_draft_slots else None
        if self._drafts_first is not None:
            self.running.names_at_turns = True
            if (most := config.max_num_seqs * (1 + num_draft_slots)) > config.max_num_batched_tokens:
                raise ConfigError(
                    f"{config.max_num_seqs} sequences with {num_draft_slots} drafted tokens each need up to {most} "
                    f"tokens a step, and its budget is {config.max_num_batched_tokens}",
                    field="max_num_batched_tokens",
                    hint="Raise it, or lower max_num_seqs or num_speculative_tokens.",
                )
        self._is_alone = pages.is_alone
        """Whether the answers of `pages` about other models are known without asking."""
        self._num_most = pages.num_most if pages.is_alone else 0
        self._token_budget = pages.token_budget if pages.is_alone else 0
        self._page_size = config.page_size
        self._ignores_priorities = config.profile == "mocker"
        self._max_num_seqs = config.max_num_seqs
        self._long_prefill = long_prefill
        self._takes_turns = bool(long_prefill) or cache.states.aligns
        """Whether requests may be admitted after a chunked one, so that some decodes take their turn after it."""
        self._defers = cache.states.defers
        # As in vLLM, the block that stands for missing ones counts as memory here.
        self._watermark = int(config.watermark * (cache.pool.total + 1))
        self._pool_tokens = config.pool_tokens
        self._admits_rest = bool(self._watermark or self._defers or loads is not None or self._aligned or itl)
        """Whether more than a place, tokens and pages decides on an admission."""
        self._needs_budget = loads is None and handoffs is None
        """Whether none is admitted to a step without tokens to compute."""
        self._settle_places = settle_places
        self._tell = tell
        self._told_blocked: tuple[int, Blocked] | None = None
        self._settles = cache.settles and self._drafts_first is None
        """Whether the releases of decodes are settled for all of them before their turns."""
        # Else others take and release parts between steps, and may use what decodes release.
        self._settles_late = cache.releases and pages.is_alone and (loads is None or loads.settles_ends)
        self.to_settle: list[Request] | None = None
        """The requests that completed their known tokens in the last step, if its decodes are not settled yet."""
        self._keeps_time = cache.keeps_time
        self._begins = self._keeps_time or loads is not None or self._takes_turns or self._defers or self._settles
        """Whether a plan begins with `_begin`."""
        self._has_turns = self._drafts_first is not None or cache.releases
        """Whether decodes take their pages by `_take_turns`."""
        self._settles_ends = loads is not None and loads.settles_ends and cache.releases
        """Whether a request that ends first releases the pages that its windows have passed."""
        self._ends_more = self._settles or plans_ahead or handoffs is not None
        """Whether a step ends with `_end_more`."""
        self.coming: set[Request] = set()
        """Requests that were accepted and are queued later."""
        self._given_up: list[Request] = []
        """Requests to drop when the next step is planned."""
        self.num_leaving = 0
        """Running requests that left when the current step was planned: it computes their tokens, in their memory."""
        self._joined: list[Request] = []
        """Requests that started to decode after the last step, if there is a lag."""
        self._unsettled: list[Request] = []
        """Decodes whose releases are postponed to their turn in the next step, in the order of admission."""
        self.has_sides = bool(cache.counts()) or loads is not None
        """Whether `side_counts` is not empty."""

    # Adding and removing requests -------------------------------------------------------------------------

    def add(self, request: Request) -> str | None:
        """Queue `request`, or return the reason why it can never run and reject it.

        Raise ConfigError for a request without prompt tokens, or without tokens to generate.
        """
        if request.num_prompt_tokens < 1 or request.max_tokens < (0 if request.computes_only else 1):
            raise ConfigError(f"request {request.index} must have at least one prompt token and one output token")
        reason = self.never_fits(request)
        if reason is not None:
            request.become(RequestState.REJECTED)
            return reason
        if self._ignores_priorities:
            request.priority = 0
        request.become(QUEUED)
        if request.own is not None:
            self.waiting_with_pages.append(request)
            return None
        if self.loads is not None:
            self.loads.note_arrived(request)
        waiting = self.waiting
        waiting.push(request)
        if waiting.num_waiting == 1 or waiting.head(request.arrival_ns) is request:
            self.blocked = NOT_BLOCKED
        return None

    def take_computed(self) -> list[int]:
        """Return the indices of requests that computed their prompt since the last call. Records them from now on."""
        computed, self._prefill.computed = self._prefill.computed, []
        return computed or []

    def never_fits(self, request: Request) -> str | None:
        """Return the reason why there can never be enough pages for `request`; None if there can."""
        cache = self.cache
        num_tokens = request.num_prompt_tokens + request.max_tokens - 1 or 1  # 0 for one token that is only computed
        num_reserved = self.own_pages.reserve.num_pages
        num_most = (self._num_most if self._is_alone else self.pages.num_most) - num_reserved
        num_blocks = cache.needs.alone(num_tokens, self._page_size, num_most)
        if not num_blocks or request.own is not None:
            return None
        blocks = "blocks" if cache.counts() else "pages"
        room = cache.needs.room_words
        if self.pages.num_most != cache.pool.total:
            room = "beside what is guaranteed to other models there are"
        if num_reserved:
            room = f"beside the {blocks} that are reserved there are"
        asked = f"{request.num_prompt_tokens} prompt and {request.max_tokens} output tokens"
        return f"{cache.needs.words(num_blocks, self._page_size, asked)}; {room} {num_most}"

    def settle_given_up(self, request: Request) -> None:
        """Release, as of a request that finishes, what `request` no longer needs; `cancel` follows, between steps."""
        if self._settles_ends and not self._plans_ahead and request.state in RUNNING and request.own is None:
            wheel = self.wheel
            self._settle_end(request, wheel.num_computed(request) if wheel.has(request) else request.num_computed)

    def cancel(self, request: Request) -> None:
        """Remove a waiting or running request, between steps; its pages are free at once.

        The pages of a request with a load under way are free when the load has ended.
        """
        if request.state in RUNNING:
            self.running.leave(request)
            self.running.release(request, num_unnamed=self.running.num_unnamed(request))
            request.become(RequestState.CANCELLED)
        elif self.handoffs is not None and self.handoffs.has_pages_of(request):
            self.handoffs.give_up(request)
            request.become(RequestState.CANCELLED)
        elif request.state in LOADING:
            assert self.loads is not None
            self.loads.cancel(request)
        elif self.loads is not None and request in self.loads.following():
            self.loads.cancel(request)
            self._end_below(request)
            return
        else:
            if request.own is None:
                self.waiting.remove(request)
            else:
                self.waiting_with_pages.remove(request)
            request.become(RequestState.CANCELLED)
        self._end_below(request)
        self.blocked = NOT_BLOCKED

    def give_up(self, request: Request) -> None:
        """Drop `request`, which is given up while a step runs, when the next step is planned: that plan knows it."""
        assert self._plans_ahead, "else nothing is planned, and `cancel` drops it"
        self._given_up.append(request)

    def take_back(self, request: Request) -> None:
        """Do not drop `request` when the next step is planned: it leaves before."""
        self._given_up.remove(request)

    def most_pages_needed(self) -> int:
        """Return the most pages that any of the requests here, or coming, may need, of those that take pages."""
        requests = [*self.waiting, *self.running, *self.coming]
        if self.loads is not None:
            requests += [*self.loads.requests(), *self.loads.following()]
        return max((self._most_pages(request) for request in requests if request.own is None), default=0)

    def _most_pages(self, request: Request) -> int:
        """Return how many pages a request holds when it has generated all but its last token."""
        num_tokens = max(1, request.num_prompt_tokens + request.max_tokens - 1)
        return self.cache.needs.alone(num_tokens, self._page_size)

    @property
    def has_work(self) -> bool:
        """Whether a request runs or waits."""
        return self.running.num_running > 0 or self._has_others

    @property
    def _has_others(self) -> bool:
        """Whether a request waits or loads, or is in the hands of another engine."""
        if self.waiting.num_waiting or self.waiting_with_pages:
            return True
        if self.handoffs is not None and self.handoffs.has_any:
            return True
        return self.loads is not None and self.loads.num_waiting > 0

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait for admission or for a load."""
        num_loading = 0 if self.loads is None else self.loads.num_waiting
        return self.waiting.num_waiting + len(self.waiting_with_pages) + num_loading

    @property
    def num_seated(self) -> int:
        """The number of requests that take a place: running ones, and those whose load is under way or has ended.

        Without places for loads, only running ones.
        """
        loads = self.loads
        return self.running.num_running + (0 if loads is None or not loads.takes_places else loads.num_requests)

    def side_counts(self) -> tuple[int, ...]:
        """Return the used and cached counts of each tier below the device, then of each KV group, in pairs."""
        counts = self.cache.counts()
        return counts if self.tiers is None else self.tiers.num_pages() + counts

    def side_counts_at_mark(self) -> tuple[int, ...]:
        """Return the same at the mark of the last scheduled step."""
        return self.mark.parts if self.tiers is None else self.tiers.num_pages() + self.mark.parts

    def num_evicted_parts(self) -> tuple[int, ...]:
        """Return the number of evicted parts of each KV group."""
        return self.cache.num_evicted_parts()

    def most_tokens(self, limit: int) -> int:
        """Return the longest sequence, of up to `limit` tokens, that can run in this memory; 0 if none can."""
        return self.cache.needs.most_tokens(limit, self._page_size)

    def num_pages_of_chunked(self) -> int:
        """Return the most blocks that the rest of the chunked requests takes at one time."""
        num_blocks = 0
        for request in self.running.chunked:
            if request.holding is not None:
                num_known = request.num_prompt_tokens + request.num_output_tokens
                num_blocks += self.cache.needs.to_finish(request.holding, num_known)
        return num_blocks

    def num_pages_to_admit(self) -> int:
        """Return how many blocks all waiting requests need, hits included; 0 while none could be admitted.

        While the maximum number of requests runs, or admission is suspended, no number of free pages would help.
        """
        if self.pages.is_draining:
            return 0
        if self.num_seated >= self._max_num_seqs:
            return 0
        return self.waiting.num_waiting_blocks

    # One step ---------------------------------------------------------------------------------------------

    def schedule(self, now_ns: int) -> StepPlan:
        """Plan the step that starts at `now_ns` and take its pages. `commit` must follow."""
        planned, rows, loads, step = self.schedule_batch(now_ns), self._batch, self.loads, self.wheel.step
        admitted, preempted = self.admitted, self.preempted
        if rows is None:
            return StepPlan(step, planned, admitted, preempted, num_joined=self.num_joined)
        drafts_first = self._drafts_first
        needing_page = () if drafts_first is not None else self.wheel.needing_page()
        decodes = rows.decodes(step, needing_page, self._with_new_table) if self.wheel.num_decoding else None
        drafts: DraftRows | None = None
        if decodes is not None and self.drafts is not None:
            if drafts_first is not None:
                drafts, decodes = drafts_first.planned(decodes)
            else:
                drafts, decodes = self.drafts.take(decodes, planned, self.pages.token_budget)
            if drafts is not None:
                self.cache.look(self.mark)
                planned = planned.replaced(num_drafted=len(drafts.rows))
        transfers = () if loads is None else loads.tiers.take_planned()
        copies = self.own_pages.take_copies()
        left = rows.take_left()
        snapshots = rows.take_snapshots()
        return StepPlan(step, planned, admitted, preempted, decodes, left, transfers, copies, drafts, snapshots)

    def schedule_batch(self, now_ns: int) -> Batch:
        """Do what `schedule` does, for an executor that needs to know only the work of the step, and return that."""
        wheel, preemptor, running, mark = self.wheel, self.preemptor, self.running, self.mark
        preemptions: list[Preemption] = []
        preemptor.preemptions = preemptions
        if gave_way := preemptor.gave_way:
            preemptor.gave_way = []
        mark.used = -1  # the next look sets the mark
        self.num_pages_wanted = self._least_wanted = 0
        if self._begins:
            self._begin(now_ns)
        goes_on = True
        if self._has_turns:
            goes_on = self._take_turns(now_ns)
        elif num_due := wheel.pages_due():
            goes_on = preemptor.take_due(num_due, now_ns)
        budget = (self._token_budget if self._is_alone else self.pages.token_budget) - wheel.num_decoding
        if self._batch is not None:
            self._with_new_table = self.own_pages.turn(wheel)
            if self._drafts_first is not None:
                budget -= self._drafts_first.num_planned()
        chunks: list[Chunk] = []
        if running.chunked and budget > 0 and goes_on:
            # A part of a budget may be just enough for the decodes.
            budget = self._prefill.resume(budget, now_ns, chunks)
        elif running.num_sharing:
            if running.most_late and not running.chunked:
                running.publish_later()
            else:
                self._prefill.publish_filled(1)
        if running.stalled and not running.chunked:
            budget -= self._resume_stalled(budget, now_ns)
        admitted: tuple[int, ...] = ()
        if self.waiting_with_pages:
            admitted, budget = self._admit_with_pages(now_ns, budget, chunks)
        if self._aligned is not None:
            self._note_states(self._aligned)
        loads = self.loads
        if preemptions:
            self.blocked = NOT_BLOCKED
        elif (self.waiting.num_waiting and (self._is_alone or not self.pages.is_draining)) or (
            loads is not None and (loads.loaded or loads.fronts or loads.early)
        ):
            admitted += self._admit(now_ns, budget, chunks)
        if loads is not None:
            loads.tiers.plan_stores(now_ns)  # pages that the step leaves idle
        self.cache.look(mark)
        num_decodes, known_tokens, num_joined = wheel.num_decoding, 0, 0
        if num_decodes:
            known_tokens = wheel.known_tokens
        if turned := self._prefill.turned:
            num_decodes += len(turned)
            known_tokens += sum(turned)
            self._prefill.turned = []
        if self._plans_ahead:
            self.num_leaving = 0
            self._drop_given_up(now_ns)
            if running.taken_off:
                running.publish_read()
            self._release_ended()
            running.in_flight, self._prefill.computing = self._prefill.computing, {}
        if self.handoffs is not None:
            num_joined, tokens_joined = self.handoffs.take_joined()
            num_decodes += num_joined
            known_tokens += tokens_joined
            num_joined += len(self.handoffs.resumed)
        self.admitted, self.num_joined = admitted, num_joined
        self.preempted = (*gave_way, *preemptions) if gave_way or preemptions else ()
        return Batch(tuple(chunks), num_decodes, known_tokens, self._pool_tokens)

    def _begin(self, now_ns: int) -> None:
        """Begin the plan of a step: what orders, releases, loads, or the lengths of chunks require before its turns."""
        loads = self.loads
        if self._defers:
            self.cache.states.begin_step()
        if self.to_settle is not None:
            self.settle()
        if self._keeps_time:
            self.cache.set_time(now_ns)
        if loads is not None:
            loads.take_ended()
            loads.tiers.begin_step(now_ns)
        if self._long_prefill:
            is_alone = self.running.num_running + self.num_waiting == 1
            self._prefill.most_tokens = MOST_COUNT if is_alone else self._long_prefill
        if self._takes_turns:
            if self._prefill.in_turn:
                self._prefill.let_in_turn([])
            if self.running.chunked:
                self._order_turns(now_ns)

    def _take_turns(self, now_ns: int) -> bool:
        """Take pages for decodes in the order of drafts or postponed releases; return whether the plan goes on."""
        preemptor = self.preemptor
        if self._drafts_first is not None:
            return self._drafts_first.take_turns(self.running, preemptor, self._pool_tokens, now_ns)
        if unsettled := self._unsettled:
            self._unsettled = []
            return preemptor.take_turns(unsettled, now_ns)
        num_due = self.wheel.pages_due()
        return not num_due or preemptor.take_due(num_due, now_ns)

    def _note_states(self, aligned: AlignedChunks) -> None:
        """Note the states of requests that started to decode after the last step."""
        wheel = self.wheel
        for request in self._joined:
            if wheel.has(request):
                start = wheel.num_computed(request)
                aligned.note_state(self.cache, request, start, start, self.running.num_in_flight(request))

    def commit(self, end_ns: int, result: StepResult | None = None) -> list[Request]:
        """End the scheduled step at `end_ns`; return the requests that finished, in admission order."""
        stopped = NONE
        if self._batch is not None:
            assert result is not None
            stopped = self._read(self._batch, result)
        finished = self._end_decodes(1, end_ns, stopped)
        completing = self._prefill.completing
        in_turn = self._takes_turns and bool(completing)
        if finished and not in_turn:
            self._finish_all(finished, end_ns)
        if result is not None and result.transfer_reports and self.tiers is not None:
            self.tiers.report(result.transfer_reports, end_ns)
            self.blocked = NOT_BLOCKED
        if self.own_pages.computed:
            self.own_pages.settle()
        if completing:
            completed = self._prefill.complete(end_ns, stopped)
            if in_turn:
                finished = completed = sorted([*finished, *completed], key=lambda request: request.admission)
            else:
                finished += completed
            if completed:
                self._finish_all(completed, end_ns)
        if self._ends_more:
            self._end_more(completing, end_ns)
        return finished

    def _read(self, batch: InputBatch, result: StepResult) -> frozenset[Request]:
        """Take over the tokens of the step; return the requests that end with theirs."""
        batch.keep(self.wheel.step, result)
        stopped = NONE
        if result.stopped_rows:
            rows = batch.requests
            stopped = frozenset(request for row in result.stopped_rows if (request := rows[row]) is not None)
        for attended in result.attended:
            request = batch.requests[attended.row]
            assert request is not None and request.own is not None, "only pages of its own are scored"
            request.own.observe(attended.start, attended.end, attended.scores)
        if self.drafts is not None:
            self.drafts.judge(result)
        return stopped

    def _end_more(self, completing: list[Request], end_ns: int) -> None:
        """End a step where the next one is planned already, or with handoffs, or with what windows release.

        `completing`: requests that computed the last of their known tokens in it.
        """
        if self._plans_ahead and (self.running.ended or self.has_released):
            self._end_ahead(end_ns)
        if self.handoffs is not None and (self.handoffs.late or self.handoffs.resumed):
            self.handoffs.stall(end_ns)
        if self._settles:
            self.to_settle = completing
            if not self._settles_late or (self.handoffs is not None and self.handoffs.has_any_between_steps):
                self.settle()

    # Many steps -------------------------------------------------------------------------------------------

    def horizon(self, now_ns: int) -> int:
        """Return the number of identical steps that are certain from `now_ns` on.

        In these every decode gets a token, and nothing else happens. 0 if the next step has to be scheduled. Certain as
        long as no added request becomes the head of the waiting queue, and until the time that the queue's
        `holds_until_ns` returns.
        """
        if self.to_settle is not None:
            self.settle()
        running = self.running
        if running.chunked or self.waiting_with_pages or running.stalled or self._unsettled:
            return 0
        if self._plans_ahead and (running.ended or self._given_up):
            return 0
        if self.loads is not None and (self.loads.fronts or self.loads.has_ended):
            return 0
        return self._horizon.num_steps(now_ns, self.blocked, self.blocked_head, self._least_wanted)

    def advance(self, num_steps: int, *, starts_ns: Sequence[int] = ()) -> Leap:
        """Do `num_steps` of the steps that `horizon` promised, or fewer if memory ends the leap earlier.

        `commit_leap` must follow. `starts_ns`: when the steps start, for a cache that follows decodes and a reader of
        events of pages.
        """
        cache = self.cache
        if cache.decodes is not None:
            is_lacking = self.waiting.num_waiting and self.blocked is FOR_PAGES
            num_wanted = self._least_wanted - self.pages.num_lent() if is_lacking else 0
            return cache.decodes.leap(num_steps, num_wanted, self.wheel.step, starts_ns)
        due = self.wheel.pages_due_in(num_steps)
        if due.total:
            assert not cache.pool.has_ids, "page ids are handed out one step at a time"
            cache.take_pages(due.total)
        self.publish_taken(num_steps)
        return Leap(due)

    def publish_taken(self, num_steps: int) -> None:
        """Do the rest of `advance` once the pages are taken; several models take theirs in the order of their turns."""
        if self.running.num_sharing:
            self._prefill.publish_filled(num_steps)

    def commit_leap(self, num_steps: int, end_ns: int) -> list[Request]:
        """End the last of `num_steps` advanced steps at `end_ns`; return the requests that finished."""
        finished = self.commit_many(num_steps, end_ns)
        if self._settles:
            self.to_settle = []
            if not self._settles_late or (self.handoffs is not None and self.handoffs.has_any_between_steps):
                self.settle()
        return finished

    def commit_many(self, num_steps: int, end_ns: int) -> list[Request]:
        """End the last of the advanced steps at `end_ns`; return the requests that finished, in admission order."""
        finished = self._end_decodes(num_steps, end_ns, NONE)
        if finished:
            self._finish_all(finished, end_ns)
        if self.running.ended:
            self._end_ahead(end_ns)
        return finished

    def _end_decodes(self, num_steps: int, end_ns: int, stopped: frozenset[Request]) -> list[Request]:
        """End the last of the advanced steps for decodes; return those that finished, in admission order.

        `stopped`: requests that end with the token of this step, whether it is their last or not.
        """
        self.preemptor.last_end_ns = end_ns
        if self._keeps_time:
            self.cache.set_time(end_ns)
        if self.running.num_late and (stopped or self.wheel.steps_to_finish() <= num_steps):
            self.running.publish_late()
        finished = self.wheel.turn(num_steps)
        if self.loads is not None:
            self.loads.confirm()
        if stopped:
            finished = self._with_stopped(finished, stopped)
        if finished and self.running.num_sharing:
            running = self.running
            for request in finished:
                if running.shares(request):
                    running.num_sharing -= 1
        return finished

    def _finish_all(self, ended: list[Request], end_ns: int) -> None:
        """Finish requests that have generated their last token, or hand them over. There is at least one."""
        for request in ended:
            if request.is_handed_over and self.handoffs is not None:
                self.handoffs.hold(request, end_ns)
            else:
                self._finish(request, end_ns)
        self.blocked = NOT_BLOCKED

    # Inside: admissions --------------------------------------------------------------------------------------

    def _admit_with_pages(self, now_ns: int, budget: int, chunks: list[Chunk]) -> tuple[tuple[int, ...], int]:
        """Admit requests that bring their pages, in order of arrival; return them and the rest of the budget.

        They do not wait behind requests that wait for memory.
        """
        admitted: list[int] = []
        waiting = self.waiting_with_pages
        while waiting and budget > 0 and self.num_seated < self._max_num_seqs:
            request = waiting[0]
            if not self._prefill.has_room(request, request.start, chunks):
                return tuple(admitted), 0
            waiting.popleft()
            if self._tell is not None:
                self._tell(Admitted(request.index, request.content, 0))
            budget -= self._prefill.start(request, request.start, budget, now_ns, chunks)
            admitted.append(request.index)
        return tuple(admitted), budget

    def _admit(self, now_ns: int, budget: int, chunks: list[Chunk]) -> tuple[int, ...]:
        """Admit loaded requests, then the head of the waiting queue while `max_num_seqs`, budget and pages allow."""
        if budget <= 0 and self._needs_budget:  # what the loop would find
            request = self.blocked_head = self.waiting.head(now_ns)
            self.blocked = FOR_BUDGET if self.running.num_running < self._max_num_seqs else FOR_SEQS
            if self._tell is not None:
                self._tell_blocked(self._tell, request)
            return ()
        waiting, running, loads, handoffs, tell = self.waiting, self.running, self.loads, self.handoffs, self._tell
        cache, pages, page_size, max_num_seqs = self.cache, self.pages, self._page_size, self._max_num_seqs
        admits_rest = self._admits_rest
        loads_take_places = False
        admitted: list[int] = []
        self.blocked = NOT_BLOCKED
        drafts, num_padded, watermark = self._drafts_first, 0, 0
        has_prefills = has_running = False
        if drafts is not None:
            has_prefills, has_running = bool(chunks), bool(chunks or self.wheel.num_decoding)
        if loads is not None:
            loads_take_places = loads.takes_places
            if loads.fronts:
                for load in loads.fronts.copy():
                    if budget > 0:
                        budget -= self._prefill.compute_front(load, budget, chunks)
            head = waiting.head(now_ns) if waiting.num_waiting and not loads.takes_places else None
            if head is None or head is not loads.retried:
                budget = self._admit_loaded(loads, now_ns, budget, chunks, admitted)
        if not self._is_alone and pages.is_draining:
            return tuple(admitted)  # loaded requests have their pages and their places already
        prefill = self._prefill
        while waiting.num_waiting and self.blocked is NOT_BLOCKED:
            request = waiting.head(now_ns)
            if (self.num_seated if loads_take_places else running.num_running) >= max_num_seqs:
                self.blocked = FOR_SEQS
                break
            if handoffs is not None:
                if request.state is LOADED and (budget > 0 or not handoffs.join_tokens):
                    is_last = budget <= 0
                    budget -= self._join(request, now_ns, admitted)
                    if not is_last:
                        continue
                    handoffs.late.append(request)
                    break  # as in Dynamo's mocker: one that needs no tokens still ends a step without any left
                if handoffs.is_gated and request.state is not LOADED:
                    self.blocked = FOR_HANDOFFS
                    break
            if budget <= 0:
                self.blocked = FOR_BUDGET
                break
            if running.num_late:
                running.publish_late()
            if self._num_published >= 0 and self._still_lacks(request, budget):
                self.blocked = FOR_PAGES
                break
            num_known = request.num_prompt_tokens + request.num_output_tokens
            # The last token is always computed: its logits are needed.
            limit = (num_known - 1) // page_size if self._finds_prefixes else 0
            match = cache.match(request.content, limit)
            hit_tokens = match.num_pages * page_size
            num_new = prefill.most_tokens
            if budget < num_new:
                num_new = budget
            num_most = num_new
            if admits_rest:
                watermark = self._watermark if running.num_running else 0
                if self._defers and match.num_pages and cache.states.is_of_step(match):
                    self.blocked = FOR_BUDGET  # the next step may begin after it
                    break
                if request.content.swapped_tokens:
                    hit_tokens = _hit_tokens(request, match.num_pages)
                    num_new += hit_tokens - match.num_pages * page_size
                num_most = num_new
                if self._aligned is not None:
                    num_new = min(num_new, num_known - hit_tokens)
                    num_new = self._aligned.num_tokens(request, hit_tokens, num_new, cache.states.branch_of(match))
                    if not num_new and (loads is None or not loads.begins_anywhere):
                        self.blocked = FOR_BUDGET
                        break
            num_wanted = cache.needs.to_admit(match, num_known, num_new, watermark)
            if drafts is not None:
                # As in vLLM, a request with one token to compute takes the room of a whole draft, unless prompts are
                # computed in this step.
                is_padded = num_known - hit_tokens == 1 and not has_prefills and (has_running or hit_tokens > 0)
                num_padded = drafts.num_slots if is_padded else 0
                if 1 + num_padded > budget:
                    self.blocked = FOR_BUDGET
                    break
                num_with_draft = cache.needs.to_admit(match, num_known + num_padded, num_new, watermark)
                if num_with_draft > cache.num_free and not running.num_running:
                    num_padded = 0  # nothing that runs will release memory, so it would wait for ever
                else:
                    num_wanted = max(num_wanted, num_with_draft)
            num_short = num_wanted - (cache.num_free if self._is_alone else pages.num_free_to_admit(num_wanted))
            if num_short > 0:
                num_matched = 0 if self.tiers is None else cache.needs.lent_of(match)
                if pages.reclaim(num_short, num_matched):
                    continue  # it may now have to take pages that it shared with stores
                if self.pins is not None and self.pins.num_pins and self.pins.give_up_oldest():
                    continue  # it may now have to take pages that it shared with the pin
                if not pages.make_way(request, num_wanted, to_admit=True):
                    least = cache.needs.least_to_admit(match, num_known, num_new) + watermark + num_matched
                    if loads is not None:
                        # Where groups keep less than all tokens, loading takes fewer blocks than computing.
                        num_to_load = watermark + loads.num_to_load(request, match, num_known, num_most)
                        num_behind = waiting.num_waiting - 1
                        if num_to_load > pages.num_free_to_admit(num_to_load):
                            least = min(least, num_to_load)
                        elif loads.try_start(request, match, num_known, num_behind, now_ns, watermark, num_most):
                            self._take_from_waiting(request)
                            if not loads.takes_places or loads.is_sync:
                                budget = self._go_on_after(loads, request, now_ns, budget, chunks, admitted)
                            continue
                    self.blocked = FOR_PAGES
                    self.num_pages_wanted, self._least_wanted = num_wanted, least
                    self._lacking = request, num_wanted, self._least_wanted, budget, match.num_pages
                    self._num_published = cache.num_published if self._is_alone and loads is None else -1
                    cache.needs.watch()
                    break
            if admits_rest and not prefill.has_room(request, hit_tokens, chunks):
                self.blocked = FOR_BUDGET
                break
            if loads is not None:
                num_behind = waiting.num_waiting - 1
                if loads.try_start(request, match, num_known, num_behind, now_ns, watermark, num_most):
                    self._take_from_waiting(request)
                    if request.state is RequestState.LOADING and loads.takes_places:
                        running.start_loading(request)
                    budget = self._go_on_after(loads, request, now_ns, budget, chunks, admitted)
                    continue
                if loads.num_short:
                    if self.pins is not None and self.pins.num_pins and self.pins.give_up_oldest():
                        continue  # what prefills under way will take must stay free beside a load
                    self.blocked = FOR_PAGES
                    self.num_pages_wanted = self._least_wanted = cache.num_free + loads.num_short
                    if loads.tiers.has_work:
                        self._least_wanted = num_wanted  # with less, a step takes back what stores hold
                    break
                if not num_new or loads.is_short_of_tokens:
                    self.blocked = FOR_BUDGET
                    break
            waiting.remove(request)
            self._num_published = -1
            if tell is not None:
                self._told_blocked = None
                reach = cache.reach(request.content, limit)
                tell(Admitted(request.index, request.content, match.num_pages, reach=reach))
            request.holding = cache.open(match)
            if num_padded:
                cache.take_for(request.holding, num_known + num_padded)
                budget -= num_padded
            if admits_rest and request.content.swapped_tokens:
                assert loads is not None, "only what has tiers below keeps states"
                loads.tiers.resumed(request.content)
            budget -= prefill.start(request, hit_tokens, budget, now_ns, chunks)
            admitted.append(request.index)
            if loads is not None and request is loads.retried:
                loads.retried = None
                budget = self._admit_loaded(loads, now_ns, budget, chunks, admitted)
        if handoffs is not None and handoffs.passes_blocked and self.blocked is FOR_PAGES:
            # These have their pages; a request that lacks some gets them sooner if these run.
            for ready in handoffs.ready():
                if self.num_seated >= max_num_seqs or budget <= 0:
                    break
                budget -= self._join(ready, now_ns, admitted)
            if self.num_seated >= max_num_seqs:
                self.blocked = FOR_SEQS  # as the next step would find
        if loads is not None and loads.retried is not None and self.blocked is FOR_PAGES and loads.is_stuck:
            # Those behind it have the memory that it waits for; vLLM's scheduler would plan nothing any more.
            num_loaded = len(loads.loaded)
            budget = self._admit_loaded(loads, now_ns, budget, chunks, admitted)
            if not admitted and len(loads.loaded) < num_loaded:
                return self._admit(now_ns, budget, chunks)  # one of them has lost its memory
        if self.blocked is not NOT_BLOCKED and not (loads is not None and loads.is_blocking):
            self.blocked_head = request
            if tell is not None:
                self._tell_blocked(tell, request)
        return tuple(admitted)

    def _admit_loaded(self, loads: Loads, now_ns: int, budget: int, chunks: list[Chunk], admitted: list[int]) -> int:
        """Admit requests whose loads have ended, or can be used; return the rest of the budget.

        Without places for loads, one that lacks a place or memory is `blocked`, and those behind it are. One whose load
        brought nothing waits again, as the head, before others whose loads have ended.
        """
        has_places, loads.is_blocking = loads.takes_places, False
        while budget > 0 and (loads.loaded or (loads.early and self._prefill.may_wait)):
            request = loads.loaded[0][0] if loads.loaded else loads.early[0].request
            most_tokens = budget
            if not has_places:
                if self.num_seated >= self._max_num_seqs:
                    self.blocked, loads.is_blocking = FOR_SEQS, True
                    break
                if not loads.begin_turn(*loads.loaded[0]):
                    break
                num_new = self._aligned_after(request, loads.loaded[0][1], min(budget, self._prefill.most_tokens))
                if not num_new:
                    self.blocked, loads.is_blocking = FOR_BUDGET, True
                    break
                most_tokens = self._most_to_run(request, loads, num_new)
                if 0 < most_tokens < num_new:
                    most_tokens = self._aligned_after(request, loads.loaded[0][1], most_tokens)
                if not most_tokens:
                    if loads.is_stuck and loads.give_up_last():
                        continue
                    self.blocked, loads.is_blocking = FOR_PAGES, True
                    break
            if not self._prefill.has_room(request, request.num_prompt_tokens - 1, chunks):
                return 0
            request, loaded = loads.loaded.pop(0) if loads.loaded else loads.start_early()
            budget -= self._start_loaded(loads, request, loaded, now_ns, most_tokens, chunks, admitted)
        return budget

    def _go_on_after(
        self, loads: Loads, request: Request, now_ns: int, budget: int, chunks: list[Chunk], admitted: list[int]
    ) -> int:
        """Compute what `request`, whose load has begun, computes in this step; return the rest of the budget."""
        if loads.fronts and loads.fronts[-1].request is request:
            budget -= self._prefill.compute_front(loads.fronts[-1], budget, chunks)
        elif loads.is_sync and request.state is RequestState.LOADING:
            budget -= self._start_loaded(loads, *loads.start_early(), now_ns, budget, chunks, admitted)
        if request is loads.retried:
            loads.retried = None
            budget = self._admit_loaded(loads, now_ns, budget, chunks, admitted)
        return budget

    def _aligned_after(self, request: Request, loaded: Loaded, num_tokens: int) -> int:
        """Return how many of `num_tokens` tokens after its load the next chunk of `request` computes."""
        if self._aligned is None:
            return num_tokens
        assert request.holding is not None
        start = loaded.num_pages * self._page_size
        branch = self.cache.states.branch(request.holding)
        return self._aligned.num_tokens(request, start, min(num_tokens, request.num_known - start), branch)

    def _most_to_run(self, request: Request, loads: Loads, num_tokens: int) -> int:
        """Return how many tokens of `request`, which has had its load, may be computed: `num_tokens`, or 0 if they lack
        memory.

        If nothing runs or is loaded, nothing will release memory, since other requests that have had their loads hold
        the rest. Then it computes as many tokens as have room.
        """
        watermark = self._watermark if self.running.num_running else 0
        num_wanted = loads.num_to_run(request, num_tokens) + watermark
        while (num_short := num_wanted - self.pages.num_free_to_admit(num_wanted)) > 0:
            if self.pages.reclaim(num_short):
                continue
            if self.pins is not None and self.pins.num_pins and self.pins.give_up_oldest():
                continue
            if not self.pages.make_way(request, num_wanted, to_admit=True):
                break
        else:
            return num_tokens
        if not loads.is_stuck:
            return 0
        return bisect_right(range(1, num_tokens), self.cache.num_free, key=partial(loads.num_to_run, request))

    def _start_loaded(
        self,
        loads: Loads,
        request: Request,
        loaded: Loaded,
        now_ns: int,
        budget: int,
        chunks: list[Chunk],
        admitted: list[int],
    ) -> int:
        """Let `request` run, with its loaded pages; return the tokens that it computes of `budget`."""
        self._num_published = -1
        hit_tokens = loads.resume(request, loaded)
        if request.content.swapped_tokens:
            hit_tokens = _hit_tokens(request, loaded.num_pages)
        if self._tell is not None:
            self._tell(Admitted(request.index, request.content, loaded.num_pages, loads.by_name(loaded)))
        loads.begin_run(request)
        if request.content.swapped_tokens:
            loads.tiers.resumed(request.content)
        admitted.append(request.index)
        return self._prefill.start(request, hit_tokens, budget, now_ns, chunks)

    def _take_from_waiting(self, request: Request) -> None:
        """Remove `request` from the waiting queue, because it begins to run or to load."""
        self.waiting.remove(request)
        self._num_published = -1
        self._told_blocked = None

    def _join(self, request: Request, now_ns: int, admitted: list[int]) -> int:
        """Let `request` run, after another engine has computed its prompt; return the tokens that count as budget."""
        handoffs = self.handoffs
        assert handoffs is not None
        self._take_from_waiting(request)
        handoffs.join(request, now_ns)
        self._prefill.completing.append(request)
        admitted.append(request.index)
        return handoffs.join_tokens

    def _order_turns(self, now_ns: int) -> None:
        """Let decodes that were admitted after a chunked request take their turns after it, if that can matter.

        It matters if memory may be short, if parts are released at a turn, or if a page may be evicted that a request
        fills again in this step: it is lost only if its last copy goes first. Otherwise decodes come first.
        """
        running, cache = self.running, self.cache
        first = running.chunked[0]
        if not cache.releases:
            most_tokens = self._prefill.most_tokens
            num_pages = self.wheel.pages_due()
            for request in running.chunked:
                num_left = request.num_prompt_tokens + request.num_output_tokens - request.num_computed
                num_pages += min(num_left, most_tokens) // self._page_size + 2
            num_blocks = num_pages * cache.page_blocks
            if num_blocks <= cache.num_free and (cache.has_empty(num_blocks) or not running.may_repeat()):
                return
        if running.has_decodes_after(first.admission):
            in_turn = running.stall_after(first.admission, now_ns)
            if self._tell is not None:
                self._tell(DecodesStalled(first.index))
            if self._batch is None:  # an executor of tokens computes them as chunks
                self._prefill.let_in_turn(in_turn)

    def _resume_stalled(self, budget: int, now_ns: int) -> int:
        """Return stalled decodes to the wheel; return the number of tokens that they compute of `budget`."""
        assert self.handoffs is not None
        running = self.running
        num_resumed = 0
        while running.stalled and num_resumed < budget:
            request = running.stalled[0]
            if request.num_computed % self._page_size == 0:
                blocks = self.cache.page_blocks
                if blocks > self.cache.num_free and not self.preemptor.make_room(request, blocks, now_ns, {}):
                    continue
                self.cache.take_page(holding_of(request), request.num_computed // self._page_size)
            del running.stalled[0]
            self.wheel.join(request)
            self.handoffs.resumed.append(request)
            num_resumed += 1
        return num_resumed

    def _still_lacks(self, head: Request, budget: int) -> bool:
        """Return whether `head` was found to lack memory and certainly still does.

        Its need cannot shrink as long as no page becomes findable that it could use, its budget is not smaller, and no
        other holder references pages that it hits, as an admitted request, a store to a tier below or a reservation
        would. Other models may have freed memory for it since.
        """
        assert self._lacking is not None
        request, num_wanted, least_wanted, least_budget, num_found = self._lacking
        if self._num_published != self.cache.num_published and self.cache.needs.may_shrink(num_found):
            return False
        if self.handoffs is not None and self.handoffs.reserved:
            return False
        if request is not head or least_wanted <= self.cache.num_free or budget < least_budget:
            return False
        if self.pins is not None and self.pins.num_pins:
            return False
        if self._watermark and not self.running.num_running:
            return False  # the memory that it was to leave free is for others
        self.num_pages_wanted, self._least_wanted = num_wanted, least_wanted
        return True

    def _tell_blocked(self, tell: Tell, head: Request) -> None:
        """Emit that `head` is not admitted, and why, unless the same was emitted last."""
        if self._told_blocked != (head.index, self.blocked):
            self._told_blocked = head.index, self.blocked
            num_pages_short = max(0, self.num_pages_wanted - self.cache.num_free)
            tell(HeadBlocked(head.index, self.blocked, num_pages_short))

    # Inside: parts that windows and chunks release -------------------------------------------------------------

    def settle(self) -> None:
        """Begin the next step, if that is not done: let decodes release the parts that no later token attends to.

        All are in the order of admission. Requests that ended, or were given up since, have released everything before.
        As in vLLM, a request can use memory that another releases only if its turn in the next step is later. That
        makes a difference only if the pages that decodes begin in that step are not free yet; then each decode releases
        at its turn. Chunked requests always do.
        """
        completed, self.to_settle = self.to_settle, None
        if completed is None:
            return
        cache, wheel = self.cache, self.wheel
        joined = completed
        if completed:
            joined = [request for request in completed if request.state is DECODING or wheel.has(request)]
        if not cache.releases:
            if cache.decodes is not None:
                cache.decodes.end_step()
                for request in joined:
                    cache.decodes.start(holding_of(request), request.admission)
            return
        if not self._is_alone:
            cache.count()  # others may have taken free pages
        takes_turns = False
        if self._takes_turns:
            others = self.running.chunked + joined
            takes_turns = any(self.running.has_decodes_after(request.admission) for request in others)
        num_due = wheel.pages_due() * cache.page_blocks
        if takes_turns or (num_due > cache.num_free and num_due > cache.num_free + self.pages.num_lent()):
            self._unsettled = self._settling(joined)
        if cache.decodes is not None:
            if self._unsettled:
                cache.decodes.put_off([holding_of(request) for request in self._unsettled if request not in joined])
            else:
                cache.decodes.end_step()
            for request in joined:
                if not self._unsettled:
                    cache.settle(holding_of(request), request.num_computed)
                cache.decodes.start(holding_of(request), request.admission, is_settled=not self._unsettled)
        elif not self._unsettled:
            for request in self._settling(joined):
                num_in_flight = self.running.num_in_flight(request)
                cache.settle(holding_of(request), wheel.num_computed(request), num_in_flight)
        if self.running.lag:
            self._joined = joined
        cache.count()

    def _settling(self, joined: list[Request]) -> list[Request]:
        """Return the decodes that may release something now; those in `joined` come last."""
        wheel, places = self.wheel, self._settle_places
        settling: list[Request] = []
        lag = self.running.lag
        for place in places:
            last = (place + lag) % self._page_size
            if wheel.num_computing_at(last):
                settling += wheel.computing_at(last)
        if lag:
            # In the step before, these released only what none of the tokens of their chunk attended to.
            settling += [each for each in self._joined if wheel.has(each) and each not in settling]
        if self.drafts is not None:
            settling += self.drafts.take_ahead()  # they may have passed such a place
        if len(places) > 1 or self.drafts is not None or lag:
            settling.sort(key=lambda request: request.admission)
        if joined:
            # They are on the wheel already; those admitted before them are first.
            settling = [request for request in settling if request not in joined]
        return [request for request in (*settling, *joined) if request.own is None]

    # Inside: ends -----------------------------------------------------------------------------------------

    def _with_stopped(self, finished: list[Request], stopped: frozenset[Request]) -> list[Request]:
        """Return `finished` and the decodes that stopped before their last token, in admission order.

        These leave the wheel as if that token had been their last: a replay with the known numbers of tokens ends them
        in the same order.
        """
        earlier = [request for request in stopped if request.state is S.DECODING and request not in finished]
        for request in earlier:
            self.wheel.leave(request)
        return sorted([*finished, *earlier], key=lambda request: request.admission)

    def _finish(self, request: Request, end_ns: int) -> None:
        """Finish `request`, which is off the wheel and has generated its last token."""
        request.last_token_ns = end_ns
        assert FINISHED in NEXT_STATES[request.state]  # `become`, inlined: this runs for every request
        if self._plans_ahead and request.own is None:
            self.running.keep(request)
            request.state = FINISHED
            return
        if self._settles_ends and request.own is None:
            self._settle_end(request, request.num_computed)
        if self._tell is not None:
            self._tell(Finished(request.index, request.content))
        self.running.release(request)
        request.state = FINISHED
        if request.num_preemptions:
            self._end_below(request)

    def _settle_end(self, request: Request, num_computed: int) -> None:
        """Release the pages that the windows of `request`, which ends, have passed, before its others."""
        cache, holding = self.cache, holding_of(request)
        cache.stop_decoding(holding, max(holding.num_pages, -(-num_computed // self._page_size)))
        cache.settle(holding, num_computed)
        cache.count()

    def _end_ahead(self, end_ns: int) -> None:
        """End a step after which the next one is planned already: release what ended if that one plans nothing."""
        self.blocked = NOT_BLOCKED
        self.has_released = False
        running = self.running
        if running.num_running == len(running.ended) and not (self._has_others or self.wheel.num_decoding):
            self._drop_given_up(end_ns)
            self._release_ended()
            self.has_released = False

    def _release_ended(self) -> None:
        """Release the places and pages of requests that ended before the step that was just planned."""
        ended, self.running.ended = self.running.ended, []
        self.has_released = bool(ended)
        for request in ended:
            if self._tell is not None:
                self._tell(Finished(request.index, request.content))
            self._release_one(request)
            self._end_below(request)

    def _release_one(self, request: Request, *, is_read: bool = True) -> None:
        """Release the place and pages of a request that ended before the step that was just planned.

        `is_read`: its last token is known.
        """
        if request.holding is None:
            return  # it was preempted since
        has_turn = self.wheel.has(request)
        self.num_leaving += has_turn
        took_page = has_turn and request.num_computed % self._page_size == 0
        self.running.end_again(request)
        num_unnamed = 0 if has_turn or is_read else self.running.num_unnamed(request)
        self.running.release(request, int(took_page), num_unnamed)

    def _drop_given_up(self, now_ns: int) -> None:
        """Drop the requests that were given up before the step that was just planned; it computes their tokens.

        As in vLLM, their pages are free before those of requests that have ended.
        """
        given_up, self._given_up = self._given_up, []
        running, completing = self.running, self._prefill.completing
        for request in given_up:
            if self._tell is not None:
                self._tell(Cancelled(request.index, now_ns))
            if request.state is FINISHED:
                running.ended.remove(request)
                self._release_one(request, is_read=False)
                request.state = RequestState.CANCELLED
                self._end_below(request)
            elif request.state in RUNNING:
                self.num_leaving += 1
                took_page = False
                is_on_wheel = self.wheel.has(request)
                if request in completing:
                    completing.remove(request)
                else:
                    running.leave(request)
                    took_page = is_on_wheel and request.num_computed % self._page_size == 0
                # The pages that a decode filled before are findable from its turn on.
                num_unnamed = 0 if is_on_wheel else running.num_unnamed(request)
                running.release(request, int(took_page), num_unnamed)
                request.become(RequestState.CANCELLED)
                self._end_below(request)
            else:
                self.cancel(request)
        if given_up:
            self.blocked = NOT_BLOCKED

    def _end_below(self, request: Request) -> None:
        """Let the tiers drop the pages that only `request`, which has ended, could find."""
        if request.num_preemptions and self.tiers is not None:
            self.tiers.ended(request.content)

    # Laws -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert laws L1, L2 and L3, between steps, and that each request is in the queue that its state requires."""
        if self.to_settle is not None and self.cache.decodes is not None:
            if self.has_work:
                return  # the cache has not ended the last step
            self.settle()  # nothing decodes, so that releases nothing
        if not self.cache.is_check_due(at_rest=not self.has_work):
            return
        self.running.publish_late()
        for request in (*self.waiting, *self.waiting_with_pages):
            assert request.state in WAITING or request.state is LOADED, f"{request!r} waits"
        held = self.running.holdings()
        holds = []
        if self.loads is not None:
            held += self.loads.holdings()
            holds = self.loads.tiers.holds()
            self.loads.tiers.check(at_rest=not self.has_work)
        if self.handoffs is not None:
            held += self.handoffs.holdings()
        reserved = self.own_pages.reserve.holding()
        if reserved is not None:
            held.append((reserved, reserved.num_pages))
        if self.pins is not None:
            held += [(holding, holding.num_pages) for holding in self.pins.holdings()]
        if not held and not holds:
            assert self.cache.num_used == 0, f"L2: {self.cache.num_used} pages in use and no request runs"
        self.cache.check(held, holds)


def _hit_tokens(request: Request, num_pages: int) -> int:
    """Return the tokens that `request` need not compute after a match of `num_pages`.

    These are more than the pages have if its state was kept when it was preempted after them.
    """
    content = request.content
    swapped_tokens = content.swapped_tokens
    is_swapped = swapped_tokens // content.page_size == num_pages
    return swapped_tokens if swapped_tokens and is_swapped else num_pages * content.page_size

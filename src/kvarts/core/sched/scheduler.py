"""The scheduler of one engine: running requests first, then waiting ones, within a token budget.

There is no prefill mode and no decode mode: in every step, each running request computes some of the tokens that are
known and not yet computed. Requests with just one such token are on the decode wheel. Those that did not get all their
tokens are *chunked*: the one that took the last of the budget, so that none was admitted after it, and decodes that a
preemption left without their token. So the order of a step is: the wheel, the chunked requests, requests that have
their pages, then the head of the waiting queue, again and again, as long as every gate lets it pass.

What only some engines do is in parts (`core/parts`), which add gates and hooks: see kvarts.core.sched.step. A plain
engine has the gates of its memory, and no hooks.

The scheduler reads no clock and no random number: `schedule` and `commit` receive the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from kvarts.base.errors import ConfigError
from kvarts.core.config import EngineConfig
from kvarts.core.event_log import Emit
from kvarts.core.events import Admitted, Blocked, Finished, HeadBlocked
from kvarts.core.kv.cache import Cache, Leap, Pins
from kvarts.core.request import NEXT_STATES, Request, RequestState
from kvarts.core.sched.page_source import PageSource
from kvarts.core.sched.plan import Batch, DraftRows, StepPlan, StepResult
from kvarts.core.sched.policy import WaitingQueue
from kvarts.core.sched.running import Running
from kvarts.core.sched.state import SchedulerState
from kvarts.core.sched.step import AGAIN, PASS, TAKEN, Ask, Step

if TYPE_CHECKING:
    from kvarts.core.parts.ahead import PlansAhead
    from kvarts.core.parts.settling import Settling
    from kvarts.core.sched.drafts import Drafts, DraftTotals
    from kvarts.core.sched.handoffs import Handoffs
    from kvarts.core.sched.input_batch import InputBatch

__all__ = ["Scheduler"]

S = RequestState
# Enum members that every step or request reads have module-level names, because enum attributes are looked up each
# time.
NOT_BLOCKED: Final = Blocked.NOT
FOR_SEQS: Final = Blocked.SEQS
FOR_BUDGET: Final = Blocked.BUDGET
FOR_PAGES: Final = Blocked.PAGES
QUEUED: Final = S.WAITING
LOADED: Final = S.LOADED
FINISHED: Final = S.FINISHED
NONE: Final[frozenset[Request]] = frozenset()
WAITING = (S.WAITING, S.PREEMPTED)


class Scheduler(SchedulerState):
    """Owner of all mutable state of a Request, and of the step being planned.

    Parts set `handoffs`, `drafts`, `ahead` and `settling`, if the engine has them, and `loads`.
    """

    def __init__(
        self,
        config: EngineConfig,
        cache: Cache,
        pages: PageSource,
        waiting: WaitingQueue,
        running: Running,
        *,
        emit: Emit | None = None,
        pins: Pins | None = None,
        finds_prefixes: bool = True,
        num_kept: int = 0,
    ) -> None:
        super().__init__(
            config,
            cache,
            pages,
            waiting,
            running,
            emit=emit,
            pins=pins,
            finds_prefixes=finds_prefixes,
            num_kept=num_kept,
        )
        self.handoffs: Handoffs | None = None
        """Requests that two engines work on."""
        self.drafts: Drafts | None = None
        """Drafted tokens, for an executor that reports which drafts are right."""
        self.draft_totals: Callable[[], DraftTotals] | None = None
        """Returns the totals of drafts so far; None without drafts."""
        self.ahead: PlansAhead | None = None
        """What ended since the step under way was planned, if plans are made ahead."""
        self.settling: Settling | None = None
        """Releases of windows and chunks between steps."""
        self.step = Step(0)
        """The step that was planned last."""
        self.blocked_head: Request | None = None
        """The head that waits because of `blocked`."""
        self.num_pages_wanted = 0
        """The number of blocks that the blocked head needs, if it waits for pages."""
        self._least_wanted = 0
        """A lower bound of that number for as long as the head is blocked."""
        self.coming: set[Request] = set()
        """Requests that were accepted and are queued later."""
        self._pool_tokens = config.pool_tokens

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
        if self.config.profile == "mocker":
            request.priority = 0
        request.become(QUEUED)
        if request.own is not None:
            self.session_pages.waiting.append(request)
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
        computed, self.prefill.computed = self.prefill.computed, []
        return computed or []

    def settle_given_up(self, request: Request) -> None:
        """Release, as of a request that finishes, what `request` no longer needs; `cancel` follows, between steps."""
        for release in self.hooks.given_up:
            release(request)

    def give_up(self, request: Request) -> None:
        """Drop `request`, which is given up while a step runs, when the next step is planned: that plan knows it."""
        assert self.ahead is not None, "else nothing is planned, and `cancel` drops it"
        self.ahead.give_up(request)

    def take_back(self, request: Request) -> None:
        """Do not drop `request` when the next step is planned: it leaves before."""
        assert self.ahead is not None
        self.ahead.take_back(request)

    # What is here -----------------------------------------------------------------------------------------

    def never_fits(self, request: Request) -> str | None:
        """Return the reason why `request` can never run, or have enough pages; None if it can."""
        cache = self.cache
        if request.num_prompt_tokens + request.max_tokens > self.max_model_len:
            return f"needs room for {_asked(request)}; max_model_len is {self.max_model_len}"
        num_tokens = request.num_prompt_tokens + request.max_tokens - 1 or 1  # 0 for one token that is only computed
        num_reserved = self.session_pages.reserve.num_pages
        num_most = self.pages.num_most - num_reserved
        num_blocks = cache.needs.alone(num_tokens, self.wheel.page_size, num_most)
        if not num_blocks or request.own is not None:
            return None
        blocks = "blocks" if cache.counts() else "pages"
        room = cache.needs.room_words
        if self.pages.num_most != cache.pool.total:
            room = "beside what is guaranteed to other models there are"
        if num_reserved:
            room = f"beside the {blocks} that are reserved there are"
        return f"{cache.needs.words(num_blocks, self.wheel.page_size, _asked(request))}; {room} {num_most}"

    def most_pages_needed(self) -> int:
        """Return the most pages that any of the requests here, or coming, may need, of those that take pages."""
        requests = [*self.waiting, *self.running, *self.coming]
        if self.loads is not None:
            requests += [*self.loads.requests(), *self.loads.following()]
        return max((self._most_pages(request) for request in requests if request.own is None), default=0)

    def _most_pages(self, request: Request) -> int:
        """Return how many pages a request holds when it has generated all but its last token."""
        num_tokens = max(1, request.num_prompt_tokens + request.max_tokens - 1)
        return self.cache.needs.alone(num_tokens, self.wheel.page_size)

    @property
    def has_released(self) -> bool:
        """Whether the next plan differs, even if the last one was empty: that released or held requests."""
        return self.ahead is not None and (self.ahead.has_released or bool(self.step.held))

    @property
    def plans_idle(self) -> bool:
        """Whether a step without requests has effects or events."""
        is_silent = self.emit is None and self.loads is None and self.running.batch is None
        return not is_silent or self.ahead is not None or self.cache.keeps_time

    # One step ---------------------------------------------------------------------------------------------

    def schedule(self, now_ns: int) -> StepPlan:
        """Plan the step that starts at `now_ns` and take its pages. `commit` must follow."""
        planned, rows, loads, number = self.schedule_batch(now_ns), self.running.batch, self.loads, self.wheel.num_steps
        step = self.step
        admitted = tuple(step.admitted)
        if rows is None:
            return StepPlan(number, planned, admitted, step.preempted)
        decodes, drafts = None, self.drafts
        drafted: DraftRows | None = None
        if self.wheel.num_decoding:
            needing_page = self.wheel.needing_page() if drafts is None else drafts.needing_page()
            decodes = rows.decodes(number, needing_page, self.session_pages.changed)
            if drafts is not None:
                drafted, decodes = drafts.plan(decodes, planned, self.pages.token_budget)
                if drafted is not None:
                    self.cache.look(self.mark)
                    planned = planned.replaced(num_drafted=len(drafted.rows))
        transfers = () if loads is None else loads.tiers.take_planned()
        copies = self.session_pages.take_copies()
        return StepPlan(
            number, planned, admitted, step.preempted, decodes, transfers, copies, drafted, rows.take_snapshots()
        )

    def schedule_batch(self, now_ns: int) -> Batch:
        """Do what `schedule` does, for an executor that needs to know only the work of the step, and return that."""
        step, preemptor = self.step, self.preemptor
        step.begin(now_ns)
        self.mark.used = -1  # the next look sets the mark
        self.num_pages_wanted = self._least_wanted = 0
        for begin in self.hooks.before:
            begin(step)
        self._schedule_running(step)
        if self.session_pages.waiting:
            self._admit_with_pages(step)
        if preemptor.preemptions:
            self.blocked = NOT_BLOCKED
        elif (self.waiting.num_waiting and not self.pages.is_draining) or step.has_loaded:
            self._admit(step)
        for close in self.hooks.closing:
            close(step)
        self.cache.look(self.mark)
        step.num_decodes = 0 if step.rests else self.wheel.num_decoding - len(step.held)
        step.known_tokens = self.wheel.known_tokens if step.num_decodes else 0
        for note in self.hooks.planned:
            note(step)
        if preemptor.preemptions or preemptor.gave_way:
            step.preempted = preemptor.take_preemptions()
            step.is_cut = False
        return Batch(tuple(step.chunks), step.num_decodes, step.known_tokens, self._pool_tokens)

    def _schedule_running(self, step: Step) -> None:
        """Give the decodes their tokens and pages, then the requests that have begun what is left of the budget."""
        hooks, wheel, running = self.hooks, self.wheel, self.running
        for take_turns in hooks.turns:
            if take_turns(step):
                break
        else:
            if (num_due := wheel.pages_due()) and not self.preemptor.take_due(num_due, step.now_ns):
                step.is_cut = True
        step.budget = self.pages.token_budget - step.num_drafted
        if not step.rests:
            step.budget -= wheel.num_decoding - len(step.held)
        if running.chunked and step.budget > 0 and not step.is_cut:
            # A part of a budget may be just enough for the decodes.
            step.budget = self.prefill.resume(step.budget, step.now_ns, step.chunks)
        elif running.num_sharing:
            self._publish_filled()
        for resume in hooks.resumes:
            resume(step)

    def _publish_filled(self) -> None:
        """Make the pages findable that decodes fill in a step without chunks of requests admitted before."""
        running = self.running
        if running.most_late and not running.chunked:
            running.publish_later()
        else:
            self.prefill.publish_filled(1)

    def _admit_with_pages(self, step: Step) -> None:
        """Admit requests that bring their pages, in order of arrival: they do not wait behind others for memory."""
        waiting, prefill, most_running = self.session_pages.waiting, self.prefill, self.config.max_num_seqs
        while waiting and step.budget > 0 and self.num_seated < most_running:
            request = waiting[0]
            if not prefill.has_room(request, request.start, step.chunks):
                step.budget = 0
                return
            waiting.popleft()
            if self.emit is not None:
                self.emit(Admitted(request.index, request.content, 0))
            step.budget -= prefill.start(request, request.start, step.budget, step.now_ns, step.chunks)
            step.admitted.append(request.index)

    def _admit(self, step: Step) -> None:
        """Admit the head of the queue while there are a place and tokens for it, and every gate lets it pass."""
        hooks, waiting, running = self.hooks, self.waiting, self.running
        gates, most_running = hooks.gates, self.config.max_num_seqs
        self.blocked = NOT_BLOCKED
        for enter in hooks.entries:
            enter(step)
        if self.pages.is_draining:
            return  # loaded requests have their pages and their places already
        head: Request | None = None
        ask = step.ask
        while waiting.num_waiting and self.blocked is NOT_BLOCKED:
            head = ask.request = waiting.head(step.now_ns)
            if running.num_running >= most_running:
                self.blocked = FOR_SEQS
            elif step.budget <= 0:
                self.blocked = FOR_BUDGET
            else:
                for gate in gates:
                    verdict = gate(ask, step)
                    if verdict is not PASS:
                        break
                else:
                    self._start(ask, step)
                    continue
                if verdict is not TAKEN and verdict is not AGAIN:
                    self.blocked = verdict.reason
                    if verdict.num_blocks:
                        self.num_pages_wanted, self._least_wanted = verdict.num_blocks, ask.least
        if self.blocked is not NOT_BLOCKED:
            self._wait(head, step)

    def _start(self, ask: Ask, step: Step) -> None:
        """Let the head run from this step on, with what it found."""
        request, emit = ask.request, self.emit
        self.waiting.remove(request)
        self.memory.num_published = -1  # `forget`, inlined, as requests start often
        if emit is not None:
            self.emitted_blocked = None
            reach = self.cache.reach(request.content, self.memory.most_pages(ask.num_known))
            emit(Admitted(request.index, request.content, ask.match.num_pages, ask.below, reach))
        request.table = self.cache.open(ask.match)
        for prepare in self.hooks.starts:
            prepare(ask, step)
        step.budget -= self.prefill.start(request, ask.hit_tokens, step.budget, step.now_ns, step.chunks)
        step.admitted.append(request.index)
        for go_on in self.hooks.started:
            go_on(request, step)

    def _wait(self, head: Request | None, step: Step) -> None:
        """Let `head` wait, and the queue behind it; None if a request that is not in the queue is in its way."""
        for unblock in self.hooks.blocked:
            verdict = unblock(step)
            if verdict is AGAIN:
                self._admit(step)
                return
            if verdict is TAKEN:
                return
        assert head is not None
        self.blocked_head = head
        if self.emit is not None and self.emitted_blocked != (head.index, self.blocked):
            self.emitted_blocked = head.index, self.blocked
            num_pages_short = max(0, self.num_pages_wanted - self.cache.num_free)
            self.emit(HeadBlocked(head.index, self.blocked, num_pages_short))

    def commit(self, end_ns: int, result: StepResult | None = None) -> list[Request]:
        """End the scheduled step at `end_ns`; return the requests that finished, in admission order."""
        stopped = NONE
        if result is not None and self.running.batch is not None:
            stopped = self._read(self.running.batch, result)
        finished = self._end_decodes(0 if self.step.rests else 1, end_ns, stopped)
        prefill = self.prefill
        completing = prefill.completing
        if finished and not (completing and prefill.has_turns):
            self._finish_all(finished, end_ns)
        if result is not None and result.transfer_reports and self.loads is not None:
            self.loads.tiers.report(result.transfer_reports, end_ns)
            self.blocked = NOT_BLOCKED
        if self.session_pages.computed:
            self.session_pages.settle()
        if completing:
            completed = prefill.complete(end_ns, stopped)
            if prefill.has_turns:
                finished = completed = sorted([*finished, *completed], key=lambda request: request.admission)
            else:
                finished += completed
            if completed:
                self._finish_all(completed, end_ns)
        for end in self.hooks.after:
            end(completing, end_ns)
        for report in self.hooks.reports:
            finished = report(finished)
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

    # Many steps -------------------------------------------------------------------------------------------

    def horizon(self, now_ns: int) -> int:
        """Return the number of identical steps that are certain from `now_ns` on.

        In these every decode gets a token, and nothing else happens. 0 if the next step has to be scheduled. Certain as
        long as no added request becomes the head of the waiting queue, and until the time that the queue's
        `holds_until_ns` returns.
        """
        for changes in self.hooks.changes:
            if changes():
                return 0
        running = self.running
        if running.chunked or self.session_pages.waiting or running.stalled:
            return 0
        num_steps = self.leaps.num_steps(now_ns, self.blocked, self.blocked_head, self._least_wanted)
        for bound in self.hooks.bounds:
            num_steps = bound(num_steps)
        return num_steps

    def advance(self, num_steps: int, *, starts_ns: Sequence[int] = ()) -> Leap:
        """Do `num_steps` of the steps that `horizon` promised, or fewer if memory ends the leap earlier.

        `commit_leap` must follow. `starts_ns`: when the steps start, for a cache that follows decodes and a reader of
        events of pages.
        """
        cache = self.cache
        if cache.decodes is not None:
            self.running.in_flight = {}  # no chunk is computed in these steps
            is_lacking = self.waiting.num_waiting and self.blocked is FOR_PAGES
            num_wanted = self._least_wanted - self.pages.num_lent() if is_lacking else 0
            return cache.decodes.leap(num_steps, num_wanted, self.wheel.step, starts_ns)
        due = self.wheel.pages_due_in(num_steps)
        if due.total:
            assert not cache.pool.has_ids, "page ids are handed out one step at a time"
            cache.take_pages(due.total)
        self.publish_taken(num_steps)
        return Leap(due, cache.unmoved(num_steps))

    def publish_taken(self, num_steps: int) -> None:
        """Do the rest of `advance` once the pages are taken; several models take theirs in the order of their turns."""
        if self.running.num_sharing:
            self.prefill.publish_filled(num_steps)

    def commit_leap(self, num_steps: int, end_ns: int) -> list[Request]:
        """End the last of `num_steps` advanced steps at `end_ns`; return the requests that finished."""
        finished = self.commit_many(num_steps, end_ns)
        for end in self.hooks.after:
            end([], end_ns)
        for report in self.hooks.reports:
            finished = report(finished)
        return finished

    def commit_many(self, num_steps: int, end_ns: int) -> list[Request]:
        """Do the same without what parts do after a step; return the requests that finished, in admission order."""
        finished = self._end_decodes(num_steps, end_ns, NONE)
        if finished:
            self._finish_all(finished, end_ns)
        return finished

    def _end_decodes(self, num_steps: int, end_ns: int, stopped: frozenset[Request]) -> list[Request]:
        """End the last of the advanced steps for decodes; return those that finished, in admission order.

        `stopped`: requests that end with the token of this step, whether it is their last or not.
        """
        running = self.running
        self.preemptor.last_end_ns = end_ns
        for end in self.hooks.ending:
            end(end_ns)
        if running.num_late and (stopped or self.wheel.steps_to_finish() <= num_steps):
            running.publish_late()
        finished = self.wheel.turn(num_steps)
        if stopped:
            finished = self._with_stopped(finished, stopped)
        if finished and running.num_sharing:
            for request in finished:
                if running.shares(request):
                    running.num_sharing -= 1
        return finished

    # Ends -------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Begin the next step, if that is not done: let decodes release the parts that no later token attends to."""
        if self.settling is not None:
            self.settling.settle()

    def _finish_all(self, ended: list[Request], end_ns: int) -> None:
        """Finish requests that have generated their last token, unless a part keeps them. There is at least one."""
        finishes = self.hooks.finishes
        for request in ended:
            for take in finishes:
                if take(request, end_ns):
                    break
            else:
                self._finish(request, end_ns)
        self.blocked = NOT_BLOCKED

    def _finish(self, request: Request, end_ns: int) -> None:
        """Finish `request`, which is off the wheel and has generated its last token."""
        request.last_token_ns = end_ns
        assert FINISHED in NEXT_STATES[request.state]  # `become`, inlined: this runs for every request
        if self.emit is not None:
            self.emit(Finished(request.index, request.content))
        self.running.release(request)
        request.state = FINISHED
        if request.num_preemptions:
            self.end_below(request)

    def _with_stopped(self, finished: list[Request], stopped: frozenset[Request]) -> list[Request]:
        """Return `finished` and the decodes that stopped before their last token, in admission order.

        These leave the wheel as if that token had been their last: a replay with the known numbers of tokens ends them
        in the same order.
        """
        earlier = [request for request in stopped if request.state is S.DECODING and request not in finished]
        for request in earlier:
            self.wheel.leave(request)
        return sorted([*finished, *earlier], key=lambda request: request.admission)

    # Laws -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert laws L1, L2 and L3, between steps, and that each request is in the queue that its state requires."""
        settling = self.settling
        if settling is not None and settling.pending is not None and self.cache.decodes is not None:
            if self.has_work:
                return  # the cache has not ended the last step
            settling.settle()  # nothing decodes, so that releases nothing
        if not self.cache.is_check_due(at_rest=not self.has_work):
            return
        self.running.publish_late()
        for request in (*self.waiting, *self.session_pages.waiting):
            assert request.state in WAITING or request.state is LOADED, f"{request!r} waits"
        held = self.running.tables() + self.cache.held()
        holds = []
        if self.loads is not None:
            held += self.loads.tables()
            holds = self.loads.tiers.holds()
            self.loads.tiers.check(at_rest=not self.has_work)
        if self.handoffs is not None:
            held += self.handoffs.tables()
        reserved = self.session_pages.reserve.table()
        if reserved is not None:
            held.append((reserved, reserved.num_pages))
        if self.pins is not None:
            held += [(table, table.num_pages) for table in self.pins.tables()]
        if not held and not holds:
            assert self.cache.num_used == 0, f"L2: {self.cache.num_used} pages in use and no request runs"
        self.cache.check(held, holds)


def _asked(request: Request) -> str:
    return f"{request.num_prompt_tokens} prompt and {request.max_tokens} output tokens"

"""One engine: plan, execute, commit, emit.

`step` does all four. Callers with events between the beginning and the end of a step call `begin`, which plans and
executes, and then `end`, which commits and emits. Leaps in virtual time use the same two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from kvarts.base.limits import LATEST_NS, TooLateError
from kvarts.core.config import EngineConfig
from kvarts.core.event_log import Emit, EventLog
from kvarts.core.events import Arrived, AtRest, CacheCleared, Cancelled, Rejected, StepDone, StepEnded, StepStarted
from kvarts.core.events.steps import BLOCKED
from kvarts.core.executor import Executor
from kvarts.core.request import Request
from kvarts.core.sched.plan import Batch, StepPlan, StepResult
from kvarts.core.sched.scheduler import Scheduler

__all__ = ["Engine", "at_rest", "with_drafts"]

RESET: Final = "reset_prefix_cache"
"""The cause of preemptions by a reset of the cache, where events name another model."""

NO_SIDES: Final[tuple[int, ...]] = ()


class Engine:
    """A scheduler, an executor, and the step under way. Writes `now_ns` and `plan`.

    `log` receives all events. `audit`: assert laws L1, L2 and L3 after every step. `moves_pages`: the executor performs
    transfers, and receives a plan even if there is nothing to compute.
    """

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        executor: Executor,
        log: EventLog,
        *,
        audit: bool = False,
        moves_pages: bool = False,
    ) -> None:
        self.config = config
        self.scheduler = scheduler
        self.executor = executor
        self.log = log
        self.tiers = scheduler.tiers
        self.below = scheduler.below
        self.now_ns = 0
        """The end of the step under way; without one, the latest time that the engine has reached."""
        self.batch = Batch((), 0, 0, config.pool_tokens)
        """The work of the last scheduled step."""
        self.plan = StepPlan(-1, self.batch)
        """The plan of the last scheduled step, if the executor needs plans."""
        self._batch_ns: Callable[[Batch], int] | None = getattr(executor, "batch_ns", None)
        """How long a batch takes, if the executor does nothing else."""
        self.num_reserved_told = 0
        """The number of reserved pages in the last event of a step or leap."""
        self._result: StepResult | None = None
        self._num_withheld = 0
        self._is_alone = scheduler.pages.is_alone
        """Whether no pages are ever withheld."""
        self.has_sides = scheduler.has_sides
        """Whether tiers or KV groups are counted besides pages."""
        self._audit = audit
        self._moves_pages = moves_pages
        self._is_at_rest = True
        self._last_rest: AtRest | None = None

    def submit(self, request: Request, now_ns: int) -> str | None:
        """Queue `request` at `now_ns`; or return the reason why it can never run."""
        if now_ns > self.now_ns:
            self.now_ns = now_ns
        reason = self.scheduler.add(request)
        if reason is not None:
            self.refuse(request, reason, now_ns)
            return reason
        self._is_at_rest = False
        if self.log.emit_details is not None:
            scheduler, has_own = self.scheduler, request.own is not None
            num_ahead = len(scheduler.waiting_with_pages) - 1 if has_own else scheduler.waiting.num_ahead(request)
            self._tell_arrived(request, now_ns, num_ahead)
        return None

    def _tell_arrived(self, request: Request, now_ns: int, num_ahead: int) -> None:
        emit = self.log.emit_details
        assert emit is not None
        asked = request.num_prompt_tokens, request.max_tokens, request.priority
        has_own = request.own is not None
        arrived = Arrived(request.index, now_ns, request.content, *asked, request.request_id, num_ahead, has_own)
        if request.stops or request.num_output_tokens:
            arrived = replace(arrived, stops=request.stops, num_generated=request.num_output_tokens)
        emit(arrived)

    def leave(self, request: Request) -> None:
        """Emit the events of a request that arrived and was cancelled before it was queued."""
        request.cancelled_ns = self.now_ns
        if self.log.emit_details is not None:
            self._tell_arrived(request, self.now_ns, self.scheduler.num_waiting)
            self.log.emit_details(Cancelled(request.index, self.now_ns))
            self.emit()

    def refuse(self, request: Request, reason: str, now_ns: int) -> None:
        """Emit the event that `request`, which is not queued, was refused at `now_ns`, because of `reason`."""
        if self.log.emit_details is not None:
            self.log.emit_details(Rejected(request.index, now_ns, reason, request.request_id))

    def cancel(self, request: Request) -> None:
        """Drop `request` between steps. Its pages become free immediately."""
        request.cancelled_ns = self.now_ns
        self.scheduler.settle_given_up(request)
        if self.log.emit_details is not None:
            self.log.emit_details(Cancelled(request.index, self.now_ns))
        self.scheduler.cache.set_time(self.now_ns)
        self.scheduler.cancel(request)
        self.emit()

    def clear_cache(self) -> None:
        """Drop every cached page that is not in use. Only between steps."""
        cache = self.scheduler.cache
        if self.log.emit_details is not None:
            self.log.emit_details(CacheCleared())
        cache.evict(cache.num_cached)
        self.emit()

    def reset_cache(self, *, preempts: bool) -> bool:
        """Drop every cached page and return True; return False, and drop nothing, while a page is in use.

        `preempts`: running requests are preempted first. Only between steps, as `clear_cache`.
        """
        scheduler = self.scheduler
        if preempts and (num_running := scheduler.running.num_running):
            asker = next(iter(scheduler.running)).index
            scheduler.preemptor.give_way(num_running, RESET, asker, scheduler.cache.pool.total)
        if scheduler.cache.num_used:
            self.emit()
            return False
        self.clear_cache()
        return True

    @property
    def has_work(self) -> bool:
        """Whether the engine has something to do or wait for: requests or transfers."""
        return self.scheduler.has_work or (self.below is not None and self.below.has_work)

    def step(self, now_ns: int) -> list[Request]:
        """Run one whole step that starts at `now_ns`; return the requests that finished, in admission order."""
        if self.begin(now_ns):
            return self.end()
        self.emit()
        return []

    def begin(self, now_ns: int) -> bool:
        """Plan and execute the step that starts at `now_ns`; `end` must follow, at `self.now_ns`.

        Return False, without a step, if there is nothing to compute and the executor does not perform transfers.
        """
        if not self.prepare(now_ns):
            return False
        self.carry_out(now_ns)
        return True

    def prepare(self, now_ns: int) -> bool:
        """Plan the step that starts at `now_ns`: the first half of `begin`. Return whether it has any work."""
        log, scheduler = self.log, self.scheduler
        if self.tiers is not None and self.executor.needs_page_ids:
            self.tiers.expire(now_ns)
        if scheduler.settling is not None:
            scheduler.settling.settle()
        if log.emit_details is not None:
            log.emit_details(StepStarted(scheduler.wheel.num_steps, now_ns))
        if not self._is_alone:
            self._num_withheld = scheduler.pages.num_withheld
        if self._batch_ns is not None:
            batch = self.batch = scheduler.schedule_batch(now_ns)
        else:
            self.plan = scheduler.schedule(now_ns)
            batch = self.batch = self.plan.batch
        step = scheduler.step
        if not (batch.num_decodes or batch.chunks or step.preempted or self._moves_pages or step.is_idle):
            self._result = None
            return False
        return True

    def carry_out(self, now_ns: int, duration_ns: int = -1) -> None:
        """Execute the step that `prepare` planned: the second half of `begin`.

        `duration_ns`: how long it takes, if it is one of a common step of several engines.
        """
        batch = self.batch
        if duration_ns < 0:
            if self._batch_ns is None:
                duration_ns = self._execute()
            else:
                has_time = batch.num_decodes or batch.chunks or self.scheduler.step.is_idle
                duration_ns = self._batch_ns(batch) if has_time else 0
            if self.below is not None:
                duration_ns = self.below.step_ns(now_ns, duration_ns)
        if self.log.emit is not None:
            self._emit_step(self.log.emit, batch, now_ns, duration_ns)
        end_ns = self.now_ns = now_ns + duration_ns
        if end_ns > LATEST_NS:
            raise TooLateError

    def _execute(self) -> int:
        """Let the executor carry out the plan; return how long that took."""
        plan = self.plan
        result = self._result = self.executor.execute(plan)
        if self.tiers is not None and self.executor.needs_page_ids:
            batch = plan.batch
            moving_ns = sum(report.duration_ns for report in result.transfer_reports)
            num_tokens = sum(chunk.num_tokens for chunk in batch.chunks)
            self.tiers.measure(num_tokens, batch.num_decodes + batch.num_drafted, result.duration_ns - moving_ns)
        return result.duration_ns

    def _emit_step(self, emit: Emit, batch: Batch, now_ns: int, duration_ns: int) -> None:
        """Emit the step that starts at `now_ns`, and that the scheduler has just planned."""
        scheduler, emit_row = self.scheduler, self.log.emit_row
        step = scheduler.step
        mark, num_reserved = scheduler.mark, scheduler.cache.num_reserved
        num_decodes = num_tokens = batch.num_decodes
        for chunk in batch.chunks:
            num_tokens += chunk.num_tokens
        num_decodes -= step.num_joined
        num_waiting = scheduler.waiting.num_waiting + len(scheduler.session_pages.waiting)
        num_running = scheduler.running.num_running + step.num_leaving
        num_loading, sides = 0, NO_SIDES
        if self.has_sides:
            sides = scheduler.side_counts_at_mark()
            if scheduler.loads is not None:
                num_loading = scheduler.loads.num_waiting
                num_waiting += num_loading
        num_drafted = step.num_drafted if self._result is None else 0
        is_as_before = num_reserved == self.num_reserved_told and not step.preempted and not num_drafted
        if emit_row is not None and self._result is None and is_as_before:
            row = (
                duration_ns,
                num_decodes,
                num_tokens,
                scheduler.blocked * BLOCKED,
                now_ns,
                mark.used,
                mark.cached,
                mark.released,
                num_running,
                num_waiting,
                num_loading,
                len(step.admitted),
            )
            emit_row((*row, *sides) if sides else row)
            return
        self.num_reserved_told = num_reserved
        done = StepDone(
            scheduler.wheel.num_steps,
            now_ns,
            duration_ns,
            mark.used,
            mark.cached,
            mark.released,
            num_running,
            num_waiting,
            scheduler.blocked,
            num_decodes,
            num_tokens,
            len(step.admitted),
            step.preempted,
            sides,
            self._num_withheld,
            num_reserved,
            num_loading,
        )
        if self._result is not None and self.plan.drafts is not None:
            done = with_drafts(done, self.plan, self._result)
        elif num_drafted:
            done = done.replaced(
                num_tokens=num_tokens + num_drafted, num_drafted=num_drafted, num_accepted=step.num_accepted
            )
        emit(done)

    def end(self) -> list[Request]:
        """Commit the step under way and emit its events; return the requests that finished, in admission order."""
        scheduler, log = self.scheduler, self.log
        if log.emit_details is not None:
            log.emit_details(StepEnded(scheduler.wheel.num_steps, self.now_ns))
        finished = scheduler.commit(self.now_ns, self._result)
        # What `emit` would do for an engine with requests that run: this runs after every step.
        if scheduler.running.num_running and not self._audit:
            if len(log.waiting) >= log.num_waiting:
                log.flush()
        else:
            self.emit()
        return finished

    def emit(self) -> None:
        """Pass the events to the readers of the log, between steps. Raise what they raise, such as AuditError."""
        scheduler = self.scheduler
        # The first two decide most calls of `has_work`, and this runs after every step.
        if not (scheduler.running.num_running or scheduler.waiting.num_waiting or self._is_at_rest or self.has_work):
            self._tell_rest()
        log = self.log
        if len(log.waiting) >= log.num_waiting:
            log.flush()
        if self._audit:
            scheduler.check()

    def _tell_rest(self) -> None:
        """Emit the event that the engine is idle."""
        self._is_at_rest = True
        if self.log.emit is not None and self.scheduler.wheel.num_steps:
            rest = at_rest(self.scheduler, self.now_ns)
            last = self._last_rest
            # Requests that arrived and ended at one instant and changed only the released count are not reported.
            if last is None or rest != replace(last, num_released=rest.num_released):
                self._last_rest = rest
                self.log.emit(rest)


def with_drafts(done: StepDone, plan: StepPlan, result: StepResult) -> StepDone:
    """Return `done` with the numbers of drafted tokens of `plan` and of accepted ones."""
    num_drafted = plan.batch.num_drafted
    num_accepted = sum(count for _, count in result.accepted)
    return done.replaced(num_tokens=done.num_tokens + num_drafted, num_drafted=num_drafted, num_accepted=num_accepted)


def at_rest(scheduler: Scheduler, now_ns: int) -> AtRest:
    """Return the event of a scheduler that has run out of work at `now_ns`, between steps."""
    cache = scheduler.cache
    return AtRest(
        scheduler.wheel.num_steps - 1,
        now_ns,
        cache.num_used,
        cache.num_cached,
        cache.num_released,
        scheduler.side_counts(),
        cache.num_reserved,
    )

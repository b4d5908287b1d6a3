"""One engine: plan, execute, commit, emit.

`step` does all four, for an executor that takes real time. In virtual time a step has a beginning and an end with
other engines' events between them, so it comes in two halves: `start` plans and executes, `finish` commits. Where
steps are alike, `start` does many at once; whatever is recorded is the same as if it had done one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from kvarts.config import EngineConfig
from kvarts.events import (
    Arrived,
    AtRest,
    Blocked,
    Cancelled,
    CopiesRemoved,
    Event,
    LeapDone,
    PagesRemoved,
    Rejected,
    StepDone,
    StepEnded,
    StepSink,
    StepStarted,
    Turns,
)
from kvarts.executor.base import Executor
from kvarts.executor.simulated import SimExecutor
from kvarts.offload.config import OffloadConfig
from kvarts.request import Request
from kvarts.sched.plan import Batch, StepPlan, StepResult
from kvarts.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from kvarts.audit.auditor import Auditor
    from kvarts.sharing.part import DevicePart

__all__ = ["NEVER_NS", "Engine", "Observer"]

ONE_MS_IN_NS = 1_000_000
NEVER_NS = 1 << 62


class Observer(Protocol):
    """Receives events. Promises to change nothing."""

    def observe(self, events: Sequence[Event]) -> None:
        """What happened since the last call, in order. Called after every step, or after many alike."""


class Engine:
    """A scheduler, an executor, and the step that is under way.

    `sink` keeps a record of steps, `observers` receive events. `step_by_step`: never do many steps at once. `audit`:
    check laws L1, L2 and L3 after every step, and mirror every operation into a second bookkeeping. `offload`: tiers
    below the device; `known_keys` and `namespace`: of the files that an executor has, see FileTier. `part`: of an
    engine that shares a device, and takes turns with others, see `leap`.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        sink: StepSink | None = None,
        observers: Sequence[Observer] = (),
        step_by_step: bool = False,
        audit: bool = False,
        offload: OffloadConfig | None = None,
        known_keys: Iterable[bytes] = (),
        namespace: str = "",
        part: DevicePart | None = None,
    ) -> None:
        self.config = config
        self.executor = executor
        self._sim = executor if isinstance(executor, SimExecutor) else None
        self._events: list[Event] | None = [] if audit or observers else None
        self.scheduler = Scheduler(
            config,
            with_page_ids=self._sim is None,
            events=self._events,
            offload=offload,
            known_keys=known_keys,
            namespace=namespace,
            part=part,
        )
        self._takes_turns = part is not None
        self._offloader = self.scheduler.offloader
        self._auditor: Auditor | None = None
        self._audit = audit
        if audit and part is None:
            from kvarts.audit.auditor import Auditor

            tiers = None if self._offloader is None else self._offloader.config
            self._auditor = Auditor(
                config.num_pages,
                config.page_size,
                safe_first=tiers is not None and tiers.policy == "lazy",
                full_prompt_hits=tiers is not None and tiers.full_prompt_hits,
            )
        self._observers = observers
        self._pool_tokens = config.pool_tokens
        self._sink = sink
        self._leaps = self._sim is not None and not step_by_step and not self._takes_turns
        self.now_ns = 0
        """When the step under way ends; where there is none, the time the engine has reached."""
        self._under_way = False
        self._is_pause = False
        self._is_at_rest = True
        self._num_leapt = 0
        """Steps under way that are alike; 0 for a scheduled step."""
        self._result: StepResult | None = None
        self.batch = Batch((), 0, 0, config.pool_tokens)
        """Of the last scheduled step."""
        self._last_decode_ns = 10 * ONE_MS_IN_NS  # a guess, to ask for about as many durations as are needed

    def submit(self, request: Request, now_ns: int) -> str | None:
        """Queues `request` at `now_ns`; or answers why it can never run. A pause ends by it."""
        if self._is_pause:
            self._is_pause = self._under_way = False
            self.now_ns = now_ns
        if not self._under_way and now_ns > self.now_ns:
            self.now_ns = now_ns
        reason = self.scheduler.add(request)
        if self._events is not None:
            if reason is None:
                # The queue's order is total: whoever is more important goes first, then who came first.
                num_ahead = self.scheduler.waiting.num_ahead(request)
                self._events.append(
                    Arrived(
                        request.index,
                        now_ns,
                        request.content,
                        request.num_prompt_tokens,
                        request.num_output_tokens,
                        request.priority,
                        request.request_id,
                        num_ahead,
                    )
                )
            else:
                self._events.append(Rejected(request.index, now_ns, reason, request.request_id))
        if reason is None:
            self._is_at_rest = False
        return reason

    def cancel(self, request: Request) -> None:
        """Drops `request` between steps; its pages are free at once."""
        if self._events is not None:
            self._events.append(Cancelled(request.index, self.now_ns))
        self.scheduler.cancel(request)
        self._record_rest()

    def reset_tiers(self) -> None:
        """Forgets what the tiers below hold, between steps. Transfers under way end first; what they store is lost."""
        if self._offloader is not None:
            self._offloader.reset()

    @property
    def has_work(self) -> bool:
        """Whether there is something to do or to wait for: requests, or transfers."""
        return self.scheduler.has_work or (self._offloader is not None and self._offloader.has_work)

    @property
    def is_pausing(self) -> bool:
        """Whether what is under way is no step: nothing can be computed before a transfer ends or somebody comes."""
        return self._is_pause

    def step(self, now_ns: int) -> list[Request]:
        """Does one whole step that starts at `now_ns`; returns who finished, in admission order."""
        self.start(now_ns)
        return self.finish()

    def start(self, now_ns: int, until_ns: int = NEVER_NS) -> int:
        """Starts a step at `now_ns`, and as many after it as are alike and start before `until_ns`.

        Returns when the last one ends. `finish` must be called for that time before anything else is done.
        """
        assert not self._under_way
        self._under_way = True
        scheduler, offloader = self.scheduler, self._offloader
        if offloader is not None and self._sim is not None and offloader.advance_to(now_ns):
            scheduler.blocked = Blocked.NOT
            if not self.has_work:
                return self._pause(now_ns)
        elif self._leaps:
            num_steps = scheduler.horizon()
            if num_steps > 0:
                if offloader is not None and offloader.next_ns < until_ns:
                    until_ns = offloader.next_ns
                return self._leap(now_ns, until_ns, num_steps)
        if self._events is not None:
            self._events.append(StepStarted(scheduler.wheel.step, now_ns))
        num_withheld = 0
        if self._takes_turns:
            cache = scheduler.cache
            num_withheld = self.config.num_pages - cache.num_used - cache.num_free
        plan = scheduler.schedule(now_ns)
        self.batch = plan.batch
        is_empty = not (plan.batch.chunks or plan.batch.num_decodes)
        if is_empty and not plan.preemptions:
            if self._takes_turns:
                return self._pause(now_ns)
            if offloader is not None and self._sim is not None:
                return self._pause(offloader.next_ns if self.has_work else now_ns)
        if is_empty and self._takes_turns:
            result = self._result = StepResult(0)  # somebody gave way, and nothing is left to compute
        else:
            result = self._result = self.executor.execute(plan)
        self._num_leapt = 0
        if self._sink is not None:
            self._record_step(self._sink, now_ns, result.duration_ns, plan, num_withheld)
        self.now_ns = now_ns + result.duration_ns
        return self.now_ns

    def finish(self) -> list[Request]:
        """Ends what `start` started; returns who finished, in admission order."""
        self._under_way = False
        scheduler = self.scheduler
        if self._is_pause:
            self._is_pause = False
            self._record_rest()
            self.flush()
            return []
        if self._events is not None:
            self._events.append(StepEnded(scheduler.wheel.step + (self._num_leapt or 1) - 1, self.now_ns))
        if self._num_leapt:
            finished = scheduler.commit_many(self._num_leapt, self.now_ns)
        else:
            finished = scheduler.commit(self.now_ns, self._result)
        self._record_rest()
        self.flush()
        if self._audit:
            scheduler.check()
        return finished

    def flush(self) -> None:
        """Hands events to who observes them. Also raises AuditError, where that is on and something does not add up."""
        events = self._events
        if not events:
            return
        for observer in self._observers:
            observer.observe(events)
        if self._auditor is not None:
            self._auditor.observe(events)
            self._auditor.compare(self.scheduler.cache)
        events.clear()

    def run_until(self, until_ns: int, finished: list[Request]) -> None:
        """Ends steps, and starts those that start before `until_ns`, for as long as there is work.

        Adds to `finished` who finished.
        """
        scheduler, offloader = self.scheduler, self._offloader
        while True:
            if self._under_way:
                if self.now_ns > until_ns:
                    return
                finished += self.finish()
            now_ns = self.now_ns
            # `has_work`, asked before every step.
            if now_ns >= until_ns or not (scheduler.has_work or (offloader is not None and offloader.has_work)):
                return
            self.start(now_ns, until_ns)

    def quiet_until(self, now_ns: int) -> int | None:
        """If a step started now would be one of many alike: when the last would end. Nobody finishes before."""
        num_steps = self.scheduler.horizon() if self._leaps else 0
        next_ns = NEVER_NS if self._offloader is None else self._offloader.next_ns
        if not num_steps or next_ns <= now_ns:
            return None
        return min(now_ns + sum(self.decode_ns(num_steps)), next_ns)

    def decode_ns(self, num_steps: int) -> list[int]:
        """How long the next `num_steps` steps take, if they are alike."""
        assert self._sim is not None
        wheel = self.scheduler.wheel
        return self._sim.decode_ns(wheel.num_decoding, wheel.known_tokens, self._pool_tokens, num_steps)

    def leap(self, durations_ns: list[int], pages_taken: list[int], turns: Turns) -> None:
        """Starts steps that are alike, each when its turn comes; `finish` must be called.

        For engines that share a device, and whose pages for these steps were taken. Nobody may observe their events.
        """
        assert self._takes_turns and self._events is None and not self._under_way
        scheduler = self.scheduler
        scheduler.advance(len(durations_ns), is_taken=True)
        if self._sink is not None:
            self._sink.record_leap(
                LeapDone(
                    scheduler.wheel.step,
                    turns.starts_ns[0],
                    durations_ns,
                    pages_taken,
                    scheduler.cache.num_used - sum(pages_taken),
                    turns.cached[0],
                    scheduler.cache.num_released,
                    scheduler.running.num_running,
                    scheduler.num_waiting,
                    scheduler.blocked,
                    turns=turns,
                )
            )
        self._under_way = True
        self._num_leapt = len(durations_ns)
        self.now_ns = turns.starts_ns[-1] + durations_ns[-1]

    def _pause(self, until_ns: int) -> int:
        assert until_ns < NEVER_NS, "L8: there is work, nothing can be computed, and no transfer is under way"
        self._is_pause = True
        self.now_ns = until_ns
        return until_ns

    def _leap(self, now_ns: int, until_ns: int, num_steps: int) -> int:
        scheduler = self.scheduler
        # No more durations than it takes to get there, as far as the last one tells.
        num_wanted = (until_ns - now_ns) // self._last_decode_ns + 2
        if num_wanted < num_steps:
            num_steps = num_wanted
        wheel = scheduler.wheel
        durations_ns = self.decode_ns(num_steps)
        end_ns = now_ns + sum(durations_ns)
        while num_steps > 1 and end_ns - durations_ns[-1] >= until_ns:
            end_ns -= durations_ns.pop()
            num_steps -= 1
        self._last_decode_ns = durations_ns[-1] or 1
        cache = scheduler.cache
        num_used, num_cached = cache.num_used, cache.tree.num_cached
        num_empty = cache.pool.num_empty
        events = self._events
        num_events = 0 if events is None else len(events)
        pages_taken = scheduler.advance(num_steps)
        if self._sink is not None:
            self._sink.record_leap(
                LeapDone(
                    wheel.step,
                    now_ns,
                    durations_ns,
                    pages_taken,
                    num_used,
                    num_cached,
                    cache.num_released,
                    scheduler.running.num_running,
                    scheduler.num_waiting,
                    scheduler.blocked,
                    () if self._offloader is None else self._offloader.num_pages(),
                )
            )
        if events is not None:
            happened = events[num_events:]
            del events[num_events:]
            events += _by_step(happened, wheel.step, now_ns, durations_ns, pages_taken, num_empty)
        self._num_leapt = num_steps
        self.now_ns = end_ns
        return end_ns

    def _record_rest(self) -> None:
        """If this is when the engine ran out of work."""
        if self._is_at_rest or self.has_work:
            return
        self._is_at_rest = True
        if self._sink is not None and self.scheduler.wheel.step:
            cache, last_step = self.scheduler.cache, self.scheduler.wheel.step - 1
            tier_pages = () if self._offloader is None else self._offloader.num_pages()
            rest = AtRest(last_step, self.now_ns, cache.num_used, cache.num_cached, cache.num_released, tier_pages)
            self._sink.record_rest(rest)

    def _record_step(self, sink: StepSink, start_ns: int, duration_ns: int, plan: StepPlan, num_withheld: int) -> None:
        scheduler, batch = self.scheduler, plan.batch
        num_tokens = batch.num_decodes
        for chunk in batch.chunks:
            num_tokens += chunk.num_tokens
        sink.record_step(
            StepDone(
                plan.step,
                start_ns,
                duration_ns,
                scheduler.mark_used,
                scheduler.mark_cached,
                scheduler.mark_released,
                scheduler.running.num_running,
                scheduler.num_waiting,
                scheduler.blocked,
                batch.num_decodes,
                num_tokens,
                len(plan.admitted),
                plan.preemptions,
                () if self._offloader is None else self._offloader.num_pages(),
                num_withheld,
            )
        )


def _by_step(
    happened: list[Event],
    step: int,
    start_ns: int,
    durations_ns: list[int],
    pages_taken: list[int],
    num_empty: int,
) -> list[Event]:
    """What happened in a leap, told step by step.

    In a leap, pages are evicted for those that no empty page was left for, and are made findable in its last step only.
    """
    evicted: list[PagesRemoved | CopiesRemoved] = []
    rest: list[Event] = []
    for event in happened:
        if isinstance(event, PagesRemoved | CopiesRemoved):
            evicted.append(event)
        else:
            rest.append(event)
    told: list[Event] = []
    evicted.reverse()
    last = len(durations_ns) - 1
    for index, (duration_ns, num_taken) in enumerate(zip(durations_ns, pages_taken, strict=True)):
        num_empty -= num_taken
        if num_empty < 0 or index == last:
            told.append(StepStarted(step + index, start_ns))
        while num_empty < 0 and evicted:
            run = evicted.pop()
            size = run.end_page - run.start_page
            cut = max(run.start_page, run.end_page + num_empty)
            told.append(type(run)(run.content, cut, run.end_page))
            if cut > run.start_page:
                evicted.append(type(run)(run.content, run.start_page, cut))
            num_empty = min(0, num_empty + size)
        start_ns += duration_ns
    return told + evicted + rest

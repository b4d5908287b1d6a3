"""One engine: plan, execute, commit, emit.

`step` does all four, for an executor that takes real time. In virtual time a step has a beginning and an end with
other engines' events between them, so it comes in two halves: `start` plans and executes, `finish` commits. Where
steps are alike, `start` does many at once; whatever is recorded is the same as if it had done one by one.
"""

from __future__ import annotations

from typing import Protocol

from kvarts.config import EngineConfig
from kvarts.events import PageEvent
from kvarts.executor.base import Executor
from kvarts.executor.sim import SimExecutor
from kvarts.request import Request
from kvarts.sched.plan import StepPlan, StepResult
from kvarts.sched.scheduler import Scheduler

__all__ = ["NEVER_NS", "Engine", "StepSink"]

ONE_MS_IN_NS = 1_000_000
NEVER_NS = 1 << 62


class StepSink(Protocol):
    """Receives what was done. Promises to change nothing."""

    def record_step(self, start_ns: int, duration_ns: int, plan: StepPlan, scheduler: Scheduler) -> None:
        """A scheduled step; the scheduler is as after planning it."""

    def record_leap(
        self,
        start_ns: int,
        durations_ns: list[int],
        pages_taken: list[int],
        num_used: int,
        num_cached: int,
        scheduler: Scheduler,
    ) -> None:
        """Steps alike, one after the other: only decodes. The scheduler is as after the last.

        `pages_taken`: for each step. `num_used` and `num_cached`: pages before the first.
        """


class Engine:
    """A scheduler, an executor, and the step that is under way.

    `step_by_step`: never do many steps at once. `audit`: check laws L1, L2 and L3 after every step.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        sink: StepSink | None = None,
        events: list[PageEvent] | None = None,
        step_by_step: bool = False,
        audit: bool = False,
    ) -> None:
        self.config = config
        self.executor = executor
        self._sim = executor if isinstance(executor, SimExecutor) else None
        self.scheduler = Scheduler(config, with_page_ids=self._sim is None, events=events)
        self._pool_tokens = config.pool_tokens
        self._sink = sink
        self._audit = audit
        self._leaps = self._sim is not None and not step_by_step
        self.now_ns = 0
        """When the step under way ends; where there is none, the time the engine has reached."""
        self._under_way = False
        self._num_leapt = 0
        """Steps under way that are alike; 0 for a scheduled step."""
        self._result: StepResult | None = None
        self._last_decode_ns = 10 * ONE_MS_IN_NS  # a guess, to ask for about as many durations as are needed

    def submit(self, request: Request, now_ns: int) -> str | None:
        """Queues `request` at `now_ns`; or answers why it can never run."""
        if not self._under_way and now_ns > self.now_ns:
            self.now_ns = now_ns
        return self.scheduler.add(request)

    def cancel(self, request: Request) -> None:
        """Drops `request` between steps; its pages are free at once."""
        self.scheduler.cancel(request)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work

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
        scheduler = self.scheduler
        if self._leaps:
            num_steps = scheduler.horizon()
            if num_steps > 0:
                return self._leap(now_ns, until_ns, num_steps)
        plan = scheduler.schedule(now_ns)
        result = self._result = self.executor.execute(plan)
        self._num_leapt = 0
        if self._sink is not None:
            self._sink.record_step(now_ns, result.duration_ns, plan, scheduler)
        self.now_ns = now_ns + result.duration_ns
        return self.now_ns

    def finish(self) -> list[Request]:
        """Ends what `start` started; returns who finished, in admission order."""
        self._under_way = False
        if self._num_leapt:
            finished = self.scheduler.commit_many(self._num_leapt, self.now_ns)
        else:
            finished = self.scheduler.commit(self.now_ns, self._result)
        if self._audit:
            self.scheduler.check()
        return finished

    def run_until(self, until_ns: int, finished: list[Request]) -> None:
        """Ends steps, and starts those that start before `until_ns`, for as long as there is work.

        Adds to `finished` who finished.
        """
        running, waiting = self.scheduler.running, self.scheduler.waiting
        while True:
            if self._under_way:
                if self.now_ns > until_ns:
                    return
                finished += self.finish()
            now_ns = self.now_ns
            if now_ns >= until_ns or not (running.num_running or waiting.num_waiting):
                return
            self.start(now_ns, until_ns)

    def quiet_until(self, now_ns: int) -> int | None:
        """If a step started now would be one of many alike: when the last would end. Nobody finishes before."""
        num_steps = self.scheduler.horizon() if self._leaps else 0
        if not num_steps:
            return None
        assert self._sim is not None
        wheel = self.scheduler.wheel
        durations_ns = self._sim.decode_ns(wheel.num_decoding, wheel.known_tokens, self._pool_tokens, num_steps)
        return now_ns + sum(durations_ns)

    def _leap(self, now_ns: int, until_ns: int, num_steps: int) -> int:
        scheduler, sim = self.scheduler, self._sim
        assert sim is not None
        # No more durations than it takes to get there, as far as the last one tells.
        num_wanted = (until_ns - now_ns) // self._last_decode_ns + 2
        if num_wanted < num_steps:
            num_steps = num_wanted
        wheel = scheduler.wheel
        durations_ns = sim.decode_ns(wheel.num_decoding, wheel.known_tokens, self._pool_tokens, num_steps)
        end_ns = now_ns + sum(durations_ns)
        while num_steps > 1 and end_ns - durations_ns[-1] >= until_ns:
            end_ns -= durations_ns.pop()
            num_steps -= 1
        self._last_decode_ns = durations_ns[-1] or 1
        cache = scheduler.cache
        num_used, num_cached = self.config.num_pages - cache.num_free, cache.tree.num_cached
        pages_taken = scheduler.advance(num_steps)
        if self._sink is not None:
            self._sink.record_leap(now_ns, durations_ns, pages_taken, num_used, num_cached, scheduler)
        self._num_leapt = num_steps
        self.now_ns = end_ns
        return end_ns

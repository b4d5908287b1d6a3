"""Batches in which important requests preempt others: SGLang's priority scheduling.

A request that finds no place preempts running ones of a priority that is lower by more than a threshold, the least
important first, and of these the last to be queued first. These must free what it lacks by the scheduler's promises;
its prompt counts only if the scheduler has looked at it before. What they had is released, and they go back to the end
of the queue when the batch is made. Once one request of a batch has preempted others, each later one must as well.

With overlap, a request may be preempted when its last token is computed, which it loses then: its end is reported
after the plan of the next step.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import TYPE_CHECKING, Final

from kvarts.core.config import BatchRules
from kvarts.core.parts.batches import MOST_PROMISED, Batches
from kvarts.core.request import Request, RequestState
from kvarts.core.sched.step import Acts, Ask, Step, Verdict

if TYPE_CHECKING:
    from kvarts.core.sched.state import SchedulerState

__all__ = ["BatchesByPriority"]

FINISHED: Final = RequestState.FINISHED


class BatchesByPriority(Batches):
    """Owner of preempted requests until they are queued again, and of ends that were not reported."""

    __slots__ = ("_is_crowded", "_preempted", "_seen", "_taken_ends")

    def __init__(self, scheduler: SchedulerState, rules: BatchRules) -> None:
        super().__init__(scheduler, rules)
        self._is_crowded = False
        """Whether a prompt of the batch being planned had no place."""
        self._preempted: list[Request] = []
        self._seen: dict[Request, tuple[int, int]] = {}
        """The tokens of requests when they were looked at last, and those that they found."""
        self._taken_ends: list[Request] = []
        """Requests whose last results were taken in the plan of this step."""

    def acts(self) -> Acts:
        """Return where it acts."""
        acts = super().acts()
        acts["entries"] = self.enter
        if self._overlaps:
            acts["reports"] = self.report
        return acts

    def _may_admit(self) -> bool:
        self._is_shut = False
        return self._scheduler.waiting.num_waiting > 0

    def enter(self, step: Step) -> None:
        """Make a place for the first head of the queue."""
        self._is_crowded = False
        self._make_place(step)

    def find(self, ask: Ask, step: Step) -> Verdict:
        """Match the head, and note what it finds."""
        verdict = super().find(ask, step)
        if self._is_trying:
            self._seen[ask.request] = ask.num_known, ask.hit_tokens
        return verdict

    def start(self, request: Request, step: Step) -> None:
        """Count the prompt that begins in this step, and make a place for the next one."""
        super().start(request, step)
        self._make_place(step)

    def _make_place(self, step: Step) -> None:
        """Preempt requests for the head of the queue if it has no place; end the batch if there are none to preempt."""
        scheduler = self._scheduler
        if not (self._is_trying and step.budget > 0 and scheduler.waiting.num_waiting):
            return
        if scheduler.running.num_running >= scheduler.config.max_num_seqs:
            self._is_crowded = True
        if self._is_crowded and not self._preempt_for(scheduler.waiting.head(step.now_ns), step):
            step.budget = 0

    def _preempt_for(self, head: Request, step: Step) -> bool:
        """Preempt what `head` needs; return whether there is as much."""
        sign, threshold = self._rules.sign, self._rules.threshold
        num_known, num_found = self._seen.get(head, (0, 0))
        lacking = num_known - num_found + min(head.max_tokens, MOST_PROMISED) - self._room()
        # With enough memory, it is only their places that it needs.
        num_pages = self._cache.num_free + ceil(lacking / self._page_size) if lacking > 0 else 0
        chosen: dict[Request, float] = {}
        for request in sorted(self._running, key=lambda each: (-sign * each.priority, -each.admission)):
            if (head.priority - request.priority) * -sign <= threshold:
                break
            promise = chosen[request] = self._promise(request)
            lacking -= promise
            if lacking <= 0:
                break
        if not chosen or lacking > 0:
            return False
        num_left = len(self._running)
        for request in self._running:
            if request in chosen:
                num_left -= 1
                self._promised -= chosen[request]
                asked = num_pages and min(max(num_pages, self._cache.num_free + 1), self._cache.pool.total)
                self._retract_one(request, head, asked, step.now_ns, num_left, is_queued=False)
        for request in chosen:
            del self._running[request]
        self._preempted += chosen
        return True

    def _promise(self, request: Request) -> float:
        """Return the tokens that a running request is promised."""
        num_left = min(request.max_tokens - self._num_generated(request), MOST_PROMISED)
        return num_left * (1.0 if self._rules.ignores_eos else self.ratio)

    def _retract_one(
        self, request: Request, asker: Request, num_pages: int, now_ns: int, num_left: int, *, is_queued: bool = True
    ) -> None:
        is_ended = request.state is FINISHED
        super()._retract_one(request, asker, num_pages, now_ns, num_left, is_queued=is_queued)
        if is_ended:
            self._ended.remove(request)
            self._scheduler.running.ended.remove(request)
        self._seen[request] = self._seen[request][0], 0

    def close(self, step: Step) -> None:
        """Queue what was preempted, and take the memory of the step."""
        for request in self._preempted:
            self._scheduler.waiting.push(request)
        self._preempted = []
        super().close(step)

    def report(self, finished: list[Request]) -> list[Request]:
        """Return the requests whose last results were taken, in place of those that ended in this step."""
        taken, self._taken_ends = self._taken_ends, []
        return taken

    def take_late(self, step: Step) -> None:
        """Take the results of the step before the one that was planned, with overlap."""
        if self._overlaps:
            self._taken_ends = list(self._ended)
        super().take_late(step)

    def _leave(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._seen.pop(request, None)
        super()._leave(requests)

    def changes(self) -> bool:
        """Return whether the next step may differ from the last one: also if a request waits."""
        return self._scheduler.waiting.num_waiting > 0 or super().changes()

"""Asynchronous scheduling, as vLLM's: the next step is planned while one runs.

So a request that ends keeps its place and its pages until the next step is planned, and a page that a decode fills can
be found one step later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvarts.core.events import Blocked, Cancelled, Finished
from kvarts.core.request import NEXT_STATES, Request, RequestState
from kvarts.core.sched.step import Acts, Step

if TYPE_CHECKING:
    from kvarts.core.sched.state import SchedulerState

__all__ = ["PlansAhead"]

FINISHED: Final = RequestState.FINISHED
NOT_BLOCKED: Final = Blocked.NOT
RUNNING: Final = (RequestState.PREFILLING, RequestState.DECODING)


class PlansAhead:
    """Owner of what ended, or was given up, since the step under way was planned."""

    __slots__ = ("_given_up", "_scheduler", "has_released")

    def __init__(self, scheduler: SchedulerState) -> None:
        self._scheduler = scheduler
        self._given_up: list[Request] = []
        """Requests to drop when the next step is planned."""
        self.has_released = False
        """Whether the last step, after it was planned, released requests that had ended before it."""

    def acts(self) -> Acts:
        """Return where it acts."""
        return Acts(planned=self.release, after=self.end, finishes=self.keep, changes=self.has_any)

    def give_up(self, request: Request) -> None:
        """Drop `request`, which is given up while a step runs, when the next step is planned: that plan knows it."""
        self._given_up.append(request)

    def take_back(self, request: Request) -> None:
        """Do not drop `request` when the next step is planned: it leaves before."""
        self._given_up.remove(request)

    def has_any(self) -> bool:
        """Return whether the plan of the next step releases or drops requests."""
        return bool(self._scheduler.running.ended or self._given_up)

    def keep(self, request: Request, end_ns: int) -> bool:
        """Let `request`, which has generated its last token, keep its place and pages until the next plan."""
        if request.own is not None:
            return False
        request.last_token_ns = end_ns
        assert FINISHED in NEXT_STATES[request.state]
        self._scheduler.running.keep(request)
        request.state = FINISHED
        return True

    def release(self, step: Step) -> None:
        """Release, at the end of a plan, what ended or was given up before it."""
        running, prefill = self._scheduler.running, self._scheduler.prefill
        step.num_leaving = 0
        self._drop_given_up(step)
        if running.taken_off:
            running.publish_read()
        self._release_ended(step)
        running.in_flight, prefill.computing = prefill.computing, {}

    def end(self, completing: list[Request], end_ns: int) -> None:
        """End a step after which the next one is planned already: release what ended if that one plans nothing."""
        scheduler = self._scheduler
        running = scheduler.running
        if not (running.ended or self.has_released):
            return
        scheduler.blocked = NOT_BLOCKED
        self.has_released = False
        if running.num_running == len(running.ended) and not (scheduler.has_others or scheduler.wheel.num_decoding):
            idle = Step(end_ns)
            self._drop_given_up(idle)
            self._release_ended(idle)
            self.has_released = False

    def _release_ended(self, step: Step) -> None:
        """Release the places and pages of requests that ended before `step`, which was just planned."""
        scheduler, running = self._scheduler, self._scheduler.running
        ended, running.ended = running.ended, []
        self.has_released = bool(ended)
        for request in ended:
            for settle in scheduler.hooks.leaving:
                settle(request)
            if scheduler.emit is not None:
                scheduler.emit(Finished(request.index, request.content))
            self._release_one(request, step)
            scheduler.end_below(request)

    def _release_one(self, request: Request, step: Step, *, is_read: bool = True) -> None:
        """Release the place and pages of a request that ended before `step`, which was just planned.

        `is_read`: its last token is known.
        """
        if request.table is None:
            return  # it was preempted since
        running = self._scheduler.running
        has_turn = running.wheel.has(request)
        step.num_leaving += has_turn
        took_page = has_turn and request.num_computed % running.wheel.page_size == 0
        running.end_again(request)
        num_unnamed = 0 if has_turn or is_read else running.num_unnamed(request)
        running.release(request, int(took_page), num_unnamed)

    def _drop_given_up(self, step: Step) -> None:
        """Drop the requests that were given up before `step`, which was just planned; it computes their tokens.

        As in vLLM, their pages are free before those of requests that have ended.
        """
        given_up, self._given_up = self._given_up, []
        scheduler, running = self._scheduler, self._scheduler.running
        for request in given_up:
            if scheduler.emit is not None:
                scheduler.emit(Cancelled(request.index, step.now_ns))
            if request.state is FINISHED:
                running.ended.remove(request)
                self._release_one(request, step, is_read=False)
                request.state = RequestState.CANCELLED
                scheduler.end_below(request)
            elif request.state in RUNNING:
                self._drop_running(request, step)
                scheduler.end_below(request)
            else:
                scheduler.cancel(request)
        if given_up:
            scheduler.blocked = NOT_BLOCKED

    def _drop_running(self, request: Request, step: Step) -> None:
        """Drop `request`, whose tokens `step` computes."""
        running, completing = self._scheduler.running, self._scheduler.prefill.completing
        step.num_leaving += 1
        took_page = False
        is_on_wheel = running.wheel.has(request)
        if request in completing:
            completing.remove(request)
        else:
            running.leave(request)
            took_page = is_on_wheel and request.num_computed % running.wheel.page_size == 0
        # The pages that a decode filled before are findable from its turn on.
        num_unnamed = 0 if is_on_wheel else running.num_unnamed(request)
        running.release(request, int(took_page), num_unnamed)
        request.become(RequestState.CANCELLED)

"""Prompts every few steps only, so that decodes run alone in between: vLLM's `prefill_schedule_interval`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvarts.core.sched.step import FOR_BUDGET, PASS, Acts, Ask, Step, Verdict

if TYPE_CHECKING:
    from kvarts.core.sched.scheduler import Scheduler

__all__ = ["PrefillCadence"]


class PrefillCadence:
    """Steps that compute prompts: at least `interval` steps after the last one, as in vLLM 0.33 without ranks.

    A step in which nothing decodes computes prompts all the same, and so does each step after one that left requests
    waiting, until a step leaves none.
    """

    __slots__ = ("_interval", "_last", "_resumed", "_scheduler", "is_full")

    def __init__(self, scheduler: Scheduler, interval: int) -> None:
        self._scheduler = scheduler
        self._interval = interval
        self._last = -interval
        """The last step that computed tokens of prompts."""
        self._resumed = 0
        """The chunked requests when the step was begun."""
        self.is_full = False
        """Whether the last step that could admit requests left some waiting."""

    def acts(self) -> Acts:
        """Return where it acts."""
        return Acts(
            gates={"cadence": self.may_begin},
            before=self.begin,
            closing=self.close,
            planned=self.count,
            changes=self.changes,
        )

    def begin(self, step: Step) -> None:
        """Decide whether the step computes prompts."""
        scheduler = self._scheduler
        prefill, running = scheduler.prefill, scheduler.running
        is_early = scheduler.wheel.step - self._last < self._interval and not self.is_full
        num_chunked = sum([request not in prefill.in_turn for request in running.chunked])
        prefill.is_held = is_early and running.num_running > num_chunked
        self._resumed = 0 if prefill.is_held else num_chunked

    def may_begin(self, ask: Ask, step: Step) -> Verdict:
        """Let the head pass if the step computes prompts, or if it has found all but its last token."""
        if self._scheduler.prefill.is_held and ask.hit_tokens < ask.num_known - 1:
            return FOR_BUDGET
        return PASS

    def close(self, step: Step) -> None:
        """Note whether requests still wait. A step that preempts admits none."""
        scheduler = self._scheduler
        if not scheduler.prefill.is_held and not scheduler.preemptor.preemptions:
            self.is_full = scheduler.waiting.num_waiting > 0

    def count(self, step: Step) -> None:
        """Note whether the step computes prompts."""
        has_resumed = self._resumed and step.chunks
        if has_resumed or any(chunk.start < chunk.num_known_tokens - 1 for chunk in step.chunks):
            self._last = self._scheduler.wheel.step

    def changes(self) -> bool:
        """Return whether the next step may compute prompts that the last one did not."""
        scheduler = self._scheduler
        return scheduler.waiting.num_waiting > 0 or bool(scheduler.running.chunked)

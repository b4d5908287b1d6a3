"""Batches above host memory, SGLang's HiCache: what a prompt finds there is loaded when the prompt is admitted.

A prompt is admitted as if what it finds in host memory were to be computed. Then that is loaded, if it is ten tokens or
more and there is room for all of it; else it is computed. Copies and loads that have ended are noted before a plan;
copies to host memory begin when the results of a step have been taken, loads with the step that needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvarts.core.config import BatchRules
from kvarts.core.kv.cache import Match
from kvarts.core.kv.hicache import HostRadixCache
from kvarts.core.parts.batches import Batches
from kvarts.core.request import Request
from kvarts.core.sched.step import PASS, Acts, Ask, Step, Verdict
from kvarts.core.tiers.hicache import HostCopies, HostMemory

if TYPE_CHECKING:
    from kvarts.core.kv.eviction import Path
    from kvarts.core.sched.state import SchedulerState

__all__ = ["BatchesOverHost"]


class BatchesOverHost(Batches):
    """Owner of what the head of the queue finds in host memory."""

    __slots__ = ("_copies", "_found", "_has_waited", "_tiered")

    def __init__(self, scheduler: SchedulerState, rules: BatchRules, host: HostMemory) -> None:
        super().__init__(scheduler, rules)
        assert isinstance(scheduler.cache, HostRadixCache)
        self._tiered: HostRadixCache = scheduler.cache
        self._copies = scheduler.host = HostCopies(scheduler.cache, host)
        self._found: Path = []
        """The runs of host memory alone that the head finds."""
        self._has_waited = False
        """Whether a request waited in the last plan: with nothing running, for copies to end."""

    def acts(self) -> Acts:
        """Return where it acts."""
        acts = super().acts()
        acts.starts = self.count
        return acts

    def begin(self, step: Step) -> None:
        """Note the copies that have ended, and begin a plan."""
        self._copies.begin_copies(step.now_ns)
        self._copies.end_copies(step.now_ns)
        super().begin(step)

    def _was_idle(self, step: Step) -> bool:
        return super()._was_idle(step) and not self._has_waited

    def find(self, ask: Ask, step: Step) -> Verdict:
        """Match the head, and tell what is on the device from what host memory alone has."""
        verdict = super().find(ask, step)
        if verdict is PASS:
            match = ask.match
            end = self._tiered.num_on_device(match)
            self._found = [node for node in match.nodes if node.start >= end]
            if self._found:
                here = match.nodes[: len(match.nodes) - len(self._found)]
                ask.match = Match(match.content, here, end, match.num_shared)
                ask.hit_tokens = end * self._page_size
        return verdict

    def fits(self, ask: Ask, step: Step) -> Verdict:
        """Let the head pass as Batches do, with what is loaded for it."""
        verdict = super().fits(ask, step)
        ask.below = None
        if verdict is not PASS or not self._found:
            return verdict
        if not self._tiered.load(self._found):
            return super().fits(ask, step)
        end = self._found[-1].end
        ask.below = ((self._copies.tier_names[0], end - ask.match.num_pages),)
        ask.match = Match(ask.match.content, [*ask.match.nodes, *self._found], end, end)
        ask.hit_tokens = end * self._page_size
        return PASS

    def count(self, ask: Ask, step: Step) -> None:
        """Count the tokens that are loaded for the head, which starts, as hits of host memory."""
        if ask.below is None:
            return
        request, num_loaded = ask.request, ask.below[0][1]
        start = ask.hit_tokens - num_loaded * self._page_size
        num_new = ask.hit_tokens - max(start, request.furthest_computed)
        if num_new > 0:
            request.cached_tokens_below = (sum(request.cached_tokens_below) + num_new,)

    def close(self, step: Step) -> None:
        """Begin the loads of the step, and take its memory."""
        self._copies.begin_loads(step.now_ns)
        super().close(step)
        self._has_waited = self._scheduler.waiting.num_waiting > 0

    def take_late(self, step: Step) -> None:
        """Take the results of the step before the one that was planned, with overlap, and begin their copies."""
        super().take_late(step)
        if self._overlaps:
            self._copies.begin_copies(step.now_ns)

    def end(self, completing: list[Request], end_ns: int) -> None:
        """Note the results of a step; without overlap, take them, and begin their copies."""
        super().end(completing, end_ns)
        if not self._overlaps:
            self._copies.begin_copies(end_ns)

    def changes(self) -> bool:
        """Return whether the next step may differ from the last one, or begins copies."""
        return bool(self._tiered.tiered.queued) or super().changes()

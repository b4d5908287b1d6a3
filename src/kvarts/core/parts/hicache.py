"""Batches above host memory, SGLang's HiCache: what a prompt finds there is loaded when the prompt is admitted.

A prompt is admitted as if what it finds in host memory were to be computed. Then that is loaded, if it is ten tokens or
more and there is room for all of it; else it is computed. Copies and loads that have ended are noted before a plan;
copies to host memory begin when the results of a step have been taken, loads with the step that needs them.

With storage below host memory, a request asks it when it enters the queue, also after a retraction. When it is looked
at, it may wait for what is read for it, and the requests behind it are looked at. One that finds less than when it
asked, because that was evicted, asks again, and waits for the next plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvarts.core.config import BatchRules
from kvarts.core.events import Blocked
from kvarts.core.kv.cache import Match
from kvarts.core.kv.hicache import HostRadixCache
from kvarts.core.parts.batches import FOR_PAGES, Batches
from kvarts.core.request import Request
from kvarts.core.sched.policy import QueuePolicy
from kvarts.core.sched.step import AGAIN, PASS, Acts, Ask, Step, Verdict, Wait
from kvarts.core.tiers.hicache import HostCopies, HostMemory

if TYPE_CHECKING:
    from kvarts.core.kv.eviction import Path
    from kvarts.core.sched.state import SchedulerState

__all__ = ["BatchesOverHost", "BatchesOverStorage"]

FOR_STORAGE: Final = Wait(Blocked.STORAGE)


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
        acts["starts"] = self.count
        return acts

    def begin(self, step: Step) -> None:
        """Note the copies that have ended, and begin a plan."""
        self._copies.begin_copies(step.now_ns)
        self._note_copies(step)
        super().begin(step)

    def _note_copies(self, step: Step) -> None:
        self._copies.end_copies(step.now_ns)

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
        request, end = ask.request, ask.hit_tokens
        below: list[int] = []
        for _, num_pages in reversed(ask.below):
            start = end - num_pages * self._page_size
            below.insert(0, max(0, end - max(start, request.furthest_computed)))
            end = start
        if any(below):
            so_far = request.cached_tokens_below or (0,) * len(below)
            request.cached_tokens_below = tuple(map(sum, zip(so_far, below, strict=True)))

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


class BatchesOverStorage(BatchesOverHost):
    """Owner of what is known of waiting requests, and of the pages that storage had for them."""

    __slots__ = ("_entered", "_fetched", "_has_skipped_all", "_queue", "_sent_back", "_storage")

    def __init__(self, scheduler: SchedulerState, rules: BatchRules, host: HostMemory) -> None:
        super().__init__(scheduler, rules, host)
        assert self._copies.storage is not None and isinstance(scheduler.waiting.policy, QueuePolicy)
        self._storage = self._copies.storage
        self._queue: QueuePolicy = scheduler.waiting.policy
        self._entered: set[Request] = set()
        """The waiting requests that have asked storage."""
        self._sent_back: list[Request] = []
        """Requests that are retracted in the step being planned."""
        self._fetched: dict[Request, tuple[int, int]] = {}
        """The pages that were read for requests last."""
        self._has_skipped_all = False
        """Whether all that wait were looked at in this step, and wait for storage."""

    def acts(self) -> Acts:
        """Return where it acts."""
        acts = super().acts()
        acts["started"] = self.start
        return acts

    def begin(self, step: Step) -> None:
        """Let requests that have come ask storage, note what it has done, and begin a plan."""
        now_ns, waiting = step.now_ns, self._scheduler.waiting
        if waiting.num_waiting > len(self._entered):
            for request in [each for each in waiting if each not in self._entered]:
                self._enter(request, now_ns)
        self._storage.run(now_ns)
        super().begin(step)

    def _note_copies(self, step: Step) -> None:
        self._storage.begin_round(step.now_ns)
        super()._note_copies(step)
        self._storage.note(step.now_ns)
        for request, hit_end in self._storage.due(self._queue):
            self._storage.ask_again(request, step.now_ns, hit_end)

    def _enter(self, request: Request, now_ns: int) -> None:
        self._entered.add(request)
        self._storage.enter(request, now_ns)

    def find(self, ask: Ask, step: Step) -> Verdict:
        """Match the head, unless it waits for storage, or asks again because its prefix was evicted."""
        if self._is_shut or not self._is_trying:
            return FOR_PAGES
        request, storage = ask.request, self._storage
        if not self._has_candidate():
            return FOR_STORAGE
        if storage.waits(request, step.now_ns):
            return self._skip()
        fetched = storage.take_fetched(request)
        if fetched is not None:
            self._fetched[request] = fetched
        verdict = super().find(ask, step)
        num_pages = self._found[-1].end if self._found else ask.match.num_pages
        if storage.has_lost(request, num_pages):
            storage.ask_again(request, step.now_ns)
            return self._skip()
        return verdict

    def _skip(self) -> Verdict:
        """Let the head wait, and look at the next request."""
        self._queue.num_skipped += 1
        self._note_candidates()
        return AGAIN if self._has_candidate() else FOR_STORAGE

    def _note_candidates(self) -> None:
        """Let the first request be the head again, of which nothing is asked, if all that wait are skipped."""
        if self._scheduler.waiting.num_waiting <= self._queue.num_skipped:
            self._has_skipped_all, self._queue.num_skipped = True, 0

    def _has_candidate(self) -> bool:
        return not self._has_skipped_all and super()._has_candidate()

    def fits(self, ask: Ask, step: Step) -> Verdict:
        """Let the head pass as above host memory; tell what has come there from storage for it."""
        verdict = super().fits(ask, step)
        if ask.below is not None:
            start, end = self._fetched.get(ask.request, (0, 0))
            ((host, num_pages),) = ask.below
            num_fetched = max(0, min(ask.match.num_pages, end) - max(ask.match.num_pages - num_pages, start))
            ask.below = (host, num_pages - num_fetched), (self._copies.tier_names[1], num_fetched)
        return verdict

    def start(self, request: Request, step: Step) -> None:
        """Count the prompt that begins, which asks storage no more."""
        self._entered.discard(request)
        self._storage.leave(request)
        if self._queue.num_skipped:
            self._note_candidates()
        super().start(request, step)

    def close(self, step: Step) -> None:
        """Take the memory of the step, and let retracted requests ask storage."""
        super().close(step)
        self._has_skipped_all, self._queue.num_skipped = False, 0
        self._storage.go_on()

    def _retract(self, step: Step) -> None:
        super()._retract(step)
        sent_back, self._sent_back = self._sent_back, []
        for request in sent_back:
            self._enter(request, step.now_ns)

    def _retract_one(
        self, request: Request, asker: Request, num_pages: int, now_ns: int, num_left: int, *, is_queued: bool = True
    ) -> None:
        super()._retract_one(request, asker, num_pages, now_ns, num_left, is_queued=is_queued)
        self._sent_back.append(request)

    def _take_results(self) -> None:
        ended = self._ended
        super()._take_results()
        for request in ended:
            self._fetched.pop(request, None)

    def drop(self, request: Request) -> None:
        """Forget a request that is about to be cancelled."""
        if request in self._entered:
            self._entered.remove(request)
            self._storage.give_up(request)
        self._fetched.pop(request, None)
        super().drop(request)

    def changes(self) -> bool:
        """Return whether the next step may differ from the last one, or notes something of storage."""
        num_waiting, storage = self._scheduler.waiting.num_waiting, self._storage
        if num_waiting > len(self._entered) or (num_waiting and storage.is_waited_for) or storage.has_news:
            return True
        return super().changes()

"""Pages for running requests, and the choice of the request that loses its pages when they are short."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from kvarts.core.event_log import Emit
from kvarts.core.events import Preemption
from kvarts.core.kv.cache import BlockTable, Cache, Mark
from kvarts.core.request import Request, RequestState
from kvarts.core.sched.page_source import PageSource
from kvarts.core.sched.policy import WaitingQueue
from kvarts.core.sched.running import Running

if TYPE_CHECKING:
    from kvarts.core.sched.loads import LowerTiers

__all__ = ["Planned", "Preemptor", "table_of"]

DECODING: Final = RequestState.DECODING
FINISHED: Final = RequestState.FINISHED
PREFILLING: Final = RequestState.PREFILLING


class Planned:
    """A chunk to compute in the step being planned: up to token `end`. `has_pages`: its pages are taken."""

    __slots__ = ("end", "has_pages", "request")

    def __init__(self, request: Request, end: int) -> None:
        self.request = request
        self.end = end
        self.has_pages = False


class Preemptor:
    """Takes pages for running requests, and preempts others for them.

    `preemptions`: those of the step being planned, in order. `gave_way`: those for other models since the last step was
    planned. `ends_steps`: a request that preempts itself ends the step for those admitted after it, as in vLLM 0.32 and
    not in 0.33.
    """

    __slots__ = (
        "_cache",
        "_emit",
        "_mark",
        "_page_blocks",
        "_page_size",
        "_pages",
        "_running",
        "_waiting",
        "ends_steps",
        "gave_way",
        "last_end_ns",
        "preemptions",
        "tiers",
    )

    def __init__(
        self,
        running: Running,
        waiting: WaitingQueue,
        cache: Cache,
        pages: PageSource,
        mark: Mark,
        emit: Emit | None,
    ) -> None:
        self._running = running
        self._waiting = waiting
        self._cache = cache
        self._pages = pages
        self._mark = mark
        self._emit = emit
        self.ends_steps = True
        self.tiers: LowerTiers | None = None
        self._page_size = running.wheel.page_size
        self._page_blocks = cache.page_blocks
        self.preemptions: list[Preemption] = []
        self.gave_way: list[Preemption] = []
        self.last_end_ns = 0
        """The end of the last step."""

    def take_due(self, num_due: int, now_ns: int) -> bool:
        """Take the `num_due` pages that decodes need in this step; return whether more can be planned in it."""
        cache = self._cache
        if num_due * self._page_blocks > cache.num_free:
            return self._take_in_turn(self._running.wheel.needing_page(), now_ns)
        if cache.names_decodes:
            cache.take_due([table_of(request) for request in self._running.wheel.needing_page()])
        else:
            cache.take_pages(num_due)
        return True

    def take_turns(self, unsettled: Sequence[Request], now_ns: int) -> bool:
        """Take the due pages in turn; decodes in `unsettled` first release, at their turn, the parts they no longer
        need.

        Return whether more can be planned in this step.
        """
        needing = self._running.wheel.needing_page()
        has = self._running.wheel.has
        turns = {request.admission: request for request in (*unsettled, *needing) if has(request)}
        return self._take_in_turn([turns[admission] for admission in sorted(turns)], now_ns, set(unsettled))

    def make_room(self, asker: Request, num_pages: int, now_ns: int, planned: dict[int, Planned]) -> bool:
        """Preempt until `num_pages` can be taken for a chunk of `asker`; return False if `asker` itself was preempted.

        The decodes have taken their pages for this step. `planned`: chunks of this step that have taken theirs and are
        not computed, by admission; those of preempted requests are removed.
        """
        while not self._can_take(num_pages) and not self.others_preempt_for(asker, num_pages):
            planned.pop(self._running.victim().admission, None)
            if self._preempt_for(asker, num_pages, now_ns, None) is asker:
                return False
        return True

    def _can_take(self, num_blocks: int) -> bool:
        """Return whether so many blocks are free; stores give up what they hold for it."""
        num_short = num_blocks - self._cache.num_free
        return num_short <= 0 or self._pages.reclaim_lent(num_short)

    def others_preempt_for(self, request: Request, num_pages: int) -> bool:
        """Return whether `num_pages` can be taken for running `request` now because other models gave way."""
        if self._running.victim().priority < request.priority:
            return False  # its own model has less important work, which is preempted first
        return self._pages.preempt_for(request, num_pages, to_admit=False)

    def give_way(self, num_victims: int, model: str, asker: int, num_pages: int) -> list[Request]:
        """Preempt the next `num_victims` victims, between steps, for request `asker` of `model`; return them.

        `num_pages`: the number of pages of this pool that would suffice for that request.
        """
        running = self._running
        victims = []
        for _ in range(num_victims):
            victim = running.victim()
            if victim.state is DECODING:
                victim.last_token_ns = self.last_end_ns
            running.leave(victim)
            num_used = self._cache.num_used
            preemption = Preemption(victim.index, asker, num_pages, num_pages, num_used, victim.num_computed, model)
            self.gave_way.append(preemption)
            self._send_back(victim, preemption)
            victims.append(victim)
        return victims

    def take_preemptions(self) -> tuple[Preemption, ...]:
        """Return all preemptions since the last plan, and begin again."""
        preempted = (*self.gave_way, *self.preemptions)
        self.gave_way, self.preemptions = [], []
        return preempted

    def _take_in_turn(self, turns: Iterable[Request], now_ns: int, unsettled: Collection[Request] = ()) -> bool:
        """Take a page for each decode that begins one, and preempt for it: there are not enough for all.

        `turns`: the decodes that begin a page and those in `unsettled`, in admission order.
        """
        cache, wheel, page_size = self._cache, self._running.wheel, self._page_size
        served: set[int] = set()
        for request in turns:
            if request.admission < 0:
                continue  # preempted for a request before it
            num_computed = wheel.num_computed(request)
            if request in unsettled:
                cache.free_skipped(table_of(request), num_computed, self._running.num_in_flight(request))
                cache.count()
            if num_computed % page_size:
                continue
            blocks = cache.begin_blocks(num_computed // page_size)
            while not self._can_take(blocks) and not self.others_preempt_for(request, blocks):
                admission = request.admission
                if self._preempt_for(request, blocks, now_ns, served) is request:
                    break
            else:
                served.add(request.index)
                cache.take_page(table_of(request), num_computed // page_size)
                continue
            if not self._goes_on_after(admission, now_ns):
                return False
        return True

    def _goes_on_after(self, admission: int, now_ns: int) -> bool:
        """Return whether the step goes on after the request of `admission` preempted itself.

        If not, requests admitted after it compute nothing.
        """
        if not self.ends_steps:
            return True
        running = self._running
        running.stall_after(admission, now_ns)
        for ended in running.ended:
            if ended.admission > admission:
                running.end_again(ended)
        return False

    def take_turn(self, request: Request, num_pages: int, now_ns: int, served: set[int]) -> bool:
        """Preempt until `num_pages` can be taken for decode `request`, at its turn; return whether the step goes on.

        `served`: the decodes that had their turns.
        """
        while not self._can_take(num_pages) and not self.others_preempt_for(request, num_pages):
            admission = request.admission
            if self._preempt_for(request, num_pages, now_ns, served) is request:
                return self._goes_on_after(admission, now_ns)
        return True

    def _preempt_for(self, asker: Request, num_pages: int, now_ns: int, served: set[int] | None) -> Request:
        """Preempt one request and return it. `served`: the decodes that took a page for this step; None for all."""
        self._cache.look(self._mark)
        running, cache = self._running, self._cache
        num_used = cache.num_used
        victim = running.victim()
        num_unused = 0
        has_turn = victim.state is not FINISHED or running.wheel.has(victim)
        is_decoding = has_turn and victim.state is not PREFILLING and victim not in running.stalled
        running.leave(victim)
        if is_decoding:
            if victim.state is DECODING:
                victim.last_token_ns = now_ns  # it sampled a token in the step that has just ended
            # It took a page for this step, but no longer takes part in it.
            if victim.num_computed % self._page_size == 0 and (served is None or victim.index in served):
                num_unused = 1
        # At its turn in the step, what it has filled before becomes findable.
        had_turn = has_turn and victim.admission < asker.admission
        num_unnamed = 0 if had_turn else running.num_unnamed(victim)
        preemption = Preemption(
            victim.index,
            asker.index,
            num_pages,
            num_pages - cache.num_free,
            num_used,
            victim.num_computed,
            num_promised=cache.num_promised,
        )
        self.preemptions.append(preemption)
        self._send_back(victim, preemption, num_unused, num_unnamed)
        return victim

    def _send_back(self, victim: Request, preemption: Preemption, num_unused: int = 0, num_unnamed: int = 0) -> None:
        """Return `victim`, which is off the wheel, to the waiting queue, unless it has ended."""
        table, tiers = table_of(victim), self.tiers
        if tiers is not None and victim.state is not FINISHED and not self._running.lag:
            is_kept = tiers.keep_state(victim.content, victim.num_computed, table)
            if is_kept and self._emit is not None:
                preemption = msgspec.structs.replace(preemption, keeps_state=True)
        if self._emit is not None:
            self._emit(preemption)
        self._running.release(victim, num_unused, num_unnamed)
        victim.num_preemptions += 1
        if victim.state is FINISHED:
            return
        if tiers is not None:
            tiers.preempted(victim.content, victim.num_computed // self._page_size - num_unnamed, table)
        victim.become(RequestState.PREEMPTED)
        victim.num_computed = 0
        self._waiting.push(victim)


def table_of(request: Request) -> BlockTable:
    """Return the block table of running `request`."""
    assert request.table is not None
    return request.table

"""Parts of pages that windows and chunks release between steps, in models whose layers keep less than every token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvarts.core.request import Request, RequestState
from kvarts.core.sched.preemption import table_of
from kvarts.core.sched.step import Acts, Step

if TYPE_CHECKING:
    from kvarts.core.kv.cache import FollowedDecodes
    from kvarts.core.sched.drafts import Drafts
    from kvarts.core.sched.handoffs import Handoffs
    from kvarts.core.sched.state import SchedulerState

__all__ = ["Settling"]

DECODING: Final = RequestState.DECODING


class Settling:
    """Owner of the releases of decodes: all are settled between two steps, or each at its turn.

    `places`: the places in a page at which a token no longer needs a page that the token before it needed. `waits`: the
    releases wait for the next step, as nothing else takes or releases parts between steps and could use them.
    """

    __slots__ = ("_drafts", "_handoffs", "_needs_turns", "_places", "_scheduler", "_unsettled", "_waits", "pending")

    def __init__(
        self,
        scheduler: SchedulerState,
        places: tuple[int, ...],
        *,
        waits: bool,
        handoffs: Handoffs | None,
        drafts: Drafts | None,
    ) -> None:
        self._scheduler = scheduler
        self._handoffs = handoffs
        self._drafts = drafts
        self._places = places
        self._waits = waits
        self.pending: list[Request] | None = None
        """The requests that completed their known tokens in the last step, if its decodes are not settled yet."""
        self._unsettled: list[Request] = []
        """Decodes whose releases are postponed to their turn in the next step, in the order of admission."""
        self._needs_turns = False
        """Whether it matters to the next step in which order the decodes, which are settled, take pages."""

    def acts(self) -> Acts:
        """Return where it acts."""
        return Acts(before=self.begin, turns=self.take_turns, after=self.end, changes=self.has_unsettled)

    def begin(self, step: Step) -> None:
        """Settle the last step before the next one."""
        self.settle()

    def take_turns(self, step: Step) -> bool:
        """Let decodes take pages in turn if some release at their turn; return whether they have."""
        unsettled = self._unsettled
        if self._needs_turns:
            decodes, self._needs_turns = self._scheduler.cache.decodes, False
            assert decodes is not None
            decodes.make_room_in_turns([table_of(request) for request in self._scheduler.wheel.needing_page()])
            return False
        if not unsettled:
            return False
        self._unsettled = []
        if not self._scheduler.preemptor.take_turns(unsettled, step.now_ns):
            step.is_cut = True
        return True

    def end(self, completing: list[Request], end_ns: int) -> None:
        """Settle a step that has ended, now or when the next one begins."""
        self.pending = completing
        handoffs = self._handoffs
        if not self._waits or (handoffs is not None and handoffs.has_any_between_steps):
            self.settle()

    def has_unsettled(self) -> bool:
        """Settle the last step; return whether decodes release at their turns in the next one."""
        self.settle()
        return self._needs_turns or bool(self._unsettled)

    def settle(self) -> None:
        """Begin the next step, if that is not done: let decodes release the parts that no later token attends to.

        All are in the order of admission. Requests that ended, or were given up since, have released everything before.
        As in vLLM, a request can use memory that another releases only if its turn in the next step is later. That
        makes a difference only if the pages that decodes begin in that step are not free yet, or not empty where what
        is released may become empty; then each decode releases at its turn. Chunked requests always do.
        """
        completed, self.pending = self.pending, None
        if completed is None:
            return
        scheduler = self._scheduler
        cache, wheel = scheduler.cache, scheduler.wheel
        joined = completed
        if completed:
            joined = [request for request in completed if request.state is DECODING or wheel.has(request)]
        if not cache.releases:
            if cache.decodes is not None:
                cache.decodes.end_step()
                for request in joined:
                    cache.decodes.start(table_of(request), request.num_computed, request.admission)
            return
        if not scheduler.pages.is_alone:
            cache.count()  # others may have taken free pages
        self._needs_turns = False
        if self._has_turns(joined):
            self._unsettled = self._settling(joined)
        if cache.decodes is not None:
            self._settle_followed(cache.decodes, joined)
        elif not self._unsettled:
            for request in self._settling(joined):
                num_in_flight = scheduler.running.num_in_flight(request)
                cache.free_skipped(table_of(request), wheel.num_computed(request), num_in_flight)
        if scheduler.running.lag:
            scheduler.running.joined = joined
        cache.count()

    def _has_turns(self, joined: list[Request]) -> bool:
        """Return whether it can matter in which order decodes, and those that `joined` them, release and take parts."""
        scheduler = self._scheduler
        cache, running = scheduler.cache, scheduler.running
        if scheduler.prefill.has_turns:
            others = [request.admission for request in (*running.chunked, *joined)]
            if others and running.has_decodes_after(min(others)):
                return True
        num_due = scheduler.wheel.pages_due() * cache.page_blocks
        if cache.orders_releases and num_due and not cache.has_empty(num_due):
            if cache.decodes is None or not (cache.decodes.counts_turns and scheduler.pages.is_alone):
                return True
            self._needs_turns = True
        return num_due > cache.num_free and num_due > cache.num_free + scheduler.pages.num_lent()

    def _settle_followed(self, decodes: FollowedDecodes, joined: list[Request]) -> None:
        """Settle decodes that the cache follows, and let those that `joined` them be followed."""
        running = self._scheduler.running
        if self._unsettled:
            decodes.defer_skipped([table_of(request) for request in self._unsettled if request not in joined])
        else:
            decodes.end_step()
        is_settled = not self._unsettled
        for request in joined:
            table, num_computed, admission = table_of(request), request.num_computed, request.admission
            if is_settled:
                decodes.begin_releases(table, num_computed, running.num_in_flight(request), admission)
            decodes.start(table, num_computed, admission, is_settled=is_settled)
        if self._needs_turns:
            self._needs_turns = is_settled and decodes.needs_turns(self._scheduler.wheel.pages_due())

    def _settling(self, joined: list[Request]) -> list[Request]:
        """Return the decodes that may release something now; those in `joined` come last."""
        scheduler, places = self._scheduler, self._places
        wheel, drafts = scheduler.wheel, self._drafts
        settling: list[Request] = []
        lag = scheduler.running.lag
        for place in places:
            last = (place + lag) % wheel.page_size
            if wheel.num_computing_at(last):
                settling += wheel.computing_at(last)
        if lag:
            # In the step before, these released only what none of the tokens of their chunk attended to.
            settling += [each for each in scheduler.running.joined if wheel.has(each) and each not in settling]
        if drafts is not None:
            settling += drafts.take_ahead()  # they may have passed such a place
        if len(places) > 1 or drafts is not None or lag:
            settling.sort(key=lambda request: request.admission)
        if joined:
            # They are on the wheel already; those admitted before them are first.
            settling = [request for request in settling if request not in joined]
        return [request for request in (*settling, *joined) if request.own is None]

"""Admissions where tiers lie below the device: requests with loads that have ended, and loads of the head."""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from typing import TYPE_CHECKING, Final

from kvarts.core.events import Admitted, Blocked
from kvarts.core.parts.chunk_ends import AlignedChunks
from kvarts.core.request import Request, RequestState
from kvarts.core.sched.preemption import table_of
from kvarts.core.sched.step import AGAIN, FOR_BUDGET, FOR_SEQS, PASS, TAKEN, Acts, Ask, Step, Verdict, Wait

if TYPE_CHECKING:
    from kvarts.core.kv.transfer import Loaded
    from kvarts.core.sched.loads import Loads
    from kvarts.core.sched.state import SchedulerState

__all__ = ["LoadAdmissions"]

FOR_PAGES: Final = Blocked.PAGES
LOADING: Final = RequestState.LOADING
RUNNING: Final = (RequestState.PREFILLING, RequestState.DECODING)


class LoadAdmissions:
    """The gates and hooks of `loads`. `aligned`: the rule of chunks that end at pages, or None.

    `num_kept`: the blocks that an admission leaves free if a request runs.
    """

    __slots__ = ("_aligned", "_loads", "_num_kept", "_page_size", "_scheduler")

    def __init__(self, scheduler: SchedulerState, loads: Loads, aligned: AlignedChunks | None, num_kept: int) -> None:
        self._scheduler = scheduler
        self._loads = loads
        self._aligned = aligned
        self._num_kept = num_kept
        self._page_size = scheduler.wheel.page_size
        scheduler.loads = loads
        scheduler.preemptor.tiers = loads.tiers
        scheduler.prefill.note_for(loads)
        scheduler.leaps.note_for(loads)
        loads.connect(scheduler.running, scheduler.prefill.num_planned, None if aligned is None else aligned.num_tokens)

    def acts(self) -> Acts:
        """Return where it acts."""
        loads = self._loads
        gates = {"kept states": self.resume_state, "memory": self.fits, "loads": self.load}
        if loads.holds_seat:
            gates["seats"] = self.has_seat
        acts = Acts(
            gates=gates,
            before=self.begin,
            entries=self.enter,
            starts=self.start,
            started=self.go_on,
            blocked=self.unblock,
            closing=self.store,
            ending=self.confirm,
            drops=self.drop,
            changes=self.changes,
            has_any=self.has_any,
        )
        if loads.settles_ends and self._scheduler.cache.releases:
            acts["finishes"], acts["leaving"] = self.settle_end, self.settle_left
            acts["given_up"] = self.settle_given_up
        return acts

    # Around the queue -----------------------------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """Process the loads that have ended, and let the tiers begin a step."""
        loads = self._loads
        loads.take_ended()
        loads.tiers.begin_step(step.now_ns)
        step.has_loaded = bool(loads.loaded or loads.fronts or loads.early)

    def enter(self, step: Step) -> None:
        """Compute fronts, then admit requests whose loads have ended, unless the head goes before these."""
        loads, waiting, prefill = self._loads, self._scheduler.waiting, self._scheduler.prefill
        for load in loads.fronts.copy():
            if step.budget > 0:
                step.budget -= prefill.compute_front(load, step.budget, step.chunks)
        head = waiting.head(step.now_ns) if waiting.num_waiting and not loads.holds_seat else None
        if head is None or head is not loads.retried:
            self._admit_loaded(step)

    def unblock(self, step: Step) -> Verdict:
        """Let requests behind the head run, if they have the memory that it waits for.

        vLLM's scheduler would plan nothing any more.
        """
        loads, scheduler = self._loads, self._scheduler
        if scheduler.blocked is Blocked.BUDGET and step.budget <= 0 and loads.holds_seat:
            if scheduler.num_seated >= scheduler.config.max_num_seqs:
                scheduler.blocked = Blocked.SEQS
        elif loads.retried is not None and scheduler.blocked is FOR_PAGES and loads.is_stuck:
            num_loaded = len(loads.loaded)
            self._admit_loaded(step)
            if not step.admitted and len(loads.loaded) < num_loaded:
                return AGAIN  # one of them has lost its memory
        return TAKEN if loads.is_blocking else PASS

    def store(self, step: Step) -> None:
        """Begin to store pages that the step leaves idle."""
        self._loads.tiers.plan_stores(step.now_ns)

    def confirm(self, end_ns: int) -> None:
        """Confirm to the tiers the pages that the step has filled."""
        self._loads.confirm()

    def changes(self) -> bool:
        """Return whether the next step computes fronts, or looks at loads that have ended."""
        return bool(self._loads.fronts) or self._loads.has_ended

    def has_any(self) -> bool:
        """Return whether a request waits for a load."""
        return self._loads.num_waiting > 0

    def settle_end(self, request: Request, end_ns: int) -> bool:
        """Let `request`, which ends, first release the pages that its windows have passed."""
        if request.own is None:
            self._release_passed(request, request.num_computed)
        return False

    def settle_left(self, request: Request) -> None:
        """Do the same for `request`, which ended before the last plan was made: its last token is known by now.

        A request that stops early still had a turn in that plan, and released the pages known to be passed then.
        """
        table = request.table
        if request.own is None and table is not None and not request.stops:
            if request.num_computed // self._page_size > table.num_named:
                self._scheduler.cache.publish(table, request.num_computed)
            self._release_passed(request, request.num_computed)

    def settle_given_up(self, request: Request) -> None:
        """Do the same for `request`, which is about to be cancelled."""
        scheduler = self._scheduler
        if not scheduler.running.lag and request.state in RUNNING and request.own is None:
            self._release_passed(request, scheduler.running.num_computed(request))

    def _release_passed(self, request: Request, num_computed: int) -> None:
        """Release the pages that the windows of `request`, which ends, have passed, before its others."""
        cache, table = self._scheduler.cache, table_of(request)
        cache.stop_decoding(table, max(table.num_pages, -(-num_computed // self._page_size)))
        cache.free_skipped(table, num_computed)
        cache.count()

    def drop(self, request: Request) -> bool:
        """Drop `request` if it loads, has loaded, or waits for another request's load; return whether that is so."""
        loads = self._loads
        if request.state in (LOADING, RequestState.LOADED):
            loads.cancel(request)
            self._scheduler.dropped(request)
        elif request in loads.following():
            loads.cancel(request)
            self._scheduler.end_below(request)
        else:
            return False
        return True

    # Gates ----------------------------------------------------------------------------------------------------

    def has_seat(self, ask: Ask, step: Step) -> Verdict:
        """Let the head pass if there is a place that no request takes which runs or loads."""
        scheduler = self._scheduler
        return PASS if scheduler.num_seated < scheduler.config.max_num_seqs else FOR_SEQS

    def resume_state(self, ask: Ask, step: Step) -> Verdict:
        """Let the head begin after its state, if that was kept when it was preempted, and not after its last page."""
        if ask.request.content.swapped_tokens:
            num_found = ask.hit_tokens
            ask.hit_tokens = hit_tokens_of(ask.request, ask.match.num_pages)
            ask.num_new += ask.hit_tokens - num_found
        ask.num_most = ask.num_new
        return PASS

    def fits(self, ask: Ask, step: Step) -> Verdict:
        """Let the head pass if its blocks are free; else load for it, if that takes fewer blocks than computing."""
        scheduler, loads = self._scheduler, self._loads
        verdict = scheduler.memory.fits(ask, step)
        if verdict is PASS or verdict is AGAIN:
            return verdict
        scheduler.memory.forget()
        num_to_load = loads.num_to_load(ask.request, ask.match, ask.num_known, ask.num_most, ask.num_kept)
        if num_to_load > scheduler.pages.num_free_to_admit(num_to_load):
            ask.least = min(ask.least, num_to_load)
            return verdict
        if not self._starts_load(ask, step):
            return verdict
        if not loads.holds_seat or loads.is_sync:
            self._go_on_after(ask.request, step)
        return TAKEN

    def load(self, ask: Ask, step: Step) -> Verdict:
        """Begin a load for the head, if the tiers have pages that are worth it; else let it pass."""
        scheduler, loads = self._scheduler, self._loads
        if self._starts_load(ask, step):
            if ask.request.state is LOADING and loads.holds_seat:
                scheduler.running.start_loading(ask.request)
            self._go_on_after(ask.request, step)
            return TAKEN
        if loads.num_short:
            if scheduler.pins is not None and scheduler.pins.num_pins and scheduler.pins.give_up_oldest():
                return AGAIN  # what prefills under way will take must stay free beside a load
            num_blocks = scheduler.cache.num_free + loads.num_short
            # With less, a step takes back what stores hold.
            ask.least = ask.num_wanted if loads.tiers.has_work else num_blocks
            return Wait(FOR_PAGES, num_blocks)
        return PASS if ask.num_new and not loads.is_short_of_tokens else FOR_BUDGET

    def _starts_load(self, ask: Ask, step: Step) -> bool:
        """Begin a load for the head, or let it wait for one; return whether it has left the queue."""
        request, scheduler = ask.request, self._scheduler
        num_behind = scheduler.waiting.num_waiting - 1
        if not self._loads.try_start(
            request, ask.match, ask.num_known, num_behind, step.now_ns, ask.num_kept, ask.num_most
        ):
            return False
        scheduler.take_from_waiting(request)
        return True

    # Starts ---------------------------------------------------------------------------------------------------

    def start(self, ask: Ask, step: Step) -> None:
        """Let the tiers drop the state of the head, which starts from it or without it."""
        if ask.request.content.swapped_tokens:
            self._loads.tiers.resumed(ask.request.content)

    def go_on(self, request: Request, step: Step) -> None:
        """Admit requests with loads that have ended after `request`, if it went before them."""
        if request is self._loads.retried:
            self._loads.retried = None
            self._admit_loaded(step)

    def _go_on_after(self, request: Request, step: Step) -> None:
        """Compute what `request`, whose load has begun, computes in this step."""
        loads = self._loads
        if loads.fronts and loads.fronts[-1].request is request:
            front = loads.fronts[-1]
            step.budget -= self._scheduler.prefill.compute_front(front, step.budget, step.chunks)
        elif loads.is_sync and request.state is LOADING:
            self._start_loaded(*loads.start_early(), step.budget, step)
        self.go_on(request, step)

    def _admit_loaded(self, step: Step) -> None:
        """Admit requests whose loads have ended, or can be used.

        Without places for loads, one that lacks a place or memory blocks the queue, and those behind it are. One whose
        load brought nothing waits again, as the head, before others whose loads have ended.
        """
        loads, prefill = self._loads, self._scheduler.prefill
        loads.is_blocking = False
        while step.budget > 0 and (loads.loaded or (loads.early and prefill.may_wait)):
            request = loads.loaded[0][0] if loads.loaded else loads.early[0].request
            most_tokens = step.budget
            if not loads.holds_seat:
                most_tokens = self._turn_of_first(step)
                if not most_tokens:
                    break
            if not prefill.has_room(request, request.num_prompt_tokens - 1, step.chunks):
                step.budget = 0
                break
            request, loaded = loads.loaded.pop(0) if loads.loaded else loads.start_early()
            self._start_loaded(request, loaded, most_tokens, step)

    def _turn_of_first(self, step: Step) -> int:
        """Return how many tokens the first request whose load has ended may compute; 0 if it does not run now."""
        scheduler, loads = self._scheduler, self._loads
        if scheduler.num_seated >= scheduler.config.max_num_seqs:
            return self._block(Blocked.SEQS)
        request, loaded = loads.loaded[0]
        if not loads.begin_turn(request, loaded):
            return 0
        num_new = self._aligned_after(request, loaded, min(step.budget, scheduler.prefill.most_tokens))
        if not num_new:
            return self._block(Blocked.BUDGET)
        most_tokens = self._most_to_run(request, num_new)
        if 0 < most_tokens < num_new:
            most_tokens = self._aligned_after(request, loaded, most_tokens)
        if most_tokens:
            return most_tokens
        if loads.is_stuck and loads.give_up_last():
            return self._turn_of_first(step)
        return self._block(FOR_PAGES)

    def _block(self, reason: Blocked) -> int:
        """Let the requests behind a loaded one wait with it, because of `reason`; return no tokens."""
        self._scheduler.blocked = reason
        self._loads.is_blocking = True
        return 0

    def _aligned_after(self, request: Request, loaded: Loaded, num_tokens: int) -> int:
        """Return how many of `num_tokens` tokens after its load the next chunk of `request` computes."""
        if self._aligned is None:
            return num_tokens
        start = loaded.num_pages * self._page_size
        branch = self._scheduler.cache.states.branch(table_of(request))
        return self._aligned.num_tokens(request, start, min(num_tokens, request.num_known - start), branch)

    def _most_to_run(self, request: Request, num_tokens: int) -> int:
        """Return how many tokens of `request`, which has had its load, may be computed: `num_tokens`, or 0 if they lack
        memory.

        If nothing runs or is loaded, nothing will release memory, since other requests that have had their loads hold
        the rest. Then it computes as many tokens as have room.
        """
        scheduler, loads = self._scheduler, self._loads
        pages, pins = scheduler.pages, scheduler.pins
        num_kept = self._num_kept if scheduler.running.num_running else 0
        num_wanted = loads.num_to_run(request, num_tokens) + num_kept
        while (num_short := num_wanted - pages.num_free_to_admit(num_wanted)) > 0:
            if pages.reclaim_lent(num_short):
                continue
            if pins is not None and pins.num_pins and pins.give_up_oldest():
                continue
            if not pages.preempt_for(request, num_wanted, to_admit=True):
                break
        else:
            return num_tokens
        if not loads.is_stuck:
            return 0
        num_free = scheduler.cache.num_free
        return bisect_right(range(1, num_tokens), num_free, key=partial(loads.num_to_run, request))

    def _start_loaded(self, request: Request, loaded: Loaded, most_tokens: int, step: Step) -> None:
        """Let `request` run, with its loaded pages, and compute at most `most_tokens` tokens."""
        scheduler, loads = self._scheduler, self._loads
        scheduler.memory.forget()
        hit_tokens = loads.resume(request, loaded)
        if request.content.swapped_tokens:
            hit_tokens = hit_tokens_of(request, loaded.num_pages)
        if scheduler.emit is not None:
            scheduler.emit(Admitted(request.index, request.content, loaded.num_pages, loads.by_name(loaded)))
        loads.begin_run(request)
        if request.content.swapped_tokens:
            loads.tiers.resumed(request.content)
        step.admitted.append(request.index)
        step.budget -= scheduler.prefill.start(request, hit_tokens, most_tokens, step.now_ns, step.chunks)


def hit_tokens_of(request: Request, num_pages: int) -> int:
    """Return the tokens that `request` need not compute after a match of `num_pages`.

    These are more than the pages have if its state was kept when it was preempted after them.
    """
    content = request.content
    swapped_tokens = content.swapped_tokens
    is_swapped = swapped_tokens // content.page_size == num_pages
    return swapped_tokens if swapped_tokens and is_swapped else num_pages * content.page_size

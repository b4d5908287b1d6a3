"""Requests that two engines work on: one computes the prompt, and the other generates.

The pages of the prompt stay in use on the first engine, *held*, until the second has copied them. On the second, pages
are *reserved* before the copy, and the request waits for a place with them when the copy is complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from kvarts.core.content import Content
from kvarts.core.event_log import Emit
from kvarts.core.events import (
    Admitted,
    Arrived,
    Blocked,
    ChunkComputed,
    LoadStarted,
    PromptHeld,
    PromptReleased,
    TransferEnded,
)
from kvarts.core.kv.cache import BlockTable, Cache, Match
from kvarts.core.request import Request, RequestState
from kvarts.core.sched.preemption import table_of
from kvarts.core.sched.step import AGAIN, PASS, TAKEN, Acts, Ask, Step, Verdict, Wait

if TYPE_CHECKING:
    from kvarts.core.sched.state import SchedulerState

__all__ = ["Handoffs"]

LOADED: Final = RequestState.LOADED
FOR_BUDGET: Final = Blocked.BUDGET
FOR_PAGES: Final = Blocked.PAGES
FOR_HANDOFFS: Final = Wait(Blocked.HANDOFFS)
WORKER: Final = "worker"
"""The medium from which handed-over pages come, in events."""
FIRST_COPY: Final = 1 << 32
"""The number of the first copy from another engine; transfers of tiers have smaller ones."""


class Handoffs:
    """An engine's requests that are shared with another engine. Written by the scheduler, and between steps.

    `connect` must follow. `emit` receives their events. `finds_prefixes`: whether requests find cached pages.
    """

    def __init__(self, cache: Cache, emit: Emit | None = None, *, finds_prefixes: bool = True) -> None:
        self._cache = cache
        self._finds_prefixes = finds_prefixes
        self._emit = emit
        self._num_copies = 0
        self._copies: dict[int, tuple[int, int]] = {}
        """The number of the copy of each request that has pages here, and the full pages that it brings, by index."""
        self.held: dict[int, Request] = {}
        """Requests whose prompt was computed here and is not copied yet, by index."""
        self.reserved: dict[int, Request] = {}
        """Requests with pages here that are not filled yet, by index."""
        self._copied: set[int] = set()
        """Indices of requests that wait with their pages."""
        self.is_gated = False
        """Whether only requests that other engines have computed are admitted."""
        self.passes_blocked = True
        """Whether such requests are admitted before a request that lacks pages."""
        self.has_any_between_steps = True
        """Whether pages are taken and released here between steps, for other engines."""
        self.join_tokens = 1
        """Tokens of the budget that each such request takes in the step that admits it."""
        self._joined: list[Request] = []
        self.late: list[Request] = []
        """Requests that joined in a step without tokens left for them."""
        self.resumed: list[Request] = []
        """Requests that were stalled and get a token in this step."""

    def connect(self, scheduler: SchedulerState) -> None:
        """Provide the scheduler."""
        self._scheduler = scheduler
        self._running = scheduler.running
        self._waiting = scheduler.waiting

    def acts(self) -> Acts:
        """Return where requests act that two engines work on."""
        return Acts(
            gates={"handoffs": self.admit},
            resumes=self.resume,
            blocked=self.pass_blocked,
            planned=self.count_joined,
            after=self.end_step,
            finishes=self.finish,
            drops=self.drop,
            has_any=lambda: self.has_any,
        )

    @property
    def has_any(self) -> bool:
        """Whether pages here are in use by requests that neither run nor wait."""
        return bool(self.held or self.reserved)

    # Where the prompt is computed ---------------------------------------------------------------------------

    def _hold(self, request: Request, end_ns: int) -> None:
        """Keep the pages of `request`, which has sampled its token at `end_ns`, until `release`."""
        request.last_token_ns = end_ns
        self._running.part(request)
        request.become(RequestState.HELD)
        self.held[request.index] = request
        if self._cache.frees_skipped:
            assert request.table is not None
            self._cache.free_skipped(request.table, request.num_prompt_tokens - 1)
            self._cache.count()
        if self._emit is not None:
            self._emit(PromptHeld(request.index))

    def release(self, request: Request, now_ns: int) -> None:
        """Release the pages of `request`, which are copied or no longer wanted."""
        del self.held[request.index]
        if self._emit is not None:
            self._emit(PromptReleased(request.index, now_ns))
        table = request.table
        assert table is not None
        self._cache.close(table, request.num_computed // table.content.page_size, table.num_pages)
        self._running.num_left += 1
        request.table = None
        request.become(RequestState.FINISHED)

    # Where tokens are generated -------------------------------------------------------------------------------

    def reserve(self, request: Request, now_ns: int) -> bool:
        """Take pages for the prompt of `request`, which is new here; return whether there are enough.

        Full pages that are resident are shared. The others cannot be found before `activate`.
        """
        cache, num_tokens = self._cache, request.num_prompt_tokens
        # The last token is computed again, from windows and states before it.
        most_tokens = num_tokens - 1 if cache.frees_skipped else num_tokens
        match = self.match(request.content, most_tokens)
        if cache.incoming.to_receive(match, num_tokens) > cache.num_free:
            return False
        request.hit_tokens = match.num_pages * request.content.page_size
        if self._emit is not None:
            self._emit_begun(self._emit, request, match.num_pages, now_ns)
        request.table = cache.incoming.open_to_receive(match, num_tokens)
        request.become(RequestState.LOADING)
        self.reserved[request.index] = request
        return True

    def match(self, content: Content, most_tokens: int) -> Match:
        """Return the pages of the first `most_tokens` tokens of `content` that a request finds here."""
        return self._cache.match(content, most_tokens // content.page_size if self._finds_prefixes else 0)

    def _emit_begun(self, emit: Emit, request: Request, num_hit_pages: int, now_ns: int) -> None:
        """Emit the event that `request` is here, and waits for its pages."""
        content, num_tokens, page_size = request.content, request.num_prompt_tokens, request.content.page_size
        asked = num_tokens, request.max_tokens, request.priority
        emit(Arrived(request.index, now_ns, content, *asked, request.request_id, 0))
        number = FIRST_COPY + self._num_copies
        self._num_copies += 1
        self._copies[request.index] = number, num_tokens // page_size - num_hit_pages
        coming = (WORKER, -(-num_tokens // page_size) - num_hit_pages)
        num_held = self._cache.incoming.num_sent(0, num_tokens, page_size)
        emit(LoadStarted(number, request.index, content, num_hit_pages, num_held, (coming,), now_ns))

    def activate(self, request: Request, now_ns: int) -> None:
        """Queue `request`, whose prompt is complete in its pages; these can be found from now on."""
        del self.reserved[request.index]
        table = request.table
        assert table is not None
        request.num_computed = request.num_prompt_tokens
        if self._emit is not None:
            number, num_pages = self._copies[request.index]
            self._emit(TransferEnded(number, request.index, num_pages, now_ns))
        self._cache.incoming.receive(table, request.num_computed)
        if (tiers := self._scheduler.tiers) is not None:
            num_full = min(request.num_computed // table.content.page_size, table.content.num_known_pages)
            tiers.confirm(table.content, num_full, table)
        self._copied.add(request.index)
        request.become(LOADED)
        self._waiting.push(request)

    def give_up(self, request: Request) -> None:
        """Release the pages of `request`, whether they are filled or not; it can be queued like any other."""
        num_filled = request.hit_tokens
        if request.index in self._copied:
            self._copied.remove(request.index)
            self._waiting.remove(request)
            num_filled = request.num_computed
        else:
            del self.reserved[request.index]
        table = request.table
        assert table is not None
        self._cache.close(table, num_filled // table.content.page_size, table.num_pages)
        self._running.num_left += 1
        request.table = None
        self._copies.pop(request.index, None)
        self.renew(request)

    def renew(self, request: Request) -> None:
        """Reset `request`, which has no pages any more, to a new one that knows the tokens generated so far."""
        request.hit_tokens = request.num_computed = request.front_tokens = 0
        request.cancelled_ns = -1
        request.state = RequestState.NEW

    def _has_pages_of(self, request: Request) -> bool:
        """Return whether `request` has pages here, filled or not, and does not run."""
        return request.index in self.reserved or request.index in self._copied

    # In a step ------------------------------------------------------------------------------------------------

    def admit(self, ask: Ask, step: Step) -> Verdict:
        """Let the head run if it has its pages; else let it pass, unless only such requests are admitted."""
        request = ask.request
        if request.state is LOADED:
            self._join(request, step)
            return AGAIN
        if self.is_gated:
            return FOR_HANDOFFS
        if self.reserved:
            self._scheduler.memory.forget()  # they reference pages that the head may hit
        return PASS

    def pass_blocked(self, step: Step) -> Verdict:
        """Let requests run that have their pages, if the head lacks some: it gets them sooner if these run."""
        scheduler = self._scheduler
        most_running = scheduler.config.max_num_seqs
        if scheduler.blocked is FOR_BUDGET and step.budget <= 0 and scheduler.num_seated < most_running:
            return self._judge_late(step)
        if self.passes_blocked and scheduler.blocked is FOR_PAGES:
            for ready in self.ready():
                if scheduler.num_seated >= most_running or step.budget <= 0:
                    break
                self._join(ready, step)
            if scheduler.num_seated >= most_running:
                scheduler.blocked = Blocked.SEQS  # as the next step would find
        return PASS

    def _judge_late(self, step: Step) -> Verdict:
        """Judge the head of the queue in a step without tokens left."""
        scheduler = self._scheduler
        head = scheduler.waiting.head(step.now_ns)
        if head.state is not LOADED:
            if self.is_gated:
                scheduler.blocked = Blocked.HANDOFFS
        elif not self.join_tokens:
            # As in Dynamo's mocker: one that needs no tokens still ends a step without any left.
            self._join(head, step)
            self.late.append(head)
            scheduler.blocked = Blocked.NOT
            return TAKEN
        return PASS

    def ready(self) -> list[Request]:
        """Return the waiting requests that have their pages, in the order of the queue."""
        return [request for request in self._waiting if request.state is LOADED]

    def _join(self, request: Request, step: Step) -> None:
        """Let `request` run: the last token of its prompt is computed again, with the decodes of this step."""
        scheduler = self._scheduler
        scheduler.take_from_waiting(request)
        self._copied.remove(request.index)
        if self._emit is not None:
            index, num_tokens = request.index, request.num_prompt_tokens
            coming = (WORKER, self._copies.pop(index)[1])
            self._emit(Admitted(index, request.content, num_tokens // request.content.page_size, (coming,)))
            self._emit(ChunkComputed(index, num_tokens - 1, num_tokens, num_tokens))
        self._running.enter(request, 0, step.now_ns)
        request.num_computed = request.num_prompt_tokens
        self._joined.append(request)
        scheduler.prefill.completing.append(request)
        step.admitted.append(request.index)
        step.budget -= self.join_tokens

    def resume(self, step: Step) -> None:
        """Return stalled decodes to the wheel, as far as there are tokens, when no prefill is left."""
        running, cache = self._running, self._cache
        if not running.stalled or running.chunked:
            return
        num_resumed = 0
        while running.stalled and num_resumed < step.budget:
            request = running.stalled[0]
            if request.num_computed % request.content.page_size == 0:
                blocks = cache.page_blocks
                preemptor = self._scheduler.preemptor
                if blocks > cache.num_free and not preemptor.make_room(request, blocks, step.now_ns, {}):
                    continue
                cache.take_page(table_of(request), request.num_computed // request.content.page_size)
            del running.stalled[0]
            running.wheel.join(request)
            self.resumed.append(request)
            num_resumed += 1
        step.budget -= num_resumed

    def count_joined(self, step: Step) -> None:
        """Count the requests that joined in this step as decodes of it."""
        joined = self._joined
        if joined:
            self._joined = []
            step.num_decodes += len(joined)
            step.known_tokens += sum(request.num_prompt_tokens for request in joined)
        step.num_joined = len(joined) + len(self.resumed)

    def end_step(self, completing: list[Request], end_ns: int) -> None:
        """Record, at the end of a step, the requests that got no tokens, and those that got tokens again.

        A request that joined after one that used up the budget gets no tokens until that one's prefill is complete, as
        in Dynamo's mocker.
        """
        if not (self.late or self.resumed):
            return
        running = self._running
        for request in self.resumed:
            request.stalls_ns += (end_ns - request.last_token_ns,)
        self.resumed = []
        if running.chunked:
            for request in self.late:
                if request.state is RequestState.DECODING:
                    running.wheel.leave(request)
                    request.last_token_ns = end_ns
                    running.stalled.append(request)
        self.late = []

    def finish(self, request: Request, end_ns: int) -> bool:
        """Hold `request`, which has generated its last token, if another engine goes on with it."""
        if not request.is_handed_over:
            return False
        self._hold(request, end_ns)
        return True

    def drop(self, request: Request) -> bool:
        """Drop `request` if it has pages here and does not run; return whether that is so."""
        if not self._has_pages_of(request):
            return False
        self.give_up(request)
        request.become(RequestState.CANCELLED)
        self._scheduler.dropped(request)
        return True

    # Laws -----------------------------------------------------------------------------------------------------

    def tables(self) -> Iterator[tuple[BlockTable, int]]:
        """Return the block tables of held, reserved, and waiting requests with pages. Assert that states fit."""
        for requests, state in ((self.held, RequestState.HELD), (self.reserved, RequestState.LOADING)):
            for request in requests.values():
                assert request.state is state, f"{request!r} should be {state.name}"
        for request in (*self.held.values(), *self.reserved.values(), *self.ready()):
            assert request.table is not None
            yield request.table, request.table.num_pages

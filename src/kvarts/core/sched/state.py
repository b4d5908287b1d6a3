"""What a scheduler shares with its parts: its queues, its collaborators, and questions about the requests here."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from kvarts.base.limits import MOST_COUNT
from kvarts.core.config import EngineConfig
from kvarts.core.event_log import Emit
from kvarts.core.events import Blocked
from kvarts.core.kv.cache import Cache, Mark, Pins
from kvarts.core.parts.session_pages import SessionPagesInUse
from kvarts.core.request import Request, RequestState
from kvarts.core.sched.horizon import Horizon
from kvarts.core.sched.memory import Memory, PartOfMemory
from kvarts.core.sched.page_source import PageSource
from kvarts.core.sched.policy import WaitingQueue
from kvarts.core.sched.preemption import Preemptor
from kvarts.core.sched.prefill import Prefill
from kvarts.core.sched.running import Running
from kvarts.core.sched.step import Hooks

if TYPE_CHECKING:
    from kvarts.core.sched.loads import Loads
    from kvarts.core.sched.lower_tiers import LowerTiers, TiersBelow
    from kvarts.core.tiers.hicache import HostCopies

__all__ = ["SchedulerState"]

NOT_BLOCKED: Final = Blocked.NOT
RUNNING: Final = (RequestState.PREFILLING, RequestState.DECODING)


class SchedulerState:
    """Owner of the queues. Written by the scheduler and its parts.

    `cache`: the pages, counted in blocks (Cache). `pages`: the source of pages and of the token budget. `waiting`: the
    queue; its policy chooses the next request. `running`: the requests that run, in the order in which they are
    preempted; plans name pages, rows and tokens if it has a batch. `emit` receives page and request events. `pins`:
    pages that are kept in use without a request, or None. `finds_prefixes`: whether requests find cached pages.
    `num_kept`: blocks that an admission leaves free if a request runs.

    `hooks` follows: the gates of the head of the queue, and what parts do in a step.
    """

    def __init__(
        self,
        config: EngineConfig,
        cache: Cache,
        pages: PageSource,
        waiting: WaitingQueue,
        running: Running,
        *,
        emit: Emit | None = None,
        pins: Pins | None = None,
        finds_prefixes: bool = True,
        num_kept: int = 0,
    ) -> None:
        self.config = config
        self.cache = cache
        self.pages = pages
        self.pins = pins
        self.waiting = waiting
        self.emit = emit
        self.running = running
        self.wheel = running.wheel
        self.session_pages = SessionPagesInUse(cache, emit)
        self.mark = Mark()
        self.mark.parts = cache.counts()
        self.preemptor = Preemptor(running, waiting, cache, pages, self.mark, emit)
        self.prefill = Prefill(running, cache, self.session_pages, self.preemptor, batch=running.batch, emit=emit)
        gates = Memory if pages.is_alone else PartOfMemory
        self.memory = gates(cache, pages, running, self.prefill, pins, num_kept=num_kept, finds_prefixes=finds_prefixes)
        self.leaps = Horizon(running, waiting, cache, pages, orders_matter=emit is not None)
        self.loads: Loads | None = None
        """Requests that wait for a tier below the device."""
        self.host: HostCopies | None = None
        """Host memory that no request waits for."""
        self.max_model_len = MOST_COUNT
        """The most tokens of a request, if a part plans for that many."""
        self.lookahead = 0
        """The tokens after a page on which its name depends, in the contents of requests."""
        self.hooks = Hooks((self.memory.find, self.memory.fits))
        self.blocked = NOT_BLOCKED
        """Why the head waits; NOT also if no request waits, or if the head was not examined since a change."""
        self.emitted_blocked: tuple[int, Blocked] | None = None
        """The head that was reported last as waiting, and why."""

    def take_from_waiting(self, request: Request) -> None:
        """Remove `request` from the waiting queue, because it begins to run or to load."""
        self.waiting.remove(request)
        self.memory.forget()
        self.emitted_blocked = None

    def cancel(self, request: Request) -> None:
        """Remove a waiting or running request, between steps; its pages are free at once.

        The pages of a request with a load under way are free when the load has ended.
        """
        if request.state in RUNNING:
            self.running.leave(request)
            self.running.release(request, num_unnamed=self.running.num_unnamed(request))
        else:
            for drop in self.hooks.drops:
                if drop(request):
                    return
            if request.own is None:
                self.waiting.remove(request)
            else:
                self.session_pages.waiting.remove(request)
        request.become(RequestState.CANCELLED)
        self.dropped(request)

    def dropped(self, request: Request) -> None:
        """Note that `request` is here no more: the head may have its place or memory."""
        self.end_below(request)
        self.blocked = NOT_BLOCKED

    def end_below(self, request: Request) -> None:
        """Let the tiers drop the pages that only `request`, which has ended, could find."""
        if request.num_preemptions and self.loads is not None:
            self.loads.tiers.ended(request.content)

    # What is here -----------------------------------------------------------------------------------------

    @property
    def tiers(self) -> LowerTiers | None:
        """The tiers below the device that requests wait for."""
        return None if self.loads is None else self.loads.tiers

    @property
    def below(self) -> TiersBelow | None:
        """The tiers below the device, whether requests wait for them or not."""
        return self.host if self.loads is None else self.loads.tiers

    @property
    def waiting_with_pages(self) -> deque[Request]:
        """Requests that bring their pages along: they wait for a place and for tokens, and never for memory."""
        return self.session_pages.waiting

    @property
    def has_sides(self) -> bool:
        """Whether `side_counts` is not empty."""
        return bool(self.cache.counts()) or self.below is not None

    @property
    def has_work(self) -> bool:
        """Whether a request runs or waits."""
        return self.running.num_running > 0 or self.has_others

    @property
    def has_others(self) -> bool:
        """Whether a request waits or loads, or is in the hands of another engine."""
        if self.waiting.num_waiting or self.session_pages.waiting:
            return True
        return any(has_any() for has_any in self.hooks.has_any)

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait for admission or for a load."""
        num_loading = 0 if self.loads is None else self.loads.num_waiting
        return self.waiting.num_waiting + len(self.session_pages.waiting) + num_loading

    @property
    def num_seated(self) -> int:
        """The number of requests that take a place: running ones, and those whose load is under way or has ended.

        Without places for loads, only running ones.
        """
        loads = self.loads
        return self.running.num_running + (0 if loads is None or not loads.holds_seat else loads.num_requests)

    def side_counts(self) -> tuple[int, ...]:
        """Return the used and cached counts of each tier below the device, then of each KV group, in pairs."""
        counts = self.cache.counts()
        return counts if self.below is None else self.below.num_pages() + counts

    def side_counts_at_mark(self) -> tuple[int, ...]:
        """Return the same at the mark of the last scheduled step."""
        return self.mark.parts if self.below is None else self.below.num_pages() + self.mark.parts

    def num_evicted_parts(self) -> tuple[int, ...]:
        """Return the number of evicted parts of each KV group."""
        return self.cache.num_evicted_parts()

    def most_tokens(self, limit: int) -> int:
        """Return the longest sequence, of up to `limit` tokens, that can run in this memory; 0 if none can."""
        return self.cache.needs.most_tokens(limit, self.wheel.page_size)

    def num_pages_of_chunked(self) -> int:
        """Return the most blocks that the rest of the chunked requests takes at one time."""
        num_blocks = 0
        for request in self.running.chunked:
            if request.table is not None:
                num_known = request.num_prompt_tokens + request.num_output_tokens
                num_blocks += self.cache.needs.to_finish(request.table, num_known)
        return num_blocks

    def num_pages_to_admit(self) -> int:
        """Return how many blocks all waiting requests need, hits included; 0 while none could be admitted.

        While the maximum number of requests runs, or admission is suspended, no number of free pages would help.
        """
        if self.pages.is_draining or self.num_seated >= self.config.max_num_seqs:
            return 0
        return self.waiting.num_waiting_blocks

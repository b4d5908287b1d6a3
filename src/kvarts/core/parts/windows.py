"""Batches of a model some of whose layers have sliding windows, as SGLang's, with a pool of its own for their KV.

A prompt is admitted if the pages that it lacks are free as without windows, and if its *window KV* is free: what a
chunk has beyond a window, a window or all that it will ever have, and a page. Nothing of that is promised to running
requests; admission is tried in every step. A prompt that would lack window KV even of an empty pool gets a shorter
chunk, and one that goes on waits, while decodes go first, until there is window KV for a page of it.

Decodes free the window KV that has left their windows, once it is of 128 tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvarts.core.config import SLIDE_TOKENS, BatchRules
from kvarts.core.kv.components import ComponentMatch
from kvarts.core.kv.windows import HeldWindow, WindowRadixCache
from kvarts.core.parts.batches import FOR_PAGES, MOST_PROMISED, Batches
from kvarts.core.request import Request, RequestState
from kvarts.core.sched.step import PASS, Ask, Step, Verdict

if TYPE_CHECKING:
    from kvarts.core.sched.state import SchedulerState

__all__ = ["BatchesWithWindows"]


class BatchesWithWindows(Batches):
    """Owner of the window KV that is promised to prompts of the step being planned."""

    __slots__ = ("_promised_windows", "_window", "_windows")

    def __init__(self, scheduler: SchedulerState, rules: BatchRules) -> None:
        super().__init__(scheduler, rules)
        assert isinstance(scheduler.cache, WindowRadixCache)
        self._windows: WindowRadixCache = scheduler.cache
        self._window = rules.window
        self._promised_windows = 0
        """Tokens of window KV that prompts of the step being planned may have at once."""

    def begin(self, step: Step) -> None:
        """Begin a plan, with admission open."""
        self._is_shut = False
        self._promised_windows = 0
        super().begin(step)

    # Admission --------------------------------------------------------------------------------------------

    def _window_room(self) -> int:
        """Return the tokens of window KV that are free and not promised."""
        return self._windows.num_window_free * self._page_size - self._promised_windows

    def _need(self, num_tokens: int, num_new: int) -> int:
        """Return the tokens of window KV that a prompt with so many to compute, and to generate, may have at once."""
        window = self._window
        return max(min(num_tokens, self._budget) - window, 0) + min(num_tokens + num_new, window) + self._page_size

    def _most_of_chunk(self) -> int:
        """Return 0 if there is no window KV for a page more, or no memory."""
        return max(0, min(self._budget, int(self._room()), self._window_room() - self._page_size))

    def _has_room(self) -> bool:
        return super()._has_room() and self._window_room() > 0

    def fits(self, ask: Ask, step: Step) -> Verdict:
        """Let the head pass as Batches do, if its window KV is free as well; or with a chunk for which it is."""
        verdict = super().fits(ask, step)
        if verdict is FOR_PAGES:
            return verdict
        assert isinstance(ask.match, ComponentMatch)
        most = self._most_of_prompt(ask, self._windows.windowed.num_idle(ask.match))
        if most is None and not (self._running or step.chunks or self._chunked or self._completed or self._ended):
            # SGLang never admits it: what the head finds is in use, and leaves too little.
            ask.match, ask.hit_tokens = ComponentMatch(ask.match.content, [], 0, 0, [], 0), 0
            verdict, most = super().fits(ask, step), self._most_of_prompt(ask, 0)
        if most is None or verdict is FOR_PAGES:
            self._is_shut = True
            return FOR_PAGES
        if verdict is PASS:
            step.budget = min(step.budget, most)
        return verdict

    def _most_of_prompt(self, ask: Ask, num_kept: int) -> int | None:
        """Return the most tokens of the head's chunk, if it keeps `num_kept` pages of window KV; None: it waits."""
        page_size, request = self._page_size, ask.request
        num_tokens = -(-(ask.num_known - ask.hit_tokens) // page_size) * page_size
        num_new = min(request.max_tokens - request.num_output_tokens, MOST_PROMISED)
        need, room = self._need(num_tokens, num_new), self._window_room() - num_kept * page_size
        most = self._budget
        if need >= room:
            if need < self._windows.windowed.num_units * page_size:
                return None
            most = min(most, (room - self._need(0, num_new)) // page_size * page_size)
        if most < num_tokens and self._scheduler.running.chunked:
            return None  # SGLang computes a chunk of it, and takes the prompt of the other one for computed
        return most if most > 0 else None

    def _charge(self, request: Request, num_tokens: int) -> None:
        is_last = request not in self._scheduler.running.chunked
        num_paged = -(-num_tokens // self._page_size) * self._page_size
        self._promised_windows += self._need(num_paged, min(request.max_tokens, MOST_PROMISED) if is_last else 0)
        super()._charge(request, num_tokens)

    def changes(self) -> bool:
        """Return whether the next step may differ from the last one: a waiting request is looked at in each."""
        scheduler = self._scheduler
        if scheduler.running.chunked:
            return True
        may_admit = scheduler.running.num_running < scheduler.config.max_num_seqs
        return (may_admit and scheduler.waiting.num_waiting > 0) or super().changes()

    # Windows ----------------------------------------------------------------------------------------------

    def _free_skipped(self) -> None:
        """Free the window KV that has left the windows of decodes, but for those that decode for the first time."""
        for request in self._running:
            assert request.table is not None
            held = self._windows.held_window(request.table)
            is_first, held.end = held.end < 0, request.num_prompt_tokens + self._num_generated(request) - 1
            if not is_first:
                self._windows.slide(request.table, held, held.end, SLIDE_TOKENS)

    def _retract_one(
        self, request: Request, asker: Request, num_pages: int, now_ns: int, num_left: int, *, is_queued: bool = True
    ) -> None:
        """Take a request's memory, as Batches do; where pages suffice, window KV is lacking: no page is asked for."""
        num_asked = num_pages if num_pages > self._windows.num_free else 0
        super()._retract_one(request, asker, num_asked, now_ns, num_left, is_queued=is_queued)

    def end(self, completing: list[Request], end_ns: int) -> None:
        """Note the results of a step, and of those before it that were not planned one by one."""
        num_more = self._scheduler.wheel.step - self._turn
        if num_more > 0:
            for request in self._running:
                if request.table is not None:
                    self._slide_to(request, self._windows.held_window(request.table), num_more)
        super().end(completing, end_ns)

    def _slide_to(self, request: Request, held: HeldWindow, num_steps: int) -> None:
        """Free what leaves the window of a decode in so many steps after the planned one, when it is due."""
        assert request.table is not None and held.end >= 0
        last = held.end + num_steps
        while True:
            due = max(held.num_slid * self._page_size + self._window + SLIDE_TOKENS, held.end + 1)
            if due > last:
                break
            held.end = due
            self._windows.slide(request.table, held, due, SLIDE_TOKENS)
        held.end = last

    def _insert(self, request: Request) -> None:
        """Make the computed pages of `request` findable, unless a prompt that goes on waited in the last step."""
        assert request.table is not None
        num_computed = request.num_computed
        if num_computed > self._windows.held_window(request.table).num_inserted:
            self._windows.insert_computed(request.table, num_computed, is_over=request.state is RequestState.FINISHED)

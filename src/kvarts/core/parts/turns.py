"""Prompts of which several are computed at a time: long ones in parts, and the turns of decodes admitted after them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvarts.base.limits import MOST_COUNT
from kvarts.core.events import DecodesStalled
from kvarts.core.sched.step import Acts, Step

if TYPE_CHECKING:
    from kvarts.core.sched.state import SchedulerState

__all__ = ["TurnsAfterChunks"]


class TurnsAfterChunks:
    """Turns of decodes that were admitted after a chunked request, as in vLLM: after that request's.

    `threshold`: the most tokens of a prompt in a step, unless it is alone; 0 for no such limit. `orders`: whether
    nothing else gives decodes their turns, as drafts do.
    """

    __slots__ = ("_orders", "_page_size", "_scheduler", "_threshold")

    def __init__(self, scheduler: SchedulerState, threshold: int, *, orders: bool = True) -> None:
        self._scheduler = scheduler
        self._orders = orders
        self._page_size = scheduler.wheel.page_size
        self._threshold = threshold
        scheduler.prefill.has_turns = True

    def acts(self) -> Acts:
        """Return where it acts."""
        return Acts(before=self.begin, planned=self.count)

    def begin(self, step: Step) -> None:
        """Limit the chunks of long prompts, and let decodes have their turns after chunked requests."""
        scheduler = self._scheduler
        prefill = scheduler.prefill
        if self._threshold:
            is_alone = scheduler.running.num_running + scheduler.num_waiting == 1
            prefill.most_tokens = MOST_COUNT if is_alone else self._threshold
        if prefill.in_turn:
            prefill.let_in_turn([])
        if self._orders and scheduler.running.chunked:
            self._order(step)

    def _order(self, step: Step) -> None:
        """Let decodes that were admitted after a chunked request take their turns after it, if that can matter.

        It matters if memory may be short, if parts are released at a turn, or if a page may be evicted that a request
        fills again in this step: it is lost only if its last copy goes first. Otherwise decodes come first.
        """
        scheduler = self._scheduler
        running, cache, prefill = scheduler.running, scheduler.cache, scheduler.prefill
        first = running.chunked[0]
        if not cache.releases:
            num_pages = scheduler.wheel.pages_due()
            for request in running.chunked:
                num_left = request.num_prompt_tokens + request.num_output_tokens - request.num_computed
                num_pages += min(num_left, prefill.most_tokens) // self._page_size + 2
            num_blocks = num_pages * cache.page_blocks
            if num_blocks <= cache.num_free and (cache.has_empty(num_blocks) or not running.may_repeat()):
                return
        if running.has_decodes_after(first.admission):
            in_turn = running.stall_after(first.admission, step.now_ns)
            if scheduler.emit is not None:
                scheduler.emit(DecodesStalled(first.index))
            if running.batch is None:  # an executor of tokens computes them as chunks
                prefill.let_in_turn(in_turn)

    def count(self, step: Step) -> None:
        """Count decodes that had their turns among chunks as decodes of the step."""
        prefill = self._scheduler.prefill
        if turned := prefill.turned:
            step.num_decodes += len(turned)
            step.known_tokens += sum(turned)
            prefill.turned = []

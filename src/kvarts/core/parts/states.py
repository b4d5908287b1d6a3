"""Batches of a model with states, as SGLang's: a running request has slots for its state, and for those it inserts.

The head of the queue takes a slot for the state that it finds before it is known whether it is admitted; there are
slots for as many requests as may run. Without *buffers*, a request inserts all that it has computed, with its state.
With them, a chunk of a prompt leaves a state where its last whole part of `state_chunk` tokens ends, or earlier, where
the longest prefix that was found without states ends, and inserts its tokens up to there. An answer is inserted up to
the last multiple of `track_interval` tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvarts.core.config import BatchRules
from kvarts.core.kv.states import HeldState, StateRadixCache
from kvarts.core.parts.batches import Batches
from kvarts.core.request import Request, RequestState
from kvarts.core.sched.step import PASS, Ask, Step, Verdict

if TYPE_CHECKING:
    from kvarts.core.sched.state import SchedulerState

__all__ = ["BatchesWithStates"]


class BatchesWithStates(Batches):
    """Owner of the slots that the requests that start in a step take together."""

    __slots__ = ("_chunk", "_interval", "_starting", "_states")

    def __init__(self, scheduler: SchedulerState, rules: BatchRules) -> None:
        super().__init__(scheduler, rules)
        assert isinstance(scheduler.cache, StateRadixCache)
        self._states: StateRadixCache = scheduler.cache
        self._chunk, self._interval = rules.state_chunk, rules.track_interval
        self._starting: list[Request] = []

    def find(self, ask: Ask, step: Step) -> Verdict:
        """Match the head as Batches do, and take a slot for the state that it finds."""
        verdict = super().find(ask, step)
        if verdict is PASS:
            self._states.disclaim()
            self._states.claim(ask.match)
        return verdict

    def start(self, request: Request, step: Step) -> None:
        """Count the prompt that begins in this step."""
        self._starting.append(request)
        super().start(request, step)

    def close(self, step: Step) -> None:
        """Take the slots and the memory of the prompts of this step, or the memory of its decodes."""
        self._states.disclaim()
        if self._starting:
            self._states.take_rest([request.table for request in self._starting if request.table is not None])
            self._starting = []
        super().close(step)

    def _insert(self, request: Request) -> None:
        """Make the tokens of `request` findable up to the last one after which it has a state for others."""
        table = request.table
        assert table is not None
        held, end = self._states.held_state(table), request.num_computed
        num_pages = self._num_tracked(held, end) // self._page_size
        held.num_inserted = end
        held.is_answering = request.state is RequestState.DECODING
        if num_pages > table.num_named:
            self._states.insert_state(table, num_pages, is_over=request.state is RequestState.FINISHED)

    def _num_tracked(self, held: HeldState, end: int) -> int:
        """Return the tokens before the last state for others, of `end` that were computed; 0 without a new one."""
        start, chunk = held.num_inserted, self._chunk
        if not chunk:
            return end
        if held.is_answering:
            last = end // self._interval * self._interval
            return last if last > start else 0
        last = start + (end - start) // chunk * chunk
        branch = held.branch * self._page_size // chunk * chunk
        if start < branch <= last and (branch - start) % chunk == 0:
            return branch
        return last if last > start else 0

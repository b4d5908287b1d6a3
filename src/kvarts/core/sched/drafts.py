"""Drafts: guessed tokens after those of the decodes, computed in the same step and accepted as far as they are right.

A decode computes the token that was sampled last, and samples the next. If the next tokens can be guessed, one step
computes them all: the token sampled at each position shows whether the guess that follows was right. So a step may
count several tokens of a request, each of them the one that would have been sampled without a draft.

Drafts come last in a step. They take only tokens and pages that are left, and no request is preempted for them. At the
end of the step, accepted tokens are counted, and pages that contain only rejected ones are released.

With `num_slots`, drafts are planned first, as in vLLM: each decode takes the pages of its draft at its turn, requests
are preempted for them, and what is left of the budget is for prompts. A request keeps the pages of rejected tokens for
its next ones, and pages that accepted tokens fill can be found from its next turn on. Pages that its windows have
passed are released at its turn as well, before it takes others; so a page that a window passes with the tokens that
fill it is not found in the group of that window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvarts.base.errors import ConfigError
from kvarts.core.events import DraftJudged, DraftTaken
from kvarts.core.kv.cache import BlockTable
from kvarts.core.request import Request, RequestState
from kvarts.core.sched.input_batch import NewPage
from kvarts.core.sched.plan import Batch, DecodeRows, DraftRows, StepResult
from kvarts.core.sched.preemption import table_of
from kvarts.core.sched.step import FOR_BUDGET, PASS, Acts, Ask, Step, Verdict

if TYPE_CHECKING:
    from kvarts.core.sched.state import SchedulerState

    Tokens = npt.NDArray[np.uint64]
else:
    Tokens = Any

__all__ = ["DraftTotals", "Drafter", "Drafts"]


class Drafter(Protocol):
    """Guesses how sequences continue. Promises: to depend only on the calls of its methods, in their order."""

    def draft(self, request: Request, num_most: int, batch: Batch) -> Tokens:
        """Return tokens that may follow the known ones of `request`, at most `num_most`, perhaps none.

        All known tokens are in the content of the request. `batch`: the step, with the tokens drafted so far for other
        requests.
        """

    def judge(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Record how many of the tokens that were drafted for `request` were right."""


def _num_named(request: Request) -> int:
    return table_of(request).num_named


class DraftTotals(msgspec.Struct, frozen=True):
    """Totals of drafts so far: drafts, drafted tokens, and accepted tokens."""

    num_drafts: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0

    def __str__(self) -> str:
        return f"{self.num_accepted_tokens:,} of {self.num_drafted_tokens:,} guessed tokens were right"


class Drafts:
    """Owner of the drafts of the scheduled step, from the allocation of their pages to the accepted tokens."""

    def __init__(self, scheduler: SchedulerState, drafter: Drafter, num_slots: int = 0) -> None:
        assert scheduler.running.batch is not None, "only an executor of tokens can tell which drafts are right"
        self.num_slots = num_slots
        """The most tokens of a draft, if drafts are planned first; else 0."""
        self._drafter = drafter
        self._scheduler = scheduler
        self._wheel = scheduler.wheel
        self._cache = scheduler.cache
        self._batch = scheduler.running.batch
        self._emit = scheduler.emit
        self._page_size = scheduler.wheel.page_size
        self._taken: list[tuple[Request, Tokens]] = []
        self._new_pages: list[NewPage] = []
        self._pages_of_turns: list[tuple[Request, NewPage]] = []
        self._ahead: list[Request] = []
        """Requests with more than one token counted in the step."""
        self._num_drafts = self._num_drafted = self._num_accepted = 0
        self._has_prefills = self._has_running = False
        """Whether prompts are computed in the step being planned, or anything, when the queue is first looked at."""
        if num_slots:
            self._check_budget(num_slots)
            scheduler.running.names_at_turns = _num_named

    def _check_budget(self, num_slots: int) -> None:
        config = self._scheduler.config
        if (most := config.max_num_seqs * (1 + num_slots)) > config.max_num_batched_tokens:
            raise ConfigError(
                f"{config.max_num_seqs} sequences with {num_slots} drafted tokens each need up to {most} "
                f"tokens a step, and its budget is {config.max_num_batched_tokens}",
                field="max_num_batched_tokens",
                hint="Raise it, or lower max_num_seqs or num_speculative_tokens.",
            )

    def acts(self) -> Acts:
        """Return where it acts: nowhere before the rows of a plan are made, unless drafts come first."""
        if not self.num_slots:
            return Acts()
        gates = {"drafts": self.has_tokens}
        return Acts(gates=gates, turns=self.take_turns, entries=self.look, starts=self.take_padding)

    def totals(self) -> DraftTotals:
        """Return the totals so far."""
        return DraftTotals(self._num_drafts, self._num_drafted, self._num_accepted)

    def needing_page(self) -> Sequence[Request]:
        """Return the decodes that take a page in the step being planned, but for those that took theirs at turns."""
        return () if self.num_slots else self._wheel.needing_page()

    def plan(self, decodes: DecodeRows, batch: Batch, token_budget: int) -> tuple[DraftRows | None, DecodeRows]:
        """Return the drafts of a step, None if there are none, and its `decodes` with the pages that drafts took."""
        return self._planned(decodes) if self.num_slots else self._take(decodes, batch, token_budget)

    def _take(self, decodes: DecodeRows, batch: Batch, token_budget: int) -> tuple[DraftRows | None, DecodeRows]:
        """Draft for `decodes` of the step `batch`, within the rest of its budget.

        Return the drafts, None if there are none, and the decodes with the pages that drafts took. Requests that bring
        their own pages are skipped: dropped tokens of theirs cannot be restored.
        """
        wheel = self._wheel
        step, taken = wheel.step, self._taken
        num_left = token_budget - batch.num_tokens
        for row in decodes.rows.tolist():
            if num_left <= 0:
                break
            request = self._batch.requests[row]
            if request is None or (table := request.table) is None:
                continue
            end = wheel.num_computed(request) + 1
            # The last token that the request may generate is sampled, and not computed.
            num_most = min(num_left, self._num_room(end), request.stop_step - step)
            if num_most <= 0:
                continue
            self._batch.append_sampled(request, end, step)
            tokens = self._drafter.draft(request, num_most, batch)
            count = len(tokens)
            if not count:
                continue
            num_left -= count
            batch = batch.replaced(num_drafted=batch.num_drafted + count)
            if self._emit is not None:
                self._emit(DraftTaken(request.index, end, end + count))
            self._take_pages(request, table, end, end + count)
            taken.append((request, tokens))
        new_pages, self._new_pages = self._new_pages, []
        return self._rows(), replace(decodes, new_blocks=(*decodes.new_blocks, *new_pages))

    def _rows(self) -> DraftRows | None:
        """Return the drafted tokens of the step; None without any."""
        taken, wheel = self._taken, self._wheel
        if not taken:
            return None
        counts = [len(tokens) for _, tokens in taken]
        return DraftRows(
            np.repeat([request.row for request, _ in taken], counts),
            np.concatenate([np.arange(len(tokens)) + wheel.num_computed(request) + 1 for request, tokens in taken]),
            np.concatenate([tokens for _, tokens in taken]),
        )

    # Drafts that come first -------------------------------------------------------------------------------

    def take_turns(self, step: Step) -> bool:
        """Let each decode, in the order of admission, take the pages of its next token and of its draft."""
        if not self._take_turns(step.now_ns):
            step.is_cut = True
        step.num_drafted = self._num_planned()
        return True

    def _take_turns(self, now_ns: int) -> bool:
        """Let decodes take their turns, and preempt requests for them; return whether more can be planned."""
        running, preemptor = self._scheduler.running, self._scheduler.preemptor
        wheel, cache, page_size, step = self._wheel, self._cache, self._page_size, self._wheel.step
        batch = Batch((), wheel.num_decoding, wheel.known_tokens, self._scheduler.config.pool_tokens)
        decodes = [request for request in running if wheel.has(request) and request.own is None]
        served: set[int] = set()
        for request in sorted(decodes, key=lambda request: request.admission):
            if request.admission < 0:
                continue  # preempted for a request before it
            table = table_of(request)
            start = wheel.num_computed(request)
            end = start + 1
            self._batch.append_sampled(request, end, step)
            # The last token that the request may generate is sampled, and not computed.
            num_most = min(self.num_slots, request.stop_step - step)
            count = 0
            if num_most > 0:
                tokens = self._drafter.draft(request, num_most, batch)
                count = len(tokens)
            if cache.releases:
                running.settle(request, start)
            num_blocks = cache.needs.to_run(table, start, end + count)
            if num_blocks > 0 and not preemptor.take_turn(request, num_blocks, now_ns, served):
                return False
            if request.admission < 0:
                continue  # it preempted itself
            served.add(request.index)
            if count:
                batch = batch.replaced(num_drafted=batch.num_drafted + count)
                self._taken.append((request, tokens))
                if self._emit is not None:
                    self._emit(DraftTaken(request.index, end, end + count))
            # Pages that begin in this step. An earlier draft, or the admission, may have taken their memory.
            for page in range(-(-start // page_size), -(-(end + count) // page_size)):
                cache.take_for(table, (page + 1) * page_size)
                self._pages_of_turns.append((request, self._batch.new_page(request, page)))
            # The token of this step may still be withdrawn, for a more important request.
            self._publish(request, table, end if running.is_in_order else start)
        return True

    def _publish(self, request: Request, table: BlockTable, num_tokens: int) -> None:
        """Make the full pages of the first `num_tokens` tokens findable, if any are not; all tokens are known."""
        num_full = num_tokens // self._page_size
        if num_full > table.num_named:
            self._cache.publish(table, num_tokens)
            if (loads := self._scheduler.loads) is not None:
                loads.add_computed(request.content, num_full, table)

    def _num_planned(self) -> int:
        """Return the tokens drafted by the turns of this step, without those of requests preempted since."""
        self._taken = [each for each in self._taken if each[0].admission >= 0]
        return sum(len(tokens) for _, tokens in self._taken)

    # Admissions with drafts that come first ----------------------------------------------------------------

    def look(self, step: Step) -> None:
        """Take note of what the step computes before it admits requests from the queue."""
        self._has_prefills = bool(step.chunks)
        self._has_running = bool(step.chunks or self._wheel.num_decoding)

    def has_tokens(self, ask: Ask, step: Step) -> Verdict:
        """Let the head pass if there are tokens for it.

        As in vLLM, a request with one token to compute takes the room of a whole draft, unless prompts are computed in
        this step.
        """
        hit_tokens, num_known, cache = ask.hit_tokens, ask.num_known, self._cache
        is_last = num_known - hit_tokens == 1
        is_padded = is_last and not self._has_prefills and (self._has_running or hit_tokens > 0)
        num_padded = self.num_slots if is_padded else 0
        if 1 + num_padded > step.budget:
            return FOR_BUDGET
        num_wanted = cache.needs.to_admit(ask.match, num_known + num_padded, ask.num_new, ask.num_kept)
        if num_wanted > cache.num_free and not self._scheduler.running.num_running:
            num_padded = 0  # nothing that runs will release memory, so it would wait for ever
        else:
            ask.num_wanted = num_wanted
        ask.num_padded = num_padded
        return PASS

    def take_padding(self, ask: Ask, step: Step) -> None:
        """Take the pages of the draft for which the head, which starts, has room."""
        if ask.num_padded:
            assert ask.request.table is not None
            self._cache.take_for(ask.request.table, ask.num_known + ask.num_padded)
            step.budget -= ask.num_padded

    def _planned(self, decodes: DecodeRows) -> tuple[DraftRows | None, DecodeRows]:
        """Return the drafts of the turns, None if there are none, and `decodes` with the pages that turns took."""
        pages, self._pages_of_turns = self._pages_of_turns, []
        self._num_planned()
        new_pages = [page for request, page in pages if request.admission >= 0]
        return self._rows(), replace(decodes, new_blocks=tuple(new_pages))

    def judge(self, result: StepResult) -> None:
        """Count accepted drafts and release the pages of others. The step has ended; the wheel has not turned yet."""
        accepted = dict(result.accepted)
        for request, tokens in self._taken:
            num_accepted = accepted.pop(request.row, 0)
            assert 0 <= num_accepted <= len(tokens), f"{num_accepted} of {len(tokens)} drafted tokens were accepted"
            self._num_drafts += 1
            self._num_drafted += len(tokens)
            self._num_accepted += num_accepted
            self._drafter.judge(request, len(tokens), num_accepted)
            if self._emit is not None:
                self._emit(DraftJudged(request.index, len(tokens), num_accepted))
            self._count(request, tokens[:num_accepted])
        assert not accepted, f"rows {list(accepted)} had no drafts"
        self._taken.clear()

    def _count(self, request: Request, tokens: Tokens) -> None:
        """Count accepted tokens as computed and generated, and keep no more pages than all computed tokens need."""
        before = self._wheel.num_computed(request) + 1
        if len(tokens):
            self._wheel.skip(request, len(tokens))
            self._batch.skip(request, tokens)
        if not self.num_slots:
            self._keep_pages(request, before, before + len(tokens))

    # Pages ------------------------------------------------------------------------------------------------

    def _num_room(self, end: int) -> int:
        """Return how many tokens from `end` on fit in pages that a request holds or that are free."""
        num_free = self._cache.num_free // self._cache.page_blocks
        return (-(-end // self._page_size) + num_free) * self._page_size - end

    def _take_pages(self, request: Request, table: BlockTable, start: int, end: int) -> None:
        """Take pages for the drafted tokens [start, end)."""
        for page in range(-(-start // self._page_size), -(-end // self._page_size)):
            self._cache.take_page(table, page)
            self._new_pages.append(self._batch.new_page(request, page))

    def _keep_pages(self, request: Request, before: int, end: int) -> None:
        """Keep the pages of `end` computed tokens; those that were filled since `before` become findable."""
        page_size, table = self._page_size, request.table
        assert table is not None
        self._cache.shrink(table, -(-end // page_size))
        num_full = end // page_size
        if num_full > before // page_size:
            self._cache.publish(table, end)
            if (loads := self._scheduler.loads) is not None:
                loads.add_computed(request.content, num_full, table)
        if end > before and self._cache.releases:
            self._ahead.append(request)

    def take_ahead(self) -> list[Request]:
        """Return the requests with more than one token counted in the step that has ended, if they still decode."""
        ahead, self._ahead = self._ahead, []
        return [request for request in ahead if request.state is RequestState.DECODING]

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

from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec.structs import replace

from kvarts.event_log import Tell
from kvarts.events import DraftJudged, DraftTaken
from kvarts.kv.cache import Cache, Holding
from kvarts.request import Request, RequestState
from kvarts.sched.input_batch import InputBatch, NewPage
from kvarts.sched.loads import Loads
from kvarts.sched.plan import Batch, DecodeRows, DraftRows, StepResult
from kvarts.sched.preemption import Preemptor, holding_of
from kvarts.sched.running import Running
from kvarts.sched.wheel import DecodeWheel

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

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


class DraftTotals(msgspec.Struct, frozen=True):
    """Totals of drafts so far: drafts, drafted tokens, and accepted tokens."""

    num_drafts: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0

    def __str__(self) -> str:
        return f"{self.num_accepted_tokens:,} of {self.num_drafted_tokens:,} guessed tokens were right"


class Drafts:
    """Owner of the drafts of the scheduled step, from the allocation of their pages to the accepted tokens."""

    def __init__(
        self,
        drafter: Drafter,
        wheel: DecodeWheel,
        cache: Cache,
        batch: InputBatch,
        *,
        loads: Loads | None,
        tell: Tell | None,
        num_slots: int = 0,
    ) -> None:
        self.num_slots = num_slots
        """The most tokens of a draft, if drafts are planned first; else 0."""
        self._drafter = drafter
        self._wheel = wheel
        self._cache = cache
        self._batch = batch
        self._loads = loads
        self._tell = tell
        self._page_size = wheel.page_size
        self._taken: list[tuple[Request, Tokens]] = []
        self._new_pages: list[NewPage] = []
        self._pages_of_turns: list[tuple[Request, NewPage]] = []
        self._ahead: list[Request] = []
        """Requests with more than one token counted in the step."""
        self._num_drafts = self._num_drafted = self._num_accepted = 0

    def totals(self) -> DraftTotals:
        """Return the totals so far."""
        return DraftTotals(self._num_drafts, self._num_drafted, self._num_accepted)

    def take(self, decodes: DecodeRows, batch: Batch, token_budget: int) -> tuple[DraftRows | None, DecodeRows]:
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
            if request is None or (holding := request.holding) is None:
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
            if self._tell is not None:
                self._tell(DraftTaken(request.index, end, end + count))
            self._take_pages(request, holding, end, end + count)
            taken.append((request, tokens))
        new_pages, self._new_pages = self._new_pages, []
        return self._rows(), replace(decodes, new_blocks=(*decodes.new_blocks, *new_pages))

    def _rows(self) -> DraftRows | None:
        """Return the drafted tokens of the step; None without any."""
        taken, wheel = self._taken, self._wheel
        if not taken:
            return None
        import numpy as np

        counts = [len(tokens) for _, tokens in taken]
        return DraftRows(
            np.repeat([request.row for request, _ in taken], counts),
            np.concatenate([np.arange(len(tokens)) + wheel.num_computed(request) + 1 for request, tokens in taken]),
            np.concatenate([tokens for _, tokens in taken]),
        )

    # Drafts that come first -------------------------------------------------------------------------------

    def take_turns(self, running: Running, preemptor: Preemptor, pool_tokens: int, now_ns: int) -> bool:
        """Let each decode, in the order of admission, take the pages of its next token and of its draft.

        Requests are preempted for them. Return whether more can be planned in this step.
        """
        wheel, cache, page_size, step = self._wheel, self._cache, self._page_size, self._wheel.step
        batch = Batch((), wheel.num_decoding, wheel.known_tokens, pool_tokens)
        decodes = [request for request in running if wheel.has(request) and request.own is None]
        served: set[int] = set()
        for request in sorted(decodes, key=lambda request: request.admission):
            if request.admission < 0:
                continue  # preempted for a request before it
            holding = holding_of(request)
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
            num_blocks = cache.needs.to_run(holding, start, end + count)
            if num_blocks > 0 and not preemptor.take_turn(request, num_blocks, now_ns, served):
                return False
            served.add(request.index)
            if count:
                batch = batch.replaced(num_drafted=batch.num_drafted + count)
                self._taken.append((request, tokens))
                if self._tell is not None:
                    self._tell(DraftTaken(request.index, end, end + count))
            # Pages that begin in this step. An earlier draft, or the admission, may have taken their memory.
            for page in range(-(-start // page_size), -(-(end + count) // page_size)):
                cache.take_for(holding, (page + 1) * page_size)
                self._pages_of_turns.append((request, self._batch.new_page(request, page)))
            # The token of this step may still be withdrawn, for a more important request.
            self._publish(request, holding, end if running.is_in_order else start)
        return True

    def _publish(self, request: Request, holding: Holding, num_tokens: int) -> None:
        """Make the full pages of the first `num_tokens` tokens findable, if any are not; all tokens are known."""
        num_full = num_tokens // self._page_size
        if num_full > holding.num_named:
            self._cache.publish(holding, num_tokens)
            if self._loads is not None:
                self._loads.add_computed(request.content, num_full, holding)

    def num_planned(self) -> int:
        """Return the tokens drafted by the turns of this step, without those of requests preempted since."""
        self._taken = [each for each in self._taken if each[0].admission >= 0]
        return sum(len(tokens) for _, tokens in self._taken)

    def planned(self, decodes: DecodeRows) -> tuple[DraftRows | None, DecodeRows]:
        """Return the drafts of the turns, None if there are none, and `decodes` with the pages that turns took."""
        pages, self._pages_of_turns = self._pages_of_turns, []
        self.num_planned()
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
            if self._tell is not None:
                self._tell(DraftJudged(request.index, len(tokens), num_accepted))
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

    def _take_pages(self, request: Request, holding: Holding, start: int, end: int) -> None:
        """Take pages for the drafted tokens [start, end)."""
        for page in range(-(-start // self._page_size), -(-end // self._page_size)):
            self._cache.take_page(holding, page)
            self._new_pages.append(self._batch.new_page(request, page))

    def _keep_pages(self, request: Request, before: int, end: int) -> None:
        """Keep the pages of `end` computed tokens; those that were filled since `before` become findable."""
        page_size, holding = self._page_size, request.holding
        assert holding is not None
        self._cache.shrink(holding, -(-end // page_size))
        num_full = end // page_size
        if num_full > before // page_size:
            self._cache.publish(holding, end)
            if self._loads is not None:
                self._loads.add_computed(request.content, num_full, holding)
        if end > before and self._cache.releases:
            self._ahead.append(request)

    def take_ahead(self) -> list[Request]:
        """Return the requests with more than one token counted in the step that has ended, if they still decode."""
        ahead, self._ahead = self._ahead, []
        return [request for request in ahead if request.state is RequestState.DECODING]

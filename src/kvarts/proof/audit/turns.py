"""The steps of an engine, as an audit follows them: its decodes, and the pages that these take and fill, in order."""

from __future__ import annotations

from collections import deque
from itertools import chain

from kvarts.core.events import StepDone
from kvarts.proof.audit.facts import Facts
from kvarts.proof.audit.page_loads import PageLoads
from kvarts.proof.audit.request_parts import KnownRequest
from kvarts.proof.audit.tiers import PartsBelow

__all__ = ["Turns"]


class Turns:
    """Owner of the decodes of the present step. `below`: what loads have brought before it.

    Laws: a decode has a page for its token, or a request gives way (L8); each step counts what is used (L1); no part is
    held that no later token sees (L2).
    """

    def __init__(self, facts: Facts, below: PageLoads | PartsBelow) -> None:
        self._facts = facts
        self._below = below
        self.completing: list[int] = []
        """Requests that compute the last of their known tokens in this step."""
        self._filled: deque[tuple[int, KnownRequest]] = deque()
        """Decodes that fill a page in this step and have not published it, with the tokens that they compute."""
        self.stalled: list[KnownRequest] = []
        """Decodes of the last step that compute nothing in this one, if pages are published late."""
        self.ended: list[int] = []
        """Requests that have generated their last token and keep their parts, if steps are planned ahead."""
        self.takers: list[int] = []
        """Decodes that still need parts for a page in this step."""
        self._is_served = self._is_settled = True
        """Whether the decodes of the step have taken the parts they need, and have computed their tokens."""
        self._last_looked = -1
        """The last step after which the parts held by its requests were checked."""
        self._mark: tuple[int, tuple[int, ...]] = -1, ()
        """Used blocks, and parts of each group, at the peak of this step."""

    def pass_steps(self, last: int) -> None:
        """Account for all planned steps up to `last`. In steps without events, requests only decoded.

        A part that one of their tokens does not see is seen by no later one, so the last one stands for all.
        """
        self.settle()
        while self._facts.found.step < last:
            self.begin(self._facts.found.step + 1)
            self.settle()
        if self._last_looked < last:
            self._last_looked = last
            self._look_at_held()

    def begin(self, step: int) -> None:
        """Begin to follow a step."""
        self._facts.held.end_drafts()
        self._facts.found.step = step
        self._is_settled = self._is_served = False
        self._mark = -1, ()
        self._below.begin_step()

    def serve(self) -> None:
        """Take the parts for all decodes that begin a page, as far as there is room."""
        self.begin_serving()
        self.serve_takers()

    def begin_serving(self) -> None:
        """List the decodes that begin a page in this step, in the order of admission.

        That is after pages arrived by loads, and before everything else.
        """
        if self._is_served:
            return
        self._is_served = True
        size, requests = self._facts.page_size, self._facts.requests
        decoding = chain(self._facts.decoding, self.stopped())
        takers = [request for request in decoding if requests[request].computed % size == 0]
        self.takers = sorted(takers, key=lambda request: requests[request].admission)

    def stopped(self) -> list[int]:
        """Return the requests that compute the token that ended them in this step."""
        if not self._facts.lags:
            return []
        known = [(request, self._facts.requests[request]) for request in self.ended]
        return [request for request, each in known if each.stops and each.is_running]

    def serve_takers(self, before: int | None = None, *, until_evicted: bool = False) -> None:
        """Take parts for decodes in turn: those admitted before `before`; the others take theirs later.

        `until_evicted`: only until the ledger has evicted something.
        """
        while self.takers:
            known = self._facts.requests[self.takers[0]]
            if self._facts.num_wanted(known) > self._facts.ledger.num_free:
                return
            if (before is not None and known.admission >= before) or (until_evicted and self._facts.ledger.happened):
                return
            del self.takers[0]
            self._facts.held.take_pages(known, known.computed + 1)

    def serve_before(self, owner: int) -> None:
        """Take parts for the decodes that have taken theirs when the request of `owner` releases some."""
        if self._is_settled:
            return
        known = self._facts.holders.get(owner)
        self.begin_serving()
        decoding = chain(self._facts.decoding, self.stopped())
        is_decoding = known is not None and any(self._facts.requests[request] is known for request in decoding)
        self.serve_takers(known.admission if known is not None and is_decoding else None)

    def settle(self) -> None:
        """Count the token that each decode of this step computes, and publish all pages that they fill."""
        self.count_decodes()
        self.name_filled()

    def name_filled(self, before: int | None = None, *, until_stored: bool = False) -> None:
        """Publish the pages that decodes fill, in the order of admission: of those admitted before `before`.

        `until_stored`: only until the ledger has stored something.
        """
        filled = self._filled
        while filled and (before is None or filled[0][1].admission < before):
            if until_stored and self._facts.ledger.happened:
                return
            num_computed, known = filled.popleft()
            self._facts.held.name(known, num_unread=self._facts.lags - (num_computed - known.computed))

    def count_decodes(self) -> None:
        """Count the token that each decode of this step computes. Law L8: all of them have the pages for it."""
        if self._is_settled:
            return
        self.serve()
        self._is_settled = True
        for request in self.takers:
            page = self._facts.requests[request].computed // self._facts.page_size
            what = f"needs a page{'' if not self._facts.has_groups else ' in every group'}, there is no room"
            self._facts.find(f"{what}, and no request was preempted", request, page)
        self.takers = []
        filled = [
            (known.computed + 1, known) for known in (self._facts.requests[request] for request in self.stopped())
        ]
        for request in self._facts.decoding:
            known = self._facts.requests[request]
            known.began, known.before = known.computed, known.began
            known.computed += 1
            known.known += 1
            known.is_unread = True
            if (known.computed - self._facts.lags) % self._facts.page_size == 0:
                filled.append((known.computed, known))
        # Requests that fill a page publish it in the order of admission, as in vLLM.
        self._filled.extend(sorted(filled, key=lambda each: each[1].admission))

    def name_stalled(self) -> None:
        """Publish the pages that stalled requests had filled, at the end of the plan: their tokens are known then."""
        stalled, self.stalled = self.stalled, []
        for known in stalled:
            known.is_unread = False
            if known.is_running:
                self._facts.held.name(known)

    def end_step(self) -> None:
        """Let requests that computed their last known token decode from the next step on."""
        for request in self.completing:
            if request in self._facts.requests:
                self._facts.requests[request].known += 1
                self._facts.decoding[request] = None
        self.completing = []
        if self._facts.plans_ahead:
            for request in [
                one for one in self._facts.decoding if self._facts.requests[one].known == self._facts.requests[one].last
            ]:
                del self._facts.decoding[request]
                self.ended.append(request)

    def look(self) -> None:
        """Set the mark of the step to the present use, if more is in use than at the mark."""
        num_used = self._facts.ledger.num_used
        if num_used > self._mark[0]:
            self._mark = num_used, self._facts.ledger.counts()

    def check_step(self, event: StepDone) -> None:
        """Compare what a step counts in use with the ledger. Law L1."""
        self.look()
        num_used, parts = self._mark
        told = event.tiers[-2 * len(self._facts.ledger.groups) :]
        if event.num_used != num_used or (self._facts.has_groups and told != parts):
            counts = f"{event.num_used} {self._facts.unit} used, and parts {told}; the ledger {num_used} and {parts}"
            if not self._facts.has_groups:
                counts = f"{event.num_used} pages used, the ledger {num_used}"
            self._facts.find(f"the step counts {counts}")

    def _look_at_held(self) -> None:
        """Report parts held by running requests that no later token sees."""
        for request, known in self._facts.requests.items():
            if known.is_running and request not in self.ended:
                self._facts.held.look_at(known, known.before if self._facts.lags else known.began)

    def stall_after(self, known: KnownRequest) -> None:
        """Take what was admitted after `known` off the decodes: chunks follow."""
        for request in [
            other for other in self._facts.decoding if self._facts.requests[other].admission > known.admission
        ]:
            del self._facts.decoding[request]
            self._facts.requests[request].has_decoded = True
            if self._facts.lags:
                self.stalled.append(self._facts.requests[request])

"""The lives of requests, as an audit follows them: admission, chunks, what they give back, preemption, and the end."""

from __future__ import annotations

from kvarts.core.events import Admitted, ChunkComputed, LoadStarted, PartsGivenBack, Preemption, TransferEnded
from kvarts.proof.audit.facts import Facts
from kvarts.proof.audit.page_loads import PageLoads
from kvarts.proof.audit.request_parts import KnownRequest
from kvarts.proof.audit.tiers import PartsBelow
from kvarts.proof.audit.turns import Turns

__all__ = ["Lives"]


class Lives:
    """Owner of the order of admission, and of requests that other engines begin or continue.

    Laws: a hit is the longest that is resident (L4), tokens are computed once and in order (L7), a request gives back
    what no later token sees and nothing else (L2), and gives way only where memory is short.
    """

    def __init__(self, facts: Facts, turns: Turns, pages: PageLoads, below: PartsBelow) -> None:
        self._facts = facts
        self._turns = turns
        self._pages = pages
        self._below = below
        self._num_admitted = 0
        self.copies: dict[int, int] = {}
        """Requests whose prompt another engine sends, by the number of the copy, until it has arrived."""
        self._received: set[int] = set()
        """Requests that wait with the pages of a prompt that another engine has sent."""

    def admit(self, event: Admitted) -> None:
        """Let a request run: with the pages it hits (L4), those of its load, or of a prompt that has arrived."""
        known, size = self._facts.requests[event.request], self._facts.page_size
        if known.is_running:
            self._facts.find("was admitted, and runs already", event.request)
        known.admission = self._num_admitted
        self._num_admitted += 1
        if event.request in self._received:
            self._join(known, event)
            return
        if self._facts.has_groups and event.by_tier is not None:
            self._admit_loaded(known, event)
            return
        if known.load is None:
            self._facts.hit(known, event.request, event.num_hit_pages, event.reach if self._facts.has_groups else None)
            below = self._pages.found_below(known, known.num_named)
            if below and known.offer != (known.num_named, ()):
                self._facts.find(f"is in {below[0][0]} and was not loaded", event.request, known.num_named)
        elif event.num_hit_pages != known.load.stop:
            self._facts.find(f"was hit {event.num_hit_pages} pages far; it had {known.load.stop}", event.request)
        known.load = known.offer = None
        self._pages.check_awaited(known, event.request)
        # After a load of the whole prompt, its last token is computed again.
        known.computed = min(known.num_named * size, known.known - 1)
        self._facts.held.resume(known)
        known.is_running = True

    def _admit_loaded(self, known: KnownRequest, event: Admitted) -> None:
        num_pages = self._below.admit(event.request)
        if event.num_hit_pages != num_pages:
            self._facts.find(
                f"{num_pages} pages were loaded and found, and {event.num_hit_pages} were hit", event.request
            )
        known.num_named = num_pages
        known.computed = num_pages * self._facts.page_size
        self._facts.held.resume(known)
        known.began = min(known.began, known.computed)  # its step may compute none of its tokens
        known.branch = 0
        known.is_running = True

    def compute(self, event: ChunkComputed) -> None:
        """Take and publish the parts of a chunk, which begins where the request is. Law L7."""
        known, size = self._facts.requests[event.request], self._facts.page_size
        is_front = known.load is not None and event.end <= known.load.start * size
        is_next = (event.start, event.num_known_tokens) == (known.computed, known.known)
        if not (is_next and (known.is_running or is_front)):
            self._facts.find(
                f"computes tokens from {event.start} of {event.num_known_tokens}, and had {known.computed} of "
                f"{known.known}",
                event.request,
                event.start // size,
            )
        if not event.start < event.end <= event.num_known_tokens:
            self._facts.find(f"computes tokens {event.start} to {event.end} of {event.num_known_tokens}", event.request)
        known.before = min(known.began, event.start)  # more before a preemption
        known.computed = known.began = event.start
        known.is_unread = known in self._turns.stalled
        if known.is_unread:
            self._turns.stalled.remove(known)
        is_last = event.end == event.num_known_tokens
        is_end = is_last and not known.has_decoded
        page_end = (event.end - 1) // size * size
        if is_front and self._facts.has_groups:
            self._below.begin_front(event.request)
        if self._facts.has_states:
            self._facts.held.take_pages(known, event.end)  # all its pages first: they evict no snapshot of its own
        if known.computed < known.branch <= event.end:
            self._facts.held.grow(known, known.branch, is_end=True, is_midway=True)
        if is_end and self._facts.has_states and known.computed < page_end:
            self._facts.held.grow(known, page_end, is_end=True, is_midway=True)
        self._facts.held.grow(known, event.end, is_end=is_end, num_unread=int(known.is_unread))
        if is_front and self._facts.has_groups:
            self._below.end_front(event.request)
        if is_last:
            self._turns.completing.append(event.request)

    def give_back(self, event: PartsGivenBack) -> None:
        """Release parts that a window has passed: no later token sees them."""
        known = self._facts.holders.get(event.content.owner)
        index, request = event.group, event.content.owner
        words = self._facts.ledger.words(index)
        if known is None or index >= len(known.parts):
            self._facts.find(f"was given back{words}, and was not held", request, event.start_page)
            return
        needed = self._facts.ledger.groups[index].needed(known.computed, self._facts.page_size)
        for page in range(event.end_page - 1, event.start_page - 1, -1):
            part = known.parts[index].get(page)
            if part is None:
                self._facts.find(f"was given back{words}, and was not held", request, page)
                continue
            if any(page in pages for pages in needed):
                self._facts.find(f"was given back{words}, and a later token sees it", request, page)
            self._facts.ledger.release(known.parts[index].pop(page), is_passed=True)

    def preempt(self, event: Preemption) -> None:
        """Release the parts of a request that gives way: memory is short, and it is told what it loses."""
        ledger, known, unit = self._facts.ledger, self._facts.requests[event.victim], self._facts.unit
        self._turns.look()
        if not known.is_running:
            self._facts.find("was preempted, and does not run", event.victim)
        if event.num_used_pages != ledger.num_used:
            self._facts.find(
                f"request {event.asker} saw {event.num_used_pages} {unit} used; they are {ledger.num_used}"
            )
        if event.num_pages_asked <= ledger.num_free:
            asked = f"{event.num_pages_asked} {unit} for {event.asker} that were free"
            self._facts.find(f"request {event.victim} gave way to {asked}")
        if event.num_computed_tokens != known.computed:
            self._facts.find(f"request {event.victim} lost {event.num_computed_tokens} tokens; it had {known.computed}")
        has_turn = known.stops or event.victim not in self._turns.ended
        had_turn = has_turn and known.admission < self._facts.requests[event.asker].admission
        num_unread = self._facts.lags and known.is_unread and not had_turn
        self._facts.close(event.victim, known, num_unread=num_unread, keeps_state=event.keeps_state)
        known.computed = 0
        known.has_decoded = False
        if event.victim == event.asker and not event.model and self._facts.ends_steps:
            # As in vLLM 0.32, this ends the decodes: those admitted later compute nothing, and chunks follow.
            self._turns.stall_after(known)
            for other in self._turns.stopped():
                if self._facts.requests[other].admission > known.admission:
                    self._facts.requests[other].stops = False  # not in this step, and in no later one
        stopped = self._turns.stopped()
        self._turns.takers = [
            request for request in self._turns.takers if request in self._facts.decoding or request in stopped
        ]

    def finish(self, request: int) -> None:
        """Release the parts of a request that has computed all its tokens."""
        known = self._facts.requests.pop(request)
        if request in self._turns.ended:
            self._turns.ended.remove(request)
        elif request not in self._facts.decoding:
            self._facts.find(f"finished with {known.computed} of {known.known} known tokens computed", request)
        self._facts.close(request, known)

    def cancel(self, request: int) -> None:
        """Release the parts of a request, now or when its load has ended."""
        known = self._facts.requests[request]
        load = None if self._facts.has_groups else known.load
        if load is not None and known.has_arrived:
            self._pages.end_lead(request)
        elif load is not None and (request in self._pages.loaded or known.num_named < load.stop):
            known.is_cancelled = True  # a transfer still writes to its pages, or has just ended
            return
        self._turns.completing = [other for other in self._turns.completing if other != request]
        self._turns.ended = [other for other in self._turns.ended if other != request]
        self._received.discard(request)
        self.copies = {copy: other for copy, other in self.copies.items() if other != request}
        known = self._facts.requests.pop(request)
        if self._below.cancel(request):
            self._facts.holders.pop(known.content.owner, None)
        else:
            self._facts.close(request, known, num_unread=self._facts.lags and known.is_unread)

    # Requests that another engine begins or continues -------------------------------------------------------

    def hold(self, request: int) -> None:
        """Let a request that has computed its prompt keep its parts, until another engine has copied them."""
        known = self._facts.requests[request]
        if request not in self._facts.decoding:
            self._facts.find(f"is held with {known.computed} of {known.known} known tokens computed", request)
        self._facts.decoding.pop(request, None)
        known.is_running = False

    def reserve(self, event: LoadStarted) -> None:
        """Take the pages of a prompt that another engine sends; resident ones are shared, the last page included."""
        known = self._facts.requests[event.request]
        num_pages = known.known // self._facts.page_size if self._facts.finds_prefixes else 0
        longest, _ = self._facts.reach(known, num_pages)
        if event.num_hit_pages != longest:
            what = f"shares {event.num_hit_pages} pages of its prompt, and {longest} are resident"
            self._facts.find(what, event.request, event.num_hit_pages)
        self._facts.held.hit(known, event.num_hit_pages)
        self._facts.held.take_pages(known, event.num_held_pages * self._facts.page_size)
        known.computed = event.num_hit_pages * self._facts.page_size
        self.copies[event.transfer] = event.request

    def receive(self, event: TransferEnded) -> None:
        """Publish the pages of a prompt that has arrived."""
        request = self.copies.pop(event.transfer)
        known = self._facts.requests[request]
        known.computed = known.known
        self._facts.held.name(known)
        self._received.add(request)

    def _join(self, known: KnownRequest, event: Admitted) -> None:
        """Let a request run whose prompt has arrived: its last token is computed again."""
        self._received.remove(event.request)
        num_pages = known.known // self._facts.page_size
        if event.num_hit_pages != num_pages:
            self._facts.find(f"has received {num_pages} pages, and {event.num_hit_pages} were hit", event.request)
        known.computed = known.known - 1
        known.is_running = True

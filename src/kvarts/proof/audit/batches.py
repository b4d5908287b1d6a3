"""Checks an engine with steps of prompts or of decodes, over a radix cache: the engine `sglang`.

A second bookkeeping of the same events, page by page. It knows which pages can be found on the device and in host
memory, how often each is referenced, and what each request has. From the events it derives what every step must have in
use, what each request must find, and which pages must become findable when results are taken.

The events do not contain which requests have looked at the queue, and so which pages are the most recent: evictions are
taken from the events, and must be of pages that no request references and nothing follows. Copies to host memory, and
loads, keep pages in use before their events: they are read from the engine's list after each batch of events, and only
then are the counts of an engine with host memory compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvarts.core.content import Content
from kvarts.core.events import (
    Admitted,
    Arrived,
    AtRest,
    CacheCleared,
    Cancelled,
    ChunkComputed,
    Event,
    Finished,
    LeapDone,
    PagesRemoved,
    PagesStored,
    Preemption,
    StepDone,
    StepEnded,
    StepStarted,
)
from kvarts.core.kv.cache import Memory
from kvarts.core.kv.hicache import HostRadixCache
from kvarts.proof.audit.ledger import AuditError, Finding, Findings
from kvarts.proof.audit.request_parts import PageDigests

__all__ = ["BatchAuditor"]

MOST_NAMED = 20
RETRACTED_STEPS = 20
"""The steps of decodes for which a retraction makes room."""
DEVICE = "device"


OF_A_REQUEST = Admitted, ChunkComputed, Preemption, Finished, Cancelled


class _Known:
    """A request: its first `num_found` pages are findable and held by it, `num_pages` it has in all.

    `known`: the tokens that it knows; `computed`: those that have KV. `is_decoding`: its next step computes one token.
    """

    __slots__ = ("computed", "content", "is_decoding", "is_running", "known", "last", "num_found", "num_pages")

    def __init__(self, event: Arrived) -> None:
        self.content = event.content
        self.known = event.num_prompt_tokens
        self.last = event.num_prompt_tokens + event.max_tokens
        self.computed = self.num_found = self.num_pages = 0
        self.is_running = self.is_decoding = False


class BatchAuditor:
    """A reader of the events of one engine with `num_pages` pages, from its beginning. `findings` grows.

    `overlaps`: a step is planned before the results of the one before it are taken. `account`: returns the engine's
    cache; if given, `observe` compares it with the books, and raises AuditError.
    """

    wants_details = True

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        overlaps: bool = True,
        has_host: bool = False,
        account: Callable[[], Memory] | None = None,
    ) -> None:
        self._num_pages, self._page_size = num_pages, page_size
        self._overlaps, self._has_host = overlaps, has_host
        self._account = account
        self._found = Findings()
        self._digests = PageDigests()
        self._refs: dict[bytes, int] = {}
        """The requests that reference each page that can be found on the device."""
        self._below: set[bytes] = set()
        """The pages that events have put into host memory."""
        self._before: dict[bytes, bytes] = {}
        """The page before each page that is on the device or in host memory; absent for the first."""
        self._after: dict[bytes, set[bytes]] = {}
        self._num_referenced = self._num_private = 0
        """Pages on the device that requests reference; and those that their request alone knows."""
        self._requests: dict[int, _Known] = {}
        self._due: dict[int, int] = {}
        """Requests whose results are being taken, and the first page that need not be findable then."""
        self._late: dict[int, None] = {}
        """Requests whose last results were not taken."""
        self._chunked: int | None = None
        """The request whose prompt goes on."""
        self._chunks: list[tuple[_Known, int]] = []
        """What computes prompts in this step, and the tokens that each has then."""
        self._num_chunk_tokens = 0
        self._completing: list[int] = []
        """Requests that compute the last of their prompts in this step."""
        self._completed: list[int] = []
        """Those of the last step."""
        self._has_decoded = False
        """Whether the last step computed decodes."""
        self._num_asked = 0
        """The pages that this step may make empty, at most."""
        self._is_planning = self._is_taking = False
        """Whether a step is being planned; and whether results are being taken."""
        self._peak = self._planned = 0
        """The most pages in use before a preemption of this step; and those after its plan, but for its decodes'."""

    @property
    def findings(self) -> list[Finding]:
        """All findings so far."""
        return self._found.all

    @property
    def num_used(self) -> int:
        """Pages that requests have or reference."""
        return self._num_referenced + self._num_private

    @property
    def num_cached(self) -> int:
        """Pages on the device that can be found and that no request references."""
        return len(self._refs) - self._num_referenced

    def observe(self, events: Sequence[Event]) -> None:
        """Check `events`. With an account, raise AuditError if there are findings."""
        for place, event in enumerate(events):
            match event:
                case PagesStored(medium=medium) if medium == DEVICE:
                    self._store(event, self._is_load(events, place))
                case PagesStored():
                    self._store_below(event)
                case PagesRemoved(medium=medium) if medium == DEVICE:
                    self._remove(event)
                case PagesRemoved():
                    self._remove_below(event)
                case _:
                    self._follow(event)
        if self._is_planning or not self._overlaps:
            self._end_taking()
        if self._account is not None:
            self._compare(self._account())
        self._digests.forget()

    def _follow(self, event: Event) -> None:
        request = event.victim if isinstance(event, Preemption) else getattr(event, "request", None)
        if isinstance(event, OF_A_REQUEST) and request not in self._requests:
            self._find(f"is said to be {type(event).__name__}, and is not there", request)
            return
        match event:
            case StepStarted():
                self._begin_step(event)
            case Admitted():
                self._admit(event)
            case ChunkComputed():
                self._compute(event)
            case Preemption():
                self._preempt(event)
            case StepDone():
                self._check_step(event)
            case LeapDone():
                self._leap(event)
            case StepEnded():
                self._end_step(event)
            case Arrived():
                self._requests[event.request] = _Known(event)
            case Finished():
                self._finish(event)
            case Cancelled():
                self._drop(event.request)
            case CacheCleared():
                self._num_asked = self._num_pages
            case AtRest() if not self._has_host and self.num_used:
                self._find(f"{self.num_used} pages are in use, and no request runs")

    def _find(self, what: str, request: int | None = None, page: int | None = None) -> None:
        self._found.add(what, request, page)

    # Pages ------------------------------------------------------------------------------------------------

    def _name(self, content: Content, page: int) -> bytes:
        return self._digests.of(content, page)

    def _is_load(self, events: Sequence[Event], place: int) -> bool:
        """Return whether the pages of this event are loaded for the request that is admitted next."""
        if not self._has_host:
            return False
        for event in events[place + 1 :]:
            if not isinstance(event, PagesStored | PagesRemoved):
                return isinstance(event, Admitted) and event.by_tier is not None
        return False

    def _store(self, event: PagesStored, is_load: bool) -> None:
        """Let pages be findable on the device: computed ones of a request, or loaded ones."""
        content, start = event.content, event.start_page
        if start:
            before = self._name(content, start - 1)
            if event.parent is None or self._name(event.parent, start - 1) != before or before not in self._refs:
                self._find("was stored after a page that does not precede it", content.owner, start)
        due = self._owners_due(content, start)
        if is_load and not due:
            for page in range(start, event.end_page):
                if self._name(content, page) not in self._below:
                    self._find("was loaded and is not in host memory", content.owner, page)
                self._add(content, page)
            return
        if not due:
            self._begin_taking()
            due = self._owners_due(content, start)
        for page in range(start, event.end_page):
            if not due:
                self._find("was stored, and no request has computed it", content.owner, page)
            self._add(content, page)
            for request in due:
                self._advance(request, page + 1)
            due = self._owners_due(content, page + 1) if page + 1 < event.end_page else []

    def _owners_due(self, content: Content, page: int) -> list[int]:
        """Return the requests whose results are being taken and that have computed `page` of `content`."""
        return [
            request
            for request, end in self._due.items()
            if (known := self._requests[request]).num_found == page < end
            and self._name(known.content, page) == self._name(content, page)
        ]

    def _add(self, content: Content, page: int) -> None:
        name = self._name(content, page)
        if name in self._refs:
            self._find("was stored and is resident", content.owner, page)
            return
        self._refs[name] = 0
        self._link(content, page, name)

    def _link(self, content: Content, page: int, name: bytes) -> None:
        self._digests.where.setdefault(name, (content.owner, page))
        if page:
            before = self._before[name] = self._name(content, page - 1)
            self._after.setdefault(before, set()).add(name)

    def _advance(self, request: int, end: int) -> None:
        """Let a request reference the pages that it has computed and that can be found, up to `end`, in place of its
        own."""
        known = self._requests[request]
        while known.num_found < end:
            name = self._name(known.content, known.num_found)
            if name not in self._refs:
                return
            self._reference(name)
            known.num_found += 1
            self._num_private -= 1

    def _reference(self, name: bytes) -> None:
        refs = self._refs[name] = self._refs[name] + 1
        self._num_referenced += refs == 1

    def _remove(self, event: PagesRemoved) -> None:
        """Evict pages from the device. Law L4: none that is in use, none before what follows it, none without need."""
        num_empty = self._num_pages - self.num_used - self.num_cached
        if num_empty >= self._num_needed() and not self._has_host:
            what = f"was evicted, and {num_empty} pages were empty"
            self._find(what, event.content.owner, event.end_page - 1)
        for page in range(event.end_page - 1, event.start_page - 1, -1):
            name = self._name(event.content, page)
            refs = self._refs.get(name)
            if refs is None:
                self._find("was evicted and is not resident", event.content.owner, page)
                continue
            if refs:
                self._find("was evicted while it is in use", event.content.owner, page)
                continue
            if any(other in self._refs for other in self._after.get(name, ())):
                self._find("was evicted before the page after it", event.content.owner, page)
            del self._refs[name]
            self._unlink(event.content, page, name)

    def _num_needed(self) -> int:
        """Return the pages that the step being planned may make empty: for its prompts, and a page of each; for its
        decodes; or after a preemption."""
        num_tokens, size = self._num_chunk_tokens, self._page_size
        if num_tokens:
            num_tokens += (size > 1) * len(self._chunks) * size
        num_decodes = sum(known.is_decoding for known in self._requests.values())
        return max(self._num_asked, -(-num_tokens // size), 0 if num_tokens else num_decodes)

    def _unlink(self, content: Content, page: int, name: bytes) -> None:
        """Forget a page that is in neither memory."""
        if name in self._refs or name in self._below:
            return
        if self._after.get(name):
            self._find("was evicted before the page after it", content.owner, page)
        self._after.pop(name, None)
        before = self._before.pop(name, None)
        if before is not None and before in self._after:
            self._after[before].discard(name)
        self._digests.where.pop(name, None)

    # Host memory ------------------------------------------------------------------------------------------

    def _store_below(self, event: PagesStored) -> None:
        """Let pages be findable in host memory: copies of what is on the device, or what was read from storage."""
        content, start = event.content, event.start_page
        if start and (before := self._name(content, start - 1)) not in self._refs and before not in self._below:
            self._find("was copied, and the page before it is nowhere", content.owner, start)
        for page in range(start, event.end_page):
            name = self._name(content, page)
            if name in self._below:
                self._find(f"was copied to {event.medium}, and is there", content.owner, page)
            self._below.add(name)
            self._link(content, page, name)

    def _remove_below(self, event: PagesRemoved) -> None:
        for page in range(event.end_page - 1, event.start_page - 1, -1):
            name = self._name(event.content, page)
            if name not in self._below:
                self._find(f"was evicted from {event.medium} and is not there", event.content.owner, page)
            self._below.discard(name)
            self._unlink(event.content, page, name)

    # Steps ------------------------------------------------------------------------------------------------

    def _begin_step(self, event: StepStarted) -> None:
        if self._is_planning or not self._overlaps:
            self._end_taking()
        self._found.step = event.step
        self._is_planning = True
        self._chunks, self._num_chunk_tokens, self._num_asked = [], 0, 0
        self._peak = 0
        if self._chunked is not None:
            known = self._requests[self._chunked]
            self._due[self._chunked] = known.computed // self._page_size
            self._advance(self._chunked, self._due[self._chunked])

    def _end_chunk(self) -> None:
        """Law L4: what the step before has computed of a prompt that goes on can be found before anything else."""
        if self._due and not self._is_taking:
            self._check_due()

    def _check_due(self) -> None:
        for request, end in self._due.items():
            known = self._requests[request]
            if known.num_found < end:
                self._find("was computed, and no event says that it can be found", request, known.num_found)
        self._due = {}

    def _begin_taking(self) -> None:
        """Begin to take the results of the last step; what is in use from here on does not count in the planned one."""
        if self._is_taking:
            return
        self._end_chunk()
        self._is_taking = True
        if self._is_planning:
            for known, end in self._chunks:
                self._grow(known, -(-end // self._page_size))
            self._planned = self.num_used
        for request in self._late:
            end = self._requests[request].computed // self._page_size
            self._due[request] = end
            self._advance(request, end)
        self._late = {}

    def _end_taking(self) -> None:
        self._begin_taking()
        self._is_planning = self._is_taking = False
        self._check_due()

    def _check_step(self, event: StepDone) -> None:
        """Compare what a step counts with the books. Law L1."""
        self._end_taking()
        decodes = [known for known in self._requests.values() if known.is_decoding]
        num_decodes = event.num_tokens - self._num_chunk_tokens
        if num_decodes not in (0, len(decodes)) or (num_decodes and self._num_chunk_tokens):
            self._find(f"the step computes {num_decodes} decodes, and there are {len(decodes)}")
        num_due = self._decode(1) if num_decodes else 0
        self._has_decoded = num_decodes > 0
        if self._has_host:
            return
        num_used = max(self._peak, self._planned + num_due)
        if num_used > self._num_pages:
            self._find(f"{num_used} pages are in use of {self._num_pages}")
        if event.num_used != num_used:
            self._find(f"the step counts {event.num_used} pages used, the books {num_used}")

    def _decode(self, num_steps: int) -> int:
        """Let all decodes compute a token in each of so many steps; return the pages that they take."""
        num_taken = 0
        for request, known in self._requests.items():
            if not known.is_decoding:
                continue
            known.computed += num_steps
            known.known += num_steps
            num_pages = -(-known.computed // self._page_size)
            num_taken += num_pages - known.num_pages
            self._grow(known, num_pages)
            if known.known > known.last:
                self._find("decodes beyond its last token", request)
            if known.known == known.last:
                known.is_decoding = False
                self._late[request] = None
        return num_taken

    def _grow(self, known: _Known, num_pages: int) -> None:
        if num_pages > known.num_pages:
            self._num_private += num_pages - known.num_pages
            known.num_pages = num_pages

    def _leap(self, event: LeapDone) -> None:
        counts, own = (event.num_used, event.num_cached), (self.num_used, self.num_cached)
        if counts != own and not self._has_host:
            self._find(f"steps begin with {counts[0]} pages used and {counts[1]} cached, the books have {own}")
        num_taken = self._decode(len(event.durations_ns))
        self._is_planning, self._has_decoded = False, True
        if num_taken != sum(event.pages_taken):
            self._find(f"steps take {sum(event.pages_taken)} pages, the books {num_taken}")

    def _end_step(self, event: StepEnded) -> None:
        self._found.step = event.step
        for known, end in self._chunks:
            known.computed = end
        self._chunks = []
        self._completed, self._completing = self._completing, []
        for request in self._completed:
            known = self._requests[request]
            known.known += 1
            known.is_decoding = known.known < known.last
            self._late[request] = None
        if not self._overlaps:
            self._begin_taking()

    # Requests ---------------------------------------------------------------------------------------------

    def _admit(self, event: Admitted) -> None:
        """Let a request run with what it finds. Law L4: the longest prefix that is resident."""
        self._end_chunk()
        known, size = self._requests[event.request], self._page_size
        if known.is_running:
            self._find("was admitted, and runs already", event.request)
        num_most = (known.known - 1) // size
        num_pages = 0
        while num_pages < num_most and self._name(known.content, num_pages) in self._refs:
            num_pages += 1
        if event.num_hit_pages != num_pages:
            self._find(f"was hit {event.num_hit_pages} pages far; {num_pages} are resident", event.request)
        for page in range(min(num_pages, event.num_hit_pages)):
            self._reference(self._name(known.content, page))
        known.num_found = known.num_pages = min(num_pages, event.num_hit_pages)
        known.computed = event.num_hit_pages * size
        known.is_running = True

    def _compute(self, event: ChunkComputed) -> None:
        """Take the pages of a chunk, which begins where the request is. Law L7."""
        self._end_chunk()
        known = self._requests[event.request]
        if not known.is_running or (event.start, event.num_known_tokens) != (known.computed, known.known):
            what = f"computes tokens from {event.start} of {event.num_known_tokens}"
            self._find(f"{what}, and had {known.computed} of {known.known}", event.request)
        if not event.start < event.end <= event.num_known_tokens:
            self._find(f"computes tokens {event.start} to {event.end} of {event.num_known_tokens}", event.request)
        self._chunks.append((known, event.end))
        self._num_chunk_tokens += event.end - event.start
        self._chunked = event.request if event.end < event.num_known_tokens else None
        if self._chunked is None:
            self._completing.append(event.request)

    def _preempt(self, event: Preemption) -> None:
        self._end_chunk()
        self._peak = max(self._peak, self.num_used)
        known = self._requests[event.victim]
        if event.num_used_pages != self.num_used and not self._has_host:
            self._find(f"request {event.asker} saw {event.num_used_pages} pages used; they are {self.num_used}")
        if event.num_computed_tokens != known.computed:
            self._find(f"request {event.victim} lost {event.num_computed_tokens} tokens; it had {known.computed}")
        if self._overlaps and (self._has_decoded or event.victim in self._completed):
            known.known -= 1  # its last token, which was not taken
        self._release(event.victim, known)
        num_running = sum(each.is_running for each in self._requests.values())
        self._num_asked = -(-num_running * RETRACTED_STEPS // self._page_size)

    def _finish(self, event: Finished) -> None:
        self._begin_taking()
        known = self._requests[event.request]
        if known.known != known.last or event.request not in self._due:
            self._find(f"finished with {known.known} of {known.last} tokens", event.request)
        self._drop(event.request)

    def _drop(self, request: int) -> None:
        self._release(request, self._requests[request])
        del self._requests[request]

    def _release(self, request: int, known: _Known) -> None:
        """Take all that a request has."""
        end = self._due.pop(request, 0)
        if known.num_found < end:
            self._find("was computed, and no event says that it can be found", request, known.num_found)
        for page in range(known.num_found):
            name = self._name(known.content, page)
            refs = self._refs[name] = self._refs[name] - 1
            self._num_referenced -= not refs
        self._num_private -= known.num_pages - known.num_found
        known.computed = known.num_found = known.num_pages = 0
        known.is_running = known.is_decoding = False
        self._late.pop(request, None)
        if self._chunked == request:
            self._chunked = None

    # The engine's account --------------------------------------------------------------------------------

    def _compare(self, account: Memory) -> None:
        """Compare the engine's account of its memory with the books: laws L1 and L2. Raise AuditError if any differ."""
        refs = self._refs
        if isinstance(account, HostRadixCache):
            refs = self._with_copies(account)
        num_used = sum(map(bool, refs.values())) + self._num_private
        num_cached = len(refs) - num_used + self._num_private
        if (account.num_used, account.num_cached) != (num_used, num_cached):
            counts = f"{account.num_used} pages used and {account.num_cached} cached"
            self._find(f"the engine counts {counts}, the books {num_used} and {num_cached}")
            self._name_different(account, refs)
        if self.findings:
            raise AuditError(self.findings)

    def _with_copies(self, account: HostRadixCache) -> dict[bytes, int]:
        """Return the references of pages with those of copies; compare host memory."""
        refs, tree = dict(self._refs), account.tiered
        for table, end in account.held():
            content = table.path[-1].content
            for page in range(end):
                name = self._name(content, page)
                if name not in refs:
                    self._find("is copied or loaded, and is not on the device", content.owner, page)
                refs[name] = refs.get(name, 0) + 1
        copies = [*tree.queued, *(copy for copy, is_load in account.copying.items() if not is_load)]
        below = set(self._below)
        for part in (part for copy in copies for part in copy.parts):
            below.update(self._name(part.content, page) for page in range(part.start, part.end))
        num_used = tree.total_below - tree.num_free_below - tree.num_fetching
        if num_used != len(below):
            self._find(f"the engine counts {num_used} pages in {tree.medium}, the books {len(below)}")
        return refs

    def _name_different(self, account: Memory, refs: dict[bytes, int]) -> None:
        """Name pages that differ between the engine and the books."""
        theirs = {
            self._name(content, page): count
            for _, content, start, end, count in account.runs()
            for page in range(start, end)
        }
        names = [name for name in {**theirs, **refs} if theirs.get(name) != refs.get(name)]
        for name in names[:MOST_NAMED]:
            counts = [f"{of[name]} times" if name in of else "not at all" for of in (theirs, refs)]
            self._find(f"the engine references it {counts[0]}, the books {counts[1]}", *self._digests.place(name))
        if len(names) > MOST_NAMED:
            self._find(f"and {len(names) - MOST_NAMED} pages more")

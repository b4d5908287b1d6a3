"""The naive engine: one page at a time, one token at a time, one step at a time.

It restates the rules of the design and of the `mocker` profile in the plainest way there is, shares no
code with kvarts, and is slow on purpose. Laws L4, L5, L7 and L8 are judged against it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol


@dataclass
class NaiveRequest:
    """One request; `tokens` are prompt token values, `output` the values generation will produce (None: unique)."""

    seq: int
    arrival_ns: int
    tokens: tuple[object, ...]
    num_output: int
    output: tuple[object, ...] | None = None
    priority: int = 0
    tenant: object = None
    # Filled by the run.
    made: int = 0
    computed: int = 0
    pages: list[Page] = field(default_factory=list)
    first_admitted_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    others_hit_tokens: int = 0  # hit, and never before in the request's pages
    largest_hit_tokens: int = 0
    admissions: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    furthest: int = 0
    computed_first: int = 0  # tokens computed that were never in its pages before
    rejected: bool = False
    know_output: bool = True
    replica: int | None = None
    token_times_ns: list[int] = field(default_factory=list)
    gives_up_ns: int | None = None
    cancelled: bool = False
    seniority: int = 0
    cancelled_prompt_tokens: int = 0  # prompt tokens computed that were never in its pages before
    decodes: bool = False
    read: int = 0  # tokens whose values the plan of a step knows
    stops: bool = False  # its last token ends it, and that is known one plan too late

    @property
    def has_ended(self) -> bool:
        return self.made == self.num_output

    @property
    def known(self) -> int:
        return len(self.tokens) + self.made

    def token(self, index: int) -> object:
        if index < len(self.tokens):
            return ("token", self.tokens[index])
        if self.output is not None and self.know_output:
            return ("token", self.output[index - len(self.tokens)])
        return ("made", self.seq, index)


@dataclass(eq=False)
class Page:
    name: object | None = None  # the content key once the page is full
    refs: int = 0


@dataclass
class Batch:
    """What one step does, for the cost function: (tokens done before, tokens done after, known) per request."""

    prefills: list[tuple[NaiveRequest, int, int]]
    decodes: list[tuple[NaiveRequest, int]]


@dataclass
class NaiveStep:
    start_ns: int
    duration_ns: int
    used: int
    cached: int
    released: int
    running: int
    waiting: int
    preempted: int
    tokens: int
    leaves_nobody: bool


CostFn = Callable[[Batch, "NaiveEngine"], int]
HeadFn = Callable[[list[NaiveRequest], int], NaiveRequest]
"""Which of those that wait, in the order of the default, is next at a time."""


def first(waiting: list[NaiveRequest], now_ns: int) -> NaiveRequest:
    return waiting[0]


def shortest_first(patience_ns: int) -> HeadFn:
    """The shortest prompt; the oldest request, if it has waited for so long."""

    def head(waiting: list[NaiveRequest], now_ns: int) -> NaiveRequest:
        oldest = min(waiting, key=lambda r: (r.arrival_ns, r.seq))
        if now_ns - oldest.arrival_ns >= patience_ns:
            return oldest
        return min(waiting, key=lambda r: (len(r.tokens), r.seq))

    return head


class NaiveEngine:
    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_num_batched_tokens: int = 8192,
        max_num_seqs: int = 256,
        profile: str = "default",
        cost: CostFn,
        choose_head: HeadFn = first,
        long_prefill_token_threshold: int = 0,
        watermark: float = 0.0,
        plans_ahead: bool = False,
    ) -> None:
        # The plan of a step is made when the step before it starts: it knows neither the tokens of that one, except
        # how many there are, nor who arrived during it.
        self.joins_late = plans_ahead
        self.plans_ahead = plans_ahead and profile == "default"
        self.names_at_turns = False  # pages that decodes fill are named before the next decode takes its pages
        self.held_up: list[NaiveRequest] = []  # decodes that computed nothing when one before them preempted itself
        self.joining: list[NaiveRequest] = []
        self.leaving: list[NaiveRequest] = []  # they are dropped when the next step is planned
        self.is_idle = True  # no step runs while the next one is planned
        self.choose_head = choose_head
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.watermark = watermark
        self.most_tokens = max_num_batched_tokens  # of one request in the present step
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.profile = profile
        self.cost = cost
        self.num_empty = num_pages
        self.num_released = 0
        self.lru: list[Page] = []
        self.index: dict[object, list[Page]] = {}
        self.running: list[NaiveRequest] = []
        self.waiting: list[NaiveRequest] = []
        self.evicted: list[object] = []
        self.preempted: list[tuple[int, int, int]] = []  # victim, asker, computed tokens lost
        self.steps: list[NaiveStep] = []
        self.finished: list[NaiveRequest] = []
        self.is_pausing = False
        self.num_seniors = 0
        self.budget_left = self.num_preempted = 0  # in the last step

    # Pages ------------------------------------------------------------------------------------------------

    def name_of(self, request: NaiveRequest, page: int) -> object:
        """The identity of a full page: the tenant and every token from the first to the end of the page."""
        end = (page + 1) * self.page_size
        return (request.tenant, tuple(request.token(i) for i in range(end)))

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_empty - len(self.lru)

    def higher(self, mark: tuple[int, int, int]) -> tuple[int, int, int]:
        return (self.num_used, len(self.lru), self.num_released) if self.num_used > mark[0] else mark

    def take_page(self) -> Page:
        if self.num_empty:
            self.num_empty -= 1
        else:
            old = self.lru.pop(0)
            copies = self.index[old.name]
            copies.remove(old)
            if not copies:
                del self.index[old.name]
                self.evicted.append(old.name)  # until then a copy could still be found
        return Page(refs=1)

    def release(self, request: NaiveRequest) -> None:
        for page in reversed(request.pages):
            page.refs -= 1
            if page.refs == 0:
                self.num_released += 1
                if page.name is None:
                    self.num_empty += 1
                else:
                    self.lru.append(page)
        request.pages = []

    def lookup(self, request: NaiveRequest) -> list[Page]:
        found: list[Page] = []
        limit = (request.known - 1) // self.page_size
        while len(found) < limit:
            copies = self.index.get(self.name_of(request, len(found)))
            if copies is None:
                break
            found.append(copies[0])
        return found

    def compute(self, request: NaiveRequest, upto: int) -> None:
        """Computes tokens up to `upto`; full pages become findable at once."""
        self.count_computed(request, upto)
        self.name_pages(request, min(upto, request.read) if self.plans_ahead else upto)

    def count_computed(self, request: NaiveRequest, upto: int) -> None:
        request.recomputed_tokens += max(0, min(upto, request.furthest) - request.computed)
        start = max(request.furthest, request.computed)
        request.computed_first += max(0, upto - start)
        request.cancelled_prompt_tokens += max(0, min(upto, len(request.tokens)) - start)
        request.furthest = max(request.furthest, upto)
        request.computed = upto

    def name_pages(self, request: NaiveRequest, num_tokens: int) -> None:
        for index in range(num_tokens // self.page_size):
            page = request.pages[index]
            if page.name is None:
                page.name = self.name_of(request, index)
                self.index.setdefault(page.name, []).append(page)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    # Requests ---------------------------------------------------------------------------------------------

    def submit(self, request: NaiveRequest) -> None:
        if self.pages_for(len(request.tokens) + request.num_output - 1) > self.num_pages:
            request.rejected = True
            self.finished.append(request)
            return
        if self.joins_late and not self.is_idle:
            self.joining.append(request)
        else:
            self.add(request)

    def add(self, request: NaiveRequest) -> None:
        request.read = request.known
        self.waiting.append(request)
        if self.profile == "default":
            self.waiting.sort(key=lambda r: -r.priority)  # stable: arrival order within a priority

    def end_transfers(self, now_ns: int) -> None:
        """End the transfers that are due: here there are none."""

    def cancel(self, request: NaiveRequest) -> None:
        """Between steps."""
        request.cancelled = True
        if request in self.joining:
            self.joining.remove(request)
        elif self.plans_ahead and request.has_ended and request in self.running:
            pass  # it leaves as it would have
        elif request in self.running:
            self.running.remove(request)
            self.release(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.is_idle = self.is_idle or not (self.running or self.waiting)

    def give_up(self, request: NaiveRequest) -> None:
        """Between steps; a plan that is made already computes one more token of it."""
        is_planned = self.plans_ahead and not self.is_idle and request not in self.joining
        if is_planned and not request.has_ended:
            self.leaving.append(request)
        else:
            self.cancel(request)

    def drop_leaving(self) -> None:
        for request in self.leaving:
            request.cancelled = True
            if request in self.running:
                self.running.remove(request)
                self.release(request)
            else:
                self.waiting.remove(request)
        self.leaving = []

    def preempt(self, victim: NaiveRequest, asker: NaiveRequest, now_ns: int) -> None:
        self.preempted.append((victim.seq, asker.seq, victim.computed))
        self.running.remove(victim)
        self.release(victim)
        victim.preemptions += 1
        if self.plans_ahead and victim.has_ended:
            return  # and does not come back
        victim.computed = 0
        victim.decodes = False
        self.waiting.insert(0, victim)
        if self.profile == "default":
            self.waiting.sort(key=lambda r: -r.priority)
        assert not victim.token_times_ns or victim.token_times_ns[-1] <= now_ns

    def victim(self) -> NaiveRequest:
        lowest = min(r.priority for r in self.running)
        same = [r for r in self.running if r.priority == lowest or self.profile == "mocker"]
        return max(same, key=lambda r: r.seniority)

    def take_seniority(self) -> int:
        """Of those that run, the last is preempted first."""
        self.num_seniors += 1
        return self.num_seniors

    def pin(self, pages: list[Page]) -> None:
        for page in pages:
            if page.refs == 0:
                self.unlist(page)
            page.refs += 1

    def unlist(self, page: Page) -> None:
        self.lru.remove(page)

    def enter(self, head: NaiveRequest, hit_tokens: int, budget: int, now_ns: int) -> int:
        """It begins to run, with what was found in its pages; returns the tokens it computes at once."""
        want = min(head.known - hit_tokens, budget, self.most_tokens)
        head.computed = hit_tokens
        need = self.pages_for(hit_tokens + want) - len(head.pages)
        head.pages += [self.take_page() for _ in range(need)]
        self.running.append(head)
        if not self.keeps_seniority(head):
            head.seniority = self.take_seniority()
        head.admissions += 1
        if head.first_admitted_ns is None:
            head.first_admitted_ns = now_ns
        head.largest_hit_tokens = max(head.largest_hit_tokens, hit_tokens)
        head.others_hit_tokens += max(0, hit_tokens - head.furthest)
        head.furthest = max(head.furthest, hit_tokens)
        self.compute(head, hit_tokens + want)
        return want

    def num_kept(self, total: int) -> int:
        """The watermark, of so many blocks and vLLM's block 0."""
        return int(self.watermark * (total + 1)) if self.running else 0

    # A step -----------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self.joining)

    # What an engine with tiers below does besides.

    def is_used(self, page: Page) -> bool:
        return page.refs > 0

    def num_free(self) -> int:
        return self.num_pages - self.num_used

    def num_seated(self) -> int:
        return len(self.running)

    def num_waiting(self) -> int:
        return len(self.waiting)

    def begin_step(self, now_ns: int) -> None:
        pass

    def keeps_seniority(self, head: NaiveRequest) -> bool:
        """Whether it has it since its load began."""
        return False

    def compute_fronts(self, budget: int, before: dict[int, int]) -> int:
        return budget

    def loading_with_front(self) -> list[NaiveRequest]:
        return []

    def admit_loaded(self, now_ns: int, budget: int, before: dict[int, int]) -> int:
        return budget

    def go_on_with_loads(self, head: NaiveRequest, now_ns: int, budget: int, before: dict[int, int]) -> int:
        """After a head has begun to run, to load, or to wait for a load."""
        return budget

    def lacks_for_load(self, head: NaiveRequest, hits: list[Page]) -> bool:
        """Whether it would load, and waits for memory to do so."""
        return False

    def awaits_load(self, head: NaiveRequest, hits: list[Page]) -> bool:
        return False

    def starts_load(self, head: NaiveRequest, hits: list[Page], now_ns: int) -> bool:
        return False

    def pause_until(self) -> int:
        raise AssertionError("there is work, and a step does nothing")

    def plan_stores(self) -> None:
        pass

    def step_ns(self, duration_ns: int, now_ns: int) -> int:
        """How long a step takes that would take so long without transfers."""
        return duration_ns

    def end_step(self) -> None:
        pass

    # What an engine that drafts does besides.

    def num_drafted(self, request: NaiveRequest) -> int:
        """The tokens drafted for a request that has its turn."""
        return 0

    def num_right(self, request: NaiveRequest) -> int:
        """How many of them were right."""
        return 0

    def begin_admissions(self, before: dict[int, int]) -> None:
        pass

    def num_padded(self, head: NaiveRequest, hits: list[Page]) -> int:
        """The tokens for which a head needs room besides those that it computes."""
        return 0

    # What an engine that shares its device does besides.

    def fits(self, head: NaiveRequest, num_pages: int) -> bool:
        return num_pages <= self.num_free()

    def others_preempt_for(self, request: NaiveRequest, num_pages: int) -> bool:
        return False

    def is_in_order(self) -> bool:
        """Whether nobody is preempted for somebody who was admitted later."""
        has_ranks = self.profile == "default"  # the mocker preempts whoever came last
        return self.running == sorted(self.running, key=lambda r: (-r.priority if has_ranks else 0, r.seniority))

    def compute_given(self, took: dict[int, tuple[NaiveRequest, int]], before: dict[int, int]) -> None:
        """Whoever still runs computes what it was given; a victim's share is never computed."""
        for request, want in took.values():
            before[request.seq] = request.computed
            if self.plans_ahead and request.has_ended:
                self.name_pages(request, request.computed)
                continue  # nobody reads what it computes
            self.compute(request, request.computed + want)
        took.clear()

    def take_given(self) -> int:
        """How many gave way to other models since the last step."""
        return 0

    def step(self, now_ns: int) -> int:
        """Runs one step that starts at `now_ns`; returns when it ends."""
        if self.is_idle or not (self.running or self.waiting):
            self.add_joining()
        self.begin_step(now_ns)
        budget = self.max_num_batched_tokens
        is_limited = self.long_prefill_token_threshold and len(self.running) + self.num_waiting() > 1
        self.most_tokens = self.long_prefill_token_threshold if is_limited else budget
        took: dict[int, tuple[NaiveRequest, int]] = {}  # seq -> (request, tokens to compute)
        before: dict[int, int] = {}
        num_preempted = 0
        mark = (-1, 0, 0)  # used, cached and released when most was in use
        has_chunk = False
        for request in list(self.running):
            if budget == 0:
                break
            if request not in self.running or (self.plans_ahead and request.has_ended and not request.stops):
                continue
            want = min(request.known - request.computed, budget, self.most_tokens)
            if want == 0:
                continue
            want += self.num_drafted(request)
            need = self.pages_for(request.computed + want) - len(request.pages)
            has_chunk = has_chunk or not request.decodes or request in self.held_up
            if (has_chunk or self.names_at_turns) and self.is_in_order():
                self.compute_given(took, before)  # of equal pages theirs come first
            while need > self.num_free() and not self.others_preempt_for(request, need):
                mark = self.higher(mark)
                victim = self.victim()
                if victim.seq in took:
                    budget += took.pop(victim.seq)[1]
                    if self.plans_ahead:
                        self.name_pages(victim, min(victim.computed, victim.read))  # it had its turn
                self.preempt(victim, request, now_ns)
                num_preempted += 1
                if victim is request:
                    break
            if request not in self.running:
                # As in vLLM, none that was admitted after it computes. A decode among them goes on with a chunk.
                self.held_up += [other for other in self.running if other.decodes and other.seq not in took]
                break
            request.pages += [self.take_page() for _ in range(need)]
            took[request.seq] = (request, want)
            budget -= want
        self.compute_given(took, before)
        self.held_up = [request for request in self.held_up if request.seq not in before]
        self.is_held_back = False
        self.begin_admissions(before)
        if not num_preempted:
            budget = self.compute_fronts(budget, before)
            budget = self.admit_loaded(now_ns, budget, before)
        while not num_preempted and self.waiting and self.num_seated() < self.max_num_seqs and budget:
            if self.is_held_back:
                break
            head = self.choose_head(self.waiting, now_ns)
            hits = self.lookup(head)
            shared = sum(1 for page in hits if self.is_used(page))
            num_padded = self.num_padded(head, hits)
            if 1 + num_padded > budget:
                break
            with_draft = self.pages_for(head.known + num_padded) - shared
            if num_padded and not self.running and not self.fits(head, with_draft):
                num_padded = 0  # nothing will release memory
            if not self.fits(head, self.pages_for(head.known + num_padded) - shared + self.num_kept(self.num_pages)):
                break
            place = self.waiting.index(head)
            self.waiting.remove(head)
            if self.awaits_load(head, hits):
                budget = self.go_on_with_loads(head, now_ns, budget, before)
                continue
            if self.lacks_for_load(head, hits):
                self.waiting.insert(place, head)
                break
            self.pin(hits)
            head.pages = list(hits)
            if self.starts_load(head, hits, now_ns):
                budget = self.compute_fronts(budget, before)
                budget = self.go_on_with_loads(head, now_ns, budget, before)
                continue
            before[head.seq] = len(hits) * self.page_size
            budget -= num_padded
            head.pages += [
                self.take_page() for _ in range(self.pages_for(head.known + num_padded) - len(hits)) if num_padded
            ]
            budget -= self.enter(head, before[head.seq], budget, now_ns)
            budget = self.go_on_with_loads(head, now_ns, budget, before)
        self.plan_stores()
        mark = self.higher(mark)
        computing = [*self.running, *self.loading_with_front()]
        # Their tokens are computed, in memory that is in use until the step ends.
        num_leaving = sum(r in self.leaving or (r.has_ended and r.seq in before) for r in self.running)
        self.drop_leaving()
        has_released = self.plans_ahead and self.read_results(before)
        self.budget_left, self.num_preempted = budget, num_preempted
        self.end_step()
        num_preempted += self.take_given()
        self.is_idle = budget == self.max_num_batched_tokens and not num_preempted
        if self.is_idle:
            return now_ns if has_released else self.pause_until()
        batch = Batch([], [])
        for request in computing:
            if request.seq not in before:
                continue
            if self.plans_ahead and request.has_ended:
                batch.decodes.append((request, request.known))
                continue
            if before[request.seq] < len(request.tokens):
                batch.prefills.append((request, before[request.seq], request.computed))
            if request.computed == request.known and request.made > 0:
                batch.decodes.append((request, request.known))
        duration_ns = self.step_ns(self.cost(batch, self), now_ns)
        end_ns = now_ns + duration_ns
        num_running, num_waiting = len(self.running) + self.plans_ahead * num_leaving, self.num_waiting()
        for request in list(self.running):
            if request.seq in before and request.computed == request.known:
                num_right = self.num_right(request)
                self.count_computed(request, request.computed + num_right)
                request.made += 1 + num_right
                request.decodes = True
                request.token_times_ns.append(end_ns)
                if request.first_token_ns is None:
                    request.first_token_ns = end_ns
                if request.made == request.num_output:
                    request.last_token_ns = end_ns
                    if not self.plans_ahead:
                        self.running.remove(request)
                        self.release(request)
                    self.finished.append(request)
        has_others = self.waiting or self.joining
        if self.plans_ahead and not has_others and all(each.has_ended and not each.stops for each in self.running):
            self.release_ended()  # else when the next plan is made
        self.steps.append(
            NaiveStep(
                now_ns,
                duration_ns,
                *mark,
                num_running,
                num_waiting,
                num_preempted,
                self.max_num_batched_tokens - budget,
                not self.has_work(),
            )
        )
        self.add_joining()  # the next plan is made now
        self.is_idle = not (self.running or self.waiting)
        return end_ns

    def add_joining(self) -> None:
        for request in self.joining:
            self.add(request)
        self.joining = []

    def read_results(self, computing: dict[int, int]) -> bool:
        """What the step before has sampled, and who ended with it, is known now that the plan is made."""
        for request in self.running:
            if request.seq not in computing:
                self.name_pages(request, request.computed)
        for request in [*self.running, *self.waiting]:
            request.read = request.known
        return self.release_ended()

    def release_ended(self) -> bool:
        ended = [request for request in self.running if request.has_ended]
        for request in ended:
            self.name_pages(request, request.computed)
            self.running.remove(request)
            self.release(request)
        return bool(ended)


def polynomial_ns(batch: Batch, engine: NaiveEngine) -> int:
    """The `mocker` profile's cost, one request at a time."""
    prefill_ms = 0.0
    if batch.prefills:
        n = len(batch.prefills)
        after = sum(min(a, len(r.tokens)) for r, _, a in batch.prefills) // n
        before = sum(b for _, b, _ in batch.prefills) // n
        t = n * (after - before)
        if t:
            prefill_ms = 4.209989e-7 * t * t + 1.518344e-2 * t + 16.50142
    decode_ms = 0.0
    if batch.decodes:
        used = sum(known for _, known in batch.decodes)
        u = min(used / (engine.num_pages * engine.page_size), 1.0)
        decode_ms = max(1.0, -25.74 * u * u + 54.01 * u + 5.74)
    return round_ns(prefill_ms) + round_ns(decode_ms)


def round_ns(ms: float) -> int:
    return round(Fraction(ms * 1e6))


class Driven(Protocol):
    """What `run_naive` drives: an engine, or engines that step together."""

    is_pausing: bool

    def submit(self, request: NaiveRequest) -> None: ...

    def give_up(self, request: NaiveRequest) -> None: ...

    def end_transfers(self, now_ns: int) -> None: ...

    def has_work(self) -> bool: ...

    def step(self, now_ns: int) -> int: ...


def run_naive(requests: Sequence[NaiveRequest], engines: Sequence[Driven]) -> None:
    """Open loop, round robin: arrivals at their times, i-th arrival to engine i mod n."""
    pending = sorted(requests, key=lambda r: r.arrival_ns)
    ends: list[int | None] = [None] * len(engines)
    dropping: list[list[NaiveRequest]] = [[] for _ in engines]
    impatient: list[NaiveRequest] = []
    now = 0
    sent = 0
    while True:
        for i, end in enumerate(ends):
            if end is not None and end <= now:
                ends[i] = None
                if dropping[i]:
                    engines[i].end_transfers(now)
                for request in dropping[i]:
                    engines[i].give_up(request)
                dropping[i] = []
        impatient = [r for r in impatient if not r.rejected and (r.last_token_ns is None or r.last_token_ns > now)]
        for request in sorted(impatient, key=lambda r: (r.gives_up_ns, r.seq)):
            assert request.gives_up_ns is not None and request.replica is not None
            if request.gives_up_ns > now:
                break
            impatient.remove(request)
            if engines[request.replica].is_pausing:
                ends[request.replica] = None
            if ends[request.replica] is None:
                engines[request.replica].end_transfers(now)
                engines[request.replica].give_up(request)
            else:
                dropping[request.replica].append(request)
        while sent < len(pending) and pending[sent].arrival_ns <= now:
            request = pending[sent]
            request.replica = sent % len(engines)
            engine = engines[request.replica]
            engine.submit(request)
            if engine.is_pausing:
                ends[request.replica] = None
            if request.gives_up_ns is not None:
                impatient.append(request)
            sent += 1
        if any(request.gives_up_ns == now for request in impatient):
            continue
        for i, engine in enumerate(engines):
            if ends[i] is None and engine.has_work():
                engine.is_pausing = False
                ends[i] = engine.step(now)
        times = [end for end in ends if end is not None]
        if sent < len(pending):
            times.append(pending[sent].arrival_ns)
        times += [request.gives_up_ns for request in impatient if request.gives_up_ns is not None]
        if not times:
            return
        now = min(times)

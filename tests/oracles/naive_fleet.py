"""A fleet, one page, one token and one step at a time: prompts are computed on one worker and continued on another.

It restates who does what when, as plainly as there is, on the naive engine, and shares no code with kvarts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil

from oracles.naive import Batch, CostFn, NaiveEngine, NaiveRequest, Page, polynomial_ns, round_ns


@dataclass(eq=False)
class NaiveHandoff:
    """A request of the fleet; the two workers have a request each."""

    request: NaiveRequest
    prefill: NaiveRequest
    decode: NaiveRequest
    source: int = -1
    target: int = -1
    order: int = -1
    hit_pages: int = 0
    held_ns: int = -1
    reserved_ns: int = -1
    activated_ns: int = -1
    released_ns: int = -1
    ended_ns: int = -1
    outcome: str = ""
    given_up: bool = False
    cancelled_ns: int = -1
    restarts: int = 0
    planned: NaiveWorker | None = None
    is_local: bool = False
    layers: list[tuple[int, int]] = field(default_factory=list)
    """When each layer of each step was computed, and its bytes, if these are sent layer by layer."""
    num_taken: int = 0
    """How many of them the transfer has."""


def decode_only_ns(batch: Batch, engine: NaiveEngine) -> int:
    """Dynamo's mocker on a worker that generates: prompts take no time."""
    if not batch.decodes:
        return 0
    used = sum(known for _, known in batch.decodes)
    u = min(used / (engine.num_pages * engine.page_size), 1.0)
    return round_ns(max(1.0, -25.74 * u * u + 54.01 * u + 5.74))


class NaiveWorker(NaiveEngine):
    def __init__(self, *, is_mocker: bool, cost: CostFn, **settings: int) -> None:
        super().__init__(cost=cost, profile="mocker" if is_mocker else "default", **settings)  # type: ignore[arg-type]
        self.is_mocker = is_mocker
        self.held: list[NaiveRequest] = []
        self.prefilled: list[NaiveRequest] = []
        self.pending: list[NaiveHandoff] = []
        self.arrived: set[int] = set()
        self.orders: dict[int, int] = {}
        self.is_by_age = False
        """It generates from prompts that others computed: whoever waits here is older than those behind."""
        self.deferred: list[tuple[str, NaiveHandoff]] = []
        self.end_ns: int | None = None
        self.ended: list[NaiveRequest] = []  # in the step under way
        self.interrupts: list[tuple[str, NaiveHandoff]] = []
        self.is_down = self.is_failing = False
        self.generation = 0
        self.refused_at = -1
        self.finds_prefixes = True
        """Whether requests find anything that is cached."""

    def lookup(self, request: NaiveRequest) -> list[Page]:
        return super().lookup(request) if self.finds_prefixes else []

    # Handing over ---------------------------------------------------------------------------------------------

    def try_to_reserve(self, now_ns: int) -> list[NaiveHandoff]:
        """The first pending request takes its pages, and without the mocker's rules as many as can."""
        done: list[NaiveHandoff] = []
        while self.pending and not self.is_down:
            if self.is_mocker and self.refused_at == self.generation:
                break
            handoff = self.pending[0]
            request = handoff.decode
            older = [r for r in self.waiting if r.seq not in self.arrived and self.age(r) < self.age(request)]
            hits = self.found_whole(request)
            num_fresh = self.pages_for(len(request.tokens)) - len(hits)
            num_unused = sum(1 for page in hits if not self.is_used(page))
            fits = num_fresh + num_unused <= self.num_free()
            if self.num_seated() >= self.max_num_seqs or not fits or (older and not self.is_mocker):
                self.refused_at = self.generation
                break
            self.pending.pop(0)
            self.pin(hits)
            request.pages = [*hits, *(self.take_page() for _ in range(num_fresh))]
            handoff.hit_pages = len(hits)
            handoff.reserved_ns = now_ns
            done.append(handoff)
            if self.is_mocker:
                break
        return done

    def found_whole(self, request: NaiveRequest) -> list[Page]:
        found: list[Page] = []
        while self.finds_prefixes and len(found) < len(request.tokens) // self.page_size:
            copies = self.index.get(self.name_of(request, len(found)))
            if copies is None:
                break
            found.append(copies[0])
        return found

    def age(self, request: NaiveRequest) -> tuple[int, int, int]:
        return (-request.priority, request.arrival_ns, request.seq)

    def activate(self, handoff: NaiveHandoff, now_ns: int) -> None:
        request = handoff.decode
        request.computed = len(request.tokens)
        for index in range(len(request.tokens) // self.page_size):
            page = request.pages[index]
            if page.name is None:
                page.name = self.name_of(request, index)
                self.index.setdefault(page.name, []).append(page)
        handoff.activated_ns = now_ns
        self.arrived.add(request.seq)
        self.orders[request.seq] = handoff.order
        if self.is_mocker:
            places = [i for i, other in enumerate(self.waiting) if self.orders[other.seq] > handoff.order]
            self.waiting.insert(places[0] if places else len(self.waiting), request)
        else:
            self.waiting.append(request)
            self.waiting.sort(key=self.age)

    def has(self, request: NaiveRequest) -> bool:
        return request in self.running or request in self.waiting or request in self.held or bool(request.pages)

    def drop(self, request: NaiveRequest) -> bool:
        """Between steps: nothing of it stays here; whether anything was."""
        was_here = self.has(request)
        for requests in (self.running, self.waiting, self.held):
            if request in requests:
                requests.remove(request)
        self.arrived.discard(request.seq)
        if request.pages:
            self.release(request)
            self.generation += 1
        if was_here:
            self.refused_at = -1
        return was_here

    def let_go(self, request: NaiveRequest) -> None:
        self.held.remove(request)
        self.release(request)
        self.generation += 1

    def preempt(self, victim: NaiveRequest, asker: NaiveRequest, now_ns: int) -> None:
        super().preempt(victim, asker, now_ns)
        self.generation += 1
        if self.is_by_age:
            self.waiting.sort(key=self.age)

    # A step -----------------------------------------------------------------------------------------------------

    def start(self, now_ns: int) -> bool:
        """Plans a step, and decides when it ends; whether there is anything to do."""
        self.begin_step(now_ns)
        self.budget = self.max_num_batched_tokens
        before: dict[int, int] = {}
        self.before = before
        num_preempted = self.schedule_running(before, now_ns)
        decoding: list[NaiveRequest] = []  # that get their first token, from a prompt that came
        if not num_preempted:
            self.budget = self.compute_fronts(self.budget, before)
            self.budget = self.admit_loaded(now_ns, self.budget, before)
            self.admit(before, decoding, now_ns)
        self.plan_stores()
        if not before and not num_preempted:
            return False
        batch = Batch([], [])
        for request in [*self.running, *self.loading_with_front()]:
            if request.seq not in before:
                continue
            if before[request.seq] < len(request.tokens):
                batch.prefills.append((request, before[request.seq], request.computed))
            if request.computed == request.known and (request.made > 0 or request in decoding):
                batch.decodes.append((request, request.known))
        self.end_ns = now_ns + self.step_ns(self.cost(batch, self), now_ns)
        self.ended = [r for r in self.running if r.seq in before and r.computed == r.known]
        return True

    def schedule_running(self, before: dict[int, int], now_ns: int) -> int:
        num_preempted = 0
        took: dict[int, tuple[NaiveRequest, int]] = {}
        for request in list(self.running):
            want = min(request.known - request.computed, self.budget)
            if request not in self.running or want == 0:
                continue
            need = self.pages_for(request.computed + want) - len(request.pages)
            while need > self.num_free() and not self.others_preempt_for(request, need):
                victim = self.victim()
                if victim.seq in took:
                    self.budget += took.pop(victim.seq)[1]
                self.preempt(victim, request, now_ns)
                num_preempted += 1
                if victim is request:
                    break
            if request not in self.running:
                break  # as in vLLM, none that was admitted after it computes
            request.pages += [self.take_page() for _ in range(need)]
            took[request.seq] = (request, want)
            self.budget -= want
        for request, want in took.values():
            before[request.seq] = request.computed
            self.compute(request, request.computed + want)
        return num_preempted

    def admit(self, before: dict[int, int], decoding: list[NaiveRequest], now_ns: int) -> None:
        gated = self.is_mocker and bool(self.pending)
        while self.waiting and self.num_seated() < self.max_num_seqs:
            ready = [r for r in self.waiting if r.seq in self.arrived]
            if gated and not ready:
                return
            head = ready[0] if gated else self.waiting[0]
            if head.seq in self.arrived:
                if self.budget == 0 and not self.is_mocker:
                    return
                was_last = self.budget == 0
                self.join(head, before, decoding, now_ns)
                if was_last:
                    return
                continue
            if self.budget == 0:
                return
            hits = self.lookup(head)
            shared = sum(1 for page in hits if self.is_used(page))
            if not self.fits(head, self.pages_for(head.known) - shared):
                if not self.is_mocker:
                    for other in ready:
                        if self.num_seated() < self.max_num_seqs and self.budget:
                            self.join(other, before, decoding, now_ns)
                return
            self.waiting.remove(head)
            if self.awaits_load(head, hits):
                self.budget = self.go_on_with_loads(head, now_ns, self.budget, before)
                continue
            self.pin(hits)
            head.pages = list(hits)
            if self.starts_load(head, hits, now_ns):
                self.budget = self.compute_fronts(self.budget, before)
                self.budget = self.go_on_with_loads(head, now_ns, self.budget, before)
                continue
            before[head.seq] = len(hits) * self.page_size
            self.budget -= self.enter(head, before[head.seq], self.budget, now_ns)
            self.budget = self.go_on_with_loads(head, now_ns, self.budget, before)

    def join(self, request: NaiveRequest, before: dict[int, int], decoding: list[NaiveRequest], now_ns: int) -> None:
        self.waiting.remove(request)
        self.arrived.remove(request.seq)
        self.running.append(request)
        request.seniority = self.take_seniority()
        request.admissions += 1
        request.first_admitted_ns = now_ns
        request.furthest = request.computed
        before[request.seq] = request.computed
        decoding.append(request)
        if not self.is_mocker:
            self.budget -= 1

    def next_wake_ns(self) -> int | None:
        """When an idle worker has to look again, if it has."""
        return None

    def finish(self, now_ns: int) -> list[NaiveRequest]:
        """Ends the step; returns who made its last token."""
        self.end_ns = None
        done = []
        for request in self.ended:
            request.made += 1
            request.token_times_ns.append(now_ns)
            if request.first_token_ns is None:
                request.first_token_ns = now_ns
            if request.made < request.num_output:
                continue
            request.last_token_ns = now_ns
            self.running.remove(request)
            self.generation += 1
            done.append(request)
        self.ended = []
        return done


@dataclass
class NaiveFault:
    """What happens to a worker, by its number: down, or its link is cut, or slow by a factor."""

    kind: str
    worker: int
    start_ns: int
    end_ns: int | None
    factor: int


FAR = 1 << 62


@dataclass(eq=False)
class NaiveStream:
    """A transfer of layers: when each can be sent, and how long it takes from now on."""

    handoff: NaiveHandoff
    number: int
    now: Fraction
    layers: list[tuple[Fraction, Fraction]] = field(default_factory=list)
    is_whole: bool = False

    def advance(self, until: int) -> None:
        """Send until then, or until all that is known is sent."""
        while self.layers:
            ready, duration = self.layers[0]
            start = max(self.now, ready)
            if start >= until:
                return
            sent = min(duration, until - start)
            self.now = start + sent
            if sent < duration:
                self.layers[0] = (self.now, duration - sent)
                return
            self.layers.pop(0)

    def end(self) -> int:
        now = self.now
        for ready, duration in self.layers:
            now = max(now, ready) + duration
        return ceil(now) if self.is_whole else FAR


@dataclass
class NaiveFleet:
    """`rate`: bytes a second, or None; a token is one byte."""

    prefills: list[NaiveWorker]
    decodes: list[NaiveWorker]
    is_mocker: bool
    rate: float | None
    latency_ns: int
    only_missing: bool
    handoffs: list[NaiveHandoff] = field(default_factory=list)
    num_deadlocks: int = 0
    faults: list[NaiveFault] = field(default_factory=list)
    num_failed_transfers: int = 0
    least_remote: int | None = None
    num_layers: int = 0
    """0: transfers begin when the prompt is computed."""
    queue_tokens: float | None = None
    """Requests wait in the router of prefill workers while each has more tokens to compute; None: never."""
    queue_order: str = "fcfs"

    def run(self, requests: list[NaiveRequest]) -> None:
        self.workers = [*self.prefills, *self.decodes]
        for worker in self.decodes:
            worker.is_by_age = not self.is_mocker
        self.actions: list[tuple[str, NaiveHandoff]] = []
        self.transfers: list[tuple[int, int, NaiveHandoff]] = []
        self.streams: list[NaiveStream] = []
        self.in_router: list[tuple[float, int, NaiveHandoff]] = []
        self.num_queued = 0
        self.to_compute: dict[int, tuple[NaiveWorker, int]] = {}
        """By request: the worker that the router sent it to, and its tokens, until its prompt is computed."""
        self.notes: list[int] = []
        """What the router has heard since it last looked: requests that ended, or -1 for workers that came up."""
        self.num_reserved = self.num_sent = 0
        self.turns = {True: 0, False: 0}
        self.stranded: list[NaiveHandoff] = []
        self.cut: set[int] = set()
        self.slow: dict[int, int] = {}
        self.changes = sorted(
            [(fault.start_ns, True, place) for place, fault in enumerate(self.faults)]
            + [(fault.end_ns, False, place) for place, fault in enumerate(self.faults) if fault.end_ns is not None],
        )
        coming = sorted(requests, key=lambda r: r.arrival_ns)
        now = 0
        while True:
            self.at(now, coming)
            times = [w.end_ns for w in self.workers if w.end_ns is not None]
            wakes = [w.next_wake_ns() for w in self.workers if w.end_ns is None]
            times += [wake for wake in wakes if wake is not None]
            times += [end for end, _, _ in self.transfers if end < FAR]
            times += [coming[0].arrival_ns] if coming else []
            times += [end for end, _ in self.deadlines()]
            if (times or self.stranded or self.in_router) and self.changes:
                times.append(self.changes[0][0])
            if times:
                now = max(now, min(times))
            elif not self.fail_stranded() and not self.break_deadlock(now):
                return

    def at(self, now: int, coming: list[NaiveRequest]) -> None:
        """All that happens at one time, until nothing more does."""
        while True:
            happened = False
            for worker in self.workers:
                if worker.end_ns is not None and worker.end_ns <= now:
                    happened = True
                    self.end_step(worker, now)
            for worker in self.workers:
                wake_ns = worker.next_wake_ns() if worker.end_ns is None else None
                if wake_ns is not None and wake_ns <= now:
                    happened = True
                    worker.end_transfers(now)
                    self.send(worker.try_to_reserve(now))
            for end in sorted((t for t in self.transfers if t[0] <= now), key=lambda t: t[:2]):
                happened = True
                self.drop_transfer(end[2])
                self.do("activate", end[2], now)
            happened |= self.take_placed(now)
            happened |= self.take_in(now, coming)
            happened |= self.act(now)
            happened |= self.take_placed(now)
            for worker in self.workers:
                if worker.end_ns is not None:
                    continue
                if worker.start(now):
                    if self.num_layers and worker in self.prefills:
                        happened |= self.send_layers(worker, now)
                elif self.is_mocker and worker.waiting:
                    # A pass without an effect ends, and that is one more try.
                    reserved = worker.try_to_reserve(now)
                    self.send(reserved)
                    happened |= bool(reserved)
            if not happened:
                return

    def take_placed(self, now: int) -> bool:
        """The router hears what happened, and with each of it sends on what need not wait; whether it did."""
        if self.queue_tokens is None:
            return False
        happened = False
        while True:
            self.hear_of_prompts()
            released: list[tuple[NaiveHandoff, NaiveWorker]] = []
            while self.notes:
                self.to_compute.pop(self.notes.pop(0), None)
                while self.in_router and not self.all_busy():
                    self.in_router.sort(key=lambda each: each[:2])
                    handoff = self.in_router.pop(0)[2]
                    released.append((handoff, self.place(handoff)))
            for handoff, worker in released:
                self.submit(handoff, worker)
            if not released and not self.actions:
                return happened
            happened = True
            self.act(now)

    def all_busy(self) -> bool:
        assert self.queue_tokens is not None
        loads = {id(worker): 0 for worker in self.prefills if self.is_up(worker)}
        for worker, num_tokens in self.to_compute.values():
            if id(worker) in loads:
                loads[id(worker)] += num_tokens
        return all(load > self.queue_tokens for load in loads.values())

    def hear_of_prompts(self) -> None:
        for worker in self.prefills:
            self.notes += [each.seq for each in worker.prefilled]
            worker.prefilled = []

    def place(self, handoff: NaiveHandoff) -> NaiveWorker:
        self.hear_of_prompts()
        self.notes = [-1 if seq == handoff.request.seq else seq for seq in self.notes]  # of the worker that it left
        worker = self.choose(True)
        assert worker is not None
        self.to_compute[handoff.request.seq] = worker, len(handoff.request.tokens)
        return worker

    def queue_up(self, handoff: NaiveHandoff) -> None:
        self.num_queued += 1
        place: float = self.num_queued
        if self.queue_order == "lcfs":
            place = -place
        elif self.queue_order == "wspt":
            place = -(1 + handoff.prefill.priority) / len(handoff.request.tokens)
        self.in_router.append((place, self.num_queued, handoff))

    def send_layers(self, worker: NaiveWorker, now: int) -> bool:
        """What is computed in the step that starts goes out layer by layer; whether a first part does."""
        assert worker.end_ns is not None
        has_first = False
        for request in worker.running:
            if request.seq not in worker.before:
                continue
            handoff = next(each for each in self.handoffs if each.prefill is request)
            num_known = sum(num_bytes for _, num_bytes in handoff.layers)
            if not handoff.layers:
                has_first = True
                self.actions.append(("send", handoff))
            num_hit = max(num_known, worker.before[request.seq])
            if num_hit > num_known:
                handoff.layers.append((now, num_hit - num_known))
            num_new = request.computed - num_hit
            for layer in range(1, self.num_layers + 1) if num_new > 0 else ():
                ready = now + (worker.end_ns - now) * layer // self.num_layers
                first, last = (num_new * each // self.num_layers for each in (layer - 1, layer))
                handoff.layers.append((ready, last - first))
            self.feed(handoff)
        return has_first

    def feed(self, handoff: NaiveHandoff) -> None:
        """Give a transfer under way the layers that it does not have yet."""
        for stream in self.streams:
            if stream.handoff is not handoff or stream.is_whole:
                continue
            assert self.rate is not None
            byte = Fraction(1_000_000_000) / Fraction(self.rate) * self.slowness(handoff)
            for ready, num_bytes in handoff.layers[handoff.num_taken :]:
                stream.layers.append((Fraction(ready), num_bytes * byte))
            handoff.num_taken = len(handoff.layers)
            if sum(num_bytes for _, num_bytes in handoff.layers) == len(handoff.request.tokens):
                stream.is_whole = True
                stream.layers.append((Fraction(0), Fraction(self.latency_ns * self.slowness(handoff))))
            self.expect(stream)

    def expect(self, stream: NaiveStream) -> None:
        self.transfers = [each for each in self.transfers if each[2] is not stream.handoff]
        self.transfers.append((stream.end(), stream.number, stream.handoff))

    def drop_transfer(self, handoff: NaiveHandoff) -> None:
        self.transfers = [each for each in self.transfers if each[2] is not handoff]
        self.streams = [each for each in self.streams if each.handoff is not handoff]

    def act(self, now: int) -> bool:
        happened = bool(self.actions)
        while self.actions:
            self.do(*self.actions.pop(0), now)
        return happened

    def take_in(self, now: int, coming: list[NaiveRequest]) -> bool:
        """Clients give up, and requests arrive."""
        happened = False
        for worker in self.workers:
            if worker.end_ns is None and (worker.interrupts or worker.is_failing):
                self.act(now)
                happened = True
                interrupts, worker.interrupts = worker.interrupts, []
                for what, handoff in interrupts:
                    if what == "drop":
                        self.drop(handoff, worker, now)
                    else:
                        self.compute_instead(handoff, worker, now)
                if worker.is_failing:
                    self.act(now)
                    self.lose(worker, now)
                    if worker in self.prefills and not worker.is_down:
                        self.notes.append(-1)
        while self.changes and self.changes[0][0] <= now:
            self.act(now)
            happened = True
            _, begins, place = self.changes.pop(0)
            self.change(self.faults[place], begins, now)
        for is_prefill in (True, False):
            if any(not w.is_down and not w.is_failing for w in self.pool(is_prefill)):
                for handoff in [each for each in self.stranded if self.wants_prefill(each) is is_prefill]:
                    self.stranded.remove(handoff)
                    self.actions.append(("send", handoff))
                    happened = True
        while True:
            due = [each for each in self.deadlines() if each[0] <= now]
            if due:
                self.act(now)
                due = [each for each in self.deadlines() if each[0] <= now]
                if due:
                    self.give_up(self.handoffs[min(due)[1]], now)
                    if self.queue_tokens is not None:  # what waits in the router takes its place at once
                        self.act(now)
                        self.take_placed(now)
            elif coming and coming[0].arrival_ns <= now:
                self.actions.append(("send", self.handoff_of(coming.pop(0))))
            else:
                return happened
            happened = True

    def deadlines(self) -> list[tuple[int, int]]:
        """When clients give up, and the places of their requests."""
        return [
            (each.request.gives_up_ns, place)
            for place, each in enumerate(self.handoffs)
            if each.request.gives_up_ns is not None and not each.outcome and not each.given_up
        ]

    def give_up(self, handoff: NaiveHandoff, now: int) -> None:
        handoff.given_up = True
        self.in_router = [each for each in self.in_router if each[2] is not handoff]
        self.drop_transfer(handoff)
        target, source = self.decodes[handoff.target], self.prefills[handoff.source]
        if handoff in target.pending:
            target.pending.remove(handoff)
            target.refused_at = -1
            if target.end_ns is None:
                self.send(target.try_to_reserve(now))
        here = [
            worker for worker, request in ((target, handoff.decode), (source, handoff.prefill)) if worker.has(request)
        ]
        for worker in here:
            if worker.end_ns is not None:
                worker.interrupts.append(("drop", handoff))
        for worker in here:
            if worker.end_ns is None:
                self.drop(handoff, worker, now)
        self.note_given_up(handoff, now)

    def drop(self, handoff: NaiveHandoff, worker: NaiveWorker, now: int) -> None:
        if worker in self.decodes:
            if handoff.target >= 0 and worker.drop(handoff.decode):
                self.send(worker.try_to_reserve(now))
        else:
            worker.drop(handoff.prefill)
            self.notes.append(handoff.request.seq)
            if handoff.held_ns >= 0 and handoff.released_ns < 0:
                handoff.released_ns = now
        self.note_given_up(handoff, now)

    def note_given_up(self, handoff: NaiveHandoff, now: int) -> None:
        """It is over once no worker is to drop it any more."""
        if not any(("drop", handoff) in worker.interrupts for worker in self.workers) and not handoff.outcome:
            handoff.outcome, handoff.cancelled_ns = "cancelled", now

    def handoff_of(self, request: NaiveRequest) -> NaiveHandoff:
        prefill, decode = (
            NaiveRequest(
                request.seq,
                request.arrival_ns,
                request.tokens,
                1 if is_prefill else request.num_output,
                request.output,
                0 if self.is_mocker else request.priority,
                request.tenant,
                know_output=request.know_output,
            )
            for is_prefill in (True, False)
        )
        self.handoffs.append(NaiveHandoff(request, prefill, decode))
        return self.handoffs[-1]

    def end_step(self, worker: NaiveWorker, now: int) -> None:
        done = worker.finish(now)
        by_seq = {handoff.request.seq: handoff for handoff in self.handoffs}
        if worker in self.decodes:
            for request in done:
                worker.release(request)
        for what, handoff in worker.interrupts:
            request = handoff.decode if worker in self.decodes else handoff.prefill
            if what == "drop" and request not in done and request not in worker.held:
                worker.drop(request)
        worker.end_transfers(now)
        reserved = worker.try_to_reserve(now)
        deferred, worker.deferred = worker.deferred, []
        self.send(reserved)
        for what, handoff in deferred:
            self.do(what, handoff, now)
        for request in done:
            handoff = by_seq[request.seq]
            if worker in self.decodes:
                if not handoff.given_up:
                    handoff.ended_ns, handoff.outcome = now, "completed"
            else:
                handoff.held_ns = now
                worker.prefilled.append(request)
                worker.held.append(request)
                self.actions.append(("send", handoff))

    def send(self, reserved: list[NaiveHandoff]) -> None:
        for handoff in reserved:
            handoff.order = self.num_reserved
            self.num_reserved += 1
            self.actions.append(("transfer", handoff))

    def do(self, what: str, handoff: NaiveHandoff, now: int) -> None:
        source, target = self.prefills[handoff.source], self.decodes[handoff.target]
        if what == "send":
            if handoff.given_up:
                return
            if any(each[2] is handoff for each in self.in_router):
                return
            if self.num_layers and self.is_from_source(handoff):
                self.send_on(handoff, now)
                return
            if self.wants_prefill(handoff):
                handoff.is_local = False
            if self.stays(handoff):
                self.compute_locally(handoff)
                return
            chosen = None
            if self.queue_tokens is not None and self.wants_prefill(handoff) and any(map(self.is_up, self.prefills)):
                if self.in_router or self.all_busy():
                    self.queue_up(handoff)
                else:
                    self.submit(handoff, self.place(handoff))
                return
            if not self.wants_prefill(handoff) and handoff.planned is not None and self.is_up(handoff.planned):
                chosen = handoff.planned
            chosen = chosen or self.choose(self.wants_prefill(handoff))
            if chosen is None:
                self.stranded.append(handoff)
            elif self.is_held(handoff):
                handoff.target = self.decodes.index(chosen)
                handoff.planned = None
                self.do("choose", handoff, now)
            else:
                self.submit(handoff, chosen)
        elif what == "choose":
            if self.is_mocker and self.never_fits(handoff):
                handoff.outcome = "failed"
                self.actions.append(("release", handoff))
                return
            target.pending.append(handoff)
            if target.end_ns is None:
                self.send(target.try_to_reserve(now))
        elif what == "transfer":
            if any(each[2] is handoff for each in self.transfers) or handoff.reserved_ns < 0:
                return
            if self.cut & {self.workers.index(source), self.workers.index(target)}:
                if not self.num_layers or self.is_held(handoff):
                    self.fail_transfer(handoff, now)
                return
            if self.num_layers:
                self.streams.append(NaiveStream(handoff, self.num_sent, Fraction(now)))
                self.num_sent += 1
                handoff.num_taken = 0
                self.expect(self.streams[-1])
                self.feed(handoff)
                return
            num_tokens = len(handoff.request.tokens)
            if self.only_missing:
                num_tokens = (target.pages_for(num_tokens) - handoff.hit_pages) * target.page_size
            duration = self.latency_ns + (0 if self.rate is None else ceil(num_tokens / self.rate * 1e9))
            duration *= self.slowness(handoff)
            if duration:
                self.transfers.append((now + duration, self.num_sent, handoff))
                self.num_sent += 1
            else:
                self.actions.append(("activate", handoff))
        elif what == "activate":
            if handoff.given_up:
                return
            if target.end_ns is not None:
                target.deferred.append((what, handoff))
                return
            target.activate(handoff, now)
            self.send(target.try_to_reserve(now))
            self.actions.append(("release", handoff))
        elif what == "release":
            if handoff.prefill not in source.held:
                return
            if source.end_ns is not None:
                source.deferred.append((what, handoff))
                return
            source.let_go(handoff.prefill)
            handoff.released_ns = now

    def is_from_source(self, handoff: NaiveHandoff) -> bool:
        """Whether its prompt is computed, or held."""
        source = self.prefills[handoff.source]
        return handoff.activated_ns < 0 and handoff.source >= 0 and source.has(handoff.prefill)

    def is_at_target(self, handoff: NaiveHandoff) -> bool:
        target = self.decodes[handoff.target]
        return handoff.target >= 0 and (handoff in target.pending or target.has(handoff.decode))

    def send_on(self, handoff: NaiveHandoff, now: int) -> None:
        if self.is_at_target(handoff):
            if handoff.reserved_ns >= 0:
                self.do("transfer", handoff, now)
            return
        chosen = handoff.planned if handoff.planned is not None and self.is_up(handoff.planned) else self.choose(False)
        if chosen is not None:
            handoff.target = self.decodes.index(chosen)
            handoff.planned = None
            self.do("choose", handoff, now)
        elif self.is_held(handoff):
            self.stranded.append(handoff)

    def never_fits(self, handoff: NaiveHandoff) -> bool:
        worker = self.decodes[0]
        return worker.pages_for(len(handoff.request.tokens) + handoff.request.num_output - 1) > worker.num_pages

    # Who is next, and what fails ---------------------------------------------------------------------------

    def pool(self, is_prefill: bool) -> list[NaiveWorker]:
        return self.prefills if is_prefill else self.decodes

    def wants_prefill(self, handoff: NaiveHandoff) -> bool:
        return handoff.held_ns < 0 and not handoff.decode.admissions

    def is_up(self, worker: NaiveWorker) -> bool:
        return not worker.is_down and not worker.is_failing

    def stays(self, handoff: NaiveHandoff) -> bool:
        """A worker that generates is chosen first; whether it has all but a few tokens of the prompt."""
        if self.least_remote is None or not self.wants_prefill(handoff):
            return False
        if handoff.planned is None or not self.is_up(handoff.planned):
            handoff.planned = self.choose(False)
        if handoff.planned is None:
            return False
        num_hit = len(handoff.planned.lookup(handoff.decode)) * handoff.planned.page_size
        return len(handoff.request.tokens) - num_hit < self.least_remote

    def compute_locally(self, handoff: NaiveHandoff) -> None:
        worker = handoff.planned
        assert worker is not None
        handoff.planned = None
        handoff.is_local = True
        handoff.target = self.decodes.index(worker)
        if self.never_fits(handoff):
            handoff.outcome = "rejected"
            return
        decode, prefill = handoff.decode, handoff.prefill
        decode.furthest = max(decode.furthest, prefill.furthest)
        worker.orders[decode.seq] = 1 << 62
        worker.submit(decode)
        worker.waiting.sort(key=worker.age)

    def is_held(self, handoff: NaiveHandoff) -> bool:
        return handoff.activated_ns < 0 and handoff.prefill in self.prefills[handoff.source].held

    def choose(self, is_prefill: bool) -> NaiveWorker | None:
        up = [worker for worker in self.pool(is_prefill) if not worker.is_down and not worker.is_failing]
        if not up:
            return None
        place = self.turns[is_prefill] % len(up)
        self.turns[is_prefill] = place + 1
        return up[place]

    def slowness(self, handoff: NaiveHandoff) -> int:
        return max(self.slow.get(handoff.source, 1), self.slow.get(len(self.prefills) + handoff.target, 1))

    def change(self, fault: NaiveFault, begins: bool, now: int) -> None:
        if fault.worker >= len(self.workers):
            return
        worker = self.workers[fault.worker]
        if fault.kind == "slow":
            before = [self.slowness(handoff) for _, _, handoff in self.transfers]
            self.slow[fault.worker] = fault.factor if begins else 1
            of_streams = {id(stream.handoff): stream for stream in self.streams}
            pairs = list(zip(self.transfers, before, strict=True))
            self.transfers = [
                (now + ceil(Fraction((end - now) * self.slowness(handoff), old)), number, handoff)
                for (end, number, handoff), old in pairs
                if id(handoff) not in of_streams
            ]
            for (_, _, handoff), old in pairs:
                stream = of_streams.get(id(handoff))
                if stream is not None:
                    stream.advance(now)
                    slower = Fraction(self.slowness(handoff), old)
                    stream.layers = [(ready, duration * slower) for ready, duration in stream.layers]
                    self.expect(stream)
        elif fault.kind == "cut" and begins:
            self.cut.add(fault.worker)
            for _, _, handoff in sorted(self.transfers, key=lambda each: each[2].request.seq):
                if fault.worker in (handoff.source, len(self.prefills) + handoff.target):
                    if self.num_layers and not self.is_held(handoff):
                        self.drop_transfer(handoff)
                        self.num_failed_transfers += 1
                    else:
                        self.fail_transfer(handoff, now)
        elif fault.kind == "cut":
            self.cut.discard(fault.worker)
        else:
            worker.is_down = begins
            if not begins and worker in self.prefills and not worker.is_failing:
                self.notes.append(-1)
            if begins and worker.end_ns is None:
                self.lose(worker, now)
            elif begins:
                worker.is_failing = True

    def lose(self, worker: NaiveWorker, now: int) -> None:
        """All that is in a worker is gone; requests go on elsewhere."""
        worker.is_failing = False
        for handoff in self.handoffs:
            if handoff.outcome:
                continue
            pending = handoff in worker.pending
            if worker is self.decodes[handoff.target] and (pending or worker.has(handoff.decode)):
                if pending:
                    worker.pending.remove(handoff)
                elif self.is_from_source(handoff) and handoff.reserved_ns >= 0:
                    self.num_failed_transfers += 1
                    handoff.reserved_ns = -1
                self.drop_transfer(handoff)
                self.forget(handoff.decode, worker)
                handoff.restarts += 1
                self.actions.append(("send", handoff))
            elif worker is self.prefills[handoff.source] and worker.has(handoff.prefill):
                target = self.decodes[handoff.target]
                if handoff.prefill not in worker.held:
                    is_at_target = bool(self.num_layers) and self.is_at_target(handoff)
                    self.forget(handoff.prefill, worker)
                    handoff.layers = []
                    if not is_at_target:
                        handoff.restarts += 1
                        self.actions.append(("send", handoff))
                    elif handoff in target.pending:
                        target.pending.remove(handoff)
                        self.compute_here(handoff, target)
                        target.refused_at = -1
                        if target.end_ns is None:
                            self.send(target.try_to_reserve(now))
                    else:
                        self.fail_transfer(handoff, now)
                    continue
                is_to_be_sent = ("transfer", handoff) in self.actions
                if is_to_be_sent or any(each[2] is handoff for each in self.transfers):
                    self.fail_transfer(handoff, now)
                elif handoff in target.pending:
                    target.pending.remove(handoff)
                    self.compute_here(handoff, target)
                    target.refused_at = -1
                    if target.end_ns is None:
                        self.send(target.try_to_reserve(now))
                worker.let_go(handoff.prefill)
                handoff.released_ns = now
        assert worker.num_used == 0
        worker.index.clear()
        worker.lru.clear()
        worker.num_empty = worker.num_pages

    def forget(self, request: NaiveRequest, worker: NaiveWorker) -> None:
        """It has nothing in a worker any more, but the tokens that it has made."""
        worker.drop(request)
        request.computed = 0
        if worker in self.prefills:
            self.notes.append(request.seq)

    def fail_transfer(self, handoff: NaiveHandoff, now: int) -> None:
        self.drop_transfer(handoff)
        self.num_failed_transfers += 1
        target = self.decodes[handoff.target]
        if target.end_ns is None:
            self.compute_instead(handoff, target, now)
        else:
            target.interrupts.append(("compute", handoff))
        self.actions.append(("release", handoff))

    def compute_instead(self, handoff: NaiveHandoff, target: NaiveWorker, now: int) -> None:
        if handoff.given_up:
            return
        self.forget(handoff.decode, target)
        self.compute_here(handoff, target)
        target.refused_at = -1
        self.send(target.try_to_reserve(now))

    def compute_here(self, handoff: NaiveHandoff, target: NaiveWorker) -> None:
        handoff.restarts += 1
        handoff.reserved_ns = handoff.activated_ns = -1
        self.queue(handoff.decode, target)

    def queue(self, request: NaiveRequest, worker: NaiveWorker) -> None:
        if not request.admissions:
            handoff = next(each for each in self.handoffs if each.decode is request)
            request.furthest = len(request.tokens) if handoff.held_ns >= 0 else handoff.prefill.furthest
        worker.orders[request.seq] = 1 << 62
        worker.submit(request)
        if not self.is_mocker and worker in self.decodes:
            worker.waiting.sort(key=worker.age)

    def fail_stranded(self) -> bool:
        in_router = sorted((each[2] for each in self.in_router), key=lambda handoff: handoff.request.seq)
        stranded = [each for each in [*self.stranded, *in_router] if not each.outcome]
        self.stranded, self.in_router = [], []
        for handoff in stranded:
            handoff.outcome = "failed"
            self.actions.append(("release", handoff))
        return bool(stranded)

    def submit(self, handoff: NaiveHandoff, worker: NaiveWorker) -> None:
        if worker in self.decodes:
            handoff.target = self.decodes.index(worker)
            if self.is_mocker and self.never_fits(handoff):
                handoff.outcome = "failed"
            else:
                self.queue(handoff.decode, worker)
            return
        handoff.source, handoff.target = self.prefills.index(worker), -1
        source = worker
        fits_here = source.pages_for(len(handoff.request.tokens)) <= source.num_pages
        if not fits_here or (self.never_fits(handoff) and not self.is_mocker):
            handoff.outcome = "rejected"
            self.notes.append(handoff.request.seq)
        else:
            source.submit(handoff.prefill)

    def break_deadlock(self, now: int) -> bool:
        for worker in self.decodes:
            if worker.waiting:
                head = worker.waiting.pop(0)
                handoff = next(h for h in self.handoffs if h.decode is head)
                handoff.outcome = "failed"
                self.num_deadlocks += 1
                return True
        return False


def worker_of(*, is_mocker: bool, is_decode: bool, **settings: int) -> NaiveWorker:
    cost = decode_only_ns if is_mocker and is_decode else polynomial_ns
    return NaiveWorker(is_mocker=is_mocker, cost=cost, **settings)

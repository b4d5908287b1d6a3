"""The loop of a fleet: virtual time, the workers, requests on their way through them.

At any time, in this order: steps that end now are finished, transfers that end now are taken note of, requests that
their clients give up now are dropped, requests that arrive now are routed, what follows from all that is done in the
order in which it came up, and idle workers start a step. Among workers, those that compute prompts come first.

A worker drops a request between steps: if a step is under way, at its end, whatever that step makes of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

from kvarts.fleet.handoff import Handoff
from kvarts.fleet.links import Links
from kvarts.fleet.pool import Pool
from kvarts.fleet.queues import ByReservation
from kvarts.fleet.scaling import FleetState, Scaler
from kvarts.fleet.worker import Worker
from kvarts.report.requests import FAILED, REJECTED, RequestLog
from kvarts.request import Request, RequestState
from kvarts.sched.policy import NEVER_NS
from kvarts.sim.arrivals import Arrivals
from kvarts.traffic.trace import TraceRequest

__all__ = ["FleetDriver"]


class FleetDriver:
    """Runs one replay on a fleet. `first`: the pool that requests arrive at; `second`: the one that generates.

    They are one pool where workers do both. `token_bytes`: what the KV of a token weighs on a link; `only_missing`:
    pages that the second worker has are not sent. `is_mocker`: as Dynamo's mocker, to the order of what happens at one
    time.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        first: Pool,
        second: Pool,
        links: Links,
        *,
        token_bytes: int,
        only_missing: bool,
        is_mocker: bool,
        scaler: Scaler | None = None,
        on_progress: Callable[[int], object] | None = None,
    ) -> None:
        self._arrivals = arrivals
        self._source = arrivals.source
        self._log: RequestLog = arrivals.log
        self._first = first
        self._second = second
        self._splits = first is not second
        self._pools = [first, second] if self._splits else [first]
        self.workers = [worker for pool in self._pools for worker in pool.workers]
        self._polled = [each for each in self._pools if each.router.reads_metrics and each.router.staleness_ns]
        self._links = links
        self._token_bytes = token_bytes
        self._only_missing = only_missing
        self._is_mocker = is_mocker
        self._scaler = scaler
        self._tick_ns = None if scaler is None else scaler.first_ns()
        self._on_progress = on_progress
        self._page_size = self.workers[0].replica.config.page_size
        self._ends: list[tuple[int, int, int]] = []  # (end, rank, worker); out of date where the worker says otherwise
        self._roused: set[int] = set()
        self._actions: deque[tuple[Callable[[Handoff, int], None], Handoff]] = deque()
        self._of: dict[Request, Handoff] = {}
        """Requests in the fleet, by what an engine has of them."""
        self._num_reserved = 0
        self.deadlocks: list[tuple[int, int, str]] = []
        """When nothing could go on, the worker, and the request that was given up."""
        self._deadlines: list[tuple[int, int, Handoff]] = []
        """When clients give up, with the numbers of the requests; those that have ended are passed by."""
        self._interrupted: list[Worker] = []
        """Workers that have ended a step now, and have requests to drop."""
        self.now_ns = 0

    def run(self) -> None:
        """Run until every request has ended."""
        while True:
            now_ns = self._next_ns()
            if now_ns == NEVER_NS:
                if not self._break_deadlock():
                    break
                now_ns = self.now_ns
            self.now_ns = now_ns
            self._finish_steps(now_ns)
            for pool in self._polled:
                if pool.poll_ns(now_ns) == now_ns:
                    self._poll(pool, now_ns)
            if self._scaler is not None:
                for pool in self._pools:
                    pool.make_ready(now_ns)
            for handoff in self._links.take_ended(now_ns):
                self._activate(handoff, now_ns)
            if self._scaler is not None:
                self._scale(now_ns)
            self._take_in(now_ns)
            self._act(now_ns)
            if self._scaler is not None:
                for pool in self._pools:
                    pool.remove_drained(now_ns)
            self._start_steps(now_ns)
        for worker in self.workers:
            worker.replica.flush()
        assert not self._of and not any(worker.replica.has_work for worker in self.workers), (
            "L8: the replay ended with requests left over"
        )

    def _next_ns(self) -> int:
        if self._roused:
            return self.now_ns
        ends = self._ends
        while ends and self.workers[ends[0][2]].end_ns != ends[0][0]:
            heappop(ends)
        next_ns = min(ends[0][0] if ends else NEVER_NS, self._links.next_ns())
        arrival_ns = self._source.next_ns()
        if arrival_ns is not None:
            next_ns = min(next_ns, max(arrival_ns, self.now_ns))
        next_ns = min(next_ns, self._next_deadline_ns())
        if next_ns == NEVER_NS:
            return next_ns
        for pool in self._polled:
            staleness_ns = pool.router.staleness_ns
            next_ns = min(next_ns, (self.now_ns // staleness_ns + 1) * staleness_ns)
        if self._scaler is None:
            return next_ns
        others_ns = [self._tick_ns, *(pool.next_ready_ns() for pool in self._pools)]
        return min([next_ns, *(each for each in others_ns if each is not None)])

    def _scale(self, now_ns: int) -> None:
        """Let workers go that have drained, and ask the scaler if it is time."""
        for pool in self._pools:
            pool.remove_drained(now_ns)
        if self._tick_ns is None or self._tick_ns > now_ns:
            return
        assert self._scaler is not None
        for worker in self.workers:
            self._is_busy(worker, now_ns)  # what it shows is as of now
        decision = self._scaler.on_tick(FleetState(now_ns, tuple(pool.state() for pool in self._pools)))
        self._tick_ns = decision.next_ns
        for pool in self._pools:
            target = decision.targets.get(pool.role)
            if target is not None:
                self.workers += pool.scale(target, now_ns)

    # Steps ------------------------------------------------------------------------------------------------

    def _finish_steps(self, now_ns: int) -> None:
        ends = self._ends
        while ends and ends[0][0] <= now_ns:
            end_ns, _, index = heappop(ends)
            worker = self.workers[index]
            if worker.end_ns == end_ns:
                self._finish(worker, now_ns)

    def _finish(self, worker: Worker, now_ns: int) -> None:
        finished = worker.finish()
        self._roused.add(worker.index)
        if worker.pending:
            self._reserve_for(worker, now_ns)
        if worker.deferred:
            deferred, worker.deferred = worker.deferred, []
            for do, handoff in deferred:
                do(handoff, now_ns)
        for request in finished:
            handoff = self._of.pop(request)
            if request.is_handed_over:
                handoff.held_ns = now_ns
                self._of[handoff.decode] = handoff
                if not handoff.is_given_up:
                    self._actions.append((self._choose_second, handoff))
            else:
                self._end(handoff, worker)
        if worker.dropping:
            self._interrupted.append(worker)

    def _start_steps(self, now_ns: int) -> None:
        if not self._roused:
            return
        roused = sorted(self._roused, key=lambda index: self.workers[index].rank)
        self._roused.clear()
        for index in roused:
            worker = self.workers[index]
            if worker.end_ns != NEVER_NS:
                continue
            if self._is_mocker:
                self._set_gate(worker)
            if worker.start(now_ns):
                heappush(self._ends, (worker.end_ns, worker.rank, index))
            elif self._is_mocker and worker.pending and worker.scheduler.waiting.num_waiting:
                # Dynamo's mocker does a pass that takes no time, and its end is one more try.
                num_pending = len(worker.pending)
                self._reserve_for(worker, now_ns)
                if len(worker.pending) < num_pending:
                    self._roused.add(index)

    def _set_gate(self, worker: Worker) -> None:
        is_gated = bool(worker.pending)
        if worker.handoffs.is_gated is not is_gated:
            worker.handoffs.is_gated = is_gated
            if isinstance(worker.queue, ByReservation):
                worker.queue.is_gated = is_gated
            worker.changed()

    def _is_busy(self, worker: Worker, now_ns: int) -> bool:
        """Return whether `worker` has a step under way, and let what is under way end with that."""
        end_ns = worker.end_ns
        is_busy = worker.cut(now_ns)
        if is_busy and worker.end_ns != end_ns:
            heappush(self._ends, (worker.end_ns, worker.rank, worker.index))
        return is_busy

    # Requests ---------------------------------------------------------------------------------------------

    def _act(self, now_ns: int) -> None:
        """Do what follows from what was done, in the order in which it came up."""
        actions = self._actions
        while actions:
            act, handoff = actions.popleft()
            act(handoff, now_ns)

    def _take_in(self, now_ns: int) -> None:
        """Drop the requests that are to be dropped now, and take in those that arrive."""
        if self._interrupted:
            self._act(now_ns)
            interrupted, self._interrupted = self._interrupted, []
            for worker in interrupted:
                dropping, worker.dropping = worker.dropping, []
                for handoff in dropping:
                    self._drop(handoff, worker, now_ns)
        source = self._source
        while True:
            if self._next_deadline_ns() <= now_ns:
                self._act(now_ns)
                handoff = heappop(self._deadlines)[2]
                if handoff.is_waited_for:
                    self._give_up(handoff, now_ns)
            elif (arrival_ns := source.next_ns()) is not None and arrival_ns <= now_ns:
                self._arrive(now_ns)
            else:
                return

    def _arrive(self, now_ns: int) -> None:
        request, row = self._arrivals.pop(now_ns)
        handoff = self._handoff_of(request, row)
        self._actions.append((self._submit, handoff))
        deadline_ns = self._arrivals.gives_up_ns(request, row)
        if deadline_ns is not None:
            heappush(self._deadlines, (max(deadline_ns, now_ns), request.index, handoff))

    def _next_deadline_ns(self) -> int:
        """Return when the next client gives up; NEVER_NS if none does."""
        deadlines = self._deadlines
        while deadlines and not deadlines[0][2].is_waited_for:
            heappop(deadlines)
        return deadlines[0][0] if deadlines else NEVER_NS

    def _handoff_of(self, request: Request, row: TraceRequest) -> Handoff:
        if not self._splits:
            return Handoff(request, row, None)
        if self._is_mocker:
            request.priority = 0
        prefill = Request(
            request.index,
            request.content,
            request.num_prompt_tokens,
            1,
            request.arrival_ns,
            request.priority,
            request.request_id,
            is_handed_over=True,
        )
        return Handoff(request, row, prefill)

    def _submit(self, handoff: Handoff, now_ns: int) -> None:
        request = handoff.decode if handoff.prefill is None else handoff.prefill
        worker = self._route(self._first, handoff, request, now_ns)
        handoff.source = worker.index
        if handoff.prefill is None:
            handoff.target = worker.index
        elif not self._is_mocker:
            reason = self._second.never_fits(handoff.decode)
            if reason is not None:
                self._reject(handoff, worker, reason, now_ns)
                return
        self._is_busy(worker, now_ns)
        reason = worker.replica.submit(request, now_ns)
        if reason is not None:
            self._reject(handoff, worker, reason, now_ns)
            return
        worker.num_owned += 1
        self._of[request] = handoff
        self._roused.add(worker.index)

    def _route(self, pool: Pool, handoff: Handoff, request: Request, now_ns: int) -> Worker:
        router = pool.router
        if router.is_told or router.reads_metrics:
            if not router.staleness_ns:
                self._poll(pool, now_ns)
            pool.tell(now_ns, range(len(pool.workers)))
        worker = pool.choose(request, handoff.row.session_id, now_ns)
        if router.reads_prefills and request is handoff.decode and handoff.prefill is not None:
            router.prefilled(request.index)  # elsewhere
        return worker

    def _poll(self, pool: Pool, now_ns: int) -> None:
        """Let the router of `pool` see what its workers have done, and their metrics if it is time."""
        for worker in pool.workers:
            self._is_busy(worker, now_ns)
        if pool.poll_ns(now_ns) == now_ns:
            pool.poll(now_ns)

    def _choose_second(self, handoff: Handoff, now_ns: int) -> None:
        """Send the request, the prompt of which is held, to the queue for pages of a worker that generates."""
        worker = self._route(self._second, handoff, handoff.decode, now_ns)
        handoff.target = worker.index
        reason = self._second.never_fits(handoff.decode) if self._is_mocker else None
        if reason is not None:
            self._fail(handoff, reason, now_ns)
            return
        worker.num_owned += 1
        worker.pending.append(handoff)
        if len(worker.pending) > 1 and worker.refused_at == worker.generation():
            return  # it waits behind one that waits for pages
        if not self._is_busy(worker, now_ns):
            self._reserve_for(worker, now_ns)
            self._roused.add(worker.index)

    def _reserve_for(self, worker: Worker, now_ns: int) -> None:
        """Let requests that want pages of `worker` have them, in order; as Dynamo's mocker: one at a time."""
        pending = worker.pending
        running, config = worker.scheduler.running, worker.replica.config
        while pending:
            if worker.refused_at == worker.generation():
                return
            handoff = pending[0]
            request = handoff.decode
            is_full = running.num_running >= config.max_num_seqs
            if is_full or not worker.queue.lets_reserve(request) or not worker.handoffs.reserve(request):
                worker.refused_at = worker.generation()
                return
            pending.popleft()
            worker.refused_at = -1
            handoff.reserved_ns = now_ns
            handoff.order = self._num_reserved
            self._num_reserved += 1
            if isinstance(worker.queue, ByReservation):
                worker.queue.orders[request.index] = handoff.order
            self._actions.append((self._transfer, handoff))
            if self._is_mocker:
                return

    def _transfer(self, handoff: Handoff, now_ns: int) -> None:
        handoff.transfer_ns = now_ns
        num_tokens = handoff.decode.num_prompt_tokens
        if self._only_missing:
            num_pages = -(-num_tokens // self._page_size)
            num_tokens = num_pages * self._page_size - handoff.decode.hit_tokens
        handoff.num_bytes = num_tokens * self._token_bytes
        if self._links.begin(handoff, handoff.num_bytes, now_ns):
            self._actions.append((self._activate, handoff))

    def _activate(self, handoff: Handoff, now_ns: int) -> None:
        """Let the request wait for its place, at the end of the step under way."""
        worker = self.workers[handoff.target]
        if self._is_busy(worker, now_ns):
            worker.deferred.append((self._activate_now, handoff))
        else:
            self._activate_now(handoff, now_ns)

    def _activate_now(self, handoff: Handoff, now_ns: int) -> None:
        worker = self.workers[handoff.target]
        worker.handoffs.activate(handoff.decode)
        worker.changed()
        self._roused.add(worker.index)
        handoff.activated_ns = now_ns
        self._reserve_for(worker, now_ns)
        self._actions.append((self._release, handoff))

    def _release(self, handoff: Handoff, now_ns: int) -> None:
        """Give back the pages at the source, at the end of the step under way."""
        if handoff.is_released:
            return  # it was dropped meanwhile
        worker = self.workers[handoff.source]
        if self._is_busy(worker, now_ns):
            worker.deferred.append((self._release_now, handoff))
        else:
            self._release_now(handoff, now_ns)

    def _release_now(self, handoff: Handoff, now_ns: int) -> None:
        if handoff.is_released:
            return
        worker = self.workers[handoff.source]
        assert handoff.prefill is not None
        worker.handoffs.release(handoff.prefill)
        worker.engine.emit()
        handoff.released_ns = now_ns
        self._leave_source(handoff, worker)
        if handoff.is_ended:
            self._complete(handoff)

    def _leave_source(self, handoff: Handoff, worker: Worker) -> None:
        assert handoff.prefill is not None
        worker.num_owned -= 1
        worker.changed()
        self._roused.add(worker.index)
        self._first.ended(handoff.prefill)
        handoff.is_released = True

    # Clients that give up ---------------------------------------------------------------------------------

    def _give_up(self, handoff: Handoff, now_ns: int) -> None:
        """Drop a request wherever it is: its client gives it up."""
        handoff.is_given_up = True
        if handoff.target < 0:
            handoff.is_ended = True
        else:
            self._drop_soon(handoff, self.workers[handoff.target], now_ns)
        if not handoff.is_released:
            self._drop_soon(handoff, self.workers[handoff.source], now_ns)

    def _drop_soon(self, handoff: Handoff, worker: Worker, now_ns: int) -> None:
        """Drop a request at `worker`, at the end of the step under way; at once what that step does not need."""
        is_busy = self._is_busy(worker, now_ns)
        if handoff in worker.pending:
            worker.pending.remove(handoff)
            handoff.decode.become(RequestState.CANCELLED)
            self._leave_target(handoff, worker)
            worker.refused_at = -1
            if not is_busy:
                self._reserve_for(worker, now_ns)
            return
        if handoff.decode.state is RequestState.LOADING:
            self._links.cancel(handoff, now_ns)
        if is_busy:
            worker.dropping.append(handoff)
        else:
            self._drop(handoff, worker, now_ns)

    def _drop(self, handoff: Handoff, worker: Worker, now_ns: int) -> None:
        """Drop all that idle `worker` has of a request. Its pages are free at once."""
        if not handoff.is_released and worker.index == handoff.source:
            prefill = handoff.prefill
            assert prefill is not None
            if prefill.state is RequestState.HELD:
                self._release_now(handoff, now_ns)
                return
            del self._of[prefill]
            worker.replica.cancel(prefill, now_ns)
            self._leave_source(handoff, worker)
        elif not handoff.is_ended and worker.index == handoff.target:
            worker.replica.cancel(handoff.decode, now_ns)
            self._leave_target(handoff, worker)
            worker.refused_at = -1
            self._reserve_for(worker, now_ns)
        if handoff.is_released and handoff.is_ended:
            self._complete(handoff)

    def _leave_target(self, handoff: Handoff, worker: Worker) -> None:
        """Take note that `worker` has nothing of a request any more."""
        self._of.pop(handoff.decode, None)
        worker.num_owned -= 1
        worker.changed()
        self._roused.add(worker.index)
        handoff.is_ended = True
        self._second.ended(handoff.decode)

    # Ends -------------------------------------------------------------------------------------------------

    def _end(self, handoff: Handoff, worker: Worker) -> None:
        self._leave_target(handoff, worker)
        if not handoff.is_given_up:
            self._source.done(handoff.row, handoff.decode.last_token_ns)
            self._tell(1)
        if handoff.is_released:
            self._complete(handoff)

    def _complete(self, handoff: Handoff) -> None:
        """Log the request, which has ended everywhere."""
        if handoff.is_reported:
            return
        handoff.is_reported = True
        request, prefill = handoff.decode, handoff.prefill
        self._of.pop(request, None)
        more = (handoff.source, *handoff.times(), handoff.num_bytes)
        if prefill is not None:
            request.first_admitted_ns = prefill.first_admitted_ns
            request.cached_tokens += prefill.cached_tokens
            request.largest_hit_tokens = max(request.largest_hit_tokens, prefill.largest_hit_tokens)
            request.num_admissions += prefill.num_admissions
            request.furthest_computed = max(prefill.num_computed, prefill.furthest_computed, request.furthest_computed)
        if handoff.is_given_up:
            request.cancelled_ns = self.now_ns
            replica = handoff.source if handoff.target < 0 else handoff.target
            self._arrivals.note_cancelled(request, handoff.row, replica, more)
            self._tell(1)
        else:
            self._log.end(request, handoff.row, handoff.target, more=more)

    def _reject(self, handoff: Handoff, worker: Worker, reason: str, now_ns: int) -> None:
        """Refuse a request on arrival."""
        self._first.ended(handoff.decode)
        self._refuse(handoff, worker, reason, REJECTED)

    def _refuse(self, handoff: Handoff, worker: Worker, reason: str, status: int) -> None:
        """Log a request that is given up, because of `reason`."""
        handoff.is_reported = True
        more = (handoff.source, *handoff.times(), handoff.num_bytes)
        self._log.reject(handoff.decode, handoff.row, worker.index, reason, status, more=more)
        self._source.done(handoff.row, self.now_ns)
        self._tell(1)

    def _fail(self, handoff: Handoff, reason: str, now_ns: int) -> None:
        """End a request that fits into no worker that generates; its pages are held at its source."""
        self._of.pop(handoff.decode)
        self._second.ended(handoff.decode)
        self._refuse(handoff, self.workers[handoff.target], reason, FAILED)
        self._actions.append((self._release, handoff))

    def _tell(self, num_ended: int) -> None:
        if self._on_progress is not None:
            self._on_progress(num_ended)

    def _break_deadlock(self) -> bool:
        """Give up a request where nothing can go on any more; return whether there was one.

        The requests behind it have pages that it needs, and wait for it: so they can go on then.
        """
        for worker in self.workers:
            if not worker.scheduler.waiting.num_waiting:
                continue
            request = worker.scheduler.waiting.head(self.now_ns)
            handoff = self._of.pop(request)
            num_ready = len(worker.handoffs.ready())
            reason = (
                f"deadlock: it was preempted, lacks pages, and {num_ready} requests that have theirs wait behind it"
            )
            self.deadlocks.append((self.now_ns, worker.index, request.request_id or str(request.index)))
            worker.engine.cancel(request)
            self._leave_target(handoff, worker)
            self._refuse(handoff, worker, reason, FAILED)
            return True
        return False

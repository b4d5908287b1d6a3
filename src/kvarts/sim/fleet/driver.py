"""The loop of a fleet: virtual time, the workers, and the requests on their way through them.

The order at one time: finish the steps that end now, record the transfers that end now, begin and end faults, drop
requests whose clients give up now, route requests that arrive now, carry out the queued consequences of all that in
first-in, first-out order, and start a step on each idle worker. Among workers, those that compute prompts come first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import cast

from kvarts.base.errors import InputError
from kvarts.base.limits import LATEST_NS, TooLateError
from kvarts.base.settings import SettingError
from kvarts.core.request import RequestState
from kvarts.core.sched.policy import NEVER_NS
from kvarts.core.tiers.links import Links
from kvarts.sim.fleet.config import FleetConfig
from kvarts.sim.fleet.faults import Change, changes_of
from kvarts.sim.fleet.handoff import Handoff
from kvarts.sim.fleet.layer_wise import LayerWiseLinks
from kvarts.sim.fleet.pool import ModelRouters, Pool
from kvarts.sim.fleet.scaling import FleetState
from kvarts.sim.fleet.transitions import RELEASE, SEND, FleetTransitions, Incoming, PeerUse, StoreUse
from kvarts.sim.fleet.worker import ByReservation, Worker
from kvarts.sim.report.requests import FAILED, REJECTED
from kvarts.sim.traffic.trace_request import TraceRequest

__all__ = ["FleetDriver"]

ENDED = (RequestState.FINISHED, RequestState.HELD)


def order_of(handoff: Handoff) -> int:
    """Return its place in the order of reservations."""
    return handoff.order


def rank_of(worker: Worker) -> int:
    """Return the place of a worker among those at which something happens at the same time."""
    return worker.rank


class FleetDriver(FleetTransitions):
    """Runs one replay on a fleet.

    `store`: the store that workers share, and their links to it. `peers`: the host memory of workers, if others read
    from it. `names_no_models`: requests go to workers of any model, so none may name one.
    """

    def __init__(
        self,
        arrivals: Incoming,
        of_models: Sequence[ModelRouters],
        links: Links,
        config: FleetConfig,
        *,
        store: StoreUse | None = None,
        peers: PeerUse | None = None,
        layer_wise: LayerWiseLinks | None = None,
        names_no_models: bool = False,
        on_progress: Callable[[int], object] | None = None,
    ) -> None:
        super().__init__(
            arrivals,
            of_models,
            links,
            config,
            store=store,
            peers=peers,
            layer_wise=layer_wise,
            on_progress=on_progress,
        )
        self._polled = [each for each in self._router_pools if each.router.reads_metrics and each.router.staleness_ns]
        scaler = self._scaler = None if config.scaler is None else config.scaler()
        self._link_ns = NEVER_NS
        """When the next transfer between workers ends, as of `next_ns`; NEVER_NS if none was under way."""
        self._arrival_ns = NEVER_NS
        """When the next request arrives, as of `next_ns`, unless the source has moved."""
        self._tick_ns = None if scaler is None else scaler.first_ns()
        self._ticked_in_vain = False
        """Whether the scaler had a tick with nothing else to wait for; it gets one, to bring a worker."""
        self._changes = deque(changes_of(config.faults))
        self.num_faults = 0
        self._names_no_models = names_no_models
        self._wakes: list[tuple[int, int, int]] = []
        """Times at which idle workers look again, with ranks and workers; stale if the worker's own time differs."""
        self._deadlines: list[tuple[int, int, Handoff]] = []
        """Times at which clients give up, with the requests' indices; entries of ended requests are skipped."""
        self._interrupted: list[Worker] = []
        """Workers whose step has ended now and that have interrupts to run, or lose their requests."""
        self._starting_rank = -1
        """The rank of the worker that starts a step; -1 while none does."""
        self.under_way: dict[int, Handoff] | None = None
        """Requests that have arrived, by index, for a caller that removes those that have ended."""
        self._caught_up: list[Worker] = []
        """Workers that have become idle while others start their steps."""
        if store is not None:
            for each in store.stores:
                each.before_removal = self._catch_up
        if peers is not None:
            for memory in peers.memories:
                memory.before_change = self._count_leap

    def run(self) -> None:
        """Run until every request has ended."""
        while True:
            self.run_until(NEVER_NS)
            if not self.resolve():
                break
        for worker in self.workers:
            worker.replica.flush()
        assert not self._of and not any(worker.replica.has_work for worker in self.workers), (
            "L8: the replay ended with requests left over"
        )

    def resolve(self) -> bool:
        """Fail requests that cannot go on, when nothing else will happen; return whether there were any."""
        if not (self._fail_stranded() or self._break_deadlock()):
            return False
        self._advance(self.now_ns)
        return True

    def run_until(self, until_ns: int) -> None:
        """Carry out everything that happens before `until_ns`."""
        while (now_ns := self.next_ns()) < until_ns:
            self._advance(now_ns)

    def idle_until(self, until_ns: int) -> None:
        """Let the scaler decide, and workers become ready, before `until_ns`, although no request is in the fleet.

        That is for callers that do not know of arrivals beforehand; `run` stops with the last request.
        """
        while self._scaler is not None and self.next_ns() == NEVER_NS:
            times = [self._tick_ns, *(pool.next_ready_ns() for pool in self._pools)]
            times += [self._changes[0].time_ns] if self._changes else []
            next_ns = min((max(each, self.now_ns) for each in times if each is not None), default=NEVER_NS)
            if next_ns >= until_ns:
                return
            self._advance(next_ns)
            self.run_until(until_ns)

    def next_idle_ns(self) -> int:
        """Return when `idle_until` does something next, if no request is in the fleet; NEVER_NS if it will not."""
        times = [self._tick_ns, *(pool.next_ready_ns() for pool in self._pools)] if self._scaler is not None else []
        return min((each for each in times if each is not None), default=NEVER_NS)

    def release_gone(self) -> list[int]:
        """Release the memory of workers that a scaler has taken away and that are at rest; return their numbers."""
        released = []
        for pool in self._pools:
            for worker in [each for each in pool.gone if each.is_at_rest]:
                self._roused.discard(worker.index)
                self.workers[worker.index] = pool.release(worker)
                if self._store is not None:
                    self._store.leave(worker.index)
                released.append(worker.index)
        return released

    def _advance(self, now_ns: int) -> None:
        """Carry out everything that happens at `now_ns`, which is next."""
        self.now_ns = now_ns
        if self._store is not None:
            self._store.links.now_ns = now_ns
        self._finish_steps(now_ns)
        for router_pool in self._polled:
            if router_pool.poll_ns(now_ns) == now_ns:
                self._poll(router_pool, now_ns)
        if self._scaler is not None:
            for pool in self._pools:
                pool.make_ready(now_ns)
        if self._link_ns != NEVER_NS:  # a transfer that begins now does not end now
            self._end_transfers(now_ns)
        if self._store is not None:
            for transfer in self._store.links.take_ended(now_ns):
                self._end_of_transfer(self.workers[transfer.worker], transfer.number, now_ns)
        if self._scaler is not None:
            self._scale(now_ns)
        self._take_in(now_ns)
        if self._actions:
            self._act(now_ns)
        if self._holding:
            self._take_placed(now_ns)
        if self._scaler is not None:
            self._remove_drained(now_ns)
        if self._roused:
            self._start_steps(now_ns)

    def _end_transfers(self, now_ns: int) -> None:
        """Record the transfers between workers that end now."""
        for carried in self._links.take_ended(now_ns):
            pull = None if self._peers is None else self._peers.links.pulls.get(carried)
            if pull is None:
                self._activate(cast(Handoff, carried), now_ns)
            else:
                self._end_pull(pull, now_ns)

    def next_ns(self) -> int:
        """Return when something happens next; NEVER_NS if nothing will, unless a request arrives.

        Raise TooLateError if that is beyond LATEST_NS.
        """
        next_ns = self._link_ns = self._links.next_ns()
        if self._roused or self._actions:
            self._source_moved = True
            return self.now_ns
        ends = self._ends
        while ends:
            end_ns, _, index = ends[0]
            if self.workers[index].end_ns == end_ns:
                if end_ns < next_ns:
                    next_ns = end_ns
                break
            heappop(ends)
        wakes = self._wakes
        while wakes:
            wake_ns, _, index = wakes[0]
            if self.workers[index].wake_ns == wake_ns:
                if wake_ns < next_ns:
                    next_ns = wake_ns
                break
            heappop(wakes)
        if self._store is not None:
            next_ns = min(next_ns, self._store.links.next_ns())
        is_quiet = next_ns == NEVER_NS
        arrival_ns = self._source.next_ns()
        self._source_moved = False
        self._arrival_ns = NEVER_NS if arrival_ns is None else arrival_ns
        if self._arrival_ns < next_ns:
            next_ns = self.now_ns if self._arrival_ns < self.now_ns else self._arrival_ns
        if self._deadlines:
            next_ns = min(next_ns, self._next_deadline_ns())
        if self._leases:
            next_ns = min(next_ns, self._next_lease_ns())
        is_idle = next_ns == NEVER_NS
        if next_ns > LATEST_NS and self._link_ns != NEVER_NS:
            raise TooLateError  # only transfers are under way, and none of them ends in time
        if is_idle and not any(router_pool.waiting for router_pool in self._router_pools):
            return next_ns
        if self._changes:
            next_ns = min(next_ns, max(self._changes[0].time_ns, self.now_ns))
        if is_idle:
            return self._next_for_stranded_ns(next_ns)
        for router_pool in self._polled:
            staleness_ns = router_pool.router.staleness_ns
            tick_ns = (self.now_ns // staleness_ns + 1) * staleness_ns
            if is_quiet:
                tick_ns = max(tick_ns, next_ns - next_ns % staleness_ns)  # all ticks before it read the same metrics
            next_ns = min(next_ns, tick_ns)
        if self._scaler is None:
            return next_ns
        self._ticked_in_vain = False
        others_ns = [self._tick_ns, *(pool.next_ready_ns() for pool in self._pools)]
        return min([next_ns, *(each for each in others_ns if each is not None)])

    def _next_for_stranded_ns(self, next_ns: int) -> int:
        """Return when a worker may be available for stranded requests; `next_ns`: time of a fault's next change."""
        if self._scaler is None:
            return next_ns
        for pool in self._pools:
            ready_ns = pool.next_ready_ns()
            if ready_ns is not None:
                next_ns = min(next_ns, ready_ns)
        if self._tick_ns is not None and not self._ticked_in_vain:
            self._ticked_in_vain = self._tick_ns <= next_ns
            next_ns = min(next_ns, self._tick_ns)
        return next_ns

    def _remove_drained(self, now_ns: int) -> None:
        """Remove draining workers without requests, and fail reads from them."""
        for pool in self._pools:
            pool.remove_drained(now_ns)
            if self._peers is not None:
                for worker in pool.gone:
                    if self._peers.leave(worker.index):
                        self._lose_pulls(worker, now_ns)
                        pool.router_pool.forget(worker)

    def _scale(self, now_ns: int) -> None:
        """Remove drained workers, and run the scaler if its tick is due."""
        self._remove_drained(now_ns)
        if self._tick_ns is None or self._tick_ns > now_ns:
            return
        assert self._scaler is not None
        for worker in self.workers:
            self._is_busy(worker, now_ns)  # so that the scaler reads state as of now
        decision = self._scaler.on_tick(FleetState(now_ns, tuple(pool.state() for pool in self._pools)))
        if decision.next_ns is not None and decision.next_ns <= now_ns:
            what = f"its tick at {now_ns / 1e9:g} s is followed by one at {decision.next_ns / 1e9:g} s"
            raise SettingError(what, "scaler", hint="Return a later next_ns, or None.")
        unknown = sorted(decision.targets.keys() - {pool.name for pool in self._pools})
        if unknown:
            hint = f"There are: {', '.join(pool.name for pool in self._pools)}."
            raise SettingError(f"has a target for {unknown[0]}, which is not a pool", "scaler", hint=hint)
        self._tick_ns = decision.next_ns
        for pool in self._pools:
            target = decision.targets.get(pool.name)
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
        wakes = self._wakes
        while wakes and wakes[0][0] <= now_ns:
            wake_ns, _, index = heappop(wakes)
            worker = self.workers[index]
            if worker.wake_ns == wake_ns:
                self._wake(worker, now_ns)

    def _finish(self, worker: Worker, now_ns: int) -> None:
        finished = worker.finish()
        dropped = [request for request in finished if request.state not in ENDED]
        if dropped:
            worker.refused_at = -1  # they have freed resources
            finished = [request for request in finished if request not in dropped]
        if worker.is_clearing:
            worker.is_clearing = False
            worker.engine.clear_cache()
        worker.end_transfers(now_ns)
        self._end_waits(now_ns)
        self._roused.add(worker.index)
        if worker.pending:
            self._reserve_for(worker, now_ns)
        if worker.deferred:
            deferred, worker.deferred = worker.deferred, []
            for action, handoff in deferred:
                self._do(action, handoff, now_ns)
        for request in finished:
            handoff = self._of.pop(request)
            if request.is_handed_over:
                handoff.held_ns = now_ns
                self._of[handoff.decode] = handoff
                if handoff.is_left:
                    self._leave(handoff, now_ns)
                if handoff.is_given_up:
                    worker.interrupts.append((self._drop, handoff))
                elif not handoff.is_left:
                    self._actions.append((SEND, handoff))
            else:
                self._end(handoff, worker)
        for request in dropped:
            worker.interrupts.append((self._note_dropped, self._of[request]))
        if worker.interrupts or worker.is_failing:
            self._interrupted.append(worker)

    def _start_steps(self, now_ns: int) -> None:
        roused = [self.workers[index] for index in self._roused]
        self._roused.clear()
        if len(roused) > 1:
            roused.sort(key=rank_of, reverse=True)
        while roused:
            worker = roused.pop()
            if worker.end_ns != NEVER_NS:
                continue
            self._starting_rank = worker.rank
            if self._is_mocker:
                self._set_gate(worker)
            has_started = worker.start(now_ns)
            if self._store is not None:
                self._end_waits(now_ns)  # for stores that it has given up, because it needs the memory
            if has_started:
                heappush(self._ends, (worker.end_ns, worker.rank, worker.index))
                if self._layer_wise is not None and worker.only_prefills:
                    self._send_computed(worker, now_ns)
            elif worker.wake_ns != NEVER_NS:
                heappush(self._wakes, (worker.wake_ns, worker.rank, worker.index))
            elif self._is_mocker and worker.pending and worker.scheduler.waiting.num_waiting:
                # Dynamo's mocker runs a pass that takes no time; the end of that pass is one more attempt to reserve.
                num_pending = len(worker.pending)
                self._reserve_for(worker, now_ns)
                if len(worker.pending) < num_pending:
                    self._roused.add(worker.index)
            if self._caught_up:
                roused += self._caught_up
                roused.sort(key=rank_of, reverse=True)
                self._caught_up.clear()
        self._starting_rank = -1

    def _catch_up(self, index: int) -> None:
        """Cut a leap of a worker, so that its events precede those of the worker that starts a step now."""
        worker = self.workers[index]
        if worker.engine.log.emit_details is not None:  # it has readers of page events
            self._cut_leap(worker)

    def _count_leap(self, index: int) -> None:
        """End a leap of a worker before its host memory changes: the rows of its steps count what is used there."""
        worker = self.workers[index]
        if worker.end_ns == self.now_ns:
            worker.count_leap()  # it is about to be finished
        else:
            self._cut_leap(worker)

    def _cut_leap(self, worker: Worker) -> None:
        """Cut a leap of `worker` before the steps that start after what happens now."""
        starts_first = worker.rank < self._starting_rank
        end_ns = worker.end_ns
        if not self._is_busy(worker, self.now_ns + starts_first) and end_ns != NEVER_NS:
            self._caught_up.append(worker)

    def _set_gate(self, worker: Worker) -> None:
        is_gated = bool(worker.pending)
        if worker.handoffs.is_gated is not is_gated:
            worker.handoffs.is_gated = is_gated
            if isinstance(worker.queue, ByReservation):
                worker.queue.is_gated = is_gated
            worker.changed()

    # Requests ---------------------------------------------------------------------------------------------

    def _take_in(self, now_ns: int) -> None:
        """Run the interrupts of ended steps, begin and end faults, drop requests, and admit arrivals to the fleet."""
        if self._interrupted:
            self._act(now_ns)
            interrupted, self._interrupted = self._interrupted, []
            for worker in interrupted:
                interrupts, worker.interrupts = worker.interrupts, []
                for do, handoff in interrupts:
                    do(handoff, worker, now_ns)
                if worker.is_failing:
                    self._act(now_ns)
                    self._lose(worker, now_ns)
                    if not worker.is_down:
                        self._pool_of(worker).come_up(worker)
        while self._changes and self._changes[0].time_ns <= now_ns:
            self._act(now_ns)
            self._change(self._changes.popleft(), now_ns)
        for router_pool in self._router_pools:
            if router_pool.stranded and router_pool.is_open:
                self._actions += [(SEND, handoff) for handoff in router_pool.stranded]
                router_pool.stranded.clear()
        if self._leases:
            self._end_leases(now_ns)
        if self._holding:  # steps that ended, and requests that were dropped with them, have made room
            self._act(now_ns)
            self._take_placed(now_ns)
        if not self._deadlines and not self._source_moved and self._arrival_ns > now_ns:
            return
        source = self._source
        while True:
            if self._deadlines and self._next_deadline_ns() <= now_ns:
                self._act(now_ns)
                handoff = heappop(self._deadlines)[2]
                if handoff.is_waited_for:
                    self._give_up(handoff, now_ns)
                    if self._holding:
                        self._act(now_ns)
                        self._take_placed(now_ns)
            elif (arrival_ns := source.next_ns()) is not None and arrival_ns <= now_ns:
                self._arrive(now_ns)
            else:
                return

    def _arrive(self, now_ns: int) -> None:
        request, row = self._arrivals.pop(now_ns)
        place = self._model_for(row)
        handoff = Handoff(request, row, place)
        if self._is_mocker and self._of_models[handoff.model].splits:
            request.priority = 0
        if self.under_way is not None:
            self.under_way[request.index] = handoff
        if place < 0:
            self._refuse(handoff, -1, f"no worker has the model {row.model!r}", REJECTED)
            return
        self._actions.append((SEND, handoff))
        deadline_ns = self._arrivals.gives_up_ns(request, row)
        if deadline_ns is not None:
            heappush(self._deadlines, (max(deadline_ns, now_ns), request.index, handoff))

    def _model_for(self, row: TraceRequest) -> int:
        """Return the place of the routers of a request; -1 if no worker has its model.

        A request that was sent to a worker is for the model of that worker. Raise InputError for one that names a
        model although all go to any worker.
        """
        if len(self._of_models) == 1:
            if self._names_no_models and row.model is not None:
                raise InputError(
                    f"row {row.row + 1} names a model",
                    field="model",
                    hint="Set `names_models` of the Trace, or pass its requests as a list.",
                )
            return 0
        if row.direct is not None and row.direct.worker < len(self.workers):
            worker = self.workers[row.direct.worker]
            return next(
                place
                for place, routers in enumerate(self._of_models)
                if any(each.has(worker) for each in routers.router_pools)
            )
        return self._place_of_model.get(row.model, -1)

    def give_up(self, handoff: Handoff, now_ns: int) -> None:
        """Let the client of a request give it up at `now_ns`, which has not passed."""
        heappush(self._deadlines, (now_ns, handoff.decode.index, handoff))

    def _next_deadline_ns(self) -> int:
        """Return when the next client gives up; NEVER_NS if none will."""
        deadlines = self._deadlines
        while deadlines and not deadlines[0][2].is_waited_for:
            heappop(deadlines)
        return deadlines[0][0] if deadlines else NEVER_NS

    # Faults -----------------------------------------------------------------------------------------------

    def _change(self, change: Change, now_ns: int) -> None:
        """Begin or end a fault; ignore it if a scaler has removed its worker, or not added it yet."""
        fault = change.fault
        worker = self.workers[fault.worker] if fault.worker < len(self.workers) else None
        pool = None if worker is None else self._pool_of(worker)
        if worker is None or pool is None or worker.index in pool.gone_ns:
            return
        self.num_faults += change.is_begin
        if fault.kind == "slow":
            self._links.slow_down(worker.index, fault.factor if change.is_begin else 1, now_ns)
        elif fault.kind == "cut":
            self._cut.discard(worker.index)
            if change.is_begin:
                self._cut.add(worker.index)
                cut = [each for each in self._links.under_way() if worker.index in (each.source, each.target)]
                pulls = {} if self._peers is None else self._peers.links.pulls
                handoffs = [cast(Handoff, each) for each in cut if each not in pulls]
                for pull in [pulls[each] for each in cut if each in pulls]:
                    self._fail_pull(pull, now_ns)
                for handoff in sorted(handoffs, key=lambda handoff: handoff.decode.index):
                    self._cut_transfer(handoff, now_ns)
        elif change.is_begin:
            worker.is_down = True
            pool.go_down(worker)
            worker.is_failing = self._is_busy(worker, now_ns)
            if not worker.is_failing:
                self._lose(worker, now_ns)
        else:
            worker.is_down = False
            if not worker.is_failing:
                pool.come_up(worker)

    def _pool_of(self, worker: Worker) -> Pool:
        return next(pool for pool in self._pools if worker in pool.workers)

    # Requests that cannot go on -----------------------------------------------------------------------------

    def _fail_stranded(self) -> bool:
        """Fail requests for which no worker is up, nor will be; return whether there were any."""
        has_any = False
        for router_pool in self._router_pools:
            stranded = router_pool.waiting
            router_pool.stranded = []
            for handoff in stranded:
                router_pool.withdraw(handoff)
                if handoff.is_reported:
                    continue
                has_any = True
                if handoff.at_source:
                    self._actions.append((RELEASE, handoff))
                reason = f"no {router_pool.roles} worker was up"
                self._refuse(handoff, handoff.target if handoff.target >= 0 else handoff.source, reason, FAILED)
        return has_any

    def _break_deadlock(self) -> bool:
        """Let others proceed when no request can; return whether there was anything to do.

        A prompt that is sent layer by layer has pages on its target from its first chunk on. If it is preempted, it may
        lack pages that other prompts hold until they get those on the target. So it loses these, and is sent when it
        is computed; of several such prompts, the last that got pages loses them. If there is none, one request fails:
        those behind it hold pages that it needs, and wait for it.
        """
        early = [each for each in self._of.values() if each.at_source and each.is_coming and each.held_ns < 0]
        if early:
            self._take_back(max(early, key=order_of), self.now_ns)
            return True
        for worker in self.workers:
            if not worker.scheduler.waiting.num_waiting:
                continue
            request = worker.scheduler.waiting.head(self.now_ns)
            handoff = self._of[request]
            if request is not handoff.decode:
                continue  # a prompt: it waits for prompts that are held here until their targets have room
            del self._of[request]
            num_ready = len(worker.handoffs.ready())
            reason = (
                f"deadlock: it was preempted, lacks pages, and {num_ready} requests that have theirs wait behind it"
            )
            self.deadlocks.append((self.now_ns, worker.index, request.request_id or str(request.index)))
            worker.engine.cancel(request)
            self._leave_target(handoff, worker)
            self._refuse(handoff, worker.index, reason, FAILED)
            return True
        return False

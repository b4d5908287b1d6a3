"""Requests on their way through the workers of a fleet: their transitions, and the consequences of each.

A worker drops a request as any engine does: between steps, or if it has planned another step already, with that one;
the rest of the fleet learns of it after what has ended by then. A failing worker loses its requests between steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from heapq import heappush
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from kvarts.core.kv.transfer import PeersGain, PrefillNs
from kvarts.core.request import Request, RequestState
from kvarts.core.sched.policy import NEVER_NS
from kvarts.core.tiers.links import Links, PeerLinks, Pull, StoreLinks
from kvarts.sim.arrivals import Arrivals
from kvarts.sim.fleet.config import FleetConfig
from kvarts.sim.fleet.handoff import Handoff
from kvarts.sim.fleet.layer_wise import LayerWiseLinks
from kvarts.sim.fleet.pool import ModelRouters, RouterPool
from kvarts.sim.fleet.worker import ByReservation, Worker
from kvarts.sim.report.requests import COMPLETED, FAILED, REJECTED
from kvarts.sim.traffic.trace_request import DirectRequest, TraceRequest

if TYPE_CHECKING:
    from kvarts.core.build import PrepareTiers
    from kvarts.core.tiers.config import OffloadConfig

__all__ = ["Arriving", "FleetTransitions", "Incoming", "PeerUse", "PeersOfWorkers"]
__all__ += ["RELEASE", "SEND", "Below", "StoreUse", "WorkersStore"]

SEND: Final = 0
TRANSFER: Final = 1
ACTIVATE: Final = 2
ACTIVATE_NOW: Final = 3
RELEASE: Final = 4
RELEASE_NOW: Final = 5
"""Actions on a request: methods of Moves with their names."""


class Arriving:
    """Requests that are submitted one by one. Owner of those that have not arrived yet, and of outcomes.

    The interface is that of Arrivals, with its source and its log.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[Request, TraceRequest]] = deque()
        self.ended: list[int] = []
        """Requests that have ended, or failed, and were not taken yet."""
        self.failures: dict[int, str] = {}
        """Why some of them failed."""
        self.gives_up: dict[int, int] = {}
        """When requests that have not arrived yet are given up, by index."""

    @property
    def source(self) -> Arriving:
        """When they arrive."""
        return self

    @property
    def log(self) -> Arriving:
        """Their outcomes."""
        return self

    def add(self, request: Request, direct: DirectRequest | None, model: str | None) -> None:
        """Add a request, which arrives no earlier than the ones before it."""
        row = TraceRequest(
            request.index,
            request.arrival_ns,
            (),
            request.num_prompt_tokens,
            request.max_tokens,
            direct=direct,
            model=model,
        )
        self._queue.append((request, row))

    def next_ns(self) -> int | None:
        """Return when the next request arrives, if any is known."""
        return self._queue[0][0].arrival_ns if self._queue else None

    def pop(self, now_ns: int) -> tuple[Request, TraceRequest]:
        """Return it, and a row for it."""
        return self._queue.popleft()

    def gives_up_ns(self, request: Request, row: TraceRequest) -> int | None:
        """Return when it was given up, if that was before it was taken in."""
        return self.gives_up.pop(request.index, None)

    def note_cancelled(self, request: Request, row: TraceRequest, index: int, more: Sequence[int] = ()) -> None:
        """Do nothing: its client has given it up."""

    def done(self, request: TraceRequest, now_ns: int) -> None:
        """Record that a request has ended, or was refused."""
        self.ended.append(request.row)

    def end(
        self, request: Request, row: TraceRequest, replica: int, status: int = COMPLETED, more: Sequence[int] = ()
    ) -> None:
        """Do nothing: `done` was called when it had generated its last token."""

    def reject(
        self,
        request: Request,
        row: TraceRequest,
        replica: int,
        reason: str,
        status: int = REJECTED,
        more: Sequence[int] = (),
    ) -> None:
        """Record why a request was refused, or failed."""
        self.failures[row.row] = reason


Incoming: TypeAlias = Arrivals | Arriving
"""The requests that arrive at a fleet, and their outcomes."""


Below: TypeAlias = "Callable[[int, OffloadConfig | None, int], PrepareTiers]"
"""Returns what prepares the tiers of a worker: those of its settings, and memory that it shares with others below them.

The last argument is the KV bytes of a token.
"""


class WorkersStore(Protocol):
    """A store that workers share: each of its views is the use of one worker.

    `before_removal`: called with a worker before its readers receive the removal of its pages by another worker.
    """

    unit: str
    """The unit of its sizes and counts: "pages", or with KV groups "blocks"."""

    size: int
    unit_bytes: int
    before_removal: Callable[[int], object] | None

    def below(self, worker: int, offload: OffloadConfig | None, kv_bytes_per_token: int) -> PrepareTiers:
        """Return what prepares the tiers of `worker`: those of `offload`, and memory that it shares below them."""

    def num_loaded(self) -> Mapping[int, Mapping[int, int]]:
        """Return, by worker, the units that it has loaded, by the worker that had stored them."""

    @property
    def num_cached(self) -> int:
        """Units that can be found and that no transfer uses."""

    @property
    def num_evicted(self) -> int:
        """Units that were evicted to make room."""

    @property
    def num_refused(self) -> int:
        """Pages, or parts of pages, that were to be stored and found no room."""

    def take_waited_for(self) -> list[tuple[int, int]]:
        """Return each write that has ended since the last call, behind each worker with requests that waited for it."""

    def leave(self, worker: int) -> None:
        """Stop sending events to `worker`, which was removed."""


class PeersOfWorkers(Protocol):
    """The host memory of workers, from which others read.

    `before_change`: called with a worker before anything is pinned or released there for others.
    """

    unit: str
    """The unit of its counts, as of a store."""

    before_change: Callable[[int], object] | None

    def below(self, worker: int, offload: OffloadConfig | None, kv_bytes_per_token: int) -> PrepareTiers:
        """Return what prepares the tiers of `worker`: those of `offload`, and memory that it shares below them."""

    def num_loaded(self) -> Mapping[int, Mapping[int, int]]:
        """Return, by worker, the units that it has loaded, by the worker that had stored them."""

    def leave(self, worker: int) -> bool:
        """Stop reading from `worker`, which was removed; return whether it was still registered."""

    def gain(self, prefill: PrefillNs, page_size: int, tier: str) -> PeersGain:
        """Return the savings of a worker that reads pages, instead of computing them in the time of `prefill`."""


class StoreUse:
    """The stores that workers share, one for each model, and their links to these."""

    __slots__ = ("links", "stores")

    def __init__(self, stores: Sequence[WorkersStore], links: StoreLinks) -> None:
        self.stores = stores
        self.links = links

    def leave(self, worker: int) -> None:
        """Stop sending events to `worker`, which was removed."""
        for store in self.stores:
            store.leave(worker)

    def take_waited_for(self) -> list[tuple[int, int]]:
        """Return the writes of all stores that have ended, as `WorkersStore.take_waited_for` does."""
        return [each for store in self.stores for each in store.take_waited_for()]


class PeerUse:
    """The host memory of the workers of each model, from which others read, and the links that carry it."""

    __slots__ = ("links", "memories")

    def __init__(self, memories: Sequence[PeersOfWorkers], links: PeerLinks) -> None:
        self.memories = memories
        self.links = links

    def leave(self, worker: int) -> bool:
        """Stop reading from `worker`, which was removed; return whether it was still registered."""
        return any(memory.leave(worker) for memory in self.memories)


class FleetTransitions:
    """Owner of the requests of a fleet.

    `of_models`: the routers of each model, or one pair for all requests. `store`, `peers`: see FleetDriver.
    `layer_wise`: `links` again, if they send layers of a prompt before it is complete.
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
        on_progress: Callable[[int], object] | None = None,
    ) -> None:
        self._layer_wise = layer_wise
        self._arrivals = arrivals
        self._tier_names = config.tier_names
        self._store = store
        self._peers = peers
        self._source = arrivals.source
        self._source_moved = True
        """Whether requests have ended since the source said when the next one arrives."""
        self._log = arrivals.log
        self._of_models = of_models
        self._place_of_model = {routers.model: place for place, routers in enumerate(of_models)}
        self._router_pools = [router_pool for routers in of_models for router_pool in routers.router_pools]
        self._holding = [router_pool for router_pool in self._router_pools if router_pool.router.holds_requests]
        """Routers in which requests may wait."""
        self._pools = [pool for router_pool in self._router_pools for pool in router_pool.pools]
        self.workers = sorted(
            (worker for pool in self._pools for worker in pool.workers), key=lambda worker: worker.index
        )
        self._links = links
        self._only_missing = config.transfer == "missing"
        """Whether pages that the second worker has are not sent."""
        self._least_remote = config.least_remote
        self._hold_ns = round(config.hold_s * 1e9)
        self._left: dict[int, Handoff] = {}
        """Requests whose prompt is held for another request to fetch, by row."""
        self._leases: deque[tuple[int, Handoff]] = deque()
        """When each of them is released at the latest, and earlier ones that were fetched."""
        self._is_mocker = config.first.profile == "mocker"
        """Whether the fleet works as Dynamo's mocker, to the order of what happens at one time."""
        self._on_progress = on_progress
        self._page_size = self.workers[0].replica.config.page_size
        self._ends: list[tuple[int, int, int]] = []  # (end, rank, worker); stale if the worker's own end differs
        self._roused: set[int] = set()
        self._actions: deque[tuple[int, Handoff]] = deque()
        """What follows from what has happened, by the numbers above."""
        self._of: dict[Request, Handoff] = {}
        """The requests in the fleet, by either of their engine requests."""
        self._num_reserved = 0
        self._cut: set[int] = set() if peers is None else peers.links.cut
        """Workers whose link is cut."""
        self.num_failed_transfers = 0
        self.deadlocks: list[tuple[int, int, str]] = []
        """Time of each deadlock, the worker, and the request that was failed to resolve it."""
        self.now_ns = 0

    def _is_busy(self, worker: Worker, now_ns: int) -> bool:
        """Return whether `worker` has a step under way, and cut a leap short at the end of that step."""
        end_ns = worker.end_ns
        is_busy = worker.cut(now_ns)
        if is_busy and worker.end_ns != end_ns:
            heappush(self._ends, (worker.end_ns, worker.rank, worker.index))
        elif worker.end_ns != end_ns:
            self._roused.add(worker.index)
        return is_busy

    def _act(self, now_ns: int) -> None:
        """Run the queued actions in first-in, first-out order, including those that they add."""
        actions = self._actions
        while actions:
            action, handoff = actions.popleft()
            self._do(action, handoff, now_ns)

    def _do(self, action: int, handoff: Handoff, now_ns: int) -> None:
        """Carry out an action, by its number."""
        if action == SEND:
            self._send(handoff, now_ns)
        elif action == TRANSFER:
            self._transfer(handoff, now_ns)
        elif action == ACTIVATE:
            self._activate(handoff, now_ns)
        elif action == ACTIVATE_NOW:
            self._activate_now(handoff, now_ns)
        elif action == RELEASE:
            self._release(handoff, now_ns)
        else:
            assert action == RELEASE_NOW
            self._release_now(handoff, now_ns)

    def _take_placed(self, now_ns: int) -> None:
        """Send the requests on that waited in routers and are placed now."""
        is_done = False
        while not is_done:
            is_done = True
            for router_pool in self._holding:
                if router_pool.router.reads_metrics and not router_pool.router.staleness_ns:
                    self._poll(router_pool, now_ns)
                router_pool.emit(now_ns, range(len(router_pool.workers)))
                for handoff in router_pool.take_placed(now_ns):
                    self._send(handoff, now_ns)
                    is_done = False
            if self._actions:
                self._act(now_ns)
                is_done = False

    # On the way -------------------------------------------------------------------------------------------

    def _send(self, handoff: Handoff, now_ns: int) -> None:
        """Send a request to a worker: once its prompt is computed, to one that generates, even if the KV was lost."""
        if handoff.is_given_up or self._waits_in_router(handoff):
            return
        if handoff.placed >= 0:
            self._send_direct(handoff, now_ns)
            return
        if handoff.is_from_source:
            self._send_on(handoff, now_ns)
            return
        has_begun = handoff.held_ns >= 0 or handoff.decode.num_admissions
        is_placed = handoff.routed >= 0 and self._of_models[handoff.model].first.has(self.workers[handoff.routed])
        if not (has_begun or is_placed):
            handoff.is_local = self._stays(handoff, now_ns)
            if self._waits_in_router(handoff):
                return
        routers = self._of_models[handoff.model]
        router_pool = routers.second if has_begun or handoff.is_local else routers.first
        if router_pool.is_open:
            self._submit(handoff, router_pool, now_ns)
        else:
            router_pool.stranded.append(handoff)

    def _waits_in_router(self, handoff: Handoff) -> bool:
        return any(handoff.decode in each.held or handoff.prefill in each.held for each in self._holding)

    def _send_on(self, handoff: Handoff, now_ns: int) -> None:
        """Send a request whose prompt is held, or being computed, to a worker that generates."""
        second = self._of_models[handoff.model].second
        if handoff.at_target:
            if handoff.is_coming:
                self._transfer(handoff, now_ns)
        elif second.is_open:
            self._choose_second(handoff, now_ns)
        elif handoff.is_held:
            second.stranded.append(handoff)

    def _send_direct(self, handoff: Handoff, now_ns: int) -> None:
        """Send a request to the worker that its client chose, which fetches its prompt if it is held anywhere."""
        if handoff.placed >= len(self.workers):
            self._refuse(handoff, -1, f"there is no worker {handoff.placed}", REJECTED)
            return
        worker = self.workers[handoff.placed]
        if worker.is_down or not self.takes_requests(worker):
            if handoff.is_held:
                self._actions.append((RELEASE, handoff))
            what = "is down" if worker.is_down else "was taken away"
            self._refuse(handoff, handoff.placed, f"worker {handoff.placed} {what}", FAILED)
            return
        holder = None if handoff.fetches is None else self._left.pop(handoff.fetches, None)
        if holder is not None and holder.is_held:
            if holder.model == handoff.model and self._brings(holder, handoff.decode) and worker.index != holder.source:
                self._take_over(handoff, holder)
            else:
                self._actions.append((RELEASE, holder))
        if handoff.is_held:
            self._choose_second(handoff, now_ns)
            return
        request = handoff.decode
        handoff.source = handoff.target = worker.index
        if handoff.is_left:
            request = handoff.let_compute()
            handoff.target = -1
        elif handoff.held_ns >= 0 or handoff.decode.num_admissions:
            handoff.is_without_kv()
        else:
            handoff.do_both()
        self._is_busy(worker, now_ns)
        reason = worker.replica.submit(request, now_ns)
        if reason is not None:
            self._refuse(handoff, worker.index, reason, REJECTED)
            return
        self._enter(handoff, request, worker)

    def takes_requests(self, worker: Worker) -> bool:
        """Return whether a scaler has not taken `worker` away."""
        return not any(worker.index in pool.gone_ns or worker in pool.draining for pool in self._pools)

    def _brings(self, holder: Handoff, request: Request) -> bool:
        """Return whether the held prompt of `holder` is that of `request`."""
        held, num_tokens = holder.decode, request.num_prompt_tokens
        return (
            held.num_prompt_tokens == num_tokens
            and held.content.salt == request.content.salt
            and held.content.tokens(0, num_tokens) == request.content.tokens(0, num_tokens)
        )

    def _take_over(self, handoff: Handoff, holder: Handoff) -> None:
        """Let a request continue with the pages that are held for it."""
        handoff.prefill, handoff.source, handoff.held_ns = holder.prefill, holder.source, holder.held_ns
        handoff.at_source, holder.at_source = True, False
        self._of.pop(holder.decode, None)
        self._of[handoff.decode] = handoff
        self._complete(holder)

    def holder(self, row: int) -> Handoff | None:
        """Return the request of `row` if its prompt is held for another one to fetch."""
        holder = self._left.get(row)
        return holder if holder is not None and holder.is_held else None

    def _leave(self, handoff: Handoff, now_ns: int) -> None:
        """Let a worker hold a prompt, whose client has all that it asked for, until another request fetches it."""
        prefill = handoff.prefill
        assert prefill is not None
        handoff.is_ended = True
        handoff.decode.first_token_ns = handoff.decode.last_token_ns = prefill.last_token_ns
        handoff.count_prefill()
        if handoff.is_given_up:
            return
        self._left[handoff.row.row] = handoff
        self._leases.append((now_ns + self._hold_ns, handoff))
        self._is_done(handoff, now_ns)
        self._emit(1)

    def _is_done(self, handoff: Handoff, end_ns: int) -> None:
        """Let the source know of an end, upon which another request may arrive."""
        self._source_moved = True
        self._source.done(handoff.row, end_ns)

    def _next_lease_ns(self) -> int:
        """Return when a prompt is held no longer unless it is fetched; NEVER_NS if none is held."""
        leases = self._leases
        while leases and self._left.get(leases[0][1].row.row) is not leases[0][1]:
            leases.popleft()
        return leases[0][0] if leases else NEVER_NS

    def _end_leases(self, now_ns: int) -> None:
        """Release the prompts that were not fetched in time."""
        while self._next_lease_ns() <= now_ns:
            handoff = self._leases.popleft()[1]
            del self._left[handoff.row.row]
            if handoff.is_held:
                self._actions.append((RELEASE, handoff))

    def _stays(self, handoff: Handoff, now_ns: int) -> bool:
        """Return whether a new request is computed where it generates; that worker is chosen first.

        It is if the cache of the worker has all but a few tokens of the prompt.
        """
        routers = self._of_models[handoff.model]
        second = routers.second
        if self._least_remote is None or not routers.splits or not second.is_open:
            return False
        if handoff.planned < 0 or not second.sends_to(self.workers[handoff.planned]):
            self._unplan(handoff)
            planned = self._route(second, handoff, now_ns)
            if planned is None:
                return False
            handoff.planned = planned.index
        worker, request = self.workers[handoff.planned], handoff.decode
        self._is_busy(worker, now_ns)
        match = worker.handoffs.match(request.content, request.num_prompt_tokens - 1)
        return request.num_prompt_tokens - match.num_pages * self._page_size < self._least_remote

    def _unplan(self, handoff: Handoff) -> None:
        """Forget the worker that was chosen on arrival to generate."""
        if handoff.planned >= 0:
            handoff.planned = -1
            self._of_models[handoff.model].second.ended(handoff.decode)

    def _route_second(self, handoff: Handoff, now_ns: int) -> Worker | None:
        """Return the worker that generates: the one chosen on arrival, if requests are still sent to it.

        None: the request waits in the router.
        """
        second = self._of_models[handoff.model].second
        if handoff.planned >= 0:
            worker = self.workers[handoff.planned]
            if second.sends_to(worker):
                handoff.planned = -1
                if second.router.reads_prefills and handoff.is_from_source:
                    second.router.prefilled(handoff.decode.index)
                return worker
            self._unplan(handoff)
        return self._route(second, handoff, now_ns)

    def _submit(self, handoff: Handoff, router_pool: RouterPool, now_ns: int) -> None:
        """Queue a request in a worker of `router_pool`, that computes its prompt, or all of it."""
        decode = request = handoff.decode
        routers = self._of_models[handoff.model]
        worker = (
            self._route_second(handoff, now_ns)
            if router_pool is routers.second
            else self._route(router_pool, handoff, now_ns)
        )
        if worker is None:
            return
        reason = None
        if worker.only_prefills:
            request = handoff.let_compute()
            handoff.source, handoff.target = worker.index, -1
            if not self._is_mocker:
                reason = routers.second.never_fits(decode)
            if reason is not None:
                worker.replica.refuse(request, reason, now_ns)
        else:
            handoff.target = worker.index
            if router_pool is routers.first:
                self._unplan(handoff)
            if router_pool is routers.first or handoff.is_local:
                handoff.do_both()
                handoff.source = worker.index
            else:
                handoff.is_without_kv()
        if reason is None:
            self._is_busy(worker, now_ns)
            reason = worker.replica.submit(request, now_ns)
        if reason is not None:
            router_pool.ended(request)
            self._refuse(handoff, worker.index, reason, REJECTED if handoff.held_ns < 0 else FAILED)
            return
        self._enter(handoff, request, worker)

    def _enter(self, handoff: Handoff, request: Request, worker: Worker) -> None:
        """Record that `request` of a handoff is now on `worker`."""
        worker.num_owned += 1
        self._of[request] = handoff
        if request is handoff.prefill:
            handoff.at_source = True
        else:
            handoff.at_target = True
        self._roused.add(worker.index)

    def _route(self, router_pool: RouterPool, handoff: Handoff, now_ns: int) -> Worker | None:
        """Return the worker behind `router_pool` on which a request is placed; None if it waits in the router."""
        router = router_pool.router
        if handoff.routed >= 0:
            routed, handoff.routed = self.workers[handoff.routed], -1
            if router.reads_prefills and handoff.is_from_source:
                router.prefilled(handoff.decode.index)
            return routed
        if router.is_told or router.reads_metrics:
            if not router.staleness_ns:
                self._poll(router_pool, now_ns)
            router_pool.emit(now_ns, range(len(router_pool.workers)))
        request, routers = handoff.decode, self._of_models[handoff.model]
        if routers.only_prefills and router_pool is routers.first:
            request = handoff.let_compute()
        worker = router_pool.choose(request, handoff, now_ns)
        if worker is not None and router.reads_prefills and handoff.is_from_source:
            router.prefilled(request.index)  # its prompt is computed elsewhere
        return worker

    def _poll(self, router_pool: RouterPool, now_ns: int) -> None:
        """Pass the events of its workers to the router of `router_pool`, and their metrics if these are due."""
        for worker in router_pool.workers:
            self._is_busy(worker, now_ns)
        if router_pool.poll_ns(now_ns) == now_ns:
            router_pool.poll(now_ns, range(len(router_pool.engines)))

    def _choose_second(self, handoff: Handoff, now_ns: int) -> None:
        """Send a request to the queue for pages of a worker that generates."""
        is_direct = handoff.placed >= 0
        worker = self.workers[handoff.placed] if is_direct else self._route_second(handoff, now_ns)
        if worker is None:
            return
        handoff.target = worker.index
        second = self._of_models[handoff.model].second
        reason = second.never_fits(handoff.decode) if self._is_mocker else None
        if is_direct:
            reason = worker.scheduler.never_fits(handoff.decode)
        if reason is not None:
            worker.replica.refuse(handoff.decode, reason, now_ns)
            self._fail(handoff, reason)
            return
        worker.num_owned += 1
        self._of[handoff.decode] = handoff
        handoff.at_target = True
        worker.pending.append(handoff)
        if len(worker.pending) > 1 and worker.refused_at == worker.generation():
            return  # it waits behind a request that waits for pages
        if not self._is_busy(worker, now_ns):
            self._reserve_for(worker, now_ns)
            self._roused.add(worker.index)

    def _reserve_for(self, worker: Worker, now_ns: int) -> None:
        """Reserve pages of `worker` for pending requests, in order; the mocker reserves for one at a time."""
        pending = worker.pending
        scheduler, config = worker.scheduler, worker.replica.config
        while pending and not worker.is_down:
            if worker.refused_at == worker.generation():
                return
            handoff = pending[0]
            request = handoff.decode
            is_full = scheduler.num_seated >= config.max_num_seqs
            if is_full or not worker.queue.lets_reserve(request) or not worker.handoffs.reserve(request, now_ns):
                worker.refused_at = worker.generation()
                return
            pending.popleft()
            worker.refused_at = -1
            handoff.reserved_ns = now_ns
            handoff.order = self._num_reserved
            self._num_reserved += 1
            if isinstance(worker.queue, ByReservation):
                worker.queue.orders[request.index] = handoff.order
            self._actions.append((TRANSFER, handoff))
            if self._is_mocker:
                return

    def _send_computed(self, worker: Worker, now_ns: int) -> None:
        """Let the KV that `worker` computes in the step that starts be sent, layer by layer.

        The worker that receives it is chosen when the first of it is computed.
        """
        layer_wise = self._layer_wise
        assert layer_wise is not None
        for request in sorted(worker.scheduler.running, key=lambda request: request.admission):
            handoff = self._of[request]
            token_bytes = self._of_models[handoff.model].token_bytes
            if handoff.placed >= 0:
                continue  # a client fetches it
            is_first, num_tokens = not handoff.computed, request.num_prompt_tokens
            num_bytes = self._weight(worker, token_bytes, 0, num_tokens)
            parts = [
                handoff.compute(now_ns, now_ns, num_bytes * request.hit_tokens // num_tokens),
                handoff.compute(now_ns, worker.end_ns, num_bytes * request.num_computed // num_tokens),
            ]
            if is_first and handoff.computed:
                self._actions.append((SEND, handoff))
            if handoff.transfer_ns >= 0:
                for computed in parts:
                    if computed is not None:
                        layer_wise.supply(handoff, computed)

    def _transfer(self, handoff: Handoff, now_ns: int) -> None:
        """Begin a transfer, unless it has begun, or its source was lost after pages were reserved for it."""
        if handoff.transfer_ns >= 0 or not handoff.is_coming:
            return
        if not self._cut.isdisjoint((handoff.source, handoff.target)):
            if handoff.is_held:
                self._fail_transfer(handoff, now_ns)
            return
        handoff.transfer_ns = now_ns
        handoff.num_bytes = self._num_bytes(handoff)
        if self._links.begin(handoff, handoff.num_bytes, now_ns):
            self._actions.append((ACTIVATE, handoff))

    def _num_bytes(self, handoff: Handoff) -> int:
        """Return the bytes of KV that a request's target receives."""
        start = handoff.decode.hit_tokens if self._only_missing else 0
        token_bytes = self._of_models[handoff.model].token_bytes
        return self._weight(self.workers[handoff.target], token_bytes, start, handoff.decode.num_prompt_tokens)

    def _weight(self, worker: Worker, token_bytes: int, start: int, num_tokens: int) -> int:
        """Return the bytes of KV with which `worker`, with `start` tokens of a prompt, can continue it."""
        cache, page_size = worker.scheduler.cache, self._page_size
        if cache.frees_skipped:
            num_blocks = cache.incoming.num_sent(start, num_tokens, page_size)
            return num_blocks * page_size * token_bytes // cache.mean_page_blocks
        if self._only_missing:
            num_tokens = cache.incoming.num_sent(start, num_tokens, page_size) * page_size
        return num_tokens * token_bytes

    def _activate(self, handoff: Handoff, now_ns: int) -> None:
        """Activate a request whose KV has arrived, at the end of the step under way."""
        worker = self.workers[handoff.target]
        if self._is_busy(worker, now_ns):
            worker.deferred.append((ACTIVATE_NOW, handoff))
        else:
            self._activate_now(handoff, now_ns)

    def _activate_now(self, handoff: Handoff, now_ns: int) -> None:
        if handoff.is_given_up:
            return
        worker = self.workers[handoff.target]
        worker.handoffs.activate(handoff.decode, now_ns)
        worker.changed()
        self._roused.add(worker.index)
        handoff.activated_ns = now_ns
        self._reserve_for(worker, now_ns)
        self._actions.append((RELEASE, handoff))

    def _release(self, handoff: Handoff, now_ns: int) -> None:
        """Release the pages at the source, at the end of the step under way."""
        worker = self.workers[handoff.source]
        if self._is_busy(worker, now_ns):
            worker.deferred.append((RELEASE_NOW, handoff))
        else:
            self._release_now(handoff, now_ns)

    def _release_now(self, handoff: Handoff, now_ns: int) -> None:
        if not handoff.at_source:
            return  # it was dropped meanwhile
        worker = self.workers[handoff.source]
        assert handoff.prefill is not None
        worker.handoffs.release(handoff.prefill, now_ns)
        worker.engine.emit()
        handoff.released_ns = now_ns
        self._leave_source(handoff, worker)

    def _leave_source(self, handoff: Handoff, worker: Worker) -> None:
        """Record that the source no longer holds any part of a request."""
        assert handoff.prefill is not None
        self._of.pop(handoff.prefill, None)
        if not handoff.at_target:
            self._of.pop(handoff.decode, None)
        worker.num_owned -= 1
        worker.changed()
        self._roused.add(worker.index)
        handoff.note_below(handoff.prefill, worker.tier_names)
        handoff.at_source = False
        handoff.forget_computed()
        self._of_models[handoff.model].first.ended(handoff.prefill)
        self._complete(handoff)

    def _leave_target(self, handoff: Handoff, worker: Worker) -> None:
        """Record that the target no longer holds any part of a request."""
        if not handoff.is_held:
            self._of.pop(handoff.decode, None)
        if isinstance(worker.queue, ByReservation):
            worker.queue.orders.pop(handoff.decode.index, None)
        worker.num_owned -= 1
        worker.changed()
        self._roused.add(worker.index)
        handoff.note_below(handoff.decode, worker.tier_names)
        handoff.at_target = False
        self._router_pool_of(handoff).ended(handoff.decode)
        self._complete(handoff)

    def _router_pool_of(self, handoff: Handoff) -> RouterPool:
        """Return the router of the target."""
        routers = self._of_models[handoff.model]
        return routers.first if handoff.target == handoff.source and not handoff.is_local else routers.second

    # Clients that give up ---------------------------------------------------------------------------------

    def _give_up(self, handoff: Handoff, now_ns: int) -> None:
        """Drop a request whose client has given up from all workers."""
        handoff.is_given_up = True
        self._withdraw(handoff)
        if handoff.at_target:
            self._drop_soon(handoff, self.workers[handoff.target], now_ns)
        if handoff.at_source:
            self._drop_soon(handoff, self.workers[handoff.source], now_ns)
        self._complete(handoff)

    def _withdraw(self, handoff: Handoff) -> None:
        """Remove a request from the router in which it waits, if it does."""
        for router_pool in self._holding:
            router_pool.withdraw(handoff)

    def _drop_soon(self, handoff: Handoff, worker: Worker, now_ns: int) -> None:
        """Drop a request from `worker` at the end of the step under way; at once if the step does not involve it."""
        is_busy = self._is_busy(worker, now_ns)
        if handoff in worker.pending:
            worker.pending.remove(handoff)
            handoff.decode.become(RequestState.CANCELLED)
            self._leave_target(handoff, worker)
            self._try_again(worker, now_ns, is_busy=is_busy)
            return
        if handoff.is_coming:
            self._links.cancel(handoff, now_ns)
            handoff.num_bytes = 0
        request = handoff.decode
        if handoff.at_source and worker.index == handoff.source:
            assert handoff.prefill is not None
            request = handoff.prefill
        if not is_busy:
            self._drop(handoff, worker, now_ns)
        elif request.state is RequestState.HELD:
            worker.interrupts.append((self._drop, handoff))
        else:
            worker.replica.give_up(request, now_ns, is_busy=True)

    def _drop(self, handoff: Handoff, worker: Worker, now_ns: int) -> None:
        """Drop every part of a request from `worker`, which is idle; at once, unless its next step is planned."""
        request = handoff.decode
        is_source = handoff.at_source and worker.index == handoff.source
        if is_source:
            assert handoff.prefill is not None
            request = handoff.prefill
            if request.state is RequestState.HELD:
                self._release_now(handoff, now_ns)
                return
        elif not (handoff.at_target and worker.index == handoff.target):
            return
        if not worker.replica.give_up(request, now_ns, is_busy=False):
            self._roused.add(worker.index)
            return
        self._note_dropped(handoff, worker, now_ns)
        if not is_source:
            self._try_again(worker, now_ns, is_busy=False)

    def _note_dropped(self, handoff: Handoff, worker: Worker, now_ns: int) -> None:
        """Record that `worker` has dropped its part of a request."""
        if handoff.at_source and worker.index == handoff.source:
            self._leave_source(handoff, worker)
        else:
            self._leave_target(handoff, worker)

    def _try_again(self, worker: Worker, now_ns: int, *, is_busy: bool) -> None:
        """Retry reservations after another request has freed resources, at the end of the step under way."""
        worker.refused_at = -1
        if not is_busy:
            self._reserve_for(worker, now_ns)

    # Workers and links that fail --------------------------------------------------------------------------

    def _lose(self, worker: Worker, now_ns: int) -> None:
        """Drop all requests and the cache of `worker`, which is idle; its requests restart elsewhere."""
        worker.is_failing = False
        if self._store is not None:
            self._store.links.drop(worker.index, now_ns)
        if self._peers is not None:
            for pull in [each for each in self._peers.links.pulls.values() if each.target == worker.index]:
                self._peers.links.cancel(pull, now_ns)
            self._lose_pulls(worker, now_ns)
        worker.lose_transfers(now_ns)
        self._end_waits(now_ns)
        mine = {handoff.decode.index: handoff for handoff in self._of.values()}
        for _, handoff in sorted(mine.items()):
            if handoff.at_target and handoff.target == worker.index:
                self._lose_target(handoff, worker, now_ns)
            elif handoff.at_source and handoff.source == worker.index:
                self._lose_source(handoff, worker, now_ns)
        worker.lose_memory()
        worker.refused_at = -1  # the requests before the refused one have no pages any more, if they had some

    def _lose_pulls(self, worker: Worker, now_ns: int) -> None:
        """Fail all reads from a worker that fails or was removed."""
        assert self._peers is not None
        for pull in list(self._peers.links.pulls.values()):
            if pull.source == worker.index:
                self._fail_pull(pull, now_ns)

    def _fail_pull(self, pull: Pull, now_ns: int) -> None:
        """End a transfer of pages that do not arrive: its request computes them."""
        assert self._peers is not None
        self._peers.links.cancel(pull, now_ns)
        self.num_failed_transfers += 1
        worker = self.workers[pull.target]
        is_busy = self._is_busy(worker, now_ns)
        assert worker.tiers is not None
        worker.tiers.fails_last(pull.number, now_ns)
        if not is_busy:
            self._wake(worker, now_ns)

    def _end_pull(self, pull: Pull, now_ns: int) -> None:
        """End a transfer of pages that have arrived; a worker that is busy looks at the end of its step."""
        assert self._peers is not None
        del self._peers.links.pulls[pull]
        self._end_of_transfer(self.workers[pull.target], pull.number, now_ns)

    def _end_of_transfer(self, worker: Worker, number: int, now_ns: int) -> None:
        is_busy = self._is_busy(worker, now_ns)
        assert worker.tiers is not None
        worker.tiers.ends(number, now_ns)
        if not is_busy:
            self._wake(worker, now_ns)

    def _wake(self, worker: Worker, now_ns: int) -> None:
        """Let an idle worker look again, as a transfer to or from a tier below it has ended."""
        worker.wake_ns = NEVER_NS
        worker.end_transfers(now_ns)
        self._end_waits(now_ns)
        self._roused.add(worker.index)
        if worker.pending:
            self._reserve_for(worker, now_ns)

    def _lose_target(self, handoff: Handoff, worker: Worker, now_ns: int) -> None:
        """Restart a request on another worker: from the KV that its source holds, else by recomputing its tokens."""
        decode = handoff.decode
        if handoff in worker.pending:
            worker.pending.remove(handoff)
        else:
            if handoff.is_coming:
                self._links.cancel(handoff, now_ns)
                self.num_failed_transfers += 1
            worker.withdraw(decode, now_ns)
            if handoff.is_from_source:
                handoff.never_came()
        self._leave_target(handoff, worker)
        self._restart(handoff)

    def _take_back(self, handoff: Handoff, now_ns: int) -> None:
        """Release the pages that an idle target has reserved for a request whose prompt is still to be computed."""
        target = self.workers[handoff.target]
        self._links.cancel(handoff, now_ns)
        target.withdraw(handoff.decode, now_ns)
        handoff.never_came()
        self._leave_target(handoff, target)
        self._try_again(target, now_ns, is_busy=False)

    def _lose_source(self, handoff: Handoff, worker: Worker, now_ns: int) -> None:
        """Continue a request without its source: its target, if it has one, computes the prompt."""
        prefill = handoff.prefill
        assert prefill is not None
        is_held = prefill.state is RequestState.HELD
        if is_held:
            self._release_now(handoff, now_ns)
        else:
            worker.withdraw(prefill, now_ns)
            self._leave_source(handoff, worker)
        if not handoff.at_target:
            if not is_held:
                self._restart(handoff)
            return
        target = self.workers[handoff.target]
        if handoff in target.pending:
            is_busy = self._is_busy(target, now_ns)
            target.pending.remove(handoff)
            self._compute_here(handoff, target, now_ns)
            self._try_again(target, now_ns, is_busy=is_busy)
        elif handoff.is_coming and (not is_held or handoff.transfer_ns < 0 or handoff in self._links.under_way()):
            self._fail_transfer(handoff, now_ns)  # also if requests that the source lost before have just made room

    def _end_waits(self, now_ns: int) -> None:
        """Let requests go on that have waited for writes of other workers to the store."""
        if self._store is None:
            return
        for index, write in self._store.take_waited_for():
            worker = self.workers[index]
            self._is_busy(worker, now_ns)
            assert worker.scheduler.loads is not None
            worker.scheduler.loads.end_wait(write)
            worker.changed()
            self._roused.add(index)

    def _restart(self, handoff: Handoff) -> None:
        if handoff.is_given_up:
            return
        handoff.num_restarts += 1
        self._withdraw(handoff)
        self._actions.append((SEND, handoff))

    def _cut_transfer(self, handoff: Handoff, now_ns: int) -> None:
        """End a transfer whose link fails. If the prompt is still being computed, it begins again when that ends."""
        if handoff.is_held:
            self._fail_transfer(handoff, now_ns)
            return
        self._links.cancel(handoff, now_ns)
        self.num_failed_transfers += 1
        handoff.transfer_ns = -1
        handoff.num_bytes = 0

    def _fail_transfer(self, handoff: Handoff, now_ns: int) -> None:
        """Let the target compute the prompt, at the end of the step under way, because its KV does not arrive."""
        self._links.cancel(handoff, now_ns)
        self.num_failed_transfers += 1
        worker = self.workers[handoff.target]
        if self._is_busy(worker, now_ns):
            worker.interrupts.append((self._compute_instead, handoff))
        else:
            self._compute_instead(handoff, worker, now_ns)
        self._actions.append((RELEASE, handoff))

    def _compute_instead(self, handoff: Handoff, worker: Worker, now_ns: int) -> None:
        """Release the reservation on `worker`, which is idle, and queue the request there."""
        if handoff.is_given_up:
            return
        worker.withdraw(handoff.decode, now_ns)
        self._compute_here(handoff, worker, now_ns)
        self._try_again(worker, now_ns, is_busy=False)

    def _compute_here(self, handoff: Handoff, worker: Worker, now_ns: int) -> None:
        """Queue a request on `worker` like any other, without the KV of its prompt."""
        handoff.never_came()
        handoff.is_without_kv()
        handoff.num_restarts += 1
        decode = handoff.decode
        if isinstance(worker.queue, ByReservation):
            worker.queue.orders.pop(decode.index, None)
        worker.changed()
        self._roused.add(worker.index)
        reason = worker.replica.submit(decode, now_ns)
        assert reason is None, "pages were reserved for it, or would have been"

    # Ends -------------------------------------------------------------------------------------------------

    def _end(self, handoff: Handoff, worker: Worker) -> None:
        handoff.is_ended = True
        handoff.count_prefill()
        self._leave_target(handoff, worker)
        if not handoff.is_given_up:
            self._is_done(handoff, handoff.decode.last_token_ns)
            self._emit(1)

    def _complete(self, handoff: Handoff) -> None:
        """Log a request that has ended or was given up, once no worker holds any part of it."""
        if handoff.at_source or handoff.at_target or handoff.is_reported:
            return
        if not (handoff.is_ended or handoff.is_given_up):
            return
        handoff.is_reported = True
        self._unplan(handoff)
        request = handoff.decode
        more = self._more(handoff)
        if self._tier_names:
            request.cached_tokens_below = tuple([handoff.below.get(name, 0) for name in self._tier_names])
        handoff.count_prefill()
        if handoff.prefill is not None and handoff.fetches is None:
            request.first_admitted_ns = handoff.prefill.first_admitted_ns
        replica = handoff.source if handoff.target < 0 else handoff.target
        if handoff.is_given_up:
            request.cancelled_ns = self.now_ns
            self._source_moved = True
            self._arrivals.note_cancelled(request, handoff.row, replica, more)
            self._emit(1)
        else:
            self._log.end(request, handoff.row, replica, more=more)

    def _more(self, handoff: Handoff) -> tuple[int, ...]:
        """Return the values of the log's fleet columns."""
        times_ns = handoff.times()
        return (
            handoff.source,
            times_ns[0],
            times_ns[1],
            times_ns[2],
            times_ns[3],
            times_ns[4],
            times_ns[5],
            handoff.num_bytes,
            handoff.num_restarts,
            int(handoff.is_local),
            *self._model_column(handoff),
        )

    def _model_column(self, handoff: Handoff) -> tuple[int, ...]:
        """Return the place of its model, if there are several."""
        return (handoff.model,) if len(self._of_models) > 1 else ()

    def _refuse(self, handoff: Handoff, worker: int, reason: str, status: int) -> None:
        """Log a request that is given up, with its `reason`."""
        handoff.is_reported = True
        self._unplan(handoff)
        self._log.reject(handoff.decode, handoff.row, worker, reason, status, more=self._more(handoff))
        self._is_done(handoff, self.now_ns)
        self._emit(1)

    def _fail(self, handoff: Handoff, reason: str) -> None:
        """Fail a request that fits no worker that generates, and release the pages that its source holds."""
        self._of.pop(handoff.decode)
        self._of_models[handoff.model].second.ended(handoff.decode)
        self._refuse(handoff, handoff.target, reason, FAILED)
        self._actions.append((RELEASE, handoff))

    def _emit(self, num_ended: int) -> None:
        if self._on_progress is not None:
            self._on_progress(num_ended)

"""A fleet whose requests arrive while it runs, in model time; a caller moves it on, and knows the clock.

It runs the driver of replays, so a replay of the same arrivals at the same times does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import structs

from kvarts.core.event_log import EventReader
from kvarts.core.request import Request, RequestState
from kvarts.core.sched.policy import NEVER_NS
from kvarts.sim.fleet.config import FleetConfig, FleetWorker
from kvarts.sim.fleet.handoff import Handoff
from kvarts.sim.fleet.replay import BuiltFleet
from kvarts.sim.fleet.transitions import Arriving
from kvarts.sim.fleet.worker import Worker
from kvarts.sim.traffic.trace_request import DirectRequest

__all__ = ["LiveFleet"]


class LiveFleet:
    """The workers of `config`, and the requests on their way through them.

    Steps are done one by one. `readers_of` returns the readers of a worker's events.
    """

    def __init__(self, config: FleetConfig, readers_of: Callable[[FleetWorker], Sequence[EventReader]]) -> None:
        pools = tuple(
            structs.replace(pool, each=structs.replace(pool.each, step_by_step=True)) for pool in config.pools
        )
        self._arriving = Arriving()
        config = structs.replace(config, pools=pools)
        self._num_known = config.replicas
        by_model = len(config.of_models) > 1
        opened = BuiltFleet(config, by_model=by_model, num_waiting=1)
        self._driver = opened.open(lambda _: self._arriving, readers_of)
        self._under_way: dict[int, Handoff] = {}
        self._driver.under_way = self._under_way
        self._stops = config.first.stop_tokens

    @property
    def workers(self) -> list[Worker]:
        """The workers, by their numbers."""
        return self._driver.workers

    @property
    def now_ns(self) -> int:
        """When something happened last."""
        return self._driver.now_ns

    def next_ns(self) -> int:
        """Return when something happens next; NEVER_NS if nothing will, unless a request arrives."""
        return self._driver.next_ns()

    def holder(self, index: int) -> Handoff | None:
        """Return the request with this index if its prompt is held for another one to fetch."""
        return self._driver.holder(index)

    def arrive(self, request: Request, direct: DirectRequest | None, model: str | None = None) -> None:
        """Let a request arrive at its time, after `now_ns`.

        `direct`: the worker that its client chose, if it did. `model`: the one that it asks for, of several.
        """
        assert request.arrival_ns > self._driver.now_ns or not self._driver.now_ns
        request.stops = request.stops or self._stops
        self._arriving.add(request, direct, model)

    def run_until(self, until_ns: int) -> None:
        """Carry out everything that happens before `until_ns`. Requests that can never go on fail."""
        driver = self._driver
        driver.run_until(until_ns)
        while driver.next_ns() == NEVER_NS and driver.resolve():
            driver.run_until(until_ns)
        driver.idle_until(until_ns)

    def take_scaled(self) -> tuple[list[Worker], list[int]]:
        """Return the workers that were added since the last call, and the numbers of the removed ones.

        The memory of removed workers is released.
        """
        workers = self._driver.workers
        added, self._num_known = workers[self._num_known :], len(workers)
        return added, self._driver.release_gone()

    def next_idle_ns(self) -> int:
        """Return when a scaler decides next, or a worker is ready, if no request is in the fleet."""
        return self._driver.next_idle_ns()

    def give_up(self, index: int, now_ns: int) -> None:
        """Drop a request that its client gives up at `now_ns`, after the time that was reached."""
        self.run_until(now_ns)
        handoff = self._under_way.pop(index, None)
        if handoff is None:
            self._arriving.gives_up[index] = now_ns
        else:
            self._driver.give_up(handoff, now_ns)
        self.run_until(now_ns + 1)
        self._under_way.pop(index, None)

    def takes_requests(self, worker: Worker) -> bool:
        """Return whether a scaler has not taken `worker` away."""
        return self._driver.takes_requests(worker)

    def clear_cache(self, worker: Worker) -> None:
        """Drop every cached page of `worker` that is not in use, at the end of its step under way."""
        if worker.end_ns == NEVER_NS:
            worker.engine.clear_cache()
        else:
            worker.is_clearing = True

    def take_ended(self) -> list[tuple[Handoff, str | None]]:
        """Return the requests that have ended since the last call; with a reason those that were refused or failed."""
        arriving = self._arriving
        ended, arriving.ended = arriving.ended, []
        found = []
        for index in ended:
            handoff, reason = self._under_way.pop(index, None), arriving.failures.pop(index, None)
            if handoff is not None:
                found.append((handoff, reason))
        return found

    def on_their_way(self) -> list[Handoff]:
        """Return the requests that have arrived and were not taken."""
        return list(self._under_way.values())

    def num_generated(self, handoff: Handoff) -> int:
        """Return how many tokens a request has so far."""
        request = handoff.decode
        if handoff.is_ended:
            return request.max_tokens
        if request.state is not RequestState.DECODING:
            return request.num_output_tokens
        running = self.workers[handoff.target].scheduler.running
        if request in running.stalled:
            return request.num_output_tokens
        return running.num_computed(request) + 1 - request.num_prompt_tokens

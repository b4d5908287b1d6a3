"""A fleet that is moved on by a clock which keeps pace with real time.

All workers are in one thread: it waits for the next thing that happens to any of them, and lets requests in meanwhile.

Arrivals can be recorded: as a trace that `kvarts replay` reads, with the same fleet.

The tokens of answers are drawn when a request arrives (`Foreseen`), as the workers of a fleet are those of a replay.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvarts.base.clock import PacedClock, WallClock
from kvarts.core.engine import Engine
from kvarts.core.request import Request
from kvarts.core.sched.policy import NEVER_NS
from kvarts.doors.openai.answer import Choice
from kvarts.doors.openai.foreseen import Foreseen
from kvarts.doors.openai.meter import GoneEngines, Meter
from kvarts.doors.openai.recordings import ArrivalRecorder
from kvarts.run.llm_engine import RequestFailedError
from kvarts.run.text import Completion
from kvarts.sim.fleet.handoff import Handoff
from kvarts.sim.fleet.live import LiveFleet
from kvarts.sim.fleet.worker import Worker
from kvarts.sim.traffic.logs import RecordedRow
from kvarts.sim.traffic.trace_request import DirectRequest

__all__ = ["FleetClock", "FleetMeter", "FleetRecorder", "PacedFleet", "WorkerMeters"]


MOST_IDLE_S = 1.0
LEAST_IDLE_S = 0.01


class FleetClock(PacedClock):
    """Model time of a fleet: begins with its first request, and is after everything that has happened."""

    def __init__(self, *, speedup: float = 1.0) -> None:
        super().__init__(speedup=speedup)
        self.has_begun = False
        """Whether a request has arrived."""
        self.reached_ns = -1
        """Everything until then has happened."""

    def now_ns(self) -> int:
        """Return the model time at which a request arrives if it is sent now."""
        if not self.has_begun:
            self.has_begun = True
            self._wall = WallClock()
        return max(super().now_ns(), self.reached_ns + 1)


class WorkerMeters:
    """The meters of the workers, by their numbers."""

    def __init__(self) -> None:
        self._of: dict[int, Meter] = {}
        self._gone: dict[int, GoneEngines] = {}

    def add(self, worker: int, meter: Meter, gone: GoneEngines) -> None:
        """Add the meter of a worker. `gone`: has the counts of removed workers with its model."""
        self._of[worker] = meter
        self._gone[worker] = gone

    def of(self, worker: int) -> Meter:
        """Return the meter that counts for a worker, which may have left."""
        meter = self._of.get(worker)
        return self._gone[worker].meter if meter is None else meter

    def leave(self, worker: int, engine: Engine) -> None:
        """Remove the meter of a worker with this engine; its counts are kept among those of removed workers."""
        self._gone[worker].take(self._of.pop(worker), engine)


class PacedFleet:
    """A CoreEngine: the fleet, up to the time of `clock`.

    `meters`: those of the workers. `keeps`: keep the facts that a recorder of arrivals needs. `on_scaled`: receives the
    workers that a scaler has added, and the numbers of those that it has removed; None without a scaler.
    """

    def __init__(
        self,
        fleet: LiveFleet,
        clock: FleetClock,
        foreseen: Foreseen,
        meters: WorkerMeters,
        *,
        keeps: bool,
        on_scaled: Callable[[list[Worker], list[int]], object] | None = None,
    ) -> None:
        self.fleet = fleet
        self.clock = clock
        self.direct: dict[int, DirectRequest] = {}
        """Requests that a client sends to a worker, by index; to be set before they are queued."""
        self.models: dict[int, str] = {}
        """The models that requests ask for, of several, by index; to be set before they are queued."""
        self.gave_up_ns: dict[int, int] = {}
        """When requests were given up, by index, if that is recorded."""
        self._foreseen = foreseen
        self._meters = meters
        self._keeps = keeps
        self._on_scaled = on_scaled
        self._requests: dict[int, Request] = {}
        self._targets: dict[int, tuple[int, bool]] = {}
        """The worker that generates each request, and whether it has the prompt from another one."""
        self._gone: list[int] = []
        """Requests that have ended since the last step began; their listeners learn that before the next one."""
        self._counted: set[int] = set()
        """Requests whose prompt was computed elsewhere, and counted there."""

    @property
    def has_work(self) -> bool:
        """Whether anything will happen without a request."""
        return self.fleet.next_ns() != NEVER_NS

    def submit(self, request: Request, now_ns: int) -> None:
        """Let `request` arrive."""
        self._foreseen.draw(request)
        index = request.index
        direct = self.direct.get(index) if self._keeps else self.direct.pop(index, None)
        model = self.models.get(index) if self._keeps else self.models.pop(index, None)
        self._run_until(now_ns)
        self._requests[index] = request
        self.fleet.arrive(request, direct, model)

    def cancel(self, request: Request) -> None:
        """Drop `request`, now."""
        now_ns = self.clock.now_ns()
        self._run_until(now_ns)
        if self._keeps:
            self.gave_up_ns[request.index] = now_ns
        self.fleet.give_up(request.index, now_ns)
        self.clock.reached_ns = now_ns
        self._forget(request.index)

    def step(self, now_ns: int) -> list[Request]:
        """Wait until something happens, or a task is queued; return the requests that have ended."""
        next_ns = self.fleet.next_ns()
        if next_ns == NEVER_NS:
            self._run_until(now_ns)  # fails requests that cannot go on
        elif self.clock.wait_unless_asked(next_ns):
            self._run_until(max(next_ns + 1, self.clock.now_ns()))
        return self._deliver()

    def catch_up(self) -> None:
        """Let everything happen that is due, such as the release of pages that were not fetched in time."""
        self._run_until(self.clock.now_ns())

    def scale(self) -> float:
        """Run the ticks of the scaler that are due; return the seconds until the next one."""
        clock = self.clock
        if not clock.has_begun:
            return MOST_IDLE_S
        self.catch_up()
        left_ns = self.fleet.next_idle_ns() - clock.now_ns()
        return min(MOST_IDLE_S, max(LEAST_IDLE_S, left_ns / 1e9 / clock.speedup))

    def target_of(self, index: int) -> tuple[int, bool] | None:
        """Return the worker that generates a request, and whether it has the prompt from another one."""
        return self._targets.get(index)

    def _run_until(self, until_ns: int) -> None:
        self.fleet.run_until(until_ns)
        self.clock.reached_ns = max(self.clock.reached_ns, until_ns - 1)
        if self._on_scaled is not None:
            added, gone = self.fleet.take_scaled()
            if added or gone:
                self._on_scaled(added, gone)

    def _deliver(self) -> list[Request]:
        """Give requests their tokens, and return those that have ended."""
        fleet, foreseen = self.fleet, self._foreseen
        for index in self._gone:
            self._targets.pop(index, None)
        self._gone = []
        finished = []
        for handoff, reason in fleet.take_ended():
            index = handoff.decode.index
            self._note(handoff)
            if reason is None:
                foreseen.give(index, handoff.decode.max_tokens)
            else:
                foreseen.fail(index, RequestFailedError(reason))
            finished.append(self._requests[index])
            self._forget(index)
        for handoff in fleet.on_their_way():
            self._note(handoff)
            foreseen.give(handoff.decode.index, fleet.num_generated(handoff))
        return finished

    def _note(self, handoff: Handoff) -> None:
        """Note where a request generates, and count its prompt where it was computed."""
        index = handoff.decode.index
        worker = handoff.source if handoff.is_left or handoff.target < 0 else handoff.target
        self._targets[index] = worker, handoff.activated_ns >= 0
        prefill = handoff.prefill
        if prefill is not None and handoff.placed < 0 and handoff.held_ns >= 0 and index not in self._counted:
            self._counted.add(index)
            meter = self._meters.of(handoff.source)
            meter.prefilled(prefill)
            meter.ended_by_reason["length"] += 1

    def _forget(self, index: int) -> None:
        self._requests.pop(index, None)
        self._counted.discard(index)
        self._gone.append(index)


class FleetMeter:
    """The ChoiceMeter of one choice: counts at the worker that generates it, as the engine there would.

    `meters`: those of the workers; `otherwise`: for a request that no worker has received.
    """

    def __init__(self, fleet: PacedFleet, meters: WorkerMeters, otherwise: Meter) -> None:
        self._fleet = fleet
        self._meters = meters
        self._otherwise = otherwise
        self._worker = -1

    @property
    def _meter(self) -> Meter:
        return self._otherwise if self._worker < 0 else self._meters.of(self._worker)

    def prefilled(self, request: Request) -> None:
        """Count a prompt that has been computed, here or elsewhere."""
        target = self._fleet.target_of(request.index)
        if target is not None:
            self._worker = target[0]
        meter = self._meter
        if target is None or not target[1]:
            meter.prefilled(request)
            return
        meter.num_prompt_tokens += request.num_prompt_tokens
        meter.num_queried_tokens += request.num_prompt_tokens
        meter.num_hit_tokens += request.num_prompt_tokens
        meter.num_hit_tokens_below += request.num_prompt_tokens

    def first_token(self, waited_s: float) -> None:
        """Count a first token."""
        self._meter.first_token(waited_s)

    def next_tokens(self, num_tokens: int, waited_s: float) -> None:
        """Count tokens after the first."""
        self._meter.next_tokens(num_tokens, waited_s)

    def ended(self, choice: Choice, completion: Completion, now_s: float) -> None:
        """Count a choice that has ended."""
        self._meter.ended(choice, completion, now_s)


class FleetRecorder(ArrivalRecorder):
    """Records the requests that arrive at any door of a fleet.

    A row has all tokens that its answer would have had, and the time at which its client gave it up. A request that was
    sent to a worker has its number, and that of the line whose pages it has fetched; with several models, each row
    has the name of its model.
    """

    def __init__(self, fleet: PacedFleet) -> None:
        super().__init__()
        self._fleet = fleet

    def rows(self) -> list[RecordedRow]:
        """Return the arrivals so far."""
        lines = {request.index: line for line, (request, _) in enumerate(self._arrived)}
        direct_of, gave_up_ns, models = self._fleet.direct, self._fleet.gave_up_ns, self._fleet.models
        rows = []
        for (request, _), row in zip(self._arrived, super().rows(), strict=True):
            content, num_prompt = request.content, request.num_prompt_tokens
            changes: dict[str, object] = {
                "began_ns": 0,  # faults and ages of metrics are counted from there
                "num_output_tokens": request.max_tokens,
                "output": content.tokens(num_prompt, content.num_known_tokens).tolist(),
            }
            if request.index in gave_up_ns:
                changes["cancel_after_ns"] = gave_up_ns[request.index] - request.arrival_ns
            if request.index in models:
                changes["model"] = models[request.index]
            direct = direct_of.get(request.index)
            if direct is not None:
                changes["worker"] = direct.worker
                if direct.is_left:
                    changes["is_left"] = True
                    changes["ended"] = "finished"
                if direct.fetches is not None:
                    changes["fetches"] = lines[direct.fetches]
            rows.append(msgspec.structs.replace(row, **changes))
        return rows

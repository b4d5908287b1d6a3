"""A small fleet of mocks on the wall clock: requests to its router and its workers, what happened, and its replay."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from kvarts.core.sampling import SamplingParams
from kvarts.cost.polynomial import LinearCost
from kvarts.doors.openai.errors import ApiError
from kvarts.doors.openai.fleet.opening import OpenedFleet
from kvarts.doors.openai.opening import Door, MockSettings
from kvarts.doors.openai.running import RunningServer, open_mock
from kvarts.doors.openai.served import Ask, Limits, Served
from kvarts.sim.config import ReplayConfig
from kvarts.sim.fleet.config import FleetConfig, FleetWorker, PoolConfig, Role
from kvarts.sim.fleet.replay import replay_fleet
from kvarts.sim.traffic.logs import RecordedRow, recorded_trace

from builders.http_client import call
from builders.parity import Heard, HeardBy

LEAVES = {"do_remote_decode": True}


@dataclass
class Sent:
    """A request, after how long it is sent, and to which worker: None for the router.

    `left_at`: the worker that computes its prompt first, whose pages it then fetches. `gives_up_ms`: how long its
    client waits. `model`: the one that it asks the router for.
    """

    delay_ms: float
    prompt: list[int]
    num_tokens: int
    worker: int | None = None
    left_at: int | None = None
    gives_up_ms: float | None = None
    num_stops: int = 0
    priority: int = 0
    salt: str | None = None
    model: str | None = None


def small_pool(role: Role, num_workers: int, *, step_ms: float = 0.05, **settings: Any) -> PoolConfig:
    """Workers with short steps."""
    sizes = {"num_pages": 60, "page_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 32, **settings}
    cost = LinearCost(step_ms=step_ms, chunk_token_ms=0.01, decode_ms=0.01)
    return PoolConfig(role=role, each=ReplayConfig(replicas=num_workers, cost=cost, **sizes))


@dataclass
class LiveRun:
    """What a fleet recorded, and what happened in each of its workers."""

    rows: list[RecordedRow]
    heard: dict[int, Heard]
    fleet: OpenedFleet
    failures: list[str] = field(default_factory=list)
    told: list[dict[str, Any] | None] = field(default_factory=list)


def served_live(config: FleetConfig, sent: list[Sent], *, speedup: float = 1.0) -> LiveRun:
    """Send requests to a fleet of mocks on the wall clock."""
    heard = {worker.index: Heard() for worker in config.workers}
    door = Door(is_recording=True, limits=Limits(max_queued=100_000))
    fleet = open_mock(config, door, MockSettings(speedup=speedup, readers=HeardBy(heard)))
    assert isinstance(fleet, OpenedFleet)
    run = LiveRun([], heard, fleet)

    async def ask(served: Served, request: Sent, num_tokens: int, name: str, params: Any = None) -> Any:
        stops = tuple(range(request.num_stops)) if num_tokens > 1 else ()
        each = Ask(
            tokens=request.prompt,
            params=SamplingParams(max_tokens=num_tokens, temperature=1.0, stop_token_ids=stops),
            priority=request.priority,
            salt=request.salt,
            request_id=name,
            kv_transfer_params=params,
        )
        try:
            answer, choices = served.start([each])
        except ApiError as error:
            run.failures.append(str(error))
            return []
        try:
            while not choices[0].is_over or answer.pieces:
                await answer.take()
        except Exception as error:
            run.failures.append(str(error))
        finally:
            served.finish(choices)
        return choices

    async def one(number: int, request: Sent) -> None:
        await asyncio.sleep(request.delay_ms / 1000)
        params = None
        workers = fleet.workers
        if request.left_at is not None:
            holder = workers[request.left_at]
            choices = await ask(holder.opened.served, request, 1, f"{number}", LEAVES)
            params = holder.transfers.told(LEAVES, choices) if choices else None
            run.told.append(params)
        in_front = fleet.models.of(request.model)
        served = in_front if request.worker is None else workers[request.worker].opened.served
        asking = asyncio.ensure_future(ask(served, request, request.num_tokens, f"{number}", params))
        try:
            timeout_s = None if request.gives_up_ms is None else request.gives_up_ms / 1000
            await asyncio.wait_for(asking, timeout_s)
        except TimeoutError:
            pass

    async def all_of_them() -> None:
        fleet.models.open()
        for worker in fleet.workers:
            worker.opened.models.open()
        await asyncio.gather(*(one(number, request) for number, request in enumerate(sent)))

    asyncio.run(all_of_them())

    def rest(_: Any) -> None:
        while fleet.fleet.has_work:  # prompts that nobody has fetched, and transfers
            fleet.fleet.fleet.run_until(fleet.fleet.fleet.next_ns() + 1)
        for worker in fleet.fleet.fleet.workers:
            worker.engine.log.flush()

    fleet.loop.call(rest)
    assert fleet.recorder is not None
    run.rows = fleet.recorder.rows()
    return run


def replayed(config: FleetConfig, rows: list[RecordedRow]) -> tuple[Any, dict[int, Heard]]:
    """Replay the record of a run on the same fleet, step by step."""
    pools = tuple(replace(pool, each=replace(pool.each, step_by_step=True)) for pool in config.pools)
    config = replace(config, pools=pools)
    heard: dict[int, Heard] = {}

    def observers_of(worker: FleetWorker) -> list[Heard]:
        return [heard.setdefault(worker.index, Heard())]

    report = replay_fleet(recorded_trace(rows), config, observers_of=observers_of)
    return report, heard


class RunningFleet(RunningServer):
    """A fleet of mocks at free ports of the loopback address, in a thread of this process."""

    def __init__(self, config: FleetConfig, **given: Any) -> None:
        super().__init__(config, **given)
        assert isinstance(self.opened, OpenedFleet)
        self.fleet = self.opened
        self.urls = [url for _, url in self.server.urls]

    @property
    def num_live(self) -> int:
        """Requests under way at all doors."""
        fleet = self.fleet
        return sum(each.models.num_live for each in (fleet, *(worker.opened for worker in fleet.workers)))

    def metric(self, worker: int, name: str, **labels: str) -> float:
        """A metric of a worker, summed over the labels that are not given."""
        text = call(self.urls[worker], "/metrics").payload.decode()
        found = re.findall(rf"^{name}{{(.*)}} (\S+)$", text, re.MULTILINE)
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(float(value) for has, value in found if all(each in has for each in wanted))

    def wait_until(self, is_so: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Wait until something is so; fail if it is not in time."""
        deadline = time.monotonic() + timeout_s
        while not is_so():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def assert_at_rest(self) -> None:
        """Assert that no worker has pages in use, and that all pages are accounted for."""

        def check(_: Any) -> None:
            self.fleet.fleet.catch_up()
            for worker in self.fleet.fleet.fleet.workers:
                worker.scheduler.check()
                held = len(worker.handoffs.held)
                assert worker.scheduler.cache.num_used == 0 or held, f"worker {worker.index}"

        self.fleet.loop.call(check)

"""Clients that come, change their mind and go, at all doors of a fleet that fails: no page is left, no law broken."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest

from kvarts.core.sampling import SamplingParams
from kvarts.core.tiers.config import OffloadConfig
from kvarts.doors.openai.errors import ApiError
from kvarts.doors.openai.fleet.opening import OpenedFleet
from kvarts.doors.openai.opening import Door, MockSettings
from kvarts.doors.openai.running import open_mock
from kvarts.doors.openai.served import Ask, Limits, Served
from kvarts.sim.fleet.config import FleetConfig, StoreSettings
from kvarts.sim.fleet.faults import Fault

from builders.live_fleet import LEAVES, small_pool

FAULTS = (
    Fault("down", 0, 300_000_000, 500_000_000),
    Fault("down", 2, 600_000_000, 700_000_000),
    Fault("cut", 1, 800_000_000, 900_000_000),
    Fault("slow", 3, 1_000_000_000, 1_200_000_000, 3),
    Fault("down", 3, 1_300_000_000, 1_500_000_000),
)


@pytest.mark.parametrize(
    ("router", "has_host", "has_store"),
    [
        pytest.param("dynamo-kv", True, True, marks=pytest.mark.slow),
        pytest.param("llm-d", False, True, marks=pytest.mark.slow),
        ("least-loaded", False, False),
        pytest.param("prefix", True, False, marks=pytest.mark.long),
    ],
)
def test_nothing_is_left_of_clients_that_come_and_go(router: str, has_host: bool, has_store: bool) -> None:
    draw = random.Random(router)
    each: dict[str, Any] = {"num_pages": 40, "audit": True, "step_ms": 0.3, "router": router}
    if has_host:
        each["offload"] = OffloadConfig(host_pages=50, policy="eager", kv_bytes_per_token=100)
    pools = small_pool("prefill", 2, **each), small_pool("decode", 2, **each), small_pool("mixed", 1, **each)
    store = StoreSettings(pages=200, rate="1GB/s", worker_rate="1GB/s") if has_store else None
    config = FleetConfig(pools=pools, bytes_per_s=1e5, token_bytes=10, hold_s=0.1, faults=FAULTS, store=store)
    fleet = open_mock(config, Door(limits=Limits(max_queued=100_000)), MockSettings())
    assert isinstance(fleet, OpenedFleet)
    doors = [worker.opened.served for worker in fleet.workers]
    failures: list[str] = []
    num_whole = 0

    async def ask(served: Served, tokens: list[int], num_tokens: int, params: Any, waits_s: float | None) -> Any:
        nonlocal num_whole
        sampling = SamplingParams(max_tokens=num_tokens, temperature=1.0)
        question = Ask(tokens=tokens, params=sampling, request_id="x", kv_transfer_params=params)
        try:
            answer, choices = served.start([question])
        except ApiError as error:
            failures.append(str(error))
            await asyncio.sleep(0.001)
            return []

        async def read() -> None:
            while not choices[0].is_over or answer.pieces:
                await answer.take()

        try:
            await asyncio.wait_for(read(), waits_s)
            completion = choices[0].completion
            assert completion is not None and len(completion.tokens) == num_tokens
            num_whole += 1
        except TimeoutError:
            pass
        except Exception as error:
            failures.append(str(error))
        finally:
            served.finish(choices)
        return choices

    async def client(until_s: float) -> None:
        while time.monotonic() < until_s or (num_whole <= 50 and time.monotonic() < until_s + 30):  # a slow machine
            tokens = [draw.randrange(3)] * draw.choice([3, 17, 33]) + [draw.randrange(4)] * draw.randrange(8)
            served, params = (fleet.served if draw.random() < 0.7 else draw.choice(doors)), None
            if draw.random() < 0.3:
                holder = draw.choice(fleet.workers)
                choices = await ask(holder.opened.served, tokens, 1, LEAVES, None)
                if not choices:
                    continue  # it is down
                params, served = holder.transfers.told(LEAVES, choices), draw.choice(doors)
                if draw.random() < 0.2:
                    continue  # nobody fetches it
            await ask(served, tokens, draw.randrange(1, 25), params, draw.choice([None, None, 0.002, 0.02]))
            if draw.random() < 0.02:
                await draw.choice(doors).forget_cached()

    async def all_of_them() -> None:
        for each in (fleet, *(worker.opened for worker in fleet.workers)):
            each.models.open()
        await asyncio.gather(*(client(time.monotonic() + 2.0) for _ in range(24)))

    asyncio.run(all_of_them())

    def check(_: Any) -> None:
        paced, live = fleet.fleet, fleet.fleet.fleet
        paced.catch_up()
        while paced.has_work:  # transfers, and prompts that nobody has fetched
            live.run_until(live.next_ns() + 1)
        for worker in live.workers:
            worker.scheduler.check()
            assert worker.scheduler.cache.num_used == 0, f"worker {worker.index}"
        assert not live.on_their_way() and not paced.direct

    fleet.loop.call(check)
    assert num_whole > 50
    assert all(failure.endswith("is down") for failure in failures), failures

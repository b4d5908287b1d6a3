"""Workers that a scaler adds to a fleet of mocks: each has a door, metrics and KV events until it leaves."""

from __future__ import annotations

import gc
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvarts.doors.openai.app import OpenAIApp
from kvarts.doors.openai.server import Address
from kvarts.sim.fleet.config import FleetConfig
from kvarts.sim.fleet.scaling import Decision, FleetState, parse_scaler

from builders.http_client import call
from builders.kv_event_client import open_client
from builders.live_fleet import RunningFleet, small_pool
from builders.ports import free_ports
from builders.server_process import kvarts_process

PROMPT = "hello the world of one and two and three and once more to fill some pages of it"


def scaled(policy: str, *, startup_s: float = 0.0, **settings: Any) -> FleetConfig:
    """Return a fleet of one mixed worker, or more as `policy` says."""
    pools = (small_pool("mixed", 1, **settings),)
    return FleetConfig(pools=pools, scaler=partial(parse_scaler, policy), scaling=policy, startup_s=startup_s)


class Told:
    """A scaler that a test tells how many workers to have, so that a slow machine misses none of its numbers."""

    EVERY_NS = 50_000_000

    def __init__(self) -> None:
        self.num_workers = 1

    def first_ns(self) -> int:
        return self.EVERY_NS

    def on_tick(self, state: FleetState) -> Decision:
        return Decision({"mixed": self.num_workers}, state.now_ns + self.EVERY_NS)

    def of_fleet(self, *, startup_s: float = 0.0) -> FleetConfig:
        """Return a fleet of one mixed worker that this scaler scales."""
        pools = (small_pool("mixed", 1),)
        return FleetConfig(pools=pools, scaler=lambda: self, scaling="told", startup_s=startup_s)


def complete(url: str, **body: Any) -> Any:
    reply = call(url, "/v1/completions", {"prompt": PROMPT, "max_tokens": 5, **body})
    assert reply.status == 200, reply.payload
    return reply.json


def total(url: str, name: str) -> float:
    """Return a counter of a router's, over all engines."""
    text = call(url, "/metrics").payload.decode()
    return sum(map(float, re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE)))


def engines(url: str) -> set[str]:
    return {*re.findall(r'vllm:generation_tokens_total{engine="(\w+)"', call(url, "/metrics").payload.decode())}


def test_a_worker_that_is_added_is_as_the_others_until_it_leaves() -> None:
    told = Told()
    with RunningFleet(told.of_fleet(startup_s=0.1)) as fleet:
        complete(fleet.url)
        told.num_workers = 2
        fleet.wait_until(lambda: len(fleet.server.urls) == 2)
        name, url = fleet.server.urls[1]
        assert name == "worker 1 (mixed)"
        fleet.urls.append(url)
        assert call(url, "/").status == 200 and call(url, "/live").json[0]["name"] == "mock"
        time.sleep(0.2)
        for each in (fleet.url, fleet.url, url):
            complete(each, max_tokens=7)
        assert fleet.metric(1, "vllm:generation_tokens_total") == 14
        assert call(url, "/server_info").json["pool"] == "mixed"
        assert engines(fleet.url) == {"0", "1", "gone"}
        assert total(fleet.url, "vllm:generation_tokens_total") == 26
        # No request moves the fleet on: its time does.
        told.num_workers = 1
        fleet.wait_until(lambda: len(fleet.server.urls) == 1)
        assert engines(fleet.url) == {"0", "gone"}
        assert total(fleet.url, "vllm:generation_tokens_total") == 26
        assert total(fleet.url, "vllm:request_success_total") == 4
        with pytest.raises(OSError, match="refused"):
            call(url, "/health")
        complete(fleet.url)
        assert total(fleet.url, "vllm:generation_tokens_total") == 31
        fleet.assert_at_rest()


def num_apps() -> int:
    """Return the doors in memory, also those that are being closed."""
    gc.collect()
    return sum(isinstance(each, OpenAIApp) for each in gc.get_objects())


def test_a_worker_without_a_free_port_serves_behind_the_router_and_later_ones_have_doors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process has no file left for a moment, twice: for the port in the row, and for any other one."""
    told = Told()
    with RunningFleet(told.of_fleet()) as fleet:
        listen, refused = Address.listen, list[int]()

        def listen_later(address: Address) -> Any:
            if len(refused) < 2:
                refused.append(address.port)
                raise OSError(24, "Too many open files")
            return listen(address)

        monkeypatch.setattr(Address, "listen", listen_later)
        complete(fleet.url)
        told.num_workers = 2
        fleet.wait_until(lambda: len(refused) == 2)
        complete(fleet.url)
        assert [name for name, _ in fleet.server.urls] == ["worker 0 (mixed)"]
        told.num_workers = 1
        fleet.wait_until(lambda: engines(fleet.url) == {"0", "gone"})
        told.num_workers = 2
        fleet.wait_until(lambda: [name for name, _ in fleet.server.urls] == ["worker 0 (mixed)", "worker 2 (mixed)"])
        complete(fleet.server.urls[1][1])
        assert engines(fleet.url) == {"0", "2", "gone"}


@pytest.mark.long
def test_two_hundred_workers_come_and_go_and_nothing_grows() -> None:
    policy = ",".join(f"{0.02 * number + 0.1:.2f}s={1 + (number + 1) % 2}" for number in range(400))
    num_others = num_apps()  # of earlier tests
    with RunningFleet(scaled(f"script,{policy}")) as fleet:
        live = fleet.fleet.fleet.fleet

        def known() -> tuple[int, int, int, int]:
            """Return the workers that have come, and the objects, files and threads now."""
            gc.collect()
            num_files, num_threads = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
            return len(live.workers), len(gc.get_objects()), num_files, num_threads

        complete(fleet.url)
        fleet.wait_until(lambda: len(live.workers) >= 40, 60.0)
        before = known()
        for number in range(600):
            complete(fleet.url, prompt=f"{PROMPT} {number % 10}", max_tokens=3)
            if len(live.workers) == 201:
                break
        fleet.wait_until(lambda: len(live.workers) == 201, 60.0)
        complete(fleet.url)
        fleet.wait_until(lambda: num_apps() - num_others <= 3, 60.0)
        # One worker stands for all that have left.
        fleet.wait_until(lambda: len({id(worker) for worker in live.workers}) == 2, 60.0)
        after = known()
        num_added = after[0] - before[0]
        assert num_added > 100
        assert after[1] - before[1] < 5 * num_added, f"{(after[1] - before[1]) / num_added:.1f} objects a worker"
        assert after[2] <= before[2] + 4 and after[3] <= before[3] + 3
        assert len(fleet.fleet.workers) == 1 and len(fleet.fleet.loop.held) == 2
        fleet.assert_at_rest()


FLEET = """
pages = 400
page_size = 16
cost = "linear:step_ms=2,chunk_token_ms=0.02"

[scaling]
policy = "script,0.2s=2,6s=1,6.5s=2"

[[pool]]
role = "mixed"
"""


def test_it_publishes_kv_events_at_the_next_port_and_says_where_it_listens(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(FLEET)
    events = ("--kv-events", "tcp://127.0.0.1:0", "--set", "kv_events_replay=tcp://127.0.0.1:0")
    with kvarts_process("mock", "--fleet", str(file), "--port", "0", *events) as process:
        process.wait_for(r"worker 0 \(mixed\) on http")
        front = re.findall(r"http://127\.0\.0\.1:\d+", "".join(process.lines))[0]
        complete(front)
        process.wait_for(r"worker 1 \(mixed\) on http")
        url = re.findall(r"http://127\.0\.0\.1:\d+", "".join(process.lines))[-1]
        told = call(front, "/kv_event_sources").json
        assert list(told) == ["0", "1"] and call(url, "/kv_event_sources").json == {"1": told["1"]}
        complete(url, prompt=f"{PROMPT} again and again and again")
        with open_client(told["1"]["endpoint"], told["1"]["replay_endpoint"]) as client:
            assert any(b"BlockStored" in payload for _, _, payload in client.replay(0))
        process.wait_for(r"worker 1 \(mixed\) has left")
        process.wait_for(r"worker 2 \(mixed\) on http")
        assert list(call(front, "/kv_event_sources").json) == ["0", "2"]
        assert process.stop() == 0
    assert not any("Traceback" in line for line in process.lines)


def test_an_added_worker_publishes_at_a_free_port_where_the_next_one_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(FLEET)
    with pair_of_ports() as (port, taken):
        events = ("--kv-events", f"tcp://127.0.0.1:{port}", "--set", "kv_events_replay=tcp://127.0.0.1:0")
        with kvarts_process("mock", "--fleet", str(file), "--port", "0", *events) as process:
            process.wait_for(r"worker 0 \(mixed\) on http")
            front = re.findall(r"http://127\.0\.0\.1:\d+", "".join(process.lines))[0]
            complete(front)
            process.wait_for(r"worker 1 \(mixed\) on http")
            sources = call(front, "/kv_event_sources").json
            assert sources["0"]["endpoint"] == f"tcp://127.0.0.1:{port}"
            assert sources["1"]["endpoint"] not in (f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{taken}")
            assert process.stop() == 0


@contextmanager
def pair_of_ports() -> Iterator[tuple[int, int]]:
    """Yield a free port, and the next one, on which something listens."""
    port = free_ports(2)
    with socket.create_server(("127.0.0.1", port + 1)):
        yield port, port + 1

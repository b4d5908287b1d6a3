"""`kvarts watch --ui`: the live page of an engine that is watched."""

from __future__ import annotations

import socket
from collections.abc import Callable

import msgspec
import pytest

pytest.importorskip("zmq", reason="needs kvarts[serve]")

from kvarts.base.errors import ConfigError
from kvarts.doors.kv_events.batches import KvEventsConfig
from kvarts.doors.kv_events.publisher import open_kv_events
from kvarts.doors.openai.running import RunningServer
from kvarts.doors.watch.live import WatchedPage
from kvarts.doors.watch.metrics import EngineSample, parse_metrics
from kvarts.sim.report.page import LiveEngine

from builders.http_client import Reply, call
from builders.ports import free_ports
from builders.working import give_time, working

Run = Callable[..., int]


def test_the_page_shows_the_blocks_and_the_metrics_of_an_engine(run_command: Run) -> None:
    events_port, replay_port, page_port = range(first := free_ports(3), first + 3)
    endpoints = [f"tcp://127.0.0.1:{port}" for port in (events_port, replay_port)]
    events = open_kv_events(KvEventsConfig(endpoint=endpoints[0], replay_endpoint=endpoints[1]))
    url = f"http://127.0.0.1:{page_port}"
    seen: list[Reply] = []
    pages: list[Reply] = []

    def work() -> None:
        give_time(1.0)
        for _ in range(3):
            call(server.url, "/v1/completions", {"prompt": "the sea " * 40, "max_tokens": 60, "ignore_eos": True})
        give_time(1.5)
        seen.append(call(url, "/live?since=-1"))
        pages.append(call(url, "/"))
        seen.append(call(url, "/live?since=x"))
        seen.append(call(url, "/live", headers={"host": "elsewhere.example"}))
        seen.append(call(url, "/live", headers={"origin": "http://elsewhere.example"}))
        seen.append(call(url, "/v1/models"))

    with RunningServer(readers=[events.reader], cost="linear:step_ms=10", pages=256) as server, working(work):
        code = run_command("watch", endpoints[0], "--replay", endpoints[1], "--metrics", f"{server.url}/metrics",
                           "--ui", page_port, "--duration", 60, "--set", "quiet=true", "--json")  # fmt: skip
    events.close()
    assert code == 0 and [reply.status for reply in seen] == [200, 400, 403, 403, 404]
    (engine,) = msgspec.json.decode(seen[0].payload, type=list[LiveEngine])
    device = engine.memories[0]
    assert device.total == 256 and device.used + device.cached == engine.totals["stored"] > 5
    assert engine.totals["hit tokens"] == 160 and engine.page_size == 16
    assert sum(row.tokens or 0 for row in engine.rows) <= 180
    assert any(row.next_ms is not None and row.next_ms[0] >= 9 for row in engine.rows)
    assert pages[0].status == 200 and "connect-src 'self'" in pages[0].headers["content-security-policy"]


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="ui"):
            WatchedPage(taken.getsockname()[1], name="x")


def test_latencies_of_metrics_are_sums_and_counts_by_either_name() -> None:
    def sample(name: str) -> EngineSample:
        return parse_metrics("".join(
            f'vllm:{each}_seconds_{part}{{engine="{engine}"}} {value}\n'
            for each in ("time_to_first_token", name) for engine in (0, 1)
            for part, value in (("sum", 1.5), ("count", 3))
        ))  # fmt: skip

    for name in ("inter_token_latency", "time_per_output_token"):
        assert sample(name).first_token_s == sample(name).next_token_s == (3.0, 6)
    assert parse_metrics("vllm:time_to_first_token_seconds_sum 1\n").first_token_s is None

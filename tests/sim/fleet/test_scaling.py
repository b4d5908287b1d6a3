"""Scalers by their rules, at single ticks; and what a fleet does with what they decide."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvarts.base.errors import ConfigError
from kvarts.sim.config import ReplayConfig
from kvarts.sim.fleet.config import FleetConfig, PoolConfig
from kvarts.sim.fleet.scaling import Decision, FleetState, PoolState, WorkerState, parse_scaler
from kvarts.sim.replaying import replay
from kvarts.sim.traffic.trace import Trace, TraceRequest

from builders.case import Case, Row

S = 1_000_000_000


def state(*workers: tuple[int, float], at_s: int = 0, num_starting: int = 0) -> FleetState:
    """One pool of workers, each with so many waiting requests and that share of its pages in use."""
    active = tuple(WorkerState(index, 1, waiting, 0, used) for index, (waiting, used) in enumerate(workers))
    return FleetState(at_s * S, (PoolState("decode", "decode", active, num_starting, 0),))


def test_a_script_says_what_there_is_from_each_time_on() -> None:
    scaler = parse_scaler("script,1m30s=1:3,30s=3:1")
    assert scaler.first_ns() == 30 * S
    first, second = scaler.on_tick(state((0, 0.0))), scaler.on_tick(state((0, 0.0)))
    assert (first.targets, first.next_ns) == ({"prefill": 3, "decode": 1}, 90 * S)
    assert (second.targets, second.next_ns) == ({"prefill": 1, "decode": 3}, None)


@pytest.mark.parametrize(
    ("policy", "workers", "target"),
    [
        ("queue,target=4", [(4, 0.0), (4, 0.0)], 2),  # as it should be
        ("queue,target=4", [(9, 0.0), (0, 0.0)], 3),  # ceil(9 / 4)
        ("queue,target=4", [(50, 0.0)], 8),  # not more than `most`
        ("queue,target=1e-320", [(1, 0.0)], 8),  # although the quotient is infinite
        ("kv,target=1e-320", [(0, 0.5)], 8),
        ("queue,target=4,stable=0s", [(0, 0.0), (0, 0.0)], 1),
        ("kv,target=50", [(0, 0.9), (0, 0.6)], 3),  # ceil(2 x 75 / 50)
        ("kv,target=50", [(0, 0.52), (0, 0.53)], 2),  # within a tenth
        ("llm-d", [(6, 0.1)], 2),  # saturated
        ("llm-d", [(0, 0.75), (0, 0.75)], 3),  # 5 % of the pages to spare
        ("llm-d", [(3, 0.1), (3, 0.1)], 3),  # 2 places in the queue to spare
        ("llm-d", [(0, 0.3), (0, 0.3)], 1),  # one could take the load of both
        ("llm-d", [(0, 0.4), (0, 0.4)], 2),  # and not this
    ],
)
def test_a_policy_keeps_its_rule(policy: str, workers: list[tuple[int, float]], target: int) -> None:
    decision = parse_scaler(policy).on_tick(state(*workers))
    assert decision.targets == {"decode": target}


def test_fewer_workers_only_once_that_many_were_enough_for_a_while() -> None:
    scaler = parse_scaler("queue,target=1,every=10s,stable=30s")
    assert scaler.on_tick(state((3, 0.0), at_s=10)).targets == {"decode": 3}
    for at_s in (20, 30, 40):
        assert scaler.on_tick(state((0, 0.0), (0, 0.0), (0, 0.0), at_s=at_s)).targets == {"decode": 3}
    assert scaler.on_tick(state((0, 0.0), (0, 0.0), (0, 0.0), at_s=50)).targets == {"decode": 1}


def test_llm_d_decides_nothing_while_workers_start() -> None:
    assert parse_scaler("llm-d").on_tick(state((9, 0.9), num_starting=1)).targets == {}


def of_tokens(
    *workers: tuple[int, int], capacity: int = 1000, role: str = "decode", num_starting: int = 0
) -> FleetState:
    """One pool of workers, each with so many tokens that wait, and so many of running requests."""
    active = tuple(
        WorkerState(index, 1, 1, queued, 0.0, scheduled_tokens=scheduled, capacity_tokens=capacity)
        for index, (queued, scheduled) in enumerate(workers)
    )
    return FleetState(0, (PoolState(role, role, active, num_starting, 0),))


BY_LOAD = "dynamo,target=load,prefill-up=500,prefill-down=100,decode-up=80,decode-down=40"


@pytest.mark.parametrize(
    ("policy", "state", "target"),
    [
        ("dynamo,context=100", of_tokens((99, 0), (0, 0), role="prefill"), 2),  # none has a whole context to compute
        ("dynamo,context=100", of_tokens((100, 0), (0, 0), role="prefill"), 3),
        ("dynamo,context=100", of_tokens((9, 0), (9, 0), role="prefill"), 1),  # below a tenth each
        ("dynamo,context=100", of_tokens((9, 0), (10, 0), role="prefill"), 2),
        ("dynamo,context=100", of_tokens((1, 1000), (0, 0)), 3),  # one has more than it holds
        ("dynamo,context=100", of_tokens((0, 1000), (0, 0)), 2),
        ("dynamo,context=100", of_tokens((0, 490), (0, 490)), 1),  # 98 % of one
        ("dynamo,context=100", of_tokens((0, 510), (0, 510)), 2),  # 102 % of one
        ("dynamo,context=100", of_tokens((0, 510), (0, 510), (0, 510)), 2),  # 76.5 % of two
        ("dynamo,context=100,target=latency", of_tokens((10, 0), role="prefill"), 2),
        ("dynamo,context=100,target=latency", of_tokens((0, 0), (1, 0), role="prefill"), 2),
        ("dynamo,context=100,target=latency", of_tokens((0, 0), (0, 0), role="prefill"), 1),
        ("dynamo,context=100,target=latency", of_tokens((0, 401)), 2),
        ("dynamo,context=100,target=latency", of_tokens((0, 99), (0, 99)), 1),
        ("dynamo,context=100,most=2", of_tokens((1, 1000), (0, 0)), 2),
        (BY_LOAD, of_tokens((499, 0), (100, 0), role="prefill"), 2),
        (BY_LOAD, of_tokens((500, 0), (0, 0), role="prefill"), 3),  # as many as `prefill-up`
        (BY_LOAD, of_tokens((100, 0), (100, 0), role="prefill"), 1),  # as few as `prefill-down`, 200 in one
        (BY_LOAD, of_tokens((100, 0), (101, 0), role="prefill"), 2),
        (
            "dynamo,target=load,prefill-up=150,prefill-down=100,decode-up=80,decode-down=40",
            of_tokens((100, 0), (0, 0), role="prefill"),
            2,
        ),  # 200 in one would be too many
        (BY_LOAD, of_tokens((0, 800), (0, 0)), 3),
        (BY_LOAD, of_tokens((0, 799), (0, 0)), 2),
        (BY_LOAD, of_tokens((100, 290), (0, 390)), 1),  # 78 % of one
        (BY_LOAD, of_tokens((0, 400), (0, 400)), 2),  # 80 % of one
        ("dynamo,target=load,decode-up=80,decode-down=40", of_tokens((500, 300), role="mixed"), 2),
        ("llm-d-v2", of_tokens((0, 680)), 1),  # 800 tokens are its capacity, and 85 % of that are in use
        ("llm-d-v2", of_tokens((0, 681)), 2),
        ("llm-d-v2", of_tokens((2000, 0)), 3),  # 2353 tokens of capacity are wanted
        ("llm-d-v2", of_tokens((0, 281), (0, 280)), 2),
        ("llm-d-v2", of_tokens((0, 280), (0, 280)), 1),  # 70 % of one
        ("llm-d-v2", of_tokens((2000, 0), num_starting=2), 3),  # those that start suffice
        ("llm-d-v2", of_tokens((0, 0), (0, 0), (0, 0)), 1),
    ],
)
def test_a_policy_of_tokens_keeps_its_rule(policy: str, state: FleetState, target: int) -> None:
    name = state.pools[0].name
    assert parse_scaler(policy).on_tick(state).targets == {name: target}


def test_dynamos_loads_of_prefill_workers_are_needed_where_there_are_any(
    run_command: Callable[..., int], capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    by_load = (
        "--set",
        "scaling.policy=dynamo,target=load,decode-up=80,decode-down=40",
        "--pages",
        600,
        "--page-size",
        512,
    )
    assert run_command("replay", "sample:mooncake", *by_load, "--prefill", "replicas=1", "--decode", "replicas=1") == 2
    assert b"--set scaling.policy: needs prefill-up and prefill-down" in capsysbinary.readouterr().err
    assert run_command("replay", "sample:mooncake", *by_load, "--replicas", 2) == 0


def test_dynamo_decides_nothing_while_workers_of_any_pool_start() -> None:
    scaler = parse_scaler("dynamo,context=100")
    assert scaler.first_ns() == 5 * S
    (busy,), (starting,) = of_tokens((1, 1000)).pools, of_tokens((0, 0), role="prefill", num_starting=1).pools
    decision = scaler.on_tick(FleetState(5 * S, (starting, busy)))
    assert (decision.targets, decision.next_ns) == ({}, 10 * S)


@pytest.mark.parametrize(
    "policy",
    [
        "dynamo,context=32768",
        "dynamo,target=load,prefill-up=32768,prefill-down=3000,decode-up=80,decode-down=40",
        "llm-d-v2,every=10s",
    ],
)
def test_a_policy_of_tokens_scales_a_fleet(asked: Callable[..., Any], policy: str) -> None:
    report = asked(
        "replay", "sample:mooncake", "--profile", "mocker", "--pages", 600, "--page-size", 512, "--json",
        "--prefill", "replicas=1", "--decode", "replicas=1", "--set", f"scaling.policy={policy}",
        "--set", "scaling.startup_s=5",
    )  # fmt: skip
    assert report["num_completed"] == 1000
    assert max(pool["mean_workers"] for pool in report["fleet"]["pools"]) > 1.2


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("more", "not known"),
        ("queue,4", "NAME=VALUE"),
        ("queue,target=0", "above 0"),
        ("queue,goal=4", "has no"),
        ("llm-d,least=3,most=2", "least is 3"),
        ("script,30s=3:1:2", "P:D"),
        ("script,30s=0:1", "number of workers"),
        ("script,soon=1:1", "duration"),
        ("script,30s=inf", "not a number"),
        ("script,30s=nan:1", "not a number"),
        ("script,30s=1.5", "number of workers"),
        ("script,30s=1000000000", "number of workers"),
        ("script,30s=1,30s=4", "twice"),
        ("script,30s=1,0h30s=4", "two steps at 30 s"),
        ("script", "no step"),
        ("queue,target=4,target=5", "twice"),
        ("queue,target=nan", "not a number"),
        ("queue,target=inf", "not a number"),
        ("queue,most=inf", "not a number"),
        ("queue,least=1.5", "number of workers"),
        ("queue,least=0", "number of workers"),
        ("queue,most=100000", "number of workers"),
        ("kv,every=0s", "every"),
        ("dynamo", "context"),
        ("dynamo,context=0", "context"),
        ("dynamo,context=inf", "not a number"),
        ("dynamo,context=100,target=cost", "throughput, latency or load"),
        ("dynamo,context=100,decode-up=80", "no effect with target=throughput"),
        ("dynamo,context=100,target=load", "context has no effect"),
        ("dynamo,target=load", "needs decode-up"),
        ("dynamo,target=load,decode-up=80", "needs decode-down"),
        ("dynamo,target=load,decode-up=80,decode-down=80", "decode-up is 80 and decode-down is 80"),
        ("dynamo,target=load,decode-up=101,decode-down=80", "decode-up is 101"),
        ("dynamo,target=load,decode-up=80,decode-down=40,prefill-up=9", "needs prefill-down"),
        ("llm-d-v2,target=4", "has no"),
    ],
)
def test_what_is_no_scaler_is_refused(policy: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_scaler(policy)


def test_workers_start_drain_and_cost_what_they_are_there_for(asked: Callable[..., Any]) -> None:
    report = asked(
        "replay", "sample:mooncake", "--profile", "mocker", "--pages", 16384, "--page-size", 512, "--json",
        "--prefill", "replicas=1", "--decode", "replicas=1", "--set", "scaling.startup_s=10",
        "--set", "scaling.policy=script,30s=2:3,120s=1:1",
    )  # fmt: skip
    prefill, decode = report["fleet"]["pools"]
    end_s = report["duration_ms"] / 1e3
    assert prefill["worker_seconds"] == pytest.approx(end_s + 90, abs=10)  # draining takes a while
    assert decode["worker_seconds"] == pytest.approx(end_s + 180, abs=60)
    assert decode["worker_seconds"] > end_s + 180
    assert report["num_completed"] == 1000
    assert decode["gpu_hours"] == pytest.approx(decode["worker_seconds"] / 3600)


def test_a_script_is_for_the_only_pool_of_a_role_whatever_its_name(
    asked: Callable[..., Any], tmp_path: Path, kvarts: Callable[..., tuple[int, str, str]]
) -> None:
    pools = ['[[pool]]\nrole = "prefill"', '[[pool]]\nrole = "decode"\nname = "large-memory"']
    (tmp_path / "fleet.toml").write_text("\n".join(["pages = 9000", *pools, '[scaling]\npolicy = "script,5s=2:3"']))
    report = asked("replay", "sample:mooncake", "--config", tmp_path / "fleet.toml", "--json")
    assert [len(pool["replicas"]) for pool in report["fleet"]["pools"]] == [2, 3]
    (tmp_path / "fleet.toml").write_text(
        "\n".join(["pages = 9000", *pools, '[[pool]]\nrole = "decode"', '[scaling]\npolicy = "script,5s=2:3"'])
    )
    code, _, said = kvarts("replay", "sample:mooncake", "--config", tmp_path / "fleet.toml")
    assert (code, "a pool decode, which is not there" in said) == (2, True), said


class Told:
    """A scaler that decides the same at every tick."""

    def __init__(self, targets: dict[str, int], every_ns: int) -> None:
        self.targets = targets
        self.every_ns = every_ns

    def first_ns(self) -> int:
        return 0

    def on_tick(self, state: FleetState) -> Decision:
        return Decision(self.targets, state.now_ns + self.every_ns)


@pytest.mark.parametrize(
    ("targets", "every_ns", "said"),
    [
        ({"mixed": 2}, 0, "its tick at 0 s is followed by one at 0 s"),
        ({"mixed": 2}, -1, "is followed by"),
        ({"mixt": 2}, S, "mixt, which is not a pool"),
    ],
)
def test_a_scaler_of_ones_own_is_held_to_its_promises(targets: dict[str, int], every_ns: int, said: str) -> None:
    pools = (PoolConfig(role="mixed", each=ReplayConfig(num_pages=50)),)
    trace = Trace([TraceRequest(0, 0, bytes(8), 16, 2)], unit_tokens=16, name="one")
    with pytest.raises(ConfigError, match=said):
        replay(trace, FleetConfig(pools=pools, scaler=lambda: Told(targets, every_ns)))


def test_a_pool_keeps_a_worker_whatever_a_scaler_decides() -> None:
    pools = (PoolConfig(role="mixed", each=ReplayConfig(num_pages=50, replicas=3)),)
    trace = Trace([TraceRequest(0, 0, bytes(8), 16, 200)], unit_tokens=16, name="one")
    report = replay(trace, FleetConfig(pools=pools, scaler=lambda: Told({"mixed": 0}, S)))
    assert report.summary["num_completed"] == 1
    assert report.summary["fleet"]["pools"][0]["mean_workers"] < 2


@pytest.mark.slow
def test_a_fleet_costs_its_gpu_hours(asked: Callable[..., Any]) -> None:
    command = (
        "replay", "sample:mooncake", "--profile", "mocker", "--pages", 16384, "--page-size", 512, "--json",
        "--slo-ttft-ms", 5000, "--prefill", "replicas=1", "--decode", "replicas=1",
        "--set", "scaling.policy=script,30s=2:3",
    )  # fmt: skip
    report = asked(*command, "--set", "price.gpu_hour=prefill=2.5,decode=4")
    fleet, plain = report["fleet"], asked(*command)
    hours = [pool["gpu_hours"] for pool in fleet["pools"]]
    assert [pool["cost"] for pool in fleet["pools"]] == pytest.approx([2.5 * hours[0], 4 * hours[1]])
    assert fleet["cost"] == pytest.approx(2.5 * hours[0] + 4 * hours[1])
    num_good = report["goodput"]["ratio"] * report["num_completed"]
    assert fleet["cost_per_thousand_good"] == pytest.approx(fleet["cost"] / num_good * 1000)
    assert fleet["cost_per_million_output_tokens"] == pytest.approx(fleet["cost"] / report["num_output_tokens"] * 1e6)
    assert "cost" not in plain["fleet"] and "cost" not in plain["fleet"]["pools"][0]
    assert asked(*command, "--set", "price.gpu_hour=2")["fleet"]["cost"] == pytest.approx(2 * sum(hours))


def test_replicas_of_one_kind_have_a_cost_too(asked: Callable[..., Any]) -> None:
    base = ("replay", "sample:mooncake", "--profile", "mocker", "--pages", 16384, "--page-size", 512, "--json")
    priced, plain = (asked(*base, "--replicas", 2, *more) for more in (("--set", "price.gpu_hour=3"), ()))
    assert priced["ttft_ms"] == plain["ttft_ms"]
    assert priced["fleet"]["cost"] == pytest.approx(3 * 2 * plain["duration_ms"] / 3.6e6)


@pytest.mark.parametrize(
    ("price", "said"),
    [
        ("", "is not a price"),
        ("two", "is not a price"),
        ("nan", "at least 0"),
        ("-1", "at least 0"),
        ("1e300", "at most"),
        ("=3", "not the price of one pool"),
        ("prefill=2", "no price for decode"),
        ("prefill=2,decode=3,mixed=4", "a price for mixed"),
        ("prefill=2,prefill=3", "not the price of one pool"),
        ("2,prefill=3", "Keep one of them"),
    ],
)
def test_what_is_no_price_is_refused(price: str, said: str, kvarts: Callable[..., tuple[int, str, str]]) -> None:
    pools = ("--prefill", "replicas=1", "--decode", "replicas=1")
    code, _, told = kvarts("replay", "sample:mooncake", "--pages", 900, *pools, "--set", f"price.gpu_hour={price}")
    assert (code, "--set price.gpu_hour" in told, said in told) == (2, True, True), told


def test_the_busy_share_of_a_fleet_counts_the_workers_that_a_scaler_adds() -> None:
    rows = [Row(10 * index, [index], 1, 60, None, 0, None) for index in range(40)]
    case = Case(rows, 1, 16, 400, 64, 1, "default", 1)
    scaler = partial(parse_scaler, "queue,target=1,every=0.1s,stable=0s,most=4")
    config = FleetConfig(pools=(PoolConfig(role="mixed", each=case.config()),), scaler=scaler)
    summary = replay(case.trace(), config).summary
    (pool,) = summary["fleet"]["pools"]
    assert pool["mean_workers"] > 1.5
    assert summary["busy_pct"] == pytest.approx(pool["busy_pct"]) and summary["busy_pct"] <= 1

"""Scripts of faults, and what `kvarts replay` says of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.base.errors import ConfigError
from kvarts.sim.fleet.config import FleetConfig, PoolConfig
from kvarts.sim.fleet.faults import Fault, parse_faults
from kvarts.sim.replaying import replay

from builders.case import Case, cases
from builders.fleet import FleetCase, fault, fleets

S = 1_000_000_000
SMALL = ("--pages", 16384, "--page-size", 512, "--profile", "mocker", "--json")


def test_a_script_says_what_fails_and_when() -> None:
    assert parse_faults("down:1=60s-1m30s, slow:2:10=30s-50s\ncut:0=0.5s") == (
        Fault("down", 1, 60 * S, 90 * S),
        Fault("slow", 2, 30 * S, 50 * S, 10),
        Fault("cut", 0, S // 2, None),
    )


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("", "has no fault"),
        ("up:1=60s", "is not a fault"),
        ("down=60s", "is not a fault"),
        ("down:1:3=60s", "is not a fault"),
        ("slow:1=60s", "is not a fault"),
        ("slow:1:1=60s", "slower"),
        ("down:1=60s-30s", "ends before"),
        ("down:1=soon", "duration"),
        ("down:1=10s-30s,down:1=20s", "overlap"),
        ("down:1=10s,down:1=20s", "overlap"),
    ],
)
def test_what_is_no_script_is_refused(script: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_faults(script)
    assert said in f"{caught.value.what} {caught.value.hint}"


def test_requests_of_a_worker_that_goes_down_go_on_elsewhere(asked: Callable[..., Any]) -> None:
    report = asked(
        "replay", "sample:mooncake", *SMALL, "--prefill", "replicas=2", "--decode", "replicas=2",
        "--transfer", "rate=5GB/s", "--transfer", "token_bytes=131072",
        "--set", "faults.script=down:3=100s-150s,cut:0=200s-210s,slow:1:20=300s,down:0=250s",
    )  # fmt: skip
    faults = report["fleet"]["faults"]
    assert report["num_completed"] == 1000
    assert faults["num_faults"] == 4
    assert faults["num_restarted"] > faults["num_failed_transfers"] > 0
    assert faults["recomputed_tokens"] > 0


def test_replicas_fail_as_workers_of_a_fleet_do(asked: Callable[..., Any]) -> None:
    report = asked("replay", "sample:mooncake", *SMALL, "--replicas", 3, "--set", "faults.script=down:1=100s-150s")
    assert report["num_completed"] == 1000
    assert report["fleet"]["faults"]["num_restarted"] > 0
    assert [pool["role"] for pool in report["fleet"]["pools"]] == ["mixed"]


def test_a_scaler_brings_a_worker_for_the_last_one_that_fails(asked: Callable[..., Any]) -> None:
    options = ("replay", "sample:mooncake", *SMALL, "--replicas", 1, "--set", "faults.script=down:0=100s")
    alone = asked(*options)
    assert alone["num_failed"] == alone["num_requests"] - alone["num_completed"] > 0
    report = asked(*options, "--set", "scaling.policy=queue,target=4,every=30s", "--set", "scaling.startup_s=10")
    assert report["num_completed"] == 1000


def test_a_fault_of_a_worker_that_is_not_there_is_refused(
    run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("replay", "sample:mooncake", "--replicas", 2, "--set", "faults.script=down:2=1s") == 2
    assert "--set faults.script" in (said := capsys.readouterr().err)
    assert "workers 0 to 1" in said
    assert run_command("replay", "sample:mooncake", "--replicas", 2, "--set", "faults.script=cut:1=1s") == 2
    assert "mixed workers send nothing" in capsys.readouterr().err


@pytest.mark.laws
@given(fleets(profile="default", faults=True))
def test_every_request_ends_or_is_reported(case: FleetCase) -> None:
    """L14: what fails is computed again, and a request fails only where no worker comes up any more."""
    report = replay(case.case.trace(), case.config())
    summary = report.summary
    assert summary["num_completed"] + summary["num_rejected"] + summary["num_failed"] == len(case.case.rows)
    reasons = {reason for reason in report.requests["reason"] if reason is not None and "was up" in reason}
    down = {each.worker for each in case.faults if each.kind == "down" and each.end_ns is None}
    prefills, decodes = range(case.num_prefills), range(case.num_prefills, case.num_prefills + case.num_decodes)
    if not (down.issuperset(prefills) or down.issuperset(decodes)):
        assert summary["num_failed"] == 0
        assert not reasons
    for output, row in zip(report.requests["output_tokens"], case.case.rows, strict=True):
        assert output == row.num_output_tokens


@pytest.mark.laws
@given(cases(max_requests=20, cancels=True), st.lists(fault(2), max_size=2, unique_by=lambda each: each.worker))
def test_mixed_workers_that_fail_lose_no_request(case: Case, faults: list[Fault]) -> None:
    """L14 and L5, in a pool of workers that do both; laws L1 to L3 of each are checked after each of its steps."""
    fast, slow = (
        replay(
            case.trace(),
            FleetConfig(
                pools=(PoolConfig(role="mixed", each=case.config(audit=True, step_by_step=step_by_step)),),
                faults=tuple(each for each in faults if each.worker < case.replicas and each.kind == "down"),
            ),
        )
        for step_by_step in (False, True)
    )
    assert fast.requests_jsonl() == slow.requests_jsonl()
    assert fast.to_json() == slow.to_json()
    assert fast.summary["num_requests"] == len(case.rows)

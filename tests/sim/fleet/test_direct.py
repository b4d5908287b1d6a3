"""Requests that a client sends to workers, past the routers: prompts that are left at one and fetched by another."""

from __future__ import annotations

from typing import Any

import pytest

from kvarts.cost.polynomial import LinearCost
from kvarts.sim.config import ReplayConfig
from kvarts.sim.fleet.config import FleetConfig, PoolConfig
from kvarts.sim.fleet.faults import Fault
from kvarts.sim.fleet.replay import replay_fleet
from kvarts.sim.traffic.logs import RecordedRow, recorded_trace

MS = 1_000_000
PROMPT = list(range(21))
"""Five full pages and a token. Computed in one step of 10 ms; sent in 7 ms + 21 tokens x 10 bytes at 10 kB/s."""
SENT_NS = (7 + 21) * MS


def replayed(rows: list[RecordedRow], **settings: Any) -> dict[str, Any]:
    """What became of the requests, on two workers for prompts and two that generate."""
    each: dict[str, Any] = {
        "num_pages": 40,
        "page_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "audit": True,
    }
    cost = LinearCost(step_ms=10.0)
    pools = (
        PoolConfig(role="prefill", each=ReplayConfig(replicas=2, cost=cost, **each)),
        PoolConfig(role="decode", each=ReplayConfig(replicas=2, cost=cost, **each)),
    )
    config = FleetConfig(pools=pools, bytes_per_s=1e4, token_bytes=10, latency_ms=7.0, **settings)
    report = replay_fleet(recorded_trace(rows, began_ns=0), config)
    reasons = [reason or "" for reason in report.requests["reason"]]
    return {"reason": reasons} | {name: column.tolist() for name, column in report.request_columns.items()}


def left(at_ms: int, worker: int = 1, prompt: list[int] = PROMPT) -> RecordedRow:
    return RecordedRow(arrival_ns=at_ms * MS, prompt=prompt, num_output_tokens=1, worker=worker, is_left=True)


def fetched(at_ms: int, of: int, worker: int = 3, prompt: list[int] = PROMPT, num_tokens: int = 4) -> RecordedRow:
    return RecordedRow(arrival_ns=at_ms * MS, prompt=prompt, num_output_tokens=num_tokens, worker=worker, fetches=of)


def test_a_prompt_is_held_until_it_is_fetched_over_the_link() -> None:
    found = replayed([left(0), fetched(100, 0)])
    assert found["source"] == [1, 1] and found["replica"] == [1, 3]
    assert found["held_ns"] == [10 * MS, 100 * MS] and found["first_token_ns"][0] == 10 * MS
    assert found["reserved_ns"] == [-1, 100 * MS]
    assert found["activated_ns"] == [-1, 100 * MS + SENT_NS]
    assert found["released_ns"][1] == 100 * MS + SENT_NS
    assert found["first_token_ns"][1] == 110 * MS + SENT_NS
    assert found["last_token_ns"][1] == 140 * MS + SENT_NS
    assert found["num_bytes"] == [0, 210]
    assert found["output_tokens"] == [1, 4]


def test_hits_count_for_the_request_that_had_them() -> None:
    found = replayed([left(0), fetched(100, 0), left(200), fetched(300, 2)])
    assert found["cached_tokens"] == [0, 0, 20, 0]


def test_it_is_released_if_it_is_not_fetched_in_time() -> None:
    found = replayed([left(0), fetched(51, 0)], hold_s=0.04)
    assert found["released_ns"][0] == 50 * MS
    assert (found["source"][1], found["replica"][1], found["held_ns"][1]) == (3, 3, -1)
    assert found["first_token_ns"][1] == 61 * MS  # it has computed the prompt


@pytest.mark.parametrize("prompt", [[*range(20), 99], list(range(20))])
def test_another_prompt_is_computed_and_the_held_one_released(prompt: list[int]) -> None:
    found = replayed([left(0), fetched(100, 0, prompt=prompt), fetched(200, 0)])
    assert found["released_ns"][0] == 100 * MS
    assert found["held_ns"][1:] == [-1, -1]
    assert found["first_token_ns"][1:] == [110 * MS, 210 * MS]


def test_the_worker_that_holds_a_prompt_computes_with_its_own_pages() -> None:
    found = replayed([left(0), fetched(100, 0, worker=1)])
    assert (found["source"][1], found["replica"][1]) == (1, 1)
    assert found["num_bytes"] == [0, 0] and found["first_token_ns"][1] == 110 * MS


def test_a_prompt_is_lost_with_its_worker() -> None:
    found = replayed([left(0), fetched(100, 0)], faults=(Fault("down", 1, 50 * MS, 60 * MS),))
    assert found["first_token_ns"][1] == 110 * MS and found["held_ns"][1] == -1


@pytest.mark.parametrize(("kind", "worker"), [("cut", 1), ("cut", 3), ("down", 1)])
def test_a_transfer_that_fails_lets_the_prompt_be_computed(kind: Any, worker: int) -> None:
    found = replayed([left(0), fetched(100, 0)], faults=(Fault(kind, worker, 110 * MS, 120 * MS),))
    assert found["first_token_ns"][1] == 120 * MS
    assert found["num_restarts"] == [0, 1] and found["output_tokens"] == [1, 4]


def test_workers_that_are_down_or_not_there_are_named() -> None:
    rows = [left(0, worker=7), fetched(10, 0, worker=2), left(100), fetched(120, 2, worker=2)]
    found = replayed(rows, faults=(Fault("down", 2, 5 * MS, 200 * MS),))
    assert found["reason"] == ["there is no worker 7", "worker 2 is down", "", "worker 2 is down"]
    assert found["released_ns"][2] > 0


def test_a_worker_for_prompts_generates_if_it_is_asked_to() -> None:
    rows = [RecordedRow(arrival_ns=0, prompt=PROMPT, num_output_tokens=5, worker=0)]
    found = replayed(rows)
    assert (found["source"], found["replica"], found["last_token_ns"]) == ([0], [0], [50 * MS])


def test_a_client_that_gives_up_frees_both_workers() -> None:
    rows = [left(0), fetched(100, 0), left(500), fetched(600, 2)]
    rows[1] = RecordedRow(
        arrival_ns=100 * MS, prompt=PROMPT, num_output_tokens=4, worker=3, fetches=0, cancel_after_ns=15 * MS
    )
    found = replayed(rows)
    assert found["status"][1] == 3 and found["released_ns"][1] == 115 * MS
    assert found["activated_ns"][3] == 600 * MS + SENT_NS

"""`dynamo-kv` against choices of NVIDIA Dynamo 1.6.1, which benchmarks/dynamo_router.py recorded.

Dynamo decides ties by chance and has no seed. So its choices are given, one by one: each must be as cheap as any other
worker at that moment, and then each request must have the times and the reuse that Dynamo reports.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvarts import ReplayConfig, load_trace, replay
from kvarts.policies import Routing
from kvarts.sim.routers.policies import policy_of
from kvarts.sim.routers.view import Asked, View

CASES = json.loads((Path(__file__).parent / "data" / "dynamo_kv.json").read_text())
OPTIONS = (
    "overlap_score_credit",
    "overlap_score_credit_decay",
    "prefill_load_scale",
    "decode_active_request_weight",
)


def name_of(case: dict[str, Any]) -> str:
    return "dynamo-kv:" + ",".join(f"{name}={case[name]}" for name in OPTIONS if name in case)


class Given:
    """A policy that makes given choices, and keeps what `dynamo-kv` says of them."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.policy: Any = policy_of(name_of(case).rstrip(":"))
        self.needs = self.policy.needs
        self.cached_tokens = self.policy.cached_tokens
        self.choices = [int(worker) for worker in case["choices"]]
        self.num_late = 0
        self.costlier: list[tuple[int, list[float]]] = []

    def choose(self, asked: Asked, view: View) -> int:
        worker = self.choices[asked.index]
        costs = self.policy.costs(asked, view)
        if costs[worker] > min(costs) + 1e-9:
            self.costlier.append((asked.index, costs))
        return worker


SEQUENCES = json.loads((Path(__file__).parent / "data" / "dynamo-kv-1.6.1.json").read_text())
"""Ten with requests one at a time, then ten with bursts, by benchmarks/named_routers.py."""


@pytest.mark.parametrize("sequence", SEQUENCES, ids=range(len(SEQUENCES)))
def test_choices_one_at_a_time_and_in_bursts_are_as_cheap_as_any(sequence: dict[str, Any], tmp_path: Path) -> None:
    made: list[Given] = []

    def make() -> Given:
        made.append(Given(sequence))
        return made[-1]

    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in sequence["rows"]))
    config = ReplayConfig(
        num_pages=2000, page_size=16, replicas=sequence["workers"], profile="mocker", router=make, max_num_seqs=64,
    )  # fmt: skip
    requests = replay(load_trace(path, trace_block_size=16), config).request_columns
    assert made[-1].costlier == []
    assert "".join(map(str, requests["replica"].tolist())) == sequence["choices"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['replicas']}x{case['pages']}-{name_of(case)[10:]}")
def test_each_choice_of_the_peer_is_as_cheap_as_any(case: dict[str, Any]) -> None:
    made: list[Given] = []

    def make() -> Given:
        made.append(Given(case))
        return made[-1]

    routing = Routing(queue_threshold=case.get("router_queue_threshold"))
    config = ReplayConfig(
        num_pages=case["pages"], page_size=case["page_size"], replicas=case["replicas"], profile="mocker", router=make,
        routing=routing,
    )  # fmt: skip
    requests = replay(load_trace("sample:mooncake"), config).request_columns
    assert made[-1].costlier == []
    assert "".join(map(str, requests["replica"].tolist())) == case["choices"]
    for field in ("first_token", "last_token"):
        total_us = sum(round(ns / 1000) for ns in requests[f"{field}_ns"].tolist())
        assert abs(total_us - case[f"{field}_us"]) <= len(requests["replica"])
    assert requests["cached_tokens"].sum() == case["reused_tokens"]

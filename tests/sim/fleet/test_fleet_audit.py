"""The second bookkeeping of workers that hand requests over: it agrees with true engines, and finds false ones."""

from __future__ import annotations

from inspect import isfunction
from typing import Any

import pytest

from kvarts.core.kv.page_cache import IncomingPages
from kvarts.core.sched.handoffs import Handoffs
from kvarts.cost.polynomial import LinearCost
from kvarts.sim.config import ReplayConfig
from kvarts.sim.fleet.config import FleetConfig, PoolConfig
from kvarts.sim.fleet.replay import replay_fleet
from kvarts.sim.traffic.logs import RecordedRow, recorded_trace

can_be_replaced = pytest.mark.skipif(
    not isfunction(IncomingPages.receive), reason="methods of a compiled class call each other directly"
)


def run(**settings: Any) -> Any:
    """Replay prompts that share pages, on two workers, with an audit."""
    each: dict[str, Any] = {
        "page_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 32, "cost": LinearCost(step_ms=1.0), "audit": True
    }  # fmt: skip
    pools = (
        PoolConfig(role="prefill", each=ReplayConfig(num_pages=40, **each, **settings)),
        PoolConfig(role="decode", each=ReplayConfig(num_pages=24, **each, **settings)),
    )
    config = FleetConfig(pools=pools, bytes_per_s=1e4, token_bytes=10)
    rows = [
        RecordedRow(arrival_ns=number * 3_000_000, prompt=[number % 3] * 20 + [number], num_output_tokens=12)
        for number in range(30)
    ]
    return replay_fleet(recorded_trace(rows), config)


def test_handoffs_agree_with_the_ledger() -> None:
    report = run()
    assert report.summary["num_completed"] == 30
    assert report.summary["fleet"]["pools"][1]["num_preemptions"] > 0


@can_be_replaced
def test_a_prompt_that_is_not_published_on_arrival_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = IncomingPages.receive
    monkeypatch.setattr(IncomingPages, "receive", lambda self, table, num: receive(self, table, num - 4))
    with pytest.raises(AssertionError, match="was stored and no event says so"):
        run()


@can_be_replaced
def test_shared_pages_of_a_reservation_that_are_not_told_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Handoffs._emit_begun
    monkeypatch.setattr(
        Handoffs, "_emit_begun", lambda self, emit, request, num_hit, now_ns: told(self, emit, request, 0, now_ns)
    )
    with pytest.raises(AssertionError, match="are resident"):
        run()

"""Tiers below workers that compute prompts, and below workers that generate: as the naive ones have them."""

from __future__ import annotations

from dataclasses import replace as with_values

import pytest
from hypothesis import given

from kvarts.core.tiers.config import OffloadConfig
from kvarts.sim.fleet.report import FleetReport
from kvarts.sim.replaying import replay

from builders.fleet import FleetCase, assert_as_naive, fleets
from builders.tiered import Tiered, naive_settings, tiers_below
from oracles.naive_fleet import NaiveFleet
from oracles.naive_fleet_tiers import NaiveTieredWorker


def naive_fleet(case: FleetCase, offload: OffloadConfig) -> tuple[NaiveFleet, list[NaiveTieredWorker]]:
    """Return the naive fleet of `case` with tiers below all its workers, and these, after all its requests."""
    of_decode = with_values(case.case, num_pages=case.decode_pages, max_num_seqs=case.decode_seqs)

    def workers(tiers: Tiered, count: int) -> list[NaiveTieredWorker]:
        settings = naive_settings(tiers)
        for name in ("profile", "long_prefill_token_threshold", "watermark"):
            del settings[name]
        return [NaiveTieredWorker(**settings) for _ in range(count)]

    prefills = workers(Tiered(case.case, offload), case.num_prefills)
    decodes = workers(Tiered(of_decode, offload), case.num_decodes)
    for worker in prefills + decodes:
        worker.all_names = prefills[0].all_names
    fleet = NaiveFleet(
        [*prefills],
        [*decodes],
        False,
        case.rate,
        round(case.latency_ms * 1e6),
        case.only_missing and not case.is_layer_wise,
        num_layers=case.num_layers if case.is_layer_wise else 0,
        least_remote=case.least_remote,
    )
    fleet.run(case.case.naive_requests())
    return fleet, prefills + decodes


@pytest.mark.laws
@given(fleets(profile="default"), tiers_below(sync_loads=True))
def test_prefill_and_decode_workers_and_their_tiers_are_as_the_naive_ones(
    case: FleetCase, offload: OffloadConfig
) -> None:
    """L1 to L4, L7, L8: every time of every request, and what each worker has loaded from each of its tiers."""
    case.queue = None
    naive, workers = naive_fleet(case, offload)
    report: FleetReport = replay(case.case.trace(), case.config(offload=offload))
    names = ("host", "disk") if offload.disk_pages else ("host",)
    assert_as_naive(case, naive, report, [handoff.request.seq for handoff in naive.handoffs])
    raw = report.request_columns
    for handoff in naive.handoffs:
        if handoff.outcome == "rejected":
            continue
        target = case.num_prefills + handoff.target
        below = [0] * len(names)
        for worker in (target,) if handoff.is_local else (handoff.source, target):
            loaded = workers[worker].below_tokens.get(handoff.decode.seq, [0] * len(names))
            below = [count + more for count, more in zip(below, loaded, strict=True)]
        assert [int(raw[f"{name}_tokens"][handoff.request.seq]) for name in names] == below

"""Several models on one device: whole random workloads against naive models, and what must hold of any."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts import replay
from kvarts.sim.config import ReplayConfig
from kvarts.sim.report.requests import REJECTED
from kvarts.sim.sharing.config import ModelShare, SharingConfig
from kvarts.sim.sharing.device import debts
from kvarts.sim.sharing.report import SharedReport

from builders.case import Case, Row, cases
from builders.guarantees import guarantees_kept
from builders.kept import Kept
from builders.laws import assert_steps_as_in_naive
from builders.outcome import timelines_json
from builders.pages import evicted_names
from oracles.naive_shared import NaiveDevice, NaiveLane, NaiveTenant, SeveralWaysError
from oracles.naive_slice import latest_behind

pytestmark = pytest.mark.laws


@dataclass
class Sharing:
    """Traffic of each model is that of a case; the device is this."""

    cases: list[Case]
    page_size: int
    page_bytes: list[int]
    guarantees: list[int]
    weights: list[int]
    floors: list[int]
    ceilings: list[int | None]
    num_bytes: int
    total_tokens: int
    max_num_seqs: int
    reclaim_after_s: float = 0.0

    def models(self) -> dict[str, ModelShare]:
        return {
            f"m{place}": ModelShare(
                cost="polynomial",
                kv_bytes_per_token=self.page_bytes[place] // self.page_size,
                weight=self.weights[place],
                floor=self.floors[place],
                ceiling=self.ceilings[place],
                guarantee=str(self.guarantees[place]) + "B",
            )
            for place in range(len(self.cases))
        }

    def config(
        self, models: dict[str, ModelShare] | None = None, *, static_split: bool = False, **changes: Any
    ) -> SharingConfig:
        each = ReplayConfig(
            page_size=self.page_size,
            max_num_batched_tokens=self.total_tokens,
            max_num_seqs=self.max_num_seqs,
            **changes,
        )
        return SharingConfig(
            models=models or self.models(),
            kv_memory=self.num_bytes,
            static_split=static_split,
            reclaim_after_s=self.reclaim_after_s,
            each=each,
        )

    def run(self, kept: list[Kept] | None = None, **changes: Any) -> SharedReport:
        traces = {f"m{place}": case.trace() for place, case in enumerate(self.cases)}
        observers_of = None if kept is None else lambda name: [kept[int(name[1:])]]
        report: SharedReport = replay(traces, self.config(**changes), observers_of=observers_of)
        return report


@st.composite
def sharings(draw: st.DrawFn, *, max_models: int = 3, max_requests: int = 12, cancels: bool = False) -> Sharing:
    count = draw(st.integers(1, max_models))
    page_size = draw(st.sampled_from([1, 2, 4]))
    of_models = [draw(cases(max_requests=max_requests, cancels=cancels)) for _ in range(count)]
    for case in of_models:
        case.profile, case.replicas, case.page_size = "default", 1, page_size
    page_bytes = [page_size * draw(st.sampled_from([1, 2, 3, 5])) for _ in of_models]
    most = max(
        -(-(row.num_prompt_tokens + row.num_output_tokens - 1) // page_size) * size
        for case, size in zip(of_models, page_bytes, strict=True)
        for row in case.rows
    )
    num_bytes = max(*page_bytes, most + draw(st.sampled_from([-1, 0, 1, 7, 30, 200])), 1)
    left = num_bytes
    guarantees = []
    for _ in of_models:
        guarantees.append(draw(st.sampled_from([0, left // 4, left // 2, left])))
        left -= guarantees[-1]
    total_tokens = draw(st.sampled_from([3, 4, 16, 64, 8192]))
    max_num_seqs = min(total_tokens, draw(st.sampled_from([1, 2, 4, 8])))
    floors_left = 1000
    floors, ceilings = [], []
    for _ in of_models:
        ceilings.append(draw(st.sampled_from([None, None, 600, 1000])) if count > 1 else None)
        floors.append(min(draw(st.sampled_from([0, 0, 100, 300])), floors_left))
        floors_left -= floors[-1]
    weights = [draw(st.sampled_from([1, 1, 2, 3, 19])) for _ in of_models]
    reclaim_after_s = draw(st.sampled_from([0.0, 0.02, 0.3, inf]))
    return Sharing(
        of_models,
        page_size,
        page_bytes,
        guarantees,
        weights,
        floors,
        ceilings,
        num_bytes,
        total_tokens,
        max_num_seqs,
        reclaim_after_s,
    )


@given(sharings())
def test_every_turn_and_every_eviction_is_as_in_the_naive_models(case: Sharing) -> None:
    """L4, L8: turns, who is evicted and who gives way, against a device that shares no code."""
    device = NaiveDevice(case.num_bytes, case.total_tokens, case.reclaim_after_s * 1e9)
    tenants = [
        NaiveTenant(
            device,
            page_bytes=case.page_bytes[place],
            guaranteed=case.guarantees[place],
            weight=case.weights[place],
            floor=case.floors[place],
            ceiling=case.ceilings[place],
            page_size=case.page_size,
            max_num_seqs=case.max_num_seqs,
        )
        for place in range(len(case.cases))
    ]
    traffic = [of_model.naive_requests() for of_model in case.cases]
    try:
        NaiveLane(device).run(traffic)
    except SeveralWaysError:
        return  # any of them is right
    kept = [Kept() for _ in tenants]
    report = case.run(kept, audit=True)
    for place, tenant in enumerate(tenants):
        of_model = report.reports[f"m{place}"]
        log = report.devices[0].logs[f"m{place}"]
        assert evicted_names(kept[place].events) == tenant.evicted
        preempted = [(p.victim, -1 if p.model else p.asker, p.num_computed_tokens) for _, p in log.preemptions]
        assert preempted == tenant.preempted
        assert_steps_as_in_naive(log, tenant)
        columns = of_model._request_log.columns
        for index, request in enumerate(traffic[place]):
            row = {name: int(column[index]) for name, column in columns.items()}
            if request.rejected:
                assert row["status"] == REJECTED
                continue
            assert row["first_token_ns"] == request.first_token_ns
            assert row["last_token_ns"] == request.last_token_ns
            assert row["cached_tokens"] == request.others_hit_tokens
            assert row["recomputed_tokens"] == request.recomputed_tokens
        assert report.summary["models"][f"m{place}"]["num_preemptions_for_others"] == tenant.num_given


def everything(report: SharedReport) -> list[bytes]:
    return [
        report.to_json(),
        report.loans_jsonl(),
        *(of_model.requests_jsonl() for of_model in report.reports.values()),
        *(text for of_model in report.reports.values() for text in timelines_json(of_model)),
    ]


@given(sharings(max_requests=30), st.booleans(), st.sampled_from(["default", "default", "mocker"]))
def test_fast_forward_equals_turn_by_turn(case: Sharing, is_static: bool, profile: str) -> None:
    """L5: the same bytes, whatever is looked at."""
    if is_static and min(case.guarantees) < max(case.page_bytes):
        is_static = False  # somebody could not hold a page
    fast, slow = (case.run(step_by_step=slowly, static_split=is_static, profile=profile) for slowly in (False, True))
    assert everything(fast) == everything(slow)


@given(sharings(max_requests=20, cancels=True), st.sampled_from([None, 0.02]), st.integers(0, 1))
def test_with_cancellations_fast_forward_equals_turn_by_turn(
    case: Sharing, timeout_s: float | None, retries: int
) -> None:
    """L1, L2, L5, L8: what one model's clients give up, others may take at once; at rest nothing is owed."""
    changes: dict[str, Any] = {
        "client_timeout_s": timeout_s,
        "retries": 0 if timeout_s is None else retries,
        "audit": True,
    }
    fast, slow = (case.run(step_by_step=slowly, **changes) for slowly in (False, True))
    assert everything(fast) == everything(slow)


@given(sharings())
def test_loans_over_time_are_what_is_owed_at_each_moment(case: Sharing) -> None:
    """The columns of the report against the function that a device asks, up to what rounding to bytes may move."""
    report = case.run()
    config = report.config
    times_ns, used = report.devices[0].used()
    _, owed = report.devices[0].debts
    assert used.sum(axis=0).max() <= config.kv_bytes, "no more is used than there is"
    guaranteed = np.array(list(config.guaranteed_bytes.values()))[:, None]
    unused = np.maximum(guaranteed - used, 0).sum(axis=0)
    assert (sum(owed.values(), np.zeros(len(times_ns))) <= unused + 1e-6 * config.kv_bytes).all(), (
        "what is lent is not used"
    )
    for place in range(len(times_ns)):
        mine = {pair: num_bytes[place] for pair, num_bytes in owed.items() if num_bytes[place]}
        theirs = debts(
            config.kv_bytes, config.guaranteed_bytes, dict(zip(config.models, used[:, place].tolist(), strict=True))
        )
        for pair in {*mine, *theirs}:
            assert abs(mine.get(pair, 0) - theirs.get(pair, 0)) <= 1


def test_what_is_left_of_a_page_is_enough_for_a_guarantee() -> None:
    """Reserved bytes were rounded up to pages of the model that asked, and no model was ever admitted."""
    of_models = [
        Case([Row(0, [0], 1, 1, None, 0, None)], 1, 4, 1, 4, 1, "default", 1),
        Case([Row(0, [0], 1, 1, None, 0, None)], 1, 4, 1, 4, 1, "default", 1),
    ]
    case = Sharing(of_models, 4, [4, 4], [0, 1], [1, 1], [0, 0], [None, None], 7, 3, 1)
    assert case.run().summary["device"]["num_completed"] == 2


@given(sharings(max_requests=30))
def test_a_model_within_its_guarantee_waits_no_longer_than_said(case: Sharing) -> None:
    """L13: unless what holds it is more important. What runs within its guarantee never loses its pages to borrowers.

    Nor does a model wait beyond its guarantee while enough is free and no other model has work.
    """
    with guarantees_kept(case.reclaim_after_s):
        case.run(step_by_step=True)


@given(sharings(), st.booleans(), st.booleans())
def test_no_step_starts_later_than_in_the_slice_plus_one_step_of_each_other_model(
    case: Sharing, is_equal: bool, step_by_step: bool
) -> None:
    """The promise of docs/decisions/0019, from the events of a replay.

    The first model is guaranteed the memory of all its requests together, and nobody has more important ones: it can
    compute from the arrival of each to its end, whatever the others borrow. Of the others, while a request runs that is
    never preempted.
    """
    need = [
        sum(-(-(row.num_prompt_tokens + row.num_output_tokens) // case.page_size) for row in of_model.rows) * page_bytes
        for of_model, page_bytes in zip(case.cases, case.page_bytes, strict=True)
    ]
    case.num_bytes += need[0] + sum(case.guarantees[1:])
    case.guarantees[0], case.reclaim_after_s = need[0], 0.0
    models = case.models()
    if is_equal:
        for row in (row for of_model in case.cases for row in of_model.rows):
            row.priority = 0
    else:
        models["m0"] = msgspec.structs.replace(models["m0"], priority=10)
    report = case.run(models=models, step_by_step=step_by_step)
    logs = report.devices[0].logs
    longest = {name: max(log.durations_ns.tolist(), default=0) for name, log in logs.items()}
    shares = list(case.config(models).shares.values())
    for place, (name, log) in enumerate(logs.items()):
        rows = report.reports[name]._request_log.columns
        kept = rows["status"] != REJECTED
        assert place or kept.all()
        kept &= (rows["preemptions"] == 0) | (place == 0)
        since = rows["first_admitted_ns" if place else "arrival_ns"][kept].tolist()
        busy = list(zip(since, rows["last_token_ns"][kept].tolist(), strict=True))
        steps = list(zip(log.starts_ns.tolist(), log.durations_ns.tolist(), strict=True))
        assert latest_behind(steps, busy, shares[place]) <= sum(longest.values()) - longest[name]


@given(sharings(max_models=1))
def test_a_model_alone_is_as_well_off_as_in_its_split_and_on_its_slice(case: Sharing) -> None:
    """All three are the same replay."""
    case.guarantees = [case.num_bytes]
    config = msgspec.structs.replace(case.config(), baselines=True)
    report = replay({"m0": case.cases[0].trace()}, config)
    for found in report.summary["models"]["m0"]["beside"].values():
        assert set(found.get("ratio", {}).values()) <= {1.0, None}
        assert found["num_compared"] == report.summary["models"]["m0"]["num_completed"]


@given(sharings(), st.booleans())
def test_at_rest_nobody_owes_anything(case: Sharing, is_static: bool) -> None:
    """L1, L2 for every model and the device after every step; loans end with what was run on them."""
    if is_static and min(case.guarantees) < max(case.page_bytes):
        is_static = False
    report = case.run(audit=True, static_split=is_static)
    for name, log in report.devices[0].logs.items():
        rests = log.rests
        if len(log):
            assert len(rests["step"]) and rests["used"].max() == 0
        used = log.used() * report.config.page_bytes[name]
        assert not len(used) or used.max() <= (case.guarantees[int(name[1:])] if is_static else case.num_bytes)
    last_ms = max((period.until_ms for period in report.loans), default=0.0)
    assert last_ms <= report.summary["device"]["duration_ms"] + 1e-6
    assert not (is_static and report.loans)
    for pair in {(period.lender, period.borrower) for period in report.loans}:
        times = [
            (period.since_ms, period.until_ms) for period in report.loans if (period.lender, period.borrower) == pair
        ]
        assert all(until < since for (_, until), (since, _) in pairwise(times)) or len(times) == 1


@given(sharings(max_models=1), st.integers(0, 1))
def test_models_without_traffic_change_nothing(case: Sharing, place: int) -> None:
    """Wherever they are registered, and whatever their weight. Of several with traffic, the shares are others."""
    alone = case.run()
    idle = Case([], 1, case.page_size, 1, 1, 1, "default", 1)
    others = list(case.models().items())
    model = ModelShare(cost="polynomial", kv_bytes_per_token=1, weight=3.0, guarantee="0B")
    config = case.config(dict([*others[:place], ("idle", model), *others[place:]]))
    traces = {f"m{number}": of_model.trace() for number, of_model in enumerate(case.cases)}
    beside = replay({**traces, "idle": idle.trace()}, config)
    for name, of_model in alone.reports.items():
        assert of_model.requests_jsonl() == beside.reports[name].requests_jsonl()
        assert timelines_json(of_model) == timelines_json(beside.reports[name])


@given(sharings(max_models=2), st.sampled_from(["default", "default", "mocker"]))
def test_a_model_alone_runs_as_it_would_without_a_device_to_share(case: Sharing, profile: str) -> None:
    """One model with all of the memory and all of the tokens is a replay of one."""
    of_model = case.cases[0]
    case = Sharing([of_model], case.page_size, case.page_bytes[:1], [0], [1], [0], [None], case.num_bytes,
                   case.total_tokens, case.max_num_seqs)  # fmt: skip
    shared = case.run(profile=profile)
    report = shared.reports["m0"]
    alone = replay(of_model.trace(), shared.config.configs["m0"])
    assert report.requests_jsonl() == alone.requests_jsonl()
    assert report.summary == alone.summary
    assert not shared.devices[0].logs["m0"].withheld().any()
    for name, column in alone.steps.items():
        assert report.steps[name].tolist() == column.tolist(), name


@given(sharings(max_models=3))
def test_everybody_ends(case: Sharing) -> None:
    """L7, L8: every request that fits the device ends, and every token is counted once."""
    report = case.run()
    for name, of_model in report.reports.items():
        summary = of_model.summary
        assert summary["num_failed"] == 0
        rows = of_model._request_log.columns
        done = rows["status"] == 0
        needed = (rows["input_tokens"] + rows["output_tokens"] - 1 - rows["cached_tokens"] + rows["recomputed_tokens"])[
            done
        ]
        assert report.devices[0].logs[name].columns["tokens"].sum() == needed.sum()

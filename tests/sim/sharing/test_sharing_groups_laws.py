"""Models with KV groups on one device: whole random workloads against naive models, and what must hold of any."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts import replay
from kvarts.core.config import StateMode
from kvarts.core.kv.groups import PartGroup, with_states
from kvarts.core.kv.layers import KvLayer
from kvarts.sim.config import ReplayConfig
from kvarts.sim.report.requests import REJECTED
from kvarts.sim.sharing.config import ModelShare, SharingConfig
from kvarts.sim.sharing.report import SharedReport

from builders.case import Case, Row, cases
from builders.grouped import FULL, part_groups
from builders.guarantees import guarantees_kept
from builders.kept import Kept
from builders.outcome import timelines_json
from oracles.naive import NaiveRequest
from oracles.naive_shared import NaiveDevice, NaiveLane, NaiveTenant, SeveralWaysError
from oracles.naive_shared_groups import NaiveGroupTenant

pytestmark = pytest.mark.laws


@dataclass
class OneOf:
    """One of the models. `groups`: none where memory is counted in whole pages of `page_bytes`."""

    case: Case
    groups: tuple[PartGroup, ...]
    keeps: str
    page_bytes: int
    guarantee: int = 0
    weight: int = 1
    floor: int = 0
    ceiling: int | None = None
    mode: StateMode = "snapshots"

    @property
    def kept(self) -> tuple[PartGroup, ...]:
        return with_states(self.groups, self.mode)

    @property
    def whole_page(self) -> int:
        return sum(group.part_bytes for group in self.kept if not group.is_state) or self.page_bytes

    @property
    def most(self) -> int:
        """Bytes in which every request fits, more or less."""
        page_size = self.case.page_size
        pages = max(
            (-(-(row.num_prompt_tokens + row.num_output_tokens - 1) // page_size) for row in self.case.rows), default=1
        )
        return pages * self.whole_page + 2 * sum(group.part_bytes for group in self.kept if group.is_state)

    def share(self) -> ModelShare:
        return ModelShare(
            cost="polynomial",
            kv_bytes_per_token=None if self.groups else self.page_bytes // self.case.page_size,
            weight=self.weight,
            floor=self.floor,
            ceiling=self.ceiling,
            guarantee=f"{self.guarantee}B",
            kv_groups=self.keeps if self.groups else "off",  # type: ignore[arg-type]
            groups=self.groups,
            mamba_cache_mode=self.mode,
        )


@dataclass
class Device:
    models: list[OneOf]
    num_bytes: int
    total_tokens: int
    max_num_seqs: int
    reclaim_after_s: float = 0.0

    @property
    def traces(self) -> dict[str, Any]:
        return {f"m{place}": model.case.trace() for place, model in enumerate(self.models)}

    def config(self, *, static_split: bool = False, **changes: Any) -> SharingConfig:
        each = ReplayConfig(
            page_size=self.models[0].case.page_size,
            max_num_batched_tokens=self.total_tokens,
            max_num_seqs=self.max_num_seqs,
            **changes,
        )
        return SharingConfig(
            models={f"m{place}": model.share() for place, model in enumerate(self.models)},
            kv_memory=self.num_bytes,
            static_split=static_split,
            reclaim_after_s=self.reclaim_after_s,
            each=each,
        )

    def run(self, **changes: Any) -> SharedReport:
        report: SharedReport = replay(self.traces, self.config(**changes))
        return report

    @property
    def can_be_split(self) -> bool:
        return all(model.guarantee >= model.whole_page for model in self.models)


@st.composite
def devices(
    draw: st.DrawFn,
    *,
    max_models: int = 3,
    max_requests: int = 10,
    all_grouped: bool = False,
    modes: tuple[StateMode, ...] = get_args(StateMode),
) -> Device:
    count = draw(st.integers(1, max_models))
    page_size = draw(st.sampled_from([1, 2, 4]))
    models = []
    for place in range(count):
        case = draw(cases(max_requests=max_requests))
        case.profile, case.replicas, case.page_size = "default", 1, page_size
        has_groups = all_grouped or place == 0 or draw(st.booleans())
        groups = draw(part_groups()) if has_groups else ()
        page_bytes = page_size * draw(st.sampled_from([1, 2, 3, 5]))
        model = OneOf(case, groups, draw(st.sampled_from(["all", "tails"])), page_bytes)
        if any(group.is_state for group in groups):
            model.mode = draw(st.sampled_from(modes))
        models.append(model)
    most = max(model.most for model in models)
    num_bytes = most * draw(st.sampled_from([2, 3, 4, 4, 5, 8])) // 4 + draw(st.integers(0, 7))
    num_bytes = max(num_bytes, *(model.whole_page for model in models), 1)
    left, floors_left = num_bytes, 1000
    for model in models:
        model.guarantee = draw(st.sampled_from([0, left // 4, left // 2, left]))
        left -= model.guarantee
        model.weight = draw(st.sampled_from([1, 1, 2, 3, 19]))
        model.ceiling = draw(st.sampled_from([None, None, 600, 1000])) if count > 1 else None
        model.floor = min(draw(st.sampled_from([0, 0, 100, 300])), floors_left)
        floors_left -= model.floor
    total_tokens = draw(st.sampled_from([3, 4, 16, 64, 8192]))
    return Device(
        models,
        num_bytes,
        total_tokens,
        min(total_tokens, draw(st.sampled_from([1, 2, 4, 8]))),
        draw(st.sampled_from([0.0, 0.02, 0.3, inf])),
    )


def naive_tenant(device: NaiveDevice, model: OneOf, max_num_seqs: int) -> NaiveTenant:
    settings: dict[str, Any] = {
        "guaranteed": model.guarantee,
        "weight": model.weight,
        "floor": model.floor,
        "ceiling": model.ceiling,
        "page_size": model.case.page_size,
        "max_num_seqs": max_num_seqs,
    }
    if not model.groups:
        return NaiveTenant(device, page_bytes=model.page_bytes, **settings)
    groups = [(group.layer, group.part_bytes) for group in model.kept]
    return NaiveGroupTenant(device, groups, keeps_all=model.keeps == "all", **settings)


def assert_as_naive(report: SharedReport, name: str, tenant: NaiveTenant, requests: list[NaiveRequest]) -> None:
    of_model, log = report.reports[name], report.devices[0].logs[name]
    steps = {**log.columns, "released": log.released()}
    for column in ("start_ns", "duration_ns", "running", "waiting", "preempted", "tokens"):
        assert steps[column].tolist() == [getattr(step, column) for step in tenant.steps], column
    # The naive model with groups counts bytes of it, the other whole pages.
    unit = tenant.page_bytes if isinstance(tenant, NaiveGroupTenant) else 1
    for column in ("used", "cached", "released"):
        assert (steps[column] * unit).tolist() == [getattr(step, column) for step in tenant.steps], column
    if isinstance(tenant, NaiveGroupTenant):
        for place, column in enumerate(log.group_fields):
            assert steps[column].tolist() == [counts[place] for counts in tenant.counts], column
        evicted = [0] * len(tenant.layers)
        for group, _ in tenant.groups.evicted:
            evicted[group] += 1
        assert [group["num_evicted_parts"] for group in of_model.summary["kv_groups"]] == evicted
    else:
        assert of_model.summary["num_evicted_pages"] >= len(tenant.evicted)
    preempted = [(p.victim, -1 if p.model else p.asker, p.num_computed_tokens) for _, p in log.preemptions]
    assert preempted == tenant.preempted
    columns = of_model._request_log.columns
    for index, request in enumerate(requests):
        row = {field: int(column[index]) for field, column in columns.items()}
        assert (row["status"] == REJECTED) == request.rejected
        if not request.rejected:
            assert row["first_token_ns"] == request.first_token_ns
            assert row["last_token_ns"] == request.last_token_ns
            assert row["cached_tokens"] == request.others_hit_tokens
            assert row["recomputed_tokens"] == request.recomputed_tokens
    assert report.summary["models"][name]["num_preemptions_for_others"] == tenant.num_given


@given(devices(modes=("snapshots", "all")))
def test_every_turn_and_every_part_is_as_in_the_naive_models(case: Device) -> None:
    """L4, L8: turns, what is evicted of whom and who gives way, against a device that shares no code."""
    assert_as_in_naive(case)


def assert_as_in_naive(case: Device) -> None:
    device = NaiveDevice(case.num_bytes, case.total_tokens, case.reclaim_after_s * 1e9)
    tenants = [naive_tenant(device, model, case.max_num_seqs) for model in case.models]
    traffic = [model.case.naive_requests() for model in case.models]
    try:
        NaiveLane(device).run(traffic)
    except SeveralWaysError:
        return  # any of them is right
    report = case.run(audit=True)
    for place, (tenant, requests) in enumerate(zip(tenants, traffic, strict=True)):
        assert_as_naive(report, f"m{place}", tenant, requests)


@given(devices(max_models=1))
def test_a_model_alone_runs_as_it_would_without_a_device_to_share(case: Device) -> None:
    """With all of the memory, which is a whole number of its pages, and all of the tokens: a replay of one."""
    (model,) = case.models
    case.num_bytes -= case.num_bytes % model.whole_page
    model.guarantee, model.floor, model.ceiling = 0, 0, None
    shared = case.run(audit=True)
    report = shared.reports["m0"]
    alone = replay(model.case.trace(), shared.config.configs["m0"])
    assert report.requests_jsonl() == alone.requests_jsonl()
    assert report.summary == alone.summary
    assert not shared.devices[0].logs["m0"].withheld().any()
    for name, column in alone.steps.items():
        assert report.steps[name].tolist() == column.tolist(), name


@given(devices(max_models=1), st.integers(0, 1), st.booleans())
def test_models_without_traffic_change_nothing(case: Device, place: int, is_grouped: bool) -> None:
    alone = case.run()
    idle = Case([], 1, case.models[0].case.page_size, 1, 1, 1, "default", 1)
    is_grouped = is_grouped or case.num_bytes < idle.page_size  # too little for a page
    groups = (PartGroup(FULL, 1),) if is_grouped else ()
    models = {f"m{number}": model.share() for number, model in enumerate(case.models)}
    names = list(models)
    names.insert(place, "idle")
    models["idle"] = OneOf(idle, groups, "all", idle.page_size, weight=3).share()
    config = msgspec.structs.replace(case.config(), models={name: models[name] for name in names})
    beside = replay({**case.traces, "idle": idle.trace()}, config)
    for name, of_model in alone.reports.items():
        assert of_model.requests_jsonl() == beside.reports[name].requests_jsonl()
        assert timelines_json(of_model) == timelines_json(beside.reports[name])


@given(devices(max_requests=20))
def test_a_model_within_its_guarantee_waits_no_longer_than_said(case: Device) -> None:
    """L13: unless what holds it is more important. What runs within its guarantee loses no parts to borrowers."""
    with guarantees_kept(case.reclaim_after_s):
        case.run()


@given(devices(), st.booleans())
def test_what_is_told_in_detail_is_the_same(case: Device, is_static: bool) -> None:
    """Where something reads page events, parts are accounted for one by one."""
    is_static = is_static and case.can_be_split
    plain = case.run(static_split=is_static)
    kept = [Kept() for _ in case.models]
    config = case.config(static_split=is_static, audit=True)
    told = replay(case.traces, config, observers_of=lambda name: [kept[int(name[1:])]])
    assert plain.to_json() == told.to_json()
    assert plain.loans_jsonl() == told.loans_jsonl()
    for name, of_model in plain.reports.items():
        assert of_model.requests_jsonl() == told.reports[name].requests_jsonl()
        assert timelines_json(of_model) == timelines_json(told.reports[name])
    assert all(each.events for each in kept)


@given(devices(), st.booleans())
def test_at_rest_nobody_owes_anything(case: Device, is_static: bool) -> None:
    """L1, L2 for every model and the device after every step; L7, L8; no more is used than there is."""
    is_static = is_static and case.can_be_split
    report = case.run(audit=True, static_split=is_static)
    config = report.config
    _, used = report.devices[0].used()
    if not is_static:
        assert used.sum(axis=0).max() <= case.num_bytes
    for place, (name, log) in enumerate(report.devices[0].logs.items()):
        if len(log):
            assert log.rests["used"].max() == 0
        most = case.models[place].guarantee if is_static else case.num_bytes
        assert not len(log) or log.used().max() * config.counted_bytes[name] <= most
        rows = report.reports[name]._request_log.columns
        assert report.reports[name].summary["num_failed"] == 0
        done = rows["status"] == 0
        needed = rows["input_tokens"] + rows["output_tokens"] - 1 - rows["cached_tokens"] + rows["recomputed_tokens"]
        assert log.columns["tokens"].sum() == needed[done].sum()
    last_ms = max((period.until_ms for period in report.loans), default=0.0)
    assert last_ms <= report.summary["device"]["duration_ms"] + 1e-6
    assert not (is_static and report.loans)


def test_a_run_without_parts_is_forgotten_when_ages_are_compared() -> None:
    """It was taken off the list of what is evicted next, and stayed where prefixes are looked up."""
    first = Case([Row(249, [0, 2], 2, 1, None, 1, None)], 1, 2, 54, 4, 2, "default", 1)
    rows = [
        Row(0, [0, 0, 1], 9, 12, None, 0, None),
        Row(7, [0, 0, 1, 2], 15, 2, None, 0, "a"),
        Row(8, [2, 2, 2, 2, 0], 20, 22, None, 0, None),
    ]
    second = Case(rows, 4, 2, 7, 4, 4, "default", 1)
    sink = [KvLayer(kind="window", num_heads=1, head_numbers=2, span=span, sink=1) for span in (3, 8, 2)]
    models = [
        OneOf(first, (PartGroup(FULL, 1), PartGroup(sink[0], 5)), "all", 2, 0, 3),
        OneOf(second, (PartGroup(FULL, 2), PartGroup(sink[1], 1), PartGroup(sink[2], 1)), "tails", 4, 14, 19, 300),
    ]
    assert_as_in_naive(Device(models, 117, 4, 4, 0.02))

"""Random KV groups, and a case with them through kvarts and through the naive engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import msgspec
from hypothesis import strategies as st

from kvarts.core.config import StateMode
from kvarts.core.content import UNIT_BYTES, Content
from kvarts.core.events import (
    CopiesRemoved,
    Event,
    LeapDone,
    PageEvent,
    PagesRemoved,
    StepDone,
    StepEnded,
    StepStarted,
)
from kvarts.core.kv.groups import STATE_SPAN, PartGroup
from kvarts.core.kv.layers import KvKind, KvLayer
from kvarts.sim.replaying import replay
from kvarts.sim.report.report import Report
from kvarts.sim.report.requests import CANCELLED, REJECTED

from builders.case import Case
from builders.fields import fields_of
from builders.outcome import timelines_json
from oracles.naive import NaiveRequest, polynomial_ns, run_naive
from oracles.naive_group_engine import NaiveGroupEngine

FULL = KvLayer(kind="full", num_heads=1, head_numbers=2)
WINDOW = PartGroup(KvLayer(kind="window", num_heads=1, head_numbers=2, span=6), 2)
STATES = (PartGroup(FULL, 2), PartGroup(KvLayer(kind="state", state_bytes=1), 3))
"""Layers that keep every token, and others with a state."""


@st.composite
def layers(
    draw: st.DrawFn, kind: KvKind, spans: st.SearchStrategy[int], sinks: list[int], *, by_page: bool = False
) -> KvLayer:
    """A layer of `kind`: with a span if it is bounded, and one of `sinks` if it is a window.

    `by_page`: states may be kept by page.
    """
    if kind == "state":
        return KvLayer(kind=kind, state_bytes=1, span=draw(st.sampled_from([None, STATE_SPAN])) if by_page else None)
    return KvLayer(
        kind=kind,
        num_heads=1,
        head_numbers=2,
        span=draw(spans) if kind in ("window", "chunk") else None,
        sink=draw(st.sampled_from(sinks)) if kind == "window" else 0,
    )


@st.composite
def part_groups(draw: st.DrawFn, *, by_page: bool = False) -> tuple[PartGroup, ...]:
    """One group that keeps all tokens, most often, and up to two that keep less. `by_page`: as of `layers`."""
    kinds: list[KvKind] = ["window", "window", "window", "chunk", "state", "latent"]
    groups = [PartGroup(FULL, draw(st.sampled_from([1, 2, 3])))] if draw(st.integers(0, 4)) else []
    for _ in range(draw(st.integers(0 if groups else 1, 2))):
        kind = draw(st.sampled_from(kinds))
        if kind == "state" and not groups:
            kind = "window"
        layer = draw(layers(kind, st.sampled_from([1, 2, 3, 4, 6, 8, 16]), [0, 0, 0, 1, 3], by_page=by_page))
        groups.append(PartGroup(layer, draw(st.sampled_from([1, 1, 2, 4, 5]))))
    return tuple(groups)


@st.composite
def group_settings(draw: st.DrawFn) -> dict[str, Any]:
    """Settings of replays with KV groups; layers with a state keep it at ends, or after pages."""
    settings: dict[str, Any] = {"kv_groups": draw(st.sampled_from(["all", "tails"])), "groups": draw(part_groups())}
    if any(group.is_state for group in settings["groups"]):
        settings["mamba_cache_mode"] = draw(st.sampled_from(get_args(StateMode)))
    return settings


def naive_settings(case: Case, groups: Sequence[PartGroup], keeps: str) -> dict[str, Any]:
    """Settings of a naive engine with KV groups for a case."""
    layers = [(group.layer, group.part_bytes) for group in groups]
    interval = settings_of_keeps(case, keeps).get("prefix_cache_retention_interval")
    retained = {} if interval is None else {"interval": interval}
    return {"groups": layers, "keeps_all": keeps != "tails", **retained, **case.sizes}


def settings_of_keeps(case: Case, keeps: str) -> dict[str, Any]:
    """Settings of a replay: `all`, `tails`, or a number of pages between parts that are retained."""
    if not keeps.isdecimal():
        return {"kv_groups": keeps}
    return {"kv_groups": "all", "prefix_cache_retention_interval": int(keeps) * case.page_size}


def naive_run(
    case: Case, groups: tuple[PartGroup, ...], keeps: str, snapshots: str = "ends"
) -> tuple[list[NaiveRequest], list[NaiveGroupEngine]]:
    requests = case.naive_requests()
    engines = [
        NaiveGroupEngine(
            **naive_settings(case, groups, keeps),
            at_branches=snapshots == "branches",
            cost=polynomial_ns,
            long_prefill_token_threshold=case.long_prefill_token_threshold,
            watermark=case.watermark,
        )
        for _ in range(case.replicas)
    ]
    run_naive(requests, engines)
    return requests, engines


class Told:
    """Keeps every event."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def observe(self, events: Sequence[Event]) -> None:
        self.events += events

    def plain(self) -> list[tuple[Any, ...]]:
        """The events as values that compare: contents by their requests."""
        return [(type(event), *[_plain(getattr(event, name)) for name in fields_of(event)]) for event in self.events]

    def happened(self) -> list[tuple[Any, ...]]:
        """The events but those of steps, with their steps and times, as values that compare.

        Those of pages are told page by page, each named by its tokens, if they are known, or else by its request: which
        of several equal contents an event names, and where its run of pages ends, says nothing of what happened.
        """
        plain: list[tuple[Any, ...]] = []
        step, time_ns = -1, 0
        for event in self.events:
            if isinstance(event, StepStarted):
                step, time_ns = event.step, event.start_ns
            elif isinstance(event, StepEnded):
                step, time_ns = event.step, event.end_ns
            elif isinstance(event, PageEvent):
                fields = msgspec.structs.asdict(event)
                content, start, end = (fields.pop(name) for name in ("content", "start_page", "end_page"))
                fields.pop("parent", None)
                pages = range(start, end)
                if isinstance(event, PagesRemoved | CopiesRemoved):
                    pages = pages[::-1]
                plain += [
                    (step, time_ns, type(event), _name(content, page), page, *map(_plain, fields.values()))
                    for page in pages
                ]
            elif not isinstance(event, StepDone | LeapDone):
                plain.append((step, time_ns, type(event), *[_plain(getattr(event, name)) for name in fields_of(event)]))
        return plain


def _name(content: Content, page: int) -> Any:
    """The tokens up to the end of a page, as far as they are known, or the request of its content."""
    if page >= content.num_known_pages:
        return content.owner
    num_units = -(-(page + 1) * content.page_size // content.unit_tokens)
    return bytes(content.units[: num_units * UNIT_BYTES]), content.salt


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value.owner if isinstance(value, Content) else value


def told_by(case: Case, groups: tuple[PartGroup, ...], keeps: str, **changes: Any) -> tuple[Report, list[Told]]:
    """A case through kvarts, and all that its engines told."""
    config = case.config(kv_groups=keeps, groups=groups, **changes)
    told = [Told() for _ in range(config.replicas)]
    return replay(case.trace(), config, observers_of=lambda replica: [told[replica]]), told


def assert_same_outcome(report: Report, other: Report) -> None:
    """To the byte: report, requests, steps and timelines."""
    assert report.to_json() == other.to_json()
    assert report.requests_jsonl() == other.requests_jsonl()
    assert timelines_json(report) == timelines_json(other)
    for name, column in report.steps.items():
        assert column.tobytes() == other.steps[name].tobytes(), name


def assert_grouped_as_in_naive(case: Case, groups: tuple[PartGroup, ...], keeps: str, snapshots: str = "ends") -> None:
    """Requests, steps, parts of every group at every step, and evictions."""
    requests, engines = naive_run(case, groups, keeps, snapshots)
    of_groups = {**settings_of_keeps(case, keeps), "groups": groups, "snapshots": snapshots}
    config = case.config(**of_groups)
    report = replay(case.trace(), config)
    block_bytes = config.memory.block_bytes
    columns = report.request_columns
    for index, request in enumerate(requests):
        row = {name: int(column[index]) for name, column in columns.items()}
        assert (row["status"] == REJECTED) == request.rejected
        assert (row["status"] == CANCELLED) == request.cancelled
        if request.rejected:
            continue
        for name in ("first_admitted_ns", "first_token_ns", "last_token_ns"):
            expected = getattr(request, name)
            is_unknown = expected is None or (name == "last_token_ns" and request.cancelled)
            assert row[name] == (-1 if is_unknown else expected), name
        assert row["cached_tokens"] == request.others_hit_tokens
        assert row["preemptions"] == request.preemptions
        assert row["recomputed_tokens"] == request.recomputed_tokens
    evicted = [0] * len(groups)
    for log, naive in zip(report.step_logs, engines, strict=True):
        steps = {**log.columns, "released": log.released()}
        for name in ("start_ns", "duration_ns", "running", "waiting", "preempted", "tokens"):
            assert steps[name].tolist() == [getattr(step, name) for step in naive.steps], name
        for name in ("used", "cached", "released"):
            assert (steps[name] * block_bytes).tolist() == [getattr(step, name) for step in naive.steps], name
        for place, name in enumerate(log.group_fields):
            assert steps[name].tolist() == [counts[place] for counts in naive.counts], name
        for group, _ in naive.groups.evicted:
            evicted[group] += 1
    assert [group["num_evicted_parts"] for group in report.summary["kv_groups"]] == evicted
    assert_same_outcome(report, replay(case.trace(), case.config(**of_groups, audit=True)))

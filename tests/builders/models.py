"""Builders: the same random traffic for the naive engine and for kvarts, and what both say about it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from kvarts.content import Content
from kvarts.events import Event, PagesRemoved, PagesStored, StepStarted
from kvarts.report.requests import REJECTED, RequestLog
from kvarts.report.steps import StepLog
from kvarts.sim.config import ReplayConfig
from kvarts.sim.driver import Driver
from kvarts.sim.replay import open_replica, replay
from kvarts.sim.replica import Replica
from kvarts.sim.router import RoundRobin
from kvarts.traffic.source import OpenLoop
from kvarts.traffic.trace import Trace, TraceRequest

from oracles.naive import NaiveEngine, NaiveRequest, polynomial_ns, run_naive

NS_PER_MS = 1_000_000


@dataclass
class Row:
    arrival_ms: int
    units: list[int]
    num_prompt_tokens: int
    num_output_tokens: int
    output: list[int] | None
    priority: int
    tenant: str | None


@dataclass
class Case:
    rows: list[Row]
    unit_tokens: int
    page_size: int
    num_pages: int
    max_num_batched_tokens: int
    max_num_seqs: int
    profile: str
    replicas: int

    def config(self, **changes: Any) -> ReplayConfig:
        values: dict[str, Any] = {
            "num_pages": self.num_pages,
            "page_size": self.page_size,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
            "profile": self.profile,
            "replicas": self.replicas,
        }
        return ReplayConfig(**{**values, **changes})

    def trace(self) -> Trace:
        has_output = any(row.output is not None for row in self.rows)
        return Trace(
            [
                TraceRequest(
                    index,
                    row.arrival_ms * NS_PER_MS,
                    array("Q", row.units).tobytes(),
                    row.num_prompt_tokens,
                    row.num_output_tokens,
                    output_units=None if row.output is None else array("Q", row.output).tobytes(),
                    priority=row.priority,
                    tenant=row.tenant,
                )
                for index, row in enumerate(self.rows)
            ],
            unit_tokens=self.unit_tokens,
            has_output_tokens=has_output,
        )

    def naive_requests(self) -> list[NaiveRequest]:
        return [
            NaiveRequest(
                index,
                row.arrival_ms * NS_PER_MS,
                tuple(unit for unit in row.units for _ in range(self.unit_tokens))[: row.num_prompt_tokens],
                row.num_output_tokens,
                None if row.output is None else tuple(row.output),
                row.priority,
                row.tenant,
                know_output=self.profile != "mocker",
            )
            for index, row in enumerate(self.rows)
        ]

    def naive(self) -> tuple[list[NaiveRequest], list[NaiveEngine]]:
        requests = self.naive_requests()
        engines = [
            NaiveEngine(
                num_pages=self.num_pages,
                page_size=self.page_size,
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_num_seqs=self.max_num_seqs,
                profile=self.profile,
                cost=polynomial_ns,
            )
            for _ in range(self.replicas)
        ]
        run_naive(requests, engines)
        return requests, engines


@st.composite
def cases(draw: st.DrawFn, *, max_requests: int = 24, outputs: bool = True) -> Case:
    """Small pools, few different tokens, shared prefixes: everything that makes pages meet."""
    unit_tokens = draw(st.sampled_from([1, 2, 4, 8]))
    page_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    known_outputs = outputs and unit_tokens == 1 and draw(st.booleans())
    prefixes = draw(st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=3))
    max_output = draw(st.sampled_from([1, 3, 12, 40]))
    rows = []
    arrival_ms = 0
    for _ in range(draw(st.integers(1, max_requests))):
        arrival_ms += draw(st.sampled_from([0, 0, 1, 7, 40, 200]))
        units = list(draw(st.sampled_from(prefixes))) + draw(st.lists(st.integers(0, 3), max_size=4))
        units = units or [0]
        num_prompt = len(units) * unit_tokens - draw(st.integers(0, unit_tokens - 1))
        num_output = draw(st.integers(1, max_output))
        output = None
        if known_outputs and draw(st.booleans()):
            output = draw(st.lists(st.integers(0, 1), min_size=num_output, max_size=num_output))
        rows.append(
            Row(
                arrival_ms,
                units,
                num_prompt,
                num_output,
                output,
                draw(st.sampled_from([0, 0, 0, 1, -1])),
                draw(st.sampled_from([None, None, None, "a"])),
            )
        )
    most = max(-(-(row.num_prompt_tokens + row.num_output_tokens - 1) // page_size) for row in rows)
    budget = draw(st.sampled_from([4, 16, 64, 8192]))
    first = rows[0].arrival_ms
    for row in rows:
        row.arrival_ms -= first
    return Case(
        rows,
        unit_tokens,
        page_size,
        max(1, most + draw(st.sampled_from([-1, 0, 0, 1, 3, 10, 50]))),
        budget,
        min(budget, draw(st.sampled_from([1, 2, 4, 8]))),
        draw(st.sampled_from(["default", "mocker"])),
        draw(st.sampled_from([1, 1, 1, 2])),
    )


class Kept:
    """Keeps every event."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def observe(self, events: Sequence[Event]) -> None:
        self.events += events


@dataclass
class Outcome:
    requests: RequestLog
    engines: list[Replica]
    steps: list[StepLog]
    events: list[list[Event]]


def run_kvarts(case: Case, **changes: Any) -> Outcome:
    """The case through kvarts, with page events and the audit on."""
    config = case.config(**{"audit": True, **changes})
    trace = case.trace()
    requests = RequestLog(largest_hit_counts=config.profile == "mocker")
    offload: Any = config.offload
    tiers = {} if offload is None else offload.tiers(config.page_size)
    steps = [StepLog(config.num_pages, tiers) for _ in range(config.replicas)]
    kept = [Kept() for _ in steps]
    engines = [open_replica(config, [log, seen]) for log, seen in zip(steps, kept, strict=True)]
    Driver(trace, OpenLoop(trace), engines, RoundRobin(), requests).run()
    return Outcome(requests, engines, steps, [seen.events for seen in kept])


def page_name(content: Content, page: int) -> tuple[object, tuple[object, ...]]:
    """The name that the naive engine gives to a page of `content`."""
    end = (page + 1) * content.page_size
    known = min(end, content.num_known_tokens)
    tokens = [("token", token) for token in content.tokens(0, known)]
    tokens += [("made", content.owner, index) for index in range(known, end)]  # type: ignore[misc]
    return (content.salt, tuple(tokens))


def evicted_names(events: list[Event]) -> list[object]:
    """Every evicted page, in order."""
    return [
        page_name(event.content, page)
        for event in events
        if isinstance(event, PagesRemoved) and event.medium == "device"
        for page in range(event.end_page - 1, event.start_page - 1, -1)
    ]


def paged(events: list[Event]) -> list[tuple[object, ...]]:
    """What happened to findable pages, page by page, each with its step."""
    out: list[tuple[object, ...]] = []
    step = -1
    for event in events:
        if isinstance(event, StepStarted):
            step = event.step
        if not isinstance(event, PagesStored | PagesRemoved):
            continue
        pages = range(event.start_page, event.end_page)
        for page in reversed(pages) if isinstance(event, PagesRemoved) else pages:
            out.append((step, type(event).__name__, event.medium, page_name(event.content, page)))  # noqa: PERF401
    return out


# Laws of a whole run --------------------------------------------------------------------------------------


def assert_as_in_naive(
    case: Case, outcome: Outcome, requests: list[NaiveRequest], naive_engines: Sequence[NaiveEngine]
) -> None:
    """Requests, steps, evictions and preemptions."""
    columns = outcome.requests.columns
    for index, request in enumerate(requests):
        row = {name: int(column[index]) for name, column in columns.items()}
        assert row["replica"] == request.replica
        if request.rejected:
            assert row["status"] == REJECTED
            continue
        hit = request.largest_hit_tokens if case.profile == "mocker" else request.others_hit_tokens
        assert row["first_admitted_ns"] == request.first_admitted_ns
        assert row["first_token_ns"] == request.first_token_ns
        assert row["last_token_ns"] == request.last_token_ns
        assert row["cached_tokens"] == hit
        assert row["admissions"] == request.admissions
        assert row["preemptions"] == request.preemptions
        assert row["recomputed_tokens"] == request.recomputed_tokens
    for index, naive in enumerate(naive_engines):
        assert evicted_names(outcome.events[index]) == naive.evicted
        log = outcome.steps[index]
        assert [(p.victim, p.asker, p.num_computed_tokens) for _, p in log.preemptions] == naive.preempted
        assert_steps_as_in_naive(log, naive)


def assert_steps_as_in_naive(log: StepLog, naive: NaiveEngine) -> None:
    """Every step, by what its row says."""
    steps = {**log.columns, "released": log.released()}
    for name in (
        "start_ns",
        "duration_ns",
        "used",
        "cached",
        "running",
        "waiting",
        "preempted",
        "tokens",
        "released",
    ):
        assert steps[name].tolist() == [getattr(step, name) for step in naive.steps], name


def assert_fast_as_slow(case: Case, **changes: Any) -> None:
    """Fast-forward leaves the same bytes as step by step, whatever is looked at."""
    fast, slow = (replay(case.trace(), case.config(step_by_step=slowly, **changes)) for slowly in (False, True))
    assert fast.to_json() == slow.to_json()
    assert fast.requests_jsonl() == slow.requests_jsonl()
    for name, column in fast.steps.items():
        assert column.tobytes() == slow.steps[name].tobytes(), name
    seen = [run_kvarts(case, step_by_step=slowly, **changes).events for slowly in (False, True)]
    for fast_events, slow_events in zip(*seen, strict=True):
        assert paged(fast_events) == paged(slow_events)


def assert_tokens_counted_once(outcome: Outcome) -> None:
    """What steps computed is what was neither left by others nor already computed, plus what was recomputed."""
    rows = outcome.requests.columns
    done = rows["status"] != REJECTED
    for replica, steps in enumerate(outcome.steps):
        mine = {name: column[done & (rows["replica"] == replica)] for name, column in rows.items()}
        needed = mine["input_tokens"] + mine["output_tokens"] - 1  # the last token is never computed
        computed = needed - mine["cached_tokens"] + mine["recomputed_tokens"]
        assert steps.columns["tokens"].sum() == computed.sum()

"""A case: random traffic and a configuration, the same for the naive engine and for kvarts."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from kvarts.core.hints import Hints
from kvarts.sim.config import ReplayConfig
from kvarts.sim.traffic.trace import Trace, TraceRequest

from oracles.naive import HeadFn, NaiveEngine, NaiveRequest, first, polynomial_ns, run_naive

NS_PER_MS = 1_000_000
ROUTERS = ("round-robin", "least-loaded", "prefix")
"""Routers that any test may take; the last one looks at most."""


@dataclass
class Row:
    arrival_ms: int
    units: list[int]
    num_prompt_tokens: int
    num_output_tokens: int
    output: list[int] | None
    priority: int
    tenant: str | None
    cancel_after_ms: int | None = None
    hints: Hints | None = None


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
    long_prefill_token_threshold: int = 0
    watermark: float = 0.0
    prefill_schedule_interval: int = 1

    @property
    def sizes(self) -> dict[str, Any]:
        """Those of an engine and its steps."""
        names = ("num_pages", "page_size", "max_num_batched_tokens", "max_num_seqs")
        return {name: getattr(self, name) for name in names}

    def config(self, **changes: Any) -> ReplayConfig:
        values: dict[str, Any] = {
            **self.sizes,
            "profile": self.profile,
            "replicas": self.replicas,
            "long_prefill_token_threshold": self.long_prefill_token_threshold,
            "watermark": self.watermark,
            "prefill_schedule_interval": self.prefill_schedule_interval,
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
                    cancel_after_ns=None if row.cancel_after_ms is None else row.cancel_after_ms * NS_PER_MS,
                    hints=row.hints,
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
                gives_up_ns=None if row.cancel_after_ms is None else (row.arrival_ms + row.cancel_after_ms) * NS_PER_MS,
            )
            for index, row in enumerate(self.rows)
        ]

    def naive(
        self, choose_head: HeadFn = first, *, plans_ahead: bool = False, stops: bool = False
    ) -> tuple[list[NaiveRequest], list[NaiveEngine]]:
        requests = self.naive_requests()
        for request in requests:
            request.stops = stops
        engines = [
            NaiveEngine(
                **self.sizes,
                profile=self.profile,
                cost=polynomial_ns,
                choose_head=choose_head,
                long_prefill_token_threshold=self.long_prefill_token_threshold,
                watermark=self.watermark,
                plans_ahead=plans_ahead,
            )
            for _ in range(self.replicas)
        ]
        run_naive(requests, engines)
        return requests, engines


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    max_requests: int = 24,
    outputs: bool = True,
    cancels: bool = False,
    limits: bool = False,
) -> Case:
    """Small pools, few different tokens, shared prefixes: everything that makes pages meet.

    `cancels`: clients give some requests up. `limits`: long prefills are bounded, and a watermark stays free.
    """
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
                draw(st.sampled_from([None, 0, 1, 7, 40, 200, 1000])) if cancels else None,
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
        draw(st.sampled_from([0, 1, 2, 3, 8])) if limits else 0,
        draw(st.sampled_from([0.0, 0.1, 0.5])) if limits else 0.0,
    )


@st.composite
def following_cases(draw: st.DrawFn) -> Case:
    """Prompts with a common beginning and a short end of their own, and long answers: windows pass the same pages.

    Some give up, some know their answers, and some prompts are the same, or computed in several chunks.
    """
    page_size = draw(st.sampled_from([1, 2, 3, 4]))
    common = draw(st.lists(st.integers(0, 1), min_size=3 * page_size, max_size=24))
    knows = draw(st.booleans())
    rows = []
    arrival_ms = 0
    for number in range(draw(st.integers(2, 6))):
        length = draw(st.integers(page_size, len(common)))
        units = [*common[: draw(st.sampled_from([length, len(common)]))], *([number] * draw(st.integers(0, 5)))]
        num_output_tokens = draw(st.integers(1, 40))
        output = draw(st.lists(st.integers(0, 1), min_size=num_output_tokens, max_size=num_output_tokens))
        cancel_after_ms = draw(st.none() | st.none() | st.integers(1, 400))
        priority = draw(st.sampled_from([0, 0, 0, 1]))
        rows.append(
            Row(
                arrival_ms,
                units,
                len(units),
                num_output_tokens,
                output if knows else None,
                priority,
                None,
                cancel_after_ms,
            )
        )
        arrival_ms += draw(st.sampled_from([0, 0, 5, 20, 60, 150]))
    most_pages = max(-(-(row.num_prompt_tokens + row.num_output_tokens) // page_size) for row in rows)
    num_pages = draw(st.integers(most_pages, 4 * most_pages))
    budget = draw(st.sampled_from([4, 16, 64]))
    return Case(rows, 1, page_size, num_pages, max(budget, 8), 8, "default", 1, draw(st.sampled_from([0, 0, 3])))


@st.composite
def branching_cases(draw: st.DrawFn) -> Case:
    """Prompts that begin with a part of one of few long texts, and go on in their own way."""
    texts = draw(st.lists(st.lists(st.integers(0, 2), min_size=8, max_size=24), min_size=1, max_size=2))
    rows: list[Row] = []
    for place in range(draw(st.integers(2, 12))):
        text = draw(st.sampled_from(texts))
        shared = draw(st.integers(1, len(text)))
        units = [*text[:shared], *draw(st.lists(st.integers(0, 2), max_size=8))]
        num_output = draw(st.integers(1, 9))
        output = draw(st.none() | st.lists(st.integers(0, 2), min_size=num_output, max_size=num_output))
        arrival_ms = draw(st.integers(0, 200)) + 40 * place
        rows.append(Row(arrival_ms, units, len(units), num_output, output, 0, draw(st.sampled_from([None, None, "a"]))))
    rows.sort(key=lambda row: row.arrival_ms)
    if any(row.output is None for row in rows):
        for row in rows:
            row.output = None
    page_size, budget = draw(st.integers(1, 4)), draw(st.sampled_from([4, 7, 16, 64]))
    return Case(rows, 1, page_size, draw(st.integers(4, 40)), budget, draw(st.integers(1, 4)), "default", 1)

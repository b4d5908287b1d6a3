"""Cases of models with KV groups and tiers below the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from hypothesis import strategies as st

from kvarts.core.config import StateMode
from kvarts.core.event_log import EventReader
from kvarts.core.kv.groups import PartGroup
from kvarts.core.tiers.config import OffloadConfig, OffloadPolicy
from kvarts.cost.polynomial import LinearCost
from kvarts.sim.replaying import replay
from kvarts.sim.report.report import Report

from builders.case import Case, Row, cases
from builders.grouped import STATES, part_groups

__all__ = ["COST", "FAST", "Grouped", "grouped", "overlapping", "preempted", "returning"]

COST = LinearCost(step_ms=1.0, chunk_token_ms=1.0, decode_ms=0.1)
"""By the token, so that a load of any length saves something."""

FAST: dict[str, Any] = {"h2d": 10**15, "d2h": 10**15, "latency_us": 0.0}


@dataclass
class Grouped:
    case: Case
    groups: tuple[PartGroup, ...]
    keeps: str
    offload: OffloadConfig
    states: StateMode = "snapshots"

    def replayed(self, readers_of: Callable[[int], Sequence[EventReader]] = lambda _: (), **changes: Any) -> Report:
        values = {
            "kv_groups": self.keeps,
            "groups": self.groups,
            "offload": self.offload,
            "audit": True,
            "cost": COST,
            "mamba_cache_mode": self.states if any(group.is_state for group in self.groups) else "snapshots",
        }
        values |= changes
        return replay(self.case.trace(), self.case.config(**values), observers_of=readers_of)


@st.composite
def returning(draw: st.DrawFn, *, max_requests: int, num_units: int = 12) -> Case:
    """Requests that come back to a few prompts, on a device that has room for little more than one of them."""
    page_size, unit_tokens = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2, 4]))
    bases = [[base * 100 + unit for unit in range(num_units)] for base in range(3)]
    rows = []
    arrival_ms = 0
    for _ in range(draw(st.integers(2, max_requests))):
        arrival_ms += draw(st.sampled_from([0, 0, 5, 50, 400]))
        units = bases[draw(st.integers(0, 2))][: draw(st.integers(1, num_units))]
        units += draw(st.lists(st.integers(1000, 1003), max_size=3))
        num_tokens = len(units) * unit_tokens - draw(st.integers(0, unit_tokens - 1))
        priority = draw(st.sampled_from([0, 0, 0, 1]))
        rows.append(Row(arrival_ms, units, num_tokens, draw(st.integers(1, 9)), None, priority, None))
    longest = max(row.num_prompt_tokens + row.num_output_tokens for row in rows)
    num_pages = -(-longest // page_size) + draw(st.integers(0, 12))
    budget = draw(st.sampled_from([4, 16, 64]))
    return Case(rows, unit_tokens, page_size, num_pages, budget, 4, "default", 1)


@st.composite
def overlapping(draw: st.DrawFn, *, max_requests: int = 24, cancels: bool = False) -> Grouped:
    """Prompts that come back to host memory and files, from where they take about as long as computing them."""
    case = draw(returning(max_requests=max_requests, num_units=30))
    for row in case.rows if cancels else ():
        row.cancel_after_ms = draw(st.sampled_from([None, None, None, 20, 100]))
    policy: OffloadPolicy = draw(st.sampled_from(["eager", "eager", "lazy", "exclusive"]))
    return Grouped(
        case,
        draw(part_groups()),
        draw(st.sampled_from(["all", "tails"])),
        OffloadConfig(
            host_pages=draw(st.sampled_from([5, 30, 500])),
            disk_pages=draw(st.sampled_from([None, 30, 500])),
            disk_read=draw(st.sampled_from([500, 1000, 5000, 20_000])),
            disk_write=draw(st.sampled_from([10_000, 10**15])),
            disk_latency_us=draw(st.sampled_from([0.0, 5000.0])),
            policy=policy,
            h2d=draw(st.sampled_from([500, 1000, 2000, 5000, 20_000])),
            d2h=draw(st.sampled_from([10_000, 10**15])),
            latency_us=draw(st.sampled_from([0.0, 0.0, 5000.0])),
            fail_every=draw(st.sampled_from([0, 0, 0, 2, 5])),
            load_overlap=draw(st.sampled_from(["none", "layers"])),
            num_layers=draw(st.sampled_from([2, 8])),
        ),
        draw(st.sampled_from(get_args(StateMode))),
    )


@st.composite
def preempted(draw: st.DrawFn, *, max_requests: int = 8, cancels: bool = False) -> Grouped:
    """Short prompts and long outputs of unknown tokens, on a device for little more than the longest request."""
    rows = []
    arrival_ms = 0
    for _ in range(draw(st.integers(2, max_requests))):
        arrival_ms += draw(st.sampled_from([0, 1, 5, 50]))
        units = draw(st.lists(st.integers(0, 1), max_size=2)) + draw(
            st.lists(st.integers(0, 2), min_size=1, max_size=6)
        )
        num_tokens, num_output = 2 * len(units) - draw(st.integers(0, 1)), draw(st.integers(1, 50))
        priority = draw(st.sampled_from([0, 0, 1]))
        cancel_ms = draw(st.sampled_from([None, None, None, 40, 200])) if cancels else None
        rows.append(Row(arrival_ms, units, num_tokens, num_output, None, priority, None, cancel_ms))
    page_size = draw(st.sampled_from([1, 2, 3, 4]))
    longest = max(row.num_prompt_tokens + row.num_output_tokens for row in rows)
    num_pages = -(-longest // page_size) + draw(st.integers(1, 6))
    rates = st.sampled_from([1000, 100_000, 10**15])
    policy: OffloadPolicy = draw(st.sampled_from(["eager", "lazy", "exclusive"]))
    return Grouped(
        Case(rows, 2, page_size, num_pages, draw(st.sampled_from([4, 16])), 4, "default", 1),
        draw(st.one_of(part_groups(), part_groups(), st.just(STATES))),
        draw(st.sampled_from(["all", "tails"])),
        OffloadConfig(
            host_pages=draw(st.sampled_from([3, 10, 100, 500])),
            disk_pages=draw(st.sampled_from([None, None, 10, 200])),
            policy=policy,
            h2d=draw(rates),
            d2h=draw(rates),
            disk_read=draw(rates),
            disk_write=draw(rates),
            latency_us=draw(st.sampled_from([0.0, 5000.0])),
            fail_every=draw(st.sampled_from([0, 0, 0, 3])),
            load_overlap=draw(st.sampled_from(["none", "layers"])),
            num_layers=4,
        ),
        draw(st.sampled_from(get_args(StateMode))),
    )


@st.composite
def grouped(draw: st.DrawFn, *, max_requests: int = 24) -> Grouped:
    case = draw(st.one_of(returning(max_requests=max_requests), cases(max_requests=max_requests)))
    case.profile = "default"
    # A part takes from less than a step to many steps.
    rates = st.sampled_from([100, 1000, 3000, 10_000, 10**15])
    policy: OffloadPolicy = draw(st.sampled_from(["eager", "lazy", "exclusive"]))
    return Grouped(
        case,
        draw(part_groups()),
        draw(st.sampled_from(["all", "tails"])),
        OffloadConfig(
            host_pages=draw(st.sampled_from([1, 3, 8, 30, 500, 500])),
            policy=policy,
            target_free=draw(st.sampled_from([0, 1, 4, 20, None])),
            h2d=draw(rates),
            d2h=draw(rates),
            latency_us=draw(st.sampled_from([0.0, 10.0, 5000.0])),
            disk_pages=draw(st.sampled_from([None, None, 1, 4, 20, 500])),
            disk_read=draw(rates),
            disk_write=draw(rates),
            disk_latency_us=draw(st.sampled_from([0.0, 500.0])),
            store_within_ms=draw(st.sampled_from([0.0, 1.0, 20.0, 500.0])),
            fail_every=draw(st.sampled_from([0, 0, 1, 2, 5])),
            load_overlap=draw(st.sampled_from(["none", "layers"])),
            num_layers=draw(st.sampled_from([2, 8])),
        ),
        draw(st.sampled_from(get_args(StateMode))),
    )

"""Copies that slow down the steps beside them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.config import EngineConfig
from kvarts.content import Content
from kvarts.errors import ConfigError
from kvarts.events import LeapDone, StepDone
from kvarts.offload.config import OffloadConfig
from kvarts.request import Request
from kvarts.sim.replica import Replica

from builders.engines import make_replica
from builders.kept import Kept
from builders.tiers import offloader_of

MS = 1_000_000


def serve(**settings: Any) -> tuple[Replica, list[int]]:
    """Compute a prompt of eight tokens and nine more, in steps of a millisecond; return the durations of steps."""
    kept = Kept()
    config = EngineConfig(num_pages=32, page_size=1, max_num_batched_tokens=64, max_num_seqs=4)
    below = OffloadConfig(
        host_pages=64, latency_us=0.0, kv_bytes_per_token=1000, preemption_mode="recompute", **settings
    )
    engine = make_replica(config, offload=below, readers=[kept], audit=True)
    content = Content.from_tokens(list(range(8)), page_size=1, owner=0)
    engine.submit(Request(0, content, num_prompt_tokens=8, max_tokens=10), 0)
    engine.run_until(1 << 60, [])
    engine.flush()
    durations: list[int] = []
    for event in kept.events:
        if isinstance(event, StepDone):
            durations.append(event.duration_ns)
        elif isinstance(event, LeapDone):
            durations += event.durations_ns
    return engine, durations


def test_steps_take_longer_while_pages_are_stored() -> None:
    """Eight pages at two a millisecond: four milliseconds, in which 2.67 milliseconds of steps are done."""
    _, durations = serve(d2h=2_000_000, copy_slowdown=0.5)
    assert durations == [MS, MS * 3 // 2, MS * 3 // 2, MS * 4 // 3 + 1, *[MS] * 6]


def test_steps_take_no_longer_by_default() -> None:
    assert serve(d2h=2_000_000)[1] == [MS] * 10


@given(
    st.floats(0.0, 100.0).filter(lambda x: x == 0 or x > 1e-5),
    st.lists(st.integers(0, 10**12), min_size=1, max_size=20),
    st.integers(0, 10**13),
)
def test_time_beside_copies_is_longer_by_the_factor_and_no_other(
    slowdown: float, durations_ns: list[int], num_bytes: int
) -> None:
    """One step or the same work in many: the work done beside copies is their time over 1 + the slowdown."""
    tiers = offloader_of(serve(copy_slowdown=slowdown)[0])
    begin_ns = 10**15
    end_ns = tiers.channels[1].submit(begin_ns, num_bytes)
    slower_ns = tiers.steps_ns(begin_ns, durations_ns)
    many, whole = sum(slower_ns), tiers.steps_ns(begin_ns, [sum(durations_ns)])[0]
    assert abs(many - whole) <= 2 * len(durations_ns)
    beside_ns = min(whole, end_ns - begin_ns)
    work_ns = beside_ns / (1 + slowdown) + whole - beside_ns
    assert work_ns == pytest.approx(sum(durations_ns), rel=1e-5, abs=4)


def test_the_copies_of_one_model_do_not_slow_down_another() -> None:
    from kvarts.combines import check_combination

    with pytest.raises(ConfigError, match="copies of one model would slow down the steps of others"):
        check_combination({"copies": "offload.copy_slowdown", "several": "models"})


@pytest.mark.parametrize("slowdown", [-0.1, 101.0, float("nan")])
def test_what_is_no_slowdown_is_refused(slowdown: float) -> None:
    with pytest.raises(ConfigError, match="copy_slowdown"):
        OffloadConfig(host_pages=1, copy_slowdown=slowdown)

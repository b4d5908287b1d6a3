"""Traces with sessions: turns that go on with the history, and turns of clients that changed it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

import kvarts
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.report.report import Report
from kvarts.sim.traffic.trace import Trace, TraceRequest

from builders.grouped import assert_same_outcome
from builders.outcome import timelines_json

__all__ = ["Talk", "replayed_as_slowly", "session_traces"]

NS_PER_MS = 1_000_000


@dataclass
class Talk:
    """Rows of some sessions, and of requests without one."""

    rows: list[TraceRequest]
    unit_tokens: int

    def trace(self) -> Trace:
        return Trace(list(self.rows), unit_tokens=self.unit_tokens)


def replayed_as_slowly(talk: Talk, **settings: Any) -> Report:
    """A replay of `talk`, which is the same step by step; at rest only what sessions keep is in use."""
    settings["max_num_seqs"] = min(settings["max_num_seqs"], settings["max_num_batched_tokens"])
    fast, slow = (replay(talk.trace(), ReplayConfig(step_by_step=slowly, **settings)) for slowly in (False, True))
    assert_same_outcome(fast, slow)
    assert fast.summary["num_requests"] == len(talk.rows)
    for timeline in timelines_json(fast):
        assert kvarts.verify(timeline).verdict != "violated"
    for log in fast.step_logs:
        assert (log.rests["used"] == log.rests["reserved"]).all()
    return fast


cancelled_ns = st.sampled_from([None, None, 1, 20, 90]).map(lambda ms: None if ms is None else ms * NS_PER_MS)


@st.composite
def session_traces(draw: st.DrawFn, *, max_sessions: int = 5, max_plain: int = 4, cancels: bool = False) -> Talk:
    """`cancels`: the clients of some requests give them up."""
    unit_tokens = draw(st.sampled_from([1, 2, 4]))
    small = st.integers(0, 2)
    timed: list[tuple[int, str | None, list[int], int, int, int | None]] = []
    for number in range(draw(st.integers(1, max_sessions))):
        units: list[int] = draw(st.lists(small, min_size=1, max_size=8))
        arrival_ms = draw(st.sampled_from([0, 0, 5, 60, 300]))
        for turn in range(draw(st.integers(1, 4))):
            num_output = draw(st.sampled_from([1, 2, 5, 13]))
            delay_ms = draw(st.sampled_from([None, 0, 3, 80, 1000])) if turn else None
            cut = draw(st.integers(0, unit_tokens - 1))
            timed.append((arrival_ms, str(number), list(units), cut, num_output, delay_ms))
            arrival_ms += draw(st.sampled_from([0, 40, 400]))
            if draw(st.integers(0, 5)) == 0:
                units = draw(st.lists(small, min_size=1, max_size=8))  # the client began anew
            else:
                units += draw(st.lists(small, max_size=12))  # the answer, as far as it is known, and more
    for _ in range(draw(st.integers(0, max_plain))):
        units = draw(st.lists(small, min_size=1, max_size=12))
        arrival_ms = draw(st.sampled_from([0, 10, 100, 500]))
        timed.append((arrival_ms, None, units, 0, draw(st.integers(1, 12)), None))
    timed.sort(key=lambda row: row[0])
    rows = [
        TraceRequest(
            place,
            arrival_ms * NS_PER_MS,
            array("Q", units).tobytes(),
            len(units) * unit_tokens - cut,
            num_output,
            session_id=session,
            delay_ns=None if delay_ms is None else delay_ms * NS_PER_MS,
            cancel_after_ns=draw(cancelled_ns) if cancels else None,
        )
        for place, (arrival_ms, session, units, cut, num_output, delay_ms) in enumerate(timed)
    ]
    return Talk(rows, unit_tokens)

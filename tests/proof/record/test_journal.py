"""The journal is the same however fast the replay was."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given

from kvarts import ReplayConfig, Trace, replay, verify
from kvarts.proof.evidence import JournalWriter, timelines_of
from kvarts.sim.traffic.mooncake import load_mooncake

from builders.case import ROUTERS, Case, cases
from builders.written import journals_of


@pytest.mark.laws
@given(cases(max_requests=40))
def test_the_journal_is_the_same_however_fast_the_replay_was(case: Case) -> None:
    """L5: to the byte, the step of every evicted page included."""
    assert journals_of(case) == journals_of(case, step_by_step=True)


def test_a_closed_loop_over_replicas_leaves_the_same_bytes() -> None:
    """L5 where requests wait for others: engines may not leap past each other."""
    sample = Path(__file__).parents[3] / "src" / "kvarts" / "data" / "mooncake-conversation-1000.jsonl"
    requests = load_mooncake(sample).requests
    assert requests is not None
    left = []
    for slowly in (False, True):
        config = ReplayConfig(
            num_pages=6000, replicas=3, router=ROUTERS[-1], concurrency=24, step_by_step=slowly, page_size=32
        )
        files = [io.BytesIO() for _ in range(3)]
        writers = [JournalWriter(file, total_blocks=6000, block_size_tokens=32) for file in files]
        trace = Trace(requests[:200], unit_tokens=512)
        report = replay(trace, config, observers_of=[[writer] for writer in writers].__getitem__)
        left.append([*(file.getvalue() for file in files), *(t.to_json() for t in timelines_of(report))])
        assert {verify(timeline.to_json()).verdict for timeline in timelines_of(report)} == {"ok"}
    assert left[0] == left[1]

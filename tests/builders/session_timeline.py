"""The timeline of an engine with sessions, judged by what knows nothing of sessions."""

from __future__ import annotations

from typing import Any

import kvarts
from kvarts.proof.evidence import Timeline
from kvarts.sim.report.steps import StepLog

__all__ = ["check_timeline", "timeline_of"]


def timeline_of(steps: StepLog, page_size: int) -> Any:
    """The timeline that the steps make."""
    return Timeline.of(steps, page_size=page_size)


def check_timeline(steps: StepLog, page_size: int) -> None:
    """Nothing is lost: what is in use at rest is what sessions keep, and in the end that is nothing."""
    rests = steps.rests
    assert (rests["used"] == rests["reserved"]).all()
    if len(steps):
        verdict = kvarts.verify(timeline_of(steps, page_size).to_json())
        assert verdict.verdict != "violated", verdict.to_text()

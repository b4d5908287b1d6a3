"""Rooms that a project may lack: tests outside of them do without."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from kvarts.report.report import Report

HAS_AUDIT = find_spec("kvarts.audit") is not None
HAS_RECORD = find_spec("kvarts.record") is not None


def timelines_json(report: Report) -> list[bytes]:
    """The timelines of `report`; none where nothing records them."""
    if not HAS_RECORD:
        return []
    return [timeline.to_json() for timeline in import_module("kvarts.record.timeline").timelines_of(report)]

"""Rooms that a project may lack: tests outside of them do without."""

from __future__ import annotations

from pkgutil import iter_modules

import kvarts
from kvarts.report.report import Report

ROOMS = frozenset(module.name for module in iter_modules(kvarts.__path__))
HAS_AUDIT = "audit" in ROOMS
HAS_RECORD = "record" in ROOMS


def timelines_json(report: Report) -> list[bytes]:
    """The timelines of `report`; none where nothing records them."""
    if not HAS_RECORD:
        return []
    name = "timelines_of"  # a type checker finds it only where the room is
    return [timeline.to_json() for timeline in getattr(kvarts, name)(report)]

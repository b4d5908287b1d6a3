"""A reader that keeps every event."""

from __future__ import annotations

from collections.abc import Sequence

from kvarts.core.events import Event


class Kept:
    """Keeps every event."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def observe(self, events: Sequence[Event]) -> None:
        self.events += events

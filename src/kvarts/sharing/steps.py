"""The step log of an engine that shares its device: between two of its steps, other models have turns."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import numpy as np

from kvarts.columns import Column
from kvarts.events import Event, LeapDone, StepDone
from kvarts.report.steps import StepLog

__all__ = ["TurnLog"]


class TurnLog(StepLog):
    """A StepLog with gaps between steps, in which other models may take or evict pages."""

    def __init__(self, num_pages: int, tiers: Mapping[str, int] | None = None) -> None:
        super().__init__(num_pages, tiers)
        self._starts_ns = array("q")
        self._cached = array("i")
        self._withheld = array("i")

    def observe(self, events: Sequence[Event]) -> None:
        """Keep what `events` say of steps."""
        super().observe(events)
        for event in events:
            if isinstance(event, StepDone):
                self._starts_ns.append(event.start_ns)
                self._cached.append(event.num_cached)
                self._withheld.append(event.num_withheld)
            elif isinstance(event, LeapDone):
                turns = event.turns
                assert turns is not None
                self._starts_ns.fromlist(turns.starts_ns)
                self._cached.fromlist(turns.cached)
                self._withheld.fromlist(turns.withheld)

    @property
    def starts_ns(self) -> Column:
        """The start of each step; other models may have had turns since the step before."""
        return np.frombuffer(self._starts_ns, np.int64)

    @property
    def gaps_ns(self) -> Column:
        """The time from the end of the step before to the end of each step; of the first step, its duration."""
        ends_ns = self.starts_ns + self.durations_ns
        return np.diff(ends_ns, prepend=self.starts_ns[:1])

    def cached(self) -> Column:
        """Return the pages cached at the mark of each step."""
        return np.frombuffer(self._cached, np.int32).astype(np.int64)

    def withheld(self) -> Column:
        """Return the pages withheld before each step."""
        return np.frombuffer(self._withheld, np.int32).astype(np.int64)

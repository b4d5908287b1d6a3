"""The step log of an engine that shares its device: other models have turns between its steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvarts.columns import Column
from kvarts.events import Event, LeapDone, StepDone
from kvarts.report.distributions import Extent, Ranges
from kvarts.report.packed import PackedColumn
from kvarts.report.steps import StepLog

__all__ = ["TurnLog"]


class TurnLog(StepLog):
    """A StepLog with gaps between steps, in which other models may take or evict pages."""

    def __init__(
        self, num_pages: int, tiers: Mapping[str, int] | None = None, memory: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(num_pages, tiers, memory)
        self._starts_ns = PackedColumn("q")
        self._cached = PackedColumn("i")
        self._withheld = PackedColumn("i")

    def observe(self, events: Sequence[Event]) -> None:
        """Record the steps in `events`."""
        super().observe(events)
        starts_ns, cached, withheld = self._starts_ns.recent, self._cached.recent, self._withheld.recent
        for event in events:
            if isinstance(event, StepDone):
                starts_ns.append(event.start_ns)
                cached.append(event.num_cached)
                withheld.append(event.num_withheld)
            elif isinstance(event, LeapDone):
                turns = event.turns
                assert turns is not None
                starts_ns += turns.starts_ns
                cached += turns.cached
                withheld += turns.withheld
        for column in (self._starts_ns, self._cached, self._withheld):
            column.settle()

    @property
    def starts_ns(self) -> Column:
        """The start of each step; other models may have had turns since the previous step."""
        return self._starts_ns.whole()

    def gaps(self) -> Iterator[tuple[Column, Column]]:
        """Yield the time from the end of the previous step to the end of each step, and its decodes, by slabs.

        For the first step, the time is its duration.
        """
        before_ns = None
        for slab, starts_ns in zip(self.slabs(), self._starts_ns.blocks(), strict=True):
            ends_ns = starts_ns + slab.durations_ns
            yield np.diff(ends_ns, prepend=starts_ns[0] if before_ns is None else before_ns), slab.of_steps("decodes")
            before_ns = ends_ns[-1]

    def gap_extent(self) -> Extent | None:
        """Return None: times between turns are not known before a pass over them."""
        return None

    def gaps_within(self, ranges: Ranges) -> Iterator[tuple[Column, Column]]:
        """Return all `gaps`."""
        return self.gaps()

    @property
    def end_ns(self) -> int:
        """The end of the last step; 0 without steps."""
        return int(self.starts_ns[-1] + self.durations_ns[-1]) if len(self) else 0

    def cached(self) -> Column:
        """Return the pages cached at the mark of each step."""
        return self._cached.whole().astype(np.int64)

    def withheld(self) -> Column:
        """Return the pages withheld before each step."""
        return self._withheld.whole().astype(np.int64)

"""The log of the steps of one engine: what was kept of them, as columns."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from kvarts.columns import Column
from kvarts.report.step_spans import StepSpans

__all__ = ["StepLog"]


class StepLog(StepSpans):
    """An EventReader with columns: of spans, of steps, and of times at rest."""

    @cached_property
    def spans(self) -> dict[str, Column]:
        """Integer columns by name, one row a span; `duration_ns` is the whole span's."""
        spans = dict(zip(self._span_fields, self._spans.take_columns(), strict=True))
        spans["duration_ns"] = (
            np.add.reduceat(self.durations_ns, self._firsts(spans)) if len(self) else self.durations_ns
        )
        return spans

    @property
    def durations_ns(self) -> Column:
        """Of each step."""
        return np.frombuffer(self._durations_ns, np.int64)

    def of_steps(self, name: str, dtype: type[np.signedinteger[Any]] = np.int64) -> Column:
        """Return a column of the spans, one row a step: for what is alike in all steps of a span."""
        return np.repeat(self.spans[name].astype(dtype), self.spans["num_steps"])

    def used(self) -> Column:
        """Return the pages used in each step."""
        taken = np.frombuffer(self._pages_taken, np.int32)
        pages = np.cumsum(taken, dtype=np.int64)
        before = self.spans["used"] - (pages - taken)[self._firsts(self.spans)] if len(self) else self.spans["used"]
        pages += np.repeat(before, self.spans["num_steps"])
        return pages

    @property
    def starts_ns(self) -> Column:
        """When each step began."""
        durations_ns = self.durations_ns
        elapsed = np.cumsum(durations_ns) - durations_ns
        if len(self):
            elapsed -= np.repeat(elapsed[self._firsts(self.spans)], self.spans["num_steps"])
        starts_ns: Column = self.of_steps("start_ns") + elapsed
        return starts_ns

    @property
    def gaps_ns(self) -> Column:
        """From the end of the step before to the end of each; where a step has decodes, the one before had them too."""
        return self.durations_ns

    @property
    def end_ns(self) -> int:
        """When the last step ended; 0 if there is none."""
        return int(self.starts_ns[-1] + self.durations_ns[-1]) if len(self) else 0

    def cached(self) -> Column:
        """Return the pages cached in each step."""
        # In a leap, a cached page is evicted only for what empty pages do not cover.
        cached = self.of_steps("cached")
        return np.where(self.of_steps("is_leap"), np.minimum(cached, self.num_pages - self.used()), cached)

    def withheld(self) -> Column | None:
        """Return the pages not used here that could not be taken, before each step; None where there are none."""
        return None

    def reserved(self) -> Column | None:
        """Return the pages that stay in use when no request runs, as of each step; None where there never are any."""
        steps, num_pages = self._changes_of_reserved
        if not len(steps) and not self.rests["reserved"].any():
            return None
        changes = np.diff(num_pages, prepend=0)
        reserved = np.zeros(len(self), np.int64)
        reserved[steps] = changes
        return np.cumsum(reserved)

    @cached_property
    def _changes_of_reserved(self) -> Column:
        return self._reserved.take_columns()

    @cached_property
    def columns(self) -> dict[str, Column]:
        """Integer columns by name, one row a step."""
        made = ("num_steps", "released", "is_leap", "start_ns", "used", "cached")
        steps = {name: self.of_steps(name) for name in self._span_fields if name not in made}
        steps["start_ns"] = self.starts_ns
        steps["duration_ns"] = self.durations_ns
        steps["used"] = self.used()
        steps["cached"] = self.cached()
        return steps

    def released(self) -> Column:
        """Return the pages that had gone out of use, up to each step."""
        return np.repeat(self.spans["released"], self.spans["num_steps"])

    @cached_property
    def rests(self) -> dict[str, Column]:
        """Integer columns by name, one row for each time when no request was left: `step` is the step before it."""
        return dict(zip(self._rest_fields, self._rests.take_columns(), strict=True))

    @cached_property
    def row_order(self) -> Column:
        """The order of time of what is said of each step, and then of each time at rest.

        A rest comes right after its step.
        """
        return np.argsort(np.concatenate((np.arange(len(self)) * 2, self.rests["step"] * 2 + 1)), kind="stable")

    @staticmethod
    def _firsts(spans: dict[str, Column]) -> Column:
        """Return the number of each span's first step."""
        return np.cumsum(spans["num_steps"]) - spans["num_steps"]

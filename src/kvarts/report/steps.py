"""The log of the steps of one engine, as columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from kvarts.columns import Column
from kvarts.few import Few, Numbers, arrays_pay
from kvarts.report.step_spans import StepSpans

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Slab", "StepLog"]


class Slab(NamedTuple):
    """Some consecutive steps of a log, with their values."""

    durations_ns: Column
    used: Column
    """Pages used in each step."""
    spans: dict[str, Column]
    """The spans of the log that have steps in the slab."""
    num_steps: Column
    """Steps of each of these spans in the slab."""

    def of_steps(self, name: str, dtype: str | type[np.signedinteger[Any]] = "int64") -> Column:
        """Return a column of the spans with one row per step, for a value that is constant in a span."""
        import numpy as np

        return np.repeat(self.spans[name].astype(dtype), self.num_steps)


class SpanColumns(Mapping[str, Column]):
    """Columns of integers in few bytes; one that is read is a copy in 8 bytes per integer."""

    def __init__(self, narrow: Mapping[str, Column]) -> None:
        self._narrow = narrow

    def __getitem__(self, name: str) -> Column:
        return self._narrow[name].astype("int64")

    def __iter__(self) -> Iterator[str]:
        return iter(self._narrow)

    def __len__(self) -> int:
        return len(self._narrow)

    def part(self, start: int, end: int) -> dict[str, Column]:
        """Return the rows [start, end) of all columns."""
        return {name: column[start:end].astype("int64") for name, column in self._narrow.items()}


class StepLog(StepSpans):
    """An EventReader with columns of spans, of steps, and of times at rest.

    There may be many more steps than fit in memory as columns; reading `slabs` takes the memory of one at a time.
    """

    @cached_property
    def spans(self) -> SpanColumns:
        """Integer columns by name, one row per span; `duration_ns` is that of the whole span."""
        import numpy as np

        narrow = dict(zip(self._span_fields, self._spans.take_narrow_columns(), strict=True))
        spans = SpanColumns(narrow)
        lasts_ns = np.zeros(len(spans["num_steps"]), np.int64)
        for part, durations_ns in _parts(spans["num_steps"], self._durations_ns.blocks()):
            lasts_ns[part.start : part.end] += np.add.reduceat(durations_ns, part.begins)
        narrow["duration_ns"] = lasts_ns
        return spans

    @cached_property
    def _is_short(self) -> bool:
        """Whether there are too few steps for arrays."""
        return not self.num_groups and not arrays_pay(len(self))

    @cached_property
    def numbers(self) -> Mapping[str, Numbers]:
        """`spans`, as Few if there are too few steps for arrays."""
        if not self._is_short:
            return self.spans
        spans: dict[str, Numbers] = dict(zip(self._span_fields, map(Few, self._spans.to_lists()), strict=True))
        durations_ns, first = self._durations_ns.to_list(), 0
        lasts_ns = []
        for num_steps in spans["num_steps"]:
            lasts_ns.append(sum(durations_ns[first : first + num_steps]))
            first += num_steps
        spans["duration_ns"] = Few(lasts_ns)
        return spans

    def used_over_time(self) -> Iterator[tuple[Numbers, Numbers]]:
        """Return the pages used in each step, and its duration, in blocks of steps."""
        if not self._is_short:
            yield from ((slab.used, slab.durations_ns) for slab in self.slabs())
        elif len(self):
            taken, used, first = self._pages_taken.to_list(), [], 0
            for num_steps, used_before in zip(self.numbers["num_steps"], self.numbers["used"], strict=True):
                used += [used_before + more for more in accumulate(taken[first : first + num_steps])]
                first += num_steps
            yield Few(used), Few(self._durations_ns.to_list())

    def gap_numbers(self) -> Iterator[tuple[Numbers, Numbers]]:
        """Return `gaps`, as Few if there are too few steps for arrays."""
        if not self._is_short:
            yield from self.gaps()
        else:
            spans = zip(self.numbers["decodes"], self.numbers["num_steps"], strict=True)
            weights = Few(decodes for decodes, num_steps in spans for _ in range(num_steps))
            yield Few(self._durations_ns.to_list()), weights

    def slabs(self) -> Iterator[Slab]:
        """Return all steps in order, in blocks."""
        import numpy as np

        spans = self.spans
        used_before, used_of_spans = 0, spans["used"]
        of_each = self.of_each("used") if self.num_groups else None
        parts = _parts(spans["num_steps"], self._durations_ns.blocks())
        for (part, durations_ns), taken in zip(parts, self._pages_taken.blocks(), strict=True):
            used = np.cumsum(taken, dtype=np.int64)
            before = used_of_spans[part.start : part.end] - (used - taken)[part.begins]
            if part.is_begun:
                before[0] = used_before
            used += np.repeat(before, part.num_steps)
            used_before = int(used[-1])
            if of_each is not None:
                used, of_each = of_each[: len(used)], of_each[len(used) :]
            yield Slab(durations_ns, used, spans.part(part.start, part.end), part.num_steps)

    @property
    def durations_ns(self) -> Column:
        """Duration of each step."""
        return self._durations_ns.whole()

    def of_steps(self, name: str, dtype: str | type[np.signedinteger[Any]] = "int64") -> Column:
        """Return a column of the spans with one row per step, for a value that is constant in a span."""
        import numpy as np

        return np.repeat(self.spans[name].astype(dtype), self.spans["num_steps"])

    def used(self) -> Column:
        """Return the pages used in each step."""
        import numpy as np

        return np.concatenate([np.zeros(0, np.int64), *(slab.used for slab in self.slabs())])

    @property
    def starts_ns(self) -> Column:
        """Start time of each step."""
        import numpy as np

        durations_ns = self.durations_ns
        elapsed = np.cumsum(durations_ns) - durations_ns
        if len(self):
            elapsed -= np.repeat(elapsed[self._firsts(self.spans)], self.spans["num_steps"])
        starts_ns: Column = self.of_steps("start_ns") + elapsed
        return starts_ns

    def gaps(self) -> Iterator[tuple[Column, Column]]:
        """Return the time from the end of the previous step to the end of each step, and its decodes.

        These are the times between tokens, in batches, one per block. If a step has decodes, the previous step had them
        too.
        """
        import numpy as np

        decodes = self.spans["decodes"]
        for part, durations_ns in _parts(self.spans["num_steps"], self._durations_ns.blocks()):
            yield durations_ns, np.repeat(decodes[part.start : part.end], part.num_steps)

    @property
    def end_ns(self) -> int:
        """End time of the last step; 0 without steps."""
        return int(self.numbers["start_ns"][-1] + self.numbers["duration_ns"][-1]) if len(self) else 0

    @cached_property
    def _leap_columns(self) -> dict[str, Column]:
        """Columns that vary within leaps with KV groups, by name, one row per step of a leap."""
        import numpy as np

        names = ("used", "cached", "released", *self.group_fields)
        is_leap = self.spans["is_leap"] != 0
        num_steps = self.spans["num_steps"][is_leap]
        before = [self.spans[name][is_leap] for name in names]
        taken = self._pages_taken.whole()[self._is_of_leap].astype(np.int64)
        return dict(zip(names, self.part_steps.columns(num_steps, taken, before, self.num_pages), strict=True))

    @cached_property
    def _is_of_leap(self) -> Column:
        import numpy as np

        is_of_leap: Column = self.of_steps("is_leap", np.int8) != 0
        return is_of_leap

    def of_each(self, name: str) -> Column:
        """Return a column that varies within leaps, with one row per step, if KV groups are counted."""
        column = self.of_steps(name)
        column[self._is_of_leap] = self._leap_columns[name]
        return column

    def cached(self) -> Column:
        """Return the pages cached in each step."""
        import numpy as np

        if self.num_groups:
            return self.of_each("cached")
        # In a leap, cached pages are evicted only when the empty pages are used up.
        cached = self.of_steps("cached")
        return np.where(self.of_steps("is_leap"), np.minimum(cached, self.num_pages - self.used()), cached)

    def withheld(self) -> Column | None:
        """Return the pages not used here that were not available before each step; None if this never happens."""
        return None

    def reserved(self) -> Column | None:
        """Return the pages that stay in use when no request runs, as of each step; None if this never happens."""
        import numpy as np

        steps, num_pages = self._changes_of_reserved
        if not len(steps) and not self.rests["reserved"].any():
            return None
        changes = np.diff(num_pages, prepend=0)
        reserved = np.zeros(len(self), np.int64)
        reserved[steps] = changes
        return np.cumsum(reserved)

    @cached_property
    def _changes_of_reserved(self) -> list[Column]:
        return self._reserved.take_columns()

    @cached_property
    def columns(self) -> dict[str, Column]:
        """Integer columns by name, one row per step."""
        made = ("num_steps", "released", "is_leap", "start_ns", "used", "cached")
        steps = {name: self.of_steps(name) for name in self._span_fields if name not in made}
        for name in self.group_fields:
            steps[name] = self.of_each(name)
        steps["start_ns"] = self.starts_ns
        steps["duration_ns"] = self.durations_ns
        steps["used"] = self.used()
        steps["cached"] = self.cached()
        return steps

    def released(self) -> Column:
        """Return the cumulative number of released pages at each step."""
        import numpy as np

        if self.num_groups:
            return self.of_each("released")
        return np.repeat(self.spans["released"], self.spans["num_steps"])

    @cached_property
    def rests(self) -> dict[str, Column]:
        """Integer columns by name, one row for each time without requests: `step` is the step before it."""
        return dict(zip(self._rest_fields, self._rests.take_columns(), strict=True))

    @cached_property
    def row_order(self) -> Column:
        """Permutation that sorts rows of all steps, followed by those of all rests, by time.

        A rest directly follows its step.
        """
        import numpy as np

        return np.argsort(np.concatenate((np.arange(len(self)) * 2, self.rests["step"] * 2 + 1)), kind="stable")

    @staticmethod
    def _firsts(spans: Mapping[str, Column]) -> Column:
        """Return the number of each span's first step."""
        import numpy as np

        return np.cumsum(spans["num_steps"]) - spans["num_steps"]


class _Part(NamedTuple):
    """The spans [start, end) that have steps in a block, and the number of steps of each in it."""

    start: int
    end: int
    num_steps: Column
    is_begun: bool
    """Whether the first span began in the previous block."""

    @property
    def begins(self) -> Column:
        """Place in the block of the first step of each span."""
        import numpy as np

        return np.cumsum(self.num_steps) - self.num_steps


def _parts(num_steps: Column, blocks: Iterable[Column]) -> Iterator[tuple[_Part, Column]]:
    """Return each block of steps with its share of the spans, which have `num_steps` steps each."""
    import numpy as np

    ends = np.cumsum(num_steps)
    first = 0
    for block in blocks:
        last = first + len(block)
        start = int(np.searchsorted(ends, first, side="right"))
        end = int(np.searchsorted(ends, last, side="left")) + 1
        within = np.minimum(ends[start:end], last) - np.maximum(ends[start:end] - num_steps[start:end], first)
        yield _Part(start, end, within, is_begun=int(ends[start] - num_steps[start]) < first), block
        first = last

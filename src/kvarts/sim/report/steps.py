"""The log of the steps of one engine, as columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from kvarts.base.columns import Column, ReadColumns, narrowed
from kvarts.cost.mocker_formula import MockerTimes
from kvarts.sim.report import packed
from kvarts.sim.report.distributions import NOTHING, Extent, Ranges, dot
from kvarts.sim.report.step_spans import HOW_FIELDS, LISTED_PAGES, LISTED_TIMES, StepSpans, field_of

__all__ = ["Slab", "StepLog"]


class Slab(msgspec.Struct, frozen=True, gc=False):
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
        return np.repeat(self.spans[name].astype(dtype), self.num_steps)


class StepLog(StepSpans):
    """An EventReader with columns of spans, of steps, and of times at rest.

    There may be many more steps than fit in memory as columns; reading `slabs` takes the memory of one at a time.
    """

    @property
    def spans(self) -> Mapping[str, Column]:
        """Integer columns by name, one row per span; `duration_ns` is that of the whole span."""
        return ReadColumns((*self._span_fields, "duration_ns"), self._of_spans)

    def _of_spans(self, name: str) -> Column:
        if name == "duration_ns":
            return self._lasts_ns.astype(np.int64)
        column: Column = field_of(name, self._stored)
        return column

    def _stored(self, name: str) -> Column:
        return self._spans.column(self._stored_fields.index(name))

    @cached_property
    def _lasts_ns(self) -> Column:
        """The duration of each span, in few bytes."""
        took_ns = self._narrow["took_ns"].astype(np.int64)
        if (took_ns < 0).any():
            listed_ns = np.zeros(len(took_ns), np.int64)
            for part in self._parts():
                listed_ns[part.start : part.end] += np.add.reduceat(part.durations_ns(), part.begins)
            took_ns = np.where(took_ns < 0, listed_ns, took_ns)
        return narrowed(took_ns)

    @cached_property
    def _narrow(self) -> dict[str, Column]:
        """The numbers of steps of the spans, and the columns from which the steps follow, in few bytes."""
        return {name: narrowed(self._of_spans(name)) for name in ("num_steps", "decodes", *HOW_FIELDS)}

    def forget(self) -> None:
        """Drop columns that were kept for further reads of many steps. A read computes them again."""
        for name in ("_lasts_ns", "_narrow", "_span_gaps", "_due_columns"):
            self.__dict__.pop(name, None)

    @cached_property
    def _due_columns(self) -> list[Column]:
        """The spans with pages that are due in some steps, those steps, and the pages, in few bytes."""
        return [narrowed(self._pages_due.column(field)) for field in range(3)]

    def _parts(self) -> Iterator[_Part]:
        """Return all steps in order, in blocks."""
        ends = np.cumsum(self._narrow["num_steps"], dtype=np.int64)
        listed = _Listed(self._durations_ns.blocks()), _Listed(self._pages_taken.blocks())
        for first in range(0, len(self), packed.BLOCK_STEPS):
            yield _Part(self, ends, first, min(first + packed.BLOCK_STEPS, len(self)), *listed)

    def used_over_time(self) -> Iterator[tuple[Column, Column]]:
        """Return the pages used in each step, and its duration, in blocks of steps."""
        yield from ((used, durations_ns) for _, used, durations_ns in self._used_by_part())

    def slabs(self) -> Iterator[Slab]:
        """Return all steps in order, in blocks."""
        spans = {name: narrowed(column) for name, column in self.spans.items()}
        for part, used, durations_ns in self._used_by_part():
            of_part = {name: column[part.start : part.end].astype("int64") for name, column in spans.items()}
            yield Slab(durations_ns, used, of_part, part.num_steps)

    def _used_by_part(self) -> Iterator[tuple[_Part, Column, Column]]:
        """Return all steps in order, in blocks: the pages used in each, and its duration."""
        used_before, used_of_spans = 0, narrowed(self.spans["used"])
        of_each = self.of_each("used") if self.num_groups else None
        for part in self._parts():
            durations_ns, taken = part.durations_ns(), part.pages_taken()
            used = np.cumsum(taken)
            before = used_of_spans[part.start : part.end] - (used - taken)[part.begins]
            if part.is_begun:
                before[0] = used_before
            used += np.repeat(before, part.num_steps)
            used_before = int(used[-1])
            if of_each is not None:
                used, of_each = of_each[: len(used)], of_each[len(used) :]
            yield part, used, durations_ns

    @property
    def durations_ns(self) -> Column:
        """Duration of each step."""
        return np.concatenate([np.zeros(0, np.int64), *(part.durations_ns() for part in self._parts())])

    def of_steps(self, name: str, dtype: str | type[np.signedinteger[Any]] = "int64") -> Column:
        """Return a column of the spans with one row per step, for a value that is constant in a span."""
        return np.repeat(self.spans[name].astype(dtype), self.spans["num_steps"])

    def used(self) -> Column:
        """Return the pages used in each step."""
        return np.concatenate([np.zeros(0, np.int64), *(slab.used for slab in self.slabs())])

    @property
    def starts_ns(self) -> Column:
        """Start time of each step."""
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
        decodes = self._narrow["decodes"]
        for part in self._parts():
            yield part.durations_ns(), np.repeat(decodes[part.start : part.end].astype(np.int64), part.num_steps)

    @cached_property
    def _span_gaps(self) -> tuple[Column, Column] | None:
        """The first and the last duration of each span, in few bytes; None if some are listed.

        Durations by a rule do not fall from step to step.
        """
        if ((self._narrow["how"] & LISTED_TIMES) != 0).any():
            return None
        took_ns, num_steps = self._narrow["took_ns"], self._narrow["num_steps"]
        if self._rule is None:
            return took_ns, took_ns
        known_tokens, decodes = (self._narrow[name].astype(np.int64) for name in ("known_tokens", "decodes"))
        is_single = num_steps == 1
        firsts_ns = narrowed(np.where(is_single, took_ns, self._rule.of_steps_ns(known_tokens)))
        last_tokens = known_tokens + decodes * (num_steps.astype(np.int64) - 1)
        return firsts_ns, narrowed(np.where(is_single, took_ns, self._rule.of_steps_ns(last_tokens)))

    def gap_extent(self) -> Extent | None:
        """Return the extent of `gaps` if it is known without a pass over the steps."""
        if self._span_gaps is None:
            return None
        firsts_ns, lasts_ns = self._span_gaps
        decodes, num_steps = (self._narrow[name].astype(np.int64) for name in ("decodes", "num_steps"))
        has_any = decodes > 0
        if not has_any.any():
            return NOTHING
        count = int(decodes.dot(num_steps))
        total_ns = dot(decodes, self.spans["duration_ns"])
        return count, total_ns, int(firsts_ns[has_any].min()), int(lasts_ns[has_any].max())

    def gaps_within(self, ranges: Ranges) -> Iterator[tuple[Column, Column]]:
        """Return all `gaps` in the ranges [low, high), and maybe others."""
        if self._span_gaps is None:
            yield from self.gaps()
            return
        firsts_ns, lasts_ns = self._span_gaps
        narrow = self._narrow
        is_met = np.zeros(len(firsts_ns), bool)
        for low, high in ranges:
            is_met |= (firsts_ns < high) & (lasts_ns >= low)
        met = np.flatnonzero(is_met & (narrow["decodes"] > 0))
        num_steps = narrow["num_steps"][met].astype(np.int64)
        ends = np.cumsum(num_steps)
        start = 0
        while start < len(met):
            first = int(ends[start] - num_steps[start])
            end = max(start + 1, int(np.searchsorted(ends, first + packed.BLOCK_STEPS, side="right")))
            some = met[start:end]
            steps = num_steps[start:end]
            durations_ns, num_decodes = firsts_ns[some].astype(np.int64), narrow["decodes"][some].astype(np.int64)
            if self._rule is not None:
                known_tokens = narrow["known_tokens"][some].astype(np.int64)
                durations_ns = _by_rule(self._rule, known_tokens, num_decodes, steps)
                is_single = steps == 1
                durations_ns[(np.cumsum(steps) - 1)[is_single]] = firsts_ns[some][is_single]
            yield durations_ns, np.repeat(num_decodes, steps)
            start = end

    @property
    def end_ns(self) -> int:
        """End time of the last step; 0 without steps."""
        return int(self.spans["start_ns"][-1] + self.spans["duration_ns"][-1]) if len(self) else 0

    @cached_property
    def _leap_columns(self) -> dict[str, Column]:
        """Columns that vary within leaps with KV groups, by name, one row per step of a leap."""
        names = ("used", "cached", "released", *self.group_fields)
        is_leap = self.spans["is_leap"] != 0
        num_steps = self.spans["num_steps"][is_leap]
        before = [self.spans[name][is_leap] for name in names]
        taken = np.concatenate([np.zeros(0, np.int64), *(part.pages_taken() for part in self._parts())])
        taken = taken[self._is_of_leap]
        return dict(zip(names, self.part_steps.columns(num_steps, taken, before, self.num_pages), strict=True))

    @cached_property
    def _is_of_leap(self) -> Column:
        is_of_leap: Column = self.of_steps("is_leap", np.int8) != 0
        return is_of_leap

    def of_each(self, name: str) -> Column:
        """Return a column that varies within leaps, with one row per step, if KV groups are counted."""
        column = self.of_steps(name)
        column[self._is_of_leap] = self._leap_columns[name]
        return column

    def cached(self) -> Column:
        """Return the pages cached in each step."""
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
        return np.argsort(np.concatenate((np.arange(len(self)) * 2, self.rests["step"] * 2 + 1)), kind="stable")

    @staticmethod
    def _firsts(spans: Mapping[str, Column]) -> Column:
        """Return the number of each span's first step."""
        return np.cumsum(spans["num_steps"]) - spans["num_steps"]


def _by_rule(rule: MockerTimes, known_tokens: Column, decodes: Column, num_steps: Column) -> Column:
    """Return the durations of the steps of spans, whose decodes know `known_tokens` in the first of their steps."""
    # Tokens rise by the decodes from step to step; at the first step of a span, by what leads there.
    begins = np.cumsum(num_steps) - num_steps
    rises = np.repeat(decodes, num_steps)
    rises[begins] = known_tokens
    rises[begins[1:]] -= (known_tokens + decodes * (num_steps - 1))[:-1]
    return rule.of_steps_ns(np.cumsum(rises, out=rises))


class _Listed:
    """Reads integers that are listed in blocks."""

    def __init__(self, blocks: Iterator[Column]) -> None:
        self._blocks = blocks
        self._rest: list[Column] = []

    def take(self, count: int) -> Column:
        """Return the next `count` integers."""
        parts = self._rest
        num_read = sum(map(len, parts))
        while num_read < count:
            parts.append(next(self._blocks))
            num_read += len(parts[-1])
        whole = np.concatenate([np.zeros(0, np.int64), *parts])
        self._rest = [whole[count:]]
        return whole[:count]


class _Part:
    """The steps [first, last) of a log: those of the spans [start, end), `num_steps` of each.

    `ends`: for each span of the log, the step after its last. Listed durations are read once, and so are listed pages.
    """

    def __init__(
        self, log: StepLog, ends: Column, first: int, last: int, listed_ns: _Listed, listed_pages: _Listed
    ) -> None:
        self._log = log
        self._listed_ns = listed_ns
        self._listed_pages = listed_pages
        self.start = int(np.searchsorted(ends, first, side="right"))
        self.end = int(np.searchsorted(ends, last, side="left")) + 1
        all_steps = self._of_spans("num_steps")
        self._firsts = ends[self.start : self.end] - all_steps - first
        self.num_steps = np.minimum(all_steps + self._firsts, last - first) - np.maximum(self._firsts, 0)
        self.begins = np.cumsum(self.num_steps) - self.num_steps
        self.is_begun = bool(self._firsts[0] < 0)
        """Whether the first span began in the previous block."""
        self._size = last - first

    def _of_spans(self, name: str) -> Column:
        return self._log._narrow[name][self.start : self.end].astype("int64")

    def _is_listed(self, flag: int) -> Column:
        """Return for each step whether the flag of its span is set."""
        return np.repeat(self._of_spans("how") & flag != 0, self.num_steps)

    def durations_ns(self) -> Column:
        """Return the duration of each step."""
        took_ns, rule = self._of_spans("took_ns"), self._log._rule
        is_single = self._of_spans("num_steps") == 1
        durations_ns: Column
        if rule is None:
            durations_ns = np.repeat(took_ns, self.num_steps)
        else:
            decodes, known_tokens = self._of_spans("decodes"), self._of_spans("known_tokens")
            known_tokens[0] -= decodes[0] * min(0, self._firsts[0])
            durations_ns = _by_rule(rule, known_tokens, decodes, self.num_steps)
            durations_ns[self.begins[is_single]] = took_ns[is_single]
        is_listed = self._is_listed(LISTED_TIMES)
        if is_listed.any():
            durations_ns[is_listed] = self._listed_ns.take(int(is_listed.sum()))
        return durations_ns

    def pages_taken(self) -> Column:
        """Return the pages taken in each step."""
        taken = np.zeros(self._size, np.int64)
        is_listed = self._is_listed(LISTED_PAGES)
        if is_listed.any():
            taken[is_listed] = self._listed_pages.take(int(is_listed.sum()))
        spans, offsets, counts = self._log._due_columns
        low, high = (int(at) for at in np.searchsorted(spans, (self.start, self.end)))
        if low < high:
            spans, offsets, counts = (column[low:high].astype(np.int64) for column in self._log._due_columns)
            period, places = self._log._period, spans - self.start
            all_steps = self._of_spans("num_steps")[places]
            num_times = (all_steps - 1 - offsets) // period + 1
            turns = np.arange(int(num_times.sum())) - np.repeat(np.cumsum(num_times) - num_times, num_times)
            steps = np.repeat(self._firsts[places] + offsets, num_times) + turns * period
            pages = np.repeat(counts, num_times)
            is_here = (steps >= 0) & (steps < self._size)
            taken[steps[is_here]] = pages[is_here]
        return taken

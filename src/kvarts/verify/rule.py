"""Base of the rules, with the limits that the caller sets beyond those in the body; the rules of order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec
import numpy as np

from kvarts.errors import ConfigError
from kvarts.verify.chunk import Column, RowChunk, brief, is_count, is_real

__all__ = [
    "MAX_LISTED",
    "PreemptionNeeded",
    "PreemptionTrigger",
    "RuleResult",
    "Schema",
    "Status",
    "StepOrder",
    "TimelineLimits",
    "TimelineRule",
    "Violation",
]

Status = Literal["ok", "violated", "inconclusive", "not_run"]

MAX_LISTED = 20_000
"""Violations listed per rule; all are counted. Bounds the memory of a verdict."""


class Violation(msgspec.Struct, frozen=True):
    """One violation. `step` and `row` are None for a violation of the whole timeline; `row` counts from 0."""

    rule: str
    step: int | None
    row: int | None
    what: str
    numbers: dict[str, int | float]


class RuleResult(msgspec.Struct, frozen=True):
    """Status of one rule. `why` is the reason of a status other than ok and violated."""

    rule: str
    status: Status
    num_violations: int = 0
    why: str | None = None


class TimelineRule:
    """Base of all rules. A rule alone writes its violations and its status."""

    name = ""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.num_violations = 0
        self.why_not: str | None = None
        """The reason why the rule could not run."""
        self.why_open: str | None = None
        """The reason why the rows it saw are inconclusive."""
        self.notes: list[str] = []
        """Remarks that are not violations."""

    def feed(self, chunk: RowChunk) -> None:
        """Judge the next rows."""

    def finish(self, top: dict[str, Any]) -> None:
        """Judge the whole timeline after its last row; `top` holds the top-level fields of the body."""

    @property
    def result(self) -> RuleResult:
        """Status of the rule so far."""
        if self.num_violations:
            return RuleResult(self.name, "violated", self.num_violations)
        if self.why_not is not None:
            return RuleResult(self.name, "not_run", why=self.why_not)
        if self.why_open is not None:
            return RuleResult(self.name, "inconclusive", why=self.why_open)
        return RuleResult(self.name, "ok")

    def add(self, what: str, *, step: int | None = None, row: int | None = None, **numbers: int | float) -> None:
        """Add one violation."""
        self.num_violations += 1
        if len(self.violations) < MAX_LISTED:
            self.violations.append(Violation(self.name, step, row, what, numbers))

    def add_where(
        self, bad: Column, chunk: RowChunk, names: tuple[str, ...], say: Callable[..., str], **more: Column
    ) -> None:
        """Add a violation for every row where `bad` is true. Its text is made from the numbers, passed by name."""
        places = np.flatnonzero(bad)
        if not len(places):
            return
        room = max(0, MAX_LISTED - len(self.violations))
        listed = places[:room]
        columns = {name: chunk.columns[name][listed].tolist() for name in ("step", *names)}
        columns.update({name: column[listed].tolist() for name, column in more.items()})
        for row, *values in zip(chunk.rows[listed].tolist(), *columns.values(), strict=True):
            numbers = dict(zip(columns, values, strict=True))
            step = numbers.pop("step")
            self.violations.append(Violation(self.name, step, row, say(**numbers), numbers))
        self.num_violations += len(places)


class TimelineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on a timeline that the caller sets, beyond those in the body."""

    preempt_threshold: float = 0.95
    max_bytes: int | None = None
    block_bytes: int | None = None

    @classmethod
    def checked(cls, preempt_threshold: float, max_bytes: int | None, block_bytes: int | None) -> TimelineLimits:
        """Return the limits. Raise ConfigError for a threshold outside [0, 1] or a size below 1."""
        if not (is_real(preempt_threshold) and preempt_threshold <= 1.0):
            what = f"must be a number from 0 to 1, got {brief(preempt_threshold)}"
            raise ConfigError(what, field="preempt_threshold")
        for field, value in (("max_bytes", max_bytes), ("block_bytes", block_bytes)):
            if value is not None and not (is_count(value) and value >= 1):
                raise ConfigError(f"must be a whole number from 1 to 2^53, got {brief(value)}", field=field)
        return cls(preempt_threshold=preempt_threshold, max_bytes=max_bytes, block_bytes=block_bytes)


class StepOrder(TimelineRule):
    """Steps and times never decrease; no step is repeated and none is missing.

    A row at rest has the number of the step before it. It may be followed by another such row with another time or
    other counts: memory that is kept between requests can be released at rest. `every`: the body's sampling interval of
    rows. If it is None, missing steps are noted and are not violations.
    """

    name = "step_order"

    def __init__(self, every: int | None) -> None:
        super().__init__()
        self._every = every
        self._last: tuple[int, float, bool] | None = None
        self._last_counts = [0, 0, 0]
        self._last_row = -1
        self._num_missing = 0
        self._first_missing: int | None = None

    def feed(self, chunk: RowChunk) -> None:
        """Compare each row with the row before it."""
        if not len(chunk.rows):
            return
        step, t_ms, rows = chunk.columns["step"], chunk.columns["t_ms"], chunk.rows
        is_rest = (chunk.columns["active_seqs"] == 0) & (chunk.columns["preempted_seqs"] == 0)
        is_new = self._last is None
        last_step, last_t_ms, last_is_rest = self._last or (int(step[0]), float(t_ms[0]), False)
        before_step = np.concatenate(([last_step], step[:-1]))
        before_t_ms = np.concatenate(([last_t_ms], t_ms[:-1]))
        before_is_rest = np.concatenate(([last_is_rest], is_rest[:-1]))
        self.add_where(
            step < before_step,
            chunk,
            (),
            lambda before_step: f"comes after step {before_step}",
            before_step=before_step,
        )
        self.add_where(
            t_ms < before_t_ms,
            chunk,
            ("t_ms",),
            lambda t_ms, before_t_ms: f"t_ms {t_ms!r} comes after {before_t_ms!r}",
            before_t_ms=before_t_ms,
        )
        counts = [chunk.columns[name] for name in ("used_blocks", "cached_blocks", "reserved_blocks")]
        is_same = t_ms == before_t_ms
        for last, count in zip(self._last_counts, counts, strict=True):
            is_same &= count == np.concatenate(([last], count[:-1]))
        is_again = (step == before_step) & ~(is_rest & ~(before_is_rest & is_same))
        is_again[0] &= not is_new
        self.add_where(is_again, chunk, ("t_ms",), lambda t_ms: "is there twice")
        gaps = step - before_step - 1
        gaps[np.diff(rows, prepend=self._last_row) != 1] = 0  # a malformed row between them was left out
        if self._every is not None:
            self.add_where(
                gaps >= self._every,
                chunk,
                (),
                lambda before_step, gap: f"comes after step {before_step}: {gap} steps between them are missing",
                before_step=before_step,
                gap=gaps,
            )
        elif (gaps > 0).any():
            self._num_missing += int(gaps[gaps > 0].sum())
            if self._first_missing is None:
                self._first_missing = int(before_step[np.argmax(gaps > 0)]) + 1
        self._last = int(step[-1]), float(t_ms[-1]), bool(is_rest[-1])
        self._last_counts = [int(count[-1]) for count in counts]
        self._last_row = int(rows[-1])

    def finish(self, top: dict[str, Any]) -> None:
        """Note missing steps if the body does not state whether rows were left out."""
        if self._num_missing:
            self.notes.append(
                f"{self._num_missing:,} steps have no row, the first of them step {self._first_missing}, and the body "
                'has no "every" to say that rows were left out'
            )


class Schema(TimelineRule):
    """The five keys of the body and the seven of every row are present, with the right type and sign.

    A body without rows may have null for a size that was not observed: such a timeline is empty, not wrong.
    """

    name = "schema"
    POSITIVE = ("block_size_tokens", "total_blocks")

    def __init__(self) -> None:
        super().__init__()
        self._has_rows = False

    def feed(self, chunk: RowChunk) -> None:
        """Add the complaints about the form of the next rows."""
        self._has_rows |= bool(len(chunk.rows) or chunk.complaints)
        for complaint in chunk.complaints:
            self.add(complaint.what, step=complaint.step, row=complaint.row)

    def look_at(self, top: dict[str, Any], twice: list[str], *, has_timeline: bool, is_cut: bool) -> None:
        """Judge the body without its rows. `twice`: the keys that it repeats."""
        for name in twice:
            self.add(f"{name} is given twice")
        if not has_timeline:
            self.add("timeline must be an array" if "timeline" in top else "timeline is missing")
        unobserved = []
        for name in self.POSITIVE:
            if name in top and top[name] is None and not self._has_rows:
                unobserved.append(name)
            elif name not in top:
                self.add(f"{name} is missing")
            elif not is_count(top[name]) or top[name] < 1:
                self.add(f"{name} must be a positive whole number, is {brief(top[name])}")
        if unobserved:
            self.why_open = f"{' and '.join(unobserved)} {'was' if len(unobserved) == 1 else 'were'} not observed"
        if not is_cut and "peak_used_pct" not in top:
            self.add("peak_used_pct is missing")
        if "peak_used_pct" in top and not is_real(top["peak_used_pct"]):
            self.add(f"peak_used_pct must be a number of at least 0, is {brief(top['peak_used_pct'])}")
        if not is_cut and "preemption_count" not in top:
            self.add("preemption_count is missing")
        if "preemption_count" in top and not is_count(top["preemption_count"]):
            self.add(f"preemption_count must be a whole number of at least 0, is {brief(top['preemption_count'])}")


class PreemptionTrigger(TimelineRule):
    """Preemption happens only under memory pressure: used_pct at or above the threshold.

    A step that lists its asks is judged by `preemption_needed` instead.
    """

    name = "preemption_trigger"

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self._threshold = threshold

    def feed(self, chunk: RowChunk) -> None:
        """Judge rows that preempted and do not list their asks."""
        columns, threshold = chunk.columns, self._threshold
        bad = (columns["preempted_seqs"] > 0) & ~(columns["used_pct"] >= threshold)
        if chunk.asked:
            bad[list(chunk.asked)] = False
        self.add_where(
            bad,
            chunk,
            ("preempted_seqs", "used_pct"),
            lambda preempted_seqs, used_pct: (
                f"preempted {preempted_seqs} at used_pct {used_pct!r}, below the threshold {threshold!r}"
            ),
        )


class PreemptionNeeded(TimelineRule):
    """Where a preempting step lists its asks: no ask fitted, and there is one per preemption."""

    name = "preemption_needed"

    def __init__(self, total: int | None) -> None:
        super().__init__()
        self._total = total
        self.why_not = "no step says what was asked for"

    def feed(self, chunk: RowChunk) -> None:
        """Judge rows that list their asks."""
        for place, asks in chunk.asked.items():
            self.why_not = None
            step, row = int(chunk.columns["step"][place]), int(chunk.rows[place])
            preempted, free = int(chunk.columns["preempted_seqs"][place]), int(chunk.columns["free_blocks"][place])
            free -= max(0, int(chunk.columns["withheld_blocks"][place]))
            if not preempted:
                self.add("says what was asked for, and preempted no request", step=step, row=row, asks=len(asks))
            elif preempted != len(asks):
                self.add(
                    f"preempted {preempted}, and says of {len(asks)} what was asked for",
                    step=step,
                    row=row,
                    preempted_seqs=preempted,
                    asks=len(asks),
                )
            for ask in asks:
                by = "" if ask.request is None else f" by {ask.request}"
                if ask.blocks <= ask.free_blocks:
                    self.add(
                        f"{ask.blocks} blocks were asked for{by} with {ask.free_blocks} free: it fitted",
                        step=step,
                        row=row,
                        blocks=ask.blocks,
                        free_blocks=ask.free_blocks,
                    )
                elif ask.model is None and self._total is not None and ask.blocks > self._total:
                    self.add(
                        f"{ask.blocks} blocks were asked for{by}, more than there are",
                        step=step,
                        row=row,
                        blocks=ask.blocks,
                        total_blocks=self._total,
                    )
                elif ask.model is None and ask.free_blocks < free:
                    self.add(
                        f"{ask.free_blocks} blocks were free when {ask.blocks} were asked for{by}, but the step never "
                        f"had fewer than {free} free",
                        step=step,
                        row=row,
                        blocks=ask.blocks,
                        free_blocks=ask.free_blocks,
                        step_free_blocks=free,
                    )

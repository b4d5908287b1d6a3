"""The rules, and their base, with the limits that the caller sets beyond those in the body.

Parts times blocks per part, over all groups, give the blocks that a row counts. The blocks of a group change by no more
than were allocated and freed. Blocks reserved by sessions are used but belong to no part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np

from kvarts.base.errors import ConfigError
from kvarts.proof.verify.chunk import Column, RowChunk, brief, is_count, is_real

__all__ = [
    "MAX_LISTED",
    "BlockConservation",
    "Boundedness",
    "Flux",
    "GroupParts",
    "Leak",
    "PeakConsistency",
    "PreemptionNeeded",
    "PreemptionTrigger",
    "RuleResult",
    "Schema",
    "Status",
    "StepOrder",
    "TimelineLimits",
    "TimelineRule",
    "UsedPctArithmetic",
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
    """Where a preempting step lists its asks: no ask fitted, and there is one per preemption.

    An ask for no blocks is for the place of a request of less priority.
    """

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
                if not ask.blocks:
                    continue
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
                elif ask.model is None and ask.free_blocks + (ask.promised_blocks or 0) < free:
                    self.add(
                        f"{ask.free_blocks} blocks were free when {ask.blocks} were asked for{by}, but the step never "
                        f"had fewer than {free} free",
                        step=step,
                        row=row,
                        blocks=ask.blocks,
                        free_blocks=ask.free_blocks,
                        step_free_blocks=free,
                    )


PCT_TOLERANCE = 1e-9


class BlockConservation(TimelineRule):
    """used + free = total in every step; cached blocks are among the free, and reserved blocks among the used.

    Withheld blocks were not used before the step.

    `tiers`: blocks of each tier below the device, by name, if the body gives them. Used plus cached blocks of a tier do
    not exceed its total. `listed`: the same where rows have lists with a number for each tier.
    """

    name = "block_conservation"

    def __init__(self, total: int, tiers: dict[str, int], listed: Sequence[tuple[Any, int]] = ()) -> None:
        super().__init__()
        self._listed = listed
        self._total = total
        self._tiers = tiers

    def feed(self, chunk: RowChunk) -> None:
        """Add up used and free blocks of each row, and compare cached blocks with free ones."""
        used, free = chunk.columns["used_blocks"], chunk.columns["free_blocks"]
        total = self._total
        self.add_where(
            used + free != total,
            chunk,
            ("used_blocks", "free_blocks"),
            lambda used_blocks, free_blocks: (
                f"used {used_blocks} + free {free_blocks} = {used_blocks + free_blocks}, not the total {total}"
            ),
        )
        # free is never negative, so used exceeds the total only where the sum is wrong too.
        self.add_where(
            chunk.columns["cached_blocks"] > free,
            chunk,
            ("cached_blocks", "free_blocks"),
            lambda cached_blocks, free_blocks: f"cached {cached_blocks} of {free_blocks} free",
        )
        withheld, allocated = chunk.columns["withheld_blocks"], chunk.columns["allocated"]
        # Blocks allocated in the step were free before it; without `allocated`, the whole pool may have been free.
        room = np.where(allocated >= 0, np.minimum(free + allocated, total), total)
        self.add_where(
            withheld > room,
            chunk,
            ("withheld_blocks",),
            lambda withheld_blocks, room: f"withheld {withheld_blocks}, and at most {room} were not used before it",
            room=room,
        )
        self.add_where(
            chunk.columns["reserved_blocks"] > used,
            chunk,
            ("reserved_blocks", "used_blocks"),
            lambda reserved_blocks, used_blocks: f"reserved {reserved_blocks} of {used_blocks} used",
        )
        for tier, tier_total in self._tiers.items():
            used_name, cached_name = f"{tier}_used_blocks", f"{tier}_cached_blocks"
            self.add_where(
                np.maximum(chunk.columns[used_name], 0) + np.maximum(chunk.columns[cached_name], 0) > tier_total,
                chunk,
                (used_name, cached_name),
                partial(_tier_overflow, tier, tier_total),
            )
        lists = [chunk.parts[f"tier_{what}_blocks"] for what in ("used", "cached")]
        if not any(numbers is not None for of_rows in lists for numbers in of_rows):
            return
        for name, of_rows in zip(("used", "cached"), lists, strict=True):
            wrong = [numbers is not None and len(numbers) != len(self._listed) for numbers in of_rows]
            say = partial(_wrong_length, f"tier_{name}_blocks", len(self._listed))
            self.add_where(np.array(wrong, np.bool_), chunk, (), say)
        for place, (tier, tier_total) in enumerate(self._listed):
            used_blocks, cached_blocks = (
                np.array([_number_at(numbers, place) for numbers in of_rows], np.int64) for of_rows in lists
            )
            self.add_where(
                used_blocks + cached_blocks > tier_total,
                chunk,
                (),
                partial(_tier_overflow, brief(tier), tier_total),
                used_blocks=used_blocks,
                cached_blocks=cached_blocks,
            )


def _number_at(numbers: list[int] | None, place: int) -> int:
    return 0 if numbers is None or place >= len(numbers) else numbers[place]


def _wrong_length(name: str, num_tiers: int) -> str:
    return f"{name} does not have a number for each of {num_tiers} tiers"


def _tier_overflow(tier: str, total: int, **counts: int) -> str:
    used, cached = counts.values()
    return f"{tier}: used {max(0, used)} + cached {max(0, cached)} are more than its total {total}"


class Flux(TimelineRule):
    """Used blocks change from row to row by allocated - freed."""

    name = "flux"

    def __init__(self, initial_used: int | None) -> None:
        super().__init__()
        self._before = initial_used
        self._row_before = -1
        self.why_not = "no two rows say what was allocated and freed"

    def feed(self, chunk: RowChunk) -> None:
        """Compare each row with the row before it, where both are present."""
        if not len(chunk.rows):
            return
        used, rows = chunk.columns["used_blocks"], chunk.rows
        allocated, freed = chunk.columns["allocated"], chunk.columns["freed"]
        before = np.concatenate(([0 if self._before is None else self._before], used[:-1]))
        known = (allocated >= 0) & (freed >= 0)
        known[0] &= self._before is not None
        known &= np.diff(rows, prepend=self._row_before) == 1  # not across a malformed row
        if known.any():
            self.why_not = None
        self.add_where(
            known & (used - before != allocated - freed),
            chunk,
            ("used_blocks", "allocated", "freed"),
            lambda used_blocks, allocated, freed, before: (
                f"used went from {before} to {used_blocks} with {allocated} allocated and {freed} freed"
            ),
            before=before,
        )
        self._before, self._row_before = int(used[-1]), int(rows[-1])


class Leak(TimelineRule):
    """At rest, with no active sequence, only reserved blocks are used, and blocks that are being copied to host memory,
    which holds room for as many. A floor that keeps rising is reported.
    """

    name = "leak"

    def __init__(self) -> None:
        super().__init__()
        self.why_not = "the timeline has no moment at rest"
        self._first: int | None = None
        self._last = 0
        self._num_idle = self._num_rises = self._num_falls = 0

    def feed(self, chunk: RowChunk) -> None:
        """Judge rows at rest, and count rises and falls of their use."""
        columns = chunk.columns
        idle = (columns["active_seqs"] == 0) & (columns["preempted_seqs"] == 0) & (columns["waiting"] <= 0)
        excused = np.maximum(columns["reserved_blocks"], 0) + np.maximum(columns["host_used_blocks"], 0)
        excused += np.array([_number_at(numbers, 0) for numbers in chunk.parts["tier_used_blocks"]], np.int64)
        left = np.maximum(columns["used_blocks"] - excused, 0)
        used = left[idle]
        if not len(used):
            return
        self.why_not = None
        if self._first is None:
            self._first = self._last = int(used[0])
        changes = np.diff(used, prepend=self._last)
        self._num_idle += len(used)
        self._num_rises += int((changes > 0).sum())
        self._num_falls += int((changes < 0).sum())
        self._last = int(used[-1])
        self.add_where(
            idle & (left > 0),
            chunk,
            ("used_blocks", "reserved_blocks"),
            lambda used_blocks, reserved_blocks: (
                f"{used_blocks} blocks are in use and no sequence is active"
                + (f"; {reserved_blocks} are reserved" if reserved_blocks > 0 else "")
            ),
        )

    def finish(self, top: dict[str, Any]) -> None:
        """Judge whether use at rest rose and never fell."""
        if self._num_rises > 1 and not self._num_falls and self._first is not None:
            self.add(
                f"the floor keeps rising: from {self._first} to {self._last} blocks "
                f"in {self._num_idle} moments at rest",
                first_used_blocks=self._first,
                last_used_blocks=self._last,
                idle_moments=self._num_idle,
            )


class UsedPctArithmetic(TimelineRule):
    """used_pct = used / total."""

    name = "used_pct_arithmetic"

    def __init__(self, total: int) -> None:
        super().__init__()
        self._total = total

    def feed(self, chunk: RowChunk) -> None:
        """Divide used blocks by the total in each row."""
        total = self._total
        used, used_pct = chunk.columns["used_blocks"], chunk.columns["used_pct"]
        self.add_where(
            ~(np.abs(used_pct - used / total) <= PCT_TOLERANCE),
            chunk,
            ("used_pct", "used_blocks"),
            lambda used_pct, used_blocks: (
                f"used_pct {used_pct!r}, but {used_blocks} / {total} = {used_blocks / total!r}"
            ),
        )


class PeakConsistency(TimelineRule):
    """peak_used_pct is the maximum of used_pct, preemption_count the sum of preempted_seqs."""

    name = "peak_consistency"

    def __init__(self) -> None:
        super().__init__()
        self._peak = 0.0
        self._num_preempted = 0

    def feed(self, chunk: RowChunk) -> None:
        """Keep the maximum and the sum so far."""
        self._peak = max(self._peak, float(chunk.columns["used_pct"].max(initial=0.0)))
        self._num_preempted += sum(chunk.columns["preempted_seqs"][chunk.columns["preempted_seqs"] > 0].tolist())

    def finish(self, top: dict[str, Any]) -> None:
        """Compare the maximum and the sum with the body's totals."""
        peak, count = top.get("peak_used_pct"), top.get("preemption_count")
        if not is_real(peak) or not is_count(count):
            self.why_not = "the totals are missing"
            return
        if abs(peak - self._peak) > PCT_TOLERANCE:
            self.add(
                f"peak_used_pct {peak!r}, but the largest used_pct is {self._peak!r}",
                peak_used_pct=peak,
                largest_used_pct=self._peak,
            )
        if count != self._num_preempted:
            self.add(
                f"preemption_count {count}, but preempted_seqs add up to {self._num_preempted}",
                preemption_count=count,
                sum_of_preempted_seqs=self._num_preempted,
            )


class GroupParts(TimelineRule):
    """Used and cached parts of all groups add up to used and cached blocks, in every row that lists parts.

    Up to the number of reserved blocks, used blocks may lie outside parts. `groups`: the entries of the body's
    kv_groups; `part_blocks` is the size of a part in blocks. The rule runs only for a body with kv_groups.
    """

    name = "group_parts"

    def __init__(self, groups: Any) -> None:
        super().__init__()
        self._sizes: list[int] = []
        self._before: list[int] | None = None
        self._row_before = -2
        self._reserved_before = 0
        if groups == []:
            self.why_not = "kv_groups says nothing of any group, or is too long to be kept"
            return
        if not isinstance(groups, list):
            self.add(f"kv_groups must be an array, is {brief(groups)}")
            return
        for index, group in enumerate(groups):
            blocks = group.get("part_blocks") if isinstance(group, dict) else None
            if not is_count(blocks) or not blocks:
                self.add(f"kv_groups: group {index} must have part_blocks, a positive whole number")
                return
            self._sizes.append(blocks)
        self.why_not = "no row says the parts of its groups"

    def feed(self, chunk: RowChunk) -> None:
        """Add up the parts of each row."""
        if not self._sizes:
            return
        for what in ("used", "cached"):
            said = chunk.parts[f"group_{what}_parts"]
            places = [place for place, parts in enumerate(said) if parts is not None]
            if places:
                self.why_not = None
                self._add_up(chunk, what, places, said)
        self._move(chunk)

    def _move(self, chunk: RowChunk) -> None:
        """Compare the used parts of each group with the row before: changes are bounded by allocated and freed.

        Rows with reserved blocks are skipped: a part taken from the reserve was used already.
        """
        said, sizes = chunk.parts["group_used_parts"], np.array(self._sizes, np.float64)
        wrong = [parts is None or len(parts) != len(sizes) for parts in said]
        rows = np.array([np.full(len(sizes), np.nan) if bad else parts for bad, parts in zip(wrong, said, strict=True)])
        rows = rows.reshape(len(said), len(sizes))
        if len(rows):
            first = np.full(len(sizes), np.nan) if self._before is None else np.array(self._before, np.float64)
            changes = np.diff(rows, axis=0, prepend=first[None]) * sizes
            allocated, freed = chunk.columns["allocated"], chunk.columns["freed"]
            reserved = np.maximum(chunk.columns["reserved_blocks"], 0)
            more, less = np.maximum(changes, 0.0).sum(axis=1), np.maximum(-changes, 0.0).sum(axis=1)
            known = (allocated >= 0) & (freed >= 0) & (reserved == 0)
            known &= (np.diff(chunk.rows, prepend=self._row_before) == 1) & ~np.isnan(more)
            known &= np.concatenate(([self._reserved_before == 0], reserved[:-1] == 0))
            for place in np.flatnonzero(known & ((more > allocated) | (less > freed))).tolist():
                added, taken = int(more[place]), int(less[place])
                self.add(
                    f"used: parts of {added} blocks were added and of {taken} taken away, with {allocated[place]} "
                    f"allocated and {freed[place]} freed",
                    step=int(chunk.columns["step"][place]),
                    row=int(chunk.rows[place]),
                    added_blocks=added,
                    taken_blocks=taken,
                )
            self._before = None if wrong[-1] else said[-1]
            self._row_before, self._reserved_before = int(chunk.rows[-1]), int(reserved[-1])

    def _add_up(self, chunk: RowChunk, what: str, places: list[int], said: list[list[int] | None]) -> None:
        blocks = chunk.columns[f"{what}_blocks"].tolist()
        sizes = self._sizes
        beside = [0] * len(blocks)
        if what == "used":
            beside = np.maximum(chunk.columns["reserved_blocks"], 0).tolist()
        if all(len(said[place] or ()) == len(sizes) for place in places):
            # Check all rows at once; look at single rows only on a mismatch. Floats cannot overflow on large numbers.
            rows = np.array([said[place] for place in places], np.float64) @ np.array(sizes, np.float64)
            most = np.array([blocks[place] for place in places], np.float64)
            if (rows <= most).all() and (rows >= most - [beside[place] for place in places]).all():
                return
        for place in places:
            parts = said[place] or []
            step, row = int(chunk.columns["step"][place]), int(chunk.rows[place])
            if len(parts) != len(sizes):
                self.add(f"{what}: {len(parts)} groups, not {len(sizes)}", step=step, row=row, groups=len(parts))
                continue
            num_blocks = sum(count * size for count, size in zip(parts, sizes, strict=True))
            if blocks[place] >= 0 and not 0 <= blocks[place] - num_blocks <= beside[place]:
                numbers = {"parts_blocks": num_blocks, f"{what}_blocks": blocks[place]}
                text = f"{what}: parts of all groups are {num_blocks} blocks, and {blocks[place]} are counted"
                if beside[place]:
                    text += f", {beside[place]} of them reserved"
                self.add(text, step=step, row=row, **numbers)


class Boundedness(TimelineRule):
    """Memory stays below `max_bytes` and does not grow after warm-up, which is the first quarter of the rows.

    Growth is the slope of a least-squares line through the mean use of up to 1024 stretches of equal length. It is a
    violation if it adds up to more than one block and more than 1 % of the mean over the stretches, and the slope is
    more than four standard errors.
    """

    name = "boundedness"
    MAX_STRETCHES = 1024
    MIN_ROWS = 64
    """Rows after warm-up below which growth is not judged."""

    def __init__(self, max_bytes: int, block_bytes: int | None) -> None:
        super().__init__()
        self._max_bytes = max_bytes
        self._block_bytes = block_bytes
        self._sums = np.zeros(0)
        self._width = 1  # rows per stretch
        self._partial_sum = 0.0
        self._partial_rows = 0
        self._num_rows = 0

    def feed(self, chunk: RowChunk) -> None:
        """Compare the bytes of each row with the bound, and add its use to the stretches."""
        used = chunk.columns["used_blocks"]
        self._num_rows += len(used)
        block_bytes, max_bytes = self._block_bytes, self._max_bytes
        if block_bytes is not None:
            self.add_where(
                used * float(block_bytes) > max_bytes,
                chunk,
                ("used_blocks",),
                lambda used_blocks: (
                    f"{used_blocks} blocks are {used_blocks * block_bytes} bytes, more than {max_bytes}"
                ),
            )
        self._collect(used.astype(np.float64))

    def _collect(self, used: Column) -> None:
        while len(used):
            room = self._width - self._partial_rows
            if self._partial_rows or len(used) < self._width:
                self._partial_sum += float(used[:room].sum())
                self._partial_rows += min(room, len(used))
                used = used[room:]
                if self._partial_rows == self._width:
                    self._push(np.array([self._partial_sum]))
                    self._partial_sum, self._partial_rows = 0.0, 0
            else:
                fits = min(len(used) // self._width, 2 * self.MAX_STRETCHES - len(self._sums))
                self._push(used[: fits * self._width].reshape(fits, self._width).sum(axis=1))
                used = used[fits * self._width :]

    def _push(self, sums: Column) -> None:
        self._sums = np.concatenate((self._sums, sums))
        if len(self._sums) >= 2 * self.MAX_STRETCHES:
            self._sums = self._sums[0::2] + self._sums[1::2]
            self._width *= 2

    def finish(self, top: dict[str, Any]) -> None:
        """Judge growth over the stretches after warm-up."""
        if self._block_bytes is None:
            self.why_not = "nothing says how many bytes a block has: give --set block_bytes"
        means = self._sums[len(self._sums) // 4 :] / self._width
        if len(means) * self._width < self.MIN_ROWS or len(means) < 8:
            self.why_open = f"{self._num_rows} rows are too few to tell a plateau from growth"
            return
        at = np.arange(len(means)) - (len(means) - 1) / 2
        spread = float(at @ at)
        slope = float(at @ means) / spread
        residuals = means - means.mean() - slope * at
        error = float(np.sqrt(residuals @ residuals / (len(means) - 2) / spread))
        growth = slope * len(means)
        if growth > max(1.0, 0.01 * float(means.mean())) and slope > 4 * error:
            self.add(
                f"use keeps growing after warm-up: by {growth:.1f} blocks over {len(means) * self._width} rows, "
                f"{slope / self._width * 1000:.3g} in 1,000",
                growth_blocks=growth,
                blocks_per_1000_rows=slope / self._width * 1000,
                rows=len(means) * self._width,
            )

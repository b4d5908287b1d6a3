"""The rules a KV timeline is judged by, each on its own, fed chunk by chunk.

A rule keeps what it needs of the rows before, and remembers violations with their step and their numbers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import numpy as np

from kvarts.errors import ConfigError
from kvarts.verify.chunk import Chunk, Column, brief, is_count, is_real
from kvarts.verify.rule import Rule

__all__ = ["Limits", "Schema", "make_rules"]

PCT_TOLERANCE = 1e-9
TIERS = ("host", "disk")


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a timeline beyond what it says of itself."""

    preempt_threshold: float = 0.95
    max_bytes: int | None = None
    block_bytes: int | None = None

    @classmethod
    def checked(cls, preempt_threshold: float, max_bytes: int | None, block_bytes: int | None) -> Limits:
        """Return them. Raise ConfigError for what is no share or no size."""
        if not (is_real(preempt_threshold) and preempt_threshold <= 1.0):
            what = f"must be a number from 0 to 1, got {brief(preempt_threshold)}"
            raise ConfigError(what, field="preempt_threshold")
        for field, value in (("max_bytes", max_bytes), ("block_bytes", block_bytes)):
            if value is not None and not (is_count(value) and value >= 1):
                raise ConfigError(f"must be a whole number from 1 to 2^53, got {brief(value)}", field=field)
        return cls(preempt_threshold=preempt_threshold, max_bytes=max_bytes, block_bytes=block_bytes)


class Schema(Rule):
    """The five keys of the body and the seven of every row are there, of the right type and sign."""

    name = "schema"
    POSITIVE = ("block_size_tokens", "total_blocks")

    def feed(self, chunk: Chunk) -> None:
        """Add what is wrong with the form of the next rows."""
        for complaint in chunk.complaints:
            self.add(complaint.what, step=complaint.step, row=complaint.row)

    def look_at(self, top: dict[str, Any], twice: list[str], *, has_timeline: bool, is_cut: bool) -> None:
        """Judge the body without its rows. `twice`: the keys that it gives twice."""
        for name in twice:
            self.add(f"{name} is given twice")
        if not has_timeline:
            self.add("timeline must be an array" if "timeline" in top else "timeline is missing")
        for name in self.POSITIVE:
            if name not in top:
                self.add(f"{name} is missing")
            elif not is_count(top[name]) or top[name] < 1:
                self.add(f"{name} must be a positive whole number, is {brief(top[name])}")
        if not is_cut and "peak_used_pct" not in top:
            self.add("peak_used_pct is missing")
        if "peak_used_pct" in top and not is_real(top["peak_used_pct"]):
            self.add(f"peak_used_pct must be a number of at least 0, is {brief(top['peak_used_pct'])}")
        if not is_cut and "preemption_count" not in top:
            self.add("preemption_count is missing")
        if "preemption_count" in top and not is_count(top["preemption_count"]):
            self.add(f"preemption_count must be a whole number of at least 0, is {brief(top['preemption_count'])}")


class BlockConservation(Rule):
    """used + free = total in every step; what is cached is free, and what is reserved is used.

    What is withheld was not used before the step.

    `tiers`: blocks of each tier below the device, by its name, as far as the body says; no more are used and cached.
    """

    name = "block_conservation"

    def __init__(self, total: int, tiers: dict[str, int]) -> None:
        super().__init__()
        self._total = total
        self._tiers = tiers

    def feed(self, chunk: Chunk) -> None:
        """Add up used and free blocks of each row, and compare cached ones with the free."""
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
        # What is free is never negative, so more than the total is used only where the sum is wrong as well.
        self.add_where(
            chunk.columns["cached_blocks"] > free,
            chunk,
            ("cached_blocks", "free_blocks"),
            lambda cached_blocks, free_blocks: f"cached {cached_blocks} of {free_blocks} free",
        )
        withheld, allocated = chunk.columns["withheld_blocks"], chunk.columns["allocated"]
        # What the step allocated was free before it; where that is not said, the whole pool may have been.
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


def _tier_overflow(tier: str, total: int, **counts: int) -> str:
    used, cached = counts.values()
    return f"{tier}: used {max(0, used)} + cached {max(0, cached)} are more than its total {total}"


class UsedPctArithmetic(Rule):
    """used_pct is used / total."""

    name = "used_pct_arithmetic"

    def __init__(self, total: int) -> None:
        super().__init__()
        self._total = total

    def feed(self, chunk: Chunk) -> None:
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


class PeakConsistency(Rule):
    """peak_used_pct is the maximum of used_pct, preemption_count the sum of preempted_seqs."""

    name = "peak_consistency"

    def __init__(self) -> None:
        super().__init__()
        self._peak = 0.0
        self._num_preempted = 0

    def feed(self, chunk: Chunk) -> None:
        """Keep the maximum and the sum so far."""
        self._peak = max(self._peak, float(chunk.columns["used_pct"].max(initial=0.0)))
        self._num_preempted += sum(chunk.columns["preempted_seqs"][chunk.columns["preempted_seqs"] > 0].tolist())

    def finish(self, top: dict[str, Any]) -> None:
        """Compare them with what the body says."""
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


class PreemptionTrigger(Rule):
    """Preemption only where memory was short: used_pct at or above the threshold.

    Where a step says what was asked for, `preemption_needed` judges it instead.
    """

    name = "preemption_trigger"

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self._threshold = threshold

    def feed(self, chunk: Chunk) -> None:
        """Judge rows that preempted and do not say what was asked for."""
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


class PreemptionNeeded(Rule):
    """Where a step says what was asked for when it preempted: it did not fit, and it is said for each preemption."""

    name = "preemption_needed"

    def __init__(self, total: int | None) -> None:
        super().__init__()
        self._total = total
        self.why_not = "no step says what was asked for"

    def feed(self, chunk: Chunk) -> None:
        """Judge rows that say what was asked for."""
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


class StepOrder(Rule):
    """Steps and times never go back; no step is there twice, and none is missing.

    A row at rest has the number of the step before it, and so has another one, at another time or with other counts:
    memory that is kept between requests can be given back at rest. `every`: what the body says of rows that were left
    out; None where it says nothing, and then steps that are missing are noted.
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

    def feed(self, chunk: Chunk) -> None:
        """Compare each row with the one before it."""
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
        gaps[np.diff(rows, prepend=self._last_row) != 1] = 0  # a row between them was left out
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
        """Note steps that are missing where the body does not say whether rows were left out."""
        if self._num_missing:
            self.notes.append(
                f"{self._num_missing:,} steps have no row, the first of them step {self._first_missing}, and the body "
                'has no "every" to say that rows were left out'
            )


class Flux(Rule):
    """used changes from row to row by allocated - freed."""

    name = "flux"

    def __init__(self, initial_used: int | None) -> None:
        super().__init__()
        self._before = initial_used
        self._row_before = -1
        self.why_not = "no two rows say what was allocated and freed"

    def feed(self, chunk: Chunk) -> None:
        """Compare each row with the one before it, where both are there."""
        if not len(chunk.rows):
            return
        used, rows = chunk.columns["used_blocks"], chunk.rows
        allocated, freed = chunk.columns["allocated"], chunk.columns["freed"]
        before = np.concatenate(([0 if self._before is None else self._before], used[:-1]))
        known = (allocated >= 0) & (freed >= 0)
        known[0] &= self._before is not None
        known &= np.diff(rows, prepend=self._row_before) == 1  # not across a row that was left out
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


class Leak(Rule):
    """At rest, with no sequence active, only what is reserved is used. What is left and keeps growing is named."""

    name = "leak"

    def __init__(self) -> None:
        super().__init__()
        self.why_not = "the timeline has no moment at rest"
        self._first: int | None = None
        self._last = 0
        self._num_idle = self._num_rises = self._num_falls = 0

    def feed(self, chunk: Chunk) -> None:
        """Judge rows at rest, and count in which direction their use changes."""
        columns = chunk.columns
        idle = (columns["active_seqs"] == 0) & (columns["preempted_seqs"] == 0) & (columns["waiting"] <= 0)
        left = columns["used_blocks"] - np.maximum(columns["reserved_blocks"], 0)
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
        """Judge whether use at rest only ever rose."""
        if self._num_rises > 1 and not self._num_falls and self._first is not None:
            self.add(
                f"the floor keeps rising: from {self._first} to {self._last} blocks "
                f"in {self._num_idle} moments at rest",
                first_used_blocks=self._first,
                last_used_blocks=self._last,
                idle_moments=self._num_idle,
            )


class Boundedness(Rule):
    """Memory stays below `max_bytes`, and after warm-up, the first quarter, it does not grow.

    Growth is judged by the slope of a least-squares line through the mean use of up to 1024 equal stretches: it must
    promise more than one block, and 1 % of the mean, over the stretches seen, and be more than four standard errors.
    """

    name = "boundedness"
    MAX_STRETCHES = 1024
    MIN_ROWS = 64
    """After warm-up."""

    def __init__(self, max_bytes: int, block_bytes: int | None) -> None:
        super().__init__()
        self._max_bytes = max_bytes
        self._block_bytes = block_bytes
        self._sums = np.zeros(0)
        self._width = 1  # rows a stretch
        self._partial_sum = 0.0
        self._partial_rows = 0
        self._num_rows = 0

    def feed(self, chunk: Chunk) -> None:
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
        """Judge the growth over the stretches after warm-up."""
        if self._block_bytes is None:
            self.why_not = "nothing says how many bytes a block has: give --block-bytes"
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


def make_rules(total: int | None, top: dict[str, Any], limits: Limits) -> list[Rule]:
    """Return all rules but the schema's. `total`: blocks, None where the body does not say."""

    def said(name: str) -> int | None:
        return top[name] if is_count(top.get(name)) else None

    tiers = {tier: blocks for tier in TIERS if (blocks := said(f"{tier}_total_blocks")) is not None}
    every = said("every")
    rules: list[Rule] = [
        _without_total(BlockConservation) if total is None else BlockConservation(total, tiers),
        _without_total(UsedPctArithmetic) if total is None else UsedPctArithmetic(total),
        PeakConsistency(),
        PreemptionTrigger(limits.preempt_threshold),
        PreemptionNeeded(total),
        StepOrder(every if every else None),
        Flux(said("initial_used_blocks")),
        Leak(),
    ]
    if limits.max_bytes is not None:
        rules.append(Boundedness(limits.max_bytes, limits.block_bytes or said("block_bytes")))
    return rules


def _without_total(of_total: type[Rule]) -> Rule:
    rule = Rule()
    rule.name = of_total.name
    rule.why_not = "total_blocks is not known"
    return rule

"""The rules on numbers of blocks: conservation, flux, leaks, totals, and the parts of KV groups.

Parts times blocks per part, over all groups, give the blocks that a row counts. The blocks of a group change by no more
than were allocated and freed. Blocks reserved by sessions are used but belong to no part.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from kvarts.verify.chunk import Column, RowChunk, brief, is_count, is_real
from kvarts.verify.rule import TimelineRule

__all__ = ["BlockConservation", "Boundedness", "Flux", "GroupParts", "Leak", "PeakConsistency", "UsedPctArithmetic"]

PCT_TOLERANCE = 1e-9


class BlockConservation(TimelineRule):
    """used + free = total in every step; cached blocks are among the free, and reserved blocks among the used.

    Withheld blocks were not used before the step.

    `tiers`: blocks of each tier below the device, by name, if the body gives them. Used plus cached blocks of a tier do
    not exceed its total.
    """

    name = "block_conservation"

    def __init__(self, total: int, tiers: dict[str, int]) -> None:
        super().__init__()
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

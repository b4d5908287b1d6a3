"""The rule of KV groups: parts times blocks per part, over all groups, give the blocks that a row counts.

The blocks of a group change by no more than were allocated and freed. Blocks reserved by sessions are used but belong
to no part.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvarts.verify.chunk import RowChunk, brief, is_count
from kvarts.verify.rule import TimelineRule

__all__ = ["GroupParts"]


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

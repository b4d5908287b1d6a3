"""The rule of KV groups: the parts of all groups, times the blocks of each, are the blocks that a row counts.

Blocks that sessions reserve are used, and no parts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvarts.verify.chunk import Chunk, brief, is_count
from kvarts.verify.rule import Rule

__all__ = ["GroupParts"]


class GroupParts(Rule):
    """Used and cached parts of every group add up to used and cached blocks, in every row that says them.

    Of used blocks as many as are reserved may be no parts. `groups`: what the body says of each; `part_blocks` are the
    blocks of a part. Only for a body that has groups.
    """

    name = "group_parts"

    def __init__(self, groups: Any) -> None:
        super().__init__()
        self._sizes: list[int] = []
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

    def feed(self, chunk: Chunk) -> None:
        """Add up the parts of each row."""
        if not self._sizes:
            return
        for what in ("used", "cached"):
            said = chunk.parts[f"group_{what}_parts"]
            places = [place for place, parts in enumerate(said) if parts is not None]
            if places:
                self.why_not = None
                self._add_up(chunk, what, places, said)

    def _add_up(self, chunk: Chunk, what: str, places: list[int], said: list[list[int] | None]) -> None:
        blocks = chunk.columns[f"{what}_blocks"].tolist()
        sizes = self._sizes
        beside = [0] * len(blocks)
        if what == "used":
            beside = np.maximum(chunk.columns["reserved_blocks"], 0).tolist()
        if all(len(said[place] or ()) == len(sizes) for place in places):
            # All at once, unless something is wrong: floats tell whether numbers are too large to be added up.
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

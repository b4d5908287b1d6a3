"""The schema rule: the keys of a body and of its rows."""

from __future__ import annotations

from typing import Any

from kvarts.verify.chunk import RowChunk, brief, is_count, is_real
from kvarts.verify.rule import TimelineRule

__all__ = ["Schema"]


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

"""Copies of stored blocks, as far as events distinguish copies from reports.

A second store of a block is a copy: vLLM computes the last block of a prompt of whole blocks again, and publishes it
again. Or it is a report: for a request in `kv_cache_report_mode` `full`, vLLM repeats the stores of the blocks that the
request reuses, in the same bytes. Reports begin at the first block of a prompt; copies rarely do.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from kvarts.doors.watch.decoding import BlockHash

__all__ = ["Copies", "Key", "Name"]

Key = tuple[str, int]
"""A medium, and a group of layers."""
Name = tuple[Key, BlockHash]


class Copies:
    """Owner of the numbers of copies of stored blocks: certain ones, and possible ones, which may be reports.

    Possible copies count as copies until `has_reports`. From then on a block is gone with its last certain copy, and
    its possible ones are remembered, of at most `max_blocks` blocks.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._stored: dict[Name, tuple[int, int]] = {}
        """Certain and possible copies of stored blocks that have other numbers than one and none."""
        self._gone: OrderedDict[Name, int] = OrderedDict()
        """Possible copies of blocks without certain ones, which are not among the stored blocks."""
        self.num_uncertain: Counter[Key] = Counter()
        """Stored blocks without a certain copy."""
        self.num_copies = 0
        """Second stores so far that are certainly copies."""
        self.num_possible = 0
        """Second stores so far that are copies or reports."""
        self.num_forgotten = 0
        """Blocks whose possible copies are not remembered any more."""
        self.has_reports = False

    def store(self, name: Name) -> None:
        """Record that a block is stored that was not."""
        if possible := self._gone.pop(name, 0):
            self._stored[name] = 1, possible

    def store_again(self, name: Name, *, may_be_report: bool) -> None:
        """Record a second store of a stored block."""
        certain, possible = self._stored.get(name, (1, 0))
        if may_be_report:
            self.num_possible += 1
        else:
            self.num_copies += 1
        if not certain:
            # Either was the block gone, and this is its store, or it was a copy, and this is one more or a report.
            self.num_uncertain[name[0]] -= 1
            self._stored[name] = 1, possible
        elif may_be_report:
            self._stored[name] = certain, possible + 1
        else:
            self._stored[name] = certain + 1, possible

    def remove(self, name: Name) -> bool:
        """Remove a copy of a stored block, a certain one first. Return whether the block is gone."""
        certain, possible = self._stored.pop(name, (1, 0))
        if certain:
            certain -= 1
            self.num_uncertain[name[0]] += not certain
        else:
            possible -= 1
        if certain or (possible and not self.has_reports):
            if (certain, possible) != (1, 0):
                self._stored[name] = certain, possible
            return False
        self.num_uncertain[name[0]] -= 1
        if possible:
            self._remember(name, possible)
        return True

    def remove_possible(self, name: Name) -> bool:
        """Remove a possible copy of a block that is not among the stored ones. Return whether there was one."""
        possible = self._gone.pop(name, 0)
        if possible > 1:
            self._remember(name, possible - 1)
        return possible > 0

    def is_possible(self, name: Name) -> bool:
        """Return whether a block that is not among the stored ones may have a copy."""
        return name in self._gone

    def forget(self) -> None:
        """Forget all copies."""
        self._stored.clear()
        self._gone.clear()
        self.num_uncertain.clear()

    def _remember(self, name: Name, possible: int) -> None:
        self._gone[name] = possible
        if len(self._gone) > self._max_blocks:
            self._gone.popitem(last=False)
            self.num_forgotten += 1

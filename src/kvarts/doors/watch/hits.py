"""Explains the hit ratio of an engine whose layers are in groups: which group limits what can be found.

A prompt resumes from the longest prefix whose KV is in the memory of every group: all of its blocks in groups of full
attention, the blocks of the last tokens in groups with a window, and the state at its end in groups with states. The
hash of a block stands for all tokens up to its end, so groups name the end of a prefix by the same hash, also if their
blocks differ in size.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvarts.doors.watch.claims import KEEP_ALL
from kvarts.doors.watch.decoding import BlockHash, Stored

__all__ = ["GroupOfLayers", "GroupedBlocks", "Hits"]

MAX_GROUPS = 64


class GroupOfLayers(msgspec.Struct, frozen=True, kw_only=True):
    """One group. `kind` and `span`: vLLM's name of its layers, and the tokens of their window, if events have them.

    `resumable_tokens`: the tokens of `Hits.stored_tokens` from whose end this group could resume.
    """

    group: int
    kind: str | None
    block_size: int
    span: int | None
    num_stored: int
    num_there: int
    resumable_tokens: int

    @property
    def words(self) -> str:
        """The group, as the subject of a sentence."""
        kind = "" if self.kind is None else f"{self.kind}, "
        return f"group {self.group} ({kind}blocks of {self.block_size} tokens)"


class Hits(msgspec.Struct, frozen=True, kw_only=True):
    """Hits of prompts, and what limits them. `num_queried_tokens` and `hit_share`: from the metrics, if known.

    `stored_tokens`: tokens of all longest prefixes in the group of full attention; tokens that prefixes share count in
    each. `resumable_tokens`: how many of them prompts that repeat these prefixes could find, in all groups together.
    """

    num_queried_tokens: int | None
    hit_share: float | None
    stored_tokens: int
    resumable_tokens: int
    groups: Sequence[GroupOfLayers]
    why: str

    def to_lines(self) -> list[str]:
        """Return the lines of the verdict."""
        parts = []
        if self.hit_share is not None:
            parts.append(f"prompts found {self.hit_share:.1%} of {self.num_queried_tokens:,} tokens")
        if self.why:
            parts.append(self.why)
        lines = [f"  {'; '.join(parts)}"] if parts else []
        if len(self.groups) > 1:
            lines += [
                f"    {group.words}: {group.num_stored:,} blocks stored, {group.num_there:,} there; it could resume "
                f"from {group.resumable_tokens:,} tokens"
                for group in self.groups
            ]
        return lines


class _Group:
    __slots__ = ("block_size", "kind", "num_stored", "span", "there")

    def __init__(self) -> None:
        self.kind: str | None = None
        self.span: int | None = None
        self.block_size = 0
        self.num_stored = 0
        self.there: dict[BlockHash, BlockHash | None] = {}
        """Blocks that are stored, with their parents."""


class GroupedBlocks:
    """Owner of the device's blocks by group, with the parents of those of full attention."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}

    def forget(self) -> None:
        """Forget all blocks."""
        for group in self._groups.values():
            group.there.clear()

    def store(self, event: Stored, new: Sequence[BlockHash]) -> None:
        """Record the blocks of an event that are `new`. Blocks without tokens belong to no prefix."""
        if not event.hashes or event.block_size <= 0:
            return
        group = self._groups.get(event.group)
        if group is None:
            if len(self._groups) >= MAX_GROUPS:
                return
            group = self._groups[event.group] = _Group()
        group.kind, group.span = event.kind or group.kind, event.span or group.span
        group.block_size = max(group.block_size, event.block_size)
        group.num_stored += len(new)
        if event.is_sparse:
            group.there.update(dict.fromkeys(new))
            return
        parents = [event.parent, *event.hashes[:-1]]
        are_new = frozenset(new)
        group.there.update(
            (name, parent) for name, parent in zip(event.hashes, parents, strict=True) if name in are_new
        )

    def remove(self, group: int, gone: Sequence[BlockHash]) -> None:
        """Record that blocks of a group are no longer there."""
        if group in self._groups:
            for name in gone:
                self._groups[group].there.pop(name, None)

    def explained(self, num_queried_tokens: int | None, hit_share: float | None) -> Hits | None:
        """Return the explanation; None if no block was ever stored. Takes time in proportion to all blocks."""
        if not self._groups:
            return None
        base = self._base()
        names = sorted(self._groups)
        ends = _Ends(self._groups[base], [self._groups[name] for name in names])
        groups = [
            GroupOfLayers(
                group=name,
                kind=group.kind,
                block_size=group.block_size,
                span=group.span,
                num_stored=group.num_stored,
                num_there=len(group.there),
                resumable_tokens=num_tokens,
            )
            for name, num_tokens in zip(names, ends.by_group, strict=True)
            for group in (self._groups[name],)
        ]
        return Hits(
            num_queried_tokens=num_queried_tokens,
            hit_share=hit_share,
            stored_tokens=ends.stored,
            resumable_tokens=ends.resumable,
            groups=groups,
            why=_why(groups, ends.stored, ends.resumable, hit_share),
        )

    def _base(self) -> int:
        """Return the group whose prefixes are compared: of full attention, else with the most blocks."""
        return max(
            sorted(self._groups),
            key=lambda name: (self._groups[name].kind in KEEP_ALL, len(self._groups[name].there)),
        )


class _Ends:
    """The ends of the prefixes of `base`, and how far `groups` could resume: alone and together, in tokens."""

    def __init__(self, base: _Group, groups: Sequence[_Group]) -> None:
        size = base.block_size
        depths: dict[BlockHash, int] = {}
        runs: list[dict[BlockHash, int]] = [{} for _ in groups]
        """Per group, the number of blocks in a row that it has at the end of each prefix."""
        best: dict[BlockHash, tuple[int, ...]] = {}
        """For each prefix, the tokens from which each group, and at last all together, could resume."""
        is_leaf = dict.fromkeys(base.there, True)
        for name, parent in base.there.items():  # parents are stored before their children
            if parent is not None:
                if parent not in depths:
                    is_leaf[name] = False  # it cannot be found: its parent is not there
                    continue
                is_leaf[parent] = False
            depth = depths[name] = size + (0 if parent is None else depths[parent])
            before = (0,) * (len(groups) + 1) if parent is None else best[parent]
            could = []
            for group, run in zip(groups, runs, strict=True):
                run[name] = (0 if parent is None else run[parent]) + 1 if name in group.there else 0
                could.append(run[name] >= _num_needed(group, base, depth))
            could.append(all(could))
            best[name] = tuple(depth if can else tokens for can, tokens in zip(could, before, strict=True))
        leaves = [name for name, is_last in is_leaf.items() if is_last]
        self.stored = sum(depths[name] for name in leaves)
        sums = [sum(tokens) for tokens in zip(*(best[name] for name in leaves), strict=True)] or [0] * (len(groups) + 1)
        *self.by_group, self.resumable = sums


def _num_needed(group: _Group, base: _Group, depth: int) -> int:
    """Return the blocks in a row that `group` needs at the end of a prefix of `depth` tokens."""
    if group is base or group.block_size != base.block_size:
        return 1  # of larger blocks, only the last one is looked for
    if group.kind in KEEP_ALL:
        return depth // base.block_size
    return 1 if not group.span else min(depth // base.block_size, -(-(group.span - 1) // base.block_size))


def _why(groups: Sequence[GroupOfLayers], stored: int, resumable: int, hit_share: float | None) -> str:
    """Return what limits the hits; empty if nothing does that the events show."""
    there = {group.group for group in groups}
    first_missing = next(number for number in range(len(there) + 1) if number not in there)
    if first_missing < max(there):
        return f"group {first_missing} has stored no block, and a hit needs blocks of every group"
    if len(groups) > 1 and resumable < stored:
        least = min(groups, key=lambda group: group.resumable_tokens)
        how = "none" if not least.resumable_tokens else f"those of {least.resumable_tokens:,} tokens"
        return (
            f"prompts that repeat all of it could resume from {resumable:,} of {stored:,} tokens: {least.words} has "
            f"{how} of the blocks that they would need"
        )
    largest = max(group.block_size for group in groups)
    if hit_share is not None and not hit_share and len(groups) > 1:
        return f"all of it could be found, in multiples of {largest} tokens: no prompt repeats so much"
    return ""

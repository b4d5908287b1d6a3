"""A naive pool of blocks for KV groups whose blocks differ in tokens, block by block, in the words of vLLM's managers.

Shares no code with `kvarts.core.kv`. A block is a number; the free blocks are a list, the next to be taken first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import lcm


@dataclass(frozen=True)
class Sized:
    """A KV group: blocks of `size` tokens; a `window`, or None for one that keeps all tokens."""

    size: int
    window: int | None = None

    def first_needed(self, num_tokens: int) -> int:
        """Return the first block with a token that the token after `num_tokens` attends to."""
        return 0 if self.window is None else max(0, num_tokens - self.window + 1) // self.size

    def num_blocks(self, num_tokens: int) -> int:
        """Return the blocks that hold so many tokens."""
        return -(-num_tokens // self.size)


@dataclass
class Sequence:
    """A running request: by group, its blocks in order, None for those that it has given back."""

    tokens: list[int]
    num_prompt: int
    branch: int
    tables: list[list[int | None]]
    num_seen: list[int]
    """By group, the blocks that were looked at to be named."""
    num_tokens: int = 0


@dataclass
class NaiveBlocks:
    """`total` blocks of `groups`. `interval`: retention, in tokens; None for all blocks of windows."""

    groups: list[Sized]
    total: int
    interval: int | None
    most_new: int
    free: list[int] = field(default_factory=list)
    names: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    """By block, its group and the tokens up to its end."""
    found: dict[tuple[int, tuple[int, ...]], list[int]] = field(default_factory=dict)
    holders: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = list(range(self.total))

    @property
    def unit(self) -> int:
        """The tokens that hits are a multiple of."""
        return lcm(*(group.size for group in self.groups))

    @property
    def num_cached(self) -> int:
        """Free blocks that can be found."""
        return sum(block in self.names for block in self.free)

    def blocks_for(self, index: int, tokens: list[int], length: int) -> list[int] | None:
        """Return the blocks of a group with which a sequence goes on after `length` tokens; None if one is missing."""
        group, blocks = self.groups[index], []
        for block in range(group.first_needed(length), length // group.size):
            named = self.found.get((index, tuple(tokens[: (block + 1) * group.size])))
            if not named:
                return None
            blocks.append(named[0])
        return blocks

    def match(self, tokens: list[int], most: int) -> tuple[int, int]:
        """Return the tokens of the longest hit, and those that the groups which keep all tokens know, if more."""
        lengths = range(most // self.unit * self.unit, -1, -self.unit)
        whole = [index for index, group in enumerate(self.groups) if group.window is None]
        known = next(each for each in lengths if all(self.blocks_for(i, tokens, each) is not None for i in whole))
        every = range(len(self.groups))
        hit = next(each for each in lengths if all(self.blocks_for(i, tokens, each) is not None for i in every))
        return hit, known if known > hit and self.interval is not None else 0

    def to_admit(self, tokens: list[int], hit: int, num_known: int, end: int) -> int:
        """Return the blocks that must be free to admit a request that computes up to `end` in its first step."""
        in_all = in_step = idle = 0
        for index, group in enumerate(self.groups):
            most, num_hit = group.num_blocks(num_known), hit // group.size
            if group.window is not None:
                most = min(most, group.num_blocks(group.window - 1 + self.most_new) + 1)
            in_all += max(0, most - num_hit)
            in_step += group.num_blocks(end) - num_hit
            idle += sum(block in self.free for block in self.blocks_for(index, tokens, hit) or ())
        return max(in_all, in_step) + idle

    def open(self, tokens: list[int], num_prompt: int, hit: int, branch: int) -> Sequence:
        """Begin a sequence after its hit."""
        tables: list[list[int | None]] = []
        for index, group in enumerate(self.groups):
            blocks = self.blocks_for(index, tokens, hit)
            assert blocks is not None
            for block in blocks:
                if block in self.free:
                    self.free.remove(block)
                self.holders[block] = self.holders.get(block, 0) + 1
            tables.append([*[None] * group.first_needed(hit), *blocks])
        return Sequence(tokens, num_prompt, branch, tables, [hit // group.size for group in self.groups], hit)

    def missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Return the blocks to take for tokens up to `num_tokens`."""
        tables = zip(self.groups, sequence.tables, strict=True)
        return sum(max(0, group.num_blocks(num_tokens) - len(table)) for group, table in tables)

    def take(self, sequence: Sequence, num_tokens: int) -> None:
        """Take the blocks of tokens up to `num_tokens`."""
        for group, table in zip(self.groups, sequence.tables, strict=True):
            while len(table) < group.num_blocks(num_tokens):
                block = self.free.pop(0)
                name = self.names.pop(block, None)
                if name is not None:
                    self.found[name].remove(block)
                self.holders[block] = 1
                table.append(block)

    def name(self, sequence: Sequence, num_tokens: int) -> None:
        """Name the blocks that the first `num_tokens` tokens fill, up to a multiple of the unit."""
        sequence.num_tokens = num_tokens
        for index, group in enumerate(self.groups):
            end = num_tokens // self.unit * self.unit // group.size
            for place in range(sequence.num_seen[index], end):
                block = sequence.tables[index][place]
                if block is not None and self.is_retained(sequence, group, place):
                    name = index, tuple(sequence.tokens[: (place + 1) * group.size])
                    self.names[block] = name
                    self.found.setdefault(name, []).append(block)
            sequence.num_seen[index] = max(end, sequence.num_seen[index])

    def is_retained(self, sequence: Sequence, group: Sized, place: int) -> bool:
        """Return whether a block of a group can be found once it is full."""
        if group.window is None or self.interval is None:
            return True
        need = -(-(group.window - 1) // group.size)
        ends = [(sequence.num_prompt - 1) // self.unit * self.unit, sequence.branch]
        if self.interval:
            ends += range(self.interval, len(sequence.tokens) + self.interval * (need + 1), self.interval)
        return any(end // group.size - need <= place < end // group.size for end in ends)

    def release(self, block: int) -> tuple[int, bool] | None:
        """Give up one hold; return the block and whether it can be found if nothing holds it any more."""
        self.holders[block] -= 1
        return None if self.holders[block] else (block, block in self.names)

    def _give(self, blocks: list[int]) -> None:
        gone = [each for each in map(self.release, blocks) if each is not None]
        self.free[:0] = [block for block, is_named in gone if not is_named]
        self.free += [block for block, is_named in gone if is_named]

    def settle(self, sequence: Sequence, num_tokens: int) -> None:
        """Give back the blocks that no token from `num_tokens` on attends to."""
        for group, table in zip(self.groups, sequence.tables, strict=True):
            places = [
                place for place in range(min(group.first_needed(num_tokens), len(table))) if table[place] is not None
            ]
            blocks = [table[place] for place in reversed(places)]
            for place in places:
                table[place] = None
            self._give([block for block in blocks if block is not None])

    def close(self, sequence: Sequence) -> None:
        """Give back everything, group by group, the last block first."""
        for table in sequence.tables:
            self._give([block for block in reversed(table) if block is not None])

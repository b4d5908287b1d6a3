"""A ledger of parts: a page has a part in every KV group, and all parts draw on one memory. One part at a time.

It shares no code with the cache that it is held against, and knows nothing of the engine: what layers see it works out
token by token, and what is evicted is the part that was released longest ago.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from itertools import accumulate
from typing import Literal

import msgspec

__all__ = ["AuditedGroup", "AuditedPart", "PartLedger"]


class AuditedGroup(msgspec.Struct, frozen=True):
    """A KV group as the audit has to know it: what its layers keep, and the blocks of a part.

    `span`: tokens of a window or a chunk, None for others; `sink`: first tokens that a window keeps as well.
    """

    kind: Literal["full", "latent", "window", "chunk", "state"]
    part_blocks: int
    span: int | None = None
    sink: int = 0

    def __str__(self) -> str:
        return self.kind if self.span is None else f"{self.kind} {self.span}"

    @property
    def is_bounded(self) -> bool:
        """Whether its parts go back while their sequence runs."""
        return self.kind in ("window", "chunk")

    def seen(self, position: int) -> tuple[range, range]:
        """Return what the token at `position`, and with it all later ones, sees of the positions before it."""
        if self.span is None:
            return range(0), range(position)
        first = position // self.span * self.span if self.kind == "chunk" else position + 1 - self.span
        return range(min(self.sink, position)), range(max(0, first), position)

    def needed(self, num_tokens: int, page_size: int) -> tuple[range, range]:
        """Return the pages of the first `num_tokens` tokens that tokens from there on need: of the sink, and after it.

        The page that the next token goes to is one of these, unless it begins there. A snapshot of a state is read at
        the end of its page only.
        """
        if self.kind == "state":
            page = num_tokens // page_size - 1
            return range(0), range(page, page + 1) if num_tokens and num_tokens % page_size == 0 else range(0)
        sink, others = self.seen(num_tokens)
        first = others.start // page_size
        return range(min(first, -(-sink.stop // page_size))), range(first, -(-num_tokens // page_size))


class AuditedPart:
    """The part of a page in a group, or a state. `digest`: the page, once it can be found."""

    __slots__ = ("digest", "group", "is_kept", "refs")

    def __init__(self, group: int, *, is_kept: bool) -> None:
        self.group = group
        self.is_kept = is_kept
        self.digest: bytes | None = None
        self.refs = 1


class PartLedger:
    """Owner of the parts in `num_blocks` blocks. `keeps_all`: also what windows leave behind can be found.

    `happened`: what has happened to parts that can be found, until it is taken from there: what, the group, the page,
    and which of several copies.
    """

    def __init__(self, groups: tuple[AuditedGroup, ...], num_blocks: int, *, keeps_all: bool) -> None:
        self.groups = groups
        self.num_blocks = num_blocks
        self.num_empty = num_blocks
        self.copies: dict[tuple[int, bytes], list[AuditedPart]] = {}
        """By group and page, the oldest first."""
        self.num_resident: dict[bytes, int] = {}
        """Parts of each page that can be found, in all groups."""
        self.happened: deque[tuple[str, int, bytes, int | None]] = deque()
        self.num_reserved = 0
        """Blocks that were taken for what is no part."""
        self.num_promised = 0
        """Free blocks that are kept for requests which wait for a load."""
        self._keeps_all = keeps_all
        self._idle: OrderedDict[AuditedPart, None] = OrderedDict()
        self._num_used = [0] * len(groups)
        self._num_cached = [0] * len(groups)

    @property
    def num_free(self) -> int:
        """Blocks that anyone can take: empty, or of parts that nothing holds."""
        return self.num_blocks - self.num_used - self.num_promised

    @property
    def num_used(self) -> int:
        """Blocks of parts that are held, and blocks that are reserved."""
        held = sum(count * group.part_blocks for count, group in zip(self._num_used, self.groups, strict=True))
        return held + self.num_reserved

    def counts(self) -> tuple[int, ...]:
        """Return the parts held and the parts cached, one pair a group."""
        return tuple(count for pair in zip(self._num_used, self._num_cached, strict=True) for count in pair)

    def name(self, group: int | None) -> str:
        """Name a group, for people."""
        if group is None or not 0 <= group < len(self.groups):
            return f"group {group}, which is not there"
        return f"group {group} ({self.groups[group]})"

    def has(self, group: int, digest: bytes) -> bool:
        """Return whether a part can be found."""
        return (group, digest) in self.copies

    def reach(self, digests: list[bytes], page_size: int) -> tuple[int, list[int]]:
        """Return from how many of these pages all groups can go on, and from how many each by itself.

        As far as any group has the last of them.
        """
        num_pages = len(digests)
        while num_pages and digests[num_pages - 1] not in self.num_resident:
            num_pages -= 1
        lacks = [
            [0, *accumulate((group, digest) not in self.copies for digest in digests[:num_pages])]
            for group in range(len(self.groups))
        ]
        longest = [0] * len(self.groups)
        common = 0
        for length in range(1, num_pages + 1):
            can_go_on = digests[length - 1] in self.num_resident
            for index, group in enumerate(self.groups):
                missing = lacks[index]
                pages = group.needed(length * page_size, page_size)
                if any(part and missing[part.stop] > missing[part.start] for part in pages):
                    can_go_on = False
                else:
                    longest[index] = length
            if can_go_on:
                common = length
        return common, longest

    def take(self, group: int) -> AuditedPart | None:
        """Take a part; for that, evict what was released longest ago. None if it does not fit."""
        num_blocks = self.groups[group].part_blocks
        if num_blocks > self.num_free:
            return None
        while self.num_empty < num_blocks:
            self._evict(next(iter(self._idle)))
        self.num_empty -= num_blocks
        self._num_used[group] += 1
        return AuditedPart(group, is_kept=self._keeps_all or not self.groups[group].is_bounded)

    def reserve(self, num_blocks: int) -> bool:
        """Take blocks for what is no part, or give some back, until there are `num_blocks`; return whether they fit."""
        num_new = num_blocks - self.num_reserved
        if num_new > self.num_free:
            return False
        while self.num_empty < num_new:
            self._evict(next(iter(self._idle)))
        self.num_empty -= num_new
        self.num_reserved = num_blocks
        return True

    def hold(self, part: AuditedPart) -> None:
        """Hold a part that can be found."""
        if not part.refs:
            del self._idle[part]
            self._num_cached[part.group] -= 1
            self._num_used[part.group] += 1
        part.refs += 1

    def publish(self, part: AuditedPart, digest: bytes) -> bool:
        """Let a part be found as that of a page. Return whether no other is."""
        copies = self.copies.setdefault((part.group, digest), [])
        copies.append(part)
        part.digest = digest
        self.num_resident[digest] = self.num_resident.get(digest, 0) + 1
        return len(copies) == 1

    def release(self, part: AuditedPart, *, goes_first: bool = False) -> None:
        """End a hold. What nothing holds is cached if it can be found and is kept; else it is empty.

        `goes_first`: it is evicted next.
        """
        part.refs -= 1
        if part.refs:
            return
        self._num_used[part.group] -= 1
        if part.digest is not None and part.is_kept:
            self._idle[part] = None
            if goes_first:
                self._idle.move_to_end(part, last=False)
            self._num_cached[part.group] += 1
            return
        if part.digest is not None:
            self._forget(part, "dropped")
        self.num_empty += self.groups[part.group].part_blocks

    def clear(self) -> None:
        """Evict all that nothing holds."""
        for part in list(self._idle):
            self._evict(part)

    def _evict(self, part: AuditedPart) -> None:
        del self._idle[part]
        self._num_cached[part.group] -= 1
        self._forget(part, "evicted")
        self.num_empty += self.groups[part.group].part_blocks

    def _forget(self, part: AuditedPart, what: str) -> None:
        digest = part.digest
        assert digest is not None
        copies = self.copies[part.group, digest]
        copy = None if len(copies) == 1 else copies.index(part)
        copies.remove(part)
        if not copies:
            del self.copies[part.group, digest]
        self.num_resident[digest] -= 1
        if not self.num_resident[digest]:
            del self.num_resident[digest]
        self.happened.append((what, part.group, digest, copy))

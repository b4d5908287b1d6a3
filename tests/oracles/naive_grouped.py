"""A prefix cache with KV groups, part by part, of lists and dictionaries: looks at every token that a token attends to.

What nothing holds and can be found is one list, the least recently released first. `keeps_all`: parts that left a
window are in it too, as in vLLM; else only those that the token after a marked end needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from kvarts.core.kv.layers import KvLayer

from oracles.naive_kv_groups import seen_by

__all__ = ["NaiveGroups", "NaivePart", "NaiveSequence"]

Name = tuple[str | None, tuple[int, ...]]
"""A full page: the tenant, and every token from the first to the end of the page."""


@cache
def needed_pages(layer: KvLayer, num_tokens: int, page_size: int) -> frozenset[int]:
    """Return the pages of the first `num_tokens` tokens that a token from there on needs."""
    if has_state(layer):
        ends = num_tokens % page_size == 0 and num_tokens > 0
        return frozenset({num_tokens // page_size - 1} if ends else ())
    seen: set[int] = set()
    for position in range(num_tokens, num_tokens + (layer.span or 0) + 1):
        seen |= {other for other in seen_by(layer, position) if other < num_tokens}
    return frozenset(position // page_size for position in seen)


def has_state(layer: KvLayer) -> bool:
    """Return whether a sequence has one state of `layer`, and leaves snapshots of it."""
    return layer.kind == "state" and layer.span is None


def is_bounded(layer: KvLayer) -> bool:
    """Return whether sequences release parts of `layer` while they run."""
    return layer.kind in ("window", "chunk") or (layer.kind == "state" and layer.span is not None)


def is_made(token: object) -> bool:
    """Return whether only the request that generated a token knows it."""
    return isinstance(token, tuple) and token[0] == "made"


@dataclass(eq=False)
class NaivePart:
    """The part of a page in a group; `name` once it can be found.

    `stores`: how many stores to a tier below read it. `is_passed`: its last sequence went on when it released it.
    """

    group: int
    name: Name | None = None
    refs: int = 1
    is_kept: bool = True
    stores: int = 0
    is_passed: bool = False


@dataclass(eq=False)
class NaiveSequence:
    """A sequence, and the parts that it holds, by group and page; `states` of groups of states."""

    tokens: list[int]
    salt: str | None
    num_tokens: int
    parts: list[dict[int, NaivePart]]
    states: dict[int, NaivePart] = field(default_factory=dict)
    num_prompt: int = 0
    junction: int = 0
    """The first pages that layers which keep all tokens have, if more were found there than in all layers."""
    num_noted: int = -1
    """The tokens up to which tiers below know that pages are full; those it begins with at first."""

    def __post_init__(self) -> None:
        self.num_noted = self.num_tokens


@dataclass
class NaiveGroups:
    """Parts of all groups in one memory. `groups`: what a layer keeps, and the bytes of a part."""

    groups: list[tuple[KvLayer, int]]
    page_size: int
    empty_bytes: int
    keeps_all: bool = True
    released: list[NaivePart] = field(default_factory=list)
    copies: dict[tuple[int, Name], list[NaivePart]] = field(default_factory=dict)
    evicted: list[tuple[int, Name]] = field(default_factory=list)
    published: set[tuple[int, Name]] = field(default_factory=set)
    """By group, the pages that became findable since this was cleared."""
    interval: int | None = None
    """Tokens between places before which windows and states retain parts, besides ends of prompts and junctions."""
    aligns: bool = False
    """Whether of the pages of a chunk only the last one has a state, where states are kept after pages."""

    def is_aligned(self, layer: KvLayer) -> bool:
        """Return whether a layer keeps states where chunks end."""
        return self.aligns and layer.kind == "state" and is_bounded(layer)

    def with_parts(self, layer: KvLayer, new: set[int]) -> list[int]:
        """Return those of the pages that a chunk begins in which it takes a part of a layer."""
        return sorted(new)[-1:] if self.is_aligned(layer) else sorted(new)

    def bytes_of(self, part: NaivePart) -> int:
        """Return the bytes of a part."""
        return self.groups[part.group][1]

    def free_bytes(self) -> int:
        """Return the bytes that can be taken now."""
        return self.empty_bytes + sum(self.bytes_of(part) for part in self.released if not part.stores)

    def name(self, tokens: list[int], salt: str | None, page: int) -> Name:
        """Return the name of a page."""
        return salt, tuple(tokens[: (page + 1) * self.page_size])

    def needed(self, layer: KvLayer, num_tokens: int) -> frozenset[int]:
        """Return the pages of the first `num_tokens` tokens that a token from there on needs."""
        return needed_pages(layer, num_tokens, self.page_size)

    def hit(self, tokens: list[int], salt: str | None, limit: int) -> int:
        """Return the longest prefix, in pages, that every group can go on from; some group has its last page."""
        for length in range(limit, 0, -1):
            last = self.name(tokens, salt, length - 1)
            if any((index, last) in self.copies for index in range(len(self.groups))) and all(
                (index, self.name(tokens, salt, page)) in self.copies
                for index, (layer, _) in enumerate(self.groups)
                for page in self.needed(layer, length * self.page_size)
            ):
                return length
        return 0

    def branch(self, tokens: list[int], salt: str | None, limit: int) -> int:
        """Return the number of pages after which these tokens leave others whose next page is there; 0 for none.

        A next page with a token that only its own request knows does not count.
        Layers that keep all tokens have all pages up to there.
        """
        whole = [index for index, (layer, _) in enumerate(self.groups) if layer.kind in ("full", "latent")]
        if not whole or not any(has_state(layer) for layer, _ in self.groups):
            return 0
        length = 0
        while length < limit and all((index, self.name(tokens, salt, length)) in self.copies for index in whole):
            length += 1
        if not 0 < length < limit:
            return 0
        mine, common = self.name(tokens, salt, length)[1], tuple(tokens[: length * self.page_size])
        for index, (tenant, others) in self.copies:
            is_other = index in whole and tenant == salt and len(others) == len(mine) and others != mine
            is_other = is_other and not any(map(is_made, others))
            if is_other and others[: len(common)] == common:
                return length
        return 0

    def take(self, group: int) -> NaivePart:
        """Take a part; evict as many as that needs, the least recently released first."""
        self.take_bytes(self.groups[group][1])
        return NaivePart(group, is_kept=self.keeps_all or not is_bounded(self.groups[group][0]))

    def release(self, part: NaivePart, *, is_passed: bool = False) -> None:
        """End a hold of a part. `is_passed`: its sequence goes on."""
        part.refs -= 1
        part.is_passed = is_passed
        if part.refs == 0 and part.name is not None and part.is_kept:
            self.released += [] if part.stores and is_passed else [part]
        elif part.refs == 0:
            self.drop(part)

    def drop(self, part: NaivePart) -> None:
        """Nothing uses a part, and it is not kept."""
        if part.stores:
            return
        if part.name is not None:
            self.lose(part)
        self.empty_bytes += self.bytes_of(part)

    def lose(self, part: NaivePart) -> None:
        """A part can be found no more."""
        assert part.name is not None
        self.copies[part.group, part.name].remove(part)
        if not self.copies[part.group, part.name]:
            del self.copies[part.group, part.name]

    def retains(self, sequence: NaiveSequence, group: int, page: int) -> bool:
        """Return whether others may find a part: a token needs it that comes after a place where sequences resume."""
        layer = self.groups[group][0]
        if self.interval is None or layer.kind not in ("window", "state"):
            return True
        ends = [(sequence.num_prompt - 1) // self.page_size, sequence.junction]
        if self.interval:
            most = (page + 2) * self.page_size + (layer.span or 1) + self.interval
            ends += [end // self.page_size for end in range(0, most, self.interval)]
        return any(page in self.needed(layer, end * self.page_size) for end in ends)

    def publish(self, part: NaivePart, name: Name) -> None:
        """Make a part findable."""
        part.name = name
        self.published.add((part.group, name))
        self.copies.setdefault((part.group, name), []).append(part)

    def open(
        self, tokens: list[int], salt: str | None, length: int, num_new: int, *, is_end: bool = False
    ) -> NaiveSequence | None:
        """Begin a sequence of which the first `length` pages were found."""
        sequence = self.found(tokens, salt, length)
        idle = [part for parts in sequence.parts for part in parts.values() if part.refs == part.stores == 0]
        if sum(map(self.bytes_of, idle)) + self.missing(sequence, num_new) > self.free_bytes():
            return None
        self.hold(sequence)
        self.grow(sequence, num_new, is_end)
        return sequence

    def found(self, tokens: list[int], salt: str | None, length: int) -> NaiveSequence:
        """Return a sequence that begins with the first `length` pages, and holds nothing yet."""
        sequence = NaiveSequence(tokens, salt, length * self.page_size, [])
        for index, (layer, _) in enumerate(self.groups):
            pages = sorted(self.needed(layer, sequence.num_tokens))
            sequence.parts.append({page: self.copies[index, self.name(tokens, salt, page)][0] for page in pages})
        return sequence

    def hold(self, sequence: NaiveSequence) -> None:
        """Hold the parts of a sequence."""
        for parts in sequence.parts:
            for part in parts.values():
                if part in self.released:
                    self.released.remove(part)
                part.refs += 1

    def take_bytes(self, num_bytes: int) -> None:
        """Take memory that is no part."""
        while self.empty_bytes < num_bytes:
            part = next(part for part in self.released if not part.stores)
            self.released.remove(part)
            assert part.name is not None
            self.lose(part)
            self.evicted.append((part.group, part.name))
            self.empty_bytes += self.bytes_of(part)
        self.empty_bytes -= num_bytes

    def missing(self, sequence: NaiveSequence, num_new: int) -> int:
        """Return the bytes that the next tokens need and the sequence does not have."""
        asked = 0
        old = {position // self.page_size for position in range(sequence.num_tokens)}
        new = {position // self.page_size for position in range(sequence.num_tokens + num_new)} - old
        for index, (layer, part_bytes) in enumerate(self.groups):
            if has_state(layer):
                asked += part_bytes if index not in sequence.states else 0
            else:
                asked += part_bytes * len(self.with_parts(layer, new))
        return asked

    def grow(self, sequence: NaiveSequence, num_new: int, is_end: bool, *, is_midway: bool = False) -> None:
        """Take parts for the next tokens; what is full then can be found. `is_midway`: the prompt is longer."""
        old = {position // self.page_size for position in range(sequence.num_tokens)}
        sequence.num_tokens += num_new
        new = {position // self.page_size for position in range(sequence.num_tokens)} - old
        for index, (layer, _) in enumerate(self.groups):
            if has_state(layer):
                if index not in sequence.states:
                    sequence.states[index] = self.take(index)
                continue
            for page in self.with_parts(layer, new - set(sequence.parts[index])):  # others were taken before
                sequence.parts[index][page] = self.take(index)
        for page in range(sequence.num_tokens // self.page_size):
            for index, (layer, _) in enumerate(self.groups):
                part = sequence.parts[index].get(page)
                if has_state(layer) or part is None or part.name is not None:
                    continue
                if self.retains(sequence, index, page):
                    self.publish(part, self.name(sequence.tokens, sequence.salt, page))
        if is_end:
            self.keep_tails(sequence, is_prompt=not is_midway)
        if is_end and sequence.num_tokens % self.page_size == 0:
            self.keep_snapshots(sequence)

    def tail(self, layer: KvLayer, num_tokens: int, *, is_prompt: bool) -> frozenset[int]:
        """Return what the token after the last full page needs.

        And what the same prompt needs, of all these tokens: the last one is always computed again.
        """
        tail = self.needed(layer, num_tokens // self.page_size * self.page_size)
        if is_prompt and num_tokens:
            tail |= self.needed(layer, (num_tokens - 1) // self.page_size * self.page_size)
        return tail

    def keep_tails(self, sequence: NaiveSequence, *, is_prompt: bool = False) -> None:
        """Keep the tail of what is computed."""
        for index, (layer, _) in enumerate(self.groups):
            for page in self.tail(layer, sequence.num_tokens, is_prompt=is_prompt) if is_bounded(layer) else ():
                if page in sequence.parts[index]:
                    sequence.parts[index][page].is_kept = True

    def keep_snapshots(self, sequence: NaiveSequence) -> None:
        """Copy the states to parts that can be found, if they fit."""
        name = self.name(sequence.tokens, sequence.salt, sequence.num_tokens // self.page_size - 1)
        missing = [
            index
            for index, (layer, _) in enumerate(self.groups)
            if has_state(layer) and (index, name) not in self.copies
        ]
        if sum(self.groups[index][1] for index in missing) <= self.free_bytes():
            for index in missing:
                part = self.take(index)
                self.publish(part, name)
                self.release(part)

    def advance(self, sequence: NaiveSequence, num_new: int, *, is_end: bool = False) -> bool:
        """Give back what no later token needs, then take what the next tokens need, if that fits."""
        self.settle(sequence)
        if self.missing(sequence, num_new) > self.free_bytes():
            return False
        self.grow(sequence, num_new, is_end)
        return True

    def settle(self, sequence: NaiveSequence) -> None:
        """Give back what no later token needs."""
        for index, (layer, _) in enumerate(self.groups):
            needed = set(self.needed(layer, sequence.num_tokens))
            if sequence.num_tokens % self.page_size:
                needed.add(sequence.num_tokens // self.page_size)  # the next token is written there
            for page in sorted(sequence.parts[index], reverse=True):
                if page not in needed:
                    self.release(sequence.parts[index].pop(page), is_passed=True)

    def close(self, sequence: NaiveSequence) -> None:
        """Release everything, group by group, the deepest first."""
        self.keep_tails(sequence)
        for index, parts in enumerate(sequence.parts):
            if index in sequence.states:
                self.release(sequence.states[index])
            for page in sorted(parts, reverse=True):
                self.release(parts[page])

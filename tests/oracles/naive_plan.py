"""A page list, one page at a time: what cache curves and the optimum are held against; and the same of parts."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from kvarts.core.kv.layers import KvLayer
from kvarts.sim.traffic.trace import Trace, TraceRequest, spell

from oracles.naive_grouped import has_state, is_bounded, needed_pages

Page = tuple[str | None, tuple[int, ...]]
"""The tenant, and all tokens up to the end of the page."""


class NaiveRequest:
    """`pages`: what it leaves behind, from the first on. `num_findable`: how many of these it may find."""

    def __init__(self, trace: Trace, request: TraceRequest, page_size: int, *, owner: int, count_outputs: bool) -> None:
        units = np.frombuffer(spell(request.units), np.uint64).tolist()
        tokens = [unit for unit in units for _ in range(trace.unit_tokens)][: request.num_prompt_tokens]
        if request.output_units is not None:
            tokens += np.frombuffer(spell(request.output_units), np.uint64).tolist()
        elif count_outputs:
            tokens += [-1 - owner] * request.num_output_tokens
        num_computed = min(len(tokens), request.num_prompt_tokens + request.num_output_tokens - 1)
        self.pages: list[Page] = [
            (request.tenant, tuple(tokens[:end])) for end in range(page_size, num_computed + 1, page_size)
        ]
        self.num_findable = (request.num_prompt_tokens - 1) // page_size


def naive_requests(trace: Trace, page_size: int, *, count_outputs: bool = False) -> list[NaiveRequest]:
    return [
        NaiveRequest(trace, request, page_size, owner=owner, count_outputs=count_outputs)
        for owner, request in enumerate(trace)
    ]


def num_found(request: NaiveRequest, cached: list[Page] | frozenset[Page]) -> int:
    """The pages from the first on that are cached."""
    count = 0
    while count < min(request.num_findable, len(request.pages)) and request.pages[count] in cached:
        count += 1
    return count


def naive_lru(requests: list[NaiveRequest], num_pages: int) -> list[int]:
    """Pages that each request finds in a pool of `num_pages`."""
    cached: list[Page] = []
    hits = []
    for request in requests:
        hits.append(num_found(request, cached))
        cached = [page for page in cached if page not in request.pages] + request.pages[::-1]
        cached = cached[len(cached) - num_pages :] if len(cached) > num_pages else cached
    return hits


def best_of_all(requests: list[NaiveRequest], num_pages: int) -> int:
    """The most pages that all requests can find together, by trying every set of pages that could be kept.

    While a request runs, all its pages are in the pool, beside what is kept of others.
    """
    best: dict[frozenset[Page], int] = {frozenset(): 0}
    for request in requests:
        own = frozenset(request.pages)
        room = max(0, num_pages - len(own))
        after: dict[frozenset[Page], int] = {}
        for cached, hits in best.items():
            found = hits + num_found(request, cached)
            for kept in subsets(cached | own, num_pages):
                if len(kept - own) <= room and after.get(kept, -1) < found:
                    after[kept] = found
        best = after
    return max(best.values())


def subsets(pages: frozenset[Page], num_pages: int) -> list[frozenset[Page]]:
    """Sets of at most `num_pages` of these. A page may stay without one before it, and is found when that is back."""
    return [
        frozenset(kept)
        for size in range(min(num_pages, len(pages)) + 1)
        for kept in combinations(sorted(pages, key=repr), size)
    ]


Part = tuple[int, Page]
"""The number of a group, and the page; of a state: the page after which it is."""


def best_of_all_parts(
    requests: list[NaiveRequest],
    groups: list[tuple[KvLayer, int]],
    *,
    num_blocks: int,
    num_tokens: list[int],
    fits: list[bool],
    page_size: int,
) -> int:
    """The most pages that any choice of parts to keep lets the requests find. `groups`: layers, and blocks of a part.

    While a request runs, memory has its parts of layers that keep every token, and a state; at its end what any choice
    of kept parts leaves room for. Those that do not fit come and go.
    """
    whole = sum(blocks for layer, blocks in groups if not (has_state(layer) or is_bounded(layer)))
    states = sum(blocks for layer, blocks in groups if has_state(layer))
    best: dict[frozenset[Part], int] = {frozenset(): 0}
    for request, tokens, is_here in zip(requests, num_tokens, fits, strict=True):
        if not is_here:
            continue
        own = frozenset((group, page) for group in range(len(groups)) for page in request.pages)
        room = num_blocks - states - whole * -(-tokens // page_size)
        after: dict[frozenset[Part], int] = {}
        for cached, hits in best.items():
            found = hits + num_resumed(request, cached, groups, page_size)
            for kept in subsets_within(cached | own, groups, num_blocks):
                if size_of(kept - own, groups) <= room and after.get(kept, -1) < found:
                    after[kept] = found
        best = after
    return max(best.values())


def num_resumed(
    request: NaiveRequest, cached: frozenset[Part], groups: list[tuple[KvLayer, int]], page_size: int
) -> int:
    """The longest prefix, in pages, of which every group has what the next token needs, and some the last page."""
    for length in range(min(request.num_findable, len(request.pages)), 0, -1):
        needs = [
            (group, request.pages[page])
            for group, (layer, _) in enumerate(groups)
            for page in needed_pages(layer, length * page_size, page_size)
        ]
        has_last = any((group, request.pages[length - 1]) in cached for group in range(len(groups)))
        if has_last and cached.issuperset(needs):
            return length
    return 0


def subsets_within(parts: frozenset[Part], groups: list[tuple[KvLayer, int]], most: int) -> list[frozenset[Part]]:
    """All subsets of at most `most` blocks."""
    found: list[frozenset[Part]] = [frozenset()]
    for part in sorted(parts, key=repr):
        found += [kept | {part} for kept in found if size_of(kept, groups) + groups[part[0]][1] <= most]
    return found


def size_of(parts: frozenset[Part], groups: list[tuple[KvLayer, int]]) -> int:
    return sum(groups[group][1] for group, _ in parts)

"""Transfers between a RunCache and a tier below: parts that a load fills, and parts that a store holds."""

from __future__ import annotations

from collections.abc import Sequence

from kvarts.content import Content
from kvarts.kv.node import NOTHING
from kvarts.kv.run_cache import RunCache
from kvarts.kv.spans import NOWHERE, PartRun, RunHolding, RunMatch, Span

__all__ = ["arrive", "begin_load", "begin_to_receive", "holding_of_transfer", "join_front", "receive", "unhold"]


def holding_of_transfer(num_groups: int) -> RunHolding:
    """Return an empty holding for a transfer."""
    return RunHolding(NOTHING, NOWHERE, 0, 1, num_groups)


def begin_load(cache: RunCache, content: Content, match: RunMatch, first: int = 0) -> RunHolding:
    """Begin a sequence after `match`: hold the device's parts, and take parts for the rest, which a load fills.

    The parts must fit. They cannot be found before `arrive`. Parts before page `first` are left out: `join_front` adds
    them later.
    """
    cache.note_begin()
    last = match.spans[-1] if match.spans else match.root
    holding = RunHolding(content, last, match.num_pages, cache.page_size, len(cache.groups))
    last.num_users += 1
    assert match.pieces is not None
    from_first = match.pieces
    if first:
        from_first = [
            [(run, max(start, first), end) for run, start, end in pieces if end > first] for pieces in match.pieces
        ]
    resident: list[list[PartRun]] = []
    for index, pieces in enumerate(from_first):
        cache.hold_path([run.cut(start, end) for run, start, end in pieces if run.list_index == index], holding)
        resident.append(holding.held[index])
    if not match.spans:  # pages that only a shared tier has
        holding.num_named = 0
        cache.tree.extend(holding, match.num_pages)
    for index, pieces in enumerate(from_first):
        num_missing = sum(end - start for run, start, end in pieces if run.list_index != index)
        if not num_missing:
            continue
        cache.take(index, num_missing)
        ids = cache.take_ids(index, num_missing)
        held: list[PartRun] = []
        of_device = iter(resident[index])
        for run, start, end in pieces:
            if run.list_index == index:
                held.append(next(of_device))
                continue
            at = (end - start) * cache.part_blocks[index] if ids else 0
            before = held[-1] if held else None
            if before is not None and before.span is None and before.end == start:
                before.end = end
                before.ids += ids[:at]
            else:
                held.append(PartRun(index, None, start, end, [holding], is_kept=False, ids=ids[:at]))
            del ids[:at]
        holding.held[index] = held
    return holding


def join_front(cache: RunCache, front: RunHolding, loaded: RunHolding) -> None:
    """Move the full pages of `front`, a sequence of the pages before, to `loaded`; its other parts become empty."""
    cache.drop_pages(front, front.num_named)
    for index, held in enumerate(front.held):
        for run in held:
            run.holders[run.holders.index(front)] = loaded
        loaded.held[index] = held + loaded.held[index]
        front.held[index] = []
    front.last.num_users -= 1
    if not front.last.num_users:
        front.last.prune()
    front.is_open = False


def arrive(cache: RunCache, holding: RunHolding, ends: Sequence[int]) -> None:
    """Make the parts of `holding` findable that a load has filled: by group, those before page `ends[index]`."""
    spans: list[Span] = []
    span: Span | None = cache.tree.last_of(holding)
    while span is not None:
        spans.append(span)
        span = span.parent
    spans.reverse()
    events = cache.events
    for index, held in enumerate(holding.held):
        for run in tuple(held):
            if run.span is not None or run.start >= ends[index]:
                continue
            if run.end > ends[index]:
                run = run.split(ends[index])  # noqa: PLW2901
            cache.num_published += 1
            run.is_kept = True
            for span in spans:
                if run.start >= span.end:
                    continue
                piece = run if run.end <= span.end else run.split(span.end)
                if events is not None:
                    events.came(holding.content, index, span, piece.start, piece.end)
                piece.span = span
                span.parts[index].append(piece)
                if piece is run:
                    break
    if events is not None:
        events.told()


def begin_to_receive(cache: RunCache, content: Content, match: RunMatch, num_tokens: int) -> RunHolding:
    """Begin a sequence whose first `num_tokens` tokens are computed elsewhere: hold `match`, and take the other parts.

    They are the parts with which the last token is computed again, and must fit. They cannot be found before `receive`.
    """
    holding = cache.begin(content, match)
    start, num_pages = match.num_pages, -(-num_tokens // cache.page_size)
    seen: list[tuple[int, int]] = []
    for index, group in enumerate(cache.groups):
        sink, first = cache.tree.needed(index, num_tokens - 1)
        seen.append((sink, first))
        if not group.is_state:
            holding.first_open[index] = max(start, first)  # nothing is taken of pages in between
        if group.is_state or group.is_bounded:
            cache.settle_group(holding, index, num_tokens - 1)
    for index, group in enumerate(cache.groups):
        if group.is_state:
            cache.take(index, 1)
            holding.num_states[index] = 1
            holding.state_ids[index] = cache.take_ids(index, 1)
            continue
        sink, first = seen[index]
        if start < sink:
            cache.take(index, sink - start)
            ids = cache.take_ids(index, sink - start)
            holding.held[index].append(PartRun(index, None, start, sink, [holding], is_kept=False, ids=ids))
        num_open = num_pages - holding.first_open[index]
        cache.take(index, num_open)
        holding.open_ids[index] = cache.take_ids(index, num_open)
    holding.num_taken = num_pages
    holding.num_tokens = num_tokens
    return holding


def receive(cache: RunCache, holding: RunHolding) -> None:
    """Make the full pages of `holding` findable: all of its tokens have arrived."""
    num_full = holding.num_tokens // cache.page_size
    if num_full > holding.num_named:
        cache.fill_page(holding, holding.num_tokens)
        arrive(cache, holding, [num_full] * len(cache.groups))
    cache.keep_tails(holding, num_full)


def unhold(cache: RunCache, holding: RunHolding, *, go_first: bool) -> None:
    """End the hold of a store on one run: unused parts are evicted last, or next with `go_first`.

    The last page is evicted before the others.
    """
    if not go_first:
        cache.release_all(holding, range(len(cache.groups)))
        return
    for index, held in enumerate(holding.held):
        holding.held[index] = []
        for run in held:
            cache.release(index, (run,), holding)
            if run.is_listed:  # else others hold it, or nothing keeps it, and it is empty
                cache.move_first(run)

"""Compares what an engine says of its pages with a ledger: event by event, and page by page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from kvarts.audit.digests import PageDigests
from kvarts.audit.finding import Finding
from kvarts.audit.known import KnownRequest
from kvarts.audit.ledger import PageLedger
from kvarts.audit.signals import FullBlock, PartialBlock
from kvarts.content import Content

__all__ = ["PageAccount", "find_different_event", "find_different_pages", "find_different_private"]

MAX_PAGES_NAMED = 20


class PageAccount(Protocol):
    """What an engine says of its pages now."""

    @property
    def num_used(self) -> int:
        """Pages that a request references or a transfer holds."""

    @property
    def num_cached(self) -> int:
        """Pages that hold a prefix and are not used."""

    @property
    def num_reserved(self) -> int:
        """Pages in use that stay in use when no request runs."""

    def runs(self) -> Iterable[tuple[Content, int, int, int]]:
        """Return findable pages and their copies: content, first page, page after the last, how often referenced."""


def find_different_event(
    expected: Sequence[tuple[int, str, bytes]], told: Sequence[tuple[int, str, bytes]], digests: PageDigests
) -> Finding:
    """Return the first difference between page events, each a step, what happened, and a page. There is one."""
    index = next((i for i, pair in enumerate(zip(expected, told, strict=False)) if pair[0] != pair[1]), None)
    if index is None:
        index = min(len(expected), len(told))
    if index < len(expected) and (index >= len(told) or expected[index] not in told[index:]):
        step, what, digest = expected[index]
        return Finding(step, f"was {what} and no event says so", *digests.place(digest))
    step, what, digest = told[index]
    return Finding(step, f"was {what}, says an event, and should not have been", *digests.place(digest))


def find_different_pages(
    account: PageAccount,
    ledger: PageLedger,
    copies_of: Mapping[bytes, list[FullBlock]],
    digests: PageDigests,
    find: Callable[[str, int | None, int | None], object],
) -> None:
    """Call `find` for the pages that the engine and the ledger do not hold alike: what, the request, the page."""
    theirs: Counter[tuple[bytes, int]] = Counter()
    for content, start, end, refs in account.runs():
        for page in range(start, end):
            theirs[digests.of(content, page), refs] += 1
    mine: Counter[tuple[bytes, int]] = Counter()
    for digest, blocks in copies_of.items():
        for block in blocks:
            mine[digest, ledger.refs(block)] += 1
    pages = sorted({digest for digest, _ in (theirs - mine) + (mine - theirs)}, key=digests.place)
    for digest in pages[:MAX_PAGES_NAMED]:
        says = [
            " and ".join(
                f"{refs} times"
                for (name, refs), count in sorted(counter.items())
                if name == digest
                for _ in range(count)
            )
            or "not at all"
            for counter in (theirs, mine)
        ]
        find(f"the engine holds it {says[0]}, the ledger {says[1]}", *digests.place(digest))
    if len(pages) > MAX_PAGES_NAMED:
        find(f"and {len(pages) - MAX_PAGES_NAMED} pages more", None, None)


def find_different_private(
    account: PageAccount,
    ledger: PageLedger,
    requests: Mapping[int, KnownRequest],
    find: Callable[[str, int | None, int | None], object],
) -> None:
    """Call `find` for pages that nothing else can find, where the engine and the ledger count them differently."""
    num_partial = sum(isinstance(block, PartialBlock) for block in ledger.active)
    num_shared = sum(end - start for _, start, end, refs in account.runs() if refs)
    num_kept = ledger.num_used - ledger.num_active
    num_private = account.num_used - num_shared - num_kept
    if num_private == num_partial:
        return
    for request, known in requests.items():
        if len(known.blocks) > known.num_full:
            what = (
                f"the engine counts {num_private} pages that nothing else can find, the ledger {num_partial}; this is "
                "one of them"
            )
            find(what, request, len(known.blocks) - 1)

"""Compares an engine's account of its memory with a ledger, page by page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from kvarts.audit.ledger import Ledger
from kvarts.audit.request_parts import KnownRequest, PageDigests
from kvarts.kv.cache import Cache

__all__ = ["find_different_pages", "find_different_private"]

MAX_PAGES_NAMED = 20


def find_different_pages(
    account: Cache, ledger: Ledger, digests: PageDigests, find: Callable[[str, int | None, int | None], object]
) -> None:
    """Call `find` with text, request and page for each page that differs between the engine and the ledger."""
    theirs: Counter[tuple[int, bytes, int]] = Counter()
    for group, content, start, end, refs in account.runs():
        for page in range(start, end):
            theirs[group, digests.of(content, page), refs] += 1
    mine: Counter[tuple[int, bytes, int]] = Counter()
    for (group, digest), parts in ledger.copies.items():
        for part in parts:
            mine[group, digest, part.refs] += 1
    different = {(group, digest) for group, digest, _ in (theirs - mine) + (mine - theirs)}
    pages = sorted(different, key=lambda page: (digests.place(page[1]), page[0]))
    for group, digest in pages[:MAX_PAGES_NAMED]:
        says = [
            " and ".join(
                f"{refs} times"
                for (of_group, name, refs), count in sorted(counter.items())
                if (of_group, name) == (group, digest)
                for _ in range(count)
            )
            or "not at all"
            for counter in (theirs, mine)
        ]
        find(f"the engine holds it {says[0]}, the ledger {says[1]}{ledger.words(group)}", *digests.place(digest))
    if len(pages) > MAX_PAGES_NAMED:
        find(f"and {len(pages) - MAX_PAGES_NAMED} pages more", None, None)


def find_different_private(
    account: Cache,
    ledger: Ledger,
    requests: Iterable[KnownRequest],
    find: Callable[[str, int | None, int | None], object],
) -> None:
    """Call `find` for a page that only its request knows, if the engine and the ledger count such pages differently."""
    sizes = [group.part_blocks for group in ledger.groups]
    found = ledger.copies.values()
    mine = ledger.num_used - sum(sizes[part.group] for parts in found for part in parts if part.refs or part.keeps)
    only_kept = sum(sizes[part.group] for parts in found for part in parts if part.keeps and not part.refs)
    theirs = account.num_used - only_kept
    theirs -= sum((end - start) * sizes[group] for group, _, start, end, refs in account.runs() if refs)
    if theirs == mine:
        return
    for known in requests:
        if known.num_taken > known.num_named:
            what = f"the engine counts {theirs} blocks that nothing else can find, the ledger {mine}"
            find(f"{what}; this is one of them", known.content.owner, known.num_taken - 1)

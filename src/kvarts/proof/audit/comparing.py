"""Comparisons of the books of an audit: with the engine's account of its memory, with a replay without the audit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvarts.base.columns import Column
from kvarts.core.kv.cache import Memory
from kvarts.proof.audit.facts import Facts
from kvarts.proof.audit.ledger import AuditError, Finding, Ledger
from kvarts.proof.audit.request_parts import KnownRequest, PageDigests

__all__ = ["compare_account", "expect_same", "find_different_pages", "find_different_private"]

MAX_PAGES_NAMED = 20


def compare_account(facts: Facts, account: Memory, num_reserved: int) -> None:
    """Compare the engine's account of its memory with the ledger: laws L1 and L2.

    `num_reserved`: the blocks of the ledger that are reserved or pinned.
    """
    ledger, unit = facts.ledger, facts.unit
    num_used, num_cached = ledger.num_used, ledger.num_cached
    theirs, mine = account.counts(), ledger.counts()
    what = ""
    if facts.has_groups and theirs != mine:
        what = f"the engine counts {theirs} parts used and cached, group by group; the ledger {mine}"
    elif account.num_used != num_used or account.num_cached != num_cached:
        counts = f"{account.num_used} {unit} used and {account.num_cached} cached"
        what = f"the engine counts {counts}, the ledger {num_used} and {num_cached}"
    if what:
        facts.find(what)
        # Name the pages that differ between the engine and the ledger.
        find_different_pages(account, ledger, facts.digests, facts.find)
        find_different_private(account, ledger, facts.requests.values(), facts.find)
    if account.num_reserved != num_reserved:
        counts = f"{account.num_reserved} {unit} reserved or pinned"
        facts.find(f"the engine counts {counts}, the ledger {num_reserved}")


def expect_same(
    requests: Mapping[str, Column],
    steps: Sequence[Mapping[str, Column]],
    plain_requests: Mapping[str, Column],
    plain_steps: Sequence[Mapping[str, Column]],
) -> None:
    """Compare an audited replay with a plain one: columns of its requests, and of the steps of each replica.

    An engine without readers of its events may only count pages that an audited one names. Raise AuditError for
    the first step and the first request that differ.
    """
    findings: list[Finding] = []
    of_steps = [_first_different(mine, theirs) for mine, theirs in zip(steps, plain_steps, strict=True)]
    different = [(found[0], replica, found[1]) for replica, found in enumerate(of_steps) if found is not None]
    if different:
        step, replica, words = min(different)
        findings.append(Finding(step, f"{words}{f' in replica {replica}' if len(steps) > 1 else ''}"))
    of_requests = _first_different(requests, plain_requests)
    if of_requests is not None:
        request, words = of_requests
        last = max(len(column) - 1 for of_replica in steps for column in of_replica.values())
        findings.append(Finding(last, f"of request {request}, {words}", request))
    if findings:
        raise AuditError(findings)


def _first_different(columns: Mapping[str, Column], plain: Mapping[str, Column]) -> tuple[int, str] | None:
    """Return the first row in which columns differ, with words for its first column that does; None if all agree."""
    first: tuple[int, str] | None = None
    for name, mine in columns.items():
        theirs = plain[name]
        num_both = min(len(mine), len(theirs))
        differs = mine[:num_both] != theirs[:num_both]
        row = int(differs.argmax()) if differs.any() else num_both
        if row < max(len(mine), len(theirs)) and (first is None or row < first[0]):
            said = [str(column[row]) if row < len(column) else "missing" for column in (mine, theirs)]
            first = row, f"{name} is {said[0]}, and {said[1]} in a replay that is not audited"
    return first


def find_different_pages(
    account: Memory, ledger: Ledger, digests: PageDigests, find: Callable[[str, int | None, int | None], object]
) -> None:
    """Call `find` with text, request and page for each page that differs between the engine and the ledger."""
    theirs: Counter[tuple[int, bytes, int]] = Counter()
    for group, content, start, end, refs in account.runs():
        for page in range(start, end):
            theirs[group, digests.of(content, page, ledger.groups[group].block_pages), refs] += 1
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
    account: Memory,
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

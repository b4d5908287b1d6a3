"""Helpers of all stories: places, amounts, and the requests that share a page."""

from __future__ import annotations

from kvarts.explain.reading import Journal
from kvarts.journal import AdmittedLine, ComputedLine, Line, StoredBelowLine, StoredLine, StoreFailedLine

__all__ = ["last_holder", "named_pages", "num_of", "place_of", "sharing"]


def sharing(journal: Journal, request: int, page: int) -> list[int]:
    """Return the requests with the same sequence as `request` up to the end of `page`, `request` itself first."""
    content = journal.contents[request]
    if page >= content.num_known_pages:
        return [request]
    others = [
        index
        for index, other in journal.contents.items()
        if index != request
        and other.salt == content.salt
        and other.num_known_pages > page
        and content.common_pages(other, 0, page + 1) > page
    ]
    return [request, *others]


def last_holder(journal: Journal, at: Line, page: int) -> str | None:
    """Return the name of the last request that held `page` of the line's request before the line, or still holds it."""
    alike = set(sharing(journal, at.request, page))
    end = (page + 1) * journal.page_size
    last: int | None = None
    for line in journal.lines[: at.n]:
        if line.request not in alike:
            continue
        match line:
            case StoredLine() if line.start_page <= page < line.end_page:
                last = line.request
            case AdmittedLine() if line.hit_pages > page:
                last = line.request
            case ComputedLine() if line.start < end <= line.end:
                last = line.request
    return None if last is None else journal.names[last]


def named_pages(line: StoredBelowLine | StoreFailedLine) -> str:
    """Return a text that names the pages of a line."""
    num_pages = line.end_page - line.start_page
    return f"page {line.start_page:,}" if num_pages == 1 else f"pages {line.start_page:,} to {line.end_page - 1:,}"


def num_of(count: int, what: str) -> str:
    """Return a count with its noun; `what` is the singular."""
    return f"1 {what}" if count == 1 else f"{count:,} {what}s"


def place_of(line: Line) -> str:
    """Return the step and time of a line, for the beginning of a story line."""
    step = f"step {line.step}" if line.step >= 0 else "before step 0"
    return f"{step:<13} {line.t_ms / 1e3:>12,.3f} s"

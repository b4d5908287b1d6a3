"""Pages by name, and what events say of them."""

from __future__ import annotations

from kvarts.core.content import Content
from kvarts.core.events import Event, PagesRemoved, PagesStored, StepStarted


def page_name(content: Content, page: int) -> tuple[object, tuple[object, ...]]:
    """The name that the naive engine gives to a page of `content`."""
    end = (page + 1) * content.page_size
    known = min(end, content.num_known_tokens)
    tokens = [("token", token) for token in content.tokens(0, known)]
    tokens += [("made", content.owner, index) for index in range(known, end)]  # type: ignore[misc]
    return (content.salt, tuple(tokens))


def evicted_names(events: list[Event]) -> list[object]:
    """Every evicted page, in order."""
    return [
        page_name(event.content, page)
        for event in events
        if isinstance(event, PagesRemoved) and event.medium == "device"
        for page in range(event.end_page - 1, event.start_page - 1, -1)
    ]


def paged(events: list[Event]) -> list[tuple[object, ...]]:
    """What happened to findable pages, page by page, each with its step."""
    out: list[tuple[object, ...]] = []
    step = -1
    for event in events:
        if isinstance(event, StepStarted):
            step = event.step
        if not isinstance(event, PagesStored | PagesRemoved):
            continue
        pages = range(event.start_page, event.end_page)
        for page in reversed(pages) if isinstance(event, PagesRemoved) else pages:
            out.append((step, type(event).__name__, event.medium, page_name(event.content, page)))  # noqa: PERF401
    return out

"""Which pages of each request were in earlier requests: the input of all cache curves.

A trace is cut into *spans*: pages [start, end) of a request whose latest earlier use was in one request (`previous`),
or that were never used (-1). The number of spans does not depend on the page size. Read backwards, the same table gives
the next use of pages: pages of `previous` are used next in `request`.

Requests are processed one at a time, in the order of the trace. The pages of a request are the full pages of its prompt
and, if known, its output, without the last token, which is never computed. Partial pages are omitted, since no other
request could find them. Pages of unknown outputs are omitted too, unless they are counted: an engine caches their full
pages for a while like any other.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from kvarts.columns import Column, Rows
from kvarts.content import Content, PageKey
from kvarts.errors import ConfigError
from kvarts.traffic.trace import Trace

__all__ = ["NEVER", "OTHER", "OWN", "SHARED", "Reuse", "ReuseTree", "find_reuse", "find_token_reuse"]

NEVER, OWN, OTHER, SHARED = range(4)
"""Earlier requests with the pages of a span: none; only its own session's; only others'; both."""


class Reuse(msgspec.Struct, frozen=True):
    """The spans of a trace, ordered by request and position, and columns of its requests.

    `num_pages`: known pages of a request. `num_private`: pages after them that no other request can find. `limit`:
    pages that the request may find, which end before its last token. `source`: NEVER, OWN, OTHER or SHARED.
    """

    page_size: int
    request: Column
    start: Column
    end: Column
    previous: Column
    source: Column
    num_pages: Column
    num_private: Column
    limit: Column
    prompt_tokens: Column
    arrival_ns: Column

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return int(self.prompt_tokens.sum())

    @property
    def hittable(self) -> Column:
        """Number of pages of each span that its request could find."""
        seen = np.minimum(self.end, self.limit[self.request]) - self.start
        return np.where(self.previous < 0, 0, np.maximum(seen, 0))

    def in_pages(self, page_size: int, *, count_outputs: bool = False) -> Reuse:
        """Convert spans of tokens to spans of pages. Raise ConfigError for a `page_size` below 1.

        The previous use of a page is that of its last token. `count_outputs`: unknown outputs occupy pages too.
        """
        assert self.page_size == 1
        if page_size < 1:
            raise ConfigError(f"must be at least 1, got {page_size}", field="page_size")
        start, end = self.start // page_size, self.end // page_size
        kept = start < end
        num_pages = self.num_pages // page_size
        num_private = (self.num_pages + self.num_private) // page_size - num_pages
        return Reuse(
            page_size=page_size,
            request=self.request[kept],
            start=start[kept],
            end=end[kept],
            previous=self.previous[kept],
            source=self.source[kept],
            num_pages=num_pages,
            num_private=num_private if count_outputs else np.zeros_like(num_private),
            limit=self.limit // page_size,
            prompt_tokens=self.prompt_tokens,
            arrival_ns=self.arrival_ns,
        )


NO_SESSION = {-1}
"""Sessions of a run that only requests without a session used. One shared set for all such runs; never modified."""


class _Run:
    """Pages [start, end) of the tree with the same latest request and the same set of sessions."""

    __slots__ = ("children", "content", "end", "last", "sessions", "start")

    def __init__(self, content: Content | None, start: int, end: int, last: int, sessions: set[int]) -> None:
        self.content = content
        self.start = start
        self.end = end
        self.last = last
        self.sessions = sessions
        self.children: dict[PageKey, _Run] = {}


def find_reuse(trace: Trace, page_size: int, *, count_outputs: bool = False) -> Reuse:
    """Cut `trace` into spans of pages, see `Reuse.in_pages`. Raise ConfigError if the trace is a stream, not a list."""
    return find_token_reuse(trace).in_pages(page_size, count_outputs=count_outputs)


def find_token_reuse(trace: Trace) -> Reuse:
    """Cut `trace` into spans of tokens. Raise ConfigError if the trace is a stream, not a list."""
    requests = trace.requests
    if requests is None:
        raise ConfigError("must be known as a whole", field="trace", hint="Pass its requests as a list.")
    sessions: dict[str, int] = {}
    tree = ReuseTree()
    num_known = np.zeros(len(requests), np.int64)
    for index, request in enumerate(requests):
        content = trace.content(request, page_size=1, owner=index)
        # A sequence's last token is never computed.
        known = min(content.num_known_tokens, request.num_prompt_tokens + request.num_output_tokens - 1)
        num_known[index] = known
        session = -1
        if request.session_id is not None:
            session = sessions.setdefault(request.session_id, len(sessions))
        tree.add(index, content, known, session)
    prompt_tokens = _column(request.num_prompt_tokens for request in requests)
    output_tokens = _column(request.num_output_tokens for request in requests)
    columns = tree.rows.take_columns()
    return Reuse(
        page_size=1,
        request=columns[0],
        start=columns[1],
        end=columns[2],
        previous=columns[3],
        source=columns[4],
        num_pages=num_known,
        num_private=prompt_tokens + output_tokens - 1 - num_known,
        limit=prompt_tokens - 1,
        prompt_tokens=prompt_tokens,
        arrival_ns=_column(request.arrival_ns for request in requests),
    )


class ReuseTree:
    """All pages seen so far. Adjacent runs are merged if they have the same latest request and there is no branch."""

    def __init__(self) -> None:
        self.rows = Rows(5)
        self._roots: dict[str | None, _Run] = {}

    def add(self, index: int, content: Content, num_pages: int, session: int) -> None:
        """Add the pages of a request, and a row for each span of it. `session`: -1 for none."""
        parent = self._roots.get(content.salt)
        if parent is None:
            parent = self._roots[content.salt] = _Run(None, 0, 0, -1, set())
        position = 0
        row: list[int] = []
        rows: list[int] = []
        while position < num_pages:
            key = content.key(position)
            run = parent.children.get(key)
            if run is None:
                run = _Run(content, position, num_pages, index, NO_SESSION if session < 0 else {session})
                parent.children[key] = run
                rows += (index, position, num_pages, -1, NEVER)
                _merge(parent, run)
                break
            assert run.content is not None
            common = content.common_pages(run.content, position, min(run.end, num_pages))
            if common < run.end:
                _split(run, common)
            source = _source(run, session)
            if row and row[3] == run.last and row[4] == source:
                rows[-3] = common
            else:
                row = [index, position, common, run.last, source]
                rows += row
            run.last = index
            if session not in run.sessions:
                if run.sessions is NO_SESSION:
                    run.sessions = {-1}
                run.sessions.add(session)
            position = common
            parent = _merge(parent, run)
        self.rows.add(rows)


def _split(run: _Run, at: int) -> None:
    """Cut `run` before page `at`; `run` becomes the head."""
    assert run.content is not None
    sessions = run.sessions if run.sessions is NO_SESSION else set(run.sessions)
    tail = _Run(run.content, at, run.end, run.last, sessions)
    tail.children = run.children
    run.children = {run.content.key(at): tail}
    run.end = at


def _merge(parent: _Run, run: _Run) -> _Run:
    """Merge `run` into `parent` if the two no longer differ; return the run that then contains the pages."""
    # The sessions of a run are a subset of its parent's, so comparing their numbers is enough.
    if parent.content is None or len(parent.children) > 1 or len(parent.sessions) != len(run.sessions):
        return run
    assert parent.last == run.last, "a request passed through a run and not through the one before it"
    parent.content, parent.end, parent.children = run.content, run.end, run.children
    return parent


def _source(run: _Run, session: int) -> int:
    sessions = run.sessions
    if session < 0 or session not in sessions:
        return OTHER
    return OWN if len(sessions) == 1 else SHARED


def _column(values: Iterable[int]) -> Column:
    return np.fromiter(values, np.int64)

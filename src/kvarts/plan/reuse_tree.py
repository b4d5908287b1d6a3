"""The pages that the requests of a trace have used so far, as a tree of runs: what cuts a trace into spans.

It is a module of its own because it runs for every request, and is compiled.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvarts.base.columns import Rows
from kvarts.core.content import Content, PageKey
from kvarts.sim.traffic.trace import Trace, TraceRequest

__all__ = ["NEVER", "OTHER", "OWN", "SHARED", "ReuseTree"]

NEVER: Final = 0
OWN: Final = 1
OTHER: Final = 2
SHARED: Final = 3
"""Earlier requests with the pages of a span: none; only its own session's; only others'; both."""

NO_SESSION: Final = {-1}
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


class ReuseTree:
    """All pages seen so far. Adjacent runs are merged if they have the same latest request and there is no branch."""

    def __init__(self) -> None:
        self.rows = Rows(5)
        self._roots: dict[str | None, _Run] = {}

    def add_all(self, trace: Trace, requests: Iterable[TraceRequest]) -> list[int]:
        """Add the tokens of `requests`, those of `trace`; return how many of each are known and computed."""
        sessions: dict[str, int] = {}
        known: list[int] = []
        for index, request in enumerate(requests):
            content = trace.content(request, page_size=1, owner=index)
            # A sequence's last token is never computed.
            num_known = min(content.num_known_tokens, request.num_prompt_tokens + request.num_output_tokens - 1)
            known.append(num_known)
            session = -1
            if request.session_id is not None:
                session = sessions.setdefault(request.session_id, len(sessions))
            self.add(index, content, num_known, session)
        return known

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

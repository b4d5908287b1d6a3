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

from kvarts.base.columns import Column
from kvarts.base.errors import ConfigError
from kvarts.plan.reuse_tree import NEVER, OTHER, OWN, SHARED, ReuseTree
from kvarts.sim.traffic.request_columns import RequestColumns
from kvarts.sim.traffic.trace import Trace

__all__ = ["NEVER", "OTHER", "OWN", "SHARED", "Reuse", "by_value", "find_reuse", "find_token_reuse"]

REQUESTS_PER_PASS = 8
"""Requests that a ReuseTree adds in the time of one pass over few of them."""
MOST_IDS = 1 << 31
LOW_BITS = 0xFFFF
UNKNOWN = -2
"""The previous use of tokens before the first ones."""


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


def find_reuse(trace: Trace, page_size: int, *, count_outputs: bool = False) -> Reuse:
    """Cut `trace` into spans of pages, see `Reuse.in_pages`. Raise ConfigError if the trace is a stream, not a list."""
    return find_token_reuse(trace).in_pages(page_size, count_outputs=count_outputs)


def find_token_reuse(trace: Trace) -> Reuse:
    """Cut `trace` into spans of tokens. Raise ConfigError if the trace is a stream, not a list."""
    requests = trace.requests
    if requests is None:
        raise ConfigError("must be known as a whole", field="trace", hint="Pass its requests as a list.")
    if isinstance(requests, RequestColumns):
        columns_of = [requests.prompts, requests.outputs, requests.arrivals_ns]
        prompt_tokens, output_tokens, arrival_ns = (np.array(column, np.int64) for column in columns_of)
    else:
        prompt_tokens = _column(request.num_prompt_tokens for request in requests)
        output_tokens = _column(request.num_output_tokens for request in requests)
        arrival_ns = _column(request.arrival_ns for request in requests)
    if isinstance(requests, RequestColumns) and _are_many(requests):
        columns, num_known = _spans_by_place(requests, trace.unit_tokens), prompt_tokens
    else:
        tree = ReuseTree()
        num_known = np.array(tree.add_all(trace, requests), np.int64)
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
        arrival_ns=arrival_ns,
    )


def _column(values: Iterable[int]) -> Column:
    return np.fromiter(values, np.int64)


def _are_many(requests: RequestColumns) -> bool:
    """Return whether one pass for each place of an id costs less than one for each request, as in most traces."""
    ends = np.frombuffer(requests.ends, np.int64)
    return len(ends) > 0 and int(np.diff(ends, prepend=0).max()) * REQUESTS_PER_PASS <= len(ends)


def _spans_by_place(requests: RequestColumns, unit_tokens: int) -> list[Column]:
    """Return the columns `request`, `start`, `end`, `previous` and `source` of spans of tokens, as a ReuseTree does.

    Prompts that begin with the same ids are a class, which the next ids divide. The ids at one place of all prompts are
    looked at together. A prompt that is alone in its class is new from there on.
    """
    ids, ends = np.frombuffer(requests.ids, requests.ids.typecode), np.frombuffer(requests.ends, np.int64)
    num_ids = int(ids.max()) + 1
    if num_ids > MOST_IDS:
        ids = np.unique(ids, return_inverse=True)[1]
        num_ids = len(ids)
    counts = np.diff(ends, prepend=0)
    firsts = ends - counts
    prompts = np.array(requests.prompts, np.int64)
    latest = np.full(len(prompts), UNKNOWN)  # the previous use of the last span of each request
    parts: list[tuple[Column, Column, Column]] = []
    members, classes = np.arange(len(prompts)), np.zeros(len(prompts), np.int64)
    at, lasts = firsts, ends - 1  # of each member, the id at this place and its last one
    start = 0
    while len(members):
        keys = classes * num_ids + ids[at]
        order = np.argsort(keys, kind="stable")  # the members of a class stay in the order of the trace
        keys, members, at, lasts = keys[order], members[order], at[order], lasts[order]
        begins = np.ones(len(members) + 1, bool)  # whether a class begins; at the end, another would
        np.not_equal(keys[1:], keys[:-1], out=begins[1:-1])
        is_first, is_alone = begins[:-1], begins[:-1] & begins[1:]
        classes = np.cumsum(is_first) - 1
        previous = np.append(-1, members[:-1])
        previous[is_first] = -1
        is_last = at == lasts
        shorter = np.flatnonzero(is_last & ~is_alone)
        shorter = shorter[prompts[members[shorter]] < start + unit_tokens]
        if len(shorter):
            is_of_uneven = np.zeros(len(members), bool)
            is_of_uneven[classes[shorter]] = True
            uneven = is_of_uneven[classes]
            parts.append(_changes(members[~uneven], start, previous[~uneven], latest))
            lengths = np.minimum(prompts[members[uneven]] - start, unit_tokens)
            parts.append(_uneven_spans(classes[uneven], members[uneven], lengths, start, latest))
        else:
            parts.append(_changes(members, start, previous, latest))
        goes_on = np.flatnonzero(~(is_alone | is_last))
        members, classes, at, lasts = members[goes_on], classes[goes_on], at[goes_on] + 1, lasts[goes_on]
        start += unit_tokens
    request, starts, previous = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = by_value(request)  # its parts are in the order of their starts
    request, starts, previous = request[order], starts[order], previous[order]
    span_ends = np.append(starts[1:], 0)
    is_last = np.append(request[1:] != request[:-1], True)
    span_ends[is_last] = prompts[request[is_last]]
    return [request, starts, span_ends, previous, np.where(previous < 0, NEVER, OTHER)]


def by_value(values: Column) -> Column:
    """Return the stable order of whole numbers below 2**32. NumPy sorts those of two bytes in linear time."""
    order: Column = np.argsort((values & LOW_BITS).astype(np.uint16), kind="stable")
    if int(values.max(initial=0)) > LOW_BITS:
        order = order[np.argsort((values >> 16).astype(np.uint16)[order], kind="stable")]
    return order


def _changes(members: Column, start: int, previous: Column, latest: Column) -> tuple[Column, Column, Column]:
    """Return the spans that begin at token `start`: those of requests whose previous use changes there."""
    changes = previous != latest[members]
    members, previous = members[changes], previous[changes]
    latest[members] = previous
    return members, np.full(len(members), start), previous


def _uneven_spans(
    classes: Column, members: Column, lengths: Column, start: int, latest: Column
) -> tuple[Column, Column, Column]:
    """Return the spans from token `start` on of classes whose members have different numbers of tokens there.

    Of each class, `tail` has the tokens by their latest use, and the ends of these: the longest ago, the farthest.
    """
    spans: list[tuple[int, int, int]] = []
    tail: list[tuple[int, int]] = []
    of_tail = -1
    for of_class, member, length in zip(classes.tolist(), members.tolist(), lengths.tolist(), strict=True):
        if of_class != of_tail:
            tail, of_tail = [], of_class
        known = int(latest[member])
        at = 0
        while at < length:
            end, previous = tail[-1] if tail else (length, -1)
            if previous != known:
                spans.append((member, start + at, previous))
                known = previous
            at = min(end, length)
            if tail and end <= length:
                tail.pop()
        tail.append((length, member))
        latest[member] = known
    request, starts, previous_uses = np.array(spans, np.int64).reshape(-1, 3).T
    return request, starts, previous_uses

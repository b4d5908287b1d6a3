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

from kvarts.columns import Column
from kvarts.errors import ConfigError
from kvarts.plan.reuse_tree import NEVER, OTHER, OWN, SHARED, ReuseTree
from kvarts.traffic.request_columns import RequestColumns
from kvarts.traffic.trace import Trace

__all__ = ["NEVER", "OTHER", "OWN", "SHARED", "Reuse", "ReuseTree", "find_reuse", "find_token_reuse"]


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
    tree = ReuseTree()
    num_known = np.array(tree.add_all(trace, requests), np.int64)
    if isinstance(requests, RequestColumns):
        columns_of = [requests.prompts, requests.outputs, requests.arrivals_ns]
        prompt_tokens, output_tokens, arrival_ns = (np.array(column, np.int64) for column in columns_of)
    else:
        prompt_tokens = _column(request.num_prompt_tokens for request in requests)
        output_tokens = _column(request.num_output_tokens for request in requests)
        arrival_ns = _column(request.arrival_ns for request in requests)
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

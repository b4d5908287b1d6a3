"""Outcomes of requests in columns, one row per request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from kvarts.base.columns import Column, ReadColumns, Rows, narrowed
from kvarts.core.request import Request
from kvarts.sim.traffic.trace import TraceRequest

__all__ = ["CANCELLED", "COMPLETED", "FAILED", "NO_REPLICA", "REJECTED", "RequestLog", "Taken", "of_prompts"]

COMPLETED: Final = 0
REJECTED: Final = 1
FAILED: Final = 2
CANCELLED: Final = 3
NO_REPLICA: Final = -1
"""Replica of a request that its client cancelled while it waited in the router."""

Taken = tuple[Rows, dict[int, str], dict[int, str], list[int], int]
"""The contents of a log: rows of its fields, ids and reasons by index, stalls, and the prompt tokens of cancelled
requests."""

_REQUEST_FIELDS = (
    "index",
    "row",
    "status",
    "replica",
    "arrival_ns",
    "input_tokens",
    "output_tokens",
    "first_admitted_ns",
    "first_token_ns",
    "last_token_ns",
    "cached_tokens",
    "admissions",
    "preemptions",
    "recomputed_tokens",
)
_NEAR = {
    "row": "index",
    "first_admitted_ns": "arrival_ns",
    "first_token_ns": "first_admitted_ns",
    "last_token_ns": "first_token_ns",
}
"""Fields that are close to others."""
_COUNTS = ("status", "replica", "input_tokens", "output_tokens", "cached_tokens")
"""Fields that a summary reads in few bytes."""


def of_prompts(cached_tokens: Column, input_tokens: Column) -> Column:
    """Return, per request, how many of its prompt tokens were found.

    With the profile `mocker`, `cached_tokens` is the largest hit of all its admissions, as in Dynamo: one that was
    preempted also finds tokens that it has generated.
    """
    found: Column = np.minimum(cached_tokens, input_tokens)
    return found


class RequestLog:
    """One row per request, in arrival order. The time of an event that never happened is -1.

    `tiers`: names of the tiers below the device, in order; the tokens hit in each are a column `NAME_tokens`. `more`:
    names of further integer columns.
    """

    def __init__(self, *, largest_hit_counts: bool, tiers: Iterable[str] = (), more: Iterable[str] = ()) -> None:
        of_tiers = [f"{name}_tokens" for name in tiers]
        self._fields = (*_REQUEST_FIELDS, *of_tiers, *more)
        self._num_tiers = len(of_tiers)
        place = {name: field for field, name in enumerate(self._fields)}
        self._place = place
        self._rows = Rows(len(self._fields), {place[name]: place[other] for name, other in _NEAR.items()})
        self._order: Column | None = None
        self._largest_hit_counts = largest_hit_counts
        self._ids: dict[int, str] = {}
        self._reasons: dict[int, str] = {}
        self.stalls_ns: list[int] = []
        """Time since the previous token, for each first token generated after a preemption."""
        self.cancelled_prompt_tokens = 0
        """Prompt tokens computed for cancelled requests."""
        self._holding: list[tuple[Request, int]] = []
        """Requests that have ended and hold pages until the next step is planned, and their preemptions so far."""
        self._late: dict[int, int] = {}
        """By index: preemptions of a request after its row was added."""

    def end(
        self, request: Request, row: TraceRequest, replica: int, status: int = COMPLETED, more: Sequence[int] = ()
    ) -> None:
        """Add `request`, which generated its last token, if it is measured. `more`: values of the further columns."""
        if not row.is_measured:
            return
        num_output = request.num_output_tokens if status == CANCELLED else request.max_tokens
        values = [
            request.index,
            row.row,
            status,
            replica,
            request.arrival_ns,
            request.num_prompt_tokens,
            num_output,
            request.first_admitted_ns,
            request.first_token_ns,
            -1 if status == CANCELLED else request.last_token_ns,
            request.largest_hit_tokens if self._largest_hit_counts else request.cached_tokens,
            request.num_admissions,
            request.num_preemptions,
            request.recomputed_tokens,
        ]
        if self._num_tiers:
            values += self._cached_below(request)
        if more:
            values += more
        self._rows.add(values)
        if self._holding:
            self._count_late()
        if request.table is not None:
            self._holding.append((request, request.num_preemptions))
        if request.stalls_ns:
            self.stalls_ns += request.stalls_ns
        if row.request_id is not None:
            self._ids[request.index] = row.request_id

    def _count_late(self) -> None:
        """Count the preemptions of requests that ended before the step that took their pages was planned."""
        for request, num_before in self._holding:
            if request.num_preemptions > num_before:
                self._late[request.index] = request.num_preemptions - num_before
        self._holding = [each for each in self._holding if each[0].table is not None]

    def _settle(self) -> None:
        """Add late preemptions to their rows, when every request has ended."""
        self._count_late()
        if self._late:
            columns = self._rows.take_columns()
            place = {index: row for row, index in enumerate(columns[0].tolist())}
            for index, num_late in self._late.items():
                columns[self._place["preemptions"]][place[index]] += num_late
            self._late = {}
            self._rows.add_columns(columns)

    def cancel(self, request: Request, row: TraceRequest, replica: int, end_ns: int, more: Sequence[int] = ()) -> None:
        """Add `request`, which was dropped at `end_ns`, with the tokens that it has generated until then."""
        if not row.is_measured:
            return
        num_computed = min(max(request.num_computed, request.furthest_computed), request.num_prompt_tokens)
        self.cancelled_prompt_tokens += max(0, num_computed - request.cached_tokens)
        self._reasons[request.index] = f"its client gave up {(end_ns - request.arrival_ns) / 1e6:g} ms after sending it"
        self.end(request, row, replica, CANCELLED, more)

    def _cached_below(self, request: Request) -> Sequence[int]:
        """Return the tokens of `request` hit in each tier."""
        return (request.cached_tokens_below or (0,) * self._num_tiers)[: self._num_tiers]

    def reject(
        self,
        request: Request,
        row: TraceRequest,
        replica: int,
        reason: str,
        status: int = REJECTED,
        more: Sequence[int] = (),
    ) -> None:
        """Add `request`, which was rejected on arrival, or with FAILED, ended before its last token."""
        if not row.is_measured:
            return
        self._reasons[request.index] = reason
        self.end(request, row, replica, status, more)

    def take(self) -> Taken:
        """Return the contents of the log, which is not used after that."""
        self._settle()
        return self._rows, self._ids, self._reasons, self.stalls_ns, self.cancelled_prompt_tokens

    def put_together(self, parts: Sequence[tuple[Taken, Column, int]]) -> None:
        """Become the log of several groups of replicas, each with a log of its own.

        `parts`: the contents of each of these, the index of each request by its index there, and the number of the
        first replica.
        """
        for (rows, ids, reasons, stalls_ns, cancelled_prompt_tokens), indexes, first in parts:
            columns = rows.take_columns()
            columns[0] = indexes[columns[0]]
            columns[self._place["replica"]] += first
            self._rows.add_columns(columns)
            self._ids.update((int(indexes[index]), name) for index, name in ids.items())
            self._reasons.update((int(indexes[index]), reason) for index, reason in reasons.items())
            self.stalls_ns += stalls_ns
            self.cancelled_prompt_tokens += cancelled_prompt_tokens

    @property
    def columns(self) -> Mapping[str, Column]:
        """Integer columns by name, sorted by arrival, when every request has ended."""
        return ReadColumns(self._fields, self._in_order)

    def _in_order(self, name: str) -> Column:
        self._settle()
        if self._order is None:
            self._order = narrowed(np.argsort(self._rows.column(0)))
        return self._rows.column(self._place[name])[self._order]

    @property
    def as_ended(self) -> Mapping[str, Column]:
        """`columns` in the order in which requests ended, in few bytes."""
        return ReadColumns(self._fields, self._as_ended)

    def _as_ended(self, name: str) -> Column:
        self._settle()
        column = self._rows.column(self._place[name])
        return narrowed(column) if name in _COUNTS else column

    def request_ids(self) -> list[str]:
        """Return the trace's id of each request, or the number of its row in the file, from 0."""
        ids = list(map(str, self.columns["row"].tolist()))
        for place, index in enumerate(self.columns["index"].tolist() if self._ids else ()):
            ids[place] = self._ids.get(index, ids[place])
        return ids

    def reasons(self) -> list[str | None]:
        """Return why each request was rejected; None for the others."""
        if not self._reasons:
            return [None] * len(self.columns["row"])
        return [self._reasons.get(index) for index in self.columns["index"].tolist()]

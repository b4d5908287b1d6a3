"""What a replay leaves behind, in columns: one row a request, one row a step.

Written row by row into flat integer arrays while the replay runs, turned into NumPy columns when somebody looks.
Steps alike are one row here, a *span*; every step has only its duration and the pages taken for it.
"""

from __future__ import annotations

from array import array
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from kvarts.replayer.trace import TraceRequest
from kvarts.request import Request
from kvarts.sched.plan import StepPlan
from kvarts.sched.scheduler import Scheduler

__all__ = ["COMPLETED", "REJECTED", "RequestLog", "StepLog"]

COMPLETED, REJECTED = 0, 1

Column = npt.NDArray[Any]

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


PACK_AT = 1 << 16


class _Rows:
    """Rows of integers, one after the other: appended to a list, which is packed to 8 bytes each now and then."""

    __slots__ = ("_packed", "_recent", "_width")

    def __init__(self, width: int) -> None:
        self._width = width
        self._packed = array("q")
        self._recent: list[int] = []

    def add(self, row: tuple[int, ...]) -> None:
        self._recent += row
        if len(self._recent) > PACK_AT:
            self._pack()

    def _pack(self) -> None:
        self._packed.fromlist(self._recent)
        self._recent.clear()

    def take_columns(self) -> Column:
        """Shape [width, rows]; the rows are gone from here, so that they are not in memory twice."""
        self._pack()
        packed, self._packed = self._packed, array("q")
        return np.ascontiguousarray(np.frombuffer(packed, np.int64).reshape(-1, self._width).T)


class RequestLog:
    """One row a request, in arrival order. -1 stands for a time that never came."""

    def __init__(self, *, largest_hit_counts: bool) -> None:
        self._rows = _Rows(len(_REQUEST_FIELDS))
        self._largest_hit_counts = largest_hit_counts
        self._ids: dict[int, str] = {}
        self._reasons: dict[int, str] = {}

    def end(self, request: Request, row: TraceRequest, replica: int, status: int = COMPLETED) -> None:
        """`request` made its last token, or was rejected."""
        self._rows.add(
            (
                request.index,
                row.row,
                status,
                replica,
                request.arrival_ns,
                request.num_prompt_tokens,
                request.num_output_tokens,
                request.first_admitted_ns,
                request.first_token_ns,
                request.last_token_ns,
                request.largest_hit_tokens if self._largest_hit_counts else request.cached_tokens,
                request.num_admissions,
                request.num_preemptions,
                request.recomputed_tokens,
            )
        )
        if row.request_id is not None:
            self._ids[request.index] = row.request_id

    def reject(self, request: Request, row: TraceRequest, replica: int, reason: str) -> None:
        """`request` was refused on arrival."""
        self._reasons[request.index] = reason
        self.end(request, row, replica, REJECTED)

    @cached_property
    def columns(self) -> dict[str, Column]:
        """Integer columns by name, sorted by arrival."""
        columns = self._rows.take_columns()
        return dict(zip(_REQUEST_FIELDS, columns[:, np.argsort(columns[0])], strict=True))

    def request_ids(self) -> list[str]:
        """The trace's own id where it gives one, else the number of the row in its file, from 0."""
        ids = list(map(str, self.columns["row"].tolist()))
        for index, request_id in self._ids.items():
            ids[index] = request_id
        return ids

    def reasons(self) -> list[str | None]:
        """Why a request was rejected; None for the others."""
        reasons: list[str | None] = [None] * len(self.columns["row"])
        for index, reason in self._reasons.items():
            reasons[index] = reason
        return reasons


_SPAN_FIELDS = (
    "num_steps",
    "start_ns",
    "used",
    "cached",
    "running",
    "waiting",
    "blocked",
    "decodes",
    "tokens",
    "preempted",
    "admitted",
    "is_leap",
)


class StepLog:
    """The StepSink of a replay: one row a span, for one replica.

    `used` is a step's high-water mark, before any preemption; `cached` is as after planning it.
    """

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._spans = _Rows(len(_SPAN_FIELDS))
        self._durations_ns = array("q")
        self._pages_taken = array("i")
        self.tokens_lost = 0
        """Computed tokens that preempted requests lost."""

    def record_step(self, start_ns: int, duration_ns: int, plan: StepPlan, scheduler: Scheduler) -> None:
        """See StepSink."""
        batch = plan.batch
        num_tokens = batch.num_decodes
        for chunk in batch.chunks:
            num_tokens += chunk.num_tokens
        preemptions = plan.preemptions
        if preemptions:
            self.tokens_lost += sum(preemption.num_computed_tokens for preemption in preemptions)
        cache = scheduler.cache
        self._spans.add(
            (
                1,
                start_ns,
                scheduler.num_used_high_water,
                cache.num_cached,
                scheduler.running.num_running,
                scheduler.waiting.num_waiting,
                scheduler.blocked,
                batch.num_decodes,
                num_tokens,
                len(preemptions),
                len(plan.admitted),
                0,
            )
        )
        self._durations_ns.append(duration_ns)
        self._pages_taken.append(0)

    def record_leap(
        self,
        start_ns: int,
        durations_ns: list[int],
        pages_taken: list[int],
        num_used: int,
        num_cached: int,
        scheduler: Scheduler,
    ) -> None:
        """See StepSink."""
        num_decodes = scheduler.running.num_running
        self._spans.add(
            (
                len(durations_ns),
                start_ns,
                num_used,
                num_cached,
                num_decodes,
                scheduler.waiting.num_waiting,
                scheduler.blocked,
                num_decodes,
                num_decodes,
                0,
                0,
                1,
            )
        )
        self._durations_ns.fromlist(durations_ns)
        self._pages_taken.fromlist(pages_taken)

    # Looking ----------------------------------------------------------------------------------------------

    @cached_property
    def spans(self) -> dict[str, Column]:
        """Integer columns by name, one row a span; `duration_ns` is the whole span's."""
        spans = dict(zip(_SPAN_FIELDS, self._spans.take_columns(), strict=True))
        spans["duration_ns"] = (
            np.add.reduceat(self.durations_ns, self._firsts(spans)) if len(self) else self.durations_ns
        )
        return spans

    def __len__(self) -> int:
        return len(self._durations_ns)

    @property
    def durations_ns(self) -> Column:
        """Of each step."""
        return np.frombuffer(self._durations_ns, np.int64)

    def of_steps(self, name: str, dtype: type[np.signedinteger[Any]] = np.int64) -> Column:
        """A column of the spans, one row a step: for what is alike in all steps of a span."""
        return np.repeat(self.spans[name].astype(dtype), self.spans["num_steps"])

    def used(self) -> Column:
        """Pages used in each step."""
        taken = np.frombuffer(self._pages_taken, np.int32)
        pages = np.cumsum(taken, dtype=np.int64)
        before = self.spans["used"] - (pages - taken)[self._firsts(self.spans)] if len(self) else self.spans["used"]
        pages += np.repeat(before, self.spans["num_steps"])
        return pages

    @cached_property
    def columns(self) -> dict[str, Column]:
        """Integer columns by name, one row a step."""
        steps = {name: self.of_steps(name) for name in _SPAN_FIELDS if name not in ("num_steps", "used")}
        durations_ns = steps["duration_ns"] = self.durations_ns
        used = steps["used"] = self.used()
        elapsed = np.cumsum(durations_ns) - durations_ns
        if len(self):
            elapsed -= np.repeat(elapsed[self._firsts(self.spans)], self.spans["num_steps"])
        steps["start_ns"] += elapsed
        # In a leap, a cached page is evicted only for what empty pages do not cover.
        left = np.minimum(steps["cached"], self._num_pages - used)
        steps["cached"] = np.where(steps.pop("is_leap"), left, steps["cached"])
        return steps

    @staticmethod
    def _firsts(spans: dict[str, Column]) -> Column:
        """The number of each span's first step."""
        return np.cumsum(spans["num_steps"]) - spans["num_steps"]

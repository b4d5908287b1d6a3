"""Base of the rules: a name, violations, a result, and the limits that the caller sets beyond those in the body."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec
import numpy as np

from kvarts.errors import ConfigError
from kvarts.verify.chunk import Column, RowChunk, brief, is_count, is_real

__all__ = ["MAX_LISTED", "RuleResult", "Status", "TimelineLimits", "TimelineRule", "Violation"]

Status = Literal["ok", "violated", "inconclusive", "not_run"]

MAX_LISTED = 20_000
"""Violations listed per rule; all are counted. Bounds the memory of a verdict."""


class Violation(msgspec.Struct, frozen=True):
    """One violation. `step` and `row` are None for a violation of the whole timeline; `row` counts from 0."""

    rule: str
    step: int | None
    row: int | None
    what: str
    numbers: dict[str, int | float]


class RuleResult(msgspec.Struct, frozen=True):
    """Status of one rule. `why` is the reason of a status other than ok and violated."""

    rule: str
    status: Status
    num_violations: int = 0
    why: str | None = None


class TimelineRule:
    """Base of all rules. A rule alone writes its violations and its status."""

    name = ""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.num_violations = 0
        self.why_not: str | None = None
        """The reason why the rule could not run."""
        self.why_open: str | None = None
        """The reason why the rows it saw are inconclusive."""
        self.notes: list[str] = []
        """Remarks that are not violations."""

    def feed(self, chunk: RowChunk) -> None:
        """Judge the next rows."""

    def finish(self, top: dict[str, Any]) -> None:
        """Judge the whole timeline after its last row; `top` holds the top-level fields of the body."""

    @property
    def result(self) -> RuleResult:
        """Status of the rule so far."""
        if self.num_violations:
            return RuleResult(self.name, "violated", self.num_violations)
        if self.why_not is not None:
            return RuleResult(self.name, "not_run", why=self.why_not)
        if self.why_open is not None:
            return RuleResult(self.name, "inconclusive", why=self.why_open)
        return RuleResult(self.name, "ok")

    def add(self, what: str, *, step: int | None = None, row: int | None = None, **numbers: int | float) -> None:
        """Add one violation."""
        self.num_violations += 1
        if len(self.violations) < MAX_LISTED:
            self.violations.append(Violation(self.name, step, row, what, numbers))

    def add_where(
        self, bad: Column, chunk: RowChunk, names: tuple[str, ...], say: Callable[..., str], **more: Column
    ) -> None:
        """Add a violation for every row where `bad` is true. Its text is made from the numbers, passed by name."""
        places = np.flatnonzero(bad)
        if not len(places):
            return
        room = max(0, MAX_LISTED - len(self.violations))
        listed = places[:room]
        columns = {name: chunk.columns[name][listed].tolist() for name in ("step", *names)}
        columns.update({name: column[listed].tolist() for name, column in more.items()})
        for row, *values in zip(chunk.rows[listed].tolist(), *columns.values(), strict=True):
            numbers = dict(zip(columns, values, strict=True))
            step = numbers.pop("step")
            self.violations.append(Violation(self.name, step, row, say(**numbers), numbers))
        self.num_violations += len(places)


class TimelineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on a timeline that the caller sets, beyond those in the body."""

    preempt_threshold: float = 0.95
    max_bytes: int | None = None
    block_bytes: int | None = None

    @classmethod
    def checked(cls, preempt_threshold: float, max_bytes: int | None, block_bytes: int | None) -> TimelineLimits:
        """Return the limits. Raise ConfigError for a threshold outside [0, 1] or a size below 1."""
        if not (is_real(preempt_threshold) and preempt_threshold <= 1.0):
            what = f"must be a number from 0 to 1, got {brief(preempt_threshold)}"
            raise ConfigError(what, field="preempt_threshold")
        for field, value in (("max_bytes", max_bytes), ("block_bytes", block_bytes)):
            if value is not None and not (is_count(value) and value >= 1):
                raise ConfigError(f"must be a whole number from 1 to 2^53, got {brief(value)}", field=field)
        return cls(preempt_threshold=preempt_threshold, max_bytes=max_bytes, block_bytes=block_bytes)

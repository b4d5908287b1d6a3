"""What every rule has: a name, violations, and a result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec
import numpy as np

from kvarts.verify.chunk import Chunk, Column

__all__ = ["MAX_LISTED", "Rule", "RuleResult", "Status", "Violation"]

Status = Literal["ok", "violated", "inconclusive", "not_run"]

MAX_LISTED = 20_000
"""Violations of one rule that are listed; all are counted. Bounds the memory that a verdict takes."""


class Violation(msgspec.Struct, frozen=True):
    """One violation. `step` and `row` are None where the whole timeline is meant; `row` counts from 0."""

    rule: str
    step: int | None
    row: int | None
    what: str
    numbers: dict[str, int | float]


class RuleResult(msgspec.Struct, frozen=True):
    """What became of a rule. `why`: the reason, where it is neither ok nor violated."""

    rule: str
    status: Status
    num_violations: int = 0
    why: str | None = None


class Rule:
    """Base of all rules. Written by itself only."""

    name = ""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.num_violations = 0
        self.why_not: str | None = None
        """Why it could not run."""
        self.why_open: str | None = None
        """Why what it saw does not settle it."""
        self.notes: list[str] = []
        """What is worth knowing, and no violation."""

    def feed(self, chunk: Chunk) -> None:
        """Judge the next rows."""

    def finish(self, top: dict[str, Any]) -> None:
        """Judge the whole after its last row; `top` is what the body says of it."""

    @property
    def result(self) -> RuleResult:
        """What became of it."""
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
        self, bad: Column, chunk: Chunk, names: tuple[str, ...], say: Callable[..., str], **more: Column
    ) -> None:
        """Add a violation for every row where `bad` holds; `say` gets the numbers by name."""
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

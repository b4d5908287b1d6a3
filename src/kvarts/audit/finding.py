"""Findings of an audit."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

__all__ = ["AuditError", "Finding", "Findings"]


class Finding(msgspec.Struct, frozen=True):
    """A discrepancy found in `step`. `request` and `page` are those concerned, if any."""

    step: int
    what: str
    request: int | None = None
    page: int | None = None

    def __str__(self) -> str:
        place = "" if self.page is None else f", page {self.page} of request {self.request}"
        return f"step {self.step}{place}: {self.what}"


class AuditError(AssertionError):
    """The engine and the ledger disagree. `findings` lists the discrepancies."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = tuple(findings)
        super().__init__("\n".join(map(str, findings)))


class Findings:
    """The findings of an audit so far, and the step under audit."""

    def __init__(self) -> None:
        self.all: list[Finding] = []
        self.step = -1

    def add(self, what: str, request: int | None = None, page: int | None = None) -> None:
        """Add a finding in the present step."""
        self.all.append(Finding(self.step, what, request, page))

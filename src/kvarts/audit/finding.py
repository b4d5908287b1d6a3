"""What an audit finds."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

__all__ = ["AuditError", "Finding", "Findings"]


class Finding(msgspec.Struct, frozen=True):
    """Something that does not add up, in `step`, with `page` of `request`, where one is to blame."""

    step: int
    what: str
    request: int | None = None
    page: int | None = None

    def __str__(self) -> str:
        place = "" if self.page is None else f", page {self.page} of request {self.request}"
        return f"step {self.step}{place}: {self.what}"


class AuditError(AssertionError):
    """The engine and the ledger disagree. `findings` says where."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = tuple(findings)
        super().__init__("\n".join(map(str, findings)))


class Findings:
    """What an audit has found so far, and the step that it looks at."""

    def __init__(self) -> None:
        self.all: list[Finding] = []
        self.step = -1

    def add(self, what: str, request: int | None = None, page: int | None = None) -> None:
        """Add something that does not add up in this step."""
        self.all.append(Finding(self.step, what, request, page))

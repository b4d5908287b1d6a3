"""The auditor as a reader of an engine's events."""

from __future__ import annotations

from collections.abc import Sequence

from kvarts.audit.auditor import Auditor, PageAccount
from kvarts.events import Event

__all__ = ["AuditReader"]


class AuditReader:
    """An EventReader that holds the engine whose pages are `account` against a second bookkeeping.

    `safe_first`, `full_prompt_hits`: see Auditor.
    """

    wants_details = True

    def __init__(
        self, num_pages: int, page_size: int, *, safe_first: bool = False, full_prompt_hits: bool = False
    ) -> None:
        self.auditor = Auditor(num_pages, page_size, safe_first=safe_first, full_prompt_hits=full_prompt_hits)
        self.account: PageAccount | None = None
        """What the engine says of its pages; set once the engine is built."""

    def observe(self, events: Sequence[Event]) -> None:
        """Follow `events` and compare. Raises AuditError if something does not add up."""
        self.auditor.observe(events)
        if self.account is not None:
            self.auditor.compare(self.account)

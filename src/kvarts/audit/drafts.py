"""Drafted tokens, as the audit accounts for them: the pages that they take in a step, and what is left of them."""

from __future__ import annotations

from kvarts.audit.finding import Findings
from kvarts.audit.known import KnownRequest
from kvarts.audit.resident import ResidentPages
from kvarts.events import DraftJudged, DraftTaken

__all__ = ["DraftBooks"]


class DraftBooks:
    """What becomes of drafts. `found` receives what does not add up."""

    def __init__(self, pages: ResidentPages, found: Findings, page_size: int) -> None:
        self._pages = pages
        self._found = found
        self._page_size = page_size

    def take(self, known: KnownRequest, event: DraftTaken, *, is_decoding: bool) -> int:
        """Return how many pages a draft takes; it follows the token that the decode computes in this step."""
        if not is_decoding or event.start != known.computed or event.end <= event.start:
            what = f"drafts tokens {event.start} to {event.end}, and had {known.computed} computed"
            self._found.add(what, event.request, event.start // self._page_size)
        known.drafted = event.end - event.start
        return -(-event.end // self._page_size) - len(known.blocks)

    def judge(self, known: KnownRequest, event: DraftJudged) -> None:
        """Count accepted tokens, and give back the pages that only others were in."""
        if event.num_drafted != known.drafted or not 0 <= event.num_accepted <= known.drafted:
            what = f"accepts {event.num_accepted} of {event.num_drafted} tokens, and {known.drafted} were drafted"
            self._found.add(what, event.request)
        known.drafted = 0
        known.computed += event.num_accepted
        known.known += event.num_accepted
        num_pages = max(known.num_full, -(-known.computed // self._page_size))
        self._pages.ledger.destroy(known.blocks[num_pages:])
        del known.blocks[num_pages:]
        self._pages.fill(known, min(known.computed // self._page_size, known.content.num_known_pages))

    def look(self, request: int, known: KnownRequest) -> None:
        """Look for a draft that was not judged before the next step."""
        if known.drafted:
            self._found.add("has a draft of an earlier step, which was not judged", request)
            known.drafted = 0

"""Recorded traffic, whatever file it came from.

A trace is a sequence of requests in arrival order. Prompts are strings of units: hash ids that stand for
`unit_tokens` tokens each, or single tokens. Nothing here knows an engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from kvarts.content import Content
from kvarts.traffic.trace_request import TraceRequest, Units

__all__ = ["Trace", "TraceRequest"]

NO_PREFIXES = (
    "the trace does not tell what prompts have in common: no two of them share a page, and hit ratios are lower bounds"
)


class Trace:
    """Requests in arrival order, and what their units mean.

    `requests` may be any iterable; what is no list is read as it is needed, so it must come in arrival order.
    `has_output_tokens`: some request has `output_units`, so prompts have to be compared token by token.
    `has_sessions`: some request has a `session_id`; found out by itself for a list.
    `knows_prefixes`: the recording says what prompts have in common; if not, every prompt is unlike any other.
    `left_out`: how many rows of the file are not requests here, by reason. `warnings`: what a report has to say of how
    it was read.
    """

    def __init__(
        self,
        requests: Iterable[TraceRequest],
        *,
        unit_tokens: int = 1,
        has_output_tokens: bool = False,
        has_sessions: bool = False,
        knows_prefixes: bool = True,
        name: str = "trace",
        num_skipped_lines: int = 0,
        left_out: Mapping[str, int] | None = None,
        warnings: Sequence[str] = (),
    ) -> None:
        self._requests = requests
        self.unit_tokens = unit_tokens
        self.has_output_tokens = has_output_tokens
        if isinstance(requests, list):
            has_sessions = any(request.session_id is not None for request in requests)
        self.has_sessions = has_sessions
        self.knows_prefixes = knows_prefixes
        self.name = name
        self.num_skipped_lines = num_skipped_lines
        self.left_out = dict(left_out or {})
        self.warnings = list(warnings)

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self._requests)

    @property
    def requests(self) -> list[TraceRequest] | None:
        """All requests, if they are known beforehand."""
        return self._requests if isinstance(self._requests, list) else None

    def said(self) -> list[str]:
        """Return the warnings that a report repeats, with what hit ratios are worth."""
        if self.knows_prefixes:
            return self.warnings
        return [*self.warnings, NO_PREFIXES]

    def content(self, request: TraceRequest, *, page_size: int, owner: int, know_output: bool = True) -> Content:
        """Return what the pages of `request` will hold.

        `know_output`: its generated tokens too, if the trace has them.
        """
        num_tokens = request.num_prompt_tokens
        units, unit_tokens = request.units, self.unit_tokens
        units = spell(units)
        if self.has_output_tokens:
            if unit_tokens > 1:
                ids = np.frombuffer(units, np.uint64)
                # No more of the last unit than there are tokens of it.
                units = np.repeat(ids, min(unit_tokens, num_tokens))[:num_tokens].tobytes()
                unit_tokens = 1
            output = request.output_units
            if output is not None and know_output:
                units += spell(output)
                num_tokens += request.num_output_tokens
        return Content(
            units,
            num_tokens=num_tokens,
            page_size=page_size,
            unit_tokens=unit_tokens,
            owner=owner,
            salt=request.tenant,
        )


def spell(units: Units) -> bytes:
    """Return the ids of `units`, 8 bytes each."""
    if isinstance(units, bytes):
        return units
    return b"".join(np.arange(ids.start, ids.stop, dtype=np.uint64).tobytes() for ids in units)

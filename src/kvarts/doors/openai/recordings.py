"""Records of the requests that arrive at a live engine: a trace that `kvarts replay` reads.

Arrival times are those of the engine, whose clock does not move between two steps. A replay of the record therefore
places every request before the same step.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvarts.base.files import write_whole
from kvarts.core.request import Request
from kvarts.core.sampling import SamplingParams
from kvarts.sim.traffic.logs import RecordedRow

__all__ = ["ArrivalRecorder"]


class ArrivalRecorder:
    """Records requests, in the engine's thread. Owner of the rows, in arrival order.

    A row's `ended` is the state of its request when the rows are made. A request that was ended from outside is
    replayed with the tokens that it had received.
    """

    def __init__(self) -> None:
        self._arrived: list[tuple[Request, SamplingParams]] = []

    def arrived(self, request: Request, params: SamplingParams) -> None:
        """Record a request that was queued."""
        self._arrived.append((request, params))

    def rejected(self, request: Request, params: SamplingParams) -> None:
        """Record a request that could never run."""
        self._arrived.append((request, params))

    def rows(self) -> list[RecordedRow]:
        """Return the arrivals so far, with the generated tokens."""
        return [_row(*each) for each in self._arrived]

    @property
    def began_ns(self) -> int | None:
        """When the first request arrived."""
        return min((request.arrival_ns for request, _ in self._arrived), default=None)

    def write(self, path: Path, *, began_ns: int | None = None) -> None:
        """Write the rows to a file, one per line. Raise OutputError.

        `began_ns`: start of the run, if other models of the same run are recorded as well.
        """
        encoder = msgspec.json.Encoder()
        rows = self.rows()
        if began_ns is not None:
            rows = [msgspec.structs.replace(row, began_ns=began_ns) for row in rows]
        write_whole(path, b"".join(encoder.encode(row) + b"\n" for row in rows))


def _row(request: Request, params: SamplingParams) -> RecordedRow:
    content, num_prompt = request.content, request.num_prompt_tokens
    was_rejected = request.state.name == "REJECTED"
    num_output = request.max_tokens if was_rejected else request.num_output_tokens
    known = content.num_known_tokens
    return RecordedRow(
        arrival_ns=request.arrival_ns,
        prompt=content.tokens(0, num_prompt).tolist(),
        num_output_tokens=num_output,
        output=content.tokens(num_prompt, min(known, num_prompt + num_output)).tolist(),
        max_tokens=max(1, params.max_tokens),  # a request that is foreseen has those that it will get
        priority=request.priority,
        tenant=content.salt,
        hints=msgspec.UNSET if content.hints is None else content.hints,
        request_id=request.request_id,
        ended=request.state.name.lower(),
    )

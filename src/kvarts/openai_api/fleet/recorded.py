"""A record of the arrivals at a fleet of mocks: a trace that `kvarts replay` reads, with the same fleet."""

from __future__ import annotations

import msgspec

from kvarts.openai_api.fleet.paced import PacedFleet
from kvarts.openai_api.recorded import ArrivalRecorder
from kvarts.traffic.recorded import RecordedRow

__all__ = ["FleetRecorder"]


class FleetRecorder(ArrivalRecorder):
    """Records the requests that arrive at any door of a fleet.

    A row has all tokens that its answer would have had, and the time at which its client gave it up. A request that was
    sent to a worker has its number, and that of the line whose pages it has fetched.
    """

    def __init__(self, fleet: PacedFleet) -> None:
        super().__init__()
        self._fleet = fleet

    def rows(self) -> list[RecordedRow]:
        """Return the arrivals so far."""
        lines = {request.index: line for line, (request, _) in enumerate(self._arrived)}
        direct_of, gave_up_ns = self._fleet.direct, self._fleet.gave_up_ns
        rows = []
        for (request, _), row in zip(self._arrived, super().rows(), strict=True):
            content, num_prompt = request.content, request.num_prompt_tokens
            changes: dict[str, object] = {
                "began_ns": 0,  # faults and ages of metrics are counted from there
                "num_output_tokens": request.max_tokens,
                "output": content.tokens(num_prompt, content.num_known_tokens).tolist(),
            }
            if request.index in gave_up_ns:
                changes["cancel_after_ns"] = gave_up_ns[request.index] - request.arrival_ns
            direct = direct_of.get(request.index)
            if direct is not None:
                changes["worker"] = direct.worker
                if direct.is_left:
                    changes["is_left"] = True
                    changes["ended"] = "finished"
                if direct.fetches is not None:
                    changes["fetches"] = lines[direct.fetches]
            rows.append(msgspec.structs.replace(row, **changes))
        return rows

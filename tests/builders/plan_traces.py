"""Small random traces with much in common, for curves that are held against naive ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

from kvarts.core.content import pack_units
from kvarts.sim.traffic.trace import Trace, TraceRequest, spell

__all__ = ["small_traces"]

Draw = Callable[[st.SearchStrategy[Any]], Any]


@st.composite
def small_traces(
    draw: Draw, *, most_requests: int = 12, most_units: int = 6, outputs: bool = True, num_ids: int = 2
) -> Trace:
    """A trace of few ids: prompts that branch, repeat and extend each other; of tenants, sessions, known outputs."""
    unit_tokens = draw(st.sampled_from([1, 2, 3, 4]))
    ids: st.SearchStrategy[int] = st.integers(0, num_ids - 1)
    has_outputs = outputs and draw(st.booleans())
    requests: list[TraceRequest] = []
    now_ns = 0
    for row in range(draw(st.integers(1, most_requests))):
        units = draw(st.lists(ids, min_size=1, max_size=most_units))
        if requests and draw(st.booleans()):
            # Many prompts go on from an earlier one, and from its output.
            before = requests[draw(st.integers(0, len(requests) - 1))]
            units = np.frombuffer(spell(before.units), np.uint64).tolist() + units[:2]
        cut = draw(st.integers(0, unit_tokens - 1))
        output = draw(st.lists(ids, min_size=1, max_size=3)) if has_outputs and draw(st.booleans()) else None
        now_ns += draw(st.integers(0, 3)) * 10**9
        requests.append(
            TraceRequest(
                row,
                now_ns,
                pack_units(units),
                max(1, len(units) * unit_tokens - cut),
                draw(st.integers(1, 4)) if output is None else len(output),
                output_units=None if output is None else pack_units(output),
                tenant=draw(st.sampled_from([None, None, "other"])),
                session_id=draw(st.sampled_from([None, "a", "b"])),
            )
        )
    return Trace(requests, unit_tokens=unit_tokens, has_output_tokens=any(r.output_units for r in requests))

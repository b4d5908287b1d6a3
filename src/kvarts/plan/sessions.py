"""An eviction order that knows when sessions end, and evicts the pages that only an ended session used first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvarts.kv.eviction import Run
from kvarts.plan.orders import Rank, RankedOrder
from kvarts.traffic.trace import Trace, spell

__all__ = ["SessionAwareOrder", "finishing"]


class SessionAwareOrder(RankedOrder):
    """LRU, but the pages of an ended session are evicted first, back to where other requests branched off.

    `last_turns`: the prompts of the last turn of each session. A prompt is looked up only when its request is done,
    which is when a client would announce the end of the session; the order does not know it earlier. The latest
    turn of a session that continues is kept as long as LRU keeps it.
    """

    def __init__(self, last_turns: frozenset[bytes]) -> None:
        super().__init__()
        self._last_turns = last_turns
        self._is_over = False

    def released(self, nodes: Sequence[Run]) -> None:
        """List `nodes`, as expendable if they belong to a last turn."""
        self._is_over = bytes(nodes[0].content.units) in self._last_turns
        super().released(nodes)

    def rank(self, node: Run, hits: int, born: int) -> Rank:
        """Return 0 for pages of ended sessions, 1 for all others."""
        # Nodes are listed deepest first: from the first one with several children upwards, all are shared.
        self._is_over = self._is_over and len(node.children or ()) < 2
        return (0 if self._is_over else 1, self.now)


def finishing(trace: Trace) -> Callable[[], SessionAwareOrder]:
    """Return a factory of orders that know the ends of the sessions of `trace`."""
    last: dict[str, int] = {}
    rows = list(trace)
    for index, request in enumerate(rows):
        if request.session_id is not None:
            last[request.session_id] = index
    ends = [rows[index] for index in last.values()]
    prompts = frozenset(
        bytes(trace.content(request, page_size=1, owner=0).units) if trace.has_output_tokens else spell(request.units)
        for request in ends
    )
    return lambda: SessionAwareOrder(prompts)

"""An eviction order that is told when a session has ended: what only that session had goes first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvarts.kv.eviction import Run
from kvarts.plan.orders import Rank, RankedOrder
from kvarts.traffic.trace import Trace, spell

__all__ = ["SessionAwareOrder", "finishing"]


class SessionAwareOrder(RankedOrder):
    """LRU, but what a session that has ended leaves behind goes first, up to where others went on from the same.

    `last_turns`: the prompts of last turns. A prompt is looked up when its request is done, as a client would say then
    that the session has ended; before that the order knows nothing of it. The last turn of a session that goes on is
    kept as long as LRU keeps it.
    """

    def __init__(self, last_turns: frozenset[bytes]) -> None:
        super().__init__()
        self._last_turns = last_turns
        self._is_over = False

    def released(self, nodes: Sequence[Run]) -> None:
        """List `nodes`: as over, if they are of a last turn."""
        self._is_over = bytes(nodes[0].content.units) in self._last_turns
        super().released(nodes)

    def rank(self, node: Run, hits: int, born: int) -> Rank:
        """Return 0 for what is over, 1 for all else."""
        # The nodes come deepest first: above the first that others follow, all is shared.
        self._is_over = self._is_over and len(node.children or ()) < 2
        return (0 if self._is_over else 1, self.now)


def finishing(trace: Trace) -> Callable[[], SessionAwareOrder]:
    """Return what makes orders that are told of the ends of the sessions of `trace`."""
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

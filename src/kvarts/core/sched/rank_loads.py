"""vLLM's choice among data-parallel ranks: by their loads, as its front end knows them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["RANKS_STALENESS_NS", "RankLoads"]

RANKS_STALENESS_NS = 100_000_000
"""Interval at which vLLM's ranks report their loads to its front end."""
WAITING_WEIGHT = 6.0
"""vLLM's weight of a rank's waiting requests, per share of its pages in use beyond a half."""


class RankLoads:
    """The choice of a rank by a front end of vLLM 0.32 with `--data-parallel-size`.

    The score of a rank is its requests in flight, or the requests that run and wait there by the last report and those
    placed since, if these are more. A rank with waiting requests and more than half of its pages in use scores higher,
    up to four times its waiting requests. The lowest score wins; the first of equal ranks is the one after the first of
    the choice before.

    Owner of the placements since the last reports, and of the rank at which the next scan starts.
    """

    def __init__(self) -> None:
        self._num_placed: dict[int, int] = {}
        self._start = 0

    def forget_placed(self) -> None:
        """Forget the placements so far: new reports count them."""
        self._num_placed.clear()

    def choose(
        self,
        ranks: list[int],
        num_in_flight: Sequence[int],
        running: Sequence[int],
        waiting: Sequence[int],
        usage: Sequence[float],
    ) -> int:
        """Return the one of `ranks` with the lowest score, and count a request as placed there."""
        start = self._start % len(ranks)
        chosen, lowest = ranks[start], float("inf")
        for rank in ranks[start:] + ranks[:start]:
            num_waiting = waiting[rank] + self._num_placed.get(rank, 0)
            score = float(max(num_in_flight[rank], num_waiting + running[rank]))
            if num_waiting:
                score += num_waiting * WAITING_WEIGHT * max(0.0, usage[rank] - 0.5)
            if score < lowest:
                chosen, lowest = rank, score
        self._num_placed[chosen] = self._num_placed.get(chosen, 0) + 1
        self._start = (start + 1) % len(ranks)
        return chosen

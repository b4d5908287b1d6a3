"""Counts of removed engines, so that the totals of a server never fall."""

from __future__ import annotations

from threading import Lock
from time import time
from typing import TYPE_CHECKING

from kvarts.openai_api.meter import Meter

if TYPE_CHECKING:
    from kvarts.engine import Engine

__all__ = ["GoneEngines", "num_queried_below"]


class GoneEngines:
    """The summed counts of removed engines.

    `num_evicted`: cached pages that were overwritten. `num_queried_below`: tokens that tiers below were asked for.
    `lock`: to be held while counts are read, since `take` moves them.
    """

    def __init__(self, name: str, meter: Meter) -> None:
        self.name = name
        self.meter = meter
        self.created_s = int(time())
        self.lock = Lock()
        self.num_evicted = 0
        self.num_queried_below = 0

    def take(self, meter: Meter, core: Engine) -> None:
        """Add the counts of an engine, which are zero from then on."""
        with self.lock:
            self.num_evicted += core.scheduler.cache.num_evicted
            self.num_queried_below += num_queried_below(meter, core)
            self.meter.take(meter)


def num_queried_below(meter: Meter, core: Engine) -> int:
    """Return the prompt tokens that an engine did not find on its device; 0 without tiers below."""
    if core.tiers is None:
        return 0
    return meter.num_queried_tokens - meter.num_hit_tokens + meter.num_hit_tokens_below

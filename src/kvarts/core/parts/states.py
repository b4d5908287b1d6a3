"""States of layers that keep one per page, and hints of time for eviction orders: what a cache is told about a step."""

from __future__ import annotations

from kvarts.core.kv.cache import Cache
from kvarts.core.sched.step import FOR_BUDGET, PASS, Acts, Ask, Step, Verdict

__all__ = ["StatesOfSteps", "TimedCache"]


class StatesOfSteps:
    """The gate of states that the step being planned computes: requests begin after them in later steps only."""

    __slots__ = ("_cache",)

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def acts(self) -> Acts:
        """Return where it acts."""
        return Acts(gates={"states": self.is_before}, before=self.begin)

    def begin(self, step: Step) -> None:
        """Let the cache begin a step, which has computed no state yet."""
        self._cache.states.begin_step()

    def is_before(self, ask: Ask, step: Step) -> Verdict:
        """Let the head pass unless this step computes the state that it begins after."""
        return FOR_BUDGET if ask.match.num_pages and self._cache.states.is_of_step(ask.match) else PASS


class TimedCache:
    """The time of steps, for a cache whose eviction order uses times."""

    __slots__ = ("_cache",)

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def acts(self) -> Acts:
        """Return where it acts."""
        return Acts(before=self.begin, ending=self._cache.set_time)

    def begin(self, step: Step) -> None:
        """Set the time to the start of the step."""
        self._cache.set_time(step.now_ns)

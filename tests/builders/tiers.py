"""The tiers below an engine, as what they are."""

from __future__ import annotations

from kvarts.engine import Engine
from kvarts.offload.offloader import Offloader
from kvarts.offload.page_layout import PageLayout
from kvarts.sim.replica import Replica

__all__ = ["NoLinks", "offloader_of"]


def offloader_of(engine: Engine | Replica) -> Offloader[PageLayout]:
    """What is below `engine`, which has tiers."""
    tiers = engine.scheduler.tiers
    assert isinstance(tiers, Offloader)
    return tiers


class NoLinks:
    """Links to a store that carry everything at once."""

    def begin(self, worker: int, number: int, num_bytes: int, now_ns: int, *, is_read: bool) -> None: ...

    def within_ns(self, worker: int, num_bytes: int, *, is_read: bool) -> int:
        return 0

    def cancel(self, worker: int, number: int) -> None: ...

    def left_ns(self, worker: int, number: int, now_ns: int) -> int:
        return 0

"""The tiers below an engine, as what they are."""

from __future__ import annotations

from kvarts.engine import Engine
from kvarts.offload.offloader import Offloader
from kvarts.offload.page_layout import PageLayout
from kvarts.sim.replica import Replica

__all__ = ["offloader_of"]


def offloader_of(engine: Engine | Replica) -> Offloader[PageLayout]:
    """What is below `engine`, which has tiers."""
    tiers = engine.scheduler.tiers
    assert isinstance(tiers, Offloader)
    return tiers

"""Routers that read events, whatever their lag, where those of a replay would ask caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvarts.core.kv.transfer import PeersGain
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replay import open_router, tiers_of
from kvarts.sim.router import Routed, Router

__all__ = ["told_router"]


def told_router(
    config: ReplayConfig,
    engines: Sequence[Routed],
    *,
    ranks: int = 1,
    shares_devices: bool = False,
    peers: PeersGain | None = None,
    tiers: Mapping[str, bool] | None = None,
) -> Router:
    """A router as `make_router` of a replay makes it, but it reads events of its workers."""
    assert ranks == 1
    return open_router(config, tiers_of(config) if tiers is None else tiers, peers, None)

"""Routers that read events, whatever their lag, where those of a replay would ask caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvarts.kv.transfer import PeersGain
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replay import tiers_of
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
    if tiers is None:
        tiers = tiers_of(config)
    return config.routing_settings.open(
        config.router,
        num_workers=config.replicas,
        page_size=config.page_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        tiers=("device", *tiers),
        directory=None,
        peers=peers,
        are_files=tuple(tiers.values()),
        memory=None if config.kv_groups == "off" else config.memory,
    )

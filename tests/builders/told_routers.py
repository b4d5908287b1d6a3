"""Routers that read events, whatever their lag, where those of a replay would ask caches."""

from __future__ import annotations

from collections.abc import Sequence

from kvarts.kv.transfer import PeersGain
from kvarts.sim.config import ReplayConfig
from kvarts.sim.router import Routed, Router

__all__ = ["told_router"]


def told_router(
    config: ReplayConfig,
    engines: Sequence[Routed],
    *,
    ranks: int = 1,
    shares_devices: bool = False,
    peers: PeersGain | None = None,
) -> Router:
    """A router as `make_router` of a replay makes it, but it reads events of its workers."""
    assert ranks == 1
    return config.routing_settings.open(
        config.router,
        num_workers=config.replicas,
        page_size=config.page_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        tiers=("device", *config.tiers),
        directory=None,
        peers=peers,
        are_files=() if config.offload is None else config.offload.are_files,
        memory=None if config.kv_groups == "off" else config.memory,
    )

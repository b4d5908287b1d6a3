"""Specification of a tier: its name, its capacity and its channels."""

from __future__ import annotations

from typing import Protocol

import msgspec

from kvarts.offload.channel import Channel

__all__ = ["ChannelSpec", "MakeChannel", "TierSpec"]


class MakeChannel(Protocol):
    """Makes a channel: one of known speed, a measured one, or one on a bus."""

    def __call__(self, name: str, *, latency_us: float, bytes_per_s: int) -> Channel:
        """Return a new channel."""


class ChannelSpec(msgspec.Struct, frozen=True):
    """One direction of a connection: a latency, added to every transfer, and a bandwidth."""

    name: str
    bytes_per_s: int
    latency_us: float

    def open(self, make: MakeChannel = Channel) -> Channel:
        """Return a new channel."""
        return make(self.name, latency_us=self.latency_us, bytes_per_s=self.bytes_per_s)


class TierSpec(msgspec.Struct, frozen=True):
    """One tier. `write`: the channel to it. `is_files`: its pages are addressed by keys and outlive the process."""

    name: str
    num_pages: int
    write: ChannelSpec
    read: ChannelSpec
    is_files: bool = False

"""What a tier is built from: its name, its capacity and its channels."""

from __future__ import annotations

import msgspec

from kvarts.offload.channel import Channel

__all__ = ["ChannelSpec", "TierSpec"]


class ChannelSpec(msgspec.Struct, frozen=True):
    """One direction of a connection: `latency_us` on top of every transfer, and a bandwidth."""

    name: str
    bytes_per_s: int
    latency_us: float

    def open(self, make: type[Channel] = Channel) -> Channel:
        """Return a channel that carries nothing yet."""
        return make(self.name, latency_us=self.latency_us, bytes_per_s=self.bytes_per_s)


class TierSpec(msgspec.Struct, frozen=True):
    """One tier. `write`: towards it. `is_files`: its pages go by keys and outlive the process."""

    name: str
    num_pages: int
    write: ChannelSpec
    read: ChannelSpec
    is_files: bool = False

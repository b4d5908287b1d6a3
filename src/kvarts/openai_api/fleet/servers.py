"""The servers of a fleet: the router's, and behind it those of the workers at the next ports."""

from __future__ import annotations

import asyncio
import socket

import msgspec

from kvarts.openai_api.fleet.opening import OpenedFleet
from kvarts.openai_api.models import Models
from kvarts.openai_api.server import Address, OpenAIServer

__all__ = ["FleetModels", "FleetServer"]


class FleetServer:
    """A server like an OpenAIServer: all doors of a fleet, opened and closed together.

    `address`: that of the router; the workers have the next ports, or any free ones if its port is 0. Raises
    ConfigError if one of them is not available.
    """

    def __init__(self, fleet: OpenedFleet, address: Address) -> None:
        in_front, *behind = _listen(address, len(fleet.workers))
        self._front = OpenAIServer(fleet.front.app, fleet.front.models, address, in_front)
        self._servers = [self._front]
        self.urls: list[tuple[str, str]] = []
        """The name and the URL of each worker."""
        for worker, listening in zip(fleet.workers, behind, strict=True):
            server = OpenAIServer(worker.opened.app, worker.opened.models, address, listening)
            self._servers.append(server)
            self.urls.append((worker.name, server.url))
            worker.transfers.address = address.host, listening.getsockname()[1]

    @property
    def url(self) -> str:
        """The URL of the router."""
        return self._front.url

    async def start(self) -> None:
        """Accept connections at all doors, at the router's last."""
        for server in reversed(self._servers):
            await server.start()

    async def stop(self, drain_s: float = 30.0) -> bool:
        """Refuse new requests, wait for those under way, and close. Return whether all of them ended normally."""
        return all(await asyncio.gather(*(server.stop(drain_s) for server in self._servers)))


def _listen(address: Address, num_workers: int) -> list[socket.socket]:
    """Return the sockets of a router and its workers; none is left open if one is not available."""
    sockets: list[socket.socket] = []
    try:
        for number in range(num_workers + 1):
            port = address.port + number if address.port else 0
            sockets.append(msgspec.structs.replace(address, port=port).listen())
    except BaseException:
        for each in sockets:
            each.close()
        raise
    return sockets


class FleetModels:
    """The Lifecycle of all doors of a fleet."""

    def __init__(self, fleet: OpenedFleet) -> None:
        self._models: list[Models] = [fleet.front.models, *(worker.opened.models for worker in fleet.workers)]

    @property
    def num_live(self) -> int:
        """Requests under way."""
        return sum(models.num_live for models in self._models)

    @property
    def most_late_ns(self) -> int:
        """The largest delay of anything that happened."""
        return self._models[0].most_late_ns

    def set_starting(self, *, is_starting: bool) -> None:
        """Set whether the servers are still starting, and therefore refuse requests."""
        for models in self._models:
            models.set_starting(is_starting=is_starting)

    def leave(self) -> None:
        """Report a shutdown at /health; requests are still accepted."""
        for models in self._models:
            models.leave()

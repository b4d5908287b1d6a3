"""The servers of a fleet: the router's, and behind it those of the workers at the next ports."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from itertools import count

import msgspec

from kvarts.base.errors import ConfigError
from kvarts.doors.openai.fleet.opening import OpenedFleet, OpenedWorker
from kvarts.doors.openai.served import Models
from kvarts.doors.openai.server import Address, OpenAIServer
from kvarts.run.llm_engine import EngineDeadError

__all__ = ["FleetServer"]

CLOSING_S = 5.0
"""How long the door of a worker that has left waits for answers that are still being written."""


class FleetServer(OpenAIServer):
    """All doors of a fleet, opened and closed together.

    `address`: that of the router; the workers have the next ports, or any free ones if its port is 0. A worker that a
    scaler adds has the lowest free port of this row, or any other one if that is taken. `say` receives the URL of each
    added worker, and each removal. Raises ConfigError if a port is not available at the start.
    """

    def __init__(self, fleet: OpenedFleet, address: Address, say: Callable[[str], object] = lambda _: None) -> None:
        in_front, *behind = _listen(address, len(fleet.workers))
        self._fleet = fleet
        self._address = address
        self._say = say
        super().__init__(fleet.app, fleet.models, address, in_front)
        self._behind: dict[int, _DoorOfWorker] = {}
        for place, (worker, listening) in enumerate(zip(fleet.workers, behind, strict=True)):
            self._add(worker, place, listening)
        self._changes: asyncio.Queue[tuple[list[OpenedWorker], list[OpenedWorker]]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: set[asyncio.Task[None]] = set()

    def _add(self, worker: OpenedWorker, place: int, listening: socket.socket) -> OpenAIServer:
        server = OpenAIServer(worker.opened.app, worker.opened.models, self._address, listening)
        self._behind[worker.index] = _DoorOfWorker(worker, place, server)
        self.urls.append((worker.name, server.url))
        worker.transfers.address = self._address.host, listening.getsockname()[1]
        return server

    def models(self) -> list[Models]:
        """Return the models of the router, and then those of each worker that is there."""
        return [self._fleet.models, *(worker.opened.models for worker in self._fleet.workers)]

    async def start(self) -> None:
        """Accept connections at all doors, at the router's last."""
        fleet, loop = self._fleet, asyncio.get_running_loop()

        def scaled(added: list[OpenedWorker], gone: list[OpenedWorker]) -> None:
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(self._changes.put_nowait, (added, gone))

        for door in reversed(self._behind.values()):
            await door.server.start()
        if fleet.config.scaler is not None:
            fleet.on_scaled = scaled
            self._tasks = [asyncio.ensure_future(self._follow()), asyncio.ensure_future(self._scale())]
        await super().start()

    async def stop(self, drain_s: float = 30.0) -> bool:
        """Refuse new requests, wait for those under way, and close. Return whether all of them ended normally."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._closing, return_exceptions=True)
        behind = (door.server.stop(drain_s) for door in self._behind.values())
        return all(await asyncio.gather(super().stop(drain_s), *behind))

    async def _scale(self) -> None:
        """Let the scaler decide in time, even while no request moves the fleet on."""
        fleet = self._fleet
        with suppress(EngineDeadError):
            while True:
                await asyncio.sleep(await asyncio.wrap_future(fleet.loop.post(lambda _: fleet.fleet.scale())))

    async def _follow(self) -> None:
        """Open the doors of workers that are added, one by one, and close those of workers that have left."""
        while True:
            await self._follow_change(*await self._changes.get())

    async def _follow_change(self, added: list[OpenedWorker], gone: list[OpenedWorker]) -> None:
        for worker in added:
            await self._open(worker)
        self._fleet.look_again()
        for worker in gone:
            closing = asyncio.ensure_future(self._close(worker))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _open(self, worker: OpenedWorker) -> None:
        taken = {door.place for door in self._behind.values()}
        place = next(place for place in count() if place not in taken)
        try:
            listening = self._listen_at(place)
        except (ConfigError, OSError) as error:
            self._say(f"{worker.name} has no port of its own, and serves behind the router only: {error}")
            return
        server = self._add(worker, place, listening)
        worker.opened.models.set_starting(is_starting=self._fleet.served.is_starting)
        await server.start()
        self._say(f"{worker.name} on {server.url}/v1")

    def _listen_at(self, place: int) -> socket.socket:
        """Return a listening socket at a place of the row, or else at any free port. Raise ConfigError or OSError."""
        try:
            return _at_place(self._address, place + 1).listen()
        except (ConfigError, OSError):
            return msgspec.structs.replace(self._address, port=0).listen()

    async def _close(self, worker: OpenedWorker) -> None:
        """Close the door of a removed worker."""
        door = self._behind.pop(worker.index, None)
        try:
            if door is not None:
                self.urls.remove((worker.name, door.server.url))
                await door.server.stop(CLOSING_S)
        finally:
            await asyncio.to_thread(self._fleet.close_events, worker.index)
        self._say(f"{worker.name} has left")


class _DoorOfWorker(msgspec.Struct, frozen=True):
    """The server of a worker, and the number of its port after the router's."""

    worker: OpenedWorker
    place: int
    server: OpenAIServer


def _listen(address: Address, num_workers: int) -> list[socket.socket]:
    """Return the sockets of a router and its workers; none is left open if one is not available."""
    sockets: list[socket.socket] = []
    try:
        sockets += (_at_place(address, number).listen() for number in range(num_workers + 1))
    except BaseException:
        for each in sockets:
            each.close()
        raise
    return sockets


def _at_place(address: Address, number: int) -> Address:
    """Return the address `number` ports after another one; port 0 is any free one."""
    port = address.port + number if address.port else 0
    return msgspec.structs.replace(address, port=port)

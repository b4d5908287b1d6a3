"""The private door between workers: requests and answers as messages of ASGI, over UNIX sockets.

A worker passes a request on with its head and body, and the other answers it as any request, with the same checks of
access. Each request has a connection; it closes early if the client or a worker has disconnected. The sockets are in a
directory that only this user can enter.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, MutableMapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvarts.openai_api.app import ABORT, OpenAIApp
from kvarts.openai_api.http import RELAYED

__all__ = ["PeerAnswer", "PeerGoneError", "PeerRequest", "WorkerPeers"]

SIZE_BYTES = 4
TIMEOUT_S = 10.0
"""Time limit of a short answer."""


class PeerRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request. `headers`: with names in lower case."""

    method: str
    path: str
    query: bytes = b""
    headers: dict[bytes, bytes] = {}
    body: bytes = b""
    client: tuple[str, int] | None = None


class _Message(msgspec.Struct, frozen=True, array_like=True):
    """A message of an answer. `status`: 0 for a part of its body."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = []
    body: bytes = b""
    more_body: bool = True

    @staticmethod
    def of(message: Mapping[str, Any]) -> _Message:
        """Return a message of ASGI."""
        if message["type"] == "http.response.start":
            return _Message(message["status"], [(bytes(name), bytes(value)) for name, value in message["headers"]])
        return _Message(body=message.get("body", b""), more_body=message.get("more_body", False))

    def asgi(self) -> MutableMapping[str, Any]:
        """Return it as a message of ASGI."""
        if self.status:
            return {"type": "http.response.start", "status": self.status, "headers": self.headers}
        return {"type": "http.response.body", "body": self.body, "more_body": self.more_body}


class PeerAnswer(msgspec.Struct, frozen=True):
    """A whole answer."""

    status: int
    payload: bytes


class PeerGoneError(Exception):
    """A worker has closed the connection before the end of its answer, or was not `reached` at all."""

    def __init__(self, *, reached: bool) -> None:
        super().__init__()
        self.reached = reached


StructT = TypeVar("StructT", PeerRequest, _Message)


class WorkerPeers:
    """The private doors of all workers, by rank. `rank`: the rank of the worker whose door `open` opens."""

    def __init__(self, rank: int, paths: Sequence[Path]) -> None:
        self.rank = rank
        self._paths = tuple(paths)
        self._door: asyncio.Server | None = None

    @property
    def others(self) -> list[int]:
        """The ranks of all other workers."""
        return [rank for rank in range(len(self._paths)) if rank != self.rank]

    def __len__(self) -> int:
        return len(self._paths)

    async def open(self, app: OpenAIApp) -> None:
        """Let other workers pass on requests to `app`."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await _serve(app, reader, writer)
            except (ConnectionError, PeerGoneError):
                pass  # the other worker has closed the connection
            finally:
                writer.close()

        self._door = await asyncio.start_unix_server(serve, self._paths[self.rank])

    def close(self) -> None:
        """Accept no more requests of other workers."""
        if self._door is not None:
            self._door.close()

    async def messages(self, rank: int, asked: PeerRequest) -> AsyncGenerator[MutableMapping[str, Any]]:
        """Pass a request on to a worker, and yield the messages of its answer. Raise PeerGoneError if it is cut off."""
        try:
            reader, writer = await asyncio.open_unix_connection(self._paths[rank])
        except OSError:
            raise PeerGoneError(reached=False) from None
        try:
            await _write(writer, asked)
            more = True
            while more:
                message = await _read(reader, _Message)
                more = message.more_body
                yield message.asgi()
        except ConnectionError:
            raise PeerGoneError(reached=True) from None
        finally:
            writer.close()

    async def ask(self, rank: int, asked: PeerRequest) -> PeerAnswer:
        """Return the whole answer of a worker. Raise PeerGoneError if it is late or cut off."""
        status, parts = 0, []
        try:
            async with asyncio.timeout(TIMEOUT_S), aclosing(self.messages(rank, asked)) as messages:
                async for message in messages:
                    status = message.get("status", status)
                    parts.append(message.get("body", b""))
        except TimeoutError:
            raise PeerGoneError(reached=True) from None
        return PeerAnswer(status, b"".join(parts))


async def _serve(app: OpenAIApp, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the request of one connection."""
    asked = await _read(reader, PeerRequest)
    is_read = False

    async def receive() -> MutableMapping[str, Any]:
        nonlocal is_read
        if not is_read:
            is_read = True
            return {"type": "http.request", "body": asked.body, "more_body": False}
        with suppress(ConnectionError):
            await reader.read(1)
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        await _write(writer, _Message.of(message))

    scope = {
        "type": "http",
        "method": asked.method,
        "path": asked.path,
        "query_string": asked.query,
        "headers": [*asked.headers.items()],
        "client": asked.client,
        "extensions": {RELAYED: {}, ABORT: {"call": writer.transport.abort}},
    }
    await app(scope, receive, send)


async def _write(writer: asyncio.StreamWriter, message: PeerRequest | _Message) -> None:
    payload = msgspec.msgpack.encode(message)
    writer.write(len(payload).to_bytes(SIZE_BYTES, "big") + payload)
    await writer.drain()


async def _read(reader: asyncio.StreamReader, kind: type[StructT]) -> StructT:
    try:
        size = int.from_bytes(await reader.readexactly(SIZE_BYTES), "big")
        return msgspec.msgpack.decode(await reader.readexactly(size), type=kind)
    except asyncio.IncompleteReadError:
        raise PeerGoneError(reached=True) from None

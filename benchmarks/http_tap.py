"""Listens before a server, hands bytes through, and keeps the first request of each method and path, as it came."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path

__all__ = ["Tap"]


class Tap:
    """A tap on the loopback address. What it kept is written to `directory` as NAME-METHOD-path.http."""

    def __init__(self, target: str, directory: Path, name: str) -> None:
        self._host, _, port = target.removeprefix("http://").partition(":")
        self._port = int(port)
        self._directory = directory
        self._name = name
        self._kept: set[str] = set()
        self._ready = threading.Event()
        self.url = ""
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()
        self._ready.wait(10)

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._handle, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await server.serve_forever()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward, out = await asyncio.open_connection(self._host, self._port)
        seen = bytearray()

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter, *, keeps: bool) -> None:
            try:
                while data := await source.read(65536):
                    if keeps:
                        seen.extend(data)
                        self._keep(seen)
                    target.write(data)
                    await target.drain()
            except ConnectionError:
                pass
            finally:
                target.close()

        await asyncio.gather(copy(reader, out, keeps=True), copy(onward, writer, keeps=False))

    def _keep(self, seen: bytearray) -> None:
        """Take whole requests off the front of what came."""
        while (end := seen.find(b"\r\n\r\n")) >= 0:
            head = bytes(seen[: end + 4])
            length = re.search(rb"(?i)^content-length: *(\d+)", head, re.MULTILINE)
            size = end + 4 + (int(length[1]) if length else 0)
            if len(seen) < size:
                return
            method, path = head.split(b" ", 2)[:2]
            name = f"{self._name}-{method.decode()}-{path.decode().strip('/').partition('?')[0].replace('/', '_')}"
            if name not in self._kept:
                self._kept.add(name)
                (self._directory / f"{name}.http").write_bytes(bytes(seen[:size]))
            del seen[:size]

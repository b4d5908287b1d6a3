"""A session server on the fake runtime: on the loop of a test, or on a thread of its own for clients that wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from kvarts.serve.binding import Binding
from kvarts.serve.server import SessionServer

from builders.fake_runtime import FakeRuntime

__all__ = ["ANY_PORT", "serving", "serving_on_a_thread"]

ANY_PORT = "127.0.0.1:0"


@asynccontextmanager
async def serving(runtime: FakeRuntime, binding: Binding | None = None, **settings: Any) -> AsyncIterator[str]:
    """Serve on the running loop; the address."""
    server = SessionServer(runtime, binding or Binding(address=ANY_PORT), **settings)
    try:
        yield await server.start()
    finally:
        await server.stop(grace_s=1.0)


@contextmanager
def serving_on_a_thread(runtime: FakeRuntime, binding: Binding | None = None, **settings: Any) -> Iterator[str]:
    """Serve on the loop of another thread; the address."""
    address: list[str] = []
    ready, stop = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        async with serving(runtime, binding, **settings) as at:
            address.append(at)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(10)
        yield address[0]
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(10)
        assert not thread.is_alive()

"""A session server on the fake runtime: on the loop of a test, or on a thread of its own for clients that wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import grpc
import pytest

from kvarts.doors.grpc.server import Binding, SessionServer
from kvarts.doors.proto import stub_of
from kvarts.doors.proto.kakeya.v1 import runtime_pb2 as contract
from kvarts.doors.proto.kvarts.v1 import sessions_pb2 as added

from builders.fake_runtime import FakeRuntime

__all__ = [
    "ANY_PORT",
    "RuntimeServiceStub",
    "SessionsStub",
    "aio",
    "serving",
    "serving_on_a_thread",
    "status_of",
    "updates_of",
    "with_server",
]

ANY_PORT = "127.0.0.1:0"
aio: Any = grpc.aio  # its stubs know little of it

RuntimeServiceStub = partial(stub_of, service=contract.DESCRIPTOR.services_by_name["RuntimeService"])
SessionsStub = partial(stub_of, service=added.DESCRIPTOR.services_by_name["Sessions"])
Test = Callable[[FakeRuntime, Any], Awaitable[None]]


@asynccontextmanager
async def serving(runtime: FakeRuntime, binding: Binding | None = None, **settings: Any) -> AsyncIterator[str]:
    """Serve on the running loop; the address."""
    server = SessionServer(runtime, binding or Binding(), **settings)
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


def with_server(runtime: FakeRuntime, test: Test, **settings: Any) -> None:
    """Run `test` against a server; at its end, no task is left and no generation is open."""

    async def run() -> None:
        async with serving(runtime, **settings) as address, aio.insecure_channel(address) as channel:
            await test(runtime, channel)
        assert runtime.num_generating == 0
        await asyncio.sleep(0)
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert left == []

    asyncio.run(run())


async def updates_of(stream: Any) -> list[Any]:
    """The rest of a stream of which some was read already."""
    updates = []
    while (update := await stream.read()) is not aio.EOF:
        updates.append(update)
    return updates


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await (updates_of(call) if hasattr(call, "read") else call)
    return refused.value.code(), refused.value.details() or ""

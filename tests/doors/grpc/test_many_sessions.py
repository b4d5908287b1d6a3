"""Many sessions behind the door, on the runtime and the engine as they are served: clients vanish, nothing stays."""

from __future__ import annotations

import asyncio
import logging
from random import Random
from typing import Any

import pytest

pytest.importorskip("grpc", reason="needs kvarts[grpc]")

from kvarts.core.config import EngineConfig
from kvarts.cost.polynomial import LinearCost
from kvarts.doors.grpc.server import Binding, SessionServer
from kvarts.doors.proto.kakeya.v1 import runtime_pb2 as contract
from kvarts.doors.proto.kvarts.v1 import sessions_pb2 as added
from kvarts.run.sessions.opening import mock_host
from kvarts.run.sessions.sessions import Sessions
from kvarts.run.sessions.table import SessionTable
from kvarts.run.sessions.values import SessionsConfig

from builders.session_server import SessionsStub, aio
from builders.sessions import check_at_rest


async def vanish(address: str, stub: Any, session_id: str, random: Random) -> None:
    """Read some tokens of a generation that would go on, and be gone: by a cancel, or with the connection."""
    if random.random() < 0.9:
        stream = stub.Generate(added.GenerateRequest(session_id=session_id, max_tokens=1_000_000))
        for _ in range(random.randrange(3)):
            await stream.read()
        stream.cancel()
        return
    channel = aio.insecure_channel(address)
    stream = SessionsStub(channel).Generate(added.GenerateRequest(session_id=session_id, max_tokens=1_000_000))
    await stream.read()
    await channel.close(grace=0)


@pytest.mark.slow
@pytest.mark.parametrize("num_clients", [200, pytest.param(1000, marks=pytest.mark.long)])
def test_many_clients_that_vanish_mid_stream_leave_no_page_and_no_task(
    caplog: pytest.LogCaptureFixture, num_clients: int
) -> None:
    caplog.set_level(logging.WARNING)
    random = Random(3)
    config = EngineConfig(num_pages=8 * num_clients, page_size=16, max_num_batched_tokens=1024, max_num_seqs=256)
    host = mock_host(config, cost=LinearCost(step_ms=1.0, chunk_token_ms=0.0, decode_ms=0.0))
    sessions = Sessions(SessionTable(host, SessionsConfig()))

    async def run() -> None:
        server = SessionServer(sessions, Binding())
        address = await server.start()
        async with aio.insecure_channel(address) as channel:
            stub = SessionsStub(channel)
            made = [(await stub.CreateSession(added.CreateSessionRequest())).session_id for _ in range(num_clients)]
            reserved = host.core.scheduler.session_pages.reserve.num_pages
            for first in range(0, num_clients, 100):
                some = made[first : first + 100]
                requests = [added.AppendTokensRequest(session_id=name, token_ids=[1, 2, 3]) for name in some]
                await asyncio.gather(*map(stub.AppendTokens, requests))
                await asyncio.gather(*(vanish(address, stub, name, random) for name in some))
            async with asyncio.timeout(30):
                while host.core.has_work:
                    await asyncio.sleep(0.01)
            infos = [await stub.Info(added.InfoRequest(session_id=name)) for name in made]
            assert {info.state for info in infos} == {"idle"}
            assert host.core.scheduler.cache.num_used == reserved
            assert host.core.scheduler.session_pages.reserve.num_taken == sum(
                info.kv_allocated_bytes for info in infos
            ) // (host.token_bytes * config.page_size)
            await asyncio.gather(*(stub.CloseSession(contract.CloseSessionRequest(session_id=name)) for name in made))
            check_at_rest(host)
        await server.stop(grace_s=1.0)
        await asyncio.sleep(0)
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert left == []

    asyncio.run(run())
    assert caplog.records == []

"""Clients that vanish, bytes that are no call, and a server that stops: nothing is left behind."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import pytest

pytest.importorskip("grpc", reason="needs kvarts[grpc]")
import grpc

from kvarts.doors.grpc.server import Binding, SessionServer
from kvarts.doors.proto.kakeya.v1 import runtime_pb2 as contract
from kvarts.doors.proto.kvarts.v1 import sessions_pb2 as added

from builders.fake_runtime import FakeRuntime
from builders.session_server import SessionsStub, aio, serving, status_of, updates_of, with_server

Code = grpc.StatusCode


def test_clients_that_vanish_leave_no_generation_and_no_task(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    async def test(runtime: FakeRuntime, channel: Any) -> None:
        stub = SessionsStub(channel)
        ids = [await runtime.create("") for _ in range(50)]
        for session_id in ids:
            await runtime.append("", session_id, [1])
        runtime.step_s = 0.002
        streams = [stub.Generate(added.GenerateRequest(session_id=name, max_tokens=10_000)) for name in ids]
        for index, stream in enumerate(streams):
            for _ in range(index % 4):
                await stream.read()
        assert runtime.num_generating == 50
        for stream in streams:
            stream.cancel()
        del streams, stream
        async with asyncio.timeout(20):
            while runtime.num_generating:
                await asyncio.sleep(0.001)
        lengths = [len(runtime.sessions["", name].history) for name in ids]
        await asyncio.sleep(0.02)
        assert [len(runtime.sessions["", name].history) for name in ids] == lengths
        assert [(await stub.Info(added.InfoRequest(session_id=name))).state for name in ids] == ["idle"] * 50

    with_server(FakeRuntime(), test)
    assert caplog.records == []


def test_a_client_that_gives_up_an_append_leaves_the_session_idle(caplog: pytest.LogCaptureFixture) -> None:
    async def test(runtime: FakeRuntime, channel: Any) -> None:
        stub = SessionsStub(channel)
        session_id = await runtime.create("")
        appending = stub.AppendTokens(added.AppendTokensRequest(session_id=session_id, token_ids=[1]))
        asking = added.InfoRequest(session_id=session_id)
        while (await stub.Info(asking)).state != "appending":
            await asyncio.sleep(0.001)
        appending.cancel()
        while (await stub.Info(asking)).state != "idle":
            await asyncio.sleep(0.001)
        assert runtime.sessions["", session_id].history == []

    with_server(FakeRuntime(step_s=5.0), test)
    assert caplog.records == []


def test_a_connection_that_breaks_ends_its_generations() -> None:
    async def run() -> None:
        runtime = FakeRuntime(step_s=0.002)
        async with serving(runtime) as address:
            session_id = await runtime.create("")
            await runtime.append("", session_id, [1])
            channel = aio.insecure_channel(address)
            stream = SessionsStub(channel).Generate(added.GenerateRequest(session_id=session_id, max_tokens=10_000))
            await stream.read()
            assert runtime.num_generating == 1
            await channel.close()
            async with asyncio.timeout(20):
                while runtime.num_generating:
                    await asyncio.sleep(0.001)

    asyncio.run(run())


def test_a_reader_that_does_not_read_does_not_hold_up_others() -> None:
    async def test(runtime: FakeRuntime, channel: Any) -> None:
        stub = SessionsStub(channel)
        ids = [await runtime.create("") for _ in range(2)]
        for session_id in ids:
            await runtime.append("", session_id, [1])
        stuck = stub.Generate(added.GenerateRequest(session_id=ids[0], max_tokens=2**31))
        await stuck.read()
        request = added.GenerateRequest(session_id=ids[1], max_tokens=100)
        assert len([update async for update in stub.Generate(request)]) >= 101
        stuck.cancel()
        async with asyncio.timeout(20):
            while runtime.num_generating:
                await asyncio.sleep(0.001)

    with_server(FakeRuntime(), test)


def test_a_message_that_is_too_long_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async def test(runtime: FakeRuntime, channel: Any) -> None:
        stub = SessionsStub(channel)
        session_id = await runtime.create("")
        request = added.AppendTokensRequest(session_id=session_id, token_ids=[1] * 20_000)
        code, details = await status_of(stub.AppendTokens(request))
        assert code == Code.RESOURCE_EXHAUSTED
        assert "10000" in details
        request = added.AppendTokensRequest(session_id=session_id, token_ids=[1] * 9_000)
        assert (await stub.AppendTokens(request)).history_length == 9_000

    with_server(FakeRuntime(), test, max_message_bytes=10_000)
    assert caplog.records == []


def test_random_bytes_on_the_port_do_no_harm() -> None:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

    async def run() -> None:
        runtime = FakeRuntime()
        async with serving(runtime) as address:
            host, port = address.split(":")
            for data in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 40, preface + bytes(range(255, -1, -1)) * 40):
                with socket.create_connection((host, int(port))) as connection:
                    connection.sendall(data)
                    await asyncio.sleep(0.01)
            async with aio.insecure_channel(address) as channel:
                await SessionsStub(channel).CreateSession(added.CreateSessionRequest())
        assert len(runtime.sessions) == 1

    asyncio.run(run())


def test_an_end_sends_what_was_generated_and_refuses_more() -> None:
    async def run() -> None:
        runtime = FakeRuntime(step_s=0.02)
        server = SessionServer(runtime, Binding())
        async with aio.insecure_channel(await server.start()) as channel:
            stub = SessionsStub(channel)
            session_id = await runtime.create("")
            await runtime.append("", session_id, [1])
            stream = stub.Generate(added.GenerateRequest(session_id=session_id, max_tokens=1000))
            await stream.read()
            rest = asyncio.ensure_future(updates_of(stream))
            await asyncio.sleep(0)
            stopping = asyncio.ensure_future(server.stop())
            assert (await rest)[-1].done.stop_reason == contract.GenerateDone.STOP_REASON_CANCELLED
            await stopping
        assert runtime.is_shut_down

    asyncio.run(run())

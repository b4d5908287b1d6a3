"""The door: the contract's bytes, a status for each error, and ends that leave nothing behind."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("grpc", reason="needs kvarts[grpc]")
import grpc

from kvarts.errors import ConfigError
from kvarts.proto.kakeya.v1 import runtime_pb2 as contract
from kvarts.proto.kakeya.v1.runtime_pb2_grpc import RuntimeServiceStub
from kvarts.proto.kvarts.v1 import sessions_pb2 as added
from kvarts.proto.kvarts.v1.sessions_pb2_grpc import SessionsStub
from kvarts.serve.binding import Binding
from kvarts.serve.server import SessionServer
from kvarts.serve.statuses import STATUSES
from kvarts.session.runtime import SessionRuntime
from kvarts.session.values import SessionSettings

from builders.fake_runtime import BYTES_PER_TOKEN, EOS, VOCABULARY, FakeRuntime, next_token
from builders.session_server import ANY_PORT, serving

Code = grpc.StatusCode
aio: Any = grpc.aio  # its stubs know little of it
Test = Callable[[FakeRuntime, Any], Awaitable[None]]


def varint(value: int) -> bytes:
    """A number as protobuf writes it."""
    head, rest = value & 127, value >> 7
    return bytes([head | 128]) + varint(rest) if rest else bytes([head])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def text(field: int, value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return varint(field << 3 | 2) + varint(len(data)) + data


def double(field: int, value: float) -> bytes:
    return varint(field << 3 | 1) + struct.pack("<d", value)


def single(field: int, value: float) -> bytes:
    return varint(field << 3 | 5) + struct.pack("<f", value)


def read_fields(data: bytes) -> list[tuple[int, Any]]:
    """The fields of a message, by the wire format alone."""
    fields: list[tuple[int, Any]] = []

    def read_varint(place: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            byte = data[place]
            value |= (byte & 127) << shift
            place, shift = place + 1, shift + 7
            if byte < 128:
                return value, place

    place = 0
    while place < len(data):
        key, place = read_varint(place)
        if key & 7 == 0:
            value: Any
            value, place = read_varint(place)
        elif key & 7 == 1:
            value, place = struct.unpack_from("<d", data, place)[0], place + 8
        else:
            assert key & 7 == 2
            length, place = read_varint(place)
            value, place = data[place : place + length], place + length
        fields.append((key >> 3, value))
    return fields


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


async def raw(channel: Any, method: str, request: bytes) -> list[tuple[int, Any]]:
    """The fields of an answer to bytes; no stub is used."""
    return read_fields(await channel.unary_unary(method)(request))


async def updates_of(stream: Any) -> list[contract.GenerateResponse]:
    """The rest of a stream of which some was read already."""
    updates = []
    while (update := await stream.read()) is not aio.EOF:
        updates.append(update)
    return updates


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await (updates_of(call) if hasattr(call, "read") else call)
    return refused.value.code(), refused.value.details() or ""


def test_the_fake_is_a_runtime() -> None:
    runtime: SessionRuntime = FakeRuntime()
    assert runtime.defaults == SessionSettings()


@pytest.mark.parametrize("service", ["kakeya.v1.RuntimeService", "kvarts.v1.Sessions"])
def test_bytes_of_the_contract(service: str) -> None:
    async def test(runtime: FakeRuntime, channel: Any) -> None:
        create = text(1, "me") + text(2, varint(200) + varint(3))
        ((field, session_id),) = await raw(channel, f"/{service}/CreateSession", create)
        assert field == 1
        session = runtime.sessions["", session_id.decode()]
        assert session.label == "me" and session.settings.eos_token_ids == (200, 3)

        append = text(1, session_id) + text(2, varint(1) + varint(200)) + number(2, 5)
        assert await raw(channel, f"/{service}/AppendTokens", append) == [(1, 3)]
        assert session.history == [1, 200, 5]
        assert await raw(channel, f"/{service}/AppendTokens", text(1, session_id) + text(2, bytes(97))) == [(1, 100)]

        sampling = number(3, 2**64 - 1) + single(4, 0.7) + single(5, 0.9) + number(6, 40)
        generate = text(1, session_id) + number(2, 2) + sampling
        history = list(session.history)
        updates = [read_fields(data) async for data in channel.unary_stream(f"/{service}/Generate")(generate)]
        tokens = [next_token(history), next_token([*history, next_token(history)])]
        assert [fields[0][0] for fields in updates] == [3, 1, 1, 2]
        assert read_fields(updates[0][0][1]) == [(1, 100 - 68)]
        assert [fields[0][1] for fields in updates[1:3]] == tokens
        done = read_fields(updates[3][0][1])
        assert done[:2] == [(1, 1), (2, 2)]
        (params,) = runtime.asked
        assert (params.seed, params.temperature, params.top_p, params.top_k) == (2**64 - 1, 0.7, 0.9, 40)

        info = await raw(channel, f"/{service}/GetSessionInfo", text(1, session_id))
        assert info == [(1, 102), (2, 68 * BYTES_PER_TOKEN), (5, 0.5)]
        assert await raw(channel, f"/{service}/CloseSession", text(1, session_id)) == [(1, 102)]

    with_server(FakeRuntime(), test)


def test_durations_of_a_generation_are_doubles_3_and_4() -> None:
    async def test(runtime: FakeRuntime, channel: Any) -> None:
        session_id = await runtime.create("")
        await runtime.append("", session_id, [1])
        request = text(1, session_id) + number(2, 3)
        updates = [data async for data in channel.unary_stream("/kakeya.v1.RuntimeService/Generate")(request)]
        assert dict(read_fields(read_fields(updates[-1])[0][1])) == {1: 1, 2: 3, 3: 0.01, 4: 0.03}

    with_server(FakeRuntime(step_s=0.01), test)


def test_only_given_tokens_end_a_generation_of_the_contract() -> None:
    async def test(runtime: FakeRuntime, channel: Any) -> None:
        session_id = await runtime.create("")
        await runtime.append("", session_id, [7])
        request = contract.GenerateRequest(session_id=session_id, max_tokens=3)
        old = [update async for update in RuntimeServiceStub(channel).Generate(request)]
        assert old[0].token_id == EOS
        assert old[-1].done.stop_reason == contract.GenerateDone.STOP_REASON_MAX_TOKENS
        await runtime.append("", session_id, [7])
        new = [
            update
            async for update in SessionsStub(channel).Generate(
                added.GenerateRequest(session_id=session_id, max_tokens=3)
            )
        ]
        assert new[-1].done.stop_reason == contract.GenerateDone.STOP_REASON_EOS
        assert new[-1].done.generated_token_count == 1

    with_server(FakeRuntime(), test)


def test_new_fields() -> None:
    async def test(runtime: FakeRuntime, channel: Any) -> None:
        stub = SessionsStub(channel)
        request = added.CreateSessionRequest(
            sink=0,
            window=9,
            positions="cache",
            past_max_positions=True,
            retention="pin",
            ttl_s=2.5,
            client_label="x",
            eos_token_ids=[3],
        )
        session_id = (await stub.CreateSession(request)).session_id
        settings = SessionSettings(
            sink=0,
            window=9,
            positions="cache",
            past_max_positions=True,
            retention="pin",
            ttl_s=2.5,
            label="x",
            eos_token_ids=(3,),
        )
        assert runtime.sessions["", session_id].settings == settings
        unbounded = (await stub.CreateSession(added.CreateSessionRequest(window=0, ttl_s=0))).session_id
        assert runtime.sessions["", unbounded].settings == SessionSettings(window=None, ttl_s=None)

        append = added.AppendTokensRequest(session_id=session_id, token_ids=[1, 2], expected_length=0)
        assert (await stub.AppendTokens(append)).history_length == 2
        assert await status_of(stub.AppendTokens(append)) == (
            Code.FAILED_PRECONDITION,
            "the history has 2 tokens, not 0",
        )
        generate = added.GenerateRequest(
            session_id=session_id,
            max_tokens=2,
            min_p=0.1,
            repetition_penalty=1.1,
            stop_token_ids=[5],
            ignore_eos=True,
        )
        async for _ in stub.Generate(generate):
            pass
        (params,) = runtime.asked
        assert (params.min_p, params.repetition_penalty, params.stop_token_ids) == (0.1, 1.1, (5,))
        assert params.ignore_eos and params.temperature == 0.0 and params.seed is None

        fork = (await stub.Fork(added.ForkRequest(session_id=session_id, client_label="twin"))).session_id
        rollback = added.RollbackRequest(session_id=fork, length=1)
        assert (await stub.Rollback(rollback)).history_length == 1
        assert runtime.sessions["", fork].history == [1]
        assert not (await stub.Cancel(added.CancelRequest(session_id=fork))).cancelled
        infos = (await stub.List(added.ListRequest())).sessions
        assert [info.session_id for info in infos] == [session_id, unbounded, fork]
        assert not infos[1].settings.HasField("window") and not infos[1].HasField("kv_bound_bytes")
        info = await stub.Info(added.InfoRequest(session_id=session_id))
        assert info == infos[0]
        assert (info.kv_live_bytes, info.history_length, info.state) == (4 * BYTES_PER_TOKEN, 4, "idle")

    with_server(FakeRuntime(defaults=SessionSettings(ttl_s=9.0)), test)


@pytest.mark.parametrize("stub_of", [RuntimeServiceStub, SessionsStub])
def test_statuses(stub_of: Any) -> None:
    async def test(runtime: FakeRuntime, channel: Any) -> None:
        stub = stub_of(channel)
        unknown = contract.GetSessionInfoRequest(session_id="no")
        assert await status_of(stub.GetSessionInfo(unknown)) == (Code.NOT_FOUND, "there is no session 'no'")
        assert (await status_of(stub.Generate(contract.GenerateRequest(session_id="no", max_tokens=1))))[
            0
        ] == Code.NOT_FOUND

        session_id = (await stub.CreateSession(contract.CreateSessionRequest())).session_id
        bad = contract.AppendTokensRequest(session_id=session_id, token_ids=[1, VOCABULARY])
        assert await status_of(stub.AppendTokens(bad)) == (
            Code.INVALID_ARGUMENT,
            f"token_ids: the vocabulary has {VOCABULARY} tokens, got {VOCABULARY}",
        )
        too_early = contract.GenerateRequest(session_id=session_id, max_tokens=1)
        assert (await status_of(stub.Generate(too_early)))[0] == Code.FAILED_PRECONDITION
        none = contract.GenerateRequest(session_id=session_id, max_tokens=0)
        assert await status_of(stub.Generate(none)) == (
            Code.INVALID_ARGUMENT,
            "sampling.max_tokens: is out of range: 0",
        )
        code, details = await status_of(stub.CreateSession(contract.CreateSessionRequest()))
        assert (code, details) == (Code.RESOURCE_EXHAUSTED, "1 of 1 sessions are there")
        await stub.CloseSession(contract.CloseSessionRequest(session_id=session_id))
        gone = await status_of(stub.CloseSession(contract.CloseSessionRequest(session_id=session_id)))
        assert gone == (Code.NOT_FOUND, f"session {session_id} was closed")

    with_server(FakeRuntime(max_sessions=1), test)


def test_bad_words_and_numbers_are_refused_with_the_field() -> None:
    async def test(_: FakeRuntime, channel: Any) -> None:
        create = SessionsStub(channel).CreateSession
        answer = await status_of(create(added.CreateSessionRequest(positions="local")))
        assert answer == (Code.INVALID_ARGUMENT, "positions: must be 'global' or 'cache', got 'local'")
        code, details = await status_of(create(added.CreateSessionRequest(positions="\U0001f600" * 5000)))
        assert (code, len(details)) == (Code.INVALID_ARGUMENT, 600)
        assert (await status_of(create(added.CreateSessionRequest(ttl_s=-1))))[1] == "ttl_s: must be positive, got -1.0"

    with_server(FakeRuntime(), test)


def test_a_second_operation_is_refused_or_waits() -> None:
    async def test(runtime: FakeRuntime, channel: Any) -> None:
        stub = SessionsStub(channel)
        session_id = await runtime.create("")
        await runtime.append("", session_id, [1])
        stream = stub.Generate(added.GenerateRequest(session_id=session_id, max_tokens=5))
        await stream.read()
        append: dict[str, Any] = {"session_id": session_id, "token_ids": [2]}
        code, details = await status_of(stub.AppendTokens(added.AppendTokensRequest(**append)))
        assert (code, details) == (Code.ABORTED, "the session is generating. Cancel that, or wait for it.")
        waiting = stub.AppendTokens(added.AppendTokensRequest(**append, queue=True))
        assert len(await updates_of(stream)) == 5
        assert (await waiting).history_length == 7

    with_server(FakeRuntime(step_s=0.01), test)


def test_cancel_ends_a_stream_with_done_and_an_append_with_cancelled() -> None:
    async def test(runtime: FakeRuntime, channel: Any) -> None:
        stub = SessionsStub(channel)
        session_id = await runtime.create("")
        runtime.step_s = 0.0
        await runtime.append("", session_id, [1])
        runtime.step_s = 5.0
        stream = stub.Generate(added.GenerateRequest(session_id=session_id, max_tokens=5))
        reading = asyncio.ensure_future(stream.read())
        cancel = added.CancelRequest(session_id=session_id)
        while not (await stub.Cancel(cancel)).cancelled:
            await asyncio.sleep(0.001)
        assert (await reading).done.stop_reason == contract.GenerateDone.STOP_REASON_CANCELLED
        appending = stub.AppendTokens(added.AppendTokensRequest(session_id=session_id, token_ids=[2]))
        while not (await stub.Cancel(cancel)).cancelled:
            await asyncio.sleep(0.001)
        assert await status_of(appending) == (Code.CANCELLED, "was cancelled")
        assert runtime.sessions["", session_id].history == [1]

    with_server(FakeRuntime(), test)


def test_a_bug_is_an_internal_error_of_one_line_and_the_server_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def test(runtime: FakeRuntime, channel: Any) -> None:
        stub = SessionsStub(channel)
        session_id = (await stub.CreateSession(added.CreateSessionRequest())).session_id
        await runtime.append("", session_id, [1])
        runtime.fault = ZeroDivisionError("two\nlines")
        answer = await status_of(stub.Info(added.InfoRequest(session_id=session_id)))
        assert answer == (Code.INTERNAL, "ZeroDivisionError: two lines")
        stream = stub.Generate(added.GenerateRequest(session_id=session_id, max_tokens=9))
        await stream.read()
        runtime.fault = ZeroDivisionError("in a stream")
        assert (await status_of(stream))[0] == Code.INTERNAL
        assert (await stub.Info(added.InfoRequest(session_id=session_id))).state == "idle"
        assert [record.name for record in caplog.records] == ["kvarts.serve"] * 2
        assert all(record.exc_info for record in caplog.records)

    with_server(FakeRuntime(step_s=0.02), test)


def test_each_status_is_of_a_class_of_its_own() -> None:
    assert ConfigError in STATUSES
    assert Code.INTERNAL not in STATUSES.values()


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
        async with asyncio.timeout(2):
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
            async with asyncio.timeout(2):
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
        async with asyncio.timeout(2):
            while runtime.num_generating:
                await asyncio.sleep(0.001)

    with_server(FakeRuntime(), test)


def test_bytes_that_are_no_message_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    async def test(runtime: FakeRuntime, channel: Any) -> None:
        for method in ("CreateSession", "AppendTokens", "List", "Info"):
            for data in (b"\xff" * 30, b"\x0a\xff", text(1, b"\xff\xfe")):
                call = channel.unary_unary(f"/kvarts.v1.Sessions/{method}")(data)
                if method == "List" and data == text(1, b"\xff\xfe"):
                    await call  # an unknown field
                    continue
                code, details = await status_of(call)
                assert code == Code.INVALID_ARGUMENT
                assert details.startswith("the request is no kvarts.v1.")
        code, _ = await status_of(channel.unary_stream("/kakeya.v1.RuntimeService/Generate")(b"\xff"))
        assert code == Code.INVALID_ARGUMENT
        assert (await status_of(channel.unary_unary("/kvarts.v1.Sessions/Nothing")(b"")))[0] == Code.UNIMPLEMENTED
        assert runtime.sessions == {}

    with_server(FakeRuntime(), test)
    assert caplog.records == []


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
        server = SessionServer(runtime, Binding(address=ANY_PORT))
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

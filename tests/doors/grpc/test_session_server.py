"""The server around the door: tokens, TLS, health, reflection, and where it listens."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc", reason="needs kvarts[grpc]")
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvarts.base.errors import ConfigError, InputError, MissingFileError
from kvarts.doors.grpc.owners import Owners, read_owners
from kvarts.doors.grpc.server import Binding, SessionServer
from kvarts.doors.proto.kvarts.v1 import sessions_pb2 as added

from builders.certificates import make_certificate
from builders.fake_runtime import FakeRuntime
from builders.session_server import SessionsStub, serving

aio: Any = grpc.aio  # its stubs know little of it
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
CREATE = added.CreateSessionRequest()


async def code_of(call: Any) -> grpc.StatusCode | None:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return None


def test_each_owner_sees_its_own_sessions_and_no_token_sees_none() -> None:
    async def run() -> None:
        runtime = FakeRuntime()
        owners = Owners({"a-token": "ann", "b-token": "bob"})
        async with serving(runtime, owners=owners) as address, aio.insecure_channel(address) as channel:
            stub = SessionsStub(channel)

            def metadata(token: str) -> tuple[tuple[str, str], ...]:
                return (("authorization", f"Bearer {token}"),)

            for bad in (
                (),
                metadata("c-token"),
                metadata(""),
                (("authorization", "a-token"),),
                (("authorization", "Basic a-token"),),
            ):
                assert await code_of(stub.CreateSession(CREATE, metadata=bad)) == grpc.StatusCode.UNAUTHENTICATED
            assert runtime.sessions == {}
            stream = stub.Generate(added.GenerateRequest(), metadata=metadata("A-token"))
            assert await code_of(stream.read()) == grpc.StatusCode.UNAUTHENTICATED

            ann, bob = metadata("a-token"), (("authorization", "bearer b-token"),)
            session_id = (await stub.CreateSession(CREATE, metadata=ann)).session_id
            await stub.CreateSession(CREATE, metadata=bob)
            assert sorted(owner for owner, _ in runtime.sessions) == ["ann", "bob"]
            info = added.InfoRequest(session_id=session_id)
            assert await code_of(stub.Info(info, metadata=bob)) == grpc.StatusCode.NOT_FOUND
            assert await code_of(stub.Info(info, metadata=ann)) is None

            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
            # Nothing is written: a client whose write meets the end of its call reports INTERNAL in place of the code.
            refused = reflection.ServerReflectionInfo()
            assert await code_of(refused.read()) == grpc.StatusCode.UNAUTHENTICATED
            health = health_pb2_grpc.HealthStub(channel)
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == SERVING

    asyncio.run(run())


async def _first(stub: Any, request: Any) -> Any:
    call = stub.ServerReflectionInfo(iter([request]))
    return await call.read()


def test_token_files(tmp_path: Path) -> None:
    path = tmp_path / "tokens"

    def owner_of(token: str) -> str | None:
        return read_owners(path).owner_of((("other", "x"), ("authorization", f"Bearer {token}")))

    path.write_text("# one token\n\nsecret\n")
    assert owner_of("secret") == "" and owner_of("secre") is None
    path.write_text("ann:one\nbob:two\nann:new:three\n")
    assert [owner_of(token) for token in ("one", "two", "new:three", "three", "ann:one")] == [
        "ann", "bob", "ann", None, None,
    ]  # fmt: skip
    for text, problem in {
        "": "has no tokens",
        "ann:one\ntwo\n": ":2: has no owner",
        ":one\n": ":1: has no owner",
        "ann:\n": ":1: a token is printable ASCII, without spaces",
        "ann:ä\n": ":1: a token is printable",
        "ann:a b\n": ":1: a token is printable",
        "ann:one\nbob:one\n": ":2: the token is another line's already",
    }.items():
        path.write_text(text)
        with pytest.raises(InputError, match=problem):
            read_owners(path)
    with pytest.raises(MissingFileError):
        read_owners(tmp_path / "none")


def test_tls_and_a_client_that_does_not_trust_it(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    other, _ = make_certificate(tmp_path, "other")

    async def run() -> None:
        binding = Binding(tls_cert=cert, tls_key=key)
        async with serving(FakeRuntime(), binding) as address:
            trusting = grpc.ssl_channel_credentials(cert.read_bytes())
            async with aio.secure_channel(address, trusting) as channel:
                await SessionsStub(channel).CreateSession(CREATE)
            async with aio.secure_channel(address, grpc.ssl_channel_credentials(other.read_bytes())) as channel:
                assert await code_of(SessionsStub(channel).CreateSession(CREATE)) == grpc.StatusCode.UNAVAILABLE
            async with aio.insecure_channel(address) as channel:
                assert await code_of(SessionsStub(channel).CreateSession(CREATE)) == grpc.StatusCode.UNAVAILABLE

    asyncio.run(run())


def test_a_door_that_other_machines_reach_has_tls_and_a_token_or_is_insecure(tmp_path: Path) -> None:
    for host in ("127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"):
        Binding(host=host)
    cert, key = make_certificate(tmp_path)
    tls: dict[str, Any] = {"tls_cert": cert, "tls_key": key}
    for host in ("0.0.0.0", "::", "192.168.1.4", "example.org"):
        for protection, lacks in (
            ({}, "nothing would be encrypted and no token would be asked for"),
            (tls, "and no token would be asked for"),
            ({"asks_for_token": True}, "and nothing would be encrypted"),
        ):
            with pytest.raises(ConfigError, match=rf"{lacks}\. Give --tls-cert.*--insecure\.$"):
                Binding(host=host, **protection)
            Binding(host=host, insecure=True, **protection)
        assert Binding(host=host, asks_for_token=True, **tls).is_encrypted


def test_addresses_and_certificates_are_checked_before_anything_is_loaded(tmp_path: Path) -> None:
    for port in (-1, 65_536):
        with pytest.raises(ConfigError, match="port: must be from 0 to 65535"):
            Binding(port=port)
    cert, _ = make_certificate(tmp_path)
    with pytest.raises(ConfigError, match="go together"):
        Binding(tls_cert=cert)
    with pytest.raises(MissingFileError):
        Binding(tls_cert=cert, tls_key=tmp_path / "none")
    _, other = make_certificate(tmp_path, "other")
    for bad in (other, cert):
        with pytest.raises(InputError, match="is not a certificate for the key"):
            Binding(tls_cert=cert, tls_key=bad)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="other systems share ports otherwise")
def test_a_port_that_is_taken_is_said_to_be() -> None:
    async def run() -> None:
        async with serving(FakeRuntime()) as address:
            runtime = FakeRuntime()
            server = SessionServer(runtime, Binding(port=int(address.rpartition(":")[2])))
            with pytest.raises(ConfigError, match=f"cannot listen on {address}"):
                await server.start()
            await server.stop()
            assert runtime.is_shut_down

    asyncio.run(run())


def test_health_until_the_end() -> None:
    async def run() -> None:
        server = SessionServer(FakeRuntime(), Binding())
        async with aio.insecure_channel(await server.start()) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for service in ("", "kakeya.v1.RuntimeService", "kvarts.v1.Sessions"):
                assert (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status == SERVING
            unknown = stub.Check(health_pb2.HealthCheckRequest(service="kvarts.v2.Sessions"))
            assert await code_of(unknown) == grpc.StatusCode.NOT_FOUND
            watch = stub.Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == SERVING
            stopping = asyncio.ensure_future(server.stop())
            assert (await watch.read()).status == NOT_SERVING
            await stopping
            assert await code_of(stub.Check(health_pb2.HealthCheckRequest())) == grpc.StatusCode.UNAVAILABLE

    asyncio.run(run())


def test_calls_while_it_stops_are_refused() -> None:
    shutting_down, may_end = asyncio.Event(), asyncio.Event()

    class Slow(FakeRuntime):
        async def shut_down(self) -> None:
            shutting_down.set()
            await may_end.wait()

    async def run() -> None:
        server = SessionServer(Slow(), Binding())
        async with aio.insecure_channel(await server.start()) as channel:
            stub = SessionsStub(channel)
            await stub.CreateSession(CREATE)
            stopping = asyncio.ensure_future(server.stop())
            await shutting_down.wait()
            with pytest.raises(grpc.aio.AioRpcError, match="the server is stopping"):
                await stub.CreateSession(CREATE)
            may_end.set()
            await stopping

    asyncio.run(run())


def test_reflection_describes_both_services() -> None:
    async def run() -> None:
        async with serving(FakeRuntime()) as address, aio.insecure_channel(address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            listed = await _first(stub, reflection_pb2.ServerReflectionRequest(list_services=""))
            names = {service.name for service in listed.list_services_response.service}
            assert {"kakeya.v1.RuntimeService", "kvarts.v1.Sessions", "grpc.health.v1.Health"} < names
            ask = reflection_pb2.ServerReflectionRequest(file_containing_symbol="kvarts.v1.Sessions")
            files = (await _first(stub, ask)).file_descriptor_response.file_descriptor_proto
            assert any(b"kakeya/v1/runtime.proto" in file for file in files)

    asyncio.run(run())

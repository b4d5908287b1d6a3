"""The bytes of the contract, written and read by hand: field numbers and wire types, and no stub."""

from __future__ import annotations

import struct
from typing import Any

import pytest

pytest.importorskip("grpc", reason="needs kvarts[grpc]")
import grpc

from builders.fake_runtime import BYTES_PER_TOKEN, FakeRuntime, next_token
from builders.session_server import status_of, with_server

Code = grpc.StatusCode


def varint(value: int) -> bytes:
    """A number as protobuf writes it."""
    head, rest = value & 127, value >> 7
    return bytes([head | 128]) + varint(rest) if rest else bytes([head])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def text(field: int, value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return varint(field << 3 | 2) + varint(len(data)) + data


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


async def raw(channel: Any, method: str, request: bytes) -> list[tuple[int, Any]]:
    """The fields of an answer to bytes; no stub is used."""
    return read_fields(await channel.unary_unary(method)(request))


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
                assert details.startswith("the request is not a kvarts.v1.")
        code, _ = await status_of(channel.unary_stream("/kakeya.v1.RuntimeService/Generate")(b"\xff"))
        assert code == Code.INVALID_ARGUMENT
        assert (await status_of(channel.unary_unary("/kvarts.v1.Sessions/Nothing")(b"")))[0] == Code.UNIMPLEMENTED
        assert runtime.sessions == {}

    with_server(FakeRuntime(), test)
    assert caplog.records == []

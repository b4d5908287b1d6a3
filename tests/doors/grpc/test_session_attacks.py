"""Attacks on a session server, watched from outside: its memory, and the waits of an innocent client."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc", reason="needs kvarts[grpc]")
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvarts.doors.grpc.server import MAX_MESSAGE_BYTES
from kvarts.doors.proto.kvarts.v1 import sessions_pb2 as added

from builders.grpc_flood import flooding
from builders.server_process import MIB, Process, assert_short_waits, kvarts_process, python_process, waits_of
from builders.session_server import SessionsStub, aio

Code = grpc.StatusCode
MAX_GROWTH_BYTES = 200 * MIB
MAX_GROWTH_OF_HISTORIES_BYTES = 300 * MIB
"""Histories hold 128 MiB at most. What is computed holds its tokens a second time; two more messages are read."""
MAX_P99_S = 0.5
LARGE = MAX_MESSAGE_BYTES - 1_200_000
HEAP_BYTES = 64 * MIB
"""Reserved for an arena of glibc's, of which the first part is writable."""
NUM_SESSIONS = 100
ATTACK_S = 1.0
ATTEMPTS = 4
"""Other processes may take the cores for some seconds."""

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="watches memory in /proc")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Process, str]]:
    tokens = tmp_path / "tokens"
    tokens.write_text("ann:secret\nbob:other\n")
    options = ["--port", "0", "--token-file", str(tokens), "--speedup", "1000"]
    with kvarts_process("serve", "sessions", "--mock", *options) as process:
        yield process, process.wait_for(r"listening on (\S+) for sessions")[1]


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def repeated_ids(field: int, num_ids: int) -> bytes:
    """The bytes of a message with as many token ids, all 1."""
    from kvarts.doors.proto.kvarts.v1.sessions_pb2 import GenerateRequest

    assert GenerateRequest.DESCRIPTOR.fields_by_name["stop_token_ids"].number == field
    return GenerateRequest(session_id="x", stop_token_ids=[1] * num_ids).SerializeToString()


def ids_to_append(session_id: str, num_ids: int) -> bytes:
    return added.AppendTokensRequest(session_id=session_id, token_ids=[1] * num_ids, queue=True).SerializeToString()


def zeros() -> bytes:
    return bytes(LARGE)


def long_label() -> bytes:
    return added.CreateSessionRequest(client_label="x" * 10_000_000).SerializeToString()


SESSIONS = "/kvarts.v1.Sessions"
REFUSED = {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}
STOPS = added.GenerateRequest.DESCRIPTOR.fields_by_name["stop_token_ids"].number


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "body", "token", "expected"),
    [
        pytest.param(f"{SESSIONS}/AppendTokens", zeros, "", {"UNAUTHENTICATED"}, id="without a token"),
        pytest.param(
            f"{SESSIONS}/AppendTokens", zeros, "wrong", {"UNAUTHENTICATED"}, id="with a wrong token",
        ),
        pytest.param(f"{SESSIONS}/Generate", zeros, "", {"UNAUTHENTICATED"}, id="of a stream"),
        pytest.param("/grpc.health.v1.Health/Check", zeros, "", REFUSED, id="about health"),
        pytest.param(f"{SESSIONS}/AppendTokens", zeros, "other", REFUSED, id="that is no message"),
        pytest.param(
            f"{SESSIONS}/AppendTokens", partial(ids_to_append, "0" * 32, LARGE), "other", REFUSED,
            id="with too many tokens",
        ),
        pytest.param(
            f"{SESSIONS}/Generate", partial(repeated_ids, STOPS, 3_000_000), "other", REFUSED,
            id="with millions of ends",
        ),
        pytest.param(
            f"{SESSIONS}/CreateSession", long_label, "other", REFUSED, id="with a label of 10 MB",
        ),
    ],
)  # fmt: skip
def test_large_messages_are_read_after_their_metadata_and_a_few_at_a_time(
    server: tuple[Process, str], method: str, body: Callable[[], bytes], token: str, expected: set[str], tmp_path: Path
) -> None:
    process, address = server
    path = tmp_path / "body"
    path.write_bytes(body())
    with grpc.insecure_channel(address) as channel:
        stub = SessionsStub(channel)

        def innocent() -> None:
            made = stub.CreateSession(added.CreateSessionRequest(window=16), metadata=bearer("secret"), timeout=20)
            stub.CloseSession(_close(made.session_id), metadata=bearer("secret"), timeout=20)

        innocent()
        idle = process.resident_bytes
        process.forget_peak()

        def attack() -> None:
            codes = flooding(address, method, path, token, ATTACK_S)
            assert set(codes) <= expected, codes

        assert_short_waits(process, innocent, attack, most_s=MAX_P99_S)
        grown = process.peak_bytes - idle
    assert grown <= MAX_GROWTH_BYTES, f"{grown / MIB:.0f} MiB"
    assert process.stop() == 0


def _close(session_id: str) -> Any:
    from kvarts.doors.proto.kakeya.v1 import runtime_pb2 as contract

    return contract.CloseSessionRequest(session_id=session_id)


@pytest.mark.long
def test_appends_that_wait_and_histories_have_a_bound_of_their_owner(server: tuple[Process, str]) -> None:
    """Each of a hundred sessions gets a million tokens, all at once: 0.8 GB, if they were kept."""
    process, address = server
    with grpc.insecure_channel(address) as channel:
        stub = SessionsStub(channel)
        asks = added.CreateSessionRequest(window=16, positions="cache")
        made = [stub.CreateSession(asks, metadata=bearer("other")).session_id for _ in range(NUM_SESSIONS)]
        idle = process.resident_bytes
        process.forget_peak()

        def innocent() -> None:
            stub.List(added.ListRequest(), metadata=bearer("secret"), timeout=20)

        async def append_to_all() -> Counter[Any]:
            async with aio.insecure_channel(address) as attacking:
                append = attacking.unary_unary(f"{SESSIONS}/AppendTokens")
                body = ids_to_append("?" * 32, 1_000_000)
                calls = [
                    append(body.replace(b"?" * 32, session_id.encode()), metadata=bearer("other"), timeout=3)
                    for session_id in made
                ]
                return Counter(await asyncio.gather(*[call.code() for call in calls]))

        def attack() -> None:
            codes = asyncio.run(append_to_all())
            # Those that fit are computed for long: their client gives up, and the tokens stay.
            assert set(codes) <= {Code.RESOURCE_EXHAUSTED, Code.DEADLINE_EXCEEDED, Code.OK}, codes

        assert_short_waits(process, innocent, attack, most_s=MAX_P99_S)
        grown = process.peak_bytes - idle
    assert grown <= MAX_GROWTH_OF_HISTORIES_BYTES, f"{grown / MIB:.0f} MiB"


@pytest.mark.long
def test_answers_of_others_are_the_same_token_for_token_while_one_attacks(
    server: tuple[Process, str], tmp_path: Path
) -> None:
    """Ann's generations while Bob floods, evicts what he can and generates without end."""
    process, address = server
    body = tmp_path / "body"
    body.write_bytes(ids_to_append("0" * 32, 900_000))
    with grpc.insecure_channel(address) as channel:
        stub = SessionsStub(channel)

        def answer() -> list[int]:
            made = stub.CreateSession(added.CreateSessionRequest(window=16), metadata=bearer("secret"))
            append = added.AppendTokensRequest(session_id=made.session_id, token_ids=list(range(40)))
            stub.AppendTokens(append, metadata=bearer("secret"))
            asks = added.GenerateRequest(session_id=made.session_id, max_tokens=64, ignore_eos=True)
            updates = list(stub.Generate(asks, metadata=bearer("secret"), timeout=60))
            stub.CloseSession(_close(made.session_id), metadata=bearer("secret"))
            return [update.token_id for update in updates if update.WhichOneof("payload") == "token_id"]

        undisturbed = answer()
        assert len(undisturbed) == 64
        endless = []
        for _ in range(16):
            asks = added.CreateSessionRequest(window=16, positions="cache")
            session_id = stub.CreateSession(asks, metadata=bearer("other")).session_id
            append = added.AppendTokensRequest(session_id=session_id, token_ids=[1] * 100)
            stub.AppendTokens(append, metadata=bearer("other"))
            forever = added.GenerateRequest(session_id=session_id, max_tokens=2**32 - 1, ignore_eos=True)
            endless.append(stub.Generate(forever, metadata=bearer("other")))
        answers: list[list[int]] = []
        # How many fit into a flood depends on the machine: it is attacked until some were given.
        deadline = time.monotonic() + 60.0
        while len(answers) < 3:
            assert time.monotonic() < deadline, answers
            with waits_of(process, lambda: answers.append(answer())):
                flooding(address, f"{SESSIONS}/AppendTokens", body, "other", 2.0)
        for each in endless:
            each.cancel()
    assert all(each == undisturbed for each in answers)


def test_a_message_that_never_ends_gives_way_to_others_of_its_owner(server: tuple[Process, str]) -> None:
    process, address = server
    stuck = [_Stuck(address, "secret") for _ in range(4)]
    try:
        with grpc.insecure_channel(address) as channel:
            stub = SessionsStub(channel)

            def list_as(token: str) -> None:
                stub.List(added.ListRequest(), metadata=bearer(token), timeout=20)

            assert sum(process.seconds_of(lambda: list_as("secret")) for _ in range(3)) < 3.0
            assert min(process.seconds_of(lambda: list_as("other")) for _ in range(ATTEMPTS)) < MAX_P99_S
    finally:
        for each in stuck:
            each.close()


def test_health_is_answered_while_messages_about_it_never_end(server: tuple[Process, str]) -> None:
    process, address = server
    stuck = [_Stuck(address, "", "/grpc.health.v1.Health/Check") for _ in range(50)]
    try:
        with grpc.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            stub.Check(health_pb2.HealthCheckRequest(), timeout=20)

            def check() -> None:
                stub.Check(health_pb2.HealthCheckRequest(), timeout=20)

            assert_short_waits(process, check, lambda: time.sleep(1.0), most_s=MAX_P99_S)
    finally:
        for each in stuck:
            each.close()


@pytest.mark.slow
def test_threads_share_the_room_of_what_they_read(tmp_path: Path) -> None:
    """Each would keep that of its largest messages: 130 MiB after minutes of hostile ones."""
    body = tmp_path / "body"
    body.write_bytes(zeros())
    with python_process("kvarts", "serve", "sessions", "--mock", "--port", "0") as process:
        address = process.wait_for(r"listening on (\S+) for sessions")[1]
        flooding(address, f"{SESSIONS}/Info", body, "", 0.1)
        lines = Path(f"/proc/{process.popen.pid}/maps").read_text().splitlines()
    ranges = [[int(part, 16) for part in line.split()[0].split("-")] for line in lines]
    heaps = [
        start
        for (start, end), (following, last), line in zip(ranges, ranges[1:], lines, strict=False)
        if start % HEAP_BYTES == 0 and "rw-p" in line and (end, last) == (following, start + HEAP_BYTES)
    ]
    assert len(heaps) <= 2, "more arenas than two, one of which is no mapping"


class _Stuck:
    """A call over a connection of its own that announces a message and sends a part of it: HTTP/2 by hand."""

    def __init__(self, address: str, token: str, path: str = f"{SESSIONS}/List") -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=20)
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b""))
        fields = [
            (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost"),
            ("content-type", "application/grpc"), ("te", "trailers"), ("authorization", f"Bearer {token}"),
        ]  # fmt: skip
        block = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)
        message = b"\0" + LARGE.to_bytes(4, "big") + os.urandom(1000)
        self._socket.sendall(_frame(1, 4, 1, block) + _frame(0, 0, 1, message))

    def close(self) -> None:
        self._socket.close()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _text(value: str) -> bytes:
    """A string of HPACK, not compressed; of less than 127 bytes."""
    return bytes([len(value)]) + value.encode()

"""Both clients against a server on a runtime without an engine."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("grpc", reason="needs kvarts[grpc]")
import grpc

from kvarts.base.errors import ConfigError, InputError, MissingFileError
from kvarts.doors.client import (
    AsyncSessions,
    CallCancelledError,
    NotAuthenticatedError,
    ServerError,
    ServerUnreachableError,
    Sessions,
)
from kvarts.doors.client.sessions import _AsyncCalls, _Calls
from kvarts.doors.grpc.owners import Owners
from kvarts.doors.grpc.server import Binding
from kvarts.doors.proto.kakeya.v1 import runtime_pb2 as contract
from kvarts.run.sessions.values import (
    Done,
    SessionBusyError,
    SessionGoneError,
    SessionNotReadyError,
    SessionSettings,
    SessionsExhaustedError,
    SessionValueError,
    StopReason,
    Token,
    Truncated,
    UnknownSessionError,
)

from builders.certificates import make_certificate
from builders.fake_runtime import BYTES_PER_TOKEN, VOCABULARY, FakeRuntime, next_token
from builders.session_server import ANY_PORT, RuntimeServiceStub, serving, serving_on_a_thread

SETTINGS: dict[str, Any] = {
    "sink": 1,
    "window": 3,
    "positions": "cache",
    "past_max_positions": True,
    "retention": "host",
    "ttl_s": 60.0,
    "eos_token_ids": (5, 6),
    "label": "mine",
}


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime(max_sessions=3)


@pytest.fixture
def address(runtime: FakeRuntime) -> Iterator[str]:
    with serving_on_a_thread(runtime) as at:
        yield at


def test_a_session_from_beginning_to_end(runtime: FakeRuntime, address: str) -> None:
    with Sessions(address) as sessions:
        with sessions.create(**SETTINGS) as session:
            assert session.append([1, 2, 3, 4, 9], expected_length=0) == 5
            history = [1, 2, 3, 4, 9]
            history.append(next_token(history))
            history.append(next_token(history))
            updates = list(session.generate(2, temperature=0.7, seed=3, min_p=0.25, stop_token_ids=(1,)))
            assert updates[:3] == [Truncated(1), Token(history[5]), Token(history[6])]
            done = updates[3]
            assert isinstance(done, Done)
            assert (done.stop_reason, done.num_tokens) == (StopReason.MAX_TOKENS, 2)
            (params,) = runtime.asked
            assert (params.temperature, params.seed, params.min_p, params.stop_token_ids) == (0.7, 3, 0.25, (1,))

            info = session.info()
            assert info.settings == SessionSettings(**SETTINGS)
            assert (info.history_length, info.num_retained, info.kv_live_bytes) == (7, 4, 4 * BYTES_PER_TOKEN)
            assert (info.kv_bound_bytes, info.label, info.restored) == (7 * BYTES_PER_TOKEN, "mine", None)
            assert not session.cancel()

            fork = session.fork(label="twin")
            assert fork.rollback(2) == 2
            assert runtime.sessions["", fork.id].history == [1, 2]
            assert [info.label for info in sessions.list()] == ["mine", "twin"]
            assert sessions.get(fork.id).close() == 2
        assert runtime.sessions == {}


def test_the_same_with_asyncio() -> None:
    async def run() -> None:
        runtime = FakeRuntime()
        async with serving(runtime) as address, AsyncSessions(address) as sessions:
            async with await sessions.create(window=None, ttl_s=None) as session:
                assert await session.append([1], expected_length=0) == 1
                updates = [update async for update in session.generate(2)]
                assert [type(update) for update in updates] == [Token, Token, Done]
                info = await session.info()
                assert (info.history_length, info.kv_bound_bytes, info.settings.window) == (3, None, None)
                fork = await session.fork(label="twin")
                assert await fork.rollback(2) == 2
                assert [info.label for info in await sessions.list()] == ["", "twin"]
                assert not await session.cancel()
                assert await sessions.get(fork.id).close() == 2
                with pytest.raises(SessionGoneError):
                    await fork.info()
            assert runtime.sessions == {}

    asyncio.run(run())


def test_a_client_of_the_contract(runtime: FakeRuntime, address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = RuntimeServiceStub(channel)
        session_id = stub.CreateSession(contract.CreateSessionRequest(client_label="old")).session_id
        append = contract.AppendTokensRequest(session_id=session_id, token_ids=range(100))
        assert stub.AppendTokens(append).history_length == 100
        tokens = []
        for response in stub.Generate(contract.GenerateRequest(session_id=session_id, max_tokens=3, top_k=1)):
            if response.WhichOneof("payload") == "token_id":
                tokens.append(response.token_id)
            if response.WhichOneof("payload") == "done":
                break  # without reading on to the end of the stream
        assert tokens == runtime.sessions["", session_id].history[100:]
        info = stub.GetSessionInfo(contract.GetSessionInfoRequest(session_id=session_id))
        assert (info.history_length, info.kv_live_bytes) == (103, 68 * BYTES_PER_TOKEN)
        assert stub.CloseSession(contract.CloseSessionRequest(session_id=session_id)).final_history_length == 103


def test_settings_that_are_left_out_are_the_servers() -> None:
    defaults = SessionSettings(sink=2, window=7, retention="pin", ttl_s=9.0, label="theirs")
    runtime = FakeRuntime(defaults=defaults)
    with serving_on_a_thread(runtime) as address, Sessions(address) as sessions:
        assert sessions.create().info().settings == defaults
        changed = msgspec.structs.replace(defaults, ttl_s=None)
        assert sessions.create(ttl_s=None).info().settings == changed


def test_errors_are_those_of_the_server(runtime: FakeRuntime, address: str) -> None:
    with Sessions(address) as sessions:
        session = sessions.create()
        with pytest.raises(SessionNotReadyError, match=r"nothing was appended yet\. Append tokens first."):
            next(session.generate())
        with pytest.raises(SessionValueError, match=f"the vocabulary has {VOCABULARY}"):
            session.append([VOCABULARY])
        with pytest.raises(SessionNotReadyError, match="has 0 tokens, not 3"):
            session.append([1], expected_length=3)
        with pytest.raises(UnknownSessionError, match="there is no session 'x'") as unknown:
            sessions.get("x").info()
        assert type(unknown.value) is UnknownSessionError
        session.append([1])
        runtime.step_s = 5.0
        stream = threading.Thread(target=lambda: list(session.generate(2)))
        stream.start()
        while session.info().state != "generating":
            pass
        with pytest.raises(SessionBusyError, match="is generating"):
            session.append([1])
        assert session.cancel()
        stream.join(5)
        session.close()
        with pytest.raises(SessionGoneError, match="was closed"):
            session.close()
        for _ in range(3):
            sessions.create()
        with pytest.raises(SessionsExhaustedError, match="3 of 3 sessions"):
            sessions.create()
        runtime.fault = ZeroDivisionError("oh")
        with pytest.raises(ServerError, match="INTERNAL: ZeroDivisionError: oh"):
            sessions.list()


def test_an_append_that_is_cancelled_says_so(runtime: FakeRuntime, address: str) -> None:
    raised: list[BaseException] = []

    def append() -> None:
        try:
            session.append([1])
        except CallCancelledError as error:
            raised.append(error)

    with Sessions(address) as sessions:
        session = sessions.create()
        runtime.step_s = 5.0
        thread = threading.Thread(target=append)
        thread.start()
        while not session.cancel():
            pass
        thread.join(5)
        assert len(raised) == 1
        assert session.info().history_length == 0


def test_values_out_of_range_are_refused_before_they_are_sent() -> None:
    with Sessions("127.0.0.1:1") as sessions:  # nothing listens there
        session = sessions.get("x")
        with pytest.raises(ConfigError, match="window: must be at least 1"):
            sessions.create(window=0)
        with pytest.raises(ConfigError, match="temperature"):
            session.generate(temperature=-1.0)
        for bad in ([-1], [2**32], ["a"]):
            with pytest.raises(SessionValueError, match="cannot be sent"):
                session.append(bad)  # type: ignore[arg-type]
        with pytest.raises(SessionValueError, match="cannot be sent"):
            session.rollback(-1)


def test_leaving_a_stream_cancels_it_and_keeps_the_session(runtime: FakeRuntime, address: str) -> None:
    with Sessions(address) as sessions:
        session = sessions.create()
        session.append([1])
        runtime.step_s = 0.01
        updates = session.generate(100_000)
        next(updates)
        updates.close()
        while session.info().state != "idle":
            pass
        assert 2 <= session.info().history_length < 1000


class Cut:
    """A stub whose stream ends before the answer does, as behind a proxy that closes it."""

    def __init__(self, num_tokens: int) -> None:
        self.responses = [contract.GenerateResponse(token_id=token) for token in range(num_tokens)]

    def Generate(self, request: Any, metadata: Any) -> Any:  # noqa: N802
        responses = self.responses

        class Call:
            def __iter__(self) -> Iterator[Any]:
                return iter(responses)

            async def __aiter__(self) -> Any:
                for response in responses:
                    yield response

            def cancel(self) -> None:
                pass

        return Call()


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_a_stream_that_is_cut_is_no_answer(num_tokens: int) -> None:
    found: list[Any] = []
    with pytest.raises(ServerError, match="here:1: the stream ended before the answer did"):
        found += _Calls(Cut(num_tokens), "here:1", ()).stream(None)  # type: ignore[arg-type]

    async def read() -> None:
        async for update in _AsyncCalls(Cut(num_tokens), "here:1", ()).stream(None):  # type: ignore[arg-type]
            found.append(update)

    with pytest.raises(ServerError, match="before the answer did"):
        asyncio.run(read())
    assert found == [Token(token) for token in range(num_tokens)] * 2


def test_a_server_that_is_not_there_is_named() -> None:
    for tls in (False, True):
        with Sessions("127.0.0.1:1", tls=tls) as sessions:
            with pytest.raises(ServerUnreachableError, match=r"127\.0\.0\.1:1 cannot be reached.*kvarts serve"):
                sessions.create()
            with pytest.raises(ServerUnreachableError):
                next(sessions.get("x").generate())


def test_a_proxy_is_not_asked_for_what_is_here(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with Sessions(address) as sessions:
        sessions.create()


def test_a_session_that_ends_with_an_error_raises_that(runtime: FakeRuntime, address: str) -> None:
    def fail_twice(sessions: Sessions) -> None:
        with sessions.create():
            runtime.fault = ZeroDivisionError("at the close")
            raise KeyError

    with Sessions(address) as sessions:
        with pytest.raises(KeyError):
            fail_twice(sessions)
        with pytest.raises(ServerError, match="at the close"), sessions.create():
            runtime.fault = ZeroDivisionError("at the close")
        with sessions.create() as session:
            session.close()


def test_tls_and_a_token(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    binding = Binding(tls_cert=cert, tls_key=key)
    runtime = FakeRuntime()
    with serving_on_a_thread(runtime, binding, owners=Owners({"secret": "ann"})) as address:
        with Sessions(address, tls_ca=cert, token="secret") as sessions:
            sessions.create()
        assert [owner for owner, _ in runtime.sessions] == ["ann"]
        with (
            Sessions(address, tls_ca=cert) as sessions,
            pytest.raises(NotAuthenticatedError, match="Bearer TOKEN"),
        ):
            sessions.create()
        with Sessions(address, tls=True) as sessions, pytest.raises(ServerUnreachableError):
            sessions.create()
    with pytest.raises(MissingFileError):
        Sessions(ANY_PORT, tls_ca=tmp_path / "none")
    with pytest.raises(InputError):
        Sessions(ANY_PORT, tls_ca=tmp_path)


@pytest.mark.parametrize("wrong", [{"is_expired": True}, {"hosts": "DNS:example.org"}])
def test_a_certificate_that_has_expired_or_is_for_another_host_is_not_trusted(
    wrong: dict[str, Any], tmp_path: Path
) -> None:
    cert, key = make_certificate(tmp_path, "wrong", **wrong)
    runtime = FakeRuntime()
    with serving_on_a_thread(runtime, Binding(tls_cert=cert, tls_key=key)) as address:
        for _ in range(3):
            with Sessions(address, tls_ca=cert) as sessions, pytest.raises(ServerUnreachableError):
                sessions.create()
    assert not runtime.sessions


def test_a_client_needs_nothing_of_a_server() -> None:
    code = "import sys, kvarts.doors.client; print(*sorted(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    modules = set(printed.stdout.split())
    assert "kvarts.doors.client.sessions" in modules
    heavy = {
        "torch",
        "numpy",
        "transformers",
        "kvarts.doors.grpc",
        "kvarts.core.engine",
        "kvarts.run.sessions.sessions",
        "click",
    }
    assert modules & heavy == set()

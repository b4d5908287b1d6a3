"""The door: what each call asks of the runtime, and a status for each error."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("grpc", reason="needs kvarts[grpc]")
import grpc

from kvarts.base.errors import ConfigError, OutputError
from kvarts.doors.grpc.messages import STATUSES
from kvarts.doors.proto.kakeya.v1 import runtime_pb2 as contract
from kvarts.doors.proto.kvarts.v1 import sessions_pb2 as added
from kvarts.run.sessions.values import SessionRuntime, SessionSettings

from builders.fake_runtime import BYTES_PER_TOKEN, EOS, VOCABULARY, FakeRuntime
from builders.session_server import RuntimeServiceStub, SessionsStub, status_of, updates_of, with_server

Code = grpc.StatusCode


def test_the_fake_is_a_runtime() -> None:
    runtime: SessionRuntime = FakeRuntime()
    assert runtime.defaults == SessionSettings()


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
            "sampling.max_tokens: must be at least 1, got 0",
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
        assert (await status_of(create(added.CreateSessionRequest(ttl_s=-1))))[1] == "ttl_s: must be above 0, got -1.0"

    with_server(FakeRuntime(), test)


def test_a_second_operation_is_refused_or_waits() -> None:
    async def test(runtime: FakeRuntime, channel: Any) -> None:
        stub = SessionsStub(channel)
        session_id = await runtime.create("")
        await runtime.append("", session_id, [1])
        runtime.step_s = 20.0
        stream = stub.Generate(added.GenerateRequest(session_id=session_id, max_tokens=5))
        while (await stub.Info(added.InfoRequest(session_id=session_id))).state != "generating":
            await asyncio.sleep(0.001)
        append: dict[str, Any] = {"session_id": session_id, "token_ids": [2]}
        code, details = await status_of(stub.AppendTokens(added.AppendTokensRequest(**append)))
        assert (code, details) == (Code.ABORTED, "the session is generating. Cancel that, or wait for it.")
        runtime.step_s = 0.0
        waiting = stub.AppendTokens(added.AppendTokensRequest(**append, queue=True))
        assert (await stub.Cancel(added.CancelRequest(session_id=session_id))).cancelled
        assert len(await updates_of(stream)) == 1
        assert (await waiting).history_length == 2

    with_server(FakeRuntime(), test)


def test_a_long_list_is_whole_and_in_order() -> None:
    async def test(runtime: FakeRuntime, channel: Any) -> None:
        ids = [await runtime.create("") for _ in range(1001)]
        infos = (await SessionsStub(channel).List(added.ListRequest())).sessions
        assert [info.session_id for info in infos] == ids

    with_server(FakeRuntime(), test)


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
        assert [record.name for record in caplog.records] == ["kvarts.doors.grpc"] * 2
        assert all(record.exc_info for record in caplog.records)

    with_server(FakeRuntime(step_s=0.02), test)


def test_a_full_disk_is_no_bug_and_its_path_is_the_operators(caplog: pytest.LogCaptureFixture) -> None:
    async def test(runtime: FakeRuntime, channel: Any) -> None:
        stub = SessionsStub(channel)
        session_id = (await stub.CreateSession(added.CreateSessionRequest())).session_id
        runtime.fault = OutputError("cannot be written: No space left on device", path="/srv/sessions")
        answer = await status_of(stub.Info(added.InfoRequest(session_id=session_id)))
        assert answer == (Code.RESOURCE_EXHAUSTED, "cannot be written: No space left on device")
        (record,) = caplog.records
        assert record.getMessage() == "/srv/sessions: cannot be written: No space left on device"
        assert record.exc_info is None

    with_server(FakeRuntime(), test)


def test_each_status_is_of_a_class_of_its_own() -> None:
    assert ConfigError in STATUSES
    assert Code.INTERNAL not in STATUSES.values()

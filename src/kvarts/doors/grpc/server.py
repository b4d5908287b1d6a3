"""A gRPC server for the sessions door: health, reflection, tokens, and an orderly shutdown.

Its address and protection are checked before anything is loaded.

Each call is parsed and passed to the runtime, and its answer is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import grpc
import msgspec
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvarts.base.errors import ConfigError
from kvarts.base.signals import asked_to_stop
from kvarts.doors.exposure import check_certificate, check_reach, host_port
from kvarts.doors.grpc.messages import (
    AppendRequest,
    Fork,
    GenerationRequest,
    Rollback,
    append_of,
    bytes_of_update,
    fork_of,
    generation_of,
    info_message,
    parsed,
    refuse,
    rollback_of,
    session_id_of,
    settings_of,
)
from kvarts.doors.grpc.owners import OWNER, CallGate, Owners
from kvarts.doors.proto.kakeya.v1 import runtime_pb2 as contract
from kvarts.doors.proto.kvarts.v1 import sessions_pb2 as added
from kvarts.run.sessions.values import SessionRuntime, SessionSettings

__all__ = [
    "CONTRACT",
    "MAX_MESSAGE_BYTES",
    "SERVICE",
    "Binding",
    "SessionServer",
    "SessionService",
    "serve_until_signal",
]

CONTRACT = contract.DESCRIPTOR.services_by_name["RuntimeService"].full_name
SERVICE = added.DESCRIPTOR.services_by_name["Sessions"].full_name

INFOS_AT_ONCE = 100
"""Sessions of a list rendered before other tasks have a turn on the loop: about a millisecond."""

Read = Callable[[Any], Any]
"""Returns the values that a call needs from its message: a message would keep everything that was sent."""

Call = Callable[[str, Any], Awaitable[Message]]


class SessionService:
    """Both services on one runtime, with a method for each call, for one event loop.

    Handlers receive values, which Gate makes from messages, and return bytes to grpc: a token costs one message and no
    second copy. A stream is written, not yielded, so that a client that vanishes cancels the same coroutine that holds
    the runtime's generator, which is then closed at once.
    """

    def __init__(self, runtime: SessionRuntime) -> None:
        self._runtime = runtime
        self._calls: set[asyncio.Task[Any]] = set()
        self._is_closing = False

    def handlers(self) -> list[Any]:
        """Return the handlers of both services for a server."""
        defaults = self._runtime.defaults
        calls: dict[str, tuple[type[Message], Read, Call]] = {
            "CreateSession": (
                added.CreateSessionRequest, lambda request: settings_of(request, defaults), self._create
            ),
            "AppendTokens": (added.AppendTokensRequest, append_of, self._append),
            "CloseSession": (contract.CloseSessionRequest, session_id_of, self._close),
            "GetSessionInfo": (contract.GetSessionInfoRequest, session_id_of, self._counters),
        }  # fmt: skip
        new_calls: dict[str, tuple[type[Message], Read, Call]] = {
            "Cancel": (added.CancelRequest, session_id_of, self._cancel),
            "Fork": (added.ForkRequest, fork_of, self._fork),
            "Rollback": (added.RollbackRequest, rollback_of, self._rollback),
            "List": (added.ListRequest, lambda _: None, self._list),
            "Info": (added.InfoRequest, session_id_of, self._info),
        }
        old = {name: self._unary(*row) for name, row in calls.items()}
        new = {name: self._unary(*row) for name, row in new_calls.items()}
        # By the contract, only end tokens given at the creation of the session end a generation.
        old_generate, generate = (
            grpc.unary_stream_rpc_method_handler(self._generate, partial(_generation_in, ignore_eos=ignore_eos))
            for ignore_eos in (True, False)
        )
        return [
            grpc.method_handlers_generic_handler(CONTRACT, {**old, "Generate": old_generate}),
            grpc.method_handlers_generic_handler(SERVICE, {**old, **new, "Generate": generate}),
        ]

    async def close(self, grace_s: float) -> None:
        """Refuse new calls, shut the runtime down, and give calls in progress `grace_s` to send their last messages."""
        self._is_closing = True
        await self._runtime.shut_down()
        if self._calls:
            await asyncio.wait(self._calls, timeout=grace_s)

    def _unary(self, kind: type[Message], read: Read, call: Call) -> Any:
        async def answer(asked: Any, context: Any) -> bytes:
            await self._begin(context)
            try:
                calling = call(OWNER.get(), asked)
                del asked
                return (await calling).SerializeToString()
            except (Exception, asyncio.CancelledError) as error:
                await _give_up(context, error)

        return grpc.unary_unary_rpc_method_handler(answer, lambda data: read(parsed(kind, data)))

    async def _begin(self, context: Any) -> None:
        if self._is_closing:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is stopping")
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _create(self, owner: str, settings: SessionSettings) -> Message:
        return contract.CreateSessionResponse(session_id=await self._runtime.create(owner, settings))

    async def _append(self, owner: str, asked: list[AppendRequest]) -> Message:
        append = asked.pop()
        appending = self._runtime.append(
            owner, append.session_id, append.tokens, expected_length=append.expected_length, queue=append.queue
        )
        del append
        return contract.AppendTokensResponse(history_length=await appending)

    async def _close(self, owner: str, session_id: str) -> Message:
        length = await self._runtime.close(owner, session_id)
        return contract.CloseSessionResponse(final_history_length=length)

    async def _counters(self, owner: str, session_id: str) -> Message:
        info = await self._runtime.info(owner, session_id)
        return contract.GetSessionInfoResponse(
            history_length=info.history_length,
            kv_live_bytes=info.kv_live_bytes,
            cache_invariant_inv1_violations=info.inv1_violations,
            cache_invariant_inv2_violations=info.inv2_violations,
            idle_seconds=info.idle_s,
        )

    async def _cancel(self, owner: str, session_id: str) -> Message:
        return added.CancelResponse(cancelled=await self._runtime.cancel(owner, session_id))

    async def _fork(self, owner: str, fork: Fork) -> Message:
        session_id = await self._runtime.fork(owner, fork.session_id, label=fork.label, queue=fork.queue)
        return added.ForkResponse(session_id=session_id)

    async def _rollback(self, owner: str, rollback: Rollback) -> Message:
        length = await self._runtime.rollback(owner, rollback.session_id, rollback.length, queue=rollback.queue)
        return added.RollbackResponse(history_length=length)

    async def _list(self, owner: str, _: None) -> Message:
        infos = await self._runtime.list(owner)
        response = added.ListResponse()
        for begin in range(0, len(infos), INFOS_AT_ONCE):
            response.sessions.extend(info_message(info) for info in infos[begin : begin + INFOS_AT_ONCE])
            await asyncio.sleep(0)
        return response

    async def _info(self, owner: str, session_id: str) -> Message:
        return info_message(await self._runtime.info(owner, session_id))

    async def _generate(self, asked: GenerationRequest, context: Any) -> None:
        await self._begin(context)
        try:
            updates = self._runtime.generate(OWNER.get(), asked.session_id, asked.params, queue=asked.queue)
            async with aclosing(updates):
                async for update in updates:
                    await context.write(bytes_of_update(update))
        except grpc.aio.BaseError:
            raise asyncio.CancelledError from None  # sending failed: the client has disconnected
        except (Exception, asyncio.CancelledError) as error:
            await _give_up(context, error)


def _generation_in(data: bytes, *, ignore_eos: bool) -> GenerationRequest:
    return generation_of(parsed(added.GenerateRequest, data), ignore_eos=ignore_eos)


async def _give_up(context: Any, error: BaseException) -> NoReturn:
    """Refuse a call. If the call itself was cancelled, nothing can be sent: re-raise the cancellation."""
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error
    await refuse(context, error)


MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Size limit of a request."""

MAX_STREAMS = 4096
"""Concurrent calls per connection; further ones wait at the client."""

OPTIONS = [
    ("grpc.so_reuseport", 0),  # two servers on one port would each get some of the calls
    # A client whose connection broke sends nothing: during a call, pings detect it.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    # With probes, windows grow with the network's speed, and each call waiting to be read holds megabytes.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
]

WATCHERS_S = 0.5
"""Time for calls still open at shutdown, which watch the server's health, to learn of its end."""

SERVICES = ("", CONTRACT, SERVICE)


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """An address, with port 0 for a free one, and its protection: TLS, and whether a token is required.

    `insecure`: waive that protection. Raises ConfigError for an address that other machines reach without it, and
    MissingFileError or InputError for the files of a certificate and its key.
    """

    host: str = "127.0.0.1"
    port: int = 0
    tls_cert: Path | None = None
    tls_key: Path | None = None
    asks_for_token: bool = False
    insecure: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"must be from 0 to 65535, got {self.port}", field="port")
        check_certificate(self.tls_cert, self.tls_key)
        check_reach(
            self.host,
            field="host",
            insecure=self.insecure,
            encrypts=self.is_encrypted,
            asks_for_token=self.asks_for_token,
            missing="Give --tls-cert, --tls-key and --token-file",
        )

    @property
    def is_encrypted(self) -> bool:
        """Whether it has TLS."""
        return self.tls_cert is not None

    def add_to(self, server: Any) -> str:
        """Make a server listen; return the address with the actual port. Raise ConfigError if it is taken."""
        try:
            if self.tls_cert is not None and self.tls_key is not None:
                pair = (self.tls_key.read_bytes(), self.tls_cert.read_bytes())
                port = server.add_secure_port(host_port(self.host, self.port), grpc.ssl_server_credentials([pair]))
            else:
                port = server.add_insecure_port(host_port(self.host, self.port))
        except RuntimeError:
            raise ConfigError(
                f"cannot listen on {host_port(self.host, self.port)}",
                field="port",
                hint="Is the port taken, or the host not here?",
            ) from None
        return host_port(self.host, port)


class SessionServer:
    """Sessions of one runtime on one port, for one event loop.

    `owners`: the owners of sessions, by token; without them, all sessions belong to the owner ``, and no token is
    needed. `max_message_bytes`: a longer request is refused with RESOURCE_EXHAUSTED.
    """

    def __init__(
        self,
        runtime: SessionRuntime,
        binding: Binding,
        *,
        owners: Owners | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self._binding = binding
        self._door = SessionService(runtime)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # missing in the stubs
        self._server = grpc.aio.server(
            interceptors=[CallGate(owners)],
            options=[*OPTIONS, ("grpc.max_receive_message_length", max_message_bytes)],
        )
        self._server.add_generic_rpc_handlers(self._door.handlers())
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection([*SERVICES[1:], health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)

    async def start(self) -> str:
        """Listen; return the address with the actual port. Raise ConfigError if that is not possible."""
        address = self._binding.add_to(self._server)
        for service in SERVICES:
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()
        return address

    async def stop(self, grace_s: float = 5.0) -> None:
        """Report the end to health checks, shut the runtime down, let calls in progress end, and stop listening."""
        await self._health.enter_graceful_shutdown()
        try:
            await self._door.close(grace_s)
        finally:
            await self._server.stop(WATCHERS_S)


async def serve_until_signal(server: SessionServer, listening: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; call `listening` with the address once clients can connect.

    A second signal ends the process immediately.
    """
    stopping = asked_to_stop()
    try:
        listening(await server.start())
        await stopping.wait()
    finally:
        await server.stop()

"""Clients of session servers: a blocking one, which is thread-safe, and one for asyncio, bound to one event loop.

A failed call becomes the error raised by the server if that has a name, otherwise one for the status.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict, TypeVar, Unpack

import grpc
from google.protobuf.message import Message

from kvarts.base.errors import ConfigError, KvartsError
from kvarts.base.files import read_bytes
from kvarts.core.config import SessionRetention
from kvarts.core.sampling import SamplingParams
from kvarts.doors.proto import ERROR_KEY, stub_of
from kvarts.doors.proto.kakeya.v1 import runtime_pb2 as contract
from kvarts.doors.proto.kvarts.v1 import sessions_pb2 as added
from kvarts.run.sessions.values import (
    Done,
    Keep,
    Positions,
    SessionBusyError,
    SessionGoneError,
    SessionInfo,
    SessionNotReadyError,
    SessionSettings,
    SessionsExhaustedError,
    SessionValueError,
    StopReason,
    Token,
    Truncated,
    UnknownSessionError,
    Update,
)

__all__ = [
    "AsyncSession",
    "AsyncSessions",
    "CallCancelledError",
    "NotAuthenticatedError",
    "Sampling",
    "ServerError",
    "ServerUnreachableError",
    "Session",
    "Sessions",
    "Settings",
    "append_request",
    "create_request",
    "credentials_of",
    "error_of",
    "generate_request",
    "info_of",
    "metadata_of",
    "options_of",
    "rollback_request",
    "update_of",
]

SomeMessage = TypeVar("SomeMessage", bound=Message)
OPTIONS = [
    ("grpc.max_receive_message_length", -1),  # a list of all sessions may be long
    # A server whose connection broke sends nothing: during a call, pings detect it.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
]


SERVICE = added.DESCRIPTOR.services_by_name["Sessions"]
HERE = ("localhost", "127.0.0.1", "[::1]")


class Settings(TypedDict, total=False):
    """Settings of a session, as in SessionSettings; omitted ones have the server's defaults."""

    sink: int
    window: int | None
    positions: Positions
    past_max_positions: bool
    retention: SessionRetention
    ttl_s: float | None
    eos_token_ids: tuple[int, ...]
    label: str
    keep: Keep
    heavy: int


class Sampling(TypedDict, total=False):
    """Sampling of tokens, as in SamplingParams; omitted fields have its defaults."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int | None
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool


def create_request(settings: Settings) -> added.CreateSessionRequest:
    """Return the request for a session. Raise ConfigError for a value out of range."""
    SessionSettings(**settings)  # checks the values as the server does
    fields: dict[str, Any] = dict(settings)
    if "label" in fields:
        fields["client_label"] = fields.pop("label")
    for name in ("window", "ttl_s"):
        if name in fields and fields[name] is None:
            fields[name] = 0
    return _message(added.CreateSessionRequest, fields)


def append_request(
    session_id: str, tokens: Iterable[int], expected_length: int | None, queue: bool
) -> added.AppendTokensRequest:
    """Return the request to append tokens. Raise SessionValueError for an invalid token id."""
    fields = {"session_id": session_id, "token_ids": tokens, "expected_length": expected_length, "queue": queue}
    return _message(added.AppendTokensRequest, fields)


def generate_request(session_id: str, max_tokens: int, sampling: Sampling, queue: bool) -> added.GenerateRequest:
    """Return the request to generate tokens. Raise ConfigError for a value out of range."""
    SamplingParams(max_tokens=max_tokens, **sampling)  # checks the values as the server does
    return _message(
        added.GenerateRequest, {"session_id": session_id, "max_tokens": max_tokens, "queue": queue, **sampling}
    )


def rollback_request(session_id: str, length: int, queue: bool) -> added.RollbackRequest:
    """Return the request to shorten a history. Raise SessionValueError for an invalid length."""
    return _message(added.RollbackRequest, {"session_id": session_id, "length": length, "queue": queue})


def _message(kind: type[SomeMessage], fields: dict[str, Any]) -> SomeMessage:
    try:
        return kind(**fields)
    except (TypeError, ValueError) as error:
        raise SessionValueError(f"cannot be sent: {error}") from None


def update_of(response: contract.GenerateResponse) -> Update:
    """Return the update in a message of a stream."""
    which = response.WhichOneof("payload")
    if which == "token_id":
        return Token(response.token_id)
    if which == "truncated":
        return Truncated(response.truncated.dropped_token_count)
    done = response.done
    return Done(
        StopReason(done.stop_reason),
        done.generated_token_count,
        done.prefill_duration_seconds,
        done.total_duration_seconds,
    )


def info_of(message: added.SessionInfo) -> SessionInfo:
    """Return the information about a session in a message."""
    settings = message.settings
    return SessionInfo(
        session_id=message.session_id,
        label=message.label,
        settings=SessionSettings(
            sink=settings.sink,
            window=settings.window if settings.HasField("window") else None,
            positions=settings.positions,  # type: ignore[arg-type]  # SessionSettings checks it
            past_max_positions=settings.past_max_positions,
            retention=settings.retention,  # type: ignore[arg-type]
            ttl_s=settings.ttl_s if settings.HasField("ttl_s") else None,
            eos_token_ids=tuple(settings.eos_token_ids),
            label=settings.label,
            keep=settings.keep or "window",  # type: ignore[arg-type]  # empty from older servers
            heavy=settings.heavy,
        ),
        state=message.state,
        history_length=message.history_length,
        num_retained=message.num_retained,
        num_dropped=message.num_dropped,
        kv_live_bytes=message.kv_live_bytes,
        kv_allocated_bytes=message.kv_allocated_bytes,
        kv_peak_bytes=message.kv_peak_bytes,
        kv_bound_bytes=message.kv_bound_bytes if message.HasField("kv_bound_bytes") else None,
        inv1_violations=message.inv1_violations,
        inv2_violations=message.inv2_violations,
        idle_s=message.idle_s,
        num_turns=message.num_turns,
        num_computed_tokens=message.num_computed_tokens,
        restored=message.restored if message.HasField("restored") else None,
    )


def options_of(address: str) -> list[tuple[str, int]]:
    """Return the options of a channel. A proxy set in the environment is not used for this machine."""
    return [*OPTIONS, ("grpc.enable_http_proxy", int(address.rpartition(":")[0] not in HERE))]


def credentials_of(tls: bool, tls_ca: Path | str | None) -> grpc.ChannelCredentials | None:
    """Return the credentials of a TLS channel; None without TLS. Raise MissingFileError or InputError."""
    if tls_ca is None:
        return grpc.ssl_channel_credentials() if tls else None
    return grpc.ssl_channel_credentials(read_bytes(Path(tls_ca), hint="Check the path of the certificate."))


def metadata_of(token: str | None) -> tuple[tuple[str, str], ...]:
    """Return the metadata of each call."""
    return () if token is None else (("authorization", f"Bearer {token}"),)


class ServerError(KvartsError):
    """A call without a proper answer; the text begins with its status."""


class ServerUnreachableError(ServerError):
    """No server answers at the address, the server is stopping, or its certificate is not trusted."""


class NotAuthenticatedError(ServerError):
    """The server requires a token, and the call's was unknown or missing."""


class CallCancelledError(ServerError):
    """The call was cancelled: the operation ended at a token boundary, and the session is kept."""


NAMED: dict[str, type[KvartsError]] = {
    kind.__name__: kind
    for kind in (
        ConfigError,
        SessionBusyError,
        SessionGoneError,
        SessionNotReadyError,
        SessionValueError,
        SessionsExhaustedError,
        UnknownSessionError,
    )
}
BY_STATUS: dict[grpc.StatusCode, type[KvartsError]] = {
    grpc.StatusCode.NOT_FOUND: UnknownSessionError,
    grpc.StatusCode.INVALID_ARGUMENT: SessionValueError,
    grpc.StatusCode.FAILED_PRECONDITION: SessionNotReadyError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: SessionsExhaustedError,
    grpc.StatusCode.ABORTED: SessionBusyError,
    grpc.StatusCode.UNAUTHENTICATED: NotAuthenticatedError,
    grpc.StatusCode.CANCELLED: CallCancelledError,
    grpc.StatusCode.UNAVAILABLE: ServerUnreachableError,
}


def error_of(failure: Any, address: str) -> KvartsError:
    """Return the error of a failed call to the server at `address`."""
    status: grpc.StatusCode = failure.code()
    details: str = failure.details() or ""
    named = NAMED.get(str(dict(failure.trailing_metadata() or ()).get(ERROR_KEY, "")))
    kind = named or BY_STATUS.get(status, ServerError)
    if kind is ServerUnreachableError:
        return kind(f"{address} cannot be reached: {details}", hint="Is `kvarts serve sessions` running there?")
    if issubclass(kind, ServerError):
        return kind(f"{address}: {status.name}: {details}")
    return kind(details)


def check_whole(last: Update | None, address: str) -> None:
    """Raise ServerError if `last`, the last update of a stream, does not end it: a proxy may cut it in silence."""
    if not isinstance(last, Done):
        raise ServerError(
            f"{address}: the stream ended before the answer did", hint="The session has the tokens: ask for its info."
        )


class Sessions:
    """The sessions of one owner on the server at `address`, `HOST:PORT`.

    `token`: the owner's token, if the server requires one. `tls`: encrypt, and trust the system's certificates;
    `tls_ca`: encrypt, and trust the certificates in this file. Nothing is sent before the first call.

    All calls raise the server's errors, which are classes of `kvarts.run.sessions.values` and ConfigError; other
    failures raise a ServerError: ServerUnreachableError, NotAuthenticatedError, CallCancelledError.
    """

    def __init__(
        self, address: str, *, token: str | None = None, tls: bool = False, tls_ca: Path | str | None = None
    ) -> None:
        credentials = credentials_of(tls, tls_ca)
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options_of(address))
        else:
            self._channel = grpc.secure_channel(address, credentials, options_of(address))
        self._calls = _Calls(stub_of(self._channel, SERVICE), address, metadata_of(token))

    def create(self, **settings: Unpack[Settings]) -> Session:
        """Return a new session. Settings are those of SessionSettings; omitted ones have the server's defaults.

        Raise SessionsExhaustedError if the session does not fit, ConfigError for a value out of range.
        """
        response = self._calls.one("CreateSession", create_request(settings))
        return Session(response.session_id, self._calls)

    def get(self, session_id: str) -> Session:
        """Return the session with that id. Nothing is sent: the first call shows whether the session exists."""
        return Session(session_id, self._calls)

    def list(self) -> list[SessionInfo]:
        """Return this owner's sessions, the oldest first."""
        response = self._calls.one("List", added.ListRequest())
        return [info_of(message) for message in response.sessions]

    def close(self) -> None:
        """Close the connection. Sessions remain on the server."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Session:
    """A session on a server, by its `id`. As a context manager, it also closes the session on the server."""

    def __init__(self, session_id: str, calls: _Calls) -> None:
        self.id = session_id
        self._calls = calls

    def append(self, tokens: Iterable[int], *, expected_length: int | None = None, queue: bool = False) -> int:
        """Append tokens; return the length of the history once their KV is in pages.

        `expected_length`: the present length. With it, a retry after a lost answer cannot append twice: it raises
        SessionNotReadyError. `queue`: wait for an operation in progress; without it, SessionBusyError is raised. Raise
        SessionValueError for ids outside the vocabulary; then nothing was appended.
        """
        request = append_request(self.id, tokens, expected_length, queue)
        response = self._calls.one("AppendTokens", request)
        return int(response.history_length)

    def generate(
        self, max_tokens: int = 128, *, queue: bool = False, **sampling: Unpack[Sampling]
    ) -> Generator[Update, None, None]:
        """Yield Truncated, if tokens of the history were dropped, then one Token per generated token, then Done.

        Sampling is that of SamplingParams. Generation begins when the first update is requested. Closing the generator
        cancels it: the session keeps the tokens generated until then. Raise SessionNotReadyError if nothing was
        appended yet.
        """
        return self._calls.stream(generate_request(self.id, max_tokens, sampling, queue))

    def cancel(self) -> bool:
        """End the operation in progress at a token boundary, and keep the session; return whether there was one."""
        response = self._calls.one("Cancel", added.CancelRequest(session_id=self.id))
        return bool(response.cancelled)

    def info(self) -> SessionInfo:
        """Return the present state of the session, also during a generation."""
        return info_of(self._calls.one("Info", added.InfoRequest(session_id=self.id)))

    def fork(self, *, label: str = "", queue: bool = False) -> Session:
        """Return a new session with the same history and settings."""
        request = added.ForkRequest(session_id=self.id, client_label=label, queue=queue)
        response = self._calls.one("Fork", request)
        return Session(response.session_id, self._calls)

    def rollback(self, length: int, *, queue: bool = False) -> int:
        """Shorten the history to `length`, and return it. Raise SessionNotReadyError if KV for it was dropped."""
        response = self._calls.one("Rollback", rollback_request(self.id, length, queue))
        return int(response.history_length)

    def close(self) -> int:
        """End the session and its operation in progress; return the length of its history."""
        response = self._calls.one("CloseSession", contract.CloseSessionRequest(session_id=self.id))
        return int(response.final_history_length)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self.close()
        except UnknownSessionError:
            pass  # it is closed already
        except KvartsError:
            if error is None:
                raise  # otherwise the first error propagates


class _Calls:
    """Calls to one server. Each returns the answer or raises the server's error."""

    def __init__(self, stub: Any, address: str, metadata: tuple[tuple[str, str], ...]) -> None:
        self._stub = stub
        self._address = address
        self._metadata = metadata

    def one(self, name: str, request: Any) -> Any:
        try:
            return getattr(self._stub, name)(request, metadata=self._metadata)
        except grpc.RpcError as failure:
            raise error_of(failure, self._address) from None

    def stream(self, request: added.GenerateRequest) -> Generator[Update, None, None]:
        call = self._stub.Generate(request, metadata=self._metadata)
        try:
            update: Update | None = None
            for response in call:
                update = update_of(response)
                yield update
            check_whole(update, self._address)
        except grpc.RpcError as failure:
            raise error_of(failure, self._address) from None
        finally:
            call.cancel()


class AsyncSessions:
    """The sessions of one owner on the server at `address`, `HOST:PORT`, for asyncio.

    Parameters and errors are those of Sessions.
    """

    def __init__(
        self, address: str, *, token: str | None = None, tls: bool = False, tls_ca: Path | str | None = None
    ) -> None:
        credentials = credentials_of(tls, tls_ca)
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options_of(address))
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options_of(address))
        self._calls = _AsyncCalls(stub_of(self._channel, SERVICE), address, metadata_of(token))

    async def create(self, **settings: Unpack[Settings]) -> AsyncSession:
        """Return a new session, as Sessions.create does."""
        response = await self._calls.one("CreateSession", create_request(settings))
        return AsyncSession(response.session_id, self._calls)

    def get(self, session_id: str) -> AsyncSession:
        """Return the session with that id. Nothing is sent: the first call shows whether the session exists."""
        return AsyncSession(session_id, self._calls)

    async def list(self) -> list[SessionInfo]:
        """Return this owner's sessions, the oldest first."""
        response = await self._calls.one("List", added.ListRequest())
        return [info_of(message) for message in response.sessions]

    async def close(self) -> None:
        """Close the connection. Sessions remain on the server."""
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncSession:
    """A session on a server, by its `id`. As a context manager, it also closes the session on the server."""

    def __init__(self, session_id: str, calls: _AsyncCalls) -> None:
        self.id = session_id
        self._calls = calls

    async def append(self, tokens: Iterable[int], *, expected_length: int | None = None, queue: bool = False) -> int:
        """Append tokens; return the length of the history. Parameters and errors are those of Session.append."""
        request = append_request(self.id, tokens, expected_length, queue)
        response = await self._calls.one("AppendTokens", request)
        return int(response.history_length)

    def generate(
        self, max_tokens: int = 128, *, queue: bool = False, **sampling: Unpack[Sampling]
    ) -> AsyncGenerator[Update, None]:
        """Yield the updates of a generation, as Session.generate does."""
        return self._calls.stream(generate_request(self.id, max_tokens, sampling, queue))

    async def cancel(self) -> bool:
        """End the operation in progress at a token boundary, and keep the session; return whether there was one."""
        response = await self._calls.one("Cancel", added.CancelRequest(session_id=self.id))
        return bool(response.cancelled)

    async def info(self) -> SessionInfo:
        """Return the present state of the session, also during a generation."""
        return info_of(await self._calls.one("Info", added.InfoRequest(session_id=self.id)))

    async def fork(self, *, label: str = "", queue: bool = False) -> AsyncSession:
        """Return a new session with the same history and settings."""
        request = added.ForkRequest(session_id=self.id, client_label=label, queue=queue)
        response = await self._calls.one("Fork", request)
        return AsyncSession(response.session_id, self._calls)

    async def rollback(self, length: int, *, queue: bool = False) -> int:
        """Shorten the history to `length`, and return it. Raise SessionNotReadyError if KV for it was dropped."""
        response = await self._calls.one("Rollback", rollback_request(self.id, length, queue))
        return int(response.history_length)

    async def close(self) -> int:
        """End the session and its operation in progress; return the length of its history."""
        response = await self._calls.one("CloseSession", contract.CloseSessionRequest(session_id=self.id))
        return int(response.final_history_length)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except UnknownSessionError:
            pass  # it is closed already
        except KvartsError:
            if error is None:
                raise  # otherwise the first error propagates


class _AsyncCalls:
    """Calls to one server. Each returns the answer or raises the server's error."""

    def __init__(self, stub: Any, address: str, metadata: tuple[tuple[str, str], ...]) -> None:
        self._stub = stub
        self._address = address
        self._metadata = metadata

    async def one(self, name: str, request: Any) -> Any:
        try:
            return await getattr(self._stub, name)(request, metadata=self._metadata)
        except grpc.RpcError as failure:
            raise error_of(failure, self._address) from None

    async def stream(self, request: added.GenerateRequest) -> AsyncGenerator[Update, None]:
        call = self._stub.Generate(request, metadata=self._metadata)
        try:
            update: Update | None = None
            async for response in call:
                update = update_of(response)
                yield update
            check_whole(update, self._address)
        except grpc.RpcError as failure:
            raise error_of(failure, self._address) from None
        finally:
            call.cancel()

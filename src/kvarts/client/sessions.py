"""Clients of session servers: a blocking one, which is thread-safe, and one for asyncio, bound to one event loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from kvarts.client.messages import (
    Sampling,
    Settings,
    append_request,
    create_request,
    credentials_of,
    error_of,
    generate_request,
    info_of,
    metadata_of,
    options_of,
    rollback_request,
    update_of,
)
from kvarts.errors import KvartsError
from kvarts.proto.kakeya.v1 import runtime_pb2 as contract
from kvarts.proto.kvarts.v1 import sessions_pb2 as added
from kvarts.proto.kvarts.v1.sessions_pb2_grpc import SessionsStub
from kvarts.session.values import SessionInfo, UnknownSessionError, Update

__all__ = ["AsyncSession", "AsyncSessions", "Session", "Sessions"]


class Sessions:
    """The sessions of one owner on the server at `address`, `HOST:PORT`.

    `token`: the owner's token, if the server requires one. `tls`: encrypt, and trust the system's certificates;
    `tls_ca`: encrypt, and trust the certificates in this file. Nothing is sent before the first call.

    All calls raise the server's errors, which are classes of `kvarts.session.values` and ConfigError; other failures
    raise a ServerError: ServerUnreachableError, NotAuthenticatedError, CallCancelledError.
    """

    def __init__(
        self, address: str, *, token: str | None = None, tls: bool = False, tls_ca: Path | str | None = None
    ) -> None:
        credentials = credentials_of(tls, tls_ca)
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options_of(address))
        else:
            self._channel = grpc.secure_channel(address, credentials, options_of(address))
        self._calls = _Calls(SessionsStub(self._channel), address, metadata_of(token))

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
            for response in call:
                yield update_of(response)
        except grpc.RpcError as failure:
            raise error_of(failure, self._address) from None
        finally:
            call.cancel()


class AsyncSessions:
    """The sessions of one owner on the server at `address`, `HOST:PORT`, for asyncio.

    `token`: the owner's token, if the server requires one. `tls`: encrypt, and trust the system's certificates;
    `tls_ca`: encrypt, and trust the certificates in this file. Nothing is sent before the first call.

    All calls raise the server's errors, which are classes of `kvarts.session.values` and ConfigError; other failures
    raise a ServerError: ServerUnreachableError, NotAuthenticatedError, CallCancelledError.
    """

    def __init__(
        self, address: str, *, token: str | None = None, tls: bool = False, tls_ca: Path | str | None = None
    ) -> None:
        credentials = credentials_of(tls, tls_ca)
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options_of(address))
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options_of(address))
        self._calls = _AsyncCalls(SessionsStub(self._channel), address, metadata_of(token))

    async def create(self, **settings: Unpack[Settings]) -> AsyncSession:
        """Return a new session. Settings are those of SessionSettings; omitted ones have the server's defaults.

        Raise SessionsExhaustedError if the session does not fit, ConfigError for a value out of range.
        """
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
        """Append tokens; return the length of the history once their KV is in pages.

        `expected_length`: the present length. With it, a retry after a lost answer cannot append twice: it raises
        SessionNotReadyError. `queue`: wait for an operation in progress; without it, SessionBusyError is raised. Raise
        SessionValueError for ids outside the vocabulary; then nothing was appended.
        """
        request = append_request(self.id, tokens, expected_length, queue)
        response = await self._calls.one("AppendTokens", request)
        return int(response.history_length)

    def generate(
        self, max_tokens: int = 128, *, queue: bool = False, **sampling: Unpack[Sampling]
    ) -> AsyncGenerator[Update, None]:
        """Yield Truncated, if tokens of the history were dropped, then one Token per generated token, then Done.

        Sampling is that of SamplingParams. Generation begins when the first update is requested. Closing the generator
        cancels it: the session keeps the tokens generated until then. Raise SessionNotReadyError if nothing was
        appended yet.
        """
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
            async for response in call:
                yield update_of(response)
        except grpc.RpcError as failure:
            raise error_of(failure, self._address) from None
        finally:
            call.cancel()

"""Conversion of messages to values and back, and of errors to a gRPC status with one line of text."""

from __future__ import annotations

import asyncio
import logging
import struct
from array import array
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

import grpc
import msgspec
import numpy as np
from google.protobuf.message import DecodeError, Message

from kvarts.base.errors import ConfigError, OutputError
from kvarts.core.sampling import SamplingParams
from kvarts.doors.proto import ERROR_KEY
from kvarts.doors.proto.kakeya.v1 import runtime_pb2 as contract
from kvarts.doors.proto.kvarts.v1 import sessions_pb2 as added
from kvarts.run.sessions.values import (
    MAX_ENDS,
    Done,
    SessionBusyError,
    SessionInfo,
    SessionNotReadyError,
    SessionSettings,
    SessionsExhaustedError,
    SessionValueError,
    Token,
    Truncated,
    UnknownSessionError,
    Update,
    check_label,
)

__all__ = [
    "STATUSES",
    "AppendRequest",
    "Fork",
    "GenerationRequest",
    "Rollback",
    "append_of",
    "bytes_of_update",
    "fork_of",
    "generation_of",
    "info_message",
    "params_of",
    "parsed",
    "refuse",
    "rollback_of",
    "session_id_of",
    "settings_of",
]

MAX_ID_CHARS = 64

MAX_TOKENS = 1 << 20
"""Limit of tokens per append."""
MAX_OTHER_BYTES = 4096
"""Limit of the bytes of the other fields."""

SomeMessage = TypeVar("SomeMessage", bound=Message)
STATUSES: dict[type[BaseException], grpc.StatusCode] = {
    UnknownSessionError: grpc.StatusCode.NOT_FOUND,
    SessionValueError: grpc.StatusCode.INVALID_ARGUMENT,
    ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    SessionNotReadyError: grpc.StatusCode.FAILED_PRECONDITION,
    SessionsExhaustedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    SessionBusyError: grpc.StatusCode.ABORTED,
    DecodeError: grpc.StatusCode.INVALID_ARGUMENT,
    OutputError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    asyncio.CancelledError: grpc.StatusCode.CANCELLED,
}
"""The status of each error and its subclasses. All others are INTERNAL."""

MAX_CHARS = 600
"""Limit of a text: the metadata of a call may have 8 KiB in total, and a character may take twelve bytes of it."""

LOG = logging.getLogger("kvarts.doors.grpc")


def parsed(kind: type[SomeMessage], data: bytes) -> SomeMessage:
    """Return the message in `data`. Raise SessionValueError for other bytes, and for too many values."""
    # Each value ends with a byte below 128. Count them before parsing, since a number of one byte then takes four.
    if len(data) > MAX_TOKENS and np.count_nonzero(np.frombuffer(data, np.uint8) < 128) > MAX_TOKENS + MAX_OTHER_BYTES:
        raise SessionValueError(
            f"the request has more than {MAX_TOKENS} token ids", field="token_ids", hint="AppendRequest them in parts."
        )
    with suppress(DecodeError):
        return kind.FromString(data)
    # Not raised in an `except`: the other error would keep this frame, and the bytes in it, alive.
    raise SessionValueError(f"the request is not a {kind.DESCRIPTOR.full_name}")


class AppendRequest(msgspec.Struct, frozen=True):
    """Tokens for a session."""

    session_id: str
    tokens: array[int]
    expected_length: int | None
    queue: bool


class Fork(msgspec.Struct, frozen=True):
    """A session to be copied."""

    session_id: str
    label: str
    queue: bool


class Rollback(msgspec.Struct, frozen=True):
    """A length to which a history is shortened."""

    session_id: str
    length: int
    queue: bool


class GenerationRequest(msgspec.Struct, frozen=True):
    """A generation of a session."""

    session_id: str
    params: SamplingParams
    queue: bool


def session_id_of(request: Any) -> str:
    """Return the session id of a request, cut to the maximum length."""
    session_id: str = request.session_id
    return session_id[:MAX_ID_CHARS]


def append_of(request: added.AppendTokensRequest) -> list[AppendRequest]:
    """Return the tokens to append, in a list that the handler empties, so that a waiting call need not keep them."""
    expected_length = request.expected_length if request.HasField("expected_length") else None
    return [AppendRequest(session_id_of(request), _token_ids(request.token_ids), expected_length, request.queue)]


def fork_of(request: added.ForkRequest) -> Fork:
    """Return a fork. Raise SessionValueError for a label that is too long."""
    check_label(request.client_label)
    return Fork(session_id_of(request), request.client_label, request.queue)


def rollback_of(request: added.RollbackRequest) -> Rollback:
    """Return a rollback."""
    return Rollback(session_id_of(request), request.length, request.queue)


def generation_of(request: added.GenerateRequest, *, ignore_eos: bool) -> GenerationRequest:
    """Return a generation; with `ignore_eos`, the model's own end is ignored regardless of the request."""
    request.ignore_eos |= ignore_eos
    return GenerationRequest(session_id_of(request), params_of(request), request.queue)


def settings_of(request: added.CreateSessionRequest, defaults: SessionSettings) -> SessionSettings:
    """Return `defaults` with the settings of a request. Raise ConfigError for a value out of range."""
    changes: dict[str, Any] = {
        name: getattr(request, name)
        for name in ("sink", "window", "positions", "past_max_positions", "retention", "ttl_s", "keep", "heavy")
        if request.HasField(name)
    }
    # A message cannot hold None: 0, which is otherwise out of range, stands for it.
    for name in ("window", "ttl_s"):
        if changes.get(name) == 0:
            changes[name] = None
    if request.client_label:
        changes["label"] = request.client_label
    if request.eos_token_ids:
        changes["eos_token_ids"] = _ends(request.eos_token_ids, "eos_token_ids")
    return msgspec.structs.replace(defaults, **changes)


def params_of(request: added.GenerateRequest) -> SamplingParams:
    """Return the sampling parameters of a request. Raise ConfigError for a value out of range."""
    params: dict[str, Any] = {
        name: getattr(request, name)
        for name in ("seed", "top_k", "min_p", "repetition_penalty")
        if request.HasField(name)
    }
    params |= {name: _decimal(getattr(request, name)) for name in ("temperature", "top_p") if request.HasField(name)}
    return SamplingParams(
        max_tokens=request.max_tokens,
        stop_token_ids=_ends(request.stop_token_ids, "stop_token_ids"),
        ignore_eos=request.ignore_eos,
        **params,
    )


def _token_ids(ids: Any) -> array[int]:
    """Return the token ids of a request, in one block of memory. Raise SessionValueError for too many."""
    if len(ids) > MAX_TOKENS:
        raise SessionValueError(
            f"has {len(ids)} ids, and {MAX_TOKENS} at most", field="token_ids", hint="AppendRequest them in parts."
        )
    return array("Q", np.asarray(ids, np.uint64).tobytes())


def _ends(ids: Any, field: str) -> tuple[int, ...]:
    if len(ids) > MAX_ENDS:
        raise SessionValueError(f"has {len(ids)} ids, and {MAX_ENDS} at most", field=field)
    return tuple(ids)


def _decimal(value: float) -> float:
    """Return the shortest decimal of a 32-bit float, so that 0.7 arrives as 0.7."""
    for digits in (6, 7, 8):  # 6 digits always survive, 9 always suffice
        short = float(f"{value:.{digits}g}")
        if struct.pack("f", short) == struct.pack("f", value):
            return short
    return value


def bytes_of_update(update: Update) -> bytes:
    """Return the serialized message of an update."""
    message: contract.GenerateResponse = RENDERERS[type(update)](update)
    return message.SerializeToString()


def _token_message(update: Token) -> contract.GenerateResponse:
    return contract.GenerateResponse(token_id=update.token_id)


def _truncated_message(update: Truncated) -> contract.GenerateResponse:
    return contract.GenerateResponse(truncated=contract.HistoryTruncated(dropped_token_count=update.num_dropped))


def _done_message(update: Done) -> contract.GenerateResponse:
    return contract.GenerateResponse(
        done=contract.GenerateDone(
            stop_reason=int(update.stop_reason),  # type: ignore[arg-type]  # the stub does not accept the enum's int
            generated_token_count=update.num_tokens,
            prefill_duration_seconds=update.prefill_s,
            total_duration_seconds=update.total_s,
        )
    )


RENDERERS: dict[type[Update], Any] = {Token: _token_message, Truncated: _truncated_message, Done: _done_message}


def info_message(info: SessionInfo) -> added.SessionInfo:
    """Return the message of a session's information."""
    values = msgspec.structs.asdict(info)
    settings = added.SessionSettings(**msgspec.structs.asdict(values.pop("settings")))
    return added.SessionInfo(settings=settings, **values)


async def refuse(context: Any, error: BaseException) -> NoReturn:
    """End a call with the status of `error`. Log an error that is not in the table, since it is a bug."""
    status = next((STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES), None)
    text = str(error)
    if isinstance(error, OutputError):
        LOG.error("%s", error)
        text = error.what  # without the path, which is the operator's
    elif status is grpc.StatusCode.CANCELLED:
        text = "was cancelled"
    elif status is None:
        LOG.error("an unexpected error", exc_info=error)
        status, text = grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {text}"
    error.__traceback__ = None  # its frames hold the message, which may be large
    await context.abort(status, " ".join(text.split())[:MAX_CHARS], ((ERROR_KEY, type(error).__name__),))
    raise AssertionError("abort returns never")

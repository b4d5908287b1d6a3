"""Messages as values, and values as messages. No value is judged here: those that are made judge themselves."""

from __future__ import annotations

import struct
from typing import Any, TypeVar

import msgspec
from google.protobuf.message import DecodeError, Message

from kvarts.proto.kakeya.v1 import runtime_pb2 as contract
from kvarts.proto.kvarts.v1 import sessions_pb2 as added
from kvarts.sampling import SamplingParams
from kvarts.session.errors import SessionValueError
from kvarts.session.values import Done, SessionInfo, SessionSettings, Token, Truncated, Update

__all__ = ["bytes_of_update", "given", "info_message", "params_of", "parsed", "settings_of"]

SomeMessage = TypeVar("SomeMessage", bound=Message)


def parsed(kind: type[SomeMessage], data: bytes) -> SomeMessage:
    """Return the message that `data` is. Raise SessionValueError for bytes that are none."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise SessionValueError(f"the request is no {kind.DESCRIPTOR.full_name}") from None


def given(request: Message, field: str) -> Any:
    """Return an optional field, None if it was not given."""
    return getattr(request, field) if request.HasField(field) else None


def settings_of(request: added.CreateSessionRequest, defaults: SessionSettings) -> SessionSettings:
    """Return `defaults` with what a request gives instead. Raise ConfigError for a value out of range."""
    changes: dict[str, Any] = {
        name: getattr(request, name)
        for name in ("sink", "window", "positions", "past_max_positions", "retention", "ttl_s")
        if request.HasField(name)
    }
    # A message cannot say "none": 0 does, which is out of range otherwise.
    for name in ("window", "ttl_s"):
        if changes.get(name) == 0:
            changes[name] = None
    if request.client_label:
        changes["label"] = request.client_label
    if request.eos_token_ids:
        changes["eos_token_ids"] = tuple(request.eos_token_ids)
    return msgspec.structs.replace(defaults, **changes)


def params_of(request: added.GenerateRequest) -> SamplingParams:
    """Return what a request asks of its tokens. Raise ConfigError for a value out of range."""
    params: dict[str, Any] = {
        name: getattr(request, name)
        for name in ("seed", "top_k", "min_p", "repetition_penalty")
        if request.HasField(name)
    }
    params |= {name: _decimal(getattr(request, name)) for name in ("temperature", "top_p") if request.HasField(name)}
    return SamplingParams(
        max_tokens=request.max_tokens,
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        **params,
    )


def _decimal(value: float) -> float:
    """Return the shortest decimal that a 32-bit float stands for, so that 0.7 arrives as 0.7."""
    for digits in (6, 7, 8):  # 6 always fit, 9 always suffice
        short = float(f"{value:.{digits}g}")
        if struct.pack("f", short) == struct.pack("f", value):
            return short
    return value


def bytes_of_update(update: Update) -> bytes:
    """Return the message of an update as it is sent."""
    message: contract.GenerateResponse = RENDERERS[type(update)](update)
    return message.SerializeToString()


def _token_message(update: Token) -> contract.GenerateResponse:
    return contract.GenerateResponse(token_id=update.token_id)


def _truncated_message(update: Truncated) -> contract.GenerateResponse:
    return contract.GenerateResponse(truncated=contract.HistoryTruncated(dropped_token_count=update.num_dropped))


def _done_message(update: Done) -> contract.GenerateResponse:
    return contract.GenerateResponse(
        done=contract.GenerateDone(
            stop_reason=int(update.stop_reason),  # type: ignore[arg-type]  # an enum is an int, but to its stub
            generated_token_count=update.num_tokens,
            prefill_duration_seconds=update.prefill_s,
            total_duration_seconds=update.total_s,
        )
    )


RENDERERS: dict[type[Update], Any] = {Token: _token_message, Truncated: _truncated_message, Done: _done_message}


def info_message(info: SessionInfo) -> added.SessionInfo:
    """Return all that is known of a session."""
    values = msgspec.structs.asdict(info)
    settings = added.SessionSettings(**msgspec.structs.asdict(values.pop("settings")))
    return added.SessionInfo(settings=settings, **values)

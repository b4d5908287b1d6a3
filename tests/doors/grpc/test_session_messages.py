"""Laws of messages: a runtime is asked what a client says, and a client reads what the runtime answers."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest

pytest.importorskip("grpc", reason="needs kvarts[grpc]")
from hypothesis import given
from hypothesis import strategies as st

from kvarts.core.sampling import SamplingParams
from kvarts.doors.client.sessions import append_request, create_request, generate_request, info_of, update_of
from kvarts.doors.grpc.messages import (
    MAX_TOKENS,
    append_of,
    bytes_of_update,
    info_message,
    params_of,
    parsed,
    settings_of,
)
from kvarts.doors.proto.kakeya.v1 import runtime_pb2 as contract
from kvarts.doors.proto.kvarts.v1 import sessions_pb2 as added
from kvarts.run.sessions.values import (
    Done,
    SessionInfo,
    SessionSettings,
    SessionValueError,
    StopReason,
    Token,
    Truncated,
    Update,
)

pytestmark = pytest.mark.laws

TOKENS = st.integers(0, 2**32 - 1)
COUNTS = st.integers(0, 2**64 - 1)
LABELS = st.text(st.characters(codec="utf-8"), max_size=8)
SECONDS = st.floats(0, 1e9)
DECIMALS = st.builds(lambda digits, places: digits / 10**places, st.integers(0, 999_999), st.integers(0, 6))
"""Numbers of at most six digits: those that 32 bits tell apart."""

SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "sink": st.integers(0, 2**32 - 1),
        "window": st.integers(1, 2**32 - 1),
        "positions": st.sampled_from(["global", "cache"]),
        "past_max_positions": st.booleans(),
        "retention": st.sampled_from(["pin", "cache", "host"]),
        "ttl_s": st.none() | st.floats(1e-9, 1e9),
        "eos_token_ids": st.lists(TOKENS, min_size=1, max_size=4).map(tuple),
        "label": LABELS.filter(bool),
    },
)
SETTINGS |= st.fixed_dictionaries({"window": st.none(), "positions": st.just("global")})
SETTINGS |= st.fixed_dictionaries(
    {
        "window": st.integers(1, 2**32 - 1),
        "positions": st.just("global"),
        "keep": st.sampled_from(["h2o", "snapkv"]),
        "heavy": st.integers(1, 2**32 - 1),
    }
)


@given(SETTINGS, SETTINGS)
def test_settings_that_are_given_replace_the_servers(given_settings: dict[str, Any], defaults: dict[str, Any]) -> None:
    served = SessionSettings(**defaults)
    if given_settings.get("positions") == "cache":
        given_settings.setdefault("window", 5)
    if given_settings.get("window", 1) is None or served.window is None:
        given_settings["positions"] = "global"
    if given_settings.get("positions", served.positions) == "cache" or given_settings.get("window", 1) is None:
        given_settings |= {"keep": "window", "heavy": 0}
    if given_settings.get("heavy") and served.window is None:
        given_settings["window"] = 5
    request = parsed(added.CreateSessionRequest, create_request(given_settings).SerializeToString())  # type: ignore[arg-type]
    assert settings_of(request, served) == msgspec.structs.replace(served, **given_settings)


@given(
    st.integers(1, 2**32 - 1),
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": DECIMALS,
            "top_k": st.integers(0, 2**32 - 1),
            "top_p": DECIMALS.filter(lambda value: 0 < value <= 1),
            "min_p": st.floats(0, 1),
            "repetition_penalty": st.floats(1e-3, 1e3),
            "seed": st.none() | COUNTS,
            "stop_token_ids": st.lists(TOKENS, max_size=4).map(tuple),
            "ignore_eos": st.booleans(),
        },
    ),
)
def test_sampling_arrives_as_it_was_asked_for(max_tokens: int, sampling: dict[str, Any]) -> None:
    request = generate_request("x", max_tokens, sampling, False)  # type: ignore[arg-type]
    arrived = params_of(parsed(added.GenerateRequest, request.SerializeToString()))
    assert arrived == SamplingParams(max_tokens=max_tokens, **sampling)


UPDATES = (
    st.builds(Token, TOKENS)
    | st.builds(Truncated, COUNTS)
    | st.builds(Done, st.sampled_from(StopReason), TOKENS, SECONDS, SECONDS)
)


@given(UPDATES)
def test_updates_arrive_as_they_were_sent(update: Update) -> None:
    assert update_of(contract.GenerateResponse.FromString(bytes_of_update(update))) == update


def settings_with_window(values: dict[str, Any]) -> SessionSettings:
    return SessionSettings(**{"window": 9, **values})


INFOS = st.builds(
    SessionInfo,
    session_id=LABELS,
    label=LABELS,
    settings=SETTINGS.map(settings_with_window),
    state=st.sampled_from(["idle", "appending", "generating"]),
    kv_bound_bytes=st.none() | COUNTS,
    idle_s=SECONDS,
    restored=st.sampled_from([None, "kv", "tokens"]),
    **{
        field.name: COUNTS
        for field in msgspec.structs.fields(SessionInfo)
        if field.type is int
    },
)  # fmt: skip


@given(INFOS)
def test_infos_arrive_as_they_were_sent(info: SessionInfo) -> None:
    assert info_of(added.SessionInfo.FromString(info_message(info).SerializeToString())) == info


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_are_refused(data: bytes) -> None:
    for kind in (added.CreateSessionRequest, added.GenerateRequest, contract.CloseSessionRequest):
        with contextlib.suppress(SessionValueError):
            assert isinstance(parsed(kind, data), kind)


@given(st.lists(TOKENS, max_size=5), st.none() | COUNTS)
def test_a_length_of_none_is_not_one_of_0(tokens: list[int], length: int | None) -> None:
    request = append_request("x", iter(tokens), length, True)
    assert list(request.token_ids) == tokens
    assert (request.expected_length if request.HasField("expected_length") else None) == length


def test_too_many_tokens_are_refused_before_they_are_parsed_and_once_they_are() -> None:
    """The error says what to do, in words that do not depend on the name of the message."""
    many = added.AppendTokensRequest(session_id="a" * 32, token_ids=[1] * (MAX_TOKENS + 1))
    with pytest.raises(SessionValueError, match=r"ids?, and \d+ at most\. Append them in parts\."):
        append_of(many)
    more = added.AppendTokensRequest(token_ids=[1] * (MAX_TOKENS + 5000))
    with pytest.raises(SessionValueError, match=r"more than \d+ token ids\. Append them in parts\."):
        parsed(added.AppendTokensRequest, more.SerializeToString())

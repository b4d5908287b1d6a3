"""Stubs are what their `.proto` files generate, and the contract is the published one."""

from __future__ import annotations

from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version

import pytest

pytest.importorskip("grpc", reason="needs kvarts[grpc]")
from google.protobuf.message import Message

import generate_protos
from kvarts.doors.proto.kakeya.v1 import runtime_pb2 as contract
from kvarts.doors.proto.kvarts.v1 import sessions_pb2 as added

PUBLISHED = "dc054592470056364c352ad78edfb190d337e97fd1cc0f25eb17aff8ef3b4af9"
"""SHA-256 of the description of kakeya/v1/runtime.proto in the stubs of its published clients."""

NEW_FROM = 100


def test_stubs_are_up_to_date() -> None:
    try:
        tools = version("grpcio-tools")
    except PackageNotFoundError:
        pytest.skip("needs grpcio-tools, of kvarts[dev]")
    if tools != "1.85.1":
        pytest.skip(f"stubs are generated with grpcio-tools 1.85.1; {tools} is installed")
    generated = generate_protos.generated()
    assert len(generated) == 4
    for path, text in generated.items():
        assert (generate_protos.ROOT / path).read_text() == text, f"run python scripts/generate_protos.py: {path}"


def test_the_contract_is_the_published_one() -> None:
    assert sha256(contract.DESCRIPTOR.serialized_pb).hexdigest() == PUBLISHED


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (added.CreateSessionRequest, contract.CreateSessionRequest),
        (added.AppendTokensRequest, contract.AppendTokensRequest),
        (added.GenerateRequest, contract.GenerateRequest),
    ],
)
def test_a_message_with_new_fields_has_the_contracts_and_new_ones_from_100(
    ours: type[Message], theirs: type[Message]
) -> None:
    def shape(kind: type[Message]) -> dict[int, tuple[object, ...]]:
        return {
            field.number: (field.name, field.type, field.is_repeated, field.has_presence)
            for field in kind.DESCRIPTOR.fields
        }

    all_fields = shape(ours)
    assert {number: field for number, field in all_fields.items() if number < NEW_FROM} == shape(theirs)
    assert any(number >= NEW_FROM for number in all_fields)


def test_old_and_new_bytes_are_read_by_both() -> None:
    new = added.GenerateRequest(session_id="x", max_tokens=3, seed=0, min_p=0.5, stop_token_ids=[1], queue=True)
    old = contract.GenerateRequest.FromString(new.SerializeToString())
    assert (old.session_id, old.max_tokens, old.HasField("seed"), old.HasField("top_p")) == ("x", 3, True, False)
    again = added.GenerateRequest.FromString(contract.GenerateRequest(max_tokens=3).SerializeToString())
    assert again == added.GenerateRequest(max_tokens=3)

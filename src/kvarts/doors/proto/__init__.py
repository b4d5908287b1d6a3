"""Messages and services of the gRPC door, and what `scripts/generate_protos.py` makes of them.

A `.proto` file is the source; `_pb2.py` and `_pb2.pyi` beside it are generated and never edited.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from google.protobuf.descriptor import ServiceDescriptor

__all__ = ["ERROR_KEY", "stub_of"]

ERROR_KEY = "kvarts-error"
"""The metadata after a refusal in which the class of the error is named: two classes may have one status."""


def stub_of(channel: Any, service: ServiceDescriptor) -> SimpleNamespace:
    """Return the calls of a service over a channel of grpc, blocking or of asyncio, by their names."""
    from google.protobuf.message_factory import GetMessageClass

    def call_of(method: Any) -> Any:
        make = channel.unary_stream if method.server_streaming else channel.unary_unary
        return make(
            f"/{service.full_name}/{method.name}",
            request_serializer=GetMessageClass(method.input_type).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )

    return SimpleNamespace(**{method.name: call_of(method) for method in service.methods})

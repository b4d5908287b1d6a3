"""Messages and services of the gRPC door, and what `scripts/generate_protos.py` makes of them.

A `.proto` file is the source; `_pb2.py`, `_pb2.pyi` and `_pb2_grpc.py` beside it are generated and never edited.
"""

__all__ = ["ERROR_KEY"]

ERROR_KEY = "kvarts-error"
"""The metadata after a refusal in which the class of the error is named: two classes may have one status."""

"""Helpers shared by the commands about sessions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import click

from kvarts.errors import ConfigError

__all__ = ["WINDOW", "Door", "need_grpc"]

Door = Callable[[Any], AbstractAsyncContextManager[object]]
"""A context manager that serves a runtime at one more address while it is entered."""


class _Window(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """A number of tokens, or `all`, which becomes 0."""

    name = "window"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if value == "all":
            return 0
        return click.IntRange(min=1).convert(value, param, ctx)


WINDOW = _Window()


def need_grpc() -> None:
    """Raise ConfigError if grpcio is not installed."""
    try:
        import google.protobuf  # noqa: F401
        import grpc  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"sessions need gRPC ({error})", hint="pip install 'kvarts[grpc]'.") from None

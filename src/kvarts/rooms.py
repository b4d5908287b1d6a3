"""Rooms of the installation: optional ones, imported when a setting needs them, and those that can be called."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from kvarts.errors import ConfigError

__all__ = ["CallableRoom", "from_room"]


def from_room(module: str, name: str, *, field: str) -> Any:
    """Return `name` of `kvarts.MODULE`. Raise ConfigError, for the setting `field`, if that room is not installed."""
    try:
        return getattr(import_module(f"kvarts.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"kvarts.{module}".startswith(error.name):
            raise
        raise ConfigError(f"needs kvarts.{module}, which is not installed", field=field) from error


class CallableRoom(ModuleType):
    """The type of a package that is also its main function, the one that its `MAIN` names as `module:function`."""

    MAIN: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the main function."""
        return self._main(*args, **kwargs)

    @property
    def __signature__(self) -> Any:
        """The parameters of the main function, for help and editors."""
        from inspect import signature

        return signature(self._main)

    @property
    def _main(self) -> Callable[..., Any]:
        module, _, function = self.MAIN.partition(":")
        found: Callable[..., Any] = getattr(import_module(module), function)
        return found

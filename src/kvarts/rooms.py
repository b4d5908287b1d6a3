"""Optional rooms of the installation, callable rooms, and code named by a user."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from kvarts.errors import ConfigError

__all__ = ["CallableRoom", "code_named", "from_room", "function_named", "is_code_name"]


def from_room(module: str, name: str, *, field: str) -> Any:
    """Return `name` from `kvarts.MODULE`. Raise ConfigError, for the setting `field`, if the room is not installed."""
    try:
        return getattr(import_module(f"kvarts.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"kvarts.{module}".startswith(error.name):
            raise
        raise ConfigError(f"needs kvarts.{module}, which is not installed", field=field) from error


def function_named(name: str) -> Callable[..., Any]:
    """Return the function of this package that `name` states as `module:function`; its module is imported only now.

    Settings name in this way the function that carries them out, so that they need not import it.
    """
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), function)
    return found


def is_code_name(text: str) -> bool:
    """Return whether `text` has the form `module:Class`."""
    module, _, attribute = text.partition(":")
    return attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))


def code_named(name: str) -> Callable[..., Any]:
    """Import the object named by `module:Class`; modules of the working directory are found too.

    Raise ConfigError if `name` is malformed, or the object cannot be imported or called.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ConfigError(f"{name!r} is not module:Class")
    here = os.getcwd()  # noqa: PTH109
    if "" not in sys.path and here not in sys.path:
        sys.path.append(here)
    try:
        made = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{name!r} cannot be imported: {error}") from error
    if not callable(made):
        raise ConfigError(f"{name!r} is not callable")
    found: Callable[..., Any] = made
    return found


class CallableRoom(ModuleType):
    """The type of a package that can be called like its main function, given by `MAIN` as `module:function`."""

    MAIN: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the main function."""
        return function_named(self.MAIN)(*args, **kwargs)

    @property
    def __signature__(self) -> Any:
        """The parameters of the main function, for help and editors."""
        from inspect import signature

        return signature(function_named(self.MAIN))

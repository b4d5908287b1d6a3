"""Code of a user: named as `module:Class`, as a class, or as an object."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Container, Mapping
from copy import deepcopy
from importlib import import_module
from itertools import count
from typing import Any

from kvarts.base.errors import ConfigError

__all__ = ["CopiesOf", "added_state", "code_named", "is_code_name", "maker_of", "name_apart", "set_state"]


def is_code_name(text: str) -> bool:
    """Return whether `text` has the form `module:Class`."""
    module, _, attribute = text.partition(":")
    return attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))


def code_named(name: str, field: str | None = None, hint: str | None = None) -> Callable[..., Any]:
    """Import the object named by `module:Class`; modules of the working directory are found too.

    Raise ConfigError, for `field`, if `name` is malformed, or the object cannot be imported or called.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ConfigError(f"{name!r} is not module:Class", field=field, hint=hint)
    here = os.getcwd()  # noqa: PTH109
    if "" not in sys.path and here not in sys.path:
        sys.path.append(here)
    try:
        made = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{name!r} cannot be imported: {error}", field=field, hint=hint) from error
    if not callable(made):
        raise ConfigError(f"{name!r} is not callable", field=field, hint=hint)
    found: Callable[..., Any] = made
    return found


class CopiesOf:
    """A factory of copies of an object, which does not change. It has the name of the object's class.

    Raises ConfigError for an object that cannot be copied.
    """

    def __init__(self, made: Any) -> None:
        self._made = made
        self.__name__ = type(made).__name__

    def __call__(self) -> Any:
        """Return a new copy."""
        try:
            return deepcopy(self._made)
        except TypeError as error:
            raise ConfigError(
                f"an object of {self.__name__} cannot be copied: {error}",
                hint="Each engine has a copy. Give the class, or a function that makes an object.",
            ) from error


def maker_of(given: Any, method: str) -> Callable[[], Any] | None:
    """Return a factory of objects with `method`: `given`, if it is such a class or a function, or copies of an object.

    Return None for anything else.
    """
    if isinstance(given, type):
        return given if hasattr(given, method) else None
    if hasattr(given, method):
        return CopiesOf(given)
    return given if callable(given) else None


def added_state(made: Any, own: Container[str] = ()) -> dict[str, Any]:
    """Return the attributes of `made` other than `own`, those of a base class that makes them anew in a copy.

    A compiled base class would give its own attributes to a copy and leave out those that a subclass adds.
    """
    state = object.__getstate__(made)
    fields, slots = state if isinstance(state, tuple) else (state, None)
    return {name: value for name, value in {**(fields or {}), **(slots or {})}.items() if name not in own}


def set_state(made: Any, state: Mapping[str, Any]) -> None:
    """Set the attributes that `added_state` returned."""
    for name, value in state.items():
        setattr(made, name, value)


def name_apart(name: str, taken: Container[str]) -> str:
    """Return `name`, with the first free number if it is taken: `name #2`."""
    if name not in taken:
        return name
    return next(each for each in (f"{name} #{number}" for number in count(2)) if each not in taken)

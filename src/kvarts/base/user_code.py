"""Code that a user names as `module:Class`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from kvarts.base.errors import ConfigError

__all__ = ["code_named", "is_code_name"]


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

"""Optional rooms of the installation, imported by name when a setting needs one."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvarts.errors import ConfigError

__all__ = ["from_room"]


def from_room(module: str, name: str, *, field: str) -> Any:
    """Return `name` of `kvarts.MODULE`. Raise ConfigError, for the setting `field`, if that room is not installed."""
    try:
        return getattr(import_module(f"kvarts.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"kvarts.{module}".startswith(error.name):
            raise
        raise ConfigError(f"needs kvarts.{module}, which is not installed", field=field) from error

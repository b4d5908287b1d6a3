"""Whether a model's queries and keys can be rotated by their positions when they are read."""

from __future__ import annotations

from typing import Protocol

__all__ = ["LateRotation", "NoRotation"]


class LateRotation(Protocol):
    """Rotation in attention, instead of before it."""

    def enable(self) -> None:
        """Have sequences that ask for it rotated late from now on. Raise ConfigError where that cannot be done."""


class NoRotation:
    """The LateRotation of an executor that computes no keys."""

    def enable(self) -> None:
        """Do nothing."""

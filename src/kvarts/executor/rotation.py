"""Late rotation: whether a model's queries and keys can be rotated by position during attention."""

from __future__ import annotations

from typing import Protocol

__all__ = ["LateRotation", "NoRotation"]


class LateRotation(Protocol):
    """Rotation of queries and keys in attention, instead of before it."""

    def enable(self) -> None:
        """Rotate late the sequences that ask for it. Raise ConfigError if the model does not support it."""


class NoRotation:
    """The LateRotation of an executor that computes no keys."""

    def enable(self) -> None:
        """Do nothing."""

"""Limits on a timeline that the caller sets, beyond those in the body."""

from __future__ import annotations

import msgspec

from kvarts.errors import ConfigError
from kvarts.verify.chunk import brief, is_count, is_real

__all__ = ["TimelineLimits"]


class TimelineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on a timeline that the caller sets, beyond those in the body."""

    preempt_threshold: float = 0.95
    max_bytes: int | None = None
    block_bytes: int | None = None

    @classmethod
    def checked(cls, preempt_threshold: float, max_bytes: int | None, block_bytes: int | None) -> TimelineLimits:
        """Return the limits. Raise ConfigError for a threshold outside [0, 1] or a size below 1."""
        if not (is_real(preempt_threshold) and preempt_threshold <= 1.0):
            what = f"must be a number from 0 to 1, got {brief(preempt_threshold)}"
            raise ConfigError(what, field="preempt_threshold")
        for field, value in (("max_bytes", max_bytes), ("block_bytes", block_bytes)):
            if value is not None and not (is_count(value) and value >= 1):
                raise ConfigError(f"must be a whole number from 1 to 2^53, got {brief(value)}", field=field)
        return cls(preempt_threshold=preempt_threshold, max_bytes=max_bytes, block_bytes=block_bytes)

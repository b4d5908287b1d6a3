"""Health of a model that shares a device, and its changes."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from kvarts.errors import ConfigError
from kvarts.limits import MOST_SECONDS, brief

__all__ = ["Health", "HealthChange", "parse_health"]

NS_PER_S = 1_000_000_000

Health = Literal["healthy", "degraded", "dead"]


class HealthChange(msgspec.Struct, frozen=True):
    """From `time_ns` on, `model` is in `health`."""

    time_ns: int
    model: str
    health: Health


def parse_health(text: str) -> HealthChange:
    """Parse a change such as `code=dead@60`: from second 60 on. Raise ConfigError for anything else."""
    match = re.fullmatch(r"([^=@]+)=(healthy|degraded|dead)@([0-9]+(?:\.[0-9]+)?)", text.strip())
    if match is None:
        raise ConfigError(
            f"{text!r} is not NAME=STATE@SECONDS",
            field="health",
            hint="For example code=dead@60, or degraded, healthy.",
        )
    if float(match[3]) > MOST_SECONDS:
        raise ConfigError(f"{brief(text)} is more than {MOST_SECONDS:g} seconds away", field="health")
    return HealthChange(round(float(match[3]) * NS_PER_S), match[1], match[2])  # type: ignore[arg-type]

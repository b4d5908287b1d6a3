"""Scripted faults: workers that go down and links that are slow or cut, permanently or for an interval."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from kvarts.base.errors import ConfigError
from kvarts.base.limits import brief
from kvarts.base.units import parse_duration_s

__all__ = ["Change", "Fault", "Kind", "changes_of", "check_faults", "parse_faults"]

MOST_SLOWDOWN = 1_000_000

Kind = Literal["down", "slow", "cut"]
HINT = "Write down:1=60s-90s for worker 1, cut:1=60s-90s for its link, slow:1:10=60s for ten times as long."

_FAULT = re.compile(r"(down|slow|cut):([0-9]{1,9})(?::([0-9]{1,9}))?=([^-=]+)(?:-([^-=]+))?")


class Fault(msgspec.Struct, frozen=True):
    """`worker` is down, or its link is cut or slow, from `start_ns` until `end_ns` (None: permanently).

    `factor`: slowdown of a transfer over a slow link.
    """

    kind: Kind
    worker: int
    start_ns: int
    end_ns: int | None = None
    factor: int = 1


class Change(msgspec.Struct, frozen=True):
    """The beginning or the end of a fault, at `time_ns`."""

    time_ns: int
    fault: Fault
    is_begin: bool


def changes_of(faults: tuple[Fault, ...]) -> list[Change]:
    """Return the beginnings and ends of `faults`, ordered by time; at equal times, ends precede beginnings."""
    changes = [Change(fault.start_ns, fault, is_begin=True) for fault in faults]
    changes += [Change(fault.end_ns, fault, is_begin=False) for fault in faults if fault.end_ns is not None]
    return sorted(changes, key=lambda change: (change.time_ns, change.is_begin))


def parse_faults(script: str) -> tuple[Fault, ...]:
    """Parse faults such as `down:1=60s-90s,slow:2:10=30s-50s,cut:0=30s`, separated by commas or newlines.

    Raise ConfigError for anything else, and if faults of the same kind and worker overlap.
    """
    faults = [_fault(text) for part in script.splitlines() for text in map(str.strip, part.split(",")) if text]
    if not faults:
        raise ConfigError("has no fault", field="faults", hint=HINT)
    check_faults(faults)
    return tuple(faults)


def check_faults(faults: Sequence[Fault]) -> None:
    """Raise ConfigError for a fault that ends before it begins, and if those of one kind and worker overlap."""
    last: dict[tuple[str, int], Fault] = {}
    for fault in sorted(faults, key=lambda fault: fault.start_ns):
        if fault.end_ns is not None and fault.end_ns <= fault.start_ns:
            raise ConfigError(f"{fault.kind}:{fault.worker} ends before it begins", field="faults")
        before = last.get((fault.kind, fault.worker))
        if before is not None and (before.end_ns is None or before.end_ns > fault.start_ns):
            raise ConfigError(
                f"{fault.kind}:{fault.worker} begins at {fault.start_ns / 1e9:g} s, before the one before it ends",
                field="faults",
                hint="Faults of one kind and worker may not overlap.",
            )
        last[fault.kind, fault.worker] = fault


def _fault(text: str) -> Fault:
    match = _FAULT.fullmatch(text)
    if match is None or (match[1] == "slow") != (match[3] is not None):
        raise ConfigError(f"{brief(text)} is not a fault", field="faults", hint=HINT)
    factor = int(match[3] or 1)
    if match[1] == "slow" and not 2 <= factor <= MOST_SLOWDOWN:
        raise ConfigError(f"{brief(text)} does not make a link slower", field="faults", hint=HINT)
    start_ns = _ns(match[4], text)
    end_ns = None if match[5] is None else _ns(match[5], text)
    if end_ns is not None and end_ns <= start_ns:
        raise ConfigError(f"{brief(text)} ends before it begins", field="faults", hint=HINT)
    return Fault(match[1], int(match[2]), start_ns, end_ns, factor)  # type: ignore[arg-type]


def _ns(text: str, where: str) -> int:
    try:
        return round(parse_duration_s(text) * 1e9)
    except ConfigError as error:
        raise ConfigError(f"{brief(where)}: {error.what}", field="faults", hint=error.hint) from error

"""What differs on purpose between the two checkouts that `same_bytes.py` compares."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

__all__ = ["RENAMED", "Renamed"]


@dataclass(frozen=True)
class Renamed:
    """A substitution in one side of an artefact, applied before it is compared.

    `artefact` is a pattern of file names for CASE/ARTEFACT, such as `replay/*/stdout` or `*/run/report.json`; with
    several commands in a case its streams have numbers, `2.stdout`, so `*stderr` are all of them. Inside a .gz:
    `*/events.jsonl.gz!inside`. Each entry that was needed is printed with `why`.
    """

    artefact: str
    pattern: re.Pattern[bytes]
    becomes: bytes
    why: str
    side: Literal["before", "after"] = "before"


RENAMED: list[Renamed] = []
"""Intended differences since the version that a rebuild is compared with; emptied when that version changes."""

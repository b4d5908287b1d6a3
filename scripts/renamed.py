"""What differs on purpose between the two checkouts that `same_bytes.py` compares."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

__all__ = ["RENAMED", "Renamed", "new_line"]


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


def new_line(prefix: str, why: str, *, artefact: str = "*stderr") -> Renamed:
    """Return an entry for lines that begin with `prefix` and that AFTER writes where BEFORE had none."""
    pattern = re.compile(rb"^" + re.escape(prefix.encode()) + rb".*\n", re.MULTILINE)
    return Renamed(artefact, pattern, b"", why, side="after")


RENAMED: list[Renamed] = [
    Renamed(
        "docs/*stderr",
        re.compile(
            rb"^\S+: DeprecationWarning: kvarts\.[\w.]+ is now kvarts\.[\w.]+; the old name goes .*\n(  .*\n)?", re.M
        ),
        b"",
        "modules have moved; an example that imports one by its old name is warned",
        side="after",
    ),
    Renamed(
        "*stdout",
        re.compile(rb"^(limited by .*\n(?: .*\n)*)\n(?:[^ \n].*\n)+\Z", re.M),
        rb"\1",
        "below the table of a replay stands a sentence on what to try next",
        side="after",
    ),
]

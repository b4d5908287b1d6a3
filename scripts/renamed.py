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


SIDES: tuple[Literal["before", "after"], ...] = ("before", "after")

TEXTS = [
    (b"with nobody ahead", b"with none ahead"),
    (b"of tokens nobody else knows", b"of tokens that no other request has"),
    (b"and nobody holds it", b"and nothing holds it"),
    (b"; nobody holds it", b"; nothing holds it"),
    (b"and preempted nobody", b"and preempted no request"),
    (b"and nobody is active", b"and no sequence is active"),
    (b"nobody had to be fair", b"nothing was contested"),
    (b"and admitted nobody until the end", b"and admitted no request until the end"),
    (b"Nobody was admitted.", b"No request was admitted."),
]
"""Sentences of stories, verdicts, tables and pages."""

RENAMED: list[Renamed] = [
    *(
        Renamed("*", re.compile(re.escape(before)), after, "requests and sequences are not spoken of as persons")
        for before, after in TEXTS
    ),
    *(
        Renamed(
            f"{case}stderr",
            re.compile(
                rb"^\S+: DeprecationWarning: .* is now .*; the old name goes .*\n(  .*\n)?",
                re.M,
            ),
            b"",
            "modules and names have moved; code that imports one by its old name is warned",
            side="after",
        )
        for case in ("docs/*", "python/*")
    ),
    *(
        Renamed(
            f"{case}stderr",
            re.compile(rb"^kvarts: .*$", re.M),
            b"kvarts: an error",
            "an error names the setting as it was given: the flag, the key with its file, or the field",
            side=side,
        )
        for case in ("errors/*", "model/fit/*", "calibrate/steps/*")
        for side in SIDES
    ),
    Renamed(
        "*stdout",
        re.compile(rb"^(limited by .*\n(?: .*\n)*)\n(?:[^ \n].*\n)+\Z", re.M),
        rb"\1",
        "below the table of a replay stands a sentence on what to try next",
        side="after",
    ),
    *(
        Renamed(
            "model/list/*",
            re.compile(rb"^(rtx-pro-6000-server|\S+ ) *", re.M),
            rb"\1 ",
            "names of models are longer",
            side=side,
        )
        for side in SIDES
    ),
    *(
        Renamed(
            "model/list/*stdout",
            re.compile(rb"^(kvarts, +version [^ \n]+) \(\w+\)$", re.M),
            rb"\1",
            "--version says whether kvarts is compiled",
            side=side,
        )
        for side in SIDES
    ),
    Renamed(
        "model/list/*",
        re.compile(
            rb"^(gemma-3-1b|gemma-3-4b|gemma-3-12b|gemma-3n|gemma-4|gpt-oss-20b|llama-4|kimi|qwen3-next|qwen3\.5|glm"
            rb"|nemotron|granite).*\n",
            re.M,
        ),
        b"",
        "there are more models",
        side="after",
    ),
    Renamed(
        "model/*stdout",
        re.compile(rb'^  "(kv_groups|sequence)": [\[{]\n(?:   .*\n)*  [\]}],\n|^    "state_bytes": 0,\n', re.M),
        b"",
        "KV groups of a model, what a sequence takes in them, and how many fit",
        side="after",
    ),
    Renamed(
        "model/*stdout",
        re.compile(rb"^KV groups .*\n(?: .*\n)*a sequence .*\n(?: +[\d,]+ fit.*\n)?", re.M),
        b"",
        "KV groups of a model, what a sequence takes in them, and how many fit",
        side="after",
    ),
]

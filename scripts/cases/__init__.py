"""All cases of `same_bytes.py`."""

from __future__ import annotations

from pathlib import Path

from cases.case import Case
from cases.docs import docs_cases
from cases.errors import error_cases
from cases.replay import replay_cases
from cases.shared import shared_cases
from cases.tools import tool_cases

__all__ = ["all_cases"]


def all_cases(before: Path, data: Path) -> list[Case]:
    """Return the cases, with the examples of the documentation of `before`; whole traces lie in `data`."""
    cases = [
        *replay_cases(data),
        *shared_cases(data),
        *tool_cases(),
        *error_cases(),
        *docs_cases(before),
    ]
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), "two cases have one name"
    return cases

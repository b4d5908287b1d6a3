"""The classes of docs/guide-policies.md, exactly as they stand there."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from kvarts.core.kv.eviction import EvictionOrder
from kvarts.core.sched.policy import AdmissionPolicy

__all__ = ["LeastHits", "ShortestFirst", "shortest_first"]

GUIDE = Path(__file__).parents[2] / "docs" / "guide-policies.md"
DEFINITIONS = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)
"""What an example also runs, the tests of the docs run."""


def _classes() -> dict[str, Any]:
    defined: dict[str, Any] = {"__name__": "guide_policies"}
    for code in re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL):
        if re.search(r"^class ", code, re.MULTILINE):
            module = ast.parse(code)
            module.body = [statement for statement in module.body if isinstance(statement, DEFINITIONS)]
            exec(compile(module, str(GUIDE), "exec"), defined)
    return defined


_DEFINED = _classes()

LeastHits: Callable[[], EvictionOrder] = _DEFINED["LeastHits"]
ShortestFirst: Callable[..., AdmissionPolicy] = _DEFINED["ShortestFirst"]


def shortest_first(patience_ms: int) -> Callable[[], AdmissionPolicy]:
    """Return what makes a ShortestFirst of so much patience."""
    return partial(ShortestFirst, patience_ms / 1000)

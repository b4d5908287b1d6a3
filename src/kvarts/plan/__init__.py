"""Capacity planning: how much memory, which policy, how many replicas, from cache curves and replays.

The package is callable: `kvarts.plan(traffic, config)` returns a Plan.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from kvarts.rooms import CallableRoom

if TYPE_CHECKING:
    from kvarts.plan.planning import Plan as Plan
    from kvarts.plan.planning import make_plan as plan

__all__ = ["Plan", "plan"]

MAIN = "kvarts.plan.planning:make_plan"


def __getattr__(name: str) -> Any:
    """Import the planner on first use. `plan` is the package itself."""
    if name == "plan":
        return sys.modules[__name__]
    if name == "Plan":
        from kvarts.plan.planning import Plan

        return Plan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


sys.modules[__name__].__class__ = CallableRoom

"""Capacity planning: how much memory, which policy, how many replicas, from cache curves and replays.

The package is callable: `kvarts.plan(traffic, config)` returns a Plan.
"""

from __future__ import annotations

import sys
from inspect import signature
from types import ModuleType
from typing import TYPE_CHECKING

from kvarts.plan.planning import Plan, make_plan

if TYPE_CHECKING:
    from kvarts.plan.planning import make_plan as plan
else:
    plan = sys.modules[__name__]

__all__ = ["Plan", "plan"]


class CallablePlan(ModuleType):
    """The type of this package, which is called as `make_plan`."""

    __call__ = staticmethod(make_plan)
    __signature__ = signature(make_plan)


sys.modules[__name__].__class__ = CallablePlan

"""Capacity planning: how much memory, which policy, how many replicas, from cache curves and replays.

The package is callable: `kvarts.plan(traffic, config)` returns a Plan. Planning itself is imported by the first call:
a mock and a device of several models need only the names of policies.

>>> import kvarts
>>> plan = kvarts.plan("sample:mooncake", page_size=512, policies=["auto"])
>>> plan.hit_ratio(2_000) > plan.hit_ratio(1_000)
True
"""

from __future__ import annotations

import sys
from inspect import Signature, signature
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvarts.plan.planning import Plan
    from kvarts.plan.planning import make_plan as plan
else:
    plan = sys.modules[__name__]

__all__ = ["Plan", "plan"]


class CallablePlan(ModuleType):
    """The type of this package, which is called as `make_plan`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Plan:
        """Return a plan: see `make_plan`."""
        from kvarts.plan.planning import make_plan

        return make_plan(*args, **kwargs)

    @property
    def __signature__(self) -> Signature:
        """The parameters of `make_plan`, for help and editors."""
        from kvarts.plan.planning import make_plan

        return signature(make_plan)


def __getattr__(name: str) -> Any:
    """Return `Plan`, which is imported on first use."""
    if name == "Plan":
        from kvarts.plan.planning import Plan

        return Plan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


sys.modules[__name__].__class__ = CallablePlan

"""How much memory, which policy, how many replicas: cache curves of all sizes, and replays at chosen points.

The room is also its main function: `kvarts.plan(traffic, config)` returns a Plan.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvarts.plan.planning import Plan as Plan
    from kvarts.plan.planning import make_plan as plan

__all__ = ["Plan", "plan"]


class CallableRoom(ModuleType):
    """The type of this module, which can be called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Plan:
        """Return what each size of KV memory buys on a trace: see `kvarts.plan.planning.make_plan`."""
        from kvarts.plan.planning import make_plan

        return make_plan(*args, **kwargs)

    @property
    def __signature__(self) -> Any:
        """The parameters of `make_plan`, for help and editors."""
        from inspect import signature

        from kvarts.plan.planning import make_plan

        return signature(make_plan)


def __getattr__(name: str) -> Any:
    """Load what plans when it is asked for. `plan` is the room itself."""
    if name == "plan":
        return sys.modules[__name__]
    if name == "Plan":
        from kvarts.plan.planning import Plan

        return Plan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


sys.modules[__name__].__class__ = CallableRoom

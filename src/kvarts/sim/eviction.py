"""Eviction orders by name, as a class or as an object: one grammar for replays, plans, sweeps, mocks and models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvarts.base.errors import ConfigError, did_you_mean
from kvarts.base.user_code import code_named, maker_of
from kvarts.core.kv.eviction import EvictionOrder, LruOrder
from kvarts.sim.auto_order import AutoOrder
from kvarts.sim.orders import HintedOrder, SoonestReturnOrder, finishing
from kvarts.sim.traffic.trace import Trace

__all__ = ["ALL_POLICIES", "POLICIES", "MakeOrder", "OfTrace", "order_maker"]

MakeOrder = Callable[[], EvictionOrder]

POLICIES: dict[str, MakeOrder] = {
    "lru": LruOrder,
    "auto": AutoOrder,
    "soonest-return": SoonestReturnOrder,
    "hinted": HintedOrder,
}
"""Policies that need nothing beyond the calls of `EvictionOrder` and the hints of requests, by command-line names."""

SESSION_AWARE = "session-aware"
ALL_POLICIES = (*POLICIES, SESSION_AWARE)


class OfTrace:
    """The session-aware order, until the trace, which has the ends of sessions, is known."""

    __name__ = "SessionAwareOrder"

    def __call__(self) -> EvictionOrder:
        """Raise ConfigError."""
        raise ConfigError(
            f"{SESSION_AWARE!r} needs a trace, which has the ends of sessions",
            field="eviction",
            hint="Give hinted, and let clients send a ttl.",
        )

    def of_trace(self, trace: Trace) -> MakeOrder:
        """Return a factory of orders for `trace`."""
        return finishing(trace)


def order_maker(order: Any, trace: Trace | None = None) -> MakeOrder:
    """Return a factory of one order per engine. `order`: a name of ALL_POLICIES, module:Class, a class, or an object.

    A function without arguments makes orders, too. An object is copied for each engine. The session-aware order takes
    the ends of sessions from `trace`; without one, it is an OfTrace. Raise ConfigError for anything else.
    """
    if isinstance(order, str):
        return _named(order, trace)
    found: MakeOrder | None = maker_of(order, "released")
    if found is None:
        what = f"{getattr(order, '__name__', order)!r} is not an EvictionOrder"
        raise ConfigError(what, field="eviction", hint="Give a name, or a class or an object with its methods.")
    return found


def _named(name: str, trace: Trace | None) -> MakeOrder:
    if name == SESSION_AWARE:
        return OfTrace() if trace is None else finishing(trace)
    if name in POLICIES:
        return POLICIES[name]
    known = ", ".join(ALL_POLICIES)
    hint = f"Give one of {known}, or module:Class of an EvictionOrder that Python can import."
    if ":" not in name:
        raise ConfigError(
            f"{name!r} is not a policy", field="eviction", hint=f"{did_you_mean(name, ALL_POLICIES)} {hint}".strip()
        )
    make: MakeOrder = code_named(name, "eviction", hint)
    try:
        make().released  # noqa: B018  (found before anything is replayed)
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"{name!r} makes no EvictionOrder: {error}", field="eviction", hint=hint) from error
    return make

"""Leaps over many turns that are certain to be identical, and the pages that they take.

In these turns all running requests decode, and no request arrives or finishes before the last of them. They end where
the next turn is that of a model which has something else to do, such as a chunk of a prompt: a model with short steps
has many turns between two long steps of another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvarts.events import Turns
from kvarts.request import Request
from kvarts.sharing.device import SharedDevice
from kvarts.sharing.tenant import Tenant
from kvarts.sharing.turn_order import TurnOrder

__all__ = ["TurnLeap", "TurnLeaps", "plan_turn_leaps"]


class TurnLeap:
    """The steps of one model in many turns executed at once: pages and duration of each, and the state before it.

    None with `num_steps` 0: the turns end at the model's first.
    """

    __slots__ = (
        "cache",
        "cached",
        "due",
        "durations_ns",
        "horizon",
        "last_turn",
        "num_unused",
        "starts_ns",
        "tenant",
        "withheld",
    )

    def __init__(self, tenant: Tenant, num_steps: int, horizon: int) -> None:
        self.tenant = tenant
        self.cache = cache = tenant.cache
        self.durations_ns = tenant.decode_ns(num_steps) if num_steps else []
        self.due = tenant.scheduler.wheel.pages_due_by_step(num_steps) if num_steps else []
        self.horizon = horizon
        """The last certain step: it may end requests."""
        self.last_turn = -1
        """The number of the turn of its last step."""
        self.num_unused = cache.pool.total - cache.num_used
        """Pages of the device, in pages of this model, that the model does not use."""
        self.starts_ns: list[int] = []
        self.cached: list[int] = []
        self.withheld: list[int] = []

    def begin(self) -> None:
        """Start the steps that have their pages; `end` must follow."""
        num_steps = len(self.starts_ns)
        turns = Turns(self.starts_ns, self.cached, self.withheld)
        self.tenant.leap(self.durations_ns[:num_steps], self.due[:num_steps], turns)

    def end(self) -> list[Request]:
        """End these steps; return the requests that finished."""
        return self.tenant.end_leap(len(self.starts_ns))


class TurnLeaps:
    """Turns that begin before `until_ns`, of the models of `strides` in `order`.

    They end with the first step at its horizon, at the end of the known durations, or before the turn of a model that
    has no certain steps.
    """

    def __init__(self, strides: Sequence[TurnLeap], order: TurnOrder, until_ns: int, *, is_apart: bool) -> None:
        self._strides = strides
        self._order = order
        self._until_ns = until_ns
        self._is_apart = is_apart
        """Whether each model has separate memory."""

    def shorten(self, until_ns: int) -> None:
        """Leave out turns that do not begin before `until_ns`."""
        if until_ns < self._until_ns:
            self._until_ns = until_ns

    def _places(self, now_ns: int) -> Iterator[int]:
        active = [stride.tenant for stride in self._strides]
        return self._order.places(active, [stride.durations_ns for stride in self._strides], now_ns)

    def certain_until(self, now_ns: int) -> int:
        """Return the time before which no request ends if the turns begin at `now_ns`, without taking pages."""
        strides = self._strides
        free = [stride.tenant.part.memory.num_free_bytes for stride in strides]
        num_done = [0] * len(strides)
        for which in self._places(now_ns):
            stride = strides[which]
            step = num_done[which]
            if now_ns >= self._until_ns or step == len(stride.due):
                break
            num_bytes = stride.due[step] * stride.tenant.part.page_bytes
            if num_bytes > free[which]:
                break
            if self._is_apart:
                free[which] -= num_bytes
            elif num_bytes:
                free = [free[which] - num_bytes] * len(free)
            now_ns += stride.durations_ns[step]
            num_done[which] = step + 1
            if step + 1 == stride.horizon:
                break
        return min(now_ns, self._until_ns)

    def take(self, now_ns: int) -> tuple[list[TurnLeap], int]:
        """Take the pages of as many turns as possible, from `now_ns` on.

        Return the strides that have steps, in the order in which they end, and the end of the last. Pages are taken
        turn by turn, because taking pages for one model may evict those of another.
        """
        strides = self._strides
        # Taken bytes are no longer free. A model with separate memory has a separate count.
        free = [stride.tenant.part.memory.num_free_bytes for stride in strides]
        sizes = [stride.tenant.part.page_bytes for stride in strides]
        caches = [stride.cache for stride in strides]
        num_cached = [cache.num_cached for cache in caches]
        is_apart, until_ns = self._is_apart, self._until_ns
        for turn, which in enumerate(self._places(now_ns)):
            stride = strides[which]
            starts_ns = stride.starts_ns
            step = len(starts_ns)
            if now_ns >= until_ns or step == len(stride.due):
                break
            num_due = stride.due[step]
            num_free = free[which] // sizes[which]
            if num_due:
                if num_due > num_free:
                    break
                caches[which].take(num_due)
                num_cached = [cache.num_cached for cache in caches]
                num_bytes = num_due * sizes[which]
                if is_apart:
                    free[which] -= num_bytes
                else:
                    free = [free[which] - num_bytes] * len(free)
            starts_ns.append(now_ns)
            stride.withheld.append(stride.num_unused - num_free)
            stride.num_unused -= num_due
            stride.cached.append(num_cached[which])
            stride.last_turn = turn
            now_ns += stride.durations_ns[step]
            if step + 1 == stride.horizon:
                break
        ordered = sorted((stride for stride in strides if stride.starts_ns), key=lambda stride: stride.last_turn)
        return ordered, now_ns


def plan_turn_leaps(
    device: SharedDevice, tenants: Sequence[Tenant], order: TurnOrder, first: Tenant, now_ns: int, until_ns: int
) -> TurnLeaps | None:
    """Return the turns from `now_ns` to `until_ns` that are certain to be identical; None without any.

    `first` has the next turn.
    """
    if first.wants_tokens:  # the most frequent reason, and the cheapest to find
        return None
    if any(device.may_make_way(tenant.name, now_ns) for tenant in tenants):
        return None
    active = [tenant for tenant in tenants if not tenant.is_stalled]
    horizons = []
    for tenant in active:
        if tenant.wants_tokens:
            horizons.append(0)
            continue
        tenant.part.refresh()
        num_steps = max(0, tenant.scheduler.horizon(now_ns))
        horizons.append(num_steps)
        if not num_steps:
            if tenant is first:
                return None
            continue
        waiting = tenant.scheduler.waiting
        if waiting.num_waiting:
            until_ns = min(until_ns, waiting.holds_until_ns(now_ns))
    # Compute only the durations that reach `until_ns`.
    guesses = order.steps_until(active, horizons, now_ns, until_ns)
    strides = [
        TurnLeap(tenant, min(guess, horizon), horizon)
        for tenant, guess, horizon in zip(active, guesses, horizons, strict=True)
    ]
    return TurnLeaps(strides, order, until_ns, is_apart=device.is_static)

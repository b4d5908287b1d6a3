"""Many turns at once: those that are certain to be alike, and what they take.

In these turns all running requests decode, and no request arrives or finishes before the last of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvarts.events import Turns
from kvarts.request import Request
from kvarts.sched.policy import NEVER_NS
from kvarts.sharing.device import SharedDevice
from kvarts.sharing.rounds import Rounds
from kvarts.sharing.tenant import Tenant

__all__ = ["Stride", "Strides", "plan_strides"]


class Stride:
    """The steps of one model in many turns done at once: pages and duration of each, and the state before it."""

    __slots__ = (
        "cache",
        "cached",
        "due",
        "durations_ns",
        "num_unused",
        "starts_ns",
        "tenant",
        "withheld",
    )

    def __init__(self, tenant: Tenant, num_steps: int) -> None:
        self.tenant = tenant
        self.cache = cache = tenant.cache
        self.durations_ns = tenant.decode_ns(num_steps) if num_steps > 0 else []
        self.due = tenant.scheduler.wheel.pages_due_by_step(num_steps) if num_steps > 0 else []
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
        self.tenant.saved = 0

    def end(self) -> list[Request]:
        """End these steps; return the requests that finished."""
        return self.tenant.end_leap(len(self.starts_ns))


class Strides:
    """Up to `num_turns` turns that begin before `until_ns`, of the models of `strides` one after the other."""

    def __init__(self, strides: Sequence[Stride], num_turns: int, until_ns: int, *, is_apart: bool) -> None:
        self._strides = strides
        self._num_turns = num_turns
        self._num_models = min(num_turns, len(strides))
        self._until_ns = until_ns
        self._is_apart = is_apart
        """Whether each model has memory of its own."""

    def shorten(self, until_ns: int) -> None:
        """Leave out turns that do not begin before `until_ns`."""
        if until_ns < self._until_ns:
            self._until_ns = until_ns

    def certain_until(self, now_ns: int) -> int:
        """Return until when no request ends if the turns began at `now_ns`; nothing is taken."""
        strides, num_models = self._strides, self._num_models
        free = [stride.tenant.part.memory.num_free_bytes for stride in strides]
        for turn in range(self._num_turns):
            which, place = turn % num_models, turn // num_models
            stride = strides[which]
            num_bytes = stride.due[place] * stride.tenant.part.page_bytes
            if now_ns >= self._until_ns or num_bytes > free[which]:
                break
            if self._is_apart:
                free[which] -= num_bytes
            elif num_bytes:
                free = [free[which] - num_bytes] * len(free)
            now_ns += stride.durations_ns[place]
        return min(now_ns, self._until_ns)

    def take(self, now_ns: int) -> tuple[int, int]:
        """Take the pages of as many turns as can have theirs, from `now_ns` on; return how many, and their end.

        Pages are taken turn by turn, because the pages that one model takes may be evicted from another.
        """
        num_models = self._num_models
        strides = self._strides[:num_models]
        # What is taken is no longer free. A model with memory of its own has its own count.
        free = [stride.tenant.part.memory.num_free_bytes for stride in strides]
        sizes = [stride.tenant.part.page_bytes for stride in strides]
        is_apart, until_ns, num_turns = self._is_apart, self._until_ns, self._num_turns
        turn = 0
        while turn < num_turns and now_ns < until_ns:
            which = turn % num_models
            stride = strides[which]
            cache = stride.cache
            page_bytes = sizes[which]
            place = turn // num_models
            num_due = stride.due[place]
            num_free = free[which] // page_bytes
            if num_due:
                if num_due > num_free:
                    break
                cache.take(num_due)
                num_bytes = num_due * page_bytes
                if is_apart:
                    free[which] -= num_bytes
                else:
                    free = [free[which] - num_bytes] * num_models
            stride.starts_ns.append(now_ns)
            stride.withheld.append(stride.num_unused - num_free)
            stride.num_unused -= num_due
            stride.cached.append(cache.tree.num_cached)
            now_ns += stride.durations_ns[place]
            turn += 1
        return turn, now_ns

    def in_order_of_end(self, num_turns: int) -> list[Stride]:
        """Return the strides that have steps in the first `num_turns` turns, in the order in which they end."""
        last = (num_turns - 1) % len(self._strides)
        ordered = (*self._strides[last + 1 :], *self._strides[: last + 1])
        return [stride for stride in ordered if stride.starts_ns]


def plan_strides(
    device: SharedDevice, tenants: Sequence[Tenant], rounds: Rounds, now_ns: int, until_ns: int, round_ns: int
) -> Strides | None:
    """Return the turns that are certain to be alike, from `now_ns` to `until_ns`; None if there are none.

    `round_ns`: about how long a round takes.
    """
    if rounds.is_divided:
        return None
    for tenant in tenants:
        if tenant.wants_tokens:  # the most frequent reason, and the cheapest to find
            return None
    active = rounds.in_turn()
    if not rounds.only_decode(active) or any(device.may_make_way(tenant.name, now_ns) for tenant in tenants):
        return None
    num_active = len(active)
    num_turns = NEVER_NS
    for position, tenant in enumerate(active):
        tenant.part.refresh()
        tenant.scheduler.pages.token_budget = device.budgets.total
        num_steps = tenant.scheduler.horizon(now_ns)
        if num_steps < 1:
            return None
        num_turns = min(num_turns, position + (num_steps - 1) * num_active + 1)
        waiting = tenant.scheduler.waiting
        if waiting.num_waiting:
            until_ns = min(until_ns, waiting.holds_until_ns(now_ns))
    # Ask for no more durations than reach `until_ns`.
    num_turns = min(num_turns, ((until_ns - now_ns) // round_ns + 2) * num_active)
    strides = [Stride(tenant, -(-(num_turns - position) // num_active)) for position, tenant in enumerate(active)]
    return Strides(strides, num_turns, until_ns, is_apart=device.is_static)

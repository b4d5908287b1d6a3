"""Turns in rounds: the next model on a device, and how many tokens it may compute.

Models take turns in the order in which they were registered; a round is one turn of each. Budgets are divided when a
model has prompt tokens to compute, at most once per round, among the models that have work: a model that only decodes
demands the tokens of its decodes, a model with prompts all that it may have. If all models only decode, each has the
tokens that it needs. A budget too small for all decodes of its model is saved up: a step decodes all or none.

A model that runs on borrowed memory has more requests at once, and longer steps, than alone. While a model that lends
memory has prompt tokens to compute, the borrower leaves three of four turns to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle

from kvarts.sharing.device import SharedDevice
from kvarts.sharing.tenant import Tenant

__all__ = ["Rounds"]

TURNS_OF_BORROWER = 4
"""While a lender has prompts, a model on borrowed memory has one turn in this number of turns."""


class Rounds:
    """A TurnOrder. Owner of the place in the round, and of the tokens granted and spent in it."""

    def __init__(self, device: SharedDevice, tenants: Sequence[Tenant]) -> None:
        self._device = device
        self._tenants = tenants
        self._place = 0
        """The index of the model that has the next turn."""
        self._granted: dict[str, int] | None = None
        """The budgets of this round; None if they were not divided."""
        self._num_working = 0
        """How many models had work when budgets were divided in this round."""
        self._num_left: dict[Tenant, int] = {}
        """How many turns each model on borrowed memory has left to others since its last one."""
        self._num_spent = 0
        """Tokens computed in this round since budgets were divided."""
        self._round_ns = 10_000_000
        """Duration of a round in the last leap of many turns; before that, a guess."""

    def begin(self) -> None:
        """Begin a round."""
        self._place = 0
        self._granted = None

    def next(self, now_ns: int) -> Tenant | None:
        """Advance to the next model that can step, and return it; None if no model can.

        A round ends with its last model.
        """
        tenants = self._tenants
        for _ in tenants:
            if self._place == len(tenants):
                self.begin()
            tenant = tenants[self._place]
            if self._can_step(tenant, now_ns):
                return tenant
            self._place += 1
        return None

    def pass_turn(self, tenant: Tenant) -> None:
        """Advance to the model after `tenant`."""
        self._place = self._tenants.index(tenant) + 1

    def _can_step(self, tenant: Tenant, now_ns: int) -> bool:
        return not tenant.is_stalled or self._device.may_make_way(tenant.name, now_ns)

    # Budgets ----------------------------------------------------------------------------------------------

    def take_budget(self, tenant: Tenant, now_ns: int) -> int | None:
        """Return the token budget of the turn; None if it is too small to run, which ends the turn."""
        budget = self._budget(tenant, now_ns)
        if budget < max(1, tenant.scheduler.wheel.num_decoding):
            tenant.saved = budget
            return None
        if not self._has_turn(tenant):
            return None
        tenant.saved = 0
        return min(budget, tenant.config.max_num_batched_tokens)

    def _budget(self, tenant: Tenant, now_ns: int) -> int:
        budgets = self._device.budgets
        if self._granted is None:
            working = [other for other in self._tenants if self._can_step(other, now_ns)]
            if self.only_decode(working):
                return budgets.total
            self._granted = self._divide(working)
            self._num_working = len(working)
            self._num_spent = 0
        granted = self._granted.get(tenant.name)
        if granted is None:
            # Without work when budgets were divided, it may have the tokens that no model has used or may still use.
            self._num_working += 1
            to_come = self._tenants[self._place :]
            granted = budgets.total - self._num_spent - sum(self._granted.get(other.name, 0) for other in to_come)
            granted = max(0, min(granted, budgets.ceiling_for(tenant.name, self._num_working)))
        return granted + tenant.saved

    def _has_turn(self, tenant: Tenant) -> bool:
        """Return whether `tenant` takes this turn, or leaves it to models that lend memory."""
        if tenant.part.num_used_bytes <= tenant.part.num_own_bytes:
            return True
        if not any(other.wants_tokens and other.part.is_lending for other in self._tenants):
            return True
        num_left = self._num_left.get(tenant, 0)
        self._num_left[tenant] = (num_left + 1) % TURNS_OF_BORROWER
        return num_left == TURNS_OF_BORROWER - 1

    def only_decode(self, working: Sequence[Tenant]) -> bool:
        """Return whether each model needs only one token per decode, and all of them together fit in the round."""
        budgets = self._device.budgets
        total = 0
        for tenant in working:
            if tenant.wants_tokens:
                return False
            num_decoding = tenant.scheduler.wheel.num_decoding
            total += num_decoding
            if self._device.is_static:
                most = budgets.budget_for(tenant.name)
            else:
                most = budgets.ceiling_for(tenant.name, len(working))
            if num_decoding > most:
                return False
        return total <= budgets.total

    def _divide(self, working: Sequence[Tenant]) -> dict[str, int]:
        budgets = self._device.budgets
        demands: dict[str, int | None] = {}
        for tenant in working:
            demands[tenant.name] = tenant.scheduler.wheel.num_decoding
            if tenant.wants_tokens:
                demands[tenant.name] = None
        if self._device.is_static:
            return budgets.next_round()
        granted = budgets.next_round(demands)
        return {name: granted[name] for name in demands}

    def spend(self, tenant: Tenant, num_tokens: int, duration_ns: int) -> None:
        """Count the tokens that `tenant` computed."""
        self._num_spent += num_tokens

    # Many turns at once -----------------------------------------------------------------------------------

    def may_leap(self) -> bool:
        """Return whether budgets were not divided in this round."""
        return self._granted is None

    def in_turn(self) -> list[Tenant] | None:
        """Return all models that are not stalled, the next one first; None if tokens have to be divided."""
        tenants, place = self._tenants, self._place
        active = [tenant for tenant in (*tenants[place:], *tenants[:place]) if not tenant.is_stalled]
        return active if self.only_decode(active) else None

    def steps_until(self, active: Sequence[Tenant], horizons: Sequence[int], span_ns: int) -> list[int]:
        """Return how many steps of each fit into `span_ns`, or until the first is at its horizon."""
        num_rounds = min(span_ns // self._round_ns + 1, *horizons)
        return [num_rounds + 1] * len(active)

    def places(self, active: Sequence[Tenant], durations_ns: Sequence[Sequence[int]]) -> Iterator[int]:
        """Yield all places in order, repeatedly."""
        return cycle(range(len(active)))

    def leap(self, active: Sequence[Tenant], durations_ns: Sequence[Sequence[int]]) -> None:
        """Advance to the model after the last one."""
        for tenant in active:
            tenant.saved = 0
        num_turns = sum(map(len, durations_ns))
        self._round_ns = max(1, sum(map(sum, durations_ns)) * len(active) // num_turns)
        self.pass_turn(active[-1])

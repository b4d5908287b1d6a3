"""Turns by virtual time: the next model on a device whose time is divided by weights.

Start-time fair queueing, with the duration of a step as its cost. Every model has a *tag*, the virtual time at which
its next turn begins; a turn advances it by the duration of the step divided by the weight. The model with the smallest
tag is next. A model that could not step, for lack of work or memory, restarts at the virtual time of the device, which
is the tag of the most recent turn: it neither gains nor loses by the pause.

So over any period in which two models could always step, their times divided by their weights differ by at most one
step of each, whatever their steps cost. (P. Goyal, H. Vin and H. Cheng, Start-time Fair Queueing, SIGCOMM 1996; for
language models Y. Sheng et al., Fairness in Serving Large Language Models, OSDI 2024, count tokens instead.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import lcm

from kvarts.sharing.device import SharedDevice
from kvarts.sharing.tenant import Tenant

__all__ = ["FairQueue"]


class FairQueue:
    """A TurnOrder. Owner of the tags, in whole numbers: nanoseconds times `scales`."""

    def __init__(self, device: SharedDevice, tenants: Sequence[Tenant]) -> None:
        self._device = device
        self._tenants = tenants
        self.tags = dict.fromkeys(tenants, 0)
        self.scales = _scales(tenants)
        """Advance of each model's tag per nanosecond."""
        self._now = 0
        """The virtual time of the device."""
        self._could_step: set[Tenant] = set()
        """The models that could step when the last turn was given."""

    def begin(self) -> None:
        """Do nothing: this order works without rounds."""

    def next(self, now_ns: int) -> Tenant | None:
        """Return the model with the smallest tag, the first of equals, of those that can step; None if none can."""
        chosen: Tenant | None = None
        tags, could_step, device = self.tags, self._could_step, self._device
        for tenant in self._tenants:
            if tenant.is_stalled and not device.may_make_way(tenant.name, now_ns):
                could_step.discard(tenant)
                continue
            if tenant not in could_step:
                could_step.add(tenant)
                if tags[tenant] < self._now:
                    tags[tenant] = self._now
            if chosen is None or tags[tenant] < tags[chosen]:
                chosen = tenant
        return chosen

    def pass_turn(self, tenant: Tenant) -> None:
        """Begin the turn of `tenant`."""
        self._now = self.tags[tenant]

    def take_budget(self, tenant: Tenant, now_ns: int) -> int | None:
        """Return the token budget of a whole step."""
        return tenant.config.max_num_batched_tokens

    def spend(self, tenant: Tenant, num_tokens: int, duration_ns: int) -> None:
        """Advance the tag of `tenant`."""
        self.tags[tenant] += duration_ns * self.scales[tenant]
        if duration_ns:
            tenant.step_ns = duration_ns

    # Many turns at once -----------------------------------------------------------------------------------

    def may_leap(self) -> bool:
        """Return True: a model's budget does not depend on the others."""
        return True

    def in_turn(self) -> list[Tenant]:
        """Return all models that are not stalled."""
        return [tenant for tenant in self._tenants if not tenant.is_stalled]

    def steps_until(self, active: Sequence[Tenant], horizons: Sequence[int], span_ns: int) -> list[int]:
        """Return how many steps of each fit into its share of `span_ns`, or until the first is at its horizon."""
        shares = [Fraction(1, self.scales[tenant]) for tenant in active]
        whole = sum(shares)
        parts = [float(share / whole) for share in shares]
        for tenant, horizon, part in zip(active, horizons, parts, strict=True):
            span_ns = min(span_ns, int(horizon * tenant.step_ns / part))
        return [int(span_ns * part / tenant.step_ns) + 2 for tenant, part in zip(active, parts, strict=True)]

    def places(self, active: Sequence[Tenant], durations_ns: Sequence[Sequence[int]]) -> Iterator[int]:
        """Yield the place of the smallest tag, turn by turn."""
        tags = [self.tags[tenant] for tenant in active]
        scales = [self.scales[tenant] for tenant in active]
        steps = [iter(durations) for durations in durations_ns]
        while True:
            place = tags.index(min(tags))
            yield place
            tags[place] += next(steps[place]) * scales[place]

    def leap(self, active: Sequence[Tenant], durations_ns: Sequence[Sequence[int]]) -> None:
        """Advance the tags."""
        for tenant, durations in zip(active, durations_ns, strict=True):
            self.tags[tenant] += sum(durations) * self.scales[tenant]
            tenant.step_ns = max(1, durations[-1])
        self._now = self.tags[active[-1]] - durations_ns[-1][-1] * self.scales[active[-1]]


def _scales(tenants: Sequence[Tenant]) -> dict[Tenant, int]:
    """Return whole numbers in the proportions of 1 / weight."""
    weights = {tenant: Fraction(str(tenant.weight)) for tenant in tenants}
    whole = lcm(*(weight.numerator for weight in weights.values()))
    return {tenant: int(whole / weight) for tenant, weight in weights.items()}

"""The order of turns: a model that is behind its slice is next, and what is left goes round.

The *slice* of a model is a device of its own on which every step takes 1 / share as long. The model's *due time* is the
time at which the slice would start the model's next step: `c / share` after the last one was due, for a step of `c` ns,
or after it started, if that was earlier. A model that had nothing to compute is due at the start of the turn during
which it got work. If a model is due, the one that is due first has the next turn; otherwise, the one whose last turn is
the longest ago.

No step starts later than in the slice plus one step of each other model, whenever the slice begins.
docs/decisions/0019-slices-first.md has the proof. (VirtualClock, by L. Zhang, SIGCOMM 1990, has the same due times, but
counts a step that was early against its model. The bound is that of a latency-rate server: D. Stiliadis and A. Varma,
Latency-Rate Servers, IEEE/ACM Transactions on Networking, 1998.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import lcm

from kvarts.sharing.device import SharedDevice
from kvarts.sharing.tenant import Tenant

__all__ = ["TurnOrder"]


class TurnOrder:
    """Owner of the due times, in whole numbers: nanoseconds times `unit`. `leap` equals the turns one by one."""

    def __init__(self, device: SharedDevice, tenants: Sequence[Tenant]) -> None:
        self._device = device
        self._tenants = tenants
        self.unit, self.scales = _scales(tenants)
        """The advance of each model's due time per nanosecond that it computes."""
        self.due = dict.fromkeys(tenants, 0)
        self._num_turns = len(tenants)
        self._last_turn = {tenant: place for place, tenant in enumerate(tenants)}
        """The number of each model's last turn."""
        self._since_ns = 0
        """The start of the last turn."""
        self._could_step: set[Tenant] = set()
        """The models that could step when the last turn was given."""

    def next(self, now_ns: int) -> Tenant | None:
        """Return the model that has the next turn, of those that can step; None if none can."""
        device, could_step, due = self._device, self._could_step, self.due
        since = (self._since_ns if could_step else now_ns) * self.unit
        able = []
        for tenant in self._tenants:
            if tenant.is_stalled and not device.may_make_way(tenant.name, now_ns):
                continue
            able.append(tenant)
            if tenant not in could_step and due[tenant] < since:
                due[tenant] = since
        self._could_step = set(able)
        if len(able) < 2:
            return able[0] if able else None
        first = min(able, key=due.__getitem__)
        if due[first] <= now_ns * self.unit:
            return first
        return min(able, key=self._last_turn.__getitem__)

    def pass_turn(self, tenant: Tenant, now_ns: int) -> None:
        """Begin the turn of `tenant`."""
        self._since_ns = now_ns
        self._last_turn[tenant] = self._num_turns
        self._num_turns += 1

    def spend(self, tenant: Tenant, duration_ns: int) -> None:
        """Count the duration of the turn of `tenant`."""
        self.due[tenant] = min(self.due[tenant], self._since_ns * self.unit) + duration_ns * self.scales[tenant]
        if duration_ns:
            tenant.step_ns = duration_ns

    # Many turns at once -----------------------------------------------------------------------------------

    def steps_until(self, active: Sequence[Tenant], horizons: Sequence[int], now_ns: int, until_ns: int) -> list[int]:
        """Return how many steps of each of `active` may begin from `now_ns` to `until_ns`; a guess, at least 2.

        It is the larger of those in its share of the time and those in turns of equal number, until the first is at its
        horizon. A model whose horizon is 0 has none, and the others end at its turn.
        """
        if len(active) == 1:
            return [min(horizons[0], (until_ns - now_ns) // active[0].step_ns) + 2]
        stepping = [tenant for tenant, horizon in zip(active, horizons, strict=True) if horizon]
        shares = [float(tenant.share) for tenant in stepping]
        whole = sum(shares)
        round_ns = sum(tenant.step_ns for tenant in stepping)
        rates = {of: max(share / whole / of.step_ns, 1 / round_ns) for share, of in zip(shares, stepping, strict=True)}
        span = float(until_ns - now_ns)
        next_due = None
        for tenant, horizon in zip(active, horizons, strict=True):
            if horizon:
                span = min(span, horizon / rates[tenant])
            else:
                due = max(self.due[tenant], now_ns * self.unit)
                next_due = due if next_due is None else min(next_due, due)
        steps = {tenant: int(span * rate) + 2 for tenant, rate in rates.items()}
        if next_due is not None:
            for tenant in stepping:
                num_behind = (next_due - self.due[tenant]) // (tenant.step_ns * self.scales[tenant])
                steps[tenant] = min(steps[tenant], max(0, num_behind) + 2)
        return [steps.get(tenant, 0) for tenant in active]

    def places(self, active: Sequence[Tenant], durations_ns: Sequence[Sequence[int]], now_ns: int) -> Iterator[int]:
        """Yield the places in `active` of the models that have the next turns, for steps of these durations."""
        due = [self.due[tenant] for tenant in active]
        last_turn = [self._last_turn[tenant] for tenant in active]
        scales = [self.scales[tenant] for tenant in active]
        steps = [0] * len(active)
        turn, unit, now = self._num_turns, self.unit, now_ns * self.unit
        while len(active) == 1:
            yield 0
        while True:
            first = min(due)
            place = due.index(first) if first <= now else last_turn.index(min(last_turn))
            yield place
            duration_ns = durations_ns[place][steps[place]]
            steps[place] += 1
            since = due[place]
            due[place] = (since if since < now else now) + duration_ns * scales[place]
            now += duration_ns * unit
            last_turn[place] = turn
            turn += 1

    def leap(self, tenant: Tenant, starts_ns: Sequence[int], durations_ns: Sequence[int]) -> None:
        """Count turns of `tenant` among many executed at once. Models are counted in the order of their last turns."""
        due, scale, unit = self.due[tenant], self.scales[tenant], self.unit
        for start_ns, duration_ns in zip(starts_ns, durations_ns, strict=True):
            start = start_ns * unit
            due = (due if due < start else start) + duration_ns * scale
        self.due[tenant] = due
        self.pass_turn(tenant, starts_ns[-1])
        tenant.step_ns = max(1, durations_ns[-1])


def _scales(tenants: Sequence[Tenant]) -> tuple[int, dict[Tenant, int]]:
    """Return a whole number, and that number divided by each share, also whole."""
    unit = lcm(*(tenant.share.numerator for tenant in tenants))
    return unit, {tenant: int(Fraction(unit) / tenant.share) for tenant in tenants}

"""Models on one device: the engine of each, whether it could step in its next turn, and the order of turns.

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

from array import array
from collections.abc import Sequence
from fractions import Fraction
from math import lcm

from kvarts.core.engine import Engine
from kvarts.core.events import Blocked, LeapDone, Turns
from kvarts.core.executor import VirtualExecutor
from kvarts.core.request import Request
from kvarts.core.sched.policy import NEVER_NS
from kvarts.sim.sharing.device import SharedDevice
from kvarts.sim.sharing.memory import DevicePart

__all__ = ["Tenant", "TurnOrder"]

DEAD = "its model is dead"
"""Why a request is refused whose model is dead."""


class Tenant:
    """One model of `device`, registered as `name`: its engine, behind a router if there are several devices.

    `share`: its part of the time of the device.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        executor: VirtualExecutor,
        device: SharedDevice,
        part: DevicePart,
        *,
        share: Fraction = Fraction(1),
    ) -> None:
        self.name = name
        self.engine = engine
        self.config = engine.config
        self.scheduler = engine.scheduler
        self.tiers = engine.tiers
        self.is_fresh = False
        """Whether a step, an arrival or the end of a transfer has happened since its tiers were last checked."""
        self._decode_ns = executor.decode_ns
        self.part = part
        self.cache = part.cache
        self._device = device
        self.share = share
        part.token_budget = engine.config.max_num_batched_tokens
        self.settled = array("q")
        """Releases of pages outside steps: the previous step, the time, and the pages still used."""
        self.step_ns = 10_000_000
        """Duration of its last step; before that, a guess."""

    def submit(self, request: Request, now_ns: int) -> str | None:
        """Queue `request` at `now_ns`; or return the reason why it can never run."""
        if self._device.health(self.name) == "dead":
            self.refuse(request, DEAD, now_ns)
            return DEAD
        reason = self.engine.submit(request, now_ns)
        if reason is None:
            self.is_fresh = True
        return reason

    def refuse(self, request: Request, reason: str, now_ns: int) -> None:
        """Emit the event that `request` was refused at `now_ns` before it was queued, for `reason`."""
        self.engine.refuse(request, reason, now_ns)

    def cancel(self, request: Request, now_ns: int) -> None:
        """Drop `request` at `now_ns`, between turns; models that wait for memory try again."""
        num_released = self.cache.num_released
        self.reach(now_ns)
        self.engine.cancel(request)
        self.is_fresh = True
        self._device.forget(self.name, request.index)
        if self.cache.num_released != num_released:
            self.settle(now_ns)
        self._device.retry_blocked()

    def reach(self, now_ns: int) -> None:
        """Let its engine reach `now_ns`, between turns: what is dropped then is dropped at that time."""
        self.engine.now_ns = max(self.engine.now_ns, now_ns)

    def settle(self, now_ns: int) -> None:
        """Record a release of pages at `now_ns`, between two steps."""
        self.settled.extend((self.scheduler.wheel.step - 1, now_ns, self.cache.num_used))

    @property
    def is_stalled(self) -> bool:
        """Whether a step could compute nothing until pages are released, a load ends, or admission is resumed."""
        scheduler = self.scheduler
        if scheduler.running.num_running or (self.tiers is not None and self._has_loaded):
            return False
        can_admit = scheduler.waiting.num_waiting and not scheduler.pages.is_draining
        # If no request runs, all places are taken by requests that wait for loads.
        return not (can_admit and scheduler.blocked is not Blocked.PAGES and scheduler.blocked is not Blocked.SEQS)

    @property
    def _has_loaded(self) -> bool:
        """Whether the load of a request has ended that does not run yet."""
        loads = self.scheduler.loads
        return loads is not None and bool(loads.loaded or loads.fronts or loads.has_ended or loads.tiers.has_loaded)

    @property
    def wants_tokens(self) -> bool:
        """Whether it could compute more than one token per decode."""
        scheduler = self.scheduler
        if scheduler.running.chunked or (self.tiers is not None and self._has_loaded):
            return True
        can_admit = scheduler.waiting.num_waiting and not scheduler.pages.is_draining
        return bool(can_admit) and scheduler.blocked in (Blocked.NOT, Blocked.BUDGET)

    def store(self, now_ns: int) -> None:
        """Begin the stores that are due at `now_ns`, between turns. There must be tiers."""
        loads = self.scheduler.loads
        assert loads is not None
        loads.take_ended()
        loads.tiers.begin_step(now_ns)
        loads.tiers.plan_stores(now_ns)

    def decode_ns(self, num_steps: int) -> list[int]:
        """Return the durations of the next `num_steps` steps if they are identical."""
        wheel, pool_tokens = self.scheduler.wheel, self.engine.config.pool_tokens
        return self._decode_ns(wheel.num_decoding, wheel.known_tokens, pool_tokens, num_steps)

    def leap(self, durations_ns: list[int], pages_taken: list[int], turns: Turns) -> None:
        """Start identical steps, each in its own turn, whose pages were already taken. `end_leap` must follow."""
        engine, scheduler = self.engine, self.scheduler
        assert engine.log.emit_details is None, "what happens in many turns at once is not told in detail"
        scheduler.publish_taken(len(durations_ns))
        if engine.log.emit is not None:
            engine.log.emit(
                LeapDone(
                    scheduler.wheel.step,
                    turns.starts_ns[0],
                    durations_ns,
                    pages_taken,
                    scheduler.cache.num_used - sum(pages_taken),
                    turns.cached[0],
                    scheduler.cache.num_released,
                    scheduler.running.num_running,
                    scheduler.num_waiting,
                    scheduler.blocked,
                    turns=turns,
                    num_loading=0 if scheduler.loads is None else scheduler.loads.num_waiting,
                )
            )
        engine.now_ns = turns.starts_ns[-1] + durations_ns[-1]

    def end_leap(self, num_steps: int) -> list[Request]:
        """End the `num_steps` steps that `leap` started; return the requests that finished."""
        finished = self.scheduler.commit_leap(num_steps, self.engine.now_ns)
        self.engine.emit()
        return finished


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
        self.able: list[Tenant] = []
        """The models that could step when the last turn was given."""
        self._parts = {tenant: float(tenant.share) for tenant in tenants}

    def next(self, now_ns: int, tried: Sequence[Tenant] = ()) -> Tenant | None:
        """Return the model that has the next turn, of those that can step and are not in `tried`; None if none can."""
        device, could_step, due = self._device, self.able, self.due
        tenants = self._tenants
        able = [each for each in tenants if not each.is_stalled or device.may_preempt_for(each.name, now_ns)]
        if able != could_step:
            since = (self._since_ns if could_step else now_ns) * self.unit
            for tenant in able:
                if tenant not in could_step and due[tenant] < since:
                    due[tenant] = since
            self.able = able
        if tried:
            able = [tenant for tenant in able if tenant not in tried]
        if len(able) < 2:
            return able[0] if able else None
        first = min(able, key=due.__getitem__)
        if due[first] <= now_ns * self.unit:
            return first
        return min(able, key=self._last_turn.__getitem__)

    def rest(self) -> None:
        """Note that the device was idle: a model that gets work now is due now, not at the start of the last turn."""
        self.able = []

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
        stepping = [tenant for tenant, horizon in zip(active, horizons, strict=True) if horizon]
        shares = [self._parts[tenant] for tenant in stepping]
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

    def alone_until_ns(self, tenant: Tenant, now_ns: int) -> int:
        """Return the time before which all turns are those of `tenant`, which has the one at `now_ns` and can step on.

        Models that cannot step now have no turn. As long as `tenant` is due, and before the others, its due time grows
        by `scales[tenant]` per nanosecond of its turns, and the time, in the unit of due times, by `unit`.
        """
        scale, unit, now = self.scales[tenant], self.unit, now_ns * self.unit
        since = min(self.due[tenant], now)
        num_ns = NEVER_NS
        is_later = 0  # 1 if the other model follows `tenant`, which then wins a tie
        for other in self.able:
            if other is tenant:
                is_later = 1
            else:
                num_ns = min(num_ns, (self.due[other] - since - 1 + is_later) // scale, (now - since) // (scale - unit))
        return now_ns + num_ns + 1

    def turns(
        self,
        active: Sequence[Tenant],
        durations_ns: Sequence[Sequence[int]],
        horizons: Sequence[int],
        now_ns: int,
        until_ns: int,
    ) -> tuple[list[int], list[list[int]], int]:
        """Return the turns of `active` that begin from `now_ns` on and before `until_ns`, for steps of these durations.

        They end with the first step at its horizon, or before the turn of a model without more steps. Return for each
        turn the place of its model in `active`, for each model the starts of its steps, and the end of the last turn.
        """
        due = [self.due[tenant] for tenant in active]
        last_turn = [self._last_turn[tenant] for tenant in active]
        scales = [self.scales[tenant] for tenant in active]
        places: list[int] = []
        starts_ns: list[list[int]] = [[] for _ in active]
        turn, unit = self._num_turns, self.unit
        while now_ns < until_ns:
            now = now_ns * unit
            since = min(due)
            place = due.index(since) if since <= now else last_turn.index(min(last_turn))
            of_place = starts_ns[place]
            step = len(of_place)
            if step == len(durations_ns[place]):
                break
            since = due[place]
            duration_ns = durations_ns[place][step]
            places.append(place)
            of_place.append(now_ns)
            due[place] = (since if since < now else now) + duration_ns * scales[place]
            last_turn[place] = turn
            turn += 1
            now_ns += duration_ns
            if step + 1 == horizons[place]:
                break
        return places, starts_ns, now_ns

    def leap_alone(self, tenant: Tenant, start_ns: int, end_ns: int, last_ns: int) -> None:
        """Do what `leap` does, for turns from `start_ns` to `end_ns` without another model's; the last takes `last_ns`.

        Where each turn begins at the end of the one before, the due time never falls behind it again once it is ahead:
        no share is above 1.
        """
        scale, last_start_ns = self.scales[tenant], end_ns - last_ns
        self.due[tenant] = min(
            self.due[tenant] + (end_ns - start_ns) * scale,
            last_start_ns * self.unit + last_ns * scale,
        )
        self.pass_turn(tenant, last_start_ns)
        tenant.step_ns = max(1, last_ns)

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

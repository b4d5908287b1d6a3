"""The loop of a replay of several models on one device: one clock, turns in order, one step at a time.

Models take turns in the order in which they were registered; a round is a turn of each. A turn is one step, within the
model's token budget. Budgets are divided when a model has prompt tokens to compute, at most once a round, among the
models that have work: a model that only decodes counts with the tokens of its decodes, a model with prompts with all
that it may have. If all models only decode, each has what it needs. A budget that is too small for all decodes of its
model is saved until it is not: a step decodes all or none.

At any time, in this order: a step that ends now is finished, requests that arrive now are queued, transfers that are
due are ended, and the next model in turn starts a step. What a step completed is stored below its model at its end,
since others may evict it before the model's next turn. If no model can step, time goes on to the next arrival or the
end of the next transfer. If all running requests only decode, and no model has tiers, `_leap` does many turns at once;
its records are the same as if the turns had been done one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvarts.events import Blocked, Turns
from kvarts.report.requests import FAILED
from kvarts.request import Request
from kvarts.sched.loads import LowerTiers
from kvarts.sched.policy import NEVER_NS
from kvarts.sharing.device import SharedDevice
from kvarts.sharing.health import HealthChange
from kvarts.sharing.tenant import Stride, Tenant
from kvarts.traffic.trace import TraceRequest

__all__ = ["HealthChange", "TurnLoop"]

NS_PER_S = 1e9


class TurnLoop:
    """Runs one replay. `device` has the models registered by the names of `tenants`.

    `changes`: of health. `on_progress`, if given, is called with the number of further requests that have ended.
    """

    def __init__(
        self,
        device: SharedDevice,
        tenants: Sequence[Tenant],
        *,
        step_by_step: bool = False,
        audit: bool = False,
        changes: Sequence[HealthChange] = (),
        on_progress: Callable[[int], object] | None = None,
    ) -> None:
        self._device = device
        self._tenants = list(tenants)
        self._with_tiers = [(tenant, tenant.tiers) for tenant in tenants if tenant.tiers is not None]
        # With tiers, what one model takes may have to be stored by another first: exactness comes before speed.
        self._leaps = not step_by_step and not self._with_tiers
        self._audit = audit
        self._changes = sorted(changes, key=lambda change: change.time_ns)
        for change in self._changes:
            device.health(change.model)  # raises now for an unknown model, not in the middle of the replay
        self._on_progress = on_progress
        self._now_ns = 0
        self._place = 0
        """The index of the model that has the next turn."""
        self._granted: dict[str, int] | None = None
        """The budgets of this round; None if they were not divided."""
        self._num_working = 0
        """How many models had work when budgets were divided in this round."""
        self._num_spent = 0
        """Tokens computed in this round since budgets were divided."""
        self._contestants: list[Tenant] = []
        """The models that could have computed more than their budgets in this round, if there are several."""
        self._arrival_ns = NEVER_NS
        self._arriving = self._tenants[0]
        self._look_ahead()
        self._last_round_ns = 10_000_000  # a first guess; decides how many durations to ask for

    def run(self) -> None:
        """Run until every request has ended."""
        while True:
            while self._changes and self._changes[0].time_ns <= self._now_ns:
                self._change(self._changes.pop(0))
            if self._arrival_ns <= self._now_ns:
                self._arrivals(self._now_ns)
            for below in self._with_tiers:
                self._look_below(*below)
            tenant = self._next()
            if tenant is None:
                next_ns = self._next_ns()
                if next_ns == NEVER_NS:
                    break
                self._now_ns = max(self._now_ns, next_ns)
                self._begin_round()
            elif not (self._leaps and self._leap()):
                self._turn(tenant)
        while any(tenant.rows for tenant in self._tenants):
            for tenant in self._tenants:
                assert not tenant.rows or self._device.health(tenant.name) == "degraded", (
                    "L8: the replay ended with requests left over"
                )
                for request in list(tenant.scheduler.waiting):
                    tenant.engine.cancel(request)
                    self._fail(tenant, request, "its model was degraded, and admitted nobody until the end")
            self._arrivals(NEVER_NS - 1)
        for tenant in self._tenants:
            tenant.engine.log.flush()
        self._device.check()

    # Arrivals and health ----------------------------------------------------------------------------------

    def _next_ns(self) -> int:
        """Return when the next request arrives, the next transfer ends, or the health of a model changes."""
        next_ns = self._arrival_ns
        if self._changes and self._changes[0].time_ns < next_ns:
            next_ns = self._changes[0].time_ns
        for _, tiers in self._with_tiers:
            if tiers.next_ns < next_ns:
                next_ns = tiers.next_ns
        return next_ns

    def _look_ahead(self) -> None:
        """Find the tenant with the next arrival, after sources have changed."""
        self._arrival_ns = NEVER_NS
        for tenant in self._tenants:
            time_ns = tenant.source.next_ns()
            if time_ns is not None and time_ns < self._arrival_ns:
                self._arrival_ns = time_ns
                self._arriving = tenant

    def _arrivals(self, until_ns: int) -> None:
        """Submit requests that arrive up to `until_ns`, in order of time, then of models."""
        while self._arrival_ns <= until_ns:
            tenant, now_ns = self._arriving, self._arrival_ns
            row = tenant.source.pop()
            self._look_ahead()
            self._arrive(tenant, row, now_ns)

    def _arrive(self, tenant: Tenant, row: TraceRequest, now_ns: int) -> None:
        index = tenant.num_arrived
        tenant.num_arrived += 1
        request = Request(
            index,
            tenant.trace.content(
                row, page_size=tenant.engine.config.page_size, owner=index, know_output=tenant.knows_output
            ),
            num_prompt_tokens=row.num_prompt_tokens,
            max_tokens=row.num_output_tokens,
            arrival_ns=now_ns,
            priority=row.priority + tenant.priority,
            request_id=row.request_id or str(row.row),
        )
        reason: str | None
        if self._device.health(tenant.name) == "dead":
            reason = "its model is dead"
        else:
            reason = tenant.engine.submit(request, now_ns)
        if reason is None:
            tenant.rows[index] = row
            tenant.is_fresh = True
        else:
            tenant.log.reject(request, row, 0, reason)
            self._done(tenant, row, now_ns)
            self._tell(1)

    def _change(self, change: HealthChange) -> None:
        tenant = next(tenant for tenant in self._tenants if tenant.name == change.model)
        ended = self._device.set_health(change.model, change.health)
        tenant.is_fresh = True
        for request in ended:
            self._fail(tenant, request, f"its model died at {change.time_ns / NS_PER_S:g} s")

    def _fail(self, tenant: Tenant, request: Request, reason: str) -> None:
        row = tenant.rows.pop(request.index)
        tenant.log.reject(request, row, 0, reason, FAILED)
        self._done(tenant, row, max(self._now_ns, request.arrival_ns))
        self._tell(1)

    def _end(self, tenant: Tenant, finished: Sequence[Request]) -> None:
        for request in finished:
            row = tenant.rows.pop(request.index)
            tenant.log.end(request, row, 0)
            self._done(tenant, row, request.last_token_ns)
        if finished:
            self._tell(len(finished))

    def _done(self, tenant: Tenant, row: TraceRequest, now_ns: int) -> None:
        tenant.source.done(row, now_ns)
        if tenant.source.is_reactive:
            self._look_ahead()

    def _tell(self, num_ended: int) -> None:
        if self._on_progress is not None:
            self._on_progress(num_ended)

    # Turns ------------------------------------------------------------------------------------------------

    def _can_step(self, tenant: Tenant) -> bool:
        return not tenant.is_stalled or self._device.may_make_way(tenant.name, self._now_ns)

    def _next(self) -> Tenant | None:
        """Return the model that has the next turn, of those that can step; a round ends with its last model."""
        tenants = self._tenants
        for _ in tenants:
            if self._place == len(tenants):
                self._begin_round()
            tenant = tenants[self._place]
            if self._can_step(tenant):
                return tenant
            self._place += 1
        return None

    def _begin_round(self) -> None:
        self._place = 0
        self._granted = None
        self._contestants = []

    def _turn(self, tenant: Tenant) -> None:
        """Do one step of `tenant`, if its budget allows one."""
        self._place += 1
        scheduler = tenant.scheduler
        budget = self._budget(tenant)
        if budget < max(1, scheduler.wheel.num_decoding):
            tenant.saved = budget
            return
        tenant.saved = 0
        scheduler.pages.token_budget = min(budget, tenant.engine.config.max_num_batched_tokens)
        tenant.part.refresh()
        num_released = tenant.cache.num_released
        engine = tenant.engine
        engine.now_ns = self._now_ns
        is_step = engine.begin(self._now_ns)
        end_ns = engine.now_ns
        if self._arrival_ns < end_ns:
            self._arrivals(end_ns - 1)
        finished: list[Request] = []
        if is_step:
            finished = engine.end()
        else:
            engine.emit()
        self._now_ns = end_ns
        self._end(tenant, finished)
        self._device.end_turn(tenant.name, has_released=tenant.cache.num_released != num_released)
        if is_step:
            num_tokens = tenant.engine.plan.batch.num_tokens
            self._num_spent += num_tokens
            if tenant in self._contestants:
                self._account(tenant, num_tokens)
        if tenant.tiers is not None:
            tenant.is_fresh = is_step
            self._end_transfers(tenant, tenant.tiers)
            if tenant.tiers.is_due:
                tenant.store(end_ns)
        if self._audit:
            self._device.check()

    def _account(self, tenant: Tenant, num_tokens: int) -> None:
        """Count tokens of a contested round for `tenant`, and as shares for all models that contended for them."""
        tenant.contested_tokens += num_tokens
        total = sum(other.weight for other in self._contestants)
        for other in self._contestants:
            other.contested_share += num_tokens * other.weight / total

    # Tiers ------------------------------------------------------------------------------------------------

    def _look_below(self, tenant: Tenant, tiers: LowerTiers) -> None:
        """End what is due below `tenant`; if it cannot step, begin what is to be stored, in place of its next step."""
        engine = tenant.engine
        self._end_transfers(tenant, tiers)
        if tenant.is_fresh and tenant.is_stalled:
            tenant.is_fresh = False
            if engine.has_work:
                tenant.store(self._now_ns)
            engine.now_ns = self._now_ns
            engine.emit()

    def _end_transfers(self, tenant: Tenant, tiers: LowerTiers) -> None:
        num_released = tenant.cache.num_released
        if not tiers.advance_to(self._now_ns):
            return
        tenant.is_fresh = True
        tenant.scheduler.blocked = Blocked.NOT
        if tenant.cache.num_released != num_released:
            self._device.retry_blocked(but=tenant.name)

    # Budgets ----------------------------------------------------------------------------------------------

    def _budget(self, tenant: Tenant) -> int:
        """Return the tokens that `tenant` may compute in its turn."""
        budgets = self._device.budgets
        if self._granted is None:
            working = [other for other in self._tenants if self._can_step(other)]
            if self._only_decode(working):
                return budgets.total
            self._granted = self._divide(working)
            self._num_working = len(working)
            self._num_spent = 0
        granted = self._granted.get(tenant.name)
        if granted is None:
            # It had no work when budgets were divided: it may have what no model has used or may still use.
            self._num_working += 1
            to_come = self._tenants[self._place :]
            granted = budgets.total - self._num_spent - sum(self._granted.get(other.name, 0) for other in to_come)
            granted = max(0, min(granted, budgets.ceiling_for(tenant.name, self._num_working)))
        return granted + tenant.saved

    def _only_decode(self, working: Sequence[Tenant]) -> bool:
        """Return whether each model needs a token for each decode only, and all of them together fit in the round."""
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
        contestants = []
        for tenant in working:
            demands[tenant.name] = tenant.scheduler.wheel.num_decoding
            if tenant.wants_tokens:
                demands[tenant.name] = None
                contestants.append(tenant)
        self._contestants = contestants if len(contestants) > 1 else []
        if self._device.is_static:
            return budgets.next_round()
        granted = budgets.next_round(demands)
        return {name: granted[name] for name in demands}

    # Many turns at once -----------------------------------------------------------------------------------

    def _leap(self) -> bool:
        """Do as many turns as are certain to be alike; return False if there are none.

        In these turns all running requests decode, and no request arrives or finishes before the last of them.
        """
        if self._granted is not None:
            return False
        for tenant in self._tenants:
            if tenant.wants_tokens:  # the most frequent reason, and the cheapest to find
                return False
        tenants, place = self._tenants, self._place
        active = [tenant for tenant in (*tenants[place:], *tenants[:place]) if not tenant.is_stalled]
        if not self._only_decode(active) or any(
            self._device.may_make_way(tenant.name, self._now_ns) for tenant in tenants
        ):
            return False
        num_active = len(active)
        num_turns = NEVER_NS
        for position, tenant in enumerate(active):
            tenant.part.refresh()
            tenant.scheduler.pages.token_budget = self._device.budgets.total
            num_steps = tenant.scheduler.horizon(self._now_ns)
            if num_steps < 1:
                return False
            num_turns = min(num_turns, position + (num_steps - 1) * num_active + 1)
        until_ns = self._next_ns()
        for tenant in active:
            waiting = tenant.scheduler.waiting
            if waiting.num_waiting:
                until_ns = min(until_ns, waiting.holds_until_ns(self._now_ns))
        # Ask for no more durations than reach `until_ns`, estimated by the last round.
        num_wanted = (until_ns - self._now_ns) // self._last_round_ns + 2
        num_turns = min(num_turns, num_wanted * num_active)
        strides = [Stride(tenant, -(-(num_turns - position) // num_active)) for position, tenant in enumerate(active)]
        num_done = self._walk(strides[:num_turns], num_turns, until_ns)
        if num_done:
            self._commit(strides, (num_done - 1) % num_active)
        return num_done > 0

    def _walk(self, strides: Sequence[Stride], num_turns: int, until_ns: int) -> int:
        """Take the pages of up to `num_turns` turns that begin before `until_ns`; return how many turns had theirs.

        Pages are taken turn by turn, because the pages that one model takes may be evicted from another.
        """
        now_ns = self._now_ns
        num_strides = len(strides)
        # What is taken is no longer free. A model with memory of its own has its own count.
        free = [stride.tenant.part.memory.num_free_bytes for stride in strides]
        is_apart = self._device.is_static
        turn = 0
        while turn < num_turns and now_ns < until_ns:
            which = turn % num_strides
            stride = strides[which]
            cache = stride.cache
            page_bytes = stride.tenant.part.page_bytes
            place = turn // num_strides
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
                    free = [free[which] - num_bytes] * num_strides
            stride.starts_ns.append(now_ns)
            stride.withheld.append(stride.num_unused - num_free)
            stride.num_unused -= num_due
            stride.cached.append(cache.tree.num_cached)
            now_ns += stride.durations_ns[place]
            turn += 1
        self._last_round_ns = max(1, (now_ns - self._now_ns) * num_strides // max(1, turn))
        self._now_ns = now_ns
        return turn

    def _commit(self, strides: Sequence[Stride], last: int) -> None:
        # The last turn may finish requests, which the other models must not see before it ends.
        for stride in (*strides[last + 1 :], *strides[: last + 1]):
            num_steps = len(stride.starts_ns)
            if not num_steps:
                continue
            tenant = stride.tenant
            num_released = tenant.cache.num_released
            turns = Turns(stride.starts_ns, stride.cached, stride.withheld)
            tenant.leap(stride.durations_ns[:num_steps], stride.due[:num_steps], turns)
            tenant.saved = 0
            if stride is strides[last]:
                self._arrivals(self._now_ns - 1)
            self._end(tenant, tenant.end_leap(num_steps))
            self._device.end_turn(tenant.name, has_released=tenant.cache.num_released != num_released)
        self._place = self._tenants.index(strides[last].tenant) + 1
        if self._audit:
            self._device.check()

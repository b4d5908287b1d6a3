"""One device and the models that share it: compute by token budgets, memory by guarantees and loans, and health.

There is one scale of priorities, for requests of all models: larger is more important.

Free memory, empty or cached, may be taken by whoever has something to run. What is short comes from running work of
strictly lower priority, of models that use more than their guarantee. A model that stays within its own guarantee takes
it for whomever it runs or admits; beyond it, only for what runs already. No model ever loses running work to another
while it is within its guarantee, and among equals nobody does: that would cost more in work done again than it gains.

Who waits for memory *claims* it: nobody who claimed later is admitted beyond a guarantee to what would be left of it.
So between equals a loan comes back as the borrower's requests end, and borrowers cannot keep each other out for ever;
nor can guarantees alone, since a request that has no room beside those of the others is refused.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvarts.errors import ConfigError
from kvarts.event_log import Tell
from kvarts.events import Blocked
from kvarts.request import Request
from kvarts.sched.scheduler import Scheduler
from kvarts.sharing.budget import TokenBudgets
from kvarts.sharing.donors import cheapest, victims_of
from kvarts.sharing.health import Health
from kvarts.sharing.loans import Loan, debts
from kvarts.sharing.memory import DeviceMemory
from kvarts.sharing.part import DevicePart, open_part

__all__ = ["Donation", "Health", "SharedDevice"]


class Donation(msgspec.Struct, frozen=True):
    """The answer to a request for pages. `is_granted`: so many can be taken now.

    If not, `num_pages_short` are missing, and nobody was preempted. `victims`: who was, as model and request index;
    `lost_tokens` computed tokens were lost.
    """

    is_granted: bool
    num_pages_short: int = 0
    victims: tuple[tuple[str, int], ...] = ()
    lost_tokens: int = 0


class _Member(msgspec.Struct):
    part: DevicePart
    scheduler: Scheduler | None = None
    cancel: Callable[[Request], object] | None = None
    health: Health = "healthy"
    claimant: int = -1
    """The index of the request that claims pages, or -1."""
    num_reclaimed: int = 0
    """Its requests that were preempted for other models."""


class SharedDevice:
    """Owner of the memory, the budgets, and of who is preempted for whom.

    `num_bytes`: KV memory of the device. `max_num_batched_tokens`: tokens a round. `is_static`: for comparison,
    nothing is lent: every model has its guarantee and no more, and its part of the tokens by weight. Raises ConfigError
    for a value out of range, and for a model that is not there.
    """

    def __init__(self, num_bytes: int, *, max_num_batched_tokens: int, is_static: bool = False) -> None:
        self.memory = DeviceMemory(num_bytes)
        self.is_static = is_static
        self.budgets = TokenBudgets(max_num_batched_tokens)
        self._members: dict[str, _Member] = {}
        self._since_ns: dict[tuple[str, str], int] = {}

    # Models come and go -----------------------------------------------------------------------------------

    def register(
        self,
        model: str,
        *,
        page_bytes: int,
        weight: float = 1.0,
        guaranteed_bytes: int = 0,
        floor: int = 0,
        ceiling: int | None = None,
        tell: Tell | None = None,
    ) -> DevicePart:
        """Add `model`; return its part of the device, for the scheduler that `attach` then brings.

        A model that is there gets the new weight, and keeps everything else.

        `weight`, `floor` and `ceiling`: see TokenBudgets. `guaranteed_bytes`: what it can always have back.
        `tell` receives what happens to its pages.
        """
        self.budgets.register(model, weight, floor=floor, ceiling=ceiling)
        member = self._members.get(model)
        if member is None:
            try:
                memory = DeviceMemory(guaranteed_bytes) if self.is_static else self.memory
                part = open_part(
                    model, memory, self, page_bytes=page_bytes, guaranteed_bytes=guaranteed_bytes, tell=tell
                )
            except ConfigError:
                self.budgets.deregister(model)
                raise
            member = self._members[model] = _Member(part)
        return member.part

    def attach(self, model: str, scheduler: Scheduler, cancel: Callable[[Request], object] | None = None) -> None:
        """`scheduler`, made with the part of `model`, is the one of `model`. `cancel`: how to, if an engine wants to
        know."""
        member = self._member(model)
        assert scheduler.cache is member.part.cache, f"{model} has another cache"
        member.scheduler = scheduler
        member.cancel = cancel or scheduler.cancel

    def deregister(self, model: str) -> list[Request]:
        """Takes `model` out, with everything it holds; returns its requests, which are cancelled."""
        requests = self._cancel_all(self._member(model))
        part = self._members.pop(model).part
        part.memory.remove(part)
        self.budgets.deregister(model)
        self._somebody_released()
        return requests

    # Turns ------------------------------------------------------------------------------------------------

    def end_turn(self, model: str, *, has_released: bool) -> None:
        """After a step of `model`, before which its cache was refreshed.

        `has_released`: something went out of use, for which others may have waited.
        """
        self._claim(self._members[model])
        if has_released:
            self._somebody_released(but=model)

    def _claim(self, member: _Member) -> None:
        """What the head of its queue waits for."""
        scheduler = member.scheduler
        num_pages, head = 0, -1
        if scheduler is not None and scheduler.blocked is Blocked.PAGES and scheduler.waiting.num_waiting:
            assert scheduler.blocked_head is not None
            num_pages, head = scheduler.num_pages_wanted, scheduler.blocked_head.index
        is_new, member.claimant = head != member.claimant, head
        if member.part.make_claim(num_pages, is_new=is_new):
            self._somebody_released(but=member.part.name)

    def _somebody_released(self, but: str = "") -> None:
        for model, member in self._members.items():
            scheduler = member.scheduler
            if model != but and scheduler is not None and scheduler.blocked is Blocked.PAGES:
                scheduler.blocked = Blocked.NOT

    # Pages ------------------------------------------------------------------------------------------------

    def request_pages(self, model: str, num_pages: int, priority: int, *, asker: int = -1) -> Donation:
        """Sees to it that `model` can take `num_pages` now for work of `priority`, and says at what cost.

        Free memory first: nobody is asked for what is empty or cached. What is short comes from running work of
        strictly lower priority of other models that use more than their guarantee: of all ways that are enough, one
        that loses the fewest computed tokens, over as many models as it takes. Who gives way loses pages; what of them
        is not short stays cached with its model. `asker`: the index of the request it is for. Raises ConfigError for a
        number of pages below 1.
        """
        if num_pages < 1:
            raise ConfigError(f"must be at least 1, got {num_pages}", field="num_pages")
        part = self._member(model).part
        part.refresh()
        if num_pages <= part.cache.num_free:
            return Donation(True)
        short_bytes = num_pages * part.page_bytes - part.memory.num_free_bytes
        donors: list[tuple[str, Scheduler]] = []
        choices, limits = [], []
        for name, member in self._members.items():
            loan = member.part.num_used_bytes - member.part.guaranteed_bytes
            if name == model or loan <= 0 or member.scheduler is None:  # never positive where nothing is lent
                continue
            victims = victims_of(
                member.scheduler,
                below_priority=priority,
                page_bytes=member.part.page_bytes,
                enough_bytes=min(loan, short_bytes),
            )
            if victims:
                donors.append((name, member.scheduler))
                choices.append(victims)
                limits.append(loan)
        counts = cheapest(choices, limits, short_bytes)
        if counts is None:
            return Donation(False, num_pages - part.cache.num_free)
        gone: list[tuple[str, int]] = []
        lost_tokens = 0
        for (name, scheduler), count, choice in zip(donors, counts, choices, strict=True):
            if count:
                member = self._members[name]
                pages = -(-short_bytes // member.part.page_bytes)
                victims_gone = scheduler.preemptor.give_way(count, model, asker, pages)
                scheduler.blocked = Blocked.NOT
                gone += [(name, victim.index) for victim in victims_gone]
                lost_tokens += choice[count - 1].lost_tokens
                member.num_reclaimed += count
        part.refresh()
        assert num_pages <= part.cache.num_free, f"{num_pages} pages were asked for, {part.cache.num_free} came"
        self._somebody_released(but=model)
        return Donation(True, 0, tuple(gone), lost_tokens)

    def make_way(self, model: str, request: Request, num_pages: int, *, to_admit: bool) -> bool:
        """Ask other models for pages until `num_pages` can be taken for `request` of `model`; whether they can."""
        member = self._members[model]
        is_within = member.part.is_within(num_pages)
        if (to_admit and not is_within) or not self._has_donors(member, request.priority):
            return False
        return self.request_pages(model, num_pages, request.priority, asker=request.index).is_granted

    def may_make_way(self, model: str, now_ns: int) -> bool:
        """Whether others may give way to the head of `model`, which waits for pages that it is entitled to, as soon as
        they have enough. What they have grows while they decode."""
        member = self._members[model]
        if not member.part.claimed_bytes or member.scheduler is None:
            return False
        if not member.part.is_within(member.scheduler.num_pages_wanted):
            return False
        return self._has_donors(member, member.scheduler.waiting.head(now_ns).priority)

    def _has_donors(self, member: _Member, below_priority: int) -> bool:
        """Whether somebody else uses more than its guarantee and has running work `below_priority`."""
        return any(
            other.scheduler is not None
            and other.scheduler.running.num_running
            and other.scheduler.running.victim().priority < below_priority
            and other.part.num_used_bytes > other.part.guaranteed_bytes
            for other in self._members.values()
            if other is not member
        )

    def num_reclaimed(self, model: str) -> int:
        """How many requests of `model` were preempted for other models."""
        return self._member(model).num_reclaimed

    def loans(self, now_ns: int) -> list[Loan]:
        """Who owes whom now. `since_ns`: when `loans` was first asked and told of it, and told so ever since."""
        parts = self.memory.parts  # none, where each has memory of its own
        found = debts(
            self.memory.num_bytes,
            {model: part.guaranteed_bytes for model, part in parts.items()},
            {model: part.num_used_bytes for model, part in parts.items()},
        )
        self._since_ns = {pair: self._since_ns.get(pair, now_ns) for pair in found}
        return [Loan(*pair, num_bytes, self._since_ns[pair]) for pair, num_bytes in found.items()]

    # Health -----------------------------------------------------------------------------------------------

    def health(self, model: str) -> Health:
        """Of `model`."""
        return self._member(model).health

    def set_health(self, model: str, health: Health) -> list[Request]:
        """A *degraded* model goes on with what runs and admits nobody; a *dead* one loses everything it holds.

        Returns the requests that end by it, those that ran first. A model may become healthy again.
        """
        if health not in ("healthy", "degraded", "dead"):
            raise ConfigError(f"must be 'healthy', 'degraded' or 'dead', got {health!r}", field=f"{model}.health")
        member = self._member(model)
        member.health = health
        if member.scheduler is not None:
            member.part.is_draining = health != "healthy"
        member.part.make_claim(0, is_new=True)
        member.claimant = -1
        requests: list[Request] = []
        if health == "dead":
            requests = self._cancel_all(member)
            member.part.cache.shed(member.part.cache.num_cached)
        self._somebody_released()
        return requests

    def _cancel_all(self, member: _Member) -> list[Request]:
        scheduler = member.scheduler
        if scheduler is None or member.cancel is None:
            return []
        requests = [*scheduler.running, *scheduler.waiting]
        for request in requests:
            member.cancel(request)
        return requests

    # Laws -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Asserts laws L1 to L3 of every model, and L1 of the device, between steps."""
        for member in self._members.values():
            if member.scheduler is not None:
                member.scheduler.check()
        self.memory.check()
        if not any(part.cache.num_used for part in self.memory.parts.values()):
            assert not self.loans(0), "L2: nobody uses anything, and something is owed"

    def _member(self, model: str) -> _Member:
        member = self._members.get(model)
        if member is None:
            known = ", ".join(self._members) or "none"
            raise ConfigError("is not registered", field=model, hint=f"There are: {known}.")
        return member

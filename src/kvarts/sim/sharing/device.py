"""One device and the models that share it: memory by guarantees and loans, and health.

Requests of all models have one scale of priorities: larger is more important.

Guaranteed memory is kept free for its model on demand. A request that exceeds its own model's guarantee is admitted
only into memory that the other models do not want, as far as their guarantees reach, and only after requests of other
models that have waited longer for memory. Running requests may grow into all free memory.

If free memory is not enough, running requests of strictly lower priority are preempted, in models that exceed their
guarantee. A model within its guarantee preempts for requests that run or are to be admitted; beyond its guarantee, only
for requests that already run. Within its guarantee it also preempts requests of equal priority: at once for a running
request, which would otherwise be preempted itself, and for admission at once or after a set wait. A model within its
guarantee never loses running requests to another model. A request that does not fit next to the guarantees of the other
models is refused: it could wait for ever.

Only used memory counts as lent: cached pages are free, whichever model they belong to. A model owes its use beyond its
guarantee, minus its part of the memory that is not guaranteed to any model. Every model lends in proportion to the
unused part of its guarantee, and every borrower owes in proportion to its excess, in whole bytes.

Of the running requests that could be preempted, priority is weighed before cost: among all sufficient choices, one
that loses the least important work, that is, the fewest computed tokens of the highest priority, then of the next one,
and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from kvarts.base.errors import ConfigError
from kvarts.core.event_log import Emit
from kvarts.core.events import Blocked
from kvarts.core.kv.eviction import EvictionOrder, TreeWatcher
from kvarts.core.kv.group_pages import GroupPages
from kvarts.core.request import Request
from kvarts.core.sched.policy import NEVER_NS
from kvarts.core.sched.scheduler import Scheduler
from kvarts.sim.sharing.config import Health
from kvarts.sim.sharing.memory import DeviceMemory, DevicePart, open_grouped_part, open_part

__all__ = ["Health", "Loan", "SharedDevice", "Victims", "cheapest", "debts", "victims_of"]

Lost = tuple[tuple[int, int], ...]
"""Tokens and victims, the highest priority first."""


class Loan(msgspec.Struct, frozen=True):
    """`borrower` owes `lender` `num_bytes` now, and has owed some without interruption since `since_ns`."""

    lender: str
    borrower: str
    num_bytes: int
    since_ns: int


def debts(num_bytes: int, guaranteed: Mapping[str, int], used: Mapping[str, int]) -> dict[tuple[str, str], int]:
    """Return bytes owed by lender and borrower, without entries of 0.

    `num_bytes`: memory of the device. `guaranteed`, `used`: bytes by model. The sum is the use beyond guarantees,
    minus the memory that is not guaranteed to any model.
    """
    excess = {model: used[model] - part for model, part in guaranteed.items() if used[model] > part}
    unused = {model: part - used[model] for model, part in guaranteed.items() if used[model] < part}
    owed = sum(excess.values()) - (num_bytes - sum(guaranteed.values()))
    if owed <= 0:
        return {}
    total_excess, total_unused = sum(excess.values()), sum(unused.values())
    found: dict[tuple[str, str], int] = {}
    # A pair's part is the product of two shares. The parts are laid end to end and cut at whole bytes, so they add up
    # exactly.
    position, before = 0, 0
    for lender, lent in unused.items():
        for borrower, borrowed in excess.items():
            position += lent * borrowed
            after = owed * position // (total_excess * total_unused)
            if after > before:
                found[lender, borrower] = after - before
            before = after
    return found


class Victims(msgspec.Struct, frozen=True):
    """The memory that is freed by preempting the first `count` victims of a model, and the computed tokens lost.

    `lost`: these tokens, and the number of victims, by priority.
    """

    count: int
    num_bytes: int
    lost: dict[int, tuple[int, int]]

    @property
    def lost_tokens(self) -> int:
        """Computed tokens lost, whatever the priority."""
        return sum(num_tokens for num_tokens, _ in self.lost.values())


def victims_of(scheduler: Scheduler, *, below_priority: int, page_bytes: int, enough_bytes: int) -> list[Victims]:
    """Return an entry for each number of victims of `scheduler`, up to the number that frees `enough_bytes`.

    Victims are in the scheduler's own order and have a priority strictly `below_priority`. Pages that they share with
    others stay in use until those are preempted as well, and pages that a transfer holds until it has ended.
    """
    found: list[Victims] = []
    num_pages = 0
    lost: dict[int, tuple[int, int]] = {}
    requests = _in_order(scheduler, below_priority)
    for count, (request, num_freed) in enumerate(zip(requests, _freed_by(scheduler, requests), strict=True), 1):
        num_pages += num_freed
        num_tokens, num_victims = lost.get(request.priority, (0, 0))
        num_tokens += scheduler.running.num_computed(request)
        lost = {**lost, request.priority: (num_tokens, num_victims + 1)}
        found.append(Victims(count, num_pages * page_bytes, lost))
        if found[-1].num_bytes >= enough_bytes:
            break
    return found


def _freed_by(scheduler: Scheduler, requests: Sequence[Request]) -> Iterator[int]:
    """Return the pages that each of `requests` frees if the earlier ones have ended."""
    running = scheduler.running
    return scheduler.cache.needs.freed_by((request.table, running.num_pages_of(request)) for request in requests)


def _in_order(scheduler: Scheduler, below_priority: int) -> list[Request]:
    """Return running requests of lower priority, the lowest priority first, then the least senior."""
    less = [request for request in scheduler.running if request.priority < below_priority]
    return sorted(less, key=lambda request: (request.priority, -request.seniority))


def cheapest(choices: Sequence[Sequence[Victims]], limits: Sequence[int], num_bytes: int) -> list[int] | None:
    """Return the number of victims of each model that together free `num_bytes`, each model counted up to its limit.

    Among all sufficient choices, return one that loses the fewest tokens of the highest priority, then the fewest
    victims of that priority, then the same for the next priority, and so on; None if all are too small. Time and memory
    grow with the number of undominated combinations: few, as each model's victims have a fixed order.
    """
    priorities = sorted({priority for choice in choices if choice for priority in choice[-1].lost}, reverse=True)
    # (lost tokens and victims, bytes freed, counts by model): no entry is worse than another in both of the first two.
    ways: list[tuple[Lost, int, tuple[int, ...]]] = [(((0, 0),) * len(priorities), 0, ())]
    for choice, limit in zip(choices, limits, strict=True):
        longer = [(lost, freed, (*counts, 0)) for lost, freed, counts in ways]
        for victims in choice:
            more = [victims.lost.get(priority, (0, 0)) for priority in priorities]
            num_bytes_more = min(victims.num_bytes, limit)
            longer += [
                (
                    tuple([(of[0] + add[0], of[1] + add[1]) for of, add in zip(lost, more, strict=True)]),
                    min(num_bytes, freed + num_bytes_more),
                    (*counts, victims.count),
                )
                for lost, freed, counts in ways
            ]
        longer.sort(key=lambda way: (way[0], -way[1]))
        ways = []
        most = -1
        for way in longer:
            if way[1] > most:
                ways.append(way)
                most = way[1]
    _, freed, counts = ways[-1]
    return list(counts) if freed >= num_bytes else None


class Donation(msgspec.Struct, frozen=True):
    """The answer to a request for pages. `is_granted`: the pages can be taken now.

    If not, `num_pages_short` pages are missing, and no request was preempted. `victims`: the preempted requests, as
    model and request index; `lost_tokens`: their computed tokens.
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
    """The index of the request for which pages are claimed, or -1."""
    num_reclaimed: int = 0
    """The number of its requests that were preempted for other models."""
    since_ns: int = NEVER_NS
    """The start of its present wait for memory within its guarantee; NEVER_NS if it does not wait."""
    num_in_hand_bytes: int = 0
    """Bytes used and kept by it after its last turn."""

    def kept_bytes(self) -> int:
        """Return the free bytes that must stay available to it now: those that it wants, up to its guarantee.

        They include the rest of an admitted prompt, even beyond the guarantee.
        """
        scheduler = self.scheduler
        if scheduler is None or not (scheduler.running.chunked or scheduler.waiting.num_waiting):
            return 0
        part = self.part
        num_admitted = scheduler.num_pages_of_chunked()
        lent = part.guaranteed_bytes - part.num_used_bytes
        if lent <= num_admitted * part.page_bytes:
            return num_admitted * part.page_bytes
        wanted = (num_admitted + scheduler.num_pages_to_admit()) * part.page_bytes
        return min(lent, wanted)


class SharedDevice:
    """Owner of the memory of a device; decides which requests are preempted for other models.

    `num_bytes`: KV memory of the device. `is_static`: lend nothing, for comparison: every model has exactly its
    guarantee. `reclaim_after_ns`: wait of
    a model within its guarantee before it preempts other models' requests of equal priority. Raises ConfigError for a
    value out of range, and for a model that is not registered.
    """

    def __init__(
        self,
        num_bytes: int,
        *,
        is_static: bool = False,
        reclaim_after_ns: int = 0,
    ) -> None:
        self.memory = DeviceMemory(num_bytes)
        self.now_ns = 0
        """The time of the present turn, written by the loop of the device."""
        self._reclaim_after_ns = reclaim_after_ns
        self.is_static = is_static
        self._members: dict[str, _Member] = {}
        self._since_ns: dict[tuple[str, str], int] = {}

    # Registration -----------------------------------------------------------------------------------------

    def register(
        self,
        model: str,
        *,
        page_bytes: int = 0,
        parts: GroupPages | None = None,
        guaranteed_bytes: int = 0,
        with_page_ids: bool = False,
        order: EvictionOrder | None = None,
        watcher: TreeWatcher | None = None,
        emit: Emit | None = None,
    ) -> DevicePart:
        """Add `model` and return its part of the device, for the scheduler that is then passed to `attach`.

        `page_bytes`: bytes of its pages; or `parts`, the empty cache of a model with KV groups, as in
        `open_grouped_part`. `guaranteed_bytes`: memory that the model can always reclaim. `with_page_ids`, `order` and
        `watcher`: as in `open_part`. `emit` receives the events of its pages. Raise ConfigError for a model that is
        registered already.
        """
        if model in self._members:
            raise ConfigError("is there already", field=model)
        memory = DeviceMemory(guaranteed_bytes) if self.is_static else self.memory
        if parts is None:
            part = open_part(
                model,
                memory,
                self,
                page_bytes=page_bytes,
                guaranteed_bytes=guaranteed_bytes,
                with_page_ids=with_page_ids,
                order=order,
                watcher=watcher,
                emit=emit,
            )
        else:
            part = open_grouped_part(model, memory, self, parts, guaranteed_bytes=guaranteed_bytes)
        self._members[model] = _Member(part)
        return part

    def attach(self, model: str, scheduler: Scheduler, cancel: Callable[[Request], object] | None = None) -> None:
        """Set the scheduler of `model`, which must have the cache of the model's part.

        `cancel`: cancels a request; by default that of the scheduler.
        """
        member = self._member(model)
        assert scheduler.cache is member.part.cache, f"{model} has another cache"
        member.scheduler = scheduler
        member.cancel = cancel or scheduler.cancel

    # Turns ------------------------------------------------------------------------------------------------

    def end_turn(self, model: str, *, has_released: bool) -> None:
        """Update claims after a step of `model`, before which its part was refreshed.

        `has_released`: pages were released that other models may have waited for.
        """
        member = self._members[model]
        self._claim(member)
        num_before = member.num_in_hand_bytes
        member.num_in_hand_bytes = member.part.num_used_bytes + member.kept_bytes()
        if has_released or member.num_in_hand_bytes < num_before:
            self.retry_blocked(but=model)

    def _claim(self, member: _Member) -> None:
        """Claim the pages that the head of the queue of `member` waits for."""
        scheduler = member.scheduler
        if (
            member.claimant < 0
            and member.since_ns == NEVER_NS
            and (scheduler is None or scheduler.blocked is not Blocked.PAGES)
        ):
            return  # there is neither a claim nor one to drop
        num_pages, head = 0, -1
        if scheduler is not None and scheduler.blocked is Blocked.PAGES and scheduler.waiting.num_waiting:
            assert scheduler.blocked_head is not None
            num_pages, head = scheduler.num_pages_wanted, scheduler.blocked_head.index
        is_new, member.claimant = head != member.claimant, head
        if not num_pages or not member.part.is_within(num_pages):
            member.since_ns = NEVER_NS
        elif member.since_ns == NEVER_NS:
            member.since_ns = self.now_ns
        if member.part.make_claim(num_pages, is_new=is_new):
            self.retry_blocked(but=member.part.name)

    def reclaims_at_ns(self) -> int:
        """Return the next time at which a model may begin to reclaim memory; NEVER_NS without one."""
        if self._reclaim_after_ns in (0, NEVER_NS):
            return NEVER_NS
        times_ns = [member.since_ns + self._reclaim_after_ns for member in self._members.values()]
        return min((time_ns for time_ns in times_ns if self.now_ns < time_ns < NEVER_NS), default=NEVER_NS)

    def _below_to_admit(self, member: _Member, priority: int) -> int:
        """Return below which priority others are preempted for a request of `member` waiting within its guarantee."""
        after_ns = self._reclaim_after_ns
        return priority + (not after_ns or self.now_ns - member.since_ns >= after_ns)

    def _below_to_run(self, priority: int) -> int:
        """Return below which priority others are preempted for a request running within its model's guarantee."""
        return priority + (self._reclaim_after_ns < NEVER_NS)

    def kept_for_others(self, model: str) -> int:
        """Return the free bytes that a request of `model` beyond its guarantee must leave to the others."""
        if self.is_static:
            return 0
        asker = self._members[model].part
        num_bytes = 0
        for member in self._members.values():
            part = member.part
            if part is not asker:
                # Claims are served in the order in which they were made: two models cannot wait for each other.
                is_earlier = part.claimed_bytes and (not asker.claimed_bytes or part.claim < asker.claim)
                num_bytes += max(member.kept_bytes(), part.claimed_bytes if is_earlier else 0)
        return num_bytes

    def forget(self, model: str, request: int) -> None:
        """Drop the claim for `request` of `model`, which no longer waits."""
        member = self._member(model)
        if member.claimant == request:
            member.claimant = -1
            member.part.make_claim(0, is_new=True)

    def retry_blocked(self, but: str = "") -> None:
        """Let models that wait for pages try again, because pages were released."""
        for model, member in self._members.items():
            scheduler = member.scheduler
            if model != but and scheduler is not None and scheduler.blocked is Blocked.PAGES:
                scheduler.blocked = Blocked.NOT

    # Pages ------------------------------------------------------------------------------------------------

    def request_pages(self, model: str, num_pages: int, priority: int, *, asker: int = -1) -> Donation:
        """Make sure that `model` can take `num_pages` now for work of `priority`; return the cost.

        Free memory is used first, without preemption. The shortfall is taken from running requests of strictly lower
        priority, of other models that use more than their guarantee. Among all sufficient choices, take one that loses
        the least important work: the fewest computed tokens of the highest priority, then of the next, across as many
        models as needed. Pages of preempted requests beyond the shortfall stay cached with their model. `asker`: the
        index of the request that needs the pages. Raise ConfigError for a number of pages below 1.
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
            if name == model or loan <= 0 or member.scheduler is None:  # never positive if nothing is lent
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
        self.retry_blocked(but=model)
        return Donation(True, 0, tuple(gone), lost_tokens)

    def preempt_for(self, model: str, request: Request, num_pages: int, *, to_admit: bool) -> bool:
        """Preempt requests of other models until `num_pages` can be taken for `request` of `model`; return success."""
        member = self._members[model]
        below_priority = request.priority
        if member.part.is_within(num_pages):
            if to_admit:
                below_priority = self._below_to_admit(member, request.priority)
            else:
                below_priority = self._below_to_run(request.priority)
        elif to_admit:
            return False
        if not self._has_donors(member, below_priority):
            return False
        return self.request_pages(model, num_pages, below_priority, asker=request.index).is_granted

    def may_preempt_for(self, model: str, now_ns: int) -> bool:
        """Return whether other models may be preempted for the head of `model` once they use enough pages.

        The head waits for pages that it is entitled to. The others' use grows while they decode.
        """
        member = self._members[model]
        if not member.part.claimed_bytes or member.scheduler is None:
            return False
        if not member.part.is_within(member.scheduler.num_pages_wanted):
            return False
        priority = member.scheduler.waiting.head(now_ns).priority
        return self._has_donors(member, self._below_to_admit(member, priority))

    def _has_donors(self, member: _Member, below_priority: int) -> bool:
        """Return whether another model uses more than its guarantee and runs a request `below_priority`."""
        return any(
            other.scheduler is not None
            and other.scheduler.running.num_running
            and other.scheduler.running.victim().priority < below_priority
            and other.part.num_used_bytes > other.part.guaranteed_bytes
            for other in self._members.values()
            if other is not member
        )

    def num_reclaimed(self, model: str) -> int:
        """Return how many requests of `model` were preempted for other models."""
        return self._member(model).num_reclaimed

    def loans(self, now_ns: int) -> list[Loan]:
        """Return the present loans.

        `since_ns` is the time of the first of all consecutive calls that found the loan.
        """
        parts = self.memory.parts  # empty if each model has separate memory
        found = debts(
            self.memory.num_bytes,
            {model: part.guaranteed_bytes for model, part in parts.items()},
            {model: part.cache.num_used * part.page_bytes for model, part in parts.items()},
        )
        self._since_ns = {pair: self._since_ns.get(pair, now_ns) for pair in found}
        return [Loan(*pair, num_bytes, self._since_ns[pair]) for pair, num_bytes in found.items()]

    # Health -----------------------------------------------------------------------------------------------

    def health(self, model: str) -> Health:
        """Return the health of `model`."""
        return self._member(model).health

    def set_health(self, model: str, health: Health) -> list[Request]:
        """Set the health of `model`; return the requests that end because of it, running ones first.

        A *degraded* model continues running requests, and those that wait for a load, and admits no others; a *dead*
        one loses its requests and pages, including those in lower tiers. Running transfers end as they would have. A
        model may become healthy again.
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
            member.part.cache.evict(member.part.cache.num_cached)
            if member.scheduler is not None and member.scheduler.tiers is not None:
                member.scheduler.tiers.reset()
        self.retry_blocked()
        return requests

    def _cancel_all(self, member: _Member) -> list[Request]:
        scheduler = member.scheduler
        if scheduler is None or member.cancel is None:
            return []
        requests = [*scheduler.running, *(scheduler.loads or ()), *scheduler.waiting]
        for request in requests:
            member.cancel(request)
        return requests

    # Laws -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert laws L1 to L3 of every model, and L1 of the device, between steps."""
        for member in self._members.values():
            if member.scheduler is not None:
                member.scheduler.check()
        self.memory.check()
        if not any(part.cache.num_used for part in self.memory.parts.values()):
            assert not self.loans(0), "L2: no pages are used, and memory is owed"

    def _member(self, model: str) -> _Member:
        member = self._members.get(model)
        if member is None:
            known = ", ".join(self._members) or "none"
            raise ConfigError("is not registered", field=model, hint=f"There are: {known}.")
        return member

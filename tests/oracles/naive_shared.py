"""Naive models on one device: page by page and turn by turn.

Restates the rules of docs/guide-sharing.md on top of the naive engine, and shares no code with kvarts.

Longer than other files: it is read from top to bottom, beside the guide, and is to be obvious in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import product

from oracles.naive import NaiveEngine, NaiveRequest, Page, polynomial_ns


class SeveralWaysError(Exception):
    """Work could be lost in more than one way that is the least."""


class NaiveDevice:
    def __init__(self, num_bytes: int, total_tokens: int, reclaim_after_ns: float = 0) -> None:
        self.reclaim_after_ns = reclaim_after_ns
        self.now = 0
        self.num_bytes = num_bytes
        self.total_tokens = total_tokens
        self.tenants: list[NaiveTenant] = []
        self.num_releases = self.num_claims = 0

    @property
    def empty(self) -> int:
        return self.num_bytes - sum(tenant.held for tenant in self.tenants)

    @property
    def free(self) -> int:
        return self.num_bytes - sum(tenant.used_bytes for tenant in self.tenants)

    def oldest(self, tenants: Sequence[NaiveTenant]) -> NaiveTenant:
        return min(tenants, key=lambda tenant: tenant.oldest_release())

    def make_room(self, asker: NaiveTenant) -> None:
        """For one page of `asker`, one page after the other."""
        while self.empty < asker.page_bytes:
            over = [tenant for tenant in self.tenants if tenant.has_cached and tenant.held > tenant.guaranteed]
            if over:
                self.oldest(over).evict()
            elif asker.has_cached:
                asker.evict()
            else:
                self.oldest([tenant for tenant in self.tenants if tenant.has_cached]).evict()

    def wake(self, but: NaiveTenant | None) -> None:
        for tenant in self.tenants:
            if tenant is not but and tenant.why == "pages":
                tenant.why = None

    # Donors -----------------------------------------------------------------------------------------------

    def donors(self, asker: NaiveTenant, below: int) -> list[NaiveTenant]:
        return [
            tenant
            for tenant in self.tenants
            if tenant is not asker
            and tenant.used_bytes > tenant.guaranteed
            and any(request.priority < below for request in tenant.running)
        ]

    def preempt_for(self, asker: NaiveTenant, below: int, num_pages: int) -> bool:
        short = num_pages * asker.page_bytes - self.free
        donors = self.donors(asker, below)
        levels = sorted({victim.priority for donor in donors for victim in donor.victims(below)}, reverse=True)
        best: tuple[list[tuple[int, int]], list[list[NaiveRequest]]] | None = None
        for counts in product(*(range(len(donor.victims(below)) + 1) for donor in donors)):
            gone = [donor.victims(below)[:count] for donor, count in zip(donors, counts, strict=True)]
            freed = sum(
                min(donor.freed_by(victims), donor.used_bytes - donor.guaranteed)
                for donor, victims in zip(donors, gone, strict=True)
            )
            lost = [victim for victims in gone for victim in victims]
            cost = [
                (sum(v.computed for v in lost if v.priority == level), sum(v.priority == level for v in lost))
                for level in levels
            ]
            if freed >= short:
                if best is not None and cost == best[0]:
                    raise SeveralWaysError
                if best is None or cost < best[0]:
                    best = cost, gone
        if best is None:
            return False
        for donor, victims in zip(donors, best[1], strict=True):
            for victim in victims:
                donor.gave_way(victim)
        self.wake(asker)
        return True


class NaiveTenant(NaiveEngine):
    def __init__(
        self,
        device: NaiveDevice,
        *,
        page_bytes: int,
        guaranteed: int,
        weight: int,
        floor: int,
        ceiling: int | None,
        page_size: int,
        max_num_seqs: int,
    ) -> None:
        super().__init__(
            num_pages=device.num_bytes // page_bytes,
            page_size=page_size,
            max_num_batched_tokens=device.total_tokens,
            max_num_seqs=max_num_seqs,
            cost=polynomial_ns,
        )
        self.join(device, page_bytes, guaranteed, weight, floor, ceiling)

    def join(
        self, device: NaiveDevice, page_bytes: int, guaranteed: int, weight: int, floor: int, ceiling: int | None
    ) -> None:
        self.device = device
        self.num_taken = 0  # pages used or cached
        self.page_bytes = page_bytes
        self.guaranteed = guaranteed
        self.weight, self.floor, self.ceiling = weight, floor, ceiling
        self.claimed = self.claim_number = 0
        self.claimant: NaiveRequest | None = None
        self.since: int | None = None  # waits within its guarantee since then
        self.kept = 0  # used, and reserved for it, after its last turn
        self.num_wanted = 0
        self.why: str | None = None  # why the head was not admitted when last looked at
        self.given = 0
        self.num_given = 0
        self.decoding: set[int] = set()
        self.released_at: dict[Page, int] = {}
        device.tenants.append(self)

    # Pages ------------------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        return self.num_taken * self.page_bytes

    @property
    def has_cached(self) -> bool:
        return bool(self.lru)

    def oldest_release(self) -> int:
        return self.released_at[self.lru[0]]

    @property
    def num_used(self) -> int:
        return self.num_taken - len(self.lru)

    @property
    def used_bytes(self) -> int:
        return self.num_used * self.page_bytes

    def num_free(self) -> int:
        return self.device.free // self.page_bytes

    def take_page(self) -> Page:
        self.device.make_room(self)
        self.num_taken += 1
        return Page(refs=1)

    def evict(self) -> None:
        old = self.lru.pop(0)
        self.num_taken -= 1
        del self.released_at[old]
        copies = self.index[old.name]
        copies.remove(old)
        if not copies:
            del self.index[old.name]
            self.evicted.append(old.name)

    def release(self, request: NaiveRequest) -> None:
        self.decoding.discard(request.seq)
        before, empty = len(self.lru), self.num_empty
        super().release(request)
        self.num_taken -= self.num_empty - empty
        self.device.num_releases += 1
        for page in self.lru[before:]:
            self.released_at[page] = self.device.num_releases

    def unlist(self, page: Page) -> None:
        super().unlist(page)
        del self.released_at[page]

    # Giving way -------------------------------------------------------------------------------------------

    def rest_of(self, request: NaiveRequest) -> int:
        """The bytes that the rest of a prompt needs."""
        return (self.pages_for(request.known) - len(request.pages)) * self.page_bytes

    def whole_of(self, request: NaiveRequest) -> int:
        """The bytes that a request needs which has nothing."""
        return self.pages_for(request.known) * self.page_bytes

    def reserved(self) -> int:
        """Free bytes that are kept for it: what was admitted is to go on, and its guarantee is for what waits."""
        rest = wanted = sum(self.rest_of(request) for request in self.running if request.seq not in self.decoding)
        if len(self.running) < self.max_num_seqs:
            wanted += sum(self.whole_of(request) for request in self.waiting)
        return max(rest, min(wanted, self.guaranteed - self.used_bytes))

    def reserved_for_others(self) -> int:
        total = 0
        for other in self.device.tenants:
            if other is not self:
                is_earlier = other.claimed and (not self.claimed or other.claim_number < self.claim_number)
                total += max(other.reserved(), other.claimed if is_earlier else 0)
        return total

    def fits(self, head: NaiveRequest, num_pages: int) -> bool:
        free = self.num_free()
        within = self.used_bytes + num_pages * self.page_bytes <= self.guaranteed
        if not within:
            free = (self.device.free - self.reserved_for_others()) // self.page_bytes
        self.num_wanted = num_pages
        if num_pages <= free:
            return True
        return within and self.device.preempt_for(self, self.below(head.priority), num_pages)

    def below(self, priority: int) -> int:
        """Below which priority others give way to a request that waits within its guarantee."""
        after = self.device.reclaim_after_ns
        if not after:
            return priority + 1
        return priority + (self.since is not None and self.device.now - self.since >= after)

    def others_preempt_for(self, request: NaiveRequest, num_pages: int) -> bool:
        if min(other.priority for other in self.running) < request.priority:
            return False
        within = self.used_bytes + num_pages * self.page_bytes <= self.guaranteed
        at_once = within and self.device.reclaim_after_ns != float("inf")
        return self.device.preempt_for(self, request.priority + at_once, num_pages)

    def victims(self, below: int) -> list[NaiveRequest]:
        """In the order in which they go."""
        order = sorted(enumerate(self.running), key=lambda pair: (pair[1].priority, -pair[0]))
        return [request for _, request in order if request.priority < below]

    def freed_by(self, victims: list[NaiveRequest]) -> int:
        pages = {id(page): page for victim in victims for page in victim.pages}
        gone = [
            page
            for page in pages.values()
            if page.refs == sum(1 for victim in victims for other in victim.pages if other is page)
        ]
        return len(gone) * self.page_bytes

    def gave_way(self, victim: NaiveRequest) -> None:
        self.preempted.append((victim.seq, -1, victim.computed))
        self.running.remove(victim)
        self.release(victim)
        victim.computed = 0
        victim.preemptions += 1
        self.waiting.insert(0, victim)
        self.waiting.sort(key=lambda r: -r.priority)
        self.given += 1
        self.num_given += 1
        self.why = None

    def take_given(self) -> int:
        given, self.given = self.given, 0
        return given

    # Turns ------------------------------------------------------------------------------------------------

    def submit(self, request: NaiveRequest) -> None:
        others = sum(tenant.guaranteed for tenant in self.device.tenants if tenant is not self)
        if self.most_bytes(request) > self.device.num_bytes - others:
            request.rejected = True
            self.finished.append(request)
            return
        super().submit(request)
        if not request.rejected and self.waiting[0] is request:
            self.why = None

    def most_bytes(self, request: NaiveRequest) -> int:
        """What a request may need at most."""
        return self.pages_for(len(request.tokens) + request.num_output - 1) * self.page_bytes

    def begin_step(self, now_ns: int) -> None:
        self.num_wanted = 0

    def end_step(self) -> None:
        self.why = None
        if self.waiting and not self.num_preempted:
            if len(self.running) >= self.max_num_seqs:
                self.why = "seqs"
            elif self.budget_left == 0:
                self.why = "budget"
            else:
                self.why = "pages"

    def pause_until(self) -> int:
        return -1

    def is_stalled(self) -> bool:
        return not self.running and (not self.waiting or self.why == "pages")

    def can_step(self) -> bool:
        if not self.is_stalled():
            return True
        entitled = self.used_bytes + self.claimed <= self.guaranteed
        if not self.claimed or not entitled:
            return False
        return bool(self.device.donors(self, self.below(self.waiting[0].priority)))

    def num_ended(self) -> int:
        return sum(not request.rejected for request in self.finished)

    def turn(self, now_ns: int, budget: int, arrive: Callable[[int], None]) -> int:
        self.max_num_batched_tokens = budget
        made = {request.seq: request.made for request in [*self.running, *self.waiting]}
        everybody = [*self.running, *self.waiting]
        released = self.num_released
        num_finished = self.num_ended()
        end_ns = self.step(now_ns)
        if end_ns < 0:
            end_ns = now_ns
        arrive(end_ns - 1)
        self.decoding |= {r.seq for r in everybody if r in self.running and r.made > made[r.seq]}
        if self.num_ended() > num_finished:
            self.why = None
        claimed, claimant = 0, None
        if self.why == "pages":
            claimed, claimant = self.num_wanted * self.page_bytes, self.waiting[0]
        fewer = claimed < self.claimed or (self.claimed > 0 and claimant is not self.claimant)
        if claimed and (not self.claimed or claimant is not self.claimant):
            self.device.num_claims += 1
            self.claim_number = self.device.num_claims
        self.claimed, self.claimant = claimed, claimant
        if not claimed or self.used_bytes + claimed > self.guaranteed:
            self.since = None
        elif self.since is None:
            self.since = end_ns
        kept, self.kept = self.kept, self.used_bytes + self.reserved()
        if fewer or self.num_released != released or self.kept < kept:
            self.device.wake(self)
        return end_ns


def shares_of(tenants: Sequence[NaiveTenant]) -> dict[NaiveTenant, Fraction]:
    """Everybody stands on its floor; the level rises from breakpoint to breakpoint, until all the time is given."""
    lowest = {tenant: Fraction(tenant.floor, 1000) for tenant in tenants}
    highest = {tenant: Fraction(tenant.ceiling or 1000, 1000) for tenant in tenants}

    def at(level: Fraction) -> dict[NaiveTenant, Fraction]:
        return {tenant: max(lowest[tenant], min(highest[tenant], level * tenant.weight)) for tenant in tenants}

    points = {bound[tenant] / tenant.weight for bound in (lowest, highest) for tenant in tenants}
    level = max((point for point in points if sum(at(point).values()) <= 1), default=Fraction(0))
    shares = at(level)
    missing = 1 - sum(shares.values(), Fraction(0))
    rising = [tenant for tenant in tenants if lowest[tenant] <= level * tenant.weight < highest[tenant]]
    for tenant in rising if missing else []:
        shares[tenant] += missing * tenant.weight / sum(other.weight for other in rising)
    return shares


class NaiveLane:
    """The turns: who is behind its slice goes first; if nobody is, who has waited longest for a turn."""

    def __init__(self, device: NaiveDevice) -> None:
        self.device = device

    def run(self, traffic: list[list[NaiveRequest]]) -> None:
        device = self.device
        tenants = device.tenants
        shares = shares_of(tenants)
        pending = [list(requests) for requests in traffic]
        now = last_start = 0
        slice_start = dict.fromkeys(tenants, Fraction(0))
        waiting_for_turn = list(tenants)
        were_able: list[NaiveTenant] = []
        tried: list[NaiveTenant] = []  # they waited for pages of others, and did not get enough

        def arrive(until: int) -> None:
            while any(requests and requests[0].arrival_ns <= until for requests in pending):
                _, place = min((requests[0].arrival_ns, place) for place, requests in enumerate(pending) if requests)
                tenants[place].submit(pending[place].pop(0))

        while True:
            arrive(now)
            device.now = now
            able = [tenant for tenant in tenants if tenant.can_step()]
            for tenant in able:
                if tenant not in were_able:
                    began = last_start if were_able else now
                    slice_start[tenant] = max(slice_start[tenant], Fraction(began))
            were_able = able
            able = [tenant for tenant in able if tenant not in tried]
            if not able:
                times = [requests[0].arrival_ns for requests in pending if requests]
                if not times:
                    break
                now, tried = min(times), []
                continue
            behind = [tenant for tenant in able if slice_start[tenant] <= now]
            if behind:
                tenant = min(behind, key=lambda tenant: slice_start[tenant])
            else:
                tenant = next(tenant for tenant in waiting_for_turn if tenant in able)
            waiting_for_turn.remove(tenant)
            waiting_for_turn.append(tenant)
            last_start = now
            num_steps, was_stalled = len(tenant.steps), tenant.is_stalled()
            end = tenant.turn(now, device.total_tokens, arrive)
            has_stepped = len(tenant.steps) > num_steps
            tried = [*tried, tenant] if was_stalled and not has_stepped else []
            if has_stepped:  # a turn in which nothing was done leaves the slice as it was
                slice_start[tenant] = min(slice_start[tenant], Fraction(now)) + (end - now) / shares[tenant]
            now = end
        assert not any(tenant.has_work() for tenant in tenants)

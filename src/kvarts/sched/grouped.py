"""The scheduler of a model with KV groups: the same order of a step, with memory counted for every group.

A running request holds in each group what its next token needs: what no later token sees goes back at the end of the
step. That is after requests that ended have given everything back, and in the order of admission. A decode takes a part
in every group before the first token of a page is computed. A page can be found once the step is planned that fills it,
also where its tokens are not known: only its own request will find it, after a preemption.

A waiting request is admitted if the most that it may hold while its known tokens are computed, in chunks as large as
they may be, is free.
"""

from __future__ import annotations

from math import gcd
from typing import cast

from msgspec.structs import replace

from kvarts.config import EngineConfig
from kvarts.event_log import Tell
from kvarts.events import Admitted, Blocked, ChunkComputed
from kvarts.kv.group_memory import GroupMemory
from kvarts.kv.part_pages import PartPages
from kvarts.kv.pins import Pins
from kvarts.kv.tiered_pages import TieredPages
from kvarts.request import Request, RequestState
from kvarts.sched.drafts import Drafter
from kvarts.sched.group_batch import GroupBatch
from kvarts.sched.group_drafts import GroupDrafts
from kvarts.sched.group_loads import GroupLoads, GroupTiers
from kvarts.sched.group_needs import GroupNeeds
from kvarts.sched.own_pages import OwnPagesInUse
from kvarts.sched.page_source import OnePool, PageSource
from kvarts.sched.plan import Chunk, StepPlan, StepResult
from kvarts.sched.policy import AdmissionPolicy, WaitingQueue
from kvarts.sched.preemption import PageMark, Preemptor
from kvarts.sched.prefill import Prefill
from kvarts.sched.running import Running
from kvarts.sched.scheduler import Scheduler

__all__ = ["GroupedScheduler"]

MOST_UNCHECKED = 16
"""One part in so many may have moved before all are looked at."""


class GroupMark(PageMark):
    """Blocks, and parts of each group, at the mark of the last scheduled step."""

    __slots__ = ("_parts", "parts")

    def __init__(self, cache: PartPages) -> None:
        super().__init__(cache)
        self._parts = cache
        self.parts = cache.counts()

    def look(self) -> None:
        """Set the mark here if more is in use than at the mark so far."""
        cache = self._parts
        num_used = cache.num_used
        if num_used > self.used:
            self.used, self.cached, self.released = num_used, cache.num_cached, cache.num_released
            self.parts = cache.counts()


class GroupPreemptor(Preemptor):
    """Takes parts for decodes that begin a page, and preempts others for them. `page_blocks`: what each takes."""

    __slots__ = ("_page_blocks", "_parts")

    def __init__(
        self,
        running: Running,
        waiting: WaitingQueue,
        cache: PartPages,
        pages: PageSource,
        mark: PageMark,
        page_blocks: int,
        tell: Tell | None,
    ) -> None:
        super().__init__(running, waiting, cache, pages, mark, tell)
        self._parts = cache
        self._page_blocks = page_blocks

    def take_due(self, num_due: int, now_ns: int) -> None:
        """Take the parts of `num_due` pages that decodes begin in this step, in admission order."""
        cache, wheel, blocks = self._parts, self._running.wheel, self._page_blocks
        for request in wheel.needing_page():
            if request.state is not RequestState.DECODING:
                continue  # preempted for a request before it
            if blocks > cache.num_free and not self.make_room(request, blocks, now_ns):
                continue  # itself
            holding = request.holding
            assert holding is not None
            cache.take_page(holding, wheel.num_computed(request) // self._page_size)


class GroupPrefill(Prefill):
    """Chunks of prompts, and the parts that they fill. `rows`: those of an executor that needs ids, else None."""

    __slots__ = ("_parts", "_rows")

    def __init__(
        self,
        running: Running,
        cache: PartPages,
        own_pages: OwnPagesInUse,
        preemptor: Preemptor,
        rows: GroupBatch | None,
        tell: Tell | None,
    ) -> None:
        super().__init__(running, cache, own_pages, preemptor, loads=None, batch=rows, tell=tell)
        self._parts = cache
        self._rows = rows

    def resume(self, request: Request, budget: int, now_ns: int, chunks: list[Chunk]) -> int:
        """Compute the next chunk of the chunked `request`; return the tokens used up of `budget`."""
        if request.own is not None:
            return super().resume(request, budget, now_ns, chunks)
        cache, start = self._parts, request.num_computed
        num_known = request.num_prompt_tokens + request.num_output_tokens
        num_tokens = min(num_known - start, budget)
        holding = request.holding
        assert holding is not None
        blocks = cache.missing_blocks(holding, num_tokens)
        if blocks > cache.num_free and not self._preemptor.make_room(request, blocks, now_ns):
            return 0
        self._compute(request, num_tokens, num_known, chunks)
        return budget if request is self._running.chunked else num_tokens

    def publish_filled(self, num_steps: int) -> None:
        """Make pages findable that decodes fill in the next step."""
        assert num_steps == 1
        wheel, rows = self._running.wheel, self._rows
        place = self._page_size - 1
        for request in wheel.computing_at(place) if wheel.num_computing_at(place) else ():
            num_computed = wheel.num_computed(request) + 1
            if rows is not None:
                # The token computed in this step is the one sampled in the step before.
                rows.append_sampled(request, num_computed, wheel.step)
            if request.own is not None:
                continue
            holding = request.holding
            assert holding is not None
            self._parts.fill_page(holding, num_computed)

    def _compute(self, request: Request, num_tokens: int, num_known: int, chunks: list[Chunk]) -> None:
        """Take the parts of a chunk and count it as computed; what it fills can be found from now on."""
        if request.own is not None:
            super()._compute(request, num_tokens, num_known, chunks)
            return
        running, rows = self._running, self._rows
        start = request.num_computed
        end = request.num_computed = start + num_tokens
        if self._tell is not None:
            self._tell(ChunkComputed(request.index, start, end, num_known))
        holding = request.holding
        assert holding is not None
        self._parts.extend(holding, end, is_end=end == num_known)
        if end == num_known:
            self.completing.append(request)
            if request is running.chunked:
                running.chunked = None
        else:
            running.chunked = request
        if rows is not None:
            chunks.append(rows.chunk(request, start, num_tokens, num_known))
        else:
            chunks.append(Chunk(start, num_tokens, request.num_prompt_tokens, num_known))


class GroupRunning(Running):
    """Running requests, of which every page becomes findable when it is full."""

    __slots__ = ()

    def shares(self, request: Request) -> bool:
        """Return True: what leaves a window may be found by the request itself, after a preemption."""
        return True


class GroupQueue(WaitingQueue):
    """A WaitingQueue that knows how many blocks its requests need, by `needs`."""

    __slots__ = ("_needs", "num_waiting_blocks")

    def __init__(self, policy: AdmissionPolicy, needs: GroupNeeds) -> None:
        super().__init__(policy)
        self._needs = needs
        self.num_waiting_blocks = 0
        """The most that each needs at one time to be computed, added up."""

    def push(self, request: Request) -> None:
        """Add `request`."""
        super().push(request)
        self.num_waiting_blocks += self._blocks_of(request)

    def remove(self, request: Request) -> None:
        """Remove `request`."""
        super().remove(request)
        self.num_waiting_blocks -= self._blocks_of(request)

    def _blocks_of(self, request: Request) -> int:
        return self._needs.to_compute(0, request.num_prompt_tokens + request.num_output_tokens)


class GroupedScheduler(Scheduler):
    """A Scheduler of a cache with KV groups. `rows`: those of an executor that needs ids; plans then name blocks.
    `drafter`: guesses tokens for such an executor.

    `pages`: of a device that other models share, instead of a pool of its own. `tiers`: those below a cache of
    TieredPages. `pins`: parts that are kept in use for later, as long as no request needs their memory; None without
    any. Pages are counted in blocks. No steps are certain to be alike: a LeapingScheduler knows more.
    """

    def __init__(
        self,
        config: EngineConfig,
        cache: PartPages,
        policy: AdmissionPolicy,
        *,
        rows: GroupBatch | None = None,
        pages: PageSource | None = None,
        tiers: GroupTiers | None = None,
        tell: Tell | None = None,
        pins: Pins | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self._queue: GroupQueue | None = None
        """The waiting queue, where other models ask what it needs."""
        is_shared = pages is not None
        if pages is None:
            pages = OnePool(cache, token_budget=config.max_num_batched_tokens, pins=pins)
        super().__init__(config, cache, pages, policy, batch=rows, tiers=tiers, tell=tell, pins=pins)
        self.parts = cache
        self.needs = GroupNeeds(cache.memory, page_size=config.page_size, most_new=config.max_num_batched_tokens)
        if is_shared:
            self.waiting = self._queue = GroupQueue(policy, self.needs)
        self.running = GroupRunning(cache, self.wheel, rows)
        self.group_mark = GroupMark(cache)
        self.mark = self.group_mark
        page_blocks = self.needs.page_blocks
        self.preemptor = GroupPreemptor(self.running, self.waiting, cache, pages, self.mark, page_blocks, tell)
        self._prefill = GroupPrefill(self.running, cache, self.own_pages, self.preemptor, rows, tell)
        if tiers is not None:
            self.loads = GroupLoads(tiers, cast(TieredPages, cache), self.waiting, config.page_size, self.needs)
        self._rows = rows
        self._places = _places(cache.memory, config.page_size)
        self.group_drafts: GroupDrafts | None = None
        if drafter is not None:
            assert rows is not None, "only an executor of tokens can tell which drafts are right"
            self.group_drafts = GroupDrafts(drafter, self.wheel, cache, rows, page_blocks=page_blocks, tell=tell)
        self.drafts = self.group_drafts
        self._lacking: tuple[Request, int, int] | None = None
        """The head that last lacked memory, how often parts had become findable, and the blocks that it needs."""
        self._num_moved = 0
        """Blocks that had been taken, released and evicted when `check` last looked at every part."""

    def side_counts(self) -> tuple[int, ...]:
        """Return the blocks used and cached in each tier, then the parts used and cached in each group, in pairs."""
        return super().side_counts() + self.parts.counts()

    def side_counts_at_mark(self) -> tuple[int, ...]:
        """Return the same at the mark of the last scheduled step."""
        return super().side_counts() + self.group_mark.parts

    def check(self) -> None:
        """Assert laws L1 and L2 of every part, between steps, and that requests are where their state says.

        That takes time for every part there is: it is done where a sixteenth of them has moved since it last was, and
        at rest.
        """
        parts = self.parts
        num_moved = parts.num_used + 2 * parts.num_released + parts.num_evicted
        if not self.has_work or num_moved - self._num_moved >= (parts.num_used + parts.num_cached) // MOST_UNCHECKED:
            self._num_moved = num_moved
            super().check()

    def num_evicted_parts(self) -> tuple[int, ...]:
        """Return the parts evicted of each group, one number a group."""
        return self.parts.num_evicted_parts()

    def horizon(self, now_ns: int) -> int:
        """Return 0: the next step has to be scheduled."""
        return 0

    def most_tokens(self, limit: int) -> int:
        """Return how many tokens a sequence has at most, of up to `limit`, that can run in this memory; 0 for none."""
        return self.needs.most_tokens(limit, self.parts.pool.total)

    def never_fits(self, request: Request) -> str | None:
        """Return the reason why `request` can never have its blocks; None if it can."""
        num_most, total = self.pages.num_most, self.parts.pool.total
        num_reserved = self.own_pages.reserve.num_pages
        if self.needs.at_most_whole(request.num_prompt_tokens + request.max_tokens) <= num_most - num_reserved:
            return None
        blocks = self._most_pages(request)
        if blocks <= num_most - num_reserved or request.own is not None:
            return None
        room = "the memory has" if num_most == total else "beside what is guaranteed to other models there are"
        if num_reserved:
            room = "beside the blocks that are reserved there are"
        return (
            f"needs {blocks} blocks of {self.parts.block_bytes:,} bytes for {request.num_prompt_tokens} prompt and "
            f"{request.max_tokens} output tokens, with {self.config.max_num_batched_tokens} tokens a step; {room} "
            f"{num_most - num_reserved}"
        )

    def _most_pages(self, request: Request) -> int:
        """Return how many blocks a request needs to itself."""
        return self.needs.of_request(request.num_prompt_tokens, request.max_tokens)

    def num_pages_of_chunked(self) -> int:
        """Return the most blocks that the rest of the chunked request needs at one time, beside what it has."""
        request = self.running.chunked
        if request is None or request.holding is None:
            return 0
        num_known = request.num_prompt_tokens + request.num_output_tokens
        return max(0, self.needs.to_compute(request.num_computed, num_known) - self.parts.num_held(request.holding))

    def num_pages_to_admit(self) -> int:
        """Return how many blocks all waiting requests need, each for itself; 0 while none could be admitted."""
        assert self._queue is not None, "no other model asks"
        return self._queue.num_waiting_blocks if super().num_pages_to_admit() else 0

    # One step ---------------------------------------------------------------------------------------------

    def schedule(self, now_ns: int) -> StepPlan:
        """Plan the step that starts at `now_ns` and take its parts. `commit` must follow."""
        plan = super().schedule(now_ns)
        if self._rows is not None and self._rows.has_states:
            return replace(plan, snapshots=self._rows.take_snapshots())
        return plan

    def _admit(self, now_ns: int, budget: int, chunks: list[Chunk]) -> tuple[int, ...]:
        """Admit loaded requests, then the head of the waiting queue while `max_num_seqs`, budget and memory allow."""
        waiting, cache, running, loads = self.waiting, self.parts, self.running, self.loads
        page_size, max_num_seqs, tell = self._page_size, self.config.max_num_seqs, self._tell
        admitted: list[int] = []
        self.blocked = Blocked.NOT
        while loads is not None and loads.loaded and budget > 0:
            request, loaded = loads.loaded.pop(0)
            self._lacking = None
            budget -= self._prefill.start(request, loads.resume(request, loaded), budget, now_ns, chunks)
            admitted.append(request.index)
        while waiting.num_waiting:
            request = waiting.head(now_ns)
            if running.num_running + (0 if loads is None else loads.num_requests) >= max_num_seqs:
                self.blocked = Blocked.SEQS
                break
            if budget <= 0:
                self.blocked = Blocked.BUDGET
                break
            if self._still_lacks(request):
                self.blocked = Blocked.PAGES
                break
            num_known = request.num_prompt_tokens + request.num_output_tokens
            # The last token is always computed: its logits are needed.
            match, held = cache.found(request.content, (num_known - 1) // page_size)
            hit_tokens = match.num_pages * page_size
            num_wanted = self.needs.to_admit(hit_tokens, num_known, held, self._num_certain)
            is_short = num_wanted > self.pages.num_free_to_admit(num_wanted)
            if is_short and self.pins is not None and self.pins.give_up_oldest():
                continue  # what it shared with the pin it may have to take now
            if is_short and not self.pages.make_way(request, num_wanted, to_admit=True):
                self.blocked = Blocked.PAGES
                self.num_pages_wanted = num_wanted
                self._lacking = request, cache.num_published, num_wanted
                break
            waiting.remove(request)
            self._lacking = None
            if loads is not None and loads.try_start(request, match, num_known, waiting.num_waiting):
                continue
            if tell is not None:
                self._told_blocked = None
                reach = cache.reach(request.content, (num_known - 1) // page_size)
                tell(Admitted(request.index, request.content, match.num_pages, reach=reach))
            request.holding = cache.open(match)
            budget -= self._prefill.start(request, hit_tokens, budget, now_ns, chunks)
            admitted.append(request.index)
        if self.blocked is not Blocked.NOT:
            self.blocked_head = request
            if tell is not None:
                self._tell_blocked(tell, request)
        return tuple(admitted)

    @property
    def _num_certain(self) -> int:
        """Blocks that a request may take whatever it needs; -1 if others of the memory have a say."""
        return self.parts.num_free if self._queue is None else -1

    def _still_lacks(self, head: Request) -> bool:
        """Return whether `head` was found to lack memory and certainly still does.

        What it needs only grows as long as no request is admitted, which may hold what it needs as well, and nothing
        that it could find becomes findable. Of other models it may have got memory meanwhile.
        """
        if self._lacking is None or self._queue is not None or (self.pins is not None and self.pins.num_pins):
            return False
        request, num_published, num_wanted = self._lacking
        if request is not head or num_published != self.parts.num_published or num_wanted <= self.parts.num_free:
            return False
        self.num_pages_wanted = num_wanted
        return True

    def commit(self, end_ns: int, result: StepResult | None = None) -> list[Request]:
        """End the scheduled step at `end_ns`; return the requests that finished, in admission order."""
        completing = self._prefill.completing
        finished = super().commit(end_ns, result)
        self._settle([request for request in completing if request.state is RequestState.DECODING])
        return finished

    def _settle(self, joined: list[Request]) -> None:
        """Let running requests give back what none of their later tokens sees. `joined`: those that began to decode."""
        wheel, parts = self.wheel, self.parts
        settling: list[Request] = []
        for place in self._places:
            if wheel.num_computing_at(place):
                settling += wheel.computing_at(place)
        if self.group_drafts is not None:
            settling += self.group_drafts.take_ahead()  # they may have passed such a place
        if len(self._places) > 1 or self.group_drafts is not None:
            settling.sort(key=lambda request: request.admission)
        if joined:
            # They are on the wheel already; their turn comes after those that were admitted before them.
            settling = [request for request in settling if request not in joined]
        for request in (*settling, *joined):
            if request.own is not None:
                continue
            holding = request.holding
            assert holding is not None
            parts.settle(holding, wheel.num_computed(request))
        chunked = self.running.chunked
        if chunked is not None and chunked.own is None:
            holding = chunked.holding
            assert holding is not None
            parts.settle(holding, chunked.num_computed)
        parts.count()


def _places(memory: GroupMemory, page_size: int) -> tuple[int, ...]:
    """Return the places in a page at which a token no longer needs a page that the token before it needed."""
    places: set[int] = set()
    for group in memory.groups:
        span = group.layer.span or 1
        if group.layer.kind == "window":
            places.add((span - 1) % page_size)
        elif group.layer.kind == "chunk":
            places.update(range(0, page_size, gcd(span, page_size)))
    return tuple(sorted(places))

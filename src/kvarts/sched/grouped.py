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

from kvarts.config import EngineConfig
from kvarts.events import Blocked
from kvarts.kv.group_memory import GroupMemory
from kvarts.kv.group_pages import GroupPages, PartHolding
from kvarts.kv.run_cache import RunCache
from kvarts.kv.spans import RunMatch
from kvarts.request import Request, RequestState
from kvarts.sched.group_needs import GroupNeeds
from kvarts.sched.own_pages import OwnPagesInUse
from kvarts.sched.page_source import OnePool, PageSource
from kvarts.sched.plan import Chunk, StepResult
from kvarts.sched.policy import AdmissionPolicy, WaitingQueue
from kvarts.sched.preemption import PageMark, Preemptor
from kvarts.sched.prefill import Prefill
from kvarts.sched.running import Running
from kvarts.sched.scheduler import Scheduler

__all__ = ["GroupedScheduler"]


class HeldByOthers:
    """What running requests hold of what was found."""

    __slots__ = ("_cache", "_found")

    def __init__(self, cache: RunCache, found: RunMatch) -> None:
        self._cache = cache
        self._found = found

    def num_shared(self, group: int, first_page: int) -> int:
        """Return how many parts of a group they hold that a token needs with pages from `first_page` on."""
        return self._cache.num_shared(self._found, group, first_page)

    def num_idle(self, group: int) -> int:
        """Return how many snapshots of a group they do not hold."""
        return self._cache.num_idle(self._found, group)


class GroupMark(PageMark):
    """Blocks, and parts of each group, at the mark of the last scheduled step."""

    __slots__ = ("_parts", "parts")

    def __init__(self, cache: GroupPages) -> None:
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
    """Takes parts for decodes that begin a page, and preempts others for them."""

    __slots__ = ("_needs", "_parts")

    def __init__(
        self,
        running: Running,
        waiting: WaitingQueue,
        cache: GroupPages,
        pages: PageSource,
        mark: PageMark,
        needs: GroupNeeds,
    ) -> None:
        super().__init__(running, waiting, cache, pages, mark, None)
        self._parts = cache
        self._needs = needs

    def take_due(self, num_due: int, now_ns: int) -> None:
        """Take the parts of `num_due` pages that decodes begin in this step, in admission order."""
        cache, wheel, blocks = self._parts, self._running.wheel, self._needs.page_blocks
        for request in wheel.needing_page():
            if request.state is not RequestState.DECODING:
                continue  # preempted for a request before it
            if blocks > cache.num_free and not self._free_blocks(request, blocks, now_ns):
                continue  # itself
            cache.parts.take_page(cast(PartHolding, request.holding).parts)
            cache.count()

    def _free_blocks(self, asker: Request, blocks: int, now_ns: int) -> bool:
        """Preempt until `blocks` are free; return False if `asker` itself was preempted."""
        while blocks > self._parts.num_free:
            if self._preempt_for(asker, blocks, now_ns, None) is asker:
                return False
        return True


class GroupPrefill(Prefill):
    """Chunks of prompts, and the parts that they fill."""

    __slots__ = ("_parts",)

    def __init__(self, running: Running, cache: GroupPages, own_pages: OwnPagesInUse, preemptor: Preemptor) -> None:
        super().__init__(running, cache, own_pages, preemptor, loads=None, batch=None, tell=None)
        self._parts = cache

    def resume(self, request: Request, budget: int, now_ns: int, chunks: list[Chunk]) -> int:
        """Compute the next chunk of the chunked `request`; return the tokens used up of `budget`."""
        cache, start = self._parts, request.num_computed
        num_known = request.num_prompt_tokens + request.num_output_tokens
        num_tokens = min(num_known - start, budget)
        parts = cast(PartHolding, request.holding).parts
        blocks = cache.parts.missing_bytes(parts, num_tokens) // cache.block_bytes
        if blocks > cache.num_free and not self._preemptor.make_room(request, blocks, now_ns):
            return 0
        self._compute(request, num_tokens, num_known, chunks)
        return budget if request is self._running.chunked else num_tokens

    def publish_filled(self, num_steps: int) -> None:
        """Make pages findable that decodes fill in the next step."""
        assert num_steps == 1
        wheel = self._running.wheel
        place = self._page_size - 1
        for request in wheel.computing_at(place) if wheel.num_computing_at(place) else ():
            parts = cast(PartHolding, request.holding).parts
            self._parts.parts.fill_page(parts, wheel.num_computed(request) + 1)

    def _compute(self, request: Request, num_tokens: int, num_known: int, chunks: list[Chunk]) -> None:
        """Take the parts of a chunk and count it as computed; what it fills can be found from now on."""
        cache, running = self._parts, self._running
        start = request.num_computed
        end = request.num_computed = start + num_tokens
        cache.parts.extend(cast(PartHolding, request.holding).parts, end, is_end=end == num_known)
        cache.count()
        if end == num_known:
            self.completing.append(request)
            if request is running.chunked:
                running.chunked = None
        else:
            running.chunked = request
        chunks.append(Chunk(start, num_tokens, request.num_prompt_tokens, num_known))


class GroupRunning(Running):
    """Running requests, of which every page becomes findable when it is full."""

    __slots__ = ()

    def shares(self, request: Request) -> bool:
        """Return True: what leaves a window may be found by the request itself, after a preemption."""
        return True


class GroupedScheduler(Scheduler):
    """A Scheduler of a cache with KV groups, in virtual time, without tiers, and without a reader of details.

    Pages are counted in blocks. Steps that are alike are done one after the other by `take_alike` and `pass_alike`.
    """

    def __init__(self, config: EngineConfig, cache: GroupPages, policy: AdmissionPolicy) -> None:
        pages = OnePool(cache, token_budget=config.max_num_batched_tokens)
        super().__init__(config, cache, pages, policy)
        self.parts = cache
        self.needs = GroupNeeds(cache.memory, page_size=config.page_size, most_new=config.max_num_batched_tokens)
        self.running = GroupRunning(cache, self.wheel, None)
        self.group_mark = GroupMark(cache)
        self.mark = self.group_mark
        self.preemptor = GroupPreemptor(self.running, self.waiting, cache, pages, self.mark, self.needs)
        self._prefill = GroupPrefill(self.running, cache, self.own_pages, self.preemptor)
        self._places = _places(cache.memory, config.page_size)
        self._lacking: tuple[Request, int, int] | None = None
        """The head that last lacked memory, the parts that had become findable, and the blocks that it needs."""

    def side_counts(self) -> tuple[int, ...]:
        """Return the parts used and cached in each group, one pair a group."""
        return self.parts.counts()

    def side_counts_at_mark(self) -> tuple[int, ...]:
        """Return the same at the mark of the last scheduled step."""
        return self.group_mark.parts

    def _never_fits(self, request: Request) -> str | None:
        blocks = self.needs.of_request(request.num_prompt_tokens, request.max_tokens)
        if blocks <= self.parts.pool.total:
            return None
        return (
            f"needs {blocks} blocks of {self.parts.block_bytes:,} bytes for {request.num_prompt_tokens} prompt and "
            f"{request.max_tokens} output tokens, with {self.config.max_num_batched_tokens} tokens a step; the memory "
            f"has {self.parts.pool.total}"
        )

    # One step ---------------------------------------------------------------------------------------------

    def _admit(self, now_ns: int, budget: int, chunks: list[Chunk]) -> tuple[int, ...]:
        """Admit the head of the waiting queue while `max_num_seqs`, budget and memory allow."""
        waiting, cache, running = self.waiting, self.parts, self.running
        page_size, max_num_seqs = self._page_size, self.config.max_num_seqs
        admitted: list[int] = []
        self.blocked = Blocked.NOT
        while waiting.num_waiting:
            request = waiting.head(now_ns)
            if running.num_running >= max_num_seqs:
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
            found = cache.parts.match(request.content, (num_known - 1) // page_size)
            hit_tokens = found.num_pages * page_size
            num_wanted = self.needs.to_admit(hit_tokens, num_known, HeldByOthers(cache.parts, found))
            if num_wanted > cache.num_free:
                self.blocked = Blocked.PAGES
                self.num_pages_wanted = num_wanted
                self._lacking = request, cache.parts.num_published, num_wanted
                break
            waiting.remove(request)
            self._lacking = None
            request.holding = PartHolding(cache.parts.begin(request.content, found))
            budget -= self._prefill.start(request, hit_tokens, budget, now_ns, chunks)
            admitted.append(request.index)
        if self.blocked is not Blocked.NOT:
            self.blocked_head = request
        return tuple(admitted)

    def _still_lacks(self, head: Request) -> bool:
        """Return whether `head` was found to lack memory and certainly still does.

        What it needs only grows as long as no request is admitted, which may hold what it needs as well, and nothing
        that it could find becomes findable.
        """
        if self._lacking is None:
            return False
        request, num_published, num_wanted = self._lacking
        if request is not head or num_published != self.parts.parts.num_published or num_wanted <= self.parts.num_free:
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
        wheel, parts = self.wheel, self.parts.parts
        settling: list[Request] = []
        for place in self._places:
            if wheel.num_computing_at(place):
                settling += wheel.computing_at(place)
        if len(self._places) > 1:
            settling.sort(key=lambda request: request.admission)
        for request in (*settling, *joined):
            parts.settle(cast(PartHolding, request.holding).parts, wheel.num_computed(request))
        chunked = self.running.chunked
        if chunked is not None:
            parts.settle(cast(PartHolding, chunked.holding).parts, chunked.num_computed)
        self.parts.count()

    # Many steps -------------------------------------------------------------------------------------------

    def horizon(self, now_ns: int) -> int:
        """Return how many steps are alike as far as requests go; `goes_on` says when memory ends it earlier."""
        wheel = self.wheel
        if self.running.chunked is not None or not wheel.num_decoding or not self._fits(0):
            return 0
        num_steps = wheel.steps_to_finish()
        if self.waiting.num_waiting:
            blocked = self.blocked
            if blocked is Blocked.NOT or self.waiting.head(now_ns) is not self.blocked_head:
                return 0
            if blocked is Blocked.BUDGET and wheel.num_decoding < self.pages.token_budget:
                return 0
            if blocked is Blocked.PAGES:
                if self.num_pages_wanted <= self.parts.num_free:
                    return 0
                num_steps = self._steps_to_known_page(num_steps)
        return num_steps

    def _steps_to_known_page(self, num_steps: int) -> int:
        """Return for how many of the next steps no decode fills a page that others may find; the head may need it."""
        for offset in range(1, min(num_steps, self._page_size) + 1):
            for request in self.wheel.computing_at(-offset):
                if request.content.num_known_tokens > request.num_prompt_tokens:
                    return offset - 1
        return num_steps

    def take_alike(self) -> None:
        """Take the parts of the first of the steps that are alike. `pass_alike` or `commit` must follow."""
        if num_due := self.wheel.pages_due():
            self.preemptor.take_due(num_due, self.preemptor.last_end_ns)
        self._prefill.publish_filled(1)
        self.mark.used = -1
        self.mark.look()

    def goes_on(self) -> bool:
        """Return whether the step after that of `take_alike` is certain to be alike, if no request ends before it."""
        if not self._fits(1):
            return False
        if not self.waiting.num_waiting or self.blocked is not Blocked.PAGES:
            return True
        given = sum(self.needs.most_given * self.wheel.num_computing_at(place - 1) for place in self._places)
        return self.num_pages_wanted > self.parts.num_free + given

    def pass_alike(self) -> None:
        """End the step of `take_alike`, in which no request ends."""
        finished = self.wheel.turn(1)
        assert not finished, "a request ended in the middle of steps that are alike"
        self._settle([])

    def _fits(self, offset: int) -> bool:
        """Return whether there is memory, without what is given back meanwhile, for the decodes of a later step."""
        return self.wheel.num_computing_at(-offset) * self.needs.page_blocks <= self.parts.num_free


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

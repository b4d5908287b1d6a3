"""The scheduler of a model with KV groups in virtual time, which does steps that are alike at once.

Its decodes are counted, by the steps in which they take pages and give some back, and not asked one by one.
"""

from __future__ import annotations

from kvarts.config import EngineConfig
from kvarts.events import Blocked
from kvarts.kv.group_pages import GroupPages
from kvarts.kv.run_leaps import RunLeap
from kvarts.request import Request, RequestState
from kvarts.sched.grouped import GroupedScheduler, GroupPreemptor, GroupPrefill
from kvarts.sched.page_source import PageSource
from kvarts.sched.policy import AdmissionPolicy, WaitingQueue
from kvarts.sched.preemption import PageMark
from kvarts.sched.running import Running

__all__ = ["LeapingScheduler"]


class CountingPreemptor(GroupPreemptor):
    """A GroupPreemptor that takes the pages of all decodes at once, if they are free."""

    __slots__ = ("_counted",)

    def __init__(
        self,
        running: Running,
        waiting: WaitingQueue,
        cache: GroupPages,
        pages: PageSource,
        mark: PageMark,
        page_blocks: int,
    ) -> None:
        super().__init__(running, waiting, cache, pages, mark, page_blocks, None)
        self._counted = cache

    def take_due(self, num_due: int, now_ns: int) -> None:
        """Take the parts of `num_due` pages that decodes begin in this step, in admission order if they are short."""
        cache, blocks = self._counted, self._page_blocks
        if num_due * blocks <= cache.num_free:
            cache.take_due(num_due)
            return
        served: set[int] = set()
        for request in self._running.wheel.needing_page():
            if request.state is not RequestState.DECODING:
                continue  # preempted for a request before it
            while blocks > cache.num_free and not self.others_make_way(request, blocks):
                if self._preempt_for(request, blocks, now_ns, served) is request:
                    break
            else:
                served.add(request.index)
                cache.take_due(1)


class CountingPrefill(GroupPrefill):
    """A GroupPrefill that makes pages of decodes findable only if others may find them."""

    __slots__ = ("_counted",)

    def __init__(self, running: Running, cache: GroupPages, scheduler: GroupedScheduler) -> None:
        super().__init__(running, cache, scheduler.own_pages, scheduler.preemptor, None, None)
        self._counted = cache

    def publish_filled(self, num_steps: int) -> None:
        """Make pages findable that decodes fill in the next step, if their tokens are known."""
        assert num_steps == 1
        self._counted.fill_due()


class LeapingScheduler(GroupedScheduler):
    """A GroupedScheduler of an executor without ids, and without a reader of details.

    A page that a decode fills with tokens that are not known can be found only by its own request, after a preemption:
    it becomes findable when the request gives back everything. `pages`: see GroupedScheduler; then steps are done one
    by one.
    """

    def __init__(
        self, config: EngineConfig, cache: GroupPages, policy: AdmissionPolicy, *, pages: PageSource | None = None
    ) -> None:
        super().__init__(config, cache, policy, pages=pages)
        self._counted = cache
        self.running = Running(cache, self.wheel, None)
        self.preemptor = CountingPreemptor(
            self.running, self.waiting, cache, self.pages, self.mark, self.needs.page_blocks
        )
        self._prefill = CountingPrefill(self.running, cache, self)

    def _settle(self, joined: list[Request]) -> None:
        """Let running requests give back what none of their later tokens sees. `joined`: those that began to decode."""
        cache = self._counted
        cache.end_step()
        for request in joined:
            holding = request.holding
            assert holding is not None
            cache.settle(holding, request.num_computed)
            cache.start_decoding(holding, request.admission)
        chunked = self.running.chunked
        if chunked is not None:
            holding = chunked.holding
            assert holding is not None
            cache.settle(holding, chunked.num_computed)
        cache.count()

    def horizon(self, now_ns: int) -> int:
        """Return how many steps are alike as far as requests go; `leap` says when memory ends it earlier."""
        wheel = self.wheel
        if self.running.chunked is not None or not wheel.num_decoding:
            return 0
        num_left = self.parts.num_free - wheel.pages_due() * self.needs.page_blocks
        if num_left < 0:
            return 0
        if self.waiting.num_waiting:
            blocked = self.blocked
            if blocked is Blocked.NOT or self.waiting.head(now_ns) is not self.blocked_head:
                return 0
            if blocked is Blocked.BUDGET and wheel.num_decoding < self.pages.token_budget:
                return 0
            if blocked is Blocked.PAGES and (self.num_pages_wanted <= num_left or self._fills_known_page()):
                return 0
        return wheel.steps_to_finish()

    def _fills_known_page(self) -> bool:
        """Return whether a decode fills a page in the next step that others may find."""
        return bool(self.running.num_sharing) and self._counted.fills_known_page()

    def leap(self, most_steps: int) -> RunLeap:
        """Do up to `most_steps` of the steps that `horizon` promised; all but the last have ended. `commit` follows."""
        num_wanted = self.num_pages_wanted if self.waiting.num_waiting and self.blocked is Blocked.PAGES else 0
        done = self._counted.leap(most_steps, num_wanted)
        finished = self.wheel.turn(len(done.taken) - 1)
        assert not finished, "a request ended in the middle of steps that are alike"
        return done

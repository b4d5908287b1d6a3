"""The scheduler of a model with KV groups in virtual time, which knows when steps are alike.

Steps that are alike are done one after the other by `take_alike` and `pass_alike`, and not scheduled.
"""

from __future__ import annotations

from kvarts.events import Blocked
from kvarts.sched.grouped import GroupedScheduler

__all__ = ["LeapingScheduler"]


class LeapingScheduler(GroupedScheduler):
    """A GroupedScheduler of an executor without ids, and without a reader of details."""

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

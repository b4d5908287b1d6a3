"""Memory for the head of the queue: what it finds in the cache, and whether the rest of what it needs is free."""

from __future__ import annotations

from typing import Final

from kvarts.base.limits import MOST_COUNT
from kvarts.core.events import Blocked
from kvarts.core.kv.cache import Cache, Pins
from kvarts.core.request import Request
from kvarts.core.sched.page_source import PageSource
from kvarts.core.sched.prefill import Prefill
from kvarts.core.sched.running import Running
from kvarts.core.sched.step import AGAIN, PASS, Ask, Step, Verdict, Wait

__all__ = ["Memory", "PartOfMemory"]

FOR_PAGES: Final = Blocked.PAGES


class Memory:
    """The gates `find` and `fits` of an engine with a memory of its own, or `admit`, which is both.

    `num_kept`: the blocks that an admission leaves free if a request runs. `finds_prefixes`: whether requests find
    cached pages. Owner of the memory's last refusal: as long as that certainly holds, nothing is looked for.
    """

    __slots__ = (
        "_cache",
        "_lacking",
        "_most_found",
        "_num_kept",
        "_page_size",
        "_pages",
        "_pins",
        "_prefill",
        "_running",
        "num_published",
    )

    def __init__(
        self,
        cache: Cache,
        pages: PageSource,
        running: Running,
        prefill: Prefill,
        pins: Pins | None,
        *,
        num_kept: int = 0,
        finds_prefixes: bool = True,
    ) -> None:
        self._cache = cache
        self._pages = pages
        self._running = running
        self._prefill = prefill
        self._pins = pins
        self._page_size = running.wheel.page_size
        self._num_kept = num_kept
        self._most_found = MOST_COUNT if finds_prefixes else 0
        self._lacking: tuple[Request, int, int, int, int] | None = None
        """The head that last lacked memory, the blocks it needs and their lower bound, its budget, and the pages it
        found."""
        self.num_published = -1
        """`num_published` of the cache at that time; -1 if the head must be matched again."""

    def forget(self) -> None:
        """Let the head be matched again: another request is the head, or others use what it found."""
        self.num_published = -1

    def most_pages(self, num_known: int) -> int:
        """Return the most pages that a request of `num_known` tokens may find.

        The last token is always computed: its logits are needed.
        """
        num_pages = (num_known - 1) // self._page_size
        return num_pages if num_pages < self._most_found else self._most_found

    def find(self, ask: Ask, step: Step) -> Verdict:
        """Match the head, unless it lacked memory and certainly still does."""
        budget, running = step.budget, self._running
        if running.num_late:
            running.publish_late()
        if self.num_published >= 0 and self._still_lacks(ask, budget):
            return Wait(FOR_PAGES, ask.num_wanted)
        request = ask.request
        num_known = ask.num_known = request.num_prompt_tokens + request.num_output_tokens
        match = ask.match = self._cache.match(request.content, self.most_pages(num_known))
        ask.hit_tokens = match.num_pages * self._page_size
        num_new = self._prefill.most_tokens
        ask.num_new = budget if budget < num_new else num_new
        ask.num_kept = self._num_kept if running.num_running else 0
        ask.num_wanted = 0
        return PASS

    def admit(self, ask: Ask, step: Step) -> Verdict:
        """Do both in one, for an engine without gates between them: match the head, and let it pass if it fits."""
        cache, running, budget = self._cache, self._running, step.budget
        if running.num_late:
            running.publish_late()
        if self.num_published >= 0 and self._still_lacks(ask, budget):
            return Wait(FOR_PAGES, ask.num_wanted)
        request = ask.request
        num_known = ask.num_known = request.num_prompt_tokens + request.num_output_tokens
        match = ask.match = cache.match(request.content, self.most_pages(num_known))
        ask.hit_tokens = match.num_pages * self._page_size
        most_new = self._prefill.most_tokens
        num_new = ask.num_new = budget if budget < most_new else most_new
        num_kept = ask.num_kept = self._num_kept if running.num_running else 0
        num_wanted = ask.num_wanted = cache.needs.to_admit(match, num_known, num_new, num_kept)
        num_short = num_wanted - cache.num_free
        return PASS if num_short <= 0 else self.free(ask, step, num_short)

    def fits(self, ask: Ask, step: Step) -> Verdict:
        """Let the head pass if the blocks that it needs are free, or are freed for it."""
        num_wanted = self._cache.needs.to_admit(ask.match, ask.num_known, ask.num_new, ask.num_kept)
        if num_wanted > ask.num_wanted:  # else a draft needs more
            ask.num_wanted = num_wanted
        num_short = ask.num_wanted - self._cache.num_free
        return PASS if num_short <= 0 else self.free(ask, step, num_short)

    def free(self, ask: Ask, step: Step, num_short: int) -> Verdict:
        """Free the `num_short` blocks that the head lacks, by giving up stores and pins or by other models."""
        cache, pages, request, match = self._cache, self._pages, ask.request, ask.match
        num_matched = cache.needs.lent_of(match) if cache.lender.num_lent() else 0
        if pages.reclaim_lent(num_short, num_matched):
            return AGAIN  # it may now have to take pages that it shared with stores
        if self._pins is not None and self._pins.num_pins and self._pins.give_up_oldest():
            return AGAIN  # it may now have to take pages that it shared with the pin
        if pages.preempt_for(request, ask.num_wanted, to_admit=True):
            return PASS
        ask.least = cache.needs.least_to_admit(match, ask.num_known, ask.num_new) + ask.num_kept + num_matched
        self._lacking = request, ask.num_wanted, ask.least, step.budget, match.num_pages
        self.num_published = cache.num_published
        cache.needs.watch()
        return Wait(FOR_PAGES, ask.num_wanted)

    def _still_lacks(self, ask: Ask, budget: int) -> bool:
        """Return whether the head was found to lack memory and certainly still does.

        Its need cannot shrink as long as no page becomes findable that it could use, its budget is not smaller, and no
        other holder references pages that it hits, as an admitted request, a store to a tier below or a reservation
        would. Other models may have freed memory for it since.
        """
        assert self._lacking is not None
        request, num_wanted, least_wanted, least_budget, num_found = self._lacking
        if self.num_published != self._cache.num_published and self._cache.needs.may_shrink(num_found):
            return False
        if request is not ask.request or least_wanted <= self._cache.num_free or budget < least_budget:
            return False
        if self._pins is not None and self._pins.num_pins:
            return False
        if self._num_kept and not self._running.num_running:
            return False  # the memory that it was to leave free is for others
        ask.num_wanted, ask.least = num_wanted, least_wanted
        return True


class PartOfMemory(Memory):
    """The same gates where models share the memory of a device: what is free is not all free to admit."""

    __slots__ = ()

    def fits(self, ask: Ask, step: Step) -> Verdict:
        """Let the head pass if the blocks that it needs are free to admit it, or are freed for it."""
        num_wanted = self._cache.needs.to_admit(ask.match, ask.num_known, ask.num_new, ask.num_kept)
        if num_wanted > ask.num_wanted:
            ask.num_wanted = num_wanted
        num_short = ask.num_wanted - self._pages.num_free_to_admit(ask.num_wanted)
        if num_short <= 0:
            return PASS
        verdict = self.free(ask, step, num_short)
        self.forget()  # other models may free memory at any time
        return verdict

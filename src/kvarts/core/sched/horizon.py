"""The number of coming steps that are certain to be identical.

Each possible event sets a bound, and the least bound is the result. An example: the decodes drawn in
kvarts.core.sched.wheel, with three free pages; C samples its last token in the tenth step:

    step         0 1 2 3 4 5 6 7 8 9
    pages due    1 1 1 0 1 1 1 0 1 1
    free after   2 1 0 0 lacks one

    last token       10 steps     `steps_to_finish`
    memory            4 steps     a fourth page is needed in step 4
    head of queue     any         it waits for pages, and decodes only take more
    -> 4 steps; then one is scheduled, which preempts

Three decodes take at most (10 // 4 + 1) * 3 = 9 pages in ten steps. With 9 free pages memory therefore sets no bound,
and the sum over steps is not computed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Final

from kvarts.core.events import Blocked
from kvarts.core.kv.cache import Cache
from kvarts.core.request import Request
from kvarts.core.sched.page_source import PageSource
from kvarts.core.sched.policy import WaitingQueue
from kvarts.core.sched.running import Running

if TYPE_CHECKING:
    from kvarts.core.sched.loads import Loads

__all__ = ["Horizon"]

NOT_BLOCKED: Final = Blocked.NOT
FOR_BUDGET: Final = Blocked.BUDGET
FOR_PAGES: Final = Blocked.PAGES
LONG_PAGE: Final = 64
"""The tokens of a page from which on many steps lie between those in which decodes take or release pages."""


class Horizon:
    """Computes for how many steps every decode gets a token and nothing else happens. Changes nothing.

    `orders_matter`: the order in which pages are filled and evicted is reported, so one leap may not do both.
    """

    __slots__ = (
        "_cache",
        "_follows",
        "_is_alone",
        "_is_stepwise",
        "_loads",
        "_orders_matter",
        "_page_size",
        "_pages",
        "_places",
        "_running",
        "_waiting",
    )

    def __init__(
        self,
        running: Running,
        waiting: WaitingQueue,
        cache: Cache,
        pages: PageSource,
        *,
        orders_matter: bool,
    ) -> None:
        self._running = running
        self._waiting = waiting
        self._cache = cache
        self._pages = pages
        self._is_alone = pages.is_alone
        self._loads: Loads | None = None
        self._orders_matter = orders_matter
        self._page_size = running.wheel.page_size
        self._follows = cache.decodes is not None
        self._is_stepwise = cache.frees_skipped and cache.decodes is None
        """Whether the releases of decodes can only be determined step by step."""
        self._places: tuple[int, ...] = ()
        """The places in a page at which a decode takes, fills or releases pages, if they leave some steps between them
        in such a cache."""

    def note_for(self, loads: Loads) -> None:
        """End leaps where the tiers below must act."""
        self._loads = loads
        self._orders_matter = True

    def note_places(self, places: Collection[int]) -> None:
        """Let steps in which no decode releases pages, at one of `places`, takes or fills one be certain as well."""
        size = self._page_size
        if self._is_stepwise and size >= LONG_PAGE:
            self._places = tuple({0, size - 1, *((place + self._running.lag) % size for place in places)})

    def num_steps(self, now_ns: int, blocked: Blocked, blocked_head: Request | None, num_wanted: int) -> int:
        """Return the number of steps; 0 if the step at `now_ns` has to be scheduled.

        `blocked`: why `blocked_head`, the head when the queue was last examined, waits. `num_wanted`: the blocks that
        it waits for.
        """
        running, loads = self._running, self._loads
        cache = self._cache
        places = self._places
        if self._is_stepwise and (loads is not None or running.joined or not places):
            return 0
        wheel = running.wheel
        if not wheel.num_decoding or (loads is not None and loads.loaded):
            return 0
        if self._waiting.num_waiting and (self._is_alone or not self._pages.is_draining):
            # Decodes only take more pages and end no request, so a head that lacked pages or a place still lacks them.
            if blocked is NOT_BLOCKED or self._waiting.head(now_ns) is not blocked_head:
                return 0
            if blocked is FOR_BUDGET and wheel.num_decoding < self._pages.token_budget:
                return 0
        num_steps = min(wheel.steps_to_finish(), wheel.steps_with_all_growing())
        if places:
            # The last step may have released what the head waits for; in the next ones nothing is.
            is_lacking = self._waiting.num_waiting and blocked is FOR_PAGES
            if is_lacking and num_wanted <= cache.num_free + self._pages.num_lent():
                return 0
            return wheel.steps_before(places, num_steps)
        if self._follows:
            return num_steps if self._can_leap(blocked, num_wanted) else 0
        page_size = self._page_size
        most_pages = (num_steps // page_size + 1) * wheel.num_decoding
        if running.num_sharing:
            if blocked is FOR_PAGES:
                # A decode may fill a page that the head needs; then the head needs one page less.
                num_steps = min(num_steps, wheel.steps_to_filled_page(running.lag) - 1)
            elif self._orders_matter or not cache.has_empty(most_pages):
                # A filled page and an evicted one may be copies of one page, so their order matters. And a filled page
                # may have to be stored.
                num_steps = min(num_steps, wheel.steps_to_filled_page(running.lag))
        num_free = cache.num_free
        if loads is not None:
            num_to_spare = loads.tiers.pages_to_spare()
            if num_to_spare is None:
                return 0
            num_free = min(num_free, num_to_spare)
        if most_pages > num_free:
            num_steps = wheel.steps_within(num_free, num_steps)
        return num_steps

    def _can_leap(self, blocked: Blocked, num_wanted: int) -> bool:
        """Return whether the next step is identical, in a cache that follows decodes and ends leaps in time."""
        cache, running, loads = self._cache, self._running, self._loads
        if loads is not None and loads.tiers.pages_to_spare() is None:
            return False
        num_left = cache.num_free - running.wheel.pages_due() * cache.page_blocks
        if num_left < 0:
            return False
        if not self._waiting.num_waiting or blocked is not FOR_PAGES:
            return True
        if num_wanted <= num_left + self._pages.num_lent():
            return False
        return not running.num_sharing or cache.decodes is None or not cache.decodes.fills_known_page()

"""The order of SGLang's waiting queue, arranged before each batch of prompts: `--schedule-policy`.

An order that looks for the prefixes of waiting requests makes these recent in the radix cache.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from kvarts.core.config import BatchRules
from kvarts.core.content import Content
from kvarts.core.kv.cache import Match
from kvarts.core.kv.radix import RadixCache, RadixTree
from kvarts.core.request import Request
from kvarts.core.sched.policy import QueuePolicy

if TYPE_CHECKING:
    from kvarts.core.sched.state import SchedulerState

__all__ = ["FirstCome", "order_of_queue"]

REFRESH_EVERY: Final = 32
"""The pages that the first waiting requests would find become recent every so many tries of a batch of prompts."""
MOST_REFRESHED: Final = 128
"""The number of these requests, and the longest queue that is sorted by what its requests find."""
FEW_TOKENS: Final = 32
"""Tokens of a hit up to which a request waits for another one that is to compute as many of the same prefix."""


class FirstCome:
    """`fcfs`: the queue stays as it is. With eviction by LRU, the prefixes of its first requests stay recent."""

    __slots__ = ("_cache", "_num_tries", "_page_size", "_queue", "_refreshes", "_waiting", "found")

    def __init__(self, scheduler: SchedulerState, rules: BatchRules) -> None:
        cache, policy = scheduler.cache, scheduler.waiting.policy
        assert isinstance(cache, RadixCache) and isinstance(policy, QueuePolicy)
        self._cache: RadixCache = cache
        self._queue: QueuePolicy = policy
        self._waiting = scheduler.waiting
        self._page_size = scheduler.wheel.page_size
        self._refreshes = rules.eviction == "lru"
        self._num_tries = 0
        self.found: dict[Request, Match] = {}
        """What waiting requests found when they were looked at last."""

    def arrange(self) -> None:
        """Sort the queue for a try of a batch of prompts."""
        if not (self._refreshes and self._waiting.num_waiting):
            return
        if self._num_tries % REFRESH_EVERY == 0:
            for request in reversed(list(islice(self._waiting, MOST_REFRESHED))):
                self._visit(request)
        self._num_tries += 1

    def _visit(self, request: Request) -> Match:
        """Return what `request` finds, and make it recent."""
        return self.find(request, request.num_known // self._page_size)

    def find(self, request: Request, limit: int) -> Match:
        """Return what `request` finds of its first `limit` pages, and make it recent."""
        tree, match = self._cache.radix, self.found.get(request)
        if match is None or not tree.is_longest(match, limit):
            match = self.found[request] = tree.match(request.content, limit)
        tree.visit(match)
        return match


class LongestPrefix(FirstCome):
    """`lpm`: those that find most first. Of those that find little and share a prefix, all but one come last."""

    __slots__ = ()

    def arrange(self) -> None:
        """Sort the queue, unless it is long."""
        if self._waiting.num_waiting > MOST_REFRESHED:
            super().arrange()
            return
        page_size, prompts = self._page_size, RadixTree()
        keys: dict[Request, float] = {}
        for request in self._waiting:
            content, num_known = request.content, request.num_known
            match = self._visit(request)
            keys[request] = -min(match.num_pages * page_size, num_known - 1)
            if self._cache.num_on_device(match) * page_size <= FEW_TOKENS:
                tokens = Content(
                    content.units,
                    num_tokens=content.num_known_tokens,
                    page_size=1,
                    unit_tokens=content.unit_tokens,
                    owner=content.owner,
                    salt=content.salt,
                )
                of_others = prompts.match(tokens, num_known)
                if of_others.num_pages >= FEW_TOKENS:
                    keys[request] = float("inf")
                else:
                    prompts.insert(prompts.pin(of_others), tokens, num_known)
        self._queue.arrange(sorted(self._waiting, key=keys.__getitem__))


class DepthFirst(FirstCome):
    """`dfs-weight`: a walk through the tree, first to the runs that most of the queue find, and deepest first."""

    __slots__ = ()

    def arrange(self) -> None:
        """Sort the queue."""
        requests = list(self._waiting)
        order = self._cache.radix.depth_first([self._visit(request) for request in requests])
        self._queue.arrange([requests[index] for index in order])


class ByPriority(FirstCome):
    """`fcfs` with priorities: the most important first, then in the order in which they were queued."""

    __slots__ = ("_sign",)

    def __init__(self, scheduler: SchedulerState, rules: BatchRules) -> None:
        super().__init__(scheduler, rules)
        self._sign = rules.sign

    def arrange(self) -> None:
        """Sort the queue, in which those that came since the last time are last."""
        self._queue.arrange(sorted(self._waiting, key=lambda request: request.priority * self._sign))
        super().arrange()


ORDERS: Final[dict[str, type[FirstCome]]] = {"fcfs": FirstCome, "lpm": LongestPrefix, "dfs-weight": DepthFirst}
"""Orders by SGLang's names."""


def order_of_queue(scheduler: SchedulerState, rules: BatchRules) -> FirstCome:
    """Return the order that the rules name."""
    kind = ByPriority if rules.has_priorities else ORDERS[rules.policy]
    return kind(scheduler, rules)

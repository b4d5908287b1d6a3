"""The order in which requests of several owners enter an engine, so that no owner starves the others.

An engine runs a limited number of requests at once, and their KV fills a limited number of tokens of memory. Owners
share both, see Shares. Requests wait here, by owner; the owner with the fewest tokens relative to its share is next.
Only requests that can begin are passed to the engine, because requests that wait in the engine share one queue.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping

from kvarts.base.tenants import Shares

__all__ = ["Entry", "Gate"]


class Entry:
    """One request: it waits, is inside, or has left. `begin` receives whether it runs within its owner's guarantee.

    `num_prompt_tokens` of its `num_tokens` are its prompt.
    """

    __slots__ = ("_begin", "has_left", "is_inside", "is_prefilled", "num_charged", "num_prompt_tokens", "num_tokens",
                 "owner")  # fmt: skip

    def __init__(self, owner: str, num_tokens: int, num_prompt_tokens: int, begin: Callable[[bool], object]) -> None:
        self.owner = owner
        self.num_tokens = num_tokens
        self.num_prompt_tokens = num_prompt_tokens
        self.num_charged = 0
        self.is_inside = False
        self.is_prefilled = False
        self.has_left = False
        self._begin: Callable[[bool], object] | None = begin
        """None from its entry on: it holds the request, which holds this entry."""

    def enter(self, *, is_guaranteed: bool) -> None:
        """Begin the request."""
        self.is_inside = True
        begin, self._begin = self._begin, None
        assert begin is not None, "a request enters once"
        begin(is_guaranteed)

    def leave(self) -> None:
        """End the request, which does not enter any more."""
        self.has_left = True
        self._begin = None


class Gate:
    """Owner of the requests that wait to enter one engine, and of those inside. For one event loop.

    `num_seqs` run at once, with `num_tokens` of KV memory. `num_prefill`: limit of each owner's uncomputed prompt
    tokens inside; one longer prompt may enter if it is the only one.
    """

    entry = Entry
    """Makes an entry."""

    def __init__(self, num_seqs: int, num_tokens: int, num_prefill: int, shares: Mapping[str, float]) -> None:
        self._shares = dict(shares)
        self._seats = Shares(num_seqs, shares)
        self._tokens = Shares(num_tokens, shares)
        self._num_prefill = num_prefill
        self._waiting: OrderedDict[str, deque[Entry]] = OrderedDict()
        self._prefilling: dict[str, int] = {}
        """Prompt tokens of requests inside that are not computed yet, by owner."""
        self._times: dict[str, float] = {}
        """Virtual time of each owner: its tokens so far, divided by its share."""
        self._now = 0.0
        """Virtual time of the last entry; an owner that was idle starts from here."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait here."""
        return sum(map(len, self._waiting.values()))

    def add(self, entry: Entry) -> None:
        """Queue a request, and admit it if it is its turn."""
        waiting = self._waiting.get(entry.owner)
        if waiting is None:
            waiting = self._waiting[entry.owner] = deque()
            self._times[entry.owner] = max(self._times.get(entry.owner, 0.0), self._now)
        waiting.append(entry)
        self._let_in()

    def prefilled(self, entry: Entry) -> None:
        """Record that the prompt of a request inside has been computed."""
        if entry.is_inside and not entry.is_prefilled:
            self._note_prefilled(entry)
            self._let_in()

    def leave(self, entry: Entry, num_tokens: int) -> None:
        """Remove a request that is over or no longer wanted; `num_tokens` of it were known at that point."""
        if entry.has_left:
            return
        entry.leave()
        if not entry.is_inside:
            waiting = self._waiting[entry.owner]
            waiting.remove(entry)
            if not waiting:
                del self._waiting[entry.owner]
            return
        entry.is_inside = False
        if not entry.is_prefilled:
            self._note_prefilled(entry)
        self._seats.give(entry.owner)
        self._tokens.give(entry.owner, entry.num_charged)
        self._times[entry.owner] -= max(0, entry.num_tokens - num_tokens) / self._share(entry.owner)
        self._let_in()

    def _note_prefilled(self, entry: Entry) -> None:
        entry.is_prefilled = True
        left = self._prefilling[entry.owner] - entry.num_prompt_tokens
        if left:
            self._prefilling[entry.owner] = left
        else:
            del self._prefilling[entry.owner]

    def _let_in(self) -> None:
        while (owner := self._next()) is not None:
            waiting = self._waiting[owner]
            entry = waiting.popleft()
            if not waiting:
                del self._waiting[owner]
            entry.num_charged = self._charge(entry)
            self._seats.force(owner)
            self._tokens.force(owner, entry.num_charged)
            self._prefilling[owner] = self._prefilling.get(owner, 0) + entry.num_prompt_tokens
            self._now = max(self._now, self._times[owner])
            self._times[owner] += entry.num_tokens / self._share(owner)
            entry.enter(is_guaranteed=self._seats.over(owner) <= 0 and self._tokens.over(owner) <= 0)

    def _next(self) -> str | None:
        """Return the owner of the next request to enter; None if none can."""
        in_turn = sorted(self._waiting, key=lambda owner: (self._times[owner], owner))
        is_owed = False
        for owner in in_turn:
            entry = self._waiting[owner][0]
            amount = self._charge(entry)
            if self._seats.over(owner) < 0 and self._tokens.over(owner) + amount <= 0:
                if self._seats.room(owner) >= 1 and self._tokens.room(owner) >= amount:
                    if self._may_prefill(entry):
                        return owner
                else:
                    is_owed = True  # its guarantee is lent: no owner borrows more meanwhile
        if is_owed:
            return None
        for owner in in_turn:
            entry = self._waiting[owner][0]
            if (
                self._seats.room(owner) >= 1
                and self._tokens.room(owner) >= self._charge(entry)
                and self._may_prefill(entry)
            ):
                return owner
        return None

    def _may_prefill(self, entry: Entry) -> bool:
        under_way = self._prefilling.get(entry.owner, 0)
        return not under_way or under_way + entry.num_prompt_tokens <= self._num_prefill

    def _charge(self, entry: Entry) -> int:
        """Return the tokens charged to a request's owner: those of the request, at most the owner's guarantee."""
        return min(entry.num_tokens, max(1, self._tokens.guaranteed(entry.owner)))

    def _share(self, owner: str) -> float:
        return self._shares.get(owner, 1.0)

"""The decode wheel: which decoding requests need a page next, and which finish next.

Each decoding request computes one token per step, so a request that needs a page in some step needs its next one
page_size steps later. The wheel has page_size slots; a request is in the slot of the steps in which it needs a page.
The pages that the decodes need over k steps are a sum over slots, whatever requests are in them; k steps are a turn of
the wheel, and only requests that finish are touched. Requests that bring their own pages need none.

An example, with pages of 4 tokens. Before step 0, A has 8 computed tokens, B has 6 and C has 7. A's pages are full, so
it needs its third page at once; C has room for one more token and B for two:

    slot         0     1     2     3
    requests     A     C     B     -
    steps      0 4 8 1 5 9 2 6 10  3 7 11

Steps 0 to 5 pass slots 0, 1, 2, 3, 0, 1 and so need 1, 1, 1, 0, 1, 1 pages: five, found without looking at a request.
Then the wheel is at step 6, and A has `wheel_base` 8 + 6 = 14 computed tokens although nothing has touched it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final

from kvarts.core.request import Request

if TYPE_CHECKING:
    from kvarts.core.kv.groups import PagesOfSession, SinkWindow

__all__ = ["DecodeWheel", "PagesDue"]

NEVER: Final = (1 << 62) - 1
MOST_STALE: Final = 64
"""The number of outdated entries of the queue of last tokens that is tolerated in addition to one per decode."""
STEP_BITS: Final = 32
"""Bits of an admission in the order of ends; the step is in the bits above. There are fewer than 2**32 admissions. The
step is shifted, since compiled code multiplies numbers above 2**30 as objects."""
FEW_STEPS: Final = 4
"""The number of steps per slot with pages due up to which the slots of these steps are looked at, one by one."""


class PagesDue:
    """The pages that decodes need in each of `num_steps` steps, `total` in all: in every `period` steps the same.

    `offsets`: the steps of the first period in which any are needed, in no order; `counts`: how many, for each of them.
    """

    __slots__ = ("counts", "num_steps", "offsets", "period", "total")

    def __init__(self, num_steps: int, period: int, offsets: list[int], counts: list[int], total: int) -> None:
        self.num_steps = num_steps
        self.period = period
        self.offsets = offsets
        self.counts = counts
        self.total = total

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Iterator[int]:
        pages = [0] * self.num_steps
        for offset, count in zip(self.offsets, self.counts, strict=True):
            for step in range(offset, self.num_steps, self.period):
                pages[step] = count
        return iter(pages)


class DecodeWheel:
    """Owner of `step`, the number of the next step, and of each decoding request's `wheel_base` and `stop_step`.

    In step s a request on the wheel has `wheel_base + s` tokens computed before the step and one more after it.
    """

    __slots__ = (
        "_base_sum",
        "_ending",
        "_filling",
        "_finishing",
        "_members",
        "_needing",
        "_needing_step",
        "_next_stop",
        "_num_due",
        "_num_growing",
        "_slots_due",
        "last_stop",
        "num_decoding",
        "num_full",
        "num_rests",
        "page_size",
        "step",
        "stop_sum",
        "window_places",
    )

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.step = 0
        self.num_rests = 0
        """Steps that have passed without the wheel, as its decodes computed nothing."""
        self.num_decoding = 0
        self._base_sum = 0
        self._num_due = [0] * page_size
        self._slots_due: dict[int, None] = {}
        """The slots of which `_num_due` is above 0, in no order."""
        self._members: list[dict[int, Request]] = [{} for _ in range(page_size)]
        self._needing: list[Request] = []
        """The requests that need a page in step `_needing_step`, unless that is -1."""
        self._needing_step = -1
        self.num_full = 0
        """The number of bounded requests that retain their maximum: the number of tokens that each sees is constant."""
        # Requests that see one more token in every step: all but the full ones, which are a constant in `_base_sum`.
        self._num_growing = 0
        # (step from which it is full, admission, request); entries of requests that left early are removed.
        self._filling: list[tuple[int, int, Request]] = []
        self.window_places: Counter[int] = Counter()
        """By place in a page: the number of requests that drop one of their own pages on computing a token there."""
        self._ending: dict[int, Request] = {}
        """All requests by the order of their ends: `stop_step`, then admission, as one number."""
        self._finishing: list[int] = []
        """A heap of these numbers. Those that are not in `_ending` are of requests that left early."""
        self._next_stop = NEVER
        """At most the least `stop_step`."""
        self.last_stop = 0
        """At least the largest `stop_step`."""
        self.stop_sum = 0
        """The sum of all `stop_step`."""

    def join(self, request: Request) -> None:
        """Add `request`: from the next step on it computes one token per step, until all its tokens are generated."""
        step, admission = self.step, request.admission
        base = request.num_computed - step
        request.wheel_base = base
        stop_step = request.stop_step = step + request.max_tokens - request.num_output_tokens - 1
        slot = -base % self.page_size
        self._members[slot][admission] = request
        self._needing_step = -1
        self.num_decoding += 1
        if request.own is None:
            # `_add_due`, inlined, as is `_remove_due` below: these run for every request.
            num_due = self._num_due[slot]
            self._num_due[slot] = num_due + 1
            if not num_due:
                self._slots_due[slot] = None
            self._num_growing += 1
            self._base_sum += base
        else:
            self._join_bounded(request, request.own)
        end = (stop_step << STEP_BITS) + admission
        self._ending[end] = request
        heappush(self._finishing, end)
        self.stop_sum += stop_step
        if stop_step > self.last_stop:
            self.last_stop = stop_step
        if stop_step < self._next_stop:
            self._next_stop = stop_step

    def leave(self, request: Request) -> None:
        """Remove `request` and bring its `num_computed` and `num_output_tokens` up to date."""
        base = request.wheel_base
        slot = -base % self.page_size
        admission, stop_step = request.admission, request.stop_step
        del self._members[slot][admission]
        del self._ending[(stop_step << STEP_BITS) + admission]
        self.stop_sum -= stop_step
        self._needing_step = -1
        self.num_decoding -= 1
        if request.own is None:
            num_due = self._num_due[slot] - 1
            self._num_due[slot] = num_due
            if not num_due:
                del self._slots_due[slot]
            self._num_growing -= 1
            self._base_sum -= base
        else:
            self._leave_bounded(request, request.own)
        num_steps = base + self.step - request.num_computed
        if num_steps:
            request.has_unread = True
        request.num_computed += num_steps
        request.num_output_tokens += num_steps
        request.stop_step = -1

    def skip(self, request: Request, num_tokens: int) -> None:
        """Count `num_tokens` more tokens of `request` as computed and generated before the next step.

        At least one token must be left to generate. The request takes pages of the pool.
        """
        assert 0 < num_tokens <= request.stop_step - self.step
        self._move(request, num_tokens)

    def hold(self, request: Request) -> None:
        """Let `request` compute nothing in the step that ends: `turn` follows."""
        self._move(request, -1)

    def _move(self, request: Request, num_tokens: int) -> None:
        assert request.own is None
        slot = -request.wheel_base % self.page_size
        del self._members[slot][request.admission]
        self._needing_step = -1
        self._remove_due(slot)
        self._base_sum += num_tokens
        request.wheel_base += num_tokens
        ending, admission = self._ending, request.admission
        del ending[(request.stop_step << STEP_BITS) + admission]
        stop_step = request.stop_step = request.stop_step - num_tokens
        self.stop_sum -= num_tokens
        if stop_step > self.last_stop:
            self.last_stop = stop_step
        slot = -request.wheel_base % self.page_size
        self._members[slot][admission] = request
        self._add_due(slot)
        finishing = self._finishing
        if len(finishing) > 2 * self.num_decoding + MOST_STALE:
            finishing[:] = [end for end in finishing if end in ending]
            heapify(finishing)
        end = (stop_step << STEP_BITS) + admission
        ending[end] = request
        heappush(finishing, end)
        if stop_step < self._next_stop:
            self._next_stop = stop_step

    def _add_due(self, slot: int) -> None:
        num_due = self._num_due[slot]
        self._num_due[slot] = num_due + 1
        if not num_due:
            self._slots_due[slot] = None

    def _remove_due(self, slot: int) -> None:
        num_due = self._num_due[slot] - 1
        self._num_due[slot] = num_due
        if not num_due:
            del self._slots_due[slot]

    def has(self, request: Request) -> bool:
        """Return whether `request` is on the wheel."""
        return request.stop_step >= 0

    # Questions --------------------------------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        """All steps that have passed: the number of the next one in events."""
        return self.step + self.num_rests

    @property
    def known_tokens(self) -> int:
        """The known tokens of all decoding requests in the next step; for bounded ones, the tokens that they see."""
        return self.known_tokens_after(0)

    def known_tokens_after(self, num_steps: int) -> int:
        """Return the same for `num_steps` steps later, at most as many as are identical."""
        return self._base_sum + self._num_growing * (self.step + num_steps + 1)

    def num_computed(self, request: Request) -> int:
        """Return how many tokens of `request`, which is on the wheel, are computed before the next step."""
        return request.wheel_base + self.step

    def pages_due(self) -> int:
        """Return how many pages the next step needs."""
        return self._num_due[self.step % self.page_size]

    def pages_due_by_step(self, num_steps: int) -> list[int]:
        """Return how many pages each of the next `num_steps` steps needs."""
        due, size = self._num_due, self.page_size
        first = self.step % size
        last = first + num_steps
        if last <= size:
            return due[first:last]
        turns = due[first:] + due * ((last - size) // size)
        return turns + due[: num_steps - len(turns)]

    def steps_within(self, num_pages: int, most: int) -> int:
        """Return for how many of the next `most` steps `num_pages` pages suffice."""
        due, size = self._num_due, self.page_size
        total = sum([due[slot] for slot in self._slots_due])
        if not total:
            return most
        num_steps = num_pages // total * size
        if num_steps >= most:
            return most
        num_left = num_pages % total
        first = self.step % size
        slots = sorted(self._slots_due)
        place = bisect_left(slots, first)
        for slot in slots[place:] + slots[:place]:
            num_left -= due[slot]
            if num_left < 0:
                num_steps += slot - first if slot >= first else slot - first + size
                break
        return num_steps if num_steps < most else most

    def pages_due_in(self, num_steps: int) -> PagesDue:
        """Return the same by the slots in which pages are due, however many steps there are."""
        due, size = self._num_due, self.page_size
        first = self.step % size
        offsets: list[int] = []
        counts: list[int] = []
        total = 0
        if num_steps <= size and num_steps < FEW_STEPS * len(self._slots_due):
            # It takes less time to look at the slots of the steps than at all slots with pages due.
            passed = due[first : first + num_steps]
            if len(passed) < num_steps:
                passed += due[: num_steps - len(passed)]
            for offset, count in enumerate(passed):
                if count:
                    offsets.append(offset)
                    counts.append(count)
                    total += count
            return PagesDue(num_steps, size, offsets, counts, total)
        for slot in self._slots_due:
            offset = slot - first
            if offset < 0:
                offset += size
            if offset < num_steps:
                count = due[slot]
                offsets.append(offset)
                counts.append(count)
                total += count * ((num_steps - 1 - offset) // size + 1)
        return PagesDue(num_steps, size, offsets, counts, total)

    def needing_page(self) -> Sequence[Request]:
        """Return the requests that need a page in the next step, in admission order."""
        if self._needing_step != self.step:
            self._needing = [request for request in self.computing_at(0) if request.own is None]
            self._needing_step = self.step
        return self._needing

    def computing_at(self, place: int) -> list[Request]:
        """Return the requests that compute a token at `place` in its page in the next step, in admission order."""
        members = self._members[(self.step - place) % self.page_size]
        return [members[admission] for admission in sorted(members)]

    def num_computing_at(self, place: int) -> int:
        """Return how many requests compute a token at `place` in its page in the next step."""
        return len(self._members[(self.step - place) % self.page_size])

    def completing_page(self, num_steps: int, lag: int = 0) -> list[Request]:
        """Return the requests that fill a page in the next `num_steps` steps, by step, then in admission order.

        `lag`: 1 for the same number of steps from the last one on. Requests that have just joined may be among them.
        """
        size = self.page_size
        filling: list[Request] = []
        for offset in range(1 - lag, min(num_steps, size) + 1 - lag):
            members = self._members[(self.step + offset) % size]
            filling += [members[admission] for admission in sorted(members)]
        return filling

    def having_filled(self, first_step: int, num_steps: int) -> list[Request]:
        """Return the requests that filled a page in `num_steps` steps from `first_step` on, each once.

        They are in the order of their first such step, then of admission. None has joined or left since.
        """
        size = self.page_size
        filled: list[Request] = []
        for step in range(first_step + 1, first_step + 1 + min(num_steps, size)):
            members = self._members[step % size]
            filled += [members[admission] for admission in sorted(members)]
        return filled

    def steps_to_filled_page(self, lag: int = 0) -> int:
        """Return the number of steps until any request fills a page, that step included. The wheel is not empty.

        `lag`: 1 for the steps until any has filled one before.
        """
        due, size = self._num_due, self.page_size
        return lag + next(offset for offset in range(1 - lag, size + 1) if due[(self.step + offset) % size])

    def steps_before(self, places: Sequence[int], most: int) -> int:
        """Return how many of the next `most` steps pass before any request computes a token at one of `places`.

        0 if some request brings its own pages.
        """
        size, step = self.page_size, self.step
        if self.num_decoding > self._num_growing:
            return 0
        for slot in self._slots_due:
            for place in places:
                num_steps = (slot + place - step) % size
                if num_steps < most:
                    most = num_steps
                    if not most:
                        return 0
        return most

    def steps_to_finish(self) -> int:
        """Return the number of steps until any request samples its last token, that step included."""
        finishing, ending = self._finishing, self._ending
        while True:
            request = ending.get(finishing[0])
            if request is not None:
                return request.stop_step - self.step + 1
            heappop(finishing)

    def steps_with_all_growing(self) -> int:
        """Return for how many coming steps each request is certain to see one more token than in the step before.

        At least 1. Durations are requested for that many steps at once.
        """
        if self.num_full:
            return 1
        return self._filling[0][0] - self.step if self._filling else NEVER

    def turn(self, num_steps: int) -> list[Request]:
        """Let `num_steps` steps pass, at most `steps_to_finish`.

        Remove the requests that sampled their last token in the last of them, and return them in admission order.
        """
        step = self.step = self.step + num_steps
        filling = self._filling
        while filling and filling[0][0] <= step:
            _, admission, request = heappop(filling)
            if request.admission == admission and request.own is not None:
                self._num_growing -= 1
                self._base_sum -= request.wheel_base
                self._fill(request.own.keeps)
        finished: list[Request] = []
        if self._next_stop < step:
            finishing, ending = self._finishing, self._ending
            next_stop = NEVER
            while finishing:
                first = ending.get(finishing[0])
                if first is not None:
                    if first.stop_step >= step:
                        next_stop = first.stop_step
                        break
                    finished.append(first)
                    self.leave(first)
                heappop(finishing)
            self._next_stop = next_stop
        return finished

    # Bounded requests -------------------------------------------------------------------------------------

    def _join_bounded(self, request: Request, own: PagesOfSession) -> None:
        keeps = own.keeps
        self.window_places.update(own.places)
        full_step = keeps.most_seen - request.wheel_base
        if full_step <= self.step:
            self._fill(keeps)
        else:
            self._num_growing += 1
            self._base_sum += request.wheel_base
            heappush(self._filling, (full_step, request.admission, request))

    def _leave_bounded(self, request: Request, own: PagesOfSession) -> None:
        keeps = own.keeps
        for place in own.places:
            self.window_places[place] -= 1
            if not self.window_places[place]:
                del self.window_places[place]
        full_step = keeps.most_seen - request.wheel_base
        if full_step <= self.step:
            self.num_full -= 1
            self._base_sum -= keeps.most_seen + 1
        else:
            self._num_growing -= 1
            self._base_sum -= request.wheel_base
            self._filling.remove((full_step, request.admission, request))
            heapify(self._filling)

    def _fill(self, keeps: SinkWindow) -> None:
        """Count a bounded request as full: from now on it sees a constant number of tokens, its own included."""
        self.num_full += 1
        self._base_sum += keeps.most_seen + 1

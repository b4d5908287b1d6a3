"""The decode wheel: who of the decoding requests needs a page next, and who finishes next.

Each decoding request computes one token a step, so a request that needs a page in some step needs its next one
page_size steps later. It sits in the slot, out of page_size slots, of the steps in which it needs one. What the
decodes need over k steps is a sum over slots, whoever they are; k steps pass by turning the wheel, and nobody is
touched but those who finish.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

from kvarts.request import Request

__all__ = ["DecodeWheel"]


class DecodeWheel:
    """Owner of `step`, the number of the next step, and of each decoding request's `wheel_base` and `stop_step`.

    In step s a request on the wheel has `wheel_base + s` tokens computed before the step and one more after it.
    """

    __slots__ = ("_base_sum", "_finishing", "_members", "_num_due", "num_decoding", "page_size", "step")

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.step = 0
        self.num_decoding = 0
        self._base_sum = 0
        self._num_due = [0] * page_size
        self._members: list[dict[int, Request]] = [{} for _ in range(page_size)]
        # (stop step, admission, request); entries of those who left early are recognised and dropped.
        self._finishing: list[tuple[int, int, Request]] = []

    def join(self, request: Request) -> None:
        """From the next step on `request` computes a token a step, until it has made all its tokens."""
        base = request.num_computed - self.step
        request.wheel_base = base
        request.stop_step = self.step + request.max_tokens - request.num_output_tokens - 1
        slot = -base % self.page_size
        self._num_due[slot] += 1
        self._members[slot][request.admission] = request
        self._base_sum += base
        self.num_decoding += 1
        heappush(self._finishing, (request.stop_step, request.admission, request))

    def leave(self, request: Request) -> None:
        """Takes `request` off the wheel and brings its `num_computed` and `num_output_tokens` up to date."""
        base = request.wheel_base
        slot = -base % self.page_size
        self._num_due[slot] -= 1
        del self._members[slot][request.admission]
        self._base_sum -= base
        self.num_decoding -= 1
        num_steps = base + self.step - request.num_computed
        request.num_computed += num_steps
        request.num_output_tokens += num_steps
        request.stop_step = -1

    # Questions --------------------------------------------------------------------------------------------

    @property
    def known_tokens(self) -> int:
        """The tokens known, in the next step, of all decoding requests together."""
        return self._base_sum + self.num_decoding * (self.step + 1)

    def num_computed(self, request: Request) -> int:
        """Tokens of `request`, which is on the wheel, computed before the next step."""
        return request.wheel_base + self.step

    def pages_due(self) -> int:
        """Pages needed in the next step."""
        return self._num_due[self.step % self.page_size]

    def pages_due_by_step(self, num_steps: int) -> list[int]:
        """Pages needed in each of the next `num_steps` steps."""
        due, size = self._num_due, self.page_size
        first = self.step % size
        last = first + num_steps
        if last <= size:
            return due[first:last]
        turns = due[first:] + due * ((last - size) // size)
        return turns + due[: num_steps - len(turns)]

    def needing_page(self) -> Iterable[Request]:
        """Who needs a page in the next step, in admission order."""
        members = self._members[self.step % self.page_size]
        return [members[admission] for admission in sorted(members)]

    def completing_page(self, num_steps: int) -> list[Request]:
        """Who fills at least one page in the next `num_steps` steps; of two that fill the same, the first first."""
        size = self.page_size
        filling: list[Request] = []
        for offset in range(1, min(num_steps, size) + 1):
            filling += self._members[(self.step + offset) % size].values()
        filling.sort(key=lambda request: (-request.wheel_base, request.admission))
        return filling

    def steps_to_filled_page(self) -> int:
        """How many steps until, and with, the next one in which a request fills a page; the wheel is not empty."""
        due, size = self._num_due, self.page_size
        return next(offset for offset in range(1, size + 1) if due[(self.step + offset) % size])

    def steps_to_finish(self) -> int:
        """How many steps until, and with, the one in which a request makes its last token; the wheel is not empty."""
        finishing = self._finishing
        while True:
            stop_step, admission, request = finishing[0]
            if request.admission == admission and request.stop_step == stop_step:
                return stop_step - self.step + 1
            heappop(finishing)

    def turn(self, num_steps: int) -> list[Request]:
        """`num_steps` steps have passed, at most `steps_to_finish`.

        Takes those off the wheel who made their last token in the last of them, and returns them in admission order.
        """
        step = self.step = self.step + num_steps
        finished: list[Request] = []
        finishing = self._finishing
        while finishing and finishing[0][0] < step:
            stop_step, admission, request = heappop(finishing)
            if request.admission == admission and request.stop_step == stop_step:
                finished.append(request)
                self.leave(request)
        return finished

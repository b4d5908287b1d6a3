"""The worked examples at the heads of files are true: the numbers that they draw, computed by the files."""

from __future__ import annotations

from typing import Any

from kvarts.content import Content
from kvarts.kv.runs import Stream, Turns
from kvarts.request import Request
from kvarts.sched.wheel import DecodeWheel


def decode(wheel: DecodeWheel, admission: int, num_computed: int, max_tokens: int) -> Request:
    request = Request(
        admission, Content(bytes(8 * 64), num_tokens=64, page_size=4, owner=admission), num_computed, max_tokens
    )
    request.admission = admission
    request.num_computed = num_computed
    wheel.join(request)
    return request


def test_the_wheel() -> None:
    wheel = DecodeWheel(4)
    a, _, _ = [decode(wheel, *each) for each in ((0, 8, 20), (1, 6, 20), (2, 7, 10))]
    assert wheel.pages_due_by_step(10) == [1, 1, 1, 0, 1, 1, 1, 0, 1, 1]
    assert wheel.steps_to_finish() == 10
    wheel.turn(6)
    assert wheel.num_computed(a) == 14
    assert a.num_computed == 8


class Account:
    """Counts evicted parts, of one byte each."""

    part_bytes = (1,)
    num_bounded = 1
    emits = False

    def __init__(self) -> None:
        self.num_evicted = 0

    def note_evicted(self, index: int, count: int) -> None:
        self.num_evicted += count


class Holding:
    """The holding of a stream, as far as that reads it."""

    admission = 0


def test_the_streams() -> None:
    holding: Any = Holding()
    account: Any = Account()
    a, b = Stream(holding, 0, 0, 1, keeps=True), Stream(holding, 0, 0, 3, keeps=True)
    turns = Turns()
    turns.streams = [a, b, a, b, a]
    assert turns.eat(account, 3) == account.num_evicted == 3
    assert (turns.at, a.low, b.low) == (3, 2, 1)
    assert turns.streams[turns.at] is b

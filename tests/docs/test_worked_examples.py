"""The worked examples at the heads of files are true: the numbers that they draw, computed by the files."""

from __future__ import annotations

from typing import Any

from kvarts.core.content import Content
from kvarts.core.kv import decodes
from kvarts.core.kv.groups import GroupMemory, PartGroup
from kvarts.core.kv.layers import KvLayer
from kvarts.core.kv.run_cache import RunCache
from kvarts.core.kv.runs import RunTable, Stream, Turns
from kvarts.core.request import Request
from kvarts.core.sched.wheel import DecodeWheel


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


class BlockTable:
    """The block table of a stream, as far as that reads it."""

    admission = 0


def test_the_streams() -> None:
    table: Any = BlockTable()
    account: Any = Account()
    a, b = Stream(table, 0, 0, 1, keeps=True), Stream(table, 0, 0, 3, keeps=True)
    turns = Turns()
    turns.streams = [a, b, a, b, a]
    assert turns.evict(account, 3) == account.num_evicted == 3
    assert (turns.at, a.low, b.low) == (3, 2, 1)
    assert turns.streams[turns.at] is b


def test_a_stream_with_a_hole() -> None:
    """The end of the same example: another sequence finds A's page 2."""
    table: Any = BlockTable()
    account: Any = Account()
    a, b = Stream(table, 0, 0, 1, keeps=True), Stream(table, 0, 0, 3, keeps=True)
    a.holes, a.watch = [(2, 3)], -1
    turns = Turns()
    turns.streams = [a, b, a, b, a]
    older, newer = Turns(), Turns()
    older.newer, newer.older = newer, older
    turns.list_after(older)
    assert turns.evict(account, 5) == account.num_evicted == 4, "all turns are taken, and that of page 2 is skipped"


def one_window(num_pages: int) -> tuple[RunCache, RunTable]:
    """A decode from position 0 on, with pages and a window of 4 tokens, alone in a memory of `num_pages` pages."""
    window = PartGroup(KvLayer(kind="window", num_heads=1, head_numbers=2, span=4), 1)
    cache = RunCache(GroupMemory((window,)), page_size=4, total_bytes=num_pages)
    content = Content.from_tokens(range(64), page_size=4, owner=0)
    table = cache.begin(content, cache.match(content, 0))
    cache.decodes.start(table, 0)
    return cache, table


def test_the_slots_of_decodes() -> None:
    cache, _ = one_window(16)
    begins, passes = [], []
    for step in range(12):
        num_due = cache.decodes.num_due[step % 4]
        if num_due:
            begins.append(step)
            cache.take_pages(num_due)
        num_released = cache.released_bytes
        cache.decodes.end_step()
        if cache.released_bytes > num_released:
            passes.append(step)
    assert begins == [0, 4, 8], "slot 0"
    assert passes == [6, 10], "slot 2, the window passes page 0 after step 6"


def test_a_leap_of_decodes() -> None:
    cache, _ = one_window(3)
    done = cache.decodes.leap(13, 0)
    assert done.taken == [1, 0, 0, 0] * 3 + [1]
    assert [step for step, count in enumerate(done.listed[0]) if count] == [6, 10]
    assert done.evicted == [0, 1], "page 0 is evicted for the fourth"
    taken = [sum(done.taken[: step + 1]) for step in range(13)]
    listed = [sum(done.listed[0][: step + 1]) for step in range(13)]
    free = [3 - count + back for count, back in zip(taken, listed, strict=True)]
    rows = {row[4:16].strip(): row[16:].split("empty")[0].split() for row in (decodes.__doc__ or "").splitlines()}
    assert [[int(number) for number in rows[name]] for name in ("taken", "released", "free after")] == [
        [count for count in done.taken if count],
        [count for count in done.listed[0] if count],
        [free[step] for step in (0, 4, 6, 8, 10, 12)],
    ], "the drawing"

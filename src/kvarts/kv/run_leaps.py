"""Many steps of a RunCache in which every decode computes a token, and nothing else happens.

The pages that decodes take and release in a step depend on its slot only, so sums over slots determine how far the
memory reaches. Parts are listed in the order of release, and evicted in the order of the list: step by step or at once,
the same parts are evicted.

An example: the decode drawn in kvarts.kv.decodes, alone in a memory of three pages, does 13 steps at once:

    step        0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12
    taken       1         1         1           1
    released                  1         1
    free after  2         1   2     1   2       1      empty, or listed and not evicted yet

Only the fourth page, in step 12, finds no empty memory: page 0, listed after step 6, is evicted for it, as it would be
step by step. No step lacks memory, so the leap is not cut. Had nothing been released, three pages would last
for 12 steps, and the leap would end there. Only the order of the list says which part is evicted, so it is enough to
evict the sum at the end.
"""

from __future__ import annotations

from kvarts.kv.decodes import turned
from kvarts.kv.run_cache import RunCache

__all__ = ["RunLeap", "leap"]


class RunLeap:
    """The outcome of steps. `taken`: pages taken, per step.

    For each group with windows or chunks, and each step: `listed` parts are released at its end and can be found,
    `emptied` parts become empty; `emptied` is empty if all released parts can be found. `evicted`: a group and a number
    of parts, repeated, in the order of the list.
    """

    __slots__ = ("emptied", "evicted", "listed", "taken")

    def __init__(self, taken: list[int], listed: list[list[int]], emptied: list[list[int]], evicted: list[int]) -> None:
        self.taken = taken
        self.listed = listed
        self.emptied = emptied
        self.evicted = evicted

    def end_odd(self, cache: RunCache) -> None:
        """End the last step, which is odd."""
        before = [(cache.num_used[index], cache.num_cached[index]) for index in cache.decodes.bounded]
        cache.end_step()
        for place, index in enumerate(cache.decodes.bounded):
            num_used, num_cached = before[place]
            num_listed = cache.num_cached[index] - num_cached
            self.listed[place][-1] = num_listed
            if self.emptied:
                self.emptied[place][-1] = num_used - cache.num_used[index] - num_listed

    def add(self, other: RunLeap) -> None:
        """Add the steps of `other`, which follow."""
        self.taken += other.taken
        for mine, others in zip(self.listed + self.emptied, other.listed + other.emptied, strict=True):
            mine.extend(others)
        self.evicted += other.evicted


def leap(cache: RunCache, most_steps: int, wanted_bytes: int) -> RunLeap:
    """Do up to `most_steps` steps; the first fits. The last is under way, and `end_step` must follow.

    It is one after which decodes lack memory before they release any; or, if a request waits for `wanted_bytes`, one
    after which these may be free when decodes have taken their pages, or a page becomes findable that the request may
    find.
    """
    assert cache.shared is None, "what other models do between steps is not known"
    decodes = cache.decodes
    done = _do(cache, decodes.steps_to_odd(most_steps), wanted_bytes)
    # A waiting request examines what odd releases free: it ends the leap, and so does one that is given up before them.
    while len(done.taken) < most_steps and decodes.is_odd and not wanted_bytes:
        if cache.wants is not None and cache.wants.has_work:
            break
        slot = (decodes.step + 1) % cache.page_size
        if cache.promised_bytes + decodes.num_due[slot] * cache.page_bytes > cache.free_bytes:
            break
        done.end_odd(cache)
        done.add(_do(cache, decodes.steps_to_odd(most_steps - len(done.taken)), 0))
    return done


def _do(cache: RunCache, most_steps: int, wanted_bytes: int) -> RunLeap:
    """Do the same in steps before an odd one, or up to it; its odd releases are left to the caller."""
    decodes, page_size = cache.decodes, cache.page_size
    slot = decodes.step % page_size
    num_steps = _num_certain(cache, slot, most_steps, wanted_bytes)
    taken = turned(decodes.num_due, slot, num_steps)
    bounded = decodes.bounded
    listed = [turned(decodes.num_listed[index], slot, num_steps) for index in bounded]
    emptied: list[list[int]] = []
    if not decodes.keeps_all:
        emptied = [turned(decodes.num_emptied[index], slot, num_steps) for index in bounded]
    num_ended = num_steps - 1
    if decodes.num_filling:
        _pass_and_fill(cache, num_steps)
    else:
        cache.pass_steps(num_ended)
    missing_bytes = _missing_bytes(cache, taken, emptied)
    for place, index in enumerate(bounded):
        if count := sum(listed[place]) - listed[place][num_ended]:
            cache.note_cached(index, count)
    evicted: list[int] = []
    if missing_bytes > 0:
        cache.evict_to(cache.empty_bytes + missing_bytes, evicted)
    cache.note_pages_taken(sum(taken))
    for index, of_group in zip(bounded, emptied, strict=False):
        if count := sum(of_group) - of_group[num_ended]:
            cache.note_empty(index, count)
    return RunLeap(taken, listed, emptied, evicted)


def _pass_and_fill(cache: RunCache, num_steps: int) -> None:
    """Let all but the last of `num_steps` steps pass, and publish the pages that decodes fill in each."""
    decodes = cache.decodes
    while num_steps:
        num_before = decodes.steps_to_filling(num_steps)
        if num_before < 0:
            break
        cache.pass_steps(num_before)
        cache.fill_pages()
        num_steps -= num_before
        if num_steps == 1:
            return
        cache.pass_steps(1)
        num_steps -= 1
    cache.pass_steps(num_steps - 1)


def _num_certain(cache: RunCache, slot: int, num_steps: int, wanted_bytes: int) -> int:
    """Return after how many of the next `num_steps` steps the leap ends."""
    decodes, page_size, page_bytes = cache.decodes, cache.page_size, cache.page_bytes
    if decodes.num_filling and (wanted_bytes or cache.wants is not None):
        num_filled = decodes.steps_to_filling(num_steps)
        if num_filled >= 0:
            # The waiting request may find a filled page; and the page is stored below in the step after that.
            num_steps = num_filled if wanted_bytes else num_filled + 1
    num_due, given_bytes = decodes.num_due, decodes.given_bytes
    left_bytes = cache.free_bytes - cache.promised_bytes - num_due[slot] * page_bytes
    if not wanted_bytes and (num_steps // page_size + 1) * decodes.num_decoding * page_bytes <= left_bytes:
        return num_steps
    for step in range(1, num_steps):
        back_bytes = given_bytes[slot]
        slot += 1
        if slot == page_size:
            slot = 0
        left_bytes -= num_due[slot] * page_bytes
        if left_bytes < 0:
            return step
        left_bytes += back_bytes
        if wanted_bytes and wanted_bytes <= left_bytes:
            return step
    return num_steps


def _missing_bytes(cache: RunCache, taken: list[int], emptied: list[list[int]]) -> int:
    """Return the bytes to evict: the most by which bytes taken up to a step exceed those empty or emptied before."""
    page_bytes = cache.page_bytes
    missing_bytes = sum(taken) * page_bytes - cache.empty_bytes
    if missing_bytes <= 0 or not any(map(any, emptied)):
        return missing_bytes
    sizes = [cache.part_bytes[index] for index in cache.decodes.bounded]
    most = missing_bytes = -cache.empty_bytes
    for step, num_pages in enumerate(taken):
        missing_bytes += num_pages * page_bytes
        most = max(most, missing_bytes)
        for of_group, num_bytes in zip(emptied, sizes, strict=True):
            missing_bytes -= of_group[step] * num_bytes
    return most

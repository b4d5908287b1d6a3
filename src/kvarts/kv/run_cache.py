"""A prefix cache with KV groups, by the run of pages: exactly what GroupedCache does page by page.

What is taken, released, found and evicted are runs of parts, see PartRun, so the cost of what is done does not depend
on how many pages it is about. The outcome is that of single parts: of a run that is released the last page comes first
in the list, and runs are eaten from their tails.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvarts.content import Content
from kvarts.kv.group_memory import GroupMemory
from kvarts.kv.pool import PageError
from kvarts.kv.shared_memory import SharedMemory
from kvarts.kv.span_tree import SpanTree
from kvarts.kv.spans import PartRing, PartRun, RunHolding, RunMatch

__all__ = ["RunCache"]


class RunCache:
    """Owner of all parts in `total_bytes`. The caller of what takes parts sees to it that they are free.

    Where it shares its memory, `total_bytes` is what it has of it now.
    """

    def __init__(self, memory: GroupMemory, *, page_size: int, total_bytes: int) -> None:
        groups = self.groups = memory.groups
        self.page_size = page_size
        self.total_bytes = total_bytes
        self.empty_bytes = total_bytes
        self.cached_bytes = 0
        self.num_used = [0] * len(groups)
        """Parts in use, by group."""
        self.num_cached = [0] * len(groups)
        """Parts that can be found and are not in use, by group."""
        self.num_evicted = [0] * len(groups)
        self.evicted_bytes = self.released_bytes = 0
        """Bytes of parts that were evicted, and of those that have gone out of use, since the beginning."""
        self.num_published = 0
        """How often something of known tokens, which others may find, became findable since the beginning."""
        self._keeps_all = memory.keeps == "all"
        self._is_state = [group.is_state for group in groups]
        self._part_bytes = [group.part_bytes for group in groups]
        self._kept = [self._keeps_all or not group.is_bounded for group in groups]
        self._of_tokens = [index for index, group in enumerate(groups) if not group.is_state]
        self._of_states = [index for index, group in enumerate(groups) if group.is_state]
        self._less = [index for index, group in enumerate(groups) if group.is_state or group.is_bounded]
        self._bounded = [index for index, group in enumerate(groups) if group.is_bounded]
        self._shared: SharedMemory | None = None
        self._released = PartRing()
        tree = self._tree = SpanTree(memory, page_size, self._released)
        self.match = tree.match
        self.num_shared = tree.num_shared
        self.num_idle = tree.num_idle

    @property
    def free_bytes(self) -> int:
        """Bytes that can be taken now: empty or cached."""
        return self.empty_bytes + self.cached_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of parts that sequences hold."""
        return self.total_bytes - self.free_bytes

    @property
    def room_bytes(self) -> int:
        """Bytes that can be taken now, whoever has them: the same, unless the memory is shared."""
        return self.free_bytes if self._shared is None else self._shared.num_free_bytes

    # A memory that others share ---------------------------------------------------------------------------

    def share(self, memory: SharedMemory) -> None:
        """Take all bytes from `memory` from now on, and give what is empty back to it; nothing was taken yet."""
        assert self.empty_bytes == self.total_bytes, "what is to be shared is in use"
        self._shared = memory
        self._released.tick = memory.tick
        self.resize(-self.total_bytes)

    def resize(self, num_bytes: int) -> None:
        """Add `num_bytes` empty bytes; below 0, take so many away."""
        self.total_bytes += num_bytes
        self.empty_bytes += num_bytes

    @property
    def next_stamp(self) -> int:
        """When the part was released that is evicted next; something is cached, and the memory is shared."""
        return self._released.oldest().stamp

    @property
    def next_bytes(self) -> int:
        """The bytes of that part, and of those that go right after it."""
        run = self._released.oldest()
        count = 1 if self._is_state[run.group] else run.end - run.span.start
        return count * self._part_bytes[run.group]

    # Taking and giving back -------------------------------------------------------------------------------

    def _take(self, index: int, count: int) -> None:
        num_bytes = count * self._part_bytes[index]
        if self.empty_bytes < num_bytes:
            if self._shared is None:
                self.evict(num_bytes)
            else:
                self._shared.make_room(num_bytes)
        self.empty_bytes -= num_bytes
        self.num_used[index] += count

    def evict(self, num_bytes: int) -> None:
        """Evict parts until `num_bytes` bytes are empty; that many are empty or cached here."""
        while self.empty_bytes < num_bytes:
            run = self._released.oldest()
            index, span = run.group, run.span
            part_bytes = self._part_bytes[index]
            count = 1 if self._is_state[index] else run.end - span.start
            num_enough = -(-(num_bytes - self.empty_bytes) // part_bytes)
            if num_enough < count:
                count = num_enough
                run.end -= count
                span.is_eaten = True
            else:
                self._released.remove(run)
                span.copies[index].remove(run)
                span.prune()
            self.num_cached[index] -= count
            self.num_evicted[index] += count
            self.evicted_bytes += count * part_bytes
            self.cached_bytes -= count * part_bytes
            self.empty_bytes += count * part_bytes

    def _hold(self, run: PartRun, holding: RunHolding) -> None:
        index = run.group
        if not run.holders:
            self._released.remove(run)
            count = 1 if self._is_state[index] else run.end - run.span.start
            self.num_used[index] += count
            self.num_cached[index] -= count
            self.cached_bytes -= count * self._part_bytes[index]
        run.holders.append(holding)
        holding.held[index].append(run)

    def _release(self, index: int, runs: Iterable[PartRun], holding: RunHolding) -> None:
        """End the hold of `runs` of a group, which are not in `holding.held` any more, one after the other."""
        is_state, part_bytes = self._is_state[index], self._part_bytes[index]
        for run in runs:
            run.holders.remove(holding)
            if run.holders:
                continue
            span = run.span
            count = 1 if is_state else run.end - span.start
            self.num_used[index] -= count
            self.released_bytes += count * part_bytes
            if run.is_kept:
                self._released.append(run)
                self.num_cached[index] += count
                self.cached_bytes += count * part_bytes
            else:
                span.copies[index].remove(run)
                span.prune()
                self.empty_bytes += count * part_bytes

    def _drop(self, index: int, count: int) -> None:
        """Give back `count` parts that cannot be found."""
        num_bytes = count * self._part_bytes[index]
        self.num_used[index] -= count
        self.released_bytes += num_bytes
        self.empty_bytes += num_bytes

    # Sequences --------------------------------------------------------------------------------------------

    def begin(self, content: Content, match: RunMatch) -> RunHolding:
        """Begin a sequence with what was found; the cache must not have changed since. `extend` may follow."""
        length = match.num_pages
        last = match.spans[-1] if match.spans else match.root
        if last.end > length:
            last = self._tree.split(last, length)
        holding = RunHolding(content, last, length * self.page_size, len(self.groups))
        last.num_users += 1
        if not length:
            return holding
        needed = [self._tree.needed(index, holding.num_tokens) for index in range(len(self.groups))]
        for index in self._bounded:
            for page in needed[index]:
                self._tree.cut(last, page)
        chain = last.chain()
        for index in self._of_tokens:
            sink, first = needed[index]
            for span in chain:
                if span.end <= sink or span.start >= first:
                    self._hold(span.copies[index][0], holding)
        for index in self._of_states:
            self._hold(last.copies[index][0], holding)
        return holding

    def extend(self, holding: RunHolding, num_tokens: int, *, is_end: bool = False) -> None:
        """Take what tokens up to `num_tokens` need, and make the pages that they fill findable.

        `is_end`: other sequences may go on from here: tails of windows are kept, and snapshots are made at the last
        page end up to there, on the way, if the memory has room for them.
        """
        page_end = num_tokens - num_tokens % self.page_size
        if is_end and page_end != num_tokens and page_end > holding.num_tokens:
            self._grow(holding, page_end, is_end)
        self._grow(holding, num_tokens, is_end)

    def take_page(self, holding: RunHolding) -> None:
        """Take the parts of the next page, of which no token is computed yet."""
        for index in self._of_tokens:
            self._take(index, 1)
        holding.num_open += 1

    def fill_page(self, holding: RunHolding, num_tokens: int) -> None:
        """Make the page that ends with `num_tokens` tokens findable; `take_page` took it."""
        holding.num_tokens = num_tokens
        self._name(holding)

    def settle(self, holding: RunHolding, num_tokens: int) -> None:
        """Give back what no token from `num_tokens` on attends to; all before are computed."""
        holding.num_tokens = num_tokens
        for index in self._less:
            held = holding.held[index]
            if not held:
                continue
            sink, first = self._tree.needed(index, num_tokens)
            if self._is_state[index]:
                if held[0].span.end <= first:
                    holding.held[index] = []
                    self._release(index, held, holding)
                continue
            given: list[PartRun] = []
            at = 0
            while at < len(held) and held[at].span.start < first:
                span = held[at].span
                if span.end <= sink:
                    at += 1
                elif span.start < sink:
                    self._tree.split(span, sink)
                    at += 1
                else:
                    if span.end > first:
                        self._tree.split(span, first)
                    given.append(held.pop(at))
            if given:
                given.reverse()
                self._release(index, given, holding)

    def missing_bytes(self, holding: RunHolding, num_new: int) -> int:
        """Return the bytes that the next `num_new` tokens need and `holding` does not have."""
        page_size = self.page_size
        num_pages = -(-(holding.num_tokens + num_new) // page_size) - -(-holding.num_tokens // page_size)
        num_bytes = sum(self._part_bytes[index] for index in self._of_tokens) * num_pages
        return num_bytes + sum(self._part_bytes[index] for index in self._of_states if not holding.num_states[index])

    def close(self, holding: RunHolding, num_full_pages: int) -> None:
        """Release everything, group by group, the deepest part first: what can be found is cached, the rest empty.

        Raise PageError for a holding that is closed.
        """
        if not holding.is_open:
            raise PageError("the holding is closed")
        holding.num_tokens = num_full_pages * self.page_size
        self._keep_tails(holding)
        for index, held in enumerate(holding.held):
            num_unnamed = holding.num_states[index] if self._is_state[index] else holding.num_open
            if num_unnamed:
                self._drop(index, num_unnamed)
            held.reverse()
            holding.held[index] = []
            self._release(index, held, holding)
        last = holding.last
        last.num_users -= 1
        last.prune()
        holding.is_open = False

    def clear(self) -> None:
        """Evict everything that is cached."""
        self.evict(self.free_bytes)

    def _grow(self, holding: RunHolding, num_tokens: int, is_end: bool) -> None:
        page_size = self.page_size
        num_pages = -(-num_tokens // page_size) - -(-holding.num_tokens // page_size)
        holding.num_tokens = num_tokens
        for index, group in enumerate(self.groups):
            if not group.is_state:
                self._take(index, num_pages)
            elif not holding.num_states[index]:
                self._take(index, 1)
                holding.num_states[index] = 1
        holding.num_open += num_pages
        self._name(holding)
        if is_end:
            self._keep_tails(holding)
            if not num_tokens % page_size:
                self._keep_snapshots(holding)

    def _name(self, holding: RunHolding) -> None:
        """Make parts of full pages findable."""
        content, last = holding.content, holding.last
        start, end = last.end, holding.num_tokens // self.page_size
        if start >= end:
            return
        self.num_published += start < content.num_known_pages
        holding.num_open -= end - start
        last.num_users -= 1
        while start < end:
            last = self._tree.after(last, content, start, end)
            for index in self._of_tokens:
                run = PartRun(index, last, [holding], is_kept=self._kept[index])
                last.copies[index].append(run)
                holding.held[index].append(run)
            start = last.end
        last.num_users += 1
        holding.last = last

    def _keep_tails(self, holding: RunHolding) -> None:
        """Mark what the token after the last full page attends to."""
        if self._keeps_all:
            return
        num_pages = holding.num_tokens // self.page_size
        for index in self._bounded:
            sink, first = self._tree.needed(index, num_pages * self.page_size)
            held = holding.held[index]
            for page in (sink, first):
                for run in held:
                    if run.span.start < page < run.span.end:
                        self._tree.split(run.span, page)
                        break
            for run in held:
                if run.span.end <= sink or run.span.start >= first:
                    run.is_kept = True

    def _keep_snapshots(self, holding: RunHolding) -> None:
        """Copy the states to parts of their own, as far as these are not there already and fit."""
        span = holding.last
        missing = [index for index in self._of_states if not span.copies[index]]
        if sum(self._part_bytes[index] for index in missing) > self.room_bytes:
            return
        self.num_published += 1
        for index in missing:
            self._take(index, 1)
            run = PartRun(index, span, [holding], is_kept=True)
            span.copies[index].append(run)
            self._release(index, (run,), holding)  # a copy that nothing holds

    # Laws -------------------------------------------------------------------------------------------------

    def check(self, holdings: Sequence[RunHolding]) -> None:
        """Assert that bytes are conserved, and that runs are held exactly as often as sequences say."""
        groups = self.groups
        used, cached = [0] * len(groups), [0] * len(groups)
        listed = {id(run) for run in self._released}
        held: dict[int, int] = {}
        for holding in holdings:
            for index, runs in enumerate(holding.held):
                used[index] += holding.num_states[index] if groups[index].is_state else holding.num_open
                for run in runs:
                    held[id(run)] = held.get(id(run), 0) + 1
                    assert run in run.span.copies[index], "L1: a part in use cannot be found"
        todo = list(self._tree.roots.values())
        while todo:
            span = todo.pop()
            todo += span.children.values()
            for child in span.children.values():
                assert child.parent is span and child.start == span.end, "L3: a span does not follow the one before"
            for index, runs in enumerate(span.copies):
                for run in runs:
                    assert run.span is span and len(run.holders) == held.get(id(run), 0), "L2: a part is held by others"
                    assert (id(run) in listed) == (not run.holders), "L2: a part is listed, and held"
                    counts = used if run.holders else cached
                    counts[index] += 1 if groups[index].is_state else run.end - span.start
                    assert run.end == span.end or (span.is_eaten and not run.holders), "L1: a run in use was eaten"
        assert used == self.num_used, f"L1: {used} parts used, counted {self.num_used}"
        assert cached == self.num_cached, f"L1: {cached} parts cached, counted {self.num_cached}"
        sizes = self._part_bytes
        assert sum(map(int.__mul__, cached, sizes)) == self.cached_bytes, "L1: cached bytes"
        in_use = sum(map(int.__mul__, used, sizes))
        assert in_use + self.cached_bytes + self.empty_bytes == self.total_bytes, "L1: bytes are lost"

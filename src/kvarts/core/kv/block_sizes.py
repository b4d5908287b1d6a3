"""KV groups whose blocks hold different numbers of tokens, as of Gemma 4 in vLLM: 32 where heads are few, else 16.

Pages are those of the smallest block. A group takes and releases `block_pages` of them at once, and a hit is a multiple
of all: what can be found ends at such a page. A span may end inside a block: the span of its last page has the block.

An example, of blocks of two pages in one group and of one page in the other; a sequence of five pages has

    page          0   1   2   3   4
    two at once  |-------|-------|-------|   six parts, the last of a page that is not begun
    one at once  |---|---|---|---|---|       five
    findable     |---------------|           four of each
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvarts.core.content import Content
from kvarts.core.kv.group_needs import GroupNeeds, Held
from kvarts.core.kv.groups import GroupMemory
from kvarts.core.kv.run_cache import RunCache
from kvarts.core.kv.runs import PartRun, RunMatch, RunTable, Span
from kvarts.core.kv.span_tree import SpanTree, common_end, covered_end, covered_from, covered_to, find

__all__ = ["SizedNeeds", "SizedParts", "SizedTree", "needs_of", "tree_of"]


def _rounded_up(page: int, block_pages: int) -> int:
    """Return the first page at or after `page` with which a block begins."""
    return -(-page // block_pages) * block_pages


class SizedTree(SpanTree):
    """The index of parts whose blocks differ in tokens: a hit ends where blocks of all groups do."""

    __slots__ = ("_hit_pages",)

    def __init__(
        self, memory: GroupMemory, page_size: int, look: Callable[[Span], object], *, num_below: int = 0
    ) -> None:
        super().__init__(memory, page_size, look, num_below=num_below)
        self._hit_pages = memory.hit_pages

    def needed(self, index: int, num_tokens: int) -> tuple[int, int]:
        """Return (s, f): later tokens need the first s pages of `num_tokens` tokens, and those from page f on."""
        sink, first = super().needed(index, num_tokens)
        return sink, first - first % self.block_pages[index]

    def match(self, content: Content, limit: int, *, depth: int = 0) -> RunMatch:
        """Return the longest hit of `content`, at most `limit` full pages, that every group can resume from."""
        assert not depth, "tiers have blocks of one size"
        root = span = self.root(content.salt)
        spans: list[Span] = []
        page = 0
        while page < limit and (child := span.children.get(content.key(page))) is not None:
            common = end = common_end(child, content, min(limit, child.end))
            for index in self._whole:
                first, stop = self._blocks(index, page, common)
                covered = covered_to(child.parts[index], first, stop)
                if covered < stop:
                    end = min(end, covered)
            if end > page:
                spans.append(child)
                page = end
            if end < common or common < child.end:
                break
            span = child
        known = page - page % self._hit_pages
        match = RunMatch(content, root, spans, self._longest(spans, known))
        while spans and spans[-1].start >= match.num_pages:
            spans.pop()
        if self._notes_branch and known > match.num_pages:
            match.branch = known
        return match

    def _blocks(self, index: int, start: int, end: int) -> tuple[int, int]:
        """Return the pages of the blocks of a group whose last pages are in [start, end), as the first and the end."""
        pages = self.block_pages[index]
        return start - start % pages, end - end % pages

    def _longest_of(self, index: int, spans: list[Span], length: int) -> int:
        """Return the longest hit, of at most `length` pages, that one group with windows can resume from."""
        while length:
            _, first = self.needed(index, length * self.page_size)
            begin = covered_from(index, spans, length, first)
            if begin <= first:
                return length
            shorter = begin if begin < length else covered_end(index, spans, length)
            length = shorter - shorter % self._hit_pages
        return 0

    def _head(self, index: int, spans: list[Span], sink: int) -> int:
        """Return how many pages a group has from the first on, up to `sink`."""
        page = 0
        for span in spans:
            _, stop = self._blocks(index, page, min(span.end, sink))
            page = covered_to(span.parts[index], page, stop)
            if page < stop:
                break
        return page

    def _pieces(self, spans: list[Span], length: int) -> list[list[tuple[PartRun, int, int]]]:
        """Return, by group, the parts with which a sequence begins after `length` pages."""
        pieces: list[list[tuple[PartRun, int, int]]] = []
        for index in range(self.num_groups):
            first = 0 if self._keeps_all[index] else self.needed(index, length * self.page_size)[1]
            found: list[tuple[PartRun, int, int]] = []
            for span in spans:
                start, end = self._blocks(index, span.start, span.end)
                if max(start, first) < min(end, length):
                    find(span.parts[index], max(start, first), min(end, length), found)
            pieces.append(found)
        return pieces


class SizedParts(RunCache):
    """Owner of parts whose groups take and release several pages at once, each its own number."""

    __slots__ = ("_block_pages", "_hit_pages")

    def _open_tree(self, memory: GroupMemory, num_below: int, finds_branches: bool) -> SpanTree:
        """Return the index of its parts, and prepare to count by block."""
        assert not finds_branches and self.total_bytes % memory.num_pieces == 0, "no whole blocks"
        self._block_pages = [group.block_pages for group in memory.groups]
        self._hit_pages = memory.hit_pages
        self._counts_pages = False
        self.empty_open()
        return SizedTree(memory, self.page_size, self.decodes.look, num_below=num_below)

    def _num_beyond(self, table: RunTable, index: int) -> int:
        """Return how many parts of a group `table` has beyond its last page."""
        return _rounded_up(table.num_taken, self._block_pages[index]) - table.num_taken

    def _take_to(self, table: RunTable, num_pages: int) -> None:
        """Take or give back the blocks with which `table` has its first `num_pages` pages."""
        before, table.num_taken = table.num_taken, num_pages
        for index, pages in enumerate(self._block_pages):
            count = _rounded_up(num_pages, pages) - _rounded_up(before, pages)
            if count > 0:
                self.take(index, count)
                if self.blocks is not None:
                    table.open_ids[index] = table.open_ids[index].with_more(self.take_ids(index, count))
            elif count:
                self.note_empty(index, -count)
                if self.blocks is not None:
                    ids = table.open_ids[index]
                    self.give_ids(ids.cut(max(0, len(ids) + count * self.part_blocks[index])))

    def take_next(self, table: RunTable, num_pages: int, end: int = 0) -> None:
        """Take the parts of the next `num_pages` pages, as far as blocks begin with them."""
        self._take_to(table, table.num_taken + num_pages)

    def drop_pages(self, table: RunTable, num_pages: int) -> None:
        """Undo `take_next` for all but the first `num_pages` pages of `table`."""
        assert num_pages >= table.num_named, "a page that can be found has no token"
        if num_pages < table.num_taken:
            self._take_to(table, num_pages)

    def missing_bytes(self, table: RunTable, num_new: int) -> int:
        """Return the bytes that the next `num_new` tokens need and `table` does not have."""
        num_pages = -(-(table.num_tokens + num_new) // self.page_size)
        return sum(
            [
                part_bytes * (_rounded_up(num_pages, pages) - _rounded_up(table.num_taken, pages))
                for part_bytes, pages in zip(self.part_bytes, self._block_pages, strict=True)
            ]
        )

    def publish_to(self, table: RunTable, end: int) -> None:
        """Make parts of full pages up to `end` findable, as far as a hit may end with them."""
        end -= end % self._hit_pages
        if end <= table.num_named:
            return
        if table.num_named < table.content.num_known_pages:
            self.num_published += 1
        spans = self.tree.extend(table, end)
        for index, held in enumerate(table.held):
            if self.sparse[index]:
                self._publish_retained(table, index, end, spans)
                continue
            first, table.first_open[index] = table.first_open[index], end
            if first < end:
                ids = table.open_ids[index].take_first((end - first) * self.part_blocks[index] if self.blocks else 0)
                run = PartRun(index, None, first, end, [table], is_kept=True, ids=ids)
                held.append(run)
                self._place(run, spans, table.content)
                if len(held) > 1:
                    held[-1].join_held(held[-2])
        if self.events is not None:
            self.events.flush()

    def _place(
        self, run: PartRun, spans: Sequence[tuple[Span, int, int]], content: Content, num_emitted: int = 0
    ) -> None:
        """Make `run` of a sequence with `content` findable, each block in the span of its last page."""
        pages = self._block_pages[run.group]
        super()._place(run, [(span, start, end - end % pages) for span, start, end in spans], content, num_emitted)

    def close(self, table: RunTable, num_full_pages: int, num_taken: int | None = None) -> None:
        """Release everything, group by group, the deepest part first."""
        for index in range(len(self._block_pages) if table.is_open else 0):
            if num_beyond := self._num_beyond(table, index):
                self.note_empty(index, num_beyond)
        super().close(table, num_full_pages, num_taken)

    def _num_private(self, table: RunTable, index: int) -> int:
        """Return how many parts of a group `table` has outside of runs."""
        return super()._num_private(table, index) + self._num_beyond(table, index)


class SizedNeeds(GroupNeeds):
    """Memory needs where groups take several pages at once: those of vLLM, block by block."""

    def of_page(self, page: int) -> int:
        """Return the blocks that a decode takes for the first token of `page`."""
        return sum([blocks * group.block_pages for group, blocks in self._groups if not page % group.block_pages])

    def to_compute(self, num_tokens: int) -> int:
        """Return the most blocks that `num_tokens` tokens need at one time, wherever their chunks begin and end."""
        return self._most_beside(num_tokens, 0)

    def _most_beside(self, num_tokens: int, num_hit: int) -> int:
        """Return the most blocks of `num_tokens` tokens at one time, beside those of the first `num_hit` pages."""
        num_pages, num_blocks = -(-num_tokens // self._page_size), 0
        caps = iter(self._caps)
        for group, part_blocks in self._groups:
            most = _rounded_up(num_pages, group.block_pages)
            if group.is_bounded:
                most = min(most, next(caps)[0])
            num_blocks += part_blocks * max(0, most - num_hit)
        return num_blocks

    def _beside_found(self, start: int, num_known: int, end: int, prefill_end: int) -> tuple[int, int]:
        """Return the blocks needed in addition to a match: the most at one time, and those of the first step."""
        num_hit, num_pages = start // self._page_size, -(-end // self._page_size)
        in_step = [blocks * (_rounded_up(num_pages, group.block_pages) - num_hit) for group, blocks in self._groups]
        return self._most_beside(num_known, num_hit), sum(in_step)

    def _idle(self, start: int, found: Held, *, of_whole: bool) -> int:
        """Return the blocks of a match that are not held, in groups that keep all tokens or in the others."""
        num_hit, num_blocks = start // self._page_size, 0
        for index, (group, part_blocks) in enumerate(self._groups if start else ()):
            if of_whole is self._keeps_all[index]:
                first = 0 if of_whole else group.layer.first_seen(start) // self._page_size
                first -= first % group.block_pages
                num_blocks += part_blocks * (num_hit - first - found.num_shared(index, first))
        return num_blocks


def needs_of(memory: GroupMemory, *, page_size: int, most_new: int, most_kept: int | None = None) -> GroupNeeds:
    """Return the needs in blocks of `memory`. Other arguments as of GroupNeeds."""
    make = SizedNeeds if memory.hit_pages > 1 else GroupNeeds
    return make(memory, page_size=page_size, most_new=most_new, most_kept=most_kept)


def tree_of(memory: GroupMemory, page_size: int, look: Callable[[Span], object], *, num_below: int = 0) -> SpanTree:
    """Return an index of parts in `memory`. Other arguments as of SpanTree."""
    make = SizedTree if memory.hit_pages > 1 else SpanTree
    return make(memory, page_size, look, num_below=num_below)

"""A prefix cache of a model with layers that do not keep every token: each page has a part in every KV group.

All parts draw on one memory, in bytes. A part is *used* while a sequence holds it, *cached* while it can be found and
is not used; cached parts of all groups are one list, the least recently released first. Empty bytes are taken before
anything is evicted.

* A running sequence holds in a group only the parts that a token computed now or later attends to. The others go back
  before the next tokens take theirs: into the list if they can be found, else they are empty. A window that is full
  takes a part and gives one back in turn.
* A prefix of n full pages is a hit if every group can go on from it: a group that attends to all tokens has all its
  parts, a window or a chunk those that the token after the prefix attends to, a group of states a snapshot taken there.
  The longest such n counts of which some group has the last page.
* The state of a running sequence is a part of its own. A snapshot is a copy of it at the end of a page, made where the
  caller says that a prefix ends, if the memory has room for it, and cached at once.

What a window gives back is kept as a `Retention` says. Work is by the page: RunCache, which has the same by runs, is
held against this.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from kvarts.base.limits import check_whole
from kvarts.core.content import Content
from kvarts.core.kv.groups import PartGroup, Retention
from kvarts.core.kv.pool import PageError, PageId

from oracles.part_events import reach
from oracles.part_pool import PartPool
from oracles.parts import GroupedTable, GroupMatch, Part

__all__ = ["GroupMatch", "GroupedCache", "GroupedTable", "PartGroup", "Retention"]


class GroupedCache(PartPool):
    """A PartPool, and the sequences that hold its parts. Raises PageError for a block table closed twice."""

    # What groups need -------------------------------------------------------------------------------------

    def _needed(self, group: PartGroup, num_tokens: int) -> tuple[int, int]:
        """Return (s, f): of the pages of `num_tokens` tokens, later ones need the first s and those from page f on."""
        if group.is_state:
            # A snapshot is read by the token after it only.
            is_page_end = num_tokens and not num_tokens % self.page_size
            return 0, num_tokens // self.page_size - 1 if is_page_end else -(-num_tokens // self.page_size)
        first = group.layer.first_seen(num_tokens) // self.page_size
        return min(-(-group.layer.sink // self.page_size), first), first

    def match(self, content: Content, limit: int) -> GroupMatch:
        """Return the longest prefix of `content`, at most `limit` full pages, that every group can go on from."""
        names = self._names.known(content, limit)
        return GroupMatch(names[: self._longest(name.copies for name in names)])

    def _longest(self, pages: Iterable[Sequence[object]]) -> int:
        """Return the longest prefix that every group can go on from. `pages`: which groups have a part of each page."""
        whole = [index for index, group in enumerate(self.groups) if group.layer.kind in ("full", "latent")]
        bounded = [(index, group) for index, group in enumerate(self.groups) if index not in whole]
        runs = dict.fromkeys((index for index, _ in bounded), 0)
        """Pages in a row, up to here, that a group has."""
        heads = dict(runs)
        """Pages in a row from the first on."""
        longest = 0
        for length, page in enumerate(pages, start=1):
            if not all(page[index] for index in whole):
                break
            can_go_on = any(page)
            for index, group in bounded:
                runs[index] = runs[index] + 1 if page[index] else 0
                if runs[index] == length:
                    heads[index] = length
                sink, first = self._needed(group, length * self.page_size)
                can_go_on = can_go_on and runs[index] >= length - first and heads[index] >= sink
            if can_go_on:
                longest = length
        return longest

    def reach(self, content: Content, limit: int) -> tuple[int, ...]:
        """Return for each group from how many pages of `content`, at most `limit`, it could go on by itself.

        As far as any group has a part of a page: what `match` finds is no longer than the least of these.
        """
        return reach(
            self._names.known(content, limit), [partial(self._needed, group) for group in self.groups], self.page_size
        )

    # Sequences --------------------------------------------------------------------------------------------

    def open(self, content: Content, match: GroupMatch, num_new: int, *, is_end: bool = False) -> GroupedTable | None:
        """Begin a sequence with what was found, and take what its next `num_new` tokens need, see `advance`.

        Return None, and change nothing, if that does not fit.
        """
        table = self._found(content, match)
        missing_bytes = self.missing_bytes(table, num_new)
        if missing_bytes + self.idle_bytes(table) > self.room_bytes:
            return None
        self._hold(table)
        self._grow(table, num_new, is_end)
        return table

    def begin(self, content: Content, match: GroupMatch) -> GroupedTable:
        """Begin a sequence with what was found; the cache must not have changed since. `extend` may follow."""
        table = self._found(content, match)
        self._hold(table)
        return table

    def _found(self, content: Content, match: GroupMatch) -> GroupedTable:
        """Return a block table of what was found, which holds nothing yet."""
        num_tokens = match.num_pages * self.page_size
        found = self.found_parts(match)
        return GroupedTable(content, num_tokens, list(match.names), found, [None] * len(self.groups))

    def found_parts(self, match: GroupMatch) -> list[dict[int, Part]]:
        """Return the parts that a sequence begins with after `match`, for each group by page."""
        found: list[dict[int, Part]] = []
        for index, group in enumerate(self.groups):
            sink, first = self._needed(group, match.num_pages * self.page_size)
            pages = (*range(sink), *range(first, match.num_pages))
            found.append({page: match.names[page].copies[index][0] for page in pages})
        return found

    def idle_bytes(self, table: GroupedTable) -> int:
        """Return the bytes of parts of a sequence that nothing holds."""
        return sum(
            self.groups[part.group].part_bytes for parts in table.parts for part in parts.values() if not part.refs
        )

    def _hold(self, table: GroupedTable) -> None:
        for parts in table.parts:
            self._pin_path(list(parts.values()))
        for name in table.names:
            self._names.use(name)

    def advance(self, table: GroupedTable, num_new: int, *, is_end: bool = False) -> bool:
        """Give back what no token from here on attends to, then take what the next `num_new` tokens need.

        Return whether that fits; if not, nothing was taken. `is_end`: other sequences may go on from here, as after a
        prompt: the tails of windows are kept, and a snapshot of states if a page ends here and there is room for it.
        """
        self._check_open(table)
        self._settle(table)
        if self.missing_bytes(table, num_new) > self.room_bytes:
            return False
        self._grow(table, num_new, is_end)
        return True

    # Prompts that are computed elsewhere

    def to_receive(self, match: GroupMatch, num_tokens: int) -> int:
        """Return the bytes that must be free for `open_to_receive`: what is taken, and what was idle and is held."""
        num_bytes = 0
        for index, group in enumerate(self.groups):
            found = self.found_parts(match)[index]
            if group.is_state:
                reads = match.num_pages * self.page_size == num_tokens - 1
                num_idle = sum(not part.refs for part in found.values()) if reads else 0
                num_bytes += group.part_bytes * (1 + num_idle)
                continue
            for page in self._last_needs(group, num_tokens):
                if page >= match.num_pages or not found[page].refs:
                    num_bytes += group.part_bytes
        return num_bytes

    def open_to_receive(self, content: Content, match: GroupMatch, num_tokens: int) -> GroupedTable:
        """Hold what was found, and take the other parts that the last of `num_tokens` tokens needs."""
        table = self._found(content, match)
        self._hold(table)
        table.num_tokens = num_tokens - 1
        self._settle(table)
        for index, group in enumerate(self.groups):
            if group.is_state:
                (table.states[index],) = self._take(index, 1)
                continue
            pages = [page for page in self._last_needs(group, num_tokens) if page >= match.num_pages]
            table.parts[index].update(zip(pages, self._take(index, len(pages)), strict=True))
        table.num_tokens = num_tokens
        return table

    def receive(self, table: GroupedTable) -> None:
        """Make findable what has arrived."""
        self._name(table)
        self._keep_tails(table)

    def _last_needs(self, group: PartGroup, num_tokens: int) -> list[int]:
        sink, first = self._needed(group, num_tokens - 1)
        return [*range(sink), *range(first, -(-num_tokens // self.page_size))]

    # What `advance` does, in parts, for a scheduler: the caller sees to it that everything fits.

    def extend(self, table: GroupedTable, num_tokens: int, *, is_end: bool = False) -> None:
        """Take what tokens up to `num_tokens` need, and make the pages that they fill findable.

        `is_end`: see `advance`; a snapshot is made at the last page end before its last token, on the way.
        """
        page_end = (num_tokens - 1) // self.page_size * self.page_size
        if any(group.is_state for group in self.groups):
            self._take_for(table, num_tokens)  # all its pages first: they evict no snapshot of its own
        if is_end and page_end > table.num_tokens:
            self._grow(table, page_end - table.num_tokens, is_end, is_midway=True)
        self._grow(table, num_tokens - table.num_tokens, is_end)

    def take_page(self, table: GroupedTable, page: int) -> None:
        """Take the parts of `page`, the next of `table`, of which no token is computed yet."""
        for index, group in enumerate(self.groups):
            if not group.is_state:
                (table.parts[index][page],) = self._take(index, 1)

    def fill_page(self, table: GroupedTable, num_tokens: int) -> None:
        """Make the page that ends with `num_tokens` tokens findable; `take_page` took it."""
        table.num_tokens = num_tokens
        self._name(table)

    def drop_pages(self, table: GroupedTable, num_pages: int) -> None:
        """Undo `take_page` for all but the first `num_pages` pages of `table`."""
        assert num_pages >= len(table.names), "a page that can be found has no token"
        for index, parts in enumerate(table.parts):
            pages = [page for page in parts if page >= num_pages]
            if pages:
                self._release(index, [parts.pop(page) for page in reversed(pages)])

    def settle(self, table: GroupedTable, num_tokens: int) -> None:
        """Give back what no token from `num_tokens` on attends to; all before are computed."""
        table.num_tokens = num_tokens
        self._settle(table)

    def clear(self) -> None:
        """Evict everything that is cached."""
        self.evict(self.free_bytes)

    def close(self, table: GroupedTable) -> None:
        """Release everything, group by group, the deepest part first: what can be found is cached, the rest empty."""
        self._check_open(table)
        self._keep_tails(table)
        for index, parts in enumerate(table.parts):
            state = table.states[index]
            if state is not None:
                self._release(index, (state,))
            self._release(index, [parts[page] for page in sorted(parts, reverse=True)])
        for name in reversed(table.names):
            self._names.drop(name)
        table.parts, table.states, table.names, table.snapshots = [], [], [], []
        table.is_open = False

    def _check_open(self, table: GroupedTable) -> None:
        if not table.is_open:
            raise PageError("the block table is closed")

    def _settle(self, table: GroupedTable) -> None:
        """Give back the parts that no token from here on attends to, the deepest first."""
        for index, (group, parts) in enumerate(zip(self.groups, table.parts, strict=True)):
            if group.layer.kind in ("full", "latent"):
                continue
            sink, first = self._needed(group, table.num_tokens)
            # Pages are in order, so what is given back follows those of the sink.
            given = []
            for page in parts:
                if page >= first:
                    break
                if page >= sink:
                    given.append(page)
            if given:
                if self._events is not None:
                    self._events.given_back(table.content, index, given)
                self._release(index, [parts.pop(page) for page in reversed(given)])

    def missing_bytes(self, table: GroupedTable, num_new: int) -> int:
        """Return the bytes that the next `num_new` tokens need and `table` does not have."""
        check_whole(num_new, "num_new")
        end_page = -(-(table.num_tokens + num_new) // self.page_size)
        num_pages = end_page - -(-table.num_tokens // self.page_size)
        num_bytes = 0
        for index, group in enumerate(self.groups):
            count = min(num_pages, 1) if self._aligned[index] else num_pages
            num_bytes += group.part_bytes * (table.states[index] is None if group.is_state else count)
        return num_bytes

    def _grow(self, table: GroupedTable, num_new: int, is_end: bool, *, is_midway: bool = False) -> None:
        self._take_for(table, table.num_tokens + num_new)
        table.num_tokens += num_new
        self._name(table)
        if is_end:
            self._keep_tails(table)
            if not (is_midway or table.num_tokens % self.page_size):
                self._keep_tails(table, num_before=1)
            if not table.num_tokens % self.page_size:
                self._keep_snapshots(table)

    def _take_for(self, table: GroupedTable, num_tokens: int) -> None:
        """Take what tokens up to `num_tokens` need and `table` does not have."""
        first_page, end_page = -(-table.num_tokens // self.page_size), -(-num_tokens // self.page_size)
        for index, group in enumerate(self.groups):
            if not group.is_state:
                parts = table.parts[index]
                pages = range(first_page, end_page)[-1:] if self._aligned[index] else range(first_page, end_page)
                missing = [page for page in pages if page not in parts]
                parts.update(zip(missing, self._take(index, len(missing)), strict=True))
            elif table.states[index] is None:
                (table.states[index],) = self._take(index, 1)

    def _keep_tails(self, table: GroupedTable, num_before: int = 0) -> None:
        """Mark what the token after the last full page attends to, or `num_before` pages before.

        The same prompt goes on a page before its end if that is a page end, as it computes its last token again.
        """
        num_pages = table.num_tokens // self.page_size - num_before
        for group, parts in zip(self.groups, table.parts, strict=True):
            if group.is_bounded:
                sink, first = self._needed(group, num_pages * self.page_size)
                for page in (*range(sink), *range(first, num_pages)):
                    if page in parts:
                        parts[page].is_kept = True

    def _name(self, table: GroupedTable) -> None:
        """Make parts of full pages findable."""
        names, content = table.names, table.content
        end_page = table.num_tokens // self.page_size
        if len(names) == end_page:
            return
        self.num_published += len(names) < content.num_known_pages
        name = names[-1] if names else self._names.root(content.salt)
        by_group = [
            (index, parts)
            for index, (group, parts) in enumerate(zip(self.groups, table.parts, strict=True))
            if not group.is_state
        ]
        events = self._events
        for page in range(len(names), end_page):
            name = self._names.after(name, content)
            name.num_users += 1
            names.append(name)
            for index, parts in by_group:
                part = parts.get(page)
                if part is not None:
                    if events is not None:
                        events.comes(content, index, name)
                    part.name = name
                    name.copies[index].append(part)
                    name.num_users += 1
        if events is not None:
            events.told()

    def _keep_snapshots(self, table: GroupedTable) -> None:
        """Copy the states to parts of their own, as far as these are not there already and fit."""
        name = table.names[-1]
        missing = [index for index, group in enumerate(self.groups) if group.is_state and not name.copies[index]]
        if sum(self.groups[index].part_bytes for index in missing) > self.room_bytes:
            return
        self.num_published += 1
        for index in missing:
            (part,) = self._take(index, 1)
            if self._events is not None:
                self._events.comes(table.content, index, name)
                self._events.told()
            self._publish(part, name)
            if self._blocks is not None:
                table.snapshots.append((table.num_tokens, part))
            self._release(index, (part,))  # a copy that nothing holds

    # Laws -------------------------------------------------------------------------------------------------

    def check(self, tables: Iterable[GroupedTable], taken_ids: Sequence[PageId] = ()) -> None:
        """Assert that bytes are conserved, and that parts are held exactly as often as sequences say.

        `taken_ids`: the blocks that `take_blocks` took.
        """
        held: dict[Part, int] = {}
        for table in tables:
            for part in table.held():
                held[part] = held.get(part, 0) + 1
        used = [0] * len(self.groups)
        for part, refs in held.items():
            assert part.refs == refs, f"L2: a part is held {refs} times, counted {part.refs}"
            used[part.group] += 1
        assert used == self.num_used, f"L1: {used} parts used, counted {self.num_used}"
        cached = 0
        num_cached = [0] * len(self.groups)
        for part in self._released:
            num_cached[part.group] += 1
            assert not part.refs and part not in held, "L2: a cached part is held"
            assert part.name is not None and part in part.name.copies[part.group], "L1: a cached part cannot be found"
            cached += self.groups[part.group].part_bytes
        assert num_cached == self.num_cached, f"L1: {num_cached} parts cached, counted {self.num_cached}"
        assert cached == self.cached_bytes, f"L1: {cached} bytes cached, counted {self.cached_bytes}"
        in_use = sum(count * group.part_bytes for count, group in zip(used, self.groups, strict=True))
        in_use += len(taken_ids) * self._block_bytes
        assert in_use + self.cached_bytes + self.empty_bytes == self.total_bytes, "L1: bytes are lost"
        if self._blocks is not None:
            ids = [block for part in (*held, *self._released) for block in part.blocks]
            ids += (*self._blocks.empty_ids, *taken_ids)
            assert sorted(ids) == list(range(self._blocks.total)), "L1: a block is lost or has two owners"

"""The prefix tree: which full pages are resident, which follow which, and which page is evicted next.

A node is a run of pages with one history: wherever one page of the run was referenced, released or hit, all were. All
operations are on runs, so the cost does not depend on their number of pages, and the outcome is exactly that of a
page-by-page list:

* runs that nothing references are listed by an `EvictionOrder`, which receives them deepest first; eviction takes
  the run that the order names and removes pages from its tail;
* a hit inside a run splits it: the head leaves the order with the hit, the tail keeps its place;
* a request that computes pages that are already resident keeps its own copy (a *duplicate*). The oldest copy is the one
  that is found; when it is evicted, the next takes its place.

The tree knows neither requests nor tokens, only paths: the list of nodes that a holder pinned, root side first.
Splitting keeps the tail's identity, so a path stays valid: a head that was split off is reached by `parent`.

A transfer *holds* runs without referencing them: they are in use, so eviction skips them, but they keep their place in
the order. A copy to another tier does not change the order of eviction. The runs before a held run are not held by it,
only skipped as long as any other run can be evicted. When no other can, the held run leaves the tree with them: it
becomes an *orphan* that cannot be found any more, and its pages are empty when the last hold ends. So every cached page
can be evicted, whatever is held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kvarts.core.content import NOTHING, Content
from kvarts.core.event_log import Emit
from kvarts.core.events import CopiesRemoved, CopiesStored, PagesRemoved, PagesStored
from kvarts.core.kv.cache import Match
from kvarts.core.kv.eviction import EvictionOrder, Node, Path, PinnedPages, TreeWatcher, walk
from kvarts.core.kv.pool import PageId

__all__ = ["Node", "Path", "PrefixTree"]

NUM_WALKS: Final = 256
"""How many walks of `num_found` are remembered: a power of two."""


class PrefixTree:
    """Owner of all nodes and of their references. It takes and frees no pages, but returns those to free.

    `order` chooses the next run to evict. `emit`, if given, receives events of pages that become findable or are
    evicted. `watcher`, if given, is notified of all runs; usually it is the order as well.
    """

    def __init__(
        self,
        order: EvictionOrder,
        emit: Emit | None = None,
        *,
        watcher: TreeWatcher | None = None,
    ) -> None:
        self.order = order
        self.emit = emit
        self.num_cached = 0
        self.on_removed: Callable[[Node, int, int], object] | None = None
        """Called for pages [start, end), the last ones of a node, that can no longer be found; it has their ids."""
        self.on_read: Callable[[], object] | None = None
        """Called before runs are looked for or looked at; it may extend some of them."""
        self.found_from = 0
        """The first of the pages that became findable, or whose first copy was evicted, since this was set."""
        self._watcher = watcher
        self._roots: dict[str | None, Node] = {}
        self._walked: dict[int, tuple[Content, Node, int]] = {}
        """Where walks of `num_found` have ended: a content, a run, and its end, up to which all pages are equal."""

    # Finding ----------------------------------------------------------------------------------------------

    def match(self, content: Content, limit: int) -> Match:
        """Return the longest resident prefix of `content`, at most `limit` pages. Change nothing."""
        if self.on_read is not None:
            self.on_read()
        nodes: Path = []
        position = 0
        num_shared = 0
        node = self._roots.get(content.salt)
        if node is None:
            return Match(content, nodes, 0, 0)
        while position < limit:
            children = node.children
            if not children:
                break
            child = children.get(content.key(position))
            if child is None:
                break
            end = child.end if child.end < limit else limit
            common = content.common_pages(child.content, position, end)
            assert common > position, "a child was found by a key that its first page does not have"
            nodes.append(child)
            if child.refs or child.holds:
                num_shared += common - position
            position = common
            if common < child.end:
                break
            node = child
        return Match(content, nodes, position, num_shared)

    def num_found(self, content: Content, limit: int) -> int:
        """Return how many pages `match` finds: less work where that is all to be known."""
        if self.on_read is not None:
            self.on_read()
        node: Node | None = None
        position = 0
        slot = content.owner & (NUM_WALKS - 1)
        walked = self._walked.get(slot)
        if walked is not None and walked[0] is content and not walked[1].is_gone:
            last, end = walked[1], walked[2]
            if limit <= last.end and limit <= end:
                return limit
            if last.end <= end:  # else it has grown, by pages that may be others
                node, position = last, last.end
        if node is None:
            node = self._roots.get(content.salt)
        whole: Node | None = None
        while node is not None and position < limit and node.children:
            child = node.children.get(content.key(position))
            if child is None:
                break
            end = child.end if child.end < limit else limit
            position = content.common_pages(child.content, position, end)
            if position < child.end:
                break
            node = whole = child
        if whole is not None and whole.end <= content.num_known_pages:
            self._walked[slot] = content, whole, whole.end
        return position

    def has(self, content: Content, page: int) -> bool:
        """Return whether `page` of `content` is resident, and thus all pages before it."""
        if self.on_read is not None:
            self.on_read()
        position = 0
        node = self._roots.get(content.salt)
        while node is not None and node.children:
            child = node.children.get(content.key(position))
            if child is None:
                return False
            end = child.end if child.end <= page else page + 1
            position = content.common_pages(child.content, position, end)
            if position > page:
                return True
            if position < child.end:
                return False
            node = child
        return False

    def has_after(self, path: Path, content: Content) -> bool:
        """Return whether the page of `content` after the last one of `path`, which are of `content`, is resident."""
        page = path[-1].end if path else 0
        node = path[-1] if path else self._roots.get(content.salt)
        if node is None or not node.children or page >= content.num_known_pages:
            return False
        return content.key(page) in node.children

    # BlockTable ----------------------------------------------------------------------------------------------

    def cut(self, match: Match) -> Path:
        """Return the runs of `match`; the last one is split where the match ends."""
        nodes = match.nodes
        if nodes and nodes[-1].end > match.num_pages:
            nodes[-1] = self._split(nodes[-1], match.num_pages)
        return nodes

    def pin(self, match: Match) -> Path:
        """Take a reference to every page of `match`; return the path that holds them."""
        nodes = self.cut(match)
        listed = []
        for node in nodes:
            if node.refs == 0:
                listed.append(node)
                if not node.holds:
                    self.num_cached -= node.end - node.start
            node.refs += 1
        if nodes:
            self.order.pinned(listed, nodes)
        return nodes

    def hold_pages(self, pages: PinnedPages) -> None:
        """Protect `pages`, in all their copies, from eviction until `unhold`; each keeps its place."""
        for node in pages.nodes():
            if node.duplicates is None:
                self._hold(node)
            else:
                for copy in node.duplicates:
                    self._hold(copy)

    def _hold(self, node: Node) -> None:
        holds = node.holds
        node.holds = holds + 1
        if not (node.refs or holds):
            self.num_cached -= node.end - node.start
            self.order.held(node)

    def keep(self, path: Path) -> int:
        """Record that `path`, which is pinned, is kept for later; return how many of its pages were not kept before."""
        num_pages = 0
        for node in walk(path):
            if not node.pins:
                num_pages += node.end - node.start
            node.pins += 1
        return num_pages

    def unkeep(self, path: Path) -> int:
        """Undo a `keep`; return how many pages are not kept any more."""
        num_pages = 0
        for node in walk(path):
            node.pins -= 1
            assert node.pins >= 0, f"{node} was kept less often"
            if not node.pins:
                num_pages += node.end - node.start
        return num_pages

    def unhold(self, pages: PinnedPages) -> list[Node]:
        """End a `hold_pages`; return the orphans that nothing holds any more, whose pages must be freed."""
        orphans: list[Node] = []
        for node in pages.nodes():
            if node.duplicates is None:
                self._unhold(node, orphans)
            else:
                for copy in node.duplicates:
                    self._unhold(copy, orphans)
        return orphans

    def _unhold(self, node: Node, orphans: list[Node]) -> None:
        holds = node.holds = node.holds - 1
        assert holds >= 0, f"{node} was let go more often than it was held"
        if not (node.refs or holds):
            if node.is_orphan:
                orphans.append(node)
                return
            self.num_cached += node.end - node.start
            self.order.unheld(node)

    def extend(self, path: Path, content: Content, end: int, page_ids: list[PageId] | None) -> None:
        """Make the pages from the end of `path` to `end` findable; the holder of `path` references them.

        Pages that are findable already stay as they are. `page_ids` are the ids of all the holder's pages, or None.
        """
        watcher = self._watcher
        if path:
            last = path[-1]
            start = last.end
            if start >= end:
                return
            if start < self.found_from:
                self.found_from = start
            if (
                last.refs == 1
                and last.place is None
                and not (last.children or last.duplicates or last.holds)
                and (watcher is None or watcher.may_grow(last))
            ):
                # The holder is alone with a leaf about which the order has no state: the run grows.
                last.end = end
                before = last.content
                last.content = content
                if page_ids is not None:
                    assert last.page_ids is not None
                    last.page_ids.extend(page_ids[start:end])
                if self.emit is not None:
                    self.emit(PagesStored(content, start, end, before))
                if watcher is not None:
                    watcher.extended(last, start)
                return
        else:
            if end == 0:
                return
            start = self.found_from = 0
            last = self._root(content.salt)
        while start < end:
            if last.children is None:
                last.children = {}
            key = content.key(start)
            first_copy = last.children.get(key)
            if first_copy is None:
                node = Node(content, key, start, end, 1, last)
                last.children[key] = node
                if watcher is not None:
                    watcher.born(node)
                if self.emit is not None:
                    self.emit(PagesStored(content, start, end, last.content if start else None))
            else:
                node = self._add_twin(first_copy, content, end, last)
                if self.emit is not None:
                    self.emit(CopiesStored(content, start, node.end, last.content if start else None))
            if page_ids is not None:
                node.page_ids = page_ids[start : node.end]
            path.append(node)
            start = node.end
            last = node
        if watcher is not None:
            watcher.extended(last, last.start)

    def release_parts(self, path: Path, firsts: Sequence[int], on_part: Callable[[int], object]) -> None:
        """As `release`, but let the order list the pages from each of `firsts` to the next separately, the last first.

        `firsts`: pages in order, 0 the first. `on_part` is called with the index of the part before the order.
        """
        for first in firsts[1:]:
            for node in walk(path):
                if node.start < first < node.end:
                    self._split(node, first)
                    break
        released: list[Node] = []
        for node in walk(path):
            node.refs -= 1
            assert node.refs >= 0, f"{node} was released more often than it was pinned"
            if not node.refs:
                released.append(node)
                if not node.holds:
                    self.num_cached += node.end - node.start
        for part in range(len(firsts) - 1, -1, -1):
            listed = []
            while released and released[0].start >= firsts[part]:
                listed.append(released.pop(0))
            if listed:
                on_part(part)
                self.order.released(listed)

    def release(self, path: Path) -> None:
        """Drop the references of `path`, deepest page first; pages without references are cached from now on."""
        # `walk`, inlined: this runs for every request.
        released: list[Node] = []
        index = len(path)
        while index:
            index -= 1
            node = path[index]
            floor = path[index - 1].end if index else 0
            while True:
                refs = node.refs = node.refs - 1
                if refs <= 0:
                    assert refs == 0, f"{node} was released more often than it was pinned"
                    released.append(node)
                    if not node.holds:
                        self.num_cached += node.end - node.start
                if node.start <= floor:
                    break
                assert node.parent is not None
                node = node.parent  # split off after this path pinned it
        if released:
            self.order.released(released)

    def isolate(self, path: Path, start: int, end: int) -> list[Node]:
        """Return the runs of pages [start, end) of `path`, split where these begin and end; deepest first."""
        nodes: list[Node] = []
        if start >= end:
            return nodes
        last = path[-1]
        if last.end == end and last.start <= start:
            # Usually the request is for the end of one run.
            if last.start < start:
                self._split(last, start)
            nodes.append(last)
            return nodes
        for node in walk(path):
            if node.end <= start:
                break
            if node.start >= end:
                continue
            if node.end > end:
                self._split(node, end)  # the head is next
                continue
            if node.start < start:
                self._split(node, start)
            nodes.append(node)
        return nodes

    # Evicting ---------------------------------------------------------------------------------------------

    def evict(self, count: int) -> list[PageId]:
        """Evict the next `count` pages; return their ids in that order, if pages have ids."""
        assert count <= self.num_cached, f"{count} pages to evict, {self.num_cached} cached"
        self.num_cached -= count
        page_ids: list[PageId] = []
        order = self.order
        while count:
            node: Node = order.next_run()
            while node.children and node.duplicates is None and not node.holds:
                # Runs after it are evicted first; an order that ensures that itself names such a run only if they are
                # held.
                node = next(reversed(node.children.values()))
            if node.holds:
                node = self._next_without_followers()
            size = node.end - node.start
            if size > count and node.duplicates is not None:
                self._split(node, node.end - count)  # duplicates stay aligned; `node` is the tail
                size = count
            if size > count:
                node.end -= count
                if self._watcher is not None:
                    self._watcher.cut(node, count)
                if self.emit is not None or self.on_removed is not None:
                    self._emit_removed(node, node.end, node.end + count)
                if node.page_ids is not None:  # last, since `on_removed` may read them
                    page_ids.extend(reversed(node.page_ids[-count:]))
                    del node.page_ids[-count:]
                break
            if node.page_ids is not None:
                page_ids.extend(reversed(node.page_ids))
            self._remove(node)
            count -= size
        return page_ids

    # Inside -----------------------------------------------------------------------------------------------

    def _root(self, salt: str | None) -> Node:
        """Return the root of a tenant: tenants share nothing, not even a root."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node(NOTHING, b"", 0, 0, 1, None)
        return root

    def _next_without_followers(self) -> Node:
        """Return the first run without followers that can be evicted.

        If transfers hold all runs without followers, orphan those that follow the first run, deepest first, until it or
        a run after it can be evicted.
        """
        node: Node
        for node in self.order:
            if not node.holds and (node.duplicates is not None or not node.children):
                return node
        first: Node = self.order.next_run()
        while True:
            node = first
            while node.children:
                node = next(reversed(node.children.values()))
            if not node.holds:
                return node
            self._orphan(node)

    def _orphan(self, node: Node) -> None:
        """Remove a leaf and its copies, held only by transfers, from the tree: the run before it is evicted."""
        assert not node.refs, f"{node} is in use, and what is before it is not"
        copies = node.duplicates or [node]
        for copy in copies:
            self.order.removed(copy)
            copy.is_orphan = copy.is_gone = True
        parent = node.parent
        assert parent is not None and parent.children is not None
        del parent.children[node.key]
        if self._watcher is not None:
            self._watcher.died(node)
        if self.emit is not None or self.on_removed is not None:
            self._emit_removed(node, node.start, node.end)

    def _emit_removed(self, node: Node, start: int, end: int) -> None:
        """Report that pages [start, end), the last ones of `node`, can no longer be found."""
        if self.emit is not None:
            self.emit(PagesRemoved(node.content, start, end, is_held=node.is_orphan))
        if self.on_removed is not None:
            self.on_removed(node, start, end)

    def _split(self, node: Node, at: int) -> Node:
        """Split the run, and every duplicate with it, before page `at`; return the head. `node` becomes the tail."""
        assert node.start < at < node.end
        tails = node.duplicates or [node]
        first = tails[0]
        parent = first.parent
        assert parent is not None and parent.children is not None
        tail_key = first.content.key(at)
        children = {tail_key: first}
        heads: list[Node] = []
        for tail in tails:
            head = Node(tail.content, tail.key, tail.start, at, tail.refs, tail.parent, children)
            heads.append(head)
            head.holds, head.pins = tail.holds, tail.pins
            head.place = tail.place
            head.notes = tail.notes
            if tail.page_ids is not None:
                cut = at - tail.start
                head.page_ids = tail.page_ids[:cut]
                del tail.page_ids[:cut]
            tail.start = at
            tail.key = tail_key
            tail.parent = head
        parent.children[heads[0].key] = heads[0]
        if len(heads) > 1:
            for head in heads:
                head.duplicates = heads
        for index in range(len(tails)):
            tail = tails[index]
            if tail.refs == 0:
                self.order.split(heads[index], tail)  # deeper pages are evicted first
        if self._watcher is not None:
            self._watcher.divided(heads, tails)
        return heads[0] if first is node else heads[tails.index(node)]

    def _add_twin(self, first_copy: Node, content: Content, end: int, parent: Node) -> Node:
        """Add a copy of the part of the run that it has in common with `content` up to `end`."""
        start = first_copy.start
        common = content.common_pages(first_copy.content, start, min(end, first_copy.end))
        if common < first_copy.end:
            first_copy = self._split(first_copy, common)
        if first_copy.children is None:
            first_copy.children = {}
        if first_copy.duplicates is None:
            first_copy.duplicates = [first_copy]
        duplicate = Node(content, first_copy.key, start, common, 1, parent)
        duplicate.holds, duplicate.notes = first_copy.holds, first_copy.notes
        duplicate.children = first_copy.children
        duplicate.duplicates = first_copy.duplicates
        duplicate.duplicates.append(duplicate)
        return duplicate

    def _remove(self, node: Node) -> None:
        """Remove a whole unreferenced run from the order and from the tree."""
        self.order.removed(node)
        node.is_gone = True
        duplicates = node.duplicates
        parent = node.parent
        assert parent is not None and parent.children is not None
        if duplicates is None:
            assert not node.children, f"{node} would be evicted under its children"
            del parent.children[node.key]
            if self._watcher is not None:
                self._watcher.died(node)
            if self.emit is not None or self.on_removed is not None:
                self._emit_removed(node, node.start, node.end)
            return
        copy = duplicates.index(node)
        if self.emit is not None:
            self.emit(CopiesRemoved(node.content, node.start, node.end, copy))
        del duplicates[copy]
        if copy == 0:
            self.found_from = 0
            parent.children[node.key] = duplicates[0]
            if self._watcher is not None:
                self._watcher.first_copy_gone(node)
        if len(duplicates) == 1:
            duplicates[0].duplicates = None

    # Looking ----------------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """Iterate over all resident runs, duplicates included, parents before children."""
        if self.on_read is not None:
            self.on_read()
        stack = list(self._roots.values())
        while stack:
            for child in (stack.pop().children or {}).values():
                yield from child.duplicates or [child]
                stack.append(child)

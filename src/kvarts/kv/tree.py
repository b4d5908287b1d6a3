"""The prefix tree: which full pages are resident, who follows whom, and which page goes first.

A node is a run of pages with one history: wherever one page of the run was referenced, released or hit, all were.
Everything is done to runs, so the cost does not depend on how many pages they have, and the outcome is exactly
that of a page-by-page LRU list in which a request's pages are released deepest first:

* released runs go to the young end of the list, deepest first; eviction takes the oldest and eats it from its tail;
* a hit inside a run splits it: the head leaves the list with the hit, the tail keeps its place;
* a request that computes what is resident already keeps its own copy (a *twin*). The copy made first is the one
  that is found; when it is evicted, the next takes its place.

The tree knows neither requests nor tokens, only paths: the list of nodes that a holder pinned, root side first.
Splitting keeps the tail's identity, so a path stays valid: what was split off lies before its node, by `parent`.

A transfer *holds* runs without referencing them: they are in use, so eviction passes them by, but they keep their place
in the list. A copy to another tier disturbs nobody's order.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvarts.content import Content, PageKey
from kvarts.event_log import Tell
from kvarts.events import CopiesRemoved, PagesRemoved, PagesStored
from kvarts.kv.pool import PageId

__all__ = ["Match", "Node", "Path", "PrefixTree"]


class Node(msgspec.Struct, eq=False):
    """Pages [start, end) of `content`, counted from the first token. Written by PrefixTree only.

    `key` names its first page among its siblings. `refs`: how many paths hold the run; at 0 it is in the LRU list,
    between `older` and `newer`. `holds`: how many transfers do; at 0 of both the run is cached. `children` is by their
    keys, and one dict for all twins. `page_ids` is None where pages are only counted. A root has neither content nor
    key. `below`, `trails`, `stamp` and `is_safe` are for trees that know of a tier below, see SafeFirstTree.
    """

    content: Content
    key: PageKey
    start: int
    end: int
    refs: int
    parent: Node | None
    children: dict[PageKey, Node] | None = None
    twins: list[Node] | None = None
    page_ids: list[PageId] | None = None
    holds: int = 0
    below: int = 0
    trails: bool = False
    stamp: int = 0
    is_safe: bool = False
    older: Node = None  # type: ignore[assignment]
    newer: Node = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Node(pages {self.start}..{self.end}, refs {self.refs}, twins {len(self.twins or ())})"


NOTHING = Content(b"", num_tokens=0, page_size=1, owner=-1)

Path = list[Node]


class Match(msgspec.Struct, eq=False):
    """The longest resident prefix of a content. Valid until the tree changes.

    `num_pages`: its length. `num_shared`: how many of these pages are in use. `nodes`: the runs; the last
    one may reach beyond `num_pages`.
    """

    nodes: Path
    num_pages: int
    num_shared: int


class PrefixTree:
    """Owner of all nodes, of their references and of the LRU list. Takes no pages and frees none: it says which.

    `tell`, where given, receives what became findable and what was evicted.
    """

    def __init__(self, tell: Tell | None = None) -> None:
        self.num_cached = 0
        self.tell = tell
        self.gone: list[tuple[Content, int, int]] | None = None
        """See `tell_gone`."""
        self._tells = tell is not None
        self._knows_below = False
        self._roots: dict[str | None, Node] = {}
        # One sentinel closes the LRU list to a ring: newer of it is the oldest run, older of it the youngest.
        self._lru = Node(NOTHING, b"", 0, 0, 0, None)
        self._lru.older = self._lru.newer = self._lru

    def tell_gone(self, gone: list[tuple[Content, int, int]]) -> None:
        """From now on `gone` receives runs that can no longer be found: content, first page, page after the last."""
        self.gone = gone
        self._tells = True

    # Finding ----------------------------------------------------------------------------------------------

    def match(self, content: Content, limit: int) -> Match:
        """The longest resident prefix of `content`, at most `limit` pages. Changes nothing."""
        nodes: Path = []
        position = 0
        num_shared = 0
        node = self._roots.get(content.salt)
        if node is None:
            return Match(nodes, 0, 0)
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
        return Match(nodes, position, num_shared)

    def has(self, content: Content, page: int) -> bool:
        """Whether `page` of `content` is resident, and so all before it."""
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

    # Holding ----------------------------------------------------------------------------------------------

    def cut(self, match: Match) -> Path:
        """The runs of `match`, the last one split where it ends."""
        nodes = match.nodes
        if nodes and nodes[-1].end > match.num_pages:
            nodes[-1] = self._split(nodes[-1], match.num_pages)
        return nodes

    def pin(self, match: Match) -> Path:
        """Takes a reference to every page of `match` and returns the path that holds them."""
        nodes = self.cut(match)
        for node in nodes:
            if node.refs == 0:
                older, newer = node.older, node.newer
                older.newer = newer
                newer.older = older
                if not node.holds:
                    self.num_cached -= node.end - node.start
            node.refs += 1
        return nodes

    def hold_path(self, path: Path) -> None:
        """Keeps every page of `path` from being evicted, each in its place, until `unhold`.

        All copies of a page are held: the one that is found may stand before what follows it in the list.
        """
        for node in self.walk(path):
            for copy in node.twins or (node,):
                if not (copy.refs or copy.holds):
                    self._count_cached(copy, -1)
                copy.holds += 1

    def unhold(self, path: Path) -> None:
        """Ends what `hold_path` began."""
        for node in self.walk(path):
            for copy in node.twins or (node,):
                copy.holds -= 1
                assert copy.holds >= 0, f"{copy} was let go more often than it was held"
                if not (copy.refs or copy.holds):
                    self._count_cached(copy, 1)

    def extend(self, path: Path, content: Content, end: int, page_ids: list[PageId] | None) -> None:
        """Makes the pages from the end of `path` to `end` findable; the holder of `path` references them.

        Pages that are findable already stay as they are. `page_ids` are the ids of all the holder's pages, or None.
        """
        if path:
            last = path[-1]
            start = last.end
            if start >= end:
                return
            if last.refs == 1 and not (last.children or last.twins or last.holds or last.below):
                # The holder is alone with a leaf: the run grows.
                last.end = end
                before = last.content
                last.content = content
                if page_ids is not None:
                    assert last.page_ids is not None
                    last.page_ids.extend(page_ids[start:end])
                if self.tell is not None:
                    self.tell(PagesStored(content, start, end, before))
                return
        else:
            if end == 0:
                return
            start = 0
            last = self._root(content.salt)
        while start < end:
            if last.children is None:
                last.children = self._new_children(last) if self._knows_below else {}
            key = content.key(start)
            first_copy = last.children.get(key)
            if first_copy is None:
                node = Node(content, key, start, end, 1, last)
                last.children[key] = node
                if self._knows_below:
                    self._on_birth(node)
                if self.tell is not None:
                    self.tell(PagesStored(content, start, end, last.content if start else None))
            else:
                node = self._add_twin(first_copy, content, end, last)
            if page_ids is not None:
                node.page_ids = page_ids[start : node.end]
            path.append(node)
            start = node.end
            last = node

    def release(self, path: Path) -> None:
        """Drops the references of `path`, deepest page first; what nobody references is cached from now on."""
        # `walk` and `_list_before` spelled out, as unlisting is in `pin` and `_remove`: this runs for every request.
        lru = self._lru
        index = len(path)
        while index:
            index -= 1
            node = path[index]
            floor = path[index - 1].end if index else 0
            while True:
                refs = node.refs = node.refs - 1
                if refs <= 0:
                    assert refs == 0, f"{node} was released more often than it was pinned"
                    youngest = lru.older
                    node.older = youngest
                    node.newer = lru
                    youngest.newer = lru.older = node
                    if not node.holds:
                        self.num_cached += node.end - node.start
                if node.start <= floor:
                    break
                assert node.parent is not None
                node = node.parent  # split off after this path pinned it

    def walk(self, path: Path) -> Iterator[Node]:
        """The runs that `path` holds, deepest first."""
        for index in range(len(path) - 1, -1, -1):
            node = path[index]
            floor = path[index - 1].end if index else 0
            yield node
            while node.start > floor:
                assert node.parent is not None
                node = node.parent
                yield node

    # Evicting ---------------------------------------------------------------------------------------------

    def evict(self, count: int) -> list[PageId]:
        """Forgets the `count` pages released longest ago; their ids in that order, if pages have ids."""
        assert count <= self.num_cached, f"{count} pages to evict, {self.num_cached} cached"
        self.num_cached -= count
        page_ids: list[PageId] = []
        self._evict_from(self._lru, count, page_ids)
        return page_ids

    def _evict_from(self, ring: Node, count: int, page_ids: list[PageId], *, one_run: bool = False) -> int:
        """Evicts `count` pages of what nothing holds in `ring`, the oldest first; how many of them are left to evict.

        None, or with `one_run` what is more than one run has.
        """
        node = ring.newer
        while count:
            while node.holds:
                node = node.newer
            size = node.end - node.start
            if size > count and node.twins is not None:
                self._split(node, node.end - count)  # twins stay aligned; `node` is the tail
                size = count
            if size > count:
                assert not node.children, f"{node} would be evicted under its children"
                node.end -= count
                if node.page_ids is not None:
                    page_ids.extend(reversed(node.page_ids[-count:]))
                    del node.page_ids[-count:]
                if self._knows_below:
                    self._on_cut(node)
                if self._tells:
                    self._tell_removed(node, node.end, node.end + count)
                return 0
            if node.page_ids is not None:
                page_ids.extend(reversed(node.page_ids))
            newer = node.newer
            self._remove(node)
            node = newer
            count -= size
            if one_run:
                break
        return count

    # Inside -----------------------------------------------------------------------------------------------

    def _root(self, salt: str | None) -> Node:
        """Tenants share nothing, not even a root."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node(NOTHING, b"", 0, 0, 1, None)
        return root

    def _count_cached(self, node: Node, sign: int) -> None:
        """An unreferenced run is no longer cached (-1), or is again (1), since a transfer holds it or has let it go."""
        self.num_cached += sign * (node.end - node.start)

    def _tell_removed(self, node: Node, start: int, end: int) -> None:
        """Pages [start, end), the last ones of `node`, can no longer be found. For a tree that `_tells`."""
        if self.tell is not None:
            self.tell(PagesRemoved(node.content, start, end))
        if self.gone is not None:
            self.gone.append((node.content, start, end))

    # What a tree that knows of a tier below (`_knows_below`) has to keep up with.

    def _new_children(self, node: Node) -> dict[PageKey, Node]:
        """An empty dict for the children of `node` and its twins."""
        return {}

    def _on_birth(self, node: Node) -> None:
        """`node` is the first copy of its pages."""

    def _on_split(self, tail: Node) -> None:
        """`tail` is the first copy of what was split off its new parent, of whose children it is the only one."""

    def _on_cut(self, node: Node) -> None:
        """The last pages of `node`, which had no twins, were evicted."""

    def _on_death(self, node: Node) -> None:
        """`node` was the last copy of its pages, or the first of several."""

    def _split(self, node: Node, at: int) -> Node:
        """Splits the run, and every twin with it, before page `at`; returns the head. `node` becomes the tail."""
        assert node.start < at < node.end
        group = node.twins or [node]
        first = group[0]
        parent = first.parent
        assert parent is not None and parent.children is not None
        tail_key = first.content.key(at)
        heads = [Node(tail.content, tail.key, tail.start, at, tail.refs, tail.parent) for tail in group]
        tails = self._new_children(heads[0])
        tails[tail_key] = first
        for tail, head in zip(group, heads, strict=True):
            head.children = tails
            head.holds, head.below, head.trails = tail.holds, tail.below, tail.trails
            head.stamp, head.is_safe = tail.stamp, tail.is_safe
            if tail.page_ids is not None:
                cut = at - tail.start
                head.page_ids = tail.page_ids[:cut]
                del tail.page_ids[:cut]
            if tail.refs == 0:
                self._list_before(tail.newer, head)  # deeper pages go first
        first_head = heads[0]
        parent.children[first_head.key] = first_head
        for tail, head in zip(group, heads, strict=True):
            tail.start = at
            tail.key = tail_key
            tail.parent = head
            if len(heads) > 1:
                head.twins = heads
        self._on_split(first)
        return heads[group.index(node)]

    def _add_twin(self, first_copy: Node, content: Content, end: int, parent: Node) -> Node:
        """A copy of as much of the run as `content` up to `end` has in common with it."""
        start = first_copy.start
        common = content.common_pages(first_copy.content, start, min(end, first_copy.end))
        if common < first_copy.end:
            first_copy = self._split(first_copy, common)
        if first_copy.children is None:
            first_copy.children = self._new_children(first_copy)
        if first_copy.twins is None:
            first_copy.twins = [first_copy]
        twin = Node(content, first_copy.key, start, common, 1, parent)
        twin.holds, twin.below, twin.trails = first_copy.holds, first_copy.below, first_copy.trails
        twin.children = first_copy.children
        twin.twins = first_copy.twins
        twin.twins.append(twin)
        return twin

    def _remove(self, node: Node) -> None:
        """Takes a whole unreferenced run out of the list and out of the tree."""
        older, newer = node.older, node.newer
        older.newer = newer
        newer.older = older
        twins = node.twins
        parent = node.parent
        assert parent is not None and parent.children is not None
        if twins is None:
            assert not node.children, f"{node} would be evicted under its children"
            del parent.children[node.key]
            if self._knows_below:
                self._on_death(node)
            if self._tells:
                self._tell_removed(node, node.start, node.end)
            return
        if self.tell is not None:
            self.tell(CopiesRemoved(node.content, node.start, node.end))
        was_first = twins[0] is node
        twins.remove(node)
        if was_first:
            parent.children[node.key] = twins[0]
            self._on_death(node)
        if len(twins) == 1:
            twins[0].twins = None

    def _list_before(self, newer: Node, node: Node) -> None:
        older = newer.older
        node.older = older
        node.newer = newer
        older.newer = node
        newer.older = node

    # Looking ----------------------------------------------------------------------------------------------

    def lru_nodes(self) -> Iterator[Node]:
        """Unreferenced runs, the next to be evicted first."""
        node = self._lru.newer
        while node is not self._lru:
            yield node
            node = node.newer

    def nodes(self) -> Iterator[Node]:
        """Every resident run, twins included, parents before children."""
        stack = list(self._roots.values())
        while stack:
            for child in (stack.pop().children or {}).values():
                yield from child.twins or [child]
                stack.append(child)

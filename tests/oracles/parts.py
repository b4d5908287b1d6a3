"""Parts of pages in KV groups, and the names by which they are found: a page is named by its tokens and those before.

A name is there as long as some copy of a part of its page is resident, a holder needs it, or a page after it is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from kvarts.core.content import Content, PageKey
from kvarts.core.kv.pool import PageId

__all__ = ["GroupMatch", "GroupedTable", "PageName", "PageNames", "Part"]


class Part:
    """The part of one page in one group, or a state. `name`: once it can be found.

    `is_kept`: it is cached when nothing uses it any more; else it is empty then. `blocks`: the ids of its blocks, where
    blocks have ids. To an eviction order it is a run of one page, see Run; `place` belongs to that.
    """

    __slots__ = ("blocks", "group", "is_kept", "name", "place", "refs")

    def __init__(self, group: int, *, is_kept: bool, blocks: tuple[PageId, ...] = ()) -> None:
        self.group = group
        self.is_kept = is_kept
        self.blocks = blocks
        self.name: PageName | None = None
        self.refs = 1
        self.place: Any = None

    @property
    def page_name(self) -> PageName:
        """The page of a part that can be found."""
        assert self.name is not None
        return self.name

    @property
    def content(self) -> Content:
        """A content that has its page."""
        assert self.page_name.content is not None
        return self.page_name.content

    @property
    def start(self) -> int:
        """Its page."""
        return self.page_name.page

    @property
    def end(self) -> int:
        """The page after it."""
        return self.page_name.page + 1

    @property
    def key(self) -> PageKey:
        """The name of its page among those that follow the same page."""
        return self.page_name.key

    @property
    def parent(self) -> Part | None:
        """The oldest copy of the part of its group right before it; None if there is none."""
        before = self.page_name.parent
        return next(iter(before.copies[self.group]), None) if before is not None and before.copies else None

    @property
    def children(self) -> Mapping[PageKey, PageName]:
        """The pages that follow its page, by key."""
        return self.page_name.children

    @property
    def holds(self) -> int:
        """0: what a transfer holds is not listed."""
        return 0

    @property
    def is_found(self) -> bool:
        """Whether it can be found: it has a name, and was not evicted since it got it."""
        return self.name is not None and self in self.name.copies[self.group]


class PageName:
    """One full page. `copies`: for each KV group, the resident copies of its part, the oldest first.

    `num_users`: copies, holders and pages after it, which keep the name. `content`: one that the page is of.
    """

    __slots__ = ("children", "content", "copies", "key", "num_users", "page", "parent")

    def __init__(
        self, parent: PageName | None, key: PageKey, page: int, num_groups: int, content: Content | None
    ) -> None:
        self.parent = parent
        self.content = content
        self.key = key
        self.page = page
        self.children: dict[PageKey, PageName] = {}
        self.copies: tuple[list[Part], ...] = tuple([[] for _ in range(num_groups)])
        self.num_users = 0


class GroupMatch(msgspec.Struct, eq=False):
    """The longest prefix that every group can go on from, in full pages. Valid until the cache changes."""

    names: list[PageName]

    @property
    def num_pages(self) -> int:
        """Its length."""
        return len(self.names)


class GroupedTable(msgspec.Struct, eq=False):
    """What one running sequence holds. Written by GroupedCache.

    `num_tokens`: tokens that are computed, or are about to be in this step. `parts`: for each group, the parts by page;
    a snapshot that the sequence began from is at the last page of its prefix. `states`: for each group of states, its
    own. `names`: of its full pages. `snapshots`: copies of its states that are to be made in this step, each with the
    tokens after which; kept where parts have blocks.
    """

    content: Content
    num_tokens: int
    names: list[PageName]
    parts: list[dict[int, Part]]
    states: list[Part | None]
    snapshots: list[tuple[int, Part]] = []
    is_open: bool = True

    def held(self) -> Iterator[Part]:
        """Return all parts that it holds, group by group."""
        for parts, state in zip(self.parts, self.states, strict=True):
            yield from parts.values()
            if state is not None:
                yield state


class PageNames:
    """Owner of all names, one tree for each tenant."""

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._roots: dict[str | None, PageName] = {}

    def root(self, salt: str | None) -> PageName:
        """Return what is before the first page of a tenant."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = PageName(None, b"", -1, 0, None)
        return root

    def known(self, content: Content, limit: int) -> list[PageName]:
        """Return the names of the first pages of `content` that have one, at most `limit`."""
        names: list[PageName] = []
        name = self.root(content.salt)
        for page in range(limit):
            child = name.children.get(content.key(page))
            if child is None:
                break
            names.append(child)
            name = child
        return names

    def after(self, name: PageName, content: Content) -> PageName:
        """Return the name of the page of `content` after `name`, which is made if need be; `use` must follow."""
        page = name.page + 1
        key = content.key(page)
        child = name.children.get(key)
        if child is None:
            child = name.children[key] = PageName(name, key, page, self._num_groups, content)
            name.num_users += 1
        return child

    def use(self, name: PageName) -> None:
        """Keep a name."""
        name.num_users += 1

    def drop(self, name: PageName) -> None:
        """End a `use`. Names that nothing keeps go, and those before them that only they kept."""
        name.num_users -= 1
        while not name.num_users and name.parent is not None:
            parent = name.parent
            del parent.children[name.key]
            parent.num_users -= 1
            name = parent

    def num_names(self) -> int:
        """Return how many pages are named."""
        count = 0
        todo = list(self._roots.values())
        while todo:
            name = todo.pop()
            count += len(name.children)
            todo += name.children.values()
        return count

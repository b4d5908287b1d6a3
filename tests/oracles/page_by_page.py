"""A prefix cache one page at a time, of lists and dictionaries. Shares no code with kvarts."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["FewestHitsPages", "OnePage", "PageByPage", "SafeFirstPages"]

Name = tuple[object, tuple[object, ...]]
"""The identity of a full page: the tenant, and every token from the first to the end of the page."""


@dataclass(eq=False)
class OnePage:
    """One page of the device; `name` once it is findable."""

    name: Name | None = None
    refs: int = 1
    holds: int = 0
    hits: int = 0
    orphans: list[OnePage] | None = None
    """All copies of the page, if they left the tree while they were held."""


@dataclass
class PageByPage:
    """Pages that nothing references, by when they were released, and all copies of each name, the oldest first."""

    num_empty: int
    released: list[OnePage] = field(default_factory=list)
    copies: dict[Name, list[OnePage]] = field(default_factory=dict)
    evicted: list[Name] = field(default_factory=list)

    # What an order decides: least recently released unless a subclass says something else.

    def in_order(self) -> list[OnePage]:
        """Return the pages that nothing references, the next to be evicted first."""
        return self.released

    def list_page(self, page: OnePage) -> None:
        """Nothing references `page` any more."""
        self.released.append(page)

    def unlist(self, page: OnePage) -> None:
        """`page` is referenced again, or evicted."""
        self.released.remove(page)

    def hit(self, page: OnePage) -> None:
        """`page` was found by a request."""

    def settle(self) -> None:
        """What is resident has changed."""

    # What holds for every order.

    def cached(self) -> list[OnePage]:
        """Return the pages that can be evicted, in order."""
        return [page for page in self.in_order() if not page.holds]

    def lookup(self, names: list[Name]) -> list[OnePage]:
        """Return the pages found for as many of `names` as are resident."""
        found = []
        for name in names:
            if name not in self.copies:
                break
            found.append(self.copies[name][0])
        return found

    def _followers(self, name: Name) -> list[Name]:
        salt, tokens = name
        later = [other for other in self.copies if other[0] == salt and other[1][: len(tokens)] == tokens]
        nearest = min((len(other[1]) for other in later if other != name), default=0)
        return [other for other in later if len(other[1]) == nearest and other != name]

    def victim(self) -> OnePage:
        """Return the first page in order; or what came last of what follows it, and so on, since a page never
        outlives the one before it."""
        first = page = self.cached()[0]
        while not page.holds and (followers := self._lost_with(page)):
            page = self.copies[followers[-1]][0]
        if not page.holds:
            return page
        # What follows is held: something else goes, as long as there is anything that nothing follows.
        for page in self.cached():
            if not self._lost_with(page):
                return page
        while followers := self._lost_with(first):
            while followers:
                last = followers[-1]
                followers = self._followers(last)
            self.orphan(last)
        return first

    def _lost_with(self, page: OnePage) -> list[Name]:
        """Return what could not be found any more if this copy went."""
        assert page.name is not None
        return self._followers(page.name) if len(self.copies[page.name]) == 1 else []

    def orphan(self, name: Name) -> None:
        """All copies of a page leave the tree; they are held and nothing follows them."""
        copies = self.copies.pop(name)
        for page in copies:
            assert page.holds and not page.refs
            self.unlist(page)
            page.orphans = copies
        self.evicted.append(name)
        self.settle()

    def unhold(self, page: OnePage) -> None:
        """End one hold of all copies of a page."""
        assert page.name is not None
        for copy in self.copies[page.name] if page.orphans is None else page.orphans:
            copy.holds -= 1
            self.num_empty += copy.orphans is not None and copy.holds == 0

    def take(self) -> OnePage:
        """Take an empty page, or evict one."""
        if self.num_empty:
            self.num_empty -= 1
            return OnePage()
        page = self.victim()
        assert page.name is not None
        self.unlist(page)
        self.copies[page.name].remove(page)
        if not self.copies[page.name]:
            del self.copies[page.name]
            self.evicted.append(page.name)
        self.settle()
        return OnePage()

    def pin(self, page: OnePage) -> None:
        """Reference a page that was found."""
        if page.refs == 0:
            self.unlist(page)
        self.hit(page)
        page.refs += 1

    def publish(self, page: OnePage, name: Name) -> None:
        """Make a page findable."""
        if page.name is None:
            page.name = name
            copies = self.copies.setdefault(name, [])
            page.holds = copies[0].holds if copies else 0  # all copies of a page are held, or none
            copies.append(page)
            self.settle()

    def release(self, pages: list[OnePage]) -> None:
        """Drop a reference to each of `pages`, the last one first."""
        for page in reversed(pages):
            page.refs -= 1
            if page.refs == 0 and page.name is None:
                self.num_empty += 1
            elif page.refs == 0:
                self.list_page(page)


@dataclass
class FewestHitsPages(PageByPage):
    """What was found least often goes first, and of that what was released first."""

    def in_order(self) -> list[OnePage]:
        """Return pages by hits, then by release."""
        return sorted(self.released, key=lambda page: page.hits)

    def hit(self, page: OnePage) -> None:
        """Count."""
        page.hits += 1


@dataclass
class SafeFirstPages(PageByPage):
    """`safe` lists pages whose eviction loses nothing: they are `stored` below, and so is what follows."""

    safe: list[OnePage] = field(default_factory=list)
    stored: set[Name] = field(default_factory=set)

    def is_unsafe(self, page: OnePage) -> bool:
        """Return whether it is not stored below, or something resident after it is not."""
        assert page.name is not None
        salt, tokens = page.name
        return any(
            name not in self.stored for name in self.copies if name[0] == salt and name[1][: len(tokens)] == tokens
        )

    def settle(self) -> None:
        """Move what is safe now to the end of its list, and what no longer is to the beginning of the other."""
        self.stored &= set(self.copies)  # what is computed again has to be asked for anew
        newly_safe = [page for page in self.released if not self.is_unsafe(page)]
        newly_unsafe = [page for page in self.safe if self.is_unsafe(page)]
        self.released = newly_unsafe + [page for page in self.released if page not in newly_safe]
        self.safe = [page for page in self.safe if page not in newly_unsafe] + newly_safe

    def in_order(self) -> list[OnePage]:
        """Return what is safe, then the rest."""
        return self.safe + self.released

    def list_page(self, page: OnePage) -> None:
        """Put it where it belongs."""
        (self.released if self.is_unsafe(page) else self.safe).append(page)

    def unlist(self, page: OnePage) -> None:
        """Take it from where it is."""
        (self.safe if page in self.safe else self.released).remove(page)

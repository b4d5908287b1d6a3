"""A cache with KV groups above a tier that holds parts of pages as well.

Names are those of both: a name stays while either has a part of its page. So a prefix that all groups can go on from,
over device and tier together, is found in one walk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from kvarts.content import Content
from kvarts.kv.grouped_cache import GroupedCache
from kvarts.kv.parts import GroupedHolding, GroupMatch, PageName, PageNames, Part

__all__ = ["HeldAfterLoad", "Incoming", "TieredParts"]

Incoming = tuple[PageName, Part]
"""A part that a load fills, and the page that it is of."""

WHOLE = ("full", "latent")


class HeldAfterLoad:
    """What running requests hold of what a request begins with, of which the rest is loaded: `Held`, for GroupNeeds."""

    __slots__ = ("_needed", "_sink_pages")

    def __init__(self, needed: list[dict[int, Part | None]], sink_pages: list[int]) -> None:
        self._needed = needed
        self._sink_pages = sink_pages

    def num_shared(self, group: int, first_page: int) -> int:
        """Return how many parts others hold, of pages from `first_page` on and of the sink."""
        sink_pages = self._sink_pages[group]
        return sum(
            part is not None and part.refs > 0 and (page >= first_page or page < sink_pages)
            for page, part in self._needed[group].items()
        )

    def num_idle(self, group: int) -> int:
        """Return how many snapshots of a group of states nothing holds, or are to be loaded."""
        return sum(part is None or not part.refs for part in self._needed[group].values())


class TieredParts(GroupedCache):
    """A GroupedCache with parts in a tier below, which writes `below` of names.

    `on_complete` is called for every part of known tokens that is worth to be kept below: of groups that keep all
    tokens as soon as its page is full, of windows and chunks where another sequence may go on from, and snapshots. Its
    tokens are computed when the step ends. Such parts are `is_wanted` until a store of them begins.
    """

    on_complete: Callable[[Part], object] | None = None

    @property
    def names(self) -> PageNames:
        """The names of all pages."""
        return self._names

    @property
    def free_order(self) -> Iterator[Part]:
        """Cached parts, that which is evicted next first."""
        return iter(self._released)

    # What is worth to be kept ------------------------------------------------------------------------------

    def _complete(self, part: Part) -> None:
        if not part.is_wanted:
            part.is_wanted = True
            if self.on_complete is not None:
                self.on_complete(part)

    def _name(self, holding: GroupedHolding) -> None:
        start = len(holding.names)
        super()._name(holding)
        end = min(len(holding.names), holding.content.num_known_pages)
        for group, parts in zip(self.groups, holding.parts, strict=True):
            if group.layer.kind in WHOLE:
                for page in range(start, end):
                    self._complete(parts[page])

    def _keep_tails(self, holding: GroupedHolding) -> None:
        super()._keep_tails(holding)
        num_pages = holding.num_tokens // self.page_size
        if num_pages > holding.content.num_known_pages:
            return  # no other sequence has these tokens
        for group, parts in zip(self.groups, holding.parts, strict=True):
            if group.is_bounded:
                sink, first = self._needed(group, num_pages * self.page_size)
                for page in (*range(sink), *range(first, num_pages)):
                    part = parts.get(page)
                    if part is not None and part.name is not None:
                        self._complete(part)

    def _keep_snapshots(self, holding: GroupedHolding) -> None:
        name = holding.names[-1]
        missing = [index for index, group in enumerate(self.groups) if group.is_state and not name.copies[index]]
        super()._keep_snapshots(holding)
        if name.page < holding.content.num_known_pages:
            for index in missing:
                for part in name.copies[index]:
                    self._complete(part)

    # Finding ----------------------------------------------------------------------------------------------

    def match_below(self, content: Content, limit: int) -> GroupMatch:
        """Return the longest prefix that every group can go on from with what device and tier have together."""
        names = self._names.known(content, limit)
        return GroupMatch(names[: self._longest(map(_resident, names))])

    def needed(self, match: GroupMatch) -> list[dict[int, Part | None]]:
        """Return what a sequence needs after `match`, for each group by page; None where the device lacks it."""
        needed: list[dict[int, Part | None]] = []
        for index, group in enumerate(self.groups):
            sink, first = self._needed(group, match.num_pages * self.page_size)
            parts: dict[int, Part | None] = {}
            for page in (*range(sink), *range(first, match.num_pages)):
                copies = match.names[page].copies[index]
                parts[page] = copies[0] if copies else None
            needed.append(parts)
        return needed

    def held_after(self, match: GroupMatch) -> HeldAfterLoad:
        """Return what running requests hold of what a sequence needs after `match`."""
        sink_pages = [-(-group.layer.sink // self.page_size) for group in self.groups]
        return HeldAfterLoad(self.needed(match), sink_pages)

    # Transfers ----------------------------------------------------------------------------------------------

    def hold(self, parts: Iterable[Part]) -> None:
        """Keep parts in use for a transfer. `unhold` must follow."""
        for part in parts:
            self._pin(part)

    def unhold(self, parts: Sequence[Part], *, go_first: bool) -> None:
        """End what `hold` began, the last part first.

        What nothing else uses is evicted last, or next if it is to `go_first`.
        """
        for part in reversed(parts):
            self._release(part.group, (part,))
        if go_first:
            for part in reversed(parts):
                if not part.refs and part in self._released:
                    self._released.move_to_end(part, last=False)

    def begin_load(self, content: Content, match: GroupMatch) -> tuple[GroupedHolding, list[Incoming]]:
        """Begin a sequence after `match`: hold what the device has, and take parts for the rest, which a load fills.

        Return what it holds, and those parts, by group, then page. They fit. They cannot be found before `arrive`.
        """
        needed = self.needed(match)
        for parts in needed:
            for part in parts.values():
                if part is not None:
                    self._pin(part)
        for name in match.names:
            self._names.use(name)
        incoming: list[Incoming] = []
        held: list[dict[int, Part]] = []
        for index, parts in enumerate(needed):
            taken = iter(self._take(index, sum(part is None for part in parts.values())))
            of_group: dict[int, Part] = {}
            for page, part in parts.items():
                if part is None:
                    part = next(taken)  # noqa: PLW2901
                    part.is_kept = True
                    incoming.append((match.names[page], part))
                of_group[page] = part
            held.append(of_group)
        num_tokens = match.num_pages * self.page_size
        return GroupedHolding(content, num_tokens, list(match.names), held, [None] * len(self.groups)), incoming

    def arrive(self, incoming: Iterable[Incoming]) -> None:
        """Make parts findable that a load has filled; a sequence holds them."""
        for name, part in incoming:
            self._publish(part, name)
            self.num_published += 1

    # Laws ---------------------------------------------------------------------------------------------------

    def held_by_transfer(self, parts: Iterable[Part]) -> GroupedHolding:
        """Return what a transfer holds as `check` takes it."""
        nothing = Content(b"", num_tokens=0, page_size=self.page_size, owner=-1)
        return GroupedHolding(nothing, 0, [], [dict(enumerate(parts))], [None])


def _resident(name: PageName) -> list[object]:
    below = name.below
    if below is None:
        return list(name.copies)
    return [copies or (part is not None and part.is_here) for copies, part in zip(name.copies, below, strict=True)]

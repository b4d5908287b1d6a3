"""The cache of one model, as the scheduler, sharing, sessions and tiers see it.

Memory is counted in *blocks*. Where every layer keeps every token a block is a page; a model with KV groups has blocks
of the largest size that divides the parts of all groups. Sequences are counted in tokens, and the content of a sequence
is in its holding, so no caller needs to know what a page is made of:

    match      the longest resident prefix that every group can resume from
    open       hold a match                                  close      release everything
    extend     take blocks for tokens, publish full pages    settle     release what no later token attends to
    take_due   take the next page of many decodes            leap       do many steps of all decodes at once

`PageCache` is the cache of one group that keeps every token, `PartPages` that of any other model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from kvarts.content import Content
from kvarts.events import PartsMoved
from kvarts.kv.match import Match
from kvarts.kv.node import HeldPages, Path
from kvarts.kv.pool import PageError, PageId, Pool

__all__ = ["Cache", "Holding", "Leap", "Mark", "PageError"]


class Holding:
    """What one running request, or a pin, holds. Written by the cache.

    `path`: its full, findable pages. `num_pages`: all its pages, the partial last one included. `page_ids`: their
    ids in order of position, or None where pages are only counted. `is_open`: it was not closed yet.
    """

    __slots__ = ("content", "is_open", "num_pages", "page_ids", "path")

    def __init__(self, content: Content, path: Path, num_pages: int, page_ids: list[PageId] | None) -> None:
        self.content = content
        self.path = path
        self.num_pages = num_pages
        self.page_ids = page_ids
        self.is_open = True


class Leap:
    """Steps that a cache did at once. `taken`: pages taken, per step. `parts`: of a model with KV groups, else None."""

    __slots__ = ("parts", "taken")

    def __init__(self, taken: list[int], parts: PartsMoved | None = None) -> None:
        self.taken = taken
        self.parts = parts


class Mark:
    """Blocks at the mark of the last scheduled step: the first moment with the most blocks in use.

    `parts`: the parts used and cached in each KV group then, in pairs. Written by `Cache.look`.
    """

    __slots__ = ("cached", "parts", "released", "used")

    def __init__(self) -> None:
        self.used = self.cached = self.released = 0
        self.parts: tuple[int, ...] = ()


class Cache:
    """Owner of the blocks that it took from `pool`: which request has them, and what they hold.

    Where others take from the same memory, `num_free` is true from one `refresh` until one of them takes or releases
    something. A call that cannot be is a PageError, and changes nothing: a holding that is closed already, more blocks
    than are free, fewer than a holding has.
    """

    __slots__ = (
        "follows_decodes",
        "has_page_ids",
        "keeps_time",
        "match",
        "most_certain_steps",
        "names_decodes",
        "num_evicted",
        "num_free",
        "num_published",
        "num_released",
        "num_reserved",
        "page_blocks",
        "pool",
        "publishes_all",
        "settles",
        "take_pages",
    )

    match: Callable[[Content, int], Match]
    """Returns the longest prefix of a content, of at most so many full pages, that every group can resume from."""

    take_pages: Callable[[int], object]
    """Takes the next pages of so many decodes, which are free, without their names."""

    def __init__(self, pool: Pool, *, page_blocks: int) -> None:
        self.pool = pool
        self.has_page_ids = pool.has_ids
        self.names_decodes = pool.has_ids
        """Whether decodes take their next pages by `take_due`, each with its holding, and not by `take_pages`."""
        self.page_blocks = page_blocks
        """Blocks of a page with its parts in every group that keeps tokens: what a decode takes for its next page."""
        self.num_free = pool.num_empty
        """Blocks that can be taken now: empty or cached."""
        self.num_evicted = 0
        self.num_released = 0
        """Blocks that have gone out of use since the beginning; those that came into use are these and `num_used`."""
        self.num_reserved = 0
        """Blocks in use that stay in use when no request runs: counted by those that reserve or pin them."""
        self.num_published = 0
        """How often something of known tokens became findable since the beginning."""
        self.settles = False
        """Whether running requests release parts that none of their later tokens attends to: see `settle`."""
        self.keeps_time = False
        """Whether `set_time` has an effect: its eviction order uses times and the hints of requests."""
        self.follows_decodes = False
        """Whether the cache knows which decodes take and release what in a step, see `start_decoding`."""
        self.publishes_all = False
        """Whether a full page of a decode is published when its tokens are unknown, too, for its own request to find
        after a preemption."""
        self.most_certain_steps = 1 << 62
        """For how many steps of a leap it is certain beforehand that no request can be admitted."""

    @property
    def num_cached(self) -> int:
        """Blocks that hold a prefix and are not in use."""
        raise NotImplementedError

    @property
    def num_used(self) -> int:
        """Blocks that a request references or a transfer holds."""
        raise NotImplementedError

    def look(self, mark: Mark) -> None:
        """Set `mark` here if more blocks are in use than at the mark so far."""
        raise NotImplementedError

    def counts(self) -> tuple[int, ...]:
        """Return the parts used and the parts cached in each KV group, one pair a group; nothing for whole pages."""
        return ()

    def num_evicted_parts(self) -> tuple[int, ...]:
        """Return the parts evicted of each KV group, one number a group; nothing for whole pages."""
        return ()

    def reach(self, content: Content, limit: int) -> tuple[int, ...]:
        """Return, per KV group, the longest prefix of at most `limit` full pages that it alone could resume from.

        It explains why a hit was no longer. Nothing for whole pages.
        """
        return ()

    # What requests need ---------------------------------------------------------------------------------------

    def num_to_admit(self, match: Match, num_known: int) -> int:
        """Return the blocks to be free for a request of `num_known` tokens that begins with `match`."""
        raise NotImplementedError

    def num_to_run(self, holding: Holding, start: int, end: int) -> int:
        """Return the blocks to take for tokens [start, end) of `holding`."""
        raise NotImplementedError

    def num_to_finish(self, holding: Holding, start: int, end: int) -> int:
        """Return the most blocks that `holding` takes, at one time, to compute tokens [start, end) in any chunks."""
        raise NotImplementedError

    def num_to_compute(self, num_known: int, page_size: int) -> int:
        """Return the most blocks that a request of `num_known` tokens needs at one time, if it finds nothing."""
        raise NotImplementedError

    def num_at_most(self, num_tokens: int, page_size: int) -> int:
        """Return the most blocks that a request of `num_tokens` tokens needs to itself."""
        raise NotImplementedError

    def num_beyond(self, num_tokens: int, page_size: int, num_most: int) -> int:
        """Return the same if it is more than `num_most`, else 0."""
        num_blocks = self.num_at_most(num_tokens, page_size)
        return num_blocks if num_blocks > num_most else 0

    def most_tokens(self, limit: int, page_size: int) -> int:
        """Return how many tokens a sequence has at most, of up to `limit`, that can run in this memory; 0 for none."""
        raise NotImplementedError

    def need_words(self, num_blocks: int, page_size: int, asked: str) -> str:
        """Return the sentence that a request with the tokens `asked` needs `num_blocks`."""
        raise NotImplementedError

    @property
    def room_words(self) -> str:
        """The memory, as the subject of a sentence on how many blocks it has."""
        raise NotImplementedError

    # Sequences ------------------------------------------------------------------------------------------------

    def open(self, match: Match) -> Holding:
        """Hold what was found; the cache must not have changed since."""
        raise NotImplementedError

    def extend(self, holding: Holding, num_tokens: int, *, is_end: bool) -> None:
        """Take what tokens up to `num_tokens` need, and publish the pages that they fill. `num_free` blocks are enough.

        `is_end`: other sequences may go on from here, as after a prompt.
        """
        raise NotImplementedError

    def take_page(self, holding: Holding, page: int) -> None:
        """Take the blocks of `page`, the next of `holding`, of which no token is computed yet."""
        raise NotImplementedError

    def take_due(self, holdings: Sequence[Holding], page_of: Sequence[int]) -> None:
        """Take the next pages of decodes, page `page_of[i]` of `holdings[i]`. They are free."""
        raise NotImplementedError

    def publish(self, holding: Holding, num_tokens: int) -> None:
        """Make the full pages of the first `num_tokens` tokens findable, all of which are computed or about to be."""
        raise NotImplementedError

    def shrink(self, holding: Holding, num_pages: int) -> None:
        """Give back all but the first `num_pages` pages of `holding`, in which no computed token is."""
        raise NotImplementedError

    def settle(self, holding: Holding, num_tokens: int) -> None:
        """Release what no token from `num_tokens` on attends to. `count` must follow."""

    def count(self) -> None:
        """Bring the counts up to date after `settle` or `end_step`."""

    def close(self, holding: Holding, num_full_pages: int, num_pages: int) -> None:
        """Release everything: full pages that can be found become cached, deepest first, the rest empty.

        `num_pages` is what the request holds: a decode that takes its pages in bulk has more than the holding knows.
        """
        raise NotImplementedError

    def freed_by(self, holdings: Iterable[tuple[Holding | None, int]]) -> Iterator[int]:
        """Return, one by one, how many blocks go out of use as each of `holdings`, with its pages, is closed."""
        raise NotImplementedError

    # Decodes that the cache follows ----------------------------------------------------------------------------

    def start_decoding(self, holding: Holding, admission: int) -> None:
        """Let a settled sequence compute a token in every step from the next on; `admission`: its place in order."""
        raise NotImplementedError

    def stop_decoding(self, holding: Holding, num_pages: int) -> None:
        """Let a sequence that holds `num_pages` pages compute no token in this step; `extend` goes on with it."""

    def publish_due(self) -> None:
        """Publish the pages that decodes fill in this step and that others may find."""
        raise NotImplementedError

    def end_step(self) -> None:
        """Let decodes release what none of their later tokens attends to. `count` must follow."""
        raise NotImplementedError

    def fills_known_page(self) -> bool:
        """Return whether a decode fills a page in this step that others may find."""
        raise NotImplementedError

    def leap(self, most_steps: int, num_wanted: int) -> Leap:
        """Do up to `most_steps` steps of all decodes, all but the last of which have ended when this returns.

        It ends earlier where memory falls short, or `num_wanted` blocks are free.
        """
        raise NotImplementedError

    # Loads ----------------------------------------------------------------------------------------------------

    def open_to_load(self, match: Match, num_known: int) -> Holding:
        """Hold what was found and take the blocks for the rest of `num_known` tokens, some of which a load fills."""
        raise NotImplementedError

    def publish_loaded(self, holding: Holding, num_pages: int) -> None:
        """Make the first `num_pages` pages of `holding`, the last of which a load has filled, findable."""
        raise NotImplementedError

    # Memory ---------------------------------------------------------------------------------------------------

    def set_time(self, now_ns: int) -> None:
        """Set the time of what is opened and closed from now on."""

    def refresh(self, num_free: int) -> None:
        """Take note that `num_free` blocks are free, in a memory from which others take as well."""
        self.num_free = num_free

    def has_empty(self, count: int) -> bool:
        """Return whether `count` blocks can be taken and nothing is evicted for them."""
        return self.pool.has_empty(count)

    def take(self, count: int) -> list[PageId] | None:
        """Take `count` blocks, at most `num_free`: empty ones, then cached ones in the order of eviction.

        Return their ids, or None where blocks are only counted. Raise PageError for more than are free.
        """
        raise NotImplementedError

    def give(self, count: int, page_ids: list[PageId] | None) -> None:
        """Give back `count` blocks that `take` took."""
        raise NotImplementedError

    def shed(self, count: int) -> None:
        """Evict cached blocks until `count` more are empty."""
        raise NotImplementedError

    def num_pages_of(self, match: Match) -> int:
        """Return how many blocks a request holds that begins with what was found."""
        raise NotImplementedError

    def reserved(self, num_pages: int, page_ids: list[PageId] | None) -> Holding:
        """Return blocks that `take` took as something that holds them."""
        raise NotImplementedError

    def keep(self, holding: Holding) -> int:
        """Note that `holding` stays when no request runs; return how many of its blocks nothing else keeps."""
        raise NotImplementedError

    def unkeep(self, holding: Holding) -> int:
        """Undo a `keep`; return how many blocks nothing keeps any more."""
        raise NotImplementedError

    def runs(self) -> Iterator[tuple[int, Content, int, int, int]]:
        """Return parts that can be found, and their copies.

        A group, 0 for whole pages, a content, the first page, the page after the last, how often they are referenced.
        """
        raise NotImplementedError

    # Laws -----------------------------------------------------------------------------------------------------

    def is_check_due(self, *, at_rest: bool) -> bool:
        """Return whether so much has changed since the last `check` that another one is worth its time."""
        return True

    def check(self, holdings: Iterable[tuple[Holding, int]], holds: Iterable[HeldPages] = ()) -> None:
        """Assert laws L1, L2 and L3, given all holdings with the number of pages of each, and what transfers hold."""
        raise NotImplementedError

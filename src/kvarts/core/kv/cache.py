"""The cache of one model, as the scheduler, sharing, sessions and tiers see it, and pages kept out of its traffic.

Memory is counted in *blocks*. Where every layer keeps every token a block is a page; a model with KV groups has blocks
of the largest size that divides the parts of all groups. Sequences are counted in tokens, and the content of a sequence
is in its block table, so no caller needs to know the layout of a page:

    match         the longest resident prefix that every group can resume from
    open          hold a match
    extend        take blocks for tokens, publish full pages
    take_due      take the next page of many decodes
    free_skipped  release parts that no later token attends to
    close         release everything
    take          take blocks for other than requests

A `Cache` is the sequences of one `Memory`. Its roles are separate objects, as few callers need more than one:

    needs      the blocks that a request needs now, later, at least
    decodes    leaps over steps of decodes whose releases the cache follows, or None
    incoming   loads from tiers below, and prompts that other engines compute
    states     where sequences can begin and chunks end, which states that are kept by page restrict
    late       pages that may be published late, or None

`PageCache` is the cache of one group that keeps every token, `GroupPages` that of any other model.

A `PageReserve` takes pages out permanently: no request gets them until they are returned. `Pins` keep cached pages in
use for later, as long as no request needs their memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Protocol

from kvarts.core.content import Content
from kvarts.core.event_log import Emit
from kvarts.core.events import PagesPinned, PagesReserved, PagesUnpinned, PartsMoved, PerStep
from kvarts.core.kv.eviction import Path, PinnedPages
from kvarts.core.kv.pool import PageError, PageId, Pool

__all__ = [
    "BlockTable",
    "Cache",
    "FollowedDecodes",
    "Incoming",
    "LatePages",
    "Leap",
    "Lender",
    "Mark",
    "Match",
    "Memory",
    "Needs",
    "PageError",
    "PageReserve",
    "Pins",
    "States",
]


class Match:
    """The longest resident prefix of `content`. Valid until the tree changes.

    `num_pages`: its length. `num_shared`: how many of these pages are in use. `nodes`: the runs; the last one may reach
    beyond `num_pages`.
    """

    __slots__ = ("content", "nodes", "num_pages", "num_shared")

    def __init__(self, content: Content, nodes: Path, num_pages: int, num_shared: int) -> None:
        self.content = content
        self.nodes = nodes
        self.num_pages = num_pages
        self.num_shared = num_shared


class BlockTable:
    """The pages that one running request, or a pin, holds. Written by the cache.

    `path`: its full, findable pages. `num_pages`: all its pages, including the last, partial one. `page_ids`: their ids
    in order of position, or None where pages are only counted. `is_open`: it was not closed yet.
    """

    __slots__ = ("content", "is_open", "num_pages", "page_ids", "path")

    def __init__(self, content: Content, path: Path, num_pages: int, page_ids: list[PageId] | None) -> None:
        self.content = content
        self.path = path
        self.num_pages = num_pages
        self.page_ids = page_ids
        self.is_open = True

    @property
    def num_named(self) -> int:
        """How many pages, from the first on, were made findable."""
        return self.path[-1].end if self.path else 0


class Leap:
    """Steps that a cache did at once. `taken`: pages taken per step. `parts`: for a model with KV groups, else None."""

    __slots__ = ("parts", "taken")

    def __init__(self, taken: PerStep, parts: PartsMoved | None = None) -> None:
        self.taken = taken
        self.parts = parts


class Mark:
    """Blocks at the mark of the last scheduled step: the first moment with the most blocks in use.

    `parts`: the parts used and cached in each KV group at that moment, in pairs. Written by `Cache.look`.
    """

    __slots__ = ("cached", "parts", "released", "used")

    def __init__(self) -> None:
        self.used = self.cached = self.released = 0
        self.parts: tuple[int, ...] = ()


class Lender(Protocol):
    """Stores to a tier below, which keep idle blocks of a cache in use and give them back when these are wanted."""

    def num_lent(self) -> int:
        """Return the blocks that stores hold and no request does."""

    def return_lent(self, count: int) -> None:
        """Give stores up, the youngest first, until at least `count` of these blocks are free: at most `num_lent`."""


class NoLender:
    """Without a tier below, nothing is lent."""

    def num_lent(self) -> int:
        """Return 0."""
        return 0

    def return_lent(self, count: int) -> None:
        """Give back nothing."""
        assert count <= 0, f"{count} blocks asked of stores, and there are none"


class Memory(ABC):
    """The blocks that one cache took from `pool`: of requests, of pins, in reserve, or cached.

    If others take from the same memory, `num_free` is correct from a `refresh` until one of them takes or releases
    blocks. An invalid call raises PageError and changes nothing: more blocks than are free, fewer than a block table
    has.
    """

    __slots__ = (
        "lender",
        "mean_page_blocks",
        "num_evicted",
        "num_free",
        "num_promised",
        "num_released",
        "num_reserved",
        "page_blocks",
        "pool",
    )

    def __init__(self, pool: Pool, page_blocks: int) -> None:
        self.pool = pool
        self.lender: Lender = NoLender()
        """Stores to a tier below."""
        self.page_blocks = page_blocks
        """The most blocks that a decode needs for its next page, with its parts in every group that keeps tokens."""
        self.mean_page_blocks = page_blocks
        """The same blocks on average; fewer if the blocks of groups hold different numbers of tokens."""
        self.num_free = pool.num_empty
        """Blocks that can be taken now: empty or cached."""
        self.num_promised = 0
        """Free blocks that are reserved for requests that will take them; they are not in `num_free`."""
        self.num_evicted = 0
        self.num_released = 0
        """Total of blocks released since the beginning; the total of blocks taken into use is this plus `num_used`."""
        self.num_reserved = 0
        """Blocks that stay in use when no request runs: counted by the code that reserves or pins them."""

    @property
    @abstractmethod
    def num_cached(self) -> int:
        """Blocks that hold a prefix and are not in use."""

    @property
    @abstractmethod
    def num_used(self) -> int:
        """Blocks that a request references or a transfer holds."""

    def begin_blocks(self, page: int) -> int:
        """Return the blocks that a decode takes for the first token of `page`."""
        return self.page_blocks

    @abstractmethod
    def look(self, mark: Mark) -> None:
        """Set `mark` to the current counts if more blocks are in use than at the mark so far."""

    @abstractmethod
    def counts(self) -> tuple[int, ...]:
        """Return the parts used and cached in each KV group, as one pair per group; empty for whole pages."""

    @abstractmethod
    def num_evicted_parts(self) -> tuple[int, ...]:
        """Return the number of evicted parts of each KV group; empty for whole pages."""

    @abstractmethod
    def take(self, count: int) -> list[PageId] | None:
        """Take `count` blocks, at most `num_free`: empty ones, then cached ones in the order of eviction.

        Return their ids, or None where blocks are only counted. Raise PageError for more than are free.
        """

    @abstractmethod
    def give(self, count: int, page_ids: list[PageId] | None) -> None:
        """Return `count` blocks that were taken by `take`."""

    @abstractmethod
    def evict(self, count: int) -> None:
        """Evict cached blocks until `count` more are empty."""

    @abstractmethod
    def has_empty(self, count: int) -> bool:
        """Return whether `count` blocks can be taken without eviction."""

    def refresh(self, num_free: int) -> None:
        """Record that `num_free` blocks are free, in a memory from which others take as well."""
        self.num_free = num_free

    @abstractmethod
    def reserved(self, num_pages: int, page_ids: list[PageId] | None) -> BlockTable:
        """Return a block table of blocks that were taken by `take`."""

    @abstractmethod
    def keep(self, table: BlockTable) -> int:
        """Record that `table` stays when no request runs; return how many of its blocks no other `keep` covers."""

    @abstractmethod
    def unkeep(self, table: BlockTable) -> int:
        """Undo a `keep`; return how many blocks are not kept any more."""

    @abstractmethod
    def runs(self) -> Iterator[tuple[int, Content, int, int, int]]:
        """Yield the findable parts and their copies.

        Each as the group (0 for whole pages), the content, the first page, the page after the last, and the number of
        references.
        """

    @abstractmethod
    def is_check_due(self, *, at_rest: bool) -> bool:
        """Return whether enough has changed since the last `check` to make another worth its time."""

    @abstractmethod
    def check(self, tables: Iterable[tuple[BlockTable, int]], holds: Iterable[PinnedPages] = ()) -> None:
        """Assert laws L1, L2 and L3, given all block tables with their numbers of pages, and the pages of transfers."""


class Cache(Memory):
    """The sequences of requests in a Memory: which prefix is resident, the blocks they hold, what can be found.

    A block table that is already closed raises PageError. What else a cache can be asked is in its roles: `needs`, what
    a request takes; `incoming`, KV that is computed elsewhere; `states`; and, where they apply, `decodes` and `late`.
    """

    __slots__ = (
        "decodes",
        "frees_skipped",
        "incoming",
        "keeps_time",
        "late",
        "match",
        "most_certain_steps",
        "names_decodes",
        "needs",
        "num_published",
        "orders_releases",
        "publishes_all",
        "releases",
        "states",
        "take_pages",
    )

    needs: Needs
    """What requests need of the memory."""

    incoming: Incoming
    """KV that comes from elsewhere."""

    match: Callable[[Content, int], Match]
    """Returns the longest prefix of a content, up to a number of full pages, that every group can resume from."""

    take_pages: Callable[[int], object]
    """Takes the next pages, which must be free, of a number of decodes without identifying these."""

    def __init__(self, pool: Pool, *, page_blocks: int) -> None:
        super().__init__(pool, page_blocks)
        self.decodes: FollowedDecodes | None = None
        """The decodes, if the cache knows which of them take and release parts in a step; else None."""
        self.states = States()
        """Where sequences can begin, and where the chunks of prompts end."""
        self.late: LatePages | None = None
        """What an owner of pages that it publishes late must know; None if none may be published late."""
        self.names_decodes = pool.has_ids
        """Whether decodes take their next pages by `take_due`, each with its block table, and not by `take_pages`."""
        self.num_published = 0
        """The number of times that parts of known tokens became findable since the beginning."""
        self.frees_skipped = False
        """Whether `free_skipped` must be called: blocks are of parts of pages, in KV groups."""
        self.releases = False
        """Whether running requests release parts that none of their later tokens attends to: some group keeps less."""
        self.orders_releases = False
        """Whether parts that a decode releases may become empty, so that decodes must take pages in their order."""
        self.keeps_time = False
        """Whether `set_time` has an effect: its eviction order uses times and the hints of requests."""
        self.publishes_all = False
        """Whether a decode's full page is published even if its tokens are unknown, so that its own request finds it
        after a preemption."""
        self.most_certain_steps = (1 << 62) - 1
        """The number of steps of a leap in which it is certain beforehand that no request can be admitted."""

    def unmoved(self, num_steps: int) -> PartsMoved | None:
        """Return what a leap states of the parts of KV groups, if none moves in its steps; None without groups."""
        return None

    def held(self) -> list[tuple[BlockTable, int]]:
        """Return what the cache itself keeps in use, as block tables with their numbers of pages."""
        return []

    @abstractmethod
    def set_time(self, now_ns: int) -> None:
        """Set the time at which block tables are opened and closed from now on."""

    @abstractmethod
    def reach(self, content: Content, limit: int) -> tuple[int, ...]:
        """Return, per KV group, the longest prefix of at most `limit` full pages that it alone could resume from.

        It explains why a hit was not longer. Empty for whole pages.
        """

    @abstractmethod
    def open(self, match: Match) -> BlockTable:
        """Hold `match`; the cache must not have changed since it was made."""

    @abstractmethod
    def extend(self, table: BlockTable, num_tokens: int, *, is_end: bool) -> None:
        """Take the blocks of tokens up to `num_tokens`, which must be free, and publish the pages that they fill.

        `is_end`: other sequences may continue from here, as after a prompt.
        """

    @abstractmethod
    def take_for(self, table: BlockTable, num_tokens: int) -> None:
        """Take the blocks of tokens up to `num_tokens`, which must be free, as far as `table` does not have them.

        They are not computed yet: `extend` or `publish` follows, or `close`.
        """

    @abstractmethod
    def take_page(self, table: BlockTable, page: int) -> None:
        """Take the blocks of `page`, the next page of `table`; none of its tokens is computed yet."""

    @abstractmethod
    def take_due(self, tables: Sequence[BlockTable]) -> None:
        """Take the next page of each of `tables`, which decode. These pages must be free."""

    @abstractmethod
    def publish(self, table: BlockTable, num_tokens: int) -> None:
        """Make the full pages of the first `num_tokens` tokens findable; these are computed or about to be."""

    @abstractmethod
    def shrink(self, table: BlockTable, num_pages: int) -> None:
        """Release all but the first `num_pages` pages of `table`; the others contain no computed token."""

    @abstractmethod
    def free_skipped(self, table: BlockTable, num_tokens: int, num_in_flight: int = 0) -> None:
        """Release parts that no token from `num_tokens`, the next to compute, on attends to. `count` must follow.

        `num_in_flight`: the last tokens before it, which attend to their parts until they are computed.
        """

    @abstractmethod
    def count(self) -> None:
        """Update the counts after `free_skipped` or the end of a step."""

    @abstractmethod
    def stop_decoding(self, table: BlockTable, num_pages: int) -> None:
        """Let a sequence that holds `num_pages` pages compute no token in this step; `extend` continues it."""

    @abstractmethod
    def close(self, table: BlockTable, num_full_pages: int, num_pages: int) -> None:
        """Release everything: full pages that can be found become cached, deepest first, the rest empty.

        `num_pages` is the number that the request holds: for a decode that takes its pages in bulk, it is more than the
        block table has recorded.
        """


class Needs(ABC):
    """What requests need of a memory: in blocks, now, later, or at least. The role of a cache that answers it.

    `page_size`: tokens of a page, where no content tells it.
    """

    __slots__ = ("room_words",)

    def __init__(self, room_words: str) -> None:
        self.room_words = room_words
        """The memory, as the subject of a sentence on the number of its blocks."""

    @abstractmethod
    def to_admit(self, match: Match, num_known: int, budget: int, num_kept: int = 0) -> int:
        """Return the blocks that must be free for a request of `num_known` tokens that begins with `match`.

        `budget`: the most tokens that its first step may compute. `num_kept`: blocks that must stay free.
        """

    @abstractmethod
    def least_to_admit(self, match: Match, num_known: int, budget: int) -> int:
        """Return a lower bound of `to_admit` that stays valid until another holder takes parts of `match`."""

    @abstractmethod
    def watch(self) -> None:
        """Begin to observe for `may_shrink` what becomes findable."""

    @abstractmethod
    def may_shrink(self, num_pages: int) -> bool:
        """Return whether a request that found `num_pages` pages at the last `watch` may need fewer blocks than then.

        For as long as no other holder took a part of what it found.
        """

    @abstractmethod
    def to_run(self, table: BlockTable, start: int, end: int) -> int:
        """Return the blocks to take for tokens [start, end) of `table`."""

    @abstractmethod
    def to_finish(self, table: BlockTable, num_tokens: int) -> int:
        """Return the most blocks that `table` takes, at one time, until `num_tokens` tokens are computed."""

    @abstractmethod
    def to_compute(self, num_known: int, page_size: int) -> int:
        """Return the most blocks that a request of `num_known` tokens needs at one time, without a hit."""

    @abstractmethod
    def alone(self, num_tokens: int, page_size: int, enough: int = 0) -> int:
        """Return the most blocks that a request of `num_tokens` tokens needs when nothing else runs.

        0 if `enough` blocks suffice.
        """

    @abstractmethod
    def most_tokens(self, limit: int, page_size: int) -> int:
        """Return the longest sequence, of up to `limit` tokens, that can run in this memory; 0 if none can."""

    @abstractmethod
    def words(self, num_blocks: int, page_size: int, asked: str) -> str:
        """Return the clause that a request with the tokens `asked` needs `num_blocks`."""

    @abstractmethod
    def to_hold(self, match: Match) -> int:
        """Return how many blocks a request that begins with `match` holds, shared ones included."""

    @abstractmethod
    def lent_of(self, match: Match) -> int:
        """Return how many blocks of `match` stores hold and no request does."""

    @abstractmethod
    def freed_by(self, tables: Iterable[tuple[BlockTable | None, int]]) -> Iterator[int]:
        """Yield the number of blocks that go out of use as each of `tables`, with its pages, is closed in turn."""


class FollowedDecodes(ABC):
    """Decodes of a cache that knows in which steps they take, fill and release parts, and can leap over these."""

    __slots__ = ()

    @abstractmethod
    def start(self, table: BlockTable, num_tokens: int, admission: int, *, is_settled: bool = True) -> None:
        """Let a sequence of `num_tokens` tokens compute one per step from the next on; `admission`: its place in order.

        A sequence that is not settled releases nothing before `free_skipped` is called.
        """

    @abstractmethod
    def publish_due(self, first: int, end: int) -> None:
        """Publish the pages that decodes fill in this step and that other requests may find, if `first` is below 0.

        If a reader receives events of pages, publish or report all that decodes of admissions from `first` up to `end`
        fill.
        """

    @abstractmethod
    def end_step(self) -> None:
        """Let decodes release the parts that none of their later tokens attends to. `Cache.count` must follow."""

    @property
    @abstractmethod
    def counts_turns(self) -> bool:
        """Whether the three methods below apply, where releases are in order: `Cache.orders_releases`."""

    @abstractmethod
    def begin_releases(self, table: BlockTable, num_tokens: int, num_in_flight: int, admission: int) -> None:
        """Do what Cache.free_skipped does for a sequence that is about to start, after `end_step`."""

    @abstractmethod
    def needs_turns(self, num_due: int) -> bool:
        """Return whether it matters to the next step in which order `num_due` decodes take pages.

        A decode can use what became empty after the last step only if it was released at its own turn or before.
        """

    @abstractmethod
    def make_room_in_turns(self, tables: Sequence[BlockTable]) -> None:
        """Let so many blocks be empty that `tables` can take a page each, as if each took it at its turn.

        They are all decodes that take one in the next step, in the order of admission.
        """

    @abstractmethod
    def defer_skipped(self, tables: Sequence[BlockTable]) -> None:
        """End the step for decodes, but postpone the releases of `tables` until `free_skipped` is called for each.

        `tables`: all decodes that would release something.
        """

    @abstractmethod
    def fills_known_page(self) -> bool:
        """Return whether a decode fills a page in this step that other requests may find."""

    @abstractmethod
    def leap(self, most_steps: int, num_wanted: int, first_step: int, starts_ns: Sequence[int]) -> Leap:
        """Do up to `most_steps` steps of all decodes; all but the last have ended when this returns.

        The leap ends earlier if memory is short, or if `num_wanted` blocks are free. Its events are of the steps from
        `first_step` on, which begin at `starts_ns`; that is empty if no reader receives events of pages.
        """


class Incoming(ABC):
    """KV that is not computed here: loads from a tier below, and prompts that other engines compute."""

    __slots__ = ()

    @abstractmethod
    def open_to_load(self, match: Match, num_known: int, on_device: Match) -> BlockTable:
        """Hold `match` and take the blocks for the rest of `num_known` tokens; a load fills some of them.

        `on_device`: the part of it that the device has.
        """

    @abstractmethod
    def publish_loaded(self, table: BlockTable, num_pages: int) -> None:
        """Make the first `num_pages` pages of `table` findable; a load has filled the last of them."""

    # Loads of a request that reserves what it needs until its known tokens are computed. `found`: what the device and a
    # load have together; for whole pages, that of the device alone. The pages of a *front* are computed meanwhile.

    @abstractmethod
    def to_reserve(self, found: Match, num_known: int) -> int:
        """Return the blocks that must be free for that; 0 if they are no more than the request needs without a load."""

    @abstractmethod
    def to_front(self, match: Match, num_front: int) -> int:
        """Return the blocks that a front of `num_front` pages after `match` needs as well."""

    @abstractmethod
    def held_reserved(self, match: Match, found: Match, num_known: int, num_front: int) -> int:
        """Return the blocks that the request has from the beginning of its load, reserved ones included."""

    @abstractmethod
    def open_reserved(self, match: Match, found: Match, num_known: int, num_front: int) -> BlockTable:
        """Hold what the device has, take what the load fills, and reserve the rest."""

    @abstractmethod
    def begin_front(self, table: BlockTable, num_tokens: int, num_in_flight: int) -> None:
        """Do as `Cache.free_skipped` for a front, whose next tokens use it. `extend_front` must follow."""

    @abstractmethod
    def extend_front(self, table: BlockTable, num_tokens: int) -> None:
        """Take the blocks of tokens up to `num_tokens`, which are computed while others are loaded."""

    @abstractmethod
    def arrive(self, table: BlockTable, num_pages: int, end: int) -> bool:
        """End a load of pages up to `end`, of which `num_pages` are there; return whether its request goes on after it.

        Its front is computed, or given up.
        """

    @abstractmethod
    def end_promise(self, table: BlockTable) -> None:
        """Make the blocks reserved for a block table free for all: its request is about to take them."""

    @abstractmethod
    def begin_run(self, table: BlockTable) -> None:
        """Release what only the front attended to: its request goes on after the loaded pages."""

    @abstractmethod
    def drop(self, table: BlockTable) -> None:
        """Release everything that a request holds which never ran; pages that were found or loaded stay cached."""

    # Loads into no more than they fill, as by a KV connector of vLLM. `found`: what the device and a load have
    # together; for whole pages, that of the device alone, and the load ends with page `end`.

    @abstractmethod
    def held(self, found: Match, end: int) -> int:
        """Return the blocks that a request holds while its load is under way."""

    @abstractmethod
    def to_load(self, match: Match, found: Match, end: int) -> int:
        """Return the blocks that must be free to hold these; `match` is on the device."""

    @abstractmethod
    def to_admit(self, match: Match, found: Match, num_known: int, budget: int, num_kept: int = 0) -> int:
        """Return the blocks that must be free for a request that has `match` on the device, and more by a load.

        `budget`: the most tokens that it may compute in the step that admits it. `num_kept`: blocks to leave free.
        """

    @abstractmethod
    def to_go_on(self, table: BlockTable, num_known: int, budget: int, num_planned: int = 0) -> int:
        """Return the blocks that must be free to compute the known tokens of a request whose load has ended.

        `budget`: the most tokens that it may compute in the next step; 0 to ask only for the most blocks at one time.
        `num_planned`: those of its last tokens that are computed in the step being planned.
        """

    # Prompts that other engines compute.

    @abstractmethod
    def num_sent(self, start: int, num_tokens: int, page_size: int) -> int:
        """Return the blocks of the parts with which the last of `num_tokens` tokens is computed again.

        Only parts of pages from token `start` on, the first of a page, are counted.
        """

    @abstractmethod
    def to_receive(self, match: Match, num_tokens: int) -> int:
        """Return the blocks that must be free to `open_to_receive` a prompt of `num_tokens` tokens after `match`."""

    @abstractmethod
    def open_to_receive(self, match: Match, num_tokens: int) -> BlockTable:
        """Hold `match`, and take the further parts with which the last of `num_tokens` tokens is computed again.

        The new parts cannot be found before `receive`.
        """

    @abstractmethod
    def receive(self, table: BlockTable, num_tokens: int) -> None:
        """Record that the KV of the first `num_tokens` tokens has arrived: their full pages can be found."""


class States:
    """States of sequences, where no group keeps them by page: sequences begin and chunks of prompts end anywhere.

    `aligns`: states are kept only where chunks end, so chunks of prompts end at pages. `defers`: `begin_step` must be
    called, as no request can begin after a state that the same step computes. `renames`, `saves_inside` and
    `drops_last`: as of GroupMemory. `adds_room`: the cache itself takes the room that a request has for drafts after
    the tokens of a step.
    """

    __slots__ = ("adds_room", "aligns", "defers", "drops_last", "renames", "saves_inside")

    def __init__(
        self,
        *,
        aligns: bool = False,
        defers: bool = False,
        renames: bool = True,
        saves_inside: bool = False,
        adds_room: bool = False,
        drops_last: bool = False,
    ) -> None:
        self.adds_room = adds_room
        self.drops_last = drops_last
        self.aligns = aligns
        self.defers = defers
        self.renames = renames
        self.saves_inside = saves_inside

    def begin_step(self) -> None:
        """Begin a step: no state is computed in it yet."""

    def begin(self, table: BlockTable, prefill_end: int) -> None:
        """Begin a sequence that decodes after `prefill_end` tokens."""

    def note(self, content: Content, page: int) -> None:
        """Treat the state after the first `page` pages of `content` as one that the current step computes."""

    def is_of_step(self, match: Match) -> bool:
        """Return whether the current step computes the state after `match`, or a copy of it."""
        return False

    def branch_of(self, match: Match) -> int:
        """Return the tokens up to which groups that keep all tokens have its content, if that is more than `match`."""
        return 0

    def branch(self, table: BlockTable) -> int:
        """Return the same for a sequence, as of when it began."""
        return 0

    def num_found(self, content: Content, limit: int) -> int:
        """Return how many of the first `limit` pages of `content` the groups that keep all tokens have."""
        return 0


class LatePages(ABC):
    """What the owner of decodes must know to publish their full pages some steps late without an effect."""

    __slots__ = ()

    @abstractmethod
    def call_before_reads(self, publish: Callable[[], object]) -> None:
        """Call `publish` before pages are looked for: its owner may publish full pages of decodes late.

        The owner publishes them itself before anything else is published, and before a block table is closed.
        """

    @abstractmethod
    def is_distinct(self, table: BlockTable) -> bool:
        """Return whether no other block table has the last findable page of `table` or an equal one."""

    @abstractmethod
    def repeats(self, table: BlockTable) -> bool:
        """Return whether the next page of `table` that becomes findable will be a copy of a resident one."""


class PageReserve:
    """Owner of pages that were taken from `cache`, and of the number of sequences that share each."""

    def __init__(self, cache: Memory, emit: Emit | None = None) -> None:
        self._cache = cache
        self._emit = emit
        self.num_pages = 0
        self.has_page_ids = cache.pool.has_ids
        self._num_numbered = 0
        """The count of page numbers handed out; where pages are only counted, the reserve numbers its pages itself."""
        self._free_ids: list[PageId] = []
        self._num_sharing: dict[PageId, int] = {}
        """The number of sharers of each taken page, or of the first page of several taken as one."""
        self._others: dict[PageId, list[PageId]] = {}
        """The other pages of several taken as one, by their first page; they stay together when they are released."""
        self._free_as_one: dict[int, list[PageId]] = {}
        """First pages of several that were taken as one and released, by the number of these."""

    @property
    def num_taken(self) -> int:
        """Pages that are taken."""
        return sum(1 + len(self.taken_with(page_id)) for page_id in self._num_sharing)

    def extend(self, num_pages: int) -> None:
        """Take `num_pages` from the cache. Raise PageError for more than are free."""
        if num_pages > self._cache.num_free:
            raise PageError(f"{num_pages} pages asked for, {self._cache.num_free} free")
        self._say(num_pages)  # before the evictions for it
        page_ids = self._cache.take(num_pages)
        if page_ids is None:
            page_ids = [PageId(self._num_numbered + index) for index in range(num_pages)]
            self._num_numbered += num_pages
        self._free_ids += page_ids

    def shrink(self, num_pages: int) -> None:
        """Return `num_pages` pages that are not taken to the cache."""
        if num_pages > len(self._free_ids):
            self._break_up()
        assert num_pages <= len(self._free_ids), f"{num_pages} pages to give back, {len(self._free_ids)} are free"
        at = len(self._free_ids) - num_pages
        page_ids = self._free_ids[at:]
        del self._free_ids[at:]
        self._cache.give(num_pages, page_ids if self.has_page_ids else None)
        self._say(-num_pages)

    def _say(self, num_pages: int) -> None:
        self.num_pages += num_pages
        self._cache.num_reserved += num_pages
        if self._emit is not None:
            self._emit(PagesReserved(self.num_pages))

    def take(self, num_pages: int = 1) -> PageId:
        """Take a page, or several as one, and return the first; it is shared and released for all of them.

        They are available: a taker has reserved the most pages that it takes.
        """
        if num_pages > 1 and (free := self._free_as_one.get(num_pages)):
            page_id = free.pop()
            self._num_sharing[page_id] = 1
            return page_id
        if num_pages > len(self._free_ids):
            self._break_up()
        page_id = self._free_ids.pop()
        self._num_sharing[page_id] = 1
        if num_pages > 1:
            at = len(self._free_ids) - num_pages + 1
            assert at >= 0, "more pages were taken than the taker has reserved"
            self._others[page_id] = self._free_ids[at:]
            del self._free_ids[at:]
        return page_id

    def taken_with(self, page_id: PageId) -> Sequence[PageId]:
        """Return the other pages that were taken with a page, as one."""
        return self._others.get(page_id, ())

    def share(self, page_id: PageId) -> None:
        """Add a sharer of a page."""
        self._num_sharing[page_id] += 1

    def is_shared(self, page_id: PageId) -> bool:
        """Return whether a page has more than one sharer."""
        return self._num_sharing[page_id] > 1

    def release(self, page_id: PageId) -> None:
        """Remove a sharer of a page; a page without sharers is no longer taken."""
        num_sharing = self._num_sharing[page_id] - 1
        if num_sharing:
            self._num_sharing[page_id] = num_sharing
        else:
            del self._num_sharing[page_id]
            others = self._others.get(page_id)
            if others is None:
                self._free_ids.append(page_id)
            else:
                self._free_as_one.setdefault(1 + len(others), []).append(page_id)

    def _break_up(self) -> None:
        """Let pages that were taken as one, and released, be taken one by one."""
        for page_id in chain.from_iterable(self._free_as_one.values()):
            self._free_ids.append(page_id)
            self._free_ids += self._others.pop(page_id)
        self._free_as_one.clear()

    def table(self) -> BlockTable | None:
        """Return a block table of all pages; None without pages."""
        if not self.num_pages:
            return None
        page_ids = None
        if self.has_page_ids:
            page_ids = [*self._free_ids, *self._num_sharing, *chain.from_iterable(self._free_as_one.values())]
            page_ids += chain.from_iterable(self._others.values())
        assert page_ids is None or len(page_ids) == self.num_pages, "L1: the reserve has lost a page"
        return self._cache.reserved(self.num_pages, page_ids)


class Pins:
    """Owner of pins: each keeps the first pages of a content in use. The oldest pin is given up first."""

    def __init__(self, cache: Cache, emit: Emit | None = None) -> None:
        self._cache = cache
        self._emit = emit
        self._pins: dict[int, tuple[BlockTable, Content]] = {}
        self._num_made = 0
        self.num_pins = 0
        self.num_given_up = 0
        """Pins that were given up for requests."""

    def tables(self) -> list[BlockTable]:
        """Return the block tables of all pins."""
        return [table for table, _ in self._pins.values()]

    def add(self, content: Content, num_pages: int) -> int:
        """Pin the resident ones of the first `num_pages` pages of `content`; return the number of the pin."""
        cache = self._cache
        match = cache.match(content, num_pages)
        pin = self._num_made
        self._num_made += 1
        table = cache.open(match)
        self._pins[pin] = table, content
        self.num_pins += 1
        cache.num_reserved += cache.keep(table)
        if self._emit is not None:
            self._emit(PagesPinned(pin, content, match.num_pages))
        return pin

    def remove(self, pin: int) -> None:
        """Stop keeping the pages of a pin in use; does nothing for a pin that was given up."""
        pinned = self._pins.pop(pin, None)
        if pinned is not None:
            table, _ = pinned
            self.num_pins -= 1
            self._cache.num_reserved -= self._cache.unkeep(table)
            self._cache.close(table, table.num_pages, table.num_pages)
            if self._emit is not None:
                self._emit(PagesUnpinned(pin))

    def give_up(self, num_pages: int) -> bool:
        """Remove pins until `num_pages` pages are free; return whether they are."""
        while num_pages > self._cache.num_free:
            if not self.give_up_oldest():
                return False
        return True

    def give_up_oldest(self) -> bool:
        """Remove the oldest pin; return whether there was one."""
        if not self._pins:
            return False
        self.num_given_up += 1
        self.remove(next(iter(self._pins)))
        return True

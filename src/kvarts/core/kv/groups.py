"""The KV groups of a model as a cache accounts for them, and the tokens that bounded sequences retain in each.

A sequence with a window attends, at position p, to positions that the layer attends to, and among these only to its
own, to q >= p - window and to q < sink. So layers with a reach no longer than the window of the sequence retain their
own window, with the part of the sink that is in it; others retain the window and, for as long as they reach it, the
sink. If layers have a sink of their own, its part that is also in that of the sequence is retained for ever, and the
rest for as long as it is in the window of the sequence. A state is of all tokens whatever the sequence retains: layers
with one never read earlier tokens. A sequence may also retain pages by the attention that they received (heavy
hitters).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from math import gcd, lcm
from typing import Any, Literal, Protocol, get_args

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvarts.base.errors import ConfigError
from kvarts.base.limits import MOST_BYTES, MOST_LAYERS, check_whole
from kvarts.core.config import StateMode
from kvarts.core.kv.layers import KvLayer
from kvarts.core.kv.pool import PageId

__all__ = [
    "STATE_SPAN",
    "GroupKeeps",
    "GroupMemory",
    "HeavyPages",
    "PageTable",
    "PagesOfSession",
    "PartGroup",
    "Retention",
    "SinkWindow",
    "most_blocks",
    "retained_by_group",
    "with_states",
]

Retention = Literal["all", "tails"]
"""The parts of windows and chunks that are kept: `all`, as in vLLM, or the `tails`, to which the token after the last
full page of a marked end, or of the whole sequence, attends. If a prompt ends with a page, the parts that the same
prompt needs to continue a page earlier are tails as well."""
STATE_SPAN = 2
"""The span of states that are kept by page: a token needs the state after the token before it."""


class PartGroup(msgspec.Struct, frozen=True):
    """A KV group as a cache accounts for it.

    `layer`: the retention of its layers; `part_bytes`: the bytes of a page, or of a state, in all `num_layers` of them.
    The first stage of a pipeline may have none of a group's layers.
    `block_pages`: the pages that are taken and released at once, since blocks of other groups hold fewer tokens.
    `is_latent`: windows of latent KV (MLA), which vLLM names apart.

    Raises ConfigError for layers that keep nothing themselves, and for parts without bytes.
    """

    layer: KvLayer
    part_bytes: int
    num_layers: int = 1
    block_pages: int = 1
    is_latent: bool = False

    def __post_init__(self) -> None:
        check_whole(self.part_bytes, "part_bytes", most=MOST_BYTES)
        check_whole(self.num_layers, "num_layers", least=0, most=MOST_LAYERS)
        if not (self.layer.keeps_tokens or self.layer.kind == "state"):
            raise ConfigError(f"{self.layer.kind} keeps nothing", field="layer")

    @property
    def is_state(self) -> bool:
        """Whether its parts are snapshots of a state that each running request has."""
        return self.layer.kind == "state" and self.layer.span is None

    @property
    def is_bounded(self) -> bool:
        """Whether its parts are released while their sequence runs."""
        return self.layer.kind in ("window", "chunk") or self.has_states_by_page

    @property
    def has_states_by_page(self) -> bool:
        """Whether its parts are states, each after a page."""
        return self.layer.kind == "state" and self.layer.span is not None


class GroupMemory(msgspec.Struct, frozen=True):
    """The KV groups of one model, and the parts of their windows that are kept.

    All parts are whole *blocks*: the largest size that divides the parts of every group, in `divisor` pieces. A page
    with all its parts has `page_bytes`; states that are not kept by page are not part of it. `aligns`: states are kept
    only for the last page of each chunk. `retention_interval`: vLLM's, in tokens, a multiple of the page size: windows
    and states retain parts only where prompts end or part, and each so many tokens (kvarts.core.kv.retention); None:
    all. `renames_states`: a step that begins at the last page end of a prompt names the state there again, as vLLM 0.32
    does and 0.33 does not, so that no other request begins after it in this step. `saves_inside`: a chunk also keeps
    the state before its last page, which the model saves while it computes the chunk. `drops_last`: the
    groups that keep all tokens have layers that draft, so that the last page that they know of a request is computed
    again, as in vLLM 0.32: other groups retain what is before that page. Raises ConfigError if no group
    keeps tokens, and for a divisor that leaves no whole blocks.
    """

    groups: tuple[PartGroup, ...]
    keeps: Retention = "all"
    divisor: int = 1
    aligns: bool = False
    retention_interval: int | None = None
    renames_states: bool = True
    saves_inside: bool = False
    drops_last: bool = False

    def __post_init__(self) -> None:
        if not any(group.layer.keeps_tokens for group in self.groups):
            raise ConfigError("there is none that keeps tokens", field="groups")
        if self.keeps not in get_args(Retention):
            raise ConfigError(f"{self.keeps!r} is not known", field="keeps", hint=f"Use {_choice()}.")
        check_whole(self.divisor, "divisor", most=MOST_BYTES)
        if self.hit_pages > 1:
            self._check_sizes()
        if self._largest % self.divisor:
            raise ConfigError(f"{self.divisor} does not divide {self._largest:,} bytes", field="divisor")

    def _check_sizes(self) -> None:
        """Refuse what is not counted where blocks hold different numbers of tokens."""
        if any(group.layer.kind not in ("full", "latent", "window") or group.layer.sink for group in self.groups):
            raise ConfigError(
                "have blocks of several sizes, which full attention and windows only may have", field="groups"
            )
        if len({group.part_bytes * group.block_pages for group in self.groups}) > 1:
            what = "must have blocks of one size in bytes, if these hold different numbers of tokens"
            raise ConfigError(what, field="groups")
        if self.keeps != "all":
            raise ConfigError("must be all, with blocks of several sizes", field="keeps")

    @property
    def hit_pages(self) -> int:
        """The pages that a hit is a multiple of; more than 1 if the blocks of groups differ in tokens."""
        return lcm(*(group.block_pages for group in self.groups))

    @property
    def num_pieces(self) -> int:
        """The blocks of accounting in a block of the engine: more than 1 where these differ in tokens."""
        first = self.groups[0]
        return first.part_bytes * first.block_pages // self.block_bytes if self.hit_pages > 1 else 1

    def num_states(self, num_pages: int, end: int, prefill_end: int) -> int:
        """Return how many states a chunk keeps in a group that keeps them at chunk ends; it begins `num_pages` pages.

        One is after its last token, `end`. Another one is inside it: with sparse retention only in a chunk that ends
        the prefill, at `prefill_end`.
        """
        is_inside = self.saves_inside and num_pages > 1 and (self.retention_interval != 0 or end >= prefill_end)
        return 2 if is_inside else 1

    @property
    def block_bytes(self) -> int:
        """The bytes of a block."""
        return self._largest // self.divisor

    def in_blocks(self) -> GroupMemory:
        """Return the same with a block as its unit, so that a part has as many bytes as blocks: numbers stay small."""
        size = self.block_bytes
        return replace(self, groups=tuple(replace(group, part_bytes=group.part_bytes // size) for group in self.groups))

    @property
    def _largest(self) -> int:
        return gcd(*(group.part_bytes for group in self.groups))

    @property
    def has_states(self) -> bool:
        """Whether each running request has a state."""
        return any(group.is_state for group in self.groups)

    @property
    def is_whole(self) -> bool:
        """Whether there is one group, and it keeps every token in blocks that are whole pages."""
        only = self.groups[0]
        return len(self.groups) == self.divisor == 1 and not only.is_bounded

    @property
    def has_states_by_page(self) -> bool:
        """Whether layers keep states by page."""
        return any(group.has_states_by_page for group in self.groups)

    @property
    def num_state_blocks(self) -> int:
        """The blocks of the state of a sequence; 0 for a model without states that each running request has."""
        return sum(group.part_bytes for group in self.groups if group.is_state) // self.block_bytes

    @property
    def part_tables(self) -> list[int]:
        """By group, the page tables of a sequence: one for each block of a part, and none for its own state.

        States that are kept by page have one, with the first block of each: the others are of the same owner, by law
        L1, and are written and read with it. They can be tens of thousands.
        """
        size = self.block_bytes
        return [
            0 if group.is_state else 1 if group.has_states_by_page else group.part_bytes // size
            for group in self.groups
        ]

    @property
    def has_one_table(self) -> bool:
        """Whether a page is one block, so that a sequence has one page table, and perhaps a state."""
        return self.page_bytes == self.block_bytes

    @property
    def page_bytes(self) -> int:
        """The bytes of a page with its parts in every group."""
        return sum(group.part_bytes for group in self.groups if not group.is_state)

    def num_blocks(self, num_pages: int) -> int:
        """Return the number of blocks in the memory of `num_pages` pages with all their parts."""
        num_blocks = num_pages * self.page_bytes // self.block_bytes
        return num_blocks - num_blocks % self.num_pieces

    def to_builtins(self) -> dict[str, Any]:
        """Return its form in reports and timelines: the bytes of a block, and the groups in their order."""
        groups = []
        for group in self.groups:
            said: dict[str, Any] = {"kind": group.layer.kind, "layers": group.num_layers}
            if group.layer.span is not None:
                said["tokens"] = group.layer.span
            if group.layer.sink:
                said["sink"] = group.layer.sink
            if group.block_pages > 1:
                said["block_pages"] = group.block_pages
            if group.is_latent:
                said["is_latent"] = True
            groups.append({**said, "part_blocks": group.part_bytes // self.block_bytes})
        return {"block_bytes": self.block_bytes, "kv_groups": groups}


def _choice() -> str:
    return " or ".join(get_args(Retention))


def with_states(groups: tuple[PartGroup, ...], mode: StateMode) -> tuple[PartGroup, ...]:
    """Return `groups` with the states of `mode`."""
    if mode == "snapshots":
        return groups
    by_page = [
        replace(group, layer=replace(group.layer, span=STATE_SPAN)) if group.is_state else group for group in groups
    ]
    return tuple(by_page)


class SinkWindow(msgspec.Struct, frozen=True):
    """The first `sink` and the last `window` tokens of a sequence.

    The token at position p attends to itself, and to positions q < p with q < sink or q >= p - window. `rotates_late`:
    positions are places among the retained tokens, so keys are stored before rotation.
    """

    sink: int
    window: int
    rotates_late: bool = False

    @property
    def is_scored(self) -> bool:
        """Whether the pages that stay are chosen by the attention that they receive."""
        return False

    @property
    def is_state(self) -> bool:
        """Whether they are retained as states, which are kept by page: no."""
        return False

    @property
    def most_seen(self) -> int:
        """The number of tokens before its own that a token of a long sequence sees."""
        return self.sink + self.window

    def observed(self, start: int, end: int) -> range:
        """Return the positions of [start, end) whose attention is scored, to decide which pages stay: none."""
        return range(0)

    def first_seen(self, position: int) -> int:
        """Return the first position after the sink that the token at `position` attends to."""
        return max(0, position - self.window)

    def sink_seen(self, position: int) -> int:
        """Return the number of tokens of the sink that are kept for the token at `position` and later ones."""
        return self.sink

    def sees(self, positions: Any, num_tokens: int) -> Any:
        """Return, elementwise, whether a token after the first `num_tokens` can see `positions` of held pages."""
        return (positions < self.sink_seen(num_tokens)) | (positions >= self.first_seen(num_tokens))

    def num_retained(self, num_tokens: int) -> int:
        """Return how many of the first `num_tokens` tokens a later token can see."""
        return min(num_tokens, self.sink + self.window)

    def num_sink_pages(self, page_size: int) -> int:
        """Return the pages that hold the sink."""
        return -(-self.sink // page_size)

    def most_pages(self, page_size: int) -> int:
        """Return the most pages that a sequence holds between steps: ceil(sink/page) + ceil(window/page) + 1."""
        return self.num_sink_pages(page_size) + -(-self.window // page_size) + 1

    def places(self, page_size: int) -> set[int]:
        """Return the places in a page at which a token no longer needs a page that the token before it needed."""
        return {self.window % page_size}


class PageTable(msgspec.Struct, frozen=True, gc=False):
    """A page table of a sequence: its pages in order of position, with 0 for a page that is not held.

    `num_dropped`: pages that are not in `page_ids`, after the first `num_sink_pages`. `keeps`: the tokens that layers
    with this table see from here on; None for all.
    """

    page_ids: tuple[PageId, ...]
    num_dropped: int = 0
    num_sink_pages: int = 0
    keeps: SinkWindow | None = None


class PagesOfSession(Protocol):
    """Pages that a request brings along, and that stay when it ends. They are in use for as long as they exist.

    Promises: the pages that `grow` needs are available, for as many tokens as `most_tokens` returns. Only these calls
    change its pages. A page table leaves out the pages that were dropped, which are the first after those of the sink.
    If the model has states, a request that brings them begins with the first token that is not computed.
    """

    keeps: SinkWindow

    @property
    def state(self) -> tuple[PageId, ...]:
        """The blocks of its state, in which that of the next token follows; empty for a model without states."""

    @property
    def places(self) -> Iterable[int]:
        """The places in a page at which a token no longer needs a page that the token before it needed."""

    @property
    def page_tables(self) -> tuple[PageTable, ...]:
        """The page tables, by GroupMemory.part_tables; empty where pages are only counted."""

    def settle(self, position: int) -> bool:
        """Drop pages that no token at `position` or later can see; return whether there were any."""

    def most_tokens(self, start: int, num_tokens: int) -> int:
        """Return how many of `num_tokens` tokens from `start` on may be computed in this step: at least one."""

    def grow(self, start: int, end: int) -> bool:
        """Make tokens [start, end) writable; all before are computed. Return whether that took a page."""

    def observe(self, start: int, end: int, scores: npt.NDArray[np.float32]) -> None:
        """Add the attention that tokens [start, end) of a step gave to each of the pages, by `keeps.observed`."""

    def take_copies(self) -> Sequence[tuple[PageId, PageId]]:
        """Return the pairs of pages to copy, from one to the other, before these pages are written; once."""


DECISION_TOKENS = 64
"""Tokens between two decisions, rounded up to whole pages."""


class Scoring(msgspec.Struct, frozen=True):
    """How a page earns its place: by the attention weight that queries gave to its tokens, summed over layers and
    heads.

    `num_observed`: only the last queries before a decision count; None: all do. `adds_up`: scores of before the last
    decision still count.
    """

    num_observed: int | None
    adds_up: bool

    def observed(self, start: int, end: int, interval: int) -> range:
        """Return the positions of [start, end) whose attention counts; no decision is due between them."""
        if self.num_observed is None:
            return range(start, end)
        decision = start // interval * interval + interval
        return range(min(end, max(start, decision - self.num_observed)), end)


SCORINGS = {"h2o": Scoring(None, adds_up=True), "snapkv": Scoring(32, adds_up=False)}
"""By name: H2O (Zhang et al., NeurIPS 2023) adds up all attention; SnapKV (Li et al., NeurIPS 2024) observes the last
queries of a window. Both are applied here to pages, which all layers and heads share."""


class HeavyPages(SinkWindow, frozen=True, kw_only=True):
    """The pages of the first `sink` tokens, the pages of the last `window` tokens, and `num_heavy` pages between them.

    Every `interval` tokens, when the token at position b = k * interval is next, is decided which pages stay: of those
    that end at b - `window` or before, the pages of the sink, and the `num_heavy` with the highest scores by `keep`, a
    name of SCORINGS; of equal ones the later. Tokens from b on see all tokens before them in the pages that stay.
    """

    num_heavy: int
    keep: str
    page_size: int

    def __post_init__(self) -> None:
        if self.keep not in SCORINGS:
            raise ConfigError(f"must be window or {' or '.join(SCORINGS)}, got {self.keep!r}", field="keep")

    @property
    def is_scored(self) -> bool:
        """Whether the pages that stay are chosen by the attention that they receive."""
        return True

    @property
    def scoring(self) -> Scoring:
        """How pages are scored."""
        return SCORINGS[self.keep]

    @property
    def interval(self) -> int:
        """The number of tokens between two decisions."""
        return -(-DECISION_TOKENS // self.page_size) * self.page_size

    def decided_at(self, position: int) -> int:
        """Return the position of the last decision before the token at `position` is computed."""
        return position // self.interval * self.interval

    def num_until_decision(self, start: int) -> int:
        """Return how many tokens from `start` on are computed before the next decision."""
        return self.interval - start % self.interval

    def observed(self, start: int, end: int) -> range:
        """Return the positions of [start, end) whose attention is scored."""
        return self.scoring.observed(start, end, self.interval)

    def choose(self, scores: Sequence[float]) -> list[int]:
        """Return the places of the pages that stay, in order, of candidates with `scores`, in order of position."""
        ranked = sorted(range(len(scores)), key=lambda place: (scores[place], place), reverse=True)
        return sorted(ranked[: self.num_heavy])

    @property
    def most_seen(self) -> int:
        """The number of tokens before its own that a token of a long sequence sees, at most."""
        return self.sink + self.num_heavy * self.page_size + self.window + self.interval

    def first_seen(self, position: int) -> int:
        """Return the first position of the pages of the window of the token at `position`."""
        return max(0, self.decided_at(position) - self.window) // self.page_size * self.page_size

    def sees(self, positions: Any, num_tokens: int) -> Any:
        """Return, elementwise, whether later tokens see `positions` of held pages: always."""
        return positions >= 0

    def num_retained(self, num_tokens: int) -> int:
        """Return how many of the first `num_tokens` tokens are retained until the next is computed."""
        front = self.num_sink_pages(self.page_size) * self.page_size
        between = max(0, self.first_seen(max(0, num_tokens - 1)) - front)
        return num_tokens - between + min(between, self.num_heavy * self.page_size)

    def most_pages(self, page_size: int) -> int:
        """Return the most pages that a sequence holds between steps."""
        return super().most_pages(page_size) + self.num_heavy + self.interval // page_size

    def places(self, page_size: int) -> set[int]:
        """Return the places in a page at which pages may be dropped: decisions fall on the first."""
        return {0}


class GroupKeeps(msgspec.Struct, frozen=True):
    """Retention of a sequence that retains `whole`, in layers that keep `layer`.

    The part of a sink that does not stay in reach is released as a whole; it stays as long as one of its tokens is in
    reach of later tokens.
    """

    whole: SinkWindow
    layer: KvLayer

    @property
    def _reach(self) -> int | None:
        """The most tokens before its own, its sink excluded, that a token attends to in these layers; None for all."""
        return None if self.layer.span is None else self.layer.span - 1

    @property
    def is_state(self) -> bool:
        """Whether the layers retain states, which are kept by page."""
        return self.layer.kind == "state"

    @property
    def sink(self) -> int:
        """The number of first tokens kept apart from the last ones, at first; 0 if none is needed longer than these."""
        reach = self._reach
        if reach is None or reach > self.whole.window:
            return self.whole.sink
        return self.layer.sink if reach < self.whole.window else self.last_sink

    @property
    def last_sink(self) -> int:
        """The number of first tokens that all later tokens see."""
        return self.whole.sink if self._reach is None else min(self.layer.sink, self.whole.sink)

    @property
    def window(self) -> int:
        """The most tokens before its own, sink excluded, that a token attends to."""
        reach = self._reach
        return self.whole.window if reach is None else min(reach, self.whole.window)

    @property
    def sink_until(self) -> int | None:
        """The first position from which on tokens see no more of the sink than the first `last_sink` tokens; None if
        they never see more."""
        sink, span = self.sink, self.layer.span
        if sink == self.last_sink or span is None:
            return None
        if span - 1 < self.whole.window:  # the sink of the layers, as far as it is in the window of the sequence
            return sink + self.whole.window
        if self.whole.rotates_late:  # then the distance to the sink never grows
            return None
        return sink + span - 1 if self.layer.kind == "window" else -(-sink // span) * span

    def first_seen(self, position: int) -> int:
        """Return the first position after the sink that the token at `position` attends to."""
        return max(0, position - self.whole.window, self.layer.first_seen(position))

    def sink_seen(self, position: int) -> int:
        """Return the number of tokens of the sink that are kept for the token at `position` and later ones."""
        until = self.sink_until
        return self.sink if until is None or position < until else self.last_sink

    def sees(self, positions: Any, num_tokens: int) -> Any:
        """Return, elementwise, whether a token after the first `num_tokens` can see `positions` of held pages."""
        return (positions < self.sink_seen(num_tokens)) | (positions >= self.first_seen(num_tokens))

    def num_retained(self, num_tokens: int) -> int:
        """Return how many of the first `num_tokens` tokens are kept for later ones."""
        first = min(num_tokens, self.first_seen(num_tokens))
        return num_tokens - first + min(first, self.sink_seen(num_tokens))

    def num_sink_pages(self, page_size: int) -> int:
        """Return the pages that hold the sink."""
        return -(-self.sink // page_size)

    def num_dropped(self, position: int, page_size: int) -> int:
        """Return how many pages after those of the sink no token at `position` or later can see."""
        return max(0, self.first_seen(position) // page_size - self.num_sink_pages(page_size))

    def places(self, page_size: int) -> set[int]:
        """Return the places in a page at which a token no longer needs a page that the token before it needed."""
        places = {self.window % page_size}
        if self.layer.kind == "chunk":
            places.update(range(0, page_size, gcd(self.layer.span or 1, page_size)))
        if self.sink_until is not None:
            places.add(self.sink_until % page_size)
        return places

    def most_pages(self, page_size: int) -> int:
        """Return the most pages that a sequence holds between steps, however long it becomes."""
        return _most_pages(self, page_size)


@cache
def _most_pages(keeps: GroupKeeps, page_size: int) -> int:
    if keeps.layer.span is None:
        return keeps.whole.most_pages(page_size)
    window, until = keeps.window, keeps.sink_until
    latest = page_size - 1
    """The latest place in a page at which the attended range of a token can begin."""
    if keeps.layer.kind == "chunk":
        step = gcd(keeps.layer.span, page_size)
        latest = min(latest, page_size - step + keeps.layer.span - 1 - window)
    of_window = (latest + window) // page_size + 1
    if until is None:
        return keeps.num_sink_pages(page_size) + of_window
    # While all of the sink is in reach, the number of pages is largest when a token begins one.
    with_sink = max(
        position // page_size + 1 - keeps.num_dropped(position, page_size) for position in range(0, until, page_size)
    )
    return max(with_sink, -(-keeps.last_sink // page_size) + of_window)


def retained_by_group(memory: GroupMemory, whole: SinkWindow) -> list[tuple[GroupKeeps, int]]:
    """Return, per group without states, the retention of a sequence that retains `whole`, and the blocks of a part."""
    groups = [group for group in memory.groups if not group.is_state]
    return [(GroupKeeps(whole, group.layer), group.part_bytes // memory.block_bytes) for group in groups]


def most_blocks(memory: GroupMemory, whole: SinkWindow, page_size: int) -> int:
    """Return the most blocks that a sequence holds between steps: the sum over groups of the most pages, in blocks."""
    of_pages = sum(blocks * keeps.most_pages(page_size) for keeps, blocks in retained_by_group(memory, whole))
    return of_pages + memory.num_state_blocks

"""The session interface, as doors use it: methods, settings, states, updates of a generation, errors, stored forms."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from enum import IntEnum
from typing import Literal, Protocol

import msgspec

from kvarts.base.errors import ConfigError, KvartsError
from kvarts.base.limits import MOST_BYTES, MOST_COUNT, MOST_SECONDS, MOST_UINT32, check_number, check_whole
from kvarts.core.config import AtCapacity, SessionRetention
from kvarts.core.sampling import SamplingParams, TopLogprobs

__all__ = [
    "MAX_ENDS",
    "MAX_LABEL_CHARS",
    "MOST_HISTORY_TOKENS",
    "Done",
    "EndReason",
    "Keep",
    "Positions",
    "SessionBusyError",
    "SessionCounts",
    "SessionGoneError",
    "SessionInfo",
    "SessionNotReadyError",
    "SessionRuntime",
    "SessionSettings",
    "SessionValueError",
    "SessionsConfig",
    "SessionsExhaustedError",
    "StopReason",
    "StoredSession",
    "Token",
    "Tombstone",
    "Tombstones",
    "Truncated",
    "UnknownSessionError",
    "Update",
    "Usage",
    "check_label",
]

Positions = Literal["global", "cache"]
Keep = Literal["window", "h2o", "snapkv"]

MOST_TOMBSTONES = 10_000
MAX_LABEL_CHARS = 256
"""Limit for a client's name for a session."""
MAX_ENDS = 1024
"""Most token ids that end the generations of a session, or a single one."""
MOST_HISTORY_TOKENS = 1 << 24
"""128 MiB."""


def check_label(label: str) -> None:
    """Raise ConfigError for a label that is too long."""
    if len(label) > MAX_LABEL_CHARS:
        raise ConfigError(f"has {len(label)} characters, and {MAX_LABEL_CHARS} at most", field="label")


class SessionSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a session keeps, and for how long.

    It keeps the KV of its first `sink` and its last `window` tokens: the token at position p attends to itself, and to
    positions q < p with q < sink or q >= p - window. A `window` of None keeps everything; `retention` is then where the
    pages are between turns: pinned, in the prefix cache, or in host memory.

    `keep`: `h2o` or `snapkv` also keeps the pages of `heavy` more tokens between sink and window: those to which most
    attention was paid (kvarts.core.kv.groups); sink and window are then whole pages, and the window advances every 64
    tokens.

    `positions`: `global` counts from the beginning of the history, and equals plain attention until the first token is
    dropped; `cache` counts places among the retained tokens, so that a session never leaves the positions that the
    model was trained for. `past_max_positions`: with global positions, continue beyond the model's
    `max_position_embeddings` instead of ending the generation as truncated.

    `ttl_s`: seconds of idleness after which the session expires; None: never. `eos_token_ids`: tokens that end a
    generation, in addition to those of the model. `label`: the client's name for the session.

    Raises ConfigError for a value out of range.
    """

    sink: int = 4
    window: int | None = 64
    positions: Positions = "global"
    past_max_positions: bool = False
    retention: SessionRetention = "cache"
    ttl_s: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    label: str = ""
    keep: Keep = "window"
    heavy: int = 0

    def __post_init__(self) -> None:
        check_whole(self.sink, "sink", least=0, most=MOST_UINT32)
        if self.window is not None:
            check_whole(self.window, "window", most=MOST_UINT32)
        if self.positions not in ("global", "cache"):
            raise ConfigError(f"must be 'global' or 'cache', got {self.positions!r}", field="positions")
        if self.positions == "cache" and self.window is None:
            raise ConfigError("'cache' needs a window: an unbounded session drops no tokens", field="positions")
        if self.keep not in ("window", "h2o", "snapkv"):
            raise ConfigError(f"must be 'window', 'h2o' or 'snapkv', got {self.keep!r}", field="keep")
        check_whole(self.heavy, "heavy", least=0, most=MOST_UINT32)
        if (self.keep == "window") != (not self.heavy):
            raise ConfigError(
                f"is {self.heavy}, and pages are kept by {self.keep}",
                field="heavy",
                hint="Give heavy, in tokens, together with keep h2o or snapkv.",
            )
        if self.heavy and self.window is None:
            raise ConfigError(f"{self.keep!r} needs a window: an unbounded session drops no tokens", field="keep")
        if self.heavy and self.positions == "cache":
            raise ConfigError(
                f"{self.keep!r} does not go with positions of the cache", field="keep", hint="Leave positions global."
            )
        if self.retention not in ("pin", "cache", "host"):
            raise ConfigError(f"must be 'pin', 'cache' or 'host', got {self.retention!r}", field="retention")
        if self.ttl_s is not None:
            check_number(self.ttl_s, "ttl_s", above=True, most=MOST_SECONDS)
        check_label(self.label)
        if len(self.eos_token_ids) > MAX_ENDS:
            raise ConfigError(f"has {len(self.eos_token_ids)} ids, and {MAX_ENDS} at most", field="eos_token_ids")

    @property
    def kept_words(self) -> str:
        """The retained tokens, for messages."""
        ends = f"the first {self.sink} and the last {self.window}"
        return ends if not self.heavy else f"{ends}, and {self.heavy} chosen by {self.keep}"

    def num_retained(self, num_tokens: int) -> int:
        """Return how many of the first `num_tokens` tokens are retained; with `heavy`, without these."""
        return num_tokens if self.window is None else min(num_tokens, self.sink + self.window)


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of a session. Bytes are those of tensors over all layers.

    `state`: `idle`, `appending` or `generating`. `history_length`: tokens given to it or generated by it.
    `num_retained`: tokens with KV that is kept; `kv_live_bytes`: bytes of that KV; `kv_allocated_bytes`: bytes of whole
    pages; `kv_peak_bytes`: the most allocated at any time, including within steps; `kv_bound_bytes`: the most that may
    be allocated between steps, None if unbounded. `num_dropped`: tokens whose KV was dropped for good.

    Violations are counted by an independent check of the page tables, and survive the end of the session.
    `inv1_violations`: the contents of pages differ from the tokens to retain; `inv2_violations`: a position decreased.
    `restored`: after a restart, whether its KV is from a checkpoint (`kv`) or computed again (`tokens`); None in the
    process that created it.

    `num_computed_tokens`: tokens computed for it so far, including recomputation; `num_turns`: generations.
    """

    session_id: str
    label: str
    settings: SessionSettings
    state: str
    history_length: int
    num_retained: int
    num_dropped: int
    kv_live_bytes: int
    kv_allocated_bytes: int
    kv_peak_bytes: int
    kv_bound_bytes: int | None
    inv1_violations: int
    inv2_violations: int
    idle_s: float
    num_turns: int
    num_computed_tokens: int
    restored: str | None


class SessionCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Totals over all sessions: their number, the pages (blocks for a model with KV groups) that are reserved for them,
    whether full or not, the tokens of their histories, 8 bytes each, and the number of sessions that have ended since
    the start, by reason.
    """

    num_sessions: int
    num_reserved_pages: int
    num_history_tokens: int
    ended_by_reason: dict[str, int]


class StopReason(IntEnum):
    """The reason why a generation ended."""

    MAX_TOKENS = 1
    EOS = 2
    CANCELLED = 3
    TRUNCATED = 4
    """The session cannot continue, because the model was not trained for later positions."""


class Truncated(msgspec.Struct, frozen=True):
    """Precedes the first token of a generation: `num_dropped` tokens of the history are no longer attended to."""

    num_dropped: int


class Token(msgspec.Struct, frozen=True):
    """A generated token. `logprob`, and `top_logprobs` of the most likely tokens at its position, if requested."""

    token_id: int
    logprob: float | None = None
    top_logprobs: TopLogprobs = ()


class Done(msgspec.Struct, frozen=True):
    """The end of a generation of `num_tokens` tokens. `prefill_s`: from its start to the first token."""

    stop_reason: StopReason
    num_tokens: int
    prefill_s: float
    total_s: float


Update = Truncated | Token | Done


class UnknownSessionError(KvartsError):
    """The caller has no session with this id."""


class SessionGoneError(UnknownSessionError):
    """A session of the caller that was closed, was evicted or has expired; the text contains which, and when."""


class SessionValueError(KvartsError):
    """A value that cannot be accepted, such as a token id outside the vocabulary. The history is unchanged."""


class SessionNotReadyError(KvartsError):
    """The session's state does not permit this, such as a generation before anything was appended."""


class SessionBusyError(KvartsError):
    """Another operation on the session is in progress. The history is unchanged."""


class SessionsExhaustedError(KvartsError):
    """There is not enough room for this; the text contains the numbers."""


class SessionsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings shared by all sessions.

    `defaults`: the settings of sessions created without any. `max_sessions`: limit on their number; None: as many as
    fit. `memory_bytes`: KV memory for bounded sessions; None: all of it. `max_pages`: the same in pages, or in blocks
    for a model with KV groups; if both are given, both apply. `max_history_tokens`: tokens of all histories, 8 bytes
    each. `at_capacity`: refuse a further session, or evict the idle session that was used longest ago. `chunk_tokens`:
    most tokens of sessions that a step may compute in addition to one for each generating session; the pages for them
    are reserved once for all sessions. `tombstone_ttl_s`: how long the end of a session is remembered. `reap_every_s`:
    interval of the search for expired sessions.

    Raises ConfigError for a value out of range.
    """

    defaults: SessionSettings = SessionSettings()
    max_sessions: int | None = None
    memory_bytes: int | None = None
    max_pages: int | None = None
    max_history_tokens: int = MOST_HISTORY_TOKENS
    at_capacity: AtCapacity = "refuse"
    chunk_tokens: int = 512
    tombstone_ttl_s: float = 3600.0
    reap_every_s: float = 1.0

    def __post_init__(self) -> None:
        for field in ("max_sessions", "memory_bytes", "max_pages", "max_history_tokens", "chunk_tokens"):
            value = getattr(self, field)
            if value is not None:
                check_whole(value, field, most=MOST_BYTES if field == "memory_bytes" else MOST_COUNT)
        if self.at_capacity not in ("refuse", "evict"):
            raise ConfigError(f"must be 'refuse' or 'evict', got {self.at_capacity!r}", field="at_capacity")
        for field in ("tombstone_ttl_s", "reap_every_s"):
            check_number(getattr(self, field), field, above=True, most=MOST_SECONDS)


class SessionRuntime(Protocol):
    """Sessions of many owners on one engine. For one event loop.

    Promises: sessions of other owners are invisible and raise UnknownSessionError. One operation at a time is in
    progress on a session; a second one raises SessionBusyError, or waits if `queue` is set. A call that raises has
    changed nothing. A cancelled call leaves the session at a token boundary, and idle. The exception is an append: once
    its tokens are in the history it continues, and the session is busy until their KV is computed. An operation ends
    regardless of whether its last update was read.
    """

    @property
    def defaults(self) -> SessionSettings:
        """The settings of sessions created without any."""

    async def create(self, owner: str, settings: SessionSettings | None = None) -> str:
        """Return the id of a new session: 32 hexadecimal digits. Raise SessionsExhaustedError if it does not fit."""

    async def append(
        self,
        owner: str,
        session_id: str,
        tokens: Sequence[int],
        *,
        expected_length: int | None = None,
        queue: bool = False,
    ) -> int:
        """Append tokens; return the length of the history once their KV is in pages.

        Raise asyncio.CancelledError if `cancel` or `close` ended it: the tokens are in the history then, and those not
        yet computed are computed by the next operation.

        `expected_length`: the length of the history before; raise SessionNotReadyError if it differs. Raise
        SessionValueError for ids outside the vocabulary.
        """

    def generate(
        self, owner: str, session_id: str, params: SamplingParams, *, queue: bool = False
    ) -> AsyncGenerator[Update, None]:
        """Yield Truncated, if tokens were dropped, then every token, then Done. Closing it cancels the generation.

        Raise SessionNotReadyError if nothing was appended yet.
        """

    async def cancel(self, owner: str, session_id: str) -> bool:
        """End the current operation at a token boundary, and keep the session; return whether there was one."""

    async def info(self, owner: str, session_id: str) -> SessionInfo:
        """Return the current state of a session, even while it generates."""

    async def close(self, owner: str, session_id: str) -> int:
        """End a session and its current operation; return the length of its history."""

    async def fork(self, owner: str, session_id: str, *, label: str = "", queue: bool = False) -> str:
        """Return the id of a new session with the same history and settings; pages are shared until they differ."""

    async def rollback(self, owner: str, session_id: str, length: int, *, queue: bool = False) -> int:
        """Shorten the history to `length`, and return it. Raise SessionNotReadyError if KV for it was dropped."""

    async def list(self, owner: str) -> list[SessionInfo]:
        """Return the sessions of `owner`, the oldest first."""

    async def shut_down(self) -> None:
        """End all operations at token boundaries, and write everything that is to be kept."""


EndReason = Literal["closed", "evicted", "expired"]


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of a session, since it was created. `last_used_s`: Unix time."""

    last_used_s: float
    num_turns: int = 0
    num_computed_tokens: int = 0
    inv1_violations: int = 0
    inv2_violations: int = 0


class StoredSession(msgspec.Struct, frozen=True, kw_only=True):
    """A session without its tokens. `length`: their number; `created_s`: Unix time; `parent`: origin of a fork."""

    session_id: str
    owner: str
    settings: SessionSettings
    created_s: float
    usage: Usage
    parent: str | None = None
    length: int = 0


class Tombstone(msgspec.Struct, frozen=True, kw_only=True):
    """A session that has ended: the reason, the time (Unix time), and the length of its history."""

    session_id: str
    owner: str
    reason: EndReason
    ended_s: float
    length: int
    inv1_violations: int
    inv2_violations: int


class Tombstones:
    """Owner of at most MOST_TOMBSTONES tombstones, each valid for `ttl_s` seconds."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._by_id: OrderedDict[str, Tombstone] = OrderedDict()
        self.num_gone = {"closed": 0, "evicted": 0, "expired": 0}
        """Number of ended sessions by reason, since the start."""
        self.inv1_violations = 0
        self.inv2_violations = 0

    def add(self, tombstone: Tombstone) -> None:
        """Remember a session that has ended."""
        self._by_id[tombstone.session_id] = tombstone
        self.num_gone[tombstone.reason] += 1
        self.inv1_violations += tombstone.inv1_violations
        self.inv2_violations += tombstone.inv2_violations
        while len(self._by_id) > MOST_TOMBSTONES:
            self._by_id.popitem(last=False)

    def error(self, owner: str, session_id: str) -> UnknownSessionError:
        """Return the error for a session that does not exist; it gives details only to the session's former owner."""
        tombstone = self._by_id.get(session_id)
        now_s = time.time()
        if tombstone is not None and now_s - tombstone.ended_s > self._ttl_s:
            del self._by_id[session_id]
            tombstone = None
        if tombstone is None or tombstone.owner != owner:
            return UnknownSessionError(
                f"there is no session {_shown(session_id)}", field="session_id", hint="Create one."
            )
        what = "expired" if tombstone.reason == "expired" else f"was {tombstone.reason}"
        return SessionGoneError(
            f"session {_shown(session_id)} {what} {max(0.0, now_s - tombstone.ended_s):.1f} s ago, with a history of "
            f"{tombstone.length} tokens",
            field="session_id",
            hint="Create another.",
        )


def _shown(session_id: str) -> str:
    """Return an id for use in a one-line message, whatever a client sent."""
    return repr(session_id if len(session_id) <= 40 else session_id[:40] + "...")

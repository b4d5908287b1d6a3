"""The sessions of one engine: their owners, these owners' shares, their pages, and the eviction of sessions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from secrets import token_hex

import msgspec

from kvarts.base.errors import ConfigError
from kvarts.base.limits import MOST_COUNT
from kvarts.base.tenants import Shares, owner_of
from kvarts.core.content import Content
from kvarts.core.kv.groups import HeavyPages, SinkWindow
from kvarts.core.kv.session_pages import SessionMemory, SessionPages
from kvarts.run.engine_loop import ModelHost
from kvarts.run.sessions.held_slots import count_retained, holds_what_it_should
from kvarts.run.sessions.values import (
    EndReason,
    SessionCounts,
    SessionInfo,
    SessionsConfig,
    SessionSettings,
    SessionsExhaustedError,
    Tombstone,
    Tombstones,
)
from kvarts.run.text import Generation

__all__ = ["Capacity", "Session", "SessionTable", "check_settings", "memory_of", "random_id"]


class Session:
    """A history of tokens, and the KV that is kept of it. Written by SessionTable and SessionTurns.

    `content`: the whole history. `num_computed`: number of its tokens that were computed. `pages`: its own pages, if it
    is bounded. `pin`: the pin of its pages, if it is unbounded and pins them. `request`: the index of the current
    request, or None. `touched_ns`: time of its last activity.
    """

    __slots__ = (
        "content",
        "created_s",
        "furthest",
        "inv1_violations",
        "inv2_violations",
        "is_written",
        "num_computed",
        "num_computed_tokens",
        "num_counted",
        "num_turns",
        "owner",
        "pages",
        "pin",
        "request",
        "restored",
        "session_id",
        "settings",
        "state",
        "touched_ns",
    )

    def __init__(
        self,
        session_id: str,
        owner: str,
        settings: SessionSettings,
        content: Content,
        pages: SessionPages | None,
        now_ns: int,
    ) -> None:
        self.session_id = session_id
        self.owner = owner
        self.settings = settings
        self.content = content
        self.pages = pages
        self.touched_ns = now_ns
        self.created_s = time.time()
        self.state = "idle"
        self.request: int | None = None
        self.pin: int | None = None
        self.num_computed = 0
        self.furthest = 0
        """The most tokens computed of the present history."""
        self.num_turns = 0
        self.num_computed_tokens = 0
        self.num_counted = 0
        """Tokens of the history counted in its owner's account. Written by Capacity."""
        self.inv1_violations = 0
        self.inv2_violations = 0
        self.restored: str | None = None
        self.is_written = True
        """Whether its history on disk, if any, equals this one; False after a failed write."""

    @property
    def history_length(self) -> int:
        """The number of its tokens."""
        return self.content.num_known_tokens

    @property
    def num_to_compute(self) -> int:
        """The number of its tokens that are computed between turns.

        A generation begins with the last token, which is computed again for its logits. No token can be computed again
        with a state, so that the last token is left to the next turn.
        """
        has_state = self.pages is not None and self.pages.has_state
        return max(0, self.history_length - has_state)

    @property
    def num_retained(self) -> int:
        """The number of tokens with KV that a later token can see."""
        retained = self.settings if self.pages is None else self.pages.keeps
        return retained.num_retained(self.num_computed)

    def __repr__(self) -> str:
        return f"Session({self.session_id[:8]}, {self.state}, {self.num_computed} of {self.history_length} computed)"


class Capacity:
    """Owner of three accounts: sessions, pages reserved for them, and tokens of their histories.

    `num_pages`: pages or blocks that sessions may reserve. `shares`: of owners, relative to each other. With several
    owners, none can take everything: half of each share stays free for its owner. With at most one, all is available.
    """

    def __init__(self, config: SessionsConfig, num_pages: int, shares: Mapping[str, float]) -> None:
        self._is_shared = len(shares) > 1
        most_sessions = MOST_COUNT if config.max_sessions is None else config.max_sessions
        self.sessions = Shares(most_sessions, shares)
        self.pages = Shares(max(0, num_pages), shares)
        self.tokens = Shares(config.max_history_tokens, shares)

    def add(self, session: Session, num_pages: int) -> None:
        """Count a new session, with its reserved pages and its history."""
        self.sessions.force(session.owner)
        self.pages.force(session.owner, num_pages)
        self.recount(session)

    def remove(self, session: Session, num_pages: int) -> None:
        """Stop counting a session."""
        self.sessions.give(session.owner)
        self.pages.give(session.owner, num_pages)
        self.tokens.give(session.owner, session.num_counted)
        session.num_counted = 0

    def recount(self, session: Session) -> None:
        """Update the count of a session's history to its current length."""
        more = session.history_length - session.num_counted
        if more >= 0:
            self.tokens.force(session.owner, more)
        else:
            self.tokens.give(session.owner, -more)
        session.num_counted = session.history_length

    def check_tokens(self, owner: str, num_tokens: int) -> None:
        """Raise SessionsExhaustedError if the histories of `owner` cannot grow by `num_tokens`."""
        room = self.tokens.room(owner)
        if num_tokens > room:
            raise SessionsExhaustedError(
                f"{num_tokens} more tokens do not fit: histories hold {self.tokens.used(owner)} of this owner, "
                f"{self.tokens.num_used} of all, and {self.tokens.total} at most",
                field="max_history_tokens",
                hint="Close a session, or allow more.",
            )

    def leaving(
        self, owner: str, idle: Iterable[Session], *, num_sessions: int, num_pages: int, pages_of: Mapping[str, int]
    ) -> list[Session]:
        """Return sessions of `idle` to evict for `num_sessions` and `num_pages` more; too few if there are not enough.

        `owner` takes from others only what these hold beyond their guarantees, and only up to its own guarantee; beyond
        that, its own sessions are evicted. `idle`: the longest idle first. `pages_of`: the reserved pages of each
        session by id, without zeros.
        """
        account = owner_of(owner) if self._is_shared else ""
        candidates: dict[str, list[Session]] = {}
        for session in idle:
            candidates.setdefault(owner_of(session.owner) if self._is_shared else "", []).append(session)
        freed = {id(self.sessions): dict.fromkeys(candidates, 0), id(self.pages): dict.fromkeys(candidates, 0)}
        found: list[Session] = []
        while num_sessions > 0 or num_pages > 0:
            shares, wanted = (self.sessions, num_sessions) if num_sessions > 0 else (self.pages, num_pages)

            def over(name: str, shares: Shares = shares) -> int:
                return shares.over(name) - freed[id(shares)].get(name, 0)

            able = {
                name: there
                for name, there in candidates.items()
                if num_sessions > 0 or any(pages_of.get(session.session_id) for session in there)
            }
            others = [name for name in able if name != account and over(name) > 0]
            if self._is_shared and others and over(account) + wanted <= 0:
                name = min(others, key=lambda name: (-over(name), name))
            elif account in able:
                name = account
            else:
                break
            there = candidates[name]
            place = next(
                place for place, session in enumerate(there) if num_sessions > 0 or pages_of.get(session.session_id)
            )
            session = there.pop(place)
            if not there:
                del candidates[name]
            found.append(session)
            num_its_pages = pages_of.get(session.session_id, 0)
            num_sessions -= 1
            num_pages -= num_its_pages
            freed[id(self.sessions)][name] += 1
            freed[id(self.pages)][name] += num_its_pages
        return found


def random_id() -> str:
    """Return 128 random bits as 32 hexadecimal digits."""
    return token_hex(16)


class SessionTable:
    """Owner of all sessions, and of the engine's pages that bounded ones hold. For the engine's thread.

    A bounded session is admitted if its maximum between steps fits next to that of all others; the room for chunks is
    reserved once for all. So no bounded session ever waits for memory. `shares`: of owners, see Capacity.
    """

    def __init__(
        self,
        host: ModelHost,
        config: SessionsConfig,
        *,
        shares: Mapping[str, float] | None = None,
        new_id: Callable[[], str] = random_id,
    ) -> None:
        self.host = host
        self.config = config
        self.on_removed: Callable[[Session, EndReason], object] | None = None
        """Called with a session that was removed, and the reason."""
        self.tombstones = Tombstones(config.tombstone_ttl_s)
        self._new_id = new_id
        self._page_size = host.config.page_size
        self._reserve = host.core.scheduler.session_pages.reserve
        self._memory = memory_of(host)
        self._room = self._memory.room(config.chunk_tokens)
        self.capacity = Capacity(config, self._most_pages() - self._room.num_pages, shares or {})
        self._salts: dict[str, str] = {}
        """A random salt for each owner with a session. Events show it to their readers, instead of the owner's name."""
        self._sessions: dict[str, Session] = {}
        self._num_bounded = 0
        self._num_made = 0
        self._ended_by_reason: dict[str, int] = {}

    # Finding ----------------------------------------------------------------------------------------------

    def get(self, owner: str, session_id: str) -> Session:
        """Return a session of `owner`. Raise UnknownSessionError if not found, with its end if that is known."""
        session = self.find(owner, session_id)
        if session is None:
            raise self.tombstones.error(owner, session_id)
        return session

    def find(self, owner: str, session_id: str) -> Session | None:
        """Return a session of `owner`, or None. From any thread."""
        session = self._sessions.get(session_id)
        return session if session is not None and session.owner == owner else None

    def of_owner(self, owner: str) -> list[Session]:
        """Return the sessions of `owner`, the oldest first."""
        return [session for session in self._sessions.values() if session.owner == owner]

    def named(self, owner: str, name: str) -> Session | None:
        """Return the session of `owner` with this id; else the oldest with this label; else None."""
        session = self.find(owner, name)
        if session is not None:
            return session
        return next((each for each in self.of_owner(owner) if each.settings.label == name), None)

    def counts(self) -> SessionCounts:
        """Return the totals over all sessions. From any thread."""
        sessions = list(self._sessions.values())
        return SessionCounts(
            num_sessions=len(sessions),
            num_reserved_pages=self._reserve.num_pages,
            num_history_tokens=sum(session.history_length for session in sessions),
            ended_by_reason=dict(self._ended_by_reason),
        )

    def has(self, session: Session) -> bool:
        """Return whether a session still exists."""
        return self._sessions.get(session.session_id) is session

    def now_ns(self) -> int:
        """Return the time."""
        return self.host.clock.now_ns()

    # Creation and removal ---------------------------------------------------------------------------------

    def create(
        self,
        owner: str,
        settings: SessionSettings,
        *,
        session_id: str | None = None,
        tokens: bytes = b"",
        may_evict: bool = True,
    ) -> Session:
        """Return a new session with a history of `tokens`, 8 bytes each.

        Raise SessionsExhaustedError if it does not fit, even after evictions where these are allowed. Raise ConfigError
        for settings that the model does not support.
        """
        keeps = self._keeps(settings)
        self._make_room(owner, keeps, may_evict=may_evict)
        pages = None
        if keeps is not None:
            self._reserve_pages(keeps)
            pages = self._memory.open(keeps, self._reserve, self._room)
        return self._add(owner, settings, pages, session_id, tokens)

    def fork(self, session: Session, label: str) -> Session:
        """Return a new session with the history and settings of `session`; the two share its pages."""
        keeps = None if session.pages is None else session.pages.keeps
        settings = session.settings
        if label:
            settings = msgspec.structs.replace(settings, label=label)
        self.capacity.check_tokens(session.owner, session.history_length)
        self._make_room(session.owner, keeps, spare=session)
        pages = None
        if session.pages is not None and keeps is not None:
            self._reserve_pages(keeps)
            pages = session.pages.fork()
        other = self._add(session.owner, settings, pages, None, bytes(session.content.units))
        other.num_computed = session.num_computed
        other.furthest = session.furthest
        session.touched_ns = other.touched_ns
        return other

    def remove(self, session: Session, reason: EndReason) -> None:
        """Remove an idle session; its pages become free immediately."""
        assert session.request is None, f"{session!r} has a request under way"
        del self._sessions[session.session_id]
        self._ended_by_reason[reason] = self._ended_by_reason.get(reason, 0) + 1
        self.unpin(session)
        self.capacity.remove(session, self._num_reserved(session.pages))
        if session.pages is not None:
            most_pages = self._num_reserved(session.pages)
            session.pages.release()
            self._num_bounded -= 1
            self._reserve.shrink(most_pages if self._num_bounded else most_pages + self._room.num_pages)
        self.tombstones.add(
            Tombstone(
                session_id=session.session_id,
                owner=session.owner,
                reason=reason,
                ended_s=time.time(),
                length=session.history_length,
                inv1_violations=session.inv1_violations,
                inv2_violations=session.inv2_violations,
            )
        )
        if self.on_removed is not None:
            self.on_removed(session, reason)

    def pin(self, session: Session) -> None:
        """Pin the full pages of an unbounded session until its next turn, as long as no request needs them."""
        pins = self.host.core.scheduler.pins
        if pins is None or session.settings.retention != "pin" or session.pages is not None:
            return
        before = session.pin
        session.pin = pins.add(session.content, session.num_computed // self._page_size)
        if before is not None:
            pins.remove(before)

    def unpin(self, session: Session) -> None:
        """Unpin the pages of a session."""
        pins = self.host.core.scheduler.pins
        if pins is not None and session.pin is not None:
            pins.remove(session.pin)
        session.pin = None

    def expired(self) -> list[Session]:
        """Return sessions that have been idle for longer than their `ttl_s`."""
        now_ns = self.now_ns()
        return [
            session
            for session in self._sessions.values()
            if session.state == "idle"
            and session.settings.ttl_s is not None
            and now_ns - session.touched_ns >= session.settings.ttl_s * 1e9
        ]

    def shorten(self, session: Session, length: int) -> None:
        """Cut a history to `length` tokens. `can_shorten` must hold: no token needed to continue was dropped."""
        content = session.content
        units = bytes(content.units[: length * 8])
        session.content = Content(
            bytearray(units), num_tokens=length, page_size=self._page_size, owner=content.owner, salt=content.salt
        )
        self.capacity.recount(session)
        if session.pages is None:
            session.num_computed = min(session.num_computed, length)
        else:
            session.num_computed = session.pages.shorten(length, session.num_computed)
        session.furthest = session.num_computed
        session.touched_ns = self.now_ns()

    def can_shorten(self, session: Session, length: int) -> bool:
        """Return whether the KV needed to continue after `length` tokens is present."""
        return session.pages is None or length >= session.num_computed or session.pages.can_shorten(length)

    def take_back(self, session: Session, length: int) -> None:
        """Cut a history to `length` tokens. If tokens needed to continue were dropped, all are computed again."""
        if session.pages is not None and not self.can_shorten(session, length):
            session.pages.release()
            session.num_computed = 0
        self.shorten(session, length)

    # State ------------------------------------------------------------------------------------------------

    def look(self, session: Session) -> int:
        """Check the pages of a session against the record of writes to them, and count violations.

        Return the number of its computed tokens, including those of its current request.
        """
        num_computed = session.num_computed
        if (generation := self._under_way(session)) is not None:
            running, request = self.host.core.scheduler.running, generation.request
            # A preempted request recomputes tokens, which does not mean that its position decreased.
            num_computed = max(num_computed, running.num_computed(request), request.furthest_computed)
        if num_computed < session.furthest:
            session.inv2_violations += 1
        session.furthest = num_computed
        if session.pages is not None and not holds_what_it_should(
            self.host.slots, session.pages, self._page_size, num_computed
        ):
            session.inv1_violations += 1
        return num_computed

    def info(self, session: Session) -> SessionInfo:
        """Return the current state of a session."""
        host, pages = self.host, session.pages
        num_computed = self.look(session)
        length = session.history_length
        if (generation := self._under_way(session)) is not None:
            # Sampled tokens are added to the content in batches.
            length = generation.request.num_prompt_tokens + len(generation.tokens)
        page_bytes = host.token_bytes * self._page_size
        if pages is None:
            cache = host.core.scheduler.cache
            match = cache.match(session.content, session.num_computed // self._page_size)
            num_retained = match.num_pages * self._page_size
            num_pages = num_peak = cache.needs.to_hold(match)
            num_live = num_pages * self._page_size
            bound = None
        else:
            of_tables = count_retained(host.slots, pages, self._page_size, num_computed)
            num_retained, num_live = max(of_tables), sum(of_tables) + len(pages.state) * self._page_size
            num_pages, num_peak = len(pages.page_ids), pages.most_held
            bound = self._memory.most_pages(pages.keeps) * page_bytes
        return SessionInfo(
            session_id=session.session_id,
            label=session.settings.label,
            settings=session.settings,
            state=session.state,
            history_length=length,
            num_retained=num_retained,
            num_dropped=num_computed - num_retained,
            kv_live_bytes=num_live * host.token_bytes,
            kv_allocated_bytes=num_pages * page_bytes,
            kv_peak_bytes=num_peak * page_bytes,
            kv_bound_bytes=bound,
            inv1_violations=session.inv1_violations,
            inv2_violations=session.inv2_violations,
            idle_s=(self.now_ns() - session.touched_ns) / 1e9 if session.state == "idle" else 0.0,
            num_turns=session.num_turns,
            num_computed_tokens=session.num_computed_tokens,
            restored=session.restored,
        )

    # Inside -----------------------------------------------------------------------------------------------

    def _under_way(self, session: Session) -> Generation | None:
        """Return the current generation of a session, with its tokens; None if it has none."""
        return None if session.request is None else self.host.loop.generation(session.request)

    def _keeps(self, settings: SessionSettings) -> SinkWindow | None:
        if settings.window is None and settings.retention == "host" and self.host.core.tiers is None:
            raise _needs_host_memory()
        if settings.positions == "cache":
            self.host.rotate_late()
        if settings.window is None:
            return None
        return keeps_of(settings, self.host)

    def _num_wanted(self, keeps: SinkWindow | None) -> int:
        """Return the number of pages by which the reserve must grow for one more session."""
        if keeps is None:
            return 0
        return self._memory.most_pages(keeps) + (0 if self._num_bounded else self._room.num_pages)

    def _make_room(
        self, owner: str, keeps: SinkWindow | None, spare: Session | None = None, *, may_evict: bool = True
    ) -> None:
        """Make room for one more session, evicting idle ones if that is allowed and sufficient; else raise."""
        scheduler, capacity = self.host.core.scheduler, self.capacity
        num_wanted = self._num_wanted(keeps)
        if scheduler.pins is not None:
            scheduler.pins.give_up(num_wanted)
        # A request already here must fit next to the reserved pages, or it would wait for ever.
        most_pages = min(self._most_pages(), self._memory.total - scheduler.most_pages_needed())
        scheduler.settle()
        num_free = min(most_pages - self._reserve.num_pages, scheduler.cache.num_free)
        num_missing = num_missing_of_owner = 0
        if keeps is not None:
            num_missing_of_owner = self._memory.most_pages(keeps) - capacity.pages.room(owner)
            num_missing = max(num_wanted - num_free, num_missing_of_owner)
        num_too_many = 1 - capacity.sessions.room(owner)
        leaving: list[Session] = []
        if may_evict and self.config.at_capacity == "evict" and (num_too_many > 0 or num_missing > 0):
            idle = [session for session in self._sessions.values() if session.state == "idle" and session is not spare]
            pages_of = {session.session_id: self._num_reserved(session.pages) for session in idle}
            leaving = capacity.leaving(
                owner,
                sorted(idle, key=lambda session: session.touched_ns),
                num_sessions=num_too_many,
                num_pages=num_missing,
                pages_of=pages_of,
            )
            num_too_many -= len(leaving)
            num_missing -= sum(pages_of[session.session_id] for session in leaving)
        if num_too_many > 0:
            num_used, num_of_owner = capacity.sessions.num_used, capacity.sessions.used(owner)
            is_full = num_used >= capacity.sessions.total
            raise SessionsExhaustedError(
                f"there are {num_used} sessions, which is the most"
                if is_full
                else f"the owner has {num_of_owner} of {num_used} sessions, and what is left is kept for others",
                field="max_sessions",
                hint="Close one, or allow more.",
            )
        if num_missing > 0:
            page_bytes = self.host.token_bytes * self._page_size
            num_left = max(0, num_free, 0) if num_missing_of_owner <= 0 else max(0, capacity.pages.room(owner))
            raise SessionsExhaustedError(
                f"the session needs {num_wanted} {self._memory.unit} ({num_wanted * page_bytes:,} bytes), and "
                f"{num_left} of {self._most_pages()} are free beside {len(self._sessions)} sessions and what else runs",
                field="session_memory",
                hint="Close a session, keep a smaller window, or give sessions more memory.",
            )
        for session in leaving:
            self.remove(session, "evicted")

    def _num_reserved(self, pages: SessionPages | None) -> int:
        """Return the number of pages reserved for a session with `pages`."""
        return 0 if pages is None else self._memory.most_pages(pages.keeps)

    def _most_pages(self) -> int:
        bounds = [self._memory.total]
        if self.config.max_pages is not None:
            bounds.append(self.config.max_pages)
        if self.config.memory_bytes is not None:
            bounds.append(self.config.memory_bytes // (self.host.token_bytes * self._page_size))
        return min(bounds)

    def _reserve_pages(self, keeps: SinkWindow) -> None:
        self._reserve.extend(self._num_wanted(keeps))
        self._num_bounded += 1

    def _add(
        self, owner: str, settings: SessionSettings, pages: SessionPages | None, session_id: str | None, tokens: bytes
    ) -> Session:
        self._num_made += 1
        content = Content(
            bytearray(tokens),
            num_tokens=len(tokens) // 8,
            page_size=self._page_size,
            owner=-1 - self._num_made,  # never the index of a request
            salt=self._salt_of(owner),
        )
        session = Session(
            self._new_id() if session_id is None else session_id, owner, settings, content, pages, self.now_ns()
        )
        assert session.session_id not in self._sessions
        self._sessions[session.session_id] = session
        self.capacity.add(session, self._num_reserved(pages))
        return session

    def _salt_of(self, owner: str) -> str | None:
        """Return the salt of an owner's pages, which is the same for all of its sessions as long as it has one."""
        if not owner:
            return None
        if owner not in self._salts:
            self._salts[owner] = random_id()
        return self._salts[owner]


def memory_of(host: ModelHost) -> SessionMemory:
    """Return the memory of a model from which sessions take their pages."""
    num_pages, page_size, groups = host.config.num_pages, host.config.page_size, host.memory
    return SessionMemory(num_pages if groups is None else groups.num_blocks(num_pages), page_size, groups)


def keeps_of(settings: SessionSettings, host: ModelHost) -> SinkWindow:
    """Return the tokens that a bounded session retains. Raise ConfigError for a choice that the model does not have."""
    assert settings.window is not None
    if not settings.heavy:
        return SinkWindow(settings.sink, settings.window, rotates_late=settings.positions == "cache")
    if not host.scores_attention:
        raise ConfigError(
            f"{settings.keep!r} needs a real model in which all layers attend to all tokens",
            field="keep",
            hint="Leave keep and heavy out.",
        )
    page_size = host.config.page_size
    return HeavyPages(
        settings.sink,
        settings.window,
        num_heavy=-(-settings.heavy // page_size),
        keep=settings.keep,
        page_size=page_size,
    )


def check_settings(config: SessionsConfig, host: ModelHost) -> None:
    """Raise ConfigError if no session with default settings fits, or a limit in bytes cannot be converted to pages."""
    settings = config.defaults
    if config.memory_bytes is not None and not host.token_bytes:
        raise ConfigError(
            "cannot be told in pages: nothing says how many bytes a token has",
            field="session_memory",
            hint="Give the mock a --model, or leave it out.",
        )
    if settings.window is None:
        if settings.retention == "host" and host.core.tiers is None:
            raise _needs_host_memory()
        return
    memory = memory_of(host)
    num_wanted = memory.most_pages(keeps_of(settings, host))
    num_wanted += memory.room(config.chunk_tokens).num_pages
    total = memory.total if config.max_pages is None else min(memory.total, config.max_pages)
    if num_wanted > total:
        raise ConfigError(
            f"one session needs {num_wanted} {memory.unit}, and the model has {total} for sessions",
            field="window",
            hint="Give the model more kv_memory, or keep a smaller window.",
        )


def _needs_host_memory() -> ConfigError:
    return ConfigError("'host' needs host memory", field="retention", hint="Open the server with host memory.")

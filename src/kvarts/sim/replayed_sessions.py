"""The sessions of a replay: the replica of each, its KV, and the tokens that its next turn must compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvarts.base.errors import ConfigError
from kvarts.core.events import Blocked
from kvarts.core.kv.groups import SinkWindow
from kvarts.core.kv.session_pages import SessionMemory, SessionPages
from kvarts.core.request import Request
from kvarts.core.sched.scheduler import Scheduler
from kvarts.sim.config import ReplayConfig
from kvarts.sim.router import Routed
from kvarts.sim.sessions import SessionReplay
from kvarts.sim.traffic.source import Source
from kvarts.sim.traffic.trace import Trace, TraceRequest, spell

__all__ = ["ReplayedSessions", "open_replayed_sessions"]

UNIT_BYTES = 8


@dataclass(eq=False)
class _Session:
    """A session between its first turn and its end.

    `row`: its last turn; `num_computed`: tokens computed so far; `is_given_up`: whether its last turn ended early.
    """

    replica: int
    row: TraceRequest
    pages: SessionPages | None = None
    pin: int | None = None
    num_computed: int = 0
    idle_since_ns: int | None = None
    is_given_up: bool = False


class _Replica:
    """The state of sessions on one replica."""

    def __init__(self, scheduler: Scheduler, config: SessionReplay, memory: SessionMemory) -> None:
        self.scheduler = scheduler
        self.room = memory.room(config.chunk_tokens)
        self.num_bounded = 0


class ReplayedSessions:
    """The sessions of one model's traffic. `memory`: their memory needs on an engine.

    A turn continues its session if its prompt begins with the previous prompt, as far as the units of the trace show,
    and is longer than that and its answer. After a turn that was given up it may be shorter: that turn is sent again,
    or its answer is continued from where it broke off. Otherwise the client has changed the history, and the session
    starts again.
    Expired sessions are looked for when a request arrives.
    """

    def __init__(
        self, config: SessionReplay, trace: Trace, source: Source, engines: Sequence[Routed], memory: SessionMemory
    ) -> None:
        self._config = config
        self._keeps = config.keeps
        self._source = source
        self._memory = memory
        self._unit_tokens = trace.unit_tokens
        self._knows_output = trace.has_output_tokens and trace.unit_tokens == 1
        self._replicas = [_Replica(engine.scheduler, config, memory) for engine in engines]
        self._sessions: dict[str, _Session] = {}
        """By id, the least recently used first."""
        self._computed: dict[str, int] = {}
        """Tokens of its history that each session has computed, whether their KV is kept or not."""
        self._totals = dict.fromkeys(
            (
                "num_sessions",
                "num_turns",
                "num_turns_of_changed_history",
                "num_expired",
                "num_evicted",
                "num_refused_turns",
                "num_history_tokens",
                "num_history_tokens_computed",
                "peak_reserved_pages",
            ),
            0,
        )

    @property
    def totals(self) -> Mapping[str, int]:
        """Counts over all sessions, named as in the report."""
        pins = [at.scheduler.pins for at in self._replicas]
        return {**self._totals, "num_pins_given_up": sum(each.num_given_up for each in pins if each is not None)}

    def replica_of(self, row: TraceRequest, now_ns: int) -> int | None:
        """Return the replica with the session of `row`, after removing expired sessions; None if not found."""
        self._expire(now_ns)
        session = self._sessions.get(row.session_id) if row.session_id is not None else None
        return None if session is None else session.replica

    def expired(self, now_ns: int) -> list[str]:
        """Return the sessions that the next arrival, at `now_ns`, removes."""
        ttl_s = self._config.ttl_s
        if ttl_s is None:
            return []
        since_ns = now_ns - round(ttl_s * 1e9)
        return [
            session_id
            for session_id, session in self._sessions.items()
            if session.idle_since_ns is not None and session.idle_since_ns <= since_ns
        ]

    def begin(self, request: Request, row: TraceRequest, replica: int) -> str | None:
        """Make `request` the next turn of its session; return the reason if that is not possible, else None."""
        session_id, totals = row.session_id, self._totals
        if session_id is None:
            return None
        totals["num_turns"] += 1
        session = self._sessions.pop(session_id, None)
        if session is not None and not self._continues(row, session):
            totals["num_turns_of_changed_history"] += 1
            if session.pages is not None:
                self._remove(session)
                session = None
        if session is None:
            session = _Session(replica, row)
            reason = None if self._keeps is None else self._reserve(session, self._keeps)
            if reason is not None:
                totals["num_refused_turns"] += 1
                return reason
            totals["num_sessions"] += 1
        session.row = row
        session.idle_since_ns = None
        self._sessions[session_id] = session
        if session.pages is not None:
            if session.num_computed >= row.num_prompt_tokens:  # an answer that was given up, and is computed again
                left = session.pages.shorten(row.num_prompt_tokens, session.num_computed)
                session.num_computed = min(left, row.num_prompt_tokens - 1)  # the last is computed for its logits
            request.own = session.pages
            request.start = session.num_computed
        return None

    def end(
        self, request: Request, row: TraceRequest, now_ns: int, *, is_refused: bool, is_sent_again: bool = False
    ) -> None:
        """Record that a turn has ended or was refused, before the turns that wait for it may come.

        `is_sent_again`: its client gave it up, and will send it again.
        """
        session_id = row.session_id
        if session_id is None:
            return
        is_last = not is_sent_again and not self._source.has_turns_after(row)
        if not is_refused:
            had = min(self._computed.pop(session_id, 0), row.num_prompt_tokens)
            self._totals["num_history_tokens"] += had
            self._totals["num_history_tokens_computed"] += max(0, had - request.cached_tokens)
            if not is_last:
                self._computed[session_id] = request.num_computed
        session = self._sessions.get(session_id)
        if session is None:
            return
        session.idle_since_ns = now_ns
        session.is_given_up = is_refused
        # A turn that was given up leaves the pages that it has filled; one that never ran has computed nothing.
        session.num_computed = max(session.num_computed, request.num_computed)
        if is_last:
            del self._sessions[session_id]
            self._remove(session)
        elif not is_refused and self._config.retention == "pin":
            self._pin(session, request)

    # Inside -----------------------------------------------------------------------------------------------

    def _continues(self, row: TraceRequest, session: _Session) -> bool:
        """Return whether the prompt of `row` consists of that of the last turn, its answer, and more.

        After a turn that was given up: of that prompt. The computed part of its answer may then be discarded.
        """
        before = session.row
        num_answered = before.num_output_tokens
        if row.tenant != before.tenant:
            return False
        if row.num_prompt_tokens <= before.num_prompt_tokens + num_answered:
            if not session.is_given_up or row.num_prompt_tokens < before.num_prompt_tokens:
                return False
            if row.num_prompt_tokens > session.num_computed:
                num_answered = max(0, session.num_computed - before.num_prompt_tokens)
            elif session.pages is None or session.pages.can_shorten(row.num_prompt_tokens):
                num_answered = row.num_prompt_tokens - before.num_prompt_tokens
            else:
                return False
        known = spell(before.units)[: before.num_prompt_tokens // self._unit_tokens * UNIT_BYTES]
        if self._knows_output and before.output_units is not None:
            known += spell(before.output_units)[: num_answered * UNIT_BYTES]
        return spell(row.units).startswith(known)

    def _expire(self, now_ns: int) -> None:
        for session_id in self.expired(now_ns):
            self._remove(self._sessions.pop(session_id))
            self._totals["num_expired"] += 1

    def _reserve(self, session: _Session, keeps: SinkWindow) -> str | None:
        """Reserve the pages of a bounded session; return the reason if that is not possible, else None."""
        at = self._replicas[session.replica]
        scheduler, reserve = at.scheduler, at.scheduler.session_pages.reserve
        most_pages = self._memory.most_pages(keeps)
        num_wanted = most_pages + (0 if at.num_bounded else at.room.num_pages)
        # A request already here must fit next to the reserved pages, or it would wait for ever.
        num_beside = self._memory.total - scheduler.most_pages_needed() - reserve.num_pages
        scheduler.settle()
        num_missing = num_wanted - min(num_beside, scheduler.cache.num_free)
        leaving: list[str] = []
        if self._config.at_capacity == "evict":
            for session_id, other in self._sessions.items():
                if num_missing <= 0:
                    break
                if other.replica == session.replica and other.idle_since_ns is not None:
                    num_missing -= most_pages
                    leaving.append(session_id)
        if num_missing > 0:
            return (
                f"a session needs {num_wanted} {self._memory.unit}, and {num_wanted - num_missing} are free beside "
                f"{at.num_bounded} sessions and what else runs"
            )
        for session_id in leaving:
            self._remove(self._sessions.pop(session_id))
            self._totals["num_evicted"] += 1
        # If the last bounded session was evicted, the room for chunks was released with it.
        reserve.extend(most_pages + (0 if at.num_bounded else at.room.num_pages))
        at.num_bounded += 1
        session.pages = self._memory.open(keeps, reserve, at.room)
        self._note(at)
        return None

    def _remove(self, session: _Session) -> None:
        """Release everything that an idle session holds."""
        at = self._replicas[session.replica]
        if session.pages is not None:
            most_pages = self._memory.most_pages(session.pages.keeps)
            session.pages.release()
            at.num_bounded -= 1
            at.scheduler.session_pages.reserve.shrink(most_pages + (0 if at.num_bounded else at.room.num_pages))
        self._unpin(session)
        # A request that waits for memory may fit now.
        at.scheduler.blocked = Blocked.NOT

    def _pin(self, session: _Session, request: Request) -> None:
        """Pin the pages of this turn, and only then unpin those of the previous turn."""
        at = self._replicas[session.replica]
        pins = at.scheduler.pins
        assert pins is not None, "an engine with one pool of pages has pins"
        before = session.pin
        num_full = min(request.num_computed // self._memory.page_size, request.content.num_known_pages)
        session.pin = pins.add(request.content, num_full)
        if before is not None:
            pins.remove(before)
        self._note(at)

    def _unpin(self, session: _Session) -> None:
        pins = self._replicas[session.replica].scheduler.pins
        if pins is not None and session.pin is not None:
            pins.remove(session.pin)
        session.pin = None

    def _note(self, at: _Replica) -> None:
        """Update the peak of reserved pages."""
        self._totals["peak_reserved_pages"] = max(self._totals["peak_reserved_pages"], at.scheduler.cache.num_reserved)


def open_replayed_sessions(
    settings: SessionReplay, config: ReplayConfig, trace: Trace, source: Source, engines: Sequence[Routed]
) -> ReplayedSessions:
    """Return the sessions of `trace` on `engines` of `config`.

    Raise ConfigError if the configuration lacks a requirement of sessions, or the trace lacks sessions.
    """
    if not trace.has_sessions:
        raise ConfigError(
            f"{trace.name} has no sessions",
            field="sessions",
            hint="Leave the options of sessions out, or give requests a session_id.",
        )
    if settings.retention == "host" and config.offload is None:
        raise ConfigError("'host' needs host memory", field="sessions.retention", hint="Set offload.")
    groups = None if config.kv_groups == "off" else config.memory
    memory = SessionMemory(config.num_pages if groups is None else config.num_blocks, config.page_size, groups)
    if settings.keeps is not None:
        most_pages = memory.most_pages(settings.keeps)
        room_pages = memory.room(settings.chunk_tokens).num_pages
        if most_pages + room_pages > memory.total:
            raise ConfigError(
                f"a session needs {most_pages} {memory.unit}, beside {room_pages} for chunks, and the device has "
                f"{memory.total}",
                field="sessions.window",
                hint="Keep a smaller window, or give the device more memory.",
            )
    return ReplayedSessions(settings, trace, source, engines, memory)

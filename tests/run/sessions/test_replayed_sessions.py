"""Replays of sessions: what is kept of them between turns, and what their next turns have to compute."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import kvarts
from kvarts.base.errors import ConfigError
from kvarts.core.events import Arrived, Rejected
from kvarts.core.kv.session_pages import SessionPages
from kvarts.core.request import Request
from kvarts.sim.arrivals import Arrivals
from kvarts.sim.config import ReplayConfig, make_config
from kvarts.sim.driver import Driver
from kvarts.sim.replay import open_replica
from kvarts.sim.replayed_sessions import ReplayedSessions, open_replayed_sessions
from kvarts.sim.replaying import replay
from kvarts.sim.replica import Replica
from kvarts.sim.report.requests import RequestLog
from kvarts.sim.router import RoundRobin
from kvarts.sim.sessions import SessionReplay
from kvarts.sim.traffic.trace import Trace, TraceRequest

from builders.case import ROUTERS
from builders.grouped import assert_same_outcome
from builders.kept import Kept
from builders.session_traces import Talk, replayed_as_slowly, session_traces

pytestmark = pytest.mark.laws

KEPT: list[dict[str, Any]] = [
    {"window": 1, "sink": 0},
    {"window": 7, "sink": 3},
    {"window": 30, "sink": 4, "at_capacity": "evict"},
    {"window": 7, "sink": 3, "ttl_s": 0.06, "at_capacity": "evict"},
    {"retention": "pin"},
    {"retention": "pin", "ttl_s": 0.06},
    {"retention": "cache"},
]

configs = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([1, 3, 4]),
        "num_pages": st.sampled_from([70, 120, 300]),
        "max_num_batched_tokens": st.sampled_from([8, 32, 512]),
        "max_num_seqs": st.sampled_from([2, 8]),
        "replicas": st.sampled_from([1, 1, 3]),
        "router": st.sampled_from(ROUTERS),
        "concurrency": st.sampled_from([None, None, 1, 3]),
        "sessions": st.sampled_from(KEPT).map(lambda settings: SessionReplay(chunk_tokens=16, **settings)),
    }
)


@given(session_traces(), configs)
def test_fast_forward_equals_step_by_step(talk: Talk, settings: dict[str, Any]) -> None:
    """L5, and the audit and the timelines agree that each page is accounted for."""
    replayed_as_slowly(talk, audit=True, **settings)


def test_a_session_that_expires_during_steps_of_its_replica_is_there_in_those_before() -> None:
    """Its pages are released by an arrival elsewhere, 60 ms after its last turn."""

    def row(number: int, num_answered: int, session_id: str | None = None, delay_ns: int | None = None) -> TraceRequest:
        return TraceRequest(number, 0, bytes(8), 1, num_answered, session_id=session_id, delay_ns=delay_ns)

    late = 80 * 1_000_000
    rows = [row(0, 5, "0"), row(1, 1, "0", late), row(2, 1, "1"), row(3, 1, "1", late), row(4, 11), row(5, 4)]
    kept = SessionReplay(chunk_tokens=16, window=7, sink=3, ttl_s=0.06, at_capacity="evict")
    report = replayed_as_slowly(
        Talk(rows, 1),
        page_size=3,
        num_pages=70,
        max_num_batched_tokens=8,
        max_num_seqs=2,
        replicas=3,
        router="round-robin",
        concurrency=3,
        sessions=kept,
    )
    assert report.summary["sessions"]["num_expired"] == 2


@given(session_traces(max_plain=0), configs)
def test_a_bounded_turn_computes_what_is_new(talk: Talk, settings: dict[str, Any]) -> None:
    """Against a walk over the turns: what a session has computed is there, unless its client changed the history."""
    settings |= {"num_pages": 2000, "sessions": SessionReplay(window=5, sink=2, chunk_tokens=16)}
    settings["max_num_seqs"] = min(settings["max_num_seqs"], settings["max_num_batched_tokens"])
    report = replay(talk.trace(), ReplayConfig(**settings))
    cached = dict(zip(map(int, report.request_ids), report.requests["cached_tokens"], strict=True))
    before: dict[str, TraceRequest] = {}
    num_changed = num_again = num_history = 0
    for row in talk.rows:
        assert row.session_id is not None
        last = before.get(row.session_id)
        start = 0
        if last is not None:
            whole = last.num_prompt_tokens // talk.unit_tokens * 8
            is_longer = row.num_prompt_tokens > last.num_prompt_tokens + last.num_output_tokens
            computed = last.num_prompt_tokens + last.num_output_tokens - 1
            if is_longer and row.units[:whole] == last.units[:whole]:
                start = computed
            else:
                num_changed += 1
                num_again += min(computed, row.num_prompt_tokens)
            num_history += min(computed, row.num_prompt_tokens)
        assert cached[row.row] == start
        before[row.session_id] = row
    totals = report.summary["sessions"]
    assert totals["num_turns"] == len(talk.rows)
    assert totals["num_turns_of_changed_history"] == num_changed
    assert (totals["num_history_tokens"], totals["num_history_tokens_computed"]) == (num_history, num_again)
    assert report.summary["num_preemptions"] == 0


# Turns that are given up -------------------------------------------------------------------------------------

given_up = st.fixed_dictionaries(
    {
        "client_timeout_s": st.sampled_from([None, 0.001, 0.02, 0.1, 0.3]),
        "retries": st.integers(0, 2),
        "retry_after_s": st.sampled_from([0.0, 0.005]),
        "async_scheduling": st.booleans(),
        "frontend_ms": st.sampled_from([0.0, 3.0]),
        "is_slow": st.booleans(),
    }
)


def config_of(settings: dict[str, Any], patience: dict[str, Any], **more: Any) -> ReplayConfig:
    """A configuration with clients that give up; those without a timeout do not retry."""
    values = {**settings, **patience, "audit": True, **more}
    values["max_num_seqs"] = min(values["max_num_seqs"], values["max_num_batched_tokens"])
    if values.pop("is_slow"):
        values["cost"] = lambda batch: 2.0 + 0.3 * sum(chunk.num_tokens for chunk in batch.chunks)
    if values["client_timeout_s"] is None:
        del values["retries"], values["retry_after_s"]
    if values["sessions"].retention == "host":
        # A name that may be missing.
        values["offload"] = getattr(kvarts, "OffloadConfig")(host_pages=100, kv_bytes_per_token=1000)  # noqa: B009
    return ReplayConfig(**values)


class Watched:
    """The sessions of a replay, and per session the last turn that began, with the tokens computed when it ended.

    Whenever a turn begins, its session has dropped no page that its first token sees.
    """

    def __init__(self, sessions: ReplayedSessions, unit_tokens: int) -> None:
        self.starts: list[tuple[int, int]] = []
        """Of each turn that began: where it starts, and where it has to if its session had memory for ever."""
        self._sessions = sessions
        self._unit_tokens = unit_tokens
        self._left: dict[str | None, tuple[TraceRequest, int]] = {}
        self._given_up: set[str | None] = set()
        """Sessions whose last turn was given up."""
        self._own: dict[str | None, SessionPages] = {}
        """The pages of each session after its last turn."""

    @property
    def totals(self) -> Mapping[str, int]:
        return self._sessions.totals

    def replica_of(self, row: TraceRequest, now_ns: int) -> int | None:
        return self._sessions.replica_of(row, now_ns)

    def expired(self, now_ns: int) -> list[str]:
        return self._sessions.expired(now_ns)

    def begin(self, request: Request, row: TraceRequest, replica: int) -> str | None:
        last, num_computed = self._left.get(row.session_id, (row, 0))
        own = self._own.get(row.session_id)
        can_go_back = own is not None and own.can_shorten(row.num_prompt_tokens)
        reason = self._sessions.begin(request, row, replica)
        if reason is None and request.own is not None:
            whole = last.num_prompt_tokens // self._unit_tokens * 8
            goes_on = row.units[:whole] == last.units[:whole]
            if row.num_prompt_tokens <= last.num_prompt_tokens + last.num_output_tokens:
                goes_on &= row.session_id in self._given_up and row.num_prompt_tokens >= last.num_prompt_tokens
                if num_computed >= row.num_prompt_tokens:
                    goes_on &= can_go_back
            self.starts.append((request.start, min(num_computed, row.num_prompt_tokens - 1) if goes_on else 0))
            self._left[row.session_id] = row, request.start
            assert isinstance(request.own, SessionPages)
            assert request.own.can_shorten(request.start + 1)
        return reason

    def end(
        self, request: Request, row: TraceRequest, now_ns: int, *, is_refused: bool, is_sent_again: bool = False
    ) -> None:
        if request.own is not None:
            _, before = self._left[row.session_id]
            self._left[row.session_id] = row, max(before, request.num_computed)
            assert isinstance(request.own, SessionPages)
            self._own[row.session_id] = request.own
            (self._given_up.add if is_refused else self._given_up.discard)(row.session_id)
        self._sessions.end(request, row, now_ns, is_refused=is_refused, is_sent_again=is_sent_again)


def run(talk: Talk, config: ReplayConfig) -> tuple[Watched, list[Replica]]:
    """The replay of `talk`, round robin: its sessions, and its engines when all has ended."""
    trace = talk.trace()
    source = config.source(trace)
    engines = [open_replica(config, []) for _ in range(config.replicas)]
    assert isinstance(config.sessions, SessionReplay)
    sessions = open_replayed_sessions(config.sessions, config, trace, source, engines)
    watched = Watched(sessions, talk.unit_tokens)
    arrivals = Arrivals(
        trace,
        source,
        RoundRobin(len(engines)),
        engines,
        RequestLog(largest_hit_counts=False, tiers=config.tiers),
        sessions=watched,
        config=config,
    )
    Driver([arrivals], engines).run()
    return watched, engines


kept_somewhere = st.sampled_from([*KEPT, {"retention": "host"}]).map(
    lambda settings: SessionReplay(chunk_tokens=16, **settings)
)


@given(session_traces(cancels=True), configs, given_up, kept_somewhere)
def test_with_turns_given_up_fast_forward_equals_step_by_step(
    talk: Talk, settings: dict[str, Any], patience: dict[str, Any], sessions: SessionReplay
) -> None:
    """L5, with the audit."""
    fast, slow = (
        replay(talk.trace(), config_of(settings, patience, sessions=sessions, step_by_step=slowly))
        for slowly in (False, True)
    )
    assert_same_outcome(fast, slow)


@given(session_traces(cancels=True), configs, given_up, kept_somewhere)
def test_sessions_with_turns_given_up_leave_no_page_in_use(
    talk: Talk, settings: dict[str, Any], patience: dict[str, Any], sessions: SessionReplay
) -> None:
    """L2: at the end nothing is reserved, pinned or in use."""
    _, engines = run(talk, config_of(settings, patience, sessions=sessions))
    for engine in engines:
        scheduler = engine.scheduler
        assert not engine.has_work
        assert scheduler.session_pages.reserve.num_pages == scheduler.session_pages.reserve.num_taken == 0
        assert scheduler.cache.num_reserved == scheduler.cache.num_used == 0
        assert scheduler.pins is None or not scheduler.pins.num_pins


@given(session_traces(max_plain=0, cancels=True), configs, given_up)
def test_a_bounded_turn_goes_on_where_the_one_that_was_given_up_stopped(
    talk: Talk, settings: dict[str, Any], patience: dict[str, Any]
) -> None:
    """Against a walk over the turns, as above. A turn that is sent again goes on as well, or goes back to its prompt's
    end if its window still sees all that this needs."""
    settings |= {"num_pages": 2000, "sessions": SessionReplay(window=5, sink=2, chunk_tokens=16)}
    watched, _ = run(talk, config_of(settings, patience))
    for start, expected in watched.starts:
        assert start == expected, watched.starts


def test_a_turn_after_one_that_was_given_up_computes_only_the_rest() -> None:
    """The first turn is given up after most of its prompt, when its window has left pages behind."""
    first, second = talk_of(("a", 64, 50, 0), ("a", 200, 5, 0))
    rows = [msgspec.structs.replace(first, cancel_after_ns=12_500_000), second]
    config = ReplayConfig(
        page_size=4,
        num_pages=40,
        max_num_batched_tokens=8,
        max_num_seqs=2,
        cost=lambda batch: 2.0,
        audit=True,
        sessions=SessionReplay(window=16, sink=4, chunk_tokens=8),
    )
    report = replay(Trace(rows), config)
    assert report.requests["status"] == ["cancelled", "completed"]
    assert list(report.requests["cached_tokens"]) == [0, 56], "seven steps of 8 tokens, the last of them under way"


@pytest.mark.parametrize("sessions", [{"window": 16, "sink": 4}, {}])
def test_a_turn_that_is_sent_again_has_not_changed_the_history(sessions: dict[str, Any]) -> None:
    """It is given up after three steps of 8 tokens, and goes on with the fourth."""
    config = ReplayConfig(
        page_size=4,
        num_pages=40,
        max_num_batched_tokens=8,
        max_num_seqs=2,
        cost=lambda batch: 2.0,
        audit=True,
        client_timeout_s=0.005,
        retries=1,
        retry_after_s=0.01,
        sessions=SessionReplay(chunk_tokens=8, **sessions),
    )
    report = replay(talk_of(("a", 48, 5, 0)), config)
    assert report.requests["status"] == ["cancelled", "cancelled"]
    totals = report.summary["sessions"]
    assert (totals["num_turns"], totals["num_sessions"], totals["num_turns_of_changed_history"]) == (2, 1, 0)
    assert list(report.requests["cached_tokens"]) == [0, 24]


# Values --------------------------------------------------------------------------------------------------------


def talk_of(*turns: tuple[str, int, int, int], gap_ms: int = 10_000) -> Trace:
    """A trace of turns: session, tokens of the prompt, tokens of the answer, and for which history: all of one begin
    with the same token."""
    rows = []
    for place, (session, num_prompt, num_output, history) in enumerate(turns):
        units = array("Q", [ord(session[0]) * 1000 + history * 100_000 + token for token in range(num_prompt)])
        rows.append(
            TraceRequest(place, place * gap_ms * 1_000_000, units.tobytes(), num_prompt, num_output, session_id=session)
        )
    return Trace(rows)


def totals_of(trace: Trace, **settings: Any) -> dict[str, int]:
    sessions = SessionReplay(**settings.pop("sessions"))
    config = ReplayConfig(**{"page_size": 4, "num_pages": 40, "audit": True, "sessions": sessions, **settings})
    totals: dict[str, int] = replay(trace, config).summary["sessions"]
    return totals


def test_a_bounded_session_has_its_bound_and_no_more() -> None:
    trace = talk_of(("a", 300, 50, 0), ("a", 400, 50, 0), ("a", 500, 5, 0))
    totals = totals_of(trace, sessions={"window": 16, "sink": 4, "chunk_tokens": 32})
    assert totals["peak_reserved_pages"] == (1 + 4 + 1) + 8
    assert totals["num_history_tokens_computed"] == 0
    assert totals["num_history_tokens"] == 349 + 449


def test_at_capacity_a_turn_is_refused_or_the_session_idle_longest_goes() -> None:
    turns = [("a", 8, 4, 0), ("b", 8, 4, 0), ("c", 8, 4, 0), ("a", 20, 4, 0), ("b", 20, 4, 0), ("c", 20, 4, 0)]
    bounded = {"window": 16, "sink": 4, "chunk_tokens": 32}  # 6 pages each, and 8 for chunks
    refused = totals_of(talk_of(*turns), num_pages=20, sessions=bounded)
    assert (refused["num_refused_turns"], refused["num_evicted"]) == (1, 0)
    evicted = totals_of(talk_of(*turns), num_pages=20, sessions={**bounded, "at_capacity": "evict"})
    # c evicts a, whose second turn evicts b, whose second turn finds room: a has ended.
    assert (evicted["num_refused_turns"], evicted["num_evicted"]) == (0, 2)
    assert evicted["num_history_tokens_computed"] == 2 * 11


def test_readers_are_told_of_a_refused_turn_as_of_any_refused_request() -> None:
    turns = [("a", 8, 4, 0), ("b", 8, 4, 0), ("c", 8, 4, 0), ("a", 20, 4, 0), ("b", 20, 4, 0)]
    told = Kept()
    sessions = SessionReplay(window=16, sink=4, chunk_tokens=32)  # 6 pages each, and 8 for chunks
    config = ReplayConfig(page_size=4, num_pages=20, audit=True, sessions=sessions)
    report = replay(talk_of(*turns), config, observers_of=lambda replica: [told])
    refused = [(index, reason) for index, reason in enumerate(report.requests["reason"]) if reason]
    assert [(event.request, event.reason) for event in told.events if isinstance(event, Rejected)] == refused
    assert len(refused) == 1
    arrived = {event.request for event in told.events if isinstance(event, Arrived)}
    assert sorted(arrived | {refused[0][0]}) == list(range(5)) and refused[0][0] not in arrived


def test_a_pin_keeps_what_others_would_evict() -> None:
    turns = [("a", 64, 4, 0), *((other, 80, 4, 1) for other in "xyz"), ("a", 100, 4, 0)]
    cached = totals_of(talk_of(*turns), sessions={"retention": "cache"})
    pinned = totals_of(talk_of(*turns), sessions={"retention": "pin"})
    # Generated tokens are not known, so the page with the first of them is computed again.
    assert (cached["num_history_tokens_computed"], pinned["num_history_tokens_computed"]) == (67, 3)
    assert pinned["peak_reserved_pages"] == 16
    expired = totals_of(talk_of(*turns), sessions={"retention": "pin", "ttl_s": 15.0})
    assert (expired["num_expired"], expired["num_history_tokens_computed"]) == (1, 67)


def test_a_pin_is_given_up_for_a_request_that_needs_the_memory() -> None:
    totals = totals_of(
        talk_of(("a", 64, 4, 0), ("x", 120, 4, 1), ("a", 80, 4, 0)), num_pages=32, sessions={"retention": "pin"}
    )
    assert totals["num_pins_given_up"] == 1


turns_in_a_row = st.lists(
    st.tuples(st.sampled_from("abcxyz"), st.integers(4, 90), st.integers(1, 40), st.integers(0, 2)),
    min_size=2,
    max_size=8,
)


@given(turns_in_a_row, st.sampled_from([1, 5, 20, 100]), st.sampled_from([33, 40, 48]), st.booleans())
@example([("c", 12, 22, 0), ("y", 52, 3, 1), ("y", 53, 32, 2)], 5, 33, False)
def test_pins_are_given_up_in_the_midst_of_a_step(
    turns: list[tuple[str, int, int, int]], gap_ms: int, num_pages: int, step_by_step: bool
) -> None:
    """The audit follows: one decode takes the last free page, and the next one a page of the pin."""
    totals_of(
        talk_of(*turns, gap_ms=gap_ms), num_pages=num_pages, step_by_step=step_by_step, sessions={"retention": "pin"}
    )


def test_host_memory_keeps_what_the_device_evicts() -> None:
    turns = [("a", 64, 4, 0), *((other, 80, 4, 1) for other in "xyz"), ("a", 100, 4, 0)]
    offload = getattr(kvarts, "OffloadConfig")(host_pages=100, kv_bytes_per_token=1000)  # noqa: B009  # may be missing
    totals = totals_of(talk_of(*turns), sessions={"retention": "host"}, offload=offload)
    assert totals["num_history_tokens_computed"] == 3
    with pytest.raises(ConfigError, match="'host' needs host memory"):
        totals_of(talk_of(*turns), sessions={"retention": "host"})


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"window": 0}, "window: must be at least 1, got 0"),
        ({"sink": -1}, "sink: must not be negative, got -1"),
        ({"ttl_s": 0}, "ttl_s: must be above 0, got 0"),
        ({"window": 9, "retention": "pin"}, "retention: is of sessions without a window"),
        ({"window": 9999}, "window: a session needs 2502 pages, beside 128 for chunks, and the device has 40"),
    ],
)
def test_settings_that_cannot_be_are_named(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        totals_of(talk_of(("a", 8, 4, 0)), sessions=values)
    assert problem in str(caught.value)


def test_a_trace_without_sessions_is_refused() -> None:
    trace = Trace([TraceRequest(0, 0, array("Q", [1]).tobytes(), 1, 1)])
    with pytest.raises(ConfigError, match="has no sessions"):
        replay(trace, ReplayConfig(sessions=SessionReplay(window=9)))


def test_a_report_without_sessions_says_nothing_of_them() -> None:
    report = replay(talk_of(("a", 8, 4, 0)), ReplayConfig(page_size=4, num_pages=40))
    assert "sessions" not in report.summary
    assert "sessions" not in report.summary["config"]


def test_options_and_tables_say_the_same(
    run_command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1000, "output_length": 20, "hash_ids": [1, 2], "session_id": "a"},
        {"delay": 50, "input_length": 1800, "output_length": 5, "hash_ids": [1, 2, 3, 4], "session_id": "a"},
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(msgspec.json.encode(rows[0]) + b"\n" + msgspec.json.encode(rows[1]) + b"\n")
    config = tmp_path / "config.toml"
    config.write_text("pages = 2000\npage_size = 4\n\n[sessions]\nwindow = 256\nsink = 8\n")
    by_options = ["--pages", 2000, "--page-size", 4, "--set", "sessions.window=256", "--set", "sessions.sink=8"]
    printed = []
    for arguments in (["--config", config], by_options):
        assert run_command("replay", trace, *arguments, "--json") == 0
        printed.append(msgspec.json.decode(capsys.readouterr().out))
    assert printed[0]["sessions"] == printed[1]["sessions"]
    assert printed[0]["config"]["sessions"]["window"] == 256
    assert printed[0]["sessions"]["num_history_tokens"] == 1019
    assert run_command("replay", trace, *by_options) == 0
    assert "0 of 1,019 tokens of history computed again" in capsys.readouterr().out
    for wrong, problem in (
        (["--set", "sessions.sink=8"], "--set sessions.sink: is of bounded sessions"),
        (["--set", "sessions.retention=host"], "--set sessions.retention: needs host memory"),
        (
            ["--set", "sessions.window=8", "--set", "sessions.retention=pin"],
            "--set sessions.retention: is of sessions without a window",
        ),
    ):
        assert run_command("replay", trace, *wrong) == 2
        assert problem in capsys.readouterr().err


def test_a_table_of_sessions_can_be_given_as_values() -> None:
    config = make_config({"sessions": {"retention": "pin"}}, sections=_sections())
    assert config.sessions == SessionReplay(retention="pin")


def _sections() -> Any:
    from kvarts.cli.replaying import all_sections

    return all_sections()


def test_reserved_pages_are_those_of_each_step_also_after_a_leap(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1024, "output_length": 400, "hash_ids": [0, 1], "session_id": "b"},
        {"timestamp": 1, "input_length": 1024, "output_length": 50, "hash_ids": [2, 3], "session_id": "a"},
        {"timestamp": 2000, "input_length": 1024, "output_length": 50, "hash_ids": [4, 5], "session_id": "c"},
    ]
    path = tmp_path / "sessions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = []
    for step_by_step in (False, True):
        sessions = SessionReplay(window=512)
        config = ReplayConfig(num_pages=4000, page_size=16, sessions=sessions, step_by_step=step_by_step)
        reserved = replay(path, config).step_logs[0].reserved()
        assert reserved is not None
        told.append(reserved.tolist())
    assert len(set(told[1])) > 1
    assert told[0] == told[1]


def test_a_session_leaves_room_for_a_request_that_joins_a_later_step() -> None:
    """The request was accepted while a step ran, and is queued at the next plan: the session comes between."""
    rows = [(0, 4, 8, None), (1, 20, 2, None), (1, 6, 2, "s")]
    requests = [
        TraceRequest(index, ms * 1_000_000, array("Q", range(num)).tobytes(), num, count, session_id=session)
        for index, (ms, num, count, session) in enumerate(rows)
    ]
    trace = Trace(requests, unit_tokens=1)
    sessions = SessionReplay(window=7, sink=3, chunk_tokens=4)
    config = ReplayConfig(
        page_size=1, num_pages=30, max_num_batched_tokens=8, max_num_seqs=4, sessions=sessions, async_scheduling=True
    )
    report = replay(trace, config)
    assert report.summary["num_completed"] == 2
    assert report.summary["sessions"]["num_refused_turns"] == 1

"""Timelines of engines with sessions: what sessions keep is told apart from what is lost."""

from __future__ import annotations

import asyncio
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kvarts
from kvarts.base.errors import OutputError
from kvarts.cli.record import live_reader
from kvarts.proof.evidence import verify_file
from kvarts.proof.record.live import LiveTimeline
from kvarts.run.sessions.values import SessionSettings
from kvarts.sim.report.steps import StepLog

from builders import preforked
from builders.session_timeline import timeline_of
from builders.sessions import OWNER, mock_sessions, say

PAGE_SIZE = 4


def rows_of_a_talk() -> dict[str, Any]:
    """A bounded session and two pinned ones with 16 tokens in common, each with two turns."""
    steps = StepLog(300)
    sessions, _ = mock_sessions(page_size=PAGE_SIZE, readers=[steps])

    async def talk() -> None:
        bounded = await sessions.create(OWNER, SessionSettings(sink=4, window=8))
        pinned = [await sessions.create(OWNER, SessionSettings(window=None, retention="pin")) for _ in range(2)]
        for turn in range(2):
            for index, session in enumerate((*pinned, bounded)):
                await say(sessions, session, list(range(16)) if turn == 0 else [index], 5)
        for session in (bounded, pinned[0]):
            await sessions.close(OWNER, session)
        await say(sessions, pinned[1], [3], 2)
        await sessions.shut_down()

    asyncio.run(talk())
    return msgspec.json.decode(timeline_of(steps, PAGE_SIZE).to_json())  # type: ignore[no-any-return]


def test_pages_of_two_sessions_are_counted_once() -> None:
    body = rows_of_a_talk()
    assert kvarts.verify(body).verdict == "ok"
    rests = [row["reserved_blocks"] for row in body["timeline"] if not row["active_seqs"] and not row["waiting"]]
    # The bounded session has 1 + 2 + 1 pages, and 4 for a chunk of 16 tokens. After two turns a pinned one has 27
    # tokens, with the last one not computed: 6 full pages, 5 of which are the same in both. After a third, the one
    # that is left has 7.
    assert max(rests) == 4 + 4 + 5 + 1 + 1
    assert rests[-1] == 7


def test_pages_at_rest_that_no_session_keeps_are_a_leak() -> None:
    body = rows_of_a_talk()
    row = next(row for row in body["timeline"] if not row["active_seqs"] and row["reserved_blocks"])
    row["reserved_blocks"] -= 1
    verdict = kvarts.verify(body)
    assert [violation.rule for violation in verdict.violations] == ["leak"]
    assert f"{row['reserved_blocks']} are reserved" in verdict.violations[0].what


def test_no_more_is_reserved_than_is_used() -> None:
    body = rows_of_a_talk()
    row = next(row for row in body["timeline"] if row["reserved_blocks"])
    row["reserved_blocks"] = row["used_blocks"] + 1
    assert [violation.rule for violation in kvarts.verify(body).violations] == ["block_conservation"]


def test_an_engine_outlives_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full ends the record, which is said once, and nothing else."""

    def fail(_: LiveTimeline, events: Any) -> None:
        raise OutputError("cannot be written: No space left on device", path=tmp_path)

    monkeypatch.setattr(LiveTimeline, "observe", fail)
    said: list[str] = []
    steps = StepLog(300)
    sessions, host = mock_sessions(page_size=PAGE_SIZE, readers=[steps])

    async def talk() -> None:
        session = await sessions.create(OWNER, SessionSettings())
        assert len(await say(sessions, session, [1, 2, 3], 5)) == 5
        await sessions.shut_down()

    with ExitStack() as stack:
        reader = live_reader(stack, {"kv_timeline": tmp_path / "t.jsonl"}, said.append)(host.config, {})
        assert reader is not None
        host.core.log.add_reader(reader)
        asyncio.run(talk())
    assert len(said) == 1
    assert "nothing more is recorded" in said[0]
    assert "No space left" in said[0]
    assert len(steps) >= 5


def test_a_server_writes_its_timeline(tmp_path: Path) -> None:
    pytest.importorskip("grpc", reason="needs kvarts[grpc]")
    from kvarts.doors.client import Sessions

    path = tmp_path / "server.jsonl"
    options = ("--speedup", "1000", "--port", "0", "--kv-timeline", path)
    with preforked.start("serve", "sessions", "--mock", *options) as process:
        assert process.stderr is not None
        address = process.stderr.readline().split()[3]
        with Sessions(address) as sessions:
            session = sessions.create(window=None, retention="pin")
            session.append(range(100))
            assert len([*session.generate(20)]) > 0
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
    assert verify_file(path).verdict == "ok"

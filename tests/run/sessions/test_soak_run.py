"""Runs against sessions without a server: what is driven, recorded, written while it goes on, and judged at the end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import types
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvarts.base.errors import ConfigError, KvartsError
from kvarts.cli import soak as command
from kvarts.core.sampling import SamplingParams
from kvarts.run.sessions.soak.rules import judge_soak, render_soak_page
from kvarts.run.sessions.soak.run import (
    REPORTED,
    KvLayers,
    SoakClock,
    SoakPlan,
    SoakRecord,
    rss_of,
    run_soak,
    write_record,
)
from kvarts.run.sessions.values import SessionInfo, SessionSettings

from builders.browser import inks, ready
from builders.soak import FakeTarget, plan_of, record_of


def run(
    target: FakeTarget,
    plan: SoakPlan | None = None,
    *,
    stop_after: int | None = None,
    checkpoint: Callable[[SoakRecord], None] = lambda _: None,
    **options: Any,
) -> SoakRecord:
    async def go() -> SoakRecord:
        stop = asyncio.Event()
        if stop_after is not None:

            async def stop_then() -> None:
                while target.num_generations < stop_after:
                    await asyncio.sleep(0)
                stop.set()

            stopping = asyncio.ensure_future(stop_then())
        clock = SoakClock(target.now_s, target.sleep_s)
        record = await run_soak(
            plan or plan_of(), target, clock, stop=stop, checkpoint=checkpoint, rss_bytes=target.rss_bytes, **options
        )
        if stop_after is not None:
            await stopping
        return record

    return asyncio.run(go())


def test_a_bounded_server_is_bounded() -> None:
    target = FakeTarget()
    record = run(target)
    verdict = judge_soak(record)
    assert verdict.verdict == "bounded", verdict.to_text()
    assert record.ended_by == "duration"
    assert verdict.num_turns == 200
    turns = [sample for sample in record.samples if sample.phase == "turn"]
    assert [sample.session for sample in turns[:4]] == [0, 1, 0, 1]
    assert [round(sample.at_s) for sample in turns] == list(range(200))
    assert all(sample.ttft_s == pytest.approx(0.01) and sample.itl_s == pytest.approx(0.01) for sample in turns)
    assert all(target.is_closed.values())


def test_sessions_fill_up_in_parts_so_that_bytes_of_a_token_can_be_derived() -> None:
    record = run(FakeTarget(), plan_of(prompt_tokens=500, max_tokens=2))
    assert [sample.num_sent_tokens for sample in record.samples[:4]] == [1, 34, 500, 502]
    assert judge_soak(record).layers == (KvLayers(68, 1000),)
    assert judge_soak(record).verdict == "bounded"


def test_without_spacing_turns_follow_each_other() -> None:
    record = run(FakeTarget(), plan_of(turn_spacing_s=0, duration_s=8.0))
    assert judge_soak(record).num_turns == 100


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    texts = []
    for name in ("a", "b"):
        record = run(FakeTarget())
        write_record(tmp_path / name, record, judge_soak(record))
        texts.append((tmp_path / name).read_bytes())
    assert texts[0] == texts[1]
    assert list(json.loads(texts[0])) == ["version", "verdict", "record"]
    assert recorded(tmp_path / "a") == run(FakeTarget())


def recorded(path: Path) -> SoakRecord:
    return msgspec.convert(json.loads(path.read_text())["record"], SoakRecord)


def leaking(reading: SessionInfo, generation: int) -> SessionInfo:
    assert reading.kv_live_bytes is not None
    return msgspec.structs.replace(reading, kv_live_bytes=reading.kv_live_bytes + (generation == 150))


def counting(reading: SessionInfo, generation: int) -> SessionInfo:
    return msgspec.structs.replace(reading, inv1_violations=int(generation > 190))


def silent(reading: SessionInfo, generation: int) -> SessionInfo:
    return msgspec.structs.replace(reading, kv_live_bytes=0, kv_allocated_bytes=None, kv_bound_bytes=None)


def mute(reading: SessionInfo, generation: int) -> SessionInfo:
    return msgspec.structs.replace(reading, **dict.fromkeys(REPORTED[1:], None))


@pytest.mark.parametrize(
    ("options", "verdict"),
    [
        ({"reading": leaking}, "violated"),
        ({"reading": counting}, "violated"),
        ({"itl_s": lambda generation: 0.01 * (1 + generation / 400)}, "violated"),
        ({"reading": silent}, "inconclusive"),
        ({"reading": mute}, "inconclusive"),
        ({"fails_at": 150}, "inconclusive"),
        ({"fails_at": 150, "error": ZeroDivisionError("a bug")}, "inconclusive"),
    ],
)
def test_servers_that_are_not_bounded(options: dict[str, Any], verdict: str) -> None:
    assert judge_soak(run(FakeTarget(**options))).verdict == verdict


def test_an_error_keeps_what_was_measured() -> None:
    target = FakeTarget(fails_at=150)
    record = run(target)
    assert (record.ended_by, record.why) == ("error", "the server has gone")
    assert judge_soak(record).num_turns == 149
    assert all(target.is_closed.values())


def test_a_server_that_cannot_make_sessions_is_an_error() -> None:
    class Full(FakeTarget):
        async def create(self, settings: SessionSettings) -> str:
            raise KvartsError("no room")

    with pytest.raises(KvartsError, match="no room"):
        run(Full())


def test_a_turn_that_hangs_ends_the_run() -> None:
    class Hangs(FakeTarget):
        async def append(self, session_id: str, tokens: Any, *, expected_length: int) -> int:
            if self.num_generations == 100:
                await asyncio.sleep(3600)
            return await super().append(session_id, tokens, expected_length=expected_length)

    record = run(Hangs(), plan_of(turn_timeout_s=0.1))
    assert (record.ended_by, record.why) == ("error", "a turn took longer than 0.1 s")


@pytest.mark.parametrize(("stop_after", "verdict"), [(120, "bounded"), (3, "inconclusive")])
def test_a_run_that_is_stopped_is_judged(stop_after: int, verdict: str) -> None:
    target = FakeTarget()
    written: list[SoakRecord] = []
    record = run(target, stop_after=stop_after, checkpoint=written.append)
    assert record.ended_by == "stopped"
    assert written[-1] == record
    assert stop_after - 1 <= judge_soak(record).num_turns <= stop_after + 1
    assert judge_soak(record).verdict == verdict
    assert all(target.is_closed.values())


def test_checkpoints_are_whole_at_every_moment(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    lengths = []

    def write(record: SoakRecord) -> None:
        write_record(path, record, judge_soak(record))
        found = recorded(path)
        assert found == record
        lengths.append(len(found.samples))

    class Watched(FakeTarget):
        async def sleep_s(self, duration_s: float) -> None:
            await super().sleep_s(duration_s)
            if lengths:
                assert len(recorded(path).samples) == lengths[-1]
                assert [file.name for file in tmp_path.iterdir()] == ["out.json"]

    record = run(Watched(), checkpoint=write, checkpoint_turns=10)
    assert len(lengths) == 20 + 1
    assert lengths == sorted(lengths)
    assert recorded(path) == record
    assert recorded(path).ended_by == "duration"


def test_checkpoints_of_a_long_run_are_rarer() -> None:
    written: list[int] = []
    run(FakeTarget(), plan_of(duration_s=3000.0), checkpoint=lambda record: written.append(len(record.samples)))
    assert len(written) < 90


# Files and values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{"num_sessions": 0}, {"duration_s": 0.0}, {"turn_spacing_s": -1.0}, {"sink": -1}, {"layers": (KvLayers(0, 1),)}],
)
def test_plans_that_cannot_be(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        plan_of(**changes)


def test_a_run_of_negative_length_cannot_be() -> None:
    with pytest.raises(ConfigError, match="duration_s"):
        SoakRecord(plan=plan_of(), samples=[], duration_s=-1.0)


def test_memory_of_a_process() -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("needs Linux")
    found = rss_of(os.getpid())
    assert found is not None
    assert 10**6 < found < 10**11
    assert rss_of(2**30) is None


# The command -------------------------------------------------------------------------------------------------


class FakeClient:
    """A FakeTarget as kvarts.doors.client offers it, by sessions."""

    def __init__(self, target: FakeTarget) -> None:
        self._sessions = target

    async def create(self, **settings: Any) -> FakeClientSession:
        return self.get(await self._sessions.create(SessionSettings(**settings)))

    def get(self, session_id: str) -> FakeClientSession:
        return FakeClientSession(self._sessions, session_id)


class FakeClientSession:
    def __init__(self, sessions: FakeTarget, session_id: str) -> None:
        self.id = session_id
        self._sessions = sessions

    async def append(self, tokens: Any, *, expected_length: int) -> int:
        return await self._sessions.append(self.id, tokens, expected_length=expected_length)

    def generate(self, max_tokens: int, *, ignore_eos: bool) -> Any:
        return self._sessions.generate(self.id, SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos))

    async def info(self) -> SessionInfo:
        return await self._sessions.info(self.id)

    async def close(self) -> int:
        return await self._sessions.close(self.id)


@pytest.fixture
def on_a_fake(monkeypatch: pytest.MonkeyPatch) -> FakeTarget:
    """`kvarts soak` and `--virtual` find this instead of a server."""
    target = FakeTarget()

    @asynccontextmanager
    async def open_client(address: str) -> Any:
        assert address == "127.0.0.1:50051"
        yield FakeClient(target)

    @asynccontextmanager
    async def open_virtual_target(*, sink: int, window: int) -> Any:
        yield target, SoakClock(target.now_s, target.sleep_s)

    client = types.ModuleType("kvarts.doors.client")
    client.AsyncSessions = open_client  # type: ignore[attr-defined]
    opening = types.ModuleType("kvarts.run.sessions.opening")
    opening.open_virtual_target = open_virtual_target  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvarts.doors.client", client)
    monkeypatch.setitem(sys.modules, "kvarts.run.sessions.opening", opening)

    monkeypatch.setattr(command, "CLOCK", (target.now_s, target.sleep_s))
    return target


def soak(*more: object) -> list[object]:
    return ["soak", "--duration", "200s", "--set", "turn_spacing=1s", "--sessions", 2, "--set", "prompt_tokens=16",
            "--set", "max_tokens=8", *more]  # fmt: skip


@pytest.mark.parametrize("where", [("--virtual",), ("--host", "127.0.0.1", "--port", "50051")])
def test_the_command(on_a_fake: FakeTarget, kvarts: Any, tmp_path: Path, where: tuple[str, ...]) -> None:
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    code, printed, said = kvarts(*soak(*where, "--json", out, "--page", page))
    assert code == 0, printed
    assert printed.startswith("bounded, 200 turns\n  end                 ok")
    assert ("soak of 2 sessions on" in said) == (where[0] == "--host")
    assert json.loads(out.read_text())["verdict"]["verdict"] == "bounded"
    assert page.read_bytes().startswith(b"<!doctype html>")


@pytest.mark.slow
def test_the_mock_on_a_virtual_clock_is_bounded(kvarts: Any, tmp_path: Path) -> None:
    """Nothing is a fake: the runtime, the engine and the pages of the mock, for an hour; and the same bytes again."""
    outs = [tmp_path / "first.json", tmp_path / "second.json"]
    for out in outs:
        code, printed, _ = kvarts("soak", "--virtual", "--duration", "1h", "--json", out)
        assert code == 0, printed
        assert "to the byte; 7,798,784 when full" in printed
    assert outs[0].read_bytes() == outs[1].read_bytes()


def test_the_command_says_what_is_violated(on_a_fake: FakeTarget, kvarts: Any, tmp_path: Path) -> None:
    code, printed, _ = kvarts(*soak("--virtual", "--set", "bytes_per_token=999"))
    assert code == 5
    assert "kv_live_bytes       violated      turn 0, session 0: 1,000 bytes at 1 tokens, and not 999" in printed
    assert kvarts(*soak("--virtual", "--duration", "3"))[0] == 6


def test_sigterm_ends_the_command_with_a_verdict(on_a_fake: FakeTarget, kvarts: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    generate = on_a_fake.generate

    def killing(session_id: str, params: SamplingParams) -> Any:
        if on_a_fake.num_generations == 120:
            os.kill(os.getpid(), signal.SIGTERM)
        return generate(session_id, params)

    on_a_fake.generate = killing  # type: ignore[method-assign]
    code, printed, _ = kvarts(*soak("--virtual", "--json", out))
    assert code == 0
    assert "the run was stopped after" in printed
    assert recorded(out).ended_by == "stopped"


def test_what_the_command_refuses(kvarts: Any, tmp_path: Path) -> None:
    for arguments, code in (
        (["soak", "--virtual", "--host", "x"], 2),
        (["soak", "--virtual", "--json", tmp_path / "no" / "out.json"], 7),
        (["soak", "--virtual", "--duration", "soon"], 2),
        (["soak", "--virtual", "--set", "bytes_per_token=4096 bytes"], 2),
        (["soak", "--virtual", "--sessions", 0], 2),
    ):
        found, printed, said = kvarts(*arguments)
        assert (found, printed) == (code, ""), said
        assert said


def test_the_page_in_a_browser(tmp_path: Path, browser: Callable[[bool], Any]) -> None:
    record = record_of(100)
    page = tmp_path / "soak.html"
    page.write_bytes(render_soak_page(record, judge_soak(record)))
    driver = browser(False)
    ready(driver, page)
    assert driver.get_log("browser") == []
    text = driver.find_element("tag name", "body").text
    for said in (
        "fake: bounded",
        "2 sessions of 4 + 64 tokens, 100 turns",
        "both counters are zero",
        "KV memory",
        "MiB",
    ):
        assert said in text
    assert driver.title == "Soak of fake: bounded · kvarts"
    values = [cell.text for cell in driver.find_elements("css selector", ".u-value")]
    assert values and all(values) and "--" not in values, values
    assert len(driver.find_elements("css selector", ".uplot canvas")) == 3
    assert inks(driver, ".uplot canvas") >= 3
    assert driver.execute_script("return document.documentElement.scrollWidth <= innerWidth")


def test_the_page_of_a_run_without_samples() -> None:
    record = record_of(0)
    assert b"there are no samples" in render_soak_page(record, judge_soak(record))

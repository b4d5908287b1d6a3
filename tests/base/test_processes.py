"""Processes that do tasks give the results and the errors of one process, and end with the one that started them."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarts import replay
from kvarts.base.errors import ConfigError, InputError, KvartsError, OutputError
from kvarts.base.processes import Inquiry, Processes, likely, num_cores
from kvarts.base.settings import SettingError
from kvarts.core.sched.plan import Batch, Chunk
from kvarts.core.tiers.config import OffloadConfig
from kvarts.cost.polynomial import LinearCost
from kvarts.sim.config import ReplayConfig
from kvarts.sim.report.report import Report
from kvarts.sim.traffic.formats import load_trace
from kvarts.sim.traffic.trace import Trace
from kvarts.sim.traffic.trace_request import TraceRequest

from builders.plan_traces import small_traces
from builders.tasks import ends, fails_at, of_evens, of_table, process_of, with_shared

SAMPLE = Path(str(files("kvarts") / "data" / "mooncake-conversation-1000.jsonl"))


def guess(_: int, __: object) -> list[tuple[float, bool]]:
    return [(0.5, True), (0.5, False)]


@pytest.fixture(scope="module")
def three() -> Iterator[Processes]:
    with Processes(3, "shared") as processes:
        yield processes


def test_results_are_those_of_one_process_and_all_get_the_shared_value(three: Processes) -> None:
    tasks = list(range(20))
    assert three.all(with_shared, tasks) == Processes(1, "shared").all(with_shared, tasks)
    assert dict(three.results(with_shared, {"a": 1, "b": 2})) == {"a": ("shared", 1), "b": ("shared", 2)}
    assert three.all(with_shared, []) == []


def test_one_worker_is_this_process_and_short_work_stays_here() -> None:
    here = {os.getpid()}
    with Processes() as default, Processes(1) as one, Processes(None) as short:
        assert {*default.all(process_of, [0] * 9), *one.all(process_of, [0] * 9)} == here
        assert set(short.all(process_of, [0] * 9)) == here


def test_long_work_goes_out_unless_there_is_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvarts.base.processes.PAYS_S", 0.0)
    with Processes(None) as processes:
        found = processes.all(process_of, [0] * 9)
    assert (os.getpid() in found[2:]) == (num_cores() == 1)


# Errors ---------------------------------------------------------------------------------------------------------------

ERRORS = [
    InputError("is odd", path="a.jsonl", line=3, field="x", hint="Do not."),
    SettingError("goes not with {other}", "field", "other", hint="Leave out {field}."),
    OutputError("is full", path=Path("here")),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_is_the_same_in_another_process(three: Processes, error: KvartsError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), vars(again), str(again), again.args) == (type(error), vars(error), str(error), error.args)
    with pytest.raises(type(error)) as raised:
        three.all(fails_at, [(0, None), (1, error), (2, None)])
    assert vars(raised.value) == vars(error)


@given(st.sets(st.integers(0, 7), min_size=1))
def test_of_several_errors_the_first_is_raised(three: Processes, places: set[int]) -> None:
    tasks = [(place, ConfigError(f"{place}") if place in places else None) for place in range(8)]
    with pytest.raises(ConfigError, match=f"^{min(places)}$"):
        three.all(fails_at, tasks)


def test_a_process_that_ends_is_an_error() -> None:
    with Processes(2) as processes, pytest.raises(OutputError, match="has ended before"):
        processes.all(ends, [0, 1, 0])


def test_what_cannot_be_handed_over_is_an_error() -> None:
    with Processes(2, lambda: None) as processes, pytest.raises(ConfigError, match="workers: other processes cannot"):
        processes.all(with_shared, [1, 2])


@pytest.mark.parametrize("is_list", [False, True])
def test_a_trace_is_the_same_in_another_process(is_list: bool) -> None:
    trace = load_trace("sample:mooncake")
    if is_list:
        trace = Trace(list(trace), unit_tokens=512, name="rows", warnings=["one"], left_out={"two": 2})
    again = pickle.loads(pickle.dumps(trace))
    assert type(again.requests) is type(trace.requests)
    assert list(again) == list(trace)
    for name in ("unit_tokens", "has_sessions", "knows_prefixes", "name", "num_skipped_lines", "left_out", "warnings"):
        assert getattr(again, name) == getattr(trace, name)


def test_a_trace_in_another_process_names_its_models() -> None:
    trace = Trace(())
    trace.names_models = True
    assert pickle.loads(pickle.dumps(trace)).names_models


def test_the_work_of_a_step_is_the_same_in_another_process() -> None:
    batch = Batch((Chunk(0, 5, 9, 9), Chunk(5, 4, 9, 9, 3)), 2, 70, 1000)
    assert pickle.loads(pickle.dumps(batch)) == batch


# Searches -------------------------------------------------------------------------------------------------------------


def bisected(asked: Inquiry[int], low: int, high: int) -> int:
    while high - low > 1:
        middle = (low + high) // 2
        if asked(middle):
            high = middle
        else:
            low = middle
    return high


@st.composite
def searches(draw: st.DrawFn) -> tuple[tuple[bool, ...], Callable[[Inquiry[int]], Any]]:
    """Draw the results of cases, and a search made of several that depend on each other and on what was asked."""
    table = tuple(draw(st.lists(st.booleans(), min_size=4, max_size=40)))
    places = st.integers(0, len(table) - 1)
    parts = draw(st.lists(st.tuples(st.sampled_from(["all", "bisect", "known"]), places, places), max_size=4))

    def search(asked: Inquiry[int]) -> Any:
        found: list[Any] = []
        for kind, low, high in parts:
            if kind == "all":
                found += asked.all([low, high, (low + high) // 2])
            elif kind == "bisect":
                found.append(bisected(asked, min(low, high) - 1, (found[-1] if found else high) % len(table)))
            else:
                found.append(sum(place in asked for place in range(len(table))))
        return found

    return table, search


@given(searches())
def test_a_search_finds_and_asks_for_the_same_with_any_number_of_processes(
    three: Processes, drawn: tuple[tuple[bool, ...], Callable[[Inquiry[int]], Any]]
) -> None:
    table, search = drawn

    def run_on(processes: Processes) -> tuple[Any, list[tuple[int, bool]], int]:
        told: list[None] = []
        found = {0: table[0]}
        result = processes.searched(
            search, of_table, lambda place: (table, place), guess, found=found, on_ask=lambda: told.append(None)
        )
        assert len(told) == len(found) - 1
        return result, list(found.items()), len(told)

    assert run_on(three) == run_on(Processes(1, "shared"))


@given(searches())
def test_the_next_case_is_always_among_the_likely_ones(
    drawn: tuple[tuple[bool, ...], Callable[[Inquiry[int]], Any]],
) -> None:
    table, search = drawn
    known: dict[int, bool] = {}

    def look(cases: Any) -> list[bool]:
        assert set(cases) - known.keys() <= set(likely(search, known, guess, 1))
        known.update((case, table[case]) for case in cases)
        return [known[case] for case in cases]

    search(Inquiry(look))
    assert likely(search, known, guess, 9) == []


def test_likely_cases_of_a_bisection_are_its_next_ones() -> None:
    def search(asked: Inquiry[int]) -> int:
        return bisected(asked, 0, 16)

    assert likely(search, {}, guess, 3) == [8, 4, 12]
    assert likely(search, {8: True}, guess, 3) == [4, 2, 6]


def test_a_likelier_result_is_looked_at_first() -> None:
    def search(asked: Inquiry[int]) -> int:
        return bisected(asked, 0, 16)

    def surely(place: int, _: object) -> list[tuple[float, bool]]:
        return [(0.9, True), (0.1, False)]

    assert likely(search, {}, surely, 3) == [8, 4, 2]


def test_errors_of_cases_that_are_never_asked_for_have_no_effect(three: Processes) -> None:
    def search(asked: Inquiry[int]) -> list[bool]:
        return [(asked(8) and asked(4)) or asked(5)]

    assert three.searched(search, of_evens, lambda place: place, guess, found={}) == [True]

    def search_all(asked: Inquiry[int]) -> list[bool]:
        return asked.all([2, 3, 5])

    with pytest.raises(InputError, match="3 is odd"):
        three.searched(search_all, of_evens, lambda place: place, guess, found={})


# The end --------------------------------------------------------------------------------------------------------------

SCRIPT = """
import signal, sys, time
from kvarts.base.processes import Processes

def sleep(begun, number):
    with open(begun, "a") as file:
        file.write("x")
    time.sleep(60)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what is in the background ignore it
    with Processes(2, sys.argv[1]) as processes:
        processes.all(sleep, [1, 2, 3])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_process_that_is_interrupted_or_killed_leaves_none(tmp_path: Path, number: int) -> None:
    script, begun = tmp_path / "script.py", tmp_path / "begun"
    script.write_text(SCRIPT)
    begun.touch()
    with subprocess.Popen(
        [sys.executable, script, begun], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        until = time.monotonic() + 60
        while begun.stat().st_size < 2 and time.monotonic() < until:
            time.sleep(0.02)
        if number == signal.SIGINT:  # a terminal sends it to all
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        told = process.communicate(timeout=30)[1]
        assert process.returncode == -number
        assert told.count("Traceback") == (number == signal.SIGINT)
    until = time.monotonic() + 20
    while is_group(process.pid) and time.monotonic() < until:
        time.sleep(0.02)
    assert not is_group(process.pid)


def is_group(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_function_in_a_script_without_a_main_block_starts_no_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import kvarts\nprint(kvarts.plan({str(SAMPLE)!r}).advice)\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=100)
    assert len(done.stdout.splitlines()) == 1


# Plans ----------------------------------------------------------------------------------------------------------------

COST = "linear:step_ms=5,chunk_token_ms=0.05,decode_ms=0.2"
DATA = Path(str(files("kvarts") / "data"))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            ("--slo-ttft-ms", "900", "--slo-share", "0.9"),
            marks=pytest.mark.slow,
        ),
        ("policies", "--at", "300"),
        ("routers", "--replicas", "2", "--routers", "prefix,round-robin"),
    ],
    ids=["slo", "league", "routers"],
)
def test_workers_do_not_change_a_byte_of_a_plan(
    options: tuple[str, ...],
    run_command: Callable[..., int],
    capsysbinary: pytest.CaptureFixture[bytes],
    tmp_path: Path,
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(SAMPLE.read_text().splitlines(keepends=True)[:40]))
    printed = []
    for workers in (1, 3):
        command = ("plan", *options, trace, "--cost", COST, "--pages", 6000, "--set", f"workers={workers}", "--json")
        assert run_command(*command) == 0
        printed.append(capsysbinary.readouterr().out)
    assert printed[0] == printed[1]


@pytest.mark.long
def test_workers_do_not_change_how_many_users_fit(
    run_command: Callable[..., int], capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    printed = []
    for workers in (1, 2):
        setting = ("--cost", COST, "--pages", 40_000, "--slo-ttft-ms", 4000, "--set", f"workers={workers}")
        assert run_command("plan", "users", DATA / "coding-agents", "--users", "1..12", *setting, "--json") == 0
        printed.append(capsysbinary.readouterr().out)
    assert printed[0] == printed[1]


# Replicas -------------------------------------------------------------------------------------------------------------


@settings(max_examples=6)
@given(small_traces(), st.integers(2, 5), st.integers(2, 4), st.booleans())
def test_replicas_in_several_processes_are_replayed_to_the_same_bytes(
    trace: Trace, replicas: int, workers: int, has_timeout: bool
) -> None:
    config = ReplayConfig(
        num_pages=9,
        page_size=4,
        replicas=replicas,
        max_num_seqs=3,
        client_timeout_s=0.05 if has_timeout else None,
        cost=LinearCost(step_ms=3.0, chunk_token_ms=2.0, decode_ms=1.0),
    )
    ended: list[int] = []
    one, several = replay(trace, config), replay(trace, config, workers=workers, on_progress=ended.append)
    assert_same(one, several)
    assert sum(ended) == len(one.request_columns["row"])


@pytest.mark.parametrize(
    "options",
    [
        {"num_pages": 300, "max_num_seqs": 40},
        pytest.param({"num_pages": 4000, "profile": "mocker"}, marks=pytest.mark.slow),
        {"num_pages": 200, "offload": {"host_pages": 300}},
        pytest.param({"num_pages": 90, "client_timeout_s": 9.0}, marks=pytest.mark.slow),
    ],
    ids=["preempted", "mocker", "host memory", "rejected and given up"],
)
def test_replicas_of_a_real_trace_are_replayed_to_the_same_bytes(options: dict[str, Any]) -> None:
    if "offload" in options:
        options = {**options, "offload": OffloadConfig(**options["offload"])}
    rows = list(load_trace("sample:mooncake"))[:300]
    trace = Trace(rows, unit_tokens=512)
    config = ReplayConfig(page_size=512, replicas=4, speedup=4.0, **options)
    assert_same(replay(trace, config), replay(trace, config, workers=2))


def test_layers_that_keep_less_are_replayed_to_the_same_bytes_in_several_processes(
    run_command: Callable[..., int], capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(SAMPLE.read_text().splitlines(keepends=True)[:60]))
    printed = []
    for workers in (1, 2):
        on = ("--model", "gpt-oss-20b", "--device", "h100-80gb", "--kv-memory", "2GiB", "--replicas", 3)
        requests = tmp_path / f"{workers}.jsonl"
        assert run_command("replay", trace, *on, "--set", f"workers={workers}", "--json", "--requests", requests) == 0
        printed.append((capsysbinary.readouterr().out, requests.read_bytes()))
    assert printed[0] == printed[1]


def test_replicas_that_affect_each_other_are_replayed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a process is started")

    monkeypatch.setattr(Processes, "_open", refuse)
    trace = load_trace("sample:mooncake")
    informed: list[dict[str, Any]] = [{"router": "least-loaded"}]
    for settings_of in (*informed, {"concurrency": 9}, {"retries": 1, "client_timeout_s": 9.0}):
        replay(trace, ReplayConfig(num_pages=4000, page_size=512, replicas=2, **settings_of), workers=2)
    with pytest.raises(AssertionError, match="a process is started"):
        replay(trace, ReplayConfig(num_pages=4000, page_size=512, replicas=2), workers=2)


def test_a_list_out_of_order_is_refused_with_any_number_of_processes() -> None:
    rows = [
        TraceRequest(index, at_ms * 1_000_000, (range(index, index + 16),), 16, 4)
        for index, at_ms in enumerate((0, 100, 50))
    ]
    for workers in (1, 2):
        with pytest.raises(InputError, match="arrives before the row before it"):
            replay(Trace(rows), ReplayConfig(replicas=2), workers=workers)


@pytest.mark.slow
def test_processes_can_be_used_again_after_they_were_closed() -> None:
    processes = Processes(2, "shared")
    for _ in range(2):
        assert processes.all(joined, ["a", "b"]) == ["shareda", "sharedb"]
        processes.close()


def test_what_cannot_be_handed_over_is_done_here_unless_processes_were_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvarts.base.processes.PAYS_S", 0.0)
    monkeypatch.setattr("kvarts.base.processes.num_cores", lambda: 2)
    assert Processes(None, "shared").all(called, [lambda shared: shared + "!"] * 3) == ["shared!"] * 3
    assert Processes(None, lambda: "kept").all(called, [call_shared] * 3) == ["kept"] * 3
    with pytest.raises(ConfigError, match="other processes cannot get"):
        Processes(2, "shared").all(called, [lambda shared: shared + "!"] * 3)


def joined(shared: str, own: str) -> str:
    return shared + own


def called(shared: Any, own: Callable[[Any], Any]) -> Any:
    return own(shared)


def call_shared(shared: Callable[[], str]) -> str:
    return shared()


def assert_same(one: Report, other: Report) -> None:
    assert one.to_json() == other.to_json()
    for name, column in one.request_columns.items():
        assert (column == other.request_columns[name]).all()
    for name, column in one.steps.items():
        assert np.array_equal(column, other.steps[name], equal_nan=True)
    assert (one.request_ids, list(one.requests["reason"])) == (other.request_ids, list(other.requests["reason"]))
    assert [log.preemptions for log in one.step_logs] == [log.preemptions for log in other.step_logs]

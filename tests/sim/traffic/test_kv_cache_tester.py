"""Files of kv-cache-tester: read as a naive reader does, in sum as the files say, and never with a traceback."""

from __future__ import annotations

import gzip
import json
import os
from copy import deepcopy
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.base.errors import ConfigError, InputError, MissingFileError
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.traffic.formats import load_trace
from kvarts.sim.traffic.kv_cache_tester import load_kv_cache_tester
from kvarts.sim.traffic.source import OpenLoop
from kvarts.sim.traffic.trace import TraceRequest
from kvarts.sim.traffic.trace_request import After

from oracles.naive_kv_cache_tester import naive_read, naive_sessions

SAMPLE = Path(str(files("kvarts") / "data" / "coding-agents"))

GOOD: dict[str, Any] = {
    "id": "one",
    "models": ["m"],
    "block_size": 64,
    "hash_id_scope": "local",
    "requests": [
        {"t": 0.0, "type": "s", "in": 130, "out": 5, "hash_ids": [1, 2], "api_time": 2.0, "think_time": 0.0},
        {"t": 5.0, "type": "n", "in": 200, "out": 1, "hash_ids": [1, 2, 3], "think_time": 3.0},
        {"t": 20.0, "type": "n", "in": 128, "out": 7, "hash_ids": [1, 4], "api_time": 1.5, "think_time": 18.0},
        {
            "t": 30.0,
            "type": "subagent",
            "agent_id": "a",
            "duration_ms": 4500,
            "requests": [
                {"t": 0.0, "type": "n", "in": 64, "out": 2, "hash_ids": [9], "api_time": 1.0},
                {"t": 3.0, "type": "n", "in": 65, "out": 2, "hash_ids": [9], "api_time": 1.0},
            ],
        },
        {"t": 40.0, "type": "n", "in": 63, "out": 1, "hash_ids": []},
    ],
}


def write(path: Path, value: Any) -> Path:
    path.write_bytes(json.dumps(value).encode())
    return path


def changed(where: str, value: Any) -> dict[str, Any]:
    """GOOD with one value changed, or taken out if it is None."""
    out: Any = deepcopy(GOOD)
    *path, last = [int(part) if part.isdigit() else part for part in where.split(".")]
    at = out
    for part in path:
        at = at[part]
    if value is None:
        at.pop(last, None) if isinstance(at, dict) else at.pop(last)
    else:
        at[last] = value
    whole: dict[str, Any] = out
    return whole


def by_session(path: Path) -> dict[str, list[TraceRequest]]:
    sessions: dict[str, list[TraceRequest]] = {}
    for request in load_kv_cache_tester(path):
        assert request.session_id is not None and request.tenant is None and request.priority == 0
        sessions.setdefault(request.session_id, []).append(request)
    return sessions


def _waits_s(turn: TraceRequest, sessions_of_rows: dict[int, tuple[str, int]]) -> dict[tuple[str, int, bool], float]:
    """What a request waits for besides the turn before it, in seconds: which turn of which session, and from where."""
    return {(*sessions_of_rows[each.row], each.of_arrival): each.delay_ns / 1e9 for each in turn.after}


def assert_read_as_naively(path: Path, paths: list[Path]) -> None:
    """Compare sessions, turns, waits and tokens, and which blocks are equal: ids themselves are the reader's affair."""
    naive = {name: turns for file in paths for name, turns in naive_sessions(naive_read(file)).items()}
    block_size = naive_read(paths[0])["block_size"]
    read = by_session(path)
    sessions_of_rows = {turn.row: (name, place) for name, turns in read.items() for place, turn in enumerate(turns)}
    assert read.keys() == {name for name, turns in naive.items() if turns}
    unit_of: dict[tuple[str, int], int] = {}
    rests = []
    for name, turns in read.items():
        for turn, expected in zip(turns, naive[name], strict=True):
            assert turn.num_prompt_tokens == expected.input_tokens
            assert turn.num_output_tokens == (expected.output_tokens or 1)
            assert turn.arrival_ns / 1e9 == pytest.approx(expected.begin_s)
            assert _waits_s(turn, sessions_of_rows) == pytest.approx(expected.waits_s)
            assert turn.after or (turn.delay_ns is None) == (expected.wait_s is None)
            if expected.wait_s is not None and not turn.after:
                assert turn.delay_ns is not None and turn.delay_ns / 1e9 == pytest.approx(expected.wait_s)
            assert isinstance(turn.units, bytes)
            units = np.frombuffer(turn.units, np.uint64).tolist()
            if expected.input_tokens % block_size:
                rests.append(units.pop())
            assert len(units) == len(expected.blocks)
            for unit, block in zip(units, expected.blocks, strict=True):
                assert unit_of.setdefault(block, unit) == unit
    every_unit = [*unit_of.values(), *rests]
    assert len(set(every_unit)) == len(every_unit)


def test_a_file_is_read_as_the_naive_reader_does(tmp_path: Path) -> None:
    path = write(tmp_path / "one.json", GOOD)
    assert_read_as_naively(path, [path])


def test_the_bundled_sessions_are_read_as_the_naive_reader_does() -> None:
    assert_read_as_naively(SAMPLE, sorted(SAMPLE.glob("*.json.gz")))


def assert_adds_up(paths: list[Path]) -> None:
    for path in paths:
        file = naive_read(path)
        turns = [turn for session in by_session(path).values() for turn in session]
        broken_off = [each for all_of in naive_sessions(file).values() for each in all_of if not each.output_tokens]
        totals = file["totals"]["combined_tokens"]
        num_left_out = sum(turn.input_tokens for turn in broken_off)
        assert sum(turn.num_prompt_tokens for turn in turns) == totals["input"] - num_left_out
        assert sum(turn.num_output_tokens for turn in turns) == totals["output"]


def test_the_bundled_sessions_add_up_to_their_own_totals() -> None:
    assert_adds_up(sorted(SAMPLE.glob("*.json.gz")))


@pytest.mark.slow
def test_all_published_sessions_at_hand_add_up_and_are_read_as_the_naive_reader_does() -> None:
    default = Path(__file__).resolve().parents[4] / "shared" / "data"
    directory = Path(os.environ.get("KVARTS_DATA", default)) / "kv-cache-tester"
    paths = sorted(directory.glob("trace_*.json"))
    if not paths:
        pytest.skip(f"needs {directory}; set KVARTS_DATA to a folder with kv-cache-tester/")
    assert_adds_up(paths)
    with_agents = [path for path in paths if b'"subagent"' in path.read_bytes()]
    for path in [*paths[:3], *with_agents[:2]]:
        assert_read_as_naively(path, [path])


def test_turns_wait_for_each_other_and_for_their_client(tmp_path: Path) -> None:
    sessions = by_session(write(tmp_path / "one.json", GOOD))
    assert list(sessions) == ["one", "one/a"]
    waits = [turn.delay_ns for turn in sessions["one"]]
    # The second turn has no recorded end, so the third waits for as long as it came after the second. The sub-agent
    # begins 4 s after the end of the third, and ends at 29.5 s: the last turn waits for both, and for 10.5 s more.
    assert waits == [None, 3_000_000_000, 15_000_000_000, 0]
    assert [turn.arrival_ns for turn in sessions["one/a"]] == [25_500_000_000, 28_500_000_000]
    third, (agent, last_of_agent) = sessions["one"][2], sessions["one/a"]
    assert agent.after == (After(third.row, 4_000_000_000),)
    joined = {each.row: each.delay_ns for each in sessions["one"][3].after}
    assert joined == dict.fromkeys((third.row, last_of_agent.row), 10_500_000_000)


def test_a_session_replays_in_order(tmp_path: Path) -> None:
    source = OpenLoop(load_kv_cache_tester(write(tmp_path / "one.json", GOOD)))
    first = source.pop()
    assert (first.session_id, first.num_prompt_tokens, source.next_ns()) == ("one", 130, None)
    source.done(first, 1_000)
    assert source.next_ns() == 3_000_001_000


def test_whole_blocks_are_hit_and_what_follows_them_is_not(tmp_path: Path) -> None:
    report = replay(load_trace(write(tmp_path / "one.json", GOOD)), ReplayConfig(num_pages=1000, audit=True))
    # Of the second turn's 200 tokens two blocks are known, and the third's block 4 is new.
    assert report.requests["cached_tokens"].tolist() == [0, 128, 64, 0, 64, 0]  # type: ignore[union-attr]


@pytest.mark.parametrize(("scope", "is_shared"), [("local", False), ("global", True)])
def test_ids_of_two_files_are_the_same_only_if_their_scope_says_so(tmp_path: Path, scope: str, is_shared: bool) -> None:
    paths = [write(tmp_path / f"{name}.json", {**GOOD, "id": name, "hash_id_scope": scope}) for name in ("a", "b")]
    assert_read_as_naively(tmp_path, paths)
    trace = load_kv_cache_tester(tmp_path)
    first, second = [trace.content(r, page_size=16, owner=r.row) for r in trace if r.arrival_ns == 0]
    assert first.common_pages(second, 0, 99) == (8 if is_shared else 0)


def test_a_line_of_other_blanks_is_blank(tmp_path: Path) -> None:
    one, two = (json.dumps({**GOOD, "id": name}).encode() for name in ("one", "two"))
    path = tmp_path / "two.jsonl"
    path.write_bytes(one + b"\n\xc2\xa0\n\x1c\n" + two + b"\n \xc2\xa0\n")
    assert len(by_session(path)) == 2 * len(by_session(write(tmp_path / "one.json", GOOD)))


def test_packed_and_other_files_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(json.dumps({**GOOD, "id": "two"}).encode()))
    write(tmp_path / "a.json", GOOD)
    (tmp_path / "LICENSE").write_text("free")
    trace = load_trace(tmp_path)
    assert trace.has_sessions and trace.unit_tokens == 64 and trace.name == tmp_path.name
    assert {request.session_id for request in trace} == {"one", "one/a", "two", "two/a"}


def test_lines_of_mooncake_in_a_json_are_read_as_before(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text('{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [7, 8]}\n' * 2)
    assert load_trace(path).unit_tokens == 512


BAD = [
    ("id", None, "id", "missing"),
    ("block_size", 0, "block_size", ">= 1"),
    ("hash_id_scope", "galactic", "hash_id_scope", "Invalid enum value"),
    ("requests", [], "requests", "no request"),
    ("requests.0.in", None, "requests[0].in", "missing"),
    ("requests.0.in", 0, "requests[0].in", ">= 1"),
    ("requests.0.in", 200, "requests[0].hash_ids", "2 ids, and 200 tokens have 3 whole blocks of 64"),
    ("requests.0.in", 127, "requests[0].hash_ids", "2 ids, and 127 tokens have 1 whole blocks"),
    ("requests.1.out", -1, "requests[1].out", ">= 0"),
    ("requests.1.out", 1 << 40, "requests[1].out", "<"),
    ("requests.1.t", 1e300, "requests[1].t", "<"),
    ("requests.1.think_time", -1.0, "requests[1].think_time", ">= 0"),
    ("requests.1.type", "x", "requests[1].type", "Invalid value 'x'"),
    ("requests.1.hash_ids", [1, 2, -3], "requests[1].hash_ids[2]", ">= 0"),
    ("requests.1.hash_ids", [1, 2, 1 << 40], "requests[1].hash_ids[2]", "<"),
    ("requests.1.hash_ids", [1, 2, "3"], "requests[1].hash_ids[2]", "got `str`"),
    ("requests.1.hash_ids", "1, 2", "requests[1].hash_ids", "got `str`"),
    ("requests.2.t", 1.0, "requests[2].t", "before the request before it"),
    ("requests.3.duration_ms", 40_000, "requests[3].duration_ms", "done 30.0 s after"),
    ("requests.3.requests.1.in", 200, "requests[3].requests[1].hash_ids", "whole blocks"),
    ("requests.3.requests.0.type", "subagent", "requests[3].requests[0].type", "Invalid value"),
]


@pytest.mark.parametrize(("where", "value", "field", "what"), BAD)
def test_a_bad_value_is_named_by_file_and_field(tmp_path: Path, where: str, value: Any, field: str, what: str) -> None:
    path = write(tmp_path / "t.json", changed(where, value))
    with pytest.raises(InputError) as caught:
        load_trace(path)
    assert (caught.value.path, caught.value.field) == (path, field)
    assert what in caught.value.what
    assert caught.value.hint is not None


def test_what_is_no_json_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text('{"id": "one",\n"block_size": 64,\n"requests": [}\n')
    with pytest.raises(InputError, match="is not JSON") as caught:
        load_trace(path)
    assert caught.value.line == 3


def test_two_files_with_one_id_and_with_two_block_sizes_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.json", GOOD)
    second = write(tmp_path / "b.json", GOOD)
    with pytest.raises(InputError, match=r"'one' is in a\.json as well") as caught:
        load_trace(tmp_path)
    assert (caught.value.path, caught.value.field) == (second, "id")
    write(second, {**GOOD, "id": "two", "block_size": 32})
    with pytest.raises(InputError, match=r"is 32, and 64 in a\.json"):
        load_trace(tmp_path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        load_trace(tmp_path / "nowhere.json")
    with pytest.raises(InputError, match=r"no file that ends in \.json"):
        load_trace(tmp_path)
    for data in (b"no gzip", gzip.compress(b"{}")[:-9], gzip.compress(b"[" * 100_000)):
        (tmp_path / "t.json.gz").write_bytes(data)
        with pytest.raises(InputError):
            load_trace(tmp_path / "t.json.gz")


@pytest.mark.parametrize(("setting", "value"), [("trace_block_size", 64), ("skip_bad_lines", True)])
def test_settings_of_other_forms_are_refused(tmp_path: Path, setting: str, value: Any) -> None:
    path = write(tmp_path / "t.json", GOOD)
    with pytest.raises(ConfigError) as caught:
        load_trace(path, **{setting: value})
    assert caught.value.field == setting


@given(
    lists_of_ids=st.lists(st.lists(st.sampled_from([1, 2, 11, 12]), max_size=4), min_size=1, max_size=6),
    spaces=st.lists(st.sampled_from(["", " ", "\n"]), min_size=3, max_size=3),
)
@pytest.mark.laws
def test_ids_are_read_however_those_of_the_turn_before_begin(
    tmp_path_factory: pytest.TempPathFactory, lists_of_ids: list[list[int]], spaces: list[str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "ids.json"
    turns = []
    for time, ids in enumerate(lists_of_ids):
        text = f"{spaces[0]},{spaces[1]}".join(map(str, ids)) + spaces[2]
        turns.append(f'{{"t": {time}, "type": "s", "in": {64 * len(ids) + 1}, "out": 1, "hash_ids": [{text}]}}')
    start = '{"id": "one", "block_size": 64, "hash_id_scope": "global", "requests": ['
    path.write_text(f"{start}{', '.join(turns)}]}}")
    assert_read_as_naively(path, [path])


@pytest.mark.parametrize(
    ("before", "text"),
    [
        ("1", "1,"), ("", ",1"), ("1", "1,,2"), ("1", "1, "), ("1", "1 2"), ("1", "1,[2]"), ("1", "1,[2"),
        ("1", "1,01"), ("1", "1,2.5"), ("1", "1,-2"), (" ", " ,1"), ("1", "1,1099511627776"), ("1", "1,2}"),
        ("1", '1,"]"'), ("1,", "1,,"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("scope", ["local", "global"])
def test_what_is_no_list_of_ids_is_refused_whatever_the_turn_before(
    tmp_path: Path, before: str, text: str, scope: str
) -> None:
    path = tmp_path / "ids.json"
    turn = '{"t": 1, "type": "s", "in": 129, "out": 1, "hash_ids": [%s]}'
    start = f'{{"id": "one", "block_size": 64, "hash_id_scope": "{scope}", "requests": ['
    path.write_text(f"{start}{turn % before}, {turn % text}]}}")
    with pytest.raises(InputError) as caught:
        load_trace(path)
    assert caught.value.path == path


@pytest.mark.parametrize(
    "change",
    [
        ('"id":', '"hash_ids": [1], "id":'),
        ('"id":', '"hash_ids": 5, "id":'),
        ('"id":', '"note": "\\"hash_ids\\":[1", "id":'),
        ('"id":', '"\\"hash_ids": [[1]], "id":'),
        ('"t":', '"hash_ids": [7, 8, 9], "t":'),
        ('"hash_ids": [', '"hash_ids" : ['),
        ('"hash_ids": [', '"hash_ids":\n ['),
        ('"hash_ids": [', '"hash_ids":['),
        ('"hash_ids": [', '"\\u0068ash_ids": ['),
    ],
)
def test_ids_are_read_wherever_else_their_name_is(tmp_path: Path, change: tuple[str, str]) -> None:
    path = tmp_path / "names.json"
    text = json.dumps(GOOD)
    assert change[0] in text
    path.write_text(text.replace(*change))
    assert_read_as_naively(path, [path])


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["t", "type", "in"]), inner, max_size=3)
    ),
    max_leaves=6,
)
PLACES = """
id block_size hash_id_scope requests requests.0 requests.0.type requests.1.t requests.1.in requests.1.out
requests.1.hash_ids requests.1.hash_ids.0 requests.1.api_time requests.2.think_time requests.3.t requests.3.duration_ms
requests.3.agent_id requests.3.requests requests.3.requests.0 requests.3.requests.1.t
"""


@given(where=st.sampled_from(PLACES.split()), value=ANYTHING)
@pytest.mark.laws
def test_a_changed_value_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, where: str, value: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "changed.json"
    write(path, changed(where, value))
    assert_read_or_refused(path)


@given(data=st.data())
@pytest.mark.laws
def test_changed_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    whole = bytearray(json.dumps(GOOD).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        length = data.draw(st.integers(0, 6))
        whole[at : at + length] = data.draw(st.binary(max_size=4))
        if not whole:
            break
    is_packed = data.draw(st.booleans())
    path = tmp_path_factory.getbasetemp() / ("bytes.json.gz" if is_packed else "bytes.json")
    path.write_bytes(gzip.compress(bytes(whole)) if is_packed else bytes(whole))
    assert_read_or_refused(path)


def assert_read_or_refused(path: Path) -> None:
    try:
        trace = load_trace(path)
    except InputError as error:
        assert error.path == path  # noqa: PT017
    else:
        assert replay(trace, ReplayConfig(num_pages=100)).summary["num_requests"] == len(list(trace))


AGENTX = Path(__file__).parent / "forms" / "agentx.jsonl"


def test_agentx_has_a_session_per_line_and_times_of_the_session(tmp_path: Path) -> None:
    """Each line is read as a file with it would be."""
    trace = load_trace(AGENTX)
    assert [request.row for request in trace if request.arrival_ns == 0] == [0, 7]
    folder = tmp_path / "plays"
    folder.mkdir()
    for number, line in enumerate(AGENTX.read_text().splitlines()):
        (folder / f"{number}.json").write_text(line)
    assert list(load_trace(folder)) == list(trace)
    assert_read_as_naively(folder / "0.json", [folder / "0.json"])
    # The first two sub-agents are joined by the second turn, after 2 s; nothing waits for the last one.
    by_row = {request.row: request for request in trace}
    assert by_row[1].after == tuple(After(row, 2_000_000_000) for row in (0, 4, 5))
    assert by_row[6].after == (After(1, 1_000_000_000),)
    assert all(each.row != 6 for request in trace for each in request.after)
    bad = tmp_path / "bad.jsonl"
    bad.write_text(AGENTX.read_text().replace('"in": 128, "out": 3', '"in": 0, "out": 3'))
    with pytest.raises(InputError) as caught:
        load_trace(bad)
    assert (caught.value.line, caught.value.field) == (2, "requests[0].in")


def test_parents_wait_for_their_agents_however_long_these_take() -> None:
    """The sums of AgentX, its hits and its joins, on a device that is a hundred times slower than the recording."""
    trace = load_trace(AGENTX)
    report = replay(trace, ReplayConfig(num_pages=1000, page_size=64, cost=lambda batch: 5_000.0))
    requests = report.request_columns
    arrivals = dict(zip(requests["row"].tolist(), requests["arrival_ns"].tolist(), strict=True))
    ends = dict(zip(requests["row"].tolist(), requests["last_token_ns"].tolist(), strict=True))
    assert arrivals[1] == max(ends[row] for row in (0, 4, 5)) + 2_000_000_000
    assert arrivals[3] == ends[0] + 500_000_000
    assert report.summary["num_input_tokens"] == 130 + 70 + 140 + 64 + 260 + 128 + 300 + 128
    # In whole blocks, all but a prompt's last token: 1-2 again twice, 1-4, and 9 again, once by a prompt of 64 tokens.
    assert report.summary["num_cached_tokens"] == 128 + 256 + 64


@pytest.mark.parametrize("inner_t", [0.0, 1.0])
def test_times_of_agents_count_from_their_beginning_if_they_must(tmp_path: Path, inner_t: float) -> None:
    value = deepcopy(GOOD)
    value["requests"][3]["requests"][0]["t"] = inner_t
    assert_read_as_naively(write(tmp_path / "t.json", value), [tmp_path / "t.json"])

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvarts.base.errors import InputError, KvartsError, MissingFileError
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.traffic.mooncake import MooncakeReader, load_mooncake
from kvarts.sim.traffic.trace import Trace

GOOD: dict[str, Any] = {"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [7, 8]}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def row(**changes: Any) -> dict[str, Any]:
    return {name: value for name, value in {**GOOD, **changes}.items() if value is not None}


def test_rows_become_requests_and_the_first_arrival_is_zero(tmp_path: Path) -> None:
    late, early = row(timestamp=12.5, input_length=512, hash_ids=[7]), row(request_id="x", priority=3)
    trace = load_mooncake(write(tmp_path / "t.jsonl", late, early))
    first, second = trace
    assert (first.row, first.arrival_ns, first.request_id, first.priority) == (1, 0, "x", 3)
    assert (second.row, second.arrival_ns, second.num_prompt_tokens) == (0, 7_500_000, 512)
    assert trace.content(first, page_size=16, owner=0).tokens(510, 514).tolist() == [7, 7, 8, 8]


def test_known_outputs_are_compared_token_by_token(tmp_path: Path) -> None:
    rows = (row(output_token_ids=[4, 5, 6]), row())
    trace = load_mooncake(write(tmp_path / "t.jsonl", *rows))
    first, second = (trace.content(request, page_size=16, owner=i) for i, request in enumerate(trace))
    assert first.tokens(598, 603).tolist() == [8, 8, 4, 5, 6]
    assert first.common_pages(second, 0, 99) == 600 // 16


def test_lines_across_read_blocks_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvarts.sim.traffic.mooncake.BLOCK_BYTES", 37)
    path = write(tmp_path / "t.jsonl", *(row(timestamp=i) for i in range(50)))
    assert [request.arrival_ns for request in MooncakeReader(path)] == [i * 1_000_000 for i in range(50)]


def test_blank_lines_and_a_missing_last_line_end_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f"\n{json.dumps(GOOD)}\n   \n{json.dumps(GOOD)}")
    assert len(list(load_mooncake(path))) == 2


BAD = [
    ("{not json", None, "malformed"),
    ("[1, 2]", None, "Expected `object`"),
    (row(input_length=-1), "input_length", "at least 1, got -1"),
    (row(input_length=0), "input_length", "at least 1, got 0"),
    (row(output_length=-1), "output_length", "at least 0, got -1"),
    (row(output_length=None), "output_length", "missing"),
    (row(input_length=None), "input_length", "missing"),
    (row(input_length="many"), "input_length", "Expected `int`"),
    (row(hash_ids=[7]), "hash_ids", "cover 512 of the 600 tokens"),
    (row(hash_ids=[7, -8]), "hash_ids", "0 to 2**64 - 1"),
    (row(hash_ids=[7, "x"]), "hash_ids[1]", "Expected `int`"),
    (row(timestamp="noon"), "timestamp", "Expected"),
    (row(timestamp=-1), "timestamp", "at least 0"),
    (row(timestamp=None), "timestamp", "missing"),
    (row(delay=-1, session_id="s"), "delay", "at least 0"),
    (row(output_token_ids=[1]), "output_token_ids", "has 1 ids, but output_length is 3"),
    (row(output_token_ids=[1, -2, 3]), "output_token_ids", "0 to 2**64 - 1"),
    ('{"input_length": 1\xff', None, ""),
]


@pytest.mark.parametrize(("bad", "field", "what"), BAD)
def test_a_bad_line_is_named_by_file_line_and_field(tmp_path: Path, bad: Any, field: str | None, what: str) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, GOOD, bad, GOOD)
    with pytest.raises(InputError) as caught:
        load_mooncake(path)
    assert (caught.value.path, caught.value.line, caught.value.field) == (path, 3, field)
    assert what in caught.value.what
    assert str(caught.value).startswith(f"{path}:3: ")
    assert caught.value.hint is not None


@pytest.mark.parametrize(("bad", "field", "what"), BAD)
def test_bad_lines_can_be_skipped_and_are_counted(tmp_path: Path, bad: Any, field: str | None, what: str) -> None:
    trace = load_mooncake(write(tmp_path / "t.jsonl", GOOD, bad, GOOD, bad), skip_bad_lines=True)
    assert len(list(trace)) == 2
    assert trace.num_skipped_lines == 2


@pytest.mark.parametrize("text", ["", "\n\n", "  \n"])
def test_a_file_without_requests_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match="has no requests"):
        load_mooncake(path)


def test_a_file_of_bad_lines_only_is_refused_even_when_skipping(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no readable line in 1"):
        load_mooncake(write(tmp_path / "t.jsonl", "nonsense"), skip_bad_lines=True)


def test_missing_files_and_folders_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        load_mooncake(tmp_path / "nowhere.jsonl")
    with pytest.raises(InputError, match="cannot be read"):
        load_mooncake(tmp_path)


def test_the_first_turn_of_a_session_needs_a_time(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", row(session_id="s", delay=5, timestamp=None))
    with pytest.raises(KvartsError, match="first turn of session 's'"):
        load_mooncake(path)


def test_a_file_read_as_a_stream_replays_like_one_read_before(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", *(row(timestamp=40 * i, hash_ids=[7, i % 3]) for i in range(30)))
    config = ReplayConfig(num_pages=100, audit=True)
    streamed = replay(Trace(MooncakeReader(path), unit_tokens=512), config)
    assert streamed.requests_jsonl() == replay(path, config).requests_jsonl()

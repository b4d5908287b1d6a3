"""Every number that any form of traces holds, far out of range: named, or within what a replay can count."""

from __future__ import annotations

import csv
import io
import json
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvarts.base.errors import InputError, KvartsError
from kvarts.base.limits import LATEST_NS, MOST_COUNT
from kvarts.sim import traffic
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.traffic.formats import FORMS, TraceForm, load_trace
from kvarts.sim.traffic.trace import Trace

HERE = Path(__file__).parent / "forms"
RECORDED = (
    '{"arrival_ns":5,"prompt":[5,6,7],"num_output_tokens":2,"output":[8,9],"max_tokens":4,"priority":1,"began_ns":2,'
    '"cancel_after_ns":9}'
)
FAR = (
    "-1",
    "2305843009213693953",
    str(1 << 62),
    str((1 << 63) - 1),
    str(1 << 63),
    str(1 << 64),
    "1e19",
    "1e308",
    "1e400",
)
"""Beyond the latest time, the sign of 64 bits, 64 bits, and floating point; NaN is no JSON."""

HALF = "\ud83d"
"""Half of the two escapes of a character, as JavaScript writes a text that it has cut."""


def varied(value: Any) -> Iterator[Any]:
    """Copies of a JSON value, each with one number replaced by one of FAR, or one value by HALF."""
    if not isinstance(value, str):
        yield HALF
    if isinstance(value, dict):
        for key, item in value.items():
            yield from ({**value, key: each} for each in varied(item))
    elif isinstance(value, list):
        for place, item in enumerate(value[:2]):
            yield from ([*value[:place], each, *value[place + 1 :]] for each in varied(item))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from (Far(text) for text in FAR)
    elif isinstance(value, str):
        yield HALF
        if value.isdecimal():  # 64 bits are text in OpenTelemetry's JSON
            yield from FAR


class Far:
    def __init__(self, text: str) -> None:
        self.text = text


def spelled(value: Any) -> str:
    """JSON with numbers as they are written in FAR."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{spelled(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(spelled, value)) + "]"
    return value.text if isinstance(value, Far) else json.dumps(value)


def damaged_lines(text: str) -> Iterator[str]:
    """The lines of a file, each of their numbers out of range in turn."""
    lines = text.splitlines()
    for place, line in enumerate(lines):
        for each in varied(json.loads(line)):
            yield "\n".join([*lines[:place], spelled(each), *lines[place + 1 :]])


def damaged_tables(text: str) -> Iterator[str]:
    """A table, each number of its first row out of range in turn."""
    header, first, *rest = csv.reader(io.StringIO(text))
    for place, cell in enumerate(first):
        if cell.replace(".", "", 1).isdigit():
            for far in FAR:
                rows = [header, [*first[:place], far, *first[place + 1 :]], *rest]
                yield "".join(",".join(row) + "\n" for row in rows)


def assert_within_bounds(trace: Trace) -> None:
    rows = list(trace)
    first_ns = min(row.arrival_ns for row in rows)
    for row in rows:
        assert row.arrival_ns - first_ns <= LATEST_NS
        assert 1 <= row.num_prompt_tokens <= MOST_COUNT
        assert 1 <= row.num_output_tokens <= MOST_COUNT
        assert 0 <= (row.delay_ns or 0) <= LATEST_NS
        assert 0 <= (row.cancel_after_ns or 0) <= LATEST_NS
        assert all(0 <= after.delay_ns <= LATEST_NS for after in row.after)


def check(path: Path) -> None:
    try:
        trace = load_trace(path)
    except KvartsError as error:
        if error.exit_code not in (2, 4):
            raise
        return
    assert_within_bounds(trace)
    rows = list(trace)
    if sum(row.num_prompt_tokens + row.num_output_tokens for row in rows) < 1_000_000:
        try:
            report = replay(trace, ReplayConfig(num_pages=65536, page_size=16))
        except KvartsError as error:
            if error.exit_code not in (2, 4):
                raise
            return
        summary = report.summary
        ends = [summary.get(f"num_{end}", 0) for end in ("completed", "rejected", "cancelled")]
        assert sum(ends) == len(rows)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_numbers_out_of_range_are_named_or_count_as_what_they_are(form: TraceForm, tmp_path: Path) -> None:
    texts = list((damaged_tables if form.is_table else damaged_lines)(form.example))
    if form.name == "recorded":
        texts += damaged_lines(RECORDED)
    assert texts
    for number, text in enumerate(texts):
        path = tmp_path / f"{number}"
        path.write_text(text)
        try:
            check(path)
        except Exception as error:
            error.add_note(text)
            raise


def test_a_torn_last_line_of_a_recording_is_counted_and_any_other_is_named(tmp_path: Path) -> None:
    path = tmp_path / "recorded.jsonl"
    line = '{"arrival_ns":0,"prompt":[5,6,7],"num_output_tokens":2,"output":[8,9]}'
    for length in range(1, len(line)):
        path.write_text(f"{line}\n{line[:length]}")
        trace = load_trace(path)
        assert len(list(trace)) == trace.num_skipped_lines == 1
    path.write_text(f"{line}\n{line[:20]}\n{line}\n")
    with pytest.raises(InputError, match=r"recorded\.jsonl:2: ends too early"):
        load_trace(path)
    path.write_text(line[:20])
    with pytest.raises(InputError):
        load_trace(path)


def test_half_of_the_two_escapes_of_a_character_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[1],"request_id":"\\ud83d"}\n')
    with pytest.raises(InputError, match=r"trace\.jsonl:1: .*half of a character's two escapes, such as \\ud83d alone"):
        load_trace(path)


def test_a_text_that_was_cut_in_a_character_is_read_with_a_mark(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    turn = '{"created":%d,"messages":[{"role":"user","content":"Hello %s"}],'
    row = turn + '"response":{"usage":{"completion_tokens":2}}}\n'
    path.write_text(row % (5, "\\ud83d") + row % (6, "\\ufffd") + row % (7, "\\ud83d\\ude00"))
    cut, marked, whole = (each.num_prompt_tokens for each in load_trace(path))
    assert cut == marked
    assert whole >= marked


UNBOUNDED = {
    "hash_ids", "input_sequence_hashes", "prompt", "output", "output_token_ids",  # ids, which pack_units checks
    "timestamp", "delay", "tool_wait_ms", "input_length", "output_length",  # by mooncake_request, in words of its own
    "request_id", "session_id", "tenant", "wait_for", "model",  # names
    "request_rate", "max_tokens",  # may be Infinity; what a client asked for, which nothing counts with
}  # fmt: skip


def test_every_number_that_a_reader_decodes_has_bounds() -> None:
    """Of all structs of `sim/traffic` that lines are decoded into; places of declared forms have those of rows.py."""
    found = []
    for module in pkgutil.iter_modules(traffic.__path__):
        for name, kind in vars(import_module(f"{traffic.__name__}.{module.name}")).items():
            is_decoded = name.startswith("_") or name in ("RecordedRow", "MooncakeRow", "PlainRow")
            if not is_decoded or not isinstance(kind, type) or not issubclass(kind, msgspec.Struct):
                continue
            for field in msgspec.inspect.type_info(kind).fields:  # type: ignore[attr-defined]
                found += [f"{module.name}.{name}.{field.name}" for each in numbers(field.type) if not is_bounded(each)]
    found = [each for each in found if each.rpartition(".")[2] not in UNBOUNDED]
    assert [each for each in found if not each.startswith(INTERNAL)] == []


INTERNAL = ("rows._Row.", "graph._Wait.", "kv_cache_tester._Ids.", "kv_cache_tester._Place.")
"""Structs that no line is decoded into."""


def numbers(kind: Any) -> Iterator[Any]:
    if isinstance(kind, msgspec.inspect.IntType | msgspec.inspect.FloatType):
        yield kind
    for inner in (*getattr(kind, "types", ()), *filter(None, [getattr(kind, "item_type", None)])):
        yield from numbers(inner)


def is_bounded(kind: Any) -> bool:
    return (kind.ge, kind.gt) != (None, None) and (kind.le, kind.lt) != (None, None)

"""Every reader, on a file of its form that was changed somewhere: it is read, or refused by file, line and field."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.base.errors import InputError
from kvarts.sim.traffic.formats import load_trace
from kvarts.sim.traffic.info import distinct_pages
from kvarts.sim.traffic.trace import Trace
from kvarts.sim.traffic.trace_file import TraceFile

FORMS = Path(__file__).parent / "forms"
ROWS = {"mooncake": 3, "bailian": 4, "dynamo": 2, "aiperf": 2, "openai": 2, "burstgpt": 4, "azure": 3}
"""Requests in each form with a line each."""
WHOLE = {"vllm-bench": 2, "guidellm": 3}
"""Those in each that is one object."""
TELLS_PREFIXES = {"mooncake", "bailian", "dynamo"}

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 0, 1 << 31, 1 << 53, 1 << 63, 1 << 64, 1e300, -0.0])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)
TEXTS = st.text(max_size=8) | st.sampled_from(["", "-1", "0", "1e400", "nan", "99999999999", "1.5", '"', "٣", "\x00"])


def form(name: str) -> Path:
    (path,) = FORMS.glob(f"{name}.*")
    return path


def used(trace: Trace) -> None:
    """Assert that what was read is a trace: sorted from 0 on, with ids for all tokens."""
    arrivals = [request.arrival_ns for request in trace]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0
    if sum(request.num_prompt_tokens + request.num_output_tokens for request in trace) < 100_000:
        num_tokens = sum(request.num_prompt_tokens + request.num_output_tokens for request in trace)
        assert 0 <= (distinct_pages(trace, 16) or 0) <= num_tokens // 16


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, each in inner for place in places(each, (*at, key)))]


def changed(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    if not place:
        return new
    copy = json.loads(json.dumps(value))
    holder = copy
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = new
    return copy


def read_or_refused(path: Path) -> Trace | InputError:
    try:
        trace = load_trace(path)
    except InputError as error:
        assert error.path == path  # noqa: PT017
        assert error.what and "\n" not in str(error)  # noqa: PT017
        return error
    used(trace)
    return trace


@pytest.mark.parametrize("name", [*ROWS, *WHOLE])
def test_a_file_of_each_form_is_read(name: str) -> None:
    trace = load_trace(form(name))
    used(trace)
    assert len(list(trace)) == {**ROWS, **WHOLE}[name]
    assert trace.knows_prefixes == (name in TELLS_PREFIXES)


@pytest.mark.parametrize("name", [name for name in ROWS if form(name).suffix == ".jsonl"])
@given(data=st.data())
def test_a_changed_value_is_read_or_named_by_its_line(
    name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The first line says which form it is, so a later one is changed; without it the others are still read."""
    lines = form(name).read_text().splitlines()
    number = data.draw(st.integers(1, len(lines) - 1))
    row = json.loads(lines[number])
    place = data.draw(st.sampled_from(places(row)))
    lines[number] = json.dumps(changed(row, place, data.draw(ANYTHING)))
    path = tmp_path_factory.getbasetemp() / f"changed-{name}.jsonl"
    path.write_text("\n".join(lines) + "\n")
    found = read_or_refused(path)
    if isinstance(found, InputError):
        # What is wrong may be the change, or a later line that does not fit to it.
        assert found.line is None or found.line >= number + 1
        assert found.field is not None or not place or found.line is not None
        if found.line is not None:
            skipped = load_trace(path, skip_bad_lines=True)
            assert skipped.num_skipped_lines >= 1
            assert len(list(skipped)) >= ROWS[name] - skipped.num_skipped_lines - (name == "dynamo")


@pytest.mark.parametrize("name", ["burstgpt", "azure"])
@given(data=st.data())
def test_a_changed_column_is_read_or_named_by_its_line(
    name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows = list(csv.reader(form(name).read_text().splitlines()))
    number = data.draw(st.integers(1, len(rows) - 1))
    column = data.draw(st.integers(0, len(rows[0]) - 1))
    rows[number][column] = data.draw(TEXTS)
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    path = tmp_path_factory.getbasetemp() / f"changed-{name}.csv"
    path.write_bytes(text.getvalue().encode("utf-8", "surrogatepass"))
    found = read_or_refused(path)
    if isinstance(found, InputError) and found.line is not None:
        assert found.line >= number + 1
        skipped = load_trace(path, skip_bad_lines=True)
        assert skipped.num_skipped_lines == 1


@pytest.mark.parametrize("text", ["2147483648", "99999999999999", "9" * 5000, "-1", "1.5", "0\x1e5", "٣"])
@pytest.mark.parametrize(("name", "column"), [("burstgpt", 2), ("burstgpt", 3), ("azure", 1), ("azure", 2)])
def test_a_count_that_is_none_is_named_by_line_and_column(tmp_path: Path, name: str, column: int, text: str) -> None:
    rows = list(csv.reader(form(name).read_text().splitlines()))
    rows[2][column] = text
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(",".join(row) for row in rows))
    with pytest.raises(InputError) as caught:
        load_trace(path)
    assert (caught.value.line, caught.value.field) == (3, rows[0][column])
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", WHOLE)
@given(data=st.data())
def test_a_changed_value_of_a_result_is_read_or_named_by_its_field(
    name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    value = json.loads(form(name).read_text())
    place = data.draw(st.sampled_from([place for place in places(value) if place]))
    path = tmp_path_factory.getbasetemp() / f"changed-{name}.json"
    path.write_text(json.dumps(changed(value, place, data.draw(ANYTHING))))
    found = read_or_refused(path)
    if isinstance(found, InputError) and "no request" not in found.what:
        assert found.field is not None


@pytest.mark.parametrize("name", [*ROWS, *WHOLE])
@given(data=st.data())
def test_changed_bytes_are_read_or_refused(
    name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = bytearray(form(name).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(whole)))
        whole[at : at + data.draw(st.integers(0, 6))] = data.draw(st.binary(max_size=4))
    path = tmp_path_factory.getbasetemp() / f"bytes-{form(name).name}"
    path.write_bytes(bytes(whole))
    read_or_refused(path)


def test_a_line_ends_where_a_line_of_json_does(tmp_path: Path) -> None:
    """A text may have characters that end a line elsewhere."""
    row = {"arrival_ns": 0, "prompt": [1, 2], "num_output_tokens": 2, "output": [3, 4], "tenant": "a\u2028b\u0085c"}
    path = tmp_path / "recorded.jsonl"
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n" + '{"arrival_ns": "x"}\n')
    with pytest.raises(InputError) as caught:
        load_trace(path)
    assert caught.value.line == 2
    (request,) = load_trace(path, skip_bad_lines=True)
    assert request.tenant == "a\u2028b\u0085c"


@given(
    lines=st.lists(st.sampled_from(['{"a": 1}', ' {"b": "ä"} ', "", "  ", '{"c": 3}\t', "[2]"]), max_size=30),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    has_mark=st.booleans(),
    is_ended=st.booleans(),
    is_packed=st.booleans(),
)
@pytest.mark.laws
def test_records_are_the_lines_of_a_file_however_few(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[str],
    end: str,
    has_mark: bool,
    is_ended: bool,
    is_packed: bool,
) -> None:
    lines = ['{"first": 0}', *lines]
    data = (("\ufeff" if has_mark else "") + end.join(lines) + (end if is_ended else "")).encode()
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    path.write_bytes(gzip.compress(data) if is_packed else data)
    found = [(line, record.decode().strip()) for line, record in TraceFile(path).records()]
    assert found == [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]


def test_a_directory_of_something_else_is_refused_by_the_beginnings_of_few_files(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"prompt": "once upon a time", "max_tokens": 3}')
    for number in range(200):
        (tmp_path / f"b{number:03}.json").write_text('{"price": 1}')
    (tmp_path / "z.json").write_text("not JSON")
    read: list[int] = []
    with pytest.raises(
        InputError, match=r"a\.json is of the form messages, .* 18 are not, such as .*b000\.json"
    ) as caught:
        load_trace(tmp_path, on_read=read.append)
    assert caught.value.path == tmp_path and read == []


def test_a_directory_may_have_a_few_other_files(tmp_path: Path) -> None:
    text = form("gemini").read_text()
    for name in ("chats/session-a.json", "chats/session-b.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "logs.json").write_text('[{"sessionId": "s", "message": "hi"}]')
    assert load_trace(tmp_path).name == tmp_path.name

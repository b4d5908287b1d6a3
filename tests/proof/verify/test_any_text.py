"""Following JSON piece by piece gives what decoding it as a whole gives, wherever it is cut."""

from __future__ import annotations

import json
import re
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.base.errors import InputError
from kvarts.proof.verify import json_text, verify, verify_file
from kvarts.proof.verify import text as reading
from kvarts.proof.verify.chunk import TOP_FIELDS, TimelineRow
from kvarts.proof.verify.json_text import JsonText
from kvarts.proof.verify.text import bytes_blocks, shortened

from builders.body import good


def broken(what: str, *, line: int | None = None) -> InputError:
    return InputError(what, line=line)


# The naive model: decode everything, then look --------------------------------------------------------------


class Pairs(list[tuple[str, Any]]):
    """An object with all of its pairs."""


def naive(text: bytes) -> tuple[list[Any], dict[str, Any], list[str]] | None:
    """Return the rows, the other keys, and those that are given twice; None for what is no such object."""
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
        pairs = json.loads(text.decode(), object_pairs_hook=Pairs)
    except (ValueError, RecursionError):
        return None
    if not isinstance(pairs, Pairs):
        return None
    rows: list[Any] = []
    top: dict[str, Any] = {}
    twice = []
    num_timelines = 0
    for name, value in pairs:
        if name == "timeline":
            num_timelines += 1
            if type(value) is list:
                rows = value
                continue
        elif name in top and name in TOP_FIELDS and name not in twice:
            twice.append(name)
        top[name] = value
    return None if num_timelines > 1 else (rows, top, twice)


def plain(value: Any) -> Any:
    """Without what is told of duplicates."""
    if isinstance(value, Pairs):
        return {name: plain(item) for name, item in value}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return value


def kept(top: dict[str, Any]) -> dict[str, Any]:
    """What must be kept of the whole: of an array or an object, that it is one."""
    return {name: type(plain(value)) if isinstance(value, list | dict) else value for name, value in top.items()}


def followed(text: bytes) -> tuple[list[Any], dict[str, Any], list[str]] | None:
    """The same by the reader."""
    try:
        follower = JsonText(shortened(bytes_blocks(text, broken), broken, keeps_lines=False), broken)
        rows = [row for some in follower.rows() for row in some]
    except InputError:
        return None
    rows = [msgspec.to_builtins(row) if isinstance(row, TimelineRow) else row for row in rows]
    return rows, follower.top, follower.twice


@pytest.fixture(params=[16, 1 << 20], ids=["small", "usual"])
def block_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(reading, "BLOCK_BYTES", request.param)
    monkeypatch.setattr(json_text, "LARGEST_PIECE_BYTES", 1 << 12)
    return int(request.param)


NAMES = st.sampled_from(["a", "timeline", "every", '"', "\\", "}],{[:,", "é😀", ""])
TEXTS = st.sampled_from(["", "timeline", '},"', "\\", '\\"', "]", "a" * 20, "é😀", "\n\t"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.lists(st.tuples(NAMES, inner), max_size=4).map(Pairs),
    max_leaves=15,
)


def written(value: Any, draw: st.DrawFn) -> str:
    """JSON as anyone may write it: with space, escapes, and keys given twice."""
    space = draw(st.sampled_from(["", "", " ", "\n ", "\t"]))

    def string(text: str) -> str:
        if draw(st.integers(0, 5)):
            return json.dumps(text, ensure_ascii=draw(st.booleans()))
        units = text.encode("utf-16-be")
        return '"' + "".join(f"\\u{units[i]:02x}{units[i + 1]:02X}" for i in range(0, len(units), 2)) + '"'

    if isinstance(value, Pairs):
        inner = f"{space},".join(f"{space}{string(name)}{space}:{written(item, draw)}" for name, item in value)
        return f"{space}{{{inner}{space}}}"
    if isinstance(value, list):
        return f"{space}[{','.join(written(item, draw) for item in value)}{space}]{space}"
    return space + (string(value) if isinstance(value, str) else json.dumps(value))


@st.composite
def texts(draw: st.DrawFn) -> bytes:
    pairs = draw(st.lists(st.tuples(NAMES, VALUES), max_size=4).map(Pairs))
    if draw(st.booleans()):
        rows = draw(st.lists(VALUES, max_size=6))
        pairs.insert(draw(st.integers(0, len(pairs))), ("timeline", rows))
    text = written(pairs if draw(st.integers(0, 9)) else draw(VALUES), draw).encode()
    if draw(st.booleans()):  # damaged
        at, end = sorted((draw(st.integers(0, len(text))), draw(st.integers(0, len(text)))))
        new = draw(
            st.sampled_from([b"", b",", b"}", b"]", b"{", b"[", b'"', b":", b"\\", b"\xff", b"1", b" ", text[at:end]])
        )
        text = text[:at] + new + (text[end:] if draw(st.booleans()) else text[at:])
    return text


@pytest.mark.laws
@given(text=texts(), size=st.sampled_from([1, 3, 16, 1 << 20]))
def test_piece_by_piece_is_as_a_whole(text: bytes, size: int) -> None:
    before, reading.BLOCK_BYTES = reading.BLOCK_BYTES, size
    try:
        actual, expected = followed(text), naive(text)
    finally:
        reading.BLOCK_BYTES = before
    if expected is None or actual is None:
        assert actual == expected, text
        return
    rows, top, twice = expected
    assert plain(actual[0]) == plain(rows), text
    assert kept(actual[1]) == kept(top), text
    assert sorted(actual[2]) == sorted(twice), text


@pytest.mark.laws
@given(st.data())
def test_strings_come_whole_or_short(data: st.DataObject) -> None:
    """With long strings of any letters and escapes, cut anywhere; a damaged one is an error."""
    pieces = st.sampled_from(["a", "é", "😀", "\\n", "\\\\", '\\"', "\\u00e9", "\\ud83d\\ude00", "bcdefgh" * 3, "}],["])
    body = "".join(data.draw(st.lists(pieces, max_size=40)))
    strings = [data.draw(st.sampled_from(['"short"', f'"{body}"'])) for _ in range(data.draw(st.integers(1, 3)))]
    text = f"[{' , '.join(strings)}]".encode()
    size = data.draw(st.integers(1, 40))
    before = reading.LONGEST_STRING, reading.BLOCK_BYTES
    reading.LONGEST_STRING, reading.BLOCK_BYTES = 24, size
    try:
        got = b"".join(shortened(bytes_blocks(text, broken), broken, keeps_lines=True))
        cut = data.draw(st.integers(0, len(text)))
        while cut < len(text) and text[cut] & 0xC0 == 0x80:
            cut += 1
        b"".join(shortened(bytes_blocks(text[:cut], broken), broken, keeps_lines=True))
        damaged = text.replace(b"bcd", b"b\x01d")
        damaged_is_found = True
        try:
            got_damaged = b"".join(shortened(bytes_blocks(damaged, broken), broken, keeps_lines=True))
            msgspec.json.decode(got_damaged)
            damaged_is_found = damaged == text
        except (InputError, msgspec.DecodeError):
            pass
    finally:
        reading.LONGEST_STRING, reading.BLOCK_BYTES = before
    assert damaged_is_found
    values, shorter = json.loads(text), json.loads(got)
    assert len(values) == len(shorter)
    for value, short in zip(values, shorter, strict=True):
        assert short in (value, json.loads(reading.SHORT_STRING))
        if value == "short" or len(body.encode()) < 12:
            assert short == value


# Bodies of the issue ---------------------------------------------------------------------------------------


def head_and_rows() -> tuple[str, str]:
    body = good()
    rows = ",".join(map(json.dumps, body.pop("timeline")))
    return json.dumps(body)[1:-1], rows


@pytest.mark.parametrize(
    "body",
    [
        '{{"comment": "{long}", {head}, "timeline": [{rows}]}}',
        '{{{head}, "timeline": [{rows}], "comment": "{long}"}}',
        '{{"list": [{numbers}1], {head}, "timeline": [{rows}]}}',
        '{{"deep": {{"list": [[{numbers}1], [{{"a": [{numbers}2]}}]]}}, {head}, "timeline": [{rows}]}}',
        '{{{head},{space}"timeline":{space}[{rows}]}}',
        '{{{head}, "\\u0074imeline": [{rows}]}}',
        '{{{many} {head}, "timeline": [{rows}]}}',
        '{{"{long}": 1, {head}, "timeline": [{rows}]}}',
    ],
    ids=["string", "string after", "list", "deep list", "space", "escape", "keys", "key"],
)
def test_a_legal_body_is_sound_whatever_is_around_its_rows(tmp_path: Path, body: str) -> None:
    head, rows = head_and_rows()
    text = body.format(
        head=head,
        rows=rows,
        long='a\\"é' * (1 << 18),
        numbers="1," * (1 << 20),
        space=" \n" * (1 << 20),
        many="".join(f'"k{i}": [{i}],' for i in range(20_000)),
    )
    path = tmp_path / "any.json"
    path.write_text(text)
    assert verify_file(path).verdict == "ok" == verify(text).verdict
    # A damage is still found.
    path.write_text(text.replace('"used_blocks": 70', '"used_blocks": 71', 1))
    assert verify_file(path).verdict == "violated"
    path.write_text(text.replace("[", "[[", 1))
    with pytest.raises(InputError):
        verify_file(path)


@pytest.mark.parametrize(
    "text",
    ["[" * (6 << 20), '{"a":' * (1 << 20), '{"a": [' + "[1," * (2 << 20), '{"timeline": [' + "[" * (6 << 20),
     '{"a": ' + "1" * (6 << 20), '{"timeline": [{"step": ' + "1" * (6 << 20)],
    ids=["arrays", "objects", "both", "rows", "number", "number in a row"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["any.json", "any.jsonl"])
def test_what_would_not_fit_is_refused_at_once(tmp_path: Path, text: str, name: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    tracemalloc.start()
    if name == "any.json":
        with pytest.raises(InputError, match=r"too deeply|bytes|begins as an array"):
            verify_file(path)
    else:
        with pytest.raises(InputError, match="bytes in a line"):
            verify_file(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 150 << 20


def test_a_packed_file_of_many_small_parts_takes_the_time_of_its_bytes(tmp_path: Path) -> None:
    def packed(text: bytes) -> bytes:
        packer = zlib.compressobj(1, zlib.DEFLATED, 31)
        return packer.compress(text) + packer.flush()

    text = json.dumps(good()).encode()
    path = tmp_path / "parts.json.gz"
    path.write_bytes(b"".join(packed(text[at : at + 1]) for at in range(len(text))) + packed(b"") * 20_000)
    assert verify_file(path).verdict == "ok"


# Rows ------------------------------------------------------------------------------------------------------


def lines(body: dict[str, Any]) -> list[str]:
    head = {name: value for name, value in body.items() if name != "timeline"}
    return [json.dumps(head), *map(json.dumps, body["timeline"])]


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (lambda text: text + "\n", "ok"),
        (lambda text: text + "\n \n\n", "ok"),
        (lambda text: text.replace("\n", "\r\n"), "ok"),
        (lambda text: "\n\n" + text, "ok"),
        (lambda text: re.sub(r"(\{.step.: 1,.*)\n", r"\1,\n", text, count=1), None),
        (lambda text: re.sub(r"(\{.step.: 1,.*)\n", r"\1]\n", text, count=1), None),
        (lambda text: re.sub(r"(\{.step.: 1,.*)\n", r"\1,", text, count=1), None),
        (lambda text: re.sub(r"(\{.step.: 1,.*)\n", r"\1 ", text, count=1), None),
        (lambda text: text.replace('"waiting": 0', '"waiting": 0\n', 1), None),
        (lambda text: text.replace(', "waiting": 0', '\n"waiting": 0', 1), None),
    ],
)
@pytest.mark.parametrize("where", ["totals last", "head first"])
def test_a_line_is_a_row(tmp_path: Path, change: Any, verdict: str | None, where: str) -> None:
    all_lines = lines(good())
    if where == "totals last":
        all_lines = all_lines[1:] + all_lines[:1]
    path = tmp_path / "any.jsonl"
    path.write_bytes(change("\n".join(all_lines) + "\n").encode())
    if verdict is None:
        with pytest.raises(InputError, match=r"any\.jsonl:\d+: is no JSON"):
            verify_file(path)
    else:
        assert verify_file(path).verdict == verdict


ROW = '"used_blocks": 70,'


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        (ROW, '"used_blocks": 40, "used_blocks": 70,', "used_blocks is given twice"),
        (ROW, '"used\\u005fblocks": 40, "used_blocks": 70,', "used_blocks is given twice"),
        ('"waiting": 1,', '"waiting": 0, "waiting": 1,', "waiting is given twice"),
        ('"blocks": 5,', '"blocks": 9, "blocks": 5,', "asked: blocks is given twice"),
        ('"free_blocks": 2, "v', '"free_blocks": 0, "free_blocks": 2, "v', "asked: free_blocks is given twice"),
        ('"asked": [', '"asked": null, "asked": [', "asked is given twice"),
        ('"total_blocks": 100', '"total_blocks": 90, "total_blocks": 100', "total_blocks is given twice"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["any.json", "any.jsonl"])
def test_a_key_that_is_given_twice_is_a_violation(tmp_path: Path, old: str, new: str, what: str, name: str) -> None:
    text = json.dumps(good()) if name == "any.json" else "\n".join(lines(good())) + "\n"
    assert old in text
    path = tmp_path / name
    path.write_text(text.replace(old, new, 1))
    verdict = verify_file(path)
    assert [violation.what for violation in verdict.violations if violation.rule == "schema"] == [what]
    if name == "any.json":
        assert verify(text.replace(old, new, 1)).violations == verdict.violations


def test_names_in_strings_are_no_keys(tmp_path: Path) -> None:
    body = good()
    for row in body["timeline"]:
        row["comment"] = 'used_blocks "step": free_blocks'
        row["used"] = ["used_blocks", {"step": 7, "free_blocks": 3}]
    path = tmp_path / "any.json"
    path.write_text(json.dumps(body))
    assert verify_file(path).verdict == "ok"


@pytest.mark.parametrize("number", ["1" + "0" * 400, "1" + "0" * 10_000, "-1" + "0" * 400, "1e400", "1e308"])
def test_a_number_too_large_is_a_violation_from_both_doors(tmp_path: Path, number: str) -> None:
    path = tmp_path / "any.json"
    for old in ('"peak_used_pct": 0.98', '"preemption_count": 1', '"total_blocks": 100', '"used_blocks": 70'):
        text = json.dumps(good()).replace(old, f"{old.split()[0]} {number}", 1)
        path.write_text(text)
        verdicts = verify_file(path), verify(text)
        assert verdicts[0] == verdicts[1]
        assert "schema" in {violation.rule for violation in verdicts[0].violations}
        assert verdicts[0].to_text()


@pytest.mark.parametrize("bad", [b"\xff", b"\xe9", b"\xc3", b"\xed\xa0\x80", b"\xf0\x9f"])
def test_what_is_no_utf8_is_a_clear_error(tmp_path: Path, bad: bytes) -> None:
    text = json.dumps({**good(), "a": "b"}).encode()
    for name in ("any.json", "any.jsonl"):
        for damaged in (text.replace(b'"a"', b'"' + bad + b'"'), text.replace(b'"b"', b'"' + bad + b'"'), text + bad):
            path = tmp_path / name
            path.write_bytes(damaged)
            with pytest.raises(InputError, match=r"UTF-8|something follows"):
                verify_file(path)
            with pytest.raises(InputError, match=r"UTF-8|something follows"):
                verify(damaged)


@pytest.mark.parametrize("body", [[1, 2], [], 3, None, "x", True, 1.5])
def test_what_is_no_object_is_an_error_from_all_doors(tmp_path: Path, body: Any) -> None:
    path = tmp_path / "any.json"
    path.write_text(json.dumps(body))
    with pytest.raises(InputError, match="must be an object, is"):
        verify_file(path)
    for text in (path.read_text(), path.read_bytes()):
        with pytest.raises(InputError, match="must be an object, is"):
            verify(text)
    if not isinstance(body, str):
        with pytest.raises(InputError, match="must be an object, is"):
            verify(body)

"""What the verifier reads: however a file is laid out, whatever is in it, it gets a verdict or a clear error."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.base.errors import InputError, MissingFileError
from kvarts.proof.verify import chunk
from kvarts.proof.verify import text as reading
from kvarts.proof.verify.verifier import verify, verify_file

from builders.body import Body, good, series
from builders.damages import DAMAGES


def layouts(body: Body) -> dict[str, bytes]:
    """The same body, as different people write it."""
    ends = {name: value for name, value in body.items() if name != "timeline"}
    rows = body["timeline"]
    lines = [json.dumps(ends), *map(json.dumps, rows)]
    texts = {
        "first.json": json.dumps(body),
        "last.json": json.dumps({**ends, "timeline": rows}),
        "pretty.json": json.dumps(body, indent=4),
        "deep.json": json.dumps({"about": {"timeline": [1, {"]": "}"}]}, 'od"d\\': "]},{", **body, "more": [[], {}]}),
        "lines.jsonl": "\n".join(lines),
        "lines.ndjson": "\n\n".join(lines) + "\n",
        "totals.jsonl": "\n".join(lines[1:] + lines[:1]),
    }
    out = {name: text.encode() for name, text in texts.items()}
    out["bom.json"] = b"\xef\xbb\xbf" + out["first.json"]
    return {**out, **{f"{name}.gz": gzip.compress(text) for name, text in out.items()}}


@pytest.mark.parametrize("block_bytes", [pytest.param(64, marks=pytest.mark.slow), 1 << 12, 1 << 22])
def test_the_layout_of_a_file_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    """Blocks so small that every row is cut, and rows with brackets and quotes in strings."""
    monkeypatch.setattr(reading, "BLOCK_BYTES", block_bytes)
    for damage, _ in [(None, ""), *DAMAGES[:: 8 if block_bytes < 1000 else 2]]:
        body = good()
        for index, row in enumerate(body["timeline"]):
            row["comment"] = '}],"\\' * (index % 3) + "é"
        if damage is not None:
            damage(body)
        expected = verify(body)
        for name, text in layouts(body).items():
            path = tmp_path / name
            path.write_bytes(text)
            verdict = verify_file(path)
            assert verdict == expected, (name, verdict.to_text(), expected.to_text())


def test_what_breaks_off_is_no_timeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps({**good(), "end": True}).encode()
    path = tmp_path / "cut.json"
    for block_bytes in (64, 1 << 22):
        monkeypatch.setattr(reading, "BLOCK_BYTES", block_bytes)
        for cut in [*range(0, 400, 7), *range(len(text) - 200, len(text), 3)]:
            path.write_bytes(text[:cut])
            with pytest.raises(InputError, match=r"cut\.json"):
                verify_file(path)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "3",
        '{"timeline": [1, 2,]}',
        '{"timeline": [{} {}]}',
        '{"timeline": [,{}]}',
        '{"timeline": []} {}',
        '{"timeline": [], "timeline": [1]}',
        '{"timeline": [{"step": NaN}]}',
        '{"timeline": [{"step": 1}',
        "[" * 100_000,
        '{"timeline": [' + "[" * 100_000,
        "",
        "\x00",
    ],
)
def test_what_is_no_json_is_a_clear_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"bad\.json: "):
        verify_file(path)


def test_a_missing_file_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="no such file"):
        verify_file(tmp_path / "nothing.json")
    with pytest.raises(InputError):
        verify_file(tmp_path)


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    lines = layouts(good())["lines.jsonl"].splitlines()
    lines[5] = b"{oops"
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(InputError, match=r"bad\.jsonl:6: is no JSON"):
        verify_file(path)


@pytest.mark.slow
def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times the rows, the same memory."""
    monkeypatch.setattr(reading, "BLOCK_BYTES", 1 << 16)
    peaks = []
    for num_rows in (10_000, 100_000):
        path = tmp_path / f"{num_rows}.json"
        path.write_text(json.dumps(series([step % 5000 for step in range(num_rows)])))
        tracemalloc.start()
        assert verify_file(path).verdict == "ok"
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


# Fuzz -----------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
NUMBERS = st.one_of(st.integers(-1, 5), st.integers(0, 100), st.floats(), st.integers())
ROWS = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(chunk.NUMBERS, NUMBERS | JSON),
        "asked": st.lists(st.fixed_dictionaries({"blocks": NUMBERS, "free_blocks": NUMBERS}), max_size=2) | JSON,
    },
)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "timeline": st.lists(ROWS, max_size=6) | st.lists(ROWS | JSON, max_size=3) | JSON,
        "block_size_tokens": NUMBERS | JSON,
        "total_blocks": NUMBERS | JSON,
        "peak_used_pct": NUMBERS | JSON,
        "preemption_count": NUMBERS | JSON,
        "initial_used_blocks": NUMBERS | JSON,
        "block_bytes": NUMBERS | JSON,
        "every": NUMBERS | JSON,
    },
)


def assert_judged(body: Any, **limits: Any) -> None:
    verdict = verify(body, **limits)
    counted = sum(result.num_violations for result in verdict.rules)
    assert counted == len(verdict.violations)
    assert (verdict.verdict == "violated") == (counted > 0)
    assert verdict.exit_code == {"ok": 0, "violated": 5, "inconclusive": 6}[verdict.verdict]
    assert verdict.to_text().startswith(verdict.verdict)


@pytest.mark.laws
@given(BODIES | JSON, st.booleans())
def test_anything_gets_a_verdict(body: Any, bounded: bool) -> None:
    limits = {"max_bytes": 100} if bounded else {}
    if isinstance(body, dict):
        assert_judged(body, **limits)
    else:
        with pytest.raises(InputError):
            verify(body, **limits)


@pytest.mark.laws
@given(st.data())
def test_a_damaged_good_one_gets_a_verdict(data: st.DataObject) -> None:
    body = deepcopy(good())
    for _ in range(data.draw(st.integers(1, 3))):
        row = data.draw(st.sampled_from(body["timeline"]))
        if isinstance(row, dict) and row:
            row[data.draw(st.sampled_from(sorted(row)))] = data.draw(NUMBERS | JSON)
    assert_judged(body)


@pytest.mark.laws
@given(body=BODIES | JSON, cut=st.integers(0, 200), block_bytes=st.sampled_from([16, 1 << 22]))
def test_any_bytes_get_a_verdict_or_a_clear_error(
    body: Any, cut: int, block_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    before, reading.BLOCK_BYTES = reading.BLOCK_BYTES, block_bytes
    try:
        text = json.dumps(body).encode()
        for name in ("any.json", "any.jsonl", "any.json.gz", "any.parquet"):
            for data in (text, text[:cut], gzip.compress(text)[:cut]):
                path = folder / name
                path.write_bytes(data)
                said: str | None = None
                try:
                    said = verify_file(path).verdict
                except InputError as error:
                    said = str(error).split(":")[0]
                assert said in {"ok", "violated", "inconclusive", str(path)}
    finally:
        reading.BLOCK_BYTES = before

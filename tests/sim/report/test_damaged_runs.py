"""Run directories that someone damaged: an answer or an error with the file, never a traceback."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarts.cli.commands import COMMANDS
from kvarts.cli.main import main

Kvarts = Callable[..., tuple[int, str, str]]


def run(*arguments: object) -> tuple[int, str]:
    """Run a command in this process: its exit code, and what it said beside."""
    before, sys.argv = sys.argv, ["kvarts", *map(str, arguments)]
    out, err = io.TextIOWrapper(io.BytesIO()), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            return main(), err.getvalue()
    finally:
        sys.argv = before


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some requests on a pool that is too small for them, everything unpacked."""
    folder = tmp_path_factory.mktemp("small")
    rows = [
        {
            "timestamp": 40 * i,
            "input_length": 1200 + 100 * (i % 3),
            "output_length": 40 + i,
            "hash_ids": [i % 3, i, 99 + i],
        }
        for i in range(12)
    ]
    trace = folder / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "run"
    assert run("replay", trace, "--pages", 12, "--page-size", 256, "--run-dir", path)[0] == 0
    for name in ("timeline.json", "events.jsonl"):
        packed = path / f"{name}.gz"
        (path / name).write_bytes(gzip.decompress(packed.read_bytes()))
        packed.unlink()
    return path


ODD: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(
        [None, True, -1, 0, 0.5, 1e308, -1e308, 2**53 + 1, 2**63, 10**400, 10**5000, "", "\x00é😀", [], {}, [[]]]
    ),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
)
ODD_BYTES = st.sampled_from(
    [b"", b"\xff", b"\xe9", b"[" * 50_000, b"{", b"]", b'"', b"1" * 6000, b"\n", b"\x00", b"null"]
)
FILES = ("report.json", "requests.jsonl", "distributions.json", "run.json", "timeline.json", "events.jsonl")


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths to everything in a JSON value, up to some hundreds."""
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        if len(found) < 400:
            found += places(item, (*path, name))
    return found


def changed(value: Any, path: tuple[Any, ...], new: Any, *, drop: bool) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    if drop and len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = changed(value[path[0]], path[1:], new, drop=drop)
    return copy


@st.composite
def damages(draw: st.DrawFn) -> Callable[[bytes, bool], bytes]:
    """What is done to a file: to a value in it, or to its bytes."""
    seed, new, new_bytes = draw(st.integers(0, 10**6)), draw(ODD), draw(ODD_BYTES)
    kind = draw(st.sampled_from(["value", "value", "value", "drop", "bytes", "cut", "lines"]))

    def damage(text: bytes, is_lines: bool) -> bytes:
        lines = text.splitlines(keepends=True) if is_lines else [text]
        at = seed % len(lines)
        if kind in ("value", "drop"):
            value = json.loads(lines[at])
            all_places = places(value)
            place = all_places[seed // 7 % len(all_places)]
            sys.set_int_max_str_digits(10_000)
            lines[at] = json.dumps(changed(value, place, new, drop=kind == "drop")).encode() + b"\n"
        elif kind == "lines":
            lines.insert(seed // 7 % len(lines), lines.pop(at))
        else:
            place_in = seed // 7 % (len(lines[at]) + 1)
            after = b"" if kind == "cut" else lines[at][place_in + seed % 3 :]
            lines[at] = lines[at][:place_in] + new_bytes + after
        return b"".join(lines)

    return damage


@pytest.mark.laws
@given(name=st.sampled_from(FILES), damage=damages())
@settings(print_blob=True)
def test_a_damaged_run_gets_an_answer_or_a_clear_error(
    small_run: Path, tmp_path_factory: pytest.TempPathFactory, name: str, damage: Callable[[bytes, bool], bytes]
) -> None:
    folder = tmp_path_factory.mktemp("damaged") / "run"
    shutil.copytree(small_run, folder)
    path = folder / name
    path.write_bytes(damage(path.read_bytes(), name.endswith("l")))
    calls: list[tuple[object, ...]] = [("report", folder, "--html", folder.parent / "page.html"), ("verify", folder)]
    calls += [("story", folder, "--hits"), ("story", folder, "--request", 3), ("story", folder, "--block", "3:1")]
    for call in calls:
        code, err = run(*call)
        assert code in {0, 3, 4, 5, 6}, (call, code, err)
        assert (code in {3, 4}) == err.startswith("kvarts: ") or "wrote" in err, (call, code, err)
        if code in {3, 4} and call[0] != "story":
            assert str(folder) in err, (call, err)
    shutil.rmtree(folder.parent)


def test_what_is_wrong_is_named_with_its_place(small_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for name, old, new, what in (
        ("report.json", '"num_requests": 12', '"num_requests": "12"', "report.json: num_requests: Expected"),
        ("report.json", '"num_requests": 12', '"other": ' + "[" * 100_000, "report.json: cannot be read"),
        ("report.json", '"page_size": 256', '"page_size": "256"', "configuration of a run: page_size: Expected"),
        ("report.json", '"offload": null', '"offload": "host"', "configuration of a run: offload: Expected"),
        ("report.json", '"offload": null', '"offload": {"host_memory": "much"}', "configuration of a run: a size"),
        ("requests.jsonl", '"arrival_ms":40.0', '"arrival_ms":null', "requests.jsonl:2: arrival_ms: Expected"),
        ("distributions.json", '"counts":[', '"counts":[1,', "distributions.json: itl_ms: has no bound for each count"),
        ("run.json", '"command": [', '"command": [3,', "run.json: command[0]: Expected"),
        (
            "timeline.json",
            '"total_blocks":12',
            '"total_blocks":1' + "0" * 400,
            "timeline.json: does not state its total_blocks",
        ),
    ):
        shutil.copytree(small_run, folder)
        path = folder / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))
        code, err = run("report", folder, "--html", tmp_path / "page.html")
        assert code == 4 and what in err, (name, code, err)
        shutil.rmtree(folder)


def test_one_bad_file_does_not_keep_others_from_being_judged(small_run: Path, tmp_path: Path, kvarts: Kvarts) -> None:
    good = small_run / "timeline.json"
    bad = tmp_path / "bad.json"
    for text in (b"[" * 100_000, b'{"\xff": 1}', b"", b'{"timeline": [{"step": 1' + b"0" * 5000, b"PAR1", b"[1, 2]"):
        bad.write_bytes(text)
        code, out, err = kvarts("verify", bad, good, tmp_path / "missing.json", good)
        assert code == 4 and out.count(": ok, ") == 2 and str(bad) in err and "missing.json" in err
    assert kvarts("verify", small_run)[1].startswith(f"{good}: ok, ")
    assert kvarts("verify", tmp_path)[0] == 3
    assert set(COMMANDS) >= {"verify", "report", "story"}

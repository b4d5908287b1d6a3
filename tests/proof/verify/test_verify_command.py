"""`kvarts verify`."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from builders.body import good

Kvarts = Callable[..., tuple[int, str, str]]


def test_text_json_and_exit_code_agree(kvarts: Kvarts, tmp_path: Path) -> None:
    timeline = good()
    broken = {**timeline, "peak_used_pct": 0.5}
    empty = {**timeline, "timeline": [], "peak_used_pct": 0, "preemption_count": 0}
    for name, body in (("ok", timeline), ("violated", broken), ("inconclusive", empty)):
        (tmp_path / f"{name}.json").write_text(json.dumps(body))
    (tmp_path / "unreadable.json").write_text("{")
    codes = {"ok": 0, "violated": 5, "inconclusive": 6, "unreadable": 4, "missing": 3}
    for name, expected in codes.items():
        path = tmp_path / f"{name}.json"
        code, out, err = kvarts("verify", path)
        assert code == expected
        as_json_code, as_json, _ = kvarts("verify", path, "--json")
        assert as_json_code == expected
        answer = json.loads(as_json)
        if expected in (3, 4):
            assert (out, answer["verdict"]) == ("", None) and name in err and name in answer["error"]
        else:
            assert out.startswith(f"{path}: {name}") and answer["verdict"] == name
            assert {rule["rule"] for rule in answer["rules"]} >= {"schema", "flux", "leak", "preemption_needed"}
    for together, expected in (
        (("ok", "inconclusive"), 6),
        (("inconclusive", "unreadable"), 4),
        (("missing", "violated", "ok"), 5),
    ):
        assert kvarts("verify", *(tmp_path / f"{name}.json" for name in together))[0] == expected


@pytest.mark.parametrize("threshold", ["nan", "1.5", "-1", "x"])
def test_a_bad_threshold_is_bad_usage(kvarts: Kvarts, tmp_path: Path, threshold: str) -> None:
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps(good()))
    code, out, err = kvarts("verify", path, "--set", f"preempt_threshold={threshold}")
    assert (code, out) == (2, "") and "threshold" in err


def test_boundedness_can_be_asked_for(kvarts: Kvarts, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps(good()))
    code, out, _ = kvarts("verify", path, "--set", "max_bytes=1MiB", "--set", "block_bytes=64KiB")
    assert code == 5 and "blocks are" in out and "more than 1048576" in out
    assert kvarts("verify", path, "--set", "max_bytes=1GiB")[0] == 6


def test_no_file_is_bad_usage(kvarts: Kvarts) -> None:
    code, out, err = kvarts("verify")
    assert (code, out) == (2, "") and "FILE" in err


@pytest.mark.parametrize(
    "how",
    [
        (
            "--set",
            "stop_tokens=true",
        ),
        (),
    ],
)
def test_a_plan_computes_requests_that_have_left(kvarts: Kvarts, tmp_path: Path, how: tuple[str, ...]) -> None:
    """With --set async_scheduling=true, the memory of requests that end during a step is in use for one more step."""
    rows = [
        {"timestamp": 1000 * n, "input_length": 46 + n, "output_length": 5, "hash_ids": [n], "cancel_after_ms": 1 + n}
        for n in range(4)
    ]
    trace, timeline = tmp_path / "trace.jsonl", tmp_path / "timeline.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, err = kvarts(
        *(
            "replay",
            trace,
            "--page-size",
            16,
            "--pages",
            56,
            "--trace-block-size",
            64,
            "--set",
            "async_scheduling=true",
            *how,
        ),
        *("--cost", "linear:step_ms=5", "--timeline", timeline),
    )
    assert code == 0, err
    code, out, _ = kvarts("verify", timeline)
    assert code == 0, out


FORMS, PIPES = ("json", "jsonl", "gz"), ("/dev/stdin", "substitution", "fifo")


@pytest.mark.parametrize(
    ("door", "form"),
    [
        pytest.param(door, form, marks=[] if FORMS.index(form) == place else pytest.mark.slow)
        for place, door in enumerate(PIPES)
        for form in FORMS
    ],
)
def test_a_pipe_is_a_file(tmp_path: Path, door: str, form: str) -> None:
    """Read more than once where rules need it: what the body says of the whole comes last here."""
    body = good()
    rows = body.pop("timeline")
    text = json.dumps({"timeline": rows, **body}).encode()
    if form == "jsonl":
        text = b"".join(json.dumps(line).encode() + b"\n" for line in (*rows, body))
    source = tmp_path / "source"
    source.write_bytes(gzip.compress(text) if form == "gz" else text)
    kvarts = f"{sys.executable} -m kvarts verify"
    command = {
        "/dev/stdin": f"cat source | {kvarts} /dev/stdin",
        "substitution": f"{kvarts} <(cat source)",
        "fifo": f"mkfifo pipe; (cat source > pipe &); {kvarts} pipe",
    }[door]
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "") and ": ok, 23 rows" in done.stdout


@pytest.mark.parametrize("size", ["0", "-1", "1" + "0" * 20, "9" * 400, "1TiB" * 2])
def test_a_size_that_is_none_is_bad_usage(kvarts: Kvarts, tmp_path: Path, size: str) -> None:
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps(good()))
    for key in ("max_bytes", "block_bytes"):
        code, out, err = kvarts("verify", path, "--set", f"{key}={size}")
        assert (code, out) == (2, "") and "Traceback" not in err

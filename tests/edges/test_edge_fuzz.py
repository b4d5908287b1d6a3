"""A fuzzer for each door: options, configurations, traces, run directories, measurements, records.

Whatever is given: a documented exit code, no traceback, nothing half written, no input changed.
`KVARTS_HYPOTHESIS=long` tries thousands; tests marked `long` go on for as long as KVARTS_FUZZ_S says.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import sys
import time
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvarts.cli.main import main
from kvarts.cli.options import role_of

from builders.calls import CALLS, commands, snapshot

pytestmark = pytest.mark.laws

DOCUMENTED = {0, 2, 3, 4, 5, 6, 7}
NUMBERS = st.one_of(
    st.integers(-2, 40).map(str),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(["9" * 400, "1e400", "0x1"]),
)
TEXTS = st.one_of(NUMBERS, st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FEW = settings(max_examples=max(1, settings().max_examples // 2), suppress_health_check=list(HealthCheck))


def run(arguments: list[str]) -> int:
    """Run `kvarts`, and assert what must hold whatever the arguments are."""
    before, sys.argv = sys.argv, ["kvarts", *arguments]
    out, sys.stdout = sys.stdout, io.TextIOWrapper(io.BytesIO(), "utf-8")
    said = io.StringIO()
    begin_s, begin_busy_s = time.monotonic(), busy_s()
    try:
        with redirect_stderr(said):
            code = main()
    finally:
        sys.argv, sys.stdout = before, out
    assert code in DOCUMENTED, said.getvalue()
    assert code == 0 or said.getvalue().strip() or code in (5, 6)
    assert "Traceback" not in said.getvalue()
    # Other work on the machine makes nothing hang: what counts is mostly the time that it was busy itself.
    assert busy_s() - begin_busy_s < 60 and time.monotonic() - begin_s < 600, "it takes too long"
    return code


def busy_s() -> float:
    """Return the CPU time that this process and its children took so far, in seconds."""
    return sum(os.times()[:4])


@pytest.fixture
def kept(here: Path) -> Path:
    """The folder of all calls, which no example may change but for names that begin with x, and the one of sweeps."""
    return here


def check_inputs(folder: Path, before: dict[str, bytes | None]) -> None:
    after = snapshot(folder)
    assert {path: data for path, data in after.items() if path in before} == before
    for path in set(after) - set(before):
        assert Path(path).parts[0].startswith(("x", "swept")), f"{path} was left"
        target = folder / path
        if target.exists():
            shutil.rmtree(target) if target.is_dir() else target.unlink()


def drawn_options(name: str) -> list[Any]:
    """The options of a command that are drawn."""
    undrawn = ("--step-by-step", "--audit")
    return [
        each for each in commands()[name].params if each.param_type_name == "option" and each.opts[0] not in undrawn
    ]


def options(name: str) -> st.SearchStrategy[list[str]]:
    """Some options of a command with any values."""
    single = []
    for param in drawn_options(name):
        flag = param.opts[0]
        role = role_of(param)
        if getattr(param, "is_flag", False):
            single.append(st.just([flag]))
        elif role in ("output", "derived", "directory"):
            names = ["x.json", "x.jsonl", "x", "x/y", "/dev/null", "-", "run", "", "x" * 300]
            names += ["trace.jsonl"] if name == "replay" else []
            single.append(st.tuples(st.just(flag), st.sampled_from(names)).map(list))
        elif role == "input":
            names = ["trace.jsonl", "config.toml", "run", "measured.csv", "missing", "series.csv", "", "x" * 300]
            single.append(st.tuples(st.just(flag), st.sampled_from(names)).map(list))
        else:
            choices = list(getattr(param.type, "choices", ()))
            value = TEXTS | st.sampled_from(
                ["llama-3.1-8b", "h100-80gb", "a=qwen3-8b", "a=trace.jsonl", "4GiB", "auto"]
            )
            single.append(st.tuples(st.just(flag), st.sampled_from(choices) | value if choices else value).map(list))
    return st.lists(st.one_of(single), max_size=5).map(lambda lists: [word for words in lists for word in words])


NAMES = ["replay", "compare", "report", "story", "verify", "model show"]
# All that end by themselves; those that serve or talk to a server are told what they must refuse in other tests.
TALKING = ("mock", "serve model", "serve sessions", "watch")
ALL_NAMES = [name for name, call in CALLS.items() if not (name in TALKING or call.is_slow) and drawn_options(name)]


@pytest.mark.parametrize("name", NAMES)
@FEW
@given(data=st.data())
def test_options(name: str, kept: Path, data: st.DataObject) -> None:
    before = snapshot(kept)
    run([*name.split(), *CALLS[name].arguments, *data.draw(options(name))])
    check_inputs(kept, before)


KEYS = [
    "pages",
    "page_size",
    "cost",
    "offload",
    "slo",
    "models",
    "workload",
    "trace",
    "model",
    "device",
    "replicas",
    "concurrency",
    "speedup",
]
KEYS += ["kv_memory", "router", "audit", "health", "x"]


@FEW
@given(
    value=st.dictionaries(
        st.sampled_from(KEYS),
        JSON | st.integers(1, 9) | st.sampled_from(["linear", "llama-3.1-8b", "h100-80gb", "trace.jsonl"]),
        max_size=4,
    ),
    tail=st.text(max_size=10),
)  # fmt: skip
def test_configurations(kept: Path, value: dict[str, Any], tail: str) -> None:
    lines = [f"{key} = {toml_of(item)}" for key, item in value.items()]
    (kept / "config.toml").write_text("\n".join(lines) + tail, errors="replace")
    run(["replay", "trace.jsonl", "--config", "config.toml"])


def toml_of(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {toml_of(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_of, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps("" if value is None else value)


ROWS = st.fixed_dictionaries(
    {"timestamp": st.integers(0, 9) | JSON, "input_length": st.integers(1, 900) | JSON,
     "output_length": st.integers(1, 9) | JSON, "hash_ids": st.lists(st.integers(0, 9) | JSON, max_size=3)},
    optional={"session_id": JSON, "delay": JSON | st.integers(), "priority": JSON | st.integers(),
              "request_id": JSON, "output_token_ids": JSON | st.lists(st.integers())},
)  # fmt: skip


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv"])
@FEW
@given(rows=st.lists(ROWS | JSON, max_size=4), noise=st.binary(max_size=6), at=st.integers(0, 200), skip=st.booleans())
def test_traces(suffix: str, kept: Path, rows: list[Any], noise: bytes, at: int, skip: bool) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows).encode(errors="replace")
    if suffix == ".csv":
        text = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.680,7,9\n" + text.replace(b" ", b"")
    (kept / f"bad{suffix}").write_bytes(text[:at] + noise + text[at:])
    run(["replay", f"bad{suffix}", *(["--set", "skip_bad_lines=true"] if skip else [])])


def damaged(data: bytes, at: int, cut: int, noise: bytes) -> bytes:
    at %= len(data) + 1
    return data[:at] + noise + data[at + cut :]


RUN_FILES = ["report.json", "requests.jsonl", "distributions.json", "timeline.json.gz"]


@pytest.mark.parametrize("name", RUN_FILES)
@FEW
@given(at=st.integers(0, 10**5), cut=st.integers(0, 60), noise=st.binary(max_size=4), inside=st.booleans())
def test_run_directories(name: str, kept: Path, at: int, cut: int, noise: bytes, inside: bool) -> None:
    path = kept / "run" / name
    good = (kept / "good").read_bytes() if (kept / "good").exists() else path.read_bytes()
    (kept / "good").write_bytes(good)
    data = gzip.decompress(good) if inside and name.endswith(".gz") else good
    data = damaged(data, at, cut, noise)
    path.write_bytes(gzip.compress(data, 1) if inside and name.endswith(".gz") else data)
    run(["report", "run", "--html", "x.html"])
    run(["compare", "run", "measured.csv"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("measured.csv", ["compare", "run", "measured.csv"]),
        ("series.csv", ["compare", "run", "measured.csv", "--series", "series.csv"]),
        ("config.json", ["model", "show", "config.json"]),
    ],
)
@FEW
@given(at=st.integers(0, 2000), cut=st.integers(0, 30), noise=st.binary(max_size=4) | NUMBERS.map(str.encode))
def test_other_files(name: str, words: list[str], kept: Path, at: int, cut: int, noise: bytes) -> None:
    good = (kept / "good").read_bytes() if (kept / "good").exists() else (kept / name).read_bytes()
    (kept / "good").write_bytes(good)
    (kept / name).write_bytes(damaged(good, at, cut, noise))
    run(words)


@pytest.mark.long
@pytest.mark.parametrize("name", ALL_NAMES)
def test_options_for_long(name: str, kept: Path) -> None:
    """For KVARTS_FUZZ_S seconds in all, 600 unless it says otherwise: `-m long -k for_long`."""
    until_s = time.monotonic() + float(os.environ.get("KVARTS_FUZZ_S", "600")) / len(ALL_NAMES)

    @settings(max_examples=200, deadline=None, derandomize=False, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def fuzz(data: st.DataObject) -> None:
        words = data.draw(options(name))  # always, even with no time left: an example draws the same when it runs again
        if time.monotonic() < until_s:
            before = snapshot(kept)
            run([*name.split(), *CALLS[name].arguments, *words])
            check_inputs(kept, before)

    while time.monotonic() < until_s:
        fuzz()

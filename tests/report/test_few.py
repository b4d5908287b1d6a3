"""Replays and summaries without NumPy: the same bytes as with it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts import OffloadConfig, Slo, replay
from kvarts.few import Few

from builders.case import Case, cases
from builders.rooms import HAS_OFFLOAD, ROUTERS

ASKING = (
    "executor.base",
    "report.distributions",
    "report.report",
    "report.requests",
    "report.steps",
    "traffic.trace",
    "traffic.info",
)
"""Modules that ask whether NumPy pays."""

SLO = Slo(ttft_ms=30.0, tpot_ms=6.0, e2e_ms=400.0)


def summary(case: Case, **changes: object) -> bytes:
    return replay(case.trace(), case.config(slo=SLO, **changes)).to_json()


def without_arrays(case: Case, **changes: object) -> bytes:
    with pytest.MonkeyPatch.context() as patch:
        for name in ASKING:
            patch.setattr(import_module(f"kvarts.{name}"), "arrays_pay", lambda _: False)
        report = replay(case.trace(), case.config(slo=SLO, **changes))
        assert type(report.step_logs[0].numbers["used"]) is Few
        return report.to_json()


@pytest.mark.laws
@given(cases(), st.sampled_from(["linear:step_ms=3,context_token_ms=0.01", "polynomial"]))
def test_few_numbers_have_the_summary_of_arrays(case: Case, cost: str) -> None:
    from kvarts.executor.roofline import parse_cost

    assert without_arrays(case, cost=parse_cost(cost)) == summary(case, cost=parse_cost(cost))


@pytest.mark.laws
@pytest.mark.skipif(not HAS_OFFLOAD, reason="needs tiers")
@given(cases(max_requests=12))
def test_with_tiers(case: Case) -> None:
    offload = OffloadConfig(host_pages=8)
    assert without_arrays(case, offload=offload) == summary(case, offload=offload)


RUN = """
import sys
if {loads}:
    import numpy
from kvarts.__main__ import run
sys.argv = ["kvarts", *{arguments!r}]
run()
"""


def output(arguments: list[str], *, loads: bool) -> tuple[int, bytes, bytes]:
    code = RUN.format(loads=loads, arguments=arguments)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, env=os.environ)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "options",
    [
        ["--json"],
        ["--report", "-", "--replicas", "2", "--router", ROUTERS[-1]],
        ["--model", "qwen3-8b", "--device", "h100-80gb"],
        ["--profile", "mocker", "--slo-ttft-ms", "5"],
        ["--run-dir", "run"],
    ],
    ids=" ".join,
)
def test_a_process_that_has_not_loaded_numpy_writes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [
        f'{{"timestamp": {row * 40}, "input_length": {900 + row}, "output_length": {row % 90 + 1}, '
        f'"hash_ids": [0, {row % 7 + 1}]}}\n'
        for row in range(60)
    ]
    Path("t.jsonl").write_text("".join(lines))
    written = []
    for loads in (True, False):
        ran = output(["replay", "t.jsonl", "--pages", "400", *options], loads=loads)
        assert ran[0] == 0, ran[2]
        files = {path.name: path.read_bytes() for path in sorted(Path().rglob("*.json*")) if path.name != "run.json"}
        written.append((ran, files))
        for path in Path().glob("run/*"):
            path.unlink()
        if Path("run").is_dir():
            Path("run").rmdir()
    assert written[0] == written[1]

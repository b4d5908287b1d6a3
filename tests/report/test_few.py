"""Replays and summaries without NumPy: the same bytes as with it."""

from __future__ import annotations

import operator
import os
import subprocess
import sys
from importlib import import_module
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts import OffloadConfig, Slo, replay
from kvarts.few import PAYS, Few

from builders.case import ROUTERS, Case, cases

ASKING = (
    "columns",
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
            patch.setattr(import_module(f"kvarts.{name}"), "arrays_pay", lambda *_, **__: False)
        report = replay(case.trace(), case.config(slo=SLO, **changes))
        assert type(report.step_logs[0].numbers["used"]) is Few
        return report.to_json()


@pytest.mark.laws
@given(cases(), st.sampled_from(["linear:step_ms=3,context_token_ms=0.01", "polynomial"]))
def test_few_numbers_have_the_summary_of_arrays(case: Case, cost: str) -> None:
    from kvarts.executor.roofline import parse_cost

    assert without_arrays(case, cost=parse_cost(cost)) == summary(case, cost=parse_cost(cost))


@pytest.mark.laws
@given(cases(max_requests=12))
def test_with_tiers(case: Case) -> None:
    offload = OffloadConfig(host_pages=8)
    assert without_arrays(case, offload=offload) == summary(case, offload=offload)


SIZES = st.sampled_from([1, 5, 257, 300])
NUMBERS = st.one_of(st.integers(0, 3), st.integers(0, 255), st.integers(-3, 300), st.integers(0, 1 << 40))


@pytest.mark.laws
@given(st.lists(NUMBERS, min_size=1, max_size=7), st.lists(NUMBERS, min_size=1, max_size=5), SIZES, st.data())
def test_few_numbers_do_what_arrays_do(some: list[int], others: list[int], size: int, data: st.DataObject) -> None:
    """Small numbers and others, few of them and so many that results are looked up."""
    first, second = (list(islice(cycle(numbers), size)) for numbers in (some, others))
    few, array, others_few, other_array = Few(first), np.array(first), Few(second), np.array(second)
    for operation in (operator.add, operator.sub, operator.mul, operator.gt, operator.lt, operator.le, operator.eq):
        other = data.draw(NUMBERS, label="other")
        assert operation(few, other).tolist() == operation(array, other).tolist()
        assert operation(few, others_few).tolist() == operation(array, other_array).tolist()
    for operation in (operator.floordiv, operator.mod, operator.and_):
        other = data.draw(st.one_of(st.integers(1, 9), st.integers(1, 1 << 40)), label="other")
        assert operation(few, other).tolist() == operation(array, other).tolist()
    assert few.dot(others_few) == sum(one * other for one, other in zip(first, second, strict=True))
    assert (few / (others_few.clip(1))).tolist() == (array / other_array.clip(1)).tolist()
    mask, mask_array = few > others_few, array > other_array
    assert few[mask].tolist() == array[mask_array].tolist()
    assert Few.where(mask, few, others_few).tolist() == np.where(mask_array, array, other_array).tolist()
    assert (few.sum(), few.max(), few.all()) == (array.sum(), array.max(initial=0), bool(array.all()))
    few.sort()
    assert few.tolist() == sorted(first)


@given(st.lists(st.integers((1 << 53) - 2, (1 << 62) + 3), min_size=1))
def test_numbers_that_no_float_has(numbers: list[int]) -> None:
    assert (Few(numbers) / Few(numbers[::-1])).tolist() == (np.array(numbers) / np.array(numbers[::-1])).tolist()
    few = Few(numbers)
    few.sort()
    assert few.tolist() == sorted(numbers)


RUN = """
import sys
if {loads}:
    import numpy
import kvarts.few
kvarts.few.PAYS = {pays}
from kvarts.__main__ import run
sys.argv = ["kvarts", *{arguments!r}]
run()
"""


def output(arguments: list[str], *, loads: bool = False, pays: int = PAYS) -> tuple[int, bytes, bytes]:
    code = RUN.format(loads=loads, pays=pays, arguments=arguments)
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


@pytest.mark.slow
def test_it_makes_no_difference_where_numpy_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first leap, while rows are kept, before a summary, and never."""
    monkeypatch.chdir(tmp_path)
    lines = [
        f'{{"timestamp": {row * 40}, "input_length": {900 + row % 100}, "output_length": {row % 90 + 1}, '
        f'"hash_ids": [{row % 5}, {1000 + row % 11}]}}\n'
        for row in range(3000)
    ]
    Path("t.jsonl").write_text("".join(lines))
    replay_it = ["replay", "t.jsonl", "--pages", "900", "--profile", "mocker", "--json", "--slo-tpot-ms", "20"]
    code, written, _ = output(replay_it, pays=1 << 40)
    assert code == 0 and b'"num_completed": 3000' in written
    for pays in (0, 1 << 15, 100_000, 125_000, 1 << 17):
        assert output(replay_it, pays=pays)[:2] == (code, written), pays

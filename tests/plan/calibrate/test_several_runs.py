"""Runs of several models are fitted together; what they do not say stays guessed; predictions say how sure they are."""

from __future__ import annotations

import json
import tomllib
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from kvarts.base.errors import InputError, KvartsError
from kvarts.cli.commands import cli
from kvarts.cost.roofline import RooflineCost, parse_cost
from kvarts.cost.roofline_settings import FAR, NEAR, OWN, MeasuredOn, Uncertainty, shipped_constants
from kvarts.plan.calibrate import CalibrationRun, Measured, calibrate_runs, compare, fitting, load_measured, load_series
from kvarts.plan.calibrate.coefficients import cost_toml, names_of
from kvarts.plan.calibrate.comparison import load_replayed, replayed_of
from kvarts.plan.calibrate.experiment import CANDIDATES, design
from kvarts.plan.calibrate.run import FittedRun
from kvarts.sim.config import ReplayConfig, make_config
from kvarts.sim.replaying import replay

DENSE = {"model": "llama-3.1-8b", "device": "rtx-pro-6000", "pages": 4000, "max_batched_tokens": 2048}
SPLIT = {**DENSE, "model": "qwen3-32b", "tensor_parallel": 2}
THIRD = {**DENSE, "model": "qwen3-8b", "tensor_parallel": 2}
TRUTH = {
    "compute_efficiency": 0.73,
    "bandwidth_efficiency": 0.82,
    "attention_efficiency": 0.64,
    "step_us": 600.0,
    "sequence_us": 9.0,
    "link_efficiency": 0.28,
    "link_us": 40.0,
}


def made(config: ReplayConfig, num_requests: int = 30, seed: int = 0) -> Measured:
    """What an engine that is exactly TRUTH would have been measured to do."""
    rng = Random(seed)
    arrivals = [0, *sorted(rng.randrange(12 * 10**9) for _ in range(num_requests - 1))]
    columns = [arrivals, [rng.randrange(20, 3000) for _ in arrivals], [rng.randrange(2, 150) for _ in arrivals]]
    arrays = [np.array(values, np.int64) for values in columns]
    names, rows = [f"bench-{index}" for index in range(num_requests)], np.arange(num_requests)
    blank = Measured("made", names, rows, arrays[0], None, arrays[0], arrays[0], arrays[1], arrays[2])
    cost = msgspec.structs.replace(config.cost, **TRUTH)
    outcome = replayed_of(replay(blank.trace(), msgspec.structs.replace(config, cost=cost)))
    times = [np.rint(column * 1e6).astype(np.int64) for column in (outcome.first_token_ms, outcome.last_token_ms)]
    return msgspec.structs.replace(blank, first_token_ns=times[0], last_token_ns=times[1])


def run_of(settings: dict[str, Any], num_requests: int = 30) -> CalibrationRun:
    config = make_config(settings)
    return CalibrationRun(measured=made(config, num_requests), config=config, name=settings["model"])


@pytest.fixture(scope="module")
def both() -> Any:
    return calibrate_runs([run_of(DENSE), run_of(SPLIT)])


@pytest.mark.long
def test_two_runs_say_what_one_does_not(both: Any) -> None:
    """Each coefficient is within its stated uncertainty, and another model with another parallelism is predicted."""
    distances = [
        abs(np.log(both.cost.coefficient(name) / truth)) / both.uncertainty[name] for name, truth in TRUTH.items()
    ]
    assert max(distances) < 3
    assert np.median(distances) < 1.6
    assert all(of.overall.mean < 0.01 < 0.05 < of.before.mean for of in both.runs)
    wanted = run_of(THIRD)
    cost = msgspec.structs.replace(both.cost, llm="qwen3-8b", tensor_parallel=2)
    report = replay(wanted.measured.trace(), msgspec.structs.replace(wanted.config, cost=cost))
    outcome = compare(wanted.measured, replayed_of(report))
    assert outcome.mean < 0.05
    for metric, row in outcome.metrics.items():
        theirs, ours = row["mean"]
        assert report.spread is not None
        spread = report.spread[f"{metric}_ms"]["mean"]
        assert spread is not None
        assert abs(ours - theirs) < 2 * spread


@pytest.mark.long
def test_what_a_run_does_not_say_stays_guessed() -> None:
    """One request at a time, on one device, hardly feels the time of a sequence; and no link at all."""
    run = run_of(DENSE, 12)
    found = calibrate_runs([run])
    assert "sequence_us" in found.not_identified
    assert found.cost.sequence_us == pytest.approx(shipped_constants().values["sequence_us"], rel=0.3)
    assert "link_efficiency" not in found.uncertainty
    assert found.cost.link_efficiency is None
    for name, share in found.uncertainty.items():
        assert share < 1.05 * found.guessed[name]
    assert found.overall.mean < 0.01
    assert found.cost.uncertainty is not None
    for name, value in found.cost.uncertainty.elsewhere.items():  # a third of the way, after one run
        moved = np.log(value / run.cost.coefficient(name))
        assert moved == pytest.approx(found.moves[name] / 3, abs=1e-9)


@pytest.mark.long
def test_guesses_cost_little() -> None:
    run = run_of(DENSE, 20)
    free, guessed = calibrate_runs([run], guesses=0.0), calibrate_runs([run])
    assert guessed.overall.mean < free.overall.mean + 0.006


# Files ----------------------------------------------------------------------------------------------------


def write_run(folder: Path, name: str, settings: dict[str, Any], num_requests: int = 10) -> Path:
    measured = made(make_config(settings), num_requests)
    rows = [
        {"request_id": name, "arrival": int(a), "first_token": int(b), "last_token": int(c), "prompt_tokens": int(d),
         "output_tokens": int(e)}
        for name, a, b, c, d, e in zip(
            measured.request_ids, measured.arrival_ns, measured.first_token_ns, measured.last_token_ns,
            measured.prompt_tokens, measured.output_tokens, strict=True,
        )
    ]  # fmt: skip
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / f"{name}.toml"
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    path.write_text("\n".join([f'measured = "{name}.jsonl"', 'time_unit = "ns"', *lines]) + "\n")
    return path


@pytest.mark.long
def test_runs_are_described_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, few in {"NUM_SPREAD": 4, "ROUNDS": 6, "EVALUATIONS": 40, "POINTS": 6}.items():
        monkeypatch.setattr(fitting, name, few)
    dense, split = write_run(tmp_path, "dense", DENSE), write_run(tmp_path, "split", SPLIT)
    out = tmp_path / "cost.toml"
    result = CliRunner().invoke(cli, ["calibrate", str(dense), str(split), "--out", str(out), "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [run["name"] for run in report["runs"]] == ["dense.toml", "split.toml"]
    cost = parse_cost(str(out))
    assert isinstance(cost, RooflineCost)
    assert cost.uncertainty is not None
    assert [each.tensor_parallel for each in cost.uncertainty.measured] == [1, 2]
    assert report["cost"]["link_us"] == cost.link_us
    # Latencies of a replay with it say how uncertain they are; of the measured model least, of another device most.
    spreads = []
    for more in ([], ["--model", "qwen3-8b", "--tensor-parallel", "1"], ["--device", "l40s"]):
        arguments = ["replay", "--cost", str(out), "--pages", "9000", *more, "--json"]
        result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
        assert result.exit_code == 0, result.output
        summary = json.loads(result.stdout)
        spreads.append(summary["uncertainty"]["tpot_ms"]["mean"] / summary["tpot_ms"]["mean"])
    assert 0 < spreads[0] < spreads[1] < spreads[2]
    table = CliRunner().invoke(cli, ["replay", "--cost", str(out), "--pages", "9000"]).stdout
    assert "±" in table


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ('device = "rtx-4090"\n', "measured: is missing"),
        ('measured = "dense.jsonl"\n', "model and device are missing"),
        ('measured = "dense.jsonl"\nfit_on = "x"\n', "fit_on: 'x' is no fit_on"),
        ('measured = "dense.jsonl"\nmodle = "x"\n', "modle: unknown key"),
        ('measured = "none.jsonl"\nmodel = "qwen3-8b"\ndevice = "l40s"\n', "none.jsonl"),
        ('measured = "dense.jsonl"\ncolumns = { arrival = 3 }\n', "columns.arrival: 3 is not a name"),
    ],
)
def test_a_run_that_is_described_badly_is_named(tmp_path: Path, change: str, says: str) -> None:
    write_run(tmp_path, "dense", DENSE)
    path = tmp_path / "bad.toml"
    path.write_text(change)
    result = CliRunner().invoke(cli, ["calibrate", str(path)])
    assert result.exit_code != 0
    assert says in str(result.exception) + result.output


def test_what_is_of_one_run_is_not_said_of_several(tmp_path: Path) -> None:
    paths = [str(write_run(tmp_path, name, DENSE)) for name in ("a", "b")]
    result = CliRunner().invoke(cli, ["calibrate", *paths, "--set", "fit_on=4"])
    assert "--set fit_on: is of one run, and there are several" in str(result.exception) + result.output


# Uncertainty ----------------------------------------------------------------------------------------------


def test_alternatives_have_the_covariance() -> None:
    """Along all axes together, coefficients move as their covariance and that of the time of all steps say."""
    names = ("compute_efficiency", "step_us", "link_us")
    known = np.array([[0.04, 0.01, 0.0], [0.01, 0.09, 0.02], [0.0, 0.02, 0.16]])
    on = MeasuredOn(llm="llama-3.1-8b", device="l40s", tensor_parallel=2)
    uncertainty = Uncertainty(coefficients=names, covariance=tuple(map(tuple, known.tolist())), measured=(on,))
    cost = RooflineCost(llm="llama-3.1-8b", device="l40s", tensor_parallel=2, uncertainty=uncertainty)
    slower = {"compute_efficiency": -1, "step_us": 1, "link_us": 1}
    other = msgspec.structs.replace(cost, llm="qwen3-8b")
    for each, share in ((cost, OWN), (other, NEAR), (msgspec.structs.replace(cost, device="a10"), FAR)):
        assert uncertainty.share_of(each.measured_on) == share
        moves = [
            [np.log(above.coefficient(name) / each.coefficient(name)) for name in names]
            for above, below in each.alternatives()
            if above.uncertainty is None and below.uncertainty is None
        ]
        signs = np.array([slower[name] for name in names])
        total = np.array(moves).T @ np.array(moves)
        assert total == pytest.approx(known + share**2 * np.outer(signs, signs), abs=2e-5)
    assert RooflineCost(llm="llama-3.1-8b", device="l40s").alternatives() == []


def fitted_on(llm: str, device: str, tensor_parallel: int) -> RooflineCost:
    """A roofline as a calibration writes it: fitted to one run, and with other constants for what was not measured."""
    on = MeasuredOn(llm=llm, device=device, tensor_parallel=tensor_parallel)
    uncertainty = Uncertainty(
        coefficients=("step_us", "link_us"),
        covariance=((0.01, 0.0), (0.0, 0.04)),
        measured=(on,),
        elsewhere={"step_us": 300.0, "link_us": 40.0},
        deviations={"step_us": 0.4, "link_us": 0.2},
    )
    return RooflineCost(
        llm=llm,
        device=device,
        tensor_parallel=tensor_parallel,
        step_us=500.0,
        link_us=70.0,
        uncertainty=uncertainty,
    )


def test_constants_of_a_fit_hold_for_what_was_measured_and_in_part_elsewhere(tmp_path: Path) -> None:
    cost = fitted_on("llama-3.1-8b", "l40s", 2)
    assert cost.placed(kv_dtype="fp8").step_us == 500.0
    for changes in ({"llm": "qwen3-8b"}, {"tensor_parallel": 1}, {"device": "a10"}):
        other = cost.placed(**changes)
        assert (other.step_us, other.link_us) == (300.0, 40.0)
    over_nvlink = cost.placed(device="h100-80gb")
    assert over_nvlink.step_us == 300.0
    assert over_nvlink.link_us is None  # measured over PCIe
    path = tmp_path / "cost.toml"
    path.write_text(cost_toml(cost, {"step_us": 0.1}, ["a run"]))
    assert parse_cost(str(path)) == cost
    own, other = (make_config({"cost": str(path), "model": model}).cost for model in ("llama-3.1-8b", "qwen3-8b"))
    assert (own.step_us, other.step_us) == (500.0, 300.0)


@pytest.mark.parametrize("name", ["two\nlines = 1", "tab\there", "a \x07 bell", "\x7f", "\u2028", 'quo"te', "käse"])
def test_a_cost_model_is_read_back_whatever_its_run_is_called(tmp_path: Path, name: str) -> None:
    cost = fitted_on("llama-3.1-8b", "l40s", 2)
    path = tmp_path / "cost.toml"
    path.write_text(cost_toml(cost, {"step_us": 0.1, "link_us": float("inf")}, [name]))
    assert parse_cost(str(path)) == cost
    assert tomllib.loads(path.read_text())["uncertainty"] == {"step_us": 0.1}


def test_what_was_not_measured_is_less_certain() -> None:
    cost = fitted_on("llama-3.1-8b", "l40s", 2)
    other = cost.placed(llm="qwen3-8b")
    moves = [
        [np.log(above.coefficient(name) / other.coefficient(name)) for name in ("step_us", "link_us")]
        for above, _ in other.alternatives()
    ]
    total = np.array(moves).T @ np.array(moves)
    apart = np.diag([0.01 + 0.4**2, 0.04 + 0.2**2])
    assert total == pytest.approx(apart + NEAR**2, abs=2e-5)


@pytest.mark.parametrize(
    ("posterior", "says"),
    [
        (
            "coefficients = ['step_us']\ncovariance = [[1.0]]\nelsewhere = {link_us = 3.0}",
            "posterior.elsewhere: 'link_us' was not fitted",
        ),
        ("coefficients = ['step_us']\ncovariance = [[-1.0]]", "posterior.covariance: is no covariance"),
        ("coefficients = ['step_us']\ncovariance = [[1.0, 2.0]]", "posterior.covariance: must have 1 rows"),
        ("coefficients = ['step_ms']\ncovariance = [[1.0]]", "posterior.coefficients: 'step_ms' is not one"),
        ("coefficients = ['step_us']\ncovariance = [['x']]", "posterior.covariance"),
        ("coefficients = []\ncovariance = []", "posterior.coefficients"),
        ("covariance = []", "posterior"),
    ],
)
def test_an_uncertainty_that_is_none_is_named(tmp_path: Path, posterior: str, says: str) -> None:
    path = tmp_path / "cost.toml"
    path.write_text(f'[cost]\nmodel = "roofline"\nllm = "qwen3-8b"\ndevice = "l40s"\n[posterior]\n{posterior}\n')
    with pytest.raises(KvartsError) as caught:
        parse_cost(str(path))
    assert says in str(caught.value)


# Repairs --------------------------------------------------------------------------------------------------


def test_requests_are_matched_by_id_not_by_row(tmp_path: Path) -> None:
    config = make_config(DENSE)
    measured = made(config, 12)
    rows = replay(measured.trace(), config).requests_jsonl().splitlines(keepends=True)
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b"".join(rows))
    in_order = compare(measured, load_replayed(path))
    Random(1).shuffle(rows)
    path.write_bytes(b"".join(rows))
    assert compare(measured, load_replayed(path)) == in_order
    assert compare(measured, load_replayed(path), some=slice(3)) == compare(
        measured, replayed_of(replay(measured.trace(), config)), some=slice(3)
    )
    renamed = msgspec.structs.replace(measured, request_ids=["x", *measured.request_ids[1:]])
    with pytest.raises(InputError, match="holds request 'x', which the replay does not"):
        compare(renamed, load_replayed(path))
    longer = msgspec.structs.replace(measured, output_tokens=measured.output_tokens + 1)
    with pytest.raises(InputError, match="output tokens for request 'bench-0', the replay"):
        compare(longer, load_replayed(path))


@pytest.mark.parametrize("head", ["t,running,waiting,kv_cache_pct", "t,running,waiting"])
def test_kv_use_that_was_not_recorded_is_left_out(tmp_path: Path, head: str) -> None:
    path = tmp_path / "series.csv"
    zero = ",0.0" if "kv" in head else ""
    path.write_text("\n".join([head, *(f"{second},3,1{zero}" for second in range(1, 9))]) + "\n")
    series = load_series(path)
    assert series.kv_pct is None
    assert series.left_out is not None
    assert "left out" in series.left_out
    config = make_config(DENSE)
    measured = made(config, 8)
    replayed = replayed_of(replay(measured.trace(), config))
    comparison = compare(measured, replayed, series)
    assert comparison.kv_error_points is None
    assert comparison.peak_waiting is not None
    run = CalibrationRun(measured=measured, config=config)
    plain, with_series = (FittedRun(msgspec.structs.replace(run, series=each), None) for each in (None, series))
    assert plain.residuals(run.cost).tolist() == with_series.residuals(run.cost).tolist()


def test_kv_use_that_is_0_where_nothing_runs_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "series.csv"
    path.write_text("t,running,waiting,kv_cache_pct\n1,0,0,0\n2,0,0,0\n")
    assert load_series(path).kv_pct is not None


# Load generators ------------------------------------------------------------------------------------------


def test_results_of_load_generators_are_read(tmp_path: Path) -> None:
    """The same two requests, as each of them writes it; a third failed."""
    bench = {
        "input_lens": [10, 20, 5], "output_lens": [3, 2, 0], "start_times": [100.0, 100.5, 101.0],
        "ttfts": [0.25, 0.5, 0.0], "itls": [[0.125, 0.125], [0.25], []], "errors": ["", "", "timeout"],
    }  # fmt: skip
    guidellm = {
        "benchmarks": [{"requests": {"successful": [
            {"prompt_tokens": 10, "output_tokens": 3, "request_start_time": 100.0, "first_token_time": 100.25,
             "last_token_time": 100.5},
            {"prompt_tokens": 20, "output_tokens": 2, "start_time": 100.5, "first_token_time": 101.0,
             "last_token_time": 101.25},
        ]}}],
    }  # fmt: skip

    def record(start_ns: int, ttft_ms: float, e2e_ms: float, prompt: int, output: int) -> str:
        metrics = {
            "request_latency": {"value": e2e_ms, "unit": "ms"}, "time_to_first_token": {"value": ttft_ms, "unit": "ms"},
            "input_sequence_length": {"value": prompt, "unit": "tokens"},
            "output_sequence_length": {"value": output, "unit": "tokens"},
        }  # fmt: skip
        return json.dumps({"metadata": {"request_start_ns": start_ns}, "metrics": metrics, "error": None})

    failed = json.dumps({"metadata": {"request_start_ns": 5}, "metrics": None, "error": {"code": 500}})
    aiperf = [record(100 * 10**9, 250, 500, 10, 3), record(1005 * 10**8, 500, 750, 20, 2), failed]
    for name, text in (
        ("bench.json", json.dumps(bench)),
        ("pretty.json", json.dumps(bench, indent=1)),
        ("guidellm.json", json.dumps(guidellm)),
        ("profile_export.jsonl", "\n".join(aiperf)),
    ):
        path = tmp_path / name
        path.write_text(text)
        measured = load_measured(path)
        assert measured.prompt_tokens.tolist() == [10, 20], name
        assert measured.output_tokens.tolist() == [3, 2]
        assert measured.arrival_ns.tolist() == [0, 500_000_000]
        assert measured.first_token_ns.tolist() == [250_000_000, 1_000_000_000]
        assert measured.last_token_ns.tolist() == [500_000_000, 1_250_000_000]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"input_lens": [1], "output_lens": [1]}', "ttfts"),
        (
            '{"input_lens": [1], "output_lens": [1], "ttfts": [], "itls": [], "start_times": [0]}',
            "ttfts: has 0 values, and input_lens 1",
        ),
        (
            '{"input_lens": [1], "output_lens": [0], "ttfts": [0], "itls": [[]], "start_times": [0]}',
            "has no request that succeeded",
        ),
        ('{"benchmarks": [{"requests": {"successful": [{"prompt_tokens": -1}]}}]}', "prompt_tokens"),
        ('{"metadata": {"request_start_ns": 1}, "metrics": {"request_latency": 3}}', "metrics"),
    ],
)
def test_results_that_do_not_add_up_are_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_measured(path)
    assert says in str(caught.value)


# What to measure ------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_design_says_what_each_benchmark_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "POINTS", 4)
    candidates = [each for each in CANDIDATES if each.name in ("light-short", "heavy-short", "small-light")]
    proposals, unknown = design(make_config(DENSE), candidates)
    assert proposals
    names = [name for proposal in proposals for name in proposal.identifies]
    assert len(set(names)) == len(names)
    assert sorted([*names, *unknown]) == sorted(names_of([make_config(DENSE).cost]))
    for before, after in pairwise(proposals):
        for name in names:
            assert after.uncertainty[name] < 1.1 * before.uncertainty[name]
    # What it would say is what a fit says.
    blank = proposals[0].bench.blank()
    assert len(blank) == proposals[0].bench.num_prompts
    assert f"--num-prompts {len(blank)}" in proposals[0].bench.command("x")


def test_a_design_is_asked_for_without_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "POINTS", 2)
    monkeypatch.setattr(design, "__defaults__", (CANDIDATES[:1],))
    asked = ["calibrate", "--design", "--model", "qwen3-8b", "--device", "l40s"]
    result = CliRunner().invoke(cli, asked)
    assert result.exit_code == 0, result.output
    assert "vllm bench serve" in result.stdout or "guesses will stand" in result.stdout
    for more, says in (
        ([str(tmp_path / "a.toml")], "nor with --design"),
        (["--set", "fit_on=3"], "--set fit_on: has no effect with --design"),
    ):
        result = CliRunner().invoke(cli, [*asked, *more])
        assert says in str(result.exception) + result.output
    result = CliRunner().invoke(cli, ["calibrate"])
    assert "is missing" in str(result.exception) + result.output
    with pytest.raises(KvartsError, match="only the roofline"):
        design(ReplayConfig())

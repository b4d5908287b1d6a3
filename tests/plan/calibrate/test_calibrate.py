"""Calibration: it finds what is there to be found, says what is not, and refuses what does not add up."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from kvarts.base.errors import ConfigError, InputError, KvartsError, MissingFileError
from kvarts.core.sched.plan import Batch, Chunk
from kvarts.cost.roofline import COEFFICIENTS, RooflineCost, parse_cost
from kvarts.plan.calibrate import Measured, calibrate, compare, fit_steps, load_measured, load_series
from kvarts.plan.calibrate.coefficients import uncertainty_of
from kvarts.plan.calibrate.comparison import latencies_ms, load_replayed, render_page, replayed_of
from kvarts.plan.calibrate.stepfit import StepRecord, is_step_record, load_steps
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.traffic.mooncake import load_mooncake
from kvarts.sim.traffic.trace import Trace

RUN = Path(str(files("kvarts") / "data" / "vllm-rtx4090"))
GUESS = RooflineCost(llm="llama-3.1-8b", device="rtx-4090")
TRUTH = msgspec.structs.replace(
    GUESS,
    compute_efficiency=0.78,
    bandwidth_efficiency=0.83,
    attention_efficiency=0.67,
    step_us=450.0,
    sequence_us=7.0,
)
"""An engine about one standard deviation from the constants that ship, in each of these."""
# What a calibration on the bundled run found; the accuracy page has the command.
FOUND = parse_cost(str(RUN / "cost.toml"))
ENGINE = ReplayConfig(num_pages=2587, page_size=16, max_num_batched_tokens=2048, max_num_seqs=256, cost=GUESS)


def bundled() -> tuple[Measured, Trace]:
    return load_measured(RUN / "requests.jsonl"), load_mooncake(RUN / "prompts.jsonl", trace_block_size=16)


def made(num_requests: int, seed: int = 0) -> Measured:
    """What an engine that is exactly TRUTH would have been measured to do."""
    rng = Random(seed)
    arrivals = sorted(rng.randrange(8 * 10**9) for _ in range(num_requests))
    arrivals[0] = 0
    prompts = [rng.randrange(20, 1500) for _ in arrivals]
    outputs = [rng.randrange(1, 120) for _ in arrivals]
    arrays = [np.array(values, np.int64) for values in (arrivals, prompts, outputs)]
    blank = Measured(
        name="made",
        request_ids=[str(index) for index in range(num_requests)],
        rows=np.arange(num_requests),
        arrival_ns=arrays[0],
        scheduled_ns=None,
        first_token_ns=arrays[0],
        last_token_ns=arrays[0],
        prompt_tokens=arrays[1],
        output_tokens=arrays[2],
    )
    rows = replayed_of(replay(blank.trace(), msgspec.structs.replace(ENGINE, cost=TRUTH)))
    return msgspec.structs.replace(
        blank,
        first_token_ns=np.rint(rows.first_token_ms * 1e6).astype(np.int64),
        last_token_ns=np.rint(rows.last_token_ms * 1e6).astype(np.int64),
    )


# The bundled run ------------------------------------------------------------------------------------------


def test_the_bundled_run_is_read_whole() -> None:
    measured, prompts = bundled()
    assert len(measured) == 300
    assert measured.prompt_tokens.sum() == 257_239
    assert measured.output_tokens.sum() == 195_753
    ttft = latencies_ms(measured)["ttft"]
    assert ttft.mean() == pytest.approx(65_456.6, abs=0.1)  # as those who measured it say
    assert measured.trace(prompts).unit_tokens == 16


def test_a_replay_with_the_fitted_coefficients_is_within_one_per_cent() -> None:
    measured, prompts = bundled()
    report = replay(measured.trace(prompts), msgspec.structs.replace(ENGINE, cost=FOUND))
    comparison = compare(measured, replayed_of(report), load_series(RUN / "timeseries.csv"))
    assert comparison.worst < 0.01
    assert comparison.to_builtins()["kv_error_points"] < 2.0
    assert comparison.to_builtins()["peak_waiting"] == (234, 235)
    uncalibrated = compare(measured, replayed_of(replay(measured.trace(prompts), ENGINE)))
    assert uncalibrated.worst < 0.1


@pytest.mark.long
def test_a_calibration_on_the_bundled_run() -> None:
    """Within 1 % on the requests it was fitted to, and near that on those it never saw."""
    measured, prompts = bundled()
    series = load_series(RUN / "timeseries.csv")
    found = calibrate(measured, ENGINE, prompts=prompts, series=series)
    assert found.overall.worst < 0.01
    assert found.overall.kv_error_points is not None
    assert found.overall.kv_error_points < 2.0
    half = calibrate(measured, ENGINE, prompts=prompts, series=series, fit_on=150)
    assert half.held_out is not None
    assert half.held_out.num_requests == 150
    assert half.held_out.worst < 0.04


# Finding what is there ------------------------------------------------------------------------------------


@pytest.mark.long
def test_what_made_the_run_is_found() -> None:
    measured = made(40)
    found = calibrate(measured, ENGINE)
    assert found.before.worst > 0.1
    assert found.overall.mean < 0.005
    assert found.overall.worst < 0.025
    assert found.cost.compute_efficiency == pytest.approx(TRUTH.compute_efficiency, rel=0.1)
    assert found.cost.bandwidth_efficiency == pytest.approx(TRUTH.bandwidth_efficiency, rel=0.1)
    # Another model on the same device, which nothing was fitted to.
    other = {"llm": "qwen3-8b"}
    truth, guess = (msgspec.structs.replace(cost, **other) for cost in (TRUTH, found.cost))
    theirs, ours = (
        replayed_of(replay(measured.trace(), msgspec.structs.replace(ENGINE, cost=cost))) for cost in (truth, guess)
    )
    # A request that comes just before a step or just after it may end much sooner or later.
    assert np.quantile(np.abs(ours.last_token_ms / theirs.last_token_ms - 1), 0.95) < 0.025


@pytest.mark.long
def test_the_same_input_gives_the_same_coefficients_with_any_number_of_processes() -> None:
    measured = made(12)
    first, second = (calibrate(measured, ENGINE, fit_on=8, seed=3, workers=workers) for workers in (1, 2))
    assert first.cost == second.cost
    assert first.uncertainty == second.uncertainty
    assert first.num_replays == second.num_replays
    assert first.to_toml() == second.to_toml()
    assert first.held_out is not None
    assert first.held_out.num_requests == 4


def records(*, with_chunks: bool) -> list[StepRecord]:
    """Without chunks, too few decodes to be bound by anything but memory."""
    rng = Random(1)
    out = []
    for _ in range(200):
        decodes = rng.randrange(1, 200 if with_chunks else 40)
        chunks = [(0, rng.randrange(16, 2048), 2048)] if with_chunks and rng.random() < 0.4 else []
        known = decodes * rng.randrange(1, 2000)
        batch = Batch(tuple(Chunk(start, count, all_, all_) for start, count, all_ in chunks), decodes, known, 1)
        out.append(
            StepRecord(duration_ns=TRUTH.step_ns(batch), num_decodes=decodes, decode_known_tokens=known, chunks=chunks)
        )
    return out


def test_steps_say_it_at_once() -> None:
    found = fit_steps(records(with_chunks=True), GUESS)
    for name in found.uncertainty:
        assert getattr(found.cost, name) == pytest.approx(getattr(TRUTH, name), rel=0.01)
    assert found.p90_error < 0.001
    assert found.not_identified == []


@pytest.mark.long
def test_what_the_data_do_not_say_is_said() -> None:
    """Decodes alone never reach the device's arithmetic, and all read the weights once, as often as there are steps."""
    start = msgspec.structs.replace(GUESS, bandwidth_efficiency=0.8, step_us=1500.0)
    found = fit_steps(records(with_chunks=False), start)
    assert found.not_identified == ["compute_efficiency", "step_us"]
    # What the step takes more, reading the weights takes less; that is a small part of it.
    error = abs(found.cost.bandwidth_efficiency / TRUTH.bandwidth_efficiency - 1)
    assert error / 2 < found.uncertainty["bandwidth_efficiency"] < 0.2
    assert found.p90_error < 0.001
    assert found.cost.attention_efficiency == pytest.approx(TRUTH.attention_efficiency, rel=0.01)


# What cannot be -------------------------------------------------------------------------------------------

ROW: dict[str, Any] = {
    "request_id": "a",
    "arrival": 1.0,
    "scheduled": 1.5,
    "first_token": 2.0,
    "last_token": 3.0,
    "prompt_tokens": 10,
    "output_tokens": 4,
}


def write_csv(path: Path, *rows: dict[str, Any]) -> Path:
    lines = [",".join(rows[0]), *(",".join(str(value) for value in row.values()) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_no_uncertainty_is_lost_to_rounding() -> None:
    """What data hardly feel has a variance near nothing, which rounding must not take below it."""
    for seed in range(200):
        random = np.random.default_rng(seed)
        jacobian = random.standard_normal((12, 5)) * 10.0 ** random.uniform(-6, 0, (1, 5))
        jacobian[:, 1] = 0.0
        uncertainty = uncertainty_of(random.standard_normal(12), jacobian)
        assert all(share >= 0.0 for share in uncertainty.values())
        assert uncertainty[COEFFICIENTS[1]] == float("inf")


def test_columns_may_have_other_names_and_units(tmp_path: Path) -> None:
    row = {"when": 1000, "ttft_at": 1500, "done": 2500, "prompt_tokens": 7, "output_tokens": 2, "note": "x"}
    later = {**row, "when": 900}
    path = write_csv(tmp_path / "run.csv", row, later)
    columns = {"arrival": "when", "first_token": "ttft_at", "last_token": "done"}
    measured = load_measured(path, columns=columns, time_unit="ms")
    assert measured.arrival_ns.tolist() == [0, 100_000_000]
    assert measured.rows.tolist() == [1, 0]
    assert measured.scheduled_ns is None
    assert measured.request_ids == ["1", "0"]


COUNT = "must be a whole number, at least 1 and at most 2,147,483,647"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"arrival": "soon"}, "run.csv:3: arrival: 'soon' is not a number"),
        ({"arrival": ""}, "run.csv:3: arrival: is missing"),
        ({"arrival": "nan"}, "run.csv:3: arrival: 'nan' is not a number"),
        ({"scheduled": 0.5}, "run.csv:3: scheduled: is 0.5 before arrival: the clock runs backwards"),
        ({"last_token": 1.9}, "run.csv:3: last_token: is 0.1 before first_token: the clock runs backwards"),
        (
            {"prompt_tokens": 0},
            f"run.csv:3: prompt_tokens: {COUNT}, got 0",
        ),
        (
            {"output_tokens": 1.5},
            f"run.csv:3: output_tokens: {COUNT}, got 1.5",
        ),
        ({"request_id": "a"}, "run.csv:3: request_id: 'a' is in line 2 already"),
    ],
)
def test_a_row_that_does_not_add_up_is_named(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = write_csv(tmp_path / "run.csv", ROW, {**ROW, "request_id": "b", **change})
    with pytest.raises(InputError) as caught:
        load_measured(path)
    assert str(caught.value).endswith(says)


def test_a_run_that_took_no_time_is_refused(tmp_path: Path) -> None:
    """Its errors were infinite, and NumPy warned of them."""
    rows = [{**ROW, "request_id": name, "scheduled": at, "first_token": at, "last_token": at, "arrival": at}
            for name, at in (("a", 1.0), ("b", 2.0))]  # fmt: skip
    with pytest.raises(InputError, match=r"run\.csv: last_token: is when each request arrived: it took no time"):
        load_measured(write_csv(tmp_path / "run.csv", *rows))


def test_a_file_that_is_no_run_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    with pytest.raises(MissingFileError):
        load_measured(path)
    for text, says in (
        ("", "holds no request"),
        ("arrival,first_token\n1,2\n", "run.csv:2: last_token: is missing. Give --set column=last_token=NAME"),
        ('{"queued_ts": 1\n', "run.csv:1: is not JSON"),
        ("arrival,first_token\n1\n", "run.csv:2: has another number of columns"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=says.replace("(", r"\(")):
            load_measured(path)
    with pytest.raises(ConfigError, match="time_unit"):
        load_measured(path, time_unit="fortnight")
    with pytest.raises(ConfigError, match="columns: 'ttft' is not a field"):
        load_measured(path, columns={"ttft": "x"})


def test_prompts_of_other_requests_are_refused(tmp_path: Path) -> None:
    measured, _ = bundled()
    rows = (RUN / "prompts.jsonl").read_text().splitlines()
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(rows[:-1]) + "\n")
    with pytest.raises(InputError, match="has 299 rows for 300"):
        measured.trace(load_mooncake(path, trace_block_size=16))
    path.write_text("\n".join([rows[1], rows[0].replace('"timestamp":0', '"timestamp":400'), *rows[2:]]) + "\n")
    with pytest.raises(InputError, match="says 1034 prompt tokens; measured were 2358"):
        measured.trace(load_mooncake(path, trace_block_size=16))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("t,running,waiting,kv_cache_pct\n1,2,x,4\n", "series.csv:2: waiting: 'x' is not a number"),
        ("t,running,waiting,kv_cache_pct\n1,2,-3,4\n", "series.csv:2: waiting: '-3' is out of range"),
        ("t,running,waiting,kv_cache_pct\n1,2,3,4\n1,2,3,4\n", "series.csv:3: t: the clock runs backwards"),
        ("t,running,waiting,kv_cache_pct\n", "holds no samples"),
    ],
)
def test_a_series_that_does_not_add_up_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "series.csv"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_series(path)
    assert str(caught.value).endswith(says)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"duration_ns": 0}, "duration_ns: must be above 0"),
        ({"num_decodes": 5}, "decode_known_tokens: 5 decodes cannot know 4 tokens"),
        ({"chunks": [[4, 0, 9]]}, "chunks: [4, 0, 9] is not a valid chunk"),
        ({"chunks": [[4, 6, 9]]}, "chunks: [4, 6, 9] is not a valid chunk"),
        ({"num_decodes": 0, "decode_known_tokens": 0}, "num_decodes: is 0 in a step without chunks"),
        ({"num_decodes": "x"}, "Expected `int`, got `str`"),
    ],
)
def test_a_step_that_does_not_add_up_is_named(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = tmp_path / "steps.jsonl"
    step = {"duration_ns": 10, "num_decodes": 2, "decode_known_tokens": 4}
    path.write_text(json.dumps(step) + "\n" + json.dumps({**step, **change}) + "\n")
    assert is_step_record(path)
    with pytest.raises(InputError) as caught:
        load_steps(path)
    assert f"{path}:2" in str(caught.value)
    assert says in str(caught.value)


def test_calibration_refuses_what_it_cannot_do() -> None:
    measured = made(6)
    for config, fit_on, says in (
        (ReplayConfig(), None, "only the roofline"),
        (ENGINE, 1, "fit_on: must be from 2 to 6"),
        (msgspec.structs.replace(ENGINE, num_pages=3), None, "too small for some of the measured requests"),
    ):
        with pytest.raises(KvartsError, match=says):
            calibrate(measured, config, fit_on=fit_on)


# Files ----------------------------------------------------------------------------------------------------


def test_a_run_directory_is_compared(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from kvarts.cli.commands import cli

    cost = RUN / "cost.toml"
    run, page = tmp_path / "run", tmp_path / "compare.html"
    engine = ["--pages", "2587", "--max-batched-tokens", "2048", "--trace-block-size", "16"]
    invoke = CliRunner().invoke
    result = invoke(cli, ["replay", str(RUN / "prompts.jsonl"), "--cost", str(cost), *engine, "--run-dir", str(run)])
    assert result.exit_code == 0
    arguments = ["compare", str(run), str(RUN / "requests.jsonl"), "--series", str(RUN / "timeseries.csv")]
    result = invoke(cli, [*arguments, "--html", str(page), "--json"])
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    assert abs(answer["ttft"]["mean"]["error"]) < 0.01
    assert answer["kv_error_points"] < 2.0
    html = page.read_text()
    assert "requests.jsonl" in html
    assert html.count("<script") == 4
    assert "http" not in html.replace("http://www.w3.org", "").split("<script>")[0]
    with pytest.raises(InputError, match="holds 5 requests, the replay 300"):
        compare(made(5), load_replayed(run))


def test_what_a_page_is_told_cannot_end_it() -> None:
    measured = msgspec.structs.replace(made(3), name="</script><b>")
    rows = replayed_of(replay(measured.trace(), ENGINE))
    page = render_page(measured, rows, None, compare(measured, rows)).decode()
    assert "</script><b>" not in page


def test_requests_without_an_end_cannot_be_compared(tmp_path: Path) -> None:
    report = replay(made(6).trace(), msgspec.structs.replace(ENGINE, num_pages=40))
    path = tmp_path / "requests.jsonl"
    path.write_bytes(report.requests_jsonl())
    with pytest.raises(InputError, match="was rejected, and never ended"):
        load_replayed(path)
    with pytest.raises(MissingFileError):
        load_replayed(tmp_path / "none.jsonl")

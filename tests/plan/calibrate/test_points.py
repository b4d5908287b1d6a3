"""Tables of measured points: how they are read, that pricing their courses equals replaying, and what fits find."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from kvarts.base.errors import ConfigError, InputError, KvartsError
from kvarts.cli.commands import cli
from kvarts.cost.roofline import RooflineCost
from kvarts.cost.roofline_settings import COEFFICIENTS, Constants, load_constants, shipped_constants
from kvarts.plan.calibrate.joint_fit import Errors, fit_points, halves_of, record, test_halves
from kvarts.plan.calibrate.schedule import Course, Point, course_of, load_points, usable, with_constants
from kvarts.sim.replaying import replay

test_halves.__test__ = False  # type: ignore[attr-defined]

HEADER = "source,engine,model,gpu,tp,dp,weight,isl,osl,ratio,load,level,requests,tok_s_gpu,ttft_ms,tpot_ms"
SHORT: dict[str, Any] = {"isl": 300, "osl": 40, "requests": 30}
POINTS = [
    Point(model="llama-3.1-8b", gpu="h100-80gb", load="closed", level=4, **SHORT),
    Point(model="llama-3.1-8b", gpu="h100-80gb", load="closed", level=16, ratio=0.5, engine="sglang", **SHORT),
    Point(model="llama-3.1-70b", gpu="h200", load="closed", level=8, tp=4, weight="fp8", engine="vllm", **SHORT),
    Point(model="qwen3-30b-a3b", gpu="b200", load="offline", level=30, weight="nvfp4", engine="trtllm", **SHORT),
    Point(model="qwen3-30b-a3b", gpu="h100-80gb", load="closed", level=12, dp=2, ep=2, **SHORT),
    Point(model="gpt-oss-20b", gpu="h100-80gb", load="closed", level=6, engine="vllm", version="0.11.0", **SHORT),
    Point(model="mistral-nemo", gpu="h100-80gb", load="open", level=3.0, cached=True, engine="vllm", **SHORT),
    Point(model="mixtral-8x7b", gpu="h100-80gb", load="open", level=5.0, tp=2, engine="vllm", **SHORT),
]


@pytest.fixture(scope="module")
def courses() -> list[Course]:
    return record(POINTS, shipped_constants(), None)


@pytest.mark.parametrize("number", range(len(POINTS)))
def test_a_course_that_is_priced_equals_a_replay(number: int, courses: list[Course]) -> None:
    """Under an open load as well, as long as the constants are those of the replay."""
    point, course = POINTS[number], courses[number]
    summary = replay(point.trace(), point.config()).summary
    predicted = course.predicted(course.cost)
    for metric in ("ttft_ms", "tpot_ms", "e2e_ms"):
        assert predicted[metric] == pytest.approx(summary[metric]["mean"], rel=0.01)
    speed = summary["num_output_tokens"] / point.num_gpus / (summary["duration_ms"] / 1e3)
    if point.load == "offline":
        assert predicted["tok_s_gpu"] == pytest.approx(speed, rel=0.01)


def test_a_closed_loop_decides_the_same_whatever_steps_take(courses: list[Course]) -> None:
    """So other constants need no other replay, also behind a front end."""
    slower = shipped_with(layer_us=90.0, bandwidth_efficiency=0.5, eager_layer_us=800.0)
    for point, course in zip(POINTS, courses, strict=True):
        config = point.config()
        if point.load == "open":
            continue
        cost = with_constants(config.cost, slower, point.engine_name)
        summary = replay(point.trace(), msgspec.structs.replace(config, cost=cost)).summary
        assert course.predicted(cost)["tpot_ms"] == pytest.approx(summary["tpot_ms"]["mean"], rel=0.02)


def shipped_with(**values: float) -> Constants:
    """The constants that ship, with some of other values."""
    shipped = shipped_constants()
    return msgspec.structs.replace(shipped, values=shipped.values | values)


def made(truth: Constants, noise: float = 0.0) -> list[Point]:
    """POINTS as engines with the constants `truth` would have been measured."""
    rng = Random(1)
    points = []
    for point in POINTS:
        config = point.config()
        cost = with_constants(config.cost, truth, point.engine_name)
        course = course_of(point, msgspec.structs.replace(config, cost=cost))
        values = {name: value * rng.lognormvariate(0, noise) for name, value in course.predicted(course.cost).items()}
        metrics = ("tok_s_gpu",) if point.load == "offline" else ("tpot_ms", "ttft_ms")
        points.append(msgspec.structs.replace(point, **{name: values[name] for name in metrics}))
    return points


@pytest.mark.long
def test_what_made_the_points_is_found() -> None:
    pytest.importorskip("scipy")
    prior = shipped_constants()
    moved = {"bandwidth_efficiency": 0.91, "layer_us": 1.2, "expert_layer_us": 1.5}
    truth = shipped_with(**{name: prior.values[name] * by for name, by in moved.items()})
    points = made(truth)
    found = fit_points(record(points, prior, None), prior)
    assert found.after["tpot_ms"].median < 0.05 < found.before["tpot_ms"].median
    for each in found.worth:
        assert abs(np.log(each.value / truth.values.get(each.name, each.prior))) < 2.5 * each.deviation, each
    assert set(found.constants.values) == set(COEFFICIENTS)
    assert found.constants.deviations == prior.deviations  # an engine may differ from the mean of all as before
    worth = {each.name: each.gain for each in found.worth}
    assert worth["layer_us"] > worth["exchange_us"]


def test_a_point_says_how_experts_are_divided() -> None:
    split = Point(model="qwen3-30b-a3b", gpu="h100", load="closed", level=4, tp=4, **SHORT)
    assert split.cost.expert_parallel == 1
    assert msgspec.structs.replace(split, ep=4).cost.expert_parallel == 4
    assert msgspec.structs.replace(split, ep=2).cost.expert_parallel == 1  # groups of devices are not modelled


@pytest.mark.long
def test_a_sweep_that_is_slow_as_a_whole_says_less(courses: list[Course]) -> None:
    """A common factor on all points of a sweep moves constants less than the same errors of separate sweeps."""
    prior = shipped_constants()
    slower = shipped_with(layer_us=2 * prior.values["layer_us"])
    closed = [course for course in courses if course.point.load == "closed"]
    moved = []
    for is_one in (True, False):
        slow = []
        for number, course in enumerate(closed):
            tpot_ms = course.predicted(with_constants(course.cost, slower, course.point.engine_name))["tpot_ms"]
            version = "" if is_one else str(number)
            point = Point(model="a", gpu="a", load="closed", level=1, version=version, tpot_ms=tpot_ms, **SHORT)
            slow.append(course._replace(point=point))
        found = fit_points(slow, prior, weigh=False)
        moved.append(np.log(found.constants.values["layer_us"] / prior.values["layer_us"]))
    assert 0.0 < moved[0] < moved[1]


def test_halves_are_told_apart_by_a_field() -> None:
    half = halves_of(POINTS, "gpu")
    assert len({(point.gpu, side) for point, side in zip(POINTS, half, strict=True)}) == len({p.gpu for p in POINTS})
    assert 0 < sum(half) < len(half)
    with pytest.raises(ConfigError, match="all points have one source"):
        halves_of(POINTS, "source")


def test_errors_are_told_by_their_sizes() -> None:
    errors = Errors.of(np.array([-0.2, 0.1, 0.1]))
    assert errors is not None
    assert msgspec.structs.astuple(errors) == pytest.approx((0.1, 0.18, 0.1, 3))
    assert Errors.of(np.zeros(0)) is None


def test_a_table_is_read(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    rows = [
        "mine,vllm,llama-3.1-8b,h100,2,,fp8,1024,512,0.8,closed,16,64,,80,9.5",
        "",
        "x,,a.json,h200,,,,8,9,,open,2.5,,,9",
    ]
    path.write_text("\n".join([HEADER, *rows]) + "\n")
    first, second = load_points(path)
    assert (first.tp, first.dp, first.weight, first.ratio, first.level) == (2, 1, "fp8", 0.8, 16.0)
    assert first.measured == {"ttft_ms": 80.0, "tpot_ms": 9.5}
    assert first.settings()["engine"] == "vllm"
    assert (second.model, second.num_requests) == ("a.json", 64)
    (tmp_path / "a.json").write_text("{}")
    assert load_points(path)[1].model == str(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("s,,m,g,0,,,8,9,,open,2", "csv:2: tp"),
        ("s,,m,g,1,,,8,9,,often,2", "csv:2: load"),
        ("s,,m,g,1,,,8,9,,open,", "csv:2: Object missing required field `level`"),
        ("s,,m,g,1,,,8,9,1.5,open,1", "csv:2: ratio"),
        ("s,,m,g,1,,,8,9,,open,1,,,,-4", "csv:2: tpot_ms"),
        ("s,,m,g,1,,,8,9,,open,1", "csv:2: has nothing measured. Give one of tok_s_gpu"),
        ("s,,m,g,1,,,8,9,,open,1,,,80,9,1,2", "csv:2: has more columns than the header"),
    ],
)
def test_a_bad_point_is_named(tmp_path: Path, row: str, says: str) -> None:
    path = tmp_path / "points.csv"
    path.write_text(f"{HEADER}\n{row}\n")
    with pytest.raises(InputError) as caught:
        load_points(path)
    assert str(path) in str(caught.value) and says in str(caught.value)


def test_columns_that_are_none_are_named(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    path.write_text("model,gpu,cheese\n")
    with pytest.raises(InputError, match="'cheese' is not a column"):
        load_points(path)
    path.write_text("model,gpu,model\n")
    with pytest.raises(InputError, match="'model' is a column twice"):
        load_points(path)
    path.write_text(HEADER + "\n")
    with pytest.raises(InputError, match="holds no point"):
        load_points(path)


def test_a_row_keeps_where_it_is_from_and_what_others_answered(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    path.write_text(
        f"id,{HEADER},tpot_stat,ttft_stat,draw,date,aic_ttft,aic_tpot,blis_tpot\n"
        "n1,a,sglang,llama-3.1-8b,h100,1,,,500,505,0.5,closed,8,80,,90,9.5,mean,median,sgl:1000:800,2026-08-01,70,9,\n"
    )
    (point,) = load_points(path)
    assert point.others == {"aic": {"ttft_ms": 70.0, "tpot_ms": 9.0}}
    assert (point.id, point.date) == ("n1", "2026-08-01")
    assert point.measured == {"tpot_ms": 9.5}  # a median is not compared with a mean
    rng = np.random.RandomState(1)
    prompts, outputs = rng.randint(1, 1001, size=80), rng.randint(1, 801, size=80)
    requests = point.trace().requests
    assert requests is not None
    assert [each.num_prompt_tokens for each in requests] == prompts.tolist()
    assert [each.num_output_tokens for each in requests] == outputs.tolist()


def test_rows_that_measure_something_else_are_counted_and_left_out() -> None:
    sound = Point(model="llama-3.1-8b", gpu="h100", load="closed", level=4, tpot_ms=9.0, ttft_ms=50.0, isl=300, osl=40)
    impossible = msgspec.structs.replace(sound, level=4000)  # 4000 / (0.41 s) requests a second
    assert sound.implied_share < 0.1 < 0.6 < impossible.implied_share
    tokens_per_s = 4000 / (50.0 + 9.0 * 40) * 1e3 * 340
    assert impossible.implied_share == pytest.approx(tokens_per_s * 2 * 7.5e9 / 989.4e12, rel=0.1)
    drafted = msgspec.structs.replace(sound, speculative=True)
    apart = msgspec.structs.replace(sound, pd="1:4:0:1|2:4:0:1")
    medians = msgspec.structs.replace(sound, tpot_stat="p50", ttft_stat="p50")
    kept, counts = usable([sound, impossible, drafted, apart, medians])
    assert kept == [sound]
    assert counts == {
        "more than 60% of the specified arithmetic": 1,
        "no mean": 1,
        "pools of prefill and decode": 1,
        "speculative tokens": 1,
    }
    with pytest.raises(ConfigError, match="on cheese: 'cheese' is not known"):
        usable([msgspec.structs.replace(sound, gpu="cheese")])


@pytest.mark.slow
def test_a_table_becomes_a_prior_that_later_fits_begin_from(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    table, prior = tmp_path / "points.csv", tmp_path / "prior.toml"
    rows = [
        "a,,llama-3.1-8b,h100,1,,,300,40,,closed,4,20,,30,9.5",
        "a,,llama-3.1-8b,h100,1,,,300,40,,closed,16,30,,60,10.5",
        "b,,qwen3-0.6b,l40s,1,,,300,40,,closed,4,20,,30,4.5",
        "b,,qwen3-0.6b,l40s,1,,,300,40,,offline,20,20,2000,,",
    ]
    table.write_text("\n".join([HEADER, *rows]) + "\n")
    fit = ["calibrate", "--points", str(table), "--set", "hold_out=source", "--out", str(prior), "--json"]
    result = CliRunner().invoke(cli, [*fit, "--set", "workers=1"])
    assert result.exit_code == 0, result.output
    written = prior.read_bytes()
    assert CliRunner().invoke(cli, [*fit, "--set", "workers=2"]).stdout == result.stdout
    assert prior.read_bytes() == written
    found = load_constants(prior)
    assert set(found.values) == set(found.deviations) == set(COEFFICIENTS)
    assert found.held_out == []  # four points are too few
    assert found.values["link_us"] == pytest.approx(shipped_constants().values["link_us"], rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--points", "{table}", "--device", "l40s"], "--device: has no effect with --points"),
        (["--points", "{table}", "--set", "fit_on=4"], "--set fit_on: has no effect with --points"),
        (
            ["--points", "{table}", "--set", "hold_out=colour"],
            "--set hold_out: 'colour' is not one of source, gpu, model",
        ),
        (["--set", "hold_out=gpu", "{table}"], "--set hold_out: has no effect without --points"),
        (["--points", "{table}", "--set", "prior={table}"], "points.csv"),
        (["--points", "{table}"], "does not fit"),
    ],
)
def test_what_does_not_go_with_points_is_named(tmp_path: Path, arguments: list[str], says: str) -> None:
    table = tmp_path / "points.csv"
    table.write_text(f"{HEADER}\na,,llama-3.1-405b,l4,1,,,300,40,,closed,4,20,,30,9500\n")
    with pytest.raises(KvartsError) as caught:
        CliRunner().invoke(
            cli, ["calibrate", *(each.format(table=table) for each in arguments)], catch_exceptions=False
        )
    assert says in str(caught.value)


def test_the_constants_that_ship_are_the_defaults() -> None:
    shipped = shipped_constants()
    cost = RooflineCost(llm="deepseek-v3", device="h100", tensor_parallel=8, data_parallel=2, weight_dtype="nvfp4")
    assert {name: cost.coefficient(name) for name in COEFFICIENTS} == shipped.values
    assert {row.kind for row in shipped.held_out} == {"dense", "experts"}

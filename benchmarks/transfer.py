"""What a calibration recovers and predicts where the truth is known.

Runs are made with drawn coefficients, fitted, and used to predict other models.

    python benchmarks/transfer.py [number of truths] [seed]

A truth is drawn from the guesses that a calibration starts from. It makes two runs: requests of a light and of a heavy
phase, short and long prompts, each time with an error of 0.5 %. Coefficients are fitted to the first run, or to both,
and predict a third model. Printed: how often a coefficient is within one and two of the standard deviations that the
calibration states, how often a predicted statistic is, and the mean error of the twelve statistics; that also without
the predictions that need a coefficient of which the runs say nothing (on one device there is no link).
"""

from __future__ import annotations

import sys
from random import Random

import msgspec
import numpy as np

from kvarts.cost.roofline import RooflineCost
from kvarts.cost.roofline_settings import shipped_constants
from kvarts.plan.calibrate import CalibrationRun, Measured, calibrate_runs, compare
from kvarts.plan.calibrate.coefficients import BOUNDS, names_of
from kvarts.plan.calibrate.comparison import replayed_of
from kvarts.sim.config import ReplayConfig, make_config
from kvarts.sim.replaying import replay

NUM_REQUESTS = 60
NOISE = 0.005
# What is measured first, what second, and what is predicted.
CASES: list[list[tuple[str, str, dict[str, int]]]] = [
    [("llama-3.1-8b", "rtx-4090", {}), ("qwen3-0.6b", "rtx-4090", {}), ("qwen3-8b", "rtx-4090", {})],
    [
        ("qwen3-32b", "rtx-pro-6000", {"tensor_parallel": 2}),
        ("qwen3-8b", "rtx-pro-6000", {}),
        ("llama-3.1-8b", "rtx-pro-6000", {"tensor_parallel": 2}),
    ],
    [
        ("qwen3-30b-a3b", "rtx-pro-6000", {"data_parallel": 2, "expert_parallel": 2}),
        ("qwen3-8b", "rtx-pro-6000", {}),
        ("qwen3-32b", "rtx-pro-6000", {"tensor_parallel": 2}),
    ],
    [
        ("llama-3.1-70b", "h100-80gb", {"tensor_parallel": 4}),
        ("llama-3.1-8b", "h100-80gb", {}),
        ("qwen3-32b", "h100-80gb", {"tensor_parallel": 2}),
    ],
    [
        ("gemma-3-27b", "mi300x", {}),
        ("gpt-oss-120b", "mi300x", {}),
        ("qwen3-30b-a3b", "mi300x", {"tensor_parallel": 2}),
    ],
]


def made(config: ReplayConfig, truth: RooflineCost, rng: Random) -> Measured:
    """Return what an engine that is `truth` would have been measured to do."""
    half = NUM_REQUESTS // 2
    light = sorted(rng.uniform(0, 40e9) for _ in range(half))
    heavy = sorted(rng.uniform(45e9, 49e9) for _ in range(half))
    arrivals = [int(value) for value in (*light, *heavy)]
    arrivals[0] = 0
    prompts = [rng.choice((60, 400, 1500, 5000)) + rng.randrange(40) for _ in arrivals]
    outputs = [rng.randrange(20, 300) for _ in arrivals]
    columns = [np.array(values, np.int64) for values in (arrivals, prompts, outputs)]
    blank = Measured(
        name="made",
        request_ids=[str(index) for index in range(len(arrivals))],
        rows=np.arange(len(arrivals)),
        arrival_ns=columns[0],
        scheduled_ns=None,
        first_token_ns=columns[0],
        last_token_ns=columns[0],
        prompt_tokens=columns[1],
        output_tokens=columns[2],
    )
    rows = replayed_of(replay(blank.trace(), msgspec.structs.replace(config, cost=truth)))
    arrival_ms = columns[0] / 1e6
    first_ms = (rows.first_token_ms - arrival_ms) * np.array([rng.gauss(1, NOISE) for _ in arrivals])
    rest_ms = (rows.last_token_ms - rows.first_token_ms) * np.array([rng.gauss(1, NOISE) for _ in arrivals])
    return msgspec.structs.replace(
        blank,
        first_token_ns=np.rint((arrival_ms + first_ms) * 1e6).astype(np.int64),
        last_token_ns=np.rint((arrival_ms + first_ms + rest_ms) * 1e6).astype(np.int64),
    )


def config_of(llm: str, device: str, ways: dict[str, int]) -> ReplayConfig:
    """Return the engine that a run is measured on."""
    return make_config({"model": llm, "device": device, "max_batched_tokens": 2048, "pages": 8000, **ways})


def main() -> None:
    """Draw truths, fit, predict, and print what came of it."""
    num_truths = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    rng = Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    widths = shipped_constants().deviations
    within: dict[tuple[int, str], list[float]] = {}
    for number in range(num_truths):
        configs = [config_of(*what) for what in CASES[number % len(CASES)]]
        drawn: dict[str, float] = {}
        for config in configs:
            for name in names_of([config.cost]):
                if name not in drawn:
                    low, high = BOUNDS[name]
                    guess = config.cost.coefficient(name)
                    drawn[name] = min(high, max(low, guess * float(np.exp(rng.gauss(0, widths[name])))))
        truths = [msgspec.structs.replace(config.cost, **drawn) for config in configs]
        measured = [made(config, truth, rng) for config, truth in zip(configs, truths, strict=True)]
        runs = [CalibrationRun(measured=each, config=config) for each, config in zip(measured, configs, strict=True)]
        wanted = runs[-1]
        uncalibrated = compare(wanted.measured, replayed_of(replay(wanted.measured.trace(), wanted.config)))
        within.setdefault((0, "error"), []).append(uncalibrated.mean)
        far_off = []
        for count in (1, 2):
            found = calibrate_runs(runs[:count])
            for name, share in found.uncertainty.items():
                z = abs(float(np.log(found.cost.coefficient(name) / drawn[name]))) / share
                within.setdefault((count, "coefficients"), []).append(z)
                if z > 2:
                    far_off.append(f"{name} of {count} by {z:.1f}")
            within.setdefault((count, "own"), []).append(found.runs[0].overall.mean)
            ways = {name: getattr(wanted.cost, name) for name in ("llm", "device", "tensor_parallel", "data_parallel")}
            cost = msgspec.structs.replace(
                found.cost, **ways, expert_parallel=wanted.cost.expert_parallel, pipeline_parallel=1
            )
            report = replay(wanted.measured.trace(), msgspec.structs.replace(wanted.config, cost=cost))
            outcome = compare(wanted.measured, replayed_of(report))
            within.setdefault((count, "error"), []).append(outcome.mean)
            if set(names_of([wanted.cost])) <= set(found.uncertainty):
                within.setdefault((count, "felt"), []).append(outcome.mean)
            within.setdefault((count, "worse"), []).append(outcome.mean - uncalibrated.mean)
            for metric, row in outcome.metrics.items():
                theirs, ours = row["mean"]
                spread = (report.spread or {})[f"{metric}_ms"]["mean"]
                assert spread is not None
                within.setdefault((count, "predictions"), []).append(abs(ours - theirs) / spread)
        what = f"truth {number + 1} of {num_truths}: {wanted.cost.llm} on {wanted.cost.device}"
        print(what, "beyond two:", ", ".join(far_off) or "none", file=sys.stderr)
    print(f"{num_truths} truths; uncalibrated, a mean error of {np.mean(within[0, 'error']):.1%}")
    for count in (1, 2):
        print(f"fitted to {count} of them")
        for what in ("coefficients", "predictions"):
            far = np.array(within[count, what])
            one, two = (far < 1).mean(), (far < 2).mean()
            print(f"  {what:<14}{one:6.0%} within one, {two:.0%} within two of {len(far)}")
        errors = np.array(within[count, "error"])
        print(f"  own fit        {np.mean(within[count, 'own']):.2%}")
        middle, most = np.median(errors), errors.max()
        print(f"  another model  {errors.mean():.2%} in the mean, median {middle:.2%}, worst {most:.2%}")
        felt = np.array(within[count, "felt"])
        print(f"  of all it needs  {felt.mean():.2%} in the mean, worst {felt.max():.2%} of {len(felt)}")
        print(f"  at most worse than uncalibrated by {max(within[count, 'worse']):.2%}")


if __name__ == "__main__":
    main()

"""Design of measurements: the shortest benchmarks that would identify the coefficients of a roofline on a machine.

Each candidate is replayed with the prior as if it had been measured. Its information about each coefficient follows
from the slopes of the residuals, as after a fit. The next benchmark is always the one with the most information per
second, until all coefficients are identified, or no candidate adds anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.base.errors import ConfigError
from kvarts.cost.roofline import RooflineCost
from kvarts.plan.calibrate.coefficients import logs_of, names_of, needs_scipy, widths_of
from kvarts.plan.calibrate.comparison import replayed_of
from kvarts.plan.calibrate.fitting import KNOWN, Search, covariance_of
from kvarts.plan.calibrate.recorded_run import Measured
from kvarts.plan.calibrate.run import CalibrationRun, FittedRun
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay

__all__ = ["CANDIDATES", "Bench", "Proposal", "design"]

Values = npt.NDArray[np.float64]

MOST_STEPS = 500_000
"""Limit for all candidates together, each replayed once."""

LEAST_GAIN = 0.3
"""A benchmark that gains less, in nats, is not worth running."""


class Bench(msgspec.Struct, frozen=True):
    """A benchmark with random prompts. `rate`: requests per second, with random gaps; None: all at once.

    `llm`: a model to run instead of the one being calibrated, on one device.
    """

    name: str
    prompt_tokens: int
    output_tokens: int
    num_prompts: int
    rate: float | None
    llm: str | None = None

    def command(self, llm: str) -> str:
        """Return the command that runs the benchmark against a vLLM server of `llm`."""
        rate = "inf" if self.rate is None else f"{self.rate:g}"
        return (
            f"vllm bench serve --model {self.llm or llm} --dataset-name random --random-input-len {self.prompt_tokens} "
            f"--random-output-len {self.output_tokens} --num-prompts {self.num_prompts} --request-rate {rate} "
            f"--ignore-eos --save-result --save-detailed --result-filename {self.name}.json"
        )

    def blank(self) -> Measured:
        """Return the requests of the benchmark, without times."""
        rng = Random(0)
        arrivals = np.zeros(self.num_prompts)
        if self.rate is not None:
            arrivals = np.cumsum([0.0, *(rng.expovariate(self.rate) for _ in range(self.num_prompts - 1))])
        times = np.rint(arrivals * 1e9).astype(np.int64)
        prompts, outputs = (np.full(len(times), count) for count in (self.prompt_tokens, self.output_tokens))
        names = [str(row) for row in range(len(times))]
        return Measured(self.name, names, np.arange(len(times)), times, None, times, times, prompts, outputs)


SMALL = "qwen3-0.6b"
CANDIDATES = (
    Bench("light-short", 128, 128, 16, 0.5),
    Bench("light-long", 6000, 32, 16, 0.5),
    Bench("medium", 512, 192, 64, 4.0),
    Bench("heavy-short", 128, 256, 256, None),
    Bench("heavy-long", 3000, 128, 96, None),
    Bench("heavy-context", 6000, 384, 32, None),
    Bench("small-light", 128, 256, 16, 0.5, SMALL),
    Bench("small-heavy", 128, 256, 256, None, SMALL),
)
"""Light and heavy loads, with short and long prompts; also on a small model, where the time to read the weights can be
separated from the constant time per step."""


class Proposal(msgspec.Struct, frozen=True):
    """One benchmark. Proposals are ordered by value.

    `duration_s`: its expected duration. `uncertainty`: relative, for each coefficient, after it and all before it.
    `identifies`: the coefficients that it is the first to identify.
    """

    bench: Bench
    duration_s: float
    uncertainty: dict[str, float]
    identifies: list[str]


def _num_steps(bench: Bench, config: ReplayConfig) -> int:
    """Return the approximate number of steps of a benchmark, with as many concurrent requests as allowed."""
    prompts = bench.num_prompts * bench.prompt_tokens // config.max_num_batched_tokens
    num_rounds = -(-bench.num_prompts // min(config.max_num_seqs, config.max_num_batched_tokens))
    return prompts + num_rounds * bench.output_tokens


def design(config: ReplayConfig, candidates: Sequence[Bench] = CANDIDATES) -> tuple[list[Proposal], list[str]]:
    """Return the benchmarks to run on the engine of `config`, and the coefficients that will keep their prior values.

    A candidate whose requests do not fit in the pages is skipped. Raise ConfigError for a cost model other than a
    roofline.
    """
    needs_scipy()
    if not isinstance(config.cost, RooflineCost):
        raise ConfigError("only the roofline can be fitted", field="cost", hint="Give a model and a device.")
    names = names_of([config.cost])
    num_steps = sum(_num_steps(bench, config) for bench in candidates)
    if num_steps > MOST_STEPS:  # checked before any replay; each is replayed several times per coefficient
        raise ConfigError(
            f"a design would replay {num_steps:,} steps, and {MOST_STEPS:,} are replayed at most",
            field="max_num_batched_tokens",
            hint="Allow more tokens in a step, and more requests at once.",
        )
    guess, widths = logs_of([config.cost], names), widths_of(names)
    left: dict[str, tuple[Bench, float, Values]] = {}
    for bench in candidates:
        blank = bench.blank()
        of_bench = config.certain if bench.llm is None else _on_one(config, bench.llm)
        rows = replayed_of(replay(blank.trace(), of_bench))
        if np.isnan(rows.last_token_ms).any():
            continue
        first, last = (np.rint(times * 1e6).astype(np.int64) for times in (rows.first_token_ms, rows.last_token_ms))
        measured = msgspec.structs.replace(blank, first_token_ns=first, last_token_ns=last)
        search = Search([FittedRun(CalibrationRun(measured=measured, config=of_bench), None)], names, 1.0, guess)
        left[bench.name] = bench, float(last.max()) / 1e9, search.information(guess)
    total = np.zeros((len(names), len(names)))
    unknown, proposals = list(names), []
    while left and unknown:
        before = _log_volume(total, widths)
        gains = {name: before - _log_volume(total + each[2], widths) for name, each in left.items()}
        name = max(gains, key=lambda name: gains[name] / left[name][1])
        if gains[name] < LEAST_GAIN:
            del left[name]
            continue
        bench, duration_s, information = left.pop(name)
        total = total + information
        deviations = np.sqrt(np.diag(covariance_of(total, widths)))
        still = [name for name, share, width in zip(names, deviations, widths, strict=True) if share > KNOWN * width]
        found = [name for name in unknown if name not in still]
        uncertainty = dict(zip(names, map(float, deviations), strict=True))
        proposals.append(Proposal(bench, duration_s, uncertainty, found))
        unknown = still
    return proposals, unknown


def _on_one(config: ReplayConfig, llm: str) -> ReplayConfig:
    """Return the configuration for another model, on one device."""
    ways = dict.fromkeys(("tensor_parallel", "data_parallel", "expert_parallel", "pipeline_parallel"), 1)
    cost = msgspec.structs.replace(config.cost, llm=llm, uncertainty=None, weight_dtype=None, **ways)
    return msgspec.structs.replace(config, cost=cost, replicas=1)


def _log_volume(information: Values, widths: Values) -> float:
    """Return half the log-determinant of the covariance that remains after `information`."""
    return float(np.linalg.slogdet(covariance_of(information, widths))[1]) / 2

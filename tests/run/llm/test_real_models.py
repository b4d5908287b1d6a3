"""L6 and the rest, on real models of transformers with random weights; skipped where PyTorch is not installed."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="real models need kvarts[torch]")
pytest.importorskip("transformers", reason="real models need kvarts[torch]")

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvarts.base.errors import ConfigError, InputError, MissingFileError
from kvarts.base.terminal import plain
from kvarts.core.content import Content, pack_units
from kvarts.core.request import Request
from kvarts.core.sampling import SamplingParams
from kvarts.cost.hardware.model_config import load_geometry
from kvarts.cost.polynomial import CallableCost
from kvarts.cost.simulated import SimExecutor
from kvarts.plan.calibrate.stepfit import load_steps
from kvarts.proof.verify.verifier import verify_file
from kvarts.run.torch.attention import ATTENTION
from kvarts.run.torch.executor import BACKENDS
from kvarts.run.torch.flash import FlashBackend
from kvarts.run.torch.llm import LLM
from kvarts.run.torch.loading import check_architecture, load_model
from kvarts.run.torch.packing import PackedLinear, pack_together, products
from kvarts.run.torch.tiny import SIZES

from builders.engines import make_replica
from builders.fields import fields_of
from builders.flash_standin import flash_module
from builders.kept import Kept
from builders.pages import paged
from builders.real_models import (
    ATTENDING,
    GREEDY,
    PAGE_SIZE,
    VOCABULARY,
    Ids,
    engine_of,
    prompts_with_prefixes,
    serve_at_random,
    undisturbed,
)
from builders.triton_interpreted import interpreted


@pytest.mark.parametrize("family", ATTENDING)
@pytest.mark.parametrize(("num_pages", "budget"), [(256, 2048), (40, 16), (28, 7)])
def test_greedy_tokens_are_those_of_an_undisturbed_run(
    models: Callable[[str], tuple[Any, Any]], family: str, num_pages: int, budget: int
) -> None:
    """L6: whole prompts and chunks, prefixes that others left, preemption on a pool far too small."""
    model, reference = models(family)
    prompts = prompts_with_prefixes()
    engine = engine_of(model, num_pages=num_pages, budget=budget)
    # Four may run at once: the last two come when others have left what they can hit.
    completions = engine.generate(prompts, GREEDY)
    for prompt, completion in zip(prompts, completions, strict=True):
        assert list(completion.tokens) == undisturbed(reference, prompt, GREEDY.max_tokens)
    if num_pages == 256:
        assert sum(completion.cached_tokens for completion in completions) >= 48
    assert engine.kv_live_bytes() == 0


@pytest.mark.parametrize("attention", ["flash", pytest.param("triton", marks=pytest.mark.long)])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3"])
def test_all_backends_say_the_same(
    models: Callable[[str], tuple[Any, Any]], family: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L6 with the readers that are for CUDA: FlashAttention by what it says it computes, Triton interpreted."""
    monkeypatch.setitem(sys.modules, "flash_attn", flash_module())
    maker: Any = FlashBackend if attention == "flash" else interpreted(monkeypatch)
    monkeypatch.setitem(BACKENDS, attention, (maker, lambda pools: None))
    model, reference = models(family)
    prompts = prompts_with_prefixes()[1:]
    engine = engine_of(model, num_pages=40, budget=16, attention=attention)
    for prompt, completion in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
        assert list(completion.tokens) == undisturbed(reference, prompt, GREEDY.max_tokens)


def test_layers_that_share_kv_keep_it_once() -> None:
    """Gemma 3n: the last layers read what others before them kept."""
    sizes = {**SIZES, "num_hidden_layers": 6, "intermediate_size": [128] * 6, "vocab_size": VOCABULARY}
    config = AutoConfig.for_model(
        "gemma3n_text",
        **sizes,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
        laurel_rank=8,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 6,
        num_kv_shared_layers=2,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"] * 3,
        eos_token_id=256,
        bos_token_id=None,
        pad_token_id=256,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager")
    model.set_attn_implementation(ATTENTION)
    check_architecture(config, "model")
    engine = engine_of(model, num_pages=40, budget=16)
    prompts = prompts_with_prefixes()
    for prompt, completion in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
        assert list(completion.tokens) == undisturbed(reference, prompt, GREEDY.max_tokens)
    assert engine.kv_bytes() == 40 * PAGE_SIZE * 4 * 2 * 2 * 16 * 4, "4 layers of 6, keys and values of 2 heads of 16"


def test_in_16_bits_only_what_rounding_decides_may_differ(tiny: Callable[[str], Path]) -> None:
    """Tokens are equal up to one where the two likeliest were as good as equal."""
    path = tiny("qwen3")
    model = load_model(path, dtype="bfloat16")
    reference = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.bfloat16).eval()
    prompts = prompts_with_prefixes()
    num_equal = num_tokens = 0
    for prompt, completion in zip(prompts, engine_of(model, budget=16).generate(prompts, GREEDY), strict=True):
        expected = undisturbed(reference, prompt, GREEDY.max_tokens)
        said = list(completion.tokens)
        same = next((place for place, pair in enumerate(zip(said, expected, strict=True)) if len({*pair}) > 1), 24)
        num_equal, num_tokens = num_equal + same, num_tokens + 24
        if same < 24:
            with torch.no_grad():
                logits = reference(torch.tensor([prompt + expected[:same]])).logits[0, -1].float()
            best, second = logits.topk(2).values.tolist()
            assert best - second <= 0.05 * logits.abs().max(), "more than rounding of 8 bits in a few layers"
    print(f"{num_equal} of {num_tokens} tokens come before the first that differs")
    assert num_equal >= num_tokens // 4


def test_packed_layers_compute_the_same() -> None:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no bfloat16 for oneDNN")
    torch.manual_seed(0)
    for bias in (True, False):
        linear = torch.nn.Linear(48, 70, bias=bias, dtype=torch.bfloat16)
        packed = PackedLinear(linear.weight, linear.bias)
        for shape in ((48,), (1, 48), (2, 5, 48), (40, 48)):
            inputs = torch.randn(shape, dtype=torch.bfloat16)
            with torch.inference_mode():
                torch.testing.assert_close(packed(inputs), linear(inputs))


@pytest.mark.parametrize("with_bias", [(), (0, 1, 2), (1,)])
def test_layers_packed_together_compute_what_each_did(with_bias: tuple[int, ...]) -> None:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no bfloat16 for oneDNN")
    torch.manual_seed(0)
    outputs = (64, 32, 48)
    linears = [torch.nn.Linear(48, size, bias=place in with_bias).bfloat16() for place, size in enumerate(outputs)]
    names = ["first", "second", "third"]
    module = torch.nn.Module()
    for name, linear in zip(names, linears, strict=True):
        setattr(module, name, PackedLinear(linear.weight, linear.bias))
    pack_together(module, names)
    parts = [getattr(module, name) for name in names]
    assert [(part.in_features, part.out_features) for part in parts] == [(48, size) for size in outputs]
    assert [part.bias is linear.bias for part, linear in zip(parts, linears, strict=True)] == [True] * 3
    for num_rows in (1, 5, 40):
        rows = torch.randn(num_rows, 48, dtype=torch.bfloat16)
        with torch.inference_mode():
            at_once = products(parts, rows)
            for linear, part, product in zip(linears, parts, at_once, strict=True):
                torch.testing.assert_close(product, linear(rows))
                torch.testing.assert_close(part(rows[None]), linear(rows[None]))


def test_layers_that_are_not_packed_stay_by_themselves() -> None:
    module = torch.nn.Module()
    module.one, module.other = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)
    before = [module.one, module.other]
    pack_together(module, ["one", "other"])
    assert [module.one, module.other] == before


def test_a_page_that_is_not_what_it_should_be_changes_what_is_said(models: Callable[[str], tuple[Any, Any]]) -> None:
    """The control: if this did not matter, the tests above would prove nothing."""
    model, reference = models("qwen3")
    prompt = prompts_with_prefixes()[1]
    expected = undisturbed(reference, prompt, GREEDY.max_tokens)
    engine = engine_of(model)
    index = engine.submit(prompt, GREEDY)
    for _ in range(3):
        engine.step()
    table = engine.request(index).table
    assert table is not None and table.page_ids is not None
    engine._executor.pools.keys[1][table.page_ids[4]] = 0
    engine._executor.pools.values[1][table.page_ids[4]] = 0
    completions = []
    while engine.has_work:
        completions += engine.step()
    assert list(completions[0].tokens)[:3] == expected[:3]
    assert list(completions[0].tokens) != expected


@pytest.mark.laws
@settings(max_examples=6)
@given(seed=st.integers(0, 1 << 30), family=st.sampled_from(["qwen3", "gemma2", "gemma3"]))
def test_requests_come_and_go_at_any_time(models: Callable[[str], tuple[Any, Any]], seed: int, family: str) -> None:
    """L6, L8: random arrivals, cancels, priorities and pools."""
    model, reference = models(family)
    random = Random(seed)
    shared = [random.randrange(VOCABULARY) for _ in range(20)]
    engine = engine_of(
        model, num_pages=random.choice([14, 20, 60]), budget=random.choice([5, 16, 256]), seqs=random.choice([1, 3, 6])
    )

    def draw_prompt() -> Ids:
        return shared[: random.randrange(21)] + [random.randrange(VOCABULARY) for _ in range(random.randrange(1, 9))]

    params = SamplingParams(max_tokens=12, ignore_eos=True)
    for prompt, completion in serve_at_random(engine, random, draw_prompt, params):
        assert list(completion.tokens) == undisturbed(reference, prompt, params.max_tokens)


def test_a_thousand_cancels_leave_nothing_behind(models: Callable[[str], tuple[Any, Any]]) -> None:
    model, _ = models("qwen3")
    random = Random(7)
    engine = engine_of(model, num_pages=200, seqs=8)
    waiting: list[int] = []
    num_cancelled = 0
    while num_cancelled < 1000:
        while len(waiting) < 12:
            prompt = [random.randrange(VOCABULARY) for _ in range(random.randrange(1, 30))]
            waiting.append(engine.submit(prompt, GREEDY))
        if random.random() < 0.3:
            ended = {completion.index for completion in engine.step()}
            waiting = [index for index in waiting if index not in ended]
        else:
            victim = waiting.pop(random.randrange(len(waiting)))
            completion = engine.cancel(victim)
            assert completion is not None and completion.finish_reason == "cancelled"
            assert engine.cancel(victim) is None
            num_cancelled += 1
    for index in waiting:
        engine.cancel(index)
    assert engine.kv_live_bytes() == 0
    assert not engine.has_work
    engine.check()


# Memory and decisions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ATTENDING)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_allocated_tensors_are_what_the_planner_says(tiny: Callable[[str], Path], family: str, dtype: str) -> None:
    engine = LLM.from_pretrained(tiny(family), kv_memory=1 << 20, page_size=PAGE_SIZE, dtype=dtype)
    geometry = load_geometry(str(tiny(family) / "config.json"))
    assert engine.kv_bytes() == engine.config.pool_tokens * geometry.kv_bytes_per_token(dtype)
    assert engine.kv_bytes() <= 1 << 20
    index = engine.submit([1, 2, 3, 4, 5], GREEDY)
    engine.step()
    assert engine.kv_live_bytes() == 2 * PAGE_SIZE * geometry.kv_bytes_per_token(dtype)
    engine.cancel(index)
    assert engine.kv_live_bytes() == 0


def test_the_replay_of_what_was_run_decides_alike(models: Callable[[str], tuple[Any, Any]]) -> None:
    """Parity of the drivers: the same requests, with the step times that were measured, event for event."""
    model, _ = models("qwen3")
    prompts = prompts_with_prefixes()
    real, replayed = Kept(), Kept()
    durations_ms: list[float] = []

    class Timed:
        def __init__(self, executor: Any) -> None:
            self.executor = executor

        needs_page_ids = True

        def execute(self, plan: Any) -> Any:
            result = self.executor.execute(plan)
            durations_ms.append(result.duration_ns / 1e6)
            return result

    engine = engine_of(model, num_pages=30, budget=16, readers=[real], wrap=Timed)
    for prompt in prompts:
        engine.submit(prompt, GREEDY)
    done = {}
    while engine.has_work:
        done.update({completion.index: completion for completion in engine.step()})
    config = engine.config
    times = iter(durations_ms)
    core = make_replica(config, SimExecutor(CallableCost(lambda _: next(times))), readers=[replayed], step_by_step=True)
    for index, prompt in enumerate(prompts):
        tokens = [*prompt, *done[index].tokens]
        content = Content(pack_units(tokens), num_tokens=len(tokens), page_size=PAGE_SIZE, owner=index)
        core.submit(Request(index, content, len(prompt), len(done[index].tokens)), 0)
    now_ns = 0
    while core.has_work:
        now_ns = core.start(now_ns)
        core.finish()
    assert paged(real.events) == paged(replayed.events)

    def decisions(kept: Kept) -> list[tuple[object, ...]]:
        names = ("Admitted", "Preemption", "ChunkComputed", "Finished")
        told: list[tuple[object, ...]] = []
        for event in kept.events:
            fields = {name: getattr(event, name) for name in fields_of(event) if name != "content"}
            if type(event).__name__ in names:
                told.append((type(event).__name__, *fields.values()))
        return told

    assert decisions(real) == decisions(replayed)
    assert any(name == "Preemption" for name, *_ in decisions(real))


# What cannot be -------------------------------------------------------------------------------------------


def test_a_bad_prompt_is_refused_and_the_engine_goes_on(tiny: Callable[[str], Path]) -> None:
    engine = LLM.from_pretrained(tiny("qwen3"), kv_memory=64 << 10, page_size=PAGE_SIZE)
    for prompt, params, says in (
        ([1, VOCABULARY], GREEDY, "prompt: token 257 is not in the vocabulary of 257"),
        ([-1], GREEDY, "prompt: token -1 is not in the vocabulary"),
        ([], GREEDY, "prompt: has no tokens"),
        ("", GREEDY, "prompt: has no tokens"),
        ([1] * 2040, GREEDY, "prompt: 2040 prompt tokens and 24 to generate are more than the 2048"),
        ([1] * 400, GREEDY, "prompt: needs"),
    ):
        with pytest.raises(ConfigError) as caught:
            engine.generate([[5, 6], prompt], params)
        assert str(caught.value).startswith(says)
        assert not engine.has_work, "nobody of the same call is left behind"
    assert len(engine.generate([[5, 6]], GREEDY)[0].tokens) == GREEDY.max_tokens


def test_a_bad_model_is_named(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="no such directory"):
        load_model(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(MissingFileError, match=r"config\.json: no such file"):
        load_model(tmp_path / "empty")
    for name, config, says in (
        ("encoder", '{"model_type": "t5"}', "t5 has an encoder; only decoders are supported"),
        ("mamba", '{"model_type": "mamba"}', "mamba has .* layers, which keep no KV in pages"),
        ("nonsense", '{"model_type": "nothing-known"}', "is no model that transformers knows"),
        ("broken", "{", r"broken/config\.json: is not readable JSON"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
        with pytest.raises((ConfigError, InputError), match=says):
            load_model(tmp_path / name)
    source = tiny("qwen3")
    for name, weights in (("missing", None), ("cut", (source / "model.safetensors").read_bytes()[:5000])):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_bytes((source / "config.json").read_bytes())
        if weights is not None:
            (directory / "model.safetensors").write_bytes(weights)
        with pytest.raises((InputError, MissingFileError)) as caught:
            load_model(directory)
        assert str(directory) in str(caught.value)
    with pytest.raises(ConfigError, match="kv_memory: 10 bytes hold no page"):
        LLM.from_pretrained(source, kv_memory=10)
    with pytest.raises(ConfigError, match="dtype: must be auto"):
        load_model(source, dtype="int3")


# Commands -------------------------------------------------------------------------------------------------


def test_the_commands(
    tmp_path: Path, run_command: Callable[..., int], capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    model, prompts = tmp_path / "model", tmp_path / "prompts.jsonl"
    assert run_command("model", "tiny", model, "--family", "gemma3") == 0
    again = tmp_path / "again"
    assert run_command("model", "tiny", again, "--family", "gemma3") == 0
    assert (again / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert run_command("model", "tiny", tmp_path / "other", "--family", "gpt") == 2
    prompts.write_text('{"prompt": "hello there"}\n\n{"prompt": [1, 2, 3]}\n')
    capsysbinary.readouterr()
    options = ("--model", model, "--max-tokens", 12, "--set", "ignore_eos=true", "--kv-memory", "4MiB")
    assert run_command("generate", "--prompts", prompts, *options, "--set", "logprobs=true") == 0
    lines = [msgspec.json.decode(line) for line in capsysbinary.readouterr().out.splitlines()]
    assert [len(line["tokens"]) for line in lines] == [len(line["logprobs"]) for line in lines] == [12, 12]
    assert run_command("generate", "--prompt", "hello there", *options) == 0
    assert capsysbinary.readouterr().out.decode() == plain(lines[0]["text"]) + "\n"
    timeline, record, trace = (tmp_path / name for name in ("timeline.jsonl", "steps.jsonl", "trace.jsonl"))
    files = ("--record", record, "--set", f"write_trace={trace}", "--kv-timeline", timeline)
    assert run_command("profile", "--prompts", prompts, *options, *files) == 0
    report = msgspec.json.decode(capsysbinary.readouterr().out)
    assert (report["num_completed"], report["num_output_tokens"]) == (2, 24)
    assert report["ttft_ms"]["mean"] > 0
    assert verify_file(timeline).verdict == "ok"
    steps = [msgspec.json.decode(line) for line in record.read_bytes().splitlines()]
    assert len(steps) == report["num_steps"] == len(load_steps(record)), "what a calibration reads"
    assert steps[0]["chunks"] == [[0, 11, 11], [0, 3, 3]]
    # What was run, and what its steps took, is what a replay needs.
    cost = tmp_path / "cost.toml"
    device = ("--device", "cpu:cores=2,bandwidth=20GB/s")
    assert run_command("calibrate", record, "--model", model, *device, "--out", cost) == 0
    capsysbinary.readouterr()
    replayed = ("--trace-block-size", 1, "--cost", cost, "--pages", report["config"]["pages"], "--json")
    assert run_command("replay", trace, *replayed) == 0
    again = msgspec.json.decode(capsysbinary.readouterr().out)
    for field in ("num_completed", "num_output_tokens", "num_steps", "num_cached_tokens", "prefix_hit_ratio"):
        assert again[field] == report[field], field
    pages = ("--host-memory", "4MiB", "--set", "disk_memory=4MiB", "--set", f"disk_path={tmp_path / 'pages'}")
    assert run_command("profile", "--prompts", prompts, *options, *pages, *files[4:]) == 0
    below = msgspec.json.decode(capsysbinary.readouterr().out)
    assert below["transfers"]["num_stores"] > 0 and set(below["prefix_hit_ratio_by_tier"]) == {"device", "host", "disk"}
    assert verify_file(timeline).verdict == "ok"
    assert run_command("generate", "--prompts", prompts, *options, *pages) == 0
    through_files = [msgspec.json.decode(line) for line in capsysbinary.readouterr().out.splitlines()]
    assert [line["text"] for line in through_files] == [line["text"] for line in lines]
    assert run_command("generate", "--prompts", prompts, *options, *pages[2:4]) == 2
    assert run_command("generate", *options) == 2
    prompts.write_text('{"prompt": 7}\n')
    assert run_command("generate", "--prompts", prompts, *options) == 4

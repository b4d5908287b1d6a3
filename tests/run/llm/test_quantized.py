"""Weights of 8 and 4 bits: rounded as a naive model rounds them, run in pages as by themselves, and their loss told."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvarts.base.errors import ConfigError  # noqa: E402
from kvarts.core.sampling import SamplingParams  # noqa: E402
from kvarts.run.torch.check import check_model  # noqa: E402
from kvarts.run.torch.llm import LLM  # noqa: E402
from kvarts.run.torch.loading import fingerprint, load_model  # noqa: E402
from kvarts.run.torch.quantized import (  # noqa: E402
    FEW_ROWS,
    Int4Linear,
    Int8Linear,
    quantization_of,
    quantize,
)

Tiny = Callable[[str], Path]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LOOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def linear_of(dtype: Any, *, inputs: int = 96, outputs: int = 48, bias: bool = True) -> Any:
    torch.manual_seed(3)
    linear = torch.nn.Linear(inputs, outputs, bias=bias)
    with torch.no_grad():
        linear.weight[5] *= 100.0
        linear.weight[7] = 0.0
        linear.weight[9, 4] = 30.0
    return linear.to(dtype)


def kept_of(layer: Any) -> Any:
    """Return the weights of a layer as its kernel has them [outputs, inputs]: what it makes of each unit vector."""
    identity = torch.eye(layer.in_features, dtype=torch.float32)
    bias, layer.bias = layer.bias, None
    try:
        if layer._scales.dtype != torch.float32:
            layer._scales = layer._scales.float()  # so that products are not rounded again
        return torch.cat([layer(row) for row in identity.split(4)]).t()
    finally:
        layer.bias = bias


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, FEW_ROWS, FEW_ROWS + 1, 40])
@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
def test_a_quantized_layer_multiplies_by_its_rounded_weights(kind: Any, num_rows: int, dtype: Any) -> None:
    linear = linear_of(dtype)
    layer = kind(linear)
    inputs = torch.randn(2, num_rows, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad():
        outputs = layer(inputs)
        expected = inputs.double() @ kept_of(kind(linear)).double().t() + linear.bias.double()
    assert outputs.dtype == dtype and outputs.shape == (2, num_rows, 48)
    assert float((outputs.double() - expected).norm() / expected.norm()) < LOOSE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_8_bits_are_the_nearest_of_255_steps_of_the_largest_weight_in_a_row(dtype: Any) -> None:
    linear = linear_of(dtype)
    layer = Int8Linear(linear)
    squares = 0.0
    for row, kept in zip(linear.weight.double().tolist(), kept_of(layer).double().tolist(), strict=True):
        scale = float(torch.tensor(max(map(abs, row)) / 127).to(dtype))
        for weight, mine in zip(row, kept, strict=True):
            nearest = 0.0 if scale == 0.0 else max(-127, min(127, round(weight / scale))) * scale
            assert (
                abs(mine - nearest) <= 1e-6 * max(map(abs, row)) or abs(abs(mine - weight) - scale / 2) < 1e-3 * scale
            )
            squares += (mine - weight) ** 2
    assert layer.error_squares == pytest.approx(squares, rel=1e-3)
    assert layer.num_bytes == 48 * 96 + 48 * linear.weight.element_size()


@pytest.mark.parametrize("dtype", DTYPES)
def test_4_bits_are_16_even_steps_for_32_weights_and_no_worse_than_their_whole_range(dtype: Any) -> None:
    linear = linear_of(dtype)
    layer = Int4Linear(linear)
    weights, kept = linear.weight.detach().double(), kept_of(layer).double()
    squares = squares_of_range = 0.0
    for row in range(48):
        for start in range(0, 96, 32):
            group, mine = weights[row, start : start + 32], kept[row, start : start + 32]
            values = sorted(set(mine.tolist()))
            size = float(group.abs().max())
            steps = [high - low for low, high in pairwise(values) if high - low > 1e-6 * size]
            assert len(steps) <= 15
            if steps:  # all are whole numbers of the least, which may itself be several
                scale = layer._scales[start // 32, row, 0].double()
                assert all(abs(step / scale - round(float(step / scale))) < 1e-3 for step in steps)
                assert sum(round(float(step / scale)) for step in steps) <= 15
            squares += float((mine - group).square().sum())
            scale = (group.max() - group.min()) / 15
            if scale:
                even = group.min() + ((group - group.min()) / scale).round() * scale
                squares_of_range += float((even - group).square().sum())
    assert layer.error_squares == pytest.approx(squares, rel=1e-3)
    assert squares <= squares_of_range * (1.0 if dtype == torch.float32 else 1.2)
    assert layer.num_bytes == 48 * 96 // 2 + 48 * 3 * 2 * linear.weight.element_size()


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_a_quantized_model_runs_in_pages_as_it_runs_by_itself(tiny: Tiny, family: str, scheme: str) -> None:
    model = load_model(tiny(family), quantization=scheme)
    reference = load_model(tiny(family), quantization=scheme, model_impl="transformers")
    check = check_model(model, reference, num_prompts=4)
    assert check.num_alike == check.num_tokens == 64
    assert check.quantization is not None and check.quantization.scheme == scheme


@pytest.mark.parametrize("layers", ["compiled", "model"])
def test_whatever_computes_its_layers(tiny: Tiny, layers: str) -> None:
    model, reference = (
        load_model(tiny("llama"), quantization="int4", model_impl=name) for name in ("auto", "transformers")
    )
    check = check_model(model, reference, layers=layers, num_prompts=4)
    assert (check.layers, check.num_alike) == (layers, check.num_tokens)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_the_loss_is_what_two_models_differ_by(tiny: Tiny, scheme: str) -> None:
    plain, model = load_model(tiny("qwen3")), load_model(tiny("qwen3"), quantization=scheme)
    told = quantization_of(model)
    assert told is not None and quantization_of(plain) is None
    kept, errors, weights, num_bytes = 0, 0.0, 0.0, 0
    for one, other in zip(plain.modules(), model.modules(), strict=True):
        if isinstance(other, Int8Linear | Int4Linear):
            kept, num_bytes = kept + 1, num_bytes + other.num_bytes
            errors += float((kept_of(other) - one.weight).square().sum())
            weights += float(one.weight.square().sum())
    assert (told.num_linears, told.num_bytes) == (kept, num_bytes)
    assert told.weight_error == pytest.approx((errors / weights) ** 0.5, rel=1e-3)
    assert told.num_linears + told.num_left == sum(isinstance(one, torch.nn.Linear) for one in plain.modules())
    assert told.kl_nats > 0.0 and 0.0 < told.same_share < 1.0
    assert 3 < told.num_bytes_before / told.num_bytes < 7
    assert str(told).startswith(f"{kept} linear layers in {scheme}, ")


def test_fewer_bits_lose_more(tiny: Tiny) -> None:
    eight, four = (quantization_of(load_model(tiny("qwen3"), quantization=scheme)) for scheme in ("int8", "int4"))
    assert eight is not None and four is not None
    assert eight.weight_error * 5 < four.weight_error < 0.2
    assert eight.kl_nats < four.kl_nats and eight.same_share > four.same_share


def test_its_kv_is_not_taken_for_that_of_the_model(tiny: Tiny) -> None:
    names = {fingerprint(load_model(tiny("llama"), quantization=scheme)) for scheme in (None, "int8", "int4")}
    assert len(names) == 3


def test_what_cannot_be_quantized_is_refused(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"quantization: must be int8 or int4, got 'fp8'"):
        LLM(tiny("llama"), quantization="fp8")
    with pytest.raises(ConfigError, match="is for a model that is loaded here"):
        LLM(load_model(tiny("llama")), quantization="int8")
    odd = torch.nn.Module()
    odd.inner, odd.device = torch.nn.Linear(30, 16), torch.device("cpu")
    with pytest.raises(ConfigError, match="no linear layer has multiples of 32 inputs and 16 outputs"):
        quantize(odd, "int8")
    odd.device = torch.device("cuda")
    with pytest.raises(ConfigError, match="int8 is for models on a CPU"):
        quantize(odd, "int8")


def test_it_is_told_and_its_tokens_are_those_of_the_library(
    tiny: Tiny, run_command: Callable[..., int], capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    path = tiny("llama")
    (expected,) = LLM(path, quantization="int4", kv_memory="1MiB").generate(
        [[5, 6, 7]], SamplingParams(max_tokens=8, ignore_eos=True)
    )
    prompts = path.parent / "ids.jsonl"
    prompts.write_text('{"prompt": [5, 6, 7]}\n')
    options = (
        "--model",
        path,
        "--max-tokens",
        8,
        "--set",
        "ignore_eos=true",
        "--kv-memory",
        "1MiB",
        "--set",
        "quantization=int4",
    )
    assert run_command("generate", "--prompts", prompts, *options) == 0
    said = capsysbinary.readouterr()
    assert "linear layers in int4, 1 left as they were: " in said.err.decode()
    assert msgspec.json.decode(said.out)["tokens"] == list(expected.tokens)


def test_a_check_tells_the_loss(
    tiny: Tiny, run_command: Callable[..., int], capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    path = tiny("llama")
    assert run_command("model", "check", path, "--prompts", 2, "--set", "quantization=int8") == 0
    told = quantization_of(load_model(path, quantization="int8"))
    assert f"weights     {told}\n" in capsysbinary.readouterr().out.decode()
    assert run_command("model", "check", path, "--prompts", 2, "--set", "quantization=int8", "--json") == 0
    assert msgspec.json.decode(capsysbinary.readouterr().out)["quantization"] == msgspec.to_builtins(told)
    assert run_command("model", "check", path, "--prompts", 1, "--json") == 0
    assert msgspec.json.decode(capsysbinary.readouterr().out)["quantization"] is None
    assert run_command("model", "check", path, "--set", "quantization=int5") == 2
    assert "--set quantization: must be int8 or int4, got 'int5'" in capsysbinary.readouterr().err.decode()


@pytest.mark.parametrize("server", ["model", "sessions"])
def test_servers_tell_the_loss(tiny: Tiny, server: str) -> None:
    """On standard error, before they listen."""
    pytest.importorskip("httptools" if server == "model" else "grpc")
    address = ("--port", "0") if server == "model" else ("--port", "0", "--window", "64")
    command = [
        sys.executable,
        "-m",
        "kvarts",
        "serve",
        server,
        "--model",
        str(tiny("llama")),
        "--set",
        "quantization=int8",
    ]
    command += ["--kv-memory", "1MiB", *address]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            lines = []
            for line in process.stderr:
                lines.append(line)
                if " on " in line and "127.0.0.1" in line:
                    break
        finally:
            process.terminate()
    told = [line for line in lines if line.startswith("kvarts: 28 linear layers in int8, 1 left as they were: ")]
    assert len(told) == 1, lines

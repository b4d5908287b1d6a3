"""Configs as they are published, against sizes worked out by hand: formats, KV of every kind, what is left out."""

from __future__ import annotations

import json
import re
import struct
from fractions import Fraction
from math import prod
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvarts.base.errors import ConfigError, InputError, KvartsError
from kvarts.cli.commands import cli
from kvarts.cost.hardware.checkpoint_formats import kv_format_of
from kvarts.cost.hardware.device import load_device
from kvarts.cost.hardware.fit import check_split, draft_bytes_per_token
from kvarts.cost.hardware.geometry import Geometry
from kvarts.cost.hardware.layout_file import EXAMPLE
from kvarts.cost.hardware.model_config import hub_models, load_geometry

LLAMA_70B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
QWEN_235B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}
DEEPSEEK: dict[str, Any] = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
    "torch_dtype": "bfloat16",
}
V32 = {**DEEPSEEK, "model_type": "deepseek_v32", "kv_lora_rank": 512, "index_head_dim": 128, "index_n_heads": 64}
MODELOPT = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
FP8_KV = {"num_bits": 8, "type": "float", "dynamic": False}


def read(
    directory: Path, values: dict[str, Any], *, beside: object = None, weight_dtype: str | None = None
) -> Geometry:
    (directory / "config.json").write_text(json.dumps(values))
    if beside is not None:
        (directory / "hf_quant_config.json").write_text(json.dumps(beside))
    return load_geometry(directory, weight_dtype)


def shown(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli, ["model", "show", *arguments, "--json"])
    assert result.exit_code == 0, (result.output, result.exception)
    values: dict[str, Any] = json.loads(result.output)
    return values


# Number formats -------------------------------------------------------------------------------------------------


def test_formats_beside_the_config(tmp_path: Path) -> None:
    """NVIDIA's Llama 3.1 70B in FP8: vLLM 0.32 says quantization=modelopt, kv_cache_dtype=fp8_e4m3."""
    geometry = read(tmp_path, LLAMA_70B, beside={"producer": {"name": "modelopt"}, "quantization": MODELOPT})
    embeddings = 2 * 128_256 * 8192
    assert geometry.weight_dtype == "fp8"
    assert geometry.weight_bytes == pytest.approx(70.55e9 + embeddings, rel=0.001)
    assert geometry.kv_bytes_per_token() == 80 * 2 * 8 * 128
    assert geometry.kv_bytes_per_token("bfloat16") == 2 * 80 * 2 * 8 * 128
    assert shown(str(tmp_path), "--device", "h200-141gb")["fit"]["num_pages"] > 20_000


def test_a_config_that_has_formats_is_believed_before_the_file_beside_it(tmp_path: Path) -> None:
    own = {**LLAMA_70B, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    geometry = read(tmp_path, own, beside={"quantization": MODELOPT})
    assert (geometry.weight_dtype, geometry.kv_dtype, geometry.fp8_block) == ("fp8-block", None, (128, 128))


def test_a_damaged_file_beside_the_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text("{")
    with pytest.raises(InputError, match=r"hf_quant_config\.json: is not readable JSON"):
        read(tmp_path, LLAMA_70B)


@pytest.mark.parametrize(
    ("quantization", "weights", "experts", "kv"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": FP8_KV}, "nvfp4", "nvfp4", "fp8"),
        ({"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"}, "nvfp4", "nvfp4", None),
        ({"producer": {"name": "modelopt"}, "quant_algo": "FP8", "kv_cache_scheme": "FP8"}, "fp8", "fp8", "fp8"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8", "fp8", None),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "int4-g32", "int4-g32", None),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4-block", "int4-block", None),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "kv_cache_quant_algo": "NVFP4",
                "ignore": [f"model.layers.{layer}.self_attn*" for layer in range(94)],
            },
            "bfloat16",
            "nvfp4",
            "nvfp4",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "a": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}
                },
                "ignore": ["re:.*self_attn.*", "lm_head"],
                "kv_cache_scheme": FP8_KV,
            },
            "bfloat16",
            "int4-g32",
            "fp8",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}},
            },
            "fp8",
            "fp8",
            None,
        ),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {
                    **{
                        f"model.layers.{n}.self_attn.{m}_proj": {"quant_algo": "FP8"} for n in range(94) for m in "qkvo"
                    },
                    **{f"model.layers.{n}.mlp.experts": {"quant_algo": "W4A16_NVFP4"} for n in range(94)},
                },
            },
            "fp8",
            "nvfp4",
            None,
        ),
    ],
)
def test_formats_by_method(
    tmp_path: Path, quantization: dict[str, Any], weights: str, experts: str, kv: str | None
) -> None:
    geometry = read(tmp_path, {**QWEN_235B, "quantization_config": quantization})
    assert (geometry.weight_dtype, geometry.expert_dtype, geometry.kv_dtype) == (weights, experts, kv)
    bits = {
        "nvfp4": Fraction(9, 2),
        "fp8": Fraction(8),
        "int4-g32": Fraction(9, 2),
        "int4-block": 4 + Fraction(20, 128),
    }
    expert = 94 * 128 * 3 * 4096 * 1536
    router, attention = 94 * 128 * 4096, 94 * 4096 * 128 * (64 + 64 + 4 + 4)
    plain = geometry.num_parameters - expert - attention
    expected = expert * bits[experts] + attention * bits.get(weights, Fraction(16)) + plain * 16
    assert geometry.weight_bytes * 8 == pytest.approx(float(expected), abs=8)
    assert router < plain


def test_layers_that_are_left_out_are_counted_as_they_are(tmp_path: Path) -> None:
    """The first layer in 16 bits: 3 x 8192 x 28672 + 2 x 8192 x (8192 + 1024) numbers have a byte more."""
    every = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
    but_one = {**every, "ignore": ["lm_head", "model.layers.0*", "model.visual*", "mtp.layers.1*"]}
    whole = read(tmp_path, {**LLAMA_70B, "quantization_config": every}).weight_bytes
    assert read(tmp_path, {**LLAMA_70B, "quantization_config": but_one}).weight_bytes - whole == (
        3 * 8192 * 28672 + 2 * 8192 * (8192 + 1024)
    )


def test_an_option_that_answers_is_enough(tmp_path: Path) -> None:
    unknown = {**LLAMA_70B, "quantization_config": {"quant_method": "of tomorrow"}}
    with pytest.raises(ConfigError, match="'of tomorrow' is not understood"):
        read(tmp_path, unknown)
    assert read(tmp_path, unknown, weight_dtype="nvfp4").weight_dtype == "nvfp4"
    assert shown(str(tmp_path), "--set", "weight_dtype=nvfp4")["weight_dtype"] == "nvfp4"


@pytest.mark.parametrize(
    ("said", "kv", "notes"),
    [
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "fp8", False),
        ({"quant_method": "modelopt", "kv_cache_scheme": {**FP8_KV, "dynamic": True}}, None, True),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "INT8"}, None, True),
        ({"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "nvfp4", False),
        ({"quant_method": "fp8", "kv_cache_quant_algo": "FP8"}, None, False),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": FP8_KV}, "fp8", False),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, None, False),
    ],
)
def test_formats_of_kv_as_vllm_reads_them(said: dict[str, Any], kv: str | None, notes: bool) -> None:
    assert kv_format_of(said)[0] == kv
    assert (kv_format_of(said)[1] is not None) == notes


def test_the_index_of_the_weights_is_believed(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 72_700_000_000}}))
    assert read(tmp_path, LLAMA_70B).weight_bytes == 72_700_000_000
    assert read(tmp_path, LLAMA_70B, weight_dtype="fp8").weight_bytes > 72_000_000_000
    index.write_text(json.dumps({"metadata": {"total_size": -1}}))
    with pytest.raises(InputError, match=r"index\.json: metadata\.total_size: is -1"):
        read(tmp_path, LLAMA_70B)


def test_float32_is_loaded_in_16_bits_and_said(tmp_path: Path) -> None:
    whole, half = read(tmp_path, {**LLAMA_70B, "torch_dtype": "float32"}), read(tmp_path, LLAMA_70B)
    assert (whole.weight_bytes, whole.kv_bytes_per_token()) == (half.weight_bytes, half.kv_bytes_per_token())
    assert "float32" in whole.notes[0]
    assert not half.notes


# KV --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "kv_dtype", "device", "expected"),
    [
        ({**DEEPSEEK, "model_type": "deepseek_v3"}, None, None, 61 * (512 + 64) * 2),  # kv_lora_rank left out
        (V32, None, "h200-141gb", 61 * (576 * 2 + 132)),
        (V32, "fp8", "h200-141gb", 61 * (656 + 132)),
        (V32, "fp8", None, 61 * (656 + 132)),
        (V32, "fp8", "b200-180gb", 61 * (576 + 132)),
        ({**DEEPSEEK, "model_type": "deepseek_v3", "kv_lora_rank": 512}, "fp8", "h200-141gb", 61 * 576),
        (LLAMA_70B, "int8", None, 80 * 2 * 8 * (128 + 4)),
        (LLAMA_70B, "int8_per_token_head", None, 80 * 2 * 8 * (128 + 4)),
        (LLAMA_70B, "fp8_per_token_head", None, 80 * 2 * 8 * (128 + 4)),
        (LLAMA_70B, "fp8_e4m3", None, 80 * 2 * 8 * 128),
        (LLAMA_70B, "nvfp4", None, 80 * 2 * 8 * (64 + 8)),
    ],
)
def test_bytes_of_a_token(
    tmp_path: Path, values: dict[str, Any], kv_dtype: str | None, device: str | None, expected: int
) -> None:
    geometry = read(tmp_path, values).on(None if device is None else load_device(device))
    assert geometry.kv_bytes_per_token(kv_dtype) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("zai-org/GLM-5.2", 78 * 1152 + 21 * 132),  # 21 of 78 layers have an indexer
        ("zai-org/GLM-5", 78 * (1152 + 132)),
        ("MiniMaxAI/MiniMax-M3", 60 * 2 * 4 * 128 * 2 + 57 * 256),
        ("XiaomiMiMo/MiMo-V2-Flash", (9 * 4 + 39 * 8) * (192 + 128) * 2),
        ("stepfun-ai/Step-3.7-Flash", 45 * 2 * 8 * 128 * 2),
        ("moonshotai/Kimi-K3", 24 * 576 * 2),
        ("Qwen/Qwen3-VL-8B-Instruct", 36 * 2 * 8 * 128 * 2),
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4", 8 * 2 * 2 * 128),
        ("qwen/qwen3-235b-a22b-fp8", 94 * 2 * 4 * 128 * 2),
        ("openai/gpt-oss-20b", 24 * 2 * 8 * 64 * 2),
    ],
)
def test_names_are_ids_of_the_hub(name: str, expected: int) -> None:
    geometry = load_geometry(name)
    assert geometry.kv_bytes_per_token() == expected
    assert geometry.source.lower().startswith("https://huggingface.co/" + name.lower())


def test_states_in_the_formats_that_engines_keep() -> None:
    """Per layer: inputs of the convolution in 16 bits, and the state itself as vLLM 0.32 has it."""
    conv = {"Qwen/Qwen3.5-27B": 3 * (2 * 16 + 48) * 128 * 2, "moonshotai/Kimi-K3": 3 * 3 * 96 * 128 * 2}
    assert load_geometry("Qwen/Qwen3.5-27B").state_bytes == 48 * (conv["Qwen/Qwen3.5-27B"] + 48 * 128 * 128 * 4)
    assert load_geometry("moonshotai/Kimi-K3").state_bytes == 69 * (conv["moonshotai/Kimi-K3"] + 96 * 128 * 128 * 4)
    assert load_geometry("qwen3-next-80b-a3b").state_bytes == 36 * (3 * 64 * 128 * 2 + 32 * 128 * 128 * 2)


def test_deepseek_v4_keeps_windows_entries_and_partial_states() -> None:
    """Per kind: layers, bytes of a token, tokens kept; as vLLM 0.32 says them of DeepSeek-V4-Flash."""
    geometry = load_geometry("deepseek-ai/DeepSeek-V4-Flash")
    found = {(group.layer.span, group.layer.read_bits("fp8") / 8, group.num_layers) for group in geometry.kv_groups}
    assert found == {
        (128, 584, 43),
        (None, Fraction(584, 4), 21),
        (None, Fraction(132, 4), 21),
        (None, Fraction(584, 128), 20),
        (8, 2 * 2 * 512 * 4, 21),
        (8, 2 * 2 * 128 * 4, 21),
        (128, 2 * 512 * 4, 20),
    }


@pytest.mark.parametrize(
    ("name", "kv_dtype", "expected"),
    [
        ("Qwen/Qwen3.5-27B", None, 2 * 4 * 256 * 2),
        ("Qwen/Qwen3.5-27B", "fp8", 2 * 4 * 256),
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4", None, 2 * 2 * 128),
        ("deepseek-ai/DeepSeek-V3.2", None, 1152 + 132),
        ("XiaomiMiMo/MiMo-V2-Flash", None, 8 * (192 + 128) * 2),
        ("llama-3.1-8b", None, 2 * 8 * 128 * 2),
    ],
)
def test_a_layer_that_drafts_has_kv_of_its_own_kind(name: str, kv_dtype: str | None, expected: int) -> None:
    assert draft_bytes_per_token(load_geometry(name), 1, kv_dtype) == expected


def test_a_dense_granite_has_no_experts_and_no_states(tmp_path: Path) -> None:
    """Granite 4.0 Micro: 40 layers of attention in a family of hybrids with experts, with 0 of both."""
    granite = {
        "model_type": "granitemoehybrid",
        "hidden_size": 2560,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "layer_types": ["attention"] * 40,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 8192,
        "vocab_size": 100_352,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    geometry = read(tmp_path, granite)
    assert (geometry.kv_bytes_per_token(), geometry.state_bytes) == (40 * 2 * 8 * 64 * 2, 0)
    attention, wide = 2 * 2560 * 64 * (40 + 8), 3 * 2560 * 8192
    assert geometry.num_parameters == 100_352 * 2560 + 40 * (attention + wide + 2 * 2560) + 2560


def test_families_in_their_published_form(tmp_path: Path) -> None:
    ministral = {"model_type": "ministral3", "hidden_size": 4096, "num_hidden_layers": 34, "vocab_size": 131_072}
    fp8 = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    outer = {"model_type": "mistral3", "text_config": ministral, "quantization_config": fp8, "dtype": "bfloat16"}
    assert read(tmp_path, outer).kv_bytes_per_token() == 34 * 2 * 8 * 128 * 2
    assert read(tmp_path, outer).weight_dtype == "fp8"
    step = {"model_type": "step3p5", "num_attention_groups": 8, "num_hidden_layers": 3, "sliding_window": 512}
    step |= {"layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]}
    step |= {"attention_other_setting": {"num_attention_heads": 96, "num_attention_groups": 4, "head_dim": 64}}
    step |= {"moe_num_experts": 8, "moe_top_k": 2, "moe_layers_enum": "1,2"}
    geometry = read(tmp_path, step)
    assert [layer.head_numbers * layer.num_heads for layer in geometry.layers] == [2048, 512, 2048]
    assert geometry.draft == geometry.layers[1]
    assert geometry.experts is not None
    assert (geometry.experts.num_layers, geometry.experts.count) == (2, 8)
    lite = {"model_type": "glm4_moe_lite"}
    assert read(tmp_path, lite).kv_bytes_per_token() == 47 * 576 * 2
    kimi = {"model_type": "kimi_linear", "linear_attn_config": {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27]}}
    assert read(tmp_path, kimi).kv_bytes_per_token() == 7 * 576 * 2
    only_kv = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    geometry = read(tmp_path, {**LLAMA_70B, "compression_config": only_kv})
    assert (geometry.weight_dtype, geometry.kv_dtype) == ("bfloat16", "fp8")


# What is left out, and what cannot be ---------------------------------------------------------------------------


def test_a_window_that_is_not_used(tmp_path: Path) -> None:
    """Qwen2 has `use_sliding_window` false by default; else only layers from `max_window_layers` slide."""
    qwen = {**LLAMA_70B, "model_type": "qwen2", "sliding_window": 4096}
    assert read(tmp_path, qwen).windows == (None,) * 80
    used = read(tmp_path, {**qwen, "use_sliding_window": True, "max_window_layers": 78})
    assert used.windows == (None,) * 78 + (4096,) * 2


def test_five_fields_are_a_config(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    nested = {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": {**text, "sliding_window": 1024}}
    assert read(tmp_path, nested).kv_bytes_per_token() == 34 * 2 * 4 * 256 * 2
    del nested["text_config"]["model_type"]  # type: ignore[attr-defined]
    assert read(tmp_path, nested).kv_bytes_per_token() == 34 * 2 * 4 * 256 * 2


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("num_hidden_layers", 0, "num_hidden_layers: Expected `int` >= 1"),
        ("num_hidden_layers", -1, "num_hidden_layers: Expected `int` >= 1"),
        ("num_hidden_layers", "4", "num_hidden_layers: Expected `int | null`, got `str`"),
        ("num_hidden_layers", 10**9, "num_hidden_layers: Expected `int` <= 10000"),
        ("num_hidden_layers", True, "num_hidden_layers: Expected `int | null`, got `bool`"),
        ("head_dim", 64.5, "head_dim: Expected `int | null`, got `float`"),
        ("hidden_size", None, "hidden_size: Expected `int`, got `null`"),
        ("vocab_size", 10**12, "vocab_size: Expected `int` <= 2147483647"),
        ("num_key_value_heads", [8], "num_key_value_heads: Expected `int | null`, got `array`"),
        ("layer_types", "full", "layer_types: Expected `array | null`, got `str`"),
    ],
)
def test_sizes_that_cannot_be_are_named(tmp_path: Path, field: str, value: Any, says: str) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, {**LLAMA_70B, field: value})
    assert says in str(caught.value)
    assert caught.value.exit_code == 4
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: {field}: ")
    assert isinstance(CliRunner().invoke(cli, ["model", "show", str(tmp_path)]).exception, InputError)


@pytest.mark.parametrize(
    ("model", "split", "says"),
    [
        ("Qwen/Qwen3-235B-A22B-FP8", {"tensor_parallel": 8}, "192 of the 1,536 numbers"),
        ("Qwen/Qwen3-235B-A22B-FP8", {"tensor_parallel": 8, "expert_parallel": 8}, None),
        ("Qwen/Qwen3-235B-A22B-FP8", {"tensor_parallel": 4}, None),
        ("Qwen/Qwen3-235B-A22B", {"tensor_parallel": 8}, None),
        ("Qwen/Qwen3-235B-A22B", {"tensor_parallel": 3}, "cannot share the 64 attention heads"),
        ("deepseek-ai/DeepSeek-V3", {"tensor_parallel": 8}, None),
        ("Qwen/Qwen3-8B", {"expert_parallel": 2, "tensor_parallel": 2}, "has no experts"),
        ("Qwen/Qwen3-8B", {"pipeline_parallel": 37}, "must be at most 36"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", {"tensor_parallel": 8}, None),
    ],
)
def test_one_check_of_splits(model: str, split: dict[str, int], says: str | None) -> None:
    options = [text for name, ways in split.items() for text in ("--set", f"{name}={ways}")]
    result = CliRunner().invoke(cli, ["model", "show", model, *options])
    if says is None:
        check_split(load_geometry(model), **split)
        assert result.exit_code == 0
        return
    with pytest.raises(ConfigError, match=says):
        check_split(load_geometry(model), **split)
    assert isinstance(result.exception, KvartsError)
    assert says in str(result.exception)


def test_eight_devices_in_a_word() -> None:
    fit = shown("Qwen/Qwen3-235B-A22B", "--device", "8xH200")
    assert fit == shown("Qwen/Qwen3-235B-A22B", "--device", "h200", "--tensor-parallel", "8")
    result = CliRunner().invoke(cli, ["model", "show", "qwen3-8b", "--device", "8xh200", "--tensor-parallel", "2"])
    assert "is 8 devices, and the model is split over 2" in str(result.exception)


def test_a_layout_file_states_any_model(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "of tomorrow"}')
    result = CliRunner().invoke(cli, ["model", "show", str(config)])
    assert isinstance(result.exception, ConfigError)
    lines = str(result.exception.hint).partition("such as: ")[2].split(" | ")
    assert len(lines) == 5
    assert EXAMPLE in (Path(__file__).parents[3] / "docs/reference.md").read_text()
    layout = tmp_path / "layout.toml"
    layout.write_text("\n".join(lines))
    values = shown("of-tomorrow", "--set", f"kv_layout={layout!s}", "--device", "h100")
    assert values["kv_bytes_per_token"] == 62 * 2 * 16 * 128 * 2
    assert values["weight_bytes"] == 54_000_000_000
    assert [(group["kind"], group["window"]) for group in values["kv_groups"]] == [("full", None), ("window", 1024)]
    for wrong, says in [
        ("layers = []", "layers: has no layer that keeps tokens"),
        ('layers = [{count = 2, kind = "full", heads = 8}]', "layers[0].head_dim: is missing for kind 'full'"),
        ('layers = [{count = 1000000000, kind = "full", heads = 8, head_dim = 64}]', "count: Expected `int` <= 10000"),
        ('layers = [{count = 2, kind = "wide"}]', "kind: Invalid enum value 'wide'"),
    ]:
        layout.write_text(wrong)
        failed = CliRunner().invoke(cli, ["model", "show", "x", "--set", f"kv_layout={layout!s}"])
        assert says in str(failed.exception), failed.output


def test_every_id_is_read() -> None:
    for name in hub_models():
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", name)
        assert load_geometry(name).kv_bytes_per_token() > 0


@pytest.mark.parametrize(
    ("repository", "weights_gib", "name"),
    [
        ("moonshotai/Kimi-K2.5", 553, "kimi-k2.5"),
        ("moonshotai/Kimi-K2.7-Code", 553, "kimi-k2.5"),
        ("nvidia/Qwen3.6-27B-NVFP4", 19, "nvidia/Qwen3.6-27B-NVFP4"),
        ("Qwen/Qwen3.6-27B", 50, "qwen3.6-27b"),
        ("deepseek-ai/DeepSeek-V3.1", 627, "deepseek-v3.1"),
        ("nvidia/DeepSeek-V3.1-NVFP4", 360, "nvidia/DeepSeek-V3.1-NVFP4"),
        ("Qwen/Qwen3-8B-FP8", 9, "Qwen/Qwen3-8B-FP8"),
        ("meta-llama/Llama-3.1-8B-Instruct", 15, "llama-3.1-8b"),
        ("zai-org/GLM-4.6", 657, "glm-4.7"),
    ],
)
def test_weights_of_an_id_have_the_format_of_its_repository(repository: str, weights_gib: int, name: str) -> None:
    geometry = load_geometry(repository)
    assert geometry.name == name
    assert round(geometry.weight_bytes / 2**30) == weights_gib


def write_gguf(path: Path, values: dict[str, int | str], tensors: dict[str, tuple[int, ...]], kind: int) -> int:
    """Write a GGUF file with zeros for its tensors, in Q8_0: 34 bytes per 32 numbers; return the bytes of all."""

    def text(word: str) -> bytes:
        return struct.pack("<Q", len(word)) + word.encode()

    header, offset = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)), 0
    for key, value in values.items():
        header += text(key)
        header += struct.pack("<I", 8) + text(value) if isinstance(value, str) else struct.pack("<II", 4, value)
    for name, shape in tensors.items():
        header += text(name) + struct.pack("<I", len(shape))
        header += struct.pack(f"<{len(shape)}QIQ", *reversed(shape), kind, offset)
        offset += -(-prod(shape) // 32 * 34 // 32) * 32
    header += bytes(-len(header) % 32)
    path.write_bytes(header + bytes(offset))
    return offset


def test_gguf_files_are_read(tmp_path: Path) -> None:
    """SmolLM2-135M in Q8_0: KV in 16 bits, and weights as they are in the file."""
    values: dict[str, int | str] = {
        "general.architecture": "llama",
        "llama.block_count": 30,
        "llama.embedding_length": 576,
        "llama.feed_forward_length": 1536,
        "llama.attention.head_count": 9,
        "llama.attention.head_count_kv": 3,
    }
    path = tmp_path / "model.gguf"
    stored = write_gguf(path, values, {"token_embd.weight": (49152, 576)}, kind=8)
    geometry = shown(str(path))
    assert geometry["kv_bytes_per_token"] == 30 * 2 * 3 * 64 * 2
    assert geometry["weight_bytes"] == stored
    assert geometry["num_parameters"] == 134_515_008
    assert shown(str(path), "--kv-dtype", "int8")["kv_bytes_per_token"] == 12_240
    write_gguf(path, {**values, "general.architecture": "of tomorrow"}, {"token_embd.weight": (32, 32)}, kind=8)
    failed = CliRunner().invoke(cli, ["model", "show", str(path)])
    assert isinstance(failed.exception, ConfigError)
    assert "--set kv_layout=FILE" in str(failed.exception.hint)
    path.write_bytes(b"GGUF")
    assert isinstance(CliRunner().invoke(cli, ["model", "show", str(path)]).exception, InputError)

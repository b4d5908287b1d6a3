"""Geometry, devices, and how the one fits the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvarts.base.errors import ConfigError, InputError, KvartsError, MissingFileError
from kvarts.core.config import EngineConfig
from kvarts.cost.hardware.device import Device, device_names, load_device
from kvarts.cost.hardware.fit import MemoryFit, fit_memory, local_kv_bytes_per_token, local_weight_bytes
from kvarts.cost.hardware.geometry import Geometry
from kvarts.cost.hardware.model_config import load_geometry, preset_names

# Counted over the modules that transformers 5.23 builds from the same configurations.
PARAMETERS = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "mistral-7b": 7_241_732_096,
    "gemma-3-27b": 27_009_346_304,
    "deepseek-v3": 671_026_404_352,
    "gpt-oss-120b": 116_829_156_672,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
    "gemma-3n-e4b": 6_835_235_568,
    "gemma-4-26b-a4b": 25_233_141_760,
    "gemma-4-31b": 30_697_345_280,
    "gpt-oss-20b": 20_914_757_184,
    "llama-4-scout": 107_769_861_120,
    "llama-4-maverick": 400_711_848_960,
    "kimi-k2": 1_026_408_209_408,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "qwen3.5-27b": 26_895_998_464,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "glm-4.5-air": 106_852_245_504,
    "glm-4.7": 352_797_814_784,
    "nemotron-h-56b": 56_324_350_464,
    "nemotron-3-nano-30b-a3b": 31_577_937_344,
    "granite-4.0-h-tiny": 6_939_037_248,
    "granite-4.0-h-small": 32_207_337_984,
    "deepseek-v3.1": 671_026_404_352,
    "deepseek-v3.2": 671_877_929_216,
    "glm-5": 743_911_199_232,
    "kimi-k2.5": 1_026_408_209_408,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-coder-480b-a35b": 480_154_875_392,
    "qwen3.5-122b-a10b": 122_111_526_912,
    "qwen3.5-397b-a17b": 396_346_350_336,
    "qwen3.6-27b": 26_895_998_464,
    "qwen3.6-35b-a3b": 34_660_610_688,
    "llama-3.1-405b": 405_853_388_800,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "codellama-7b": 6_738_546_688,
    "codellama-34b": 33_743_970_304,
    "yi-34b": 34_388_917_248,
    "mistral-nemo": 12_247_782_400,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-14b": 14_768_307_200,
    "minimax-m2": 228_689_748_992,
    "minimax-m2.5": 228_689_748_992,
    "smollm2": 134_515_008,
}
KV_BYTES_PER_TOKEN = {
    "llama-3.1-8b": 32 * 2 * 8 * 128 * 2,
    "llama-3.1-70b": 80 * 2 * 8 * 128 * 2,
    "qwen3-0.6b": 28 * 2 * 8 * 128 * 2,
    "qwen3-8b": 36 * 2 * 8 * 128 * 2,
    "qwen3-32b": 64 * 2 * 8 * 128 * 2,
    "qwen3-30b-a3b": 48 * 2 * 4 * 128 * 2,
    "mistral-7b": 32 * 2 * 8 * 128 * 2,
    "gemma-3-27b": 62 * 2 * 16 * 128 * 2,
    "deepseek-v3": 61 * (512 + 64) * 2,
    "gpt-oss-120b": 36 * 2 * 8 * 64 * 2,
    "gemma-3-1b": 26 * 2 * 1 * 256 * 2,
    "gemma-3-4b": 34 * 2 * 4 * 256 * 2,
    "gemma-3-12b": 48 * 2 * 8 * 256 * 2,
    "gemma-3n-e4b": (35 - 15) * 2 * 2 * 256 * 2,
    "gemma-4-26b-a4b": (25 * 2 * 8 * 256 + 5 * 2 * 2 * 512) * 2,
    "gemma-4-31b": (50 * 2 * 16 * 256 + 10 * 2 * 4 * 512) * 2,
    "gpt-oss-20b": 24 * 2 * 8 * 64 * 2,
    "llama-4-scout": 48 * 2 * 8 * 128 * 2,
    "llama-4-maverick": 48 * 2 * 8 * 128 * 2,
    "kimi-k2": 61 * (512 + 64) * 2,
    "qwen3-next-80b-a3b": 12 * 2 * 2 * 256 * 2,
    "qwen3.5-27b": 16 * 2 * 4 * 256 * 2,
    "qwen3.5-35b-a3b": 10 * 2 * 2 * 256 * 2,
    "glm-4.5-air": 46 * 2 * 8 * 128 * 2,
    "glm-4.7": 92 * 2 * 8 * 128 * 2,
    "nemotron-h-56b": 10 * 2 * 8 * 128 * 2,
    "nemotron-3-nano-30b-a3b": 6 * 2 * 2 * 128 * 2,
    "granite-4.0-h-tiny": 4 * 2 * 4 * 128 * 2,
    "granite-4.0-h-small": 4 * 2 * 8 * 128 * 2,
    "deepseek-v3.1": 61 * (512 + 64) * 2,
    "deepseek-v3.2": 61 * ((512 + 64) * 2 + 128 + 4),
    "glm-5": 78 * ((512 + 64) * 2 + 128 + 4),
    "kimi-k2.5": 61 * (512 + 64) * 2,
    "qwen3-235b-a22b": 94 * 2 * 4 * 128 * 2,
    "qwen3-coder-480b-a35b": 62 * 2 * 8 * 128 * 2,
    "qwen3.5-122b-a10b": 12 * 2 * 2 * 256 * 2,
    "qwen3.5-397b-a17b": 15 * 2 * 2 * 256 * 2,
    "qwen3.6-27b": 16 * 2 * 4 * 256 * 2,
    "qwen3.6-35b-a3b": 10 * 2 * 2 * 256 * 2,
    "llama-3.1-405b": 126 * 2 * 8 * 128 * 2,
    "llama-2-7b": 32 * 2 * 32 * 128 * 2,
    "llama-2-13b": 40 * 2 * 40 * 128 * 2,
    "llama-2-70b": 80 * 2 * 8 * 128 * 2,
    "codellama-7b": 32 * 2 * 32 * 128 * 2,
    "codellama-34b": 48 * 2 * 8 * 128 * 2,
    "yi-34b": 60 * 2 * 8 * 128 * 2,
    "mistral-nemo": 40 * 2 * 8 * 128 * 2,
    "mixtral-8x7b": 32 * 2 * 8 * 128 * 2,
    "mixtral-8x22b": 56 * 2 * 8 * 128 * 2,
    "qwen2.5-7b": 28 * 2 * 4 * 128 * 2,
    "qwen2.5-72b": 80 * 2 * 8 * 128 * 2,
    "qwen3-14b": 40 * 2 * 8 * 128 * 2,
    "minimax-m2": 62 * 2 * 8 * 128 * 2,
    "minimax-m2.5": 62 * 2 * 8 * 128 * 2,
    "smollm2": 30 * 2 * 3 * 64 * 2,
}


def test_parameters_are_those_of_the_modules() -> None:
    assert {name: load_geometry(name).num_parameters for name in preset_names()} == PARAMETERS


def test_kv_bytes_of_a_token() -> None:
    assert {name: load_geometry(name).kv_bytes_per_token() for name in preset_names()} == KV_BYTES_PER_TOKEN


@pytest.mark.parametrize(
    ("name", "active"), [("qwen3-30b-a3b", 3.35e9), ("deepseek-v3", 37.6e9), ("gpt-oss-120b", 5.75e9)]
)
def test_a_token_sees_few_experts(name: str, active: float) -> None:
    assert load_geometry(name).num_active_parameters == pytest.approx(active, rel=0.01)


def test_weights_weigh_what_their_formats_say() -> None:
    llama = load_geometry("llama-3.1-8b")
    assert llama.weight_bytes == 2 * llama.num_parameters
    # gpt-oss keeps its experts in 4.25 bits and the rest in 16: its checkpoint has 65.25 GB.
    assert load_geometry("gpt-oss-120b").weight_bytes == pytest.approx(65.25e9, rel=0.001)
    # DeepSeek-V3 keeps its matrices in 8 bits with a scale a block, and its embeddings in 16.
    deepseek = load_geometry("deepseek-v3")
    assert deepseek.num_parameters < deepseek.weight_bytes < 1.01 * deepseek.num_parameters


def test_weights_may_be_stored_otherwise() -> None:
    llama = load_geometry("llama-3.1-8b")
    halved = llama.stored_as("fp8")
    assert llama.stored_as(None) is llama
    assert halved.weight_bytes == llama.weight_bytes - halved.common_matrix
    with pytest.raises(ConfigError, match="weight_dtype: 'fp7' is not known"):
        llama.stored_as("fp7")


def test_windows_bound_what_a_sequence_needs() -> None:
    gemma = load_geometry("gemma-3-27b")
    assert gemma.layers_by_window == {1024: 52, None: 10}
    assert gemma.windows[:6] == (1024, 1024, 1024, 1024, 1024, None)
    layer = 2 * 16 * 128 * 2
    for tokens in (1, 1024, 1025, 50_000):
        assert gemma.kv_bytes(tokens) == layer * sum(
            tokens if window is None else min(tokens, window) for window in gemma.windows
        )
    assert gemma.kv_bytes(1000, "fp8") == gemma.kv_bytes_per_token("fp8") * 1000


def config(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    return {name: value for name, value in {**values, **changes}.items() if value is not None}


def write(directory: Path, values: object) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(values))
    return path


def test_a_configuration_of_ones_own(tmp_path: Path) -> None:
    write(tmp_path, config())
    geometry = load_geometry(tmp_path)
    attention = 64 * 64 * 2 + 64 * 32 * 2
    assert geometry.num_parameters == 2 * 100 * 64 + 2 * (attention + 3 * 64 * 128 + 2 * 64) + 64
    assert geometry.weight_bytes == 2 * geometry.num_parameters, "stored in 32 bits, loaded in 16"
    assert geometry.kv_bytes_per_token() == 2 * 2 * 2 * 16 * 2
    assert "float32" in geometry.notes[0]
    assert geometry.name == tmp_path.name


def test_a_model_that_also_sees_is_read_by_its_text(tmp_path: Path) -> None:
    text = config(model_type="gemma3_text", torch_dtype=None, sliding_window=8)
    outer = {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text}
    geometry = load_geometry(write(tmp_path, outer))
    assert geometry.windows == (8, 8)
    assert geometry.dtype == "bfloat16"
    assert geometry.num_norms == 4


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"use_sliding_window": False, "sliding_window": 16, "model_type": "qwen2"}, (None, None)),
        ({"sliding_window": 16, "model_type": "mistral"}, (16, 16)),
        ({"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]}, (None, 16)),
        ({"sliding_window": 16, "model_type": "gemma2"}, (16, None)),
    ],
)
def test_which_layers_slide(tmp_path: Path, changes: dict[str, Any], expected: tuple[int | None, ...]) -> None:
    assert load_geometry(write(tmp_path, config(**changes))).windows == expected


@pytest.mark.parametrize(
    ("values", "error", "says"),
    [
        (config(model_type="mamba2"), ConfigError, "model_type: 'mamba2' is not understood"),
        ({**config(), "hidden_size": None}, InputError, "hidden_size: Expected `int`, got `null`"),
        (config(hidden_size="wide"), InputError, "hidden_size: Expected `int`, got `str`"),
        (config(num_hidden_layers=0), InputError, "num_hidden_layers"),
        (config(layer_types=["full_attention"]), InputError, "layer_types: names 1 layers of 2"),
        (config(layer_types=["full_attention", "mamba"]), ConfigError, "layer_types: 'mamba' is not understood"),
        (config(num_experts=4), InputError, "num_experts_per_tok: is missing"),
        ({**config(), "intermediate_size": None}, InputError, "intermediate_size: is missing"),
        (config(torch_dtype="complex64"), ConfigError, "dtype: 'complex64' is not known"),
        (config(quantization_config={"quant_method": "exl3"}), ConfigError, "quant_method: 'exl3' is not understood"),
        ([1], InputError, "holds no object"),
    ],
)
def test_what_is_not_understood_is_named(tmp_path: Path, values: object, error: type[KvartsError], says: str) -> None:
    path = write(tmp_path, values)
    with pytest.raises(error) as caught:
        load_geometry(path)
    assert says in str(caught.value)


def test_a_model_that_nobody_knows() -> None:
    with pytest.raises(MissingFileError, match=r"is neither a model known by name"):
        load_geometry("llama-9")


def test_devices_are_known_by_name_and_a_cpu_by_what_it_has() -> None:
    for name in device_names():
        device = load_device(name)
        assert device.source
        assert device.flops_per_s("bfloat16") > 1e13
        assert device.flops_per_s("mxfp4") == device.flops_per_s("bfloat16")
    cpu = load_device("cpu:cores=8,bandwidth=80GB/s,memory=64GiB,ghz=3,flops_per_cycle=64")
    assert cpu.flops_per_s("float32") == 8 * 3e9 * 64
    assert (cpu.bandwidth_bytes_per_s, cpu.memory_bytes) == (80e9, 64 << 30)


@pytest.mark.parametrize("name", ["abacus", "cpu:cores=x", "cpu:cores=0", "cpu:wheels=4", "cpu:bandwidth=0"])
def test_a_device_that_cannot_be(name: str) -> None:
    with pytest.raises(ConfigError, match="device"):
        load_device(name)


def fit_of(model: Geometry, device: Device, num_tokens: int = 8192, **changes: Any) -> MemoryFit:
    return fit_memory(
        model, device, EngineConfig(max_num_batched_tokens=num_tokens), **{"memory_fraction": 0.9, **changes}
    )


def test_pages_that_fit() -> None:
    llama, device = load_geometry("llama-3.1-8b"), load_device("rtx-4090")
    fit = fit_of(llama, device, 2048)
    used = fit.weight_bytes + fit.activation_bytes + fit.context_bytes
    assert fit.page_bytes == 16 * 131_072
    assert fit.num_pages * fit.page_bytes <= 0.9 * device.memory_bytes - used < (fit.num_pages + 1) * fit.page_bytes
    assert f"{fit.num_pages:,} pages" in fit.equation
    # vLLM 0.19 measured what it needed there, and made 2,588.
    assert fit.num_pages == pytest.approx(2588, rel=0.15)
    with pytest.raises(ConfigError, match="does not fit h100-80gb"):
        fit_of(load_geometry("llama-3.1-70b"), load_device("h100-80gb"))


def test_devices_share_weights_and_heads() -> None:
    llama, device = load_geometry("llama-3.1-70b"), load_device("h100-80gb")
    fits = {ways: fit_of(llama, device, tensor_parallel=ways) for ways in (4, 8)}
    assert fits[4].page_bytes == 2 * fits[8].page_bytes
    assert fits[4].num_pages * 2 < fits[8].num_pages
    assert local_kv_bytes_per_token(llama, 8) == local_kv_bytes_per_token(llama, 16), "a head is kept whole"
    latent = load_geometry("deepseek-v3")
    assert local_kv_bytes_per_token(latent, 8) == latent.kv_bytes_per_token()


@pytest.mark.parametrize("setting", [{"tensor_parallel": 0}, {"memory_fraction": 0.0}, {"memory_fraction": 1.5}])
def test_a_fit_that_cannot_be(setting: dict[str, Any]) -> None:
    (field,) = setting
    with pytest.raises(ConfigError, match=field):
        fit_of(load_geometry("qwen3-0.6b"), load_device("l40s"), **setting)


def test_a_geometry_is_a_value() -> None:
    assert load_geometry("QWEN3-8B") == load_geometry("qwen3-8b")
    assert isinstance(load_geometry("qwen3-8b"), Geometry)


# Devices in files -----------------------------------------------------------------------------------------

MY_CARD = """
memory = "96GiB"
bandwidth = "1597GB/s"
link = "64GB/s"
source = "its maker"
[tflops]
bfloat16 = 503.8
fp8 = 1007.6
"""


@pytest.mark.parametrize(("short", "name"), [("h200", "h200-141gb"), ("B200", "b200-180gb"), ("GB300", "gb300")])
def test_short_names_stand_for_presets(short: str, name: str) -> None:
    assert load_device(short).name == name


def test_a_device_is_described_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(MY_CARD)
    mine, known = load_device(str(path)), load_device("rtx-pro-6000-server")
    assert (mine.name, mine.source) == ("my", "its maker")
    for field in ("memory_bytes", "bandwidth_bytes_per_s", "link_bytes_per_s", "link_kind"):
        assert getattr(mine, field) == getattr(known, field)
    for dtype in ("bfloat16", "fp8", "mxfp4"):
        assert mine.flops_per_s(dtype) == known.flops_per_s(dtype)
    path.write_text(MY_CARD.replace('link = "64GB/s"', 'link_kind = "nvlink"'))
    assert load_device(str(path)).link_bytes_per_s == 0.0


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('memory = "96GiB"', "", "memory"),
        ("96GiB", "much", "memory: 'much' is not a size"),
        ("1597GB/s", "fast", "bandwidth"),
        ("1597GB/s", "0GB/s", "bandwidth"),
        ("bfloat16", "float17", "tflops.float17: 'float17' is not known"),
        ("bfloat16 = 503.8", "", "tflops.bfloat16: is missing"),
        ("503.8", "-1", "tflops"),
        ("503.8", '"x"', "tflops"),
        ("source", "sauce", "sauce"),
        ('link = "64GB/s"', 'link_kind = "rope"', "link_kind"),
        ("[tflops]", "[tflops", "no readable TOML"),
    ],
)
def test_a_device_that_is_described_badly_is_named(tmp_path: Path, old: str, new: str, says: str) -> None:
    path = tmp_path / "my.toml"
    path.write_text(MY_CARD.replace(old, new))
    with pytest.raises(KvartsError) as caught:
        load_device(str(path))
    assert str(path) in str(caught.value)
    assert says in str(caught.value)
    with pytest.raises(MissingFileError):
        load_device(str(tmp_path / "none.toml"))


@pytest.mark.parametrize("name", device_names())
def test_presets_say_where_they_are_from(name: str) -> None:
    device = load_device(name)
    assert len(device.source) > 20
    assert device.memory_bytes > 10 << 30
    assert 1e11 < device.bandwidth_bytes_per_s < 1e13
    assert device.link_bytes_per_s > 0
    assert device.flops_per_s("fp8") >= device.flops_per_s("bfloat16") > 5e13


def test_weights_of_four_bits_take_a_quarter_and_their_scales(tmp_path: Path) -> None:
    whole = load_geometry("llama-3.1-8b")
    presets = json.loads((Path(load_geometry.__code__.co_filename).parent / "presets/models.json").read_text())
    config = {**presets["llama-3.1-8b"], "quantization_config": {"quant_method": "awq", "bits": 4}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    packed = load_geometry(path)
    assert packed.weight_dtype == "int4-block"
    saved = whole.weight_bytes - packed.weight_bytes
    assert saved == pytest.approx(whole.common_matrix * (2 - 0.5 - 20 / 128 / 8), rel=1e-6)
    path.write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq", "bits": 3}}))
    assert load_geometry(path).weight_dtype == "int3-g128"
    path.write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq", "bits": 1}}))
    with pytest.raises(ConfigError, match="1 bits in groups of 128 are not understood"):
        load_geometry(path)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3", "llama-3.1-8b"])
def test_all_devices_together_hold_the_weights(name: str) -> None:
    """With ranks, every rank has all that is not experts, and the experts are there once."""
    geometry = load_geometry(name)
    for tensor, ranks, stages in ((1, 1, 1), (2, 1, 1), (1, 4, 1), (2, 2, 1), (2, 1, 2)):
        local = local_weight_bytes(geometry, tensor, ranks, stages)
        common = geometry.weight_bytes - geometry.expert_bytes
        wanted = ranks * common + geometry.expert_bytes
        assert local * tensor * ranks * stages == pytest.approx(wanted, rel=1e-6)

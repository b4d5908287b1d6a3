"""KV groups: a model that looks at every token of every layer, and the formulas, agree to the byte."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.base.errors import ConfigError
from kvarts.core.config import EngineConfig
from kvarts.core.kv.layers import KvKind, KvLayer, grouped
from kvarts.cost.hardware.device import load_device
from kvarts.cost.hardware.fit import fit_memory, fit_sequences, local_kv_groups, sequence_bytes
from kvarts.cost.hardware.geometry import Geometry
from kvarts.cost.hardware.model_config import load_geometry

from oracles.naive_kv_groups import kept_bits, kept_pages, kept_tokens

pytestmark = pytest.mark.laws


@st.composite
def kv_layers(draw: st.DrawFn) -> KvLayer:
    kind: KvKind = draw(st.sampled_from(get_args(KvKind)))
    span = draw(st.integers(1, 12))
    if kind == "state":
        return KvLayer(kind="state", state_bytes=draw(st.integers(1, 99)))
    if kind == "none":
        return KvLayer(kind="none")
    heads = 1 if kind == "latent" else draw(st.integers(1, 3))
    layer = KvLayer(kind=kind, num_heads=heads, head_numbers=draw(st.integers(1, 4)) * 2)
    if kind in ("window", "chunk"):
        layer = msgspec.structs.replace(layer, span=span)
    if kind == "window":
        layer = msgspec.structs.replace(layer, sink=draw(st.integers(0, 7)))
    return layer


@given(layer=kv_layers(), num_tokens=st.integers(0, 40), page_size=st.integers(1, 6), num_new=st.integers(1, 45))
def test_tokens_and_pages_are_those_that_a_later_token_sees(
    layer: KvLayer, num_tokens: int, page_size: int, num_new: int
) -> None:
    assert layer.num_tokens(num_tokens, num_new) == len(kept_tokens(layer, num_tokens, num_new))
    assert layer.num_pages(num_tokens, page_size, num_new) == len(kept_pages(layer, num_tokens, page_size, num_new))


def model_of(layers: list[KvLayer]) -> Geometry:
    return msgspec.structs.replace(load_geometry("llama-3.1-8b"), layers=tuple(layers))


@given(layers=st.lists(kv_layers(), min_size=1, max_size=5), page_size=st.integers(1, 5), num_new=st.integers(1, 9))
def test_bytes_after_every_token(layers: list[KvLayer], page_size: int, num_new: int) -> None:
    model = model_of(layers)
    groups = local_kv_groups(model, page_size=page_size)
    for num_tokens in range(30):
        bits = kept_bits(layers, num_tokens, page_size, num_new, number_bits=16)
        assert sequence_bytes(groups, num_tokens, page_size, num_new) * 8 == bits
        assert model.kv_bytes(num_tokens) * 8 == kept_bits(layers, num_tokens, 1, 1, number_bits=16)


@given(layers=st.lists(kv_layers(), min_size=1, max_size=8))
def test_groups_are_all_layers_once(layers: list[KvLayer]) -> None:
    groups = grouped(layers)
    assert sum(group.num_layers for group in groups) == len(layers)
    assert len({group.layer for group in groups}) == len(groups)
    assert sorted(layers, key=repr) == sorted((g.layer for g in groups for _ in range(g.num_layers)), key=repr)


def test_a_full_window_takes_one_page_and_gives_one_back() -> None:
    layer = KvLayer(kind="window", num_heads=1, head_numbers=2, span=32)
    assert [layer.num_pages(tokens, 16) for tokens in (16, 17, 32, 33, 47, 48, 49, 64)] == [1, 2, 2, 3, 3, 2, 3, 2]
    assert layer.num_pages(64, 16, num_new=64) == 4
    assert layer.num_pages(64, 16, num_new=17) == 3


def test_what_gemma_and_gpt_oss_take() -> None:
    gemma = load_geometry("gemma-3-27b")
    layer_page = 16 * 2 * 16 * 128 * 2
    fit = fit_sequences(gemma, 32_768, page_size=16)
    assert fit.num_pages == (64, 2048)
    assert fit.num_bytes == layer_page * (52 * 64 + 10 * 2048)
    assert fit.full_bytes == layer_page * 62 * 2048
    gpt = fit_sequences(load_geometry("gpt-oss-120b"), 32_769, page_size=16)
    assert gpt.num_pages == (9, 2049)


@pytest.mark.parametrize(("name", "ways"), [("llama-3.1-8b", 1), ("llama-3.1-70b", 4), ("deepseek-v3", 8)])
def test_models_that_keep_everything_count_as_before(name: str, ways: int) -> None:
    geometry, device = load_geometry(name), load_device("b200-180gb")
    memory = fit_memory(
        geometry,
        device,
        EngineConfig(),
        memory_fraction=0.9,
        tensor_parallel=ways,
    )
    sequence = fit_sequences(geometry, 10_000, page_size=16, tensor_parallel=ways, memory=memory)
    assert sequence.num_bytes == sequence.full_bytes == 625 * memory.page_bytes
    assert sequence.num_sequences == sequence.num_full_sequences == memory.num_pages // 625


def test_a_prompt_that_is_computed_holds_more_than_its_window() -> None:
    gemma = load_geometry("gemma-3-27b")
    memory = fit_memory(
        gemma,
        load_device("h100-80gb"),
        EngineConfig(),
        memory_fraction=0.9,
    )
    few = fit_sequences(gemma, 32_768, page_size=16, memory=memory)
    many = fit_sequences(gemma, 32_768, page_size=16, memory=memory, max_num_batched_tokens=8192)
    window_page = 52 * 16 * 2 * 16 * 128 * 2
    assert few.num_sequences == (memory.kv_bytes) // few.num_bytes == 6
    assert many.num_sequences == (memory.kv_bytes - 512 * window_page) // few.num_bytes == 5
    assert many.num_full_sequences == 1


def test_states_are_set_aside() -> None:
    qwen, device = load_geometry("qwen3-next-80b-a3b"), load_device("b300")
    state = 36 * (3 * (2 * 16 * 128 + 32 * 128) * 2 + 32 * 128 * 128 * 2)
    assert qwen.state_bytes == state
    assert qwen.kv_bytes(1) == state + qwen.kv_bytes_per_token()
    assert qwen.kv_bytes(0) == 0
    few, many = (EngineConfig(max_num_batched_tokens=4096, max_num_seqs=num_seqs) for num_seqs in (64, 4096))
    fit = fit_memory(qwen, device, few, memory_fraction=0.9)
    assert fit.state_bytes == 64 * state
    assert fit.num_pages == (fit.kv_bytes - 64 * state) // fit.page_bytes
    assert f"{fit.state_bytes / 2**30:.2f} states" in fit.equation
    with pytest.raises(ConfigError, match="max_seqs"):
        fit_memory(qwen, device, many, memory_fraction=0.9)


@pytest.mark.parametrize("tokens", [0, -1, 1 << 31])
def test_a_sequence_that_cannot_be(tokens: int) -> None:
    with pytest.raises(ConfigError, match="sequence_tokens"):
        fit_sequences(load_geometry("gpt-oss-20b"), tokens, page_size=16)
    with pytest.raises(ConfigError, match="page_size"):
        fit_sequences(load_geometry("gpt-oss-20b"), 16, page_size=0)

"""Attention through the page tables of KV groups, by every backend, beside attention written out token by token."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="real models need kvarts[torch]")
pytest.importorskip("transformers", reason="real models need kvarts[torch]")

import torch

from kvarts.run.torch.attention import AttentionParams
from kvarts.run.torch.block_cut import cut_blocks
from kvarts.run.torch.flash import FlashBackend
from kvarts.run.torch.numba_backend import NumbaBackend
from kvarts.run.torch.pools import LayerShape
from kvarts.run.torch.sdpa import SdpaBackend
from kvarts.run.torch.triton_backend import TritonBackend

from builders.flash_standin import flash_module
from builders.group_batches import GroupSteps
from builders.triton_interpreted import TRITON, interpret

MAKERS: dict[str, Any] = {
    "sdpa": SdpaBackend,
    "numba": NumbaBackend,
    "flash": FlashBackend,
    "triton": TritonBackend,
}
NAMES = [*(name for name in MAKERS if name != "triton"), TRITON]
SHAPES = [(4, 2, 8), (4, 1, 8), (4, 4, 8)]
"""Heads, KV heads and their numbers: KV of one, a half and two sizes."""
WINDOWS = [None, 1, 3, 4, 6, 8, 200]
"""Smaller than pages, as large, larger, no multiple of them, and larger than any text."""


@pytest.fixture(autouse=True)
def _without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention as its package says of itself, and Triton interpreted."""
    monkeypatch.setitem(sys.modules, "flash_attn", flash_module())
    interpret(monkeypatch)


def layers_of(kinds: Sequence[tuple[int | None, tuple[int, int, int]]], shares: bool) -> list[LayerShape]:
    """Layers of these windows and shapes; of every other, the one after it may read its KV."""
    layers: list[LayerShape] = []
    for window, (heads, kv_heads, head_dim) in kinds:
        layers.append(LayerShape(heads, kv_heads, head_dim, len(layers), window))
        if shares and len(layers) % 2:
            layers.append(LayerShape(heads, kv_heads, head_dim, len(layers) - 1, window))
    return layers


def steps_of(
    layers: Sequence[LayerShape], name: str, page_size: int, seed: int, *, has_sinks: bool, too_early: int = 0
) -> GroupSteps:
    random = Random(seed)
    params = [
        AttentionParams(
            0.4,
            layer.window,
            random.choice([None, 1.5]),
            torch.randn(layer.num_heads, generator=torch.Generator().manual_seed(number)) if has_sinks else None,
        )
        for number, layer in enumerate(layers)
    ]
    cut = cut_blocks(layers, page_size=page_size, dtype=torch.float32)
    num_blocks = 4 * cut.memory.num_blocks(-(-100 // page_size))
    return GroupSteps(
        layers,
        params,
        cut,
        MAKERS[name],
        page_size=page_size,
        num_blocks=num_blocks,
        seed=seed,
        most_sequences=3,
        too_early=too_early,
    )


@pytest.mark.laws
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=6)
@given(
    seed=st.integers(0, 1 << 20),
    page_size=st.sampled_from([1, 4, 8]),
    kinds=st.lists(st.tuples(st.sampled_from(WINDOWS), st.sampled_from(SHAPES)), min_size=1, max_size=4),
    shares=st.booleans(),
    has_sinks=st.booleans(),
)
def test_every_backend_reads_what_its_groups_hold(
    name: str,
    seed: int,
    page_size: int,
    kinds: list[tuple[int | None, tuple[int, int, int]]],
    shares: bool,
    has_sinks: bool,
) -> None:
    """Windows, soft caps, sinks, shared KV and shared pages; blocks are poisoned as soon as nothing needs them."""
    random = Random(seed)
    if page_size == 1:  # is not cut in two, as KV of two sizes may need
        kinds = [(window, kinds[0][1]) for window, _ in kinds]
    with torch.inference_mode():
        steps = steps_of(layers_of(kinds, shares), name, page_size, seed, has_sinks=has_sinks)
        num_sequences = 0
        for _ in range(6):
            if num_sequences < 3:
                steps.begin()
                num_sequences += 1
            counts = [random.choice([0, 1, 1, 1, 2, page_size, page_size + 1, 11]) for _ in range(num_sequences)]
            assert steps.step(counts) < 1e-4


@pytest.mark.parametrize("shape", SHAPES[:2])
@pytest.mark.parametrize("page_size", [1, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_a_page_that_goes_back_one_token_too_early_is_missed(
    name: str, page_size: int, shape: tuple[int, int, int]
) -> None:
    """The control, beside the same without the defect."""
    layers = layers_of([(None, SHAPES[0]), (6, shape), (6, shape)], shares=False)
    with torch.inference_mode():
        for too_early in (0, 1):
            steps = steps_of(layers, name, page_size, 3, has_sinks=True, too_early=too_early)
            steps.begin()
            off = [steps.step([count]) for count in (13, *[1] * 9)]
            assert (max(off) < 1e-4) is (not too_early)

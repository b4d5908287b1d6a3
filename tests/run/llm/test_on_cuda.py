"""L6 on a GPU: greedy tokens are those of transformers, whichever backend reads the pages. Skipped without a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("torch", reason="real models need kvarts[torch]")
pytest.importorskip("transformers", reason="real models need kvarts[torch]")

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from kvarts.core.config import EngineConfig
from kvarts.core.events import LoadStarted
from kvarts.core.sampling import SamplingParams
from kvarts.core.tiers.config import OffloadConfig
from kvarts.run.torch.attention import AttentionMetadata, AttentionParams, ChunkMetadata, DecodeMetadata
from kvarts.run.torch.llm import LLM
from kvarts.run.torch.loading import load_model
from kvarts.run.torch.pools import KVPools, LayerShape
from kvarts.run.torch.sdpa import SdpaBackend
from kvarts.run.torch.tiny import FAMILIES
from kvarts.run.torch.triton_backend import TritonBackend

from builders.kept import Kept
from builders.real_models import GREEDY, VOCABULARY, Ids, prompts_with_prefixes, undisturbed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU")

PAGE_SIZE = 16
Pair = Callable[[str], tuple[Any, Any]]


@pytest.fixture(scope="module")
def on_cuda(tiny: Callable[[str], Path]) -> Pair:
    """A family's model with pages, and the same with transformers' own attention and cache, both on the GPU."""
    loaded: dict[str, tuple[Any, Any]] = {}

    def pair(family: str) -> tuple[Any, Any]:
        if family not in loaded:
            path = tiny(family)
            reference = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
            loaded[family] = load_model(path, device="cuda"), reference.to("cuda")
        return loaded[family]

    return pair


def engine_of(model: Any, *, num_pages: int = 64, budget: int = 2048, **settings: Any) -> LLM:
    config = EngineConfig(
        num_pages=num_pages, page_size=PAGE_SIZE, max_num_batched_tokens=budget, max_num_seqs=min(4, budget)
    )
    return LLM(model, None, config, audit=True, **settings)


@pytest.mark.parametrize("attention", ["sdpa", "triton"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("num_pages", "budget"), [(64, 2048), (20, 16), (16, 7)])
def test_greedy_tokens_are_those_of_transformers(
    on_cuda: Pair, family: str, attention: str, num_pages: int, budget: int
) -> None:
    """Whole prompts and chunks, prefixes that others left, preemption in a small pool."""
    model, reference = on_cuda(family)
    engine = engine_of(model, num_pages=num_pages, budget=budget, attention=attention)
    prompts = prompts_with_prefixes()
    for prompt, completion in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
        assert list(completion.tokens) == undisturbed(reference, prompt, GREEDY.max_tokens)
    assert engine.kv_live_bytes() == 0


@pytest.mark.parametrize("attention", ["sdpa", "triton"])
def test_long_contexts_in_16_bits_differ_only_where_rounding_decides(
    tiny: Callable[[str], Path], attention: str
) -> None:
    path = tiny("qwen3")
    model = load_model(path, dtype="bfloat16", device="cuda")
    reference = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.bfloat16)
    reference = reference.eval().to("cuda")
    random = Random(5)
    prompts = [[random.randrange(VOCABULARY) for _ in range(length)] for length in (1, 15, 16, 17, 130, 257)]
    engine = engine_of(model, num_pages=96, budget=100, attention=attention)
    for prompt, completion in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
        _check_up_to_ties(reference, prompt, list(completion.tokens))


def _check_up_to_ties(reference: Any, prompt: Ids, said: Ids) -> None:
    """Each token is, given those before it, within rounding of the likeliest."""
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + said], device="cuda")).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(said, device="cuda")[:, None])[:, 0]
    assert (logits.max(dim=1).values - chosen).max() < 0.1


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("heads", [(16, 8), (8, 1), (6, 2), (32, 32)])
@pytest.mark.parametrize(("dtype", "head_dim"), [("bfloat16", 128), ("float16", 64), ("bfloat16", 256),
                                                 ("float32", 256), ("float32", 80)])  # fmt: skip
def test_triton_reads_as_sdpa_does(dtype: str, head_dim: int, heads: tuple[int, int], window: int | None) -> None:
    """Shapes of real models: long chunks, decodes far into a sequence, and few of them, which are read in parts."""
    random = np.random.default_rng(3)
    torch.manual_seed(1)
    spans = [(2047, 2048), (5, 6), (640, 641), (0, 700), (320, 1100)]
    needed = [-(-end // PAGE_SIZE) for _, end in spans]
    ids = random.permutation(sum(needed))
    pages = np.split(ids, np.cumsum(needed)[:-1])
    shape = LayerShape(heads[0], heads[1], head_dim, 0)
    pools = KVPools([shape], num_pages=len(ids), page_size=PAGE_SIZE, dtype=getattr(torch, dtype), device="cuda")
    for states in (pools.keys[0], pools.values[0]):
        states.normal_()
    tables = np.zeros((3, max(needed[:3])), np.int64)
    for row in range(3):
        tables[row, : needed[row]] = pages[row]
    metadata = AttentionMetadata(
        pools.device,
        slots=np.zeros(0, np.int64),
        decodes=DecodeMetadata.plain(np.array([2047, 5, 640]), tables),
        chunks=[ChunkMetadata(3, 703, 0, pages[3]), ChunkMetadata(703, 1483, 320, pages[4])],
    )
    queries = torch.randn(1483, heads[0], head_dim, device="cuda").to(pools.dtype)
    read = []
    for make in (SdpaBackend, TritonBackend):
        backend = make(pools)
        backend.begin(metadata)
        read.append(backend.forward(0, queries, AttentionParams(head_dim**-0.5, window)).float())
    error = (read[0] - read[1]).norm() / read[0].norm()
    assert error < (1e-5 if dtype == "float32" else 1e-2)


def test_sampled_tokens_are_the_same_whoever_runs_beside(on_cuda: Pair) -> None:
    model, _ = on_cuda("qwen3")
    params = SamplingParams(max_tokens=16, temperature=1.0, top_p=0.9, seed=3, ignore_eos=True)
    prompts = prompts_with_prefixes()
    together = [list(one.tokens) for one in engine_of(model).generate(prompts, params)]
    alone = [list(engine_of(model).generate([prompt], params)[0].tokens) for prompt in prompts]
    assert together == alone


def test_speculation_changes_no_token(on_cuda: Pair) -> None:
    model, reference = on_cuda("llama")
    prompt = [1, 2, 3, 4, 5, 6, 7, 8] * 6
    engine = engine_of(model, speculative_config="ngram")
    assert list(engine.generate([prompt], GREEDY)[0].tokens) == undisturbed(reference, prompt, GREEDY.max_tokens)


def test_int8_pages_are_read(on_cuda: Pair) -> None:
    model, reference = on_cuda("qwen3")
    prompt = prompts_with_prefixes()[2]
    engine = engine_of(model, kv_dtype="int8")
    _check_up_to_ties(reference, prompt, list(engine.generate([prompt], GREEDY)[0].tokens))


@pytest.mark.parametrize("family", ["gemma3", "qwen3-next"])
@pytest.mark.parametrize("attention", ["sdpa", "triton"])
def test_kv_groups_change_no_token(on_cuda: Pair, family: str, attention: str) -> None:
    model, reference = on_cuda(family)
    prompts = prompts_with_prefixes()
    engine = engine_of(model, num_pages=40, budget=64, attention=attention, kv_groups="all")
    for prompt, completion in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
        assert list(completion.tokens) == undisturbed(reference, prompt, GREEDY.max_tokens)


@pytest.mark.parametrize("policy", ["eager", "lazy"])
def test_pages_come_back_from_host_memory(on_cuda: Pair, policy: Any) -> None:
    """Four conversations in turns, on a pool that holds one of them."""
    model, reference = on_cuda("llama")
    random = Random(9)
    prompts = [[random.randrange(VOCABULARY) for _ in range(150)] for _ in range(4)]
    kept = Kept()
    offload = OffloadConfig(host_pages=60, policy=policy, kv_bytes_per_token=1)
    engine = engine_of(model, num_pages=16, offload=offload, readers=[kept])
    for _ in range(3):
        for number, prompt in enumerate(prompts):
            (completion,) = engine.generate([prompt], GREEDY)
            assert list(completion.tokens) == undisturbed(reference, prompt, GREEDY.max_tokens)
            prompts[number] = [*prompt, *completion.tokens[:8]]
    assert any(isinstance(event, LoadStarted) for event in kept.events), "nothing ever came back from host memory"


def test_memory_is_taken_from_the_gpu_and_given_back(tiny: Callable[[str], Path]) -> None:
    for _ in range(2):  # the first time, cuBLAS takes memory of its own
        before = torch.cuda.memory_allocated()
        model = load_model(tiny("llama"), device="cuda")
        engine = LLM(model, None, kv_memory="64MiB", page_size=PAGE_SIZE)
        assert torch.cuda.memory_allocated() - before >= 63 << 20
        engine.generate([[1, 2, 3]], GREEDY)
        del engine, model
        gc.collect()
    assert torch.cuda.memory_allocated() - before < 1 << 20

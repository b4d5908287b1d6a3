"""Real models that hold only what their windows see: the same tokens, and the bytes that the groups say."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="real models need kvarts[torch]")
pytest.importorskip("transformers", reason="real models need kvarts[torch]")

import torch

from kvarts.base.errors import ConfigError
from kvarts.core.request import RequestState
from kvarts.core.sampling import SamplingParams
from kvarts.run.torch.llm import LLM
from kvarts.run.torch.probe import examine
from kvarts.run.torch.room import KVRoom

from builders.real_models import (
    GREEDY,
    PAGE_SIZE,
    VOCABULARY,
    Ids,
    engine_of,
    prompts_with_prefixes,
    serve_at_random,
    undisturbed,
)
from builders.windowed_models import FAMILIES, FULL, WINDOW, forgetting, types_of

ROOMS = {"ample": (256, 2048), "chunked": (40, 16), "short": (28, 7)}
CASES = [(family, room, keeps) for family in FAMILIES for room in ROOMS for keeps in ("all", "tails")]
FEW = [case for case in CASES if case[0] == "gemma2" or case[1:] == ("chunked", "tails")]
"""One family in every memory, and all in one, in which what windows give back is empty at once."""


@pytest.mark.parametrize(
    ("family", "room", "keeps"),
    [pytest.param(*case, marks=[] if case in FEW else pytest.mark.long) for case in CASES],
)
def test_greedy_tokens_are_those_of_an_undisturbed_run(
    windowed: Callable[[str], tuple[Any, Any]], family: str, room: str, keeps: str
) -> None:
    """L6: whole prompts and chunks, prefixes that others left, and memory that is too small for all, and forgets."""
    model, reference = windowed(family)
    num_pages, budget = ROOMS[room]
    prompts = prompts_with_prefixes()
    engine = forgetting(engine_of(model, num_pages=num_pages, budget=budget, kv_groups=keeps))
    completions = engine.generate(prompts, GREEDY)
    for prompt, completion in zip(prompts, completions, strict=True):
        assert list(completion.tokens) == undisturbed(reference, prompt, GREEDY.max_tokens)
    if num_pages == 256 and keeps == "all":
        assert sum(completion.cached_tokens for completion in completions) >= 24
    assert engine.kv_live_bytes() == 0
    engine.check()


@pytest.mark.laws
@settings(max_examples=8)
@given(seed=st.integers(0, 1 << 30), family=st.sampled_from(sorted(FAMILIES)), keeps=st.sampled_from(["all", "tails"]))
def test_requests_come_and_go_at_any_time(
    windowed: Callable[[str], tuple[Any, Any]], seed: int, family: str, keeps: str
) -> None:
    """L6, L8: random arrivals, cancels, priorities and memory, and the laws of accounting after every step."""
    model, reference = windowed(family)
    random = Random(seed)
    shared = [random.randrange(VOCABULARY) for _ in range(30)]
    engine = engine_of(
        model,
        num_pages=random.choice([14, 20, 60]),
        budget=random.choice([5, 16, 256]),
        seqs=random.choice([1, 3, 6]),
        kv_groups=keeps,
    )

    def draw_prompt() -> Ids:
        return shared[: random.randrange(31)] + [random.randrange(VOCABULARY) for _ in range(random.randrange(1, 9))]

    params = SamplingParams(max_tokens=12, ignore_eos=True)
    for prompt, completion in serve_at_random(engine, random, draw_prompt, params):
        if completion.finish_reason != "cancelled":
            assert list(completion.tokens) == undisturbed(reference, prompt, params.max_tokens)


# Memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_allocated_tensors_are_what_the_groups_say(family: str, dtype: torch.dtype, windowed: Any) -> None:
    model = deepcopy(windowed(family)[0]).to(dtype)
    plain = engine_of(model, num_pages=10)
    engine = engine_of(model, num_pages=10, kv_groups="all")
    cut = KVRoom(model, PAGE_SIZE, "all").cut
    assert cut is not None
    memory = cut.memory
    assert engine.kv_bytes() == memory.num_blocks(10) * memory.block_bytes == 10 * memory.page_bytes
    assert engine.kv_bytes() == plain.kv_bytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sequence_holds_what_its_last_token_sees(family: str, windowed: Any) -> None:
    """Token by token and layer by layer: pages with a token that the last one attended to, and no other.

    What no later token attends to is released when the next step begins, as in vLLM.
    """
    model, _ = windowed(family)
    layers = [layer for number, layer in enumerate(examine(model).layers) if layer.owner == number]
    kinds = [
        (kind, 2 * layer.num_kv_heads * layer.head_dim * 4)
        for kind, layer in zip(types_of(model.config), layers, strict=False)
    ]
    engine = engine_of(model, num_pages=64, kv_groups="all")
    engine.submit(list(range(30)), GREEDY)
    engine.step()
    for num_tokens in range(31, 31 + GREEDY.max_tokens - 2):
        engine.step()
        # What is computed is one token behind what is known.
        num_bytes = 0
        for kind, token_bytes in kinds:
            first_seen = 0 if kind == FULL else max(0, num_tokens - WINDOW)
            num_bytes += len({token // PAGE_SIZE for token in range(first_seen, num_tokens)}) * token_bytes
        assert engine.kv_live_bytes() == num_bytes * PAGE_SIZE


def test_more_sequences_run_in_the_same_memory(windowed: Any) -> None:
    model, _ = windowed("gemma3_text")
    prompts = [[row] * 60 for row in range(8)]
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    most = {}
    for keeps in ("off", "all"):
        engine = engine_of(model, num_pages=60, seqs=8, kv_groups=keeps)
        requests = [engine.request(engine.submit(prompt, params)) for prompt in prompts]
        most[keeps] = 0
        while engine.has_work:
            engine.step()
            most[keeps] = max(most[keeps], sum(request.state is RequestState.DECODING for request in requests))
    assert most["all"] >= 2 * most["off"]


def test_what_does_not_go_with_it_is_refused(windowed: Any) -> None:
    model, _ = windowed("gemma2")
    refused: dict[str, dict[str, Any]] = {
        "kv_groups": {"kv_groups": "some"},
        "layers": {"layers": "compiled"},
    }
    for field, given_ in refused.items():
        with pytest.raises(ConfigError) as error:
            LLM(model, None, kv_memory=1 << 20, **{"kv_groups": "all", **given_})
        assert error.value.field == field

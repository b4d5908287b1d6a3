"""L6 with KV groups and host memory below them, on real models; skipped where PyTorch is not installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="real models need kvarts[torch]")
pytest.importorskip("transformers", reason="real models need kvarts[torch]")

from kvarts.core.sampling import SamplingParams
from kvarts.core.tiers.config import OffloadConfig

from builders.guessing import Oracle, answers_of, guessing
from builders.real_models import (
    GREEDY,
    VOCABULARY,
    Ids,
    engine_of,
    exchange_loads,
    prompts_with_prefixes,
    serve_at_random,
    undisturbed,
)
from builders.windowed_models import forgetting

BRIEF = SamplingParams(max_tokens=10, ignore_eos=True)
FAMILIES = ("gemma3_text", "gpt_oss", "mistral")
"""Windows in most layers, in every other one with learned sinks, and in all of them."""

CASES = [
    (family, keeps, policy)
    for family in FAMILIES
    for keeps in ("all", "tails")
    for policy in ("eager", "lazy", "exclusive")
]
FEW = [("gemma3_text", "tails", "eager"), ("gpt_oss", "tails", "eager"), ("mistral", "all", "lazy")]


def prompts() -> list[Ids]:
    """Prompts of which others left a prefix, in turns: more than the device keeps."""
    random = Random(7)
    shared = [random.randrange(VOCABULARY) for _ in range(45)]
    turns = [shared + [random.randrange(VOCABULARY) for _ in range(turn)] for turn in (2, 9, 5)]
    return [*prompts_with_prefixes(), *turns]


@pytest.mark.parametrize(
    ("family", "keeps", "policy"),
    [pytest.param(*case, marks=[] if case in FEW else pytest.mark.long) for case in CASES],
)
def test_parts_that_went_through_host_memory_say_the_same(
    windowed: Callable[[str], tuple[Any, Any]], family: str, keeps: str, policy: Any
) -> None:
    """L6: a device too small for all, that preempts and forgets; what comes back comes from host memory."""
    model, reference = windowed(family)
    asked = prompts()
    expected = [undisturbed(reference, prompt, BRIEF.max_tokens) for prompt in asked]
    offload = OffloadConfig(host_pages=400, policy=policy)
    engine = forgetting(engine_of(model, num_pages=28, budget=16, kv_groups=keeps, offload=offload))
    for order in (asked, asked[::-1]):
        for prompt in order:
            completion = engine.generate([prompt], BRIEF)[0]
            assert list(completion.tokens) == expected[asked.index(prompt)]
    # All at once: they wait for loads, and for each other's.
    for completion, tokens in zip(engine.generate(asked, BRIEF), expected, strict=True):
        assert list(completion.tokens) == tokens
    counts = engine.transfers[0].counts
    assert counts["num_loads"] > 3 and not counts["num_failed"]
    assert engine.kv_live_bytes() == 0
    engine.check()


def test_a_load_that_brings_a_wrong_block_breaks_it(
    windowed: Callable[[str], tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the blocks of loads are exchanged."""
    model, reference = windowed("gemma3_text")
    asked = prompts()
    turns = [asked[2], asked[1], asked[3], asked[0], asked[2]]

    def last_said() -> Ids:
        engine = engine_of(model, num_pages=13, budget=16, kv_groups="tails", offload=OffloadConfig(host_pages=400))
        said = [list(engine.generate([prompt], BRIEF)[0].tokens) for prompt in turns]
        assert engine.transfers[0].counts["num_loads"] == 1
        return said[-1]

    expected = undisturbed(reference, asked[2], BRIEF.max_tokens)
    assert last_said() == expected
    exchange_loads(monkeypatch)
    assert last_said() != expected


@pytest.mark.laws
@settings(max_examples=3)
@given(seed=st.integers(0, 1 << 30), family=st.sampled_from(FAMILIES), keeps=st.sampled_from(["all", "tails"]))
def test_requests_come_and_go_at_any_time(
    windowed: Callable[[str], tuple[Any, Any]], seed: int, family: str, keeps: str
) -> None:
    """L2, L6, L8: random arrivals, cancels while loads are under way, and the laws of accounting after every step."""
    model, reference = windowed(family)
    random = Random(seed)
    shared = [[number * 7 + other for number in range(30)] for other in (0, 3)]
    policy: Any = random.choice(["eager", "lazy", "exclusive"])
    engine = engine_of(
        model,
        num_pages=random.choice([14, 20]),
        budget=random.choice([5, 16, 256]),
        seqs=random.choice([1, 3, 6]),
        kv_groups=keeps,
        offload=OffloadConfig(host_pages=random.choice([5, 200]), policy=policy),
    )

    def draw_prompt() -> Ids:  # a few, which transformers is asked for once
        return random.choice(shared)[: random.choice([13, 21, 30])] + [1] * random.choice([1, 4])

    params = SamplingParams(max_tokens=6, ignore_eos=True)
    for prompt, completion in serve_at_random(engine, random, draw_prompt, params):
        if completion.finish_reason != "cancelled":
            assert list(completion.tokens) == undisturbed(reference, prompt, params.max_tokens)


@pytest.mark.parametrize("order", ["last", "first"])
def test_guesses_change_nothing_with_host_memory(
    windowed: Callable[[str], tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """L6: pages that guesses filled are stored, and come back."""
    model, _ = windowed("gemma3_text")
    asked = prompts_with_prefixes()
    answers = answers_of(model, asked)
    guessing(monkeypatch, Oracle(answers))
    engine = engine_of(
        model,
        num_pages=28,
        budget={"last": 16, "first": 40}[order],
        kv_groups="tails",
        offload=OffloadConfig(host_pages=200),
        speculative_config={"num_speculative_tokens": {"last": 16, "first": 4}[order], "draft_order": order},
    )
    for _ in range(2):
        for prompt, completion in zip(asked, engine.generate(asked, GREEDY), strict=True):
            assert list(completion.tokens) == answers[tuple(prompt)]
    assert engine.drafts is not None and engine.drafts.num_accepted_tokens > 50
    assert engine.transfers[0].counts["num_stores"] > 0


@pytest.mark.parametrize(
    ("family", "keeps"),
    [
        pytest.param(*case, marks=[] if case == FEW[0][:2] else pytest.mark.long)
        for case in {case[:2] for case in CASES}
    ],
)
def test_parts_that_went_through_files_say_the_same(
    windowed: Callable[[str], tuple[Any, Any]], family: str, keeps: str, tmp_path: Path
) -> None:
    """L6 with host memory for little and files below it, and again in a second engine that finds the files.

    Files that were changed meanwhile are computed again.
    """
    model, reference = windowed(family)
    asked = prompts()
    expected = [undisturbed(reference, prompt, BRIEF.max_tokens) for prompt in asked]

    def engine() -> Any:
        offload = OffloadConfig(host_pages=8, disk_pages=400)
        return forgetting(
            engine_of(model, num_pages=28, budget=16, kv_groups=keeps, offload=offload, disk_path=tmp_path)
        )

    first = engine()
    for order in (asked, asked[::-1]):
        for prompt in order:
            assert list(first.generate([prompt], BRIEF)[0].tokens) == expected[asked.index(prompt)]
    first.check()
    assert first.transfers[0].num_bytes["disk_read"] and not first.transfers[0].counts["num_failed"]
    again = engine()
    for prompt, tokens in zip(asked, expected, strict=True):
        assert list(again.generate([prompt], BRIEF)[0].tokens) == tokens
    assert again.transfers[0].num_bytes["disk_read"] and not again.transfers[0].counts["num_failed"]
    again.check()
    for place, path in enumerate(sorted(tmp_path.rglob("*.kv"))):
        if place % 2:
            path.write_bytes(path.read_bytes()[:-1] + b"?")
    damaged = engine()
    for prompt, tokens in zip(asked, expected, strict=True):
        assert list(damaged.generate([prompt], BRIEF)[0].tokens) == tokens
    assert damaged.transfers[0].counts["num_failed"]
    damaged.check()


def test_groups_stay_the_default_with_files_below(windowed: Callable[[str], tuple[Any, Any]], tmp_path: Path) -> None:
    model, _ = windowed("gemma2")
    engine = engine_of(model, offload=OffloadConfig(host_pages=8, disk_pages=8), disk_path=tmp_path)
    assert engine.kv_groups == "all"
    assert engine.tiers.keys() == {"host", "disk"}

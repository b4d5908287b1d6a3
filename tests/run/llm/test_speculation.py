"""Guessed tokens change nothing but the number of steps: real models with speculation, beside the same without."""

from __future__ import annotations

from collections import Counter
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

from kvarts.base.errors import ConfigError
from kvarts.core.config import EngineConfig
from kvarts.core.sampling import SamplingParams
from kvarts.run.torch.llm import LLM

from builders.guessing import Oracle, answers_of, guessing, untimed
from builders.real_models import (
    ATTENDING,
    GREEDY,
    VOCABULARY,
    Ids,
    engine_of,
    prompts_with_prefixes,
    serve_at_random,
    undisturbed,
)
from builders.windowed_models import forgetting

Models = Callable[[str], tuple[Any, Any]]


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=[] if family in ("qwen3", "gemma3") else pytest.mark.long) for family in ATTENDING],
)
def test_greedy_tokens_are_those_of_an_undisturbed_run(
    models: Models, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """L6 with guesses, right and wrong: chunks, prefixes that others left, preemption on a pool far too small."""
    model, reference = models(family)
    prompts = prompts_with_prefixes()
    answers = answers_of(model, prompts)
    assert answers[tuple(prompts[2])] == undisturbed(reference, prompts[2], GREEDY.max_tokens)
    for num_tokens, page_size, budget, attention in (
        (1024, 16, 2048, "numba"), (160, 4, 16, "sdpa"), (112, 1, 7, "numba"),
    ):  # fmt: skip
        guessing(monkeypatch, Oracle(answers))
        config = EngineConfig(
            num_pages=num_tokens // page_size, page_size=page_size, max_num_batched_tokens=budget, max_num_seqs=4
        )
        engine = LLM(model, None, config, audit=True, attention=attention, speculative_config="ngram")
        for prompt, completion in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
            assert list(completion.tokens) == answers[tuple(prompt)]
        assert engine.drafts is not None
        assert 0 < engine.drafts.num_accepted_tokens < engine.drafts.num_drafted_tokens
        assert engine.kv_live_bytes() == 0


@pytest.mark.parametrize(("family", "kv_groups"), [("qwen3", "off"), ("gemma3", "all"), ("gemma3", "tails")])
def test_guesses_before_prompts_change_no_token(
    models: Models, monkeypatch: pytest.MonkeyPatch, family: str, kv_groups: str
) -> None:
    """L6 with guesses that come first: requests are preempted for them, and keep the pages of wrong ones."""
    model, _ = models(family)
    prompts = prompts_with_prefixes()
    answers = answers_of(model, prompts)
    for num_tokens, page_size, count in ((1024, 16, 16), (160, 4, 3), (112, 1, 3)):
        guessing(monkeypatch, Oracle(answers))
        config = EngineConfig(
            num_pages=num_tokens // page_size,
            page_size=page_size,
            max_num_batched_tokens=4 * (1 + count),
            max_num_seqs=4,
        )
        wanted = {"num_speculative_tokens": count, "draft_order": "first"}
        engine = LLM(model, None, config, kv_groups=kv_groups, speculative_config=wanted)
        for prompt, completion in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
            assert list(completion.tokens) == answers[tuple(prompt)]
        assert engine.drafts is not None
        assert 0 < engine.drafts.num_accepted_tokens < engine.drafts.num_drafted_tokens
        assert engine.kv_live_bytes() == 0
        engine.check()


def test_n_grams_are_found_in_text_that_repeats(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    untimed(monkeypatch)
    model, _ = models("gemma3")
    prompts = [[7, 8, 9, 10, 11] * 6, [1, 2, 3], [5] * 30]
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    answers = answers_of(model, prompts, params)
    num_accepted = 0
    for least in (1, 3):
        config = {"num_speculative_tokens": 5, "prompt_lookup_min": least, "prompt_lookup_max": 4}
        engine = engine_of(model, speculative_config=config)
        for prompt, completion in zip(prompts, engine.generate(prompts, params), strict=True):
            assert list(completion.tokens) == answers[tuple(prompt)]
        assert engine.drafts is not None
        num_accepted += engine.drafts.num_accepted_tokens
    assert num_accepted > 0


DRAWN = [
    SamplingParams(max_tokens=20, temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=0.3, seed=1, ignore_eos=True, repetition_penalty=1.2),
    SamplingParams(max_tokens=20, presence_penalty=0.7, frequency_penalty=0.5, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=1.5, seed=2, logprobs=True, top_logprobs=3, ignore_eos=True),
    SamplingParams(max_tokens=20, min_tokens=9, logprobs=True, stop_token_ids=tuple(range(0, VOCABULARY, 3))),
]


@pytest.mark.parametrize("params", DRAWN)
def test_a_seed_says_the_same_with_and_without(
    models: Models, monkeypatch: pytest.MonkeyPatch, params: SamplingParams
) -> None:
    """Every token is drawn from its own logits, by its own random number, after the tokens before it."""
    model, _ = models("llama")
    prompts = prompts_with_prefixes()
    expected = engine_of(model).generate(prompts, params)
    answers = {tuple(prompt): one.tokens for prompt, one in zip(prompts, expected, strict=True)}
    guessing(monkeypatch, Oracle(answers))
    engine = engine_of(model, num_pages=60, budget=24, speculative_config="ngram")
    for one, other in zip(expected, engine.generate(prompts, params), strict=True):
        assert (other.tokens, other.finish_reason) == (one.tokens, one.finish_reason)
        assert (other.logprobs is None) is (one.logprobs is None)
        if one.logprobs is not None and other.logprobs is not None:
            assert other.logprobs == pytest.approx(one.logprobs, abs=1e-4)
            assert [[token for token, _ in top] for top in other.top_logprobs] == [
                [token for token, _ in top] for top in one.top_logprobs
            ]
    assert engine.drafts is not None and engine.drafts.num_accepted_tokens > 10


@pytest.mark.parametrize(
    ("family", "keeps", "attention"),
    [
        ("gemma3_text", "tails", "sdpa"),
        ("gpt_oss", "tails", "numba"),
        pytest.param("gemma4_text", "all", "numba", marks=pytest.mark.long),
        pytest.param("qwen2", "tails", "numba", marks=pytest.mark.long),
    ],
)
def test_guesses_change_no_token_where_windows_give_pages_back(
    windowed: Models, monkeypatch: pytest.MonkeyPatch, family: str, keeps: str, attention: str
) -> None:
    """L6 with KV groups, greedy and drawn: on a memory that is too small for all, and forgets what nothing holds."""
    model, reference = windowed(family)
    prompts = prompts_with_prefixes()
    drawn = msgspec.structs.replace(GREEDY, temperature=0.8, top_k=40, seed=5)
    for params, wrong in ((GREEDY, 0.3), (GREEDY, 0.0), (drawn, 0.3)):
        expected = engine_of(model).generate(prompts, params)
        answers = {tuple(prompt): list(one.tokens) for prompt, one in zip(prompts, expected, strict=True)}
        if params is GREEDY:
            assert all(answers[tuple(one)] == undisturbed(reference, one, GREEDY.max_tokens) for one in prompts)
        guessing(monkeypatch, Oracle(answers, wrong=wrong, most=11))
        few: dict[str, Any] = {"num_pages": 40, "budget": 24, "attention": attention, "kv_groups": keeps}
        engine = forgetting(engine_of(model, speculative_config="ngram", **few))
        for prompt, completion in zip(prompts, engine.generate(prompts, params), strict=True):
            assert list(completion.tokens) == answers[tuple(prompt)]
        assert engine.drafts is not None and engine.drafts.num_accepted_tokens > 20
        assert engine.kv_live_bytes() == 0
        engine.check()


def test_tokens_are_distributed_as_their_logits_say(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chi-square of the second of two drawn tokens, where the likeliest is always guessed."""
    model, reference = models("llama")
    prompt, num_drawn, num_kept = [3, 1, 4, 1, 5], 1500, 6
    params = SamplingParams(max_tokens=3, temperature=1.0, top_k=num_kept, ignore_eos=True)
    likeliest = undisturbed(reference, prompt, 3)
    guessing(monkeypatch, Oracle({tuple(prompt): likeliest}, wrong=0.0))
    config = EngineConfig(num_pages=600, page_size=4, max_num_batched_tokens=1024, max_num_seqs=256)
    engine = LLM(model, None, config, speculative_config="ngram")
    firsts, seconds = Counter[int](), Counter[int]()
    for completion in engine.generate([prompt] * num_drawn, params):
        first, second, _ = completion.tokens
        firsts[first] += 1
        if first == likeliest[0]:
            seconds[second] += 1
    assert engine.drafts is not None and engine.drafts.num_accepted_tokens > num_drawn / 10
    for counts, known in ((firsts, prompt), (seconds, [*prompt, likeliest[0]])):
        with torch.no_grad():
            logits = reference(torch.tensor([known])).logits[0, -1]
        kept = logits.topk(num_kept)
        shares = torch.softmax(kept.values, dim=-1).tolist()
        total = counts.total()
        assert set(counts) <= set(kept.indices.tolist())
        chi_square = sum(
            (counts[token] - total * share) ** 2 / (total * share)
            for token, share in zip(kept.indices.tolist(), shares, strict=True)
        )
        # 5 degrees of freedom: 20.5 is passed once in a thousand times; these seeds are always the same.
        assert total > 200 and chi_square < 20.5


def test_a_stop_inside_a_draft_is_the_end(tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """By a token, by a text, by length: tokens, text, reason and log-probabilities are as without."""
    path = tiny("qwen3")
    plain = LLM.from_pretrained(path, kv_memory="4MiB", page_size=4)
    prompt = plain.tokenizer("abc")["input_ids"]
    long = SamplingParams(max_tokens=40, ignore_eos=True)
    whole = plain.generate([prompt], long)[0]
    guessing(monkeypatch, Oracle({tuple(prompt): whole.tokens}, wrong=0.0, most=9))
    guessed = LLM.from_pretrained(path, kv_memory="4MiB", page_size=4, audit=True, speculative_config="ngram")
    asked = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (1, 2, 3, 17)]
    for place in (3, 8, 11, 20, 33):
        asked.append(SamplingParams(max_tokens=40, stop_token_ids=(whole.tokens[place],), ignore_eos=True))
        asked.append(SamplingParams(max_tokens=40, stop=(whole.text[place // 2 :][:2],), ignore_eos=True))
        asked.append(msgspec.structs.replace(asked[-1], logprobs=True, top_logprobs=2, min_tokens=4))
    for params in asked:
        expected, said = plain.generate([prompt], params)[0], guessed.generate([prompt], params)[0]
        assert (said.text, said.tokens, said.finish_reason) == (expected.text, expected.tokens, expected.finish_reason)
        if params.logprobs:
            assert said.logprobs is not None and len(said.logprobs) == len(said.top_logprobs) == len(said.tokens)
        assert guessed.kv_live_bytes() == 0
        guessed.check()
    assert guessed.drafts is not None and guessed.drafts.num_accepted_tokens > 15


@pytest.mark.laws
@pytest.mark.long
@settings(max_examples=6)
@given(
    seed=st.integers(0, 1 << 30),
    family=st.sampled_from(["qwen3", "llama", "gemma3"]),
    page_size=st.sampled_from([1, 4, 16]),
    keeps=st.sampled_from(["off", "all", "tails"]),
)
def test_requests_come_and_go_at_any_time(models: Models, seed: int, family: str, page_size: int, keeps: str) -> None:
    """L1 to L3, L6, L8: random arrivals, cancels, priorities, pools, page sizes and guesses, with KV groups or not."""
    model, _ = models(family)
    random = Random(seed)
    shared = [random.randrange(VOCABULARY) for _ in range(20)]
    config = EngineConfig(
        num_pages=-(-random.choice([56, 80, 240]) // page_size),
        page_size=page_size,
        max_num_batched_tokens=random.choice([5, 16, 256]),
        max_num_seqs=random.choice([1, 3, 5]),
    )
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    answers: dict[tuple[int, ...], Ids] = {}
    with pytest.MonkeyPatch.context() as patch:
        guessing(patch, Oracle(answers, wrong=random.choice([0.0, 0.3, 1.0]), most=random.choice([1, 4, 11])))
        engine = LLM(model, None, config, audit=True, speculative_config="ngram", kv_groups=keeps)
    if keeps != "off":
        forgetting(engine)

    def draw_prompt() -> Ids:
        prompt = shared[: random.randrange(21)] + [random.randrange(VOCABULARY) for _ in range(random.randrange(1, 9))]
        answers.update(answers_of(model, [prompt], params))
        return prompt

    for prompt, completion in serve_at_random(engine, random, draw_prompt, params, num_turns=30, rate=0.3):
        assert list(completion.tokens) == answers[tuple(prompt)]


@pytest.mark.parametrize(
    ("given_config", "field"),
    [
        ("medusa", "method"),
        ({"method": "draft_model"}, "method"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"num_speculative_tokens": "4"}, "num_speculative_tokens"),
        ({"prompt_lookup_min": 3, "prompt_lookup_max": 2}, "prompt_lookup_min"),
        ({"prompt_lookup_max": 10**9}, "prompt_lookup_max"),
        ({"draft_order": "any"}, "draft_order"),
        ({"model": "small"}, "speculative_config"),
        ("{", "speculative_config"),
        ("{}}", "speculative_config"),
        (["ngram"], "speculative_config"),
        (3, "speculative_config"),
    ],
)
def test_what_cannot_be_guessed_with_is_refused(given_config: Any, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        LLM("no such model", speculative_config=given_config)

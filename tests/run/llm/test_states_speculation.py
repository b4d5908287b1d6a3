"""Guessed tokens and layers with a state: no rejected token is left in a state."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

pytest.importorskip("torch", reason="real models need kvarts[torch]")
pytest.importorskip("transformers", reason="real models need kvarts[torch]")

import numpy as np
import torch

from kvarts.core.config import EngineConfig
from kvarts.core.sampling import SamplingParams
from kvarts.run.flat_batch import StateBatch, StateChunk
from kvarts.run.torch.llm import LLM
from kvarts.run.torch.states import PagedStates

from builders.guessing import Oracle, guessing, untimed
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
from builders.stateful_models import FAMILIES, state_pages, stateful_pairs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

Pairs = Callable[[str], tuple[Any, Any]]
SLOW = ("qwen3_next", "granitemoehybrid", "kimi_linear", "nemotron_h", "falcon_h1")
"""The families that take longest, or are like others; theirs are long tests."""


@pytest.fixture(scope="module")
def stateful() -> Pairs:
    return stateful_pairs()


def prompts() -> list[Ids]:
    """Prompts of which some continue others, from snapshots."""
    plain = prompts_with_prefixes()
    return [*plain[:3], [*plain[1], 7, 8, 9], [*plain[1], 7, 8, 9, 1, 2, 3, 4, 5], plain[1]]


def guesses(
    model: Any, reference: Any, patch: pytest.MonkeyPatch, params: SamplingParams = GREEDY, **given: Any
) -> dict[tuple[int, ...], Ids]:
    """Return what the model says without guesses, and let engines guess that, wrong in part."""
    if params.temperature:
        expected = [list(one.tokens) for one in engine_of(model, kv_groups="all").generate(prompts(), params)]
    else:
        expected = [undisturbed(reference, prompt, params.max_tokens) for prompt in prompts()]
    answers = {tuple(prompt): tokens for prompt, tokens in zip(prompts(), expected, strict=True)}
    guessing(patch, Oracle(answers, **given))
    return answers


# L6 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[pytest.mark.long] if family in SLOW else []) for family in FAMILIES]
)
def test_greedy_tokens_are_those_of_an_undisturbed_run(
    stateful: Pairs, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """L1 to L3, L6: chunks beside drafts, snapshots, memory that is too small for all, and guesses of every kind."""
    model, reference = stateful(family)
    for num_pages, budget, wrong in ((256, 2048, 0.3), (24, 7, 0.3), (24, 24, 0.0), (256, 64, 1.0)):
        answers = guesses(model, reference, monkeypatch, wrong=wrong, most=9)
        engine = engine_of(
            model,
            num_pages=num_pages + 5 * state_pages(model),
            budget=budget,
            snapshots="branches",
            kv_groups="all",
            speculative_config="ngram",
        )
        completions = engine.generate(prompts(), GREEDY)
        for prompt, completion in zip(prompts(), completions, strict=True):
            assert list(completion.tokens) == answers[tuple(prompt)]
        assert engine.drafts is not None and engine.drafts.num_drafted_tokens > 20
        assert wrong == 1.0 or engine.drafts.num_accepted_tokens > 20
        assert num_pages == 24 or sum(completion.cached_tokens for completion in completions) >= 40
        assert engine.kv_live_bytes() == 0
        engine.check()


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text"])
def test_guesses_before_prompts_change_no_token(stateful: Pairs, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """L1 to L3, L6: requests are preempted for guesses, and states go on with those that were right."""
    model, reference = stateful(family)
    for num_pages, wrong in ((256, 0.3), (24, 0.3), (24, 0.0)):
        answers = guesses(model, reference, monkeypatch, wrong=wrong, most=5)
        engine = engine_of(
            model,
            num_pages=num_pages + 5 * state_pages(model),
            budget=64,
            kv_groups="all",
            speculative_config={"num_speculative_tokens": 5, "draft_order": "first"},
        )
        for prompt, completion in zip(prompts(), engine.generate(prompts(), GREEDY), strict=True):
            assert list(completion.tokens) == answers[tuple(prompt)]
        assert engine.drafts is not None and engine.drafts.num_accepted_tokens > 20
        assert engine.kv_live_bytes() == 0
        engine.check()


def test_drawn_tokens_are_those_without_guesses(stateful: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference = stateful("qwen3_5_text")
    params = replace(GREEDY, temperature=0.9, top_k=40, seed=5, repetition_penalty=1.2)
    answers = guesses(model, reference, monkeypatch, params)
    engine = engine_of(model, kv_groups="all", speculative_config="ngram")
    for prompt, completion in zip(prompts(), engine.generate(prompts(), params), strict=True):
        assert list(completion.tokens) == answers[tuple(prompt)]
    assert engine.drafts is not None and engine.drafts.num_accepted_tokens > 10


def test_n_grams_are_guessed_beside_states(stateful: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    """With steps as they are timed here, in which guesses may not pay, and with steps of one length."""
    model, reference = stateful("lfm2")
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    asked = [[7, 8, 9, 10, 11] * 6, [1, 2, 3], [5] * 30]
    ngrams = {"prompt_lookup_min": 1, "prompt_lookup_max": 4}
    engine = engine_of(model, kv_groups="all", speculative_config=ngrams)
    untimed(monkeypatch)
    engines = [engine, engine_of(model, kv_groups="all", speculative_config=ngrams)]
    for engine in engines:
        for prompt, completion in zip(asked, engine.generate(asked, params), strict=True):
            assert list(completion.tokens) == undisturbed(reference, prompt, 60)
    assert engine.drafts is not None and engine.drafts.num_drafts > 0


@pytest.mark.laws
@settings(max_examples=6)
@given(seed=st.integers(0, 1 << 30), family=st.sampled_from(sorted(FAMILIES)))
def test_requests_come_and_go_at_any_time(stateful: Pairs, seed: int, family: str) -> None:
    """L1 to L3, L6, L8: random arrivals, cancels, priorities, memory and guesses, with laws checked after each step."""
    model, reference = stateful(family)
    random = Random(seed)
    shared = [random.randrange(VOCABULARY) for _ in range(30)]
    answers: dict[tuple[int, ...], Ids] = {}
    with pytest.MonkeyPatch.context() as patch:
        guessing(patch, Oracle(answers, wrong=random.choice([0.0, 0.3, 1.0]), most=random.choice([1, 4, 11])))
        engine = engine_of(
            model,
            num_pages=random.choice([12, 16, 60]) + random.choice([2, 3, 5]) * state_pages(model),
            budget=random.choice([5, 16, 256]),
            seqs=random.choice([1, 3, 6]),
            snapshots=random.choice(["ends", "branches"]),
            kv_groups="all",
            speculative_config="ngram",
        )
    params = SamplingParams(max_tokens=12, ignore_eos=True)

    def draw_prompt() -> Ids:
        end = random.choice([9, 18, 30, random.randrange(31)])
        prompt = shared[:end] + [random.randrange(VOCABULARY) for _ in range(random.randrange(1, 6))]
        answers[tuple(prompt)] = undisturbed(reference, prompt, params.max_tokens)
        return prompt

    for prompt, completion in serve_at_random(engine, random, draw_prompt, params, num_turns=30):
        if completion.finish_reason != "cancelled":
            assert list(completion.tokens) == answers[tuple(prompt)]


# States ---------------------------------------------------------------------------------------------------


class Sums:
    """A layer whose state is a number that its tokens change, each in a way of its own: h = 3 h + x."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.number = 0
        self.hidden = hidden

    def run(self, shape: Any, hidden: torch.Tensor, begin: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        state = torch.zeros(len(hidden), 1, dtype=torch.int64) if begin is None else begin[0].clone()
        made = []
        for place in range(hidden.shape[1]):
            state = 3 * state + hidden[:, place]
            made.append(state)
        return torch.stack(made, dim=1), [state]


class Memory:
    """The states of one layer, one block each."""

    shapes = (None,)

    def __init__(self, count: int) -> None:
        self.states = torch.arange(count)[:, None]
        self.num_written = 0

    def read(self, number: int, blocks: torch.Tensor) -> list[torch.Tensor]:
        return [self.states[blocks[:, 0]]]

    def write(self, number: int, blocks: torch.Tensor, states: list[torch.Tensor]) -> None:
        self.states[blocks[:, 0]] = states[0]
        self.num_written += len(blocks)


@given(st.data())
def test_states_have_the_accepted_tokens_alone(data: st.DataObject) -> None:
    """Against one sequence after the other: outputs of all tokens, and states of those that stay."""
    most = st.lists(st.integers(0, 5), max_size=6)
    drafts = data.draw(most, label="drafted tokens of each decode")
    chunk = data.draw(st.integers(0, 4), label="tokens of a chunk")
    accepted = [data.draw(st.integers(0, count)) for count in drafts]
    num_tokens = len(drafts) + sum(drafts) + chunk
    if not num_tokens:
        return
    hidden = torch.tensor(data.draw(st.lists(st.integers(0, 9), min_size=num_tokens, max_size=num_tokens)))
    memory = Memory(len(drafts) + 2)
    expected_states = memory.states[:, 0].tolist()
    expected = [0] * num_tokens
    first = len(drafts)
    for number, count in enumerate(drafts):
        state = expected_states[number + 1]
        for turn, at in enumerate([number, *range(first, first + count)]):
            state = expected[at] = 3 * state + int(hidden[at])
            if turn <= accepted[number]:
                expected_states[number + 1] = state
        first += count
    state = 0
    for at in range(first, num_tokens):
        state = expected[at] = 3 * state + int(hidden[at])
    chunks = []
    if chunk:
        chunks = [StateChunk(first, num_tokens, None, ((num_tokens, np.array([0])),))]
        expected_states[0] = state

    states = PagedStates.__new__(PagedStates)
    states.memory = memory  # type: ignore[assignment]
    states._device = torch.device("cpu")
    blocks = np.arange(1, len(drafts) + 1)[:, None]
    states.begin(StateBatch(blocks, tuple(chunks), np.repeat(np.arange(len(drafts)), drafts)))
    read = states.state_called(Sums(hidden[None, :, None]))  # type: ignore[arg-type]
    assert read[0, :, 0].tolist() == expected
    states.accept(np.array([*accepted, 0][: len(drafts) + bool(chunk)]))
    assert memory.states[:, 0].tolist() == expected_states
    assert memory.num_written == len(drafts) + bool(chunk) + sum(count > 0 for count in accepted)


# Controls -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [-1, 1])
def test_a_state_one_token_off_changes_what_is_said(
    stateful: Pairs, monkeypatch: pytest.MonkeyPatch, change: int
) -> None:
    """If that did not matter, the tests above would prove nothing."""
    model, reference = stateful("qwen3_5_text")
    answers = guesses(model, reference, monkeypatch, wrong=0.3)
    accept = PagedStates.accept

    def other(states: PagedStates, counts: Any) -> None:
        drafted = np.zeros(len(counts), np.int64)
        mine = states._drafted
        drafted[mine.decodes] = mine.counts
        accept(states, np.clip(counts + change, 0, drafted))

    monkeypatch.setattr(PagedStates, "accept", other)
    engine = engine_of(model, kv_groups="all", speculative_config="ngram")
    said = [list(one.tokens) for one in engine.generate(prompts(), GREEDY)]
    assert said != [answers[tuple(prompt)] for prompt in prompts()]


# What it goes with ----------------------------------------------------------------------------------------


def test_steps_are_timed_for_a_bound_of_latency(stateful: Pairs) -> None:
    model, reference = stateful("lfm2")
    config = EngineConfig(
        num_pages=64, page_size=PAGE_SIZE, max_num_batched_tokens=64, max_num_seqs=4, max_itl_ms=1000.0
    )
    engine = LLM(model, None, config, kv_groups="all")
    assert list(engine.generate([[1, 2, 3]], GREEDY)[0].tokens) == undisturbed(reference, [1, 2, 3], GREEDY.max_tokens)

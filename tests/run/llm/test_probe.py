"""Whether a model can run in pages is found out by running it: small models of families, and models made to mislead."""

from __future__ import annotations

import copy
from collections.abc import Callable
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="real models need kvarts[torch]")
pytest.importorskip("transformers", reason="real models need kvarts[torch]")

import torch

import model_families
from kvarts.base.errors import ConfigError
from kvarts.core.sampling import SamplingParams
from kvarts.run.torch.check import check_model
from kvarts.run.torch.llm import LLM
from kvarts.run.torch.probe import examine
from kvarts.run.torch.recorded_calls import AskedMasks

from builders.real_models import GREEDY, PAGE_SIZE, engine_of, prompts_with_prefixes, undisturbed

Models = Callable[[str], tuple[Any, Any]]


@pytest.mark.parametrize(
    ("family", "kind", "why"),
    [
        ("bert", "refused", "sees tokens that come after it"),
        ("deepseek_v3", "exact", ""),  # values of fewer numbers than keys
        ("diffllama", "exact", ""),  # attends twice in a layer
        ("doge", "refused", "has a mask of its own"),
        ("falcon", "refused", "do not ask for attention through transformers' AttentionInterface"),
        ("gpt_neo", "refused", "do not ask for attention through transformers' AttentionInterface"),
        ("llama4_text", "refused", "sees chunks, and not a window"),
        ("moshi", "refused", "going on from its cache it computes something else than at once"),
        ("mpt", "refused", "do not ask for attention through transformers' AttentionInterface"),
        ("nemotron", "exact", ""),  # does not pass keywords on to attention
        ("phi3", "exact", ""),  # rotates long sequences otherwise
        ("stablelm", "exact", ""),
    ],
)
def test_a_family_runs_exactly_or_is_refused_with_the_reason(family: str, kind: str, why: str) -> None:
    outcome = model_families.outcome_of(family)
    assert (outcome.kind, why in outcome.reason) == (kind, True), outcome


def test_the_tenths_are_all_families() -> None:
    assert sorted(name for number in range(10) for name in model_families.tenth(number)) == model_families.families()


def test_more_tokens_than_a_model_has_positions_are_refused_before_anything_is_computed(models: Models) -> None:
    model, _ = models("qwen3")
    with pytest.raises(ConfigError, match="the positions of the model, got 10,000,000"):
        check_model(model, num_tokens=10_000_000)


# Rotations by the length of a sequence -----------------------------------------------------------------------


def test_what_runs_beside_a_prompt_does_not_change_its_rotation() -> None:
    """Phi-3: the factors are those of the sequence's own length, whatever runs beside it and whatever is cached."""
    model = model_families.build("phi3")
    reference = copy.deepcopy(model)
    limit = 64
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    long = [number % 250 + 3 for number in range(limit + 30)]
    prompts = [long[:20], long, long[:40], long[: limit + 1], long[:20]]
    expected = [undisturbed(reference, prompt, 8) for prompt in prompts]
    for budget in (7, 400):
        llm = engine_of(model, num_pages=120, budget=budget, attention="sdpa")
        assert [list(one.tokens) for one in llm.generate(prompts, params)] == expected
        assert [list(llm.generate([prompt], params)[0].tokens) for prompt in prompts] == expected
    for length, num_tokens in ((limit, 2), (limit - 7, 9), (1, limit + 1)):
        with pytest.raises(ConfigError, match="pass 64 tokens, where the model changes its rotation"):
            llm.generate([long[:length]], SamplingParams(max_tokens=num_tokens, ignore_eos=True))
    assert list(llm.generate([long[:limit]], SamplingParams(max_tokens=1))[0].tokens)
    check = check_model(model, attention="sdpa", num_prompts=3, num_tokens=4)
    assert check.is_exact and check.switch_length == limit and check.num_prompts == 5


# Models made to mislead --------------------------------------------------------------------------------------


def refusal(model: Any) -> str:
    with pytest.raises(ConfigError, match="cannot run in pages") as caught:
        examine(model)
    return str(caught.value)


def llama(models: Models) -> Any:
    return copy.deepcopy(models("llama")[1])


def test_a_layer_that_mixes_tokens_without_attention_is_refused(models: Models) -> None:
    model = llama(models)
    mlp = model.model.layers[2].mlp
    forward = mlp.forward
    mlp.forward = lambda states: forward(states) + states.cumsum(dim=1) * 0.01
    assert "depends on tokens before it, without attention" in refusal(model)


def test_a_layer_without_attention_that_keeps_to_its_token_is_fine(models: Models) -> None:
    model = llama(models)
    model.model.layers[2].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    assert len(examine(model).layers) == 3


@pytest.mark.parametrize("in_place", [False, True])
def test_a_mask_that_a_layer_changes_is_refused(models: Models, in_place: bool) -> None:
    model = llama(models)
    attention = model.model.layers[1].self_attn
    forward = attention.forward

    def changed(hidden_states: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        if attention_mask is not None:
            mask = attention_mask if in_place else attention_mask.clone()
            mask[..., 9:, 2] = torch.finfo(mask.dtype).min
            attention_mask = mask
        return forward(hidden_states=hidden_states, attention_mask=attention_mask, **kwargs)

    attention.forward = changed
    assert "has a mask of its own" in refusal(model)


def test_positions_that_are_not_those_it_was_given_are_refused(models: Models) -> None:
    model = llama(models)
    rotary = model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda states, position_ids: forward(states, torch.arange(position_ids.shape[1])[None])
    assert "computes something else than by itself" in refusal(model)


def test_a_rotation_by_the_longest_sequence_beside_it_is_refused(models: Models) -> None:
    model = llama(models)
    rotary = model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda states, position_ids: forward(states, position_ids / (1 + position_ids.max() // 100))
    with pytest.raises(ConfigError, match="rotates by the longest sequence of a step"):
        examine(model)


def test_queries_scaled_by_how_much_there_is_are_refused(models: Models) -> None:
    model = llama(models)
    attention = model.model.layers[0].self_attn
    forward = attention.forward
    attention.forward = lambda hidden_states, **kwargs: forward(
        hidden_states=hidden_states * (1 + 0.1 * hidden_states.shape[1]), **kwargs
    )
    assert "computes something else than by itself" in refusal(model)


def test_attention_with_more_to_it_is_refused(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    own = modeling_llama.eager_attention_forward

    def biased(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        distance = torch.arange(key.shape[2])[None] - torch.arange(query.shape[2])[:, None]
        return own(module, query, key, value, mask + 0.01 * distance, **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", biased)
    model = llama(models)
    assert "does more than attention that is known" in refusal(model)


def test_a_model_that_remembers_is_refused(models: Models) -> None:
    model = llama(models)
    mlp = model.model.layers[0].mlp
    forward, calls = mlp.forward, []

    def remembering(states: Any) -> Any:
        calls.append(states)
        return forward(states) * (1 + 0.01 * len(calls))

    mlp.forward = remembering
    assert "cannot run in pages" in refusal(model)


def test_windows_are_those_of_masks() -> None:
    from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function

    masks = AskedMasks(1 << 17)
    for function, answer in (
        (sliding_window_causal_mask_function(24), (None, 24)),
        (sliding_window_causal_mask_function(4096), (None, 4096)),
        (sliding_window_causal_mask_function(1 << 18), (None, None)),
        (lambda batch, head, query, key: key <= query, (None, None)),
        (lambda batch, head, query, key: key >= 0, ("sees tokens that come after", None)),
        (chunked_causal_mask_function(8192, torch.zeros(1, dtype=torch.long)), ("sees chunks, and not a window", None)),
        (lambda batch, head, query, key: (key <= query) & (key % 7 != 3), ("has a mask of its own", None)),
    ):
        asked = {"batch_size": 1, "q_length": 9, "kv_length": 9, "mask_function": function, "dtype": torch.float32}
        mask = masks.make(asked)
        assert masks.window_of(mask) == answer
    assert masks.window_of(None) == ("gets no mask", None)
    assert masks.window_of(mask.clone()) == ("has a mask of its own", None)


def test_a_model_that_was_loaded_elsewhere_runs(models: Models) -> None:
    """One with attention of its own is given that over pages."""
    _, reference = models("mistral")
    model = copy.deepcopy(reference)
    prompts = prompts_with_prefixes()[:3]
    for prompt, completion in zip(prompts, engine_of(model).generate(prompts, GREEDY), strict=True):
        assert list(completion.tokens) == undisturbed(reference, prompt, GREEDY.max_tokens)
    with pytest.raises(RuntimeError, match="runs in an LLM only"):
        model(torch.tensor([[1, 2]]))


def test_logits_are_asked_for_where_a_model_can(models: Models) -> None:
    model, _ = models("llama")
    assert examine(model).keeps_logits
    other = llama(models)
    forward = other.forward

    def without(**given: Any) -> Any:
        return forward(**given)

    whole = signature(forward)
    kept = [one for one in whole.parameters.values() if one.kind is not Parameter.VAR_KEYWORD]
    shown = whole.replace(parameters=[one for one in kept if one.name != "logits_to_keep"])
    without.__signature__ = shown  # type: ignore[attr-defined]
    other.forward = without
    assert not examine(other).keeps_logits
    prompts = prompts_with_prefixes()[:3]
    said = engine_of(other, budget=16).generate(prompts, GREEDY)
    assert said == engine_of(model, budget=16).generate(prompts, GREEDY)


# What else is refused, and not a traceback -------------------------------------------------------------------


def test_a_check_finds_a_difference(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama(models)
    assert check_model(model, attention="sdpa", num_prompts=4, num_tokens=6).is_exact
    original = LLM.generate

    def wrong(self: Any, prompts: Any, params: Any = None) -> Any:
        import msgspec

        return [msgspec.structs.replace(one, tokens=(*one.tokens[:-1], 0)) for one in original(self, prompts, params)]

    monkeypatch.setattr(LLM, "generate", wrong)
    check = check_model(model, attention="sdpa", num_prompts=4, num_tokens=6)
    assert not check.is_exact and check.differences[0].num_alike == 5


@pytest.mark.parametrize("device", ["foo", "cuda:77", "meta", "", "cuda\x00"])
def test_a_device_that_is_not_there_is_named(tiny: Callable[[str], Path], device: str) -> None:
    with pytest.raises(ConfigError, match=r"device: ") as caught:
        LLM(tiny("llama"), device=device)
    assert "auto or cpu" in str(caught.value)


def test_more_memory_than_there_is_is_refused(tiny: Callable[[str], Path], models: Models) -> None:
    with pytest.raises(ConfigError, match=r"kv_memory: 900\.0 GiB of KV are more than the .* GiB that cpu has left"):
        LLM(tiny("llama"), kv_memory="900GiB")
    with pytest.raises(ConfigError, match=r"kv_memory: .* GiB of KV are more"):
        engine_of(models("llama")[0], num_pages=1 << 36)


def test_no_sampling_parameters_stop_the_engine(models: Models) -> None:
    """Values that are odd and allowed draw a token, and those beside them are not touched."""
    model, _ = models("llama")
    prompt = prompts_with_prefixes()[0]
    llm = engine_of(model)
    expected = llm.generate([prompt], GREEDY)[0].tokens
    base: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True}
    odd = [
        SamplingParams(**base, temperature=1e-300),
        SamplingParams(**base, temperature=5e-324),
        SamplingParams(**base, temperature=1e308),
        SamplingParams(**base, temperature=1e308, min_tokens=2, stop_token_ids=(5, 6)),
        SamplingParams(**base, temperature=1.0, repetition_penalty=1e-300),
        SamplingParams(**base, temperature=1.0, repetition_penalty=1e300),
        SamplingParams(**base, temperature=1.0, top_p=1e-300, top_k=1, min_p=1.0),
        SamplingParams(**base, temperature=1.0, top_k=10**9),
        SamplingParams(**base, temperature=1.0, min_tokens=3, stop_token_ids=tuple(range(257))),
        SamplingParams(**base, min_tokens=3, stop_token_ids=(2**60, 300)),
        SamplingParams(**base, temperature=1.0, seed=2**64 - 1, top_logprobs=10**6, logprobs=True),
    ]
    first = llm.submit(prompt, GREEDY)
    indices = [llm.submit(prompt, params) for params in odd]
    done = {}
    while llm.has_work:
        done.update({one.index: one for one in llm.step()})
    assert done[first].tokens == expected
    assert all(1 <= len(done[index].tokens) <= 4 for index in indices)
    assert done[indices[0]].tokens == expected[:4], "as cold as greedy"
    assert PAGE_SIZE == 4

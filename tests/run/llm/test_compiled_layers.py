"""Compiled layers compute what the model's own code computes, and are not used where they do not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="real models need kvarts[torch]")
pytest.importorskip("transformers", reason="real models need kvarts[torch]")
pytest.importorskip("numba", reason="compiled layers need numba")

import msgspec
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvarts.base.errors import ConfigError
from kvarts.core.sampling import SamplingParams
from kvarts.run.torch import layers as layers_module
from kvarts.run.torch.compiled_layers import CompiledLayers
from kvarts.run.torch.decoder import DecoderParts, LayerParts, Norm, find_parts
from kvarts.run.torch.packing import PackedLinear, pack_linears
from kvarts.run.torch.probe import examine

from builders.real_models import GREEDY, VOCABULARY, engine_of, prompts_with_prefixes, undisturbed

Change = Callable[[DecoderParts], DecoderParts]


def small(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """A model of a family, in which what was read decides what is said."""
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 256,
        "pad_token_id": 256,
    }
    if family == "mistral":
        sizes["sliding_window"] = 24
    config = AutoConfig.for_model(family, **{**sizes, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        for name, parameter in model.named_parameters():
            # Norms are ones and biases are zeros at first, and would hide what is done with them.
            if "norm" in name or name.endswith("bias"):
                torch.nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=0.3)
    return model.requires_grad_(False)


class LaidOut(torch.nn.Linear):  # type: ignore[misc]  # its types are not read, see pyproject.toml
    """A matrix that is multiplied by code of its own, as those are that are laid out for oneDNN."""


def lay_out(model: Any) -> None:
    """Let all matrices be multiplied by code of their own."""
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = LaidOut


def said(model: Any, layers: str, **settings: Any) -> tuple[list[list[int]], list[torch.Tensor]]:
    """The tokens of some prompts, and the logits of each step."""
    engine = engine_of(model, layers=layers, **settings)
    assert engine.layers == layers, engine.layers_reason
    seen: list[torch.Tensor] = []
    logits = engine._executor._logits

    def noting(*args: Any) -> Iterator[torch.Tensor]:
        for some in logits(*args):
            seen.append(some)
            yield some.clone()

    engine._executor._logits = noting  # type: ignore[assignment, method-assign]
    completions = engine.generate(prompts_with_prefixes()[:4], SamplingParams(max_tokens=6, ignore_eos=True))
    return [list(one.tokens) for one in completions], seen


HEADS = [(4, 2, 16), (4, 1, 8)]
"""Heads, KV heads and their dimensions: few, as each has its own kernel of attention."""
SHAPES = st.builds(
    lambda heads, hidden_size, intermediate_size, epsilon: {
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "rms_norm_eps": epsilon,
    },
    st.sampled_from(HEADS),
    st.sampled_from([36, 48, 64]),
    st.sampled_from([31, 80]),
    st.sampled_from([1e-6, 1e-2]),
)


@pytest.mark.laws
@settings(max_examples=6)
@given(
    family=st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]),
    shape=SHAPES,
    has_biases=st.booleans(),
    budget=st.sampled_from([7, 64]),
    is_laid_out=st.booleans(),
    seed=st.integers(0, 99),
)
def test_logits_are_those_of_the_model(
    family: str, shape: dict[str, Any], has_biases: bool, budget: int, is_laid_out: bool, seed: int
) -> None:
    """In 32 bits: the same tokens, and logits that differ by less than a ten-thousandth of the largest."""
    biases = {"llama": {"attention_bias": has_biases, "mlp_bias": has_biases}, "qwen3": {"attention_bias": has_biases}}
    model = small(family, seed=seed, **shape, **biases.get(family, {}))
    if is_laid_out:
        lay_out(model)
    expected, theirs = said(model, "model", budget=budget)
    tokens, mine = said(model, "compiled", budget=budget)
    assert tokens == expected
    for one, other in zip(mine, theirs, strict=True):
        assert float((one - other).abs().max()) <= 1e-4 * float(other.abs().max())


@pytest.mark.laws
@settings(max_examples=4)
@given(
    family=st.sampled_from(["qwen2", "qwen3"]),
    full=st.sets(st.integers(0, 4), max_size=4),
    window=st.sampled_from([3, 4, 9, 24]),
    budget=st.sampled_from([7, 64]),
    is_laid_out=st.booleans(),
    keeps=st.sampled_from(["all", "tails"]),
)
def test_layers_with_page_tables_of_their_own(
    family: str, full: set[int], window: int, budget: int, is_laid_out: bool, keeps: str
) -> None:
    """With KV groups: the same tokens and logits as the model's own code through the same tables, and as without."""
    types = ["full_attention" if number in full else "sliding_attention" for number in range(5)]
    changes: dict[str, Any] = {
        "num_hidden_layers": 5,
        "use_sliding_window": True,
        "sliding_window": window,
        "layer_types": types,
    }
    model = small(family, **changes)
    if is_laid_out:
        lay_out(model)
    expected, theirs = said(model, "model", budget=budget, num_pages=40, kv_groups=keeps)
    tokens, mine = said(model, "compiled", budget=budget, num_pages=40, kv_groups=keeps)
    assert tokens == expected == said(model, "compiled", budget=budget)[0]
    for one, other in zip(mine, theirs, strict=True):
        assert float((one - other).abs().max()) <= 1e-4 * float(other.abs().max())


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_slots_of_another_page_table_change_what_is_said(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: every layer writes where the layers of the first page table do."""
    types = ["full_attention", "sliding_attention", "sliding_attention"]
    model = small(family, use_sliding_window=True, sliding_window=8, layer_types=types)
    expected, _ = said(model, "compiled", kv_groups="all")
    begin = CompiledLayers.begin

    def begin_and_confuse(self: CompiledLayers, *args: Any) -> None:
        begin(self, *args)
        self.room["slots"][1:] = self.room["slots"][0]

    monkeypatch.setattr(CompiledLayers, "begin", begin_and_confuse)
    assert said(model, "compiled", kv_groups="all")[0] != expected


@pytest.mark.long
@pytest.mark.parametrize("is_laid_out", [False, True])
@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_in_16_bits_numbers_are_rounded_where_the_model_rounds_them(family: str, is_laid_out: bool) -> None:
    """Only sums are added in another order, so that most logits are equal, and none is off by more than some roundings.

    Rounded elsewhere, hardly any would be equal.
    """
    model = small(family, torch.bfloat16, num_attention_heads=4, num_key_value_heads=2)
    if is_laid_out:
        lay_out(model)
    expected, theirs = said(model, "model")
    tokens, mine = said(model, "compiled")
    # The first step has the same tokens; after it one may differ where two are as good as equal.
    ours, own = mine[0].float(), theirs[0].float()
    assert float((ours == own).float().mean()) > 0.7
    assert float((ours - own).norm() / own.norm()) < 0.01
    assert [len(one) for one in tokens] == [len(one) for one in expected]


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_matrices_of_one_input_are_packed_together(family: str) -> None:
    """Once, by the first engine with compiled layers; the model's own code goes on computing the same."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no bfloat16 for oneDNN")
    model = small(family, torch.bfloat16)
    pack_linears(model)
    expected, theirs = said(model, "model")
    layer = model.get_decoder().layers[1]
    assert type(layer.self_attn.k_proj) is PackedLinear
    for _ in range(2):
        _, mine = said(model, "compiled")
        ours, own = mine[0].float(), theirs[0].float()
        assert float((ours - own).norm() / own.norm()) < 0.01
        key, gate = layer.self_attn.k_proj, layer.mlp.gate_proj
        assert key.whole is layer.self_attn.q_proj.whole and key.whole is layer.self_attn.v_proj.whole
        assert gate.whole is layer.mlp.up_proj.whole and gate.whole is not key.whole
    again, _ = said(model, "model")
    # Sums of other blocks may round otherwise, so that later tokens may be others.
    assert [one[0] for one in again] == [one[0] for one in expected]


@pytest.mark.parametrize("num_threads", [2, 3])
def test_threads_of_a_team_share_the_work(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks beside decodes, in as many threads as there are, however little there is to do."""
    monkeypatch.setattr("kvarts.run.torch.openmp.FEW_NUMBERS", 0)
    model = small("qwen3")
    expected, _ = said(model, "model", budget=7)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert said(model, "compiled", budget=7)[0] == expected
    finally:
        torch.set_num_threads(before)


# Where they are not used ----------------------------------------------------------------------------------------


def of_layer(change: Callable[[LayerParts], LayerParts]) -> Change:
    """Change the second layer."""

    def changed(parts: DecoderParts) -> DecoderParts:
        layers = list(parts.layers)
        layers[1] = change(layers[1])
        return msgspec.structs.replace(parts, layers=tuple(layers))

    return changed


def with_matrices(*order: int) -> Change:
    """Mistake matrices of a layer for others."""
    return of_layer(lambda one: msgspec.structs.replace(one, matrices=tuple(one.matrices[place] for place in order)))


def rotated_by(factor: float) -> Change:
    """Rotate by other positions."""
    return lambda parts: msgspec.structs.replace(
        parts, rotary=lambda states, positions: parts.rotary(states, positions * factor)
    )


@pytest.fixture(scope="module")
def looked_at() -> Callable[[torch.dtype], Any]:
    """A model of each number format."""
    return cache(lambda dtype: small("qwen3", dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (rotated_by(1.02), "queries of layer 0 differ"),
        (with_matrices(0, 2, 1, 3, 4, 5, 6), "what attention of layer 1 reads differ"),
        (with_matrices(0, 1, 2, 3, 5, 4, 6), "the MLP of layer 1 differ"),
        (of_layer(lambda one: msgspec.structs.replace(one, norm=one.norm_again)), "queries of layer 1 differ"),
        (of_layer(lambda one: msgspec.structs.replace(one, norm_again=one.norm)), "the MLP of layer 1 differ"),
        (of_layer(lambda one: msgspec.structs.replace(one, norm_key=None)), "what attention of layer 1 reads differ"),
        (of_layer(lambda one: msgspec.structs.replace(one, norm_query=None)), "queries of layer 1 differ"),
        (lambda parts: msgspec.structs.replace(parts, norm=Norm(parts.norm.weight, 1e3)), "logits differ"),
        (lambda parts: msgspec.structs.replace(parts, embedding=lambda ids: parts.embedding(ids) * 2), "embeddings"),
    ],
)  # fmt: skip
def test_what_is_not_the_model_is_not_used(
    change: Change,
    says: str,
    dtype: torch.dtype,
    looked_at: Callable[[torch.dtype], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control: whatever is changed in what is compiled is found when the engine opens."""
    model = looked_at(dtype)
    monkeypatch.setattr(layers_module, "_proven", WeakKeyDictionary())
    monkeypatch.setattr(layers_module, "find_parts", lambda *args: change(find_parts(*args)))
    engine = engine_of(model)
    assert engine.layers == "model" and says in engine.layers_reason, engine.layers_reason
    with pytest.raises(ConfigError, match="layers: compiled cannot be had"):
        engine_of(model, layers="compiled")


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("granite", {"residual_multiplier": 0.5}, "differ"),
        ("granite", {"logits_scaling": 4.0}, "logits differ"),
        ("gemma2", {"sliding_window": 24}, "other parts"),
        ("phi3", {}, "other parts"),
        ("llama", {"hidden_act": "gelu"}, "the MLP of layer 0 differ"),
        ("smollm3", {"no_rope_layers": [1, 0, 1]}, "of layer 1 differ"),
        ("olmo2", {}, "other parts"),
    ],
)
def test_models_that_only_look_alike_run_by_themselves(family: str, changes: dict[str, Any], says: str) -> None:
    model = small(family, **changes)
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager")
    engine = engine_of(model)
    assert engine.layers == "model" and says in engine.layers_reason, engine.layers_reason
    prompt = prompts_with_prefixes()[0]
    assert list(engine.generate([prompt], GREEDY)[0].tokens) == undisturbed(reference, prompt, GREEDY.max_tokens)


@contextmanager
def hooked(module: Any) -> Iterator[None]:
    handle = module.register_forward_hook(lambda *_: None)
    try:
        yield
    finally:
        handle.remove()


def test_a_layer_that_is_changed_or_watched_is_run_as_it_is() -> None:
    model = small("llama")
    assert engine_of(model).layers == "compiled"
    with hooked(model.model.layers[1].mlp.up_proj):
        engine = engine_of(model)
    assert engine.layers == "model" and "is watched" in engine.layers_reason
    mlp = model.model.layers[2].mlp
    forward = mlp.forward
    mlp.forward = lambda states: forward(states) * 1.5
    engine = engine_of(model)
    assert engine.layers == "model" and "was changed" in engine.layers_reason


def test_layers_are_chosen_by_name() -> None:
    model = small("llama")
    assert engine_of(model, layers="model").layers_reason == "as asked"
    with pytest.raises(ConfigError, match="layers: 'fast' is not known"):
        engine_of(model, layers="fast")
    engine = engine_of(model, attention="sdpa")
    assert (engine.layers, engine.layers_reason) == ("model", "attention is not that of numba")
    with pytest.raises(ConfigError, match="layers: compiled cannot be had: attention is not that of numba"):
        engine_of(model, attention="sdpa", layers="compiled")


def test_weights_are_held_once() -> None:
    model = small("qwen3")
    before = {id(parameter): parameter.data_ptr() for parameter in model.parameters()}
    engine = engine_of(model, layers="compiled")
    assert {id(parameter): parameter.data_ptr() for parameter in model.parameters()} == before
    layers = engine._executor._layers
    assert layers is not None
    kept = {tensor.data_ptr() for tensor in layers._kept if isinstance(tensor, torch.Tensor)}
    assert kept <= set(before.values()), "addresses of the model's own weights, and of nothing else"


def test_parts_are_found_by_looking() -> None:
    model = small("qwen2")
    parts = find_parts(model, examine(model).layers)
    assert len(parts.layers) == 3 and parts.layers[0].norm_query is None
    assert parts.layers[2].matrices[0].bias is not None

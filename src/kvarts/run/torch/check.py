"""Compares a model in pages with transformers' `generate`, with random prompts, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

import msgspec
import torch

from kvarts.base.errors import ConfigError
from kvarts.core.config import EngineConfig
from kvarts.core.sampling import SamplingParams
from kvarts.run.torch.llm import LLM
from kvarts.run.torch.pools import page_bytes_of
from kvarts.run.torch.probe import Facts, examine
from kvarts.run.torch.quantized import Quantization, quantization_of

__all__ = ["Difference", "ModelCheck", "check_model"]

PAGE_SIZE = 16
MOST_WINDOW = 1024
"""Prompts are longer than the model's windows, up to this window."""


class Difference(msgspec.Struct, frozen=True):
    """The tokens after prompt `prompt` match for `num_alike` tokens, then differ from those of `generate`.

    `gap`: the model's preference for the token of `generate`, in standard deviations of its logits.
    """

    prompt: int
    num_alike: int
    gap: float


class ModelCheck(msgspec.Struct, frozen=True):
    """Result of a check. `latent_bytes_per_token`: size of the latents, which `kv_bytes_per_token` is if they are
    stored as they are.

    `windows`: number of attention calls by window, `all` for those that attend to everything. `num_state_layers`:
    layers with a state; `state_bytes`: the state of a sequence over all of them. `num_cached_tokens`: prompt tokens
    found in the cache instead of computed.

    `num_tokens` were compared; `num_alike` of them precede the first difference of their prompt. `rounded`: differences
    that are due to rounding in 16 bits; `differences`: all others, which must be empty.
    """

    model_type: str
    dtype: str
    quantization: Quantization | None
    attention: str
    layers: str
    layers_reason: str
    kv_groups: str
    num_attention_calls: int
    kv_bytes_per_token: int
    latent_bytes_per_token: int | None
    windows: dict[str, int]
    num_state_layers: int
    state_bytes: int
    switch_length: int | None
    num_prompts: int
    num_tokens: int
    num_alike: int
    num_cached_tokens: int
    rounded: list[Difference]
    differences: list[Difference]

    @property
    def is_exact(self) -> bool:
        """Whether every difference is due to rounding."""
        return not self.differences


def check_model(
    model: Any,
    reference: Any = None,
    *,
    attention: str = "auto",
    layers: str = "auto",
    kv_groups: str | None = None,
    num_prompts: int = 8,
    num_tokens: int = 16,
    seed: int = 0,
) -> ModelCheck:
    """Run random prompts through an engine with few pages and small chunks, and compare it with `generate`.

    `reference`: the same weights in transformers' code, if `model` is not that itself. `kv_groups`: as for LLM. Raise
    ConfigError for a model that cannot run in pages.
    """
    facts = examine(model)
    reference = model if reference is None else reference
    prompts = _prompts(model, facts, num_prompts, num_tokens, seed)
    longest = max(map(len, prompts)) + num_tokens
    kv_bytes_per_token = page_bytes_of(facts.layers, page_size=1, dtype=model.dtype)
    state_bytes = sum(state.num_bytes for state in facts.states)
    # Room for the longest and half of another, and four states: other requests wait, share and are preempted.
    state_pages = -(-state_bytes // (kv_bytes_per_token * PAGE_SIZE))
    config = EngineConfig(
        num_pages=-(-longest // PAGE_SIZE) * 3 // 2 + 2 + 4 * state_pages,
        page_size=PAGE_SIZE,
        max_num_batched_tokens=max(24, longest // 3),
        max_num_seqs=4,
    )
    with _by_itself(reference):
        expected = [generated(reference, prompt, num_tokens) for prompt in prompts]
    llm = LLM(model, None, config, attention=attention, layers=layers, kv_groups=kv_groups)
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    completions = llm.generate(prompts, params)
    said = [list(completion.tokens) for completion in completions]
    differences: list[Difference] = []
    num_alike = 0
    with _by_itself(reference):
        for number, (prompt, mine, own) in enumerate(zip(prompts, said, expected, strict=True)):
            alike = next((place for place in range(num_tokens) if mine[place] != own[place]), num_tokens)
            num_alike += alike
            if alike < num_tokens:
                gap = _gap(reference, prompt + own[:alike], own[alike], mine[alike])
                differences.append(Difference(number, alike, gap))
    most_gap = 1e-4 if model.dtype == torch.float32 else 0.25
    windows: dict[str, int] = {}
    for layer in facts.layers:
        name = "all" if layer.window is None else str(layer.window)
        windows[name] = windows.get(name, 0) + 1
    return ModelCheck(
        model_type=model.config.model_type,
        dtype=str(model.dtype).removeprefix("torch."),
        quantization=quantization_of(model),
        attention=llm.attention,
        layers=llm.layers,
        layers_reason=llm.layers_reason,
        kv_groups=llm.kv_groups,
        num_attention_calls=len(facts.layers),
        kv_bytes_per_token=kv_bytes_per_token,
        latent_bytes_per_token=llm.latent_token_bytes,
        windows=windows,
        num_state_layers=len(facts.states),
        state_bytes=state_bytes,
        switch_length=None if facts.switch is None else facts.switch.length,
        num_prompts=len(prompts),
        num_tokens=num_tokens * len(prompts),
        num_alike=num_alike,
        num_cached_tokens=sum(completion.cached_tokens for completion in completions),
        rounded=[one for one in differences if one.gap <= most_gap],
        differences=[one for one in differences if one.gap > most_gap],
    )


def _prompts(model: Any, facts: Facts, count: int, num_tokens: int, seed: int) -> list[list[int]]:
    """Return prompts of many lengths: shorter than a page, longer than windows, and some with a common prefix."""
    random = Random(seed)
    text = model.config.get_text_config(decoder=True)
    most = getattr(text, "max_position_embeddings", None)
    most = most if isinstance(most, int) and most > 0 else 1 << 20
    if num_tokens >= most:
        raise ConfigError(f"must be below {most:,}, the positions of the model, got {num_tokens:,}", field="max_tokens")
    room = most - num_tokens
    if facts.switch is not None:
        room = min(room, facts.switch.length - num_tokens)
    far = max((layer.window for layer in facts.layers if layer.window and layer.window <= MOST_WINDOW), default=0)
    longest = max(1, min(room, max(3 * PAGE_SIZE + 5, far + PAGE_SIZE)))
    prompts: list[list[int]] = []
    for number in range(count):
        length = max(1, longest * (number + 1) // count) if number % 2 else random.randint(1, longest)
        tokens = [random.randrange(text.vocab_size) for _ in range(length)]
        if number % 3 == 2:
            shared = prompts[-1][: random.randint(1, len(prompts[-1]))]
            tokens = (shared + tokens)[:longest]
            if facts.states:  # a state can be resumed only where the other prompt ends
                tokens = prompts[-1] + tokens[: random.randint(1, PAGE_SIZE)]
        prompts.append(tokens)
    if facts.switch is not None and facts.switch.length <= MOST_WINDOW:
        tokens = [random.randrange(text.vocab_size) for _ in range(facts.switch.length + PAGE_SIZE + 3)]
        prompts += [tokens, tokens[: facts.switch.length + 1]]
    return prompts


@contextmanager
def _by_itself(model: Any) -> Iterator[None]:
    """Have a model attend with its own code."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            yield
    finally:
        model.set_attn_implementation(before)


def generated(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return the tokens that `generate` of transformers chooses after one prompt, greedily and past any end token."""
    ids = torch.tensor([list(prompt)], device=model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        num_beams=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def _gap(model: Any, tokens: Sequence[int], preferred: int, other: int) -> float:
    ids = torch.tensor([list(tokens)], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, -1].float()
    return float((logits[preferred] - logits[other]) / logits.std())

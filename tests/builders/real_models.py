"""Engines of small real models, prompts for them, and what transformers says. Needs PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Literal
from weakref import WeakKeyDictionary

import pytest
import torch
from msgspec.structs import replace

from kvarts.core.config import EngineConfig
from kvarts.core.kv.transfer import Direction, Move
from kvarts.core.sampling import SamplingParams
from kvarts.run.page_bytes import PageCopier
from kvarts.run.text import Completion
from kvarts.run.torch.llm import LLM
from kvarts.run.torch.tiny import FAMILIES

ATTENDING = [
    family for family, (_, changes) in FAMILIES.items() if "linear_attention" not in changes.get("layer_types", ())
]
"""Small models that keep tokens in every layer, so that they run without KV groups."""
PAGE_SIZE = 4
VOCABULARY = 257
Ids = list[int]


_said: WeakKeyDictionary[Any, dict[tuple[int, ...], Ids]] = WeakKeyDictionary()


def undisturbed(reference: Any, prompt: Ids, num_tokens: int) -> Ids:
    """What transformers' generate says, which is asked once for a prompt and as many tokens."""
    known = _said.setdefault(reference, {})
    asked = num_tokens, *prompt
    if asked not in known:
        known[asked] = _generated(reference, prompt, num_tokens)
    return known[asked]


def _generated(reference: Any, prompt: Ids, num_tokens: int) -> Ids:
    ids = torch.tensor([prompt], device=reference.device)
    with torch.no_grad():
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    tokens: Ids = out[0, len(prompt) :].tolist()
    return tokens


def audit_beside(speculative_config: Any) -> bool | Literal["laws"]:
    """Return how to audit an LLM with these drafts: the ledger does not follow drafts before prompts."""
    is_first = isinstance(speculative_config, dict) and speculative_config.get("draft_order") == "first"
    return "laws" if is_first else True


def engine_of(
    model: Any, *, num_pages: int = 256, budget: int = 2048, seqs: int = 4, snapshots: Any = "ends", **kwargs: Any
) -> LLM:
    config = EngineConfig(
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        max_num_batched_tokens=budget,
        max_num_seqs=min(seqs, budget),
        snapshots=snapshots,
    )
    return LLM(model, None, config, audit=audit_beside(kwargs.get("speculative_config")), **kwargs)


def prompts_with_prefixes(seed: int = 1) -> list[Ids]:
    random = Random(seed)
    prompts = [[random.randrange(VOCABULARY) for _ in range(length)] for length in (5, 40, 70, 33, 8)]
    return [*prompts, [*prompts[2][:50], 1, 2, 3], prompts[1]]


GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


def exchange_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every load bring its blocks in another order."""
    move = PageCopier._move

    def exchanged(copier: PageCopier, direction: Direction, of: Move) -> int:
        if direction is Direction.LOAD:
            of = replace(of, source_ids=of.source_ids[::-1])
        return move(copier, direction, of)

    monkeypatch.setattr(PageCopier, "_move", exchanged)


def serve_at_random(
    engine: LLM,
    random: Random,
    draw_prompt: Callable[[], Ids],
    params: SamplingParams,
    *,
    num_turns: int = 40,
    rate: float = 0.25,
) -> list[tuple[Ids, Completion]]:
    """Submit prompts with random priorities, cancel some, and check the laws of accounting after every step.

    `rate`: the share of turns with a new prompt. Return the completions, each after its prompt.
    """
    prompts: dict[int, Ids] = {}
    done = {}
    for _ in range(num_turns):
        if random.random() < rate:
            prompt = draw_prompt()
            prompts[engine.submit(prompt, params, priority=random.choice([0, 0, 1]))] = prompt
        if prompts and random.random() < 0.08:
            engine.cancel(random.choice(list(prompts)))
        if engine.has_work:
            done.update({completion.index: completion for completion in engine.step()})
            engine.check()
    while engine.has_work:
        done.update({completion.index: completion for completion in engine.step()})
    assert engine.kv_live_bytes() == 0
    engine.check()
    return [(prompts[index], completion) for index, completion in done.items()]

"""The interface of a running model, real or mock, to the rooms above, in addition to its requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvarts.clock import Clock
from kvarts.config import EngineConfig
from kvarts.engine import Engine
from kvarts.executor.page_bytes import PageBytes
from kvarts.executor.page_slots import PageSlots
from kvarts.executor.rotation import LateRotation
from kvarts.kv.group_memory import GroupMemory
from kvarts.llm.loop import EngineLoop
from kvarts.sampling import SamplingParams

__all__ = ["ModelHost"]


@dataclass(frozen=True)
class ModelHost:
    """A model and the loop that owns its engine. Access `core` only between steps, from a task of the loop.

    `token_bytes`: bytes of KV per token, over all layers. `max_positions`: the positions it was trained for, or None.
    `fingerprint` returns a hash of everything that its KV depends on except tokens. `tokenizer`: a transformers
    tokenizer, or None. `eos_ids`: the model's end tokens. `kv_groups`: as for LLM; `memory`: the KV groups, or None.
    With groups, pages are blocks, and `token_bytes` is the size of a token in a block. `check_params` raises
    ConfigError for parameters that the model cannot satisfy, and may take a second; None for a model without grammars.
    `scores_attention`: whether steps return how much attention pages received, in one page table for all layers.
    """

    loop: EngineLoop
    core: Engine
    config: EngineConfig
    clock: Clock
    slots: PageSlots
    rotation: LateRotation
    kv: PageBytes
    token_bytes: int
    vocab_size: int
    max_positions: int | None
    fingerprint: Callable[[], str]
    tokenizer: Any = None
    eos_ids: frozenset[int] = frozenset()
    kv_groups: str = "off"
    memory: GroupMemory | None = None
    check_params: Callable[[SamplingParams], None] | None = None
    scores_attention: bool = False

"""What rooms above need of a model that runs, real or not, beside its requests."""

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
    """A model and the loop that owns its engine. What `core` is asked is asked between steps, by a task of the loop.

    `token_bytes`: bytes of KV of a token, over all layers. `max_positions`: the positions it was trained for, or None.
    `fingerprint` returns what its KV depends on, beside tokens. `tokenizer`: that of transformers, of a model that
    came with one. `eos_ids`: tokens with which it ends. `kv_groups`: see LLM; `memory`: the groups, None without any.
    Then its pages are blocks, and `token_bytes` those of a token in a block. `check_params` raises ConfigError for
    parameters that the model cannot keep to, and may take a second; None for a model that keeps to no grammar.
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

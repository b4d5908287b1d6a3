"""What a replay of a case writes into its journals."""

from __future__ import annotations

import io
from typing import Any

from kvarts.proof.record.journal import JournalWriter
from kvarts.sim.replaying import replay

from builders.case import Case


def journals_of(case: Case, **changes: Any) -> list[bytes]:
    """What the journals of each replica say."""
    config = case.config(**changes)
    files = [io.BytesIO() for _ in range(config.replicas)]
    memory = None if config.kv_groups == "off" else config.memory.to_builtins()
    sizes: dict[str, Any] = {"total_blocks": config.num_blocks, "block_size_tokens": config.page_size}
    writers = [JournalWriter(file, **sizes, memory=memory) for file in files]
    replay(case.trace(), config, observers_of=lambda replica: [writers[replica]])
    return [file.getvalue() for file in files]

"""What a replay of a case writes into its journals."""

from __future__ import annotations

import io
from typing import Any

from kvarts.record.journal import JournalWriter
from kvarts.sim.replay import replay

from builders.case import Case


def journals_of(case: Case, **changes: Any) -> list[bytes]:
    """What the journals of each replica say."""
    config = case.config(**changes)
    files = [io.BytesIO() for _ in range(config.replicas)]
    writers = [JournalWriter(file, total_blocks=config.num_pages, block_size_tokens=config.page_size) for file in files]
    replay(case.trace(), config, observers_of=lambda replica: [writers[replica]])
    return [file.getvalue() for file in files]

"""The directory of one model's pages, below the host memory of an engine."""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvarts.errors import ConfigError
from kvarts.files import own_directory
from kvarts.offload.keyed import KeyedTier
from kvarts.offload.pagefiles import PageFiles, file_bytes
from kvarts.units import parse_bytes

__all__ = ["ModelFolder", "bytes_of"]

KEY_BYTES = 36
"""The hash of a block, and its KV group."""


class ModelFolder:
    """Owner of a folder in `directory`, named by everything except their tokens that pages of `page_bytes` depend on.

    `config`: vLLM's configuration of offloading. `most_bytes`: the most bytes of files. Raises ConfigError and
    OutputError, also for a folder that another engine uses.
    """

    def __init__(self, directory: str, config: Any, *, most_bytes: int, page_bytes: int) -> None:
        parent = Path(directory)
        parent.mkdir(parents=True, exist_ok=True)
        folder = parent / _fingerprint(config)
        self._owned = ExitStack()
        self._owned.enter_context(own_directory(folder))
        self.pages = PageFiles(folder, max_bytes=most_bytes)
        self.tier = KeyedTier(most_bytes // file_bytes(KEY_BYTES, page_bytes))
        """Which pages are there, and the order in which they are deleted."""
        places, _ = self.tier.place(self.pages.keys())
        for key in self.pages.keys()[len(places) :]:
            self.pages.delete(key)
        self.tier.settle(places)

    def close(self) -> None:
        """Let other engines use the folder."""
        self._owned.close()


def _fingerprint(config: Any) -> str:
    parallel = config.parallel
    facts = [
        *(config.model.name, config.model.dtype, config.cache.tokens_per_hash, config.cache.blocks_per_chunk),
        *(config.worker_kv_bytes_per_block, config.kv_cache_layout, parallel.tp_size, parallel.pp_size),
        *(parallel.pcp_size, parallel.dcp_size),
        [[group.tokens_per_block, list(group.layer_names)] for group in config.groups],
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def bytes_of(value: Any, field: str) -> int:
    """Return a number of bytes, given as a number or as in "4GiB". Raise ConfigError for `field` if it is neither."""
    if isinstance(value, int):
        return value
    try:
        return parse_bytes(str(value))
    except ValueError as error:
        raise ConfigError(str(error), field=field) from None

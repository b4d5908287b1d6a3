"""Names of blocks: the keys of pages, each computed once for contents that share a prefix."""

from __future__ import annotations

from kvarts.content import Content
from kvarts.keys import BlockKey, KeyAlgorithm, KeyMaker, root_key

__all__ = ["BlockNames"]


class BlockNames:
    """The keys of requested pages, cached for the life of their contents. `algorithm` and `seed`: those of vLLM."""

    def __init__(self, algorithm: KeyAlgorithm, seed: str) -> None:
        self._maker = KeyMaker(algorithm, root_key(algorithm, seed))

    def of(self, content: Content, start: int, end: int, before: Content | None = None) -> list[BlockKey]:
        """Return the keys of pages [start, end) of `content`, whose tokens must be known.

        `before`: a content with the same pages up to `start`, whose keys may be cached already.
        """
        keys: list[BlockKey] | None = content.noted(self)
        if keys is None:
            known: list[BlockKey] | None = None if before is None else before.noted(self)
            keys = [] if known is None else known[:start]
            content.note(self, keys)
        self._maker.extend(keys, content, end)
        return keys[start:end]

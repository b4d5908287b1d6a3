"""Names of blocks: the keys of pages, each computed once for all contents that follow one another."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from kvarts.content import Content
from kvarts.keys import BlockKey, KeyAlgorithm, KeyMaker, root_key

__all__ = ["BlockNames"]


class BlockNames:
    """The keys of pages that were asked for, as long as their contents live. `algorithm` and `seed`: those of vLLM."""

    def __init__(self, algorithm: KeyAlgorithm, seed: str) -> None:
        self._maker = KeyMaker(algorithm, root_key(algorithm, seed))
        self._keys: WeakKeyDictionary[Content, list[BlockKey]] = WeakKeyDictionary()

    def of(self, content: Content, start: int, end: int, before: Content | None = None) -> list[BlockKey]:
        """Return the keys of pages [start, end) of `content`, which must be known.

        `before`: a content with the same pages up to `start`, of which keys may be known already.
        """
        keys = self._keys.get(content)
        if keys is None:
            known = None if before is None else self._keys.get(before)
            keys = self._keys[content] = [] if known is None else known[:start]
        self._maker.extend(keys, content, end)
        return keys[start:end]

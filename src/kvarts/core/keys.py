"""Block keys: the names of KV pages outside this process.

Keys are those of vLLM 0.32 (`vllm.v1.core.kv_cache_utils`). The key of a page is the SHA-256 of the triple (key of the
previous page, token ids, extra keys), serialised by pickle (`sha256`) or as canonical CBOR (`sha256_cbor`); the chain
begins with a root key. An extra key begins with what it is: `("lora", name, path)` of the adapter of a request, in
every page; `("cache_salt", salt)` of a tenant in the first, which affects every later key.

A key costs one hash per page, so the control plane does not use keys: they are computed on demand.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from typing import Any, Literal, NamedTuple, NewType

from kvarts.base.errors import ConfigError
from kvarts.core.content import Content

__all__ = [
    "APART",
    "VLLM_DEFAULT_SEED",
    "Adapter",
    "BlockKey",
    "BlockKeys",
    "KeyAlgorithm",
    "KeyMaker",
    "root_key",
    "salt_of_adapter",
    "salt_parts",
]

VLLM_DEFAULT_SEED = "vllm-none-hash"
"""The seed from which vLLM 0.32 hashes its root key if PYTHONHASHSEED is not set."""

BlockKey = NewType("BlockKey", bytes)
KeyAlgorithm = Literal["sha256", "sha256_cbor"]


APART = "\x00"
"""Separates an adapter from the salt after it in a salt of both; neither can contain it, so they can be recovered."""
AT = "\x1e"
"""Separates the name of an adapter from its path."""
MAX_PATH_CHARS = 4096


class Adapter(NamedTuple):
    """A LoRA adapter. Its weights may differ from those of another path under the same name, so that both are keys."""

    name: str
    path: str = ""

    @classmethod
    def of(cls, text: str) -> Adapter:
        """Return the adapter that `text` names: NAME or NAME=PATH. Raise ConfigError for what no salt could be of."""
        name, _, path = text.partition("=")
        adapter = cls(name, path)
        if what := adapter.complaint():
            raise ConfigError(f"{text!r}: {what}", field="lora", hint="Write NAME=PATH.")
        return adapter

    def complaint(self) -> str:
        """Return why a salt could not be of it; empty for a good one."""
        if not self.name or len(self.path) > MAX_PATH_CHARS:
            return f"a name is needed, and a path of at most {MAX_PATH_CHARS} characters"
        separator = next((each for each in (APART, AT) if each in self.name + self.path), None)
        return "" if separator is None else f"has the character {separator!r}"


def salt_of_adapter(adapter: Adapter, salt: str | None) -> str:
    """Return the salt of the KV of `adapter`, for requests with `salt` or without one."""
    return f"{adapter.name}{AT}{adapter.path}{APART}{salt or ''}"


def salt_parts(salt: str | None) -> tuple[Adapter | None, str]:
    """Return the adapter in a salt, if it has one, and the salt of its requests; "" without."""
    if salt is None:
        return None, ""
    of_adapter, is_of_adapter, rest = salt.rpartition(APART)
    name, _, path = of_adapter.partition(AT)
    return Adapter(name, path) if is_of_adapter else None, rest


def _hash_pickle(value: object) -> bytes:
    return sha256(pickle.dumps(value, protocol=5)).digest()


def _hash_cbor(value: object) -> bytes:
    import cbor2  # imported only if keys of this kind are used

    return sha256(cbor2.dumps(value, canonical=True)).digest()


_HASHES: dict[str, Callable[[object], bytes]] = {"sha256": _hash_pickle, "sha256_cbor": _hash_cbor}


def root_key(algorithm: KeyAlgorithm, seed: str = VLLM_DEFAULT_SEED) -> BlockKey:
    """Return the key before the first page: the hash of the seed. vLLM's seed is PYTHONHASHSEED if that is set."""
    return BlockKey(_hash(algorithm)(seed))


def _hash(algorithm: str) -> Callable[[object], bytes]:
    try:
        return _HASHES[algorithm]
    except KeyError:
        known = ", ".join(sorted(_HASHES))
        raise ConfigError(f"no block key algorithm {algorithm!r}", hint=f"Known: {known}.") from None


class KeyMaker:
    """Sequential computation of keys. `root`: the key before the first page, as returned by `root_key`.

    Raises ConfigError for an unknown algorithm.
    """

    __slots__ = ("_hash", "_root")

    def __init__(self, algorithm: KeyAlgorithm, root: BlockKey | None = None) -> None:
        self._hash = _hash(algorithm)
        self._root = root_key(algorithm) if root is None else root

    def extend(self, keys: list[BlockKey], content: Content, num_pages: int) -> None:
        """Extend `keys`, the first keys of `content`, to `num_pages` keys. All these pages must be known."""
        size = content.page_size
        start = len(keys)
        if start >= num_pages:
            return
        tokens = content.tokens(start * size, num_pages * size).tolist()
        parent = keys[-1] if keys else self._root
        adapter, salt = salt_parts(content.salt)
        every: tuple[Any, ...] = () if adapter is None else (("lora", *adapter),)
        for page in range(start, num_pages):
            extra = (*every, ("cache_salt", salt)) if page == 0 and salt else every or None
            first = (page - start) * size
            parent = BlockKey(self._hash((parent, tuple(tokens[first : first + size]), extra)))
            keys.append(parent)


class BlockKeys:
    """The keys of one content's full pages, computed on demand and cached.

    `root`: the key before the first page, as returned by `root_key`. `known`: keys of the first pages, if already
    known. Raises ConfigError for an unknown algorithm.
    """

    __slots__ = ("_content", "_keys", "_maker")

    def __init__(
        self,
        content: Content,
        *,
        algorithm: KeyAlgorithm = "sha256",
        root: BlockKey | None = None,
        known: Iterable[BlockKey] = (),
    ) -> None:
        self._content = content
        self._maker = KeyMaker(algorithm, root)
        self._keys = list(known)

    def __getitem__(self, page: int) -> BlockKey:
        """Return the key of `page`. Raise IndexError if its tokens are not known."""
        content = self._content
        if not 0 <= page < content.num_known_pages:
            raise IndexError(f"page {page} of {content.num_known_pages} known pages")
        self._maker.extend(self._keys, content, page + 1)
        return self._keys[page]

    def __len__(self) -> int:
        return self._content.num_known_pages

    def __iter__(self) -> Iterator[BlockKey]:
        return (self[page] for page in range(len(self)))

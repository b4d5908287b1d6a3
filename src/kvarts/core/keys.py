"""Block keys: the names of KV pages outside this process.

Keys are those of vLLM 0.32 and 0.33 (`vllm.v1.core.kv_cache_utils`). The key of a page is the hash of the triple (key
of the previous page, token ids, extra keys), serialised by pickle (`sha256`, `xxhash`) or as canonical CBOR
(`sha256_cbor`, `xxhash_cbor`); the chain begins with a root key. An extra key begins with its kind: `("lora", name,
path)` of the adapter of a request, in every page; `("mm", hash, start)` of an image, in the pages that have some of its
tokens, with the place of its first token in the page; `("cache_salt", salt)` of a tenant in the first page, which
affects every later key.

With EAGLE or MTP, vLLM 0.33 also hashes the tokens after a page, on which the draft's KV of its last token depends
(`lookahead`): a page has a key when these are known.

A key costs one hash per page, so the control plane does not use keys: they are computed on demand.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from importlib.util import find_spec
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
    "Medium",
    "root_key",
    "salt_of_adapter",
    "salt_parts",
]

VLLM_DEFAULT_SEED = "vllm-none-hash"
"""The seed from which vLLM hashes its root key if PYTHONHASHSEED is not set."""

BlockKey = NewType("BlockKey", bytes)
KeyAlgorithm = Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]


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


class Medium(NamedTuple):
    """An image or another medium in a prompt: its hash, its first token, and its number of tokens."""

    identifier: str
    start: int
    num_tokens: int


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


def _pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=5)


def _cbor(value: object) -> bytes:
    import cbor2  # imported only if keys of this kind are used

    return cbor2.dumps(value, canonical=True)


def _sha256(data: bytes) -> bytes:
    return sha256(data).digest()


def _xxhash(data: bytes) -> bytes:
    import xxhash

    return bytes(xxhash.xxh3_128_digest(data))


_HASHES: dict[str, tuple[Callable[[object], bytes], Callable[[bytes], bytes]]] = {
    "sha256": (_pickled, _sha256),
    "sha256_cbor": (_cbor, _sha256),
    "xxhash": (_pickled, _xxhash),
    "xxhash_cbor": (_cbor, _xxhash),
}


def root_key(algorithm: KeyAlgorithm, seed: str = VLLM_DEFAULT_SEED) -> BlockKey:
    """Return the key before the first page: the hash of the seed. vLLM's seed is PYTHONHASHSEED if that is set.

    If it is not, vLLM takes random bytes for xxhash, so that engines with it cannot share keys.
    """
    return BlockKey(_hash(algorithm)(seed))


def _hash(algorithm: str) -> Callable[[object], bytes]:
    try:
        serialised, digest = _HASHES[algorithm]
    except KeyError:
        known = ", ".join(sorted(_HASHES))
        raise ConfigError(f"no block key algorithm {algorithm!r}", hint=f"Known: {known}.") from None
    if digest is _xxhash and find_spec("xxhash") is None:
        raise ConfigError(f"block keys by {algorithm} need the package xxhash", hint="pip install xxhash")
    return lambda value: digest(serialised(value))


def _apart(text: str) -> str:
    """Return an equal string that is another object: pickle writes a string once, and then refers to the object."""
    return text.encode(errors="surrogatepass").decode(errors="surrogatepass")


class KeyMaker:
    """Sequential computation of keys. `root`: the key before the first page, as returned by `root_key`.

    `lookahead`: tokens after a page that are hashed too. Raises ConfigError for an unknown algorithm.
    """

    __slots__ = ("_hash", "_root", "lookahead")

    def __init__(self, algorithm: KeyAlgorithm, root: BlockKey | None = None, *, lookahead: int = 0) -> None:
        self._hash = _hash(algorithm)
        self._root = root_key(algorithm) if root is None else root
        self.lookahead = lookahead

    def extend(self, keys: list[BlockKey], content: Content, num_pages: int, media: Sequence[Medium] = ()) -> None:
        """Extend `keys`, the first keys of `content`, to `num_pages` keys. All tokens that they hash must be known.

        `media`: of the content, in the order of their tokens.
        """
        size, ahead = content.page_size, self.lookahead
        start = len(keys)
        if start >= num_pages:
            return
        tokens = content.tokens(start * size, num_pages * size + ahead).tolist()
        parent = keys[-1] if keys else self._root
        adapter, salt = salt_parts(content.salt)
        every: tuple[Any, ...] = () if adapter is None else (("lora", _apart(adapter.name), _apart(adapter.path)),)
        for page in range(start, num_pages):
            first, last = page * size, (page + 1) * size + ahead
            extra = every
            if media:
                inside = (each for each in media if each.start < last and each.start + each.num_tokens > first)
                extra = (*every, *(("mm", _apart(each.identifier), each.start - first) for each in inside))
            if page == 0 and salt:
                extra = (*extra, ("cache_salt", _apart(salt)))
            at = first - start * size
            hashed: tuple[Any, ...] | None = extra or None
            if ahead:
                hashed = (hashed, *tokens[at + size : at + size + ahead])
            parent = BlockKey(self._hash((parent, tuple(tokens[at : at + size]), hashed)))
            keys.append(parent)


class BlockKeys:
    """The keys of one content's full pages, computed on demand and cached.

    `root`: the key before the first page, as returned by `root_key`. `known`: keys of the first pages, if already
    known. `media`, `lookahead`: as of `KeyMaker`. Raises ConfigError for an unknown algorithm.
    """

    __slots__ = ("_content", "_keys", "_maker", "_media")

    def __init__(
        self,
        content: Content,
        *,
        algorithm: KeyAlgorithm = "sha256",
        root: BlockKey | None = None,
        known: Iterable[BlockKey] = (),
        media: Iterable[Medium] = (),
        lookahead: int = 0,
    ) -> None:
        self._content = content
        self._maker = KeyMaker(algorithm, root, lookahead=lookahead)
        self._keys = list(known)
        self._media = sorted(media, key=lambda each: each.start)

    def __getitem__(self, page: int) -> BlockKey:
        """Return the key of `page`. Raise IndexError if its tokens are not known."""
        if not 0 <= page < len(self):
            raise IndexError(f"page {page} of {len(self)} known pages")
        self._maker.extend(self._keys, self._content, page + 1, self._media)
        return self._keys[page]

    def __len__(self) -> int:
        content = self._content
        return max(0, content.num_known_tokens - self._maker.lookahead) // content.page_size

    def __iter__(self) -> Iterator[BlockKey]:
        return (self[page] for page in range(len(self)))

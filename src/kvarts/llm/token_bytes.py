"""The bytes of single tokens, which a decoder shows only once they form whole characters."""

from __future__ import annotations

import json
import re
from codecs import getincrementaldecoder
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

__all__ = ["TextOffsets", "TokenBytes"]

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
SPACE = "\u2581"
"""SentencePiece's character for a space."""


class TokenBytes:
    """The bytes of each token of a transformers tokenizer, independent of context.

    There are two kinds of vocabularies: byte-level ones spell each byte as a printable character (GPT-2), others are
    text with `<0xE2>` for a single byte (SentencePiece). A token of any other vocabulary has the bytes of its text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend: Any = backend
        kinds = set() if backend is None else set(_decoders(json.loads(backend.to_str()).get("decoder")))
        self._is_byte_level = "ByteLevel" in kinds
        self._is_sentencepiece = bool(kinds & {"ByteFallback", "Metaspace"})
        self._added: dict[int, Any] = {} if backend is None else dict(backend.get_added_tokens_decoder())
        self.special_ids = frozenset(token for token, added in self._added.items() if added.special)
        self._first_space: bool | None = None

    def of(self, token: int) -> bytes:
        """Return the bytes of `token`; empty if it is not in the vocabulary."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._read(token)
        return known

    @property
    def drops_first_space(self) -> bool:
        """Whether the text of a sequence begins without the space of its first token."""
        if self._first_space is None:
            self._first_space = self._is_sentencepiece and self._backend.decode(self._spaced()) == "a"
        return self._first_space

    def _spaced(self) -> list[int]:
        token = self._backend.token_to_id(f"{SPACE}a")
        return [] if token is None else [token]

    def _read(self, token: int) -> bytes:
        if token in self._added:
            return str(self._added[token].content).encode()
        if self._backend is None:
            return str(self._tokenizer.decode([token])).encode()
        piece = self._backend.id_to_token(token)
        if piece is None:
            return b""
        if self._is_byte_level and all(character in BYTE_OF for character in piece):
            return bytes(BYTE_OF[character] for character in piece)
        if self._is_sentencepiece:
            byte = BYTE.match(piece)
            return bytes([int(byte[1], 16)]) if byte else piece.replace(SPACE, " ").encode()
        return str(self._backend.decode([token])).encode()


class TextOffsets:
    """The offset in a text of the character that contains each token's first byte. Tokens are added in order.

    `bytes_of`: returns the bytes of a token. `start`: the offset of the first token. `skipped`: tokens without text.
    `drops_first_space`: the text begins without the space of its first token.
    """

    def __init__(
        self,
        bytes_of: Callable[[int], bytes],
        *,
        start: int = 0,
        skipped: Collection[int] = (),
        drops_first_space: bool = False,
    ) -> None:
        self._bytes_of = bytes_of
        self._skipped = skipped
        self._drops_space = drops_first_space
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self.end = start
        """Offset of the end of the complete characters."""

    def add(self, tokens: Iterable[int]) -> list[int]:
        """Return the offset of each of the next tokens. A token that begins within a character has that character's
        offset.
        """
        offsets = []
        for token in tokens:
            offsets.append(self.end)
            piece = b"" if token in self._skipped else self._bytes_of(token)
            if piece and self._drops_space:
                self._drops_space = False
                piece = piece.removeprefix(b" ")
            self.end += len(self._decoder.decode(piece))
        return offsets


def _decoders(decoder: Any) -> Sequence[str]:
    """Return the types of a decoder and of the decoders in it."""
    if not isinstance(decoder, dict):
        return []
    parts = [kind for part in decoder.get("decoders", ()) for kind in _decoders(part)]
    return [str(decoder.get("type")), *parts]


def _byte_of_character() -> dict[str, int]:
    """Return the byte that each character stands for: printable ones themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTE_OF = _byte_of_character()

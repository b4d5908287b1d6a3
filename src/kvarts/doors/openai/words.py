"""The tokens of a mock: words, and pieces of everything else.

Tokens and text correspond one to one: `decode(encode(text)) == text` for any text, without a file. The mock writes
common English words in lower case, with a space before each but the first. Byte-level and SentencePiece vocabularies
encode such text and decode it unchanged, and have nearly all of these words as single tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["MAX_CHARS_PER_WORD", "NUM_WORDS", "VOCABULARY_SIZE", "WORDS", "WordTokenizer", "vary_words"]

TEXT = """
    the of and to in is that for it as was with be by on not he his but at are this have from or had an they which
    one you were her all she there would their we him been has when will more no if out so said what up its about
    into than them can only other new some could time these two may then do first any my now such like our over man
    me even most made after also did many before must through back years where much your way well down should
    because each just those people too little state good very make world still own see men work long get here
    between both life being under never day same another know while last might us great old year off come since
    against go came right used take three place part small found thought went say general once upon school every
    until always away something fact though water less public put thing almost hand enough far took head yet better
    set told nothing night end why called find going look asked later point knew city next program business give
    group days young let room side present given order national possible rather second face per among form often
    things early white large case become need big four within felt along children saw best church ever least power
    development light family interest want members mind country area others turned although open service law problem
    certain different door thus god house war name kind line able human history car body full close field left local
    study book words major half money known seen month street week level free office party result market paper
    question system real ground control air story effect action short true idea hard age feet death tax view sense
    cost strong common value change move table read women mother north south west east river land tree fire food
    music art plan data test code page model file list number letter color red blue green black gold silver king
    court army sea ship island road bridge wall window garden floor wood stone glass iron steel cloth cotton bread
    fish meat fruit rice milk sugar salt coffee tea wine bird dog cat horse cow sheep summer winter spring morning
    evening hour minute century season period moment future past event game play team player film song dance voice
    sound speech language word sentence reader writer author teacher student class lesson course subject science
    theory method research report answer reason cause purpose goal success failure risk chance hope fear love peace
    truth doubt trust care help support growth trade price sale bank account credit loan debt share stock fund
    profit loss
"""
WORDS = tuple(TEXT.split())
"""The words that a mock writes."""

NUM_WORDS = len(WORDS)
BARE = NUM_WORDS
"""The token of a word without a space before it is `BARE` above the token of the same word with a space."""

SPECIALS = 2 * NUM_WORDS
SPECIAL_TEXTS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
NOTHING = SPECIALS + 15
"""A token without text, for an answer without text."""

BYTES = SPECIALS + 16
"""Pieces of one byte, then of two, then of three, numbered by their big-endian values. A character of four bytes is one
token, too.
"""

PAIRS = BYTES + 256
TRIPLES = PAIRS + 256**2
CHARACTERS = TRIPLES + 256**3
VOCABULARY_SIZE = 1 << 32
"""The number of ids that a mock accepts in prompts: clients and routers store ids in 32 bits. Higher ids lack text."""

_SPLIT = re.compile(r"<\|im_start\|>|<\|im_end\|>|<\|endoftext\|>| ?[A-Za-z]+| ?[0-9]{1,3}|\s|[^\sA-Za-z0-9]+")
_SPACED = {f" {word}": index for index, word in enumerate(WORDS)}
_KNOWN = {
    **_SPACED,
    **{word: BARE + index for index, word in enumerate(WORDS)},
    **{text: SPECIALS + index for index, text in enumerate(SPECIAL_TEXTS)},
}
_PIECES = tuple(f" {word}" for word in WORDS) + WORDS
MAX_CHARS_PER_WORD = max(map(len, _KNOWN))
"""The most characters of a token: other pieces are shorter than the longest word."""
_BASES = (BYTES, PAIRS, TRIPLES)
_FIRST_CHARACTER = 0x10000
_END = CHARACTERS + 0x110000 - _FIRST_CHARACTER


class WordTokenizer:
    """Text to tokens and back. Every text has tokens, and all ids below 2**32 are tokens, possibly without text."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`."""
        tokens: list[int] = []
        known = _KNOWN
        for part in _SPLIT.findall(text):
            token = known.get(part)
            if token is None:
                tokens += _tokens_of(part)
            else:
                tokens.append(token)
        return tokens

    def tokens(self, text: str) -> Iterator[int]:
        """Iterate over the tokens of `text`."""
        known = _KNOWN
        for found in _SPLIT.finditer(text):
            part = found[0]
            token = known.get(part)
            if token is None:
                yield from _tokens_of(part)
            else:
                yield token

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of `tokens`."""
        return b"".join(self.bytes_of(token) for token in tokens).decode("utf-8", "replace")

    def piece(self, token: int) -> str:
        """Return the text of one token."""
        if token < SPECIALS:
            return _PIECES[token]
        return self.bytes_of(token).decode("utf-8", "replace")

    @staticmethod
    def bytes_of(token: int) -> bytes:
        """Return the bytes of one token."""
        if token < SPECIALS:
            return _PIECES[token].encode()
        if token < BYTES:
            index = token - SPECIALS
            return SPECIAL_TEXTS[index].encode() if index < len(SPECIAL_TEXTS) else b""
        if token >= CHARACTERS:
            return chr(_FIRST_CHARACTER + token - CHARACTERS).encode() if token < _END else b""
        length = 1 + (token >= PAIRS) + (token >= TRIPLES)
        return (token - _BASES[length - 1]).to_bytes(length, "big")


def _tokens_of(part: str) -> Iterator[int]:
    """Iterate over the tokens of a part of a text that is not a known word."""
    if not part.isascii():
        yield from _tokens_of_characters(part)
        return
    payload = part.encode()
    for start in range(0, len(payload), 3):
        piece = payload[start : start + 3]
        yield _BASES[len(piece) - 1] + int.from_bytes(piece, "big")


def _tokens_of_characters(text: str) -> Iterator[int]:
    """Iterate over the tokens of a text. A token is whole characters, so it can be decoded alone."""
    piece = b""
    for character in text:
        own = character.encode("utf-8", "surrogatepass")
        if len(piece) + len(own) > 3 and piece:
            yield _BASES[len(piece) - 1] + int.from_bytes(piece, "big")
            piece = b""
        if len(own) > 3:
            yield CHARACTERS + ord(character) - _FIRST_CHARACTER
        else:
            piece += own
    if piece:
        yield _BASES[len(piece) - 1] + int.from_bytes(piece, "big")


def vary_words(before: npt.NDArray[np.uint64], drawn: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return `drawn` words, with a space before each unless the previous token is white space or special."""
    if not (before >= SPECIALS).any():
        return drawn
    has_no_space = np.isin(before, _STARTS)
    return drawn + np.uint64(BARE) * has_no_space.astype(np.uint64)


def _starts() -> Sequence[int]:
    """Return the tokens after which a word is written without a space."""
    spaces = [BYTES + code for code in b" \n\t\r"]
    return [*range(SPECIALS, BYTES), *spaces]


_STARTS = np.array(_starts(), np.uint64)

"""The text of a file, in blocks: gzipped or not, seekable or a pipe, with strings of any length; and JSON values in it.

Every block is UTF-8. The memory of a JSON reader is bounded: a string longer than LONGEST_STRING is checked for
validity and replaced by a short one.

JSON values show two things that plain decoding hides: repeated keys of an object, and numbers of any length.
"""

from __future__ import annotations

import codecs
import json
import stat
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec

from kvarts.base.errors import InputError, MissingFileError
from kvarts.base.files import temporary_file

__all__ = [
    "BLOCK_BYTES",
    "JSON_ERRORS",
    "LONGEST_STRING",
    "SPACE",
    "Broken",
    "ByteSource",
    "Twice",
    "any_value",
    "bytes_blocks",
    "check",
    "shortened",
    "unescaped",
    "why_not",
]

BLOCK_BYTES = 1 << 20
LONGEST_STRING = 1 << 16
"""Longer strings are checked and not kept. No name or label that a reader uses is as long."""
SPACE = b" \t\r\n"
SHORT_STRING = b'"(a long string)"'
LONGEST_ESCAPE = 12
"""Bytes of a pair of escaped surrogates."""
FIRST_FEED = 1 << 9


Broken = Callable[..., InputError]
"""Makes the error for an invalid text, from its description and the keyword `line`, which counts from 1."""


_raw = msgspec.json.Decoder(msgspec.Raw)
JSON_ERRORS = (msgspec.DecodeError, RecursionError, ValueError)
LONGEST_NUMBER = 400
"""Digits kept of a whole number. A number that long is above every limit."""


class ByteSource:
    """The bytes of a file, which can be read more than once; a pipe is copied to a temporary file.

    Raises MissingFileError and InputError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_torn = False
        """Whether the file is gzipped and its compressed data break off."""
        self._spooled: IO[bytes] | None = None
        try:
            with path.open("rb") as file:
                if not stat.S_ISREG(path.stat().st_mode):
                    self._spooled = _spool(file)
                    weakref.finalize(self, self._spooled.close)
        except FileNotFoundError:
            raise MissingFileError("no such file", path=path, hint="Check the path of the timeline.") from None
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from error

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """Open the file at its beginning. Raise InputError."""
        try:
            if self._spooled is None:
                with self.path.open("rb") as file:
                    yield file
            else:
                self._spooled.seek(0)
                yield self._spooled
        except OSError as error:
            raise self._unreadable(error) from error

    def head(self, num_bytes: int) -> bytes:
        """Return the first bytes, without unpacking."""
        with self.open() as file:
            return file.read(num_bytes)

    def blocks(self) -> Iterator[bytes]:
        """Iterate over the unpacked bytes. A gzipped file that breaks off yields the part that can be unpacked."""
        self.is_torn = False
        with self.open() as file:
            first = file.read(2)
            file.seek(0)
            yield from self._unpacked(file) if first == b"\x1f\x8b" else iter(lambda: file.read(BLOCK_BYTES), b"")

    def text(self) -> Iterator[bytes]:
        """Iterate over the text, without a byte-order mark. Raise InputError if it is not UTF-8."""
        return _checked(self.blocks(), self.broken)

    def broken(self, what: str, *, line: int | None = None) -> InputError:
        """Return an InputError with the message `what` and the path."""
        return InputError(what, path=self.path, line=line, hint="Is it the timeline that it should be?")

    def _unreadable(self, error: Exception) -> InputError:
        return InputError(f"cannot be read: {getattr(error, 'strerror', None) or error}", path=self.path)

    def _unpacked(self, file: IO[bytes]) -> Iterator[bytes]:
        # At the end of a gzip member, zlib copies the rest of the input: feed little at first, for many small members.
        unpacker = zlib.decompressobj(31)
        feed = FIRST_FEED
        ready: list[bytes] = []
        num_ready = 0
        packed = b""
        at = 0
        try:
            while True:
                if at == len(packed):
                    packed, at = file.read(BLOCK_BYTES), 0
                    if not packed:
                        break
                if unpacker.eof:
                    unpacker = zlib.decompressobj(31)
                    feed = FIRST_FEED
                fed = packed[at : at + feed]
                text = unpacker.decompress(fed, BLOCK_BYTES)
                at += len(fed) - len(unpacker.unconsumed_tail) - len(unpacker.unused_data)
                feed = min(2 * feed, BLOCK_BYTES)
                if text:
                    ready.append(text)
                    num_ready += len(text)
                    if num_ready >= BLOCK_BYTES:
                        yield b"".join(ready)
                        ready, num_ready = [], 0
            while not unpacker.eof and (text := unpacker.decompress(b"", BLOCK_BYTES)):
                ready.append(text)
        except zlib.error as error:
            raise self.broken(f"is no readable gzip: {error}") from error
        if ready:
            yield b"".join(ready)
        self.is_torn = not unpacker.eof


def _spool(file: IO[bytes]) -> IO[bytes]:
    spooled = temporary_file()  # read later, closed with its last user
    while block := file.read(BLOCK_BYTES):
        spooled.write(block)
    return spooled


def bytes_blocks(text: bytes, broken: Broken) -> Iterator[bytes]:
    """Iterate over a text in memory, without a byte-order mark. Raise the error made by `broken` if it is not UTF-8."""
    return _checked((text[at : at + BLOCK_BYTES] for at in range(0, len(text), BLOCK_BYTES)), broken)


def _checked(blocks: Iterable[bytes], broken: Broken) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    is_first = True
    for block in blocks:
        try:
            decoder.decode(block)
        except UnicodeDecodeError as error:
            raise broken(f"is no UTF-8, from about byte {done + error.start} on") from error
        done += len(block)
        yield block.removeprefix(codecs.BOM_UTF8) if is_first else block
        is_first = False
    try:
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise broken(f"is no UTF-8: it ends within a character, at byte {done}") from error


def shortened(blocks: Iterable[bytes], broken: Broken, *, keeps_lines: bool) -> Iterator[bytes]:
    """Iterate over a JSON text, with long strings shortened and blocks of white space dropped.

    A string is never cut between two blocks. An unterminated long string is dropped: the text breaks off before it.
    Raise the error made by `broken` for a long string that is not valid JSON. `keeps_lines`: keep line ends in white
    space.
    """
    held = b""  # empty, or an unterminated string from its opening quote on
    is_long = False  # whether `held` continues a long string whose beginning was checked
    for block in blocks:
        text = held + block
        if is_long:
            end = unescaped(text).find(b'"')
            if end < 0:
                held = _check_string(text, broken)
                continue
            _check_string(text[:end], broken, is_whole=True)
            yield SHORT_STRING
            is_long = False
            text = text[end + 1 :]
        if not text.strip(SPACE):
            text = b"\n" * text.count(b"\n") if keeps_lines else b" "
        start = _open_string(text)
        if start is None:
            held = b""
            if text:
                yield text
            continue
        if start:
            yield text[:start]
        held = text[start:]
        if len(held) > LONGEST_STRING:
            is_long = True
            held = _check_string(held[1:], broken)
    if held and not is_long:
        yield held


def _open_string(text: bytes) -> int | None:
    """Return the start of a string that is unterminated at the end of `text`, or None."""
    plain = unescaped(text)
    return plain.rfind(b'"') if plain.count(b'"') % 2 else None


def unescaped(text: bytes) -> bytes:
    """Return the text with escaped quotes masked at the same length. The text must not begin within an escape."""
    return text.replace(b"\\\\", b"__").replace(b'\\"', b"__") if b"\\" in text else text


def _check_string(body: bytes, broken: Broken, *, is_whole: bool = False) -> bytes:
    """Check a part of a string up to a safe cut, and return the rest: part of an escape, or nothing."""
    reason = ""  # as text: a kept error would keep this frame, and `body`, alive until garbage collection
    for length in range(len(body), max(-1, len(body) - LONGEST_ESCAPE - 1), -1):
        try:
            _raw.decode(b'"' + body[:length] + b'"')
        except msgspec.DecodeError as error:
            reason = reason or str(error)
            if is_whole:
                break
        else:
            return body[length:]
    raise broken(f"is no JSON: a string of it is not valid: {reason}")


class Twice(dict[str, Any]):
    """An object with repeated keys, listed in `names`; it holds the last value of each."""

    names: list[str]


def any_value(text: bytes) -> Any:
    """Return the value of a JSON text. Raise one of JSON_ERRORS."""
    check(text)
    return _decoder.decode(text.decode())


def check(text: bytes) -> None:
    """Raise one of JSON_ERRORS if `text` is not JSON; build no value."""
    _raw.decode(text)


def why_not(error: Exception) -> str:
    """Return the text of one of JSON_ERRORS, for a message."""
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) == len(pairs):
        return value
    seen: set[str] = set()
    twice = Twice(value)
    twice.names = sorted({name for name, _ in pairs if name in seen or seen.add(name)})  # type: ignore[func-returns-value]
    return twice


def _whole(digits: str) -> int:
    return int(digits[:LONGEST_NUMBER])


_decoder = json.JSONDecoder(object_pairs_hook=_object, parse_int=_whole)

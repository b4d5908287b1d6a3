"""The text of a file, in blocks, whatever the file is: packed or not, seekable or a pipe, with strings of any length.

Every block is UTF-8. What a reader of JSON must hold at once is bounded: a string longer than LONGEST_STRING comes as a
short one, after a check that it is valid.
"""

from __future__ import annotations

import codecs
import stat
import weakref
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol

import msgspec

from kvarts.errors import InputError, MissingFileError

__all__ = ["BLOCK_BYTES", "LONGEST_STRING", "SPACE", "Broken", "Source", "bytes_blocks", "shortened", "unescaped"]

BLOCK_BYTES = 1 << 20
LONGEST_STRING = 1 << 16
"""Longer strings are checked and not kept. None of the names and labels that are read is as long."""
SPACE = b" \t\r\n"
SHORT_STRING = b'"(a long string)"'
LONGEST_ESCAPE = 12
"""Bytes: a pair of surrogates."""
FIRST_FEED = 1 << 9


class Broken(Protocol):
    """Makes the error that says what is wrong with a text."""

    def __call__(self, what: str, *, line: int | None = None) -> InputError:
        """Return it. `line`: from 1."""


_raw = msgspec.json.Decoder(msgspec.Raw)


class Source:
    """The bytes of a file that can be read more than once; those of a pipe are copied to a temporary file.

    Raise MissingFileError and InputError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_torn = False
        """Whether it is packed, and what is packed breaks off."""
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
        """Open it at its beginning. Raise InputError."""
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
        """Return the first bytes, as they lie in the file."""
        with self.open() as file:
            return file.read(num_bytes)

    def blocks(self) -> Iterator[bytes]:
        """Iterate over the bytes, unpacked. A packed file that breaks off yields what there is."""
        self.is_torn = False
        with self.open() as file:
            first = file.read(2)
            file.seek(0)
            yield from self._unpacked(file) if first == b"\x1f\x8b" else iter(lambda: file.read(BLOCK_BYTES), b"")

    def text(self) -> Iterator[bytes]:
        """Iterate over the text, without a byte-order mark. Raise InputError for what is no UTF-8."""
        return _checked(self.blocks(), self.broken)

    def broken(self, what: str, *, line: int | None = None) -> InputError:
        """Return the error that says what is wrong with it."""
        return InputError(what, path=self.path, line=line, hint="Is it the timeline that it should be?")

    def _unreadable(self, error: Exception) -> InputError:
        return InputError(f"cannot be read: {getattr(error, 'strerror', None) or error}", path=self.path)

    def _unpacked(self, file: IO[bytes]) -> Iterator[bytes]:
        # What follows a packed part is copied when the part ends: feed little at first, for files of many small parts.
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
    import tempfile

    spooled = tempfile.TemporaryFile()  # noqa: SIM115 - read later, and gone with its last user
    while block := file.read(BLOCK_BYTES):
        spooled.write(block)
    return spooled


def bytes_blocks(text: bytes, broken: Broken) -> Iterator[bytes]:
    """Iterate over a text in memory, without a byte-order mark. Raise what `broken` makes for what is no UTF-8."""
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
    """Iterate over a JSON text with long strings made short, and blocks of nothing but space left out.

    A string is never cut between two blocks. A long one that does not end is left out: the text breaks off before it.
    Raise what `broken` makes for a long string that is no JSON. `keeps_lines`: line ends in space are kept.
    """
    held = b""  # empty, or a string that has not ended, from its opening quote on
    is_long = False  # whether `held` goes on a long string, of which the beginning was checked
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
    """Return where the string begins that has not ended at the end of `text`; None if none."""
    plain = unescaped(text)
    return plain.rfind(b'"') if plain.count(b'"') % 2 else None


def unescaped(text: bytes) -> bytes:
    """Return the text with something else of the same length for escaped quotes, from a place where none is escaped."""
    return text.replace(b"\\\\", b"__").replace(b'\\"', b"__") if b"\\" in text else text


def _check_string(body: bytes, broken: Broken, *, is_whole: bool = False) -> bytes:
    """Check a part of a string, up to where it can be cut, and return the rest: a part of an escape, or nothing."""
    reason = ""  # its words: an error kept here would keep this frame, and `body`, until garbage is collected
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

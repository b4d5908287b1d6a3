"""Reads a journal back, whole, for what is told and counted from it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvarts.content import Content, pack_units
from kvarts.errors import ConfigError, InputError, MissingFileError
from kvarts.journal import JOURNAL_VERSION, AnyLine, ArrivedLine, FinishedLine, Head, RejectedLine

__all__ = ["Journal", "load_journal"]


class Journal:
    """A journal in memory. `contents` and `names` are by request; a rejected request has no content."""

    def __init__(self, lines: list[AnyLine], *, page_size: int, num_pages: int) -> None:
        self.lines = lines
        self.page_size = page_size
        self.num_pages = num_pages
        self.names: dict[int, str] = {}
        self.contents: dict[int, Content] = {}
        self.arrivals: dict[int, ArrivedLine] = {}
        made = {line.request: line.units for line in lines if isinstance(line, FinishedLine) and line.units}
        for line in lines:
            if isinstance(line, ArrivedLine | RejectedLine):
                self.names[line.request] = line.request_id
            if isinstance(line, ArrivedLine):
                self.arrivals[line.request] = line
                units = made.get(line.request, [])
                self.contents[line.request] = Content(
                    pack_units([*line.units, *units]),
                    num_tokens=line.num_known_tokens + len(units),
                    page_size=page_size,
                    unit_tokens=line.unit_tokens,
                    owner=line.request,
                    salt=line.tenant,
                )

    def request(self, name: str) -> int:
        """Return the request that goes by `name`. Raise InputError if there is none."""
        for index, known in self.names.items():
            if known == name:
                return index
        raise InputError(f"no request {name!r} in this journal", hint="Requests go by their ids in requests.jsonl.")


def load_journal(path: Path | str) -> Journal:
    """Read a journal, packed or not; one that breaks off, up to there. Raise MissingFileError and InputError."""
    path = Path(path)
    decoder = msgspec.json.Decoder(AnyLine)
    head = None
    lines: list[AnyLine] = []
    known: set[int] = set()
    try:
        for number, text in enumerate(_text_lines(path), 1):
            try:
                if head is None:
                    head = msgspec.json.decode(text, type=Head)
                    if head.kvarts_journal != JOURNAL_VERSION or head.block_size_tokens < 1:
                        raise InputError(f"is a journal of version {head.kvarts_journal}", path=path)
                    continue
                line = decoder.decode(text)
                if line.n != len(lines):
                    raise InputError(
                        f"event {line.n} follows event {len(lines) - 1}: some are lost", path=path, line=number
                    )
                if not isinstance(line, ArrivedLine | RejectedLine) and line.request not in known:
                    raise InputError(f"speaks of request {line.request}, which never arrived", path=path, line=number)
                if isinstance(line, ArrivedLine):
                    known.add(line.request)
                    if min(line.unit_tokens, line.prompt_tokens) < 1 or not 0 <= line.num_known_tokens <= (
                        len(line.units) * line.unit_tokens
                    ):
                        raise InputError("has fewer tokens than it says", path=path, line=number, field="units")
                lines.append(line)
            except (msgspec.DecodeError, ConfigError) as error:
                raise InputError(f"is no event of a journal: {error}", path=path, line=number) from error
    except FileNotFoundError:
        raise MissingFileError("no such file", path=path, hint="Write one with `kvarts replay --events`.") from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", path=path) from error
    if head is None:
        raise InputError("is empty", path=path, hint="Write a journal with `kvarts replay --events`.")
    return Journal(lines, page_size=head.block_size_tokens, num_pages=head.total_blocks)


def _text_lines(path: Path) -> Iterator[bytes]:
    """Iterate over complete lines."""
    unpacker = None
    rest = b""
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            if unpacker is None and block[:2] == b"\x1f\x8b" and not rest:
                unpacker = zlib.decompressobj(31)
            if unpacker is not None:
                try:
                    block = unpacker.decompress(block)
                except zlib.error as error:
                    raise InputError(f"is no readable gzip: {error}", path=path) from error
            *whole, rest = (rest + block).split(b"\n")
            yield from whole

"""Reads a whole journal back into memory, for stories and ledgers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from kvarts.base.decoders import UNDECODED
from kvarts.base.errors import ConfigError, InputError, MissingFileError, problem_of
from kvarts.base.terminal import in_line
from kvarts.core.content import Content, pack_units
from kvarts.proof.journal import (
    JOURNAL_VERSION,
    AdmittedLine,
    AnyLine,
    ArrivedLine,
    CancelledLine,
    ComputedLine,
    DraftedLine,
    FinishedLine,
    GivenBackLine,
    Head,
    JournalGroup,
    LoadingLine,
    RejectedLine,
    ReleasedLine,
    RemovedBelowLine,
    RemovedLine,
    StoredBelowLine,
    StoredLine,
    StoreFailedLine,
    StoringLine,
)

__all__ = ["Journal", "load_journal"]

LARGEST_LINE_BYTES = 1 << 28
BLOCK_BYTES = 1 << 16
RunLine = StoredLine | RemovedLine | GivenBackLine | StoringLine | StoreFailedLine | StoredBelowLine | RemovedBelowLine
"""Lines about pages [start_page, end_page) of a request."""


class Journal:
    """A journal in memory. `contents` and `names` are by request; rejected requests have only a name.

    `groups`: the KV groups, empty for whole pages; with groups, memory (including `num_pages`) is counted in blocks.
    `note`: a text about missing events at the end; None if every request has ended.
    """

    def __init__(
        self,
        lines: list[AnyLine],
        *,
        page_size: int,
        num_pages: int,
        is_torn: bool = False,
        groups: Sequence[JournalGroup] = (),
    ) -> None:
        self.lines = lines
        self.groups = tuple(groups)
        self.note = _note(lines, is_torn=is_torn)
        self.page_size = page_size
        self.num_pages = num_pages
        self.names: dict[int, str] = {}
        self.contents: dict[int, Content] = {}
        self.arrivals: dict[int, ArrivedLine] = {}
        made = {line.request: line.units for line in lines if isinstance(line, FinishedLine) and line.units}
        for line in lines:
            if isinstance(line, ArrivedLine | RejectedLine):
                self.names[line.request] = in_line(line.request_id)
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

    def name_of_group(self, group: int) -> str:
        """Return the name of a KV group: its retention, with its number if other groups have the same."""
        name = str(self.groups[group])
        is_only = sum(str(other) == name for other in self.groups) == 1
        return name if is_only else f"{name} (group {group})"

    @property
    def groups_of_pages(self) -> tuple[int | None, ...]:
        """The KV groups in which a computed page has a part: all but those of states; None for whole pages."""
        return tuple(index for index, group in enumerate(self.groups) if group.kind != "state") or (None,)

    def needed_by(self, num_pages: int, page: int) -> tuple[int | None, ...]:
        """Return the KV groups in which a request that resumes after `num_pages` pages needs `page`."""
        if not self.groups:
            return (None,)
        return tuple(
            index
            for index, group in enumerate(self.groups)
            if any(page in pages for pages in group.needed(num_pages, self.page_size))
        )

    def request(self, name: str) -> int:
        """Return the index of the request called `name`. Raise InputError if the journal lacks it."""
        for index, known in self.names.items():
            if known == in_line(name):
                return index
        raise InputError(f"no request {name!r} in this journal", hint="Requests go by their ids in requests.jsonl.")


MOST_UNIT_TOKENS = 1 << 16


def load_journal(path: Path | str, *, on_progress: Callable[[int], object] | None = None) -> Journal:
    """Read a journal, gzipped or not, up to where it breaks off. Raise MissingFileError and InputError.

    `on_progress` is called with the number of bytes read from the file since the last call.
    """
    path = Path(path)
    text = _Text(path, on_progress)
    reading = _Reading(path)
    try:
        for number, line in enumerate(text.lines(), 1):
            try:
                reading.read(line, number)
            except (*UNDECODED, ConfigError, OverflowError) as error:
                raise InputError(f"is no event of a journal: {problem_of(error)}", path=path, line=number) from error
    except FileNotFoundError:
        raise MissingFileError("no such file", path=path, hint="Write one with `kvarts replay --events`.") from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", path=path) from error
    if reading.head is None:
        raise InputError("is empty", path=path, hint="Write a journal with `kvarts replay --events`.")
    head = reading.head
    try:
        return Journal(
            reading.lines,
            page_size=head.block_size_tokens,
            num_pages=head.total_blocks,
            is_torn=text.is_torn,
            groups=head.kv_groups,
        )
    except (ConfigError, OverflowError) as error:
        raise InputError(f"has units that are no tokens: {error}", path=path) from error


def _note(lines: list[AnyLine], *, is_torn: bool) -> str | None:
    """Return a text about missing events at the end of a journal; None if it is complete."""
    going: set[int] = set()
    for line in lines:
        if isinstance(line, ArrivedLine):
            going.add(line.request)
        elif isinstance(line, FinishedLine | CancelledLine | RejectedLine | ReleasedLine):
            going.discard(line.request)
    if not going and not is_torn:
        return None
    where = f"after step {lines[-1].step}" if lines else "before its first event"
    return f"the journal breaks off {where}: {len(going):,} requests had not ended, and what came later is not told"


class _Reading:
    """Collects the lines of a journal, and checks that their order is possible."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._decoder = msgspec.json.Decoder(AnyLine)
        self.head: Head | None = None
        self.lines: list[AnyLine] = []
        self._num_tokens: dict[int, tuple[int, int]] = {}
        """Known tokens, and the most tokens possible, of each request that arrived."""
        self._admitted: set[int] = set()
        self._with_front: set[int] = set()
        """Requests that may compute before they are admitted, while pages are loaded for them."""

    def read(self, text: bytes, number: int) -> None:
        if self.head is None:
            self.head = msgspec.json.decode(text, type=Head)
            if self.head.kvarts_journal != JOURNAL_VERSION:
                raise InputError(f"is a journal of version {self.head.kvarts_journal}", path=self._path)
            if self.head.block_size_tokens < 1:
                raise InputError("must be at least 1", path=self._path, line=1, field="block_size_tokens")
            if any(group.tokens == 0 for group in self.head.kv_groups):
                raise InputError("must be at least 1", path=self._path, line=1, field="kv_groups.tokens")
            return
        line = self._decoder.decode(text)
        what = self._wrong_with(line)
        if what is not None:
            raise InputError(what, path=self._path, line=number)
        self.lines.append(line)

    def _wrong_with(self, line: AnyLine) -> str | None:
        if line.n != len(self.lines):
            return f"event {line.n} follows event {len(self.lines) - 1}: some are lost"
        if isinstance(line, RejectedLine):
            return None
        if isinstance(line, ArrivedLine):
            self._num_tokens[line.request] = line.num_known_tokens, line.prompt_tokens + line.output_tokens
            num_covered = len(line.units) * line.unit_tokens
            if min(line.unit_tokens, line.prompt_tokens) < 1 or line.num_known_tokens > num_covered:
                return "units: has fewer tokens than it says"
            return None if line.unit_tokens <= MOST_UNIT_TOKENS else "unit_tokens: is too large"
        if line.request not in self._num_tokens:
            return f"speaks of request {line.request}, which never arrived"
        return self._wrong_pages(line)

    def _wrong_pages(self, line: AnyLine) -> str | None:
        assert self.head is not None
        known, most = self._num_tokens[line.request]
        most_pages = max(known, most) // self.head.block_size_tokens + 1
        if isinstance(line, AdmittedLine):
            self._admitted.add(line.request)
            if max(line.hit_pages, *line.loaded_pages.values(), *line.reach, 0) > most_pages:
                return f"hit_pages: request {line.request} has {most_pages} pages at most"
            if line.reach and len(line.reach) != len(self.head.kv_groups):
                return f"reach: is of {len(line.reach)} KV groups, and there are {len(self.head.kv_groups)}"
        elif isinstance(line, LoadingLine):
            if line.front_pages:
                self._with_front.add(line.request)
        elif isinstance(line, ComputedLine):
            if line.request not in self._admitted and line.request not in self._with_front:
                return f"computes for request {line.request}, which was never admitted"
            if not line.start <= line.end <= line.known:
                return "computes tokens that are not there"
        elif isinstance(line, DraftedLine):
            if line.request not in self._admitted:
                return f"drafts for request {line.request}, which was never admitted"
            if line.accepted > line.drafted:
                return "accepts more tokens than were drafted"
        elif isinstance(line, RunLine) and not line.start_page < line.end_page <= most_pages:
            return f"pages {line.start_page} to {line.end_page} are not there: it has {most_pages} at most"
        return self._wrong_group(line)

    def _wrong_group(self, line: AnyLine) -> str | None:
        """Return the error in the KV group of a line about parts of pages."""
        assert self.head is not None
        if not isinstance(line, RunLine):
            return None
        num_groups = len(self.head.kv_groups)
        if (line.group is None) != (not num_groups) or (line.group is not None and line.group >= num_groups):
            return f"group: is {line.group}, and there are {num_groups} KV groups"
        return None


class _Text:
    """The lines of a file. `is_torn`: whether the last line, or the compressed data, breaks off."""

    def __init__(self, path: Path, on_progress: Callable[[int], object] | None) -> None:
        self._path = path
        self._on_progress = on_progress
        self.is_torn = False

    def lines(self) -> Iterator[bytes]:
        """Iterate over complete lines."""
        unpacker = None
        rest = b""
        with self._path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                if self._on_progress is not None:
                    self._on_progress(len(block))
                if unpacker is None and block[:2] == b"\x1f\x8b" and not rest:
                    unpacker = zlib.decompressobj(31)
                if unpacker is not None:
                    try:
                        block = unpacker.decompress(block)
                    except zlib.error as error:
                        raise InputError(f"is no readable gzip: {error}", path=self._path) from error
                first, *others = block.split(b"\n")
                if not others:
                    rest += first
                    if len(rest) > LARGEST_LINE_BYTES:
                        raise InputError(f"has a line of more than {LARGEST_LINE_BYTES} bytes", path=self._path)
                    continue
                yield rest + first
                rest = others.pop()
                yield from others
        self.is_torn = bool(rest) or (unpacker is not None and not unpacker.eof)

"""The journal of one engine: every event as a line of JSON, numbered without gaps, so that any of it can be explained.

Page events stay runs: pages [start_page, end_page) of a request's sequence. The line of an arrival carries the sequence
itself, so a page can be named, compared and hashed from the journal alone.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from kvarts.content import Content, pack_units
from kvarts.errors import ConfigError, InputError, MissingFileError
from kvarts.events import (
    Admitted,
    Arrived,
    Blocked,
    Cancelled,
    ChunkComputed,
    CopiesRemoved,
    Event,
    Finished,
    HeadBlocked,
    LoadStarted,
    PagesRemoved,
    PagesStored,
    Preemption,
    Rejected,
    StepEnded,
    StepStarted,
    StoreStarted,
    TransferEnded,
)

__all__ = [
    "AdmittedLine",
    "ArrivedLine",
    "BlockedLine",
    "CancelledLine",
    "ComputedLine",
    "FinishedLine",
    "Journal",
    "JournalWriter",
    "Line",
    "LoadedLine",
    "LoadingLine",
    "PreemptedLine",
    "RejectedLine",
    "RemovedBelowLine",
    "RemovedLine",
    "StoreFailedLine",
    "StoredBelowLine",
    "StoredLine",
    "StoringLine",
    "load_journal",
]

JOURNAL_VERSION = 1
NS_PER_MS = 1e6
REASONS = {Blocked.BUDGET: "token_budget", Blocked.PAGES: "pages", Blocked.SEQS: "sequence_cap"}


class Line(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="event", omit_defaults=True):
    """Every line: its number, the step it belongs to (-1 before the first), when it happened, and whom it is about."""

    n: int
    step: int
    t_ms: float
    request: int


class ArrivedLine(Line, tag="arrived", frozen=True, kw_only=True, gc=False):
    """`units` stand for `unit_tokens` equal tokens each; `num_known_tokens` of them are known beforehand."""

    request_id: str
    prompt_tokens: int
    output_tokens: int
    num_ahead: int
    unit_tokens: int
    num_known_tokens: int
    units: list[int]
    priority: int = 0
    tenant: str | None = None


class RejectedLine(Line, tag="rejected", frozen=True, kw_only=True, gc=False):
    """It could never run."""

    request_id: str
    reason: str


class BlockedLine(Line, tag="blocked", frozen=True, kw_only=True, gc=False):
    """From now on it is the head of the queue that is not admitted; `reason` is one of REASONS."""

    reason: str
    pages_short: int = 0


class AdmittedLine(Line, tag="admitted", frozen=True, kw_only=True, gc=False):
    """It began to run. `loaded_pages`: those of its hit pages, the last ones, that each tier below the device had."""

    hit_pages: int
    loaded_pages: dict[str, int] = {}


class ComputedLine(Line, tag="computed", frozen=True, kw_only=True, gc=False):
    """Tokens [start, end) of `known` were computed."""

    start: int
    end: int
    known: int


class PreemptedLine(Line, tag="preempted", frozen=True, kw_only=True, gc=False):
    """It lost its pages to `asker`."""

    asker: int
    pages_asked: int
    pages_short: int
    used_pages: int
    lost_tokens: int


class FinishedLine(Line, tag="finished", frozen=True, kw_only=True, gc=False):
    """It made its last token. `units`: those generated, where they were not known when it arrived."""

    units: list[int] = []


class CancelledLine(Line, tag="cancelled", frozen=True, kw_only=True, gc=False):
    """It was dropped."""


class StoredLine(Line, tag="stored", frozen=True, kw_only=True, gc=False):
    """Pages of its sequence can be found from now on."""

    start_page: int
    end_page: int


class StoringLine(Line, tag="storing", frozen=True, kw_only=True, gc=False):
    """Pages of its sequence are on their way to a tier below, with transfer `transfer`."""

    transfer: int
    tier: str
    start_page: int
    end_page: int


class StoreFailedLine(Line, tag="store_failed", frozen=True, kw_only=True, gc=False):
    """Pages of its sequence did not arrive in the tier below."""

    transfer: int
    tier: str
    start_page: int
    end_page: int


class StoredBelowLine(Line, tag="stored_below", frozen=True, kw_only=True, gc=False):
    """Pages of its sequence can be found in a tier below from now on."""

    tier: str
    start_page: int
    end_page: int


class RemovedBelowLine(Line, tag="removed_below", frozen=True, kw_only=True, gc=False):
    """Pages of its sequence left a tier below."""

    tier: str
    start_page: int
    end_page: int


class LoadingLine(Line, tag="loading", frozen=True, kw_only=True, gc=False):
    """Pages it has in tiers below, after `hit_pages` on the device, are on their way, with transfer `transfer`."""

    transfer: int
    hit_pages: int
    pages: dict[str, int]


class LoadedLine(Line, tag="loaded", frozen=True, kw_only=True, gc=False):
    """Its load ended, and `good_pages` pages arrived."""

    transfer: int
    good_pages: int


class RemovedLine(Line, tag="removed", frozen=True, kw_only=True, gc=False):
    """Pages of its sequence were evicted, the last first. `is_copy`: another copy can still be found."""

    start_page: int
    end_page: int
    is_copy: bool = False


AnyLine = (
    ArrivedLine
    | RejectedLine
    | BlockedLine
    | AdmittedLine
    | ComputedLine
    | PreemptedLine
    | FinishedLine
    | CancelledLine
    | StoredLine
    | RemovedLine
    | StoringLine
    | StoreFailedLine
    | StoredBelowLine
    | RemovedBelowLine
    | LoadingLine
    | LoadedLine
)


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    kvarts_journal: int
    block_size_tokens: int
    total_blocks: int


class JournalWriter:
    """An Observer that writes lines to `file`, which stays the caller's. `is_packed`: with gzip; then `close` it.

    `is_live`: every batch of events is flushed, so that a killed run leaves what happened.
    """

    def __init__(
        self,
        file: IO[bytes],
        *,
        total_blocks: int,
        block_size_tokens: int,
        is_packed: bool = False,
        is_live: bool = False,
    ) -> None:
        self._file = file
        # As gzip writes it, but without a time: the same run gives the same bytes.
        self._packer = zlib.compressobj(6, zlib.DEFLATED, 31) if is_packed else None
        self._is_live = is_live
        self._encoder = msgspec.json.Encoder()
        self._num_lines = 0
        self._step = -1
        self._time_ns = 0
        self._num_units: dict[int, int] = {}
        self._storing: dict[int, StoreStarted] = {}
        head = _Head(kvarts_journal=JOURNAL_VERSION, block_size_tokens=block_size_tokens, total_blocks=total_blocks)
        self._write(self._encoder.encode(head) + b"\n")

    def observe(self, events: Sequence[Event]) -> None:
        """Write a line for each of `events` that a journal has."""
        lines = []
        for event in events:
            for line in self._lines(event):
                lines.append(line)
                self._num_lines += 1
        if lines:
            self._write(self._encoder.encode_lines(lines))

    def close(self) -> None:
        """Ends what is packed. The file stays open."""
        if self._packer is not None:
            self._file.write(self._packer.flush(zlib.Z_FINISH))
            self._packer = None

    def _write(self, text: bytes) -> None:
        if self._packer is not None:
            text = self._packer.compress(text)
            if self._is_live:
                text += self._packer.flush(zlib.Z_SYNC_FLUSH)
        self._file.write(text)
        if self._is_live:
            self._file.flush()

    def _lines(self, event: Event) -> Iterator[Line]:
        """Most events are one line; a store is one for each of its runs."""
        if isinstance(event, StoreStarted):
            self._storing[event.transfer] = event
            yield from self._runs(event, StoringLine)
        elif isinstance(event, TransferEnded) and event.request < 0:
            self._time_ns = event.time_ns
            started = self._storing.pop(event.transfer)
            if not event.num_good_pages:
                yield from self._runs(started, StoreFailedLine)
        else:
            line = self._line(event)
            if line is not None:
                yield line

    def _runs(self, event: StoreStarted, kind: type[StoringLine | StoreFailedLine]) -> Iterator[Line]:
        for content, start, end in event.runs:
            yield kind(
                n=self._num_lines,
                step=self._step,
                t_ms=self._time_ns / NS_PER_MS,
                request=content.owner,
                transfer=event.transfer,
                tier=event.medium,
                start_page=start,
                end_page=end,
            )

    def _line(self, event: Event) -> Line | None:
        make = _MAKERS.get(type(event))
        if make is not None:
            return make(self, event, {"n": self._num_lines, "step": self._step, "t_ms": self._time_ns / NS_PER_MS})
        if isinstance(event, StepStarted):
            self._step, self._time_ns = event.step, event.start_ns
        elif isinstance(event, StepEnded):
            self._step, self._time_ns = event.step, event.end_ns
        return None

    def _arrived(self, event: Arrived, place: dict[str, Any]) -> Line:
        content = event.content
        self._num_units[event.request] = len(content.units)
        place["t_ms"] = event.time_ns / NS_PER_MS
        return ArrivedLine(
            **place,
            request=event.request,
            request_id=event.request_id if event.request_id is not None else str(event.request),
            prompt_tokens=event.num_prompt_tokens,
            output_tokens=event.max_tokens,
            num_ahead=event.num_ahead,
            unit_tokens=content.unit_tokens,
            num_known_tokens=content.num_known_tokens,
            units=array("Q", bytes(content.units)).tolist(),
            priority=event.priority,
            tenant=content.salt,
        )

    def _rejected(self, event: Rejected, place: dict[str, Any]) -> Line:
        place["t_ms"] = event.time_ns / NS_PER_MS
        request_id = event.request_id if event.request_id is not None else str(event.request)
        return RejectedLine(**place, request=event.request, request_id=request_id, reason=event.reason)

    def _finished(self, event: Finished, place: dict[str, Any]) -> Line:
        num_units = self._num_units.pop(event.request, len(event.content.units))
        made = array("Q", bytes(event.content.units[num_units:])).tolist()
        return FinishedLine(**place, request=event.request, units=made)

    def _loaded(self, event: TransferEnded, place: dict[str, Any]) -> Line:
        self._time_ns = event.time_ns
        place["t_ms"] = event.time_ns / NS_PER_MS
        return LoadedLine(**place, request=event.request, transfer=event.transfer, good_pages=event.num_good_pages)

    def _cancelled(self, event: Cancelled, place: dict[str, Any]) -> Line:
        place["t_ms"] = event.time_ns / NS_PER_MS
        return CancelledLine(**place, request=event.request)


def _preempted(_: JournalWriter, event: Preemption, place: dict[str, Any]) -> Line:
    return PreemptedLine(
        **place,
        request=event.victim,
        asker=event.asker,
        pages_asked=event.num_pages_asked,
        pages_short=event.num_pages_short,
        used_pages=event.num_used_pages,
        lost_tokens=event.num_computed_tokens,
    )


def _blocked(_: JournalWriter, event: HeadBlocked, place: dict[str, Any]) -> Line:
    reason = REASONS[Blocked(event.reason)]
    return BlockedLine(**place, request=event.request, reason=reason, pages_short=event.num_pages_short)


def _computed(_: JournalWriter, event: ChunkComputed, place: dict[str, Any]) -> Line:
    return ComputedLine(**place, request=event.request, start=event.start, end=event.end, known=event.num_known_tokens)


def _admitted(_: JournalWriter, event: Admitted, place: dict[str, Any]) -> Line:
    loaded = {name: count for name, count in event.by_tier or () if count}
    return AdmittedLine(**place, request=event.request, hit_pages=event.num_hit_pages, loaded_pages=loaded)


def _stored(_: JournalWriter, event: PagesStored, place: dict[str, Any]) -> Line:
    place.update(request=event.content.owner, start_page=event.start_page, end_page=event.end_page)
    return StoredLine(**place) if event.medium == "device" else StoredBelowLine(**place, tier=event.medium)


def _loading(_: JournalWriter, event: LoadStarted, place: dict[str, Any]) -> Line:
    return LoadingLine(
        **place,
        request=event.request,
        transfer=event.transfer,
        hit_pages=event.num_hit_pages,
        pages=dict(event.by_tier),
    )


def _removed(_: JournalWriter, event: PagesRemoved | CopiesRemoved, place: dict[str, Any]) -> Line:
    if isinstance(event, PagesRemoved) and event.medium != "device":
        return RemovedBelowLine(
            **place,
            request=event.content.owner,
            tier=event.medium,
            start_page=event.start_page,
            end_page=event.end_page,
        )
    return RemovedLine(
        **place,
        request=event.content.owner,
        start_page=event.start_page,
        end_page=event.end_page,
        is_copy=isinstance(event, CopiesRemoved),
    )


_MAKERS: dict[type, Callable[[JournalWriter, Any, dict[str, Any]], Line]] = {
    Arrived: JournalWriter._arrived,
    Rejected: JournalWriter._rejected,
    HeadBlocked: _blocked,
    Admitted: _admitted,
    LoadStarted: _loading,
    TransferEnded: JournalWriter._loaded,
    ChunkComputed: _computed,
    Preemption: _preempted,
    Finished: JournalWriter._finished,
    Cancelled: JournalWriter._cancelled,
    PagesStored: _stored,
    PagesRemoved: _removed,
    CopiesRemoved: _removed,
}


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
        """The request that goes by `name`. Raises InputError."""
        for index, known in self.names.items():
            if known == name:
                return index
        raise InputError(f"no request {name!r} in this journal", hint="Requests go by their ids in requests.jsonl.")


def load_journal(path: Path | str) -> Journal:
    """Reads a journal, packed or not; one that breaks off, up to there. Raises MissingFileError and InputError."""
    path = Path(path)
    decoder = msgspec.json.Decoder(AnyLine)
    head = None
    lines: list[AnyLine] = []
    known: set[int] = set()
    try:
        for number, text in enumerate(_text_lines(path), 1):
            try:
                if head is None:
                    head = msgspec.json.decode(text, type=_Head)
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
    """Complete lines."""
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

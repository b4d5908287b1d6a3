"""Writes the journal of one engine, event by event."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import IO, Any

import msgspec

from kvarts.core.events import (
    Admitted,
    Arrived,
    Blocked,
    Cancelled,
    ChunkComputed,
    CopiesRemoved,
    DraftJudged,
    Event,
    Finished,
    HeadBlocked,
    LoadGivenUp,
    LoadStarted,
    PagesRemoved,
    PagesStored,
    PartsGivenBack,
    Preemption,
    PromptHeld,
    PromptReleased,
    Rejected,
    StepEnded,
    StepStarted,
    StoreStarted,
    TransferEnded,
)
from kvarts.proof.journal import (
    JOURNAL_VERSION,
    REASONS,
    AdmittedLine,
    ArrivedLine,
    BlockedLine,
    CancelledLine,
    ComputedLine,
    DraftedLine,
    FinishedLine,
    GivenBackLine,
    Head,
    HeldLine,
    JournalGroup,
    Line,
    LoadedLine,
    LoadingLine,
    LoadLostLine,
    PreemptedLine,
    RejectedLine,
    ReleasedLine,
    RemovedBelowLine,
    RemovedLine,
    StoredBelowLine,
    StoredLine,
    StoreFailedLine,
    StoringLine,
)

__all__ = ["JournalWriter"]

NS_PER_MS = 1e6


class JournalWriter:
    """An EventReader that writes lines to `file`, which remains the caller's.

    `is_packed`: compress with gzip; then `close` is required. `is_live`: flush every batch of events, so that a killed
    run leaves all events up to then. `memory`: description of a memory with KV groups; `total_blocks` then counts its
    blocks.
    """

    def __init__(
        self,
        file: IO[bytes],
        *,
        total_blocks: int,
        block_size_tokens: int,
        is_packed: bool = False,
        is_live: bool = False,
        memory: Mapping[str, Any] | None = None,
    ) -> None:
        self._file = file
        # As gzip writes it, but without a timestamp: the same run gives the same bytes.
        self._packer = zlib.compressobj(6, zlib.DEFLATED, 31) if is_packed else None
        self._is_live = is_live
        self._encoder = msgspec.json.Encoder()
        self._num_lines = 0
        self._step = -1
        self._time_ns = 0
        self._num_units: dict[int, int] = {}
        self._storing: dict[int, StoreStarted] = {}
        memory = memory or {}
        head = Head(
            kvarts_journal=JOURNAL_VERSION,
            block_size_tokens=block_size_tokens,
            total_blocks=total_blocks,
            kv_groups=msgspec.convert(memory.get("kv_groups", []), list[JournalGroup]),
            block_bytes=memory.get("block_bytes", 0),
        )
        self._write(self._encoder.encode(head) + b"\n")

    def observe(self, events: Sequence[Event]) -> None:
        """Write a line for each of `events` that belongs in a journal."""
        lines: list[Line] = []
        t_ms = self._time_ns / NS_PER_MS
        for event in events:
            of_pages = _PAGE_MAKERS.get(type(event))
            if of_pages is not None:  # by far the most
                lines.append(of_pages(event, self._num_lines, self._step, t_ms))
                self._num_lines += 1
                continue
            if isinstance(event, (StoreStarted, TransferEnded)):
                for each in self._lines(event):
                    lines.append(each)
                    self._num_lines += 1
            elif (line := self._line(event)) is not None:
                lines.append(line)
                self._num_lines += 1
            t_ms = self._time_ns / NS_PER_MS
        if lines:
            self._write(self._encoder.encode_lines(lines))

    def close(self) -> None:
        """Finish the compressed data. The file stays open."""
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

    def _lines(self, event: StoreStarted | TransferEnded) -> Iterator[Line]:
        """Return the lines of an event: one per run for a store, and for a load one."""
        if isinstance(event, StoreStarted):
            self._storing[event.transfer] = event
            yield from self._runs(event, StoringLine)
        elif event.request < 0:
            self._time_ns = event.time_ns
            started = self._storing.pop(event.transfer)
            if not event.num_good_pages:
                yield from self._runs(started, StoreFailedLine)
        else:
            line = self._line(event)
            if line is not None:
                yield line

    def _runs(self, event: StoreStarted, kind: type[StoringLine | StoreFailedLine]) -> Iterator[Line]:
        for (content, start, end), group in zip(event.runs, event.groups or repeat(None), strict=False):
            yield kind(
                n=self._num_lines,
                step=self._step,
                t_ms=self._time_ns / NS_PER_MS,
                request=content.owner,
                transfer=event.transfer,
                tier=event.medium,
                start_page=start,
                end_page=end,
                group=group,
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


def _load_lost(_: JournalWriter, event: LoadGivenUp, place: dict[str, Any]) -> Line:
    return LoadLostLine(**place, request=event.request)


def _held(_: JournalWriter, event: PromptHeld, place: dict[str, Any]) -> Line:
    return HeldLine(**place, request=event.request)


def _released(_: JournalWriter, event: PromptReleased, place: dict[str, Any]) -> Line:
    place["t_ms"] = event.time_ns / NS_PER_MS
    return ReleasedLine(**place, request=event.request)


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


def _drafted(_: JournalWriter, event: DraftJudged, place: dict[str, Any]) -> Line:
    return DraftedLine(**place, request=event.request, drafted=event.num_drafted, accepted=event.num_accepted)


def _admitted(_: JournalWriter, event: Admitted, place: dict[str, Any]) -> Line:
    loaded = {name: count for name, count in event.by_tier or () if count}
    hit_pages, reach = event.num_hit_pages, list(event.reach)
    return AdmittedLine(**place, request=event.request, hit_pages=hit_pages, loaded_pages=loaded, reach=reach)


def _loading(_: JournalWriter, event: LoadStarted, place: dict[str, Any]) -> Line:
    if event.time_ns >= 0:
        place["t_ms"] = event.time_ns / NS_PER_MS
    return LoadingLine(
        **place,
        request=event.request,
        transfer=event.transfer,
        hit_pages=event.num_hit_pages,
        pages=dict(event.by_tier),
        front_pages=event.num_front_pages,
    )


# Events of pages are by far the most: no dictionary is built for them.


def _stored(event: PagesStored, n: int, step: int, t_ms: float) -> Line:
    owner, start, end, group = event.content.owner, event.start_page, event.end_page, event.group
    if event.medium == "device":
        return StoredLine(n=n, step=step, t_ms=t_ms, request=owner, start_page=start, end_page=end, group=group)
    return StoredBelowLine(
        n=n, step=step, t_ms=t_ms, request=owner, tier=event.medium, start_page=start, end_page=end, group=group
    )


def _given_back(event: PartsGivenBack, n: int, step: int, t_ms: float) -> Line:
    return GivenBackLine(
        n=n,
        step=step,
        t_ms=t_ms,
        request=event.content.owner,
        start_page=event.start_page,
        end_page=event.end_page,
        group=event.group,
    )


def _removed(event: PagesRemoved, n: int, step: int, t_ms: float) -> Line:
    if event.medium == "device":
        return _gone(event, n, step, t_ms, is_copy=False)
    owner, start, end, group = event.content.owner, event.start_page, event.end_page, event.group
    return RemovedBelowLine(
        n=n, step=step, t_ms=t_ms, request=owner, tier=event.medium, start_page=start, end_page=end, group=group
    )


def _copies_removed(event: CopiesRemoved, n: int, step: int, t_ms: float) -> Line:
    return _gone(event, n, step, t_ms, is_copy=True)


def _gone(event: PagesRemoved | CopiesRemoved, n: int, step: int, t_ms: float, *, is_copy: bool) -> Line:
    return RemovedLine(
        n=n,
        step=step,
        t_ms=t_ms,
        request=event.content.owner,
        start_page=event.start_page,
        end_page=event.end_page,
        is_copy=is_copy,
        group=event.group,
        is_dropped=event.is_dropped,
    )


_MAKERS: dict[type, Callable[[JournalWriter, Any, dict[str, Any]], Line]] = {
    Arrived: JournalWriter._arrived,
    Rejected: JournalWriter._rejected,
    HeadBlocked: _blocked,
    Admitted: _admitted,
    LoadStarted: _loading,
    LoadGivenUp: _load_lost,
    TransferEnded: JournalWriter._loaded,
    ChunkComputed: _computed,
    DraftJudged: _drafted,
    Preemption: _preempted,
    Finished: JournalWriter._finished,
    Cancelled: JournalWriter._cancelled,
    PromptHeld: _held,
    PromptReleased: _released,
}
_PAGE_MAKERS: dict[type, Callable[[Any, int, int, float], Line]] = {
    PagesStored: _stored,
    PagesRemoved: _removed,
    CopiesRemoved: _copies_removed,
    PartsGivenBack: _given_back,
}

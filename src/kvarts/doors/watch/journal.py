"""Writes the KV events of a watched engine as a kvarts journal, for `kvarts story` and other readers, and a timeline.

An event names blocks, a journal pages of requests. Blocks that continue a request's last page belong to that request;
any others become a new request, which arrives with all its tokens from the first on.

A KV timeline has one row per sample of the engine's metrics, which contain facts that events lack.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from kvarts.doors.watch.decoding import BlockHash, Stored
from kvarts.doors.watch.metrics import EngineSample
from kvarts.proof.journal import (
    JOURNAL_VERSION,
    ArrivedLine,
    FinishedLine,
    Head,
    Line,
    RemovedBelowLine,
    RemovedLine,
    StoredBelowLine,
    StoredLine,
)

__all__ = ["JOURNAL_MEDIA", "StreamJournal", "WatchedTimeline"]

JOURNAL_MEDIA = {"GPU": "device", "CPU": "host", "CPU_PINNED": "host", "STORAGE": "disk", "DISK": "disk"}
"""Names of the tiers in a journal; other media keep their names, in lower case."""

MS = 1000.0
MAX_TOKENS = 1 << 23
"""Limit of the tokens of all known runs, 8 bytes each."""


class _Run(msgspec.Struct, eq=False):
    """A request of the journal. `token_ids` from its first page on; it arrived with the first `num_arrived` of them.

    `last`: the block of its last page, while it can grow. `num_copies`: copies of its pages, in all media.
    """

    number: int
    token_ids: array[int]
    num_arrived: int
    last: BlockHash | None = None
    num_copies: int = 0


class _Place(msgspec.Struct):
    """A page of a run, and the number of media that hold it."""

    run: _Run
    page: int
    num_copies: int = 0


class StreamJournal:
    """Writes lines with `write`; `close` writes the last. It only tracks the stored blocks.

    `total_blocks`: blocks of the device; 0 if unknown.
    """

    def __init__(self, write: Callable[[bytes], object], *, total_blocks: int) -> None:
        self._write_bytes = write
        self._total_blocks = total_blocks
        self._encode = msgspec.json.Encoder().encode
        self._num_lines = 0
        self._num_runs = 0
        self._seq = -1
        self._start_s: float | None = None
        self._time_ms = 0.0
        self._where: dict[BlockHash, _Place] = {}
        self._num_tokens = 0
        """Sum of the tokens of all runs; a token shared by runs counts in each."""
        self._is_begun = False
        self.ended_at: int | None = None
        """First batch that is not in the journal because its runs would exceed MAX_TOKENS."""

    def begin_batch(self, seq: int, time_s: float) -> None:
        """Set the batch that the next lines belong to."""
        if self._start_s is None:
            self._start_s = time_s
        self._seq, self._time_ms = seq, max(0.0, (time_s - self._start_s) * MS)

    def store(self, event: Stored, new: Sequence[BlockHash]) -> None:
        """Write a line for the blocks of the event that are `new` in its medium."""
        if not new or event.block_size < 1 or self.ended_at is not None:
            return
        if not self._is_begun:
            self._begin(event.block_size)
        hashes, where, are_new = event.hashes, self._where, frozenset(new)
        at = 0
        while at < len(hashes):
            end = at + 1
            if hashes[at] in are_new:
                is_known = hashes[at] in where
                while end < len(hashes) and hashes[end] in are_new and (hashes[end] in where) == is_known:
                    end += 1
                if not is_known and not self._place(event, at, end):
                    return
                for run, start, stop in self._stretches(hashes[at:end], 1):
                    self._write_stored(run, _tier(event.medium), start, stop)
            at = end

    def remove(self, medium: str, gone: Sequence[BlockHash]) -> None:
        """Write that blocks left `medium`."""
        tier = _tier(medium)
        ended: dict[int, _Run] = {}
        for run, start, end in self._stretches(gone, -1):
            place: dict[str, Any] = {**self._place_of(run), "start_page": start, "end_page": end}
            self._write(RemovedLine(**place) if tier == "device" else RemovedBelowLine(**place, tier=tier))
            run.last = None  # blocks stored next become a new run
            if not run.num_copies:
                ended[run.number] = run
        for run in ended.values():
            self._finish(run)

    def forget(self) -> None:
        """Write the end of all runs: as far as known, nothing is stored in any medium."""
        runs = {place.run.number: place.run for place in self._where.values()}
        for run in runs.values():
            self._finish(run)
        self._where.clear()

    def close(self) -> None:
        """Write the tokens of runs that grew."""
        if not self._is_begun:
            self._begin(1)
        self.forget()

    def _begin(self, block_size: int) -> None:
        self._is_begun = True
        head = Head(kvarts_journal=JOURNAL_VERSION, block_size_tokens=block_size, total_blocks=self._total_blocks)
        self._write_bytes(self._encode(head) + b"\n")

    def _place(self, event: Stored, at: int, end: int) -> bool:
        """Assign pages of a run to blocks [at, end) of an event, all unknown. Return False beyond MAX_TOKENS."""
        size = event.block_size
        parent = event.parent if at == 0 else event.hashes[at - 1]
        token_ids = array("Q", event.token_ids[at * size : end * size])
        before = None if parent is None else self._where.get(parent)
        num_before = 0 if before is None or before.run.last == parent else (before.page + 1) * size
        if self._num_tokens + num_before + len(token_ids) > MAX_TOKENS:
            self.ended_at = self._seq
            return False
        self._num_tokens += num_before + len(token_ids)
        if before is not None and before.run.last == parent:
            run, first = before.run, before.page + 1
            run.token_ids += token_ids
        else:
            first = 0 if before is None else before.page + 1
            if before is not None:
                token_ids = before.run.token_ids[: first * size] + token_ids
            run = self._arrive(token_ids)
        for page, name in enumerate(event.hashes[at:end], first):
            self._where[name] = _Place(run, page)
        run.last = event.hashes[end - 1]
        return True

    def _arrive(self, token_ids: array[int]) -> _Run:
        run = _Run(self._num_runs, token_ids, len(token_ids))
        self._num_runs += 1
        place: dict[str, Any] = self._place_of(run)
        self._write(
            ArrivedLine(
                **place,
                request_id=f"stream-{run.number}",
                prompt_tokens=max(1, run.num_arrived),
                output_tokens=0,
                num_ahead=0,
                unit_tokens=1,
                num_known_tokens=run.num_arrived,
                units=token_ids.tolist(),
            )
        )
        return run

    def _stretches(self, names: Sequence[BlockHash], by: int) -> Iterator[tuple[_Run, int, int]]:
        """Return, in order, runs with pages [start, end) for blocks that gain a copy (`by` is 1) or lose one (-1)."""
        open_run: _Run | None = None
        first = last = 0
        for name in names:
            place = self._where.get(name)
            if place is None:
                continue
            place.num_copies += by
            place.run.num_copies += by
            if place.num_copies <= 0:
                del self._where[name]
            if open_run is place.run and place.page == last + by:
                last = place.page
                continue
            if open_run is not None:
                yield open_run, min(first, last), max(first, last) + 1
            open_run, first, last = place.run, place.page, place.page
        if open_run is not None:
            yield open_run, min(first, last), max(first, last) + 1

    def _write_stored(self, run: _Run, tier: str, start: int, end: int) -> None:
        place: dict[str, Any] = {**self._place_of(run), "start_page": start, "end_page": end}
        self._write(StoredLine(**place) if tier == "device" else StoredBelowLine(**place, tier=tier))

    def _finish(self, run: _Run) -> None:
        self._num_tokens -= len(run.token_ids)
        place: dict[str, Any] = self._place_of(run)
        self._write(FinishedLine(**place, units=run.token_ids[run.num_arrived :].tolist()))

    def _place_of(self, run: _Run) -> dict[str, Any]:
        return {"n": self._num_lines, "step": self._seq, "t_ms": self._time_ms, "request": run.number}

    def _write(self, line: Line) -> None:
        self._write_bytes(self._encode(line) + b"\n")
        self._num_lines += 1


def _tier(medium: str) -> str:
    return JOURNAL_MEDIA.get(medium, medium.lower())


class WatchedTimeline:
    """Writes rows with `write`, as JSON lines; `close` writes the totals.

    Rows are samples of a running engine: they may miss its peaks, and preemptions are those since the previous row. A
    sample without usage or requests gives no row, and neither does any if a size was not observed (None).
    """

    def __init__(self, write: Callable[[bytes], object], *, total_blocks: int | None, block_size: int | None) -> None:
        self._write_bytes = write
        self._total = total_blocks or 0
        self._encode = msgspec.json.Encoder().encode
        self._peak_pct = 0.0
        self._num_preempted_before: int | None = None
        self._num_preempted = 0
        self.num_rows = 0
        self._write({"version": 1, "block_size_tokens": block_size, "total_blocks": total_blocks, "every": 1})

    def add(self, time_s: float, sample: EngineSample) -> None:
        """Write a row for a sample taken at `time_s`, in seconds from the start of the watch."""
        if not self._total or sample.usage is None or sample.num_running is None:
            return
        used = min(self._total, max(0, round(sample.usage * self._total)))
        before, total = self._num_preempted_before, sample.num_preempted
        # A restarted engine counts from 0.
        preempted = 0 if before is None or total is None or total < before else total - before
        self._num_preempted_before = total
        self._num_preempted += preempted
        used_pct = used / self._total
        self._peak_pct = max(self._peak_pct, used_pct)
        row = {
            "step": self.num_rows,
            "t_ms": round(time_s * 1000.0, 3),
            "used_blocks": used,
            "free_blocks": self._total - used,
            "used_pct": used_pct,
            "active_seqs": sample.num_running,
            "preempted_seqs": preempted,
        }
        if sample.num_waiting is not None:
            row["waiting"] = sample.num_waiting
        self._write(row)
        self.num_rows += 1

    def close(self) -> None:
        """Write the totals."""
        self._write({"peak_used_pct": self._peak_pct, "preemption_count": self._num_preempted})

    def _write(self, line: object) -> None:
        self._write_bytes(self._encode(line) + b"\n")

"""State of a watched engine: claims, counts, the journal, and the hits that a larger cache would have.

A larger cache would have hit the blocks that are stored again after their eviction.

`Watch` receives batches from an engine's stream and reads its metrics until stopped.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Literal

import msgspec

from kvarts.doors.watch.claims import MAX_BLOCKS, BrokenClaim, ClaimResult, Claims
from kvarts.doors.watch.decoding import (
    BlockHash,
    Cleared,
    MalformedError,
    Removed,
    Stored,
    TooLongError,
    Unknown,
    decode_batch,
)
from kvarts.doors.watch.hits import GroupedBlocks, Hits
from kvarts.doors.watch.journal import StreamJournal, WatchedTimeline
from kvarts.doors.watch.metrics import EngineSample, Scraper
from kvarts.doors.watch.sockets import EngineStream, Followed, Follower

__all__ = ["Counts", "CurvePoint", "ReStores", "Watch", "WatchVerdict", "Watched"]

EXIT_CODES = {"ok": 0, "violated": 5, "inconclusive": 6}
MAX_REMEMBERED = 1 << 17
WAIT_S = 0.2


class CurvePoint(msgspec.Struct, frozen=True, gc=False):
    """With `extra_blocks` more, the cache would have kept `kept_blocks` of the blocks that were stored again."""

    extra_blocks: int
    kept_blocks: int


class ReStores:
    """Counts, for each block stored again, the evictions of other blocks since its own.

    Under an LRU order, a cache larger by about that number of blocks would have kept it. Only the last MAX_REMEMBERED
    evictions are remembered.
    """

    def __init__(self) -> None:
        self._evicted: OrderedDict[Hashable, int] = OrderedDict()
        self._num_evicted = 0
        self._by_distance: dict[int, int] = {}
        self.num_stored = 0
        self.num_again = 0

    def store(self, new: Sequence[Hashable]) -> None:
        """Record blocks that were stored on the device."""
        self.num_stored += len(new)
        for name in new:
            at = self._evicted.pop(name, None)
            if at is not None:
                self.num_again += 1
                # Powers of two are precise enough to decide how much more memory pays off.
                bucket = 1 << (self._num_evicted - at - 1).bit_length()
                self._by_distance[bucket] = self._by_distance.get(bucket, 0) + 1

    def evict(self, gone: Sequence[Hashable]) -> None:
        """Record blocks that were evicted from the device."""
        for name in gone:
            self._evicted[name] = self._num_evicted
            self._num_evicted += 1
        while len(self._evicted) > MAX_REMEMBERED:
            self._evicted.popitem(last=False)

    def forget(self) -> None:
        """Forget all evictions: the cache was cleared, which a larger one would not have prevented."""
        self._evicted.clear()

    def points(self) -> list[CurvePoint]:
        """Return the curve, in ascending order of extra blocks."""
        kept = 0
        points = []
        for extra_blocks in sorted(self._by_distance):
            kept += self._by_distance[extra_blocks]
            points.append(CurvePoint(extra_blocks, kept))
        return points


class Counts(msgspec.Struct):
    """Counts of the batches, events and blocks received so far."""

    num_batches: int = 0
    num_events: int = 0
    num_stored_blocks: int = 0
    num_removed_blocks: int = 0
    num_clears: int = 0
    num_unknown_events: int = 0


class WatchVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Verdict on a watched engine.

    `num_copies`: stores of stored blocks. `num_possible_copies`: more of these, which are copies or reports.
    """

    verdict: Literal["ok", "violated", "inconclusive"]
    why: str | None
    counts: Counts
    followed: Followed
    blocks: dict[str, int]
    num_copies: int
    num_possible_copies: int
    most_blocks: int
    total_blocks: int | None
    num_stored_again: int
    curve: list[CurvePoint]
    hits: Hits | None
    rules: list[ClaimResult]
    violations: list[BrokenClaim]
    notes: list[str]

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 0 ok, 5 violated, 6 inconclusive."""
        return EXIT_CODES[self.verdict]

    def to_text(self) -> str:
        """Return the verdict as readable text that ends in a line end."""
        counts, followed = self.counts, self.followed
        why = f": {self.why}" if self.why else ""
        blocks = ", ".join(f"{medium} {num:,}" for medium, num in self.blocks.items()) or "no"
        curve = "".join(f"; {point.kept_blocks:,} with {point.extra_blocks:,} more" for point in self.curve)
        came = f"{counts.num_events:,} events in {counts.num_batches:,} batches"
        moved = f"{counts.num_stored_blocks:,} blocks stored, {counts.num_removed_blocks:,} removed"
        gaps = f"gaps {followed.num_gaps:,}, asked for again {followed.num_replayed:,}, lost {followed.num_lost:,}"
        lines = [
            f"{self.verdict}{why}",
            f"  {came}: {moved}, {counts.num_clears:,} times cleared",
            f"  {gaps}, engines begun anew {followed.num_restarts:,}",
            f"  at the end {blocks} blocks; at most {self.most_blocks:,} on the device",
            f"  stored again after an eviction: {self.num_stored_again:,} blocks{curve}",
            f"  stored again while stored: {self.num_copies:,} copies, {self.num_possible_copies:,} copies or reports",
        ]
        if self.hits is not None:
            lines += self.hits.to_lines()
        for result in self.rules:
            status = result.status.replace("_", " ")
            if result.num_violations:
                status += " once" if result.num_violations == 1 else f" {result.num_violations:,} times"
            lines.append(f"  {result.rule:<16} {status}" + (f": {result.why}" if result.why else ""))
            listed = [violation for violation in self.violations if violation.rule == result.rule]
            lines += [f"    batch {violation.seq}: {violation.what}" for violation in listed[:20]]
            if result.num_violations > 20:
                lines.append(f"    and {result.num_violations - 20:,} more")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines) + "\n"


class Watched:
    """Receives batches in order, as `Follows` defines, and judges them. `journal`: writes them, if given.

    `total_blocks`, `allows_copies` and `max_blocks`: as in Claims.
    """

    def __init__(
        self,
        *,
        total_blocks: int | None = None,
        allows_copies: bool = True,
        max_blocks: int = MAX_BLOCKS,
        journal: StreamJournal | None = None,
    ) -> None:
        self.claims = Claims(total_blocks=total_blocks, allows_copies=allows_copies, max_blocks=max_blocks)
        self.counts = Counts()
        self.again = ReStores()
        self.groups = GroupedBlocks()
        self._outside: set[tuple[str, int, BlockHash]] = set()
        """Blocks that are not in the journal: of sparse events, and of other sizes than those of the first group."""
        self._journal = journal
        self.seq: int | None = None
        self.time_s = 0.0
        self._is_begun = False

    def begin(self, *, is_complete: bool) -> None:
        """Forget the stored blocks, at the start or for another engine."""
        self.claims.begin(is_complete=is_complete)
        self._forget()

    def lose(self, first: int, last: int) -> None:
        """Record that batches are not available."""
        what = f"batch {first} is missing" if first == last else f"batches {first} to {last} are missing"
        self.claims.add("sequence", first, what)

    def refuse(self) -> None:
        """Record a message that was too long to be read."""
        self.claims.refuse()
        self._forget()

    def _forget(self) -> None:
        self.again.forget()
        self.groups.forget()
        self._outside.clear()
        if self._journal is not None:
            self._journal.forget()

    def apply(self, seq: int, payload: bytes) -> None:
        """Process the next batch."""
        self.seq = seq
        try:
            batch = decode_batch(payload)
        except TooLongError:
            self.refuse()
            return
        except MalformedError as error:
            self.claims.add("schema", seq, str(error))
            return
        counts, claims, journal = self.counts, self.claims, self._journal
        counts.num_batches += 1
        self.time_s = batch.time_s
        if journal is not None:
            journal.begin_batch(seq, batch.time_s)
        for event in batch.told:
            counts.num_events += 1
            match event:
                case Stored():
                    new = claims.store(seq, event)
                    counts.num_stored_blocks += len(event.hashes)
                    if event.medium == "GPU":
                        self.again.store(_in_group(event.group, new))
                        self.groups.store(event, new)
                    if journal is None:
                        continue
                    if event.is_sparse or event.block_size != claims.block_size:
                        self._outside.update((event.medium, event.group, name) for name in new)
                    else:
                        journal.store(event, new)
                case Removed():
                    gone = claims.remove(seq, event)
                    counts.num_removed_blocks += len(event.hashes)
                    if event.medium == "GPU":
                        self.again.evict(_in_group(event.group, gone))
                        self.groups.remove(event.group, gone)
                    if journal is not None:
                        journal.remove(event.medium, self._inside(event.medium, event.group, gone))
                case Cleared():
                    counts.num_clears += 1
                    if journal is not None:
                        for (medium, group), there in claims.media.items():
                            journal.remove(medium, self._inside(medium, group, list(reversed(there))))
                    claims.clear()
                    self.again.forget()
                    self.groups.forget()
                case Unknown():
                    counts.num_unknown_events += 1

    def _inside(self, medium: str, group: int, gone: list[BlockHash]) -> list[BlockHash]:
        """Return those of the blocks `gone` that are in the journal."""
        if not self._outside:
            return gone
        outside = {(medium, group, name) for name in gone} & self._outside
        self._outside -= outside
        return [name for name in gone if (medium, group, name) not in outside]

    def blocks(self) -> dict[str, int]:
        """Return the number of blocks stored in each medium."""
        media = dict.fromkeys(medium for medium, _ in self.claims.media)
        return {medium: num for medium in media if (num := self.claims.num_blocks(medium))}

    def verdict(self, followed: Followed, notes: list[str], *, sample: EngineSample | None = None) -> WatchVerdict:
        """Judge the claims received so far. `sample`: the last reading of the metrics."""
        claims = self.claims
        rules = claims.results()
        statuses = {result.status for result in rules}
        verdict: Literal["ok", "violated", "inconclusive"] = "ok"
        why = None
        if "violated" in statuses:
            verdict = "violated"
        elif not self.counts.num_events:
            verdict, why = "inconclusive", "no event came"
        elif "inconclusive" in statuses:
            verdict = "inconclusive"
            why = next(result.why for result in rules if result.status == "inconclusive")
        if self.counts.num_unknown_events:
            notes = [*notes, f"{self.counts.num_unknown_events:,} events are of kinds that are not known"]
        return WatchVerdict(
            verdict=verdict,
            why=why,
            counts=self.counts,
            followed=followed,
            blocks=self.blocks(),
            num_copies=claims.copies.num_copies,
            num_possible_copies=claims.copies.num_possible,
            most_blocks=claims.most_blocks,
            total_blocks=claims.total_blocks,
            num_stored_again=self.again.num_again,
            curve=self.again.points(),
            hits=self.groups.explained(
                None if sample is None else sample.num_queried_tokens, None if sample is None else sample.hit_share
            ),
            rules=rules,
            violations=[violation for listed in claims.violations.values() for violation in listed],
            notes=notes,
        )


def _in_group(group: int, names: list[BlockHash]) -> list[BlockHash] | list[tuple[int, BlockHash]]:
    """Return names that differ from those of other groups, which name the same tokens by the same hash."""
    return [(group, name) for name in names] if group else names


class Watch:
    """One watch of `stream`. `looks`: reader of its metrics, if any; `timeline` gets one row per sample.

    `on_status` is called every `every_s` seconds, `on_look` several times a second.
    """

    def __init__(
        self,
        stream: EngineStream,
        watched: Watched,
        *,
        looks: Scraper | None = None,
        open_timeline: Callable[[int | None, int | None], WatchedTimeline] | None = None,
        on_status: Callable[[Watch], object] | None = None,
        every_s: float = 1.0,
        on_look: Callable[[Watch], object] | None = None,
    ) -> None:
        self.watched = watched
        self.follower = Follower(watched, None if stream is None else stream.ask)
        self.looks = looks
        self.timeline: WatchedTimeline | None = None
        self._stream = stream
        self._open_timeline = open_timeline
        self._on_status = on_status
        self._every_s = every_s
        self._on_look = on_look
        self._num_seen = 0
        self._num_cut = 0
        self._start_s = 0.0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start of the watch."""
        return time.monotonic() - self._start_s

    def run(self, should_stop: Callable[[], bool], *, duration_s: float | None = None) -> None:
        """Watch until `should_stop`, or for `duration_s`."""
        self._start_s = time.monotonic()
        deadline = float("inf") if duration_s is None else self._start_s + duration_s
        next_status = self._start_s + self._every_s
        # Connect before requesting the state: batches published between the two would be missed otherwise.
        while not self._stream.wait_for_connection(min(WAIT_S, max(0.0, deadline - time.monotonic()))):
            if should_stop() or time.monotonic() >= deadline:
                return
        self.follower.start()
        while not should_stop() and time.monotonic() < deadline:
            self._stream.wait(min(WAIT_S, deadline - time.monotonic()))
            self._take()
            if self._on_look is not None:
                self._on_look(self)
            now = time.monotonic()
            if now >= next_status:
                next_status = now + self._every_s
                if self._on_status is not None:
                    self._on_status(self)
        self._take()

    def _take(self) -> None:
        num_connections = self._stream.take_connections()
        while self._num_cut < self._stream.num_cut:
            self._num_cut += 1
            self.watched.refuse()
        if num_connections:
            self.follower.reconnected()
        for seq, payload in self._stream.take():
            self.follower.receive(seq, payload)
        if self.looks is not None and self.looks.num_seen > self._num_seen:
            self._num_seen = self.looks.num_seen
            if self.looks.last is not None:
                self._look(self.looks.last)

    def _look(self, sample: EngineSample) -> None:
        claims = self.watched.claims
        if claims.total_blocks is None:
            claims.total_blocks = sample.num_blocks
        if self._open_timeline is None or claims.total_blocks is None:
            return
        if self.timeline is None:
            if claims.block_size is None:
                return  # events contain it
            self.timeline = self._open_timeline(claims.total_blocks, claims.block_size)
        self.timeline.add(self.elapsed_s, sample)

"""A timeline written while the engine runs: a killed run leaves every complete step.

In .jsonl (and .jsonl.gz), the line of each step is flushed. A .json file is complete after every step: the row is
written together with the end of the file, and the next step overwrites that end. A device or a pipe gets .jsonl.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvarts.base.errors import ConfigError, OutputError
from kvarts.base.files import check_writable, is_replaceable
from kvarts.base.growing import GrowingFile
from kvarts.core.events import AtRest, Event, LeapDone, StepDone
from kvarts.proof.record.timeline import NS_PER_MS, Row, ask_of, form_of, head_of, listed_tiers, own_tiers

__all__ = ["LiveTimeline"]


class LiveTimeline:
    """An EventReader that appends one row per step.

    `close` it, or use it in a `with`, to write the totals of a .jsonl.

    `name_of`: the outside name of a request's index; by default, the index. `tiers`: blocks of each tier below the
    device, by name. `memory`: description of a memory with KV groups, which is counted in blocks.

    Raises ConfigError for a suffix that cannot be written live, OutputError for a file that cannot be written.
    """

    wants_details = False

    def __init__(
        self,
        path: Path | str,
        *,
        total_blocks: int,
        block_size_tokens: int,
        name_of: Callable[[int], str] = str,
        tiers: Mapping[str, int] | None = None,
        memory: Mapping[str, Any] | None = None,
    ) -> None:
        path = Path(path)
        form, is_packed = form_of(path)
        is_own = is_replaceable(path)
        if form == "json" and not is_own:
            form = "jsonl"  # output to a device or a pipe cannot be overwritten
        if form == "parquet" or (form == "json" and is_packed):
            raise ConfigError("cannot be written step by step", path=path, hint="Use .jsonl, .jsonl.gz or .json.")
        check_writable(path)
        self._name_of = name_of
        self._total = total_blocks
        self._used = self._released = 0
        self._peak = 0.0
        self._num_preempted = 0
        self._num_rows = 0
        self._packer = zlib.compressobj(6, zlib.DEFLATED, 31) if is_packed else None
        self._encoder = msgspec.json.Encoder()
        self._is_json = form == "json"
        head = head_of(block_size_tokens=block_size_tokens, total_blocks=total_blocks, tiers=tiers, memory=memory)
        self._num_tiers = len(tiers or ())
        self._num_own = len(own_tiers(tiers or ()))
        self._are_listed = bool(listed_tiers(tiers or ()))
        self._file = GrowingFile(path, keeps=False)
        try:
            self._begin(self._encoder.encode(head))
        except OutputError:
            self._file.close()
            raise

    def _begin(self, head: bytes) -> None:
        if self._is_json:
            self._file.write(head[:-1] + b',"timeline":[', end=self._json_end())
        else:
            self._append(head + b"\n")

    def observe(self, events: Sequence[Event]) -> None:
        """Write rows for the steps and rests in `events`."""
        for event in events:
            match event:
                case StepDone():
                    self.record_step(event)
                case LeapDone():
                    self.record_leap(event)
                case AtRest():
                    self.record_rest(event)

    def record_step(self, done: StepDone) -> None:
        """Write a scheduled step."""
        asked = [ask_of(preemption, name_of=self._name_of) for preemption in done.preemptions]
        row = self._row(
            done.step,
            done.start_ns,
            (done.num_used, done.num_cached, done.num_released, done.num_running, done.num_waiting),
            done.tiers,
            done.num_withheld,
            done.num_reserved,
        )
        if asked:
            row = msgspec.structs.replace(row, preempted_seqs=len(asked), asked=asked)
        self._num_preempted += len(asked)
        self._write([row])

    def record_leap(self, done: LeapDone) -> None:
        """Write the steps of a leap."""
        rows = []
        num_used, start_ns, turns = done.num_used, done.start_ns, done.turns
        for index, (duration_ns, num_taken) in enumerate(zip(done.durations_ns, done.pages_taken, strict=True)):
            num_used += num_taken
            num_cached = min(done.num_cached, self._total - num_used)
            num_withheld = 0
            if turns is not None:
                start_ns, num_cached, num_withheld = turns.starts_ns[index], turns.cached[index], turns.withheld[index]
            counts = num_used, num_cached, done.num_released, done.num_running, done.num_waiting
            rows.append(self._row(done.step + index, start_ns, counts, done.tiers, num_withheld, done.num_reserved))
            start_ns += duration_ns
        self._write(rows)

    def record_rest(self, rest: AtRest) -> None:
        """Write a rest: the engine ran out of work."""
        counts = rest.num_used, rest.num_cached, rest.num_released, 0, 0
        self._write([self._row(rest.step, rest.time_ns, counts, rest.tiers, 0, rest.num_reserved)])

    def close(self) -> None:
        """Write the totals, and close the file."""
        try:
            if not self._is_json:
                self._append(self._encoder.encode(self._totals()) + b"\n")
                if self._packer is not None:
                    self._file.write(self._packer.flush(zlib.Z_FINISH))
        finally:
            self._file.close()

    def __enter__(self) -> LiveTimeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _row(
        self,
        step: int,
        time_ns: int,
        counts: tuple[int, int, int, int, int],
        side_counts: tuple[int, ...],
        num_withheld: int,
        num_reserved: int,
    ) -> Row:
        num_used, num_cached, num_released, num_running, num_waiting = counts
        freed = num_released - self._released
        allocated = num_used - self._used + freed
        self._used, self._released = num_used, num_released
        used_pct = num_used / self._total
        self._peak = max(self._peak, used_pct)
        of_tiers = () if self._are_listed else side_counts[: 2 * self._num_own]
        row = Row(
            step,
            time_ns / NS_PER_MS,
            num_used,
            self._total - num_used,
            used_pct,
            num_running,
            0,
            num_cached,
            allocated,
            freed,
            num_waiting,
            *of_tiers,  # type: ignore[arg-type]  # pairs, in the order of the fields
        )
        if self._are_listed:
            below = side_counts[: 2 * self._num_own]
            row = msgspec.structs.replace(row, tier_used_blocks=list(below[::2]), tier_cached_blocks=list(below[1::2]))
        parts = side_counts[2 * self._num_tiers :]
        if parts:
            of_groups = {"group_used_parts": list(parts[::2]), "group_cached_parts": list(parts[1::2])}
            row = msgspec.structs.replace(row, **of_groups)
        if num_withheld or num_reserved:
            row = msgspec.structs.replace(
                row, withheld_blocks=num_withheld or None, reserved_blocks=num_reserved or None
            )
        return row

    def _write(self, rows: list[Row]) -> None:
        if not self._is_json:
            self._append(self._encoder.encode_lines(rows))
            return
        text = b",\n".join(map(self._encoder.encode, rows))
        self._file.write((b",\n" if self._num_rows else b"\n") + text, end=self._json_end())
        self._num_rows += len(rows)

    def _append(self, text: bytes) -> None:
        if self._packer is not None:
            text = self._packer.compress(text) + self._packer.flush(zlib.Z_SYNC_FLUSH)
        self._file.write(text)

    def _totals(self) -> dict[str, float]:
        return {"peak_used_pct": self._peak, "preemption_count": self._num_preempted}

    def _json_end(self) -> bytes:
        return b"\n]," + self._encoder.encode(self._totals())[1:] + b"\n"

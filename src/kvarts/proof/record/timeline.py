"""A timeline: use of the KV pages of one engine, one row per step, and one for each time it ran out of work.

Rows have the fields of the public KV-timeline form, and a few more. A row is a snapshot at the step's mark: the first
moment of the step with the most pages in use. `allocated` and `freed` count the pages that entered and left use since
the previous row. A row at rest has the number of the step before it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec
import numpy as np

from kvarts.base.columns import Column
from kvarts.base.errors import ConfigError
from kvarts.base.files import check_writable, is_replaceable, whole_file
from kvarts.core.events import Event, LeapDone, Preemption, StepDone

__all__ = [
    "FORMS",
    "TIMELINE_VERSION",
    "PreemptionCause",
    "RecordedReport",
    "RecordedSteps",
    "Row",
    "RowsThatFit",
    "Timeline",
    "form_of",
    "timelines_of",
]

TIMELINE_VERSION = 1
NS_PER_MS = 1e6
SLAB_ROWS = 1 << 15
"""Rows encoded at once: bounds the memory used in writing."""

MOST_ROWS = 1 << 25
"""Limit of a timeline made as a whole: some 8 GiB while it is written. A live timeline has no limit."""

FORMS = ("json", "jsonl", "parquet")
GROUP_COLUMNS = ("group_used_parts", "group_cached_parts")
"""Columns with one number per KV group."""
TIER_COLUMNS = ("tier_used_blocks", "tier_cached_blocks")
"""Columns with one number per tier below the device, where these are not host memory, or host memory and files."""
SHORT = ["host", "disk"]
"""The tiers that have columns of their own, if there are no others."""
SHARED = ("store", "peers")
"""Tiers that are not an engine's own, and have no columns."""


class RecordedSteps(Protocol):
    """Source of a timeline: the steps of one engine of `num_pages` pages, in columns.

    `columns` has one row per step: start_ns, used, cached, running, waiting, preempted, and the `tier_fields`. `rests`
    has one row for each time that the engine ran out of work: step, time_ns, used, cached, released, reserved, and the
    `tier_fields`.
    """

    num_pages: int

    num_groups: int
    """KV groups that are counted: `columns` and `rests` have group0_used, group0_cached and so on, in parts."""

    @property
    def memory(self) -> Mapping[str, Any]:
        """Description of a memory with KV groups; empty for whole pages."""

    @property
    def tiers(self) -> Mapping[str, int]:
        """Pages of each tier below the device, by name."""

    @property
    def tier_fields(self) -> Sequence[str]:
        """The columns that count pages of the tiers."""

    @property
    def preemptions(self) -> Sequence[tuple[int, Preemption]]:
        """The preemptions in order, each with its step."""

    @property
    def columns(self) -> Mapping[str, Column]:
        """One row per step."""

    @property
    def rests(self) -> Mapping[str, Column]:
        """One row for each time at rest."""

    @property
    def row_order(self) -> Column:
        """Permutation that sorts all steps, followed by all rests, by time."""

    def released(self) -> Column:
        """Return the cumulative number of released pages at each step."""

    def withheld(self) -> Column | None:
        """Return the pages that were unused but not available before each step; None if no page does."""

    def reserved(self) -> Column | None:
        """Return the pages that stay in use when no request runs, as of each step; None if this never happens."""

    def __len__(self) -> int:
        """Return the number of steps."""


class RecordedReport(Protocol):
    """A report, as far as `timelines_of` reads it."""

    @property
    def config(self) -> Any:
        """The configuration of the replay, which has its `page_size`."""

    @property
    def step_logs(self) -> Sequence[RecordedSteps]:
        """The steps of each replica."""

    @property
    def request_ids(self) -> Sequence[str]:
        """The outside name of each request, by index."""


class PreemptionCause(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The reason of a preemption: `request` asked for more blocks than were free, and `victim` was preempted.

    `model`: set if the request belongs to another model on the same device; the preemption then preceded this step.
    `promised_blocks`: unused blocks that were not free, as requests that wait for loads will need them.
    """

    request: str
    blocks: int
    free_blocks: int
    victim: str
    lost_tokens: int
    model: str | None = None
    promised_blocks: int | None = None


class Row(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One row, with the field names of the file."""

    step: int
    t_ms: float
    used_blocks: int
    free_blocks: int
    used_pct: float
    active_seqs: int
    preempted_seqs: int
    cached_blocks: int
    allocated: int
    freed: int
    waiting: int
    host_used_blocks: int | None = None
    host_cached_blocks: int | None = None
    disk_used_blocks: int | None = None
    disk_cached_blocks: int | None = None
    withheld_blocks: int | None = None
    reserved_blocks: int | None = None
    group_used_parts: list[int] | None = None
    group_cached_parts: list[int] | None = None
    tier_used_blocks: list[int] | None = None
    tier_cached_blocks: list[int] | None = None
    asked: list[PreemptionCause] | None = None


def ask_of(preemption: Preemption, *, name_of: Callable[[int], str]) -> PreemptionCause:
    """Return the entry of a preemption in a row. `name_of`: the outside name of a request's index."""
    return PreemptionCause(
        request=str(preemption.asker) if preemption.model else name_of(preemption.asker),
        blocks=preemption.num_pages_asked,
        free_blocks=preemption.num_pages_asked - preemption.num_pages_short,
        victim=name_of(preemption.victim),
        lost_tokens=preemption.num_computed_tokens,
        model=preemption.model or None,
        promised_blocks=preemption.num_promised or None,
    )


def head_of(
    *,
    block_size_tokens: int,
    total_blocks: int,
    every: int = 1,
    tiers: Mapping[str, int] | None = None,
    memory: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the top-level fields except the totals.

    `tiers`: blocks of each tier below the device, by name. `memory`: description of a memory with KV groups.
    """
    head = {
        "version": TIMELINE_VERSION,
        "block_size_tokens": block_size_tokens,
        "total_blocks": total_blocks,
        "every": every,
        "initial_used_blocks": 0,
    }
    totals: dict[str, Any] = {f"{name}_total_blocks": total for name, total in (tiers or {}).items()}
    if listed := listed_tiers(tiers or ()):
        totals = {f"{name}_total_blocks": total for name, total in (tiers or {}).items() if name in SHARED}
        totals["tiers"] = [{"name": name, "total_blocks": (tiers or {})[name]} for name in listed]
    return {**head, **totals, **(memory or {})}


def own_tiers(tiers: Iterable[str]) -> list[str]:
    """Return the names of an engine's own tiers among `tiers`."""
    return [name for name in tiers if name not in SHARED]


def listed_tiers(tiers: Iterable[str]) -> list[str]:
    """Return the names of the tiers whose counts are lists; empty if each tier has columns of its own."""
    own = own_tiers(tiers)
    return [] if own == SHORT[: len(own)] else own


def columns_of(present: Collection[str]) -> tuple[str, ...]:
    """Return the columns of a timeline, in order. Optional columns are included if `present`."""
    return tuple(
        name
        for name in Row.__struct_fields__[:-1]
        if name in present or not name.startswith(("host", "disk", "withheld", "reserved", "group", "tier"))
    )


class Timeline:
    """Rows in columns named like the fields of Row, with the top-level fields.

    `asked`: the asks of rows that preempted, by row. `every`: sampling interval of the rows, as in `thinned`.
    `tiers`: blocks of each tier below the device, by name. `memory`: description of a memory with KV groups.
    """

    def __init__(
        self,
        columns: dict[str, Column],
        asked: dict[int, list[PreemptionCause]],
        *,
        block_size_tokens: int,
        total_blocks: int,
        every: int = 1,
        tiers: Mapping[str, int] | None = None,
        memory: Mapping[str, Any] | None = None,
    ) -> None:
        self.tiers = dict(tiers or {})
        self.memory = dict(memory or {})
        self.columns = columns
        self.asked = asked
        self.block_size_tokens = block_size_tokens
        self.total_blocks = total_blocks
        self.every = every

    @classmethod
    def of(cls, log: RecordedSteps, *, page_size: int, request_ids: Sequence[str] | None = None) -> Timeline:
        """Return the timeline of `log`.

        `request_ids`: names of requests by index; by default, the index. Raise ConfigError for more than MOST_ROWS
        steps.
        """
        _check_rows(len(log))
        total = log.num_pages
        steps, rests = log.columns, log.rests
        order = log.row_order

        def merged(of_steps: Column, of_rests: Column | int) -> Column:
            rest_rows = np.broadcast_to(of_rests, rests["step"].shape)
            return np.concatenate((of_steps, rest_rows))[order].astype(np.int64)

        used = merged(steps["used"], rests["used"])
        freed = np.diff(merged(log.released(), rests["released"]), prepend=0)
        columns: dict[str, Column] = {
            "step": merged(np.arange(len(log)), rests["step"]),
            "t_ms": merged(steps["start_ns"], rests["time_ns"]) / NS_PER_MS,
            "used_blocks": used,
            "free_blocks": total - used,
            "used_pct": used / total,
            "active_seqs": merged(steps["running"], 0),
            "preempted_seqs": merged(steps["preempted"], 0),
            "cached_blocks": merged(steps["cached"], rests["cached"]),
            "allocated": np.diff(used, prepend=0) + freed,
            "freed": freed,
            "waiting": merged(steps["waiting"], 0),
        }
        if listed := listed_tiers(log.tiers):
            for name, what in zip(TIER_COLUMNS, ("used", "cached"), strict=True):
                of_tier = [f"{tier}_{what}" for tier in listed]
                columns[name] = np.stack([merged(steps[field], rests[field]) for field in of_tier], axis=1)
        for field in () if listed else log.tier_fields:
            columns[f"{field}_blocks"] = merged(steps[field], rests[field])
        withheld = log.withheld()
        if withheld is not None:
            columns["withheld_blocks"] = merged(withheld, 0)
        reserved = log.reserved()
        if reserved is not None:
            columns["reserved_blocks"] = merged(reserved, rests["reserved"])
        for what in ("used", "cached") if log.num_groups else ():
            of_group = [f"group{group}_{what}" for group in range(log.num_groups)]
            columns[f"group_{what}_parts"] = np.stack([merged(steps[name], rests[name]) for name in of_group], axis=1)
        row_of_step = np.flatnonzero(order < len(log))
        name_of = str if request_ids is None else request_ids.__getitem__
        asked: dict[int, list[PreemptionCause]] = {}
        for step, preemption in log.preemptions:
            ask = ask_of(preemption, name_of=name_of)
            asked.setdefault(int(row_of_step[step]), []).append(ask)
        return cls(columns, asked, block_size_tokens=page_size, total_blocks=total, tiers=log.tiers, memory=log.memory)

    def __len__(self) -> int:
        return len(self.columns["step"])

    @property
    def peak_used_pct(self) -> float:
        """The largest `used_pct`; 0 without rows."""
        return float(self.columns["used_pct"].max(initial=0.0))

    @property
    def preemption_count(self) -> int:
        """The sum of `preempted_seqs`."""
        return int(self.columns["preempted_seqs"].sum())

    def thinned(self, every: int) -> Timeline:
        """Return every `every`-th row, and the rows that must be kept.

        These are the first and the last row, the first and the last step, the peak, and every row that preempted. A
        row's `allocated` and `freed` are the sums since the previous row kept. Raise ConfigError if `every` is below 1.
        """
        if every < 1:
            raise ConfigError(f"must be at least 1, got {every}", field="every")
        num_rows = len(self)
        if every == 1 or not num_rows:
            return self
        keep = np.zeros(num_rows, np.bool_)
        keep[::every] = True
        keep[self.columns["preempted_seqs"] > 0] = True
        keep[np.argmax(self.columns["used_blocks"])] = True
        last_step = int(np.flatnonzero(self.columns["active_seqs"])[-1]) if self.columns["active_seqs"].any() else -1
        keep[[0, last_step, -1]] = True
        kept = np.flatnonzero(keep)
        columns = {name: column[kept] for name, column in self.columns.items()}
        begins = np.concatenate(([0], kept[:-1] + 1))
        for name in ("allocated", "freed"):
            columns[name] = np.add.reduceat(self.columns[name], begins)
        place = {int(row): index for index, row in enumerate(kept)}
        return Timeline(
            columns,
            {place[row]: asks for row, asks in self.asked.items()},
            block_size_tokens=self.block_size_tokens,
            total_blocks=self.total_blocks,
            every=self.every * every,
            tiers=self.tiers,
            memory=self.memory,
        )

    def rows(self, start: int = 0, end: int | None = None) -> list[Row]:
        """Return rows [start, end)."""
        end = len(self) if end is None else min(end, len(self))
        # Values are positional; absent columns are filled with the default of their field.
        names = columns_of(self.columns)
        last = Row.__struct_fields__.index(names[-1]) + 1
        columns = [
            self.columns[name][start:end].tolist() if name in names else [None] * (end - start)
            for name in Row.__struct_fields__[:last]
        ]
        rows = [Row(*values) for values in zip(*columns, strict=True)]
        for row, asks in self.asked.items():
            if start <= row < end:
                rows[row - start] = msgspec.structs.replace(rows[row - start], asked=asks)
        return rows

    @property
    def head(self) -> dict[str, Any]:
        """The top-level fields except the totals."""
        return head_of(
            block_size_tokens=self.block_size_tokens,
            total_blocks=self.total_blocks,
            every=self.every,
            tiers=self.tiers,
            memory=self.memory,
        )

    @property
    def totals(self) -> dict[str, Any]:
        """The totals."""
        return {"peak_used_pct": self.peak_used_pct, "preemption_count": self.preemption_count}

    # Writing ----------------------------------------------------------------------------------------------

    def to_json(self) -> bytes:
        """Return the public KV-timeline form."""
        buffer = io.BytesIO()
        self._write_json(buffer)
        return buffer.getvalue()

    def write(self, path: Path | str, *, every: int = 1) -> None:
        """Write .json, .jsonl or .parquet, each optionally with .gz; thinned, if `every` is above 1.

        The same timeline gives the same bytes. Raise ConfigError for another suffix, OutputError if the file cannot be
        written; `path` is then unchanged.
        """
        path = Path(path)
        form, is_packed = form_of(path)
        check_writable(path)
        timeline = self.thinned(every)
        with whole_file(path) as file:
            if is_packed:
                import gzip

                with gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=file, mtime=0) as packed:
                    timeline._write_form(form, packed)  # type: ignore[arg-type]
            else:
                timeline._write_form(form, file)

    def _write_form(self, form: str, file: IO[bytes]) -> None:
        {"json": self._write_json, "jsonl": self._write_jsonl, "parquet": self._write_parquet}[form](file)

    def _slabs(self) -> Iterator[list[Row]]:
        for start in range(0, len(self), SLAB_ROWS):
            yield self.rows(start, start + SLAB_ROWS)

    def _write_json(self, file: IO[bytes]) -> None:
        file.write(msgspec.json.encode({**self.head, **self.totals})[:-1] + b',"timeline":[')
        between = b"\n"
        for slab in self._slabs():
            file.write(between + msgspec.json.encode(slab)[1:-1].replace(b'},{"step"', b'},\n{"step"'))
            between = b",\n"
        file.write(b"\n]}\n")

    def _write_jsonl(self, file: IO[bytes]) -> None:
        encoder = msgspec.json.Encoder()
        file.write(encoder.encode(self.head) + b"\n")
        for slab in self._slabs():
            file.write(encoder.encode_lines(slab))
        file.write(encoder.encode(self.totals) + b"\n")

    def _has_promised(self) -> bool:
        return any(ask.promised_blocks for asks in self.asked.values() for ask in asks)

    def _write_parquet(self, file: IO[bytes]) -> None:
        pa, pq = import_parquet()
        ask = pa.struct(
            [
                ("request", pa.string()),
                ("blocks", pa.int64()),
                ("free_blocks", pa.int64()),
                ("victim", pa.string()),
                ("lost_tokens", pa.int64()),
                *([("model", pa.string())] if "withheld_blocks" in self.columns else []),
                *([("promised_blocks", pa.int64())] if self._has_promised() else []),
            ]
        )
        floats = ("t_ms", "used_pct")
        names = columns_of(self.columns)
        kinds = {
            **dict.fromkeys(floats, pa.float64()),
            **dict.fromkeys((*GROUP_COLUMNS, *TIER_COLUMNS), pa.list_(pa.int64())),
        }
        fields = [(name, kinds.get(name, pa.int64())) for name in names]
        metadata = {
            name: msgspec.json.encode(value).decode() if isinstance(value, list) else str(value)
            for name, value in {**self.head, **self.totals}.items()
        }
        schema = pa.schema([*fields, ("asked", pa.list_(ask))], metadata=metadata)
        with pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for start in range(0, max(1, len(self)), SLAB_ROWS):
                end = min(len(self), start + SLAB_ROWS)
                asked: list[Any] = [None] * (end - start)
                for row, asks in self.asked.items():
                    if start <= row < end:
                        asked[row - start] = [msgspec.structs.asdict(ask) for ask in asks]
                parts = [self.columns[name][start:end] for name in names]
                arrays = [pa.array(part if part.ndim == 1 else part.tolist()) for part in parts]
                writer.write_table(pa.table([*arrays, pa.array(asked, pa.list_(ask))], schema=schema))


class RowsThatFit:
    """An EventReader that ends a run as soon as its timeline would not fit in memory."""

    wants_details = False

    def observe(self, events: Sequence[Event]) -> None:
        """Raise ConfigError when there are more than MOST_ROWS steps."""
        for event in events:
            if isinstance(event, StepDone | LeapDone):
                _check_rows(event.step)


def _check_rows(num_rows: int) -> None:
    if num_rows > MOST_ROWS:
        raise ConfigError(
            f"would have more than {MOST_ROWS:,} rows, one for each step; replay less of the trace, or without a "
            "timeline and a run directory",
            field="timeline",
        )


def timelines_of(report: RecordedReport) -> list[Timeline]:
    """Return the timeline of each replica."""
    request_ids, page_size = report.request_ids, report.config.page_size
    return [Timeline.of(log, page_size=page_size, request_ids=request_ids) for log in report.step_logs]


def form_of(path: Path) -> tuple[str, bool]:
    """Return the format named by the suffix of `path`, and whether it is gzipped.

    A device or a pipe without a suffix gets JSON. Raise ConfigError for other suffixes.
    """
    suffixes = path.suffixes
    is_packed = bool(suffixes) and suffixes[-1] == ".gz"
    if is_packed:
        suffixes = suffixes[:-1]
    form = suffixes[-1][1:] if suffixes else ""
    if form not in FORMS and not is_replaceable(path):
        return "json", False
    if form not in FORMS:
        raise ConfigError(
            "a timeline is named by its form", path=path, hint="End it in .json, .jsonl or .parquet; .gz may follow."
        )
    return form, is_packed


def import_parquet() -> tuple[Any, Any]:
    """Return pyarrow and pyarrow.parquet. Raise ConfigError if they are not installed."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ConfigError("Parquet needs pyarrow", hint="pip install 'kvarts[parquet]', or write .jsonl.gz.") from None
    return pa, pq

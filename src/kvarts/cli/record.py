"""Recordings of `kvarts replay`, `kvarts profile` and sessions: timelines and journals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvarts.base.errors import OutputError
from kvarts.base.files import check_writable, whole_file
from kvarts.cli.options import DERIVED, OUTPUT, GroupedOption, KeyOption
from kvarts.cli.parts import CommandPart
from kvarts.sim.report.run_directory import EVENTS, TIMELINE, named, per_replica

if TYPE_CHECKING:
    from kvarts.core.config import EngineConfig
    from kvarts.core.event_log import EventReader
    from kvarts.core.events import Event
    from kvarts.proof.record.live import LiveTimeline
    from kvarts.proof.record.timeline import RecordedReport
    from kvarts.sim.config import ReplayConfig
    from kvarts.sim.report.report import Report

__all__ = [
    "PART",
    "Recordings",
    "check_timelines",
    "kv_timeline_option",
    "live_reader",
    "open_journals",
    "open_live",
    "write_timelines",
]

TITLE = "Results"

kv_timeline_option = click.option(
    "--kv-timeline",
    metavar="FILE",
    type=OUTPUT,
    help="Write how KV pages are used to FILE, step by step, while it runs: .jsonl, .jsonl.gz or .json. For `kvarts "
    "verify`.",
)
"""For `kvarts profile`, see open_live; for sessions, see live_reader."""


class RecordPart(CommandPart):
    """Timelines and journals."""

    def options(self) -> Sequence[click.Option]:
        """Return `--timeline`, the key `timeline_every` and `--events`."""
        return (
            GroupedOption(
                ["--timeline", "timeline_file"], group=TITLE, metavar="FILE", type=DERIVED,
                help="Write how KV pages were used, a row a step, to FILE: .json, .jsonl or .parquet, and .gz on top. "
                "With replicas, a file each: FILE.json becomes FILE-r0.json and so on.",
            ),
            KeyOption(
                ["--timeline-every"], group=TITLE, metavar="K", type=click.IntRange(min=1), default=1,
                help="Write every K-th row of the timeline, and besides the peak, every preemption, the first and the "
                "last step. [1]",
            ),
            GroupedOption(
                ["--events", "events_file"], group=TITLE, metavar="FILE", type=DERIVED,
                help="Write a journal of every event to FILE, JSON lines, for `kvarts story`; .gz packs it. With "
                "replicas, a file each.",
            ),
        )  # fmt: skip

    def results(
        self, config: ReplayConfig, places: Mapping[str, Any], run_dir: Path | None, model: str | None
    ) -> Recordings:
        """Return the recordings requested by the options and `run_dir`."""
        return Recordings(
            config,
            timeline_file=named(places["timeline_file"], model),
            timeline_every=places["timeline_every"],
            events_file=named(places["events_file"], model),
            run_dir=run_dir,
        )


class Recordings:
    """Timelines and journals of one replay, checked before it begins. Raises ConfigError and OutputError.

    `paths`: the files that options name. Files in `run_dir` are not checked: it is a new directory.
    """

    def __init__(
        self,
        config: ReplayConfig,
        *,
        timeline_file: Path | None,
        timeline_every: int,
        events_file: Path | None,
        run_dir: Path | None,
    ) -> None:
        self._config = config
        self._every = timeline_every
        self._timelines = [list(per_replica(path, config.replicas)) for path in (timeline_file,) if path is not None]
        self._journals = [list(per_replica(path, config.replicas)) for path in (events_file,) if path is not None]
        check_timelines(chain.from_iterable(self._timelines))
        self.paths = list(chain.from_iterable(self._timelines + self._journals))
        for path in self.paths:
            check_writable(path)
        if run_dir is not None:
            self._timelines.append(list(per_replica(run_dir / TIMELINE, config.replicas)))
            self._journals.append(list(per_replica(run_dir / EVENTS, config.replicas)))

    @contextmanager
    def observers(self) -> Iterator[Callable[[int], list[EventReader]]]:
        """Yield a function that returns the observers of a replica. Journals appear when the replay succeeds."""
        writers: list[list[EventReader]] = [[] for _ in range(self._config.replicas)]
        if self._timelines:
            from kvarts.proof.record.timeline import RowsThatFit

            for readers in writers:
                readers.append(RowsThatFit())
        if not self._journals:
            yield writers.__getitem__
            return
        with open_journals() as open_journal:
            for paths in self._journals:
                for readers, path in zip(writers, paths, strict=True):
                    readers.append(open_journal(path, self._config))
            yield writers.__getitem__

    def write(self, report: Report) -> None:
        """Write the timelines."""
        if self._timelines:
            write_timelines(report, self._timelines, every=self._every)


@contextmanager
def open_journals() -> Iterator[Callable[[Path, ReplayConfig], EventReader]]:
    """Yield a function that begins the journal of an engine; the files appear at the end, if nothing fails."""
    from kvarts.proof.record.journal import JournalWriter

    with ExitStack() as stack:
        writers: list[JournalWriter] = []

        def begin(path: Path, config: ReplayConfig) -> EventReader:
            writers.append(
                JournalWriter(
                    stack.enter_context(whole_file(path)),
                    total_blocks=config.num_blocks,
                    block_size_tokens=config.page_size,
                    is_packed=path.suffix == ".gz",
                    memory=None if config.kv_groups == "off" else config.memory.to_builtins(),
                )
            )
            return writers[-1]

        yield begin
        for writer in writers:
            writer.close()


def check_timelines(paths: Iterable[Path]) -> None:
    """Raise ConfigError if a suffix of `paths` is not a form of timelines, or needs a library that is not installed."""
    for path in paths:
        from kvarts.proof.record.timeline import form_of, import_parquet

        if form_of(path)[0] == "parquet":
            import_parquet()


def write_timelines(report: RecordedReport, groups: Iterable[Iterable[Path]], *, every: int) -> None:
    """Write the timeline of each replica of `report` to the paths of each group, with every `every`-th step."""
    from kvarts.proof.record.timeline import timelines_of

    timelines = timelines_of(report)
    for paths in groups:
        for path, timeline in zip(paths, timelines, strict=True):
            timeline.write(path, every=every)


def open_live(
    stack: ExitStack,
    values: dict[str, Any],
    config: EngineConfig,
    tiers: Mapping[str, int],
    *,
    num_blocks: int = 0,
    memory: Mapping[str, Any] | None = None,
) -> LiveTimeline | None:
    """Return the timeline of `--kv-timeline`, written while an engine runs; None without the option.

    `num_blocks` and `memory`: the blocks and the description of a memory with KV groups.
    """
    from kvarts.proof.record.live import LiveTimeline

    path = values["kv_timeline"]
    if path is None:
        return None
    live = LiveTimeline(
        path,
        total_blocks=num_blocks if memory else config.num_pages,
        block_size_tokens=config.page_size,
        tiers=tiers,
        memory=memory,
    )
    return stack.enter_context(live)


class UntilItFails:
    """An EventReader for a server that must not stop when its record can no longer be written."""

    wants_details = False

    def __init__(self, reader: EventReader, say: Callable[[str], object]) -> None:
        self._reader: EventReader | None = reader
        self._say = say

    def observe(self, events: Sequence[Event]) -> None:
        """Pass `events` on until that fails once; then report the failure and drop all later events."""
        if self._reader is not None:
            try:
                self._reader.observe(events)
            except OutputError as error:
                self._reader = None
                self._say(f"nothing more is recorded: {error}")


def live_reader(
    stack: ExitStack, values: dict[str, Any], say: Callable[[str], object] | None = None
) -> Callable[..., EventReader | None]:
    """Return the factory of readers for `open_sessions`, see open_live. With `say`, an engine outlives its file.

    Raise OutputError at once for a file that cannot be written.
    """
    if values["kv_timeline"] is not None:
        check_writable(values["kv_timeline"])

    def reader(config: EngineConfig, tiers: Mapping[str, int], **blocks: Any) -> EventReader | None:
        live = open_live(stack, values, config, tiers, **blocks)
        return live if live is None or say is None else UntilItFails(live, say)

    return reader


PART = RecordPart()

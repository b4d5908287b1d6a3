"""`kvarts watch`."""

from __future__ import annotations

import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from kvarts.base.errors import ConfigError
from kvarts.base.files import (
    check_writable,
    is_standard_output,
    write_whole,
)
from kvarts.base.growing import GrowingFile
from kvarts.base.terminal import in_line
from kvarts.cli.options import OUTPUT, Command, KeyOption, grouped
from kvarts.cli.process import ReaderGoneError, collect_garbage, draw, print_json, print_text

if TYPE_CHECKING:
    from kvarts.doors.watch.metrics import EngineSample
    from kvarts.doors.watch.watched import Watch

__all__ = ["watch_command"]

of_engine = grouped("The engine")
of_end = grouped("The end")
of_results = grouped("Results")

FILES = ("events_file", "timeline_file", "verdict_file")
MOST_WAITING = 1 << 16


@click.command("watch", cls=Command)
@click.argument("endpoint")
@of_engine("--replay", metavar="ENDPOINT", help="Ask here for full state, and for batches that were lost.")
@of_engine("--topic", cls=KeyOption, default="", help="Prefix of the topics to receive. [all]")
@of_engine(
    "--bind",
    "binds",
    cls=KeyOption,
    is_flag=True,
    help="Wait at ENDPOINT for engines that connect to their consumer.",
)
@of_engine("--metrics", metavar="URL", help="Look at the engine's metrics: http://HOST:PORT/metrics.")
@of_engine("--total-blocks", cls=KeyOption, metavar="N", type=click.IntRange(min=1),
           help="Blocks of the device. [from the metrics]")  # fmt: skip
@of_engine("--no-copies", cls=KeyOption, is_flag=True,
           help="Forbid a second store of a block, for engines that publish a block once, as kvarts' do.")  # fmt: skip
@of_engine("--max-blocks", cls=KeyOption, metavar="N", type=click.IntRange(min=1), default=524_288, show_default=True,
           help="Blocks that are kept in mind at once, about 250 bytes each; of more, nothing is judged.")  # fmt: skip
@of_engine("--ui", "ui_port", metavar="PORT", type=click.IntRange(0, 65535),
           help="Serve a live page at this port of 127.0.0.1; 0: a free one.")  # fmt: skip
@of_end("--duration", metavar="SECONDS", type=click.FloatRange(min=0.0, min_open=True),
        help="End after this time. [at SIGINT or SIGTERM]")  # fmt: skip
@of_results(
    "--events", "events_file", metavar="FILE", type=OUTPUT, help="Write a journal, for `kvarts story`; .gz packs it."
)
@of_results("--timeline", "timeline_file", metavar="FILE", type=OUTPUT,
            help="Write a row for each look at the metrics, JSON lines, for `kvarts verify`.")  # fmt: skip
@of_results("--every", cls=KeyOption, metavar="SECONDS", type=click.FloatRange(min=0.1),
            help="Seconds between two progress lines. [10; in a terminal 1]")  # fmt: skip
@of_results("--quiet", cls=KeyOption, is_flag=True, help="Print no progress.")
@of_results("--verdict", "verdict_file", metavar="FILE", type=OUTPUT, help="Write the verdict as JSON.")
@of_results("--json", "as_json", is_flag=True, help="Print the verdict as JSON instead of text.")
def watch_command(endpoint: str, **values: Any) -> int:
    """Follow the KV events of an engine, kvarts' or vLLM's, and judge what they claim.

    ENDPOINT is where they are published: tcp://HOST:PORT. The verdict is ok, violated, or inconclusive: no events
    arrived, or the result depends on the unknown initial state. The exit code is 0, 5 or 6.
    """
    try:
        import zmq  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"watch needs ZeroMQ ({error})", hint="pip install 'kvarts[serve]'.") from None
    from kvarts.doors.watch.watched import Watched

    if values["timeline_file"] is not None and values["metrics"] is None:
        raise ConfigError("needs metrics, which report the blocks in use", field="timeline", hint="Give --metrics URL.")
    for name in ("duration", "every"):
        if values[name] is not None and not isfinite(values[name]):
            raise ConfigError(f"must be a finite number, got {values[name]}", field=name)
    for name in FILES:
        if values[name] is not None:
            check_writable(values[name])
    collect_garbage()
    notes: list[str] = []
    with ExitStack() as stack:
        journal = None
        if values["events_file"] is not None:
            from kvarts.doors.watch.journal import StreamJournal

            file = _LiveFile(values["events_file"])
            stack.callback(file.close)
            journal = StreamJournal(file.write, total_blocks=values["total_blocks"] or 0)
            stack.callback(journal.close)
        watched = Watched(
            total_blocks=values["total_blocks"],
            allows_copies=not values["no_copies"],
            max_blocks=values["max_blocks"],
            journal=journal,
        )
        watch = _watch(stack, endpoint, values, watched, notes)
        if journal is not None and journal.ended_at is not None:
            notes.append(f"the journal ends before batch {journal.ended_at}: more tokens were stored than are kept")
        looks = watch.looks
        verdict = watched.verdict(watch.follower.counts, notes, sample=None if looks is None else looks.last)
    answer = msgspec.to_builtins(verdict)
    if values["verdict_file"] is not None:
        write_whole(values["verdict_file"], msgspec.json.encode(answer) + b"\n")
    if not any(is_standard_output(values[name]) for name in FILES):
        with suppress(ReaderGoneError):
            if values["as_json"]:
                print_json(answer)
            else:
                print_text(verdict.to_text())
    return verdict.exit_code


def _watch(stack: ExitStack, endpoint: str, values: dict[str, Any], watched: Any, notes: list[str]) -> Watch:
    """Watch until the end, and add other observations to `notes`."""
    from kvarts.doors.watch.decoding import MAX_BATCH_BYTES
    from kvarts.doors.watch.journal import WatchedTimeline
    from kvarts.doors.watch.metrics import Scraper
    from kvarts.doors.watch.sockets import EngineStream
    from kvarts.doors.watch.watched import Watch

    stop = stack.enter_context(_signals())
    stream = EngineStream(endpoint, values["replay"], topic=values["topic"], binds=values["binds"])
    stack.callback(stream.close)
    scraper = None if values["metrics"] is None else Scraper(values["metrics"])
    if scraper is not None:
        stack.callback(scraper.close)

    def open_timeline(total_blocks: int | None, block_size: int | None) -> WatchedTimeline:
        file = _LiveFile(values["timeline_file"])
        stack.callback(file.close)
        timeline = WatchedTimeline(file.write, total_blocks=total_blocks, block_size=block_size)
        stack.callback(timeline.close)
        return timeline

    page = None
    if values["ui_port"] is not None:
        from kvarts.doors.watch.live import WatchedPage

        page = WatchedPage(values["ui_port"], name=endpoint)
        stack.callback(page.close)
        click.echo(f"kvarts: a live page is at {page.url}", err=True)
    is_terminal = sys.stderr.isatty()
    watch = Watch(
        stream,
        watched,
        looks=scraper,
        open_timeline=None if values["timeline_file"] is None else open_timeline,
        on_status=None if values["quiet"] else _View(is_terminal),
        every_s=values["every"] or (1.0 if is_terminal else 10.0),
        on_look=None if page is None else page.update,
    )
    if not values["quiet"]:
        click.echo(f"kvarts: watching {endpoint}; SIGINT ends it with a verdict", err=True)
    watch.run(stop, duration_s=values["duration"])
    if not stream.wait_for_connection(0):
        notes.append(f"nothing was at {endpoint}")
    if stream.num_strange:
        notes.append(f"{stream.num_strange:,} messages are not batches")
    if stream.num_unanswered:
        notes.append(f"{stream.num_unanswered:,} requests for past batches were not answered")
    if stream.num_too_long:
        notes.append(f"{stream.num_too_long:,} answers to requests for past batches were longer than is read")
    if stream.num_cut:
        notes.append(
            f"{stream.num_cut:,} connections ended with a message of more than {MAX_BATCH_BYTES >> 20} MiB, and were "
            "made again"
        )
    if scraper is not None and not scraper.num_seen:
        notes.append(f"metrics could not be read at {values['metrics']}")
    if values["timeline_file"] is not None and watch.timeline is None:
        open_timeline(watched.claims.total_blocks, watched.claims.block_size)
        notes.append("the timeline is empty: the metrics do not report the number of blocks, or no block was stored")
    return watch


class _View:
    """Status display: in a terminal a few lines that are overwritten, else one line each time."""

    def __init__(self, is_terminal: bool) -> None:
        self._is_terminal = is_terminal
        self._num_lines = 0
        self._before = (time.monotonic(), 0)

    def __call__(self, watch: Watch) -> None:
        lines = list(self._lines(watch))
        if self._is_terminal:
            up = f"\x1b[{self._num_lines}F" if self._num_lines else ""
            draw(up + "".join(f"{in_line(line)}\x1b[K\n" for line in lines))
            self._num_lines = len(lines)
        else:
            click.echo("kvarts: " + "; ".join(lines), err=True)

    def _lines(self, watch: Watch) -> Iterator[str]:
        watched, followed = watch.watched, watch.follower.counts
        counts, claims = watched.counts, watched.claims
        now, num = time.monotonic(), counts.num_events
        (before, num_before), self._before = self._before, (now, num)
        rate = (num - num_before) / max(now - before, 1e-9)
        yield f"batch {watched.seq if watched.seq is not None else '-'}, {num:,} events, {rate:,.0f} a second"
        blocks = ", ".join(f"{medium} {count:,}" for medium, count in watched.blocks().items()) or "none"
        of = "" if claims.total_blocks is None else f" of {claims.total_blocks:,}"
        known = "" if claims.is_complete else ", and what was there before"
        yield f"blocks: {blocks}{known}; at most {claims.most_blocks:,}{of} on the device"
        yield (
            f"gaps {followed.num_gaps:,}, lost {followed.num_lost:,}, begun anew {followed.num_restarts:,}; "
            f"violations {sum(claims.num_violations.values()):,}"
        )
        sample = None if watch.looks is None else watch.looks.last
        if sample is not None:
            usage = "-" if sample.usage is None else f"{sample.usage:.1%}"
            hits = "-" if sample.hit_share is None else f"{sample.hit_share:.1%}"
            yield f"running {sample.num_running}, waiting {sample.num_waiting}, KV in use {usage}, prompts found {hits}"
            if sample.tier_resident:
                yield tiers_line(sample)


def tiers_line(sample: EngineSample) -> str:
    """Return a line on kvarts' tiers inside vLLM: pages found by tier, and why others were not loaded."""
    pages, waiting = sample.tier_pages, sample.tier_waiting
    resident = ", ".join(f"{tier} {count:,}" for tier, count in sorted(sample.tier_resident.items(), reverse=True))
    loaded, stored = (f"{(count or 0) / 1e6:,.1f} MB" for count in (sample.num_loaded_bytes, sample.num_stored_bytes))
    refused = {"no room": "refused", "sooner computed": "computed_instead", "broken": "broken"}
    why = ", ".join(f"{words} {pages.get(name, 0):,}" for words, name in refused.items())
    return (
        f"tiers: {resident} pages; loaded {pages.get('loaded', 0):,} ({loaded}), read from files "
        f"{pages.get('promoted', 0):,}; stored {pages.get('stored', 0):,} ({stored}); not loaded or stored: {why}; "
        f"waiting to be read {waiting.get('read', 0):,}, written {waiting.get('write', 0):,}"
    )


@contextmanager
def _signals() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether SIGINT or SIGTERM has arrived."""
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, _: came.append(number)) for number in numbers]
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class _LiveFile:
    """A file written during a watch: data older than a second is in the file even if this process is killed."""

    def __init__(self, path: Path) -> None:
        self._packer = zlib.compressobj(6, zlib.DEFLATED, 31) if path.suffix == ".gz" else None
        self._waiting = bytearray()
        self._written_s = time.monotonic()
        self._file = GrowingFile(path, keeps=False)

    def write(self, data: bytes) -> None:
        """Write `data` within about a second of the next call. Raise OutputError."""
        self._waiting += data
        now = time.monotonic()
        if len(self._waiting) >= MOST_WAITING or now - self._written_s >= 1.0:
            self._written_s = now
            self._flush(zlib.Z_SYNC_FLUSH)

    def close(self) -> None:
        """Write the buffered data and close. Raise OutputError."""
        try:
            self._flush(zlib.Z_FINISH)
        finally:
            self._file.close()

    def _flush(self, mode: int) -> None:
        text = bytes(self._waiting)
        self._waiting.clear()
        if self._packer is not None:
            text = self._packer.compress(text) + self._packer.flush(mode)
        self._file.write(text)

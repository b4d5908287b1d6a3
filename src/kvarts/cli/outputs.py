"""Destinations of a command's results: files, a text table of at most 80 columns, and pages of HTML that are opened."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from kvarts import __version__
from kvarts.base.documents import Column, Document, Table
from kvarts.base.errors import ConfigError
from kvarts.base.files import check_writable, is_standard_output, reading, write_whole
from kvarts.base.units import as_duration, as_hits, as_percent
from kvarts.cli.process import Progress, print_bytes, print_text, say
from kvarts.sim.report.words import LIMITS, UNCERTAIN, UNMEASURED, in_memory, number, opening, wrapped

if TYPE_CHECKING:
    from pathlib import Path

    from kvarts.cli.parts import CommandPart, Outputs
    from kvarts.core.event_log import EventReader
    from kvarts.sim.config import ReplayConfig
    from kvarts.sim.report.report import Report
    from kvarts.sim.report.run_page import ShownOverview

__all__ = [
    "ReplayFiles",
    "as_bytes",
    "check_opening",
    "open_page",
    "render_advice",
    "render_table",
    "write_about",
    "write_run_page",
]

LARGE_RUN_BYTES = 4_000_000
LATENCIES = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms", "queue_ms")
COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")


def render_table(summary: dict[str, Any]) -> Document:
    """Return the table with a newline at the end; if nothing was completed, only the reason."""
    config = summary["config"]
    completed, rejected = summary["num_completed"], summary["num_rejected"]
    lines: list[str | Table] = [
        f"{_fit(summary['trace'], 44)}: {summary['num_requests']:,} requests",
        *opening(config),
        "",
    ]
    if rejected and not completed:
        return Document.of([*lines, _row("requests", _counts(summary, completed, rejected))])
    rows = []
    for name in LATENCIES:
        rows.append([name.removesuffix("_ms").upper(), *(as_duration(summary[name][column]) for column in COLUMNS)])
        spread = summary.get("uncertainty", {}).get(name)
        if spread is not None:
            rows.append(["", *(_plus_minus(spread.get(column)) for column in COLUMNS)])
    lines += [
        Table([Column("", 8, is_text=True), *(Column(name, 12) for name in COLUMNS)], rows),
        "",
        *([_row(*(UNCERTAIN if summary["uncertainty"] else UNMEASURED))] if "uncertainty" in summary else []),
        _row("duration", f"{as_duration(summary['duration_ms'])} in {summary['num_steps']:,} steps"),
        _row("requests", _counts(summary, completed, rejected)),
        _row(
            "throughput",
            f"{number(summary['request_throughput_per_s'])} requests/s, "
            f"{number(summary['input_throughput_tokens_per_s'])} in and "
            f"{number(summary['output_throughput_tokens_per_s'])} out tokens/s",
        ),
    ]
    goodput = summary["goodput"]
    if goodput is not None:
        lines.append(
            _row("goodput", f"{number(goodput['requests_per_s'])} requests/s, {as_percent(goodput['ratio'])} of all")
        )
    lines += [
        _row("prefix hits", _hits(summary)),
        *_tiers(summary),
        *_sessions(summary),
        _row(
            "KV pages",
            f"peak {as_percent(summary['peak_used_pct'])} used, mean {as_percent(summary['mean_used_pct'])}, "
            f"{_evicted(summary)} evicted",
        ),
        *_groups(summary),
        _row("distinct", _distinct(summary)),
        _row(
            "preempted",
            f"{summary['num_preemptions']:,} times, {summary['num_recomputed_tokens']:,} tokens computed again",
        ),
        *_wasted(summary),
        _row("limited by", _limit(summary["limited_by"])),
        *_warnings(summary),
    ]
    return Document.of(lines)


def _hits(summary: dict[str, Any]) -> str:
    if summary["prefix_hit_ratio"] is None and summary["num_input_tokens"]:
        return "unknown"
    return (
        f"{'at least ' if summary.get('prefix_hit_ratio_is_lower_bound') else ''}"
        f"{as_percent(summary['prefix_hit_ratio'])} of prompt tokens "
        f"({summary['num_cached_tokens']:,} of {summary['num_input_tokens']:,})"
    )


def _plus_minus(value: float | None) -> str:
    return "" if value is None else f"±{as_duration(value)}"


def _tiers(summary: dict[str, Any]) -> list[str]:
    """Return rows on hits and transfers by tier; empty without a tier below the device."""
    transfers = summary["transfers"]
    if transfers is None:
        return []
    ratios = ", ".join(f"{name} {as_hits(ratio)}" for name, ratio in summary["prefix_hit_ratio_by_tier"].items())
    moved = [f"{name.replace('_', ' ')} {as_bytes(count)}" for name, count in transfers["bytes"].items()]
    lines = [_row("  by tier", ratios), _row("transfers", ", ".join(moved))]
    failed, left_out = transfers["num_failed"], transfers["num_pages_without_room"]
    if failed or left_out:
        lines.append(_row("", f"{failed:,} failed, {left_out:,} pages found no room to be stored"))
    return lines


def _groups(summary: dict[str, Any]) -> list[str]:
    """Return a row for each KV group; empty without KV groups."""
    memory = summary.get("kv_groups", ())
    lines = []
    for index, group in enumerate(memory):
        span = f", {group['kind']} {group['tokens']:,}" if "tokens" in group else f", {group['kind']}"
        if group["kind"] == "state" and "tokens" in group:
            span = ", state by page"
        layers = f"{group['layers']} layers{span}"
        text = f"{layers}: peak {group['peak_used_parts']:,} parts, {group['num_evicted_parts']:,} evicted"
        lines.append(_row("" if index else "KV groups", text))
    return lines


def _sessions(summary: dict[str, Any]) -> list[str]:
    """Return rows on sessions; empty if turns are replayed as ordinary requests."""
    totals = summary.get("sessions")
    if totals is None:
        return []
    unit = "blocks" if "kv_groups" in summary else "pages"
    lines = [
        _row(
            "sessions",
            f"{totals['num_turns']:,} turns; {totals['num_history_tokens_computed']:,} of "
            f"{totals['num_history_tokens']:,} tokens of history computed again; "
            f"{totals['peak_reserved_pages']:,} {unit} kept at most",
        )
    ]
    ends = {
        "changed history": totals["num_turns_of_changed_history"],
        "expired": totals["num_expired"],
        "evicted": totals["num_evicted"],
        "refused": totals["num_refused_turns"],
        "pins given up": totals["num_pins_given_up"],
    }
    said = ", ".join(f"{count:,} {what}" for what, count in ends.items() if count)
    return [*lines, _row("", said)] if said else lines


def as_bytes(count: float) -> str:
    """Return `count` in the largest decimal unit in which it is at least 1."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def _row(name: str, value: str) -> str:
    return f"{name:<14}{value}"


def _wasted(summary: dict[str, Any]) -> list[str]:
    """Return a row on tokens computed for cancelled requests; empty without these."""
    wasted = summary.get("cancelled")
    if wasted is None:
        return []
    text = f"{wasted['prompt_tokens']:,} prompt and {wasted['output_tokens']:,} output tokens, of cancelled requests"
    return [_row("wasted", text)]


def _counts(summary: dict[str, Any], completed: int, rejected: int) -> str:
    text = f"{completed:,} completed, {rejected:,} rejected"
    if summary["num_failed"]:
        text += f", {summary['num_failed']:,} failed"
    if "num_cancelled" in summary:
        text += f", {summary['num_cancelled']:,} cancelled"
    skipped = summary["num_skipped_lines"]
    return f"{text}, {skipped:,} bad lines skipped" if skipped else text


def _warnings(summary: dict[str, Any]) -> list[str]:
    """Return rows with warnings about the trace; empty without warnings."""
    left_out = [f"{count:,} {reason}" for reason, count in summary.get("left_out", {}).items()]
    said = [f"the trace has rows that are left out: {', '.join(left_out)}"] if left_out else []
    return [
        line
        for warning in (*said, *summary.get("warnings", ()))
        for line in wrapped(warning, f"{'warning':<14}", " " * 14)
    ]


def _evicted(summary: dict[str, Any]) -> str:
    count = summary["num_evicted_pages"]
    of_pools = summary["config"].get("pools", ())
    of_blocks = "kv_groups" in summary or any(pool.get("kv_groups", "off") != "off" for pool in of_pools)
    return f"{count:,} blocks" if of_blocks else f"{count:,}{in_memory(count, summary['config'])}"


def _distinct(summary: dict[str, Any]) -> str:
    pages = summary["distinct_pages"]
    if pages is None:
        return "unknown: the trace was read as a stream"
    return f"{pages:,} pages{in_memory(pages, summary['config'])}"


def _limit(limited_by: dict[str, Any]) -> str:
    cause = limited_by["cause"]
    text = f"{LIMITS[cause]} {limited_by['lane']}" if cause == "transfers" else LIMITS[cause]
    share = limited_by["share_of_waiting"].get(cause)
    return f"{text}\n{'':<14}({as_percent(share)} of the time spent waiting)" if share is not None else text


def render_advice(sentence: str | None) -> str:
    """Return advice as a paragraph after an empty line; empty if `sentence` is None."""
    if sentence is None:
        return ""
    whole = f"{sentence[0].upper()}{sentence[1:]}."
    return "\n".join(["", *wrapped(whole)]) + "\n"


def _fit(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


class ReplayFiles:
    """The files of one replay, checked before it begins. Raises ConfigError and OutputError.

    `paths`: the files that options name; `run_dir`: an existing folder for all other files. `html_file`: a page, which
    is made from that folder. `model`: added to the names of the parts' files; None for one model. `parts`: those that
    may have results; None for all. `places`: values of the parts' options.
    """

    def __init__(
        self,
        config: ReplayConfig,
        *,
        as_json: bool,
        report_file: Path | None,
        requests_file: Path | None,
        run_dir: Path | None,
        html_file: Path | None = None,
        model: str | None = None,
        parts: Sequence[CommandPart] | None = None,
        **places: Any,
    ) -> None:
        self._as_json = as_json
        self._reports = [path for path in (report_file,) if path is not None]
        self._requests = [path for path in (requests_file,) if path is not None]
        if parts is None:
            from kvarts.cli.parts import load_parts

            parts = load_parts()
        of_parts = [part.results(config, places, run_dir, model) for part in parts]
        self._more: list[Outputs] = [results for results in of_parts if results is not None]
        pages = [path for path in (html_file,) if path is not None]
        for path in (*self._reports, *self._requests, *pages):
            check_writable(path)
        of_results = (path for results in self._more for path in results.paths)
        self.paths = [*self._reports, *self._requests, *pages, *of_results]
        self._run_dir = run_dir
        if run_dir is not None:
            from kvarts.sim.report.run_directory import REPORT, REQUESTS

            self._reports.append(run_dir / REPORT)
            self._requests.append(run_dir / REQUESTS)

    @contextmanager
    def observers(self) -> Iterator[Callable[[int], list[EventReader]]]:
        """Yield a function that returns the observers of a replica's events, for the time of the replay."""
        with ExitStack() as stack:
            of_parts = [stack.enter_context(results.observers()) for results in self._more]
            yield lambda replica: [observer for observers_of in of_parts for observer in observers_of(replica)]

    def write(self, report: Report) -> None:
        """Write the remaining files, and print the report unless one of the files is standard output."""
        self.write_files(report)
        if not any(map(is_standard_output, self.paths)):
            if self._as_json:
                print_bytes(report.to_json())
                return
            print_text(render_table(report.summary))
            print_text(render_advice(report.advice))  # computing the advice may take several replays

    def write_files(self, report: Report) -> None:
        """Write all files except those of the observers."""
        requests = report.requests_jsonl() if self._requests else b""
        for path in self._requests:
            write_whole(path, requests)
        for results in self._more:
            results.write(report)
        if self._run_dir is not None:
            write_about(self._run_dir, report)
        for path in self._reports:
            write_whole(path, report.to_json())


def write_about(run_dir: Path, report: Report) -> None:
    """Write the files of a run directory that no option names: distributions, and the command."""
    from kvarts.sim.report.run_directory import DISTRIBUTIONS, RUN, run_json

    write_whole(run_dir / DISTRIBUTIONS, report.distributions_json())
    write_whole(run_dir / RUN, run_json(__version__, ["kvarts", *_without_page(sys.argv[1:])]))


def _without_page(words: Sequence[str]) -> list[str]:
    """Return a command line without its page options, so that a page does not depend on its own name."""
    kept: list[str] = []
    for place, word in enumerate(words):
        is_value = place > 0 and words[place - 1] == "--html"
        if word not in ("--html", "--open") and not word.startswith("--html=") and not is_value:
            kept.append(word)
    return kept


def check_opening(html_file: Path | None, *, opens: bool) -> None:
    """Raise ConfigError if a page is to be opened but is not a file."""
    if opens and html_file is not None and is_standard_output(html_file):
        raise ConfigError("opens a file", field="--open", hint="Give --html the path of a file.")


def open_page(html_file: Path | None, *, opens: bool) -> None:
    """Open a page that was written in the browser, if `opens`; print a note if no browser is found."""
    if not opens or html_file is None:
        return
    import webbrowser

    if not webbrowser.open(html_file.resolve().as_uri()):
        say(f"kvarts: found no browser; open {html_file} yourself")


def write_run_page(run_dir: Path, html_file: Path, *, opens: bool) -> None:
    """Write the page of a run directory, and open it if `opens`."""
    from kvarts.sim.report.run_directory import RunDirectory
    from kvarts.sim.report.run_page import render_html

    run = RunDirectory(run_dir)
    overviews: dict[Path, ShownOverview | None] = {}
    runs = run.runs()
    with reading(run_dir):
        num_bytes = sum(path.stat().st_size for each in runs for _, path in (*each.journals(), *each.timelines()))
    with Progress(f"reading {run_dir}", num_bytes, "bytes", large=LARGE_RUN_BYTES) as progress:
        from kvarts.cli import explain

        overviews.update({each.path: explain.overview_for(each, progress.update) for each in runs})
        page = render_html(run, overviews)
    write_whole(html_file, page)
    if not is_standard_output(html_file):
        say(f"kvarts: wrote {html_file}")
    open_page(html_file, opens=opens)

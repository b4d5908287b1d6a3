"""The part of `kvarts replay` that simulates prefill and decode on separate workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from kvarts.base.documents import Column, Document, Table
from kvarts.base.files import check_writable, is_standard_output, write_whole
from kvarts.base.settings import Given, Section
from kvarts.base.units import as_duration, as_hits, as_percent
from kvarts.cli import (
    kv_events,
    record,
)
from kvarts.cli.outputs import as_bytes, render_table
from kvarts.cli.parts import CommandPart, ReplayRun
from kvarts.cli.process import print_bytes, print_text, say, tell_whole_pages
from kvarts.plan.policy import with_policy
from kvarts.sim.fleet.config import SECTIONS, FleetConfig, FleetWorker, key_of_fleet, resolve_fleet
from kvarts.sim.report.run_directory import EVENTS, REPORT, REQUESTS, TIMELINE, of_replica

if TYPE_CHECKING:
    from kvarts.core.event_log import EventReader
    from kvarts.sim.fleet.report import FleetReport
    from kvarts.sim.traffic.trace import Trace

__all__ = ["PART", "FleetRun", "render_fleet", "with_eviction"]

WAITS = {
    "prefill_queue_ms": "prefill queue",
    "prefill_ms": "prefill",
    "reservation_ms": "reservation",
    "transfer_ms": "transfer",
    "decode_queue_ms": "decode queue",
    "first_step_ms": "first step",
}


COSTS = {
    "cost_per_million_output_tokens": "million output tokens",
    "cost_per_thousand_good": "thousand requests that keep the SLO",
}


def render_fleet(summary: dict[str, Any]) -> Document:
    """Return the table of a replay, followed by the fleet's rows: the parts of TTFT, each pool, links."""
    fleet = summary["fleet"]
    lines: list[str | Table] = [*render_table(summary).blocks, ""]
    if fleet["waits"] and summary["num_completed"]:
        names = ("mean", "p50", "p90", "p99", "max")
        waits = [[words, *(as_duration(fleet["waits"][part][name]) for name in names)] for part, words in WAITS.items()]
        lines += [Table([Column("of TTFT", 14, is_text=True), *(Column(name, 12) for name in names)], waits), ""]
    rows: list[tuple[str, str]] = []

    def add(name: str, *parts: str) -> None:
        rows.append((name, "".join(parts)))

    for model in fleet.get("models", ()):
        ttft, tpot = model["ttft_ms"], model["tpot_ms"]
        completed = f"{model['num_completed']:,} of {model['num_requests']:,} requests completed"
        add(f"{model['name']}  ", f"{completed}, {as_hits(model['prefix_hit_ratio'])} hits")
        add("", f"TTFT p50 {as_duration(ttft['p50'])}, p99 {as_duration(ttft['p99'])}; ",
            f"TPOT p50 {as_duration(tpot['p50'])}, p99 {as_duration(tpot['p99'])}")  # fmt: skip
    for pool in fleet["pools"]:
        add(f"{_pool(pool)}  ", f"{_workers(pool)}, {as_percent(pool['busy_pct'])} busy, ",
            f"pages: peak {as_percent(pool['peak_used_pct'])}, {pool['gpu_hours']:.3g} GPU hours")  # fmt: skip
    if "cost" in fleet:
        add("cost", _cost(fleet))
    if fleet["transferred_bytes"]:
        num_local = fleet.get("num_local_prefills", 0)
        local = f", {num_local:,} prompts computed where they are continued" if num_local else ""
        add("links", f"{as_bytes(fleet['transferred_bytes'])} sent{local}")
    if "store" in fleet:
        for store in fleet["store"] if "models" in fleet else [fleet["store"]]:
            add("store", _store(store))
    if "faults" in fleet:
        faults = fleet["faults"]
        add("faults", f"{faults['num_faults']:,}, {faults['num_failed_transfers']:,} transfers failed, ",
            f"{faults['num_restarted']:,} requests went on elsewhere, ",
            f"{faults['recomputed_tokens']:,} of their tokens computed again")  # fmt: skip
    if fleet["num_deadlocks"]:
        first = fleet["deadlocks"][0]
        add("DEADLOCK", f"{fleet['num_deadlocks']} times nothing could go on, first at {as_duration(first['at_ms'])} ",
            f"on worker {first['replica']}: request {first['request_id']} was given up")  # fmt: skip
    lines.append(Table([Column("", 14, is_text=True), Column("", 0, is_text=True)], rows))
    return Document.of(lines)


def _cost(fleet: dict[str, Any]) -> str:
    by_pool = " + ".join(f"{pool['cost']:,.3f} {pool['name']}" for pool in fleet["pools"])
    text = f"{fleet['cost']:,.3f}" + (f" = {by_pool}" if len(fleet["pools"]) > 1 else "")
    for key, words in COSTS.items():
        if fleet.get(key) is not None:
            text += f"; {fleet[key]:,.3f} per {words}"
    return text


def _store(store: dict[str, Any]) -> str:
    unit = "pages" if "pages" in store else "blocks"
    text = f"{store[unit]:,} {unit} ({as_bytes(store[unit] * store[unit.removesuffix('s') + '_bytes'])}), "
    if store[f"num_loaded_{unit}"]:
        text += f"{store[f'num_loaded_{unit}']:,} loaded, {as_percent(store['of_others_pct'])} of other workers, "
    else:
        text += "none loaded, "
    text += f"{store[f'num_evicted_{unit}']:,} evicted"
    if num_refused := store.get("num_pages_without_room") or store.get("num_parts_without_room"):
        text += f", {num_refused:,} without room"
    text += f"; busy: {as_percent(store['read_busy_pct'])} reading, {as_percent(store['write_busy_pct'])} writing"
    return text + (f", of {store['model']}" if "model" in store else "")


def _pool(pool: dict[str, Any]) -> str:
    """Return the name of a pool, and its role if that is another word."""
    return f"{pool['name']} ({pool['role']})" if pool["name"] != pool["role"] else f"{pool['role']} pool"


def _workers(pool: dict[str, Any]) -> str:
    mean = pool["mean_workers"]
    count = len(pool["replicas"])
    if mean is not None and abs(mean - count) > 1e-6:
        return f"{mean:.1f} workers on average"
    return "1 worker" if count == 1 else f"{count} workers"


class FleetPart(CommandPart):
    """Options of pools and links."""

    sections = SECTIONS

    def run(
        self, given: Given, trace: Path | None, sections: Sequence[Section], places: dict[str, Any]
    ) -> ReplayRun | None:
        """Return the run if any setting of a pool is given."""
        of_fleet = key_of_fleet(given)
        if of_fleet is None:
            return None
        if given.names("models"):
            what = "does not go with several models on a device: workers of a fleet have one model each"
            raise given.error(of_fleet, what, hint="Leave it out, or --model NAME=MODEL.")
        return FleetRun(given, trace, sections)


class FleetRun:
    """A replay on a fleet. Raises ConfigError when constructed, before any work is done."""

    def __init__(self, given: Given, trace: Path | None, sections: Sequence[Section]) -> None:
        self._given = given
        self._trace = trace
        self.config = resolve_fleet(given, sections)
        for pool in self.config.pools:
            workers = f"the workers in pool {pool.name or pool.role}"
            tell_whole_pages(pool.each, workers)
            if left_out := pool.left_out_by_audit(shares_memory=self.config.shares_memory):
                say(f"kvarts: the ledger of the audit does not follow {left_out}: of {workers}, laws are asserted")

    @property
    def inputs(self) -> list[Path]:
        """The trace that the settings file names."""
        return [self._given.path_of("trace")] if "trace" in self._given else []

    def outputs(self, places: Mapping[str, Any]) -> FleetOutputs:
        """Return the outputs, with their paths checked."""
        return FleetOutputs(self.config, places)

    def load(self) -> tuple[Trace, Sequence[Trace]]:
        """Load the trace."""
        from kvarts.cli.replaying import load_traffic

        trace = load_traffic(self._given, self._trace)
        self.config = with_eviction(self.config, self._given, trace)
        return trace, [trace]


def with_eviction(config: FleetConfig, given: Given, trace: Trace | None) -> FleetConfig:
    """Return `config` with the eviction policy that was given for all workers, if any. Raise ConfigError.

    `trace`: the requests, where they are known beforehand.
    """
    if "eviction" not in given:
        return config
    pools = (replace(pool, each=with_policy(pool.each, given, trace)) for pool in config.pools)
    return replace(config, pools=tuple(pools))


class FleetOutputs:
    """The files of one replay on a fleet, checked before it begins. Raises ConfigError and OutputError."""

    def __init__(self, config: FleetConfig, places: Mapping[str, Any]) -> None:
        self._as_json: bool = places["as_json"]
        self._every: int = places.get("timeline_every", 1)
        self._reports = _given(places["report_file"])
        self._requests = _given(places["requests_file"])
        self._timelines = _given(places.get("timeline_file"))
        self._journals = _given(places.get("events_file"))
        self._is_one = config.replicas == 1 and config.scaler is None
        record.check_timelines(self._timelines)
        of_workers = [
            self._of_worker(path, worker.index)
            for path in (*self._timelines, *self._journals)
            for worker in config.workers
        ]
        self.paths = [*self._reports, *self._requests, *_given(places.get("html_file")), *of_workers]
        for path in self.paths:
            check_writable(path)
        engines = [worker.pool.each for worker in config.workers]
        self._published: Any = None
        self._published = kv_events.publishing_of(engines, places, {"fleet": "pools"})
        self._run_dir: Path | None = places.get("run_dir")
        if self._run_dir is not None:
            self._reports.append(self._run_dir / REPORT)
            self._requests.append(self._run_dir / REQUESTS)
            self._timelines.append(self._run_dir / TIMELINE)
            self._journals.append(self._run_dir / EVENTS)

    def _of_worker(self, path: Path, worker: int) -> Path:
        """Return the file of a worker; those that a scaler adds have one each, too."""
        return path if self._is_one else of_replica(path, worker)

    @contextmanager
    def observers(self) -> Iterator[Callable[[FleetWorker], Sequence[EventReader]]]:
        """Yield a function that returns the observers of a worker: its journals, and the publisher of its KV events."""
        with ExitStack() as stack:
            open_journal: Any = None
            open_journal = stack.enter_context(record.open_journals()) if self._journals else None
            publisher_of = None if self._published is None else stack.enter_context(self._published.open())

            def observers_of(worker: FleetWorker) -> list[EventReader]:
                observers: list[EventReader] = []
                if open_journal is not None:
                    paths = [self._of_worker(path, worker.index) for path in self._journals]
                    observers += [open_journal(path, worker.pool.each) for path in paths]
                if publisher_of is not None:
                    observers.append(publisher_of(worker.index, worker.pool.each))
                return observers

            yield observers_of

    def write(self, report: FleetReport) -> None:
        """Write all files, and print the report unless one of them is standard output."""
        for path in self._requests:
            write_whole(path, report.requests_jsonl())
        if self._timelines:
            workers = range(len(report.step_logs))  # scaling may have added some
            groups = [[self._of_worker(path, worker) for worker in workers] for path in self._timelines]
            record.write_timelines(report, groups, every=self._every)
        if self._run_dir is not None:
            from kvarts.cli.outputs import write_about

            write_about(self._run_dir, report)
        for path in self._reports:
            write_whole(path, report.to_json())
        if not any(map(is_standard_output, self.paths)):
            if self._as_json:
                print_bytes(report.to_json())
            else:
                print_text(render_fleet(report.summary))


def _given(path: Path | None) -> list[Path]:
    return [] if path is None else [path]


PART = FleetPart()

"""A replay of several models: their traces, and the destinations of the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvarts.cli.outputs import ReplayFiles
from kvarts.cli.process import print_bytes, tell_whole_pages
from kvarts.cli.progress import Progress
from kvarts.cli.table import as_bytes
from kvarts.errors import ConfigError
from kvarts.files import check_writable, is_standard_output, write_whole, writing
from kvarts.report.run_directory import REPORT, named
from kvarts.report.words import number
from kvarts.settings import Given, Section
from kvarts.sharing.config import SharingConfig, resolve_shares
from kvarts.traffic.formats import load_trace
from kvarts.traffic.settings import reading_of
from kvarts.units import as_duration, as_percent

if TYPE_CHECKING:
    from kvarts.event_log import EventReader
    from kvarts.sharing.config import ObserversOf
    from kvarts.sharing.report import SharedReport
    from kvarts.traffic.trace import Trace

__all__ = ["SharedOutputs", "SharedRun", "render_shared_table"]

WIDTH = 14
LOANS = "loans.jsonl"


def render_shared_table(summary: dict[str, Any]) -> str:
    """Return the lines of the table, with a newline at the end."""
    models = summary["models"]
    devices = summary.get("devices", [])
    total = summary["total"] if devices else summary["device"]
    split = "split, nothing is lent" if total["static_split"] else "shared"
    rows: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("trace", lambda model: _fit(model["trace"])),
        ("requests", lambda model: f"{model['num_completed']:,}"),
        ("rejected", lambda model: f"{model['num_rejected']:,}"),
        ("failed", lambda model: f"{model['num_failed']:,}"),
        ("TTFT mean", lambda model: as_duration(model["ttft_ms"]["mean"])),
        ("TTFT p50", lambda model: as_duration(model["ttft_ms"]["p50"])),
        ("TTFT p99", lambda model: as_duration(model["ttft_ms"]["p99"])),
        ("ITL mean", lambda model: as_duration(model["itl_ms"]["mean"])),
        ("ITL p99", lambda model: as_duration(model["itl_ms"]["p99"])),
        ("out tokens/s", lambda model: number(model["output_throughput_tokens_per_s"])),
        ("prefix hits", lambda model: as_percent(model["prefix_hit_ratio"])),
        ("preempted", lambda model: f"{model['num_preemptions_inside']:,}"),
        ("for others", lambda model: f"{model['num_preemptions_for_others']:,}"),
        ("share owned", lambda model: as_percent(model["share_owned"])),
        ("of tokens", lambda model: as_percent(model["share_of_tokens"])),
        ("of time", lambda model: as_percent(model["share_of_time"])),
        ("KV guarantee", lambda model: as_bytes(model["guaranteed_bytes"])),
        ("KV peak used", lambda model: as_bytes(model["peak_used_bytes"])),
    ]
    kv_bytes = as_bytes(devices[0]["kv_bytes"] if devices else total["kv_bytes"])
    whole = f"{kv_bytes} of KV memory, {total['max_batched_tokens']:,} tokens a step"
    where = f"{len(devices)} devices" if devices else "one device"
    lines = [
        f"{len(models)} models on {where}, {split}: {whole}{' each' if devices else ''}",
        "",
        f"{'':<13}" + "".join(f"{_fit(name):>{WIDTH}}" for name in models),
    ]
    for title, value in rows:
        lines.append(f"{title:<13}" + "".join(f"{value(model):>{WIDTH}}" for model in models.values()))
    rate = number(total["output_throughput_tokens_per_s"])
    busy = f"{as_duration(total['duration_ms'])}, computing {as_percent(total['busy_pct'])} of it"
    lines += ["", *_promise(total), f"fairness     {_fairness(total)}", f"duration     {busy}; {rate} out tokens/s"]
    for place, device in enumerate(devices):
        counts = f"{device['num_requests']:,} requests, computing {as_percent(device['busy_pct'])} of the time"
        rate = number(device["output_throughput_tokens_per_s"])
        lines += [f"{f'device {place}':<13}{counts}; {rate} out tokens/s", *_loans(device)]
    if not devices:
        lines += _loans(total)
    return "\n".join(lines) + "\n"


def _fairness(device: dict[str, Any]) -> str:
    fairness = device["jain_index"]
    return "nothing was contested" if fairness is None else f"Jain's index {fairness:.3f} of contested time by share"


def _promise(total: dict[str, Any]) -> list[str]:
    """Return rows with the worst ratio of any model to each baseline."""
    names = {"split": "its static split", "slice": "its slice, alone"}
    lines: list[str] = []
    for baseline, found in (total["worst_ratio"] or {}).items():
        title = "worst ratio" if not lines else ""
        if found is None:
            lines.append(f"{title:<13}nothing to compare with {names[baseline]}")
        else:
            of = f"{found['model']}, {found['of']} TTFT"
            lines.append(f"{title:<13}{found['ratio']:.2f} of {names[baseline]} ({of})")
    return lines


def _loans(device: dict[str, Any]) -> list[str]:
    lines = []
    for loan in device["loans"]:
        sizes = f"peak {as_bytes(loan['peak_bytes'])}, mean {as_bytes(loan['mean_bytes'])}"
        pair = f"{loan['lender']} to {loan['borrower']}"
        lines.append(f"loans        {pair}: {sizes}, {as_percent(loan['share_of_time'])} of the time")
    return lines


def _fit(text: str) -> str:
    return text if len(text) < WIDTH else text[: WIDTH - 2] + "…"


class SharedRun:
    """One replay of several models. Raises ConfigError when constructed, before any work is done."""

    def __init__(self, given: Given, trace: Path | None, sections: Sequence[Section], loans_file: Path | None) -> None:
        if trace is not None:
            raise ConfigError("each model has its own", field="TRACE", hint="Give --trace NAME=FILE for each.")
        for key in ("trace", "workload"):
            if key in given:
                raise given.error(key, "is for a replay of one model", hint="Each of several has its own trace.")
        self._given = given
        self._loans_file = loans_file
        self._paths: dict[str, Path] = {}
        for key in given.in_table("models"):
            if key.endswith(".trace"):
                self._paths[key.removeprefix("models.").removesuffix(".trace")] = given.path_of(key)
        self.config: SharingConfig = resolve_shares(given, sections)
        try:
            self.config.check_traces(self._paths)
        except ConfigError as error:
            raise given.named(error, ()) from error
        for name, of_model in self.config.configs.items():
            tell_whole_pages(of_model, name)

    @property
    def inputs(self) -> list[Path]:
        """The traces."""
        return list(self._paths.values())

    def outputs(self, places: Mapping[str, Any]) -> SharedOutputs:
        """Return the outputs, with their paths checked."""
        return SharedOutputs(self.config, loans_file=self._loans_file, **places)

    def load(self) -> tuple[dict[str, Trace], Sequence[Trace]]:
        """Load the trace of each model."""
        with Progress("reading traces"):
            traces = {name: load_trace(self._paths[name], **reading_of(self._given)) for name in self.config.models}
        return traces, list(traces.values())


class SharedOutputs:
    """The files of one replay of several models, checked before it begins; a model's files have its name.

    Raises ConfigError and OutputError.
    """

    def __init__(
        self,
        config: SharingConfig,
        *,
        as_json: bool,
        report_file: Path | None,
        requests_file: Path | None,
        run_dir: Path | None,
        loans_file: Path | None,
        html_file: Path | None = None,
        **places: Any,
    ) -> None:
        self._as_json = as_json
        self._num_replicas = config.each.replicas
        self._reports = [path for path in (report_file,) if path is not None]
        self._loans = [path for path in (loans_file,) if path is not None]
        named_paths = [*self._reports, *self._loans, *(path for path in (html_file,) if path is not None)]
        for path in named_paths:
            check_writable(path)
        if run_dir is not None:
            self._reports.append(run_dir / REPORT)
            self._loans.append(run_dir / LOANS)
            for name in config.configs:
                with writing(run_dir / name):
                    (run_dir / name).mkdir()
        self._outputs = {
            name: ReplayFiles(
                of_model,
                as_json=False,
                report_file=None,
                requests_file=named(requests_file, name),
                run_dir=None if run_dir is None else run_dir / name,
                model=name,
                **places,
            )
            for name, of_model in config.configs.items()
        }
        self.paths = [*named_paths, *(path for outputs in self._outputs.values() for path in outputs.paths)]

    @contextmanager
    def observers(self) -> Iterator[ObserversOf]:
        """Yield a function that returns the observers of a model's events, or of a model on one replica."""
        with ExitStack() as stack:
            observers: dict[str | tuple[str, int], Sequence[EventReader]] = {}
            for name, outputs in self._outputs.items():
                of_replica = stack.enter_context(outputs.observers())
                observers[name] = of_replica(0)
                observers.update({(name, number): of_replica(number) for number in range(self._num_replicas)})
            yield observers.__getitem__

    def write(self, report: SharedReport) -> None:
        """Write the remaining files, and print the report unless one of the files is standard output."""
        for name, outputs in self._outputs.items():
            outputs.write_files(report.reports[name])
        for path in self._reports:
            write_whole(path, report.to_json())
        for path in self._loans:
            write_whole(path, report.loans_jsonl())
        if not any(map(is_standard_output, self.paths)):
            print_bytes(report.to_json() if self._as_json else render_shared_table(report.summary).encode())

"""The part of `kvarts replay` that is about several models on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvarts.cli.outputs import Outputs, make_directory, print_bytes
from kvarts.cli.sharedtable import render_shared_table
from kvarts.errors import ConfigError
from kvarts.files import check_writable, write_whole
from kvarts.report.run_directory import REPORT, named
from kvarts.sharing.config import SharingConfig, parse_share, resolve_sharing
from kvarts.sharing.replay import replay_shared
from kvarts.traffic.formats import load_trace

if TYPE_CHECKING:
    from kvarts.traffic.trace import Trace

__all__ = ["SharedRun"]

LOANS = "loans.jsonl"


class SharedRun:
    """One replay of several models: settings from a file and the command line, traces, and where results go.

    `values`: settings by their file names; `models` may be among them, a table for each, with its `trace`. `shares`
    and `traces` are `NAME=...`, as on the command line, and win. `reading`: how traces are read, see load_trace.
    Raises ConfigError and OutputError before anything is done.
    """

    def __init__(
        self,
        values: dict[str, Any],
        *,
        shares: Sequence[str],
        traces: Sequence[str],
        config_file: Path | None,
        reading: dict[str, Any],
    ) -> None:
        models: dict[str, dict[str, Any]] = {}
        paths: dict[str, Path] = {}
        for name, table in values.pop("models", {}).items():
            if not isinstance(table, dict):
                raise ConfigError("must be a table", path=config_file, field=f"models.{name}")
            models[name] = dict(table)
            if "trace" in table:
                assert config_file is not None
                paths[name] = config_file.parent / models[name].pop("trace")
        for text in shares:
            name, fields = parse_share(text)
            models[name] = {**models.get(name, {}), **fields}
        for text in traces:
            name, equals, path = text.partition("=")
            if not equals:
                raise ConfigError(f"{text!r} is not NAME=FILE", field="trace", hint="Name the model it is for.")
            paths[name] = Path(path)
        self.config: SharingConfig = resolve_sharing({**values, "models": models})
        self.config.check_traces(paths)
        self._paths = {name: paths[name] for name in models}
        self._reading = reading

    def open_outputs(
        self,
        *,
        as_json: bool,
        report_file: Path | None,
        requests_file: Path | None,
        run_dir: Path | None,
        part_values: Mapping[str, Any],
        loans_file: Path | None,
    ) -> None:
        """Checks where results go; those of a model carry its name."""
        self._as_json = as_json
        self._reports = [path for path in (report_file,) if path is not None]
        self._loans = [path for path in (loans_file,) if path is not None]
        for path in (*self._reports, *self._loans):
            check_writable(path)
        if run_dir is not None:
            make_directory(run_dir)
            self._reports.append(run_dir / REPORT)
            self._loans.append(run_dir / LOANS)
        self._outputs = {
            name: Outputs(
                config,
                as_json=False,
                report_file=None,
                requests_file=named(requests_file, name),
                run_dir=None if run_dir is None else run_dir / name,
                part_values=part_values,
                model=name,
            )
            for name, config in self.config.configs.items()
        }

    def load(self) -> dict[str, Trace]:
        """The trace of each model."""
        return {name: load_trace(path, **self._reading) for name, path in self._paths.items()}

    def run(self, traces: Mapping[str, Trace], on_progress: Callable[[int], object] | None) -> None:
        """Replays, and writes everything."""
        with ExitStack() as stack:
            observers = {name: stack.enter_context(outputs.observers())(0) for name, outputs in self._outputs.items()}
            report = replay_shared(traces, self.config, on_progress=on_progress, observers_of=observers.__getitem__)
        for name, outputs in self._outputs.items():
            outputs.write_files(report.reports[name])
        for path in self._reports:
            write_whole(path, report.to_json())
        for path in self._loans:
            write_whole(path, report.loans_jsonl())
        print_bytes(report.to_json() if self._as_json else render_shared_table(report.summary).encode())

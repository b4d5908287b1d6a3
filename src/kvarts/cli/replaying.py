"""A replay as a command runs it, once its command line is read: settings, traffic, results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from kvarts.base.files import PREFIX, SAMPLES, check_outputs, new_directory, read_toml
from kvarts.base.settings import Flags, Given, Section, given_in
from kvarts.cli.effects import TABLES
from kvarts.cli.outputs import check_opening, write_run_page
from kvarts.cli.process import Progress, is_compiled, reading_progress, say, tell_whole_pages
from kvarts.sim.config import SECTIONS, resolve_replay
from kvarts.sim.report.run_directory import REPORT
from kvarts.sim.traffic.settings import SECTION as TRAFFIC
from kvarts.sim.traffic.settings import load_given

if TYPE_CHECKING:
    from kvarts.cli.parts import CommandPart, Outputs, ReplayRun
    from kvarts.sim.traffic.trace import Trace

__all__ = [
    "OWN_SECTIONS",
    "OneRun",
    "all_sections",
    "load_traffic",
    "nothing_fits",
    "over_sample_settings",
    "paths_in",
    "read_settings",
    "run_replay",
    "set_by",
]

LONG_S = 60.0
"""A replay that takes longer says whether there is a faster build."""
SAMPLE = "agents"
SAMPLE_SETTINGS = {"model": "llama-3.1-8b", "device": "h100-80gb"}
"""By their keys. With these, the pages nearly suffice for the prefixes that the sessions return to."""
INCONCLUSIVE = 6

OWN_SECTIONS = (*SECTIONS, TRAFFIC)


def load_traffic(given: Given, trace: Path | str | None) -> Trace:
    """Load the trace named on the command line, else the traffic that the settings file describes, else the sample."""
    with Progress("reading the trace") if trace is None else reading_progress(trace) as progress:
        found = load_given(given, trace, progress.update)
    if found is None:
        say(f"kvarts: replaying {SAMPLES[SAMPLE].what}; give a TRACE to replay your own")
        found = load_given(given, f"{PREFIX}{SAMPLE}")
    assert found is not None
    return found


def over_sample_settings(given: Given, sections: Sequence[Section]) -> Given:
    """Return the given settings, with the sample's model and device for those that are missing.

    If `cost` is given, nothing is added: it determines the time of steps without a model and device.
    """
    sample = Given()
    spellings = Flags({key: f"{key} of the sample" for key in SAMPLE_SETTINGS})
    if "cost" not in given:
        for setting in (setting for section in sections if not section.is_named for setting in section.settings):
            if setting.key in SAMPLE_SETTINGS:
                sample.add(setting, SAMPLE_SETTINGS[setting.key], spellings)
    return given.over(sample)


def all_sections() -> tuple[Section, ...]:
    """Return all settings, including those of the parts."""
    from kvarts.cli.parts import load_parts

    return (*OWN_SECTIONS, *(section for part in load_parts() for section in part.sections))


def run_replay(
    given: Given,
    trace: Path | None,
    sections: Sequence[Section],
    parts: Sequence[CommandPart],
    places: dict[str, Any],
    *,
    check_effects: Callable[[Callable[[str], bool]], None],
    config_file: Path | None = None,
    html_file: Path | None = None,
    opens: bool = False,
) -> int:
    """Replay as the settings `given` ask for, and write the results; return the exit code.

    `parts`: those whose options the command line may have. `places`: the options of results. `check_effects` is called
    with a function that returns whether an option is set.
    """
    from kvarts.sim.replaying import replay  # which a mock, whose settings are read here as well, does not need

    for part in parts:
        part.check(given)
    check_effects(set_by(given, sections))
    runs: list[ReplayRun | None] = []
    if parts:
        runs += [part.run(given, trace, sections, places) for part in parts]
    if trace is None and config_file is None:
        given = over_sample_settings(given, sections)
    run: ReplayRun = next((run for run in runs if run is not None), None) or OneRun(given, trace, sections, parts)
    run_dir: Path | None = places.pop("run_dir")
    workers: int | None = places.pop("workers")
    check_opening(html_file, opens=opens)
    with ExitStack() as stack:
        folder = None if run_dir is None else stack.enter_context(_new_directory(run_dir))
        if folder is None and html_file is not None:
            from kvarts.base.leftovers import temporary_folder

            folder = stack.enter_context(temporary_folder())
        outputs = run.outputs({**places, "run_dir": folder, "html_file": html_file})
        if outputs.paths:
            inputs = [path for path in (trace, config_file, *run.inputs, *paths_in(given)) if path is not None]
            check_outputs(outputs.paths, inputs, run_dir=run_dir)
        traffic, traces = run.load()
        with outputs.observers() as observers_of, _progress(traces) as progress:
            begun_s = monotonic()
            report = replay(
                traffic, run.config, workers=workers, on_progress=progress.update, observers_of=observers_of
            )
        if monotonic() - begun_s >= LONG_S and not is_compiled():
            say(
                "kvarts: this is the interpreted build; the compiled one, in the wheels of some platforms or with "
                "KVARTS_COMPILE=1 pip install, takes about half the time"
            )
        outputs.write(report)
        if folder is not None and html_file is not None:
            write_run_page(folder, html_file, opens=opens)
    return INCONCLUSIVE if nothing_fits(report.summary) else 0


def _new_directory(run_dir: Path) -> AbstractContextManager[Path]:
    return new_directory(run_dir, last=REPORT)


def nothing_fits(summary: Mapping[str, Any]) -> bool:
    """Return whether a replay has no results because every request was rejected."""
    return not summary.get("num_completed", 1) and bool(summary["num_rejected"])


def set_by(given: Given, sections: Sequence[Section]) -> Callable[[str], bool]:
    """Return a function that returns whether an option, `--option=value` or a table `[[name]]` was given."""
    keys: dict[str | None, str] = {}

    def is_set(what: str) -> bool:
        if not keys:  # only where it matters: a command without options has no use for its settings
            keys.update(
                (each.flag, each.key) for section in sections if not section.is_named for each in section.settings
            )
        if what.startswith("[["):
            return bool(given.names(what.strip("[]")))
        flag, equals, value = what.partition("=")
        if flag in TABLES:
            return bool(given.in_table(flag.removeprefix("--")))
        key = keys.get(flag)
        return key is not None and key in given and (not equals or str(given[key]) == value)

    return is_set


def paths_in(given: Given) -> list[Path]:
    """Return the files that settings name: those of models and costs."""
    keys = [key for key in ("model", "cost", *given.in_table("models")) if key in given]
    texts = [given[key] for key in keys if key.rpartition(".")[2] in ("model", "cost")]
    return [Path(text) for text in texts if isinstance(text, str)]


def read_settings(config_file: Path | None, sections: Sequence[Section]) -> Given:
    """Return a file's settings. Raise ConfigError for an unknown key, MissingFileError and InputError for the file."""
    if config_file is None:
        return Given()
    return given_in(read_toml(config_file, hint="Check the path of the configuration."), sections, config_file)


class OneRun:
    """A replay of one model. Raises ConfigError when constructed, before any work is done.

    `parts`: those whose results it writes; None for all.
    """

    def __init__(
        self,
        given: Given,
        trace: Path | str | None,
        sections: Sequence[Section],
        parts: Sequence[CommandPart] | None = None,
    ) -> None:
        self._given = given
        self._trace = trace
        self._parts = parts
        self.config = resolve_replay(given, sections)
        tell_whole_pages(self.config)

    @property
    def inputs(self) -> list[Path]:
        """The trace that the settings file names."""
        return [self._given.path_of("trace")] if "trace" in self._given else []

    def outputs(self, places: Mapping[str, Any]) -> Outputs:
        """Return the outputs, with their paths checked."""
        from kvarts.cli.outputs import ReplayFiles

        return ReplayFiles(self.config, parts=self._parts, **places)

    def load(self) -> tuple[Trace, Sequence[Trace]]:
        """Load the trace."""
        trace = load_traffic(self._given, self._trace)
        return trace, [trace]


def _progress(traces: Sequence[Trace]) -> Progress:
    known = [trace.requests for trace in traces]
    num_requests = sum(map(len, filter(None, known))) if None not in known else None
    return Progress("replaying", num_requests, "requests")

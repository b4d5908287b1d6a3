"""`kvarts replay`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvarts.cli.effects import check_effects
from kvarts.cli.options import DERIVED, DIRECTORY, INPUT, Command, given_by_flags, grouped, options_of
from kvarts.cli.outputs import check_opening, open_option, write_run_page
from kvarts.cli.parts import CommandPart, Outputs, ReplayRun, concern_parts, load_parts
from kvarts.cli.process import Progress, tell_whole_pages
from kvarts.files import PREFIX, SAMPLES, check_outputs
from kvarts.report.run_directory import REPORT
from kvarts.settings import Flags, Given, Section, given_in
from kvarts.sim.config import SECTIONS, resolve_replay
from kvarts.traffic.settings import SECTION as TRAFFIC
from kvarts.traffic.settings import load_given

if TYPE_CHECKING:
    from kvarts.traffic.trace import Trace

__all__ = [
    "OWN_SECTIONS",
    "OneRun",
    "ReplayCommand",
    "all_sections",
    "load_traffic",
    "over_sample_settings",
    "paths_in",
    "read_settings",
    "replay_command",
    "set_by",
]

SAMPLE = "agents"
SAMPLE_SETTINGS = {"model": "llama-3.1-8b", "device": "h100-80gb"}
"""By their keys. With these, the pages nearly suffice for the prefixes that the sessions return to."""
INCONCLUSIVE = 6

OWN_SECTIONS = (*SECTIONS, TRAFFIC)

result = grouped("Results")


def load_traffic(given: Given, trace: Path | None) -> Trace:
    """Load the trace named on the command line, else the traffic that the settings file describes, else the sample."""
    with Progress("reading the trace" if trace is None else f"reading {trace}"):
        found = load_given(given, trace)
    if found is None:
        click.echo(f"kvarts: replaying {SAMPLES[SAMPLE].what}; give a TRACE to replay your own", err=True)
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
    return (*OWN_SECTIONS, *(section for part in load_parts() for section in part.sections))


class ReplayCommand(Command):
    """The command, whose settings become options when its parameters are first read.

    `sections`: the settings among its options; None for all, including those of parts. A command line is parsed by a
    copy with fewer, so that parts are imported only if one of them may have to see it.
    """

    sections: tuple[Section, ...] | None = None
    _all: list[click.Parameter] | None = None

    @property
    def params(self) -> list[click.Parameter]:
        """The argument and the options of the settings, then the options of the command itself."""
        if self._all is None:
            self._all = [*_declared(self.sections), *self._own]
        return self._all

    @params.setter
    def params(self, own: list[click.Parameter]) -> None:
        self._own = own

    @property
    def parts(self) -> tuple[CommandPart, ...]:
        """The parts whose options are declared."""
        return load_parts() if self.sections is None else ()

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parse `args` with the options that they need."""
        command = self if extra.get("resilient_parsing") else self._for(args)  # completion has to know all
        return super(ReplayCommand, command).make_context(info_name, args, parent, **extra)

    def _for(self, args: Sequence[str]) -> ReplayCommand:
        fewer = self._with_only(())
        if not {word.partition("=")[0] for word in args if word.startswith("-")} <= _names(self._own):
            fewer = self._with_only(OWN_SECTIONS)
        return self if concern_parts(args, _names(fewer.params)) else fewer

    def _with_only(self, sections: tuple[Section, ...]) -> ReplayCommand:
        fewer = ReplayCommand.__new__(ReplayCommand)
        fewer.__dict__.update(self.__dict__, sections=sections, _all=None)
        return fewer


def _names(params: Sequence[click.Parameter]) -> set[str]:
    return {name for param in params for name in param.opts}


def _declared(sections: Sequence[Section] | None) -> list[click.Parameter]:
    """Return the argument, and the options of the settings; a part's own option replaces one with the same flag."""
    by_flag: dict[str, click.Option] = {}
    for option in options_of(all_sections() if sections is None else sections):
        by_flag.setdefault(option.opts[0], option)
    if sections is None:
        by_flag.update({option.opts[0]: option for part in load_parts() for option in part.options()})
    return [click.Argument(["trace"], required=False, type=INPUT), *by_flag.values()]


@click.command("replay", cls=ReplayCommand, no_args_is_help=False, checks_effects=True)
@click.option("--config", "config_file", metavar="FILE", type=INPUT,
              help="TOML file with these settings by their long names (max_seqs for --max-seqs), and trace "
              "or a [workload] table. Options given here win.")  # fmt: skip
@result("--json", "as_json", is_flag=True, help="Print the report as JSON instead of a table.")
@result("--report", "report_file", metavar="FILE", type=DERIVED,
        help="Write the report as JSON to FILE.")  # fmt: skip
@result("--requests", "requests_file", metavar="FILE", type=DERIVED,
        help="Write one JSON line a request to FILE, in arrival order.")  # fmt: skip
@result("--html", "html_file", metavar="FILE", type=DERIVED,
        help="Write a page to FILE that shows the run, and needs nothing else.")  # fmt: skip
@open_option(result)
@result("--run-dir", metavar="DIR", type=DIRECTORY,
        help="Write everything about the run to DIR, a new directory, for `kvarts report`: report, requests, "
        "timeline, events. With several models, a directory each in it.")  # fmt: skip
def replay_command(
    trace: Path | None,
    config_file: Path | None,
    html_file: Path | None,
    opens: bool,
    **params: Any,
) -> int:
    """Replay traffic through the KV-cache control plane, in virtual time.

    TRACE is a Mooncake JSONL file, a .csv of Azure's 2023 traces, or a .json of kv-cache-tester or a directory of them.
    Without it, a bundled sample is replayed: twelve sessions of coding agents, and without --config on llama-3.1-8b on
    an h100-80gb, unless options override that. The report is printed on standard output, everything else on standard
    error. The exit code is 6 if no request fits into the memory.
    """
    context = click.get_current_context()
    assert isinstance(context.command, ReplayCommand)
    parts = context.command.parts
    sections = all_sections() if parts else OWN_SECTIONS
    given = _given_on_command_line(params, sections, parts).over(read_settings(config_file, sections))
    for part in parts:
        part.check(given)
    check_effects(context, is_set=set_by(given, sections))
    runs = [part.run(given, trace, sections, params) for part in parts]
    if trace is None and config_file is None:
        given = over_sample_settings(given, sections)
    run: ReplayRun = next((run for run in runs if run is not None), None) or OneRun(given, trace, sections, parts)
    run_dir: Path | None = params.pop("run_dir")
    check_opening(html_file, opens=opens)
    inputs = [path for path in (trace, config_file, *run.inputs, *paths_in(given)) if path is not None]
    with ExitStack() as stack:
        folder = None if run_dir is None else stack.enter_context(_new_directory(run_dir))
        if folder is None and html_file is not None:
            from tempfile import TemporaryDirectory

            folder = Path(stack.enter_context(TemporaryDirectory(prefix="kvarts-")))
        outputs = run.outputs({**params, "run_dir": folder, "html_file": html_file})
        check_outputs(outputs.paths, inputs, run_dir=run_dir)
        from kvarts.sim.replay import replay

        traffic, traces = run.load()
        with outputs.observers() as observers_of, _progress(traces) as progress:
            report = replay(traffic, run.config, on_progress=progress.update, observers_of=observers_of)
        outputs.write(report)
        if folder is not None and html_file is not None:
            write_run_page(folder, html_file, opens=opens)
    return INCONCLUSIVE if nothing_fits(report.summary) else 0


def _new_directory(run_dir: Path) -> AbstractContextManager[Path]:
    from kvarts.files import new_directory

    return new_directory(run_dir, last=REPORT)


def nothing_fits(summary: Mapping[str, Any]) -> bool:
    """Return whether a replay has no results because every request was rejected."""
    return not summary.get("num_completed", 1) and bool(summary["num_rejected"])


def set_by(given: Given, sections: Sequence[Section]) -> Callable[[str], bool]:
    """Return a function that returns whether an option, `--option=value` or a table `[[name]]` was given."""
    keys = {each.flag: each.key for section in sections if not section.is_named for each in section.settings}

    def is_set(what: str) -> bool:
        if what.startswith("[["):
            return bool(given.names(what.strip("[]")))
        flag, equals, value = what.partition("=")
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
    from kvarts.files import read_toml

    return given_in(read_toml(config_file, hint="Check the path of the configuration."), sections, config_file)


def _given_on_command_line(params: dict[str, Any], sections: Sequence[Section], parts: Sequence[CommandPart]) -> Given:
    """Return the settings from options, and leave the other options in `params`."""
    given = given_by_flags(params, sections)
    for name in list(params):
        if name.startswith("set_"):
            del params[name]
    for part in parts:
        given = part.given(params).over(given)
    return given


class OneRun:
    """A replay of one model. Raises ConfigError when constructed, before any work is done.

    `parts`: those whose results it writes; None for all.
    """

    def __init__(
        self, given: Given, trace: Path | None, sections: Sequence[Section], parts: Sequence[CommandPart] | None = None
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

"""The part of `kvarts replay` for several models on one device: its options, their traces, and where the results go."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import msgspec

from kvarts.base.documents import Column, Document, Table
from kvarts.base.errors import ConfigError
from kvarts.base.files import check_writable, is_standard_output, write_whole, writing
from kvarts.base.settings import Flags, Given, Section, setting, settings_of
from kvarts.base.units import as_duration, as_hits, as_percent
from kvarts.cli import (
    kv_events,
)
from kvarts.cli.options import DERIVED, GroupedOption, KeyOption
from kvarts.cli.outputs import ReplayFiles, as_bytes
from kvarts.cli.parts import CommandPart, ReplayRun
from kvarts.cli.process import Progress, print_bytes, print_text, tell_whole_pages
from kvarts.plan.policy import check_policy, with_policy
from kvarts.sim.hardware import DeviceSettings, ModelSettings
from kvarts.sim.report.run_directory import REPORT, named
from kvarts.sim.report.words import number
from kvarts.sim.sharing.config import SECTIONS, ModelShare, SharingConfig, resolve_shares
from kvarts.sim.traffic.formats import load_trace
from kvarts.sim.traffic.settings import reading_of

if TYPE_CHECKING:
    from kvarts.core.event_log import EventReader
    from kvarts.sim.sharing.config import ObserversOf
    from kvarts.sim.sharing.report import SharedReport
    from kvarts.sim.traffic.trace import Trace

__all__ = ["PART", "SharedOutputs", "SharedRun", "parse_share", "render_shared_table"]

MODELS = "models"
TITLE = "Several models"
NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
WIDTH = 14
LOANS = "loans.jsonl"
EVICTION = "eviction"
NUMBERS: dict[str, Callable[[str], Any]] = {
    "weight": float,
    "floor": int,
    "ceiling": int,
    "priority": int,
    "kv_bytes_per_token": int,
    "speculative_tokens": int,
}
LISTS = ("acceptance",)
"""Those of them with values that contain commas."""


class ModelTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a table [models.NAME] in addition to those of a model."""

    trace: Annotated[str | None, setting("Path of its trace, relative to this file.", flag=None)] = None


class ModelPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The eviction policy of a model, by name; the room `plan` has the policies."""

    eviction: Annotated[
        str | None, setting("Which cached pages of the model go next, as --eviction.", metavar="NAME", default="lru")
    ] = None


OF_MODEL = (ModelShare, ModelPolicy)
"""The settings of a model after its name in `--model`."""


class SharingPart(CommandPart):
    """Names of models, their traces, and settings of the shared device."""

    of_one_model = False
    sections = (
        *SECTIONS,
        Section(struct=ModelTraffic, title=TITLE, table=MODELS, is_named=True),
        Section(struct=ModelPolicy, title=TITLE, table=MODELS, is_named=True),
    )

    def options(self) -> Sequence[click.Option]:
        """Return `--model`, which may be repeated for several models, `--trace` and the key `loans`."""
        (model,) = (each for each in settings_of(ModelSettings) if each.key == "model")
        several = (
            " Several models on one device: --model NAME=MODEL for each, and after a colon its weight=2, floor=100, "
            "ceiling=800 (per mille of the time), guarantee=20GiB or 0.3, priority=1, weight_dtype=fp8, "
            "kv_dtype=fp8, cost=FILE, kv_groups=all, eviction=auto."
        )
        return (
            GroupedOption(
                ["--model", "models"], group="Model and device", key="model", default=None, multiple=True,
                metavar="NAME", help=model.help + several,
            ),
            GroupedOption(
                ["--trace", "traces"], group=TITLE, multiple=True, metavar="NAME=FILE",
                help="The traffic of one.",
            ),
            KeyOption(
                ["--loans", "loans_file"], group=TITLE, metavar="FILE", type=DERIVED,
                help="Write which model owed which one memory, and when, to FILE, a JSON line for "
                "each period without a pause.",
            ),
        )  # fmt: skip

    def given(self, params: dict[str, Any]) -> Given:
        """Return the settings from `--model` and `--trace`."""
        given = Given()
        texts, traces = params.pop("models") or (), params.pop("traces")
        if any(re.match(f"{NAME}=", text) for text in texts):
            for text in texts:
                name, fields = parse_share(text)
                if name in given.names(MODELS):
                    raise ConfigError(
                        "is given twice", field=f"--model {name}", hint="Give each model a different name."
                    )
                self._add(given, name, fields, OF_MODEL, f"--model {name}")
        elif len(texts) > 1:
            raise ConfigError(
                "several models need names", field="--model", hint="Each: --model NAME=MODEL and --trace NAME=FILE."
            )
        for text in texts:
            if not given.names(MODELS):
                (model,) = (each for each in settings_of(ModelSettings) if each.key == "model")
                given.add(model, text, Flags())
        for text in traces:
            name, equals, path = text.partition("=")
            if not equals:
                raise ConfigError(f"{text!r} is not NAME=FILE", field="--trace", hint="Name the model it is for.")
            if f"{MODELS}.{name}.trace" in given:
                raise ConfigError("is given twice", field=f"--trace {name}", hint="Keep one of them.")
            self._add(given, name, {"trace": path}, (ModelTraffic,), f"--trace {name}", is_model=False)
        return given

    def _add(
        self,
        given: Given,
        name: str,
        fields: dict[str, Any],
        structs: Sequence[type[msgspec.Struct]],
        flag: str,
        *,
        is_model: bool = True,
    ) -> None:
        table = f"{MODELS}.{name}"
        settings = {each.field: each for struct in structs for each in settings_of(struct, table)}
        spellings = {each.key: f"{flag}: {each.field}" if is_model else flag for each in settings.values()}
        source = Flags({**spellings, f"[{table}]": flag})
        if is_model:
            given.add_name(MODELS, name, source)
        for field, value in fields.items():
            given.add(settings[field], value, source)

    def check(self, given: Given) -> None:
        """Raise ConfigError for an unknown eviction policy of a model."""
        for name in given.names(MODELS):
            key = f"{MODELS}.{name}.{EVICTION}"
            if key in given:
                check_policy(given, key)

    def run(
        self, given: Given, trace: Path | None, sections: Sequence[Section], places: dict[str, Any]
    ) -> ReplayRun | None:
        """Return the run if models have names. Raise ConfigError if only settings of sharing are given."""
        loans_file = places.pop("loans_file")
        if given.names(MODELS):
            return SharedRun(given, trace, sections, loans_file)
        of_device = settings_of(DeviceSettings)
        own = [each.key for each in settings_of(SharingConfig) if each not in of_device]
        why, hint = "is for several models on one device", "Give --model NAME=MODEL for each of them."
        for key in (*given.in_table(MODELS), *own):
            if key in given:
                raise given.error(key, why, hint=hint)
        if loans_file is not None:
            raise ConfigError(why, field="loans", hint=hint)
        return None


def parse_share(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name in a text such as `chat=llama-3.1-8b:weight=2,guarantee=20GiB`, and the fields of its ModelShare.

    Raise ConfigError for an unknown field, or one that must be a number and is not.
    """
    known = [each.field for struct in OF_MODEL for each in settings_of(struct)]
    name, equals, rest = text.partition("=")
    if not equals or not re.fullmatch(NAME, name):
        raise ConfigError(
            f"{text!r} is not NAME=MODEL",
            field="--model",
            hint="With several models: --model chat=llama-3.1-8b:weight=2.",
        )
    model, _, options = rest.partition(":")
    fields: dict[str, Any] = {"model": model} if model else {}
    key = ""
    for part in filter(None, options.split(",")):
        if key in LISTS and "=" not in part:
            fields[key] += f",{part.strip()}"
            continue
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals or key not in known:
            raise ConfigError(
                f"{part!r} is not known",
                field=f"--model {name}",
                hint=f"Known: {', '.join(known[1:])}, each with =VALUE.",
            )
        if key in fields:
            raise ConfigError("is given twice", field=f"--model {name}: {key}", hint="Keep one of them.")
        fields[key] = value.strip()
    for key, kind in NUMBERS.items():
        if key in fields:
            try:
                fields[key] = kind(fields[key])
            except ValueError:
                raise ConfigError(f"{fields[key]!r} is not a number", field=f"--model {name}: {key}") from None
    return name, fields


PART = SharingPart()


def with_policies(config: SharingConfig, given: Given, traces: Mapping[str, Trace]) -> SharingConfig:
    """Return `config` with the eviction policies that were given, for all models or for one. Raise ConfigError.

    `traces`: the requests of the models, where they are known beforehand.
    """
    models = dict(config.models)
    for name, share in config.models.items():
        own = f"{MODELS}.{name}.{EVICTION}"
        key = own if own in given else EVICTION
        if key in given:
            models[name] = with_policy(share, given, traces.get(name), key)
    return msgspec.structs.replace(config, models=models)


def render_shared_table(summary: dict[str, Any]) -> Document:
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
        ("prefix hits", lambda model: as_hits(model["prefix_hit_ratio"])),
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
    lines: list[str | Table] = [
        f"{len(models)} models on {where}, {split}: {whole}{' each' if devices else ''}",
        "",
        Table(
            [Column("", 13, is_text=True), *(Column(_fit(name), WIDTH) for name in models)],
            [[title, *map(value, models.values())] for title, value in rows],
        ),
    ]
    rate = number(total["output_throughput_tokens_per_s"])
    busy = f"{as_duration(total['duration_ms'])}, computing {as_percent(total['busy_pct'])} of it"
    lines += ["", *_promise(total), f"fairness     {_fairness(total)}", f"duration     {busy}; {rate} out tokens/s"]
    for place, device in enumerate(devices):
        counts = f"{device['num_requests']:,} requests, computing {as_percent(device['busy_pct'])} of the time"
        rate = number(device["output_throughput_tokens_per_s"])
        lines += [f"{f'device {place}':<13}{counts}; {rate} out tokens/s", *_loans(device)]
    if not devices:
        lines += _loans(total)
    return Document.of(lines)


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
        self.config = with_policies(self.config, self._given, traces)
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
        self._published: Any = None
        models = [name for name in config.configs for _ in range(config.each.replicas)]
        engines = [config.configs[name] for name in models]
        self._published = kv_events.publishing_of(engines, places, {"several": "--model"}, models)
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
            published = None if self._published is None else stack.enter_context(self._published.observers())
            for place, (name, outputs) in enumerate(self._outputs.items()):
                of_replica = stack.enter_context(outputs.observers())
                first = place * self._num_replicas
                for number in range(self._num_replicas):
                    publisher = () if published is None else published(first + number)
                    observers[name, number] = [*of_replica(number), *publisher]
                observers[name] = observers[name, 0]
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
            if self._as_json:
                print_bytes(report.to_json())
            else:
                print_text(render_shared_table(report.summary))

"""The part of `kvarts replay` for several models on one device."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import click
import msgspec

from kvarts.cli.options import DERIVED, GroupedOption
from kvarts.cli.parts import CommandPart, ReplayRun
from kvarts.errors import ConfigError
from kvarts.settings import Flags, Given, Section, setting, settings_of
from kvarts.sharing.config import SECTIONS, ModelShare, SharingConfig
from kvarts.sim.hardware import DeviceSettings, ModelSettings

__all__ = ["PART", "parse_share"]

MODELS = "models"
TITLE = "Several models"
NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"


class ModelTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a table [models.NAME] in addition to those of a model."""

    trace: Annotated[str | None, setting("Path of its trace, relative to this file.", flag=None)] = None


class SharingPart(CommandPart):
    """Names of models, their traces, and settings of the shared device."""

    of_one_model = False
    sections = (*SECTIONS, Section(struct=ModelTraffic, title=TITLE, table=MODELS, is_named=True))

    def options(self) -> Sequence[click.Option]:
        """Return `--model`, which may be repeated for several models, `--trace` and `--loans`."""
        (model,) = (each for each in settings_of(ModelSettings) if each.key == "model")
        several = (
            " Several models on one device: --model NAME=MODEL for each, and after a colon its weight=2, floor=100, "
            "ceiling=800 (per mille of the time), guarantee=20GiB or 0.3, priority=1, weight_dtype=fp8, "
            "kv_dtype=fp8, cost=FILE, kv_groups=all."
        )
        return (
            GroupedOption(
                ["--model", "models"], group="Model and device", default=None, multiple=True, metavar="NAME",
                help=model.help + several,
            ),
            GroupedOption(
                ["--trace", "traces"], group=TITLE, multiple=True, metavar="NAME=FILE",
                help="The traffic of one.",
            ),
            GroupedOption(
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
                self._add(given, name, fields, ModelShare, f"--model {name}")
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
            self._add(given, name, {"trace": path}, ModelTraffic, f"--trace {name}", is_model=False)
        return given

    def _add(
        self,
        given: Given,
        name: str,
        fields: dict[str, Any],
        struct: type[msgspec.Struct],
        flag: str,
        *,
        is_model: bool = True,
    ) -> None:
        settings = {each.field: each for each in settings_of(struct, f"{MODELS}.{name}")}
        spellings = {each.key: f"{flag}: {each.field}" if is_model else flag for each in settings.values()}
        source = Flags({**spellings, f"[{MODELS}.{name}]": flag})
        if is_model:
            given.add_name(MODELS, name, source)
        for field, value in fields.items():
            given.add(settings[field], value, source)

    def run(
        self, given: Given, trace: Path | None, sections: Sequence[Section], places: dict[str, Any]
    ) -> ReplayRun | None:
        """Return the run if models have names. Raise ConfigError if only settings of sharing are given."""
        loans_file = places.pop("loans_file")
        if given.names(MODELS):
            from kvarts.cli.sharing_run import SharedRun

            return SharedRun(given, trace, sections, loans_file)
        of_device = settings_of(DeviceSettings)
        own = [each.key for each in settings_of(SharingConfig) if each not in of_device]
        why, hint = "is for several models on one device", "Give --model NAME=MODEL for each of them."
        for key in (*given.in_table(MODELS), *own):
            if key in given:
                raise given.error(key, why, hint=hint)
        if loans_file is not None:
            raise ConfigError(why, field="--loans", hint=hint)
        return None


def parse_share(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name in a text such as `chat=llama-3.1-8b:weight=2,guarantee=20GiB`, and the fields of its ModelShare.

    Raise ConfigError for an unknown field, or one that must be a number and is not.
    """
    known = [each.field for each in settings_of(ModelShare)]
    name, equals, rest = text.partition("=")
    if not equals or not re.fullmatch(NAME, name):
        raise ConfigError(
            f"{text!r} is not NAME=MODEL",
            field="--model",
            hint="With several models: --model chat=llama-3.1-8b:weight=2.",
        )
    model, _, options = rest.partition(":")
    fields: dict[str, Any] = {"model": model} if model else {}
    for part in filter(None, options.split(",")):
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
    numbers = {"weight": float, "floor": int, "ceiling": int, "priority": int, "kv_bytes_per_token": int}
    for key, number in numbers.items():
        if key in fields:
            try:
                fields[key] = number(fields[key])
            except ValueError:
                raise ConfigError(f"{fields[key]!r} is not a number", field=f"--model {name}: {key}") from None
    return name, fields


PART = SharingPart()
